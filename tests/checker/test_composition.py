"""Deep programs: their certificates are proved again, and every change to one is refused for its own reason."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from flint import arb, fmpq
from safetensors.numpy import load_file

import attnc
from attnc_checker import check
from attnc_checker.deep.lines import along
from attnc_checker.deep.normal_forms import Forms, are_equal
from attnc_checker.expressions import Reader, evaluate, parse
from attnc_checker.forms import ONE
from attnc_checker.network import Stage
from attnc_checker.program import exact
from checker.networks import form, head_of, reduced_head
from checker.tampering import change_weight, changes, edit, refusal, refused_changes, reproved, saved_once, stage

BOX = (-1.0, 1.5)


def composed(text, eps, dtype="float64", box=None):
    names = sorted(attnc.targets.expressions.expression.Expression.parse(text).variables)
    net = attnc.compile(text, box or dict.fromkeys(names, BOX), eps, construction="compose", dtype=dtype)
    assert net.certificate.method == "staged proof"
    return net


@pytest.mark.parametrize(
    ("text", "eps", "dtype", "box"),
    [
        ("sin(x*y)", 1e-6, "float64", None),
        ("max(a*b, sin(c))*c - 0.3*a", 1e-3, "float32", None),
        ("(a*cos(b), sin(a*b) + b, a - b)", 1e-5, "float64", None),
        ("clip(a*b, -0.3, 0.5) + abs(b - c)/(2 + a)", 1e-4, "float64", None),
        ("exp(a)*cos(b)*tanh(c)*sigmoid(d)*(f + g)/(2 + h)", 1e-4, "float64", None),
        ("a/3 + pi*sin(a*b/7) + sqrt(2)*b", 1e-8, "float64", None),
        ("sin(x*y) + 0.1", 1e-3, "float32", None),
        ("relu(a*a - b) + sin(c) + cos(d) + f", 1e-1, "float64", None),  # a*a is a square, and not below 0
        ("tanh(5*tanh(5*tanh(5*a*b) + b) + a)", 1e-2, "float64", None),  # no slope of tanh may seem to be above 1
        ("a**2*gelu(min(c, b))", 1e-3, "float32", None),  # the carrier is smaller than gelu of its argument seems to be
        ("1.463*x + abs(3.514 - 1.138*x)", 1e-4, "float32", None),  # the sizes of values are measured along t
        ("silu(2.312*x + 1000)", 5e-4, "float32", {"x": (-1, 1)}),  # |x| is 1 at most, not (|t| + 1000)/2.312
        ("silu(x + 1)*y + gelu(2*x - 2.01)", 2e-5, "float32", dict.fromkeys("xy", (-1, 1))),
        ("(x, silu(y))", 1e-3, "float32", {"x": (-10, -1), "y": (-20, -8)}),  # few keys, all but one far behind
        ("relu(sin(a) - b - c - d + f + g - h)", 1e-3, "float32", None),  # what keys share of the rounding of a query
        # The input comes as near to the end of a domain as it may.
        ("sqrt(x) + y*x", 3e-2, "float64", {"x": (0, 1), "y": (-1, 1)}),
        ("sqrt(x)*y + asin(y)", 3e-2, "float64", {"x": (0, 1), "y": (-1, 1)}),
        (
            "sqrt(abs(x - x)) + y*x",
            1e-3,
            "float32",
            {"x": (2.7, 3.6), "y": (0, 1)},
        ),  # x − x is 0, not a range around it
        # √ is steep at 0, and the bound is largest elsewhere.
        ("x + sqrt(abs(sin(y)))", 0.1, "float64", {"x": (0, 1), "y": (-1, 1)}),
        # 0.3 + x² − x ≥ 0.05, but the range of that is below 0 on parts of a width of 1/20.
        ("log(0.3 + x*x - x + y*y)*z", 1e-2, "float64", dict.fromkeys("xyz", (-1, 1))),
    ],
)
def test_staged_proofs_are_proved_again(tmp_path, text, eps, dtype, box):
    reproved(tmp_path / "net", composed(text, eps, dtype, box))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("text", "eps"),
    [
        ("sin(40*a)*b + cos(300*c)", 1e-3),  # doubles angles
        ("(1.2 + sin(a))**b", 1e-3),
        ("sqrt(abs(a - b)) + relu(a*b - c)**2", 1e-3),  # is held at 0
        ("gelu(x*y) + silu(x - y)", 1e-3),
        ("log(2 + x*y)*sqrt(x + 2)", 1e-3),
        ("max(x, -x, 0.2) + x*y*z*w*u*v*p*q", 1e-3),
    ],
)
def test_more_staged_proofs(tmp_path, text, eps, dtype):
    try:
        net = composed(text, eps, dtype)
    except attnc.BoundNotMet:
        assert dtype == "float32"
        return
    reproved(tmp_path / "net", net)


saved = saved_once(lambda path: reproved(path, composed("relu(a*b - c) + sin(a*b)*c", 1e-4)))
"""s_0 = relu(a·b …) and the like: a product, a function of it, a gate of two."""


def times(factor):
    return lambda numbers: [factor * x for x in numbers]


def with_a_constant(data):
    first = data["stages"][0]
    data["stages"].insert(0, {**first, "name": "z", "argument": "100", "argument_as": None})


test_a_changed_claim = changes(
    {
        ("certificate.json", 1): [
            (lambda data: data["stages"].reverse(), "stage s_2 is no combination of variables and of stages before it"),
            (lambda data: data["stages"].pop(0), "is no combination of variables and of stages before it"),
            (lambda data: data["stages"].pop(), "an output is no combination of variables and of stages before it"),
            (lambda data: data["stages"].append(data["stages"][-1]), "two stages or variables are called"),
            (
                stage(1, interval=lambda ends: [ends[0], ends[1] - 1e-4]),
                "the input of stage s_1 may leave the claimed interval",
            ),
            (with_a_constant, "the input of stage z may leave the claimed interval"),
            (stage(1, leaf_bounds=times(0.9)), "is not re-proved to"),
            (stage(2, carrier_size=1e3), "the errors of the stages add up to"),
            (stage(1, bound=lambda x: 0.9 * x), "that of a leaf above that of the stage"),
            (stage(1, bound=lambda x: -x), "a bound of stage 's_1' is negative"),
            (stage(1, leaf_bounds=times(-1)), "a bound of stage 's_1' is negative"),
            (stage(1, bound=lambda x: 0.9 * x, leaf_bounds=None), "is not re-proved to"),
            (stage(1, bound=lambda x: 2 * x, leaf_bounds=None), "the errors of the stages add up to"),
            (lambda data: data["stages"][1]["leaf_bounds"].reverse(), "is not re-proved to"),
            (lambda data: data["stages"][1]["leaf_bounds"].pop(), "leaves and 127 bounds"),
            (lambda data: data["stages"][1]["leaves"].pop(), "do not cover the box"),
            (stage(0, function="1.001*t"), "are not known to be the expression"),
            (stage(0, argument="1.001*a"), "are not known to be the expression"),
            (stage(0, argument_as="b"), "does not follow from the stages before"),
            (stage(0, channel="one"), "no head writes into 'one'"),
            (stage(0, channel="nowhere"), "there is no channel 'nowhere'"),
            (stage(1, stage="attend7"), "of a layer 'attend7'"),
            (stage(0, held=[-0.5, 0.5]), "the input of stage s_1 may leave the claimed interval"),
            (lambda data: data["outputs"].append("a"), "are not known to be the expression"),
            (lambda data: data.update(bound=0.85 * data["bound"], observed=0.0), "the errors of the stages add up to"),
            (lambda data: data.update(truncation=0.2 * data["bound"]), "the errors of the stages add up to"),
            (lambda data: data["box"].update(a=[-1.0, 1.5001]), "differ in the box"),
            (lambda data: data.update(method="proof", leaves=[["taylor", 4, 0, 0, 0, 0]]), "not a one-stage program"),
        ],
        ("certificate.json", 2): [
            (stage(0, function=None), "stages[0].function is None, not a text"),
            (stage(0, carrier=3), "stages[0].carrier is 3, not a text"),
            (stage(0, interval=[1.0]), "stages[0].interval is [1.0], not a list of 2"),
            (stage(0, bound=None), "stages[0].bound is None, not a number"),
            (stage(0, leaves={}), "stages[0].leaves is {}, not a list"),
            (stage(0, function="t +"), "cannot be read"),
            (lambda data: data.update(axes=[3]), "axes is (3,), not at most 128 numbers of variables"),
            (lambda data: data.update(axes=[0] * 129), "not at most 128 numbers of variables"),
            (lambda data: data.update(stages=None), "stages is None, not a list"),
            (lambda data: data.update(stages=[{}] * 1001), "more than 1000 stages"),
            (stage(2, carrier_size="1"), "stages[2].carrier_size is '1'"),
        ],
        ("both", 1): [
            (lambda data: data["box"].update(a=[-1.0, 1.5001]), "may leave the claimed interval"),
            (lambda data: data.update(expression=f"{data['expression']}*1.0001"), "are not known to be the expression"),
            (lambda data: data.update(expression=f"{data['expression']} + 0*log(a)"), "may be undefined"),
        ],
    }
)


def test_parts_of_the_box(tmp_path):
    """Any axes prove true claims, if they are enough; none prove false ones."""
    path, net = tmp_path / "net", composed("exp(x*y)*exp(-x)", 1e-4)
    net.save(path)
    axes = list(net.certificate.by_heads.axes)
    for other, proves in ((axes, True), (axes[::-1], True), ([], False)):
        edit(path, "certificate.json", lambda data, other=other: data.update(axes=other))
        assert check(path, processes=1).proved is proves
    edit(path, "certificate.json", lambda data: data.update(axes=axes, bound=0.8 * data["bound"], observed=0.0))
    assert "the errors of the stages add up to" in refusal(path)


def test_an_infinite_box_has_no_staged_proof(tmp_path):
    net = tmp_path / "net"
    composed("sin(300*x)", 1e-2).save(net)
    edit(net, "certificate.json", lambda data: data.update(box={"x": ["-inf", "inf"]}, core=list(BOX)))
    assert "is for a bounded box" in refusal(net)


def test_changed_weights(net, saved):
    reasons = set()
    for name, tensor in load_file(saved / "model.safetensors").items():
        if name.endswith((".head0.W_Q", "place2.constant.values", "read.weight.values")):
            shutil.copytree(saved, net, dirs_exist_ok=True)
            change_weight(net, name, int(np.argmax(np.abs(tensor))), 0.9)
            reasons.add(refusal(net).split(":")[0])
    assert len(reasons) > 1


def test_a_changed_mask(net, saved):
    """A head that sees the keys of another one, or fewer of its own."""
    masks = {name: t for name, t in load_file(saved / "model.safetensors").items() if name.endswith("key_segments")}
    assert masks
    for name, segments in masks.items():
        for value in {-1, 1} - set(segments.tolist() if len(set(segments.tolist())) == 1 else []):
            # With −1 every query sees all of the keys; with 1 no query sees any.
            shutil.copytree(saved, net, dirs_exist_ok=True)
            edit(net, "tensors", lambda tensors, name=name, value=value: tensors[name].fill(value))
            reason = refusal(net)
            assert "is not re-proved to" in reason or "sees no key" in reason, (name, value, reason)


@pytest.mark.parametrize("stated", [{"dtype": "int64"}, {"dtype": "int3"}, {"shape": [1]}, {"shape": 7}, {"more": 0}])
def test_a_mask_that_is_described_otherwise(net, stated):
    """attnc would not read it."""

    def change(data):
        heads = [head for layer in data["program"]["layers"] for head in layer.get("heads", ())]
        next(head["mask"] for head in heads if head["mask"])["key_segments"].update(stated)

    edit(net, "config.json", change)
    assert "do not describe a network" in (reason := refusal(net, 2)) or "does not describe a network" in reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("text", ["relu(a*b - c) + sin(a*b)*c", "sin(20*a*b)", "clip(a*b, -0.3, 0.5)/(2 + c)"])
def test_random_changes_that_break_the_bound_are_refused(tmp_path, text, seed):
    """Any weight, by any factor: where a sample then shows an error above the bound, there must be no proof."""
    rng, path = np.random.default_rng(seed), tmp_path / "net"
    net = composed(text, 1e-3)
    net.save(path)
    points = rng.uniform(*BOX, (4000, len(net.variables)))
    wanted = attnc.targets.expressions.expression.Expression.parse(text)(points)[:, 0]
    factors = [0.0, -1.0, 0.5, 0.99, 1.01, 2.0]
    refused = refused_changes(
        path, points, wanted, lambda size: [(int(rng.integers(size)), float(rng.choice(factors)))]
    )
    assert len(refused) > 1


@pytest.mark.parametrize(
    ("left", "right", "are"),
    [
        ("(x + y)**2", "x*x + 2*x*y + y**2", True),
        ("max(x, y)", "y + relu(x - y)", True),
        ("min(2*x, 2*y)", "x + y - abs(x - y)", True),
        ("clip(x, 0, pi)", "relu(x) - relu(x - pi)", True),
        ("clip(x, 1, 0)", "1 + relu(x - 1) - relu(x)", False),
        ("sin(4*x)", "4*sin(x)*cos(x)*(1 - 2*sin(x)**2)", True),
        ("sin(x)**2 + cos(x)**2", "1", True),
        ("x/(y + 1)", "x*(1/(1 + y))", True),
        ("x**y", "exp(y*log(x))", True),
        ("exp(x)", "exp(x + 1e-9)", False),
        ("relu(x)", "relu(-x)", False),
        ("abs(x)*2", "abs(-2*x)", True),
        ("x*0.1", "x/10", True),
        ("tanh(x)", "tan(x)", False),
        ("(x - x)**2 + y", "y", True),
        ("y + 0*x**0", "y*(x - x + 1)**3", True),
        ("((2**1000)**1000)**1000*x", "((2**1000)**1000)**1000*x", True),
    ],
)
def test_normal_forms(left, right, are):
    reader = Reader(["x", "y"])
    pairs = list(zip(reader.parse(left), reader.parse(right), strict=True))
    assert are_equal(reader, pairs) is are


def test_coefficients_of_combinations():
    forms = Forms(expands=True)
    (form,) = evaluate(parse("(2*x - pi*y/3)/4 + sqrt(2)", ["x", "y", "z"]), forms)
    found = forms.linear(form, 3)
    assert [float(x.mid()) for x in found] == pytest.approx([2**0.5, 0.5, -np.pi / 12, 0])
    assert found[2].overlaps(-arb.pi() / 12)
    for text in ("x*y", "relu(x + 5)", "x**2", "1/x", "sin(x)"):
        (form,) = evaluate(parse(text, ["x", "y"]), forms)
        assert forms.linear(form, 2) is None


def lined(heads, unit, *reach):
    """The heads along t = x_0, in units of the carrier, where |x_i| ≤ reach_i."""
    sizes = {ONE: arb(1), **dict(enumerate(map(arb, reach)))}
    whole = Stage(heads, [form((), ())], [*range(len(reach))])
    return along(whole, {0: fmpq(1)}, unit, sizes, arb(reach[-1]), "s0")


def test_every_head_adds_what_its_values_lean_on():
    """Two heads in one channel, with values that lean on another input by 1/8 each: together by 1/4."""
    head = head_of([(0, 1, 0), (1, 2, 0)], [(1, 0, fmpq(1, 8)), (2, 0, fmpq(-1, 8))])
    for count in (1, 2):
        _, unsure, _ = lined([head] * count, None, 1, 1)
        assert unsure >= arb(count) / 8


def test_what_the_carrier_has_no_share_in_is_fixed():
    """Values of 2 and 4 times an input, with 2^−9 and 2^−8 of a constant in their sizes; or of two inputs."""
    values = [form((0, 0, 2), (2**-9, 0, 2), 1), form((0, 0, 4), (2**-8, 0, 4), 1)]
    head = reduced_head([form(row, row, 1) for row in ((0, 1, 0), (1, 2, 0))], values)
    for unit, wanted in (({1: fmpq(1)}, 2**-8), ({ONE: fmpq(0), 1: fmpq(2)}, 2**-8), ({0: fmpq(1), 1: fmpq(1)}, 12)):
        _, _, fixed = lined([head], unit, 1, 3)
        assert wanted <= float(fixed) <= wanted + 2**-7


@pytest.mark.parametrize("shift", [0.0, 1.0, 3.0, 3.5, 100.0])
def test_sizes_along_the_argument(shift):
    """t = 2u + shift for |u| ≤ 1.5: the size of the score 4u + 1 is 4|u| + 1 or more, and never above that at 1.5."""
    t, reach = {ONE: exact(shift), 0: fmpq(2)}, {ONE: arb(1), 0: arb(1.5)}
    stage = Stage([head_of([(1, 4)], [(1, 0)])], [form((), ())], [0])
    (head,) = along(stage, t, None, reach, arb(1), "s")[0].heads
    for u in np.linspace(-1.5, 1.5, 31).tolist():
        (size,) = head.scores.sizes[ONE] + head.scores.sizes[0] * abs(arb(2 * u + shift)).min(head.farthest)
        largest = abs(u) if shift == 0 else 1.5
        assert 4 * abs(u) + 1 <= float(size.upper()) <= 4 * largest + 1 + 1e-12


def test_rounding_in_units_of_the_carrier_does_not_shrink_with_the_argument():
    """u·g(u): in units of the carrier u, values and their rounding are as large near 0 as anywhere."""
    line, _, _ = lined([head_of([(0, 1), (1, 2)], [(0, 2), (0, 4)])], {0: fmpq(1)}, 3)
    sizes = line.heads[0].values[0].sizes
    assert [float(x) for x in sizes[ONE]] == [2, 4]
    assert all(x == 0 for x in sizes[0])
