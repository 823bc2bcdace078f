"""The same theorem with one attention layer: the bound is the tolerance, and a softmax over features selects."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attnc.certificates.observed import sample_points
from attnc.constructions.attention_softmax import attention_softmax
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import BoundNotMet, DomainError, InputError
from attnc.ir import Affine, Attention, Softmax
from attnc.targets.box import Box
from attnc.targets.expression import Expression
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.function_target import CallableTarget, SequenceTarget
from constructions.transitions import counts_of, hard_points, midpoints
from ir.rounding import assert_agrees
from strategies.expressions import expressions

DTYPES = st.sampled_from(["float64", "float32"])
HEADS = st.sampled_from([None, 1, 2, 5])


def expression(text: str, *box: tuple[float, float]) -> ExpressionTarget:
    parsed = Expression.parse(text)
    return ExpressionTarget(parsed, Box.parse(box, parsed.variables))


def error_at(program, target, points):
    found = NumpyEngine(program)(*target.split(points)).reshape(len(points), -1)
    return float(np.abs(found - target(points)).max())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    text=expressions(("x", "y")),
    ends=st.lists(st.floats(-4, 4), min_size=4, max_size=4),
    share=st.floats(0.1, 0.6),
    dtype=DTYPES,
    heads=HEADS,
)
def test_bound_holds_on_random_expressions(text, ends, share, dtype, heads):
    parsed = Expression.parse(text)
    assume(parsed.variables and not parsed.discontinuous)
    box = {}
    for name, (a, b) in zip(parsed.variables, (ends[:2], ends[2:]), strict=False):
        assume(abs(a - b) > 1e-3)
        box[name] = (min(a, b), max(a, b))
    try:
        target = ExpressionTarget(parsed, Box.parse(box))
        spread = float(np.ptp(target(sample_points(target.box, 500))))
        assume(1e-6 < spread < 1e6)
        built = attention_softmax(target, eps=share * spread, dtype=dtype, heads=heads, max_anchors=4_000)
    except (DomainError, BoundNotMet):
        assume(False)
    assert built.program.num_anchors + math.prod(counts_of(built)) <= 4_000
    assert error_at(built.program, target, hard_points(target, built)) <= built.bound.value <= share * spread


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.floats(-2, 6),
    count=st.integers(1, 30),
    slope=st.floats(-5, 5),
    dtype=DTYPES,
    heads=HEADS,
    num_step_anchors=st.sampled_from([None, 2, 3, 9, 40]),
)
def test_bound_holds_at_any_temperature(exponent, count, slope, dtype, heads, num_step_anchors):
    """β from too soft to 10⁶ times what is sufficient."""
    target = CallableTarget(lambda p: slope * p[:, 0] + 1, Box.parse([(-1, 2)]), abs(slope))
    how = {"points_per_axis": count, "dtype": dtype, "heads": heads, "num_step_anchors": num_step_anchors}
    sufficient = dict(attention_softmax(target, **how).parameters)["beta"]
    built = attention_softmax(target, beta=sufficient * 10.0**exponent, **how)
    assert error_at(built.program, target, hard_points(target, built)) <= built.bound.value


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("text", "box"), [("3*x - 2*y", [(-1, 1), (0, 5)]), ("x", [(0, 1)]), ("abs(x) + y + z", [(-1, 1)] * 3)]
)
def test_bound_is_tight_on_linear_targets(text, box, dtype, heads):
    """Linear functions are the worst case: the error reaches the whole variation at a corner of a cell."""
    target = expression(text, *box)
    eps = 0.8 if len(box) == 3 else 0.3 * len(box)
    built = attention_softmax(target, eps=eps, dtype=dtype, heads=heads)
    error = error_at(built.program, target, hard_points(target, built))
    assert error <= built.bound.value <= eps
    assert built.bound.value <= (1.1 if heads is None or dtype == "float64" else 3) * error


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 3),
    d=st.integers(1, 2),
    k=st.integers(1, 2),
    exponent=st.floats(0, 6),
    heads=HEADS,
    seed=st.integers(0, 99),
)
def test_sequences_need_no_margin(n, d, k, exponent, heads, seed):
    assume(n * d <= 4)
    rng = np.random.default_rng(seed)
    mix, out = rng.normal(size=(n, n)), rng.normal(size=(d, k))
    lipschitz = np.linalg.norm(mix, 2) * np.linalg.norm(out, 2)
    target = SequenceTarget(lambda X: np.tanh(mix @ X @ out), n, d, (-1, 1), lipschitz)
    counts = 4 if n * d == 4 else 5
    built = attention_softmax(target, points_per_axis=counts, beta=64 * 10.0**exponent, heads=heads)
    assert error_at(built.program, target, hard_points(target, built, 200)) <= built.bound.value
    variation = built.bound.terms[0].value
    assert built.bound.value <= variation * (1 + 1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", [None, 2])
def test_it_is_one_attention_layer_and_one_softmax(dtype, heads):
    target = SequenceTarget(lambda X: np.cumsum(np.sin(X), axis=1), 2, 1, (-1, 1), 2.0)
    built = attention_softmax(target, points_per_axis=(5, 4), dtype=dtype, heads=heads, num_step_anchors=6, beta=16.0)
    kinds = [type(layer) for layer in built.program.layers]
    assert kinds == [Affine, Attention, Affine, Softmax, Affine]
    steps, select = built.program.layers[1], built.program.layers[3]
    assert len(steps.heads) == (heads or 1)
    assert not any((steps.residual, steps.cross, steps.heads[0].mask))
    assert len(select.channels) == 20  # a feature for every cell
    tokens = 12 if heads is None else 10  # 7 steps: 6 keys twice, or (6/2 + 2 sentinels) keys twice
    assert built.program.num_anchors == tokens * (heads or 1)
    points = hard_points(target, built, 15)
    inputs = target.split(points)
    for found in (built.program(*inputs), NumpyEngine(built.program)(*inputs)):
        assert_agrees(built.program, tuple(inputs), found)


@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize(
    ("text", "box", "counts"),
    [
        ("sign(x)*y", [(-1, 1), (0, 2)], (15, 16)),
        ("sign(x)*y", [(-1, 1), (-1, 1)], (20, 20)),
        ("floor(3*x)", [(-1, 1)], (25,)),
        ("floor(3*x) + y", [(-1, 1), (0, 1)], (25, 12)),
    ],
)
def test_jumps_in_l_p(text, box, counts, norm):
    target = expression(text, *box)
    built = attention_softmax(target, points_per_axis=counts, norm=norm)
    points = midpoints(target, 8_009 if len(box) == 1 else 161)
    found = NumpyEngine(built.program)(points).reshape(len(points), -1)
    power = float((np.abs(found - target(points)).max(axis=1) ** norm).mean() * target.box.widths.prod())
    error = power ** (1 / norm)
    assert error <= built.bound.value <= 3 * error


def test_l_p_by_eps_in_float32():
    target = expression("sign(x)*y", (-1, 1), (0, 2))
    built = attention_softmax(target, eps=0.2, norm=2.0, dtype="float32")
    points = midpoints(target, 201)
    off = NumpyEngine(built.program)(points) - target(points)[:, 0]
    error = math.sqrt((off**2).mean() * 4)  # 4 is the area of the box
    assert error <= built.bound.value <= 0.2
    with pytest.raises(BoundNotMet):
        attention_softmax(target, eps=0.2)


def test_too_small_an_eps_names_the_size_before_allocating(monkeypatch):
    module = sys.modules["attnc.constructions.attention_softmax"]
    monkeypatch.setattr(module, "_program", lambda *_: pytest.fail("built something large"))
    target = expression("sin(x)+cos(y)", (-3, 3), (-3, 3))
    with pytest.raises(BoundNotMet, match="anchors") as caught:
        attention_softmax(target, eps=1e-4)
    assert caught.value.eps == 1e-4 < caught.value.bound < 1
    assert "max_anchors=2,000,000" in str(caught.value)
    needed = int(str(caught.value).split("about ")[1].split(" anchors")[0].replace(",", ""))
    assert 0.5 < needed / (6 / 1e-4) ** 2 < 2  # Σ slopes × h/2 = eps at h = eps


@pytest.mark.parametrize("limits", [{"max_anchors": 900}, {"max_bytes": 500_000}])
@pytest.mark.parametrize("heads", [None, 4])
def test_a_refusal_carries_the_best_network(limits, heads):
    target = expression("sin(x)+cos(y)", (-3, 3), (-3, 3))
    with pytest.raises(BoundNotMet) as caught:
        attention_softmax(target, eps=0.02, heads=heads, **limits)
    built = caught.value.network
    assert 200 < built.program.num_anchors + math.prod(counts_of(built)) <= 900 or "max_bytes" in limits
    error = error_at(built.program, target, hard_points(target, built))
    assert error <= built.bound.value <= 1.02 * caught.value.bound
    assert set(caught.value.worst_box) == {"x", "y"}


def test_a_fine_grid_on_one_axis_needs_no_wide_projections():
    """Where two_layer's W_Q and W_K would have (Σ P_i)² entries, everything here is sparse."""
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    built = attention_softmax(target, eps=1e-4)
    (count,) = counts_of(built)
    assert 5_000 < count < 5_200
    assert built.program.num_parameters < 12 * count
    edges = np.array([1, 777, 4_000])[:, None] / count
    points = np.concatenate([edges, edges + 1e-6, edges - 1e-6])  # a transition is 3e-6 wide
    error = error_at(built.program, target, points)
    assert error <= built.bound.value <= 1.1 * error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"eps": None}, "either eps or points_per_axis"),
        ({"eps": 0.1, "points_per_axis": 3}, "either eps or points_per_axis"),
        ({"points_per_axis": 0}, "points_per_axis"),
        ({"points_per_axis": (2, 3)}, "points_per_axis"),
        ({"points_per_axis": 3_000_000}, "max_anchors"),
        ({"points_per_axis": 3, "beta": -1.0}, "beta"),
        ({"points_per_axis": 3, "beta": math.nan}, "beta"),
        ({"points_per_axis": 3, "norm": 0.5}, "norm"),
        ({"points_per_axis": 3, "heads": 0}, "heads"),
        ({"points_per_axis": 3, "heads": 2.0}, "heads"),
        ({"points_per_axis": 3, "num_step_anchors": 1}, "num_step_anchors"),
        ({"points_per_axis": 3, "num_step_anchors": 10**6}, "num_step_anchors"),
    ],
)
def test_wrong_parameters(arguments, words):
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(InputError, match=words):
        attention_softmax(target, **arguments)


