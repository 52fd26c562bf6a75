"""The machine: what it is, whether the benchmark fits on it, and how to warm its memory."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
from pathlib import Path

from ckptfs.errors import CkptfsError

GIB = 1 << 30


class BenchmarkError(CkptfsError):
    """The benchmark cannot run here, or something that it needs failed."""

    exit_status = 1


def facts(folder: Path) -> dict[str, str]:
    """What a reader must know to judge the numbers; `folder` is where the image files lie."""
    return {
        "kernel": platform.release(),
        "processor": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{_meminfo_bytes('MemTotal') / GIB:.1f} GiB",
        "images on": _file_system_of(folder),
        "fuse max_pages_limit": _read("/proc/sys/fs/fuse/max_pages_limit", "unknown"),
        "python": platform.python_version(),
    }


def check_room(folder: Path, *, disk_bytes: int, memory_bytes: int, shm_bytes: int) -> None:
    """Raises BenchmarkError when a run of this size cannot work here."""
    for what, free_bytes, needed_bytes in [
        (f"disk at {folder} (choose another with --dir)", shutil.disk_usage(folder).free, disk_bytes),
        ("memory", _meminfo_bytes("MemAvailable"), memory_bytes),
        ("/dev/shm", shutil.disk_usage("/dev/shm").free, shm_bytes),
    ]:
        if free_bytes < needed_bytes:
            raise BenchmarkError(
                f"the benchmark needs {needed_bytes / GIB:.1f} GiB of {what}, but only"
                f" {free_bytes / GIB:.1f} GiB are free; make room, or use --quick"
            )


def warm_memory(length_bytes: int) -> None:
    """Touches this much memory once: a virtual machine may get pages from its host only at their first use."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0x8000)
    mmap.mmap(-1, length_bytes, flags=flags).close()


def peak_resident_bytes(pid: int) -> int:
    """The most memory that a process ever had resident, shared memory included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError(f"no VmHWM in /proc/{pid}/status")


def _meminfo_bytes(key: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[key].split()[0]) * 1024


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def file_system_kind(folder: Path) -> str:
    """For example "ext4"."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == _device_number(folder):
            return fields[fields.index("-") + 1]
    return "local disk"


def _device_number(folder: Path) -> str:
    device = os.stat(folder).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _file_system_of(folder: Path) -> str:
    """For example "ext4 on vda (virtio, solid state)"."""
    kind, number = file_system_kind(folder), _device_number(folder)
    node = Path(f"/sys/dev/block/{number}")
    if not node.exists():
        return kind
    disk = node.resolve()
    disk = disk if (disk / "queue").exists() else disk.parent
    model = _read(disk / "device/model", "virtio" if "virtio" in str(disk) else "unnamed")
    turning = "rotational" if _read(disk / "queue/rotational", "0") == "1" else "solid state"
    return f"{kind} on {disk.name} ({model}, {turning})"


def _read(path: str | Path, default: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return default
