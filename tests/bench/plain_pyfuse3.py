"""A plain FUSE file system in Python: a pyfuse3 write handler that copies into memory. What ckptfs is measured against.

It costs what a Python handler must cost and no more: 1 MiB requests, one copy from the request into memory that was
touched before and is used again. With --direct-io, writes go past the page cache, which with pyfuse3 alone takes
MAP_SHARED away. Files lie flat in the root directory.

    python plain_pyfuse3.py [--direct-io] MOUNTPOINT
"""

from __future__ import annotations

import argparse
import errno
import mmap
import os
import stat
import time
from typing import TYPE_CHECKING

import pyfuse3
import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 64 << 20
FIRST_INO = pyfuse3.InodeT(pyfuse3.ROOT_INODE + 1)


class File:
    """Bytes in chunks of memory that come from a pool."""

    def __init__(self) -> None:
        self.chunks: list[memoryview] = []
        self.size_bytes = 0
        self.mtime_ns = time.time_ns()


class PlainHandler(pyfuse3.Operations):
    """The handlers that a save and a load need."""

    def __init__(self, *, direct_io: bool) -> None:
        super().__init__()
        self._direct_io = direct_io
        self._names: dict[bytes, pyfuse3.InodeT] = {}
        self._files: dict[pyfuse3.InodeT, File] = {}
        self._next_ino = FIRST_INO
        self._pool: list[memoryview] = []

    async def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_nlink = 1
        entry.st_uid = os.getuid()
        entry.st_gid = os.getgid()
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o755)
            return entry
        file = self._files[inode]
        entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o644)
        entry.st_size = file.size_bytes
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = file.mtime_ns
        return entry

    async def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if fields.update_size:
            self._files[inode].size_bytes = attr.st_size
        return await self.getattr(inode)

    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if name not in self._names:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(self._names[name])

    async def create(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        inode = self._next_ino
        self._next_ino = pyfuse3.InodeT(inode + 1)
        self._names[name] = inode
        self._files[inode] = File()
        return await self.open(inode, flags, ctx), await self.getattr(inode)

    async def open(self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), direct_io=self._direct_io)

    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        file = self._files[pyfuse3.InodeT(fh)]
        end = off + len(buf)
        while len(file.chunks) * CHUNK_BYTES < end:
            file.chunks.append(self._pool.pop() if self._pool else memoryview(mmap.mmap(-1, CHUNK_BYTES)))
        index, start = divmod(off, CHUNK_BYTES)
        if start + len(buf) <= CHUNK_BYTES:
            file.chunks[index][start : start + len(buf)] = buf
        else:
            first = CHUNK_BYTES - start
            file.chunks[index][start:] = buf[:first]
            file.chunks[index + 1][: len(buf) - first] = buf[first:]
        file.size_bytes = max(file.size_bytes, end)
        return len(buf)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        file = self._files[pyfuse3.InodeT(fh)]
        size = min(size, max(file.size_bytes - off, 0))
        index, start = divmod(off, CHUNK_BYTES)
        data = bytes(file.chunks[index][start : start + size]) if size else b""
        return data + (await self.read(fh, off + len(data), size - len(data)) if len(data) < size else b"")

    async def unlink(self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext) -> None:
        file = self._files[self._names.pop(name)]
        self._pool += file.chunks
        file.chunks = []
        file.size_bytes = 0

    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        pass

    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        pass

    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        pass

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        linked = set(self._names.values())
        for inode, _ in inode_list:
            if inode not in linked:
                self._files.pop(inode, None)


def main() -> None:
    """Serves the mount until it is unmounted."""
    parser = argparse.ArgumentParser(description="A plain pyfuse3 file system in memory.")
    parser.add_argument("--direct-io", action="store_true")
    parser.add_argument("mountpoint")
    arguments = parser.parse_args()
    options = set(pyfuse3.default_options) | {"fsname=plain"}
    pyfuse3.init(PlainHandler(direct_io=arguments.direct_io), arguments.mountpoint, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
