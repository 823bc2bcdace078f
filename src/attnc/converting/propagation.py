"""Rules that carry ranges and errors through the layers of a network, with outward rounding.

For all inputs x of a box, `Reached` holds the values of the original network in exact arithmetic, and three gaps from
them (`COMPARISONS`). A gap g is an affine form. A linear map turns it into W·g. A nonlinear f turns it into
f(z + g) − f(z) = s·g, with s between the least and the greatest difference quotient of f on the values reached. The
middle of these stays a slope of the affine form, and the rest becomes a new unknown vector ν in a box and in a ball:

    s·g = s₀·g + ν,   |ν_i| ≤ max|s_i − s₀_i|·max|g_i|,   |ν|₂ ≤ max|s − s₀|·max|g|₂

So the errors of different units cancel in later layers as far as the slopes are known, and the part that is not known
grows with the singular values of the weights instead of the sums of their absolute values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from attnc.converting.activations import Solved, key_arrays
from attnc.converting.rounding import NORMAL, SLACK, KeyNumbers, cells, key_numbers, on_cells
from attnc.errors import InputError
from attnc.numerics.affine_forms import AffineVectors, norm_up
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, Array, gamma, up
from attnc.targets.expressions.expression import Expression

CELLS = 32
"""Number of cells into which the range of a pre-activation is cut, for slopes and for the distance from a chord. A gelu
takes 0.1 s for 4,096 cells: a layer of 128 units."""
TORCH_ULPS = 8
"""Largest assumed error of torch's activations, in ulp of max(1, |x|, |f(x)|). The tests find none above half of it."""
SOFTPLUS_JUMP = 2.1e-9
"""torch's softplus is the identity where βx > 20. This is β times the jump there, log(1 + e⁻²⁰), rounded up."""
MAX_UNKNOWNS = 16_384
"""Number of unknown numbers above which an affine form is folded into one per entry. A form of width 1024 then takes
128 MB."""

Vector = Array
Enclosed = tuple[Interval, Interval]
"""The range of a function on intervals, and the range of its difference quotients."""


@dataclass(frozen=True)
class ModelComparison:
    """Two networks whose difference is carried: the second is always the original in exact arithmetic."""

    by_attention: bool  # whether the first has attention for activations
    rounds: bool  # whether the first is computed in the dtype of the model


COMPARISONS = (ModelComparison(True, False), ModelComparison(True, True), ModelComparison(False, True))
"""The converted network in exact arithmetic, the converted one as computed, and the original one as computed."""


@dataclass(frozen=True, eq=False)
class Reached:
    """The values at one place of the network for all inputs of the box, and the gaps for each of COMPARISONS."""

    values: AffineVectors
    within: Interval  # the values lie here too
    gaps: tuple[AffineVectors, ...]
    dtype: str
    tokens: int  # largest number of tokens over which attention takes a mean

    @classmethod
    def of(cls, box: Interval, dtype: str, tokens: int) -> Reached:
        zero = AffineVectors.zero(len(box))
        return cls(AffineVectors.around(box), box, tuple(zero for _ in COMPARISONS), dtype, tokens)

    @property
    def u(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]

    @property
    def is_finite(self) -> bool:
        return bool(self.within.is_bounded.all()) and all(np.isfinite(gap.spread).all() for gap in self.gaps)

    def exact_again(self) -> Reached:
        """Return the same values with no gaps."""
        return replace(self, gaps=tuple(AffineVectors.zero(len(self.within)) for _ in COMPARISONS))

    def around(self, gap: AffineVectors) -> Interval:
        """Return an interval that contains the values of both networks that this gap compares."""
        return self.within + Interval(-gap.size, gap.size)

    def then(self, values: AffineVectors, within: Interval | None, gaps: list[AffineVectors]) -> Reached:
        """Return the next place. Forms with many unknown numbers are folded."""
        forms = [form if form.num_columns <= MAX_UNKNOWNS else form.folded() for form in (values, *gaps)]
        known = forms[0].interval
        return replace(
            self,
            values=forms[0],
            within=known if within is None else known.intersect(within),
            gaps=tuple(forms[1:]),
        )


