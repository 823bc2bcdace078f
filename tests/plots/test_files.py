"""Files of pictures: the formats that are written, and the paths that are refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.errors import FileError, InputError
from attnc.plots import figure, plot
from plots.pictures import image, network, panel, picture, require_readable, texts, titles

LINES = ["line", "clip, heads", "relu", "two layers", "graded", "spectral line", "all numbers"]
PLANES = ["plane", "fine plane", "clip of two, heads", "relu of two", "two layers, heads", "adaptive", "spectral plane"]
OTHERS = ["sum", "deep", "clips", "clips, heads", "sequence of three", "deep of three"]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_formats(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"figure.{suffix}"
    path.write_bytes(b"earlier")
    plot(network("line"), str(path))
    assert path.read_bytes().startswith(start)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize(("name", "suffix"), [("clip of two, heads", "pdf"), ("sequence of three", "svg")])
def test_vector_formats_of_the_other_layouts(tmp_path: Path, name: str, suffix: str) -> None:
    picture(name).savefig(tmp_path / f"figure.{suffix}")
    assert (tmp_path / f"figure.{suffix}").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["cross", "clip of two, heads"])
def test_a_loaded_network_has_the_same_picture(tmp_path: Path, name: str) -> None:
    network(name).save(tmp_path / "saved")
    known, loaded = picture(name), figure(attnc.load(tmp_path / "saved"))
    assert titles(loaded) == titles(known)
    for one, other in zip(known.axes, loaded.axes, strict=True):
        for first, second in zip(one.images, other.images, strict=True):
            np.testing.assert_array_equal(first.get_array(), second.get_array())


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for path, error, message in (
        ("figure.jpg", InputError, r"\.png, \.svg, \.pdf"),
        ("none/figure.png", FileError, "does not exist"),
        ("folder.png", FileError, "folder"),
        (None, InputError, "a file, found None"),
    ):
        with pytest.raises(error, match=message):
            plot(network("line"), path and tmp_path / path)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    def fail(*paths):
        raise OSError("disk full")

    (tmp_path / "figure.png").write_bytes(b"before")
    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(FileError, match="disk full"):
        plot(network("line"), tmp_path / "figure.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.png"]
    assert (tmp_path / "figure.png").read_bytes() == b"before"


def test_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'attnc\[plots\]'"):
        plot(network("line"), tmp_path / "figure.png")


def test_no_global_state() -> None:
    program = (
        "import sys, attnc, attnc.plots\n"
        "assert not any(name.startswith('matplotlib') for name in sys.modules)\n"
        "net = attnc.compile('x*y', box={'x': (0, 1), 'y': (0, 1)}, eps=0.3)\n"
        "attnc.plots.figure(net)\n"
        "import matplotlib\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "before = dict(matplotlib.rcParams)\n"
        "attnc.plots.figure(net)\n"
        "assert dict(matplotlib.rcParams) == before\n"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_text_is_never_read_as_mathematics(tmp_path: Path) -> None:
    named = dataclasses.replace(network("line"), expression=None, construction="$\\frac{$")
    plot(named, tmp_path / "figure.png")
    assert any("$\\frac{$" in text for text in texts(figure(named)))


def test_where_the_error_is_not_drawn_the_header_says_what_is_claimed() -> None:
    shown = [text.get_text() for text in picture("table").texts]
    assert shown[0] == "table of 9 points"
    assert any(text.startswith("error: at the table's 9 points: bound") for text in shown)
    code = attnc.compile(lambda p: np.sin(p[:, 0]), [(0, 3)], 0.1, lipschitz=1.0)
    assert any("(proven)" in text.get_text() for text in figure(code).texts)


def test_of_a_table_no_bound_is_drawn_between_its_points() -> None:
    shown = figure(network("table"), lambda p: np.sin(p[:, 0]))
    assert "error" in titles(shown)
    assert not any("bound" in text.get_text() for axes in shown.axes for text in axes.texts if "+" in text.get_text())


def test_a_loaded_relu_network_knows_what_it_stands_for(tmp_path: Path) -> None:
    relu = network("small relu")
    relu.save(tmp_path / "net")
    shown = figure(attnc.load(tmp_path / "net"))
    assert titles(shown)[:3] == ["target", "network", "error"]
    drawn = np.abs(image(panel(shown, "error"))).max()
    assert 0.3 * relu.certificate.observed <= drawn <= relu.certificate.bound


@pytest.mark.parametrize("name", [*LINES, *PLANES, *OTHERS])
def test_no_text_overlaps_or_is_cut_off(name: str, monkeypatch) -> None:
    require_readable(picture(name), monkeypatch)
