// The switch: reads /dev/fuse, serves bulk requests from the data plane, passes the rest to pyfuse3 and back.
//
// Threads: readers (one request at a time each), one forwarder (drains what the socket would not take at once),
// one relay (pyfuse3's replies to the kernel), one notifier (cache invalidations, which may wait inside the kernel).
// No reader ever waits for Python; none waits for another request, except for staging memory once the bounce
// reserve is used up, and that needs no request to come free.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "data_plane.hpp"
#include "fuse_protocol.hpp"

namespace ckptfs {

using Message = std::vector<std::byte>;

// A FIFO that one thread drains.
class MessageQueue {
 public:
  void push(Message message);
  bool pop(Message& message);  // blocks; false after close()
  bool idle();
  void done();
  void close();

 private:
  std::mutex mutex_;  // a leaf
  std::condition_variable filled_;
  std::deque<Message> messages_;  // GUARDED_BY(mutex_)
  bool busy_ = false;             // GUARDED_BY(mutex_); a popped message is not out yet
  bool closed_ = false;           // GUARDED_BY(mutex_)
};

struct SwitchCounters {
  uint32_t max_write_bytes;
  unsigned reader_threads;
  uint32_t protocol_minor;
  uint64_t forwarded;
  std::map<std::string, uint64_t> requests;
  std::vector<std::string> kernel_features;
};

class Switch {
 public:
  Switch(DataPlane& data_plane, int fuse_fd, uint32_t max_write_bytes, unsigned reader_threads);
  ~Switch();

  int control_fd() const { return control_fd_; }
  void start();
  void stop();
  void reply(uint64_t unique, int error);
  void reply_write(uint64_t unique, uint32_t length_bytes);
  SwitchCounters counters();

 private:
  struct Landing;

  void read_requests();
  bool receive(Landing& landing, size_t& length_bytes);
  void dispatch(Landing& landing, size_t length_bytes);
  void serve_write(Landing& landing, size_t length_bytes);
  void serve_read(const fuse_in_header& header, const fuse_read_in& request);
  void serve_flush(const fuse_in_header& header, const fuse_flush_in& request);
  void give_fsync(const fuse_in_header& header, const fuse_fsync_in& request, EventKind kind);
  void serve_interrupt(const fuse_interrupt_in& request);

  void forward(Landing& landing, size_t length_bytes);
  void forward_batch_forget(const Message& message);
  void send_or_queue(Message message);
  void send_waiting(const Message& message);
  void fail(const Message& message);
  void run_forwarder();
  void run_relay();
  void run_notifier();
  void edit_reply(Message& reply);
  void edit_init(Message& reply);
  void note_init(const Message& message);
  void answer(uint64_t unique, int error, const void* body = nullptr, size_t length_bytes = 0);
  void answer_read(uint64_t unique, int error, const std::vector<iovec>& data);
  void send_to_kernel(const void* message, size_t length_bytes);
  void disconnect();

  DataPlane& data_plane_;
  const int fuse_fd_;
  const uint32_t max_write_bytes_;
  const unsigned reader_count_;
  int control_fd_ = -1;  // pyfuse3's end
  int socket_fd_ = -1;   // ours
  std::atomic<bool> stopping_{false};
  std::atomic<bool> disconnected_{false};
  std::atomic<unsigned> readers_running_{0};

  MessageQueue to_python_;
  MessageQueue notifications_;
  std::mutex replies_mutex_;                             // a leaf
  std::unordered_map<uint64_t, uint32_t> edit_opcodes_;  // GUARDED_BY(replies_mutex_): INIT, OPEN, CREATE under way
  std::atomic<uint64_t> init_unique_{0};
  std::atomic<uint64_t> offered_features_{0};
  std::atomic<uint64_t> granted_features_{0};
  std::atomic<uint32_t> protocol_minor_{0};
  std::array<std::atomic<uint64_t>, 64> requests_{};
  std::atomic<uint64_t> forwarded_{0};

  std::vector<std::thread> readers_;
  std::thread forwarder_;
  std::thread relay_;
  std::thread notifier_;
};

}  // namespace ckptfs
