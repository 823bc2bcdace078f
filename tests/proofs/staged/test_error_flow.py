"""Errors that are put in on purpose, at random, with any signs: none arrives larger than the forms say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import LARGEST
from attnc.proofs.staged.error_flow import (
    CLOSE_TO_POINTS,
    FAR_FROM_POINTS,
    MANY_PARTS,
    MOST_PARTS,
    Deviations,
    ErrorFlow,
    FlowStage,
    Readings,
    Slopes,
    bypassed,
    divided,
)
from attnc.targets.box import Box
from attnc.targets.expressions.coefficient import MINUS, UNIT, ZERO
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Node
from attnc.targets.parts.part import Combination, Multiply, Part, Source, T, Unary, function_of_t, in_order
from attnc.targets.parts.part_ranges import PartRanges, halved, sub_boxes


def tree_of(text: str) -> Node:
    return Expression.parse(text).outputs[0]


@pytest.mark.parametrize("text", ["sin(t)", "t**2", "abs(t)", "exp(-t**2)", "relu(t)**2", "1/(3 + t)", "t/(1 + t**2)"])
@pytest.mark.parametrize("error", [0.0, 1e-9, 1e-3, 0.4])
def test_slopes_hold_and_are_close(text, error):
    rng, tree = np.random.default_rng(0), tree_of(text)
    found, g = Slopes.of(tree, -1.5, 2.0, error), function_of_t(tree)
    t = np.concatenate([rng.uniform(-1.5, 2.0, 4000), np.linspace(-1.5, 2.0, 129)])
    moved = t + rng.choice([-1.0, 1.0, 0.5], len(t)) * error
    G, jump, values = (x[:, 0] for x in found.over(Interval.point(t[:, None])))
    change = (g(moved[:, None]) - g(t[:, None]))[:, 0]
    reach = G * Interval.point(moved - t) + Interval(-jump - 1e-15, jump + 1e-15)
    assert reach.contains(change).all()
    assert values.contains(g(moved[:, None])[:, 0]).all()
    assert np.abs(change).max() <= found.change[0] + 1e-15
    if 0 < error < 0.1:
        assert found.change[0] <= 1.1 * np.abs(change).max()


def test_roots_are_held_where_they_begin():
    """√t at 0: no slope, but |√t̂ − √t| ≤ √error, twice that where the held end counts."""
    tree, error = tree_of("sqrt(t)"), 1e-6
    held = (error, 2.0 - error)
    found = Slopes.of(tree, 0.0, 2.0, error, held)
    rng = np.random.default_rng(1)
    t = np.concatenate([np.geomspace(1e-12, 2.0, 3000), [0.0]])
    moved = np.clip(t + rng.uniform(-error, error, len(t)), *held)
    G, jump, _ = (x[:, 0] for x in found.over(Interval.point(t[:, None])))
    change = np.sqrt(moved) - np.sqrt(t)
    assert (np.abs(change) <= G.mag * error + jump + 1e-15).all()
    assert np.sqrt(error) <= found.change[0] <= 3 * np.sqrt(error)


def parts() -> tuple[Part, ...]:
    """(x·y, sin(x·y), x·y − sin(x·y), (x·y)·(x·y − sin(x·y))): all errors reach the last one along several ways."""
    x, y = Source(0), Source(1)
    product = Multiply(x, y)
    sine = Unary(product, tree_of("sin(t)"))
    difference = Combination(((product, UNIT), (sine, MINUS)), ZERO)
    return product, sine, difference, Multiply(difference, product)


def reads(weights: list[float], error: float = 0.0) -> Readings:
    """One combination of earlier heads."""
    return Readings(np.array([weights]), np.zeros(1), np.zeros(1), np.array([error]))


def head(
    argument: Readings, slopes: Slopes, own: float, carrier: Readings | None = None, *deviations: Deviations
) -> FlowStage:
    return FlowStage(argument, slopes, np.array([own]), np.zeros(1), carrier, deviations)


def over(ranges: PartRanges, parts: list[Part | None]) -> Interval:
    """(boxes, parts); None stands for 1."""
    found = [Interval.point(np.ones(len(ranges.boxes))) if part is None else ranges.over(part) for part in parts]
    return Interval(np.array([x.lo for x in found]).T, np.array([x.hi for x in found]).T)


def flow_of(ranges: PartRanges, own: tuple[float, float, float], widest: float) -> ErrorFlow:
    product, _, difference, last = PARTS
    x, y = (part for part in in_order([last]) if isinstance(part, Source))
    stages = []
    for argument, weights, tree, carried, adds in (
        (x, [], T, [], own[0]),
        (product, [1.0], tree_of("sin(t)"), None, own[1]),
        (difference, [1.0, -1.0], T, [1.0, 0.0], own[2]),
    ):
        slopes = Slopes.of(tree, *ranges(argument), widest)
        carrier = None if carried is None else reads(carried, widest if carried else 0.0)
        stages.append(head(reads(weights, widest if weights else 0.0), slopes, adds, carrier))
    return ErrorFlow(stages, over(ranges, [x, product, difference]), over(ranges, [y, None, product]))


PARTS = parts()


@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.05])
def test_errors_arrive_no_larger_than_their_forms(size):
    rng = np.random.default_rng(2)
    box = Box.parse({"x": (-1.0, 2.0), "y": (0.5, 1.5)})
    ranges, own = PartRanges(sub_boxes(box), box.names), (size, 0.7 * size, 2 * size)
    flow = flow_of(ranges, own, 4 * size)
    bound = float((flow.combined(np.array([[0.0, 0.0, 1.0]])).mag[:, 0] * flow.own).sum(axis=1).max())
    x, y = rng.uniform(box.lo, box.hi, (20_000, 2)).T
    x[:2000], y[:2000] = 2.0, 1.5
    d = rng.choice([-1.0, 1.0], (3, len(x))) * np.array(own)[:, None]
    product = x * y + d[0]
    found = (product - np.sin(product) - d[1]) * product + d[2]
    error = np.abs(found - (x * y - np.sin(x * y)) * x * y).max()
    assert error <= bound <= (1.1 + 10 * size) * error


def test_halves_are_the_whole():
    boxes = Interval(np.array([[0.0, 1.0], [-1.0, 2.0]]), np.array([[1.0, 3.0], [0.0, 2.5]]))
    found = halved(boxes, np.array([0, 1]))
    assert found.lo.tolist() == [[0.0, 1.0], [-1.0, 2.0], [0.5, 1.0], [-1.0, 2.25]]
    assert found.hi.tolist() == [[0.5, 3.0], [0.0, 2.25], [1.0, 3.0], [0.0, 2.5]]
    whole = sub_boxes(Box.parse({"x": (0.0, 1.0), "y": (2.0, 4.0)}))
    assert len(whole) == 4096
    assert np.isclose(np.prod(whole.hi - whole.lo, axis=1).sum(), 2.0)


def larger(u: Part, v: Part) -> tuple[Part, Part, Part]:
    """v − u, relu(v − u), and max(u, v) = u + relu(v − u)."""
    apart = Combination(((v, UNIT), (u, MINUS)), ZERO)
    gate = Unary(apart, tree_of("relu(t)"))
    return apart, gate, Combination(((u, UNIT), (gate, UNIT)), ZERO)


@pytest.mark.parametrize("own", [(1e-3, 1e-3, 1e-3, 0.0), (1e-3, 3e-3, 2e-3, 1e-5)])
def test_of_a_maximum_one_error_counts(own):
    """max(max(x², sin(y)), exp(x)): whichever is largest, there is the error of one, and of two gates."""
    x, y = Source(0), Source(1)
    first, second, third = Unary(x, tree_of("t**2")), Unary(y, tree_of("sin(t)")), Unary(x, tree_of("exp(t)"))
    apart, gate, inner = larger(first, second)
    outer_apart, outer_gate, _ = larger(inner, third)
    box = Box.parse({"x": (-2.0, 2.0), "y": (-1.0, 3.0)})
    ranges = PartRanges(Interval(box.lo[None], box.hi[None]), box.names)
    stages = []
    for part, argument, weights, adds in (
        (first, x, [], own[0]),
        (second, y, [0.0], own[1]),
        (third, x, [0.0, 0.0], own[2]),
        (gate, apart, [-1.0, 1.0, 0.0], own[3]),
        (outer_gate, outer_apart, [-1.0, 0.0, 1.0, -1.0], own[3]),
    ):
        assert isinstance(part, Unary)
        error = 6e-3 * any(weights)
        stages.append(head(reads(weights, error), Slopes.of(part.tree, *ranges(argument), error), adds))
    flow, output = ErrorFlow(stages, over(ranges, [x, y, x, apart, outer_apart])), np.array([[1.0, 0.0, 0.0, 1.0, 1.0]])
    bent = bypassed(stages, output)
    assert bent == [3, 4]
    bound = float((flow.sizes(output, bent) * flow.own).sum(axis=3).max())
    assert bound == pytest.approx(max(own[:3]) + 2 * own[3], rel=1e-6)
    assert bound < 0.7 * float((flow.combined(output).mag[:, 0] * flow.own).sum(axis=1).max())

    rng = np.random.default_rng(3)
    at = rng.uniform(box.lo, box.hi, (20_000, 2)).T
    d = rng.choice([-1.0, 1.0], (5, at.shape[1])) * np.array([*own, own[3]])[:, None]
    u, v, w = at[0] ** 2, np.sin(at[1]), np.exp(at[0])
    inner_found = u + d[0] + np.maximum(v + d[1] - u - d[0], 0.0) + d[3]
    found = inner_found + np.maximum(w + d[2] - inner_found, 0.0) + d[4]
    error = np.abs(found - np.maximum(np.maximum(u, v), w)).max()
    assert 0.99 * bound <= error <= bound * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_slopes_at_their_ends_dominate_all_between(seed):
    """Heads at random, each reading those before, over boxes where the slopes are wide."""
    rng = np.random.default_rng(seed)
    functions = ("relu(t)", "abs(t)", "sin(3*t)", "t**2", "relu(t)")
    box = Box.parse({"x": (-1.0, 2.0), "y": (0.5, 1.5)})
    ranges = PartRanges(halved(Interval(box.lo[None], box.hi[None]), 0), box.names)
    sources, stages, known, arguments = [Source(0), Source(1)], list[FlowStage](), list[Part](), list[Part]()
    for text in functions:
        weights = rng.choice([-1.0, 1.0], len(known)).tolist()
        signs = [UNIT if weight > 0 else MINUS for weight in weights]
        terms = [(sources[0], UNIT), (sources[1], MINUS), *zip(known, signs, strict=True)]
        argument = Combination(tuple(terms), ZERO)
        part = Unary(argument, tree_of(text))
        slopes = Slopes.of(part.tree, *ranges(argument), 1e-3)
        stages.append(head(reads(weights, 1e-3), slopes, float(rng.uniform(0.5, 1.0))))
        known.append(part)
        arguments.append(argument)
    t, output = over(ranges, arguments), np.ones((1, 5))
    flow = ErrorFlow(stages, t)
    bounds = (flow.sizes(output, bypassed(stages, output))[:, 0] * flow.own).sum(axis=2).max(axis=0)
    whole = (flow.combined(output).mag[:, 0] * flow.own).sum(axis=1)
    G = [stage.slopes.over(t[:, [number]])[0][:, 0] for number, stage in enumerate(stages)]
    worst = np.zeros(len(bounds))
    for _ in range(3000):
        sigma: list[np.ndarray] = []
        for number, stage in enumerate(stages):
            slope = np.where(
                rng.random(2) < 0.5, rng.choice([G[number].lo, G[number].hi]), rng.uniform(G[number].lo, G[number].hi)
            )
            weights = stage.arguments.weights[0]
            form = sum((weight * sigma[i] for i, weight in enumerate(weights)), np.zeros((2, 5)))
            sigma.append(form * slope[:, None] + np.eye(5)[number])
        worst = np.maximum(worst, (np.abs(sum(sigma)) * flow.own).sum(axis=1))
    assert (worst <= bounds).all()
    assert (bounds <= whole).all()
    assert (bounds < whole).any()


@pytest.mark.parametrize("fixed", [0.0, 0.02])
def test_a_head_is_off_by_what_its_cells_and_its_carrier_say(fixed):
    """y·(t + d(t)) at t = x: errors are small where y is, and where d is."""
    box = Box.parse({"x": (-1.0, 1.0), "y": (-2.0, 0.5)})
    x, y = Source(0), Source(1)
    boxes = Interval(box.lo[None], box.hi[None])
    for number in range(8):
        boxes = halved(boxes, number % 2)
    ranges = PartRanges(boxes, box.names)
    edges = np.linspace(-1, 1, 33)
    at = np.linspace(edges[:-1], edges[1:], 65)
    deltas = np.abs(np.sin(7 * at)).max(axis=0) + 1e-3
    deviations = Deviations(Interval(edges[:-1], edges[1:]), deltas, 2.0, fixed, 1e-4)
    own = 2.0 * float(deltas.max()) + 1e-4
    stage = head(reads([]), Slopes.of(T, -1.0, 1.0, 0.0), own, reads([]), deviations)
    (found,) = ErrorFlow([stage], over(ranges, [x]), over(ranges, [y])).own.T
    assert found.max() <= own * (1 + 1e-12)
    points = np.random.default_rng(0).uniform(boxes.lo, boxes.hi, (64, *boxes.shape))
    true = np.abs(points[..., 1] * np.sin(7 * points[..., 0])).max(axis=0)
    assert (true <= found).all()
    assert np.median(found / np.maximum(true, 1e-3)) < (2.0 if fixed == 0 else 4.0)
    assert found.min() < 0.1 * own + fixed


BOX = Interval(np.full((1, 10), -1.0), np.full((1, 10), 1.0))


DIVIDED = [  # the error over boxes, the range of the number of parts, and that of the largest error
    (lambda boxes: 1.0 + boxes.width.sum(axis=1), (MANY_PARTS, 2 * MANY_PARTS), (FAR_FROM_POINTS, math.inf)),
    # An excess over 1.1 is not worth more parts if it is below 1.5.
    (lambda boxes: 1.0 + boxes.width.sum(axis=1) / 50, (1, 2 * MOST_PARTS), (CLOSE_TO_POINTS, FAR_FROM_POINTS)),
    (lambda boxes: np.ones(len(boxes)), (1, 1), (0.0, 1.0)),
    # An error that is infinite everywhere is given up early.
    (lambda boxes: np.where(boxes.width.max(axis=1) > 0, math.inf, 1.0), (1, MOST_PARTS), (LARGEST, math.inf)),
]


@pytest.mark.parametrize(("largest", "counts", "errors"), DIVIDED)
def test_parts_cover_the_box_and_are_as_many_as_the_distance_to_points_asks_for(largest, counts, errors):
    parts, found, axes = divided(BOX, largest)
    assert counts[0] <= len(parts) <= counts[1]
    assert np.prod(parts.hi - parts.lo, axis=1).sum() == np.prod(BOX.hi - BOX.lo)
    assert errors[0] < found.max() <= errors[1]
    assert np.isfinite(found).all() or np.isinf(found).all()
    assert set(axes) <= set(range(10))


@pytest.mark.parametrize("seed", range(4))
def test_layers_at_once_are_as_heads_one_by_one(seed):
    """Interval matrix products against the same sums term by term, and against slopes chosen at random."""
    rng = np.random.default_rng(seed)
    sizes, relu = (5, 7, 4), tree_of("relu(t)")
    layers, t = list[FlowStage](), list[np.ndarray]()
    before = 0
    for count in sizes:
        weights = rng.normal(size=(count, before)) * (np.arange(before) >= before - ((layers and len(layers[-1])) or 0))
        ends = np.sort(rng.normal(size=(count, 2)) + 0.5, axis=1)
        readings = Readings(weights, np.zeros(count), np.zeros(count), np.full(count, 1e-3))
        slopes = Slopes.of(relu, ends[:, 0], ends[:, 1], 1e-3, None, 1)
        layers.append(FlowStage(readings, slopes, rng.uniform(0.5, 1.0, count), np.zeros(count)))
        t.append(ends)
        before += count
    ends = np.concatenate(t)
    flow = ErrorFlow(layers, Interval(ends[None, :, 0], ends[None, :, 1]))
    G = np.concatenate([np.stack([layer.slopes.G.lo[:, 0], layer.slopes.G.hi[:, 0]], axis=1) for layer in layers])
    outputs = np.zeros((2, before))
    outputs[:, -sizes[-1] :] = rng.normal(size=(2, sizes[-1]))
    found = flow.combined(outputs)
    single, row = list[FlowStage](), 0
    for layer in layers:
        for j in range(len(layer)):
            weights = np.zeros((1, row))
            weights[0, : layer.arguments.weights.shape[1]] = layer.arguments.weights[j]
            slopes = Slopes.of(relu, *ends[row], 1e-3, None, 1)
            single.append(FlowStage(reads(weights[0].tolist(), 1e-3), slopes, layer.own[[j]], np.zeros(1)))
            row += 1
    apart = ErrorFlow(single, Interval(ends[None, :, 0], ends[None, :, 1])).combined(outputs)
    np.testing.assert_allclose(found.lo, apart.lo, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.hi, apart.hi, rtol=1e-12, atol=1e-12)
    for _ in range(300):
        slope = rng.uniform(G[:, 0], G[:, 1])
        sigma = np.eye(before)
        for number, stage in enumerate(single):
            sigma[number] += slope[number] * (stage.arguments.weights[0] @ sigma[:number])
        exact = outputs @ sigma
        assert (found.lo[0] <= exact + 1e-12).all()
        assert (exact <= found.hi[0] + 1e-12).all()
