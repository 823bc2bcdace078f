"""`attnc compile`: its output, its files and its refusals."""

from __future__ import annotations

import math
import os
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest

import attnc
from attnc.cli.options import shield_expression
from attnc.constructions.catalogue import CATALOGUE
from cli.running import is_clean


def test_compile_prints_what_matters(run, tmp_path: Path) -> None:
    boxes = ("--box", "x=-3:3", "--box", "y=-3:3")
    ran = run("compile", "sin(x)+cos(y)", *boxes, "--eps", "0.5", "--out", tmp_path / "n")
    assert (ran.code, ran.err) == (0, "")
    network = attnc.load(tmp_path / "n")
    for needed in (
        "sin(x)+cos(y)",
        "x ∈ [-3, 3], y ∈ [-3, 3]",
        "compose",
        f"{network.num_anchors:,} anchors",
        "2 heads",
        "3 layers",
        f"{network.num_parameters:,} parameters",
        "proven on the whole box in float64",
        "at samples; no proof",
        "arithmetic",
        "saved",
    ):
        assert needed in ran.out


def test_compile_as_json(run, tmp_path: Path) -> None:
    ran = run("compile", "x*y", "--box", "x=0:1", "--box", "y=0:2", "--eps", "0.25", "--json")
    assert ran.code == 0
    found = ran.json
    assert found["name"] == found["expression"] == "x*y"
    assert found["box"] == {"x": [0, 1], "y": [0, 2]}
    assert found["variables"] == ["x", "y"]
    assert found["observed"] <= found["bound"] <= found["eps"] == 0.25
    assert math.isclose(sum(term["value"] for term in found["terms"]), found["bound"])
    assert (found["dtype"], found["method"], found["out"]) == ("float64", "proof", None)
    assert (found["complete"], found["num_stages"], found["num_points"]) == (True, 0, None)
    assert found["num_heads"] == found["num_attention_layers"] == 1


@pytest.mark.parametrize("expression", ["-x", "-(x)", "-x**2", "-1*x", "-exp(x)", "--x", "--x**2", "--(x)", "-.5*x"])
@pytest.mark.parametrize("place", ["first", "last", "middle", "equals", "dashes"])
def test_an_expression_may_begin_with_a_minus(run, expression: str, place: str) -> None:
    arguments = {
        "first": [expression, "--box", "x=-1:1", "--eps", "0.5", "--json"],
        "last": ["--json", "--box", "x=-1:1", "--eps", "0.5", expression],
        "middle": ["--box", "x=-1:1", expression, "--json", "--eps", "0.5"],
        "equals": ["--box=x=-1:1", "--eps=0.5", expression, "--json"],
        "dashes": ["--box", "x=-1:1", "--eps", "0.5", "--json", "--", expression],
    }[place]
    ran = run("compile", *arguments)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["expression"] == expression


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--box", "x=-1:1", "--epss", "0.1"],
        ["-x", "--box", "x=-1:1", "--epss", "0.1"],
        ["-x**2", "--box", "x=-1:1", "--epss=0.1"],
        ["--epss", "0.1", "x", "--box", "x=-1:1"],
    ],
)
def test_a_mistyped_option_gets_a_usage_error_with_a_suggestion(run, arguments: list[str]) -> None:
    ran = run("compile", *arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert "No such option" in ran.err
    assert "--epss" in ran.err
    assert re.search(r"--eps\b", ran.err)
    as_json = run("compile", *arguments, "--json")
    assert as_json.code == 2
    assert as_json.json["error"]["type"] == "UsageError"
    assert "--epss" in as_json.json["error"]["message"]


def test_shielding_leaves_option_values_alone() -> None:
    options = {"--eps": True, "--box": True, "--json": False}
    assert shield_expression(["--eps", "-1", "x"], options) == ["--eps", "-1", "x"]
    assert shield_expression(["-x", "--eps", "-1"], options) == ["--eps", "-1", "--", "-x"]
    assert shield_expression(["--json", "-x"], options) == ["--json", "--", "-x"]
    assert shield_expression(["--eps"], options) == ["--eps"]
    assert shield_expression(["-x", "--eps"], options) == ["--eps"], "not the value --"
    assert shield_expression(["-"], options) == ["-"]
    assert shield_expression([], options) == []


@pytest.mark.parametrize("eps", ["-1", "0", "nan", "inf"])
def test_eps_reaches_the_validation(refused, eps: str) -> None:
    for arguments in (["--eps", eps], [f"--eps={eps}"]):
        message = refused("compile", "x", "--box", "x=0:1", *arguments)
        assert message.startswith("error: eps must be a finite number")


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (["x=3:-3"], "--box x=3:-3: the range is reversed"),
        (["x=1:1"], "--box x=1:1: the range is empty"),
        (["x=1"], "--box x=1: expected NAME=LO:HI"),
        (["x"], "--box x: expected NAME=LO:HI"),
        (["=0:1"], "--box =0:1: expected NAME=LO:HI"),
        (["x=0:1:2"], "--box x=0:1:2: expected NAME=LO:HI"),
        (["3=0:1"], "--box 3=0:1: expected NAME=LO:HI"),
        (["x=:1"], "--box x=:1: '' is not a number"),
        (["x=a:b"], "--box x=a:b: 'a' is not a number"),
        (["x=0:__import__('os')"], "is not a number"),
        (["x=0:(1,2)"], "is not a number"),
        (["x=nan:1"], "--box x=nan:1: nan is not finite"),
        (["x=0:1e999"], "--box x=0:1e999"),
        (["x=0:1/0"], "--box x=0:1/0"),
        (["x=0:1", "x=0:2"], "--box x=0:2: x has a range already, 0:1"),
        (["x=0:1", "y=0:2"], "y is not a variable of 'x'"),
        (["x=0:1", "e=0:2"], "e is a number there"),
        (["y=0:1"], "the variable x of 'x' has no box"),
        ([], "--box: state the range of every variable"),
    ],
)
def test_a_bad_box_is_named(refused, boxes: list[str], message: str) -> None:
    assert message in refused("compile", "x", *(word for box in boxes for word in ("--box", box)))


