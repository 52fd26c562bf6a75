"""A volume that is read without mounting it and without writing to it. Recovery happens in memory."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ckptfs import client, extents
from ckptfs.device import Device
from ckptfs.errors import AlreadyMounted, DeviceBusy, DeviceFailed, FsError, VolumeDamaged
from ckptfs.extents import Row
from ckptfs.namespace import Inode, Namespace
from ckptfs.recovery import Recovered, recover
from ckptfs.superblock import VolumeDevices, assemble


class BadExtent(VolumeDamaged):
    """An extent's bytes are not those that were written, or cannot be read."""

    errno = errno.EIO

    def __init__(self, device: Device, row: Row, fault: str, *, is_checksum: bool) -> None:
        super().__init__(
            f"the extent at {device.path}, offset {row.device_offset_bytes}, length {row.stored_length_bytes}: {fault}"
        )
        self.fault = fault
        self.is_checksum = is_checksum


class OfflineVolume:
    """The devices of a volume that is not mounted, and the namespace that a mount would show."""

    def __init__(self, volume: VolumeDevices, recovered: Recovered) -> None:
        """Takes over the devices; use open()."""
        self.volume = volume
        self.recovered = recovered

    @classmethod
    def open(cls, paths: Sequence[str]) -> OfflineVolume:
        """Opens the devices for reading, together with others who only read, and recovers in memory.

        Raises:
            AlreadyMounted: The volume is mounted.
            CkptfsError: As assemble() and recover().
        """
        volume = open_devices(paths)
        try:
            return cls(volume, recover(volume, read_only=True))
        except BaseException:
            volume.close()
            raise

    @property
    def namespace(self) -> Namespace:
        """All names and inodes."""
        return self.recovered.namespace

    def __enter__(self) -> OfflineVolume:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.recovered.journal.close()
        self.volume.close()

    def resolve(self, path: str) -> Inode:
        """The inode at a path inside the volume.

        Raises:
            FsError: There is none; names the path.
        """
        try:
            return self.namespace.resolve(path.encode(errors="surrogateescape"))
        except FsError as error:
            raise FsError(error.errno, f"{path}: {error}; no such path in volume {self.volume.volume_uuid}") from error

    def pieces(self, inode: Inode) -> Iterator[tuple[int, bytes]]:
        """The (file offset, bytes) of a file's data in order, each checked against its checksum; holes are left out.

        Raises:
            BadExtent: A piece is not as it was written.
        """
        loaded: Row | None = None
        stored = b""
        for row in extents.iter_rows(inode.rows):
            if loaded is None or loaded.stored != row.stored:
                stored, loaded = read_extent(self.volume.devices, row), row
            yield row.file_offset_bytes, stored[row.skip_bytes : row.skip_bytes + row.length_bytes]


def open_devices(paths: Sequence[str]) -> VolumeDevices:
    """Opens the devices of a volume for reading.

    Raises:
        AlreadyMounted: The volume is mounted.
        CkptfsError: As assemble().
    """
    try:
        return assemble(paths, writable=False, exclusive=False)
    except DeviceBusy as error:
        state = client.find_by_device([*paths])
        if state is None:
            raise
        raise AlreadyMounted(
            f"{paths[0]} is in use: volume {state.volume_uuid} is mounted at {state.mountpoint} (process {state.pid});"
            f" unmount it first: ckptfs umount {state.mountpoint}"
        ) from error


def read_extent(devices: Sequence[Device], row: Row) -> bytes:
    """All bytes of the stored extent that a row points into.

    Raises:
        BadExtent: They cannot be read, or are not those that were written.
    """
    device = devices[row.device_index]
    try:
        stored = device.read(row.device_offset_bytes, row.stored_length_bytes)
    except DeviceFailed as error:
        raise BadExtent(device, row, str(error), is_checksum=False) from error
    found = xxhash.xxh3_64_intdigest(stored)
    if found != row.checksum:
        fault = f"checksum {found:016x} instead of {row.checksum:016x}"
        raise BadExtent(device, row, fault, is_checksum=True)
    return stored


def show_path(path: bytes) -> str:
    """A path as people and JSON can take it."""
    return path.decode(errors="backslashreplace")


def output_console(*, markup: bool = True) -> Console:
    """Standard output. Where it is no terminal, lines are as long as they are."""
    console = Console(highlight=False, soft_wrap=True, markup=markup)
    if not console.is_terminal:
        console.width = 1000
    return console


@contextlib.contextmanager
def byte_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar with rate and time left, on a terminal only; call what it gives with bytes done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda done_bytes: progress.advance(task, done_bytes)
