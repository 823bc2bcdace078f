"""Selection leaves are never below the error at a point, for exact and for perturbed weights, and tight for hard β."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import max_affine, max_affine_cross, truncated_linear
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import InputError
from attnc.proofs.cells.branching import branch_and_bound
from attnc.proofs.cells.kind import SHARP
from attnc.proofs.kinds.selection import SelectionKind
from attnc.proofs.observed import sample_points
from attnc.proofs.rounding.program import roundings
from attnc.proofs.rounding.stage import rounding_bounds, score_errors
from attnc.proofs.stages.extraction import OneStage, stages
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget
from attnc.targets.linear import TruncatedLinear
from attnc.targets.target import Target
from proofs.comparisons import errors_at
from proofs.small_stages import exact_errors, random_stage
from strategies.reference import precision

TEXTS = {
    1: ("x*x", "abs(x - 0.1)", "sin(5*x)", "sqrt(abs(x))", "2.5"),
    2: ("x*y", "max(x, y)", "sin(3*x) + y", "exp(x - y)*x"),
    3: ("x*y - z", "abs(x) + abs(y) + abs(z)"),
}


def target_of(text: str, d: int, ends: tuple[float, float] = (-1, 1)) -> Target:
    names = "xyz"[:d]
    return attnc.as_target("+".join([f"({text})", *(f"0*{name}" for name in names)]), dict.fromkeys(names, ends))


def random_boxes(rng: np.random.Generator, d: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inside [−1, 1]^d, of all sizes and shapes."""
    radii = 10.0 ** rng.uniform(-5, 0, (count, d)) * rng.choice([1.0, 0.3, 1e-3], (count, d))
    return rng.uniform(-1, 1, (count, d)) * (1 - radii), radii


