"""Maps, cells and heads over two variables."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.ir.program import split_columns
from attnc.plots import figure
from attnc.plots.selectors import last_layer, pixels
from plots.pictures import BOX, TARGETS, image, network, panel, picture, texts, titles

MAPS, CURVES = ["target", "network", "error"], ["target and network", "error"]


@pytest.mark.parametrize(
    ("name", "panels"),
    [
        ("plane", [*MAPS, "partition"]),
        ("cross", [*MAPS, "partition"]),
        ("spectral plane", [*MAPS, "partition"]),
        ("clip of two, heads", [*MAPS, "partition", "heads, layer clip"]),
        ("two layers, heads", [*MAPS, "partition", "heads, layer steps"]),
        ("relu of two", [*MAPS, "keys of each query, layer relu0"]),
        ("sum", [*MAPS, "keys of each head, layer attend1"]),
        ("deep", [*MAPS, "keys of each head, layer attend2"]),
        ("line", [*CURVES, "attention weights"]),
        ("fine line", [*CURVES, "attention weights, zoomed"]),
        ("two layers", [*CURVES, "attention weights, layer steps", "attention weights, layer select"]),
        ("softmax", [*CURVES, "attention weights, layer steps", "softmax weights, layer select"]),
    ],
)
def test_panels(name: str, panels: list[str]) -> None:
    assert titles(picture(name)) == panels


def test_the_axes_of_maps_are_named() -> None:
    named = [axes for axes in picture("plane").axes if axes.get_title("left")]
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in named} == {("x", "y")}


def test_bound_and_observed_error_are_two_figures() -> None:
    shown = " ".join(texts(picture("plane")))
    claim = network("plane").certificate
    assert f"observed {claim.observed:.3g} (sampled)" in shown
    assert "(proven)" in shown


PLANES = ["plane", "cross", "two inputs", "sequence of two", "relu of two", "two layers of two", "clip of two, heads"]


@pytest.mark.parametrize("name", PLANES)
def test_panels_show_the_function_and_the_network(name: str) -> None:
    known = network(name)
    target, drawn, error = (image(panel(picture(name), title)) for title in ("target", "network", "error"))
    side = len(target)
    points = pixels(known.box.lo, known.box.hi, side)
    np.testing.assert_array_equal(drawn.ravel(), known.at(points)[:, 0])
    x, y = points.T
    functions = {"plane": np.sin(x) + np.cos(y), "cross": np.sin(x) * np.cos(y)}
    functions["two layers of two"] = functions["plane"]
    true = functions[name] if name in functions else TARGETS[name.partition(",")[0]](points)[:, 0]
    np.testing.assert_allclose(target.ravel(), true, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(error, drawn - target)
    assert known.certificate.bound is not None
    assert np.abs(error).max() <= known.certificate.bound


@pytest.mark.parametrize(
    "name", ["plane", "cross", "adaptive", "two inputs", "sequence of two", "two layers of two", "softmax of two"]
)
def test_cells_are_the_largest_weight_and_have_the_networks_values(name: str) -> None:
    known, cells = network(name), last_layer(network(name)._engine.form, 0)
    points = pixels(known.box.lo, known.box.hi, 40)
    won = cells.cells_at(points, 40)
    cache = known.run(*split_columns(points, known.program.input_shapes), cache=True).cache
    if name == "softmax of two":
        weights = np.stack([cache[f"select.cell.{v}"][:, 0] for v in range(25)], axis=1)
    else:
        weights = cache["select.head0.pattern"][:, 0]
    is_clear = weights.max(axis=1) > 0.6  # at a border, rounding decides
    assert is_clear.mean() > 0.9
    np.testing.assert_array_equal(won[is_clear], weights.argmax(axis=1)[is_clear])
    assert cells.outputs is not None
    returned = known.at(points)[:, 0]
    is_sure = weights.max(axis=1) > 1 - 1e-6
    assert is_sure.mean() > 0.5
    np.testing.assert_allclose(returned[is_sure], cells.outputs[won[is_sure]], atol=1e-4)


def test_the_head_that_speaks_is_the_one_whose_block_holds_the_input() -> None:
    known = network("clip of two, heads")
    cells = last_layer(known._engine.form, 0)
    points = pixels(known.box.lo, known.box.hi, 60)
    won, speakers = cells.winners_at(points, 60)
    u = points @ [2.0, -1.0] + 0.3
    place = (np.clip(u, -1, 1) + 1) / 2 * 23  # in units of anchors 0 … 23, six a head
    block = np.clip(np.round(place), 0, 23) // 6
    is_clear = np.abs(place % 6 - 5.5) > 0.1
    np.testing.assert_array_equal(speakers[is_clear], block[is_clear])
    assert cells.outputs is not None
    np.testing.assert_allclose(cells.outputs[won], np.clip(u, -1, 1), atol=2 / 23)
    axes = panel(picture("clip of two, heads"), "heads, layer clip")
    (bar,) = axes.child_axes
    assert [label.get_text() for label in bar.get_yticklabels()] == [f"head {h}" for h in range(4)]
    assert len(np.unique(image(axes).reshape(-1, 3), axis=0)) == 8  # four colours, and each on a border


def test_a_fine_partition_is_zoomed_and_says_so() -> None:
    shown = picture("fine plane")
    assert titles(shown)[-1] == "partition, zoomed"
    assert any("24 × 24 of" in text for text in texts(shown))
    left, right = panel(shown, "partition, zoomed").get_xlim()
    assert right - left < 6 * 0.5
    assert len(panel(shown, "network").patches) == 2  # the frame of the window


def test_level_lines_of_a_relu_network_are_those_of_its_units() -> None:
    axes = panel(picture("relu of two"), "keys of each query, layer relu0")
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert [name.partition(" (")[0] for name in names] == [f"query {q}" for q in range(8)]
    weights, biases = TARGETS["relu of two"].weights[0], TARGETS["relu of two"].biases[0]
    busy = [q for q, name in enumerate(names) if "idle" not in name]
    drawn = [lines for lines in axes.collections if lines.get_paths()]
    assert len(drawn) == len(busy)
    for q, lines in zip(busy, drawn, strict=True):
        for path in lines.get_paths():
            unit = path.vertices @ weights[q] + biases[q]
            # Along one line between cells of its keys, the unit does not change by more than a pixel's worth.
            assert np.ptp(unit) < 2 * 4 / 119 * np.abs(weights[q]).sum() or len(unit) == 0


def test_constant_functions() -> None:
    flat = attnc.compile("0*x+0*y+2", BOX, 0.5, construction="max_affine")
    assert titles(figure(flat)) == [*MAPS, "partition"]
    affine = attnc.compile("0*x+0*y+2", BOX, 0.5)
    assert titles(figure(affine)) == MAPS  # there is no attention in it


@pytest.mark.parametrize(
    ("variables", "known", "attention"), [(1, CURVES, "attention weights"), (2, MAPS, "partition")]
)
def test_without_a_known_function_the_network_is_drawn(variables: int, known: list[str], attention: str) -> None:
    def bowl(points):
        return (points**2).sum(axis=1)

    made = attnc.compile(bowl, box=[(-1, 1)] * variables, eps=0.5, lipschitz=variables + 1.0)
    assert titles(figure(made)) == ["network", attention]
    assert titles(figure(made, target=bowl)) == [*known, attention]
    assert last_layer(made._engine.form, 0).lattice() is not None


def test_scattered_keys_form_no_lattice() -> None:
    for name in ("two layers of two", "adaptive"):
        assert last_layer(network(name)._engine.form, 0).lattice() is None


@pytest.mark.parametrize("name", ["spectral plane", "sum", "deep"])
def test_maps_show_the_network_within_its_bound(name: str) -> None:
    known, shown = network(name), picture(name)
    error = image(panel(shown, "error"))
    assert known.certificate.bound is not None
    assert 0.1 * known.certificate.bound < np.abs(error).max() <= known.certificate.bound
    assert panel(shown, "error").images[0].get_clim()[1] == pytest.approx(known.certificate.bound)


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
