"""The torch module: gradients, hooks, dtypes, weights. Its values are tested in test_agreement.

The tolerance of gradients comes from the finite differences themselves: the distance of two of them, and rounding
divided by the step.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given, settings

import attnc
from attnc.engines.numpy_engine import NumpyEngine
from attnc.engines.powers import EXPONENTIAL_ULPS
from attnc.errors import InputError
from attnc.ir import Attention, Head, Mask, Program
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.spec import check
from engines import agreement
from ir.random_programs import lookup_program, programs_and_inputs, random_inputs
from ir.rounding import assert_agrees, exact_and_bound

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -c constraints.txt -e '.[torch]'")
from attnc.engines import torch_engine, torch_rows  # noqa: E402  (import torch)
from attnc.engines.torch_engine import to_torch  # noqa: E402

SMALL = {
    "as shipped": {},
    "one cell a block": {"CELLS_PER_TORCH_BLOCK": 1},
    "sparse": {"CELLS_PER_TORCH_BLOCK": 9, "DENSE_CELLS": 0},
}


@pytest.fixture(params=SMALL.values(), ids=SMALL)
def sizes(request, monkeypatch):
    """Blocks of these sizes."""
    for name, size in request.param.items():
        monkeypatch.setattr(torch_engine, name, size)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_logits_that_span_a_million_have_finite_gradients(dtype):
    x = torch.linspace(-1, 1, 37, dtype=torch.float64)[:, None].to(torch.tensor(dtype(0)).dtype).requires_grad_()
    to_torch(agreement.small_program(dtype, 1e6, 101))(x).sum().backward()
    assert x.grad.isfinite().all()


def many_segments(num_tokens: int, residual: bool) -> Program:
    """Queries of many segments, some of which have keys of their own, with keys and values that move."""
    rng = np.random.default_rng(num_tokens)
    segments = rng.integers(EVERY_QUERY, num_tokens // 2, num_tokens)
    mask = Mask(rng.integers(EVERY_QUERY, num_tokens, num_tokens), np.r_[EVERY_QUERY, segments[1:]])
    heads = tuple(Head(*(rng.normal(size=(2, 2)) for _ in range(4)), mask) for _ in range(2))
    return check(Program((Attention("mix", heads, ("a", "b"), residual),), ((num_tokens, 2),), (num_tokens, 2)))


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("residual", [True, False])
def test_masks_of_many_segments(residual):
    program = many_segments(40, residual)
    inputs = random_inputs(program, 3, 0)
    assert_agrees(program, inputs, to_torch(program)(*map(torch.from_numpy, inputs)).numpy())


@pytest.mark.usefixtures("sizes")
def test_gradients_of_random_programs():
    """Against torch's own finite differences, with and without checkpoints."""

    @settings(max_examples=15, deadline=None)
    @given(programs_and_inputs(max_layers=3, max_tokens=4, scales=(0.1, 1.0)))
    def agree(case):
        program, inputs = case
        if program.dtype == np.float64 and len(inputs[0]):
            points = [torch.tensor(array[:2], requires_grad=True) for array in inputs]
            module = to_torch(program)
            if module(*points).requires_grad:
                assert torch.autograd.gradcheck(module, points)

    agree()


@pytest.mark.usefixtures("sizes")
def test_second_derivatives():
    module = to_torch(agreement.small_program())
    assert torch.autograd.gradgradcheck(module, torch.tensor([[0.3], [-0.2]], dtype=torch.float64, requires_grad=True))


def test_blocks_change_no_gradient(monkeypatch):
    """Not even of weights, if someone trains them, nor of a program that does not look at its input."""
    program = lookup_program(np.linspace(-1, 1, 9), np.arange(9.0), 4.0)
    points, gradients = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None], []
    for cells in (2**20, 1):
        monkeypatch.setattr(torch_engine, "CELLS_PER_TORCH_BLOCK", cells)
        module, x = to_torch(program), points.clone().requires_grad_()
        values = module.stages["0_select"].heads[0].values.constant.requires_grad_()
        module(x).sum().backward()
        gradients.append(torch.cat([x.grad.ravel(), values.grad.ravel()]))
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)
    module, x = to_torch(lookup_program(np.zeros(1), np.ones(1), 1.0)), points.clone().requires_grad_()
    module(x).sum().backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("name", agreement.NETWORKS)