def test_two_sequences_are_for_cross_attention():
    target = SequenceTarget(lambda X, Y: X + Y, (1, 1), (1, 1), (-1, 1), 2.0)
    with pytest.raises(InputError, match="max_affine_cross"):
        attention_softmax(target, eps=0.5)


@pytest.mark.parametrize("heads", [None, 2])
def test_a_box_far_from_zero_is_refused_or_right(heads):
    """Cancellation in K(scale·x + offset − E) moves the edges, and is part of the bound."""
    target = CallableTarget(lambda p: p[:, 0] - 1e9, Box.parse([(1e9, 1e9 + 1)]), 1.0)
    built = attention_softmax(target, points_per_axis=100, heads=heads)
    points = np.linspace(1e9, 1e9 + 1, 3000)[:, None]
    assert error_at(built.program, target, points) <= built.bound.value
    narrow = CallableTarget(lambda p: p[:, 0], Box.parse([(1e16, 1e16 + 16)]), 1.0)
    built = attention_softmax(narrow, points_per_axis=20, heads=heads)
    points = np.linspace(1e16, 1e16 + 16, 50)[:, None]
    assert error_at(built.program, narrow, points) <= built.bound.value


def test_scores_are_sparse():
    """Four entries a cell and a value, whatever the number of steps."""
    target = expression("sin(x)+cos(y)", (-3, 3), (-3, 3))
    built = attention_softmax(target, points_per_axis=100)
    assert counts_of(built) == (100, 100)
    assert built.program.num_parameters < 6 * 100 * 100
    points = hard_points(target, built, 100)
    assert error_at(built.program, target, points) <= built.bound.value
