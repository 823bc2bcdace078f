"""How surely the heads of a layer select one key of a given set, for given queries or all queries of a ball or a box.

Let a be the key with the largest score at the centre of the region, and k_b the keys (rotated by their distance from
the query, if the layer rotates). With G_b = scale·W_Qᵀk_b, the norm's weight w, P the centring or the identity, and
t = 1/√(|Px|²/d + eps),

    s_a(x) − s_b(x) = t·⟨P(w∘(G_a − G_b)), x⟩ + c_a − c_b,        c_b = scale·b_Q·k_b + ⟨G_b, bias of the norm⟩.

Gap.     The inner product ranges over ⟨·, centre⟩ ± r·|·|₂ on a ball and ± Σ|·|ρ on a box, and |Px| over
         |P centre| ± r. The product of the two intervals has a lower end for every b: the gap g_b.
Leak.    1 − p_a = S/(1 + S) with S = Σ_b e^{s_b − s_a} ≤ Σ_b e^{−g_b}, so leak ≤ (n − 1)e^{−g} for g = min g_b.
Margin.  An engine computes scores with errors δ_b, for any order of summation, and its t has one relative error for
         all keys. The margin is the least g_b − δ_a − δ_b: if it is positive, rounding does not change the selection.
Length.  n keys, all of them at least the gap g behind, leak at most (n − 1)e^{−g}: up to 1 + τe^g keys leak at most τ.

All of it is computed in float64 with outward rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attnc.heads.stock_layer import LayerNorm, StockLayer
from attnc.ir.soft_head import Enclosed
from attnc.numerics import elementary
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import ENGINE_ULPS, LIBM_ULPS, SINE_SLACK, UNIT_ROUNDOFF, down, gamma, up

U = UNIT_ROUNDOFF["float64"]
SINGLE = UNIT_ROUNDOFF["float32"]
DTYPES = ("float32", "float64")
"""The arithmetics in which margins are proved."""
ANGLE_ULPS = 16
"""Roundings, in float32, of an angle of the rotation: the power of its base, the product with the position, and a part
for the library. They are computed in float32 whatever the dtype of the model."""
NORM_STEPS = 12
"""Roundings of 1/√(mean square + eps) besides those of the sum."""
LARGEST_POSITION = 2**20
"""Angles up to this many radians are enclosed."""
OVERFLOW = 2.0**110
"""Numbers of this size and sums of 2^17 of them are finite in float32."""
TINY = {"float32": 2.0**-126, "float64": 2.0**-1022}


@dataclass(frozen=True, eq=False)
class QueryRegion:
    """Queries around `centre`: within `radius` of it in the 2-norm, or within `widths` of it in each channel."""

    centre: Float[np.ndarray, " width"]
    radius: float = 0.0
    widths: Float[np.ndarray, " width"] | None = None

    @property
    def reach(self) -> Float[np.ndarray, " width"]:
        """The largest distance from the centre in each channel."""
        return np.full(len(self.centre), self.radius) if self.widths is None else self.widths

    @property
    def length(self) -> float:
        """The largest distance from the centre in the 2-norm, rounded up."""
        return self.radius if self.widths is None else float(_lengths(self.widths[None])[0])

    def spread(self, D: Float[np.ndarray, "keys width"]) -> Float[np.ndarray, " keys"]:
        """Return max |⟨D_b, x − centre⟩| over the region, rounded up."""
        if self.widths is None:
            return up(self.radius * _lengths(D)) if self.radius else np.zeros(len(D))
        return up(np.abs(D) @ self.widths, len(self.widths) + 2)


@dataclass(frozen=True)
class SelectionClaim:
    """The proven facts about one head, for all queries together.

    Attributes
    ----------
    head : int
        The number of the head.
    selected : tuple of int
        The keys that are selected, each for at least one query.
    gap : float
        A lower bound of the distance of the selected key's score from all others, in exact arithmetic.
    leak : float
        An upper bound of the weight of all other keys together, in exact arithmetic.
    margins : mapping
        Arithmetic → a lower bound of that distance as computed: the gap less the errors of both scores.
    leaks : mapping
        Arithmetic → an upper bound of the weight of all other keys as computed. Computed weights may have a sum of a
        little more than 1, so it may be a little above 1.
    lengths : mapping
        Arithmetic → the most keys, all of them at least as far behind, with which the leak stays within the allowed
        one. At least 1, and None if there is no limit below 2^63.
    worst_query : int
        The number of the query with the smallest margin in float32.

    Examples
    --------
    >>> from attnc.heads import SelectionClaim
    >>> facts = {"float32": 10.0, "float64": 10.0}
    >>> SelectionClaim(0, (3,), 10.1, 1e-4, facts, dict.fromkeys(facts, 1e-4), dict.fromkeys(facts, 221), 0).selected
    (3,)
    """

    head: int
    selected: tuple[int, ...]
    gap: float
    leak: float
    margins: Mapping[str, float]
    leaks: Mapping[str, float]
    lengths: Mapping[str, int | None]
    worst_query: int


@dataclass(frozen=True, eq=False)
class _Rounding:
    """Errors of an engine: of the layer's arithmetic, and of its norm."""

    dtype: str
    u: float
    u_norm: float
    width: int
    d_head: int

    def norm_errors(
        self, norm: LayerNorm, sizes: Float[np.ndarray, "rows width"], scales: Float[np.ndarray, "rows 1"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return absolute errors of every normed entry, and a relative error that all entries of a row share.

        `sizes` bound the entries of x, and `scales` t. A computed mean is off by γ·mean|x|, and x itself is rounded to
        the dtype. If these move |Px| by the share e ≤ 1/2, t moves by at most 2e.
        """
        scaling = np.full((len(sizes), 1), gamma(self.width + NORM_STEPS, self.u_norm))
        if not norm.is_centred:
            return np.zeros(sizes.shape), scaling
        mean = up(sizes.mean(axis=1, keepdims=True), self.width + 2)
        moved = up(gamma(self.width + 4, self.u_norm) * mean + 2 * self.u_norm * sizes, 4)
        share = up(moved.max(axis=1, keepdims=True) * scales, 2)
        relative = np.where(share <= 0.5, up(2 * scaling + 2 * share, 2), np.inf)
        return up(moved * scales * np.abs(norm.weight), 4), relative

    def projected(
        self, W: np.ndarray, b: np.ndarray, size: np.ndarray, error: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sizes of W y + b as sums of absolute values, and the errors as computed, row by row."""
        W = np.abs(W)
        sizes = up(up(size @ W.T, self.width + 2) + np.abs(b))
        carried = up(error @ W.T, self.width + 2)
        lost = up(gamma(self.width + 2, self.u) * up(sizes + carried)) + (self.width + 2) * TINY[self.dtype]
        return sizes, up(carried + up(lost))


class LayerClaims:
    """The heads of a layer with given keys."""

    def __init__(self, layer: StockLayer, keys: Float[np.ndarray, "keys width"], position: int) -> None:
        self.layer, self.position = layer, position
        self.keys, self.key_scales = _normed(layer.norm, keys)
        self.key_sizes = up(np.abs(self.keys.mid) + self.keys.radius)
        self.num_keys = len(keys)
        self.raw_sizes = np.abs(keys)

    def head(self, number: int, regions: list[QueryRegion], leak: float) -> SelectionClaim:
        """Return the claim of one head, for all regions."""
        layer, key_head = self.layer, self.layer.key_head(number)
        W_Q, b_Q = layer.W_Q[number], layer.b_Q[number]
        W_K, b_K = layer.W_K[key_head], layer.b_K[key_head]
        k = _plus(_times(self.keys, W_K), b_K)
        if layer.rotation is not None:
            k = _rotated(k, np.arange(self.num_keys) - self.position, layer.rotation)
        scaled = Enclosed(k.mid * layer.scale, up(k.radius * layer.scale + np.abs(k.mid * layer.scale) * U, 2))
        G = _times(scaled, W_Q.T)
        constant = _times(scaled, b_Q[None])[:, 0]
        norm = layer.norm
        if norm is not None:
            shift = _times(G, norm.bias[None])[:, 0]
            constant = _sum(constant, shift)
            G = Enclosed(G.mid * norm.weight, up(G.radius * np.abs(norm.weight) + np.abs(G.mid * norm.weight) * U, 3))
            G = _centred(G) if norm.is_centred else G
        roundings = [self._rounding(dtype) for dtype in DTYPES]
        errors = {each.dtype: self._key_errors(each, k, W_K, b_K) for each in roundings}
        found = [self._query(region, G, constant, W_Q, b_Q, roundings, errors) for region in regions]
        gap, margins = min(each.gap for each in found), {}
        for dtype in DTYPES:
            margins[dtype] = min(each.margins[dtype] for each in found)
        return SelectionClaim(
            number,
            tuple(sorted({each.selected for each in found})),
            gap,
            max(each.leak for each in found),
            margins,
            {dtype: max(each.leaks[dtype] for each in found) for dtype in DTYPES},
            {dtype: longest(margins[dtype], leak) for dtype in DTYPES},
            min(range(len(found)), key=lambda i: found[i].margins["float32"]),
        )

    def _rounding(self, dtype: str) -> _Rounding:
        u = UNIT_ROUNDOFF[dtype]
        norm = self.layer.norm
        u_norm = max(u, SINGLE) if norm is not None and norm.in_float32 else u
        return _Rounding(dtype, u, u_norm, self.layer.width, self.layer.d_head)

    def _key_errors(
        self, rounding: _Rounding, k: Enclosed, W_K: np.ndarray, b_K: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sizes |k| and the errors of computed keys, (keys, d_head)."""
        norm = self.layer.norm
        error = 4 * rounding.u * self.key_sizes  # the input is rounded to the dtype
        if norm is not None:
            moved, relative = rounding.norm_errors(norm, self.raw_sizes, self.key_scales)
            error = up(up(6 * rounding.u_norm * self.key_sizes, 4) + moved)
        sizes, errors = rounding.projected(W_K, b_K, self.key_sizes, error)
        size = up(np.abs(k.mid) + k.radius)
        is_rotated = self.layer.rotation is not None
        if is_rotated:
            _, errors = self._rotation_errors(rounding, sizes, errors, np.arange(self.num_keys))
            half = self.layer.d_head // 2  # a rotation keeps the length of a pair, whatever its angle
            size = np.tile(up(np.hypot(size[:, :half], size[:, half:]), LIBM_ULPS), 2)
        if norm is not None:
            # The part of W_K·y that is a multiple of t has the relative error of t, before and after a rotation.
            bias = up(np.abs(b_K) + up(np.abs(W_K) @ np.abs(norm.bias), rounding.width + 2))
            bias = np.tile(up(np.hypot(*np.split(bias, 2)), LIBM_ULPS), 2) if is_rotated else bias
            errors = up(errors + up(relative * up(size + bias + errors, 2)), 2)
        return size, errors

    def _rotation_errors(
        self, rounding: _Rounding, sizes: np.ndarray, errors: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return sizes and errors after a rotation whose angles, sines and cosines are computed in float32."""
        assert self.layer.rotation is not None
        half = self.layer.d_head // 2
        angles = np.abs(positions)[:, None] * _frequencies(self.layer.rotation, half)
        wrong = up(np.tile(angles, 2) * (ANGLE_ULPS * SINGLE) + 8 * SINGLE + 4 * rounding.u, 4)
        swapped, moved = np.roll(sizes, half, axis=-1), np.roll(errors, half, axis=-1)
        both = up(sizes + swapped)
        return both, up(errors + moved + up(wrong * up(both + errors + moved, 2)), 4)

    def _query(
        self,
        region: QueryRegion,
        G: Enclosed,
        constant: Enclosed,
        W_Q: np.ndarray,
        b_Q: np.ndarray,
        roundings: list[_Rounding],
        errors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ) -> _QueryClaim:
        norm, width = self.layer.norm, self.layer.width
        t = self._scale_range(region)
        middle = (t.lo + t.hi) / 2
        a = int((middle * (G.mid @ region.centre) + constant.mid).argmax())
        D = G.mid[a] - G.mid
        radius = up(G.radius[a] + G.radius + np.abs(D) * U, 3)
        along = D @ region.centre
        sizes = np.abs(region.centre)
        lost = up(gamma(width + 2, U) * (np.abs(D) @ sizes), width + 4) + up(radius @ sizes, width + 2)
        lost = up(lost + region.spread(up(np.abs(D) + radius)), 2)
        inner = Interval(down(along - lost), up(along + lost))
        fixed = constant.mid[a] - constant.mid
        slack = up(constant.radius[a] + constant.radius + np.abs(fixed) * U, 3)
        others = np.arange(self.num_keys) != a
        gaps = down((inner * t).lo + down(fixed - slack))[others]
        margins, leaks = {}, {}
        for rounding in roundings:
            loose, moved = t, np.zeros((1, width))
            if norm is not None:
                moved, relative = rounding.norm_errors(norm, up(sizes + region.reach)[None], t.hi.reshape(1, 1))
                off = float(relative[0, 0])
                loose = Interval(down(t.lo * down(1 - off)), up(t.hi * up(1 + off)))
            delta = self._score_errors(rounding, region, float(loose.hi), moved, W_Q, b_Q, *errors[rounding.dtype])
            computed = down((inner * loose).lo + down(fixed - slack))
            computed = down(computed - up(delta[a] + delta), 2)[others]
            margins[rounding.dtype] = float(computed.min(initial=math.inf))
            # The softmax subtracts, exponentiates, sums and divides, in float32 or better.
            relaxed = down(computed - up(np.abs(computed) * (4 * SINGLE)), 2)
            grown = 1 + 4 * ENGINE_ULPS["float32"] * SINGLE + gamma(self.num_keys + 2, SINGLE)
            leaks[rounding.dtype] = float(up(leaked(relaxed) * grown, 2))
        return _QueryClaim(a, float(gaps.min(initial=math.inf)), leaked(gaps), margins, leaks)

    def _scale_range(self, region: QueryRegion) -> Interval:
        """Return the range of t over the region."""
        norm = self.layer.norm
        if norm is None:
            return Interval.point(np.array(1.0))
        centre = Enclosed.exact(region.centre[None])
        if norm.is_centred:
            centre = _centred(centre)
        slack = float(up(_lengths(centre.radius)[0] + region.length))
        length = float(np.linalg.norm(centre.mid[0]))
        grown = (len(region.centre) + 4) * 2.0**-52
        least = np.maximum(down(length * (1 - grown) - slack, 2), 0.0)
        size = Interval(least, up(length * (1 + grown) + slack, 2))
        return _inverse_root(size.square() / float(len(region.centre)), norm.eps)

    def _score_errors(
        self,
        rounding: _Rounding,
        region: QueryRegion,
        t: float,
        moved: np.ndarray,
        W_Q: np.ndarray,
        b_Q: np.ndarray,
        key_sizes: np.ndarray,
        key_errors: np.ndarray,
    ) -> Float[np.ndarray, " keys"]:
        """Bound the error of every computed score, but for the error of t, which all keys share.

        `moved` are absolute errors of the normed entries of the query.
        """
        norm = self.layer.norm
        raw = up(np.abs(region.centre) + region.reach)[None]
        size, error = raw, 4 * rounding.u * raw
        if norm is not None:
            around = up(raw + up(raw.mean(), rounding.width + 2)) if norm.is_centred else raw
            size = up(around * t * np.abs(norm.weight) + np.abs(norm.bias), 6)
            error = up(up(6 * rounding.u_norm * size, 2) + moved)
        sizes, errors = rounding.projected(W_Q, b_Q, size, error)
        if self.layer.rotation is not None:
            sizes, errors = self._rotation_errors(rounding, sizes, errors, np.array([self.position]))
        query, off = sizes[0], errors[0]
        terms = self.layer.d_head + 4
        largest = up(query + off)
        made = up(key_errors @ largest, terms) + up(key_sizes @ off, terms)
        total = up(up(key_sizes + key_errors) @ largest, terms)
        made += up(gamma(terms, rounding.u) * total, 2)
        found = up(self.layer.scale * up(made, 4) + terms * TINY[rounding.dtype], 4)
        # Rounding is bounded only if nothing overflows: neither the squares of the norm, nor projections, nor scores.
        inputs, projections = (
            max(raw.max(), self.raw_sizes.max()),
            max(largest.max(), key_errors.max(), key_sizes.max()),
        )
        is_finite = (total < OVERFLOW) & (inputs < math.sqrt(OVERFLOW)) & (projections < OVERFLOW)
        return np.where(is_finite, found, math.inf)


@dataclass(frozen=True)
class _QueryClaim:
    selected: int
    gap: float
    leak: float
    margins: Mapping[str, float]
    leaks: Mapping[str, float]


def leaked(gaps: Float[np.ndarray, " others"]) -> float:
    """Return S/(1 + S) for S = Σ e^{−g}, rounded up, and 1 if S overflows."""
    if not len(gaps):
        return 0.0
    with np.errstate(over="ignore", under="ignore"):
        total = float(up(up(np.exp(-gaps), LIBM_ULPS).sum(), len(gaps) + 1))
    return 1.0 if not math.isfinite(total) else min(1.0, float(up(total / float(down(1 + total)))))


def longest(gap: float, leak: float) -> int | None:
    """Return the largest n with (n − 1)e^{−gap} ≤ leak, or None beyond 2^63."""
    if gap == math.inf or gap + math.log(leak) > 43.6:
        return None
    with np.errstate(under="ignore"):
        return 1 + math.floor(float(down(leak * float(down(np.exp(gap), LIBM_ULPS)), 2)))


def _times(A: Enclosed, W: Float[np.ndarray, "outputs n"]) -> Enclosed:
    """Return A·Wᵀ for exact W."""
    n = W.shape[1]
    sizes = up(np.abs(A.mid) @ np.abs(W.T), n + 2)
    radius = up(up(A.radius @ np.abs(W.T), n + 2) + up(gamma(n + 1, U) * sizes) + n * 2.0**-1022, 2)
    return Enclosed(A.mid @ W.T, radius)


def _plus(A: Enclosed, b: np.ndarray) -> Enclosed:
    mid = A.mid + b
    return Enclosed(mid, up(A.radius + np.abs(mid) * U, 2))


def _sum(A: Enclosed, B: Enclosed) -> Enclosed:
    mid = A.mid + B.mid
    return Enclosed(mid, up(A.radius + B.radius + np.abs(mid) * U, 3))


def _centred(A: Enclosed) -> Enclosed:
    """Return every row less its mean."""
    n = A.mid.shape[-1]
    mid = A.mid - A.mid.mean(axis=-1, keepdims=True)
    mean = up(np.abs(A.mid).mean(axis=-1, keepdims=True), n + 2)
    spread = up(A.radius.mean(axis=-1, keepdims=True), n + 2)
    return Enclosed(mid, up(A.radius + spread + gamma(n + 2, U) * mean + np.abs(mid) * U, 6))


def _lengths(D: Float[np.ndarray, "rows width"]) -> Float[np.ndarray, " rows"]:
    """Return the 2-norms of rows, rounded up."""
    return up(np.sqrt(up((D * D).sum(axis=1) + D.shape[1] * 2.0**-1022, D.shape[1] + 2)), 2)


def _inverse_root(mean_square: Interval, eps: float) -> Interval:
    return 1.0 / elementary.sqrt(mean_square + eps)


def _normed(norm: LayerNorm | None, x: Float[np.ndarray, "rows width"]) -> tuple[Enclosed, np.ndarray]:
    """Return the normed rows, and upper bounds of t, (rows, 1)."""
    if norm is None:
        return Enclosed.exact(x), np.ones((len(x), 1))
    n = x.shape[1]
    c = _centred(Enclosed.exact(x)) if norm.is_centred else Enclosed.exact(x)
    squares = Interval(np.maximum(down(np.abs(c.mid) - c.radius), 0), up(np.abs(c.mid) + c.radius)).square()
    total = Interval(np.maximum(down(squares.lo.sum(axis=1), n + 2), 0), up(squares.hi.sum(axis=1), n + 2))
    t = _inverse_root(total / float(n), norm.eps)
    middle = t.mid[:, None]
    off = up(t.width)[:, None]
    mid = c.mid * middle * norm.weight + norm.bias
    sizes = np.abs(norm.weight) * up(np.abs(c.mid) * off + c.radius * up(t.hi)[:, None], 4)
    rounded = 4 * U * up(np.abs(c.mid * middle * norm.weight) + np.abs(norm.bias), 4)
    return Enclosed(mid, up(sizes + rounded, 4)), t.hi[:, None]


def _frequencies(base: float, half: int) -> Float[np.ndarray, " half"]:
    """Return base^(−i/half), each within 4·LIBM_ULPS ulp."""
    return base ** (-np.arange(half) / half)


def _rotated(k: Enclosed, distances: np.ndarray, base: float) -> Enclosed:
    """Return the keys, rotated by their distances from the query."""
    half = k.mid.shape[1] // 2
    angles = distances[:, None] * _frequencies(base, half)
    # The exponent i/half is rounded, which moves the power by U·log(base) besides the error of the library.
    wrong = up(np.abs(angles) * ((8 * LIBM_ULPS + 2 * math.log(base)) * U) + SINE_SLACK, 4)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = k.mid[:, :half], k.mid[:, half:]
    mid = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    size = up(np.abs(first) + np.abs(second) + k.radius[:, :half] + k.radius[:, half:], 4)
    radius = up(k.radius[:, :half] + k.radius[:, half:] + up(size * up(wrong + 4 * U)), 4)
    return Enclosed(mid, np.tile(radius, 2))
