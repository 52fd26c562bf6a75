// What the data plane has to tell the control plane: a queue with an eventfd.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common.hpp"

namespace ckptfs {

// The kinds and their fields are listed in ckptfs/_native.pyi.
enum class EventKind {
  sealed,
  flush,
  fsync,
  fsyncdir,
  sync_write,
  interrupt,
  grant_wanted,
  no_room,
  kill_suidgid,
  page_cache_wanted,
  device_error,
  bad_checksum,
  initialised,
  disconnected,
};

struct Event {
  EventKind kind;
  std::array<uint64_t, 6> numbers{};
  std::string bytes;  // sealed: the rows; device_error: the operation
};

class EventQueue {
 public:
  EventQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) throw_errno("eventfd");
  }
  ~EventQueue() { close(fd_); }
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  int fd() const { return fd_; }

  void push(EventKind kind, std::array<uint64_t, 6> numbers = {}, std::string bytes = {}) {
    {
      const std::lock_guard lock(mutex_);
      events_.push_back({kind, numbers, std::move(bytes)});
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
  }

  std::vector<Event> take() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof count);
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  int fd_;
  std::mutex mutex_;           // a leaf: nothing is locked inside it
  std::vector<Event> events_;  // GUARDED_BY(mutex_)
};

}  // namespace ckptfs
