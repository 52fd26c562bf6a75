"""mkfs: makes what it says, refuses what it must, and an interrupted one leaves no volume."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from ckptfs import cli, mkfs
from ckptfs.device import Device, create_image
from ckptfs.errors import (
    CkptfsError,
    DeviceBusy,
    DeviceFailed,
    DeviceInUse,
    DeviceMissing,
    DeviceTooSmall,
    IncompleteSet,
    MixedVolumes,
    NotAVolume,
    UsageError,
    VolumeDamaged,
)
from ckptfs.layout import MIB
from ckptfs.mkfs import format_devices, make_volume
from ckptfs.recovery import recover
from ckptfs.sizes import format_size, parse_size
from ckptfs.superblock import VolumeDevices, assemble, read_superblock
from tests.volumes import IMAGE_BYTES, MemoryDevice, flip, make_images, opened, overwrite


def _paths(folder: Path, count: int) -> list[str]:
    return [str(folder / f"device{index}.img") for index in range(count)]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_new_volume_can_be_mounted_in_any_order(tmp_path: Path, count: int) -> None:
    paths = make_images(tmp_path, count)
    with opened(paths[::-1]) as (volume, recovered):
        assert [device.path for device in volume.devices] == paths
        assert recovered.problems == []
        assert recovered.namespace.get(1).nlink == 3
        data_bytes = sum(end - start for start, end in volume.data_regions)
        assert recovered.allocator.free_bytes == data_bytes > 0.4 * count * IMAGE_BYTES


def test_devices_may_differ_and_exist_already(tmp_path: Path) -> None:
    paths = _paths(tmp_path, 3)
    create_image(paths[0], 64 * MIB)
    create_image(paths[1], 20 * MIB + 4096)
    superblocks = make_volume(paths[:2], label="münchen")
    assert [superblock.size_bytes for superblock in superblocks] == [64 * MIB, 20 * MIB + 4096]
    with assemble(paths[:2], writable=False, exclusive=False) as volume:
        assert volume.label == "münchen"
        assert volume.superblocks == superblocks


def test_the_command_tells_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["mkfs", "--size", "16M", "--label", "x", "--json", *_paths(tmp_path, 2)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["label"] == "x"
    assert [device["size_bytes"] for device in report["devices"]] == [16 * MIB] * 2
    assert cli.run(["mkfs", "--force", *_paths(tmp_path, 2)]) == 0
    assert "ckptfs mount" in capsys.readouterr().out


def test_every_refusal_is_one_line_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh, taken, volume, small = _paths(tmp_path, 4)
    create_image(taken, IMAGE_BYTES)
    overwrite(taken, 1080, b"\x53\xef")
    make_volume([volume], image_size_bytes=IMAGE_BYTES)
    create_image(small, 8 * MIB)
    before = {path: Path(path).read_bytes() for path in (taken, volume, small)}
    refused: list[tuple[type[CkptfsError], list[str]]] = [
        (DeviceMissing, [fresh]),
        (DeviceInUse, [taken]),
        (DeviceInUse, [volume]),
        (DeviceInUse, ["--size", "16M", fresh, taken]),
        (DeviceTooSmall, [small]),
        (DeviceTooSmall, ["--force", small]),
        (DeviceTooSmall, ["--size", "1M", fresh]),
        (UsageError, ["--size", "16M", fresh, fresh]),
        (UsageError, ["--size", "32M", volume]),
        (UsageError, ["--size", "16X", fresh]),
        (UsageError, ["--label", "x" * 65, "--size", "16M", fresh]),
        (DeviceMissing, ["--size", "16M", str(tmp_path / "no" / "image")]),
        (DeviceMissing, [str(tmp_path)]),
    ]
    for kind, arguments in refused:
        assert cli.run(["mkfs", *arguments]) == kind.exit_status
        message = capsys.readouterr().err
        assert message.startswith("ckptfs: ")
        assert message.count("\n") == 1
        assert not Path(fresh).exists(), "an image was left behind"
    assert before == {path: Path(path).read_bytes() for path in before}


def test_a_volume_that_is_open_is_refused_even_with_force(tmp_path: Path) -> None:
    paths = make_images(tmp_path, 2)
    with opened(paths), pytest.raises(DeviceBusy):
        make_volume(paths, force=True)


def test_hard_and_symbolic_links_to_one_image_are_one_device(tmp_path: Path) -> None:
    path, hard, soft = _paths(tmp_path, 3)
    create_image(path, IMAGE_BYTES)
    Path(hard).hardlink_to(path)
    Path(soft).symlink_to(path)
    for other in (hard, soft):
        with pytest.raises(UsageError):
            make_volume([path, other])


class _Interrupted(Exception):
    pass


class _FailingDevice(MemoryDevice):
    countdown = 1 << 30

    def write(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        if self.countdown <= 0:
            raise _Interrupted
        self.countdown -= 1
        super().write(offset_bytes, data)


def _label(device: Device) -> str | None:
    try:
        return read_superblock(device)[0].label
    except NotAVolume:
        return None


def test_an_interrupted_mkfs_leaves_the_old_volume_or_none_or_the_new() -> None:
    seen = set()
    for index in range(2):
        for countdown in range(1000):
            devices = [_FailingDevice(f"memory{number}") for number in range(2)]
            format_devices(devices, "old")
            devices[index].countdown = countdown
            with contextlib.suppress(_Interrupted):
                format_devices(devices, "new")
            labels = [_label(device) for device in devices]
            seen.add(tuple(labels))
            if None not in labels:
                superblocks = [read_superblock(device)[0] for device in devices]
                assert recover(VolumeDevices([*devices], superblocks), read_only=True).problems == []
            if devices[index].countdown > 0:
                break
    assert ("new", "old") not in seen
    assert ("old", "new") not in seen
    assert seen == {("old", "old"), (None, "old"), (None, None), ("new", None), ("new", "new")}


def test_an_image_that_could_not_become_a_volume_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DeviceFailed("no")

    monkeypatch.setattr(mkfs, "write_first_snapshot", fail)
    with pytest.raises(DeviceFailed):
        make_volume(_paths(tmp_path, 2), image_size_bytes=IMAGE_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_assembling_tells_what_is_wrong(tmp_path: Path) -> None:
    for name in ("one", "other", "small"):
        (tmp_path / name).mkdir()
    one, other = make_images(tmp_path / "one", 3), make_images(tmp_path / "other", 1)
    (blank,) = _paths(tmp_path, 1)
    create_image(blank, IMAGE_BYTES)
    copy = tmp_path / "copy.img"
    copy.write_bytes(Path(one[1]).read_bytes())
    cut_off = tmp_path / "cut.img"
    cut_off.write_bytes(Path(one[1]).read_bytes()[: 8 * MIB])
    cases: list[tuple[type[CkptfsError], list[str], str]] = [
        (IncompleteSet, one[:2], "device 2"),
        (IncompleteSet, one[2:], "device 0, 1"),
        (MixedVolumes, one + other, "name the devices of one volume"),
        (MixedVolumes, [*one, str(copy)], "one is a copy"),
        (MixedVolumes, [one[0], *one], "name each device once"),
        (NotAVolume, [blank], "ckptfs mkfs"),
        (VolumeDamaged, [str(cut_off)], "cut off"),
    ]
    for kind, paths, words in cases:
        with pytest.raises(kind, match=words):
            assemble(paths, writable=True, exclusive=True)
    with opened(one) as (_, recovered):
        assert recovered.problems == []


@pytest.mark.parametrize("offset", [16, IMAGE_BYTES - 4000])
def test_either_superblock_will_do(tmp_path: Path, offset: int) -> None:
    paths = make_images(tmp_path, 2)
    flip(paths[1], offset)
    with opened(paths) as (_, recovered):
        assert [problem.code.value for problem in recovered.problems] == ["superblock-damaged"]
        assert paths[1] in recovered.problems[0].place
    flip(paths[1], 16)
    flip(paths[1], IMAGE_BYTES - 4000)
    if offset == 16:
        return
    with opened(paths) as (_, recovered):
        assert [problem.code.value for problem in recovered.problems] == ["superblock-damaged"]


@pytest.mark.parametrize(
    ("text", "size"), [("4G", 4 << 30), ("512m", 512 << 20), ("1.5TiB", 3 << 39), ("65536", 65536), (" 2 KB", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_sizes_for_people() -> None:
    assert [format_size(size) for size in (0, 1023, 1536, 64 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "64.0 MiB",
        "5.0 TiB",
    ]
