"""Which measurements there are, and what each must reach.

In every group the places take turns (A B C, A B C, ...), each time with a fresh file, after one round that does not
count. Between two timed operations everything is durable, so that none pays for the one before.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfs.benchmark import fio, machine, workloads
from ckptfs.benchmark.results import Criterion, Results, Row, at_least, at_most, must_hold
from ckptfs.benchmark.worker import SMALL_PIECE_BYTES, SMALL_PIECES, Writer, hold_small_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptfs.benchmark.places import Sandbox, Volume

    Case = Callable[[int], float]

MIB = 1 << 20
GIB = 1 << 30
IMAGE_COUNT = 4
MEMORY_ALLOWANCE_BYTES = 300 * MIB
SMALL_STAGING_BYTES = 64 * MIB
SMALL_TIMEOUT_SECONDS = 300

SHM = "/dev/shm"
CKPTFS = "ckptfs"
PLAIN = "plain pyfuse3 handler"


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    quick: bool
    repeats: int
    save_bytes: int
    durable_bytes: int
    big_bytes: int
    big_staging_bytes: int
    process_bytes: int
    image_bytes: int

    @property
    def disk_bytes(self) -> int:
        """The image files, their siblings for fio, and two saves on the local file system."""
        return IMAGE_COUNT * self.image_bytes + self.durable_bytes + 2 * self.save_bytes + GIB // 4

    @property
    def memory_bytes(self) -> int:
        """State, payload, their copies in memory, and the staging that the run fills."""
        return 5 * self.save_bytes + max(self.durable_bytes, 8 * self.process_bytes) + GIB


FULL = Plan(
    quick=False,
    repeats=5,
    save_bytes=GIB,
    durable_bytes=4 * GIB,
    big_bytes=8 * GIB,
    big_staging_bytes=GIB,
    process_bytes=GIB // 2,
    image_bytes=3 * GIB,
)
QUICK = Plan(
    quick=True,
    repeats=3,
    save_bytes=64 * MIB,
    durable_bytes=256 * MIB,
    big_bytes=512 * MIB,
    big_staging_bytes=128 * MIB,
    process_bytes=32 * MIB,
    image_bytes=GIB // 2,
)


class Suite:
    """One run: measures into `results`."""

    def __init__(
        self,
        plan: Plan,
        sandbox: Sandbox,
        results: Results,
        plain_program: Path | None,
        progress: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._sandbox = sandbox
        self._results = results
        self._plain_program = plain_program
        self._progress = progress
        progress("laying out image files")
        self._volume: Volume = sandbox.volume(image_count=IMAGE_COUNT, image_bytes=plan.image_bytes)

    def run(self, group: str) -> None:
        """Measures one of GROUPS."""
        GROUPS[group](self)

    def _take_turns(self, group: str, length_bytes: int, cases: dict[str, Case], *, beside: str | None) -> None:
        samples: dict[str, list[float]] = {place: [] for place in cases}
        for turn in range(self._plan.repeats + 1):
            for place, case in cases.items():
                self._progress(f"{group}: {place}, {turn} of {self._plan.repeats}")
                seconds = case(turn)
                if turn > 0:
                    samples[place].append(seconds)
        for place, seconds_of in samples.items():
            other = beside if beside != place else None
            self._results.rows.append(Row(group, place, length_bytes, tuple(seconds_of), other))

    def _judge(self, *criteria: Criterion) -> None:
        self._results.criteria.extend(criteria)

    def save(self) -> None:
        """How long torch.save keeps the trainer, with torch's own CRC-32 and without."""
        state = workloads.make_state(self._plan.save_bytes)
        stall = partial(workloads.save, state)
        local = self._sandbox.local_name
        cases: dict[str, Case] = {
            SHM: fresh(self._sandbox.memory, stall),
            CKPTFS: fresh(self._volume.folder, stall),
            local: fresh(self._sandbox.local, stall),
            f"{local} + fsync": fresh(self._sandbox.local, partial(stall, fsync=True)),
            "sink that discards": lambda _turn: stall(workloads.NULL),
        }
        for crc32, group, limit in [(True, "torch.save, stock", 1.05), (False, "torch.save, CRC-32 off", 1.10)]:
            with workloads.torch_crc32(crc32):
                self._take_turns(group, self._plan.save_bytes, cases, beside=SHM)
            ratio = self._results.time_ratio(group, CKPTFS, SHM)
            self._judge(at_most(f"{group}: stall against {SHM}", ratio, limit))

    def write(self) -> None:
        """write(2), against memory and against a handler in Python."""
        group = "write(2), 64 MiB calls"
        length_bytes = self._plan.save_bytes
        write = partial(workloads.write, workloads.Payload(length_bytes), total_bytes=length_bytes)
        places = {SHM: self._sandbox.memory, CKPTFS: self._volume.folder}
        with ExitStack() as mounts:
            if self._plain_program:
                for name, options in [(PLAIN, []), (f"{PLAIN}, direct_io", ["--direct-io"])]:
                    mount = self._sandbox.plain_handler(self._plain_program, *options)
                    places[name] = mounts.enter_context(mount)
            cases = {place: fresh(folder, write) for place, folder in places.items()}
            self._take_turns(group, length_bytes, cases, beside=SHM)
        self._judge(at_least(f"{group}: against {SHM}", self._results.speed_ratio(group, CKPTFS, SHM), 1.0))
        if self._plain_program:
            self._judge(
                at_least(f"{group}: against the {PLAIN}", self._results.speed_ratio(group, CKPTFS, PLAIN), 1.6),
                at_least(f"{group}: {PLAIN} against {SHM}", self._results.speed_ratio(group, PLAIN, SHM), 0.45),
            )
        else:
            claim = f"{group}: against the {PLAIN} (name it with --plain-handler)"
            self._judge(Criterion(claim, "–", "≥ 1.60 ×", None, needs_full_size=True))

    def durable(self) -> None:
        """write, close, fsync over all devices, beside fio on files laid out like the images."""
        group = "time to durable"
        length_bytes = self._plan.durable_bytes
        write = partial(workloads.write, workloads.Payload(self._plan.save_bytes), total_bytes=length_bytes)
        cases = self._fio_case("write") | {CKPTFS: fresh(self._volume.folder, partial(write, durable=True))}
        fio_place = next(iter(cases))
        self._take_turns(group, length_bytes, cases, beside=fio_place)
        self._judge(at_least(f"{group}: against fio", self._results.speed_ratio(group, CKPTFS, fio_place), 0.85))

    def read(self) -> None:
        """One sequential reader, nothing cached, beside fio's best."""
        group = "cold sequential read"
        length_bytes = self._plan.durable_bytes
        payload = workloads.Payload(self._plan.save_bytes)
        path = self._volume.folder / "cold"
        workloads.write(payload, path, length_bytes, durable=True)

        def cold(_turn: int) -> float:
            self._volume.remount()
            return workloads.read(path)

        cases = self._fio_case("read") | {CKPTFS: cold}
        fio_place = next(iter(cases))
        self._take_turns(group, length_bytes, cases, beside=fio_place)
        self._volume.remount()
        self._judge(
            at_least(f"{group}: against fio", self._results.speed_ratio(group, CKPTFS, fio_place), 0.80),
            must_hold(f"{group}: every byte as written", payload.is_content_of(path)),
        )
        path.unlink()

    def _fio_case(self, direction: str) -> dict[str, Case]:
        length_bytes = self._plan.durable_bytes // IMAGE_COUNT
        self._progress(f"fio {direction}: looking for the best queue depth")
        files = self._sandbox.siblings(count=IMAGE_COUNT, length_bytes=length_bytes)
        depth = fio.best_queue_depth(direction, files, length_bytes)
        return {f"fio, queue depth {depth}": lambda _turn: fio.run(direction, files, length_bytes, depth)}

    def load(self) -> None:
        """torch.load of a checkpoint that was just saved, and of one that nothing has cached."""
        state = workloads.make_state(self._plan.save_bytes)
        local = self._sandbox.local_name
        folders = {SHM: self._sandbox.memory, local: self._sandbox.local, CKPTFS: self._volume.folder}
        kept = {place: folder / "kept" for place, folder in folders.items()}
        for path in kept.values():
            workloads.save(state, path, fsync=True)

        def just_saved(folder: Path, mapped: bool, turn: int) -> float:
            path = folder / f"loaded-{turn}"
            workloads.save(state, path)
            seconds = workloads.load(path, mapped=mapped)
            workloads.sync(path)
            path.unlink()
            return seconds

        def cold_local(mapped: bool, _turn: int) -> float:
            workloads.drop_from_cache(kept[local])
            return workloads.load(kept[local], mapped=mapped)

        def cold_ckptfs(mapped: bool, _turn: int) -> float:
            self._volume.remount()
            return workloads.load(kept[CKPTFS], mapped=mapped)

        for mapped, group in [(False, "torch.load"), (True, "torch.load(mmap=True)")]:
            cases: dict[str, Case] = {
                f"{place}, just saved": partial(just_saved, folder, mapped) for place, folder in folders.items()
            }
            cases[f"{local}, cold"] = partial(cold_local, mapped)
            cases[f"{CKPTFS}, cold"] = partial(cold_ckptfs, mapped)
            self._take_turns(group, self._plan.save_bytes, cases, beside=f"{SHM}, just saved")
        self._judge(must_hold("torch.load: equal after a remount", workloads.is_saved(state, kept[CKPTFS])))
        for path in kept.values():
            path.unlink()

    def big(self) -> None:
        """A file much larger than staging goes through, and the daemon's memory stays bounded."""
        staging_bytes, length_bytes = self._plan.big_staging_bytes, self._plan.big_bytes
        group = f"{_size(length_bytes)} through staging={_size(staging_bytes)}"
        self._progress(group)
        payload = workloads.Payload(self._plan.save_bytes)
        self._volume.remount(f"staging={staging_bytes // MIB}M")
        path = self._volume.folder / "big"
        seconds = workloads.write(payload, path, length_bytes, durable=True)
        same = payload.is_content_of(path)
        peak_bytes = machine.peak_resident_bytes(self._volume.daemon_pid())
        path.unlink()
        self._volume.remount()
        limit_bytes = staging_bytes + MEMORY_ALLOWANCE_BYTES
        self._results.rows.append(Row(group, CKPTFS, length_bytes, (seconds,), None))
        self._judge(
            must_hold(f"{group}: completes, every byte as written", same),
            must_hold(
                f"{group}: the daemon's peak resident memory",
                peak_bytes <= limit_bytes,
                value=f"{peak_bytes / MIB:.0f} MiB",
                target=f"≤ {limit_bytes / MIB:.0f} MiB",
            ),
        )

    def small(self) -> None:
        """Small files, together larger than staging, held open and written a piece at a time."""
        count = 2 * SMALL_STAGING_BYTES // (SMALL_PIECE_BYTES * SMALL_PIECES)
        self._progress(f"{count} small files held open")
        self._volume.remount(f"staging={SMALL_STAGING_BYTES // MIB}M")
        held = hold_small_files(self._volume.folder, count, SMALL_TIMEOUT_SECONDS)
        self._volume.remount()
        claim = f"{count} small files open and partly written at once, through staging={_size(SMALL_STAGING_BYTES)}"
        self._judge(
            must_hold(claim, held, value="all written and read" if held else "wedged or wrong", target="no wedge")
        )

    def processes(self) -> None:
        """Several processes save at once."""
        exact = True
        for crc32, group in [
            (True, "processes saving at once, stock"),
            (False, "processes saving at once, CRC-32 off"),
        ]:
            with ExitStack() as stack:
                writers = [Writer(self._plan.process_bytes, seed, crc32=crc32) for seed in range(4)]
                for writer in writers:
                    stack.callback(writer.close)
                exact = self._measure_writers(group, writers) and exact
            if crc32:
                ratios = [self._results.speed_ratio(group, f"{count} processes", "1 process") for count in (2, 4)]
                self._judge(at_least(f"{group}: worst aggregate against one writer's", min(ratios), 0.9))
        self._judge(must_hold("processes saving at once: every save bit-exact", exact))

    def _measure_writers(self, group: str, writers: list[Writer]) -> bool:
        exact = True
        samples: dict[int, list[float]] = {1: [], 2: [], 4: []}
        for turn in range(self._plan.repeats + 1):
            for count, seconds in samples.items():
                self._progress(f"{group}: {count} processes, {turn} of {self._plan.repeats}")
                active = {writer: self._volume.folder / f"writer-{i}" for i, writer in enumerate(writers[:count])}
                times = _all_do("save", active)
                exact = all(_all_do("check", active)) and exact
                for path in active.values():
                    workloads.sync(path)
                    path.unlink()
                if turn > 0:
                    seconds.append(max(end for _, end in times) - min(begin for begin, _ in times))
        for count, seconds in samples.items():
            place = "1 process" if count == 1 else f"{count} processes"
            length_bytes = count * self._plan.process_bytes
            self._results.rows.append(
                Row(group, place, length_bytes, tuple(seconds), "1 process" if count > 1 else None)
            )
        return exact


def fresh(folder: Path, operation: Callable[[Path], float]) -> Case:
    """Times an operation on a file that was not there before and is durable and gone afterwards."""

    def case(turn: int) -> float:
        path = folder / f"fresh-{turn}"
        seconds = operation(path)
        workloads.sync(path)
        path.unlink()
        return seconds

    return case


def _all_do(do: str, paths: dict[Writer, Path]) -> list[Any]:
    for writer, path in paths.items():
        writer.send(do, path)
    return [writer.answer() for writer in paths]


def _size(length_bytes: int) -> str:
    return f"{length_bytes // GIB} GiB" if length_bytes >= GIB else f"{length_bytes // MIB} MiB"


GROUPS: dict[str, Callable[[Suite], None]] = {
    "save": Suite.save,
    "write": Suite.write,
    "durable": Suite.durable,
    "read": Suite.read,
    "load": Suite.load,
    "big": Suite.big,
    "small": Suite.small,
    "processes": Suite.processes,
}
