"""Shows how far the way to the devices still is: bytes left, rate, time. On terminals, and after two seconds only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ckptfs.sizes import format_size

SILENT_S = 2.0


class FlushProgress:
    """Takes the progress lines of the daemon."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._first_bytes = 0
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left, {task.fields[rate]}/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> FlushProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._progress.stop()

    def __call__(self, progress: Mapping[str, Any]) -> None:
        """One line of the daemon."""
        left_bytes = int(progress["unwritten_bytes"])
        self._first_bytes = max(self._first_bytes, left_bytes)
        elapsed_s = time.monotonic() - self._begin
        if elapsed_s < SILENT_S or not self._progress.console.is_terminal:
            return
        done_bytes = self._first_bytes - left_bytes
        left, rate = format_size(left_bytes), format_size(done_bytes / elapsed_s)
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=None, left=left, rate=rate)
        total = self._first_bytes or None
        self._progress.update(self._task, total=total, completed=done_bytes, left=left, rate=rate)
