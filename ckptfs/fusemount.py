"""Mount points: mount(2), fusermount3 and what the kernel says is mounted. Nothing here asks the file system itself."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import logging
import os
import re
import socket
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ckptfs.errors import AlreadyMounted, MountError, NotMounted

log = logging.getLogger(__name__)

FILE_SYSTEM_TYPE = "fuse.ckptfs"
MAX_PAGES_WANTED = 1024
"""4 MiB in one request: the best of what was measured."""
MAX_PAGES_LIMIT = Path("/proc/sys/fs/fuse/max_pages_limit")
READ_AHEAD_KIB = 4096
PAGE_BYTES = 4096

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME = 1, 2, 4, 8, 1024
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


class MountedAt(NamedTuple):
    """A line of /proc/self/mountinfo."""

    mountpoint: str
    kind: str
    source: str
    device: str
    """major:minor"""


def mount_table() -> list[MountedAt]:
    """Everything that is mounted in this mount namespace, oldest first."""
    mounts = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            fields, (kind, source, *_) = before.split(), after.split()
            mounts.append(MountedAt(_unescape(fields[4]), kind, _unescape(source), fields[2]))
    return mounts


def find_mount(mountpoint: str) -> MountedAt | None:
    """What is mounted at a path (topmost), found without touching the path."""
    real = real_mountpoint(mountpoint)
    return next((mount for mount in reversed(mount_table()) if mount.mountpoint == real), None)


def real_mountpoint(mountpoint: str) -> str:
    """The absolute path without symbolic links; the last component is not touched, for its daemon may be dead."""
    head, tail = os.path.split(os.path.abspath(mountpoint))
    return os.path.join(os.path.realpath(head), tail)


def check_mountpoint(mountpoint: str) -> None:
    """Makes sure that one can mount there; what a dead daemon left is taken away.

    Raises:
        MountError: One cannot; nothing was changed.
    """
    mounted = find_mount(mountpoint)
    try:
        mode = os.stat(mountpoint).st_mode
        # The kernel may have the attributes of a dead daemon's root; this it has to ask for.
        os.statvfs(mountpoint)
    except FileNotFoundError:
        raise MountError(f"the mount point {mountpoint} does not exist: make the directory first") from None
    except OSError as error:
        if error.errno != errno.ENOTCONN or mounted is None:
            raise MountError(f"cannot use the mount point {mountpoint}: {error.strerror}") from None
        log.warning("replacing the stale mount at %s", mountpoint)
        unmount(mountpoint, lazily=True)
        check_mountpoint(mountpoint)
        return
    if not stat.S_ISDIR(mode):
        raise MountError(f"the mount point {mountpoint} is not a directory")
    if mounted is not None and mounted.kind == FILE_SYSTEM_TYPE:
        raise AlreadyMounted(f"{mountpoint} has a ckptfs volume mounted already ({mounted.source}): unmount it first")


def open_connection(
    mountpoint: str, *, source: str, kind: str = FILE_SYSTEM_TYPE, flags: int, allow_other: bool
) -> int:
    """Mounts, with mount(2) or, where that is not allowed, fusermount3. Returns the /dev/fuse descriptor.

    The kernel's INIT request waits in it.
    """
    if os.geteuid() != 0:
        return _open_by_fusermount(mountpoint, source, flags, allow_other)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"cannot open /dev/fuse: {error.strerror}; is the fuse module loaded?") from None
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions"
    if allow_other:
        options += ",allow_other"
    if _libc.mount(os.fsencode(source), os.fsencode(mountpoint), kind.encode(), flags, options.encode()) != 0:
        error_number = ctypes.get_errno()
        os.close(fd)
        raise MountError(f"cannot mount at {mountpoint}: {os.strerror(error_number)}")
    return fd


def unmount(mountpoint: str, *, lazily: bool = False) -> None:
    """Takes a mount away.

    Raises:
        NotMounted: Nothing is mounted there.
        MountError: It is busy (errno EBUSY), or not ours to take away.
    """
    if os.geteuid() == 0:
        # Not following symbolic links, which may be a dead daemon's to resolve.
        if _libc.umount2(os.fsencode(mountpoint), (MNT_DETACH if lazily else 0) | 8) == 0:
            return
        error_number = ctypes.get_errno()
    else:
        command = ["fusermount3", "-u", *(["-z"] if lazily else []), "--", mountpoint]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        error_number = errno.EBUSY if "busy" in done.stderr else errno.EINVAL
    if error_number == errno.EINVAL:
        raise NotMounted(f"nothing is mounted at {mountpoint}")
    failure = MountError(f"cannot unmount {mountpoint}: {os.strerror(error_number)}")
    failure.errno = error_number
    raise failure


def processes_using(mountpoint: str) -> list[str]:
    """Who keeps a mount busy, as "name (pid)": working directories, open and mapped files. Best effort."""
    prefix = mountpoint.rstrip("/") + "/"
    users = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            links = [process / "cwd", process / "root", *(process / "fd").iterdir(), *(process / "map_files").iterdir()]
            paths = [os.readlink(link) for link in links]
            if any(path == mountpoint or path.startswith(prefix) for path in paths):
                users.append(f"{(process / 'comm').read_text().strip()} ({process.name})")
    return users


def best_max_write_bytes() -> int:
    """Raises the kernel's limit where one may, and says how much one request can then carry."""
    try:
        if int(MAX_PAGES_LIMIT.read_text()) < MAX_PAGES_WANTED:
            MAX_PAGES_LIMIT.write_text(str(MAX_PAGES_WANTED))
    except OSError as error:
        log.info("fs.fuse.max_pages_limit cannot be raised (%s): requests stay smaller", error)
    try:
        pages = int(MAX_PAGES_LIMIT.read_text())
    except OSError:
        pages = 256
    return MAX_PAGES_WANTED * PAGE_BYTES if pages >= MAX_PAGES_WANTED else 256 * PAGE_BYTES


def raise_read_ahead(mountpoint: str) -> None:
    """Sequential reads through the page cache want more than the kernel's 128 KiB."""
    mounted = find_mount(mountpoint)
    if mounted is None:
        return
    try:
        Path(f"/sys/class/bdi/{mounted.device}/read_ahead_kb").write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        log.info("read-ahead cannot be raised: %s", error)


def _open_by_fusermount(mountpoint: str, source: str, flags: int, allow_other: bool) -> int:
    options = [f"fsname={source.replace(',', ' ')}", "subtype=ckptfs", "default_permissions"]
    options += ["allow_other"] if allow_other else []
    options += [
        name for flag, name in ((MS_RDONLY, "ro"), (MS_NOEXEC, "noexec"), (MS_NOATIME, "noatime")) if flags & flag
    ]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environment = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}
        command: Sequence[str] = ["fusermount3", "-o", ",".join(options), "--", mountpoint]
        try:
            done = subprocess.run(
                command, env=environment, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise MountError("fusermount3 is not installed, and only root can mount without it") from None
        if done.returncode != 0:
            raise MountError(f"cannot mount at {mountpoint}: {done.stderr.strip() or 'fusermount3 failed'}")
        descriptors = array.array("i")
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: descriptors.itemsize])
    if not descriptors:
        raise MountError(f"cannot mount at {mountpoint}: fusermount3 gave no descriptor")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
