// Staging: extents in memory, their life from a write to a device and back, and the memory they live in.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "arena.hpp"
#include "events.hpp"
#include "space.hpp"

namespace ckptfs {

class Staging;
class Extent;
struct SealInFlight;
struct ReadRequest;
using ExtentRef = std::shared_ptr<Extent>;

// Where a part of an extent lies on a device. An extent has one part, or several where free space is in pieces.
struct Part {
  unsigned device_index;
  uint64_t offset_bytes;
  uint32_t skip_bytes;    // where in the extent the part begins
  uint32_t length_bytes;  // valid bytes; device space is this, rounded up to blocks
  uint64_t checksum;
};

struct WaitingRead {
  std::shared_ptr<ReadRequest> request;
  size_t range_index;
};

// Up to a slot of one file's bytes. Life: filling -> queued -> writing -> clean (on its devices; memory is a
// cache from then on) or failed. Committed extents start clean and without memory.
//
// Ownership: pieces of file maps, seals in flight, reads and writes hold an ExtentRef. With the last one the
// memory and, unless a seal has named it, the device space go back.
class Extent : public std::enable_shared_from_this<Extent> {
 public:
  enum class State : uint8_t { filling, queued, writing, clean, failed };

  explicit Extent(Staging& staging) : staging_(staging) {}
  ~Extent();
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;

  // All GUARDED_BY(Staging::mutex). `memory`, once read while pinned or as the only writer, stays valid.
  State state = State::clean;
  bool urgent = false;                 // a seal waits for it
  bool sealed = false;                 // named by a seal: its device space is the control plane's
  bool loading = false;                // a device read into its memory is under way
  bool load_wanted = false;            // it waits for one
  bool copying = false;                // a writer is adding bytes: not to be frozen for want of memory
  std::list<Extent*>* list = nullptr;  // the list it is in: filling, or clean and evictable
  uint8_t order = 0;                   // of the memory block
  uint32_t pins = 0;                   // reads and copies in progress: the memory must stay
  uint32_t length_bytes = 0;
  uint32_t reserved_bytes = 0;  // device space promised and not yet placed
  std::byte* memory = nullptr;
  std::vector<Part> parts;           // fixed once clean
  unsigned write_tries = 0;          // owned by the flusher
  std::vector<SealInFlight*> seals;  // to tell when it is clean
  std::vector<WaitingRead> readers;  // to tell when it is loaded
  std::list<Extent*>::iterator list_position;

 private:
  Staging& staging_;
};

// One range of a sealed version that is new since the seal before.
struct SealedRange {
  uint64_t file_offset_bytes;
  uint32_t length_bytes;
  uint32_t skip_bytes;
  ExtentRef extent;
};

struct SealInFlight {
  uint64_t seal_id;
  std::vector<SealedRange> ranges;  // fixed before the first extent can finish
  size_t pending = 0;               // GUARDED_BY(Staging::mutex)
  int error = 0;                    // GUARDED_BY(Staging::mutex)
};

struct StagingCounters {
  uint64_t limit_bytes;
  uint64_t populated_bytes;
  uint64_t used_bytes;
  uint64_t dirty_bytes;
};

// Lock order: File::mutex, then Staging::mutex, then the leaves (Space, EventQueue). No thread waits for a
// device, for memory or for Python while it holds one of them. ExtentRefs are dropped outside Staging::mutex,
// because the last one takes it.
class Staging {
 public:
  Staging(uint64_t limit_bytes, Space& space, EventQueue& events);

  // Both of these need mutex held, which is why they take the lock as witness.
  using Lock = std::unique_lock<std::mutex>;
  Lock lock() { return Lock(mutex_); }

  // A block, evicting clean extents if need be; nullptr when all memory is dirty, pinned or not yet populated.
  std::byte* allocate(const Lock& held, unsigned order);
  void free(const Lock& held, std::byte* block, unsigned order);
  // A block that is wanted: waits until one can be had, or until stop(). For landing slots only.
  std::byte* wait_for_slot();

