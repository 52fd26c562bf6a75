"""`ckptfs export`: copies files out of a volume that is not mounted, each byte checked against its checksum."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import click
from rich.markup import escape

from ckptfs.errors import CkptfsError, UsageError
from ckptfs.namespace import Inode
from ckptfs.offline import BadExtent, OfflineVolume, byte_progress, output_console, show_path
from ckptfs.sizes import format_size


@dataclass
class Result:
    """What was copied, and what could not be."""

    file_count: int = 0
    copied_bytes: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Path inside the volume, and why."""
    is_damaged: bool = False
    """The volume is damaged: what counts on it is not all that was durable once."""


@click.command()
@click.option("--to", "folder", required=True, metavar="DIR", help="Where to copy to; made if it is not there.")
@click.option("--path", default="/", show_default=True, help="What to copy: a file, or a directory with all in it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("devices", nargs=-1, required=True, metavar="DEVICE...")
def command(devices: tuple[str, ...], folder: str, path: str, as_json: bool) -> int:
    """Copy files out of a volume without mounting it or writing to it.

    A file or directory keeps its name in DIR; of the whole volume, the content is copied. Nothing in DIR is
    overwritten.
    """
    result = export(devices, folder, path)
    if as_json:
        failed = [{"path": failed_path, "error": error} for failed_path, error in result.failed]
        click.echo(json.dumps({**result.__dict__, "failed": failed}))
    else:
        _show(result, folder)
    return 1 if result.failed else 0


def export(devices: Sequence[str], folder: str, path: str = "/") -> Result:
    """Copies what is at a path of a volume into a folder; goes on after a file that cannot be copied.

    Raises:
        CkptfsError: Nothing could be copied at all.
    """
    with OfflineVolume.open(devices) as volume:
        top = volume.resolve(path)
        name = os.path.basename(os.path.normpath(path)).encode(errors="surrogateescape").strip(b"/")
        items = list(_items(volume, top, name))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error.strerror}") from error
        total_bytes = sum(inode.size_bytes for _, inode in items if inode.is_file)
        result = Result(is_damaged=volume.recovered.damaged)
        with byte_progress("Copying", total_bytes) as done:
            _Copier(volume, os.fsencode(folder), result, done).copy(items)
    return result


def _items(volume: OfflineVolume, top: Inode, name: bytes) -> Iterator[tuple[bytes, Inode]]:
    """What to copy, by its path below the target folder, parents first."""
    if name:
        yield name, top
    if top.is_directory:
        for path, inode in volume.namespace.walk(top.ino, name):
            yield path.lstrip(b"/"), inode


class _Copier:
    def __init__(self, volume: OfflineVolume, folder: bytes, result: Result, done: Callable[[int], None]) -> None:
        self._volume = volume
        self._folder = folder
        self._result = result
        self._done = done
        self._copied: dict[int, bytes] = {}
        """Inode to where it was copied, for hard links."""

    def copy(self, items: Sequence[tuple[bytes, Inode]]) -> None:
        for path, inode in items:
            self._try_copy(path, inode)
        # Directories get their times and modes when nothing is put into them any more.
        for path, inode in reversed(items):
            target = os.path.join(self._folder, path)
            if inode.is_directory and stat.S_ISDIR(_mode_of(target)):
                _set_attributes(target, inode)

    def _try_copy(self, path: bytes, inode: Inode) -> None:
        try:
            self._copy_one(os.path.join(self._folder, path), inode)
        except (CkptfsError, OSError) as error:
            self._result.failed.append((show_path(path), _reason(error)))

    def _copy_one(self, target: bytes, inode: Inode) -> None:
        if inode.is_directory:
            if not stat.S_ISDIR(_mode_of(target)):
                os.mkdir(target, 0o700)
            return
        if inode.ino in self._copied:
            os.link(self._copied[inode.ino], target, follow_symlinks=False)
            return
        if inode.is_file:
            self._copy_file(target, inode)
        elif inode.target is not None:
            os.symlink(inode.target, target)
        else:
            os.mknod(target, stat.S_IFMT(inode.mode) | 0o600, inode.rdev)
        _set_attributes(target, inode)
        self._copied[inode.ino] = target
        self._result.file_count += 1

    def _copy_file(self, target: bytes, inode: Inode) -> None:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                for offset, piece in self._volume.pieces(inode):
                    _write_all(fd, piece, offset)
                    self._result.copied_bytes += len(piece)
                    self._done(len(piece))
                os.ftruncate(fd, inode.size_bytes)
            finally:
                os.close(fd)
        except BaseException:
            # Half a file, or one with wrong bytes, is worse than none.
            os.unlink(target)
            raise


def _mode_of(path: bytes) -> int:
    """Of the path itself, not of what it links to; 0 when nothing is there."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _set_attributes(target: bytes, inode: Inode) -> None:
    """Owner, mode, attributes and times, as far as we may."""
    with contextlib.suppress(PermissionError):
        os.chown(target, inode.uid, inode.gid, follow_symlinks=False)
    if inode.target is None:
        os.chmod(target, stat.S_IMODE(inode.mode))
    for name, value in (inode.xattrs or {}).items():
        with contextlib.suppress(OSError):
            os.setxattr(target, name, value, follow_symlinks=False)
    os.utime(target, ns=(inode.atime_ns, inode.mtime_ns), follow_symlinks=False)


def _reason(error: CkptfsError | OSError) -> str:
    if isinstance(error, BadExtent):
        return f"{error}; ckptfs fsck --data names every damaged place"
    if isinstance(error, FileExistsError):
        return "exists in the target already; nothing is overwritten"
    return str(error)


def _show(result: Result, folder: str) -> None:
    console = output_console()
    if result.is_damaged:
        console.print("[red]The volume is damaged: newer changes may be missing. See ckptfs fsck.[/red]")
    for path, error in result.failed:
        console.print(f"[red]not copied:[/red] {escape(path)}: {escape(error)}")
    console.print(f"Copied {result.file_count} files, {format_size(result.copied_bytes)}, to {escape(folder)}")
