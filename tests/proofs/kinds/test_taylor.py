"""Taylor leaves contain the values of the stage at any point of the box and for all weights; and they are tight."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb

from attnc.errors import InputError
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.proofs.cells.dyadic import cell_boxes, cells
from attnc.proofs.cells.kind import Bounds
from attnc.proofs.kinds.taylor import head_model, taylor_bounds
from attnc.proofs.stages.extraction import OneStage
from attnc.proofs.taylor.moments import KeyMoments
from attnc.proofs.taylor.polynomials import layout
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.taylor import taylor
from proofs.small_stages import (
    enclosed,
    exact_errors,
    head_of,
    head_value,
    random_arrays,
    seen_error,
    spectral_stage,
    stage_of,
    stage_values,
    weights_within,
)
from strategies.reference import monomial, precision

KINDS = ("wide", "cluster", "gauss", "grid", "gate")


def bounds_of(stage: OneStage, f: Expression, centres: np.ndarray, radii: np.ndarray, order: int) -> Bounds:
    return taylor_bounds(stage, taylor(f, centres, radii, order), centres, radii, order)


def taus(rng: np.random.Generator, d: int) -> list[np.ndarray]:
    """The centre, corners, and points inside and on edges."""
    inside = rng.uniform(-1, 1, (2, d))
    edge = np.where(rng.random(d) < 0.5, rng.choice([-1.0, 1.0], d), inside[0])
    return [np.zeros(d), *rng.choice([-1.0, 1.0], (3, d)), edge, *inside]


def ball_point(c: np.ndarray, r: np.ndarray, tau: np.ndarray) -> list[arb]:
    return [arb(a) + arb(b) * arb(t) for a, b, t in zip(c.tolist(), r.tolist(), tau.tolist(), strict=True)]


def random_boxes(rng: np.random.Generator, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From far too large to tiny; most of such a size that scores move by some units."""
    n, d = int(rng.integers(1, 5)), slopes.shape[1]
    centres = rng.uniform(-1.2, 1.2, (n, d))
    radii = 10.0 ** rng.uniform(-5, 0.3, (n, 1)) * rng.uniform(0.2, 1, (n, d))
    if rng.random() < 0.7:
        radii *= rng.uniform(0.1, 20) / max(1.0, float(np.abs(slopes).max() * radii.max()))
    return centres, radii