def linear(x: Reached, W: Float[np.ndarray, "m n"], b: Vector) -> Reached:
    """W·x + b. As computed, it is off by γ_{n+1}(|W|·|x| + |b|), in any order of summation."""
    n = W.shape[1]

    def rounded(gap: AffineVectors) -> Vector:
        terms = up(up(np.abs(W) @ x.around(gap).mag, n + 1) + np.abs(b))
        return up(up(gamma(n + 1, x.u) * terms) + (n + 1) * NORMAL[x.dtype])

    moved = [gap.linear(W) for gap in x.gaps]
    pairs = zip(COMPARISONS, x.gaps, moved, strict=True)
    gaps = [after.with_noise(rounded(gap)) if which.rounds else after for which, gap, after in pairs]
    plain = AffineVectors.of_box(x.within).linear(W, b).interval
    return x.then(x.values.linear(W, b), plain, gaps)


def added(x: Reached, y: Reached) -> Reached:
    """x + y, with one rounding."""
    gaps = []
    for which, a, b in zip(COMPARISONS, x.gaps, y.gaps, strict=True):
        size = up(up(x.around(a).mag + y.around(b).mag) * x.u)
        gaps.append((a + b).with_noise(size) if which.rounds else a + b)
    return x.then(x.values + y.values, x.within + y.within, gaps)


def activated(x: Reached, solved: Solved, weight: Vector | None = None) -> Reached:
    """f(x), where the converted network has the gate of `solved`. `weight` is that of a PReLU.

    Proof.  |G(z + g) − f(z)| ≤ |G − f|(z + g) + |f(z + g) − f(z)|. The first is ≤ solved.error plus the rounding of the
            gate, or the rounding of torch's own function. The second is s·g, as above.
    """
    if solved.sign is not None:
        raise InputError("softsign takes two layers of attention, for which there is no rule of rounding")
    enclose = _prelu(weight) if weight is not None else _expression(solved, x.dtype)
    slope, offset, spread, within = _chord(enclose, x.within)
    values = x.values.scaled(slope, offset).with_noise(spread)
    gaps = []
    for which, gap in zip(COMPARISONS, x.gaps, strict=True):
        here = x.around(gap)
        range_, slopes = _on_cells(enclose, here)
        shift, own = gate_error(solved, here) if which.by_attention else (np.zeros(len(slope)), np.zeros(len(slope)))
        if which.rounds and which.by_attention:
            own = up(own + gate_rounding(solved, x.dtype, here.mag, weight))
        elif which.rounds:
            own = torch_rounding(solved, here, range_, x.u)
        middle = slopes.mid
        off = np.maximum(up(slopes.hi - middle), up(middle - slopes.lo))
        turned = up(off * gap.size), float(up(off.max(initial=0.0) * gap.length))
        gaps.append(gap.scaled(middle, shift).with_noise(*turned).with_noise(own))
    return x.then(values, within, gaps)


def gate_error(solved: Solved, x: Interval) -> tuple[Vector, Vector]:
    """Return centre and radius of G − f on x, in exact arithmetic.

    Proof.  Two lines whose slopes differ by J and that meet at κ have the error −J·t/(e^{βt} + 1), t = |x − κ|. It has
            the sign of −J everywhere, so that half of it is its centre. It falls for βt ≥ 1.28, so that units which
            stay away from the kink have next to no error.
    """
    full = np.full(x.shape, solved.error)
    keys = key_arrays(solved.keys)
    if solved.method != "closed form" or len(keys["slopes"]) != 2 or not solved.error:
        return np.zeros(x.shape), full
    (low, beta), (start, offset), values, carried = (keys[name] for name in ("slopes", "offsets", "values", "carried"))
    jump = carried[1] - carried[0]
    kink = -offset / beta if beta > 0 else math.nan
    if low or start or not beta > 0 or not jump or values[0] + carried[0] * kink != values[1] + carried[1] * kink:
        return np.zeros(x.shape), full  # not two lines that meet
    away = np.maximum(np.maximum(x.lo - kink, kink - x.hi), 0.0) * (1 - 2.0**-50)
    s = np.minimum(beta * away, 700.0)
    local = np.where(s >= 1.5, SLACK * abs(jump) * away / (np.exp(s) + 1), solved.error)
    half = np.minimum(local, solved.error) / 2
    return -math.copysign(1.0, jump) * half, up(half)


