"""Golden bytes: what docs/format.md says of the bytes on the devices, down to the last one.

If a test here has to change, the format has changed: raise FORMAT_VERSION or set a feature bit.
"""

from __future__ import annotations

import uuid

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptfs import layout
from ckptfs.errors import NotAVolume, UnsupportedFormat, VolumeDamaged
from ckptfs.extents import Row, pack
from ckptfs.frames import FrameWriter, frames_bytes, is_intact, read_header
from ckptfs.layout import BLOCK_BYTES, GIB, MIB, REGION_DATA, REGION_JOURNAL, Region, plan_regions
from ckptfs.records import Create, Mount, Rename, Seal, SetAttributes, encode_entry
from ckptfs.superblock import Superblock

SUPERBLOCK = Superblock(
    volume_uuid=uuid.UUID("00112233-4455-6677-8899-aabbccddeeff"),
    device_uuid=uuid.UUID("0f0e0d0c-0b0a-0908-0706-050403020100"),
    device_index=1,
    device_count=3,
    label="lab",
    size_bytes=64 * MIB,
    segment_bytes=4 * MIB,
    created_ns=0x1122334455667788,
    regions=(Region(REGION_JOURNAL, 0, MIB, 2 * MIB), Region(REGION_DATA, 0, 8 * MIB, 55 * MIB)),
)


def test_a_superblock() -> None:
    block = SUPERBLOCK.encode()
    fields = (
        "434b505446530d0a 01000000 00100000 0000000000000000 0000000000000000 0000000000000000"
        "00112233445566778899aabbccddeeff 0f0e0d0c0b0a09080706050403020100"
        "0100 0300 02000000 0000000400000000 0000400000000000 8877665544332211"
        "6c6162" + 61 * "00"
    )
    table = "0100 0000 00000000 0000100000000000 00002000000000000400 0000 00000000 0000800000000000 0000700300000000"
    head = bytes.fromhex(fields + table)
    assert block[: len(head)] == head
    assert block[len(head) : -8] == bytes(BLOCK_BYTES - len(head) - 8)
    assert block[-8:] == xxhash.xxh3_64_intdigest(block[:-8]).to_bytes(8, "little")
    assert block[-8:].hex() == "28cfc1fd78257b32"
    assert Superblock.decode(block) == SUPERBLOCK


def test_a_superblock_that_is_not_ours_is_told() -> None:
    block = bytearray(SUPERBLOCK.encode())
    block[200] ^= 1
    with pytest.raises(VolumeDamaged):
        Superblock.decode(bytes(block))
    with pytest.raises(NotAVolume):
        Superblock.decode(bytes(BLOCK_BYTES))
    for unknown in ({"format_version": 2}, {"incompat": 1 << 40}):
        with pytest.raises(UnsupportedFormat):
            Superblock.decode(Superblock(**{**SUPERBLOCK.__dict__, **unknown}).encode())
    assert Superblock.decode(Superblock(**{**SUPERBLOCK.__dict__, "compat": 5}).encode()).compat == 5


def test_a_frame() -> None:
    writer = FrameWriter(layout.JOURNAL_MAGIC, bytes(range(16)), 2, 3, 4096, 0x0102030405060708, attempt=5)
    first = writer.frame(b"ab", last=False)
    second = writer.frame(b"", last=True)
    head = bytes.fromhex(
        "434b50544a524e4c 000102030405060708090a0b0c0d0e0f 0200000000000000 0300000000000000 0010000000000000"
        "00000000 05000000 02000000 00000000 0807060504030201"
    )
    assert first[:72] == head
    checksum = xxhash.xxh3_64_intdigest(head + b"ab").to_bytes(8, "little")
    assert first[72:80] == checksum
    assert checksum.hex() == "c37f1224d3f7e282"
    assert first[80:] == b"ab" + bytes(4096 - 82)
    assert second[40:72] == bytes.fromhex("0020000000000000 01000000 05000000 00000000 01000000") + checksum
    for raw in (first, second):
        header = read_header(raw, layout.JOURNAL_MAGIC, bytes(range(16)))
        assert header is not None
        assert is_intact(header, raw)
        assert not is_intact(header, raw[:20] + b"\xff" + raw[21:])


@given(st.integers(0, 4 * layout.MAX_FRAME_PAYLOAD_BYTES))
def test_the_space_of_frames_is_known_beforehand(payload_bytes: int) -> None:
    writer = FrameWriter(layout.JOURNAL_MAGIC, bytes(16), 0, 0, 0, 0)
    frames = list(writer.frames(bytes(payload_bytes)))
    assert sum(map(len, frames)) == frames_bytes(payload_bytes) == writer.offset_bytes
    assert all(len(frame) <= layout.MAX_FRAME_BYTES and len(frame) % BLOCK_BYTES == 0 for frame in frames)


def test_an_extent_row() -> None:
    row = pack([Row(1 << 33, 100, 5, 2, 0, 105, 1 << 40, 0xFEDCBA9876543210)])
    assert row == bytes.fromhex(
        "0000000002000000 64000000 05000000 0200 0000 69000000 0000000000010000 1032547698badcfe"
    )


def test_a_log_entry() -> None:
    entry = encode_entry(
        [
            Create(1, b"f", 3, 0o100644, 0, 0, 0, None, {b"user.k": b"v"}, 1, 2, 3, 4),
            Seal(3, 300, 5, 6, 0, b"\xaa"),
            Rename(1, b"f", 1, b"g", 0, 7),
            SetAttributes(3, None, 1, None, None, -1, 8),
            Mount(1, 9),
        ]
    )
    assert entry.hex(" ") == (
        "95"
        " 9e 01 01 c4 01 66 03 cd 81 a4 00 00 00 c0 81 c4 06 75 73 65 72 2e 6b c4 01 76 01 02 03 04"
        " 97 09 03 cd 01 2c 05 06 00 c4 01 aa"
        " 97 05 01 c4 01 66 01 c4 01 67 00 07"
        " 98 06 03 c0 01 c0 c0 ff 08"
        " 93 0a 01 09"
    )


@pytest.mark.parametrize(
    "sizes",
    [
        [16 * MIB],
        [64 * MIB],
        [64 * MIB + 12288] * 2,
        [GIB] * 4,
        [4 * GIB] * 5,
        [1024 * GIB] * 8,
        [2 * GIB, 64 * MIB, 100 * GIB, 16 * MIB],
        [16 * MIB] * 256,
    ],
)
def test_regions_fit_and_do_not_overlap(sizes: list[int]) -> None:
    plan = plan_regions(sizes)
    assert plan.segment_bytes % MIB == 0
    mirrors = 0
    lengths = set()
    for size, regions in zip(sizes, plan.regions, strict=True):
        at = layout.RESERVED_BYTES
        for region in sorted(regions, key=lambda region: region.offset_bytes):
            assert region.offset_bytes == at
            assert region.length_bytes > 0
            assert region.length_bytes % MIB == 0
            at = region.end_bytes
        assert at <= layout.end_superblock_offset(size)
        (data,) = (region for region in regions if region.kind == REGION_DATA)
        assert data.length_bytes >= size * 0.45
        assert data.length_bytes >= plan.segment_bytes
        mirrors += sum(region.kind == REGION_JOURNAL for region in regions)
        lengths |= {(region.kind, region.length_bytes) for region in regions if region.kind != REGION_DATA}
    assert mirrors == (2 if len(sizes) == 1 else min(3, len(sizes)))
    assert len(lengths) == 3, "all mirrors have regions of one length"
