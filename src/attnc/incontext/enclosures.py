"""Enclosures of an optimum about weights that a program has found: proven radii, computed after the fit.

The objective is F(w) = Σ ω_i ℓ(w·x_i, y_i) + ½ Σ λ_c w_c² + Σ l_c w_c, with a squared, logistic, Poisson or Huber loss.

Theorem.  Let g = ∇F(w), H = ∇²F(w), and let R be any matrix. For r > 0 let δ = max |x_i·v| over |v| ≤ r, and
              E = |I − RH| + |R| (e^δ − 1) Σ s_i |x_i||x_i|ᵀ,   s_i = ω_i ℓ″(w·x_i)   (e^δ − 1 is 0 if ℓ is squared),
          entry by entry. If |Rg|₂ + ‖E‖·r ≤ r and ‖E‖ < 1, then F has one optimum w*, and it obeys
              |w − w*|_c ≤ |Rg|_c + ‖row c of E‖·r  for every weight c.
Proof.    |ℓ‴| ≤ ℓ″ for the three losses, so ℓ″ changes by a factor in e^{±δ} on the ball B of radius r about w. For v
          in B the mean Hessian H̄ between w and v gives (v − R∇F(v)) − (w − Rg) = (I − RH̄)(v − w), where |I − RH̄| ≤ E.
          So v ↦ v − R∇F(v) maps B into itself and has a fixed point there (Brouwer). R is invertible, as ‖I − RH‖ < 1,
          so that ∇F is 0 at the fixed point. H is invertible, and H(v) ≥ e^{−δ}H on B, so the optimum is unique. ∎
For the Huber loss ℓ″ is 1 or 0. The second term of E is |R| Σ ω_i |x_i||x_i|ᵀ over the examples whose residual may be
at the threshold for some v in B, and the proof is the same. (A second optimum would make F flat on a segment in B.)

Arb encloses g with 160 bits. R is the inverse of H in float64. E is computed in long double, where a sum of n products
has a rounding error of at most γ_n times the sum of their absolute values. Columns are centred and scaled in exact
arithmetic first: w = Tθ with (x, 1)·T = ((x − mean)/scale, 1), and the theorem is applied to θ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import flint
import numpy as np
from scipy.special import expit

from attnc.errors import InputError
from attnc.incontext.descent import Task
from attnc.incontext.differences import rounded_up
from attnc.incontext.newton import NewtonTask
from attnc.incontext.newton_glm import CurvedTask
from attnc.incontext.turns import CURVATURES, HUBER
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import gamma

BITS = 160
"""Precision of the gradient in bits. Products of two numbers of float64 have 106 bits, and sums cancel 53."""
OUTWARD = 1 + 1e-9
"""The factor by which radii are widened: it covers the roundings of the few operations after the theorem."""
RADIUS_TRIES = (1.01, 1.2, 2.0, 8.0)
"""The radii that are tried, as multiples of |Rg|. The first suffices near the optimum."""

SMALLEST_SLOPE = 1e-300
"""Slopes below this may be rounded to 0. They count as an error of this size."""
ZERO = 1e-9
"""A weight of a scaled column counts as 0 below this multiple of the largest."""


@dataclass(frozen=True, eq=False)
class Fit:
    """An objective, the weights that were found, and the units in which the theorem is applied.

    Parameters
    ----------
    loss : {"squared", "logistic", "poisson", "huber"}
        The loss. The squared loss is ½(w·x − y)².
    X, y : array
        The examples.
    coef : array of shape (features,)
        The weights that were found.
    intercept : float or None
        The intercept that was found. None if there is none.
    penalty : array of shape (features,)
        The penalties λ_c, or their roots if `is_root`.
    linear : array of shape (features,), optional
        The numbers l_c.
    omega : array of shape (rows,), optional
        The weights ω_i, or their logarithms if `is_log`. None means 1.
    is_mean : bool
        Whether penalties and linear terms are multiplied by Σ ω_i, as they are for a mean over the examples.
    mean, scale : array of shape (features,), optional
        The means and the scales of the columns. None means 0 and 1.
    threshold : float
        The residual beyond which the Huber loss is linear.
    """

    loss: str
    X: Float[np.ndarray, "rows features"]
    y: Float[np.ndarray, " rows"]
    coef: Float[np.ndarray, " features"]
    intercept: float | None
    penalty: Float[np.ndarray, " features"]
    is_root: bool = False
    linear: Float[np.ndarray, " features"] | None = None
    omega: Float[np.ndarray, " rows"] | None = None
    is_log: bool = False
    is_mean: bool = False
    mean: Float[np.ndarray, " features"] | None = None
    scale: Float[np.ndarray, " features"] | None = None
    threshold: float = 1.0

    @property
    def units(self) -> tuple[np.ndarray, np.ndarray]:
        """The means and the scales."""
        d = self.X.shape[1]
        mean = np.zeros(d) if self.mean is None or self.intercept is None else self.mean
        return mean, np.ones(d) if self.scale is None else self.scale

    @property
    def weights(self) -> Float[np.ndarray, " rows"]:
        """The weights ω_i in float64."""
        if self.omega is None:
            return np.ones(len(self.y))
        return np.exp(self.omega) if self.is_log else self.omega

    def exact_weights(self) -> list[flint.arb]:
        """Return the weights ω_i in Arb."""
        if self.omega is None or not self.is_log:
            return [flint.arb(weight) for weight in self.weights.tolist()]
        return [flint.arb(logarithm).exp() for logarithm in self.omega.tolist()]

    def exact_total(self) -> flint.arb:
        """Return the factor of penalties and linear terms in Arb."""
        return sum(self.exact_weights(), flint.arb(0)) if self.is_mean else flint.arb(1)

    @property
    def total(self) -> float:
        """The factor of penalties and linear terms."""
        return float(self.weights.sum()) if self.is_mean else 1.0


@dataclass(frozen=True, eq=False)
class Enclosure:
    """Radii about weights. They are infinite if nothing is proved.

    Attributes
    ----------
    coef : array of shape (features,)
        A bound of |w_c − w*_c| for every feature.
    intercept : float
        A bound of the error of the intercept, 0 if there is none.
    theta : array
        The radii for the centred and scaled columns, the intercept last.
    """

    coef: Float[np.ndarray, " features"]
    intercept: float
    theta: Float[np.ndarray, " weights"]
    units: tuple[np.ndarray, np.ndarray] = field(repr=False)

    def of_scores(self, X: Float[np.ndarray, "rows features"]) -> Float[np.ndarray, " rows"]:
        """Return a bound of |(w − w*)·x + the error of the intercept| for every row x."""
        mean, scale = self.units
        moved = np.abs((X - mean) / scale)
        d = X.shape[1]
        own = self.theta[d] if len(self.theta) > d else 0.0
        with np.errstate(invalid="ignore"):
            found: np.ndarray = (moved @ self.theta[:d] + own) * OUTWARD
        return np.where(np.isnan(found), np.inf, found)

    @property
    def distance(self) -> float:
        """A bound of |w − w*|₂, without the intercept."""
        return float(np.linalg.norm(self.coef)) * OUTWARD


def enclose(fit: Fit) -> Enclosure:
    """Return proven radii of the optimum about the weights that were found."""
    if fit.loss != "squared" and fit.loss not in CURVATURES:
        raise InputError(f"the loss is squared, {', '.join(CURVATURES)}, found {fit.loss!r}")
    (mean, scale), d = fit.units, fit.X.shape[1]
    theta = _radii(fit)
    with np.errstate(invalid="ignore", over="ignore"):
        coef = np.nan_to_num(theta[:d] / scale * OUTWARD, nan=math.inf, posinf=math.inf)
        own = 0.0
        if fit.intercept is not None:
            own = (
                float((theta[d] + np.abs(mean / scale) @ theta[:d]) * OUTWARD) if np.isfinite(theta).all() else math.inf
            )
    return Enclosure(coef, own, theta, fit.units)


def enclose_sparse(fit: Fit, l1: Float[np.ndarray, " features"]) -> Enclosure:
    """Return proven radii for the objective with Σ l1_c |w_c|, where `fit` is the smooth part with the squared loss.

    Theorem.  Let A hold the weights that are not 0, s_c their signs, and let w*_A be the optimum with the linear term
              s_c l1_c and all other weights 0. If its enclosure excludes 0 on A, and |∇_c f(w*_A)| < l1_c for all
              others on the whole enclosure, then w*_A, filled with zeros, is the one optimum.
    Proof.    These are the conditions of Karush, Kuhn and Tucker. By the strict inequalities every optimum is 0 outside
              of A (all optima have the same gradient), and the optimum on A is unique. ∎

    If the conditions do not hold, for example at a tie, the radii are infinite: `objective_gap` holds always.
    """
    d = fit.X.shape[1]
    scaled = np.abs(fit.coef * fit.units[1])
    is_active = scaled > ZERO * scaled.max(initial=0)
    nothing = Enclosure(np.full(d, np.inf), math.inf, np.full(d + (fit.intercept is not None), np.inf), fit.units)
    chosen = np.flatnonzero(is_active)
    mean, scale = fit.units
    part = replace(
        fit,
        X=fit.X[:, chosen],
        coef=fit.coef[chosen],
        penalty=fit.penalty[chosen],
        linear=(np.sign(fit.coef) * l1)[chosen],
        mean=mean[chosen],
        scale=scale[chosen],
    )
    if not len(chosen) and fit.intercept is None:
        radii, own = np.zeros(0), np.zeros(0)
    else:
        theta = _radii(part)
        radii, own = theta[: len(chosen)], theta[len(chosen) :]
    if not (np.isfinite(radii).all() and np.isfinite(own).all() and (scaled[chosen] > radii * OUTWARD).all()):
        return nothing
    # The gradient of the others at the weights found on A, and its largest change on the enclosure.
    at = replace(fit, coef=np.where(is_active, fit.coef, 0.0))
    middle, radius = _gradient(at)
    A = np.abs((fit.X - mean) / scale) * OUTWARD
    moved = A[:, chosen] @ radii + own.sum()
    changed = (A.T * fit.weights) @ moved * OUTWARD
    others = np.flatnonzero(~is_active)
    off = (np.abs(middle[others]) + radius[others] + changed[others]) * OUTWARD
    if not (off < l1[others] / scale[others] * (fit.total / OUTWARD)).all():
        return nothing
    theta = np.concatenate([scaled * OUTWARD, own])
    theta[chosen] = radii
    coef = theta[:d] / scale * OUTWARD
    shift = float((own.sum() + np.abs(mean / scale) @ theta[:d]) * OUTWARD) if len(own) else 0.0
    return Enclosure(coef, shift, theta, fit.units)


def objective_gap(fit: Fit, l1: Float[np.ndarray, " features"]) -> float:
    """Return a bound of F(w) − F* for the objective with Σ l1_c |w_c|, by duality, divided by Σ ω_i for a mean.

    With r = y − Xw − b and any factor 0 ≤ t ≤ 1, Σ ω_i t r_i = 0 for an intercept, and t|X_cᵀωr − λ_c w_c| ≤ l1_c for
    columns without a penalty, weak duality with the Fenchel conjugates gives
    F* ≥ Σ ω_i (t r_i y_i − ½t²r_i²) − Σ_c (|t X_cᵀωr| − l1_c)₊²/(2λ_c). The intercept is chosen exactly first, which
    only lowers F.
    """
    with precise():
        X = flint.arb_mat(len(fit.X), fit.X.shape[1], [flint.arb(x) for x in fit.X.ravel().tolist()])
        omega = fit.exact_weights()
        y = [flint.arb(x) for x in fit.y.tolist()]
        coef = [flint.arb(x) for x in fit.coef.tolist()]
        factor = fit.exact_total()
        penalty = [flint.arb(x) ** (2 if fit.is_root else 1) * factor for x in fit.penalty.tolist()]
        thresholds = [flint.arb(x) * factor for x in l1.tolist()]
        scores = X * flint.arb_mat(len(coef), 1, coef)
        r = [y[i] - scores[i, 0] for i in range(len(y))]
        found = sum((o * e * e for o, e in zip(omega, r, strict=True)), flint.arb(0))
        if fit.intercept is not None:
            middle = sum((o * e for o, e in zip(omega, r, strict=True)), flint.arb(0)) / sum(omega, flint.arb(0))
            own = flint.arb(fit.intercept)
            found = sum((o * (e - own) ** 2 for o, e in zip(omega, r, strict=True)), flint.arb(0))
            r = [e - middle for e in r]
        value = found / 2
        for c, w in enumerate(coef):
            value = value + penalty[c] * w * w / 2 + thresholds[c] * abs(w)
        sums = X.transpose() * flint.arb_mat(len(r), 1, [o * e for o, e in zip(omega, r, strict=True)])
        t = flint.arb(1)
        for c in range(len(coef)):
            if float(fit.penalty[c]) == 0:
                size = abs(sums[c, 0])
                if not size <= thresholds[c]:
                    t = flint.arb(min(float((thresholds[c] / size).lower()), float(t.lower())))
        dual = sum((o * (t * e * z - t * t * e * e / 2) for o, e, z in zip(omega, r, y, strict=True)), flint.arb(0))
        for c in range(len(coef)):
            if float(fit.penalty[c]) != 0:
                over = abs(t * sums[c, 0]) - thresholds[c]
                if not over <= 0:
                    over = over.abs_upper()
                    dual = dual - over * over / (2 * penalty[c])
        gap = (value - dual) / factor
        return max(0.0, float(gap.upper()) * OUTWARD) if gap.is_finite() else math.inf


def _radii(fit: Fit) -> Float[np.ndarray, " weights"]:
    """Return the radii for the centred and scaled columns."""
    u = float(np.finfo(np.longdouble).eps)
    (mean, scale), d = fit.units, fit.X.shape[1]
    has_own = fit.intercept is not None
    A = (fit.X.astype(np.longdouble) - mean) / scale  # two roundings of each entry
    A = np.column_stack([A, np.ones(len(A), np.longdouble)]) if has_own else A
    pen = fit.penalty.astype(np.longdouble)
    pen = (pen**2 if fit.is_root else pen) * fit.total / scale.astype(np.longdouble) ** 2
    middle, radius = _gradient(fit)
    if not np.isfinite(middle).all():
        return np.full(A.shape[1], np.inf)
    slopes, spread = _slopes(fit, u)
    weighted = A * slopes[:, None]
    H = A.T @ weighted
    of_H = np.abs(A).T @ np.abs(weighted)
    H[np.arange(d), np.arange(d)] += pen
    of_H[np.arange(d), np.arange(d)] += pen
    # Entries of A, slopes and products are rounded, and slopes are enclosed up to the factor e^{±spread}.
    relative = gamma(len(A) + 12, u) + math.expm1(spread)
    relative += gamma(len(A) + 2, float(np.finfo(float).eps)) if fit.is_mean else 0.0
    error_H = relative * of_H + len(A) * SMALLEST_SLOPE * np.abs(A).max(initial=0) ** 2
    try:
        R = np.linalg.inv(H.astype(np.float64)).astype(np.longdouble)
    except np.linalg.LinAlgError:
        return np.full(len(H), np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        step = np.abs(R @ middle) + np.abs(R) @ (radius + gamma(len(H) + 2, u) * np.abs(middle))
        left = np.abs(np.eye(len(H)) - R @ H) + gamma(len(H) + 4, u) * (np.eye(len(H)) + np.abs(R) @ np.abs(H))
        left = left + np.abs(R) @ error_H
        moved = float(np.linalg.norm(step.astype(np.float64))) * OUTWARD
        longest = float(np.sqrt((A.astype(np.float64) ** 2).sum(axis=1)).max(initial=0)) * OUTWARD
        for factor in RADIUS_TRIES:
            r = moved * factor
            if fit.loss == HUBER:
                at_threshold = _may_cross(fit, A, r)[:, None]
                changed = np.abs(R) @ (np.abs(A).T @ (np.abs(A) * fit.weights[:, None] * at_threshold))
            else:
                changed = (0.0 if fit.loss == "squared" else math.expm1(min(longest * r, 700.0))) * (np.abs(R) @ of_H)
            E = (left + changed).astype(np.float64) * OUTWARD
            norm = float(np.linalg.norm(E)) * OUTWARD
            if norm < 1 and moved + norm * r <= r:
                found: np.ndarray = (step.astype(np.float64) + np.linalg.norm(E, axis=1) * r) * OUTWARD
                return found
    return np.full(len(H), np.inf)


def _slopes(fit: Fit, u: float) -> tuple[np.ndarray, float]:
    """Return ω_i ℓ″(z_i), and a number e such that they are right up to the factor e^{±e}."""
    rounding = 64 * float(np.finfo(float).eps)
    if fit.loss == "squared":
        return fit.weights.astype(np.longdouble), rounding if fit.is_log else 0.0
    own = 0.0 if fit.intercept is None else fit.intercept
    if fit.loss == HUBER:
        is_inlier = np.abs(fit.X @ fit.coef + own - fit.y) < fit.threshold
        return fit.weights.astype(np.longdouble) * is_inlier, rounding if fit.is_log else 0.0
    z = fit.X.astype(np.longdouble) @ fit.coef + own
    # A rounding of z changes ℓ″ by at most that factor, and the exponentials of float64 by a few units more.
    off = gamma(fit.X.shape[1] + 3, u) * float((np.abs(fit.X) @ np.abs(fit.coef) + abs(own)).max(initial=0))
    z64 = np.asarray(z, np.float64)
    off += float(np.abs(z - z64).max(initial=0)) + rounding
    made = np.exp(z64) if fit.loss == "poisson" else expit(z64) * expit(-z64)
    return fit.weights * made.astype(np.longdouble), off


def _may_cross(fit: Fit, A: np.ndarray, r: float) -> np.ndarray:
    """Return for every example whether its residual may be at the threshold for weights within r, or by rounding."""
    own = 0.0 if fit.intercept is None else abs(fit.intercept)
    z = fit.X @ fit.coef + (fit.intercept or 0.0)
    sizes = np.abs(fit.X) @ np.abs(fit.coef) + own + np.abs(fit.y) + fit.threshold
    rounding = gamma(fit.X.shape[1] + 8, float(np.finfo(float).eps)) * sizes
    lengths = np.sqrt((A.astype(np.float64) ** 2).sum(axis=1)) * OUTWARD
    found: np.ndarray = np.abs(np.abs(z - fit.y) - fit.threshold) <= (lengths * r + rounding) * OUTWARD
    return found


def _gradient(fit: Fit) -> tuple[np.ndarray, np.ndarray]:
    """Return the middle and the radius of an enclosure of the gradient for the centred and scaled columns."""
    (mean, scale), (n, d) = fit.units, fit.X.shape
    with precise():
        X = flint.arb_mat(n, d, [flint.arb(x) for x in fit.X.ravel().tolist()])
        w = flint.arb_mat(d, 1, [flint.arb(x) for x in fit.coef.tolist()])
        own = flint.arb(0.0 if fit.intercept is None else float(fit.intercept))
        scores = X * w
        residuals = [
            _slope_of(fit, scores[i, 0] + own, y) * omega
            for i, (y, omega) in enumerate(zip(fit.y.tolist(), fit.exact_weights(), strict=True))
        ]
        total, factor = sum(residuals, flint.arb(0)), fit.exact_total()
        sums = X.transpose() * flint.arb_mat(n, 1, residuals)
        found = []
        for c in range(d):
            penalty = flint.arb(float(fit.penalty[c]))
            own_terms = (penalty * penalty if fit.is_root else penalty) * flint.arb(float(fit.coef[c]))
            if fit.linear is not None:
                own_terms = own_terms + flint.arb(float(fit.linear[c]))
            g = sums[c, 0] + own_terms * factor
            found.append((g - flint.arb(float(mean[c])) * total) / flint.arb(float(scale[c])))
        if fit.intercept is not None:
            found.append(total)
        middle = [float(entry.mid()) for entry in found]
        off = [
            entry - flint.arb(m) if math.isfinite(m) else flint.arb(0) for entry, m in zip(found, middle, strict=True)
        ]
        return np.array(middle), np.array([float(one.abs_upper()) * (1 + 2**-50) for one in off])


@contextmanager
def precise() -> Iterator[None]:
    """Let Arb compute with `BITS` bits."""
    before, flint.ctx.prec = flint.ctx.prec, BITS
    try:
        yield
    finally:
        flint.ctx.prec = before


def _slope_of(fit: Fit, z: flint.arb, y: float) -> flint.arb:
    """Return the derivative of the loss in Arb."""
    if fit.loss != HUBER:
        return mean_of(fit.loss, z) - flint.arb(y)
    most = flint.arb(fit.threshold)
    return (z - flint.arb(y)).max(-most).min(most)


def mean_of(loss: str, z: flint.arb) -> flint.arb:
    """Return the mean at z in Arb."""
    if loss == "squared":
        return z
    return z.exp() if loss == "poisson" else 1 / (1 + (-z).exp())


def prompt_bound(task: Task | NewtonTask | CurvedTask, tokens: np.ndarray, weights: np.ndarray) -> Bound:
    """Bound |w − w*|₂ for the objective of a task on a stored prompt. It is infinite if nothing is proved.

    Several targets have the 2-norm over all of their weights.
    """
    prompt = task.prompt
    rows = tokens[-prompt.rows - prompt.queries :][: prompt.rows]
    is_example = rows[:, prompt.features] != 0
    given, d = rows[is_example], prompt.num_weights
    penalty, is_root = np.array(task.penalty), False
    if not isinstance(task, Task):
        # Each penalty has a row of its own, with one entry that is not 0.
        penalty, is_root = np.abs(rows[~is_example, :d]).sum(axis=0), True
    share = 1.0
    if isinstance(task, CurvedTask):
        share = CURVATURES[task.loss]  # a power of two
        penalty = penalty * math.sqrt(share)
    omega = given[:, prompt.features + 1] if prompt.weighted else None
    distances = []
    for w, y in zip(np.atleast_2d(weights), given[:, -prompt.targets :].T, strict=True):
        fit = Fit(task.loss, given[:, :d], y, w, None, penalty, is_root, omega=omega, is_mean=task.mean)
        fit = replace(fit, is_log=omega is not None)
        l1 = np.array(task.l1 or (0.0,) * d)
        distances.append((enclose_sparse(fit, l1) if l1.any() else enclose(fit)).distance)
    value = math.hypot(*distances)
    return rounded_up(("optimality", value, "the distance to the optimum on the stored prompt"))