@pytest.mark.parametrize(
    ("box", "ends"),
    [
        ("x=-pi:2*pi", (-math.pi, 2 * math.pi)),
        ("x=1e-3:.5", (1e-3, 0.5)),
        (" x = -1 : +1 ", (-1, 1)),
        ("x=-pi/4:e", (-math.pi / 4, math.e)),
    ],
)
def test_ends_may_be_constants(run, box: str, ends: tuple[float, float]) -> None:
    ran = run("compile", "x", "--box", box, "--eps", "2", "--json")
    assert ran.json["box"]["x"] == pytest.approx(ends, rel=1e-15)


def test_a_range_may_be_infinite(run, refused) -> None:
    ran = run("compile", "tanh(x)", "--box", "x=-inf:inf", "--eps", "1e-3", "--json")
    assert ran.code == 0
    assert ran.json["box"] == {"x": ["-inf", "inf"]}
    assert ran.json["observed"] <= ran.json["bound"] <= 1e-3
    assert "not finite" in refused("compile", "tanh(x)*y", "--box", "x=0:inf", "--box", "y=0:1")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["sin(x"], "ExpressionError", "never closed"),
        (["__import__('os').system('x')"], "ExpressionError", "__import__"),
        (["1/x"], "DomainError", "0"),
        (["x", "--dtype", "float16"], "InputError", "dtype must be one of"),
        (["x", "--construction", "magic"], "InputError", "construction must be auto or"),
        (["x", "--max-anchors", "0"], "InputError", "max_anchors must be"),
        (["x", "--max-bytes", "-1"], "InputError", "max_bytes must be"),
    ],
)
def test_other_errors_exit_2(run, arguments: list[str], kind: str, message: str) -> None:
    ran = run("compile", *arguments, "--box", "x=-1:1", "--eps", "0.1", "--json")
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert ran.json["error"]["type"] == kind
    assert message in ran.json["error"]["message"]
    assert message in ran.err
    assert is_clean(ran)


