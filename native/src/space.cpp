#include "space.hpp"

#include <algorithm>

namespace ckptfs {

namespace {

// Enough to keep an NVMe device busy at 1 MiB an extent, little enough to let a slow device fall behind.
constexpr uint64_t kQueueBytes = 16 << 20;
// A device that was slow or full does not get more than this all at once to catch up.
constexpr uint64_t kLargestCatchUpBytes = 32 << 20;
constexpr uint64_t kGrantLowBytes = 64 << 20;

}  // namespace

Space::Space(const std::vector<std::string>& device_names, EventQueue& events)
    : events_(events), devices_(device_names.size()) {
  for (size_t i = 0; i < device_names.size(); ++i) devices_[i].counters.name = device_names[i];
}

bool Space::reserve(uint64_t length_bytes, int64_t metadata_bytes) {
  const std::lock_guard lock(mutex_);
  if (free_bytes_ < length_bytes || (metadata_bytes > 0 && free_metadata_bytes_ < metadata_bytes)) return false;
  free_bytes_ -= length_bytes;
  free_metadata_bytes_ -= metadata_bytes;
  return true;
}

void Space::unreserve(uint64_t length_bytes, int64_t metadata_bytes) {
  const std::lock_guard lock(mutex_);
  free_bytes_ += length_bytes;
  free_metadata_bytes_ += metadata_bytes;
}

void Space::add_free_metadata(int64_t length_bytes) {
  const std::lock_guard lock(mutex_);
  free_metadata_bytes_ += length_bytes;
}

int64_t Space::free_metadata_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_metadata_bytes_;
}

void Space::add_free(uint64_t length_bytes) {
  const std::lock_guard lock(mutex_);
  free_bytes_ += length_bytes;
  // What was asked for in vain may be there now.
  for (DeviceSpace& device : devices_) {
    device.grant_asked = false;
    ask_for_grants(device);
  }
}

uint64_t Space::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_bytes_;
}

void Space::grant(unsigned device_index, const std::vector<std::pair<uint64_t, uint64_t>>& ranges) {
  const std::lock_guard lock(mutex_);
  DeviceSpace& device = devices_.at(device_index);
  for (const auto& [offset, length] : ranges) {
    device.ranges.push_back({offset, length});
    device.counters.granted_bytes += length;
  }
  // An empty grant means that nothing is left: do not ask again before something was freed.
  device.grant_asked = ranges.empty();
}

void Space::ask_for_grants(DeviceSpace& device) {
  if (device.counters.granted_bytes >= kGrantLowBytes || device.grant_asked) return;
  device.grant_asked = true;
  events_.push(EventKind::grant_wanted, {static_cast<uint64_t>(&device - devices_.data())});
}

Space::DeviceSpace* Space::choose() {
  DeviceSpace* best = nullptr;
  uint64_t most_assigned = 0;
  for (DeviceSpace& device : devices_) {
    most_assigned = std::max(most_assigned, device.assigned_bytes);
    if (device.ranges.empty() || device.counters.outstanding_bytes >= kQueueBytes) continue;
    if (best == nullptr || device.assigned_bytes < best->assigned_bytes) best = &device;
  }
  if (best != nullptr && best->assigned_bytes + kLargestCatchUpBytes < most_assigned) {
    best->assigned_bytes = most_assigned - kLargestCatchUpBytes;
  }
  return best;
}

std::vector<Placement> Space::place(uint64_t length_bytes) {
  const std::lock_guard lock(mutex_);
  std::vector<Placement> placements;
  uint64_t left = length_bytes;
  while (left > 0) {
    DeviceSpace* device = choose();
    if (device == nullptr) break;
    Range& range = device->ranges.front();
    const uint64_t taken = std::min(left, range.length_bytes);
    placements.push_back(
        {static_cast<unsigned>(device - devices_.data()), range.offset_bytes, static_cast<uint32_t>(taken)});
    range.offset_bytes += taken;
    range.length_bytes -= taken;
    if (range.length_bytes == 0) device->ranges.pop_front();
    left -= taken;
    device->counters.granted_bytes -= taken;
    device->counters.outstanding_bytes += taken;
    device->assigned_bytes += taken;
  }
  if (left > 0) {  // all or nothing: put it back and wait for a queue to shorten or a grant
    for (const Placement& placement : placements) take_back(placement);
    placements.clear();
  }
  for (DeviceSpace& each : devices_) ask_for_grants(each);
  return placements;
}

void Space::take_back(const Placement& placement) {
  DeviceSpace& device = devices_[placement.device_index];
  device.ranges.push_front({placement.offset_bytes, placement.length_bytes});
  device.counters.granted_bytes += placement.length_bytes;
  device.counters.outstanding_bytes -= placement.length_bytes;
  device.assigned_bytes -= std::min<uint64_t>(device.assigned_bytes, placement.length_bytes);
}

void Space::cancel(const Placement& placement) {
  const std::lock_guard lock(mutex_);
  take_back(placement);
}

void Space::give_back(const Placement& placement) {
  const std::lock_guard lock(mutex_);
  DeviceSpace& device = devices_[placement.device_index];
  device.ranges.push_back({placement.offset_bytes, placement.length_bytes});
  device.counters.granted_bytes += placement.length_bytes;
  free_bytes_ += placement.length_bytes;
}

void Space::quarantine(const Placement& placement) {
  const std::lock_guard lock(mutex_);
  free_bytes_ -= std::min<uint64_t>(free_bytes_, placement.length_bytes);
}

void Space::write_finished(const Placement& placement, bool ok) {
  const std::lock_guard lock(mutex_);
  DeviceCounters& counters = devices_[placement.device_index].counters;
  counters.outstanding_bytes -= placement.length_bytes;
  (ok ? counters.written_bytes : counters.write_errors) += ok ? placement.length_bytes : 1;
}

void Space::read_finished(unsigned device_index, uint64_t length_bytes, bool ok) {
  const std::lock_guard lock(mutex_);
  DeviceCounters& counters = devices_[device_index].counters;
  (ok ? counters.read_bytes : counters.read_errors) += ok ? length_bytes : 1;
}

void Space::count_checksum_error(unsigned device_index) {
  const std::lock_guard lock(mutex_);
  ++devices_[device_index].counters.checksum_errors;
}

std::vector<DeviceCounters> Space::counters() const {
  const std::lock_guard lock(mutex_);
  std::vector<DeviceCounters> all;
  for (const DeviceSpace& device : devices_) all.push_back(device.counters);
  return all;
}

}  // namespace ckptfs
