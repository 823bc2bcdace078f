"""Elements of figures: panels, colours, measured points, theory as a dashed line, and the SVG of a figure."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import attnc
from attnc_lab.experiment import Interval, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.image import AxesImage

INK, GREY, FAINT = "#1b1f24", "#5b6470", "#d5dae0"
BLUE, YELLOW, GREEN, PURPLE, SKY, ORANGE = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
"""The colours of Okabe and Ito, which are distinct for every kind of colour vision."""
PALETTE = (BLUE, YELLOW, GREEN, PURPLE, SKY, ORANGE)
MARKERS = "os^Dv*PX<>"


@dataclass(frozen=True)
class Panel:
    """One panel of a figure. `axes` are matplotlib's."""

    axes: Axes

    def label(self, title: str, x: str, y: str, *, log: str = "") -> None:
        """Set the texts and the style of the panel. `log` names the logarithmic axes: "x", "y" or "xy"."""
        axes = self.axes
        axes.set_title(title, loc="left", fontsize=11, weight="bold", color=INK)
        axes.set_xlabel(x, color=INK, fontsize=10)
        axes.set_ylabel(y, color=INK, fontsize=10)
        axes.set(**{f"{axis}scale": "log" for axis in log})
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GREY)
        axes.tick_params(colors=GREY, labelsize=9, length=3)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)

    def whole_ticks(self, places: Any) -> None:
        """Write numbers in full at these places of a logarithmic x axis, and no numbers between."""
        self.axes.xaxis.minorticks_off()
        self.axes.set_xticks(list(places), labels=[f"{place:,.6g}" for place in places])

    def theory(self, x: Any, y: Any, name: str, colour: str = INK, style: str = "--") -> None:
        """Draw a prediction as a line."""
        self.axes.plot(x, y, style, color=colour, linewidth=1.3, label=name, zorder=1.5)

    def law(self, rows: Table, x: str, y: str, name: str, colour: str = INK, style: str = "--") -> None:
        """Draw a column of predictions as a line over another column."""
        self.theory(rows.column(x), rows.column(y), name, colour, style)

    def line(self, rows: Table, x: str, y: str, name: str | None, colour: str, **style: Any) -> None:
        """Draw one column of a table against another as a line."""
        self.axes.plot(rows.column(x), rows.column(y), color=colour, label=name, **{"lw": 1.5, **style})

    def measured(
        self, x: Any, y: Any, name: str, colour: str, marker: str = "o", size: float = 5, *, is_open: bool = False
    ) -> None:
        """Draw measured values as points. Open points are proven bounds."""
        edge = {"markeredgecolor": colour, "markerfacecolor": "none"} if is_open else {"markeredgecolor": "white"}
        style: dict[str, Any] = {"linestyle": "none", "markersize": size, "markeredgewidth": 0.5, "zorder": 2.5} | edge
        self.axes.plot(np.asarray(x, float), np.asarray(y, float), marker=marker, color=colour, label=name, **style)

    def points(self, rows: Table, x: str, y: str, name: str, colour: str, marker: str = "o", **style: Any) -> None:
        """Draw one column of a table against another as points, in the style of `measured`."""
        self.measured(rows.column(x), rows.column(y), name, colour, marker, **style)

    def seeds(self, rows: Table, x: str, y: str, name: str, colour: str, marker: str = "o", *, size: float = 5) -> None:
        """Draw the geometric mean over seeds at every x, with its 95 % interval as a vertical bar."""
        places = sorted(rows.distinct(x))
        found = [Interval.of(rows.where(**{x: place}).column(y)) for place in places]
        self.measured(places, [each.mean for each in found], name, colour, marker, size)
        low, high = ([getattr(each, end) for each in found] for end in ("low", "high"))
        self.axes.vlines(places, low, high, color=colour, linewidth=1.1, alpha=0.7)

    def image(self, values: Any, extent: tuple[float, float, float, float], **style: Any) -> AxesImage:
        """Show values as colours, one square each, the first row at the bottom."""
        self.axes.grid(False)
        return self.axes.imshow(values, origin="lower", extent=extent, interpolation="nearest", **style)

    def legend(self, columns: int = 2) -> None:
        """Put the legend below the panel, where it hides nothing. `to_svg` adds it to panels without one."""
        style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "handlelength": 1.8, "columnspacing": 1.2}
        self.axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, **style)


def panels(picture: Figure, count: int, *, width: float = 4.6, height: float = 3.7, rows: int = 1) -> list[Panel]:
    """Return panels in reading order, each of this width and height."""
    columns = -(-count // rows)
    picture.set_size_inches(width * columns, height * rows)
    engine = picture.get_layout_engine()
    assert engine is not None
    engine.set(wspace=0.05, hspace=0.06)  # type: ignore[call-arg]
    return [Panel(picture.add_subplot(rows, columns, i + 1)) for i in range(count)]


def to_svg(draw: Callable[[Figure], None], prefix: str) -> str:
    """Draw a figure as an element of a page. Ids begin with the prefix, so that two figures never share one."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise attnc.MissingExtra("figures need", "matplotlib", "lab", error) from None

    picture = Figure(layout="constrained")  # it needs no display
    draw(picture)
    for axes in picture.axes:
        if axes.get_legend() is None and axes.get_legend_handles_labels()[0]:
            Panel(axes).legend()
    made = io.StringIO()
    with rc_context({"svg.hashsalt": prefix, "svg.fonttype": "path"}):
        picture.savefig(made, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    text = made.getvalue()
    text = text[text.index("<svg") :]
    return _compact(re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL), prefix)


def _compact(svg: str, prefix: str) -> str:
    """Return the same picture in about half of the bytes: short ids, one class per style, coordinates to 1/100 point.

    Ids and classes begin with the prefix.
    """
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r">\s+<", "><", svg)
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg))
    short = {name: f"{prefix}-{number:x}" for number, name in enumerate(sorted({a or b for a, b in used}))}
    svg = re.sub(r' id="([^"]*)"', lambda found: f' id="{short[found[1]]}"' if found[1] in short else "", svg)
    svg = re.sub(r'(?:xlink:)?href="#([^"]+)"', lambda found: f'href="#{short[found[1]]}"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", lambda found: f"url(#{short[found[1]]})", svg)
    numbers = re.compile(r"-?\d+\.\d+")
    svg = re.sub(
        r' (?:x|y|d)="[^"]*"|translate\([^)]*\)',
        lambda found: numbers.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), found[0]),
        svg,
    )
    styles = sorted({*re.findall(r' style="([^"]*)"', svg)})
    classes = {style: f"{prefix}-s{number:x}" for number, style in enumerate(styles)}
    svg = re.sub(r' style="([^"]*)"', lambda found: f' class="{classes[found[1]]}"', svg)
    rules = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    end = svg.index(">") + 1
    return f"{svg[:end]}<style>{rules}</style>{svg[end:]}"
