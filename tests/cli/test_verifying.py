"""The words for a bound: stated, until this machine has re-proved these files; and the record of that."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc import verifying
from attnc.errors import FileError, InputError
from attnc.proofs.certificate import Standing
from checker.tampering import edit

STATED = "stated by the certificate"
REMEDY = "`attnc verify` re-proves it"
HERE = "re-proved here"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records, which a test may spoil."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attnc" / "re-proved"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "net"
    attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-3, also="float32").save(folder)
    return folder


@pytest.fixture
def net(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "net"))


def test_nothing_is_imported_from_the_current_folder(
    net: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of strangers may hold a false checker, or modules with the names of those that the checker imports."""
    forge(net)
    liar = "print('{\"proved\": true}')\nraise SystemExit(0)\n"
    (tmp_path / "attnc_checker").mkdir()
    for name in ("attnc_checker/__init__.py", "attnc_checker/__main__.py", "json.py", "argparse.py"):
        (tmp_path / name).write_text(liar)
    monkeypatch.chdir(tmp_path)
    assert not attnc.verify(net)["proved"]
    assert not cache.exists()


def standings(folder: Path) -> list[str]:
    network = attnc.load(folder)
    return [claim.standing.value for claim in (network.certificate, *network.also.values())]


def forge(folder: Path) -> None:
    """Change a weight, and state far smaller bounds, with hashes and parts that fit."""
    edit(folder, "tensors", _double)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    claims = [path for path in folder.iterdir() if path.name.startswith("certificate")]
    for path in claims:
        claim = json.loads(path.read_text())
        claim |= {"bound": 1e-9, "observed": 0.0, "leaf_bounds": [1e-9] * len(claim["leaves"])}
        claim["weights_sha256"] = digest
        claim["terms"] = [{"name": "approximation", "value": 1e-9, "reason": "forged"}]
        path.write_text(json.dumps(claim))


def _double(tensors: dict[str, np.ndarray]) -> None:
    last = [tensor for tensor in tensors.values() if tensor.dtype == np.float64 and tensor.size][-1]
    last *= 2


def test_a_network_is_proven_where_it_is_compiled_and_stated_where_it_is_loaded(cache: Path, tmp_path: Path) -> None:
    network = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-3)
    assert network.certificate.standing is Standing.PROVEN
    assert "(proven)>" in repr(network)
    network.save(tmp_path / "net")
    again = attnc.load(tmp_path / "net")
    assert again.certificate.standing is Standing.STATED
    assert f"({STATED})>" in repr(again)
    assert "standing='stated'" in repr(again.certificate)
    assert again.certificate == network.certificate


def test_a_file_cannot_say_that_it_is_proven(cache: Path, net: Path) -> None:
    for word in ("proven", "re-proved", "REPROVED"):
        edit(net, "certificate.json", lambda claim, word=word: claim.update(standing=word))
        assert attnc.load(net).certificate.standing is Standing.STATED


def test_files_are_re_proved_here_after_verify(cache: Path, net: Path, tmp_path: Path) -> None:
    assert standings(net) == ["stated", "stated"]
    assert attnc.verify(net, processes=1)["proved"]
    assert standings(net) == ["re-proved", "re-proved"]
    assert f"({HERE})>" in repr(attnc.load(net))
    assert attnc.load(net).astype("float32").certificate.standing is Standing.REPROVED
    shutil.copytree(net, tmp_path / "elsewhere")
    assert standings(tmp_path / "elsewhere") == ["re-proved", "re-proved"]
    assert len(list(cache.iterdir())) == 2
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in cache.iterdir())


