"""A slice of `make attack`: a few random cases of every kind and forgeries of every family, always the same ones."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

import attnc
from attack import forged, grammar, honest
from attack.__main__ import main
from attack.files import Files
from attack.forged import Forgery
from attack.forging import FAMILIES
from attack.honest import Attack
from attack.oracle import Truth, judge
from attack.tally import Tally
from attnc_checker import check

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about arrays that it could write to
SEED = 29
NO_HINTS = np.zeros((0, 0))


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    monkeypatch.setattr(honest, "MOST_POINTS", 400)


@pytest.mark.parametrize("number", range(len(grammar.KINDS)), ids=[kind.__name__ for kind in grammar.KINDS])
def test_honest_networks_keep_their_bounds_and_are_proved_again(number):
    found = Attack(grammar.random_case(SEED, number), number).run()
    assert found["failures"] == [], found["case"]
    assert found["end"] in ("verified", "not re-provable"), found["case"]
    assert found["comparisons"]["numpy"] > 0
    assert found["closest"] <= 1


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=list(FAMILIES))
def test_false_certificates_are_refused(number):
    found, tally = Forgery(SEED, number).run(10), Tally(SEED)
    tally.add("forged", number, {**found, "memory": 0}, 0.0)
    assert found["failures"] == [], found["case"]
    assert tally.false_ones(found["family"]) > 0, found["counts"]


# --- the attack finds the defects that it is there to find ------------------------------------------------------------


def test_a_bound_that_is_too_small_is_found(monkeypatch):
    def too_small(self: grammar.Case) -> attnc.Network:
        network = attnc.compile(self.source, self.box, self.eps)
        seen = 0.999 * network.certificate.observed
        return dataclasses.replace(network, certificate=dataclasses.replace(network.certificate, bound=seen))

    monkeypatch.setattr(grammar.Case, "compile", too_small)
    target = attnc.as_target("sin(x)", {"x": (-3, 3)})
    kinds = [
        kind
        for kind, _ in Attack(grammar.Case("smooth", "sin(x)", {"x": (-3, 3)}, 1e-3, {}, target), 0).run()["failures"]
    ]
    assert kinds == ["bound exceeded", "verify refused"]


@pytest.mark.parametrize("error", [RuntimeError("trouble"), honest.TooLong(), attnc.InputError("this is a defect")])
def test_tracebacks_and_limits_are_failures(monkeypatch, error):
    def compile_(self: grammar.Case) -> attnc.Network:
        raise error

    monkeypatch.setattr(grammar.Case, "compile", compile_)
    ((kind, _),) = Attack(grammar.random_case(SEED, 0), 0).run()["failures"]
    assert kind in ("compile traceback", "compile too long", "defect")


def test_a_checker_that_accepts_everything_is_found(monkeypatch):
    def accept(path: Any, **options: Any) -> Any:
        return dataclasses.replace(check(path, **options), proved=True, reason="")

    monkeypatch.setattr(forged, "check", accept)
    for family in ("masks", "dtypes", "rows"):
        found = Forgery(SEED, list(FAMILIES).index(family)).run(6)
        assert "false certificate accepted" in [kind for kind, _ in found["failures"]], family


def test_the_oracle_knows_true_false_and_broken(tmp_path):
    attnc.compile("exp(x)*y", {"x": (-1, 1), "y": (0, 1)}, 1e-2, construction="compose").save(tmp_path / "net")
    base, rng = Files.read(tmp_path / "net"), np.random.default_rng(0)

    def truth(**fields: Any) -> Truth:
        files = base.copy()
        files.certificate.update(fields)
        return judge(files, base, rng, NO_HINTS).truth

    assert truth() == truth(bound=2 * base.certificate["bound"]) == truth(terms=[]) == Truth.TRUE
    assert truth(bound=base.certificate["observed"] / 2, observed=None) == Truth.FALSE
    assert truth(weights_sha256="0" * 64) == truth(bound=-1.0) == truth(box={"x": [-1, 1], "y": [0, 2]}) == Truth.BROKEN
    assert truth(leaves=base.certificate["leaves"][1:]) == Truth.BROKEN
    assert truth(dtype="real") == Truth.UNDECIDED
    assert truth(leaves=3) == Truth.UNREADABLE


def test_the_oracle_evaluates_stages(tmp_path):
    attnc.compile("exp(sin(x)*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-3).save(tmp_path / "net")
    base, rng = Files.read(tmp_path / "net"), np.random.default_rng(0)
    assert base.certificate["method"] == "staged proof"

    def why(change: Any) -> str:
        files = base.copy()
        change(files.certificate)
        return judge(files, base, rng, NO_HINTS).why

    assert why(lambda claim: None) == ""
    assert "put together" in why(lambda claim: claim["outputs"].__setitem__(0, f"{claim['outputs'][0]} + 1e-9"))
    assert "off by" in why(lambda claim: claim["stages"][-1].update(bound=1e-9))
    assert "interval" in why(lambda claim: claim["stages"][-1].update(interval=[-0.1, 0.1]))


def test_the_program_counts_prints_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("attack.jobs.FORGERIES", 3)
    out = tmp_path / "attack.json"
    options = ["--seed", str(SEED), "--processes", "1", "--out", str(out)]
    assert main(["--minutes", "0.01", *options]) == 0
    first = json.loads(out.read_text())["next"]
    assert main(["--minutes", "0.01", *options]) == 0
    stored = json.loads(out.read_text())
    assert sum(stored["next"].values()) > sum(first.values()) >= 1
    assert stored["failures"] == []
    told = capsys.readouterr().out
    assert "comparisons" in told
    assert "failures: none" in told
    with pytest.raises(SystemExit, match="of the seed 29"):
        main(["--seed", "30", "--out", str(out)])
