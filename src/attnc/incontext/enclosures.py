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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import flint
import numpy as np
from scipy.special import expit, softmax

from attnc.errors import InputError
from attnc.incontext.descent import Task
from attnc.incontext.differences import rounded_up
from attnc.incontext.newton import NewtonTask
from attnc.incontext.newton_glm import CurvedTask
from attnc.incontext.softmax_regression import SoftmaxTask
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

MOST_CLASS_WEIGHTS = 700
"""Maximum number of weights of all classes for which radii are computed. The Hessian and its inverse are then
multiplied in long double in a second or two."""
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
            return np.ones(len(self.X))
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
    return _enclosure(_radii(fit), fit.units, fit.intercept is not None)


def _enclosure(theta: Float[np.ndarray, " weights"], units: tuple[np.ndarray, np.ndarray], has_own: bool) -> Enclosure:
    """Return the radii in the units of the data, from those for the centred and scaled columns."""
    (mean, scale), d = units, len(units[0])
    with np.errstate(invalid="ignore", over="ignore"):
        coef = np.nan_to_num(theta[:d] / scale * OUTWARD, nan=math.inf, posinf=math.inf)
        own = 0.0
        if has_own:
            own = (
                float((theta[d] + np.abs(mean / scale) @ theta[:d]) * OUTWARD) if np.isfinite(theta).all() else math.inf
            )
    return Enclosure(coef, own, theta, units)


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


