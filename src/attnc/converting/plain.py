"""Activations as torch functions on CPUs without numba: one exponential for each element, or two.

Elements are computed in blocks, so that intermediate results stay in the second cache, and in place. There is no
`torch.where`: on a CPU it takes as long as ten products.

Switches.   Two keys, or three steep ones. With s_i = 1/(1 + e^{−(β_i·x + γ_i)}) for neighbouring keys, the weights are
            1 − s_1, s_1 − s_2, s_2. They are exactly 0 and 1 far from where the scores of the two are equal. Of three
            keys the outer two never have weight at once, as β times the distance of the kinks is at least KINKS_APART.
Quotients.  Three keys, with E = e^{δx} as far as E² is finite, and curves, where R is the weight of the line:

                y = (Σ C_k·E^k(v_k + u_k·x) + R·(v + u·x))/(Σ C_k·E^k + R).

Ramps.      As in `evaluation`. A line on either side of 0 is αx + κ|x|, and the derivative of |x| at 0 is 0, as that of
            the even part of a smooth function is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnc.converting.evaluation import LARGEST_OFFSET_RANGE, MOST_KEYS, Evaluation, powers_weights

LOG2_E = 1.4426950408889634
"""log₂ e. torch.exp takes ten times as long where its results are as small as those of steep keys; exp2 does not."""
ELEMENTS_AT_ONCE = 2**17
"""Number of elements of a block. Fewer start torch's functions too often, and more leave the second cache."""
LARGEST_POWER = {torch.float32: 43.0, torch.float64: 350.0}
"""The largest exponent of E: E² is finite, and the weights of other keys are below 1e-18."""
Run = Callable[[Tensor], Tensor]
StoredKeys = tuple[Tensor, Tensor, Tensor, Tensor]
Numbers = tuple[list[float], list[float], list[float], list[float]]


def run(evaluation: Evaluation, keys: StoredKeys, is_product: bool, x: Tensor, limits: Run) -> Tensor:
    """Return the activation of a flat x. `limits` computes blocks with numbers that are infinite or not a number."""
    out, (formula, _) = torch.empty_like(x), formulas_of(evaluation, keys, is_product, x.dtype)
    with torch.no_grad():
        for start in range(0, len(x), ELEMENTS_AT_ONCE):
            here = x[start : start + ELEMENTS_AT_ONCE]
            y = formula(here)
            out[start : start + ELEMENTS_AT_ONCE] = y if torch.isfinite(y.sum()) else limits(here)
    return out


def run_backward(
    evaluation: Evaluation, keys: StoredKeys, is_product: bool, x: Tensor, grad: Tensor, limits: Run
) -> Tensor:
    """Return grad times the derivative. `limits` computes the derivative of such blocks."""
    out, (_, slope) = torch.empty_like(x), formulas_of(evaluation, keys, is_product, x.dtype)
    for start in range(0, len(x), ELEMENTS_AT_ONCE):
        here, grad_here = x[start : start + ELEMENTS_AT_ONCE], grad[start : start + ELEMENTS_AT_ONCE]
        found = slope(here).mul_(grad_here)
        out[start : start + ELEMENTS_AT_ONCE] = found if torch.isfinite(found.sum()) else grad_here * limits(here)
    return out


def formulas_of(evaluation: Evaluation, keys: StoredKeys, is_product: bool, dtype: torch.dtype) -> tuple[Run, Run]:
    """Return the activation as a function of one block, and its derivative. Both change no argument."""
    if evaluation.kind in ("ramp", "ramp_values"):
        return _ramp(evaluation)
    order = torch.argsort(keys[0])
    a, c, v, u = (key[order].tolist() for key in keys)
    if evaluation.kind == "curve":  # where the line has all the weight, E is not used
        return _quotients((a, c, v, u), (a[1] - a[0]) * float(evaluation.numbers[7]), evaluation)
    if evaluation.kind == "sided" and len(a) > 2:
        return _quotients((a, c, v, u), LARGEST_POWER[dtype])
    return _switches((a, c, v, u), is_product)


# --- switches ---------------------------------------------------------------------------------------------------------


