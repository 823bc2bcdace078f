"""Grids of anchors, evaluated axis by axis, are the softmax that they replace, up to the term that is stated for it.

The tolerance is that of `ir.rounding` for any evaluation, next to a long-double one, plus the engine's `truncation`.
"""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.constructions.papers.attention_softmax import attention_softmax
from attnc.constructions.papers.max_affine import max_affine
from attnc.constructions.papers.two_layer import two_layer
from attnc.engines import grid, grid_axis
from attnc.engines.grid import GridHead
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Attention, Program, Softmax
from attnc.ir.building import AffineBuilder, Attending
from attnc.ir.spec import check
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from ir.random_programs import lookup_program
from ir.rounding import exact_and_bound


@pytest.fixture(autouse=True)
def any_number_of_keys(monkeypatch):
    """Grids are taken for such, however small."""
    monkeypatch.setattr(grid, "FEWEST_KEYS", 1)


@dataclass
class Anchors:
    """Keys with these slopes and offsets for queries t = scale·x + shift; `weights_out` is W_O."""

    slopes: np.ndarray  # (keys, axes)
    offsets: np.ndarray
    values: np.ndarray  # (keys, d_v)
    scale: np.ndarray
    shift: np.ndarray
    dtype: Any = np.float64
    weights_out: np.ndarray | None = None

    @classmethod
    def gaussian(cls, lattices: list[np.ndarray], beta: float, values: np.ndarray, dtype: Any = np.float64) -> Anchors:
        """Weights ∝ exp(−β|x − L|²)."""
        L = np.stack([column.ravel() for column in np.meshgrid(*lattices, indexing="ij")], axis=1)
        d = len(lattices)
        values = np.asarray(values, np.float64).reshape(len(L), -1)
        return cls(2 * beta * L, -beta * (L**2).sum(axis=1), values, np.ones(d), np.zeros(d), dtype)

    def reordered(self, order: np.ndarray) -> Anchors:
        return replace(self, slopes=self.slopes[order], offsets=self.offsets[order], values=self.values[order])

    def program(self) -> Program:
        keys, d = self.slopes.shape
        axes, values = [f"t{i}" for i in range(d)], [f"v{j}" for j in range(self.values.shape[1])]
        ask = AffineBuilder(1, [f"x{i}" for i in range(d)], 1, [*axes, "one"])
        for i in range(d):
            ask.link(0, axes[i], 0, f"x{i}", self.scale[i])
            ask.set(0, axes[i], self.shift[i])
        ask.set(0, "one", 1.0)
        know = AffineBuilder(0, [], keys, [*axes, "offset", *values])
        for i in range(d):
            know.set(np.arange(keys), axes[i], self.slopes[:, i])
        know.set(np.arange(keys), "offset", self.offsets)
        for j, name in enumerate(values):
            know.set(np.arange(keys), name, self.values[:, j])
        entries = {(name, name): 1.0 for name in axes}
        W_O = np.eye(len(values)) if self.weights_out is None else self.weights_out
        attending = Attending(ask.channels_out, know.channels_out, self.dtype)
        queries, keys = entries | {("one", "c"): 1.0}, entries | {("offset", "c"): 1.0}
        head = attending.head(queries, keys, {(name, name): 1.0 for name in values})
        head = replace(head, W_O=W_O.astype(self.dtype))
        out = tuple(f"out{j}" for j in range(W_O.shape[1]))
        layers = (ask.build("ask", self.dtype), Attention("look", (head,), out, cross=True))
        return check(Program(layers, ((d,),), (len(out),), (know.build("know", self.dtype),)))


def head_of(engine: NumpyEngine) -> Any:
    (head,) = engine._stages[-1].heads
    return head


def assert_agrees(program: Program, points: np.ndarray, found: np.ndarray, truncation: float) -> None:
    exact, bound = exact_and_bound(program, (points,))
    error = np.abs(found - exact)
    assert found.dtype == program.dtype
    assert (error <= bound + truncation).all(), f"off by {error.max()}, allowed {bound.min()} and {truncation}"


def is_grid(made: Anchors) -> bool:
    return isinstance(head_of(NumpyEngine(made.program())), GridHead)


