"""How far a stage may be off, against its leaves looked through one by one."""

from __future__ import annotations

import numpy as np
from flint import arb

from attnc_checker.cells import Leaf
from attnc_checker.deep.claims import StageClaim
from attnc_checker.deep.deviations import Deviations

CELLS = [(1, 1), (3, 2), (3, 3), (2, 0)]
BOUNDS = (0.25, 0.5, 2.0, 1.0)


def deviations(leaves=CELLS, bounds=BOUNDS, size=3.0, growth=0.5, fixed=0.125, unsure=0.0625) -> Deviations:
    stated = tuple(Leaf("taylor", 4, (level, (i,))) for level, i in leaves)
    names = ("layer", "channel", "s", "x", None, None, None, None, "t")
    return Deviations(
        StageClaim(*names, (-1.0, 3.0), None, 2.0, None, stated, bounds), *map(arb, (size, growth, fixed, unsure))
    )


def test_the_leaves_that_can_hold_the_argument_count_and_no_others():
    rng, found = np.random.default_rng(0), deviations()
    cells = [(4 * i / 2**level - 1, 4 * (i + 1) / 2**level - 1) for level, i in CELLS]
    for _ in range(500):
        low, high = np.sort(rng.uniform(-1, 3, 2)) if rng.random() < 0.8 else np.sort(rng.choice(np.ravel(cells), 2))
        off, carrier = float(rng.choice([0.0, 1e-3, 0.3])), float(rng.choice([0.0, 0.5, 3.0]))
        delta = max(x for (a, b), x in zip(cells, BOUNDS, strict=True) if a <= high + off and b >= low - off)
        wanted = min(3.0 * delta, carrier * delta + 0.125) + 0.0625
        assert wanted <= float(found.over((arb(low), arb(high)), arb(off), arb(carrier))) <= wanted * (1 + 1e-9)


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
