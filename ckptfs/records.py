"""The vocabulary of the log, and what each record does to a namespace.

One apply() serves the live volume, replay and fsck, and is deterministic: every time is in the record. It checks
before it changes, so a refused record (FsError) leaves the namespace as it was. On the wire a record is a msgpack
array [number, fields in order]; a log entry is an array of records that belong together.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, cast

import msgpack

from ckptfs import extents
from ckptfs.constants import (
    LOST_AND_FOUND_INO,
    MAX_FILE_BYTES,
    MAX_LINKS,
    MAX_NAME_BYTES,
    MAX_TARGET_BYTES,
    MAX_XATTR_VALUE_BYTES,
    MAX_XATTRS_BYTES,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INO,
)
from ckptfs.errors import FsError, VolumeDamaged
from ckptfs.namespace import (
    INODE_METADATA_BYTES,
    XATTR_METADATA_BYTES,
    Applied,
    Inode,
    Namespace,
    dentry_metadata_bytes,
    is_name,
    rows_metadata_bytes,
)

__all__ = [
    "Applied",
    "Create",
    "Link",
    "Mount",
    "Record",
    "RemoveXattr",
    "Rename",
    "Rmdir",
    "Seal",
    "SetAttributes",
    "SetXattr",
    "Unlink",
    "apply",
    "apply_entry",
    "decode_entry",
    "encode_entry",
]


@dataclass(frozen=True)
class Create:
    """A file, directory, node or symbolic link appears; time_ns is the parent's."""

    parent: int
    name: bytes
    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int
    target: bytes | None
    xattrs: dict[bytes, bytes] | None
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    time_ns: int


@dataclass(frozen=True)
class Link:
    """An inode gets another name."""

    ino: int
    parent: int
    name: bytes
    time_ns: int


@dataclass(frozen=True)
class Unlink:
    """A name of something that is no directory goes."""

    parent: int
    name: bytes
    time_ns: int


@dataclass(frozen=True)
class Rmdir:
    """An empty directory goes."""

    parent: int
    name: bytes
    time_ns: int


@dataclass(frozen=True)
class Rename:
    """A name moves, replacing what has the new name; flags as in renameat2(2)."""

    old_parent: int
    old_name: bytes
    new_parent: int
    new_name: bytes
    flags: int
    time_ns: int


@dataclass(frozen=True)
class SetAttributes:
    """Attributes change; None leaves one as it is. Of mode only the permission bits count."""

    ino: int
    mode: int | None
    uid: int | None
    gid: int | None
    atime_ns: int | None
    mtime_ns: int | None
    ctime_ns: int


@dataclass(frozen=True)
class SetXattr:
    """An extended attribute gets a value."""

    ino: int
    name: bytes
    value: bytes
    ctime_ns: int


@dataclass(frozen=True)
class RemoveXattr:
    """An extended attribute goes."""

    ino: int
    name: bytes
    ctime_ns: int


@dataclass(frozen=True)
class Seal:
    """A file's open version becomes the committed one: the old map is cut at truncate_to_bytes, then rows go in."""

    ino: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    truncate_to_bytes: int
    rows: bytes


@dataclass(frozen=True)
class Mount:
    """A mount begins: the first record of its epoch."""

    epoch: int
    time_ns: int


Record = Create | Link | Unlink | Rmdir | Rename | SetAttributes | SetXattr | RemoveXattr | Seal | Mount

_NUMBERS: dict[type[Record], int] = {
    Create: 1,
    Link: 2,
    Unlink: 3,
    Rmdir: 4,
    Rename: 5,
    SetAttributes: 6,
    SetXattr: 7,
    RemoveXattr: 8,
    Seal: 9,
    Mount: 10,
}
_TYPES = {number: record_type for record_type, number in _NUMBERS.items()}
_FIELDS = {record_type: attrgetter(*(f.name for f in fields(record_type))) for record_type in _NUMBERS}
_FIELD_COUNTS = {record_type: len(fields(record_type)) for record_type in _NUMBERS}


def encode_entry(records: Sequence[Record]) -> bytes:
    """Packs the records of one log entry."""
    return cast(bytes, msgpack.packb([(_NUMBERS[type(record)], *_FIELDS[type(record)](record)) for record in records]))


def decode_entry(data: bytes) -> list[Record]:
    """Unpacks a log entry.

    Raises:
        VolumeDamaged: These bytes are no entry, or of a newer format.
    """
    try:
        return [_decode_record(packed) for packed in msgpack.unpackb(data)]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise VolumeDamaged(f"a log entry of {len(data)} bytes does not decode ({error}); run ckptfs fsck") from error


