"""Activations as layers: a proven error on the whole line, in every dtype, and a certificate that follows the keys."""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import pytest

import attnc

torch = pytest.importorskip("torch")
import attnc.nn  # noqa: E402
from attnc.nn.activation import NAMES  # noqa: E402

ORIGINALS = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "mish": torch.nn.functional.mish,
    "relu": torch.relu,
    "softsign": torch.nn.functional.softsign,
    "hardswish": torch.nn.functional.hardswish,
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_error_is_within_the_bound(name):
    layer = attnc.nn.Activation(name)
    x = torch.linspace(-30, 30, 20_001, dtype=torch.float64)
    error = (layer(x) - ORIGINALS[name](x)).abs()
    assert (error <= layer.certificate.bound + 1e-13 * (1 + x.abs())).all()
    assert layer.certificate.bound <= 1e-6
    assert layer.certificate.bound <= 3 * error.max() + 1e-9 or name in ("softsign", "relu", "hardswish")  # kinks
    assert "exact arithmetic" in layer.certificate.assumptions[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_shapes(dtype):
    layer, x = attnc.nn.Activation("gelu"), torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = layer(x)
    assert found.dtype == dtype
    assert found.shape == x.shape
    exact = torch.nn.functional.gelu(x.double())
    assert (found.double() - exact).abs().max() <= 1e-6 + 8 * torch.finfo(dtype).eps


def test_float64_alone():
    """With keys in float64 alone, float32 is computed in float64 and rounded once."""
    layer = attnc.nn.Activation("gelu", 1e-10, dtype="float64")
    x = torch.linspace(-5, 5, 1001)
    assert layer.certificate.bound <= 1e-10
    assert torch.equal(layer(x), layer(x.double()).float())
    with pytest.raises(attnc.InputError, match=r"cannot prove gelu|error ≤"):
        attnc.nn.Activation("gelu", 1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "Gelu"}, "did you mean 'gelu'"),
        ({"name": "nothing at all"}, "Choose one of abs"),
        ({"name": 3}, "there is no activation 3"),
        ({"name": "leaky_relu"}, 'takes slope: pass parameters={"slope"'),
        ({"name": "gelu", "parameters": {"alpha": 1}}, "gelu has no parameters"),
        ({"name": "elu", "parameters": {"alpha": "a"}}, "the parameter alpha"),
        ({"name": "gelu", "eps": 0}, "eps"),
        ({"name": "gelu", "dtype": torch.float16}, "half precision is computed in float32"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(attnc.InputError, match=message):
        attnc.nn.Activation(**arguments)


def test_wrong_inputs_are_refused():
    layer = attnc.nn.Activation("gelu")
    with pytest.raises(attnc.InputError, match="takes a torch tensor"):
        layer(1.0)
    with pytest.raises(attnc.InputError, match=r"torch\.int64"):
        layer(torch.zeros(2, dtype=torch.int64))


def test_parameters():
    layer = attnc.nn.Activation("leaky_relu", parameters={"slope": 0.1})
    x = torch.linspace(-3, 3, 101)
    assert (layer(x) - torch.nn.functional.leaky_relu(x, 0.1)).abs().max() <= 2e-6
    assert set(NAMES) >= {"gelu", "silu", "softplus"}


def test_keys_move_and_are_certified_again():
    layer = attnc.nn.Activation("gelu", trainable=True)
    x = torch.linspace(-3, 3, 201)
    assert layer.certificate.bound <= 1e-6
    optimiser = torch.optim.SGD(layer.parameters(), lr=1e-3)
    ((layer(x) - torch.nn.functional.silu(x)) ** 2).mean().backward()
    kept = [parameter.detach().clone() for parameter in layer.parameters()]
    optimiser.step()
    assert layer.certificate.bound is None
    assert "not certified" in repr(layer)
    with torch.no_grad():
        for parameter, before in zip(layer.parameters(), kept, strict=True):
            parameter.copy_(before)
    assert layer.certificate.bound <= 1e-6  # the same keys as before
    with torch.no_grad():
        layer.gate.values[3:-3] += 1e-4
    claim = layer.recertify()
    wide = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    error = (layer(wide) - torch.nn.functional.gelu(wide)).abs().max()
    assert 1e-5 < error <= claim.bound + 1e-12 <= 3 * error
    with pytest.raises(attnc.InputError, match="above eps"):
        layer.recertify(eps=1e-9)


def test_keys_without_a_bound_are_refused():
    layer = attnc.nn.Activation("gelu", trainable=True)
    with torch.no_grad():
        layer.gate.carried[0] = 1.0  # a slope of 1 far to the left
    with pytest.raises(attnc.InputError, match=r"no bound of these keys|grows"):
        layer.recertify()
    with torch.no_grad():
        layer.gate.carried[0] = torch.nan
    with pytest.raises(attnc.InputError, match="diverged"):
        layer.recertify()
    with pytest.raises(attnc.InputError, match="no proof yet"):
        attnc.nn.Activation("hardswish").recertify()


def test_state_dicts():
    first, other = attnc.nn.Activation("gelu"), attnc.nn.Activation("gelu")
    other.load_state_dict(first.state_dict())
    assert other.certificate.standing is attnc.Standing.PROVEN
    moved = attnc.nn.Activation("gelu", trainable=True)
    with torch.no_grad():
        moved.gate.values[4] += 1e-5
    other.load_state_dict(moved.state_dict())
    assert other.certificate.method == "not certified"
    claim = moved.recertify()
    other.load_state_dict(moved.state_dict())
    assert other.certificate.bound == claim.bound
    assert other.certificate.standing is attnc.Standing.STATED
    assert torch.equal(copy.deepcopy(other)(torch.ones(3)), other(torch.ones(3)))


def test_forged_states_are_refused():
    layer = attnc.nn.Activation("gelu")
    facts = json.loads(bytes(layer.get_extra_state().tolist()))

    def packed(**changed):
        return torch.tensor(list(json.dumps(facts | changed).encode()), dtype=torch.uint8)

    for state, error in (
        (packed(format="attnc.activation/9"), attnc.FileError),
        (packed(activation="silu"), attnc.InputError),
        (packed(bound=-1.0), attnc.FileError),
        (packed(bound="small"), attnc.FileError),
        (packed(keys_sha256=3), attnc.FileError),
        (torch.zeros(4, dtype=torch.uint8), attnc.FileError),
        ("text", attnc.FileError),
    ):
        with pytest.raises(error):
            layer.set_extra_state(state)
    layer.set_extra_state(packed(keys_sha256="0" * 64))
    assert layer.certificate.bound is None  # a claim about other keys


def test_torch_compile_and_onnx(tmp_path):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer, x, path = attnc.nn.Activation("gelu"), torch.linspace(-4, 4, 24).reshape(4, 6), str(tmp_path / "gelu.onnx")
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert (compiled(x) - layer(x)).abs().max() <= 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and onnxscript warn of their own parts
        torch.onnx.export(layer, (x,), path, verbose=False)
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert operators == {"Unsqueeze", "Squeeze", "MatMul", "Add", "Softmax"}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.abs(found - layer(x).numpy()).max() <= 2e-6
