"""Deep programs to destruction: a million comparisons over engines."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc import constructions
from attnc.constructions import compose
from attnc.ir.program import Program
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from proofs.comparisons import ENGINES, Comparisons, adversarial_points, engines_of
from proofs.proving import prove_heads
from proofs.staged.test_compositions import COMPOSED
from proofs.test_enclosure_prover import prove_deep, random_deep

POINTS = 18_000
MORE_COMPOSED = ("log(1.5 + min(a*b, c) + max(a, b)/2)", "sqrt(1 + (a*b)**2)*tanh(c - a)")
SELECTED = (("sin(x) + cos(y)", 0.6), ("x*y", 0.3), ("max(x, y) - x*x", 0.5))


@pytest.mark.slow
def test_a_million_comparisons(capsys):
    """Composed, selecting and random deep programs, float64 in every engine, float32 in numpy's."""
    made = Comparisons()
    for dtype in ("float64", "float32"):
        for number, text in enumerate((*(text for text, _ in COMPOSED), *MORE_COMPOSED)):
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
    """In every engine; in the reference, which is slow, at fewer points."""
    points = adversarial_points(program, target, POINTS, seed)
    is_double = program.dtype == np.float64
    made.check(program, target, bound, points, engines_of(program, [*ENGINES][1:] if is_double else ["numpy"]))
    if is_double:
        made.check(program, target, bound, points[-1000:], {"reference": program})
