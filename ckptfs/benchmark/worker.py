"""The other processes of a benchmark: writers that save at once, and one that holds many small files open.

A writer reads JSON lines, {"do": "save" | "check", "path": ...}, and answers each with a line.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ckptfs.benchmark import workloads
from ckptfs.benchmark.machine import BenchmarkError

SMALL_PIECE_BYTES = 10_000
SMALL_PIECES = 5


class Writer:
    """A process with a model's state of its own."""

    def __init__(self, length_bytes: int, seed: int, *, crc32: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, "writer", str(length_bytes), str(seed), str(int(crc32))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, do: str, path: Path) -> None:
        """Has it start to do this; `answer` waits for the end."""
        assert self._process.stdin
        print(json.dumps({"do": do, "path": str(path)}), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Of "save": the times of the monotonic clock at which it began and ended; of "check": whether it is equal."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("a writer process ended early")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


def hold_small_files(folder: Path, count: int, timeout_seconds: float) -> bool:
    """Whether a process could write `count` files piece by piece, all open at once, and found in them what it wrote."""
    command = [sys.executable, "-m", __name__, "small", str(folder), str(count)]
    try:
        return subprocess.run(command, check=False, timeout=timeout_seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _serve_writer(length_bytes: int, seed: int, crc32: bool) -> None:
    state = workloads.make_state(length_bytes, seed=seed)
    with workloads.torch_crc32(crc32):
        for line in sys.stdin:
            request = json.loads(line)
            path = Path(request["path"])
            begin = time.monotonic()
            answer: Any
            if request["do"] == "save":
                workloads.save(state, path)
                answer = [begin, time.monotonic()]
            else:
                answer = workloads.is_saved(state, path)
            print(json.dumps(answer), flush=True)


def _small(folder: Path, count: int) -> bool:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(folder / f"small-{index}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) for index in range(count)]
    for piece in range(SMALL_PIECES):
        for index, file in enumerate(files):
            os.write(file, _small_content(index, piece))
    same = True
    for index, file in enumerate(files):
        expected = b"".join(_small_content(index, piece) for piece in range(SMALL_PIECES))
        same = same and os.pread(file, len(expected) + 1, 0) == expected
        os.close(file)
        os.unlink(folder / f"small-{index}")
    return same


def _small_content(index: int, piece: int) -> bytes:
    return f"{index}.{piece} ".encode().ljust(16, b".") * (SMALL_PIECE_BYTES // 16)


def main(arguments: list[str]) -> int:
    """Does one of the two jobs, until standard input ends or all is done."""
    if arguments[0] == "writer":
        length_bytes, seed, crc32 = map(int, arguments[1:])
        _serve_writer(length_bytes, seed, bool(crc32))
        return 0
    return 0 if _small(Path(arguments[1]), int(arguments[2])) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
