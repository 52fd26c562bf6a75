"""`ckptfs umount`: everything durable, then unmount. Returns when the daemon has ended."""

from __future__ import annotations

import click

from ckptfs import client, fusemount
from ckptfs.errors import NotMounted
from ckptfs.progress import FlushProgress


@click.command()
@click.argument("mountpoint", metavar="MOUNTPOINT")
def command(mountpoint: str) -> None:
    """Make everything durable, then unmount.

    Returns when it is done; the exit status is not 0, and the files are named, if something could not be made durable.
    """
    try:
        state = client.find(mountpoint)
    except NotMounted:
        if not _is_left_behind(mountpoint):
            raise
        fusemount.unmount(fusemount.real_mountpoint(mountpoint), lazily=True)
        click.echo(f"ckptfs: the daemon of {mountpoint} was gone; removed the mount it left behind", err=True)
        return
    with FlushProgress("Making everything durable") as progress:
        client.ask(state, {"command": "umount"}, on_progress=progress)
    client.wait_for_end(state.pid)


def _is_left_behind(mountpoint: str) -> bool:
    mounted = fusemount.find_mount(mountpoint)
    return mounted is not None and mounted.kind == fusemount.FILE_SYSTEM_TYPE
