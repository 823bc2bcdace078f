"""`attnc verify`: a separate program proves the bounds of compile again, and refuses changed files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import attnc
from checker.networks import save_slow
from checker.tampering import edit


@pytest.mark.parametrize(
    ("text", "box", "eps", "construction"),
    [
        ("sin(x)", {"x": (-3, 3)}, 1e-8, "auto"),
        ("x*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-6, "auto"),
        ("relu(x)", {"x": (-1, 1.7)}, 1e-5, "auto"),
        ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-4, "spectral_grid"),
        ("abs(x-0.3)", {"x": (-1, 1)}, 1e-4, "graded"),
        ("gelu(x)", {"x": (float("-inf"), float("inf"))}, 1e-6, "auto"),
    ],
)
def test_what_is_proved_is_proved_again(
    run, tmp_path: Path, text: str, box: dict[str, tuple[float, float]], eps: float, construction: str
) -> None:
    network = attnc.compile(text, box, eps, construction=construction)
    assert network.certificate.method == "proof"
    network.save(tmp_path / "net")
    assert run("verify", tmp_path / "net").code == 0


def test_a_smaller_claim_is_refused(run, tmp_path: Path) -> None:
    attnc.compile("sin(x)", {"x": (-3, 3)}, 1e-6).save(tmp_path / "net")
    edit(tmp_path / "net", "certificate.json", lambda claim: claim.update(bound=0.8 * claim["bound"], observed=0.0))
    assert run("verify", tmp_path / "net").code == 1


@pytest.mark.parametrize(
    "command", [("verify", "nowhere"), ("eval", "nowhere", "x=1"), ("info", "."), ("eval", ".", "x=1")]
)
def test_what_is_no_network_is_bad_input_in_the_words_of_every_command(run, refused, tmp_path: Path, command) -> None:
    name, folder, *rest = command
    message = refused(name, tmp_path / folder, *rest)
    assert message == refused("info", tmp_path / folder)
    assert folder == "." or "it does not exist" in message
    error = run(name, tmp_path / folder, *rest, "--json").json["error"]
    assert error == run("info", tmp_path / folder, "--json").json["error"]
    assert error["type"] == "FileError"


def test_the_number_of_processes(run, refused, net: Path) -> None:
    assert run("verify", net, "--processes", "1").code == 0
    assert "processes must be a whole number ≥ 1, found 0" in refused("verify", net, "--processes", "0")


def test_limits_of_time_and_memory(run, refused, net: Path, tmp_path: Path) -> None:
    assert run("verify", net, "--seconds", "500", "--memory", "500").code == 0
    assert "seconds must be a finite number > 0" in refused("verify", net, "--seconds", "0")
    assert "memory must be a whole number ≥ 1" in refused("verify", net, "--memory", "0")
    slow = save_slow(tmp_path / "slow")
    assert run("verify", slow, "--seconds", "0.5").code == 1
    verdict = attnc.verify(slow, seconds=0.5, memory=500)
    assert (verdict["proved"], verdict["decided"], verdict["exit_code"]) == (False, False, 1)


def test_its_json_is_indented_as_all_other(net: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "attnc_checker", net, "--json"], capture_output=True, text=True)
    assert done.stdout == json.dumps(json.loads(done.stdout), indent=2) + "\n"
