#include <doctest/doctest.h>

#include <random>
#include <thread>

#include "harness.hpp"

namespace ckptfs::test {

namespace {

constexpr uint64_t kIno = 42;

using Bytes = std::vector<std::byte>;

void apply(Bytes& model, uint64_t offset_bytes, const Bytes& data) {
  if (model.size() < offset_bytes + data.size()) model.resize(offset_bytes + data.size());
  std::copy(data.begin(), data.end(), model.begin() + static_cast<long>(offset_bytes));
}

uint64_t random_length(std::mt19937& random) {
  switch (random() % 4) {
    case 0:
      return 1 + random() % 300;
    case 1:
      return 1 + random() % (64 << 10);
    case 2:
      return 1 + random() % (700 << 10);
    default:
      return 1 + random() % (3 << 20);
  }
}

}  // namespace

TEST_CASE("what was written is read back, staged and from the devices, with both back ends") {
  for (const char* backend : {"auto", "threads"}) {
    CAPTURE(backend);
    Harness harness(3, backend);
    harness.plane().register_file(kIno, 0, 1, 1, "", false);
    const Bytes data = pattern((3 << 20) + 12345, 1);
    CHECK(harness.write(kIno, 0, data) == std::pair<int, uint32_t>(0, static_cast<uint32_t>(data.size())));
    CHECK(harness.read(kIno, 0, data.size()).second == data);
    const auto seal = harness.plane().seal(kIno);
    REQUIRE(seal);
    CHECK(seal->size_bytes == data.size());
    const std::string rows = harness.wait_sealed(seal->seal_id);
    Bytes stored;
    overlay(harness.images(), rows, stored);
    CHECK(stored == data);
    // Another inode with the same rows has nothing in memory: this is the cold way.
    harness.plane().register_file(kIno + 1, data.size(), 1, 1, rows, false);
    CHECK(harness.read(kIno + 1, 0, data.size() + 100).second == data);
    CHECK(harness.read(kIno + 1, 100, 50).second == Bytes(data.begin() + 100, data.begin() + 150));
    CHECK(harness.read(kIno + 1, data.size(), 50).second.empty());
  }
}

TEST_CASE("a file that is mapped or read in small pieces is told of, once") {
  Harness harness(1);
  DataPlane& plane = harness.plane();
  for (const uint64_t ino : {kIno, kIno + 1, kIno + 2}) plane.register_file(ino, 0, 1, 1, "", false);
  for (int i = 0; i < 1000; ++i) harness.read(kIno, 0, kSlotBytes);
  harness.pump(0);
  CHECK(harness.page_cache_wanted.empty());
  for (int i = 0; i < 1000; ++i) harness.read(kIno + 1, 0, kBlockBytes);
  for (int i = 0; i < 2; ++i) harness.read(kIno + 2, 0, kSlotBytes, true);
  harness.pump(0);
  CHECK(harness.page_cache_wanted == std::vector<uint64_t>{kIno + 1, kIno + 2});
}

TEST_CASE("a write does not change the bytes that a read is copying out") {
  Harness harness(1);
  harness.plane().register_file(kIno, 0, 1, 1, "", false);
  Bytes model = pattern(3000, 1);
  harness.write(kIno, 0, model);
  const Bytes change = pattern(1000, 2);
  Bytes seen;
  harness.plane().read(kIno, 0, 3000, false, [&](int, const std::vector<iovec>& data) {
    CHECK(harness.write(kIno, 500, change).first == 0);
    for (const iovec& part : data) {
      const auto* bytes = static_cast<const std::byte*>(part.iov_base);
      seen.insert(seen.end(), bytes, bytes + part.iov_len);
    }
  });
  CHECK(seen == model);
  apply(model, 500, change);
  CHECK(harness.read(kIno, 0, 3000).second == model);
}

TEST_CASE("P5: bytes that fail their checksum are never returned") {
  Harness harness(1);
  harness.plane().register_file(kIno, 0, 1, 1, "", false);
  const Bytes data = pattern(2 << 20, 2);
  harness.write(kIno, 0, data);
  const std::string rows = harness.wait_sealed(harness.plane().seal(kIno)->seal_id);
  const ExtentRow damaged = unpack(rows)[1];
  const std::byte wrong = static_cast<std::byte>(~static_cast<unsigned>(data[damaged.file_offset_bytes + 77]));
  REQUIRE(pwrite(harness.images().fds()[0], &wrong, 1, static_cast<off_t>(damaged.device_offset_bytes + 77)) == 1);
  harness.plane().register_file(kIno + 1, data.size(), 1, 1, rows, false);
  CHECK(harness.read(kIno + 1, damaged.file_offset_bytes, 10).first == EIO);
  CHECK(harness.read(kIno + 1, 0, 1000).first == 0);
  CHECK(harness.plane().counters().devices[0].checksum_errors == 1);
}

TEST_CASE("random writes, truncates, seals and reverts agree with a model") {
  for (const unsigned seed : {1u, 2u, 3u}) {
    CAPTURE(seed);
    Harness harness(2, seed == 3 ? "threads" : "auto");
    DataPlane& plane = harness.plane();
    plane.register_file(kIno, 0, 1, 1, "", false);
    std::mt19937 random(seed);
    Bytes live;
    Bytes sealed;
    Bytes committed;  // as the control plane rebuilds it from the seals' deltas
    uint64_t lost_ino = 1000;
    for (int step = 0; step < 150; ++step) {
      const unsigned action = random() % 10;
      if (action < 5) {
        const uint64_t offset = random() % (4 << 20);
        const Bytes data = pattern(random_length(random), static_cast<uint64_t>(step));
        REQUIRE(harness.write(kIno, offset, data).first == 0);
        apply(live, offset, data);
      } else if (action < 6) {
        const uint64_t size = random() % (5 << 20);
        plane.truncate(kIno, size, now_ns(), getpid());
        live.resize(size);
      } else if (action < 8) {
        if (const auto seal = plane.seal(kIno)) {
          REQUIRE(seal->size_bytes == live.size());
          committed.resize(std::min<uint64_t>(committed.size(), seal->truncate_to_bytes));
          overlay(harness.images(), harness.wait_sealed(seal->seal_id), committed);
          committed.resize(seal->size_bytes);
          sealed = live;
          REQUIRE(committed == sealed);
        }
      } else if (action < 9 && plane.state(kIno)->modified) {
        plane.revert(kIno, lost_ino);
        live = sealed;
        CHECK(plane.state(lost_ino)->modified);
        plane.unregister_file(lost_ino++);
      }
      REQUIRE(plane.attributes(kIno)->size_bytes == live.size());
      const uint64_t offset = random() % (5 << 20);
      const uint64_t length = random_length(random);
      const uint64_t start = std::min<uint64_t>(offset, live.size());
      const uint64_t end = std::min<uint64_t>(offset + length, live.size());
      const auto [error, bytes] = harness.read(kIno, offset, length);
      REQUIRE(error == 0);
      REQUIRE(bytes == Bytes(live.begin() + static_cast<long>(start), live.begin() + static_cast<long>(end)));
    }
  }
}

TEST_CASE("P6: what does not fit is refused by the write, and fits again after room came back") {
  Harness harness(1, "auto", 256 << 20);
  DataPlane& plane = harness.plane();
  plane.register_file(kIno, 0, 1, 1, "", false);
  const Bytes data = pattern(4 << 20, 3);
  uint64_t written = 0;
  std::pair<int, uint32_t> answer;
  while ((answer = harness.write(kIno, written, data)).first == 0) written += answer.second;
  CHECK(answer.first == ENOSPC);
  CHECK(written == kDeviceBytes);
  CHECK(harness.no_room_events > 0);
  const auto seal = plane.seal(kIno);
  CHECK(unpack(harness.wait_sealed(seal->seal_id)).size() == kDeviceBytes / kSlotBytes);
  // Only unsealed extents give their space back by themselves.
  plane.register_file(kIno + 1, 0, 1, 1, "", false);
  CHECK(harness.write(kIno + 1, 0, pattern(1, 1)).first == ENOSPC);
  plane.unregister_file(kIno);
  plane.grant(0, {{0, kDeviceBytes}});
  plane.add_free(kDeviceBytes);
  CHECK(harness.write(kIno + 1, 0, pattern(1, 1)).first == 0);
  CHECK(plane.free_bytes() == kDeviceBytes - kBlockBytes);
  plane.unregister_file(kIno + 1);
  CHECK(plane.free_bytes() == kDeviceBytes);
}

TEST_CASE("P6: room for extent rows is reserved by the write, exactly given back, and refused when there is none") {
  Harness harness(1);
  DataPlane& plane = harness.plane();
  const int64_t all = plane.free_metadata_bytes();
  constexpr int64_t kRow = sizeof(ExtentRow);
  plane.register_file(kIno, 0, 1, 1, "", false);
  harness.write(kIno, 0, pattern(2 << 20, 1));
  CHECK(plane.free_metadata_bytes() == all - 2 * kRow);
  harness.write(kIno, 0, pattern(2 << 20, 2));  // replaces both
  CHECK(plane.free_metadata_bytes() == all - 2 * kRow);
  const auto seal = plane.seal(kIno);
  CHECK(seal->metadata_bytes == 2 * kRow);
  harness.wait_sealed(seal->seal_id);
  harness.write(kIno, 100, pattern(10, 3));  // cuts a sealed piece in two
  CHECK(plane.free_metadata_bytes() == all - 4 * kRow);
  plane.revert(kIno, kIno + 1);
  CHECK(plane.free_metadata_bytes() == all - 3 * kRow);
  plane.unregister_file(kIno + 1);
  CHECK(plane.free_metadata_bytes() == all - 2 * kRow);
  harness.write(kIno, 100, pattern(10, 3));  // where the map has been cut already, but no seal said so
  CHECK(plane.free_metadata_bytes() == all - 4 * kRow);
  for (uint64_t i = 0; i < 1000; ++i) harness.write(kIno, (2 << 20) + i * 10, pattern(10, i));
  CHECK(plane.free_metadata_bytes() >= all - 6 * kRow);  // appends share their extents
  plane.add_free_metadata(-plane.free_metadata_bytes());
  CHECK(harness.write(kIno, 8 << 20, pattern(10, 4)).first == ENOSPC);
  CHECK(harness.write(kIno, 8 << 20, pattern(2 << 20, 4)).first == ENOSPC);
  plane.add_free_metadata(4 * kRow);
  CHECK(harness.write(kIno, 8 << 20, pattern(2 << 20, 4)).first == 0);
}

TEST_CASE("many small files held open do not wedge a small staging") {
  Harness harness(2);
  DataPlane& plane = harness.plane();
  constexpr uint64_t kFiles = 6000;
  for (uint64_t ino = 100; ino < 100 + kFiles; ++ino) {
    plane.register_file(ino, 0, 1, 1, "", false);
    for (uint64_t part = 0; part < 2; ++part) {
      REQUIRE(harness.write(ino, part * 6000, pattern(6000, ino * 2 + part)).first == 0);
    }
  }
  for (uint64_t ino = 100; ino < 100 + kFiles; ino += 311) {
    CHECK(harness.read(ino, 6000, 6000).second == pattern(6000, ino * 2 + 1));
  }
  CHECK(plane.counters().staging.populated_bytes <= 64 << 20);
}

TEST_CASE("a read of parts of more extents than memory holds is answered") {
  Harness harness(2);
  DataPlane& plane = harness.plane();
  plane.register_file(kIno, 0, 1, 1, "", false);
  constexpr uint64_t kParts = 90;
  Bytes model;
  for (uint64_t part = 0; part < kParts; ++part) {
    const Bytes data = pattern(kSlotBytes, part);
    REQUIRE(harness.write(kIno, part * kBlockBytes, data).first == 0);
    apply(model, part * kBlockBytes, data);
    while (plane.counters().staging.dirty_bytes > 16 << 20) harness.pump(10);
  }
  const auto seal = plane.seal(kIno);
  plane.register_file(kIno + 1, seal->size_bytes, 1, 1, harness.wait_sealed(seal->seal_id), false);
  CHECK(harness.read(kIno + 1, 0, model.size()).second == model);
}

TEST_CASE("a write that waits for memory goes on when reads let it go") {
  Harness harness(1);
  DataPlane& plane = harness.plane();
  std::vector<std::byte*> hoard = plane.take_landing(54);
  plane.register_file(kIno, 0, 1, 1, "", false);
  const Bytes data = pattern(4 << 20, 1);
  REQUIRE(harness.write(kIno, 0, data).first == 0);
  harness.wait_sealed(plane.seal(kIno)->seal_id);
  WriteRequest request = harness.prepare(kIno, 8 << 20, pattern(kSlotBytes, 2));
  while (plane.counters().staging.used_bytes < plane.counters().staging.populated_bytes) {
    hoard.push_back(plane.take_landing(1)[0]);
  }
  std::thread writer;
  plane.read(kIno, 0, data.size(), false,
             [&](int, const std::vector<iovec>&) {  // all that is clean is held from here on
               writer = std::thread([&] { plane.write(request); });
               while (plane.counters().parked_writes == 0) std::this_thread::yield();
               std::this_thread::sleep_for(std::chrono::milliseconds(100));
             });
  CHECK(harness.wait_answer(request.unique).first == 0);
  writer.join();
  plane.return_landing(request.slots);
  plane.return_landing(hoard);
}

TEST_CASE("a write that waits for room is refused when the volume takes no more") {
  Harness harness(1);
  DataPlane& plane = harness.plane();
  harness.expire_at_once = false;
  plane.add_free_metadata(-plane.free_metadata_bytes());
  plane.register_file(kIno, 0, 1, 1, "", false);
  WriteRequest request = harness.prepare(kIno, 0, pattern(100, 1));
  plane.write(request);
  while (harness.no_room_events == 0) harness.pump(10);
  plane.refuse_writes(EROFS);
  CHECK(harness.wait_answer(request.unique).first == EROFS);
  plane.return_landing(request.slots);
}

TEST_CASE("P7: the places of a write that failed only in part are free again") {
  const Images images(2);
  const int read_only = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  DataPlane plane({{images.fds()[0], read_only}, images.names(), 64 << 20, "threads", false});
  plane.answer_write = [](uint64_t, int, uint32_t) {};
  plane.start();
  constexpr uint64_t kHalf = kSlotBytes / 2;
  plane.grant(0, {{0, kHalf}});
  for (uint64_t i = 0; i < 4; ++i) plane.grant(1, {{i * kHalf, kHalf}});
  plane.add_free(64 << 20);
  plane.add_free_metadata(kMetadataBytes);
  plane.register_file(kIno, 0, 1, 1, "", false);
  WriteRequest request;
  request.ino = kIno;
  request.length_bytes = kSlotBytes;
  request.slots = plane.take_landing(1);
  plane.write(request);
  while (plane.counters().devices[1].write_errors < 4) std::this_thread::yield();
  plane.return_landing(request.slots);
  plane.stop();
  CHECK(plane.counters().devices[0].granted_bytes == kHalf);
  CHECK(plane.counters().devices[0].outstanding_bytes == 0);
  plane.unregister_file(kIno);
  CHECK(plane.free_bytes() == (64 << 20) - 4 * kHalf);
  close(read_only);
}

TEST_CASE("P3: only a FLUSH by an owner that wrote since the last seal seals") {
  Harness harness(1);
  DataPlane& plane = harness.plane();
  plane.register_file(kIno, 0, 1, 1, "", false);
  CHECK(plane.flush(kIno, 1, getpid()) == 0);
  harness.write(kIno, 0, pattern(100, 1), 7);
  CHECK(plane.flush(kIno, 8, 0) == 0);
  CHECK_FALSE(plane.flush(kIno, 7, 0).has_value());
  harness.wait_sealed(plane.seal(kIno)->seal_id);
  CHECK(plane.flush(kIno, 7, 0) == 0);
  plane.note_modified(kIno, getpid());
  CHECK(plane.flush(kIno, 8, 0) == 0);
  CHECK_FALSE(plane.flush(kIno, 8, getpid()).has_value());
}

TEST_CASE("writers, readers and seals on many threads") {
  Harness harness(2, "auto", 128 << 20);
  DataPlane& plane = harness.plane();
  constexpr int kWriters = 3;
  std::atomic<int> running{kWriters};
  std::atomic<uint64_t> unique{1'000'000};
  for (int w = 0; w < kWriters; ++w) plane.register_file(200 + static_cast<uint64_t>(w), 0, 1, 1, "", false);
  std::vector<std::thread> threads;
  for (int w = 0; w < kWriters; ++w) {
    threads.emplace_back([&, w] {
      const uint64_t ino = 200 + static_cast<uint64_t>(w);
      std::vector<std::byte*> slots = plane.take_landing(2);
      std::mt19937 random(static_cast<unsigned>(w));
      for (int step = 0; step < 200; ++step) {
        WriteRequest request;
        request.unique = unique++;
        request.ino = ino;
        request.offset_bytes = random() % (8 << 20);
        request.length_bytes = static_cast<uint32_t>(1 + random() % (2 << 20));
        request.writer = {ino, false, false, now_ns()};
        request.slots = std::move(slots);
        for (std::byte* slot : request.slots) std::memset(slot, w, kSlotBytes);
        plane.write(request);
        slots = std::move(request.slots);
        if (step % 10 == 0) plane.seal(ino);
      }
      plane.return_landing(slots);
      --running;
    });
  }
  threads.emplace_back([&] {
    std::mt19937 random(99);
    while (running > 0) {
      const uint64_t w = random() % kWriters;
      const auto [error, bytes] = harness.read(200 + w, random() % (8 << 20), 1 << 20);
      CHECK(error == 0);
      for (const std::byte byte : bytes) {
        if (byte != static_cast<std::byte>(w) && byte != std::byte{0}) FAIL("bytes of another file");
      }
    }
  });
  while (running > 0) harness.pump(10);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ckptfs::test
