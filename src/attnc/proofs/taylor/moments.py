"""Moments of a head about the centres of boxes: numerator and denominator as polynomials, with their remainders.

On the box {c + rτ : τ ∈ [−1, 1]^d} a head is A = v0 + N/D with
    N(τ) = Σ_k ω_k(τ)·u_k(τ),   D(τ) = Σ_k ω_k(τ),   u_k(τ) = v_k + V_k·c − v0 + (V_k·r)·τ,
and the ω_k = w_k e^{z_k·τ} of `weights`. Up to degree m, N has the coefficients ν_j = Σ_k w_k u_k z_k^j/j!, and D the
δ_j = Σ_k w_k z_k^j/j!. The rest is small: |e^{z·τ} − Σ_{n≤m} (z·τ)ⁿ/n!| ≤ e^ρ ρ^{m+1}/(m+1)! with ρ = Σ_i |z_i|.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.jet_balls import TINY, U, above
from attnc.proofs.taylor.polynomials import Layout, gamma, layout
from attnc.proofs.taylor.weights import (
    EXP_ERROR,
    LEFT_OUT_BELOW,
    Weights,
    box_around,
    leaks,
    least_denominator,
    magnitude,
    powers,
)

_SUMMED = 64
"""Maximum number of keys in one inner product. The error of a sum grows with its length, so longer sums are cut."""


@dataclass(frozen=True, eq=False)
class Moments:
    """|N − Σ ν_j τ^j| ≤ nu_error, |D − Σ δ_j τ^j| ≤ delta_error and D ≥ least on the cube, for A = shift + N/D.

    `rounding` is the part of nu_error that does not come from cutting the series.
    """

    shift: Float[np.ndarray, "outputs boxes"]
    nu: Float[np.ndarray, "count outputs boxes"]
    nu_error: Float[np.ndarray, "outputs boxes"]
    rounding: Float[np.ndarray, "outputs boxes"]
    delta: Float[np.ndarray, "count boxes"]
    delta_error: Float[np.ndarray, " boxes"]
    least: Float[np.ndarray, " boxes"]

    @classmethod
    def joined(cls, parts: list[Moments]) -> Moments:
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(np.concatenate(column, axis=-1) for column in columns))


@dataclass(frozen=True, eq=False)
class KeyMoments:
    """The moments of a head, summed over all keys that are near a box."""

    head: SoftHead[Enclosed]
    axes: Int[np.ndarray, " active"]
    keys: SoftHead[np.ndarray]  # on these axes: along the others all slopes are equal and cancel

    @classmethod
    def of(cls, head: SoftHead[Enclosed]) -> KeyMoments:
        axes = head.active if len(head.active) else np.zeros(1, dtype=int)
        return cls(head, axes, head.mid.restricted(axes))

    @functools.cached_property
    def is_exact(self) -> bool:
        """Whether all slopes and offsets are floats, without a radius."""
        return not (self.head.slopes.radius.any() or self.head.offsets.radius.any())

    def unsure(self, box: Enclosed) -> Float[np.ndarray, " keys"]:
        """Bound the distance of every score from that of the float64 slopes and offsets, over the box."""
        if self.is_exact:
            return np.zeros(self.head.num_keys)
        return above(self.head.slopes.radius @ magnitude(box) + self.head.offsets.radius)

    def value_error(self, box: Enclosed) -> Float[np.ndarray, "keys outputs"]:
        """Bound the distance of every value from its float64 number, over the box."""
        error, gates = self.head.values.radius, self.head.carried
        return error if gates is None else above(error + gates.radius @ magnitude(box))

    def numbers(self, space: Layout) -> int:
        """Return the count of numbers that `moments` holds for a box."""
        num_columns = 1 + self.keys.num_outputs * (1 if self.keys.carried is None else 1 + space.d)
        rest = layout(max(1, space.d - 1), space.order).count
        return self.keys.num_keys * (num_columns * (space.order + 1 if space.d > 1 else 1) + rest + 8)

    def moments(self, space: Layout, centres: np.ndarray, radii: np.ndarray) -> Moments:
        """Return the moments at all boxes, from all keys that are near one of them."""
        return self.near(centres, radii).moments(space)

    def near(self, centres: np.ndarray, radii: np.ndarray) -> NearMoments:
        """Return the keys that are near one of the boxes, with their weights and values."""
        box = box_around(centres, radii)
        unsure, value_error = self.unsure(box), self.value_error(box)
        lag = leaks(self.keys.slopes, self.keys.offsets, unsure, box[self.axes])
        near = lag > LEFT_OUT_BELOW
        keys, c, r = self.keys.chosen(near), centres[:, self.axes], radii[:, self.axes]
        weights = Weights.of(keys.slopes, keys.offsets, unsure[near], c, r)
        values = _values(keys, weights, c, r)
        far, far_values = self._far(lag, value_error, box)
        left_out = far_values + far * np.abs(values.shift)
        unsure_u = values.unsure + value_error[near].max(axis=0)
        return NearMoments(self, weights, values, r, far, left_out, unsure_u)

    def _far(self, lag: np.ndarray, value_error: np.ndarray, box: Enclosed) -> tuple[float, np.ndarray]:
        """Return Σ w_k/w_* and Σ w_k|v_k + V_k·x|/w_* over the keys left out. D ≥ ω_*, and D ≤ `everything`."""
        is_far = lag <= LEFT_OUT_BELOW
        keys, weight = self.keys.chosen(is_far), above(np.exp(lag[is_far]))
        size = np.abs(keys.values) + value_error[is_far]
        if keys.carried is not None:
            size = size + np.abs(keys.carried) @ magnitude(box)[self.axes]
        return float(above(weight.sum())), above(weight @ size)


@dataclass(frozen=True, eq=False)
class _Values:
    """The u_k of every box, |u_k + (V_k·r)·τ| ≤ reach + unsure, and the columns 1, u, V whose moments are needed."""

    shift: Float[np.ndarray, "boxes outputs"]
    columns: Float[np.ndarray, "boxes columns keys"]
    reach: Float[np.ndarray, "boxes outputs keys"]
    unsure: Float[np.ndarray, "boxes outputs"]
    r: Float[np.ndarray, "boxes axes"]

    def numerator(self, space: Layout, sums: np.ndarray, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ν: the moments of u, plus r_i τ_i times those of V_i. Also bound its terms of degree order + 1."""
        nu, dropped = sums[:, :outputs], np.zeros(self.shift.shape)
        if sums.shape[1] == outputs:
            return nu, dropped
        gated = sums[:, outputs:].reshape(len(nu), outputs, space.d, space.count) * self.r[:, None, :, None]
        nu = nu.copy()
        for i in range(space.d):
            nu[:, :, space.raised(i)] += gated[:, :, i, : space.starts[space.order]]
            dropped += np.abs(gated[:, :, i, space.degree(space.order)]).sum(axis=2)
        return nu, dropped


