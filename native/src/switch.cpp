#include "switch.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ckptfs {

namespace {

// The largest message that is not a WRITE: SETXATTR with 64 KiB, or a BATCH_FORGET, which we split.
constexpr size_t kSocketBufferBytes = 1 << 20;
constexpr size_t kLargestForwardBytes = 128 << 10;
constexpr uint32_t kForgetsPerMessage = 2048;
constexpr uint32_t kLargestReaddirBytes = 64 << 10;
constexpr size_t kLargestReplyBytes = 1 << 20;
constexpr size_t kMostIovecs = 1024;

int wake_signal() { return SIGRTMIN + 3; }

// A signal whose handler does nothing makes a blocked read return, so that a thread can see that it must stop.
void install_wake_signal() {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  sigaction(wake_signal(), &action, nullptr);
}

void set_socket_buffer(int fd) {
  const int bytes = kSocketBufferBytes;
  if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes) != 0) {  // needs CAP_NET_ADMIN
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
}

template <typename T>
T take(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

// Where a request lands: the fixed part in front of a WRITE's payload, then whole slots.
struct Switch::Landing {
  alignas(8) std::byte header[kWriteHeaderBytes];
  std::vector<std::byte*> slots;

  template <typename T>
  T body() const {
    static_assert(sizeof(fuse_in_header) + sizeof(T) <= kWriteHeaderBytes);
    return take<T>(header + sizeof(fuse_in_header));
  }

  Message copy(size_t length_bytes) const {
    Message message(length_bytes);
    size_t done = std::min(length_bytes, kWriteHeaderBytes);
    std::memcpy(message.data(), header, done);
    for (size_t i = 0; done < length_bytes; ++i) {
      const size_t part = std::min<size_t>(length_bytes - done, kSlotBytes);
      std::memcpy(message.data() + done, slots[i], part);
      done += part;
    }
    return message;
  }
};

void MessageQueue::push(Message message) {
  {
    const std::lock_guard lock(mutex_);
    messages_.push_back(std::move(message));
  }
  filled_.notify_one();
}

bool MessageQueue::pop(Message& message) {
  std::unique_lock lock(mutex_);
  filled_.wait(lock, [this] { return closed_ || !messages_.empty(); });
  if (messages_.empty()) return false;
  message = std::move(messages_.front());
  messages_.pop_front();
  busy_ = true;
  return true;
}

bool MessageQueue::idle() {
  const std::lock_guard lock(mutex_);
  return messages_.empty() && !busy_;
}

void MessageQueue::done() {
  const std::lock_guard lock(mutex_);
  busy_ = false;
}

void MessageQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  filled_.notify_all();
}

Switch::Switch(DataPlane& data_plane, int fuse_fd, uint32_t max_write_bytes, unsigned reader_threads)
    : data_plane_(data_plane), fuse_fd_(fuse_fd), max_write_bytes_(max_write_bytes), reader_count_(reader_threads) {
  if (max_write_bytes == 0 || max_write_bytes % kSlotBytes != 0) {
    throw std::invalid_argument("max_write_bytes must be a multiple of 1 MiB");
  }
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) throw_errno("socketpair");
  socket_fd_ = pair[0];
  control_fd_ = pair[1];
  set_socket_buffer(socket_fd_);
  set_socket_buffer(control_fd_);
  data_plane_.answer_write = [this](uint64_t unique, int error, uint32_t length_bytes) {
    if (error != 0) {
      answer(unique, error);
    } else {
      reply_write(unique, length_bytes);
    }
  };
}

Switch::~Switch() {
  stop();
  close(socket_fd_);
}

void Switch::start() {
  install_wake_signal();
  forwarder_ = std::thread([this] { run_forwarder(); });
  relay_ = std::thread([this] { run_relay(); });
  notifier_ = std::thread([this] { run_notifier(); });
  readers_running_ = reader_count_;
  for (unsigned i = 0; i < reader_count_; ++i) {
    readers_.emplace_back([this] {
      read_requests();
      --readers_running_;
    });
  }
}

