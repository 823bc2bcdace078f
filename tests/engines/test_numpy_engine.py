"""The engine computes what the reference computes.

The tolerance is `ir.rounding`: a bound on the rounding of *any* evaluation of a program in its dtype, whatever the
order of its sums and whether or not it is folded, counted with γ_n layer by layer next to a long-double evaluation.
Engine and reference are each held to it, so they agree within twice that.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from attnc.engines import numpy_engine
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import InputError
from attnc.ir import Attention, Head, Mask, Program, normal_form
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.spec import check
from engines import agreement
from engines.memory import peak_and_error
from ir.random_programs import lookup_program, programs_and_inputs, random_inputs
from ir.rounding import NEGLIGIBLE, assert_agrees

SMALL = {
    "as shipped": None,
    "several key blocks": {"KEYS_PER_BLOCK": 1},
    "blocks of two, two scores at once": {"KEYS_PER_BLOCK": 2, "SCORES_PER_BLOCK": 2},
    "nothing dense": {"DENSE_BYTES": 0, "KEYS_PER_BLOCK": 1, "SCORES_PER_BLOCK": 3},
    "nothing gathered": {"GATHERED_KEYS": -1, "KEYS_PER_BLOCK": 1},
}


def small_blocks(sizes: dict[str, int], cells: int = 8) -> agreement.Sizes:
    """Blocks so small that tiny programs stream, skip and unpack; every point block is a thread's work of its own."""
    sizes = {**sizes, "CELLS_PER_POINT_BLOCK": cells, "SCORES_PER_THREAD": 1}
    return {(normal_form if name == "DENSE_BYTES" else numpy_engine, name): size for name, size in sizes.items()}


@pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL)
def test_random_programs(sizes):
    scales, changed = (0.1, 1.0, 20.0, 400.0), {} if sizes is None else small_blocks(sizes)
    run = lambda program, inputs: NumpyEngine(program)(*inputs)  # noqa: E731
    agreement.assert_random_programs_agree(run, changed, examples=100, max_tokens=9, scales=scales)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("beta", [1e-2, 1.0, 1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("num_anchors", [1, 2, 101])
def test_any_inverse_temperature(beta, dtype, num_anchors, monkeypatch):
    anchors = np.linspace(-3, 3, num_anchors)
    program = lookup_program(anchors, np.cos(anchors), beta, dtype)
    points = np.linspace(-4, 4, 17)[:, None].astype(dtype)
    assert_agrees(program, (points,), NumpyEngine(program)(points))
    agreement.set_sizes(monkeypatch, small_blocks({"KEYS_PER_BLOCK": 16, "SCORES_PER_BLOCK": 64}, cells=600))
    assert_agrees(program, (points,), NumpyEngine(program)(points))


def test_blocks_out_of_reach_are_not_met(monkeypatch):
    """With a large β all but a few blocks of keys are left out, and the result is the same to the last bit."""
    anchors = np.linspace(-3, 3, 999)
    program = lookup_program(anchors, np.cos(anchors), 1e7)
    points = np.random.default_rng(0).uniform(-3, 3, (50, 1))
    agreement.set_sizes(monkeypatch, small_blocks({"KEYS_PER_BLOCK": 10}, cells=2**20))
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
def test_hidden_keys_weigh_exactly_nothing(sizes, dtype, monkeypatch):
    """The nearest anchor has a value and is hidden; those that are seen, far below it, have none."""
    agreement.set_sizes(monkeypatch, small_blocks(sizes))
    program = hiding(lookup_program(np.array([0.0, 7.0, 9.0]), np.array([1.0, 0.0, 0.0]), 1e3, dtype), slice(1, 2))
    assert NumpyEngine(program)(np.zeros((3, 1))).tolist() == [0.0] * 3


@pytest.mark.parametrize("beta", [1.0, 1e6])
def test_hidden_keys_put_no_block_out_of_reach(beta, monkeypatch):
    """The nearest anchors are hidden, in the middle of their blocks too: others, far below them, share the weight."""
    anchors = np.linspace(-3, 3, 100)
    program = hiding(lookup_program(anchors, np.cos(anchors), beta), slice(20, 90))
    points = np.linspace(-3, 3, 13)[:, None]
    agreement.set_sizes(monkeypatch, small_blocks({"KEYS_PER_BLOCK": 7, "GATHERED_KEYS": -1}, cells=2**20))
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
    head = Head(
        projection(names, ["k"], {("one", "k"): 1.0}, dtype),
        projection(names, ["k"], {("key", "k"): 1.0}, dtype),
        projection(names, ["v"], {("value", "v"): 1.0}, dtype),
        np.ones((1, 1), dtype),
        mask,
    )
    read = AffineBuilder(tokens, ["y"], num_tokens, ["y"])
    read.link(token, "y", token, "y")
    layers = (embed.build("embed", dtype), Attention("gate", (head,), ("y",)), read.build("read", dtype))
    return check(Program(layers, ((num_tokens, 1),), (num_tokens, 1)))


@pytest.mark.parametrize("shared", [0, 1, 3])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_gates(shared, gathered, dtype, monkeypatch):
    if not gathered:
        agreement.set_sizes(
            monkeypatch, small_blocks({"GATHERED_KEYS": -1, "KEYS_PER_BLOCK": 8, "SCORES_PER_BLOCK": 64})
        )
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


@settings(max_examples=30, deadline=None)
@given(programs_and_inputs())
def test_empty_batch(case):
    program, _ = case
    inputs = random_inputs(program, 0, 0)
    found = NumpyEngine(program)(*inputs)
    assert found.shape == (0, *program.output_shape)
    assert found.dtype == program.dtype


def test_threads_share_the_points_and_report_progress(monkeypatch):
    agreement.set_sizes(monkeypatch, small_blocks({"KEYS_PER_BLOCK": 4}, cells=100))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    anchors = np.linspace(-3, 3, 99)
    program = lookup_program(anchors, np.cos(anchors), 2.0)
    engine, names = NumpyEngine(program), set()
    run_block = engine._run_block

    def watched(u):
        names.add(threading.current_thread().name)
        return run_block(u)

    monkeypatch.setattr(engine, "_run_block", watched)
    points, seen = np.linspace(-3, 3, 200)[:, None], []
    found = engine(points, progress=seen.append)
    assert_agrees(program, (points,), found)
    assert all(name.startswith("ThreadPool") for name in names)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_progress_without_threads():
    program = lookup_program(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0)
    seen = []
    NumpyEngine(program)(np.zeros((2, 1)), progress=seen.append)
    assert seen == [1.0]


def test_an_error_in_a_thread_is_raised(monkeypatch):
    agreement.set_sizes(monkeypatch, small_blocks({}, cells=1))
    engine = NumpyEngine(lookup_program(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0))
    monkeypatch.setattr(engine, "_run_block", lambda u: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(np.zeros((100, 1)))


def test_wrong_inputs_are_refused():
    engine = NumpyEngine(lookup_program(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0))
    with pytest.raises(InputError, match="shape"):
        engine(np.zeros((2, 3)))


MILLION = """
import numpy as np
from ir.random_programs import lookup_program
from attnc.engines.numpy_engine import NumpyEngine
anchors = np.linspace(-3, 3, 1_000_000)
engine = NumpyEngine(lookup_program(anchors, np.sin(anchors), 1e3))
points = np.random.default_rng(0).uniform(-2, 2, (1000, 1))
error = np.abs(engine(points) - np.exp(-1 / 4e3) * np.sin(points[:, 0])).max()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_a_million_anchors_and_a_thousand_points_fit_in_a_gibibyte():
    """Against the exact Gaussian mean of sin; the anchors are so dense that their sum is the integral."""
    found = peak_and_error(MILLION)
    assert found["peak"] < 2**30, f"{found['peak'] / 2**20:,.0f} MiB"
    assert found["error"] < 1e-10
