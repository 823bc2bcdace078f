"""L_p norms: leaves are proved again, each with a bound of its own, and what was found is added up."""

from __future__ import annotations

import pytest

import attnc
from attnc_checker import check
from checker.tampering import change_weight, changes, edit, proved, refusal, reproved, saved_once

CASES = [
    ("floor(2*x) + sin(x)", 1, 1, 0.5, "auto"),
    ("sign(x)", 1, 3.5, 0.4, "auto"),
    ("floor(x + 0.3)", 1, 2, 0.3, "auto"),
    ("1e-300*sign(x)", 1, 2, 5e-301, "auto"),
    # 2,037 leaves, of which each may be found up to 1% worse: together they are not, at a second look.
    ("sin(x)", 3, 2, 0.1, "max_affine"),
    ("sign(x) + x", 1, 2, 0.5, "two_layer"),
    ("floor(3*x - 3)", 1, 2, 0.5, "attention_softmax"),  # leaves that hardly count are found larger
]
saved = saved_once(lambda path: attnc.compile("floor(2*x) + sin(x)", [(-1, 1)], eps=0.5, norm=2).save(path))


@pytest.mark.parametrize(("expression", "end", "p", "eps", "construction"), CASES)
def test_proved_again(tmp_path, expression, end, p, eps, construction):
    net = attnc.compile(expression, [(-end, end)], eps=eps, norm=p, construction=construction)
    assert net.certificate.method == "proof"
    verdict = reproved(tmp_path / "net", net)
    assert net.certificate.observed <= 1.001 * verdict.reproved  # by quadrature
    are_enclosures = {leaf.kind == "enclosure" for leaf in net.certificate.by_leaves.leaves}
    assert are_enclosures == {construction in ("two_layer", "attention_softmax")}
    edit(tmp_path / "net", "certificate.json", lambda data: data.update(bound=0.99 * verdict.reproved, observed=None))
    assert "the leaves add up to the norm" in refusal(tmp_path / "net")


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
