"""ReLU networks: their certificates are proved again, and every change to one is refused for its own reason."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest

import attnc
from attnc.ir.layers import Mask
from attnc.targets.linear import exact_text
from attnc_checker.expressions import Reader
from checker.tampering import changes, edit, mutations, proved, refusal, replaced, reproved, saved_once, stage, weights
from proofs.mutations import with_layer
from proofs.staged.test_units import random_network


def without(target, layer, rows, columns=()):
    """The network without the weights of some units, or of some that they read."""
    weights = [W.copy() for W in target.weights]
    weights[layer][rows], weights[layer][:, columns] = 0.0, 0.0
    return attnc.ReLUNetwork(weights, target.biases, (-1, 1))


BOX = (-1.0, 1.5)
CASES = [(0, (2, 5, 1), 0.1, "float64"), (0, (3, 6, 4, 2), 0.2, "float64"), (0, (3, 4, 4), 0.1, "float32")]
LARGER = [
    (1, (4, 32, 32, 2), 0.1, "float64"),
    (1, (4, 32, 32, 2), 0.2, "float32"),
    (1, (4, 32, 32, 2), 0.02, "float64"),
    (1, (4, 16, 16, 16, 16, 2), 0.1, "float64"),
    (1, (8, 40, 8), 0.1, "float64"),
    (1, (1, 64, 1), 0.01, "float64"),
]


@pytest.mark.parametrize(
    ("seed", "sizes", "eps", "dtype"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGER)]
)
def test_proofs_are_proved_again(tmp_path, seed, sizes, eps, dtype):
    reproved(tmp_path / "net", attnc.compile(random_network(seed, sizes, BOX), eps=eps, dtype=dtype), loosest=20)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_torch_module(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nn = torch.nn
    module = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3, bias=False), nn.ReLU())
    with pytest.raises(attnc.InputError, match=r"Linear, ReLU, …, Linear; found Linear, ReLU, Linear, ReLU"):
        attnc.compile(module, box=(-1, 1), eps=0.1)
    module = module.append(nn.Linear(3, 2)).to(getattr(torch, dtype))
    net = attnc.compile(module, box=(-1, 1), eps=0.1)
    points = np.random.default_rng(0).uniform(-1, 1, (100, 2)).astype(dtype).astype(np.float64)
    wanted = module.double().eval()(torch.tensor(points)).detach().numpy()
    assert np.abs(net(points) - wanted).max() <= net.certificate.bound
    reproved(tmp_path / "net", net, loosest=20)


@pytest.mark.parametrize(("sizes", "is_open"), [((4, 6, 5, 2), False), ((5, 4, 3), True)])
def test_gates_of_a_torch_module(tmp_path, sizes, is_open):
    """attnc.mlp_network: two keys a unit, with the values of its input; the last activations may be the outputs."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nn = torch.nn
    layers = [part for i, o in itertools.pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())]
    module = nn.Sequential(*(layers if is_open else layers[:-1])).double()
    net = attnc.mlp_network(module, box=(-1, 1), eps=1e-6)
    assert net.certificate.method == "staged proof"
    assert net.certificate.bound <= 1.2 * net.parameters["error"]
    net.save(tmp_path / "net")
    verdict = proved(tmp_path / "net")
    kinks = np.random.default_rng(0).uniform(-1, 1, (2000, sizes[0]))
    wanted = module(torch.tensor(kinks)).detach().numpy()
    assert np.abs(net(kinks) - wanted).max() <= verdict.bound


@pytest.mark.parametrize("x", [0.0, 0.25, -1.5, 0.1, -1 / 3, 1e300, 5e-324, -2.5e-310, 123456789.0, 2.0**-1000])
def test_numbers_are_exact(x):
    reader = Reader(["x"])
    (step,) = reader.parse(f"({exact_text(x)})*x")
    number = reader.steps[reader.steps[step].given[0]].given[0]
    assert Fraction(int(number.p), int(number.q)) == Fraction(x)


TARGET = random_network(2, (2, 4, 3, 2), BOX)
HONEST = attnc.compile(TARGET, eps=0.3)
saved = saved_once(lambda path: reproved(path, HONEST, loosest=20))


def exchanged(data):
    """Exchange the definitions of two units of a layer."""
    one, other = data["stages"][1:3]
    one["channel"], other["channel"] = other["channel"], one["channel"]


