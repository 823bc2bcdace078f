"""Compositions take any expression, are linear in its length, and state errors that cover the observed ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import compose
from attnc.constructions.beyond.compose import (
    CLOSE_SHARE,
    EVEN_KEYS,
    MANY_ANCHORS,
    HeadsOf,
    _ledger,
    function_of_one,
    sample_interval,
)
from attnc.constructions.construction import Request
from attnc.errors import AttncError
from attnc.ir.layers import Affine
from attnc.targets.expressions.expression import Expression
from constructions.adversary import worst_error
from proofs.proving import prove_heads
from strategies.expressions import expressions

FACTORS = ["sin(a)", "exp(b)", "cos(c)", "tanh(d)", "1/(2+f)", "log(3+g)", "sqrt(4+h)", "atan(i)", "erf(j)", "k**2"]
CASES = [
    ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-9, 40),
    ("x*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-8, 8),
    ("exp(sin(x)*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, 60),
    ("abs(x-y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-9, 2),
    ("max(x, y, z)+min(x*y, z)", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}, 1e-6, 20),
    ("x**y", {"x": (0.5, 2), "y": (-1, 2)}, 1e-6, 60),
    ("x/y", {"x": (-1, 1), "y": (0.5, 3)}, 1e-6, 60),
    ("sin(100*x)*y", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, 300),
    ("(x+y+z)**9", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}, 1e-3, 60),
    ("clip(x*y, -0.5, 0.5)-log(1+exp(x+y))", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, 60),
    ("abs(sin(3*x))", {"x": (-2, 2)}, 1e-6, 30),
    ("(x*y, x+y, sin(x*y))", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, 40),
    ("tanh(x)*sigmoid(y)-relu(x)*silu(y)", {"x": (-4, 4), "y": (-4, 4)}, 1e-6, 60),
    ("tanh(3*x)+x/2", {"x": (-2, 2)}, 1e-8, 2),  # affine arguments and terms cost nothing
    ("sin(x)-2*tanh(4*x)+x", {"x": (-2, 2)}, 1e-8, 15),
    ("(1-x)*sigmoid(3*x+1)+cos(y)", {"x": (-2, 2), "y": (-1, 1)}, 1e-7, 14),
    ("gelu(2*x-1)+sin(y)", {"x": (-4, 4), "y": (-1, 1)}, 1e-8, 22),
    ("exp(-x**2-y**2)", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, 18),
    ("(x-5)*(x-5)+exp(3*y)", {"x": (1, 3), "y": (-1, 1)}, 1e-7, 15),
    ("(x-5)**2*sin(y)", {"x": (1, 3), "y": (-1, 1)}, 1e-6, 20),  # a square that carries cannot be carried
    ("sin(x)", {"x": (-1000, 1000)}, 1e-4, 499),  # the angle is doubled: 1,000 periods in one head would take 700
    ("*".join(FACTORS), {name: (-1, 1) for name in "abcdfghijk"}, 1e-6, 1000),
]


def ledger_of(built: attnc.constructions.Built) -> float:
    return float(dict(built.parameters)["composed error"])


@pytest.mark.parametrize(("text", "box", "eps", "most"), CASES, ids=[case[0] for case in CASES])
def test_eps_is_met_with_few_anchors(text: str, box: dict[str, tuple[float, float]], eps: float, most: int) -> None:
    target = attnc.as_target(text, box)
    built = compose(target, eps=eps)
    assert built.program.num_anchors <= most
    assert ledger_of(built) <= eps
    assert worst_error(built.program, target) <= ledger_of(built) + 1e-14


@pytest.mark.parametrize("d", [2, 8, 32])
def test_heads_are_linear_in_the_size_of_the_expression(d: int) -> None:
    names = [f"x{i}" for i in range(d)]
    text = " + ".join(f"sin({i + 1}*x{i}/{d})*x{(i + 1) % d}" for i in range(d))
    program = compose(attnc.as_target(text, {name: (-1, 1) for name in names}), eps=1e-5).program
    assert program.num_heads == d
    assert program.num_attention_layers == 1


@pytest.mark.parametrize("text", ["sin(3*x)", "exp(x)*1.0 + sin(y)", "sqrt(2 + x)"])
def test_eps_is_shared_over_proven_errors(text: str) -> None:
    """For a sum of functions the composed error is the sum of the proved errors of its heads."""
    target = attnc.as_target(text, {name: (-1.0, 1.5) for name in Expression.parse(text).variables})
    built = compose(target, eps=1e-5)
    assert built.derivation is not None
    stated = [head.bound for head in prove_heads(built.program, target, built.derivation).evidence.heads]
    assert worst_error(built.program, target) <= ledger_of(built) <= 1e-5
    assert ledger_of(built) == pytest.approx(sum(stated), rel=0.06)  # both within the tolerance of a line's proof


@pytest.mark.parametrize(
    ("text", "eps", "num_heads", "error"),
    [
        ("sin(x*y)", 1e-6, 2, 1e-6),
        ("(sin(x*y), 2*sin(x*y)+x)", 1e-6, 2, 1e-6),  # a shared sub-expression is one head
        ("2*x - 3*(y - x)/4 + pi", 1e-9, 0, 1e-14),  # an affine expression needs no attention
        ("sin(x)**2 + exp(x)*cos(x) - x/(3+x) + y", 1e-8, 1, 1e-8),  # a function of one variable, however long
    ],
)
def test_numbers_of_heads(text: str, eps: float, num_heads: int, error: float) -> None:
    target = attnc.as_target(text, {"x": (-1, 1), "y": (-1, 1)})
    program = compose(target, eps=eps).program
    assert program.num_heads == num_heads
    assert worst_error(program, target) <= error


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_part_that_is_0_everywhere_has_an_ordinary_gate(dtype: str) -> None:
    """1 + x²z is above y, so relu(y − 1 − x²z) is 0. It need not be 0 to 300 digits, with scores that overflow."""
    target = attnc.as_target("max(1 + x*x*z, y)*sin(y*z)", {"x": (-1.0, 1.0), "y": (-1.0, 0.5), "z": (0.1, 0.4)})
    program = attnc.constructions.compose(target, eps=1e-3, dtype=dtype).program
    sizes = [np.abs(layer.constant.values).max(initial=0.0) for layer in program.layers if isinstance(layer, Affine)]
    assert max(sizes) < 1e9


@settings(max_examples=60)
@given(expressions(), st.sampled_from([1e-2, 1e-4, 1e-6]))
def test_any_expression_that_is_composed_is_within_eps(text: str, eps: float) -> None:
    try:
        box = {name: (0.5, 1.5) for name in Expression.parse(text).variables}
        target = attnc.as_target(text, box)
        built = compose(target, eps=eps)
    except AttncError:
        return
    size = float(np.abs(target(np.array([target.box.lo, target.box.hi]))).max())
    assert worst_error(built.program, target, 500, 3) <= eps + 1e-12 * (1 + size)


def test_a_large_head_is_taken_again_where_it_is_within_delta_and_not_far_below() -> None:
    (tree,) = Expression.parse("sqrt(t)").outputs
    heads = HeadsOf(tree, 0.0, 2.0, "float64")
    first = heads.within(1e-5)
    assert first is not None
    t = sample_interval(0.0, 2.0)
    for delta, is_taken in ((2e-5, True), (0.9 * first.error, False), (1.1 * first.error / CLOSE_SHARE, False)):
        other = heads.within(delta)
        assert other is not None
        assert (other.keys is first.keys) == is_taken
        assert abs(other(t) - function_of_one(tree)(t)).max() <= other.error <= delta


def test_a_composition_that_is_built_again_does_not_change() -> None:
    target = attnc.as_target("exp(sin(x)*y)", {"x": (-2, 2), "y": (-2, 2)})
    built = compose(target, eps=3e-4, dtype="float32")
    assert built.again is not None
    assert built.derivation is not None
    larger = built.again(dict.fromkeys(built.derivation.heads, 1e-3), 1e-3)
    assert larger.program.num_anchors > built.program.num_anchors
    assert built.again({}, 0.0).program.num_anchors == built.program.num_anchors


def heads_of(text: str, lo: float, hi: float, dtype: str = "float64") -> HeadsOf:
    (tree,) = Expression.parse(text).outputs
    return HeadsOf(tree, lo, hi, dtype)


def test_a_larger_error_takes_fewer_keys() -> None:
    heads = heads_of("cos(t)", 0.0, 3.0)
    first, other = heads.within(1e-9), heads.within(1e-6)
    assert first is not None
    assert other is not None
    assert other.num_anchors < first.num_anchors <= MANY_ANCHORS
    assert other.error <= 1e-6


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("text", "lo", "hi", "eps", "most"),
    [
        ("sin(t)", -3.0, 3.0, 1e-5, 8),
        ("exp(-t*t)*cos(3*t)", -2.0, 2.0, 1e-3, 8),
        ("1/(1 + t*t)", -3.0, 3.0, 1e-4, 8),
        ("t**3 - t", -1.0, 1.0, 1e-3, 6),
        ("1/t", 1.0, 3.0, 1e-4, 6),
    ],
)
def test_slopes_of_smooth_functions_are_equally_spaced(
    text: str, lo: float, hi: float, eps: float, most: int, dtype: str
) -> None:
    fit = heads_of(text, lo, hi, dtype).within(eps)
    assert fit is not None
    assert fit.num_anchors <= most
    p = fit.num_anchors
    assert np.array_equal(fit.keys.slopes[:, 0], 2 * np.arange(p) - (p - 1.0))  # exact in every dtype


@pytest.mark.parametrize(
    ("text", "lo", "hi", "most"),
    [("log(t)", 0.1, 3.0, 9), ("1/t", 0.1, 4.0, 12), ("sqrt(3 - t)", -1.0, 2.9, 9)],
)
def test_keys_are_dense_beside_a_singularity(text: str, lo: float, hi: float, most: int) -> None:
    heads = heads_of(text, lo, hi)
    fit = heads.within(1e-5)
    assert fit is not None
    assert fit.num_anchors <= most
    even = heads._searched(1e-5, (int(EVEN_KEYS * fit.num_anchors),), is_even=True)
    assert even is None  # equally spaced slopes are preferred where they take few more keys


def test_no_head_can_give_up_a_key() -> None:
    """Every head with one key less takes the sum of the errors above eps."""
    text, box = "sin(a)*b + cos(2*c)*d + exp(a*d)", {name: (-1.0, 1.0) for name in "abcd"}
    expression = Expression.parse(text)
    ledger = _ledger(attnc.as_target(text, box), expression, Request(1e-5, "float64"))
    found = ledger.composed(None, {})
    room = 1e-5 - found.error
    costs = ledger.backwards(ledger.forwards({key: fit.error for key, fit in found.fits.items()}))
    for part in ledger.heads:
        fit = found.fits[id(part)]
        smaller = HeadsOf(part.tree, fit.lo, fit.hi, "float64").within(fit.error + 0.5 * room / costs[id(part)])
        assert smaller is not None
        assert smaller.num_anchors >= fit.num_anchors
