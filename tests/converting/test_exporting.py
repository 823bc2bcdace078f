"""Converted models under torch.compile, export, ONNX, traces and torch.func: the same numbers, and no activation."""

from __future__ import annotations

import copy
import math
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import attnc  # noqa: E402
from attnc.converting.modules import exported, expression, key_by_key  # noqa: E402
from converting.trace import ACTIVATION_KERNELS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # torch's exporters warn of their own parts
NAMES = {name for name in ACTIVATION_KERNELS if name not in ("where", "maximum", "minimum")}
"""The kernels of activations. Nothing here may call them by any name."""
OPERATORS = {"Add", "Gemm", "MatMul", "Softmax", "Unsqueeze", "Squeeze", "Constant", "Identity"}
OF_PAIRS = {"Sub", "Concat", "Expand", "Reshape", "Shape", "Cast"}
"""Operators of the maximum of two tensors and of PReLU: a difference, and keys and tensors put side by side."""


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for activation in (nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Hardswish(), nn.Softplus(), nn.Tanh(), nn.ELU()):
        parts += [nn.Linear(6, 6), activation]
    return nn.Sequential(*parts, nn.Linear(6, 2)).to(dtype)


@pytest.fixture(scope="module")
def pair():
    original = model()
    converted, _ = attnc.convert(original, eps=1e-6)
    return original, converted, torch.randn(5, 6)


def assert_no_activation(graph: object) -> None:
    words = {word for word in str(graph).replace(".", " ").replace("(", " ").replace("[", " ").split()}
    assert not words & NAMES


def test_torch_compile_takes_the_whole_graph(pair):
    _, converted, x = pair
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(converted, fullgraph=True, backend=backend)
    assert (compiled(x) - converted(x)).abs().max() <= 2e-6
    assert len(graphs) == 1
    assert_no_activation(graphs[0].graph)
    changed = copy.deepcopy(converted)
    with torch.no_grad():
        changed[11].values[0] += 0.5  # one stored v_k
    again = torch.compile(changed, fullgraph=True, backend="eager")
    assert (again(x) - changed(x)).abs().max() <= 2e-6
    assert (again(x) - converted(x)).abs().max() > 1e-4


def test_torch_export(pair):
    _, converted, x = pair
    program = torch.export.export(converted, (x,))
    assert (program.module()(x) - converted(x)).abs().max() <= 2e-6
    assert_no_activation(program.graph)


def test_jit_trace(pair):
    _, converted, x = pair
    traced = torch.jit.trace(converted, (x,))
    assert (traced(x) - converted(x)).abs().max() <= 2e-6
    assert_no_activation(traced.inlined_graph)


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_has_matrix_products_sums_and_softmax(pair, tmp_path, dynamo):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    _, converted, x = pair
    changed = copy.deepcopy(converted)
    with torch.no_grad():
        changed[11].values[0] += 0.5  # one stored v_k
    for number, each in enumerate((converted, changed)):
        path = tmp_path / f"{number}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(each, (x,), path, dynamo=dynamo, **({"verbose": False} if dynamo else {}))
        assert {node.op_type for node in onnx.load(path).graph.node} <= OPERATORS
        session = runtime.InferenceSession(path)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert (torch.tensor(found) - each(x)).abs().max() <= 2e-6
        if number:
            assert (torch.tensor(found) - converted(x)).abs().max() > 1e-4


@pytest.mark.parametrize("dynamo", [True, False])
def test_gates_may_be_made_during_an_export(tmp_path, dynamo):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x, path = Arithmetic(), torch.randn(2, 3, 4), tmp_path / "model.onnx"
    converted, _ = attnc.convert(model, eps=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(converted, (x,), path, dynamo=dynamo, verbose=False)
    session = runtime.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.tensor(found) - model(x)).abs().max() <= 1e-5
    assert (converted(x) - model(x)).abs().max() <= 1e-5
    assert {name.rpartition(".")[2] for name in converted.state_dict()} >= {"slopes", "offsets", "values", "carried"}