test_a_changed_claim = changes(
    {
        ("certificate.json", 1): [
            (lambda data: data["stages"].append(data["stages"].pop(0)), "claims to be like 's1_0'"),
            (lambda data: data["stages"].insert(0, data["stages"].pop(4)), "input of stage s2_0 is no combination"),
            (lambda data: data["stages"].pop(), "an output is no combination of variables and of stages before it"),
            (exchanged, "do not depend on its input alone"),
            (
                stage(0, interval=lambda ends: [ends[0] + 1e-5, ends[1]]),
                "may leave the claimed interval",
            ),
            (stage(0, bound=lambda x: 0.9 * x), "is not re-proved to"),
            (stage(4, bound=lambda x: 2 * x), "the errors of the stages add up to"),
            (stage("s1_0", held=[-9.0, 1.0]), "the input of stage s2_0 may leave the claimed interval"),
            (stage(0, leaves=lambda leaves: leaves[1:]), "do not cover the box"),
            (stage("s1_0", function="relu(t)"), "does not follow from the stages before"),
            (stage("s2_0", function="relu(t)"), "are not known to be the expression"),
            (stage("s1_1", argument_as="z1_2"), "does not follow from the stages before"),
            (stage("s2_1", argument_as=None, argument="x0"), "are not known to be the expression"),
            (stage("s1_1", like="s1_2"), "claims to be like 's1_2', which is not a stage before it"),
            (stage("s2_2", like="s1_0"), "are not known to be the expression"),
            (stage("s1_1", channel="clip@4"), "there is no channel 'clip@4'"),
            (stage("s1_1", channel="clip@-1"), "there is no channel 'clip@-1'"),
            (stage("s1_1", channel="clip"), "two stages claim to write 'clip'"),
            (lambda data: data["outputs"].reverse(), "are not known to be the expression"),
            (lambda data: data.update(bound=0.9 * data["bound"], observed=0.0), "the errors of the stages add up to"),
        ],
        ("config.json", 1): [(replaced("z1_0)", "z1_1)"), "differ in the variables or the expression")],
        ("both", 1): [
            (replaced("h1_0 = relu(z1_0)", "h1_0 = relu(z1_1)"), "does not follow from the stages"),
            (replaced("h1_0 = relu(z1_0)", "h1_0 = z1_0"), "does not follow from the stages"),
            (replaced("*x0", "*1.0000000000001*x0", 1), "does not follow from the stages"),
            (replaced("*h2_0", "*1.0000000000001*h2_0", 1), "not known to be the expression"),
        ],
        ("both", 2): [
            (replaced("h1_0 = ", "h1_9 = "), "'h1_0' is not allowed here"),
            (replaced("h1_0 = ", "x0 = "), "defines 'x0', which is no name, or known already"),
            (replaced("h1_0 = ", "h1_0 = 1; h1_0 = "), "defines 'h1_0'"),
            (replaced("h1_0 = ", "pi = 3; h1_0 = "), "defines 'pi'"),
            (replaced("h1_0 = ", ""), "which is no name"),
            (lambda data: data.update(expression=f"{data['expression']}; "), "defines 'z3_0, z3_1'"),
            (replaced("h1_0 = ", "h1_0 == "), "unknown characters"),
        ],
    }
)


def test_what_a_stage_that_is_like_another_says_itself_is_not_read(net):
    edit(net, "certificate.json", stage("s1_1", bound=0.0, interval=[0.0, 1.0], function="t"))
    proved(net)


PLACES = itertools.product(("0.affine0", "2.affine1", "4.read"), ("weight", "constant"))
test_changed_weights = weights([f"layers.{place}.{kind}.values" for place, kind in PLACES], 1.3)
test_programs_that_were_tampered_with = mutations(HONEST, TARGET)


def test_a_mask(tmp_path):
    """One that hides a key from the first unit alone."""
    attention = HONEST.program.layers[1]
    tokens = HONEST.program.layers[0].weight.shape[0]
    queries, keys = np.ones(tokens, np.int32), np.full(tokens, -1, np.int32)
    queries[0], keys[-1] = 0, 1
    head = dataclasses.replace(attention.heads[0], mask=Mask(queries, keys))
    program = with_layer(HONEST.program, 1, dataclasses.replace(attention, heads=(head,)))
    dataclasses.replace(HONEST, program=program).save(tmp_path / "net")
    assert "is not like s1_0: its keys have other values" in refusal(tmp_path / "net")


@pytest.mark.parametrize(
    ("layer", "rows", "columns", "dtype"),
    [(0, [0, 2], [], "float64"), (1, [1], [], "float32"), (1, [], [0, 3], "float64"), (1, [2], [1], "float64")],
)
def test_units_that_are_constant_or_never_read(tmp_path, layer, rows, columns, dtype):
    odd = without(random_network(0, (2, 5, 4, 2)), layer, rows, columns)
    reproved(tmp_path / "net", attnc.compile(odd, eps=0.1, dtype=dtype), loosest=20)


def test_a_constant_unit_of_another_value(tmp_path):
    """The definition of a unit without weights must be that of the network."""
    target = without(random_network(0, (2, 5, 2)), 0, [1])
    reproved(tmp_path / "net", attnc.compile(target, eps=0.1), loosest=20)
    bias = exact_text(float(target.biases[0][1]))

    def constant_claim(data):
        for entry in data["stages"]:
            entry["argument"] = entry["argument"].replace(f"({bias})", "(1.5)")

    edit(tmp_path / "net", "both", replaced(bias, "1.5", 1))
    assert "does not follow from the stages before" in refusal(tmp_path / "net")
    edit(tmp_path / "net", "certificate.json", constant_claim)
    found = refusal(tmp_path / "net")
    assert "is not re-proved to" in found or "may leave the claimed interval" in found
