#include <doctest/doctest.h>

#include "harness.hpp"

namespace ckptfs::test {

namespace {

// A staging of one chunk, without threads, of which a test can use up any part.
class SmallStaging {
 public:
  SmallStaging() : space_({"device"}, events_), staging_(64 << 20, space_, events_) {
    staging_.wake_flusher = [] {};
    staging_.wake_memory_waiters = [] {};
    staging_.arena().add(0);
    space_.add_free(1 << 30);
    space_.add_free_metadata(1 << 20);
  }
  ~SmallStaging() {
    const auto held = staging_.lock();
    for (const auto& [block, order] : taken_) staging_.free(held, block, order);
  }

  Staging& staging() { return staging_; }

  // Leaves one free block.
  void leave(unsigned order) {
    const auto held = staging_.lock();
    std::byte* left = staging_.arena().allocate(order);
    for (unsigned each = kSlotOrder + 1; each-- > 0;) {
      while (std::byte* block = staging_.arena().allocate(each)) taken_.emplace_back(block, each);
    }
    staging_.free(held, left, order);
  }

 private:
  EventQueue events_;
  Space space_;
  Staging staging_;
  std::vector<std::pair<std::byte*, unsigned>> taken_;
};

}  // namespace

TEST_CASE("an extent that a write adds to is not sent to a device for want of memory meanwhile") {
  SmallStaging small;
  File file(1, small.staging());
  const std::lock_guard lock(file.mutex_);
  const std::vector<std::byte> data = pattern(6000 + 4096, 1);
  REQUIRE(file.write_small(0, data.data(), 6000) == 0);
  file.note_write(6000, 6000, {1, false, false, 1});
  small.leave(0);  // too little for the larger extent that an append would like
  REQUIRE(file.write_small(6000, data.data() + 6000, 4096) == 0);
  file.note_write(data.size(), 4096, {1, false, false, 1});
  std::vector<std::byte> read;
  for (const ReadRange& range : file.ranges(0, data.size())) {
    REQUIRE(range.extent != nullptr);
    CHECK(range.extent->state == Extent::State::filling);
    const std::byte* start = range.extent->memory + range.skip_bytes;
    read.insert(read.end(), start, start + range.length_bytes);
  }
  CHECK(read == data);
}

}  // namespace ckptfs::test
