"""Polynomials in σ(δ(x − x₀)) near the best for a function on an interval, a half line or the whole line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.unary.compass import Shape, descend
from attnc.constructions.unary.keys import Function, Keys
from attnc.constructions.unary.minimax import chebyshev, fit_values
from attnc.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float

Limits = tuple[float | None, float | None]
"""What the head must tend to at −∞ and at +∞; None where it may tend to anything."""

FAR = 700.0
"""σ is 1 there, and e^{−FAR} is still a number."""
PASSES, FINAL_PASSES = 3, 40
COARSE, FINE = 0.17, 0.01
NEAR = 300.0
"""So many times above the goal, the way downhill is still tried."""
FEW = 16
"""Up to so many keys the search is thorough."""


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A head with keys kδ(x − x₀) + log C(n, k)."""

    keys: Keys
    error: float  # the largest on the sample
    shape: Shape  # (log δ, (x₀ − where x₀ is expected)·δ)


@dataclass(frozen=True, eq=False)
class Domain:
    """f on [lo, hi], either of which may be infinite, with the limits that are prescribed."""

    f: Function
    lo: float
    hi: float
    limits: Limits
    max_value: float

    @property
    def base(self) -> float:
        """Where x₀ is expected: the middle, the only end, or 0."""
        ends = [end for end in (self.lo, self.hi) if math.isfinite(end)]
        return sum(0.5 * end for end in ends) if len(ends) == 2 else sum(ends)

    @cached_property
    def most(self) -> Float[np.ndarray, " outputs"]:
        """How large values may be."""
        scale = 1.0 if not math.isfinite(self.hi - self.lo) else 8 / (self.hi - self.lo)
        x = self.sample(scale, self.base, 64)
        return self.max_value * np.abs(self.values(x)).max(axis=0)

    def sample(self, delta: float, centre: float, num_keys: int) -> Float[np.ndarray, " points"]:
        """Chebyshev points in t = σ(δ(x − x₀)), and in x as far as t changes."""
        first, last = np.clip(delta * (np.array([self.lo, self.hi]) - centre), -FAR, FAR).tolist()
        t = chebyshev(1 / (1 + math.exp(-first)), 1 / (1 + math.exp(-last)), 8 * num_keys + 40)
        with np.errstate(divide="ignore"):
            bent = np.clip(np.log(t) - np.log1p(-t), first, last)
        straight = chebyshev(max(first, -40.0), min(last, 40.0), 4 * num_keys + 20)
        return np.unique(np.clip(centre + np.concatenate([bent, straight]) / delta, self.lo, self.hi))

    def values(self, x: np.ndarray) -> np.ndarray:
        f = self.f(x)
        if not np.isfinite(f).all():
            raise InputError(
                "the function has no finite value at a point of the interval: give one that has limits there"
            )
        return f

    def fit(self, keys: Keys, f: np.ndarray, weights: np.ndarray, passes: int, goal: float) -> tuple[Keys, float]:
        """The values of the keys; those at the ends are the prescribed limits."""
        values = np.zeros((keys.p, f.shape[1]))
        free = np.ones(keys.p, bool)
        for k, limit in ((0, self.limits[0]), (keys.p - 1, self.limits[1])):
            if limit is not None:
                values[k], free[k] = limit, False
        rest = f - weights @ values
        error = float(np.abs(rest).max())
        if free.any():
            found = fit_values(weights[:, free], rest, self.most, passes, goal)
            values[free], error = found.values, found.error
        return Keys(keys.slopes, keys.offsets, values), error

    def polynomial(self, num_keys: int, shape: Shape, passes: int = PASSES, goal: float = 0.0) -> Polynomial:
        delta = math.exp(shape[0])
        centre = self.base + shape[1] / delta
        keys = binomial_scores(num_keys, delta, centre)
        x = self.sample(delta, centre, num_keys)
        fitted, error = self.fit(keys, self.values(x), keys.weights(x), passes, goal)
        return Polynomial(fitted, error, shape)


