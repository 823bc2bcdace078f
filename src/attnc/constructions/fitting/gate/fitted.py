"""Smooth activations by a few keys with solved values, on all of R: the end keys carry the limits exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.gate.error import half_line, observed, reach_of, tail
from attnc.constructions.fitting.gate.keys import Gate, GateKeys, OutOfReach, positive
from attnc.constructions.fitting.gate.table import ATAN, ERF, GELU, GELU_TANH, SOFTPLUS, Row
from attnc.constructions.fitting.minimax import Function, fit_values
from attnc.numerics.elementary import logistic

if TYPE_CHECKING:
    from jaxtyping import Float

PASSES = 24
ROOT_HALF = math.sqrt(0.5)
CUBIC = 0.044715
"""Of the tanh approximation of GELU: x·σ(2√(2/π)(x + 0.044715x³))."""


@dataclass(frozen=True, eq=False)
class Family:
    """What is fitted, by `below(x)` for x ≤ 0, where it is accurate; symmetry gives the rest.

    A *ramp* is x/2 + an even function, with limits 0 and x: carried parts ½ ± μ_k, values ν_k on either side, and at
    the ends ½ ± ½ and 0. With `is_pure` the values are 0: x times a weight. An *odd* function has values ±ν_k, at the
    ends its limits. `tail(x)` bounds the distance of f from its limit beyond −x.
    """

    name: str
    below: Function
    tail: Callable[[float], float]
    lipschitz: float
    rows: dict[int, Row]
    limit: float | None = None  # of an odd function; None for a ramp
    is_pure: bool = True

    def gate(self, eps: float) -> Gate:
        """The cheapest whose error is ≤ eps."""
        return min_keys(self.name, eps, {p: row[-1] for p, row in self.rows.items()}, lambda p: _solved(self, p))


def min_keys(name: str, eps: float, hints: dict[int, float], make: Callable[[int], Gate]) -> Gate:
    """The first p, in order, whose gate has an error ≤ eps; `hints`, at most 10 % too large, say which not to try."""
    positive("eps", eps)
    for p, hint in sorted(hints.items()):
        if 0.9 * hint <= eps:
            gate = make(p)
            if gate.error <= eps:
                return gate
    best = make(max(hints))
    if best.error <= eps:
        return best
    raise OutOfReach(name, eps, best.error, best.num_anchors)


@functools.lru_cache(maxsize=256)
def _solved(family: Family, p: int) -> Gate:
    right, height, _ = family.rows[p]
    middle = [0.0] * (p % 2)
    slopes = np.array([*(-a for a in reversed(right)), *middle, *right])
    offsets = np.array([*reversed(height), *middle, *height])
    keys = GateKeys(slopes, offsets, np.zeros(p), np.zeros(p))
    keys = _ramp(family, keys) if family.limit is None else _odd(family, keys)
    reach = reach_of(keys)
    # |gate − f| is even: x ≤ 0 is enough, where a ramp is small and float64 hides nothing of it.
    size = max(1.0, float(np.abs(keys.values).max()))
    core = observed(lambda t: keys(-t) - family.below(-t), half_line(reach), size)
    error = max(core, tail(keys, reach) + family.tail(reach))
    return Gate.one_head(family.name, keys, error, family.lipschitz)


def _sample(reach: float) -> Float[np.ndarray, " points"]:
    return np.concatenate(
        [-(np.linspace(0.0, 1.0, 300)[1:] ** 1.5) * min(reach, 30.0), -np.geomspace(30.0, reach, 100)[1:]]
    )


def _sides(keys: GateKeys, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights to the right and left of 0, from the inside out, and that of the middle, if any."""
    weights, m = keys.weights(x), keys.p // 2
    return weights[:, keys.p - m :], weights[:, :m][:, ::-1], weights[:, m : keys.p - m]


def _ramp(family: Family, keys: GateKeys) -> GateKeys:
    """f − x/2 − ½x(w_last − w_first) = Σ μ_k·x(w_k − w_{−k}) + Σ ν_k(w_k + w_{−k}), over all pairs but the last."""
    m = keys.p // 2
    x = _sample(max(30.1, reach_of(keys)))
    right, left, middle = _sides(keys, x)
    columns = [x[:, None] * (right - left)[:, :-1]]
    if not family.is_pure:
        columns += [(right + left)[:, :-1], middle]
    rest = family.below(x) - 0.5 * x * (1 + right[:, -1] - left[:, -1])
    solved = _solve(np.concatenate(columns, axis=1), rest)
    outer = np.append(0.5 + solved[: m - 1], 1.0)
    values = np.zeros(keys.p)
    if not family.is_pure:
        nu = np.append(solved[m - 1 : 2 * (m - 1)], 0.0)
        values = np.concatenate([nu[::-1], solved[2 * (m - 1) :], nu])
    return replace(keys, values=values, carried=np.concatenate([1.0 - outer[::-1], [0.5] * (keys.p % 2), outer]))


