"""The program itself: help, usage, interrupts, pipes, encodings, progress."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import typer

import attnc
from attnc.cli import output
from attnc.cli.commands import app
from attnc.constructions.catalogue import CATALOGUE
from cli.running import is_clean

ATTNC = Path(sys.executable).with_name("attnc")
INTERRUPTED = "interrupted: no file is left half written\n"


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


def test_every_command_has_the_common_options_and_an_example(run) -> None:
    """Also those of `lab`. `-h` is `--help`, and examples are in plain sight."""
    groups = {(): run("-h").out, ("lab",): run("lab", "-h").out}
    assert groups[()] == run("--help").out
    for group, page in groups.items():
        names = re.findall(r"^│ ([a-z]+) ", page.split("Commands")[1], re.MULTILINE)
        assert len(names) >= 3
        for name in names:
            text = run(*group, name, "-h").out
            if name != "lab":
                for option in ("--json", "--quiet", "-q", "--verbose", "-v", "--help", "-h"):
                    assert option in text, (name, option)
            assert "Example" in text, name


def test_paragraphs_of_help_are_one_line_in_the_code() -> None:
    """typer keeps the line breaks of every paragraph but the first: they would break a sentence on a screen."""
    commands = typer.main.get_command(app).commands
    for name, command in [*commands.items(), *commands["lab"].commands.items()]:
        for paragraph in (command.help or "").split("\n\n")[1:]:
            assert "\n" not in paragraph.strip(), name


def test_the_help_of_compile_lists_every_choice(run) -> None:
    page = run("compile", "--help").out
    for construction in CATALOGUE:
        assert construction.name in page
    for word in ("auto", "multiply_adds", "anchors", "parameters", "layers", "float64", "float32", "grid", "adaptive"):
        assert word in page


def test_one_name_per_option() -> None:
    """An option has the same words for its value wherever it stands for the same thing."""
    commands = typer.main.get_command(app).commands
    metavars: dict[str, set[str | None]] = {}
    for name, command in [*commands.items(), *commands["lab"].commands.items()]:
        for param in command.params:
            if param.opts[0].startswith("--") and name != "lab":
                metavars.setdefault(param.opts[0], set()).add(param.metavar)
    assert not metavars.keys() & {"--figure", "--features", "--target"}
    several = {option: found for option, found in metavars.items() if len(found) > 1}
    assert several.keys() <= {"--out"}, "a folder of a network, of a run, or a file"


def test_python_m_attnc_is_the_same_program(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "attnc", "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, f"attnc {attnc.__version__}\n")
    usage = subprocess.run([sys.executable, "-m", "attnc", "eval"], capture_output=True, text=True, cwd=tmp_path)
    assert "Usage: attnc eval" in usage.stderr


def test_quiet(run, net: Path, tmp_path: Path) -> None:
    """Nothing but errors, the values of eval, and JSON."""
    made = tmp_path / "made"
    for words in (
        ("compile", "x", "--box", "x=0:1", "--out", made),
        ("info", net),
        ("verify", net),
        ("plan", "x", "--box", "x=0:1"),
        ("plot", net, "--out", tmp_path / "f.svg"),
        ("diagnose", net),
        ("lab", "list"),
    ):
        assert run(*words, "--quiet") == (0, "", ""), words
    assert run("-q", "info", made) == (0, "", "")
    value = run("eval", net, "x=4", "y=0", "--outside", "clamp", "-q")
    assert float(value.out) == attnc.load(net).at(np.array([[3.0, 0.0]]))[0, 0]
    assert value.err == "", "no note"
    assert run("eval", net, "x=1", "y=0", "-q", "--json").json["inside"]
    refused = run("eval", net, "x=4", "y=0", "-q")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: ")
    assert run("info", net).out, "quiet is not kept for the next command"


STEP = re.compile(r"^ +\d+\.\d\d s  (.*)$", re.MULTILINE)


def test_verbose_steps_of_other_commands(run, net: Path, tmp_path: Path) -> None:
    table = tmp_path / "data.csv"
    table.write_text("x,y\n" + "\n".join(f"{i},{2 * i + 1}" for i in range(8)), encoding="utf-8")
    for words, steps in {
        ("plan", "sin(x)", "--box", "x=0:1"): ["planning", "planning compose", "done"],
        ("plot", net, "--out", tmp_path / "f.svg"): ["loading", "drawing", "done"],
        ("verify", net): ["re-proving the bound in a separate process", "done"],
        ("export", net, "--to", "onnx", "--out", tmp_path / "f.onnx"): ["loading", "writing and comparing", "done"],
        ("diagnose", net): ["loading", "diagnosing", "done"],
        ("icl", "linear", "--csv", table, "--output", "y"): [
            *("reading the table", "fitting by attention", "fitting by scikit-learn", "comparing", "done"),
        ],
    }.items():
        ran = run(*words, "-v")
        assert ran.code == 0, ran.err
        printed = STEP.findall(ran.err)
        assert [step for step in printed if step in steps] == steps, printed
        assert not STEP.search(ran.out), "steps are for stderr"


def test_flags_have_no_type_in_help(run) -> None:
    for words in ((), ("lab",), ("compile",), ("lab", "run")):
        assert "bool" not in run(*words, "-h").out


def test_verbose(run, net: Path) -> None:
    """Steps with their times on stderr, in a pipe too; the traceback of an error."""
    ran = run("compile", "sin(x)", "--box", "x=0:1", "-v")
    assert ran.code == 0
    assert STEP.findall(ran.err)[0] == "compiling"
    assert {"observing", "done"} <= set(STEP.findall(ran.err))
    failed = run("compile", "sin(x", "--box", "x=0:1", "-v")
    assert failed.code == 2
    assert "Traceback" in failed.err
    assert "\nerror: the expression cannot be read" in failed.err
    both = run("info", net, "-v", "-q")
    assert (both.code, both.out) == (2, "")
    assert "give only one of them" in both.err


@pytest.mark.parametrize("is_plain", [False, True])
def test_no_color(net: Path, is_plain: bool) -> None:
    """On a terminal there are colours, unless NO_COLOR is set."""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    if is_plain:
        environment["NO_COLOR"] = "1"
    shown = b""
    for words in (["info", net], ["--help"]):
        leader, follower = pty.openpty()
        ran = subprocess.Popen([sys.executable, "-m", "attnc", *words], env=environment, stdout=follower)
        os.close(follower)
        with open(leader, "rb", buffering=0) as terminal, suppress(OSError):  # EIO at the end
            while piece := terminal.read(2**16):
                shown += piece
        assert ran.wait() == 0
    assert b"\x1b[" in shown, "bold is no colour"
    assert bool(re.search(rb"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])[;m]", shown)) != is_plain


COMPLETED = [
    ("attnc comp", ["compile"]),
    ("attnc compile --cons", ["--construction"]),
    ("attnc compile x --construction max_", ["max_affine", "max_affine_cross"]),
    ("attnc icl la", ["lasso"]),
    ("attnc lab run rate_in_h", ["rate_in_heads"]),
    ("attnc eval net --outside cl", ["clamp"]),
]


@pytest.fixture(scope="module")
def on_the_path(tmp_path_factory) -> dict[str, str]:
    """An environment in which a shell finds the program under its name."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "attnc").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m attnc "$@"\n')
    (folder / "attnc").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(("typed", "wanted"), COMPLETED)
