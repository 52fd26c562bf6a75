// The FUSE kernel protocol, with what is newer than the 7.38 of Debian 12's linux/fuse.h.
#pragma once

#include <linux/fuse.h>

#include <cstddef>
#include <cstdint>

namespace ckptfs {

// flags2 of INIT, as bits 32.. of one 64-bit word.
inline constexpr uint64_t kInitDirectIoAllowMmap = 1ull << 36;  // Linux 6.6, protocol 7.39

// Flags of an OPEN reply.
inline constexpr uint32_t kOpenParallelDirectWrites = 1u << 6;  // Linux 6.2, protocol 7.38

// Flag of a READ: made for a caller's own buffer, not to fill the page cache.
inline constexpr uint32_t kReadForCaller = FUSE_READ_LOCKOWNER;

inline constexpr uint32_t kWriteCache = 1u << 0;      // FUSE_WRITE_CACHE: a write-back, without an owner
inline constexpr uint32_t kWriteKillSetId = 1u << 2;  // FUSE_WRITE_KILL_SUIDGID, protocol 7.31

// The fixed part in front of a WRITE's payload.
inline constexpr size_t kWriteHeaderBytes = sizeof(fuse_in_header) + sizeof(fuse_write_in);
static_assert(kWriteHeaderBytes == 80);
static_assert(sizeof(fuse_init_out) == 64);

const char* opcode_name(uint32_t opcode);

}  // namespace ckptfs
