"""The binomial head: a polynomial of degree n in σ(δx), on all of R."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from attnc.constructions.built import Built, Progress, round_above
from attnc.constructions.construction import MAX_BYTES, Request
from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values
from attnc.constructions.fitting.search import DOWNHILL_FACTOR, THOROUGH_KEYS, Shape, fewest, ladder, lowest
from attnc.constructions.fitting.selection import allowed_anchors
from attnc.constructions.fitting.stored_head import MeasuredHead, check_unary, measured, store, unary_construction
from attnc.errors import BoundNotMet, InputError, positive_number, whole_number
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.quiet import quiet
from attnc.numerics.threads import one_thread
from attnc.targets.box import Box
from attnc.targets.target import Target

MAX_BINOMIAL_KEYS = 128
"""Largest number of keys. At 128 keys log C(n, k) already spans 85, and fits lose digits. Measured with five functions:
with 64 the results are the same; with 256, sin(12x) to 1e-4, which 128 refuse, takes 85 keys."""
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96)
"""Numbers of keys that are tried in turn: each is about 1.3 times the one before."""
FITTED_SHARE, OBSERVED_SHARE = 0.9, 0.97
"""Shares of eps for the error of the fit and for the error on a sample. The rest of eps is for rounding, and for points
between those of the sample. A fit that misses its share is repeated with more keys. Measured with five functions: 0.8
and 0.95 for the first, and 0.94 and 0.985 for the second, change the number of keys by at most 2."""


@one_thread()
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
              the polynomial in t with Bernstein coefficients v_k. So on all of R these heads are exactly the
              polynomials of degree n in σ(δx). Such a head tends to v_0 at −∞ and to v_n at +∞.
    Weights.  There are n + 1 keys, and x₀ shifts all of them. Reweighted least squares in the Bernstein basis give
              values near the minimax ones, with |v| ≤ max_value·max|f|. `limits` prescribes v_0 and v_n.
    Proof.    The weight of key k is C(n, k)e^{kδx}/(1 + e^{δx})^n = C(n, k) t^k (1 − t)^{n−k}, as t/(1 − t) = e^{δx}.
    Rate.     Geometric in n where f is analytic in t around the interval (Bernstein); slow where f has kinks.

    For a given eps the function searches n, δ and x₀. For num_anchors = n + 1 keys it searches δ and x₀. The error is
    the largest on a dense sample. That is an observation, not a bound.

    Parameters
    ----------
    target : Target
        A smooth function of one variable on a finite box.
    eps : float, optional
        The largest error allowed. Give either eps or num_anchors.
    num_anchors : int, optional
        The number of keys n + 1. The best head of this size is built.
    delta, centre : float, optional
        δ and x₀. They are searched if they are not given.
    limits : pair of float or None
        The limits of the head at −∞ and at +∞; None leaves them free.
    max_value : float
        The largest |value| of a key, in units of max|f|.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of anchors and on the memory for the program, in bytes.
    progress : callable, optional
        Called during the search, with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program. Its `parameters` are the sizes and the largest error seen. It has no bound.

    Raises
    ------
    InputError
        If the target has more than one variable, or an argument is out of range.
    BoundNotMet
        If eps is not reached. The exception carries the best head that was found.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("tanh(x)", {"x": (-4, 4)})
    >>> built = attnc.constructions.binomial(target, eps=1e-9)
    >>> built.program.num_anchors, dict(built.parameters)["degree"]
    (2, 1)
    """
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    most = min(allowed_anchors(target, request), MAX_BINOMIAL_KEYS)
    check_unary("binomial", target, request, num_anchors, max_value, most)
    lo, hi = float(target.box.lo[0]), float(target.box.hi[0])
    search = PolynomialSearch(lambda x: target(x[:, None]), lo, hi, limits, max_value, delta, centre)
    if num_anchors is not None:
        return search.built(target, search.stored(search.best(num_anchors), target.box, dtype))
    return _within_eps(target, search, request, most)