def test_bash_completes(typed: str, wanted: list[str], on_the_path: dict[str, str], tmp_path: Path) -> None:
    """In a real bash, by the script that the program prints for it."""
    words = typed.split()
    lines = (
        "source <(_ATTNC_COMPLETE=source_bash attnc)\n"
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}\n"
        '_attnc_completion attnc; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    ran = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, cwd=tmp_path, env=on_the_path)
    assert ran.stdout.split() == wanted, ran.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script_and_completions(shell: str, on_the_path: dict[str, str], tmp_path: Path) -> None:
    """Where a shell is installed, it reads its script."""
    asked = {"COMP_WORDS": "attnc icl la", "COMP_CWORD": "2", "_TYPER_COMPLETE_ARGS": "attnc icl la"}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}

    def answer(instruction: str) -> str:
        environment = {**on_the_path, **asked, "_ATTNC_COMPLETE": f"{instruction}_{shell}"}
        return subprocess.run(["attnc"], env=environment, capture_output=True, text=True, check=True).stdout

    assert "lasso" in answer("complete")
    script = tmp_path / "script"
    script.write_text(answer("source"))
    assert "attnc" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", script], check=True)


def test_usage_errors_exit_2(run) -> None:
    for arguments, message in (
        (["nonsense"], "No such command"),
        (["eval"], "Missing argument"),
        (["compile"], "there is no function: give an expression"),
        (["compile", "x", "--box", "x=0:1", "--norm", "abc"], "'abc' is not inf or a number p ≥ 1"),
        (["info"], "Missing argument"),
        (["compile", "x", "y", "--box", "x=0:1"], "unexpected extra argument"),
        (["compile", "x", "--box", "x=-1:1", "-eps", "0.1"], "No such option"),
        (["compile", "x", "--box", "x=-1:1", "--eps", "small"], "--eps"),
    ):
        ran = run(*arguments)
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err
        assert is_clean(ran)


@pytest.mark.parametrize(
    ("error", "code", "message"), [(MemoryError, 2, "error: not enough memory"), (KeyboardInterrupt, 130, INTERRUPTED)]
)
def test_running_out_of_memory_and_interrupts(run, monkeypatch, error, code: int, message: str) -> None:
    monkeypatch.setattr(attnc, "compile", Mock(side_effect=error))
    ran = run("compile", "x", "--box", "x=0:1")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(message)


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal_when_work_lasts(monkeypatch) -> None:
    output.reset_volume()
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(output, "SHOW_PROGRESS_AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar("compiling") as progress:
        progress("sampling", 0.25)
        deadline = time.monotonic() + 10
        while "sampling" not in sys.stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "sampling" in sys.stderr.getvalue()
    assert "25%" in sys.stderr.getvalue()


def test_short_work_and_pipes_show_no_progress(monkeypatch) -> None:
    output.reset_volume()
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar("compiling") as progress:
        progress("sampling", 0.25)
    assert sys.stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(output, "SHOW_PROGRESS_AFTER", 0.0)
    with output.progress_bar("compiling") as progress:
        progress("sampling", 0.25)
        time.sleep(0.2)
    assert sys.stderr.getvalue() == ""
