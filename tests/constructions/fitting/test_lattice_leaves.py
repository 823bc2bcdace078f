"""Where a leaf can win: regions against brute force."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.constructions.fitting.lattice_leaves import (
    GradedLattice,
    LatticeLeaves,
    profile,
    regions,
    winning_pieces,
)
from constructions.errors import target_of
from constructions.fitting.searching import partition_of


@settings(max_examples=25, deadline=None)
@given(data=st.data(), d=st.integers(1, 3), dtype=st.sampled_from(["float64", "float32"]), seed=st.integers(0, 999))
def test_regions_hold_every_point_where_a_leaf_is_near(data, d, dtype, seed):
    """Random leaves, as unbalanced as can be, on a lattice graded at random; scores compared one by one."""
    rng = np.random.default_rng(seed)
    power = data.draw(st.integers(1, 4))
    target = target_of(" + ".join(f"abs({x})**{power}*sin(3*{x})" for x in "xyz"[:d]), *[(-1.0, 2.0)] * d)
    counts = [int(c) for c in rng.integers(4, 40, d)]
    lattice = GradedLattice.make(target.box, [profile(target, i, 0.1) for i in range(d)], counts, dtype)
    leaves = LatticeLeaves(lattice, np.zeros((1, d), np.int64), np.array([64]), data.draw(st.integers(1, d)))
    while leaves.count < 40 and (leaves.m > 1).any():
        leaves = leaves.split((rng.random(leaves.count) < 0.4) & (leaves.m > 1))
    gap = data.draw(st.sampled_from([1e-3, 0.1, 3.0]))
    y = np.stack([rng.uniform(axis.edges[0], axis.edges[-1], 1500) for axis in lattice.axes], axis=1)
    corners = rng.integers(0, leaves.count, 250)
    y = np.concatenate([y, leaves.bottom[corners], leaves.top[corners]])
    inside = ((y[:, None] >= leaves.bottom) & (y[:, None] <= leaves.top)).all(axis=2)
    met = np.ones(leaves.count, int)
    for pieces in winning_pieces(leaves, gap, np.arange(leaves.count)):
        met += np.bincount(pieces.j, minlength=leaves.count)
        for j, k, lo, hi in zip(pieces.j, pieces.k, pieces.lo, pieces.hi, strict=True):
            assert j != k
            assert (leaves.bottom[j] <= lo).all()
            assert (lo <= hi).all()
            assert (hi <= leaves.top[j]).all()
            inside[:, k] |= ((y >= lo) & (y <= hi)).all(axis=1)
    scores = leaves.scores.scores(y)
    near = scores >= scores.max(axis=1, keepdims=True) - gap
    assert inside[near].all()
    assert near.sum(axis=1).max() <= met.max()


def test_regions_by_pieces_are_no_wider_than_by_hulls():
    target = target_of("exp(-50*(x**2+y**2))", (-1, 1), (-1, 1))
    leaves = partition_of(target, 0.1).leaves
    keys = np.arange(leaves.count)
    by_pieces = regions(target, leaves, 0.1, 0.0, keys)
    by_hulls = regions(target, leaves, 0.1, math.inf, keys)
    assert (by_pieces.radii <= by_hulls.radii * (1 + 1e-9)).all()
    assert by_pieces.radii.sum() < by_hulls.radii.sum()
