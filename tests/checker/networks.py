"""Networks for the tests of the checker: fitted by least squares, saved as attnc saves them, with a certificate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flint import arb, fmpq

from attnc.exports.directory import save_network
from attnc.exports.tensors import encode
from attnc.ir.building import AffineBuilder, Attending
from attnc.ir.layers import Affine, Attention, Head, Mask
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc_checker.files import Tensor
from attnc_checker.forms import ONE, Form, stacked
from attnc_checker.forms import Head as ReducedHead
from attnc_checker.jets import Poly
from attnc_checker.network import Reduction, Stage
from attnc_checker.overflow import require_finite
from attnc_checker.program import Program as StoredProgram
from attnc_checker.ranges import Box

Ends = Sequence[tuple[float, float]]
NAMES = ("x", "y", "z")
DTYPES = {"float64": "F64", "float32": "F32", "int32": "I32", "int64": "I64"}


def spectral(
    f: Callable[..., np.ndarray],
    box: Ends,
    count: int,
    *,
    c: float = 0.3,
    pad: int = 5,
    dtype: Any = np.float64,
) -> Program:
    """One head whose weights are ∝ exp(−c(y − L)²) on a lattice of count^d anchors, with values fitted to f.

    The softmax factorises over the axes, so that the fit is a pseudo-inverse for each of them, on Chebyshev nodes.
    """
    d, lattice = len(box), np.arange(count) - (count - 1) / 2
    nodes = np.cos(np.pi * (np.arange(4 * count) + 0.5) / (4 * count))
    scales = [(count - 1 - 2 * pad) / (hi - lo) for lo, hi in box]
    offsets = [-scale * (lo + hi) / 2 for scale, (lo, hi) in zip(scales, box, strict=True)]
    points = [(lo + hi) / 2 + (hi - lo) / 2 * nodes for lo, hi in box]
    values = f(*np.meshgrid(*points, indexing="ij"))
    for i in range(d):
        weights = np.exp(-c * (scales[i] * points[i][:, None] + offsets[i] - lattice) ** 2)
        weights /= weights.sum(axis=1, keepdims=True)
        values = np.moveaxis(np.tensordot(np.linalg.pinv(weights, rcond=1e-9), values, axes=(1, i)), 0, i)
    anchors = grid([(lattice[0], lattice[-1])] * d, count)
    return lattice_program(anchors, values.ravel(), scales, offsets, c, dtype)


def affine(name: str, inputs: Any, outputs: Any, links: Any = (), constants: Any = (), dtype: Any = float) -> Affine:
    """An affine layer from (tokens, channels) to (tokens, channels).

    A link is (token, channel, token read, channel read, coefficient), a constant (token, channel, value).
    """
    builder = AffineBuilder(*inputs, *outputs)
    for link in links:
        builder.link(*link)
    for constant in constants:
        builder.set(*constant)
    return builder.build(name, dtype)


def dense(name: str, weight: np.ndarray, constant: np.ndarray | None = None) -> Affine:
    """An affine layer with all entries; its channels are c0, c1, …"""
    constant = np.zeros(weight.shape[:2]) if constant is None else constant
    channels = tuple(f"c{i}" for i in range(weight.shape[1]))
    return Affine(name, Sparse.from_dense(weight), Sparse.from_dense(constant), channels)


def one_head(embed: Affine, head: Head, name: str = "attend", channel: str = "out", **options: Any) -> Program:
    """A program with one output: a head, of which the first token and this channel are read."""
    (tokens, _, _, d), dtype = embed.weight.shape, embed.weight.values.dtype
    attention = Attention(name, (head,), **{"channels": (channel,), **options})
    read = affine("read", (tokens, attention.channels), (1, ["out"]), [(0, "out", 0, channel)], dtype=dtype)
    return Program((embed, attention, read), ((d,),), (1,))


def lattice_program(
    anchors: np.ndarray,
    values: np.ndarray,
    scales: Sequence[float],
    offsets: Sequence[float],
    c: float,
    dtype: Any = np.float64,
) -> Program:
    """Scores c(2L·y − |L|²), y = scale·x + offset."""
    (num_keys, d), names = anchors.shape, NAMES[: anchors.shape[1]]
    keys, axes = np.arange(num_keys), [*enumerate(names)]
    channels = (*(f"query.{name}" for name in names), "one", *(f"anchor.{name}" for name in names), "bias", "value")
    inputs = [f"in.{i}" for i in range(d)]
    links = [(0, f"query.{name}", 0, inputs[i], scales[i]) for i, name in axes]
    constants = [
        *((0, f"query.{name}", offsets[i]) for i, name in axes),
        *((keys, f"anchor.{name}", anchors[:, i]) for i, name in axes),
        (0, "one", 1.0),
        (keys, "bias", -(anchors**2).sum(axis=1)),
        (keys, "value", values),
    ]
    queries = {(f"query.{name}", f"by.{name}"): 1.0 for name in names} | {("one", "constant"): 1.0}
    slopes = {(f"anchor.{name}", f"by.{name}"): 2 * c for name in names} | {("bias", "constant"): c}
    head = Attending(channels, channels, dtype).head(queries, slopes, {("value", "out"): 1.0})
    return one_head(affine("embed", (1, inputs), (num_keys, channels), links, constants, dtype), head, "select")


def gate(
    scores: Sequence[tuple[float, float]], values: Sequence[tuple[float, float]], residual: float = 0.0
) -> Program:
    """One variable: keys with scores (offset, slope) and values (constant, slope), which only the first token sees."""
    keys, names = 1 + np.arange(len(scores)), ("x", "one", "slope", "offset", "value")
    (offsets, slopes), (fixed, moving) = np.transpose(scores), np.transpose(values)
    links = [(0, "x", 0, "in"), (0, "value", 0, "in", residual), (keys, "value", 0, "in", moving)]
    constants = [(0, "one", 1.0), (keys, "slope", slopes), (keys, "offset", offsets), (keys, "value", fixed)]
    mask = Mask(np.zeros(len(scores) + 1, np.int64), np.r_[1, np.zeros(len(scores), np.int64)])
    queries, keyed = {("x", "q"): 1.0, ("one", "one"): 1.0}, {("slope", "q"): 1.0, ("offset", "one"): 1.0}
    value = {("value", "value"): 1.0}
    head = Attending(names, names, float, mask).head(queries, keyed, value, value)
    embed = affine("embed", (1, ["in"]), (len(scores) + 1, names), links, constants)
    return one_head(embed, head, "gate", "value", channels=names, residual=True)


def reduced(program: Program, reach: float = 4.0) -> Stage:
    """The stage that the checker makes of the program as it would be stored."""
    structure, tensors = encode(program)
    read = {name: Tensor(DTYPES[str(t.dtype)], t.shape, tuple(t.ravel().tolist())) for name, t in tensors.items()}
    d = sum(int(np.prod(shape)) for shape in program.input_shapes)
    reduction = Reduction(StoredProgram(structure, read, d), [arb(reach)] * d)
    require_finite(reduction.program, reduction.reach)
    return reduction.stage()


def form(row: Iterable[Any], sizes: Iterable[Any], n: int = 0) -> Form:
    """Counts for the constant and the coefficients of x_1, …, x_d."""
    keys = [ONE, *range(8)]
    return Form(dict(zip(keys, map(fmpq, row), strict=False)), dict(zip(keys, map(arb, sizes), strict=False)), n)


def reduced_head(scores: list[Form], values: list[Form]) -> ReducedHead:
    """A head with one output."""
    return ReducedHead.of(scores, {0: stacked(values)})


def head_of(scores: Iterable[Any], values: Iterable[Any]) -> ReducedHead:
    """A head with one output, of rows for the scores and the values. Every form is rounded once."""
    return reduced_head(*([form(row, map(abs, row), 1) for row in rows] for rows in (scores, values)))


def box_of(centre: Any, half: Any) -> Box:
    """centre ± half. A number stands for one variable, or for the half-widths along all axes."""
    centres, halves = np.broadcast_arrays(np.atleast_1d(centre), half)
    return Box([*map(arb, centres.tolist())], [*map(arb, halves.tolist())])


def point(box: Box, tau: Iterable[float]) -> list[arb]:
    """The point of the box at τ ∈ [−1, 1]^d."""
    return [c + r * arb(float(t)) for c, r, t in zip(box.centre, box.half, tau, strict=True)]


def at_tau(poly: Poly, tau: Sequence[Any]) -> arb:
    """The value of a polynomial: powers are products, as Arb has none of balls around 0. A key has 6 bits per power."""
    powers = {key: [arb(t) for i, t in enumerate(tau) for _ in range(key >> 6 * i & 63)] for key in poly}
    return sum((math.prod(powers[key], start=x) for key, x in poly.items()), arb(0))


def grid(box: Ends, per_axis: int) -> np.ndarray:
    axes = np.meshgrid(*(np.linspace(lo, hi, per_axis) for lo, hi in box), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1)


def sampled_error(program: Program, f: Callable[..., np.ndarray], box: Ends) -> float:
    points = grid(box, {1: 4001, 2: 121, 3: 25}[len(box)])
    return float(np.abs(program(points)[:, 0] - f(*points.T)).max())


def uniform(kind: str, level: int, d: int, order: int = 8) -> list[list[Any]]:
    start = [kind, order, level] if kind == "taylor" else [kind, level]
    return [[*start, *index] for index in itertools.product(range(2**level), repeat=d)]


def save(
    path: Path,
    program: Program,
    expression: str,
    box: Sequence[tuple[Any, Any]],
    leaves: list[Any],
    bound: float,
    **fields: Any,
) -> Path:
    """The directory, with a certificate of these leaves; `fields` replaces or adds fields of the certificate."""
    ends = {name: list(pair) for name, pair in zip(NAMES, box, strict=False)}
    certificate: dict[str, Any] = {
        "format": "attnc.certificate/1",
        "expression": expression,
        "box": ends,
        "dtype": str(program.dtype),
        "norm": "inf",
        "bound": bound,
        "observed": None,
        "terms": [],
        "assumptions": [],
        "method": "proof",
        "leaves": leaves,
    }
    config = {"expression": expression, "box": ends, "variables": list(ends)}
    save_network(path, program, config, {"certificate.json": certificate | fields}, "a network for a test\n")
    return path


def save_slow(path: Path) -> Path:
    """Save a true claim with leaves far smaller than needed, of the highest order: minutes of work."""
    leaves = [["taylor", 24, 16, i] for i in range(2**16)]
    return save(path, spectral(np.sin, [(-3.0, 3.0)], 17), "sin(x)", [(-3.0, 3.0)], leaves, 1e-6)
