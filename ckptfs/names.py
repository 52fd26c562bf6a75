"""Who still refers to an inode of the live namespace, and how to name it to a person.

References are the kernel's lookups and open handles. An inode that lost its last name stays until the last of them
is gone. Concurrency: called from the trio thread only; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptfs.namespace import Inode, Namespace


class Names:
    """References to live inodes, and the name by which each was last reached."""

    def __init__(self, live: Namespace) -> None:
        self._live = live
        self._references: dict[int, int] = {}
        self._last_name: dict[int, tuple[int, bytes]] = {}

    def acquire(self, ino: int) -> None:
        """One more lookup or handle."""
        self._references[ino] = self._references.get(ino, 0) + 1
        self._live.held.add(ino)

    def release(self, ino: int, count: int = 1) -> None:
        """Lookups forgotten, or a handle closed."""
        left = self._references.get(ino, 0) - count
        if left > 0:
            self._references[ino] = left
            return
        self._references.pop(ino, None)
        self._last_name.pop(ino, None)
        self._live.held.discard(ino)
        inode = self._live.inodes.get(ino)
        if inode is not None and inode.nlink == 0:
            self._live.drop(ino)

    def remember(self, ino: int, parent: int, name: bytes) -> None:
        """Notes where an inode was found or put; a hint only, which path() checks."""
        self._last_name[ino] = (parent, name)

    def path(self, ino: int) -> str:
        """A path from the volume's root for people; "inode N" for what has no name."""
        return self.paths([ino])[ino]

    def paths(self, inos: Iterable[int]) -> dict[int, str]:
        """path() of many."""
        found = {ino: self._path_by_last_name(ino) for ino in inos}
        nameless = {ino for ino, path in found.items() if path is None and self._has_name(ino)}
        if nameless:
            found.update({inode.ino: path for path, inode in self._live.walk() if inode.ino in nameless})
        return {
            ino: f"inode {ino}" if path is None else path.decode(errors="backslashreplace")
            for ino, path in found.items()
        }

    def is_below(self, ino: int, directory: int) -> bool:
        """Whether an inode lies somewhere below a directory."""
        parent = self._parent_by_last_name(ino)
        if parent is not None:
            return self._live.is_inside(parent, directory)
        return any(inode.ino == ino for _, inode in self._live.walk(directory))

    def _has_name(self, ino: int) -> bool:
        inode = self._live.inodes.get(ino)
        return inode is not None and inode.nlink > 0

    def _parent_by_last_name(self, ino: int) -> int | None:
        """The directory in which an inode was last seen, if it still is there."""
        parent, name = self._last_name.get(ino, (0, b""))
        directory = self._live.inodes.get(parent)
        if directory is None or directory.children is None or directory.children.get(name) != ino:
            return None
        return parent

    def _path_by_last_name(self, ino: int) -> bytes | None:
        inode = self._live.inodes.get(ino)
        if inode is not None and inode.is_directory:
            return self._live.path_of(ino)
        parent = self._parent_by_last_name(ino)
        parent_path = None if parent is None else self._live.path_of(parent)
        return None if parent_path is None else parent_path.rstrip(b"/") + b"/" + self._last_name[ino][1]


def live_copy(namespace: Namespace) -> Namespace:
    """A live namespace to begin a mount with: all but the maps. What records replace as a whole (xattrs) is shared."""
    live = Namespace()
    live.next_ino = namespace.next_ino
    for ino, inode in namespace.inodes.items():
        copy = live.inodes[ino] = Inode(
            ino,
            inode.mode,
            uid=inode.uid,
            gid=inode.gid,
            rdev=inode.rdev,
            nlink=inode.nlink,
            size_bytes=inode.size_bytes,
            atime_ns=inode.atime_ns,
            mtime_ns=inode.mtime_ns,
            ctime_ns=inode.ctime_ns,
            target=inode.target,
            xattrs=inode.xattrs,
            parent=inode.parent,
        )
        copy.children = None if inode.children is None else dict(inode.children)
    return live
