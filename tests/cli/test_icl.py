"""`attnc icl`: tables in, coefficients beside scikit-learn's out, and errors with a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from attnc.cli.icl import MODELS, sparkline


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y = X @ [1.0, -2.0, 0.0] + 0.3 * rng.normal(size=60)
    columns = np.column_stack([X, y, y > 0, rng.poisson(np.exp(0.3 * X[:, 0] + 0.5))])
    path = tmp_path / "data.csv"
    np.savetxt(path, columns, delimiter=",", header="a,b,c,y,class,count", comments="")
    return path


@pytest.mark.parametrize("model", MODELS)
def test_every_model_agrees_with_scikit_learn(run, table, model):
    target = {"logistic": "class", "poisson": "count"}.get(model, "y")
    options = ["--alpha", "0.1"] if "alpha" in MODELS[model][1] else []
    ran = run("icl", model, "--csv", table, "--output", target, "--inputs", "a,b,c", *options, "--json")
    assert ran.code == 0, ran.err
    report = ran.json
    assert report["rows"] == 60
    assert report["layers"] > 3
    if model not in ("nadaraya-watson", "huber"):  # scikit-learn has no model of the same objective
        assert report["largest_difference"]["predictions"] <= 1e-7
    if "loss" in report:
        losses = [point["loss"] for point in report["loss"]]
        assert losses[-1] == min(losses) or losses[-1] - min(losses) <= 1e-9 * abs(losses[0])
    if model in ("ridge", "linear", "lasso"):
        assert 0 < report["bound"]["value"] < 1e-6
        assert [row["name"] for row in report["coefficients"]] == ["a", "b", "c", "(intercept)"]


def test_the_page_for_people(run, table, tmp_path):
    picture = tmp_path / "loss.svg"
    ran = run("icl", "ridge", "--csv", table, "--output", "y", "--inputs", "a,b", "--plot", picture)
    assert ran.code == 0
    for needed in (
        "by attention",
        "scikit-learn",
        "(intercept)",
        "loss per layer",
        "bound of the weights",
        "optimality",
    ):
        assert needed in ran.out
    assert picture.read_bytes().startswith(b"<?xml")


def test_all_other_columns_and_standardising(run, table):
    ran = run("icl", "linear", "--csv", table, "--output", "y", "--standardise", "--json")
    names = [row["name"] for row in ran.json["coefficients"]]
    assert names == ["a", "b", "c", "class", "count", "(intercept)"]


def test_labels_that_are_words(run, refused, tmp_path):
    path = tmp_path / "words.csv"
    path.write_text("a,b,kind\n1,2,cat\n2,1,dog\n3,5,cat\n4,4,dog\n5,0,dog\n")
    ran = run("icl", "logistic", "--csv", path, "--output", "kind", "--json")
    assert ran.code == 0, ran.err
    report = ran.json
    assert report["largest_difference"]["predictions"] == 0
    assert report["largest_difference"]["coefficients"] <= 1e-7
    path.write_text("a,kind\n1,cat\n2,\n")
    assert "line 3, column 'kind'" in refused("icl", "logistic", "--csv", path, "--output", "kind")
    path.write_text("a,kind\n1,cat\n2,dog\n")
    assert "'cat' is not a number" in refused("icl", "ridge", "--csv", path, "--output", "kind")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nothing", "--output", "y"), "there is no model"),
        (("ridge", "--output", "z"), "there is no column 'z'"),
        (("ridge", "--output", "y", "--inputs", "a,y"), "both an input and an output"),
        (("lasso", "--output", "y", "--gamma", "1"), "has no option --gamma"),
        (("ridge", "--output", "y", "--alpha", "-1"), "alpha"),
        (("ridge", "--output", "y", "--alpha", "inf"), "alpha is a penalty"),
        (("lasso", "--output", "y", "--alpha", "inf"), "alpha is a penalty"),
        (("ridge", "--output", "y", "--head-pairs", "0"), "1 to 12 pairs, found 0"),
        (("ridge", "--output", "y", "--method", "plain", "--learning-rate", "9"), "largest eigenvalue"),
        (("ridge", "--output", "y", "--max-rows", "5"), "max_rows=5"),
        (("logistic", "--output", "y"), "Unknown label type|continuous"),
        (("poisson", "--output", "y"), "counts"),
    ],
)
def test_bad_input(refused, table, arguments, complaint):
    message = refused("icl", arguments[0], "--csv", table, *arguments[1:])
    assert re.search(complaint, message), message


def test_warnings_are_printed(run, table):
    ran = run("icl", "ridge", "--csv", table, "--output", "y", "--method", "chebyshev", "--max-iter", "2")
    assert ran.code == 0
    assert "warning: 2 steps of chebyshev" in ran.out


def test_sparkline():
    assert sparkline([100.0, 10.0, 1.0, 0.1, 0.1]) == sparkline([1000.0, 100.0, 10.0, 1.0, 1.0])
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([1e9, 1.0])[0] == "█"
