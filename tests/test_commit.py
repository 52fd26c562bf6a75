"""The log: order, grouping, snapshots, and what happens when something breaks."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from ckptfs import commit
from ckptfs.errors import CkptfsError, DeviceFailed, JournalFull
from ckptfs.records import decode_entry
from tests.volume_harness import Images, make_images, trio_test

DATA = b"data" * 50_000


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return make_images(tmp_path)


@trio_test
async def test_a_seal_whose_data_is_late_holds_back_all_that_follows(images: Images) -> None:
    async with images.mount() as mount:
        log = mount.volume.log
        await mount.volume.sync()
        done = log.durable_position
        mount.plane.hold_writes = True
        mount.save("/first", DATA)
        mount.save("/second", DATA)
        mount.mkdir("/third")
        first, second = mount.plane.held_seals
        mount.plane.finish_seal(second)
        await trio.sleep(0.15)
        assert log.durable_position == done
        mount.plane.finish_seal(first)
        await mount.volume.sync()
        assert log.durable_position == log.position == done + 3


@trio_test
async def test_a_waiter_is_served_at_once_and_others_linger(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "LINGER_S", 1.0)
    async with images.mount() as mount:
        begin = time.monotonic()
        mount.mkdir("/a")
        await mount.volume.sync()
        assert time.monotonic() - begin < 0.5
        position = mount.volume.log.durable_position
        mount.mkdir("/b")
        await trio.sleep(0.3)
        assert mount.volume.log.durable_position == position
        mount.volume.log.hurry()
        await trio.sleep(0.3)
        assert mount.volume.log.durable_position == position + 1


@trio_test
async def test_one_group_takes_all_that_is_ready(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    async with images.mount() as mount:
        await mount.volume.sync()
        groups: list[int] = []
        append = mount.volume.log._journal.append

        def count(entries: list[bytes]) -> None:
            groups.append(len(entries))
            append(entries)

        monkeypatch.setattr(mount.volume.log._journal, "append", count)
        for index in range(100):
            mount.mkdir(f"/d{index}")
        await mount.volume.sync()
        assert groups == [100]


@trio_test
async def test_the_data_devices_of_a_group_are_barriered_before_the_journal(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with images.mount() as mount:
        await mount.volume.sync()
        steps: list[str] = []
        journal = mount.volume.log._journal
        append = journal.append

        def spy(entries: list[bytes]) -> None:
            steps.append("journal")
            append(entries)

        monkeypatch.setattr(journal, "append", spy)
        for device in mount.volume.devices.devices:
            monkeypatch.setattr(device, "barrier", lambda: steps.append("barrier"))
        mount.save("/a", bytes(3 << 20))
        await mount.volume.sync()
        assert steps[:3] == ["barrier", "barrier", "journal"]


@trio_test
async def test_a_file_is_one_entry_with_its_create(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    async with images.mount() as mount:
        await mount.volume.sync()
        kinds: list[list[str]] = []
        append = mount.volume.log._journal.append

        def spy(entries: list[bytes]) -> None:
            kinds.extend([type(record).__name__ for record in decode_entry(entry)] for entry in entries)
            append(entries)

        monkeypatch.setattr(mount.volume.log._journal, "append", spy)
        mount.save("/a.tmp", DATA)
        mount.rename("/a.tmp", "/a")
        await mount.volume.sync()
        assert kinds == [["Create", "Seal"], ["Rename"]]


@trio_test
async def test_freed_space_returns_when_the_commit_is_applied(images: Images) -> None:
    async with images.mount() as mount:
        await mount.volume.sync()
        free_bytes = mount.plane.free_bytes
        mount.save("/a", DATA)
        mount.save("/a", DATA)
        await mount.volume.sync()
        used_once = free_bytes - mount.plane.free_bytes
        assert len(DATA) <= used_once < 2 * len(DATA)
        mount.unlink("/a")
        await mount.volume.sync()
        assert mount.plane.free_bytes == free_bytes


@trio_test
async def test_while_a_snapshot_is_written_commits_go_on_and_are_applied_after_it(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        log = mount.volume.log
        mount.save("/a", DATA)
        await log.wait_applied(log.position)
        position = log._freeze()
        mount.save("/b", DATA)
        mount.unlink("/a")
        await mount.volume.sync()
        assert mount.volume.is_durable(mount.ino("/b"))
        assert log.durable_position == log.position > log.applied_position
        assert mount.load("/b") == DATA
        await log._snapshot(position)
        assert log.applied_position == log.position
        assert mount.ino("/b") not in mount.plane.files
    async with images.mount() as mount:
        assert mount.names() == {"b"}


@trio_test
async def test_snapshots_come_when_the_journal_fills(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        for index in range(400):
            mount.mkdir(f"/{index:03}{'x' * 240}")
            if index % 20 == 0:
                await mount.volume.sync()
        await mount.volume.sync()
        while mount.volume.log.journal_used_fraction > commit.SNAPSHOT_AT_USED_FRACTION:
            await trio.sleep(0.01)
        names = mount.names()
    async with images.mount() as mount:
        assert mount.names() == names and len(names) == 400


@trio_test
async def test_a_group_that_fits_no_journal_is_committed_by_a_snapshot(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with images.mount(clean=False) as mount:
        mount.save("/a", DATA)
        await mount.volume.sync()

        def full(entries: list[bytes]) -> None:
            raise JournalFull(f"{len(entries)} entries do not fit")

        monkeypatch.setattr(mount.volume.log._journal, "append", full)
        free_bytes = mount.plane.free_bytes
        mount.save("/b", DATA)
        mount.unlink("/a")
        await mount.volume.sync()
        assert mount.volume.is_durable(mount.ino("/b"))
        assert mount.plane.free_bytes == free_bytes
    async with images.mount() as mount:
        assert mount.names() == {"b"} and mount.load("/b") == DATA


@trio_test
async def test_an_open_unlinked_file_does_not_come_back_with_a_snapshot(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        ino = mount.save("/a", DATA)
        await mount.volume.sync()
        mount.volume.open(ino, writable=False)
        mount.unlink("/a")
        await mount.volume.drain()
        mount.volume.close(ino, writable=False)
        mount.save("/b", DATA)
        await mount.volume.sync()
    async with images.mount() as mount:
        assert ino not in mount.volume.live.inodes
        assert mount.load("/b") == DATA


@trio_test
async def test_lost_data_breaks_the_log_there_and_keeps_what_was_before(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.plane.hold_writes = True
        mount.save("/before", DATA)
        mount.save("/lost", DATA)
        mount.mkdir("/after")
        before, lost = mount.plane.held_seals
        mount.plane.finish_seal(lost, errno.EIO)
        mount.plane.finish_seal(before)
        with pytest.raises(CkptfsError, match="no device took"):
            await mount.volume.sync()
        assert mount.volume.is_durable(mount.ino("/before"))
        assert mount.volume.state(mount.ino("/lost")) == "failed"
        assert {mount.volume.names.path(ino) for ino in mount.volume.undurable()} >= {"/lost", "/after"}
        await trio.testing.wait_all_tasks_blocked()
        assert mount.plane.refused == errno.EROFS
        with pytest.raises(CkptfsError) as refused:
            mount.mkdir("/more")
        assert refused.value.errno == errno.EROFS
    async with images.mount() as mount:
        assert mount.names() == {"before"}


@trio_test
async def test_a_journal_that_heals_is_waited_for(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "JOURNAL_RETRY_S", 0.05)
    async with images.mount() as mount:
        await mount.volume.sync()
        journal = mount.volume.log._journal
        append, failures = journal.append, [1, 2, 3]

        def flaky(entries: list[bytes]) -> None:
            if failures:
                failures.pop()
                raise DeviceFailed("not now")
            append(entries)

        monkeypatch.setattr(journal, "append", flaky)
        mount.save("/a", DATA)
        await mount.volume.sync()
        assert mount.volume.is_durable(mount.ino("/a"))


@trio_test
async def test_a_failed_barrier_breaks_the_log(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    async with images.mount(clean=False) as mount:
        await mount.volume.sync()

        def fail() -> None:
            raise DeviceFailed("the barrier failed")

        for device in mount.volume.devices.devices:
            monkeypatch.setattr(device, "barrier", fail)
        mount.save("/a", DATA)
        with pytest.raises(DeviceFailed, match="the barrier failed"):
            await mount.volume.sync()
        assert mount.volume.state(mount.ino("/a")) == "failed"


@trio_test
async def test_no_room_waits_for_the_frees_in_the_log(images: Images) -> None:
    async with images.mount() as mount:
        mount.save("/a", DATA)
        mount.unlink("/a")
        applied = mount.volume.log.position
        await mount.volume.space.resolve_no_room(mount.volume.log)
        assert mount.plane.room_expired == 1
        assert mount.volume.log.applied_position >= applied