@st.composite
def anchors_and_points(draw: st.DrawFn) -> tuple[Anchors, np.ndarray]:
    """1 to 4 axes of different lengths, one of them perhaps a single anchor, in any order of keys."""
    d = draw(st.integers(1, 4))
    most = {1: 300, 2: 24, 3: 9, 4: 5}[d]
    counts = [draw(st.integers(2, most))] + [draw(st.integers(1, most)) for _ in range(d - 1)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    c = 10 ** draw(st.floats(math.log10(0.05), 4))  # of exp(−c·(y − k)²) on a lattice of whole numbers k
    h = 10 ** draw(st.floats(-3, 3))
    middle = draw(st.sampled_from([0.0, 0.0, 3.7, -40.0]))
    lattices = [h * (np.arange(p) - (p - 1) / 2 + middle) for p in counts]
    values = rng.normal(size=(math.prod(counts), draw(st.integers(1, 3))))
    values *= 10 ** rng.uniform(-draw(st.sampled_from([0, 6])), 0, values.shape)
    dtype = draw(st.sampled_from([np.float64, np.float64, np.float32]))
    made = Anchors.gaussian(lattices, c / h**2, values, dtype)
    made = made.reordered(rng.permutation(len(values)))
    made.scale, made.shift = rng.uniform(0.5, 2, d), rng.normal(size=d) * h
    ends = np.array([[lattice[0], lattice[-1]] for lattice in lattices])
    spread = [rng.uniform(ends[:, 0], ends[:, 1], (6, d)), rng.uniform(ends[:, 0] - 4 * h, ends[:, 1] + 4 * h, (4, d))]
    at_edges = np.stack([rng.choice(lattice, 4) + h / 2 for lattice in lattices], axis=1)
    far = rng.choice([-1, 1], (2, d)) * 10 ** rng.uniform(2, 5) * h
    t = np.concatenate([*spread, at_edges, ends.T, far])
    return made, ((t - made.shift) / made.scale).astype(dtype)


@settings(max_examples=100, deadline=None)
@given(anchors_and_points())
def test_a_grid_is_the_softmax(case):
    made, points = case
    program = made.program()
    engine = NumpyEngine(program)
    head = head_of(engine)
    if made.dtype == np.float64:  # rounded to float32, large offsets may be too far from a sum
        assert isinstance(head, GridHead)
    assert engine.truncation <= 1.001e-12 * np.abs(made.values).max()
    assert_agrees(program, points, engine(points), engine.truncation)


@settings(max_examples=60, deadline=None)
@given(anchors_and_points(), st.sampled_from([1, 3]), st.sampled_from([1, 40, 2**30]))
def test_small_tiles(case, tile, cells):
    made, points = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "TILE_SIZES", (tile,))
        patch.setattr(grid, "CELLS_PER_BATCH", cells)
        patch.setattr(grid, "PRODUCT_SIZE", cells)
        engine = NumpyEngine(made.program())
        assert_agrees(made.program(), points, engine(points), engine.truncation)


@pytest.mark.parametrize("size", [1.0, 1e-90])
@pytest.mark.parametrize("counts", [(400,), (43, 40), (30, 31, 29)])
def test_many_points_in_a_group(counts, size):
    """Then the values of a window take the factors of the weights."""
    rng = np.random.default_rng(3)
    lattices = [np.arange(p) - (p - 1) / 2 for p in counts]
    made = Anchors.gaussian(lattices, 0.5, size * rng.normal(size=math.prod(counts)))
    engine, points = NumpyEngine(made.program()), rng.uniform(-0.3, 0.3, (700, len(counts)))
    assert isinstance(head_of(engine), GridHead)
    assert np.abs(engine(points) - made.program()(points)).max() <= 1e-12 * np.abs(made.values).max()


def test_tiny_values_are_no_grid():
    """Their products with the factors of weights would underflow. Zeros do not."""
    lattice, rng = np.arange(80.0) - 39.5, np.random.default_rng(3)
    made = Anchors.gaussian([lattice], 0.5, 1e-150 * rng.normal(size=80))
    engine, points = NumpyEngine(made.program()), rng.uniform(-30, 30, (700, 1))
    assert not isinstance(head_of(engine), GridHead)
    assert np.abs(engine(points) - made.program()(points)).max() <= 1e-12 * np.abs(made.values).max()
    assert isinstance(head_of(NumpyEngine(Anchors.gaussian([lattice], 0.5, np.zeros(80)).program())), GridHead)


