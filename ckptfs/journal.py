"""The journal: a ring of frames, mirrored, to which commit groups are appended.

A group is a sequence of log entries in one or more frames. Offsets count the bytes ever written (the stream); the
ring shows the last part of it, at offset modulo its length, and a frame may wrap around its end.

Why a cut at any point leaves a prefix of the groups:
- append() returns only after a mirror has the whole group behind a barrier, and the next group is begun only then.
  So at any time at most one group is incomplete, the last.
- A group counts at replay only if all its frames up to the one marked last are intact and form a chain by their
  checksums from the group before. So an incomplete group counts as absent, and nothing can follow it.
- append() never writes over the stream at or behind `start`, where the newest durable snapshot says that replay
  begins. So every group from there on is in the ring.
- A group whose append() failed may be on some mirrors nevertheless. It may be tried again, with more entries
  behind the same ones: the higher attempt wins at replay, and if no attempt ever succeeds, whichever is found
  whole is still the next piece of the log. A snapshot taken meanwhile carries the attempt from which groups count.
- Recovery copies groups that a mirror lacks before it appends. What an older epoch left beyond the end does not
  chain onto a newer group, and is older than the epoch that a snapshot asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ckptfs import layout
from ckptfs.device import Device
from ckptfs.errors import DeviceFailed, JournalFull, VolumeDamaged
from ckptfs.frames import Frame, FrameHeader, FrameWriter, frames_bytes, is_intact, read_header
from ckptfs.layout import BLOCK_BYTES, KIB, Region
from ckptfs.superblock import Superblock


class JournalPosition(NamedTuple):
    """A place between two groups, and what the next group must carry to count."""

    epoch: int
    """The next group's epoch is at least this."""
    sequence: int
    offset_bytes: int
    previous_checksum: int
    attempt: int = 0
    """Within that epoch, its attempt is at least this."""

    def accepts(self, header: FrameHeader) -> bool:
        """True when a frame of the next group is not older than what counts here."""
        return header.sequence == self.sequence and (header.epoch, header.attempt) >= (self.epoch, self.attempt)


START = JournalPosition(epoch=0, sequence=1, offset_bytes=0, previous_checksum=0)
"""Of a new volume."""


class Ring:
    """One mirror of the journal, addressed by stream offset."""

    def __init__(self, device: Device, region: Region) -> None:
        self.device = device
        self.region = region
        self.length_bytes = region.length_bytes

    def place(self, offset_bytes: int) -> str:
        """Says where that is, for people."""
        at = self.region.offset_bytes + offset_bytes % self.length_bytes
        return f"{self.device.path}, journal copy {self.region.copy}, offset {at}"

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Reads a part of the stream. REQUIRES: it is not longer than the ring."""
        return b"".join(self.device.read(at, length) for at, length in self._spans(offset_bytes, length_bytes))

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Writes whole blocks of the stream. REQUIRES: they are not longer than the ring."""
        done = 0
        for at, length in self._spans(offset_bytes, len(data)):
            self.device.write(at, memoryview(data)[done : done + length])
            done += length

    def _spans(self, offset_bytes: int, length_bytes: int) -> list[tuple[int, int]]:
        assert length_bytes <= self.length_bytes
        at = offset_bytes % self.length_bytes
        first = min(length_bytes, self.length_bytes - at)
        spans = [(self.region.offset_bytes + at, first)]
        if first < length_bytes:
            spans.append((self.region.offset_bytes, length_bytes - first))
        return spans


def rings_of(devices: Sequence[Device], superblocks: Sequence[Superblock]) -> list[Ring]:
    """All mirrors of the journal of a volume."""
    rings = [
        Ring(device, region)
        for device, superblock in zip(devices, superblocks, strict=True)
        for region in superblock.metadata(layout.REGION_JOURNAL)
    ]
    if not rings or len({ring.length_bytes for ring in rings}) != 1:
        raise VolumeDamaged("the superblocks name no journal, or journals of several lengths; run ckptfs fsck")
    return rings


