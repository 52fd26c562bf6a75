"""The one ordered log, and the task that makes it durable.

Every effect on the volume is an entry of the log before it is acknowledged. Commits take entries strictly in order,
so what survives a crash is a prefix of the log (P4). An entry with seals is ready when all their extents are on
their devices; the rows are then in its Seal records.

One commit: barrier of the data devices touched -> journal -> apply to the durable namespace -> release the space
that nothing needs any more -> wake the waiters.

Concurrency: all state belongs to the trio thread. Worker threads only run Device.barrier, Journal.append and
write_snapshot, and touch nothing else. Everything but `run`, `wait_*` and `finish` is synchronous and may be called
at any time; between two awaits of `run` entries may be appended, seals may become ready and waiters may come, but
only `run` (and `finish`, once the log is empty) takes entries away, appends to the journal or changes the durable
namespace. While a snapshot is written the durable namespace is frozen: later groups are journaled and are durable,
but wait for their application. Whoever needs freed space or committed maps of a group waits until it is applied.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import trio

from ckptfs import extents
from ckptfs.errors import CkptfsError, DeviceFailed, JournalFull
from ckptfs.journal import Journal, JournalPosition
from ckptfs.namespace import Applied, Namespace
from ckptfs.records import Record, Seal, apply_entry, encode_entry
from ckptfs.snapshot import write_snapshot

if TYPE_CHECKING:
    from ckptfs._native import DataPlane
    from ckptfs.recovery import Recovered
    from ckptfs.superblock import VolumeDevices

log = logging.getLogger(__name__)

LINGER_S = 0.05
"""How long a commit that nobody waits for lets others join its group."""
MAX_GROUP_BYTES = 1 << 20
MAX_GROUP_ENTRIES = 4096
SNAPSHOT_AT_USED_FRACTION = 0.5
JOURNAL_RETRY_S = 0.5
JOURNAL_PATIENCE_S = 60.0
"""How long a journal that no mirror takes is tried again before the order counts as broken."""

OnApplied = Callable[[Sequence[Record]], None]
"""Called for each entry when it has been applied to the durable namespace."""


@dataclass(slots=True)
class _Entry:
    position: int
    records: list[Record]
    unwritten: dict[int, int] = field(default_factory=dict)
    """Seal id -> index of its Seal record, of the seals whose extents are not all on their devices yet."""
    error: CkptfsError | None = None
    reserved_metadata_bytes: int = 0


class Log:
    """The log of a mount. Positions count its entries from 1."""

    def __init__(
        self, devices: VolumeDevices, recovered: Recovered, data_plane: DataPlane, on_applied: OnApplied
    ) -> None:
        self._devices = devices
        self._journal: Journal = recovered.journal
        self._epoch = recovered.epoch
        self._allocator = recovered.allocator
        self._durable: Namespace = recovered.namespace
        self._data_plane = data_plane
        self._on_applied = on_applied
        self._entries: deque[_Entry] = deque()
        self._sealing: dict[int, _Entry] = {}
        self._unapplied: deque[_Entry] = deque()
        self._unheld: list[int] = []
        self._frozen = False
        self._changed = trio.Event()
        """Set and replaced whenever run() may have something new to do."""
        self._advanced = trio.Event()
        """Set and replaced whenever a position or the error changed, or a snapshot ended."""
        self._wanted_position = 0
        self._journal_lock = trio.Lock()
        self.position = 0
        self.durable_position = 0
        self.applied_position = 0
        self.error: CkptfsError | None = None

    @property
    def durable(self) -> Namespace:
        """The committed namespace. REQUIRES of callers: read only."""
        return self._durable

    @property
    def journal_used_fraction(self) -> float:
        """How full the journal is."""
        return self._journal.used_fraction

    def append(
        self, records: Sequence[Record], *, seal_ids: Sequence[int] = (), reserved_metadata_bytes: int = 0
    ) -> int:
        """Appends one atomic entry.

        Args:
            records: What it does.
            seal_ids: The n-th belongs to the n-th Seal record, whose rows are still empty.
            reserved_metadata_bytes: What the entry holds in the metadata region until it is applied; then what it
                really took is known.

        Raises:
            CkptfsError: The log is broken; the volume takes no more changes.
        """
        if self.error is not None:
            raise self.error
        self.position += 1
        entry = _Entry(self.position, list(records), reserved_metadata_bytes=reserved_metadata_bytes)
        if seal_ids:
            seals = [index for index, record in enumerate(records) if isinstance(record, Seal)]
            entry.unwritten = dict(zip(seal_ids, seals, strict=True))
            self._sealing.update(dict.fromkeys(seal_ids, entry))
        self._entries.append(entry)
        self._signal()
        return self.position

    def seal_written(self, seal_id: int, errno: int, rows: bytes) -> None:
        """The extents of a seal are on their devices, or (errno) never will be."""
        entry = self._sealing.pop(seal_id, None)
        if entry is None:
            return
        index = entry.unwritten.pop(seal_id)
        seal = entry.records[index]
        assert isinstance(seal, Seal)
        if errno:
            entry.error = DeviceFailed(
                f"no device took the data of inode {seal.ino}: what was acknowledged from there on is lost;"
                " see the daemon's log for the devices' errors",
                errno,
            )
        else:
            entry.records[index] = replace(seal, rows=rows)
        self._signal()

    def hurry(self) -> None:
        """Commits what is there without lingering."""
        self._wanted_position = self.position
        self._signal()

    async def wait_durable(self, position: int) -> None:
        """Waits until everything up to a position is on the devices.

        Raises:
            CkptfsError: It never will be.
        """
        if position > self._wanted_position:
            self._wanted_position = position
            self._signal()
        while self.durable_position < position:
            if self.error is not None:
                raise self.error
            await self._advanced.wait()

    async def wait_applied(self, position: int) -> None:
        """Waits until everything up to a position is durable and the space it let go is free again."""
        await self.wait_durable(position)
        while self.applied_position < position:
            if self.error is not None:
                raise self.error
            await self._advanced.wait()

    def hold(self, ino: int) -> None:
        """The inode is open: it outlives its last name."""
        self._durable.held.add(ino)

    def unhold(self, ino: int) -> None:
        """The inode is not open any more: without a name it goes now, or when the loss of its name is applied."""
        self._durable.held.discard(ino)
        self._unheld.append(ino)
        self._apply_waiting()

    async def run(self) -> None:
        """Commits until it is cancelled, or until the order is broken."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await self._commit(await self._next_group())
                    if self._journal.used_fraction > SNAPSHOT_AT_USED_FRACTION and not self._frozen:
                        nursery.start_soon(self._snapshot_in_background, self._freeze())
        except Exception as error:
            self._break(first_cause(error))

    async def finish(self) -> None:
        """Waits until all is durable and applied, then writes a snapshot. REQUIRES: nobody appends any more."""
        await self.wait_applied(self.position)
        while self._frozen:
            await self._advanced.wait()
        await self._snapshot(self._freeze())

    def _signal(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _announce(self) -> None:
        self._advanced.set()
        self._advanced = trio.Event()

    async def _next_group(self) -> list[_Entry]:
        """Waits for a ready entry at the head, then for company if nobody is in a hurry. The entries stay queued."""
        while not self._head_is_ready():
            await self._changed.wait()
        with trio.move_on_after(LINGER_S):
            while self._wanted_position < self._entries[0].position:
                await self._changed.wait()
        group: list[_Entry] = []
        group_bytes = 0
        for entry in self._entries:
            if entry.unwritten or entry.error or group_bytes >= MAX_GROUP_BYTES or len(group) >= MAX_GROUP_ENTRIES:
                break
            group.append(entry)
            group_bytes += sum(len(record.rows) for record in entry.records if isinstance(record, Seal))
        return group

    def _head_is_ready(self) -> bool:
        if self._entries and self._entries[0].error is not None:
            raise self._entries[0].error
        return bool(self._entries) and not self._entries[0].unwritten

    async def _commit(self, group: list[_Entry]) -> None:
        await self._barrier(group)
        encoded = [encode_entry(entry.records) for entry in group]
        applied = 0
        try:
            await self._append_to_journal(encoded)
        except JournalFull:
            applied = len(group)
            await self._commit_by_snapshot(group)
        for entry in group:
            assert self._entries.popleft() is entry
        self.durable_position = group[-1].position
        self._unapplied.extend(group[applied:])
        self._apply_waiting()
        self._announce()

    async def _append_to_journal(self, encoded: list[bytes]) -> None:
        """Appends, again and again while no mirror takes it: nothing is lost as long as we wait."""
        deadline = trio.current_time() + JOURNAL_PATIENCE_S
        while (failure := await self._try_to_append(encoded)) is not None:
            if trio.current_time() > deadline:
                raise failure
            log.warning("the journal could not be written, trying again: %s", failure)
            await trio.sleep(JOURNAL_RETRY_S)

    async def _try_to_append(self, encoded: list[bytes]) -> DeviceFailed | None:
        async with self._journal_lock:
            try:
                await trio.to_thread.run_sync(self._journal.append, encoded)
            except DeviceFailed as failure:
                return failure
        return None

    async def _barrier(self, group: list[_Entry]) -> None:
        rows = b"".join(record.rows for entry in group for record in entry.records if isinstance(record, Seal))
        touched = {extent.device_index for extent in extents.stored_extents(rows)}
        async with trio.open_nursery() as nursery:
            for device_index in touched:
                nursery.start_soon(trio.to_thread.run_sync, self._devices.devices[device_index].barrier)

    async def _commit_by_snapshot(self, group: list[_Entry]) -> None:
        """The group goes to the devices as part of a snapshot, where the journal has no room for it."""
        while self._frozen:
            await self._advanced.wait()
        applied = [apply_entry(self._durable, entry.records) for entry in group]
        await self._snapshot(self._freeze())
        for entry, change in zip(group, applied, strict=True):
            self._settle(entry, change)

    def _freeze(self) -> JournalPosition:
        """REQUIRES: all that was journaled is applied. Returns the journal position that the namespace stands for."""
        assert not self._frozen
        assert not self._unapplied
        self._frozen = True
        return self._journal.position

    async def _snapshot_in_background(self, journal_position: JournalPosition) -> None:
        try:
            await self._snapshot(journal_position)
        except CkptfsError as error:
            # The journal still has all of it; a commit that finds it full will try again, and be told.
            log.warning("no snapshot could be written: %s", error)

    async def _snapshot(self, journal_position: JournalPosition) -> None:
        try:
            await trio.to_thread.run_sync(
                write_snapshot,
                self._devices.devices,
                self._devices.superblocks,
                self._durable,
                self._epoch,
                journal_position,
            )
            async with self._journal_lock:
                self._journal.advance_start(journal_position)
        finally:
            self._frozen = False
            self._apply_waiting()
            self._announce()

    def _apply_waiting(self) -> None:
        """Brings the durable namespace up to what is journaled, unless it is frozen."""
        if self._frozen:
            return
        while self._unapplied:
            entry = self._unapplied.popleft()
            self._settle(entry, apply_entry(self._durable, entry.records))
        unheld, self._unheld = self._unheld, []
        for ino in unheld:
            inode = self._durable.inodes.get(ino)
            if inode is not None and inode.nlink == 0 and ino not in self._durable.held:
                self._release(self._durable.drop(ino))

    def _settle(self, entry: _Entry, change: Applied) -> None:
        self._data_plane.add_free_metadata(entry.reserved_metadata_bytes)
        self._release(change)
        self.applied_position = entry.position
        self._on_applied(entry.records)

    def _release(self, change: Applied) -> None:
        self._data_plane.add_free_metadata(-change.metadata_bytes)
        for extent in change.freed:
            self._allocator.free(extent)
        if change.freed:
            self._data_plane.add_free(sum(extent.space_bytes for extent in change.freed))
        for ino in change.dropped:
            if ino not in self._durable.inodes and not self._data_plane.is_registered(ino):
                self._data_plane.forget(ino)

    def _break(self, error: Exception) -> None:
        """The order cannot be kept any more: nothing else may be written (P4, P7)."""
        log.error("the log is broken at entry %d: %s", self.durable_position + 1, error, exc_info=error)
        self.error = error if isinstance(error, CkptfsError) else DeviceFailed(f"commit failed: {error!r}")
        self._announce()


def first_cause(error: Exception) -> Exception:
    """The first exception inside the groups that nurseries make."""
    while inner := getattr(error, "exceptions", ()):
        error = next((one for one in inner if isinstance(one, Exception)), inner[0])
    return error
