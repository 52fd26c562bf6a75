#include "checksum.hpp"

// Inlined rather than linked: the compiler then uses the instruction set of the build, and picks the
// long-input path at run time where xxhash can (XXH3 is stable since xxhash 0.8.0).
#include <xxhash.h>

namespace ckptfs {

uint64_t checksum(const void* data, size_t length_bytes) { return XXH3_64bits(data, length_bytes); }

}  // namespace ckptfs
