"""One head, one variable, constant values: functions with kinks and singular points."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.limits import MAX_BYTES, bytes_per_anchor
from attnc.constructions.pieces.fitting import Fitted, Line, fit_size, fit_within
from attnc.constructions.pieces.group_search import LARGEST_GROUP
from attnc.constructions.pieces.kinks import Kink, find_kinks
from attnc.constructions.unary.keys import Keys
from attnc.constructions.unary.program import check_unary
from attnc.constructions.unary.request import check_request, round_above
from attnc.errors import BoundNotMet, DomainError, InputError, real_number
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.box import Box
from attnc.targets.target import Target

MAX_KEYS = 4096
"""Fitting more keys than that takes minutes."""


def graded(
    target: Target,
    *,
    eps: float | None = None,
    num_anchors: int | None = None,
    kinks: Sequence[float | Kink] | None = None,
    max_value: float = 10.0,
    dtype: str = "float64",
    max_anchors: int = MAX_KEYS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """A group of keys for every smooth piece of f; at a kink the weight passes from one group to the next.

    Theorem.  Let A_i be what group i of keys gives by itself, W_i(x) the weight of all its keys, and let x lie in piece
              j. Then |out − f| ≤ |A_j − f| + Σ_{i≠j} W_i·|A_i − A_j| at x. Between two groups whose log-sum-exps differ
              by B(x − κ), and pieces whose slopes differ by J at κ, the sum is 0.2785·J/B at most, to first order.
    Weights.  Inside a group scores are the tangents of a convex φ at its anchors, φ″ = c/h² with h the local spacing,
              constant on a smooth piece, and ∝ t0 + |x − κ| towards a singular point κ (√x at 0), so that anchors
              are at κ ± t0(e^{|s|} − 1), s uniform. Values solve f on a sample by reweighted least squares, with
              |v| ≤ max_value·max|f|. All keys of group i share an affine ψ_i, ψ_{i+1} − ψ_i rising with slope B at κ_i.
    Rate.     The error falls like e^{−Cp} in the keys p of a smooth piece, however it ends, and like e^{−C√p} where
              f is singular: observed, not proved. A kink itself costs no keys, but scores of size B ~ 1/ε.

    Which kinks there are the expression shows; for Python code they are looked for on samples, or given as `kinks`. The
    number of keys, the spacings, c, t0 and B are searched for a given eps, or for the best error with num_anchors keys.
    The error is the largest seen on a sample that is densest at the kinks and refined where it is largest: an
    observation, hence no bound.
    """
    check_unary(target, "graded")
    check_request(eps, num_anchors, max_value, dtype)
    if not target.is_continuous:
        raise DomainError(
            f"{target.describe()} may jump, and no average of finitely many values does. Use construction='max_affine' "
            "with an L_p norm (norm=2), or a box on which it does not jump."
        )
    most = min(max_anchors, max_bytes // bytes_per_anchor(target))
    found = find_kinks(target) if kinks is None else _inside(kinks, float(target.box.lo[0]), float(target.box.hi[0]))
    report = None if progress is None else lambda fraction: progress("fitting", fraction)
    line = Line(lambda x: target(x[:, None]), target.box, found, max_value, dtype, report)
    if num_anchors is not None:
        if num_anchors > most:
            raise InputError(f"num_anchors={num_anchors:,} is more than max_anchors or max_bytes allow ({most:,})")
        return _built(target, line, fit_size(line, num_anchors))
    assert eps is not None
    if len(line.pieces) > most:
        raise _refusal(target, line, None, eps, most)
    fitted = fit_within(line, eps, most)
    if fitted.error > eps or fitted.p > most:
        raise _refusal(target, line, fitted, eps, most)
    return _built(target, line, fitted)


def graded_keys(
    f: Callable[[np.ndarray], np.ndarray],
    lo: float,
    hi: float,
    kinks: Sequence[float | Kink] = (),
    *,
    eps: float | None = None,
    num_keys: int | None = None,
    max_value: float = 10.0,
    dtype: str = "float64",
) -> Keys:
    """The head alone, for f of points (m,) to (m,) or (m, outputs): the best with num_keys keys, or the fewest for eps.

    Values are rows only if f gives rows. Where eps is not reached: BoundNotMet, whose `network` is the best keys.
    """
    check_request(eps, num_keys, max_value, dtype)
    inside = _inside(kinks, lo, hi)
    is_flat = np.ndim(f(np.array([lo, hi]))) == 1
    line = Line(lambda x: np.asarray(f(x)).reshape(len(x), -1), Box.parse([(lo, hi)]), inside, max_value, dtype)
    if num_keys is not None:
        fitted = fit_size(line, num_keys)
    else:
        assert eps is not None
        fitted = fit_within(line, eps, MAX_KEYS)
    keys = fitted.head.keys_of_x()
    keys = Keys(keys.slopes, keys.offsets, keys.values[:, 0] if is_flat else keys.values)
    if eps is not None and fitted.error > eps:
        raise BoundNotMet(
            f"graded keys on [{lo:g}, {hi:g}] have an error of {fitted.error:.3g} with {fitted.p} keys in {dtype}, not "
            f"eps={eps:g}. Choose a larger eps, or a smaller interval.",
            eps=eps,
            bound=None,
            build=lambda: keys,
        )
    return keys


def _inside(kinks: Sequence[float | Kink], lo: float, hi: float) -> tuple[Kink, ...]:
    """Those in the box, sorted; at an end only singular ones count."""
    found = {k if isinstance(k, Kink) else Kink(real_number("kinks", k)) for k in kinks}
    places = sorted(found, key=lambda kink: kink.x)
    return tuple(k for k in places if lo < k.x < hi or (k.is_singular and lo <= k.x <= hi))


def _built(target: Target, line: Line, fitted: Fitted) -> Built:
    kinks = ", ".join(f"{kink.x:.6g}" for kink in line.kinks[:8]) + (", …" if len(line.kinks) > 8 else "")
    parameters: tuple[tuple[str, float | int | str], ...] = (
        (
            "keys_per_piece",
            " + ".join(str(group.p) for group in fitted.groups[:12]) + (" + …" if len(fitted.groups) > 12 else ""),
        ),
        ("kinks", kinks or "none"),
        ("largest_slope", float(np.abs(fitted.head.keys.slopes).max())),
        ("largest_value", float(np.abs(fitted.head.keys.values).max())),
        ("worst_error", fitted.error),
        ("worst_at", fitted.at),
    )
    return Built(fitted.head.program(target), "graded", None, None, parameters)


def _refusal(target: Target, line: Line, fitted: Fitted | None, eps: float, most: int) -> BoundNotMet:
    asked = f"cannot bring the error to eps={eps:g} for {target.describe()} on {target.box} with graded anchors"
    if fitted is None:
        return BoundNotMet(
            f"{asked}: it has {len(line.kinks):,} kinks, so {len(line.pieces):,} pieces that need a key each, and "
            f"max_anchors and max_bytes allow {most:,}. Choose a smaller box, or raise both.",
            eps=eps,
            bound=None,
        )
    worst = next(group.piece for group in fitted.groups if fitted.at <= group.piece.hi)
    where = {target.box.names[0]: (worst.lo, worst.hi)}
    place = f"{target.box.names[0]} = {fitted.at:.6g}"
    seen = f"the largest error seen is {fitted.error:.3g} with {fitted.p:,} anchors, at {place}"
    change = f"Choose eps ≥ {round_above(fitted.error):.2g}"
    largest = float(np.abs(fitted.head.keys.slopes).max())
    felt = UNIT_ROUNDOFF[line.dtype] * largest * float(np.abs(fitted.head.keys.values).max())
    if fitted.p >= most or max(group.p for group in fitted.groups) >= LARGEST_GROUP:
        reason = f"more anchors than {min(most, LARGEST_GROUP * len(fitted.groups)):,} are needed"
        change += ", a smaller box, or raise max_anchors and max_bytes"
    elif felt > 0.01 * fitted.error:
        reason = f"rounding in {line.dtype} is in the way: scores of size {largest:.2g} are not computed any better"
        change += ", or float64" if line.dtype == "float32" else ""
    else:
        reason = f"more anchors are of little use as long as values are limited to {line.max_value:g} times max|f|"
        change += ", or a larger max_value"
    return BoundNotMet(
        f"{asked}: {seen}. {reason[0].upper()}{reason[1:]}. {change}.",
        eps=eps,
        bound=None,
        worst_box=where,
        build=(lambda: _built(target, line, fitted)) if fitted.p <= most else None,
    )
