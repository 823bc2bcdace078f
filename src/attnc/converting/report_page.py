"""The report of a conversion as one page that needs no other file. All text from the model is escaped."""

from __future__ import annotations

from importlib import resources

from attnc.converting.report import HEADERS, Report
from attnc.errors import MissingExtra
from attnc.wording import ceiling

TEMPLATE = "report.html.jinja"
SEEN = HEADERS.index("range seen")
"""The column that shows a bar."""


def page(report: Report) -> str:
    """Return the page. The bars of all layers have one scale."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra("the report needs", "jinja2", "lab", error) from None
    text = resources.files("attnc.converting").joinpath(TEMPLATE).read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
    rows = list(zip(report.rows(), bars(report), strict=True))
    return template.render(
        report=report, headers=HEADERS, rows=rows, seen=SEEN, remarks=report.remarks(), ceiling=ceiling
    )


def bars(report: Report) -> list[tuple[float, float, float] | None]:
    """Return left end, width and place of 0 of every range, in percent of the widest range of the model."""
    ranges = [entry.seen for entry in report.replaced if entry.seen is not None]
    low, high = min([0.0, *(a for a, _ in ranges)]), max([0.0, *(b for _, b in ranges)])
    scale = 100 / (high - low) if high > low else 0.0
    return [
        None
        if seen is None
        else (round((seen[0] - low) * scale, 2), round((seen[1] - seen[0]) * scale, 2), round(-low * scale, 2))
        for seen in (entry.seen for entry in report.replaced)
    ]
