"""The documentation: what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ckptfs import cli

ROOT = Path(__file__).parents[1]
PROMISES = re.split(r"^## (?=P\d )", (ROOT / "docs/semantics.md").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[:2])
def test_every_promise_names_tests_that_are_there(promise: str) -> None:
    named = re.findall(r"`(tests/test_\w+\.py)::(test_\w+)`", promise)
    assert named
    for file, name in named:
        functions = {getattr(node, "name", "") for node in ast.walk(ast.parse((ROOT / file).read_text()))}
        assert name in functions, f"{file} has no {name}"


def test_there_are_eight_promises() -> None:
    assert [promise[:2] for promise in PROMISES] == [f"P{number}" for number in range(1, 9)]


def test_the_readme_uses_verbs_and_files_that_are_there() -> None:
    readme = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^    ckptfs (\w+)", readme, flags=re.MULTILINE))
    assert verbs <= cli.VERBS.keys()
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", readme) + re.findall(
        r"`((?:tests|docs|ckptfs)/[\w./]+)`", readme
    ):
        assert (ROOT / path).exists(), path


def test_the_map_of_the_house_has_every_module() -> None:
    readme = (ROOT / "README.md").read_text()
    modules = {path.stem for path in (ROOT / "ckptfs").glob("*.py")} - {"__init__", "__main__"}
    missing = {module for module in modules if f"`{module}`" not in readme}
    assert not missing
