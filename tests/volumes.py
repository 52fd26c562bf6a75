"""Small volumes on image files, for tests of what is on the devices."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from ckptfs.extents import Row, pack
from ckptfs.layout import MIB, space_bytes
from ckptfs.mkfs import make_volume
from ckptfs.records import Create, Record, Seal, encode_entry
from ckptfs.recovery import Recovered, recover
from ckptfs.superblock import VolumeDevices, assemble

IMAGE_BYTES = 16 * MIB


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
