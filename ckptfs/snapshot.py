"""Snapshots: a whole namespace in one of two slots, on every mirror.

A slot is a header block and frames whose payloads join into a stream of msgpack items of bounded size, so that
neither writing nor reading needs the whole in memory. The header says where in the journal replay goes on.

Why a cut at any point leaves a prefix of the log:
- A snapshot goes into the slot that does not hold the newest valid one (found by reading it in full), so that one,
  and the journal from its position on, stay untouched until the new one is durable.
- The slot's old header is wiped behind a barrier first, and the new one written behind a barrier after all frames.
  So a header means that all frames were durable before it: a frame that does not check then is damage.
- Only after write_snapshot() returned does the caller let the journal write over what the snapshot holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import msgpack

from ckptfs import layout
from ckptfs.device import Device
from ckptfs.errors import DeviceFailed, MetadataFull, Problem, ProblemCode, VolumeDamaged
from ckptfs.frames import FrameWriter, is_intact, read_header
from ckptfs.journal import JournalPosition
from ckptfs.layout import BLOCK_BYTES, Region
from ckptfs.namespace import Inode, Namespace, dentry_metadata_bytes, is_name
from ckptfs.superblock import Superblock, is_sealed_block, seal_block

ITEM_BEGIN = 0
"""[0, next_ino]: always first"""
ITEM_INODE = 1
"""[1, ino, mode, uid, gid, rdev, nlink, size_bytes, atime_ns, mtime_ns, ctime_ns, parent, target, xattrs]"""
ITEM_ROWS = 2
"""[2, ino, rows]: more rows of an inode that came before"""
ITEM_NAMES = 3
"""[3, ino, {name: ino}]: more names in a directory that came before"""
NAMES_PER_ITEM = 1024
ROWS_BYTES_PER_ITEM = 65536 * layout.EXTENT_ROW_BYTES
"""Of a name in a snapshot, at most, besides its own bytes"""


class SnapshotHeader(NamedTuple):
    """What a slot's header block says."""

    generation: int
    epoch: int
    position: JournalPosition
    frame_count: int
    body_bytes: int
    last_frame_checksum: int
    inode_count: int
    written_ns: int


class Slot(NamedTuple):
    """One slot on one mirror, and the header in it, if there is a good one."""

    device: Device
    region: Region
    volume_uuid: bytes
    header: SnapshotHeader | None
    fault: str | None
    """What is wrong with the header; None also when there is none."""

    @property
    def place(self) -> str:
        """Says where it is, for people."""
        name = layout.REGION_NAMES[self.region.kind]
        return f"{self.device.path}, {name}, copy {self.region.copy}, offset {self.region.offset_bytes}"


class Snapshot(NamedTuple):
    """What was read from a slot."""

    namespace: Namespace
    header: SnapshotHeader
    slots: list[Slot]
    """All of the volume's."""
    slot: Slot
    """The one that it was read from."""
    is_fallback: bool
    """A newer one was complete once and is damaged: what only that one held is lost."""


def metadata_bytes(namespace: Namespace) -> int:
    """An upper bound of what the namespace takes in a snapshot."""
    return sum(
        inode.metadata_bytes + sum(map(dentry_metadata_bytes, inode.children or ()))
        for inode in namespace.inodes.values()
    )


def capacity_bytes(superblocks: Sequence[Superblock]) -> int:
    """The metadata_bytes() that surely fit a snapshot of this volume."""
    slot_bytes = min(
        region.length_bytes
        for superblock in superblocks
        for kind in layout.SNAPSHOT_KINDS
        for region in superblock.metadata(kind)
    )
    # The header, the first item, and every frame's header; the last frame may be padded by almost a block.
    frames = (slot_bytes - 2 * BLOCK_BYTES) // layout.MAX_FRAME_BYTES
    return slot_bytes - 3 * BLOCK_BYTES - (frames + 1) * layout.FRAME_HEADER_BYTES


