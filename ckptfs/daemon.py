"""`python -m ckptfs.daemon`: serves one mount. `ckptfs mount` starts it and waits for its word on the ready pipe.

Life: devices -> recovery -> data plane -> mount(2) -> switch and pyfuse3 -> the word "ready" when the kernel has
taken the INIT reply -> requests, until the mount is gone -> draining: all that was acknowledged is made durable,
a snapshot is left for the next mount -> the last word to whoever waits on the control socket -> end.

Concurrency: one trio thread, and the native side's threads, which never wait for it. What blocks (unmounting,
stopping threads) runs in worker threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import logging.handlers
import os
import queue
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

import click
import pyfuse3
import trio

from ckptfs import fusemount, runtime
from ckptfs._native import DataPlane, Switch
from ckptfs.commit import first_cause
from ckptfs.control import Control
from ckptfs.dataplane import dispatch_events
from ckptfs.errors import CkptfsError, MountError, NotMounted, Problem
from ckptfs.kernel_settings import allow_huge_pages
from ckptfs.mount_options import MountOptions, parse_options
from ckptfs.operations import Operations
from ckptfs.read_path import ReadPath
from ckptfs.recovery import Recovered, recover
from ckptfs.requests import Requests
from ckptfs.superblock import VolumeDevices, assemble
from ckptfs.volume import Volume

log = logging.getLogger("ckptfs.daemon")

RELEASE_GRACE_S = 1.0
"""RELEASE comes after close(2) has returned: how long an unmount waits for those under way."""
BUSY_GRACE_S = 5.0
"""How long SIGTERM waits for open files to be closed before it leaves them behind."""
LAST_WORD_GRACE_S = 2.0
MAX_UNDURABLE_SHOWN = 1000
PR_SET_IO_FLUSHER = 57


class Daemon:
    """One mount, from the recovered volume to the end."""

    def __init__(
        self,
        devices: VolumeDevices,
        recovered: Recovered,
        options: MountOptions,
        registration: runtime.Registration,
        ready: Callable[[dict[str, Any]], None],
    ) -> None:
        self._devices = devices
        self._recovered = recovered
        self._options = options
        self._registration = registration
        self._mountpoint = registration.state.mountpoint
        self._ready = ready
        self._lost: list[str] = []
        self._stop_error: str | None = None
        self._fuse_fd = -1
        self._huge_pages = ""
        self._read_path = ReadPath()
        self._was_ready = False
        self._mount_gone = trio.Event()
        self._ended = trio.Event()
        self._data_plane = DataPlane(
            device_fds=[device.fd for device in devices.devices],
            device_names=[device.path for device in devices.devices],
            staging_limit_bytes=options.staging_bytes,
            io_backend=options.io_backend,
            keep_killed=options.keep_killed,
        )
        self._volume = Volume(
            devices, recovered, self._data_plane, read_only=options.read_only, commit_interval_s=options.commit_s
        )

    async def serve(self) -> int:
        """Mounts, serves, drains. Returns the exit status."""
        control = Control(self._volume, self._mountpoint, self._status, self._leave_when_asked)
        listener = await control.listen(self._registration.state.socket_path)
        max_write_bytes = fusemount.best_max_write_bytes()
        self._fuse_fd = await trio.to_thread.run_sync(self._mount)
        self._huge_pages = allow_huge_pages()
        self._data_plane.start()
        threads = max(2, min(4, os.cpu_count() or 2))
        self._switch = Switch(
            self._data_plane, fuse_fd=self._fuse_fd, max_write_bytes=max_write_bytes, reader_threads=threads
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._survive, lambda: control.serve(listener))
            nursery.start_soon(self._survive, self._leave_on_signals)
            nursery.start_soon(self._volume.run)
            requests = Requests(self._volume, self._switch, nursery)
            nursery.start_soon(dispatch_events, self._data_plane, self._handlers(requests, nursery))
            await self._serve_requests(nursery)
            await self._drain()
            await trio.to_thread.run_sync(self._let_go)
            self._ended.set()
            # Whoever waits on the control socket gets the last word; nobody is waited for.
            with trio.move_on_after(LAST_WORD_GRACE_S):
                while control.clients:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        return 1 if self._lost or self._stop_error else 0

    def unmount_if_never_ready(self) -> None:
        """A start that failed leaves nothing. One that was ready and failed leaves ENOTCONN, not an empty directory."""
        if self._fuse_fd >= 0 and not self._was_ready:
            with contextlib.suppress(MountError):
                fusemount.unmount(self._mountpoint, lazily=True)

    def _mount(self) -> int:
        return fusemount.open_connection(
            self._mountpoint,
            source=self._options.source or ",".join(device.path for device in self._devices.devices),
            kind=f"fuse.{self._options.kind}",
            flags=self._options.mount_flags,
            allow_other=self._options.allow_other,
        )

    async def _serve_requests(self, nursery: trio.Nursery) -> None:
        """Until the mount is gone."""
        pyfuse3.init(Operations(self._volume, nursery, self._read_path), f"/dev/fd/{self._switch.control_fd}", set())
        self._switch.start()
        try:
            await pyfuse3.main()
        except Exception:
            log.exception("serving requests ended")
            self._stop_error = "the daemon failed; see its log"
            await self._unmount(lazily=True)
        self._mount_gone.set()
        await trio.to_thread.run_sync(self._registration.tell, runtime.DRAINING)
        log.info("%s is unmounted; making everything durable", self._mountpoint)

    async def _drain(self) -> None:
        """All that was acknowledged goes to the devices; what cannot is noted by name."""
        try:
            await trio.to_thread.run_sync(self._switch.stop)
            pyfuse3.close(unmount=False)
            self._lost += [f"{path}: still open for writing when it ended" for path in self._volume.files.close_all()]
            await self._volume.drain()
            log.info("everything is durable")
        except Exception as error:
            log.exception("not everything could be made durable")
            self._stop_error = str(error)
        if self._stop_error:
            paths = self._volume.names.paths(self._volume.undurable())
            self._lost += [f"{path}: {self._stop_error}" for path in paths.values()]
        for lost in self._lost:
            log.error("lost: %s", lost)

    def _let_go(self) -> None:
        """Of everything that another mount of the volume will want."""
        self._data_plane.stop()
        self._recovered.journal.close()
        self._devices.close()
        os.close(self._fuse_fd)
        self._registration.remove()

    # Events of the native side.

    def _handlers(self, requests: Requests, nursery: trio.Nursery) -> dict[str, Callable[..., None]]:
        volume = self._volume
        return {
            **requests.handlers,
            "sealed": volume.log.seal_written,
            "grant_wanted": volume.space.grant,
            "no_room": lambda needed_bytes: nursery.start_soon(volume.space.resolve_no_room, volume.log),
            "kill_suidgid": volume.clear_set_id,
            "page_cache_wanted": self._read_path.want_page_cache,
            "device_error": self._note_device_error,
            "bad_checksum": self._note_bad_checksum,
            "initialised": lambda: nursery.start_soon(self._survive, self._tell_ready),
            "disconnected": pyfuse3.terminate,
        }

    async def _survive(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does what the mount can do without: its failure must not take the data with it."""
        try:
            await work()
        except Exception as error:
            log.exception("a part of the daemon failed")
            self._volume.errors.append(f"a part of the daemon failed: {error!r}")

    async def _tell_ready(self) -> None:
        features = cast("list[str]", self._switch.statistics()["kernel_features"])
        self._read_path.may_bypass = "direct_io_allow_mmap" in features
        await trio.to_thread.run_sync(fusemount.raise_read_ahead, self._mountpoint)
        await trio.to_thread.run_sync(self._registration.tell, runtime.MOUNTED)
        log.info("mounted at %s", self._mountpoint)
        self._was_ready = True
        self._ready({"ready": True, "pid": os.getpid(), "warnings": self._warnings()})

    def _warnings(self) -> list[str]:
        warnings = [_describe(problem) for problem in self._recovered.problems]
        if self._recovered.damaged:
            warnings.append("the volume is damaged and mounted read-only: run ckptfs fsck")
        buffered = [device.path for device in self._devices.devices if not device.direct]
        if buffered:
            warnings.append(f"no O_DIRECT on {', '.join(buffered)}: writes are buffered and synced")
        return warnings

    def _note_device_error(
        self, device_index: int, operation: str, offset_bytes: int, length_bytes: int, error: int
    ) -> None:
        path = self._devices.devices[device_index].path
        self._note(f"{path}: {operation} at offset {offset_bytes}, {length_bytes} bytes: {os.strerror(error)}")

    def _note_bad_checksum(
        self, ino: int, file_offset_bytes: int, device_index: int, device_offset_bytes: int, length_bytes: int
    ) -> None:
        self._note(
            f"{self._volume.names.path(ino)}, offset {file_offset_bytes}: wrong checksum of {length_bytes} bytes on"
            f" {self._devices.devices[device_index].path}, offset {device_offset_bytes}"
        )

    def _note(self, message: str) -> None:
        log.error("%s", message)
        self._volume.errors.append(message)

    # Leaving.

    async def _leave_when_asked(self) -> dict[str, Any]:
        """`ckptfs umount`: everything durable, then unmount, then the end."""
        log.info("asked to unmount")
        if not self._mount_gone.is_set():
            await self._flush()
            with contextlib.suppress(NotMounted):
                await self._unmount(lazily=False)
        await self._ended.wait()
        if self._lost or self._stop_error:
            what = "; ".join(self._lost) or self._stop_error
            return {"error": f"not everything could be made durable: {what}", "exit_status": 1, "lost": self._lost}
        return {"done": True, "lost": []}

    async def _leave_on_signals(self) -> None:
        """SIGTERM and SIGINT: as umount, but files that stay open are left behind."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("%s: leaving", signal.Signals(number).name)
                await self._flush()
                try:
                    with contextlib.suppress(NotMounted):
                        await self._unmount(lazily=False)
                except CkptfsError as error:
                    log.warning("%s; its open files are left behind", error)
                    await self._abandon()

    async def _abandon(self) -> None:
        await self._unmount(lazily=True)
        with trio.move_on_after(BUSY_GRACE_S):
            await self._mount_gone.wait()
        if not self._mount_gone.is_set():
            pyfuse3.terminate()

    async def _flush(self) -> None:
        try:
            await self._volume.sync()
        except CkptfsError as error:
            log.error("not everything can be made durable: %s", error)
        with trio.move_on_after(RELEASE_GRACE_S):
            while any(file.handles for file in self._volume.files):
                await trio.sleep(0.005)

    async def _unmount(self, *, lazily: bool) -> None:
        try:
            await trio.to_thread.run_sync(lambda: fusemount.unmount(self._mountpoint, lazily=lazily))
        except MountError as error:
            if error.errno != errno.EBUSY:
                raise
            raise await trio.to_thread.run_sync(self._busy) from None

    def _busy(self) -> MountError:
        paths = [self._volume.names.path(file.ino) for file in self._volume.files if file.handles]
        parts = [f"open: {', '.join(paths[:10])}"] if paths else []
        users = fusemount.processes_using(self._mountpoint)
        parts += [f"used by {', '.join(users[:10])}"] if users else []
        busy = MountError(f"{self._mountpoint} is busy ({'; '.join(parts) or 'in use'}): close that and try again")
        busy.errno = errno.EBUSY
        return busy

    # Status.

    def _status(self) -> dict[str, Any]:
        volume, state = self._volume, self._registration.state
        plane, switch = self._data_plane.statistics(), self._switch.statistics()
        undurable = volume.undurable()
        paths = volume.names.paths(undurable[:MAX_UNDURABLE_SHOWN])
        return {
            "pid": state.pid,
            "mountpoint": state.mountpoint,
            "state": state.state,
            "volume": state.volume_uuid,
            "label": state.label,
            "read_only": volume.read_only,
            "devices": plane.pop("devices"),
            "space": volume.statfs()._asdict(),
            "staging": {
                key: plane.pop(f"staging_{key}")
                for key in ("limit_bytes", "populated_bytes", "used_bytes", "dirty_bytes")
            },
            "log": {
                "entries": volume.log.position - volume.log.durable_position,
                "position": volume.log.position,
                "durable_position": volume.log.durable_position,
                "journal_used_fraction": round(volume.log.journal_used_fraction, 4),
                "error": str(volume.log.error) if volume.log.error else None,
            },
            **plane,
            "huge_pages": self._huge_pages,
            "kernel": switch,
            "large_reads": self._read_path.description,
            "undurable_count": len(undurable),
            "undurable": [{"path": path, "state": volume.state(ino)} for ino, path in paths.items()],
            "killed": [killed._asdict() for killed in volume.files.killed],
            "errors": list(volume.errors),
            "warnings": self._warnings(),
            "log_path": state.log_path,
        }


@click.command()
@click.option("--ready-fd", type=int, required=True, help="Where to say that the mount is ready, or why not.")
@click.option("--foreground", is_flag=True, help="Log to standard error.")
@click.option("-o", "options", multiple=True)
@click.argument("devices", nargs=-1, required=True)
@click.argument("mountpoint")
def command(
    ready_fd: int, foreground: bool, options: tuple[str, ...], devices: tuple[str, ...], mountpoint: str
) -> None:
    """Serve a mount of a volume. Started by `ckptfs mount`."""
    pipe = os.fdopen(ready_fd, "w")

    def ready(word: dict[str, Any]) -> None:
        if not pipe.closed:
            pipe.write(json.dumps(word) + "\n")
            pipe.close()

    try:
        status = run(list(devices), mountpoint, parse_options(options), ready, foreground=foreground)
    except Exception as failure:
        error = first_cause(failure)
        if isinstance(error, CkptfsError):
            log.error("%s", error)
            message, status = str(error), error.exit_status
        else:
            log.exception("the daemon failed")
            message, status = f"the daemon failed: {type(error).__name__}: {error}", 1
        ready({"error": message, "exit_status": status, "kind": type(error).__name__})
    # Not by sys.exit(): the interpreter's end would wait for threads that wait for nothing any more.
    logging.shutdown()
    os._exit(status)


def run(
    device_paths: list[str],
    mountpoint: str,
    options: MountOptions,
    ready: Callable[[dict[str, Any]], None],
    *,
    foreground: bool,
) -> int:
    """Serves a mount to its end. Returns the exit status."""
    device_paths = [os.path.realpath(path) for path in device_paths]
    mountpoint = fusemount.real_mountpoint(mountpoint)
    os.chdir("/")
    _become_io_flusher()
    with assemble(device_paths, writable=not options.read_only, exclusive=True) as devices:
        paths = [os.path.realpath(device.path) for device in devices.devices]
        registration = runtime.Registration(str(devices.volume_uuid), devices.label, mountpoint, paths)
        try:
            _log_to(None if foreground else registration.state.log_path)
            log.info("volume %s on %s", devices.volume_uuid, ", ".join(paths))
            recovered = recover(devices, read_only=options.read_only)
            for problem in recovered.problems:
                log.warning("%s", _describe(problem))
            options.read_only = options.read_only or recovered.damaged
            daemon = Daemon(devices, recovered, options, registration, ready)
        except BaseException:
            registration.remove()
            raise
        try:
            return trio.run(daemon.serve)
        finally:
            daemon.unmount_if_never_ready()


def _describe(problem: Problem) -> str:
    return f"{problem.code.value}: {problem.place}: found {problem.found}, expected {problem.expected}"


class _LogThread(logging.handlers.QueueHandler):
    """Passes the log on to a thread that writes it."""

    def __init__(self, writer: logging.Handler) -> None:
        super().__init__(queue.SimpleQueue())
        self._writer_thread = logging.handlers.QueueListener(self.queue, writer)
        self._writer_thread.start()

    def close(self) -> None:
        """Returns when all is written."""
        self._writer_thread.stop()
        super().close()


def _log_to(path: str | None) -> None:
    """Sends the log, and whatever native code prints, to a file or to standard error.

    No request is to wait for the disk that the log is on.
    """
    if path is not None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for standard_fd in (1, 2):
            os.dup2(fd, standard_fd)
        os.close(fd)
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(_LogThread(writer))
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("pyfuse3").setLevel(logging.WARNING)


def _become_io_flusher() -> None:
    """Under memory pressure the kernel is not to wait for writes through the mount on our behalf."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) != 0:
        log.info("PR_SET_IO_FLUSHER: %s", os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    command()
