"""`ckptfs inspect`: looks at the structures on a volume's devices. Read-only; copes with damage as far as it can."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table

from ckptfs import extents, layout, snapshot
from ckptfs import problems as problem_table
from ckptfs.device import Device
from ckptfs.errors import CkptfsError, UsageError, VolumeDamaged
from ckptfs.journal import Group, JournalPosition, JournalReader, Ring, rings_of
from ckptfs.namespace import Inode
from ckptfs.offline import OfflineVolume, open_devices, output_console, show_path
from ckptfs.records import Record, decode_entry
from ckptfs.sizes import format_size
from ckptfs.superblock import Superblock, VolumeDevices, read_superblock

Report = dict[str, Any]

_json_option = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
_devices_argument = click.argument("devices", nargs=-1, required=True, metavar="DEVICE...")


@click.group()
def command() -> None:
    """Look at the structures on a volume's devices. Nothing is written."""


@command.command("superblock")
@_json_option
@_devices_argument
def superblock_command(devices: tuple[str, ...], as_json: bool) -> None:
    """What each device says about itself; the devices need not be all of a volume."""
    _print([describe_superblock(path) for path in devices], as_json, _show_superblocks)


@command.command("journal")
@_json_option
@_devices_argument
def journal_command(devices: tuple[str, ...], as_json: bool) -> None:
    """The snapshots, and the groups of records that follow the newest."""
    with open_devices(devices) as volume:
        _print(describe_journal(volume), as_json, _show_journal)


@command.command("tree")
@click.option("--path", default="/", show_default=True, help="Where to begin.")
@_json_option
@_devices_argument
def tree_command(devices: tuple[str, ...], path: str, as_json: bool) -> None:
    """Every name and inode, as a mount would show them."""
    with OfflineVolume.open(devices) as volume:
        top = volume.resolve(path)
        inodes = [(path.encode(errors="surrogateescape"), top)]
        if top.is_directory:
            inodes += volume.namespace.walk(top.ino, b"" if path == "/" else inodes[0][0].rstrip(b"/"))
        _print([_describe_inode(inode_path, inode) for inode_path, inode in inodes], as_json, _show_tree)


@command.command("extents")
@_json_option
@click.argument("file")
@click.argument("devices", nargs=-1, metavar="[DEVICE...]")
def extents_command(file: str, devices: tuple[str, ...], as_json: bool) -> None:
    """Where the bytes of a file lie.

    FILE is on a mounted ckptfs, or, with DEVICE..., a path inside a volume that is not mounted.
    """
    report = describe_extents(file, devices) if devices else _mounted_extents(file)
    _print({**report, "path": file}, as_json, _show_extents)


@command.command("space")
@_json_option
@_devices_argument
def space_command(devices: tuple[str, ...], as_json: bool) -> None:
    """What is used and free on each device, and in the metadata regions."""
    with OfflineVolume.open(devices) as volume:
        _print(describe_space(volume), as_json, _show_space)


def describe_superblock(path: str) -> Report:
    """One device's superblock and what is wrong with it."""
    with Device.open(path, writable=False, exclusive=False) as device:
        try:
            superblock, problems = read_superblock(device)
        except CkptfsError as error:
            return {"path": path, "error": str(error)}
        return {
            "path": path,
            "size_bytes": device.size_bytes,
            "block_bytes": device.block_bytes,
            "direct": device.direct,
            "superblock": _superblock_fields(superblock),
            "problems": [problem_table.describe(problem) for problem in problems],
        }


def _superblock_fields(superblock: Superblock) -> Report:
    regions = [
        {
            "kind": layout.REGION_NAMES.get(region.kind, str(region.kind)),
            "copy": region.copy,
            "offset_bytes": region.offset_bytes,
            "length_bytes": region.length_bytes,
        }
        for region in superblock.regions
    ]
    return {
        **superblock.__dict__,
        "volume_uuid": str(superblock.volume_uuid),
        "device_uuid": str(superblock.device_uuid),
        "regions": regions,
    }


def describe_journal(volume: VolumeDevices) -> Report:
    """Snapshot slots, groups that count, and what is behind them."""
    newest, problems = snapshot.read_newest_snapshot(volume.devices, volume.superblocks)
    rings = rings_of(volume.devices, volume.superblocks)
    reader = JournalReader(rings, volume.volume_uuid.bytes)
    end = newest.header.position
    groups: list[Report] = []
    try:
        for group in reader.groups(end):
            groups.append(_describe_group(group, end, rings))
            end = group.end
        fault = None
    except VolumeDamaged as error:
        fault = str(error)
    leftovers = reader.leftovers(end)
    return {
        "volume_uuid": str(volume.volume_uuid),
        "snapshots": [
            {"place": slot.place, "fault": slot.fault, **_header_fields(slot.header)}
            for slot in snapshot.read_slots(volume.devices, volume.superblocks)
        ],
        "snapshot_problems": [problem_table.describe(problem) for problem in problems],
        "start_offset_bytes": newest.header.position.offset_bytes,
        "end_offset_bytes": end.offset_bytes,
        "end_places": [ring.place(end.offset_bytes) for ring in rings],
        "capacity_bytes": rings[0].length_bytes,
        "groups": groups,
        "fault": fault,
        "torn": leftovers.torn,
        "later": [{"place": place, "sequence": sequence} for place, sequence in leftovers.later],
    }