def torch_rounding(solved: Solved, x: Interval, y: Interval, u: float) -> Vector:
    """Return the assumed error of torch's activation on x, with values in y."""
    size = up(2 * TORCH_ULPS * u * np.maximum(1.0, np.maximum(x.mag, y.mag)))
    if solved.activation.name not in ("softplus", "logsigmoid"):
        return size
    beta = dict(solved.activation.parameters).get("beta", 1.0)
    return up(size + up(SOFTPLUS_JUMP / beta))


def _expression(solved: Solved, dtype: str) -> Callable[[Interval], Enclosed]:
    parsed = _parsed(solved.activation.expression(dtype))

    def enclose(x: Interval) -> Enclosed:
        ranges, slopes = parsed.ranges_and_gradients(Interval(x.lo.reshape(-1, 1), x.hi.reshape(-1, 1)))
        shaped = [Interval(a.lo.reshape(x.shape), a.hi.reshape(x.shape)) for a in (ranges, slopes)]
        return shaped[0], shaped[1]

    return enclose


@cache
def _parsed(text: str) -> Expression:
    return Expression.parse(text)


def _prelu(weight: Vector) -> Callable[[Interval], Enclosed]:
    """max(x, 0) + w·min(x, 0)."""

    def enclose(x: Interval) -> Enclosed:
        w = np.broadcast_to(weight.reshape(-1, *[1] * (len(x.shape) - 1)), x.shape)
        zero = Interval.point(np.zeros(x.shape))
        low, high = np.where(x.hi <= 0, w, np.minimum(w, 1.0)), np.where(x.hi <= 0, w, np.maximum(w, 1.0))
        slopes = Interval(np.where(x.lo >= 0, 1.0, low), np.where(x.lo >= 0, 1.0, high))
        return x.max(zero) + x.min(zero) * w, slopes

    return enclose


def _cells(x: Interval) -> Interval:
    """Cut the intervals (n,) into cells (n, CELLS)."""
    at = np.linspace(0.0, 1.0, CELLS + 1)
    ends = np.clip(x.lo[:, None] * (1 - at) + x.hi[:, None] * at, x.lo[:, None], x.hi[:, None])
    ends[:, 0], ends[:, -1] = x.lo, x.hi
    ends = np.maximum.accumulate(ends, axis=1)
    return Interval(ends[:, :-1], ends[:, 1:])


def _hull(cells: Interval) -> Interval:
    return Interval(cells.lo.min(axis=1), cells.hi.max(axis=1))


def _on_cells(enclose: Callable[[Interval], Enclosed], x: Interval) -> Enclosed:
    """Return the range and the difference quotients on x.

    A quotient over several cells is a mean of quotients over each, so it lies in the hull of theirs.
    """
    ranges, slopes = enclose(_cells(x))
    return _hull(ranges), _hull(slopes)


