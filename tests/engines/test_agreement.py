"""Every engine and export computes what the reference computes, in the same dtype, for any batch.

The tolerance is `ir.rounding`: a bound on the rounding of *any* evaluation of a program in its dtype, whatever the
order of its sums and whether or not it is folded, counted with γ_n layer by layer next to a long-double evaluation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from attnc.engines import prompt
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import InputError
from attnc.ir import Program
from engines.agreement import NETWORKS, network, small_program
from ir.random_programs import lookup_program, programs, programs_and_inputs, random_inputs
from ir.rounding import assert_agrees

Inputs = tuple[np.ndarray, ...]


def run_reference(program: Program, inputs: Inputs) -> np.ndarray:
    return program(*inputs)


def run_numpy(program: Program, inputs: Inputs) -> np.ndarray:
    return NumpyEngine(program)(*inputs)


def run_compiled(program: Program, inputs: Inputs) -> np.ndarray:
    pytest.importorskip("numba")
    return NumpyEngine(program)(*inputs, is_compiled=True)


def run_prompt(program: Program, inputs: Inputs) -> np.ndarray:
    outputs = [prompt.run(program, [given[i] for given in inputs]) for i in range(len(inputs[0]))]
    return np.stack(outputs) if outputs else np.zeros((0, *program.output_shape), program.dtype)


def run_torch(program: Program, inputs: Inputs) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from attnc.engines.torch_engine import to_torch

    with torch.no_grad():
        return to_torch(program)(*map(torch.from_numpy, inputs)).numpy()


def run_jax(program: Program, inputs: Inputs) -> np.ndarray:
    jax = pytest.importorskip("jax")
    from attnc.engines.jax_engine import to_jax

    with jax.enable_x64(True):
        return np.asarray(to_jax(program)(*inputs))


def run_onnx(program: Program, inputs: Inputs, is_optimised: bool = True) -> np.ndarray:
    """Run a checked model as users do, with all optimisations of onnxruntime, or with none."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    from attnc.exports.onnx_file import check_operators, to_model

    model = to_model(program, {})
    check_operators(model)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not is_optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [wanted.name for wanted in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, inputs, strict=True)))
    return found


def run_plain_onnx(program: Program, inputs: Inputs) -> np.ndarray:
    return run_onnx(program, inputs, is_optimised=False)


ENGINES = {"numpy": run_numpy, "compiled": run_compiled, "torch": run_torch, "jax": run_jax, "onnx": run_onnx}
NUMPY, FUSED, FUSING = "attnc.engines.numpy_engine", "attnc.engines.fused", "attnc.engines.fusing"
TORCH, JAX, ONNX = "attnc.engines.torch_engine", "attnc.engines.jax_engine", "attnc.exports.onnx_file"
DENSE = "attnc.ir.normal_form.DENSE_BYTES"
THREADS = {f"{NUMPY}.CELLS_PER_POINT_BLOCK": 8, f"{NUMPY}.SCORES_PER_THREAD": 1}
"""Every point block is a thread's work of its own."""
BLOCKS = THREADS | {f"{FUSED}.MOST_NUMBERS": -1}
"""Blocks so small that tiny programs stream, skip and unpack, and none runs as a list of instructions."""
KEYS, SCORES = f"{NUMPY}.KEYS_PER_BLOCK", f"{NUMPY}.SCORES_PER_BLOCK"
VARIANTS = {
    "reference, chunks of points and queries": (run_reference, {"attnc.ir.reference.WORKING_BYTES": 64}, 30),
    "numpy": (run_numpy, {}, 100),
    "numpy, two scores of a head at once": (run_numpy, THREADS | {f"{FUSED}.SCORES_PER_STEP": 2}, 100),
    "compiled": (run_compiled, {}, 100),
    "compiled, a point per block": (
        run_compiled,
        THREADS | {f"{FUSING}.FEWEST_POINTS": 1, f"{FUSING}.MOST_POINTS": 1},
        100,
    ),
    "numpy, several key blocks": (run_numpy, BLOCKS | {KEYS: 1}, 100),
    "numpy, blocks of two, two scores at once": (run_numpy, BLOCKS | {KEYS: 2, SCORES: 2}, 100),
    "numpy, nothing dense": (run_numpy, BLOCKS | {DENSE: 0, KEYS: 1, SCORES: 3}, 100),
    "numpy, nothing gathered": (run_numpy, BLOCKS | {f"{NUMPY}.GATHERED_KEYS": -1, KEYS: 1}, 100),
    "prompt": (run_prompt, {}, 120),
    "prompt, blocks of queries": (run_prompt, {"attnc.engines.prompt.WORKING_CELLS": 5}, 40),
    "torch": (run_torch, {}, 40),
    "torch, one cell a block": (run_torch, {f"{TORCH}.CELLS_PER_TORCH_BLOCK": 1}, 40),
    "torch, sparse": (run_torch, {f"{TORCH}.CELLS_PER_TORCH_BLOCK": 9, f"{TORCH}.DENSE_CELLS": 0}, 40),
    "jax": (run_jax, {}, 12),  # XLA compiles each program for about half a second
    "jax, stages": (run_jax, {f"{JAX}.MOST_TERMS": -1}, 12),
    "jax, one cell a block, indexed": (
        run_jax,
        {f"{JAX}.MOST_TERMS": -1, f"{JAX}.CELLS_PER_JAX_BLOCK": 1, f"{JAX}.DENSE_CELLS": 0},
        12,
    ),
    "onnx": (run_onnx, {}, 40),
    "onnx, sparse": (run_onnx, {f"{ONNX}.DENSE_CELLS": 0}, 40),
    "onnx, not optimised": (run_plain_onnx, {}, 40),
    "onnx, sparse and not optimised": (run_plain_onnx, {f"{ONNX}.DENSE_CELLS": 0}, 40),
}
"""The engine, new values of constants that send tiny programs along every path, and the number of programs."""


