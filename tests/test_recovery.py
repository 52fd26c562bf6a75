"""Recovery: after a cut at any point, on devices that tear and forget, what counts is a prefix of the log."""

from __future__ import annotations

import random
import stat
from dataclasses import dataclass, field

import pytest

from ckptfs.constants import FIRST_FREE_INO
from ckptfs.device import Device
from ckptfs.errors import DeviceFailed, JournalFull, ProblemCode
from ckptfs.extents import Row, pack
from ckptfs.layout import BLOCK_BYTES, MIB
from ckptfs.namespace import Inode, Namespace
from ckptfs.records import Create, Mount, Record, Seal, SetXattr, Unlink, apply_entry, encode_entry
from ckptfs.recovery import Recovered, recover
from ckptfs.snapshot import write_snapshot
from ckptfs.superblock import VolumeDevices, read_superblock
from tests.volumes import MemoryDevice, append, create, memory_volume

SECTOR_BYTES = 512


def _state(namespace: Namespace) -> dict[int, tuple[object, ...]]:
    return {
        ino: (*(getattr(inode, name) for name in Inode.__slots__ if name != "children"), dict(inode.children or {}))
        for ino, inode in namespace.inodes.items()
    }


def _digest(namespace: Namespace) -> int:
    return hash(repr(sorted(_state(namespace).items())))


