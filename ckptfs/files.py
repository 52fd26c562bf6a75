"""Open files and their versions: from a create or open, over seals, to the commit or the way back (P3).

Every regular file that has a handle, or a seal that is not yet applied to the durable namespace, is registered in
the data plane, which then owns its size, times and map. A file has at most one open version. A new file's Create is
withheld from the log until its first seal, so a file that was never sealed is not there after a crash.

Concurrency: called from the trio thread only; nothing here waits, so each method is atomic for all others.
"""

from __future__ import annotations

import errno
import logging
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckptfs.constants import LOST_AND_FOUND_INO, MAX_NAME_BYTES
from ckptfs.errors import FsError
from ckptfs.namespace import Namespace
from ckptfs.records import Create, Record, Rename, Seal, SetAttributes, Unlink, added_metadata_bytes, apply

if TYPE_CHECKING:
    from ckptfs._native import DataPlane
    from ckptfs.commit import Log
    from ckptfs.names import Names
    from ckptfs.native_types import FileAttributes, FileState

log = logging.getLogger(__name__)

LOG_INTERVALS = 3
"""A file that grew in so many commit intervals in a row is a log that is sealed while it is open."""


class Withheld(NamedTuple):
    """The name of a file whose Create is not in the log yet."""

    parent: int
    name: bytes


@dataclass(slots=True)
class OpenFile:
    """A registered file."""

    ino: int
    withheld: Withheld | None = None
    handles: int = 0
    writers: int = 0
    seals: int = 0
    """Not yet applied to the durable namespace."""
    append: bool = False
    reserved_metadata_bytes: int = 0
    """What a withheld Create holds in the metadata region."""
    intervals_grown: int = 0
    last_size_bytes: int = 0


class KilledFile(NamedTuple):
    """A version whose writer was killed."""

    ino: int
    path: str
    kept_as: str | None
    """Where in lost+found what had been written is; None when nothing had."""
    size_bytes: int
    time_ns: int


class Stale(NamedTuple):
    """What the kernel may have cached and is not so any more: a name, or (name None) an inode's data."""

    ino: int
    parent: int
    name: bytes | None


AppendToLog = Callable[..., int]
"""Volume's way to the log: append(records, seal_ids=...)."""


