"""Diagnosis: planted faults are named, with a remedy that helps; healthy networks show nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc
from attnc import constructions as build
from attnc.cli import main
from attnc_lab.measuring import unproved

UNIT = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(0.0, 1.0))


def on_line(text: str, end: float, eps: float, **options: Any) -> attnc.Network:
    target = attnc.as_target(text, [(-end, end)])
    return unproved(target, build.max_affine(target, **options), eps)  # a planted fault would be refused


def names(found: attnc.Diagnosis) -> list[str]:
    return [symptom.name for symptom in found.symptoms]


@pytest.mark.parametrize("beta", [0.01, 0.05])
def test_diffuse_attention(beta: float) -> None:
    found = attnc.diagnose(on_line("sin(x)", 3, 0.12, points_per_axis=32, beta=beta))
    assert names(found) == ["diffuse attention"]
    factor = found.symptoms[0].numbers["factor"]
    assert 1 < beta * factor < 40  # to where keys win
    cured = attnc.diagnose(on_line("sin(x)", 3, 0.12, points_per_axis=32, beta=beta * factor))
    assert cured.is_healthy, cured


def test_drift_between_anchors() -> None:
    found = attnc.diagnose(on_line("sin(4*x)", 3, 0.2, points_per_axis=24, beta=1.4))
    assert names(found) == ["drift between anchors"]
    numbers = found.symptoms[0].numbers
    assert 0.5 < numbers["peak"] < 0.95
    assert numbers["error_after"] < 0.2 * numbers["error_before"]


def test_boundary_artefacts() -> None:
    found = attnc.diagnose(on_line("x", 3, 0.03, points_per_axis=24, beta=1.0))
    assert names(found) == ["boundary artefacts"]
    assert "x = -3" in found.symptoms[0].where or "x = 3" in found.symptoms[0].where
    assert "2 spacings" in found.symptoms[0].remedy


def test_seams_between_heads() -> None:
    def heads(beta: float) -> attnc.Network:
        built = build.truncated_linear_heads(UNIT, num_heads=4, num_tokens=10, beta=beta)
        return unproved(UNIT, built, 0.3 / 31)

    found = attnc.diagnose(heads(1.0), UNIT)
    assert names(found) == ["seams between heads"]
    numbers = found.symptoms[0].numbers
    assert numbers["error_there"] > 3 * numbers["error_elsewhere"]
    where = float(found.symptoms[0].where.partition("= ")[2])
    assert min(abs(where - (8 * h - 0.5) / 31) for h in (1, 2, 3)) < 2 / 31
    assert attnc.diagnose(heads(2.75), UNIT).is_healthy


@pytest.mark.parametrize("eps", [0.004, 0.01, 0.015])
def test_a_seam_is_not_taken_for_drift(eps: float) -> None:
    """With one sentinel per side the error at seams is 0.0189, and 0.0074 elsewhere: a factor below 3."""
    wide = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, box=(-0.2, 1.2))
    built = build.truncated_linear_heads(wide, num_heads=4, num_tokens=10, sentinels=1, beta=1.0)
    found = attnc.diagnose(unproved(wide, built, eps), wide)
    assert names(found)[0] == "seams between heads"
    assert ("drift between anchors" in names(found)) == (eps < 0.0074)
    one_head = build.truncated_linear(wide, num_anchors=32, beta=1.0)
    assert "seams between heads" not in names(attnc.diagnose(unproved(wide, one_head, eps), wide))


def test_a_soft_head_is_not_taken_for_oscillation() -> None:
    """Without keys beyond the ends, soft attention is wrong there, over more than a cell."""
    found = attnc.diagnose(on_line("sin(x)", 3, 0.1, points_per_axis=32, beta=0.4))
    assert names(found) == ["boundary artefacts"]
    assert "oscillation" not in names(attnc.diagnose(on_line("sin(4*x)", 3, 0.1, points_per_axis=32, beta=0.4)))


def test_oscillation() -> None:
    coarse = attnc.diagnose(on_line("sin(12*x)", 1, 0.1, points_per_axis=8, beta=60.0))
    assert names(coarse) == ["oscillation"]
    needed = int(coarse.symptoms[0].numbers["points_per_axis"])
    assert 8 < needed < 300
    cured = attnc.diagnose(on_line("sin(12*x)", 1, 0.1, points_per_axis=2 * needed, beta=60.0))
    assert cured.is_healthy, cured


def test_scores_too_large_for_the_arithmetic() -> None:
    with np.errstate(all="ignore"):  # the theorem's bound overflows: it is vacuous there
        built = build.truncated_linear(UNIT, num_anchors=8192, beta=60.0, dtype="float32")
    points = np.random.default_rng(0).random((300, 1))
    found = attnc.diagnose(unproved(UNIT, built, 0.55 / 8191), UNIT, points=points)
    assert names(found) == ["underflow"]
    assert found.symptoms[0].numbers["rounded_by"] > 1
    in_float64 = build.truncated_linear(UNIT, num_anchors=8192, beta=60.0)
    assert attnc.diagnose(unproved(UNIT, in_float64, 0.55 / 8191), UNIT, points=points).is_healthy


def unit_clip(x: np.ndarray) -> np.ndarray:
    return np.clip(x[:, 0], 0, 1)


CODE = attnc.compile(unit_clip, [(-0.5, 1.5)], eps=0.1, lipschitz=1.0)
HEALTHY: dict[str, Callable[[], tuple[attnc.Network, Any]]] = {
    **{
        name: lambda name=name: (attnc.compile("sin(x)+cos(y)", [(-3, 3)] * 2, 0.9, construction=name), None)
        for name in ("max_affine", "max_affine_cross", "spectral_grid", "compose", "two_layer", "attention_softmax")
    },
    "gates": lambda: (attnc.compile("gelu(x)", [(-4, 4)], 1e-4, construction="gates"), None),
    "graded": lambda: (attnc.compile("sqrt(x)", [(0, 1)], 1e-2, construction="graded"), None),
    "binomial": lambda: (attnc.compile("1/(1+x**2)", [(-3, 3)], 1e-3, construction="binomial"), None),
    "truncated_linear": lambda: (attnc.compile(UNIT, eps=1e-2), UNIT),
    "truncated_linear_heads": lambda: (attnc.compile(UNIT, eps=1e-2, construction="truncated_linear_heads"), UNIT),
    "float32": lambda: (attnc.compile("sin(x)", [(-3, 3)], 1e-3, dtype="float32"), None),
    "function": lambda: (CODE, unit_clip),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_networks_show_nothing(name: str) -> None:
    net, target = HEALTHY[name]()
    found = attnc.diagnose(net, target)
    assert found.is_healthy, found
    assert found.max_error is not None
    assert net.eps is not None
    assert found.max_error <= net.eps


torch = pytest.importorskip("torch")


class Selection(torch.nn.Module):
    """Softmax over −β(x − L)², by hand: without the shift by the largest score if it is `naive`."""

    def __init__(self, beta: float, count: int = 24, naive: bool = False, offset: float = 0.0) -> None:
        super().__init__()
        self.L = torch.nn.Parameter(torch.linspace(-3, 3, count))
        self.beta, self.naive, self.offset = beta, naive, offset

    def forward(self, x: Any) -> Any:
        scores = -self.beta * (x - self.L) ** 2 + self.offset
        exponentials = torch.exp(scores) if self.naive else torch.softmax(scores, -1)
        weights = exponentials / exponentials.sum(-1, keepdim=True)
        return weights @ torch.sin(self.L)[:, None], weights


LINE = attnc.as_target("sin(x)", [(-3, 3)])


def test_torch_modules_that_return_weights() -> None:
    assert attnc.diagnose(Selection(60.0), LINE, eps=0.2).is_healthy
    assert names(attnc.diagnose(Selection(0.05), LINE, eps=0.2)) == ["diffuse attention"]
    assert names(attnc.diagnose(Selection(60.0, count=5), LINE, eps=0.2)) == ["oscillation"]
    broken = attnc.diagnose(Selection(60.0, naive=True, offset=-200.0), LINE, eps=0.2)
    assert names(broken) == ["underflow"]
    assert broken.symptoms[0].numbers["share"] == 1.0
    points = np.linspace(-3, 3, 300)[:, None]
    by_function = attnc.diagnose(Selection(0.05), lambda x: np.sin(x[:, 0]), eps=0.2, points=points)
    assert names(by_function) == ["diffuse attention"]


def test_multihead_attention_without_a_target() -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    tokens = np.random.default_rng(0).normal(size=(40, 16, 8))
    with torch.no_grad():
        attention.in_proj_weight.mul_(0.05)
    found = attnc.diagnose(attention, points=tokens)
    assert names(found) == ["diffuse attention"]
    assert found.symptoms[0].numbers["entropy_share"] > 0.99
    with torch.no_grad():
        attention.in_proj_weight[:16].mul_(400)
    assert attnc.diagnose(attention, points=tokens).is_healthy


@pytest.mark.parametrize(
    ("subject", "options", "word"),
    [
        (3, {}, "a Network or a torch module"),
        (CODE, {}, "give the target"),
        (CODE, {"target": attnc.as_target("x+y", [(0, 1)] * 2)}, "2 variables"),
        (torch.nn.Linear(1, 1), {"target": LINE}, "must return"),
        (Selection(1.0), {}, "give points"),
        (Selection(1.0), {"target": LINE, "points": [[math.nan]]}, "finite"),
        (Selection(1.0), {"target": LINE, "eps": 0.0}, "eps must be"),
        (Selection(1.0), {"target": attnc.as_target("(sin(x), x)", [(-3, 3)])}, "2 numbers per point"),
    ],
)
def test_what_cannot_be_diagnosed(subject: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(attnc.InputError, match=word):
        attnc.diagnose(subject, **options)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_line("sin(x)", 3, 0.12, points_per_axis=32, beta=0.02).save(tmp_path / "net")
    for arguments, code in (((), 1), (("--eps", "2"), 0)):
        with pytest.raises(SystemExit) as ending:
            main(["lab", "diagnose", str(tmp_path / "net"), *arguments])
        assert int(ending.value.code or 0) == code
    shown = capsys.readouterr().out
    assert "diffuse attention" in shown
    assert "multiply beta" in shown
    assert "healthy (4,000 points" in shown
