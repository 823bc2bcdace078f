"""The unfolded torch module computes what the reference does, and has its names."""

from __future__ import annotations

import copy
import dataclasses

import hypothesis
import numpy as np
import pytest

import attnc
from attnc.ir.reference import activation_shapes, evaluate_visited
from attnc.ir.rounding import evaluation_error
from attnc.ir.weights import named_weights
from attnc.targets.box import Box
from ir.random_programs import programs_and_inputs
from ir.rounding import assert_agrees

torch = pytest.importorskip("torch")

from attnc.engines.torch_unfolded import to_torch_unfolded  # noqa: E402

CASES = {
    "stages": ("tanh(sin(x)+y)+x*y", [(-2, 2), (-1, 1)], 1e-3, "compose"),
    "a name of a method": ("sin(half)*y", {"half": (-1, 1), "y": (0, 1)}, 1e-3, "auto"),
    "softmax, and names that continue others": ("abs(x)", [(-1, 1)], 0.2, "attention_softmax"),
    "memory": ("abs(x)", [(-1, 1)], 0.1, "max_affine_cross"),
    "grid": ("sin(x)+cos(y)", [(-1, 1)] * 2, 1e-3, "spectral_grid"),
}


@pytest.fixture(scope="module", params=[(name, dtype) for name in CASES for dtype in ("float64", "float32")], ids=str)
def net(request):
    case, dtype = request.param
    expression, box, eps, construction = CASES[case]
    return attnc.compile(expression, box, eps, construction=construction, dtype=dtype)


def points_of(net, count=30):
    return net.box.lo + np.random.default_rng(1).random((count, net.box.d)) * net.box.widths


def recorded(module):
    """The arrays that hooks on all hook points will see."""
    seen = {}
    for name, point in module.hook_points.items():
        point.register_forward_hook(lambda _, given, array, name=name: seen.update({name: array.detach().numpy()}))
    return seen


def test_every_name_of_a_cache_is_a_hook_point_that_sees_it(net):
    module, points = net.to_torch(form="unfolded"), points_of(net)
    outputs, cache = net.run(points, cache=True)
    assert {name: array.shape[1:] for name, array in cache.items()} == activation_shapes(net.program)
    assert list(module.hook_points) == list(cache)
    assert set(cache) <= {name for name, _ in module.named_modules()}
    assert not any(name.split(".")[-1] == "output" for name, _ in module.named_modules())
    seen = recorded(module)
    found = module(torch.tensor(points)).numpy()
    assert (np.abs(found - outputs) <= 2 * evaluation_error(net.program, [points])).all()
    tolerance = 1e-11 if net.dtype == "float64" else 1e-3
    for name, array in cache.items():
        np.testing.assert_allclose(
            seen[name], array, rtol=0, atol=tolerance * (1 + np.abs(array[np.isfinite(array)]).max())
        )


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(programs_and_inputs())
def test_random_programs_with_masks_and_memory_agree(program_and_inputs):
    program, inputs = program_and_inputs
    module = to_torch_unfolded(program)
    found = module(*map(torch.from_numpy, inputs))
    assert_agrees(program, inputs, found.numpy())
    cache = {}
    evaluate_visited(program, inputs, cache.setdefault, 2**30)
    assert not len(inputs[0]) or [(name, array.shape[1:]) for name, array in cache.items()] == list(
        activation_shapes(program).items()
    )


def test_a_hook_replaces_an_array(net):
    module, points = net.to_torch(form="unfolded"), torch.tensor(points_of(net))
    last = list(module.hook_points)[-1]
    with torch.no_grad():
        expected = module(points)
        module.hook_points[last].register_forward_hook(lambda _, given, array: array + 1)
        assert torch.allclose(module(points), expected + 1)


def test_parameters_are_the_weights_and_need_a_gradient_only_if_trainable(net):
    for trainable in (False, True):
        module = net.to_torch(form="unfolded", trainable=trainable)
        found, stored = dict(module.named_parameters()), named_weights(net.program)
        assert set(found) == set(stored) == set(module.state_dict())
        assert all((found[name].detach().numpy() == weight).all() for name, weight in stored.items())
        assert {weight.requires_grad for weight in found.values()} == {trainable}


def test_gradients_of_inputs_and_of_weights(net):
    if net.dtype == "float32":
        pytest.skip("differences of float32 numbers have few digits")
    module, folded = net.to_torch(form="unfolded", trainable=True), net.to_torch()
    points = [torch.tensor(points_of(net, 6), requires_grad=True) for _ in range(2)]
    module(points[0]).sum().backward()
    folded(points[1]).sum().backward()
    torch.testing.assert_close(points[0].grad, points[1].grad, rtol=1e-9, atol=1e-9)
    for name, weight in module.named_parameters():
        is_structure = "W_" in name
        zeros = torch.tensor(named_weights(net.program)[name] == 0)
        assert not is_structure or not weight.grad[zeros].any(), name
    name, weight = max(module.named_parameters(), key=lambda each: float(each[1].grad.abs().sum()))
    place = int(weight.grad.abs().argmax())
    slope, step = float(weight.grad.flatten()[place]), 1e-6 * float(1 + weight.detach().abs().flatten()[place])
    values = []
    for sign in (1, -1):
        moved = copy.deepcopy(module)
        with torch.no_grad():
            dict(moved.named_parameters())[name].view(-1)[place] += sign * step
            values.append(float(moved(points[0].detach()).sum()))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-4)


