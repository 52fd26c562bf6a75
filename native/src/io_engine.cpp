#include "io_engine.hpp"

#include <stdexcept>
#include <system_error>

namespace ckptfs {

EngineChoice make_engine(const std::string& backend, const std::vector<int>& device_fds, size_t buffer_count,
                         const std::byte* buffer_base, uint64_t buffer_bytes) {
  if (backend == "threads") return {make_thread_engine(device_fds), "threads", "asked for with io=threads"};
  if (backend != "auto" && backend != "io_uring") {
    throw std::invalid_argument("io backend must be auto, io_uring or threads, not " + backend);
  }
  try {
    auto engine = make_uring_engine(device_fds, buffer_count, buffer_base, buffer_bytes);
    return {std::move(engine), "io_uring", backend == "auto" ? "the kernel offers it" : "asked for with io=io_uring"};
  } catch (const std::system_error& error) {
    if (backend == "io_uring") throw;
    return {make_thread_engine(device_fds), "threads", std::string("io_uring is refused: ") + error.code().message()};
  }
}

}  // namespace ckptfs
