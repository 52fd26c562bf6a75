"""Devices: image files stand for them; block devices are tried where loop devices can be made."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptfs import device as device_module
from ckptfs.device import MAX_TRANSFER_BYTES, Device, create_image, foreign_signature, is_mounted
from ckptfs.errors import DeviceBusy, DeviceFailed, DeviceMissing, UsageError
from ckptfs.layout import BLOCK_BYTES, MIB


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = str(tmp_path / "image")
    create_image(path, 16 * MIB)
    return path


def test_reads_may_have_any_alignment(image: str) -> None:
    content = os.urandom(MAX_TRANSFER_BYTES + 3 * BLOCK_BYTES)
    with Device.open(image, writable=True, exclusive=True) as device:
        device.write(BLOCK_BYTES, content)
        device.barrier()
        for start, length in [
            (0, 1),
            (1, 1),
            (4095, 2),
            (100, 9000),
            (0, len(content)),
            (5, MAX_TRANSFER_BYTES + 8000),
        ]:
            assert device.read(BLOCK_BYTES + start, length) == content[start : start + length]
        assert device.read(0, 0) == b""
        device.zero(BLOCK_BYTES, len(content))
        assert device.read(BLOCK_BYTES, len(content)) == bytes(len(content))
        with pytest.raises(DeviceFailed):
            device.read(16 * MIB - 10, 20)
        with pytest.raises(AssertionError):
            device.write(512, bytes(BLOCK_BYTES))


def test_buffered_where_direct_is_refused(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_direct_read_works", lambda fd: fd < 0)
    with Device.open(image, writable=True, exclusive=True) as device:
        assert not device.direct
        device.write(0, b"x" * BLOCK_BYTES)
        assert device.read(1, 3) == b"xxx"


def test_one_writer_or_many_readers(image: str) -> None:
    with Device.open(image, writable=True, exclusive=True):
        for exclusive in (True, False):
            with pytest.raises(DeviceBusy, match=f"process {os.getpid()}"):
                Device.open(image, writable=False, exclusive=exclusive)
    with (
        Device.open(image, writable=False, exclusive=False),
        Device.open(image, writable=False, exclusive=False) as device,
    ):
        with pytest.raises(DeviceBusy):
            Device.open(image, writable=True, exclusive=True)
        with pytest.raises(DeviceFailed):
            device.write(0, bytes(BLOCK_BYTES))


def test_what_cannot_be_a_device(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, Path("/dev/null")):
        with pytest.raises(DeviceMissing, match=str(path)):
            Device.open(str(path), writable=False, exclusive=False)


def test_images_are_laid_out_or_not_made_at_all(tmp_path: Path, image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.stat(image).st_blocks * 512 >= 16 * MIB
    with pytest.raises(UsageError):
        create_image(image, MIB)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = tmp_path / "too large"
    with pytest.raises(DeviceFailed, match="No space left"):
        create_image(str(path), MIB)
    assert not path.exists()


@pytest.mark.parametrize(
    ("offset", "magic", "name"),
    [
        (1080, b"\x53\xef", "ext2/3/4"),
        (0, b"XFSB", "XFS"),
        (65600, b"_BHRfS_M", "Btrfs"),
        (4086, b"SWAPSPACE2", "swap"),
        (512, b"LABELONE", "LVM2"),
        (4096, b"\xfc\x4e\x2b\xa9", "RAID"),
        (16 * MIB - 8192, b"\xfc\x4e\x2b\xa9", "RAID"),
        (16 * MIB - 65536, b"\xfc\x4e\x2b\xa9", "RAID"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (512, b"EFI PART", "GPT"),
        (131072 + 5 * 1024, b"\x0c\xb1\xba\x00\x00\x00\x00\x00", "ZFS"),
        (446, b"\x80\x00\x00\x00\x83" + bytes(59) + b"\x55\xaa", "MBR"),
    ],
)
def test_what_others_left_is_known(image: str, offset: int, magic: bytes, name: str) -> None:
    with open(image, "r+b") as file:
        file.seek(offset)
        file.write(magic)
    with Device.open(image, writable=False, exclusive=False) as device:
        assert name in (foreign_signature(device) or "")


def test_an_empty_device_is_free(image: str) -> None:
    assert is_mounted(image) is None
    with Device.open(image, writable=False, exclusive=False) as device:
        assert foreign_signature(device) is None
        assert device.is_same(image)
        assert not device.is_same("/dev/null")
