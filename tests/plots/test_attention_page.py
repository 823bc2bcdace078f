"""The page of attention maps holds the weights of the reference, and nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.errors import FileError, InputError
from attnc.plots import attention_page
from attnc.plots.attention_page import LEAST_WEIGHT


@pytest.fixture(scope="module")
def net() -> attnc.Network:
    return attnc.compile("sin(x*y)+abs(x)", {"x": (-3, 3), "y": (-3, 3)}, 1e-3)


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def unpacked(layer: dict, head: int, point: int) -> np.ndarray:
    pattern = np.zeros(len(layer["destinations"]) * layer["sources"])
    places, weights = (base64.b64decode(text) for text in layer["heads"][head]["points"][point])
    pattern[np.frombuffer(places, "<u4")] = np.frombuffer(weights, "<f4")
    return pattern.reshape(len(layer["destinations"]), layer["sources"])


def test_the_page_holds_the_patterns_of_the_reference(net: attnc.Network) -> None:
    points = np.array([[0.5, 1.0], [-2.0, 3.0]])
    data, cache = data_of(net.show_attention(points).page), net.run(points, cache=True).cache
    names = [head["name"] for layer in data["layers"] for head in layer["heads"]]
    assert [f"{name}.pattern" for name in names] == [name for name in cache if name.endswith("pattern")]
    for layer in data["layers"]:
        for number, head in enumerate(layer["heads"]):
            for point in range(2):
                wanted = cache[f"{head['name']}.pattern"][point]
                assert np.abs(unpacked(layer, number, point) - wanted).max() <= LEAST_WEIGHT
    assert data["points"][0]["label"] == "x = 0.5, y = 1"


def test_it_needs_nothing_from_elsewhere_and_runs_no_text(net: attnc.Network) -> None:
    view = net.show_attention([[0.0, 0.0]])
    assert not re.findall(r"https?://|<link|src=|@import", view.page)
    hostile = attention_page.attention_view(
        net.program, net.run([[0.0, 0.0]], cache=True).cache, [{"label": "</script><script>", "output": "0"}], "<b>"
    )
    assert hostile.page.count("<script") == view.page.count("<script")
    assert data_of(hostile.page)["title"] == "<b>"
    framed = view._repr_html_()
    assert html.unescape(re.findall(r'srcdoc="([^"]*)"', framed)[0]) == view.page


def test_long_sequences_stay_small(tmp_path: Path) -> None:
    net = attnc.compile("sin(x)", {"x": (0, 1)}, 1e-4, construction="max_affine")
    view = net.show_attention(np.linspace(0, 1, 100)[:, None])
    view.save(tmp_path / "page.html")
    assert net.num_anchors > 5000
    assert (tmp_path / "page.html").stat().st_size < 2**17


def test_refusals(net: attnc.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = net.show_attention([[0.0, 0.0]])
    for wrong in ("page.png", 3):
        with pytest.raises(InputError, match=r"ends in \.html"):
            view.save(wrong)
    with pytest.raises(FileError, match="does not exist"):
        view.save(tmp_path / "no" / "page.html")
    with pytest.raises(InputError, match="from 1 to 256 points, found 257"):
        net.show_attention(np.zeros((257, 2)))
    with pytest.raises(InputError, match="outside"):
        net.show_attention([[9.0, 0.0]])
    monkeypatch.setattr(attention_page, "MOST_WEIGHTS", 3)
    with pytest.raises(InputError, match="a page holds 3"):
        net.show_attention([[0.0, 0.0]])
    with pytest.raises(InputError, match="no attention map"):
        attnc.compile("2*x", {"x": (0, 1)}, 1e-3).show_attention([[0.0]])
