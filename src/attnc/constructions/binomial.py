"""The binomial head: exactly the polynomials of degree n in σ(δx), on all of R."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.limits import MAX_BYTES, bytes_per_anchor
from attnc.constructions.unary.binomial_fit import FINAL_PASSES, Domain, Limits, Polynomial, search
from attnc.constructions.unary.minimax import chebyshev
from attnc.constructions.unary.program import StoredHead, check_unary, store, worst_error
from attnc.constructions.unary.request import check_request, round_above
from attnc.errors import BoundNotMet, InputError
from attnc.targets.target import Target

MAX_KEYS = 128
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96)
SHARE, SLACK = 0.9, 0.97
"""Of eps, what the fit may take, rounding having the rest; and what a sample may show, as it is not everywhere."""


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
    max_anchors: int = MAX_KEYS,
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

    n, δ and x₀ are searched for a given eps, or δ and x₀ for num_anchors = n + 1 keys. The error is what a dense sample
    shows: an observation, hence no bound.
    """
    check_unary(target, "binomial")
    check_request(eps, num_anchors, max_value, dtype)
    most = min(max_anchors, max_bytes // bytes_per_anchor(target), MAX_KEYS)
    if num_anchors is not None and num_anchors > most:
        raise InputError(f"num_anchors={num_anchors:,}: max_anchors, max_bytes and the fit allow {most:,}")
    lo, hi = float(target.box.lo[0]), float(target.box.hi[0])
    task = _Task(target, Domain(lambda x: target(x[:, None]), lo, hi, limits, max_value), delta, centre, dtype)
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
        return self.head.keys.p


def _is_slow(before: _Stored, after: _Stored, eps: float, most: int) -> bool:
    """Whether eps is out of reach even if every further key is worth as much as the last ones were."""
    if after.p < 24 or after.p >= most or after.error >= before.error:
        return after.p >= 48 and after.error >= before.error
    gain = math.log(before.error / after.error) / (after.p - before.p)
    return after.error * math.exp(-gain * (most - after.p)) > eps


@dataclass(frozen=True, eq=False)
class _Task:
    target: Target
    domain: Domain
    delta: float | None
    centre: float | None
    dtype: str

    def search(self, size: int, goal: float | None = None, near: Polynomial | None = None) -> Polynomial:
        return search(self.domain, size, self.delta, self.centre, goal, near)

    def within(self, eps: float, most: int, progress: Progress | None) -> Built:
        """The fewest keys: ever more until eps is met, then fewer by bisection."""
        failed = 0
        best: _Stored | None = None
        near: Polynomial | None = None
        for size in (*(s for s in SIZES if s < most), most):
            found = self.search(size, SHARE * eps, near)
            stored = self.stored(found)
            if progress is not None:
                progress("fitting", size / most)
            if stored.error <= SLACK * eps:
                return self.built(self._fewer(stored, failed, eps))
            before = best
            best = stored if best is None or stored.error < best.error else best
            if before is not None and self._is_floor(before, stored):
                raise self._refusal(best, eps, f"what is left is rounding in {self.dtype}")
            if before is not None and _is_slow(before, stored, eps, most):
                break
            failed, near = size, found
        assert best is not None
        raise self._refusal(best, eps, f"it falls too slowly for {most} keys, which is what there may be")

    def _fewer(self, met: _Stored, failed: int, eps: float) -> _Stored:
        while met.p - failed > 1:
            size = (met.p + failed) // 2
            smaller = self.stored(self.search(size, SHARE * eps, met.polynomial))
            if smaller.error <= SLACK * eps:
                met = smaller
            else:
                failed = size
        return met

    def _is_floor(self, before: _Stored, after: _Stored) -> bool:
        """Whether what is left is rounding, of the head or of the fit: more keys do not help any more."""
        of_fit = 2.0**16 * float(np.finfo("float64").eps) * float(self.domain.most.max())
        is_rounding = after.error > 2 * after.polynomial.error or before.error < of_fit
        return after.error > 0.5 * before.error and is_rounding

    def stored(self, found: Polynomial) -> _Stored:
        """Values solved again for the keys as they are stored; the better of both."""
        lo, hi, p = self.domain.lo, self.domain.hi, found.keys.p
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
            "for max_value, or construction='graded', which knows about kinks.",
            eps=eps,
            bound=None,
            build=lambda: self.built(best),
        )
