"""Curves, errors and weights along the only variable."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import StepPatch

import attnc
from attnc.errors import InputError
from attnc.plots import figure
from plots.pictures import TARGETS, curves, image, network, panel, picture, texts, ticks

FUNCTIONS = {"graded": np.sqrt, "spectral line": lambda x: np.sin(3 * x), "binomial": lambda x: np.sin(3 * x)}
BY_THEOREM = ("clip", "clip, heads", "two layers", "softmax")
"""Networks that were built by a theorem, and whose bound was not proved from the weights."""
ONE_VARIABLE = ["line", "fine line", "float32 line", "clip", "clip, heads", "relu", "two layers", "softmax", *FUNCTIONS]


@pytest.mark.parametrize("name", ONE_VARIABLE)
def test_curves_are_the_target_and_the_network(name: str) -> None:
    shown = curves(panel(picture(name), "target and network"))
    x, drawn = shown["network"]
    np.testing.assert_array_equal(drawn, network(name).at(x[:, None]).ravel())
    known = TARGETS.get(name.partition(",")[0])
    true = FUNCTIONS.get(name, lambda x: x * np.sin(3 * x))(x) if known is None else known(x[:, None])[:, 0]
    np.testing.assert_allclose(shown["target"][1], true, rtol=0, atol=1e-9 if known else 1e-12)


@pytest.mark.parametrize("name", ONE_VARIABLE)
def test_the_error_has_the_bound_on_both_sides(name: str) -> None:
    axes = panel(picture(name), "error")
    bound = network(name).certificate.bound
    assert bound is not None
    levels = [float(line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata()) == 2]
    assert levels == [0, bound, -bound]
    drawn = [np.asarray(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 2]
    drawn += [path.vertices[:, 1] for band in axes.collections for path in band.get_paths()]
    assert 0.1 * bound < np.abs(drawn[0]).max() <= bound
    word = "stated by a theorem" if name in BY_THEOREM else "proven"
    assert any(f"({word})" in text for text in texts(picture(name)))


@pytest.mark.parametrize("name", ["line", "float32 line"])
def test_ticks_are_the_anchors(name: str) -> None:
    ((places, _),) = ticks(panel(picture(name), "target and network"))
    count = network(name).num_anchors
    np.testing.assert_allclose(places, -2 + 4 * (np.arange(count) + 0.5) / count, atol=1e-6)


def test_ticks_of_heads_have_their_colours() -> None:
    """6 own anchors each, on the lattice of all 24; the outer sentinels of the first and last carry the ends."""
    found = ticks(panel(picture("clip, heads"), "target and network"))
    lattice = ((-1 + 2 * np.arange(24) / 23) - 0.3) / 2  # where 2x + 0.3 is an anchor
    step = lattice[1] - lattice[0]
    wanted = [lattice[6 * h : 6 * h + 6] for h in range(4)]
    wanted[0] = np.concatenate([[lattice[0] - step], wanted[0]])
    wanted[3] = np.concatenate([wanted[3], [lattice[-1] + step]])
    for (places, _), anchors in zip(found, wanted, strict=True):
        np.testing.assert_allclose(places, anchors, atol=1e-9)
    assert len({tuple(to_rgb(colour)) for _, colour in found}) == 4


def test_every_head_has_a_band_of_its_own() -> None:
    axes = panel(picture("clip, heads"), "attention weights")
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"head {h}" for h in range(4)]
    assert len(axes.images) == 4
    x = np.linspace(-1, 1, image(axes).shape[1])
    cache = network("clip, heads").run(x[:, None], cache=True).cache
    for h in range(4):
        pattern = cache[f"clip.head{h}.pattern"][:, 0].T
        np.testing.assert_allclose(image(axes, h), pattern[pattern.max(axis=1) > 1e-3], atol=1e-9)
    (strip,) = (child for child in axes.child_axes if len(child.patches) == 4)
    colours = [to_rgb(colour) for _, colour in ticks(panel(picture("clip, heads"), "target and network"))]
    assert [to_rgb(patch.get_facecolor()) for patch in strip.patches] == colours


def test_every_unit_of_a_relu_network_has_a_band() -> None:
    axes = panel(picture("relu"), "attention weights")
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"query {q}" for q in range(8)]
    x = np.linspace(-2, 2, image(axes).shape[1])
    pattern = network("relu").run(x[:, None], cache=True).cache["relu0.head0.pattern"]
    for q in range(8):
        shown, whole = image(axes, q), pattern[:, q].T
        used = whole[whole.max(axis=1) > 1e-3]
        order = np.argsort(used.argmax(axis=1), kind="stable")
        np.testing.assert_allclose(np.sort(shown.max(axis=1)), np.sort(used.max(axis=1)), atol=1e-9)
        np.testing.assert_allclose(shown.sum(axis=0), used[order].sum(axis=0), atol=1e-9)


@pytest.mark.parametrize(
    ("name", "panel_name", "patterns"),
    [
        ("line", "attention weights", "select.head0.pattern"),
        ("float32 line", "attention weights", "select.head0.pattern"),
        ("clip", "attention weights", "clip.head0.pattern"),
        ("two layers", "attention weights, layer select", "select.head0.pattern"),
        ("softmax", "softmax weights, layer select", "select.cell."),
    ],
)
def test_weights_are_those_of_the_network(name: str, panel_name: str, patterns: str) -> None:
    known, shown = network(name), image(panel(picture(name), panel_name))
    x = np.linspace(known.box.lo[0], known.box.hi[0], shown.shape[1])
    cache = known.run(x[:, None], cache=True).cache
    pattern = (
        cache[patterns][:, 0].T if patterns in cache else np.stack([cache[f"{patterns}{v}"][:, 0] for v in range(9)])
    )
    np.testing.assert_allclose(shown, pattern, atol=1e-6 if known.dtype == "float64" else 0.02)
    np.testing.assert_allclose(shown.sum(axis=0), 1, atol=1e-9)


def test_one_of_several_outputs() -> None:
    two = attnc.compile("(x, 5+cos(x))", box={"x": (0, 1)}, eps=0.3)
    shown = figure(two, output=1)
    assert curves(panel(shown, "target and network"))["network"][1].min() > 5
    assert any("out[1] of 2" in text for text in texts(shown))
    with pytest.raises(InputError, match="there is no output 2: the network has 2 outputs, from 0 on"):
        figure(two, output=2)


def test_a_norm_that_is_not_the_largest_error_is_named_and_no_line_is_drawn() -> None:
    claim = dataclasses.replace(network("line").certificate, norm="2")
    shown = figure(dataclasses.replace(network("line"), certificate=claim))
    assert any(text.startswith("L2 norm: bound ") for text in texts(shown))
    assert not any("+ bound" in text for text in texts(shown))
    assert not any("norm" in text for text in texts(picture("line")))


def test_a_target_with_gaps_is_drawn_where_it_is_known() -> None:
    def root(points):
        with np.errstate(invalid="ignore"):
            return np.sqrt(points[:, 0])

    for name in ("line", "fine line"):
        shown = figure(network(name), target=root)
        _, drawn = curves(panel(shown, "target and network"))["target"]
        assert 0.4 < np.isnan(drawn).mean() < 0.6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_band_is_what_was_proved_cell_by_cell(name: str) -> None:
    """It holds the error everywhere, and reaches the bound somewhere."""
    known, axes = network(name), panel(picture(name), "error")
    claim = known.certificate
    (band,) = (patch for patch in axes.patches if isinstance(patch, StepPatch))
    vertices = band.get_path().vertices
    assert vertices[:, 1].max() == -vertices[:, 1].min() == max(claim.leaf_bounds) == claim.bound
    error = next(line for line in axes.lines if len(line.get_ydata()) > 2)
    lo, hi = (ends[:, 0] for ends in claim.cells(known.box))
    for a, b, most in zip(lo, hi, claim.leaf_bounds, strict=True):
        x, found = np.asarray(error.get_xdata()), np.abs(error.get_ydata())
        assert found[(x >= a) & (x <= b)].max(initial=0.0) <= most
        assert ((np.abs(vertices - (a, most)) < 1e-12).all(axis=1)).any()


def test_graded_anchors_are_close_where_the_function_is_steep() -> None:
    ((places, _),) = ticks(panel(picture("graded"), "target and network"))
    assert 3 <= len(places) <= network("graded").num_anchors
    assert np.diff(places)[0] < np.diff(places)[-1] / 3


def test_an_infinite_range_is_drawn_in_part_and_says_so() -> None:
    shown = picture("all numbers")
    x, drawn = curves(panel(shown, "target and network"))["network"]
    assert (x[0], x[-1]) == (-8, 8)
    np.testing.assert_array_equal(drawn, network("all numbers").at(x[:, None])[:, 0])
    assert any("drawn from −8 to 8, a part of x ∈ [-inf, inf]" in text for text in texts(shown))
