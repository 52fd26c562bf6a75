"""Extent maps against a model that knows every byte."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import extents
from ckptfs.errors import VolumeDamaged
from ckptfs.extents import Row, StoredExtent, pack
from ckptfs.layout import BLOCK_BYTES, MIB

SPAN = 200

Byte = tuple[int, int]
"""What a file byte is in the model: number of its stored extent, and place in it."""


def _row(offset: int, length: int, number: int, skip: int = 0, stored: int | None = None) -> Row:
    return Row(offset, length, skip, number % 3, 0, stored or skip + length, number * MIB, number)


def _bytes_of(rows: bytes) -> dict[int, Byte]:
    return {
        row.file_offset_bytes + i: (row.checksum, row.skip_bytes + i)
        for row in extents.iter_rows(rows)
        for i in range(row.length_bytes)
    }


def _stored_of(content: dict[int, Byte]) -> set[int]:
    return {number for number, _ in content.values()}


@st.composite
def _steps(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """Truncations and deltas; within a delta, stored extents may be split as overwriting in memory does."""
    numbers = count(1)
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        delta = b""
        for _ in range(draw(st.integers(0, 4))):
            start, length = draw(st.integers(0, SPAN)), draw(st.integers(1, 60))
            delta, _ = extents.merge(delta, pack([_row(start, length, next(numbers))]), 1 << 40)
        steps.append((draw(st.integers(0, SPAN + 80)), delta))
    return steps


@given(_steps())
@settings(max_examples=300, deadline=None)
def test_merge_is_what_the_bytes_say(steps: list[tuple[int, bytes]]) -> None:
    rows = b""
    model: dict[int, Byte] = {}
    for truncate_to, delta in steps:
        before = _stored_of(model)
        rows, freed = extents.merge(rows, delta, truncate_to)
        model = {at: byte for at, byte in model.items() if at < truncate_to} | _bytes_of(delta)
        assert _bytes_of(rows) == model
        assert extents.find_fault(rows) is None
        numbers = [extent.device_offset_bytes // MIB for extent in freed]
        assert sorted(numbers) == sorted(before - _stored_of(model))
        assert {e.device_offset_bytes // MIB for e in extents.stored_extents(rows)} == _stored_of(model)


@given(_steps(), st.integers(0, SPAN), st.integers(0, SPAN))
@settings(max_examples=100, deadline=None)
def test_rows_in_finds_the_rows_that_touch_a_range(steps: list[tuple[int, bytes]], start: int, end: int) -> None:
    rows = b""
    for truncate_to, delta in steps:
        rows, _ = extents.merge(rows, delta, truncate_to)
    expected = [r for r in extents.iter_rows(rows) if r.file_offset_bytes < end and r.end_bytes > start and start < end]
    assert list(extents.iter_rows(extents.rows_in(rows, start, end))) == expected


def test_appending_keeps_what_was_there_and_frees_nothing() -> None:
    old = pack([_row(0, 10, 1), _row(10, 10, 2)])
    new, freed = extents.merge(old, pack([_row(20, 10, 3)]), 20)
    assert new[: len(old)] == old
    assert freed == []


def test_a_split_extent_is_freed_only_with_its_last_row() -> None:
    rows, freed = extents.merge(pack([_row(0, 100, 1)]), pack([_row(40, 20, 2)]), 100)
    assert [(r.file_offset_bytes, r.length_bytes, r.skip_bytes) for r in extents.iter_rows(rows)] == [
        (0, 40, 0),
        (40, 20, 0),
        (60, 40, 60),
    ]
    assert freed == []
    rows, freed = extents.merge(rows, pack([_row(0, 40, 3)]), 100)
    assert freed == []
    rows, freed = extents.merge(rows, b"", 60)
    assert freed == [StoredExtent(1, MIB, 100)]


def test_space_is_counted_in_blocks_and_once_for_each_stored_extent() -> None:
    rows = pack([_row(0, 40, 1, stored=5000), _row(60, 40, 1, skip=60, stored=5000), _row(100, 1, 2)])
    assert extents.allocated_bytes(rows) == 3 * BLOCK_BYTES
    assert extents.device_ranges([rows]) == {1: [(MIB, MIB + 8192)], 2: [(2 * MIB, 2 * MIB + 4096)]}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (b"x" * 39, "whole number"),
        (pack([_row(0, 10, 1), _row(5, 10, 2)]), "overlaps"),
        (pack([_row(0, 10, 1, stored=9)]), "takes bytes"),
        (pack([_row(0, 0, 1, stored=9)]), "takes bytes"),
        (pack([_row(0, 9, 1)._replace(device_offset_bytes=512)]), "device offset"),
        (pack([_row(0, 9, 1)._replace(stored_length_bytes=MIB + 1)]), "takes bytes"),
        (pack([_row(0, 9, 1, stored=20), _row(9, 9, 1, stored=20)]), "disagrees"),
    ],
)
def test_faults_are_found(rows: bytes, fault: str) -> None:
    assert fault in (extents.find_fault(rows) or "")


def test_an_impossible_extent_is_not_taken_for_space() -> None:
    with pytest.raises(VolumeDamaged):
        extents.device_ranges([pack([_row(0, 9, 1)._replace(stored_length_bytes=2 * MIB)])])


def test_describe_counts_the_bytes_of_each_device() -> None:
    report = extents.describe(pack([_row(0, 4096, 1), _row(4096, 8192, 2)]), 12288, ["a", "b", "c"])
    assert [device["allocated_bytes"] for device in report["devices"]] == [0, 4096, 8192]  # type: ignore[attr-defined]
    assert report["allocated_bytes"] == report["size_bytes"] == 12288
