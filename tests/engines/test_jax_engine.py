"""The JAX function: transformations, gradients, dtypes, memory. Its values are tested in test_agreement."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import pytest

import attnc
from attnc.doctor import EXTRA_ROUNDINGS
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import InputError
from attnc.ir.summing import depth
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma
from engines import agreement
from engines.test_torch_engine import many_segments
from ir.random_programs import lookup_program, random_inputs
from ir.rounding import assert_agrees, exact_and_bound

jax = pytest.importorskip("jax", reason="jax is not installed: pip install -c constraints.txt -e '.[jax]'")
import jax.numpy as jnp  # noqa: E402

from attnc.engines import jax_engine  # noqa: E402  (imports jax)
from attnc.engines.jax_engine import to_jax  # noqa: E402

SMALL = {
    "written out": {},
    "stages": {"MOST_TERMS": -1},
    "one point a block, indexed": {"MOST_TERMS": -1, "CELLS_PER_JAX_BLOCK": 1, "DENSE_CELLS": 0},
}


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=SMALL.values(), ids=SMALL)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in request.param.items():
        monkeypatch.setattr(jax_engine, name, size)


# --- transformations --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_jit_and_vmap_compute_the_same(dtype: str) -> None:
    """The function takes a batch, single points, and batches of batches."""
    net = agreement.network("compose", dtype)
    function, points = net.to_jax(), np.random.default_rng(0).uniform(-1, 1, (6, 2)).astype(dtype)
    found = {
        "called": function(points),
        "jit": jax.jit(lambda x: 1.0 * function(x))(points),
        "vmap": jax.vmap(function)(points),
        "one by one": jnp.stack([function(point) for point in points]),
        "vmap of batches": jax.vmap(function)(points.reshape(3, 2, 2)).ravel(),
    }
    for outputs in found.values():
        assert isinstance(outputs, jax.Array)
        assert_agrees(net.program, (points,), np.asarray(outputs))


@pytest.mark.parametrize("text", ["x*y", "1/(1+25*x**2)+y", "exp(sin(x)*y)"])
def test_points_far_from_the_box(text: str) -> None:
    """Heads are saturated there: their arguments are moved to where powers neither overflow nor underflow."""
    net = attnc.compile(text, {"x": (-1, 1), "y": (-1, 1)}, 1e-6)
    near = np.random.default_rng(0).uniform(-1, 1, (8, 2))
    for scale in (1.0, 30.0, 1e4):
        assert_agrees(net.program, (scale * near,), np.asarray(net.to_jax()(scale * near)))
        inside = np.clip(scale * near, -1, 1)
        assert_agrees(net.program, (inside,), np.asarray(net.to_jax(outside="clamp")(scale * near)))
    assert np.isnan(np.asarray(net.to_jax()(np.array([[np.nan, 0.5], [np.inf, 0.5]])))).all()


def test_sequences_and_several_inputs_without_a_batch() -> None:
    program = agreement.network("max_affine_cross").program
    function, inputs = to_jax(program), tuple(array / 2 for array in random_inputs(program, 3, 0))
    whole = function(*inputs)
    assert whole.shape == (3, *program.output_shape)
    np.testing.assert_allclose(jax.vmap(function)(*inputs), whole, rtol=0, atol=1e-12)
    assert function(*(array[0] for array in inputs)).shape == program.output_shape


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("residual", [True, False])
def test_masks_of_many_segments(residual: bool) -> None:
    program = many_segments(12, residual)
    inputs = random_inputs(program, 3, 0)
    assert_agrees(program, inputs, np.asarray(to_jax(program)(*inputs)))


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("name", ["compose", "max_affine", "relu_network"])
def test_gradients_of_constructions(name: str) -> None:
    """Central differences of the numpy engine at points where they have settled, which near a tie they have not."""
    program = agreement.network(name).program
    engine, step = NumpyEngine(program), 1e-5
    (points,) = (array / 2 for array in random_inputs(program, 50, 5))
    found = jax.grad(lambda x: to_jax(program)(x).sum())(points)
    direction = np.zeros_like(points)
    direction[:, 0] = 1

    def slope(step: float) -> np.ndarray:
        ahead, behind = (engine(points + sign * step * direction) for sign in (1, -1))
        return (ahead - behind).reshape(len(points), -1).sum(axis=1) / (2 * step)

    rounding = exact_and_bound(program, (points[:3],))[1].max() * np.prod(program.output_shape)
    allowed = np.abs(slope(step) - slope(2 * step)) + 10 * float(rounding) / step
    has_settled = allowed < 1e-3
    assert has_settled.mean() > 0.8
    assert (np.abs(np.asarray(found)[:, 0] - slope(step)) <= allowed)[has_settled].all()


@pytest.mark.parametrize("name", ["compose", "truncated_linear", "max_affine_cross"])
def test_gradients_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    from attnc.engines.torch_engine import to_torch

    program = agreement.network(name).program
    inputs = tuple(array / 2 for array in random_inputs(program, 9, 5))
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    to_torch(program)(*tensors).sum().backward()
    function = to_jax(program)
    found = jax.grad(lambda arrays: function(*arrays).sum())(inputs)
    for tensor, gradient in zip(tensors, found, strict=True):
        scale = 1 + tensor.grad.abs().max().item()
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=0, atol=1e-9 * scale)


@pytest.mark.usefixtures("sizes")
def test_second_derivatives_and_gradients_of_single_points() -> None:
    function, points = to_jax(agreement.small_program()), jnp.array([[0.3], [-0.2], [0.9]])
    of_batch = jax.grad(lambda x: function(x).sum())(points)
    np.testing.assert_allclose(jax.vmap(jax.grad(function))(points), of_batch, rtol=1e-12, atol=1e-12)
    step = 1e-5
    ahead, behind = (jax.grad(lambda x: function(x).sum())(points + sign * step) for sign in (1, -1))
    second = jax.vmap(jax.hessian(function))(points)[:, 0]
    np.testing.assert_allclose(second, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_logits_that_span_a_million_have_finite_gradients(dtype: type) -> None:
    function = to_jax(agreement.small_program(dtype, 1e6, 33))
    points = jnp.linspace(-1, 1, 37)[:, None].astype(dtype)
    assert jnp.isfinite(jax.grad(lambda x: function(x).sum())(points)).all()


@pytest.mark.parametrize("text", ["x*y", "1/(1+25*x**2)+y", "log(1+x**2+y**2)*tanh(x-y)"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_call_within_a_transformation_agrees(text: str, dtype: str) -> None:
    """A call with arrays has options of its own, which JAX refuses within `jit`, also for arrays that are constants."""
    net = attnc.compile(text, {"x": (-1, 1), "y": (-1, 1)}, 1e-4, dtype=dtype)
    function, points = net.to_jax(), np.random.default_rng(0).uniform(-1, 1, (500, 2)).astype(dtype)
    found = (
        function(points),
        jax.jit(function)(points),
        jax.jit(lambda zero: function(points) + zero)(jnp.zeros((), dtype)),
        jax.vmap(function)(points),
        jax.jit(function, compiler_options={"xla_cpu_prefer_vector_width": 128})(points),
    )
    for values in found:
        assert_agrees(net.program, (points,), np.asarray(values).reshape(-1, *net.program.output_shape))


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_outside_the_box(dtype: str) -> None:
    net = attnc.compile("(x*y, 3)", {"x": (-3, 3), "y": (0, 0.1)}, 1e-2, dtype=dtype)
    inside, tolerance = np.array([[0.0, 0.05], [3.0, 0.1], [-3.0, 0.0]]), 1e-5 if dtype == "float32" else 1e-13
    points = np.concatenate([inside, [[4.0, 0.05], [0.0, -0.001], [100.0, 9.0], [np.nan, 0.05]]])
    clamped, allowed, marked = (np.asarray(net.to_jax(outside=word)(points)) for word in ("clamp", "allow", "nan"))
    np.testing.assert_allclose(clamped[:-1], net(points[:-1], outside="clamp"), atol=tolerance)
    np.testing.assert_allclose(allowed[:-1], net(points[:-1], outside="allow"), rtol=1e-5, atol=tolerance)
    np.testing.assert_allclose(marked[:3], net(inside), atol=tolerance)
    assert np.isnan(marked[3:]).all()
    assert np.isnan(clamped[-1, 0])
    slopes = jax.grad(lambda x: net.to_jax(outside="nan")(x)[:3].sum())(points[:-1])
    assert np.isfinite(slopes).all()
    with pytest.raises(InputError, match="outside must be one of clamp, nan, allow"):
        net.to_jax(outside="raise")


def test_inputs_of_any_real_dtype_are_cast() -> None:
    function = to_jax(agreement.small_program())
    assert function(np.array([[0.5]], np.float16)).dtype == np.float64
    assert function(np.array([[1]])).item() == function(jnp.array([[1.0]])).item()
    assert to_jax(agreement.small_program(np.float32))(np.array([[0.5]])).dtype == np.float32


def test_float64_is_never_computed_in_float32() -> None:
    """Neither when the function is made, nor when it is called later."""
    program = agreement.small_program()
    function = to_jax(program)
    with jax.enable_x64(False):
        for act in (lambda: to_jax(program), lambda: function(np.zeros((1, 1)))):
            with pytest.raises(InputError, match=re.escape('jax.config.update("jax_enable_x64", True)')):
                act()
        assert to_jax(agreement.small_program(np.float32))(np.zeros((1, 1))).dtype == np.float32


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ((), "takes 1 input"),
        ((np.zeros((2, 3)),), r"shape \(2, 3\): the network takes \(batch, 1\)"),
        ((np.zeros(()),), "shape"),
        ((np.zeros((2, 1), complex),), "real arrays; found complex128"),
        (([[0.5]],), "real arrays; found <class 'list'>"),
        ((np.zeros((2, 2, 1)), np.zeros((3, 1, 1))), "batch size"),
    ],
)
def test_wrong_inputs_are_refused(inputs: tuple[object, ...], complaint: str) -> None:
    two = complaint == "batch size"
    function = to_jax(agreement.network("max_affine_cross").program if two else agreement.small_program())
    with pytest.raises(InputError, match=complaint):
        function(*inputs)


# --- arithmetic and stored numbers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("num_keys", [61, 700])
def test_sums_over_keys_are_taken_in_blocks(num_keys: int) -> None:
    """One large value, and many that are lost if they are added to it one by one."""
    u = UNIT_ROUNDOFF["float32"]
    values = np.full(num_keys, 0.75 * u, np.float32)
    values[0] = 1.0
    found = to_jax(lookup_program(np.zeros(num_keys), values, 1.0, np.float32))(np.zeros((1, 1)))
    mean = values.astype(np.float64).mean()
    assert abs(float(found[0]) - mean) <= gamma(depth(num_keys, "float32") + EXTRA_ROUNDINGS, u) * mean


def test_the_expression_is_not_read() -> None:
    net = agreement.network("compose")
    points = random_inputs(net.program, 40, 3)[0] / 2
    nameless = dataclasses.replace(net, expression=None)
    assert (net.to_jax()(points) == nameless.to_jax()(points)).all()


def test_a_program_that_does_not_look_at_its_input() -> None:
    function = to_jax(lookup_program(np.zeros(1), np.ones(1), 1.0))
    points = jnp.linspace(-1, 1, 7)[:, None]
    assert (function(points) == 1).all()
    assert (jax.grad(lambda x: function(x).sum())(points) == 0).all()
