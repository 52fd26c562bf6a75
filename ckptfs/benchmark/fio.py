"""What the devices can do, according to fio: O_DIRECT, io_uring, 1 MiB blocks, one job a file."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

from ckptfs.benchmark.machine import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

QUEUE_DEPTHS = (4, 8, 16, 32, 64)


def require_fio() -> str:
    """Fio's version; raises BenchmarkError where there is none."""
    if not shutil.which("fio"):
        raise BenchmarkError("fio is needed to measure the devices: apt-get install fio")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run(direction: str, files: Sequence[Path], length_bytes: int, queue_depth: int) -> float:
    """Seconds to "write" (with a final fsync) or "read" this much of each file, all files at once."""
    command = ["fio", "--output-format=json", "--direct=1", "--ioengine=io_uring", "--bs=1M", "--end_fsync=1"]
    command += ["--thread=1", "--overwrite=1", "--allow_file_create=0", f"--size={length_bytes}"]
    command += [f"--rw={direction}", f"--iodepth={queue_depth}"]
    for index, file in enumerate(files):
        command += [f"--name=job{index}", f"--filename={file}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BenchmarkError(f"fio failed: {(result.stderr or result.stdout).strip()[:500]}")
    jobs = json.loads(result.stdout)["jobs"]
    if any(job[direction]["io_bytes"] != length_bytes for job in jobs):
        raise BenchmarkError("fio did not transfer all bytes")
    # The runtime of a job, in milliseconds, includes its final fsync.
    return float(max(job[direction]["runtime"] for job in jobs)) / 1000


def best_queue_depth(direction: str, files: Sequence[Path], length_bytes: int) -> int:
    """The queue depth with the best of two runs."""
    best = dict.fromkeys(QUEUE_DEPTHS, float("inf"))
    for _ in range(2):
        for depth in QUEUE_DEPTHS:
            best[depth] = min(best[depth], run(direction, files, length_bytes, depth))
    return min(best, key=lambda depth: best[depth])


def lay_out(file: Path, length_bytes: int) -> None:
    """Makes a file whose every block is allocated and has been written, so that no run pays for the first time."""
    command = ["fio", "--name=layout", "--rw=write", "--bs=1M", "--direct=1", "--ioengine=io_uring", "--iodepth=16"]
    command += ["--fallocate=native", "--end_fsync=1", f"--filename={file}", f"--size={length_bytes}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BenchmarkError(f"fio could not lay out {file}: {(result.stderr or result.stdout).strip()[:500]}")
