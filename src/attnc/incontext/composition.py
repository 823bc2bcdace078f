"""Two levels: the steps of one task, then those of another from where the first ended, in one program.

Theorem.  Let task k be a quadratic with plan k (`errors`), task 2 begun at what task 1 returned, at rest. Then the
          program is within  contraction₂·ε₁ + ε₂  of exact descent on the two, ε_k = amplification_k·(δ_k + updates).
Proof.    Exact steps of task 2 from two starts differ by contraction₂ times what the starts differ by, since at rest
          both states start alike and the steps are the same polynomial in the Hessian. Within task 2 errors add as
          ever, with residuals bounded for the start |w| ≤ |w₁*| + |w₁ − w₁*|.
"""

from __future__ import annotations

from attnc.errors import InputError
from attnc.incontext.descent import descent_program
from attnc.incontext.differences import SLACK
from attnc.incontext.errors import Plan
from attnc.ir.program import Program
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import up


def reached(plan: Plan) -> float:
    """|w| of what the plan's steps return, at most: what the second task is begun at."""
    return float(up(plan.weights + plan.bound.value, SLACK))


def compose(first: Plan, second: Plan, dtype: str = "float64") -> tuple[Program, Bound]:
    """The program of both, its prompt the first task's rows above the second's; and |program − exact descent|₂.

    Plan the second with start=reached(first).
    """
    if second.start < reached(first):
        raise InputError(
            f"the second task is planned for a start of norm ≤ {second.start:.3g}, but the first may return weights of "
            f"norm {reached(first):.3g}: plan it with start=reached(first)"
        )
    program = descent_program([first.task, second.task], dtype)
    contraction = second.task.schedule.contraction
    terms = [(f"first: {t.name}", contraction * t.value, t.reason) for t in first.bound.terms[1:]]
    terms += [(f"second: {t.name}", t.value, t.reason) for t in second.bound.terms[1:]]
    return program, Bound(tuple(Term(name, float(up(value, SLACK)), reason) for name, value, reason in terms))
