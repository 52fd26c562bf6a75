"""What is timed. Every function here gives seconds, and takes a path that does not exist yet unless it reads.

torch is imported when it is first used.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    State = dict[str, torch.Tensor]

MIB = 1 << 20
WRITE_CALL_BYTES = 64 * MIB
READ_CALL_BYTES = 16 * MIB
NULL = Path("/dev/null")


class Payload:
    """Noise to write, in memory that has been touched."""

    def __init__(self, length_bytes: int) -> None:
        self.memory = mmap.mmap(-1, length_bytes)
        noise = os.urandom(min(length_bytes, WRITE_CALL_BYTES))
        for start in range(0, length_bytes, len(noise)):
            # Each piece differs from the others, so that misplaced ones are noticed.
            piece = start.to_bytes(8, "little") + noise[8:]
            self.memory[start : start + len(piece)] = piece[: length_bytes - start]

    def pieces(self, total_bytes: int) -> Iterator[memoryview]:
        """`total_bytes` in calls of 64 MiB, from the beginning again when they are used up."""
        with memoryview(self.memory) as whole:
            at = done = 0
            while done < total_bytes:
                at = 0 if at == len(whole) else at
                with whole[at : at + min(WRITE_CALL_BYTES, total_bytes - done)] as piece:
                    yield piece
                    at += len(piece)
                    done += len(piece)

    def is_content_of(self, path: Path) -> bool:
        """Reads the file to its end and compares."""
        size_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            same = all(_same(file, piece) for piece in self.pieces(size_bytes))
            return same and not file.read(1)


def _same(file: Any, piece: memoryview) -> bool:
    found = file.read(len(piece))
    return bool(len(found) == len(piece) and xxhash.xxh3_128_digest(found) == xxhash.xxh3_128_digest(piece))


def make_state(length_bytes: int, *, seed: int = 0, tensor_count: int = 16) -> State:
    """A model's state: float32 noise in some tensors."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    elements = length_bytes // 4 // tensor_count
    return {f"layer{index}.weight": torch.randn(elements, generator=generator) for index in range(tensor_count)}


@contextmanager
def torch_crc32(enabled: bool) -> Iterator[None]:
    """Has torch compute its CRC-32 in every save, as it does by itself, or not."""
    import torch

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(enabled)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def save(state: State, path: Path, *, fsync: bool = False) -> float:
    """How long torch.save keeps the trainer."""
    import torch

    begin = time.perf_counter()
    torch.save(state, path)
    if fsync:
        sync(path)
    return time.perf_counter() - begin


def load(path: Path, *, mapped: bool = False) -> float:
    """torch.load, and one look at every page of what it gave."""
    import torch

    begin = time.perf_counter()
    state = torch.load(path, mmap=mapped)
    for tensor in state.values():
        tensor[:: mmap.PAGESIZE // 4].sum()
    return time.perf_counter() - begin


def is_saved(state: State, path: Path) -> bool:
    """Whether the file holds this state, bit by bit."""
    import torch

    found = torch.load(path)
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def write(payload: Payload, path: Path, total_bytes: int, *, durable: bool = False) -> float:
    """Makes write(2) calls of 64 MiB; with `durable`, closes the file and fsyncs it then."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    begin = time.perf_counter()
    try:
        for piece in payload.pieces(total_bytes):
            write_all(file, piece)
        elapsed = time.perf_counter() - begin
    finally:
        os.close(file)
    if not durable:
        return elapsed
    sync(path)
    return time.perf_counter() - begin


def write_all(file: int, data: memoryview) -> None:
    """write(2) until all is taken; the first call takes it, unless something is odd."""
    done = os.write(file, data)
    while done < len(data):
        done += os.write(file, data[done:])


def sync(path: Path) -> None:
    """Returns when the file is durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> float:
    """One sequential reader of the whole file, into memory that is used again and again."""
    with mmap.mmap(-1, READ_CALL_BYTES) as buffer:
        buffer.write(bytes(READ_CALL_BYTES))
        begin = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        return time.perf_counter() - begin


def drop_from_cache(path: Path) -> None:
    """Has the kernel forget a durable file of a local file system."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