def _describe_group(group: Group, start: JournalPosition, rings: Sequence[Ring]) -> Report:
    return {
        "sequence": start.sequence,
        "epoch": group.end.epoch,
        "offset_bytes": start.offset_bytes,
        "length_bytes": group.end.offset_bytes - start.offset_bytes,
        "places": [ring.place(start.offset_bytes) for ring in rings],
        "mirrors_lacking": sorted({gap.ring.place(start.offset_bytes) for gap in group.gaps}),
        "entries": [[_describe_record(record) for record in decode_entry(entry)] for entry in group.entries],
    }


def _header_fields(header: snapshot.SnapshotHeader | None) -> Report:
    return {} if header is None else {**header._asdict(), "position": header.position._asdict()}


def _describe_record(record: Record) -> Report:
    fields = {key: _plain(value) for key, value in record.__dict__.items() if key != "rows"}
    rows = getattr(record, "rows", None)
    if rows is not None:
        fields["row_count"] = extents.row_count(rows)
    return {"record": type(record).__name__, **fields}


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return show_path(value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return value


def _describe_inode(path: bytes, inode: Inode) -> Report:
    return {
        "path": show_path(path),
        "ino": inode.ino,
        "mode": stat.filemode(inode.mode),
        "nlink": inode.nlink,
        "uid": inode.uid,
        "gid": inode.gid,
        "rdev": inode.rdev,
        "size_bytes": inode.size_bytes,
        "allocated_bytes": extents.allocated_bytes(inode.rows),
        "extent_count": extents.row_count(inode.rows),
        "atime_ns": inode.atime_ns,
        "mtime_ns": inode.mtime_ns,
        "ctime_ns": inode.ctime_ns,
        "target": None if inode.target is None else show_path(inode.target),
        "xattrs": _plain(inode.xattrs or {}),
    }


def describe_extents(path: str, devices: Sequence[str]) -> Report:
    """Where a file of a volume that is not mounted lies."""
    with OfflineVolume.open(devices) as volume:
        inode = volume.resolve(path)
        _refuse_non_file(path, inode.is_file)
        names = [device.path for device in volume.volume.devices]
        return extents.describe(inode.rows, inode.size_bytes, names)


def _mounted_extents(path: str) -> Report:
    from ckptfs import client

    report = client.request(path, {"command": "extents", "path": path})
    del report["done"]
    return report


def _refuse_non_file(path: str, is_file: bool) -> None:
    if not is_file:
        raise UsageError(f"{path} is no regular file; only those have extents")


def describe_space(volume: OfflineVolume) -> Report:
    """Used and free, per device and for the metadata."""
    recovered, superblocks = volume.recovered, volume.volume.superblocks
    devices = [
        {
            "index": superblock.device_index,
            "path": device.path,
            "size_bytes": superblock.size_bytes,
            "metadata_bytes": sum(r.length_bytes for r in superblock.regions if r.kind != layout.REGION_DATA),
            "data_bytes": superblock.data.length_bytes,
            "free_bytes": recovered.allocator.free_bytes_on(superblock.device_index),
        }
        for device, superblock in zip(volume.volume.devices, superblocks, strict=True)
    ]
    return {
        "devices": devices,
        "segment_bytes": volume.volume.segment_bytes,
        "journal_used_bytes": recovered.journal.used_bytes,
        "journal_capacity_bytes": recovered.journal.capacity_bytes,
        "snapshot_used_bytes": snapshot.metadata_bytes(volume.namespace),
        "snapshot_capacity_bytes": snapshot.capacity_bytes(superblocks),
        "inode_count": len(volume.namespace.inodes),
    }


def _print(report: Any, as_json: bool, show: Callable[[Console, Any], None]) -> None:
    if as_json:
        click.echo(json.dumps(report))
    else:
        show(output_console(markup=False), report)


def _table(*headings: str) -> Table:
    return Table(*headings, box=None, pad_edge=False, header_style="bold")


def _show_superblocks(console: Console, reports: list[Report]) -> None:
    for report in reports:
        if "error" in report:
            console.print(f"{report['path']}: {report['error']}")
            continue
        fields = cast(Report, report["superblock"])
        console.print(
            f"{report['path']}: device {fields['device_index']} of {fields['device_count']},"
            f" {format_size(fields['size_bytes'])}"
        )
        for key in ("volume_uuid", "device_uuid", "label", "format_version", "segment_bytes", "created_ns"):
            console.print(f"    {key + ':':16} {fields[key]}")
        table = _table("    region", "copy", "offset", "length", "")
        for region in fields["regions"]:
            length = region["length_bytes"]
            table.add_row(
                f"    {region['kind']}",
                str(region["copy"]),
                str(region["offset_bytes"]),
                str(length),
                format_size(length),
            )
        console.print(table)
        _show_problems(console, report["problems"])


def _show_problems(console: Console, problems: list[Report]) -> None:
    for problem in problems:
        console.print(f"{problem['severity']} {problem['code']}: {problem['place']}: {problem['found']}")


def _show_journal(console: Console, report: Report) -> None:
    for slot in report["snapshots"]:
        if "generation" in slot:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(slot["written_ns"] / 1e9))
            state = (
                f"generation {slot['generation']}, {slot['inode_count']} inodes, {slot['body_bytes']} bytes, {written}"
            )
        else:
            state = slot["fault"] or "empty"
        console.print(f"{slot['place']}: {state}")
    _show_problems(console, report["snapshot_problems"])
    used = report["end_offset_bytes"] - report["start_offset_bytes"]
    console.print(f"journal: {len(report['groups'])} groups, {used} of {report['capacity_bytes']} bytes")
    for group in report["groups"]:
        lacking = f", lacking on {', '.join(group['mirrors_lacking'])}" if group["mirrors_lacking"] else ""
        console.print(
            f"group {group['sequence']}, epoch {group['epoch']}, offset {group['offset_bytes']},"
            f" {group['length_bytes']} bytes{lacking}"
        )
        for line in _record_lines(group["entries"]):
            console.print(line)
    if report["fault"]:
        console.print(f"stops here: {report['fault']}")
    for place in report["end_places"]:
        console.print(f"end: {place}")
    for place in report["torn"]:
        console.print(f"torn group behind the end: {place}")
    for later in report["later"]:
        console.print(f"damaged before group {later['sequence']}: {later['place']}")