void Switch::stop() {
  if (stopping_.exchange(true)) return;
  while (readers_running_ > 0) {
    for (std::thread& reader : readers_) pthread_kill(reader.native_handle(), wake_signal());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread& reader : readers_) reader.join();
  to_python_.close();
  notifications_.close();
  shutdown(socket_fd_, SHUT_RDWR);  // the relay's receive returns
  for (std::thread* thread : {&forwarder_, &relay_, &notifier_}) {
    if (thread->joinable()) thread->join();
  }
}

// Requests

void Switch::read_requests() {
  Landing landing;
  landing.slots = data_plane_.take_landing(max_write_bytes_ / kSlotBytes);
  size_t length_bytes = 0;
  while (!stopping_ && receive(landing, length_bytes)) {
    // No request is shorter than this; a shorter read is no request.
    if (length_bytes >= sizeof(fuse_in_header)) dispatch(landing, length_bytes);
  }
  data_plane_.return_landing(landing.slots);
}

// False when the connection has ended. length_bytes 0: nothing this time.
bool Switch::receive(Landing& landing, size_t& length_bytes) {
  iovec parts[1 + 64];
  parts[0] = {landing.header, kWriteHeaderBytes};
  const size_t slots = std::min<size_t>(landing.slots.size(), 64);
  for (size_t i = 0; i < slots; ++i) parts[1 + i] = {landing.slots[i], kSlotBytes};
  const ssize_t got = readv(fuse_fd_, parts, static_cast<int>(1 + slots));
  length_bytes = got > 0 ? static_cast<size_t>(got) : 0;
  if (got >= 0 || errno == EINTR || errno == EAGAIN || errno == ENOENT) return true;
  disconnect();
  return false;
}

void Switch::disconnect() {
  if (!disconnected_.exchange(true)) data_plane_.events().push(EventKind::disconnected);
}

void Switch::dispatch(Landing& landing, size_t length_bytes) {
  const auto header = take<fuse_in_header>(landing.header);
  ++requests_[std::min<size_t>(header.opcode, requests_.size() - 1)];
  switch (header.opcode) {
    case FUSE_WRITE:
      return serve_write(landing, length_bytes);
    case FUSE_READ:
      return serve_read(header, landing.body<fuse_read_in>());
    case FUSE_FLUSH:
      return serve_flush(header, landing.body<fuse_flush_in>());
    case FUSE_FSYNC:
      return give_fsync(header, landing.body<fuse_fsync_in>(), EventKind::fsync);
    case FUSE_FSYNCDIR:
      return give_fsync(header, landing.body<fuse_fsync_in>(), EventKind::fsyncdir);
    case FUSE_INTERRUPT:
      return serve_interrupt(landing.body<fuse_interrupt_in>());
    case FUSE_INIT:
      note_init(landing.copy(length_bytes));
      break;
    default:
      break;
  }
  forward(landing, length_bytes);
}

void Switch::serve_write(Landing& landing, size_t length_bytes) {
  const auto header = take<fuse_in_header>(landing.header);
  const auto in = landing.body<fuse_write_in>();
  if (kWriteHeaderBytes + in.size != length_bytes) return answer(header.unique, EIO);
  WriteRequest request;
  request.unique = header.unique;
  request.ino = header.nodeid;
  request.offset_bytes = in.offset;
  request.length_bytes = in.size;
  request.writer = {in.lock_owner, (in.write_flags & kWriteCache) != 0, (in.flags & O_APPEND) != 0, now_ns()};
  // A write-back is not the write(2) that asked for O_SYNC; msync and fsync send an FSYNC of their own.
  request.sync = (in.flags & O_DSYNC) != 0 && !request.writer.by_mapping;
  request.kill_set_id = (in.write_flags & kWriteKillSetId) != 0;
  request.slots = std::move(landing.slots);
  data_plane_.write(request);
  landing.slots = std::move(request.slots);
}