  // The same in a slot that already holds length_bytes of a write.
  ExtentRef adopt_slot(const Lock& held, std::byte* slot, uint32_t length_bytes);

  // filling -> queued, trimming memory that it does not use.
  void freeze(const Lock& held, Extent& extent, bool urgent);
  // Extents that wait for more bytes wait no longer, because memory is wanted or somebody asked.
  void freeze_all_filling(const Lock& held);
  // A new extent to fill, in a block of that order. nullptr when no memory is to be had.
  ExtentRef begin_filling(const Lock& held, unsigned order);
  // The next extent to write, set to writing; nullptr when there is none. Extents that died meanwhile are skipped.
  ExtentRef next_to_write();
  // The flusher could not place it now: back to the front.
  void put_back(const ExtentRef& extent);
  // error 0: on its devices, barriers aside.
  void finish_write(const ExtentRef& extent, std::vector<Part> parts, int error);

  // Starts a seal's watch on its extents. Sends the event at once when all are clean already.
  void watch_seal(const std::shared_ptr<SealInFlight>& seal);

  // Pins an extent's memory if it has any (true); else the caller must load it.
  bool pin(const Lock& held, Extent& extent);
  void unpin(const Lock& held, Extent& extent);
  // A load begins: gives the extent memory. False when there is none now.
  bool begin_load(const Lock& held, Extent& extent);
  void finish_load(const Lock& held, Extent& extent, bool ok);

  // Hooks, set once before any thread starts.
  std::function<void()> wake_flusher;
  std::function<void()> wake_memory_waiters;
  std::function<bool(size_t chunk)> register_chunk;
  std::function<void(size_t chunk)> unregister_chunk;

  void start();
  void stop();
  // REQUIRES: no thread writes any more. Seals that were not finished are forgotten, and let their extents go.
  void abandon_seals();
  StagingCounters counters();
  Space& space() { return space_; }
  Arena& arena() { return arena_; }
  bool stopping() const { return stopping_.load(); }
  // Wakes everybody who waits for memory.
  void notify_memory();

 private:
  friend class Extent;
  void retire(Extent& extent);  // from the destructor
  void drop_memory(Extent& extent);
  ExtentRef fill(std::byte* block, unsigned order);
  void enlist(std::list<Extent*>& list, Extent& extent);
  void delist(Extent& extent);
  void settle(Extent& extent);  // into the cache when it may be evicted
  void enqueue(Extent& extent, bool urgent);
  void send(const SealInFlight& seal, int error);
  bool wants_growth() const;
  void grow();
  void populate_next(Lock& held);
  void shrink_idle(Lock& held);

  Space& space_;
  EventQueue& events_;
  std::mutex mutex_;
  Arena arena_;                                     // GUARDED_BY(mutex_)
  std::list<Extent*> cache_;                        // GUARDED_BY(mutex_); oldest first
  std::deque<std::weak_ptr<Extent>> urgent_queue_;  // GUARDED_BY(mutex_)
  std::deque<std::weak_ptr<Extent>> queue_;         // GUARDED_BY(mutex_)
  std::list<Extent*> filling_;                      // GUARDED_BY(mutex_)
  // Seals with extents still to be written. Extents point back to them, so nobody else may own them.
  std::unordered_map<SealInFlight*, std::shared_ptr<SealInFlight>> seals_;  // GUARDED_BY(mutex_)
  uint64_t dirty_bytes_ = 0;                                                // GUARDED_BY(mutex_)
  uint64_t cached_bytes_ = 0;       // GUARDED_BY(mutex_); memory of the extents in cache_
  uint64_t activity_ = 0;           // GUARDED_BY(mutex_); counts allocations
  bool population_failed_ = false;  // GUARDED_BY(mutex_)
  std::condition_variable memory_freed_;
  std::condition_variable grower_wanted_;
  std::atomic<bool> stopping_{false};
  std::thread grower_;
};

// Packed extent rows (ckptfs/layout.py EXTENT_ROW) of the file ranges of a seal.
std::string pack_rows(const std::vector<SealedRange>& ranges);

}  // namespace ckptfs
