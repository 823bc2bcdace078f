"""Patches, ablations and traces, against formulas that were written by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import attnc
from attnc.ir.patching import NAMES_SHOWN


@pytest.fixture(scope="module")
def net():
    return attnc.compile("tanh(sin(x)+y)+x*y", {"x": (-2, 2), "y": (-1, 1)}, 1e-5)


@pytest.fixture(scope="module")
def pairs(net):
    return net.box.lo + np.random.default_rng(3).random((2, 7, 2)) * net.box.widths


def test_a_patch_with_the_own_arrays_changes_nothing(net, pairs):
    outputs, cache = net.run(pairs[0], cache=True)
    for name, array in cache.items():
        for patch in (array, lambda found: found):
            again = net.run(pairs[0], cache=True, patch={name: patch})
            assert (again.outputs == outputs).all(), name
            assert all((again.cache[each] == cache[each]).all() for each in cache)
    assert net.run(pairs[0], patch={}).cache == {}


def test_a_patch_is_what_later_layers_read(net, pairs):
    cache = net.run(pairs[0], cache=True).cache
    uniform = np.full((1, 1, cache["attend2.head0.pattern"].shape[-1]), 0.5)
    found = net.run(pairs[0], cache=True, patch={"attend2.head0.pattern": uniform, "attend2.signal.product#0": 3})
    assert found.outputs == pytest.approx(3 + cache["place2.value0.tanh(t)#2"].mean(axis=1))
    assert (found.cache["attend2.head0.pattern"] == 0.5).all()
    assert (found.cache["attend2.signal.product#0"] == 3).all()
    doubled = net.run(pairs[0], patch={"attend2.head0.z": lambda z: 2 * z})
    once = net.run(pairs[0])
    z = cache["attend2.head0.z"][:, 0, 0]
    assert doubled.outputs == pytest.approx(once.outputs + z)
    scores = cache["attend1.head0.scores"].copy()
    scores[..., 0] = -np.inf  # a key is hidden
    assert (
        net.run(pairs[0], cache=True, patch={"attend1.head0.scores": scores}).cache["attend1.head0.pattern"][..., 0]
        == 0
    ).all()


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"attend1.head0.patern": 0}, "no activation 'attend1.head0.patern'. Nearest: attend1.head0.pattern"),
        ({3: 0}, "no activation '3'"),
        ({"attend1.head0.pattern": np.zeros(3)}, r"shape \(3,\). Give \(7, 1, 5\), as in the cache, \(1, 1, 5\)"),
        ({"attend1.head0.z": np.nan}, r"is nan at \(0, 0, 0\)"),
        ({"attend1.head0.z": np.inf}, "must be finite in float64"),
        ({"attend1.head0.z": -np.inf}, "must be finite in float64"),
        ({"attend1.head0.scores": -np.inf}, r"hides all keys from the query at \(0, 0\)"),
        ({"attend1.head0.z": "a"}, "real numbers"),
        ({"attend1.head0.z": lambda z: None}, "real numbers"),
        ({"attend1.head0.z": [[1, 2], [3]]}, "do not form an array"),
        ({"attend2.head0.pattern": 1e308, "place2.value0.tanh(t)#2": 1e308}, "not finite"),
        ([1], "a mapping"),
    ],
)
def test_patches_that_do_not_fit(net, pairs, patch, words):
    with pytest.raises(attnc.InputError, match=words) as caught:
        net.run(pairs[0], patch=patch)
    assert str(caught.value).count("attend1.") <= NAMES_SHOWN + 1


def test_hooks_of_the_unfolded_module_intervene_alike(net, pairs):
    torch = pytest.importorskip("torch")
    clean = net.run(pairs[0], cache=True).cache
    for name in (
        "place1.signal.x",
        "attend1.head1.pattern",
        "attend1.head0.scores",
        "attend2.head0.z",
        "attend1.signal.y",
    ):
        module = net.to_torch(form="unfolded")
        module.hook_points[name].register_forward_hook(lambda _, given, array, name=name: torch.tensor(clean[name]))
        expected = net.run(pairs[1], patch={name: clean[name]}).outputs
        np.testing.assert_allclose(module(torch.tensor(pairs[1])).numpy(), expected, rtol=0, atol=1e-13)


def test_ablation(net, pairs):
    cache = net.run(pairs[0], cache=True).cache
    product, tanh = cache["attend2.signal.product#0"][:, 0], cache["attend2.signal.tanh(t)#2"][:, 0]
    assert net.ablate("attend2.head0")(pairs[0]) == pytest.approx(product)
    assert net.ablate(["attend1.head0", "attend2.head0"])(pairs[0]) == pytest.approx(0)
    over = net.run(pairs[1], cache=True).cache["attend1.head0.z"][:, 0, 0]
    mean = net.ablate("attend1.head0", how="mean", over=pairs[1])
    assert mean(pairs[0]) == pytest.approx(tanh + over.mean())
    drawn = net.ablate("attend1.head0", how="resample", over=pairs[1], seed=5)
    found = drawn(pairs[0]) - tanh
    assert np.abs(found[:, None] - over).min(axis=1) == pytest.approx(0, abs=1e-12)
    assert len(set(found.round(9))) > 1
    assert (drawn(pairs[0]) == drawn(pairs[0])).all()
    by_default = net.ablate("attend1.head0", how="mean")
    assert by_default.over.shape[1] == 2
    run = by_default.run(pairs[0], cache=True, patch={"attend2.head0.z": 0.0})
    assert run.outputs == pytest.approx(by_default.run(pairs[0], cache=True).cache["attend1.head0.z"][:, 0, 0])
    assert not hasattr(by_default, "certificate")


@pytest.mark.parametrize(
    ("head", "given", "words"),
    [
        ("attend1.hed0", {}, "no head 'attend1.hed0'. Nearest: attend1.head0"),
        ((), {}, "at least one head"),
        ("attend1.head0", {"how": "noise"}, "zero, mean, resample"),
        ("attend1.head0", {"over": [[0, 0]]}, "needs no points"),
        ("attend1.head0", {"how": "mean", "over": [[0]]}, "one column for each of x, y"),
        ("attend1.head0", {"how": "mean", "over": np.zeros((0, 2))}, "n ≥ 1"),
        ("attend1.head0", {"how": "resample", "seed": -1}, "seed"),
    ],
)
def test_ablations_that_are_refused(net, head, given, words):
    with pytest.raises(attnc.InputError, match=words):
        net.ablate(head, **given)


def by_hand(clean, corrupted):
    """The exact outputs of tanh(sin(x)+y)+x*y with one site taken from the clean points."""
    (xk, yk), (xc, yc) = clean.T, corrupted.T
    return {
        "place1.signal.x": np.tanh(np.sin(xk) + yc) + xk * yc,
        "place1.signal.y": np.tanh(np.sin(xc) + yk) + xc * yc,  # the values of the product are made beside it
        "place1.value0.product#0": np.tanh(np.sin(xc) + yc) + xc * yk,
        "attend1.signal.y": np.tanh(np.sin(xc) + yk) + xc * yc,
        "attend1.signal.sin(t)#1": np.tanh(np.sin(xk) + yc) + xc * yc,
        "attend1.head1.z": np.tanh(np.sin(xk) + yc) + xc * yc,
        "attend2.signal.product#0": np.tanh(np.sin(xc) + yc) + xk * yk,
        "attend2.head0.z": np.tanh(np.sin(xk) + yk) + xc * yc,
        "read.out.0": np.tanh(np.sin(xk) + yk) + xk * yk,
        "place1.key0.sin(t)#1": np.tanh(np.sin(xc) + yc) + xc * yc,
    }


def test_a_trace_has_the_exact_answer_beside_the_measured_one(net, pairs):
    found = attnc.trace(net, *pairs)
    assert net.certificate.by_heads is not None
    for name, outputs in by_hand(*pairs).items():
        place = [site.name for site in found.sites].index(name)
        np.testing.assert_allclose(found.exact[place][:, 0], outputs, rtol=0, atol=1e-13)
    for site, patched, exact in zip(found.sites, found.patched, found.exact, strict=True):
        assert site.exact is not None, site.name
        assert site.is_inside is not False
        assert site.difference == np.abs(patched - exact).max() <= net.certificate.bound, site.name
        assert site.restored == pytest.approx(site.exact, abs=1e-4)
    assert found["attend2.head0.z"].holds == "tanh(sin(x) + y)"
    assert found["read.out.0"].restored == pytest.approx(1)
    text = str(found)
    assert "place1.signal.x" in text
    assert "place1.one" not in text
    assert "place1.one" in found.table(every=True)
    assert json.loads(found.to_json())["sites"][0]["name"] == found.sites[0].name


def test_a_network_proved_by_leaves_states_its_heads_until_it_is_saved(tmp_path):
    net = attnc.compile("sin(x)+cos(y)", [(-3, 3)] * 2, 1e-5, construction="compose")
    clean, corrupted = [[1.0, 2.0]], [[-1.0, 0.5]]
    assert net.certificate.by_leaves is not None
    assert all(site.exact is not None for site in attnc.trace(net, clean, corrupted).sites)
    net.save(tmp_path / "net")
    loaded = attnc.trace(attnc.load(tmp_path / "net"), clean, corrupted)
    assert loaded["attend1.head0.z"].exact is None
    assert "—" in str(loaded)


@pytest.mark.parametrize("construction", ["spectral_grid", "max_affine"])
def test_queries_of_one_layer_are_traced_exactly(construction):
    net = attnc.compile("sin(x)+y", [(-1, 1)] * 2, 0.2, construction=construction)
    found = attnc.trace(net, [[0.5, 0.2]], [[-0.5, -0.9]])
    for name, exact in (
        ("embed.query.x", np.sin(0.5) - 0.9),
        ("embed.query.y", 0.2 - np.sin(0.5)),
        ("select.head0.z", None),
    ):
        place = [site.name for site in found.sites].index(name)
        exact = np.sin(0.5) + 0.2 if exact is None else exact
        assert found.exact[place] == pytest.approx(exact)
        assert found[name].difference <= net.certificate.bound


def test_values_that_carry_an_input_are_not_guessed():
    net = attnc.compile("relu(x)*y", [(-1, 1)] * 2, 1e-3, construction="compose")
    found = attnc.trace(net, [[0.5, 0.2]], [[-0.5, -0.9]])
    assert found["place1.signal.x"].exact is None  # the values carry x besides
    assert found["read.out.0"].exact == pytest.approx(1)


def test_sequences_and_functions_are_traced_without_exact_answers():
    target = attnc.SequenceTarget(lambda X, Y: X + Y.mean(1, keepdims=True), (1, 1), (1, 1), (-1, 1), lipschitz=2.0)
    net = attnc.compile(target, eps=1.0)
    found = attnc.trace(
        net, (np.full((2, 1, 1), 0.9), np.zeros((2, 1, 1))), (np.full((2, 1, 1), -0.9), np.zeros((2, 1, 1)))
    )
    assert max(site.restored for site in found.sites) == pytest.approx(1)
    assert all(site.exact is None for site in found.sites)
    assert "no expression" in str(found)


def test_traces_that_are_refused(net, pairs):
    with pytest.raises(attnc.InputError, match="same outputs"):
        attnc.trace(net, pairs[0], pairs[0])
    with pytest.raises(attnc.InputError, match="pairs of points: found 7 and 2"):
        attnc.trace(net, pairs[0], pairs[1][:2])
    with pytest.raises(attnc.InputError, match="no site 'attend1"):
        attnc.trace(net, *pairs)["attend1.head0"]


def test_the_heat_map(net, pairs, tmp_path):
    pytest.importorskip("matplotlib")
    found = attnc.trace(net, *pairs)
    found.plot(tmp_path / "trace.svg")
    assert (tmp_path / "trace.svg").read_text(encoding="utf-8").startswith("<?xml")
    with pytest.raises(attnc.InputError, match="nothing to draw"):
        dataclasses.replace(found, sites=()).plot(tmp_path / "no.svg")
    with pytest.raises(attnc.InputError, match=r"must end in \.png"):
        found.plot(tmp_path / "no.txt")
