"""Changes to saved networks, and the verdicts of the checker on them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import attnc
from attnc.exports.safe_files import pack_tensors
from attnc.ir.program import Program
from attnc_checker import check
from attnc_checker.checking import Verdict
from proofs.mutations import PROGRAM_MUTATIONS

Change = Callable[[dict[str, Any]], Any]
OFF = ("do not depend on its input alone", "add up to", "is not re-proved to", "have other scores")
"""Reasons for which a staged proof of other weights is refused."""


def edit(path: Path, name: str, change: Change) -> None:
    """Change a JSON file, or "both" alike: the certificate and the configuration. Or change the "tensors" or the
    "header" of model.safetensors, and the certificate's hash."""
    if name == "tensors":
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        write_weights(path, pack_tensors(tensors))
    elif name == "header":
        raw = (path / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        change(header)
        packed = json.dumps(header).encode()
        write_weights(path, len(packed).to_bytes(8, "little") + packed + raw[start:])
    else:
        for each in ("certificate.json", "config.json") if name == "both" else (name,):
            data = json.loads((path / each).read_text(encoding="utf-8"))
            change(data)
            (path / each).write_text(json.dumps(data), encoding="utf-8")


def write_weights(path: Path, raw: bytes) -> None:
    """Write model.safetensors, and its hash into the certificate."""
    (path / "model.safetensors").write_bytes(raw)
    edit(path, "certificate.json", lambda data: data.update(weights_sha256=hashlib.sha256(raw).hexdigest()))


def multiplied(tensor: str, number: int, factor: float) -> Change:
    """One number of the tensors, times a factor."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[tensor].flat[number] *= factor

    return change


def change_weight(path: Path, tensor: str, number: int, factor: float) -> None:
    edit(path, "tensors", multiplied(tensor, number, factor))


def changes(table: dict[tuple[str, int], list[tuple[Change, str]]]) -> Callable[..., None]:
    """Make a test that changes a file of the fixture `net`: by the file and the exit code, the changes and the reasons.

    The checker must refuse every changed network for its reason.
    """

    @pytest.mark.parametrize(
        ("name", "code", "change", "reason"), [(*place, *row) for place, rows in table.items() for row in rows]
    )
    def refuses(net: Path, name: str, code: int, change: Change, reason: str) -> None:
        edit(net, name, change)
        found = refusal(net, code)
        assert reason in found, found

    return refuses


def stage(which: int | str, **fields: Any) -> Change:
    """Other fields of a stage, which is known by its number or its name; a function makes them of the old ones."""

    def change(data: dict[str, Any]) -> None:
        (entry,) = [entry for number, entry in enumerate(data["stages"]) if which in (number, entry["name"])]
        entry.update({name: x(entry[name]) if callable(x) else x for name, x in fields.items()})

    return change


def weights(tensors: Iterable[str], factor: float, reasons: Sequence[str] = OFF) -> Callable[..., None]:
    """Make a test that changes the first number of a tensor: the network is refused for one of the reasons."""

    @pytest.mark.parametrize("tensor", tensors)
    def refuses(net: Path, tensor: str) -> None:
        change_weight(net, tensor, 0, factor)
        found = refusal(net)
        assert any(reason in found for reason in reasons), found

    return refuses


def saved_once(save: Callable[[Path], Any]) -> Any:
    """Make a fixture: the folder of a network that `save` writes once for all tests of a module."""

    @pytest.fixture(scope="module")
    def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("saved") / "net"
        save(path)
        return path

    return saved


def replaced(old: str, new: str, count: int = -1) -> Change:
    """Another expression."""

    def change(data: dict[str, Any]) -> None:
        assert old in data["expression"]
        data["expression"] = data["expression"].replace(old, new, count)

    return change


def mutations(net: attnc.Network, target: Any) -> Callable[..., None]:
    """Make a test that changes the program: it is refused, or the bound has room for the change."""

    @pytest.mark.parametrize("mutate", PROGRAM_MUTATIONS, ids=lambda mutate: mutate.__name__)
    def refuses(tmp_path: Path, mutate: Callable[..., Program]) -> None:
        rng = np.random.default_rng(1)
        dataclasses.replace(net, program=mutate(rng, net.program)).save(tmp_path / "net")
        points = net.box.lo + rng.random((2000, net.box.d)) * net.box.widths
        is_refused(tmp_path / "net", points.reshape(-1, *net.program.input_shapes[0]), target(points))

    return refuses


def is_refused(path: Path, points: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether the checker refuses the network. If not, its bound must hold at the points."""
    verdict = check(path, processes=1)
    assert "broke off" not in verdict.reason
    assert not verdict.proved or np.abs(np.ravel(attnc.load(path)(points)) - np.ravel(wanted)).max() <= verdict.bound
    return not verdict.proved


Choose = Callable[[int], Iterable[tuple[int, float]]]
"""For the size of a tensor, the numbers that are changed, and the factors."""


def refused_changes(path: Path, points: np.ndarray, wanted: np.ndarray, choose: Choose) -> set[str]:
    """The tensors by changes of which a network is refused."""
    tensors, refused = load_file(path / "model.safetensors"), set()
    for name, tensor in tensors.items():
        for number, factor in choose(tensor.size) if tensor.dtype == float and tensor.size else ():
            changed = shutil.copytree(path, path.with_name(f"{name}.{number}"))
            change_weight(changed, name, number, factor)
            refused |= {name} if is_refused(changed, points, wanted) else set()
    return refused


def proved(path: Path, **options: Any) -> Verdict:
    """Require that the checker proves the certificate."""
    verdict = check(path, **{"processes": 1, **options})
    assert verdict.proved, verdict.reason
    return verdict


def reproved(path: Path, net: attnc.Network, loosest: float | None = None) -> Verdict:
    """Save a network, and require that it is proved again to the same bound.

    With `loosest` the proof must be staged, and its bound at most this many times the observed error.
    """
    net.save(path)
    verdict = proved(path)
    assert verdict.reproved <= verdict.bound == net.certificate.bound <= net.eps
    if loosest is not None:
        assert net.certificate.method == "staged proof"
        assert net.certificate.bound <= loosest * net.certificate.observed
    loaded = attnc.load(path)
    assert (loaded.expression, loaded.definitions) == (net.expression, net.definitions)
    return verdict


def refusal(net: Path, code: int = 1) -> str:
    """Why the checker does not prove it."""
    verdict = check(net, processes=1)
    assert not verdict.proved
    assert verdict.exit_code == code, verdict.reason
    assert "broke off" not in verdict.reason
    return verdict.reason
