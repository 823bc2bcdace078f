from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.errors import FileError, InputError
from attnc.network import Network
from attnc.plots import _scores, _Subject, figure, plot

BOX = {"x": (-3, 3), "y": (-3, 3)}


@pytest.fixture(scope="module")
def coarse() -> Network:
    return attnc.compile("sin(x)+cos(y)", box=BOX, eps=0.5)


@pytest.fixture(scope="module")
def fine() -> Network:
    return attnc.compile("sin(x)+cos(y)", box=BOX, eps=0.1)


@pytest.fixture(scope="module")
def line() -> Network:
    return attnc.compile("x*sin(3*x)", box={"x": (-2, 2)}, eps=0.3)


@pytest.fixture(scope="module")
def fine_line() -> Network:
    return attnc.compile("x*sin(3*x)", box={"x": (-2, 2)}, eps=0.01)


def titles(picture) -> list[str]:
    return [axes.get_title("left") for axes in picture.axes if axes.get_title("left")]


def texts(picture) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in picture.findobj(Text) if text.get_text()]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_formats(line: Network, tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"figure.{suffix}"
    plot(line, path)
    plot(line, str(path))  # an earlier figure is replaced
    assert path.read_bytes().startswith(start)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o444 == 0o444


def test_panels_of_two_variables(coarse: Network) -> None:
    picture = figure(coarse)
    assert titles(picture) == ["target", "network", "error", "partition"]
    shown = " ".join(texts(picture))
    assert coarse.certificate.bound is not None
    assert f"observed {coarse.certificate.observed:.3g} (sampled)" in shown
    assert "(proven)" in shown
    assert {axes.get_xlabel() for axes in picture.axes if axes.get_title("left")} == {"x"}
    assert {axes.get_ylabel() for axes in picture.axes if axes.get_title("left")} == {"y"}


def test_panels_show_the_function_and_the_network(coarse: Network) -> None:
    panels = {axes.get_title("left"): axes for axes in figure(coarse).axes}
    target, network, error = (np.asarray(panels[name].images[0].get_array()) for name in ("target", "network", "error"))
    side = len(target)
    middles = -3 + 6 * (np.arange(side) + 0.5) / side
    x, y = np.meshgrid(middles, middles)
    np.testing.assert_allclose(target, np.sin(x) + np.cos(y), atol=1e-12)
    np.testing.assert_array_equal(error, network - target)
    assert coarse.certificate.bound is not None
    assert np.abs(error).max() <= coarse.certificate.bound
    assert panels["error"].images[0].norm.vmax == coarse.certificate.bound


def test_a_fine_partition_is_zoomed_and_says_so(fine: Network) -> None:
    picture = figure(fine)
    assert titles(picture)[-1] == "partition, zoomed"
    assert any("24 × 24 of" in text for text in texts(picture))
    panels = {axes.get_title("left"): axes for axes in picture.axes}
    left, right = panels["partition, zoomed"].get_xlim()
    assert right - left < 6 * 0.5
    assert len(panels["network"].patches) == 2  # the frame of the window


def test_panels_of_one_variable(line: Network, fine_line: Network) -> None:
    picture = figure(line)
    assert titles(picture) == ["target and network", "error", "attention weights"]
    assert titles(figure(fine_line)) == ["target and network", "error", "attention weights, zoomed"]
    panels = {axes.get_title("left"): axes for axes in picture.axes}
    ticks = panels["target and network"].lines[-1].get_xdata()
    centres = -2 + 4 * (np.arange(line.num_anchors) + 0.5) / line.num_anchors
    np.testing.assert_allclose(ticks, centres, atol=1e-3)
    weights = np.asarray(panels["attention weights"].images[0].get_array())
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-9)
    bound = line.certificate.bound
    levels = [float(drawn.get_ydata()[0]) for drawn in panels["error"].lines if len(drawn.get_ydata()) == 2]
    assert levels == [0, bound, -bound]


def test_weights_are_those_of_the_network(line: Network) -> None:
    panels = {axes.get_title("left"): axes for axes in figure(line).axes}
    shown = np.asarray(panels["attention weights"].images[0].get_array())
    x = np.linspace(-2, 2, shown.shape[1])
    pattern = line.run(x[:, None], cache=True).cache["select.head0.pattern"][:, 0]
    np.testing.assert_allclose(shown, pattern.T, atol=1e-6)


def test_without_a_known_function_the_network_is_drawn(tmp_path: Path) -> None:
    def bowl(points):
        return (points**2).sum(axis=1)

    plane = attnc.compile(bowl, box=[(-1, 1)] * 2, eps=0.5, lipschitz=3.0)
    assert titles(figure(plane)) == ["network", "partition"]
    assert titles(figure(plane, target=bowl)) == ["target", "network", "error", "partition"]
    curve = attnc.compile(bowl, box=[(-1, 1)], eps=0.5, lipschitz=2.0)
    assert titles(figure(curve)) == ["network", "attention weights"]
    plot(plane, tmp_path / "plane.png")
    plot(curve, tmp_path / "curve.png")


