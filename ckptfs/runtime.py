"""Where running daemons can be found: a state file, a lock, a control socket and a log per volume.

They lie in /run/ckptfs for root's daemons and in $XDG_RUNTIME_DIR/ckptfs for others. The lock is held by the daemon
while it lives, so a state file without a held lock is what a killed daemon left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ckptfs.errors import AlreadyMounted

ROOTS_FOLDER = Path("/run/ckptfs")

MOUNTING, MOUNTED, DRAINING = "mounting", "mounted", "draining"


@dataclass(frozen=True)
class State:
    """What a daemon says of itself."""

    volume_uuid: str
    label: str
    pid: int
    mountpoint: str
    devices: list[str]
    state: str
    socket_path: str
    log_path: str


def runtime_folder() -> Path:
    """Where this user's daemons put their files."""
    if os.geteuid() == 0:
        return ROOTS_FOLDER
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "ckptfs" if base else Path(tempfile.gettempdir()) / f"ckptfs-{os.geteuid()}"


class Registration:
    """A daemon's entry. Lives as long as the daemon: nobody else has the volume meanwhile."""

    def __init__(self, volume_uuid: str, label: str, mountpoint: str, devices: list[str]) -> None:
        folder = runtime_folder()
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._path = folder / f"{volume_uuid}.json"
        self._lock_fd = os.open(folder / f"{volume_uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise AlreadyMounted(f"the volume {volume_uuid} has a daemon already; see ckptfs status") from None
        self.state = State(
            volume_uuid=volume_uuid,
            label=label,
            pid=os.getpid(),
            mountpoint=mountpoint,
            devices=devices,
            state=MOUNTING,
            socket_path=str(folder / f"{volume_uuid}.sock"),
            log_path=str(folder / f"{volume_uuid}.log"),
        )
        self.tell(MOUNTING)

    def tell(self, state: str) -> None:
        """Notes what the daemon is about."""
        self.state = replace(self.state, state=state)
        new = self._path.with_suffix(f".new{os.getpid()}")
        new.write_text(json.dumps(asdict(self.state)))
        new.replace(self._path)

    def remove(self) -> None:
        """The daemon ends. The log stays, for whoever wants to know why."""
        for path in (self._path, Path(self.state.socket_path)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        os.close(self._lock_fd)


def running() -> Iterator[State]:
    """Every daemon that lives and that this user can see."""
    for folder in dict.fromkeys((ROOTS_FOLDER, runtime_folder())):
        for path in sorted(folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if _is_locked(path.with_suffix(".lock")):
                    yield State(**json.loads(path.read_text()))


def _is_locked(path: Path) -> bool:
    with open(path, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
