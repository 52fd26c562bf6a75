#include "process.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <string>
#include <string_view>

namespace ckptfs {

namespace {

std::string read_proc(int tid, const char* name) {
  const std::string path = "/proc/" + std::to_string(tid) + "/" + name;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  char buffer[2048];
  const ssize_t got = read(fd, buffer, sizeof buffer);
  close(fd);
  return got > 0 ? std::string(buffer, static_cast<size_t>(got)) : std::string();
}

int number_at(std::string_view text) {
  int number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

int process_of_thread(int tid) {
  if (tid <= 0) return 0;
  const std::string status = read_proc(tid, "status");
  const size_t at = status.find("\nTgid:\t");
  return at == std::string::npos ? 0 : number_at(std::string_view(status).substr(at + 7));
}

bool dying_of_signal(int tid) {
  if (tid <= 0) return false;
  const std::string stat = read_proc(tid, "stat");
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return false;
  const size_t last = stat.find_last_of(' ');
  if (last == std::string::npos || last < name_end) return false;
  return (number_at(std::string_view(stat).substr(last + 1)) & 0x7f) != 0;
}

}  // namespace ckptfs
