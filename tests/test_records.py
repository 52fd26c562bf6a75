"""Records against a model that is nothing but a set of names, and the round trip of every record."""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.constants import RENAME_EXCHANGE, RENAME_NOREPLACE
from ckptfs.errors import FsError, VolumeDamaged
from ckptfs.extents import Row, StoredExtent, pack
from ckptfs.layout import MIB
from ckptfs.namespace import Inode, Namespace
from ckptfs.records import (
    Applied,
    Create,
    Link,
    Mount,
    Record,
    RemoveXattr,
    Rename,
    Rmdir,
    Seal,
    SetAttributes,
    SetXattr,
    Unlink,
    added_metadata_bytes,
    apply,
    apply_entry,
    decode_entry,
    encode_entry,
)
from ckptfs.snapshot import metadata_bytes

DIRECTORY, FILE = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644
NAMES = [b"a", b"b", b"c"]


@dataclass
class Model:
    """(parent, name) -> inode number, and what kind each inode is. Link counts are counted."""

    names: dict[tuple[int, bytes], int] = field(default_factory=lambda: {(1, b"lost+found"): 2})
    directories: set[int] = field(default_factory=lambda: {1, 2})
    existing: set[int] = field(default_factory=lambda: {1, 2})

    def links(self, ino: int) -> int:
        names = sum(1 for target in self.names.values() if target == ino)
        if ino not in self.directories:
            return names
        subdirectories = sum(1 for (parent, _), t in self.names.items() if parent == ino and t in self.directories)
        return 2 + subdirectories

    def ancestors(self, ino: int) -> set[int]:
        found = {ino}
        while ino != 1:
            ino = next(parent for (parent, _), target in self.names.items() if target == ino)
            found.add(ino)
        return found

    def is_empty(self, ino: int) -> bool:
        return all(parent != ino for parent, _ in self.names)

    def forget_unnamed(self) -> None:
        self.existing = {1} | set(self.names.values())
        self.directories &= self.existing

    def do(self, record: Record) -> int:
        """Carries a record out if it can be; 0 or the errno."""
        match record:
            case Create():
                error = self._new_name(record.parent, record.name)
                if not error:
                    self.names[record.parent, record.name] = record.ino
                    self.directories |= {record.ino} if stat.S_ISDIR(record.mode) else set()
            case Link():
                error = (
                    errno.ENOENT
                    if record.ino not in self.existing
                    else self._new_name(
                        record.parent, record.name, errno.EPERM if record.ino in self.directories else 0
                    )
                )
                if not error:
                    self.names[record.parent, record.name] = record.ino
            case Unlink() | Rmdir():
                error = self._remove(record.parent, record.name, isinstance(record, Rmdir))
            case Rename():
                error = self._rename(record)
            case _:
                raise AssertionError(record)
        self.forget_unnamed()
        return error

    def _parent(self, parent: int) -> int:
        if parent not in self.existing:
            return errno.ENOENT
        return 0 if parent in self.directories else errno.ENOTDIR

    def _new_name(self, parent: int, name: bytes, first: int = 0) -> int:
        return self._parent(parent) or first or (errno.EEXIST if (parent, name) in self.names else 0)

    def _remove(self, parent: int, name: bytes, is_rmdir: bool) -> int:
        if error := self._parent(parent):
            return error
        ino = self.names.get((parent, name))
        if ino is None:
            return errno.ENOENT
        if is_rmdir != (ino in self.directories):
            return errno.ENOTDIR if is_rmdir else errno.EISDIR
        if ino == 2:
            return errno.EBUSY
        if is_rmdir and not self.is_empty(ino):
            return errno.ENOTEMPTY
        del self.names[parent, name]
        return 0

    def _rename(self, record: Rename) -> int:
        old, new = (record.old_parent, record.old_name), (record.new_parent, record.new_name)
        if error := self._parent(record.old_parent):
            return error
        moved = self.names.get(old)
        if moved is None:
            return errno.ENOENT
        if error := self._parent(record.new_parent):
            return error
        replaced = self.names.get(new)
        error = self._move_error(moved, record.new_parent)
        if record.flags == RENAME_EXCHANGE:
            error = error or (errno.ENOENT if replaced is None else self._move_error(replaced, record.old_parent))
        elif replaced is not None and not error:
            error = errno.EEXIST if record.flags == RENAME_NOREPLACE else self._replace_error(moved, replaced)
        if error or replaced == moved:
            return error
        del self.names[old]
        if replaced is not None and record.flags == RENAME_EXCHANGE:
            self.names[old] = replaced
        self.names[new] = moved
        return 0

    def _move_error(self, moved: int, new_parent: int) -> int:
        if moved == 2:
            return errno.EBUSY
        return errno.EINVAL if moved in self.directories and moved in self.ancestors(new_parent) else 0

    def _replace_error(self, moved: int, replaced: int) -> int:
        if replaced == moved:
            return 0
        if replaced not in self.directories:
            return errno.ENOTDIR if moved in self.directories else 0
        if moved not in self.directories:
            return errno.EISDIR
        if replaced == 2:
            return errno.EBUSY
        return 0 if self.is_empty(replaced) else errno.ENOTEMPTY


