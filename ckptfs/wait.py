"""`ckptfs wait`: returns when paths are durable."""

from __future__ import annotations

import time

import click

from ckptfs import client
from ckptfs.progress import FlushProgress


@click.command()
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), metavar="SECONDS", help="Give up after so long.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def command(timeout_s: float | None, paths: tuple[str, ...]) -> None:
    """Wait until paths are durable: on the devices, whatever happens from then on.

    A file that is being written is waited for until it is closed, or synced, and durable; a directory with all below.
    The exit status is 1 when the time is over, or when a file never will be durable: its writer was killed, or its
    data is lost.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for path in paths:
        with FlushProgress(f"Waiting for {path}") as progress:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            client.wait(path, timeout_s=left_s, on_progress=progress)
