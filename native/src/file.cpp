#include "file.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>

#include "extent_row.hpp"

namespace ckptfs {

namespace {

// A filled block of at least this is written at once; smaller ones wait for a seal or for want of memory, because
// small writes are often followed by more of them in the same place.
constexpr uint64_t kWriteAtOnceBytes = 64 << 10;

}  // namespace

void File::load(uint64_t size_bytes, int64_t mtime_ns, int64_t ctime_ns, std::string_view rows) {
  size_bytes_ = sealed_size_bytes_ = truncate_to_bytes_ = size_bytes;
  mtime_ns_ = sealed_mtime_ns_ = mtime_ns;
  ctime_ns_ = sealed_ctime_ns_ = ctime_ns;
  // Rows that are parts of one stored extent share it, so that it is read and checked once.
  std::unordered_map<uint64_t, ExtentRef> split;
  for (size_t at = 0; at + sizeof(ExtentRow) <= rows.size(); at += sizeof(ExtentRow)) {
    ExtentRow row;
    std::memcpy(&row, rows.data() + at, sizeof row);
    const bool whole = row.skip_bytes == 0 && row.length_bytes == row.stored_length_bytes;
    const uint64_t key = row.device_offset_bytes | row.device_index;  // offsets are block-aligned
    ExtentRef extent = whole ? nullptr : split[key];
    if (extent == nullptr) {
      extent = std::make_shared<Extent>(staging_);
      extent->sealed = true;
      extent->length_bytes = row.stored_length_bytes;
      extent->parts = {{row.device_index, row.device_offset_bytes, 0, row.stored_length_bytes, row.checksum}};
      if (!whole) split[key] = extent;
    }
    insert(row.file_offset_bytes, {row.length_bytes, row.skip_bytes, true, std::move(extent)});
  }
  sealed_pieces_ = map_.size();
}

void File::settle_metadata(int64_t just_reserved_bytes) {
  const int64_t more_pieces = static_cast<int64_t>(map_.size()) - static_cast<int64_t>(sealed_pieces_);
  const int64_t needed_bytes = std::max<int64_t>(more_pieces, 0) * static_cast<int64_t>(sizeof(ExtentRow));
  staging_.space().unreserve(0, reserved_metadata_bytes_ + just_reserved_bytes - needed_bytes);
  reserved_metadata_bytes_ = needed_bytes;
}

void File::release_metadata() { staging_.space().unreserve(0, std::exchange(reserved_metadata_bytes_, 0)); }

void File::reopen(int64_t mtime_ns, int64_t ctime_ns, bool set_id) {
  mtime_ns_ = sealed_mtime_ns_ = mtime_ns;
  ctime_ns_ = sealed_ctime_ns_ = ctime_ns;
  set_id_ = set_id;
  append_ = false;
  archive_ = false;
  largest_write_bytes_ = 0;
  small_reads_ = 0;
  page_cache_wanted_ = false;
}

void File::touch(int64_t time_ns) { mtime_ns_ = ctime_ns_ = time_ns; }

// Cuts the piece that spans offset_bytes, if any, in two.
void File::split_at(uint64_t offset_bytes) {
  auto after = map_.lower_bound(offset_bytes);
  if (after == map_.begin()) return;
  auto before = std::prev(after);
  const uint64_t head_bytes = offset_bytes - before->first;
  if (head_bytes >= before->second.length_bytes) return;
  Piece tail = before->second;
  tail.length_bytes -= head_bytes;
  tail.skip_bytes += static_cast<uint32_t>(head_bytes);
  before->second.length_bytes = head_bytes;
  map_.emplace_hint(after, offset_bytes, std::move(tail));
}

void File::punch(uint64_t offset_bytes, uint64_t length_bytes) {
  const uint64_t end_bytes = offset_bytes + length_bytes;
  split_at(offset_bytes);
  split_at(end_bytes);
  const auto first = map_.lower_bound(offset_bytes);
  const auto last = map_.lower_bound(end_bytes);
  for (auto piece = first; piece != last; ++piece) {
    mapped_bytes_ -= piece->second.length_bytes;
    if (piece->second.sealed) displaced_.insert(*piece);
  }
  map_.erase(first, last);
}

void File::insert(uint64_t offset_bytes, Piece piece) {
  mapped_bytes_ += piece.length_bytes;
  if (!piece.sealed) {
    dirty_start_bytes_ = std::min(dirty_start_bytes_, offset_bytes);
    dirty_end_bytes_ = std::max(dirty_end_bytes_, offset_bytes + piece.length_bytes);
  }
  map_.emplace(offset_bytes, std::move(piece));
}

// The piece that ends at offset_bytes, when it is the growing end of an extent that is still filling.
File::Map::iterator File::filling_piece_ending_at(uint64_t offset_bytes) {
  auto next = map_.lower_bound(offset_bytes);
  if (next == map_.begin()) return map_.end();
  auto piece = std::prev(next);
  const Piece& last = piece->second;
  if (last.sealed || piece->first + last.length_bytes != offset_bytes) return map_.end();
  return piece;
}

bool File::overwrite_filling(uint64_t offset_bytes, const std::byte* data, uint32_t length_bytes) {
  auto next = map_.upper_bound(offset_bytes);
  if (next == map_.begin()) return false;
  const auto& [start, piece] = *std::prev(next);
  if (piece.sealed || offset_bytes + length_bytes > start + piece.length_bytes) return false;
  Extent& extent = *piece.extent;
  {
    const auto held = staging_.lock();
    // Bytes that a read is copying out stay as they are: the write gets a piece of its own.
    if (extent.state != Extent::State::filling || extent.pins > 0) return false;
    extent.copying = true;
  }
  std::memcpy(extent.memory + piece.skip_bytes + (offset_bytes - start), data, length_bytes);
  const auto held = staging_.lock();
  extent.copying = false;
  return true;
}

void File::freeze_if_full(const Staging::Lock& held, Extent& extent) {
  const uint64_t block_bytes = kBlockBytes << extent.order;
  if (extent.length_bytes == block_bytes && block_bytes >= kWriteAtOnceBytes) staging_.freeze(held, extent, false);
}

// Takes all that a small write needs, or nothing.
int File::plan_small(uint64_t offset_bytes, uint32_t length_bytes, SmallWrite& plan) {
  plan.tail = filling_piece_ending_at(offset_bytes);
  const auto held = staging_.lock();
  ExtentRef growing = plan.tail == map_.end() ? nullptr : plan.tail->second.extent;
  uint64_t block_bytes = 0;
  uint64_t grown_bytes = 0;
  if (growing != nullptr) {
    block_bytes = kBlockBytes << growing->order;
    const bool at_end = plan.tail->second.skip_bytes + plan.tail->second.length_bytes == growing->length_bytes;
    if (growing->state != Extent::State::filling || !at_end) {
      growing = nullptr;
    } else {
      plan.appended_bytes =
          static_cast<uint32_t>(std::min<uint64_t>(length_bytes, block_bytes - growing->length_bytes));
      grown_bytes = round_up(growing->length_bytes + plan.appended_bytes, kBlockBytes) - growing->reserved_bytes;
    }
  }
  const uint32_t rest_bytes = length_bytes - plan.appended_bytes;
  const uint64_t reserve_bytes = grown_bytes + round_up(rest_bytes, kBlockBytes);
  // An append at the end of the file cuts nothing; that it needs no room for rows keeps logs cheap.
  const bool cuts = map_.lower_bound(offset_bytes) != map_.end();
  plan.metadata_bytes = rest_bytes > 0 || cuts ? kNewPieceMetadataBytes : 0;
  if (!staging_.space().reserve(reserve_bytes, plan.metadata_bytes)) return ENOSPC;
  if (growing != nullptr) growing->copying = true;  // first: want of memory for the rest may freeze what is filling
  if (rest_bytes > 0) {
    // A file that goes on appending gets larger and larger extents.
    const uint64_t wanted_bytes = std::clamp<uint64_t>(2 * block_bytes, rest_bytes, kSlotBytes);
    plan.fresh = staging_.begin_filling(held, order_for(wanted_bytes));
    if (plan.fresh == nullptr) plan.fresh = staging_.begin_filling(held, order_for(rest_bytes));
    if (plan.fresh == nullptr) {
      if (growing != nullptr) growing->copying = false;
      staging_.space().unreserve(reserve_bytes, plan.metadata_bytes);
      return ENOMEM;
    }
    plan.fresh->copying = true;
    plan.fresh->reserved_bytes = static_cast<uint32_t>(round_up(rest_bytes, kBlockBytes));
  }
  if (growing != nullptr) growing->reserved_bytes += static_cast<uint32_t>(grown_bytes);
  plan.growing = std::move(growing);
  return 0;
}

int File::write_small(uint64_t offset_bytes, const std::byte* data, uint32_t length_bytes) {
  if (overwrite_filling(offset_bytes, data, length_bytes)) return 0;
  SmallWrite plan;
  if (const int error = plan_small(offset_bytes, length_bytes, plan); error != 0) return error;
  const auto& [tail, growing, appended_bytes, fresh, metadata_bytes] = plan;
  const uint32_t rest_bytes = length_bytes - appended_bytes;
  if (growing != nullptr) std::memcpy(growing->memory + growing->length_bytes, data, appended_bytes);
  if (fresh != nullptr) std::memcpy(fresh->memory, data + appended_bytes, rest_bytes);
  punch(offset_bytes, length_bytes);
  {
    const auto held = staging_.lock();
    if (growing != nullptr) {
      growing->copying = false;
      growing->length_bytes += appended_bytes;
      freeze_if_full(held, *growing);
    }
    if (fresh != nullptr) {
      fresh->copying = false;
      fresh->length_bytes = rest_bytes;
      freeze_if_full(held, *fresh);
    }
  }
  if (growing != nullptr) {
    tail->second.length_bytes += appended_bytes;
    mapped_bytes_ += appended_bytes;
    dirty_end_bytes_ = std::max(dirty_end_bytes_, offset_bytes + appended_bytes);
  }
  if (fresh != nullptr) insert(offset_bytes + appended_bytes, {rest_bytes, 0, false, fresh});
  settle_metadata(metadata_bytes);
  return 0;
}

void File::adopt(uint64_t offset_bytes, ExtentRef extent, uint32_t length_bytes) {
  punch(offset_bytes, length_bytes);
  insert(offset_bytes, {length_bytes, 0, false, std::move(extent)});
  settle_metadata(kNewPieceMetadataBytes);
}

void File::note_write(uint64_t end_bytes, uint64_t length_bytes, const Writer& writer) {
  size_bytes_ = std::max(size_bytes_, end_bytes);
  touch(writer.time_ns);
  modified_ = true;
  append_ = append_ || writer.append;
  largest_write_bytes_ = std::max(largest_write_bytes_, length_bytes);
  if (!writer.by_mapping && !written_by(writer.lock_owner)) owners_.push_back(writer.lock_owner);
}

bool begins_archive(const std::byte* data, uint32_t length_bytes) {
  constexpr char kZipLocalHeader[] = {'P', 'K', 3, 4};  // APPNOTE.TXT 4.3.7
  return length_bytes >= sizeof kZipLocalHeader && std::memcmp(data, kZipLocalHeader, sizeof kZipLocalHeader) == 0;
}

bool File::is_grown_log() const {
  if (append_) return true;
  const bool has_grown = dirty_end_bytes_ > 0 && displaced_.empty() && truncate_to_bytes_ >= sealed_size_bytes_;
  return is_log() && has_grown;
}

bool File::written_by(uint64_t lock_owner) const { return std::ranges::find(owners_, lock_owner) != owners_.end(); }

bool File::modified_by_process(int tgid) const { return std::ranges::find(processes_, tgid) != processes_.end(); }

void File::add_process(int tgid) {
  modified_ = true;
  if (!modified_by_process(tgid)) processes_.push_back(tgid);
}

void File::truncate(uint64_t size_bytes, int64_t time_ns) {
  if (size_bytes < size_bytes_) punch(size_bytes, std::numeric_limits<uint64_t>::max() - size_bytes);
  settle_metadata(0);
  truncate_to_bytes_ = std::min(truncate_to_bytes_, size_bytes);
  size_bytes_ = size_bytes;
  touch(time_ns);
  modified_ = true;
}

std::optional<SealResult> File::seal(uint64_t seal_id, std::shared_ptr<SealInFlight>& in_flight) {
  if (!modified_) return std::nullopt;
  in_flight = std::make_shared<SealInFlight>();
  in_flight->seal_id = seal_id;
  auto piece = map_.lower_bound(dirty_start_bytes_);
  for (; piece != map_.end() && piece->first < dirty_end_bytes_; ++piece) {
    Piece& range = piece->second;
    if (range.sealed) continue;
    range.sealed = true;
    in_flight->ranges.push_back(
        {piece->first, static_cast<uint32_t>(range.length_bytes), range.skip_bytes, range.extent});
  }
  const SealResult result{
      seal_id,   size_bytes_,        mtime_ns_,
      ctime_ns_, truncate_to_bytes_, static_cast<uint64_t>(std::exchange(reserved_metadata_bytes_, 0))};
  sealed_pieces_ = map_.size();
  sealed_size_bytes_ = truncate_to_bytes_ = size_bytes_;
  sealed_mtime_ns_ = mtime_ns_;
  sealed_ctime_ns_ = ctime_ns_;
  dirty_start_bytes_ = UINT64_MAX;
  dirty_end_bytes_ = 0;
  displaced_.clear();
  owners_.clear();
  processes_.clear();
  modified_ = killed_ = false;
  return result;
}

void File::revert(File& lost) {
  for (auto piece = map_.begin(); piece != map_.end();) {
    if (piece->second.sealed) {
      ++piece;
      continue;
    }
    mapped_bytes_ -= piece->second.length_bytes;
    lost.size_bytes_ = piece->first + piece->second.length_bytes;
    lost.insert(piece->first, std::move(piece->second));
    piece = map_.erase(piece);
  }
  for (auto& [offset, piece] : displaced_) insert(offset, std::move(piece));
  displaced_.clear();
  release_metadata();
  lost.settle_metadata(0);
  lost.modified_ = true;
  lost.append_ = append_;
  lost.archive_ = archive_;
  lost.largest_write_bytes_ = largest_write_bytes_;
  lost.mtime_ns_ = mtime_ns_;
  lost.ctime_ns_ = ctime_ns_;
  size_bytes_ = truncate_to_bytes_ = sealed_size_bytes_;
  mtime_ns_ = sealed_mtime_ns_;
  ctime_ns_ = sealed_ctime_ns_;
  dirty_start_bytes_ = UINT64_MAX;
  dirty_end_bytes_ = 0;
  owners_.clear();
  processes_.clear();
  modified_ = killed_ = false;
}

std::vector<ReadRange> File::ranges(uint64_t offset_bytes, uint64_t length_bytes) const {
  std::vector<ReadRange> found;
  if (offset_bytes >= size_bytes_) return found;
  const uint64_t end_bytes = offset_bytes + std::min(length_bytes, size_bytes_ - offset_bytes);
  auto piece = map_.upper_bound(offset_bytes);
  if (piece != map_.begin()) --piece;
  uint64_t at = offset_bytes;
  const auto add_hole = [&found, &at](uint64_t hole_bytes) {
    if (hole_bytes > 0) found.push_back({at, static_cast<uint32_t>(hole_bytes), 0, nullptr});
  };
  for (; piece != map_.end() && piece->first < end_bytes; ++piece) {
    const uint64_t piece_end = piece->first + piece->second.length_bytes;
    if (piece_end <= at) continue;
    if (piece->first > at) {
      add_hole(piece->first - at);
      at = piece->first;
    }
    const uint64_t stop = std::min(piece_end, end_bytes);
    found.push_back({at, static_cast<uint32_t>(stop - at),
                     piece->second.skip_bytes + static_cast<uint32_t>(at - piece->first), piece->second.extent});
    at = stop;
  }
  add_hole(end_bytes - at);
  return found;
}

FileState File::state() {
  FileState state{modified_, killed_, is_log(), 0, 0, error_};
  const auto held = staging_.lock();
  for (const auto& [offset, piece] : map_) {
    if (!piece.sealed) state.unsealed_bytes += piece.length_bytes;
    if (piece.extent->state != Extent::State::clean) state.unwritten_bytes += piece.length_bytes;
  }
  return state;
}

std::optional<std::string> File::rows() const {
  std::vector<SealedRange> all;
  all.reserve(map_.size());
  const auto held = staging_.lock();
  for (const auto& [offset, piece] : map_) {
    if (piece.extent->state != Extent::State::clean) return std::nullopt;
    all.push_back({offset, static_cast<uint32_t>(piece.length_bytes), piece.skip_bytes, piece.extent});
  }
  return pack_rows(all);
}

}  // namespace ckptfs
