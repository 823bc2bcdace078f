"""Truncated linear functions proved from stored weights: bounds hold at exact values, are close, and notice changes."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc import TruncatedLinear
from attnc.constructions import max_affine, truncated_linear, truncated_linear_heads
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.proofs.clip_prover import prove_clips
from attnc.targets.expressions.expression import Expression
from proofs.mutations import PROGRAM_MUTATIONS


def random_target(seed: int, n: int, d: int) -> TruncatedLinear:
    rng = np.random.default_rng(seed)
    a = float(rng.normal())
    W = rng.normal(size=(n, d)) if n > 1 else rng.normal(size=d)
    return TruncatedLinear(W, rng.normal(size=n), a, a + float(rng.uniform(0.5, 3)), (-1.7, 2.3))


def exact(target: TruncatedLinear, point: np.ndarray) -> list[Fraction]:
    rows = point.reshape(target.W.shape)
    found = []
    for w, x, t in zip(target.W, rows, target.t, strict=True):
        u = sum((Fraction(float(a)) * Fraction(float(b)) for a, b in zip(w, x, strict=True)), Fraction(float(t)))
        found.append(min(max(u, Fraction(target.a)), Fraction(target.b)))
    return found


def compare(program: Program, target: TruncatedLinear, bound: float, seed: int = 0, count: int = 4000) -> float:
    """At random points, and along a line through the box for every token; exactly where the error is largest."""
    rng = np.random.default_rng(seed)
    box, engine = target.box, NumpyEngine(program)
    points = box.lo + rng.random((count, box.d)) * box.widths
    steps = np.linspace(0, 1, count)[:, None]
    ends = np.where(target.W.ravel() > 0, box.lo, box.hi), np.where(target.W.ravel() > 0, box.hi, box.lo)
    points = np.concatenate([points, ends[0] + steps * (ends[1] - ends[0])])
    shaped = points.reshape(len(points), *target.input_shapes[0])
    errors = np.abs(engine(shaped).reshape(len(points), -1) - target(points)).max(axis=1)
    for i in np.argsort(-errors)[:4]:
        for engine_of in (engine, program):
            y = np.asarray(engine_of(shaped[i : i + 1]), np.float64).ravel()
            off = max(abs(Fraction(float(a)) - b) for a, b in zip(y, exact(target, points[i]), strict=True))
            assert off <= Fraction(bound)
    return float(errors.max())


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
def test_bounds_hold_and_are_close(build, n, d, eps, dtype):
    target = random_target(10 * n + d, n, d)
    built = build(target, eps=eps, dtype=dtype)
    found = prove_clips(built.program, target)
    assert found.complete
    assert found.bound <= 1.03 * compare(built.program, target, found.bound)
    assert found.bound <= min(eps, 1.005 * built.bound.value)


@pytest.mark.parametrize("seed", range(6))
def test_at_other_temperatures(seed):
    rng = np.random.default_rng(seed)
    target = random_target(seed, int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    built = truncated_linear(target, num_anchors=int(rng.integers(4, 60)), beta=float(10 ** rng.uniform(-0.5, 4)))
    found = prove_clips(built.program, target)
    assert found.bound <= 1.5 * compare(built.program, target, found.bound)


@pytest.mark.parametrize("mutate", PROGRAM_MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("build", [truncated_linear, truncated_linear_heads])
def test_programs_that_were_tampered_with(build, mutate):
    target = random_target(0, 3, 2)
    built = build(target, eps=0.2)
    for seed in range(2 if build is truncated_linear else 1):
        program = mutate(np.random.default_rng(seed), built.program)
        try:
            found = prove_clips(program, target, time_budget=1)
        except ProgramError:
            continue
        compare(program, target, found.bound, seed, 500)


@pytest.mark.parametrize(
    "change", [{"t": 0.6}, {"a": -0.1}, {"b": 0.9}, {"W": [2.0, -1.1]}, {"W": [2.0, 1.0]}, {"W": [-1.0, 2.0]}]
)
def test_another_target_is_noticed(change):
    given = {"W": [2.0, -1.0], "t": 0.5, "a": 0.0, "b": 1.0, "box": (-1, 1)}
    built = truncated_linear(TruncatedLinear(**given), eps=0.01)
    other = TruncatedLinear(**given | change)
    try:
        found = prove_clips(built.program, other, time_budget=5)
    except ProgramError as error:
        assert "depend" in str(error)  # noqa: PT017
    else:
        assert found.bound > 5 * built.bound.value
        compare(built.program, other, found.bound)


def test_what_is_not_proved():
    target = random_target(0, 1, 2)
    with pytest.raises(ProgramError, match="do not depend on w·x \\+ t alone"):
        prove_clips(max_affine(target, eps=0.5).program, target)
    built = truncated_linear(target, num_anchors=4001)
    with pytest.raises(ProgramError, match="4,001 anchors would be too many"):
        prove_clips(built.program, target)
    with pytest.raises(ProgramError, match="maps"):
        prove_clips(built.program, random_target(0, 1, 3))
    long = TruncatedLinear(np.ones(2**14 + 1), 0.0, 0.0, 1.0)
    assert (long.text, long.definitions) == (None, None)
    with pytest.raises(ProgramError, match="too many to be stated"):
        prove_clips(truncated_linear(long, num_anchors=3).program, long)


def test_the_ledger_and_what_compile_keeps():
    net = attnc.compile(random_target(3, 1, 2), eps=1e-3)
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
    built = truncated_linear(target, eps=0.01)
    compare(built.program, target, prove_clips(built.program, target).bound)


@pytest.mark.parametrize("seed", range(4))
def test_the_expression_is_exactly_the_target(seed):
    target = random_target(seed, 1 + seed % 3, 2)
    expression = Expression.parse(target.text).with_variables(target.box.names)
    points = target.box.lo + np.random.default_rng(seed).random((50, target.box.d)) * target.box.widths
    values = np.array([[float(value) for value in exact(target, point)] for point in points])
    np.testing.assert_allclose(expression(points), values, rtol=1e-14, atol=1e-15)


def test_definitions_where_the_expression_would_be_long():
    target = random_target(0, 24, 24)
    assert target.text is None
    assert target.definitions.startswith("z0 = ")
    assert dataclasses.asdict(target.box)["names"][0] == "x0_0"
    named = TruncatedLinear(np.ones(600) / 3, 0.0, 0.0, 1.0, {f"z{i}": (-1, 1) for i in range(600)})
    assert named.definitions.startswith("z_0 = ")
