"""Scattered tables: the error at every point is ≤ eps; few anchors where the table is smooth, one a point where not."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import table_scattered
from attnc.constructions.beyond.table_scattered import SELECTING, Neighbours, ScatteredSearch, kinks_between, tangents
from attnc.constructions.construction import Request
from constructions.tables import fitted


def uniform(count: int, d: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (count, d))


def wave(p):
    return np.exp(-2 * (p**2).sum(axis=1)) * np.sin(3 * p[:, 0] + p[:, 1])


@pytest.mark.parametrize(
    ("eps", "dtype", "most"), [(1e-1, "float64", 50), (1e-3, "float64", 120), (1e-3, "float32", 120)]
)
def test_smooth_tables_take_few_anchors_and_are_smooth_between(eps, dtype, most):
    p = uniform(800)
    built = fitted(table_scattered, attnc.TableTarget(p, wave(p)), eps, dtype, most)
    inside = 0.9 * uniform(500, seed=1)
    assert np.abs(built.program(inside) - wave(inside)).max() <= 3 * eps


def test_three_variables():
    p = uniform(700, d=3)
    fitted(table_scattered, attnc.TableTarget(p, p[:, 0] + np.sin(p[:, 1]) * p[:, 2]), 1e-2, most=150)


def test_axes_are_as_long_as_the_table_is_steep():
    p = uniform(900) * [1, 1000]
    table = attnc.TableTarget(p, np.sin(9 * p[:, 0]) + p[:, 1] / 1000)
    counts = dict(fitted(table_scattered, table, 1e-2).parameters)
    assert counts["anchors_x0"] >= 2 * counts["anchors_x1"]


@pytest.mark.parametrize(("dtype", "eps"), [("float64", 1e-9), ("float32", 1e-3)])
@pytest.mark.parametrize("d", [2, 3])
def test_noise_is_met_at_every_point(dtype, eps, d):
    p = uniform(400, d)
    table = attnc.TableTarget(p, np.random.default_rng(1).normal(size=(400, 2)))
    built = fitted(table_scattered, table, eps, dtype)
    assert built.program.num_anchors == 400
    assert np.abs(built.program(uniform(300, d, seed=2))).max() <= 3.1 * np.abs(table.values).max()


def test_a_kink_is_too_rough_for_a_grid_but_soft_keys_follow_it():
    p = uniform(600)
    table = attnc.TableTarget(p, np.abs(p[:, 0] + p[:, 1]))
    built = fitted(table_scattered, table, 1e-6)
    assert dict(built.parameters)["beta"] <= 16
    inside = 0.9 * uniform(300, seed=3)
    nearest = np.abs(inside[:, None] - p).sum(axis=2).argmin(axis=1)
    truth = np.abs(inside.sum(axis=1))
    soft = np.abs(built.program(inside) - truth).mean()
    assert soft < 0.5 * np.abs(table(p[nearest])[:, 0] - truth).mean()


def test_heads_at_the_points_grow_harder_until_they_select():
    p = uniform(60)
    table = attnc.TableTarget(p, np.random.default_rng(0).normal(size=60))
    heads = list(ScatteredSearch(table, Request(1e-9), 10.0).at_points())
    betas = [dict(head.parameters)["beta"] for head in heads]
    assert betas[:-1] == sorted(betas[:-1])  # the last has kinks too
    assert all(np.abs(head.values).max() <= 11 * np.abs(table.values).max() for head in heads)
    assert np.abs(heads[-1].values - table.values[np.lexsort(table.points.T[::-1])]).max() < 1e-9  # it selects
    assert all(head.error <= 1e-8 for head in heads)


@pytest.mark.parametrize(("gap", "dtype", "d"), [(1e-9, "float64", 2), (1e-12, "float64", 3), (1e-4, "float32", 2)])
def test_points_too_close_for_any_temperature_are_told_apart_by_kinks(gap, dtype, d):
    p = uniform(200, d)
    p[:20] = p[20:40] + gap * uniform(20, d, seed=1)
    table = attnc.TableTarget(p, np.arange(200) % 7)
    assert dict(fitted(table_scattered, table, 1e-5, dtype).parameters)["kinks"] >= 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), d=st.integers(1, 3), spread=st.sampled_from([1.0, 1e-6]))
def test_kinks_lead(seed, count, d, spread):
    """The theorem of `Kink`: every pair leads by SELECTING, and no point loses to any other."""
    y = spread * np.random.default_rng(seed).normal(size=(count, d))
    pairs = np.array([(i, j) for i in range(count) for j in range(i)])
    anchors, bias = tangents(kinks_between(y, pairs), y)
    scores = 2 * y @ anchors.T + bias
    leads = np.diagonal(scores)[:, None] - scores
    slack = 1e-12 * (1 + np.abs(2 * y @ anchors.T).max() + np.abs(bias).max())
    assert (leads[~np.eye(count, dtype=bool)] >= SELECTING - slack).all()


def test_neighbours_tell_noise_from_smooth_tables_and_steep_axes_from_flat_ones():
    p = uniform(500)
    noise = np.random.default_rng(0).normal(size=(500, 1))
    assert Neighbours.of(p, noise, 1e-3).is_rough
    assert not Neighbours.of(p, noise, 10.0).is_rough  # nothing is rough to an eps this large
    smooth = Neighbours.of(p, np.sin(5 * p[:, :1]) + p[:, 1:], 1e-6)
    assert not smooth.is_rough
    assert smooth.steepness[0] == 1
    assert 0.1 < smooth.steepness[1] < 0.5


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(2, 40),
    d=st.integers(2, 3),
    seed=st.integers(0, 10**6),
    digits=st.integers(1, 9),
    is_noise=st.booleans(),
)
def test_every_table_is_reached(count, d, seed, digits, is_noise):
    rng = np.random.default_rng(seed)
    p = rng.random((count, d)) * 10.0 ** rng.integers(-3, 4, d)
    f = rng.normal(size=count) if is_noise else np.cos(p / p.max(axis=0)).sum(axis=1)
    fitted(table_scattered, attnc.TableTarget(p, f), 10.0**-digits, most=count)


def test_a_grid_may_be_treated_as_scattered():
    x = np.linspace(0, 1, 30)
    table = attnc.TableTarget(x, np.exp(x))
    assert attnc.compile(table, eps=1e-3, construction="table_scattered").certificate.observed <= 1e-3


def test_far_from_zero_in_float32():
    p = 1000 + uniform(300)
    table = attnc.TableTarget(p, np.sin(2 * p).sum(axis=1))
    net = attnc.compile(table, eps=1e-2, dtype="float32")
    assert net.certificate.observed <= 1e-2


def test_refusals():
    p = uniform(50)
    table = attnc.TableTarget(p, np.random.default_rng(0).normal(size=50))
    with pytest.raises(attnc.BoundNotMet, match="a key for every point is 50 anchors, more than the 20"):
        attnc.compile(table, eps=1e-3, max_anchors=20)
    close = p.copy()
    close[1] = close[0] + 1e-9
    twins = attnc.TableTarget(close, np.arange(50))
    with pytest.raises(attnc.BoundNotMet, match=re.escape("In float32 some of its points are equal, such as (x0 = ")):
        attnc.compile(twins, eps=1e-3, dtype="float32")
    assert attnc.compile(twins, eps=1e-3).certificate.observed <= 1e-3
