// The staging memory: one memfd, populated in chunks as it grows, handed out by a buddy allocator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common.hpp"

namespace ckptfs {

// Blocks of kBlockBytes << order, 0 <= order <= kSlotOrder, each naturally aligned within its slot, so every
// block is fit for O_DIRECT. Not thread-safe: Staging::mutex guards the allocator; only populate() and
// discard(), which touch no allocator state, may run outside it.
class Arena {
 public:
  // Reserves address space for limit_bytes (rounded up to whole chunks) without touching memory.
  // Throws std::system_error.
  explicit Arena(uint64_t limit_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // nullptr when no block of that size is free.
  std::byte* allocate(unsigned order);
  void free(std::byte* block, unsigned order);
  // Keeps the first part of a block and frees the rest.
  void shrink(std::byte* block, unsigned order, unsigned new_order);

  // Growing and shrinking, chunk by chunk. The owner calls populate, then add; or remove, then discard.
  bool populate(size_t chunk) const;  // false when the system has no memory for it
  void add(size_t chunk);
  bool remove(size_t chunk);  // false unless the whole chunk is free
  void discard(size_t chunk) const;

  bool present(size_t chunk) const { return present_[chunk]; }
  size_t chunk_count() const { return present_.size(); }
  size_t chunk_of(const std::byte* block) const { return static_cast<size_t>(block - base_) / chunk_bytes_; }
  std::byte* chunk_address(size_t chunk) const { return base_ + chunk * chunk_bytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t populated_bytes() const { return populated_bytes_; }
  uint64_t free_bytes() const { return free_bytes_; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t page_of(const std::byte* block) const { return static_cast<uint32_t>((block - base_) / kBlockBytes); }
  void push_free(uint32_t page, unsigned order);
  void unlink_free(uint32_t page, unsigned order);

  uint64_t chunk_bytes_;
  uint64_t limit_bytes_;
  int memfd_ = -1;
  void* reserved_ = nullptr;
  uint64_t reserved_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::vector<bool> present_;
  uint64_t populated_bytes_ = 0;
  uint64_t free_bytes_ = 0;
  // Free lists threaded through arrays indexed by page, so that touching a list never touches cold memory.
  uint32_t heads_[kSlotOrder + 1];
  std::vector<uint32_t> next_;
  std::vector<uint32_t> previous_;
  std::vector<uint8_t> free_order_;  // order + 1 at the first page of a free block, else 0
};

// The smallest order whose block holds length_bytes. REQUIRES: 0 < length_bytes <= kSlotBytes.
unsigned order_for(uint64_t length_bytes);

}  // namespace ckptfs