def _chord(enclose: Callable[[Interval], Enclosed], x: Interval) -> tuple[Vector, Vector, Vector, Interval]:
    """Return slope, offset and spread with |f(t) − slope·t − offset| ≤ spread on x, and the range of f."""
    cells = _cells(x)
    ranges, slopes = enclose(cells)
    middles = Interval.point(cells.mid)
    at_middles, _ = enclose(middles)
    away = cells - middles
    ranges = ranges.intersect(at_middles + slopes * away)
    ends, _ = enclose(Interval.point(np.stack([x.lo, x.hi], axis=1)))
    with quiet():
        slope = (ends.mid[:, 1] - ends.mid[:, 0]) / (x.hi - x.lo)
    slope = np.where(np.isfinite(slope), slope, 0.0)
    each = Interval.point(slope[:, None])
    rest = (at_middles - each * middles + (slopes - each) * away).intersect(ranges - each * cells)
    distance = _hull(rest)
    offset = distance.mid
    spread = np.maximum(up(distance.hi - offset), up(offset - distance.lo))
    return slope, offset, spread, _hull(ranges)


def gate_rounding(solved: Solved, dtype: str, size: Vector, weight: Vector | None = None) -> Vector:
    """Bound |gate as computed − gate in exact arithmetic| for inputs of absolute value ≤ size, entry by entry.

    `rounding.on_cells` bounds it on cells of x in a geometric progression, from 0 to the largest size.
    """
    reach = float(size.max(initial=0.0))
    inner, errors = _rounding_on_cells(key_numbers(solved, dtype), dtype, _power_above(reach))
    found = errors[np.maximum(np.searchsorted(inner, size, side="right") - 1, 0)]
    if solved.is_product:  # x times a head with values in [0, 1], up to its error
        return up(size * up(found + gamma(2, UNIT_ROUNDOFF[dtype]) * 2))
    if weight is None:
        return found
    # right + w·(x − right): an error of `right` counts |1 − w| times, and there are four roundings
    jump, sizes = up(1 + np.abs(weight)), up(size * up(1 + 2 * np.abs(weight)))
    return up(up(jump * found) + up(gamma(4, UNIT_ROUNDOFF[dtype]) * up(sizes * 2)))


def _power_above(x: float) -> float:
    """Return a power of two above x and at least 1, so that the table of a gate is made for few sizes."""
    return 2.0 ** max(0, math.frexp(x)[1])


