"""`attnc plot` and `attnc diagnose`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def mine(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(net, tmp_path / "net")
    monkeypatch.chdir(tmp_path)
    return Path("net")


def test_a_picture_beside_the_network(run, mine: Path) -> None:
    ran = run("plot", "net/")
    assert (ran.code, ran.out, ran.err) == (0, "wrote net.svg\n", "")
    assert Path("net.svg").read_bytes().startswith(b"<?xml")


def test_within_the_folder_itself(run, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    assert run("plot", ".", "-q").code == 0
    assert Path("../net.svg").is_file()


def test_a_picture_elsewhere_and_of_another_output(run, refused, pair: Path, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    ran = run("plot", pair, "--out", picture, "--output-index", "1", "--json")
    assert ran.json["out"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "there is no output 2: the network has 2 outputs" in refused(
        "plot", pair, "--out", picture, "--output-index", "2"
    )
    assert "must end in" in refused("plot", pair, "--out", tmp_path / "p.txt")
    assert "does not exist" in refused("plot", tmp_path / "nowhere", "--out", picture)


def test_diagnose_is_the_command_of_the_lab(run, net: Path) -> None:
    short, long = run("diagnose", net, "--json"), run("lab", "diagnose", net, "--json")
    assert short == long
    assert short.json["healthy"]
    assert run("diagnose", net, "--eps", "1e-9").code == 1
