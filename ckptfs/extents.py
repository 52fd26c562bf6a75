"""File maps: pure functions on packed extent rows.

A map is an immutable bytes object of rows (layout.EXTENT_ROW), sorted by file offset and not overlapping. What no
row covers is a hole. Rows that share a stored extent always belong to one file and have the same origin
(file offset - skip), so all of them lie within MAX_EXTENT_BYTES behind it: nothing here ever looks further.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptfs.errors import VolumeDamaged
from ckptfs.layout import BLOCK_BYTES, EXTENT_ROW, EXTENT_ROW_BYTES, MAX_EXTENT_BYTES, space_bytes


class Row(NamedTuple):
    """File bytes [file_offset, +length) are bytes [skip, +length) of a stored extent."""

    file_offset_bytes: int
    length_bytes: int
    skip_bytes: int
    device_index: int
    flags: int
    stored_length_bytes: int
    device_offset_bytes: int
    checksum: int

    @property
    def end_bytes(self) -> int:
        """Where its file bytes end."""
        return self.file_offset_bytes + self.length_bytes

    @property
    def stored(self) -> StoredExtent:
        """The extent that it points into."""
        return StoredExtent(self.device_index, self.device_offset_bytes, self.stored_length_bytes)

    def cut(self, start: int, end: int) -> Row:
        """The part of it within [start, end). REQUIRES: that is not empty."""
        first = max(start, self.file_offset_bytes)
        length = min(end, self.end_bytes) - first
        return self._replace(
            file_offset_bytes=first,
            length_bytes=length,
            skip_bytes=self.skip_bytes + first - self.file_offset_bytes,
        )


class StoredExtent(NamedTuple):
    """Device space that holds file bytes."""

    device_index: int
    device_offset_bytes: int
    stored_length_bytes: int

    @property
    def space_bytes(self) -> int:
        """The device space it takes."""
        return space_bytes(self.stored_length_bytes)

    @property
    def end_bytes(self) -> int:
        """Where its device space ends."""
        return self.device_offset_bytes + self.space_bytes


def pack(rows: Iterable[Row]) -> bytes:
    """Rows as they are kept."""
    return b"".join(EXTENT_ROW.pack(*row) for row in rows)


def iter_rows(rows: bytes) -> Iterator[Row]:
    """Every row, in file order."""
    return map(Row._make, EXTENT_ROW.iter_unpack(rows))


def row_count(rows: bytes) -> int:
    """How many rows."""
    return len(rows) // EXTENT_ROW_BYTES


def end_bytes(rows: bytes) -> int:
    """Where the last row ends, 0 for an empty map."""
    return _row_at(rows, row_count(rows) - 1).end_bytes if rows else 0


def rows_in(rows: bytes, start: int, end: int) -> bytes:
    """The rows that have bytes in [start, end), whole."""
    if start >= end:
        return b""
    first, last = _touched(rows, start, end)
    return rows[first * EXTENT_ROW_BYTES : last * EXTENT_ROW_BYTES]


def stored_extents(rows: bytes) -> list[StoredExtent]:
    """Every stored extent that the rows point into, once each, in order of first use."""
    return list(dict.fromkeys(map(StoredExtent._make, _stored_fields(rows))))


def allocated_bytes(rows: bytes) -> int:
    """Device space that the map takes."""
    return sum(space_bytes(length) for _, _, length in set(_stored_fields(rows)))


def device_ranges(maps: Iterable[bytes]) -> dict[int, list[tuple[int, int]]]:
    """The [start, end) device ranges of all stored extents of many maps, once each and sorted, by device.

    Works on whole columns of the rows, seen as 64-bit words, for recovery has millions of them to go through.

    Raises:
        VolumeDamaged: A row names an extent of an impossible length.
    """
    words = array("Q", b"".join(maps))
    if sys.byteorder == "big":
        words.byteswap()
    device_and_length, offsets = words[2::5], words[3::5]
    if device_and_length and max(device_and_length) >> 32 > MAX_EXTENT_BYTES:
        raise VolumeDamaged("a file map names an extent above 1 MiB; run ckptfs fsck")
    # An offset's low 12 bits are 0 and take the length in blocks, so that one integer stands for an extent.
    keys: dict[int, set[int]] = {}
    for device_index in set(map((0xFFFF).__and__, device_and_length)):
        keys[device_index] = {
            offset | ((word >> 32) + BLOCK_BYTES - 1 >> 12)
            for word, offset in zip(device_and_length, offsets, strict=True)
            if word & 0xFFFF == device_index
        }
    return {
        device_index: [
            (key & -BLOCK_BYTES, (key & -BLOCK_BYTES) + (key % BLOCK_BYTES << 12)) for key in sorted(device_keys)
        ]
        for device_index, device_keys in keys.items()
    }


def merge(old: bytes, delta: bytes, truncate_to_bytes: int) -> tuple[bytes, list[StoredExtent]]:
    """Brings a map up to date.

    Args:
        old: The map as it was.
        delta: Rows to put in; they replace what they overlap. REQUIRES: none shares a stored extent with old.
        truncate_to_bytes: old is cut here first.

    Returns:
        The new map, and the stored extents of old that no row points into any more.
    """
    kept, removed = _truncate(old, truncate_to_bytes)
    if delta and kept:
        start, end = _row_at(delta, 0).file_offset_bytes, end_bytes(delta)
        first, last = _touched(kept, start, end)
        touched = kept[first * EXTENT_ROW_BYTES : last * EXTENT_ROW_BYTES]
        if touched:
            removed.extend(iter_rows(touched))
            delta = pack(_overlay(list(iter_rows(touched)), list(iter_rows(delta))))
        new = kept[: first * EXTENT_ROW_BYTES] + delta + kept[last * EXTENT_ROW_BYTES :]
    else:
        new = kept + delta
    candidates = {row.stored: row.file_offset_bytes - row.skip_bytes for row in removed}
    return new, [stored for stored, origin in candidates.items() if not _is_used(new, stored, origin)]


def find_fault(rows: bytes) -> str | None:
    """Says what makes these bytes no map at all, None when they are one."""
    if len(rows) % EXTENT_ROW_BYTES:
        return f"{len(rows)} bytes are not a whole number of rows"
    previous_end = 0
    origins: dict[tuple[int, int], tuple[int, int, int]] = {}
    for offset, length, skip, device, flags, stored_length, device_offset, checksum in EXTENT_ROW.iter_unpack(rows):
        if offset < previous_end:
            return f"the row at file offset {offset} overlaps the one before it, which ends at {previous_end}"
        if not 0 < length <= stored_length - skip or stored_length > MAX_EXTENT_BYTES:
            return f"the row at file offset {offset} takes bytes {skip}+{length} of an extent of {stored_length}"
        if device_offset % BLOCK_BYTES or flags:
            return f"the row at file offset {offset} has device offset {device_offset} and flags {flags}"
        origin = (offset - skip, stored_length, checksum)
        if origins.setdefault((device, device_offset), origin) != origin:
            return f"the row at file offset {offset} disagrees with another row of its stored extent"
        previous_end = offset + length
    return None


def describe(rows: bytes, size_bytes: int, device_names: Iterable[str]) -> dict[str, object]:
    """What `ckptfs inspect extents` shows of a file: plain values, for JSON."""
    names = list(device_names)
    bytes_on = dict.fromkeys(range(len(names)), 0)
    for stored in stored_extents(rows):
        bytes_on[stored.device_index] = bytes_on.get(stored.device_index, 0) + stored.space_bytes
    return {
        "size_bytes": size_bytes,
        "allocated_bytes": sum(bytes_on.values()),
        "devices": [
            {"index": index, "path": names[index] if index < len(names) else None, "allocated_bytes": used}
            for index, used in bytes_on.items()
        ],
        "extents": [{**row._asdict(), "checksum": f"{row.checksum:016x}"} for row in iter_rows(rows)],
    }


def _row_at(rows: bytes, index: int) -> Row:
    return Row._make(EXTENT_ROW.unpack_from(rows, index * EXTENT_ROW_BYTES))


def _stored_fields(rows: bytes) -> Iterator[tuple[int, int, int]]:
    return ((device, offset, length) for _, _, _, device, _, length, offset, _ in EXTENT_ROW.iter_unpack(rows))


def _touched(rows: bytes, start: int, end: int) -> tuple[int, int]:
    """Indexes [first, last) of the rows that have bytes in [start, end). REQUIRES: start < end."""
    count = row_count(rows)
    low, high = 0, count
    if count and _row_at(rows, count - 1).end_bytes <= start:
        return count, count
    while low < high:
        middle = (low + high) // 2
        if _row_at(rows, middle).end_bytes <= start:
            low = middle + 1
        else:
            high = middle
    first, high = low, count
    while low < high:
        middle = (low + high) // 2
        if _row_at(rows, middle).file_offset_bytes < end:
            low = middle + 1
        else:
            high = middle
    return first, low


def _truncate(rows: bytes, size_bytes: int) -> tuple[bytes, list[Row]]:
    """The map cut at size_bytes, and the rows that were dropped or shortened, as they were."""
    if end_bytes(rows) <= size_bytes:
        return rows, []
    first, _ = _touched(rows, size_bytes, size_bytes + 1) if size_bytes else (0, 0)
    kept, rest = rows[: first * EXTENT_ROW_BYTES], rows[first * EXTENT_ROW_BYTES :]
    removed = list(iter_rows(rest))
    if removed[0].file_offset_bytes < size_bytes:
        kept += EXTENT_ROW.pack(*removed[0].cut(0, size_bytes))
    return kept, removed


def _overlay(under: list[Row], over: list[Row]) -> Iterator[Row]:
    """Both in file order; where they overlap, what is over wins."""
    at = 0
    """Nothing before it is left to yield."""
    upcoming = iter(under)
    below = next(upcoming, None)
    for row in over:
        while below is not None and below.file_offset_bytes < row.file_offset_bytes:
            if max(at, below.file_offset_bytes) < min(below.end_bytes, row.file_offset_bytes):
                yield below.cut(at, row.file_offset_bytes)
            if below.end_bytes > row.file_offset_bytes:
                break
            below = next(upcoming, None)
        yield row
        at = row.end_bytes
        while below is not None and below.end_bytes <= at:
            below = next(upcoming, None)
    while below is not None:
        yield below.cut(at, below.end_bytes)
        below = next(upcoming, None)


def _is_used(rows: bytes, stored: StoredExtent, origin: int) -> bool:
    nearby = rows_in(rows, origin, origin + stored.stored_length_bytes)
    return any(
        device == stored.device_index and offset == stored.device_offset_bytes
        for device, offset, _ in _stored_fields(nearby)
    )
