"""A whole ReLU network as attention, layer by layer: hidden units are tokens (arXiv 2504.15956, section on ReLU)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from attnc.constructions.built import Built, Progress, limited
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, for_kind, of_kind
from attnc.constructions.fitting.clips import BEST_BETA, ClipLayer
from attnc.constructions.fitting.selection import round_up
from attnc.errors import InputError
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Layer
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.linear import ReLUNetwork
from attnc.targets.target import Target

LEAST, TINY = 2.0**-6, 2.0**-100
"""Least scale of a unit: as a share of the width of its range, and absolute. With a smaller scale, a unit that is
hardly ever positive would have huge scores with large rounding errors."""


def relu_network(
    target: Target,
    *,
    eps: float | None = None,
    num_anchors: int | tuple[int, ...] | None = None,
    beta: float = BEST_BETA,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """Every hidden layer becomes one attention head over its units as tokens.

    Theorem.  Let B_j ≥ 0 bound unit j of a hidden layer from above on the box. Then relu(z) = clip(z, 0, B_j) there,
              and with p anchors on [0, B_j] a unit is off by ε(β)·B_j/(p−1) plus the error of its input. So
              |program − network| ≤ Σ_l |W_L|⋯|W_{l+1}|·(ε·B^l/(p_l−1)) in the max-norm, plus rounding, which the
              layers above multiply in the same way.
    Weights.  Token j carries y_j = (z_j/B_j − ½)(p−1). One `ClipLayer` clips all units, each in units of its own B_j.
              The next affine map undoes the scaling: its rows are W·B/(p−1), its constants b + W·B/2.
    Proof.    clip is 1-Lipschitz, and the clip of the layer holds on all of R. So an error of the input may take z out
              of [0, B_j] without harm.

    Parameters
    ----------
    target : Target
        A `attnc.ReLUNetwork`.
    eps : float, optional
        The largest error allowed. Give either this or num_anchors.
    num_anchors : int or tuple of int, optional
        The number p of anchors of each hidden layer, or one number for all. A layer gets at least one anchor per unit.
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
    >>> relu = attnc.ReLUNetwork([[[1.0], [-1.0]], [[1.0, 1.0]]], [[0.0, 0.0], [0.0]], box=(-1, 1))
    >>> built = attnc.constructions.relu_network(relu, num_anchors=33)
    >>> built.program.num_anchors, built.bound.value < 0.01
    (33, True)
    """
    target = of_kind("relu_network", target, ReLUNetwork)
    hidden = len(target.weights) - 1
    scales = [
        # A constant unit is best in the middle of the anchors, or far from them if it is negative.
        np.where(W.any(axis=1), np.maximum(pre.hi, LEAST * (pre.hi - pre.lo)), 2 * np.abs(b))
        for W, b, pre in zip(target.weights[:-1], target.biases[:-1], target.ranges()[:-1], strict=True)
    ]
    scales = [np.where(B > TINY, B, 1.0) for B in scales]  # a unit that is always 0 fits any range
    widths = [len(W) for W in target.weights[:-1]]
    if num_anchors is None:
        if eps is None:
            raise InputError("relu_network: give eps or num_anchors")
        counts = _counts_for(target, scales, eps, beta, dtype)
    else:
        counts = (num_anchors,) * hidden if isinstance(num_anchors, int) else tuple(num_anchors)
        if len(counts) != hidden or not all(isinstance(p, int) and p >= 2 for p in counts):
            raise InputError(f"num_anchors: expected {hidden} whole number(s) ≥ 2, found {num_anchors!r}")
    counts = tuple(max(p, width) for p, width in zip(counts, widths, strict=True))
    limit = min(max_anchors, max_bytes // 200)
    share = limit / max(1, sum(counts))
    fewer = tuple(max(width, 2, int(p * share)) for p, width in zip(counts, widths, strict=True))
    return limited(target, eps, sum(counts), limit, partial(_build, target, scales, beta, dtype), counts, fewer)


def _build(target: ReLUNetwork, scales: list[np.ndarray], beta: float, dtype: str, counts: tuple[int, ...]) -> Built:
    clips = [ClipLayer(p, beta, dtype) for p in counts]
    bound, program = _bound(target, scales, clips, dtype), _program(target, scales, clips, dtype)
    parameters = (("num_anchors", " + ".join(map(str, counts))), ("beta", beta))
    return Built(program, "relu_network", bound, target.box.as_dict(), parameters)


def _sensitivities(target: ReLUNetwork, scales: list[np.ndarray]) -> list[float]:
    """Return ‖|W_L|⋯|W_{l+1}|·B^l‖_∞ for every hidden layer l."""
    found = []
    for l, moved in enumerate(scales):  # noqa: E741  (the theorem's letter)
        for W in target.weights[l + 1 :]:
            moved = up(np.abs(W) @ moved, len(moved) + 1)
        found.append(float(np.max(moved)))
    return found


def _counts_for(target: ReLUNetwork, scales: list[np.ndarray], eps: float, beta: float, dtype: str) -> tuple[int, ...]:
    """Minimise Σ p_l with Σ sensitivity_l·ε/(p_l − 1) = 0.98·eps: p_l − 1 ∝ √sensitivity_l.

    ε is first taken for 64 keys. It is then computed again, since it grows a little with the number of keys.
    """
    roots = [math.sqrt(s) for s in _sensitivities(target, scales)]

    def counts(few: tuple[int, ...]) -> tuple[int, ...]:
        unit = max((ClipLayer(p, beta, dtype).error for p in few), default=0.0)
        return tuple(2 + math.ceil(min(1e12, unit * root * sum(roots) / (0.98 * eps))) for root in roots)

    found = counts((64,))
    return counts(found) if sum(found) <= MAX_ANCHORS else found


def _bound(target: ReLUNetwork, scales: list[np.ndarray], clips: list[ClipLayer], dtype: str) -> Bound:
    u = UNIT_ROUNDOFF[dtype]
    off = np.zeros(target.box.d)  # the error of each input of the layer
    rounded = np.zeros(target.box.d)  # the part of it that comes from rounding
    size = target.box.magnitude
    for l, (W, b) in enumerate(zip(target.weights, target.biases, strict=True)):  # noqa: E741
        # W·B/(p−1) and b + W·B/2 are computed and cast, and then summed: fewer than fan-in + 16 roundings each.
        slack = gamma(W.shape[1] + 16, u) * (np.abs(W) @ size * 2 + np.abs(b))
        rounded = up(np.abs(W) @ rounded + slack, W.shape[1] + 2)
        off = up(np.abs(W) @ off + slack, W.shape[1] + 2)
        if l < len(clips):
            B, clip = scales[l], clips[l]
            spacing = B / (clip.num_anchors - 1)
            # y = (z/B − ½)(p−1) is computed by the same sum as z. Adding the constant (p−1)/2 costs one more rounding.
            slack = spacing * clip.rounding + gamma(8, u) * B
            rounded, off = up(rounded + slack, 2), up(off + slack + spacing * clip.error, 3)
            size = B
    rounding = float(rounded.max())
    approximation = round_up(float(off.max()) - rounding)
    clipped = Term("approximation", approximation, "the clips of every layer, through |W| of the layers above")
    return Bound(
        (clipped, Term("rounding", round_up(rounding), f"{dtype} sums over units and over keys, through the same |W|"))
    )


def _program(target: ReLUNetwork, scales: list[np.ndarray], clips: list[ClipLayer], dtype: str) -> Program:
    layers: list[Layer] = []
    tokens_in, channels_in = 1, [f"in.{c}" for c in range(target.box.d)]
    gain, shift = np.ones(target.box.d), np.zeros(target.box.d)  # input unit i = gain·channel + shift
    for l, (W, b) in enumerate(zip(target.weights, target.biases, strict=True)):  # noqa: E741
        clip, units = clips[l] if l < len(clips) else None, np.arange(len(W))
        to_y, offset, out = ((clip.num_anchors - 1) / scales[l], -clip.radius, "y") if clip else (1.0, 0.0, "out")
        tokens, channels = (clip.num_keys, clip.channels) if clip else (len(W), ("out",))
        builder = AffineBuilder(tokens_in, channels_in, tokens, channels)
        weight = (to_y * W.T).T * gain
        if l:
            builder.link(units[:, None], out, np.arange(W.shape[1]), channels_in[0], weight)
        else:
            for c, name in enumerate(channels_in):
                builder.link(units, out, 0, name, weight[:, c])
        builder.set(units, out, to_y * (b + W @ shift) + offset)
        if clip is not None:
            clip.place(builder, units)
            gain, shift = scales[l] / (clip.num_anchors - 1), scales[l] / 2
            tokens_in, channels_in = clip.num_keys, [clip.output]
        layers.append(builder.build("read" if clip is None else f"affine{l}", dtype))
        layers += [] if clip is None else [clip.attention(f"relu{l}")]
    return check(Program(tuple(layers), target.input_shapes, target.output_shape))


RELU_NETWORK = for_kind(relu_network, "ReLUNetwork")
