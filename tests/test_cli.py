from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import attnc
from attnc.cli import main, output
from attnc.cli.reading import shield_expression

ATTNC = Path(sys.executable).with_name("attnc")


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ending:
            main(list(arguments))
        code = ending.value.code
        return Ran(0 if code is None else int(code), *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nets") / "net"
    attnc.compile("sin(x)+cos(y)", box={"x": (-3, 3), "y": (-3, 3)}, eps=0.3).save(path)
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nets") / "pair"
    attnc.compile("(x, 2+x**2)", box={"x": (-1, 1)}, eps=0.3, dtype="float32").save(path)
    return path


def is_clean(ran: Ran) -> bool:
    return "Traceback" not in ran.err + ran.out


# --- compile ----------------------------------------------------------------------------------------------------------


def test_compile_prints_what_matters(run, tmp_path: Path) -> None:
    ran = run(
        "compile", "sin(x)+cos(y)", "--box", "x=-3:3", "--box", "y=-3:3", "--eps", "0.5", "--out", str(tmp_path / "n")
    )
    assert ran.code == 0
    assert ran.err == ""
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
    assert (found["complete"], found["num_stages"]) == (True, 0)
    assert found["num_heads"] == found["num_attention_layers"] == 1


@pytest.mark.parametrize("expression", ["-x", "-(x)", "-x**2", "-1*x", "-exp(x)", "--x", "--x**2", "--(x)", "-.5*x"])
@pytest.mark.parametrize("place", ["first", "last", "middle", "equals"])
def test_an_expression_may_begin_with_a_minus(run, expression: str, place: str) -> None:
    arguments = {
        "first": [expression, "--box", "x=-1:1", "--eps", "0.5", "--json"],
        "last": ["--json", "--box", "x=-1:1", "--eps", "0.5", expression],
        "middle": ["--box", "x=-1:1", expression, "--json", "--eps", "0.5"],
        "equals": ["--box=x=-1:1", "--eps=0.5", expression, "--json"],
    }[place]
    ran = run("compile", *arguments)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["expression"] == expression


def test_two_dashes_still_end_the_options(run) -> None:
    ran = run("compile", "--box", "x=-1:1", "--eps", "0.5", "--json", "--", "-x")
    assert ran.json["expression"] == "-x"


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


def test_a_mistyped_short_option_is_not_an_expression(run) -> None:
    ran = run("compile", "x", "--box", "x=-1:1", "-eps", "0.1")
    assert ran.code == 2
    assert "No such option" in ran.err


def test_shielding_leaves_option_values_alone() -> None:
    options = {"--eps": True, "--box": True, "--json": False}
    assert shield_expression(["--eps", "-1", "x"], options) == ["--eps", "-1", "x"]
    assert shield_expression(["-x", "--eps", "-1"], options) == ["--eps", "-1", "--", "-x"]
    assert shield_expression(["--json", "-x"], options) == ["--json", "--", "-x"]
    assert shield_expression(["--eps"], options) == ["--eps"]
    assert shield_expression(["-"], options) == ["-"]
    assert shield_expression([], options) == []


@pytest.mark.parametrize("eps", ["-1", "0", "nan", "inf"])
def test_eps_reaches_the_validation(run, eps: str) -> None:
    for arguments in (["--eps", eps], [f"--eps={eps}"]):
        ran = run("compile", "x", "--box", "x=0:1", *arguments)
        assert ran.code == 2
        assert ran.err.startswith("error: eps must be a finite number")
        assert ran.out == ""


def test_values_that_are_no_numbers_are_usage_errors(run) -> None:
    ran = run("compile", "x", "--box", "x=0:1", "--eps", "small")
    assert ran.code == 2
    assert "--eps" in ran.err


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
        (["y=0:1"], "the variable x of 'x' has no box"),
        ([], "--box: state the range of every variable"),
    ],
)
def test_a_bad_box_is_named(run, boxes: list[str], message: str) -> None:
    ran = run("compile", "x", *(word for box in boxes for word in ("--box", box)))
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert ran.out == ""
    assert is_clean(ran)


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


