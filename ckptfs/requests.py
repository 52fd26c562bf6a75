"""Answers the requests that the switch gives to Python itself: FLUSH, FSYNC, FSYNCDIR, O_SYNC writes.

Concurrency: each that waits has a task of its own, so any number may wait while others are served. An INTERRUPT
cancels its task, and is answered EINTR; it may come before its request.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import trio

from ckptfs.errors import CkptfsError

if TYPE_CHECKING:
    from ckptfs._native import Switch
    from ckptfs.volume import Volume

log = logging.getLogger(__name__)

MAX_EARLY_INTERRUPTS = 1024


class Requests:
    """The requests in progress."""

    def __init__(self, volume: Volume, switch: Switch, nursery: trio.Nursery) -> None:
        self._volume = volume
        self._switch = switch
        self._nursery = nursery
        self._waiting: dict[int, trio.CancelScope] = {}
        self._early: OrderedDict[int, None] = OrderedDict()

    @property
    def handlers(self) -> Mapping[str, Callable[..., None]]:
        """The handlers of the events that are requests, and of what interrupts them."""
        return {
            "flush": self._flush,
            "fsync": self._fsync,
            "fsyncdir": self._fsyncdir,
            "sync_write": self._sync_write,
            "interrupt": self._interrupt,
        }

    def _flush(self, unique: int, ino: int, fh: int, pid: int) -> None:
        del fh, pid
        try:
            error = self._volume.flush(ino)
        except Exception as failure:
            error = _errno_of(failure)
        self._switch.reply(unique, error)

    def _fsync(self, unique: int, ino: int, fh: int, pid: int) -> None:
        del fh, pid
        self._nursery.start_soon(self._answer, unique, lambda: self._volume.fsync(ino))

    def _fsyncdir(self, unique: int, ino: int, fh: int, pid: int) -> None:
        del ino, fh, pid
        self._nursery.start_soon(self._answer, unique, self._volume.sync)

    def _sync_write(self, unique: int, ino: int, length_bytes: int) -> None:
        self._nursery.start_soon(self._answer, unique, lambda: self._volume.fsync(ino), length_bytes)

    def _interrupt(self, unique: int) -> None:
        scope = self._waiting.get(unique)
        if scope is not None:
            scope.cancel()
            return
        self._early[unique] = None
        if len(self._early) > MAX_EARLY_INTERRUPTS:
            self._early.popitem(last=False)

    async def _answer(self, unique: int, wait: Callable[[], Awaitable[None]], length_bytes: int | None = None) -> None:
        with trio.CancelScope() as scope:
            self._waiting[unique] = scope
            if unique in self._early:
                del self._early[unique]
                scope.cancel()
            error = errno.EINTR
            try:
                await wait()
                error = 0
            except Exception as failure:
                error = _errno_of(failure)
            finally:
                del self._waiting[unique]
                if length_bytes is not None and error in (0, errno.EINTR):
                    # The bytes are in the file, so the write was no failure, only less than durable when interrupted.
                    self._switch.reply_write(unique, length_bytes)
                else:
                    self._switch.reply(unique, error)


def _errno_of(failure: Exception) -> int:
    if isinstance(failure, CkptfsError):
        return failure.errno
    log.exception("a request failed")
    return getattr(failure, "errno", None) or errno.EIO
