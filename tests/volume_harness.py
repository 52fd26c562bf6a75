"""A volume on image files with the data plane in memory: mounted, crashed and mounted again without FUSE."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import trio

from ckptfs.constants import ROOT_INO
from ckptfs.dataplane import dispatch_events
from ckptfs.mkfs import make_volume
from ckptfs.recovery import recover
from ckptfs.superblock import assemble
from ckptfs.volume import Volume
from tests.fake_data_plane import Disk, FakeDataPlane

IMAGE_BYTES = 32 << 20
Parameters = ParamSpec("Parameters")


def trio_test(test: Callable[Parameters, Awaitable[None]]) -> Callable[Parameters, None]:
    @functools.wraps(test)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        async def run() -> None:
            with trio.fail_after(60):
                await test(*args, **kwargs)

        trio.run(run)

    return wrapper


@dataclass
class Mounted:
    volume: Volume
    plane: FakeDataPlane

    def ino(self, path: str) -> int:
        return self.volume.live.resolve(path.encode()).ino

    def exists(self, path: str) -> bool:
        try:
            self.ino(path)
        except OSError:
            return False
        except Exception as error:
            assert getattr(error, "errno", 0)
            return False
        return True

    def split(self, path: str) -> tuple[int, bytes]:
        head, _, name = path.rpartition("/")
        return self.ino(head), name.encode()

    def create(self, path: str, *, pid: int = 1, append: bool = False) -> int:
        return self.volume.create(*self.split(path), 0o644, 0, 0, pid=pid, append=append).ino

    def write(self, ino: int, data: bytes, offset_bytes: int = 0, *, pid: int = 1) -> None:
        assert self.plane.write(ino, offset_bytes, data, pid=pid) == 0

    def flush(self, ino: int, *, pid: int = 1, dying: bool = False) -> None:
        """close(2), or what a dying process does instead."""
        if self.plane.flush_seals(ino, pid=pid, dying=dying):
            assert self.volume.flush(ino) == 0

    def close(self, ino: int, *, pid: int = 1, dying: bool = False, writable: bool = True) -> None:
        self.flush(ino, pid=pid, dying=dying)
        self.volume.close(ino, writable=writable)

    def save(self, path: str, data: bytes) -> int:
        """What a trainer does."""
        if self.exists(path):
            ino = self.ino(path)
            self.volume.open(ino, writable=True, truncate=True, pid=1)
        else:
            ino = self.create(path)
        self.write(ino, data)
        self.close(ino)
        return ino

    def load(self, path: str) -> bytes:
        ino = self.ino(path)
        self.volume.open(ino, writable=False)
        data = self.plane.read(ino)
        self.volume.close(ino, writable=False)
        return data

    def names(self, path: str = "/") -> set[str]:
        return {name.decode() for name, _ in self.volume.list_directory(self.ino(path))[2:]} - {"lost+found"}

    def mkdir(self, path: str) -> int:
        return self.volume.make(*self.split(path), 0o40755, 0, 0).ino

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        self.volume.rename(*self.split(old), *self.split(new), flags)

    def unlink(self, path: str) -> None:
        self.volume.unlink(*self.split(path))


@dataclass
class Images:
    paths: list[str]
    disk: Disk

    @asynccontextmanager
    async def mount(self, *, clean: bool = True, commit_interval_s: float = 1e6) -> AsyncIterator[Mounted]:
        """Mounts; at the end everything is made durable (clean), or the daemon is as if killed."""
        plane = FakeDataPlane(self.disk)
        with assemble(self.paths, writable=True, exclusive=True) as devices:
            recovered = recover(devices, read_only=False)
            assert not recovered.damaged, recovered.problems
            volume = Volume(devices, recovered, plane.as_data_plane(), commit_interval_s=commit_interval_s)
            handlers = {"sealed": volume.log.seal_written}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.run)
                nursery.start_soon(dispatch_events, plane.as_data_plane(), handlers)
                yield Mounted(volume, plane)
                if clean:
                    await volume.drain()
                nursery.cancel_scope.cancel()
            recovered.journal.close()
        plane.close()


def make_images(folder: Path, count: int = 2) -> Images:
    paths = [str(folder / f"image{index}") for index in range(count)]
    make_volume(paths, image_size_bytes=IMAGE_BYTES)
    return Images(paths, Disk())


ROOT = ROOT_INO