def hard_points(rng: np.random.Generator, stage: OneStage, centre: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Corners, the centre, anywhere, and where two scores are level."""
    d = len(centre)
    points = [centre, centre + radius * rng.choice([-1, 1], d), *(centre + radius * rng.uniform(-1, 1, (2, d)))]
    for head in stage.heads:
        k, j = rng.integers(0, len(head.offsets.mid), 2)
        step = head.slopes.mid[k] - head.slopes.mid[j]
        if step.any():
            gap = head.offsets.mid[k] - head.offsets.mid[j] + step @ centre
            points.append(centre - step * gap / (step @ step))
    return np.clip(points, centre - radius, centre + radius)


@settings(max_examples=80)
@given(seed=st.integers(0, 10**6), d=st.sampled_from([1, 2, 2, 3]), heads=st.sampled_from([1, 1, 1, 2]))
def test_no_point_of_a_box_is_farther_off(seed, d, heads):
    rng = np.random.default_rng(seed)
    stage = random_stage(rng, d, num_heads=heads, gates=bool(rng.random() < 0.3))
    target = target_of(rng.choice(TEXTS[d]), d)
    centres, radii = random_boxes(rng, d, 5)
    delta = float(rng.choice([0.0, 0.0, 1e-3, 5.0]))
    bounds = SelectionKind(stage, target).over(centres, radii, [delta] * heads)
    with precision(150):
        for centre, radius, bound in zip(centres, radii, bounds, strict=True):
            for point in hard_points(rng, stage, centre, radius):
                shifts = [delta * rng.choice([-1.0, 0.0, 1.0], len(head.offsets.mid)) for head in stage.heads]
                (error,) = exact_errors(stage, target.expression, point, shifts)
                assert error.is_finite()
                assert not error > arb(float(bound[0]))


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), d=st.sampled_from([1, 2, 3]), heads=st.sampled_from([1, 1, 2]))
def test_no_box_has_a_bound_below_the_least_that_is_stated(seed, d, heads):
    rng = np.random.default_rng(seed)
    stage = random_stage(rng, d, num_heads=heads, gates=bool(rng.random() < 0.3))
    kind = SelectionKind(stage, target_of(rng.choice(TEXTS[d]), d))
    centres, radii = random_boxes(rng, d, 20)
    least, found = kind.least(centres), kind.bounds(centres, radii, SHARP).upper.max(axis=1)
    assert (least <= found * (1 + 1e-9)).all()
    assert least.any()


def proved(stage: OneStage, target: Target, observed: float, outputs=None, goal: float = 1.1) -> float:
    """Halve cells until the bound is within `goal` of the error that was observed."""
    kind = SelectionKind(stage, target, outputs=outputs)
    return branch_and_bound([kind], target.box, observed=observed, tolerance=goal - 1).bound


def check_close(program, target: Target, most: float, goal: float = 1.1) -> None:
    """The proved bound is between the error seen at samples and `most` times it."""
    points = sample_points(target.box, 20_000)
    observed = float(errors_at(NumpyEngine(program), target, points).max())
    assert observed <= proved(stages(program)[0][0], target, observed, goal=goal) <= most * observed


@pytest.mark.parametrize(
    ("text", "box", "counts", "dtype"),
    [
        ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, (100, 100), "float64"),
        ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, (100, 100), "float32"),
        ("3*x-2*y", {"x": (-1, 1), "y": (0, 5)}, (33, 40), "float64"),
        ("sqrt(x)", {"x": (0, 1)}, (300,), "float64"),
        ("abs(x)+y+z", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}, (7, 8, 9), "float64"),
    ],
)
def test_max_affine_is_proved_to_what_is_seen(text, box, counts, dtype):
    target = attnc.as_target(text, box)
    check_close(max_affine(target, points_per_axis=counts, dtype=dtype).program, target, 1.15)


def test_adaptive_centres_callables_and_clips():
    target = attnc.as_target("exp(-20*(x**2+y**2))", {"x": (-2, 2), "y": (-2, 2)})
    check_close(max_affine(target, eps=0.05, centres="adaptive").program, target, 1.2)
    bend = CallableTarget(lambda x: np.abs(x).sum(axis=1), Box.parse([(-1, 1)] * 2), lipschitz=2**0.5)
    check_close(max_affine(bend, points_per_axis=20).program, bend, 1.5, goal=1.5)
    clip = TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=[(-0.5, 1.5)])
    check_close(truncated_linear(clip, num_anchors=33, beta=1e4).program, clip, 1.2)


def test_sequences_position_by_position():
    pair = SequenceTarget(lambda X, Y: X * Y.mean(1, keepdims=True), (2, 1), (1, 1), lipschitz=2**0.5)
    program = max_affine_cross(pair, points_per_axis=(5, 4, 3)).program
    points = sample_points(pair.box, 5000)
    errors = np.abs(NumpyEngine(program)(*pair.split(points)).reshape(len(points), -1) - pair(points))
    for stage, outputs in stages(program):
        observed = float(errors[:, outputs].max())
        assert observed <= proved(stage, pair, observed, outputs, goal=1.6) <= 1.6 * observed


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_with_the_rounding_of_the_sums_it_covers_what_engines_compute(dtype):
    """In float32 the scores of a hard head are off by more than 1, and the bound is hardly larger for it."""
    target = attnc.as_target("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)})
    program = max_affine(target, points_per_axis=(64, 64), dtype=dtype, beta=2.0**16).program
    ((stage, _),), (rounding,) = stages(program), roundings(program)
    N = 64
    middles = (np.arange(N) + 0.5) * 6 / N - 3
    centres = np.stack(np.meshgrid(middles, middles, indexing="ij"), axis=-1).reshape(-1, 2)
    radii = np.full(centres.shape, 3 / N)
    deltas = score_errors(rounding, centres, radii)
    assert deltas[0] > (1 if dtype == "float32" else 1e-9)
    bounds = SelectionKind(stage, target).over(centres, radii, deltas)
    total = bounds + rounding_bounds(stage, rounding, centres, radii, for_any_weights=True)
    plain = SelectionKind(stage, target).bounds(centres, radii, SHARP).upper
    assert total.max() <= 1.1 * plain.max()
    rng = np.random.default_rng(1)
    edges = np.round((centres + 3) / 6 * N) * 6 / N - 3 + rng.choice([0, 1e-12, -1e-7, 1e-4], centres.shape)
    for points in (edges, centres + radii * rng.uniform(-1, 1, centres.shape)):
        cell = np.clip(np.floor((points + 3) / 6 * N), 0, N - 1).astype(int)
        error = np.abs(NumpyEngine(program)(points)[:, None] - target(points))
        assert (error <= total[cell[:, 0] * N + cell[:, 1]]).all()


def test_crowds_and_empty_batches():
    rng = np.random.default_rng(0)
    stage = random_stage(rng, 2)
    target = target_of("x*y", 2)
    assert SelectionKind(stage, target).bounds(np.zeros((0, 2)), np.zeros((0, 2)), SHARP).upper.shape == (0, 1)
    soft = attnc.as_target("x+y", {"x": (-1, 1), "y": (-1, 1)})
    program = max_affine(soft, points_per_axis=(80, 80), beta=1e-6).program  # all weights are nearly equal
    bounds = SelectionKind(stages(program)[0][0], soft).bounds(*random_boxes(rng, 2, 50), SHARP).upper
    assert (bounds < 4.1).all()
    assert (bounds >= 0.9).any()
    with pytest.raises(InputError, match="the stage has 1 outputs, but 2 outputs of the target"):
        SelectionKind(stage, target, outputs=np.array([0, 0])).bounds(np.zeros((1, 2)), np.ones((1, 2)), SHARP)
    with pytest.raises(ValueError, match="longer"):
        SelectionKind(stage, target).over(np.zeros((1, 2)), np.ones((1, 2)), [0.0, 0.0])