class Journal:
    """The writing end. One caller at a time; append() blocks, so call it in a worker thread."""

    def __init__(
        self, rings: Sequence[Ring], volume_uuid: bytes, *, start: JournalPosition, end: JournalPosition, epoch: int
    ) -> None:
        """Goes on behind the last group.

        Args:
            rings: The mirrors.
            volume_uuid: Goes into every frame.
            start: Where replay begins: the newest durable snapshot's position.
            end: Behind the last group that counts.
            epoch: Of this mount, above that of every group on the devices.
        """
        assert end.epoch <= epoch and start.offset_bytes <= end.offset_bytes
        self._rings = list(rings)
        self._volume_uuid = volume_uuid
        self._start_bytes = start.offset_bytes
        self._end = end._replace(epoch=epoch, attempt=0 if epoch > end.epoch else end.attempt)
        self._missed: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(len(rings), thread_name_prefix="journal")

    @property
    def epoch(self) -> int:
        """Of this mount."""
        return self._end.epoch

    @property
    def position(self) -> JournalPosition:
        """Behind the last group: what a snapshot of all groups so far has to carry."""
        return self._end

    @property
    def capacity_bytes(self) -> int:
        """The largest group that fits when the journal is empty, measured by group_bytes()."""
        return self._rings[0].length_bytes

    @property
    def used_bytes(self) -> int:
        """What replay would read."""
        return self._end.offset_bytes - self._start_bytes

    @property
    def used_fraction(self) -> float:
        """How full it is; take a snapshot well before 1."""
        return self.used_bytes / self.capacity_bytes

    @property
    def incomplete_devices(self) -> list[str]:
        """Paths of devices that missed a group since the last snapshot; a snapshot makes them whole."""
        return sorted(self._missed)

    @staticmethod
    def group_bytes(entries: Sequence[bytes]) -> int:
        """What a group of these entries takes in the ring."""
        return frames_bytes(sum(map(len, entries)) + layout.ENTRY_LENGTH.size * len(entries))

    def append(self, entries: Sequence[bytes]) -> None:
        """Makes a group durable. REQUIRES: not empty; after a DeviceFailed, the same entries come first again.

        Raises:
            JournalFull: It does not fit; nothing was written. Take a snapshot and advance_start(); a group above
                capacity_bytes is itself committed by a snapshot that contains it, at `position` as it is.
            DeviceFailed: No mirror took it. It is unknown whether it is on the devices.
        """
        assert entries
        if self.used_bytes + self.group_bytes(entries) > self.capacity_bytes:
            raise JournalFull(f"a group of {self.group_bytes(entries)} bytes does not fit the journal")
        end = self._end
        payload = b"".join(part for entry in entries for part in (layout.ENTRY_LENGTH.pack(len(entry)), entry))
        writer = FrameWriter(
            layout.JOURNAL_MAGIC,
            self._volume_uuid,
            end.epoch,
            end.sequence,
            end.offset_bytes,
            end.previous_checksum,
            end.attempt,
        )
        data = b"".join(writer.frames(payload))
        self._end = end._replace(attempt=end.attempt + 1)
        self._write_mirrors(end, data)
        self._end = JournalPosition(end.epoch, end.sequence + 1, writer.offset_bytes, writer.previous_checksum)

    def advance_start(self, position: JournalPosition) -> None:
        """Gives the room before a position back. REQUIRES: a snapshot that carries the position is durable."""
        assert self._start_bytes <= position.offset_bytes <= self._end.offset_bytes
        self._start_bytes = position.offset_bytes
        self._missed = {path: sequence for path, sequence in self._missed.items() if sequence >= position.sequence}

    def close(self) -> None:
        """Ends the worker threads."""
        self._pool.shutdown()

    def _write_mirrors(self, at: JournalPosition, data: bytes) -> None:
        """Writes to all devices at once; one is enough. A device that missed groups is tried again each time."""
        by_device: dict[str, list[Ring]] = {}
        for ring in self._rings:
            by_device.setdefault(ring.device.path, []).append(ring)

        def write(rings: list[Ring]) -> DeviceFailed | None:
            try:
                for ring in rings:
                    ring.write(at.offset_bytes, data)
                rings[0].device.barrier()
            except DeviceFailed as error:
                return error
            return None

        errors = dict(zip(by_device, self._pool.map(write, by_device.values()), strict=True))
        failed = {path: error for path, error in errors.items() if error is not None}
        if len(failed) == len(by_device):
            raise next(iter(failed.values()))
        self._missed |= dict.fromkeys(failed, at.sequence)


