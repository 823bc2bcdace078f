"""Pictures of a network of one or two variables: target, network, error, and what the attention selects.

matplotlib is an optional extra. It is imported here and nowhere else, inside functions, and only its object-oriented
interface is used: no pyplot, no backend chosen, no setting changed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import FileError, InputError
from attnc.ir.normal_form import AttentionStage, FoldedHead
from attnc.model_card import ceiling, one_line, plural

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnc.network import Network
    from attnc.targets.target import Target

    TargetLike = Target | Callable[[np.ndarray], Any]

SUFFIXES = (".png", ".svg", ".pdf")
INK, GREY, FAINT = "#1b1f24", "#5b6470", "#d5dae0"
BLUE, ORANGE = "#0072b2", "#d55e00"  # Okabe and Ito's: told apart by every kind of colour vision
VALUES, ERRORS, SIZES, WEIGHTS = "viridis", "RdBu_r", "Reds", "Blues"

WHOLE = 40
"""Up to so many cells along an axis are shown whole; beyond, a window of ZOOMED cells."""
ZOOMED = 24
SCORES = 8e8
"""points × anchors that a picture may cost."""
PARTITION_PIXELS, TILE = 480, 32
BLOCK = 5
"""Where cells are as fine as the samples, the error's size is shown over blocks of BLOCK × BLOCK samples."""
MANY_STEPS = 400
"""With more anchors than this on a line, the error is drawn as a band."""
HEADER = 0.78
"""The height of the title and the line under it, in inches."""


