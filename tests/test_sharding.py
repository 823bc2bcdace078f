"""Proofs in shards: the same certificate from one process, several, and a cluster; after losses; and refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import attnc
import attnc_checker
from attnc import sharding
from attnc.exports.directory import shard_name
from attnc.exports.safe_files import read_json
from attnc.proofs.cells.dyadic import Region, cells, regions
from attnc.proofs.shards import HeadShard, RowShard, Shard, ShardFile
from attnc.scheduling import require_cluster
from attnc.sharding import running, tasks

SOURCE, BOX, EPS, SHARDS = "cos(2*x)*exp(y)", {"x": (-2, 2), "y": (-1, 1)}, 1e-6, 6


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharding") / "net"
    attnc.compile(SOURCE, BOX, EPS, construction="spectral_grid", proof=False).save(folder)
    return folder


@pytest.fixture(scope="module")
def parts(raw: Path) -> Path:
    """All shards of the network, proved one by one in this process."""
    place = raw.parent / "parts"
    for k in range(1, SHARDS + 1):
        sharding.write_shard(raw, place, k, SHARDS)
    return place


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sharding.shard_files(place)}


@pytest.mark.parametrize(("d", "count"), [(1, 1), (1, 7), (2, 3), (3, 64), (4, 5)])
def test_regions_divide_the_box(d, count):
    found = regions(d, count)
    level = found[0].level
    together = np.concatenate([region.cells(d, level) for region in found])
    assert (together == cells(d, level)).all()
    assert (Region.numbers(together, level) == np.arange(len(together))).all()
    finer = np.concatenate([region.cells(d, level + 1) for region in found])
    assert (finer == cells(d, level + 1)).all()
    sizes = [region.after - region.first for region in found]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1


def test_without_a_proof_there_is_no_bound(raw):
    claim = attnc.load(raw).certificate
    assert claim.bound is None
    assert 0 < claim.observed <= EPS


def test_shards_prove_what_one_piece_proves(raw, parts, tmp_path):
    merged = sharding.merge_shards(raw, parts)
    whole = attnc.compile(SOURCE, BOX, EPS, construction="spectral_grid")
    claim = merged.certificate
    assert claim.observed <= claim.bound <= EPS
    assert claim.bound == pytest.approx(whole.certificate.bound, rel=0.03)
    assert claim.num_leaves >= 64
    assert claim.standing.value == "stated"
    assert sum(term.value for term in claim.terms) == pytest.approx(claim.bound)
    merged.save(tmp_path / "net")
    assert attnc.load(tmp_path / "net").certificate == claim
    verdict = attnc_checker.check(tmp_path / "net", processes=1)
    assert verdict.proved, verdict.reason
    assert verdict.leaves == claim.num_leaves
    assert claim.observed * (1 - 1e-6) <= verdict.reproved <= claim.bound
    points = np.random.default_rng(0).uniform([-2, -1], [2, 1], (2000, 2))
    assert np.abs(merged(points) - np.cos(2 * points[:, 0]) * np.exp(points[:, 1])).max() <= claim.bound


def test_several_processes_make_the_same_files(raw, parts, tmp_path):
    sharding.prove_all(raw, tmp_path / "parts", SHARDS, processes=2)
    assert contents(tmp_path / "parts") == contents(parts)


def test_nothing_is_proved_twice(raw, parts, tmp_path, monkeypatch):
    place, proved = tmp_path / "parts", list[int]()
    place.mkdir()
    for name, content in contents(parts).items():
        (place / name).write_bytes(content)
    (place / shard_name(sharding.STEM, 2, SHARDS)).unlink()
    cut = place / shard_name(sharding.STEM, 5, SHARDS)
    cut.write_bytes(cut.read_bytes()[:-1])

    def here(function, tasks, cluster, processes):
        for key, arguments in tasks:
            proved.append(key)
            yield key, function(*arguments)

    monkeypatch.setattr(running, "finished", here)
    sharding.prove_all(raw, place, SHARDS)
    assert proved == [2, 5]
    assert contents(place) == contents(parts)


def test_a_wrong_shard_of_a_worker_is_refused(raw, parts, tmp_path, monkeypatch):
    other = (parts / shard_name(sharding.STEM, 1, SHARDS)).read_bytes()
    monkeypatch.setattr(running, "finished", lambda function, tasks, *_: ((key, other) for key, _ in tasks))
    with pytest.raises(attnc.FileError, match="a worker returned a wrong shard 2 of 6: it proves the cells"):
        sharding.prove_all(raw, tmp_path / "parts", SHARDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: os.unlink(place[3]), "lacks 1 of 6 shards: 3/6"),
        (lambda place: place[2].write_bytes(place[1].read_bytes()), "it was renamed"),
        (lambda place: place[2].write_bytes(place[2].read_bytes()[:-5]), "is no whole shard"),
        (lambda place: place[2].write_bytes(place[2].read_bytes()[:-27]), "its header does not fit its records"),
        (lambda place: place[2].write_bytes(b""), "is no whole shard"),
        (lambda place: place[2].rename(place[2].with_name("proof.2-of-7.shard")), "has shards of 2 divisions"),
        (lambda place: [path.unlink() for path in place.values()], "has no shards"),
    ],
)
def test_a_merge_fails_closed(raw, parts, tmp_path, change, message):
    place = {}
    for k in range(1, SHARDS + 1):
        place[k] = tmp_path / shard_name(sharding.STEM, k, SHARDS)
        place[k].write_bytes((parts / place[k].name).read_bytes())
    change(place)
    with pytest.raises(attnc.FileError, match=message):
        sharding.merge_shards(raw, tmp_path)


def test_shards_of_another_network_are_refused(parts, tmp_path):
    other = attnc.compile(SOURCE, BOX, 1e-5, construction="spectral_grid", proof=False)
    other.save(tmp_path / "net")
    with pytest.raises(attnc.FileError, match="it belongs to another network"):
        sharding.merge_shards(tmp_path / "net", parts)


def changed(shard: ShardFile, header: dict[str, object], records: bytes) -> bytes:
    """The shard with other fields in its header, and these records."""
    text = json.dumps(shard.header | header).encode()
    return len(text).to_bytes(8, "little") + text + records


def with_bounds(content: bytes, header: dict[str, object] | None = None, factor: float = 1.0) -> bytes:
    """A shard with other fields in its header, and all bounds times a factor: every other part of it fits."""
    shard = Shard(content)
    rows = shard.rows.copy()
    rows["bound"] *= factor
    terms = [term | {"value": factor * term["value"]} for term in shard.header["terms"]]
    stated = {"bound": float(rows["bound"].max()), "terms": terms}
    return changed(shard, stated | (header or {}), rows.tobytes())


@pytest.mark.parametrize(
    ("header", "factor", "message"),
    [
        ({}, 1e-3, "shard 4 of 6 is wrong: it states the bound"),
        ({"format": "attnc.shard/2"}, 1.0, "has the format 'attnc.shard/2', not 'attnc.shard/1': prove it again"),
        ({"weights_sha256": "0" * 64}, 1.0, "it belongs to another network"),
        ({"task_sha256": "0" * 64}, 1.0, "it belongs to another request or another division"),
        ({"first": 3}, 1.0, "it proves the cells 3 to"),
    ],
)
def test_a_lie_in_a_whole_shard_is_found(raw, parts, tmp_path, header, factor, message):
    for path in sharding.shard_files(parts):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    liar = tmp_path / shard_name(sharding.STEM, 4, SHARDS)
    liar.write_bytes(with_bounds(liar.read_bytes(), header, factor))
    with pytest.raises(attnc.FileError, match=message):
        sharding.merge_shards(raw, tmp_path)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: attnc.compile(attnc.TableTarget([0, 1, 2], [1, 3, 2]), eps=1e-3), "has at most 3 shards, and 4 were"),
        (lambda: attnc.compile("x*y*z", dict.fromkeys("xyz", (-1, 1)), 0.1, construction="compose"), "has at most 2"),
        (lambda: attnc.compile("sign(x)", {"x": (-1, 1)}, 0.1, norm=2), "shards prove continuous functions"),
        (lambda: attnc.compile(np.sin, {"x": (-1, 1)}, 0.1, lipschitz=1.0), "code is proved in one piece"),
    ],
)
def test_other_proofs_are_made_in_one_piece(tmp_path, net, message):
    net().save(tmp_path / "net")
    with pytest.raises(attnc.InputError, match=message):
        sharding.write_shard(tmp_path / "net", tmp_path, 1, 4)


def table(tmp_path: Path, *, stored: bool, monkeypatch) -> Path:
    """A network for a table of 600 rows, without a proof. If they are `stored`, the rows are in a file of their own."""
    if stored:
        monkeypatch.setattr("attnc.proofs.kinds.point.MAX_STORED", 100)
    points = np.random.default_rng(1).uniform(-1, 1, (600, 2))
    source = attnc.TableTarget(points, np.sin(points[:, 0] + 2 * points[:, 1]), ["x", "y"])
    attnc.compile(source, eps=1e-3).save(tmp_path / "whole")
    attnc.compile(source, eps=1e-3, proof=False).save(tmp_path / "net")
    return tmp_path / "net"


def composition(tmp_path: Path) -> Path:
    """A network of two attention layers, without a proof. Its five heads make five groups."""
    box = dict.fromkeys("xyz", (-1, 1))
    made = attnc.compile("exp(sin(x)*y) + tanh(x*z)/(2 + y**2)", box, 1e-3, construction="compose", proof=False)
    made.save(tmp_path / "net")
    return tmp_path / "net"


@pytest.mark.parametrize("stored", [False, True])
def test_a_table_is_proved_in_shards(tmp_path, stored, monkeypatch):
    net, place = table(tmp_path, stored=stored, monkeypatch=monkeypatch), tmp_path / "parts"
    assert attnc.load(net).certificate.bound is None
    for k in (2, 1, 3):
        sharding.write_shard(net, place, k, 3)
    merged = sharding.merge_shards(net, place)
    merged.save(net)
    assert (net / "certificate.json").read_bytes() == (tmp_path / "whole" / "certificate.json").read_bytes()
    assert (net / "table.f64").exists() == stored
    sharding.prove_all(net, tmp_path / "again", 3, processes=2)
    assert contents(tmp_path / "again") == contents(place)
    assert attnc_checker.check(net, processes=1).proved
    sent = tasks.task_of(net).files(net, 2, 3)  # as to a worker elsewhere, with the rows of its shard alone
    assert running.prove_shard(sent, 2, 3) == contents(place)["proof.2-of-3.shard"]


def test_heads_are_proved_in_shards(tmp_path):
    net, place = composition(tmp_path), tmp_path / "parts"
    for k in (2, 1):
        sharding.write_shard(net, place, k, 2)
    claim = sharding.merge_shards(net, place).certificate
    assert claim.method == "staged proof"
    assert claim.observed <= claim.bound <= 1e-3
    found = sharding.prove_all(net, tmp_path / "again", 2, processes=2)
    assert contents(tmp_path / "again") == contents(place)
    assert found.certificate == claim
    found.save(net)
    assert attnc.load(net).certificate == claim
    verdict = attnc_checker.check(net, processes=1)
    assert verdict.proved, verdict.reason
    points = np.random.default_rng(0).uniform(-1, 1, (2000, 3))
    x, y, z = points.T
    assert np.abs(found(points) - np.exp(np.sin(x) * y) - np.tanh(x * z) / (2 + y**2)).max() <= claim.bound
    assert sharding.prove_all(net, tmp_path / "parts", 2, None).certificate == claim  # after it was proved, too


def test_lies_about_rows_are_refused(tmp_path, monkeypatch):
    net, place = table(tmp_path, stored=True, monkeypatch=monkeypatch), tmp_path / "parts"
    sharding.prove_all(net, place, 2, None)
    path = place / "proof.2-of-2.shard"
    shard = RowShard(path.read_bytes())
    lie = {name: shard.header[name] * 1e-3 for name in ("bound", "approximation", "rounding")}
    for header, message in (
        (lie, "shard 2 of 2 is wrong: it states the bound"),
        ({"first": 0, "after": 300}, "it proves the rows 0 to 300, not 300 to 600: it was renamed"),
        ({"first": 200}, "it proves the rows 200 to 600"),
        ({"task_sha256": "0" * 64}, "it belongs to another request"),
        ({"bound": -1.0}, "its header does not fit its records"),
        ({"format": "attnc.shard/1"}, "has the format 'attnc.shard/1', not 'attnc.shard.rows/1'"),
    ):
        path.write_bytes(changed(shard, header, b""))
        with pytest.raises(attnc.FileError, match=message):
            sharding.merge_shards(net, place)
    path.write_bytes(shard.content)
    rows = np.fromfile(net / "table.f64")
    rows[5] += 1e-9
    rows.tofile(net / "table.f64")
    with pytest.raises(attnc.FileError, match="is another table"):
        sharding.merge_shards(net, place)
    (net / "table.f64").unlink()
    with pytest.raises(attnc.InputError, match="is not stored: give it with --csv"):
        sharding.merge_shards(net, place)


def test_a_table_that_is_not_stored_is_given_to_every_shard(tmp_path, monkeypatch):
    net, place = table(tmp_path, stored=True, monkeypatch=monkeypatch), tmp_path / "parts"
    rows = str((net / "table.f64").rename(tmp_path / "rows.f64"))
    (tmp_path / "other.f64").write_bytes(b"\0" * Path(rows).stat().st_size)
    with pytest.raises(attnc.FileError, match="the rows that were given are not those of the network"):
        sharding.write_shard(net, place, 1, 2, str(tmp_path / "other.f64"))
    for k in (1, 2):
        sharding.write_shard(net, place, k, 2, rows)
    sharding.merge_shards(net, place, rows).save(net)
    (net / "table.f64").unlink(missing_ok=True)
    for k in (1, 2):
        (verdict,) = attnc_checker.check_shard(net, k, 2, processes=1, table=rows)
        assert verdict.proved, verdict.reason
    assert attnc_checker.merge(net, table=rows)[0].proved
    assert "the table is not stored" in attnc_checker.merge(net)[0].reason


def test_lies_about_heads_are_refused(tmp_path):
    net, place = composition(tmp_path), tmp_path / "parts"
    sharding.prove_all(net, place, 2, None)
    path = place / "proof.1-of-2.shard"
    shard = HeadShard(path.read_bytes())
    for field, factor, message in (
        ("bound", 1e-3, "shard 1 of 2 is wrong: for"),
        ("bound", 1e6, "a bound is above the error that is allowed"),
        ("level", 0, "do not divide its interval|does not fit its records"),
    ):
        leaves = shard.leaves.copy()
        leaves[field] = leaves[field] * factor
        leaves["middle"] = np.clip(leaves["middle"], -leaves["bound"], leaves["bound"])
        header = {"bound": float(leaves["bound"].max())}
        path.write_bytes(changed(shard, header, shard.groups.tobytes() + leaves.tobytes()))
        with pytest.raises(attnc.FileError, match=message):
            sharding.merge_shards(net, place)
    path.write_bytes((place / "proof.2-of-2.shard").read_bytes())
    with pytest.raises(attnc.FileError, match=r"it proves the groups of heads \[1, 3.* it was renamed"):
        sharding.merge_shards(net, place)


@pytest.mark.parametrize(
    ("source", "names", "norm", "eps"), [(SOURCE, "xy", 2, 1e-4), ("sin(x*y*z*t)", "xyzt", "inf", 0.02)]
)
def test_norms_and_four_variables_are_proved_in_shards(tmp_path, source, names, norm, eps):
    box = dict.fromkeys(names, (-1, 1))
    made = attnc.compile(source, box, eps, norm=norm, construction="spectral_grid", proof=False)
    made.save(tmp_path / "net")
    found = sharding.prove_all(tmp_path / "net", tmp_path / "parts", 3, None)
    claim = found.certificate
    assert claim.observed <= claim.bound <= eps
    assert sum(term.value for term in claim.terms) <= claim.bound
    found.save(tmp_path / "net")
    assert attnc.load(tmp_path / "net").certificate == claim
    if norm == 2:
        verdict = attnc_checker.check(tmp_path / "net", processes=1)
        assert verdict.proved, verdict.reason
        assert claim.observed * (1 - 1e-2) <= verdict.reproved <= claim.bound


def attnc_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "attnc", *map(str, arguments)]


def test_two_workers_of_a_cluster_make_the_same_files(raw, parts, tmp_path):
    """The test starts the scheduler and the workers, each in a process of its own. One worker is lost meanwhile."""
    pytest.importorskip("distributed")
    started = list[subprocess.Popen]()

    def start(*command: str) -> subprocess.Popen:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "distributed.cli." + command[0], *command[1:]],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=tmp_path,
            )
        )
        return started[-1]

    file = tmp_path / "scheduler.json"
    try:
        start("dask_scheduler", "--port", "0", "--no-dashboard", "--host", "127.0.0.1", "--scheduler-file", str(file))
        for _ in range(600):
            if file.exists() and file.stat().st_size:
                break
            time.sleep(0.1)
        address = read_json(file)["address"]
        quick = ("--nthreads", "1", "--no-dashboard", "--no-nanny")
        lost = start("dask_worker", address, *quick)
        start("dask_worker", address, *quick)
        for _ in range(600):
            try:
                require_cluster(address)
                break
            except attnc.InputError:
                time.sleep(0.1)
        seen = list[float]()

        def progress(step: str, part: float) -> None:
            seen.append(part)
            if len(seen) == 2:
                lost.send_signal(signal.SIGKILL)

        network = sharding.prove_all(raw, tmp_path / "parts", SHARDS, address, progress=progress)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert contents(tmp_path / "parts") == contents(parts)
    assert network.certificate == sharding.merge_shards(raw, parts).certificate
    assert seen == sorted(seen)


@pytest.mark.slow
def test_killed_at_twenty_points(raw, tmp_path):
    """Coordinator or worker, by SIGKILL: nothing is lost, nothing proved twice, and the certificate is the same."""
    place, rng, kept = tmp_path / "parts", random.Random(0), dict[str, tuple[int, int]]()
    count, kills = 40, 0
    place.mkdir()
    command = attnc_command("prove", raw, "--cluster", "local", "--shards", count, "--out", place, "--processes", 2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    saved = {path: path.read_bytes() for path in raw.iterdir()}
    try:
        while True:
            child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
            try:
                child.wait(rng.uniform(2.0, 8.0) if kills < 20 else None)
            except subprocess.TimeoutExpired:
                workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
                victim = int(rng.choice(workers)) if workers and kills % 2 else child.pid
                os.kill(victim, signal.SIGKILL)
                kills += 1
                if victim != child.pid:
                    time.sleep(1.0)
                    child.kill()
                child.wait()
            found = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in sharding.shard_files(place)}
            assert kept.items() <= found.items()
            kept = found
            if child.returncode == 0:
                break
        certificate = (raw / "certificate.json").read_bytes()
    finally:
        for path in raw.iterdir():
            path.unlink()
        for path, content in saved.items():
            path.write_bytes(content)
    alone = tmp_path / "alone"
    sharding.prove_all(raw, alone, count, processes=1).save(tmp_path / "net")
    assert contents(place) == contents(alone)
    assert certificate == (tmp_path / "net" / "certificate.json").read_bytes()
