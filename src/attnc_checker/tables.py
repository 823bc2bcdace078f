"""Tables: the network is compared with every row at its point. Between the points nothing is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flint import arb

from attnc_checker.claims import AtPoints, Claim, Rows
from attnc_checker.expressions import Function, Operation
from attnc_checker.leaves import Prover
from attnc_checker.program import exact
from attnc_checker.proving import FINE, Proof, Subject
from attnc_checker.ranges import Box


@dataclass(frozen=True, kw_only=True)
class Table(Subject):
    """A point, and the values there, for every row."""

    rows: Rows

    def found(self, n: int) -> float:
        """Return the bound that is found at the point of row n."""
        d = len(self.claim.ends)
        point, values = self.rows[n][:d], self.rows[n][d:]
        shares = [
            (exact(x) - exact(lo)) / (exact(hi) - exact(lo)) for x, (lo, hi) in zip(point, self.claim.ends, strict=True)
        ]
        cell = FINE, tuple(min(2**FINE - 1, int((share * 2**FINE).floor())) for share in shares)
        prover, box = replace(self.near(cell), function=constants(values)), Box([*map(arb, point)], [arb(0)] * d)

        def name() -> str:
            where = ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.claim.variables, point, strict=True))
            return f"the row leaf {n}, {where},"

        return float(self.hold(name, self.bounds[n], 1, lambda room: prover.error("taylor", 1, box, room)))


def by_rows(claim: Claim, evidence: AtPoints, prover: Prover) -> Proof:
    rows = evidence.rows
    table = Table(claim, (), [claim.bound] * len(rows), prover, rows=rows)
    return Proof([table], scope=f"at the table's {len(rows):,} points, and nowhere else")


def constants(values: Sequence[float]) -> Function:
    """Return the function that has these values everywhere."""
    return Function({i: Operation("constant", (exact(x),)) for i, x in enumerate(values)}, range(len(values)))