void Switch::serve_read(const fuse_in_header& header, const fuse_read_in& in) {
  const uint64_t unique = header.unique;
  const bool for_page_cache = (in.read_flags & kReadForCaller) == 0;
  data_plane_.read(header.nodeid, in.offset, in.size, for_page_cache,
                   [this, unique](int error, const std::vector<iovec>& data) { answer_read(unique, error, data); });
}

void Switch::answer_read(uint64_t unique, int error, const std::vector<iovec>& data) {
  if (error != 0) return answer(unique, error);
  fuse_out_header out{sizeof out, 0, unique};
  std::vector<iovec> message{{&out, sizeof out}};
  message.insert(message.end(), data.begin(), data.end());
  for (const iovec& part : data) out.len += static_cast<uint32_t>(part.iov_len);
  Message gathered;
  if (message.size() > kMostIovecs) {  // very many small extents: one copy more
    for (const iovec& part : message) {
      const auto* bytes = static_cast<const std::byte*>(part.iov_base);
      gathered.insert(gathered.end(), bytes, bytes + part.iov_len);
    }
    message = {{gathered.data(), gathered.size()}};
  }
  // ENOENT: the reader was killed meanwhile.
  [[maybe_unused]] const ssize_t sent = writev(fuse_fd_, message.data(), static_cast<int>(message.size()));
}

void Switch::serve_flush(const fuse_in_header& header, const fuse_flush_in& in) {
  const auto error = data_plane_.flush(header.nodeid, in.lock_owner, static_cast<int>(header.pid));
  if (error) {
    answer(header.unique, *error);
  } else {
    data_plane_.events().push(EventKind::flush, {header.unique, header.nodeid, in.fh, header.pid});
  }
}

void Switch::give_fsync(const fuse_in_header& header, const fuse_fsync_in& in, EventKind kind) {
  data_plane_.events().push(kind, {header.unique, header.nodeid, in.fh, header.pid});
}

// Never forwarded: libfuse would answer EAGAIN for requests it has not seen, and the kernel would send it again.
void Switch::serve_interrupt(const fuse_interrupt_in& in) {
  if (data_plane_.cancel_parked(in.unique)) {
    answer(in.unique, EINTR);
  } else {
    data_plane_.events().push(EventKind::interrupt, {in.unique});
  }
}

// To Python

void Switch::note_init(const Message& message) {
  fuse_init_in in{};  // kernels before 5.17 send a shorter one
  std::memcpy(&in, message.data() + sizeof(fuse_in_header),
              std::min(sizeof in, message.size() - sizeof(fuse_in_header)));
  offered_features_ = in.flags | (static_cast<uint64_t>(in.flags2) << 32);
  protocol_minor_ = in.minor;
}

void Switch::forward(Landing& landing, size_t length_bytes) {
  Message message = landing.copy(length_bytes);
  const auto header = take<fuse_in_header>(landing.header);
  if (header.opcode == FUSE_BATCH_FORGET) return forward_batch_forget(message);
  if (header.opcode == FUSE_READDIR || header.opcode == FUSE_READDIRPLUS) {
    auto in = landing.body<fuse_read_in>();
    in.size = std::min(in.size, kLargestReaddirBytes);
    std::memcpy(message.data() + sizeof header, &in, sizeof in);
  }
  if (header.opcode == FUSE_INIT || header.opcode == FUSE_OPEN || header.opcode == FUSE_CREATE) {
    const std::lock_guard lock(replies_mutex_);
    edit_opcodes_[header.unique] = header.opcode;
  }
  if (message.size() > kLargestForwardBytes) return answer(header.unique, E2BIG);
  send_or_queue(std::move(message));
}

