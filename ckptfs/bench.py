"""`ckptfs bench`: measures ckptfs beside memory, the local disk, a plain FUSE handler and fio, in one run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console

from ckptfs import __version__
from ckptfs.benchmark import fio, machine, places, report, suite
from ckptfs.benchmark.machine import BenchmarkError
from ckptfs.benchmark.results import Results

if TYPE_CHECKING:
    from types import FrameType


@click.command("bench")
@click.option("--quick", is_flag=True, help="A small run of a minute or two: shows that all works, not how fast.")
@click.option("--only", multiple=True, type=click.Choice(list(suite.GROUPS)), help="This measurement; may be repeated.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, and the tables on standard error."
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="/var/tmp",
    show_default=True,
    help="Where the image files go: on the disk that is to be measured.",
)
@click.option(
    "--plain-handler",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The plain pyfuse3 handler to compare with. [default: the one of a source checkout]",
)
def command(quick: bool, only: tuple[str, ...], as_json: bool, folder: Path, plain_handler: Path | None) -> int:
    """Measure ckptfs beside memory, the local disk, a plain FUSE handler and fio.

    Makes a volume over four image files, mounts it, and removes everything at the end. Ends with 1 when a criterion
    is not met; in a quick run, only when something was wrong.
    """
    plan = suite.QUICK if quick else suite.FULL
    _check_prerequisites(folder, plan)
    if plain_handler is None and places.PLAIN_HANDLER.exists():
        plain_handler = places.PLAIN_HANDLER
    results = Results(quick, machine.facts(folder) | _versions())
    messages = Console(stderr=True)
    signal.signal(signal.SIGTERM, _leave)
    with messages.status("warming memory") as status, ExitStack() as stack:
        machine.warm_memory(plan.memory_bytes)
        sandbox = places.Sandbox(stack, folder)
        run = suite.Suite(plan, sandbox, results, plain_handler, lambda text: status.update(f"{text} "))
        for group in suite.GROUPS:
            if group in only or not only:
                run.run(group)
        status.update("removing everything")
        stack.close()
    tables = Console(stderr=as_json)
    if not tables.is_terminal:
        tables.width = 140
    report.show(results, tables)
    if as_json:
        click.echo(json.dumps(results.as_json(), indent=2))
    return 1 if results.failed() else 0


def _check_prerequisites(folder: Path, plan: suite.Plan) -> None:
    if os.geteuid() != 0:
        raise BenchmarkError("the benchmark mounts file systems: run it as root")
    if importlib.util.find_spec("torch") is None:
        raise BenchmarkError("the benchmark saves with torch: pip install 'ckptfs[bench]'")
    fio.require_fio()
    shm_bytes = 2 * plan.save_bytes
    machine.check_room(folder, disk_bytes=plan.disk_bytes, memory_bytes=plan.memory_bytes, shm_bytes=shm_bytes)


def _versions() -> dict[str, str]:
    return {"torch": version("torch"), "fio": fio.require_fio(), "ckptfs": __version__}


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