def test_a_bound_that_is_not_met_exits_1(run) -> None:
    arguments = ["compile", "sin(x)", "--box", "x=0:3", "--eps", "1e-3", "--max-anchors", "50"]
    assert run(*arguments).code == 0  # the cheapest needs far fewer
    arguments += ["--construction", "max_affine"]
    ran = run(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert re.match(r"error: eps=0\.0\d+ is met, eps=0\.001 is not\.\ncannot bring the bound to eps=0\.001", ran.err)
    ran = run(*arguments, "--json")
    assert ran.code == 1
    error = ran.json["error"]
    assert error["type"] == "BoundNotMet"
    assert error["met"] > error["bound"] > error["eps"] == 1e-3
    (lo, hi) = error["worst_box"]["x"]
    assert 0 <= lo < hi <= 3


def test_infinite_numbers_become_null(run, monkeypatch) -> None:
    error = attnc.BoundNotMet("no", eps=0.1, bound=math.inf, worst_box=None)
    monkeypatch.setattr(attnc, "compile", Mock(side_effect=error))
    ran = run("compile", "x", "--box", "x=0:1", "--json")
    assert ran.code == 1
    assert ran.json["error"]["bound"] is None


def test_out_is_checked_before_the_work(refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(attnc, "compile", Mock(side_effect=AssertionError("compiled")))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    for name in ("file", "folder", "missing/net"):
        assert "--out" in refused("compile", "x", "--box", "x=0:1", "--out", tmp_path / name)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.tex").read_text() == "mine"


def test_a_folder_that_may_not_be_written_to_is_refused_before_the_work(refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    monkeypatch.setattr(attnc, "compile", lambda *_, **__: pytest.fail("compiled"))
    for option, name in (("--out", "net"), ("--plot", "net.svg")):
        message = refused("compile", "x", "--box", "x=0:1", option, tmp_path / name)
        assert "may not be written to. Choose another one, or change its permissions" in message


def test_a_saved_network_is_replaced_only_by_force(run, refused, tmp_path: Path, monkeypatch) -> None:
    command = ("compile", "x", "--box", "x=0:1", "--out", f"{tmp_path}/net/")
    assert run(*command, "--eps", "0.5").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(attnc, "compile", Mock(side_effect=AssertionError("compiled")))
        message = refused(*command, "--eps", "0.25")
    assert "is a saved network already. Add --force to replace it, or choose another name" in message
    assert attnc.load(tmp_path / "net").eps == 0.5
    assert run(*command, "--eps", "0.25", "--force").code == 0
    assert attnc.load(tmp_path / "net").eps == 0.25
    assert [entry.name for entry in tmp_path.iterdir()] == ["net"]
    (tmp_path / "net" / "thesis.tex").write_text("mine")
    assert "--out" in refused(*command, "--force"), "files of others are never deleted"


@pytest.mark.parametrize("expression", ["x + y*2", "-x-y", "--x*y"])
def test_the_command_reproduces_the_network(run, tmp_path: Path, expression: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    boxes = ["--box", "x=-pi:1", "--box", "y = 0:1"]
    first = run(
        "compile", *boxes, expression, "--eps", "1.5", "--dtype", "float32", "--max-anchors", "900", "--out", "a b",
        "--json",
    )  # fmt: skip
    assert first.code == 0, first.err
    weights = Path("a b/model.safetensors").read_bytes()
    command = attnc.load("a b").command
    assert command is not None
    assert command in Path("a b/README.md").read_text(encoding="utf-8")
    name, *arguments = shlex.split(command)
    assert name == "attnc"
    again = run(arguments[0], "--json", "--force", *arguments[1:])
    assert again.json == first.json
    assert Path("a b/model.safetensors").read_bytes() == weights


def test_the_plan_lists_every_construction(run) -> None:
    rows = run("plan", "x*y", "--box", "x=-1:1", "--box", "y=-1:1", "--eps", "1e-4", "--json").json
    assert {row["name"] for row in rows} == {construction.name for construction in CATALOGUE}
    assert rows[0]["name"] in ("compose", "gates")


def test_compile_without_eps(run, refused, tmp_path: Path) -> None:
    command = ("compile", "sin(x)", "--box", "x=-3:3", "--construction", "max_affine", "--points-per-axis", "9")
    made = run(*command, "--beta", "50", "--out", tmp_path / "net")
    assert made.code == 0, made.err
    assert "the bound is reported, not enforced" in " ".join(made.out.replace("│", " ").split())
    network = attnc.load(tmp_path / "net")
    assert network.eps is None
    assert (network.num_anchors, network.parameters["beta"]) == (9, 50.0)
    assert "--eps" not in network.command
    again = run(*shlex.split(network.command)[1:], "--force", "--json").json
    assert again["bound"] == network.certificate.bound
    assert "give either eps or points_per_axis" in refused(*command, "--eps", "0.1")
    for text in ("", "9,", "-1", "2.5", "x"):
        assert "--points-per-axis" in refused(*command[:-1], text)


def test_compile_draws(run, refused, tmp_path: Path, monkeypatch) -> None:
    ran = run("compile", "x*y", "--box", "x=0:1", "--box", "y=0:1", "--plot", tmp_path / "n.svg", "--json")
    assert ran.json["plot"] == str(tmp_path / "n.svg")
    assert (tmp_path / "n.svg").read_bytes().startswith(b"<?xml")
    monkeypatch.setattr(attnc, "compile", Mock(side_effect=AssertionError("compiled")))
    for name in ("n.txt", "missing/n.svg"):
        assert "cannot plot to" in refused("compile", "x", "--box", "x=0:1", "--plot", tmp_path / name)


def test_a_function_without_heads_is_explained(run, tmp_path: Path) -> None:
    made = run("compile", "2*x - 1", "--box", "x=-1:1", "--out", tmp_path / "net")
    assert "0 heads" in made.out
    for shown in (made.out, run("info", tmp_path / "net").out, (tmp_path / "net" / "README.md").read_text("utf-8")):
        assert "no attention head is needed" in " ".join(shown.replace("│", " ").split())


def test_a_minus_before_a_variable_that_is_also_a_short_option(run) -> None:
    for name in "hqv":
        ran = run("compile", f"-{name}", "--box", f"{name}=0:1", "--json")
        assert ran.json["expression"] == f"-{name}"


def test_the_plan_of_a_table_and_its_options(run, refused, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("x,z\n" + "".join(f"{i},{i * i}\n" for i in range(9)))
    rows = run("plan", "--csv", table, "--inputs", "x", "--output", "z", "--eps", "1e-3", "--json").json
    assert rows[0]["name"].startswith("table_")
    assert rows[0]["why_not"] is None
    assert "there is no function" in refused("plan")
    command = ("plan", "sin(x)*y", "--box", "x=-1:1", "--box", "y=-1:1", "--eps", "0.1", "--json")
    for criterion in ("anchors", "layers"):
        costs = [row[criterion] for row in run(*command, "--criterion", criterion).json if row["why_not"] is None]
        assert costs == sorted(costs)
    limited = run(*command, "--max-anchors", "20").json
    assert all(row["anchors"] <= 20 for row in limited)
    assert "criterion must be one of" in refused(*command[:-1], "--criterion", "beauty")


@pytest.mark.parametrize(("seconds", "code", "words"), [("1e-6", 1, "--seconds 4e-06"), ("0", 2, "seconds must be")])
def test_a_time_limit_is_kept_or_refused(run, seconds, code, words) -> None:
    for command in ("compile", "plan"):
        ran = run(command, "sin(x)*exp(x)", "--box", "x=0:1", "--eps", "1e-6", "--seconds", seconds)
        told = ran.err if command == "compile" or code == 2 else ran.out
        assert (ran.code, is_clean(ran)) == (code if command == "compile" or code == 2 else 0, True)
        assert (words if command == "compile" or code == 2 else "the time ran out") in told


def test_a_bound_of_gradients_is_printed_saved_and_verified(run, tmp_path: Path) -> None:
    asked = ("--box", "x=-1:1", "--eps", "1e-3", "--norm", "C1", "--gradient-eps", "0.05", "--out", tmp_path / "n")
    ran = run("compile", "relu(x)", *asked)
    assert (ran.code, ran.err) == (0, "")
    assert "for every partial derivative" in ran.out.replace("\n", " ")
    claim = attnc.load(tmp_path / "n").certificate
    assert claim.gradient_eps == 0.05
    assert "Where the bound of partial derivatives comes from" in run("info", tmp_path / "n").out
    facts = run("info", tmp_path / "n", "--json").json
    assert facts["gradient_bound"] == claim.gradient_bound
    assert facts["excluded"][0]["argument"] == "x"
    assert run("verify", tmp_path / "n").code == 0


def test_gradient_eps_without_its_norm_is_refused(run) -> None:
    ran = run("compile", "sin(x)", "--box", "x=-1:1", "--gradient-eps", "0.1")
    assert ran.code == 2
    assert "norm='C1'" in ran.err
