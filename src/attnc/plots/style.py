"""The style of all pictures: colours, the header, titles of panels, colour bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import MissingExtra
from attnc.numerics.arrays import Float
from attnc.wording import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from attnc.targets.box import Box

INK, GREY, FAINT = "#1b1f24", "#5b6470", "#d5dae0"
"""Colours of text, of secondary text and of grid lines."""
BLUE, ORANGE = "#0072b2", "#d55e00"  # from Okabe and Ito: distinct for every kind of colour vision
PALETTE = (BLUE, "#e69f00", "#009e73", "#cc79a7", "#56b4e9", ORANGE, "#5b6470", "#8a6d00", "#4b3b8f", "#7fbf3f")
VALUES, ERRORS, SIZES, WEIGHTS, MANY_COLOURS = "viridis", "RdBu_r", "Reds", "Blues", "turbo"
"""Colour maps of values, of errors with a sign, of their sizes, of attention weights, and of many heads or queries."""

HEADER, LINE = 0.78, 0.24
"""Height of the title with the line under it, and of every further line, in inches."""


def require_matplotlib() -> None:
    """Raise MissingExtra if matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra("pictures need", "matplotlib", "plots", error) from None


def new_figure(width: float, height: float, title: str, *lines: str) -> Figure:
    """Return an empty figure with its header. The panels get the space below."""
    require_matplotlib()
    from matplotlib.figure import Figure

    header = HEADER + LINE * (len(lines) - 1)
    height += header
    picture = Figure(figsize=(width, height), layout="constrained")
    engine = picture.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.008, 0.008, 0.984, 0.992 - header / height), hspace=0.04, wspace=0.04)  # type: ignore[call-arg]
    style: dict[str, Any] = {"ha": "left", "va": "baseline", "parse_math": False}
    picture.text(0.15 / width, 1 - 0.36 / height, title, fontsize=16, weight="bold", color=INK, **style)
    for i, line in enumerate(lines):
        colour = GREY if i == 0 else INK
        picture.text(0.15 / width, 1 - (0.62 + LINE * i) / height, line, fontsize=10.5, color=colour, **style)
    return picture


def add_header_legend(picture: Figure, line: int, handles: list[Any], labels: list[str]) -> None:
    """Draw the legend in place of a line of the header, counted from the one under the title."""
    width, height = picture.get_size_inches()
    place: dict[str, Any] = {"loc": "center left", "borderaxespad": 0, "borderpad": 0}
    place["bbox_to_anchor"] = (0.15 / width, 1 - (0.57 + LINE * (line - 1)) / height)
    picture.legend(handles, labels, frameon=False, fontsize=10, ncols=len(handles), **place)


def set_title(axes: Axes, name: str, note: str = "") -> None:
    """Write the title of a panel, and a note under it."""
    axes.set_title(name, loc="left", pad=22 if note else 7, fontsize=12.5, weight="bold", color=INK, parse_math=False)
    if note:
        place = (0, 1), (0, 7), "axes fraction", "offset points"
        text = axes.annotate(note, *place, ha="left", va="bottom", fontsize=9.5, color=GREY, parse_math=False)
        text.set_in_layout(False)  # a long note must not make the panel smaller


def set_plain(axes: Axes, grid: bool = True) -> None:
    """Style axes without a frame. Their vertical scale may be logarithmic."""
    is_log = axes.get_yscale() == "log"
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    axes.tick_params(which="both" if is_log else "major", colors=GREY, labelsize=9, length=3, color=FAINT)
    axes.locator_params(axis="x" if is_log else "both", nbins=7)
    _write_out(axes.xaxis, axes.yaxis)
    if grid:
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)


def set_plane(axes: Axes, box: Box) -> None:
    """Style a square panel over the two variables."""
    set_labels(axes, *box.names)
    axes.set_box_aspect(1)
    set_plain(axes, grid=False)


def set_labels(axes: Axes, x: str, y: str = "", colour: str = INK) -> None:
    """Name the axes. A user's text is not read as a formula. `colour` is the colour of the vertical axis."""
    axes.set_xlabel(one_line(x), color=INK, parse_math=False)
    axes.set_ylabel(one_line(y), color=colour, parse_math=False)


def add_legend_above(axes: Axes, columns: int, fontsize: int = 9) -> None:
    """Draw the legend above the panel, to the right of its title."""
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.1}
    axes.legend(frameon=False, fontsize=fontsize, ncols=columns, **place)


def draw_image(
    axes: Axes,
    values: np.ndarray,
    extent: tuple[float, float, float, float],
    cmap: str | None = None,
    ends: tuple[float, float] | None = None,
) -> Any:
    """Draw numbers between the ends of a colour scale, or colours, as squares. The first row is below."""
    lowest, highest = ends or (None, None)
    place: dict[str, Any] = {"origin": "lower", "extent": extent, "aspect": "auto", "interpolation": "nearest"}
    return axes.imshow(values, cmap=cmap, vmin=lowest, vmax=highest, **place)


def add_colorbar(axes: Axes, drawn: Any, label: str, width: float = 0.035, *, extend: str = "neither") -> Any:
    """Draw a colour bar as tall as the panel, whatever the panel's aspect. With extend="max" its end is an arrow."""
    bar = axes.figure.colorbar(drawn, cax=axes.inset_axes((1 + width, 0, width, 1)), extend=extend)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=GREY, labelsize=9, length=0)
    bar.set_label(label, color=GREY, fontsize=9.5)
    _write_out(bar.ax.yaxis)
    return bar


def _write_out(*axes: Axis) -> None:
    """Write very small and large numbers in full at every tick. A factor above the axis would run into the notes."""
    from matplotlib.ticker import ScalarFormatter

    class InFull(ScalarFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.7g}".replace("-", "−") if super().get_offset() else super().__call__(x, pos)

        def get_offset(self) -> str:
            return ""

    for axis in axes:
        if isinstance(axis.get_major_formatter(), ScalarFormatter):
            axis.set_major_formatter(InFull())


def distinct_colours(count: int) -> Float[np.ndarray, "count rgb"]:
    """Return colours for heads, queries or outputs, from the palette if it has enough."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    if count <= len(PALETTE):
        return np.array([to_rgb(colour) for colour in PALETTE[:count]])
    return np.asarray(colormaps[MANY_COLOURS](np.linspace(0.03, 0.97, count))[:, :3])


def limits(values: Float[np.ndarray, "*shape"]) -> tuple[float, float]:
    """Return the ends of a colour scale, which are never the same number."""
    lowest, highest = float(np.nanmin(values)), float(np.nanmax(values))
    if highest - lowest <= 1e-12 * max(abs(lowest), abs(highest)):
        pad = abs(lowest) or 1.0
        return lowest - pad, highest + pad
    return lowest, highest


def number(value: float) -> str:
    return f"{value + 0.0:.5g}".replace("-", "−")
