"""Names and inodes in memory: no I/O, no log. Only ckptfs.records changes it.

A directory maps names to inode numbers; an inode goes when its last name goes, unless it is held (open in the live
volume), then at drop(). Inode numbers are never used again. A directory's link count is 2 plus its subdirectories.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfs import extents
from ckptfs.constants import FIRST_FREE_INO, LOST_AND_FOUND_INO, LOST_AND_FOUND_NAME, MAX_NAME_BYTES, ROOT_INO
from ckptfs.errors import FsError
from ckptfs.extents import StoredExtent

INODE_METADATA_BYTES = 112
"""What an inode takes in a snapshot at most, besides what its fields hold: every number at its longest, so that no
later change of an attribute needs more, and the header of one chunk of names or rows."""
DENTRY_METADATA_BYTES = 12
XATTR_METADATA_BYTES = 8


@dataclass
class Applied:
    """What a change let go, and what it takes in the metadata region."""

    freed: list[StoredExtent] = field(default_factory=list)
    """Device space that nothing points to any more."""
    dropped: list[int] = field(default_factory=list)
    """Inode numbers whose last link went: gone, or, if they are held, waiting for drop()."""
    metadata_bytes: int = 0
    """How much more a snapshot takes by it, in terms of Inode.metadata_bytes; negative when it takes less."""

    def add(self, other: Applied) -> None:
        """Takes in what another change let go."""
        self.freed += other.freed
        self.dropped += other.dropped
        self.metadata_bytes += other.metadata_bytes


def is_name(name: bytes) -> bool:
    """True for what can be a name in a directory."""
    return 0 < len(name) <= MAX_NAME_BYTES and name not in (b".", b"..") and b"/" not in name and b"\0" not in name


def rows_metadata_bytes(rows: bytes) -> int:
    """An upper bound of what extent rows take in a snapshot: they come in chunks, each with a header."""
    return len(rows) + len(rows) // 4096


def dentry_metadata_bytes(name: bytes) -> int:
    """An upper bound of what a name in a directory takes in a snapshot."""
    return len(name) + DENTRY_METADATA_BYTES


class Inode:
    """A file, directory, symbolic link or node."""

    __slots__ = (
        "atime_ns",
        "children",
        "ctime_ns",
        "gid",
        "ino",
        "mode",
        "mtime_ns",
        "nlink",
        "parent",
        "rdev",
        "rows",
        "size_bytes",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(
        self,
        ino: int,
        mode: int,
        *,
        uid: int = 0,
        gid: int = 0,
        rdev: int = 0,
        nlink: int = 1,
        size_bytes: int = 0,
        atime_ns: int = 0,
        mtime_ns: int = 0,
        ctime_ns: int = 0,
        target: bytes | None = None,
        xattrs: dict[bytes, bytes] | None = None,
        parent: int = 0,
        rows: bytes = b"",
    ) -> None:
        self.ino = ino
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.rdev = rdev
        self.nlink = nlink
        self.size_bytes = size_bytes
        self.atime_ns = atime_ns
        self.mtime_ns = mtime_ns
        self.ctime_ns = ctime_ns
        self.target = target
        self.xattrs = xattrs
        self.children: dict[bytes, int] | None = {} if stat.S_ISDIR(mode) else None
        self.parent = parent
        """Of a directory: where its name is; the root's is the root. 0 for everything else."""
        self.rows = rows

    @property
    def metadata_bytes(self) -> int:
        """An upper bound of what it takes in a snapshot, without the names in it (tests/test_snapshot.py)."""
        xattrs_bytes = sum(len(name) + len(value) + XATTR_METADATA_BYTES for name, value in (self.xattrs or {}).items())
        return INODE_METADATA_BYTES + len(self.target or b"") + xattrs_bytes + rows_metadata_bytes(self.rows)

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return self.children is not None

    @property
    def is_file(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.mode)


