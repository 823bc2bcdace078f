"""`attnc certify-heads`: exit codes, table, JSON, and files of keys and queries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from heads.models import WIDTH, make, weights_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), "llama")


def write_csv(path: Path, rows: np.ndarray) -> Path:
    np.savetxt(path, rows, delimiter=",", header=",".join(f"c{i}" for i in range(rows.shape[1])), comments="")
    return path


def test_a_table_and_json_of_tokens(run, model: Path) -> None:
    done = run("certify-heads", model, "--layer", 0, "--tokens", "0:6", "--query-tokens", "7,8", "--leak", "0.9999999")
    assert done.code == 0, done.err
    assert "margin float32" in done.out
    assert done.out.count("safe") >= 4
    strict = run("certify-heads", model, "--layer", 0, "--tokens", "0:6", "--query-tokens", "7,8", "--json")
    facts = json.loads(strict.out)
    assert strict.code == (0 if facts["is_safe"] else 1) == 1
    assert [head["name"] for head in facts["heads"]] == [f"head {i}" for i in range(4)]
    assert all(0 <= head["leaks"]["float32"] <= 1.0001 for head in facts["heads"])


def test_files_of_keys_queries_and_corners(run, model: Path, tmp_path: Path) -> None:
    rows = weights_of("llama", 3.0)["embed_tokens.weight"].astype(np.float64)
    keys, queries = write_csv(tmp_path / "keys.csv", rows[:6]), tmp_path / "queries.safetensors"
    save_file({"queries": rows[7:9], "other": np.zeros(1)}, queries)
    by_files = run("certify-heads", model, "--layer", 0, "--keys", keys, "--queries", queries, "--json")
    by_ids = run("certify-heads", model, "--layer", 0, "--tokens", "0:6", "--query-tokens", "7,8", "--json")
    assert json.loads(by_files.out)["heads"] == json.loads(by_ids.out)["heads"]
    corners = write_csv(tmp_path / "corners.csv", np.stack([rows[7], rows[7]]))
    options = ("--only-heads", "1,3", "--json")
    boxed = run(
        "certify-heads", model / "model.safetensors", "--layer", 0, "--keys", keys, "--corners", corners, *options
    )
    point = run("certify-heads", model, "--layer", 0, "--tokens", "0:6", "--query-tokens", "7", *options)
    gaps = [[head["gap"] for head in json.loads(done.out)["heads"]] for done in (boxed, point)]
    assert len(gaps[0]) == 2
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--keys FILE or --tokens IDS"),
        (("--tokens", "0:6"), "--queries FILE or --query-tokens IDS"),
        (("--tokens", "0:6", "--query-tokens", "x"), "numbers and ranges"),
        (("--tokens", "5:5", "--query-tokens", "1"), "no number"),
        (("--tokens", "0:999999999", "--query-tokens", "1"), "more than"),
        (("--keys", "missing.csv", "--query-tokens", "1"), "missing"),
        (("--tokens", "0:6", "--corners", "c.csv", "--query-tokens", "1"), "leave --queries"),
        (("--tokens", "0:6", "--query-tokens", "1", "--only-heads", "9"), "head 9"),
    ],
)
def test_bad_usage_ends_in_a_sentence_and_code_2(run, model: Path, options: tuple[str, ...], message: str) -> None:
    done = run("certify-heads", model, "--layer", 0, *options)
    assert done.code == 2
    assert message in done.err


def test_keys_of_another_width(run, model: Path, tmp_path: Path) -> None:
    keys = write_csv(tmp_path / "keys.csv", np.zeros((2, WIDTH + 1)))
    done = run("certify-heads", model, "--layer", 0, "--keys", keys, "--query-tokens", "1")
    assert done.code == 2
    assert "rows of 32 numbers" in done.err
