"""The report of a conversion as one page that needs no other file. All text from the model is escaped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources

from attnc.converting.report import Replaced, Report
from attnc.errors import MissingExtra
from attnc.wording import ceiling

TEMPLATE = "report.html.jinja"
FLOOR_AT = 50.0
"""The place of the noise floor in the bar of a drift, in percent."""
DECADES = 3.0
"""The bar of a drift shows this many powers of ten below the noise floor, and as many above it."""


@dataclass(frozen=True)
class Layer:
    """A row of the page: the cells of the table, and its bars in percent of their width."""

    cells: list[str]
    seen: tuple[float, float, float] | None  # left end, width, and the place of 0
    drift: tuple[float, float, bool] | None  # width, the place of the noise floor, and whether it is well below
    share: float | None


def page(report: Report) -> str:
    """Return the page. The bars of all layers have one scale."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra("the report needs", "jinja2", "lab", error) from None
    text = resources.files("attnc.converting").joinpath(TEMPLATE).read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
    shares = [entry.share for entry in report.replaced if entry.share is not None]
    sentences = [] if report.on_box is None else [str(report.on_box), *report.on_box.assumptions]
    if report.end_to_end is not None and report.end_to_end.hidden is not None:
        sentences.insert(0, f"Measured on {report.end_to_end.inputs}: {report.end_to_end.sentence()}.")
    return template.render(
        report=report,
        drift=report.end_to_end,
        layers=layers(report),
        share=sum(shares) if shares else None,
        sentences=sentences,
        block_drifts=block_drifts(report),
        ceiling=ceiling,
    )


def layers(report: Report) -> list[Layer]:
    """Return the rows. All ranges have one scale, and shares of time are relative to the largest."""
    ranges = [entry.seen for entry in report.replaced if entry.seen is not None]
    low, high = min([0.0, *(a for a, _ in ranges)]), max([0.0, *(b for _, b in ranges)])
    scale = 100 / (high - low) if high > low else 0.0
    largest = max((entry.share for entry in report.replaced if entry.share is not None), default=0.0)

    def layer(cells: list[str], entry: Replaced) -> Layer:
        seen = None
        if entry.seen is not None:
            start, end = entry.seen
            seen = (round((start - low) * scale, 2), round((end - start) * scale, 2), round(-low * scale, 2))
        share = None if entry.share is None else round(100 * entry.share / largest, 2) if largest else 0.0
        return Layer(cells, seen, drift_bar(entry.drift, entry.floor), share)

    return [layer(cells, entry) for cells, entry in zip(report.rows(), report.replaced, strict=True)]


def drift_bar(drift: float | None, floor: float | None) -> tuple[float, float, bool] | None:
    """Return the bar of a drift beside its noise floor, on a logarithmic scale."""
    if drift is None or not floor:
        return None
    decades = math.log10(drift / floor) if drift > 0 else -DECADES
    width = FLOOR_AT * (1 + max(-1.0, min(1.0, decades / DECADES)))
    return round(width, 2), FLOOR_AT, drift > 10 * floor


def block_drifts(report: Report) -> dict[str, float | None]:
    """Return the path of each layer of an encoder → the largest drift that was measured inside it."""
    blocks = [] if report.on_box is None else report.on_box.blocks
    found: dict[str, float | None] = {}
    for block in blocks:
        inside = [
            entry.drift
            for entry in report.replaced
            if entry.drift is not None and entry.path.startswith(f"{block.path}.")
        ]
        found[block.path] = max(inside, default=None)
    return found
