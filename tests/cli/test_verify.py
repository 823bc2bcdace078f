"""`attnc verify`: what compile proved, a separate program proves again, and refuses what was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import attnc
from attnc.cli import main


def verify(path: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(["verify", str(path), *options])
    assert isinstance(ending.value.code, int)
    return ending.value.code


@pytest.mark.parametrize(
    ("text", "box", "eps", "construction"),
    [
        ("sin(x)", {"x": (-3, 3)}, 1e-8, "auto"),
        ("x*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-6, "auto"),
        ("relu(x)", {"x": (-1, 1.7)}, 1e-5, "auto"),
        ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-4, "spectral_grid"),
        ("abs(x-0.3)", {"x": (-1, 1)}, 1e-4, "graded"),
        ("gelu(x)", {"x": (float("-inf"), float("inf"))}, 1e-6, "auto"),
    ],
)
def test_what_is_proved_is_proved_again(
    tmp_path: Path, text: str, box: dict[str, tuple[float, float]], eps: float, construction: str
) -> None:
    network = attnc.compile(text, box, eps, construction=construction)
    assert network.certificate.method == "proof"
    network.save(tmp_path / "net")
    assert verify(tmp_path / "net") == 0


def test_a_smaller_claim_is_refused(tmp_path: Path) -> None:
    attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-6).save(tmp_path / "net")
    path = tmp_path / "net" / "certificate.json"
    claim = json.loads(path.read_text(encoding="utf-8"))
    claim["bound"] *= 0.8
    claim["observed"] = 0.0
    path.write_text(json.dumps(claim), encoding="utf-8")
    assert verify(tmp_path / "net") == 1


def test_a_missing_folder_is_bad_input(tmp_path: Path) -> None:
    assert verify(tmp_path / "nowhere", "--json") == 2
