// Asynchronous reads and writes on the volume's devices: io_uring, or threads where io_uring is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ckptfs {

struct IoOperation {
  bool write;
  unsigned device_index;
  uint64_t offset_bytes;
  std::byte* memory;
  uint32_t length_bytes;
  void* token;
};

struct IoResult {
  void* token;
  int error;  // 0, or the errno; a short transfer at the end of a device is EIO
};

// One thread submits and waits (the owner); wake() and add_buffer() may come from any thread.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  // Queues an operation; it may start only at the next wait().
  virtual void submit(const IoOperation& operation) = 0;
  // Waits for at least one completion, or a wake() since the last wait(). Appends to results.
  virtual void wait(std::vector<IoResult>& results) = 0;
  virtual void wake() = 0;
  // Registers staging memory with the kernel. True when operations in it need no page pinning any more.
  virtual bool add_buffer(size_t index, std::byte* memory, uint64_t length_bytes) = 0;
  virtual void remove_buffer(size_t index) = 0;
  virtual bool files_registered() const = 0;
};

struct EngineChoice {
  std::unique_ptr<IoEngine> engine;
  std::string name;    // "io_uring" or "threads"
  std::string reason;  // why this one
};

// backend: "auto", "io_uring" (throws where refused) or "threads". buffer_count: how many add_buffer indices.
EngineChoice make_engine(const std::string& backend, const std::vector<int>& device_fds, size_t buffer_count,
                         const std::byte* buffer_base, uint64_t buffer_bytes);

std::unique_ptr<IoEngine> make_uring_engine(const std::vector<int>& device_fds, size_t buffer_count,
                                            const std::byte* buffer_base, uint64_t buffer_bytes);
std::unique_ptr<IoEngine> make_thread_engine(const std::vector<int>& device_fds);

}  // namespace ckptfs
