"""More variables than a picture has: cuts, and truncated linear functions over their own input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnc
from attnc import constructions
from attnc.errors import InputError
from attnc.plots import figure
from attnc.plots.subject import read_clip
from plots.pictures import TARGETS, as_network, curves, network, panel, picture, product, texts, ticks, titles, waves


def test_a_cut_is_called_one_and_goes_along_the_variable_that_matters_most() -> None:
    shown = picture("space")
    assert "a cut along z at x = 0, y = 0" in texts(shown)
    assert titles(shown) == ["target and network", "error", "attention weights"]
    z, drawn = curves(panel(shown, "target and network"))["network"]
    points = np.stack([0 * z, 0 * z, z], axis=1)
    np.testing.assert_array_equal(drawn, network("space").at(points)[:, 0])
    np.testing.assert_allclose(curves(panel(shown, "target and network"))["target"][1], np.sin(z), atol=1e-12)
    ((places, _),) = ticks(panel(shown, "target and network"))
    steps = np.unique(network("space")(np.stack([0 * places, 0 * places, places], axis=1)).round(6))
    assert len(steps) == len(places) == round(network("space").num_anchors ** (1 / 3))


@pytest.mark.parametrize(("name", "entries"), [("relu of three", 2), ("sequence of three", 3)])
def test_a_cut_shows_every_output(name: str, entries: int) -> None:
    shown, known = picture(name), network(name)
    labels = [f"out[{i}]" if name.startswith("relu") else f"out[{i}, 0]" for i in range(entries)]
    assert titles(shown)[: entries + 1] == [*labels, "error"]
    (cut,) = [text for text in texts(shown) if text.startswith("a cut along")]
    moving = cut.split()[3]
    axis = known.box.names.index(moving)
    for i, label in enumerate(labels):
        assert panel(shown, label).get_xlabel() == moving
        t, drawn = curves(panel(shown, label))["network"]
        points = np.repeat((known.box.lo + known.box.hi)[None] / 2, len(t), axis=0)
        points[:, axis] = t
        np.testing.assert_array_equal(drawn, known.at(points)[:, i])
        np.testing.assert_allclose(curves(panel(shown, label))["target"][1], TARGETS[name](points)[:, i], atol=1e-12)
    assert set(labels) <= set(curves(panel(shown, "error")))


def test_six_outputs_at_most_the_chosen_one_among_them() -> None:
    weights = np.random.default_rng(0).normal(size=(9, 3))
    target = attnc.ReLUNetwork([np.eye(3), weights], [np.zeros(3), np.zeros(9)], (-1, 1))
    many = attnc.compile(target, eps=0.5)
    assert titles(figure(many))[:6] == [f"out[{i}]" for i in range(6)]
    assert titles(figure(many, output=8))[:6] == [f"out[{i}]" for i in range(3, 9)]


@pytest.mark.parametrize("name", ["clip of three", "clips", "clips, heads"])
def test_a_truncation_is_drawn_over_its_own_input(name: str) -> None:
    shown, known = picture(name), network(name)
    target = TARGETS[name.partition(",")[0]]
    a, b = target.a, target.b
    panels = ["target and network"] if name == "clip of three" else [f"out[{i}]" for i in range(3)]
    assert titles(shown) == [*panels, "error", "attention weights"]
    for i, title in enumerate(panels):
        axes = panel(shown, title)
        lines = curves(axes)
        u, drawn = lines["network"]
        np.testing.assert_allclose(axes.get_xlim(), (a - 0.3 * (b - a), b + 0.3 * (b - a)))
        np.testing.assert_allclose(lines["target"][1], np.clip(u, a, b), atol=1e-9)
        assert known.certificate.bound is not None
        assert np.abs(drawn - np.clip(u, a, b)).max() <= known.certificate.bound + 1e-9
        reach = np.abs(target.W[i]).sum()  # the box is [−1, 1] for all
        np.testing.assert_allclose(
            (u[0], u[-1]), np.clip((target.t[i] - reach, target.t[i] + reach), *axes.get_xlim()), atol=1e-9
        )
        is_cut_off = u[0] > axes.get_xlim()[0] + 1e-9 or u[-1] < axes.get_xlim()[1] - 1e-9
        assert bool(axes.patches) == is_cut_off
    places = np.unique(np.concatenate([places for places, _ in ticks(panel(shown, panels[0]))]).round(9))
    N = known.num_anchors if "heads" not in name else 24
    lattice = a + (b - a) * np.arange(N) / (N - 1)
    assert np.abs(places[:, None] - lattice).min(axis=0).max() < 1e-6


@pytest.mark.parametrize("name", ["clip", "clip of two", "clip of three", "clips", "clip, heads", "clips, heads"])
def test_the_truncated_functions_are_read_from_the_weights(name: str) -> None:
    clip, target = read_clip(network(name)), TARGETS[name.partition(",")[0]]
    assert clip is not None
    n, d = target.W.shape
    rows = clip.W.reshape(n, n, d)[np.arange(n), np.arange(n)]
    np.testing.assert_allclose(rows, target.W, atol=1e-9)
    assert np.count_nonzero(clip.W) == np.count_nonzero(target.W)
    np.testing.assert_allclose(clip.t, target.t, atol=1e-9)
    np.testing.assert_allclose((clip.a, clip.b), (target.a, target.b), atol=1e-12)


def test_a_single_truncation_is_named_in_full() -> None:
    assert "clip(2·x0 − x1 + 0.3, −1, 1)" in texts(picture("clip of two"))
    assert "clip(w·x + t, 0, 1)" in texts(picture("clips"))


def test_what_cannot_be_read_is_said_and_the_target_helps() -> None:
    single = attnc.TruncatedLinear([1.0] * 3)
    coarse = as_network(constructions.truncated_linear(single, num_anchors=2), single)
    assert read_clip(coarse) is None
    assert any("cannot be read from these weights: give target=" in text for text in texts(figure(coarse)))
    assert panel(figure(coarse, target=single), "target and network").get_xlabel() == "u = w·x + t"
    for name in ("plane", "relu", "two layers", "sequence of two"):
        assert read_clip(network(name)) is None


def test_a_target_may_take_points_or_the_networks_inputs() -> None:
    known = network("sequence of two")

    def flat(points):
        return np.stack([np.sin(2 * points[:, 0]), np.sin(2 * points).sum(axis=1)], axis=1)

    drawn = [
        np.asarray(panel(figure(known, target=target, output=1), "target").images[0].get_array())
        for target in (waves, flat, TARGETS["sequence of two"])
    ]
    np.testing.assert_allclose(drawn[0], drawn[1], atol=1e-12)
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert "target" in titles(figure(network("two inputs"), target=product))


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("plane", TARGETS["clip"], r"1 variable\(s\) and 1 output\(s\), the network 2 and 1"),
        ("sequence of two", lambda points: points[:, 0], "neither the network's inputs nor flat points"),
        ("plane", "x", "found a str"),
        ("line", lambda points: points[:, 0] * np.nan, "no finite value"),
        ("line", lambda points: np.zeros((len(points), 2)), "returned shape"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(name: str, target: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        figure(network(name), target=target)


def test_a_cut_goes_where_something_happens() -> None:
    """Through the middle, exp(sin(x)·y) + z·x is 1 along every axis."""
    shown = picture("deep of three")
    assert any("a cut along x at y = 0.5, z = 0.5" in text for text in texts(shown))
    x, drawn = curves(panel(shown, "target and network"))["network"]
    points = np.stack([x, np.full(len(x), 0.5), np.full(len(x), 0.5)], axis=1)
    np.testing.assert_array_equal(drawn, network("deep of three").at(points)[:, 0])
    assert np.ptp(drawn) > 1
