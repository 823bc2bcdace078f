"""Cells of a box in rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from attnc.targets.box import Box


def cell_ends(box: Box, level: int, index: np.ndarray) -> list[tuple[Fraction, Fraction]]:
    """The cell exactly: lo + (hi − lo)·[i, i + 1]/2ⁿ on every axis."""
    found = []
    for lo, hi, i in zip(box.lo.tolist(), box.hi.tolist(), index, strict=True):
        start, width = Fraction(lo), Fraction(hi) - Fraction(lo)
        found.append(tuple(start + width * Fraction(int(i) + side, 2**level) for side in (0, 1)))
    return found
