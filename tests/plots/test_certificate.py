"""The picture of a certificate: bars for its terms, cells for its leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.errors import InputError
from attnc.network import Network

pytest.importorskip("matplotlib")
from attnc.plots.certificate import certificate_figure
from plots.pictures import network, require_readable

INTERVAL, SPACE, REALS = {"x": (-1.0, 1.0)}, dict.fromkeys("xyz", (-1.0, 1.0)), {"x": (-np.inf, np.inf)}
PLANE = dict.fromkeys("xy", (-1.0, 1.0))
LONG = "sin(x)*cos(y)*exp(z)+sqrt(x**2+y**2+z**2+1)*atan(x*y)+log(2+x*z)*tanh(y-z)+abs(x-y)*sigmoid(x+y+z)"


@cache
def jump() -> Network:
    return attnc.compile("sign(x)*y", PLANE, 0.3, norm=2)


@pytest.mark.parametrize(
    ("text", "box", "panels"),
    [
        ("sin(x)", {"x": (-3, 3)}, 1 + 1),
        ("x*y", PLANE, 1 + 2),
        ("exp(sin(x)*y)*z", SPACE, 1 + 3),
        ("gelu(x)", REALS, 1 + 1),
    ],
)
def test_a_bar_for_every_term(text: str, box: dict[str, tuple[float, float]], panels: int) -> None:
    network = attnc.compile(text, box, 1e-4)
    axes = certificate_figure(network).axes
    assert len(axes) == panels
    widths = sorted(patch.get_width() for patch in axes[0].patches)
    assert widths == pytest.approx(sorted(term.value for term in network.certificate.terms))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make",
    [
        lambda: attnc.compile("x", INTERVAL, 1e-3),  # nothing to see: the error is 0
        lambda: attnc.compile("abs(x - 0.3)", INTERVAL, 1e-4),
        lambda: attnc.compile("gelu(x)", REALS, 1e-4),
        lambda: attnc.compile("(x*y, x + 2*y)", PLANE, 1e-2),
        lambda: attnc.compile("exp(sin(x)*y)", PLANE, 1e-2),
        jump,
        lambda: attnc.compile(LONG, SPACE, 1e-1),
        lambda: attnc.compile(lambda p: np.abs(p).max(axis=1), [(-1, 1)] * 2, 0.2, lipschitz=1.0),
        *(partial(network, name) for name in ("small relu", "table", "scattered table")),
    ],
)
def test_it_can_be_read(make: Callable[[], Network], monkeypatch) -> None:
    require_readable(certificate_figure(make()), monkeypatch, least_texts=12)


def test_the_error_seen_is_that_of_the_network() -> None:
    """Along each variable, the largest over the others; below the bound everywhere, and next to the observed error."""
    network = attnc.compile("exp(sin(x)*y)*z", SPACE, 1e-2)
    claim = network.certificate
    for axes in certificate_figure(network).axes[1:]:
        (seen,) = (patch for patch in axes.patches if patch.get_label() == "seen")
        assert 0.5 * claim.observed <= seen.get_data().values.max() <= claim.bound


def test_a_theorem_is_not_called_a_proof_head_by_head() -> None:
    network = attnc.compile("x*y*z", SPACE, 0.3, construction="max_affine", norm=2)
    shown = certificate_figure(network)
    texts = [text.get_text() for text in shown.texts]
    assert ("head by head" in " ".join(texts)) == (network.certificate.method == "staged proof")
    assert any(text.startswith("seen at samples in the L2 norm, no proof: ") for text in texts)


def test_beside_a_jump_colours_are_those_of_the_rest() -> None:
    drawn = certificate_figure(jump()).axes[1].collections[0]
    assert drawn.get_clim()[1] < np.max(jump().certificate.leaf_bounds)
    assert drawn.colorbar.extend == "max"


def test_it_is_written_whole(tmp_path: Path) -> None:
    network = attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-3)
    network.plot_certificate(tmp_path / "ledger.svg")
    assert (tmp_path / "ledger.svg").stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.svg"]


def test_nothing_proved_nothing_drawn(tmp_path: Path) -> None:
    network = attnc.compile(lambda X: np.sin(X[:, 0]), [(-1, 1)], 1e-3)
    with pytest.raises(InputError, match="nothing was proved"):
        network.plot_certificate(tmp_path / "ledger.png")
