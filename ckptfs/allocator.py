"""Free device space. Nothing about it is on the devices: it is what no file's map points into.

A device's data region is cut into segments. Whole segments' free ranges are handed out (take_segment) and are then
the taker's; what a commit frees comes back extent by extent. A segment's ranges are kept sorted and merged.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ckptfs import extents
from ckptfs.errors import VolumeDamaged
from ckptfs.extents import StoredExtent

Range = tuple[int, int]
"""[start, end) in bytes"""


class Allocator:
    """Free ranges of every device of a volume."""

    def __init__(self, regions: Sequence[Range], segment_bytes: int) -> None:
        """Everything is free at first.

        Args:
            regions: [start, end) of each device's data region, in device order.
            segment_bytes: What segments are measured in, from the start of each region.
        """
        self._devices = [_DeviceSpace(start, end, segment_bytes) for start, end in regions]

    @classmethod
    def from_maps(cls, regions: Sequence[Range], segment_bytes: int, maps: Iterable[bytes]) -> Allocator:
        """All that these file maps do not point into is free. Fit for millions of rows.

        Raises:
            VolumeDamaged: Extents overlap or lie outside.
        """
        allocator = cls(regions, segment_bytes)
        for device_index, ranges in extents.device_ranges(maps).items():
            if device_index >= len(regions):
                raise _outside(StoredExtent(device_index, *ranges[0]))
            allocator._devices[device_index].reserve_all(device_index, ranges)
        return allocator

    @property
    def free_bytes(self) -> int:
        """Free on all devices; what was taken is not counted."""
        return sum(space.free_bytes for space in self._devices)

    def free_bytes_on(self, device_index: int) -> int:
        """Free on one device."""
        return self._devices[device_index].free_bytes

    def reserve_existing(self, extent: StoredExtent) -> None:
        """Notes that an extent is in use.

        Raises:
            VolumeDamaged: Some of it is in use already, or it lies outside the data region.
        """
        if extent.device_index >= len(self._devices):
            raise _outside(extent)
        self._devices[extent.device_index].reserve(extent)

    def take_segment(self, device_index: int) -> list[tuple[int, int]]:
        """Hands out all free (offset_bytes, length_bytes) ranges of the segment with most free bytes, [] when full."""
        return [(start, end - start) for start, end in self._devices[device_index].take_segment()]

    def free(self, extent: StoredExtent) -> None:
        """Takes an extent's space back. REQUIRES: it is in use."""
        self._devices[extent.device_index].free(extent)


