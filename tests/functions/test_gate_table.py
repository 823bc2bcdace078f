"""The program that makes the gate table makes it again."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

PROGRAM = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gate_table.py"))
QUICK = [("gelu", 4), ("erf", 3), ("softplus", 4), ("reciprocal", 4), ("atan", 6)]
"""The search of each of these rows takes less than two seconds; the others take up to a minute."""
ROWS = [
    pytest.param(name, p, marks=() if (name, p) in QUICK else pytest.mark.slow)
    for name, (rows, _) in PROGRAM["problems"]().items()
    for p in rows
]


@pytest.mark.parametrize(("name", "p"), ROWS)
def test_the_search_finds_the_row_again(name: str, p: int) -> None:
    """The search ends with as many keys, and with an error at most 2 % larger than that of the stored row."""
    row = PROGRAM["search"](PROGRAM["problems"]()[name][1](p))
    assert row[-1] <= (1 + PROGRAM["TOLERANCE"]) * PROGRAM["stored_error"](name, p)


@pytest.mark.parametrize(("name", "p"), [("gelu", 5), ("erf", 4), ("softplus", 5), ("reciprocal", 4), ("atan", 4)])
def test_the_derivatives_agree_with_differences(name: str, p: int) -> None:
    """Errors here would only slow the search down, and no row would show them."""
    problem = PROGRAM["problems"]()[name][1](p)
    z = problem.with_solved_values(problem.starts[0][7])
    steps = 1e-6 * np.eye(len(z))
    differences = np.stack([(problem.residual(z + d) - problem.residual(z - d)) / 2e-6 for d in steps], axis=1)
    np.testing.assert_allclose(problem.jacobian(z), differences, atol=1e-7 * np.abs(differences).max())


def test_values_are_limited() -> None:
    """The unlimited solution of this start has a value above the limit; the limited one ends at the limit."""
    problem = PROGRAM["problems"]()["softplus"][1](3)
    assert np.abs(problem.with_solved_values(np.array([1.1, 4.0]))[2:]).max() == PROGRAM["MAX_VALUE"]


def test_a_row_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row changes, and the file still reads as a table."""
    copy = tmp_path / "gate_table.py"
    copy.write_text(PROGRAM["TABLE"].read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setitem(PROGRAM["write"].__globals__, "TABLE", copy)
    before, row = runpy.run_path(str(copy)), ((1.0, 2.0, 3.0), (0.0, -1.0, -2.0), 1.234e-6)
    for name, p, written in (("erf", 6, row), ("gelu", 14, row), ("atan", 32, (0.1, 0.2, 0.3, 0.4, 1.234e-6))):
        PROGRAM["write"](name, p, written)
        after = runpy.run_path(str(copy))
        assert after[name.upper()] == before[name.upper()] | {p: (*written[:-1], 1.2e-6)}
