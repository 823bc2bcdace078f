"""Adaptive centres: sound wherever scores tie, tight, and fewer than a grid has."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import max_affine, max_affine_cross
from attnc.constructions.fitting.adaptive_partition import AdaptivePartition
from attnc.errors import BoundNotMet, InputError
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget
from constructions.errors import error_at, random_requests, random_sequence, target_of
from constructions.fitting.searching import partition_of

ROOT = Path(__file__).parents[3]


def borders(partition: AdaptivePartition, count: int = 300) -> np.ndarray:
    """Points where the best score changes hands, found by bisection between random points, and corners of leaves."""
    box, head = partition.target.box, partition.head
    rng = np.random.default_rng(2)

    def best(points: np.ndarray) -> np.ndarray:
        y = points * head.scale + head.offset
        return np.argmax(head.cells.scores(y), axis=1)

    a, b = box.lo + rng.random((2, count, box.d)) * box.widths
    first = best(a)
    for _ in range(60):
        middle = a / 2 + b / 2
        same = (best(middle) == first)[:, None]
        a, b = np.where(same, middle, a), np.where(same, b, middle)
    leaves = partition.leaves
    chosen = rng.integers(0, leaves.count, count)
    side = rng.random((count, box.d)) < 0.5
    corners = leaves.lattice.preimage(leaves.bottom[chosen], leaves.bottom[chosen]).mid
    corners = np.where(side, corners, leaves.lattice.preimage(leaves.top[chosen], leaves.top[chosen]).mid)
    nudge = rng.choice([0.0, 1e-15, -1e-15, 1e-9, -1e-9, 1e-4, -1e-4], (count, box.d)) * box.widths
    return np.clip(np.concatenate([a, b, corners + nudge]), box.lo, box.hi)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(asked=random_requests(), dtype=st.sampled_from(["float64", "float32"]))
def test_bound_holds_on_random_expressions(asked, dtype):
    target, eps = asked
    try:
        built = max_affine(target, eps=eps, centres="adaptive", dtype=dtype, max_anchors=3_000)
    except BoundNotMet:
        assume(False)
    borders_found = borders(partition_of(target, eps, dtype=dtype, max_anchors=3_000))
    tried = np.concatenate([sample_points(target.box, 500), borders_found])
    assert error_at(built.program, target, tried) <= built.bound.value <= eps


@settings(max_examples=12, deadline=None)
@given(
    d=st.integers(1, 3),
    frequency=st.floats(0.5, 4),
    lo=st.floats(-5, 5),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_bound_holds_for_callables(d, frequency, lo, dtype):
    """|∇ sin(w·x)| = |w|; the second output is a distance, and has a kink."""
    w = frequency * np.arange(1, d + 1) / d

    def wave(points):
        return np.stack([np.sin(points @ w), np.abs(points[:, 0] - lo - 0.4)], axis=1)

    target = CallableTarget(wave, Box.parse([(lo, lo + 1)] * d), max(1.0, float(np.linalg.norm(w))))
    eps = 0.25 * target.lipschitz
    built = max_affine(target, eps=eps, centres="adaptive", dtype=dtype)
    points = np.concatenate([sample_points(target.box, 400), borders(partition_of(target, eps, dtype=dtype))])
    assert error_at(built.program, target, points) <= built.bound.value <= eps


@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 2), d=st.integers(1, 2), margin=st.floats(0.05, 60), seed=st.integers(0, 99))
def test_bound_holds_for_sequences(n, d, margin, seed):
    target = random_sequence(n, d, 2, seed)
    eps = 0.5 * target.lipschitz
    built = max_affine(target, eps=eps, centres="adaptive", margin=margin)
    points = np.concatenate([sample_points(target.box, 400), borders(partition_of(target, eps, margin=margin))])
    assert error_at(built.program, target, points) <= built.bound.value <= eps


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_cross_attention_of_two_inputs(dtype):
    """y of the second input is on the side of the keys, multiplied out: its rounding is another, and its bound too."""
    target = SequenceTarget(lambda X, Y: np.tanh(3 * X * Y[:, :1]), (2, 1), (1, 1), (1, 2), lipschitz=3 * math.sqrt(8))
    eps = 2.0
    built = max_affine_cross(target, eps=eps, centres="adaptive", dtype=dtype)
    partition = partition_of(target, eps, dtype=dtype)
    assert built.program.memory
    assert partition.leaves.num_query_axes == 2 < target.box.d == 3
    points = np.concatenate([sample_points(target.box, 400), borders(partition)])
    assert error_at(built.program, target, points) <= built.bound.value <= eps
    with pytest.raises(InputError, match="one input"):
        max_affine(target, eps=eps, centres="adaptive")


def test_cross_attention_to_a_constant_memory():
    target = target_of("exp(-50*(x**2+y**2))", (-1, 1), (-1, 1))
    here = max_affine(target, eps=0.1, centres="adaptive")
    there = max_affine_cross(target, eps=0.1, centres="adaptive")
    points = sample_points(target.box, 500)
    assert there.program.num_anchors == here.program.num_anchors
    assert there.bound == here.bound
    assert np.array_equal(here.program(points), there.program(points))


@pytest.mark.parametrize(
    ("text", "sides", "eps", "at_least"),
    [
        ("sqrt(x)", [(0, 1)], 0.005, 150),
        ("1/(1+25*x**2)", [(-1, 1)], 0.005, 3),
        ("sin(x)", [(-3, 3)], 0.01, 1.4),
        ("x", [(0, 1)], 0.01, 1),
        ("exp(-50*(x**2+y**2))", [(-1, 1)] * 2, 0.05, 25),
        ("tanh(20*(x-y))", [(-1, 1)] * 2, 0.3, 10),
        ("sqrt(x+y+0.001)", [(0, 1)] * 2, 0.05, 40),
        ("sin(x)+cos(y)", [(-3, 3)] * 2, 0.1, 2),
        ("3*x - 2*y", [(-1, 1), (0, 5)], 0.2, 0.98),
        ("exp(-20*(x**2+y**2+z**2))", [(-1, 1)] * 3, 0.25, 25),
    ],
)
def test_fewer_centres_than_a_grid_and_a_tight_bound(text, sides, eps, at_least):
    target = target_of(text, *sides)
    built = max_affine(target, eps=eps, centres="adaptive")
    grid = max_affine(target, eps=eps)
    assert grid.program.num_anchors >= at_least * built.program.num_anchors
    points = np.concatenate([sample_points(target.box, 2000), borders(partition_of(target, eps), 500)])
    error = error_at(built.program, target, points)
    assert error <= built.bound.value <= eps
    assert built.bound.value <= (1.1 if len(sides) == 1 else 1.5) * error


def test_float32_is_tight_where_it_can_be():
    target = target_of("sqrt(x)", (0, 1))
    built = max_affine(target, eps=0.01, centres="adaptive", dtype="float32")
    points = np.concatenate(
        [np.geomspace(1e-9, 1, 3000)[:, None], borders(partition_of(target, 0.01, dtype="float32"))]
    )
    error = error_at(built.program, target, points)
    assert error <= built.bound.value <= 0.01 <= 1.5 * error
    assert built.program.num_anchors < 60  # 1/(2·eps) = 50


def test_steep_at_zero():
    """Smallest cells of 4e-10: their scores must be told apart beside those of cells a million times as wide."""
    target = target_of("sqrt(x)", (0, 1))
    built = max_affine(target, eps=1e-5, centres="adaptive")
    points = np.concatenate([[0.0], np.geomspace(1e-14, 1, 2000)])[:, None]
    error = error_at(built.program, target, points)
    assert error <= built.bound.value <= 1e-5 <= 1.1 * error
    assert built.program.num_anchors < 55_000


def test_a_refusal_names_the_size_and_carries_a_network():
    target = target_of("sin(x)+cos(y)", (-3, 3), (-3, 3))
    with pytest.raises(BoundNotMet, match="max_anchors=900") as caught:
        max_affine(target, eps=0.01, centres="adaptive", max_anchors=900)
    refusal = caught.value
    built = refusal.network
    assert built is refusal.network
    assert 450 < built.program.num_anchors <= 900
    assert 0.01 < built.bound.value <= 1.5 * refusal.bound
    needed = int(str(refusal).split("about ")[1].split(" anchors")[0].replace(",", ""))
    assert 0.5 < needed / 162_000 < 2
    with pytest.raises(BoundNotMet, match="max_bytes=100,000"):
        max_affine(target, eps=0.01, centres="adaptive", max_bytes=100_000)


def test_float32_refuses_what_it_cannot_tell_apart():
    target = target_of("x**2", (1000, 1001))
    with pytest.raises(BoundNotMet, match="float32") as caught:
        max_affine(target, eps=2, centres="adaptive", dtype="float32")
    built = caught.value.network
    assert error_at(built.program, target, sample_points(target.box, 500)) <= built.bound.value


def test_constants_need_one_cell():
    built = max_affine(target_of("0*x + 3", (-1, 1)), eps=0.1, centres="adaptive")
    assert built.program.num_anchors == 1
    assert built.bound.value < 1e-10


def test_networks_by_the_public_api():
    net = attnc.compile("exp(-50*x**2)", [(-1, 1)], eps=0.02, centres="adaptive")
    assert net.parameters["centres"] == "adaptive"
    assert net.certificate.observed <= net.certificate.bound <= 0.02 <= 1.5 * net.certificate.observed


def test_a_smaller_domain_needs_fewer_cells(capsys):
    """The Lipschitz corollary: a third of the side, a ninth of the cells for functions that vary evenly."""
    example = runpy.run_path(str(ROOT / "examples/smaller_domain.py"))
    example["main"]()
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(example["FUNCTIONS"])
    for line in shown[2:]:
        grid, adaptive = (float(part) for part in line.rsplit("   ", 1)[1].split(" / "))
        assert grid > 8
        assert adaptive > 1.5