class OddOnes(nn.Module):
    """Activations that need more than one head, or have parameters or two arguments."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.PReLU(3), nn.Softsign(), nn.Mish(), nn.Hardtanh(-0.3, 0.7), nn.SELU(), nn.LogSigmoid()]
        self.parts = nn.Sequential(*parts, nn.PReLU(), nn.Softshrink(0.1), nn.Hardsigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.parts(x)
        return torch.maximum(y, x) + torch.minimum(x.flip(0), y) + F.leaky_relu(x, 0.2)


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_has_these_operators_for_odd_activations_too(tmp_path, dynamo):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    original, x, path = OddOnes(), 2 * torch.randn(4, 3, 5), tmp_path / "model.onnx"
    converted, report = attnc.convert(original, eps=1e-6, example=x)
    assert not report.left
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(converted, (x,), path, dynamo=dynamo, verbose=False)
    flips = {"Slice", "Gather", "ConstantOfShape", "Range"}
    assert {node.op_type for node in onnx.load(path).graph.node} <= OPERATORS | OF_PAIRS | flips
    session = runtime.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.tensor(found) - converted(x)).abs().max() <= 2e-6
    assert (torch.tensor(found) - original(x)).abs().max() <= 2e-5


def test_onnx_gives_nan_for_infinite_numbers(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    converted, _ = attnc.convert(nn.Sequential(nn.Identity(), nn.GELU()), eps=1e-6)
    x = torch.tensor([-math.inf, -1e30, -2.0, 0.5, 1e30, math.inf, math.nan])
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(converted, (x,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = converted(x)
    assert expected[[0, 5]].tolist() == [0.0, math.inf]  # torch takes the limits
    expected[[0, 5]] = math.nan
    assert torch.allclose(torch.tensor(found), expected, atol=1e-6, equal_nan=True)


@pytest.mark.slow
def test_torch_compile_with_its_default_backend(pair):
    _, converted, x = pair
    converted = copy.deepcopy(converted)
    rows = len(x)
    x = torch.cat([x, torch.full((1, 6), math.nan)])
    compiled = torch.compile(converted, fullgraph=True)
    y = compiled(x)
    assert (y - converted(x))[:rows].abs().max() <= 2e-6
    assert y[-1].isnan().all()
    before = y
    with torch.no_grad():
        converted[11].values[0] += 0.5  # one stored v_k, after compilation
    y = compiled(x)
    assert (y - converted(x))[:rows].abs().max() <= 2e-6
    assert (y - before)[:rows].abs().max() > 1e-4
    found, expected = (torch.autograd.grad(f(x[:-1]).sum(), converted[0].weight)[0] for f in (compiled, converted))
    assert (found - expected).abs().max() <= 1e-4
    far = torch.tensor([-math.inf, -1e30, 1e30, math.inf, math.nan])
    for gate in (converted[1], converted[7]):  # GELU and hard-swish
        assert torch.allclose(torch.compile(gate, fullgraph=True)(far), gate(far), equal_nan=True)


class Recurrent(nn.Module):
    """A module with activations in its own code, and gates of an LSTM inside."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return torch.relu(self.out(self.inner(x)[0])).clamp(max=0.1)


class Checkpointed(nn.Module):
    """A module whose inner module runs in a region that torch.compile traces apart."""

    def __init__(self):
        super().__init__()
        self.inner = Recurrent()

    def forward(self, x):
        inner = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return torch.tanh(inner) * (1 - torch.sigmoid(inner))


