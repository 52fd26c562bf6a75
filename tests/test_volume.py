"""The volume without FUSE, on a data plane in memory: versions, names and what a crash leaves of them (P3, P4)."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest
import trio

from ckptfs.constants import LOST_AND_FOUND_INO, RENAME_EXCHANGE, RENAME_NOREPLACE
from ckptfs.errors import CkptfsError
from ckptfs.snapshot import metadata_bytes
from ckptfs.volume import AttributeChange
from tests.volume_harness import ROOT, Images, Mounted, make_images, trio_test

BIG = bytes(range(256)) * 512  # 128 KiB in one write: no log
OLD, NEW = b"old" * 50_000, b"newer" * 60_000


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return make_images(tmp_path)


def refused(error: int) -> pytest.RaisesExc[CkptfsError]:
    return pytest.RaisesExc(CkptfsError, check=lambda raised: raised.errno == error)


@trio_test
async def test_a_saved_file_survives_a_clean_end(images: Images) -> None:
    async with images.mount() as mount:
        mount.save("/a", BIG)
        assert mount.load("/a") == BIG
    async with images.mount() as mount:
        assert mount.load("/a") == BIG
        assert mount.volume.state(mount.ino("/a")) == "durable"


@trio_test
async def test_a_saved_file_survives_a_crash_after_wait(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.save("/a", BIG)
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.load("/a") == BIG


@trio_test
async def test_a_file_that_was_never_sealed_is_not_there_after_a_crash(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.write(mount.create("/torn"), BIG)
        mount.mkdir("/after")
        await mount.volume.sync()
        assert mount.exists("/torn")
    async with images.mount() as mount:
        assert mount.names() == {"after"}


@trio_test
async def test_an_overwrite_keeps_the_old_content_until_it_is_sealed(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.save("/a", OLD)
        ino = mount.ino("/a")
        mount.volume.open(ino, writable=True, truncate=True, pid=1)
        mount.write(ino, NEW)
        await mount.volume.sync()
        assert mount.plane.read(ino) == NEW
    async with images.mount(clean=False) as mount:
        assert mount.load("/a") == OLD
        mount.save("/a", NEW)
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.load("/a") == NEW


@trio_test
async def test_attributes_of_an_unsealed_file_go_with_its_seal(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        ino = mount.create("/a")
        change = AttributeChange(mode=0o600, uid=7, gid=8, mtime_ns=123_456_789_012)
        mount.volume.set_attributes(ino, change, pid=1, by_handle=True)
        mount.volume.set_xattr(ino, b"user.note", b"text")
        await mount.volume.sync()
        assert ino not in mount.volume.log.durable.inodes
        mount.close(ino)
        await mount.volume.sync()
    async with images.mount() as mount:
        found = mount.volume.attributes(mount.ino("/a"))
        assert (stat.S_IMODE(found.mode), found.uid, found.gid, found.mtime_ns) == (0o600, 7, 8, 123_456_789_012)
        assert mount.volume.get_xattr(found.ino, b"user.note") == b"text"


@trio_test
async def test_only_a_flush_of_a_writer_seals(images: Images) -> None:
    async with images.mount() as mount:
        ino = mount.create("/a", pid=1)
        mount.write(ino, BIG, pid=1)
        mount.flush(ino, pid=2)
        assert mount.volume.state(ino) == "incomplete"
        mount.close(ino, pid=1)
        await mount.volume.sync()
        assert mount.volume.state(ino) == "durable"


@trio_test
async def test_a_killed_writer_of_a_new_name_leaves_no_name(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.mkdir("/d")
        ino = mount.create("/d/torn")
        mount.write(ino, BIG)
        mount.close(ino, dying=True)
        assert mount.names("/d") == set()
        assert [(killed.path, killed.kept_as) for killed in mount.volume.files.killed] == [
            ("/d/torn", f"/lost+found/torn.{ino}")
        ]
        assert {stale.ino for stale in mount.volume.files.stale} == {ino, mount.ino("/d"), LOST_AND_FOUND_INO}
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.names("/d") == set()
        assert mount.load(f"/lost+found/torn.{ino}") == BIG


@trio_test
async def test_a_killed_overwriter_leaves_the_old_content(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.save("/a", OLD)
        before = mount.volume.attributes(mount.ino("/a"))
        ino = before.ino
        mount.volume.open(ino, writable=True, truncate=True, pid=1)
        mount.write(ino, BIG)
        mount.close(ino, dying=True)
        assert mount.load("/a") == OLD
        assert mount.volume.attributes(ino)._replace(settled=True) == before
        (killed,) = mount.volume.files.killed
        assert killed.path == "/a" and killed.kept_as is not None
        assert mount.load(killed.kept_as) == BIG
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.load("/a") == OLD
        assert mount.load(killed.kept_as) == BIG


@trio_test
async def test_a_killed_creator_that_wrote_nothing_leaves_nothing(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        ino = mount.create("/empty", append=False)
        mount.plane.files[ino].largest_write_bytes = 1 << 20  # not a log
        mount.close(ino, dying=True)
        assert mount.names() == set() and mount.volume.list_directory(LOST_AND_FOUND_INO)[2:] == []
        assert ino not in mount.plane.files and ino not in mount.volume.live.inodes
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.names() == set()


@trio_test
async def test_a_killed_writer_beside_one_that_lives_changes_nothing(images: Images) -> None:
    async with images.mount() as mount:
        ino = mount.create("/a", pid=1)
        mount.volume.open(ino, writable=True)
        mount.write(ino, BIG, pid=2)
        mount.close(ino, pid=2, dying=True)
        assert mount.names() == {"a"}
        mount.write(ino, OLD, pid=1)
        mount.close(ino, pid=1)
        assert mount.load("/a") == OLD and not mount.volume.files.killed


@trio_test
async def test_a_killed_writer_of_a_log_seals_it_as_it_stands(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        ino = mount.create("/log", append=True)
        mount.write(ino, b"line\n")
        mount.close(ino, dying=True)
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.load("/log") == b"line\n"


@trio_test
async def test_logs_are_sealed_at_intervals_while_they_are_open(images: Images) -> None:
    async with images.mount() as mount:
        appended, grown, paused = (
            mount.create("/appended", append=True),
            mount.create("/grown"),
            mount.create("/paused"),
        )
        states = []
        for interval in range(5):
            for ino in (appended, grown):
                mount.write(ino, b"line\n", 5 * interval)
            if interval == 0:
                mount.write(paused, BIG)
            mount.volume.files.seal_logs()
            states.append([mount.volume.files.is_modified(ino) for ino in (appended, grown, paused)])
        assert states == [[False, True, True]] * 3 + [[False, False, True]] * 2
        for ino in (appended, grown, paused):
            mount.close(ino)


@trio_test
async def test_fsync_seals_and_waits_for_what_was_sealed_before_but_for_no_open_version(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.write(mount.create("/unsealed"), BIG)
        mount.save("/before", OLD)
        ino = mount.create("/synced")
        mount.write(ino, NEW)
        await mount.volume.fsync(ino)
        assert mount.volume.is_durable(ino) and not mount.volume.is_durable(mount.ino("/unsealed"))
    async with images.mount() as mount:
        assert mount.names() == {"before", "synced"}
        assert mount.load("/synced") == NEW


@trio_test
async def test_rename_and_link_seal_an_open_file_first(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        ino = mount.create("/a.tmp")
        mount.write(ino, OLD)
        mount.rename("/a.tmp", "/a")
        mount.write(ino, NEW)
        mount.volume.link(ino, ROOT, b"b")
        mount.write(ino, BIG, len(NEW))
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.names() == {"a", "b"}
        assert mount.load("/a") == mount.load("/b") == NEW
        assert mount.volume.attributes(mount.ino("/a")).nlink == 2


@trio_test
async def test_rename_flags(images: Images) -> None:
    async with images.mount() as mount:
        mount.save("/a", OLD)
        open_ino = mount.create("/b")
        mount.write(open_ino, NEW)
        with refused(errno.EEXIST):
            mount.rename("/a", "/b", RENAME_NOREPLACE)
        mount.rename("/a", "/b", RENAME_EXCHANGE)
        mount.close(open_ino)
        assert (mount.load("/a"), mount.load("/b")) == (NEW, OLD)
    async with images.mount() as mount:
        assert (mount.load("/a"), mount.load("/b")) == (NEW, OLD)


@trio_test
async def test_a_tree_is_renamed_while_a_new_file_in_it_is_open(images: Images) -> None:
    async with images.mount() as mount:
        mount.mkdir("/d")
        ino = mount.create("/d/f")
        mount.write(ino, OLD)
        mount.rename("/d", "/e")
        mount.write(ino, NEW)
        mount.close(ino)
        assert mount.load("/e/f") == NEW
        assert mount.volume.names.path(ino) == "/e/f"
    async with images.mount() as mount:
        assert mount.load("/e/f") == NEW


@trio_test
async def test_unlink_of_an_unsealed_file_leaves_no_trace_but_the_times(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        ino = mount.create("/a")
        mount.write(ino, BIG)
        mount.unlink("/a")
        mtime_ns = mount.volume.attributes(ROOT).mtime_ns
        mount.write(ino, b"more")
        assert mount.volume.attributes(ino).nlink == 0
        mount.close(ino)
        assert ino not in mount.plane.files and ino not in mount.volume.live.inodes
        await mount.volume.sync()
    async with images.mount() as mount:
        assert mount.names() == set()
        assert mount.volume.attributes(ROOT).mtime_ns == mtime_ns


@trio_test
async def test_an_unlinked_open_file_works_and_its_room_is_back_at_close(images: Images) -> None:
    async with images.mount() as mount:
        mount.mkdir("/d")
        ino = mount.save("/d/a", OLD)
        await mount.volume.sync()
        free_bytes = mount.plane.free_bytes
        mount.volume.open(ino, writable=False)
        mount.unlink("/d/a")
        mount.volume.rmdir(ROOT, b"d")
        await mount.volume.sync()
        assert mount.plane.read(ino) == OLD
        assert mount.plane.free_bytes == free_bytes
        mount.volume.close(ino, writable=False)
        assert mount.plane.free_bytes > free_bytes
        assert ino not in mount.volume.log.durable.inodes


@trio_test
async def test_unlinked_while_its_seal_is_on_the_way(images: Images) -> None:
    async with images.mount() as mount:
        await mount.volume.sync()
        free_bytes = mount.plane.free_bytes
        mount.plane.hold_writes = True
        ino = mount.save("/a", OLD)
        mount.unlink("/a")
        (seal_id,) = mount.plane.held_seals
        mount.plane.finish_seal(seal_id)
        await mount.volume.sync()
        assert mount.plane.free_bytes == free_bytes
        assert ino not in mount.plane.files


@trio_test
async def test_path_truncate_seals_at_once_unless_there_is_an_open_version(images: Images) -> None:
    async with images.mount() as mount:
        ino = mount.save("/a", OLD)
        mount.volume.set_attributes(ino, AttributeChange(size_bytes=10), pid=1, by_handle=False)
        assert mount.volume.state(ino) != "incomplete"
        mount.volume.open(ino, writable=True)
        mount.write(ino, b"x")
        mount.volume.set_attributes(ino, AttributeChange(size_bytes=5), pid=1, by_handle=False)
        assert mount.volume.state(ino) == "incomplete"
        mount.close(ino)
    async with images.mount() as mount:
        assert mount.load("/a") == b"x" + OLD[1:5]


@trio_test
async def test_times_are_not_moved_by_flush_commit_or_remount(images: Images) -> None:
    async with images.mount() as mount:
        mount.mkdir("/d")
        ino = mount.save("/d/a", OLD)
        before = [mount.volume.attributes(mount.ino(path)) for path in ("/", "/d", "/d/a")]
        await mount.volume.sync()
        mount.volume.open(ino, writable=True)
        mount.close(ino)
    async with images.mount() as mount:
        after = [mount.volume.attributes(mount.ino(path)) for path in ("/", "/d", "/d/a")]
        assert [tuple(old[8:11]) for old in before] == [tuple(new[8:11]) for new in after]


@trio_test
async def test_names_survive_as_a_prefix_in_order(images: Images) -> None:
    async with images.mount(clean=False) as mount:
        mount.save("/step1", OLD)
        await mount.volume.sync()
        mount.plane.hold_writes = True
        mount.save("/step2", NEW)
        mount.rename("/step2", "/latest")
        mount.unlink("/step1")
        mount.mkdir("/later")
        await trio.sleep(0.2)
        assert mount.names() == {"latest", "later"}
    async with images.mount() as mount:
        assert mount.names() == {"step1"}
        assert mount.load("/step1") == OLD


@trio_test
async def test_errors_of_names(images: Images) -> None:
    async with images.mount() as mount:
        mount.mkdir("/d")
        mount.save("/d/a", OLD)
        with refused(errno.ENOTEMPTY):
            mount.volume.rmdir(ROOT, b"d")
        with refused(errno.EEXIST):
            mount.mkdir("/d")
        with refused(errno.ENOENT):
            mount.unlink("/nothing")
        with refused(errno.EISDIR):
            mount.unlink("/d")
        with refused(errno.ENAMETOOLONG):
            mount.mkdir("/" + "x" * 256)


@trio_test
async def test_special_files_links_and_xattrs_survive(images: Images) -> None:
    async with images.mount() as mount:
        mount.volume.make(ROOT, b"fifo", stat.S_IFIFO | 0o600, 1, 2)
        mount.volume.make(ROOT, b"symlink", stat.S_IFLNK | 0o777, 1, 2, target=b"/some/where")
        ino = mount.volume.make(ROOT, b"file", stat.S_IFREG | 0o600, 1, 2).ino
        mount.volume.set_xattr(ino, b"user.a", b"1")
        mount.volume.set_xattr(ino, b"user.b", b"2")
        mount.volume.remove_xattr(ino, b"user.a")
    async with images.mount() as mount:
        assert stat.S_ISFIFO(mount.volume.lookup(ROOT, b"fifo").mode)
        assert mount.volume.read_link(mount.ino("/symlink")) == b"/some/where"
        assert mount.volume.list_xattrs(mount.ino("/file")) == [b"user.b"]
        assert mount.load("/file") == b""


@trio_test
async def test_set_id_bits_and_set_gid_directories(images: Images) -> None:
    async with images.mount() as mount:
        directory = mount.volume.make(ROOT, b"d", stat.S_IFDIR | stat.S_ISGID | 0o755, 0, 42).ino
        child = mount.volume.make(directory, b"sub", stat.S_IFDIR | 0o755, 1, 1)
        assert child.gid == 42 and child.mode & stat.S_ISGID
        ino = mount.save("/d/tool", OLD)
        assert mount.volume.attributes(ino).gid == 42
        mount.volume.set_attributes(ino, AttributeChange(mode=0o6755), pid=1, by_handle=False)
        mount.volume.clear_set_id(ino)
        assert stat.S_IMODE(mount.volume.attributes(ino).mode) == 0o755
        mount.volume.set_attributes(ino, AttributeChange(mode=0o6755), pid=1, by_handle=False)
        mount.volume.set_attributes(ino, AttributeChange(uid=5), pid=1, by_handle=False)
        assert stat.S_IMODE(mount.volume.attributes(ino).mode) == 0o755


@trio_test
async def test_the_metadata_region_fills_up_cleanly(images: Images) -> None:
    async with images.mount() as mount:
        mount.save("/a", OLD)
        mount.plane.add_free_metadata(-mount.plane.free_metadata_bytes)
        with refused(errno.ENOSPC):
            mount.mkdir("/d")
        mount.unlink("/a")
        await mount.volume.wait_for_room()
        mount.mkdir("/d")


@trio_test
async def test_room_for_metadata_is_counted_exactly_whatever_comes_and_goes(images: Images) -> None:
    async with images.mount() as mount:
        volume, plane = mount.volume, mount.plane
        await volume.sync()
        limit = plane.free_metadata_bytes + metadata_bytes(volume.log.durable)
        mount.mkdir("/d")
        for number in range(20):
            mount.save(f"/d/{number}", OLD)
            mount.save("/latest", BIG)
        volume.set_xattr(mount.ino("/latest"), b"user.note", b"x" * 300)
        volume.remove_xattr(mount.ino("/latest"), b"user.note")
        volume.rename(mount.ino("/d"), b"3", mount.ino("/d"), b"a longer name")
        volume.rename(mount.ino("/d"), b"4", mount.ino("/d"), b"5")
        volume.link(mount.ino("/latest"), mount.ino("/d"), b"hard link")
        mount.unlink("/latest")
        never_sealed = mount.create("/never sealed")
        mount.unlink("/never sealed")
        volume.close(never_sealed, writable=True)
        for path in ("/d/7", "/new"):
            if mount.exists(path):
                volume.open(mount.ino(path), writable=True, truncate=True, pid=1)
            else:
                mount.create(path)
            ino = mount.ino(path)
            mount.write(ino, BIG)
            mount.close(ino, dying=True)
        unlinked_ino = mount.ino("/d/8")
        volume.open(unlinked_ino, writable=False)
        mount.unlink("/d/8")
        await volume.wait_for_room()
        volume.close(unlinked_ino, writable=False)
        await volume.wait_for_room()
        assert plane.free_metadata_bytes == limit - metadata_bytes(volume.log.durable)


@trio_test
async def test_what_is_left_open_when_the_mount_goes_counts_as_killed(images: Images) -> None:
    async with images.mount() as mount:
        mount.save("/a", OLD)
        mount.volume.open(mount.ino("/a"), writable=True, truncate=True, pid=1)
        mount.write(mount.ino("/a"), NEW)
        mount.write(mount.create("/b"), BIG)
        assert mount.volume.files.close_all() == ["/a", "/b"]
    async with images.mount() as mount:
        assert mount.names() == {"a"}
        assert mount.load("/a") == OLD


def _flush_forked_child(mount: Mounted, ino: int) -> None:
    mount.flush(ino, pid=99)


@trio_test
async def test_a_forked_child_that_exits_seals_nothing(images: Images) -> None:
    async with images.mount() as mount:
        ino = mount.create("/a", pid=1)
        mount.write(ino, OLD, pid=1)
        _flush_forked_child(mount, ino)
        assert mount.volume.state(ino) == "incomplete"
        mount.close(ino, pid=1)
