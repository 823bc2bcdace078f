"""One attention layer and a softmax: what only this construction on bumps is; see `truncation/test_bumps.py`, too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnc.constructions.papers.attention_softmax import attention_softmax
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Affine, Attention, Softmax
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget
from constructions.errors import error_at, target_of
from constructions.transitions import counts_of, hard_points
from ir.rounding import assert_agrees

HEADS = st.sampled_from([None, 1, 2, 5])


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 3),
    d=st.integers(1, 2),
    k=st.integers(1, 2),
    exponent=st.floats(0, 6),
    heads=HEADS,
    seed=st.integers(0, 99),
)
def test_sequences_need_no_margin(n, d, k, exponent, heads, seed):
    assume(n * d <= 4)
    rng = np.random.default_rng(seed)
    mix, out = rng.normal(size=(n, n)), rng.normal(size=(d, k))
    lipschitz = np.linalg.norm(mix, 2) * np.linalg.norm(out, 2)
    target = SequenceTarget(lambda X: np.tanh(mix @ X @ out), n, d, (-1, 1), lipschitz)
    counts = 4 if n * d == 4 else 5
    built = attention_softmax(target, points_per_axis=counts, beta=64 * 10.0**exponent, heads=heads)
    assert error_at(built.program, target, hard_points(target, built, 200)) <= built.bound.value
    variation = built.bound.terms[0].value
    assert built.bound.value <= variation * (1 + 1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", [None, 2])
def test_it_is_one_attention_layer_and_one_softmax(dtype, heads):
    target = SequenceTarget(lambda X: np.cumsum(np.sin(X), axis=1), 2, 1, (-1, 1), 2.0)
    built = attention_softmax(target, points_per_axis=(5, 4), dtype=dtype, heads=heads, num_step_anchors=6, beta=16.0)
    kinds = [type(layer) for layer in built.program.layers]
    assert kinds == [Affine, Attention, Affine, Softmax, Affine]
    steps, select = built.program.layers[1], built.program.layers[3]
    assert len(steps.heads) == (heads or 1)
    assert not any((steps.residual, steps.cross, steps.heads[0].mask))
    assert len(select.channels) == 20  # a feature for every cell
    tokens = 12 if heads is None else 10  # 7 steps: 6 keys twice, or (6/2 + 2 sentinels) keys twice
    assert built.program.num_anchors == tokens * (heads or 1)
    points = hard_points(target, built, 15)
    inputs = target.split(points)
    for found in (built.program(*inputs), NumpyEngine(built.program)(*inputs)):
        assert_agrees(built.program, tuple(inputs), found)


def test_a_fine_grid_on_one_axis_needs_no_wide_projections():
    """Where two_layer's W_Q and W_K would have (Σ P_i)² entries, everything here is sparse."""
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    built = attention_softmax(target, eps=1e-4)
    (count,) = counts_of(built)
    assert 5_000 < count < 5_200
    assert built.program.num_parameters < 12 * count
    edges = np.array([1, 777, 4_000])[:, None] / count
    points = np.concatenate([edges, edges + 1e-6, edges - 1e-6])  # a transition is 3e-6 wide
    error = error_at(built.program, target, points)
    assert error <= built.bound.value <= 1.1 * error


def test_scores_are_sparse():
    """Four entries a cell and a value, whatever the number of steps."""
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    built = attention_softmax(target, points_per_axis=100)
    assert counts_of(built) == (100, 100)
    assert built.program.num_parameters < 6 * 100 * 100
    points = hard_points(target, built, 100)
    assert error_at(built.program, target, points) <= built.bound.value
