"""Stock checkpoints: plain transformers computes them within their bounds, and the checker proves these again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc
from attnc.stock.exporting import evaluate, stock_checkpoint
from attnc_checker import check

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
NUM_POINTS = 1000
SQUARE = {"x": (-1, 1), "y": (-1, 1)}
Case = tuple[str, dict[str, tuple[float, float]], float, dict[str, Any]]
CASES: dict[str, Case] = {
    "product": ("tanh(sin(x) + y) + x*y", {"x": (-2, 2), "y": (-3, 1)}, 1e-4, {}),
    "deep": (
        "sin(sin(sin(sin(sin(a*b) + c) + d) + g) + a), relu(a - g)*tanh(c)",
        dict.fromkeys("abcdg", (-1.0, 1.0)),
        1e-2,
        {},
    ),
    "spectral_grid": ("sin(x*y)", SQUARE, 1e-4, {"construction": "spectral_grid"}),
}
MORE: dict[str, Case] = {
    "seven layers": (
        "tanh(sin(cos(exp(sin(x)*y)*0.3) + x)*z)*relu(x*z - 0.1)",
        {"x": (-1, 1), "y": (-1, 1), "z": (0, 1)},
        1e-2,
        {},
    ),
    "five variables": (
        "a*b*c + sin(d)*exp(g), sqrt(a**2 + b**2 + 1)*tanh(c*d - g)",
        dict.fromkeys("abcdg", (-1.0, 1.0)),
        1e-2,
        {},
    ),
    "sum": ("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-5, {}),
    "far from 0": ("x*y/100 + exp(x - 100)", {"x": (100, 101), "y": (-40, 90)}, 1e-2, {}),
    "kinks": ("max(x, y, x*y) + clip(x, -0.5, 0.5) - abs(y)", SQUARE, 1e-2, {}),
    "root": ("sqrt(abs(x*y))", SQUARE, 0.1, {}),
    "six layers": ("sin(sin(sin(sin(sin(sin(x + y) + x) + y) + x) + y) + x)", SQUARE, 1e-3, {}),
    "gate": ("gelu(x)*2 - silu(x)", {"x": (-4, 4)}, 1e-3, {"construction": "gates"}),
    "max_affine": ("exp(-x**2)", {"x": (-2, 2)}, 0.05, {"construction": "max_affine"}),
    "graded": ("relu(x)*20", {"x": (-1, 1)}, 1e-2, {"construction": "graded"}),
    "binomial": ("exp(-x)", {"x": (0, 5)}, 1e-4, {"construction": "binomial"}),
    "two_layer": ("abs(x)", {"x": (-1, 1)}, 0.1, {"construction": "two_layer"}),
    "affine": ("2*x - 1", {"x": (0, 3)}, 0.1, {}),
}
WAYS = 10
"""The number of ways in which `run_checkpoints` computes a checkpoint."""
Exported = dict[str, tuple[Path, attnc.Network, attnc.Certificate]]


def export(cases: dict[str, Case], folder: Path) -> Exported:
    found = {}
    for name, (expression, box, eps, options) in cases.items():
        net = attnc.compile(expression, box, eps, **options)
        (folder / name).mkdir()
        found[name] = folder / name / "checkpoint", net, net.export_hf(folder / name / "checkpoint")
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(CASES, tmp_path_factory.mktemp("stock"))


def points_in(net: attnc.Network) -> np.ndarray:
    random = np.random.default_rng(0).random((NUM_POINTS, net.box.d))
    ends = np.concatenate([net.box.lo[None], net.box.hi[None], (net.box.lo[None] + net.box.hi[None]) / 2])
    return np.concatenate([ends, net.box.lo + random * net.box.widths])[:NUM_POINTS]


def require_within_bounds(exported: Exported, cases: dict[str, Case], tmp_path: Path) -> None:
    """Run plain transformers in a process that cannot import attnc, in all ways, and compare with the bounds."""
    jobs = []
    for number, (folder, net, _) in enumerate(exported.values()):
        np.save(tmp_path / f"{number}.npy", points_in(net))
        out = str(tmp_path / f"{number}.npz")
        jobs.append({"folder": str(folder), "points": str(tmp_path / f"{number}.npy"), "out": out})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    program = Path(__file__).with_name("run_checkpoints.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, program, tmp_path / "jobs.json"], check=True, capture_output=True, env=environment)
    for number, (name, (_, net, claim)) in enumerate(exported.items()):
        points = points_in(net)
        wanted = attnc.as_target(*cases[name][:2])(points).reshape(len(points), -1)
        with np.load(tmp_path / f"{number}.npz") as found:
            assert len(found.files) == WAYS
            for way in found.files:
                error = np.abs(found[way] - wanted[: len(found[way])]).max()
                assert error <= claim.bound, (name, way, error, claim.bound)


def require_proved(exported: Exported) -> None:
    for folder, _, claim in exported.values():
        verdict = check(folder, processes=1)
        assert verdict.proved, verdict.reason
        assert verdict.bound == claim.bound
        assert verdict.reproved <= claim.bound


@needs_transformers
def test_plain_transformers_is_within_the_bound(exported: Exported, tmp_path: Path) -> None:
    require_within_bounds(exported, CASES, tmp_path)


def test_the_checker_proves_the_bounds_again(exported: Exported) -> None:
    require_proved(exported)


def test_bounds_are_not_loose(exported: Exported) -> None:
    for name, (_, _, claim) in exported.items():
        assert claim.bound <= 3 * claim.observed, name


@pytest.mark.slow
@needs_transformers
def test_more_functions(tmp_path: Path) -> None:
    found = export(MORE, tmp_path)
    require_proved(found)
    require_within_bounds(found, MORE, tmp_path)


def test_feed_forward_weights_are_zero_and_the_names_are_those_of_the_weights(
    exported: Exported,
) -> None:
    from safetensors.numpy import load_file

    folder = exported["product"][0]
    tensors, names = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())["attnc"]
    assert all(not tensor.any() for name, tensor in tensors.items() if ".mlp." in name)
    assert {head["name"] for head in names["heads"]} == {"0.0", "0.1", "0.2", "1.0"}
    (last,) = [head for head in names["heads"] if head["layer"] == 1]
    assert last["reads"] == ["input.y", "signal.sin(t)#2"]
    assert last["writes"] == ["signal.tanh(t)#3"]
    assert len(names["words"]) == len(tensors["model.embed_tokens.weight"])


def test_a_tables_checkpoint(tmp_path: Path) -> None:
    points = np.linspace(0, 1, 9)[:, None]
    net = attnc.compile(attnc.TableTarget(points, np.sin(3 * points[:, 0]), ("t",)), eps=1e-3)
    claim = net.export_hf(tmp_path / "table")
    assert claim.method == "proof at the table's 9 points"
    assert check(tmp_path / "table", processes=1).proved


def test_the_same_call_gives_the_same_bytes(tmp_path: Path) -> None:
    net = attnc.compile("sin(x)*y", SQUARE, 1e-3)
    for name in ("one", "two"):
        net.export_hf(tmp_path / name)
    for name in ("config.json", "model.safetensors", "certificate.json", "README.md"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_evaluate_agrees_with_the_program() -> None:
    target = attnc.as_target("sin(x)*y + relu(x - y)", SQUARE)
    found = stock_checkpoint(target, eps=1e-3)
    points = np.random.default_rng(1).uniform(-1, 1, (20, 2)).astype(np.float32)
    difference = np.abs(evaluate(found.checkpoint, points)[:, 0] - found.checkpoint.program()(points))
    rounding = {term.name: term.value for term in found.certificate.terms}["rounding"]
    assert difference.max() <= rounding


def sequence() -> attnc.Network:
    target = attnc.SequenceTarget(lambda X: X - X.mean(1, keepdims=True), tokens=2, width=1, lipschitz=2.0)
    return attnc.compile(target, eps=1.0)


REFUSED: dict[str, tuple[Callable[[], attnc.Network], str]] = {
    "infinite box": (lambda: attnc.compile("gelu(x)", {"x": (-math.inf, math.inf)}, 1e-2), "is not bounded"),
    "sequence": (sequence, "has no expression"),
    "code": (lambda: attnc.compile(lambda p: p[:, 0], [(0, 1)], 0.1, lipschitz=1.0), "has no expression"),
    "too large": (lambda: attnc.compile("1e39*sin(x)", {"x": (0, 1)}, 1e37), "too large|overflow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused_by_a_sentence(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(attnc.AttncError, match=reason):
        make().export_hf(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.slow
def test_more_keys_than_the_context_allows(tmp_path: Path) -> None:
    net = attnc.compile("x*y*z", dict.fromkeys("xyz", (0.0, 1.0)), construction="max_affine", points_per_axis=26)
    claim = net.export_hf(tmp_path / "checkpoint")  # 17,576 keys: it is built anew
    assert claim.method == "staged proof"


def test_an_eps_that_is_not_met(tmp_path: Path) -> None:
    net = attnc.compile("sin(x)*y", SQUARE, 1e-6)
    with pytest.raises(attnc.BoundNotMet, match="above eps=1e-08"):
        net.export_hf(tmp_path / "checkpoint", eps=1e-8)
    assert not (tmp_path / "checkpoint").exists()


def test_another_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(attnc.AttncError, match="not a stock checkpoint"):
        attnc.compile("sin(x)", {"x": (0, 1)}, 1e-3).export_hf(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