@dataclass(frozen=True, eq=False)
class NearMoments:
    """The keys of a head that are near one of the boxes, with their weights and values.

    The other keys have together at most the weight far·ω_*, and Σ ω_k|u_k| ≤ left_out·ω_* over them. D ≥ ω_*. Values
    are known to within `unsure`.
    """

    head: KeyMoments
    weights: Weights
    values: _Values
    r: Float[np.ndarray, "boxes axes"]
    far: float
    left_out: Float[np.ndarray, "boxes outputs"]
    unsure: Float[np.ndarray, "boxes outputs"]

    def moments(self, space: Layout) -> Moments:
        weights, values, far, outputs = self.weights, self.values, self.far, self.head.keys.num_outputs
        sums, summed = key_sums(space, weights.w, weights.z, values.columns)
        nu, dropped = values.numerator(space, sums[:, 1:], outputs)
        rounding = _rounding(space, summed)
        tail = weights.rho ** (space.order + 1) / math.factorial(space.order + 1)
        rounded, cut = weights.most * (rounding + weights.error), weights.most * tail
        unsure_u = self.unsure + self.left_out + TINY * values.reach.max(axis=2)
        lost = np.einsum("bk,bok->bo", rounded, values.reach) + weights.everything[:, None] * unsure_u
        nu_error = np.einsum("bk,bok->bo", cut, values.reach) + lost + dropped
        delta = sums[:, 0]
        unknown = (weights.most * weights.error).sum(axis=1)
        return Moments(
            values.shift.T,
            np.ascontiguousarray(nu.transpose(2, 1, 0)),
            above(nu_error.T),
            lost.T,
            np.ascontiguousarray(delta.T),
            above((rounded + cut).sum(axis=1) + weights.everything * far),
            least_denominator(space, delta, rounding * weights.everything, unknown),
        )

    def slope_errors(self, space: Layout) -> SlopeErrors:
        """Bound |∂_i N − ∂_i ν| and |∂_i D − ∂_i δ| on the cube, for the axes i of τ and the polynomials of `moments`.

        Let e_n be the exponential series up to degree n, so that |e^z − e_n(z)| ≤ e^ρ ρ^{n+1}/(n+1)!. With
        u_k = u_k(c) + (V_k·r)·τ, ν is the polynomial Σ w_k (e_m u_k(c) + e_{m−1} (V_k·r)·τ) up to rounding. Therefore
            |∂_i Σ w_k e^z u_k − ∂_i ν|
                ≤ Σ w_k e^ρ (|z_i| |u_k(c)| ρ^m/m! + |z_i| |V_k·r| ρ^{m−1}/(m−1)! + |V_ki r_i| ρ^m/m!).
        The rounding of ν is a polynomial of degree m. So the sizes of its coefficients count m times in ∂_i.
        The true weight is ω_k = e^{ζ_k·τ} times a constant, with |ζ_ki − z_ki| ≤ ζ_i: the two roundings of z, and the
        radius of the slope; twice that, if errors are counted relative to the heaviest key. ∂_i ω_k = ζ_ki ω_k, and so
            |∂_i (ω_k u_k) − ∂_i (w_k e^z u_k)| ≤ |ω_k − w_k e^z| |ζ_ki| |u_k| + w_k e^z (ζ_i |u_k| + |z_ki| |δu_k|)
        and the errors of the V_ki r_i, where δu_k is the error of u_k. Keys without a stored weight, and those left
        out, have |ζ_ki| ≤ A_i.
        """
        weights, values, m, rounding = self.weights, self.values, space.order, _rounding(space, self.head.keys.num_keys)
        off = self.head.head.slopes.radius[:, self.head.axes].max(axis=0)
        widest = above(np.ptp(self.head.keys.slopes, axis=0) * self.r)  # the mean of slopes is one between them
        zeta = 2 * (4 * U * widest + off * self.r)  # (boxes, axes)
        most_slope = above(widest * (1 + 8 * U) + zeta)  # A_i
        power = weights.rho**m / math.factorial(m)
        below = weights.rho ** (m - 1) / math.factorial(m - 1)
        constant = np.abs(values.columns[:, 1 : 1 + self.head.keys.num_outputs])
        moved = values.reach - constant  # |V_k·r|, or 0
        reach = values.reach + self.unsure[:, :, None]
        largest = reach.max(axis=2) + self.unsure
        nu, delta = [], []
        for i in range(space.d):
            z = np.abs(weights.z[i])
            slope = np.where(weights.w == 0, most_slope[:, i, None], z + zeta[:, i, None])
            gates = self._gate_sizes(i)
            cut = np.einsum("bk,bok->bo", weights.most * z * power, constant)
            cut = cut + np.einsum("bk,bok->bo", weights.most * z * below, moved)
            cut = cut + np.einsum("bk,bok->bo", weights.most * power, gates)
            off_weight = weights.most * (weights.error + 2 * EXP_ERROR)
            lost = np.einsum("bk,bok->bo", weights.most * (m * rounding) + off_weight * slope, reach)
            lost = lost + np.einsum("bk,bok->bo", off_weight, gates)
            a = most_slope[:, i, None]
            shared = zeta[:, i, None] * largest + (1 + a) * (self.unsure + self.left_out) + m * TINY * largest
            nu.append(above(cut + lost + weights.everything[:, None] * shared).T)
            cut = (weights.most * z * power).sum(axis=1)
            lost = (weights.most * (m * rounding) + off_weight * slope).sum(axis=1)
            delta.append(above(cut + lost + weights.everything * (zeta[:, i] + a[:, 0] * self.far)))
        return SlopeErrors(np.stack(nu), np.stack(delta))

    def _gate_sizes(self, i: int) -> Float[np.ndarray, "boxes outputs keys"]:
        """Return |V_ki r_i|, 0 for constant values."""
        outputs, columns = self.head.keys.num_outputs, self.values.columns
        if columns.shape[1] == 1 + outputs:
            return np.zeros((len(columns), outputs, columns.shape[2]))
        gates = columns[:, 1 + outputs :].reshape(len(columns), outputs, -1, columns.shape[2])
        return np.asarray(np.abs(gates[:, :, i]) * self.r[:, None, i, None])


