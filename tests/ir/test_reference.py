"""The reference against an evaluator that shares nothing with it: loops, dense tensors, T×T masks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from attnc.errors import InputError
from attnc.ir import Affine, Attention, Program
from attnc.ir.reference import activation_shapes, evaluate_visited
from ir.random_programs import lookup_program, programs_and_inputs, random_inputs
from ir.rounding import assert_agrees


def dumb(program: Program, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """In Python's own floats, one point at a time."""
    outputs = []
    for b in range(len(inputs[0])):
        memory = _as_rows(inputs[1][b], program.input_shapes[1]) if len(inputs) > 1 else []
        for layer in program.memory:
            memory = dumb_layer(layer, memory, memory)
        state = _as_rows(inputs[0][b], program.input_shapes[0])
        for layer in program.layers:
            state = dumb_layer(layer, state, memory)
        outputs.append(np.array(state, np.float64).reshape(program.output_shape))
    return np.array(outputs).reshape(len(inputs[0]), *program.output_shape).astype(program.dtype)


def _as_rows(point: np.ndarray, shape: tuple[int, ...]) -> list[list[float]]:
    return [point.tolist()] if len(shape) == 1 else point.tolist()


def dumb_layer(layer, Z: list[list[float]], memory: list[list[float]]) -> list[list[float]]:
    if isinstance(layer, Affine):
        return dumb_affine(layer, Z)
    if isinstance(layer, Attention):
        return dumb_attention(layer, Z, memory if layer.cross else Z)
    return [dumb_softmax(row) for row in Z]


def dumb_affine(layer: Affine, Z: list[list[float]]) -> list[list[float]]:
    W, B = np.zeros(layer.weight.shape), np.zeros(layer.constant.shape)
    for (t, f, s, g), value in zip(layer.weight.index.tolist(), layer.weight.values.tolist(), strict=True):
        W[t, f, s, g] = value
    for (t, f), value in zip(layer.constant.index.tolist(), layer.constant.values.tolist(), strict=True):
        B[t, f] = value
    W = W.tolist()
    out = B.tolist()
    for t in range(len(out)):
        for f in range(len(out[t])):
            for s in range(len(Z)):
                for g in range(len(Z[s])):
                    out[t][f] += W[t][f][s][g] * Z[s][g]
    return out


def dumb_attention(layer: Attention, Z: list[list[float]], Y: list[list[float]]) -> list[list[float]]:
    out = [list(row) if layer.residual else [0.0] * len(layer.channels) for row in Z]
    for head in layer.heads:
        Q, K, V = _product(Z, head.W_Q), _product(Y, head.W_K), _product(Y, head.W_V)
        pattern = []
        for i in range(len(Z)):
            scores = [sum(q * k for q, k in zip(Q[i], row, strict=True)) for row in K]
            for j in range(len(Y)):
                if head.mask is not None and head.mask.key_segments[j] not in (-1, head.mask.query_segments[i]):
                    scores[j] = -math.inf
            pattern.append(dumb_softmax(scores))
        added = _product(_product(pattern, np.array(V)), head.W_O)
        out = [[a + b for a, b in zip(left, right, strict=True)] for left, right in zip(out, added, strict=True)]
    return out


def dumb_softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def _product(left: list[list[float]], right: np.ndarray) -> list[list[float]]:
    columns = right.T.tolist()
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]


@settings(max_examples=180)
@given(programs_and_inputs(scales=(0.1, 1.0, 20.0, 100.0, 400.0)))
def test_reference_equals_dumb_loops(case):
    """Logits may span hundreds."""
    program, inputs = case
    found = program(*inputs)
    assert np.isfinite(found).all()
    assert_agrees(program, inputs, found)
    assert_agrees(program, inputs, dumb(program, inputs))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("beta", [1e-2, 1.0, 1e4, 1e8])
def test_one_anchor_is_a_constant(beta, dtype):
    program = lookup_program(np.array([0.25]), np.array([0.75]), beta, dtype)
    assert program(np.linspace(-3, 3, 7)[:, None]).tolist() == [0.75] * 7


def test_recording_names_channels_scores_and_patterns():
    program = lookup_program(np.array([-1.0, 0.0, 1.0]), np.array([2.0, 3.0, 4.0]), 1.0)
    points = np.array([[0.5], [0.9]])
    cache = {}
    outputs = evaluate_visited(program, (points,), cache.setdefault, 2**20)
    assert (outputs == program(points)).all()
    assert {"embed.slope", "select.head0.scores", "select.head0.pattern", "select.head0.z", "read.y"} <= cache.keys()
    assert [(name, array.shape[1:]) for name, array in cache.items()] == list(activation_shapes(program).items())
    pattern = cache["select.head0.pattern"]
    assert pattern.shape == (2, 1, 4)
    assert (pattern[:, :, 0] == 0).all()
    np.testing.assert_allclose(pattern.sum(axis=-1), 1, rtol=1e-15)


def test_recording_too_much_is_refused():
    program = lookup_program(np.linspace(0, 1, 100), np.zeros(100), 1.0)
    with pytest.raises(InputError, match="max_bytes"):
        evaluate_visited(program, (np.zeros((1000, 1)),), {}.setdefault, 2**10)


def test_points_in_another_dtype_are_cast():
    program = lookup_program(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0, np.float32)
    (points,) = random_inputs(program, 3, 0)
    assert program(points.astype(np.float64)).dtype == np.float32
    assert (program(points.astype(np.float64)) == program(points)).all()
