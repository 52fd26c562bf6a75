"""Talks to running daemons; what commands and programs use to ask what is durable."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptfs import runtime
from ckptfs.errors import CkptfsError, NotMounted, UsageError
from ckptfs.fusemount import real_mountpoint

VOLUME_XATTR = "user.ckptfs.volume"

OnProgress = Callable[[Mapping[str, Any]], None]


class DaemonRefused(CkptfsError):
    """The daemon answered with an error."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(str(answer["error"]))
        self.answer = answer
        self.exit_status = int(answer.get("exit_status", 1))


class WaitTimedOut(CkptfsError):
    """The time given to a wait is over. What was waited for goes on."""


class DaemonGone(CkptfsError):
    """The daemon ended without an answer."""


def find(path: str) -> runtime.State:
    """The daemon whose mount holds a path, or whose mount point it was.

    Raises:
        NotMounted: There is none.
    """
    states = list(runtime.running())
    mountpoint = real_mountpoint(path)
    for state in states:
        if state.mountpoint == mountpoint:
            return state
    uuid = ""
    with contextlib.suppress(OSError):
        uuid = os.getxattr(path, VOLUME_XATTR).decode()
    for state in states:
        if state.volume_uuid == uuid:
            return state
    if not uuid and not os.path.lexists(path):
        raise NotMounted(f"{path} does not exist")
    raise NotMounted(f"{path} is not on a mounted ckptfs volume; ckptfs status lists what is")


def find_only() -> runtime.State:
    """The only daemon there is.

    Raises:
        NotMounted: There is none.
        UsageError: There are several.
    """
    states = list(runtime.running())
    if not states:
        raise NotMounted("no ckptfs volume is mounted")
    if len(states) > 1:
        raise UsageError(f"several volumes are mounted, name one: {', '.join(state.mountpoint for state in states)}")
    return states[0]


def find_by_device(paths: list[str]) -> runtime.State | None:
    """The daemon that has one of these devices open."""
    real_paths = {os.path.realpath(path) for path in paths}
    return next((state for state in runtime.running() if real_paths & set(state.devices)), None)


def ask(
    state: runtime.State,
    request: Mapping[str, Any],
    *,
    timeout_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Sends one request and returns the last line of the answer.

    Raises:
        DaemonRefused: The answer is an error.
        DaemonGone: There is no answer.
        WaitTimedOut: It does not come in time.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(state.socket_path)
            connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise DaemonGone(f"the daemon of {state.mountpoint} (pid {state.pid}) is not there: {error}") from None
        for answer in _lines(connection, deadline, state):
            if "error" in answer:
                raise DaemonRefused(answer)
            if "done" in answer:
                return answer
            if on_progress is not None and "progress" in answer:
                on_progress(answer["progress"])
    raise DaemonGone(
        f"the daemon of {state.mountpoint} (pid {state.pid}) ended without an answer; see {state.log_path}"
    )


def request(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Asks the daemon whose mount holds a path about what is at that path."""
    return ask(find(path), {**request, "ino": _ino(path)})


def status(path: str | None = None) -> dict[str, Any]:
    """What `ckptfs status --json` prints of the volume at a path, or of the only one."""
    state = find(path) if path is not None else find_only()
    return dict(ask(state, {"command": "status"})["status"])


def wait_durable(path: str | os.PathLike[str], timeout: float | None = None) -> None:
    """Waits until a file, or all below a directory, is durable: on the devices, whatever happens from here on.

    A file that is still being written is waited for until it is closed (or synced) and durable.

    Args:
        path: On a mounted ckptfs volume.
        timeout: Seconds; None waits as long as it takes.

    Raises:
        TimeoutError: It takes longer.
        CkptfsError: It never will be durable, or path is on no ckptfs volume.
    """
    try:
        wait(os.fspath(path), timeout_s=timeout)
    except WaitTimedOut as error:
        raise TimeoutError(str(error)) from None


def wait(path: str, *, timeout_s: float | None = None, on_progress: OnProgress | None = None) -> None:
    """wait_durable() that can show its progress."""
    state, ino = find(path), _ino(path)
    try:
        ask(state, {"command": "wait", "ino": ino}, timeout_s=timeout_s, on_progress=on_progress)
    except WaitTimedOut:
        raise WaitTimedOut(f"{path} is not durable after {timeout_s:g} s; the daemon goes on with it") from None


def is_alive(pid: int) -> bool:
    """Whether a process runs, or a thread of it; a zombie that nobody has buried does not."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
            return True
        # The first thread of a process is a zombie for as long as another one is still letting go of files.
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    """Waits until a process is gone."""
    while is_alive(pid):
        time.sleep(0.01)


def _ino(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError as error:
        raise NotMounted(f"{path}: {error.strerror}") from None


def _lines(connection: socket.socket, deadline: float | None, state: runtime.State) -> Iterator[dict[str, Any]]:
    received = b""
    while True:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if left_s == 0.0:
            raise WaitTimedOut(f"no answer of the daemon of {state.mountpoint} in time")
        connection.settimeout(left_s)
        try:
            chunk = connection.recv(1 << 16)
        except TimeoutError:
            raise WaitTimedOut(f"no answer of the daemon of {state.mountpoint} in time") from None
        except ConnectionError:
            return
        if not chunk:
            return
        *lines, received = (received + chunk).split(b"\n")
        yield from map(json.loads, lines)
