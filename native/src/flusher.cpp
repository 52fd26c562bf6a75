#include "flusher.hpp"

#include <cstring>

#include "checksum.hpp"

namespace ckptfs {

namespace {

// The ring has 256 entries; leave room for the wake-up read.
constexpr size_t kMostInFlight = 192;
// A write that fails is tried elsewhere this often per device before its data counts as lost (P7).
constexpr unsigned kTriesPerDevice = 2;

}  // namespace

struct Flusher::PartWrite {
  Write* write;
  Part part;
  Placement placement;
  int error = 0;
};

struct Flusher::Write {
  ExtentRef extent;
  std::vector<std::unique_ptr<PartWrite>> parts;
  size_t pending;
};

Flusher::Flusher(Staging& staging, Space& space, EventQueue& events, IoEngine& engine, size_t device_count)
    : staging_(staging), space_(space), events_(events), engine_(engine), device_count_(device_count) {}

void Flusher::start() {
  thread_ = std::thread([this] { run(); });
}

void Flusher::stop() {
  stopping_ = true;
  engine_.wake();
  if (thread_.joinable()) thread_.join();
}

void Flusher::run() {
  std::vector<IoResult> results;
  while (!stopping_ || in_flight_ > 0) {
    if (!stopping_) start_writes();
    results.clear();
    engine_.wait(results);
    for (const IoResult& result : results) finish_part(static_cast<PartWrite*>(result.token), result.error);
  }
}

void Flusher::start_writes() {
  while (in_flight_ < kMostInFlight) {
    const ExtentRef extent = staging_.next_to_write();
    if (extent == nullptr) return;
    if (!start_write(extent)) {
      staging_.put_back(extent);
      return;
    }
  }
}

// False when no device has room in its queue, or no free range is granted: a completion or a grant wakes us again.
bool Flusher::start_write(const ExtentRef& extent) {
  // A queued extent's bytes no longer change, so they are read without the lock.
  const uint64_t space_bytes = round_up(extent->length_bytes, kBlockBytes);
  const std::vector<Placement> placements = space_.place(space_bytes);
  if (placements.empty()) return false;
  std::memset(extent->memory + extent->length_bytes, 0, space_bytes - extent->length_bytes);
  auto* write = new Write{extent, {}, placements.size()};
  uint32_t skip_bytes = 0;
  for (const Placement& placement : placements) {
    const uint32_t length_bytes = std::min(placement.length_bytes, extent->length_bytes - skip_bytes);
    const Part part{placement.device_index, placement.offset_bytes, skip_bytes, length_bytes,
                    checksum(extent->memory + skip_bytes, length_bytes)};
    write->parts.push_back(std::make_unique<PartWrite>(PartWrite{write, part, placement}));
    engine_.submit({true, placement.device_index, placement.offset_bytes, extent->memory + skip_bytes,
                    placement.length_bytes, write->parts.back().get()});
    ++in_flight_;
    skip_bytes += placement.length_bytes;
  }
  return true;
}

void Flusher::finish_part(PartWrite* part, int error) {
  --in_flight_;
  part->error = error;
  if (error != 0) {
    const Placement& placement = part->placement;
    events_.push(EventKind::device_error,
                 {placement.device_index, placement.offset_bytes, placement.length_bytes, static_cast<uint64_t>(error)},
                 "write");
  }
  if (--part->write->pending == 0) finish(std::unique_ptr<Write>(part->write));
}

void Flusher::finish(std::unique_ptr<Write> write) {
  int error = 0;
  std::vector<Part> parts;
  for (const auto& part : write->parts) {
    parts.push_back(part->part);
    if (part->error != 0) error = part->error;
  }
  const bool again = error != 0 && ++write->extent->write_tries < kTriesPerDevice * device_count_;
  for (const auto& part : write->parts) {
    if (part->error == 0 && error != 0) {
      space_.cancel(part->placement);
      continue;
    }
    if (error != 0) space_.quarantine(part->placement);
    space_.write_finished(part->placement, error == 0);
  }
  if (again) {
    staging_.put_back(write->extent);
  } else {
    staging_.finish_write(write->extent, std::move(parts), error);
  }
}

}  // namespace ckptfs
