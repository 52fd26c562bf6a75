"""Who still refers to an inode of the live namespace, and how to name it to a person.

References are the kernel's lookups and open handles. An inode that lost its last name stays until the last of them
is gone. Concurrency: called from the trio thread only; nothing here waits.
"""

from __future__ import annotations

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
        path = self._path_of(ino)
        return f"inode {ino}" if path is None else path.decode(errors="backslashreplace")

    def _path_of(self, ino: int) -> bytes | None:
        inode = self._live.inodes.get(ino)
        if inode is None or inode.nlink == 0:
            return None
        if inode.is_directory:
            return self._live.path_of(ino)
        parent, name = self._last_name.get(ino, (0, b""))
        directory = self._live.inodes.get(parent)
        if directory is not None and directory.children is not None and directory.children.get(name) == ino:
            parent_path = self._live.path_of(parent)
            return None if parent_path is None else parent_path.rstrip(b"/") + b"/" + name
        return next((path for path, found in self._live.walk() if found.ino == ino), None)


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
