"""The prompt of a fit, saved with its program, and a bound for it that `attnc verify` proves again.

The bound is about two vectors of weights: the one that the program returned in float64, and the one that it returns in
exact arithmetic. Both are within it of the optimum for the stored prompt. It is the sum of two terms:

    optimality   the distance of the float64 weights from the optimum (`enclosures.prompt_bound`)
    rounding     the distance of the float64 weights from the exact ones. Arb runs the program layer by layer in ball
                 arithmetic. Errors of balls grow from layer to layer, so the precision is doubled until they are small
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flint
import numpy as np

from attnc.incontext.descent import Task
from attnc.incontext.enclosures import precise, prompt_bound
from attnc.incontext.newton import NewtonTask
from attnc.incontext.newton_glm import CurvedTask
from attnc.incontext.programs import StoredFit
from attnc.incontext.turns import CURVATURES
from attnc.ir.layers import Affine, Attention, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.repeats import runs
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import up

MOST_WORK = 2**29
"""Maximum number of exponentials of an exact run, times bits: about 5 s. The checker takes four times as much."""
FIRST_BITS, MOST_BITS = 192, 2**12
"""Bits of the first attempt and of the last. An attention layer loses up to 13 bits, and one of gradient steps 2."""
LOST = 2.0**-16
"""The radius at which an attempt is given up: radii grow from layer to layer."""
SHARE = 2.0**-12
"""The share of the first term that the radius of the exact weights may take."""
LEAST = 2.0**-100
"""The smallest term of rounding that is stated, so that a checker can enclose it: weights may be exact."""
EXACT = "Arb's run of the program, layer by layer"


def stored_fit(program: Program, task: Any, inputs: Sequence[np.ndarray], weights: np.ndarray) -> StoredFit:
    """Return the fit with a bound, or with the reason why it has none."""
    kept = tuple(np.asarray(given, np.float64) for given in inputs)
    found = np.atleast_2d(np.asarray(weights, np.float64))

    def without(reason: str) -> StoredFit:
        return StoredFit(kept, found, {}, None, reason)

    is_known = isinstance(task, Task | NewtonTask | CurvedTask) and task.loss in ("squared", *CURVATURES)
    if not is_known or any(task.l1) or task.prompt.queries:
        return without("it is for smooth objectives with one optimum: least squares, ridge, logistic, Poisson, Huber")
    if isinstance(task, NewtonTask) and (task.is_causal or task.penalties):
        return without("the program returns the answer of several fits")
    count = exponentials(program)
    most = MOST_WORK // max(1, count)
    if most < FIRST_BITS:
        return without(f"an exact run takes {count:,} exponentials, more than {MOST_WORK // FIRST_BITS:,}")
    near = prompt_bound(task, kept[-1], found if task.prompt.targets > 1 else found[0])
    if not math.isfinite(near.value):
        return without("the optimum on the prompt is not unique, or too far from the weights to be enclosed")
    most = min(most, MOST_BITS)
    moved = _distance(program, kept, found, max(near.value, LEAST), most)
    if moved is None:
        return without(f"the exact run of the program is not enclosed with {most:,} bits")
    factor = CURVATURES[task.loss] if isinstance(task, CurvedTask) else 1.0
    objective = {"loss": task.loss, "penalty": [*map(float, task.penalty)], "mean": task.mean, "factor": factor}
    return StoredFit(kept, found, objective, Bound((*near.terms, Term("rounding", moved, EXACT))))


def exponentials(program: Program) -> int:
    """Return the number of exponentials of a run on one prompt. A query that sees one key takes none."""
    total, (main, second) = 0, program.starts
    tokens = second[0]
    for parts, start in ((program.memory, second), (program.layers, main)):
        remembered, tokens = tokens, start[0]
        for run in runs(parts):
            for layer in run.layers:
                tokens = layer.weight.shape[0] if isinstance(layer, Affine) else tokens
                views = [_views(head.mask, tokens, remembered if layer.cross else tokens) for head in layer.heads]
                sizes = [len(asking) * len(seen) for of_head in views for asking, seen in of_head if len(seen) > 1]
                total += run.count * sum(sizes)
    return total


def _distance(
    program: Program, inputs: Sequence[np.ndarray], weights: np.ndarray, near: float, most: int
) -> float | None:
    """Return a bound of the distance of the exact weights from these, or None with more than `most` bits."""
    with precise():
        bits, run = FIRST_BITS, _ExactRun(program)
        while bits <= most:
            flint.ctx.prec = bits
            exact, share = run.output(inputs)
            off = [one - other for one, other in zip(exact, weights.reshape(-1).tolist(), strict=False)]
            if exact and all(one.is_finite() and float(one.rad()) <= SHARE * near for one in off):
                size = abs(sum((one * one for one in off), flint.arb(0))).sqrt()
                return max(LEAST, float(up(float(size.upper()), 2)))
            bits = max(2 * bits, math.ceil(0.75 * bits / share))
    return None


class _ExactRun:
    """A run of a program in ball arithmetic, in the precision of Arb's context. Layers are prepared once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[Any, ...], Any] = {}

    def output(self, inputs: Sequence[np.ndarray]) -> tuple[list[flint.arb], float]:
        """Return the last state, row by row, and 1; nothing and the share of layers if a radius gets too large."""
        first, *second = [_matrix(given[0]) for given in self.program.as_tokens(tuple(each[None] for each in inputs))]
        memory = second[0] if second else flint.arb_mat(0, 0)
        for layer in self.program.unrolled_memory:
            memory = self._after(layer, memory, memory)
        for number, layer in enumerate(self.program.unrolled_layers):
            first = self._after(layer, first, memory)
            if isinstance(layer, Attention) and not all(entry.rad() < LOST for entry in first.entries()):
                return [], (number + 1) / len(self.program.unrolled_layers)
        return list(first.entries()), 1.0

    def _after(self, layer: Layer, state: flint.arb_mat, memory: flint.arb_mat) -> flint.arb_mat:
        if isinstance(layer, Affine):
            return self._affine(layer, state)
        if isinstance(layer, Attention):
            return self._attention(layer, state, memory if layer.cross else state)
        return _mixed(state, flint.arb_mat(state.ncols(), state.ncols(), np.eye(state.ncols()).ravel().tolist()))

    def _affine(self, layer: Affine, state: flint.arb_mat) -> flint.arb_mat:
        key = (id(layer.weight), id(layer.constant))
        if key not in self._known:
            constants = {tuple(at): value for at, value in _entries(layer.constant)}
            rows: dict[tuple[int, ...], list[tuple[int, int, float]]] = {at: [] for at in constants}
            for (token, channel, from_token, from_channel), value in _entries(layer.weight):
                rows.setdefault((token, channel), []).append((from_token, from_channel, value))
            self._known[key] = [(at, terms, constants.get(at, 0.0)) for at, terms in rows.items()]
        made = flint.arb_mat(*layer.constant.shape)
        for at, terms, constant in self._known[key]:
            total = flint.arb(constant)
            for token, channel, value in terms:
                total = total + (state[token, channel] if value == 1 else state[token, channel] * value)
            made[at] = total
        return made

    def _attention(self, layer: Attention, state: flint.arb_mat, keyed: flint.arb_mat) -> flint.arb_mat:
        made = flint.arb_mat(state) if layer.residual else flint.arb_mat(state.nrows(), len(layer.channels))
        taken: dict[tuple[int, ...], flint.arb_mat] = {}

        def shown(seen: np.ndarray, W: flint.arb_mat | None = None) -> flint.arb_mat:
            """Return these rows of the keyed state, times a projection. Heads share both."""
            key = (id(seen),) if W is None else (id(seen), id(W))
            if key not in taken:
                taken[key] = _taken(keyed, seen) if W is None else shown(seen) * W
            return taken[key]

        for head in layer.heads:
            W_Q, W_K, W_V, W_O = (self._projection(W) for W in head.matrices.values())
            written = np.flatnonzero(head.W_O.any(axis=0)).tolist()
            for asking, seen in self._groups(head.mask, state.nrows(), keyed.nrows()):
                values = shown(seen, W_V)
                if all(value == 0 for value in values.entries()):
                    continue  # the head writes exact zeros
                keys = shown(seen, W_K)
                out = _mixed(_taken(state, asking) * W_Q * keys.transpose(), values) * W_O
                for row, query in enumerate(asking.tolist()):
                    for column in written:
                        made[query, column] = made[query, column] + out[row, column]
        return made

    def _projection(self, W: np.ndarray) -> flint.arb_mat:
        key = (W.shape, W.tobytes())
        if key not in self._known:
            self._known[key] = _matrix(W)
        return self._known[key]

    def _groups(self, mask: Mask | None, queries: int, keys: int) -> list[tuple[np.ndarray, np.ndarray]]:
        key = (0 if mask is None else id(mask), queries, keys)
        if key not in self._known:
            self._known[key] = _views(mask, queries, keys)
        found: list[tuple[np.ndarray, np.ndarray]] = self._known[key]
        return found


