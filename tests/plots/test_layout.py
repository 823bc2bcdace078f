"""No text lies on another or leaves the page."""

from __future__ import annotations

import pytest

from plots.pictures import picture, require_readable

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
    require_readable(picture(name), monkeypatch)
