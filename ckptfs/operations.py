"""The pyfuse3 adapter: arguments and errno, no policy.

READ, WRITE, FLUSH, FSYNC and FSYNCDIR never come here (ckptfs._native.Switch keeps them). setxattr's flags do not
either: pyfuse3 turns XATTR_CREATE and XATTR_REPLACE into a getxattr before it.

Concurrency: every handler runs without a checkpoint, so each request is atomic. What the kernel has to forget after a
killed writer is told to it by a task, when the handler has answered.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, SetattrFields, StatvfsData

from ckptfs.constants import MAX_NAME_BYTES
from ckptfs.errors import FsError, MetadataFull
from ckptfs.layout import BLOCK_BYTES
from ckptfs.read_path import ReadPath, preferred_io_bytes
from ckptfs.volume import AttributeChange, Attributes

if TYPE_CHECKING:
    import trio

    from ckptfs.volume import Volume

log = logging.getLogger(__name__)

CACHE_TIMEOUT_S = 3600.0
"""All changes go through the mount, so what the kernel keeps stays true; but for open versions, which may be undone."""
XATTR_PREFIX = b"user.ckptfs."
XATTR_NAMESPACES = (b"user.", b"trusted.", b"security.")

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
OperationsClass = TypeVar("OperationsClass", bound=type[pyfuse3.Operations])


def _answering(handler: Handler) -> Handler:
    """Whatever a handler raises becomes an errno: the mount lives."""

    @functools.wraps(handler)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return await handler(*args, **kwargs)
            except MetadataFull:
                # Nothing has changed; what was deleted and is not committed yet may make room.
                await args[0].wait_for_room()
                return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except (FsError, MetadataFull) as error:
            raise FUSEError(error.errno) from None
        except Exception as error:
            log.exception("%s%r failed", handler.__name__, args[1:])
            raise FUSEError(getattr(error, "errno", None) or errno.EIO) from error

    return wrapper  # type: ignore[return-value]


def answers_every_request(operations: OperationsClass) -> OperationsClass:
    """Wraps every request handler of a class."""
    for name in vars(pyfuse3.Operations):
        handler = vars(operations).get(name)
        # forget may not raise at all, and init and stacktrace are no requests.
        if handler is not None and not name.startswith("_") and name not in ("init", "stacktrace", "forget"):
            setattr(operations, name, _answering(handler))
    return operations


@answers_every_request
class Operations(pyfuse3.Operations):
    """Answers the kernel from a volume."""

    def __init__(self, volume: Volume, nursery: trio.Nursery, read_path: ReadPath) -> None:
        super().__init__()
        self._volume = volume
        self._read_path = read_path
        self._nursery = nursery
        self._next_handle = 1
        self._files: dict[int, tuple[int, bool]] = {}
        """File handle -> inode, writable."""
        self._directories: dict[int, tuple[int, list[tuple[bytes, int]]]] = {}
        """Directory handle -> inode, and the names as they were when reading began."""
        self._stale_data: set[int] = set()
        """Inodes whose pages in the kernel's cache may be of a version that was undone."""

    # Names.

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """LOOKUP."""
        return self._entry(self._volume.lookup(parent_inode, name))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """FORGET and BATCH_FORGET."""
        for ino, count in inode_list:
            self._volume.names.release(ino, count)
            self._read_path.forget(ino)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        """MKDIR."""
        return self._entry(self._volume.make(parent_inode, name, mode, ctx.uid, ctx.gid))

    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        """MKNOD."""
        return self._entry(self._volume.make(parent_inode, name, mode, ctx.uid, ctx.gid, rdev=rdev))

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        """SYMLINK."""
        mode = stat.S_IFLNK | 0o777
        return self._entry(self._volume.make(parent_inode, name, mode, ctx.uid, ctx.gid, target=target))

    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """UNLINK."""
        self._volume.unlink(parent_inode, name)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """RMDIR."""
        self._volume.rmdir(parent_inode, name)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        """RENAME and RENAME2."""
        self._volume.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        """LINK."""
        return self._entry(self._volume.link(inode, new_parent_inode, new_name))

    # Attributes.

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        """GETATTR."""
        return _attributes(self._volume.attributes(inode))

    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        """SETATTR."""
        change = AttributeChange(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size_bytes=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        if fields.update_size and ctx.uid != 0:
            self._volume.clear_set_id(inode)
        return _attributes(self._volume.set_attributes(inode, change, pid=ctx.pid, by_handle=fh is not None))

    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        """READLINK."""
        return self._volume.read_link(inode)

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """STATFS."""
        space = self._volume.statfs()
        answer = StatvfsData()
        answer.f_bsize = answer.f_frsize = BLOCK_BYTES
        answer.f_blocks = space.total_bytes // BLOCK_BYTES
        answer.f_bfree = answer.f_bavail = space.free_bytes // BLOCK_BYTES
        answer.f_files = space.inodes
        answer.f_ffree = answer.f_favail = space.free_inodes
        answer.f_namemax = MAX_NAME_BYTES
        return answer

    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        """ACCESS; never comes, for the kernel checks permissions itself (default_permissions)."""
        self._volume.attributes(inode)
        return True

    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        """GETXATTR."""
        if name.startswith(XATTR_PREFIX):
            return self._own_xattr(inode, name.removeprefix(XATTR_PREFIX))
        return self._volume.get_xattr(inode, _checked(name))

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        """SETXATTR."""
        self._volume.set_xattr(inode, _changeable(name), value)

    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        """LISTXATTR; without our own, which nobody should copy."""
        return self._volume.list_xattrs(inode)

    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        """REMOVEXATTR."""
        self._volume.remove_xattr(inode, _changeable(name))

    # Files.

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """CREATE."""
        append = bool(flags & os.O_APPEND)
        attributes = self._volume.create(parent_inode, name, mode, ctx.uid, ctx.gid, pid=ctx.pid, append=append)
        # Whatever the flags say, its creator counts as its writer.
        return self._file_info(attributes.ino, writable=True), self._entry(attributes)

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        """OPEN."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        truncate = bool(flags & os.O_TRUNC)
        self._volume.open(inode, writable=writable, append=bool(flags & os.O_APPEND), truncate=truncate, pid=ctx.pid)
        if truncate and ctx.uid != 0:
            self._volume.clear_set_id(inode)
        return self._file_info(inode, writable=writable)

    async def release(self, fh: int) -> None:
        """RELEASE."""
        inode, writable = self._files.pop(fh)
        self._volume.close(inode, writable=writable)
        if self._volume.files.stale:
            self._stale_data |= {stale.ino for stale in self._volume.files.stale if stale.name is None}
            self._nursery.start_soon(self._tell_the_kernel)

    # Directories.

    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        """OPENDIR."""
        fh = self._new_handle()
        self._directories[fh] = (inode, self._volume.list_directory(inode))
        return fh

    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """READDIRPLUS. The names are those of when reading began; a cookie is an index into them."""
        inode, names = self._directories[fh]
        if start_id == 0:
            names = self._volume.list_directory(inode)
            self._directories[fh] = (inode, names)
        for index in range(start_id, len(names)):
            name, ino = names[index]
            try:
                attributes = self._volume.attributes(ino)
            except FsError:
                continue
            entry = _attributes(attributes)
            if not pyfuse3.readdir_reply(token, name, entry, index + 1):
                return
            if name not in (b".", b".."):
                self._volume.names.acquire(ino)
                self._volume.names.remember(ino, inode, name)

    async def releasedir(self, fh: int) -> None:
        """RELEASEDIR."""
        del self._directories[fh]

    # Inside.

    def _new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _file_info(self, inode: int, *, writable: bool) -> FileInfo:
        fh = self._new_handle()
        self._files[fh] = (inode, writable)
        keep_cache = not writable and inode not in self._stale_data
        if not writable:
            # An open without keep_cache makes the kernel drop its pages.
            self._stale_data.discard(inode)
        direct = writable or self._read_path.bypasses_page_cache(inode, self._volume.attributes(inode).size_bytes)
        return FileInfo(fh=fh, direct_io=direct, keep_cache=keep_cache)

    def _entry(self, attributes: Attributes) -> EntryAttributes:
        """A reply that makes the kernel hold one more lookup."""
        self._volume.names.acquire(attributes.ino)
        return _attributes(attributes)

    def _own_xattr(self, inode: int, name: bytes) -> bytes:
        self._volume.attributes(inode)
        if name == b"volume":
            return str(self._volume.devices.volume_uuid).encode()
        if name == b"state":
            return self._volume.state(inode).encode()
        if name == b"devices":
            return self._volume.devices_of(inode).encode()
        raise FUSEError(errno.ENODATA)

    async def wait_for_room(self) -> None:
        """Waits for the room that is on its way."""
        await self._volume.wait_for_room()

    async def _tell_the_kernel(self) -> None:
        stale, self._volume.files.stale[:] = list(self._volume.files.stale), []
        for ino, parent, name in stale:
            if name is not None:
                pyfuse3.invalidate_entry_async(parent, name, ignore_enoent=True)
                continue
            try:
                pyfuse3.invalidate_inode(ino)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    log.warning("the kernel was not told that inode %d changed: %s", ino, error)


def _checked(name: bytes) -> bytes:
    if not name.startswith(XATTR_NAMESPACES):
        raise FUSEError(errno.EOPNOTSUPP)
    return name


def _changeable(name: bytes) -> bytes:
    if name.startswith(XATTR_PREFIX):
        raise FUSEError(errno.EPERM)
    return _checked(name)


def _attributes(attributes: Attributes) -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = attributes.ino
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_rdev = attributes.rdev
    entry.st_size = attributes.size_bytes
    entry.st_blksize = preferred_io_bytes(attributes.size_bytes)
    entry.st_blocks = attributes.allocated_bytes // 512
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    entry.attr_timeout = entry.entry_timeout = CACHE_TIMEOUT_S if attributes.settled else 0
    return entry
