"""No text lies on another or leaves the page."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from plots.pictures import picture

LAYOUTS = [
    "plane",
    "fine plane",
    "line",
    "clip, heads",
    "clip of two, heads",
    "clips",
    "clips, heads",
    "relu",
    "relu of two",
    "sequence of three",
    "two layers",
    "two layers, heads",
    "adaptive",
    "graded",
    "spectral line",
    "all numbers",
    "spectral plane",
    "sum",
    "deep",
    "deep of three",
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_text_overlaps_or_is_cut_off(name: str, monkeypatch) -> None:
    shown = picture(name)
    FigureCanvasAgg(shown)
    shown.draw_without_rendering()  # the layout settles
    drawn: dict[int, tuple[str, object]] = {}
    draw = Text.draw

    def recording(self, renderer):
        if self.get_visible() and self.get_text().strip():
            drawn[id(self)] = (self.get_text(), Text.get_window_extent(self, renderer))
        return draw(self, renderer)

    monkeypatch.setattr(Text, "draw", recording)
    shown.draw_without_rendering()
    boxes = list(drawn.values())
    assert len(boxes) > 20
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width < 1 or height < 1, (one, other)
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= shown.bbox.x1, text
        assert box.y0 >= 0, text
        assert box.y1 <= shown.bbox.y1, text
