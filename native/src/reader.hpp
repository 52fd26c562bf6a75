// Reads: from memory at once, from the devices through a thread of its own that checks every checksum (P5).
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "file.hpp"
#include "io_engine.hpp"
#include "staging.hpp"

namespace ckptfs {

// Where wrong bytes were found.
struct Damage {
  unsigned device_index;
  uint64_t device_offset_bytes;
  uint32_t length_bytes;
  uint32_t skip_bytes;  // in the extent
};

struct ReadRequest {
  std::shared_ptr<File> file;
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;
  bool for_page_cache = false;
  // Called once, from any thread and without locks, with 0 and the bytes, or an errno.
  std::function<void(int error, const std::vector<iovec>& data)> done;

  std::vector<ReadRange> ranges;
  size_t pending = 0;                // GUARDED_BY(Staging::mutex); extents still to be loaded
  int error = 0;                     // GUARDED_BY(Staging::mutex)
  bool damaged = false;              // GUARDED_BY(Staging::mutex)
  Damage damage{};                   // GUARDED_BY(Staging::mutex)
  uint64_t damage_offset_bytes = 0;  // in the file
  bool second_try = false;
};

class Reader {
 public:
  Reader(Staging& staging, Space& space, EventQueue& events, IoEngine& engine, size_t device_count);
  void start();
  void stop();

  // Answers now if everything is in memory, else when the devices have delivered.
  void read(std::shared_ptr<ReadRequest> request);

 private:
  struct Load;
  struct PartLoad;

  void note_habit(File& file, const ReadRequest& request);
  std::vector<ExtentRef> gather(const std::shared_ptr<ReadRequest>& request);
  void load(const std::shared_ptr<ReadRequest>& request, std::vector<ExtentRef> missing);
  void answer(const std::shared_ptr<ReadRequest>& request);
  void prefetch(File& file, uint64_t from_bytes);
  void want(std::vector<ExtentRef> extents);
  void run();
  void start_loads();
  bool start_load(const ExtentRef& extent);
  void start_load_in_reserve(const ExtentRef& extent);
  void submit_parts(const ExtentRef& extent, std::byte* memory);
  void submit(PartLoad& load);
  void finish_part(PartLoad* part, int error);
  void finish(std::unique_ptr<Load> load);

  Staging& staging_;
  Space& space_;
  EventQueue& events_;
  IoEngine& engine_;
  uint64_t prefetch_bytes_;
  std::mutex mutex_;              // a leaf
  std::deque<ExtentRef> wanted_;  // GUARDED_BY(mutex_)
  size_t in_flight_ = 0;          // owned by the thread
  std::byte* reserve_ = nullptr;  // owned by the thread: a slot, so that want of memory never stops reads
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ckptfs