def _switches(keys: Numbers, is_product: bool) -> tuple[Run, Run]:
    a, c, v, u = keys
    beta, gamma = ([right - left for left, right in itertools.pairwise(each)] for each in (a, c))

    def switch(x: Tensor, i: int) -> Tensor:
        power = torch.mul(x, -beta[i] * LOG2_E)
        power = power.add_(-gamma[i] * LOG2_E) if gamma[i] else power
        return power.exp2_().add_(1).reciprocal_()

    def mean(s: list[Tensor], numbers: list[float]) -> Tensor | None:
        """Return Σ w_k·numbers_k, or None if it is 0."""
        first, *middle, last = numbers
        found = s[-1] * last if last else None
        for i, number in enumerate(middle):
            if number:
                weight = s[i] - s[i + 1]
                found = weight.mul_(number) if found is None else found.add_(weight, alpha=number)
        if first:
            weight = 1 - s[0]
            found = weight.mul_(first) if found is None else found.add_(weight, alpha=first)
        return found

    def head(x: Tensor, s: list[Tensor]) -> Tensor:
        carried, constant = mean(s, u), mean(s, v)
        if carried is None:
            return torch.zeros_like(x) if constant is None else constant
        return carried.mul_(x) if constant is None else constant.addcmul_(carried, x)

    def formula(x: Tensor) -> Tensor:
        y = head(x, [switch(x, i) for i in range(len(beta))])
        return y.mul_(x) if is_product else y

    def slope(x: Tensor) -> Tensor:
        """Return Σ w_k·u_k + Σ β_i·s_i(1 − s_i)·(y_{i+1} − y_i)."""
        s = [switch(x, i) for i in range(len(beta))]
        found = mean(s, u)
        for i, rate in enumerate(beta):
            rise, jump = u[i + 1] - u[i], v[i + 1] - v[i]
            q = torch.addcmul(s[i], s[i], s[i], value=-1)
            if rise and jump:
                q.mul_(torch.mul(x, rise).add_(jump))
            elif rise:
                q.mul_(x)
            factor = rate * (1 if rise and jump else rise or jump)
            found = q.mul_(factor) if found is None else found.add_(q, alpha=factor)
        assert found is not None
        return found.mul_(x).add_(head(x, s)) if is_product else found

    return formula, slope


# --- quotients --------------------------------------------------------------------------------------------------------


def _quotients(keys: Numbers, largest: float, curve: Evaluation | None = None) -> tuple[Run, Run]:
    a, c, v, u = keys
    group = slice(0, None if curve is None else -1)
    C = powers_weights(torch.tensor(c[group], dtype=torch.float64).numpy()).tolist()
    N, M = ([each * weight for each, weight in zip(numbers[group], C, strict=True)] for numbers in (v, u))
    step = a[1] - a[0]
    ahead, offset = a[-1] - a[0], c[-1] - c[0]
    near, gap, gap_slope, bend = (0.0,) * 4 if curve is None else (float(curve.numbers[i]) for i in (7, 27, 28, 29))

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return E, the divisor, the numerator, and R."""
        E = torch.mul(x, step * LOG2_E).clamp_(max=largest * LOG2_E).exp2_()
        below, above = _polynomial(E, C), _polynomial(E, N) if any(N) else None
        if any(M):
            carried = _polynomial(E, M).mul_(x)
            above = carried if above is None else above.add_(carried)
        if curve is None:
            return E, below, above, None
        R = torch.mul(x, ahead * LOG2_E).add_(offset * LOG2_E).clamp_(max=LARGEST_OFFSET_RANGE * LOG2_E).exp2_()
        line = torch.mul(x, u[-1]).add_(v[-1]) if v[-1] else x
        value = 1.0 if v[-1] else u[-1]
        above = torch.mul(R, line).mul_(value) if above is None else above.addcmul_(R, line, value=value)
        return E, below.add_(R), above, R

    def formula(x: Tensor) -> Tensor:
        _, below, above, _ = parts(x)
        return torch.zeros_like(x) if above is None else above.div_(below)

    def slope(x: Tensor) -> Tensor:
        """With y = S/T, y′ = (M + δ·E(N′ + x·M′ − y·D′) + R(s(line − y) + u))/T.

        Beyond a kink the slope is that of the line. `evaluation` states how line − y is computed.
        """
        x = x if curve is None else x.clamp(max=near)
        E, below, above, R = parts(x)
        y = torch.zeros_like(x) if above is None else above.div_(below)
        rise = _rising(E, C).mul_(y).neg_()
        rise = rise.add_(_rising(E, N)) if any(N[1:]) else rise
        rise = rise.addcmul_(_rising(E, M), x) if any(M[1:]) else rise
        found = rise.mul_(step)
        found = found.add_(_polynomial(E, M)) if any(M) else found
        if R is not None:
            close = x.clamp(min=-near)
            between = torch.mul(close, -bend).add_(gap_slope).mul_(close).add_(gap)  # line − curve
            found.addcmul_(R, between.mul_(below - R).div_(below).mul_(ahead).add_(u[-1]))
        return found.div_(below)

    return formula, slope


def _rising(E: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return E times the derivative of Σ numbers_k·E^k."""
    return _polynomial(E, [k * number for k, number in enumerate(numbers)])


