#include "parked_writes.hpp"

#include <algorithm>
#include <utility>

namespace ckptfs {

ParkedWrites::ParkedWrites(size_t most_slots, Attempt attempt, Release release)
    : most_slots_(most_slots), attempt_(std::move(attempt)), release_(std::move(release)) {}

void ParkedWrites::start() {
  thread_ = std::thread([this] { run(); });
}

void ParkedWrites::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  reserve_freed_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (WriteRequest& request : std::exchange(queue_, {})) release_(request);
}

void ParkedWrites::add(WriteRequest request) {
  const std::lock_guard lock(mutex_);
  held_slots_ += request.slots.size();
  queue_.push_back(std::move(request));
  ++count_;
  ++wakes_;  // what it waits for may have come free between its attempt and now
  changed_.notify_one();
}

bool ParkedWrites::remove(uint64_t unique) {
  WriteRequest request;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(queue_, unique, &WriteRequest::unique);
    if (found == queue_.end()) return false;
    request = std::move(*found);
    queue_.erase(found);
    held_slots_ -= request.slots.size();
    --count_;
    ++wakes_;  // the next one may fit
  }
  changed_.notify_one();
  reserve_freed_.notify_all();
  release_(request);
  return true;
}

void ParkedWrites::wake() {
  if (empty()) return;
  const std::lock_guard lock(mutex_);
  ++wakes_;
  changed_.notify_one();
}

void ParkedWrites::expire() {
  const std::lock_guard lock(mutex_);
  for (WriteRequest& request : queue_) request.expired = true;
  attempt_expired_ = true;
  ++wakes_;
  changed_.notify_one();
}

void ParkedWrites::wait_for_reserve() {
  std::unique_lock lock(mutex_);
  reserve_freed_.wait(lock, [this] { return stopping_ || held_slots_ < most_slots_; });
}

void ParkedWrites::run() {
  std::unique_lock lock(mutex_);
  uint64_t seen_wakes = 0;
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || (!queue_.empty() && wakes_ != seen_wakes); });
    if (stopping_) return;
    seen_wakes = wakes_;
    while (!queue_.empty() && !stopping_) {
      WriteRequest request = std::move(queue_.front());
      queue_.pop_front();
      const size_t slots = request.slots.size();
      attempt_expired_ = false;
      lock.unlock();
      const bool answered = attempt_(request);
      if (answered) release_(request);
      lock.lock();
      if (!answered) {
        request.expired = request.expired || attempt_expired_;
        queue_.push_front(std::move(request));
        break;
      }
      --count_;
      held_slots_ -= slots;
      reserve_freed_.notify_all();
    }
  }
}

}  // namespace ckptfs
