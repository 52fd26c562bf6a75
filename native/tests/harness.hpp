// A data plane on image files, driven as the switch and the control plane would.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "checksum.hpp"
#include "data_plane.hpp"
#include "extent_row.hpp"

namespace ckptfs::test {

inline constexpr uint64_t kDeviceBytes = 96 << 20;
inline constexpr uint64_t kSegmentBytes = 8 << 20;
inline constexpr int64_t kMetadataBytes = 16 << 20;

class Images {
 public:
  explicit Images(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      std::string path = "/tmp/ckptfs-native-test-XXXXXX";
      const int fd = mkstemp(path.data());
      if (fd < 0 || posix_fallocate(fd, 0, kDeviceBytes) != 0) throw_errno("a test image");
      fds_.push_back(fd);
      names_.push_back(path);
      unlink(path.c_str());
    }
  }
  ~Images() {
    for (const int fd : fds_) close(fd);
  }
  const std::vector<int>& fds() const { return fds_; }
  const std::vector<std::string>& names() const { return names_; }

 private:
  std::vector<int> fds_;
  std::vector<std::string> names_;
};

// Answers grants, collects seals and write answers.
class Harness {
 public:
  explicit Harness(size_t devices, const std::string& backend = "auto", uint64_t staging_bytes = 64 << 20)
      : images_(devices), plane_({images_.fds(), images_.names(), staging_bytes, backend, false}), next_(devices) {
    plane_.answer_write = [this](uint64_t unique, int error, uint32_t length_bytes) {
      const std::lock_guard lock(mutex_);
      answers_[unique] = {error, length_bytes};
    };
    plane_.start();
    plane_.add_free(devices * kDeviceBytes);
    plane_.add_free_metadata(kMetadataBytes);
    pump(0);
  }
  ~Harness() { plane_.stop(); }

  DataPlane& plane() { return plane_; }
  const Images& images() const { return images_; }

  void pump(int timeout_ms) {
    pollfd ready{plane_.events().fd(), POLLIN, 0};
    if (poll(&ready, 1, timeout_ms) <= 0) return;
    for (const Event& event : plane_.events().take()) handle(event);
  }

  // errno and length of one WRITE of any size.
  std::pair<int, uint32_t> write(uint64_t ino, uint64_t offset_bytes, const std::vector<std::byte>& data,
                                 uint64_t owner = 1) {
    WriteRequest request = prepare(ino, offset_bytes, data, owner);
    plane_.write(request);
    plane_.return_landing(request.slots);
    return wait_answer(request.unique);
  }

  // A WRITE as the switch has it when it has read it.
  WriteRequest prepare(uint64_t ino, uint64_t offset_bytes, const std::vector<std::byte>& data, uint64_t owner = 1) {
    WriteRequest request;
    request.unique = next_unique_++;
    request.ino = ino;
    request.offset_bytes = offset_bytes;
    request.length_bytes = static_cast<uint32_t>(data.size());
    request.writer = {owner, false, false, now_ns()};
    request.slots = plane_.take_landing((data.size() + kSlotBytes - 1) / kSlotBytes);
    for (size_t i = 0; i < request.slots.size(); ++i) {
      std::memcpy(request.slots[i], data.data() + i * kSlotBytes,
                  std::min<size_t>(kSlotBytes, data.size() - i * kSlotBytes));
    }
    return request;
  }

  std::pair<int, uint32_t> wait_answer(uint64_t unique) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < deadline) {
      {
        const std::lock_guard lock(mutex_);
        if (const auto found = answers_.find(unique); found != answers_.end()) return found->second;
      }
      pump(10);
    }
    throw std::runtime_error("a write is not answered");
  }

  std::pair<int, std::vector<std::byte>> read(uint64_t ino, uint64_t offset_bytes, uint64_t length_bytes,
                                              bool for_page_cache = false) {
    std::mutex mutex;
    std::condition_variable answered;
    bool done = false;
    std::pair<int, std::vector<std::byte>> result;
    plane_.read(ino, offset_bytes, length_bytes, for_page_cache, [&](int error, const std::vector<iovec>& data) {
      const std::lock_guard lock(mutex);
      result.first = error;
      for (const iovec& part : data) {
        const auto* bytes = static_cast<const std::byte*>(part.iov_base);
        result.second.insert(result.second.end(), bytes, bytes + part.iov_len);
      }
      done = true;
      answered.notify_one();
    });
    std::unique_lock lock(mutex);
    answered.wait(lock, [&] { return done; });
    return result;
  }

  std::string wait_sealed(uint64_t seal_id) {
    while (!seals_.contains(seal_id)) pump(100);
    return seals_.at(seal_id);
  }

  uint64_t no_room_events = 0;
  std::vector<uint64_t> page_cache_wanted;
  bool expire_at_once = true;

 private:
  void handle(const Event& event) {
    if (event.kind == EventKind::sealed) {
      if (event.numbers[1] != 0) throw std::runtime_error("a seal failed");
      seals_[event.numbers[0]] = event.bytes;
    } else if (event.kind == EventKind::grant_wanted) {
      const auto device = static_cast<unsigned>(event.numbers[0]);
      std::vector<std::pair<uint64_t, uint64_t>> ranges;
      if (next_[device] + kSegmentBytes <= kDeviceBytes) ranges.emplace_back(next_[device], kSegmentBytes);
      next_[device] += kSegmentBytes;
      plane_.grant(device, ranges);
    } else if (event.kind == EventKind::page_cache_wanted) {
      page_cache_wanted.push_back(event.numbers[0]);
    } else if (event.kind == EventKind::no_room) {
      ++no_room_events;
      if (expire_at_once) plane_.expire_no_room();
    }
  }

  Images images_;
  DataPlane plane_;
  std::vector<uint64_t> next_;
  std::mutex mutex_;
  std::map<uint64_t, std::pair<int, uint32_t>> answers_;  // GUARDED_BY(mutex_)
  std::map<uint64_t, std::string> seals_;
  uint64_t next_unique_ = 1;
};

inline std::vector<std::byte> pattern(size_t length_bytes, uint64_t seed) {
  std::vector<std::byte> bytes(length_bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

inline std::vector<ExtentRow> unpack(const std::string& rows) {
  std::vector<ExtentRow> list(rows.size() / sizeof(ExtentRow));
  std::memcpy(list.data(), rows.data(), list.size() * sizeof(ExtentRow));
  return list;
}

// What the devices hold of the rows; checks every checksum. Throws std::runtime_error on a mismatch.
inline void overlay(const Images& images, const std::string& rows, std::vector<std::byte>& file) {
  for (const ExtentRow& row : unpack(rows)) {
    std::vector<std::byte> stored(row.stored_length_bytes);
    if (pread(images.fds()[row.device_index], stored.data(), stored.size(),
              static_cast<off_t>(row.device_offset_bytes)) != static_cast<ssize_t>(stored.size())) {
      throw_errno("pread of a test image");
    }
    if (checksum(stored.data(), stored.size()) != row.checksum) throw std::runtime_error("a checksum does not match");
    const uint64_t end = row.file_offset_bytes + row.length_bytes;
    if (file.size() < end) file.resize(end);
    std::memcpy(file.data() + row.file_offset_bytes, stored.data() + row.skip_bytes, row.length_bytes);
  }
}

}  // namespace ckptfs::test