def _odd(family: Family, keys: GateKeys) -> GateKeys:
    """f − limit·(w_last − w_first) = Σ ν_k(w_k − w_{−k}), over all pairs but the last."""
    assert family.limit is not None
    x = _sample(max(30.1, reach_of(keys)))
    right, left, _ = _sides(keys, x)
    solved = _solve((right - left)[:, :-1], family.below(x) - family.limit * (right - left)[:, -1])
    outer = np.append(solved, family.limit)
    return replace(keys, values=np.concatenate([-outer[::-1], [0.0] * (keys.p % 2), outer]))


def _solve(columns: np.ndarray, rest: np.ndarray) -> np.ndarray:
    if not columns.shape[1]:
        return np.zeros(0)
    return fit_values(columns, rest[:, None], np.array([math.inf]), PASSES).values[:, 0]


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.array([math.erfc(t) for t in x.tolist()])


def _gelu_below(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * _erfc(-ROOT_HALF * x)


def _gelu_tanh_below(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -100.0)  # x³ is far beyond what matters
    return x * logistic(2 * math.sqrt(2 / math.pi) * (x + CUBIC * x**3))


def _softplus_below(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def _erf_below(x: np.ndarray) -> np.ndarray:
    return _erfc(-x) - 1.0


_GELU = Family("gelu", _gelu_below, lambda x: math.exp(-x * x / 2), 1.1289041451851551, GELU)
_GELU_TANH = Family("gelu_tanh", _gelu_tanh_below, lambda x: x * math.exp(-1.59 * x), 1.128993068658772, GELU_TANH)
_SOFTPLUS = Family("softplus", _softplus_below, lambda x: math.exp(-x), 1.0, SOFTPLUS, is_pure=False)
_ERF = Family("erf", _erf_below, lambda x: math.exp(-x * x), 1.1283791670955128, ERF, limit=1.0)


def _graded_row(K: float, step: float, first: float, gap: float, error: float, count: int) -> Row:
    s = first + step * np.arange(count)
    slopes = math.exp(-first) * (1 + gap) - np.exp(-s)
    return tuple(slopes.tolist()), tuple((-K * (s - first)).tolist()), error


_ATAN_ROWS = {p: _graded_row(*row, p // 2) for p, row in ATAN.items()}
_ATAN = Family("atan", np.arctan, lambda x: 1 / x, 1.0, _ATAN_ROWS, limit=math.pi / 2)


def gelu(eps: float) -> Gate:
    """x·Φ(x)."""
    return _GELU.gate(eps)


def gelu_tanh(eps: float) -> Gate:
    """x·σ(2√(2/π)(x + 0.044715x³)), which is ½x(1 + tanh(√(2/π)(x + 0.044715x³)))."""
    return _GELU_TANH.gate(eps)


def erf(eps: float) -> Gate:
    """2Φ(√2·x) − 1, values ∓1 at the ends."""
    return _ERF.gate(eps)


def atan(eps: float) -> Gate:
    """Slopes crowd towards their limit, as arctan nears ±π/2 like 1/x: the error falls like e^{−C√p} only."""
    return _ATAN.gate(eps)


def softplus(eps: float, beta: float = 1.0) -> Gate:
    """log(1 + e^{βx})/β: values that are affine in x, x and 0 at the ends."""
    beta = positive("beta", beta)
    gate = _SOFTPLUS.gate(positive("eps", eps) * beta)
    assert gate.keys is not None
    # G(βx)/β carries what G does, exactly: (u·β)/β would not be 1 for every β, and then be off at ∞.
    keys = replace(gate.keys.at(beta).combined(1 / beta), carried=gate.keys.carried)
    return Gate.one_head("softplus", keys, gate.error / beta * (1 + 1e-14), 1.0)


def logsigmoid(eps: float) -> Gate:
    """log σ(x) = −softplus(−x)."""
    gate = softplus(eps)
    assert gate.keys is not None
    keys = gate.keys.at(-1.0).combined(-1.0)

    def build(circuit: Circuit, x: Wire) -> Wire:
        return keys.build(circuit, x, "logsigmoid")

    return replace(gate, name="logsigmoid", keys=keys, build=build)
