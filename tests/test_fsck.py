"""fsck, inspect and export on volumes that are not mounted: whole ones, and ones with a known damage."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs import cli, fsck
from ckptfs import problems as problem_table
from ckptfs.checks import Checker
from ckptfs.errors import ProblemCode
from ckptfs.extents import Row, pack
from ckptfs.layout import BLOCK_BYTES, MIB
from ckptfs.namespace import Namespace
from ckptfs.records import Create, Link, Mount, SetAttributes, SetXattr, apply_entry
from ckptfs.snapshot import write_snapshot
from ckptfs.superblock import assemble
from tests.volumes import IMAGE_BYTES, append, create, flip, make_images, memory_volume, opened, overwrite, store

CONTENT = os.urandom(150_000)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two devices with /models/a.pt (on device 0), /models/b.pt (on 1, and also /latest), /s -> models."""
    paths = make_images(tmp_path, 2)
    with opened(paths) as (volume, recovered):
        append(recovered, Mount(recovered.epoch, 1))
        append(recovered, create(3, b"models", mode=stat.S_IFDIR | 0o750))
        append(recovered, create(4, b"a.pt", parent=3), store(volume, 4, CONTENT))
        append(recovered, create(5, b"b.pt", parent=3), store(volume, 5, CONTENT[::-1], device_index=1, at=MIB))
        append(recovered, Link(5, 1, b"latest", 6))
        append(recovered, Create(1, b"s", 6, stat.S_IFLNK | 0o777, 0, 0, 0, b"models", None, 1, 2, 3, 4))
        append(recovered, SetXattr(4, b"user.note", b"\x00best", 7), SetAttributes(4, 0o640, None, None, 5, 6, 7))
    return paths


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = cli.run([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def _problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    status, report = _json(capsys, "fsck", *arguments)
    return status, report["problems"]


def _data_start(paths: list[str], device_index: int) -> int:
    with assemble(paths, writable=False, exclusive=False) as volume:
        return volume.data_regions[device_index][0]


def _journal_start(paths: list[str], device_index: int) -> int:
    with assemble(paths, writable=False, exclusive=False) as volume:
        return volume.superblocks[device_index].regions[0].offset_bytes


def test_a_whole_volume_is_clean(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = [Path(path).read_bytes() for path in paths]
    assert _problems(capsys, "--data", *paths) == (0, [])
    assert cli.run(["fsck", *paths]) == 0
    assert "clean" in capsys.readouterr().out
    assert [Path(path).read_bytes() for path in paths] == before


def test_a_flipped_byte_of_data_is_named(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    offset = _data_start(paths, 1) + MIB
    flip(paths[1], offset + 70_000)
    assert _problems(capsys, *paths) == (0, [])
    status, (problem,) = _problems(capsys, "--data", *paths)
    assert status == 4
    assert problem["code"] == "extent-checksum"
    assert sorted(problem["paths"]) == ["/latest", "/models/b.pt"]
    assert (problem["file_offset_bytes"], problem["device"], problem["device_offset_bytes"]) == (0, paths[1], offset)
    assert cli.run(["fsck", "--data", *paths]) == 4
    shown = capsys.readouterr().out
    for word in ("/models/b.pt", paths[1], str(offset), "repair", "1 problem"):
        assert word in shown


@pytest.mark.parametrize("device_index", [0, 1])
@pytest.mark.parametrize("offset", [20, IMAGE_BYTES - 4096])
def test_a_damaged_superblock_is_named(
    paths: list[str], device_index: int, offset: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(paths[device_index], offset)
    status, (problem,) = _problems(capsys, *paths)
    assert (status, problem["code"]) == (4, "superblock-damaged")
    assert paths[device_index] in problem["place"]


def test_damage_of_the_journal_is_named(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    last = 6 * BLOCK_BYTES + 100
    flip(paths[0], _journal_start(paths, 0) + last)
    status, (problem,) = _problems(capsys, *paths)
    assert (status, problem["code"]) == (4, "journal-mirror-damaged")
    flip(paths[1], _journal_start(paths, 1) + last)
    status, (problem,) = _problems(capsys, *paths)
    assert (status, problem["code"]) == (4, "journal-tail-torn")
    for index in range(2):
        flip(paths[index], _journal_start(paths, index) + 2 * BLOCK_BYTES + 5000)
        flip(paths[index], _journal_start(paths, index) + 2 * BLOCK_BYTES + 100)
    status, found = _problems(capsys, *paths)
    assert status == 4
    assert [problem["code"] for problem in found] == ["journal-damaged"]


def test_a_mirror_that_a_crash_left_behind_is_a_note(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    overwrite(paths[1], _journal_start(paths, 1) + 6 * BLOCK_BYTES, bytes(BLOCK_BYTES))
    status, (problem,) = _problems(capsys, *paths)
    assert (status, problem["code"], problem["severity"]) == (0, "journal-mirror-behind", "note")


def test_a_damaged_snapshot_is_named(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with opened(paths) as (volume, recovered):
        write_snapshot(
            volume.devices, volume.superblocks, recovered.namespace, recovered.epoch, recovered.journal.position
        )
        place = volume.superblocks[0].regions[2].offset_bytes
    flip(paths[0], place + BLOCK_BYTES + 200)
    status, (problem,) = _problems(capsys, *paths)
    assert (status, problem["code"]) == (4, "snapshot-damaged")


def test_a_volume_without_any_snapshot_is_beyond_checking(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in paths:
        overwrite(path, 2 * MIB, b"\xff" * 2 * MIB)
    assert cli.run(["fsck", *paths]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_what_cannot_be_checked_is_an_operational_error(
    paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blank").write_bytes(bytes(MIB))
    for arguments in ([paths[0]], [str(tmp_path / "none")], [str(tmp_path / "blank")]):
        assert cli.run(["fsck", *arguments]) == 8
        assert capsys.readouterr().err.count("\n") == 1
    with opened(paths):
        assert cli.run(["fsck", *paths]) == 8
        assert f"process {os.getpid()}" in capsys.readouterr().err
    assert cli.run(["fsck"]) == 16
    assert cli.run(["fsck", "--repair", *paths]) == 16


def _broken(damage: Callable[[Namespace], object]) -> list[ProblemCode]:
    volume = memory_volume(1)
    namespace = Namespace.fresh(1)
    apply_entry(namespace, [create(3, b"d", mode=stat.S_IFDIR | 0o755), create(4, b"f", parent=3), create(5, b"g")])
    namespace.get(4).rows = pack([Row(0, 100, 0, 0, 0, 100, 6 * MIB, 1)])
    namespace.get(4).size_bytes = 100
    assert list(Checker(volume, namespace).check_namespace()) == []
    damage(namespace)
    return [problem.code for problem in Checker(volume, namespace).check_namespace()]


def _set(namespace: Namespace, ino: int, **fields: object) -> None:
    for name, value in fields.items():
        setattr(namespace.get(ino), name, value)


def _row(offset: int, length: int, device_offset: int, device: int = 0) -> bytes:
    return pack([Row(offset, length, 0, device, 0, length, device_offset, 1)])


P = ProblemCode
DAMAGES: list[tuple[Callable[[Namespace], object], list[ProblemCode]]] = [
    (lambda n: n.directory(1).update({b"x": 99}), [P.DENTRY_DANGLING]),
    (lambda n: n.directory(1).update({b"x": 4}), [P.LINK_COUNT]),
    (lambda n: _set(n, 5, nlink=2), [P.LINK_COUNT]),
    (lambda n: _set(n, 3, nlink=3), [P.LINK_COUNT]),
    (lambda n: n.directory(1).update({b"x": 3}), [P.DIRECTORY_TWICE, P.LINK_COUNT]),
    (lambda n: _set(n, 3, parent=2), [P.DIRECTORY_PARENT]),
    (lambda n: n.directory(1).pop(b"g"), [P.INODE_ORPHAN, P.LINK_COUNT]),
    (lambda n: n.directory(1).pop(b"d"), [P.LINK_COUNT, P.INODE_ORPHAN, P.INODE_ORPHAN]),
    (lambda n: setattr(n.get(5), "ino", 6), [P.LINK_COUNT, P.INODE_NUMBER]),
    (lambda n: setattr(n, "next_ino", 5), [P.INODE_NUMBER]),
    (lambda n: _set(n, 5, target=b"x"), [P.INODE_KIND]),
    (lambda n: _set(n, 5, mode=0o644), [P.INODE_KIND]),
    (lambda n: _set(n, 2, parent=3), [P.ROOT_MISSING, P.DIRECTORY_PARENT]),
    (lambda n: _set(n, 4, rows=b"x"), [P.ROWS_INVALID]),
    (lambda n: _set(n, 4, size_bytes=99), [P.ROWS_BEYOND_SIZE]),
    (lambda n: _set(n, 4, rows=_row(0, 100, MIB)), [P.EXTENT_OUTSIDE]),
    (lambda n: _set(n, 4, rows=_row(0, 100, 6 * MIB, device=1)), [P.EXTENT_OUTSIDE]),
    (lambda n: _set(n, 4, rows=_row(0, 100, IMAGE_BYTES - BLOCK_BYTES)), [P.EXTENT_OUTSIDE]),
    (lambda n: _set(n, 5, rows=_row(0, 100, 6 * MIB), size_bytes=100), [P.EXTENT_OVERLAP]),
    (lambda n: _set(n, 5, rows=_row(0, 9000, 6 * MIB - 8192), size_bytes=9000), [P.EXTENT_OVERLAP]),
]


@pytest.mark.parametrize(("damage", "codes"), DAMAGES)
def test_every_damage_of_the_namespace_is_found(
    damage: Callable[[Namespace], object], codes: list[ProblemCode]
) -> None:
    assert _broken(damage) == codes


def test_the_table_says_of_every_problem_what_repair_would_do() -> None:
    for code, entry in problem_table.TABLE.items():
        assert entry.title, code
        assert entry.repair, code


def test_inspect_superblock_works_on_one_device_of_many(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flip(paths[1], 20)
    status, (report,) = _json(capsys, "inspect", "superblock", paths[1])
    assert status == 0
    assert report["superblock"]["device_index"] == 1
    assert report["problems"][0]["code"] == "superblock-damaged"
    assert cli.run(["inspect", "superblock", *paths]) == 0
    assert report["superblock"]["volume_uuid"] in capsys.readouterr().out


def test_inspect_journal_shows_the_records(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, report = _json(capsys, "inspect", "journal", *paths)
    assert status == 0
    records = [record["record"] for group in report["groups"] for entry in group["entries"] for record in entry]
    assert records[:4] == ["Mount", "Create", "Create", "Seal"]
    assert report["groups"][2]["entries"][0][1]["row_count"] == 1
    assert [slot.get("generation") for slot in report["snapshots"]] == [1, None, 1, None]
    for index in range(2):
        flip(paths[index], _journal_start(paths, index) + 3 * BLOCK_BYTES + 100)
    status, report = _json(capsys, "inspect", "journal", *paths)
    assert (len(report["groups"]), len(report["later"])) == (3, 6)
    assert cli.run(["inspect", "journal", *paths]) == 0
    assert "damaged before group" in capsys.readouterr().out


def test_inspect_tree(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, report = _json(capsys, "inspect", "tree", *paths)
    assert sorted(item["path"] for item in report) == [
        "/",
        "/latest",
        "/lost+found",
        "/models",
        "/models/a.pt",
        "/models/b.pt",
        "/s",
    ]
    _, report = _json(capsys, "inspect", "tree", "--path", "/models", *paths)
    assert [item["path"] for item in report] == ["/models", "/models/a.pt", "/models/b.pt"]
    assert cli.run(["inspect", "tree", *paths]) == 0
    assert "/s -> models" in capsys.readouterr().out


def test_inspect_extents(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, report = _json(capsys, "inspect", "extents", "/latest", *paths)
    assert [device["allocated_bytes"] for device in report["devices"]] == [0, 151552]
    (row,) = report["extents"]
    assert (row["device_index"], row["device_offset_bytes"]) == (1, _data_start(paths, 1) + MIB)
    assert cli.run(["inspect", "extents", "/latest", *paths]) == 0
    assert row["checksum"] in capsys.readouterr().out
    assert cli.run(["inspect", "extents", "/models", *paths]) == 2
    assert cli.run(["inspect", "extents", "/nowhere", *paths]) == 1


def test_inspect_space(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, report = _json(capsys, "inspect", "space", *paths)
    assert [device["data_bytes"] - device["free_bytes"] for device in report["devices"]] == [151552, 151552]
    assert cli.run(["inspect", "space", *paths]) == 0


def test_export_brings_everything_back(paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [Path(path).read_bytes() for path in paths]
    target = tmp_path / "out"
    status, report = _json(capsys, "export", *paths, "--to", str(target))
    assert (status, report["file_count"], report["failed"]) == (0, 3, [])
    status_a = (target / "models/a.pt").stat()
    assert (target / "models/a.pt").read_bytes() == CONTENT
    assert (target / "latest").read_bytes() == CONTENT[::-1]
    assert (target / "latest").samefile(target / "models/b.pt")
    assert os.readlink(target / "s") == "models"
    assert (stat.S_IMODE(status_a.st_mode), status_a.st_atime_ns, status_a.st_mtime_ns) == (0o640, 5, 6)
    assert stat.S_IMODE((target / "models").stat().st_mode) == 0o750
    assert [Path(path).read_bytes() for path in paths] == before


def test_export_of_one_path_and_nothing_is_overwritten(
    paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert cli.run(["export", *paths, "--to", str(target), "--path", "/models/a.pt"]) == 0
    assert [path.name for path in target.iterdir()] == ["a.pt"]
    assert cli.run(["export", *paths, "--to", str(target), "--path", "models/a.pt"]) == 1
    assert "exists" in capsys.readouterr().out
    assert cli.run(["export", *paths, "--to", str(target), "--path", "/models"]) == 0
    assert sorted(path.name for path in (target / "models").iterdir()) == ["a.pt", "b.pt"]


def test_export_leaves_no_file_with_wrong_bytes(
    paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(paths[0], _data_start(paths, 0) + 5)
    target = tmp_path / "out"
    status, report = _json(capsys, "export", *paths, "--to", str(target))
    assert status == 1
    assert [item["path"] for item in report["failed"]] == ["models/a.pt"]
    assert "checksum" in report["failed"][0]["error"]
    assert not (target / "models/a.pt").exists()
    assert (target / "models/b.pt").read_bytes() == CONTENT[::-1]


def test_export_keeps_holes(tmp_path: Path) -> None:
    paths = make_images(tmp_path, 1)
    with opened(paths) as (volume, recovered):
        seal = store(volume, 3, b"tail")
        (row,) = [Row(5000, 4, 0, 0, 0, 4, volume.data_regions[0][0], int.from_bytes(seal.rows[32:40], "little"))]
        sparse = seal.__class__(3, 9000, 5, 5, 0, pack([row]))
        append(recovered, Mount(recovered.epoch, 1))
        append(recovered, create(3, b"f"), sparse)
    assert cli.run(["export", *paths, "--to", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/f").read_bytes() == bytes(5000) + b"tail" + bytes(3996)


def test_the_check_can_be_called_from_python(paths: list[str]) -> None:
    report = fsck.check(paths, data=True)
    assert report.is_clean
    assert (report.device_count, report.data_bytes, report.inode_count) == (2, 300_000, 6)
