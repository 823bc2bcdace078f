"""Ctrl-C: a sentence, exit code 130, no half-written file, and no process that works on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import attnc
import attnc_lab
from attnc.cli import icl
from attnc.cli.children import run_child
from attnc_checker import checking
from attnc_checker.claims import Claim
from checker.networks import save_slow


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Where tests run in the background, the shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(*arguments: object, **options: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (attnc, "compile", ("compile", "x", "--box", "x=0:1", "--out", "out")),
        (attnc.Network, "save", ("compile", "x", "--box", "x=0:1", "--out", "out")),
        (attnc.Network, "plot", ("compile", "x", "--box", "x=0:1", "--plot", "out.svg")),
        (attnc, "plan", ("plan", "x", "--box", "x=0:1")),
        (attnc, "load", ("eval", "NET", "x=1", "y=1")),
        (attnc, "load", ("info", "NET")),
        (attnc.Network, "plot", ("plot", "NET", "--out", "out.svg")),
        (attnc.Network, "export_onnx", ("export", "NET", "--to", "onnx", "--out", "out.onnx")),
        (attnc_lab, "diagnose", ("diagnose", "NET")),
        (icl, "_fit", ("icl", "ridge", "--csv", "data.csv", "--output", "y")),
        (attnc_lab, "report", ("lab", "report", "run")),
        (subprocess.Popen, "wait", ("verify", "NET")),
    ],
)
def test_every_command_ends_with_a_sentence(
    run, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner, name: str, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("x,y\n1,2\n2,3\n")
    if owner is subprocess.Popen:  # interrupted once; the second call waits for the end
        waits, real = iter([interrupted]), subprocess.Popen.wait
        monkeypatch.setattr(owner, name, lambda *given, **options: next(waits, real)(*given, **options))
    else:
        monkeypatch.setattr(owner, name, interrupted)
    ran = run(*(net if word == "NET" else word for word in words))
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "interrupted: no file is left half written\n"
    assert os.listdir() == ["data.csv"]


def test_the_lab_tells_how_to_go_on(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attnc_lab, "run", interrupted)
    ran = run("lab", "run", "temperature", "--out", tmp_path / "run")
    assert (ran.code, ran.out) == (130, "")
    assert (
        ran.err == f"interrupted: the finished cells are in {tmp_path / 'run'}; the same command goes on from there\n"
    )


def test_a_process_that_is_interrupted(tmp_path: Path) -> None:
    program = (
        "import attnc, signal, time\n"
        "from attnc.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
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
        wait_for((tmp_path / "ready").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, b"", b"interrupted: no file is left half written\n")


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_so()


def test_a_child_and_its_own_children_are_ended(tmp_path: Path) -> None:
    """The child ignores Ctrl-C, and has started another process: neither is left."""
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('new', 'w').write(f'{os.getpid()} {other.pid}')\n"
        "os.rename('new', 'pids')\n"
        "time.sleep(600)\n"
    )
    pids = tmp_path / "pids"

    def interrupt() -> None:
        wait_for(pids.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_child(["env", "-C", str(tmp_path), sys.executable, "-c", code], is_silent=False)
    wait_for(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_processes_of_the_checker_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "proof_of", lambda *stored: None)
    before = set(multiprocessing.active_children())

    def work() -> None:
        with checking._pool(2, (Claim, None, {})) as pool:  # type: ignore[arg-type]
            for _ in range(20):
                pool.submit(time.sleep, 600)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    wait_for(lambda: not set(multiprocessing.active_children()) - before)


@pytest.mark.parametrize("module", ["attnc_checker", "attnc"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_processes_of_a_check_end_with_the_first(tmp_path: Path, module: str, number: signal.Signals) -> None:
    net = save_slow(tmp_path / "net")
    words = ["verify", net] if module == "attnc" else [net]
    command = [sys.executable, "-m", module, *words, "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        try:
            wait_for(lambda: len(family(first.pid)) == (5 if module == "attnc" else 4))  # two of them prove leaves
            every = family(first.pid)
            first.send_signal(number)
            wait_for(lambda: not any(map(is_running, every)))
        finally:
            for pid in filter(is_running, family(first.pid)):
                os.kill(pid, signal.SIGKILL)
        assert first.wait() == (130 if number == signal.SIGINT else -number)
        assert first.stderr is not None
        assert first.stderr.read().startswith("interrupted: no") == (number == signal.SIGINT)


def family(pid: int) -> list[int]:
    """Return a process, those that it started, and so on."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def test_estimators_are_interrupted_as_they_fit(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler for the errors of scikit-learn swallows it."""
    np.savetxt(tmp_path / "data.csv", np.eye(4), delimiter=",", header="a,b,c,y", comments="")
    monkeypatch.setattr(attnc.incontext.Ridge, "fit", interrupted)
    assert run("icl", "ridge", "--csv", tmp_path / "data.csv", "--output", "y").code == 130