def plot(network: Network, path: str | os.PathLike[str], target: TargetLike | None = None, *, output: int = 0) -> None:
    """Writes the picture of one output as SVG, PDF or PNG, by the path's suffix, whole or not at all.

    The target is read from the network's expression. A network of a Python function has none: give the function, or
    its panels are left out.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"cannot plot to {str(path)!r}: the name must end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise FileError(
            f"cannot plot to {str(path)!r}: the folder {str(path.parent)!r} does not exist. Create it first."
        )
    if path.is_dir():
        raise FileError(f"cannot plot to {str(path)!r}: it is a folder")
    picture = figure(network, target, output=output)
    temporary = path.parent / f".attnc-{secrets.token_hex(8)}{suffix}"
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    try:
        picture.savefig(temporary, format=suffix[1:], dpi=160, facecolor="white", metadata=undated)
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"cannot plot to {str(path)!r}: {error}. Nothing was changed.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def figure(network: Network, target: TargetLike | None = None, *, output: int = 0) -> Figure:
    """The picture as a matplotlib Figure that belongs to nobody else."""
    make = _figure_class()
    shapes = network.program.input_shapes
    if len(shapes) != 1 or len(shapes[0]) != 1 or network.box.d not in (1, 2):
        wanted = " and ".join(str(shape) for shape in shapes)
        raise InputError(f"a plot exists for 1 and 2 variables; this network takes inputs of shape {wanted}")
    outputs = int(np.prod(network.program.output_shape))
    if not 0 <= output < outputs:
        raise InputError(f"output must be from 0 to {outputs - 1}, found {output}")
    subject = _Subject(network, _as_function(network, target), output)
    draw = _draw_1d if network.box.d == 1 else _draw_2d
    return draw(make, subject)


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"plots need matplotlib ({error}): pip install 'attnc[plots]'") from None
    return Figure


def _as_function(network: Network, target: TargetLike | None) -> Callable[[np.ndarray], Any] | None:
    if target is not None:
        return target
    if network.expression is None:
        return None
    from attnc.targets.expression import Expression

    return Expression.parse(network.expression).with_variables(network.variables)


@dataclass(frozen=True)
class _Subject:
    """A network, the function that it stands for (None: unknown), and the output that is shown."""

    network: Network
    function: Callable[[np.ndarray], Any] | None
    output: int

    def approximation(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"]:
        return self._column(self.network(points), points)

    def target(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"]:
        assert self.function is not None
        return self._column(self.function(points), points)

    def _column(self, values: Any, points: np.ndarray) -> Float[np.ndarray, " points"]:
        array = np.asarray(values, np.float64)
        if array.size % max(1, len(points)) or array.size // len(points) <= self.output:
            raise InputError(f"the target returned shape {array.shape} for {len(points)} points")
        return np.asarray(array.reshape(len(points), -1)[:, self.output])

    @property
    def claims(self) -> str:
        certificate = self.network.certificate
        bound = "no bound" if certificate.bound is None else f"bound {ceiling(certificate.bound)} (proven)"
        observed = "" if certificate.observed is None else f"   observed {certificate.observed:.3g} (sampled)"
        return bound + observed

    @property
    def title(self) -> str:
        text = one_line(self.network.expression or "a Python function")
        outputs = int(np.prod(self.network.program.output_shape))
        return _shortened(text, 70) + (f"   out[{self.output}] of {outputs}" if outputs > 1 else "")

    @property
    def subtitle(self) -> str:
        network = self.network
        return "   ·   ".join(
            [
                one_line(network.construction),
                plural(network.program.num_heads, "head"),
                plural(network.num_anchors, "anchor"),
                plural(network.num_parameters, "parameter"),
                network.dtype,
            ]
        )


# --- what the attention selects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Scores:
    """The scores a_k·x + c_k of the first head's first query, over the keys that it sees."""

    a: Float[np.ndarray, "keys d"]
    c: Float[np.ndarray, " keys"]
    values: Float[np.ndarray, " keys"] | None  # what the network returns where one key has all the weight
    note: str

    def can_win(self, lo: np.ndarray, hi: np.ndarray, margin: float, keys: np.ndarray | None = None) -> np.ndarray:
        """Those of the keys that come within `margin` of the largest score somewhere in the window.

        Such a key comes within `margin` of the key that wins in the middle, and a linear difference is largest at a
        corner. So this drops no key that matters, and costs one pass.
        """
        a, c = (self.a, self.c) if keys is None else (self.a[keys], self.c[keys])
        middle, half = (lo + hi) / 2, (hi - lo) / 2
        best = int(np.argmax(a @ middle + c))
        slopes = a - a[best]
        found = np.flatnonzero(slopes @ middle + np.abs(slopes) @ half + (c - c[best]) >= -margin)
        return found if keys is None else keys[found]

    def winners(self, lo: np.ndarray, hi: np.ndarray, side: int) -> Int[np.ndarray, "side side"]:
        """For every pixel of a window, the key with the largest weight; tile by tile, since few keys can win in one."""
        pixels = _pixels(lo, hi, side).reshape(side, side, 2)
        near = self.can_win(lo, hi, 1.0)
        won = np.empty((side, side), np.int64)
        for i in range(0, side, TILE):
            for j in range(0, side, TILE):
                points = pixels[i : i + TILE, j : j + TILE]
                keys = self.can_win(points[0, 0], points[-1, -1], 1.0, near)
                won[i : i + TILE, j : j + TILE] = keys[np.argmax(points @ self.a[keys].T + self.c[keys], axis=-1)]
        return won

    def cells_per_axis(self) -> list[int]:
        """How many cells lie along each axis: exact for a lattice, the even share for scattered anchors."""
        distinct = [len(np.unique(column)) for column in self.a.T]
        if int(np.prod(distinct)) == len(self.c):
            return distinct
        return [round(len(self.c) ** (1 / self.a.shape[1]))] * self.a.shape[1]


def _scores(subject: _Subject) -> _Scores | None:
    """None where the first stage is not attention over constant keys: then there is no partition to show."""
    form = subject.network._engine.form
    stage = form.stages[0] if form.stages else None
    if not isinstance(stage, AttentionStage) or not stage.heads[0].keys.is_constant:
        return None
    head = stage.heads[0]
    a, c = head.scores(0)
    seen = _seen(head)
    values = _cell_values(subject, stage)
    note = f", head 0 of {len(stage.heads)}" if len(stage.heads) > 1 else ""
    a, c = np.asarray(a, np.float64)[seen], np.asarray(c, np.float64)[seen]
    return _Scores(a, c, None if values is None else values[seen], note)