class Gap(NamedTuple):
    """A frame that counts but is not on one mirror as it should be."""

    ring: Ring
    frame: Frame
    was_written: bool
    """The mirror has a frame of that group there, but a damaged one."""


class Group(NamedTuple):
    """A group that counts."""

    entries: list[bytes]
    end: JournalPosition
    """Behind it."""
    gaps: list[Gap]


class Leftovers(NamedTuple):
    """What lies behind the last group that counts."""

    torn: list[str]
    """Places of frames of the next group, which is not whole."""
    later: list[tuple[str, int]]
    """Place and sequence of intact frames of groups after it: what is between is damaged."""
    unreadable: list[str]


class JournalReader:
    """The reading end: takes each frame from whichever mirror has it intact."""

    def __init__(self, rings: Sequence[Ring], volume_uuid: bytes) -> None:
        self._windows = [_Window(ring) for ring in rings]
        self._volume_uuid = volume_uuid

    def groups(self, position: JournalPosition) -> Iterator[Group]:
        """All groups that count from a position on.

        Raises:
            VolumeDamaged: The content of an intact group makes no sense.
        """
        while (group := self.read_group(position)) is not None:
            yield group
            position = group.end

    def read_group(self, position: JournalPosition) -> Group | None:
        """The group at a position, None when there is no whole one."""
        firsts = {
            frame.header: frame
            for frame in self._frames_at(position.offset_bytes)
            if position.accepts(frame.header)
            and frame.header.frame_index == 0
            and frame.header.previous_checksum == position.previous_checksum
        }
        for first in sorted(firsts.values(), key=lambda frame: frame.header[2:7], reverse=True):
            frames = self._chain(first)
            if frames is not None:
                return self._group(frames)
        return None

    def leftovers(self, position: JournalPosition) -> Leftovers:
        """Searches all mirrors for what lies behind the end. REQUIRES: no group counts at position."""
        torn: list[str] = []
        later: list[tuple[str, int]] = []
        unreadable: list[str] = []
        for window in self._windows:
            for header, intact, place in self._scan(window.ring, unreadable):
                if position.accepts(header):
                    torn.append(place)
                elif intact and header.sequence > position.sequence and header.epoch >= position.epoch:
                    later.append((place, header.sequence))
        return Leftovers(torn, later, unreadable)

    def _frames_at(self, offset_bytes: int) -> list[Frame]:
        """The intact frames that the mirrors have there."""
        frames = []
        for window in self._windows:
            header = self._header_at(window, offset_bytes)
            if header is not None:
                raw = window.read(offset_bytes, header.frame_bytes)
                if is_intact(header, raw):
                    frames.append(Frame(header, raw))
        return frames

    def _header_at(self, window: _Window, offset_bytes: int) -> FrameHeader | None:
        header = read_header(window.read(offset_bytes, BLOCK_BYTES), layout.JOURNAL_MAGIC, self._volume_uuid)
        return header if header is not None and header.offset_bytes == offset_bytes else None

    def _chain(self, first: Frame) -> list[Frame] | None:
        """All frames of the group that a frame begins."""
        frames = [first]
        while not frames[-1].header.is_last:
            last = frames[-1].header
            if last.end_bytes - first.header.offset_bytes >= self._windows[0].ring.length_bytes:
                return None
            wanted = (last.epoch, last.sequence, last.attempt, last.frame_index + 1, last.checksum)
            found = next(
                (
                    frame
                    for frame in self._frames_at(last.end_bytes)
                    if (h := frame.header)
                    and (h.epoch, h.sequence, h.attempt, h.frame_index, h.previous_checksum) == wanted
                ),
                None,
            )
            if found is None:
                return None
            frames.append(found)
        return frames

    def _group(self, frames: list[Frame]) -> Group:
        last = frames[-1].header
        gaps = []
        for window in self._windows:
            for frame in frames:
                if window.read(frame.header.offset_bytes, len(frame.raw)) != frame.raw:
                    there = self._header_at(window, frame.header.offset_bytes)
                    was_written = there is not None and there.sequence == last.sequence and there.epoch == last.epoch
                    gaps.append(Gap(window.ring, frame, was_written))
        end = JournalPosition(last.epoch, last.sequence + 1, last.end_bytes, last.checksum)
        return Group(_entries(b"".join(frame.payload for frame in frames), last.sequence), end, gaps)

    def _scan(self, ring: Ring, unreadable: list[str]) -> Iterator[tuple[FrameHeader, bool, str]]:
        """Every frame header in a ring, and whether its frame is intact. Does not look inside intact frames."""
        content = _read_all(ring, unreadable)
        at = 0
        while at < ring.length_bytes:
            header = read_header(content[at : at + BLOCK_BYTES], layout.JOURNAL_MAGIC, self._volume_uuid)
            if header is not None and header.offset_bytes % ring.length_bytes == at:
                raw = content[at : at + header.frame_bytes]
                raw += content[: header.frame_bytes - len(raw)]
                intact = is_intact(header, raw)
                yield header, intact, ring.place(at)
                at += header.frame_bytes if intact else BLOCK_BYTES
            else:
                at += BLOCK_BYTES


