"""The corpus of benchmarks/corpus.py: every way to be worse than the baseline is reported."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnc

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def corpus() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield runpy.run_path(str(BENCHMARKS / "corpus.py"), run_name="corpus")
        sys.modules.pop("corpus_cases")


@pytest.fixture
def met(corpus):
    sizes = {"num_anchors": 10, "num_parameters": 40, "leaves": 8, "stages": 0}
    errors = {"bound": 5e-4, "also_bound": 6e-4, "observed": 4e-4}
    outcome = {"method": "proof", "complete": True, "reproved": True, "compile_seconds": 1.0, "check_seconds": 2.0}
    return corpus["Record"](eps=1e-3, construction="compose", **sizes, **errors, **outcome)


@pytest.mark.parametrize(
    ("change", "word", "why"),
    [
        ({}, "equal", "^$"),
        ({"observed": 3e-4, "compile_seconds": 9.0}, "equal", "^$"),
        ({"bound": 5e-4 * (1 + 1e-7)}, "equal", "^$"),
        ({"num_anchors": 11}, "worse", "anchors 10 → 11"),
        ({"num_anchors": 11, "bound": 1e-4}, "worse", "anchors 10 → 11; closer: bound"),
        ({"bound": 1.1e-3}, "worse", "eps not met: bound 0.0005 → 0.0011"),
        ({"bound": 5.3e-4}, "worse", "looser: bound 0.0005 → 0.00053"),
        ({"bound": None, "method": "estimate"}, "worse", "bound 0.0005 → None; method proof → estimate"),
        ({"also_bound": 6.5e-4}, "worse", "looser: also_bound"),
        ({"also_bound": None}, "worse", "also_bound 0.0006 → None"),
        ({"reproved": False, "reason": "leaf 3"}, "worse", "not re-proved: leaf 3"),
        ({"error": "InputError"}, "worse", "compiled → InputError"),
        ({"error": "timed out"}, "worse", "compiled → timed out"),
        ({"eps": 1e-2}, "worse", "eps 0.001 → 0.01"),
        ({"num_anchors": 9}, "better", "anchors 10 → 9"),
        ({"num_anchors": 9, "bound": 9e-4}, "better", "anchors 10 → 9; looser: bound"),
        ({"num_anchors": 9, "also_bound": 9e-4}, "worse", "looser: also_bound"),
        ({"num_anchors": 11, "num_parameters": 39}, "worse", "anchors 10 → 11"),
        ({"num_anchors": 11, "num_parameters": 39, "construction": "graded"}, "changed", "anchors 10 → 11"),
        ({"num_anchors": 11, "construction": "graded"}, "worse", "anchors 10 → 11"),
        ({"bound": 4e-4}, "better", "closer: bound"),
        ({"bound": 5.1e-4}, "changed", "bound 0.0005 → 0.00051"),
        ({"leaves": 9, "complete": False}, "changed", "leaves 8 → 9; complete True → False"),
    ],
)
def test_a_record_against_its_baseline(corpus, met, change, word, why):
    found, reason = corpus["compared"](replace(met, **change), met)
    assert found == word
    assert re.search(why, reason)


def test_refusals_are_compared_by_their_kind_and_bound(corpus, met):
    Record, compared = corpus["Record"], corpus["compared"]
    refused = Record(1e-3, "BoundNotMet", bound=2e-3)
    assert compared(refused, refused) == ("equal", "")
    assert compared(replace(refused, bound=3e-3), refused)[0] == "worse"
    assert compared(replace(refused, bound=None), refused)[0] == "worse"
    assert compared(replace(refused, error="DomainError"), refused)[0] == "worse"
    assert compared(refused, met)[0] == "worse"
    assert compared(met, refused)[0] == "better"
    assert compared(met, Record(1e-3, "InputError"))[0] == "worse"
    assert compared(met, replace(met, reproved=False, reason="leaf 3")) == ("better", "re-proved now")


def test_a_case_that_is_missing_is_not_good(corpus, met, capsys):
    compared, tell = corpus["compared"], corpus["tell"]
    assert tell({"a": compared(met, met), "b": compared(met, None)})
    assert not tell({"a": compared(met, met), "b": compared(None, met)})
    assert not tell({"a": compared(replace(met, num_anchors=12), met)})
    assert "worse    a: anchors 10 → 12" in capsys.readouterr().out


def test_times_are_relative_to_the_calibration(corpus, met):
    slower = {"a": replace(met, compile_seconds=3.0, check_seconds=3.0), "new": met}
    assert corpus["time_ratio"](slower, {"a": met, "missing": met}, 1.0) == pytest.approx(2.0)
    assert corpus["time_ratio"](slower, {"a": met}, 2.0) == pytest.approx(1.0)


def test_a_baseline_is_read_as_it_was_written(corpus, met, tmp_path):
    records = {"sin(x)": met, "1/x": corpus["Record"](0.1, "DomainError")}
    corpus["write"](tmp_path / "baseline.json", 0.5, records)
    assert corpus["read"](tmp_path / "baseline.json") == (0.5, records)


def test_a_larger_bound_far_below_eps_is_not_worse(corpus, met):
    exact = replace(met, bound=1e-15)
    assert corpus["compared"](replace(met, bound=2e-15), exact)[0] == "changed"
    assert corpus["compared"](replace(met, bound=2e-9), exact)[0] == "worse"


def test_times_of_a_baseline_can_be_kept(corpus, met, tmp_path):
    path, name = tmp_path / "baseline.json", "auto sin(x) 1e-06"
    corpus["write"](path, 0.5, {name: met})
    smaller = replace(met, num_anchors=9, compile_seconds=4.0)
    corpus["write_some"](path, 1.0, {name: smaller}, keeps_times=True)
    assert corpus["read"](path) == (0.5, {name: replace(smaller, compile_seconds=1.0)})
    corpus["write_some"](path, 1.0, {name: smaller})
    assert corpus["read"](path)[1][name].compile_seconds == 2.0


def test_cases_and_baseline_are_the_same(corpus):
    _, stored = corpus["read"](corpus["BASELINE"])
    cases = corpus["corpus"]()
    assert list(cases) == list(stored)
    assert {name: case.eps for name, case in cases.items()} == {name: record.eps for name, record in stored.items()}


def test_every_construction_has_a_case(corpus):
    _, stored = corpus["read"](corpus["BASELINE"])
    names = {row.name for row in attnc.plan("x", {"x": (0, 1)}, 0.5)}
    assert names <= {record.construction for record in stored.values()}


def test_a_case_from_end_to_end(corpus):
    name = "auto x - 5*x + 0.1 1e-09"
    _, stored = corpus["read"](corpus["BASELINE"])
    found = corpus["measure"](corpus["corpus"]()[name])
    assert found.reproved
    assert corpus["compared"](found, stored[name])[0] in ("equal", "better", "changed")
