"""The running error analysis: never below differences of evaluations, and of the size of the independent one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.rounding import evaluation_error
from attnc.proofs.observed import sample_points
from ir.random_programs import programs, random_inputs
from ir.rounding import exact_and_bound


@settings(max_examples=60)
@given(program=programs(), seed=st.integers(0, 99))
def test_it_covers_every_evaluation(program, seed):
    inputs = [np.asarray(given, program.dtype) for given in random_inputs(program, 4, seed)]
    found = evaluation_error(program, inputs)
    exact, independent = exact_and_bound(program, tuple(inputs))
    assert found.shape == exact.shape
    for outputs in (program(*inputs), NumpyEngine(program)(*inputs)):
        assert (np.abs(outputs - exact) <= found).all()
    # Same mathematics, written twice.
    assert (found >= 0.99 * independent).all()
    assert (found <= 2.5 * independent + 1e-300).all()


def test_it_is_small_away_from_ties():
    net = attnc.compile("x + y", [(-1, 1)] * 2, eps=0.1)
    away = evaluation_error(net.program, [sample_points(net.box, 40) * 0.97 + 0.011])
    assert np.median(away) < 1e-12
    assert evaluation_error(net.program, [np.zeros((0, 2))]).shape == (0,)


def test_casting_the_input_counts():
    net = attnc.compile("x", [(0, 1)], eps=0.3, dtype="float32")
    points = np.array([[0.1], [0.7]])
    assert (evaluation_error(net.program, [points]) > 0).all()
