"""The daemon's control socket: JSON lines in, JSON lines out.

A request is {"command": "status" | "wait" | "extents" | "umount", ...}. Its answer is any number of {"progress": {...}}
lines and one last line with "done" or "error" (and "exit_status"). Paths are absolute or relative to the volume's
root; what is no UTF-8 in them is escaped as os.fsdecode() does. "ino" may stand for "path".

Concurrency: each connection has a task; it waits for the log and the clock only. A client that goes away ends its task.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import trio

from ckptfs import extents
from ckptfs.errors import CkptfsError, FsError, UsageError
from ckptfs.namespace import Inode

if TYPE_CHECKING:
    from ckptfs.volume import Volume

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.2
OPEN_VERSION_POLL_S = 0.02
MAX_REQUEST_BYTES = 1 << 16

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Request = Mapping[str, Any]


class WaitFailed(CkptfsError):
    """What was waited for will never be durable."""


class Control:
    """Answers clients."""

    def __init__(
        self,
        volume: Volume,
        mountpoint: str,
        tell_status: Callable[[], dict[str, Any]],
        leave: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        """Starts nothing.

        Args:
            volume: What to ask.
            mountpoint: To cut from absolute paths.
            tell_status: All that status shows.
            leave: Unmounts; returns, when the daemon is about to end, what is to be told as the last word.
        """
        self._volume = volume
        self._mountpoint = mountpoint
        self._tell_status = tell_status
        self._leave = leave
        self.clients = 0
        """Connected, and not told everything yet."""

    async def listen(self, socket_path: str) -> trio.SocketListener:
        """Makes the socket. Anybody may ask; only root and the daemon's user may unmount."""
        if os.path.lexists(socket_path):
            os.unlink(socket_path)
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await listener.bind(socket_path)
        os.chmod(socket_path, 0o666)
        listener.listen()
        return trio.SocketListener(listener)

    async def serve(self, listener: trio.SocketListener) -> None:
        """Takes connections until cancelled."""
        await trio.serve_listeners(self._serve_client, [listener])

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        async def send(answer: Mapping[str, Any]) -> None:
            await stream.send_all(json.dumps(answer).encode() + b"\n")

        received = b""
        self.clients += 1
        try:
            async with stream:
                while b"\n" not in received:
                    chunk = await stream.receive_some(MAX_REQUEST_BYTES)
                    received += chunk
                    if not chunk or len(received) > MAX_REQUEST_BYTES:
                        return
                await self._answer(received.partition(b"\n")[0], _peer_uid(stream), send)
        except trio.BrokenResourceError:
            log.debug("a client went away")
        finally:
            self.clients -= 1

    async def _answer(self, line: bytes, uid: int, send: Send) -> None:
        commands = {"status": self._status, "wait": self._wait, "extents": self._extents, "umount": self._umount}
        try:
            request = json.loads(line)
            if request["command"] == "umount" and uid not in (0, os.geteuid()):
                raise FsError(errno.EPERM, "only root and who mounted the volume may unmount it")
            answer = await commands[request["command"]](request, send)
        except CkptfsError as error:
            answer = {"error": str(error), "exit_status": error.exit_status}
        except (ValueError, KeyError, TypeError) as error:
            answer = {"error": f"this is no request: {error!r}", "exit_status": 2}
        except trio.BrokenResourceError:
            raise
        except Exception as error:
            log.exception("a control request failed")
            answer = {"error": f"unexpected {type(error).__name__}: {error}", "exit_status": 1}
        await send(answer)

    async def _status(self, request: Request, send: Send) -> dict[str, Any]:
        del request, send
        return {"done": True, "status": self._tell_status()}

    async def _extents(self, request: Request, send: Send) -> dict[str, Any]:
        del send
        inode = self._inode(request)
        if not inode.is_file:
            raise UsageError("only regular files have extents")
        devices = [device.path for device in self._volume.devices.devices]
        durable = self._volume.log.durable.inodes.get(inode.ino)
        described = extents.describe(durable.rows if durable else b"", durable.size_bytes if durable else 0, devices)
        path, state = self._volume.names.path(inode.ino), self._volume.state(inode.ino)
        return {"done": True, "path": path, "ino": inode.ino, "state": state, **described}

    async def _umount(self, request: Request, send: Send) -> dict[str, Any]:
        del request
        return await self._with_progress(send, self._leave)

    async def _wait(self, request: Request, send: Send) -> dict[str, Any]:
        whole = request.get("path") is None and request.get("ino") is None
        inode = None if whole else self._inode(request)
        return await self._with_progress(send, lambda: self._wait_until_durable(inode))

    async def _wait_until_durable(self, inode: Inode | None) -> dict[str, Any]:
        volume = self._volume
        if inode is None:
            await volume.sync()
            return {"done": True}
        killed_before = len(volume.files.killed)
        while being_written := self._being_written(inode):
            if volume.log.error is not None:
                raise volume.log.error
            await trio.sleep(OPEN_VERSION_POLL_S)
            for killed in volume.files.killed[killed_before:]:
                if killed.ino in being_written:
                    raise WaitFailed(f"{killed.path} is not saved: its writer was killed before it closed the file")
        await volume.sync()
        if volume.state(inode.ino) == "failed":
            raise WaitFailed(f"{volume.names.path(inode.ino)} could not be saved: its data is lost; see ckptfs status")
        if inode.nlink == 0:
            raise WaitFailed("the file was deleted meanwhile")
        return {"done": True}

    def _being_written(self, inode: Inode) -> set[int]:
        """The inode, or the files below it, as far as they have an open version."""
        if not inode.is_directory:
            return {inode.ino} if inode.nlink and self._volume.files.is_modified(inode.ino) else set()
        files, names = self._volume.files, self._volume.names
        return {file.ino for file in files if files.is_modified(file.ino) and names.is_below(file.ino, inode.ino)}

    async def _with_progress(self, send: Send, work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Does some work, and tells how far it is. A client that goes away cancels it."""
        outcome: dict[str, Any] | CkptfsError = WaitFailed("the client went away")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_progress, send, nursery.cancel_scope)
            try:
                outcome = await work()
            except CkptfsError as error:
                outcome = error
            nursery.cancel_scope.cancel()
        if isinstance(outcome, CkptfsError):
            raise outcome
        return outcome

    async def _send_progress(self, send: Send, work: trio.CancelScope) -> None:
        try:
            while True:
                await trio.sleep(PROGRESS_INTERVAL_S)
                await send({"progress": self._volume.progress()})
        except trio.BrokenResourceError:
            work.cancel()

    def _inode(self, request: Request) -> Inode:
        if request.get("ino") is not None:
            return self._volume.live.get(int(request["ino"]))
        path = str(request["path"])
        if path == self._mountpoint or path.startswith(self._mountpoint.rstrip("/") + "/"):
            path = path[len(self._mountpoint.rstrip("/")) :]
        try:
            return self._volume.live.resolve(os.fsencode(path))
        except FsError as error:
            raise FsError(error.errno, f"{path}: {os.strerror(error.errno)}") from None


def _peer_uid(stream: trio.SocketStream) -> int:
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
