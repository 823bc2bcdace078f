"""Spectral grids: few anchors, errors looked for where the fit did not look, values that stay small."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.constructions import spectral_grid
from attnc.errors import BoundNotMet
from attnc.targets.target import Target
from constructions.adversary import worst_error

CASES = [
    ("sin(x)", [(-3, 3)], 1e-9, 17),
    ("sin(x)+cos(y)", [(-3, 3)] * 2, 1e-8, 17**2),
    ("exp(-x**2-y**2)*sin(3*x+y)", [(-2, 2)] * 2, 1e-8, 25**2),
    ("exp(sin(x)*y)", [(-3, 3)] * 2, 1e-8, 65**2),
    ("1/(1+25*x**2)", [(-1, 1)], 4e-9, 65),
    ("tanh(x)", [(-4, 4)], 7e-9, 33),
    ("sqrt(1+x**2+y**2)", [(-3, 3)] * 2, 2e-8, 40**2),
    ("log(3+x+y*z)", [(-1, 1)] * 3, 1e-5, 16**3),
    ("atan(x*y)+x", [(0, 2), (-5, 1)], 1e-6, 40**2),
    ("exp(sin(x)*y)+z", [(-3, 3)] * 3, 1e-1, 600),  # two of three ways to share the growth of values forbid x any fit
    ("(sin(x*y), x - y, exp(-x*x))", [(-2, 2)] * 2, 1e-5, 200),  # several outputs share their keys
    ("exp(-60*((x-0.31)**2+(y-0.72)**2))", [(-2, 2)] * 2, 1e-4, 10**5),  # a narrow feature between the first sections
    ("x*y+z*u+v*w", [(-1, 1)] * 6, 0.05, 1024),
]


def target_of(text: str, ends: list[tuple[float, float]]) -> Target:
    return attnc.as_target(text, dict(zip("xyzuvw", ends, strict=False)))


@pytest.mark.parametrize(("text", "ends", "eps", "most"), CASES, ids=[case[0] for case in CASES])
def test_eps_is_met_with_few_anchors(text: str, ends: list[tuple[float, float]], eps: float, most: int) -> None:
    target = target_of(text, ends)
    built = spectral_grid(target, eps=eps)
    assert built.bound is None  # nothing is proved here
    assert built.program.num_heads == 1
    assert built.program.num_anchors <= most
    assert worst_error(built.program, target) <= eps


def test_values_stay_below_the_limit() -> None:
    target = target_of("exp(sin(x)*y)", [(-3, 3)] * 2)
    size = float(np.exp(3))
    for max_value in (3.0, 10.0):
        built = spectral_grid(target, eps=1e-6, max_value=max_value)
        assert dict(built.parameters)["largest value"] <= 1.05 * max_value * size


def test_axes_get_what_they_need() -> None:
    counts = dict(spectral_grid(target_of("sin(8*x)+y", [(-1, 1)] * 2), eps=1e-5).parameters)
    assert counts["anchors_x"] >= 2 * counts["anchors_y"]


def test_errors_of_analytic_functions_fall_faster_than_any_power() -> None:
    """Between p and 2p the error falls by more than the last doubling had it: the slope in a log-log plot steepens."""
    target = target_of("exp(sin(3*x))", [(-1, 1)])
    sizes = np.array([6, 9, 13, 19, 27])
    errors = np.array([worst_error(spectral_grid(target, num_anchors=int(p)).program, target) for p in sizes])
    slopes = -np.diff(np.log(errors)) / np.diff(np.log(sizes))
    assert errors[-1] < 1e-9
    assert slopes[-1] > 1.5 * slopes[0]
    assert slopes[-1] > 10


def test_a_callable_needs_no_constant() -> None:
    network = attnc.compile(lambda X: np.cos(X[:, 0] * X[:, 1] + X[:, 2]), [(-1, 1)] * 3, 1e-4)
    assert network.construction == "spectral_grid"
    assert network.certificate.bound is None
    assert network.certificate.method == "estimate"
    assert network.certificate.observed <= 1e-4


def test_float32_holds_what_it_can() -> None:
    target = target_of("sin(x)+cos(y)", [(-3, 3)] * 2)
    built = spectral_grid(target, eps=1e-5, dtype="float32")
    assert built.program.dtype == np.float32
    assert worst_error(built.program, target) <= 1e-5
    with pytest.raises(BoundNotMet, match="rounding level"):
        spectral_grid(target, eps=1e-7, dtype="float32")


def test_a_kink_is_refused_soon_and_says_what_to_do() -> None:
    with pytest.raises(BoundNotMet, match="compose"):
        spectral_grid(target_of("abs(x-y)", [(-1, 1)] * 2), eps=1e-6)