@dataclass(frozen=True, eq=False)
class SlopeErrors:
    """|∂_i N − ∂_i ν| ≤ nu_i and |∂_i D − ∂_i δ| ≤ delta_i on the cube."""

    nu: Float[np.ndarray, "axes outputs boxes"]
    delta: Float[np.ndarray, "axes boxes"]

    @classmethod
    def joined(cls, parts: list[SlopeErrors]) -> SlopeErrors:
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(np.concatenate(column, axis=-1) for column in columns))


def _rounding(space: Layout, summed: int) -> float:
    """Return the relative rounding of a moment, the errors of exponentials included.

    A term meets m + d roundings for powers, d + 1 for products, d + 2 for u, r·V and sums over axes, and those of the
    sum itself, which has `summed` terms at most.
    """
    return gamma(space.order + 3 * space.d + 6 + summed) + 2 * EXP_ERROR


def _values(keys: SoftHead[np.ndarray], weights: Weights, c: np.ndarray, r: np.ndarray) -> _Values:
    values, gates, total = keys.values, keys.carried, weights.w.sum(axis=1)[:, None]
    ones = np.ones((len(c), 1, len(values)))
    if gates is None:
        shift = (weights.w @ values) / total
        u = values.T - shift[:, :, None]
        return _Values(shift, np.concatenate([ones, u], axis=1), np.abs(u), np.zeros(shift.shape), r)
    u = values.T + np.einsum("koi,bi->bok", gates, c)
    shift = np.einsum("bk,bok->bo", weights.w, u) / total
    u = u - shift[:, :, None]
    # v + V·c − v0: a sum of d + 2 terms, d of them products.
    size = np.abs(values).max(axis=0) + np.abs(c) @ np.abs(gates).max(axis=0).T + np.abs(shift)
    flat = gates.transpose(1, 2, 0).reshape(-1, len(values))
    columns = np.concatenate([ones, u, np.broadcast_to(flat, (len(c), *flat.shape))], axis=1)
    reach = np.abs(u) + np.einsum("bi,koi->bok", r, np.abs(gates))
    return _Values(shift, columns, reach, above(gamma(c.shape[1] + 3) * size), r)


