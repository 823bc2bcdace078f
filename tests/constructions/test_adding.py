"""The worked example of CONTRIBUTING.md: a construction from outside is one file and one row."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import attnc
from attnc.constructions.catalogue import CATALOGUE

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_example_of_contributing_compiles_and_is_certified(tmp_path: Path, monkeypatch) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Adding a construction")[2].partition("\n## ")[0]
    file, row, use = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    path = tmp_path / "equal_steps.py"
    path.write_text(file, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("equal_steps", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "equal_steps", module)
    spec.loader.exec_module(module)
    names = {"CATALOGUE": CATALOGUE, "EQUAL_STEPS": module.EQUAL_STEPS, "attnc": attnc}
    before = list(CATALOGUE)
    try:
        exec(row, names)
        exec(use, names)
    finally:
        CATALOGUE[:] = before
