"""Files of every format number, as they were once written, are read, re-proved and written again as they were.

A change of a format that breaks these tests needs a new number. Readers refuse other numbers, and name the remedy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.special import erf

import attnc
import attnc_checker
import attnc_lab
from attnc.errors import FileError
from attnc_lab.folder import Folder
from attnc_lab.report import findings

DATA = Path(__file__).parent / "data"
NETWORKS = sorted((DATA / "network-1").iterdir())
BY_NAME = pytest.mark.parametrize("folder", NETWORKS, ids=lambda folder: folder.name)
REFERENCES: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]] = {
    "leaves": (np.linspace(-1, 1, 101)[:, None], lambda x: np.sin(x[:, 0])),
    "gradient": (np.linspace(-1, 1, 101)[:, None], lambda x: np.maximum(x[:, 0], 0)),
    "second-dtype": (np.linspace(-1, 1, 101)[:, None], lambda x: np.cos(x[:, 0])),
    "stages": (np.random.default_rng(0).uniform(-1, 1, (99, 2)), lambda x: np.exp(-(x[:, 0] ** 2)) * x[:, 1]),
    "definitions": (np.linspace(-1, 1, 101)[:, None], lambda x: np.where(x > 0, x, -x)),
    "tails": (np.linspace(-40, 40, 401)[:, None], lambda x: x[:, 0] * (1 + erf(x[:, 0] / np.sqrt(2))) / 2),
    "chain": (np.linspace(-1, 1, 101)[:, None], lambda x: np.abs(x[:, 0])),
    "table": (np.linspace(0, 1, 7)[:, None], lambda x: np.sin(x[:, 0])),
    "sequence": (
        np.random.default_rng(0).uniform(-1, 1, (99, 2, 1)),
        lambda x: x - x.mean(axis=1, keepdims=True),
    ),
}
"""Points and the function that the network stands for. The norm of an error is no bound at a point: `norm` has none."""


@BY_NAME
def test_a_saved_network_is_read_and_keeps_its_bound(folder: Path) -> None:
    network = attnc.load(folder)
    assert network.certificate.bound is not None
    if folder.name in REFERENCES:
        points, function = REFERENCES[folder.name]
        assert (
            np.abs(network(points) - function(points).reshape(network(points).shape)).max() <= network.certificate.bound
        )


@BY_NAME
def test_it_is_written_again_as_it_was(folder: Path, tmp_path: Path) -> None:
    attnc.load(folder).save(tmp_path / "net")
    names = [path.name for path in folder.iterdir()]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "net").iterdir())
    for name in set(names) - {"README.md"}:  # for people, and free to change
        assert (tmp_path / "net" / name).read_bytes() == (folder / name).read_bytes(), name


@BY_NAME
def test_the_checker_reads_it(folder: Path) -> None:
    """A bound that rests on constants given for Python code is not re-proved; all others are."""
    for name in attnc_checker.certificates(folder):
        verdict = attnc_checker.check(folder, processes=1, name=name)
        assert verdict.exit_code == (1 if folder.name == "sequence" else 0), verdict.reason


@pytest.mark.parametrize(
    ("file", "now", "then"),
    [
        ("config.json", "attnc.network/1", "attnc.network/2"),
        ("certificate.json", "attnc.certificate/1", "attnc.certificate/2"),
    ],
)
def test_other_numbers_are_refused_with_the_remedy(tmp_path: Path, file: str, now: str, then: str) -> None:
    folder = tmp_path / "net"
    shutil.copytree(NETWORKS[0], folder)
    text = (folder / file).read_text(encoding="utf-8")
    assert now in text
    (folder / file).write_text(text.replace(now, then), encoding="utf-8")
    with pytest.raises(FileError, match=f"{then}.*reads '{now}'.*Use the version of attnc that wrote it"):
        attnc.load(folder)
    verdict = attnc_checker.check(folder, processes=1)
    assert verdict.exit_code == 2
    assert f"{then!r}, not {now!r}: check it with the version of attnc that wrote it" in verdict.reason


def test_an_in_context_program_is_read_and_written_again_as_it_was(tmp_path: Path) -> None:
    folder = DATA / "incontext-2" / "ridge"
    program = attnc.incontext.load(folder)
    prompt = program.domain.prompt.tokens([[0.5], [-1.0]], [1.0, -2.0])
    weights = program(np.zeros((1, 1)), prompt[None])[0]
    assert program.bound is not None
    assert abs(weights[0] - 2.5 / 2.25) <= program.bound.value  # Σ x y / (Σ x² + 1)
    verdict = attnc_checker.check(folder)
    assert verdict.proved, verdict.reason
    program.save(tmp_path / "again")
    for path in folder.iterdir():
        if path.name != "README.md":
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_an_in_context_program_of_another_number_is_refused_with_the_remedy() -> None:
    with pytest.raises(FileError, match=r"attnc\.incontext/1.*Use the version of attnc that wrote it"):
        attnc.incontext.load(DATA / "incontext-1" / "ridge")


def test_a_stock_checkpoint_is_read_and_written_again_as_it_was(tmp_path: Path) -> None:
    folder = DATA / "stock-1" / "product"
    verdict = attnc_checker.check(folder, processes=1)
    assert verdict.proved, verdict.reason
    attnc.compile("tanh(x)*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-2).export_hf(tmp_path / "stock")
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "stock", folder))
    assert {name: type(field) for name, field in ours.items()} == {name: type(field) for name, field in theirs.items()}
    assert ours["attnc"].keys() == theirs["attnc"].keys()


def test_a_stock_checkpoint_of_another_number_is_refused_with_the_remedy(tmp_path: Path) -> None:
    shutil.copytree(DATA / "stock-1" / "product", tmp_path / "stock")
    text = (tmp_path / "stock" / "config.json").read_text(encoding="utf-8")
    (tmp_path / "stock" / "config.json").write_text(text.replace("attnc.stock/1", "attnc.stock/2"), encoding="utf-8")
    verdict = attnc_checker.check(tmp_path / "stock", processes=1)
    assert verdict.exit_code == 2
    assert "'attnc.stock/2', not 'attnc.stock/1': check it with the version of attnc that wrote it" in verdict.reason
    with pytest.raises(FileError, match="it is a stock checkpoint, which transformers loads"):
        attnc.load(tmp_path / "stock")


def test_a_run_of_the_lab_is_read() -> None:
    folder = Folder.read(DATA / "lab-1")
    assert (folder.profile, folder.seed) == ("quick", 0)
    ((experiment, table, verdicts),) = findings(DATA / "lab-1")
    assert experiment.name == "frequency"
    assert len(table) > 10
    assert verdicts


def test_a_run_of_another_number_is_refused_with_the_remedy(tmp_path: Path) -> None:
    settings = json.loads((DATA / "lab-1" / "settings.json").read_text()) | {"format": "attnc.lab/2"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(FileError, match=r"attnc.lab/2.*reads 'attnc.lab/1'.*run the experiments again"):
        attnc_lab.report(tmp_path)


def test_a_converted_model_is_read() -> None:
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = attnc.load_converted(DATA / "converted-2")
    assert model(torch.tensor([[2, 5, 6, 3]])).last_hidden_state.shape == (1, 4, 2)


def test_a_converted_model_of_another_number_is_refused_with_the_remedy() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(FileError, match=r"attnc.converted/1.*reads 'attnc.converted/2'.*Use the version"):
        attnc.load_converted(DATA / "converted-1")


def test_golden_files_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 200_000
