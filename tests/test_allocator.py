"""Free space: the fast way to build it, the slow way, and a model agree."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.allocator import Allocator
from ckptfs.errors import VolumeDamaged
from ckptfs.extents import Row, StoredExtent, pack
from ckptfs.layout import BLOCK_BYTES, MIB

SEGMENT_BYTES = 8 * BLOCK_BYTES
REGIONS = [(MIB, MIB + 30 * BLOCK_BYTES), (2 * MIB, 2 * MIB + 16 * BLOCK_BYTES)]
BLOCKS = [30, 16]


def _extent(device: int, block: int, blocks: int) -> StoredExtent:
    return StoredExtent(device, REGIONS[device][0] + block * BLOCK_BYTES, blocks * BLOCK_BYTES - 5)


def _map(used: list[StoredExtent]) -> bytes:
    offset, rows = 0, []
    for extent in used:
        length = extent.stored_length_bytes
        rows.append(Row(offset, length, 0, extent.device_index, 0, length, extent.device_offset_bytes, 0))
        offset += length
    return pack(rows)


def _free_blocks(allocator: Allocator) -> set[tuple[int, int]]:
    """Takes everything."""
    free: set[tuple[int, int]] = set()
    for device, (start, _) in enumerate(REGIONS):
        while ranges := allocator.take_segment(device):
            for offset, length in ranges:
                blocks = range((offset - start) // BLOCK_BYTES, (offset + length - start) // BLOCK_BYTES)
                assert not free & {(device, block) for block in blocks}
                free |= {(device, block) for block in blocks}
    assert allocator.free_bytes == 0
    return free


@st.composite
def _layouts(draw: st.DrawFn) -> list[StoredExtent]:
    used = []
    for device, total in enumerate(BLOCKS):
        block = 0
        while block < total:
            block += draw(st.integers(0, 6))
            length = min(draw(st.integers(1, 10)), total - block)
            if length > 0:
                used.append(_extent(device, block, length))
            block += length
    return draw(st.permutations(used))


@given(_layouts(), st.data())
@settings(max_examples=150, deadline=None)
def test_all_ways_agree_with_the_model(used: list[StoredExtent], data: st.DataObject) -> None:
    fast = Allocator.from_maps(REGIONS, SEGMENT_BYTES, [_map(used[::2]), _map(used[1::2])])
    slow = Allocator(REGIONS, SEGMENT_BYTES)
    for extent in used:
        slow.reserve_existing(extent)
    freed = data.draw(st.lists(st.sampled_from(used), unique=True)) if used else []
    for extent in freed:
        fast.free(extent)
        slow.free(extent)
    model = {(device, block) for device, total in enumerate(BLOCKS) for block in range(total)}
    for extent in set(used) - set(freed):
        first = (extent.device_offset_bytes - REGIONS[extent.device_index][0]) // BLOCK_BYTES
        model -= {(extent.device_index, first + i) for i in range(extent.space_bytes // BLOCK_BYTES)}
    assert fast.free_bytes == slow.free_bytes == len(model) * BLOCK_BYTES
    assert fast.free_bytes_on(1) == sum(BLOCK_BYTES for device, _ in model if device == 1)
    assert _free_blocks(fast) == _free_blocks(slow) == model


def test_the_emptiest_segment_comes_first_and_its_ranges_are_merged() -> None:
    allocator = Allocator(REGIONS, SEGMENT_BYTES)
    allocator.reserve_existing(_extent(0, 0, 1))
    allocator.reserve_existing(_extent(0, 9, 1))
    allocator.reserve_existing(_extent(0, 11, 2))
    assert allocator.take_segment(0) == [(MIB + 16 * BLOCK_BYTES, SEGMENT_BYTES)]
    assert allocator.take_segment(0) == [(MIB + BLOCK_BYTES, 7 * BLOCK_BYTES)]
    assert allocator.take_segment(0) == [(MIB + 24 * BLOCK_BYTES, 6 * BLOCK_BYTES)]
    allocator.free(_extent(0, 9, 1))
    assert allocator.take_segment(0) == [(MIB + 8 * BLOCK_BYTES, 3 * BLOCK_BYTES), (MIB + 13 * BLOCK_BYTES, 12288)]
    assert allocator.take_segment(0) == []
    allocator.free(_extent(0, 4, 8))
    assert allocator.free_bytes_on(0) == 8 * BLOCK_BYTES


@pytest.mark.parametrize(
    "extent",
    [
        _extent(0, 4, 1),
        _extent(0, 3, 2),
        _extent(0, 29, 2),
        StoredExtent(0, 0, BLOCK_BYTES),
        StoredExtent(2, MIB, BLOCK_BYTES),
    ],
)
def test_overlaps_and_places_outside_are_refused(extent: StoredExtent) -> None:
    allocator = Allocator(REGIONS, SEGMENT_BYTES)
    allocator.reserve_existing(_extent(0, 4, 2))
    free_bytes = allocator.free_bytes
    with pytest.raises(VolumeDamaged):
        allocator.reserve_existing(extent)
    assert allocator.free_bytes == free_bytes
    if extent != _extent(0, 4, 1):
        with pytest.raises(VolumeDamaged):
            Allocator.from_maps(REGIONS, SEGMENT_BYTES, [_map([_extent(0, 4, 2)]), _map([extent])])


def test_freeing_twice_is_a_bug() -> None:
    allocator = Allocator(REGIONS, SEGMENT_BYTES)
    allocator.reserve_existing(_extent(0, 4, 2))
    allocator.free(_extent(0, 4, 2))
    with pytest.raises(AssertionError):
        allocator.free(_extent(0, 5, 1))


def test_many_extents_are_built_quickly() -> None:
    count = 100_000
    order = [(index * 7919) % count for index in range(count)]
    rows = pack(Row(i * MIB, MIB, 0, n % 4, 0, MIB, MIB + n // 4 * MIB, 0) for i, n in enumerate(order))
    started = time.perf_counter()
    allocator = Allocator.from_maps([(MIB, MIB + count * MIB)] * 4, 64 * MIB, [rows])
    assert time.perf_counter() - started < 2
    assert allocator.free_bytes == 4 * count * MIB - count * MIB
