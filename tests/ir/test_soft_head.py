"""The soft head: its values, the maps around it, and the grids that its keys form."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from flint import arb

from attnc.ir.soft_head import Enclosed, SoftHead

RNG = np.random.default_rng(5)


def random_head(keys=7, d=3, outputs=2, gated=True, size=30.0) -> SoftHead[np.ndarray]:
    carried = RNG.normal(size=(keys, outputs, d)) if gated else None
    return SoftHead(
        size * RNG.normal(size=(keys, d)), size * RNG.normal(size=keys), RNG.normal(size=(keys, outputs)), carried
    )


def in_balls(head: SoftHead[np.ndarray], x: np.ndarray) -> list[float]:
    """The outputs at one point, in Arb."""
    scores = [
        sum((arb(a) * arb(t) for a, t in zip(row, x, strict=True)), arb(c))
        for row, c in zip(head.slopes, head.offsets, strict=True)
    ]
    weights = [score.exp() for score in scores]
    total = sum(weights, arb(0))
    found = []
    for output in range(head.num_outputs):
        terms = []
        for key, weight in enumerate(weights):
            moved = [] if head.carried is None else zip(head.carried[key, output], x, strict=True)
            terms.append(weight * sum((arb(u) * arb(t) for u, t in moved), arb(head.values[key, output])))
        found.append(float((sum(terms, arb(0)) / total).mid()))
    return found


@pytest.mark.parametrize("gated", [False, True])
def test_values_are_those_of_the_formula_for_scores_of_hundreds(gated):
    head, points = random_head(gated=gated), RNG.uniform(-2, 2, (20, 3))
    found = head(points)
    size = np.abs(head.values).max() + (0.0 if head.carried is None else 2 * np.abs(head.carried).sum(axis=2).max())
    scores = np.abs(points) @ np.abs(head.slopes.T) + np.abs(head.offsets)
    rounding = size * scores.max(axis=1) * 2.0**-47  # scores are sums of four terms; weights follow their errors
    for x, row, slack in zip(points, found, rounding, strict=True):
        assert np.abs(row - in_balls(head, x)).max() <= slack


@pytest.mark.parametrize("gated", [False, True])
def test_shifted_scaled_and_combined_heads_are_the_maps_that_they_name(gated):
    head, points = random_head(gated=gated, size=1.0), RNG.uniform(-2, 2, (50, 3))
    shift, scale = np.array([0.5, -1.25, 2.0]), np.array([2.0, 0.5, -1.0])
    slope, constant = RNG.normal(size=(2, 3)), RNG.normal(size=2)
    for made, expected in (
        (head.shifted(shift), head(points + shift)),
        (head.scaled(scale), head(points * scale)),
        (head.shifted(shift).scaled(scale), head(points * scale + shift)),
        (head.combined(-3.0, slope, constant), -3.0 * head(points) + points @ slope.T + constant),
    ):
        np.testing.assert_allclose(made(points), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(head.log_sum(points), np.log(np.exp(head.scores(points)).sum(axis=1)), rtol=1e-12)


def test_inputs_that_no_key_tells_apart_are_left_out():
    head = random_head(gated=False)
    head.slopes[:, 1] = 4.0
    assert head.active.tolist() == [0, 2]
    points = RNG.uniform(-1, 1, (9, 3))
    np.testing.assert_allclose(head.restricted(head.active)(points[:, [0, 2]]), head(points), rtol=1e-9)
    carried = np.zeros((7, 2, 3))
    carried[3, 0, 1] = 1.0
    assert SoftHead(head.slopes, head.offsets, head.values, carried).active.tolist() == [0, 1, 2]


def test_an_enclosed_head_has_the_same_middle():
    head = random_head()
    back = SoftHead(*map(Enclosed.exact, (head.slopes, head.offsets, head.values, head.carried)))
    assert isinstance(back.slopes, Enclosed)
    assert not back.slopes.radius.any()
    assert np.array_equal(back.mid(np.ones((1, 3))), head(np.ones((1, 3))))
    assert np.array_equal(back.restricted(np.array([1])).slopes.mid, head.slopes[:, [1]])
    assert back.chosen(slice(2, 5)).num_keys == 3


def grid_head(counts=(3, 4, 2), beta=5.0) -> tuple[SoftHead[np.ndarray], list[np.ndarray]]:
    """Gaussian anchors on a grid, in any order."""
    axes = [np.sort(RNG.uniform(-1, 1, count)) for count in counts]
    anchors = RNG.permutation(np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(counts)))
    values = RNG.normal(size=(len(anchors), 1))
    return SoftHead(2 * beta * anchors, -beta * (anchors**2).sum(axis=1), values), axes


def test_a_grid_is_found_whatever_the_order_of_the_keys():
    head, axes = grid_head()
    grid = head.as_grid()
    assert grid is not None
    assert grid.shape == (3, 4, 2)
    assert not grid.has_duplicates
    for i, (rows, axis) in enumerate(zip(grid.rows, axes, strict=True)):
        assert np.array_equal(rows[:, 0], 10.0 * axis)
        assert np.array_equal(
            head.slopes[grid.keys][..., i], np.broadcast_to(np.ix_(*(10.0 * a for a in axes))[i], grid.shape)
        )
    assert np.array_equal(grid.keys.ravel()[grid.places], np.arange(head.num_keys))
    assert np.array_equal(grid.offsets, head.offsets[grid.keys])


def test_a_grid_of_groups_of_inputs():
    pairs, line = RNG.normal(size=(4, 2)), np.array([-1.0, 0.0, 2.0])
    slopes = np.array([[*pair, t] for pair in pairs for t in line])
    head = SoftHead(slopes, np.zeros(12), np.zeros((12, 1)))
    grid = head.as_grid([np.array([0, 1]), np.array([2])])
    assert grid is not None
    assert grid.shape == (4, 3)
    assert np.array_equal(
        np.concatenate([grid.rows[0][[1, 2]], slopes[grid.keys[[1, 2], 0], :2]]), np.tile(grid.rows[0][[1, 2]], (2, 1))
    )
    assert head.as_grid() is None


def test_of_keys_with_the_same_slopes_the_one_with_the_largest_offset_stands_in_the_grid():
    head, _ = grid_head((3, 3))
    twice = SoftHead(*(np.concatenate([part, part[:4]]) for part in (head.slopes, head.offsets, head.values)))
    twice.offsets[9:] += np.array([1.0, -1.0, 1.0, -1.0])
    grid = twice.as_grid()
    assert grid is not None
    assert grid.has_duplicates
    assert set(grid.keys.ravel().tolist()) == {9, 1, 11, 3, *range(4, 9)}
    assert grid.keys.ravel()[grid.places[9]] == 9
    assert grid.keys.ravel()[grid.places[10]] == 1


def test_keys_that_miss_a_place_are_no_grid():
    head, _ = grid_head()
    assert head.chosen(np.arange(23)).as_grid() is None
    off = SoftHead(head.slopes.copy(), head.offsets, head.values)
    off.slopes[0, 0] = np.nextafter(off.slopes[0, 0], 9.0)
    assert off.as_grid() is None
    endless = SoftHead(head.slopes, np.where(np.arange(24) == 3, np.inf, head.offsets), head.values)
    assert endless.as_grid() is None


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_offsets_are_sums_over_the_axes_and_a_misfit_that_is_known(noise):
    head, _ = grid_head((3, 5, 4), beta=1e6)
    grid = SoftHead(head.slopes, head.offsets + noise * RNG.normal(size=60), head.values).as_grid()
    assert grid is not None
    found = grid.offsets_through_least()
    assert len(found.lines) == 3
    assert np.abs(found.misfit).max() <= 1e-9 * 1e6 * (noise == 0) + 6 * noise
    for place in np.ndindex(*grid.shape):
        terms = [found.constant, *(line[m] for line, m in zip(found.lines, place, strict=True)), found.misfit[place]]
        left = Fraction(float(grid.offsets[place])) - sum(map(Fraction, map(float, terms)))
        assert abs(left) <= found.misfit_error
