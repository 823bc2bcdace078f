"""Dyadic cells: as floats they cover the cells that they name, and children part their cell."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.proofs.cells.dyadic import cell_boxes, cells, children
from attnc.targets.box import Box
from proofs.exact_cells import cell_ends

ENDS = st.one_of(
    st.floats(-1e6, 1e6, allow_subnormal=False),
    st.integers(-64, 64).map(lambda eighths: eighths / 8),
    st.floats(-1e300, 1e300),
)
"""Widths that are exact and that are not, wide ones and tiny ones."""


@settings(max_examples=300)
@given(ENDS, ENDS, st.integers(0, 48), st.integers(0, 2**48 - 1))
def test_cells_are_covered_by_the_least_floats_there_are(a, b, level, i):
    """By rational arithmetic: the centre is the nearest float, and no smaller radius would cover the cell."""
    if a == b:
        return
    box, index = Box.parse([(min(a, b), max(a, b))]), np.array([[i % 2**level]])
    ((start, end),) = cell_ends(box, level, index[0])
    centre, radius = (part[0, 0] for part in cell_boxes(box, level, index))
    assert centre == float((start + end) / 2)
    reach = max(end - Fraction(centre), Fraction(centre) - start)
    assert Fraction(radius) >= reach
    assert radius == 0 or Fraction(math.nextafter(radius, 0)) < reach


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
