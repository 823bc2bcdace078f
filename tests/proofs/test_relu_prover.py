"""ReLU networks proved from stored weights: bounds hold at exact values, are not loose, and notice what was changed."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc import ReLUNetwork
from attnc.constructions import relu_network
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.proofs.deep.like_units import NetworkProof
from attnc.proofs.relu_prover import prove_relu
from proofs.mutations import PROGRAM_MUTATIONS


def random_network(seed: int, sizes: tuple[int, ...], box: tuple[float, float] = (-1, 1)) -> ReLUNetwork:
    rng = np.random.default_rng(seed)
    pairs = list(itertools.pairwise(sizes))
    weights = [rng.normal(size=(o, i)) / np.sqrt(i) for i, o in pairs]
    return ReLUNetwork(weights, [rng.normal(size=o) * 0.3 for _, o in pairs], box)


def exact(target: ReLUNetwork, point: np.ndarray) -> list[Fraction]:
    state = [Fraction(float(x)) for x in point]
    last = len(target.weights) - 1
    for number, (W, b) in enumerate(zip(target.weights, target.biases, strict=True)):
        state = [
            sum((Fraction(float(w)) * x for w, x in zip(row, state, strict=True)), Fraction(float(c)))
            for row, c in zip(W, b, strict=True)
        ]
        state = state if number == last else [max(x, Fraction(0)) for x in state]
    return state


def compare(program: Program, target: ReLUNetwork, bound: float, seed: int = 0, count: int = 2000) -> float:
    """At random, at corners and uphill; exactly where the error is largest. The largest error."""
    rng = np.random.default_rng(seed)
    box, engine = target.box, NumpyEngine(program)

    def errors_at(points: np.ndarray) -> np.ndarray:
        return np.abs(engine(points).reshape(len(points), -1) - target(points)).max(axis=1)

    points = box.lo + rng.random((count, box.d)) * box.widths
    points[: count // 8] = np.where(rng.random((count // 8, box.d)) < 0.5, box.lo, box.hi)
    step = 0.1
    for _ in range(10):
        best = points[np.argsort(-errors_at(points))[:16]]
        moved = best[:, None] + rng.normal(size=(16, 32, box.d)) * step * box.widths
        points, step = np.concatenate([best, np.clip(moved, box.lo, box.hi).reshape(-1, box.d)]), step / 2
    errors = errors_at(points)
    for i in np.argsort(-errors)[:4]:
        for engine_of in (engine, program):
            y = np.asarray(engine_of(points[i : i + 1]), np.float64).ravel()
            off = max(abs(Fraction(float(a)) - b) for a, b in zip(y, exact(target, points[i]), strict=True))
            assert off <= Fraction(bound)
    return float(errors.max())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("sizes", [(4, 32, 32, 2), (2, 16, 1), (3, 8, 8, 8, 2), (6, 5, 3)])
def test_bounds_hold_and_are_not_loose(sizes, dtype):
    target = random_network(len(sizes), sizes)
    built = relu_network(target, eps=0.1, dtype=dtype)
    found = prove_relu(built.program, target)
    assert found.complete
    worst = compare(built.program, target, found.bound)
    assert found.bound <= 10 * worst
    assert found.bound <= 1.1 * built.bound.value


@pytest.mark.parametrize("seed", range(4))
def test_at_other_temperatures_and_boxes(seed):
    rng = np.random.default_rng(seed)
    target = random_network(seed, (3, 9, 7, 2), (-3.0, 0.5))
    beta = float(10 ** rng.uniform(-0.3, 4))
    built = relu_network(target, num_anchors=int(rng.integers(12, 60)), beta=beta)
    compare(built.program, target, prove_relu(built.program, target).bound, seed, 500)


def prove_or_refuse(program: Program, target: ReLUNetwork) -> NetworkProof | None:
    try:
        return prove_relu(program, target, time_budget=4)
    except ProgramError:
        return None


@pytest.mark.parametrize("mutate", PROGRAM_MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_programs_that_were_tampered_with(mutate):
    target = random_network(0, (3, 8, 8, 2))
    built = relu_network(target, eps=0.2)
    for seed in range(3):
        program = mutate(np.random.default_rng(seed), built.program)
        found = prove_or_refuse(program, target)
        if found is not None:
            compare(program, target, found.bound, seed, 300)


def test_layers_in_another_order():
    """Two hidden layers of one size, exchanged."""
    target = random_network(0, (8, 8, 8, 8))
    built = relu_network(target, eps=0.5)
    other = ReLUNetwork([target.weights[1], target.weights[0], target.weights[2]], target.biases, (-1, 1))
    honest, lie = prove_relu(built.program, target), prove_or_refuse(built.program, other)
    assert lie is None or lie.bound > 3 * honest.bound
    if lie is not None:
        compare(built.program, other, lie.bound, 0, 300)


def test_a_weight_that_differs_is_paid_for():
    target = random_network(0, (3, 8, 8, 2))
    built = relu_network(target, eps=0.1)
    read = built.program.layers[-1]
    values = read.weight.values.copy()
    values[0] *= 1.5
    changed = dataclasses.replace(read, weight=dataclasses.replace(read.weight, values=values))
    program = dataclasses.replace(built.program, layers=(*built.program.layers[:-1], changed))
    paid = prove_relu(program, target)
    assert paid.bound > prove_relu(built.program, target).bound
    compare(program, target, paid.bound)


def test_another_shape_is_refused():
    target = random_network(0, (3, 8, 2))
    built = relu_network(target, eps=0.2)
    with pytest.raises(ProgramError, match="stages"):
        prove_relu(built.program, random_network(0, (3, 8, 8, 2)))
    with pytest.raises(ProgramError, match="maps"):
        prove_relu(built.program, random_network(0, (4, 8, 2)))


def test_compile_brings_the_proof():
    target = random_network(0, (4, 16, 16, 2))
    claim = attnc.compile(target, eps=0.05).certificate
    assert claim.method == "staged proof"
    assert claim.bound <= 0.05
    assert [head.stage for head in claim.by_heads.heads] == ["relu0"] * 16 + ["relu1"] * 16
    assert [head.name for head in claim.by_heads.heads if head.leaves is not None] == ["s1_0", "s2_0"]
    assert claim.bound <= 20 * claim.observed
