"""`ckptfs mount`: starts the daemon of a volume and returns when the mount is usable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import click

from ckptfs import client, fusemount, runtime
from ckptfs.errors import AlreadyMounted, CkptfsError, MountError
from ckptfs.mount_options import parse_options


class DaemonRefused(CkptfsError):
    """The daemon could not start; it says why."""

    def __init__(self, word: dict[str, Any]) -> None:
        super().__init__(word["error"])
        self.kind = word["kind"]
        self.exit_status = int(word["exit_status"])


@click.command()
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPTIONS",
    help="staging=SIZE, commit=SECONDS, killed=keep, io=auto|io_uring|threads, ro, allow_other, ...",
)
@click.option("--foreground", is_flag=True, help="Stay until the volume is unmounted; log to standard error.")
@click.argument("devices", nargs=-1, required=True, metavar="DEVICE...")
@click.argument("mountpoint", metavar="MOUNTPOINT")
def command(devices: tuple[str, ...], mountpoint: str, options: tuple[str, ...], foreground: bool) -> int:
    """Mount a volume. Returns when the mount is usable."""
    parse_options(options)
    fusemount.check_mountpoint(mountpoint)
    _refuse_inside_mountpoint(devices, mountpoint)
    while True:
        outcome = _start(devices, mountpoint, options, foreground=foreground)
        if not isinstance(outcome, DaemonRefused):
            return outcome
        _wait_for_former_daemon(outcome, list(devices))


def _refuse_inside_mountpoint(devices: tuple[str, ...], mountpoint: str) -> None:
    """A daemon that needed its own mount would wait for itself."""
    inside = fusemount.real_mountpoint(mountpoint).rstrip("/") + "/"
    needed = {f"the device {device}": device for device in devices}
    needed["the daemon's control socket and log"] = str(runtime.runtime_folder())
    for what, path in needed.items():
        if (os.path.realpath(path) + "/").startswith(inside):
            raise MountError(f"{what} would lie under the mount point {mountpoint}: choose another mount point")


def _start(
    devices: tuple[str, ...], mountpoint: str, options: tuple[str, ...], *, foreground: bool
) -> int | DaemonRefused:
    read_fd, write_fd = os.pipe()
    arguments = [sys.executable, "-m", "ckptfs.daemon", f"--ready-fd={write_fd}"]
    arguments += [f"-o{option}" for option in options] + (["--foreground"] if foreground else [])
    with open(os.devnull, "r+b") as nothing:
        daemon = subprocess.Popen(
            [*arguments, "--", *map(os.path.abspath, devices), os.path.abspath(mountpoint)],
            stdin=nothing,
            stdout=None if foreground else nothing,
            stderr=None if foreground else subprocess.PIPE,
            pass_fds=[write_fd],
            start_new_session=not foreground,
        )
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        line = pipe.readline()
    if not line:
        # It writes to its log from early on; what comes here is of an interpreter that could not begin.
        last_words = daemon.stderr.read().decode(errors="replace").strip() if daemon.stderr else ""
        reason = last_words.splitlines()[-1] if last_words else f"exit status {daemon.wait()}"
        raise MountError(f"the daemon died before the mount was usable: {reason}")
    word = json.loads(line)
    if "error" in word:
        daemon.wait()
        return DaemonRefused(word)
    for warning in word["warnings"]:
        click.echo(f"ckptfs: warning: {warning}", err=True)
    if not foreground:
        return 0
    # Ctrl-C reaches the daemon too, which then leaves in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return daemon.wait()


def _wait_for_former_daemon(refusal: DaemonRefused, devices: list[str]) -> None:
    """Returns when the volume is free again; raises when it will not be."""
    if refusal.kind not in ("DeviceBusy", "AlreadyMounted"):
        raise refusal
    state = client.find_by_device(devices)
    if state is None:
        raise refusal
    if state.state != runtime.DRAINING and client.is_alive(state.pid):
        raise AlreadyMounted(f"the volume is mounted already, at {state.mountpoint} (pid {state.pid})")
    if client.is_alive(state.pid):
        click.echo(
            f"ckptfs: the former daemon (pid {state.pid}) is still making data durable; waiting for it to end", err=True
        )
    client.wait_for_end(state.pid)
    time.sleep(0.05)
