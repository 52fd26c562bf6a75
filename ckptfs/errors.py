"""Every way in which ckptfs says no.

    CkptfsError
    ├── UsageError              the command was given something it cannot work with
    ├── DeviceError
    │   ├── DeviceMissing       the path is not there, or is neither a block device nor a regular file
    │   ├── DeviceBusy          someone else has it open: another mount, mkfs, fsck
    │   ├── DeviceInUse         it holds someone else's data (mkfs without --force)
    │   ├── DeviceTooSmall
    │   └── DeviceFailed        a read, write or barrier failed
    ├── VolumeError
    │   ├── NotAVolume
    │   ├── IncompleteSet       some devices of the volume were not named
    │   ├── MixedVolumes        devices of several volumes, or one device twice
    │   ├── UnsupportedFormat   written by a newer ckptfs
    │   └── VolumeDamaged
    ├── NoRoom                  the devices are full
    │   ├── MetadataFull        the metadata region is full
    │   └── JournalFull         the group does not fit the journal: take a snapshot (not an answer to a user)
    ├── MountError
    │   ├── NotMounted
    │   └── AlreadyMounted
    └── FsError                 a file system call is refused; carries its own errno

str() of each is one line that says what is wrong, where, and what to do.
`Problem` is what checks report instead of raising: something is not as it should be, and work goes on.
"""

from __future__ import annotations

import errno as errno_codes
import os
from dataclasses import dataclass
from enum import Enum


class CkptfsError(Exception):
    """The root of the tree. `errno` answers a system call, `exit_status` ends a command."""

    errno: int = errno_codes.EIO
    exit_status: int = 1


class UsageError(CkptfsError):
    """The command was given something it cannot work with."""

    errno = errno_codes.EINVAL
    exit_status = 2


class DeviceError(CkptfsError):
    """Something about one device."""


class DeviceMissing(DeviceError):
    """The path is not there, or is neither a block device nor a regular file."""

    errno = errno_codes.ENOENT


class DeviceBusy(DeviceError):
    """Someone else has the device open."""

    errno = errno_codes.EBUSY


class DeviceInUse(DeviceError):
    """The device holds someone else's data."""

    errno = errno_codes.EEXIST


class DeviceTooSmall(DeviceError):
    """The device cannot hold what it should."""

    errno = errno_codes.ENOSPC


class DeviceFailed(DeviceError):
    """A read, write or barrier of a device failed."""

    def __init__(self, message: str, errno: int = errno_codes.EIO) -> None:
        super().__init__(message)
        self.errno = errno


class VolumeError(CkptfsError):
    """Something about the devices taken together."""

    errno = errno_codes.EINVAL


class NotAVolume(VolumeError):
    """No ckptfs superblock is there."""


class IncompleteSet(VolumeError):
    """Some devices of the volume were not named."""


class MixedVolumes(VolumeError):
    """Devices of several volumes, or one device twice."""


class UnsupportedFormat(VolumeError):
    """The volume uses something that this ckptfs does not know."""


class VolumeDamaged(VolumeError):
    """What is on the devices contradicts itself."""

    errno = errno_codes.EUCLEAN


class NoRoom(CkptfsError):
    """The devices are full."""

    errno = errno_codes.ENOSPC


class MetadataFull(NoRoom):
    """The metadata region is full."""


class JournalFull(NoRoom):
    """A commit group does not fit the journal; nothing was written. A snapshot makes room."""


class MountError(CkptfsError):
    """Something about a mount point."""


class NotMounted(MountError):
    """No ckptfs is mounted there."""

    errno = errno_codes.EINVAL


class AlreadyMounted(MountError):
    """The volume is mounted."""

    errno = errno_codes.EBUSY


class FsError(CkptfsError):
    """A file system call is refused with this errno; nothing was changed."""

    def __init__(self, errno: int, message: str = "") -> None:
        super().__init__(message or os.strerror(errno))
        self.errno = errno


class ProblemCode(str, Enum):
    """What can be wrong on the devices. ckptfs.problems says of each how bad it is and what repair would do."""

    SUPERBLOCK_DAMAGED = "superblock-damaged"
    SUPERBLOCK_STALE = "superblock-stale"
    SNAPSHOT_DAMAGED = "snapshot-damaged"
    SNAPSHOT_MISSING = "snapshot-missing"
    SNAPSHOT_FALLBACK = "snapshot-fallback"
    JOURNAL_MIRROR_BEHIND = "journal-mirror-behind"
    JOURNAL_MIRROR_DAMAGED = "journal-mirror-damaged"
    JOURNAL_TAIL_TORN = "journal-tail-torn"
    JOURNAL_DAMAGED = "journal-damaged"
    RECORD_REFUSED = "record-refused"
    DEVICE_READ_FAILED = "device-read-failed"
    DENTRY_DANGLING = "dentry-dangling"
    DIRECTORY_TWICE = "directory-twice"
    DIRECTORY_PARENT = "directory-parent"
    INODE_ORPHAN = "inode-orphan"
    INODE_NUMBER = "inode-number"
    INODE_KIND = "inode-kind"
    LINK_COUNT = "link-count"
    ROOT_MISSING = "root-missing"
    ROWS_INVALID = "rows-invalid"
    ROWS_BEYOND_SIZE = "rows-beyond-size"
    EXTENT_OUTSIDE = "extent-outside"
    EXTENT_OVERLAP = "extent-overlap"
    EXTENT_CHECKSUM = "extent-checksum"
    EXTENT_UNREADABLE = "extent-unreadable"


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it should be: what kind, where, what was found and what was expected."""

    code: ProblemCode
    place: str
    found: str
    expected: str
    details: tuple[tuple[str, object], ...] = ()
    """More for programs, as (key, value) pairs that JSON can hold."""