@pytest.mark.parametrize("name", VARIANTS)
def test_random_programs(name, monkeypatch):
    """Empty batches, wide logits, masks and memories; the inputs are left as they are."""
    run, sizes, examples = VARIANTS[name]
    run(small_program(), (np.zeros((1, 1)),))  # imports the engine, or skips the test
    for constant, size in sizes.items():
        monkeypatch.setattr(constant, size)

    @settings(max_examples=examples)
    @given(programs_and_inputs(max_tokens=9, scales=(0.1, 1.0, 20.0, 400.0)))
    def agree(case):
        program, inputs = case
        before = [given.copy() for given in inputs]
        assert_agrees(program, inputs, run(program, inputs))
        assert all((given == kept).all() for given, kept in zip(inputs, before, strict=True))

    agree()


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=30)
@given(program=programs())
def test_any_layer_name(engine, program):
    inputs = random_inputs(program, 2, 0)
    assert_agrees(program, inputs, ENGINES[engine](program, inputs))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_constructions(engine, name, dtype):
    program = network(name, dtype).program
    for batch in (0, 1, 7):
        inputs = tuple(array / 2 for array in random_inputs(program, batch, batch))
        assert_agrees(program, inputs, ENGINES[engine](program, inputs))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("engine", ENGINES)
def test_logits_that_span_a_million_give_no_nan(engine, dtype):
    program, points = small_program(dtype, 1e6, 101), np.linspace(-1, 1, 37)[:, None].astype(dtype)
    assert_agrees(program, (points,), ENGINES[engine](program, (points,)))


@pytest.mark.parametrize("run", [run_reference, run_numpy])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "takes 1 input"),
        ((np.zeros((2, 1)), np.zeros((2, 1))), "2 given"),
        ((np.zeros((2, 2)),), r"shape \(2, 2\): the program takes \(batch, 1\)"),
        ((np.zeros(()),), "takes"),
    ],
)
def test_wrong_inputs_are_refused(run, inputs, message):
    program = lookup_program(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0)
    with pytest.raises(InputError, match=message):
        run(program, inputs)


@pytest.mark.parametrize(
    ("missing", "extra", "code"),
    [
        ("torch", "torch", "import attnc.engines.torch_engine"),
        ("jax", "jax", "import attnc.engines.jax_engine"),
        ("onnx", "onnx", "from attnc.exports.onnx_file import run_onnx; run_onnx('f', [])"),
        ("onnxruntime", "onnx", "from attnc.exports.onnx_file import run_onnx; run_onnx('f', [])"),
    ],
)
def test_without_the_extra_the_error_says_what_to_install(missing, extra, code):
    pytest.importorskip(extra)
    code = f"import sys; sys.modules['{missing}'] = None; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtra" in done.stderr
    assert f"pip install 'attnc[{extra}]'" in done.stderr


MILLION = """
import json, sys
import numpy as np
from ir.random_programs import lookup_program
engine, num_points = sys.argv[1], int(sys.argv[2])
anchors, points = np.linspace(-3, 3, 1_000_000), np.random.default_rng(0).uniform(-2, 2, (num_points, 1))
program = lookup_program(anchors, np.sin(anchors), 1e3)
if engine in ("numpy", "compiled"):
    from attnc.engines.numpy_engine import NumpyEngine
    out = NumpyEngine(program)(points, is_compiled=engine == "compiled")
elif engine.startswith("jax"):
    import jax
    from attnc.engines.jax_engine import to_jax
    jax.config.update("jax_enable_x64", True)
    function = to_jax(program)
    out = np.asarray(function(points))
else:
    import torch
    from attnc.engines.torch_engine import to_torch
    x = torch.tensor(points, requires_grad=engine == "gradient")
    found = to_torch(program)(x)
    out = found.detach().numpy()
error = np.abs(out - np.exp(-1 / 4e3) * np.sin(points[:, 0])).max()
if engine == "gradient":
    found.sum().backward()
    error = max(error, np.abs(x.grad.numpy() - np.exp(-1 / 4e3) * np.cos(points)).max())
if engine == "jax gradient":
    found = np.asarray(jax.grad(lambda x: function(x).sum())(points))
    error = max(error, np.abs(found - np.exp(-1 / 4e3) * np.cos(points)).max())
# The high-water mark of this address space; ru_maxrss would also count the process that started it.
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"peak": peak, "error": float(error)}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("engine", "num_points", "allowed"),
    [
        ("numpy", 1000, 1e-10),
        ("compiled", 1000, 1e-10),
        ("torch", 60, 1e-8),
        ("gradient", 60, 1e-8),
        ("jax", 60, 1e-8),
        ("jax gradient", 60, 1e-8),
        pytest.param("torch", 1000, 1e-8, marks=pytest.mark.slow),
        pytest.param("gradient", 1000, 1e-8, marks=pytest.mark.slow),
    ],
)
def test_a_million_anchors_fit_in_a_gibibyte(engine, num_points, allowed):
    """Against the exact Gaussian mean of sin; whole, scores and weights of 60 points would be 960 MB."""
    if engine != "numpy":
        pytest.importorskip({"compiled": "numba", "jax": "jax", "jax gradient": "jax"}.get(engine, "torch"))
    command = [sys.executable, "-c", MILLION, engine, str(num_points)]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=path)
    found = json.loads(done.stdout)
    assert found["peak"] < 2**30, f"{found['peak'] / 2**20:,.0f} MiB"
    assert found["error"] < allowed