@dataclass
class Story:
    """What a volume went through: the states it may come back in, and what was promised when."""

    volume: VolumeDevices
    randomness: random.Random
    events: list[tuple[MemoryDevice, int, bytes] | tuple[MemoryDevice, None, None]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """Digest of the namespace after each group that was begun."""
    promised: list[int] = field(default_factory=list)
    """For each event: index of the newest state that was promised before it."""
    newest_promise: int = 0

    def watch(self) -> None:
        for device in self.devices:
            device.events = self.events

    @property
    def devices(self) -> list[MemoryDevice]:
        return [device for device in self.volume.devices if isinstance(device, MemoryDevice)]

    def note(self) -> None:
        self.promised.extend([self.newest_promise] * (len(self.events) - len(self.promised)))

    def promise(self) -> None:
        self.note()
        self.newest_promise = len(self.states) - 1

    def mount_and_work(self, groups: int) -> None:
        recovered = recover(self.volume, read_only=False)
        assert not recovered.damaged, recovered.problems
        self.commit(recovered, [Mount(recovered.epoch, 1)])
        for _ in range(groups):
            self.step(recovered)
        recovered.journal.close()

    def step(self, recovered: Recovered) -> None:
        chance = self.randomness.random()
        if chance < 0.15:
            self.snapshot(recovered)
        elif chance < 0.25:
            self.fail_all(recovered)
        self.commit(recovered, self.some_records(recovered.namespace))

    def some_records(self, namespace: Namespace) -> list[Record]:
        ino = namespace.next_ino
        names = sorted(namespace.directory(1))
        if len(names) > 12:
            return [Unlink(1, self.randomness.choice([name for name in names if name != b"lost+found"]), 3)]
        rows = pack([Row(0, 9, 0, 0, 0, 9, 4 * MIB + ino * BLOCK_BYTES, ino)])
        value = self.randomness.randbytes(self.randomness.choice([10, 5000, 60_000]))
        return [create(ino, b"%d" % ino), Seal(ino, 10, 3, 3, 0, rows), SetXattr(ino, b"user.x", value, 4)]

    def commit(self, recovered: Recovered, records: list[Record]) -> None:
        self.begin(recovered, records)
        try:
            recovered.journal.append([encode_entry(records)])
        except JournalFull:
            self.snapshot(recovered)
        self.promise()

    def begin(self, recovered: Recovered, records: list[Record]) -> None:
        self.note()
        apply_entry(recovered.namespace, records)
        self.states.append(_digest(recovered.namespace))

    def fail_all(self, recovered: Recovered) -> None:
        """An append that no mirror takes, then the same with more behind it, or a snapshot that holds it."""
        first = self.some_records(recovered.namespace)
        self.begin(recovered, first)
        for device in self.devices:
            device.writes_fail = True
        with pytest.raises((DeviceFailed, JournalFull)):
            recovered.journal.append([encode_entry(first)])
        for device in self.devices:
            device.writes_fail = False
        second = self.some_records(recovered.namespace)
        self.begin(recovered, second)
        try:
            if self.randomness.random() < 0.5:
                raise JournalFull
            recovered.journal.append([encode_entry(first), encode_entry(second)])
        except JournalFull:
            self.snapshot(recovered)
        self.promise()

    def snapshot(self, recovered: Recovered) -> None:
        position = recovered.journal.position
        write_snapshot(self.volume.devices, self.volume.superblocks, recovered.namespace, recovered.epoch, position)
        recovered.journal.advance_start(position)

    def cut(self, base: list[bytes], at: int) -> VolumeDevices:
        """The devices as a power cut before event `at` may leave them."""
        copies: dict[int, MemoryDevice] = {}
        for device, content in zip(self.devices, base, strict=True):
            copies[id(device)] = MemoryDevice(device.path, device.size_bytes, content)
        last_barrier = {id(event[0]): index for index, event in enumerate(self.events[:at]) if event[1] is None}
        for index, (device, offset, data) in enumerate(self.events[:at]):
            if offset is None:
                continue
            assert data is not None
            is_safe = index < last_barrier.get(id(device), -1)
            self._persist(copies[id(device)], offset, data, is_safe)
        devices: list[Device] = [copies[id(device)] for device in self.devices]
        return VolumeDevices(devices, [read_superblock(device)[0] for device in devices])

    def _persist(self, copy: MemoryDevice, offset: int, data: bytes, is_safe: bool) -> None:
        fate = "all" if is_safe else self.randomness.choice(["all", "none", "torn", "head"])
        if fate == "all":
            copy.content[offset : offset + len(data)] = data
        elif fate == "head":
            count = self.randomness.randrange(len(data) // SECTOR_BYTES + 1) * SECTOR_BYTES
            copy.content[offset : offset + count] = data[:count]
        elif fate == "torn":
            for start in range(0, len(data), SECTOR_BYTES):
                if self.randomness.random() < 0.5:
                    piece = data[start : start + SECTOR_BYTES]
                    copy.content[offset + start : offset + start + len(piece)] = piece


@pytest.mark.parametrize("device_count", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_cut_anywhere_leaves_a_prefix_that_holds_all_that_was_promised(seed: int, device_count: int) -> None:
    randomness = random.Random(seed)
    volume = memory_volume(device_count)
    states = [_digest(recover(volume, read_only=True).namespace)]
    for _ in range(6):
        base = [bytes(device.content) for device in volume.devices if isinstance(device, MemoryDevice)]
        story = Story(volume, randomness, states=states[-1:])
        story.watch()
        story.mount_and_work(groups=14)
        story.note()
        for _ in range(3):
            at = randomness.randrange(len(story.events))
            crashed = story.cut(base, at)
            recovered = recover(crashed, read_only=randomness.random() < 0.3)
            assert not recovered.damaged, recovered.problems
            assert _digest(recovered.namespace) in story.states[story.promised[at] :]
            again = recover(crashed, read_only=True)
            assert _digest(again.namespace) == _digest(recovered.namespace)
        # Life goes on from the last cut.
        volume, states = crashed, [_digest(again.namespace)]


def _damage(device: Device, offset: int) -> None:
    assert isinstance(device, MemoryDevice)
    device.content[offset] ^= 0xFF


def _with_files(count: int, devices: int = 2) -> VolumeDevices:
    """A volume with one group for the mount and one for each file; a group takes a block."""
    volume = memory_volume(devices)
    recovered = recover(volume, read_only=False)
    append(recovered, Mount(recovered.epoch, 1))
    for ino in range(FIRST_FREE_INO, FIRST_FREE_INO + count):
        append(recovered, create(ino, b"f%d" % ino))
    recovered.journal.close()
    return volume


def _codes(recovered: Recovered) -> list[ProblemCode]:
    return [problem.code for problem in recovered.problems]


def test_a_new_volume_is_clean_and_epochs_grow() -> None:
    volume = memory_volume(3)
    for epoch in range(1, 4):
        recovered = recover(volume, read_only=False)
        assert (recovered.epoch, recovered.problems, recovered.damaged) == (epoch, [], False)
        append(recovered, Mount(epoch, 1))
    assert recovered.journal.epoch == 3


def test_a_damaged_mirror_is_named_and_healed() -> None:
    volume = _with_files(5)
    ring = volume.superblocks[0].regions[0]
    _damage(volume.devices[0], ring.offset_bytes + 2 * BLOCK_BYTES + 30)
    found = recover(volume, read_only=True)
    assert _codes(found) == [ProblemCode.JOURNAL_MIRROR_DAMAGED]
    assert volume.devices[0].path in found.problems[0].place
    assert len(recover(volume, read_only=False).namespace.inodes) == 7
    assert _codes(recover(volume, read_only=True)) == []


def test_a_mirror_without_the_last_group_is_a_crash_and_no_damage() -> None:
    volume = _with_files(5)
    ring = volume.superblocks[1].regions[0]
    device = volume.devices[1]
    assert isinstance(device, MemoryDevice)
    device.content[ring.offset_bytes + 5 * BLOCK_BYTES :][:BLOCK_BYTES] = bytes(BLOCK_BYTES)
    device.write(ring.offset_bytes + 5 * BLOCK_BYTES, bytes(BLOCK_BYTES))
    found = recover(volume, read_only=False)
    assert _codes(found) == [ProblemCode.JOURNAL_MIRROR_BEHIND]
    assert len(found.namespace.inodes) == 7
    assert _codes(recover(volume, read_only=True)) == []


def test_a_torn_tail_is_named_and_gone_after_the_next_mount() -> None:
    volume = _with_files(5)
    for device, superblock in zip(volume.devices, volume.superblocks, strict=True):
        _damage(device, superblock.regions[0].offset_bytes + 5 * BLOCK_BYTES + 100)
    found = recover(volume, read_only=False)
    assert _codes(found) == [ProblemCode.JOURNAL_TAIL_TORN]
    assert not found.damaged
    assert len(found.namespace.inodes) == 6
    append(found, Mount(found.epoch, 1))
    assert _codes(recover(volume, read_only=True)) == []


def test_damage_in_the_middle_makes_the_volume_read_only() -> None:
    volume = _with_files(5)
    for device, superblock in zip(volume.devices, volume.superblocks, strict=True):
        _damage(device, superblock.regions[0].offset_bytes + 3 * BLOCK_BYTES + 100)
    before = [bytes(device.content) for device in volume.devices if isinstance(device, MemoryDevice)]
    found = recover(volume, read_only=False)
    assert found.damaged
    assert _codes(found) == [ProblemCode.JOURNAL_DAMAGED]
    assert len(found.namespace.inodes) == 4
    after = [bytes(device.content) for device in volume.devices if isinstance(device, MemoryDevice)]
    assert after == before, "a damaged volume was written to"


def test_a_record_that_cannot_be_applied_is_damage() -> None:
    volume = _with_files(2)
    recovered = recover(volume, read_only=False)
    append(recovered, Mount(recovered.epoch, 1))
    append(recovered, create(9, b"f3"))
    append(recovered, create(10, b"f10"))
    found = recover(volume, read_only=True)
    assert found.damaged
    assert _codes(found)[0] == ProblemCode.RECORD_REFUSED
    assert 10 not in found.namespace.inodes


def test_extents_that_overlap_leave_nothing_to_allocate() -> None:
    volume = _with_files(2)
    recovered = recover(volume, read_only=False)
    append(recovered, Mount(recovered.epoch, 1))
    for ino in (3, 4):
        length = MIB - ino * BLOCK_BYTES
        append(recovered, Seal(ino, length, 1, 1, 0, pack([Row(0, length, 0, 0, 0, length, 8 * MIB, 0)])))
    found = recover(volume, read_only=False)
    assert found.damaged
    assert _codes(found) == [ProblemCode.EXTENT_OVERLAP]
    assert found.allocator.free_bytes == 0


def test_space_of_files_is_not_free() -> None:
    volume = _with_files(1)
    recovered = recover(volume, read_only=False)
    free_bytes = recovered.allocator.free_bytes
    append(recovered, Mount(recovered.epoch, 1))
    append(recovered, Seal(3, 5000, 1, 1, 0, pack([Row(0, 5000, 0, 1, 0, 5000, 8 * MIB, 0)])))
    found = recover(volume, read_only=True)
    assert found.allocator.free_bytes == free_bytes - 8192
    assert found.allocator.free_bytes_on(0) == recovered.allocator.free_bytes_on(0)


def test_a_fallback_to_an_older_snapshot_is_damage() -> None:
    volume = _with_files(3)
    recovered = recover(volume, read_only=False)
    write_snapshot(volume.devices, volume.superblocks, recovered.namespace, recovered.epoch, recovered.journal.position)
    for device, superblock in zip(volume.devices, volume.superblocks, strict=True):
        _damage(device, superblock.regions[2].offset_bytes + BLOCK_BYTES + 100)
    found = recover(volume, read_only=False)
    assert found.damaged
    assert ProblemCode.SNAPSHOT_FALLBACK in _codes(found)
    assert len(found.namespace.inodes) == 5, "the journal still has it all"


def test_symbolic_links_nodes_and_directories_come_back() -> None:
    volume = _with_files(0)
    recovered = recover(volume, read_only=False)
    append(recovered, Mount(recovered.epoch, 1))
    records = [
        create(3, b"d", mode=stat.S_IFDIR | 0o1777),
        Create(3, b"s", 4, stat.S_IFLNK | 0o777, 1, 2, 0, b"over", None, 1, 2, 3, 4),
        Create(3, b"n", 5, stat.S_IFCHR | 0o600, 1, 2, 259, None, {b"user.k": b"v"}, 1, 2, 3, 4),
    ]
    append(recovered, *records)
    apply_entry(recovered.namespace, records)
    assert _state(recover(volume, read_only=True).namespace) == _state(recovered.namespace)