def _decode_record(packed: list[Any]) -> Record:
    record_type = _TYPES[packed[0]]
    if len(packed) != 1 + _FIELD_COUNTS[record_type]:
        raise ValueError(f"{len(packed) - 1} fields in a {record_type.__name__}")
    return record_type(*packed[1:])


def added_metadata_bytes(record: Record) -> int:
    """An upper bound of what applying a record adds to a snapshot, but for a Seal's rows, which reserve their own."""
    if isinstance(record, Create):
        xattrs = record.xattrs or {}
        xattrs_bytes = sum(len(name) + len(value) + XATTR_METADATA_BYTES for name, value in xattrs.items())
        target_bytes = len(record.target or b"")
        return INODE_METADATA_BYTES + target_bytes + xattrs_bytes + dentry_metadata_bytes(record.name)
    if isinstance(record, Link):
        return dentry_metadata_bytes(record.name)
    if isinstance(record, Rename):
        return dentry_metadata_bytes(record.new_name)
    if isinstance(record, SetXattr):
        return len(record.name) + len(record.value) + XATTR_METADATA_BYTES
    return 0


def apply_entry(namespace: Namespace, records: Sequence[Record]) -> Applied:
    """Applies the records of one entry in order."""
    applied = Applied()
    for record in records:
        applied.add(apply(namespace, record))
    return applied


def apply(namespace: Namespace, record: Record) -> Applied:
    """Does to a namespace what a record says.

    A change to an inode that is gone does nothing (a Seal lets its extents go): the volume logs changes to files
    that are open but unlinked, and at replay nothing holds them.

    Raises:
        FsError: It cannot be done; the namespace is unchanged.
    """
    return _APPLY[type(record)](namespace, record)


def _create(namespace: Namespace, record: Create) -> Applied:
    parent = _directory_for_new_name(namespace, record.parent, record.name)
    if record.name in _children(parent) or record.ino in namespace.inodes:
        raise FsError(errno.EEXIST)
    is_directory = stat.S_ISDIR(record.mode)
    if is_directory and parent.nlink >= MAX_LINKS:
        raise FsError(errno.EMLINK)
    if (record.target is not None) != stat.S_ISLNK(record.mode) or record.ino < 1:
        raise FsError(errno.EINVAL)
    if record.target is not None and not 0 < len(record.target) <= MAX_TARGET_BYTES:
        raise FsError(errno.ENAMETOOLONG if record.target else errno.ENOENT)
    namespace.inodes[record.ino] = Inode(
        record.ino,
        record.mode,
        uid=record.uid,
        gid=record.gid,
        rdev=record.rdev,
        nlink=2 if is_directory else 1,
        size_bytes=len(record.target or b""),
        atime_ns=record.atime_ns,
        mtime_ns=record.mtime_ns,
        ctime_ns=record.ctime_ns,
        target=record.target,
        xattrs=dict(record.xattrs) if record.xattrs else None,
        parent=parent.ino if is_directory else 0,
    )
    namespace.next_ino = max(namespace.next_ino, record.ino + 1)
    _children(parent)[record.name] = record.ino
    parent.nlink += is_directory
    _touch(parent, record.time_ns)
    created = namespace.inodes[record.ino]
    return Applied(metadata_bytes=created.metadata_bytes + dentry_metadata_bytes(record.name))


def _link(namespace: Namespace, record: Link) -> Applied:
    inode = namespace.get(record.ino)
    parent = _directory_for_new_name(namespace, record.parent, record.name)
    if inode.is_directory:
        raise FsError(errno.EPERM)
    if record.name in _children(parent):
        raise FsError(errno.EEXIST)
    if inode.nlink == 0:
        raise FsError(errno.ENOENT)
    if inode.nlink >= MAX_LINKS:
        raise FsError(errno.EMLINK)
    inode.nlink += 1
    _children(parent)[record.name] = inode.ino
    _touch(parent, record.time_ns)
    _touch_ctime(inode, record.time_ns)
    return Applied(metadata_bytes=dentry_metadata_bytes(record.name))


def _unlink(namespace: Namespace, record: Unlink) -> Applied:
    parent = namespace.get(record.parent)
    inode = namespace.lookup(record.parent, record.name)
    if inode.is_directory:
        raise FsError(errno.EISDIR)
    del _children(parent)[record.name]
    _touch(parent, record.time_ns)
    return _lose_name(namespace, inode, record.name, record.time_ns)


def _rmdir(namespace: Namespace, record: Rmdir) -> Applied:
    parent = namespace.get(record.parent)
    inode = namespace.lookup(record.parent, record.name)
    _check_removable_directory(inode)
    del _children(parent)[record.name]
    parent.nlink -= 1
    _touch(parent, record.time_ns)
    return _lose_name(namespace, inode, record.name, record.time_ns)


