#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "common.hpp"
#include "io_engine.hpp"

namespace ckptfs {

namespace {

constexpr unsigned kRingEntries = 256;

class UringEngine final : public IoEngine {
 public:
  UringEngine(const std::vector<int>& device_fds, size_t buffer_count, const std::byte* buffer_base,
              uint64_t buffer_bytes)
      : device_fds_(device_fds), buffer_base_(buffer_base), buffer_bytes_(buffer_bytes), registered_(buffer_count) {
    if (const int error = io_uring_queue_init(kRingEntries, &ring_, 0); error < 0) {
      throw_errno("io_uring_queue_init", -error);
    }
    files_registered_ =
        io_uring_register_files(&ring_, device_fds.data(), static_cast<unsigned>(device_fds.size())) == 0;
    sparse_buffers_ = io_uring_register_buffers_sparse(&ring_, static_cast<unsigned>(buffer_count)) == 0;
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) throw_errno("eventfd");
    arm_wake();
  }

  ~UringEngine() override {
    io_uring_queue_exit(&ring_);
    close(wake_fd_);
  }

  void submit(const IoOperation& operation) override { queue(new Pending{operation, 0}); }

  void wait(std::vector<IoResult>& results) override {
    io_uring_submit_and_wait(&ring_, 1);
    unsigned seen = 0;
    unsigned head = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      if (auto* pending = static_cast<Pending*>(io_uring_cqe_get_data(cqe)); pending != nullptr) {
        complete(pending, cqe->res, results);
      } else {
        arm_wake();
      }
    }
    io_uring_cq_advance(&ring_, seen);
  }

  void wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
  }

  bool add_buffer(size_t index, std::byte* memory, uint64_t length_bytes) override {
    if (!sparse_buffers_) return false;
    const iovec buffer{memory, length_bytes};
    const __u64 tag = 0;
    const bool done = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &buffer, &tag, 1) == 1;
    registered_[index].store(done, std::memory_order_release);
    return done;
  }

  void remove_buffer(size_t index) override {
    if (!registered_[index].exchange(false)) return;
    const iovec none{nullptr, 0};
    const __u64 tag = 0;
    io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &none, &tag, 1);
  }

  bool files_registered() const override { return files_registered_; }

 private:
  struct Pending {
    IoOperation operation;
    uint32_t done_bytes;
  };

  io_uring_sqe* next_sqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }

  void arm_wake() {
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_read(sqe, wake_fd_, &wake_value_, sizeof wake_value_, 0);
    io_uring_sqe_set_data(sqe, nullptr);
  }

  void queue(Pending* pending) {
    const IoOperation& operation = pending->operation;
    std::byte* memory = operation.memory + pending->done_bytes;
    const uint32_t length = operation.length_bytes - pending->done_bytes;
    const uint64_t offset = operation.offset_bytes + pending->done_bytes;
    const auto device = operation.device_index;
    const int file = files_registered_ ? static_cast<int>(device) : device_fds_[device];
    const auto buffer = static_cast<size_t>(operation.memory - buffer_base_) / buffer_bytes_;
    const bool fixed = operation.memory >= buffer_base_ && buffer < registered_.size() &&
                       registered_[buffer].load(std::memory_order_acquire);
    io_uring_sqe* sqe = next_sqe();
    if (operation.write && fixed) {
      io_uring_prep_write_fixed(sqe, file, memory, length, offset, static_cast<int>(buffer));
    } else if (operation.write) {
      io_uring_prep_write(sqe, file, memory, length, offset);
    } else if (fixed) {
      io_uring_prep_read_fixed(sqe, file, memory, length, offset, static_cast<int>(buffer));
    } else {
      io_uring_prep_read(sqe, file, memory, length, offset);
    }
    if (files_registered_) sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, pending);
  }

  void complete(Pending* pending, int result, std::vector<IoResult>& results) {
    if (result == -EINTR || result == -EAGAIN) {
      queue(pending);
      return;
    }
    if (result > 0) pending->done_bytes += static_cast<uint32_t>(result);
    if (result > 0 && pending->done_bytes < pending->operation.length_bytes) {
      queue(pending);
      return;
    }
    const bool complete_now = pending->done_bytes == pending->operation.length_bytes;
    results.push_back({pending->operation.token, complete_now ? 0 : (result < 0 ? -result : EIO)});
    delete pending;
  }

  io_uring ring_{};
  std::vector<int> device_fds_;
  const std::byte* buffer_base_;
  uint64_t buffer_bytes_;
  std::vector<std::atomic<bool>> registered_;
  bool files_registered_ = false;
  bool sparse_buffers_ = false;
  int wake_fd_ = -1;
  uint64_t wake_value_ = 0;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(const std::vector<int>& device_fds, size_t buffer_count,
                                            const std::byte* buffer_base, uint64_t buffer_bytes) {
  return std::make_unique<UringEngine>(device_fds, buffer_count, buffer_base, buffer_bytes);
}

}  // namespace ckptfs