def _within_eps(target: Target, search: PolynomialSearch, request: Request, most: int) -> Built:
    """Return the head with the fewest keys that is within eps, or raise BoundNotMet if it needs more than `most`."""
    eps = request.goal

    def attempt(size: int, before: Sequence[MeasuredHead[Polynomial]]) -> MeasuredHead[Polynomial]:
        best = search.best(size, FITTED_SHARE * eps, before[-1].fit if before else None)
        if not before or before[-1].error > OBSERVED_SHARE * eps:  # on the way up
            request.report("fitting", size / most)
        return search.stored(best, target.box, request.dtype)

    def is_floor(failed: Sequence[MeasuredHead[Polynomial]]) -> bool:
        """Whether the error is only rounding, of the head or of the fit. Then more keys do not help."""
        before, after = min(failed[:-1], key=lambda one: one.error), failed[-1]
        of_fit = 2.0**16 * float(np.finfo("float64").eps) * float(search.most.max())
        is_rounding = after.error > 2 * after.fit.error or before.error < of_fit
        return after.error > 0.5 * before.error and is_rounding

    def gives_up(failed: Sequence[MeasuredHead[Polynomial]]) -> bool:
        return len(failed) > 1 and (is_floor(failed) or _is_slow(failed, eps, most))

    found = fewest(ladder(SIZES, most), attempt, OBSERVED_SHARE * eps, gives_up=gives_up)
    if found.met is not None:
        return search.built(target, found.met)
    best, reason = found.best, f"it falls too slowly for {most} keys, the most that are allowed"
    if found.gave_up and is_floor(found.failed):
        reason = f"the rest of the error is rounding in {request.dtype}"
    raise BoundNotMet(
        f"cannot bring the error to eps={eps:g} for {target.describe()} on {target.box} with a binomial head: the "
        f"largest error seen is {best.error:.3g} with {best.p} keys, at {target.box.names[0]} = {best.at:.6g}, and "
        f"{reason}. A polynomial in σ(δx) suits smooth functions, and its values are limited to "
        f"{search.max_value:g} times max|f|. Choose eps ≥ {round_above(best.error):.2g}, a smaller box, more "
        "for max_value, or construction='graded', which handles kinks.",
        eps=eps,
        build=lambda: search.built(target, best),
    )


def _is_slow(failed: Sequence[MeasuredHead[Polynomial]], eps: float, most: int) -> bool:
    """Whether eps is out of reach even if every further key reduces the error as much as the last ones did."""
    before, after = min(failed[:-1], key=lambda one: one.error), failed[-1]
    if after.p < 24 or after.p >= most or after.error >= before.error:
        return after.p >= 48 and after.error >= before.error
    gain = math.log(before.error / after.error) / (after.p - before.p)
    return after.error * math.exp(-gain * (most - after.p)) > eps


Limits = tuple[float | None, float | None]
"""The limits of the head at −∞ and at +∞; None where any limit is allowed."""

