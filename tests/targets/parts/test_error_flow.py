"""Errors that are put in on purpose, at random, with any signs: none arrives larger than the forms say."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.numerics.intervals import Interval
from attnc.targets.box import Box
from attnc.targets.expressions.coefficient import MINUS, UNIT, ZERO
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Node
from attnc.targets.parts.error_flow import Affine, Deviations, ErrorFlow, Link, Slopes
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
    G, jump, values = found.over(Interval.point(t))
    change = (g(moved[:, None]) - g(t[:, None]))[:, 0]
    reach = G * Interval.point(moved - t) + Interval(-jump - 1e-15, jump + 1e-15)
    assert reach.contains(change).all()
    assert values.contains(g(moved[:, None])[:, 0]).all()
    assert np.abs(change).max() <= found.change + 1e-15
    if 0 < error < 0.1:
        assert found.change <= 1.1 * np.abs(change).max()


def test_roots_are_held_where_they_begin():
    """√t at 0: no slope, but |√t̂ − √t| ≤ √error, twice that where the held end counts."""
    tree, error = tree_of("sqrt(t)"), 1e-6
    held = (error, 2.0 - error)
    found = Slopes.of(tree, 0.0, 2.0, error, held)
    rng = np.random.default_rng(1)
    t = np.concatenate([np.geomspace(1e-12, 2.0, 3000), [0.0]])
    moved = np.clip(t + rng.uniform(-error, error, len(t)), *held)
    G, jump, _ = found.over(Interval.point(t))
    change = np.sqrt(moved) - np.sqrt(t)
    assert (np.abs(change) <= G.mag * error + jump + 1e-15).all()
    assert np.sqrt(error) <= found.change <= 3 * np.sqrt(error)


def parts() -> tuple[Part, ...]:
    """(x·y, sin(x·y), x·y − sin(x·y), (x·y)·(x·y − sin(x·y))): all errors reach the last one along several ways."""
    x, y = Source(0), Source(1)
    product = Multiply(x, y)
    sine = Unary(product, tree_of("sin(t)"))
    difference = Combination(((product, UNIT), (sine, MINUS)), ZERO)
    return product, sine, difference, Multiply(difference, product)


def flow_of(ranges: PartRanges, own: tuple[float, float, float], widest: float) -> ErrorFlow:
    product, sine, difference, last = PARTS
    x, y = (part for part in in_order([last]) if isinstance(part, Source))
    direct = Affine(product, [(product, 1.0)], error=widest)
    split = Affine(difference, [(product, 1.0), (sine, -1.0)], error=widest)
    links = []
    for part, argument, tree, carrier, adds in (
        (product, Affine(x, []), T, Affine(y, []), own[0]),
        (sine, direct, tree_of("sin(t)"), None, own[1]),
        (last, split, T, direct, own[2]),
    ):
        lo, hi = ranges(argument.part)
        links.append(Link(part, argument, Slopes.of(tree, lo, hi, widest), carrier, adds))
    return ErrorFlow(ranges, links)


PARTS = parts()


@pytest.mark.parametrize("size", [1e-8, 1e-3, 0.05])
def test_errors_arrive_no_larger_than_their_forms(size):
    rng = np.random.default_rng(2)
    box = Box.parse({"x": (-1.0, 2.0), "y": (0.5, 1.5)})
    ranges, own = PartRanges(sub_boxes(box), box.names), (size, 0.7 * size, 2 * size)
    flow = flow_of(ranges, own, 4 * size)
    bound = float((flow.combined([(PARTS[-1], 1.0)]).mag * flow.own).sum(axis=1).max())
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
    between, below = [(second, 1.0), (first, -1.0)], [(first, 1.0), (gate, 1.0)]
    links = []
    for part, argument, heads, adds in (
        (first, x, [], own[0]),
        (second, y, [], own[1]),
        (third, x, [], own[2]),
        (gate, apart, between, own[3]),
        (outer_gate, outer_apart, [(third, 1.0), *((head, -weight) for head, weight in below)], own[3]),
    ):
        assert isinstance(part, Unary)
        error = 6e-3 * bool(heads)
        slopes = Slopes.of(part.tree, *ranges(argument), error)
        links.append(Link(part, Affine(argument, heads, error=error), slopes, None, adds))
    flow = ErrorFlow(ranges, links)
    heads = [*below, (outer_gate, 1.0)]
    sizes = flow.sizes([heads])
    bound = float((sizes * flow.own).sum(axis=3).max())
    assert bound == pytest.approx(max(own[:3]) + 2 * own[3], rel=1e-6)
    assert bound < 0.7 * float((flow.combined(heads).mag * flow.own).sum(axis=1).max())

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
    parts, links, known = [Source(0), Source(1)], list[Link](), list[tuple[Part, float]]()
    for text in functions:
        weights = rng.choice([-1.0, 1.0], len(known)).tolist()
        heads = [(part, weight) for (part, _), weight in zip(known, weights, strict=True)]
        signs = [UNIT if weight > 0 else MINUS for weight in weights]
        terms = [(parts[0], UNIT), (parts[1], MINUS), *zip((part for part, _ in heads), signs, strict=True)]
        argument = Combination(tuple(terms), ZERO)
        part = Unary(argument, tree_of(text))
        slopes = Slopes.of(part.tree, *ranges(argument), 1e-3)
        links.append(Link(part, Affine(argument, heads, error=1e-3), slopes, None, float(rng.uniform(0.5, 1.0))))
        known.append((part, 1.0))
    flow = ErrorFlow(ranges, links)
    bounds = (flow.sizes([known])[:, 0] * flow.own).sum(axis=2).max(axis=0)
    whole = (flow.combined(known).mag * flow.own).sum(axis=1)
    G = [link.slopes.over(ranges.over(link.argument.part))[0] for link in links]
    worst = np.zeros(len(bounds))
    for _ in range(3000):
        sigma: list[np.ndarray] = []
        for number, link in enumerate(links):
            slope = np.where(
                rng.random(2) < 0.5, rng.choice([G[number].lo, G[number].hi]), rng.uniform(G[number].lo, G[number].hi)
            )
            form = sum((weight * sigma[i] for i, (_, weight) in enumerate(link.argument.heads)), np.zeros((2, 5)))
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
    link = Link(Multiply(x, y), Affine(x, []), Slopes.of(T, -1.0, 1.0, 0.0), Affine(y, []), own, 0.0, deviations)
    (found,) = ErrorFlow(ranges, [link]).own.T
    assert found.max() <= own * (1 + 1e-12)
    points = np.random.default_rng(0).uniform(boxes.lo, boxes.hi, (64, *boxes.shape))
    true = np.abs(points[..., 1] * np.sin(7 * points[..., 0])).max(axis=0)
    assert (true <= found).all()
    assert np.median(found / np.maximum(true, 1e-3)) < (2.0 if fixed == 0 else 4.0)
    assert found.min() < 0.1 * own + fixed