class Arithmetic(nn.Module):
    """Activations whose gates are made at the first call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x):
        y = self.linear(x)
        gate = 1 - torch.sigmoid(y)
        z = y * gate + torch.sign(y) * F.relu(y.abs() - 0.3) + torch.logaddexp(y, torch.zeros_like(y))
        return z + torch.where(y > 0.25, y, 0.25) + y / (1 + torch.exp(-y)) + torch.maximum(y, y.flip(0))


FAMILY = ("gelu", "erf", "sigmoid", "tanh", "relu", "silu", "softplus", "elu", "mish", "logaddexp", "clamp")


@pytest.mark.parametrize("make", [Checkpointed, Arithmetic])
def test_torch_compile_finds_activations_that_no_earlier_run_has_shown(make):
    torch.manual_seed(0)
    model = make()
    converted, _ = attnc.convert(model, eps=1e-6)
    called = set()

    def backend(graph, _):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        called.update(str(node.target) for part in parts for node in part.graph.nodes if node.op.startswith("call_"))
        return graph

    x = torch.randn(2, 3, 4)
    compiled = torch.compile(converted, fullgraph=True, backend=backend)
    assert (compiled(x) - model(x)).abs().max() <= 1e-5
    assert (compiled(x) - converted(x)).abs().max() <= 1e-6
    assert not [name for name in called if any(part in name for part in FAMILY)]
    given = [torch.autograd.grad(f(x).square().sum(), next(f.parameters()))[0] for f in (compiled, model)]
    assert (given[0] - given[1]).abs().max() <= 1e-4


def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True).eval()


@pytest.mark.parametrize(("make", "width"), [(Recurrent, 4), (encoder_layer, 16)])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_takes_recurrent_modules_and_encoder_layers(make, width, backend):
    torch.manual_seed(0)
    converted, _ = attnc.convert(make(), eps=1e-6)
    x = torch.randn(2, 3, width)
    compiled = torch.compile(converted, fullgraph=True, backend=backend)
    assert (compiled(x) - converted(x)).abs().max() <= 5e-6
    parameters = [p for p in converted.parameters() if p.requires_grad]
    found, expected = (torch.autograd.grad(f(x).square().sum(), parameters) for f in (compiled, converted))
    assert all((a - b).abs().max() <= 1e-4 for a, b in zip(found, expected, strict=True))


def test_torch_func(pair):
    _, converted, x = pair
    parameters = {name: p.detach() for name, p in converted.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(converted, parameters, (x,)).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    whole = torch.func.grad(loss)(parameters, x)
    for name, gradient in whole.items():
        assert (each[name].sum(0) - gradient).abs().max() <= 1e-4
    slope = torch.func.jvp(converted, (x,), (torch.ones_like(x),))[1]
    step = 1e-2
    difference = (converted(x + step) - converted(x - step)) / (2 * step)
    assert (slope - difference).abs().max() <= 1e-2
    found, expected = (
        torch.autograd.functional.jacobian(lambda x: converted(x).sum(0), x, vectorize=vectorize)
        for vectorize in (True, False)
    )
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expressions_take_infinities_and_nan(dtype):
    for activation in (nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Hardswish(), nn.Softplus(), nn.Sigmoid(), nn.LeakyReLU(0.1)):
        converted, _ = attnc.convert(activation, eps=1e-6)
        most = torch.finfo(dtype).max
        x = torch.tensor([-math.inf, -most, -1e10, 0.5, 1e10, most, math.inf, math.nan], dtype=dtype)
        found = expression(x, converted.keys(x), converted.scale, converted.solved.is_product)
        compiled = converted(x)
        assert found[-1].isnan()
        assert compiled[-1].isnan()
        assert torch.allclose(found[:-1], compiled[:-1], atol=1e-6, rtol=1e-6)
        result = key_by_key(x, converted.keys(x), converted.scale, converted.solved.is_product)
        assert torch.allclose(result, found, equal_nan=True)
        result = exported(x[2:-3], converted.keys(x), converted.solved.is_product)
        assert torch.allclose(result, found[2:-3])


def test_autocast_and_half_precision(pair):
    original, converted, x = pair
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (converted(x) - original(x)).abs().max() <= 2e-2
    half = copy.deepcopy(converted).to(torch.bfloat16)
    assert (half(x.bfloat16()) - converted(x)).abs().max() <= 5e-2


def test_layouts_keep_their_strides(pair):
    _, converted, _ = pair
    for activation in (converted[1], converted[3], converted[5]):
        x = torch.randn(2, 3, 4, 5)
        for given in (
            x,
            x.transpose(1, 3),
            x.to(memory_format=torch.channels_last),
            x[:, ::2],
            x.expand(6, 2, 3, 4, 5),
        ):
            y = activation(given)
            assert (y - activation(given.contiguous())).abs().max() == 0
            assert y.shape == given.shape
        assert activation(x.transpose(1, 3)).stride() == x.transpose(1, 3).stride()
        assert activation(torch.zeros(())).shape == ()
        assert activation(torch.zeros(0, 3)).shape == (0, 3)
        leaf = x.transpose(1, 2).requires_grad_()
        activation(leaf).sum().backward()  # a gradient of equal numbers has strides 0
        assert leaf.grad is None or leaf.grad.shape == leaf.shape


def test_in_place_under_torch_func():
    converted, _ = attnc.convert(nn.Sequential(nn.Linear(3, 3), nn.SiLU(inplace=True)).double())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.func.vmap(torch.func.grad(lambda row: converted(row).sum()))(x.detach())
    assert torch.allclose(rows, torch.autograd.grad(converted(x).sum(), x)[0])


def test_in_place_bumps_the_version():
    gate, _ = attnc.convert(nn.SiLU(inplace=True), eps=1e-6)
    x = torch.randn(9)
    before, y = x._version, nn.SiLU()(x)
    assert gate(x) is x
    assert x._version > before
    assert (x - y).abs().max() <= 1e-6
    leaf = torch.randn(9, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        gate(leaf)
    inner = leaf * 2
    gate(inner).sum().backward()
    other = leaf.detach().clone().requires_grad_()
    nn.SiLU()(other * 2).sum().backward()
    assert (leaf.grad - other.grad).abs().max() <= 1e-5