def test_gradients_of_constructions(name):
    """Central differences of the numpy engine at points where they have settled, which near a tie they have not."""
    program = agreement.network(name).program
    engine, step = NumpyEngine(program), 1e-5
    inputs = tuple(array / 2 for array in random_inputs(program, 50, 5))
    points = [torch.tensor(array, requires_grad=True) for array in inputs]
    to_torch(program)(*points).sum().backward()
    direction = np.zeros_like(inputs[0])
    direction.reshape(len(direction), -1)[:, 0] = 1

    def slope(step: float) -> np.ndarray:
        ahead, behind = (engine(inputs[0] + sign * step * direction, *inputs[1:]) for sign in (1, -1))
        return (ahead - behind).reshape(len(direction), -1).sum(axis=1) / (2 * step)

    rounding = exact_and_bound(program, tuple(array[:3] for array in inputs))[1].max() * np.prod(program.output_shape)
    allowed = np.abs(slope(step) - slope(2 * step)) + 10 * float(rounding) / step
    error = np.abs((points[0].grad.numpy() * direction).reshape(len(direction), -1).sum(axis=1) - slope(step))
    has_settled = allowed < 1e-3
    assert has_settled.mean() > 0.8
    assert (error <= allowed)[has_settled].all()


def test_hooks_see_what_a_cache_has():
    net = attnc.compile("tanh(x*y)+sin(2*x)", [(-1, 1), (0, 2)], eps=1e-4)
    module, points, seen = net.to_torch(), np.random.default_rng(0).uniform(0, 1, size=(5, 2)), {}
    for number, stage in enumerate(module.stages.values()):
        for index, head in enumerate(stage.heads):
            name = f"attend{number + 1}.head{index}"
            keep = lambda _, scores, weights, name=name: seen.update({name: (scores[0], weights)})  # noqa: E731
            head.pieces[0].pattern.register_forward_hook(keep)
    module(torch.tensor(points))
    _, cache = net.run(points, cache=True)
    assert len(seen) == net.program.num_heads == 3
    for name, (scores, weights) in seen.items():
        visible = np.isfinite(cache[f"{name}.scores"][0, 0])
        np.testing.assert_allclose(scores.numpy(), cache[f"{name}.scores"][..., visible], rtol=0, atol=1e-13)
        np.testing.assert_allclose(weights.numpy(), cache[f"{name}.pattern"][..., visible], rtol=0, atol=1e-13)


def test_inputs_of_any_real_dtype_are_cast():
    program = lookup_program(np.linspace(-1, 1, 9), np.arange(9.0), 4.0)
    module = to_torch(program)
    found = module(torch.tensor([[0.5]], dtype=torch.float16))
    assert found.dtype == torch.float64
    assert found.shape == (1,)
    assert module(torch.tensor([[1]])).item() == module(torch.tensor([[1.0]])).item()
    assert to_torch(lookup_program(np.ones(1), np.ones(1), 1.0, np.float32)).dtype == torch.float32
    assert to_torch(lookup_program(np.ones(1), np.ones(1), 1.0, np.float32)).double().dtype == torch.float64


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ((), "takes 1 input"),
        ((torch.zeros(2, 3),), r"shape \(2, 3\): the network takes \(batch, 1\)"),
        ((torch.zeros(()),), "shape"),
        ((torch.zeros(2, 1, dtype=torch.complex64),), "real torch tensors; found torch.complex64"),
        ((np.zeros((2, 1)),), "real torch tensors; found float64"),
        ((torch.zeros(2, 2, 1), torch.zeros(3, 1, 1)), "batch size"),
    ],
)
def test_wrong_inputs_are_refused(inputs, complaint):
    two = complaint == "batch size"
    module = to_torch(agreement.network("max_affine_cross").program if two else agreement.small_program())
    with pytest.raises(InputError, match=complaint):
        module(*inputs)


@pytest.mark.usefixtures("sizes")
def test_weights_go_through_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    anchors = np.linspace(-1, 1, 9)
    first, second = (to_torch(lookup_program(anchors, values, 4.0)) for values in (np.cos(anchors), anchors))
    save_file(first.state_dict(), tmp_path / "weights.safetensors")
    second.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    points = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    assert (first(points) == second(points)).all()
    assert "stages.0_select.heads.0.keys.constant" in first.state_dict()
    assert not any(tensor.requires_grad for tensor in first.state_dict().values())


# --- compilers and exporters ------------------------------------------------------------------------------------------

BATCH = {"inputs": ({0: torch.export.Dim("batch")},)}


