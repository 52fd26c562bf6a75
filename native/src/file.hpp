// An open file: its map, its attributes, its open version.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common.hpp"
#include "extent_row.hpp"
#include "staging.hpp"

namespace ckptfs {

struct Piece {
  uint64_t length_bytes;
  uint32_t skip_bytes;  // where in the extent the piece begins
  bool sealed;          // part of the last sealed version
  ExtentRef extent;
};

struct ReadRange {
  uint64_t file_offset_bytes;
  uint32_t length_bytes;
  uint32_t skip_bytes;
  ExtentRef extent;                     // nullptr: a hole
  bool pinned = false;                  // GUARDED_BY(Staging::mutex)
  std::unique_ptr<std::byte[]> copy{};  // of the bytes, instead of a pin
};

struct FileAttributes {
  uint64_t size_bytes;
  int64_t mtime_ns;
  int64_t ctime_ns;
  uint64_t allocated_bytes;
};

struct FileState {
  bool modified;
  bool killed;
  bool log;
  uint64_t unsealed_bytes;
  uint64_t unwritten_bytes;
  int error;
};

struct SealResult {
  uint64_t seal_id;
  uint64_t size_bytes;
  int64_t mtime_ns;
  int64_t ctime_ns;
  uint64_t truncate_to_bytes;
  uint64_t metadata_bytes;  // reserved for its rows
};

// One row for the piece, and one for the rest of a piece that it cuts in two.
inline constexpr int64_t kNewPieceMetadataBytes = 2 * sizeof(ExtentRow);

// True when a file that begins so is a zip archive.
bool begins_archive(const std::byte* data, uint32_t length_bytes);

// Who wrote, for P3: a FLUSH seals when its owner has written since the last seal.
struct Writer {
  uint64_t lock_owner;
  bool by_mapping;  // a write-back of a mapping: it has no owner
  bool append;
  int64_t time_ns;
};

// The map holds disjoint pieces by file offset; what is between them is a hole. The open version is the pieces
// that are not sealed. `displaced_` holds what of the sealed version they hide: a file offset is displaced once
// at most, so putting it all back is an exact undo (revert).
class File {
 public:
  File(uint64_t ino, Staging& staging) : ino_(ino), staging_(staging) {}

  const uint64_t ino_;
  std::mutex mutex_;  // before Staging::mutex

  // All of the below: REQUIRES mutex_ held.
  void load(uint64_t size_bytes, int64_t mtime_ns, int64_t ctime_ns, std::string_view rows);

  // A closed file is opened again: nothing of the former openings sticks.
  void reopen(int64_t mtime_ns, int64_t ctime_ns, bool set_id);

  // Copies a small write into the open version: into the extent that is filling, or into a new one.
  // 0, ENOSPC (no device space now), or ENOMEM (no staging memory now); then nothing has been changed.
  int write_small(uint64_t offset_bytes, const std::byte* data, uint32_t length_bytes);
  // Makes a full slot part of the open version. The caller has reserved the device space, and kNewPieceMetadataBytes.
  void adopt(uint64_t offset_bytes, ExtentRef extent, uint32_t length_bytes);
  void note_write(uint64_t end_bytes, uint64_t length_bytes, const Writer& writer);

  void truncate(uint64_t size_bytes, int64_t time_ns);
  std::optional<SealResult> seal(uint64_t seal_id, std::shared_ptr<SealInFlight>& in_flight);
  void revert(File& lost);

  std::vector<ReadRange> ranges(uint64_t offset_bytes, uint64_t length_bytes) const;
  // Gives back what the open version's rows cannot need any more. After each change of the map.
  void settle_metadata(int64_t just_reserved_bytes);
  // The open version is dropped or has moved: it needs nothing.
  void release_metadata();

  FileAttributes attributes() const { return {size_bytes_, mtime_ns_, ctime_ns_, allocated_bytes()}; }
  FileState state();
  // The rows of the map, when every piece is clean; empty optional otherwise.
  std::optional<std::string> rows() const;

  // An archive is no log, however small its writes: what torch.save, numpy.savez and Keras make are zip files.
  bool is_log() const { return append_ || (!archive_ && largest_write_bytes_ <= kLargestLogWriteBytes); }
  // What a killed writer leaves is kept as it stands: a log to which it has only added. Where it has truncated or
  // overwritten what was sealed, the sealed version comes back, so that no old content is ever lost to a torn new one.
  bool is_grown_log() const;
  bool written_by(uint64_t lock_owner) const;
  bool modified_by_process(int tgid) const;
  void add_process(int tgid);

  uint64_t size_bytes_ = 0;
  int64_t mtime_ns_ = 0;
  int64_t ctime_ns_ = 0;
  bool modified_ = false;
  bool killed_ = false;
  bool append_ = false;
  bool archive_ = false;
  bool set_id_ = false;
  int error_ = 0;
  uint64_t largest_write_bytes_ = 0;
  // For the reader: where a sequential read would go on, and how long the run is.
  uint64_t next_read_bytes_ = 0;
  uint64_t sequential_bytes_ = 0;
  // How it is read, since it was last registered: such files are better read through the kernel's page cache.
  uint32_t small_reads_ = 0;
  bool page_cache_wanted_ = false;

 private:
  using Map = std::map<uint64_t, Piece>;
  struct SmallWrite {
    Map::iterator tail;  // the piece of growing, if there is one
    ExtentRef growing;
    uint32_t appended_bytes = 0;  // to growing; the rest goes to fresh
    ExtentRef fresh;
    int64_t metadata_bytes = 0;
  };
  uint64_t allocated_bytes() const { return round_up(mapped_bytes_, kBlockBytes); }
  void split_at(uint64_t offset_bytes);
  void punch(uint64_t offset_bytes, uint64_t length_bytes);
  void insert(uint64_t offset_bytes, Piece piece);
  Map::iterator filling_piece_ending_at(uint64_t offset_bytes);
  int plan_small(uint64_t offset_bytes, uint32_t length_bytes, SmallWrite& plan);
  bool overwrite_filling(uint64_t offset_bytes, const std::byte* data, uint32_t length_bytes);
  void freeze_if_full(const Staging::Lock& held, Extent& extent);
  void touch(int64_t time_ns);

  Staging& staging_;
  Map map_;
  Map displaced_;
  uint64_t mapped_bytes_ = 0;
  // Invariant between calls: the next seal adds at most reserved_metadata_bytes_ to the metadata region.
  size_t sealed_pieces_ = 0;  // pieces of the map at the last seal
  int64_t reserved_metadata_bytes_ = 0;
  // What the sealed version was, for revert; and what to cut it to before the open version's pieces go in.
  uint64_t sealed_size_bytes_ = 0;
  int64_t sealed_mtime_ns_ = 0;
  int64_t sealed_ctime_ns_ = 0;
  uint64_t truncate_to_bytes_ = 0;
  // Every unsealed piece lies in [dirty_start_, dirty_end_).
  uint64_t dirty_start_bytes_ = UINT64_MAX;
  uint64_t dirty_end_bytes_ = 0;
  std::vector<uint64_t> owners_;
  std::vector<int> processes_;
};

}  // namespace ckptfs
