#include "data_plane.hpp"

#include <algorithm>
#include <stdexcept>

#include "process.hpp"

namespace ckptfs {

namespace {

// A write that fills at least half a slot keeps it; a smaller one is copied to where its neighbours are.
constexpr uint32_t kAdoptBytes = kSlotBytes / 2;
constexpr size_t kMostCachedFiles = 1024;
constexpr uint64_t kSmallestStagingBytes = 64 << 20;

size_t bounce_slots(uint64_t staging_limit_bytes) {
  return std::clamp<size_t>(staging_limit_bytes / 8 / kSlotBytes, 8, 32);
}

}  // namespace

DataPlane::DataPlane(const DataPlaneOptions& options)
    : options_(options),
      space_(options.device_names, events_),
      staging_(std::max(options.staging_limit_bytes, kSmallestStagingBytes), space_, events_),
      write_engine_(make_engine(options.io_backend, options.device_fds, staging_.arena().chunk_count(),
                                staging_.arena().chunk_address(0), staging_.arena().chunk_bytes())),
      read_engine_(make_engine(options.io_backend, options.device_fds, staging_.arena().chunk_count(),
                               staging_.arena().chunk_address(0), staging_.arena().chunk_bytes())),
      flusher_(staging_, space_, events_, *write_engine_.engine, options.device_fds.size()),
      reader_(staging_, space_, events_, *read_engine_.engine, options.device_fds.size()),
      parked_(
          bounce_slots(options.staging_limit_bytes), [this](WriteRequest& request) { return attempt(request, true); },
          [this](WriteRequest& request) { release(request); }) {
  staging_.wake_flusher = [this] { flusher_.wake(); };
  staging_.wake_memory_waiters = [this] { parked_.wake(); };
  staging_.register_chunk = [this](size_t chunk) {
    std::byte* memory = staging_.arena().chunk_address(chunk);
    const uint64_t length = staging_.arena().chunk_bytes();
    // Both rings need it; without it they work, pinning pages at each operation.
    const bool writes = write_engine_.engine->add_buffer(chunk, memory, length);
    const bool reads = read_engine_.engine->add_buffer(chunk, memory, length);
    if (!writes || !reads) buffers_registered_ = false;
    return writes && reads;
  };
  staging_.unregister_chunk = [this](size_t chunk) {
    write_engine_.engine->remove_buffer(chunk);
    read_engine_.engine->remove_buffer(chunk);
  };
}

DataPlane::~DataPlane() {
  stop();
  // Extents go back to staging and space, so they go first.
  cached_files_.clear();
  cached_order_.clear();
  files_.clear();
}

void DataPlane::start() {
  started_ = true;
  staging_.start();
  flusher_.start();
  reader_.start();
  parked_.start();
}

void DataPlane::stop() {
  if (!std::exchange(started_, false)) return;
  parked_.stop();
  flusher_.stop();
  reader_.stop();
  staging_.stop();
  staging_.abandon_seals();
}

// Files

DataPlane::FileRef DataPlane::find(uint64_t ino) {
  const std::shared_lock lock(files_mutex_);
  const auto found = files_.find(ino);
  return found == files_.end() ? nullptr : found->second;
}

DataPlane::FileRef DataPlane::require(uint64_t ino) {
  FileRef file = find(ino);
  if (file == nullptr) throw std::out_of_range("inode " + std::to_string(ino) + " is not registered");
  return file;
}

DataPlane::FileRef DataPlane::take_cached(uint64_t ino, uint64_t size_bytes, const std::string& rows) {
  FileRef file;
  {
    const std::unique_lock lock(files_mutex_);
    const auto found = cached_files_.find(ino);
    if (found == cached_files_.end()) return nullptr;
    file = *found->second;
    cached_order_.erase(found->second);
    cached_files_.erase(found);
  }
  const std::lock_guard lock(file->mutex_);
  return file->size_bytes_ == size_bytes && file->rows() == rows ? file : nullptr;
}

void DataPlane::keep_cached(FileRef file) {
  std::vector<FileRef> evicted;  // dropped after the lock is
  const std::unique_lock lock(files_mutex_);
  cached_order_.push_back(file);
  cached_files_[file->ino_] = std::prev(cached_order_.end());
  while (cached_order_.size() > kMostCachedFiles) {
    evicted.push_back(cached_order_.front());
    cached_files_.erase(cached_order_.front()->ino_);
    cached_order_.pop_front();
  }
}

void DataPlane::register_file(uint64_t ino, uint64_t size_bytes, int64_t mtime_ns, int64_t ctime_ns,
                              const std::string& rows, bool set_id) {
  if (find(ino) != nullptr) throw std::invalid_argument("inode " + std::to_string(ino) + " is registered already");
  FileRef file = take_cached(ino, size_bytes, rows);
  if (file == nullptr) {
    file = std::make_shared<File>(ino, staging_);
    file->load(size_bytes, mtime_ns, ctime_ns, rows);
  }
  file->reopen(mtime_ns, ctime_ns, set_id);
  const std::unique_lock lock(files_mutex_);
  files_[ino] = std::move(file);
}

void DataPlane::unregister_file(uint64_t ino) {
  FileRef file;
  {
    const std::unique_lock lock(files_mutex_);
    const auto found = files_.find(ino);
    if (found == files_.end()) return;
    file = std::move(found->second);
    files_.erase(found);
  }
  bool clean = false;
  {
    const std::lock_guard lock(file->mutex_);
    clean = !file->modified_ && file->error_ == 0;
    file->release_metadata();
  }
  if (clean) keep_cached(std::move(file));
}

void DataPlane::forget_file(uint64_t ino) {
  FileRef file;  // dropped after the lock is
  const std::unique_lock lock(files_mutex_);
  const auto found = cached_files_.find(ino);
  if (found == cached_files_.end()) return;
  file = *found->second;
  cached_order_.erase(found->second);
  cached_files_.erase(found);
}

std::optional<FileAttributes> DataPlane::attributes(uint64_t ino) {
  const FileRef file = find(ino);
  if (file == nullptr) return std::nullopt;
  const std::lock_guard lock(file->mutex_);
  return file->attributes();
}

std::optional<FileState> DataPlane::state(uint64_t ino) {
  const FileRef file = find(ino);
  if (file == nullptr) return std::nullopt;
  const std::lock_guard lock(file->mutex_);
  return file->state();
}

void DataPlane::set_append(uint64_t ino) {
  const FileRef file = require(ino);
  const std::lock_guard lock(file->mutex_);
  file->append_ = true;
}

void DataPlane::set_set_id(uint64_t ino, bool set_id) {
  const FileRef file = require(ino);
  const std::lock_guard lock(file->mutex_);
  file->set_id_ = set_id;
}

void DataPlane::note_modified(uint64_t ino, int pid) {
  const FileRef file = require(ino);
  const int process = process_of_thread(pid);
  const std::lock_guard lock(file->mutex_);
  file->add_process(process);
}

void DataPlane::truncate(uint64_t ino, uint64_t size_bytes, int64_t time_ns, int pid) {
  const FileRef file = require(ino);
  const int process = process_of_thread(pid);
  const std::lock_guard lock(file->mutex_);
  file->truncate(size_bytes, time_ns);
  file->add_process(process);
}

void DataPlane::set_times(uint64_t ino, std::optional<int64_t> mtime_ns, std::optional<int64_t> ctime_ns) {
  const FileRef file = require(ino);
  const std::lock_guard lock(file->mutex_);
  file->mtime_ns_ = mtime_ns.value_or(file->mtime_ns_);
  file->ctime_ns_ = ctime_ns.value_or(file->ctime_ns_);
}

std::optional<SealResult> DataPlane::seal(uint64_t ino) {
  const FileRef file = require(ino);
  std::shared_ptr<SealInFlight> in_flight;
  std::optional<SealResult> result;
  {
    const std::lock_guard lock(file->mutex_);
    result = file->seal(next_seal_id_++, in_flight);
    // Under the file's lock: an extent that a seal names must be frozen before the next write looks at it.
    if (result) staging_.watch_seal(in_flight);
  }
  return result;
}

FileAttributes DataPlane::revert(uint64_t ino, uint64_t lost_ino) {
  const FileRef file = require(ino);
  auto lost = std::make_shared<File>(lost_ino, staging_);
  FileAttributes restored;
  {
    const std::lock_guard lock(file->mutex_);
    file->revert(*lost);
    restored = file->attributes();
  }
  const std::unique_lock lock(files_mutex_);
  files_[lost_ino] = std::move(lost);
  return restored;
}

void DataPlane::set_error(uint64_t ino, int error) {
  const FileRef file = require(ino);
  const std::lock_guard lock(file->mutex_);
  file->error_ = error;
}

// Space

void DataPlane::grant(unsigned device_index, const std::vector<std::pair<uint64_t, uint64_t>>& ranges) {
  space_.grant(device_index, ranges);
  if (!ranges.empty()) flusher_.wake();
}

void DataPlane::add_free(uint64_t length_bytes) {
  space_.add_free(length_bytes);
  staging_.notify_memory();
}

void DataPlane::add_free_metadata(int64_t length_bytes) {
  space_.add_free_metadata(length_bytes);
  if (length_bytes > 0) parked_.wake();
}

void DataPlane::refuse_writes(int error) {
  refuse_errno_ = error;
  parked_.wake();  // what they wait for may never come now
}

void DataPlane::flush_all() {
  const auto held = staging_.lock();
  staging_.freeze_all_filling(held);
}

// Requests

std::vector<std::byte*> DataPlane::take_landing(size_t slots) {
  std::vector<std::byte*> landing(slots);
  for (std::byte*& slot : landing) slot = staging_.wait_for_slot();
  return landing;
}

void DataPlane::return_landing(const std::vector<std::byte*>& slots) {
  {
    const auto held = staging_.lock();
    for (std::byte* slot : slots) {
      if (slot != nullptr) staging_.free(held, slot, kSlotOrder);
    }
  }
  staging_.notify_memory();
}

void DataPlane::write(WriteRequest& request) {
  if (parked_.empty() && attempt(request, false)) return;
  // Parking takes the slots that hold the payload; the caller gets others for the next request.
  const size_t used = std::min(request.slots.size(), (request.length_bytes + kSlotBytes - 1) / kSlotBytes);
  WriteRequest parked = request;
  parked.slots.resize(used);
  parked_.add(std::move(parked));
  parked_.wait_for_reserve();
  for (size_t i = 0; i < used; ++i) request.slots[i] = staging_.wait_for_slot();
}

bool DataPlane::attempt(WriteRequest& request, bool parked) {
  uint32_t length_bytes = request.length_bytes;
  int error = apply(request, length_bytes);
  if (error == ENOSPC && request.expired) {
    // What is left on the devices takes a shorter write: write(2) then says how much went in, as anywhere.
    length_bytes =
        static_cast<uint32_t>(std::min<uint64_t>(request.length_bytes, round_down(space_.free_bytes(), kBlockBytes)));
    if (length_bytes > 0) error = apply(request, length_bytes);
  } else if (error == ENOSPC) {
    // Only once it is parked: the answer to the event, expire_no_room(), must find it.
    if (parked && !std::exchange(request.announced, true)) {
      events_.push(EventKind::no_room, {request.length_bytes});
    }
    return false;
  }
  if (error == ENOMEM) return false;
  if (error == 0) acknowledged_bytes_ += length_bytes;
  if (error == 0 && request.sync) {
    events_.push(EventKind::sync_write, {request.unique, request.ino, length_bytes});
  } else {
    answer_write(request.unique, error, length_bytes);
  }
  return true;
}

int DataPlane::apply(WriteRequest& request, uint32_t length_bytes) {
  if (const int refused = refuse_errno_.load(); refused != 0) return refused;
  const FileRef file = find(request.ino);
  if (file == nullptr) return EIO;
  const std::lock_guard lock(file->mutex_);
  if (file->error_ != 0) return file->error_;
  // Looked at before, because an adopted slot may be written and used again at any moment.
  const bool archive =
      request.offset_bytes == 0 && !request.slots.empty() && begins_archive(request.slots[0], length_bytes);
  const int error = apply_locked(*file, request, length_bytes);
  if (error != 0 || length_bytes == 0) return error;
  if (request.offset_bytes == 0) file->archive_ = archive;
  file->note_write(request.offset_bytes + length_bytes, length_bytes, request.writer);
  if (request.kill_set_id && std::exchange(file->set_id_, false)) {
    events_.push(EventKind::kill_suidgid, {request.ino});
  }
  return 0;
}

// All or nothing: takes everything that may be missing before it changes the file.
int DataPlane::apply_locked(File& file, WriteRequest& request, uint32_t length_bytes) {
  const size_t full = length_bytes / kSlotBytes;
  const auto tail_bytes = static_cast<uint32_t>(length_bytes % kSlotBytes);
  const bool adopt_tail = tail_bytes >= kAdoptBytes;
  const size_t adopted = full + (adopt_tail ? 1 : 0);
  const uint64_t adopted_bytes = full * kSlotBytes + (adopt_tail ? tail_bytes : 0);
  const uint64_t reserved_bytes = round_up(adopted_bytes, kBlockBytes);
  const auto metadata_bytes = static_cast<int64_t>(adopted) * kNewPieceMetadataBytes;
  if (!space_.reserve(reserved_bytes, metadata_bytes)) return ENOSPC;

  std::vector<std::byte*> fresh;
  const auto undo = [&] {
    space_.unreserve(reserved_bytes, metadata_bytes);
    const auto held = staging_.lock();
    for (std::byte* slot : fresh) staging_.free(held, slot, kSlotOrder);
  };
  if (adopted > 0) {
    const auto held = staging_.lock();
    while (fresh.size() < adopted) {
      std::byte* slot = staging_.allocate(held, kSlotOrder);
      if (slot == nullptr) break;
      fresh.push_back(slot);
    }
  }
  int error = fresh.size() == adopted ? 0 : ENOMEM;
  if (error == 0 && tail_bytes > 0 && !adopt_tail) {
    error = file.write_small(request.offset_bytes + full * kSlotBytes, request.slots[full], tail_bytes);
  }
  if (error != 0) {
    undo();
    return error;
  }
  for (size_t i = 0; i < adopted; ++i) {
    const uint32_t part_bytes = i < full ? static_cast<uint32_t>(kSlotBytes) : tail_bytes;
    ExtentRef extent;
    {
      const auto held = staging_.lock();
      extent = staging_.adopt_slot(held, request.slots[i], part_bytes);
    }
    file.adopt(request.offset_bytes + i * kSlotBytes, std::move(extent), part_bytes);
    request.slots[i] = fresh[i];
  }
  return 0;
}

void DataPlane::release(WriteRequest& request) { return_landing(std::exchange(request.slots, {})); }

void DataPlane::read(uint64_t ino, uint64_t offset_bytes, uint64_t length_bytes, bool for_page_cache,
                     std::function<void(int, const std::vector<iovec>&)> done) {
  FileRef file = find(ino);
  if (file == nullptr) {
    done(EIO, {});
    return;
  }
  auto request = std::make_shared<ReadRequest>();
  request->file = std::move(file);
  request->offset_bytes = offset_bytes;
  request->length_bytes = length_bytes;
  request->for_page_cache = for_page_cache;
  request->done = std::move(done);
  reader_.read(std::move(request));
}

std::optional<int> DataPlane::flush(uint64_t ino, uint64_t lock_owner, int pid) {
  const FileRef file = find(ino);
  if (file == nullptr) return 0;
  const std::lock_guard lock(file->mutex_);
  if (!file->modified_) return file->error_;
  if (!file->written_by(lock_owner) && !file->modified_by_process(process_of_thread(pid))) return file->error_;
  if (!options_.keep_killed && dying_of_signal(pid) && !file->is_grown_log()) {
    file->killed_ = true;
    return 0;
  }
  return std::nullopt;
}

DataPlaneCounters DataPlane::counters() {
  return {write_engine_.name,
          write_engine_.reason,
          buffers_registered_.load() && write_engine_.name == "io_uring",
          write_engine_.engine->files_registered(),
          staging_.counters(),
          parked_.count(),
          acknowledged_bytes_.load(),
          space_.counters()};
}

}  // namespace ckptfs
