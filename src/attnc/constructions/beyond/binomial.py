"""The binomial head: exactly the polynomials of degree n in σ(δx), on all of R."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import (
    CONTINUOUS_FUNCTION,
    MAX_BYTES,
    Construction,
    Request,
    for_eps,
    one_variable,
    round_above,
    summable,
)
from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values
from attnc.constructions.fitting.positions import bytes_per_anchor
from attnc.constructions.fitting.search import Shape, descend, fewest, ladder
from attnc.constructions.fitting.stored_head import StoredHead, check_fit, check_unary, store, worst_error
from attnc.errors import BoundNotMet, InputError
from attnc.ir.soft_head import SoftHead
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float


MAX_BINOMIAL_KEYS = 128
"""Largest number of keys: beyond, the fits lose their digits, as log C(n, k) spans hundreds."""
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96)
"""Numbers of keys that are tried in turn: each is about 1.3 times the one before."""
FITTED_SHARE, OBSERVED_SHARE = 0.9, 0.97
"""Shares of eps: for the fit, so that rounding has the rest, and for a sample, whose points are not everywhere."""


def binomial(
    target: Target,
    *,
    eps: float | None = None,
    num_anchors: int | None = None,
    delta: float | None = None,
    centre: float | None = None,
    limits: Limits = (None, None),
    max_value: float = 10.0,
    dtype: str = "float64",
    max_anchors: int = MAX_BINOMIAL_KEYS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One head that is a polynomial in σ(δ(x − x₀)), fitted on the box and tending to a limit beyond either end.

    Theorem.  With a_k = kδ, c_k = log C(n, k), k = 0 … n, and t = σ(δx), the head is Σ_k v_k C(n, k) t^k (1 − t)^{n−k}:
              the polynomial in t with Bernstein coefficients v_k. So every polynomial of degree n in σ(δx) is such a
              head, and nothing else is, on all of R; it tends to v_0 and v_n at −∞ and +∞.
    Weights.  n + 1 keys; x₀ shifts all of them. Values by reweighted least squares in the Bernstein basis, near the
              smallest largest error, |v| ≤ max_value·max|f|. `limits` prescribes v_0 and v_n.
    Proof.    The weight of key k is C(n, k)e^{kδx}/(1 + e^{δx})^n = C(n, k) t^k (1 − t)^{n−k}, as t/(1 − t) = e^{δx}.
    Rate.     Geometric in n where f is analytic in t around the interval (Bernstein); slow where f has kinks.

    n, δ and x₀ are searched for a given eps, or δ and x₀ for num_anchors = n + 1 keys. The error is the
    largest on a dense sample: an observation, hence no bound.
    """
    check_unary(target, "binomial")
    check_fit(Request(eps, dtype), num_anchors, max_value)
    most = min(max_anchors, max_bytes // bytes_per_anchor(target), MAX_BINOMIAL_KEYS)
    if num_anchors is not None and num_anchors > most:
        raise InputError(f"num_anchors={num_anchors:,}: max_anchors, max_bytes and the fit allow {most:,}")
    lo, hi = float(target.box.lo[0]), float(target.box.hi[0])
    task = _Task(target, FitDomain(lambda x: target(x[:, None]), lo, hi, limits, max_value), delta, centre, dtype)
    if num_anchors is not None:
        return task.built(task.stored(task.search(num_anchors)))
    assert eps is not None
    return task.within(eps, most, progress)


@dataclass(frozen=True, eq=False)
class _Stored:
    """A polynomial as a head, with the largest error found."""

    polynomial: Polynomial
    head: StoredHead
    error: float
    at: float

    @property
    def p(self) -> int:
        return self.head.keys.num_keys


def _is_slow(before: _Stored, after: _Stored, eps: float, most: int) -> bool:
    """Whether eps is out of reach even if every further key is worth as much as the last ones were."""
    if after.p < 24 or after.p >= most or after.error >= before.error:
        return after.p >= 48 and after.error >= before.error
    gain = math.log(before.error / after.error) / (after.p - before.p)
    return after.error * math.exp(-gain * (most - after.p)) > eps


@dataclass(frozen=True, eq=False)
class _Task:
    target: Target
    domain: FitDomain
    delta: float | None
    centre: float | None
    dtype: str

    def search(self, size: int, goal: float | None = None, near: Polynomial | None = None) -> Polynomial:
        return _search_shape(self.domain, size, self.delta, self.centre, goal, near)

    def within(self, eps: float, most: int, progress: Progress | None) -> Built:
        """The fewest keys within eps."""

        def attempt(size: int, before: Sequence[_Stored]) -> _Stored:
            near = before[-1].polynomial if before else None
            stored = self.stored(self.search(size, FITTED_SHARE * eps, near))
            if progress is not None and (not before or before[-1].error > OBSERVED_SHARE * eps):  # on the way up
                progress("fitting", size / most)
            return stored

        def gives_up(failed: Sequence[_Stored]) -> bool:
            *before, last = failed
            best = min(before, key=lambda stored: stored.error, default=None)
            return best is not None and (self._is_floor(best, last) or _is_slow(best, last, eps, most))

        found = fewest(ladder(SIZES, most), attempt, OBSERVED_SHARE * eps, gives_up=gives_up)
        if found.met is not None:
            return self.built(found.met)
        *before, last = found.failed
        if found.gave_up and self._is_floor(min(before, key=lambda stored: stored.error), last):
            raise self._refusal(found.best, eps, f"the rest of the error is rounding in {self.dtype}")
        raise self._refusal(found.best, eps, f"it falls too slowly for {most} keys, the most that are allowed")

    def _is_floor(self, before: _Stored, after: _Stored) -> bool:
        """Whether the rest of the error is rounding, of the head or of the fit: more keys do not help any more."""
        of_fit = 2.0**16 * float(np.finfo("float64").eps) * float(self.domain.most.max())
        is_rounding = after.error > 2 * after.polynomial.error or before.error < of_fit
        return after.error > 0.5 * before.error and is_rounding

    def stored(self, found: Polynomial) -> _Stored:
        """Values solved again for the keys as they are stored; the better of both."""
        lo, hi, p = self.domain.lo, self.domain.hi, found.keys.num_keys
        head = store(found.keys, self.target.box, self.dtype)
        x = chebyshev(lo, hi, 12 * p + 60)
        again, _ = self.domain.fit(head.keys, self.domain.values(x), head.weights(x), FINAL_PASSES, 0.0)
        fine = np.union1d(
            chebyshev(lo, hi, 40 * p + 400), np.linspace(lo, hi, 4001 if self.dtype == "float64" else 40_001)
        )
        heads = (head, head.with_values(again.values))
        errors = [worst_error(one, self.domain.f, fine) for one in heads]
        (error, at), head = min(zip(errors, heads, strict=True), key=lambda pair: pair[0][0])
        return _Stored(found, head, error, at)

    def built(self, stored: _Stored) -> Built:
        delta = float(np.exp(stored.polynomial.shape[0]))
        parameters: tuple[tuple[str, float | int | str], ...] = (
            ("degree", stored.p - 1),
            ("delta", delta),
            ("centre", self.domain.base + stored.polynomial.shape[1] / delta),
            ("largest_value", float(np.abs(stored.head.keys.values).max())),
            ("worst_error", stored.error),
            ("worst_at", stored.at),
        )
        return Built(stored.head.program(self.target), "binomial", None, None, parameters)

    def _refusal(self, best: _Stored, eps: float, reason: str) -> BoundNotMet:
        target = self.target
        return BoundNotMet(
            f"cannot bring the error to eps={eps:g} for {target.describe()} on {target.box} with a binomial head: the "
            f"largest error seen is {best.error:.3g} with {best.p} keys, at {target.box.names[0]} = {best.at:.6g}, and "
            f"{reason}. A polynomial in σ(δx) suits smooth functions, and its values are limited to "
            f"{self.domain.max_value:g} times max|f|. Choose eps ≥ {round_above(best.error):.2g}, a smaller box, more "
            "for max_value, or construction='graded', which handles kinks.",
            eps=eps,
            bound=None,
            build=lambda: self.built(best),
        )


Limits = tuple[float | None, float | None]
"""The limits of the head at −∞ and at +∞; None where any limit is allowed."""

FLAT_ARGUMENT = 700.0
"""At this argument σ is 1 in float64, and e^{−700} is still a normal number."""
QUICK_PASSES, FINAL_PASSES = 3, 40
"""Passes of the reweighted least squares while shapes are compared, and for the shape that is taken."""
FIRST_STEP, LAST_STEP = 0.17, 0.01
"""The first and the last step downhill, in log δ and in (x₀ − base)·δ/2."""
DOWNHILL_FACTOR = 300.0
"""Errors up to this multiple of the goal are still lowered by steps downhill; larger ones seldom come down to it."""
THOROUGH_KEYS = 16
"""Up to this number of keys the search is thorough, as fits are quick."""


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A head with keys kδ(x − x₀) + log C(n, k)."""

    keys: SoftHead[np.ndarray]
    error: float  # the largest on the sample
    shape: Shape  # (log δ, (x₀ − where x₀ is expected)·δ)


@dataclass(frozen=True, eq=False)
class FitDomain:
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
        first, last = np.clip(delta * (np.array([self.lo, self.hi]) - centre), -FLAT_ARGUMENT, FLAT_ARGUMENT).tolist()
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

    def fit(
        self, keys: SoftHead[np.ndarray], f: np.ndarray, weights: np.ndarray, passes: int, goal: float
    ) -> tuple[SoftHead[np.ndarray], float]:
        """The values of the keys; those at the ends are the prescribed limits."""
        values = np.zeros((keys.num_keys, f.shape[1]))
        free = np.ones(keys.num_keys, bool)
        for k, limit in ((0, self.limits[0]), (keys.num_keys - 1, self.limits[1])):
            if limit is not None:
                values[k], free[k] = limit, False
        rest = f - weights @ values
        error = float(np.abs(rest).max())
        if free.any():
            found = fit_values(weights[:, free], rest, self.most, passes, goal)
            values[free], error = found.values, found.error
        return replace(keys, values=values), error

    def polynomial(self, num_keys: int, shape: Shape, passes: int = QUICK_PASSES, goal: float = 0.0) -> Polynomial:
        delta = math.exp(shape[0])
        centre = self.base + shape[1] / delta
        keys = binomial_scores(num_keys, delta, centre)
        x = self.sample(delta, centre, num_keys)
        fitted, error = self.fit(keys, self.values(x), keys.weights(x[:, None]), passes, goal)
        return Polynomial(fitted, error, shape)


def binomial_scores(num_keys: int, delta: float, centre: float = 0.0) -> SoftHead[np.ndarray]:
    """a_k = kδ, c_k = log C(n, k) − kδx₀, and no values yet."""
    k = np.arange(num_keys)
    factorials = np.array([math.lgamma(i + 1) for i in k])
    offsets = factorials[-1] - factorials - factorials[::-1] - k * delta * centre
    return SoftHead.of_one_variable(k * delta, offsets, np.zeros(num_keys))


def _search_shape(
    domain: FitDomain,
    num_keys: int,
    delta: float | None = None,
    centre: float | None = None,
    goal: float | None = None,
    near: Polynomial | None = None,
) -> Polynomial:
    """δ and x₀ where they are not given: the best found, or the first with an error of at most `goal`."""
    found: list[Polynomial] = []
    for shape in _starts(domain, delta, centre, near):
        found.append(domain.polynomial(num_keys, shape, QUICK_PASSES, goal or 0.0))
        if found[-1].error <= (goal or 0.0):
            return found[-1]
    found.sort(key=lambda one: one.error)
    best = found[0]
    axes = np.array([axis for axis, fixed in (((1, 0), delta), ((0, 2), centre)) if fixed is None])
    few = num_keys <= THOROUGH_KEYS
    if (
        len(axes)
        and num_keys > 1
        and (goal is None or best.error <= (DOWNHILL_FACTOR if few else 0.1 * DOWNHILL_FACTOR) * goal)
    ):

        def attempt(shape: Shape) -> Polynomial | None:
            if centre is not None:
                shape = (shape[0], (centre - domain.base) * math.exp(shape[0]))
            return domain.polynomial(num_keys, shape, QUICK_PASSES, goal or 0.0) if abs(shape[1]) < 30 else None

        for start in found[: 2 if few else 1]:
            end = descend(start, attempt, axes, FIRST_STEP, LAST_STEP if few else 4 * LAST_STEP, goal or 0.0)
            best = min(best, end, key=lambda one: one.error)
            if best.error <= (goal or 0.0):
                break
    return domain.polynomial(num_keys, best.shape, FINAL_PASSES, goal or 0.0)


def _starts(domain: FitDomain, delta: float | None, centre: float | None, near: Polynomial | None) -> Iterator[Shape]:
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
) -> SoftHead[np.ndarray]:
    """The head alone, for f of points (m,) to (m,) or (m, outputs) on [lo, hi], whose ends may be −∞ and +∞.

    There f must have limits, and be able to compute at arguments as large as 700/δ. `limits` prescribes the limits of
    the head, exactly. δ and x₀ are chosen where they are not given; with centre=0 the scores are kδx + log C(n, k).
    """
    if not lo < hi or math.isnan(lo) or math.isnan(hi):
        raise InputError(f"binomial keys need an interval lo < hi, found [{lo}, {hi}]")
    if not (isinstance(num_keys, int) and num_keys >= 1):
        raise InputError(f"num_keys must be a whole number ≥ 1, found {num_keys!r}")
    if delta is not None and not (math.isfinite(delta) and delta > 0):
        raise InputError(f"delta must be a finite number > 0, found {delta}")

    def rows(x: np.ndarray) -> np.ndarray:
        return np.asarray(f(x), np.float64).reshape(len(x), -1)

    return _search_shape(FitDomain(rows, lo, hi, limits, max_value), num_keys, delta, centre).keys


BINOMIAL = Construction(
    "binomial",
    for_eps(binomial),
    (*CONTINUOUS_FUNCTION, one_variable, summable),
    options=frozenset({"norm"}),
)
