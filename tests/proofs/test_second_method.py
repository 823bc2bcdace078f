"""Leaves of the prover, confirmed by a method that has nothing in common with it.

It is of first order, and so for coarse networks: an error of 10⁻⁶ among values of 10 would take millions of pieces.
"""

from __future__ import annotations

import numpy as np
import pytest

from attnc.proofs.cells.dyadic import cell_boxes
from proofs.comparisons import errors_at
from proofs.exact_programs import exact_output, exact_values
from proofs.proving import constructed, core_of, proven
from proofs.second_method import Gap, bound_over, confirmed, gap_of
from strategies.reference import precision

pytestmark = pytest.mark.slow  # minutes of comparisons

TOLERANCE = 0.05
LEAVES = {1: 6, 2: 1}
LARGE = 0.3
"""The largest bound counts: a leaf where the error is 10⁻⁹ is out of reach for first derivatives."""

CASES = [
    ("spectral_grid", "sin(2*x) + exp(-x**2)", {"x": (-1, 2)}, {"num_anchors": 7}),
    ("spectral_grid", "abs(x)*cos(x)", {"x": (-1, 1.5)}, {"num_anchors": 17}),
    ("max_affine", "sin(3*x)", {"x": (0, 1)}, {"points_per_axis": 12, "beta": 800.0}),  # soft enough for Taylor leaves
    ("max_affine", "tanh(x)", {"x": (0, 1)}, {"points_per_axis": 8, "beta": 1e5}),  # selection leaves
    ("gates", "relu(x - 0.3) - silu(x)", {"x": (-1, 1)}, {"eps": 1e-2}),
    ("spectral_grid", "sin(3*x)*y", {"x": (-1, 1), "y": (-1, 1)}, {"num_anchors": 5}),
    ("max_affine", "max(x, y)", {"x": (0, 1), "y": (0, 1)}, {"points_per_axis": 3, "beta": 12.0}),
]


@pytest.mark.parametrize(("name", "text", "box", "options"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES])
def test_leaves_are_confirmed_by_mean_values_in_balls(name, text, box, options):
    program, target = constructed(name, text, box, **options)
    found = proven(program, target)
    gap, rng = gap_of(program, target), np.random.default_rng(3)
    (large,) = np.nonzero(found.evidence.bounds >= LARGE * found.bound)
    for number in {int(np.argmax(found.evidence.bounds)), *rng.choice(large, LEAVES[target.box.d]).tolist()}:
        leaf, bound = found.evidence.leaves[number], float(found.evidence.bounds[number])
        ((centre,), (radius,)) = cell_boxes(core_of(found, target), leaf.level, np.array([leaf.index]))
        second = confirmed(gap, centre - radius, centre + radius, bound * (1 + TOLERANCE))
        assert second is not None
        points = np.clip(centre + radius * rng.uniform(-1, 1, (8, target.box.d)), target.box.lo, target.box.hi)
        with precision(200):
            for point in points:
                pairs = zip(exact_values(target.expression, point), exact_output(program, point), strict=True)
                assert max(float(abs(f - y).lower()) for f, y in pairs) <= second


@pytest.fixture
def coarse() -> tuple[Gap, np.ndarray, np.ndarray]:
    """The gap of a coarse network, points that are dense in [0, 1], and the errors at these."""
    program, target = constructed("max_affine", "sin(2*x)", {"x": (0, 1)}, points_per_axis=6, beta=40.0)
    x = np.linspace(0, 1, 2001)[:, None]
    return gap_of(program, target), x, errors_at(program, target, x)


def test_the_method_converges_to_the_largest_error(coarse):
    """With ever finer pieces of one box the bound falls to the maximum over a dense sample, from above."""
    gap, _, errors = coarse
    bounds = []
    for pieces in (16, 64, 256):
        ends = np.linspace(0, 1, pieces + 1)[:, None]
        bounds.append(max(map(bound_over, [gap] * pieces, ends[:-1], ends[1:])))
    assert bounds == sorted(bounds, reverse=True)
    assert errors.max() <= bounds[-1] <= 1.05 * errors.max()


def test_near_the_largest_error_it_is_confirmed_and_nothing_less(coarse):
    gap, x, errors = coarse
    at = x[int(np.argmax(errors))]
    assert bound_over(gap, at - 1e-3, at + 1e-3) >= errors.max()
    assert confirmed(gap, at - 1e-3, at + 1e-3, 1.05 * errors.max()) is not None
