"""Tables: the claim about every row is proved again, and every change to one is refused for its own reason."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

import attnc
import attnc_checker
from checker.networks import grid
from checker.tampering import changes, refusal, reproved, saved_once, weights


def table_of(seed, count, d, outputs=1, *, is_smooth=True, scale=1.0):
    rng = np.random.default_rng(seed)
    points = scale * rng.uniform(-1, 1, (count, d))
    smooth = np.stack([np.sin(points.sum(axis=1) + j) for j in range(outputs)], axis=1)
    return attnc.TableTarget(points, smooth if is_smooth else rng.normal(size=(count, outputs)))


def grid_of(count, f, d=2):
    points = grid([(-1, 1)] * d, count)
    return attnc.TableTarget(points, f(*points.T))


CASES = [
    (table_of(0, 60, 1), 1e-3),
    (table_of(1, 50, 2, 2), 1e-3),
    (table_of(2, 60, 2, is_smooth=False), 1e-1),
    (grid_of(8, lambda x, y: np.exp(x * y)), 1e-4),
    (table_of(3, 40, 1, is_smooth=False, scale=1e3), 1e-1),
]
LARGER = [
    (table_of(0, 2000, 1), 1e-3),
    (table_of(1, 500, 3, 3), 1e-2),
    (grid_of(30, lambda x, y: np.sin(3 * x) * y), 1e-4),
    (grid_of(7, lambda x, y, z: np.sin(x + y * z), 3), 1e-4),
    (table_of(4, 400, 2, is_smooth=False), 1e-1),
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("table", "eps"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGER)])
def test_tables_are_proved_again(tmp_path, table, eps, dtype):
    net = attnc.compile(table, eps=eps, dtype=dtype)
    claim = net.certificate
    assert claim.method == f"proof at the table's {table.num_points:,} points"
    verdict = reproved(tmp_path / "net", net)
    assert attnc.load(tmp_path / "net").certificate == claim
    assert verdict.leaves == table.num_points
    assert claim.observed * (1 - 1e-6) <= verdict.reproved


saved = saved_once(lambda path: reproved(path, attnc.compile(table_of(0, 40, 2), eps=1e-3)))


def entry(row, column, change):
    def apply(data):
        data["table"][row][column] = change(data["table"][row][column])

    return apply


test_a_changed_table = changes(
    {
        ("certificate.json", 1): [
            (entry(7, 2, lambda y: y + 0.01), "the row leaf 7, x0 = "),
            (entry(39, 2, lambda y: y - 0.01), "the row leaf 39, x0 = "),
            (entry(7, 0, lambda x: 0.9 * x), "the row leaf 7, x0 = "),
            (entry(7, 0, lambda x: 1e9), "the point in row 7 of the table lies outside of the box"),
            (lambda data: data["table"].pop(), "the table is not stored, or not whole"),
            (lambda data: data["table"].clear(), "the table is not stored, or not whole"),
            (lambda data: data.pop("table"), "the table is not stored, or not whole"),
            (lambda data: data.update(table=[[*row, 0.0] for row in data["table"]]), "the network has 1 output(s)"),
            (lambda data: data.update(bound=0.9 * data["bound"], observed=0.0), "is not re-proved to"),
            (lambda data: data.update(truncation=0.5 * data["bound"]), "is not re-proved to"),
            (lambda data: data.update(norm="2"), "the norm '2' is for leaves of a bounded box"),
            (lambda data: data.update(method="check at the table's 40 points"), "only proofs, by leaves"),
            (lambda data: data.update(method="proof"), "the leaves do not cover the box"),
        ],
        ("certificate.json", 2): [
            (entry(7, 1, lambda x: "1"), "table[7][1] is '1', not a number"),
            (entry(7, 1, lambda x: True), "table[7][1] is True, not a number"),
            (lambda data: data["table"][5].pop(), "row 5 of the table is no list of as many numbers"),
            (lambda data: data.update(table=[row[:2] for row in data["table"]]), "row 0 of the table is no list"),
        ],
    }
)


PLACES = ["layers.0.embed.constant.values", "layers.0.embed.weight.values"]
test_changed_weights = weights(PLACES, 1.5, ["is not re-proved to"])


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A saved network whose table is in a file of its own."""
    monkeypatch.setattr("attnc.proofs.kinds.point.MAX_STORED", 100)
    attnc.compile(table_of(0, 1400, 2), eps=1e-3).save(tmp_path / "net")
    return tmp_path / "net"


def test_a_large_table_has_a_file_of_its_own(large, tmp_path):
    verdict = attnc_checker.check(large, processes=1)
    assert verdict.proved, verdict.reason
    assert verdict.leaves == 1400
    assert json.loads((large / "certificate.json").read_text())["table"] == []
    again = attnc.load(large)
    assert again.certificate.num_points == 1400
    elsewhere = (large / "table.f64").rename(tmp_path / "rows")
    assert "the table is not stored: give it to `attnc verify` with --csv" in refusal(large)
    assert attnc_checker.check(large, processes=1, table=elsewhere).proved


def test_a_table_beyond_the_limit_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr("attnc.proofs.kinds.point.MAX_STORED", 100)
    monkeypatch.setattr("attnc.proofs.kinds.point.MAX_TABLE_BYTES", 1000)
    attnc.compile(table_of(0, 400, 2), eps=1e-3).save(tmp_path / "net")
    assert not (tmp_path / "net" / "table.f64").exists()
    assert "the table is not stored" in refusal(tmp_path / "net")


def changed_rows(raw: bytes, row: int, column: int, value: float) -> bytes:
    rows = np.frombuffer(raw, "<f8").reshape(-1, 3).copy()
    rows[row, column] = value
    return rows.tobytes()


@pytest.mark.parametrize(
    ("change", "is_hashed", "message"),
    [
        (lambda raw: changed_rows(raw, 700, 2, 3.0), False, "is another table: it has the SHA-256"),
        (lambda raw: changed_rows(raw, 700, 2, 3.0), True, "the row leaf 700, x0 = "),
        (lambda raw: changed_rows(raw, 700, 0, 3.0), True, "the point in row 700 of the table lies outside of the box"),
        (lambda raw: changed_rows(raw, 700, 2, np.nan), True, "row 700 of the table has a number that is not finite"),
        (lambda raw: raw[:-24], True, "does not have 1,400 rows"),
        (lambda raw: raw + raw[:24], True, "does not have 1,400 rows"),
    ],
)
def test_a_changed_file_of_rows(large, change, is_hashed, message):
    path = large / "table.f64"
    path.write_bytes(change(path.read_bytes()))
    if is_hashed:
        stated = json.loads((large / "certificate.json").read_text())
        stated["table_file"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (large / "certificate.json").write_text(json.dumps(stated))
    verdict = attnc_checker.check(large, processes=1)
    assert not verdict.proved
    assert message in verdict.reason


def test_rows_that_change_during_the_check_are_refused(large):
    path = large / "table.f64"

    def progress(proof, jobs, found):
        if len(found) == 1:
            path.write_bytes(path.read_bytes()[:-8] + bytes(8))

    verdict = attnc_checker.check(large, processes=1, progress=progress)
    assert not verdict.proved
    assert "changed while it was read" in verdict.reason