FLAT_ARGUMENT = 700.0
"""Largest argument of σ on an infinite interval. There σ is 1 in float64, and e^{−700} is still a normal number."""
QUICK_PASSES, FINAL_PASSES = 3, 40
"""Passes of the reweighted least squares. Few are enough to rank the shapes. Many are affordable for the chosen shape.
Measured with five functions: 20 and 80 final passes give the same number of keys, and bounds within 2 %."""
FIRST_STEP, LAST_STEP = 0.17, 0.01
"""The first and the last step length of the descent, in log δ and in (x₀ − base)·δ/2."""


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A head with keys kδ(x − x₀) + log C(n, k)."""

    keys: SoftHead[np.ndarray]
    error: float  # the largest on the sample
    shape: Shape  # (log δ, (x₀ − where x₀ is expected)·δ)


@dataclass(frozen=True, eq=False)
class PolynomialSearch:
    """The search for a polynomial in σ(δ(x − x₀)) for f on [lo, hi]. An end may be infinite; δ and x₀ may be given."""

    f: Function
    lo: float
    hi: float
    limits: Limits
    max_value: float
    delta: float | None
    centre: float | None

    @property
    def base(self) -> float:
        """The expected x₀: the middle of the interval, its only finite end, or 0."""
        ends = [end for end in (self.lo, self.hi) if math.isfinite(end)]
        return sum(0.5 * end for end in ends) if len(ends) == 2 else sum(ends)

    @cached_property
    def most(self) -> Float[np.ndarray, " outputs"]:
        """The largest |value| allowed, per output."""
        scale = 1.0 if not math.isfinite(self.hi - self.lo) else 8 / (self.hi - self.lo)
        x = self.sample(scale, self.base, 64)
        return self.max_value * np.abs(self.values(x)).max(axis=0)

    def sample(self, delta: float, centre: float, num_keys: int) -> Float[np.ndarray, " points"]:
        """Return Chebyshev points in t = σ(δ(x − x₀)), and Chebyshev points in x where t changes."""
        first, last = np.clip(delta * (np.array([self.lo, self.hi]) - centre), -FLAT_ARGUMENT, FLAT_ARGUMENT).tolist()
        t = chebyshev(1 / (1 + math.exp(-first)), 1 / (1 + math.exp(-last)), 8 * num_keys + 40)
        with quiet():
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
        """Return the values of the keys. The values at the ends are the prescribed limits."""
        values = np.zeros((keys.num_keys, f.shape[1]))
        free = np.ones(keys.num_keys, bool)
        for k, limit in ((0, self.limits[0]), (keys.num_keys - 1, self.limits[1])):
            if limit is not None:
                values[k], free[k] = limit, False
        rest = f - weights @ values
        error = float(np.abs(rest).max())
        if free.any():
            values[free], error = fit_values(weights[:, free], rest, self.most, passes, goal)
        return replace(keys, values=values), error

    def polynomial(self, num_keys: int, shape: Shape, passes: int = QUICK_PASSES, goal: float = 0.0) -> Polynomial:
        delta = math.exp(shape[0])
        centre = self.base + shape[1] / delta
        keys = binomial_scores(num_keys, delta, centre)
        x = self.sample(delta, centre, num_keys)
        fitted, error = self.fit(keys, self.values(x), keys.weights(x[:, None]), passes, goal)
        return Polynomial(fitted, error, shape)

    def best(self, num_keys: int, goal: float = 0.0, near: Polynomial | None = None) -> Polynomial:
        """Return the first polynomial found with an error of at most `goal`, otherwise the best one found."""

        def attempt(shape: Shape) -> Polynomial | None:
            if self.centre is not None:
                shape = (shape[0], (self.centre - self.base) * math.exp(shape[0]))
            return self.polynomial(num_keys, shape, goal=goal) if abs(shape[1]) < 30 else None

        few = num_keys <= THOROUGH_KEYS
        axes = np.array([axis for axis, given in (((1, 0), self.delta), ((0, 2), self.centre)) if given is None])
        best = lowest(
            (self.polynomial(num_keys, shape, goal=goal) for shape in self._starts(near)),
            partial(map, attempt),
            axes,
            FIRST_STEP,
            LAST_STEP if few else 4 * LAST_STEP,
            goal,
            num_descents=2 if few else 1,
            near_enough=(1.0 if few else 0.1) * DOWNHILL_FACTOR * goal or math.inf,
        )
        return self.polynomial(num_keys, best.shape, FINAL_PASSES, goal)

    def stored(self, found: Polynomial, box: Box, dtype: str) -> MeasuredHead[Polynomial]:
        """Return the stored head, with the values of the fit or values for the stored keys, whichever are better."""
        p, head = found.keys.num_keys, store(found.keys, box, dtype)
        x = chebyshev(self.lo, self.hi, 12 * p + 60)
        again, _ = self.fit(head.keys, self.values(x), head.weights(x[:, None]), FINAL_PASSES, 0.0)
        fine = chebyshev(self.lo, self.hi, 40 * p + 400)
        return measured(found, (head, head.with_values(again.values)), self.f, fine)

    def built(self, target: Target, found: MeasuredHead[Polynomial]) -> Built:
        delta = float(np.exp(found.fit.shape[0]))
        centre = ("centre", self.base + found.fit.shape[1] / delta)
        parameters = (("degree", found.p - 1), ("delta", delta), centre, *found.parameters)
        return Built(found.head.program(target), "binomial", None, None, parameters, observed=found.error)

    def _starts(self, near: Polynomial | None) -> Iterator[Shape]:
        """Yield the shape of `near`, a polynomial of another degree, and then a coarse net of shapes."""
        if near is not None:
            yield near.shape
        width, is_cut = self.hi - self.lo, math.isfinite(self.lo)
        deltas = [1.0, 0.5, 2.0, 0.25, 4.0] if self.delta is None else [self.delta]
        if self.delta is None and math.isfinite(width):
            deltas = [size / width for size in (1.0, 2.0, 4.0, 8.0, 0.5, 16.0, 0.25, 32.0)]
        outwards = 0.0 if is_cut == math.isfinite(self.hi) else -1.0 if is_cut else 1.0
        for delta in deltas:
            shifts = (0.0, 0.5 * outwards, outwards) if outwards else (0.0,)
            if self.centre is not None:
                shifts = ((self.centre - self.base) * delta,)
            yield from ((math.log(delta), shift) for shift in shifts)


def binomial_scores(num_keys: int, delta: float, centre: float = 0.0) -> SoftHead[np.ndarray]:
    """a_k = kδ, c_k = log C(n, k) − kδx₀, and no values yet."""
    k = np.arange(num_keys)
    factorials = np.array([math.lgamma(i + 1) for i in k])
    offsets = factorials[-1] - factorials - factorials[::-1] - k * delta * centre
    return SoftHead.of_one_variable(k * delta, offsets, np.zeros(num_keys))


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
    """Return only the head, for f from points (m,) to (m,) or (m, outputs) on [lo, hi]. The ends may be −∞ and +∞.

    At an infinite end f must have a limit, and must accept arguments as large as 700/δ. `limits` prescribes the limits
    of the head exactly. δ and x₀ are searched if they are not given. With centre=0 the scores are kδx + log C(n, k).
    """
    if not lo < hi or math.isnan(lo) or math.isnan(hi):
        raise InputError(f"binomial keys need an interval lo < hi, found [{lo}, {hi}]")
    whole_number("num_keys", num_keys, 1)
    if delta is not None:
        positive_number("delta", delta)

    def rows(x: np.ndarray) -> np.ndarray:
        return np.asarray(f(x), np.float64).reshape(len(x), -1)

    return PolynomialSearch(rows, lo, hi, limits, max_value, delta, centre).best(num_keys).keys


BINOMIAL = unary_construction(binomial)