class _Window:
    """Reads ahead in a ring. What cannot be read reads as zeros, which is no frame."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._start = 0
        self._content = b""

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        at = offset_bytes - self._start
        if at < 0 or at + length_bytes > len(self._content):
            self._start, at = offset_bytes, 0
            self._content = self._load(offset_bytes, length_bytes)
        return self._content[at : at + length_bytes]

    def _load(self, offset_bytes: int, length_bytes: int) -> bytes:
        ahead_bytes = min(max(length_bytes, 512 * KIB), self.ring.length_bytes)
        return self._try(offset_bytes, ahead_bytes) or self._try(offset_bytes, length_bytes) or bytes(length_bytes)

    def _try(self, offset_bytes: int, length_bytes: int) -> bytes | None:
        try:
            return self.ring.read(offset_bytes, length_bytes)
        except DeviceFailed:
            return None


def _read_all(ring: Ring, unreadable: list[str]) -> bytes:
    pieces = []
    for at in range(0, ring.length_bytes, layout.MAX_FRAME_BYTES):
        length = min(layout.MAX_FRAME_BYTES, ring.length_bytes - at)
        try:
            pieces.append(ring.read(at, length))
        except DeviceFailed:
            unreadable.append(ring.place(at))
            pieces.append(bytes(length))
    return b"".join(pieces)


def _entries(payload: bytes, sequence: int) -> list[bytes]:
    entries = []
    at = 0
    while at < len(payload):
        end = at + layout.ENTRY_LENGTH.size
        if end <= len(payload):
            (length,) = layout.ENTRY_LENGTH.unpack_from(payload, at)
            at = end + length
        if end > len(payload) or at > len(payload):
            raise VolumeDamaged(f"group {sequence} of the journal ends in the middle of an entry; run ckptfs fsck")
        entries.append(payload[end:at])
    return entries
