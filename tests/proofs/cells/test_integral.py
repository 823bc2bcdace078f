"""L_p norms by leaves: sound against quadrature split at the jumps, not vacuous, and exact for exact functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnc
from attnc.constructions import max_affine
from attnc.engines.numpy_engine import NumpyEngine
from attnc.proofs.cells.branching import Budget
from attnc.proofs.cells.integral import bound_integral
from attnc.proofs.cells.kind import Bounds
from attnc.proofs.leaves_prover import LeavesProver
from attnc.proofs.margins import SMALL_LEAVES
from attnc.proofs.prover import ProofRequest
from attnc.targets.box import Box
from proofs.comparisons import errors_at
from proofs.given_kinds import GivenKind

UNIT = Box.parse([(0, 1)])


def kind_of(error, slope):
    """|f − network| = error(x) with this Lipschitz constant, known to one part in ten million."""

    def bounds(centres, radii, goal):
        return Bounds((error(centres) + slope * radii.sum(axis=1))[:, None] * (1 + 1e-7))

    return GivenKind("test", bounds)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, 40.0])
def test_the_norm_of_a_power_is_found(p):
    exact = (1 / (p + 1)) ** (1 / p)  # of x on [0, 1]
    found = bound_integral([kind_of(lambda x: x[:, 0], 1.0)], UNIT, p, goal=1.01 * exact)
    assert found.complete
    assert exact <= found.bound <= 1.01 * exact
    assert found.shares.sum() == pytest.approx(1.0)


def test_the_volume_of_the_box_counts():
    box = Box.parse([(-1, 4), (0, 0.1)])
    constant = [kind_of(lambda x: np.full(len(x), 3.0), 0.0)]
    for p in (1.0, 2.0, 7.0):
        exact = 3.0 * 0.5 ** (1 / p)
        assert exact <= bound_integral(constant, box, p).bound <= exact * (1 + 1e-6)


@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1e200])
def test_no_power_overflows(scale):
    found = bound_integral([kind_of(lambda x: scale * x[:, 0], scale)], UNIT, 9.0, goal=scale)
    assert scale * 0.1 ** (1 / 9) <= found.bound <= scale


def test_cells_gather_at_a_jump():
    """Height 1 on [0.3, 0.3 + 2^−20]: found by halving there, and not elsewhere."""
    start, width = 0.3, 2.0**-20

    def bounds(centres, radii, goal):
        hit = (centres + radii >= start) & (centres - radii <= start + width)
        return Bounds(hit.astype(float))

    found = bound_integral([GivenKind("test", bounds)], UNIT, 1.0, goal=1.1 * width)
    assert found.complete
    assert width <= found.bound <= 1.1 * width
    assert len(found.leaves) < 200


def test_when_cells_run_out_what_is_known_is_a_bound():
    found = bound_integral([kind_of(lambda x: x[:, 0], 1.0)], UNIT, 1.0, goal=0.5, budget=Budget(cells=300))
    assert not found.complete
    assert 0.5 <= found.bound <= 0.51


CASES = [
    ("sign(x)*y", [(-1, 1)] * 2, 20, 200, (2.0, 2.4, 7.0)),  # cells' borders along x = 0, where it jumps, are thin
    ("floor(3*x)", [(-1, 1)], 50, 30_000, (1.05, 1.05, 1.05)),
    ("sign(x - 0.33)", [(-1, 1)], 40, 40_000, (1.05, 1.05, 1.05)),
    ("sin(x)+cos(y)", [(-3, 3)] * 2, 15, 150, (2.0, 1.7, 1.6)),
    ("sqrt(x)", [(0, 1)], 30, 30_000, (1.05, 1.05, 1.05)),
    ("sign(x - y)", [(-1, 1)] * 2, 16, 160, (1.5, 1.2, 1.2)),
]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("text", "box", "cells", "nodes", "most"), CASES)
def test_the_bound_holds_and_is_close(text, box, cells, nodes, most, p):
    target = attnc.as_target(text, box, p=p)
    built = max_affine(target, points_per_axis=cells, norm=p)
    axes = [lo + (np.arange(nodes) + 0.5) / nodes * (hi - lo) for lo, hi in box]
    points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    errors = errors_at(NumpyEngine(built.program), target, points)
    volume = math.prod(hi - lo for lo, hi in box)
    error = (volume * np.mean(errors**p)) ** (1 / p)
    found = LeavesProver().prove(built.program, target, ProofRequest(p=p, observed=error, cells=12_000))
    # The quadrature of a jump inside a cell is good to one part in nodes/cells.
    assert error * (1 - cells / nodes) <= found.bound
    assert found.bound <= most[[1.0, 2.0, 3.5].index(p)] * error
    assert sum(term.value for term in found.terms) == pytest.approx(found.bound, rel=1e-6)
    assert any(term.name == "jump" for term in found.terms) != target.is_continuous


def test_compile_proves_norms_by_leaves():
    net = attnc.compile("floor(3*x)", [(-1, 1)], eps=0.3, norm=2)
    claim = net.certificate
    assert (claim.method, claim.norm) == ("proof", "2")
    assert claim.observed <= claim.bound <= 0.3
    assert claim.num_leaves == len(claim.leaf_bounds)
    lo, hi = claim.cells(net.box)
    assert 1 <= claim.bound / np.sqrt((hi - lo)[:, 0] @ claim.leaf_bounds**2) <= 1 + SMALL_LEAVES
    assert claim.pointwise_bound is None
    assert net.bound({"x": (0.4, 0.6)}, seconds=1.0) < claim.bound


def test_a_wrong_value_is_seen():
    target = attnc.as_target("sign(x)", [(-1, 1)], p=2.0)
    other = attnc.as_target("sign(x) + 0.25", [(-1, 1)], p=2.0)
    program = max_affine(target, points_per_axis=16, norm=2.0).program
    bound = LeavesProver().prove(program, other, ProofRequest(p=2.0)).bound
    assert 0.25 * math.sqrt(2) * 0.99 <= bound <= 0.45


def test_a_sample_in_a_thin_layer_does_not_stand_for_its_cell():
    net = attnc.compile("sign(x - 0.1),floor(x)", [(-2, 2)], eps=0.1, norm=3, construction="max_affine")
    assert 0.025 <= net.certificate.observed <= 0.0366  # the norm by four million points
