"""The program itself: help, usage, interrupts, pipes, encodings, progress."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import attnc
from attnc.cli import output
from cli.running import is_clean

ATTNC = Path(sys.executable).with_name("attnc")


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
    for arguments, message in (
        (["nonsense"], "No such command"),
        (["eval"], "Missing argument"),
        (["compile"], "nothing to compile"),
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
    ("error", "code", "message"), [(MemoryError, 2, "error: not enough memory"), (KeyboardInterrupt, 130, "")]
)
def test_running_out_of_memory_and_interrupts(run, monkeypatch, error, code: int, message: str) -> None:
    monkeypatch.setattr(attnc, "compile", Mock(side_effect=error))
    ran = run("compile", "x", "--box", "x=0:1")
    assert (ran.code, ran.out, bool(ran.err)) == (code, "", bool(message))
    assert ran.err.startswith(message)


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
