"""Shards and verdict files: complete ones are accepted, and each change is refused for its own reason."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import attnc
import attnc_checker
from attnc import sharding
from attnc_checker import verdicts

SHARDS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "net"
    attnc.compile("sin(3*x)", {"x": (-2, 2)}, 1e-6, construction="spectral_grid", proof=False).save(folder)
    for k in range(1, SHARDS + 1):
        sharding.write_shard(folder, folder.parent / "parts", k, SHARDS)
    sharding.merge_shards(folder, folder.parent / "parts").save(folder)
    assert attnc_checker.check(folder, processes=1).proved
    return folder


@pytest.fixture
def net(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "net"))


def refusal(folder: Path) -> str:
    verdict = attnc_checker.check(folder, processes=1)
    assert not verdict.proved
    return verdict.reason


def shard(folder: Path, k: int) -> Path:
    return folder / f"certificate.{k}-of-{SHARDS}.shard"


def forge(folder: Path, k: int, change) -> None:
    """Change the header and the records of a shard, and state its hash in the certificate, as a liar would."""
    path, raw = shard(folder, k), shard(folder, k).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, layout = json.loads(raw[8 : 8 + length]), struct.Struct("<3BQd")
    records = [list(each) for each in layout.iter_unpack(raw[8 + length :])]
    change(header, records)
    header["leaves"] = len(records)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(layout.pack(*each) for each in records))
    stated = json.loads((folder / "certificate.json").read_text())
    entry = stated["shards"][k - 1]
    entry.update({name: header[name] for name in ("level", "first", "after", "leaves")})
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "certificate.json").write_text(json.dumps(stated))


def edit(folder: Path, change) -> None:
    stated = json.loads((folder / "certificate.json").read_text())
    change(stated)
    (folder / "certificate.json").write_text(json.dumps(stated))


def halve(header, records):
    """Replace the first leaf by its left half."""
    records[0][2] += 1
    records[0][3] *= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, records: records.pop(), "do not divide its region|do not cover its region"),
        (lambda header, records: records.append(list(records[0])), "a cell is stated twice"),
        (lambda header, records: halve(header, records), "parts of a cell are missing"),
        (lambda header, records: records[0].__setitem__(3, 2 ** records[0][2]), "is out of range"),
        (lambda header, records: records[0].__setitem__(0, 7), "a leaf of an unknown kind"),
        (lambda header, records: records[0].__setitem__(1, 200), "has an order that is not between"),
        (lambda header, records: records[0].__setitem__(4, float("nan")), "a bound that is no number"),
        (lambda header, records: records[0].__setitem__(4, 1.0), "has a bound that is not between 0 and"),
        (lambda header, records: header.update(weights_sha256="0" * 64), "belongs to another network"),
        (lambda header, records: header.update(format="attnc.shard/2"), "has the format 'attnc.shard/2'"),
        (lambda header, records: header.update(variables=2), "is not about 1 variable"),
        (lambda header, records: header.update(after=header["after"] + 1), "do not cover its region|shards overlap"),
        (lambda header, records: header.update(first=header["first"] - 1), "the shards overlap"),
    ],
)
def test_a_forged_shard_is_refused(net, change, message):
    forge(net, 2, change)
    assert re.search(message, refusal(net))


def swap(stated):
    stated["shards"][1], stated["shards"][2] = stated["shards"][2], stated["shards"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: shard(net, 3).unlink(), "certificate.3-of-4.shard is missing"),
        (lambda net: shard(net, 3).write_bytes(shard(net, 2).read_bytes()), "was changed: its SHA-256"),
        (lambda net: shard(net, 3).write_bytes(shard(net, 3).read_bytes()[:-1]), "was changed: its SHA-256"),
        (lambda net: edit(net, swap), "shards were reordered"),
        (lambda net: edit(net, lambda stated: stated["shards"].pop()), "shards were reordered"),
        (lambda net: edit(net, lambda stated: stated["shards"].clear()), "there are 0 shards"),
        (lambda net: edit(net, lambda stated: stated.update(bound=stated["bound"] * 0.5, observed=0.0)), "has a bound"),
        (lambda net: edit(net, lambda stated: stated.update(norm="2")), "the leaves add up to the norm"),
        (lambda net: edit(net, lambda stated: stated.update(leaves=[["taylor", 4, 0, 0]])), "own or shards"),
    ],
)
def test_changed_lists_of_shards_are_refused(net, change, message):
    change(net)
    assert message in refusal(net)


def test_weights_beyond_the_bound_are_refused(net):
    """Even if all hashes are written anew."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(net / "model.safetensors")
    name = max(weights, key=lambda name: weights[name].size if "values" in name else 0)
    largest = int(np.argmax(np.abs(weights[name])))
    weights[name].flat[largest] *= 1 + 1e-4
    save_file(weights, net / "model.safetensors")
    digest = hashlib.sha256((net / "model.safetensors").read_bytes()).hexdigest()
    edit(net, lambda stated: stated.update(weights_sha256=digest))
    for k in range(1, SHARDS + 1):
        forge(net, k, lambda header, records: header.update(weights_sha256=digest))
    assert "is not re-proved to" in refusal(net)


# --- verdict files ----------------------------------------------------------------------------------------------------


def prove(folder: Path, n: int) -> None:
    for k in range(1, n + 1):
        (verdict,) = attnc_checker.check_shard(folder, k, n, processes=1)
        assert verdict.proved, verdict.reason


