"""Kinks and singular points: figures, the error where it is hardest, the limit of the values, rates, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.constructions.beyond.graded import graded, graded_keys
from attnc.constructions.fitting.kinks import Kink, find_kinks
from attnc.constructions.fitting.minimax import fit_values
from attnc.constructions.fitting.stored_head import store
from attnc.errors import BoundNotMet
from attnc.ir.soft_head import SoftHead
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget
from constructions.kinked import fitted, hard_points, largest_error, program_error, unary

THIRD = np.pi / 3
FITTED = [  # text, box, eps, kinks, anchors that are enough, dtype
    ("relu(x)", (-1, 1), 1e-4, [0], 5, "float64"),
    ("abs(x-0.3)", (-1, 1), 1e-4, [0.3], 8, "float64"),
    ("max(x, x**2)", (-2, 2), 1e-4, [0, 1], 13, "float64"),
    ("clip(x, -0.5, 0.7)", (-1, 1), 1e-4, [-0.5, 0.7], 6, "float64"),
    ("abs(sin(3*x))", (-2, 2), 1e-4, [-THIRD, 0, THIRD], 20, "float64"),
    ("min(x, 1-x, 0.2)", (-1, 2), 1e-4, [0.2, 0.8], 9, "float64"),
    ("relu(x)*exp(x)", (-1, 1), 1e-4, [0], 6, "float64"),
    ("abs(x)+abs(x-0.5)", (-1, 1), 1e-4, [0, 0.5], 9, "float64"),
    ("abs(x)**1.5", (-1, 1), 1e-4, [0], 16, "float64"),
    ("abs(x)", (0, 1), 1e-6, [], 99, "float64"),  # the kink is an end
    ("abs(x-0.9999)", (0, 1), 1e-5, [0.9999], 99, "float64"),
    ("sin(x)", (-3, 3), 1e-6, [], 99, "float64"),  # no kink
    ("0*x+2", (0, 1), 1e-9, [], 1, "float64"),
    ("sqrt(x)", (0, 1), 1e-3, [0], 99, "float64"),
    ("asin(x)", (-1, 1), 1e-2, [-1, 1], 99, "float64"),
    ("abs(x-1000.5)", (1000, 1001), 1e-6, [1000.5], 99, "float64"),
    ("log(x+1e-6)", (0, 1), 1e-3, [0], 99, "float64"),  # singular just outside
    ("(abs(x), relu(x-0.5), 1e-3*sin(x))", (-1, 1), 1e-4, [0, 0.5], 99, "float64"),
    ("relu(x)", (-1, 1), 1e-6, [0], 99, "float32"),
    ("clip(x, -0.5, 0.7)", (-1, 1), 2e-6, [-0.5, 0.7], 99, "float32"),
    ("abs(x-0.3)", (-1, 1), 1e-3, [0.3], 99, "float32"),
]


@pytest.mark.parametrize(("text", "ends", "eps", "places", "enough", "dtype"), FITTED)
def test_an_error_is_reached_with_few_anchors(text, ends, eps, places, enough, dtype):
    fitted(graded, unary(text, *ends), eps, places, dtype, enough, 1e-9 if dtype == "float64" else 1e-6)


@pytest.mark.parametrize(("count", "error"), [(3, 2e-4), (5, 1e-8), (8, 1e-10)])
def test_relu_with_so_many_anchors(count, error):
    target = unary("relu(x)")
    built = graded(target, num_anchors=count)
    assert built.program.num_anchors == count
    assert program_error(built, target, [0]) <= error


def sup_error(keys: SoftHead, f, lo: float, hi: float, places) -> float:
    return largest_error(lambda x: np.abs(keys(x[:, None])[:, 0] - f(x)), hard_points(lo, hi, places))


@pytest.mark.parametrize(("text", "digits"), [("relu(x)*exp(x)", (2, 4, 6, 8)), ("abs(x)", (2, 4, 6))])
def test_the_anchors_at_a_kink_grow_like_the_digits(text, digits):
    """A geometric rate: no more than two keys a digit, however many digits there are already."""
    counts = [graded(unary(text), eps=10.0**-d).program.num_anchors for d in digits]
    slope, start = np.polyfit(digits, counts, 1)
    assert 0 < slope < 2
    assert np.abs(slope * np.array(digits) + start - counts).max() < 2


def test_the_rate_at_a_singular_point_is_root_exponential():
    counts = np.array([4, 9, 16, 25])
    errors = [
        sup_error(graded_keys(np.sqrt, 0, 1, [Kink(0.0, True)], num_keys=int(n)), np.sqrt, 0, 1, [0]) for n in counts
    ]
    line = np.polyfit(np.sqrt(counts), np.log(errors), 1)
    assert line[0] < -2
    assert np.abs(np.polyval(line, np.sqrt(counts)) - np.log(errors)).max() < 0.7


@settings(max_examples=5, deadline=None)
@given(
    knots=st.lists(st.floats(-0.9, 0.9), min_size=1, max_size=3, unique_by=lambda v: round(v, 1)),
    slopes=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_random_piecewise_linear_functions(knots, slopes, dtype):
    terms = [f"{slope:.3f}*abs(x-({knot:.3f}))" for slope, knot in zip(slopes, knots, strict=False)]
    fitted(graded, unary(" + ".join(["x", *terms])), 1e-2, [round(knot, 3) for knot in knots], dtype, slack=1e-6)


def test_python_code_and_given_kinks():
    target = CallableTarget(lambda p: np.abs(p[:, 0] - 0.3) + np.maximum(p[:, 0], -0.4), Box.parse([(-1, 1)]))
    assert [round(kink.x, 9) for kink in find_kinks(target)] == [-0.4, 0.3]
    for kinks in (None, [0.3, -0.4, 5.0]):
        built = graded(target, eps=1e-3, kinks=kinks)
        assert program_error(built, target, [-0.4, 0.3]) <= 1e-3
    one = SequenceTarget(lambda X: np.abs(X), tokens=1, width=1)
    assert graded(one, eps=1e-2).program(np.full((3, 1, 1), -0.5)).shape == (3, 1, 1)


@pytest.mark.parametrize(
    ("text", "ends", "found"),
    [
        ("abs(sin(3*x))", (-2, 2), [-THIRD, 0, THIRD]),
        ("abs(sin(20*x))", (-3, 3), [np.pi * k / 20 for k in range(-19, 20)]),
        ("max(sin(x), cos(x), 0.3)", (-3, 3), [-np.arccos(0.3), np.pi / 4, np.pi - np.arcsin(0.3)]),
        ("sqrt((x-0.3)**2)", (-1, 1), [0.3]),  # touches 0
        ("abs(cos(x)-1)", (-1, 1), []),  # touches 0, and does not bend
        ("relu(relu(x-0.3))", (-1, 1), [0.3]),  # 0 on a whole interval
        ("min(x, 1-x, 0.2)", (-1, 2), [0.2, 0.8]),  # x = 1 − x is hidden
        ("sin(x)**2", (-1, 1), []),
        ("abs(x)", (0, 1), []),
        ("sqrt(x)", (0, 1), [0]),
    ],
)
def test_all_kinks_are_found(text, ends, found):
    kinks = find_kinks(unary(text, *ends))
    assert [kink.x for kink in kinks] == pytest.approx(found, abs=1e-12)
    assert [kink.is_singular for kink in kinks] == [text == "sqrt(x)"] * len(found)


def test_the_values_are_near_the_best_possible():
    """Against the linear programme that they approximate."""
    from scipy.optimize import linprog

    x = np.cos(np.linspace(0, np.pi, 60))
    head = SoftHead.of_one_variable(np.linspace(-3, 3, 6), -(np.linspace(-1, 1, 6) ** 2), np.zeros(6))
    weights = head.weights(x[:, None])
    f = np.exp(x)
    values, error = fit_values(weights, f[:, None], np.array([1e9]), 40)
    ones = np.ones((len(x), 1))
    best = linprog(
        np.append(np.zeros(6), 1),
        A_ub=np.block([[weights, -ones], [-weights, -ones]]),
        b_ub=np.concatenate([f, -f]),
        bounds=[(None, None)] * 6 + [(0, None)],
    )
    assert best.fun <= error * (1 + 1e-9) <= 1.03 * best.fun * (1 + 1e-9)
    small, _ = fit_values(weights, f[:, None], np.array([0.8 * np.abs(values).max()]), 40)
    assert np.abs(small).max() <= 0.8 * np.abs(values).max()


def test_a_program_is_what_its_keys_say():
    keys = graded_keys(lambda x: np.stack([np.abs(x), np.exp(x)], axis=1), -1, 1, [0], eps=1e-2)
    target = unary("(abs(x), exp(x))")
    x = np.linspace(-1, 1, 501)
    for dtype, close in (("float64", 1e-9), ("float32", 3e-2)):
        program = store(keys, target.box, dtype).program(target)
        assert program(x[:, None]) == pytest.approx(keys(x[:, None]), abs=close)


def test_refusals():
    with pytest.raises(BoundNotMet, match=r"rounding in float64|Rounding in float64") as refusal:
        graded(unary("abs(x)"), eps=1e-13)
    assert refusal.value.eps == 1e-13
    assert program_error(refusal.value.network, unary("abs(x)"), [0]) < 1e-7
    with pytest.raises(BoundNotMet, match="anchors") as refusal:
        graded(unary("abs(sin(3*x))", -2, 2), eps=1e-6, max_anchors=10)
    assert refusal.value.network.program.num_anchors <= 10
    with pytest.raises(BoundNotMet, match="3 kinks"):
        graded(unary("abs(sin(3*x))", -2, 2), eps=1e-6, max_anchors=3)


def test_what_is_hard_next_to_an_end_is_graded_to_that_end(monkeypatch):
    """1/t is hard at t = 1 for its pole at 0; graded to a place beside 1, hundreds of keys would be tried."""
    from attnc.constructions.fitting import key_group

    tried: list[int] = []
    make_groups = key_group.make_groups

    def recorded(piece, num_keys, *rest):
        tried.append(num_keys)
        return make_groups(piece, num_keys, *rest)

    monkeypatch.setattr(key_group, "make_groups", recorded)
    keys = graded_keys(lambda t: 1 / t, 1.0, 26.0, eps=4e-10)
    t = np.linspace(1, 26, 20_001)
    assert np.abs(keys(t[:, None])[:, 0] - 1 / t).max() <= 4e-10
    assert keys.num_keys <= max(tried) <= 64
