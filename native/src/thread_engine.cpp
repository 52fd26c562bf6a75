#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "common.hpp"
#include "io_engine.hpp"

namespace ckptfs {

namespace {

constexpr unsigned kThreadsPerDevice = 2;
constexpr unsigned kMostThreads = 16;

int transfer(int fd, const IoOperation& operation) {
  uint32_t done_bytes = 0;
  while (done_bytes < operation.length_bytes) {
    std::byte* memory = operation.memory + done_bytes;
    const size_t left = operation.length_bytes - done_bytes;
    const auto offset = static_cast<off_t>(operation.offset_bytes + done_bytes);
    const ssize_t moved = operation.write ? pwrite(fd, memory, left, offset) : pread(fd, memory, left, offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;
    done_bytes += static_cast<uint32_t>(moved);
  }
  return 0;
}

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(const std::vector<int>& device_fds) : device_fds_(device_fds) {
    const size_t count = std::min<size_t>(kMostThreads, kThreadsPerDevice * device_fds.size());
    for (size_t i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }

  ~ThreadEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(const IoOperation& operation) override {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(operation);
    }
    work_ready_.notify_one();
  }

  void wait(std::vector<IoResult>& results) override {
    std::unique_lock lock(mutex_);
    results_ready_.wait(lock, [this] { return woken_ || !results_.empty(); });
    woken_ = false;
    results.insert(results.end(), results_.begin(), results_.end());
    results_.clear();
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    results_ready_.notify_one();
  }

  bool add_buffer(size_t, std::byte*, uint64_t) override { return false; }
  void remove_buffer(size_t) override {}
  bool files_registered() const override { return false; }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_ready_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const IoOperation operation = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const int error = transfer(device_fds_[operation.device_index], operation);
      lock.lock();
      results_.push_back({operation.token, error});
      results_ready_.notify_one();
    }
  }

  const std::vector<int> device_fds_;
  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable results_ready_;
  std::deque<IoOperation> queue_;  // GUARDED_BY(mutex_)
  std::vector<IoResult> results_;  // GUARDED_BY(mutex_)
  bool woken_ = false;             // GUARDED_BY(mutex_)
  bool stopping_ = false;          // GUARDED_BY(mutex_)
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(const std::vector<int>& device_fds) {
  return std::make_unique<ThreadEngine>(device_fds);
}

}  // namespace ckptfs
