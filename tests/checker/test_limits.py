"""Checks that would take very long, or much memory: they end at a limit, undecided."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnc.ir.layers import Head
from attnc_checker import check, limits
from attnc_checker.files import Undecided
from attnc_checker.limits import Limit
from checker.networks import affine, one_head, save, save_slow, spectral, uniform

LINE = [(-3.0, 3.0)]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_slow(tmp_path_factory.mktemp("limits") / "slow")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kilobytes of weights that make 2^18 keys: a gigabyte, and half a minute before the first leaf."""
    path = tmp_path_factory.mktemp("limits") / "large"
    embed = affine("embed", (1, ["x"]), (2**18, ["x", "one"]), [(0, "x", 0, "x")], [(0, "one", 1.0)])
    reads_x, reads_one = np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])
    program = one_head(embed, Head(reads_x, reads_one, reads_one, np.ones((1, 1))))
    return save(path, program, "0*x", [(0.0, 1.0)], [["taylor", 1, 0, 0]], 1.0)


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnc_checker", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("processes", [1, 2])
def test_leaves_that_take_too_long_are_left(slow: Path, processes: int) -> None:
    verdict = check(slow, processes, seconds=2.0)
    assert (verdict.proved, verdict.decided, verdict.exit_code, verdict.reproved) == (False, False, 1, None)
    assert "of 65,536 leaves were proved in" in verdict.reason
    assert verdict.reason.endswith("The limit is 2 s: allow more with --seconds.")
    assert (verdict.bound, verdict.leaves) == (1e-6, 65_536)


def test_the_end_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 leaves in 6 of 100 seconds: all of 3,000 may be in time, and 3,300 would clearly not."""
    monkeypatch.setattr(limits.time, "monotonic", lambda: 6.0)
    limit = Limit(100.0, started=0.0)
    for done, count, pilot in ((64, 3000, 64), (64, 65_536, 65), (3000, 65_536, 64)):
        limit.look(0.0, done, count, pilot)
    with pytest.raises(Undecided, match=r"64 of 3,300 leaves were proved in 6.0 s, and all would take about 309 s"):
        limit.look(0.0, 64, 3300, 64)
    Limit(121.0, started=0.0).look(0.0, 64, 65_536, 64)  # too early: 6 s are less than a twentieth
    with pytest.raises(Undecided, match="0 of 5 leaves"):
        Limit(5.9, started=0.0).look(0.0, 0, 5, 64)


def test_a_check_that_is_done_in_time(tmp_path: Path) -> None:
    path = save(tmp_path / "net", spectral(np.sin, LINE, 17), "sin(x)", LINE, uniform("taylor", 6, 1), 1e-6)
    for processes in (1, 2):
        verdict = check(path, processes, seconds=600.0)
        assert (verdict.proved, verdict.decided) == (True, True)
    done = program(path, "--seconds", "inf", "--memory", 500, "--json")
    assert (done.returncode, json.loads(done.stdout)["decided"]) == (0, True)


def test_a_wrong_claim_is_decided(tmp_path: Path) -> None:
    path = save(tmp_path / "net", spectral(np.sin, LINE, 17), "sin(x)", LINE, uniform("taylor", 4, 1), 1e-12)
    assert (check(path).proved, check(path).decided) == (False, True)
    assert program(path).stderr.startswith("not re-proved in float64: the taylor leaf")


def test_reading_a_network_has_limits_too(large: Path) -> None:
    done = program(large, "--seconds", 1)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "not decided: the check did not end within 1 s. Allow more with --seconds.\n"
    done = program(large, "--memory", 50, "--processes", 1, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["proved"], told["decided"], done.stderr) == (1, False, False, "")
    assert "memory" in told["reason"]
    assert told["reason"].endswith("Allow more with --memory, or use fewer processes.")


@pytest.mark.parametrize("option", [("--seconds", "0"), ("--seconds", "nan"), ("--memory", "0"), ("--memory", "1.5")])
def test_limits_that_are_none(large: Path, option: tuple[str, str]) -> None:
    done = program(large, *option)
    assert done.returncode == 2
    assert option[0] in done.stderr


SLOW_END = """
import os, time
from attnc_checker import limits

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

limits.WATCH = 0.02
limits.end_with(os.getppid())
slow = Slow()
"""


def test_a_process_that_takes_long_to_end_is_not_killed() -> None:
    assert subprocess.run([sys.executable, "-c", SLOW_END], check=False).returncode == 0