def key_sums(space: Layout, w: np.ndarray, z: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, int]:
    """Return Σ_k w_k C_k z_k^j/j!, (boxes, columns, count), for columns (boxes, columns, keys); and the sums' length.

    A sum is a product of matrices: C_k times the powers along the first axis, and the monomials of the other axes.
    """
    boxes, num_columns, keys = columns.shape
    blocks = max(1, math.ceil(keys / _SUMMED))
    length = math.ceil(keys / blocks)
    if blocks * length > keys:
        pad = ((0, 0), (0, blocks * length - keys))
        w, z, columns = np.pad(w, pad), np.pad(z, ((0, 0), *pad)), np.pad(columns, ((0, 0), *pad))
    left = columns * w[:, None]
    if space.d > 1:
        left = left[:, :, None] * powers(z[0], space.order)[:, None]
    rest = layout(max(1, space.d - 1), space.order)
    right = _monomials(rest, z[1:] if space.d > 1 else z)
    left = left.reshape(boxes, -1, blocks, length).swapaxes(1, 2)
    right = right.reshape(boxes, rest.count, blocks, length).transpose(0, 2, 3, 1)
    sums = (left @ right).sum(axis=1).reshape(boxes, num_columns, -1, rest.count)
    if space.d == 1:
        return sums[:, :, 0], length + blocks
    return sums[:, :, space.exponents[:, 0], _places_of_rest(space)], length + blocks


@functools.lru_cache(maxsize=32)
def _places_of_rest(space: Layout) -> Int[np.ndarray, " count"]:
    """Return the index of each monomial, without its first axis, among the monomials of the other axes."""
    return layout(space.d - 1, space.order).places(space.exponents[:, 1:])


def _monomials(space: Layout, z: np.ndarray) -> np.ndarray:
    """Return z^j/j! for all |j| ≤ order, (boxes, count, keys)."""
    axes = [powers(part, space.order) for part in z]
    if space.d == 1:
        return axes[0]
    result = np.empty((z.shape[1], space.count, z.shape[2]))
    for place, row in enumerate(space.exponents.tolist()):
        first, *others = [axis[:, j] for axis, j in zip(axes, row, strict=True) if j] or [axes[0][:, 0]]
        out = result[:, place]
        if not others:
            out[...] = first
        for other in others:  # in place: copies of these arrays took a third of the time
            first = np.multiply(first, other, out=out)
    return result
