"""The whole file system without FUSE: names, attributes, files, and their way into the log.

Each change is checked and applied to the live namespace, which serves all requests, and appended to the log before
it is acknowledged. The durable namespace follows commit by commit (ckptfs.commit).

Concurrency: all state belongs to the trio thread. Every method but `run`, `fsync`, `sync` and `drain` is synchronous,
so it is atomic for all others; those four wait for the log or the clock only, with nothing half done. Worker threads
(started by the log) see devices, the journal and the frozen durable namespace, never anything here.
"""

from __future__ import annotations

import errno
import logging
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import trio

from ckptfs import extents
from ckptfs.commit import Log
from ckptfs.constants import MAX_FILE_BYTES, RENAME_EXCHANGE
from ckptfs.dataplane import SpaceSupply
from ckptfs.errors import CkptfsError, FsError, MetadataFull
from ckptfs.files import Files
from ckptfs.names import Names, live_copy
from ckptfs.namespace import INODE_METADATA_BYTES, Inode, dentry_metadata_bytes
from ckptfs.records import (
    Create,
    Link,
    Mount,
    Record,
    RemoveXattr,
    Rename,
    Rmdir,
    SetAttributes,
    SetXattr,
    Unlink,
    added_metadata_bytes,
    apply,
)
from ckptfs.snapshot import capacity_bytes, metadata_bytes

if TYPE_CHECKING:
    from ckptfs._native import DataPlane
    from ckptfs.recovery import Recovered
    from ckptfs.superblock import VolumeDevices

log = logging.getLogger(__name__)

METADATA_FILL = 15 / 16
"""How much of the metadata region may be reserved. The rest is for extents that free space in pieces makes several."""
MAX_TOLD_ERRORS = 100
MAX_ALLOCATED_KNOWN = 1 << 16