def test_one_of_several_outputs() -> None:
    network = attnc.compile("(x, 5+cos(x))", box={"x": (0, 1)}, eps=0.3)
    picture = figure(network, output=1)
    curve = next(axes for axes in picture.axes if axes.get_title("left")).lines[0].get_ydata()
    assert curve.min() > 5
    assert any("out[1] of 2" in text for text in texts(picture))
    with pytest.raises(InputError, match="from 0 to 1"):
        figure(network, output=2)


def test_a_constant_function_is_drawn(tmp_path: Path) -> None:
    network = attnc.compile("0*x+0*y+2", box=BOX, eps=0.5)
    plot(network, tmp_path / "flat.png")


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    network = attnc.compile("x+y+z", box={"x": (0, 1), "y": (0, 1), "z": (0, 1)}, eps=1.0)
    with pytest.raises(InputError, match="1 and 2 variables"):
        plot(network, tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


def test_bad_paths_are_refused(line: Network, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        plot(line, tmp_path / "figure.jpg")
    with pytest.raises(FileError, match="does not exist"):
        plot(line, tmp_path / "none" / "figure.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(FileError, match="folder"):
        plot(line, tmp_path / "folder.png")


def test_a_failure_leaves_nothing_behind(line: Network, tmp_path: Path, monkeypatch) -> None:
    from matplotlib.figure import Figure

    def fail(self, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    (tmp_path / "figure.png").write_bytes(b"before")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(FileError, match="disk full"):
        plot(line, tmp_path / "figure.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.png"]
    assert (tmp_path / "figure.png").read_bytes() == b"before"


def test_missing_matplotlib_says_what_to_install(line: Network, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'attnc\[plots\]'"):
        plot(line, tmp_path / "figure.png")


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


def test_text_is_never_read_as_mathematics(line: Network, tmp_path: Path) -> None:
    named = dataclasses.replace(line, expression=None, construction="$\\frac{$")
    plot(named, tmp_path / "figure.png")
    assert any("$\\frac{$" in text for text in texts(figure(named)))


@pytest.mark.parametrize("name", ["coarse", "fine", "line", "fine_line"])
def test_no_text_overlaps_or_is_cut_off(name: str, request: pytest.FixtureRequest, monkeypatch) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    picture = figure(request.getfixturevalue(name))
    canvas = FigureCanvasAgg(picture)
    canvas.draw()  # the layout settles
    drawn: dict[int, tuple[str, object]] = {}
    draw = Text.draw

    def recording(self, renderer):
        if self.get_visible() and self.get_text().strip():
            drawn[id(self)] = (self.get_text(), Text.get_window_extent(self, renderer))
        return draw(self, renderer)

    monkeypatch.setattr(Text, "draw", recording)
    canvas.draw()
    boxes = list(drawn.values())
    assert len(boxes) > 20
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width < 1 or height < 1, (one, other)
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= picture.bbox.x1, text
        assert box.y0 >= 0, text
        assert box.y1 <= picture.bbox.y1, text


def test_the_partition_is_the_largest_weight(coarse: Network) -> None:
    scores = _scores(_Subject(coarse, None, 0))
    assert scores is not None
    lo, hi = np.array([-3.0, -3.0]), np.array([3.0, 3.0])
    won = scores.winners(lo, hi, 40)
    steps = -3 + 6 * (np.arange(40) + 0.5) / 40
    x, y = np.meshgrid(steps, steps)
    points = np.stack([x.ravel(), y.ravel()], axis=1)
    pattern = coarse.run(points, cache=True).cache["select.head0.pattern"][:, 0]
    np.testing.assert_array_equal(won.ravel(), pattern.argmax(axis=1))
    assert scores.values is not None
    np.testing.assert_allclose(coarse(points), scores.values[won.ravel()], atol=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_pruning_drops_no_winner(seed: int) -> None:
    from attnc.plots import _Scores

    rng = np.random.default_rng(seed)
    scores = _Scores(rng.normal(size=(300, 2)) * 30, rng.normal(size=300) * 10, None, "")
    lo = rng.normal(size=2)
    hi = lo + rng.random(2)
    side = 50
    won = scores.winners(lo, hi, side)
    x, y = np.meshgrid(*(lo[i] + (hi - lo)[i] * (np.arange(side) + 0.5) / side for i in range(2)))
    everything = np.stack([x.ravel(), y.ravel()], axis=1) @ scores.a.T + scores.c
    np.testing.assert_array_equal(won.ravel(), everything.argmax(axis=1))
    kept = scores.can_win(lo, hi, 2.0)
    near = np.flatnonzero((everything >= everything.max(axis=1, keepdims=True) - 2.0).any(axis=0))
    assert set(near) <= set(kept)


def test_scattered_anchors_and_several_heads_still_draw(coarse: Network) -> None:
    from attnc.plots import _Scores

    scores = _Scores(np.random.default_rng(0).normal(size=(900, 2)), np.zeros(900), None, "")
    assert scores.cells_per_axis() == [30, 30]
    lattice = _scores(_Subject(coarse, None, 0))
    assert lattice is not None
    assert int(np.prod(lattice.cells_per_axis())) == coarse.num_anchors
