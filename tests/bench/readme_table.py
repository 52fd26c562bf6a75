"""Puts the numbers of a benchmark run into the README, between its two markers.

ckptfs bench --json >run.json; python tests/bench/readme_table.py run.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- bench:begin -->\n"
END = "<!-- bench:end -->"


def markdown(run: dict[str, Any]) -> str:
    """The machine in a sentence, the rows, the criteria."""
    facts = "; ".join(f"{name}: {value}" for name, value in run["machine"].items())
    lines = [f"{facts}.", ""]
    lines += ["| measurement | place | median | GB/s | speed, first place = 1 |", "|---|---|---:|---:|---:|"]
    group = None
    for row in run["rows"]:
        name = "" if row["group"] == group else row["group"]
        group = row["group"]
        ratio = f"{row['ratio_of_medians']:.2f} ×" if row["ratio_of_medians"] is not None else ""
        lines.append(
            f"| {name} | {row['place']} | {row['median_seconds']:.3f} s | {row['median_gb_per_second']:.2f} | {ratio} |"
        )
    lines += ["", "| criterion | found | target | |", "|---|---:|---:|---|"]
    lines += [f"| {c['claim']} | {c['value']} | {c['target']} | {c['verdict']} |" for c in run["criteria"]]
    return "\n".join(lines) + "\n"


def insert(document: str, text: str) -> str:
    """The document with `text` in the place of what was between the markers."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README} has no {BEGIN.strip()} ... {END}")
    return head + BEGIN + text + END + tail


def main() -> None:
    """Rewrites the README."""
    parser = argparse.ArgumentParser(description="Puts a benchmark run into the README.")
    parser.add_argument("run", type=Path, help="what `ckptfs bench --json` printed")
    run = json.loads(parser.parse_args().run.read_text())
    if run["quick"]:
        raise SystemExit("a quick run says nothing about speed")
    README.write_text(insert(README.read_text(), markdown(run)))


if __name__ == "__main__":
    main()