def _rename(namespace: Namespace, record: Rename) -> Applied:
    if record.flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or record.flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
        raise FsError(errno.EINVAL)
    moved = namespace.lookup(record.old_parent, record.old_name)
    old_parent = namespace.get(record.old_parent)
    new_parent = _directory_for_new_name(namespace, record.new_parent, record.new_name)
    replaced_ino = _children(new_parent).get(record.new_name)
    replaced = None if replaced_ino is None else namespace.get(replaced_ino)
    _check_movable(namespace, moved, old_parent, new_parent)
    if record.flags & RENAME_EXCHANGE:
        if replaced is None:
            raise FsError(errno.ENOENT)
        _check_movable(namespace, replaced, new_parent, old_parent)
        _exchange(record, moved, replaced, old_parent, new_parent)
        return Applied()
    if replaced is not None:
        if record.flags & RENAME_NOREPLACE:
            raise FsError(errno.EEXIST)
        if replaced is moved:
            return Applied()
        _check_replaceable(moved, replaced)
    return _move(namespace, record, moved, replaced, old_parent, new_parent)


def _move(
    namespace: Namespace, record: Rename, moved: Inode, replaced: Inode | None, old_parent: Inode, new_parent: Inode
) -> Applied:
    del _children(old_parent)[record.old_name]
    _children(new_parent)[record.new_name] = moved.ino
    if moved.is_directory:
        old_parent.nlink -= 1
        new_parent.nlink += 1
        moved.parent = new_parent.ino
    _touch(old_parent, record.time_ns)
    _touch(new_parent, record.time_ns)
    _touch_ctime(moved, record.time_ns)
    moved_name_bytes = dentry_metadata_bytes(record.new_name) - dentry_metadata_bytes(record.old_name)
    if replaced is None:
        return Applied(metadata_bytes=moved_name_bytes)
    new_parent.nlink -= replaced.is_directory
    change = _lose_name(namespace, replaced, record.new_name, record.time_ns)
    change.metadata_bytes += moved_name_bytes
    return change


def _exchange(record: Rename, one: Inode, other: Inode, one_parent: Inode, other_parent: Inode) -> None:
    _children(one_parent)[record.old_name] = other.ino
    _children(other_parent)[record.new_name] = one.ino
    change = other.is_directory - one.is_directory
    one_parent.nlink += change
    other_parent.nlink -= change
    if one.is_directory:
        one.parent = other_parent.ino
    if other.is_directory:
        other.parent = one_parent.ino
    for parent in (one_parent, other_parent):
        _touch(parent, record.time_ns)
    for inode in (one, other):
        _touch_ctime(inode, record.time_ns)


def _set_attributes(namespace: Namespace, record: SetAttributes) -> Applied:
    inode = _existing_or_gone(namespace, record.ino)
    if inode is None:
        return Applied()
    if record.mode is not None:
        inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(record.mode)
    inode.uid = inode.uid if record.uid is None else record.uid
    inode.gid = inode.gid if record.gid is None else record.gid
    inode.atime_ns = inode.atime_ns if record.atime_ns is None else record.atime_ns
    inode.mtime_ns = inode.mtime_ns if record.mtime_ns is None else record.mtime_ns
    inode.ctime_ns = record.ctime_ns
    return Applied()


def _set_xattr(namespace: Namespace, record: SetXattr) -> Applied:
    inode = _existing_or_gone(namespace, record.ino)
    if inode is None:
        return Applied()
    if not 0 < len(record.name) <= MAX_NAME_BYTES:
        raise FsError(errno.ERANGE)
    if len(record.value) > MAX_XATTR_VALUE_BYTES:
        raise FsError(errno.E2BIG)
    others = {name: value for name, value in (inode.xattrs or {}).items() if name != record.name}
    if sum(map(len, others)) + sum(map(len, others.values())) + len(record.name + record.value) > MAX_XATTRS_BYTES:
        raise FsError(errno.ENOSPC)
    before_bytes = inode.metadata_bytes
    inode.xattrs = {**others, record.name: record.value}
    inode.ctime_ns = record.ctime_ns
    return Applied(metadata_bytes=inode.metadata_bytes - before_bytes)


def _remove_xattr(namespace: Namespace, record: RemoveXattr) -> Applied:
    inode = _existing_or_gone(namespace, record.ino)
    if inode is None:
        return Applied()
    if inode.xattrs is None or record.name not in inode.xattrs:
        raise FsError(errno.ENODATA)
    before_bytes = inode.metadata_bytes
    inode.xattrs = {name: value for name, value in inode.xattrs.items() if name != record.name} or None
    inode.ctime_ns = record.ctime_ns
    return Applied(metadata_bytes=inode.metadata_bytes - before_bytes)


