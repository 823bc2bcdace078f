"""No engine is farther from the exact result than the bound of the box; the bound is close to observed errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc.constructions import max_affine
from attnc.constructions.fitting.cell_head import CellHead, self_attention
from attnc.constructions.fitting.selection import Positions
from attnc.constructions.fitting.stored_head import store
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Program
from attnc.ir.layers import Affine, Softmax
from attnc.ir.program import split_columns
from attnc.ir.soft_head import SoftHead
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.proofs.rounding.program import RoundingForm, roundings
from attnc.proofs.rounding.stage import rounding_bounds, score_errors
from attnc.proofs.stages.extraction import stage_chain, stages
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from ir.random_programs import lookup_program
from proofs.comparisons import ENGINES, engines_of
from proofs.exact_programs import exact_output, rational
from proofs.one_stage_programs import num_inputs, random_program
from strategies.reference import precision

OUR_ENGINES = ("reference", "numpy", "torch")


def bounds_of(program: Program, centres, radii, **options) -> np.ndarray:
    found = np.empty((len(centres), math.prod(program.output_shape)))
    for (stage, outputs), rounding in zip(stages(program), roundings(program), strict=True):
        found[:, outputs] = rounding_bounds(stage, rounding, centres, radii, **options)
    return found


def assert_covered(found: np.ndarray, exact: list[list[arb]], bound: np.ndarray) -> None:
    for row, numbers in zip(np.asarray(found).reshape(len(exact), -1), exact, strict=True):
        for value, number, most in zip(row, numbers, bound, strict=True):
            assert number.is_finite()
            assert not abs(arb(rational(value)) - number) > arb(rational(most))


def assert_no_engine_leaves_the_bound(
    program: Program, rng: np.random.Generator, radii: np.ndarray, names: Iterable[str]
) -> None:
    centre = rng.uniform(-2, 2, len(radii))
    (bound,) = bounds_of(program, centre[None], radii[None])
    offsets = np.stack([rng.uniform(-1, 1, len(radii)), rng.choice([-1.0, 1.0], len(radii))])
    points = np.clip(centre + radii * offsets, centre - radii, centre + radii)
    with precision(200):
        exact = [exact_output(program, point) for point in points]
        for run in engines_of(program, names).values():
            assert_covered(run(*split_columns(points, program.input_shapes)), exact, bound)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_no_engine_leaves_the_bound(seed):
    """Hard and soft heads, wide logits, gates, masks, residuals, memories, in both dtypes."""
    program, rng = random_program(seed), np.random.default_rng(seed)
    radii = 10 ** rng.uniform(-4, 0.5) * rng.uniform(0.3, 1, num_inputs(program))
    assert_no_engine_leaves_the_bound(program, rng, radii, OUR_ENGINES)


@pytest.mark.parametrize("seed", range(12))
def test_onnxruntime_does_not_either(seed):
    program, rng = random_program(seed), np.random.default_rng(seed)
    assert_no_engine_leaves_the_bound(program, rng, np.full(num_inputs(program), 0.1), ["onnxruntime"])


def grid_program(per_axis: int, c: float, dtype: str) -> Program:
    """sin x + cos y on [−3, 3]² by a soft grid of anchors, values by least squares."""
    h = 6 / max(2, per_axis - 7)
    line = (np.arange(per_axis) - (per_axis - 1) / 2) * h
    x = 3 * np.cos(np.pi * (np.arange(200) + 0.5) / 200)
    weights = np.exp(-c * ((x[:, None] - line) / h) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    values = [np.linalg.lstsq(weights, f(x), rcond=1e-7)[0] for f in (np.sin, np.cos)]
    L = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(-1, 2)
    keys = SoftHead(2 * L, -(L**2).sum(axis=1), np.add.outer(*values).reshape(-1, 1))
    target = attnc.as_target("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)})
    return self_attention(CellHead(target, dtype, np.ones(2), np.zeros(2), keys, c / h**2, Positions(1, 0.0)))


def exact_grid(program: Program, points: np.ndarray) -> np.ndarray:
    """In long double."""
    (head,) = stages(program)[0][0].heads
    slopes, offsets, values = (part.mid.astype(np.longdouble) for part in (head.slopes, head.offsets, head.values))
    scores = points.astype(np.longdouble) @ slopes.T + offsets
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights @ values)[:, 0] / weights.sum(axis=1)


@pytest.mark.parametrize(("c", "dtype"), [(0.3, "float64"), (0.3, "float32"), (1.0, "float64"), (1.0, "float32")])
def test_the_bound_is_not_far_above_what_is_seen(c, dtype):
    """17² anchors: in float32 sums are in blocks, in float64 in any order."""
    program = grid_program(17, c, dtype)
    points = np.random.default_rng(0).uniform(-3, 3, (4000, 2))
    exact, centres, radii = exact_grid(program, points), points[:300], np.full((300, 2), 3 / 64)
    seen = max(np.abs(np.ravel(run(points)) - exact).max() for run in engines_of(program, OUR_ENGINES).values())
    assert bounds_of(program, centres, radii).max() <= (20 if dtype == "float32" else 130) * seen


@pytest.mark.parametrize("place", [0, 700, 4095])
def test_small_terms_are_not_lost_beside_a_large_one(place):
    """Keys that weigh alike, whose values are each below half a unit of one of them: in order, none would count."""
    values = np.full(4096, 2.0**-25)
    values[place] = 1.0
    target = ExpressionTarget(Expression.parse("x"), Box.parse({"x": (-1, 1)}, ("x",)))
    head = SoftHead.of_one_variable(np.zeros(4096), np.zeros(4096), values)
    program = store(head, target.box, "float32").program(target)
    exact, points = values.sum() / 4096, np.linspace(-1, 1, 5)[:, None]
    lost = 4095 * 2.0**-25 / 4096
    bound = bounds_of(program, points, np.zeros_like(points)).max()
    assert bound <= lost / 20
    for run in engines_of(program, ENGINES).values():
        assert np.abs(np.asarray(run(points), np.float64).ravel() - exact).max() <= bound


def test_what_an_engine_leaves_out_is_added():
    program = grid_program(9, 1.0, "float64")
    ((stage, _),), (rounding,) = stages(program), roundings(program)
    centres, radii = np.zeros((3, 2)), np.full((3, 2), 0.1)
    plain = rounding_bounds(stage, rounding, centres, radii)
    spare = rounding_bounds(stage, rounding, centres, radii, truncation=1e-9)
    np.testing.assert_allclose(spare - plain, 1e-9, rtol=1e-6)
    engine, points = NumpyEngine(program), np.random.default_rng(0).uniform(-0.1, 0.1, (200, 2))
    most = rounding_bounds(stage, rounding, centres[:1], radii[:1], truncation=engine.truncation)
    assert np.abs(engine(points) - exact_grid(program, points)).max() <= most
    assert rounding_bounds(stage, rounding, centres[:0], radii[:0]).shape == (0, 1)


def test_a_box_is_bounded_in_parts_where_its_bound_is_not_small_enough():
    """No bound is below that of a point, nor above that of the whole box."""
    program = grid_program(17, 0.3, "float64")
    ((stage, _),), (rounding,) = stages(program), roundings(program)
    rng = np.random.default_rng(0)
    centres, radii = rng.uniform(-3, 3, (100, 2)), np.full((100, 2), 0.1)
    inside = centres + rng.uniform(-1, 1, centres.shape) * radii
    at_points = rounding_bounds(stage, rounding, inside, np.zeros_like(inside))
    each = rounding_bounds(stage, rounding, centres, radii)
    for enough in (1e-16, 1e-13, 1e-9):
        found = rounding_bounds(stage, rounding, centres, radii, enough=enough)
        assert (found >= at_points * (1 - 1e-9)).all()
        assert (found <= each).all()
        if enough == 1e-16:
            assert (found <= 1.1 * at_points.max()).all()
            assert np.median(found / each) < 0.96


def test_what_keys_share_is_left_out_of_all_errors_or_of_none():
    """σ(65536·(x − 1)) in float32: x, rounded, moves one score, and not that of the key whose score is 0. That one is
    exact; the other is nearly so up to the mean of both, where it has nearly all the weight; but they come apart."""
    text = "sigmoid(65536*(x - 1))"
    program = attnc.constructions.gates(
        attnc.as_target(text, {"x": (0.9999, 1.0001)}), eps=1e-2, dtype="float32"
    ).program
    for z in range(7):
        points = 1 + (z + np.linspace(0, 0.05, 2001)[:, None]) / 65536
        lo, hi = points.min(), points.max()
        (bound,) = bounds_of(program, np.array([[(lo + hi) / 2]]), np.array([[(hi - lo) / 2]]))
        with precision(200):
            exact = [exact_output(program, point) for point in points[::40]]
            for run in engines_of(program, OUR_ENGINES).values():
                assert_covered(run(points[::40]), exact, bound)
        off = np.abs(program(points) - Expression.parse(text)(points)[:, 0]).max()
        assert off <= bound[0] <= 5 * off


def test_hard_heads_cost_no_more_than_the_hull_of_what_is_near():
    """In float32 at β = 10⁵ a score is off by more than one: all that is known is that near keys share the weight."""
    target = ExpressionTarget(Expression.parse("sin(x)+cos(y)"), Box.parse({"x": (-3, 3), "y": (-3, 3)}))
    program = max_affine(target, points_per_axis=(50, 50), dtype="float32", beta=1e5).program
    ((stage, _),), (rounding,) = stages(program), roundings(program)
    centres = np.random.default_rng(0).uniform(-3, 3, (200, 2))
    radii = np.full(centres.shape, 1e-3)
    assert score_errors(rounding, centres, radii)[0] > 1
    whole = rounding_bounds(stage, rounding, centres, radii)
    sums = rounding_bounds(stage, rounding, centres, radii, for_any_weights=True)
    assert whole.max() < 0.3
    assert np.median(whole) < 1e-5  # one near key, most often
    assert sums.max() < 1e-5
    assert (sums <= whole * (1 + 1e-6)).all()


def test_where_numbers_overflow_there_is_no_bound():
    """Scores of 10⁴⁰ are no float32 numbers, though the selection that they stand for is clear."""
    program = lookup_program(np.array([-1.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0]), 1e20, np.float32)
    huge = replace(program.layers[0].constant, values=program.layers[0].constant.values * np.float32(1e18))
    program = replace(program, layers=(replace(program.layers[0], constant=huge), *program.layers[1:]))
    with np.errstate(all="ignore"):
        assert not np.isfinite(program(np.array([[5.0]]))).all()
    assert bounds_of(program, np.array([[5.0]]), np.array([[0.1]]))[0, 0] == math.inf
    moderate = lookup_program(np.array([-1.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0]), 1e10, np.float32)
    assert bounds_of(moderate, np.array([[5.0]]), np.array([[0.1]]))[0, 0] < 1e-5


def test_what_is_exact_is_not_counted():
    def affine(weights: list[list[float]], constants: list[float]) -> Affine:
        weight, constant = np.array(weights)[None, :, None], np.array([constants])
        names = tuple(f"c{i}" for i in range(len(constants)))
        return Affine("map", Sparse.from_dense(weight), Sparse.from_dense(constant), names)

    inputs = RoundingForm.identity((1, 2), np.arange(2), 2, np.dtype(np.float64))
    after = inputs.through(affine([[2.0, 0.0], [3.0, 1.0], [0.0, 0.0]], [0.0, 1.0, -4.0]))
    assert after.count.tolist() == [0, 3, 0]  # 2x; 3x + y + 1; −4
    assert after.maps.tolist() == [0, 1, 0]
    assert after.is_power.tolist() == [False, False, True]
    assert after.size.tolist() == [2.0, 5.0, 4.0]
    folded = after.times(np.array([[1.0], [0.0], [0.3]]))
    assert folded.count.tolist() == [1]  # a sum, and a product with a power of two
    assert folded.folded(np.array([2])).tolist() == [1]  # only one map rounds: no terms are summed besides
    assert after.times(np.array([[0.0], [0.3], [0.0]])).folded(np.array([3])).tolist() == [3 + 1 + 3]
    halved = inputs.through(affine([[0.5, 0.0]], [0.0]))
    assert halved.count.tolist() == [1]  # it may underflow


@pytest.mark.parametrize(("rows", "features"), [(1, 5), (4, 3), (10, 10)])
def test_a_read_out_may_add_up_all_rows_of_a_softmax_in_any_order(rows, features):
    """A term passes the sum of its exponentials, the sum over all rows, and the constant."""
    rng, size = np.random.default_rng(0), rows * features
    names = tuple(f"c{i}" for i in range(features))
    weights = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, features, 1, 2), (1, 1, rows, features)))
    asked, read_off = map(Sparse.from_dense, weights)
    scores = Affine("scores", asked, Sparse.zeros((rows, features), np.float32), names)
    read = Affine("read", read_off, Sparse.from_dense(np.ones((1, 1), np.float32)), ("out",))
    program = check(Program((scores, Softmax("softmax", names), read), ((2,),), ()))
    (stage,) = stage_chain(program)
    ((part, _),), (rounds,) = stages(stage), roundings(stage)
    assert len(part.heads) == len(rounds.heads) == rows
    for head in rounds.heads:
        assert (features - 1) + head.depth + head.count >= (features - 1) + size
        assert head.count <= size - features + 2
    assert rounds.count >= size


def test_a_cast_of_the_input_is_part_of_the_error_of_scores():
    program = grid_program(9, 1.0, "float32")
    (cast,), (given_exactly,) = roundings(program), roundings(program, casts_input=False)
    assert (given_exactly.heads[0].score_errors < cast.heads[0].score_errors).any()


def test_a_score_that_is_off_by_thousands_changes_the_winner():
    """The cast to float32 moves x across the jump, where the exact weight of the other key underflows."""
    program = attnc.compile("sign(x - 1.1)", [(0, 2)], eps=0.1, norm=3, construction="affine_cells").program
    embed, attention, read = program.layers
    (head,) = attention.heads
    steep = replace(attention, heads=(replace(head, W_Q=2.0**12 * head.W_Q),))
    program = replace(program, layers=(embed, steep, read)).astype("float32")
    points = 1.1 + 1e-8 * np.arange(-12, 13)[:, None]
    errors = np.abs(NumpyEngine(program)(points) - np.sign(points[:, 0] - 1.1))
    bounds = bounds_of(program, points, np.zeros_like(points))[:, 0]
    assert errors.max() >= 1  # both keys have the same score at the border
    assert (errors <= bounds + 1e-6).all()  # exact weights are 0 and 1 here