class Attributes(NamedTuple):
    """What stat(2) tells."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size_bytes: int
    allocated_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    settled: bool
    """Nothing but a later request will change it: caches may keep it, and the name. Not so with an open version."""


class Space(NamedTuple):
    """What statfs(2) tells."""

    total_bytes: int
    free_bytes: int
    inodes: int
    free_inodes: int


@dataclass(frozen=True)
class AttributeChange:
    """Arguments of set_attributes; None leaves an attribute as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Volume:
    """A mounted volume."""

    def __init__(
        self,
        devices: VolumeDevices,
        recovered: Recovered,
        data_plane: DataPlane,
        *,
        read_only: bool = False,
        commit_interval_s: float = 30.0,
    ) -> None:
        self.devices = devices
        self.read_only = read_only
        self.live = live_copy(recovered.namespace)
        self.log = Log(devices, recovered, data_plane, self._applied)
        self.names = Names(self.live)
        self.files = Files(self.live, self.log, data_plane, self.names, self._append)
        self.space = SpaceSupply(data_plane, recovered.allocator, len(devices.devices))
        self.errors: deque[str] = deque(maxlen=MAX_TOLD_ERRORS)
        """Device errors and bad checksums, for status."""
        self._data_plane = data_plane
        self._commit_interval_s = commit_interval_s
        self._total_bytes = sum(end - start for start, end in devices.data_regions)
        self._changed: OrderedDict[int, int] = OrderedDict()
        """Inode -> position of its last change in the log, oldest first; those that are durable are pruned."""
        self._allocated: dict[int, tuple[bytes, int]] = {}
        """Of unregistered files: the rows, and the bytes that they allocate."""
        self.space.start()
        metadata_limit_bytes = int(capacity_bytes(devices.superblocks) * METADATA_FILL)
        data_plane.add_free_metadata(metadata_limit_bytes - metadata_bytes(recovered.namespace))
        if read_only:
            data_plane.refuse_writes(errno.EROFS)
        else:
            self._append([Mount(recovered.epoch, time.time_ns())])

    async def run(self) -> None:
        """Commits, and seals logs at every interval, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit)
            while True:
                await trio.sleep(self._commit_interval_s)
                try:
                    self.files.seal_logs()
                except CkptfsError as error:
                    log.warning("logs cannot be sealed: %s", error)

    async def _commit(self) -> None:
        if self.read_only:
            return
        await self.log.run()
        # Only a broken order ends it.
        self._data_plane.refuse_writes(errno.EROFS)
        for file in self.files:
            if file.seals:
                self._data_plane.set_error(file.ino, errno.EIO)
        self.errors.append(f"the volume takes no more changes: {self.log.error}")

    # Looking.

    def attributes(self, ino: int) -> Attributes:
        """What stat(2) tells of an inode."""
        inode = self.live.get(ino)
        registered = self.files.attributes(ino)
        if registered is not None:
            size_bytes, mtime_ns, ctime_ns, allocated_bytes = registered
            settled = not self.files.is_modified(ino)
        else:
            size_bytes, mtime_ns, ctime_ns = inode.size_bytes, inode.mtime_ns, inode.ctime_ns
            allocated_bytes = self._committed_allocated_bytes(inode)
            settled = True
        return Attributes(
            ino=ino,
            mode=inode.mode,
            nlink=inode.nlink,
            uid=inode.uid,
            gid=inode.gid,
            rdev=inode.rdev,
            size_bytes=size_bytes,
            allocated_bytes=allocated_bytes,
            atime_ns=inode.atime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=ctime_ns,
            settled=settled,
        )

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """The inode that a name leads to."""
        if name == b".":
            return self.attributes(parent)
        if name == b"..":
            return self.attributes(self.live.get(parent).parent)
        inode = self.live.lookup(parent, name)
        self.names.remember(inode.ino, parent, name)
        return self.attributes(inode.ino)

    def list_directory(self, ino: int) -> list[tuple[bytes, int]]:
        """Names and inodes in a directory, with "." and ".."."""
        children = self.live.directory(ino)
        return [(b".", ino), (b"..", self.live.get(ino).parent), *children.items()]

    def read_link(self, ino: int) -> bytes:
        """A symbolic link's target."""
        target = self.live.get(ino).target
        if target is None:
            raise FsError(errno.EINVAL)
        return target

    def statfs(self) -> Space:
        """Sizes of the volume."""
        free_inodes = max(self._data_plane.free_metadata_bytes, 0) // INODE_METADATA_BYTES
        count = len(self.live.inodes)
        return Space(self._total_bytes, self._data_plane.free_bytes, count + free_inodes, free_inodes)

    # Names.

    def create(self, parent: int, name: bytes, mode: int, uid: int, gid: int, *, pid: int, append: bool) -> Attributes:
        """Makes a regular file and opens it for writing; its Create is withheld until its first seal."""
        self._require_writable(INODE_METADATA_BYTES + dentry_metadata_bytes(name))
        record = self._new(parent, name, stat.S_IFREG | stat.S_IMODE(mode), uid, gid)
        apply(self.live, record)
        file = self.files.register_new(record)
        self._data_plane.note_modified(file.ino, pid)
        self.files.open(file, writable=True, append=append)
        self.names.remember(file.ino, parent, name)
        return self.attributes(file.ino)

    def make(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, *, rdev: int = 0, target: bytes | None = None
    ) -> Attributes:
        """Makes a directory, node, symbolic link, or an empty file that is not opened."""
        self._require_writable(INODE_METADATA_BYTES + dentry_metadata_bytes(name) + len(target or b""))
        record = self._new(parent, name, mode, uid, gid, rdev=rdev, target=target)
        self._do(record)
        self.names.remember(record.ino, parent, name)
        return self.attributes(record.ino)

    def unlink(self, parent: int, name: bytes) -> None:
        """Removes a name of something that is no directory. A never-sealed file's removal is not logged."""
        self._require_writable()
        file = self.files.get(self.live.lookup(parent, name).ino)
        record = Unlink(parent, name, time.time_ns())
        if file is None or file.withheld is None:
            self._do(record)
        else:
            apply(self.live, record)
            self.files.log_directory_times(parent)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Removes an empty directory."""
        self._require_writable()
        self._do(Rmdir(parent, name, time.time_ns()))

    def rename(self, old_parent: int, old_name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Moves a name. A file with an open version is sealed first (P3)."""
        self._require_writable(dentry_metadata_bytes(new_name))
        record = Rename(old_parent, old_name, new_parent, new_name, flags, time.time_ns())
        moved = self.live.lookup(old_parent, old_name)
        replaced_ino = self.live.directory(new_parent).get(new_name)
        # The live namespace first, for it tells whether the rename is allowed; the log gets the seals before it.
        apply(self.live, record)
        self._seal_if_open(moved.ino)
        if flags & RENAME_EXCHANGE and replaced_ino is not None:
            self._seal_if_open(replaced_ino)
            self.names.remember(replaced_ino, old_parent, old_name)
        self.names.remember(moved.ino, new_parent, new_name)
        self._append([record])

    def link(self, ino: int, parent: int, name: bytes) -> Attributes:
        """Gives an inode another name. A file with an open version is sealed first (P3)."""
        self._require_writable(dentry_metadata_bytes(name))
        record = Link(ino, parent, name, time.time_ns())
        apply(self.live, record)
        self._data_plane_times(ino, None, record.time_ns)
        self._seal_if_open(ino)
        self._append([record])
        return self.attributes(ino)

    # Attributes.

    def set_attributes(self, ino: int, change: AttributeChange, *, pid: int, by_handle: bool) -> Attributes:
        """Does what chmod, chown, utimens and truncate do.

        Args:
            ino: Of what.
            change: What.
            pid: Whose FLUSH will seal a truncation by handle.
            by_handle: The caller has the file open; a truncation by path with no other open version seals at once.
        """
        self._require_writable()
        inode = self.live.get(ino)
        if change.size_bytes is not None:
            self.truncate(ino, change.size_bytes, pid=pid, seal=not by_handle)
        mode = change.mode
        if mode is None and not inode.is_directory and (change.uid is not None or change.gid is not None):
            mode = _without_set_id(inode.mode)
        now_ns = time.time_ns()
        mtime_ns = change.mtime_ns
        if self._data_plane_times(ino, mtime_ns, now_ns):
            # The time is part of an open version and goes with its seal.
            mtime_ns = None
        record = SetAttributes(ino, mode, change.uid, change.gid, change.atime_ns, mtime_ns, now_ns)
        if any(value is not None for value in (mode, change.uid, change.gid, change.atime_ns, mtime_ns)):
            self._do_with_seal(record)
        if mode is not None and self.files.get(ino) is not None:
            self._data_plane.set_set_id(ino, bool(mode & (stat.S_ISUID | stat.S_ISGID)))
        return self.attributes(ino)

    def truncate(self, ino: int, size_bytes: int, *, pid: int, seal: bool) -> None:
        """Sets a file's size, as part of its open version.

        Args:
            ino: The file.
            size_bytes: Its new size.
            pid: Whose FLUSH will seal it.
            seal: Seal at once, if there was no open version.
        """
        self._require_writable()
        if size_bytes > MAX_FILE_BYTES:
            raise FsError(errno.EFBIG)
        file = self.files.register(ino)
        was_modified = self.files.is_modified(ino)
        self._data_plane.truncate(ino, size_bytes, time.time_ns(), pid)
        if seal and not was_modified:
            self.files.seal(file)

    def clear_set_id(self, ino: int) -> None:
        """An unprivileged user wrote: the set-id bits go."""
        inode = self.live.inodes.get(ino)
        if inode is None or _without_set_id(inode.mode) == inode.mode:
            return
        now_ns = time.time_ns()
        self._do_with_seal(SetAttributes(ino, _without_set_id(inode.mode), None, None, None, None, now_ns))
        if self.files.get(ino) is not None:
            self._data_plane.set_set_id(ino, False)

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        """Sets an extended attribute."""
        self._require_writable(len(name) + len(value))
        now_ns = time.time_ns()
        self._do_with_seal(SetXattr(ino, name, value, now_ns))
        self._data_plane_times(ino, None, now_ns)

    def get_xattr(self, ino: int, name: bytes) -> bytes:
        """An extended attribute's value."""
        value = (self.live.get(ino).xattrs or {}).get(name)
        if value is None:
            raise FsError(errno.ENODATA)
        return value

    def list_xattrs(self, ino: int) -> list[bytes]:
        """Names of all extended attributes."""
        return list(self.live.get(ino).xattrs or {})

    def remove_xattr(self, ino: int, name: bytes) -> None:
        """Removes an extended attribute."""
        self._require_writable()
        now_ns = time.time_ns()
        self._do_with_seal(RemoveXattr(ino, name, now_ns))
        self._data_plane_times(ino, None, now_ns)

    # Open files.

    def open(self, ino: int, *, writable: bool, append: bool = False, truncate: bool = False, pid: int = 0) -> None:
        """Opens a regular file: registered in the data plane from here on."""
        if writable or truncate:
            self._require_writable()
        file = self.files.register(ino)
        self.files.open(file, writable=writable, append=append)
        if truncate:
            self._data_plane.truncate(ino, 0, time.time_ns(), pid)

    def close(self, ino: int, *, writable: bool) -> None:
        """Closes a handle. REQUIRES: it is open."""
        file = self.files.get(ino)
        assert file is not None, f"inode {ino} is not open"
        self.files.close(file, writable=writable)

    def flush(self, ino: int) -> int:
        """A writer closed one of its descriptors: seals. Returns the errno that its close(2) is to have."""
        file = self.files.get(ino)
        if file is None:
            return 0
        self.files.seal(file)
        state = self.files.state(ino)
        return state.error if state is not None else 0

    async def fsync(self, ino: int) -> None:
        """Makes a file durable, and all that was sealed before (P2)."""
        self._seal_if_open(ino)
        await self.sync()
        state = self.files.state(ino)
        if state is not None and state.error:
            raise FsError(state.error)

    async def sync(self) -> None:
        """Makes everything durable that is in the log."""
        await self.log.wait_durable(self.log.position)

    async def drain(self) -> None:
        """Makes everything durable and leaves a snapshot for the next mount. REQUIRES: no handle is open."""
        if not self.read_only:
            await self.log.finish()

    async def wait_for_room(self) -> None:
        """Waits for all the room that the log still holds back."""
        self.log.hurry()
        await self.log.wait_applied(self.log.position)

    # What became of it.

    def is_durable(self, ino: int) -> bool:
        """True when an inode's last change is on the devices and it has no open version."""
        return self._changed.get(ino, 0) <= self.log.durable_position and not self.files.is_modified(ino)

    def undurable(self) -> list[int]:
        """Inodes with changes that are not on the devices: in the log, then those with an open version."""
        self._prune_changed()
        open_versions = [file.ino for file in self.files if self.files.is_modified(file.ino)]
        inos = [ino for ino in dict.fromkeys([*self._changed, *open_versions]) if ino in self.live.inodes]
        return [ino for ino in inos if self.live.inodes[ino].nlink]

    def state(self, ino: int) -> str:
        """What user.ckptfs.state tells.

        incomplete: it has an open version. buffered: sealed, and not all of its bytes are on devices. flushing: they
        are, and the commit is on its way. durable: safe. failed: it never will be.
        """
        state = self.files.state(ino)
        if state is not None and state.error:
            return "failed"
        if state is not None and state.modified:
            return "incomplete"
        if self._changed.get(ino, 0) <= self.log.durable_position:
            return "durable"
        if self.log.error is not None:
            return "failed"
        return "buffered" if state is not None and state.unwritten_bytes else "flushing"

    def progress(self) -> dict[str, int]:
        """How far the way to the devices still is."""
        unwritten_bytes = self._data_plane.statistics()["unwritten_bytes"]
        assert isinstance(unwritten_bytes, int)
        entries = self.log.position - self.log.durable_position
        return {"unwritten_bytes": unwritten_bytes, "log_entries": entries}

    def committed_rows(self, ino: int) -> bytes:
        """The map of a file's durable version."""
        inode = self.log.durable.inodes.get(ino)
        return inode.rows if inode is not None else b""

    def devices_of(self, ino: int) -> str:
        """What user.ckptfs.devices tells: lines of device and bytes, of a file's durable version."""
        used = dict.fromkeys((device.path for device in self.devices.devices), 0)
        for extent in extents.stored_extents(self.committed_rows(ino)):
            used[self.devices.devices[extent.device_index].path] += extent.space_bytes
        return "\n".join(f"{path} {used_bytes}" for path, used_bytes in used.items() if used_bytes)

    # Inside.

    def _require_writable(self, more_metadata_bytes: int = 0) -> None:
        if self.read_only:
            raise FsError(errno.EROFS)
        if self.log.error is not None:
            raise FsError(errno.EROFS, f"the volume takes no more changes: {self.log.error}")
        if more_metadata_bytes > self._data_plane.free_metadata_bytes and more_metadata_bytes:
            raise MetadataFull("the metadata region is full: delete files, or make the volume anew on larger devices")

    def _new(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, *, rdev: int = 0, target: bytes | None = None
    ) -> Create:
        directory = self.live.get(parent)
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        now_ns = time.time_ns()
        return Create(
            parent=parent,
            name=name,
            ino=self.live.next_ino,
            mode=mode,
            uid=uid,
            gid=gid,
            rdev=rdev,
            target=target,
            xattrs=None,
            atime_ns=now_ns,
            mtime_ns=now_ns,
            ctime_ns=now_ns,
            time_ns=now_ns,
        )

    def _do(self, record: Record) -> None:
        apply(self.live, record)
        self._append([record])

    def _do_with_seal(self, record: SetAttributes | SetXattr | RemoveXattr) -> None:
        """Attribute changes of a file that was never sealed go with its seal: its Create will carry them."""
        apply(self.live, record)
        file = self.files.get(record.ino)
        if file is None or file.withheld is None:
            self._append([record])

    def _append(
        self, records: Sequence[Record], *, seal_ids: Sequence[int] = (), reserved_metadata_bytes: int | None = None
    ) -> int:
        """To the log. What the entry may take in the metadata region is reserved here, unless it was before."""
        if reserved_metadata_bytes is None:
            reserved_metadata_bytes = sum(map(added_metadata_bytes, records))
            self._data_plane.add_free_metadata(-reserved_metadata_bytes)
        position = self.log.append(records, seal_ids=seal_ids, reserved_metadata_bytes=reserved_metadata_bytes)
        for record in records:
            for ino in self._touched(record):
                self._changed[ino] = position
                self._changed.move_to_end(ino)
        return position

    def _touched(self, record: Record) -> list[int]:
        """The inodes whose state a person would see change."""
        if isinstance(record, Rename):
            moved = self.live.directory(record.new_parent).get(record.new_name, record.new_parent)
            return [record.old_parent, record.new_parent, moved]
        if isinstance(record, (Unlink, Rmdir)):
            return [record.parent]
        if isinstance(record, (Create, Link)):
            return [record.parent, record.ino]
        return [] if isinstance(record, Mount) else [record.ino]

    def _applied(self, records: Sequence[Record]) -> None:
        self.files.applied(records)
        self._prune_changed()

    def _prune_changed(self) -> None:
        while self._changed:
            ino, position = next(iter(self._changed.items()))
            if position > self.log.durable_position:
                return
            del self._changed[ino]

    def _seal_if_open(self, ino: int) -> None:
        file = self.files.get(ino)
        if file is not None:
            self.files.seal(file)

    def _data_plane_times(self, ino: int, mtime_ns: int | None, ctime_ns: int) -> bool:
        """Sets the times of a registered file where they live. Returns whether they are part of an open version."""
        if self.files.get(ino) is None:
            return False
        self._data_plane.set_times(ino, mtime_ns, ctime_ns)
        return self.files.is_modified(ino)

    def _committed_allocated_bytes(self, inode: Inode) -> int:
        if not inode.is_file:
            return 0
        rows = self.committed_rows(inode.ino)
        known = self._allocated.get(inode.ino)
        if known is None or known[0] is not rows:
            if len(self._allocated) >= MAX_ALLOCATED_KNOWN:
                self._allocated.clear()
            known = self._allocated[inode.ino] = (rows, extents.allocated_bytes(rows))
        return known[1]


def _without_set_id(mode: int) -> int:
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode
