#include "fuse_protocol.hpp"

#include <iterator>

namespace ckptfs {

namespace {

// Indexed by opcode; linux/fuse.h enum fuse_opcode.
constexpr const char* kNames[] = {
    nullptr,        "LOOKUP",        "FORGET",      "GETATTR",  "SETATTR",  "READLINK",
    "SYMLINK",      nullptr,         "MKNOD",       "MKDIR",    "UNLINK",   "RMDIR",
    "RENAME",       "LINK",          "OPEN",        "READ",     "WRITE",    "STATFS",
    "RELEASE",      nullptr,         "FSYNC",       "SETXATTR", "GETXATTR", "LISTXATTR",
    "REMOVEXATTR",  "FLUSH",         "INIT",        "OPENDIR",  "READDIR",  "RELEASEDIR",
    "FSYNCDIR",     "GETLK",         "SETLK",       "SETLKW",   "ACCESS",   "CREATE",
    "INTERRUPT",    "BMAP",          "DESTROY",     "IOCTL",    "POLL",     "NOTIFY_REPLY",
    "BATCH_FORGET", "FALLOCATE",     "READDIRPLUS", "RENAME2",  "LSEEK",    "COPY_FILE_RANGE",
    "SETUPMAPPING", "REMOVEMAPPING", "SYNCFS",      "TMPFILE",  "STATX",
};

}  // namespace

const char* opcode_name(uint32_t opcode) {
  const char* name = opcode < std::size(kNames) ? kNames[opcode] : nullptr;
  return name == nullptr ? "OTHER" : name;
}

}  // namespace ckptfs
