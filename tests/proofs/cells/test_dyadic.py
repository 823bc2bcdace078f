"""Dyadic cells: as floats they cover what they name, and children part their cell."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.proofs.cells.dyadic import cell_boxes, cells, children
from attnc.targets.box import Box
from proofs.exact_cells import cell_ends

ends = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(ends, ends, st.integers(0, 40), st.integers(0, 2**40 - 1))
def test_float_boxes_contain_their_cells(a, b, level, i):
    if a == b:
        return
    box = Box.parse([(min(a, b), max(a, b))])
    index = np.array([[i % 2**level]])
    (left, right), *_ = cell_ends(box, level, index[0])
    centre, radius = (part[0, 0] for part in cell_boxes(box, level, index))
    assert Fraction(centre) - Fraction(radius) <= left
    assert right <= Fraction(centre) + Fraction(radius)
    rounding = Fraction(math.ulp(centre)) + Fraction(math.ulp(radius))
    assert 2 * Fraction(radius) - (right - left) <= 2 * rounding
    assert right - left == (Fraction(box.hi[0]) - Fraction(box.lo[0])) / 2**level


def test_cells_on_binary_boxes_are_exact():
    """√x on [0, 1] would not be defined on a box that reaches below 0 by a rounding."""
    centres, radii = cell_boxes(Box.parse([(0, 1), (-4, 4)]), 7, cells(2, 7))
    assert (centres - radii).min(axis=0).tolist() == [0.0, -4.0]
    assert (centres + radii).max(axis=0).tolist() == [1.0, 4.0]


@pytest.mark.parametrize("d", [1, 2, 3])
def test_children_part_their_cell(d):
    index = np.array([[1] * d, [2] * d])
    halves = children(index)
    assert len(np.unique(halves, axis=0)) == 2 ** (d + 1)
    np.testing.assert_array_equal(halves >> 1, np.repeat(index, 2**d, axis=0))
    assert len(np.unique(cells(d, 3), axis=0)) == 8**d
