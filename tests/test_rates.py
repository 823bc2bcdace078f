"""How errors fall with the number of anchors, by the code of examples/rates.py on a few sizes."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

RATES = runpy.run_path(str(Path(__file__).parents[1] / "examples/rates.py"), run_name="rates")
ANALYTIC = {case.text: case for case in RATES["ANALYTIC"]}
BROKEN = {case.text: case for case in RATES["BROKEN"]}


@pytest.mark.parametrize("text", ANALYTIC)
def test_analytic_functions_faster_than_any_power(text: str) -> None:
    """The slope of the log-log plot steepens beyond 10 on the way to 1e-10, and an exponential fits it better."""
    case = ANALYTIC[text]
    errors = RATES["errors"](case, RATES["by_solving"])
    slopes = RATES["local_slopes"](case.sizes, errors)
    assert errors[-1] < 1e-10
    assert slopes[-1] > 10
    assert slopes[-1] > 2 * slopes[0]
    assert np.polyfit(range(len(slopes)), slopes, 1)[0] > 1  # steeper by more than 1 from each size to the next
    exponential, power = (RATES["fitted"](t, errors) for t in (case.sizes, np.log(case.sizes)))
    assert exponential.rate > 0
    assert exponential.r_squared > max(0.95, power.r_squared)


@pytest.mark.parametrize(
    ("text", "sizes"), [("relu(x)", (3, 5, 8)), ("abs(x-0.3)", (3, 6, 8)), ("sqrt(x)", (2, 6, 12, 20, 36))]
)
def test_kinks_and_singular_points_root_exponentially_or_better(text: str, sizes: tuple[int, ...]) -> None:
    """The logarithm of the error is a falling line over √p, and falls by four digits or more."""
    errors = RATES["errors"](BROKEN[text], RATES["by_pieces"], sizes)
    line = RATES["fitted"](np.sqrt(sizes), errors)
    assert line.rate > 2
    assert line.r_squared > 0.9
    assert errors[-1] < 1e-4 * errors[0]


@pytest.mark.parametrize(("text", "power"), [("sin(x)", 1.0), ("relu(x)", 1.0), ("sqrt(x)", 0.5)])
def test_sampled_values_fall_like_a_power(text: str, power: float) -> None:
    """The papers' rate, and Hölder's for √x, with which the others are compared."""
    case = (ANALYTIC | BROKEN)[text]
    line = RATES["fitted"](np.log(RATES["SAMPLED"]), RATES["errors"](case, RATES["by_sampling"], RATES["SAMPLED"]))
    assert line.rate == pytest.approx(power, abs=0.05)
    assert line.r_squared > 0.99


def test_a_law_is_recognised() -> None:
    sizes = np.array([4, 8, 16, 32])
    for law, made in (("p^", sizes**-2.0), ("√p", np.exp(-3 * np.sqrt(sizes))), ("p)", np.exp(-0.5 * sizes))):
        name, line = RATES["best_law"](sizes, made)
        assert law in name
        assert line.r_squared == pytest.approx(1)
        assert line.rate == pytest.approx({"p^": 2, "√p": 3, "p)": 0.5}[law])
