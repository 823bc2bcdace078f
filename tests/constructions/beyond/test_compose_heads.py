"""The head of one part: a large one is taken again for another δ."""

from __future__ import annotations

from attnc.constructions.beyond.compose_heads import (
    CLOSE_SHARE,
    MANY_ANCHORS,
    UnaryFit,
    fit_part,
    function_of_one,
    sample_interval,
)
from attnc.targets.expressions.expression import Expression

(SQRT,) = Expression.parse("sqrt(t)").outputs


def test_a_large_head_is_taken_again_where_it_is_within_delta() -> None:
    first = fit_part(SQRT, 0.0, 2.0, 1e-5, "float64")
    assert isinstance(first, UnaryFit)
    wider = fit_part(SQRT, 0.0, 2.00001, 2e-5, "float64", before=first)
    assert isinstance(wider, UnaryFit)
    assert wider.keys is first.keys
    t = sample_interval(0.0, 2.00001)
    assert abs(first(t) - function_of_one(SQRT)(t)).max() <= wider.error <= 2e-5


def test_it_is_not_taken_where_it_is_too_coarse_or_far_too_fine() -> None:
    first = fit_part(SQRT, 0.0, 2.0, 1e-5, "float64")
    assert isinstance(first, UnaryFit)
    for delta in (0.9 * first.error, 1.1 * first.error / CLOSE_SHARE):
        other = fit_part(SQRT, 0.0, 2.0, delta, "float64", before=first)
        assert isinstance(other, UnaryFit)
        assert other.keys is not first.keys
        assert other.error <= delta


def test_small_heads_are_always_searched_for() -> None:
    (tree,) = Expression.parse("exp(t)").outputs
    first = fit_part(tree, 0.0, 1.0, 1e-9, "float64")
    other = fit_part(tree, 0.0, 1.0, 3e-9, "float64", before=first)
    assert isinstance(first, UnaryFit)
    assert isinstance(other, UnaryFit)
    assert other.num_anchors <= first.num_anchors <= MANY_ANCHORS
    assert other.keys is not first.keys