# --- ramps ------------------------------------------------------------------------------------------------------------


def _ramp(evaluation: Evaluation) -> tuple[Run, Run]:
    c = evaluation.numbers.tolist()
    step, value, first, last, J = c[5:10]
    size = (MOST_KEYS[evaluation.kind] - 1) // 2
    P, A, V = ([0.0, *c[start : start + size]] for start in (10, 10 + size, 10 + 2 * size))
    P[0] = 1.0
    K, middle = c[10 + 3 * size :], (first + last) / 2
    has_values = evaluation.kind == "ramp_values"

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return |x|, σ, q, 1 − 2σ and A(q)."""
        t = x.abs()
        E = torch.mul(t, -step * LOG2_E).exp2_()
        s = E.div_(E + 1)
        q = torch.addcmul(s, s, s, value=-1)
        return t, s, q, torch.mul(s, -2).add_(1), _polynomial(q, A)

    def formula(x: Tensor) -> Tensor:
        t, s, q, m, above = parts(x)
        above.mul_(m)
        if has_values:
            above = _polynomial(q, V).addcmul_(t, above, value=-1).div_(_polynomial(q, P))
            below = above.addcmul_(t, s, value=-J).neg_()
        else:
            below = above.div_(_polynomial(q, P)).add_(s, alpha=J).mul_(t)
        y = torch.mul(x, middle).add_(t, alpha=(last - first) / 2) if middle else t.mul_((last - first) / 2)
        y = y.sub_(below)
        return y.add_(value) if value else y

    def slope(x: Tensor) -> Tensor:
        """The derivatives are those of `kernels_numba.ramp_slope` and `ramp_values_slope`."""
        t, s, q, m, above = parts(x)
        inverse, P_slope = _polynomial(q, P).reciprocal_(), _polynomial(q, _derivative(P))
        if has_values:
            above.mul_(m)
            ratio = _polynomial(q, V).addcmul_(t, above, value=-1).mul_(inverse)
            rise = _polynomial(q, _derivative(V)).addcmul_(ratio, P_slope, value=-1).mul_(m)
            rise.addcmul_(t, _polynomial(q, K))
            fall = above.addcmul_(q, rise, value=step).mul_(inverse).add_(s, alpha=J)
        else:
            ratio = above.mul_(inverse)
            rise = _polynomial(q, _derivative(A)).addcmul_(ratio, P_slope, value=-1).mul_(inverse)
            rise.mul_(m).mul_(m).add_(ratio, alpha=-2).add_(J).mul_(q)
            fall = s.mul_(J).addcmul_(m, ratio).addcmul_(rise, t, value=-step)
        return fall.neg_().add_((last - first) / 2).mul_(x.sign()).add_(middle)

    return formula, slope


def _derivative(numbers: Sequence[float]) -> list[float]:
    return [*(k * number for k, number in enumerate(numbers) if k), 0.0]


def _polynomial(q: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return Σ numbers_k·q^k."""
    while len(numbers) > 2 and numbers[-1] == 0:
        numbers = numbers[:-1]
    found = q * numbers[-1]
    for number in reversed(numbers[1:-1]):
        found.add_(number).mul_(q)
    return found.add_(numbers[0]) if numbers[0] else found