def _seal(namespace: Namespace, record: Seal) -> Applied:
    inode = _existing_or_gone(namespace, record.ino)
    if inode is None:
        return Applied(freed=extents.stored_extents(record.rows))
    if not inode.is_file:
        raise FsError(errno.EISDIR if inode.is_directory else errno.EINVAL)
    if extents.find_fault(record.rows) or not extents.end_bytes(record.rows) <= record.size_bytes <= MAX_FILE_BYTES:
        raise FsError(errno.EINVAL)
    before_bytes = rows_metadata_bytes(inode.rows)
    # What lies beyond the new end must not come back when the file grows again.
    inode.rows, freed = extents.merge(inode.rows, record.rows, min(record.truncate_to_bytes, record.size_bytes))
    inode.size_bytes = record.size_bytes
    inode.mtime_ns = record.mtime_ns
    inode.ctime_ns = record.ctime_ns
    return Applied(freed=freed, metadata_bytes=rows_metadata_bytes(inode.rows) - before_bytes)


def _mount(namespace: Namespace, record: Mount) -> Applied:
    del namespace, record
    return Applied()


_APPLY: dict[type[Record], Callable[[Namespace, Any], Applied]] = {
    Create: _create,
    Link: _link,
    Unlink: _unlink,
    Rmdir: _rmdir,
    Rename: _rename,
    SetAttributes: _set_attributes,
    SetXattr: _set_xattr,
    RemoveXattr: _remove_xattr,
    Seal: _seal,
    Mount: _mount,
}


def _children(directory: Inode) -> dict[bytes, int]:
    if directory.children is None:
        raise FsError(errno.ENOTDIR)
    return directory.children


def _directory_for_new_name(namespace: Namespace, ino: int, name: bytes) -> Inode:
    parent = namespace.get(ino)
    if not parent.is_directory:
        raise FsError(errno.ENOTDIR)
    if parent.nlink == 0:
        raise FsError(errno.ENOENT)
    if len(name) > MAX_NAME_BYTES:
        raise FsError(errno.ENAMETOOLONG)
    if not is_name(name):
        raise FsError(errno.EINVAL)
    return parent


def _existing_or_gone(namespace: Namespace, ino: int) -> Inode | None:
    """The inode, None when it once was; FsError(ENOENT) when it never was."""
    inode = namespace.inodes.get(ino)
    if inode is None and not 0 < ino < namespace.next_ino:
        raise FsError(errno.ENOENT)
    return inode


def _check_movable(namespace: Namespace, inode: Inode, old_parent: Inode, new_parent: Inode) -> None:
    if not inode.is_directory or old_parent is new_parent:
        if inode.ino == LOST_AND_FOUND_INO:
            raise FsError(errno.EBUSY)
        return
    if inode.ino in (ROOT_INO, LOST_AND_FOUND_INO):
        raise FsError(errno.EBUSY)
    if namespace.is_inside(new_parent.ino, inode.ino):
        raise FsError(errno.EINVAL)
    if new_parent.nlink >= MAX_LINKS:
        raise FsError(errno.EMLINK)


def _check_replaceable(moved: Inode, replaced: Inode) -> None:
    if replaced.is_directory:
        if not moved.is_directory:
            raise FsError(errno.EISDIR)
        _check_removable_directory(replaced)
    elif moved.is_directory:
        raise FsError(errno.ENOTDIR)


def _check_removable_directory(inode: Inode) -> None:
    if not inode.is_directory:
        raise FsError(errno.ENOTDIR)
    if inode.ino in (ROOT_INO, LOST_AND_FOUND_INO):
        raise FsError(errno.EBUSY)
    if inode.children:
        raise FsError(errno.ENOTEMPTY)


def _lose_name(namespace: Namespace, inode: Inode, name: bytes, time_ns: int) -> Applied:
    inode.nlink = 0 if inode.is_directory else inode.nlink - 1
    _touch_ctime(inode, time_ns)
    change = Applied(metadata_bytes=-dentry_metadata_bytes(name))
    if inode.nlink:
        return change
    change.dropped.append(inode.ino)
    if inode.ino not in namespace.held:
        change.add(namespace.drop(inode.ino))
    return change


def _touch(directory: Inode, time_ns: int) -> None:
    directory.mtime_ns = max(directory.mtime_ns, time_ns)
    _touch_ctime(directory, time_ns)


def _touch_ctime(inode: Inode, time_ns: int) -> None:
    inode.ctime_ns = max(inode.ctime_ns, time_ns)