class Files:
    """The registered files of a volume."""

    def __init__(
        self, live: Namespace, volume_log: Log, data_plane: DataPlane, names: Names, append: AppendToLog
    ) -> None:
        self._live = live
        self._log = volume_log
        self._data_plane = data_plane
        self._names = names
        self._append = append
        self._files: dict[int, OpenFile] = {}
        self.killed: list[KilledFile] = []
        self.stale: list[Stale] = []
        """For the kernel's ears; whoever serves it takes them."""

    def __iter__(self) -> Iterator[OpenFile]:
        return iter(list(self._files.values()))

    def get(self, ino: int) -> OpenFile | None:
        """The file, if it is registered."""
        return self._files.get(ino)

    def attributes(self, ino: int) -> FileAttributes | None:
        """What the data plane says of a registered file."""
        return self._data_plane.attributes(ino) if ino in self._files else None

    def state(self, ino: int) -> FileState | None:
        """What the data plane says of a registered file's versions."""
        return self._data_plane.state(ino) if ino in self._files else None

    def is_modified(self, ino: int) -> bool:
        """True while there is an open version."""
        state = self.state(ino)
        return state is not None and state.modified

    def register(self, ino: int) -> OpenFile:
        """The file, registered now if it was not."""
        file = self._files.get(ino)
        if file is not None:
            return file
        inode = self._live.get(ino)
        if not inode.is_file:
            raise FsError(errno.EISDIR if inode.is_directory else errno.EINVAL)
        committed = self._log.durable.inodes.get(ino)
        if committed is None and inode.nlink == 0:
            raise FsError(errno.ESTALE, "the file was deleted and nobody had it open")
        self._data_plane.register(
            ino,
            size_bytes=inode.size_bytes,
            mtime_ns=inode.mtime_ns,
            ctime_ns=inode.ctime_ns,
            rows=committed.rows if committed is not None else b"",
            set_id=bool(inode.mode & (stat.S_ISUID | stat.S_ISGID)),
        )
        file = self._files[ino] = OpenFile(ino, last_size_bytes=inode.size_bytes)
        return file

    def register_new(self, create: Create) -> OpenFile:
        """A file that was just created in the live namespace; its Create waits for the first seal."""
        file = self.register(create.ino)
        file.withheld = Withheld(create.parent, create.name)
        self._reserve_metadata(file, added_metadata_bytes(create))
        return file

    def open(self, file: OpenFile, *, writable: bool, append: bool) -> None:
        """One more handle."""
        file.handles += 1
        file.writers += writable
        self._names.acquire(file.ino)
        self._log.hold(file.ino)
        if append:
            file.append = True
            self._data_plane.set_append(file.ino)

    def close(self, file: OpenFile, *, writable: bool) -> None:
        """One handle less. With the last writer the open version is sealed, or undone if the writer was killed."""
        file.handles -= 1
        file.writers -= writable
        if file.writers == 0:
            self._settle(file)
        if file.handles == 0:
            self._log.unhold(file.ino)
        self._unregister_if_idle(file)
        self._names.release(file.ino)

    def seal(self, file: OpenFile) -> None:
        """Turns the open version, if there is one, into the next to commit. A deleted file's stays as it is."""
        inode = self._live.inodes.get(file.ino)
        if inode is None or inode.nlink == 0:
            return
        if self._log.error is not None:
            raise self._log.error
        seal = self._data_plane.seal(file.ino)
        if seal is None:
            return
        record = Seal(file.ino, seal.size_bytes, seal.mtime_ns, seal.ctime_ns, seal.truncate_to_bytes, b"")
        apply(self._live, record)
        records: list[Record] = [record]
        if file.withheld is not None:
            create = self._withheld_create(file.ino, file.withheld)
            self._reserve_metadata(file, added_metadata_bytes(create))
            records.insert(0, create)
            file.withheld = None
        file.seals += 1
        reserved_bytes = seal.metadata_bytes + file.reserved_metadata_bytes
        file.reserved_metadata_bytes = 0
        self._append(records, seal_ids=[seal.seal_id], reserved_metadata_bytes=reserved_bytes)

    def applied(self, records: Sequence[Record]) -> None:
        """Records of one entry were applied to the durable namespace."""
        for record in records:
            if isinstance(record, Seal) and (file := self._files.get(record.ino)) is not None:
                file.seals -= 1
                self._unregister_if_idle(file)

    def seal_logs(self) -> None:
        """A commit interval is over: seals, as they stand, the logs that have grown for long enough (P3)."""
        for file in self:
            state = self._data_plane.state(file.ino)
            attributes = self._data_plane.attributes(file.ino)
            if state is None or attributes is None or not state.log or not file.writers:
                continue
            grew = attributes.size_bytes > file.last_size_bytes
            file.last_size_bytes = attributes.size_bytes
            if file.append or file.intervals_grown >= LOG_INTERVALS:
                self.seal(file)
            else:
                file.intervals_grown = file.intervals_grown + 1 if grew else 0

    def close_all(self) -> list[str]:
        """The mount is gone and no more is heard of its handles: what they left open counts as a killed writer's.

        Returns:
            The paths of the files whose open version was undone.
        """
        undone = []
        for file in self:
            state = self._data_plane.state(file.ino)
            inode = self._live.inodes.get(file.ino)
            if file.handles and state is not None and state.modified and inode is not None and inode.nlink:
                undone.append(self._names.path(file.ino))
                if self._log.error is None:
                    self._revert(file, state)
            if file.handles:
                file.handles = file.writers = 0
                self._log.unhold(file.ino)
            self._unregister_if_idle(file)
        return undone

    def _withheld_create(self, ino: int, withheld: Withheld) -> Create:
        """The Create of a file, with the attributes it has now. Its directory gets the times it has in the mount."""
        inode = self._live.get(ino)
        return Create(
            parent=withheld.parent,
            name=withheld.name,
            ino=ino,
            mode=inode.mode,
            uid=inode.uid,
            gid=inode.gid,
            rdev=0,
            target=None,
            xattrs=inode.xattrs,
            atime_ns=inode.atime_ns,
            mtime_ns=inode.mtime_ns,
            ctime_ns=inode.ctime_ns,
            time_ns=self._live.get(withheld.parent).mtime_ns,
        )

    def _settle(self, file: OpenFile) -> None:
        """The last writer is gone."""
        state = self._data_plane.state(file.ino)
        inode = self._live.inodes.get(file.ino)
        if state is None or not state.modified or inode is None or inode.nlink == 0 or self._log.error is not None:
            return
        if state.killed:
            self._revert(file, state)
        else:
            self.seal(file)

    def _revert(self, file: OpenFile, state: FileState) -> None:
        """Undoes the open version; what had been written goes to lost+found."""
        path = self._names.path(file.ino)
        attributes = self._data_plane.attributes(file.ino)
        size_bytes = attributes.size_bytes if attributes is not None else 0
        if file.withheld is not None:
            kept = self._put_new_file_away(file, file.withheld, keep=state.unsealed_bytes > 0)
        else:
            kept = self._bring_back_sealed_version(file, keep=state.unsealed_bytes > 0)
        kept_as = self._names.path(kept) if kept is not None else None
        self.killed.append(KilledFile(file.ino, path, kept_as, size_bytes, time.time_ns()))
        log.warning("the writer of %s was killed before it closed the file; kept as %s", path, kept_as or "nothing")

    def _put_new_file_away(self, file: OpenFile, withheld: Withheld, *, keep: bool) -> int | None:
        """Takes a new file's name away. Returns the inode if it is kept, in lost+found."""
        now_ns = time.time_ns()
        self.stale += [Stale(file.ino, withheld.parent, withheld.name), Stale(withheld.parent, 0, None)]
        if not keep:
            apply(self._live, Unlink(withheld.parent, withheld.name, now_ns))
            self.log_directory_times(withheld.parent)
            return None
        name = _lost_name(withheld.name, file.ino)
        apply(self._live, Rename(withheld.parent, withheld.name, LOST_AND_FOUND_INO, name, 0, now_ns))
        self.log_directory_times(withheld.parent)
        self._names.remember(file.ino, LOST_AND_FOUND_INO, name)
        file.withheld = Withheld(LOST_AND_FOUND_INO, name)
        self.stale.append(Stale(LOST_AND_FOUND_INO, 0, None))
        self.seal(file)
        return file.ino

    def _bring_back_sealed_version(self, file: OpenFile, *, keep: bool) -> int | None:
        """Gives a file its last sealed version back. Returns the new inode that what was written went to."""
        inode = self._live.get(file.ino)
        lost_ino = self._live.next_ino
        name = _lost_name(self._names.path(file.ino).rpartition("/")[2].encode(), lost_ino)
        written = self._data_plane.attributes(file.ino)
        assert written is not None
        was = self._data_plane.revert(file.ino, lost_ino)
        inode.size_bytes, inode.mtime_ns, inode.ctime_ns = was.size_bytes, was.mtime_ns, was.ctime_ns
        self.stale.append(Stale(file.ino, 0, None))
        if not keep:
            self._data_plane.unregister(lost_ino)
            return None
        create = Create(
            parent=LOST_AND_FOUND_INO,
            name=name,
            ino=lost_ino,
            mode=stat.S_IFREG | inode.mode & 0o777,
            uid=inode.uid,
            gid=inode.gid,
            rdev=0,
            target=None,
            xattrs=None,
            atime_ns=inode.atime_ns,
            mtime_ns=written.mtime_ns,
            ctime_ns=time.time_ns(),
            time_ns=time.time_ns(),
        )
        apply(self._live, create)
        self._names.remember(lost_ino, LOST_AND_FOUND_INO, name)
        self.stale.append(Stale(LOST_AND_FOUND_INO, 0, None))
        lost = self._files[lost_ino] = OpenFile(lost_ino, withheld=Withheld(LOST_AND_FOUND_INO, name))
        self.seal(lost)
        return lost_ino

    def _reserve_metadata(self, file: OpenFile, length_bytes: int) -> None:
        """Makes this what its withheld Create holds in the metadata region."""
        self._data_plane.add_free_metadata(file.reserved_metadata_bytes - length_bytes)
        file.reserved_metadata_bytes = length_bytes

    def log_directory_times(self, ino: int) -> None:
        """The coming and going of a file that was never sealed leaves no more than this in the log."""
        inode = self._live.get(ino)
        self._append([SetAttributes(ino, None, None, None, None, inode.mtime_ns, inode.ctime_ns)])

    def _unregister_if_idle(self, file: OpenFile) -> None:
        if file.handles or file.seals:
            return
        inode = self._live.inodes.get(file.ino)
        attributes = self._data_plane.attributes(file.ino)
        if inode is not None and attributes is not None:
            if self._log.error is not None and inode.nlink and self.is_modified(file.ino):
                return  # What could not be logged stays readable until the daemon ends.
            inode.size_bytes = attributes.size_bytes
            inode.mtime_ns, inode.ctime_ns = attributes.mtime_ns, attributes.ctime_ns
        self._reserve_metadata(file, 0)
        del self._files[file.ino]
        self._data_plane.unregister(file.ino)
        if file.ino not in self._log.durable.inodes:
            self._data_plane.forget(file.ino)


def _lost_name(name: bytes, ino: int) -> bytes:
    """A name in lost+found that nothing else has: inode numbers are never used twice."""
    suffix = b".%d" % ino
    return name[: MAX_NAME_BYTES - len(suffix)] + suffix