def prediction_bound(
    fit: Fit, l1: Float[np.ndarray, " features"], gap: float, X: Float[np.ndarray, "rows features"]
) -> Float[np.ndarray, " rows"]:
    """Return a bound of |x·(w − w*) + b − b*| for every optimum (w*, b*), from a bound of F(w) − F*, a mean.

    Theorem.  Let f_i be the fitted values, W = Σ ω_i, and Σ_i a_i = 1 if there is an intercept. Then
              |x·Δw + Δb| ≤ √(Σ a_i²/ω_i)·√(2W·gap) + |x − Σ a_i x_i|_∞·|Δw|₁,   |Δw|₁ ≤ |w|₁ + F(w)/min_c l1_c.
    Proof.    F is a convex function plus Σ ω_i (f_i − y_i)²/2W, so Σ ω_i (f_i − f*_i)² ≤ 2W·gap. By Cauchy and Schwarz
              |Σ a_i Δf_i| is at most the first term. The rest is (x − Σ a_i x_i)·Δw. The norm of w* is bounded by
              min l1·|w*|₁ ≤ F(w*) ≤ F(w). ∎

    So an x in the span of the examples has a finite bound, where weights have none. Rounding leaves 1 − Σ a_i = η; then
    η·Δb is added, with |Δb| ≤ |mean x|_∞·|Δw|₁, as b = mean (y − w·x) for both.
    """
    n, omega = len(fit.X), fit.weights
    has_own, u = fit.intercept is not None, float(np.finfo(np.longdouble).eps)
    (mean, scale), own = fit.units, fit.intercept or 0.0
    residuals = fit.X @ fit.coef + own - fit.y
    value = (
        float(omega @ residuals**2) / (2 * fit.total)
        + float(fit.penalty @ fit.coef**2) / 2
        + float(l1 @ np.abs(fit.coef))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = (float(np.abs(fit.coef).sum()) + np.float64(value) / l1.min(initial=math.inf)) * OUTWARD
    roots = np.sqrt(omega)
    extended = np.column_stack([(fit.X - mean) / scale, np.ones((n, int(has_own)))]) * roots[:, None]
    asked = np.column_stack([(X - mean) / scale, np.ones((len(X), int(has_own)))])
    a = np.linalg.lstsq(extended.T, asked.T, rcond=None)[0].T * roots  # Σ (a_i/√ω_i)·√ω_i·x_i = x
    exact, at = a.astype(np.longdouble), fit.X.astype(np.longdouble)
    sizes = np.abs(a) @ np.abs(fit.X) + np.abs(X)
    left = np.abs(X - exact @ at).astype(np.float64) + gamma(n + 3, u) * sizes
    rest = left.max(axis=1, initial=0.0)
    if has_own:
        eta = np.abs(1 - exact.sum(axis=1)).astype(np.float64) + gamma(n + 3, u) * (1 + np.abs(a).sum(axis=1))
        rest = rest + eta * float(np.abs(omega @ fit.X / omega.sum()).max(initial=0)) * OUTWARD
    spread = np.sqrt((a**2 / omega).sum(axis=1)) * math.sqrt(2 * fit.total * gap)
    with np.errstate(invalid="ignore"):
        found: np.ndarray = (spread + np.where(rest > 0, rest * moved, 0.0)) * OUTWARD
    return np.where(np.isnan(found), np.inf, found)


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
    relative = gamma(len(A) + 12, u) + math.expm1(min(spread, 700.0))
    relative += gamma(len(A) + 2, float(np.finfo(float).eps)) if fit.is_mean else 0.0
    error_H = relative * of_H + len(A) * SMALLEST_SLOPE * np.abs(A).max(initial=0) ** 2
    longest = float(np.sqrt((A.astype(np.float64) ** 2).sum(axis=1)).max(initial=0)) * OUTWARD

    def changed(r: float) -> np.ndarray:
        if fit.loss == HUBER:
            at_threshold = _may_cross(fit, A, r)[:, None]
            return np.abs(A).T @ (np.abs(A) * fit.weights[:, None] * at_threshold)
        return (0.0 if fit.loss == "squared" else math.expm1(min(longest * r, 700.0))) * of_H

    return _contracted(H, error_H, middle, radius, changed)


def _contracted(
    H: np.ndarray,
    error_H: np.ndarray,
    middle: np.ndarray,
    radius: np.ndarray,
    changed: Callable[[float], np.ndarray],
) -> Float[np.ndarray, " weights"]:
    """Return the radii of the theorem, or infinite ones.

    H is the Hessian, and error_H bounds its error. The gradient is within `radius` of `middle`, and `changed(r)` bounds
    the change of the Hessian on the ball of radius r.
    """
    u = float(np.finfo(np.longdouble).eps)
    try:
        R = np.linalg.inv(H.astype(np.float64)).astype(np.longdouble)
    except np.linalg.LinAlgError:
        return np.full(len(H), np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        step = np.abs(R @ middle) + np.abs(R) @ (radius + gamma(len(H) + 2, u) * np.abs(middle))
        left = np.abs(np.eye(len(H)) - R @ H) + gamma(len(H) + 4, u) * (np.eye(len(H)) + np.abs(R) @ np.abs(H))
        left = left + np.abs(R) @ error_H
        moved = float(np.linalg.norm(step.astype(np.float64))) * OUTWARD
        for factor in RADIUS_TRIES:
            r = moved * factor
            E = (left + np.abs(R) @ changed(r)).astype(np.float64) * OUTWARD
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


def enclose_classes(
    fit: Fit, labels: Float[np.ndarray, "rows classes"], weights: Float[np.ndarray, "classes weights"]
) -> list[Enclosure]:
    """Return proven radii for the cross entropy of the softmax, for each class.

    Parameters
    ----------
    fit : Fit
        The examples and the penalties. Its loss, targets and weights are not used, but for whether it has an intercept.
    labels : array of shape (rows, classes)
        The targets, one-hot.
    weights : array of shape (classes, weights)
        The weights that were found, those of the intercepts last.

    Without a penalty, the same number may be added to a weight of all classes. The optimum of the theorem is the one
    at which such weights add up to 0. It is also that of F + ½ Σ_c s_c (Σ_k w_kc)², s_c > 0, over these columns c, and
    to this function the theorem is applied. With p the probabilities, the Hessian consists of
    Σ ω_i p_ik ([k = l] − p_il) x_i x_iᵀ. If scores change by at most δ, p and 1 − p change by factors in e^{±2δ}, and
    so these terms by factors in e^{±4δ}.
    """
    (mean, scale), (n, d) = fit.units, fit.X.shape
    K, has_own, u = labels.shape[1], fit.intercept is not None, float(np.finfo(np.longdouble).eps)
    width = d + has_own
    theta = np.full((K, width), np.inf)
    if K * width <= MOST_CLASS_WEIGHTS and np.isfinite(weights).all():
        A = (fit.X.astype(np.longdouble) - mean) / scale
        A = np.column_stack([A, np.ones(n, np.longdouble)]) if has_own else A
        pen = (fit.penalty.astype(np.longdouble) ** (2 if fit.is_root else 1)) / scale.astype(np.longdouble) ** 2
        pen = np.append(pen, np.zeros(int(has_own)))
        z = fit.X.astype(np.longdouble) @ weights[:, :d].T + (weights[:, d] if has_own else 0.0)
        sizes = np.abs(fit.X) @ np.abs(weights[:, :d]).T + (np.abs(weights[:, d]) if has_own else 0.0)
        p = softmax(z.astype(np.float64), axis=1).astype(np.longdouble)
        off = gamma(d + 3, u) * float(sizes.max(initial=0)) + float(np.abs(z - z.astype(np.float64)).max(initial=0))
        # A rounding of z changes p and 1 − p by a factor in e^{±2·off}. The softmax of float64 adds roundings.
        spread = 4 * off + (2 * K + 128) * float(np.finfo(float).eps)
        others = np.stack([np.delete(p, k, axis=1).sum(axis=1) for k in range(K)], axis=1)
        flat = np.where(pen == 0, max(1.0, float(fit.weights.sum())) / K, 0.0).astype(np.longdouble)
        H = np.zeros((K, width, K, width), np.longdouble)
        of_H = np.zeros_like(H)
        for k in range(K):
            for other in range(K):
                slopes = fit.weights * (p[:, k] * (others[:, k] if k == other else -p[:, other]))
                H[k, :, other] = A.T @ (A * slopes[:, None])
                of_H[k, :, other] = np.abs(A).T @ np.abs(A * slopes[:, None])
        error_H = (gamma(n + 12, u) + math.expm1(min(spread, 700.0))) * of_H
        error_H += n * SMALLEST_SLOPE * float(np.abs(A).max(initial=0)) ** 2
        change = of_H.reshape(K * width, K * width).copy()
        each = np.arange(width)
        for k in range(K):
            H[k, each, k, each] += pen
            error_H[k, each, k, each] += 4 * u * pen
            for other in range(K):
                H[k, each, other, each] += flat
                error_H[k, each, other, each] += 4 * u * (flat + np.abs(H[k, each, other, each]))
        middle, radius = _class_gradient(fit, labels, weights, flat)
        longest = float(np.sqrt((A.astype(np.float64) ** 2).sum(axis=1)).max(initial=0)) * OUTWARD

        def changed(r: float) -> np.ndarray:
            found: np.ndarray = math.expm1(min(4 * longest * r, 700.0)) * change
            return found

        square = (K * width, K * width)
        theta = _contracted(H.reshape(square), error_H.reshape(square), middle, radius, changed).reshape(K, width)
    return [_enclosure(one, fit.units, has_own) for one in theta]


def _class_gradient(
    fit: Fit, labels: np.ndarray, weights: np.ndarray, flat: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the middle and the radius of an enclosure of the gradient of `enclose_classes`."""
    (mean, scale), (n, d) = fit.units, fit.X.shape
    K, has_own = labels.shape[1], fit.intercept is not None
    with precise():
        X = flint.arb_mat(n, d, [flint.arb(x) for x in fit.X.ravel().tolist()])
        W = flint.arb_mat(d, K, [flint.arb(x) for x in weights[:, :d].T.ravel().tolist()])
        own = [flint.arb(x) for x in (weights[:, d].tolist() if has_own else [0.0] * K)]
        scores, residuals = X * W, []
        for i, omega in enumerate(fit.exact_weights()):
            powers = [(scores[i, k] + own[k]).exp() for k in range(K)]
            total = sum(powers, flint.arb(0))
            residuals += [
                (power / total - flint.arb(y)) * omega for power, y in zip(powers, labels[i].tolist(), strict=True)
            ]
        R = flint.arb_mat(n, K, residuals)
        sums, totals = X.transpose() * R, [sum((R[i, k] for i in range(n)), flint.arb(0)) for k in range(K)]
        together = [sum((W[c, k] for k in range(K)), flint.arb(0)) for c in range(d)]
        found = []
        for k in range(K):
            for c in range(d):
                penalty = flint.arb(float(fit.penalty[c])) ** (2 if fit.is_root else 1)
                g = sums[c, k] + penalty * W[c, k] - flint.arb(float(mean[c])) * totals[k]
                g = g / flint.arb(float(scale[c])) + flint.arb(float(flat[c])) * together[c] * flint.arb(
                    float(scale[c])
                )
                found.append(g)
            if has_own:  # the intercept of θ is that of w, with the means
                shifts = sum((flint.arb(float(mean[c])) * together[c] for c in range(d)), flint.arb(0))
                found.append(totals[k] + flint.arb(float(flat[d])) * (sum(own, flint.arb(0)) + shifts))
        return _middles(found)


def _middles(found: list[flint.arb]) -> tuple[np.ndarray, np.ndarray]:
    """Return the middles and the radii of numbers of Arb, rounded up."""
    middle = [float(entry.mid()) for entry in found]
    off = [entry - flint.arb(m) if math.isfinite(m) else flint.arb(0) for entry, m in zip(found, middle, strict=True)]
    return np.array(middle), np.array([float(one.abs_upper()) * (1 + 2**-50) for one in off])


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
        return _middles(found)


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
    if isinstance(task, SoftmaxTask):
        labels, zeros = given[:, -prompt.targets :], np.zeros(d)
        fit = Fit(task.loss, given[:, :d], zeros, zeros, None, penalty, omega=omega, is_log=omega is not None)
        value = math.hypot(*(one.distance for one in enclose_classes(fit, labels, weights)))
        return rounded_up(("optimality", value, "the distance to the optimum on the stored prompt"))
    distances = []
    for w, y in zip(np.atleast_2d(weights), given[:, -prompt.targets :].T, strict=True):
        fit = Fit(task.loss, given[:, :d], y, w, None, penalty, is_root, omega=omega, is_mean=task.mean)
        fit = replace(fit, is_log=omega is not None)
        l1 = np.array(task.l1 or (0.0,) * d)
        distances.append((enclose_sparse(fit, l1) if l1.any() else enclose(fit)).distance)
    value = math.hypot(*distances)
    return rounded_up(("optimality", value, "the distance to the optimum on the stored prompt"))
