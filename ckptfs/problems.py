"""The problem table: what each finding means, how bad it is, and what repair would do about it."""

from __future__ import annotations

from typing import NamedTuple

from ckptfs.errors import Problem, ProblemCode


class Entry(NamedTuple):
    """One row of the table."""

    title: str
    repair: str
    is_error: bool = True
    """False for what a crash leaves and the next mount puts right by itself: the volume is clean nevertheless."""


_MIRROR = "copy the intact mirror over it, as the next mount does"
_ORPHAN = "give it a name in lost+found"
_CUT = "take the row out of the map and keep what is left of the file in lost+found"

TABLE: dict[ProblemCode, Entry] = {
    ProblemCode.SUPERBLOCK_DAMAGED: Entry("a copy of a superblock is damaged", "write the other copy over it"),
    ProblemCode.SUPERBLOCK_STALE: Entry("the copies of a superblock differ", "write the first copy over the last"),
    ProblemCode.SNAPSHOT_DAMAGED: Entry("a snapshot is damaged on one mirror", _MIRROR),
    ProblemCode.SNAPSHOT_MISSING: Entry("a mirror lacks the newest snapshot", _MIRROR, is_error=False),
    ProblemCode.SNAPSHOT_FALLBACK: Entry(
        "the newest snapshot is damaged on all mirrors", "go on from the older one, and lose what came after it"
    ),
    ProblemCode.JOURNAL_MIRROR_BEHIND: Entry("a mirror lacks the last group of the journal", _MIRROR, is_error=False),
    ProblemCode.JOURNAL_MIRROR_DAMAGED: Entry("a frame of the journal is damaged on one mirror", _MIRROR),
    ProblemCode.JOURNAL_TAIL_TORN: Entry(
        "the last group of the journal is torn", "drop it, as the next mount does: it was not durable, or is damaged"
    ),
    ProblemCode.JOURNAL_DAMAGED: Entry(
        "the journal is damaged in the middle", "cut it there, and lose what came after it"
    ),
    ProblemCode.RECORD_REFUSED: Entry(
        "a record of the journal cannot be applied", "cut the journal there, and lose what came after it"
    ),
    ProblemCode.DEVICE_READ_FAILED: Entry("metadata cannot be read", "write it anew from the intact mirror"),
    ProblemCode.DENTRY_DANGLING: Entry("a name leads to no inode", "remove the name"),
    ProblemCode.DIRECTORY_TWICE: Entry("a directory has two names", "remove the name that it does not know of"),
    ProblemCode.DIRECTORY_PARENT: Entry("a directory names a wrong parent", "set its parent to where its name is"),
    ProblemCode.INODE_ORPHAN: Entry("no name leads to an inode", _ORPHAN),
    ProblemCode.INODE_NUMBER: Entry("an inode number is out of range", "raise the next inode number above it"),
    ProblemCode.INODE_KIND: Entry("an inode carries what its kind has not", "drop what does not belong to its kind"),
    ProblemCode.LINK_COUNT: Entry("a link count is wrong", "set it to the number of names"),
    ProblemCode.ROOT_MISSING: Entry("a directory that every volume has is missing", "make it anew"),
    ProblemCode.ROWS_INVALID: Entry("the map of a file is invalid", _CUT),
    ProblemCode.ROWS_BEYOND_SIZE: Entry("a file has extents beyond its end", "cut the map at the end of the file"),
    ProblemCode.EXTENT_OUTSIDE: Entry("an extent lies outside the data region", _CUT),
    ProblemCode.EXTENT_OVERLAP: Entry("two extents claim the same space", "keep the one whose checksum matches"),
    ProblemCode.EXTENT_CHECKSUM: Entry("the data of an extent is damaged", _CUT),
    ProblemCode.EXTENT_UNREADABLE: Entry("the data of an extent cannot be read", _CUT),
}

assert TABLE.keys() == set(ProblemCode)


def is_error(problem: Problem) -> bool:
    """True when the volume is not clean for it."""
    return TABLE[problem.code].is_error


def describe(problem: Problem) -> dict[str, object]:
    """A problem and what the table says of it: plain values, for JSON."""
    entry = TABLE[problem.code]
    return {
        "code": problem.code.value,
        "severity": "error" if entry.is_error else "note",
        "title": entry.title,
        "place": problem.place,
        "found": problem.found,
        "expected": problem.expected,
        "repair": entry.repair,
        **dict(problem.details),
    }
