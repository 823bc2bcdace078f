"""Leaves on which the rounding of a line is found again."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc.proofs.cells.branching import CellBounds, Covering
from attnc.proofs.cells.dyadic import cell_boxes, children
from attnc.proofs.staged.lines import CHECKED_HALVINGS, MOST_CELLS, rounded_leaves
from attnc.targets.box import Box
from proofs.given_kinds import GivenKind


def proof_of(*cells: tuple[int, int]) -> Covering:
    (level, index), n = np.array(cells).T, len(cells)
    upper = np.arange(1.0, n + 1)[:, None]
    known = CellBounds(level, index[:, None], upper, np.zeros(n, int), np.zeros(n), {"remainder": upper})
    return Covering(Box(("t",), np.array([-1.0]), np.array([3.0])), [GivenKind("taylor", None, 10)], known, True)


@pytest.mark.parametrize("bend", [1e4, 30.0, 0.5])
def test_a_checker_that_cuts_every_leaf_finds_what_was_found(bend):
    """A bound that grows with the width of a cell, where the values of a gate cross."""

    def bounds(centres: np.ndarray, radii: np.ndarray) -> np.ndarray:
        return (1 + bend * radii / (1 + bend * np.abs(centres - 0.3)))[:, 0]

    proof = proof_of((1, 0), (2, 2), (3, 6), (3, 7))
    largest, finer = rounded_leaves(bounds, proof)
    assert largest < 0.8 * bounds(*cell_boxes(proof.box, 1, np.array([[0]]))).max() or bend < 1
    sizes = [Fraction(1, 2**leaf.level) for leaf in finer.leaves]
    starts = sorted((leaf.index[0] * size, size) for leaf, size in zip(finer.leaves, sizes, strict=True))
    assert sum(sizes) == 1
    assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(starts))
    for leaf, upper in zip(finer.leaves, finer.cells.upper, strict=True):
        parts = np.array([leaf.index])
        for _ in range(CHECKED_HALVINGS):
            parts = children(parts)
        assert bounds(*cell_boxes(proof.box, leaf.level + CHECKED_HALVINGS, parts)).max() <= largest * (1 + 1e-12)
        above = [(whole.level, leaf.index[0] >> max(0, leaf.level - whole.level)) for whole in proof.leaves]
        owner = next(n for n, whole in enumerate(proof.leaves) if above[n] == (whole.level, whole.index[0]))
        assert upper == proof.cells.upper[owner]
    assert len(finer.leaves) <= 64


def test_leaves_that_need_no_parts_stay_as_they_are():
    proof = proof_of((0, 0))
    largest, finer = rounded_leaves(lambda centres, radii: np.ones(len(centres)), proof)
    assert largest == 1
    assert finer.leaves == proof.leaves


def test_a_function_that_is_all_but_zero_has_few_leaves():
    """Its bound is negligible beside the other head, and no number of leaves brings it down to the error."""
    box = {"x": (-0.7, 3), "y": (-10.45, -2.35), "z": (-1, 0), "w": (0, 1)}
    net = attnc.compile("atan(2.22 - 0.895*x) + erf(gelu(3.56*y + 0.364)) + z + w", box, 0.0146, dtype="float32")
    assert net.certificate.complete
    leaves = [head.leaves.leaves for head in net.certificate.evidence.heads]
    assert 0 < sum(map(len, leaves)) < MOST_CELLS
