"""In-context programs with the prompt of their fit: their bound is proved again, and forged folders are refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import attnc_checker

pytest.importorskip("sklearn")
import attnc
from attnc import incontext as ours

RNG = np.random.default_rng(3)
X = RNG.normal(size=(8, 2))
Y = X @ [1.0, -2.0] + 0.3 * RNG.normal(size=8)
MODELS: dict[str, Callable[[], Any]] = {
    "newton": lambda: ours.Ridge(max_rows=12).fit(X, Y),
    "chebyshev": lambda: ours.Ridge(0.1, method="chebyshev").fit(X, Y),
    "several targets and weights": lambda: ours.Ridge().fit(X, np.stack([Y, Y**2], 1), np.linspace(0.5, 2, 8)),
    "logistic": lambda: ours.LogisticRegression().fit(X, Y > 0),
    "logistic by gradients": lambda: ours.LogisticRegression(method="nesterov").fit(X, Y > 0),
    "poisson": lambda: ours.PoissonRegressor().fit(X, np.round(np.exp(Y / 3))),
    "huber": lambda: ours.Huber(5.0, fit_intercept=False, threshold=3.0).fit(X, Y),
}
NO_BOUND: dict[str, tuple[Callable[[], Any], str]] = {
    "lasso": (lambda: ours.Lasso(0.1).fit(X, Y), "smooth objectives"),
    "collinear": (lambda: ours.LinearRegression().fit(X[:, [0, 0]], Y), "not unique"),
    "kernel": (lambda: ours.KernelRidge(max_iter=3).fit(X, Y), "holds no prompt"),
    "classes": (lambda: ours.LogisticRegression(max_iter=3).fit(X, [0, 1, 2, 0, 1, 2, 0, 1]), "smooth objectives"),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_bound_of_a_fit_is_proved_again(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save(tmp_path / "fit")
    verdict = attnc_checker.check(tmp_path / "fit")
    assert verdict.proved, verdict.reason
    assert verdict.bound is not None
    assert verdict.reproved is not None
    assert verdict.bound / 1.01 <= verdict.reproved <= verdict.bound < 1e-8
    again = ours.load(tmp_path / "fit")
    assert again.fit is not None
    assert (again.fit.weights == np.atleast_2d(model.trajectory_[-1])).all()
    assert (again.fit.inputs[-1] == model.prompt_).all()


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", NO_BOUND)
def test_a_folder_without_a_bound_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    model, reason = NO_BOUND[name]
    model().save(tmp_path / "fit")
    verdict = attnc_checker.check(tmp_path / "fit")
    assert (verdict.proved, verdict.exit_code) == (False, 1)
    assert reason in verdict.reason


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "fit"
    ours.Ridge(0.1, method="chebyshev").fit(X, Y).save(folder)
    return folder


def forged(honest: Path, place: Path, tensors: dict[str, Callable[..., Any]], stated: dict[str, Any]) -> Path:
    """Write the folder with other tensors, their hashes recomputed, and other statements about the fit."""
    shutil.copytree(honest, place)
    certificate = json.loads((place / "certificate.json").read_text())
    for file, change in tensors.items():
        arrays = load_file(place / file)
        change(arrays)
        save_file(arrays, place / file)
        digest = hashlib.sha256((place / file).read_bytes()).hexdigest()
        if file == "fit.safetensors":
            certificate["fit"]["sha256"] = digest
        else:
            certificate["weights_sha256"] = digest
    certificate["fit"] |= stated
    (place / "certificate.json").write_text(json.dumps(certificate))
    return place


def moved(name: str, place: tuple[int, ...], factor: float) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        found = next(each for each in arrays if each.endswith(name))
        arrays[found] = arrays[found].copy()
        arrays[found][np.nonzero(arrays[found]) if place == () else place] *= factor

    return change


def repeat_of(config: dict[str, Any]) -> dict[str, Any]:
    return next(part for part in config["program"]["layers"] if part["kind"] == "repeat")


def longer(arrays: dict[str, np.ndarray]) -> None:
    """Make the step of the second turn longer. The steps after it forgive a small change."""
    name = next(each for each in arrays if each.endswith("turns.1.weight.values"))
    arrays[name] = arrays[name].copy()
    arrays[name][1] *= 3


FORGERIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a coefficient": ({"fit.safetensors": moved("weights", (0, 1), 1 + 1e-9)}, {}),
    "the prompt": ({"fit.safetensors": moved("input1", (3, 0), 1 + 1e-9)}, {}),
    "a target": ({"fit.safetensors": moved("input1", (3, 3), 1 + 1e-9)}, {}),
    "the first weights": ({"fit.safetensors": lambda arrays: arrays.update(input0=np.ones(2))}, {}),
    "a weight": ({"model.safetensors": moved("W_Q", (), 1 + 1e-6)}, {}),
    "a value": ({"model.safetensors": moved("W_V", (), 1 + 1e-6)}, {}),
    "a step": ({"model.safetensors": longer}, {}),
    "a smaller bound": ({}, {"bound": 1e-14}),
    "another penalty": ({}, {"penalty": [0.2, 0.2]}),
    "another factor": ({}, {"factor": 0.25}),
    "a mean": ({}, {"mean": True}),
    "another loss": ({}, {"loss": "poisson"}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_fit_is_refused(honest: Path, name: str, tmp_path: Path) -> None:
    assert attnc_checker.check(honest).proved
    verdict = attnc_checker.check(forged(honest, tmp_path / "forged", *FORGERIES[name]))
    assert (verdict.proved, verdict.exit_code) == (False, 1), verdict.reason
    assert "of the optimum, and the claim is" in verdict.reason


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda c: repeat_of(c).update(count=3), "values' is F64"),
        ("config.json", lambda c: repeat_of(c).update(count=10**6), "more than"),
        ("config.json", lambda c: repeat_of(c).update(turns=3), "the fields of layers"),
        ("config.json", lambda c: c["domain"].update(x=1.0), "differ in the domain"),
        ("config.json", lambda c: c.update(format="attnc.incontext/1"), "check it with the version of attnc"),
        ("config.json", lambda c: c.update(same={"a": "b"}), "equals no stored tensor"),
        ("config.json", lambda c: c["program"].update(output_shape=[1]), "output"),
        ("certificate.json", lambda c: c["fit"].update(sha256="0"), "another fit.safetensors"),
        ("certificate.json", lambda c: c.update(weights_sha256="0"), "another model.safetensors"),
        ("certificate.json", lambda c: c["fit"].update(loss="cubic"), "is not one of"),
        ("certificate.json", lambda c: c["fit"].update(note=""), "has not the fields"),
        ("certificate.json", lambda c: c["fit"].update(penalty=[-1.0, 0.0]), "penalties"),
        ("certificate.json", lambda c: c["fit"].update(bound="small"), "not a number"),
        ("certificate.json", lambda c: c.pop("fit"), "states no bound"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    honest: Path, file: str, change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    shutil.copytree(honest, tmp_path / "fit")
    data = json.loads((tmp_path / "fit" / file).read_text())
    change(data)
    (tmp_path / "fit" / file).write_text(json.dumps(data))
    verdict = attnc_checker.check(tmp_path / "fit")
    assert not verdict.proved
    assert verdict.decided
    assert re.search(message, verdict.reason), verdict.reason


def test_a_time_limit_decides_nothing(honest: Path) -> None:
    verdict = attnc_checker.check(honest, seconds=1e-9)
    assert (verdict.proved, verdict.decided) == (False, False)
    assert "--seconds" in verdict.reason


def test_verify_takes_the_folder_and_no_shards(honest: Path) -> None:
    assert attnc.verify(honest)["proved"]
    assert not attnc_checker.check_shard(honest, 1, 2)[0].proved
