"""Claims about gradients: true ones are proved again, and changed ones refused with the reason."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from flint import arb, ctx

import attnc
from attnc.ir.layers import Affine, Attention
from attnc.ir.sparse import Sparse
from attnc_checker import check
from attnc_checker.derivatives import gradient
from attnc_checker.expressions import evaluate, parse
from attnc_checker.ranges import Ranges
from checker.tampering import edit

TEXTS = {"smooth": "sin(2*x)", "kink": "abs(x) + x**2", "two": "cos(x)*y", "strip": "max(x, y) + sin(x)"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for name, text in TEXTS.items():
        box = {"x": (-1, 1)} | ({"y": (-1, 2)} if name in ("two", "strip") else {})
        options = {"construction": "spectral_grid"} if name == "two" else {}
        net = attnc.compile(text, box, 1e-4, norm="C1", gradient_eps=1e-2, **options)
        folders[name] = tmp_path_factory.mktemp(name) / "net"
        net.save(folders[name])
    return folders


@pytest.mark.parametrize("name", TEXTS)
def test_a_claim_is_proved_again(saved, name):
    verdict = check(saved[name], processes=1)
    assert verdict.proved, verdict.reason
    assert verdict.gradient_bound == attnc.load(saved[name]).certificate.gradient_bound
    assert len(verdict.excluded) == (name in ("kink", "strip"))


def of_gradient(change):
    return lambda data: change(data["gradient"])


def lower(share):
    def change(claim):
        claim["bound"] *= share
        claim["observed"] *= share

    return change


def without_bands(claim):
    claim["excluded"] = []


def narrower(claim):
    (band,) = claim["excluded"]
    band["lo"], band["hi"] = band["lo"] / 8, band["hi"] / 8


def elsewhere(claim):
    claim["excluded"].append({"argument": "x", "lo": 0.5, "hi": 0.5625})


def wide(claim):
    claim["excluded"] = [{"argument": "x", "lo": -0.5, "hi": 0.5}]


def moved(apart):
    def change(claim):
        (band,) = claim["excluded"]
        band["lo"], band["hi"] = band["lo"] + apart, band["hi"] + apart

    return change


def renamed(argument):
    def change(claim):
        (band,) = claim["excluded"]
        band["argument"] = argument

    return change


def another(argument, lo, hi):
    return lambda claim: claim["excluded"].append({"argument": argument, "lo": lo, "hi": hi})


def all_excluded(claim):
    (stage,) = [stage for stage in claim["stages"] if any(leaf[0] == "excluded" for leaf in stage["leaves"])]
    stage["leaves"] = [["excluded", 0, 0]]
    stage["leaf_bounds"] = [0.0]
    stage.pop("leaf_middles", None)


def of_another(claim):
    claim["excluded"] = [{"argument": "t", "lo": -0.01, "hi": 0.01}]


MANY_WAVES = "+".join(f"sin({number}*x + {number}*y)" for number in range(1, 60))
"""The share of the box in which it is near 0 takes minutes to bound."""


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("smooth", lower(0.9), "of gradients, the taylor leaf"),
        ("two", lower(0.9), "of gradients, the taylor leaf"),
        ("kink", lower(0.5), "of gradients, the taylor leaf"),
        ("smooth", lambda claim: claim.update(bound=0.5 * claim["observed"]), "below the observed error"),
        ("smooth", lambda claim: claim.update(bound=-1.0, observed=-2.0), "below the observed error"),
        ("smooth", lambda claim: claim["leaves"].pop(), "do not cover the box"),
        ("smooth", lambda claim: claim["leaves"].append(claim["leaves"][0]), "stated twice"),
        ("smooth", lambda claim: claim.update(leaves=[["excluded", 0, 0]]), "no excluded neighbourhood"),
        ("smooth", lambda claim: claim.update(leaves=[["selection", 0, 0]]), "unknown kind"),
        ("smooth", elsewhere, "no kink in the excluded interval"),
        ("kink", elsewhere, "no kink in the excluded interval"),
        ("kink", without_bands, "no excluded neighbourhood"),
        ("kink", narrower, "no excluded neighbourhood"),
        ("kink", wide, "more than a 16th of it"),
        ("kink", of_another, "a single variable alone"),
        ("two", elsewhere, "a single variable alone"),
        ("strip", lower(0.9), "the errors of slopes add up to"),
        ("strip", without_bands, "lies in no excluded neighbourhood"),
        ("strip", narrower, "lies in no excluded neighbourhood"),
        ("strip", wide, "more than a 16th of the box"),
        ("strip", moved(0.01), "lies in no excluded neighbourhood"),
        ("strip", moved(1e-5), "lies in no excluded neighbourhood"),
        ("strip", renamed("x + y"), "no stage has a kink in the excluded neighbourhood"),
        ("strip", renamed("floor(x)"), "no stage has a kink in the excluded neighbourhood"),
        ("strip", renamed("x +"), "is no expression"),
        ("strip", another("x", -0.01, 0.01), "no stage has a kink in the excluded neighbourhood"),
        ("strip", another(MANY_WAVES, -0.01, 0.01), "no stage has a kink in the excluded neighbourhood"),
        ("strip", all_excluded, "lies in no excluded neighbourhood"),
    ],
)
def test_a_changed_claim_is_refused(saved, tmp_path, name, change, reason):
    folder = tmp_path / "net"
    shutil.copytree(saved[name], folder)
    edit(folder, "certificate.json", of_gradient(change))
    verdict = check(folder, processes=1)
    assert not verdict.proved
    assert reason in verdict.reason


def test_weights_that_break_the_gradient_alone_are_refused(saved, tmp_path):
    """A ripple of 1e-6 in a value moves the network less than its bound leaves room for, and the slopes more."""
    folder = tmp_path / "net"
    shutil.copytree(saved["smooth"], folder)

    def larger(tensors):
        name = max(tensors, key=lambda each: tensors[each].size if tensors[each].dtype == np.float64 else 0)
        tensors[name] = tensors[name] * (1 + 1e-2)

    edit(folder, "tensors", larger)
    assert not check(folder, processes=1).proved


def test_an_infinite_box_a_norm_or_a_table_has_no_claim_about_gradients(saved, tmp_path):
    folder = tmp_path / "net"
    shutil.copytree(saved["smooth"], folder)
    edit(folder, "certificate.json", lambda data: data.update(norm="2"))
    assert "gradients are claimed for an expression" in check(folder, processes=1).reason


@pytest.mark.parametrize(
    "text",
    [
        "sin(x)*y",
        "exp(x*y)/(2 + x)",
        "gelu(x) + silu(y)",
        "x**2.5*y**3",
        "max(x, y, 0.3)",
        "clip(x*y, 0.1, 0.2)",
        "(2 + x)**y",
    ],
)
def test_derivatives_contain_difference_quotients(text):
    function, (x, y) = parse(text, ["x", "y"]), (0.4375, 0.65625)
    before, ctx.prec = ctx.prec, 200
    try:
        h = arb(2) ** -60
        found = [
            low.union(high)
            for low, high in evaluate(gradient(function, ("x", "y")), Ranges([(arb(x),) * 2, (arb(y),) * 2]))
        ]
        for slope, (i, j) in zip(found, ((1, 0), (0, 1)), strict=True):
            ends = [
                evaluate(function, Ranges([(arb(x) + s * i * h,) * 2, (arb(y) + s * j * h,) * 2]))[0][0]
                for s in (-1, 1)
            ]
            assert abs(slope - (ends[1] - ends[0]) / (2 * h)) < 1e-12
    finally:
        ctx.prec = before


def test_floor_has_no_derivative():
    with pytest.raises(ValueError, match="no derivative of step"):
        gradient(parse("floor(x)", ["x"]), ("x",))


def test_strips_that_cover_more_than_half_of_the_box_are_refused(tmp_path):
    """Each takes up less than a 16th of the box, and holds a kink."""
    text = "+".join(f"abs(x + {number}/10)" for number in range(-9, 10, 2))
    net = attnc.compile(f"{text} + sin(y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-1, norm="C1", gradient_eps=1.0)
    net.save(tmp_path / "net")
    assert check(tmp_path / "net", processes=1).proved

    def wide(claim):
        for band in claim["excluded"]:
            band.update(lo=-0.0624, hi=0.0624)

    edit(tmp_path / "net", "certificate.json", of_gradient(wide))
    verdict = check(tmp_path / "net", processes=1)
    assert not verdict.proved
    assert "more than half of the box" in verdict.reason


def test_parts_of_the_box_with_too_many_choices_of_sides_are_halved(tmp_path):
    """The whole box meets 13 strips. All choices of their sides together took 1 GB, and the checker refused them."""
    text = "+".join(f"abs(x + {number}/13)" for number in range(-12, 13, 2))
    net = attnc.compile(f"{text} + sin(y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-1, norm="C1", gradient_eps=1.0)
    assert len(net.certificate.excluded) == 13
    net.save(tmp_path / "net")
    assert check(tmp_path / "net", processes=1).proved


def with_terms_that_cancel(net):
    """Add w1·(w2·(w3·x)) − w3·(w2·(w1·x)) to the channel of sin: 0, but −2^−6·x as engines compute it."""
    w1, w2, w3 = 34790.37, 36943.64, 37617.13
    place, *later = net.program.layers
    channel, read = place.channels.index("signal.sin(t)#0"), place.weight.dense()
    weight = np.zeros((*read.shape[:3], 4))
    weight[..., :2] = read
    weight[0, channel, 0, 2:] = w1, -w3

    def affine(name, rows, channels):
        constant = Sparse.from_dense(np.zeros((1, len(rows))))
        return Affine(name, Sparse.from_dense(np.array(rows, float)[None, :, None]), constant, tuple(channels))

    layers = [
        affine("first", [[1, 0], [0, 1], [w3, 0], [w1, 0]], "xyab"),
        affine("second", np.diag([1, 1, w2, w2]), "xycd"),
        replace(place, weight=Sparse.from_dense(weight)),
        *later,
    ]
    return replace(net, program=replace(net.program, layers=tuple(layers)))


def test_rounding_of_terms_beside_the_heads_counts(tmp_path):
    """A value that is off by 0.02 has room in a claim of 0.3. A slope that is off by as much has none."""
    net = attnc.compile("abs(x - 0.25) + sin(y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-6, norm="C1", gradient_eps=1e-4)
    changed = with_terms_that_cancel(net)
    points = np.random.default_rng(0).uniform((-1, -1), (0.2, 1), (100, 2))
    off = np.abs(changed.gradient(points)[:, 0, 0] + 1).max()
    changed.save(tmp_path / "net")

    def wider(data):
        (stage,) = [each for each in data["stages"] if each["function"] == "sin(t)"]
        stage["bound"] += 0.3
        stage["leaf_bounds"] = [bound + 0.3 for bound in stage["leaf_bounds"]]
        stage.pop("leaf_middles", None)
        data["bound"] += 0.6

    edit(tmp_path / "net", "certificate.json", wider)
    verdict = check(tmp_path / "net", processes=1)
    assert off > 50 * net.certificate.gradient_bound
    assert not verdict.proved
    assert "the errors of slopes add up to" in verdict.reason


def test_cotangents_that_overflow_are_refused(tmp_path):
    """y·2^−512·2^−512·2^512·2^512 = y: values are proved. Backwards, a cotangent reaches 2^1024."""
    net = attnc.compile("abs(x - 0.25) + sin(y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-2, norm="C1", gradient_eps=0.1)
    place = net.program.layers[0]

    def scaled(number, factor):
        weight = Sparse.from_dense(np.diag([1.0, factor])[None, :, None])
        return Affine(f"scale{number}", weight, Sparse.from_dense(np.zeros((1, 2))), place.channels[:2])

    factors = enumerate((2.0**-512, 2.0**-512, 2.0**512, 2.0**512))
    layers = (*(scaled(*each) for each in factors), *net.program.layers)
    replace(net, program=replace(net.program, layers=layers)).save(tmp_path / "net")
    verdict = check(tmp_path / "net", processes=1)
    assert not verdict.proved
    assert "may overflow" in verdict.reason


def backwards(net, points):
    """Return the slopes by automatic differentiation of the stored layers, where subnormal numbers count as 0."""
    import torch

    module, x = net.to_torch(form="unfolded"), torch.tensor(points, requires_grad=True)
    torch.set_flush_denormal(True)
    try:
        module(x).sum().backward()
    finally:
        torch.set_flush_denormal(False)
    return x.grad.numpy()


def with_silent_values(net):
    """Scale the channel of sin by 2^−10, read it times 2^10, and add values 0 that W_O multiplies by 2^1016."""
    *before, layer, read = net.program.layers
    channel, heads = layer.channels.index("signal.sin(t)#0"), []
    weight = read.weight.dense()
    weight[..., channel] *= 2.0**10
    for head in layer.heads:
        if head.W_O[0, channel]:
            W_O = np.concatenate([head.W_O * 2.0**-10, np.zeros_like(head.W_O)])
            W_O[1, channel] = 2.0**1016
            head = replace(head, W_V=np.pad(head.W_V, ((0, 0), (0, 1))), W_O=W_O)
        heads.append(head)
    layers = (*before, replace(layer, heads=tuple(heads)), replace(read, weight=Sparse.from_dense(weight)))
    return replace(net, program=replace(net.program, layers=layers))


@pytest.mark.filterwarnings("ignore:the arithmetic of this thread")
def test_cotangents_that_overflow_within_a_head_are_refused(tmp_path):
    """A cotangent of 2^1026 meets the value 0. Values are exact, and claims as wide as these have room for all else."""
    net = attnc.compile("abs(x - 0.25) + sin(y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-2, norm="C1", gradient_eps=0.1)
    changed, points = with_silent_values(net), np.array([[-0.5, 0.5]])
    assert np.array_equal(changed.program(points), net.program(points))
    assert np.isnan(backwards(changed, points)).all()
    changed.save(tmp_path / "net")

    def wider(data):
        (stage,) = [each for each in data["stages"] if each["function"] == "sin(t)"]
        (slopes,) = [each for each in data["gradient"]["stages"] if each["name"] == stage["name"]]
        for claim, more in ((stage, 2.0**60), (slopes, 2.0)):
            claim["bound"] += more
            claim["leaf_bounds"] = [bound + more for bound in claim["leaf_bounds"]]
            claim.pop("leaf_middles", None)
        data["bound"] += 2.0**72
        data["gradient"]["bound"] = 1e7

    edit(tmp_path / "net", "certificate.json", wider)
    verdict = check(tmp_path / "net", processes=1)
    assert not verdict.proved
    assert "may overflow" in verdict.reason


@pytest.mark.filterwarnings("ignore:the arithmetic of this thread")
def test_cotangents_that_underflow_and_are_amplified_are_refused(tmp_path):
    """Queries times 2^998 and keys times 2^−998 have the same scores. Backwards, keys come before queries."""
    net = attnc.compile(
        "exp(-9*x**2)", {"x": (-2, 2)}, 1e-9, norm="C1", gradient_eps=1e-6, construction="spectral_grid"
    )
    layers = [
        replace(layer, heads=tuple(replace(h, W_Q=h.W_Q * 2.0**998, W_K=h.W_K * 2.0**-998) for h in layer.heads))
        if isinstance(layer, Attention)
        else layer
        for layer in net.program.layers
    ]
    changed = replace(net, program=replace(net.program, layers=tuple(layers)))
    points = np.random.default_rng(0).uniform(-2, 2, (500, 1))
    assert np.array_equal(changed.program(points), net.program(points))
    assert (
        np.abs(backwards(changed, points) + 18 * points * np.exp(-9 * points**2)).max()
        > 10 * net.certificate.gradient_bound
    )
    changed.save(tmp_path / "net")
    verdict = check(tmp_path / "net", processes=1)
    assert not verdict.proved
    assert "may overflow" in verdict.reason or "is not re-proved" in verdict.reason