def binomial_scores(num_keys: int, delta: float, centre: float = 0.0) -> Keys:
    """a_k = kδ, c_k = log C(n, k) − kδx₀, and no values yet."""
    k = np.arange(num_keys)
    factorials = np.array([math.lgamma(i + 1) for i in k])
    return Keys(k * delta, factorials[-1] - factorials - factorials[::-1] - k * delta * centre, np.zeros(num_keys))


def search(
    domain: Domain,
    num_keys: int,
    delta: float | None = None,
    centre: float | None = None,
    goal: float | None = None,
    near: Polynomial | None = None,
) -> Polynomial:
    """δ and x₀ where they are not given: the best found, or the first with an error of at most `goal`."""
    found: list[Polynomial] = []
    for shape in _starts(domain, delta, centre, near):
        found.append(domain.polynomial(num_keys, shape, PASSES, goal or 0.0))
        if found[-1].error <= (goal or 0.0):
            return found[-1]
    found.sort(key=lambda one: one.error)
    best = found[0]
    axes = np.array([axis for axis, fixed in (((1, 0), delta), ((0, 2), centre)) if fixed is None])
    few = num_keys <= FEW
    if len(axes) and num_keys > 1 and (goal is None or best.error <= (NEAR if few else 0.1 * NEAR) * goal):

        def attempt(shape: Shape) -> Polynomial | None:
            if centre is not None:
                shape = (shape[0], (centre - domain.base) * math.exp(shape[0]))
            return domain.polynomial(num_keys, shape, PASSES, goal or 0.0) if abs(shape[1]) < 30 else None

        for start in found[: 2 if few else 1]:
            end = descend(start, attempt, axes, COARSE, FINE if few else 4 * FINE, goal or 0.0)
            best = min(best, end, key=lambda one: one.error)
            if best.error <= (goal or 0.0):
                break
    return domain.polynomial(num_keys, best.shape, FINAL_PASSES, goal or 0.0)


def _starts(domain: Domain, delta: float | None, centre: float | None, near: Polynomial | None) -> Iterator[Shape]:
    width = domain.hi - domain.lo
    deltas = [delta] if delta is not None else [1.0, 0.5, 2.0, 0.25, 4.0]
    if delta is None and math.isfinite(width):
        deltas = [size / width for size in (1.0, 2.0, 4.0, 8.0, 0.5, 16.0, 0.25, 32.0)]
    outwards = (
        0.0 if math.isfinite(domain.lo) == math.isfinite(domain.hi) else -1.0 if math.isfinite(domain.lo) else 1.0
    )
    if near is not None:
        yield near.shape
    for each in deltas:
        if centre is not None:
            yield math.log(each), (centre - domain.base) * each
        else:
            yield from ((math.log(each), shift) for shift in ((0.0, 0.5 * outwards, outwards) if outwards else (0.0,)))


def binomial_keys(
    f: Callable[[np.ndarray], np.ndarray],
    lo: float,
    hi: float,
    num_keys: int,
    delta: float | None = None,
    *,
    centre: float | None = None,
    limits: Limits = (None, None),
    max_value: float = 10.0,
) -> Keys:
    """The head alone, for f of points (m,) to (m,) or (m, outputs) on [lo, hi], whose ends may be −∞ and +∞.

    There f must have limits, and be able to compute at arguments as large as 700/δ. `limits` prescribes what the head
    tends to, exactly. δ and x₀ are chosen where they are not given; with centre=0 the scores are kδx + log C(n, k).
    """
    if not lo < hi or math.isnan(lo) or math.isnan(hi):
        raise InputError(f"binomial keys need an interval lo < hi, found [{lo}, {hi}]")
    if not (isinstance(num_keys, int) and num_keys >= 1):
        raise InputError(f"num_keys must be a whole number ≥ 1, found {num_keys!r}")
    if delta is not None and not (math.isfinite(delta) and delta > 0):
        raise InputError(f"delta must be a finite number > 0, found {delta}")
    is_flat = True

    def rows(x: np.ndarray) -> np.ndarray:
        nonlocal is_flat
        values = np.asarray(f(x), np.float64)
        is_flat = values.ndim == 1
        return values.reshape(len(x), -1)

    keys = search(Domain(rows, lo, hi, limits, max_value), num_keys, delta, centre).keys
    return replace(keys, values=keys.values[:, 0]) if is_flat else keys
