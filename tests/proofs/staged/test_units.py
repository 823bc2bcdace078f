"""ReLU networks and truncated linear functions proved from stored weights: bounds hold at exact values, are close, and
notice changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc import ReLUNetwork, TruncatedLinear
from attnc.constructions import max_affine, relu_network, truncated_linear, truncated_linear_heads
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.proofs.proof import Proof
from attnc.proofs.prover import ProofRequest
from attnc.proofs.staged.prover import StagedProver
from attnc.targets.expressions.expression import Expression
from proofs.mutations import PROGRAM_MUTATIONS, with_read_out_weight
from proofs.proving import prove_heads, proved_or_refused

Units = ReLUNetwork | TruncatedLinear


def prove(program: Program, target: Units) -> Proof:
    assert StagedProver().accepts(program, target, ProofRequest())
    return prove_heads(program, target)


def random_network(seed: int, sizes: tuple[int, ...], box: tuple[float, float] = (-1, 1)) -> ReLUNetwork:
    rng = np.random.default_rng(seed)
    pairs = list(itertools.pairwise(sizes))
    weights = [rng.normal(size=(o, i)) / np.sqrt(i) for i, o in pairs]
    return ReLUNetwork(weights, [rng.normal(size=o) * 0.3 for _, o in pairs], box)


def random_clips(seed: int, n: int, d: int) -> TruncatedLinear:
    rng = np.random.default_rng(seed)
    a = float(rng.normal())
    W = rng.normal(size=(n, d)) if n > 1 else rng.normal(size=d)
    return TruncatedLinear(W, rng.normal(size=n), a, a + float(rng.uniform(0.5, 3)), (-1.7, 2.3))


def exact_network(target: ReLUNetwork, point: np.ndarray) -> list[Fraction]:
    state = [Fraction(float(x)) for x in point]
    last = len(target.weights) - 1
    for number, (W, b) in enumerate(zip(target.weights, target.biases, strict=True)):
        state = [
            sum((Fraction(float(w)) * x for w, x in zip(row, state, strict=True)), Fraction(float(c)))
            for row, c in zip(W, b, strict=True)
        ]
        state = state if number == last else [max(x, Fraction(0)) for x in state]
    return state


def exact_clips(target: TruncatedLinear, point: np.ndarray) -> list[Fraction]:
    rows = point.reshape(target.W.shape)
    found = []
    for w, x, t in zip(target.W, rows, target.t, strict=True):
        u = sum((Fraction(float(a)) * Fraction(float(b)) for a, b in zip(w, x, strict=True)), Fraction(float(t)))
        found.append(min(max(u, Fraction(target.a)), Fraction(target.b)))
    return found


def largest_error(
    program: Program, target: Units, bound: float, exact: Callable[..., list[Fraction]], points: np.ndarray
) -> float:
    """The largest error at these points; where it is largest, exact values are within the bound."""
    engine, shape = NumpyEngine(program), target.input_shapes[0]
    errors = np.abs(engine(points.reshape(-1, *shape)).reshape(len(points), -1) - target(points)).max(axis=1)
    for i in np.argsort(-errors)[:4]:
        for engine_of in (engine, program):
            y = np.asarray(engine_of(points[i].reshape(1, *shape)), np.float64).ravel()
            off = max(abs(Fraction(float(a)) - b) for a, b in zip(y, exact(target, points[i]), strict=True))
            assert off <= Fraction(bound)
    return float(errors.max())


def compare_network(program: Program, target: ReLUNetwork, bound: float, seed: int = 0, count: int = 2000) -> float:
    """At random, at corners and uphill."""
    rng = np.random.default_rng(seed)
    box, engine = target.box, NumpyEngine(program)
    points = box.lo + rng.random((count, box.d)) * box.widths
    points[: count // 8] = np.where(rng.random((count // 8, box.d)) < 0.5, box.lo, box.hi)
    step = 0.1
    for _ in range(10):
        errors = np.abs(engine(points).reshape(len(points), -1) - target(points)).max(axis=1)
        best = points[np.argsort(-errors)[:16]]
        moved = best[:, None] + rng.normal(size=(16, 32, box.d)) * step * box.widths
        points, step = np.concatenate([best, np.clip(moved, box.lo, box.hi).reshape(-1, box.d)]), step / 2
    return largest_error(program, target, bound, exact_network, points)


def compare_clips(program: Program, target: TruncatedLinear, bound: float, seed: int = 0, count: int = 4000) -> float:
    """At random points, and along a line through the box for every token."""
    rng, box = np.random.default_rng(seed), target.box
    points = box.lo + rng.random((count, box.d)) * box.widths
    steps = np.linspace(0, 1, count)[:, None]
    ends = np.where(target.W.ravel() > 0, box.lo, box.hi), np.where(target.W.ravel() > 0, box.hi, box.lo)
    points = np.concatenate([points, ends[0] + steps * (ends[1] - ends[0])])
    return largest_error(program, target, bound, exact_clips, points)


# ReLU networks


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("sizes", [(4, 32, 32, 2), (2, 16, 1), (3, 8, 8, 8, 2), (6, 5, 3)])
def test_networks_bounds_hold_and_are_not_loose(sizes, dtype):
    target = random_network(len(sizes), sizes)
    built = relu_network(target, eps=0.1, dtype=dtype)
    found = prove(built.program, target)
    assert found.complete
    worst = compare_network(built.program, target, found.bound)
    assert found.bound <= 10 * worst
    assert found.bound <= 1.1 * built.bound.value


@pytest.mark.parametrize("seed", range(4))
def test_networks_at_other_temperatures_and_boxes(seed):
    rng = np.random.default_rng(seed)
    target = random_network(seed, (3, 9, 7, 2), (-3.0, 0.5))
    beta = float(10 ** rng.uniform(-0.3, 4))
    built = relu_network(target, num_anchors=int(rng.integers(12, 60)), beta=beta)
    compare_network(built.program, target, prove(built.program, target).bound, seed, 500)


TAMPERED = {  # target, construction, seeds, seconds for each
    "network": (random_network(0, (3, 8, 8, 2)), relu_network, 3, 4.0),
    "clips": (random_clips(0, 3, 2), truncated_linear, 2, 1.0),
    "clips by several heads": (random_clips(0, 3, 2), truncated_linear_heads, 1, 1.0),
}


@pytest.mark.parametrize("mutate", PROGRAM_MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("name", TAMPERED)
def test_programs_that_were_tampered_with(name, mutate):
    target, build, seeds, seconds = TAMPERED[name]
    built = build(target, eps=0.2)
    for seed in range(seeds):
        program = mutate(np.random.default_rng(seed), built.program)
        found = proved_or_refused(program, target, seconds=seconds)
        if found is not None:
            compare = compare_network if name == "network" else compare_clips
            compare(program, target, found.bound, seed, 400)


def test_layers_in_another_order():
    """Two hidden layers of one size, exchanged."""
    target = random_network(0, (8, 8, 8, 8))
    built = relu_network(target, eps=0.5)
    other = ReLUNetwork([target.weights[1], target.weights[0], target.weights[2]], target.biases, (-1, 1))
    honest, lie = prove(built.program, target), proved_or_refused(built.program, other, seconds=4.0)
    assert lie is None or lie.bound > 3 * honest.bound
    if lie is not None:
        compare_network(built.program, other, lie.bound, 0, 300)


def test_a_weight_that_differs_is_paid_for():
    target = random_network(0, (3, 8, 8, 2))
    built = relu_network(target, eps=0.1)
    program = with_read_out_weight(built.program, lambda weight: 1.5 * weight)
    paid = prove(program, target)
    assert paid.bound > prove(built.program, target).bound
    compare_network(program, target, paid.bound)


@pytest.mark.parametrize(("sizes", "match"), [((3, 8, 8, 2), "stages"), ((4, 8, 2), "maps")])
def test_networks_another_shape_is_refused(sizes, match):
    built = relu_network(random_network(0, (3, 8, 2)), eps=0.2)
    with pytest.raises(ProgramError, match=match):
        prove_heads(built.program, random_network(0, sizes))


def test_networks_compile_brings_the_proof():
    target = random_network(0, (4, 16, 16, 2))
    claim = attnc.compile(target, eps=0.05).certificate
    assert claim.method == "staged proof"
    assert claim.bound <= 0.05
    assert [head.stage for head in claim.by_heads.heads] == ["relu0"] * 16 + ["relu1"] * 16
    assert [head.name for head in claim.by_heads.heads if head.leaves is not None] == ["s1_0", "s2_0"]
    assert claim.bound <= 20 * claim.observed


# Truncated linear functions


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 2), (1, 3), (1, 7), (4, 2)])
@pytest.mark.parametrize(
    ("build", "eps", "dtype"),
    [
        (truncated_linear, 0.02, "float64"),
        (truncated_linear, 0.02, "float32"),
        (truncated_linear_heads, 0.02, "float64"),
        (truncated_linear_heads, 0.2, "float32"),
    ],
)
def test_clips_bounds_hold_and_are_close(build, n, d, eps, dtype):
    target = random_clips(10 * n + d, n, d)
    built = build(target, eps=eps, dtype=dtype)
    found = prove(built.program, target)
    assert found.complete
    assert found.bound <= 1.03 * compare_clips(built.program, target, found.bound)
    assert found.bound <= min(eps, 1.005 * built.bound.value)


@pytest.mark.parametrize("seed", range(6))
def test_clips_at_other_temperatures(seed):
    rng = np.random.default_rng(seed)
    target = random_clips(seed, int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    built = truncated_linear(target, num_anchors=int(rng.integers(4, 60)), beta=float(10 ** rng.uniform(-0.5, 4)))
    found = prove(built.program, target)
    assert found.bound <= 1.5 * compare_clips(built.program, target, found.bound)


@pytest.mark.parametrize(
    "change", [{"t": 0.6}, {"a": -0.1}, {"b": 0.9}, {"W": [2.0, -1.1]}, {"W": [2.0, 1.0]}, {"W": [-1.0, 2.0]}]
)
def test_clips_another_target_is_noticed(change):
    given = {"W": [2.0, -1.0], "t": 0.5, "a": 0.0, "b": 1.0, "box": (-1, 1)}
    built = truncated_linear(TruncatedLinear(**given), eps=0.01)
    other = TruncatedLinear(**given | change)
    try:
        found = prove_heads(built.program, other, seconds=5.0)
    except ProgramError as error:
        assert "depend" in str(error)  # noqa: PT017
    else:
        assert found.bound > 5 * built.bound.value
        compare_clips(built.program, other, found.bound)


def test_clips_what_is_not_proved():
    target = random_clips(0, 1, 2)
    with pytest.raises(ProgramError, match="do not depend on the claimed combination of its inputs alone"):
        prove_heads(max_affine(target, eps=0.5).program, target)
    built = truncated_linear(target, num_anchors=4001)
    with pytest.raises(ProgramError, match="4,001 anchors would be too many"):
        prove_heads(built.program, target)
    with pytest.raises(ProgramError, match="maps"):
        prove_heads(built.program, random_clips(0, 1, 3))
    long = TruncatedLinear(np.ones(2**14 + 1), 0.0, 0.0, 1.0)
    assert (long.text, long.definitions) == (None, None)
    with pytest.raises(ProgramError, match="too many to be stated"):
        prove_heads(truncated_linear(long, num_anchors=3).program, long)


def test_the_ledger_and_what_compile_keeps():
    net = attnc.compile(random_clips(3, 1, 2), eps=1e-3)
    claim = net.certificate
    assert claim.method == "staged proof"
    assert claim.complete
    assert claim.observed <= claim.bound <= 1.01 * claim.observed
    assert [term.name for term in claim.terms] == ["approximation", "rounding"]
    assert sum(term.value for term in claim.terms) == pytest.approx(claim.bound, rel=1e-5)
    target = TruncatedLinear([1.0, 2.0], 0.0, 0.0, 1.0, (-1, 1))
    assert attnc.compile(target, eps=1e-5).certificate.method == "theorem"  # of 6,200 anchors


def test_a_constant_row():
    target = TruncatedLinear([[1.0, -2.0], [0.0, 0.0]], [0.1, 0.4], -1.0, 1.0, (-1, 1))
    program = truncated_linear(target, eps=0.01).program
    compare_clips(program, target, prove(program, target).bound)


@pytest.mark.parametrize("seed", range(4))
def test_the_expression_is_exactly_the_target(seed):
    target = random_clips(seed, 1 + seed % 3, 2)
    expression = Expression.parse(target.text).with_variables(target.box.names)
    points = target.box.lo + np.random.default_rng(seed).random((50, target.box.d)) * target.box.widths
    values = np.array([[float(value) for value in exact_clips(target, point)] for point in points])
    np.testing.assert_allclose(expression(points), values, rtol=1e-14, atol=1e-15)


def test_definitions_where_the_expression_would_be_long():
    target = random_clips(0, 24, 24)
    assert target.text is None
    assert target.definitions.startswith("z0 = ")
    assert dataclasses.asdict(target.box)["names"][0] == "x0_0"
    named = TruncatedLinear(np.ones(600) / 3, 0.0, 0.0, 1.0, {f"z{i}": (-1, 1) for i in range(600)})
    assert named.definitions.startswith("z_0 = ")
