"""ReLU networks and truncated linear functions proved from stored weights: bounds hold at exact values, are close, and
notice changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
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
from proofs.comparisons import errors_at, uphill
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


def affine(weights: np.ndarray, point: Iterable[Fraction], constant: float) -> Fraction:
    terms = (Fraction(weight) * x for weight, x in zip(weights.tolist(), point, strict=True))
    return sum(terms, Fraction(float(constant)))


def exact(target: Units, point: np.ndarray) -> list[Fraction]:
    state = [Fraction(x) for x in point.tolist()]
    if isinstance(target, TruncatedLinear):
        rows = np.array(state, dtype=object).reshape(target.W.shape)
        sums = [affine(w, x, t) for w, x, t in zip(target.W, rows, target.t, strict=True)]
        return [min(max(u, Fraction(target.a)), Fraction(target.b)) for u in sums]
    for W, b in zip(target.weights, target.biases, strict=True):
        sums = [affine(row, state, c) for row, c in zip(W, b, strict=True)]
        state = [max(u, Fraction(0)) for u in sums]
    return sums


def largest_error(program: Program, target: Units, bound: float, seed: int = 0, count: int = 4000) -> float:
    """The largest error at random points, at corners, on the line on which all sums grow, and uphill from all of these.

    Where it is largest, exact values are within the bound.
    """
    rng, box, engine = np.random.default_rng(seed), target.box, NumpyEngine(program)
    points = box.lo + rng.random((count, box.d)) * box.widths
    points[: count // 8] = np.where(rng.random((count // 8, box.d)) < 0.5, box.lo, box.hi)
    grows = target.W.ravel() > 0 if isinstance(target, TruncatedLinear) else np.ones(box.d, bool)
    line = np.where(grows, box.lo, box.hi) + np.linspace(0, 1, count)[:, None] * np.where(grows, 1, -1) * box.widths
    points = np.concatenate([points, np.clip(line, box.lo, box.hi)])
    points = np.concatenate([points, *(uphill(engine, target, points, seed + i) for i in range(4))])
    errors = errors_at(engine, target, points)
    for i in np.argsort(-errors)[:4]:
        for run in (engine, program):
            y = np.asarray(run(*target.split(points[[i]])), np.float64).ravel()
            off = max(abs(Fraction(a) - b) for a, b in zip(y.tolist(), exact(target, points[i]), strict=True))
            assert off <= Fraction(bound)
    return float(errors.max())


CLIPS = [random_clips(10 * n + d, n, d) for n, d in ((1, 1), (1, 2), (1, 3), (1, 7), (4, 2))]
CONSTANT_ROW = TruncatedLinear([[1.0, -2.0], [0.0, 0.0]], [0.1, 0.4], -1.0, 1.0, (-1, 1))
CLOSE = [  # target, construction, eps, dtype, and the largest shares of the error and of the theorem
    *(
        (random_network(len(sizes), sizes), relu_network, 0.1, dtype, 10, 1.1)
        for sizes in ((4, 32, 32, 2), (2, 16, 1), (3, 8, 8, 8, 2), (6, 5, 3))
        for dtype in ("float64", "float32")
    ),
    *((target, truncated_linear, 0.02, dtype, 1.03, 1.005) for target in CLIPS for dtype in ("float64", "float32")),
    *((target, truncated_linear_heads, 0.02, "float64", 1.03, 1.005) for target in CLIPS),
    *((target, truncated_linear_heads, 0.2, "float32", 1.03, 1.005) for target in CLIPS),
    (CONSTANT_ROW, truncated_linear, 0.01, "float64", 1.03, 1.005),
]


@pytest.mark.parametrize(("target", "build", "eps", "dtype", "of_error", "of_theorem"), CLOSE)
def test_bounds_hold_and_are_close(target, build, eps, dtype, of_error, of_theorem):
    built = build(target, eps=eps, dtype=dtype)
    found = prove(built.program, target)
    assert found.complete
    assert found.bound <= of_error * largest_error(built.program, target, found.bound)
    assert found.bound <= of_theorem * built.bound.value
    assert found.bound <= eps or build is relu_network


@pytest.mark.parametrize("seed", range(4))
def test_networks_at_other_temperatures_and_boxes(seed):
    rng = np.random.default_rng(seed)
    target = random_network(seed, (3, 9, 7, 2), (-3.0, 0.5))
    beta = float(10 ** rng.uniform(-0.3, 4))
    built = relu_network(target, num_anchors=int(rng.integers(12, 60)), beta=beta)
    largest_error(built.program, target, prove(built.program, target).bound, seed, 500)


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
            largest_error(program, target, found.bound, seed, 500)


def test_layers_in_another_order():
    """Two hidden layers of one size, exchanged."""
    target = random_network(0, (8, 8, 8, 8))
    built = relu_network(target, eps=0.5)
    other = ReLUNetwork([target.weights[1], target.weights[0], target.weights[2]], target.biases, (-1, 1))
    honest, lie = prove(built.program, target), proved_or_refused(built.program, other, seconds=4.0)
    assert lie is None or lie.bound > 3 * honest.bound
    if lie is not None:
        largest_error(built.program, other, lie.bound, 0, 300)


def test_a_weight_that_differs_is_paid_for():
    target = random_network(0, (3, 8, 8, 2))
    built = relu_network(target, eps=0.1)
    program = with_read_out_weight(built.program, lambda weight: 1.5 * weight)
    paid = prove(program, target)
    assert paid.bound > prove(built.program, target).bound
    largest_error(program, target, paid.bound)


def test_networks_compile_brings_the_proof():
    target = random_network(0, (4, 16, 16, 2))
    claim = attnc.compile(target, eps=0.05).certificate
    assert claim.method == "staged proof"
    assert claim.bound <= 0.05
    assert [head.stage for head in claim.by_heads.heads] == ["relu0"] * 16 + ["relu1"] * 16
    assert [head.name for head in claim.by_heads.heads if head.leaves is not None] == ["s1_0", "s2_0"]
    assert claim.bound <= 20 * claim.observed


@pytest.mark.parametrize("seed", range(6))
def test_clips_at_other_temperatures(seed):
    rng = np.random.default_rng(seed)
    target = random_clips(seed, int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    built = truncated_linear(target, num_anchors=int(rng.integers(4, 60)), beta=float(10 ** rng.uniform(-0.5, 4)))
    found = prove(built.program, target)
    assert found.bound <= 1.5 * largest_error(built.program, target, found.bound)


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
        largest_error(built.program, other, found.bound)


ONE_CLIP, TOO_LONG = random_clips(0, 1, 2), TruncatedLinear(np.ones(2**14 + 1), 0.0, 0.0, 1.0)
SMALL = random_network(0, (3, 8, 2))
REFUSED = [  # the program: target, construction and its options; the target of the proof; the reason
    (SMALL, relu_network, {"eps": 0.2}, random_network(0, (3, 8, 8, 2)), "stages"),
    (SMALL, relu_network, {"eps": 0.2}, random_network(0, (4, 8, 2)), "maps"),
    (ONE_CLIP, max_affine, {"eps": 0.5}, ONE_CLIP, "do not depend on the claimed combination of its inputs alone"),
    (ONE_CLIP, truncated_linear, {"num_anchors": 4001}, ONE_CLIP, "4,001 anchors would be too many"),
    (ONE_CLIP, truncated_linear, {"num_anchors": 4001}, random_clips(0, 1, 3), "maps"),
    (TOO_LONG, truncated_linear, {"num_anchors": 3}, TOO_LONG, "too many to be stated"),
]


@pytest.mark.parametrize(("made_for", "build", "options", "target", "match"), REFUSED)
def test_what_is_not_proved(made_for, build, options, target, match):
    program = build(made_for, **options).program
    with pytest.raises(ProgramError, match=match):
        prove_heads(program, target)


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


@pytest.mark.parametrize("seed", range(4))
def test_the_expression_is_exactly_the_target(seed):
    target = random_clips(seed, 1 + seed % 3, 2)
    expression = Expression.parse(target.text).with_variables(target.box.names)
    points = target.box.lo + np.random.default_rng(seed).random((50, target.box.d)) * target.box.widths
    values = np.array([[float(value) for value in exact(target, point)] for point in points])
    np.testing.assert_allclose(expression(points), values, rtol=1e-14, atol=1e-15)


def test_definitions_where_the_expression_would_be_long():
    target = random_clips(0, 24, 24)
    assert (target.text, target.definitions[:5]) == (None, "z0 = ")
    assert (TOO_LONG.text, TOO_LONG.definitions) == (None, None)
    assert dataclasses.asdict(target.box)["names"][0] == "x0_0"
    named = TruncatedLinear(np.ones(600) / 3, 0.0, 0.0, 1.0, {f"z{i}": (-1, 1) for i in range(600)})
    assert named.definitions.startswith("z_0 = ")
