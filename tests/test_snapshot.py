"""Snapshots: what goes in comes out, the newest valid one is never touched, damage is told."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import snapshot
from ckptfs.errors import DeviceFailed, MetadataFull, ProblemCode, VolumeDamaged
from ckptfs.extents import Row, pack
from ckptfs.journal import START
from ckptfs.layout import BLOCK_BYTES, MAX_FRAME_BYTES, MIB, REGION_SNAPSHOT_A, REGION_SNAPSHOT_B
from ckptfs.namespace import Inode, Namespace
from ckptfs.records import Create, Seal, SetXattr, apply
from ckptfs.snapshot import (
    NAMES_PER_ITEM,
    capacity_bytes,
    heal_snapshots,
    metadata_bytes,
    read_newest_snapshot,
    read_slots,
    write_snapshot,
)
from ckptfs.superblock import VolumeDevices
from tests.volumes import MemoryDevice, create, memory_volume

POSITION = START._replace(epoch=3, sequence=17, offset_bytes=8192, previous_checksum=1 << 63, attempt=2)


def _state(namespace: Namespace) -> tuple[object, ...]:
    inodes = {
        ino: (*(getattr(inode, name) for name in Inode.__slots__ if name != "children"), dict(inode.children or {}))
        for ino, inode in namespace.inodes.items()
    }
    return namespace.next_ino, inodes


def _populated(files: int, rows_per_file: int = 1) -> Namespace:
    namespace = Namespace.fresh(7)
    apply(namespace, create(3, b"models", mode=stat.S_IFDIR | 0o755))
    for ino in range(4, 4 + files):
        apply(namespace, create(ino, b"step-%08d.pt" % ino, parent=3))
        rows = pack(Row(i * MIB, MIB, 0, 0, 0, MIB, (ino * rows_per_file + i) * MIB, i) for i in range(rows_per_file))
        apply(namespace, Seal(ino, rows_per_file * MIB, 5, 5, 0, rows))
    apply(namespace, SetXattr(3, b"user.a", b"\x00\xff", 9))
    apply(namespace, Create(1, b"link", 900_000, stat.S_IFLNK | 0o777, 1, 2, 0, b"models", None, -5, 6, 7, 8))
    return namespace


def _write(volume: VolumeDevices, namespace: Namespace, epoch: int = 3) -> None:
    write_snapshot(volume.devices, volume.superblocks, namespace, epoch, POSITION)


def _read(volume: VolumeDevices) -> tuple[snapshot.Snapshot, list[ProblemCode]]:
    found, problems = read_newest_snapshot(volume.devices, volume.superblocks)
    return found, [problem.code for problem in problems]


def _memory(volume: VolumeDevices, index: int = 0) -> MemoryDevice:
    device = volume.devices[index]
    assert isinstance(device, MemoryDevice)
    return device


@pytest.mark.parametrize(("files", "rows_per_file"), [(0, 0), (3, 2), (NAMES_PER_ITEM + 1, 1), (2, 9000)])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_namespace_comes_back(files: int, rows_per_file: int, devices: int) -> None:
    volume = memory_volume(devices)
    namespace = _populated(files, rows_per_file)
    _write(volume, namespace)
    found, problems = _read(volume)
    assert _state(found.namespace) == _state(namespace)
    assert (found.header.epoch, found.header.position, problems) == (3, POSITION, [])


def test_what_is_only_open_still_is_left_out() -> None:
    volume = memory_volume(1)
    namespace = _populated(2)
    namespace.get(4).nlink = 0
    del namespace.directory(3)[b"step-00000004.pt"]
    _write(volume, namespace)
    found, _ = _read(volume)
    assert 4 not in found.namespace.inodes
    assert found.namespace.next_ino == namespace.next_ino


def test_slots_alternate_and_generations_grow() -> None:
    volume = memory_volume(2)
    for generation in range(2, 7):
        _write(volume, _populated(generation))
        found, problems = _read(volume)
        assert found.header.generation == generation
        assert found.slot.region.kind == (REGION_SNAPSHOT_A if generation % 2 else REGION_SNAPSHOT_B)
        assert problems == []


def test_a_snapshot_that_does_not_fit_leaves_the_newest() -> None:
    volume = memory_volume(1)
    _write(volume, _populated(3))
    big = _populated(20, 1500)
    assert metadata_bytes(big) > capacity_bytes(volume.superblocks)
    with pytest.raises(MetadataFull):
        _write(volume, big)
    found, problems = _read(volume)
    assert len(found.namespace.inodes) == 7
    assert problems == []


def test_what_the_estimate_lets_in_fits() -> None:
    volume = memory_volume(1)
    namespace = _populated(1000)
    capacity = capacity_bytes(volume.superblocks)
    ino = 1_000_000
    while metadata_bytes(namespace) + 400 <= capacity:
        for _ in range(max(1, (capacity - metadata_bytes(namespace)) // 400)):
            apply(namespace, create(ino, b"%0*d" % (ino % 200 + 8, ino), parent=3))
            ino += 1
    _write(volume, namespace)
    found, _ = _read(volume)
    assert len(found.namespace.inodes) == len(namespace.inodes)
    # Names and inodes count at their longest, so that a change of attributes never needs more room.
    assert found.header.body_bytes > 0.5 * capacity, "the estimate is too careful"


@given(st.integers(0, 300), st.integers(0, 1 << 40), st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_the_estimate_is_an_upper_bound(files: int, size_bytes: int, value: bytes) -> None:
    namespace = _populated(files)
    namespace.get(1).size_bytes = size_bytes
    apply(namespace, SetXattr(1, b"user.x", value, 5))
    payload = b"".join(part for part, _ in snapshot._payloads(namespace))
    assert len(payload) <= metadata_bytes(namespace) + 16


def test_a_damaged_frame_is_read_from_the_other_mirror() -> None:
    volume = memory_volume(2)
    _write(volume, _populated(3000))
    slot = next(s for s in read_slots(volume.devices, volume.superblocks) if s.region.kind == REGION_SNAPSHOT_B)
    assert slot.device is volume.devices[0]
    _memory(volume).content[slot.region.offset_bytes + BLOCK_BYTES + MAX_FRAME_BYTES + 500] ^= 1
    found, problems = _read(volume)
    assert len(found.namespace.inodes) == 3004
    assert not found.is_fallback
    assert problems == [ProblemCode.SNAPSHOT_DAMAGED]
    heal_snapshots(found.slots, found.slot)
    assert _read(volume)[1] == []


def test_a_newest_that_is_damaged_everywhere_is_not_passed_over_in_silence() -> None:
    volume = memory_volume(2)
    _write(volume, _populated(3))
    for index in range(2):
        at = volume.superblocks[index].metadata(REGION_SNAPSHOT_B)[0].offset_bytes
        _memory(volume, index).content[at + BLOCK_BYTES + 100] ^= 1
    found, problems = _read(volume)
    assert found.is_fallback
    assert found.header.generation == 1
    assert problems == [ProblemCode.SNAPSHOT_DAMAGED] * 2
    # The next one must not go over the only good one.
    _write(volume, _populated(5))
    found, _ = _read(volume)
    assert (found.header.generation, found.slot.region.kind) == (3, REGION_SNAPSHOT_B)


def test_no_good_snapshot_at_all_is_damage_and_stops_writing() -> None:
    volume = memory_volume(1)
    for region in volume.superblocks[0].metadata(REGION_SNAPSHOT_A):
        _memory(volume).content[region.offset_bytes + 9] ^= 1
    with pytest.raises(VolumeDamaged):
        _read(volume)
    with pytest.raises(DeviceFailed):
        _write(volume, _populated(1))


def test_one_mirror_is_enough_and_the_other_is_made_whole() -> None:
    volume = memory_volume(2)
    _memory(volume, 1).writes_fail = True
    _write(volume, _populated(3))
    _memory(volume, 1).writes_fail = False
    found, problems = _read(volume)
    assert found.header.generation == 2
    assert problems == [ProblemCode.SNAPSHOT_DAMAGED] or problems == [ProblemCode.SNAPSHOT_MISSING]
    heal_snapshots(found.slots, found.slot)
    assert _read(volume)[1] == []
    _memory(volume, 0).reads_fail = True
    assert _read(volume)[0].header.generation == 2


def test_no_mirror_at_all_is_told_and_the_newest_stays() -> None:
    volume = memory_volume(2)
    for index in range(2):
        _memory(volume, index).writes_fail = True
    with pytest.raises(DeviceFailed):
        _write(volume, _populated(3))
    assert _read(volume)[0].header.generation == 1
