"""How other file systems have failed under checkpoints, tried on a real mount."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts import MountedVolume, mounted_volume, run, wait_until


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    with mounted_volume(tmp_path) as mounted:
        yield mounted


def python(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)])


def finish(processes: list[subprocess.Popen[bytes]], timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            assert process.wait(max(deadline - time.monotonic(), 0.01)) == 0
    finally:
        for process in processes:
            process.kill()


def test_a_name_that_is_replaced_thousands_of_times_is_always_whole(volume: MountedVolume) -> None:
    writer = python(
        "import os, sys\n"
        "for i in range(1500):\n"
        "    with open(sys.argv[1] + '.tmp', 'wb') as f: f.write(bytes([i % 256]) * 70000)\n"
        "    os.rename(sys.argv[1] + '.tmp', sys.argv[1])\n",
        volume.root / "latest",
    )
    wait_until((volume.root / "latest").exists)
    while writer.poll() is None:
        data = (volume.root / "latest").read_bytes()
        assert len(data) == 70000 and data == data[:1] * 70000
    finish([writer])


def test_eight_processes_make_the_same_directories(volume: MountedVolume) -> None:
    code = (
        "import os, sys\n"
        "for i in range(100):\n"
        "    path = f'{sys.argv[1]}/{i}/a/b'\n"
        "    os.makedirs(path, exist_ok=True); os.stat(path)\n"
    )
    finish([python(code, volume.root) for _ in range(8)])


def test_signals_during_exclusive_creates(volume: MountedVolume) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)\n"
        "for i in range(300):\n"
        "    fd = os.open(f'{sys.argv[1]}/{i}', os.O_CREAT | os.O_EXCL | os.O_WRONLY)\n"
        "    assert os.write(fd, b'x' * 50000) == 50000\n"
        "    os.close(fd)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    finish([python(code, volume.root)])
    assert len(os.listdir(volume.root)) == 301


def test_two_hundred_processes_in_fsync_while_others_list(volume: MountedVolume) -> None:
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "for _ in range(4): os.write(fd, bytes(30000)); os.fsync(fd)\n"
    )
    shell = 'for i in $(seq 200); do "$0" -S -c "$1" "$2/f$i" & done; wait'
    writers = subprocess.Popen(["bash", "-c", shell, sys.executable, code, str(volume.root)])
    slowest_s = 0.0
    while writers.poll() is None:
        begin = time.monotonic()
        os.listdir(volume.root)
        slowest_s = max(slowest_s, time.monotonic() - begin)
    assert writers.returncode == 0 and slowest_s < 5
    assert len(os.listdir(volume.root)) == 201


def test_a_killed_trainer_is_undone_before_anybody_can_look(volume: MountedVolume) -> None:
    old, new = volume.root / "old", volume.root / "new"
    old.write_bytes(b"old" * 100_000)
    code = "import os, sys, signal\nf = open(sys.argv[1], 'wb', 0)\nf.write(bytes(5 << 20))\nos.kill(os.getpid(), 9)"
    for _ in range(10):
        assert python(code, new).wait() == -signal.SIGKILL
        assert not new.exists()
        assert python(code, old).wait() == -signal.SIGKILL
        assert old.stat().st_size == 300_000
        assert old.read_bytes() == b"old" * 100_000


def test_staging_is_tiny_and_ten_times_its_size_is_written(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, "staging=64M", size="512M") as volume:
        noise = os.urandom(1 << 20)
        with open(volume.root / "a", "wb", 0) as file:
            for index in range(640):
                file.write(index.to_bytes(4, "little") + noise[4:])
        with open(volume.root / "a", "rb") as file:
            for index in range(640):
                assert file.read(1 << 20) == index.to_bytes(4, "little") + noise[4:]


def test_many_small_files_held_open_and_partly_written_do_not_wedge_staging(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, "staging=64M", size="512M") as volume:
        files = [open(volume.root / f"f{index}", "wb", 0) for index in range(1500)]  # noqa: SIM115
        for round_number in range(3):
            for file in files:
                file.write(bytes([round_number]) * 30_000)
        for file in files:
            file.close()
        run("wait", volume.root)
        assert (volume.root / "f777").read_bytes() == b"".join(bytes([number]) * 30_000 for number in range(3))


def test_a_write_from_a_mapping_of_another_file_of_the_mount(volume: MountedVolume) -> None:
    data = os.urandom(20 << 20)
    (volume.root / "source").write_bytes(data)
    volume.remount()
    with (
        open(volume.root / "source", "rb") as source,
        open(volume.root / "copy", "wb", 0) as copy,
        mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert copy.write(mapped) == len(data)
    assert (volume.root / "copy").read_bytes() == data


def test_growing_reads_see_everything_that_was_acknowledged(volume: MountedVolume) -> None:
    path = volume.root / "a"
    with open(path, "wb", 0) as writer, open(path, "rb", 0) as reader:
        assert reader.read(10) == b""
        expected = b""
        for _ in range(40):
            piece = os.urandom(100_003)
            writer.write(piece)
            expected += piece
            assert os.stat(path).st_size == len(expected)
            assert os.pread(reader.fileno(), len(expected), 0) == expected


def test_a_mapping_over_a_save(volume: MountedVolume) -> None:
    path = volume.root / "a"
    path.write_bytes(b"1" * 100_000)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == b"1" * 100_000
        path.write_bytes(b"2" * 100_000)
        assert mapped[:] == b"2" * 100_000
        (volume.root / "b").write_bytes(b"3" * 100_000)
        os.rename(volume.root / "b", path)
        assert mapped[:] == b"2" * 100_000
    assert path.read_bytes() == b"3" * 100_000


def test_twenty_files_opened_unlinked_and_closed_give_their_room_back(volume: MountedVolume) -> None:
    for _ in range(20):
        with open(volume.root / "a", "wb", 0) as file:
            file.write(bytes(50 << 20))
            os.unlink(volume.root / "a")


def test_one_write_of_more_than_two_gib_is_cut_as_linux_does(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, size="2G") as volume:
        fd = os.open(volume.root / "a", os.O_CREAT | os.O_RDWR)
        with mmap.mmap(-1, 2_500_000_000) as buffer:
            assert os.write(fd, buffer) == 0x7FFFF000
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"far", 9 << 30)
        assert os.fstat(fd).st_size == (9 << 30) + 3 and os.pread(fd, 5, (9 << 30) - 2) == b"\0\0far"
        os.close(fd)


def test_a_killed_fsync_leaves_at_once(volume: MountedVolume) -> None:
    code = (
        "import os, sys\nfd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "while True: os.write(fd, bytes(100000)); os.fsync(fd); os.ftruncate(fd, 0); os.lseek(fd, 0, 0)"
    )
    for index in range(5):
        process = python(code, volume.root / f"f{index}")
        wait_until((volume.root / f"f{index}").exists)
        time.sleep(0.05)
        begin = time.monotonic()
        process.kill()
        process.wait(5)
        assert time.monotonic() - begin < 2


def test_attributes_while_another_thread_writes(volume: MountedVolume) -> None:
    path = volume.root / "a"
    sizes = []
    with open(path, "wb", 0) as file:
        thread = threading.Thread(target=lambda: [file.write(bytes(1 << 20)) for _ in range(100)])
        thread.start()
        while thread.is_alive():
            found = os.stat(path)
            sizes.append(found.st_size)
            assert found.st_blocks * 512 >= found.st_size - 4096
        thread.join()
    assert sizes == sorted(sizes) and path.stat().st_size == 100 << 20


def test_full_then_delete_then_again(volume: MountedVolume) -> None:
    free_bytes = os.statvfs(volume.root).f_bavail * 4096
    old = b"o" * (4 << 20)
    (volume.root / "old").write_bytes(old)
    (volume.root / "filler").write_bytes(bytes(free_bytes - (12 << 20)))
    with pytest.raises(OSError) as raised:
        (volume.root / "new").write_bytes(bytes(16 << 20))
    assert raised.value.errno == errno.ENOSPC
    assert (volume.root / "old").read_bytes() == old
    os.unlink(volume.root / "filler")
    (volume.root / "new").write_bytes(bytes(16 << 20))
    assert (volume.root / "new").read_bytes() == bytes(16 << 20)
