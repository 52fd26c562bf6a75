"""Real mounts: what a trainer, an operator and a crash see."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import ckptfs
from ckptfs import client, fusemount
from ckptfs.errors import CkptfsError
from tests.mounts import MountedVolume, mounted_volume, run, wait_until

NOISE = bytes(os.urandom(1 << 20))
BIG = NOISE * 8


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    with mounted_volume(tmp_path) as mounted:
        yield mounted


def state(path: Path) -> str:
    return os.getxattr(path, "user.ckptfs.state").decode()


def start_writer(path: Path, flags: str = "wb") -> subprocess.Popen[bytes]:
    """A process that has written 8 MiB and goes on holding the file open."""
    code = (
        f"import time; f = open({str(path)!r}, {flags!r}, 0); f.write(b'torn' * (2 << 20))\n"
        "print('written', flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    return writer


@contextmanager
def written(path: Path, data: bytes, flags: int = 0) -> Iterator[int]:
    """A file that is open and has been written to; that its daemon dies meanwhile is no error."""
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | flags, 0o644)
    assert os.write(fd, data) == len(data)
    yield fd
    with suppress(OSError):
        os.close(fd)


def kill(writer: subprocess.Popen[bytes]) -> None:
    writer.kill()
    writer.wait()


def test_what_is_saved_is_there_at_once_after_wait_and_after_a_remount(volume: MountedVolume) -> None:
    path = volume.root / "checkpoint"
    path.write_bytes(BIG)
    assert path.read_bytes() == BIG
    run("wait", path)
    assert state(path) == "durable"
    volume.remount()
    assert path.read_bytes() == BIG
    volume.umount()
    volume.fsck()


def test_torch_saves_and_loads(volume: MountedVolume) -> None:
    torch = pytest.importorskip("torch")
    tensors = {"a": torch.randn(1 << 20), "b": torch.arange(100)}
    path = volume.root / "model.pt"
    torch.save(tensors, path)
    for _ in range(2):
        for loaded in (torch.load(path), torch.load(path, mmap=True)):
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        del loaded
        volume.remount()


def test_a_killed_daemon_loses_nothing_that_was_waited_for(volume: MountedVolume) -> None:
    path = volume.root / "checkpoint"
    path.write_bytes(BIG)
    ckptfs.wait_durable(path, timeout=30)
    with written(volume.root / "half", BIG):
        volume.kill_daemon()
        with pytest.raises(OSError) as raised:
            path.read_bytes()
        assert raised.value.errno == errno.ENOTCONN
    volume.mount()
    assert sorted(os.listdir(volume.root)) == ["checkpoint", "lost+found"]
    assert path.read_bytes() == BIG
    volume.umount()
    volume.fsck()


def test_an_overwrite_that_a_crash_of_the_daemon_interrupts_leaves_the_old(volume: MountedVolume) -> None:
    path = volume.root / "checkpoint"
    path.write_bytes(b"old" * 100_000)
    run("wait", path)
    with written(path, BIG):
        volume.kill_daemon()
    volume.mount()
    assert path.read_bytes() == b"old" * 100_000


def test_a_killed_trainer_leaves_no_new_name(volume: MountedVolume) -> None:
    path = volume.root / "checkpoint"
    kill(start_writer(path))
    wait_until(lambda: not path.exists(), 2)
    (killed,) = volume.status()["killed"]
    assert killed["path"] == "/checkpoint"
    kept = volume.root / killed["kept_as"].lstrip("/")
    assert kept.stat().st_size == 8 << 20
    volume.remount()
    assert not path.exists() and kept.stat().st_size == 8 << 20


def test_a_killed_trainer_gives_the_old_checkpoint_back(volume: MountedVolume) -> None:
    path = volume.root / "checkpoint"
    path.write_bytes(BIG)
    before = path.stat()
    assert path.read_bytes() == BIG  # into the page cache
    kill(start_writer(path))
    wait_until(lambda: bool(volume.status()["killed"]))
    assert path.read_bytes() == BIG
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    volume.remount()
    assert path.read_bytes() == BIG


@pytest.mark.parametrize("head", [b"", b"PK\3\4 the index of an archive", b"a line"])
def test_a_trainer_killed_before_its_first_large_write_has_lost_nothing(volume: MountedVolume, head: bytes) -> None:
    (volume.root / "old").write_bytes(BIG)
    for name in ("old", "new"):
        code = (
            f"import time; f = open({str(volume.root / name)!r}, 'wb', 0); f.write({head!r})\n"
            "print('open', flush=True); time.sleep(60)"
        )
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        kill(writer)
    kept = {"lost+found", "old", "new"} if head == b"a line" else {"lost+found", "old"}
    wait_until(lambda: set(os.listdir(volume.root)) == kept and (volume.root / "old").stat().st_size == len(BIG))
    assert (volume.root / "old").read_bytes() == BIG
    volume.remount()
    assert set(os.listdir(volume.root)) == kept
    assert (volume.root / "old").read_bytes() == BIG


def test_wait_says_that_the_writer_was_killed(volume: MountedVolume) -> None:
    path = volume.root / "checkpoint"
    writer = start_writer(path)
    threading.Timer(0.5, writer.kill).start()
    done = run("wait", path, check=False)
    writer.wait()
    assert done.returncode == 1 and "killed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_killed_keep_is_the_posix_way(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, "killed=keep") as volume:
        path = volume.root / "checkpoint"
        kill(start_writer(path))
        run("wait", "--timeout", "10", path)
        assert path.stat().st_size == 8 << 20


def test_a_forked_child_that_exits_changes_nothing(volume: MountedVolume) -> None:
    path = volume.root / "checkpoint"
    with open(path, "wb", 0) as file:
        file.write(BIG)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert state(path) == "incomplete"
        file.write(BIG)
    assert path.read_bytes() == BIG + BIG


def test_wait_times_out_on_a_file_that_is_being_written(volume: MountedVolume) -> None:
    with open(volume.root / "a", "wb", 0) as file:
        file.write(BIG)
        with pytest.raises(TimeoutError, match="not durable"):
            ckptfs.wait_durable(volume.root / "a", timeout=0.2)
        assert run("wait", "--timeout", "0.2", volume.root / "a", check=False).returncode == 1
    ckptfs.wait_durable(volume.root / "a", timeout=10)
    ckptfs.wait_durable(volume.root, timeout=10)


def test_fsync_makes_durable(volume: MountedVolume) -> None:
    with written(volume.root / "a", BIG) as fd:
        os.fsync(fd)
        directory = os.open(volume.root, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        volume.kill_daemon()
    volume.mount()
    assert (volume.root / "a").read_bytes() == BIG


def test_sync_writes_are_durable(volume: MountedVolume) -> None:
    with written(volume.root / "a", b"line\n" * 1000, os.O_SYNC):
        volume.kill_daemon()
    volume.mount()
    assert (volume.root / "a").read_bytes() == b"line\n" * 1000


def test_forty_processes_in_fsync_block_nobody_who_lists(volume: MountedVolume) -> None:
    code = "import os, sys; f = open(sys.argv[1], 'wb', 0)\nfor i in range(5): f.write(os.urandom(20000)); os.fsync(f)"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(volume.root / f"f{index}")]) for index in range(40)]
    deadline = time.monotonic() + 60
    while any(writer.poll() is None for writer in writers):
        begin = time.monotonic()
        os.listdir(volume.root)
        assert time.monotonic() - begin < 5
        assert time.monotonic() < deadline
    assert all(writer.returncode == 0 for writer in writers)


def test_names(volume: MountedVolume) -> None:
    root = volume.root
    (root / "d").mkdir()
    (root / "d" / "a").write_text("a")
    os.link(root / "d" / "a", root / "b")
    os.symlink("d/a", root / "s")
    os.mkfifo(root / "fifo")
    assert (root / "s").read_text() == "a" and (root / "b").stat().st_nlink == 2
    os.rename(root / "d", root / "e")
    with pytest.raises(OSError) as raised:
        os.rmdir(root / "e")
    assert raised.value.errno == errno.ENOTEMPTY
    os.unlink(root / "b")
    assert (root / "e" / "a").stat().st_nlink == 1
    with pytest.raises(FileExistsError):
        os.open(root / "e" / "a", os.O_CREAT | os.O_EXCL)
    volume.remount()
    assert sorted(os.listdir(root)) == ["e", "fifo", "lost+found", "s"]
    assert stat.S_ISFIFO((root / "fifo").stat().st_mode) and os.readlink(root / "s") == "d/a"


def test_attributes(volume: MountedVolume) -> None:
    path = volume.root / "a"
    path.write_bytes(b"x" * 5000)
    os.chmod(path, 0o640)
    os.chown(path, 12, 34)
    os.utime(path, ns=(1_234_567_890_123_456_789, 1_111_111_111_222_222_222))
    os.setxattr(path, "user.a", b"1")
    with pytest.raises(OSError):
        os.setxattr(path, "user.a", b"2", os.XATTR_CREATE)
    with pytest.raises(OSError):
        os.setxattr(path, "user.ckptfs.state", b"2")
    assert os.listxattr(path) == ["user.a"]
    before = path.stat()
    with open(path, "r+b") as file:
        file.read()
    volume.remount()
    after = path.stat()
    assert [getattr(before, name) for name in dir(before) if name.startswith("st_") and name != "st_dev"] == [
        getattr(after, name) for name in dir(after) if name.startswith("st_") and name != "st_dev"
    ]
    assert (after.st_mode & 0o777, after.st_uid, after.st_gid, after.st_blocks) == (0o640, 12, 34, 16)
    assert (after.st_atime_ns, after.st_mtime_ns) == (1_234_567_890_123_456_789, 1_111_111_111_222_222_222)
    assert os.getxattr(path, "user.a") == b"1"


def test_truncate_holes_and_patches(volume: MountedVolume) -> None:
    path = volume.root / "a"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.ftruncate(fd, 10 << 20)
    os.pwrite(fd, NOISE, 5 << 20)
    os.pwrite(fd, b"head", 0)
    os.close(fd)
    expected = bytearray(10 << 20)
    expected[5 << 20 : 6 << 20] = NOISE
    expected[:4] = b"head"
    assert path.read_bytes() == expected
    os.truncate(path, (5 << 20) + 10)
    os.truncate(path, 6 << 20)
    del expected[(5 << 20) + 10 :]
    expected.extend(bytes((6 << 20) - len(expected)))
    assert path.read_bytes() == expected
    volume.remount()
    assert path.read_bytes() == expected


def test_an_unlinked_open_file_works_and_its_room_comes_back(volume: MountedVolume) -> None:
    free_before = os.statvfs(volume.root).f_bfree
    directory = volume.root / "d"
    directory.mkdir()
    with open(directory / "a", "w+b", 0) as file:
        file.write(BIG)
        os.unlink(directory / "a")
        os.rmdir(directory)
        assert os.fstat(file.fileno()).st_nlink == 0
        file.write(BIG)
        assert os.pread(file.fileno(), len(BIG), len(BIG)) == BIG
    wait_until(lambda: os.statvfs(volume.root).f_bfree == free_before)


def test_the_volume_fills_up_cleanly(volume: MountedVolume) -> None:
    old = volume.root / "old"
    old.write_bytes(BIG)
    with open(volume.root / "new", "wb", 0) as file, pytest.raises(OSError) as raised:
        while True:
            file.write(BIG)
    assert raised.value.errno == errno.ENOSPC
    assert old.read_bytes() == BIG
    os.unlink(volume.root / "new")
    (volume.root / "new").write_bytes(BIG)
    volume.remount()
    assert (volume.root / "new").read_bytes() == old.read_bytes() == BIG


def test_overwriting_more_than_half_of_the_volume_again_and_again(volume: MountedVolume) -> None:
    free_bytes = os.statvfs(volume.root).f_bavail * 4096
    piece = NOISE * int(free_bytes * 0.45 / (1 << 20))
    for _ in range(4):
        (volume.root / "a").write_bytes(piece)
    assert hashlib.sha1((volume.root / "a").read_bytes()).digest() == hashlib.sha1(piece).digest()


def test_a_large_directory(volume: MountedVolume) -> None:
    names = {f"file{index:05}" for index in range(3000)}
    for name in names:
        os.mknod(volume.root / name)
    assert set(os.listdir(volume.root)) == names | {"lost+found"}
    Path("/proc/sys/vm/drop_caches").write_text("2")
    assert set(os.listdir(volume.root)) == names | {"lost+found"}


def test_mmap_reads_and_writes(volume: MountedVolume) -> None:
    path = volume.root / "a"
    path.write_bytes(BIG)
    fd = os.open(path, os.O_RDWR)
    mapped = mmap.mmap(fd, len(BIG))
    os.close(fd)
    assert mapped[:100] == BIG[:100]
    mapped[:4] = b"head"
    mapped[-4:] = b"tail"
    mapped.close()
    expected = b"head" + BIG[4:-4] + b"tail"
    assert path.read_bytes() == expected
    wait_until(lambda: state(path) == "durable")
    volume.remount()
    assert path.read_bytes() == expected


def test_rename_over_an_open_reader(volume: MountedVolume) -> None:
    (volume.root / "latest").write_bytes(b"old" * 10_000)
    (volume.root / "new").write_bytes(b"new" * 10_000)
    with open(volume.root / "latest", "rb") as reader:
        os.rename(volume.root / "new", volume.root / "latest")
        assert reader.read() == b"old" * 10_000
    assert (volume.root / "latest").read_bytes() == b"new" * 10_000


def test_flock(volume: MountedVolume) -> None:
    with open(volume.root / "a", "w") as one, open(volume.root / "a") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_umount_refuses_while_files_are_open(volume: MountedVolume) -> None:
    with open(volume.root / "a", "wb"):
        done = run("umount", volume.root, check=False)
        assert done.returncode == 1 and "/a" in done.stderr and len(done.stderr.splitlines()) == 1
    volume.umount()
    assert fusemount.find_mount(str(volume.root)) is None


def test_umount_from_outside_still_makes_everything_durable(volume: MountedVolume) -> None:
    (volume.root / "a").write_bytes(BIG)
    libc = ctypes.CDLL(None)
    assert libc.umount2(os.fsencode(volume.root), 0) == 0
    volume.mount()
    assert (volume.root / "a").read_bytes() == BIG


def test_sigterm_makes_everything_durable(volume: MountedVolume) -> None:
    (volume.root / "a").write_bytes(BIG)
    pid = volume.status()["pid"]
    os.kill(pid, signal.SIGTERM)
    client.wait_for_end(pid)
    assert fusemount.find_mount(str(volume.root)) is None
    volume.mount()
    assert (volume.root / "a").read_bytes() == BIG


def test_sigterm_with_an_open_file_ends_and_keeps_what_was_written_in_lost_and_found(volume: MountedVolume) -> None:
    (volume.root / "a").write_bytes(b"old")
    writer = start_writer(volume.root / "a")
    pid = volume.status()["pid"]
    os.kill(pid, signal.SIGTERM)
    client.wait_for_end(pid)
    kill(writer)
    volume.mount()
    assert (volume.root / "a").read_bytes() == b"old"
    (kept,) = os.listdir(volume.root / "lost+found")
    assert (volume.root / "lost+found" / kept).stat().st_size == 8 << 20


def test_errors_are_one_line(volume: MountedVolume, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for arguments, expected in (
        ([*volume.images, elsewhere], "mounted already, at"),
        ([volume.images[0], tmp_path / "missing"], "does not exist"),
        ([tmp_path / "missing", elsewhere], "missing"),
        (["-o", "bogus=1", *volume.images, elsewhere], "bogus=1"),
        ([*volume.images, volume.root], "mounted already"),
        ([*volume.images, volume.images[0]], "not a directory"),
    ):
        done = run("mount", *arguments, check=False)
        assert done.returncode != 0
        assert expected in done.stderr and len(done.stderr.splitlines()) == 1
    volume.umount()
    done = run("mount", volume.images[1], elsewhere, check=False)
    assert done.returncode != 0 and "device 0" in done.stderr
    assert run("umount", elsewhere, check=False).returncode != 0
    with pytest.raises(CkptfsError, match="not on a mounted"):
        client.find(str(elsewhere))


def test_read_only(volume: MountedVolume) -> None:
    (volume.root / "a").write_bytes(BIG)
    volume.umount()
    digests = [hashlib.sha1(Path(image).read_bytes()).digest() for image in volume.images]
    volume.mount("ro")
    assert (volume.root / "a").read_bytes() == BIG
    with pytest.raises(OSError) as raised:
        (volume.root / "b").write_bytes(b"")
    assert raised.value.errno == errno.EROFS
    volume.umount()
    assert digests == [hashlib.sha1(Path(image).read_bytes()).digest() for image in volume.images]


def test_the_thread_engine(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, "io=threads") as volume:
        assert volume.status()["io_backend"] == "threads"
        (volume.root / "a").write_bytes(BIG)
        volume.remount("io=threads")
        assert (volume.root / "a").read_bytes() == BIG


def test_a_flipped_byte_is_eio_for_that_file_only(volume: MountedVolume) -> None:
    (volume.root / "a").write_bytes(BIG)
    (volume.root / "b").write_bytes(BIG)
    run("wait", volume.root)
    answer = client.request(str(volume.root / "a"), {"command": "extents"})
    extent = answer["extents"][3]
    volume.umount()
    with open(volume.images[extent["device_index"]], "r+b") as image:
        image.seek(extent["device_offset_bytes"] + 1000)
        byte = image.read(1)
        image.seek(-1, os.SEEK_CUR)
        image.write(bytes([byte[0] ^ 1]))
    volume.mount()
    with pytest.raises(OSError) as raised:
        (volume.root / "a").read_bytes()
    assert raised.value.errno == errno.EIO
    assert (volume.root / "b").read_bytes() == BIG
    assert any("/a" in error and "checksum" in error for error in volume.status()["errors"])


def test_status_for_people(volume: MountedVolume) -> None:
    (volume.root / "a").write_bytes(BIG)
    shown = run("status", volume.root).stdout
    assert str(volume.root) in shown and "staging" in shown
    assert run("status").stdout
