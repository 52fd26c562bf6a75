// Writes that found no staging memory or no device space: they wait here, in order, not in a reader thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "file.hpp"

namespace ckptfs {

struct WriteRequest {
  uint64_t unique = 0;
  uint64_t ino = 0;
  uint64_t offset_bytes = 0;
  uint32_t length_bytes = 0;
  Writer writer{};
  bool sync = false;
  bool kill_set_id = false;
  std::vector<std::byte*> slots;  // where the payload is: kSlotBytes in each but the last
  bool announced = false;         // a no_room event was sent for it
  bool expired = false;           // no more room is coming: ENOSPC if it still does not fit
};

class ParkedWrites {
 public:
  // attempt: true when the write was answered; false to try again when something has come free.
  // The payload slots belong to the request while it is parked, and are freed by release afterwards.
  using Attempt = std::function<bool(WriteRequest&)>;
  using Release = std::function<void(WriteRequest&)>;

  ParkedWrites(size_t most_slots, Attempt attempt, Release release);
  void start();
  void stop();

  void add(WriteRequest request);
  // Takes a parked write out: true when it was here, and nothing of it has been applied. One that is being
  // tried at this moment is not here.
  bool remove(uint64_t unique);
  void wake();
  void expire();
  // Blocks a reader thread while the reserve of bounce slots is used up.
  void wait_for_reserve();
  bool empty() const { return count_.load() == 0; }
  size_t count() const { return count_.load(); }

 private:
  void run();

  const size_t most_slots_;
  const Attempt attempt_;
  const Release release_;
  std::mutex mutex_;  // a leaf: attempts and releases run without it
  std::condition_variable changed_;
  std::condition_variable reserve_freed_;
  std::deque<WriteRequest> queue_;  // GUARDED_BY(mutex_)
  bool attempt_expired_ = false;    // GUARDED_BY(mutex_); expire() came while one was out of the queue
  uint64_t wakes_ = 0;              // GUARDED_BY(mutex_)
  size_t held_slots_ = 0;           // GUARDED_BY(mutex_)
  std::atomic<size_t> count_{0};
  bool stopping_ = false;  // GUARDED_BY(mutex_)
  std::thread thread_;
};

}  // namespace ckptfs