class Namespace:
    """All inodes of a volume, and the names that lead to them."""

    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        self.next_ino = FIRST_FREE_INO
        self.held: set[int] = set()
        """Inodes that outlive their last name: open in the live volume. Never on the devices."""

    @classmethod
    def fresh(cls, time_ns: int, *, uid: int = 0, gid: int = 0) -> Namespace:
        """What mkfs makes: a root directory with lost+found in it."""
        namespace = cls()
        root = Inode(ROOT_INO, stat.S_IFDIR | 0o755, nlink=3)
        lost = Inode(LOST_AND_FOUND_INO, stat.S_IFDIR | 0o700, nlink=2)
        for inode in (root, lost):
            inode.uid, inode.gid, inode.parent = uid, gid, ROOT_INO
            inode.atime_ns = inode.mtime_ns = inode.ctime_ns = time_ns
        namespace.inodes = {root.ino: root, lost.ino: lost}
        namespace.directory(ROOT_INO)[LOST_AND_FOUND_NAME] = LOST_AND_FOUND_INO
        return namespace

    def get(self, ino: int) -> Inode:
        """The inode of that number; FsError(ENOENT) when there is none."""
        inode = self.inodes.get(ino)
        if inode is None:
            raise FsError(errno.ENOENT)
        return inode

    def directory(self, ino: int) -> dict[bytes, int]:
        """The names in a directory; FsError(ENOTDIR) when it is none."""
        children = self.get(ino).children
        if children is None:
            raise FsError(errno.ENOTDIR)
        return children

    def lookup(self, parent: int, name: bytes) -> Inode:
        """The inode that a name in a directory leads to; FsError(ENOENT) when there is none."""
        ino = self.directory(parent).get(name)
        if ino is None:
            raise FsError(errno.ENOENT)
        return self.get(ino)

    def resolve(self, path: bytes) -> Inode:
        """The inode at a path from the root; symbolic links are not followed."""
        inode = self.get(ROOT_INO)
        for name in path.split(b"/"):
            if name == b"..":
                inode = self.get(inode.parent)
            elif name not in (b"", b"."):
                inode = self.lookup(inode.ino, name)
        return inode

    def walk(self, ino: int = ROOT_INO, path: bytes = b"") -> Iterator[tuple[bytes, Inode]]:
        """Every (path, inode) below a directory, without itself, parents first. A name that leads nowhere is left out.

        A directory that is met twice (damage) is entered once.
        """
        entered = {ino}
        to_enter = [(ino, path)]
        while to_enter:
            directory_ino, directory_path = to_enter.pop()
            for name, child_ino in self.directory(directory_ino).items():
                child = self.inodes.get(child_ino)
                if child is None:
                    continue
                child_path = directory_path + b"/" + name
                yield child_path, child
                if child.is_directory and child_ino not in entered:
                    entered.add(child_ino)
                    to_enter.append((child_ino, child_path))

    def is_inside(self, ino: int, ancestor: int) -> bool:
        """True when a directory is ancestor or lies below it."""
        while ino not in (ancestor, ROOT_INO):
            ino = self.get(ino).parent
        return ino == ancestor

    def path_of(self, ino: int) -> bytes | None:
        """A path to a directory; None for what is removed. For other inodes use walk()."""
        names: list[bytes] = []
        while ino != ROOT_INO:
            inode = self.inodes.get(ino)
            if inode is None or inode.nlink == 0 or not inode.is_directory:
                return None
            siblings = self.directory(inode.parent)
            name = next((name for name, child in siblings.items() if child == ino), None)
            if name is None:
                return None
            names.append(name)
            ino = inode.parent
        return b"/" + b"/".join(reversed(names))

    def drop(self, ino: int) -> Applied:
        """Lets go of an inode without names that is no longer held. REQUIRES: its link count is 0."""
        inode = self.get(ino)
        assert inode.nlink == 0, f"inode {ino} still has {inode.nlink} names"
        self.held.discard(ino)
        del self.inodes[ino]
        return Applied(freed=extents.stored_extents(inode.rows), metadata_bytes=-inode.metadata_bytes)
