"""Bad input gets a sentence and exit code 2 (or 1 from verify), takes little memory, and leaves no traceback.

`python -m cli.hostile_inputs` prints the table of all commands. Here each network is read by `verify` and by one more.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.hostile_inputs import READERS, Case, Server, cases, save_net

MAX_MB = 500
OTHERS = [command for command in READERS if command != "verify"]
SLOW = ("CSV of 200 MB: compile",)
CASES = cases(lambda i: ("verify", OTHERS[i % len(OTHERS)]))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        save_net(server.folder / "net")
        yield server


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    shutil.copytree(server.folder / "net", tmp_path / "net")
    return tmp_path


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in SLOW)) for case in CASES]
)
def test_bad_input_gets_a_sentence_and_little_memory(server: Server, folder: Path, case: Case) -> None:
    answer = server.run(case.words(folder))
    shutil.rmtree(folder)
    assert "Traceback" not in answer.err + answer.out
    assert answer.code in case.codes, answer.message
    assert answer.code == 0 or len(answer.message.split()) > 3
    assert answer.peak_mb < MAX_MB


@pytest.mark.parametrize("command", READERS)
def test_the_network_itself_is_read(server: Server, folder: Path, command: str) -> None:
    """Otherwise the refusals above would show nothing."""
    assert server.run(READERS[command](folder / "net")).code == 0