class _DeviceSpace:
    """Free ranges of one device. Invariant: free_bytes == sum(free_in), and free_in[i] is what ranges[i] add up to."""

    def __init__(self, start: int, end: int, segment_bytes: int) -> None:
        self.start = start
        self.end = end
        self.segment_bytes = segment_bytes
        bounds = [*range(start, end, segment_bytes), end]
        self.ranges: list[list[Range]] = [[bound] for bound in pairwise(bounds)]
        self.free_in = [segment_end - segment_start for segment_start, segment_end in pairwise(bounds)]
        self.free_bytes = end - start
        self.fullest: list[tuple[int, int]] = []
        """Heap of (-free bytes, segment); entries that are out of date are skipped."""
        self._rebuild_heap()

    def reserve_all(self, device_index: int, used: list[Range]) -> None:
        """Replaces the free ranges by the complement of used. REQUIRES: used is sorted, nothing is taken."""
        gaps: list[Range] = []
        previous_end = self.start
        for start, end in used:
            if start > previous_end:
                gaps.append((previous_end, start))
            elif start < previous_end:
                raise _conflict(device_index, start, end, self)
            previous_end = end
        if previous_end > self.end:
            raise _conflict(device_index, *used[-1], self)
        if previous_end < self.end:
            gaps.append((previous_end, self.end))
        self.ranges = [[] for _ in self.ranges]
        for start, end in gaps:
            for segment, piece_start, piece_end in self._pieces(start, end):
                self.ranges[segment].append((piece_start, piece_end))
        self.free_in = [sum(end - start for start, end in ranges) for ranges in self.ranges]
        self.free_bytes = sum(self.free_in)
        self._rebuild_heap()

    def reserve(self, extent: StoredExtent) -> None:
        start, end = extent.device_offset_bytes, extent.end_bytes
        if not self.start <= start < end <= self.end:
            raise _outside(extent)
        pieces = [(*piece, self._find(*piece)) for piece in self._pieces(start, end)]
        if any(at is None for *_, at in pieces):
            raise _conflict(extent.device_index, start, end, self)
        for segment, piece_start, piece_end, at in pieces:
            assert at is not None
            free_start, free_end = self.ranges[segment][at]
            self.ranges[segment][at : at + 1] = [
                (left, right) for left, right in ((free_start, piece_start), (piece_end, free_end)) if left < right
            ]
            self._count(segment, piece_start - piece_end)

    def take_segment(self) -> list[Range]:
        while self.fullest:
            negative_free, segment = heapq.heappop(self.fullest)
            if negative_free and -negative_free == self.free_in[segment]:
                taken = self.ranges[segment]
                self.ranges[segment] = []
                self.free_bytes -= self.free_in[segment]
                self.free_in[segment] = 0
                return taken
        return []

    def free(self, extent: StoredExtent) -> None:
        for segment, start, end in self._pieces(extent.device_offset_bytes, extent.end_bytes):
            ranges = self.ranges[segment]
            at = bisect_left(ranges, (start, end))
            before = ranges[at - 1] if at else (0, 0)
            after = ranges[at] if at < len(ranges) else (self.end, self.end)
            assert before[1] <= start < end <= after[0], f"{extent} is freed twice"
            first = at - 1 if at and before[1] == start else at
            last = at + 1 if at < len(ranges) and after[0] == end else at
            merged = (before[0] if first < at else start, after[1] if last > at else end)
            ranges[first:last] = [merged]
            self._count(segment, end - start)

    def _pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """A range as (segment, start, end), cut at segment boundaries."""
        assert self.start <= start < end <= self.end, f"[{start}, {end}) is not in [{self.start}, {self.end})"
        pieces = []
        while start < end:
            segment = (start - self.start) // self.segment_bytes
            piece_end = min(end, self.start + (segment + 1) * self.segment_bytes)
            pieces.append((segment, start, piece_end))
            start = piece_end
        return pieces

    def _find(self, segment: int, start: int, end: int) -> int | None:
        """Index of the free range that holds [start, end)."""
        ranges = self.ranges[segment]
        at = bisect_left(ranges, (start + 1, 0)) - 1
        return at if at >= 0 and end <= ranges[at][1] else None

    def _count(self, segment: int, change_bytes: int) -> None:
        self.free_in[segment] += change_bytes
        self.free_bytes += change_bytes
        heapq.heappush(self.fullest, (-self.free_in[segment], segment))
        if len(self.fullest) > 4 * len(self.ranges) + 1024:
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self.fullest = [(-free_bytes, segment) for segment, free_bytes in enumerate(self.free_in)]
        heapq.heapify(self.fullest)


def _outside(extent: StoredExtent) -> VolumeDamaged:
    return VolumeDamaged(
        f"an extent at device {extent.device_index}, offset {extent.device_offset_bytes}, length"
        f" {extent.stored_length_bytes} lies outside the data region; run ckptfs fsck"
    )


def _conflict(device_index: int, start: int, end: int, space: _DeviceSpace) -> VolumeDamaged:
    if start < space.start or end > space.end:
        return _outside(StoredExtent(device_index, start, end - start))
    return VolumeDamaged(
        f"two extents claim device {device_index}, offset {start}, length {end - start}; run ckptfs fsck"
    )
