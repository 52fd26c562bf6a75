"""The journal: what was appended comes back, and what was damaged is told apart from what was torn."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ckptfs.errors import DeviceFailed, JournalFull, VolumeDamaged
from ckptfs.frames import FrameWriter
from ckptfs.journal import START, Journal, JournalPosition, JournalReader, rings_of
from ckptfs.layout import BLOCK_BYTES, JOURNAL_MAGIC, KIB, MIB
from tests.volumes import MemoryDevice, memory_volume

EPOCH = 1


class Rig:
    """A journal over memory devices, and what a reader makes of it."""

    def __init__(self, device_count: int = 2) -> None:
        self.volume = memory_volume(device_count)
        self.devices = [device for device in self.volume.devices if isinstance(device, MemoryDevice)]
        self.rings = rings_of(self.volume.devices, self.volume.superblocks)
        self.uuid = self.volume.volume_uuid.bytes
        self.journal = Journal(self.rings, self.uuid, start=START, end=START, epoch=EPOCH)

    def reader(self) -> JournalReader:
        return JournalReader(self.rings, self.uuid)

    def groups(self, start: JournalPosition = START) -> list[list[bytes]]:
        return [group.entries for group in self.reader().groups(start)]

    def flip(self, ring_index: int, stream_offset: int) -> None:
        ring = self.rings[ring_index]
        at = ring.region.offset_bytes + stream_offset % ring.length_bytes
        assert isinstance(ring.device, MemoryDevice)
        ring.device.content[at] ^= 0xFF


@pytest.fixture(params=[1, 2, 4])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.journal.close()


def _group(number: int, size: int = 100) -> list[bytes]:
    return [b"%d" % number, b"", bytes([number % 256]) * size]


def test_groups_come_back_in_order(rig: Rig) -> None:
    expected = [_group(number, number * 4000) for number in range(20)]
    for group in expected:
        rig.journal.append(group)
    assert rig.groups() == expected
    assert rig.journal.position.sequence == 21
    assert rig.journal.used_bytes == sum(map(Journal.group_bytes, expected))
    assert not any(group.gaps for group in rig.reader().groups(START))
    leftovers = rig.reader().leftovers(rig.journal.position)
    assert leftovers == ([], [], [])


def test_copies_are_on_up_to_three_devices_and_twice_on_one() -> None:
    assert [len(Rig(count).rings) for count in (1, 2, 3, 4)] == [2, 2, 3, 3]


def test_the_ring_wraps_around_and_never_over_its_start(rig: Rig) -> None:
    randomness = random.Random(1)
    start = rig.journal.position
    since_start: list[list[bytes]] = []
    for number in range(200):
        group = _group(number, randomness.randrange(120_000))
        try:
            rig.journal.append(group)
        except JournalFull:
            assert rig.groups(start) == since_start, "a full journal must not have been touched"
            start, since_start = rig.journal.position, []
            rig.journal.advance_start(start)
            rig.journal.append(group)
        since_start.append(group)
        assert rig.journal.used_bytes <= rig.journal.capacity_bytes
    assert start.offset_bytes > 5 * rig.journal.capacity_bytes
    assert rig.groups(start) == since_start
    assert not any(group.gaps for group in rig.reader().groups(start))


def test_a_group_may_fill_the_ring_to_its_last_block(rig: Rig) -> None:
    rig.journal.append([b"first"])
    middle = rig.journal.position
    rig.journal.advance_start(middle)
    entry = bytes(rig.journal.capacity_bytes - 4 * 80 - 4)
    assert Journal.group_bytes([entry]) == rig.journal.capacity_bytes
    rig.journal.append([entry])
    assert rig.journal.used_fraction == 1
    assert rig.groups(middle) == [[entry]]
    with pytest.raises(JournalFull):
        rig.journal.append([b""])
    with pytest.raises(JournalFull):
        rig.journal.append([entry + b"x"])


def test_a_torn_tail_is_no_group(rig: Rig) -> None:
    for number in range(5):
        rig.journal.append(_group(number))
    last = rig.journal.position
    rig.journal.append(_group(5, 600 * KIB))
    whole = [bytes(device.content) for device in rig.devices]
    for _ in range(10):
        for device, content in zip(rig.devices, whole, strict=True):
            device.content[:] = content
        cut = random.randrange(0, 600 * KIB // BLOCK_BYTES) * BLOCK_BYTES
        for ring in rig.rings:
            assert isinstance(ring.device, MemoryDevice)
            at = ring.region.offset_bytes + last.offset_bytes + cut
            ring.device.content[at : at + BLOCK_BYTES] = b"\xee" * BLOCK_BYTES
        assert rig.groups() == [_group(number) for number in range(5)]
        assert rig.reader().leftovers(last).torn
        assert not rig.reader().leftovers(last).later


def test_a_damaged_frame_comes_from_another_mirror(rig: Rig) -> None:
    for number in range(20):
        rig.journal.append(_group(number))
    for number in range(20):
        rig.flip(number % len(rig.rings), number * BLOCK_BYTES + (number * 37) % 90)
    groups = list(rig.reader().groups(START))
    assert [group.entries for group in groups] == [_group(number) for number in range(20)]
    assert [group.gaps[0].ring for group in groups] == [rig.rings[number % len(rig.rings)] for number in range(20)]
    for group in groups:
        for gap in group.gaps:
            gap.ring.write(gap.frame.header.offset_bytes, gap.frame.raw)
    assert not any(group.gaps for group in rig.reader().groups(START))


def test_damage_in_the_middle_is_told_from_a_tail(rig: Rig) -> None:
    for number in range(10):
        rig.journal.append(_group(number))
    for ring_index in range(len(rig.rings)):
        rig.flip(ring_index, 6 * BLOCK_BYTES + 50)
    groups = list(rig.reader().groups(START))
    assert len(groups) == 6
    leftovers = rig.reader().leftovers(groups[-1].end)
    assert {sequence for _, sequence in leftovers.later} == {8, 9, 10}
    assert leftovers.torn


def test_what_a_former_epoch_left_is_neither_read_nor_damage(rig: Rig) -> None:
    for number in range(3):
        rig.journal.append(_group(number))
    crash = rig.journal.position
    rig.journal.append(_group(3, 500 * KIB))
    for ring_index in range(len(rig.rings)):
        rig.flip(ring_index, crash.offset_bytes + 100)
    second = Journal(rig.rings, rig.uuid, start=START, end=crash, epoch=EPOCH + 1)
    second.append([b"mount"])
    second.close()
    assert rig.groups() == [_group(0), _group(1), _group(2), [b"mount"]]
    assert rig.reader().leftovers(second.position) == ([], [], [])


def test_a_whole_group_of_a_former_epoch_does_not_count_where_a_snapshot_asks_for_a_newer(rig: Rig) -> None:
    position = rig.journal.position
    rig.journal.append(_group(0))
    assert rig.groups(position._replace(epoch=EPOCH + 1)) == []
    assert rig.groups(position._replace(epoch=EPOCH, attempt=1)) == []


def test_another_volumes_journal_is_not_read(rig: Rig) -> None:
    rig.journal.append(_group(0))
    assert list(JournalReader(rig.rings, bytes(16)).groups(START)) == []


def test_one_mirror_is_enough_and_the_other_catches_up_at_a_snapshot() -> None:
    rig = Rig(2)
    rig.journal.append(_group(0))
    rig.devices[1].writes_fail = True
    rig.journal.append(_group(1))
    assert rig.journal.incomplete_devices == ["memory1"]
    rig.devices[1].writes_fail = False
    rig.journal.append(_group(2))
    assert rig.journal.incomplete_devices == ["memory1"]
    assert rig.groups() == [_group(number) for number in range(3)]
    rig.journal.advance_start(rig.journal.position)
    assert rig.journal.incomplete_devices == []
    rig.journal.close()


def test_a_group_that_no_mirror_took_can_be_tried_again_with_more_behind_it(rig: Rig) -> None:
    rig.journal.append(_group(0))
    before = rig.journal.position
    for device in rig.devices:
        device.writes_fail = True
    for _ in range(3):
        with pytest.raises(DeviceFailed):
            rig.journal.append(_group(1, 300 * KIB))
    for device in rig.devices:
        device.writes_fail = False
    assert rig.journal.position[:4] == before[:4]
    assert rig.journal.position.attempt == 3
    more = [*_group(1, 300 * KIB), b"more"]
    rig.journal.append(more)
    rig.journal.append(_group(2))
    assert rig.groups() == [_group(0), more, _group(2)]


def test_the_last_attempt_wins_over_an_older_whole_one() -> None:
    rig = Rig(2)
    rig.journal.append(_group(0))
    # The first attempt reached one mirror whole, but its barrier failed; the other mirror then took the second.
    rig.devices[1].writes_fail = True
    rig.devices[0].barrier = rig.devices[1].barrier  # type: ignore[method-assign]
    with pytest.raises(DeviceFailed):
        rig.journal.append([b"first attempt"])
    assert rig.groups() == [_group(0), [b"first attempt"]]
    rig.devices[1].writes_fail = False
    rig.devices[0].writes_fail = True
    rig.journal.append([b"second attempt"])
    assert rig.groups() == [_group(0), [b"second attempt"]]
    # A snapshot that was taken in between asks for the later attempt.
    assert rig.groups(JournalPosition(*rig.journal.position[:1], 2, 4096, 0)) == []
    rig.journal.close()


def test_mirrors_that_cannot_be_read_are_named() -> None:
    rig = Rig(2)
    rig.journal.append(_group(0))
    rig.devices[0].reads_fail = True
    (group,) = rig.reader().groups(START)
    assert group.entries == _group(0)
    assert group.gaps[0].ring is rig.rings[0]
    assert len(rig.reader().leftovers(group.end).unreadable) == MIB // (256 * KIB)
    rig.journal.close()


def test_an_intact_group_without_sense_is_told() -> None:
    rig = Rig(2)
    writer = FrameWriter(JOURNAL_MAGIC, rig.uuid, EPOCH, 1, 0, 0)
    for ring in rig.rings[:1]:
        ring.write(0, writer.frame(b"\xff\xff\xff\x00abc", last=True))
    with pytest.raises(VolumeDamaged):
        rig.groups()
    rig.journal.close()
