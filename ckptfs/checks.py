"""What must hold of a recovered volume, and the search for what does not. Finds, never mends."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from ckptfs import extents
from ckptfs.constants import LOST_AND_FOUND_INO, ROOT_INO
from ckptfs.errors import Problem, ProblemCode
from ckptfs.extents import Row
from ckptfs.namespace import Inode, Namespace
from ckptfs.offline import BadExtent, read_extent, show_path
from ckptfs.superblock import VolumeDevices

READERS_PER_DEVICE = 4
MAX_READERS = 16


class Checker:
    """Checks one namespace on its devices."""

    def __init__(self, volume: VolumeDevices, namespace: Namespace) -> None:
        self.volume = volume
        self.namespace = namespace

    def check_namespace(self) -> Iterator[Problem]:
        """Names, link counts, directories, inodes and file maps."""
        yield from self._check_fixed_directories()
        yield from self._check_names()
        for key, inode in self.namespace.inodes.items():
            yield from self._check_inode(key, inode)
        yield from self._check_overlaps()

    def check_data(self, done: Callable[[int], None]) -> list[Problem]:
        """Reads every extent and compares its checksum. Tells done() the bytes of each.

        REQUIRES: the maps are valid.
        """
        by_device: list[list[tuple[Row, int]]] = [[] for _ in self.volume.devices]
        for row, ino in self._stored_rows():
            by_device[row.device_index].append((row, ino))
        for rows in by_device:
            rows.sort(key=lambda item: item[0].device_offset_bytes)
        readers = max(1, min(READERS_PER_DEVICE, MAX_READERS // len(by_device)))
        shares = [rows[start::readers] for rows in by_device for start in range(readers)]
        with ThreadPoolExecutor(len(shares), thread_name_prefix="check") as pool:
            found = list(pool.map(lambda share: self._check_extents(share, done), shares))
        return [problem for problems in found for problem in problems]

    @property
    def data_bytes(self) -> int:
        """What check_data() reads."""
        return sum(row.stored_length_bytes for row, _ in self._stored_rows())

    @cached_property
    def _paths(self) -> dict[int, list[str]]:
        paths: dict[int, list[str]] = {ROOT_INO: ["/"]}
        for path, inode in self.namespace.walk():
            paths.setdefault(inode.ino, []).append(show_path(path))
        return paths

    def _name(self, ino: int) -> str:
        return ", ".join(self._paths.get(ino, [])) or f"inode {ino}"

    def _problem(self, code: ProblemCode, ino: int, found: str, expected: str) -> Problem:
        return Problem(code, self._name(ino), found, expected, (("ino", ino),))

    def _check_fixed_directories(self) -> Iterator[Problem]:
        for ino, name in ((ROOT_INO, "the root directory"), (LOST_AND_FOUND_INO, "lost+found")):
            inode = self.namespace.inodes.get(ino)
            if inode is None or not inode.is_directory or inode.parent != ROOT_INO:
                found = "nothing" if inode is None else f"mode {inode.mode:o}, parent {inode.parent}"
                expected = f"a directory below the root as inode {ino}"
                yield Problem(ProblemCode.ROOT_MISSING, name, found, expected, (("ino", ino),))

    def _check_names(self) -> Iterator[Problem]:
        names: Counter[int] = Counter()
        subdirectories: Counter[int] = Counter()
        reached = {ROOT_INO}
        for directory in self.namespace.inodes.values():
            for name, ino in (directory.children or {}).items():
                inode = self.namespace.inodes.get(ino)
                if inode is None:
                    place = f"{self._name(directory.ino)}/{show_path(name)}".replace("//", "/")
                    yield Problem(ProblemCode.DENTRY_DANGLING, place, f"inode {ino}, which is not there", "an inode")
                    continue
                names[ino] += 1
                if inode.is_directory:
                    subdirectories[directory.ino] += 1
                    yield from self._check_parent(directory, inode, is_second=names[ino] > 1)
        reached |= {inode.ino for _, inode in self.namespace.walk()} if ROOT_INO in self.namespace.inodes else set()
        for inode in self.namespace.inodes.values():
            if inode.ino not in reached:
                yield self._problem(ProblemCode.INODE_ORPHAN, inode.ino, "no name", "a path from the root")
            expected = 2 + subdirectories[inode.ino] if inode.is_directory else names[inode.ino]
            if inode.nlink != expected:
                yield self._problem(ProblemCode.LINK_COUNT, inode.ino, f"{inode.nlink}", f"{expected}")

    def _check_parent(self, directory: Inode, child: Inode, *, is_second: bool) -> Iterator[Problem]:
        if is_second:
            yield self._problem(ProblemCode.DIRECTORY_TWICE, child.ino, "several names", "one name")
        elif child.parent != directory.ino:
            yield self._problem(
                ProblemCode.DIRECTORY_PARENT, child.ino, f"parent {child.parent}", f"parent {directory.ino}"
            )

    def _check_inode(self, key: int, inode: Inode) -> Iterator[Problem]:
        if inode.ino != key or not 0 < key < self.namespace.next_ino:
            expected = f"a number below {self.namespace.next_ino}"
            yield self._problem(ProblemCode.INODE_NUMBER, key, f"{inode.ino}", expected)
        fits = (
            stat.S_ISDIR(inode.mode) == inode.is_directory
            and stat.S_ISLNK(inode.mode) == (inode.target is not None)
            and (inode.is_file or not inode.rows)
            and stat.S_IFMT(inode.mode) != 0
        )
        if not fits:
            yield self._problem(ProblemCode.INODE_KIND, key, f"mode {inode.mode:o}", "the fields of that kind")
        fault = extents.find_fault(inode.rows)
        if fault is not None:
            yield self._problem(ProblemCode.ROWS_INVALID, key, fault, "rows in order that do not overlap")
            return
        end = extents.end_bytes(inode.rows)
        if end > inode.size_bytes:
            yield self._problem(
                ProblemCode.ROWS_BEYOND_SIZE, key, f"extents up to {end}", f"none beyond {inode.size_bytes}"
            )
        for stored in extents.stored_extents(inode.rows):
            if not self._is_inside(stored):
                yield self._problem(ProblemCode.EXTENT_OUTSIDE, key, f"{stored}", "a place in a data region")

    def _is_inside(self, stored: extents.StoredExtent) -> bool:
        if stored.device_index >= len(self.volume.devices):
            return False
        start, end = self.volume.data_regions[stored.device_index]
        return start <= stored.device_offset_bytes and stored.end_bytes <= end

    def _check_overlaps(self) -> Iterator[Problem]:
        claims = sorted(
            (stored.device_index, stored.device_offset_bytes, stored.end_bytes, inode.ino)
            for inode in self.namespace.inodes.values()
            if extents.find_fault(inode.rows) is None
            for stored in extents.stored_extents(inode.rows)
        )
        furthest = (-1, 0, 0)
        """Device, end and inode of the claim that reaches furthest so far."""
        for device, start, end, ino in claims:
            if device == furthest[0] and start < furthest[1]:
                place = f"device {device}, offset {start}, up to {min(end, furthest[1])}"
                found = f"space of {self._name(furthest[2])} and of {self._name(ino)}"
                yield Problem(ProblemCode.EXTENT_OVERLAP, place, found, "space of one extent", (("ino", ino),))
            furthest = max(furthest, (device, end, ino))

    def _stored_rows(self) -> Iterator[tuple[Row, int]]:
        """One row for each stored extent that lies where it may, with the inode it belongs to."""
        for inode in self.namespace.inodes.values():
            if extents.find_fault(inode.rows) is None:
                seen = set()
                for row in extents.iter_rows(inode.rows):
                    if row.stored not in seen and self._is_inside(row.stored):
                        seen.add(row.stored)
                        yield row, inode.ino

    def _check_extents(self, rows: Sequence[tuple[Row, int]], done: Callable[[int], None]) -> list[Problem]:
        problems = []
        for row, ino in rows:
            try:
                read_extent(self.volume.devices, row)
            except BadExtent as error:
                problems.append(self._bad_extent(row, ino, error))
            done(row.stored_length_bytes)
        return problems

    def _bad_extent(self, row: Row, ino: int, error: BadExtent) -> Problem:
        device = self.volume.devices[row.device_index].path
        return Problem(
            ProblemCode.EXTENT_CHECKSUM if error.is_checksum else ProblemCode.EXTENT_UNREADABLE,
            f"{self._name(ino)}, file offset {row.file_offset_bytes}: {device}, offset {row.device_offset_bytes},"
            f" length {row.stored_length_bytes}",
            error.fault,
            "the bytes that were written",
            (
                ("ino", ino),
                ("paths", self._paths.get(ino, [])),
                ("file_offset_bytes", row.file_offset_bytes),
                ("device", device),
                ("device_index", row.device_index),
                ("device_offset_bytes", row.device_offset_bytes),
                ("length_bytes", row.stored_length_bytes),
            ),
        )
