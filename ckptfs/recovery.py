"""Recovery: from what is on the devices to the namespace that counts. Also what fsck, inspect and export read by.

Newest good snapshot, then every group that follows it in the journal. Why the result is a prefix of the log that
holds all that was ever acknowledged as durable: see ckptfs.snapshot (the snapshot that counts is complete and the
journal from its position on was not written over) and ckptfs.journal (the groups that count are those that were
acknowledged, and at most one more). Where the devices cannot keep that promise - a group is unreadable on all mirrors
though later ones are there, a complete snapshot is damaged, a record cannot be applied - recovery stops at
the last good point and says `damaged`: such a volume is read, not written.

Nothing is written unless read_only is False and the volume is not damaged: then mirrors are made whole, with what
counts and only where it belongs, so a cut in the middle of that changes nothing.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ckptfs.allocator import Allocator
from ckptfs.errors import CkptfsError, DeviceFailed, Problem, ProblemCode, VolumeDamaged
from ckptfs.journal import Gap, Group, Journal, JournalPosition, JournalReader, Leftovers, Ring, rings_of
from ckptfs.namespace import Namespace
from ckptfs.records import apply_entry, decode_entry
from ckptfs.snapshot import Snapshot, heal_snapshots, read_newest_snapshot
from ckptfs.superblock import VolumeDevices


@dataclass
class Recovered:
    """A volume, ready to go on."""

    namespace: Namespace
    journal: Journal
    """Appends with `epoch`. Not to be used when the volume is read-only or damaged."""
    allocator: Allocator
    epoch: int
    """Of this mount: one above all on the devices. Its first entry is to be a Mount record."""
    problems: list[Problem]
    damaged: bool
    """What counts is not all that was made durable once: read, do not write."""
    snapshot: Snapshot
    group_count: int
    """Groups that were replayed."""
    end: JournalPosition
    """Behind the last group that counts."""


def recover(volume: VolumeDevices, *, read_only: bool) -> Recovered:
    """Brings back the namespace of a volume.

    Args:
        volume: Its open devices; their problems are taken over into the result.
        read_only: Write nothing.

    Raises:
        VolumeDamaged: Not even a snapshot is readable.
    """
    snapshot, problems = read_newest_snapshot(volume.devices, volume.superblocks)
    rings = rings_of(volume.devices, volume.superblocks)
    reader = JournalReader(rings, volume.volume_uuid.bytes)
    replay = _Replay(snapshot.namespace, snapshot.header.position)
    replay.run(reader)
    problems = [*volume.problems, *problems, *replay.problems]
    if snapshot.is_fallback:
        problems.append(_fallback(snapshot))
    leftovers = reader.leftovers(replay.end)
    problems += _leftover_problems(leftovers, replay.end)
    allocator, overlap = _build_allocator(volume, snapshot.namespace)
    problems += overlap
    damaged = snapshot.is_fallback or replay.failed or bool(leftovers.later) or bool(overlap)
    if not read_only and not damaged:
        _heal(snapshot, replay.gaps)
    epoch = 1 + max(snapshot.header.epoch, replay.end.epoch)
    journal = Journal(rings, volume.volume_uuid.bytes, start=snapshot.header.position, end=replay.end, epoch=epoch)
    return Recovered(
        snapshot.namespace, journal, allocator, epoch, problems, damaged, snapshot, replay.group_count, replay.end
    )


class _Replay:
    """Applies the groups that count, and collects what mirrors lack."""

    def __init__(self, namespace: Namespace, position: JournalPosition) -> None:
        self.namespace = namespace
        self.end = position
        self.group_count = 0
        self.gaps: list[Gap] = []
        self.problems: list[Problem] = []
        self.failed = False

    def run(self, reader: JournalReader) -> None:
        last_gaps: list[Gap] = []
        try:
            for group in reader.groups(self.end):
                self._report(last_gaps, is_last=False)
                last_gaps = group.gaps
                self._apply(group)
        except VolumeDamaged as error:
            self._fail(ProblemCode.JOURNAL_DAMAGED, str(error))
        self._report(last_gaps, is_last=True)

    def _apply(self, group: Group) -> None:
        for entry in group.entries:
            records = decode_entry(entry)
            try:
                apply_entry(self.namespace, records)
            except (CkptfsError, AttributeError, TypeError, ValueError) as error:
                self._fail(ProblemCode.RECORD_REFUSED, f"{records!r:.500}: {error}")
                raise VolumeDamaged(f"a record of group {self.end.sequence} cannot be applied") from error
        self.gaps += group.gaps
        self.end = group.end
        self.group_count += 1

    def _fail(self, code: ProblemCode, found: str) -> None:
        if not self.failed:
            place = f"journal, group {self.end.sequence}"
            self.problems.append(Problem(code, place, found, "records that can be applied"))
        self.failed = True

    def _report(self, gaps: list[Gap], *, is_last: bool) -> None:
        """A crash leaves a mirror without the last group; anything else is damage of the mirror."""
        for gap in gaps:
            behind = is_last and not gap.was_written
            header = gap.frame.header
            self.problems.append(
                Problem(
                    ProblemCode.JOURNAL_MIRROR_BEHIND if behind else ProblemCode.JOURNAL_MIRROR_DAMAGED,
                    gap.ring.place(header.offset_bytes),
                    "nothing of it" if behind else "something else, or a checksum that does not match",
                    f"frame {header.frame_index} of group {header.sequence}, as another mirror has it",
                )
            )


def _fallback(snapshot: Snapshot) -> Problem:
    newest = max(slot.header.generation for slot in snapshot.slots if slot.header is not None)
    return Problem(
        ProblemCode.SNAPSHOT_FALLBACK,
        snapshot.slot.place,
        f"generation {snapshot.header.generation} is the newest that is readable",
        f"generation {newest}, which was complete once",
    )


def _leftover_problems(leftovers: Leftovers, end: JournalPosition) -> list[Problem]:
    problems = [
        Problem(ProblemCode.DEVICE_READ_FAILED, place, "a read error", "a journal that can be read")
        for place in leftovers.unreadable
    ]
    if leftovers.later:
        place, sequence = leftovers.later[0]
        found = f"no whole group {end.sequence}, but group {sequence} is intact"
        problems.append(Problem(ProblemCode.JOURNAL_DAMAGED, place, found, "groups without a gap"))
    elif leftovers.torn:
        found = f"group {end.sequence} is not whole on any mirror"
        problems.append(Problem(ProblemCode.JOURNAL_TAIL_TORN, leftovers.torn[0], found, "a whole group, or none"))
    return problems


def _build_allocator(volume: VolumeDevices, namespace: Namespace) -> tuple[Allocator, list[Problem]]:
    maps = [inode.rows for inode in namespace.inodes.values() if inode.rows]
    try:
        return Allocator.from_maps(volume.data_regions, volume.segment_bytes, maps), []
    except VolumeDamaged as error:
        problem = Problem(ProblemCode.EXTENT_OVERLAP, "file maps", str(error), "every block used once at most")
        nothing_free = [(start, start) for start, _ in volume.data_regions]
        return Allocator(nothing_free, volume.segment_bytes), [problem]


def _heal(snapshot: Snapshot, gaps: list[Gap]) -> None:
    """Makes mirrors whole. One that refuses stays as it is: the next snapshot gives it another chance."""
    with contextlib.suppress(DeviceFailed):
        heal_snapshots(snapshot.slots, snapshot.slot)
    rings: list[Ring] = []
    for gap in gaps:
        with contextlib.suppress(DeviceFailed):
            gap.ring.write(gap.frame.header.offset_bytes, gap.frame.raw)
            rings.append(gap.ring)
    for device in {id(ring.device): ring.device for ring in rings}.values():
        with contextlib.suppress(DeviceFailed):
            device.barrier()
