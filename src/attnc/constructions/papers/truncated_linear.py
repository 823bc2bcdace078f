"""One head clips a linear function to [a, b] (arXiv 2504.15956, the rate O(1/p))."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from attnc.constructions.built import Built, Progress, limited
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, for_kind, of_kind
from attnc.constructions.fitting.clips import BEST_BETA, ClipLayer
from attnc.constructions.fitting.search import tightened
from attnc.constructions.fitting.selection import round_up
from attnc.errors import InputError, whole_number
from attnc.ir.building import AffineBuilder
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma
from attnc.targets.linear import TruncatedLinear
from attnc.targets.target import Target

CLIP_SHARE = 0.99
"""The share of eps for the spacing of the anchors. The rest is for rounding. If rounding needs more, eps is refused."""
LARGEST_UNIT = 0.6
"""Largest error per spacing that more anchors are to make up for: a little more than the 0.5 of hard selection.
Measured with 300 layers: 0.51 and 1.2 change 34 of them, all in float32, where rounding decides."""
MAX_SIZINGS = 6
"""Maximum number of sizes that are tried for a layer. Measured with the same 300 layers: 297 need at most five, and
three in float32 need seven to nine."""


def truncated_linear(
    target: Target,
    *,
    eps: float | None = None,
    num_anchors: int | None = None,
    beta: float = BEST_BETA,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One head clips n linear functions to [a, b] at once.

    Theorem.  With p anchors Δ = (b−a)/(p−1) apart and β in units of Δ⁻², for every x (in the box or not)
              |program(x)_i − clip(w_i·x_i + t_i, a, b)| ≤ ε(β)·Δ, where ε ≤ ½ + O(e^{−β}) for hard β, and
              ε = 0.062 at β = 2.72; plus the rounding of the scores, the sums and w·x + t on the box.
    Weights.  y_i = (w_i·x_i + t_i − m)/Δ with m = (a+b)/2; anchors L_k = k − (p−1)/2; query (y, 1), key β(2L, −L²),
              value L; the last affine map returns m + Δ·out.
    Proof.    Weights ∝ exp(−β(y − L_k)²); `selection.mean_error` bounds |Σ w_k L_k − clip(y)| on all of R. An error
              in y moves clip(y) by at most itself.

    Parameters
    ----------
    target : Target
        A `attnc.TruncatedLinear`.
    eps : float, optional
        The largest error allowed. Give either this or num_anchors.
    num_anchors : int, optional
        The number p of anchors. At least one anchor per token of the target is used.
    beta : float
        The inverse temperature, in units of the spacing of the anchors. The default has the smallest error.
    dtype : {"float64", "float32"}
        The arithmetic that the program runs in, and that the bound holds in.
    max_anchors, max_bytes : int
        Limits on the number of (head, key) pairs, and on the bytes of the program and of the arrays for building it.
    progress : callable, optional
        Called with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program, and the bound of the theorem for it.

    Raises
    ------
    InputError
        If the target or the parameters do not fit the theorem.
    BoundNotMet
        If the bound cannot be brought to eps within the limits.

    Examples
    --------
    >>> import attnc
    >>> clip = attnc.TruncatedLinear([2.0, 1.0], t=-0.5, a=0.0, b=1.0, box=(-1, 1))
    >>> built = attnc.constructions.truncated_linear(clip, num_anchors=33)
    >>> print(built.bound)
    0.00194 (approximation) + ... (rounding)
    """
    target = of_kind("truncated_linear", target, TruncatedLinear)
    limit = _limit(max_anchors, max_bytes)

    def layer(count: int) -> ClipLayer:
        return ClipLayer(max(count, len(target.W)), beta, dtype)

    if num_anchors is not None:
        chosen = layer(whole_number("num_anchors", num_anchors, 2))
    elif eps is not None:
        chosen = _layer_for(target, eps, limit, layer)
    else:
        raise InputError("truncated_linear: give eps or num_anchors")
    return limited(target, eps, chosen.num_keys, limit, partial(_build, target), chosen, layer(limit))


