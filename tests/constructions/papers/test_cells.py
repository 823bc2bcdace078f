"""Grids of cells, however a cell is selected: sound at the borders of cells, tight on the worst target, for any β."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import attention_softmax, max_affine, max_affine_cross, two_layer
from attnc.constructions.built import Built
from attnc.constructions.fitting.bumps import Steps
from attnc.constructions.fitting.cell_head import CellHead
from attnc.errors import BoundNotMet
from attnc.ir import Softmax
from attnc.network import Network
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget
from attnc.targets.target import Target
from constructions.errors import error_at, random_requests, random_sequence, reference_error, target_of

DTYPES = st.sampled_from(["float64", "float32"])
HEADS = st.sampled_from([None, 1, 2, 5])
ALL = pytest.mark.parametrize("build", [max_affine, two_layer, attention_softmax])


def counts_of(built: Built | Network) -> tuple[int, ...]:
    return tuple(int(c) for c in str(dict(built.parameters)["points_per_axis"]).split(" × "))


def hard_points(target: Target, built: Built | Network, count: int = 400, seed: int = 1) -> np.ndarray:
    """Half at random and on a grid; half at edges of cells, beside them, and at every stage of a transition."""
    box, counts = target.box, np.array(counts_of(built))
    delta = float(dict(built.parameters).get("step_width", 2e-3)) / 2
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, counts + 1, (count, box.d)).astype(float)
    stages = [0.0, 1e-15, -1e-15, 1e-9, -1e-9, delta / 3, -delta / 3, delta, -delta, 1.01 * delta, -1.01 * delta, 0.5]
    places = (edges + rng.choice(stages, (count, box.d))) / counts
    points = np.clip(box.lo + places * box.widths, box.lo, box.hi)
    return np.concatenate([sample_points(box, count), points])


def error_of(built: Built | Network, target: Target, points: np.ndarray | None = None) -> float:
    """The engine's error; for max_affine, whose reference is fast, that of the reference."""
    measure = reference_error if built.construction == "max_affine" else error_at
    return measure(built.program, target, hard_points(target, built) if points is None else points)


def size_of(built: Built | Network) -> int:
    """The argument max_anchors limits the keys that queries meet, and the features of a softmax."""
    features = sum(len(layer.channels) for layer in built.program.layers if isinstance(layer, Softmax))
    return built.program.num_anchors + features


def with_heads(build, heads: int | None) -> dict[str, int | None]:
    return {} if build is max_affine else {"heads": heads}


@ALL
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(asked=random_requests(0.02, 0.6), dtype=DTYPES, heads=HEADS)
def test_bound_holds_on_random_expressions(build, asked, dtype, heads):
    (target, eps), most = asked, 20_000 if build is max_affine else 4_000
    try:
        built = build(target, eps=eps, dtype=dtype, max_anchors=most, **with_heads(build, heads))
    except BoundNotMet:
        assume(False)
    assert size_of(built) <= most
    assert error_of(built, target) <= built.bound.value <= eps


@ALL
@settings(max_examples=40, deadline=None)
@given(
    exponent=st.floats(-2, 8),
    count=st.integers(1, 60),
    slope=st.floats(-5, 5),
    dtype=DTYPES,
    heads=HEADS,
    num_step_anchors=st.sampled_from([None, 2, 3, 9, 40]),
)
def test_bound_holds_at_any_temperature(build, exponent, count, slope, dtype, heads, num_step_anchors):
    """β from too soft to 10⁸, and to 10⁸ times what is sufficient."""
    target = CallableTarget(lambda p: slope * p[:, 0] + 1, Box.parse([(-1, 2)]), abs(slope))
    how = {"points_per_axis": count, "dtype": dtype, **with_heads(build, heads)}
    how |= {} if build is max_affine else {"num_step_anchors": num_step_anchors}
    sufficient = dict(build(target, **how).parameters)["beta"]
    for beta in {sufficient * 10.0**exponent, 10.0**exponent}:
        built = build(target, beta=beta, **how)
        assert error_of(built, target) <= built.bound.value


@pytest.mark.parametrize(
    ("build", "heads"),
    [(max_affine, None), (two_layer, None), (two_layer, 3), (attention_softmax, None), (attention_softmax, 3)],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("text", "box"), [("3*x - 2*y", [(-1, 1), (0, 5)]), ("x", [(0, 1)]), ("abs(x) + y + z", [(-1, 1)] * 3)]
)
def test_bound_is_tight_on_linear_targets(build, text, box, dtype, heads):
    """Linear functions are the worst case: the error reaches the whole variation at a corner of a cell."""
    target = target_of(text, *box)
    eps = 0.8 if len(box) == 3 else 0.3 * len(box)
    built = build(target, eps=eps, dtype=dtype, **with_heads(build, heads))
    claims = [(built, built.bound.value)]
    if build is max_affine:
        net = attnc.compile(text, box, eps=eps, dtype=dtype, construction="max_affine")
        claims.append((net, net.certificate.bound))
        assert net.certificate.bound <= 3 * net.certificate.observed
    for made, bound in claims:
        error = error_of(made, target)
        assert error <= bound <= eps
        assert bound <= (1.1 if heads is None or dtype == "float64" else 3) * error


