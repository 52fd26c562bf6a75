#include <doctest/doctest.h>

#include "space.hpp"

namespace ckptfs {

namespace {

uint64_t total(const std::vector<Placement>& placements) {
  uint64_t bytes = 0;
  for (const Placement& placement : placements) bytes += placement.length_bytes;
  return bytes;
}

}  // namespace

TEST_CASE("reservations never exceed what is free (P6)") {
  EventQueue events;
  Space space({"a"}, events);
  CHECK_FALSE(space.reserve(1));
  space.add_free(3 * kBlockBytes);
  CHECK(space.reserve(2 * kBlockBytes));
  CHECK_FALSE(space.reserve(2 * kBlockBytes));
  space.unreserve(2 * kBlockBytes);
  CHECK(space.reserve(3 * kBlockBytes));
  CHECK(space.free_bytes() == 0);
}

TEST_CASE("extents take turns over the devices") {
  EventQueue events;
  Space space({"a", "b", "c"}, events);
  for (unsigned device = 0; device < 3; ++device) space.grant(device, {{0, 64 << 20}});
  uint64_t bytes[3] = {};
  for (int i = 0; i < 30; ++i) {
    for (const Placement& placement : space.place(kSlotBytes)) {
      bytes[placement.device_index] += placement.length_bytes;
      space.write_finished(placement, true);
    }
  }
  for (const uint64_t each : bytes) CHECK(each == 10 * kSlotBytes);
}

TEST_CASE("free space in pieces, on several devices, still takes an extent") {
  EventQueue events;
  Space space({"a", "b"}, events);
  space.grant(0, {{0, kBlockBytes}, {8 * kBlockBytes, kBlockBytes}});
  space.grant(1, {{0, 2 * kBlockBytes}});
  CHECK(space.place(5 * kBlockBytes).empty());
  const auto placements = space.place(4 * kBlockBytes);
  CHECK(placements.size() == 3);
  CHECK(total(placements) == 4 * kBlockBytes);
  CHECK(space.place(kBlockBytes).empty());
  for (const Placement& placement : placements) space.cancel(placement);
  CHECK(total(space.place(4 * kBlockBytes)) == 4 * kBlockBytes);
}

TEST_CASE("an empty grant is asked for again only after space was freed") {
  EventQueue events;
  Space space({"a"}, events);
  space.add_free(kBlockBytes);
  CHECK(events.take().size() == 1);
  space.grant(0, {});
  CHECK(space.place(kBlockBytes).empty());
  CHECK(events.take().empty());
  space.add_free(kBlockBytes);
  CHECK(events.take().size() == 1);
}

}  // namespace ckptfs
