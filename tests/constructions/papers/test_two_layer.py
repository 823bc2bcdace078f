"""Two attention layers: what only this construction on bumps is; what both are is in `truncation/test_bumps.py`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnc.constructions.papers.two_layer import two_layer
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import BoundNotMet, InputError
from attnc.ir import Affine, Attention
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
    margin=st.floats(0.05, 60),
    exponent=st.floats(0, 6),
    heads=HEADS,
    seed=st.integers(0, 99),
)
def test_sequences_are_position_exact_for_every_margin(n, d, k, margin, exponent, heads, seed):
    assume(n * d <= 4)
    rng = np.random.default_rng(seed)
    mix, out = rng.normal(size=(n, n)), rng.normal(size=(d, k))
    lipschitz = np.linalg.norm(mix, 2) * np.linalg.norm(out, 2)
    target = SequenceTarget(lambda X: np.tanh(mix @ X @ out), n, d, (-1, 1), lipschitz)
    counts = 4 if n * d == 4 else 5
    built = two_layer(target, points_per_axis=counts, margin=margin, beta=64 * 10.0**exponent, heads=heads)
    assert error_at(built.program, target, hard_points(target, built, 200)) <= built.bound.value
    variation = built.bound.terms[0].value
    assert built.bound.value <= variation * (1 + 1e-3)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", [None, 2])
def test_it_is_two_attention_layers_of_which_the_second_has_one_head(dtype, heads):
    target = SequenceTarget(lambda X: np.cumsum(np.sin(X), axis=1), 2, 1, (-1, 1), 2.0)
    built = two_layer(target, points_per_axis=(5, 4), dtype=dtype, heads=heads, num_step_anchors=6, beta=16.0)
    kinds = [type(layer) for layer in built.program.layers]
    assert kinds == [Affine, Attention, Affine, Attention, Affine]
    _, steps, _, select, _ = built.program.layers
    assert (len(steps.heads), len(select.heads)) == (heads or 1, 1)
    assert not any(layer.residual or layer.cross or layer.heads[0].mask for layer in (steps, select))
    assert built.program.num_attention_layers == 2
    keys = 2 * 20  # a token for every cell and position
    tokens = 12 if heads is None else 10  # 7 steps: 6 keys twice, or (6/2 + 2 sentinels) keys twice
    assert built.program.num_anchors == tokens * (heads or 1) + keys
    points = hard_points(target, built, 15)
    inputs = target.split(points)
    for found in (built.program(*inputs), NumpyEngine(built.program)(*inputs)):
        assert_agrees(built.program, tuple(inputs), found)


def test_wide_projections_count_as_bytes():
    """Σ P_i features make dense W_Q and W_K: a fine grid on one axis is refused for them."""
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(BoundNotMet, match="max_bytes"):
        two_layer(target, eps=1e-6)


def test_keys_are_sparse():
    """Two entries a cell, whatever the number of features; and a large grid is evaluated within seconds."""
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    built = two_layer(target, points_per_axis=100)
    assert counts_of(built) == (100, 100)
    assert built.program.num_parameters < 4 * 100 * 100
    points = hard_points(target, built, 100)
    assert error_at(built.program, target, points) <= built.bound.value


def test_a_margin_of_nothing_is_refused():
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(InputError, match="margin"):
        two_layer(target, points_per_axis=3, margin=0.0)
