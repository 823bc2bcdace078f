"""Maps, cells and heads over two variables."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.network import Network
from attnc.plots import figure
from attnc.plots.cells import WinningCells, pixels, square_tiles
from attnc.plots.selectors import read_selectors
from plots.pictures import TARGETS, image, network, panel, picture, texts, titles


def cells_of(found: Network, stage: int = -1, output: int = 0) -> WinningCells:
    form = found._engine.form
    return WinningCells(form, read_selectors(form, stage % len(form.stages), output))


def inputs_of(found: Network, points: np.ndarray) -> list[np.ndarray]:
    shapes = found.program.input_shapes
    parts = np.split(points, np.cumsum([np.prod(shape) for shape in shapes])[:-1].astype(int), axis=1)
    return [part.reshape(len(points), *shape) for part, shape in zip(parts, shapes, strict=True)]


def test_panels() -> None:
    assert titles(picture("plane")) == ["target", "network", "error", "partition"]
    assert titles(picture("cross")) == ["target", "network", "error", "partition"]
    assert titles(picture("clip of two, heads")) == ["target", "network", "error", "partition", "heads, layer clip"]
    assert titles(picture("relu of two")) == ["target", "network", "error", "keys of each query, layer relu0"]
    assert titles(picture("two layers, heads"))[-2:] == ["partition", "heads, layer steps"]
    named = [axes for axes in picture("plane").axes if axes.get_title("left")]
    assert {axes.get_xlabel() for axes in named} == {"x"}
    assert {axes.get_ylabel() for axes in named} == {"y"}


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
    values = known(*inputs_of(known, points)).reshape(len(points), -1)[:, 0]
    np.testing.assert_array_equal(drawn.ravel(), values)
    x, y = points.T
    functions = {"plane": np.sin(x) + np.cos(y), "cross": np.sin(x) * np.cos(y)}
    functions["two layers of two"] = functions["plane"]
    true = functions[name] if name in functions else TARGETS[name.partition(",")[0]](points)[:, 0]
    np.testing.assert_allclose(target.ravel(), true, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(error, drawn - target)
    assert known.certificate.bound is not None
    assert np.abs(error).max() <= known.certificate.bound


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("plane", "select.head0.pattern"),
        ("cross", "select.head0.pattern"),
        ("adaptive", "select.head0.pattern"),
        ("two inputs", "select.head0.pattern"),
        ("sequence of two", "select.head0.pattern"),
        ("two layers of two", "select.head0.pattern"),
        ("softmax of two", None),
    ],
)
def test_cells_are_the_largest_weight_and_have_the_networks_values(name: str, pattern: str | None) -> None:
    known, cells = network(name), cells_of(network(name))
    points = pixels(known.box.lo, known.box.hi, 40)
    won, _ = cells.at(points, square_tiles(40))
    cache = known.run(*inputs_of(known, points), cache=True).cache
    if pattern is None:
        weights = np.stack([cache[f"select.cell.{v}"][:, 0] for v in range(25)], axis=1)
    else:
        weights = cache[pattern][:, 0]
    is_clear = weights.max(axis=1) > 0.6  # at a border, rounding decides
    assert is_clear.mean() > 0.9
    np.testing.assert_array_equal(won[is_clear], weights.argmax(axis=1)[is_clear])
    assert cells.outputs is not None
    returned = known(*inputs_of(known, points)).reshape(len(points), -1)[:, 0]
    is_sure = weights.max(axis=1) > 1 - 1e-6
    assert is_sure.mean() > 0.5
    np.testing.assert_allclose(returned[is_sure], cells.outputs[won[is_sure]], atol=1e-4)


def test_the_head_that_speaks_is_the_one_whose_block_holds_the_input() -> None:
    known, cells = network("clip of two, heads"), cells_of(network("clip of two, heads"))
    points = pixels(known.box.lo, known.box.hi, 60)
    won, speakers = cells.at(points, square_tiles(60))
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


def test_scattered_and_constant() -> None:
    flat = attnc.compile("0*x+0*y+2", {"x": (-3, 3), "y": (-3, 3)}, 0.5, construction="max_affine")
    assert titles(figure(flat)) == ["target", "network", "error", "partition"]
    affine = attnc.compile("0*x+0*y+2", {"x": (-3, 3), "y": (-3, 3)}, 0.5)
    assert titles(figure(affine)) == ["target", "network", "error"]  # there is no attention in it

    def bowl(points):
        return (points**2).sum(axis=1)

    plane = attnc.compile(bowl, box=[(-1, 1)] * 2, eps=0.5, lipschitz=3.0)
    assert titles(figure(plane)) == ["network", "partition"]
    assert titles(figure(plane, target=bowl)) == ["target", "network", "error", "partition"]
    assert cells_of(plane).lattice() is not None
    assert cells_of(network("two layers of two")).lattice() is None
    assert cells_of(network("adaptive")).lattice() is None
