"""Small volumes on image files, for tests of what is on the devices."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from ckptfs.device import Device
from ckptfs.errors import DeviceFailed
from ckptfs.extents import Row, pack
from ckptfs.layout import BLOCK_BYTES, MIB, space_bytes
from ckptfs.mkfs import format_devices, make_volume
from ckptfs.records import Create, Record, Seal, encode_entry
from ckptfs.recovery import Recovered, recover
from ckptfs.superblock import VolumeDevices, assemble

IMAGE_BYTES = 16 * MIB


class MemoryDevice(Device):
    """A device in memory that remembers what was written to it, and fails on request."""

    def __init__(self, path: str, size_bytes: int = IMAGE_BYTES, content: bytes | None = None) -> None:
        self.path = path
        self.fd = -1
        self.direct = True
        self.is_block = False
        self.block_bytes = BLOCK_BYTES
        self.size_bytes = size_bytes
        self.content = bytearray(content or size_bytes)
        self.events: list[tuple[MemoryDevice, int, bytes] | tuple[MemoryDevice, None, None]] = []
        """(device, offset, data) of a write, (device, None, None) of a barrier; may be shared by devices."""
        self.writes_fail = False
        self.reads_fail = False

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        if self.reads_fail:
            raise DeviceFailed(f"{self.path} was told to fail")
        assert offset_bytes + length_bytes <= self.size_bytes
        return bytes(self.content[offset_bytes : offset_bytes + length_bytes])

    def write(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        assert offset_bytes % BLOCK_BYTES == len(data) % BLOCK_BYTES == 0
        assert offset_bytes + len(data) <= self.size_bytes
        if self.writes_fail:
            # What fails may have been written, all of it or a part.
            data = data[: len(data) // BLOCK_BYTES // 2 * BLOCK_BYTES]
        self.events.append((self, offset_bytes, bytes(data)))
        self.content[offset_bytes : offset_bytes + len(data)] = data
        if self.writes_fail:
            raise DeviceFailed(f"{self.path} was told to fail")

    def barrier(self) -> None:
        if self.writes_fail:
            raise DeviceFailed(f"{self.path} was told to fail")
        self.events.append((self, None, None))


def memory_volume(count: int, size_bytes: int = IMAGE_BYTES) -> VolumeDevices:
    devices: list[Device] = [MemoryDevice(f"memory{index}", size_bytes) for index in range(count)]
    return VolumeDevices(devices, format_devices(devices))


def make_images(folder: Path, count: int, size_bytes: int = IMAGE_BYTES) -> list[str]:
    """A volume on fresh image files; returns their paths in index order."""
    paths = [str(folder / f"device{index}.img") for index in range(count)]
    make_volume(paths, image_size_bytes=size_bytes)
    return paths


@contextlib.contextmanager
def opened(paths: Sequence[str], *, read_only: bool = False) -> Iterator[tuple[VolumeDevices, Recovered]]:
    with assemble(paths, writable=not read_only, exclusive=not read_only) as volume:
        recovered = recover(volume, read_only=read_only)
        try:
            yield volume, recovered
        finally:
            recovered.journal.close()


def create(ino: int, name: bytes, parent: int = 1, mode: int = stat.S_IFREG | 0o644) -> Create:
    return Create(parent, name, ino, mode, 0, 0, 0, None, None, 1, 1, 1, 1)


def append(recovered: Recovered, *records: Record) -> None:
    """One group of one entry."""
    recovered.journal.append([encode_entry(records)])


def store(volume: VolumeDevices, ino: int, data: bytes, device_index: int = 0, at: int = 0) -> Seal:
    """Writes data as one extent, `at` bytes into a device's data region; returns the seal of a file made of it."""
    offset = volume.data_regions[device_index][0] + at
    volume.devices[device_index].write(offset, data.ljust(space_bytes(len(data)), b"\0"))
    row = Row(0, len(data), 0, device_index, 0, len(data), offset, xxhash.xxh3_64_intdigest(data))
    return Seal(ino, len(data), 5, 5, 0, pack([row]))


def flip(path: str, offset: int, count: int = 1) -> None:
    """Damages bytes of an image."""
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(count)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in old))


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def read_image(path: str, offset: int, count: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(count)
