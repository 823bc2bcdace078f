"""Networks of every kind, their pictures, and what is read off a picture. Nothing here may be changed by a test."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

import attnc
from attnc import constructions
from attnc.constructions.built import Built
from attnc.network import Network
from attnc.plots import figure
from attnc.proofs.certificate import Certificate
from attnc.targets.target import Target

BOX = {"x": (-3, 3), "y": (-3, 3)}
RNG = np.random.default_rng(1)
W1, W2, B1, B2 = (RNG.normal(size=shape) for shape in ((8, 2), (1, 8), (8,), (1,)))
DEEP = [RNG.normal(size=shape) for shape in ((5, 3), (4, 5), (2, 4), (5,), (4,), (2,))]


def waves(X: np.ndarray) -> np.ndarray:
    return np.cumsum(np.sin(2 * X), axis=1)


def product(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    return X * Y.mean(axis=1, keepdims=True)


TARGETS: dict[str, Target] = {
    "clip": attnc.TruncatedLinear([2.0], 0.3, -1, 1, (-1, 1)),
    "clip of two": attnc.TruncatedLinear([2.0, -1.0], 0.3, -1, 1, (-1, 1)),
    "clip of three": attnc.TruncatedLinear([2.0, -1.0, 0.5], 0.3, -1, 1, (-1, 1)),
    "clips": attnc.TruncatedLinear([[1.0, 0.5], [-0.6, 0.1], [0.2, 0.0]], [0.5, 0.3, 0.2], 0, 1, (-1, 1)),
    "relu": attnc.ReLUNetwork([W1[:, :1], W2], [B1, B2], (-2, 2)),
    "relu of two": attnc.ReLUNetwork([W1, W2], [B1, B2], (-2, 2)),
    "relu of three": attnc.ReLUNetwork(DEEP[:3], DEEP[3:], (-1, 1)),
    "small relu": attnc.ReLUNetwork(
        [[[1.0, 0.5], [-0.7, 0.3], [0.2, 0.9]], [[1.0, -1.0, 0.1]]], [[0.1, 0.2, 0.3], [0.0]], (-1, 1)
    ),
    "table": attnc.TableTarget(np.linspace(0, 3, 9)[:, None], np.sin(np.linspace(0, 3, 9))),
    "scattered table": attnc.TableTarget([[0, 0], [1, 0.2], [0.3, 1], [0.8, 0.7]], [0, 1, 2, 3]),
    "sequence of two": attnc.SequenceTarget(waves, 2, 1, (-1, 1), lipschitz=4.0),
    "sequence of three": attnc.SequenceTarget(waves, 3, 1, (-1, 1), lipschitz=5.0),
    "two inputs": attnc.SequenceTarget(product, (1, 1), (1, 1), (-1, 1), lipschitz=2.0),
}

EPS = {"relu": 0.1, "relu of two": 0.3, "relu of three": 0.5, "small relu": 0.1, "table": 1e-3, "scattered table": 1e-3}
EPS |= {"sequence of two": 0.6, "sequence of three": 1.5, "two inputs": 0.3}


def as_network(built: Built, target: Target) -> Network:
    bound = built.bound
    assert bound is not None
    claim = Certificate(bound.value, None, bound.terms, (), str(built.program.dtype), "theorem")
    return Network(built.program, claim, target.box, built.construction, target.text)


def expression(text: str, box: dict[str, tuple[float, float]]) -> Target:
    return attnc.as_target(text, box, None)


@cache
def network(name: str) -> Network:
    line, plane = {"x": (-2, 2)}, BOX
    compiled: dict[str, Any] = {
        "line": lambda: _cells("x*sin(3*x)", line, 0.3),
        "fine line": lambda: _cells("x*sin(3*x)", line, 0.01),
        "float32 line": lambda: _cells("x*sin(3*x)", line, 0.3, "float32"),
        "plane": lambda: _cells("sin(x)+cos(y)", plane, 0.5),
        "fine plane": lambda: _cells("sin(x)+cos(y)", plane, 0.1),
        "cross": lambda: attnc.compile("sin(x)*cos(y)", box=plane, eps=0.5, construction="max_affine_cross"),
        "adaptive": lambda: attnc.compile("exp(-2*(x**2+y**2))", box=plane, eps=0.2, centres="adaptive"),
        "space": lambda: _cells("x*y+sin(z)", dict.fromkeys("xyz", (-1, 1)), 0.4),
        "graded": lambda: attnc.compile("sqrt(x)", {"x": (0, 1)}, 1e-3, construction="graded"),
        "spectral line": lambda: attnc.compile("sin(3*x)", line, 1e-6, construction="spectral_grid"),
        "binomial": lambda: attnc.compile("sin(3*x)", line, 1e-3, construction="binomial"),
        "all numbers": lambda: attnc.compile("gelu(x)", {"x": (-np.inf, np.inf)}, 1e-3),
        "spectral plane": lambda: attnc.compile("exp(sin(x)*y)", plane, 1e-2, construction="spectral_grid"),
        "sum": lambda: attnc.compile("sin(x)+cos(y)", plane, 1e-6),
        "deep": lambda: attnc.compile("exp(sin(x)*y)", plane, 1e-3, construction="compose"),
        "deep of three": lambda: attnc.compile("exp(sin(x)*y)+z*x", dict.fromkeys("xyz", (-1, 1)), 1e-3),
        "two layers": lambda: _grid(constructions.two_layer, "x*sin(3*x)", line, 9),
        "two layers of two": lambda: _grid(constructions.two_layer, "sin(x)+cos(y)", plane, 5),
        "two layers, heads": lambda: _grid(constructions.two_layer, "sin(x)+cos(y)", plane, 4, heads=3),
        "softmax": lambda: _grid(constructions.attention_softmax, "x*sin(3*x)", line, 9),
        "softmax of two": lambda: _grid(constructions.attention_softmax, "sin(x)+cos(y)", plane, 5),
    }
    if name in EPS:
        return attnc.compile(TARGETS[name], eps=EPS[name])
    if name in compiled:
        return compiled[name]()
    kind, _, heads = name.partition(", ")
    target = TARGETS[kind]
    if not heads:
        return as_network(constructions.truncated_linear(target, num_anchors=9), target)
    return as_network(constructions.truncated_linear_heads(target, num_heads=4, num_tokens=8), target)


def _cells(text: str, box: dict[str, tuple[float, float]], eps: float, dtype: str = "float64") -> Network:
    return attnc.compile(text, box, eps, dtype=dtype, construction="max_affine")


def _grid(construction: Any, text: str, box: dict[str, tuple[float, float]], count: int, **options: Any) -> Network:
    target = expression(text, box)
    return as_network(construction(target, points_per_axis=count, **options), target)


@cache
def picture(name: str) -> Figure:
    """Return the picture of a network, with its target if that cannot be read from the network."""
    needs_target = name.startswith(("relu", "sequence", "two inputs"))
    return figure(network(name), TARGETS[name] if needs_target else None)


def titles(drawn: Figure) -> list[str]:
    return [axes.get_title("left") for axes in drawn.axes if axes.get_title("left")]


def panel(drawn: Figure, title: str) -> Axes:
    return next(axes for axes in drawn.axes if axes.get_title("left") == title)


def texts(drawn: Figure) -> list[str]:
    return [text.get_text() for text in drawn.findobj(Text) if text.get_text()]


def curves(axes: Axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Labelled lines."""
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }


def ticks(axes: Axes) -> list[tuple[np.ndarray, Any]]:
    """(places, colour) of the anchors that are drawn as ticks."""
    return [(np.asarray(line.get_xdata()), line.get_color()) for line in axes.lines if line.get_marker() == "|"]


def image(axes: Axes, number: int = 0) -> np.ndarray:
    return np.asarray(axes.images[number].get_array())


def require_readable(shown: Figure, monkeypatch: Any, least_texts: int = 20) -> None:
    """No text lies on another or leaves the page."""
    FigureCanvasAgg(shown)
    shown.draw_without_rendering()  # the layout settles
    drawn: dict[int, tuple[str, Any]] = {}
    draw = Text.draw

    def recording(self: Text, renderer: Any) -> Any:
        if self.get_visible() and self.get_text().strip():
            drawn[id(self)] = (self.get_text(), Text.get_window_extent(self, renderer))
        return draw(self, renderer)

    monkeypatch.setattr(Text, "draw", recording)
    shown.draw_without_rendering()
    boxes = list(drawn.values())
    assert len(boxes) > least_texts
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width < 1 or height < 1, (one, other)
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= shown.bbox.x1, text
        assert box.y0 >= 0, text
        assert box.y1 <= shown.bbox.y1, text
