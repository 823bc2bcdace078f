"""Commands run within this process, and networks to run them on."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnc
from attnc.cli import main
from cli.running import Ran, is_clean


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str | Path) -> Ran:
        with pytest.raises(SystemExit) as ending:
            main([str(argument) for argument in arguments])
        code = ending.value.code
        return Ran(0 if code is None else int(code), *capsys.readouterr())

    return call


@pytest.fixture
def refused(run):
    """Run a command that must end as bad input, and return its message."""

    def call(*arguments: str | Path) -> str:
        ran = run(*arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert ran.err.startswith("error: ")
        assert is_clean(ran)
        return " ".join(ran.err.split())

    return call


@pytest.fixture(scope="session")
def net(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nets") / "net"
    attnc.compile("sin(x)+cos(y)", box={"x": (-3, 3), "y": (-3, 3)}, eps=0.3).save(path)
    return path


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nets") / "pair"
    attnc.compile("(x, 2+x**2)", box={"x": (-1, 1)}, eps=0.3, dtype="float32").save(path)
    return path
