// The flush engine: one thread that checksums, places and writes extents.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "io_engine.hpp"
#include "staging.hpp"

namespace ckptfs {

class Flusher {
 public:
  Flusher(Staging& staging, Space& space, EventQueue& events, IoEngine& engine, size_t device_count);
  void start();
  void stop();
  void wake() { engine_.wake(); }

 private:
  struct Write;
  struct PartWrite;

  void run();
  void start_writes();
  bool start_write(const ExtentRef& extent);
  void finish_part(PartWrite* part, int error);
  void finish(std::unique_ptr<Write> write);

  Staging& staging_;
  Space& space_;
  EventQueue& events_;
  IoEngine& engine_;
  size_t device_count_;
  size_t in_flight_ = 0;  // owned by the thread
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ckptfs