@pytest.fixture(scope="module")
def checked(saved, tmp_path_factory) -> Path:
    folder = Path(shutil.copytree(saved, tmp_path_factory.mktemp("verdicts") / "net"))
    prove(folder, 3)
    return folder


@pytest.fixture
def done(checked, tmp_path) -> Path:
    return Path(shutil.copytree(checked, tmp_path / "net"))


def test_shards_of_a_check_give_the_verdict_of_all(saved, checked):
    (merged,) = attnc_checker.merge(checked)
    whole = attnc_checker.check(saved, processes=1)
    assert merged.proved
    assert merged.bound == whole.bound
    assert merged.reproved == pytest.approx(whole.reproved, rel=1e-3)
    assert "3 verdict files, the claims of their makers" in merged.reason


def test_the_processes_of_a_shard_do_not_change_its_verdict(checked, done):
    attnc_checker.check_shard(done, 2, 3, processes=2)
    name = Path(verdicts.VERDICTS, "2-of-3.json")
    assert (done / name).read_bytes() == (checked / name).read_bytes()


def file(folder: Path, k: int) -> Path:
    return folder / verdicts.VERDICTS / f"{k}-of-3.json"


def rewrite(folder: Path, k: int, change, *, hashed: bool = True) -> None:
    data = json.loads(file(folder, k).read_text())
    del data["sha256"]
    change(data)
    content = {**data, "sha256": verdicts._digest(data)} if hashed else {**data, "sha256": "0" * 64}
    file(folder, k).write_text(json.dumps(content))


def claim(data):
    return data["claims"]["certificate.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: file(net, 2).unlink(), "1 of 3 verdicts are missing: 2/3"),
        (lambda net: shutil.rmtree(net / verdicts.VERDICTS), "is missing: prove shards first"),
        (lambda net: shutil.copy(file(net, 1), file(net, 2)), "2-of-3.json has the verdict on shard 1, which 1-of-3"),
        (lambda net: file(net, 1).write_bytes(file(net, 2).read_bytes()), "has the verdict on shard 2 of 3"),
        (lambda net: shutil.copy(file(net, 1), file(net, 1).with_name("1-of-4.json")), "of 2 divisions"),
        (lambda net: file(net, 2).write_text("{"), "is not valid JSON"),
        (lambda net: rewrite(net, 2, lambda data: None, hashed=False), "was changed: its SHA-256"),
        (lambda net: rewrite(net, 2, lambda data: data.update(checker="attnc 9")), "was made by 'attnc 9'"),
        (lambda net: rewrite(net, 2, lambda data: data.update(format="attnc.verdict/2")), "prove the shard again"),
        (lambda net: rewrite(net, 2, lambda data: data.update(claims={})), "has no verdict on certificate.json"),
        (lambda net: rewrite(net, 2, lambda data: claim(data)["found"].pop()), "bounds for"),
        (lambda net: rewrite(net, 2, lambda data: claim(data).update(blocks=[0, 7])), "is about the blocks [0, 7]"),
        (lambda net: rewrite(net, 2, lambda data: claim(data)["found"].__setitem__(0, 1.0)), "above the claim"),
        (
            lambda net: rewrite(net, 2, lambda data: claim(data).update(found=[1e-9] * len(claim(data)["found"]))),
            "have other bounds than a verdict file states",
        ),
        (lambda net: edit(net, lambda stated: stated.update(assumptions=[])), "is about another network"),
    ],
)
def test_a_merge_fails_closed(done, change, message):
    change(done)
    (verdict,) = attnc_checker.merge(done)
    assert not verdict.proved
    assert message in verdict.reason


def test_no_verdict_is_written_for_a_claim_that_fails(net):
    edit(net, lambda stated: stated.update(bound=stated["bound"] * 0.9, observed=0.0))
    for k in range(1, SHARDS + 1):
        forge(net, k, lambda header, records: [record.__setitem__(4, 0.0) for record in records])
    for k in (1, 2, 3):
        (verdict,) = attnc_checker.check_shard(net, k, 3, processes=1)
        assert (net / verdicts.VERDICTS / f"{k}-of-3.json").exists() == verdict.proved
    assert "verdicts are missing" in attnc_checker.merge(net)[0].reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: attnc.compile("x*y*z", dict.fromkeys("xyz", (-1, 1)), 0.1, construction="compose"),
        lambda: attnc.compile("exp(x)", {"x": (-1, 1)}, 0.01, norm=2),
        lambda: attnc.compile("gelu(x)", {"x": (-8, 8)}, 1e-4, also="float32"),
        lambda: attnc.compile(attnc.TableTarget(np.linspace(0, 1, 3000), np.linspace(0, 1, 3000) ** 2), eps=1e-4),
    ],
)
def test_every_kind_of_proof_can_be_checked_in_shards(tmp_path, make):
    make().save(tmp_path / "net")
    for k in range(1, 4):
        assert all(verdict.proved for verdict in attnc_checker.check_shard(tmp_path / "net", k, 3, processes=1))
    merged = attnc_checker.merge(tmp_path / "net")
    assert all(verdict.proved for verdict in merged), [verdict.reason for verdict in merged]
    whole = attnc_checker.check(tmp_path / "net", processes=1)
    assert merged[0].reproved == pytest.approx(whole.reproved, rel=1e-2)
