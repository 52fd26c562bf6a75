"""What `ckptfs mount -o` understands."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.errors import UsageError
from ckptfs.fusemount import MS_NOATIME, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY
from ckptfs.sizes import parse_size

DEFAULT_COMMIT_S = 30.0
MIN_STAGING_BYTES = 64 << 20
IO_BACKENDS = ("auto", "io_uring", "threads")

_FLAGS_ON = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}
_FLAGS_OFF = {"suid": MS_NOSUID, "dev": MS_NODEV, "exec": MS_NOEXEC}
_ALWAYS_SO = ("rw", "noatime", "default_permissions", "async", "auto", "noauto", "nofail", "user")
"""Taken without effect: they are the default here, or are for mount(8) to read in /etc/fstab."""


@dataclass
class MountOptions:
    """Of one mount."""

    staging_bytes: int
    commit_s: float = DEFAULT_COMMIT_S
    keep_killed: bool = False
    io_backend: str = "auto"
    read_only: bool = False
    allow_other: bool = False
    """Others than who mounted may use it; root's mounts are for all, as those of any file system."""
    source: str | None = None
    kind: str = "ckptfs"
    flags: int = MS_NOATIME | MS_NOSUID | MS_NODEV

    @property
    def mount_flags(self) -> int:
        """For mount(2)."""
        return self.flags | (MS_RDONLY if self.read_only else 0)


def parse_options(texts: Iterable[str]) -> MountOptions:
    """Reads the values of all -o options.

    Raises:
        UsageError: An option is unknown, or its value makes no sense.
    """
    options = MountOptions(staging_bytes=_quarter_of_memory(), allow_other=os.geteuid() == 0)
    for text in texts:
        for option in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = option.partition("=")
            _take(options, option, name, value)
    return options


def _take(options: MountOptions, option: str, name: str, value: str) -> None:
    if option in _ALWAYS_SO or name.startswith("x-") or name == "_netdev":
        return
    if option in _FLAGS_ON:
        options.flags |= _FLAGS_ON[option]
    elif option in _FLAGS_OFF:
        options.flags &= ~_FLAGS_OFF[option]
    elif option == "ro":
        options.read_only = True
    elif option == "allow_other":
        options.allow_other = True
    elif name == "staging" and value:
        options.staging_bytes = _staging(value)
    elif name == "commit" and value:
        options.commit_s = _seconds(value)
    elif name == "killed" and value in ("keep", "revert"):
        options.keep_killed = value == "keep"
    elif name == "io" and value in IO_BACKENDS:
        options.io_backend = value
    elif name == "fsname" and value:
        options.source = value
    elif name == "subtype" and value:
        options.kind = value
    else:
        raise UsageError(
            f"mount option {option!r} is not known; known are staging=SIZE, commit=SECONDS, killed=keep,"
            f" io={'|'.join(IO_BACKENDS)}, ro, allow_other, suid, dev, noexec, fsname=NAME, subtype=NAME"
        )


def _staging(value: str) -> int:
    size_bytes = parse_size(value)
    if size_bytes < MIN_STAGING_BYTES:
        raise UsageError(f"staging={value} is too small; give at least {MIN_STAGING_BYTES >> 20}M")
    return size_bytes


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.1 <= seconds <= 86400:
        raise UsageError(f"commit={value} is no number of seconds from 0.1 to 86400")
    return seconds


def _quarter_of_memory() -> int:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(memory_bytes // 4 // (1 << 20) * (1 << 20), MIN_STAGING_BYTES)
