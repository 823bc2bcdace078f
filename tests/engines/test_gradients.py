"""Every engine has the gradient of the program, within the rounding of its dtype.

The tolerance is `ir.gradient_rounding`, a bound for any evaluation, next to the gradient in long double.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

import attnc
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import InputError
from attnc.ir import Program
from attnc.ir.program import split_columns
from engines.agreement import NETWORKS, network, small_program
from ir.gradient_rounding import assert_gradients_agree, exact_gradient_and_bound
from ir.random_programs import lookup_program, programs_and_inputs, random_inputs

Inputs = tuple[np.ndarray, ...]
GRADIENT = "attnc.engines.gradient"


def run_numpy(program: Program, inputs: Inputs) -> np.ndarray:
    return NumpyEngine(program).gradient(*inputs)


def run_compiled(program: Program, inputs: Inputs) -> np.ndarray:
    pytest.importorskip("numba")
    return NumpyEngine(program).gradient(*inputs, is_compiled=True)


def flat_shape(program: Program, inputs: Inputs) -> tuple[int, int, int]:
    count = sum(math.prod(shape) for shape in program.input_shapes)
    return len(inputs[0]), math.prod(program.output_shape), count


def run_torch(program: Program, inputs: Inputs) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from attnc.engines.torch_engine import to_torch

    found = np.empty(flat_shape(program, inputs), program.dtype)
    module, given = to_torch(program), [torch.tensor(each, requires_grad=True) for each in inputs]
    outputs = module(*given).reshape(found.shape[:2])
    for output in range(found.shape[1]):
        parts = [torch.zeros_like(each) for each in given]
        if outputs.requires_grad:
            wanted = torch.autograd.grad(outputs[:, output].sum(), given, retain_graph=True, materialize_grads=True)
            parts = list(wanted)
        found[:, output] = np.concatenate(
            [part.numpy().reshape(len(found), math.prod(part.shape[1:])) for part in parts], axis=1
        )
    return found


def run_jax(program: Program, inputs: Inputs) -> np.ndarray:
    jax = pytest.importorskip("jax")
    from attnc.engines.jax_engine import to_jax

    shape = flat_shape(program, inputs)
    with jax.enable_x64(True):
        if not shape[0]:
            return np.zeros(shape, program.dtype)
        function = to_jax(program)

        def one(flat):
            return function(*(part[0] for part in split_columns(flat[None], program.input_shapes))).reshape(-1)

        flat = np.concatenate([given.reshape(len(given), -1) for given in inputs], axis=1)
        return np.asarray(jax.vmap(jax.jacfwd(one))(flat)).reshape(shape)


ENGINES = {"numpy": run_numpy, "compiled": run_compiled, "torch": run_torch, "jax": run_jax}
VARIANTS = {
    "numpy": (run_numpy, {}, 40),
    "numpy, a cell per block": (run_numpy, {f"{GRADIENT}.CELLS_PER_BLOCK": 1}, 20),
    "compiled": (run_compiled, {}, 40),
    "torch": (run_torch, {}, 12),
    "jax": (run_jax, {}, 3),  # XLA compiles each program for about half a second
}
"""The engine, new values of constants that send tiny programs along every path, and the number of programs."""


@pytest.mark.parametrize("name", VARIANTS)
def test_random_programs(name, monkeypatch):
    """Empty batches, wide logits, masks, moving keys and memories."""
    run, sizes, examples = VARIANTS[name]
    run(small_program(), (np.zeros((1, 1)),))  # imports the engine, or skips the test
    for constant, size in sizes.items():
        monkeypatch.setattr(constant, size)

    @settings(max_examples=examples)
    @given(programs_and_inputs(max_tokens=6, scales=(0.1, 1.0, 20.0, 400.0)))
    def agree(case):
        program, inputs = case
        assert_gradients_agree(program, inputs, run(program, inputs))

    agree()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ["numpy", "compiled", "torch"])
def test_constructions(engine, name, dtype):
    program = network(name, dtype).program
    for batch in (0, 1, 3):
        inputs = tuple(array / 2 for array in random_inputs(program, batch, batch))
        assert_gradients_agree(program, inputs, ENGINES[engine](program, inputs))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_constructions_in_jax(dtype):
    program = network("compose", dtype).program
    inputs = tuple(array / 2 for array in random_inputs(program, 3, 3))
    assert_gradients_agree(program, inputs, run_jax(program, inputs))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("engine", ["numpy", "compiled", "torch"])
def test_logits_that_span_a_million_give_no_nan(engine, dtype):
    program, points = small_program(dtype, 1e6, 101), np.linspace(-1, 1, 37)[:, None].astype(dtype)
    assert_gradients_agree(program, (points,), ENGINES[engine](program, (points,)))


@pytest.mark.parametrize(("dtype", "allowed"), [(np.float64, 1e-10), (np.float32, 2e-2)])
def test_the_tolerance_is_not_vacuous(dtype, allowed):
    """It counts 24 roundings of every score, whose effects on both factors and all keys add up."""
    program = lookup_program(np.linspace(-1, 1, 9), np.cos(np.linspace(-1, 1, 9)), 4.0, dtype)
    points = np.random.default_rng(0).uniform(-1, 1, (400, 1)).astype(dtype)
    exact, bound = exact_gradient_and_bound(program, (points,))
    assert bound.max() <= allowed * np.abs(exact).max()


@pytest.mark.parametrize("run", [run_numpy, run_compiled])
def test_many_keys_take_bounded_memory_and_are_exact(run):
    """A Gaussian mean of sin has the slope e^{−1/4β} cos x. 20,000 keys are too many for compiled instructions."""
    anchors = np.linspace(-3, 3, 20_000)
    program, points = lookup_program(anchors, np.sin(anchors), 1e2), np.linspace(-1, 1, 15)[:, None]
    expected = np.exp(-1 / 4e2) * np.cos(points)[:, None]
    assert np.abs(run(program, (points,)) - expected).max() < 1e-10


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", [(150,), (14, 13)])
def test_windows_of_grids_have_the_gradient_of_all_keys(shape, is_compiled):
    """They lose digits to cancellation, at most as many as the slopes of keys are larger than their differences."""
    if is_compiled:
        pytest.importorskip("numba")
    axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    points, rng = np.stack([axis.ravel() for axis in axes], axis=1), np.random.default_rng(0)
    net = attnc.compile(attnc.TableTarget(points, rng.normal(size=(len(points), 2))), eps=1e-6)
    engine, at = NumpyEngine(net.program), rng.uniform(-1, 1, (300, len(shape)))
    expected = engine.gradient(at)
    found = engine.gradient(at, with_grids=True, is_compiled=is_compiled)
    assert engine.has_grids
    assert found.shape == (300, 2, len(shape))
    assert 0 < np.abs(found - expected).max() <= 1e-9 * np.abs(expected).max()


# --- networks ---------------------------------------------------------------------------------------------------------


def test_the_gradient_of_a_network_is_near_that_of_the_function():
    net = attnc.compile("sin(x) + y**2, x*y", {"x": (-2, 2), "y": (-1, 1)}, 1e-7)
    points = net.box.lo + (net.box.hi - net.box.lo) * np.random.default_rng(0).random((3000, 2))
    x, y = points.T
    expected = np.stack([np.stack([np.cos(x), 2 * y], axis=1), np.stack([y, x], axis=1)], axis=1)
    found = net.gradient(points)
    assert found.shape == (3000, 2, 2)
    assert found.dtype == np.float64
    assert np.abs(found - expected).max() < 1e-4


def test_shapes_and_dtypes():
    net = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4, dtype="float32")
    assert net.gradient(np.zeros((0, 1))).shape == (0, 1, 1)
    assert net.gradient([[0.0]]).shape == (1, 1, 1)
    assert net.gradient([[0.0]]).dtype == np.float32
    sequence = network("max_affine, sequence")
    assert sequence.gradient(np.zeros((2, 2, 1))).shape == (2, 2, 2)


def test_points_are_refused_as_in_a_call():
    net = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4)
    for points, message in (
        ([[2.0]], "outside"),
        ([[math.nan]], "NaN"),
        ([[0.0, 1.0]], "takes"),
        ([["a"]], "points"),
    ):
        with pytest.raises(InputError, match=message):
            net.gradient(points)
    with pytest.raises(InputError, match="outside must be"):
        net.gradient([[0.0]], outside="nan")
    assert net.gradient([[2.0]], outside="clamp") == net.gradient([[1.0]])
    assert np.isfinite(net.gradient([[2.0]], outside="allow")).all()


def test_scores_that_overflow_are_refused():
    net = attnc.compile("gelu(x)", {"x": (-math.inf, math.inf)}, 1e-3)
    assert net.gradient([[1e3], [-1e3]]).ravel().round(6).tolist() == [1.0, 0.0]
    with pytest.raises(InputError, match="overflow"):
        net.gradient([[1e308]])


def test_progress_reaches_one():
    net, seen = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4), list[float]()
    net.gradient(np.zeros((100_000, 1)), progress=seen.append)
    assert seen[-1] == 1


def test_derivatives_of_derivatives_in_torch():
    torch = pytest.importorskip("torch")
    module = attnc.compile("sin(x)*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-6).to_torch()
    points = torch.rand(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(module, points)
    assert torch.autograd.gradgradcheck(module, points)
