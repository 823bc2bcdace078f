"""Networks as people use them: calling them, running them, and refusals of bad points."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import attnc
from attnc.errors import InputError
from attnc.ir.text import layer_rows
from attnc.targets.expressions.expression import Expression


@pytest.fixture(scope="module")
def net() -> attnc.Network:
    return attnc.compile("x - 2*y", {"x": (-1, 1), "y": (0, 2)}, eps=0.5, construction="max_affine")


@pytest.mark.parametrize("construction", ["auto", "max_affine"])
def test_columns_are_in_the_order_of_the_box(construction):
    swapped = attnc.compile("x - 2*y", {"y": (0, 2), "x": (-1, 1)}, eps=0.5, construction=construction)
    assert swapped.variables == ("y", "x")
    assert abs(swapped(np.array([[2.0, -1.0]]))[0] + 5) <= swapped.certificate.bound
    listed = attnc.compile("y*y + x", [(0, 1), (5, 6)], eps=0.5)
    assert listed.variables == ("y", "x")


@pytest.mark.parametrize("construction", ["auto", "max_affine"])
@pytest.mark.parametrize(
    ("source", "shape"),
    [("x", (3,)), ("exp(x)", (3,)), ("(x, 2*x)", (3, 2)), ("(sin(x), x**2)", (3, 2)), ("(x,)", (3, 1))],
)
def test_shapes(construction, source, shape):
    network = attnc.compile(source, [(0, 1)], 0.1, construction=construction)
    assert network.program(np.zeros((3, 1))).shape == network(np.zeros((3, 1))).shape == shape


def test_what_points_may_be(net):
    wanted = net(np.array([[0.0, 1.0], [1.0, 2.0]]))
    for points in ([[0, 1], [1, 2]], np.array([[0, 1], [1, 2]], np.float32), np.array([[0, 1], [1, 2]], order="F")):
        assert (net(points) == wanted).all()
    assert net(np.zeros((0, 2))).shape == (0,)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (np.zeros(2), r"shape \(2,\): the network takes \(batch, 2\) \(columns x, y\)"),
        (np.zeros((3, 3)), r"takes \(batch, 2\)"),
        (0.5, "takes"),
        ([[0, np.nan]], "point 0 is NaN in y"),
        ([[0, 1], [1.5, 1]], r"point 1 has x = 1.5, outside \[-1, 1\]"),
        ([[0, np.inf]], "outside"),
        ([["a", "b"]], "real numbers"),
        ([[1j, 0]], "real numbers"),
        ([[1, 2], [3]], "array"),
    ],
)
def test_what_points_may_not_be(net, points, words):
    with pytest.raises(InputError, match=words):
        net(points)


def test_outside(net):
    out = np.array([[5.0, 1.0]])
    assert net(out, outside="clamp") == net(np.array([[1.0, 1.0]]))
    assert np.isfinite(net(out, outside="allow")).all()
    for points, outside, words in (([[np.inf, 1.0]], "allow", "finite"), (out, "ignore", "raise, clamp, allow")):
        with pytest.raises(InputError, match=words):
            net(points, outside=outside)


def test_run_names_everything(net):
    points = np.array([[0.25, 0.5], [-0.3, 1.7]])
    outputs, cache = net.run(points, cache=True)
    assert (outputs == net.program(points)).all()
    pattern = cache["select.head0.pattern"]
    assert pattern.shape == (2, 1, net.num_anchors)
    assert pattern.sum(axis=-1) == pytest.approx(1)
    values = cache["embed.value.0"]
    assert np.einsum("bqk,bk->bq", pattern, values)[:, 0] == pytest.approx(outputs)
    assert net.run(points).cache == {}
    with pytest.raises(InputError, match="max_bytes"):
        net.run(points, cache=True, max_bytes=1000)


def test_a_part_of_the_box_is_named_by_its_variables():
    """Variables come in any order. Those that are not named keep their whole range."""
    net = attnc.compile("sin(x)*y", {"x": (-1, 1), "y": (0, 1)}, 1e-2)
    part, whole = {"y": (0.0, 0.25), "x": (0.5, 1.0)}, net.certificate.bound
    assert net.bound(part) == net.bound([(0.5, 1.0), (0.0, 0.25)]) < whole / 2
    assert net.bound({"y": (0.0, 0.25)}) == net.bound([(-1.0, 1.0), (0.0, 0.25)]) < whole / 2
    for wrong in ({"z": (0, 1)}, {"y": (0.0, 2.0)}):
        with pytest.raises(attnc.InputError, match="not a part"):
            net.bound(wrong)


@pytest.mark.parametrize(
    ("text", "part", "options"),
    [
        ("exp(sin(x)*y)", {"x": (-0.1, 0.1)}, {}),
        ("max(x, y, z)", {"x": (0.5, 1.0), "y": (-1.0, -0.5), "z": (-1.0, 0.0)}, {}),
        ("(x*y*z, x - 0.3*sin(y*z)/2)", {"z": (0.0, 0.1)}, {}),
        ("sqrt(x**2 + y**2 + 1)", {"x": (0.0, 0.2), "y": (0.0, 0.2)}, {"dtype": "float32"}),
    ],
)
def test_a_part_of_the_box_of_a_deep_network_has_a_bound_of_its_own(text, part, options, tmp_path):
    names = dict.fromkeys([name for name in "xyz" if name in text], (-1.0, 1.0))
    net = attnc.compile(text, names, 1e-2, construction="compose", **options)
    assert net.certificate.method == "staged proof"
    net.save(tmp_path / "net")
    bound = attnc.load(tmp_path / "net").bound(part)
    assert bound < net.certificate.bound
    lo, hi = np.array([part.get(name, ends) for name, ends in names.items()]).T
    points = np.random.default_rng(0).uniform(lo, hi, (4096, len(lo)))
    wanted = Expression.parse(text).with_variables(net.variables)(points)
    assert np.abs(net(points).reshape(wanted.shape) - wanted).max() <= bound


def test_a_part_of_the_box_in_another_norm():
    """The norm over a part is at most that over the whole, and where f does not jump far less."""
    net = attnc.compile("sign(x - 0.3)", {"x": (-1, 1)}, 0.3, norm=4)
    for claim in (net.certificate, dataclasses.replace(net.certificate, method="theorem", evidence=None)):
        stated = dataclasses.replace(net, certificate=claim)
        assert stated.bound({"x": (0.25, 1.0)}, seconds=1) <= claim.bound
        assert stated.bound({"x": (0.5, 1.0)}, seconds=1) < claim.bound / 10


@pytest.mark.parametrize("seconds", [-1, np.nan, "soon", None])
def test_seconds_for_a_proof_are_a_number(net, seconds):
    with pytest.raises(InputError, match="seconds"):
        net.bound({"x": (0, 1)}, seconds=seconds)


@pytest.mark.parametrize("change", [{"function": "sin("}, {"argument": "x*y"}, {"argument": "q"}, {"name": None}])
def test_stages_that_say_something_else_leave_the_bound_of_the_whole(change):
    """The functions that a certificate states for its heads are not trusted: if they do not fit, nothing is proved."""
    net = attnc.compile("exp(sin(x)*y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-2)
    proved = net.certificate.by_heads
    heads = (dataclasses.replace(proved.heads[0], **change), *proved.heads[1:])
    claim = dataclasses.replace(net.certificate, evidence=dataclasses.replace(proved, heads=heads))
    assert dataclasses.replace(net, certificate=claim).bound({"x": (0, 0.1)}) == claim.bound


def test_points_too_far_out_have_no_value():
    """On an infinite range, scores overflow far out, and infinity itself is refused."""
    everywhere = attnc.compile("gelu(x)", {"x": (-np.inf, np.inf)}, 1e-2)
    assert everywhere([[1e100]])[0] == pytest.approx(1e100)
    for ask in (everywhere, everywhere.run):
        with pytest.raises(InputError, match=r"point 1 has no value in float64: its scores overflow, with x = 1e\+308"):
            ask([[0.0], [1e308]])
        with pytest.raises(InputError, match="point 0 has x = inf"):
            ask([[np.inf]])


def test_a_network_is_shown_in_a_line(net):
    assert max(len(repr(part)) for part in (net, net.program, net.certificate)) < 250
    for fact in ("x - 2*y", "max_affine", f"{net.num_anchors} anchors", "float64", "bound 0."):
        assert fact in repr(net)
    assert [line.split()[0] for line in str(net.program).splitlines()] == ["input", "embed", "select", "read", "output"]


def test_layers_say_what_their_heads_write():
    """In the order of the heads, so that a pattern of the cache has a meaning."""
    net = attnc.compile("tanh(x*y)+sin(2*x)", [(-1, 1), (0, 2)], eps=1e-3)
    rows = {row["name"]: row for row in layer_rows(net.program)}
    assert rows["attend1"]["writes"] == [["signal.sin(t)#0"], ["signal.product#1"]]
    assert rows["attend2"]["writes"] == [["signal.tanh(t)#2"]]
    assert "→ signal.sin(t)#0 signal.product#1\n" in str(net.program)
