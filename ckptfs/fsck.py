"""`ckptfs fsck`: says what is wrong with a volume that is not mounted. Exit status as fsck(8)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import click
from rich.markup import escape

from ckptfs import problems as problem_table
from ckptfs.checks import Checker
from ckptfs.errors import CkptfsError, Problem, UsageError, VolumeDamaged
from ckptfs.offline import OfflineVolume, byte_progress, output_console
from ckptfs.sizes import format_size

EXIT_CLEAN = 0
EXIT_PROBLEMS_LEFT = 4
EXIT_OPERATIONAL_ERROR = 8
EXIT_USAGE = 16


class Report(NamedTuple):
    """What a check found."""

    problems: list[Problem]
    volume_uuid: str
    label: str
    device_count: int
    inode_count: int
    group_count: int
    """Groups of the journal behind the newest snapshot."""
    data_bytes: int
    data_checked: bool

    @property
    def is_clean(self) -> bool:
        """True when nothing is wrong; what a crash leaves for the next mount is not."""
        return not any(map(problem_table.is_error, self.problems))


@click.command()
@click.option("--data", "check_data", is_flag=True, help="Read all data and compare its checksums, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("devices", nargs=-1, required=True, metavar="DEVICE...")
def command(devices: tuple[str, ...], check_data: bool, as_json: bool) -> int:
    """Check a volume that is not mounted; nothing is written.

    Exit status: 0 clean, 4 problems found, 8 the check could not be done, 16 wrong usage.
    """
    try:
        report = check(devices, data=check_data)
    except CkptfsError as error:
        error.exit_status = _exit_status(error)
        raise
    if as_json:
        click.echo(json.dumps(_describe(report)))
    else:
        _show(report)
    return EXIT_CLEAN if report.is_clean else EXIT_PROBLEMS_LEFT


def check(paths: Sequence[str], *, data: bool = False) -> Report:
    """Checks the volume on these devices.

    Raises:
        CkptfsError: There is no volume to check, it is mounted, or too damaged to be looked at.
    """
    with OfflineVolume.open(paths) as offline:
        checker = Checker(offline.volume, offline.namespace)
        problems = [*offline.recovered.problems, *checker.check_namespace()]
        data_bytes = checker.data_bytes
        if data:
            with byte_progress("Checking data", data_bytes) as done:
                problems += checker.check_data(done)
        return Report(
            problems,
            str(offline.volume.volume_uuid),
            offline.volume.label,
            len(offline.volume.devices),
            len(offline.namespace.inodes),
            offline.recovered.group_count,
            data_bytes,
            data,
        )


def _exit_status(error: CkptfsError) -> int:
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_PROBLEMS_LEFT if isinstance(error, VolumeDamaged) else EXIT_OPERATIONAL_ERROR


def _describe(report: Report) -> dict[str, object]:
    fields = report._asdict()
    return {"clean": report.is_clean, **fields, "problems": [problem_table.describe(p) for p in report.problems]}


def _show(report: Report) -> None:
    console = output_console()
    label = f" {report.label!r}" if report.label else ""
    data = f"{format_size(report.data_bytes)} of data{'' if report.data_checked else ' (not read; see --data)'}"
    console.print(
        escape(
            f"Volume{label} {report.volume_uuid}: {report.device_count} devices, {report.inode_count} inodes,"
            f" {report.group_count} groups in the journal, {data}"
        )
    )
    for problem in report.problems:
        entry = problem_table.TABLE[problem.code]
        kind = "[red]problem[/red]" if entry.is_error else "[yellow]note[/yellow]"
        console.print(f"{kind} [bold]{problem.code.value}[/bold]: {escape(entry.title)}")
        console.print(escape(f"    where:    {problem.place}"))
        console.print(escape(f"    found:    {problem.found}"))
        console.print(escape(f"    expected: {problem.expected}"))
        console.print(escape(f"    repair:   would {entry.repair}"))
    errors = sum(map(problem_table.is_error, report.problems))
    console.print("[green]clean[/green]" if not errors else f"[red]{errors} problem{'s' if errors > 1 else ''}[/red]")
