#include "staging.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "extent_row.hpp"
#include "reader.hpp"

namespace ckptfs {

namespace {

// Kept free and warm ahead of the writers: touching memory for the first time costs several times a copy.
constexpr uint64_t kWarmAheadBytes = 512 << 20;
constexpr uint64_t kPopulatedAtStartBytes = 48 << 20;
constexpr auto kIdlePeriod = std::chrono::seconds(60);

}  // namespace

Extent::~Extent() { staging_.retire(*this); }

Staging::Staging(uint64_t limit_bytes, Space& space, EventQueue& events)
    : space_(space), events_(events), arena_(limit_bytes) {}

void Staging::start() {
  Lock held(mutex_);
  while (arena_.populated_bytes() < std::min(kPopulatedAtStartBytes, arena_.limit_bytes()) && !population_failed_) {
    populate_next(held);
  }
  if (arena_.populated_bytes() == 0) throw std::runtime_error("there is no memory for the staging area");
  grower_ = std::thread([this] { grow(); });
}

void Staging::stop() {
  stopping_ = true;
  {
    const Lock held(mutex_);
    memory_freed_.notify_all();
    grower_wanted_.notify_all();
  }
  if (grower_.joinable()) grower_.join();
}

void Staging::abandon_seals() {
  decltype(seals_) abandoned;  // dropped after the lock is
  const Lock held(mutex_);
  abandoned.swap(seals_);
  for (const auto& [key, seal] : abandoned) {
    for (const SealedRange& range : seal->ranges) range.extent->seals.clear();
  }
}

StagingCounters Staging::counters() {
  const Lock held(mutex_);
  return {arena_.limit_bytes(), arena_.populated_bytes(), arena_.populated_bytes() - arena_.free_bytes(), dirty_bytes_};
}

// Memory

std::byte* Staging::allocate(const Lock& held, unsigned order) {
  ++activity_;
  std::byte* block = arena_.allocate(order);
  while (block == nullptr && !cache_.empty()) {
    Extent& oldest = *cache_.front();
    delist(oldest);
    drop_memory(oldest);
    block = arena_.allocate(order);
  }
  if (block == nullptr) freeze_all_filling(held);
  if (wants_growth()) grower_wanted_.notify_one();
  return block;
}

// Clean extents give way at once, so they count as free: reads alone never make the arena grow.
bool Staging::wants_growth() const {
  return arena_.free_bytes() + cached_bytes_ < kWarmAheadBytes && arena_.populated_bytes() < arena_.limit_bytes() &&
         !population_failed_;
}

void Staging::free(const Lock&, std::byte* block, unsigned order) { arena_.free(block, order); }

std::byte* Staging::wait_for_slot() {
  Lock held(mutex_);
  std::byte* slot = allocate(held, kSlotOrder);
  while (slot == nullptr && !stopping_) {
    memory_freed_.wait_for(held, std::chrono::seconds(1));
    slot = allocate(held, kSlotOrder);
  }
  return slot;
}

void Staging::notify_memory() {
  memory_freed_.notify_all();
  wake_memory_waiters();
}

void Staging::drop_memory(Extent& extent) {
  arena_.free(extent.memory, extent.order);
  extent.memory = nullptr;
}

void Staging::enlist(std::list<Extent*>& list, Extent& extent) {
  extent.list = &list;
  if (&list == &cache_) cached_bytes_ += kBlockBytes << extent.order;
  extent.list_position = list.insert(list.end(), &extent);
}

void Staging::delist(Extent& extent) {
  if (extent.list == nullptr) return;
  if (extent.list == &cache_) cached_bytes_ -= kBlockBytes << extent.order;
  extent.list->erase(extent.list_position);
  extent.list = nullptr;
}

void Staging::settle(Extent& extent) {
  if (extent.state == Extent::State::clean && extent.memory != nullptr && extent.pins == 0 && !extent.loading &&
      extent.list == nullptr) {
    enlist(cache_, extent);
  }
}

void Staging::retire(Extent& extent) {
  bool freed = false;
  {
    const Lock held(mutex_);
    delist(extent);
    if (extent.memory != nullptr) {
      if (extent.state != Extent::State::clean) dirty_bytes_ -= kBlockBytes << extent.order;
      drop_memory(extent);
      freed = true;
    }
  }
  if (extent.reserved_bytes > 0) space_.unreserve(extent.reserved_bytes);
  if (!extent.sealed) {
    for (const Part& part : extent.parts) {
      space_.give_back(
          {part.device_index, part.offset_bytes, static_cast<uint32_t>(round_up(part.length_bytes, kBlockBytes))});
      freed = true;
    }
  }
  if (freed || extent.reserved_bytes > 0) notify_memory();
}

// Filling and writing

ExtentRef Staging::begin_filling(const Lock& held, unsigned order) {
  std::byte* block = allocate(held, order);
  return block == nullptr ? nullptr : fill(block, order);
}

ExtentRef Staging::adopt_slot(const Lock& held, std::byte* slot, uint32_t length_bytes) {
  ExtentRef extent = fill(slot, kSlotOrder);
  extent->length_bytes = length_bytes;
  extent->reserved_bytes = static_cast<uint32_t>(round_up(length_bytes, kBlockBytes));
  if (length_bytes == kSlotBytes) freeze(held, *extent, false);
  return extent;
}

ExtentRef Staging::fill(std::byte* block, unsigned order) {
  auto extent = std::make_shared<Extent>(*this);
  extent->state = Extent::State::filling;
  extent->memory = block;
  extent->order = static_cast<uint8_t>(order);
  dirty_bytes_ += kBlockBytes << order;
  enlist(filling_, *extent);
  return extent;
}

void Staging::enqueue(Extent& extent, bool urgent) {
  extent.urgent = extent.urgent || urgent;
  (urgent ? urgent_queue_ : queue_).push_back(extent.weak_from_this());
}

void Staging::freeze(const Lock&, Extent& extent, bool urgent) {
  if (extent.state == Extent::State::filling) {
    delist(extent);
    extent.state = Extent::State::queued;
    if (const unsigned order = order_for(extent.length_bytes); order < extent.order) {
      arena_.shrink(extent.memory, extent.order, order);
      dirty_bytes_ -= (kBlockBytes << extent.order) - (kBlockBytes << order);
      extent.order = static_cast<uint8_t>(order);
    }
    enqueue(extent, urgent);
  } else if (extent.state == Extent::State::queued && urgent && !extent.urgent) {
    enqueue(extent, true);
  } else {
    return;
  }
  wake_flusher();
}

void Staging::freeze_all_filling(const Lock& held) {
  for (auto position = filling_.begin(); position != filling_.end();) {
    Extent& extent = **position;
    ++position;  // freezing takes it out of the list
    if (!extent.copying && extent.length_bytes > 0) freeze(held, extent, false);
  }
}

ExtentRef Staging::next_to_write() {
  std::vector<ExtentRef> skipped;  // dropped after the lock is
  const Lock held(mutex_);
  for (auto* queue : {&urgent_queue_, &queue_}) {
    while (!queue->empty()) {
      ExtentRef extent = queue->front().lock();
      queue->pop_front();
      if (extent == nullptr) continue;
      if (extent->state == Extent::State::queued) {
        extent->state = Extent::State::writing;
        return extent;
      }
      skipped.push_back(std::move(extent));
    }
  }
  return nullptr;
}

void Staging::put_back(const ExtentRef& extent) {
  const Lock held(mutex_);
  extent->state = Extent::State::queued;
  (extent->urgent ? urgent_queue_ : queue_).push_front(extent);
}

void Staging::finish_write(const ExtentRef& extent, std::vector<Part> parts, int error) {
  std::vector<std::shared_ptr<SealInFlight>> finished;
  {
    const Lock held(mutex_);
    if (error == 0) {
      extent->parts = std::move(parts);
      extent->reserved_bytes = 0;
      extent->state = Extent::State::clean;
      dirty_bytes_ -= kBlockBytes << extent->order;
      settle(*extent);
    } else {
      extent->state = Extent::State::failed;
    }
    for (SealInFlight* seal : std::exchange(extent->seals, {})) {
      if (seal->error == 0) seal->error = error;
      if (--seal->pending == 0) finished.push_back(std::move(seals_.extract(seal).mapped()));
    }
  }
  for (const auto& seal : finished) send(*seal, seal->error);
  if (error == 0) notify_memory();
}

void Staging::watch_seal(const std::shared_ptr<SealInFlight>& seal) {
  int error = 0;
  {
    const Lock held(mutex_);
    for (const SealedRange& range : seal->ranges) {
      Extent& extent = *range.extent;
      extent.sealed = true;
      if (extent.state == Extent::State::clean) continue;
      if (extent.state == Extent::State::failed) {
        seal->error = EIO;
        continue;
      }
      if (!extent.seals.empty() && extent.seals.back() == seal.get()) continue;  // several ranges of one extent
      freeze(held, extent, true);
      extent.seals.push_back(seal.get());
      ++seal->pending;
    }
    if (seal->pending > 0) {
      seals_[seal.get()] = seal;
      return;
    }
    error = seal->error;
  }
  send(*seal, error);
}

void Staging::send(const SealInFlight& seal, int error) {
  events_.push(EventKind::sealed, {seal.seal_id, static_cast<uint64_t>(error)},
               error == 0 ? pack_rows(seal.ranges) : std::string());
}

// Reading

bool Staging::pin(const Lock&, Extent& extent) {
  if (extent.memory == nullptr || extent.loading) return false;
  ++extent.pins;
  if (extent.list == &cache_) delist(extent);
  return true;
}

void Staging::unpin(const Lock&, Extent& extent) {
  if (--extent.pins == 0) settle(extent);
}

bool Staging::begin_load(const Lock& held, Extent& extent) {
  const unsigned order = order_for(extent.length_bytes);
  extent.memory = allocate(held, order);
  if (extent.memory == nullptr) return false;
  extent.order = static_cast<uint8_t>(order);
  extent.loading = true;
  return true;
}

void Staging::finish_load(const Lock&, Extent& extent, bool ok) {
  extent.loading = false;
  if (!ok) {
    drop_memory(extent);
  } else {
    settle(extent);
  }
}

// Growing and shrinking

void Staging::populate_next(Lock& held) {
  size_t chunk = 0;
  while (chunk < arena_.chunk_count() && arena_.present(chunk)) ++chunk;
  if (chunk == arena_.chunk_count()) return;
  held.unlock();
  const bool populated = arena_.populate(chunk);
  if (populated) register_chunk(chunk);
  held.lock();
  population_failed_ = !populated;
  if (populated) arena_.add(chunk);
}

void Staging::shrink_idle(Lock& held) {
  for (size_t chunk = arena_.chunk_count(); chunk-- > 0;) {
    if (arena_.populated_bytes() <= kWarmAheadBytes) return;
    if (!arena_.present(chunk) || !arena_.remove(chunk)) continue;
    held.unlock();
    unregister_chunk(chunk);
    arena_.discard(chunk);
    held.lock();
  }
}

void Staging::grow() {
  Lock held(mutex_);
  uint64_t seen_activity = activity_;
  while (!stopping_) {
    if (wants_growth()) {
      populate_next(held);
      held.unlock();
      notify_memory();
      held.lock();
      continue;
    }
    const bool timed_out = grower_wanted_.wait_for(held, kIdlePeriod) == std::cv_status::timeout;
    if (timed_out && activity_ == seen_activity) shrink_idle(held);
    if (timed_out) population_failed_ = false;
    seen_activity = activity_;
  }
}

std::string pack_rows(const std::vector<SealedRange>& ranges) {
  std::string rows;
  for (const SealedRange& range : ranges) {
    for (const Part& part : range.extent->parts) {
      const uint32_t start = std::max(range.skip_bytes, part.skip_bytes);
      const uint32_t end = std::min(range.skip_bytes + range.length_bytes, part.skip_bytes + part.length_bytes);
      if (start >= end) continue;
      const ExtentRow row{range.file_offset_bytes + (start - range.skip_bytes),
                          end - start,
                          start - part.skip_bytes,
                          static_cast<uint16_t>(part.device_index),
                          0,
                          part.length_bytes,
                          part.offset_bytes,
                          part.checksum};
      rows.append(reinterpret_cast<const char*>(&row), sizeof row);
    }
  }
  return rows;
}

}  // namespace ckptfs
