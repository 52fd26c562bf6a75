"""What a run found: rows (times of one workload at one place) and criteria (what a row must reach beside another)."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

JSON_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One workload at one place, timed several times, in turns with the rows of the same group."""

    group: str
    place: str
    length_bytes: int
    seconds: tuple[float, ...]
    beside: str | None
    """The place of the group that this one is compared with."""

    @property
    def median_seconds(self) -> float:
        """What ratios are made of."""
        return statistics.median(self.seconds)

    def gb_per_second(self, seconds: float) -> float:
        """The rate at this time, in 10^9 bytes per second."""
        return self.length_bytes / seconds / 1e9


@dataclass(frozen=True)
class Criterion:
    """One thing to reach."""

    claim: str
    value: str
    target: str
    passed: bool | None
    """None: not measured in this run."""
    needs_full_size: bool
    """It says nothing when the run was a quick one."""

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or a dash."""
        return {True: "PASS", False: "FAIL", None: "–"}[self.passed]


def at_least(claim: str, value: float, limit: float) -> Criterion:
    """A ratio with a lower limit."""
    return Criterion(claim, f"{value:.3f} ×", f"≥ {limit:.2f} ×", value >= limit, needs_full_size=True)


def at_most(claim: str, value: float, limit: float) -> Criterion:
    """A ratio with an upper limit."""
    return Criterion(claim, f"{value:.3f} ×", f"≤ {limit:.2f} ×", value <= limit, needs_full_size=True)


def must_hold(claim: str, holds: bool, *, value: str = "", target: str = "yes") -> Criterion:
    """Something that is so or is not, whatever the size of the run."""
    return Criterion(claim, value or ("yes" if holds else "no"), target, holds, needs_full_size=False)


@dataclass
class Results:
    """All that a run found, in the order of the measurements."""

    quick: bool
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    criteria: list[Criterion] = field(default_factory=list)

    def row(self, group: str, place: str) -> Row:
        """REQUIRES: it was measured."""
        return next(row for row in self.rows if (row.group, row.place) == (group, place))

    def speed_ratio(self, group: str, place: str, beside: str) -> float:
        """How many times as fast, by bytes per second of the medians."""
        row, other = self.row(group, place), self.row(group, beside)
        return row.gb_per_second(row.median_seconds) / other.gb_per_second(other.median_seconds)

    def time_ratio(self, group: str, place: str, beside: str) -> float:
        """How many times as long, of the medians."""
        return 1 / self.speed_ratio(group, place, beside)

    def failed(self) -> list[Criterion]:
        """What decides the exit status: a quick run's speed does not."""
        return [
            criterion
            for criterion in self.criteria
            if criterion.passed is False and not (self.quick and criterion.needs_full_size)
        ]

    def as_json(self) -> dict[str, Any]:
        """Rows with all their samples, ratios and criteria."""
        rows = []
        for row in self.rows:
            ratio = self.speed_ratio(row.group, row.place, row.beside) if row.beside else None
            rate = row.gb_per_second(row.median_seconds)
            rows.append(
                asdict(row)
                | {"median_seconds": row.median_seconds, "median_gb_per_second": rate, "ratio_of_medians": ratio}
            )
        return {
            "version": JSON_VERSION,
            "quick": self.quick,
            "machine": self.machine,
            "rows": rows,
            "criteria": [asdict(criterion) | {"verdict": criterion.verdict} for criterion in self.criteria],
        }
