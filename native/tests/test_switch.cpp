#include <doctest/doctest.h>
#include <sys/socket.h>

#include "harness.hpp"
#include "switch.hpp"

namespace ckptfs::test {

namespace {

constexpr uint64_t kIno = 7;

// The kernel's end of a pair that stands for /dev/fuse, and pyfuse3's end of the switch's own pair.
class Rig {
 public:
  Rig() : harness(1), switch_(start()) { harness.plane().register_file(kIno, 0, 1, 1, "", false); }
  ~Rig() {
    switch_->stop();
    close(kernel_fd_);
    close(fuse_fd_);
    close(switch_->control_fd());
  }

  // A request as the kernel sends it; its length is right unless told otherwise.
  template <typename Body>
  void request(uint32_t opcode, uint64_t unique, const Body& body, const std::vector<std::byte>& payload = {},
               uint64_t ino = kIno) {
    Message message(sizeof(fuse_in_header) + sizeof body);
    fuse_in_header header{};
    header.len = static_cast<uint32_t>(message.size() + payload.size());
    header.opcode = opcode;
    header.unique = unique;
    header.nodeid = ino;
    header.pid = static_cast<uint32_t>(getpid());
    std::memcpy(message.data(), &header, sizeof header);
    std::memcpy(message.data() + sizeof header, &body, sizeof body);
    message.insert(message.end(), payload.begin(), payload.end());
    REQUIRE(send(kernel_fd_, message.data(), message.size(), 0) == static_cast<ssize_t>(message.size()));
  }

  Message answer() { return receive(kernel_fd_); }
  Message forwarded() { return receive(switch_->control_fd()); }
  bool nothing_forwarded() {
    pollfd ready{switch_->control_fd(), POLLIN, 0};
    return poll(&ready, 1, 50) == 0;
  }

  template <typename Body>
  void reply_from_python(uint64_t unique, const Body& body) {
    Message message(sizeof(fuse_out_header) + sizeof body);
    const fuse_out_header header{static_cast<uint32_t>(message.size()), 0, unique};
    std::memcpy(message.data(), &header, sizeof header);
    std::memcpy(message.data() + sizeof header, &body, sizeof body);
    REQUIRE(send(switch_->control_fd(), message.data(), message.size(), 0) > 0);
  }

  Harness harness;

 private:
  static Message receive(int fd) {
    Message message(4 << 20);
    const ssize_t got = recv(fd, message.data(), message.size(), 0);
    REQUIRE(got >= 0);
    message.resize(static_cast<size_t>(got));
    return message;
  }

  std::unique_ptr<Switch> start() {
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    kernel_fd_ = pair[0];
    fuse_fd_ = pair[1];
    const int bytes = 4 << 20;
    for (const int fd : pair) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    auto made = std::make_unique<Switch>(harness.plane(), fuse_fd_, kSlotBytes, 2);
    made->start();
    return made;
  }