def write_snapshot(
    devices: Sequence[Device],
    superblocks: Sequence[Superblock],
    namespace: Namespace,
    epoch: int,
    journal_position: JournalPosition,
) -> None:
    """Makes a snapshot durable on the mirrors. Blocks; the namespace must not change meanwhile.

    Args:
        devices: Of the volume, in index order.
        superblocks: Theirs.
        namespace: All groups up to the position, applied.
        epoch: Of this mount.
        journal_position: Where replay goes on: Journal.position when the namespace was as it is.

    Raises:
        MetadataFull: It does not fit. The newest snapshot is untouched.
        DeviceFailed: No mirror took it. The newest snapshot is untouched.
    """
    slots = read_slots(devices, superblocks)
    newest = next((slot for slot in _newest_first(slots) if find_body_fault(slot) is None), None)
    if newest is None:
        raise DeviceFailed("no snapshot of this volume can be read, so none may be written over; run ckptfs fsck")
    kind = layout.REGION_SNAPSHOT_A if newest.region.kind == layout.REGION_SNAPSHOT_B else layout.REGION_SNAPSHOT_B
    generation = 1 + max(slot.header.generation for slot in slots if slot.header is not None)
    targets = [_Target(slot.device, slot.region) for slot in slots if slot.region.kind == kind]
    _write_to(targets, superblocks[0].volume_uuid.bytes, generation, namespace, epoch, journal_position)


def write_first_snapshot(
    devices: Sequence[Device],
    superblocks: Sequence[Superblock],
    namespace: Namespace,
    journal_position: JournalPosition,
) -> None:
    """For mkfs: empties all slots and writes generation 1. REQUIRES: no superblock is on the devices."""
    targets = [_Target(slot.device, slot.region) for slot in read_slots(devices, superblocks)]
    for target in targets:
        target.wipe_header()
    first = [target for target in targets if target.region.kind == layout.REGION_SNAPSHOT_A]
    _write_to(first, superblocks[0].volume_uuid.bytes, 1, namespace, 0, journal_position)


def heal_snapshots(slots: Sequence[Slot], newest: Slot) -> None:
    """Copies the snapshot that counts to the mirrors that lack it, and empties slots whose header is damaged.

    Raises:
        DeviceFailed: A mirror did not take it; the snapshot that counts is untouched.
    """
    assert newest.header is not None
    for slot in slots:
        target = _Target(slot.device, slot.region)
        if slot.region.kind != newest.region.kind:
            if slot.fault is not None:
                target.wipe_header()
        elif slot.header != newest.header or find_body_fault(slot) is not None:
            target.wipe_header()
            for at in range(BLOCK_BYTES, BLOCK_BYTES + newest.header.body_bytes, layout.MAX_FRAME_BYTES):
                length = min(layout.MAX_FRAME_BYTES, BLOCK_BYTES + newest.header.body_bytes - at)
                target.write(at, newest.device.read(newest.region.offset_bytes + at, length))
            target.finish(newest.device.read(newest.region.offset_bytes, BLOCK_BYTES))


def _write_to(
    targets: list[_Target],
    volume_uuid: bytes,
    generation: int,
    namespace: Namespace,
    epoch: int,
    position: JournalPosition,
) -> None:
    writer = FrameWriter(layout.SNAPSHOT_MAGIC, volume_uuid, epoch, generation, BLOCK_BYTES, 0)
    slot_bytes = min(target.region.length_bytes for target in targets)
    with ThreadPoolExecutor(len(targets), thread_name_prefix="snapshot") as pool:
        _on_all(pool, targets, _Target.wipe_header)
        for payload, last in _payloads(namespace):
            offset = writer.offset_bytes
            frame = writer.frame(payload, last=last)
            if writer.offset_bytes > slot_bytes:
                raise MetadataFull(
                    f"the names and extents of this volume no longer fit its snapshots of {slot_bytes} bytes;"
                    " delete files, or make a larger volume"
                )
            _on_all(pool, targets, partial(_Target.write, offset_bytes=offset, data=frame))
        header = layout.SNAPSHOT_HEADER.pack(
            layout.SNAPSHOT_HEADER_MAGIC,
            volume_uuid,
            generation,
            epoch,
            position.epoch,
            position.sequence,
            position.offset_bytes,
            position.previous_checksum,
            position.attempt,
            writer.frame_index,
            writer.offset_bytes - BLOCK_BYTES,
            writer.previous_checksum,
            sum(1 for _ in _named(namespace)),
            time.time_ns(),
        )
        _on_all(pool, targets, partial(_Target.finish, header_block=seal_block(header)))


class _Target:
    """A slot that is being written. After a failure it is left out."""

    def __init__(self, device: Device, region: Region) -> None:
        self.device = device
        self.region = region

    def wipe_header(self) -> None:
        self.write(0, bytes(BLOCK_BYTES))
        self.device.barrier()

    def write(self, offset_bytes: int, data: bytes) -> None:
        self.device.write(self.region.offset_bytes + offset_bytes, data)

    def finish(self, header_block: bytes) -> None:
        self.device.barrier()
        self.write(0, header_block)
        self.device.barrier()