def _state(namespace: Namespace) -> dict[int, tuple[object, ...]]:
    return {
        ino: (*(getattr(inode, name) for name in Inode.__slots__ if name != "children"), dict(inode.children or {}))
        for ino, inode in namespace.inodes.items()
    }


@st.composite
def _records(draw: st.DrawFn) -> list[Record]:
    records: list[Record] = []
    ino = 2
    for time_ns in range(draw(st.integers(1, 40))):
        inos = st.integers(1, ino + 1)
        names = st.sampled_from([*NAMES, b"lost+found"] if draw(st.booleans()) else NAMES)
        kind = draw(st.sampled_from(["create", "create", "create", "link", "unlink", "rmdir", "rename", "rename"]))
        if kind == "create":
            ino += 1
            mode = draw(st.sampled_from([DIRECTORY, DIRECTORY, FILE]))
            records.append(
                Create(draw(inos), draw(names), ino, mode, 0, 0, 0, None, None, time_ns, time_ns, time_ns, time_ns)
            )
        elif kind == "link":
            records.append(Link(draw(inos), draw(inos), draw(names), time_ns))
        elif kind == "unlink":
            records.append(Unlink(draw(inos), draw(names), time_ns))
        elif kind == "rmdir":
            records.append(Rmdir(draw(inos), draw(names), time_ns))
        else:
            flags = draw(st.sampled_from([0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE]))
            records.append(Rename(draw(inos), draw(names), draw(inos), draw(names), flags, time_ns))
    return records


@given(_records())
@settings(max_examples=400, deadline=None)
def test_names_are_what_the_model_says(records: list[Record]) -> None:
    namespace, model = Namespace.fresh(0), Model()
    accepted = []
    for record in records:
        before, before_bytes = _state(namespace), metadata_bytes(namespace)
        expected = model.do(record)
        try:
            change = apply(namespace, record)
            assert metadata_bytes(namespace) == before_bytes + change.metadata_bytes
            assert change.metadata_bytes <= added_metadata_bytes(record)
            error = 0
            accepted.append(record)
        except FsError as refused:
            error = refused.errno
            assert _state(namespace) == before, "a refused record changed something"
        assert error == expected, record
        names = {(ino, name): c for ino, i in namespace.inodes.items() for name, c in (i.children or {}).items()}
        assert names == model.names
        assert namespace.inodes.keys() == model.existing
        assert all(inode.nlink == model.links(ino) for ino, inode in namespace.inodes.items())
    replayed = Namespace.fresh(0)
    apply_entry(replayed, decode_entry(encode_entry(accepted)))
    assert _state(replayed) == _state(namespace)


EVERY_RECORD: list[Record] = [
    Create(1, b"\xff\x00x", 3, FILE, 1, 2, 3, b"target", {b"user.k": b"\x00v"}, -1, 2, 3, 1 << 62),
    Create(1, b"n", 3, FILE, 0, 0, 0, None, None, 0, 0, 0, 0),
    Link(3, 1, b"l", 4),
    Unlink(1, b"l", 5),
    Rmdir(1, b"d", 6),
    Rename(1, b"a", 2, b"b", 2, 7),
    SetAttributes(3, None, 5, None, 6, None, 7),
    SetXattr(3, b"user.k", b"", 8),
    RemoveXattr(3, b"user.k", 9),
    Seal(3, 10, 11, 12, 0, b"\x00" * 40),
    Mount(13, 14),
]


def test_every_record_survives_its_encoding() -> None:
    assert decode_entry(encode_entry(EVERY_RECORD)) == EVERY_RECORD


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91\x92\x63\x01", b"\x91\x91\x01", b"\x05", encode_entry(EVERY_RECORD)[:-1]]
)
def test_what_is_no_entry_is_told(data: bytes) -> None:
    with pytest.raises(VolumeDamaged):
        decode_entry(data)


def _with_file(ino: int = 3) -> Namespace:
    namespace = Namespace.fresh(0)
    apply(namespace, Create(1, b"f", ino, FILE, 0, 0, 0, None, None, 1, 1, 1, 1))
    return namespace


def _row(offset: int, length: int, number: int) -> bytes:
    return pack([Row(offset, length, 0, 0, 0, length, number * MIB, 7)])


def test_a_seal_replaces_cuts_and_frees() -> None:
    namespace = _with_file()
    assert apply(namespace, Seal(3, 20, 5, 6, 0, _row(0, 20, 1))) == Applied(metadata_bytes=40)
    applied = apply(namespace, Seal(3, 30, 7, 8, 10, _row(20, 10, 2)))
    assert applied == Applied(metadata_bytes=40)
    inode = namespace.get(3)
    assert (inode.size_bytes, inode.mtime_ns, inode.ctime_ns) == (30, 7, 8)
    assert inode.rows == pack([Row(0, 10, 0, 0, 0, 20, MIB, 7)]) + _row(20, 10, 2)
    assert apply(namespace, Seal(3, 5, 9, 9, 5, b"")).freed == [StoredExtent(0, 2 * MIB, 10)]
    gone = apply(namespace, Unlink(1, b"f", 10))
    assert (gone.freed, gone.dropped) == ([StoredExtent(0, MIB, 20)], [3])


