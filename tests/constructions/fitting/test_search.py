"""The searches: their examples run, and they find the least size or number wherever errors fall."""

from __future__ import annotations

import doctest
from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.constructions.fitting import search
from attnc.constructions.fitting.search import Bracket, doubling, fewest, ladder, thinned, tightened

Trial = namedtuple("Trial", "size error")


def test_the_examples_run():
    found = doctest.testmod(search)
    assert found.attempted >= 6
    assert found.failed == 0


@given(needed=st.integers(1, 500), most=st.integers(1, 600), start=st.integers(1, 20), resolution=st.integers(1, 50))
def test_the_fewest_are_found_and_no_size_is_tried_twice(needed, most, start, resolution):
    tried: list[int] = []

    def attempt(size, before):
        tried.append(size)
        assert not before or before[-1].error > 0 or before[-1].size >= needed
        return Trial(size, float(size < needed))

    found = fewest(doubling(start, most), attempt, 0.0, resolution=resolution)
    assert len(set(tried)) == len(tried)
    if needed > most:
        assert found.met is None
        assert found.best.error == 1
    else:
        assert needed <= found.met.size <= needed + 1 + found.met.size // resolution


def test_a_hopeless_search_ends_early():
    found = fewest(ladder((1, 2, 4, 8), 100), lambda size, _: Trial(size, 1.0), 0.5, gives_up=lambda all: len(all) == 3)
    assert found.gave_up
    assert [trial.size for trial in found.failed] == [1, 2, 4]


@given(least=st.floats(0.01, 100))
def test_a_bracket_closes_on_the_least_factor(least):
    bracket, factor, met = Bracket(), 1.0, []
    for _ in range(60):
        is_met = factor >= least
        met += [factor] if is_met else []
        factor = bracket.next(factor, is_met, least / factor * 1.01)
        if bracket.is_within(1.001):
            break
    assert min(met, default=least) == pytest.approx(least, rel=0.02)


def test_axes_are_shortened_one_after_the_other():
    def shorter(counts, axis):
        less = tuple(count - (i == axis) for i, count in enumerate(counts))
        return less if less[0] * less[1] >= 12 and min(less) > 0 else None

    assert thinned((5, 6), 2, shorter) == (2, 6)


def halved(most: float):
    """A trial with twice the error that it is asked for, and none for less than `most`."""
    return lambda asked, failed: Trial(asked, 2 * asked) if asked >= most else None


@pytest.mark.parametrize(
    ("least", "tries", "gives_up", "met", "failed"),
    [
        (0.0, 9, lambda failed: False, 0.5, [4.0, 2.0, 1.0]),
        (0.0, 3, lambda failed: False, None, [4.0, 2.0, 1.0]),  # no more tries
        (2.0, 9, lambda failed: False, None, [4.0, 2.0]),  # no trial for less
        (0.0, 9, lambda failed: len(failed) == 1, None, [4.0]),
    ],
)
def test_a_smaller_error_is_asked_for_until_the_goal_is_met(least, tries, gives_up, met, failed):
    found = tightened(4.0, halved(least), lambda asked, trial: asked / 2, 1.0, tries, gives_up=gives_up)
    assert (found.met and found.met.size) == met
    assert [trial.size for trial in found.failed] == failed
    assert found.gave_up == (met is None and tries == 9)
