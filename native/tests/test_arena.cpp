#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

#include "arena.hpp"

namespace ckptfs {

TEST_CASE("order_for names the smallest block that holds the bytes") {
  CHECK(order_for(1) == 0);
  CHECK(order_for(kBlockBytes) == 0);
  CHECK(order_for(kBlockBytes + 1) == 1);
  CHECK(order_for(kSlotBytes) == kSlotOrder);
  CHECK(order_for(kSlotBytes / 2 + 1) == kSlotOrder);
}

TEST_CASE("random blocks never overlap, and everything comes back") {
  Arena arena(64 << 20);
  REQUIRE(arena.populate(0));
  arena.add(0);
  const uint64_t all = arena.free_bytes();
  struct Block {
    std::byte* memory;
    unsigned order;
    std::byte mark;
  };
  std::vector<Block> blocks;
  std::mt19937 random(7);
  for (int step = 0; step < 20'000; ++step) {
    const auto at = blocks.empty() ? 0 : random() % blocks.size();
    if (blocks.empty() || random() % 5 < 3) {
      const unsigned order = random() % (kSlotOrder + 1);
      std::byte* memory = arena.allocate(order);
      if (memory == nullptr) continue;
      CHECK((memory - arena.chunk_address(0)) % (kBlockBytes << order) == 0);
      blocks.push_back({memory, order, static_cast<std::byte>(random())});
      std::memset(memory, static_cast<int>(blocks.back().mark), kBlockBytes << order);
    } else if (random() % 4 == 0 && blocks[at].order > 0) {
      arena.shrink(blocks[at].memory, blocks[at].order, blocks[at].order - 1);
      --blocks[at].order;
    } else {
      const Block block = blocks[at];
      for (uint64_t i = 0; i < kBlockBytes << block.order; i += 512) REQUIRE(block.memory[i] == block.mark);
      arena.free(block.memory, block.order);
      blocks.erase(blocks.begin() + static_cast<long>(at));
    }
  }
  CHECK_FALSE(arena.remove(0));
  for (const Block& block : blocks) arena.free(block.memory, block.order);
  CHECK(arena.free_bytes() == all);
  CHECK(arena.remove(0));
  CHECK(arena.free_bytes() == 0);
  CHECK(arena.allocate(0) == nullptr);
}

}  // namespace ckptfs