def test_a_range_may_be_infinite(run) -> None:
    ran = run("compile", "tanh(x)", "--box", "x=-inf:inf", "--eps", "1e-3", "--json")
    assert ran.code == 0
    assert ran.json["box"] == {"x": ["-inf", "inf"]}
    assert ran.json["observed"] <= ran.json["bound"] <= 1e-3
    ran = run("compile", "tanh(x)*y", "--box", "x=0:inf", "--box", "y=0:1")
    assert (ran.code, ran.out) == (2, "")
    assert "not finite" in ran.err


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
    assert ran.err.startswith("error: cannot bring the bound to eps=0.001")
    ran = run(*arguments, "--json")
    assert ran.code == 1
    error = ran.json["error"]
    assert error["type"] == "BoundNotMet"
    assert error["bound"] > error["eps"] == 1e-3
    (lo, hi) = error["worst_box"]["x"]
    assert 0 <= lo < hi <= 3


def test_infinite_numbers_become_null(run, monkeypatch) -> None:
    def refuse(*args, **options):
        raise attnc.BoundNotMet("no", eps=0.1, bound=math.inf, worst_box=None)

    monkeypatch.setattr(attnc, "compile", refuse)
    ran = run("compile", "x", "--box", "x=0:1", "--json")
    assert ran.code == 1
    assert ran.json["error"]["bound"] is None


def test_out_is_checked_before_the_work(run, tmp_path: Path, monkeypatch) -> None:
    def never(*args, **options):
        raise AssertionError("compiled")

    monkeypatch.setattr(attnc, "compile", never)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    for name in ("file", "folder", "missing/net"):
        ran = run("compile", "x", "--box", "x=0:1", "--out", str(tmp_path / name))
        assert ran.code == 2
        assert "--out" in ran.err
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.tex").read_text() == "mine"


def test_a_saved_network_is_replaced(run, tmp_path: Path) -> None:
    for eps in ("0.5", "0.25"):
        ran = run("compile", "x", "--box", "x=0:1", "--eps", eps, "--out", f"{tmp_path}/net/")
        assert ran.code == 0
        assert attnc.load(tmp_path / "net").eps == float(eps)
    assert [entry.name for entry in tmp_path.iterdir()] == ["net"]


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
    again = run(*arguments, "--json") if "--" not in arguments else run(arguments[0], "--json", *arguments[1:])
    assert again.json == first.json
    assert Path("a b/model.safetensors").read_bytes() == weights


def test_float32_is_named(run) -> None:
    ran = run("compile", "x", "--box", "x=0:1", "--eps", "0.1", "--dtype", "float32")
    assert "proven on the whole box in float32" in ran.out


# --- eval -------------------------------------------------------------------------------------------------------------


def test_eval_prints_value_and_bound(run, net: Path) -> None:
    ran = run("eval", str(net), "x=0.5", "y=1")
    assert (ran.code, ran.err) == (0, "")
    value, bound = (float(part) for part in ran.out.split("±"))
    network = attnc.load(net)
    assert value == network(np.array([[0.5, 1.0]]))[0]
    assert bound >= network.certificate.bound
    assert abs(value - math.sin(0.5) - math.cos(1)) <= bound
    assert run("eval", str(net), "y=1", "x=0.5").out == ran.out


def test_eval_as_json(run, net: Path) -> None:
    found = run("eval", str(net), "x=pi/4", "y=-1e-3", "--json").json
    network = attnc.load(net)
    assert found["point"] == {"x": math.pi / 4, "y": -1e-3}
    assert found["value"] == network(np.array([[math.pi / 4, -1e-3]]))[0]
    assert found["bound"] == network.certificate.bound
    assert found["dtype"] == "float64"
    assert found["outputs"] == [{"name": "out", "value": found["value"], "bound": found["bound"]}]


