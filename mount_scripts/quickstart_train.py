"""Trains a small model twice, saving at every step, to local disk with fsync and to ckptfs, and shows the stalls."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import ckptfs

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 3072
LAYERS = 4
KEPT_CHECKPOINTS = 2


@dataclass
class Run:
    """What one training run met."""

    losses: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    durable_seconds: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    total_seconds: float = 0.0


def make_model() -> torch.nn.Module:
    """The same model every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(folder: Path, steps: int, save: Callable[[object, Path], None], watch: Callable[[Path], None] | None) -> Run:
    """Trains, with a checkpoint after every step.

    `watch` returns when a checkpoint is durable; None when `save` itself sees to that.
    """
    model, run, watchers = make_model(), Run(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin = time.perf_counter()
    for step in track(range(steps), f"training, checkpoints on {folder}", transient=True):
        batch = torch.randn(16, WIDTH)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())

        path = folder / f"step-{step}.pt"
        saving = time.perf_counter()
        save(model.state_dict(), path)
        run.stall_seconds.append(time.perf_counter() - saving)
        if watch:
            watchers.append(threading.Thread(target=_note_durable, args=(run, step, path, saving, watch)))
            watchers[-1].start()
        else:
            run.durable_seconds[step] = run.stall_seconds[-1]
        if step >= KEPT_CHECKPOINTS:
            # Not before it is durable, only so that its time to durable can be shown.
            if watch:
                watchers[step - KEPT_CHECKPOINTS].join()
            (folder / f"step-{step - KEPT_CHECKPOINTS}.pt").unlink()
    run.total_seconds = time.perf_counter() - begin
    for watcher in watchers:
        watcher.join()
    _check_last(folder / f"step-{steps - 1}.pt", model)
    return run


def _note_durable(run: Run, step: int, path: Path, begin: float, watch: Callable[[Path], None]) -> None:
    try:
        watch(path)
        run.durable_seconds[step] = time.perf_counter() - begin
    except Exception as error:
        run.errors.append(f"{path}: {error}")


def _check_last(path: Path, model: torch.nn.Module) -> None:
    found = torch.load(path)
    if not all(torch.equal(found[name], value) for name, value in model.state_dict().items()):
        sys.exit(f"{path} does not hold what was saved")


def save_with_fsync(state: object, path: Path) -> None:
    """What a careful trainer does on an ordinary file system."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def show(ours: Run, plain: Run, console: Console) -> None:
    """One line a step, and what the saves cost in all."""
    table = Table(title="Saving at every step", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("ckptfs: torch.save took", justify="right")
    table.add_column("ckptfs: durable after", justify="right")
    table.add_column("local disk: torch.save + fsync took", justify="right")
    for step, loss in enumerate(ours.losses):
        table.add_row(
            str(step),
            f"{loss:.4f}",
            f"{ours.stall_seconds[step] * 1e3:.0f} ms",
            f"{ours.durable_seconds[step] * 1e3:.0f} ms" if step in ours.durable_seconds else "–",
            f"{plain.durable_seconds[step] * 1e3:.0f} ms",
        )
    table.add_section()
    ours_seconds, plain_seconds = sum(ours.stall_seconds), sum(plain.stall_seconds)
    table.add_row("all", "", f"[bold]{ours_seconds:.2f} s", "", f"[bold]{plain_seconds:.2f} s")
    console.print(table)
    console.print(
        f"Training waited [bold]{ours_seconds:.2f} s[/] for its saves on ckptfs and [bold]{plain_seconds:.2f} s[/]"
        f" on local disk; all in all it took {ours.total_seconds:.1f} s and {plain.total_seconds:.1f} s."
    )


def main() -> int:
    """Trains on both and shows the difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ckptfs", type=Path, required=True, help="a folder on a ckptfs mount")
    parser.add_argument("--plain", type=Path, required=True, help="a folder on local disk")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    console = Console()
    size_bytes = sum(value.nbytes for value in make_model().state_dict().values())
    console.print(f"A model of {size_bytes / 1e6:.0f} MB, {arguments.steps} steps, a checkpoint after each.")
    plain = train(arguments.plain, arguments.steps, save_with_fsync, None)
    ours = train(arguments.ckptfs, arguments.steps, torch.save, ckptfs.wait_durable)
    show(ours, plain, console)
    for error in ours.errors:
        console.print(f"[red]not durable: {error}")
    return 1 if ours.errors else 0


if __name__ == "__main__":
    sys.exit(main())
