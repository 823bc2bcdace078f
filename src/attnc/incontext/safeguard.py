"""Programs that cannot diverge: after every step, each weight is kept within [−B, B] by two gates.

Inside of [−B, B] the gates change no bit: a weight of attention below e^−745 is 0. So within its domain a safeguarded
program computes what the plain one does. Outside of the domain the steps would grow by a factor each; now they cannot.

Theorem.  Let |x̃_i|₂ ≤ X and |y_i| ≤ Y for at most N examples, |start_c| ≤ B, and B' = B + 0.56/β + γ₁₆(U + B), where
          U bounds a weight before the gates. If B' ≤ 2B, then |v_c| ≤ B' after every step, for every such prompt,
          whatever its eigenvalues. The iterate p of Nesterov's method, which has no gates, is at most U.
Proof.    By induction |v_c|, |p_c| ≤ 2B (for Nesterov |p_c| ≤ P, below), so every residual is at most r̂ = 2B√d·X + Y.
          A head at scale s = jε returns values of norm ≤ X, times weights that sum to at most min(1, N e^{s r̂ − C}).
          Hence |g| ≤ Ĝ = X Σ_h |W_O| min(1, N e^{s_h r̂ − C}). The update gives
          |v'| ≤ U = (|1 − ηλ| + 2β_t) 2B + ηĜ, and for Nesterov P = |1 − ηλ| 2B + ηĜ, U = (1 + 2β_t) P.
          The gates return v' − soft(v'). Exactly this is clip(v', −B, B). Each gate errs by at most 0.2785/β, and
          rounding by at most γ₁₆ of |v'| + B.
"""

from __future__ import annotations

import math

from attnc.errors import InputError
from attnc.incontext.descent import Task, gate_slope
from attnc.incontext.differences import CLOSED_FORM_SLACK
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up

GATES = 0.56
"""Two gates u·σ(βu) differ from relu(u) by at most 0.2785/β each, rounded up: 0.2785 is W(1/e)."""
GRADIENT_SLACK = 1.001
"""The factor that covers the rounding of one gradient layer, whose relative error is below 1e-6 in float32."""


def largest_weight(task: Task, x: float, y: float, dtype: str = "float64") -> float:
    """Return a bound of |w_c| for every prompt with |x̃_i| ≤ x and |y_i| ≤ y, or raise InputError if there is none."""
    B, u, d = task.clip, UNIT_ROUNDOFF[dtype], task.prompt.num_weights
    if not (B > 0 and task.loss == "squared"):
        raise InputError("a safeguard needs the squared loss, and a positive bound of the weights")
    residual = 2 * B * math.sqrt(d) * x + y
    C, heads = task.sink(dtype), task.differences
    gradient = 0.0
    for j in heads.nodes:
        share = min(0.0, math.log(task.prompt.rows) + abs(j) * heads.eps * residual - C)
        gradient += abs(heads.weight(j)) * math.exp(C + share) * x * GRADIENT_SLACK
    before = 0.0
    for eta, beta in task.schedule.pairs:
        kept = max(abs(1 - eta * penalty) for penalty in task.penalty)
        moved = kept * 2 * B + eta * gradient
        is_nesterov = task.schedule.iterate == "p"
        before = max(before, (1 + 2 * beta) * moved if is_nesterov else moved + 2 * beta * 2 * B)
    slope = gate_slope(2 * B, dtype)
    after = float(up(B + GATES / slope + gamma(16, u) * (before + B), CLOSED_FORM_SLACK))
    if not after <= 2 * B:
        raise InputError(
            f"no safeguard is possible in {dtype}: with |x| ≤ {x:.3g} a step may move a weight to {before:.3g}, and "
            f"rounding then exceeds its limit of {B:.3g}. Scale the columns, or raise the penalty."
        )
    return float(up(before, CLOSED_FORM_SLACK)) if task.schedule.iterate == "p" else after
