"""Deep programs: proofs hold and are not loose, tampered programs and lying derivations gain nothing."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc.constructions import Built, compose
from attnc.errors import BoundNotMet, DomainError, ProgramError
from attnc.ir.program import Program
from attnc.proofs.proof import Proof
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.coefficient import Coefficient
from attnc.targets.expressions.tree import Call
from attnc.targets.parts.part import Combination, Derivation, HeadClaim, Multiply, Source, T, Unary
from proofs.comparisons import Comparisons, adversarial_points, worst_error
from proofs.mutations import PROGRAM_MUTATIONS, Liar, with_read_out_weight
from proofs.proving import prove_heads, proved_or_refused
from proofs.random_networks import MANY, random_composition

COMPOSED = [
    ("sin(a*b) + c*exp(a)", 1e-4),
    ("max(a*b, sin(c))*c - 0.3*a", 1e-4),
    ("(a*cos(b), sin(a*b) + b, a - b)", 1e-5),
    ("sin(40*a)*b + cos(300*c)", 1e-3),  # doubles angles
    ("(1.2 + sin(a))**b", 1e-4),
    ("clip(a*b, -0.3, 0.5) + abs(b - c)/(2 + a)", 1e-4),
    ("sqrt(abs(a - b)) + relu(a*b - c)**2", 1e-3),
    ("exp(a)*cos(b)*tanh(c)*sigmoid(d)*(f + g)/(2 + h)", 1e-4),
]


@functools.cache
def composed(text: str, eps: float, dtype: str) -> tuple[ExpressionTarget, Built, Proof]:
    names = sorted(attnc.targets.expressions.expression.Expression.parse(text).variables)
    target = attnc.as_target(text, {name: (-1.0, 1.5) for name in names})
    built = compose(target, eps=eps, dtype=dtype)
    assert built.derivation is not None
    return target, built, prove_heads(built.program, target, built.derivation)


CLOSE = [
    *((text, eps, "float64", 5.0) for text, eps in COMPOSED),
    *((text, max(eps, 1e-3), "float32", math.inf) for text, eps in COMPOSED),
    # tanh is steepest where a·b is 0: there b is small, or a in the middle, where the head of the product is exact.
    ("tanh(5*a*b)", 1e-3, "float64", 2.5),
    ("tanh(5*tanh(5*tanh(5*a*b) + b) + a)", 1e-2, "float64", 6.0),
    ("sigmoid(20*a*b)*b", 1e-3, "float64", 3.0),
    # A gate of two keys, exact but for rounding, which is found on small cells. Its leaves are as wide as the range.
    ("max(a, b)*c + 0.5*b", 1e-3, "float32", 5.0),
    # An error of 1e-8 of a head, times 1e-43, is less than the numbers of float32 are apart there.
    ("1e-43*a*b + 1e-42*sin(a)", 3e-44, "float32", math.inf),
    ("1e-40*relu(a - b)", 3e-44, "float32", math.inf),
]


@pytest.mark.parametrize(("text", "eps", "dtype", "most"), CLOSE)
def test_bounds_hold_and_are_not_loose(text, eps, dtype, most):
    target, built, found = composed(text, eps, dtype)
    assert found.complete
    assert math.fsum(term.value for term in found.terms) == pytest.approx(found.bound)
    worst = worst_error(built.program, target, found.bound, 1500 if math.isinf(most) else 3000)
    assert worst > 1e-45
    assert found.bound <= most * worst
    assert found.bound <= eps or dtype == "float32"


def refused_or_true(
    made: Comparisons, program: Program, target: ExpressionTarget, derivation: Derivation, seed: int
) -> bool:
    """Whether it was refused; if it was not, its bound holds."""
    found = proved_or_refused(program, target, derivation, seconds=3.0)
    if found is not None:
        made.check(program, target, found.bound, adversarial_points(program, target, 150, seed))
    return found is None


@pytest.mark.parametrize("mutate", PROGRAM_MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_programs_that_were_tampered_with(mutate):
    made = Comparisons()
    for number, (text, _) in enumerate(COMPOSED[:3]):
        target, built, _ = composed(text, 1e-3, "float64")
        rng = np.random.default_rng(number)
        refused_or_true(made, mutate(rng, built.program), target, built.derivation, number)


@pytest.mark.parametrize(("text", "eps"), COMPOSED[:4])
def test_derivations_that_lie(text, eps):
    made, refused = Comparisons(), 0
    target, built, _ = composed(text, 1e-3, "float64")
    for seed in range(25):
        lie = Liar(np.random.default_rng(seed), built.derivation).lie()
        refused += refused_or_true(made, built.program, target, lie, seed)
    assert refused >= 15


# One lie at a time

TEXT = "(sin(a)*b, cos(a*b))"


def honest() -> tuple[ExpressionTarget, Built, Derivation]:
    target, built, _ = composed(TEXT, 1e-3, "float64")
    return target, built, built.derivation


def refuse(derivation: Derivation, match: str, target: ExpressionTarget | None = None) -> None:
    own, built, _ = honest()
    with pytest.raises(ProgramError, match=match):
        prove_heads(built.program, own if target is None else target, derivation)


def test_the_derivation_of_another_function():
    """The program is what the derivation says, and neither is what was asked for."""
    _, _, derivation = honest()
    for text in (
        "(sin(a)*b, sin(a*b))",
        "(sin(a)*b, cos(a*b) + 0.0001)",
        "(cos(a*b), sin(a)*b)",
        "(sin(b)*a, cos(a*b))",
    ):
        target = attnc.as_target(text, {"a": (-1.0, 1.5), "b": (-1.0, 1.5)})
        refuse(derivation, "not known to be one of", target)
    first, second = derivation.outputs
    refuse(dataclasses.replace(derivation, outputs=(second, first)), "not known to be one of")
    refuse(dataclasses.replace(derivation, outputs=(first,)), "has 1 outputs")


def test_claims_about_another_part_or_another_head():
    """The head computes sin and is proved to; the state then is said to hold atan. Or the head is said to."""
    _, _, derivation = honest()
    for channel, claim in derivation.heads.items():
        double = Combination(((claim.argument, Coefficient.of(2)),), Coefficient.of(0))
        for change in (
            {"part": Unary(claim.argument, Call("atan", (T,)))},
            {"part": Source(0)},
            {"part": Multiply(claim.argument, claim.argument)},
            {"tree": Call("atan", (T,))},
            {"carrier": Source(0)},
            {"argument": double},
        ):
            heads = {**derivation.heads, channel: dataclasses.replace(claim, **change)}
            match = "another function of its head|not in the state" if "part" in change else "another function"
            refuse(Derivation(derivation.outputs, heads), match)


def test_a_range_that_is_made_up_and_a_source_that_is_not_there():
    """`known` says of a combination what its range is read from."""
    target = attnc.as_target("sin(a + b)", {"a": (-1.0, 1.0), "b": (-1.0, 1.0)})
    built = compose(target, eps=1e-3)
    ((channel, claim),) = built.derivation.heads.items()
    assert isinstance(claim.argument, Combination)
    tiny = Unary(claim.argument.terms[0][0], Call("sin", (Call("sin", (T,)),)))
    argument = dataclasses.replace(claim.argument, known=tiny)
    part = Unary(argument, claim.tree)
    lie = Derivation((part,), {channel: HeadClaim(part, argument, claim.tree)})
    with pytest.raises(ProgramError, match="is not known to be the combination"):
        prove_heads(built.program, target, lie)
    with pytest.raises(ProgramError, match="reads input 7"):
        prove_heads(built.program, target, Derivation((Source(7),), built.derivation.heads))


def test_coefficients_that_differ_are_an_error_not_a_refusal():
    """A derivation of the target whose program has another coefficient: the bound pays for it."""
    target, built, found = composed("sin(a*b) + c*exp(a)", 1e-4, "float64")
    program = with_read_out_weight(built.program, lambda weight: weight + 1e-3)
    paid = prove_heads(program, target, built.derivation)
    assert found.bound < paid.bound <= 5 * worst_error(program, target, paid.bound, 500)


def test_programs_of_another_shape():
    target, built, _ = composed("sin(a*b) + c*exp(a)", 1e-4, "float64")
    other = attnc.as_target("sin(a*b)", {"a": (-1.0, 1.5), "b": (-1.0, 1.5)})
    for program, given in ((built.program, other), (dataclasses.replace(built.program, output_shape=(2,)), target)):
        with pytest.raises(ProgramError):
            prove_heads(program, given, built.derivation)


def test_an_enclosure_that_is_too_wide_gives_no_bound(monkeypatch):
    """That a² − ab + 0.3 > 0 on [0, 1]² takes small boxes to be seen: from one box its inverse has no range."""
    target = attnc.as_target("b/(a*a - a*b + 0.3) + sin(a*b)", {"a": (0.0, 1.0), "b": (0.0, 1.0)})
    built = compose(target, eps=1e-2)
    assert prove_heads(built.program, target, built.derivation).bound <= 1e-2
    monkeypatch.setattr("attnc.targets.parts.part_ranges.RANGE_HALVINGS", 0)
    assert prove_heads(built.program, target, built.derivation).bound == math.inf


def test_wider_boxes_cost_more():
    """The same program and derivation where the heads were not made for it."""
    target, built, found = composed("sin(a*b) + c*exp(a)", 1e-4, "float64")
    wide = attnc.as_target(target.text, {name: (-1.2, 1.6) for name in target.box.names})
    wider = prove_heads(built.program, wide, built.derivation)
    assert wider.bound > found.bound
    worst_error(built.program, wide, wider.bound, 800)


def test_slopes_that_are_nearly_powers_of_two():
    """The product κ·w is exact for w = 2^k alone, not for its neighbours."""
    for scale in (1024.0, math.nextafter(1024.0, 2000.0), math.nextafter(1024.0, 0.0), 3.0):
        exact = Fraction(scale)
        text = f"sin({exact.numerator}/{exact.denominator}*a + b)*b"
        target = attnc.as_target(text, {"a": (-1e-3, 1e-3), "b": (-1.0, 1.0)})
        built = compose(target, eps=1e-9)
        found = prove_heads(built.program, target, built.derivation)
        worst_error(built.program, target, found.bound, 300)


def random_case(seed: int) -> tuple[ExpressionTarget, Built] | None:
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 11))
    text = random_composition(rng, int(rng.integers(5, 16)), MANY[:d])
    dtype = "float32" if seed % 3 == 0 else "float64"
    eps = 10.0 ** -int(rng.integers(2, 4) if dtype == "float32" else rng.integers(2, 6))
    try:
        target = attnc.as_target(text, {name: (-1.0, float(rng.choice([1.0, 0.7]))) for name in MANY[:d]})
        return target, compose(target, eps=eps, dtype=dtype)
    except (BoundNotMet, DomainError, RuntimeWarning):  # the last: weights beyond float32
        return None


@pytest.mark.parametrize("seed", [14, 23, 30, 34, 37])
def test_random_compositions(seed):
    case = random_case(seed)
    assert case is not None
    target, built = case
    found = prove_heads(built.program, target, built.derivation, seconds=10.0)
    worst_error(built.program, target, found.bound, 500, seed)


@pytest.mark.slow
def test_many_random_compositions(capsys):
    """5 to 15 operations in 2 to 10 variables, in both dtypes; each also tampered with."""
    made, ratios, refused = Comparisons(), [], 0
    for seed in range(30):
        case = random_case(seed)
        if case is None:
            continue
        target, built = case
        found = prove_heads(built.program, target, built.derivation, seconds=10.0)
        worst = made.check(built.program, target, found.bound, adversarial_points(built.program, target, 2500, seed))
        ratios += [found.bound / worst] if built.program.dtype == np.float64 else []
        rng = np.random.default_rng(seed)
        for mutate in rng.permutation(np.array(PROGRAM_MUTATIONS, dtype=object))[:2]:
            refused += refused_or_true(made, mutate(rng, built.program), target, built.derivation, seed)
    with capsys.disabled():
        print(f"\n{made}; {refused} refused; bound/error {np.median(ratios):.2f}, at most {max(ratios):.1f}")
    assert np.median(ratios) <= 5
    assert made.count >= 200_000


@pytest.mark.slow
def test_many_lies(capsys):
    made, refused = Comparisons(), 0
    for number, (text, _) in enumerate(COMPOSED):
        for dtype in ("float64", "float32"):
            target, built, _ = composed(text, 1e-3, dtype)
            for seed in range(60):
                rng = np.random.default_rng(1000 * number + seed)
                lie = Liar(rng, built.derivation).lie()
                program = built.program
                if seed % 3 == 0:
                    program = PROGRAM_MUTATIONS[seed % len(PROGRAM_MUTATIONS)](rng, program)
                refused += refused_or_true(made, program, target, lie, seed)
    with capsys.disabled():
        print(f"\n{made}; {refused} refused")
    assert refused >= 500


@pytest.mark.parametrize("text", ["tanh(5*x + y)", "sigmoid(3*x - 4*y)"])
def test_what_leaves_do_not_prove_closely_heads_do(text):
    """An exact gate of two variables: leaves in two variables stop at a part of eps, one head is proved to rounding."""
    claim = attnc.compile(text, [(-1, 1)] * 2, eps=1e-5).certificate
    assert claim.method == "staged proof"
    assert claim.observed <= claim.bound < 1e-13


@pytest.mark.parametrize("text", ["sqrt(1.1 + (relu(-a) + 3*a + b)**2)", "exp(relu(a - 5)*b + sin(b)*a)"])
def test_a_head_that_says_nothing_but_0(text):
    """relu(−a) where a ≥ 0: all values of its head are 0, and it was not known for the one that writes the channel."""
    target = attnc.as_target(text, {"a": (0.01, 2), "b": (0.5, 1.5)})
    built = compose(target, eps=1e-3)
    assert built.derivation is not None
    found = prove_heads(built.program, target, built.derivation)
    worst = worst_error(built.program, target, found.bound, 1500)
    assert found.bound <= min(1e-3, 1.5 * worst)
