#include "arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

namespace ckptfs {

namespace {

constexpr uint64_t kLargestChunkBytes = 64 << 20;
constexpr uint64_t kSmallestChunkBytes = 16 << 20;
constexpr uint64_t kHugePageBytes = 2 << 20;

// madvise(2), Linux 5.14; absent from older headers.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

}  // namespace

unsigned order_for(uint64_t length_bytes) {
  const uint64_t blocks = (length_bytes + kBlockBytes - 1) / kBlockBytes;
  return static_cast<unsigned>(std::bit_width(blocks - 1));
}

Arena::Arena(uint64_t limit_bytes)
    : chunk_bytes_(std::clamp(round_down(limit_bytes / 4, kSlotBytes), kSmallestChunkBytes, kLargestChunkBytes)),
      limit_bytes_(round_down(limit_bytes, chunk_bytes_)) {
  memfd_ = memfd_create("ckptfs-staging", MFD_CLOEXEC);
  if (memfd_ < 0) throw_errno("memfd_create for the staging memory");
  if (ftruncate(memfd_, static_cast<off_t>(limit_bytes_)) != 0) throw_errno("ftruncate of the staging memory");
  // Aligned for huge pages, by taking more address space than is needed and mapping over it.
  reserved_bytes_ = limit_bytes_ + kHugePageBytes;
  reserved_ = mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved_ == MAP_FAILED) throw_errno("address space for the staging memory");
  void* aligned = reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(reserved_), kHugePageBytes));
  void* address = mmap(aligned, limit_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd_, 0);
  if (address == MAP_FAILED) throw_errno("mmap of the staging memory");
  madvise(address, limit_bytes_, MADV_DONTDUMP);
  madvise(address, limit_bytes_, MADV_HUGEPAGE);
  base_ = static_cast<std::byte*>(address);
  present_.resize(limit_bytes_ / chunk_bytes_);
  const size_t pages = limit_bytes_ / kBlockBytes;
  next_.resize(pages, kNone);
  previous_.resize(pages, kNone);
  free_order_.resize(pages, 0);
  std::fill(std::begin(heads_), std::end(heads_), kNone);
}

Arena::~Arena() {
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
  if (memfd_ >= 0) close(memfd_);
}

void Arena::push_free(uint32_t page, unsigned order) {
  free_order_[page] = static_cast<uint8_t>(order + 1);
  previous_[page] = kNone;
  next_[page] = heads_[order];
  if (heads_[order] != kNone) previous_[heads_[order]] = page;
  heads_[order] = page;
}

void Arena::unlink_free(uint32_t page, unsigned order) {
  free_order_[page] = 0;
  if (previous_[page] != kNone) {
    next_[previous_[page]] = next_[page];
  } else {
    heads_[order] = next_[page];
  }
  if (next_[page] != kNone) previous_[next_[page]] = previous_[page];
}

std::byte* Arena::allocate(unsigned order) {
  unsigned found = order;
  while (found <= kSlotOrder && heads_[found] == kNone) ++found;
  if (found > kSlotOrder) return nullptr;
  const uint32_t page = heads_[found];
  unlink_free(page, found);
  while (found > order) {
    --found;
    push_free(page + (1u << found), found);
  }
  free_bytes_ -= kBlockBytes << order;
  return base_ + page * kBlockBytes;
}

void Arena::free(std::byte* block, unsigned order) {
  free_bytes_ += kBlockBytes << order;
  uint32_t page = page_of(block);
  while (order < kSlotOrder) {
    const uint32_t buddy = page ^ (1u << order);
    if (free_order_[buddy] != order + 1) break;
    unlink_free(buddy, order);
    page = std::min(page, buddy);
    ++order;
  }
  push_free(page, order);
}

void Arena::shrink(std::byte* block, unsigned order, unsigned new_order) {
  while (order > new_order) {
    --order;
    free(block + (kBlockBytes << order), order);
  }
}

bool Arena::populate(size_t chunk) const {
  return madvise(chunk_address(chunk), chunk_bytes_, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
}

void Arena::add(size_t chunk) {
  present_[chunk] = true;
  populated_bytes_ += chunk_bytes_;
  for (uint64_t offset = 0; offset < chunk_bytes_; offset += kSlotBytes) {
    free(chunk_address(chunk) + offset, kSlotOrder);
  }
}

bool Arena::remove(size_t chunk) {
  const uint32_t first = page_of(chunk_address(chunk));
  const auto pages = static_cast<uint32_t>(chunk_bytes_ / kBlockBytes);
  for (uint32_t page = first; page < first + pages; page += 1u << kSlotOrder) {
    if (free_order_[page] != kSlotOrder + 1) return false;
  }
  for (uint32_t page = first; page < first + pages; page += 1u << kSlotOrder) unlink_free(page, kSlotOrder);
  present_[chunk] = false;
  populated_bytes_ -= chunk_bytes_;
  free_bytes_ -= chunk_bytes_;
  return true;
}

void Arena::discard(size_t chunk) const { madvise(chunk_address(chunk), chunk_bytes_, MADV_REMOVE); }

}  // namespace ckptfs
