"""The bound is the tolerance: sound on random targets, tight on the worst one, in both dtypes, at any temperature."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import max_affine
from attnc.errors import BoundNotMet, DomainError, InputError
from attnc.ir import Affine, Attention
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.function_target import CallableTarget, SequenceTarget
from strategies.expressions import expressions


def error_at(program, target, points):
    found = program(*target.split(points)).reshape(len(points), -1)
    return float(np.abs(found - target(points)).max())


def seams(box: Box, counts: tuple[int, ...], count: int = 400) -> np.ndarray:
    """Points at and beside the borders of cells, where selection is decided by the smallest differences."""
    rng = np.random.default_rng(1)
    edges = rng.integers(0, np.array(counts) + 1, (count, box.d)) / np.array(counts)
    nudge = rng.choice([0.0, 1e-15, -1e-15, 1e-9, -1e-9, 1e-3, -1e-3], (count, box.d)) * box.widths
    return np.clip(box.lo + edges * box.widths + nudge, box.lo, box.hi)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    text=expressions(("x", "y")),
    ends=st.lists(st.floats(-4, 4), min_size=4, max_size=4),
    share=st.floats(0.02, 0.5),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_bound_holds_on_random_expressions(text, ends, share, dtype):
    expression = Expression.parse(text)
    assume(expression.variables and not expression.discontinuous)
    box = {}
    for name, (a, b) in zip(expression.variables, (ends[:2], ends[2:]), strict=False):
        assume(abs(a - b) > 1e-3)
        box[name] = (min(a, b), max(a, b))
    try:
        target = ExpressionTarget(expression, Box.parse(box))
        points = sample_points(target.box, 500)
        spread = float(np.ptp(target(points)))
        assume(1e-6 < spread < 1e6)
        built = max_affine(target, eps=share * spread, dtype=dtype, max_anchors=20_000)
    except (DomainError, BoundNotMet):
        assume(False)
    counts = tuple(int(c) for c in dict(built.parameters)["points_per_axis"].split(" × "))
    tried = np.concatenate([points, seams(target.box, counts)])
    assert error_at(built.program, target, tried) <= built.bound.value <= share * spread


@settings(max_examples=30, deadline=None)
@given(
    exponent=st.floats(-2, 8),
    count=st.integers(1, 60),
    slope=st.floats(-5, 5),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_bound_holds_at_any_temperature(exponent, count, slope, dtype):
    target = CallableTarget(lambda p: slope * p[:, 0] + 1, Box.parse([(-1, 2)]), abs(slope))
    built = max_affine(target, points_per_axis=count, beta=10.0**exponent, dtype=dtype)
    points = np.concatenate([sample_points(target.box, 300), seams(target.box, (count,))])
    assert error_at(built.program, target, points) <= built.bound.value


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("text", "box"), [("3*x - 2*y", [(-1, 1), (0, 5)]), ("x", [(0, 1)]), ("abs(x) + y + z", [(-1, 1)] * 3)]
)
def test_bound_is_tight_on_linear_targets(text, box, dtype):
    """Linear functions are the worst case: the error reaches the whole variation at a corner of a cell."""
    net = attnc.compile(text, box, eps=0.5, dtype=dtype, construction="max_affine")
    counts = tuple(int(c) for c in net.parameters["points_per_axis"].split(" × "))
    points = seams(net.box, counts)
    target = ExpressionTarget(Expression.parse(text), net.box)
    error = error_at(net.program, target, points)
    assert error <= net.certificate.bound <= 1.1 * error
    assert net.certificate.bound <= 3 * net.certificate.observed


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 3), d=st.integers(1, 2), k=st.integers(1, 2), margin=st.floats(0.05, 60), seed=st.integers(0, 99)
)
def test_sequences_are_position_exact_for_every_margin(n, d, k, margin, seed):
    assume(n * d <= 4)
    rng = np.random.default_rng(seed)
    mix, out = rng.normal(size=(n, n)), rng.normal(size=(d, k))
    lipschitz = np.linalg.norm(mix, 2) * np.linalg.norm(out, 2)
    target = SequenceTarget(lambda X: np.tanh(mix @ X @ out), n, d, (-1, 1), lipschitz)
    built = max_affine(target, points_per_axis=5, margin=margin)
    assert error_at(built.program, target, sample_points(target.box, 400)) <= built.bound.value
    variation = built.bound.terms[0].value
    assert built.bound.value <= variation * (1 + 1e-6)


def test_the_self_attention_form_is_real():
    """Multiplying out the stored matrices with a T×T softmax gives what the engine gives, within the rounding term."""
    net = attnc.compile("(sin(x)*y, x - y)", [(-1, 2), (0, 1)], eps=0.3, construction="max_affine")
    embed, select, read = net.program.layers
    assert (type(embed), type(select), type(read)) == (Affine, Attention, Affine)
    assert not select.residual
    (head,) = select.heads
    points = sample_points(net.box, 60)
    rounding = next(term.value for term in net.certificate.terms if term.name == "rounding")
    for point, engine in zip(points, net(points), strict=True):
        Z = np.einsum("abcd,cd->ab", embed.weight.dense(), point[None, :]) + embed.constant.dense()
        scores = (Z @ head.W_Q) @ (Z @ head.W_K).T
        assert scores.shape == (net.num_anchors, net.num_anchors)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        Z = weights / weights.sum(axis=1, keepdims=True) @ (Z @ head.W_V) @ head.W_O
        out = np.einsum("abcd,cd->ab", read.weight.dense(), Z) + read.constant.dense()
        assert np.abs(out.ravel() - engine).max() <= 2 * rounding


def test_functions_that_are_not_lipschitz():
    net = attnc.compile("sqrt(x)", {"x": (0, 1)}, eps=0.02, construction="max_affine")
    points = np.concatenate([np.linspace(0, 1e-3, 2000), np.linspace(0, 1, 2000)])[:, None]
    error = np.abs(net(points) - np.sqrt(points[:, 0])).max()
    assert error <= net.certificate.bound <= 0.02
    assert net.certificate.bound <= 3 * error


def test_anisotropic_functions_get_anisotropic_grids():
    net = attnc.compile("10*x + y/10", [(-1, 1)] * 2, eps=0.5, construction="max_affine")
    nx, ny = (int(c) for c in net.parameters["points_per_axis"].split(" × "))
    assert nx > 10 * ny


def test_too_small_an_eps_names_the_size_before_allocating(monkeypatch):
    module = sys.modules["attnc.constructions.papers.max_affine"]

    monkeypatch.setattr(module, "self_attention", lambda *_: pytest.fail("built something large"))
    with pytest.raises(BoundNotMet, match="anchors") as caught:
        attnc.compile("sin(x)+cos(y)", [(-3, 3)] * 2, eps=1e-4, construction="max_affine")
    refusal = caught.value
    assert refusal.eps == 1e-4 < refusal.bound < 1
    assert "max_anchors=2,000,000" in str(refusal)
    needed = int(str(refusal).split("about ")[1].split(" anchors")[0].replace(",", ""))
    assert 0.5 < needed / (6 / 1e-4) ** 2 < 2  # Σ slopes × h/2 = eps at h = eps


def test_a_refusal_carries_the_best_network():
    with pytest.raises(BoundNotMet) as caught:
        attnc.compile("sin(x)+cos(y)", [(-3, 3)] * 2, eps=0.01, max_anchors=900, construction="max_affine")
    refusal = caught.value
    net = refusal.network
    assert net is refusal.network
    assert net.num_anchors <= 900
    assert net.certificate.observed <= net.certificate.bound <= 1.02 * refusal.bound
    assert set(refusal.worst_box) == {"x", "y"}
    for name, (lo, hi) in refusal.worst_box.items():
        assert -3 <= lo < hi <= 3, name


def test_max_bytes_is_a_limit_too():
    with pytest.raises(BoundNotMet, match="max_bytes"):
        attnc.compile("sin(x)+cos(y)", [(-3, 3)] * 2, eps=0.01, max_bytes=100_000, construction="max_affine")


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
        ({"points_per_axis": 3, "margin": 0.0}, "margin"),
    ],
)
def test_wrong_parameters(arguments, words):
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(InputError, match=words):
        max_affine(target, **arguments)


def test_a_box_far_from_zero_is_refused_or_right():
    """Cancellation in scale·x + offset is part of the bound."""
    target = CallableTarget(lambda p: p[:, 0] - 1e9, Box.parse([(1e9, 1e9 + 1)]), 1.0)
    built = max_affine(target, points_per_axis=100)
    points = np.linspace(1e9, 1e9 + 1, 5000)[:, None]
    assert error_at(built.program, target, points) <= built.bound.value
    narrow = CallableTarget(lambda p: p[:, 0], Box.parse([(1e16, 1e16 + 16)]), 1.0)
    built = max_affine(narrow, points_per_axis=100)
    points = np.linspace(1e16, 1e16 + 16, 50)[:, None]
    assert error_at(built.program, narrow, points) <= built.bound.value


@pytest.mark.parametrize(
    ("text", "box"),
    [("sqrt(x + 1) + y**2", [(-1, 1)] * 2), ("x*y*z", [(-1, 1)] * 3), ("max(x, y)", [(-2, 2), (-1, 1)])],
)
def test_a_grid_is_proved_axis_by_axis(text, box):
    """Fewer leaves than there are cells, and a bound that is close to the error, at kinks and infinite slopes too."""
    net = attnc.compile(text, box, eps=0.25, construction="max_affine")
    claim = net.certificate
    assert claim.method == "proof"
    assert {leaf.kind for leaf in claim.by_leaves.leaves} == {"enclosure"}
    assert claim.num_leaves < net.num_anchors
    assert claim.observed <= claim.bound <= 1.1 * claim.observed
    assert [term.name for term in claim.terms] == ["selection", "rounding"]


@pytest.mark.parametrize(
    ("text", "box", "eps", "least"),
    [("sin(200*x)", [(-3, 3)], 0.01, 60_000), ("sin(300*x)+y", [(-3, 3)] * 2, 0.5, 41_000)],
)
def test_a_grid_for_many_periods_is_as_fine_as_the_slope_asks(text, box, eps, least):
    """32 or 512 cells hold whole periods of these: their variation says nothing about the rate at which it falls."""
    built = attnc.constructions.max_affine(attnc.as_target(text, box), eps=eps)
    assert built.bound.value <= eps
    assert built.program.num_anchors <= 1.15 * least


def test_a_refusal_names_a_size_that_can_be_read():
    target = attnc.as_target("sin(40*x*y)", [(-3, 3)] * 2)
    with pytest.raises(attnc.BoundNotMet, match=r"it needs about \d\.\de\+17 anchors"):
        attnc.constructions.max_affine(target, eps=1e-6)