def of_compose(dtype: str, outside: str):
    """A module with products, gates and several stages, points in and outside the box, and the allowed error."""
    net = agreement.network("compose", dtype)
    points = np.random.default_rng(1).uniform(-1.05, 1.05, (300, 2)).astype(dtype)
    return net, net.to_torch(outside=outside), torch.from_numpy(points)


def assert_exported(net: attnc.Network, points, found) -> None:
    """A computation elsewhere agrees with the reference inside the box."""
    is_inside = (np.abs(points.numpy()) <= 1).all(axis=1)
    assert 0 < is_inside.sum() < len(points)
    assert_agrees(net.program, (points.numpy()[is_inside],), np.asarray(found)[is_inside])


@pytest.mark.parametrize("outside", ["allow", "clamp", "nan"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch_export_takes_any_batch(dtype, outside):
    net, module, points = of_compose(dtype, outside)
    exported = torch.export.export(module, (points[:5],), dynamic_shapes=BATCH).module()
    for some in (points, points[:1]):
        torch.testing.assert_close(exported(some), module(some), equal_nan=True, rtol=1e-6, atol=1e-6)
    assert_exported(net, points, exported(points).numpy())


def test_no_matrices_per_point():
    """The product of a stage is one matrix product for all points."""
    _, module, points = of_compose("float64", "allow")
    called = [str(node.target) for node in torch.export.export(module, (points,), dynamic_shapes=BATCH).graph.nodes]
    assert sum("softmax" in name for name in called) == sum(len(stage.heads) for stage in module.stages.values())
    assert not any("bmm" in name or "baddbmm" in name for name in called)
    assert any(name.startswith(("aten.matmul", "aten.addmm")) for name in called)


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],  # the second one needs a C++ compiler
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch_compile_makes_one_graph_with_gradients(dtype, backend):
    net, module, points = of_compose(dtype, "allow")
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert_exported(net, points, compiled(points))
    gradients = []
    for each in (module, compiled):
        x = points.clone().requires_grad_()
        each(x).sum().backward()
        gradients.append(x.grad)
    scale = gradients[0].abs().max()
    assert (gradients[1] - gradients[0]).abs().max() <= 1000 * torch.finfo(points.dtype).eps * scale


@pytest.mark.parametrize("outside", ["allow", "nan"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch_onnx_export(dtype, outside, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    net, module, points = of_compose(dtype, outside)
    file = str(tmp_path / "module.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and onnxscript warn of their own parts
        torch.onnx.export(module, (points[:5],), file, dynamo=True, dynamic_shapes=BATCH, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: points.numpy()})
    assert_exported(net, points, found)
    assert np.isnan(found).any() == (outside == "nan")


# --- stored tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose", "relu_network", "truncated_linear"])
def test_every_stored_tensor_matters(name):
    net = agreement.network(name)
    module, points = net.to_torch(), torch.from_numpy(random_inputs(net.program, 40, 3)[0] / 2)
    before, stored, generator = module(points), module.state_dict(), torch.Generator().manual_seed(0)
    for key, tensor in stored.items():
        if tensor.numel() and tensor.is_floating_point():
            kept = tensor.clone()
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - tensor)
            assert not torch.equal(module(points), before), key
            tensor.copy_(kept)
    assert torch.equal(module(points), before)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_compiled_loops_without_a_gradient(dtype, monkeypatch):
    """They agree with the reference, also far outside the box. A changed number, a hook or a gradient leaves them."""
    pytest.importorskip("numba")
    monkeypatch.setattr(torch_engine, "FEWEST_POINTS", 1)
    monkeypatch.setattr(torch_rows, "FEWEST_POINTS", 1)
    net = agreement.network("compose", dtype)
    module, (inside,), calls = net.to_torch(), random_inputs(net.program, 30, 3), []
    run = torch_engine._CompiledLoops.__call__

    def watched(self, *given):
        found = run(self, *given)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(torch_engine._CompiledLoops, "__call__", watched)
    points = torch.from_numpy(inside / 2)
    with torch.no_grad():
        for given in (inside / 2, 1e3 * inside):
            assert_agrees(net.program, (given,), module(torch.from_numpy(given)).numpy())
        assert torch.equal(pickle.loads(pickle.dumps(module))(points), module(points))
        assert torch.equal(copy.deepcopy(module)(points), module(points))
        assert torch.equal(module(points.mT.contiguous().mT), module(points))
        assert calls == [True] * 8
        for key, tensor in module.state_dict().items():
            kept, before = tensor.clone(), module(points)
            tensor.copy_(0.75 * tensor - 0.1)
            assert not tensor.numel() or not (torch.equal(module(points), before) or calls[-1]), key
            tensor.copy_(kept)
        assert torch.equal(module(points), before)
    assert calls[-1]
    calls.clear()
    torch.func.vmap(module)(points[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        torch.func.jvp(module, (points,), (points,))
    module(points.clone().requires_grad_()).sum().backward()
    with torch.no_grad(), torch.autocast("cpu"):
        module(points)
    module.readout.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        module(points)
    assert not calls


def test_the_exponential_of_rows():
    """Powers of it are weights, so it must be accurate. Blocks of four and odd numbers take other loops."""
    x = np.random.default_rng(0).uniform(-860, 860, 4000)
    x[::4] = np.rint(x[::4]) + 0.5  # half way between whole numbers
    with ctx.workprec(120):
        exact = [arb(2) ** arb(place) for place in x.tolist()]
        for size in (4, 1003):
            found = torch.cat([torch.exp2(part) for part in torch.from_numpy(x).split(size)]).tolist()
            off = [abs(float((arb(y) - z) / arb(float(np.spacing(y))))) for y, z in zip(found, exact, strict=True)]
            assert 0.4 < max(off) <= EXPONENTIAL_ULPS


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", agreement.NETWORKS)
def test_rows_agree(name, dtype, monkeypatch):
    monkeypatch.setattr(torch_rows, "FEWEST_POINTS", 1)
    net = agreement.network(name, dtype)
    inputs = tuple(given / 2 for given in random_inputs(net.program, 20, 5))
    with torch.no_grad():
        found = net.to_torch()(*map(torch.from_numpy, inputs)).numpy()
    assert_agrees(net.program, inputs, found)


@pytest.mark.parametrize("name", ["compose", "relu_network"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rows_without_a_gradient(name, dtype, monkeypatch):
    """They agree with the reference, also far outside the box, and follow every stored tensor."""
    monkeypatch.setattr(torch_rows, "FEWEST_POINTS", 1)
    net = agreement.network(name, dtype)
    module, (inside,) = net.to_torch(), random_inputs(net.program, 30, 3)
    generator, given = torch.Generator().manual_seed(0), torch.from_numpy(inside / 2)

    def by_rows():
        with torch.no_grad():
            return module(given)

    with torch.no_grad():
        for points in (inside / 2, 1e3 * inside):
            assert_agrees(net.program, (points,), module(torch.from_numpy(points)).numpy())
    rows = by_rows()
    for key, tensor in module.state_dict().items():
        kept = tensor.clone()
        tensor.copy_(torch.rand(tensor.shape, generator=generator) - tensor)
        assert not tensor.numel() or not torch.equal(by_rows(), rows), key
        tensor.copy_(kept)
    assert torch.equal(by_rows(), rows)


def test_rows_are_left_where_a_tensor_is_watched_or_differentiated(monkeypatch):
    monkeypatch.setattr(torch_rows, "FEWEST_POINTS", 1)
    net, seen = agreement.network("compose"), []
    module, points = net.to_torch(), torch.from_numpy(random_inputs(net.program, 8, 3)[0] / 2)
    monkeypatch.setattr(torch_rows.FewKeys, "average", lambda head: pytest.fail("the rows were used"))
    torch.func.vmap(module)(points[:, None])
    module(points.clone().requires_grad_()).sum().backward()
    for stage in module.stages.values():
        for head in stage.heads:
            head.pieces[0].pattern.register_forward_hook(lambda *_: seen.append(True))
    with torch.no_grad():
        module(points)
    assert len(seen) == net.program.num_heads


def test_the_expression_is_not_read():
    net = agreement.network("compose")
    points = torch.from_numpy(random_inputs(net.program, 40, 3)[0] / 2)
    nameless = dataclasses.replace(net, expression=None)
    assert torch.equal(net.to_torch()(points), nameless.to_torch()(points))


def test_weights_in_bfloat16_run():
    """Numbers of three digits: the outputs are those of float32 up to some roundings."""
    target = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(0.0, 1.0))
    program = attnc.constructions.truncated_linear(target, num_anchors=16, dtype="float32").program
    x = torch.linspace(0, 1, 101)[:, None]
    with torch.no_grad():
        exact, rounded = to_torch(program)(x), to_torch(program).to(torch.bfloat16)(x.to(torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert float((rounded.float() - exact).abs().max()) < 8 * 2.0**-8
