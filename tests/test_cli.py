"""The frame of the command line: how verbs are found, and what every kind of failure looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from ckptfs import __version__, cli
from ckptfs.errors import CkptfsError

if TYPE_CHECKING:
    from collections.abc import Callable


class _Unhappy(CkptfsError):
    exit_status = 7


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[str]]:
    """Puts a command that calls `body` in the place of a verb; gives the arguments to run it."""

    def install(body: Callable[[], object], name: str = "status") -> list[str]:
        command = click.command(name)(body)
        real = cli.Verbs.get_command
        monkeypatch.setattr(
            cli.Verbs, "get_command", lambda self, ctx, asked: command if asked == name else real(self, ctx, asked)
        )
        return [name]

    return install


def _run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_a_command_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "--help"]) == 0
    assert f"Usage: ckptfs {name}" in capsys.readouterr().out


def test_help_lists_the_verbs_and_imports_none() -> None:
    result = _run_python(
        "import sys; from ckptfs import cli; status = cli.run(['--help']);"
        "late = {f'ckptfs.{verb}' for verb in cli.VERBS} | {'torch', 'numpy', 'pyfuse3'};"
        "sys.exit(status or bool(late & set(sys.modules)))"
    )
    assert result.returncode == 0, result.stdout
    assert all(name in result.stdout for name in cli.VERBS)


def test_importing_the_package_is_cheap() -> None:
    result = _run_python("import sys, ckptfs; print({'torch', 'click', 'trio', 'pyfuse3'} & set(sys.modules))")
    assert result.stdout == "set()\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_what_a_verb_returns_is_the_exit_status(verb: Callable[..., list[str]], returned: object, status: int) -> None:
    assert cli.run(verb(lambda: returned)) == status


def test_an_error_of_ours_is_one_line(verb: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise _Unhappy("/dev/x holds\next4; use --force")

    assert cli.run(verb(body)) == _Unhappy.exit_status
    assert capsys.readouterr().err == "ckptfs: /dev/x holds ext4; use --force\n"


@pytest.mark.parametrize(("name", "status"), [("status", 2), ("fsck", 16)])
def test_wrong_usage(name: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "--no-such-option"]) == status
    assert "no-such-option" in capsys.readouterr().err.lower()


def test_an_unknown_verb_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["mkfz"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_ctrl_c(verb: Callable[..., list[str]]) -> None:
    def body() -> None:
        raise KeyboardInterrupt

    assert cli.run(verb(body)) == 130


@pytest.mark.parametrize(("name", "status"), [("status", 1), ("fsck", 8)])
def test_the_unforeseen_is_one_line_and_a_traceback_in_a_file(
    verb: Callable[..., list[str]],
    name: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def body() -> None:
        raise ZeroDivisionError("here")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.run(verb(body, name)) == status
    (kept,) = tmp_path.iterdir()
    assert capsys.readouterr().err == f"ckptfs: unexpected ZeroDivisionError: here (traceback in {kept})\n"
    assert "in body" in kept.read_text()


def test_debug_shows_the_traceback(verb: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise ZeroDivisionError("here")

    assert cli.run(["--debug", *verb(body)]) == 1
    assert "in body" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        result = subprocess.run(
            [sys.executable, "-m", "ckptfs", "--help"], stdout=output, stderr=subprocess.PIPE, check=False, timeout=60
        )
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_broken_socket_is_not_taken_for_a_closed_pipe(
    verb: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    assert cli.run(["--debug", *verb(body)]) == 1
    assert "unexpected BrokenPipeError" in capfd.readouterr().err