def _seen(head: FoldedHead) -> Int[np.ndarray, " keys"]:
    from attnc.ir.layers import EVERY_QUERY

    if head.query_segments is None or head.key_segments is None:
        return np.arange(head.keys.shape[0])
    return np.flatnonzero((head.key_segments == head.query_segments[0]) | (head.key_segments == EVERY_QUERY))


def _cell_values(subject: _Subject, stage: AttentionStage) -> Float[np.ndarray, " keys"] | None:
    """Per key, the output where it has all the weight; None where that is not one number per key."""
    form, head = subject.network._engine.form, stage.heads[0]
    is_plain = len(form.stages) == 1 and len(stage.heads) == 1 and stage.residual is None
    if not is_plain or not head.values.is_constant or head.queries.shape[0] != 1:
        return None
    out = np.asarray(head.values.constant.toarray() @ head.W_O)[:, stage.written]
    return np.asarray(form.output(out).reshape(len(out), -1)[:, subject.output], np.float64)


def _window(centre: np.ndarray, lo: np.ndarray, hi: np.ndarray, cells: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The whole box along axes with few cells; else ZOOMED cells around the centre, inside the box."""
    share = np.array([1.0 if count <= WHOLE else ZOOMED / count for count in cells])
    size = share * (hi - lo)
    start = np.clip(centre - size / 2, lo, hi - size)
    return start, np.where(share == 1, hi, start + size)


# --- two variables ----------------------------------------------------------------------------------------------------


def _draw_2d(make: type[Figure], subject: _Subject) -> Figure:
    box = subject.network.box
    scores = _scores(subject)
    side = BLOCK * int(np.clip((SCORES / max(1, subject.network.num_anchors)) ** 0.5 / BLOCK, 24, 64))
    is_fine = scores is not None and 3 * max(scores.cells_per_axis()) > side
    points = _pixels(box.lo, box.hi, side, scatter=is_fine)
    network = subject.approximation(points)
    target = subject.target(points) if subject.function is not None else None
    shown = [network] if target is None else [network, target]
    lowest, highest = _limits(np.concatenate(shown))

    num_panels = (1 if target is None else 3) + (scores is not None)
    rows, columns = (2, 2) if num_panels > 2 else (1, num_panels)
    picture = _new_figure(make, 5.0 * columns, 4.7 * rows, subject)
    panels = iter(picture.subplots(rows, columns, squeeze=False).ravel())
    extent = (float(box.lo[0]), float(box.hi[0]), float(box.lo[1]), float(box.hi[1]))

    def image(name: str, note: str, values: np.ndarray, cmap: str, limits: tuple[float, float], label: str) -> Axes:
        axes: Axes = next(panels)
        _title(axes, name, note)
        _label_2d(axes, subject)
        drawn = axes.imshow(
            values.reshape(round(values.size**0.5), -1),
            origin="lower",
            extent=extent,
            aspect="auto",
            cmap=cmap,
            vmin=limits[0],
            vmax=limits[1],
            interpolation="nearest",
        )
        _colorbar(picture, axes, drawn, label)
        return axes

    names = ", ".join(one_line(name) for name in box.names)
    if target is not None:
        smooth = subject.target(_pixels(box.lo, box.hi, side)) if is_fine else target
        image("target", "the function itself", smooth, VALUES, (lowest, highest), f"f({names})")
    what = "what the attention computes"
    marked = [image("network", what, network, VALUES, (lowest, highest), f"network({names})")]
    centre = (box.lo + box.hi) / 2
    if target is not None:
        error = network - target
        reach = _error_reach(subject, error)
        if is_fine:
            blocks = np.abs(error).reshape(side // BLOCK, BLOCK, side // BLOCK, BLOCK).max(axis=(1, 3))
            label = f"largest |network − target| of {BLOCK**2} samples"
            marked.append(image("error", subject.claims, blocks, SIZES, (0, reach), label))
        else:
            marked.append(image("error", subject.claims, error, ERRORS, (-reach, reach), "network − target"))
        centre = points[int(np.nanargmax(np.abs(error)))]
    if scores is not None:
        _draw_partition(picture, next(panels), subject, scores, centre, (lowest, highest), marked)
    for unused in panels:
        unused.set_axis_off()
    return picture


def _draw_partition(
    picture: Figure,
    axes: Axes,
    subject: _Subject,
    scores: _Scores,
    centre: np.ndarray,
    limits: tuple[float, float],
    marked: list[Axes],
) -> None:
    """Every pixel in the colour of the anchor with the largest weight there; borders between anchors in white."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    box, cells = subject.network.box, scores.cells_per_axis()
    lo, hi = _window(centre, box.lo, box.hi, cells)
    side = PARTITION_PIXELS
    winner = scores.winners(lo, hi, side)
    is_zoomed = bool((lo > box.lo).any() or (hi < box.hi).any())
    if scores.values is not None:
        norm = Normalize(*(_limits(scores.values[winner]) if is_zoomed else limits))
        colours = colormaps[VALUES](norm(scores.values[winner]))[..., :3]
    else:
        norm = None
        hue = np.random.default_rng(0).permutation(len(scores.c)) / max(1, len(scores.c) - 1)
        colours = colormaps["cividis"](hue[winner])[..., :3]
    border = np.zeros((side, side), bool)
    border[:, 1:] |= winner[:, 1:] != winner[:, :-1]
    border[1:] |= winner[1:] != winner[:-1]
    colours[border] = 0.25 * colours[border] + 0.75
    by = "coloured by its value" if norm is not None else "one colour each"
    whole = " × ".join(f"{count:,}" for count in cells)
    part = " × ".join(str(count if count <= WHOLE else ZOOMED) for count in cells)
    zoom = f"{part} of {whole} cells{scores.note}, framed in the other panels"
    note = zoom if is_zoomed else f"one cell per anchor, {by}{scores.note}"
    _title(axes, f"partition{', zoomed' if is_zoomed else ''}", note)
    _label_2d(axes, subject)
    axes.imshow(colours, origin="lower", extent=(lo[0], hi[0], lo[1], hi[1]), aspect="auto")
    mapped = ScalarMappable(norm, VALUES if norm is not None else "cividis")
    bar = _colorbar(picture, axes, mapped, "value of the winning anchor" if norm is not None else "anchor")
    if norm is None:
        bar.set_ticks([])
    if is_zoomed:
        for other in marked:
            for colour, width in (("white", 2.6), (INK, 1.2)):
                other.add_patch(Rectangle((lo[0], lo[1]), *(hi - lo), fill=False, edgecolor=colour, linewidth=width))


def _pixels(lo: np.ndarray, hi: np.ndarray, side: int, scatter: bool = False) -> Float[np.ndarray, "pixels 2"]:
    """The middles of side × side pixels, row by row from below; with `scatter` a random place in each.

    Where cells are about as fine as pixels, middles would make a pattern that is not there.
    """
    rows, columns = np.divmod(np.arange(side * side), side)
    places = np.random.default_rng(0).random((side * side, 2)) if scatter else 0.5
    share = (np.stack([columns, rows], axis=1) + places) / side
    return np.asarray(np.clip(lo + share * (hi - lo), lo, hi))


# --- one variable -----------------------------------------------------------------------------------------------------


def _draw_1d(make: type[Figure], subject: _Subject) -> Figure:
    box, scores = subject.network.box, _scores(subject)
    lo, hi = float(box.lo[0]), float(box.hi[0])
    count = int(np.clip(SCORES // max(1, subject.network.num_anchors), 4_000, 40_000))
    x = np.linspace(lo, hi, count)
    if subject.network.num_anchors > MANY_STEPS:  # places off the lattice, which could make a pattern with the cells
        x[1:-1] += (np.random.default_rng(0).random(count - 2) - 0.5) * (hi - lo) / count
    network = subject.approximation(x[:, None])
    target = subject.target(x[:, None]) if subject.function is not None else None

    num_panels = 1 + (target is not None) + (scores is not None)
    picture = _new_figure(make, 9.6, 2.9 * num_panels, subject)
    panels = list(picture.subplots(num_panels, 1, squeeze=False).ravel())
    _draw_curves(panels[0], subject, x, network, target, scores)
    worst = (lo + hi) / 2
    if target is not None:
        _draw_error(panels[1], subject, x, network - target)
        worst = float(x[int(np.nanargmax(np.abs(network - target)))])
    if scores is not None:
        _draw_weights(picture, panels[-1], subject, scores, worst, panels[:-1])
    for axes in panels:
        axes.set_xlabel(one_line(box.names[0]), color=INK, parse_math=False)
    return picture


def _draw_curves(
    axes: Axes, subject: _Subject, x: np.ndarray, network: np.ndarray, target: np.ndarray | None, scores: _Scores | None
) -> None:
    name = one_line(subject.network.box.names[0])
    anchors = _anchor_places(scores, subject) if scores is not None else np.zeros(0)
    note = "ticks: the anchors" if len(anchors) else "more anchors than ticks could show"
    _title(axes, "target and network" if target is not None else "network", note)
    if target is not None:
        axes.plot(x, target, color=ORANGE, linewidth=2.4, label="target", solid_capstyle="round")
    axes.plot(x, network, color=BLUE, linewidth=1.4, label="network")
    axes.plot(anchors, np.zeros(len(anchors)), "|", color=INK, markersize=9, transform=axes.get_xaxis_transform())
    axes.set_xlim(x[0], x[-1])
    axes.set_ylabel(f"f({name})", color=INK, parse_math=False)
    _plain(axes)
    if target is not None:
        axes.legend(frameon=False, fontsize=10, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1)


def _draw_error(axes: Axes, subject: _Subject, x: np.ndarray, error: np.ndarray) -> None:
    """A line; where the network has more steps than the picture columns, the band between least and largest."""
    bound = subject.network.certificate.bound
    _title(axes, "error", subject.claims)
    if subject.network.num_anchors <= MANY_STEPS:
        axes.plot(x, error, color=BLUE, linewidth=1.2)
    else:
        bins = np.array_split(np.arange(len(x)), 250)
        middles = [x[part].mean() for part in bins]
        axes.fill_between(
            middles, [error[part].min() for part in bins], [error[part].max() for part in bins], color=BLUE, linewidth=0
        )
    axes.axhline(0, color=GREY, linewidth=0.8)
    reach = _error_reach(subject, error)
    if bound is not None and bound <= reach:
        for sign, text in ((1, "+ bound"), (-1, "− bound")):
            axes.axhline(sign * bound, color=ORANGE, linewidth=1.4, linestyle=(0, (5, 3)))
            axes.annotate(
                text,
                (1, sign * bound),
                (-4, sign * 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="bottom" if sign > 0 else "top",
                fontsize=9,
                color=ORANGE,
            )
    axes.set_ylim(-1.35 * reach, 1.35 * reach)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylabel("network − target", color=INK)
    _plain(axes)


def _draw_weights(
    picture: Figure, axes: Axes, subject: _Subject, scores: _Scores, worst: float, marked: list[Axes]
) -> None:
    """The attention weights over x, one row an anchor, in the order of the anchors along the axis."""
    box = subject.network.box
    lo, hi = _window(np.array([worst]), box.lo, box.hi, scores.cells_per_axis())
    # Keys 40 behind everywhere have weights below e^-40: nothing that a picture could show.
    keys = scores.can_win(lo, hi, 40.0)
    order = np.argsort(scores.a[:, 0], kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    keys = keys[np.argsort(rank[keys])]
    x = np.linspace(lo[0], hi[0], 1200)
    logits = scores.a[keys] * x + scores.c[keys, None]
    weights = np.exp(logits - logits.max(axis=0))
    weights /= weights.sum(axis=0)
    used = weights.max(axis=1) > 1e-3
    keys, weights = keys[used], weights[used]

    is_zoomed = bool((lo > box.lo).any() or (hi < box.hi).any())
    name = one_line(box.names[0])
    zoom = f"{_interval(name, lo[0], hi[0])} (shaded above){scores.note}"
    whole = f"how much each anchor counts at each {name}{scores.note}"
    _title(axes, f"attention weights{', zoomed' if is_zoomed else ''}", zoom if is_zoomed else whole)
    first = int(rank[keys[0]])
    drawn = axes.imshow(
        weights,
        origin="lower",
        extent=(lo[0], hi[0], first - 0.5, first + len(keys) - 0.5),
        aspect="auto",
        cmap=WEIGHTS,
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    _colorbar(picture, axes, drawn, "weight", 0.014)
    axes.set_ylabel("anchor, counted from the left", color=INK)
    _plain(axes, grid=False)
    axes.locator_params(axis="y", integer=True)
    if is_zoomed:
        for other in marked:
            other.axvspan(lo[0], hi[0], facecolor=FAINT, edgecolor=GREY, linewidth=0.8, zorder=0)


def _anchor_places(scores: _Scores, subject: _Subject) -> Float[np.ndarray, " anchors"]:
    """The middles of the cells, found by their borders on a fine grid; none where they would run together."""
    if len(scores.c) > 120:
        return np.zeros(0)
    lo, hi = subject.network.box.lo[0], subject.network.box.hi[0]
    x = np.linspace(lo, hi, 10_000)
    won = np.argmax(x[:, None] * scores.a[:, 0] + scores.c, axis=1)
    ends = np.flatnonzero(np.diff(won))
    starts = np.concatenate([[0], ends + 1])
    stops = np.concatenate([ends, [len(x) - 1]])
    return np.asarray((x[starts] + x[stops]) / 2)


# --- the look ---------------------------------------------------------------------------------------------------------


def _limits(values: np.ndarray) -> tuple[float, float]:
    lowest, highest = float(np.nanmin(values)), float(np.nanmax(values))
    if highest - lowest <= 1e-12 * max(abs(lowest), abs(highest)):
        pad = abs(lowest) or 1.0
        return lowest - pad, highest + pad
    return lowest, highest


def _error_reach(subject: _Subject, error: np.ndarray) -> float:
    """The bound where the error is of its size, so that the scale says how much of it is used; else the error."""
    largest, bound = float(np.nanmax(np.abs(error))), subject.network.certificate.bound
    if bound is not None and bound < 5 * largest:
        return max(largest, bound)
    return largest or 1.0


def _new_figure(make: type[Figure], width: float, height: float, subject: _Subject) -> Figure:
    """An empty figure with its header; the panels get the room below."""
    height += HEADER
    picture = make(figsize=(width, height), layout="constrained")
    engine = picture.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.008, 0.008, 0.984, 0.992 - HEADER / height), hspace=0.04, wspace=0.04)  # type: ignore[call-arg]
    style: dict[str, Any] = {"ha": "left", "va": "baseline", "parse_math": False}
    picture.text(0.15 / width, 1 - 0.36 / height, subject.title, fontsize=16, weight="bold", color=INK, **style)
    picture.text(0.15 / width, 1 - 0.62 / height, subject.subtitle, fontsize=10.5, color=GREY, **style)
    return picture


def _title(axes: Axes, name: str, note: str) -> None:
    axes.set_title(name, loc="left", pad=22, fontsize=12.5, weight="bold", color=INK)
    axes.annotate(
        note,
        (0, 1),
        (0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=9.5,
        color=GREY,
        parse_math=False,
    ).set_in_layout(False)  # a long note must not squeeze the panel


def _label_2d(axes: Axes, subject: _Subject) -> None:
    x, y = (one_line(name) for name in subject.network.box.names)
    axes.set_xlabel(x, color=INK, parse_math=False)
    axes.set_ylabel(y, color=INK, parse_math=False)
    axes.set_box_aspect(1)
    _plain(axes, grid=False)


def _plain(axes: Axes, grid: bool = True) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    axes.tick_params(colors=GREY, labelsize=9, length=3, color=FAINT)
    axes.locator_params(nbins=7)
    if grid:
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)


def _colorbar(picture: Figure, axes: Axes, drawn: Any, label: str, width: float = 0.035) -> Any:
    """As tall as the panel, whatever its aspect."""
    bar = picture.colorbar(drawn, cax=axes.inset_axes((1 + width, 0, width, 1)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=GREY, labelsize=9, length=0)
    bar.set_label(label, color=GREY, fontsize=9.5)
    return bar


def _interval(name: str, lo: float, hi: float) -> str:
    return f"{one_line(name)} ∈ [{lo:.5g}, {hi:.5g}]".replace("-", "−")


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
