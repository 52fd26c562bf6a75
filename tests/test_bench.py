"""The benchmark: how it judges, and that a small run works and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfs.benchmark import machine, suite, workloads
from ckptfs.benchmark.results import Criterion, Results, Row, at_least, at_most, must_hold
from tests.bench.readme_table import BEGIN, END, README, insert, markdown


def _results(*, quick: bool = False) -> Results:
    results = Results(quick, {"kernel": "6.1"})
    results.rows += [
        Row("g", "a", 1_000_000_000, (1.0, 9.0, 2.0), None),
        Row("g", "b", 2_000_000_000, (1.0, 1.0, 5.0), "a"),
    ]
    return results


def test_ratios_are_ratios_of_medians_by_byte() -> None:
    results = _results()
    assert results.speed_ratio("g", "b", "a") == 4
    assert results.time_ratio("g", "b", "a") == 0.25


@pytest.mark.parametrize(
    ("criterion", "passed"),
    [
        (at_least("speed", 0.9, 0.9), True),
        (at_least("speed", 0.89, 0.9), False),
        (at_most("stall", 1.05, 1.05), True),
        (at_most("stall", 1.06, 1.05), False),
    ],
)
def test_limits(criterion: Criterion, passed: bool) -> None:
    assert criterion.passed is passed


def test_a_quick_run_fails_for_what_is_wrong_but_not_for_what_is_slow() -> None:
    slow, wrong = at_least("speed", 0.1, 0.9), must_hold("bit-exact", False)
    for quick, expected in [(False, [slow, wrong]), (True, [wrong])]:
        results = _results(quick=quick)
        results.criteria += [slow, wrong]
        assert results.failed() == expected


def test_the_json_becomes_the_table_of_the_readme() -> None:
    results = _results()
    results.criteria.append(at_least("b against a", 4.0, 1.0))
    text = markdown(json.loads(json.dumps(results.as_json())))
    assert "|  | b | 1.000 s | 2.00 | 4.00 × |" in text
    assert "| b against a | 4.000 × | ≥ 1.00 × | PASS |" in text
    document = README.read_text()
    once = insert(document, text)
    assert insert(once, text) == once
    assert once.partition(BEGIN)[0] == document.partition(BEGIN)[0]
    assert once.partition(END)[2] == document.partition(END)[2]


def test_what_was_written_is_told_from_what_was_not(tmp_path: Path) -> None:
    payload = workloads.Payload(3 << 20)
    path = tmp_path / "file"
    workloads.write(payload, path, 7 << 20)
    assert path.stat().st_size == 7 << 20
    assert payload.is_content_of(path)
    with path.open("r+b") as file:
        file.seek(5 << 20)
        file.write(bytes([file.read(1)[0] ^ 1]))
    assert not payload.is_content_of(path)


def test_no_room_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(machine.BenchmarkError, match=r"disk at .* only .* are free"):
        machine.check_room(tmp_path, disk_bytes=1 << 60, memory_bytes=0, shm_bytes=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
def test_a_quick_run_measures_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptfs", "--debug", "bench", "--quick", "--json", "--dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    run = json.loads(result.stdout)
    assert {row["place"] for row in run["rows"]} >= {suite.SHM, suite.CKPTFS, suite.PLAIN, "sink that discards"}
    assert all(len(row["seconds"]) == suite.QUICK.repeats for row in run["rows"] if "staging" not in row["group"])
    assert {criterion["verdict"] for criterion in run["criteria"]} <= {"PASS", "FAIL"}
    assert len(run["criteria"]) == 14
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
