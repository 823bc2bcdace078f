"""The picture of a certificate: bars for its terms, cells for its leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.errors import InputError

pytest.importorskip("matplotlib")
from attnc.plots.certificate import certificate_figure


@pytest.mark.parametrize(
    ("text", "box", "panels"),
    [
        ("sin(x)", {"x": (-3, 3)}, 1 + 1),
        ("x*y", {"x": (-1, 1), "y": (-1, 1)}, 1 + 1),
        ("exp(sin(x)*y)*z", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}, 1),
        ("gelu(x)", {"x": (-np.inf, np.inf)}, 1 + 1),
    ],
)
def test_a_bar_for_every_term(text: str, box: dict[str, tuple[float, float]], panels: int) -> None:
    network = attnc.compile(text, box, 1e-4)
    axes = certificate_figure(network).axes
    assert len(axes) == panels
    widths = sorted(patch.get_width() for patch in axes[0].patches)
    assert widths == pytest.approx(sorted(term.value for term in network.certificate.terms))


def test_it_is_written_whole(tmp_path: Path) -> None:
    network = attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-3)
    network.plot_certificate(tmp_path / "ledger.svg")
    assert (
        "Where the error sits" in (tmp_path / "ledger.svg").read_text(encoding="utf-8")
        or (tmp_path / "ledger.svg").stat().st_size > 10_000
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.svg"]


def test_nothing_proved_nothing_drawn(tmp_path: Path) -> None:
    network = attnc.compile(lambda X: np.sin(X[:, 0]), [(-1, 1)], 1e-3)
    with pytest.raises(InputError, match="nothing was proved"):
        network.plot_certificate(tmp_path / "ledger.png")
