"""What is where on the devices: the only home of magics, struct formats, sizes and offsets.

docs/format.md says the same in words. All integers are little-endian; all checksums are XXH3-64, seed 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

FORMAT_VERSION = 1
COMPAT_KNOWN = 0
RO_COMPAT_KNOWN = 0
INCOMPAT_KNOWN = 0

BLOCK_BYTES = 4096
"""Every structure and every extent starts on a multiple of it; the largest logical block that a device may have."""
MAX_EXTENT_BYTES = MIB

# --- Superblock: one block at the start of a device, one at its end. ---

SUPERBLOCK_MAGIC = b"CKPTFS\r\n"
SUPERBLOCK = struct.Struct("<8sIIQQQ16s16sHHIQQQ64s")
"""magic, format_version, block_bytes, compat, ro_compat, incompat, volume_uuid, device_uuid, device_index,
device_count, region_count, size_bytes, segment_bytes, created_ns, label"""
REGION = struct.Struct("<HHIQQ")
"""kind, copy, reserved (0), offset_bytes, length_bytes: region_count of them follow the superblock's fields"""
MAX_REGIONS = 64
BLOCK_CHECKSUM = struct.Struct("<Q")
"""The last 8 bytes of a superblock and of a snapshot header: checksum of all the bytes of the block before it"""
BLOCK_CHECKSUM_OFFSET = BLOCK_BYTES - BLOCK_CHECKSUM.size
MAX_LABEL_BYTES = 64
MAX_DEVICES = 256

REGION_JOURNAL = 1
REGION_SNAPSHOT_A = 2
REGION_SNAPSHOT_B = 3
REGION_DATA = 4
SNAPSHOT_KINDS = (REGION_SNAPSHOT_A, REGION_SNAPSHOT_B)
REGION_NAMES = {
    REGION_JOURNAL: "journal",
    REGION_SNAPSHOT_A: "snapshot A",
    REGION_SNAPSHOT_B: "snapshot B",
    REGION_DATA: "data",
}

# --- Frames: what the journal and the snapshots are made of. Header, payload, zeros up to a whole block. ---

JOURNAL_MAGIC = b"CKPTJRNL"
SNAPSHOT_MAGIC = b"CKPTSNAP"
FRAME = struct.Struct("<8s16sQQQIIIIQ")
"""magic, volume_uuid, epoch, sequence, offset_bytes, frame_index, attempt, payload_bytes, flags, previous_checksum

Journal: sequence numbers the groups, offset_bytes is the frame's place in the endless stream that the ring shows a
part of, attempt counts the tries of one group. Snapshot: sequence is its generation, offset_bytes the place from
the start of the slot, attempt 0.
"""
FRAME_CHECKSUM = struct.Struct("<Q")
"""Follows FRAME: checksum of the FRAME bytes and the payload"""
FRAME_HEADER_BYTES = FRAME.size + FRAME_CHECKSUM.size
FRAME_LAST = 1
"""Flag of the last frame of a group or snapshot"""
MAX_FRAME_BYTES = 256 * KIB
MAX_FRAME_PAYLOAD_BYTES = MAX_FRAME_BYTES - FRAME_HEADER_BYTES
ENTRY_LENGTH = struct.Struct("<I")
"""Before each entry in a group's payload"""

# --- Snapshot slot: a header block, then frames. The header is written last and makes the slot valid. ---

SNAPSHOT_HEADER_MAGIC = b"CKPTSLOT"
SNAPSHOT_HEADER = struct.Struct("<8s16sQQQQQQIIQQQQ")
"""magic, volume_uuid, generation, epoch, journal_epoch, journal_sequence, journal_offset_bytes,
journal_previous_checksum, journal_attempt, frame_count, body_bytes, last_frame_checksum, inode_count, written_ns"""

# --- Extent rows: what a file's map is made of. ---

EXTENT_ROW = struct.Struct("<QIIHHIQQ")
"""file_offset_bytes, length_bytes, skip_bytes, device_index, flags (0), stored_length_bytes, device_offset_bytes,
checksum. File bytes [file_offset, +length) are bytes [skip, +length) of the extent stored at device_offset."""
EXTENT_ROW_BYTES = EXTENT_ROW.size

assert EXTENT_ROW_BYTES == 40
assert FRAME_HEADER_BYTES == 80
assert SUPERBLOCK.size == 168
assert REGION.size == 24
assert SUPERBLOCK.size + MAX_REGIONS * REGION.size <= BLOCK_CHECKSUM_OFFSET
assert SNAPSHOT_HEADER.size == 112
assert MAX_FRAME_BYTES % BLOCK_BYTES == 0

# --- Where things go on a new volume. ---

