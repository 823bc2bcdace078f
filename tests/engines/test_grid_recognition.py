"""Which heads are grids, and which are streamed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attnc.constructions.attention_softmax import attention_softmax
from attnc.constructions.max_affine import max_affine
from attnc.constructions.two_layer import two_layer
from attnc.engines import grid
from attnc.engines.grid import GridHead
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Softmax
from attnc.ir.spec import check
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from engines.anchors import Anchors, assert_agrees, head_of
from ir.random_programs import lookup_program

pytestmark = pytest.mark.usefixtures("any_number_of_keys")


def test_a_slope_off_the_grid_is_refused():
    """By one unit in the last place: far enough from 0 even that would matter."""
    made = Anchors.gaussian([np.arange(9.0), np.arange(8.0)], 0.4, np.ones(72))
    assert isinstance(head_of(NumpyEngine(made.program())), GridHead)
    slopes = made.slopes.copy()
    slopes[40, 1] = np.nextafter(slopes[40, 1], np.inf)
    engine = NumpyEngine(replace(made, slopes=slopes).program())
    assert not isinstance(head_of(engine), GridHead)
    assert engine.truncation == 0


def test_two_keys_of_one_anchor_are_refused():
    made = Anchors.gaussian([np.arange(9.0), np.arange(8.0)], 0.4, np.ones(72))
    order = np.arange(72)
    order[3] = 4  # every level of both axes still occurs
    assert not isinstance(head_of(NumpyEngine(made.reordered(order).program())), GridHead)


def target(source: str) -> ExpressionTarget:
    return ExpressionTarget(Expression.parse(source), Box.parse({"x": (-2.0, 2.0), "y": (-1.0, 2.0)}))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("beta", [0.3, 2.0, 64.0, 1e4])
def test_networks_on_a_grid_are_recognised(beta, dtype):
    program = max_affine(target("exp(sin(x)*y)"), points_per_axis=(13, 9), beta=beta, dtype=dtype).program
    engine = NumpyEngine(program)
    assert isinstance(head_of(engine), GridHead)
    points = np.random.default_rng(4).uniform([-2, -1], 2, (20, 2)).astype(dtype)
    assert_agrees(program, points, engine(points), engine.truncation)


def test_heads_that_are_no_grid_are_streamed():
    masked = lookup_program(np.linspace(-3, 3, 99), np.ones(99), 2.0)
    grids = Anchors.gaussian([np.arange(9.0), np.arange(8.0)], 0.4, np.ones(72)).program()
    look = grids.layers[-1]
    with_residual = replace(
        look, residual=True, channels=("t0", "t1", "one"), heads=(replace(look.heads[0], W_O=np.ones((1, 3))),)
    )
    programs = [
        two_layer(target("x*y"), eps=0.3).program,
        attention_softmax(target("x*y"), eps=0.3).program,
        max_affine(target("exp(x)*y"), eps=0.2, centres="adaptive").program,
        masked,
        replace(grids, layers=(grids.layers[0], with_residual), output_shape=(3,)),
    ]
    for program in programs:
        engine = NumpyEngine(program)
        heads = [head for stage in engine._stages if hasattr(stage, "heads") for head in stage.heads]
        assert heads
        assert not any(isinstance(head, GridHead) for head in heads)
        assert engine.truncation == 0


def test_a_grid_before_another_softmax_is_streamed():
    """What it is off by would go through the later stage, and be anything there."""
    first = Anchors.gaussian([np.arange(70.0)], 0.4, np.ones(70)).program()
    twice = replace(first, layers=(*first.layers, Softmax("after", ("out0",))))
    assert not isinstance(NumpyEngine(check(twice))._stages[0].heads[0], GridHead)


def test_few_keys_are_streamed(monkeypatch):
    monkeypatch.undo()
    few = Anchors.gaussian([np.arange(grid.FEWEST_KEYS - 1.0)], 0.4, np.ones(grid.FEWEST_KEYS - 1))
    enough = Anchors.gaussian([np.arange(grid.FEWEST_KEYS * 1.0)], 0.4, np.ones(grid.FEWEST_KEYS))
    assert not isinstance(head_of(NumpyEngine(few.program())), GridHead)
    assert isinstance(head_of(NumpyEngine(enough.program())), GridHead)
