"""Deep programs: proofs hold and are not loose, tampered programs and lying derivations gain nothing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call
from attnc.targets.parts.part import Combination, Derivation, HeadClaim, Multiply, Source, T, Unary
from proofs.comparisons import Comparisons, adversarial_points, worst_error
from proofs.mutations import PROGRAM_MUTATIONS, Liar, with_read_out_weight
from proofs.proving import prove_heads, proved_or_refused
from proofs.random_networks import MANY, OF_ONE, OF_TWO, random_composition

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


Ends = tuple[float, float]


@functools.cache
def composed(text: str, eps: float, dtype: str = "float64", *ends: Ends) -> tuple[ExpressionTarget, Built, Proof]:
    """The text on [−1, 1.5] in every variable, or between these ends; its program and proof."""
    names = sorted(Expression.parse(text).variables)
    target = attnc.as_target(text, dict(zip(names, ends or [(-1.0, 1.5)] * len(names), strict=True)))
    built = compose(target, eps=eps, dtype=dtype)
    assert built.derivation is not None
    return target, built, prove_heads(built.program, target, built.derivation)


def with_slope(slope: float) -> str:
    exact = Fraction(slope)
    return f"sin({exact.numerator}/{exact.denominator}*a + b)*b"


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
    # relu(−a) where a ≥ 0: all values of its head are 0, and it was not known for the one that writes the channel.
    ("sqrt(1.1 + (relu(-a) + 3*a + b)**2)", 1e-3, "float64", 1.5, (0.01, 2.0), (0.5, 1.5)),
    ("exp(relu(a - 5)*b + sin(b)*a)", 1e-3, "float64", 1.5, (0.01, 2.0), (0.5, 1.5)),
    # The product κ·w is exact for w = 2^k alone, not for its neighbours.
    *(
        (with_slope(slope), 1e-9, "float64", math.inf, (-1e-3, 1e-3), (-1.0, 1.0))
        for slope in (1024.0, math.nextafter(1024.0, 2000.0), math.nextafter(1024.0, 0.0), 3.0)
    ),
]


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: f"{case[0]}-{case[2]}")
def test_bounds_hold_and_are_not_loose(case):
    text, eps, dtype, most, *ends = case
    target, built, found = composed(text, eps, dtype, *ends)
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
        target, built, _ = composed(text, 1e-3)
        rng = np.random.default_rng(number)
        refused_or_true(made, mutate(rng, built.program), target, built.derivation, number)


@pytest.mark.parametrize(
    ("texts", "dtypes", "seeds", "least"),
    [
        *(([text], ["float64"], 25, 15) for text, _ in COMPOSED[:4]),
        pytest.param([text for text, _ in COMPOSED], ["float64", "float32"], 60, 500, marks=pytest.mark.slow),
    ],
)
def test_derivations_that_lie(texts, dtypes, seeds, least):
    """Also, in the slow test, with a program that was tampered with as well."""
    made, refused = Comparisons(), 0
    for (number, text), dtype, seed in itertools.product(enumerate(texts), dtypes, range(seeds)):
        target, built, _ = composed(text, 1e-3, dtype)
        rng, program = np.random.default_rng(1000 * number + seed), built.program
        lie = Liar(rng, built.derivation).lie()
        if len(texts) > 1 and seed % 3 == 0:
            program = PROGRAM_MUTATIONS[seed % len(PROGRAM_MUTATIONS)](rng, program)
        refused += refused_or_true(made, program, target, lie, seed)
    assert refused >= least


def test_one_lie_at_a_time():
    """The program is that of the derivation, and neither is of the target; or the claim about one head is wrong."""
    target, built, _ = composed("(sin(a)*b, cos(a*b))", 1e-3)
    heads, (first, second) = built.derivation.heads, built.derivation.outputs
    lies = [
        (attnc.as_target(text, target.box.as_dict()), built.derivation, "not known to compute")
        for text in (
            "(sin(a)*b, sin(a*b))",
            "(sin(a)*b, cos(a*b) + 0.0001)",
            "(cos(a*b), sin(a)*b)",
            "(sin(b)*a, cos(a*b))",
        )
    ]
    lies.append((target, Derivation((second, first), heads), "not known to compute"))
    lies.append((target, Derivation((first,), heads), "has 1 outputs"))
    lies.append((target, Derivation((first, Source(7)), heads), "reads input 7"))
    for channel, claim in heads.items():
        double = Combination(((claim.argument, Coefficient.of(2)),), Coefficient.of(0))
        for change, match in (
            # The head computes sin and is proved to; the state then is said to hold atan.
            ({"part": Unary(claim.argument, Call("atan", (T,)))}, "another function for its head|not in the state"),
            ({"part": Source(0)}, "another function for its head|not in the state"),
            ({"part": Multiply(claim.argument, claim.argument)}, "another function for its head|not in the state"),
            ({"tree": Call("atan", (T,))}, "another function"),
            ({"carrier": Source(0)}, "another function"),
            ({"argument": double}, "another function"),
        ):
            changed = {**heads, channel: dataclasses.replace(claim, **change)}
            lies.append((target, Derivation((first, second), changed), match))
    for given, lie, match in lies:
        with pytest.raises(ProgramError, match=match):
            prove_heads(built.program, given, lie)


def test_a_range_that_is_made_up():
    """A combination's `known` is the part from which its range is read."""
    target, built, _ = composed("sin(a + b)", 1e-3, "float64", (-1.0, 1.0), (-1.0, 1.0))
    ((channel, claim),) = built.derivation.heads.items()
    assert isinstance(claim.argument, Combination)
    tiny = Unary(claim.argument.terms[0][0], Call("sin", (Call("sin", (T,)),)))
    argument = dataclasses.replace(claim.argument, known=tiny)
    part = Unary(argument, claim.tree)
    with pytest.raises(ProgramError, match="is not known to be the combination"):
        prove_heads(built.program, target, Derivation((part,), {channel: HeadClaim(part, argument, claim.tree)}))


