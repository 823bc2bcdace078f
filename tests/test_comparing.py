"""Trained weights come back with a certificate, and learned heads are compared with constructed ones."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.ir.weights import named_weights, with_named_weights

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def net():
    return attnc.compile("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-3)


@pytest.fixture(scope="module")
def deep():
    return attnc.compile("tanh(sin(x)+y)+x*y", {"x": (-2, 2), "y": (-1, 1)}, 1e-4)


def points_of(net, count=60):
    return net.box.lo + np.random.default_rng(1).random((count, net.box.d)) * net.box.widths


def trained(net, function, steps=5, rate=1e-3, only=""):
    """An unfolded module after some steps of gradient descent towards a function, of the parameters that end so."""
    module, x = net.to_torch(form="unfolded", trainable=True), torch.tensor(points_of(net))
    chosen = [weight for name, weight in module.named_parameters() if name.endswith(only)]
    for _ in range(steps):
        loss = (module(x) - function(x)).square().mean()
        slopes = torch.autograd.grad(loss, chosen)
        with torch.no_grad():
            for weight, slope in zip(chosen, slopes, strict=True):
                weight -= rate * slope
    return module


@pytest.mark.parametrize("which", ["net", "deep"])
def test_untrained_weights_have_the_same_bound(which, request):
    net = request.getfixturevalue(which)
    again = net.with_weights(net.to_torch(form="unfolded", trainable=True))
    assert again.certificate.bound == net.certificate.bound
    assert again.certificate.method == net.certificate.method
    assert again.certificate.standing is attnc.Standing.PROVEN
    assert again.expression == net.expression
    assert again.command is None
    assert (again(points_of(net)) == net(points_of(net))).all()


@pytest.mark.parametrize(("which", "only"), [("net", ""), ("deep", "constant"), ("deep", "W_Q")])
def test_weights_trained_for_another_function_are_refused_with_their_bound(which, only, request):
    net = request.getfixturevalue(which)
    module = trained(net, lambda x: x[:, 0] ** 2, only=only)
    with pytest.raises(attnc.BoundNotMet, match="these weights have the proven bound") as refused:
        net.with_weights(module)
    found, points = refused.value, points_of(net, 2000)
    error = np.abs(found.network(points) - attnc.as_target(net.expression, net.box.as_dict())(points)[:, 0]).max()
    assert net.eps < error <= found.bound <= 1.2 * found.network.certificate.observed
    assert found.bound == found.network.certificate.bound
    assert np.abs(found.network.program(points[:50]) - module(torch.tensor(points[:50])).detach().numpy()).max() < 1e-12
    accepted = net.with_weights(module, eps=2 * found.bound)
    assert accepted.certificate.bound == found.bound


def test_a_few_steps_towards_the_same_function_are_proved(net, tmp_path):
    module = trained(net, lambda x: x[:, 0].sin() + x[:, 1].cos(), rate=1e-2)
    again = net.with_weights(module, eps=2e-3)
    assert again.certificate.bound != net.certificate.bound
    again.save(tmp_path / "net")
    assert attnc.verify(tmp_path / "net", processes=1)["proved"]


def test_weights_are_proved_for_another_target(net):
    module = net.to_torch(form="unfolded", trainable=True)
    with torch.no_grad():
        module.attend1.head0.W_O *= 2
    other = attnc.as_target("sin(x)+2*cos(y)", net.box.as_dict())
    again = net.with_weights(module.state_dict(), target=other, eps=4e-3)
    assert again.expression == "sin(x)+2*cos(y)"
    assert again.certificate.bound <= 2 * net.certificate.bound


def test_a_structure_that_was_trained_away_still_has_a_bound(deep):
    module = trained(deep, lambda x: x[:, 0] ** 2, only="weight")
    with pytest.raises(attnc.BoundNotMet) as refused:
        deep.with_weights(module, seconds=0.5)
    assert refused.value.network.certificate.observed <= refused.value.bound < 100


def test_weights_that_do_not_fit(net, deep):
    module = net.to_torch(form="unfolded", trainable=True)
    state = module.state_dict()
    cases = {
        "is folded": net.to_torch(trainable=True),
        "no weight 'place2": deep.to_torch(form="unfolded"),
        "'place1.weight' are missing": {name: w for name, w in state.items() if name != "place1.weight"},
        "have shape": state | {"place1.weight": np.zeros(3)},
        "not all finite": state | {"place1.weight": state["place1.weight"] * np.nan},
        "must be real numbers": state | {"place1.weight": np.array(["a"])},
        "found int": 3,
    }
    for words, weights in cases.items():
        with pytest.raises(attnc.InputError, match=words):
            net.with_weights(weights)
    for words, given in {
        "seconds": {"seconds": -1},
        "eps": {"eps": 0},
        "must be a Target": {"target": "sin(x)"},
        "they must be the same": {"target": attnc.as_target("x", {"x": (0, 1)})},
        "has outputs": {"target": attnc.as_target("(x, y)", net.box.as_dict())},
    }.items():
        with pytest.raises(attnc.InputError, match=words):
            net.with_weights(module, **given)
    with pytest.raises(attnc.InputError, match="pass target="):
        dataclasses.replace(net, expression=None).with_weights(module)


def test_a_table_comes_back_with_its_target():
    table = attnc.TableTarget([0.0, 0.5, 1.0], [1.0, 0.0, 2.0])
    net = attnc.compile(table, eps=1e-6)
    again = net.with_weights(net.to_torch(form="unfolded"), target=table)
    assert again.certificate.bound == net.certificate.bound


def shuffled(net, seed=0):
    """The same network with its keys in another order, and another basis of queries and keys."""
    rng, weights = np.random.default_rng(seed), named_weights(net.program)
    place, attend = net.program.layers[:2]
    order = np.concatenate([[0], 1 + rng.permutation(place.weight.shape[0] - 1)])  # token 0 is the state
    moved = dataclasses.replace(
        place,
        weight=dataclasses.replace(
            place.weight, index=np.column_stack([order[place.weight.index[:, 0]], place.weight.index[:, 1:]])
        ),
        constant=dataclasses.replace(
            place.constant, index=np.column_stack([order[place.constant.index[:, 0]], place.constant.index[:, 1:]])
        ),
    )
    for h, head in enumerate(attend.heads):
        M = rng.normal(size=(head.W_Q.shape[1],) * 2)
        weights[f"attend1.head{h}.W_Q"] = head.W_Q @ M
        weights[f"attend1.head{h}.W_K"] = head.W_K @ np.linalg.inv(M).T
    program = with_named_weights(net.program, weights)
    return dataclasses.replace(net, program=dataclasses.replace(program, layers=(moved, *program.layers[1:]))), order


def test_keys_are_matched_whatever_their_order_and_basis():
    net = attnc.compile("sin(x)", [(-3, 3)], 1e-4)
    other, order = shuffled(net)
    (head,) = attnc.compare(other, net, points_of(net)).heads
    assert head.matches.tolist() == [[int(order[k]), k] for k in range(len(order))]
    assert head.key_distance < 1e-9 * head.key_spread
    assert head.pattern_distance < 1e-9
    assert head.similarity == pytest.approx(1)
    assert max(head.angles.values()) < 1e-5
    assert np.diag(head.overlap) == pytest.approx(1)


def test_a_trained_module_is_compared_with_its_network(net):
    module, points = trained(net, lambda x: 1.2 * x[:, 0].sin() + x[:, 1].cos(), rate=3e-2), points_of(net)
    found = attnc.compare(module, net, points)
    assert [head.learned for head in found.heads] == ["attend1.head0", "attend1.head1"]
    apart = np.abs(module(torch.tensor(points)).detach().numpy() - net.program(points))
    assert found.largest == pytest.approx(apart.max())
    assert found.mean_square == pytest.approx(np.sqrt((apart**2).mean()))
    assert all(0 < head.key_distance < head.key_spread for head in found.heads)
    assert "outputs differ by" in str(found)
    assert json.loads(found.to_json())["num_points"] == len(points)


def test_heads_without_names_in_common_are_paired_by_what_they_compute(net):
    other = attnc.compile("2*cos(y)+3*sin(x)", net.box.as_dict(), 1e-2, construction="compose")
    renamed = dataclasses.replace(
        other.program,
        layers=tuple(dataclasses.replace(layer, name=f"other{layer.name}") for layer in other.program.layers),
    )
    found = attnc.compare(dataclasses.replace(other, program=renamed), net, points_of(net))
    written = {
        f"{layer.name}.head{h}": layer.channels[int(head.W_O.any(axis=0).argmax())].split("#")[0]
        for program in (renamed, net.program)
        for layer in program.layers
        for h, head in enumerate(layer.heads)
    }
    assert len(found.heads) == 2
    assert all(written[head.learned] == written[head.constructed] for head in found.heads)
    fewer = attnc.compare(attnc.compile("sin(x)+y", net.box.as_dict(), 1e-2), net, points_of(net))
    assert len(fewer.heads) == len(fewer.alone) == 1


def test_arrays_of_keys():
    rng = np.random.default_rng(0)
    keys, order = rng.normal(size=(9, 3)), rng.permutation(9)
    (head,) = attnc.compare(keys[order] + 1e-3, keys).heads
    assert head.matches.tolist() == [[int(np.flatnonzero(order == k)[0]), k] for k in range(9)]
    assert head.key_distance == pytest.approx(1e-3)
    (line,) = attnc.compare([[1.0, 0.0], [2.0, 0.0]], [[1.0, 1.0]]).heads
    assert line.angles["keys"] == pytest.approx(45)
    assert line.matches.tolist() == [[0, 0]]


def test_comparisons_that_are_refused(net):
    points = points_of(net)
    for words, given in {
        "module has no names": (net.to_torch(trainable=True), net, points),
        "found int": (3, net, points),
        "points are needed": (net, net),
        "outside": (net, net, 9 * points),
        "different shapes": (attnc.compile("tanh(x)", [(-1, 1)], 1e-3), net, points),
        "cannot be compared": ([[1.0]], [[1.0, 2.0]]),
        r"shape \(2,\)": ([1.0, 2.0], [[1.0]]),
        "both must be arrays": ([[1.0]], net, points),
        "do not form an array": ([[1.0], [1.0, 2.0]], [[1.0]]),
    }.items():
        with pytest.raises(attnc.InputError, match=words):
            attnc.compare(*given)


def test_the_example_runs(capsys):
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples/ground_truth.py"), run_name="ground_truth")
    old, new = example["main"](steps=60).values()
    assert old > 0.1 > new
    assert "attend1.head1 (sin(x)) by zero" in capsys.readouterr().out


def test_the_picture(net, tmp_path):
    pytest.importorskip("matplotlib")
    attnc.compare(net, net, points_of(net)).plot(tmp_path / "keys.svg")
    attnc.compare([[1.0], [2.0]], [[1.5]]).plot(tmp_path / "arrays.png")
    assert (tmp_path / "keys.svg").stat().st_size > 1000
    assert (tmp_path / "arrays.png").stat().st_size > 1000
    with pytest.raises(attnc.InputError, match="nothing to draw"):
        attnc.Comparison((), None, None, None, 0).plot(tmp_path / "no.svg")
