"""Deep programs to destruction: a million comparisons over engines, and how close composed bounds are."""

from __future__ import annotations

import time

import numpy as np
import pytest

import attnc
from attnc import constructions
from attnc.constructions import compose
from attnc.errors import BoundNotMet, DomainError, ProgramError
from attnc.ir.program import Program
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from proofs.comparisons import ENGINES, Comparisons, adversarial_points, engines_of
from proofs.proving import prove_heads
from proofs.random_networks import MANY, OF_ONE, OF_TWO
from proofs.test_enclosure_prover import prove_deep, random_deep

POINTS = 18_000
SMOOTH = (*(text for text in OF_ONE if "40" not in text), "sqrt(1 + ({})**2)", "1/(1.5 + ({})**2)", "exp(-({})**2)")
JOINS = (*OF_TWO, "({})*({})", "({})*({})", "({})/(1.5 + ({})**2)", "sqrt(1 + ({})**2 + ({})**2)")


def random_expression(rng: np.random.Generator, num_operations: int, names: tuple[str, ...]) -> str:
    """A random tree; variables occur as often as it has leaves for them, so that errors are correlated."""
    if num_operations == 0:
        return str(rng.choice(names))
    if rng.random() < 0.4:
        return str(rng.choice(SMOOTH)).format(random_expression(rng, num_operations - 1, names))
    left = int(rng.integers(num_operations))
    parts = [random_expression(rng, n, names) for n in (left, num_operations - 1 - left)]
    return str(rng.choice(JOINS)).format(*parts)


def random_target(seed: int) -> tuple[ExpressionTarget, float]:
    """5 to 15 operations, 2 to 10 variables, eps from 1e-2 to 1e-5."""
    rng = np.random.default_rng(20_000 + seed)
    while True:
        d = int(rng.integers(2, 11))
        text = random_expression(rng, int(rng.integers(max(5, d - 1), 16)), MANY[:d])
        used = sorted(Expression.parse(text).variables)
        if len(used) >= 2:
            break
    eps = 10.0 ** -int(rng.integers(2, 6))
    return attnc.as_target(text, {name: (-1.0, float(rng.choice([1.0, 0.7, 2.0]))) for name in used}), eps


@pytest.mark.slow
def test_composed_bounds_are_close(capsys):
    """Over 60 random expressions, whose observed error is followed uphill in all variables."""
    ratios, seconds, refused, made = [], [], 0, Comparisons()
    for seed in range(60):
        try:
            target, eps = random_target(seed)
            built = compose(target, eps=eps)
        except (BoundNotMet, DomainError):
            refused += 1
            continue
        began = time.monotonic()
        try:
            found = prove_heads(built.program, target, built.derivation, seconds=60)  # enough on a busy machine
        except ProgramError:  # (1 + x)**(c − c) is not known to be 1
            refused += 1
            continue
        seconds.append(time.monotonic() - began)
        worst = made.check(built.program, target, found.bound, adversarial_points(built.program, target, 8000, seed))
        if worst > 64 * np.finfo(float).eps:  # otherwise the program is exact, but for rounding
            ratios.append(found.bound / worst)
    with capsys.disabled():
        print(
            f"\n{len(ratios)} compositions, {refused} refused: bound/observed {np.median(ratios):.2f}, at most "
            f"{max(ratios):.1f}; at most {max(seconds):.1f} s each; {made}"
        )
    assert np.median(ratios) <= 2.5
    assert max(ratios) <= 5


COMPOSED = (
    "sin(a*b) + c*exp(a)",
    "max(a*b, sin(c))*c - 0.3*a",
    "(a*cos(b), sin(a*b) + b)",
    "clip(a*b, -0.3, 0.5) + abs(b - c)/(2 + a)",
    "(1.2 + sin(a))**b",
    "exp(a)*cos(b)*tanh(c)*(d + f)/(2.5 + g)",
    "log(1.5 + min(a*b, c) + max(a, b)/2)",
    "sqrt(1 + (a*b)**2)*tanh(c - a)",
)
SELECTED = (("sin(x) + cos(y)", 0.6), ("x*y", 0.3), ("max(x, y) - x*x", 0.5))


@pytest.mark.slow
def test_a_million_comparisons(capsys):
    """Composed, selecting and random deep programs, float64 in every engine, float32 in numpy's."""
    made = Comparisons()
    for dtype in ("float64", "float32"):
        for number, text in enumerate(COMPOSED):
            box = {name: (-0.9, 1.0) for name in sorted(Expression.parse(text).variables)}
            target = attnc.as_target(text, box)
            built = compose(target, eps=1e-3, dtype=dtype)
            bound = prove_heads(built.program, target, built.derivation, seconds=10).bound
            check_everywhere(made, built.program, target, bound, number)
        for number, (text, eps) in enumerate(SELECTED):
            target = attnc.as_target(text, {"x": (-1.0, 1.5), "y": (-2.0, 1.0)})
            for name in ("two_layer", "attention_softmax"):
                built = getattr(constructions, name)(target, eps=eps, dtype=dtype)
                bound = prove_deep(built.program, target, observed=eps / 1.5, eps=eps, seconds=20).bound
                check_everywhere(made, built.program, target, bound, number)
    for seed in range(12):
        program, target = random_deep(np.random.default_rng(1000 + seed))
        bound = prove_deep(program, target, seconds=2).bound
        check_everywhere(made, program, target, bound, seed)
    with capsys.disabled():
        print(f"\n{made}")
    assert made.count >= 1_000_000


def check_everywhere(made: Comparisons, program: Program, target: ExpressionTarget, bound: float, seed: int) -> None:
    """In float64 by every engine, by the reference at fewer points, as it is slow; in float32 by numpy's."""
    points = adversarial_points(program, target, POINTS, seed)
    is_double = program.dtype == np.float64
    made.check(program, target, bound, points, engines_of(program, [*ENGINES][1:] if is_double else ["numpy"]))
    if is_double:
        made.check(program, target, bound, points[-1000:], {"reference": program})
