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
from attnc.scheduling import require_cluster

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
        for key, arguments in tasks.items():
            proved.append(key)
            yield key, function(*arguments)

    monkeypatch.setattr(sharding, "finished", here)
    sharding.prove_all(raw, place, SHARDS)
    assert proved == [2, 5]
    assert contents(place) == contents(parts)


def test_a_wrong_shard_of_a_worker_is_refused(raw, parts, tmp_path, monkeypatch):
    other = (parts / shard_name(sharding.STEM, 1, SHARDS)).read_bytes()
    monkeypatch.setattr(sharding, "finished", lambda function, tasks, *_: ((key, other) for key in tasks))
    with pytest.raises(attnc.FileError, match="a worker returned a wrong shard 2 of 6: it proves the cells"):
        sharding.prove_all(raw, tmp_path / "parts", SHARDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: os.unlink(place[3]), "lacks 1 of 6 shards: 3/6"),
        (lambda place: place[2].write_bytes(place[1].read_bytes()), "it was renamed"),
        (lambda place: place[2].write_bytes(place[2].read_bytes()[:-5]), "is no whole shard"),
        (lambda place: place[2].write_bytes(place[2].read_bytes()[:-27]), "its header does not fit its leaves"),
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


def changed(content: bytes, header: dict[str, object] | None = None, factor: float = 1.0) -> bytes:
    """A shard with other fields in its header, and all bounds times a factor: every other part of it fits."""
    shard = sharding.Shard(content)
    rows = shard.rows.copy()
    rows["bound"] *= factor
    stated = shard.header | (header or {})
    stated["bound"] = float(rows["bound"].max())
    stated["terms"] = [term | {"value": factor * term["value"]} for term in stated["terms"]]
    text = json.dumps(stated).encode()
    return len(text).to_bytes(8, "little") + text + rows.tobytes()


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
    liar.write_bytes(changed(liar.read_bytes(), header, factor))
    with pytest.raises(attnc.FileError, match=message):
        sharding.merge_shards(raw, tmp_path)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: attnc.compile(attnc.TableTarget([0, 1, 2], [1, 3, 2]), eps=1e-3), "tables and code are proved in one"),
        (lambda: attnc.compile("x*y*z", dict.fromkeys("xyz", (-1, 1)), 0.1, construction="compose"), "one attention"),
        (lambda: attnc.compile("sign(x)", {"x": (-1, 1)}, 0.1, norm=2), "shards prove continuous functions"),
    ],
)
def test_other_proofs_are_made_in_one_piece(tmp_path, net, message):
    net().save(tmp_path / "net")
    with pytest.raises(attnc.InputError, match=message):
        sharding.write_shard(tmp_path / "net", tmp_path, 1, 2)


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
