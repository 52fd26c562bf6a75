"""The contract between the control plane (Python) and the data plane (C++, native/).

Every call returns at once: none waits for a device, for memory or for the trainer. Calls release the
GIL and are safe from any thread; the control plane makes them from the trio thread only.
An inode is named by its number, a device by its index in the volume. Times are nanoseconds since 1970.
`rows` are packed extent rows, sorted by file offset, as laid out in ckptfs.layout.EXTENT_ROW.
"""

from collections.abc import Sequence

from ckptfs.native_types import FileAttributes as FileAttributes
from ckptfs.native_types import FileState as FileState
from ckptfs.native_types import Seal as Seal

EXTENT_ROW_BYTES: int

# ("sealed", seal_id, errno, rows)        all extents of a seal are on their devices (not yet barriered), or failed
# ("flush", unique, ino, fh, pid)         a FLUSH that must seal; Switch.reply (others are answered natively)
# ("fsync", unique, ino, fh, pid)         FSYNC; answer with Switch.reply
# ("fsyncdir", unique, ino, fh, pid)      FSYNCDIR; answer with Switch.reply
# ("sync_write", unique, ino, length)     an O_SYNC/O_DSYNC WRITE is staged; seal, wait, then Switch.reply_write
# ("interrupt", unique)                   INTERRUPT of a request that was given to Python by one of the events above
# ("grant_wanted", device_index)          few free ranges left on a device: hand out segments
# ("no_room", needed_bytes)               a write is parked for room: hurry the commit, then expire_no_room()
# ("kill_suidgid", ino)                   a write by an unprivileged user: clear the set-id bits
# ("page_cache_wanted", ino)              the kernel fills its page cache with it, or it is read in many small pieces
# ("device_error", device_index, operation, offset_bytes, length_bytes, errno)
# ("bad_checksum", ino, file_offset_bytes, device_index, device_offset_bytes, length_bytes)
# ("initialised",)                        the INIT reply reached the kernel
# ("disconnected",)                       ENODEV: the mount is gone
Event = tuple[object, ...]

class DataPlane:
    def __init__(
        self,
        *,
        device_fds: Sequence[int],
        device_names: Sequence[str],
        staging_limit_bytes: int,
        io_backend: str = "auto",
        keep_killed: bool = False,
    ) -> None:
        """io_backend is "auto", "io_uring" or "threads". The fds stay the caller's. At least 64 MiB of staging."""

    def start(self) -> None: ...
    def stop(self) -> None:
        """Ends the threads. Nothing may be dirty that is still wanted."""

    @property
    def event_fd(self) -> int:
        """Readable when take_events() has something."""

    def take_events(self) -> list[Event]: ...

    # Device space. The control plane's allocator owns the free ranges; what it hands out is the data plane's.
    def grant(self, device_index: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Hands over free (offset_bytes, length_bytes) ranges, 4 KiB aligned, to place extents in.

        An empty list says that nothing is left there: "grant_wanted" comes again only after an add_free().
        """

    def add_free(self, length_bytes: int) -> None:
        """Raises the bytes that writes may reserve: once at the start, then whatever a commit released."""

    @property
    def free_bytes(self) -> int:
        """Device bytes not reserved by any staged write and not in use: what statfs shows as free."""

    def add_free_metadata(self, length_bytes: int) -> None:
        """Changes the bytes of the metadata region that writes may reserve for their extents' rows.

        Once at the start, then down (negative) for each name that the control plane takes in, and up for what a
        commit did not need or released. It may go below 0 for a while; nothing can be reserved then.
        """

    @property
    def free_metadata_bytes(self) -> int:
        """Bytes of the metadata region that nothing has reserved."""

    def expire_no_room(self) -> None:
        """No more room is on its way: parked writes that still do not fit get ENOSPC. Retries them first."""

    # Files.
    def register(
        self, ino: int, *, size_bytes: int, mtime_ns: int, ctime_ns: int, rows: bytes, set_id: bool = False
    ) -> None:
        """REQUIRES: not registered. Before OPEN/CREATE is answered. set_id asks for "kill_suidgid" events."""

    def unregister(self, ino: int) -> None:
        """Forgets the file; unsealed data is dropped and its space returned. REQUIRES: no seal in flight.

        A clean file's extents stay in memory as a cache, found again by register() with the same rows.
        """

    def forget(self, ino: int) -> None:
        """Drops what is still cached of an unregistered file: it is deleted."""

    def is_registered(self, ino: int) -> bool: ...
    def attributes(self, ino: int) -> FileAttributes | None:
        """None when not registered."""

    def state(self, ino: int) -> FileState | None: ...
    def set_append(self, ino: int) -> None:
        """The file was opened with O_APPEND: it is a log."""

    def set_set_id(self, ino: int, set_id: bool) -> None: ...
    def note_modified(self, ino: int, pid: int) -> None:
        """A create by this process makes an open version: the FLUSH of that process will seal."""

    def truncate(self, ino: int, size_bytes: int, time_ns: int, pid: int) -> None:
        """Part of the open version; pid as in note_modified. Sets mtime and ctime."""

    def set_times(self, ino: int, mtime_ns: int | None, ctime_ns: int | None) -> None:
        """Does not by itself make an open version."""

    def seal(self, ino: int) -> Seal | None:
        """Turns the open version into the next version to commit; None when there is no open version."""

    def revert(self, ino: int, lost_ino: int) -> FileAttributes:
        """Undoes the open version. What had been written moves to lost_ino (registered here, modified, not sealed).

        Returns what ino's attributes are again.
        """

    def set_error(self, ino: int, errno: int) -> None:
        """Every later write to the file fails with errno; 0 clears."""

    def refuse_writes(self, errno: int) -> None:
        """Every later WRITE on the volume fails with errno (EROFS after a broken order)."""

    def flush_all(self) -> None:
        """Start writing what is staged and still partial."""

    def statistics(self) -> dict[str, object]:
        """Keys: io_backend, io_backend_reason, buffers_registered, files_registered, staging_limit_bytes,
        staging_populated_bytes, staging_used_bytes, staging_dirty_bytes (all int/str/bool), parked_writes,
        unwritten_bytes, bytes_acknowledged, devices: list of dict(name, written_bytes, read_bytes,
        outstanding_bytes, write_errors, read_errors, checksum_errors, granted_bytes).
        """

class Switch:
    """Between /dev/fuse and pyfuse3 (design section 3). Owns reader, forwarder, relay and notifier threads."""

    def __init__(self, data_plane: DataPlane, *, fuse_fd: int, max_write_bytes: int, reader_threads: int) -> None: ...
    @property
    def control_fd(self) -> int:
        """The end of the SOCK_SEQPACKET pair to give to pyfuse3.init as /dev/fd/N (pyfuse3 owns it from then on)."""

    def start(self) -> None: ...
    def stop(self) -> None:
        """Ends the threads; after "disconnected" or before the daemon gives up."""

    def reply(self, unique: int, errno: int) -> None:
        """Answers a flush/fsync/fsyncdir/sync_write event; 0 is success (not for sync_write)."""

    def reply_write(self, unique: int, length_bytes: int) -> None: ...
    def statistics(self) -> dict[str, object]:
        """Keys: max_write_bytes, reader_threads, protocol_minor, requests (dict opcode name -> count),
        forwarded, kernel_features (list of str granted by the kernel).
        """

def checksum(data: bytes) -> int:
    """XXH3-64, seed 0."""