// The kernel fills the whole landing with forgets; libfuse takes only what fits its own buffer.
void Switch::forward_batch_forget(const Message& message) {
  const auto header = take<fuse_in_header>(message.data());
  const auto in = take<fuse_batch_forget_in>(message.data() + sizeof header);
  const std::byte* entries = message.data() + sizeof header + sizeof in;
  const size_t came = (message.size() - sizeof header - sizeof in) / sizeof(fuse_forget_one);
  const auto total = static_cast<uint32_t>(std::min<size_t>(in.count, came));
  for (uint32_t first = 0; first < total; first += kForgetsPerMessage) {
    const uint32_t count = std::min(kForgetsPerMessage, total - first);
    const size_t entries_bytes = count * sizeof(fuse_forget_one);
    Message part(sizeof header + sizeof in + entries_bytes);
    fuse_in_header part_header = header;
    part_header.len = static_cast<uint32_t>(part.size());
    const fuse_batch_forget_in part_in{count, 0};
    std::memcpy(part.data(), &part_header, sizeof part_header);
    std::memcpy(part.data() + sizeof part_header, &part_in, sizeof part_in);
    std::memcpy(part.data() + sizeof header + sizeof in, entries + first * sizeof(fuse_forget_one), entries_bytes);
    send_or_queue(std::move(part));
  }
}

// Order is kept: a message goes out directly only when none waits before it.
void Switch::send_or_queue(Message message) {
  ++forwarded_;
  if (to_python_.idle()) {
    const ssize_t sent = send(socket_fd_, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == static_cast<ssize_t>(message.size())) return;
  }
  to_python_.push(std::move(message));
}

void Switch::send_waiting(const Message& message) {
  while (true) {
    const ssize_t sent = send(socket_fd_, message.data(), message.size(), MSG_NOSIGNAL);
    if (sent >= 0) return;
    if (errno == EINTR) continue;
    return fail(message);
  }
}

// Python cannot be reached: whoever waits for the answer gets one all the same.
void Switch::fail(const Message& message) {
  const auto header = take<fuse_in_header>(message.data());
  if (header.opcode != FUSE_FORGET && header.opcode != FUSE_BATCH_FORGET) answer(header.unique, EIO);
}

void Switch::run_forwarder() {
  Message message;
  while (to_python_.pop(message)) {
    send_waiting(message);
    to_python_.done();
  }
}

// From Python

void Switch::run_relay() {
  Message buffer(kLargestReplyBytes);
  while (true) {
    const ssize_t got = recv(socket_fd_, buffer.data(), buffer.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < static_cast<ssize_t>(sizeof(fuse_out_header))) return;  // pyfuse3 has closed its end
    Message reply(buffer.begin(), buffer.begin() + got);
    if (take<fuse_out_header>(reply.data()).unique == 0) {
      notifications_.push(std::move(reply));
      continue;
    }
    edit_reply(reply);
    send_to_kernel(reply.data(), reply.size());
    if (const uint64_t init = init_unique_.load(); init != 0 && take<fuse_out_header>(reply.data()).unique == init) {
      init_unique_ = 0;
      data_plane_.events().push(EventKind::initialised);
    }
  }
}

void Switch::run_notifier() {
  Message message;
  while (notifications_.pop(message)) {
    send_to_kernel(message.data(), message.size());
    notifications_.done();
  }
}

void Switch::edit_reply(Message& reply) {
  const auto out = take<fuse_out_header>(reply.data());
  uint32_t opcode = 0;
  {
    const std::lock_guard lock(replies_mutex_);
    const auto found = edit_opcodes_.find(out.unique);
    if (found == edit_opcodes_.end()) return;
    opcode = found->second;
    edit_opcodes_.erase(found);
  }
  if (out.error != 0) return;
  if (opcode == FUSE_INIT) {
    init_unique_ = out.unique;
    return edit_init(reply);
  }
  std::byte* at = reply.data() + sizeof out + (opcode == FUSE_CREATE ? sizeof(fuse_entry_out) : 0);
  if (at + sizeof(fuse_open_out) > reply.data() + reply.size()) return;
  auto open = take<fuse_open_out>(at);
  if ((open.open_flags & FOPEN_DIRECT_IO) != 0) open.open_flags |= kOpenParallelDirectWrites;
  std::memcpy(at, &open, sizeof open);
}