def test_a_forged_certificate_is_stated_and_stays_so(cache: Path, net: Path) -> None:
    forge(net)
    assert standings(net) == ["stated", "stated"]
    verdict = attnc.verify(net, processes=1)
    assert not verdict["proved"]
    forged, points = attnc.load(net), np.linspace(0.5, 1, 99)[:, None]
    assert forged.bound() == 1e-9
    assert forged.bound({"x": (0.5, 1.0)}) >= np.abs(forged(points) - np.sin(points[:, 0])).max() > 0.1
    assert standings(net) == ["stated", "stated"]
    assert not cache.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: edit(net, "config.json", lambda config: config.update(eps=1e-4)),
        lambda net: edit(net, "certificate.json", lambda claim: claim.update(observed=0.0)),
        lambda net: edit(net, "tensors", lambda tensors: _nudge(tensors)),
    ],
    ids=["configuration", "certificate", "weights"],
)
def test_a_record_is_of_these_files_alone(cache: Path, honest: Path, net: Path, change: Callable[[Path], None]) -> None:
    (net / "certificate.float32.json").unlink()
    edit(net, "config.json", lambda config: config.update(certificates=["certificate.json"]))
    assert attnc.verify(net, processes=1)["proved"]
    assert standings(net) == ["re-proved"]
    change(net)
    assert standings(net) == ["stated"]


def _nudge(tensors: dict[str, np.ndarray]) -> None:
    first = next(tensor for tensor in tensors.values() if tensor.dtype == np.float64 and tensor.size)
    first.flat[0] = np.nextafter(first.flat[0], np.inf)


def test_a_record_ends_with_any_change_of_the_checker(cache: Path, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attnc.verify(net, processes=1)["proved"]
    with monkeypatch.context() as patch:
        patch.setattr(verifying, "_checker_digest", lambda: "0" * 64)
        assert standings(net) == ["stated", "stated"]
        patch.setattr(verifying, "_checker_digest", lambda: None)
        assert standings(net) == ["stated", "stated"]
        assert not verifying.remember(net, verifying.fingerprints(net))
    assert standings(net) == ["re-proved", "re-proved"]


def test_the_checker_is_known_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import attnc_checker

    copy = tmp_path / "attnc_checker"
    shutil.copytree(Path(attnc_checker.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    found = []
    for line in ("", "\n", "# another line\n"):
        with (copy / "deep" / "claims.py").open("a") as file:
            file.write(line)
        spec = type("Spec", (), {"submodule_search_locations": [str(copy)]})
        monkeypatch.setattr(verifying, "find_spec", lambda name, spec=spec: spec)
        found.append(verifying._checker_digest.__wrapped__())
    assert found[0] == verifying._checker_digest()
    assert len(set(found)) == 3


def _spoil_content(cache: Path) -> None:
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-2])


def _lengthen(cache: Path) -> None:
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes() + b"more")


def _make_folders(cache: Path) -> None:
    for path in cache.iterdir():
        path.unlink()
        path.mkdir()


def _make_pipes(cache: Path) -> None:
    for path in cache.iterdir():
        path.unlink()
        os.mkfifo(path, 0o600)


def _link(cache: Path) -> None:
    for path in cache.iterdir():
        path.rename(path.with_suffix(".kept"))
        path.symlink_to(path.with_suffix(".kept"))


def _link_folder(cache: Path) -> None:
    cache.rename(cache.with_name("kept"))
    cache.symlink_to(cache.with_name("kept"))


def _replace_folder(cache: Path) -> None:
    shutil.rmtree(cache)
    cache.write_text("no folder")


def _open_records(cache: Path) -> None:
    for path in cache.iterdir():
        path.chmod(0o620)


SPOILED = [
    *(_spoil_content, _lengthen, _make_folders, _make_pipes, _link, _link_folder, _replace_folder, _open_records),
    lambda cache: cache.chmod(0o702),
    lambda cache: cache.chmod(0o770),
]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_record_that_others_could_have_written_does_not_count(cache: Path, net: Path, spoil) -> None:
    before = verifying.fingerprints(net)
    assert verifying.remember(net, before)
    assert standings(net) == ["re-proved", "re-proved"]
    spoil(cache)
    assert standings(net) == ["stated", "stated"]


