"""Tables: the claim about every row is proved again, and every change to one is refused for its own reason."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
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


def test_a_table_that_is_too_large_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr("attnc.proofs.kinds.point.MAX_STORED", 100)
    attnc.compile(table_of(0, 40, 2), eps=1e-3).save(tmp_path / "net")
    assert "the table is not stored" in refusal(tmp_path / "net")