def test_coefficients_that_differ_are_an_error_not_a_refusal():
    """A derivation of the target whose program has another coefficient: the bound pays for it."""
    target, built, found = composed("sin(a*b) + c*exp(a)", 1e-4)
    program = with_read_out_weight(built.program, lambda weight: weight + 1e-3)
    paid = prove_heads(program, target, built.derivation)
    assert found.bound < paid.bound <= 5 * worst_error(program, target, paid.bound, 500)


def test_programs_of_another_shape():
    target, built, _ = composed("sin(a*b) + c*exp(a)", 1e-4)
    other = attnc.as_target("sin(a*b)", {"a": (-1.0, 1.5), "b": (-1.0, 1.5)})
    with pytest.raises(ProgramError, match=r"maps \(\(3,\),\) to \(\), the target \(\(2,\),\) to \(\)"):
        prove_heads(built.program, other, built.derivation)
    with pytest.raises(ProgramError, match=r"not the output shape \(2,\)"):
        prove_heads(dataclasses.replace(built.program, output_shape=(2,)), target, built.derivation)


def test_an_enclosure_that_is_too_wide_gives_no_bound(monkeypatch):
    """That a² − ab + 0.3 > 0 on [0, 1]² takes small boxes to be seen: from one box its inverse has no range."""
    target, built, found = composed("b/(a*a - a*b + 0.3) + sin(a*b)", 1e-2, "float64", (0.0, 1.0), (0.0, 1.0))
    assert found.bound <= 1e-2
    monkeypatch.setattr("attnc.targets.parts.part_ranges.RANGE_HALVINGS", 0)
    assert prove_heads(built.program, target, built.derivation).bound == math.inf


def test_wider_boxes_cost_more():
    """The same program and derivation where the heads were not made for it."""
    target, built, found = composed("sin(a*b) + c*exp(a)", 1e-4)
    wide = attnc.as_target(target.text, {name: (-1.2, 1.6) for name in target.box.names})
    wider = prove_heads(built.program, wide, built.derivation)
    assert wider.bound > found.bound
    worst_error(built.program, wide, wider.bound, 800)


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


