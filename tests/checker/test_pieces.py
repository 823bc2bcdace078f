"""Errors of a stage: how far it may be off, and how much it passes on of the error of its argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flint import arb

from attnc_checker.cells import Leaf
from attnc_checker.deep.claims import StageClaim
from attnc_checker.deep.deviations import Deviations
from attnc_checker.deep.pieces import Pieces, slopes_of
from attnc_checker.derivatives import DERIVATIVES
from attnc_checker.expressions import parse
from attnc_checker.ranges import coefficients

CASES = [  # (function, in Python, [low, high], held)
    ("tanh(7*t)", lambda t: math.tanh(7 * t), (-2.0, 1.5), None),
    ("relu(t - 0.3)*t", lambda t: max(t - 0.3, 0) * t, (-1.0, 1.0), None),
    ("sqrt(t)", math.sqrt, (0.0, 1.0), (0.0, 1.0)),
    ("asin(t) - t", lambda t: math.asin(t) - t, (-1.0, 0.5), (-1.0, 0.75)),
    ("exp(-3*t)*t**3", lambda t: math.exp(-3 * t) * t**3, (-1.0, 2.0), None),
    ("floor(t + 0.5)", lambda t: math.floor(t + 0.5), (-0.9, 0.9), None),
]


def claim(function, ends, held, bound=0.0, leaves=(), leaf_bounds=(), leaf_middles=()) -> StageClaim:
    names = ("layer", "channel", "s", "x", None, None, None, None, function)
    return StageClaim(*names, ends, held, bound, None, None, leaves, leaf_bounds, leaf_middles)


@pytest.mark.parametrize("e", [1e-9, 1e-3, 0.2])
@pytest.mark.parametrize(("text", "g", "ends", "held"), CASES)
def test_differences_are_within_what_is_said_of_a_range(text, g, ends, held, e):
    rng, (low, high) = np.random.default_rng(0), ends
    pieces = Pieces(claim(text, ends, held), arb(low), arb(high), arb(e), True)
    narrowest = math.inf
    for _ in range(200):
        width = (high - low) * 2.0 ** -rng.uniform(0, 16)
        a = float(rng.uniform(low, high - width))
        found = pieces.around((arb(a), arb(a + width)))
        narrowest = min(narrowest, float(found.slopes[1] - found.slopes[0]))
        for t in rng.uniform(a, a + width, 4).tolist():
            T = min(max(t + e * rng.uniform(-1, 1), (held or (-9, 9))[0]), (held or (-9, 9))[1])
            passed = sorted(float(slope) * (T - t) for slope in found.slopes)
            rounding = 1e-14
            assert passed[0] - float(found.jump) - rounding <= g(T) - g(t) <= passed[1] + float(found.jump) + rounding
            assert abs(g(T) - g(t)) <= float(found.change) + rounding
            assert float(found.values[0]) - rounding <= min(g(t), g(T))
            assert max(g(t), g(T)) <= float(found.values[1]) + rounding
    if e < 1e-6:  # in the narrowest ranges slopes are known
        assert narrowest < 1e-2


@pytest.mark.parametrize("name", DERIVATIVES)
def test_slopes_are_no_wider_than_those_at_points(name):
    """Of tanh they are at most 1 on whatever interval; along a chain of functions a little more would add up."""
    rng = np.random.default_rng(0)
    for width in (0.3, 0.03, 0.003):
        low = float(rng.uniform(*((0.2, 0.6) if name in ("log", "asin", "acos") else (-0.4, 0.1))))
        slope, _ = slopes_of(parse(f"{name}(t)", ["t"]), (arb(low), arb(low + width)))
        at = [coefficients(name, (arb(t), arb(t)), 2)[1] for t in np.linspace(low, low + width, 2001).tolist()]
        least, greatest = min(map(float, at)), max(map(float, at))
        assert all(slope.overlaps(x) for x in at)
        assert float(slope.lower()) >= least - 1e-6 * (1 + abs(least))
        assert float(slope.upper()) <= greatest + 1e-6 * (1 + abs(greatest))


CELLS = [(1, 1), (3, 2), (3, 3), (2, 0)]
BOUNDS = (0.25, 0.5, 2.0, 1.0)
MIDDLES = (0.25, -0.125, 1.5, 0.0)


def deviations(leaves=CELLS, bounds=BOUNDS, size=3.0, growth=0.5, fixed=0.125, unsure=0.0625, middles=()) -> Deviations:
    stated = tuple(Leaf("taylor", 4, (level, (i,))) for level, i in leaves)
    stage = claim("t", (-1.0, 3.0), None, 2.0, stated, bounds, middles)
    return Deviations(stage, *map(arb, (size, growth, fixed, unsure)))


def test_the_leaves_that_can_hold_the_argument_count_and_no_others():
    rng, found = np.random.default_rng(0), deviations()
    cells = [(4 * i / 2**level - 1, 4 * (i + 1) / 2**level - 1) for level, i in CELLS]
    for _ in range(500):
        low, high = np.sort(rng.uniform(-1, 3, 2)) if rng.random() < 0.8 else np.sort(rng.choice(np.ravel(cells), 2))
        off, carrier = float(rng.choice([0.0, 1e-3, 0.3])), float(rng.choice([0.0, 0.5, 3.0]))
        delta = max(x for (a, b), x in zip(cells, BOUNDS, strict=True) if a <= high + off and b >= low - off)
        wanted = min(3.0 * delta, carrier * delta + 0.125) + 0.0625
        assert wanted <= float(found.over((arb(low), arb(high)), arb(off), arb(carrier))) <= wanted * (1 + 1e-9)


@pytest.mark.parametrize("growth", [1.0, 2.0])
def test_errors_with_signs_are_those_of_the_leaves_that_can_hold_the_argument(growth):
    rng, found = np.random.default_rng(0), deviations(growth=growth, middles=MIDDLES)
    cells = [(4 * i / 2**level - 1, 4 * (i + 1) / 2**level - 1) for level, i in CELLS]
    radii = [growth * (bound - abs(middle)) for bound, middle in zip(BOUNDS, MIDDLES, strict=True)]
    for _ in range(500):
        low, high = np.sort(rng.uniform(-1, 3, 2)) if rng.random() < 0.8 else np.sort(rng.choice(np.ravel(cells), 2))
        off = float(rng.choice([0.0, 1e-3, 0.3]))
        met = [k for k, (a, b) in enumerate(cells) if a <= high + off and b >= low - off]
        ends = found.between((arb(low), arb(high)), arb(off))
        assert float(ends[0]) == pytest.approx(min(MIDDLES[k] - radii[k] for k in met), rel=1e-12, abs=1e-12)
        assert float(ends[0]) <= min(MIDDLES[k] - radii[k] for k in met)
        assert float(ends[1]) == pytest.approx(max(MIDDLES[k] + radii[k] for k in met), rel=1e-12, abs=1e-12)
        assert float(ends[1]) >= max(MIDDLES[k] + radii[k] for k in met)


def test_what_is_not_known_is_as_bad_as_it_gets():
    nan = arb("nan")
    assert float(deviations().over((nan, nan), arb(0), arb(0.5))) >= 0.5 * 2.0
    assert float(deviations().over((arb(0), nan), arb(0), arb(0.5))) >= 0.5 * 2.0
    unknown = deviations().over((arb(0), arb(1)), arb(0), nan)
    assert unknown.is_nan() or unknown >= 3.0 * 2.0
    assert float(deviations((), ()).over((arb(0), arb(1)), arb(0), arb(9))) >= 3.0 * 2.0  # of a stage like another


def test_a_carrier_that_is_less_than_its_range_says_counts_for_more():
    """Rounding was measured on an input of half the size."""
    at = (arb(0), arb(0.25)), arb(0), arb(0.5)
    for growth, wanted in ((0.5, 0.5 + 0.125), (2.0, 1.0 + 0.125), (9.0, 3.0)):  # δ = 1 there
        assert float(deviations(growth=growth).over(*at)) == wanted + 0.0625
