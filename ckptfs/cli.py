"""The `ckptfs` command: finds the verbs, and turns every way to fail into one line and an exit status."""

from __future__ import annotations

import importlib
import os
import select
import sys
import tempfile
import traceback
from typing import NoReturn, cast

import click

from ckptfs import __version__
from ckptfs.errors import CkptfsError

VERBS = {
    "mkfs": "Make a volume on devices or image files.",
    "mount": "Mount a volume.",
    "umount": "Make everything durable, then unmount.",
    "status": "Show what is buffered, flushing and durable.",
    "wait": "Wait until paths are durable.",
    "fsck": "Check a volume that is not mounted.",
    "inspect": "Look at the structures on a volume's devices.",
    "export": "Copy files out of a volume without mounting it.",
    "bench": "Measure ckptfs next to memory, ext4 and the devices.",
}
"""Verb to what it does. Module ckptfs.<verb> holds it as `command`, and is imported when it is asked for."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
FSCK_EXIT_FAILED = 8
FSCK_EXIT_USAGE = 16


class Verbs(click.Group):
    """A group whose commands are imported late, so that none pays for another's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order in which a volume meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, imported now."""
        if cmd_name not in VERBS:
            return None
        return cast("click.Command", importlib.import_module(f"ckptfs.{cmd_name}").command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="ckptfs")
def cli(debug: bool) -> None:
    """A file system for checkpoints: saves at memory speed, made durable behind the trainer's back."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs one command and exits with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Runs one command.

    Returns:
        What a verb returned (None counts as 0), the exit status of its CkptfsError, 2 for wrong usage, 130 for
        Ctrl-C, 141 when the reader of our output went away, 1 for anything unforeseen. fsck has 16 and 8 for
        wrong usage and the unforeseen, as fsck(8) says.
    """
    is_fsck = "fsck" in arguments[:2]
    debug = "--debug" in arguments[:1]
    try:
        return _invoke(arguments)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.UsageError as error:
        error.show()
        return FSCK_EXIT_USAGE if is_fsck else EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return EXIT_INTERRUPTED
    except CkptfsError as error:
        if debug:
            traceback.print_exc()
        _say(str(error))
        return error.exit_status
    except click.ClickException as error:
        _say(error.format_message())
        return error.exit_code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return EXIT_PIPE_CLOSED
        _say(f"unexpected {type(error).__name__}: {error} ({_keep_traceback(debug)})")
        return FSCK_EXIT_FAILED if is_fsck else EXIT_FAILED


def _invoke(arguments: list[str]) -> int:
    # Not cli.main(): that one takes every EPIPE, a socket's too, for a closed standard output.
    try:
        with cli.make_context("ckptfs", list(arguments)) as context:
            status = cli.invoke(context)
    finally:
        sys.stdout.flush()
    return status if isinstance(status, int) else 0


def _say(message: str) -> None:
    click.echo("ckptfs: " + " ".join(message.split()), err=True)


def _keep_traceback(debug: bool) -> str:
    """Shows the traceback of the exception at hand, or keeps it in a file; says where it is."""
    if debug:
        traceback.print_exc()
        return "traceback above"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="ckptfs-", suffix=".traceback", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError:
        return "run `ckptfs --debug ...` for the traceback"
    return f"traceback in {file.name}"


def _reader_is_gone() -> bool:
    """True when standard output is a pipe that nobody reads; what is still buffered for it is dropped then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), sys.stdout.fileno())
    return True