  int kernel_fd_ = -1;
  int fuse_fd_ = -1;
  std::unique_ptr<Switch> switch_;
};

template <typename T>
T at(const Message& message, size_t offset) {
  T value;
  REQUIRE(message.size() >= offset + sizeof value);
  std::memcpy(&value, message.data() + offset, sizeof value);
  return value;
}

fuse_out_header header_of(const Message& message) { return at<fuse_out_header>(message, 0); }

fuse_write_in write_in(uint32_t size, uint64_t offset = 0) {
  fuse_write_in in{};
  in.size = size;
  in.offset = offset;
  in.lock_owner = 5;
  return in;
}

}  // namespace

TEST_CASE("WRITE and READ are answered without Python") {
  Rig rig;
  const auto data = pattern(100'003, 1);
  rig.request(FUSE_WRITE, 2, write_in(100'003), data);
  const Message written = rig.answer();
  CHECK(header_of(written).unique == 2);
  CHECK(header_of(written).error == 0);
  CHECK(at<fuse_write_out>(written, sizeof(fuse_out_header)).size == 100'003);
  fuse_read_in in{};
  in.size = 200'000;
  rig.request(FUSE_READ, 4, in);
  const Message read = rig.answer();
  CHECK(header_of(read).error == 0);
  CHECK(std::vector(read.begin() + sizeof(fuse_out_header), read.end()) == data);
  CHECK(rig.nothing_forwarded());
}

TEST_CASE("a WRITE whose size is not what came is refused, and the next one works") {
  Rig rig;
  const auto data = pattern(5000, 1);
  for (const uint32_t size : {4999u, 5001u, 1u << 30}) {
    rig.request(FUSE_WRITE, 2, write_in(size), data);
    CHECK(header_of(rig.answer()).error == -EIO);
  }
  rig.request(FUSE_WRITE, 4, write_in(5000), data);
  CHECK(header_of(rig.answer()).error == 0);
}

TEST_CASE("a FLUSH is Python's only when its owner has written") {
  Rig rig;
  fuse_flush_in flush{};
  flush.lock_owner = 5;
  rig.request(FUSE_FLUSH, 2, flush);
  CHECK(header_of(rig.answer()).error == 0);
  rig.request(FUSE_WRITE, 4, write_in(100), pattern(100, 1));
  rig.answer();
  flush.lock_owner = 6;
  rig.request(FUSE_FLUSH, 6, flush);
  CHECK(header_of(rig.answer()).error == 0);
  flush.lock_owner = 5;
  rig.request(FUSE_FLUSH, 8, flush);
  std::vector<Event> events;
  while (events.empty()) events = rig.harness.plane().events().take();
  CHECK(events[0].kind == EventKind::flush);
  CHECK(events[0].numbers[0] == 8);
}

TEST_CASE("other requests reach Python as they are, and replies the kernel") {
  Rig rig;
  fuse_getattr_in in{};
  in.fh = 0x1234;
  rig.request(FUSE_GETATTR, 10, in);
  const Message request = rig.forwarded();
  CHECK(at<fuse_in_header>(request, 0).unique == 10);
  CHECK(at<fuse_getattr_in>(request, sizeof(fuse_in_header)).fh == 0x1234);
  fuse_attr_out out{};
  out.attr.size = 99;
  rig.reply_from_python(10, out);
  CHECK(at<fuse_attr_out>(rig.answer(), sizeof(fuse_out_header)).attr.size == 99);
}

TEST_CASE("long lists of forgets are split, and none is lost") {
  Rig rig;
  constexpr uint32_t kCount = 5000;
  std::vector<std::byte> payload(kCount * sizeof(fuse_forget_one));
  for (uint32_t i = 0; i < kCount; ++i) {
    const fuse_forget_one one{i, 1};
    std::memcpy(payload.data() + i * sizeof one, &one, sizeof one);
  }
  rig.request(FUSE_BATCH_FORGET, 12, fuse_batch_forget_in{kCount, 0}, payload);
  uint64_t next = 0;
  while (next < kCount) {
    const Message part = rig.forwarded();
    const auto header = at<fuse_in_header>(part, 0);
    const auto in = at<fuse_batch_forget_in>(part, sizeof header);
    CHECK(header.len == part.size());
    CHECK(in.count <= 2048);
    for (uint32_t i = 0; i < in.count; ++i) {
      CHECK(at<fuse_forget_one>(part, sizeof header + sizeof in + i * sizeof(fuse_forget_one)).nodeid == next++);
    }
  }
  // A count beyond what came is cut down to it.
  rig.request(FUSE_BATCH_FORGET, 14, fuse_batch_forget_in{kCount, 0}, std::vector<std::byte>(16));
  CHECK(at<fuse_batch_forget_in>(rig.forwarded(), sizeof(fuse_in_header)).count == 1);
}

TEST_CASE("directory reads are clamped to what a reply can carry") {
  Rig rig;
  fuse_read_in in{};
  in.size = 4 << 20;
  rig.request(FUSE_READDIRPLUS, 16, in);
  CHECK(at<fuse_read_in>(rig.forwarded(), sizeof(fuse_in_header)).size == 64 << 10);
}

TEST_CASE("replies to OPEN and INIT get what pyfuse3 cannot say") {
  Rig rig;
  rig.request(FUSE_OPEN, 18, fuse_open_in{});
  rig.forwarded();
  rig.reply_from_python(18, fuse_open_out{1, FOPEN_DIRECT_IO, 0});
  CHECK(at<fuse_open_out>(rig.answer(), sizeof(fuse_out_header)).open_flags ==
        (FOPEN_DIRECT_IO | kOpenParallelDirectWrites));
  fuse_init_in init{};
  init.minor = 45;
  init.flags = FUSE_MAX_PAGES | FUSE_ASYNC_READ;
  rig.request(FUSE_INIT, 20, init);
  rig.forwarded();
  rig.reply_from_python(20, fuse_init_out{});
  const auto out = at<fuse_init_out>(rig.answer(), sizeof(fuse_out_header));
  CHECK(out.max_write == kSlotBytes);
  CHECK((out.flags & FUSE_MAX_PAGES) != 0);
  CHECK((out.flags & FUSE_PARALLEL_DIROPS) == 0);  // not offered
}

TEST_CASE("an INTERRUPT is never forwarded") {
  Rig rig;
  rig.request(FUSE_INTERRUPT, 23, fuse_interrupt_in{22});
  CHECK(rig.nothing_forwarded());
  bool told = false;
  for (const Event& event : rig.harness.plane().events().take()) told = told || event.kind == EventKind::interrupt;
  CHECK(told);
}

}  // namespace ckptfs::test