def check_model(
    head: SoftHead, inside: SoftHead, centres: np.ndarray, radii: np.ndarray, order: int, seed: int
) -> None:
    """|A − v0 − Q| ≤ error in 900 bits: no slack but the model's own."""
    rng, d = np.random.default_rng(seed), centres.shape[1]
    model = head_model(KeyMoments.of(head), centres, radii, order)
    exponents = layout(len(model.axes), order).exponents.tolist()
    with precision(900):
        for box in range(len(centres)):
            for tau in taus(rng, d):
                values = head_value(inside, ball_point(centres[box], radii[box], tau))
                t = [arb(float(tau[axis])) for axis in model.axes]
                for output, value in enumerate(values):
                    error = float(model.error[output, box])
                    if error == np.inf:
                        continue
                    terms = zip(model.quotient[:, output, box].tolist(), exponents, strict=True)
                    q = sum((arb(c) * monomial(t, row) for c, row in terms), arb(float(model.shift[output, box])))
                    assert not abs(value - q) > arb(error)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_models_contain_the_head(kind, seed):
    """For stored weights, and for all weights within the radii."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    d = int(rng.integers(2, 4)) if kind == "grid" else int(rng.integers(1, 4))
    unknown = 10.0 ** rng.uniform(-13, -6) if seed % 3 == 0 else 0.0
    head = head_of(random_arrays(rng, kind, d), unknown)
    inside = weights_within(rng, head)
    check_model(head, inside, *random_boxes(rng, inside.slopes.mid), int(rng.integers(1, 7)), seed)


ALONE = {
    # Values of 0 on steep keys: the numerator is known well, the denominator is not.
    "denominator": (np.array([[-10.0], [10], [-1], [1]]), np.zeros(4), np.array([[0.0], [0], [-1], [1]]), None),
    # A light, steep key whose value is x alone: all that is cut off comes from the gate.
    "gate": (np.array([[0.0], [10]]), np.array([0.0, -14]), np.zeros((2, 1)), np.array([[[0.0]], [[1e6]]])),
    # One light key with a large value: the terms that are cut off have one sign at a corner.
    "grid": (
        np.array([[0.0, 0], [0, 1], [1, 0], [1, 1]]),
        np.array([0.0, -7, -7, -14]),
        np.array([[0.0], [0], [0], [1e6]]),
        None,
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_every_error_is_counted_where_it_is_alone(name):
    head = head_of(ALONE[name])
    radii = np.geomspace(0.01, 1.5, 12)[:, None] * np.ones(head.slopes.mid.shape[1])
    for order in (1, 2, 3, 4):
        check_model(head, head, np.zeros(radii.shape), radii, order, order)


@pytest.mark.parametrize("seed", range(8))
def test_models_contain_grids_of_unsure_weights(seed):
    """Weights known to 1e-9 only: the bound is made of that, so that half of it would not do."""
    rng = np.random.default_rng(seed)
    slopes, offsets, values, _ = random_arrays(rng, "grid", 2)
    moved = offsets + 0.99e-9 * np.abs(offsets) * np.sign(offsets - np.median(offsets))
    head, inside = head_of((slopes, offsets, values, None), 1e-9), head_of((slopes, moved, values, None))
    centres = rng.uniform(-1, 1, (3, 2))
    check_model(head, inside, centres, np.full((3, 2), 1e-3 / np.abs(slopes).max()), 4, seed)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_for_the_whole_stage(seed):
    """Two heads, a gate, constants and slopes of the read-out, two outputs, against an expression."""
    rng = np.random.default_rng(seed)
    f = Expression.parse("(sin(3*x)*y + 2, exp(x - y**2))")
    arrays = [random_arrays(rng, kind, 2) for kind in ("gauss", "gate")]
    arrays = [(s, c, np.repeat(v, 2, axis=1)[:, :2], None if g is None else g[:, [0, 0]]) for s, c, v, g in arrays]
    stage = OneStage(tuple(map(head_of, arrays)), enclosed(rng.normal(size=2)), enclosed(rng.normal(size=(2, 2))))
    centres, radii = random_boxes(rng, np.concatenate([part[0] for part in arrays]))
    bounds = bounds_of(stage, f, centres, radii, 4).upper
    with precision():
        for centre, radius, bound in zip(centres, radii, bounds.tolist(), strict=True):
            for tau in taus(rng, 2):
                errors = exact_errors(stage, f, ball_point(centre, radius, tau))
                assert not any(error > most for error, most in zip(errors, bound, strict=True) if most < np.inf)


CASES = [
    ("sin(x)", [(-3, 3)], 17, 12, 4),
    ("tanh(x)", [(-4, 4)], 33, 12, 5),
    ("exp(-x**2 - y**2)*sin(3*x + y)", [(-2, 2)] * 2, 23, 12, 5),
    ("sin(x)*cos(y) + z**2", [(-3, 3)] * 3, 9, 10, 3),
]


@pytest.mark.parametrize(("text", "box", "n", "order", "level"), CASES)
def test_bounds_are_tight_on_smooth_fits(text, box, n, order, level):
    stage, f = spectral_stage(text, box, n)
    index = cells(len(box), level)[::7][:60]
    centres, radii = cell_boxes(Box.parse(box), level, index)
    bounds = bounds_of(stage, f, centres, radii, order).upper.max(axis=1)
    rng = np.random.default_rng(0)
    corners = np.stack(np.meshgrid(*[np.linspace(-1, 1, 9)] * len(box)), axis=-1).reshape(-1, len(box))
    inside = np.concatenate([corners, rng.uniform(-1, 1, (100, len(box)))])
    points = centres[:, None] + radii[:, None] * inside
    flat = points.reshape(-1, len(box))
    seen = np.abs(stage_values(stage, flat) - f(flat)).reshape(len(index), -1).max(axis=1)
    worst = seen > 0.5 * seen.max()
    assert (bounds[worst] >= seen[worst]).all()
    assert np.median(bounds[worst] / seen[worst]) <= 1.02
    assert bounds.max() <= 1.05 * seen.max()


@pytest.mark.parametrize(("text", "d", "n"), [("sin(x)", 1, 17), ("sin(x) + cos(y)", 2, 17)])
def test_the_proof_rounds_little_under_strong_cancellation(text, d, n):
    box = [(-3.0, 3.0)] * d
    stage, f = spectral_stage(text, box, n)
    centres, radii = cell_boxes(Box.parse(box), 5, cells(d, 5)[:64])
    found = bounds_of(stage, f, centres, radii, 12)
    assert found.terms["remainder"].max() <= 4e-14 * np.abs(stage.heads[0].values.mid).max()


def test_far_keys_are_left_out_and_their_leak_counted():
    """A key 60 behind, with a value of 1e20: its share is 1e-6, which no rounding would explain."""
    head = head_of(([[1.0], [1.5], [0.0]], [0.0, 0.0, -60.0], [[1.0], [2.0], [1e20]], None))
    model = head_model(KeyMoments.of(head), np.array([[0.3]]), np.array([[0.01]]), 4)
    with precision():
        missed = float(abs(head_value(head, [arb(0.3)])[0] - model.shift[0, 0] - model.quotient[0, 0, 0]))
    assert 1e-7 < missed <= model.error[0, 0] <= 3 * missed


def test_hard_temperatures_within_a_cell():
    """Where one anchor wins by far, a box many times wider than the scores would allow is proved at once."""
    anchors = np.linspace(-1, 1, 9)[:, None]
    beta = 1e6
    stage = stage_of([head_of((2 * beta * anchors, -beta * anchors[:, 0] ** 2, np.sin(anchors), None))], 1)
    f = Expression.parse("sin(x)")
    centres, radii = np.array([[0.25]]), np.array([[0.12]])
    bound = bounds_of(stage, f, centres, radii, 8).upper[0, 0]
    truth = max(abs(np.sin(x) - np.sin(0.25)) for x in (0.13, 0.37))
    assert truth <= bound <= 1.011 * truth


def test_no_bound_is_infinite_not_nan():
    stage, f = spectral_stage("sin(x)", [(-3, 3)], 9)
    assert bounds_of(stage, f, np.zeros((1, 1)), np.full((1, 1), 1e3), 4).upper[0, 0] > 1
    centres, radii = np.array([[0.0], [1.0]]), np.full((2, 1), 0.1)
    bounds = bounds_of(stage, Expression.parse("abs(x)"), centres, radii, 4).upper
    assert bounds[0, 0] == np.inf
    assert np.isfinite(bounds[1, 0])
    huge = stage_of([head_of((np.array([[1e308], [-1e308]]), np.array([1e308, 0.0]), np.ones((2, 1)), None))], 1)
    assert bounds_of(huge, f, centres, radii, 4).upper.min() == np.inf


def test_radii_of_the_read_out_are_in_the_bound():
    stage, f = spectral_stage("sin(x)", [(-3, 3)], 17)
    centres, radii = np.array([[2.0]]), np.array([[0.1]])
    vague = OneStage(
        stage.heads, Enclosed(np.zeros(1), np.array([0.25])), Enclosed(np.zeros((1, 1)), np.array([[0.5]]))
    )
    tight, loose = (bounds_of(s, f, centres, radii, 8).upper[0, 0] for s in (stage, vague))
    assert tight + 0.25 + 0.5 * 2.1 <= loose <= tight + 0.25 + 0.5 * 2.1 + 1e-9


def test_polynomials_of_another_order_are_refused():
    stage, f = spectral_stage("sin(x)", [(-3, 3)], 9)
    centres, radii = np.zeros((1, 1)), np.ones((1, 1))
    with pytest.raises(InputError, match="5 coefficients"):
        taylor_bounds(stage, taylor(f, centres, radii, 4), centres, radii, 6)


def test_seen_errors_are_attained():
    """The error that a leaf reports as seen is below the error at samples and the bound, and near both."""
    box = [(-3.0, 3.0)]
    stage, f = spectral_stage("sin(x)", box, 13)
    centres, radii = cell_boxes(Box.parse(box), 4, cells(1, 4))
    found = bounds_of(stage, f, centres, radii, 10)
    truth = seen_error(stage, f, box, 20_000)
    assert 0.98 * truth <= found.seen <= 1.0001 * truth
    assert found.seen <= found.upper.max()
