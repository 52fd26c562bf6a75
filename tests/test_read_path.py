"""Reads past the page cache: which files, and that every way of reading tells the same."""

from __future__ import annotations

import mmap
import os
import random
from typing import TYPE_CHECKING

import pytest

from ckptfs.layout import BLOCK_BYTES
from ckptfs.read_path import LARGE_FILE_BYTES, PREFERRED_READ_BYTES, ReadPath, preferred_io_bytes
from tests.mounts import MountedVolume, mounted_volume, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = random.Random(1).randbytes(2 * LARGE_FILE_BYTES)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    with mounted_volume(tmp_path) as mounted:
        if not mounted.status()["large_reads"].startswith("past"):
            pytest.skip("this kernel cannot map what it does not cache")
        yield mounted


def reads(volume: MountedVolume) -> int:
    """READ requests that the kernel has sent."""
    return int(volume.status()["kernel"]["requests"].get("READ", 0))


def cached(volume: MountedVolume, path: Path) -> bool:
    """Whether reading the file needs no request. The daemon learns of a mapping, or of small reads, a moment later."""
    before = reads(volume)
    assert path.read_bytes() == LARGE
    return reads(volume) == before


def test_only_large_files_that_nobody_maps_bypass_the_page_cache() -> None:
    path = ReadPath()
    assert not path.bypasses_page_cache(3, LARGE_FILE_BYTES), "the kernel could not map it"
    path.may_bypass = True
    assert path.bypasses_page_cache(3, LARGE_FILE_BYTES)
    assert not path.bypasses_page_cache(3, LARGE_FILE_BYTES - 1)
    path.want_page_cache(3)
    assert not path.bypasses_page_cache(3, LARGE_FILE_BYTES)
    assert path.bypasses_page_cache(4, LARGE_FILE_BYTES)
    path.forget(3)
    assert path.bypasses_page_cache(3, LARGE_FILE_BYTES)


def test_large_files_advise_large_buffers() -> None:
    assert preferred_io_bytes(LARGE_FILE_BYTES - 1) == BLOCK_BYTES
    assert preferred_io_bytes(LARGE_FILE_BYTES) == PREFERRED_READ_BYTES


def test_a_large_file_leaves_nothing_in_the_page_cache_until_it_is_mapped(volume: MountedVolume) -> None:
    path = volume.root / "a"
    path.write_bytes(LARGE)
    assert path.stat().st_blksize == PREFERRED_READ_BYTES
    assert not cached(volume, path)
    assert not cached(volume, path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == LARGE
    wait_until(lambda: cached(volume, path))
    before = reads(volume)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == path.read_bytes() == LARGE
    assert reads(volume) == before, "a new mapping dropped what was cached"


def test_a_file_read_in_small_pieces_is_cached_from_the_next_open_on(volume: MountedVolume) -> None:
    path = volume.root / "a"
    path.write_bytes(LARGE)
    with open(path, "rb", buffering=0) as file:
        assert b"".join(iter(lambda: file.read(4096), b"")) == LARGE
    wait_until(lambda: cached(volume, path))


def test_reading_past_the_cache_a_mapping_and_a_writer_agree(volume: MountedVolume) -> None:
    path = volume.root / "a"
    path.write_bytes(LARGE)
    model = bytearray(LARGE)
    noise = random.Random(2)
    reader = os.open(path, os.O_RDONLY)
    writer = os.open(path, os.O_RDWR)
    with mmap.mmap(reader, len(LARGE), prot=mmap.PROT_READ) as seen, mmap.mmap(writer, len(LARGE)) as changed:
        for turn in range(200):
            offset = noise.randrange(len(LARGE) - 9000)
            piece = noise.randbytes(noise.choice([1, 100, 4096, 9000]))
            if turn % 2:
                os.pwrite(writer, piece, offset)
            else:
                changed[offset : offset + len(piece)] = piece
            model[offset : offset + len(piece)] = piece
            around = slice(max(0, offset - 5000), offset + 12_000)
            expected = bytes(model[around])
            assert os.pread(reader, len(expected), around.start) == expected
            assert seen[around] == expected
            assert changed[around] == expected
    os.truncate(path, 100_001)
    assert os.pread(reader, len(LARGE), 0) == model[:100_001]
    os.close(writer)
    os.close(reader)
    wait_until(lambda: os.getxattr(path, "user.ckptfs.state") == b"durable")
    volume.remount()
    assert path.read_bytes() == model[:100_001]