def _on_all(pool: ThreadPoolExecutor, targets: list[_Target], step: Callable[[_Target], None]) -> None:
    """Does a step on all targets at once and takes out those where it fails; one must be left."""

    def attempt(target: _Target) -> DeviceFailed | None:
        try:
            step(target)
        except DeviceFailed as error:
            return error
        return None

    errors = list(pool.map(attempt, targets))
    if all(errors):
        raise cast(DeviceFailed, errors[0])
    targets[:] = [target for target, error in zip(targets, errors, strict=True) if error is None]


def _payloads(namespace: Namespace) -> Iterator[tuple[bytes, bool]]:
    """The stream of items, cut into payloads of full frames; the last one is marked."""
    buffer = bytearray()
    limit = layout.MAX_FRAME_PAYLOAD_BYTES
    for item in _items(namespace):
        buffer += _pack(item)
        while len(buffer) > limit:
            yield bytes(buffer[:limit]), False
            del buffer[:limit]
    yield bytes(buffer), True


def _items(namespace: Namespace) -> Iterator[tuple[object, ...]]:
    yield ITEM_BEGIN, namespace.next_ino
    for inode in _named(namespace):
        yield _inode_item(inode)
        for at in range(0, len(inode.rows), ROWS_BYTES_PER_ITEM):
            yield ITEM_ROWS, inode.ino, inode.rows[at : at + ROWS_BYTES_PER_ITEM]
        names = iter((inode.children or {}).items())
        while chunk := dict(islice(names, NAMES_PER_ITEM)):
            yield ITEM_NAMES, inode.ino, chunk


def _named(namespace: Namespace) -> Iterator[Inode]:
    """What a snapshot holds: not what is only open still, for nobody can have it open after a crash."""
    return (inode for inode in namespace.inodes.values() if inode.nlink)


def _inode_item(inode: Inode) -> tuple[object, ...]:
    return (
        ITEM_INODE,
        inode.ino,
        inode.mode,
        inode.uid,
        inode.gid,
        inode.rdev,
        inode.nlink,
        inode.size_bytes,
        inode.atime_ns,
        inode.mtime_ns,
        inode.ctime_ns,
        inode.parent,
        inode.target,
        inode.xattrs,
    )


def _pack(item: tuple[object, ...]) -> bytes:
    return cast(bytes, msgpack.packb(item))


def read_slots(devices: Sequence[Device], superblocks: Sequence[Superblock]) -> list[Slot]:
    """All slots of all mirrors with their headers."""
    return [
        _read_slot(device, region, superblock.volume_uuid.bytes)
        for device, superblock in zip(devices, superblocks, strict=True)
        for kind in layout.SNAPSHOT_KINDS
        for region in superblock.metadata(kind)
    ]


def _read_slot(device: Device, region: Region, volume_uuid: bytes) -> Slot:
    try:
        block = device.read(region.offset_bytes, BLOCK_BYTES)
    except DeviceFailed as error:
        return Slot(device, region, volume_uuid, None, str(error))
    magic, owner, generation, epoch, *rest = layout.SNAPSHOT_HEADER.unpack_from(block)
    if block == bytes(BLOCK_BYTES):
        return Slot(device, region, volume_uuid, None, None)
    if magic != layout.SNAPSHOT_HEADER_MAGIC or owner != volume_uuid or not is_sealed_block(block):
        return Slot(device, region, volume_uuid, None, "the header's checksum does not match")
    return Slot(
        device, region, volume_uuid, SnapshotHeader(generation, epoch, JournalPosition(*rest[:5]), *rest[5:]), None
    )


def _newest_first(slots: Sequence[Slot]) -> list[Slot]:
    found = [(slot.header.generation, slot) for slot in slots if slot.header is not None]
    return [slot for _, slot in sorted(found, key=lambda item: item[0], reverse=True)]


def find_body_fault(slot: Slot) -> str | None:
    """Reads a slot in full; says what is wrong with its frames, None when they are good. REQUIRES: it has a header."""
    try:
        for _ in _read_payloads(slot):
            pass
    except (VolumeDamaged, DeviceFailed) as error:
        return str(error)
    return None