RESERVED_BYTES = MIB
"""At both ends of a device: the superblock, and room in which mkfs wipes what others left there"""
MIN_DEVICE_BYTES = 16 * MIB
MAX_MIRROR_DEVICES = 3
MAX_SEGMENT_BYTES = 64 * MIB
MIN_SEGMENT_BYTES = MAX_EXTENT_BYTES
MIN_SEGMENTS = 8
"""Per device, where the device is large enough for it"""
MAX_JOURNAL_BYTES = 128 * MIB


@dataclass(frozen=True)
class Region:
    """A range of a device with a purpose."""

    kind: int
    copy: int
    """0, or 1 for the second copy of a one-device volume."""
    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """Where it ends."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True)
class Plan:
    """Where things go on the devices of a new volume."""

    segment_bytes: int
    regions: tuple[tuple[Region, ...], ...]
    """Of each device in index order."""


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of unit that is not below value."""
    return -(-value // unit) * unit


def round_down(value: int, unit: int) -> int:
    """The largest multiple of unit that is not above value."""
    return value // unit * unit


def space_bytes(stored_length_bytes: int) -> int:
    """Device space that an extent takes."""
    return round_up(stored_length_bytes, BLOCK_BYTES)


def frame_bytes(payload_bytes: int) -> int:
    """Device space that a frame takes."""
    return round_up(FRAME_HEADER_BYTES + payload_bytes, BLOCK_BYTES)


def end_superblock_offset(device_size_bytes: int) -> int:
    """Where the second copy of the superblock lies."""
    return round_down(device_size_bytes, BLOCK_BYTES) - BLOCK_BYTES


def plan_regions(device_sizes_bytes: list[int]) -> Plan:
    """Lays out a new volume. REQUIRES: every size at least MIN_DEVICE_BYTES.

    The largest devices (three at most) carry a copy of the metadata each, in front of their data. The only device
    of a volume carries two, before and behind its data, so that an accident at one end leaves the other.
    """
    mirror_count = min(MAX_MIRROR_DEVICES, len(device_sizes_bytes))
    by_size = sorted(range(len(device_sizes_bytes)), key=lambda index: -device_sizes_bytes[index])
    mirrors = set(by_size[:mirror_count])
    smallest_mirror_bytes = min(device_sizes_bytes[index] for index in mirrors)
    lengths_bytes = _metadata_lengths(sum(device_sizes_bytes), smallest_mirror_bytes)
    copies = 2 if len(device_sizes_bytes) == 1 else 1
    regions = tuple(
        _device_regions(size, copies if index in mirrors else 0, lengths_bytes)
        for index, size in enumerate(device_sizes_bytes)
    )
    smallest_data_bytes = min(
        region.length_bytes for table in regions for region in table if region.kind == REGION_DATA
    )
    return Plan(_segment_bytes(smallest_data_bytes), regions)


def _metadata_lengths(volume_bytes: int, smallest_mirror_bytes: int) -> tuple[int, int]:
    """Length of the journal ring and of one snapshot slot.

    The ring holds two rows per MiB of data; more does not help, a large group is committed by a snapshot.
    A slot holds a row and some name bytes per 64 KiB of data. Small devices give a fixed share instead.
    """
    share_bytes = smallest_mirror_bytes // 64
    journal_bytes = max(min(8 * MIB, share_bytes), 2 * EXTENT_ROW_BYTES * volume_bytes // MIB)
    slot_bytes = max(min(32 * MIB, share_bytes), 48 * volume_bytes // (64 * KIB))
    journal_bytes = min(journal_bytes, MAX_JOURNAL_BYTES)
    # Many or unequal devices: what describes the volume may not eat up a small mirror.
    slot_bytes = min(slot_bytes, smallest_mirror_bytes // 8)
    return round_up(max(journal_bytes, MIB), MIB), round_up(max(slot_bytes, MIB), MIB)


def _device_regions(size_bytes: int, copies: int, lengths_bytes: tuple[int, int]) -> tuple[Region, ...]:
    journal_bytes, slot_bytes = lengths_bytes
    start, end = RESERVED_BYTES, round_down(size_bytes, MIB) - RESERVED_BYTES
    regions: list[Region] = []
    for copy in range(copies):
        length = journal_bytes + 2 * slot_bytes
        at = start if copy == 0 else end - length
        for kind, region_bytes in (
            (REGION_JOURNAL, journal_bytes),
            (REGION_SNAPSHOT_A, slot_bytes),
            (REGION_SNAPSHOT_B, slot_bytes),
        ):
            regions.append(Region(kind, copy, at, region_bytes))
            at += region_bytes
        if copy == 0:
            start += length
        else:
            end -= length
    return (*regions, Region(REGION_DATA, 0, start, end - start))


def _segment_bytes(smallest_data_bytes: int) -> int:
    segment_bytes = MAX_SEGMENT_BYTES
    while segment_bytes > MIN_SEGMENT_BYTES and segment_bytes * MIN_SEGMENTS > smallest_data_bytes:
        segment_bytes //= 2
    return segment_bytes