// pyfuse3 has no knob for these. Only what the kernel offered is asked for.
void Switch::edit_init(Message& reply) {
  if (reply.size() < sizeof(fuse_out_header) + sizeof(fuse_init_out)) return;
  auto out = take<fuse_init_out>(reply.data() + sizeof(fuse_out_header));
  const uint64_t wanted = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_ATOMIC_O_TRUNC | FUSE_DO_READDIRPLUS |
                          FUSE_ASYNC_DIO | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_HANDLE_KILLPRIV_V2 |
                          FUSE_INIT_EXT | FUSE_AUTO_INVAL_DATA | FUSE_CACHE_SYMLINKS | kInitDirectIoAllowMmap;
  // READDIRPLUS_AUTO: the kernel would also send plain READDIR, which pyfuse3 does not know.
  const uint64_t refused = FUSE_WRITEBACK_CACHE | FUSE_READDIRPLUS_AUTO | FUSE_HANDLE_KILLPRIV | FUSE_POSIX_LOCKS |
                           FUSE_FLOCK_LOCKS | FUSE_NO_OPEN_SUPPORT | FUSE_NO_OPENDIR_SUPPORT;
  uint64_t flags = out.flags | (static_cast<uint64_t>(out.flags2) << 32);
  flags = (flags | (wanted & offered_features_.load())) & ~refused;
  granted_features_ = flags;
  out.flags = static_cast<uint32_t>(flags);
  out.flags2 = static_cast<uint32_t>(flags >> 32);
  out.max_write = max_write_bytes_;
  out.max_pages = static_cast<uint16_t>(max_write_bytes_ / kBlockBytes);
  out.max_readahead = max_write_bytes_;
  out.max_background = 64;
  out.congestion_threshold = 48;
  std::memcpy(reply.data() + sizeof(fuse_out_header), &out, sizeof out);
}

// To the kernel

void Switch::send_to_kernel(const void* message, size_t length_bytes) {
  // ENOENT: the request was aborted meanwhile. Nothing else can be done about a reply that is not taken.
  [[maybe_unused]] const ssize_t sent = ::write(fuse_fd_, message, length_bytes);
}

void Switch::answer(uint64_t unique, int error, const void* body, size_t length_bytes) {
  fuse_out_header out{static_cast<uint32_t>(sizeof out + length_bytes), -error, unique};
  const iovec parts[] = {{&out, sizeof out}, {const_cast<void*>(body), length_bytes}};
  [[maybe_unused]] const ssize_t sent = writev(fuse_fd_, parts, body == nullptr ? 1 : 2);
}

void Switch::reply(uint64_t unique, int error) { answer(unique, error); }

void Switch::reply_write(uint64_t unique, uint32_t length_bytes) {
  const fuse_write_out out{length_bytes, 0};
  answer(unique, 0, &out, sizeof out);
}

SwitchCounters Switch::counters() {
  SwitchCounters counters{max_write_bytes_, reader_count_, protocol_minor_.load(), forwarded_.load(), {}, {}};
  for (size_t opcode = 0; opcode < requests_.size(); ++opcode) {
    if (const uint64_t count = requests_[opcode].load(); count > 0) {
      counters.requests[opcode_name(static_cast<uint32_t>(opcode))] += count;
    }
  }
  const uint64_t granted = granted_features_.load();
  const std::pair<uint64_t, const char*> names[] = {
      {FUSE_MAX_PAGES, "max_pages"},
      {FUSE_PARALLEL_DIROPS, "parallel_dirops"},
      {FUSE_HANDLE_KILLPRIV_V2, "handle_killpriv_v2"},
      {FUSE_DO_READDIRPLUS, "readdirplus"},
      {kInitDirectIoAllowMmap, "direct_io_allow_mmap"},
  };
  for (const auto& [bit, name] : names) {
    if ((granted & bit) != 0) counters.kernel_features.emplace_back(name);
  }
  return counters;
}

}  // namespace ckptfs
