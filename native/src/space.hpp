// Device space: what writes may still reserve, and the free ranges to place extents in.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "common.hpp"
#include "events.hpp"

namespace ckptfs {

struct Placement {
  unsigned device_index;
  uint64_t offset_bytes;
  uint32_t length_bytes;
};

struct DeviceCounters {
  std::string name;
  uint64_t written_bytes = 0;
  uint64_t read_bytes = 0;
  uint64_t outstanding_bytes = 0;
  uint64_t write_errors = 0;
  uint64_t read_errors = 0;
  uint64_t checksum_errors = 0;
  uint64_t granted_bytes = 0;
};

// Invariant: the ranges here and in the control plane's allocator together hold at least
// free_bytes + all reservations, so a reserved write can always be placed once ranges are granted (P6).
// Reserving counts bytes; placing picks where. All lengths are multiples of kBlockBytes.
class Space {
 public:
  Space(const std::vector<std::string>& device_names, EventQueue& events);

  // Device space and room for extent rows in the metadata region (P6): both or nothing.
  bool reserve(uint64_t length_bytes, int64_t metadata_bytes = 0);
  void unreserve(uint64_t length_bytes, int64_t metadata_bytes = 0);
  void add_free(uint64_t length_bytes);
  uint64_t free_bytes() const;
  void add_free_metadata(int64_t length_bytes);
  int64_t free_metadata_bytes() const;

  void grant(unsigned device_index, const std::vector<std::pair<uint64_t, uint64_t>>& ranges);

  // Takes ranges for length_bytes, on the device that is furthest behind among those with a short queue; in
  // several pieces where free space is in pieces. Empty when every queue is long, or when ranges have run out
  // (they are then asked for).
  std::vector<Placement> place(uint64_t length_bytes);
  // A placement was not used after all: its reservation stands.
  void cancel(const Placement& placement);
  // An extent that no seal ever named is gone: its place can be used again at once, and its bytes are free.
  void give_back(const Placement& placement);
  // A write failed there: the place is not used again in this mount. The write keeps its reservation.
  void quarantine(const Placement& placement);

  void write_finished(const Placement& placement, bool ok);
  void read_finished(unsigned device_index, uint64_t length_bytes, bool ok);
  void count_checksum_error(unsigned device_index);
  std::vector<DeviceCounters> counters() const;

 private:
  struct Range {
    uint64_t offset_bytes;
    uint64_t length_bytes;
  };
  struct DeviceSpace {
    DeviceCounters counters;
    std::deque<Range> ranges;
    uint64_t assigned_bytes = 0;  // for turns: the device with the least goes next
    bool grant_asked = false;
  };
  DeviceSpace* choose();
  void take_back(const Placement& placement);
  void ask_for_grants(DeviceSpace& device);

  EventQueue& events_;
  mutable std::mutex mutex_;
  uint64_t free_bytes_ = 0;           // GUARDED_BY(mutex_)
  int64_t free_metadata_bytes_ = 0;   // GUARDED_BY(mutex_); below 0 when the control plane took more than there was
  std::vector<DeviceSpace> devices_;  // GUARDED_BY(mutex_)
};

}  // namespace ckptfs
