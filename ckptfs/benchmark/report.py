"""Shows results: tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from ckptfs.benchmark.results import Results, Row

VERDICT_STYLES = {"PASS": "bold green", "FAIL": "bold red"}


def show(results: Results, console: Console) -> None:
    """The machine, all rows, all criteria."""
    facts = Table.grid(padding=(0, 2))
    for name, value in results.machine.items():
        facts.add_row(f"[dim]{name}", value)
    console.print(facts)
    if results.rows:
        console.print(_rows_table(results))
    if results.criteria:
        console.print(_criteria_table(results))
    if results.quick:
        console.print("[dim]A quick run: sizes too small for the speed criteria to mean anything; they do not count.")


def _rows_table(results: Results) -> Table:
    title = "Medians; the places of a measurement took turns; speed is relative to its first place"
    table = Table(title=title, title_justify="left")
    table.add_column("measurement")
    table.add_column("place")
    for heading in ("size", "seconds", "GB/s", "slowest – fastest", "speed"):
        table.add_column(heading, justify="right")
    group = None
    for row in results.rows:
        if row.group != group and group is not None:
            table.add_section()
        table.add_row("" if row.group == group else row.group, *_cells(results, row))
        group = row.group
    return table


def _cells(results: Results, row: Row) -> Iterator[str]:
    rate = row.gb_per_second
    yield row.place
    yield f"{row.length_bytes / (1 << 20):,.0f} MiB"
    yield f"{row.median_seconds:.3f}"
    yield f"{rate(row.median_seconds):.2f}"
    yield f"{rate(max(row.seconds)):.2f} – {rate(min(row.seconds)):.2f}"
    yield f"{results.speed_ratio(row.group, row.place, row.beside):.2f} ×" if row.beside else ""


def _criteria_table(results: Results) -> Table:
    table = Table(title="What it must reach", title_justify="left")
    table.add_column("criterion")
    table.add_column("found", justify="right")
    table.add_column("target", justify="right")
    table.add_column("verdict")
    for criterion in results.criteria:
        style = VERDICT_STYLES.get(criterion.verdict, "")
        table.add_row(
            criterion.claim, criterion.value, criterion.target, f"[{style}]{criterion.verdict}" if style else "–"
        )
    return table