def _record_lines(entries: list[list[Report]]) -> Iterator[str]:
    for entry in entries:
        for index, record in enumerate(entry):
            fields = ", ".join(f"{key}={value}" for key, value in record.items() if key != "record")
            yield f"    {'-' if index == 0 else ' '} {record['record']}({fields})"


def _show_tree(console: Console, inodes: list[Report]) -> None:
    table = _table("mode", "links", "inode", "size", "extents", "modified", "path")
    for inode in inodes:
        modified = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(inode["mtime_ns"] / 1e9))
        path = inode["path"] if inode["target"] is None else f"{inode['path']} -> {inode['target']}"
        numbers = (str(inode[key]) for key in ("nlink", "ino", "size_bytes", "extent_count"))
        table.add_row(inode["mode"], *numbers, modified, path)
    console.print(table)


def _show_extents(console: Console, report: Report) -> None:
    state = f", {report['state']}" if "state" in report else ""
    console.print(f"{report['path']}: {report['size_bytes']} bytes, {report['allocated_bytes']} allocated{state}")
    devices = cast(list[Report], report["devices"])
    total = report["allocated_bytes"] or 1
    table = _table("device", "path", "allocated", "share")
    for device in devices:
        share = f"{100 * device['allocated_bytes'] / total:.1f} %"
        table.add_row(str(device["index"]), str(device["path"]), str(device["allocated_bytes"]), share)
    console.print(table)
    table = _table("file offset", "length", "device", "device offset", "stored", "skip", "checksum")
    for row in report["extents"]:
        keys = ("file_offset_bytes", "length_bytes", "device_index", "device_offset_bytes", "stored_length_bytes")
        table.add_row(*(str(row[key]) for key in keys), str(row["skip_bytes"]), row["checksum"])
    console.print(table)


def _show_space(console: Console, report: Report) -> None:
    table = _table("device", "path", "size", "metadata", "data", "used", "free")
    for device in report["devices"]:
        used = device["data_bytes"] - device["free_bytes"]
        sizes = (device["size_bytes"], device["metadata_bytes"], device["data_bytes"], used, device["free_bytes"])
        table.add_row(str(device["index"]), device["path"], *map(format_size, sizes))
    console.print(table)
    for name in ("journal", "snapshot"):
        used, capacity = report[f"{name}_used_bytes"], report[f"{name}_capacity_bytes"]
        console.print(f"{name}: {format_size(used)} of {format_size(capacity)}")
    console.print(f"{report['inode_count']} inodes, segments of {format_size(report['segment_bytes'])}")
