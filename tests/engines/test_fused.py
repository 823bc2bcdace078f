"""Programs as lists of instructions, in numpy and in compiled loops. Random programs are in test_agreement."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import attnc
from attnc import network
from attnc.engines import fused, numpy_engine
from attnc.engines.fused import AFFINE, PRODUCT, SIMPLE_HEAD
from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Affine, Attention, Mask, Program, Softmax
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.spec import check
from engines.agreement import small_program
from engines.test_agreement import run_compiled, run_jax, run_numpy, run_onnx, run_prompt, run_reference, run_torch
from ir.rounding import assert_agrees

BOX = {"x": (-2, 2), "y": (-1, 2)}
FUNCTIONS = {
    "sums": "sin(x) + cos(y)",
    "products and nested functions": "exp(sin(x)*y)",
    "divisions": "tanh(x - y)/(1 + x**2)",
    "kinks": "max(sin(3*x), y**2 - 0.5)",
    "several outputs": "sin(x)*y, abs(x - y), exp(y)",
}


def compiled_network(name: str, dtype: str) -> attnc.Network:
    return attnc.compile(FUNCTIONS[name], BOX, 1e-3, dtype=dtype)


def run_stages(program: Program, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "MOST_NUMBERS", -1)
        engine = NumpyEngine(program)
    assert engine._fused is None
    return engine(*inputs)


RUNS = {"reference": run_reference, "instructions": run_numpy, "stages": run_stages, "compiled": run_compiled}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_networks_of_any_depth(name: str, dtype: str) -> None:
    net = compiled_network(name, dtype)
    fused_engine = net._engine._fused
    assert fused_engine is not None
    kinds = {step.kind for step in fused_engine._given.steps}
    assert SIMPLE_HEAD in kinds
    assert name != "products and nested functions" or PRODUCT in kinds
    lo, hi = net.box.lo, net.box.hi
    points = np.random.default_rng(1).uniform(lo, hi, (300, 2)).astype(dtype).clip(lo, hi).astype(dtype)
    for run in RUNS.values():
        assert_agrees(net.program, (points,), run(net.program, (points,)))


@pytest.mark.parametrize("run", RUNS)
def test_scores_that_overflow_give_nan(run: str) -> None:
    """Also if some scores are finite: +∞ and −∞ add up to NaN in one of them."""
    for dtype in (np.float64, np.float32):
        largest = float(np.finfo(dtype).max)
        points = np.array([[0.5, 0.5], [largest, largest], [np.inf, 0.0], [np.nan, 0.0], [0.25, 0.5]], dtype)
        with np.errstate(all="ignore"):
            found = RUNS[run](two_arguments(dtype), (points,))
        assert np.isfinite(found).all(axis=1).tolist() == [True, False, False, False, True]


def two_arguments(dtype: type) -> Program:
    """A softmax of three scores: 0, 2x − 2y, x. Nothing else is finite for large x = y."""
    embed = AffineBuilder(1, ["x", "y"], 1, ["a", "b", "c"])
    embed.set([0], "a", 0.5)
    embed.link([0], "b", [0], "x", 2.0)
    embed.link([0], "b", [0], "y", -2.0)
    embed.link([0], "c", [0], "x", 1e-300 if dtype is np.float64 else 1e-30)
    return check(Program((embed.build("embed", np.dtype(dtype)), Softmax("soften", ("a", "b", "c"))), ((2,),), (3,)))


def changed(program: Program) -> Iterator[tuple[str, Program]]:
    """Return the program with one stored number changed, for one number of each stored tensor."""
    rng = np.random.default_rng(0)

    def scaled(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values.flat[rng.choice(np.flatnonzero(values))] *= 1.25
        return values

    for stream in ("layers", "memory"):
        layers = getattr(program, stream)
        for i, layer in enumerate(layers):
            made = list[tuple[str, object]]()
            if isinstance(layer, Affine):
                for part in ("weight", "constant"):
                    tensor = getattr(layer, part)
                    if len(tensor.values):
                        new = dataclasses.replace(tensor, values=scaled(tensor.values))
                        made.append((part, dataclasses.replace(layer, **{part: new})))
            elif isinstance(layer, Attention):
                for j, head in enumerate(layer.heads):
                    for part, matrix in head.matrices.items():
                        new_head = dataclasses.replace(head, **{part: scaled(matrix)})
                        heads = (*layer.heads[:j], new_head, *layer.heads[j + 1 :])
                        made.append((f"head {j} {part}", dataclasses.replace(layer, heads=heads)))
            for name, new_layer in made:
                new_layers = (*layers[:i], new_layer, *layers[i + 1 :])
                yield f"{layer.name} {name}", check(dataclasses.replace(program, **{stream: new_layers}))


OTHERS = {"torch": run_torch, "jax": run_jax, "onnxruntime": run_onnx}
"""Engines of other packages, by the package."""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("name", ["sums", "products and nested functions"])
def test_engines_read_stored_tensors_and_nothing_else(name: str) -> None:
    """A changed number changes the outputs of every engine, and a network without its expression computes the same."""
    net = compiled_network(name, "float64")
    points = np.random.default_rng(2).uniform(net.box.lo, net.box.hi, (40, 2))
    runs = {**RUNS, "prompt": run_prompt, **{engine: run for engine, run in OTHERS.items() if is_installed(engine)}}
    before = {engine: run(net.program, (points,)) for engine, run in runs.items()}
    programs = list(changed(net.program))
    assert len(programs) >= 2 + 4 * net.program.num_heads
    for tensor, program in programs:
        after = {engine: run(program, (points,)) for engine, run in runs.items()}
        for engine in runs:
            assert np.abs(after[engine] - before[engine]).max() > 1e-9, (engine, tensor)
    bare = dataclasses.replace(net, expression=None, definitions=None)
    assert (bare(points) == net(points)).all()
    for engine, run in runs.items():
        assert (run(bare.program, (points,)) == before[engine]).all(), engine


def test_threads_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    program = compiled_network("products and nested functions", "float64").program
    points = np.random.default_rng(0).uniform(-1, 1, (5000, 2))
    expected = run_compiled(program, (points,))
    threads, run = set(), fused.Fused.run

    def watched(self: fused.Fused, num_points: int, is_compiled: bool) -> fused.RunBlock:
        block = run(self, num_points, is_compiled)

        def slow(*arguments: np.ndarray) -> bool:
            threads.add(threading.get_ident())
            time.sleep(0.002)  # so that the calling thread does not take all parts
            return block(*arguments)

        return slow

    monkeypatch.setattr(numpy_engine, "SCORES_PER_THREAD", 1)
    monkeypatch.setattr(numpy_engine, "LEAST_COMPILED", 0)
    monkeypatch.setattr(numpy_engine, "CORES", 4)
    monkeypatch.setattr(fused.Fused, "run", watched)
    assert (run_compiled(program, (points,)) == expected).all()
    assert threading.get_ident() in threads  # the calling thread takes parts as well
    assert len(threads) > 1


def test_little_work_of_compiled_loops_stays_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a thread takes longer than the loops."""
    parts = list[int]()

    def run(u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        parts.append(len(u))
        return True

    points, ends = np.zeros((1000, 1)), (np.zeros(1), np.zeros(1))
    work = numpy_engine.LEAST_COMPILED // len(points)
    for each, expected in ((work, 1), (work + 1, 3), (99 * work, numpy_engine.MOST_PARTS)):
        parts.clear()
        numpy_engine.in_parts(run, points, points.copy(), ends, 1, each, least=numpy_engine.LEAST_COMPILED, threads=1)
        assert sum(parts) == len(points)
        assert len(parts) == expected


def test_an_error_in_any_thread_is_raised_once_all_threads_have_ended() -> None:
    points, running = np.zeros((100, 1)), set[int]()

    def run(u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        thread = threading.get_ident()
        running.add(thread)
        try:
            time.sleep(0.002)
            if thread != caller:
                raise ValueError("in another thread")
            return True
        finally:
            running.remove(thread)

    caller, ends = threading.get_ident(), (np.zeros(1), np.zeros(1))
    with pytest.raises(ValueError, match="in another thread"):
        numpy_engine.in_parts(run, points, points.copy(), ends, 1, numpy_engine.SCORES_PER_THREAD, threads=3)
    assert not running


def test_arrays_of_any_order_are_taken_by_the_same_loops() -> None:
    """Other types of arrays would be compiled for seconds."""
    pytest.importorskip("numba")
    from attnc.engines.fused_numba import _run

    program, points = small_program(), np.linspace(-1, 1, 40)[:, None]
    expected, before = run_compiled(program, (points,)), len(_run.signatures)
    fixed = points.copy()
    fixed.flags.writeable = False
    wide = np.zeros((40, 3))
    wide[:, 1:2] = points
    for given in (fixed, wide[:, 1:2], np.broadcast_to(points, (40, 1)), np.asfortranarray(points)):
        assert (run_compiled(program, (given,)) == expected).all()
    assert len(_run.signatures) == before


# --- the order of additions -------------------------------------------------------------------------------------------


def mixing(num_heads: int, values: list[dict[str, float]]) -> Program:
    """Heads over constant keys, one for each of the values: forms of the inputs. The residual has two terms."""
    inputs, names, count = [f"x{i}" for i in range(5)], ("s", "key", "v", "w"), len(values)
    embed = AffineBuilder(1, inputs, 1 + count, names)
    embed.link([0], "s", [0], "x0", 0.3)
    embed.link([0], "s", [0], "x1", 0.7)
    embed.set(np.arange(1, 1 + count), "key", np.arange(count) - 1.5)
    embed.set(np.arange(1, 1 + count), "w", np.arange(count) + 1.5)
    for token, form in enumerate(values, 1):
        for name, factor in form.items():
            embed.link([token], "v", [0], name, factor)
    dtype, of_keys = np.dtype(np.float32), np.full(1 + count, EVERY_QUERY)
    of_keys[0] = 1  # no token sees the first one
    attending = Attending(names, names, dtype, Mask(np.zeros(1 + count, np.int64), of_keys))
    entries = {("v", "v"): 1.0, ("w", "w"): 1.0}
    head = attending.head({("s", "k"): 1.0}, {("key", "k"): 1.0}, entries, {("v", "s"): 1.1, ("w", "s"): 1.3})
    layers = (
        embed.build("embed", dtype),
        Attention("mix", (head,) * num_heads, names, residual=True),
        reading("read", 1 + count, names, [0], {"y": "s"}, dtype),
    )
    return check(Program(layers, ((5,),), (1,)))


def test_heads_and_the_residual_are_summed_on_their_own() -> None:
    """The bound on rounding counts one addition for every other head, whatever the number of their values."""
    program = mixing(4, [{"x2": 0.5}] * 3)
    steps = NumpyEngine(program)._fused._given.steps
    *others, last = (len(step.reads) for step in steps if step.kind == AFFINE)
    assert last == 5
    assert others == [2] * 5  # the query, which all heads share, and which is the residual; the values of each head
    points = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    for run in RUNS.values():
        assert_agrees(program, (points,), run(program, (points,)))


@pytest.mark.parametrize(("num_variables", "is_list"), [(1, True), (2, True), (3, False), (5, False)])
def test_values_of_many_variables_are_averaged_key_by_key(num_variables: int, is_list: bool) -> None:
    """One variable for each key: the bound on rounding counts no additions in the values, and two in reserve."""
    program = mixing(1, [{f"x{k % num_variables}": 0.5} for k in range(5)])
    assert (NumpyEngine(program)._fused is not None) == is_list
    points = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    for run in (run_numpy, run_compiled):
        assert_agrees(program, (points,), run(program, (points,)))


# --- when loops are compiled ------------------------------------------------------------------------------------------


def test_networks_run_compiled_loops_if_numba_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs start from `at`, which is numpy's, so that certificates do not depend on installed extras."""
    calls: list[bool] = []
    run = NumpyEngine.__call__

    def watched(self: NumpyEngine, *inputs: np.ndarray, is_compiled: bool = False, **given: object) -> np.ndarray:
        calls.append(is_compiled)
        return run(self, *inputs, **given)

    monkeypatch.setattr(NumpyEngine, "__call__", watched)
    monkeypatch.setattr(network, "has_numba", lambda: True)
    net = attnc.compile("sin(x)", {"x": (0, 1)}, 1e-3)
    assert net.bound({"x": (0, 0.5)}) <= net.bound()
    net.at(np.zeros((2, 1)))
    assert not any(calls)
    net([[0.5]])
    net.run([[0.5]])
    assert calls[-2:] == [True, True]
    monkeypatch.setattr(network, "has_numba", lambda: False)
    net([[0.5]])
    assert not calls[-1]


@pytest.mark.parametrize("text", ["sin(x)+cos(y)", "exp(sin(x)*y)", "max(sin(3*x), y**2-0.5)"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_number_of_threads_does_not_change_a_bit(
    text: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        pytest.importorskip("numba")
    engine = NumpyEngine(attnc.compile(text, {"x": (-1, 1), "y": (-1, 1)}, 1e-5, construction="compose").program)
    monkeypatch.setattr(numpy_engine, "SCORES_PER_THREAD", 100)
    points, found = np.random.default_rng(0).uniform(-1, 1, (1003, 2)), []
    for cores in (1, 2, 3, 7):
        monkeypatch.setattr(numpy_engine, "CORES", cores)
        found.append(engine(points, is_compiled=is_compiled))
    assert all((each == found[0]).all() for each in found[1:])
