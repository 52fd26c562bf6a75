"""Finding the way through names."""

from __future__ import annotations

import errno
import stat

import pytest

from ckptfs.errors import FsError
from ckptfs.namespace import Namespace
from ckptfs.records import Create, Link, Rmdir, Unlink, apply

DIRECTORY, FILE = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644


@pytest.fixture
def namespace() -> Namespace:
    """/lost+found, /d, /d/e, /d/e/f, /g = /d/e/f"""
    namespace = Namespace.fresh(1, uid=5, gid=6)
    for parent, name, ino, mode in [(1, b"d", 3, DIRECTORY), (3, b"e", 4, DIRECTORY), (4, b"f", 5, FILE)]:
        apply(namespace, Create(parent, name, ino, mode, 0, 0, 0, None, None, 1, 1, 1, 1))
    apply(namespace, Link(5, 1, b"g", 1))
    return namespace


def test_a_fresh_volume_has_a_root_and_lost_and_found() -> None:
    namespace = Namespace.fresh(9, uid=5, gid=6)
    root, lost = namespace.get(1), namespace.lookup(1, b"lost+found")
    assert (root.mode, root.nlink, root.uid, root.gid, root.mtime_ns) == (DIRECTORY, 3, 5, 6, 9)
    assert (lost.ino, lost.mode, lost.nlink, lost.parent) == (2, stat.S_IFDIR | 0o700, 2, 1)


def test_paths_lead_to_inodes(namespace: Namespace) -> None:
    for path, ino in [(b"", 1), (b"/", 1), (b"/d/e/f", 5), (b"d//e/./f", 5), (b"/d/e/..", 3), (b"/..", 1), (b"/g", 5)]:
        assert namespace.resolve(path).ino == ino
    for path, code in [(b"/x", errno.ENOENT), (b"/d/e/f/x", errno.ENOTDIR)]:
        with pytest.raises(FsError) as refused:
            namespace.resolve(path)
        assert refused.value.errno == code


def test_walk_meets_every_name_parents_first(namespace: Namespace) -> None:
    paths = [path for path, _ in namespace.walk()]
    assert sorted(paths) == [b"/d", b"/d/e", b"/d/e/f", b"/g", b"/lost+found"]
    assert paths.index(b"/d") < paths.index(b"/d/e") < paths.index(b"/d/e/f")
    assert [(path, inode.ino) for path, inode in namespace.walk(4, b"top")] == [(b"top/f", 5)]


def test_walk_survives_damage(namespace: Namespace) -> None:
    namespace.directory(4)[b"loop"] = 3
    namespace.directory(4)[b"nowhere"] = 99
    assert sum(1 for _ in namespace.walk()) == 6


def test_the_way_back_from_a_directory(namespace: Namespace) -> None:
    assert namespace.path_of(1) == b"/"
    assert namespace.path_of(4) == b"/d/e"
    assert namespace.path_of(5) is None
    assert namespace.is_inside(4, 3)
    assert namespace.is_inside(3, 3)
    assert not namespace.is_inside(3, 4)
    assert not namespace.is_inside(2, 3)


def test_a_removed_directory_that_is_open_takes_no_new_names(namespace: Namespace) -> None:
    apply(namespace, Unlink(4, b"f", 2))
    namespace.held.add(4)
    assert apply(namespace, Rmdir(3, b"e", 2)).dropped == [4]
    assert namespace.path_of(4) is None
    with pytest.raises(FsError) as refused:
        apply(namespace, Create(4, b"new", 9, FILE, 0, 0, 0, None, None, 1, 1, 1, 1))
    assert refused.value.errno == errno.ENOENT
    namespace.drop(4)
    with pytest.raises(FsError):
        namespace.get(4)