def _views(mask: Mask | None, queries: int, keys: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the queries that see the same keys, with these keys."""
    return [(np.arange(queries), np.arange(keys))] if mask is None else [each for each in mask.views() if len(each[0])]


def _entries(sparse: Any) -> list[tuple[tuple[int, ...], float]]:
    return [(tuple(at), value) for at, value in zip(sparse.index.tolist(), sparse.values.tolist(), strict=True)]


def _matrix(array: np.ndarray) -> flint.arb_mat:
    return flint.arb_mat(array.shape[0], array.shape[1], array.ravel().tolist())


def _taken(matrix: flint.arb_mat, rows: np.ndarray) -> flint.arb_mat:
    width = matrix.ncols()
    if len(rows) == matrix.nrows():
        return matrix
    return flint.arb_mat(len(rows), width, [matrix[row, column] for row in rows.tolist() for column in range(width)])


def _mixed(scores: flint.arb_mat, values: flint.arb_mat) -> flint.arb_mat:
    """Return softmax(scores) · values. One key has the weight 1."""
    rows, columns, width = scores.nrows(), scores.ncols(), values.ncols()
    if columns == 1:
        return flint.arb_mat(rows, width, list(values.entries()) * rows)
    weights = flint.arb_mat(rows, columns, [score.exp() for score in scores.entries()])
    totals, sums = weights * flint.arb_mat(columns, 1, [1] * columns), weights * values
    return flint.arb_mat(rows, width, [sums[i, j] / totals[i, 0] for i in range(rows) for j in range(width)])
