"""Points at kinks lie on them, on both sides, and in the box; the error that is observed there is the largest."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.kinks import KINK_DISTANCES, MAX_KINKS_SEARCHED, NUM_PAIRS_PER_KINK, points_at_kinks

SWITCHES = [
    ("abs(x - 0.3)", [(-1, 1)], lambda p: p[:, 0] - 0.3),
    ("1 + relu(x*y - 0.2)", [(-1, 1), (0, 2)], lambda p: p[:, 0] * p[:, 1] - 0.2),
    ("max(sin(x), y)", [(-2, 2), (-1, 1)], lambda p: np.sin(p[:, 0]) - p[:, 1]),
    ("clip(x, 0.5, 9)*y", [(0, 1), (0, 1)], lambda p: p[:, 0] - 0.5),
]


@pytest.mark.parametrize(("text", "ends", "switch"), SWITCHES, ids=[case[0] for case in SWITCHES])
def test_points_lie_at_kinks_and_on_both_sides(text, ends, switch):
    box = Box.parse(ends, list("xy"[: len(ends)]))
    points = points_at_kinks(Expression.parse(text).with_variables(box.names), box)
    assert len(points) >= 100
    assert ((points >= box.lo) & (points <= box.hi)).all()
    off = switch(points)
    assert np.abs(off).min() < 1e-15
    for distance in 10.0 ** -np.arange(3, 13):
        assert ((off > distance / 30) & (off < 30 * distance)).any()
        assert ((off < -distance / 30) & (off > -30 * distance)).any()


def test_no_kink_in_the_box_means_no_points():
    for text in ("sin(x)", "abs(x + 2)"):
        assert len(points_at_kinks(Expression.parse(text), Box.parse([(-1, 1)], ["x"]))) == 0


def test_of_many_kinks_some_are_searched():
    """max of 60 lines has 1,770 pairs that may cross."""
    text = f"max({', '.join(f'{i}*x - {i * i / 60:.3f}' for i in range(60))})"
    points = points_at_kinks(Expression.parse(text), Box.parse([(0, 1)], ["x"]))
    assert 10_000 < len(points) <= MAX_KINKS_SEARCHED * NUM_PAIRS_PER_KINK * (1 + 2 * len(KINK_DISTANCES))


@pytest.mark.parametrize("text", ["max(x, y)", "clip(min(1.3*x, 0.5*x), -0.7, 0.9)", "abs(x) + 0.1*x"])
def test_the_error_at_a_kink_is_observed(text):
    """It lives on a strip of width 1e-6: a sample of the box would miss it, and never find a proof close."""
    names = sorted(Expression.parse(text).variables)
    claim = attnc.compile(text, box=dict.fromkeys(names, (-0.6, 0.7)), eps=1e-6).certificate
    assert claim.observed <= claim.bound <= 3 * claim.observed
    heads = claim.by_heads.heads if claim.by_heads else ()
    assert claim.num_leaves + sum(len(head.leaves.leaves) for head in heads) < 1000