@pytest.mark.parametrize("c", [0.05, 0.2, 0.3, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("counts", [(400,), (33, 20), (12, 9, 14), (6, 5, 7, 4)])
def test_agreement_with_the_plain_reference(c, counts):
    """To 1e-12 of the largest value, wherever scores are small enough for the reference itself to be that exact."""
    rng = np.random.default_rng(len(counts))
    lattices = [np.arange(p) - (p - 1) / 2 for p in counts]
    made = Anchors.gaussian(lattices, c, rng.normal(size=math.prod(counts))).reordered(
        rng.permutation(math.prod(counts))
    )
    reach = np.minimum(np.array(counts) / 2 + 2, 20)
    points = rng.uniform(-reach, reach, (50, len(counts)))
    assert (
        np.abs(NumpyEngine(made.program())(points) - made.program()(points)).max() <= 1e-12 * np.abs(made.values).max()
    )


def test_the_order_of_keys_does_not_matter():
    rng = np.random.default_rng(0)
    made = Anchors.gaussian([np.arange(30.0), np.arange(20.0)], 0.4, rng.normal(size=(600, 2)))
    points = rng.uniform(0, 20, (100, 2))
    expected = NumpyEngine(made.program())(points)
    for _ in range(3):
        assert (NumpyEngine(made.reordered(rng.permutation(600)).program())(points) == expected).all()


@settings(max_examples=60, deadline=None)
@given(anchors_and_points(), st.floats(-15, 0.5), st.integers(0, 2**32))
def test_offsets_that_do_not_split_are_kept_or_refused(case, exponent, seed):
    made, points = case
    made.offsets = made.offsets + 10**exponent * np.random.default_rng(seed).uniform(-1, 1, made.offsets.shape)
    engine = NumpyEngine(made.program())
    assert_agrees(made.program(), points, engine(points), engine.truncation)


@pytest.mark.parametrize("size", [1e-9, 0.1])
def test_kept_residues_are_exact(size):
    """ρ far above rounding: divided by as a weight of its own, it costs nothing."""
    rng = np.random.default_rng(1)
    made = Anchors.gaussian([np.arange(40.0) - 20, np.arange(30.0) - 15], 0.3, rng.normal(size=1200))
    made.offsets = made.offsets + size * rng.uniform(-1, 1, 1200)
    engine = NumpyEngine(made.program())
    assert head_of(engine).grid.is_weighted
    points = rng.uniform(-10, 10, (40, 2))
    assert np.abs(engine(points) - made.program()(points)).max() <= 1e-12 * np.abs(made.values).max()
    made.offsets[7] += 20.0
    assert not is_grid(made)


@pytest.mark.parametrize("slopes", [np.array([-9.0, -2.0, 0.0, 0.5, 7.0, 30.0]), np.linspace(-5, 5, 40) ** 3])
@pytest.mark.parametrize("bend", [-0.01, 0.0, 0.01])
def test_any_lattice_and_any_offsets(slopes, bend):
    """Not equally spaced, or with offsets that leave inner anchors below the others: the whole axis is the window."""
    rng = np.random.default_rng(2)
    other = np.arange(12.0)
    L = np.stack([column.ravel() for column in np.meshgrid(slopes, other, indexing="ij")], axis=1)
    values = rng.normal(size=(len(L), 2))
    made = Anchors(L, bend * L[:, 0] ** 2 + rng.normal(size=12)[L[:, 1].astype(int)], values, np.ones(2), np.zeros(2))
    engine = NumpyEngine(made.program())
    assert [axis.width for axis in head_of(engine).grid.axes] == [len(slopes), 12]
    points = rng.uniform(-3, 3, (30, 2))
    assert_agrees(made.program(), points, engine(points), engine.truncation)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("c", [0.3, 50.0])
def test_points_without_scores_are_nan_and_the_others_unchanged(c, dtype):
    made = Anchors.gaussian([np.arange(30.0), np.arange(1.0), np.arange(5.0)], c, np.arange(150.0), dtype)
    program = made.program()
    points = np.random.default_rng(3).uniform(0, 5, (40, 3)).astype(dtype)
    expected = NumpyEngine(program)(points)
    lost = points.copy()
    lost[[1, 5, 20], [0, 1, 2]] = [np.nan, np.nan, np.inf]
    found = NumpyEngine(program)(lost)
    is_lost = np.isin(np.arange(40), [1, 5, 20])
    assert np.isnan(found[is_lost]).all()
    assert (found[~is_lost] == expected[~is_lost]).all()
    assert np.isnan(program(lost[[1, 5]])).all()


@pytest.mark.parametrize("c", [0.3, 50.0])
def test_huge_inputs_reach_the_last_anchor(c):
    made = Anchors.gaussian([np.arange(40.0)], c, np.arange(40.0))
    far = np.array([[1e9], [-1e9], [1e307], [-1e307], [np.finfo(float).max]])
    found = NumpyEngine(made.program())(far)[:, 0]
    np.testing.assert_allclose(found, [39, 0, 39, 0, 39], atol=1e-10)


def test_an_empty_batch():
    engine = NumpyEngine(Anchors.gaussian([np.arange(40.0)], 0.3, np.ones((40, 2)), np.float32).program())
    found = engine(np.zeros((0, 1)))
    assert found.shape == (0, 2)
    assert found.dtype == np.float32


def test_truncation_goes_through_the_output_projection():
    """[v₁, v₂]·W_O with |v₁| ≤ 1 and |v₂| ≤ 100."""
    values = np.stack([np.cos(np.arange(400.0)), 100 * np.sin(np.arange(400.0))], axis=1)
    made = Anchors.gaussian([np.arange(20.0), np.arange(20.0)], 0.3, values)
    relative = head_of(NumpyEngine(made.program())).grid.truncation
    largest = np.abs(values).max(axis=0)
    made.weights_out = np.array([[3.0, 0.0], [0.5, -0.25]])
    expected = relative * (3 * largest[0] + 0.5 * largest[1])
    assert expected <= NumpyEngine(made.program()).truncation <= expected * (1 + 1e-12)


# --- which heads are grids, and which are streamed --------------------------------------------------------------------


def test_a_slope_off_the_grid_is_refused():
    """By one unit in the last place: far enough from 0 even that would matter."""
    made = Anchors.gaussian([np.arange(9.0), np.arange(8.0)], 0.4, np.ones(72))
    assert is_grid(made)
    slopes = made.slopes.copy()
    slopes[40, 1] = np.nextafter(slopes[40, 1], np.inf)
    engine = NumpyEngine(replace(made, slopes=slopes).program())
    assert not isinstance(head_of(engine), GridHead)
    assert engine.truncation == 0


def test_two_keys_of_one_anchor_are_refused():
    made = Anchors.gaussian([np.arange(9.0), np.arange(8.0)], 0.4, np.ones(72))
    order = np.arange(72)
    order[3] = 4  # every level of both axes still occurs
    assert not is_grid(made.reordered(order))


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
    """Its error would go through the later stage, and could be of any size there."""
    first = Anchors.gaussian([np.arange(70.0)], 0.4, np.ones(70)).program()
    twice = replace(first, layers=(*first.layers, Softmax("after", ("out0",))))
    assert not isinstance(NumpyEngine(check(twice))._stages[0].heads[0], GridHead)


def test_few_keys_are_streamed(monkeypatch):
    monkeypatch.undo()
    few = Anchors.gaussian([np.arange(grid.FEWEST_KEYS - 1.0)], 0.4, np.ones(grid.FEWEST_KEYS - 1))
    enough = Anchors.gaussian([np.arange(grid.FEWEST_KEYS * 1.0)], 0.4, np.ones(grid.FEWEST_KEYS))
    assert not is_grid(few)
    assert is_grid(enough)


def weights_on(axis: grid_axis.WindowedAxis, t: np.ndarray) -> np.ndarray:
    """(points, anchors): the weights that `grid.Tiles` makes, normalised, outside of its window 0."""
    group, argument = grid._locate(axis, t.copy())
    made = (grid._weights(axis, group, argument[:, None]) * grid._factors(axis, group))[:, :, 0]
    made /= made.sum(axis=1, keepdims=True)
    spread = np.zeros((len(t), axis.padded), np.longdouble)
    np.put_along_axis(spread, axis.starts[group][:, None] + np.arange(axis.width), made, axis=1)
    return spread


def exact_weights(axis: grid_axis.WindowedAxis, t: np.ndarray) -> np.ndarray:
    scores = axis.slopes.astype(np.longdouble) * t[:, None] + axis.offsets
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("tail", [1e-1, 1e-3, 1e-6, 1e-13])
@pytest.mark.parametrize("c", [0.05, 0.3, 1.0, 3.0, 30.0])
def test_windows_leave_out_what_is_stated_and_not_much_less(c, tail, monkeypatch):
    """At the edges of a group the next anchor outside is nearest: there the tail is nearly that of the theorem."""
    monkeypatch.setattr(grid_axis, "TAIL", tail)
    L = np.arange(200) - 99.5
    axis = grid_axis.make_axis(2 * c * L, -c * L**2, 1)
    assert axis.width < 200
    step = 1 / axis.inverse
    edges = axis.origin + np.arange(axis.first, axis.last + 1) * step
    t = np.concatenate([edges - 1e-9, edges + 1e-9, np.linspace(-130, 130, 999)])
    off = np.abs(weights_on(axis, t) - exact_weights(axis, t)).sum(axis=1)
    rounding = 1e-13 if c < 1 else 2e-12  # of the scores themselves, in either
    assert off.max() <= axis.error + rounding
    assert axis.error <= tail + 1e-12
    if tail > 1e-7 and c < 1:
        assert axis.error <= 20 * off.max()


@pytest.mark.parametrize("seed", range(1, 5))
def test_uneven_slopes_under_even_edges_have_windows_too(seed):
    rng = np.random.default_rng(seed)
    gaps = 10 ** rng.uniform(0, seed, 99)
    slopes = np.concatenate([[0.0], np.cumsum(gaps)]) - gaps.sum() / 2
    edges = np.arange(99) - 49.0
    offsets = np.concatenate([[0.0], -np.cumsum(gaps * edges)])
    axis = grid_axis.make_axis(slopes, offsets, 1)
    assert axis.width < 40
    assert axis.table is None
    t = rng.uniform(-60, 60, 2000)
    rounding = 1e-14 * (np.abs(slopes).max() * 60 + np.abs(offsets).max())
    assert np.abs(weights_on(axis, t) - exact_weights(axis, t)).sum(axis=1).max() <= axis.error + rounding


@pytest.mark.parametrize("spacing", [5e-324, 1e-300, 1e-9, 1e9, 1e300])
def test_extreme_spacings(spacing):
    """Too flat for a window, or so steep that neighbours are out of reach."""
    slopes = spacing * np.arange(90.0)
    made = Anchors(slopes[:, None], -slopes * np.arange(90.0), np.arange(90.0), np.ones(1), np.zeros(1))
    made.values = made.values[:, None]
    engine = NumpyEngine(made.program())
    points = np.linspace(0, 1, 7)[:, None]
    assert_agrees(made.program(), points, engine(points), engine.truncation)


@pytest.mark.parametrize("counts", [(300,), (60, 40), (60, 7), (1, 50), (12, 11, 14), (5, 6, 7, 4), (3, 2, 3, 2, 3)])
def test_compiled_loops_agree(counts):
    pytest.importorskip("numba")
    rng = np.random.default_rng(len(counts))
    lattices = [np.arange(p) - (p - 1) / 2 for p in counts]
    for c, columns in [(0.3, 2), (1.5, 1), (40.0, 1), (1e4, 3)]:
        made = Anchors.gaussian(lattices, c, rng.normal(size=(math.prod(counts), columns)))
        reach = np.array(counts) / 2 + 3
        points = rng.uniform(-reach, reach, (700, len(counts)))
        points[:3] = [[np.nan], [1e12], [-1e12]]
        engine = NumpyEngine(made.program())
        expected = engine(points)
        assert "_compiled" not in vars(head_of(engine))
        found = engine(points, is_compiled=True)
        assert "_compiled" in vars(head_of(engine))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * np.abs(made.values).max() * (1 + c))
        assert_agrees(made.program(), points[3:20], found[3:20], engine.truncation)


def test_code_that_cannot_be_kept_is_compiled_all_the_same():
    """A function of no file has no place on disk, like one in folders that are read-only."""
    pytest.importorskip("numba")
    from attnc.engines.exponential_numba import kept

    def tripled(x):
        return 3 * x

    homeless = types.FunctionType(tripled.__code__.replace(co_filename="/nowhere/at_all.py"), {})
    assert kept(homeless)(2) == 6


def test_too_many_groups_are_not_compiled(monkeypatch):
    monkeypatch.setattr(grid, "MOST_GROUPS", 0)
    engine = NumpyEngine(Anchors.gaussian([np.arange(100.0)], 0.3, np.ones(100)).program())
    np.testing.assert_allclose(engine(np.zeros((1, 1)), is_compiled=True), 1.0, rtol=1e-14)
    assert "_compiled" not in vars(head_of(engine))
