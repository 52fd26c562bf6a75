"""Where the workloads run: memory, the local disk, a plain FUSE handler, a ckptfs volume; and their removal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfs.benchmark import fio
from ckptfs.benchmark.machine import BenchmarkError, file_system_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN_HANDLER = Path(__file__).parents[2] / "tests/bench/plain_pyfuse3.py"
"""Where a source checkout has it; an installed package does not."""


def ckptfs(*arguments: str | Path) -> str:
    """Runs the command line as a user would; gives what it printed."""
    command = [sys.executable, "-m", "ckptfs", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        detail = (result.stderr.strip() or result.stdout.strip()).removeprefix("ckptfs: ")
        raise BenchmarkError(f"`ckptfs {' '.join(command[3:])}` ended with {result.returncode}: {detail}")
    return result.stdout


class Volume:
    """A ckptfs volume over image files, mounted and unmounted at will."""

    def __init__(self, images: list[Path], mountpoint: Path) -> None:
        self.images = images
        self.folder = mountpoint

    def make(self, image_bytes: int) -> None:
        """Lays the image files out and makes the volume on them."""
        self.folder.mkdir()
        for image in self.images:
            fio.lay_out(image, image_bytes)
        ckptfs("mkfs", *self.images)

    def mount(self, options: str = "") -> None:
        """Mounts it: staging is empty and the kernel has nothing of it cached."""
        ckptfs("mount", *(["-o", options] if options else []), *self.images, self.folder)

    def umount(self) -> None:
        """Makes everything durable and unmounts."""
        ckptfs("umount", self.folder)

    def remount(self, options: str = "") -> None:
        """Makes everything cold."""
        self.umount()
        self.mount(options)

    def daemon_pid(self) -> int:
        """The process that serves the mount."""
        return int(json.loads(ckptfs("status", "--json", self.folder))["pid"])

    def leave(self) -> None:
        """Unmounts whatever the state is; for the way out."""
        if os.path.ismount(self.folder):
            with suppress(BenchmarkError):
                self.umount()
        if os.path.ismount(self.folder):
            subprocess.run(["umount", "--lazy", self.folder], check=False)


class Sandbox:
    """All that a run leaves behind while it runs: two folders and what is mounted in them."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        """REQUIRES: whoever made `stack` closes it, after which nothing is left."""
        self._stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptfs-bench-", dir=folder)))
        self.memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptfs-bench-", dir="/dev/shm")))
        self.local = self.folder / "local"
        self.local.mkdir()
        self.local_name = file_system_kind(folder)

    def volume(self, *, image_count: int, image_bytes: int) -> Volume:
        """A new volume, mounted."""
        volume = Volume([self.folder / f"image{index}" for index in range(image_count)], self.folder / "mnt")
        self._stack.callback(volume.leave)
        volume.make(image_bytes)
        volume.mount()
        return volume

    def siblings(self, *, count: int, length_bytes: int) -> list[Path]:
        """Files beside the images and laid out like them, for fio."""
        files = [self.folder / f"fio{index}" for index in range(count)]
        for file in files:
            if not file.exists():
                fio.lay_out(file, length_bytes)
        return files

    @contextmanager
    def plain_handler(self, program: Path, *options: str) -> Iterator[Path]:
        """A mount of the plain pyfuse3 write handler."""
        mountpoint = Path(tempfile.mkdtemp(prefix="plain-", dir=self.folder))
        log = mountpoint.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, program, *options, mountpoint], stdout=output, stderr=output)
        try:
            _wait_mounted(process, mountpoint, log)
            yield mountpoint
        finally:
            subprocess.run(["umount", "--lazy", mountpoint], check=False, capture_output=True)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()
            mountpoint.rmdir()


def _wait_mounted(process: subprocess.Popen[bytes], mountpoint: Path, log: Path) -> None:
    deadline = time.monotonic() + 30
    while not os.path.ismount(mountpoint):
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"the plain handler did not mount: {log.read_text().strip()[-500:]}")
        time.sleep(0.05)
