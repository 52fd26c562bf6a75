"""One device of a volume: a block device, or an image file that is used like one.

A device is opened with O_DIRECT where that works (`direct` says so), else with buffered I/O and fdatasync. Two locks
keep others away: O_EXCL, by which the kernel refuses a block device that is mounted or part of something, and
flock, exclusive for whoever may write and shared for those who read without mounting. Failures name the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from pathlib import Path
from types import TracebackType

from ckptfs.errors import DeviceBusy, DeviceError, DeviceFailed, DeviceMissing, DeviceTooSmall, UsageError
from ckptfs.layout import BLOCK_BYTES, MIB, round_down, round_up

DYING_HOLDER_PATIENCE_S = 5.0
"""How long a lock of a process that has died already is waited for."""
MAX_TRANSFER_BYTES = 4 * MIB

BLKGETSIZE64 = 0x80081272
BLKSSZGET = 0x1268
BLKDISCARD = 0x1277


class Device:
    """An open device. Methods may be called from any thread."""

    def __init__(self, path: str, fd: int, *, direct: bool, is_block: bool) -> None:
        """Takes over fd; use open()."""
        self.path = path
        self.fd = fd
        self.direct = direct
        self.is_block = is_block
        self.size_bytes = round_down(_size_bytes(fd, is_block), BLOCK_BYTES)
        self.block_bytes = _logical_block_bytes(fd) if is_block else BLOCK_BYTES
        self._barrier_is_needed = not (is_block and direct and _is_write_through(fd))

    @classmethod
    def open(cls, path: str, *, writable: bool, exclusive: bool) -> Device:
        """Opens and locks a device.

        Args:
            path: A block device or a regular file.
            writable: For reading and writing, else for reading only.
            exclusive: Nobody else may have it open through here; a block device must not be mounted or part of
                something. Without it, others may read too, but not write.

        Raises:
            DeviceMissing: It is not there, or nothing that can be a device.
            DeviceBusy: Someone else has it.
            DeviceFailed: It cannot be opened.
            DeviceTooSmall: Its logical blocks are larger than ours.
        """
        is_block = _is_block_device(path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_EXCL if exclusive and is_block else 0)
        fd, direct = _open_direct(path, flags | os.O_CLOEXEC)
        try:
            _lock(path, fd, exclusive=exclusive)
            device = cls(path, fd, direct=direct, is_block=is_block)
            if device.block_bytes > BLOCK_BYTES:
                raise DeviceTooSmall(f"{path} has blocks of {device.block_bytes} bytes; ckptfs works with up to 4096")
        except BaseException:
            os.close(fd)
            raise
        return device

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the device and its locks back. May be called twice."""
        if self.fd >= 0:
            # Said aloud, because an io_uring that is being torn down may keep the file open a little longer.
            with contextlib.suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            self.fd = -1

    def is_same(self, path: str) -> bool:
        """True when path leads to this device, by whatever name."""
        try:
            there, here = os.stat(path), os.fstat(self.fd)
        except OSError:
            return False
        if self.is_block:
            return stat.S_ISBLK(there.st_mode) and there.st_rdev == here.st_rdev
        return os.path.samestat(there, here)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Reads any range; I/O is aligned inside.

        Raises:
            DeviceFailed: It could not be read in full.
        """
        start = round_down(offset_bytes, BLOCK_BYTES)
        end = round_up(offset_bytes + length_bytes, BLOCK_BYTES)
        pieces: list[bytes] = []
        with mmap.mmap(-1, max(min(end - start, MAX_TRANSFER_BYTES), BLOCK_BYTES)) as buffer:
            for at in range(start, end, MAX_TRANSFER_BYTES):
                piece_bytes = min(MAX_TRANSFER_BYTES, end - at)
                self._read_into(buffer, at, piece_bytes)
                first = max(offset_bytes - at, 0)
                pieces.append(buffer[first : min(piece_bytes, offset_bytes + length_bytes - at)])
        return b"".join(pieces)

    def write(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        """Writes whole blocks. REQUIRES: offset and length are multiples of BLOCK_BYTES.

        Raises:
            DeviceFailed: It could not be written in full; any part of it may have been.
        """
        assert offset_bytes % BLOCK_BYTES == 0 and len(data) % BLOCK_BYTES == 0, (offset_bytes, len(data))
        view = memoryview(data)
        with mmap.mmap(-1, max(min(len(view), MAX_TRANSFER_BYTES), BLOCK_BYTES)) as buffer:
            for start in range(0, len(view), MAX_TRANSFER_BYTES):
                piece = view[start : start + MAX_TRANSFER_BYTES]
                buffer[: len(piece)] = piece
                self._write_from(buffer, offset_bytes + start, len(piece))

    def zero(self, offset_bytes: int, length_bytes: int) -> None:
        """Writes zeros. REQUIRES: as for write()."""
        zeros = bytes(min(length_bytes, MAX_TRANSFER_BYTES))
        for at in range(0, length_bytes, MAX_TRANSFER_BYTES):
            self.write(offset_bytes + at, memoryview(zeros)[: min(MAX_TRANSFER_BYTES, length_bytes - at)])

    def barrier(self) -> None:
        """Returns when all that was written is on the medium, not only in the device's cache.

        Raises:
            DeviceFailed: Nobody knows what is there of all that was written since the last barrier.
        """
        if self._barrier_is_needed:
            try:
                os.fdatasync(self.fd)
            except OSError as error:
                raise self._failed("flush the cache of", 0, 0, error) from error

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """Tells a block device that a range holds nothing; a device that cannot be told is left alone."""
        if self.is_block and length_bytes:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.fd, BLKDISCARD, struct.pack("QQ", offset_bytes, length_bytes))

    def _read_into(self, buffer: mmap.mmap, offset_bytes: int, length_bytes: int) -> None:
        done = 0
        try:
            with memoryview(buffer) as view:
                while done < length_bytes:
                    count = os.preadv(self.fd, [view[done:length_bytes]], offset_bytes + done)
                    if count == 0:
                        raise OSError(errno.EIO, "the device ends there")
                    done += count
        except OSError as error:
            raise self._failed("read", offset_bytes, length_bytes, error) from error

    def _write_from(self, buffer: mmap.mmap, offset_bytes: int, length_bytes: int) -> None:
        done = 0
        try:
            with memoryview(buffer) as view:
                while done < length_bytes:
                    done += os.pwritev(self.fd, [view[done:length_bytes]], offset_bytes + done)
        except OSError as error:
            raise self._failed("write", offset_bytes, length_bytes, error) from error

    def _failed(self, verb: str, offset_bytes: int, length_bytes: int, error: OSError) -> DeviceFailed:
        where = f" at offset {offset_bytes}, length {length_bytes}" if length_bytes else ""
        return DeviceFailed(
            f"cannot {verb} {self.path}{where}: {error.strerror or error}; check the device (dmesg)",
            error.errno or errno.EIO,
        )


def create_image(path: str, size_bytes: int) -> None:
    """Makes an image file with all its space allocated. REQUIRES: nothing has that path.

    Raises:
        UsageError: The path is taken.
        DeviceFailed: It could not be made; nothing is left of it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} exists; remove it first, or leave --size out to use it as it is") from error
    except OSError as error:
        raise DeviceFailed(f"cannot create {path}: {error.strerror}", error.errno or errno.EIO) from error
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.fsync(fd)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, OSError):
            message = f"cannot give {path} its {size_bytes} bytes: {error.strerror}; free some space or make it smaller"
            raise DeviceFailed(message, error.errno or errno.EIO) from error
        raise
    finally:
        os.close(fd)
    folder_fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def is_mounted(path: str) -> str | None:
    """Where a block device, or one of its partitions, is mounted, or what else uses it; None when nothing does.

    For an image file: the loop device that it is attached to.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISBLK(status.st_mode):
        return _loop_device_of(path)
    numbers = {f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"}
    folder = Path("/sys/dev/block", *numbers)
    numbers |= {file.read_text().strip() for file in folder.glob("*/dev")}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] in numbers:
            return fields[4].encode().decode("unicode_escape")
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        with contextlib.suppress(OSError):
            swap = os.stat(line.split()[0])
            if stat.S_ISBLK(swap.st_mode) and f"{os.major(swap.st_rdev)}:{os.minor(swap.st_rdev)}" in numbers:
                return "swap space"
    holders = sorted(holder.name for holder in [*folder.glob("holders/*"), *folder.glob("*/holders/*")])
    return f"/dev/{holders[0]}" if holders else None


_SIGNATURES: list[tuple[str, int, bytes]] = [
    ("ext2/3/4", 1080, b"\x53\xef"),
    ("XFS", 0, b"XFSB"),
    ("Btrfs", 65600, b"_BHRfS_M"),
    ("F2FS", 1024, b"\x10\x20\xf5\xf2"),
    ("bcachefs", 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("swap space", 4086, b"SWAP-SPACE"),
    ("LUKS encryption", 0, b"LUKS\xba\xbe"),
    ("Linux RAID", 4096, b"\xfc\x4e\x2b\xa9"),
    ("Linux RAID", 0, b"\xfc\x4e\x2b\xa9"),
    ("NTFS", 3, b"NTFS    "),
    ("exFAT", 3, b"EXFAT   "),
    ("FAT", 54, b"FAT1"),
    ("FAT", 82, b"FAT32"),
    ("ISO 9660", 32769, b"CD001"),
    ("SquashFS", 0, b"hsqs"),
    ("EROFS", 1024, b"\xe2\xe1\xf5\xe0"),
    ("GFS2", 65536, b"\x01\x16\x19\x70"),
    ("Ceph BlueStore", 0, b"bluestore block device"),
    ("GPT partition table", 512, b"EFI PART"),
    ("GPT partition table", 4096, b"EFI PART"),
    *[("LVM2 physical volume", 512 * sector, b"LABELONE") for sector in range(4)],
    *[("ZFS", 131072 + 1024 * uberblock, b"\x0c\xb1\xba\x00\x00\x00\x00\x00") for uberblock in range(128)],
]


def foreign_signature(device: Device) -> str | None:
    """Names what other file system, RAID, volume manager or partition table left its mark on a device."""
    head = device.read(0, min(262144, device.size_bytes))
    for name, offset, magic in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic:
            return name
    if _is_partition_table(head):
        return "MBR partition table"
    raid_offsets = {round_down(device.size_bytes, 65536) - 65536, round_down(device.size_bytes - 8192, 4096)}
    for offset in raid_offsets:
        if offset > 0 and device.read(offset, 4) == b"\xfc\x4e\x2b\xa9":
            return "Linux RAID"
    return None


def _is_partition_table(head: bytes) -> bool:
    if head[510:512] != b"\x55\xaa":
        return False
    entries = [head[446 + 16 * index : 462 + 16 * index] for index in range(4)]
    return all(entry[0] in (0, 0x80) for entry in entries) and any(entry[4] for entry in entries)


def _is_block_device(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise DeviceMissing(f"{path}: {error.strerror}; name a block device or an image file") from error
    if not stat.S_ISBLK(mode) and not stat.S_ISREG(mode):
        raise DeviceMissing(f"{path} is neither a block device nor a regular file")
    return stat.S_ISBLK(mode)


def _open_direct(path: str, flags: int) -> tuple[int, bool]:
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, flags), False
        if _direct_read_works(fd):
            return fd, True
        os.close(fd)
        return os.open(path, flags), False
    except OSError as error:
        raise _open_error(path, error) from error


def _direct_read_works(fd: int) -> bool:
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        try:
            os.preadv(fd, [buffer], 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True


def _open_error(path: str, error: OSError) -> DeviceError:
    if error.errno == errno.EBUSY:
        user = is_mounted(path)
        return DeviceBusy(f"{path} is in use{f' ({user})' if user else ''}; unmount or stop what uses it first")
    return DeviceFailed(f"cannot open {path}: {error.strerror}", error.errno or errno.EIO)


def _lock(path: str, fd: int, *, exclusive: bool) -> None:
    deadline = time.monotonic() + DYING_HOLDER_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _lock_holder_pid(fd)
            if (holder is None or not _is_running(holder)) and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            raise DeviceBusy(
                f"{path} is in use by {_describe_process(holder)}; unmount the volume (ckptfs umount) or let it finish"
            ) from error
        return


def _lock_holder_pid(fd: int) -> int | None:
    """Who holds the flock, as far as /proc tells."""
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == place and int(fields[4]) > 0:
                return int(fields[4])
    return None


def _is_running(pid: int) -> bool:
    """False for a process that has died: its threads, and the kernel's io_uring work, may still let go of files."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _describe_process(pid: int | None) -> str:
    try:
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})" if pid else "another process"
    except OSError:
        return "another process"


def _size_bytes(fd: int, is_block: bool) -> int:
    if not is_block:
        return os.fstat(fd).st_size
    (size_bytes,) = struct.unpack("Q", fcntl.ioctl(fd, BLKGETSIZE64, bytes(8)))
    return int(size_bytes)


def _logical_block_bytes(fd: int) -> int:
    (block_bytes,) = struct.unpack("i", fcntl.ioctl(fd, BLKSSZGET, bytes(4)))
    return int(block_bytes)


def _is_write_through(fd: int) -> bool:
    """True when the block device says that it has no volatile cache."""
    number = os.fstat(fd).st_rdev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for file in (folder / "queue/write_cache", folder / "../queue/write_cache"):
        with contextlib.suppress(OSError):
            return file.read_text().strip() == "write through"
    return False


def _loop_device_of(path: str) -> str | None:
    real_path = os.path.realpath(path)
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if file.read_text().strip() == real_path:
                return f"/dev/{file.parts[3]}"
    return None
