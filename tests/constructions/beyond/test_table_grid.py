"""Gridded tables: the error at every point is ≤ eps, in both dtypes, for smooth tables and noise, with few anchors."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import table_grid
from attnc.constructions.fitting.axis import KeysOnAxis, Lattice, NodeAxis, band_of_weights, keys_at_nodes
from constructions.tables import fitted, grid


def between(axis: np.ndarray) -> np.ndarray:
    return (axis[1:] + axis[:-1]) / 2


X = np.linspace(-3, 3, 50)
SCATTERED = np.random.default_rng(0).random((20, 2))


@pytest.mark.parametrize(
    ("eps", "dtype", "most"),
    [
        (1e-2, "float64", 5),
        (1e-3, "float64", 8),
        (1e-6, "float64", 12),
        (1e-9, "float64", 16),
        (1e-12, "float64", 19),
        (1e-6, "float32", 12),
    ],
)
def test_one_variable_takes_few_anchors_and_is_smooth_between(eps, dtype, most):
    built = fitted(table_grid, attnc.TableTarget(X, np.sin(X)), eps, dtype, most)
    assert built.bound is None
    t = between(X)
    if dtype == "float64" and eps > 1e-10:
        assert np.abs(built.program(t[:, None]) - np.sin(t)).max() <= 2 * eps  # smooth between the points, too
    assert dict(built.parameters)["largest_value"] <= 10


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_and_three_variables(dtype):
    p = grid(np.linspace(-3, 3, 30), np.linspace(-3, 3, 40))
    fitted(table_grid, attnc.TableTarget(p, np.sin(p[:, 0]) + np.cos(p[:, 1])), 1e-3, dtype, 60)
    p = grid(np.linspace(0, 1, 12), np.linspace(5, 9, 10), np.linspace(-1, 0, 9))
    fitted(table_grid, attnc.TableTarget(p, np.exp(p[:, 0]) * np.sin(p[:, 1]) + p[:, 2] ** 2), 1e-3, dtype, 300)


def test_axes_take_what_each_needs():
    p = grid(np.linspace(0, 1, 20), np.linspace(0, 1000, 150))
    built = fitted(table_grid, attnc.TableTarget(p, np.sin(p[:, 1] / 50) * (1 + p[:, 0])), 1e-3, most=90)
    counts = dict(built.parameters)
    assert counts["anchors_x0"] <= 4
    assert counts["anchors_x0"] * counts["anchors_x1"] == built.program.num_anchors


def test_a_rough_axis_has_a_key_for_every_node_and_a_smooth_one_few():
    rng = np.random.default_rng(0)
    x, y = np.sort(rng.random(40)), np.linspace(0, 1, 30)
    p = grid(x, y)
    table = attnc.TableTarget(p, np.repeat(rng.normal(size=40), 30) * np.exp(p[:, 1]), names=["rough", "smooth"])
    found = dict(fitted(table_grid, table, 1e-4).parameters)
    assert (found["anchors_rough"], found["keys_rough"]) == (40, "nodes")
    assert found["anchors_smooth"] <= 8


def test_the_order_of_rows_does_not_matter():
    rng = np.random.default_rng(2)
    p = grid(np.linspace(0, 1, 9), np.linspace(0, 2, 11))
    f = np.cos(p.sum(axis=1))
    order = rng.permutation(len(p))
    first = table_grid(attnc.TableTarget(p, f), eps=1e-4).program(p)
    assert (first == table_grid(attnc.TableTarget(p[order], f[order]), eps=1e-4).program(p)).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_noise_is_met_at_every_point(dtype):
    rng = np.random.default_rng(3)
    for table in (
        attnc.TableTarget(X, rng.normal(size=50)),
        attnc.TableTarget(grid(X[:20], X[:15]), rng.normal(size=(300, 2))),
        attnc.TableTarget(10 ** rng.uniform(-4, 0, 60), rng.normal(size=60)),
    ):
        built = fitted(table_grid, table, 1e-9 if dtype == "float64" else 3e-6, dtype)
        assert built.program.num_anchors == table.num_points
        largest = np.abs(table.values).max()
        assert dict(built.parameters)["largest_value"] <= 4 * largest
        middle = table.box.lo + np.random.default_rng(0).random((200, table.box.d)) * table.box.widths
        assert np.abs(built.program(middle)).max() <= 4 * largest


def test_a_long_axis_is_fitted_by_bands():
    x = np.linspace(0, 1, 2000)
    table = attnc.TableTarget(x, np.sin(200 * x))
    net = attnc.compile(table, eps=1e-3)
    assert 64 < net.num_anchors < 200
    assert net.certificate.observed <= 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_anchors_are_as_dense_as_the_nodes(dtype):
    """√x and log x on nodes spaced by a factor: an even lattice would need a key for nearly every node."""
    x = np.geomspace(1e-4, 1, 200)
    for f, most in ((np.sqrt(x), 12), (np.log(x), 24)):
        built = fitted(table_grid, attnc.TableTarget(x, f), 1e-3, dtype, most)
        assert dict(built.parameters)["keys_x0"] == "graded"


@pytest.mark.parametrize("pad", [0.0, 1.0, 3.0])
def test_graded_places_follow_the_nodes(pad):
    x = np.geomspace(1e-3, 10, 50)
    places = Lattice(14, pad, is_graded=True).graded_places(x)
    assert len(places) == 14
    assert (np.diff(places) > 0).all()
    inside = places[(places >= x[0]) & (places <= x[-1])]
    assert len(inside) == 14 - 2 * pad
    counts = np.histogram(x, np.append(inside[:-1], np.inf))[0]
    assert np.ptp(counts) <= 1


def test_outputs_of_very_different_size():
    table = attnc.TableTarget(X, np.stack([1e6 + np.sin(X), 1e4 * np.cos(X), np.full(50, 7.0)], axis=1))
    built = fitted(table_grid, table, 1e-4, most=29)
    assert np.abs(built.program(between(X)[:, None])[:, 2] - 7).max() < 1e-9


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.lists(st.floats(-5, 5), min_size=2, max_size=12, unique=True),
    scale=st.sampled_from([1e-6, 1.0, 1e5]),
    seed=st.integers(0, 1000),
    digits=st.integers(1, 10),
)
def test_every_table_of_one_variable_is_reached(nodes, scale, seed, digits):
    x = np.array(sorted(nodes))
    assume(np.diff(x).min() > 1e-9 * np.ptp(x) > 0)
    table = attnc.TableTarget(scale * x, np.random.default_rng(seed).normal(size=len(x)))
    fitted(table_grid, table, 10.0**-digits)


@settings(max_examples=30, deadline=None)
@given(
    gaps=st.lists(st.floats(1e-4, 10), min_size=1, max_size=40),
    c=st.sampled_from([1.0, 2.0, 8.0]),
)
def test_keys_at_nodes_lead_by_c(gaps, c):
    """The theorem of `keys_at_nodes`: the lead over neighbours is c, over the k-th kc or more; so W is invertible."""
    y = np.concatenate([[0.0], np.cumsum(gaps)])
    anchors, bias = keys_at_nodes(y, c)
    scores = 2 * np.outer(y, anchors) + bias
    leads = np.diagonal(scores)[:, None] - scores
    steps = np.abs(np.subtract.outer(np.arange(len(y)), np.arange(len(y))))
    slack = 1e-12 * np.abs(scores).max()
    assert (np.abs(leads[steps == 1] - c) <= slack).all()
    assert (leads >= steps * c - slack).all()
    line = NodeAxis(y, "float64").at_nodes(c)
    f = np.random.default_rng(0).normal(size=(len(y), 2))
    assert np.abs(line.apply(line.solve(f)) - f).max() <= 1e-9 * (1 + np.abs(line.solve(f)).max())


def test_a_band_is_the_softmax_with_the_rest_left_out():
    y = np.sort(np.random.default_rng(4).uniform(0, 30, 31))
    anchors, bias = keys_at_nodes(y, 1.0)
    band = band_of_weights(KeysOnAxis(1.0, 0.0, anchors, bias), y, y)
    scores = 2 * np.outer(y, anchors) + bias
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    assert np.abs(band.toarray() - weights).max() < 1e-14


def test_nodes_that_are_one_in_float32_share_a_key():
    line = NodeAxis(np.array([1.0, 1 + 1e-12, 2.0, 3.0]), "float32").at_nodes(8.0)
    assert line.p == 3
    values = line.solve(np.array([[1.0], [3.0], [5.0], [7.0]]))
    assert np.allclose(line.apply(values)[:, 0], [2.0, 2.0, 5.0, 7.0], atol=1e-9)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_rounding_refuses_and_carries_the_best_network():
    table = attnc.TableTarget(X, np.sin(X))
    with pytest.raises(attnc.BoundNotMet, match=r"rounding of values as large as 0\.999 in float32") as refusal:
        attnc.compile(table, eps=1e-9, dtype="float32")
    assert refusal.value.bound is None
    assert 1e-9 < refusal.value.network.certificate.observed < 1e-6
    smallest = float(re.search(r"Choose eps ≥ ([\d.e-]+), or float64", str(refusal.value))[1])
    assert attnc.compile(table, eps=smallest, dtype="float32").certificate.observed <= smallest


def test_points_that_are_one_in_float32_are_named():
    table = attnc.TableTarget([1.0, 1 + 1e-12, 2.0, 3.0], [0, 1, 0, 1], names=["t"])
    with pytest.raises(attnc.BoundNotMet, match=re.escape("such as (t = 1.0) and (t = 1.000000000001)")):
        attnc.compile(table, eps=1e-3, dtype="float32")
    assert attnc.compile(table, eps=1e-3).certificate.observed <= 1e-3


def test_limits_are_respected():
    table = attnc.TableTarget(X, np.random.default_rng(0).normal(size=50))
    with pytest.raises(attnc.BoundNotMet, match="a key for every point is 50 anchors, more than the 49"):
        attnc.compile(table, eps=1e-3, max_anchors=49)
    assert attnc.compile(table, eps=1e-3, max_anchors=50).num_anchors == 50


@pytest.mark.parametrize(
    ("points", "values", "options", "message"),
    [
        (SCATTERED, range(20), {"construction": "table_grid"}, "not a tensor grid; use table_scattered"),
        (X, X, {"construction": "max_affine"}, "a table has no values between its points"),
        (X, X, {"norm": 2}, "norm=2.0 is not an option of table_grid"),
        (X, 1e37 * X, {"dtype": "float32"}, "too much for float32: scale the values"),
        (1e-40 * X, X, {"dtype": "float32"}, "too small for float32: scale the variable"),
        ([1e6, 1e6 + 1e-3], [0, 1], {"dtype": "float32"}, "in float32 all values of x0, from 1000000.0 to 1000000.001"),
    ],
)
def test_wrong_targets_and_options_are_refused(points, values, options, message):
    with pytest.raises(attnc.InputError, match=re.escape(message)):
        attnc.compile(attnc.TableTarget(points, list(values)), eps=0.1, **options)