@cache
def _rounding_on_cells(keys: KeyNumbers, dtype: str, reach: float) -> tuple[Array, Array]:
    """Return the inner ends of cells of |x| up to `reach`, and the largest rounding error of the gate up to each."""
    low, high = cells(keys, reach)
    worst = np.maximum(*(on_cells(keys, dtype, x) for x in (Interval(low, high), Interval(-high, -low))))
    return low, np.maximum.accumulate(worst)


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm or RMSNorm over n entries: y = g·t + b, t = s·c, s = 1/√(mean c² + eps), c = x − mean x or x.

    Range.  |t|₂ ≤ √n, and for LayerNorm |t_i| ≤ √(n − 1), since the entries of c have the sum 0.
    Gap.    The derivative is g·s(P − t·tᵀ/n), with P the centring, or the identity. For a change e of x and p = P·e,
            s = s₀ + Δs and t = t₀ + Δt on the values reached, this differs from g·s₀(P − t₀·t₀ᵀ/n)·e by at most
            |g_i|(Δs(|p_i| + |t_i|·τ/n) + s₀(Δt_i·τ + |t₀_i|·κ)/n), where τ ≥ |t·p| and κ ≥ |Δt·p|.
    """

    gain: Vector
    bias: Vector
    eps: float
    centred: bool

    @property
    def n(self) -> int:
        return len(self.gain)

    def centring(self, x: AffineVectors) -> AffineVectors:
        """P·x: subtract the mean."""
        if not self.centred:
            return x
        n, size = self.n, x.size
        lost = up(2.0**-52 * up(size + up(size.sum(), n) / n, 2))  # 1/n and 1 − 1/n are rounded
        return x.linear(np.eye(n) - 1 / n).widened(lost)

    def inverse_size(self, c: Interval, form: AffineVectors | None) -> Interval:
        """Return the range of s. By Cauchy and Schwarz, |c| ≥ c·c₀/|c₀| for the centre c₀ of the form."""
        n = self.n
        squares = c.square()
        least = float(squares.lo.sum()) * (1 - n * 2.0**-52)
        if form is not None and (norm := float(np.linalg.norm(form.centre))) > 0:
            along = form.linear((form.centre / norm)[None]).interval
            least = max(least, max(0.0, float(along.lo[0]) * (1 - (n + 4) * 2.0**-52)) ** 2 * (1 - 2.0**-50))
        most = float(up(squares.hi.sum(), n + 1))
        ends = [1 / math.sqrt(total / n + self.eps) for total in (most, least)]
        return Interval(np.array(ends[0] * (1 - 2.0**-50)), np.array(ends[1] * (1 + 2.0**-50)))

    def normalised(self, c: Interval, s: Interval) -> Interval:
        """Return the range of t."""
        most = float(up(math.sqrt(self.n - 1 if self.centred and self.n > 1 else self.n), 2))
        return (c * s).intersect(Interval(np.full(self.n, -most), np.full(self.n, most)))


def normed(x: Reached, norm: Norm) -> Reached:
    """Apply a norm layer, as `Norm` describes."""
    n, gain = norm.n, norm.gain
    c = norm.centring(x.values)
    inside = c.interval if norm.centred else x.within
    s = norm.inverse_size(inside, c)
    t = norm.normalised(inside, s)
    middle = float(s.mid)
    off = max(float(up(s.hi - middle)), float(up(middle - s.lo)))
    values = c.scaled(np.full(n, middle)).with_noise(up(off * inside.mag))
    if (values.spread > up(t.width)).all():  # the range of t is narrower than that of the form
        values = AffineVectors.around(t)
    within = Interval.point(gain) * t + norm.bias
    gaps = [_normed_gap(x, norm, which, gap) for which, gap in zip(COMPARISONS, x.gaps, strict=True)]
    return x.then(values.scaled(gain, norm.bias), within, gaps)


def _normed_gap(x: Reached, norm: Norm, which: ModelComparison, gap: AffineVectors) -> AffineVectors:
    n, gain = norm.n, np.abs(norm.gain)
    moved = norm.centring(gap)
    p = moved.size
    inside = (norm.centring(x.values).interval if norm.centred else x.within) + Interval(-p, p)
    s = norm.inverse_size(inside, None if p.any() else norm.centring(x.values))
    t = norm.normalised(inside, s)
    noise = np.zeros(n)
    out = AffineVectors.zero(n)
    if p.any():
        s0, t0 = float(s.mid), t.mid
        ds = max(float(up(s.hi - s0)), float(up(s0 - s.lo)))
        dt = np.maximum(up(t.hi - t0), up(t0 - t.lo))
        length = moved.length
        tau = min(float(up(math.sqrt(n), 2) * length) * SLACK, float(up((t.mag * p).sum(), n + 2)))
        kappa = min(float(up((dt * p).sum(), n + 2)), norm_up(dt) * length * SLACK)
        first, second = p + t.mag * tau / n, dt * tau / n + np.abs(t0) * kappa / n
        noise = SLACK * gain * (ds * first + s0 * second)
        signed = norm.gain * s0
        out = moved.scaled(signed) + moved.linear(np.outer(-signed * t0 / n, t0)).widened(
            SLACK * 2.0**-50 * np.abs(signed * t0 / n) * float(np.abs(t0) @ p)
        )
    if which.rounds:
        noise = noise + _norm_rounding(x, norm, gap, inside, s, t)
    return out.with_noise(noise)


def _norm_rounding(x: Reached, norm: Norm, gap: AffineVectors, c: Interval, s: Interval, t: Interval) -> Vector:
    """Bound the rounding of a norm layer, under the assumption about its statistics in `on_box.ASSUMPTIONS`.

    Proof.  If the mean is off by E and √(mean c²) by E, then c is off by E + u|c|, and s relatively by
            e^r − 1 with r = E·max σ/(σ² + eps), over all σ between the two. σ/(σ² + eps) is at most 1/σ and at most
            1/(2√eps). Then there are three roundings.
    """
    n, u = norm.n, x.u
    largest = float(x.around(gap).mag.max())
    E = SLACK * gamma(2 * n + 16, u) * largest if norm.centred else 0.0
    relative = gamma(2 * n + 16, u)
    if norm.centred:
        least = math.sqrt(max(0.0, 1 / float(s.hi) ** 2 - norm.eps)) / SLACK - E
        steepest = [1 / least] if least > 0 else []
        steepest += [1 / (2 * math.sqrt(norm.eps))] if norm.eps > 0 else []
        relative += SLACK * E * min(steepest, default=math.inf)
    if relative >= 0.5:
        return np.full(n, np.inf)
    relative *= 2  # e^r − 1 ≤ 2r for r ≤ 1
    shifted = float(s.hi) * E * (1 + 2 * relative)
    y = np.abs(norm.gain) * t.mag
    lost = y * relative + np.abs(norm.gain) * shifted + gamma(6, u) * (y * (1 + relative) + shifted + np.abs(norm.bias))
    return np.asarray(SLACK * lost + 8 * NORMAL[x.dtype])


@dataclass(frozen=True, eq=False)
class SelfAttention:
    """Multi-head attention of tokens that all lie in one box, with any mask that leaves a key to every query.

    Range.  The output of a head is a mean of values v_j, so that it lies in the range of v.
    Gap.    If scores are off by at most a, the weights move by at most tanh(a/2) ≤ a/2 in total variation, and a mean
            of v by that times the width of the range of v.
    """

    W_Q: Float[np.ndarray, "n n"]
    W_K: Float[np.ndarray, "n n"]
    W_V: Float[np.ndarray, "n n"]
    b_Q: Vector
    b_K: Vector
    b_V: Vector
    W_O: Float[np.ndarray, "n n"]
    b_O: Vector
    num_heads: int


def attended(x: Reached, layer: SelfAttention) -> Reached:
    """Apply self-attention, as `SelfAttention` describes.

    As computed, weights are off relatively by at most γ_{3m+64} for m tokens, whether the softmax runs over all keys at
    once or over blocks of them.
    """
    q, k, v = (linear(x, W, b) for W, b in ((layer.W_Q, layer.b_Q), (layer.W_K, layer.b_K), (layer.W_V, layer.b_V)))
    d = len(layer.b_Q) // layer.num_heads
    scale = float(up(1 / math.sqrt(d), 2))
    gaps = []
    for which, dq, dk, dv in zip(COMPARISONS, q.gaps, k.gaps, v.gaps, strict=True):
        Q, K, eq, ek = q.within.mag, k.within.mag, dq.size, dk.size
        terms = up(up(Q * ek) + up(eq * up(K + ek)), 2)
        off = _per_head(terms, layer.num_heads) * scale
        wide = v.around(dv)
        noise = dv.size
        if which.rounds:
            scores = _per_head(up(up(Q + eq) * up(K + ek), 2), layer.num_heads) * scale
            off = off + (gamma(d + 4, x.u) + 2 * x.u) * scores + 2 * x.u * scores
            noise = up(noise + up(gamma(3 * x.tokens + 64, x.u) * wide.mag) + (x.tokens + 1) * NORMAL[x.dtype])
        share = np.repeat(np.minimum(SLACK * off / 2, 1.0), d)
        gaps.append(AffineVectors.zero(len(noise)).with_noise(up(noise + up(share * up(wide.width)))))
    mean = replace(v, values=v.values.folded(), gaps=tuple(gaps))
    return linear(mean, layer.W_O, layer.b_O)


def _per_head(terms: Vector, num_heads: int) -> Float[np.ndarray, " heads"]:
    """Sum over the entries of every head, rounded up."""
    by_head = terms.reshape(num_heads, -1)
    return up(by_head.sum(axis=1), by_head.shape[1])
