"""Heads over anchors, on a grid or off it, and what an engine may be off by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir import Attention, Head, Program
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.spec import check
from ir.rounding import exact_and_bound


@dataclass
class Anchors:
    """Keys with these slopes and offsets for queries t = scale·x + shift; `weights_out` is W_O."""

    slopes: np.ndarray  # (keys, axes)
    offsets: np.ndarray
    values: np.ndarray  # (keys, d_v)
    scale: np.ndarray
    shift: np.ndarray
    dtype: Any = np.float64
    weights_out: np.ndarray | None = None

    @classmethod
    def gaussian(cls, lattices: list[np.ndarray], beta: float, values: np.ndarray, dtype: Any = np.float64) -> Anchors:
        """Weights ∝ exp(−β|x − L|²)."""
        L = np.stack([column.ravel() for column in np.meshgrid(*lattices, indexing="ij")], axis=1)
        d = len(lattices)
        values = np.asarray(values, np.float64).reshape(len(L), -1)
        return cls(2 * beta * L, -beta * (L**2).sum(axis=1), values, np.ones(d), np.zeros(d), dtype)

    def reordered(self, order: np.ndarray) -> Anchors:
        return replace(self, slopes=self.slopes[order], offsets=self.offsets[order], values=self.values[order])

    def program(self) -> Program:
        keys, d = self.slopes.shape
        axes, values = [f"t{i}" for i in range(d)], [f"v{j}" for j in range(self.values.shape[1])]
        ask = AffineBuilder(1, [f"x{i}" for i in range(d)], 1, [*axes, "one"])
        for i in range(d):
            ask.link(0, axes[i], 0, f"x{i}", self.scale[i])
            ask.set(0, axes[i], self.shift[i])
        ask.set(0, "one", 1.0)
        know = AffineBuilder(0, [], keys, [*axes, "offset", *values])
        for i in range(d):
            know.set(np.arange(keys), axes[i], self.slopes[:, i])
        know.set(np.arange(keys), "offset", self.offsets)
        for j, name in enumerate(values):
            know.set(np.arange(keys), name, self.values[:, j])
        entries = {(name, name): 1.0 for name in axes}
        W_O = np.eye(len(values)) if self.weights_out is None else self.weights_out
        head = Head(
            projection(ask.channels_out, [*axes, "c"], entries | {("one", "c"): 1.0}, self.dtype),
            projection(know.channels_out, [*axes, "c"], entries | {("offset", "c"): 1.0}, self.dtype),
            projection(know.channels_out, values, {(name, name): 1.0 for name in values}, self.dtype),
            W_O.astype(self.dtype),
        )
        out = tuple(f"out{j}" for j in range(W_O.shape[1]))
        layers = (ask.build("ask", self.dtype), Attention("look", (head,), out, cross=True))
        return check(Program(layers, ((d,),), (len(out),), (know.build("know", self.dtype),)))


def head_of(engine: NumpyEngine) -> Any:
    (head,) = engine._stages[-1].heads
    return head


def assert_agrees(program: Program, points: np.ndarray, found: np.ndarray, truncation: float) -> None:
    exact, bound = exact_and_bound(program, (points,))
    error = np.abs(found - exact)
    assert found.dtype == program.dtype
    assert (error <= bound + truncation).all(), f"off by {error.max()}, allowed {bound.min()} and {truncation}"
