// Sizes, clocks and small helpers shared by the whole data plane.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>

namespace ckptfs {

inline constexpr uint64_t kBlockBytes = 4096;
inline constexpr uint64_t kSlotBytes = 1 << 20;  // a slot: the largest extent, and the largest buddy block
inline constexpr unsigned kSlotOrder = 8;        // kSlotBytes == kBlockBytes << kSlotOrder
static_assert(kBlockBytes << kSlotOrder == kSlotBytes);

// A write of more than this makes a file a checkpoint rather than a log (design P3).
inline constexpr uint64_t kLargestLogWriteBytes = 64 << 10;

constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }

inline int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

[[noreturn]] inline void throw_errno(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace ckptfs