Case = tuple[ExpressionTarget, Built]


def case_of(text: str, box: dict[str, Ends], eps: float, dtype: str = "float64") -> Case | None:
    """The target and its program; None if it is refused."""
    try:
        target = attnc.as_target(text, box)
        return target, compose(target, eps=eps, dtype=dtype)
    except (BoundNotMet, DomainError, RuntimeWarning):  # the last: weights beyond float32
        return None


def random_case(seed: int) -> Case | None:
    """5 to 15 operations, 2 to 10 variables, each of them once, in both dtypes."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 11))
    text = random_composition(rng, int(rng.integers(5, 16)), MANY[:d])
    dtype = "float32" if seed % 3 == 0 else "float64"
    eps = 10.0 ** -int(rng.integers(2, 4) if dtype == "float32" else rng.integers(2, 6))
    return case_of(text, {name: (-1.0, float(rng.choice([1.0, 0.7]))) for name in MANY[:d]}, eps, dtype)


def correlated_case(seed: int) -> Case | None:
    """5 to 15 operations, 2 to 10 variables, any number of times each."""
    rng, used = np.random.default_rng(20_000 + seed), list[str]()
    while len(used) < 2:
        d = int(rng.integers(2, 11))
        text = random_expression(rng, int(rng.integers(max(5, d - 1), 16)), MANY[:d])
        used = sorted(Expression.parse(text).variables)
    eps = 10.0 ** -int(rng.integers(2, 6))
    return case_of(text, {name: (-1.0, float(rng.choice([1.0, 0.7, 2.0]))) for name in used}, eps)


@pytest.mark.parametrize("seed", [14, 23, 30, 34, 37])
def test_random_compositions(seed):
    case = random_case(seed)
    assert case is not None
    target, built = case
    found = prove_heads(built.program, target, built.derivation, seconds=10.0)
    worst_error(built.program, target, found.bound, 500, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "seeds", "count", "median", "most"),
    [(random_case, 30, 2500, 5.0, math.inf), (correlated_case, 60, 8000, 2.5, 5.0)],
)
def test_many_random_compositions(capsys, make, seeds, count, median, most):
    """Bounds hold and are close; those of each program hold also where it was tampered with."""
    made, ratios, refused = Comparisons(), [], 0
    for seed, case in enumerate(map(make, range(seeds))):
        if case is None:
            continue
        target, built = case
        found = proved_or_refused(built.program, target, built.derivation, seconds=60.0)  # enough on a busy machine
        if found is None:
            assert make is correlated_case  # (1 + x)**(c − c) is not known to be 1
            continue
        worst = made.check(built.program, target, found.bound, adversarial_points(built.program, target, count, seed))
        is_exact = make is correlated_case and worst <= 64 * np.finfo(float).eps  # but for rounding
        if built.program.dtype == np.float64 and not is_exact:
            ratios.append(found.bound / worst)
        rng = np.random.default_rng(seed)
        for mutate in rng.permutation(np.array(PROGRAM_MUTATIONS, dtype=object))[:2]:
            refused += refused_or_true(made, mutate(rng, built.program), target, built.derivation, seed)
    with capsys.disabled():
        print(f"\n{made}; {refused} refused; bound/error {np.median(ratios):.2f}, at most {max(ratios):.1f}")
    assert np.median(ratios) <= median
    assert max(ratios) <= most
    assert made.count >= 200_000


@pytest.mark.parametrize("text", ["tanh(5*x + y)", "sigmoid(3*x - 4*y)"])
def test_what_leaves_do_not_prove_closely_heads_do(text):
    """An exact gate of two variables: leaves in two variables stop at a part of eps, one head is proved to rounding."""
    claim = attnc.compile(text, [(-1, 1)] * 2, eps=1e-5).certificate
    assert claim.method == "staged proof"
    assert claim.observed <= claim.bound < 1e-13
