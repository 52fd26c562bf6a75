"""The daemon is killed at any time: what is there afterwards is a prefix of what was done, and whole (P2, P3, P4)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounts import MountedVolume, mounted_volume

KEPT = 2
"""Checkpoints that the trainer keeps."""

TRAINER = """
import os, sys
root = sys.argv[1]
def save(step, sync):
    data = step.to_bytes(4, "little") * (50_000 + step * 7_919 % 300_000)
    with open(f"{root}/tmp", "wb", 0) as file:
        file.write(data)
        if sync:
            os.fsync(file)
    os.rename(f"{root}/tmp", f"{root}/step{step}")
    if step >= 2:
        os.unlink(f"{root}/step{step - 2}")
try:
    for step in range(10_000):
        save(step, sync=step % 5 == 4)
        if step % 5 == 4:
            print(step, flush=True)
except OSError:
    pass
"""


def states(last_step: int) -> set[frozenset[str]]:
    """Every set of names that some prefix of the trainer's operations leaves."""
    names: set[str] = set()
    found = {frozenset(names)}
    for step in range(last_step + 1):
        for change in (
            {"tmp"},
            {"tmp", f"step{step}"},
            {f"step{step - KEPT}"} if step >= KEPT else set(),
        ):
            names ^= change
            found.add(frozenset(names))
    return found


def check(volume: MountedVolume, durable_step: int) -> None:
    names = frozenset(os.listdir(volume.root)) - {"lost+found"}
    assert names in states(10_000)
    steps = [int(name.removeprefix("step")) for name in names if name != "tmp"]
    # Synced was the data as "tmp"; its rename came after, and may be lost.
    assert durable_step < 0 or max(steps) >= durable_step - 1
    for name in names:
        data = (volume.root / name).read_bytes()
        step = int.from_bytes(data[:4], "little")
        assert name in ("tmp", f"step{step}")
        assert data == step.to_bytes(4, "little") * (50_000 + step * 7_919 % 300_000)


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_daemon_leaves_a_prefix_of_whole_checkpoints(tmp_path: Path, seed: int) -> None:
    with mounted_volume(tmp_path, size="64M") as volume:
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(volume.root)], stdout=subprocess.PIPE)
        pid = volume.status()["pid"]
        assert trainer.stdout is not None
        durable_step = -1
        for _ in range(random.Random(seed).randint(0, 12)):
            durable_step = int(trainer.stdout.readline())
        os.kill(pid, 9)
        told = trainer.communicate(timeout=30)[0].split()
        durable_step = int(told[-1]) if told else durable_step
        volume.wait_until_stale()
        volume.fsck()
        volume.mount()
        check(volume, durable_step)
        volume.remount()
        check(volume, durable_step)
        volume.umount()
        volume.fsck()
