// A packed extent row, as ckptfs/layout.py EXTENT_ROW has it (docs/format.md). Little-endian, as every supported host.
#pragma once

#include <bit>
#include <cstdint>

namespace ckptfs {

struct [[gnu::packed]] ExtentRow {
  uint64_t file_offset_bytes;
  uint32_t length_bytes;
  uint32_t skip_bytes;
  uint16_t device_index;
  uint16_t flags;
  uint32_t stored_length_bytes;
  uint64_t device_offset_bytes;
  uint64_t checksum;
};
static_assert(sizeof(ExtentRow) == 40);
static_assert(std::endian::native == std::endian::little);

}  // namespace ckptfs
