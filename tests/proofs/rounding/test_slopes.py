"""Rounding of slopes: a bound over a box is not below those at its points."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.proofs.gradient_prover import stage_of
from attnc.proofs.rounding.slopes import SlopeRounding
from attnc.targets.box import Box
from checker.networks import gate

ROOM = 1.1
"""Bounds over a box are not exactly monotone: they use other middles."""


@pytest.mark.parametrize("slope", [4.0, 16.0, 400.0])
def test_a_weight_that_is_small_at_the_centre_may_be_large_elsewhere(slope):
    """At the centre 256 keys have equal weights, and at an end one of them has a half or more."""
    program = gate([(0, 0)] * 255 + [(0, slope)], [(0, 0)] * 255 + [(1, 0)])
    rounding = SlopeRounding(*stage_of(program), Box.parse({"x": (-1, 1)}))
    points = np.linspace(-1, 1, 101)[:, None]
    at_points = rounding.on(points, np.zeros_like(points))
    assert at_points.max() <= ROOM * rounding.whole.max()