def truncated_linear_heads(
    target: Target,
    *,
    eps: float | None = None,
    num_heads: int | None = None,
    num_tokens: int | None = None,
    sentinels: int = 1,
    beta: float | None = None,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """H heads over n tokens clip n linear functions to [a, b]: O(1/(nH)).

    Theorem.  With N = (n−2s)H anchors Δ = (b−a)/(N−1) apart, s ≥ 1 sentinels per side, β in units of Δ⁻²:
              |program(x)_i − clip(w_i·x_i + t_i, a, b)| ≤ ε(β)·Δ + (b−a)/2·S, S ≈ (2s+4)·e^{−β⌊(s+1)²/2⌋}.
    Weights.  See `ClipLayer`. Head h sees the same n keys, shifted by its own centre through W_Q. Sentinels have value
              0 (after centring [a, b] at 0), so that a head returns 0 where the input lies in another head's block.
              The outer sentinels of the first and last head carry the ends a and b: the clip holds on all of R.
    Proof.    Compare with one softmax over all anchors. Each weight of head h is off by the weight outside its window,
              relative to the weight inside. Summed over heads this is S. The rest is the proof for one head.

    Parameters
    ----------
    target : Target
        A `attnc.TruncatedLinear`.
    eps : float, optional
        The largest error allowed. Give either this or num_heads and num_tokens.
    num_heads, num_tokens : int, optional
        The number H of heads, and the number n of keys of each.
    sentinels : int
        The number s of extra keys on each side of a head, at the places of its neighbours' anchors.
    beta : float, optional
        The inverse temperature, in units of the spacing of the anchors. By default the softest that keeps S small.
    dtype : {"float64", "float32"}
        The arithmetic that the program runs in, and that the bound holds in.
    max_anchors, max_bytes : int
        Limits on the number of (head, key) pairs, and on the bytes of the program and of the arrays for building it.
    progress : callable, optional
        Called with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program, and the bound of the theorem for it.

    Raises
    ------
    InputError
        If the target or the parameters do not fit the theorem.
    BoundNotMet
        If the bound cannot be brought to eps within the limits.

    Examples
    --------
    >>> import attnc
    >>> clip = attnc.TruncatedLinear([2.0, 1.0], t=-0.5, a=0.0, b=1.0, box=(-1, 1))
    >>> built = attnc.constructions.truncated_linear_heads(clip, num_heads=4, num_tokens=10)
    >>> built.program.num_heads, built.program.num_anchors
    (4, 40)
    """
    target = of_kind("truncated_linear_heads", target, TruncatedLinear)
    limit, n = _limit(max_anchors, max_bytes), len(target.W)
    ends = 2 * whole_number("sentinels", sentinels, 1)
    if num_tokens is not None:
        # the sentinels of both sides and one anchor
        whole_number("num_tokens", num_tokens, ends + 1)
    fewest = max(n, ends + 1)

    def layer(count: int) -> ClipLayer:
        """Return a layer of `count` anchors or a few more; if the tokens are not given, about as many as heads."""
        tokens = num_tokens or max(fewest, math.isqrt(count) + ends)
        return ClipLayer(tokens, beta, dtype, max(2, math.ceil(count / (tokens - ends))), sentinels)

    if num_heads is not None and num_tokens is not None:
        chosen = ClipLayer(num_tokens, beta, dtype, whole_number("num_heads", num_heads, 1), sentinels)
    elif num_heads is None and eps is not None:
        chosen = _layer_for(target, eps, limit, layer)
    else:
        raise InputError("truncated_linear_heads: give eps, or num_heads and num_tokens")
    if chosen.num_anchors < 2:
        raise InputError("one head of one anchor has no range: use more heads or more tokens")
    if chosen.num_keys < n:
        raise InputError(f"num_tokens={chosen.num_keys} is less than the {n} tokens of the target")
    tokens = max(fewest, math.isqrt(limit))
    smaller = replace(chosen, num_keys=tokens, num_heads=max(2, limit // tokens))
    return limited(target, eps, chosen.num_keys * chosen.num_heads, limit, partial(_build, target), chosen, smaller)


@dataclass(frozen=True)
class _Sized:
    """A layer, its error, and the number of anchors that would bring the error to eps."""

    layer: ClipLayer
    error: float
    needed: int


def _layer_for(target: TruncatedLinear, eps: float, limit: int, layer: Callable[[int], ClipLayer]) -> ClipLayer:
    """Return the layer whose error is eps less 1 %, which is for rounding. It may have more anchors than the limit."""
    width, goal = target.b - target.a, CLIP_SHARE * eps

    def attempt(count: int, failed: Sequence[_Sized]) -> _Sized:
        tried = layer(min(count, limit))
        spacing = width / (tried.num_anchors - 1)
        # Where rounding, not spacing, decides, more anchors do not help: the bound will show it.
        unit = min(LARGEST_UNIT, tried.error + tried.leak(_query_error(target, tried.dtype) / spacing))
        needed = max(3, math.ceil(min(1e15, width * unit / goal)) + 1)
        return _Sized(tried, unit * spacing if count <= limit else math.inf, needed)

    # the error per spacing grows slowly with the number of anchors, by rounding
    found = tightened(3, attempt, lambda count, last: last.needed, goal, MAX_SIZINGS)
    return layer(found.failed[-1].needed) if found.met is None else found.met.layer


def _limit(max_anchors: int, max_bytes: int) -> int:
    """The largest number of anchors.

    A token has about five stored numbers. Each takes 8 bytes for its index and 8 for its value, and as much folded.
    """
    return max(2, min(max_anchors, max_bytes // 200))


def _build(target: TruncatedLinear, layer: ClipLayer) -> Built:
    n, d = target.W.shape
    m, spacing = (target.a + target.b) / 2, (target.b - target.a) / (layer.num_anchors - 1)
    bound = _bound(target, layer, spacing, m)
    inputs = [f"in.{c}" for c in range(d)]
    embed = AffineBuilder(n, inputs, layer.num_keys, layer.channels)
    for i in range(n):
        for c in range(d):
            embed.link(i, "y", i, inputs[c], target.W[i, c] / spacing)
    embed.set(np.arange(n), "y", (target.t - m) / spacing)
    layer.place(embed, np.arange(n))
    read = AffineBuilder(layer.num_keys, (layer.output,), n, ("out",))
    read.link(np.arange(n), "out", np.arange(n), layer.output, spacing)
    read.set(np.arange(n), "out", m)
    layers = (embed.build("embed", layer.dtype), layer.attention("clip"), read.build("read", layer.dtype))
    program = check(Program(layers, target.input_shapes, target.output_shape))
    parameters = (("num_anchors", layer.num_anchors), ("num_heads", layer.num_heads), ("beta", layer.beta))
    name = "truncated_linear_heads" if layer.sentinels else "truncated_linear"
    return Built(program, name, bound, target.box.as_dict(), parameters)


def _bound(target: TruncatedLinear, layer: ClipLayer, spacing: float, m: float) -> Bound:
    u, linear = UNIT_ROUNDOFF[layer.dtype], _query_error(target, layer.dtype)
    reach = linear / gamma(target.W.shape[1] + 8, u) / spacing  # the largest |y| on the box
    if not 4 * layer.beta * (reach + layer.radius) * layer.radius < float(np.finfo(layer.dtype).max) / 8:
        raise InputError(
            f"scores overflow in {layer.dtype}: w·x + t reaches {reach:.3g} spacings. Use a smaller box or W."
        )
    # Values are in units of the spacing; the last map multiplies, adds m and casts its constants.
    sums = layer.rounding * spacing + gamma(8, u) * max(abs(target.a), abs(target.b), abs(m))
    terms = [Term("approximation", round_up(layer.error * spacing), f"{layer.error:.3g} of a spacing of {spacing:.3g}")]
    if layer.num_heads > 1:
        leak = round_up(layer.leak(linear / spacing) * spacing)
        terms.append(Term("heads", leak, "residual output of inactive heads"))
    terms.append(Term("rounding", round_up(linear + sums), f"{layer.dtype} sums of w·x + t and over keys"))
    return Bound(tuple(terms))


def _query_error(target: TruncatedLinear, dtype: str) -> float:
    """Return the error of the computed w·x + t − m on the box.

    Coefficients are divided by Δ and cast, x is cast, and d + 2 terms are summed in any order.
    """
    n, d = target.W.shape
    m = abs(target.a + target.b) / 2
    magnitude = (np.abs(target.W) * target.box.magnitude.reshape(n, d)).sum(axis=1) + np.abs(target.t) + m
    return round_up(gamma(d + 8, UNIT_ROUNDOFF[dtype]) * float(magnitude.max()))


TRUNCATED_LINEAR = for_kind(truncated_linear, "TruncatedLinear")
TRUNCATED_LINEAR_HEADS = for_kind(truncated_linear_heads, "TruncatedLinear", is_for_auto=False)
