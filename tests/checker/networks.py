"""Networks for the tests of the checker: fitted by least squares, saved as attnc saves them, with a certificate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flint import arb, fmpq

from attnc.exports.directory import save_network
from attnc.exports.tensors import encode
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Attention, Head, Mask
from attnc.ir.program import Program
from attnc_checker.files import Tensor
from attnc_checker.forms import ONE, Form, stacked
from attnc_checker.forms import Head as ReducedHead
from attnc_checker.network import Reduction, Stage
from attnc_checker.overflow import require_finite
from attnc_checker.program import Program as StoredProgram
from attnc_checker.vectors import Vector

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
    rcond: float = 1e-9,
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
        values = np.moveaxis(np.tensordot(np.linalg.pinv(weights, rcond=rcond), values, axes=(1, i)), 0, i)
    anchors = np.stack([axis.ravel() for axis in np.meshgrid(*[lattice] * d, indexing="ij")], axis=1)
    return lattice_program(anchors, values.ravel(), scales, offsets, c, dtype)


def lattice_program(
    anchors: np.ndarray,
    values: np.ndarray,
    scales: Sequence[float],
    offsets: Sequence[float],
    c: float,
    dtype: Any = np.float64,
) -> Program:
    """Scores c(2L·y − |L|²), y = scale·x + offset."""
    d, keys = anchors.shape[1], np.arange(len(anchors))
    names = NAMES[:d]
    channels = (*(f"query.{name}" for name in names), "one", *(f"anchor.{name}" for name in names), "bias", "value")
    inputs = [f"in.{i}" for i in range(d)]
    embed = AffineBuilder(1, inputs, len(anchors), channels)
    for i, name in enumerate(names):
        embed.link(0, f"query.{name}", 0, inputs[i], scales[i])
        embed.set(0, f"query.{name}", offsets[i])
        embed.set(keys, f"anchor.{name}", anchors[:, i])
    embed.set(0, "one", 1.0)
    embed.set(keys, "bias", -(anchors**2).sum(axis=1))
    embed.set(keys, "value", values)
    score = (*(f"by.{name}" for name in names), "constant")
    queries = {(f"query.{name}", f"by.{name}"): 1.0 for name in names} | {("one", "constant"): 1.0}
    slopes = {(f"anchor.{name}", f"by.{name}"): 2 * c for name in names} | {("bias", "constant"): c}
    head = Head(
        projection(channels, score, queries, dtype),
        projection(channels, score, slopes, dtype),
        projection(channels, ("out",), {("value", "out"): 1.0}, dtype),
        np.eye(1, dtype=dtype),
    )
    read = AffineBuilder(len(anchors), ["out"], 1, ["out"])
    read.link(0, "out", 0, "out")
    layers = (embed.build("embed", dtype), Attention("select", (head,), ("out",)), read.build("read", dtype))
    return Program(layers, ((d,),), (1,))


def gate(
    scores: Sequence[tuple[float, float]], values: Sequence[tuple[float, float]], residual: float = 0.0
) -> Program:
    """One variable: keys with scores (offset, slope) and values (constant, slope), which only the first token sees."""
    keys = 1 + np.arange(len(scores))
    names = ("x", "one", "slope", "offset", "value")
    embed = AffineBuilder(1, ["in"], len(scores) + 1, names)
    embed.link(0, "x", 0, "in")
    embed.set(0, "one", 1.0)
    embed.link(0, "value", 0, "in", residual)
    for key, (offset, slope), (constant, moving) in zip(keys, scores, values, strict=True):
        embed.set(key, "slope", slope)
        embed.set(key, "offset", offset)
        embed.set(key, "value", constant)
        embed.link(key, "value", 0, "in", moving)
    head = Head(
        projection(names, ("q", "one"), {("x", "q"): 1.0, ("one", "one"): 1.0}, float),
        projection(names, ("q", "one"), {("slope", "q"): 1.0, ("offset", "one"): 1.0}, float),
        projection(names, ("value",), {("value", "value"): 1.0}, float),
        projection(("value",), names, {("value", "value"): 1.0}, float),
        Mask(np.zeros(len(scores) + 1, np.int64), np.r_[1, np.zeros(len(scores), np.int64)]),
    )
    read = AffineBuilder(len(scores) + 1, names, 1, ["out"])
    read.link(0, "out", 0, "value")
    layers = (embed.build("embed"), Attention("gate", (head,), names, residual=True), read.build("read"))
    return Program(layers, ((1,),), (1,))


def reduced(program: Program, reach: float = 4.0) -> Stage:
    """The stage that the checker makes of the program as it would be stored."""
    structure, tensors = encode(program)
    read = {name: Tensor(DTYPES[str(t.dtype)], t.shape, tuple(t.ravel().tolist())) for name, t in tensors.items()}
    d = sum(int(np.prod(shape)) for shape in program.input_shapes)
    reduction = Reduction(StoredProgram(structure, read, d), [arb(reach)] * d)
    require_finite(reduction.program, reduction.reach)
    return reduction.stage()


def form(row: Iterable[Any], sizes: Iterable[Any], n: int = 0) -> Form:
    """Of the constant and the coefficients of x_1, …, x_d."""
    keys = [ONE, *range(8)]
    return Form(dict(zip(keys, map(fmpq, row), strict=False)), dict(zip(keys, map(arb, sizes), strict=False)), n)


def reduced_head(scores: list[Form], values: list[Form]) -> ReducedHead:
    """A head with one output."""
    whole = stacked(scores)
    own = {key: whole.n * x for key, x in whole.sizes.items()}
    return ReducedHead(whole, {0: stacked(values)}, own, Vector([arb(0)] * len(scores)), whole.n)


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