def test_a_record_of_another_user_does_not_count(cache: Path, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verifying.remember(net, verifying.fingerprints(net))
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert standings(net) == ["stated", "stated"]
    assert not verifying.remember(net, verifying.fingerprints(net))


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/below"])
def test_a_cache_that_cannot_be_written_is_no_error(
    run, net: Path, monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(verifying, "user_cache", lambda name: f"{folder}/attnc/{name}")
    ran = run("verify", net, "--processes", "1")
    assert ran.code == 0
    assert "note: other commands will not show this" in ran.err
    assert standings(net) == ["stated", "stated"]


def test_the_records_are_bounded(cache: Path, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "MAX_RECORDS", 5)
    cache.mkdir(parents=True, mode=0o700)
    for age in range(9):
        (cache / str(age)).write_text("old")
        os.utime(cache / str(age), (1000 + age, 1000 + age))
    assert verifying.remember(net, verifying.fingerprints(net))
    assert {path.name for path in cache.iterdir()} == {"6", "7", "8", *verifying.fingerprints(net)}


def test_files_that_change_during_the_proof_are_not_recorded(cache: Path, net: Path) -> None:
    before = verifying.fingerprints(net)
    edit(net, "certificate.json", lambda claim: claim.update(observed=0.0))
    assert not verifying.remember(net, before)
    (net / "model.safetensors").unlink()
    assert verifying.fingerprints(net) == frozenset()
    assert not verifying.remember(net, frozenset())
    assert not cache.exists()


def test_what_cannot_be_checked_is_an_error(cache: Path, net: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        attnc.verify(tmp_path / "nothing")
    with pytest.raises(InputError, match="processes must be a whole number ≥ 1"):
        attnc.verify(net, processes=0)
    (net / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config.json"):
        attnc.verify(net)


@pytest.mark.parametrize("is_forged", [False, True])
def test_the_commands_say_which_it_is(run, cache: Path, net: Path, tmp_path: Path, is_forged: bool) -> None:
    """A forged certificate with hashes that fit is never called proven; an honest one is, once it was re-proved."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("onnxruntime")
    if is_forged:
        forge(net)

    def everything() -> str:
        shown = [run(*command).out for command in (("info", net), ("eval", net, "x=0.5"), ("eval", net, "x=1"))]
        for command in (("plot", net, "--out", tmp_path / "a.svg"), ("info", net, "--plot", tmp_path / "b.svg")):
            assert run(*command).code == 0
        shown += [(net / "README.md").read_text() if not is_forged else ""]
        pictures = [(tmp_path / name).read_text() for name in ("a.svg", "b.svg")]
        assert all(any(word in picture for word in (STATED, HERE)) for picture in pictures)
        shown += pictures
        for command in (("info", net, "--json"), ("eval", net, "x=0.5", "--json")):
            shown.append(f"standing: {run(*command).json['standing']}")
        return " ".join(" ".join(shown).replace("│", " ").split())

    before = everything()
    assert "proven" not in before
    assert HERE not in before
    assert f"{STATED} on the whole box in float64" in before
    assert before.count(f"({STATED}; {REMEDY})") == 2
    assert before.count("standing: stated") == 2
    assert run("verify", net, "--processes", "1").code == (1 if is_forged else 0)
    after = everything()
    assert "proven" not in after
    if is_forged:
        assert HERE not in after
        assert f"{STATED} on the whole box in float64" in after
        assert after.count("standing: stated") == 2
        return
    assert f"{HERE} on the whole box in float64" in after
    assert after.count(f"({HERE})") >= 2
    assert after.count("standing: re-proved") == 2


def test_cards_and_exports_say_the_same_on_every_machine(cache: Path, net: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert attnc.verify(net, processes=1)["proved"]
    network = attnc.load(net)
    assert network.certificate.standing is Standing.REPROVED
    network.save(tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert card == (net / "README.md").read_text()
    assert f"**Bound ({STATED}):**" in card
    assert "Run `attnc verify` on this folder to re-prove it." in card
    for name in ("proven", HERE):
        assert name not in card
    network.export_onnx(tmp_path / "net.onnx")
    stated = {prop.key: prop.value for prop in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert stated["standing of the bound"].startswith(f"stated by the network's certificate; {REMEDY}")
