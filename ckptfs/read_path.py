"""Which way the kernel reads a file: into its page cache, or straight into the caller's memory.

A checkpoint is read once, in large pieces, into memory of its own. Past the page cache that costs one copy less and no
memory that the kernel has to find first, which in a virtual machine is most of the time. But each read(2) is then a
request of some 30 us, and each new mapping makes the kernel drop what it has cached of the file. So small files, and
large ones that were seen to be mapped or read in small pieces, go through the page cache. An open file keeps the way
it was opened with.

Source: FOPEN_DIRECT_IO and FUSE_DIRECT_IO_ALLOW_MMAP in linux/fuse.h; fuse_file_mmap() in fs/fuse/file.c.
"""

from __future__ import annotations

from ckptfs.layout import BLOCK_BYTES

LARGE_FILE_BYTES = 8 << 20
PREFERRED_READ_BYTES = 128 << 10
"""What stat(2) advises for a large file (st_blksize), and so the buffer of Python's and C's buffered files."""


def preferred_io_bytes(size_bytes: int) -> int:
    """st_blksize of a file of this size."""
    return PREFERRED_READ_BYTES if size_bytes >= LARGE_FILE_BYTES else BLOCK_BYTES


class ReadPath:
    """What is known of the habits of a mount's readers. Owned by the trio thread."""

    def __init__(self) -> None:
        self.may_bypass = False
        """Whether the kernel can map a file that it does not cache (Linux 6.6); known after INIT."""
        self._page_cache_wanted: set[int] = set()

    def want_page_cache(self, ino: int) -> None:
        """The file was seen to be mapped, or read in small pieces."""
        self._page_cache_wanted.add(ino)

    def forget(self, ino: int) -> None:
        """The kernel has forgotten the inode."""
        self._page_cache_wanted.discard(ino)

    @property
    def description(self) -> str:
        """For `ckptfs status`."""
        if self.may_bypass:
            return "past the page cache"
        return "through the page cache (past it they could not be mapped before Linux 6.6)"

    def bypasses_page_cache(self, ino: int, size_bytes: int) -> bool:
        """Whether an open for reading gets FOPEN_DIRECT_IO."""
        return self.may_bypass and size_bytes >= LARGE_FILE_BYTES and ino not in self._page_cache_wanted
