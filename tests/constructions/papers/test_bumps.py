"""two_layer and attention_softmax: jumps in L_p, the layers, and their costs."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.constructions import attention_softmax, two_layer
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import BoundNotMet
from attnc.ir import Affine, Attention, Softmax
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget
from constructions.errors import error_at, lp_error, target_of
from constructions.papers.test_cells import counts_of, hard_points
from ir.rounding import assert_agrees

BOTH = pytest.mark.parametrize("build", [two_layer, attention_softmax])


@BOTH
@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize(
    ("text", "box", "counts"),
    [
        ("sign(x)*y", [(-1, 1), (0, 2)], (15, 16)),
        ("sign(x)*y", [(-1, 1), (-1, 1)], (20, 20)),
        ("floor(3*x)", [(-1, 1)], (25,)),
        ("floor(3*x) + y", [(-1, 1), (0, 1)], (25, 12)),
    ],
)
def test_jumps_in_l_p(build, text, box, counts, norm):
    target = target_of(text, *box)
    built = build(target, points_per_axis=counts, norm=norm)
    error = lp_error(NumpyEngine(built.program), target, norm, 8_009 if len(box) == 1 else 161)
    assert error <= built.bound.value <= 3 * error


@BOTH
def test_l_p_by_eps_in_float32(build):
    target = target_of("sign(x)*y", (-1, 1), (0, 2))
    built = build(target, eps=0.2, norm=2.0, dtype="float32")
    error = lp_error(NumpyEngine(built.program), target, 2.0, 201)
    assert error <= built.bound.value <= 0.2
    with pytest.raises(BoundNotMet):
        build(target, eps=0.2)


@BOTH
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", [None, 2])
def test_the_layers_and_their_sizes(build, dtype, heads):
    target = SequenceTarget(lambda X: np.cumsum(np.sin(X), axis=1), 2, 1, (-1, 1), 2.0)
    built = build(target, points_per_axis=(5, 4), dtype=dtype, heads=heads, num_step_anchors=6, beta=16.0)
    program = built.program
    selecting = Attention if build is two_layer else Softmax
    assert [type(layer) for layer in program.layers] == [Affine, Attention, Affine, selecting, Affine]
    _, steps, _, select, _ = program.layers
    attention = [layer for layer in (steps, select) if isinstance(layer, Attention)]
    assert [len(layer.heads) for layer in attention] == [heads or 1, 1][: len(attention)]
    assert not any(layer.residual or layer.cross or layer.heads[0].mask for layer in attention)
    keys = 2 * 20 if build is two_layer else 0  # a token for every cell and position
    assert build is two_layer or len(select.channels) == 20  # a feature for every cell
    tokens = 12 if heads is None else 10  # 7 steps: 6 keys twice, or (6/2 + 2 sentinels) keys twice
    assert program.num_anchors == tokens * (heads or 1) + keys
    inputs = target.split(hard_points(target, built, 15))
    for found in (program(*inputs), NumpyEngine(program)(*inputs)):
        assert_agrees(program, tuple(inputs), found)


@pytest.mark.parametrize(("build", "per_cell"), [(two_layer, 4), (attention_softmax, 6)])
def test_weights_are_sparse(build, per_cell):
    """A few entries for each cell, whatever the number of features; and a large grid is evaluated within seconds."""
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    built = build(target, points_per_axis=100)
    assert counts_of(built) == (100, 100)
    assert built.program.num_parameters < per_cell * 100 * 100
    assert error_at(built.program, target, hard_points(target, built, 100)) <= built.bound.value


def test_wide_projections_count_as_bytes():
    """Σ P_i features make dense W_Q and W_K: two_layer refuses a fine grid on one axis for them."""
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(BoundNotMet, match="max_bytes"):
        two_layer(target, eps=1e-6)


def test_a_fine_grid_on_one_axis_needs_no_wide_projections():
    """Where two_layer's W_Q and W_K would have (Σ P_i)² entries, everything in attention_softmax is sparse."""
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    built = attention_softmax(target, eps=1e-4)
    (count,) = counts_of(built)
    assert 5_000 < count < 5_200
    assert built.program.num_parameters < 12 * count
    edges = np.array([1, 777, 4_000])[:, None] / count
    points = np.concatenate([edges, edges + 1e-6, edges - 1e-6])  # a transition is 3e-6 wide
    error = error_at(built.program, target, points)
    assert error <= built.bound.value <= 1.1 * error
