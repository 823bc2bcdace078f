"""two_layer and attention_softmax: sound where steps are in transition, tight on the worst target, for any β."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attnc.constructions.built import Built
from attnc.constructions.fitting.bumps import Steps
from attnc.constructions.papers.attention_softmax import attention_softmax
from attnc.constructions.papers.two_layer import two_layer
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import BoundNotMet, DomainError, InputError
from attnc.ir import Affine, Attention, Softmax
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.function_target import CallableTarget, SequenceTarget
from attnc.targets.target import Target
from constructions.errors import error_at, target_of
from ir.rounding import assert_agrees
from strategies.expressions import expressions

DTYPES = st.sampled_from(["float64", "float32"])
HEADS = st.sampled_from([None, 1, 2, 5])
BOTH = pytest.mark.parametrize("build", [two_layer, attention_softmax])


def counts_of(built: Built) -> tuple[int, ...]:
    return tuple(int(c) for c in str(dict(built.parameters)["points_per_axis"]).split(" × "))


def hard_points(target: Target, built: Built, count: int = 400, seed: int = 1) -> np.ndarray:
    """Half at random and on a grid; half at edges of cells, beside them, and at every stage of a transition."""
    box, counts = target.box, np.array(counts_of(built))
    delta = float(dict(built.parameters)["step_width"]) / 2
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, counts + 1, (count, box.d)).astype(float)
    stages = [0.0, 1e-15, -1e-15, 1e-9, -1e-9, delta / 3, -delta / 3, delta, -delta, 1.01 * delta, -1.01 * delta, 0.5]
    places = (edges + rng.choice(stages, (count, box.d))) / counts
    points = np.clip(box.lo + places * box.widths, box.lo, box.hi)
    return np.concatenate([sample_points(box, count), points])


def midpoints(target: Target, per_axis: int) -> np.ndarray:
    """The midpoints of a regular grid, for quadrature."""
    middles = (np.arange(per_axis) + 0.5) / per_axis
    axes = target.box.lo + middles[:, None] * target.box.widths
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes.T, indexing="ij")], axis=1)


def size_of(built: Built) -> int:
    """What max_anchors limits: the keys that queries meet, and the features of a softmax."""
    features = sum(len(layer.channels) for layer in built.program.layers if isinstance(layer, Softmax))
    return built.program.num_anchors + features


@BOTH
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    text=expressions(("x", "y")),
    ends=st.lists(st.floats(-4, 4), min_size=4, max_size=4),
    share=st.floats(0.1, 0.6),
    dtype=DTYPES,
    heads=HEADS,
)
def test_bound_holds_on_random_expressions(build, text, ends, share, dtype, heads):
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
        built = build(target, eps=share * spread, dtype=dtype, heads=heads, max_anchors=3_000)
    except (DomainError, BoundNotMet):
        assume(False)
    assert size_of(built) <= 3_000
    assert error_at(built.program, target, hard_points(target, built)) <= built.bound.value <= share * spread


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    exponent=st.floats(-2, 6),
    count=st.integers(1, 30),
    slope=st.floats(-5, 5),
    dtype=DTYPES,
    heads=HEADS,
    num_step_anchors=st.sampled_from([None, 2, 3, 9, 40]),
)
def test_bound_holds_at_any_temperature(build, exponent, count, slope, dtype, heads, num_step_anchors):
    """β from too soft to 10⁶ times what is sufficient."""
    target = CallableTarget(lambda p: slope * p[:, 0] + 1, Box.parse([(-1, 2)]), abs(slope))
    how = {"points_per_axis": count, "dtype": dtype, "heads": heads, "num_step_anchors": num_step_anchors}
    sufficient = dict(build(target, **how).parameters)["beta"]
    built = build(target, beta=sufficient * 10.0**exponent, **how)
    assert error_at(built.program, target, hard_points(target, built)) <= built.bound.value


@BOTH
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("text", "box"), [("3*x - 2*y", [(-1, 1), (0, 5)]), ("x", [(0, 1)]), ("abs(x) + y + z", [(-1, 1)] * 3)]
)
def test_bound_is_tight_on_linear_targets(build, text, box, dtype, heads):
    """Linear functions are the worst case: the error reaches the whole variation at a corner of a cell."""
    target = target_of(text, *box)
    eps = 0.8 if len(box) == 3 else 0.3 * len(box)
    built = build(target, eps=eps, dtype=dtype, heads=heads)
    error = error_at(built.program, target, hard_points(target, built))
    assert error <= built.bound.value <= eps
    assert built.bound.value <= (1.1 if heads is None or dtype == "float64" else 3) * error


@BOTH
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
def test_jumps_in_l_p(build, text, box, counts, norm):
    target = target_of(text, *box)
    built = build(target, points_per_axis=counts, norm=norm)
    points = midpoints(target, 8_009 if len(box) == 1 else 161)
    found = NumpyEngine(built.program)(points).reshape(len(points), -1)
    power = float((np.abs(found - target(points)).max(axis=1) ** norm).mean() * target.box.widths.prod())
    error = power ** (1 / norm)
    assert error <= built.bound.value <= 3 * error


@BOTH
def test_l_p_by_eps_in_float32(build):
    target = target_of("sign(x)*y", (-1, 1), (0, 2))
    built = build(target, eps=0.2, norm=2.0, dtype="float32")
    points = midpoints(target, 201)
    off = NumpyEngine(built.program)(points) - target(points)[:, 0]
    error = math.sqrt((off**2).mean() * 4)  # 4 is the area of the box
    assert error <= built.bound.value <= 0.2
    with pytest.raises(BoundNotMet):
        build(target, eps=0.2)


@BOTH
def test_too_small_an_eps_names_the_size_before_allocating(build, monkeypatch):
    monkeypatch.setattr(Steps, "layers", lambda *_: pytest.fail("built something large"))
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    with pytest.raises(BoundNotMet, match="anchors") as caught:
        build(target, eps=1e-4)
    assert caught.value.eps == 1e-4 < caught.value.bound < 1
    assert "max_anchors=2,000,000" in str(caught.value)
    needed = int(str(caught.value).split("about ")[1].split(" anchors")[0].replace(",", ""))
    assert 0.5 < needed / (6 / 1e-4) ** 2 < 2  # Σ slopes × h/2 = eps at h = eps


@BOTH
@pytest.mark.parametrize("limits", [{"max_anchors": 900}, {"max_bytes": 500_000}])
@pytest.mark.parametrize("heads", [None, 4])
def test_a_refusal_carries_the_best_network(build, limits, heads):
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    with pytest.raises(BoundNotMet) as caught:
        build(target, eps=0.02, heads=heads, **limits)
    built = caught.value.network
    assert 200 < size_of(built) <= 900 or "max_bytes" in limits
    error = error_at(built.program, target, hard_points(target, built))
    assert error <= built.bound.value <= 1.02 * caught.value.bound
    assert set(caught.value.worst_box) == {"x", "y"}


@BOTH
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
def test_wrong_parameters(build, arguments, words):
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(InputError, match=words):
        build(target, **arguments)


@BOTH
def test_two_sequences_are_for_cross_attention(build):
    target = SequenceTarget(lambda X, Y: X + Y, (1, 1), (1, 1), (-1, 1), 2.0)
    with pytest.raises(InputError, match="max_affine_cross"):
        build(target, eps=0.5)


@BOTH
@pytest.mark.parametrize("heads", [None, 2])
def test_a_box_far_from_zero_is_refused_or_right(build, heads):
    """Cancellation in K(scale·x + offset − E) moves the edges, and is part of the bound."""
    target = CallableTarget(lambda p: p[:, 0] - 1e9, Box.parse([(1e9, 1e9 + 1)]), 1.0)
    built = build(target, points_per_axis=100, heads=heads)
    points = np.linspace(1e9, 1e9 + 1, 3000)[:, None]
    assert error_at(built.program, target, points) <= built.bound.value
    narrow = CallableTarget(lambda p: p[:, 0], Box.parse([(1e16, 1e16 + 16)]), 1.0)
    built = build(narrow, points_per_axis=20, heads=heads)
    points = np.linspace(1e16, 1e16 + 16, 50)[:, None]
    assert error_at(built.program, narrow, points) <= built.bound.value


@BOTH
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 3),
    d=st.integers(1, 2),
    k=st.integers(1, 2),
    margin=st.floats(0.05, 60),
    exponent=st.floats(0, 6),
    heads=HEADS,
    seed=st.integers(0, 99),
)
def test_sequences_are_position_exact_for_every_margin(build, n, d, k, margin, exponent, heads, seed):
    """attention_softmax has no margin: its last map writes every position by itself."""
    assume(n * d <= 4)
    rng = np.random.default_rng(seed)
    mix, out = rng.normal(size=(n, n)), rng.normal(size=(d, k))
    lipschitz = np.linalg.norm(mix, 2) * np.linalg.norm(out, 2)
    target = SequenceTarget(lambda X: np.tanh(mix @ X @ out), n, d, (-1, 1), lipschitz)
    own = {"margin": margin} if build is two_layer else {}
    built = build(target, points_per_axis=4 if n * d == 4 else 5, beta=64 * 10.0**exponent, heads=heads, **own)
    assert error_at(built.program, target, hard_points(target, built, 200)) <= built.bound.value
    variation = built.bound.terms[0].value
    assert built.bound.value <= variation * (1 + (1e-3 if build is two_layer else 1e-6))


@BOTH
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", [None, 2])
def test_the_layers_and_their_sizes(build, dtype, heads):
    target = SequenceTarget(lambda X: np.cumsum(np.sin(X), axis=1), 2, 1, (-1, 1), 2.0)
    built = build(target, points_per_axis=(5, 4), dtype=dtype, heads=heads, num_step_anchors=6, beta=16.0)
    program = built.program
    selecting = Attention if build is two_layer else Softmax
    assert [type(layer) for layer in program.layers] == [Affine, Attention, Affine, selecting, Affine]
    _, steps, _, select, _ = program.layers
    attention = [layer for layer in (steps, select) if isinstance(layer, Attention)]
    assert [len(layer.heads) for layer in attention] == [heads or 1, 1][: len(attention)]
    assert not any(layer.residual or layer.cross or layer.heads[0].mask for layer in attention)
    keys = 2 * 20 if build is two_layer else 0  # a token for every cell and position
    assert build is two_layer or len(select.channels) == 20  # a feature for every cell
    tokens = 12 if heads is None else 10  # 7 steps: 6 keys twice, or (6/2 + 2 sentinels) keys twice
    assert program.num_anchors == tokens * (heads or 1) + keys
    inputs = target.split(hard_points(target, built, 15))
    for found in (program(*inputs), NumpyEngine(program)(*inputs)):
        assert_agrees(program, tuple(inputs), found)


@pytest.mark.parametrize(("build", "per_cell"), [(two_layer, 4), (attention_softmax, 6)])
def test_weights_are_sparse(build, per_cell):
    """A few entries for each cell, whatever the number of features; and a large grid is evaluated within seconds."""
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    built = build(target, points_per_axis=100)
    assert counts_of(built) == (100, 100)
    assert built.program.num_parameters < per_cell * 100 * 100
    assert error_at(built.program, target, hard_points(target, built, 100)) <= built.bound.value


def test_wide_projections_count_as_bytes():
    """Σ P_i features make dense W_Q and W_K: two_layer refuses a fine grid on one axis for them."""
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(BoundNotMet, match="max_bytes"):
        two_layer(target, eps=1e-6)


def test_a_fine_grid_on_one_axis_needs_no_wide_projections():
    """Where two_layer's W_Q and W_K would have (Σ P_i)² entries, everything in attention_softmax is sparse."""
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    built = attention_softmax(target, eps=1e-4)
    (count,) = counts_of(built)
    assert 5_000 < count < 5_200
    assert built.program.num_parameters < 12 * count
    edges = np.array([1, 777, 4_000])[:, None] / count
    points = np.concatenate([edges, edges + 1e-6, edges - 1e-6])  # a transition is 3e-6 wide
    error = error_at(built.program, target, points)
    assert error <= built.bound.value <= 1.1 * error


def test_a_margin_of_nothing_is_refused():
    target = CallableTarget(lambda p: p[:, 0], Box.parse([(0, 1)]), 1.0)
    with pytest.raises(InputError, match="margin"):
        two_layer(target, points_per_axis=3, margin=0.0)
