"""L_p norms: leaves are proved again, each with a bound of its own, and the bounds are added up."""

from __future__ import annotations

import random

import pytest

import attnc
from attnc_checker import check
from checker.tampering import change_weight, changes, edit, proved, refusal, reproved, saved_once

CASES = [
    ("floor(2*x) + sin(x)", 1, 1, 0.5, "auto"),
    ("sign(x)", 1, 3.5, 0.4, "auto"),
    ("floor(x + 0.3)", 1, 2, 0.3, "auto"),
    ("1e-300*sign(x)", 1, 2, 5e-301, "auto"),
    ("sin(x)", 3, 2, 0.1, "max_affine"),
    ("sign(x) + x", 1, 2, 0.5, "two_layer"),
    ("floor(3*x - 3)", 1, 2, 0.5, "attention_softmax"),  # leaves that hardly count are found larger
]
JUMPS = [  # rows of keys that prover and checker must leave out alike
    ("0.213*sign(sin(1.284*x)) + 1.443*sign(x - 0.313)", {"x": (-1.43, 0.953)}, 1, 0.3, "float64"),
    ("sign(x + 0.267)*sign(y - 0.232)", {"x": (-0.957, 0.572), "y": (-0.174, 0.978)}, 1, 1.5, "float64"),
    ("sign(x + 0.209)*abs(x) + sign(x + 0.696)*abs(x)", {"x": (-1.747, 1.91)}, 1, 0.5, "float32"),
]
saved = saved_once(lambda path: attnc.compile("floor(2*x) + sin(x)", [(-1, 1)], eps=0.5, norm=2).save(path))


@pytest.mark.parametrize(("expression", "end", "p", "eps", "construction"), CASES)
def test_proved_again(tmp_path, expression, end, p, eps, construction):
    net = attnc.compile(expression, [(-end, end)], eps=eps, norm=p, construction=construction)
    assert net.certificate.method == "proof"
    verdict = reproved(tmp_path / "net", net)
    assert net.certificate.observed <= 1.001 * verdict.reproved  # by quadrature
    are_enclosures = {leaf.kind == "enclosure" for leaf in net.certificate.by_leaves.leaves}
    assert are_enclosures == {construction != "auto" or net.construction == "max_affine"}
    edit(tmp_path / "net", "certificate.json", lambda data: data.update(bound=0.99 * verdict.reproved, observed=None))
    assert "the leaves add up to the norm" in refusal(tmp_path / "net")


@pytest.mark.parametrize(("expression", "box", "p", "eps", "dtype"), JUMPS)
def test_jumps_by_two_stages_are_proved_again(tmp_path, expression, box, p, eps, dtype):
    options = {"norm": p, "construction": "attention_softmax", "dtype": dtype}
    reproved(tmp_path / "net", attnc.compile(expression, box, eps, **options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_jumps_by_two_stages_are_proved_again(tmp_path, seed):
    """With the gap chosen by each side for itself, 4 of the first 20 were refused."""
    rng = random.Random(seed)

    def number(lo, hi):
        return round(rng.uniform(lo, hi), 3)

    def jump(name):
        lo, hi = box[name]
        place, height = number(lo + 0.1 * (hi - lo), hi - 0.1 * (hi - lo)), number(0.2, 1.5)
        kinds = [f"{height}*sign({name} - ({place}))", f"sign({name} - ({place}))*abs({name})"]
        kinds += [f"floor({1 + height}*{name})", f"{height}*sign(sin({2 * height}*{name}))"]
        return rng.choice(kinds)

    d, p = rng.choice([1, 1, 1, 1, 2]), rng.choice([1, 1, 2, 3])
    box = {name: (number(-2, 0), number(0.5, 2.5)) for name in "xy"[:d]}
    more = ["", f" + {jump('x')}", f" + sin({number(0.5, 2)}*x)"] if d == 1 else [f" + {jump('y')}", f"*{jump('y')}"]
    eps = 1.5 if d == 2 else 0.3 if p == 1 else 0.6
    options = {"norm": p if d == 1 else 1, "construction": "attention_softmax"}
    options["dtype"] = rng.choice(["float64", "float32"])
    try:
        net = attnc.compile(jump("x") + rng.choice(more), box, eps, **options)
    except attnc.BoundNotMet:
        pytest.skip("more cells than are allowed")
    if net.certificate.method == "theorem":
        pytest.skip("the theorem is closer than leaves: nothing to prove again")
    reproved(tmp_path / "net", net)


def test_the_norm_is_named_as_exactly_as_it_is_proved(tmp_path):
    """Over a large box L_1 is more than L_1.0000004, so that a bound of one is none of the other."""
    net = attnc.compile("sign(x)", [(-1, 1)], eps=0.5, norm=1.0000004)
    assert float(net.certificate.norm) == 1.0000004
    net.save(tmp_path / "net")
    assert check(tmp_path / "net", processes=1).scope == "in the norm L_1.0000004 over the box"


def _worst(data):
    return data["leaf_bounds"].index(max(data["leaf_bounds"]))


test_changed_certificates_are_refused = changes(
    {
        ("certificate.json", 1): [
            (lambda data: data.update(bound=0.97 * data["bound"], observed=None), "the leaves add up to the norm"),
            (lambda data: data.update(bound=0.0, observed=None, terms=[]), "the leaves add up to the norm"),
            (lambda data: data.update(norm="1", observed=None), "the leaves add up to the norm"),
            (lambda data: data.update(norm="0.5"), "neither 'inf' nor a number from 1 on"),
            (lambda data: data.update(norm="nan"), "neither 'inf' nor a number from 1 on"),
            (lambda data: data.update(norm=2), "neither 'inf' nor a number from 1 on"),
            (lambda data: data.update(norm="inf"), "is not re-proved to"),
            (lambda data: data["leaf_bounds"].__setitem__(_worst(data), 1e-6), "is not re-proved to 1.01e-06"),
            (lambda data: data["leaf_bounds"].pop(), "every leaf needs a bound of its own"),
            (lambda data: data.pop("leaf_bounds"), "every leaf needs a bound of its own"),
            (lambda data: (data["leaf_bounds"].pop(), data["leaves"].pop()), "do not cover the box"),
        ],
        ("certificate.json", 2): [
            (lambda data: data["leaf_bounds"].__setitem__(0, "1"), "leaf_bounds[0] is '1', not a number"),
        ],
    }
)


def test_a_changed_value_is_refused(net):
    proved(net, processes=2)
    change_weight(net, "layers.0.embed.constant.values", 2, 1.1)
    refusal(net)
