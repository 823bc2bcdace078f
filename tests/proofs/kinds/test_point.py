"""Tables: every point is proved; the bound holds against exact arithmetic, and is close to the error."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import attnc
from attnc.errors import ProgramError
from attnc.numerics.limits import time_limit
from attnc.proofs.cells.kind import SHARP
from attnc.proofs.kinds.point import PointProver, constants
from attnc.proofs.kinds.taylor import TaylorKind
from attnc.proofs.prover import ProofRequest
from attnc.proofs.stages.extraction import stages

RNG = np.random.default_rng(3)
X = np.linspace(-1, 1, 60)
SCATTERED = RNG.uniform(-1, 1, (80, 2))
TABLES = [
    attnc.TableTarget(X, np.sin(3 * X)),
    attnc.TableTarget(X, RNG.normal(size=(60, 2))),
    attnc.TableTarget(SCATTERED, RNG.normal(size=80)),
]


@pytest.mark.parametrize("table", TABLES, ids=["smooth", "two outputs", "scattered"])
def test_every_point_is_proved(table):
    net = attnc.compile(table, eps=1e-3)
    claim = net.certificate
    assert claim.method == f"proof at the table's {table.num_points:,} points"
    assert claim.num_points == table.num_points
    errors = np.abs(net.program(table.points).reshape(table.values.shape) - table.values)
    assert errors.max() <= claim.bound <= 1e-3
    assert claim.observed <= claim.bound <= 1.05 * claim.observed + 1e-9
    assert {term.name for term in claim.terms} == {"approximation", "rounding"}


def test_one_wrong_value_is_seen():
    table = TABLES[0]
    program = attnc.compile(table, eps=1e-3).program
    values = table.values.copy()
    values[17] += 0.25
    wrong = attnc.TableTarget(table.points, values)
    assert 0.249 <= PointProver().prove(program, wrong, ProofRequest()).bound <= 0.252
    kind = TaylorKind(stages(program)[0][0], functools.partial(constants, values), 1)
    assert np.argmax(kind.bounds(table.points, np.zeros_like(table.points), SHARP).upper[:, 0]) == 17


def test_a_part_of_a_table_proves_nothing():
    program = attnc.compile(TABLES[0], eps=1e-3).program
    with time_limit(0), pytest.raises(ProgramError, match="not enough to prove all 60 points"):
        PointProver().prove(program, TABLES[0], ProofRequest())
    with pytest.raises(ProgramError, match="if one token makes them all"):
        PointProver().prove(program, TABLES[1], ProofRequest())
