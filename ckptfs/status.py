"""`ckptfs status`: what is buffered, flushing and durable."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ckptfs import client, runtime
from ckptfs.errors import CkptfsError, NotMounted
from ckptfs.sizes import format_size

WATCH_INTERVAL_S = 0.5
MAX_FILES_SHOWN = 10

Status = Mapping[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print an object, or without MOUNTPOINT a list of them.")
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.argument("mountpoint", required=False, metavar="[MOUNTPOINT]")
def command(mountpoint: str | None, as_json: bool, watch: bool) -> None:
    """Show what is buffered, flushing and durable."""
    if as_json:
        _print_json(mountpoint, watch=watch)
    elif not watch:
        Console().print(_show_all(_collect(mountpoint)))
    else:
        with Live(_show_all(_collect(mountpoint)), console=Console()) as live:
            while True:
                time.sleep(WATCH_INTERVAL_S)
                live.update(_show_all(_collect(mountpoint)))


def _print_json(mountpoint: str | None, *, watch: bool) -> None:
    while True:
        statuses = _collect(mountpoint)
        click.echo(json.dumps(statuses if mountpoint is None else statuses[0]))
        if not watch:
            return
        time.sleep(WATCH_INTERVAL_S)


def _collect(mountpoint: str | None) -> list[Status]:
    if mountpoint is not None:
        return [client.status(mountpoint)]
    statuses = [_ask(state) for state in runtime.running()]
    if not statuses:
        raise NotMounted("no ckptfs volume is mounted")
    return statuses


def _ask(state: runtime.State) -> Status:
    """A daemon that does not answer is shown with what is known of it."""
    try:
        return dict(client.ask(state, {"command": "status"}, timeout_s=10)["status"])
    except CkptfsError as error:
        return {
            "pid": state.pid,
            "mountpoint": state.mountpoint,
            "state": state.state,
            "volume": state.volume_uuid,
            "errors": [str(error)],
        }


def _show_all(statuses: list[Status]) -> RenderableType:
    return Group(*(part for status in statuses for part in _show(status)))


def _show(status: Status) -> Iterator[RenderableType]:
    yield Text(f"{status['mountpoint']}: {status['state']}, pid {status['pid']}", style="bold")
    if "log" in status:
        yield _show_facts(status)
        yield _show_devices(status)
        yield from _show_files(status)
    for kind, style in (("warnings", "yellow"), ("errors", "red")):
        yield from (Text(f"  {kind[:-1]}: {message}", style=style) for message in status.get(kind, ()))


def _show_facts(status: Status) -> Table:
    staging, log, kernel, space = status["staging"], status["log"], status["kernel"], status["space"]
    registered = [kind for kind in ("buffers", "files") if status[f"{kind}_registered"]]
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("volume", f"{status['volume']} {escape(status['label'])}")
    if status["read_only"]:
        table.add_row("mode", "read-only")
    table.add_row("space", f"{format_size(space['free_bytes'])} free of {format_size(space['total_bytes'])}")
    table.add_row(
        "staging",
        f"{format_size(staging['used_bytes'])} used of {format_size(staging['limit_bytes'])},"
        f" {format_size(staging['dirty_bytes'])} not on devices yet; huge pages: {escape(status['huge_pages'])}",
    )
    table.add_row(
        "backlog", f"{format_size(status['unwritten_bytes'])} to write, {status['parked_writes']} writes wait"
    )
    table.add_row(
        "log",
        f"{log['entries']} entries not durable (durable up to {log['durable_position']} of {log['position']}),"
        f" journal {log['journal_used_fraction']:.0%} full",
    )
    table.add_row(
        "device I/O",
        f"{status['io_backend']} ({escape(status['io_backend_reason'])}),"
        f" registered: {', '.join(registered) or 'nothing'}",
    )
    table.add_row(
        "kernel",
        f"FUSE 7.{kernel['protocol_minor']}, writes of {format_size(kernel['max_write_bytes'])},"
        f" {kernel['reader_threads']} readers; {', '.join(kernel['kernel_features'])}",
    )
    table.add_row("large reads", escape(status["large_reads"]))
    return table


def _show_devices(status: Status) -> Table:
    table = Table("device", "written", "read", "in flight", "errors", box=None, padding=(0, 2), header_style="dim")
    for device in status["devices"]:
        errors = device["write_errors"] + device["read_errors"] + device["checksum_errors"]
        sizes = [format_size(device[key]) for key in ("written_bytes", "read_bytes", "outstanding_bytes")]
        table.add_row(escape(device["name"]), *sizes, str(errors))
    return table


def _show_files(status: Status) -> Iterator[RenderableType]:
    for file in status["undurable"][:MAX_FILES_SHOWN]:
        yield Text(f"  {file['state']}: {file['path']}")
    more = status["undurable_count"] - MAX_FILES_SHOWN
    if more > 0:
        yield Text(f"  ... and {more} more that are not durable yet")
    if not status["undurable_count"]:
        yield Text("  everything is durable", style="green")
    for killed in status["killed"]:
        when = datetime.fromtimestamp(killed["time_ns"] / 1e9).strftime("%Y-%m-%d %H:%M:%S")
        kept = f"what was written is in {killed['kept_as']}" if killed["kept_as"] else "nothing was written"
        yield Text(f"  killed: the writer of {killed['path']} at {when}; {kept}", style="yellow")