def _read_payloads(slot: Slot) -> Iterator[bytes]:
    header = slot.header
    assert header is not None
    previous = 0
    at, end = BLOCK_BYTES, BLOCK_BYTES + header.body_bytes
    if end > slot.region.length_bytes:
        raise VolumeDamaged("the header claims more than the slot holds")
    for index in range(header.frame_count):
        raw = slot.device.read(slot.region.offset_bytes + at, min(layout.MAX_FRAME_BYTES, max(end - at, BLOCK_BYTES)))
        frame = read_header(raw, layout.SNAPSHOT_MAGIC, slot.volume_uuid)
        if (
            frame is None
            or not is_intact(frame, raw)
            or (frame.sequence, frame.offset_bytes, frame.frame_index) != (header.generation, at, index)
            or frame.previous_checksum != previous
        ):
            raise VolumeDamaged(f"frame {index} at offset {slot.region.offset_bytes + at} is damaged")
        previous = frame.checksum
        at += frame.frame_bytes
        yield raw[layout.FRAME_HEADER_BYTES : layout.FRAME_HEADER_BYTES + frame.payload_bytes]
    if at != end or previous != header.last_frame_checksum:
        raise VolumeDamaged("the frames are not those that the header tells of")


def read_newest_snapshot(
    devices: Sequence[Device], superblocks: Sequence[Superblock]
) -> tuple[Snapshot, list[Problem]]:
    """Reads the newest snapshot that is good on some mirror, and checks the others.

    Returns:
        It, and what is wrong with the slots. Only headers are checked of slots that are not needed.

    Raises:
        VolumeDamaged: There is no good snapshot at all.
    """
    slots = read_slots(devices, superblocks)
    problems = [
        Problem(ProblemCode.SNAPSHOT_DAMAGED, slot.place, slot.fault, "a snapshot, or an empty slot")
        for slot in slots
        if slot.fault is not None
    ]
    bad: list[Slot] = []
    for slot in _newest_first(slots):
        assert slot.header is not None
        namespace = _decode_or_fault(slot)
        if isinstance(namespace, str):
            problems.append(_damaged(slot, namespace))
            bad.append(slot)
            continue
        problems += _compare_mirrors([other for other in slots if other not in bad], slot)
        is_fallback = any(other.header and other.header.generation > slot.header.generation for other in slots)
        return Snapshot(namespace, slot.header, slots, slot, is_fallback), problems
    raise VolumeDamaged(
        f"no snapshot of volume {superblocks[0].volume_uuid} is readable ({len(problems)} damaged); run ckptfs fsck"
    )


def _decode_or_fault(slot: Slot) -> Namespace | str:
    try:
        return _decode(slot)
    except (VolumeDamaged, DeviceFailed) as error:
        return str(error)


def _decode(slot: Slot) -> Namespace:
    namespace = Namespace()
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
    try:
        for payload in _read_payloads(slot):
            unpacker.feed(payload)
            for item in unpacker:
                _decode_item(namespace, item)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise VolumeDamaged(f"the items do not decode ({error!r})") from error
    assert slot.header is not None
    if len(namespace.inodes) != slot.header.inode_count:
        raise VolumeDamaged(f"{len(namespace.inodes)} inodes instead of {slot.header.inode_count}")
    return namespace


def _decode_item(namespace: Namespace, item: list[Any]) -> None:
    kind = item[0]
    if kind == ITEM_INODE:
        _, ino, mode, uid, gid, rdev, nlink, size_bytes, atime_ns, mtime_ns, ctime_ns, parent, target, xattrs = item
        namespace.inodes[ino] = Inode(
            ino,
            mode,
            uid=uid,
            gid=gid,
            rdev=rdev,
            nlink=nlink,
            size_bytes=size_bytes,
            atime_ns=atime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=ctime_ns,
            target=target,
            xattrs=xattrs,
            parent=parent,
        )
    elif kind == ITEM_ROWS:
        namespace.inodes[item[1]].rows += item[2]
    elif kind == ITEM_NAMES:
        if not all(map(is_name, item[2])):
            raise ValueError("a name that cannot be one")
        namespace.directory(item[1]).update(item[2])
    elif kind == ITEM_BEGIN:
        namespace.next_ino = item[1]
    else:
        raise ValueError(f"item of kind {kind}")


def _damaged(slot: Slot, fault: str) -> Problem:
    return Problem(ProblemCode.SNAPSHOT_DAMAGED, slot.place, fault, "intact frames behind a header")


def _compare_mirrors(slots: Sequence[Slot], newest: Slot) -> list[Problem]:
    """What the other mirrors lack of the snapshot that counts."""
    assert newest.header is not None
    problems = []
    for slot in slots:
        if slot.region.kind == newest.region.kind and slot is not newest and slot.fault is None:
            if slot.header is None or slot.header.generation != newest.header.generation:
                found = "nothing" if slot.header is None else f"generation {slot.header.generation}"
                expected = f"generation {newest.header.generation}, as on {newest.place}"
                problems.append(Problem(ProblemCode.SNAPSHOT_MISSING, slot.place, found, expected))
            elif (fault := find_body_fault(slot)) is not None:
                problems.append(_damaged(slot, fault))
    return problems
