"""A data plane in memory that honours ckptfs/_native.pyi, for tests of the log and the volume.

A seal stores the whole file anew. Extents "reach their devices" at once, or, with hold_writes, when the test says so.
The bytes of devices live in a Disk, which outlives the data plane as real devices do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from ckptfs._native import DataPlane
from ckptfs.extents import Row, iter_rows, pack
from ckptfs.layout import MAX_EXTENT_BYTES, space_bytes
from ckptfs.native_types import FileAttributes, FileState, Seal

LARGEST_LOG_WRITE_BYTES = 64 << 10
SEAL_METADATA_BYTES = 400
"""What every seal has reserved for its rows."""


@dataclass
class Disk:
    """What the devices hold: (device, offset) -> bytes of the extent there."""

    extents: dict[tuple[int, int], bytes] = field(default_factory=dict)


@dataclass
class Version:
    content: bytes
    mtime_ns: int
    ctime_ns: int


@dataclass
class FakeFile:
    content: bytearray
    mtime_ns: int
    ctime_ns: int
    sealed: Version
    modified: bool = False
    killed: bool = False
    append: bool = False
    largest_write_bytes: int = 0
    unsealed_bytes: int = 0
    error: int = 0
    writers: set[int] = field(default_factory=set)
    seals: set[int] = field(default_factory=set)


class FakeDataPlane:
    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk if disk is not None else Disk()
        self.files: dict[int, FakeFile] = {}
        self.free_bytes = 0
        self.free_metadata_bytes = 0
        self.refused = 0
        self.hold_writes = False
        self.held_seals: dict[int, tuple[int, bytes]] = {}
        self.room_expired = 0
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: list[tuple[object, ...]] = []
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._next_seal = 1
        self._turn = 0

    def close(self) -> None:
        os.close(self.event_fd)

    # What the kernel would do.

    def write(self, ino: int, offset_bytes: int, data: bytes, *, pid: int = 1, time_ns: int | None = None) -> int:
        """Returns an errno."""
        file = self.files[ino]
        if self.refused or file.error:
            return self.refused or file.error
        if len(file.content) < offset_bytes:
            file.content.extend(bytes(offset_bytes - len(file.content)))
        file.content[offset_bytes : offset_bytes + len(data)] = data
        file.largest_write_bytes = max(file.largest_write_bytes, len(data))
        file.unsealed_bytes += len(data)
        self._modify(file, pid)
        if time_ns is not None:
            file.mtime_ns = file.ctime_ns = time_ns
        return 0

    def flush_seals(self, ino: int, *, pid: int = 1, dying: bool = False) -> bool:
        """A FLUSH: whether Python is to seal."""
        file = self.files[ino]
        if pid not in file.writers:
            return False
        if dying and not self._is_grown_log(file):
            file.killed = True
            return False
        return True

    def read(self, ino: int) -> bytes:
        return bytes(self.files[ino].content)

    def finish_seal(self, seal_id: int, errno: int = 0) -> None:
        ino, rows = self.held_seals.pop(seal_id)
        if ino in self.files:
            self.files[ino].seals.discard(seal_id)
            if errno:
                self.files[ino].error = errno
        self.push("sealed", seal_id, errno, b"" if errno else rows)

    def push(self, *event: object) -> None:
        self._events.append(event)
        os.eventfd_write(self.event_fd, 1)

    # The contract.

    def take_events(self) -> list[tuple[object, ...]]:
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return []
        events, self._events = self._events, []
        return events

    def grant(self, device_index: int, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges.setdefault(device_index, []).extend(ranges)

    def add_free(self, length_bytes: int) -> None:
        self.free_bytes += length_bytes

    def add_free_metadata(self, length_bytes: int) -> None:
        self.free_metadata_bytes += length_bytes

    def expire_no_room(self) -> None:
        self.room_expired += 1

    def register(
        self, ino: int, *, size_bytes: int, mtime_ns: int, ctime_ns: int, rows: bytes, set_id: bool = False
    ) -> None:
        assert ino not in self.files
        content = bytearray(size_bytes)
        for row in iter_rows(rows):
            stored = self.disk.extents[row.device_index, row.device_offset_bytes]
            content[row.file_offset_bytes : row.end_bytes] = stored[row.skip_bytes : row.skip_bytes + row.length_bytes]
        self.files[ino] = FakeFile(content, mtime_ns, ctime_ns, Version(bytes(content), mtime_ns, ctime_ns))

    def unregister(self, ino: int) -> None:
        assert not self.files[ino].seals
        del self.files[ino]

    def forget(self, ino: int) -> None:
        assert ino not in self.files

    def is_registered(self, ino: int) -> bool:
        return ino in self.files

    def attributes(self, ino: int) -> FileAttributes | None:
        file = self.files.get(ino)
        if file is None:
            return None
        return FileAttributes(len(file.content), file.mtime_ns, file.ctime_ns, space_bytes(len(file.content)))

    def state(self, ino: int) -> FileState | None:
        file = self.files.get(ino)
        if file is None:
            return None
        unwritten = len(file.content) if file.seals or file.modified else 0
        is_log = self._is_log(file)
        return FileState(file.modified, file.killed, is_log, file.unsealed_bytes, unwritten, file.error)

    def set_append(self, ino: int) -> None:
        self.files[ino].append = True

    def set_set_id(self, ino: int, set_id: bool) -> None:
        assert ino in self.files

    def note_modified(self, ino: int, pid: int) -> None:
        self._modify(self.files[ino], pid)

    def truncate(self, ino: int, size_bytes: int, time_ns: int, pid: int) -> None:
        file = self.files[ino]
        del file.content[size_bytes:]
        file.content.extend(bytes(size_bytes - len(file.content)))
        file.mtime_ns = file.ctime_ns = time_ns
        self._modify(file, pid)

    def set_times(self, ino: int, mtime_ns: int | None, ctime_ns: int | None) -> None:
        file = self.files[ino]
        file.mtime_ns = file.mtime_ns if mtime_ns is None else mtime_ns
        file.ctime_ns = file.ctime_ns if ctime_ns is None else ctime_ns

    def seal(self, ino: int) -> Seal | None:
        file = self.files[ino]
        if not file.modified:
            return None
        self.free_metadata_bytes -= SEAL_METADATA_BYTES
        seal_id, self._next_seal = self._next_seal, self._next_seal + 1
        file.sealed = Version(bytes(file.content), file.mtime_ns, file.ctime_ns)
        file.modified = file.killed = False
        file.unsealed_bytes = 0
        file.writers.clear()
        file.seals.add(seal_id)
        self.held_seals[seal_id] = (ino, self._store(file.sealed.content))
        if not self.hold_writes:
            self.finish_seal(seal_id)
        return Seal(seal_id, len(file.content), file.mtime_ns, file.ctime_ns, 0, SEAL_METADATA_BYTES)

    def revert(self, ino: int, lost_ino: int) -> FileAttributes:
        file = self.files[ino]
        self.files[lost_ino] = FakeFile(
            file.content, file.mtime_ns, file.ctime_ns, Version(b"", 0, 0), modified=True, unsealed_bytes=1
        )
        was = file.sealed
        restored = FakeFile(bytearray(was.content), was.mtime_ns, was.ctime_ns, was)
        restored.seals = file.seals
        self.files[ino] = restored
        attributes = self.attributes(ino)
        assert attributes is not None
        return attributes

    def set_error(self, ino: int, errno: int) -> None:
        self.files[ino].error = errno

    def refuse_writes(self, errno: int) -> None:
        self.refused = errno

    def flush_all(self) -> None:
        pass

    def as_data_plane(self) -> DataPlane:
        return cast(DataPlane, self)

    # Inside.

    def _modify(self, file: FakeFile, pid: int) -> None:
        file.modified = True
        file.writers.add(pid)

    def _is_log(self, file: FakeFile) -> bool:
        return file.append or file.largest_write_bytes <= LARGEST_LOG_WRITE_BYTES

    def _is_grown_log(self, file: FakeFile) -> bool:
        sealed = file.sealed.content
        has_grown = len(file.content) > len(sealed) and file.content.startswith(sealed)
        return file.append or (self._is_log(file) and has_grown)

    def _store(self, content: bytes) -> bytes:
        rows = []
        for at in range(0, len(content), MAX_EXTENT_BYTES):
            piece = content[at : at + MAX_EXTENT_BYTES]
            device, offset = self._place(space_bytes(len(piece)))
            self.disk.extents[device, offset] = piece
            rows.append(Row(at, len(piece), 0, device, 0, len(piece), offset, 0))
            self.free_bytes -= space_bytes(len(piece))
        return pack(rows)

    def _place(self, length_bytes: int) -> tuple[int, int]:
        self._turn += 1
        for step in range(len(self._ranges)):
            device = (self._turn + step) % len(self._ranges)
            for index, (offset, length) in enumerate(self._ranges[device]):
                if length >= length_bytes:
                    self._ranges[device][index] = (offset + length_bytes, length - length_bytes)
                    return device, offset
        raise AssertionError("no granted range is long enough")
