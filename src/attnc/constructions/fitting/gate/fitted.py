"""Smooth activations by a few keys with solved values, on all of R: the end keys carry the limits exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.gate.keys import (
    Gate,
    OutOfReach,
    at_points,
    half_line,
    observed,
    positive,
    reach_of,
    tail,
)
from attnc.constructions.fitting.minimax import fit_values
from attnc.functions.gate_recipes import FittedKeys
from attnc.functions.gate_table import GELU_TANH
from attnc.functions.logistic import SOFTPLUS, logistic
from attnc.ir.soft_head import SoftHead

if TYPE_CHECKING:
    from jaxtyping import Float

FIT_PASSES = 24
"""Number of reweightings of a fit; the errors in the gate table hold for this number."""
TANH_CUBIC = 0.044715
"""The coefficient of x³ in the tanh approximation of GELU."""


def fitted_gate(name: str, recipe: FittedKeys, eps: float) -> Gate:
    """The cheapest row of the table whose error is ≤ eps."""
    errors = {p: row[-1] for p, row in recipe.rows.items()}
    return min_keys(name, eps, errors, lambda p: solved_gate(name, recipe, p))


def min_keys(name: str, eps: float, hints: dict[int, float], make: Callable[[int], Gate]) -> Gate:
    """The gate with the least p whose error is ≤ eps. Rows whose hint is more than 10 % above eps are not tried."""
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
def solved_gate(name: str, recipe: FittedKeys, p: int) -> Gate:
    """The gate of one row: its slopes and offsets, and the values that make the largest error least."""
    right, height, _ = recipe.rows[p]
    middle = [0.0] * (p % 2)
    slopes = np.array([*(-a for a in reversed(right)), *middle, *right])
    offsets = np.array([*reversed(height), *middle, *height])
    no_values = SoftHead.of_one_variable(slopes, offsets, np.zeros(p))
    keys = _ramp(recipe, no_values) if recipe.limit is None else _odd(recipe, no_values)
    reach = reach_of(keys)
    # |gate − f| is even: x ≤ 0 is enough, where a ramp is small and float64 hides nothing of it.
    size = max(1.0, float(np.abs(keys.values).max()))
    core = observed(lambda t: at_points(keys, -t) - recipe.below(-t), half_line(reach), size)
    error = max(core, tail(keys, reach) + recipe.tail(reach))
    return Gate.one_head(name, keys, error, recipe.lipschitz)


def _sample(reach: float) -> Float[np.ndarray, " points"]:
    return np.concatenate(
        [-(np.linspace(0.0, 1.0, 300)[1:] ** 1.5) * min(reach, 30.0), -np.geomspace(30.0, reach, 100)[1:]]
    )


def _sides(keys: SoftHead[np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights to the right and left of 0, from the inside out, and that of the middle, if any."""
    weights, p, m = keys.weights(x[:, None]), keys.num_keys, keys.num_keys // 2
    return weights[:, p - m :], weights[:, :m][:, ::-1], weights[:, m : p - m]


def _ramp(recipe: FittedKeys, keys: SoftHead[np.ndarray]) -> SoftHead[np.ndarray]:
    """f − x/2 − ½x(w_last − w_first) = Σ μ_k·x(w_k − w_{−k}) + Σ ν_k(w_k + w_{−k}), over all pairs but the last."""
    p, m = keys.num_keys, keys.num_keys // 2
    x = _sample(max(30.1, reach_of(keys)))
    right, left, middle = _sides(keys, x)
    columns = [x[:, None] * (right - left)[:, :-1]]
    if not recipe.is_pure:
        columns += [(right + left)[:, :-1], middle]
    rest = recipe.below(x) - 0.5 * x * (1 + right[:, -1] - left[:, -1])
    solved = _solve(np.concatenate(columns, axis=1), rest)
    outer = np.append(0.5 + solved[: m - 1], 1.0)
    values = np.zeros(p)
    if not recipe.is_pure:
        nu = np.append(solved[m - 1 : 2 * (m - 1)], 0.0)
        values = np.concatenate([nu[::-1], solved[2 * (m - 1) :], nu])
    carried = np.concatenate([1.0 - outer[::-1], [0.5] * (p % 2), outer])
    return SoftHead.of_one_variable(keys.slopes[:, 0], keys.offsets, values, carried)


def _odd(recipe: FittedKeys, keys: SoftHead[np.ndarray]) -> SoftHead[np.ndarray]:
    """f − limit·(w_last − w_first) = Σ ν_k(w_k − w_{−k}), over all pairs but the last."""
    assert recipe.limit is not None
    x = _sample(max(30.1, reach_of(keys)))
    right, left, _ = _sides(keys, x)
    solved = _solve((right - left)[:, :-1], recipe.below(x) - recipe.limit * (right - left)[:, -1])
    outer = np.append(solved, recipe.limit)
    values = np.concatenate([-outer[::-1], [0.0] * (keys.num_keys % 2), outer])
    return SoftHead.of_one_variable(keys.slopes[:, 0], keys.offsets, values)


def _solve(columns: np.ndarray, rest: np.ndarray) -> np.ndarray:
    if not columns.shape[1]:
        return np.zeros(0)
    return fit_values(columns, rest[:, None], np.array([math.inf]), FIT_PASSES).values[:, 0]


def _gelu_tanh_below(x: np.ndarray) -> np.ndarray:
    x = np.maximum(x, -100.0)  # below −100 the value is 0 in float64, and x³ might overflow
    return x * logistic(2 * math.sqrt(2 / math.pi) * (x + TANH_CUBIC * x**3))


GELU_TANH_KEYS = FittedKeys(_gelu_tanh_below, lambda x: x * math.exp(-1.59 * x), 1.128993068658772, GELU_TANH)


def gelu_tanh(eps: float) -> Gate:
    """x·σ(2√(2/π)(x + 0.044715x³)), which is ½x(1 + tanh(√(2/π)(x + 0.044715x³)))."""
    return fitted_gate("gelu_tanh", GELU_TANH_KEYS, eps)


def softplus(eps: float, beta: float = 1.0) -> Gate:
    """log(1 + e^{βx})/β: values that are affine in x, x and 0 at the ends."""
    beta, recipe = positive("beta", beta), SOFTPLUS.gate
    assert isinstance(recipe, FittedKeys)
    gate = fitted_gate("softplus", recipe, positive("eps", eps) * beta)
    assert gate.keys is not None
    # G(βx)/β carries the same multiples of x as G. Rounded, (u·β)/β is not 1 for every β: the error would grow with x.
    keys = replace(gate.keys.scaled(beta).combined(1 / beta), carried=gate.keys.carried)
    return Gate.one_head("softplus", keys, gate.error / beta * (1 + 1e-14), 1.0)


def logsigmoid(eps: float) -> Gate:
    """log σ(x) = −softplus(−x)."""
    gate = softplus(eps)
    assert gate.keys is not None
    keys = gate.keys.scaled(-1.0).combined(-1.0)

    def build(circuit: Circuit, x: Wire) -> Wire:
        return circuit.apply(keys, x, name="logsigmoid")

    return replace(gate, name="logsigmoid", keys=keys, build=build)
