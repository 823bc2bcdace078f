"""The numpy engine: its blocks, its gates, its threads. Its values are tested in test_agreement."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from attnc.engines import fused, numpy_engine
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Attention, Mask, Program
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.spec import check
from ir.random_programs import lookup_program, random_inputs
from ir.rounding import NEGLIGIBLE, assert_agrees


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks so small that tiny programs stream, skip and unpack, each point block in a thread of its own."""
    monkeypatch.setattr(fused, "MOST_NUMBERS", -1)  # no program is a list of instructions

    def shrink(cells: int = 8, **sizes: int) -> None:
        for name, size in {**sizes, "CELLS_PER_POINT_BLOCK": cells, "SCORES_PER_THREAD": 1}.items():
            monkeypatch.setattr(numpy_engine, name, size)

    return shrink


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("beta", [1e-2, 1.0, 1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("num_anchors", [1, 2, 101])
def test_any_inverse_temperature(beta, dtype, num_anchors, small_blocks):
    anchors = np.linspace(-3, 3, num_anchors)
    program = lookup_program(anchors, np.cos(anchors), beta, dtype)
    points = np.linspace(-4, 4, 17)[:, None].astype(dtype)
    assert_agrees(program, (points,), NumpyEngine(program)(points))
    small_blocks(cells=600, KEYS_PER_BLOCK=16, SCORES_PER_BLOCK=64)
    assert_agrees(program, (points,), NumpyEngine(program)(points))


def test_blocks_out_of_reach_are_not_met(monkeypatch, small_blocks):
    """With a large β all but a few blocks of keys are left out, and the result is the same to the last bit."""
    anchors = np.linspace(-3, 3, 999)
    program = lookup_program(anchors, np.cos(anchors), 1e7)
    points = np.random.default_rng(0).uniform(-3, 3, (50, 1))
    small_blocks(cells=2**20, KEYS_PER_BLOCK=10)
    met = []
    scores = numpy_engine._StreamedSoftHead._scores

    def counted(self, queries, rows, j):
        met.append(len(rows))
        return scores(self, queries, rows, j)

    monkeypatch.setattr(numpy_engine._StreamedSoftHead, "_scores", counted)
    pruned = NumpyEngine(program)(points)
    num_met, met[:] = sum(met), []
    monkeypatch.setattr(
        numpy_engine._StreamedSoftHead, "_is_in_reach", lambda self, queries: np.ones((len(queries), 100), bool)
    )
    whole = NumpyEngine(program)(points)
    assert (pruned == whole).all()
    assert num_met < 0.2 * sum(met)


def hiding(program: Program, hidden: slice) -> Program:
    """A lookup whose queries no longer see these tokens."""
    embed, select, read = program.layers
    (head,) = select.heads
    key_segments = head.mask.key_segments.copy()
    key_segments[hidden] = 1
    head = replace(head, mask=Mask(head.mask.query_segments, key_segments))
    return check(replace(program, layers=(embed, replace(select, heads=(head,)), read)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("sizes", [{}, {"KEYS_PER_BLOCK": 1}, {"GATHERED_KEYS": -1}])
def test_hidden_keys_weigh_exactly_nothing(sizes, dtype, small_blocks):
    """The nearest anchor has a value and is hidden; those that are seen, far below it, have none."""
    small_blocks(**sizes)
    program = hiding(lookup_program(np.array([0.0, 7.0, 9.0]), np.array([1.0, 0.0, 0.0]), 1e3, dtype), slice(1, 2))
    assert NumpyEngine(program)(np.zeros((3, 1))).tolist() == [0.0] * 3


@pytest.mark.parametrize("beta", [1.0, 1e6])
def test_hidden_keys_put_no_block_out_of_reach(beta, small_blocks):
    """The nearest anchors are hidden, in the middle of their blocks too: others, far below them, share the weight."""
    anchors = np.linspace(-3, 3, 100)
    program = hiding(lookup_program(anchors, np.cos(anchors), beta), slice(20, 90))
    points = np.linspace(-3, 3, 13)[:, None]
    small_blocks(cells=2**20, KEYS_PER_BLOCK=7, GATHERED_KEYS=-1)
    assert_agrees(program, (points,), NumpyEngine(program)(points))


def test_negligible_weights_are_those_of_the_tolerance():
    assert {np.dtype(name): least for name, least in numpy_engine.NEGLIGIBLE.items()} == NEGLIGIBLE
    for dtype, least in NEGLIGIBLE.items():
        assert np.exp(dtype.type(least)) > np.finfo(dtype).smallest_normal


def gate_program(num_tokens: int, slopes: np.ndarray, shared: int, dtype=np.float64) -> Program:
    """x·Σ_k w_k(x) v_k for each of many tokens: a query sees the copies of its own token and a few shared constants."""
    copies = len(slopes)
    tokens = num_tokens * (1 + copies) + shared
    names = ("x", "one", "key", "value")
    embed = AffineBuilder(num_tokens, ["x"], tokens, names)
    token = np.arange(num_tokens)
    embed.link(token, "x", token, "x")
    embed.set(token, "one", 1.0)
    copy = num_tokens + np.arange(num_tokens * copies)
    embed.link(copy, "key", token.repeat(copies), "x", np.tile(slopes, num_tokens))
    embed.link(copy, "value", token.repeat(copies), "x", np.tile(np.arange(copies) + 1.0, num_tokens))
    constants = tokens - 1 - np.arange(shared)
    embed.set(constants, "value", 0.5)
    mask = Mask(
        np.r_[token, np.zeros(tokens - num_tokens, np.int64)],
        np.r_[np.full(num_tokens, num_tokens), token.repeat(copies), np.full(shared, EVERY_QUERY)],
    )
    attending = Attending(names, names, dtype, mask)
    head = attending.head({("one", "k"): 1.0}, {("key", "k"): 1.0}, {("value", "v"): 1.0})
    read = reading("read", tokens, ["y"], token, {"y": "y"}, dtype)
    layers = (embed.build("embed", dtype), Attention("gate", (head,), ("y",)), read)
    return check(Program(layers, ((num_tokens, 1),), (num_tokens, 1)))


@pytest.mark.parametrize("shared", [0, 1, 3])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_gates(shared, gathered, dtype, small_blocks):
    if not gathered:
        small_blocks(GATHERED_KEYS=-1, KEYS_PER_BLOCK=8, SCORES_PER_BLOCK=64)
    program = gate_program(12, np.array([0.0, 1.0, -300.0]), shared, dtype)
    engine = NumpyEngine(program)
    (head,) = engine._stages[0].heads
    assert isinstance(head, numpy_engine._Gathered) == gathered
    inputs = random_inputs(program, 6, shared)
    assert_agrees(program, inputs, engine(*inputs))


def test_a_gate_on_thousands_of_tokens_costs_what_is_visible():
    """5,000 queries × 25,000 keys would be 10⁸ scores a point; ten thousand are visible."""
    program = gate_program(5000, np.array([0.0, 1.0]), 1)
    x = np.random.default_rng(0).normal(size=(4, 5000, 1))
    expected = x * (1 * 1 + 2 * np.exp(x)) / (2 + np.exp(x)) + 0.5 / (2 + np.exp(x))
    np.testing.assert_allclose(NumpyEngine(program)(x), expected, rtol=1e-13, atol=1e-13)


def test_threads_share_the_points_and_report_progress(monkeypatch, small_blocks):
    small_blocks(cells=100, KEYS_PER_BLOCK=4)
    monkeypatch.setattr(numpy_engine, "CORES", 3)
    anchors = np.linspace(-3, 3, 99)
    program = lookup_program(anchors, np.cos(anchors), 2.0)
    engine, threads = NumpyEngine(program), set()
    run_block = engine._streamed

    def watched(*arguments, is_compiled):
        threads.add(threading.get_ident())
        return run_block(*arguments, is_compiled=is_compiled)

    monkeypatch.setattr(engine, "_streamed", watched)
    points, seen = np.linspace(-3, 3, 200)[:, None], []
    found = engine(points, progress=seen.append)
    assert_agrees(program, (points,), found)
    assert 1 <= len(threads) <= 3  # the caller takes parts, too
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_progress_without_threads():
    program = lookup_program(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0)
    seen = []
    NumpyEngine(program)(np.zeros((2, 1)), progress=seen.append)
    assert seen == [1.0]


def test_an_error_in_a_thread_is_raised(monkeypatch, small_blocks):
    small_blocks(cells=1)
    engine = NumpyEngine(lookup_program(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0))
    monkeypatch.setattr(engine, "_streamed", lambda *arguments, is_compiled: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(np.zeros((100, 1)))
