"""What the data plane tells and asks: dispatch of its events, and the supply of device space.

Concurrency: everything runs in the trio thread. A handler of an event is synchronous and starts a task for whatever
takes time, so no event waits for another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import trio

from ckptfs.errors import CkptfsError

if TYPE_CHECKING:
    from ckptfs._native import DataPlane
    from ckptfs.allocator import Allocator
    from ckptfs.commit import Log

log = logging.getLogger(__name__)

SEGMENTS_AHEAD = 2
"""Segments that each device's data plane gets before it asks."""


async def dispatch_events(data_plane: DataPlane, handlers: Mapping[str, Callable[..., None]]) -> None:
    """Calls the handler of each event, until cancelled.

    A handler that raises is logged, and the next event is handled.
    """
    while True:
        await trio.lowlevel.wait_readable(data_plane.event_fd)
        for kind, *arguments in data_plane.take_events():
            _handle(handlers[str(kind)], str(kind), arguments)


def _handle(handler: Callable[..., None], kind: str, arguments: list[Any]) -> None:
    try:
        handler(*arguments)
    except Exception:
        log.exception("event %s%r failed", kind, tuple(arguments)[:5])


class SpaceSupply:
    """Hands device space to the data plane.

    Invariant: the allocator's free ranges and the ranges handed out together hold what the data plane counts as free.
    """

    def __init__(self, data_plane: DataPlane, allocator: Allocator, device_count: int) -> None:
        self._data_plane = data_plane
        self._allocator = allocator
        self._device_count = device_count
        self._resolving = False
        self._asked_again = False

    def start(self) -> None:
        """Makes all free space known, and hands out the first segments."""
        self._data_plane.add_free(self._allocator.free_bytes)
        for _ in range(SEGMENTS_AHEAD):
            for device_index in range(self._device_count):
                self.grant(device_index)

    def grant(self, device_index: int) -> None:
        """Hands out the emptiest segment of a device; nothing when it is full, which the data plane must know too."""
        self._data_plane.grant(device_index, self._allocator.take_segment(device_index))

    async def resolve_no_room(self, volume_log: Log) -> None:
        """A write is parked for room: waits for all the space that the log still holds back, then says it was all."""
        self._asked_again = True
        if self._resolving:
            return
        self._resolving = True
        try:
            while self._asked_again:
                self._asked_again = False
                volume_log.hurry()
                try:
                    await volume_log.wait_applied(volume_log.position)
                except CkptfsError as error:
                    log.warning("no space comes back from the log: %s", error)
                self._data_plane.expire_no_room()
        finally:
            self._resolving = False
