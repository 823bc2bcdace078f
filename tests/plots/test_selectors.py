"""Facts read from the normal form: scores, states, queries, sentinels, places."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.sparse import csr_array

from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Attention, Head
from attnc.ir.program import Program, split_columns
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.plots import figure
from attnc.plots.selectors import LayerSoftmaxes, Selector, gaussian_places, pixels, read_layer, reads, run_places
from plots.pictures import network, titles


def scattered(a: np.ndarray, c: np.ndarray) -> Selector:
    soft = SoftHead(csr_array(a), c, np.zeros((len(c), 0)))
    return Selector(0, 0, np.arange(len(c)), soft, None, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_pruning_drops_no_winner(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(300, 2)) * 30 * (rng.random((300, 2)) < 0.7)
    selector = scattered(a, rng.normal(size=300) * 10)
    lo = rng.normal(size=2)
    hi = lo + rng.random(2)
    points = pixels(lo, hi, 50)
    won = LayerSoftmaxes(network("plane")._engine.form, 0, [selector]).cells_at(points, 50)
    everything = points @ a.T + selector.soft.offsets
    np.testing.assert_array_equal(won, everything.argmax(axis=1))
    kept = selector.near(lo, hi, 2.0)
    near = np.flatnonzero((everything >= everything.max(axis=1, keepdims=True) - 2.0).any(axis=0))
    assert set(near) <= set(kept)


@pytest.mark.parametrize("name", ["plane", "cross", "two inputs", "relu of three", "two layers, heads", "softmax"])
def test_scores_are_those_of_the_reference(name: str) -> None:
    known = network(name)
    form, box = known._engine.form, known.box
    points = box.lo + np.random.default_rng(0).random((50, box.d)) * box.widths
    cache = known.run(*split_columns(points, known.program.input_shapes), cache=True).cache
    for stage in range(len(form.stages)):
        layer = read_layer(form, stage, 0)
        for selector in layer.members:
            weights = selector.weights(layer.state(points), np.arange(len(selector)))
            if selector.head is None:
                wanted = np.stack([cache[f"{layer.name}.cell.{v}"][:, 0] for v in range(len(selector))], axis=1)
            else:
                wanted = cache[f"{layer.name}.head{selector.head}.pattern"][:, selector.query]
            np.testing.assert_allclose(weights, wanted, atol=1e-8)


def test_an_output_reads_its_own_query() -> None:
    form = network("sequence of three")._engine.form
    assert [reads(form, output)[0].tolist() for output in range(3)] == [[0], [1], [2]]
    form = network("relu of three")._engine.form
    assert [queries.tolist() for queries in reads(form, 1)] == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]


def test_sentinels_say_nothing_at_the_inner_ends() -> None:
    heads = read_layer(network("clip, heads")._engine.form, 0, 0).members
    found = [np.flatnonzero(head.is_sentinel).tolist() for head in heads]
    assert found == [[7], [0, 7], [0, 7], [0]]
    repeated = read_layer(network("two layers, heads")._engine.form, 0, 0).members
    assert any(selector.is_sentinel.any() for selector in repeated)


def test_places_are_found_only_where_scores_are_squared_distances() -> None:
    anchors = np.array([-1.0, 0.2, 0.3, 2.0, 5.0])
    slopes, constants = 2 * 7.0 * anchors, -7.0 * anchors**2 + 3.0
    found = gaussian_places(slopes, constants, 1e-9)
    assert found is not None
    np.testing.assert_allclose(found, anchors, atol=1e-12)
    shifted = gaussian_places(3 * slopes, constants + slopes, 1e-9)  # scores of 3x + 1
    assert shifted is not None
    np.testing.assert_allclose(shifted, (anchors - 1) / 3, atol=1e-12)
    assert gaussian_places(slopes, constants + np.array([0, 1, 0, 0, 0.0]), 1e-9) is None
    assert gaussian_places(slopes, -constants, 1e-9) is None
    assert gaussian_places(slopes[:2], constants[:2], 1e-9) is None


def test_the_middles_of_runs() -> None:
    x = np.linspace(0, 10, 1001)
    np.testing.assert_allclose(run_places(x, np.searchsorted([6, 7, 8], x)), [5.5, 6.5, 7.5, 8.5], atol=0.02)
    np.testing.assert_allclose(run_places(x, np.zeros(1001, int)), [5], atol=0.02)


def test_keys_that_move_with_the_query_are_looked_at_one_by_one() -> None:
    """Two tokens of one feature that attend to each other: scores x_i·x_j, so not affine."""
    start = AffineBuilder(2, ["in.0"], 2, ["value"])
    start.link(np.arange(2), "value", np.arange(2), "in.0")
    one = np.ones((1, 1))
    attend = Attention("attend", (Head(8 * one, one, one, one),), ("out",))
    program = check(Program((start.build("copy"), attend), ((2, 1),), (2, 1)))
    known = network("sequence of two")
    moving, box = dataclasses.replace(known, program=program, construction="by hand", expression=None), known.box
    form = moving._engine.form
    layer = read_layer(form, 0, 0)
    assert [member.soft for member in layer.members] == [None]
    points = pixels(box.lo, box.hi, 30)
    won = layer.cells_at(points, 30)
    pattern = moving.run(points[..., None], cache=True).cache["attend.head0.pattern"][:, 0]
    np.testing.assert_array_equal(won, pattern.argmax(axis=1))
    assert titles(figure(moving)) == ["network", "partition"]
    assert titles(figure(moving, output=1)) == ["network", "partition"]