@ALL
def test_too_small_an_eps_names_the_size_before_allocating(build, monkeypatch):
    for kind, makes in ((Steps, "layers"), (CellHead, "embedding")):
        monkeypatch.setattr(kind, makes, lambda *_: pytest.fail("built something large"))
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    with pytest.raises(BoundNotMet, match="anchors") as caught:
        build(target, eps=1e-4)
    assert caught.value.eps == 1e-4 < caught.value.bound < 1
    assert "max_anchors=2,000,000" in str(caught.value)
    needed = int(str(caught.value).split("about ")[1].split(" anchors")[0].replace(",", ""))
    assert 0.5 < needed / (6 / 1e-4) ** 2 < 2  # Σ slopes × h/2 = eps at h = eps


@ALL
@pytest.mark.parametrize("limits", [{"max_anchors": 900}, {"max_bytes": 500_000}])
@pytest.mark.parametrize("heads", [None, 4])
def test_a_refusal_carries_the_best_network(build, limits, heads):
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    with pytest.raises(BoundNotMet, match="max_bytes" if "max_bytes" in limits else "max_anchors=900") as caught:
        build(target, eps=0.02, **with_heads(build, heads), **limits)
    refusal = caught.value
    built = refusal.network
    assert built is refusal.network
    assert 200 < size_of(built) <= 900 or "max_bytes" in limits
    assert error_of(built, target) <= built.bound.value <= 1.02 * refusal.bound
    assert set(refusal.worst_box) == {"x", "y"}
    assert all(-3 <= lo < hi <= 3 for lo, hi in refusal.worst_box.values())


def test_the_best_network_of_a_refused_compilation_has_a_certificate():
    with pytest.raises(BoundNotMet) as caught:
        attnc.compile("sin(x)+cos(y)", [(-3, 3)] * 2, eps=0.01, max_anchors=900, construction="max_affine")
    refusal = caught.value
    net = refusal.network
    assert net is refusal.network
    assert size_of(net) <= 900
    assert net.certificate.observed <= net.certificate.bound <= 1.02 * refusal.bound


BUMPS = [two_layer, attention_softmax]


@ALL
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize(
    ("lo", "width", "zero", "cells", "count"),
    [(1e9, 1, 1e9, 100, 5000), (1e16, 16, 0, 20, 50), (1e16, 16, 0, 100, 50), (1e16, 16, 1e16, 20, 50)],
)
def test_a_box_far_from_zero_is_right(build, heads, lo, width, zero, cells, count):
    """Cancellation in scale·x + offset, and in K(scale·x + offset − E), is part of the bound."""
    target = CallableTarget(lambda p: p[:, 0] - zero, Box.parse([(lo, lo + width)]), 1.0)
    built = build(target, points_per_axis=cells, **with_heads(build, heads))
    assert error_of(built, target, np.linspace(lo, lo + width, count)[:, None]) <= built.bound.value


@ALL
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
    target = random_sequence(n, d, k, seed)
    own = with_heads(build, heads) | ({} if build is attention_softmax else {"margin": margin})
    own |= {} if build is max_affine else {"beta": 64 * 10.0**exponent}
    built = build(target, points_per_axis=4 if n * d == 4 and build is not max_affine else 5, **own)
    assert error_of(built, target, hard_points(target, built, 400 if build is max_affine else 200)) <= built.bound.value
    variation = built.bound.terms[0].value
    assert built.bound.value <= variation * (1 + (1e-3 if build is two_layer else 1e-6))


@pytest.mark.parametrize("size", [{"points_per_axis": 7}, {"eps": 0.7, "centres": "adaptive"}])
@pytest.mark.parametrize("build", [max_affine, max_affine_cross])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_positions_can_be_written_by_the_read_out_alone(build, size, dtype):
    """No channel then depends on the position, all tokens but the query are centres, and the bound is the same."""
    target = random_sequence(2, 1, 2, seed=3)
    with_channels = build(target, dtype=dtype, **size)
    without = build(target, dtype=dtype, position_channels=False, **size)
    layers = (*without.program.layers, *without.program.memory)
    assert not any("position" in name for layer in layers for name in getattr(layer, "channels", ()))
    assert any("position" in name for layer in with_channels.program.layers for name in getattr(layer, "channels", ()))
    assert 2 * without.program.num_anchors == with_channels.program.num_anchors
    assert without.program.num_parameters < with_channels.program.num_parameters
    assert without.bound.value <= with_channels.bound.value
    points = sample_points(target.box, 400)
    assert error_at(without.program, target, points) <= without.bound.value
    assert error_at(without.program, target, points) > 0.2 * without.bound.value or "centres" in size
    # Swapped tokens of the input are other numbers of the same query: only the embedding tells them apart.
    inputs = np.random.default_rng(0).uniform(-1, 1, (50, 2, 1))
    assert np.abs(without.program(inputs) - without.program(inputs[:, ::-1])).max() > 0.1
