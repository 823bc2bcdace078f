"""Pictures of what auto chooses: soft heads, heads that compute a function each, deep programs, infinite ranges."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from plots.pictures import curves, image, network, panel, picture, texts, ticks, titles

FUNCTIONS = {
    "graded": np.sqrt,
    "spectral line": lambda x: np.sin(3 * x),
    "binomial": lambda x: np.sin(3 * x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_curves_error_and_bound(name: str) -> None:
    known, shown = network(name), picture(name)
    lines = curves(panel(shown, "target and network"))
    x, drawn = lines["network"]
    np.testing.assert_array_equal(drawn, known(x[:, None]))
    np.testing.assert_allclose(lines["target"][1], FUNCTIONS[name](x), rtol=0, atol=1e-12)
    bound = known.certificate.bound
    assert bound is not None
    levels = [float(line.get_ydata()[0]) for line in panel(shown, "error").lines if len(line.get_ydata()) == 2]
    assert levels == [0, bound, -bound]
    assert np.abs(drawn - lines["target"][1]).max() <= bound


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
    np.testing.assert_array_equal(drawn, network("all numbers")(x[:, None]))
    assert any("drawn from −8 to 8, a part of x ∈ [-inf, inf]" in text for text in texts(shown))


@pytest.mark.parametrize("name", ["spectral plane", "sum", "deep"])
def test_maps_show_the_network_within_its_bound(name: str) -> None:
    known, shown = network(name), picture(name)
    error = image(panel(shown, "error"))
    assert known.certificate.bound is not None
    assert 0.1 * known.certificate.bound < np.abs(error).max() <= known.certificate.bound
    assert panel(shown, "error").images[0].get_clim()[1] == pytest.approx(known.certificate.bound)


def test_panels() -> None:
    maps = ["target", "network", "error"]
    assert titles(picture("spectral plane")) == [*maps, "partition"]
    assert titles(picture("sum")) == [*maps, "keys of each head, layer attend1"]
    assert titles(picture("deep")) == [*maps, "keys of each head, layer attend2"]


def test_heads_of_a_sum_have_lines_across_their_own_variable() -> None:
    """sin(x) is a head that reads x alone: its lines are vertical; those of cos(y) are horizontal."""
    axes = panel(picture("sum"), "keys of each head, layer attend1")
    directions = set()
    for drawn in axes.collections:
        lines = [path.vertices for path in drawn.get_paths() if len(path.vertices) > 1]
        assert lines
        directions.add(tuple(bool(moves) for moves in np.ptp(lines[0], axis=0) > 1e-6))
    assert directions == {(True, False), (False, True)}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["head 0", "head 1"]


def test_a_cut_goes_where_something_happens() -> None:
    """Through the middle, exp(sin(x)·y) + z·x is 1 along every axis."""
    shown = picture("deep of three")
    assert any("a cut along x at y = 0.5, z = 0.5" in text for text in texts(shown))
    x, drawn = curves(panel(shown, "target and network"))["network"]
    points = np.stack([x, np.full(len(x), 0.5), np.full(len(x), 0.5)], axis=1)
    np.testing.assert_array_equal(drawn, network("deep of three")(points))
    assert np.ptp(drawn) > 1
