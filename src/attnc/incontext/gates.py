"""Safeguards for every loss: after each step, gates keep the weights of a program within limits on all prompts.

A layer of gates acts on chosen tokens. Token i holds a limit B_i, and for each of its channels v two heads, in which
it sees itself and the null token, subtract s·u·σ(β_i u) with u = s·v − B_i and s = ±1. Up to rounding that is
v − relu(v − B) + relu(−v − B), the clip of v to [−B, B]. A weight of attention below e^−745 is 0, so a v below the
limit by more than 745/β is not changed, not even in its last bit.

Theorem.  For all prompts within |x_i| ≤ X and |y_i| ≤ Y, whatever else they hold, every number in the program is within
          the bounds that `magnitudes` returns. After gates |v| ≤ B + 0.56/β + γ₁₆(U + B), where |v| ≤ U before them.
Proof.    By induction over the layers. A head returns an average of the values of keys, hence at most |W_O|ᵀ|W_V|ᵀ
          times the largest numbers of keys. An affine map is at most its absolute values times those of its input. A
          factor of 1.001 for each sum covers its rounding. Each gate errs by at most 0.2785/β, and rounding by at most
          γ₁₆(U + B). ∎
Outside of the domain a head with a sink may be an average, and its sum is then wrong by e^C, about 10²⁰. The first
gates bring the weights from U to a rounding of U, and the second ones to the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnc.errors import InputError
from attnc.incontext.descent import GATE, GLMTask, Task, gate_slope
from attnc.incontext.domain import Domain
from attnc.incontext.newton import NewtonTask
from attnc.incontext.newton_glm import CurvedTask
from attnc.incontext.safeguard import GATES, GRADIENT_SLACK
from attnc.incontext.side_by_side import with_start
from attnc.incontext.softmax_regression import SoftmaxTask
from attnc.ir.building import Attending
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up

LIMIT, STEEPNESS = "limit", "steepness"
MOST_EXCESS = 2.0
"""Largest quotient of a bound after gates and its limit. The gates are made for numbers up to twice the limit."""
M_ROOM = 4.0
"""The limits of entries of M, as multiples of the largest one of exact turns on the prompts for which it is built."""
CLIPS = ("keep", "keep_again")
"""The names of the layers of gates after each step."""
ROUNDED_UP = 64
"""Units in the last place by which a magnitude after gates is rounded up."""


@dataclass(frozen=True)
class Kept:
    """The limits that a program keeps: for each token of its main stream, and the channels to which they apply."""

    limits: Mapping[int, float]
    channels: tuple[str, ...]


def safeguarded(program: Program, kept: Kept, domain: Domain) -> tuple[Program, float]:
    """Return the program with gates after each of its steps, and a proven bound of its outputs.

    Parameters
    ----------
    program : Program
        A program whose layers with a name that begins with "update" end a step.
    kept : Kept
        The limits.
    domain : Domain
        The norm limits of the prompts: x, and y or target. Eigenvalues do not matter.

    Returns
    -------
    program : Program
        Its one input has the first weights above the prompt.
    limit : float
        A bound of the absolute values of its outputs, for all prompts within the norm limits.

    Raises
    ------
    InputError
        If rounding may exceed the limits, or a limit is missing.
    """
    stream, at, shape = with_start(program)
    names = (*stream.channels, LIMIT, STEEPNESS)
    tokens = np.array(sorted(kept.limits), np.int32)
    limits = np.array([kept.limits[token] for token in tokens.tolist()])
    slopes = np.array([gate_slope(2 * limit, "float64") for limit in limits.tolist()])
    layers: list[Layer] = []
    gates: dict[int, Attention] = {}
    widened = _Widening(names, tokens, limits, slopes)
    for layer in (*stream.layers, stream.answer(at)):
        is_step = layer.name.startswith("update")
        layers.append(widened(layer, is_step, is_last=layer.name == "outputs"))
        if is_step:
            count = layers[-1].weight.shape[0]  # type: ignore[union-attr]
            if count not in gates:
                gates[count] = _gates(names, count, tokens, kept.channels)
            number = layer.name.removeprefix("update")
            layers += [replace(gates[count], name=f"{name}{number}") for name in CLIPS]
    made = check(Program(rolled(layers), (shape,), program.output_shape))
    outputs, excess = magnitudes(made, domain)
    if not excess <= MOST_EXCESS:
        raise InputError(
            f"no safeguard is possible: on prompts within |x| ≤ {domain.x:.3g} rounding may bring a weight to "
            f"{excess:.3g} times its limit. Scale the columns, or raise the penalty."
        )
    return made, float(outputs.max(initial=0))


def limits_of(task: Task | NewtonTask | CurvedTask, largest: float) -> Kept:
    """Return the limits for the steps of a task: `largest` for every weight, and room for every entry of a matrix M."""
    if isinstance(task, NewtonTask):
        states = task.prompt.targets
        rows = M_ROOM * task.scale * task.condition / task.trace
        limits = dict.fromkeys(range(states), largest)
        limits |= dict.fromkeys(range(states, states + task.prompt.num_weights), rows)
        return Kept(limits, tuple(f"v.{c}" for c in task.prompt.weight_names))
    if isinstance(task, CurvedTask):
        rows = M_ROOM * math.ldexp(task.scale, task.growth) / task.trace
        limits = {int(token): largest for token in task.places["state"]}
        limits |= {int(token): rows for token in task.places["row"]}
        limits |= _of_keys(task.places["key"], task.keys[0], largest)
        return Kept(limits, tuple(f"vector.{c}" for c in task.prompt.weight_names))
    if isinstance(task, SoftmaxTask):
        tokens = np.concatenate([task.places["v"], task.places["p"]])
        return Kept(dict.fromkeys(tokens.tolist(), largest), tuple(f"vector.{c}" for c in task.prompt.weight_names))
    if isinstance(task, GLMTask):
        first = task.keys + 1
        limits = {first: largest, first + 1: largest}
        keys = first + 3 + np.arange(task.mean_keys.num_keys)
        limits |= _of_keys(keys, task.mean_keys.slopes[:, 0], largest)
        return Kept(limits, tuple(f"vector.{c}" for c in range(task.prompt.num_weights)))
    return Kept({0: largest}, tuple(f"{part}.{c}" for part in "vp" for c in task.prompt.weight_names))


def _of_keys(tokens: np.ndarray, slopes: np.ndarray, largest: float) -> dict[int, float]:
    """Return the limits of keys that hold multiples of the weights."""
    return {int(token): max(abs(float(slope)), 1.0) * largest for token, slope in zip(tokens, slopes, strict=True)}


class _Widening:
    """Layers with two more channels, the limits and the slopes of gates. Layers that share arrays still do."""

    def __init__(self, names: tuple[str, ...], tokens: np.ndarray, limits: np.ndarray, slopes: np.ndarray) -> None:
        self.names = names
        self._index = np.stack([np.repeat(tokens, 2), np.tile([len(names) - 2, len(names) - 1], len(tokens))], axis=1)
        self._values = np.stack([limits, slopes], axis=1).ravel()
        self._affines: dict[tuple[int, int, bool], tuple[Affine, Layer]] = {}
        self._heads: dict[int, tuple[Attention, Layer]] = {}
        self._projections: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, layer: Layer, has_limits: bool, is_last: bool) -> Layer:
        if isinstance(layer, Attention):
            if id(layer.heads) not in self._heads:
                heads = tuple(
                    replace(
                        head,
                        W_Q=self._longer(head.W_Q),
                        W_K=self._longer(head.W_K),
                        W_V=self._longer(head.W_V),
                        W_O=np.pad(head.W_O, ((0, 0), (0, 2))),
                    )
                    for head in layer.heads
                )
                self._heads[id(layer.heads)] = replace(layer, heads=heads, channels=self.names), layer
            return replace(self._heads[id(layer.heads)][0], name=layer.name)
        assert isinstance(layer, Affine)
        key = (id(layer.weight), id(layer.constant), has_limits)
        if key not in self._affines:
            width, two = len(self.names), 0 if is_last else 2
            to, out, taken, given = layer.weight.shape
            is_first = layer.name == "place"
            weight = replace(layer.weight, shape=(to, out + two, taken, given if is_first else width))
            constant = replace(layer.constant, shape=(to, out + two))
            if has_limits:
                index = np.concatenate([constant.index, self._index.astype(np.int32)])
                constant = Sparse(constant.shape, index, np.concatenate([constant.values, self._values]))
            names = layer.channels if is_last else self.names
            self._affines[key] = replace(layer, weight=weight, constant=constant, channels=names), layer
        return replace(self._affines[key][0], name=layer.name)

    def _longer(self, matrix: np.ndarray) -> np.ndarray:
        if id(matrix) not in self._projections:
            self._projections[id(matrix)] = np.pad(matrix, ((0, 2), (0, 0))), matrix
        return self._projections[id(matrix)][0]


def _gates(names: tuple[str, ...], count: int, tokens: np.ndarray, channels: tuple[str, ...]) -> Attention:
    """Return the layer of gates for a state of `count` tokens, the last of which is the null token."""
    sees, seen = np.full(count, EVERY_QUERY, np.int32), np.full(count, len(tokens), np.int32)
    sees[tokens] = seen[tokens] = np.arange(len(tokens))
    seen[-1] = EVERY_QUERY
    attending = Attending(names, names, "float64", Mask(sees, seen))
    heads = []
    for channel in channels:
        for sign in (1.0, -1.0):
            beyond = {(channel, GATE): sign, (LIMIT, GATE): -1.0}
            heads.append(attending.head(beyond, {(STEEPNESS, GATE): 1.0}, beyond, {(GATE, channel): -sign}))
    return Attention(CLIPS[0], tuple(heads), names, residual=True)


def magnitudes(program: Program, domain: Domain) -> tuple[Float[np.ndarray, "tokens channels"], float]:
    """Return bounds of the outputs' absolute values, and the largest quotient of a bound after gates and its limit.

    The first row of the input holds the first weights, and the next rows the prompt.
    """
    most = domain.target if math.isfinite(domain.target) else domain.y
    if not (math.isfinite(domain.x) and math.isfinite(most) and math.isfinite(domain.start)):
        raise InputError("a safeguard takes limits of the examples, the targets and the first weights")
    prompt, (rows, width) = domain.prompt, program.input_shapes[0]
    found = np.zeros((rows, width))
    found[0] = domain.start
    given, asked = found[1 : 1 + prompt.rows], found[1 + prompt.rows :]
    given[:, : prompt.features] = domain.x
    given[:, prompt.features] = 1.0
    given[:, -prompt.targets :] = most
    asked[:, : prompt.features] = domain.query if prompt.queries else 0.0
    if prompt.weighted:
        given[:, prompt.features + 1] = -math.log(np.finfo(float).tiny)
    excess = 0.0
    kinds: dict[int, list[_Mixing]] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in program.unrolled_layers:
            if isinstance(layer, Affine):
                found = _through(layer, found)
            elif layer.name.startswith(CLIPS):
                assert isinstance(layer, Attention)
                found, over = _kept(layer, found)
                excess = max(excess, over if layer.name.startswith(CLIPS[-1]) else 0.0)
            elif isinstance(layer, Attention):
                if id(layer.heads) not in kinds:
                    kinds[id(layer.heads)] = _mixings(layer)
                added = np.zeros_like(found)
                for mixing in kinds[id(layer.heads)]:
                    for queries, keys in mixing.views:
                        added[queries] += found[keys].max(axis=0) @ mixing.matrix
                found = np.where(added > 0, (found + added) * GRADIENT_SLACK, found)
    return np.where(np.isnan(found), np.inf, found), excess if math.isfinite(excess) else math.inf


@dataclass(frozen=True, eq=False)
class _Mixing:
    """Heads with one mask: Σ |W_V||W_O|, and the queries and keys that see each other."""

    matrix: Float[np.ndarray, "channels channels"]
    views: list[tuple[np.ndarray, np.ndarray]]


def _mixings(layer: Attention) -> list[_Mixing]:
    masks: dict[tuple[int, int], Mask] = {}
    sums: dict[tuple[int, int], np.ndarray] = {}
    for head in layer.heads:
        assert head.mask is not None  # every layer of a stream has masks
        key = (id(head.mask.query_segments), id(head.mask.key_segments))
        masks[key] = head.mask
        sums[key] = sums.get(key, 0.0) + np.abs(head.W_V) @ np.abs(head.W_O)
    return [_Mixing(sums[key], masks[key].views()) for key in masks]


def _through(layer: Affine, before: np.ndarray) -> np.ndarray:
    """Return the magnitudes after an affine map. Those of copies are the same."""
    weight = layer.weight
    size = math.prod(weight.shape[:2])
    to = weight.index[:, 0].astype(np.int64) * weight.shape[1] + weight.index[:, 1]
    read = np.abs(weight.values) * before[weight.index[:, 2], weight.index[:, 3]]
    sums = np.bincount(to, read, size)
    is_copy = np.bincount(to, np.abs(weight.values) != 1, size) + (np.bincount(to, minlength=size) > 1) == 0
    constant = np.abs(layer.constant.dense()).ravel()
    found: np.ndarray = np.where(is_copy | (sums == 0), sums, sums * GRADIENT_SLACK) + constant
    return found.reshape(weight.shape[:2])


def _kept(layer: Attention, before: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the bounds after gates, and the largest quotient of one and its limit."""
    after, u = before.copy(), UNIT_ROUNDOFF["float64"]
    tokens = np.flatnonzero(before[:, -2])
    columns = np.flatnonzero(np.any([head.W_O.any(axis=0) for head in layer.heads], axis=0))
    B, slopes, held = before[tokens, -2][:, None], before[tokens, -1][:, None], before[np.ix_(tokens, columns)]
    kept = np.minimum(held, up(B + GATES / slopes + gamma(16, u) * (held + B), ROUNDED_UP))
    after[np.ix_(tokens, columns)] = kept
    over = float((kept / B).max(initial=0))
    return after, over if math.isfinite(over) else math.inf
