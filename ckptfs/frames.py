"""Frames: what the journal and the snapshots are written in.

A frame is a header (layout.FRAME and its checksum), a payload, and zeros up to a whole block. It names its volume,
its place and the checksum of the frame before it, so a frame that is valid but stale, misplaced or of another
volume does not fit into a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ckptfs import layout


class FrameHeader(NamedTuple):
    """A frame's fields; `checksum` covers those before it and the payload."""

    magic: bytes
    volume_uuid: bytes
    epoch: int
    sequence: int
    offset_bytes: int
    frame_index: int
    attempt: int
    payload_bytes: int
    flags: int
    previous_checksum: int
    checksum: int

    @property
    def is_last(self) -> bool:
        """True for the last frame of its group or snapshot."""
        return bool(self.flags & layout.FRAME_LAST)

    @property
    def frame_bytes(self) -> int:
        """The space it takes."""
        return layout.frame_bytes(self.payload_bytes)

    @property
    def end_bytes(self) -> int:
        """Where the next frame starts."""
        return self.offset_bytes + self.frame_bytes


class Frame(NamedTuple):
    """A frame as it is on the devices."""

    header: FrameHeader
    raw: bytes

    @property
    def payload(self) -> bytes:
        """What it carries."""
        start = layout.FRAME_HEADER_BYTES
        return self.raw[start : start + self.header.payload_bytes]


@dataclass
class FrameWriter:
    """Chains payloads into frames. The fields say what the next frame will carry."""

    magic: bytes
    volume_uuid: bytes
    epoch: int
    sequence: int
    offset_bytes: int
    previous_checksum: int
    attempt: int = 0
    frame_index: int = 0

    def frame(self, payload: bytes | memoryview, *, last: bool) -> bytes:
        """The next frame. REQUIRES: the payload is not above MAX_FRAME_PAYLOAD_BYTES."""
        assert len(payload) <= layout.MAX_FRAME_PAYLOAD_BYTES
        fields = layout.FRAME.pack(
            self.magic,
            self.volume_uuid,
            self.epoch,
            self.sequence,
            self.offset_bytes,
            self.frame_index,
            self.attempt,
            len(payload),
            layout.FRAME_LAST if last else 0,
            self.previous_checksum,
        )
        self.previous_checksum = _checksum(fields, payload)
        self.frame_index += 1
        size = layout.frame_bytes(len(payload))
        self.offset_bytes += size
        return b"".join((fields, layout.FRAME_CHECKSUM.pack(self.previous_checksum), payload)).ljust(size, b"\0")

    def frames(self, payload: bytes) -> Iterator[bytes]:
        """A whole payload as frames, the last one marked."""
        view = memoryview(payload)
        step = layout.MAX_FRAME_PAYLOAD_BYTES
        for start in range(0, max(len(payload), 1), step):
            yield self.frame(view[start : start + step], last=start + step >= len(payload))


def frames_bytes(payload_bytes: int) -> int:
    """The space that a payload takes as frames."""
    full, rest = divmod(payload_bytes, layout.MAX_FRAME_PAYLOAD_BYTES)
    return full * layout.MAX_FRAME_BYTES + (layout.frame_bytes(rest) if rest or not full else 0)


def read_header(block: bytes, magic: bytes, volume_uuid: bytes) -> FrameHeader | None:
    """The header in a block, if it looks like one of ours. Says nothing about the checksum."""
    if len(block) < layout.FRAME_HEADER_BYTES or not block.startswith(magic):
        return None
    (checksum,) = layout.FRAME_CHECKSUM.unpack_from(block, layout.FRAME.size)
    header = FrameHeader._make((*layout.FRAME.unpack_from(block), checksum))
    if header.volume_uuid != volume_uuid or header.payload_bytes > layout.MAX_FRAME_PAYLOAD_BYTES:
        return None
    return header


def is_intact(header: FrameHeader, raw: bytes) -> bool:
    """True when the frame's checksum matches."""
    start = layout.FRAME_HEADER_BYTES
    payload = memoryview(raw)[start : start + header.payload_bytes]
    return len(payload) == header.payload_bytes and _checksum(raw[: layout.FRAME.size], payload) == header.checksum


def _checksum(fields: bytes, payload: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return int(digest.intdigest())
