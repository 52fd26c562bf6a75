"""Real mounts for tests: image files, mkfs, mount, and always an unmount."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptfs import client, fusemount, runtime

CKPTFS = [sys.executable, "-m", "ckptfs"]
REPOSITORY = Path(__file__).parents[1]


def run(*arguments: str | Path, check: bool = True, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """One ckptfs command."""
    command = [*CKPTFS, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


class MountedVolume:
    """A volume of image files and the place where it is mounted."""

    def __init__(self, folder: Path, count: int = 2, size: str = "256M") -> None:
        self.images = [str(folder / f"image{index}") for index in range(count)]
        self.root = folder / "mnt"
        self.root.mkdir()
        self.uuid = json.loads(run("mkfs", "--json", "--size", size, *self.images).stdout)["volume_uuid"]

    def mount(self, *options: str) -> None:
        run("mount", *(f"-o{option}" for option in ("staging=128M", *options)), *self.images, self.root)

    def umount(self) -> None:
        run("umount", self.root)

    def remount(self, *options: str) -> None:
        self.umount()
        self.mount(*options)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(run("status", "--json", self.root).stdout))

    def kill_daemon(self) -> None:
        """As if it had crashed; the stale mount stays."""
        pid = self.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        self.wait_until_stale()
        client.wait_for_end(pid)

    def wait_until_stale(self) -> None:
        wait_until(self._is_stale)

    def _is_stale(self) -> bool:
        try:
            os.statvfs(self.root)
        except OSError as error:
            return error.errno == errno.ENOTCONN
        return False

    def fsck(self) -> None:
        run("fsck", "--data", *self.images)

    def clean_up(self) -> None:
        while fusemount.find_mount(str(self.root)) is not None:
            if run("umount", self.root, check=False).returncode != 0:
                fusemount.unmount(str(self.root), lazily=True)
        for path in runtime.runtime_folder().glob(f"{self.uuid}.*"):
            path.unlink()


@contextmanager
def mounted_volume(folder: Path, *options: str, count: int = 2, size: str = "256M") -> Iterator[MountedVolume]:
    volume = MountedVolume(folder, count, size)
    try:
        volume.mount(*options)
        yield volume
    finally:
        volume.clean_up()