def test_several_outputs_have_a_line_each(run, pair: Path) -> None:
    ran = run("eval", str(pair), "x=0.25")
    first, second = ran.out.splitlines()
    assert first.startswith("out[0] = ")
    assert second.startswith("out[1] = ")
    bound = attnc.load(pair).certificate.bound
    for line, true in ((first, 0.25), (second, 2 + 0.25**2)):
        value = float(line.split("=")[1].split("±")[0])
        assert abs(value - true) <= bound + 1e-6
    found = run("eval", str(pair), "x=0.25", "--json").json
    assert [row["name"] for row in found["outputs"]] == ["out[0]", "out[1]"]
    assert found["value"] == [row["value"] for row in found["outputs"]]


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["x=1"], "no value for y"),
        (["x=1", "y=2", "z=3"], "z is not a variable of this network (its variables: x, y)"),
        (["x=1", "x=2", "y=1"], "'x=2': x has a value already, 1"),
        (["x", "y=1"], "'x': expected NAME=VALUE"),
        (["=1", "y=1"], "'=1': expected NAME=VALUE"),
        (["x=one", "y=1"], "'x=one': 'one' is not a number"),
        (["x=", "y=1"], "'x=': '' is not a number"),
        (["x=nan", "y=1"], "nan is not finite"),
        (["x=4", "y=1"], "outside the box"),
    ],
)
def test_bad_points_are_refused(run, net: Path, assignments: list[str], message: str) -> None:
    ran = run("eval", str(net), *assignments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert message in ran.err


def test_points_outside(run, net: Path) -> None:
    clamped = run("eval", str(net), "x=4", "y=1", "--outside", "clamp")
    assert clamped.out == run("eval", str(net), "x=3", "y=1").out
    assert "moved into the box, to x = 3, y = 1" in clamped.err
    allowed = run("eval", str(net), "x=4", "y=1", "--outside", "allow")
    assert allowed.code == 0
    assert "±" not in allowed.out
    assert "no bound" in allowed.out
    found = run("eval", str(net), "x=4", "y=1", "--outside", "allow", "--json").json
    assert found["bound"] is None
    assert found["inside"] is False
    wrong = run("eval", str(net), "x=1", "y=1", "--outside", "maybe")
    assert wrong.code == 2
    assert "outside must be one of" in wrong.err


def test_what_is_no_network_is_refused(run, tmp_path: Path) -> None:
    for command in (["eval", str(tmp_path / "none"), "x=1"], ["info", str(tmp_path)]):
        ran = run(*command)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("error: ")
        assert run(*command, "--json").json["error"]["type"] == "FileError"


# --- info, demo, and the program itself -------------------------------------------------------------------------------


def _share(part: float) -> str:
    return "< 0.1 %" if part < 0.001 else f"{100 * part:.1f} %"


def test_info_shows_layers_and_ledger(run, net: Path) -> None:
    ran = run("info", str(net))
    network = attnc.load(net)
    assert (ran.code, ran.err) == (0, "")
    for needed in (
        *(layer.name for layer in network.program.layers),
        f"{network.num_anchors:,} anchors",
        f"{network.num_parameters:,} parameters",
        *(term.name for term in network.certificate.terms),
        "share",
        *(_share(term.value / network.certificate.bound) for term in network.certificate.terms),
        "Assumptions",
        f"{network.certificate.observed:.3g}",
    ):
        assert needed in ran.out
    squeezed = " ".join(ran.out.split())
    for sentence in network.certificate.assumptions:
        assert sentence[:60] in squeezed


def test_info_as_json(run, net: Path) -> None:
    found = run("info", str(net), "--json").json
    assert [row["name"] for row in found["layers"]] == [layer.name for layer in attnc.load(net).program.layers]
    assert sum(term["share"] for term in found["terms"]) == pytest.approx(1)
    assert found["assumptions"]
    assert found["observed"] <= found["bound"]


def test_a_strangers_network_cannot_write_escape_codes(run, net: Path, tmp_path: Path) -> None:
    import dataclasses

    hostile = dataclasses.replace(attnc.load(net), expression="x\x1b]0;boo\x07[bold]", construction="\x1b[31mred")
    hostile.save(tmp_path / "net")
    ran = run("info", str(tmp_path / "net"))
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "[bold]" in ran.out


def test_demo_goes_where_it_is_told(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnc.plots.plot", lambda network, path: path.write_bytes(b"png"))
    ran = run("demo", "--json")
    assert ran.code == 0
    assert [Path(path) for path in ran.json["figures"]] == [Path("demo/demo.png"), Path("demo/demo-fine.png")]
    assert run("demo", "--out", "other").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "other"]
    (tmp_path / "taken").write_text("mine")
    assert run("demo", "--out", "taken").code == 2


def test_version_and_help(run) -> None:
    assert run("--version").out == f"attnc {attnc.__version__}\n"
    ran = run("--help")
    assert ran.code == 0
    for command in ("compile", "eval", "info", "demo"):
        assert command in ran.out
        page = run(command, "--help")
        assert page.code == 0
        assert "--json" in page.out
    assert 'attnc compile "-x**2"' in run("compile", "--help").out


def test_usage_errors_exit_2(run) -> None:
    for arguments in (["nonsense"], ["eval"], ["compile"], ["info"], ["compile", "x", "y", "--box", "x=0:1"]):
        ran = run(*arguments)
        assert ran.code == 2
        assert ran.out == ""
        assert is_clean(ran)


def test_running_out_of_memory_is_an_error(run, monkeypatch) -> None:
    def too_much(*args, **options):
        raise MemoryError

    monkeypatch.setattr(attnc, "compile", too_much)
    ran = run("compile", "x", "--box", "x=0:1")
    assert ran.code == 2
    assert ran.err.startswith("error: not enough memory")


def test_an_interrupt_exits_130_quietly(run, monkeypatch) -> None:
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(attnc, "compile", interrupted)
    assert run("compile", "x", "--box", "x=0:1") == (130, "", "")


def test_a_real_interrupt(tmp_path: Path) -> None:
    program = (
        "import attnc, signal, time\n"
        "from attnc.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where tests run in the background
        "def slow(*a, **k):\n"
        "    open('ready', 'w').close()\n"
        "    time.sleep(60)\n"
        "attnc.compile = slow\n"
        "main(['compile', 'x', '--box', 'x=0:1'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, b"", b"")


def call(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([ATTNC, *arguments], cwd=cwd, capture_output=True, env={**os.environ, **environment})


def test_the_installed_program(tmp_path: Path) -> None:
    made = call("compile", "-x**2", "--box", "x=-1:1", "--eps", "0.1", "--out", "net", cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, b"")
    value = call("eval", "net", "x=0.5", cwd=tmp_path, PYTHONIOENCODING="utf-8")
    assert value.returncode == 0
    assert "±" in value.stdout.decode("utf-8")
    refused = call("compile", "sin(9*x)", "--box", "x=0:1", "--eps", "1e-9", "--max-anchors", "3", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith(b"error: ")
    assert call("compile", "x", "--box", "x=1:0", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["eval", "x=1", "y=1"]])
def test_a_closed_pipe_is_no_bound_not_met(net: Path, arguments: list[str]) -> None:
    command = [ATTNC, arguments[0], net, *arguments[1:]]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_no_encoding_makes_it_fail(tmp_path: Path) -> None:
    made = call(
        "compile", "x", "--box", "x=0:1", "--eps", "0.5", "--out", "net", cwd=tmp_path, PYTHONIOENCODING="ascii"
    )
    assert (made.returncode, made.stderr) == (0, b"")
    assert call("info", "net", cwd=tmp_path, PYTHONIOENCODING="latin-1").returncode == 0
    broken = subprocess.run(
        [ATTNC, b"compile", b"\xff", b"--box", b"x=0:1", b"--json"], cwd=tmp_path, capture_output=True
    )
    assert broken.returncode == 2
    assert b"Traceback" not in broken.stderr
    assert json.loads(broken.stdout)["error"]["type"] == "ExpressionError"


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from attnc.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    heavy = [n for n in ('torch', 'matplotlib', 'sympy', 'scipy', 'onnx') if n in sys.modules]\n"
        "    assert not heavy, heavy\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal_when_work_lasts(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(output, "SHOW_PROGRESS_AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar() as progress:
        assert progress is not None
        progress("sampling", 0.25)
        deadline = time.monotonic() + 10
        while "sampling" not in sys.stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "sampling" in sys.stderr.getvalue()
    assert "25%" in sys.stderr.getvalue()


def test_short_work_and_pipes_show_no_progress(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar() as progress:
        assert progress is not None
        progress("sampling", 0.25)
    assert sys.stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with output.progress_bar() as progress:
        assert progress is None


def test_a_norm_bound_is_not_printed_at_a_point(run, tmp_path):
    """An L2 bound says nothing about one point: eval must not print it as ±."""
    net = str(tmp_path / "net")
    made = run("compile", "sign(x)", "--box", "x=-1:1", "--eps", "0.2", "--norm", "2", "--out", net)
    assert made.code == 0, made.err
    assert "L2 norm" in made.out
    assert "no bound" in run("eval", net, "x=0.5").out
    facts = json.loads(run("info", net, "--json").out)
    assert facts["norm"] == "2"
    assert facts["bound"] <= 0.2


def test_export_prints_the_parity(run, net, tmp_path):
    pytest.importorskip("onnxruntime")
    out = tmp_path / "net.onnx"
    ran = run("export", str(net), "--to", "onnx", "--out", str(out), "--json")
    assert ran.code == 0, ran.err
    assert out.stat().st_size > 1000
    assert ran.json["is_within"]
    assert ran.json["difference"] <= ran.json["allowed"] < 1e-6
    assert run("export", str(net), "--to", "tflite", "--out", str(out)).code == 2
    assert run("export", str(tmp_path / "nothing"), "--to", "onnx", "--out", str(out)).code == 2


def test_eval_beyond_the_core_of_an_infinite_box_says_that_rounding_is_not_counted(run, tmp_path):
    attnc.compile("silu(x)", box={"x": (-math.inf, math.inf)}, eps=1e-3).save(tmp_path / "net")
    assert "exact arithmetic" not in run("eval", str(tmp_path / "net"), "x=1").out
    assert "in exact arithmetic, rounding beyond [" in run("eval", str(tmp_path / "net"), "x=12345.678").out
    for x, is_counted in ((1, True), (12345.678, False)):
        assert run("eval", str(tmp_path / "net"), f"x={x}", "--json").json["rounding_included"] is is_counted


def test_what_is_said_of_a_second_dtype_on_an_infinite_box(run, tmp_path):
    attnc.compile("tanh(x)", box={"x": (-math.inf, math.inf)}, eps=1e-3, also="float32").save(tmp_path / "net")
    shown = run("info", str(tmp_path / "net")).out.replace("│", " ")
    line = " ".join(shown.split("in float32 ")[1].split("╰")[0].split())
    assert "in exact arithmetic beyond" in line


def test_what_is_said_of_small_things(run, tmp_path):
    """An identity, a sum of one term and its negative, a function without a gate, a folder that cannot be made."""
    passed_on = run("compile", "x", "--box", "x=-1:1", "--out", str(tmp_path / "x")).out
    assert "0 heads; " not in passed_on
    assert "0  proven on the whole box" in passed_on
    run(
        "compile",
        "max(x,y)+sin(x*y)",
        "--box",
        "x=-1:1",
        "--box",
        "y=-1:1",
        "--construction",
        "compose",
        "--out",
        str(tmp_path / "m"),
    )
    assert "relu(y - x)" in run("info", str(tmp_path / "m")).out
    assert "On a finite box construction='compose' takes" in run("compile", "sin(x)", "--box", "x=-inf:inf").err
    refused = run("compile", "x", "--box", "x=-1:1", "--out", "/proc/net-of-attnc")
    assert refused.code == 2
    assert ".new" not in refused.err
