"""`ckptfs mkfs`: makes a volume.

First everything that can be refused is, before anything is written. Then old superblocks are wiped, the metadata
regions are laid out, and the new superblocks come last of all: a mkfs that is interrupted leaves no volume.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
import uuid
from collections.abc import Sequence

import click
from rich.markup import escape
from rich.table import Table

from ckptfs import layout
from ckptfs.device import Device, create_image, foreign_signature, is_mounted
from ckptfs.errors import CkptfsError, DeviceBusy, DeviceInUse, DeviceMissing, DeviceTooSmall, NotAVolume, UsageError
from ckptfs.journal import START
from ckptfs.namespace import Namespace
from ckptfs.offline import output_console
from ckptfs.sizes import format_size, parse_size
from ckptfs.snapshot import capacity_bytes, write_first_snapshot
from ckptfs.superblock import Superblock, read_superblock, wipe_superblocks, write_superblocks


@click.command()
@click.option("--label", default="", metavar="LABEL", help="A name for the volume, up to 64 bytes.")
@click.option(
    "--size", default=None, metavar="SIZE", help="Make an image file of this size at every path that is free."
)
@click.option("--force", is_flag=True, help="Go on though a device holds another file system or volume.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("devices", nargs=-1, required=True, metavar="DEVICE...")
def command(devices: tuple[str, ...], label: str, size: str | None, force: bool, as_json: bool) -> None:
    """Make a volume on block devices or image files. What they held is lost."""
    image_size_bytes = None if size is None else parse_size(size)
    superblocks = make_volume(devices, label=label, image_size_bytes=image_size_bytes, force=force)
    if as_json:
        click.echo(json.dumps(_describe(devices, superblocks)))
    else:
        _show(devices, superblocks)


def make_volume(
    paths: Sequence[str], *, label: str = "", image_size_bytes: int | None = None, force: bool = False
) -> list[Superblock]:
    """Makes a volume over the devices at these paths, in this order.

    Args:
        paths: Block devices, image files, or (with image_size_bytes) paths at which to make image files.
        label: A name for people.
        image_size_bytes: Of the image files to make.
        force: Go on though a device holds something else's data. What is mounted or open elsewhere is refused anyway.

    Raises:
        CkptfsError: It was refused, and nothing was changed; or a device failed, and there is no volume.
    """
    _check_arguments(paths, label, image_size_bytes)
    with contextlib.ExitStack() as stack:
        images = _make_images(paths, image_size_bytes, stack)
        devices: list[Device] = []
        for path in paths:
            devices.append(_open(path, devices, is_new=path in images, force=force))
            stack.callback(devices[-1].close)
        superblocks = format_devices(devices, label)
        images.clear()
    return superblocks


def format_devices(devices: Sequence[Device], label: str = "") -> list[Superblock]:
    """Writes an empty volume over open devices, whatever they hold. REQUIRES: they are large enough.

    Raises:
        DeviceFailed: A device failed, and there is no volume.
    """
    superblocks = _plan(devices, label)
    _write(devices, superblocks)
    return superblocks


def _check_arguments(paths: Sequence[str], label: str, image_size_bytes: int | None) -> None:
    if len(label.encode()) > layout.MAX_LABEL_BYTES or "\0" in label:
        raise UsageError(f"the label has {len(label.encode())} bytes; use up to {layout.MAX_LABEL_BYTES}, without NUL")
    if len(paths) > layout.MAX_DEVICES:
        raise UsageError(f"{len(paths)} devices; a volume has up to {layout.MAX_DEVICES}")
    real_paths = [os.path.realpath(path) for path in paths]
    for index, path in enumerate(real_paths):
        if path in real_paths[:index]:
            raise UsageError(f"{paths[index]} is named twice; name each device once")
    missing = [path for path in paths if not os.path.exists(path)]
    if missing and image_size_bytes is None:
        raise DeviceMissing(f"{missing[0]} does not exist; name a block device, or make an image file with --size")
    if image_size_bytes is not None:
        if image_size_bytes < layout.MIN_DEVICE_BYTES:
            raise _too_small("an image file", image_size_bytes)
        for path in paths:
            if os.path.isfile(path) and os.path.getsize(path) != image_size_bytes:
                raise UsageError(
                    f"{path} exists and has {os.path.getsize(path)} bytes; remove it first, or leave --size out"
                )
            folder = os.path.dirname(path) or "."
            if path in missing and not os.path.isdir(folder):
                raise DeviceMissing(f"{path} cannot be made: there is no directory {folder}")


def _make_images(paths: Sequence[str], image_size_bytes: int | None, stack: contextlib.ExitStack) -> set[str]:
    """Makes image files at the paths that are free; those still in the set when the stack ends are removed again."""
    made: set[str] = set()

    def remove() -> None:
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path)

    stack.callback(remove)
    for path in paths:
        if not os.path.exists(path):
            assert image_size_bytes is not None
            create_image(path, image_size_bytes // layout.BLOCK_BYTES * layout.BLOCK_BYTES)
            made.add(path)
    return made


def _open(path: str, others: Sequence[Device], *, is_new: bool, force: bool) -> Device:
    for other in others:
        if other.is_same(path):
            raise UsageError(f"{path} and {other.path} are the same device; name each device once")
    user = is_mounted(path)
    if user is not None:
        raise DeviceBusy(f"{path} is in use ({user}); unmount or stop what uses it first")
    device = Device.open(path, writable=True, exclusive=True)
    try:
        if device.size_bytes < layout.MIN_DEVICE_BYTES:
            raise _too_small(path, device.size_bytes)
        if not is_new and not force:
            _refuse_content(device)
    except BaseException:
        device.close()
        raise
    return device


def _refuse_content(device: Device) -> None:
    try:
        superblock, _ = read_superblock(device)
    except NotAVolume:
        pass
    except CkptfsError as error:
        raise DeviceInUse(
            f"{device.path} seems to hold a ckptfs volume ({error}); with --force it is overwritten"
        ) from error
    else:
        label = f" {superblock.label!r}" if superblock.label else ""
        raise DeviceInUse(
            f"{device.path} is device {superblock.device_index} of {superblock.device_count} of the ckptfs volume"
            f"{label} {superblock.volume_uuid}; with --force it is overwritten, and the volume lost"
        )
    signature = foreign_signature(device)
    if signature is not None:
        raise DeviceInUse(f"{device.path} holds data ({signature}); with --force it is overwritten")


def _too_small(what: str, size_bytes: int) -> DeviceTooSmall:
    return DeviceTooSmall(
        f"{what} of {size_bytes} bytes is too small; a device needs at least {format_size(layout.MIN_DEVICE_BYTES)}"
    )


def _plan(devices: Sequence[Device], label: str) -> list[Superblock]:
    plan = layout.plan_regions([device.size_bytes for device in devices])
    volume_uuid = uuid.uuid4()
    created_ns = time.time_ns()
    return [
        Superblock(
            volume_uuid=volume_uuid,
            device_uuid=uuid.uuid4(),
            device_index=index,
            device_count=len(devices),
            label=label,
            size_bytes=device.size_bytes,
            segment_bytes=plan.segment_bytes,
            created_ns=created_ns,
            regions=regions,
        )
        for index, (device, regions) in enumerate(zip(devices, plan.regions, strict=True))
    ]


def _write(devices: Sequence[Device], superblocks: Sequence[Superblock]) -> None:
    for device in devices:
        wipe_superblocks(device)
    for device, superblock in zip(devices, superblocks, strict=True):
        _wipe(device, superblock)
    namespace = Namespace.fresh(superblocks[0].created_ns, uid=os.geteuid(), gid=os.getegid())
    write_first_snapshot(devices, superblocks, namespace, START)
    for device in devices:
        device.barrier()
    for device, superblock in zip(devices, superblocks, strict=True):
        write_superblocks(device, superblock)


def _wipe(device: Device, superblock: Superblock) -> None:
    """Both ends, where others keep their signatures, and the journal, so that it is laid out."""
    data = superblock.data
    device.discard(data.offset_bytes, data.length_bytes)
    device.zero(0, layout.RESERVED_BYTES)
    end = layout.round_down(device.size_bytes, layout.BLOCK_BYTES)
    device.zero(end - layout.RESERVED_BYTES, layout.RESERVED_BYTES)
    for region in superblock.metadata(layout.REGION_JOURNAL):
        device.zero(region.offset_bytes, region.length_bytes)
    device.barrier()


def _describe(paths: Sequence[str], superblocks: Sequence[Superblock]) -> dict[str, object]:
    return {
        "volume_uuid": str(superblocks[0].volume_uuid),
        "label": superblocks[0].label,
        "data_bytes": sum(superblock.data.length_bytes for superblock in superblocks),
        "metadata_capacity_bytes": capacity_bytes(superblocks),
        "segment_bytes": superblocks[0].segment_bytes,
        "devices": [
            {
                "index": superblock.device_index,
                "path": path,
                "size_bytes": superblock.size_bytes,
                "data_bytes": superblock.data.length_bytes,
                "carries_metadata": bool(superblock.metadata(layout.REGION_JOURNAL)),
            }
            for path, superblock in zip(paths, superblocks, strict=True)
        ],
    }


def _show(paths: Sequence[str], superblocks: Sequence[Superblock]) -> None:
    console = output_console()
    label = f" [bold]{escape(superblocks[0].label)}[/bold]" if superblocks[0].label else ""
    console.print(f"Made volume{label} {superblocks[0].volume_uuid}")
    table = Table("device", "path", "size", "for data", "metadata", box=None, pad_edge=False)
    for path, superblock in zip(paths, superblocks, strict=True):
        metadata = "yes" if superblock.metadata(layout.REGION_JOURNAL) else "–"
        sizes = (superblock.size_bytes, superblock.data.length_bytes)
        table.add_row(str(superblock.device_index), escape(path), *map(format_size, sizes), metadata)
    console.print(table)
    console.print(f"Mount it with: ckptfs mount {escape(shlex.join(paths))} MOUNTPOINT")
