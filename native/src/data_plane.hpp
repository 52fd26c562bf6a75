// The data plane: files, staging, flush engine and reader, put together. It knows inode numbers, never names.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "events.hpp"
#include "file.hpp"
#include "flusher.hpp"
#include "io_engine.hpp"
#include "parked_writes.hpp"
#include "reader.hpp"
#include "space.hpp"
#include "staging.hpp"

namespace ckptfs {

struct DataPlaneOptions {
  std::vector<int> device_fds;
  std::vector<std::string> device_names;
  uint64_t staging_limit_bytes;
  std::string io_backend = "auto";
  bool keep_killed = false;
};

struct DataPlaneCounters {
  std::string io_backend;
  std::string io_backend_reason;
  bool buffers_registered;
  bool files_registered;
  StagingCounters staging;
  uint64_t parked_writes;
  uint64_t acknowledged_bytes;
  std::vector<DeviceCounters> devices;
};

class DataPlane {
 public:
  explicit DataPlane(const DataPlaneOptions& options);
  ~DataPlane();

  void start();
  void stop();

  // Requests, from the switch's threads.

  // Answers a write, or parks it. The slots that it takes over are replaced by fresh ones, so that the caller
  // always has a whole landing again; this is where a reader thread waits when the bounce reserve is used up.
  void write(WriteRequest& request);
  void read(uint64_t ino, uint64_t offset_bytes, uint64_t length_bytes, bool for_page_cache,
            std::function<void(int, const std::vector<iovec>&)> done);
  // What a FLUSH means (design P3): nullopt when the control plane must seal, else the errno to answer.
  std::optional<int> flush(uint64_t ino, uint64_t lock_owner, int pid);
  // INTERRUPT: true when a parked write was taken back.
  bool cancel_parked(uint64_t unique) { return parked_.remove(unique); }
  std::vector<std::byte*> take_landing(size_t slots);
  void return_landing(const std::vector<std::byte*>& slots);
  // How writes are answered: (unique, errno, length). Set before start().
  std::function<void(uint64_t, int, uint32_t)> answer_write;

  // Calls of the control plane; see ckptfs/_native.pyi.
  void grant(unsigned device_index, const std::vector<std::pair<uint64_t, uint64_t>>& ranges);
  void add_free(uint64_t length_bytes);
  uint64_t free_bytes() const { return space_.free_bytes(); }
  void add_free_metadata(int64_t length_bytes);
  int64_t free_metadata_bytes() const { return space_.free_metadata_bytes(); }
  void expire_no_room() { parked_.expire(); }
  void register_file(uint64_t ino, uint64_t size_bytes, int64_t mtime_ns, int64_t ctime_ns, const std::string& rows,
                     bool set_id);
  void unregister_file(uint64_t ino);
  void forget_file(uint64_t ino);
  bool is_registered(uint64_t ino) { return find(ino) != nullptr; }
  std::optional<FileAttributes> attributes(uint64_t ino);
  std::optional<FileState> state(uint64_t ino);
  void set_append(uint64_t ino);
  void set_set_id(uint64_t ino, bool set_id);
  void note_modified(uint64_t ino, int pid);
  void truncate(uint64_t ino, uint64_t size_bytes, int64_t time_ns, int pid);
  void set_times(uint64_t ino, std::optional<int64_t> mtime_ns, std::optional<int64_t> ctime_ns);
  std::optional<SealResult> seal(uint64_t ino);
  FileAttributes revert(uint64_t ino, uint64_t lost_ino);
  void set_error(uint64_t ino, int error);
  void refuse_writes(int error);
  void flush_all();
  DataPlaneCounters counters();

  EventQueue& events() { return events_; }

 private:
  using FileRef = std::shared_ptr<File>;
  FileRef find(uint64_t ino);
  FileRef require(uint64_t ino);
  FileRef take_cached(uint64_t ino, uint64_t size_bytes, const std::string& rows);
  void keep_cached(FileRef file);
  bool attempt(WriteRequest& request, bool parked);
  int apply(WriteRequest& request, uint32_t length_bytes);
  int apply_locked(File& file, WriteRequest& request, uint32_t length_bytes);
  void release(WriteRequest& request);

  const DataPlaneOptions options_;
  EventQueue events_;
  Space space_;
  Staging staging_;
  EngineChoice write_engine_;
  EngineChoice read_engine_;
  Flusher flusher_;
  Reader reader_;
  ParkedWrites parked_;
  std::atomic<int> refuse_errno_{0};
  std::atomic<bool> buffers_registered_{true};
  std::atomic<uint64_t> acknowledged_bytes_{0};
  std::atomic<uint64_t> next_seal_id_{1};
  bool started_ = false;

  std::shared_mutex files_mutex_;                // before File::mutex
  std::unordered_map<uint64_t, FileRef> files_;  // GUARDED_BY(files_mutex_)
  // Closed, clean files whose extents may still be in memory; newest last.
  std::list<FileRef> cached_order_;                                          // GUARDED_BY(files_mutex_)
  std::unordered_map<uint64_t, std::list<FileRef>::iterator> cached_files_;  // GUARDED_BY(files_mutex_)
};

}  // namespace ckptfs