def test_training_keeps_zeros():
    net = attnc.compile("sin(x)*y", [(-1, 1), (0, 1)], 1e-3)
    module = net.to_torch(form="unfolded", trainable=True)
    x = torch.tensor(points_of(net))
    losses = []
    for _ in range(20):
        loss = (module(x) - x[:, 0] ** 2).square().mean()
        slopes = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for weight, slope in zip(module.parameters(), slopes, strict=True):
                weight -= 0.05 * slope
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for name, weight in named_weights(net.program).items():
        found = module.get_parameter(name).detach().numpy()
        assert ("W_" not in name) or ((found == 0) == (weight == 0)).all(), name


def test_large_affine_maps_are_sparse(monkeypatch):
    net = attnc.compile("sin(x)*y", [(-1, 1), (0, 1)], 1e-3)
    points = torch.tensor(points_of(net))
    found = []
    for cells in (2**20, 0):
        monkeypatch.setattr("attnc.engines.torch_unfolded.MOST_DENSE_CELLS", cells)
        module = net.to_torch(form="unfolded", trainable=True)
        out = module(points)
        out.sum().backward()
        found.append((out, module.place1.weight.grad, module.place1.constant.grad))
    for dense, sparse in zip(*found, strict=True):
        torch.testing.assert_close(dense, sparse, rtol=1e-12, atol=1e-12)


def test_sequences_and_points_outside():
    target = attnc.SequenceTarget(lambda X, Y: X + Y.mean(1, keepdims=True), (2, 3), (1, 1), (-1, 1), lipschitz=2.0)
    net = attnc.compile(target, eps=1.5)
    rng = np.random.default_rng(0)
    X, Y = rng.uniform(-1, 1, (5, 2, 1)), rng.uniform(-1, 1, (5, 3, 1))
    found = net.to_torch(form="unfolded")(torch.tensor(X), torch.tensor(Y)).numpy()
    assert (np.abs(found - net.program(X, Y)) <= 2 * evaluation_error(net.program, [X, Y])).all()
    inside, out = net.to_torch(form="unfolded", outside="clamp"), net.to_torch(form="unfolded", outside="nan")
    far = torch.tensor(X * 9 + np.sign(X))
    torch.testing.assert_close(inside(far, torch.tensor(Y)), inside(far.clamp(-1, 1), torch.tensor(Y)))
    assert out(far, torch.tensor(Y)).isnan().all()


def test_all_points_at_once_without_blocks():
    """A hook of the folded form sees blocks unless they are switched off; one of the unfolded form never does."""
    net = attnc.compile("sin(x)", [(-1, 1)], 1e-3)
    points = torch.tensor(np.linspace(-1, 1, 50)[:, None])
    for module, wanted in (
        (net.to_torch(block=20), [20, 20, 10]),
        (net.to_torch(block=None), [50]),
        (net.to_torch(form="unfolded"), [50]),
    ):
        seen = []
        pattern = (
            module.attend1.head0.pattern
            if hasattr(module, "attend1")
            else module.stages["0_attend1"].heads[0].pieces[0].pattern
        )
        pattern.register_forward_hook(lambda _, given, weights, seen=seen: seen.append(len(weights)))
        with torch.no_grad():
            module(points)
        assert seen == wanted


def test_a_folded_module_is_trained_as_parameters():
    net = attnc.compile("sin(x)*y", [(-1, 1), (0, 1)], 1e-3)
    assert not list(net.to_torch().parameters())
    module, x = net.to_torch(trainable=True), torch.tensor(points_of(net))
    assert not any(buffer.is_floating_point() and buffer.numel() for buffer in module.buffers())
    module(x).sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())
    np.testing.assert_allclose(module(x).detach().numpy(), net.program(x.numpy()), rtol=0, atol=1e-12)


def test_what_is_refused():
    net = attnc.compile("tanh(x)", [(-1, 1)], 1e-6)
    for words, given in {
        "form must be one of folded, unfolded; found 'open'": {"form": "open"},
        "takes all points at once": {"form": "unfolded", "block": 8},
        "block must be a whole number": {"block": 0},
        "block must be a whole": {"block": "all"},
    }.items():
        with pytest.raises(attnc.InputError, match=words):
            net.to_torch(**given)
    named = attnc.compile("tanh(training)", {"training": (-1, 1)}, 1e-6)
    with pytest.raises(attnc.ProgramError, match="'training' is taken"):
        named.to_torch(form="unfolded")
    named.to_torch()
    assert (
        dataclasses.replace(net, box=Box.parse([(-2, 2)], ("x",))).to_torch(form="unfolded", outside="clamp")
        is not None
    )
