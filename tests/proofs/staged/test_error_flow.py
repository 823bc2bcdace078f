"""Errors that are put in on purpose, at random, with any signs: none arrives larger than the forms allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
from attnc.targets.parts.part import Combination, Multiply, Part, Source, T, Unary, function_of_t
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


def reads(weights: Sequence[float], error: float = 0.0) -> Readings:
    """One combination of earlier heads."""
    return Readings(np.array([weights]), np.zeros(1), np.zeros(1), np.array([error]))


def over(ranges: PartRanges, parts: Sequence[Part | None]) -> Interval:
    """(boxes, parts); None stands for 1."""
    found = [Interval.point(np.ones(len(ranges.boxes))) if part is None else ranges.over(part) for part in parts]
    return Interval(np.array([x.lo for x in found]).T, np.array([x.hi for x in found]).T)


@dataclass(frozen=True)
class FlowHead:
    """carrier·tree(argument): both are combinations of earlier heads, with the weights given, and of the inputs."""

    argument: Part
    tree: Node
    weights: Sequence[float]
    error: float  # of the argument and of the carrier
    own: float
    carrier: Part | None = None
    carrier_weights: Sequence[float] = ()
    deviations: tuple[Deviations, ...] = ()

    def stage(self, ranges: PartRanges) -> FlowStage:
        slopes = Slopes.of(self.tree, *ranges(self.argument), self.error)
        carrier = None if self.carrier is None else reads(self.carrier_weights, self.error)
        own = np.array([self.own])
        return FlowStage(reads(self.weights, self.error), slopes, own, np.zeros(1), carrier, self.deviations)


def flow_of(ranges: PartRanges, heads: Sequence[FlowHead]) -> ErrorFlow:
    carriers = [head.carrier for head in heads]
    carried = over(ranges, carriers) if any(carriers) else None
    return ErrorFlow([head.stage(ranges) for head in heads], over(ranges, [head.argument for head in heads]), carried)


def whole_bound(flow: ErrorFlow, output: np.ndarray) -> np.ndarray:
    """The bound on every box from all forms together."""
    return (flow.combined(output).mag[:, 0] * flow.own).sum(axis=1)


X, Y, SIN = Source(0), Source(1), tree_of("sin(t)")


@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.05])
def test_errors_arrive_no_larger_than_their_forms(size):
    """(x·y − sin(x·y))·(x·y): all errors reach the product at the end along several ways."""
    product = Multiply(X, Y)
    difference = Combination(((product, UNIT), (Unary(product, SIN), MINUS)), ZERO)
    rng, own = np.random.default_rng(2), (size, 0.7 * size, 2 * size)
    box = Box.parse({"x": (-1.0, 2.0), "y": (0.5, 1.5)})
    heads = [
        FlowHead(X, T, [], 0.0, own[0], Y),
        FlowHead(product, SIN, [1.0], 4 * size, own[1]),
        FlowHead(difference, T, [1.0, -1.0], 4 * size, own[2], product, [1.0, 0.0]),
    ]
    bound = float(whole_bound(flow_of(PartRanges(sub_boxes(box), box.names), heads), np.array([[0.0, 0.0, 1.0]])).max())
    x, y = rng.uniform(box.lo, box.hi, (20_000, 2)).T
    x[:2000], y[:2000] = 2.0, 1.5
    d = rng.choice([-1.0, 1.0], (3, len(x))) * np.array(own)[:, None]
    computed = x * y + d[0]
    found = (computed - np.sin(computed) - d[1]) * computed + d[2]
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


def larger(u: Part, v: Part) -> tuple[Part, Unary, Part]:
    """v − u, relu(v − u), and max(u, v) = u + relu(v − u)."""
    apart = Combination(((v, UNIT), (u, MINUS)), ZERO)
    gate = Unary(apart, tree_of("relu(t)"))
    return apart, gate, Combination(((u, UNIT), (gate, UNIT)), ZERO)


@pytest.mark.parametrize("own", [(1e-3, 1e-3, 1e-3, 0.0), (1e-3, 3e-3, 2e-3, 1e-5)])
def test_of_a_maximum_one_error_counts(own):
    """max(max(x², sin(y)), exp(x)): whichever is largest, there is the error of one, and of two gates."""
    first, second, third = Unary(X, tree_of("t**2")), Unary(Y, SIN), Unary(X, tree_of("exp(t)"))
    apart, gate, inner = larger(first, second)
    outer_apart, outer_gate, _ = larger(inner, third)
    box = Box.parse({"x": (-2.0, 2.0), "y": (-1.0, 3.0)})
    flow = flow_of(
        PartRanges(Interval(box.lo[None], box.hi[None]), box.names),
        [
            FlowHead(X, first.tree, [], 0.0, own[0]),
            FlowHead(Y, second.tree, [0.0], 0.0, own[1]),
            FlowHead(X, third.tree, [0.0, 0.0], 0.0, own[2]),
            FlowHead(apart, gate.tree, [-1.0, 1.0, 0.0], 6e-3, own[3]),
            FlowHead(outer_apart, outer_gate.tree, [-1.0, 0.0, 1.0, -1.0], 6e-3, own[3]),
        ],
    )
    output = np.array([[1.0, 0.0, 0.0, 1.0, 1.0]])
    bent = bypassed(flow.stages, output)
    assert bent == [3, 4]
    bound = float((flow.sizes(output, bent) * flow.own).sum(axis=3).max())
    assert bound == pytest.approx(max(own[:3]) + 2 * own[3], rel=1e-6)
    assert bound < 0.7 * whole_bound(flow, output).max()

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
    known, heads = list[Part](), list[FlowHead]()
    for text in functions:
        weights = rng.choice([-1.0, 1.0], len(known)).tolist()
        signs = [UNIT if weight > 0 else MINUS for weight in weights]
        argument = Combination(((X, UNIT), (Y, MINUS), *zip(known, signs, strict=True)), ZERO)
        known.append(Unary(argument, tree_of(text)))
        heads.append(FlowHead(argument, known[-1].tree, weights, 1e-3, float(rng.uniform(0.5, 1.0))))
    flow, output = flow_of(ranges, heads), np.ones((1, 5))
    bounds = (flow.sizes(output, bypassed(flow.stages, output))[:, 0] * flow.own).sum(axis=2).max(axis=0)
    whole, t = whole_bound(flow, output), over(ranges, [head.argument for head in heads])
    G = [stage.slopes.over(t[:, [number]])[0][:, 0] for number, stage in enumerate(flow.stages)]
    count, sigma = 3000, list[np.ndarray]()
    for head, g, unit in zip(heads, G, np.eye(5), strict=True):
        at_one_end = np.where(rng.random((count, 1)) < 0.5, g.lo, g.hi)
        slope = np.where(rng.random((count, 2)) < 0.5, at_one_end, rng.uniform(g.lo, g.hi, (count, 2)))
        form = sum((weight * one for weight, one in zip(head.weights, sigma, strict=True)), np.zeros((count, 2, 5)))
        sigma.append(form * slope[..., None] + unit)
    worst = (np.abs(sum(sigma)) * flow.own).sum(axis=2).max(axis=0)
    assert (worst <= bounds).all()
    assert (bounds <= whole).all()
    assert (bounds < whole).any()


@pytest.mark.parametrize("fixed", [0.0, 0.02])
def test_a_head_is_off_by_what_its_cells_and_its_carrier_say(fixed):
    """y·(t + d(t)) at t = x: errors are small where y is, and where d is."""
    box = Box.parse({"x": (-1.0, 1.0), "y": (-2.0, 0.5)})
    boxes = Interval(box.lo[None], box.hi[None])
    for number in range(8):
        boxes = halved(boxes, number % 2)
    ranges = PartRanges(boxes, box.names)
    edges = np.linspace(-1, 1, 33)
    at = np.linspace(edges[:-1], edges[1:], 65)
    deltas = np.abs(np.sin(7 * at)).max(axis=0) + 1e-3
    deviations = Deviations(Interval(edges[:-1], edges[1:]), deltas, 2.0, fixed, 1e-4)
    own = 2.0 * float(deltas.max()) + 1e-4
    (found,) = flow_of(ranges, [FlowHead(X, T, [], 0.0, own, Y, deviations=(deviations,))]).own.T
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


def relu_layer(weights: np.ndarray, ends: np.ndarray, own: np.ndarray) -> FlowStage:
    nothing, errors = np.zeros(len(own)), np.full(len(own), 1e-3)
    slopes = Slopes.of(tree_of("relu(t)"), *ends.T, 1e-3, None, 1)
    return FlowStage(Readings(weights, nothing, nothing, errors), slopes, own, nothing)


@pytest.mark.parametrize("seed", range(4))
def test_layers_at_once_are_as_heads_one_by_one(seed):
    """Interval matrix products against the same sums term by term, and against slopes chosen at random."""
    rng, starts = np.random.default_rng(seed), (0, 0, 5, 12, 16)
    ends = np.sort(rng.normal(size=(16, 2)) + 0.5, axis=1)
    layers, single = list[FlowStage](), list[FlowStage]()
    for before, first, after in zip(starts, starts[1:], starts[2:], strict=False):
        weights, own = np.zeros((after - first, first)), rng.uniform(0.5, 1.0, after - first)
        weights[:, before:] = rng.normal(size=(after - first, first - before))
        layers.append(relu_layer(weights, ends[first:after], own))
        for j in range(after - first):
            single.append(relu_layer(np.pad(weights[[j]], ((0, 0), (0, j))), ends[[first + j]], own[[j]]))
    outputs = np.zeros((2, 16))
    outputs[:, 12:] = rng.normal(size=(2, 4))
    t = Interval(ends[None, :, 0], ends[None, :, 1])
    found, apart = (ErrorFlow(stages, t).combined(outputs) for stages in (layers, single))
    np.testing.assert_allclose(found.lo, apart.lo, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.hi, apart.hi, rtol=1e-12, atol=1e-12)
    G = np.concatenate([np.stack([layer.slopes.G.lo[:, 0], layer.slopes.G.hi[:, 0]], axis=1) for layer in layers])
    for _ in range(300):
        slope = rng.uniform(G[:, 0], G[:, 1])
        sigma = np.eye(16)
        for number, stage in enumerate(single):
            sigma[number] += slope[number] * (stage.arguments.weights[0] @ sigma[:number])
        exact = outputs @ sigma
        assert (found.lo[0] <= exact + 1e-12).all()
        assert (exact <= found.hi[0] + 1e-12).all()
