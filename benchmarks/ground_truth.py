"""Scores of three methods on the ground-truth benchmark, into docs/ground-truth.md.

    python benchmarks/ground_truth.py [--count 60] [--seed 20261118]

The methods read checkpoints and public pairs, and their answers go through the same file format and scorer as those of
anybody else. The times are CPU times on one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import replaced

from attnc import groundtruth
from attnc.groundtruth.files import read_index, read_task
from attnc.groundtruth.generator import LEVELS
from attnc.groundtruth.methods import METHODS, answers_of

PAGE = Path(__file__).parents[1] / "docs" / "ground-truth.md"
SHOWN = {
    "edge_f1": "edges, F1",
    "head_f1": "heads, F1",
    "average_precision": "edges, average precision",
    "faithfulness": "faithfulness",
    "interchange": "interchange",
    "overlap": "overlap",
}


def bounds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the proven bounds and observed errors by disguise, as Markdown."""
    lines = [
        "| disguise | models | median bound | largest bound | largest observed error |",
        "| :-- | --: | --: | --: | --: |",
    ]
    for name in _in_order([row["disguise"] for row in rows]):
        mine = [row for row in rows if row["disguise"] == name]
        bounds = sorted(row["bound"] for row in mine)
        observed = max(row["observed"] for row in mine)
        lines.append(f"| {name} | {len(mine)} | {bounds[len(bounds) // 2]:.2g} | {bounds[-1]:.2g} | {observed:.2g} |")
    return "\n".join(lines)


def scores_table(found: Mapping[str, Any], kind: str, order: Sequence[str]) -> list[str]:
    """Return the lines of one method, by disguise or by level."""
    rows = {row["name"]: row for row in found["summary"] if row["kind"] == kind}
    lines = []
    for name in order:
        cells = ("" if rows[name][key] is None else f"{rows[name][key]:.2f}" for key in SHOWN)
        lines.append(f"| {found['method']} | {name} | {' | '.join(cells)} |")
    return lines


def _in_order(names: Sequence[str]) -> list[str]:
    from attnc.groundtruth.disguises import DISGUISES

    return [name for name in DISGUISES if name in names]


def measure(count: int, seed: int, folder: Path) -> dict[str, str]:
    """Make a benchmark and score all methods. Return the tables by their places in the page."""
    start = time.process_time()
    rows = groundtruth.make(count, seed, folder / "benchmark")
    made = time.process_time() - start
    tasks = {name: read_task(folder / "benchmark", name) for name in read_index(folder / "benchmark")}
    head = f"| method | {{}} | {' | '.join(SHOWN.values())} |\n| :-- | :-- | {' | '.join(['--:'] * len(SHOWN))} |"
    by_disguise, by_level, times = [head.format("disguise")], [head.format("level")], list[str]()
    for method in METHODS:
        start = time.process_time()
        answers = answers_of(method, tasks)
        times.append(f"{method} {time.process_time() - start:.0f} s")
        (folder / "answers.json").write_text(json.dumps(answers))
        found = groundtruth.score(folder / "benchmark", folder / "answers.json")
        by_disguise += scores_table(found, "disguise", _in_order([row["disguise"] for row in rows]))
        by_level += scores_table(found, "level", [level for level in LEVELS if level in {row["level"] for row in rows}])
    size = sum(path.stat().st_size for path in (folder / "benchmark").rglob("*") if path.is_file())
    facts = (
        f"{count} expressions with seed {seed}: {len(rows)} models, {size / 1e6:.0f} MB, made in {made:.0f} s of CPU "
        f"time. The methods took: {', '.join(times)}."
    )
    return {
        "facts": facts,
        "bounds": bounds_table(rows),
        "by disguise": "\n".join(by_disguise),
        "by level": "\n".join(by_level),
    }


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=20261118)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = measure(given.count, given.seed, Path(folder))
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        print(table, end="\n\n")
        text = replaced(text, name, table)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
