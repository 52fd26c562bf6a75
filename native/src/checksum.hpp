// XXH3-64 with seed 0: the checksum of every extent (docs/format.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ckptfs {

uint64_t checksum(const void* data, size_t length_bytes);

}  // namespace ckptfs
