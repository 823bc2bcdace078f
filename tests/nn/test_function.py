"""Layers of compiled functions and tables: they compute what the network computes, and say when nothing is claimed."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest

import attnc

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

import attnc.nn  # noqa: E402
from attnc.engines import torch_rows  # noqa: E402
from attnc.nn import function as layers  # noqa: E402

BOX = {"x": (0, 1), "y": (-1, 1)}
NETWORKS = {
    name: attnc.compile(text, box, eps, dtype=dtype)
    for name, text, box, eps, dtype in (
        ("one", "cos(3*x)", {"x": (-1, 1)}, 1e-6, "float64"),
        ("two", "exp(-x)*sin(3*y)", BOX, 1e-5, "float64"),
        ("two outputs", "x*y, sin(3*x) + y", BOX, 1e-5, "float64"),
        ("float32", "sin(3*x) + y", BOX, 1e-4, "float32"),
    )
}


def points(net: attnc.Network, count: int = 700, seed: int = 0) -> torch.Tensor:
    at = np.random.default_rng(seed).random((count, net.box.d))
    return torch.tensor((net.box.lo + (net.box.hi - net.box.lo) * at).astype(net.program.dtype))


@pytest.fixture
def rough() -> attnc.nn.Table:
    """A table with a key at every point: its heads are grids."""
    return attnc.nn.Table(np.linspace(0, 1, 200), np.random.default_rng(0).normal(size=200), 1e-6)


# --- shapes and dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("count", [0, 1, 700])
def test_it_computes_the_network(name, count):
    net, layer = NETWORKS[name], attnc.nn.Function(NETWORKS[name])
    given = points(net, count)
    bound = 2 * 1e-12 if net.dtype == "float64" else 1e-4
    found = layer(given)
    expected = net(given.numpy()).reshape(tuple(found.shape))
    assert found.shape == ((count, 1) if name == "one" else (count, *net.program.output_shape))
    assert not count or np.abs(found.numpy() - expected).max() <= bound


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_that_of_the_network(name, is_compiled, monkeypatch):
    monkeypatch.setattr(torch_rows, "FEWEST_POINTS", 1 if is_compiled else 10**9)
    net, layer = NETWORKS[name], attnc.nn.Function(NETWORKS[name], outside="allow")
    given = points(net, 50).requires_grad_()
    (found,) = torch.autograd.grad(layer(given).sum(), given)
    expected = net.gradient(given.detach().numpy()).sum(axis=1)
    assert np.abs(found.numpy() - expected).max() <= (1e-10 if net.dtype == "float64" else 2e-3)


def test_compiled_loops_run_with_a_gradient_and_without(rough, monkeypatch):
    pytest.importorskip("numba")
    calls = []
    for name in ("_compiled_outputs", "_compiled_gradient"):
        kept = getattr(layers.NetworkLayer, name)
        monkeypatch.setattr(
            layers.NetworkLayer, name, lambda *given, kept=kept, name=name: calls.append(name) or kept(*given)
        )
    x = torch.rand(600, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        rough(x)
    rough(x).sum().backward()
    assert calls == ["_compiled_outputs", "_compiled_outputs", "_compiled_gradient"]
    rough(x[:10])
    torch.func.vmap(rough)(x)
    assert len(calls) == 3


def test_windows_of_keys_have_the_gradient_of_all_keys(rough):
    """They lose some digits, as the derivatives of a table have no certificate."""
    x = torch.rand(600, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(rough(x).sum(), x)
    expected = rough.network.gradient(x.detach().numpy()[:, None])[:, 0, 0]
    assert np.abs(found.numpy() - expected).max() <= 1e-9 * np.abs(expected).max()


@pytest.mark.parametrize("count", [3, 600])
def test_second_derivatives(count):
    layer = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-7)
    x = torch.linspace(-0.9, 0.9, count, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (second + 9 * torch.cos(3 * x)).abs().max() < 0.05
    assert torch.autograd.gradgradcheck(layer, x[:3])


def test_leading_dimensions_and_broadcasting():
    plane, curve = attnc.nn.Function(NETWORKS["two"]), attnc.nn.Function(NETWORKS["one"])
    both = attnc.nn.Function(NETWORKS["two outputs"])
    assert plane(torch.rand(4, 5, 2)).shape == (4, 5)
    assert plane(torch.rand(2)).shape == ()
    assert both(torch.rand(4, 5, 2)).shape == (4, 5, 2)
    assert curve(torch.rand(4, 5)).shape == (4, 5)
    assert curve(torch.tensor(0.5)).shape == ()
    assert curve(torch.rand(0, 3)).shape == (0, 3)
    x, y = torch.rand(4, 1), torch.rand(5)
    assert torch.equal(plane(x, y), plane(torch.stack(torch.broadcast_tensors(x, y), dim=-1)))


def test_the_result_has_the_dtype_of_the_input():
    layer = attnc.nn.Function(NETWORKS["one"])
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        found = layer(x.to(dtype))
        assert found.dtype == dtype
        exact = torch.cos(3 * x.to(dtype).double())
        assert (found.double() - exact).abs().max() <= 1e-6 + torch.finfo(dtype).eps / 2
    assert layer(torch.zeros(3, dtype=torch.int64)).dtype == torch.float64
    assert layer.half()(x).dtype == torch.float64  # a cast of the model leaves the layer in its arithmetic
    assert (layer(x) - torch.cos(3 * x)).abs().max() <= layer.certificate.bound


def test_autocast_leaves_it_alone():
    layer = attnc.nn.Function(NETWORKS["float32"])
    given = points(NETWORKS["float32"], 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(given)
    assert torch.equal(found, layer(given))


def test_points_outside_the_box():
    table = ([-2.0, math.nan, 0.5], 3)
    x = torch.tensor(table[0], dtype=torch.float64)
    clamp, nan, allow = (attnc.nn.Function(NETWORKS["one"], outside=word) for word in ("clamp", "nan", "allow"))
    for repeats in (1, 300):  # with many points, compiled loops run
        many = x.repeat(repeats)
        assert torch.equal(clamp(many)[:1], clamp(torch.full((1,), -1.0, dtype=torch.float64))) or repeats > 1
        assert clamp(many).isnan().tolist() == [False, True, False] * repeats
        assert nan(many).isnan().tolist() == [True, True, False] * repeats
        assert allow(many).isnan().tolist() == [False, True, False] * repeats
    given = torch.tensor([-2.0, 0.5], dtype=torch.float64, requires_grad=True)
    clamp(given).sum().backward()
    assert given.grad[0] == 0
    assert given.grad[1] != 0


def test_tables_outside_the_box(rough):
    x = torch.tensor([-1.0, math.nan, math.inf, 0.5], dtype=torch.float64).repeat(200)
    assert rough(x).isnan().tolist() == [False, True, False, False] * 200
    with torch.no_grad():
        assert rough(x).isnan().tolist() == [False, True, False, False] * 200


# --- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(3, 3),), r"variables x, y: pass one tensor \(…, 2\)"),
        ((torch.zeros(3),), "found \\(3,\\)"),
        ((torch.zeros(3), torch.zeros(3), torch.zeros(3)), "found"),
        ((), "found none"),
        ((torch.zeros(3, 2, dtype=torch.complex64),), "real torch tensors"),
        ((np.zeros((3, 2)),), "real torch tensors"),
    ],
)
def test_wrong_inputs_are_refused(given, message):
    layer = attnc.nn.Function(NETWORKS["two"])
    with pytest.raises(attnc.InputError, match=message):
        layer(*given)


def test_wrong_arguments_are_refused():
    with pytest.raises(attnc.ExpressionError, match="coss"):
        attnc.nn.Function("coss(x)", {"x": (-1, 1)}, 1e-3)
    with pytest.raises(attnc.InputError, match="dtype must be float64 or float32, found float16"):
        attnc.nn.Function("cos(x)", {"x": (-1, 1)}, 1e-3, dtype=torch.float16)
    with pytest.raises(attnc.InputError, match="outside must be one of clamp, nan, allow"):
        attnc.nn.Function(NETWORKS["one"], outside="raise")
    with pytest.raises(attnc.InputError, match="leave out box"):
        attnc.nn.Function(NETWORKS["one"], {"x": (-1, 1)})
    with pytest.raises(attnc.InputError, match="finite; found nan in row 1"):
        attnc.nn.Table([0.0, 1.0, 2.0], torch.tensor([1.0, math.nan, 2.0]), 1e-3)
    with pytest.raises(attnc.InputError, match="row of values for each point"):
        attnc.nn.Table([0.0, 1.0, 2.0], [1.0, 2.0], 1e-3)
    with pytest.raises(attnc.InputError, match="all carry the input"):
        attnc.nn.Function("relu(x)", {"x": (-math.inf, math.inf)}, 1e-3, trainable=True)
    sequence = attnc.SequenceTarget(lambda X: X, 2, 1, (-1, 1), lipschitz=1.0)
    with pytest.raises(attnc.InputError, match="takes sequences"):
        attnc.nn.Function(sequence, eps=0.9)


def test_a_device_without_float64_is_named(monkeypatch):
    def fails(tensor):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    with pytest.raises(attnc.InputError, match='make it with dtype="float32"'):
        attnc.nn.Function(NETWORKS["one"])._apply(fails)


# --- training and certificates ----------------------------------------------------------------------------------------


def test_values_move_and_are_certified_again():
    layer = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-5, trainable=True)
    before = layer.certificate
    assert [name for name, _ in layer.named_parameters()] == ["values"]
    x = torch.linspace(-1, 1, 400)
    optimiser = torch.optim.LBFGS(layer.parameters(), lr=1.0, max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        found = ((layer(x) - 1.1 * torch.cos(3 * x)) ** 2).mean()
        found.backward()
        return found

    optimiser.step(loss)
    assert loss() < 1e-5
    assert layer.certificate.bound is None
    assert layer.certificate.method == "not certified"
    assert "not certified" in repr(layer)
    with pytest.raises(attnc.BoundNotMet):
        layer.recertify(eps=1e-5)
    assert 0.09 < layer.recertify().bound < 0.11  # it is 0.1·cos(3x) from the function that it was made for
    claim = layer.recertify("1.1*cos(3*x)")
    error = np.abs(layer.network(x.double().numpy()[:, None]) - 1.1 * np.cos(3 * x.double().numpy())).max()
    assert error <= claim.bound < 0.01
    assert layer.certificate == claim != before
    assert "1.1*cos(3*x)" in repr(layer)


def test_recertified_weights_are_those_of_the_layer():
    layer = attnc.nn.Function(NETWORKS["two"], trainable=True)
    with torch.no_grad():
        layer.values += 1e-4 * torch.rand(layer.values.shape, generator=torch.Generator().manual_seed(0))
    given = points(NETWORKS["two"], 30)
    before = layer(given)
    layer.recertify()
    assert (layer(given) - before).abs().max() <= 1e-12
    assert np.abs(layer.network(given.numpy()) - before.detach().numpy()).max() <= 1e-12


def test_tables_are_certified_again_at_their_points():
    table = attnc.nn.Table(np.linspace(0, 1, 30), np.linspace(0, 1, 30) ** 2, 1e-6, trainable=True)
    with torch.no_grad():
        table.values += 1e-3
    assert table.certificate.bound is None
    assert 0.9e-3 < table.recertify().bound < 1.1e-3


def test_values_that_are_not_finite_are_refused():
    layer = attnc.nn.Function(NETWORKS["one"], trainable=True)
    with torch.no_grad():
        layer.values[0] = math.inf
    with pytest.raises(attnc.InputError, match="diverged"):
        layer.recertify()


@pytest.mark.skipif("gradient_eps" not in attnc.compile.__annotations__, reason="compile takes no gradient_eps")
def test_gradient_error():
    layer = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-5, gradient_eps=1e-3)
    assert layer.certificate.gradient_bound <= 1e-3
    assert "gradient error" in repr(layer)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", [False, True])
def test_a_state_dict_carries_the_certificate(trainable, tmp_path):
    first = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-5, trainable=trainable)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), first)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for state in (load_file(tmp_path / "model.safetensors"), torch.load(file, weights_only=True)):
        other = torch.nn.Sequential(
            torch.nn.Linear(1, 1), attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-5, trainable=trainable)
        )
        other.load_state_dict(state)
        assert other[1].certificate == first.certificate
        assert other[1].certificate.standing is attnc.Standing.PROVEN  # the same bytes: it was proved here
        x = torch.rand(20, 1)
        assert torch.equal(other(x), model(x))


def test_another_network_in_a_state_dict_is_stated():
    """The bound of a state dict is only stated, until it is proved again."""
    first = attnc.nn.Function("sin(2*x)", {"x": (-1, 1)}, 1e-7)
    other = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-3)
    other.load_state_dict(first.state_dict())
    assert other.certificate == first.certificate
    assert other.certificate.standing is attnc.Standing.STATED
    assert "stated by a state dict" in repr(other)
    x = torch.rand(30)
    assert torch.equal(other(x), first(x))
    assert other.recertify().standing is attnc.Standing.PROVEN


def test_a_moved_value_stays_uncertified_in_a_state_dict():
    first, other = (attnc.nn.Function(NETWORKS["one"], trainable=True) for _ in range(2))
    with torch.no_grad():
        first.values[1] += 1e-3
    other.load_state_dict(first.state_dict())
    assert other.certificate.method == "not certified"


def test_a_state_with_other_trainable_values_is_refused():
    layer = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-2, trainable=True)
    before, x = layer.certificate, torch.rand(5)
    expected = layer(x)
    with pytest.raises(attnc.InputError, match="trainable values, and this layer"):
        layer.load_state_dict(attnc.nn.Function(NETWORKS["one"], trainable=True).state_dict())
    assert layer.certificate == before
    assert torch.equal(layer(x), expected)


def test_forged_states_are_refused():
    layer, two = attnc.nn.Function(NETWORKS["one"]), attnc.nn.Function(NETWORKS["two"])
    state = layer.state_dict()["_extra_state"]
    for bad, error in (
        (state[:100], attnc.FileError),
        (torch.zeros(8), attnc.FileError),
        ({"a": 1}, attnc.FileError),
        (two.state_dict()["_extra_state"], attnc.InputError),
    ):
        with pytest.raises(error):
            layer.set_extra_state(bad)
    place = bytes(state.tolist()).index(b"weights_sha256") + 20
    changed = state.clone()
    changed[place] = ord("a") if changed[place] != ord("a") else ord("b")
    with pytest.raises(attnc.FileError, match="belongs to other weights"):
        layer.set_extra_state(changed)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


def test_copies():
    layer = attnc.nn.Function(NETWORKS["one"], trainable=True)
    x = torch.rand(700, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)  # after a compiled run
        for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(made(x), expected)
            assert made.certificate == layer.certificate


# --- exports ----------------------------------------------------------------------------------------------------------


def build(name: str) -> torch.nn.Module:
    if name == "table":
        return attnc.nn.Table(np.linspace(0, 1, 30), np.sin(np.linspace(0, 9, 30)), 1e-4, dtype="float32")
    return attnc.nn.Function(NETWORKS[name], trainable=name == "two")


@pytest.mark.parametrize("name", ["two", "table"])
def test_torch_compile_takes_the_whole_graph(name):
    layer, torch_compiler = build(name), torch.compiler
    torch_compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.rand(*((7, 2) if name == "two" else (7, 3)), requires_grad=True)
    for run in (compiled, layer):
        run(x).sum().backward()
    assert (compiled(x) - layer(x)).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["two", "table"])
def test_onnx(name, tmp_path):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer, path = build(name), str(tmp_path / "layer.onnx")
    x = torch.rand(*((7, 2) if name == "two" else (7, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and onnxscript warn of their own parts
        shapes = (({0: torch.export.Dim("batch", min=1)},),)
        torch.onnx.export(layer, (x,), path, verbose=False, dynamic_shapes=shapes)
    used = {node.op_type for node in onnx.load(path).graph.node}
    assert {"MatMul", "Add", "Softmax"} <= used
    assert not used & {"Gemm", "Exp", "Cos", "Sin", "Loop", "If", "GridSample", "Erf", "Tanh"}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for given in (x, x[:2]):
        (found,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        assert np.abs(found - layer(given).detach().numpy()).max() <= 1e-6


def test_importing_attnc_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, attnc; dir(attnc); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys; sys.modules['torch'] = None; import attnc; attnc.nn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "attnc.nn needs" in done.stderr
    assert "pip install 'attnc[torch]'" in done.stderr