@pytest.mark.parametrize("rows", [_row(0, 40, 1), _row(0, 5, 1) + _row(4, 5, 2), b"short"])
def test_a_seal_that_makes_no_sense_is_refused(rows: bytes) -> None:
    namespace = _with_file()
    with pytest.raises(FsError):
        apply(namespace, Seal(3, 30, 5, 5, 0, rows))
    assert namespace.get(3).rows == b""


def test_an_open_file_outlives_its_last_name() -> None:
    namespace = _with_file()
    apply(namespace, Seal(3, 20, 5, 5, 0, _row(0, 20, 1)))
    namespace.held.add(3)
    unlinked = apply(namespace, Unlink(1, b"f", 9))
    assert (unlinked.freed, unlinked.dropped) == ([], [3])
    assert namespace.get(3).nlink == 0
    apply(namespace, Seal(3, 40, 5, 5, 20, _row(20, 20, 2)))
    with pytest.raises(FsError) as refused:
        apply(namespace, Link(3, 1, b"again", 9))
    assert refused.value.errno == errno.ENOENT
    assert namespace.drop(3).freed == [StoredExtent(0, MIB, 20), StoredExtent(0, 2 * MIB, 20)]
    assert 3 not in namespace.inodes


def test_changes_to_what_is_gone_do_nothing_but_let_go() -> None:
    namespace = _with_file()
    apply(namespace, Unlink(1, b"f", 9))
    assert apply(namespace, Seal(3, 40, 5, 5, 0, _row(0, 20, 2))).freed == [StoredExtent(0, 2 * MIB, 20)]
    for record in (
        SetAttributes(3, 0o600, None, None, None, None, 1),
        SetXattr(3, b"k", b"v", 1),
        RemoveXattr(3, b"k", 1),
    ):
        assert apply(namespace, record) == Applied()
        with pytest.raises(FsError):
            apply(namespace, replace(record, ino=4))


def test_inode_numbers_are_never_used_again() -> None:
    namespace = _with_file(ino=7)
    assert namespace.next_ino == 8
    apply(namespace, Unlink(1, b"f", 9))
    apply(namespace, Create(1, b"older", 5, FILE, 0, 0, 0, None, None, 1, 1, 1, 1))
    assert namespace.next_ino == 8


def test_attributes_change_one_by_one_and_the_kind_never() -> None:
    namespace = _with_file()
    apply(namespace, SetAttributes(3, stat.S_IFDIR | 0o4711, 5, None, None, 77, 78))
    inode = namespace.get(3)
    assert (inode.mode, inode.uid, inode.gid, inode.atime_ns) == (stat.S_IFREG | 0o4711, 5, 0, 1)
    assert (inode.mtime_ns, inode.ctime_ns) == (77, 78)


def test_xattrs_have_limits() -> None:
    namespace = _with_file()
    for name, value, code in [
        (b"", b"", errno.ERANGE),
        (b"k" * 256, b"", errno.ERANGE),
        (b"k", b"v" * 65537, errno.E2BIG),
    ]:
        with pytest.raises(FsError) as refused:
            apply(namespace, SetXattr(3, name, value, 5))
        assert refused.value.errno == code
    for index in range(4):
        if index == 3:
            with pytest.raises(FsError):
                apply(namespace, SetXattr(3, b"%d" % index, b"v" * 65536, 5))
        else:
            apply(namespace, SetXattr(3, b"%d" % index, b"v" * 65536, 5))
    apply(namespace, RemoveXattr(3, b"0", 6))
    with pytest.raises(FsError) as refused:
        apply(namespace, RemoveXattr(3, b"0", 6))
    assert refused.value.errno == errno.ENODATA
    assert sorted(namespace.get(3).xattrs or {}) == [b"1", b"2"]


def test_symbolic_links_have_a_target_and_its_length() -> None:
    namespace = Namespace.fresh(0)
    link = Create(1, b"s", 3, stat.S_IFLNK | 0o777, 0, 0, 0, b"over/there", None, 1, 1, 1, 1)
    for broken in (replace(link, target=None), replace(link, target=b""), replace(link, target=b"x" * 4096)):
        with pytest.raises(FsError):
            apply(namespace, broken)
    apply(namespace, link)
    assert namespace.get(3).size_bytes == 10


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b", b"x" * 256])
def test_impossible_names_are_refused(name: bytes) -> None:
    with pytest.raises(FsError):
        apply(Namespace.fresh(0), Create(1, name, 3, FILE, 0, 0, 0, None, None, 1, 1, 1, 1))


def test_times_of_a_directory_never_go_back() -> None:
    namespace = Namespace.fresh(100)
    apply(namespace, Create(1, b"f", 3, FILE, 0, 0, 0, None, None, 1, 1, 1, 50))
    assert namespace.get(1).mtime_ns == 100
    apply(namespace, Unlink(1, b"f", 150))
    assert (namespace.get(1).mtime_ns, namespace.get(1).ctime_ns) == (150, 150)
