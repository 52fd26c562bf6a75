#include "reader.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checksum.hpp"

namespace ckptfs {

namespace {

constexpr size_t kMostInFlight = 128;
// Reads in flight may arrive out of order; within this distance they still count as one sequential run.
constexpr uint64_t kSequentialSlackBytes = 16 << 20;
constexpr uint64_t kSequentialAfterBytes = 1 << 20;
constexpr uint64_t kPrefetchPerDeviceBytes = 16 << 20;
constexpr uint64_t kMostPrefetchBytes = 64 << 20;
// A read that goes past the page cache costs a round trip of some 30 us. From so many small ones on, a cache is
// cheaper.
constexpr uint64_t kSmallReadBytes = 32 << 10;
constexpr uint32_t kManySmallReads = 512;

alignas(kBlockBytes) const std::byte zeros[kSlotBytes]{};

void append_zeros(std::vector<iovec>& data, uint64_t length_bytes) {
  while (length_bytes > 0) {
    const uint64_t part = std::min(length_bytes, kSlotBytes);
    data.push_back({const_cast<std::byte*>(zeros), part});
    length_bytes -= part;
  }
}

}  // namespace

struct Reader::PartLoad {
  Load* load;
  const Part* part;
  unsigned tries = 0;
};

struct Reader::Load {
  ExtentRef extent;
  std::byte* memory;  // the extent's, or the reserve
  std::vector<std::unique_ptr<PartLoad>> parts;
  size_t pending;
  int error = 0;
  Damage damage{};
  bool damaged = false;
};

Reader::Reader(Staging& staging, Space& space, EventQueue& events, IoEngine& engine, size_t device_count)
    : staging_(staging),
      space_(space),
      events_(events),
      engine_(engine),
      prefetch_bytes_(std::min({kPrefetchPerDeviceBytes * device_count, kMostPrefetchBytes,
                                // not the whole of a small staging
                                staging.arena().limit_bytes() / 8})) {}

void Reader::start() {
  reserve_ = staging_.wait_for_slot();
  thread_ = std::thread([this] { run(); });
}

void Reader::stop() {
  stopping_ = true;
  engine_.wake();
  if (thread_.joinable()) thread_.join();
  if (std::byte* slot = std::exchange(reserve_, nullptr); slot != nullptr) {
    const auto held = staging_.lock();
    staging_.free(held, slot, kSlotOrder);
  }
}

void Reader::read(std::shared_ptr<ReadRequest> request) {
  File& file = *request->file;
  uint64_t prefetch_from = 0;
  std::vector<ExtentRef> missing;
  {
    const std::lock_guard lock(file.mutex_);
    note_habit(file, *request);
    missing = gather(request);
    const uint64_t end_bytes = request->offset_bytes + request->length_bytes;
    const bool near = request->offset_bytes + kSequentialSlackBytes >= file.next_read_bytes_ &&
                      request->offset_bytes <= file.next_read_bytes_ + kSequentialSlackBytes;
    file.sequential_bytes_ = near ? file.sequential_bytes_ + request->length_bytes : request->length_bytes;
    file.next_read_bytes_ = near ? std::max(file.next_read_bytes_, end_bytes) : end_bytes;
    if (near && file.sequential_bytes_ >= kSequentialAfterBytes) prefetch_from = file.next_read_bytes_;
  }
  load(request, std::move(missing));
  if (prefetch_from > 0) prefetch(file, prefetch_from);
}

// Tells once of a file that is mapped (the kernel fills its page cache for it), or read in small pieces.
void Reader::note_habit(File& file, const ReadRequest& request) {
  if (request.length_bytes < kSmallReadBytes) ++file.small_reads_;
  if (file.page_cache_wanted_ || (!request.for_page_cache && file.small_reads_ < kManySmallReads)) return;
  file.page_cache_wanted_ = true;
  events_.push(EventKind::page_cache_wanted, {file.ino_});
}

// Finds the bytes, pins those in memory, and returns the extents that somebody must load. REQUIRES(File::mutex): a
// write in place waits for the mutex or, later, sees the pins, so a read never sees half of a write.
std::vector<ExtentRef> Reader::gather(const std::shared_ptr<ReadRequest>& request) {
  std::vector<ExtentRef> missing;
  request->ranges = request->file->ranges(request->offset_bytes, request->length_bytes);
  const auto held = staging_.lock();
  request->pending = 1;  // load() takes this one off
  for (size_t i = 0; i < request->ranges.size(); ++i) {
    ReadRange& range = request->ranges[i];
    const ExtentRef& extent = range.extent;
    if (extent == nullptr) continue;
    range.pinned = staging_.pin(held, *extent);
    if (range.pinned) continue;
    extent->readers.push_back({request, i});
    ++request->pending;
    if (!extent->loading && !extent->load_wanted) {
      extent->load_wanted = true;
      missing.push_back(extent);
    }
  }
  return missing;
}

// Asks for what gather() did not find in memory, and answers when nothing is left to wait for.
void Reader::load(const std::shared_ptr<ReadRequest>& request, std::vector<ExtentRef> missing) {
  want(std::move(missing));
  bool ready = false;
  {
    const auto held = staging_.lock();
    ready = --request->pending == 0;
  }
  if (ready) answer(request);
}

void Reader::answer(const std::shared_ptr<ReadRequest>& request) {
  if (request->error != 0 && !request->second_try) {
    // The file may have been replaced, and its old space reused, under this read: look at the map once more.
    auto again = std::make_shared<ReadRequest>();
    again->file = request->file;
    again->offset_bytes = request->offset_bytes;
    again->length_bytes = request->length_bytes;
    again->done = std::move(request->done);
    again->second_try = true;
    std::vector<ExtentRef> missing;
    {
      const std::lock_guard lock(again->file->mutex_);
      missing = gather(again);
    }
    load(again, std::move(missing));
  } else if (request->error != 0) {
    if (request->damaged) {
      space_.count_checksum_error(request->damage.device_index);
      events_.push(EventKind::bad_checksum,
                   {request->file->ino_, request->damage_offset_bytes, request->damage.device_index,
                    request->damage.device_offset_bytes, request->damage.length_bytes});
    }
    request->done(request->error, {});
  } else {
    std::vector<iovec> data;
    for (const ReadRange& range : request->ranges) {
      if (range.extent == nullptr) {
        append_zeros(data, range.length_bytes);
      } else {
        std::byte* memory = range.copy != nullptr ? range.copy.get() : range.extent->memory + range.skip_bytes;
        data.push_back({memory, range.length_bytes});
      }
    }
    request->done(0, data);
  }
  {
    const auto held = staging_.lock();
    for (const ReadRange& range : request->ranges) {
      if (range.pinned) staging_.unpin(held, *range.extent);
    }
  }
  staging_.notify_memory();
}

void Reader::prefetch(File& file, uint64_t from_bytes) {
  std::vector<ReadRange> ahead;
  {
    const std::lock_guard lock(file.mutex_);
    ahead = file.ranges(from_bytes, prefetch_bytes_);
  }
  std::vector<ExtentRef> missing;
  {
    const auto held = staging_.lock();
    for (const ReadRange& range : ahead) {
      if (range.extent == nullptr || range.extent->memory != nullptr || range.extent->load_wanted) continue;
      range.extent->load_wanted = true;
      missing.push_back(range.extent);
    }
  }
  want(std::move(missing));
}

void Reader::want(std::vector<ExtentRef> extents) {
  if (extents.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    wanted_.insert(wanted_.end(), std::make_move_iterator(extents.begin()), std::make_move_iterator(extents.end()));
  }
  engine_.wake();
}

void Reader::run() {
  std::vector<IoResult> results;
  while (!stopping_ || in_flight_ > 0) {
    if (!stopping_) start_loads();
    results.clear();
    engine_.wait(results);
    for (const IoResult& result : results) finish_part(static_cast<PartLoad*>(result.token), result.error);
  }
}

void Reader::start_loads() {
  while (in_flight_ < kMostInFlight) {
    ExtentRef extent;
    {
      const std::lock_guard lock(mutex_);
      if (wanted_.empty()) return;
      extent = std::move(wanted_.front());
      wanted_.pop_front();
    }
    if (start_load(extent)) continue;
    // All memory may be held by reads that wait for this one: with nothing in flight nobody else would end that.
    if (in_flight_ == 0) {
      start_load_in_reserve(extent);
      continue;
    }
    const std::lock_guard lock(mutex_);
    wanted_.push_front(std::move(extent));
    return;
  }
}

// False when there is no memory for it now.
bool Reader::start_load(const ExtentRef& extent) {
  {
    const auto held = staging_.lock();
    if (!staging_.begin_load(held, *extent)) return false;
    extent->load_wanted = false;
  }
  submit_parts(extent, extent->memory);
  return true;
}

// Reads that wait for the extent get copies; one that nobody waits for is not loaded at all.
void Reader::start_load_in_reserve(const ExtentRef& extent) {
  {
    const auto held = staging_.lock();
    extent->load_wanted = !extent->readers.empty();
    if (!extent->load_wanted) return;
  }
  submit_parts(extent, reserve_);
}

void Reader::submit_parts(const ExtentRef& extent, std::byte* memory) {
  auto* load = new Load{extent, memory, {}, extent->parts.size()};
  for (const Part& part : extent->parts) {
    load->parts.push_back(std::make_unique<PartLoad>(PartLoad{load, &part}));
    submit(*load->parts.back());
  }
}

void Reader::submit(PartLoad& load) {
  const Part& part = *load.part;
  engine_.submit({false, part.device_index, part.offset_bytes, load.load->memory + part.skip_bytes,
                  static_cast<uint32_t>(round_up(part.length_bytes, kBlockBytes)), &load});
  ++in_flight_;
}

void Reader::finish_part(PartLoad* loaded, int error) {
  --in_flight_;
  Load* load = loaded->load;
  const Part& part = *loaded->part;
  const bool matches = error == 0 && checksum(load->memory + part.skip_bytes, part.length_bytes) == part.checksum;
  space_.read_finished(part.device_index, round_up(part.length_bytes, kBlockBytes), error == 0);
  if (!matches && ++loaded->tries < 2) {
    submit(*loaded);
    return;
  }
  if (!matches) {
    if (error != 0) {
      events_.push(EventKind::device_error,
                   {part.device_index, part.offset_bytes, part.length_bytes, static_cast<uint64_t>(error)}, "read");
    }
    load->error = EIO;
    load->damaged = load->damaged || error == 0;
    load->damage = {part.device_index, part.offset_bytes, part.length_bytes, part.skip_bytes};
  }
  if (--load->pending == 0) finish(std::unique_ptr<Load>(load));
}

void Reader::finish(std::unique_ptr<Load> load) {
  std::vector<std::shared_ptr<ReadRequest>> ready;
  std::vector<WaitingRead> readers;
  {
    const auto held = staging_.lock();
    Extent& extent = *load->extent;
    const bool in_reserve = load->memory == reserve_;
    if (in_reserve) {
      extent.load_wanted = false;
    } else {
      staging_.finish_load(held, extent, load->error == 0);
    }
    readers.swap(extent.readers);
    for (const WaitingRead& reader : readers) {
      ReadRequest& request = *reader.request;
      ReadRange& range = request.ranges[reader.range_index];
      if (load->error == 0 && in_reserve) {
        range.copy = std::make_unique_for_overwrite<std::byte[]>(range.length_bytes);
        std::memcpy(range.copy.get(), reserve_ + range.skip_bytes, range.length_bytes);
      } else if (load->error == 0) {
        range.pinned = staging_.pin(held, extent);
      } else {
        request.error = load->error;
        request.damaged = load->damaged;
        request.damage = load->damage;
        request.damage_offset_bytes = range.file_offset_bytes - range.skip_bytes + load->damage.skip_bytes;
      }
      if (--request.pending == 0) ready.push_back(reader.request);
    }
  }
  for (const auto& request : ready) answer(request);
  staging_.notify_memory();
}

}  // namespace ckptfs
