"""Deep programs on one token: wires are affine in signals, signals are inputs or outputs of heads.

The state token carries the signals that are still needed. For every level of heads an affine map places the keys, an
attention layer with a residual writes the new signals into channels of their own, and the next level reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check

if TYPE_CHECKING:
    from jaxtyping import Float

ONE = "one"
"""The channel of the state that holds the constant 1."""


@dataclass(frozen=True, eq=False)
class Signal:
    """An input (level 0), or an output of a head at its level."""

    name: str
    level: int


@dataclass(frozen=True, eq=False)
class Wire:
    """constant + Σ coefficient·signal. Wires add and scale; whatever is affine costs nothing."""

    terms: dict[Signal, float] = field(default_factory=dict)
    constant: float = 0.0

    @property
    def level(self) -> int:
        return max((signal.level for signal in self.terms), default=0)

    def __add__(self, other: Wire | float) -> Wire:
        if not isinstance(other, Wire):
            return Wire(self.terms, self.constant + other)
        terms = dict(self.terms)
        for signal, coefficient in other.terms.items():
            terms[signal] = terms.get(signal, 0.0) + coefficient
        return Wire({s: c for s, c in terms.items() if c != 0}, self.constant + other.constant)

    def __mul__(self, factor: float) -> Wire:
        return Wire({s: c * factor for s, c in self.terms.items() if c * factor != 0}, self.constant * factor)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Wire:
        return self * -1.0

    def __sub__(self, other: Wire | float) -> Wire:
        return self + (-other)

    def __rsub__(self, other: float) -> Wire:
        return -self + other


@dataclass(frozen=True, eq=False)
class CircuitHead:
    """Signal m is Σ_k softmax_k(a_k·queries + c_k)·(v_km + Σ_i carried_ikm·carriers_i)."""

    signals: tuple[Signal, ...]
    queries: tuple[Wire, ...]
    keys: SoftHead[np.ndarray]  # of the queries, with constant values
    carriers: tuple[Wire, ...]
    carried: Float[np.ndarray, "carriers p signals"]

    @property
    def name(self) -> str:
        return self.signals[0].name

    @property
    def level(self) -> int:
        return self.signals[0].level

    @property
    def p(self) -> int:
        return self.keys.num_keys

    @cached_property
    def reads(self) -> set[Signal]:
        return {signal for wire in (*self.queries, *self.carriers) for signal in wire.terms}


class Circuit:
    """Collects heads, and builds the program that runs them level by level."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.inputs = tuple(Signal(name, 0) for name in inputs)
        self.heads: list[CircuitHead] = []

    def input(self, index: int) -> Wire:
        return Wire({self.inputs[index]: 1.0})

    def head(
        self,
        queries: Sequence[Wire],
        slopes: Float[np.ndarray, "p queries"],
        offsets: Float[np.ndarray, " p"],
        values: Float[np.ndarray, "p signals"],
        *,
        carrier: Wire | None = None,
        carried: Float[np.ndarray, "p signals"] | None = None,
        name: str = "head",
    ) -> tuple[Wire, ...]:
        """A head over p keys; its outputs, one for each column of `values`."""
        carriers = () if carrier is None or carried is None else (carrier,)
        stacked = np.zeros((0, *values.shape)) if carried is None or not carriers else carried[None]
        return self._add(queries, slopes, offsets, values, carriers, stacked, name)

    def select(self, scores: Sequence[Wire], values: Sequence[Wire], *, name: str = "select") -> Wire:
        """Σ_k softmax_k(scores)·values_k: every key has a score and a value of its own."""
        p = len(scores)
        slopes, carried = np.eye(p), np.eye(p)[:, :, None]
        (wire,) = self._add(scores, slopes, np.zeros(p), np.zeros((p, 1)), tuple(values), carried, name)
        return wire

    def _add(
        self,
        queries: Sequence[Wire],
        slopes: np.ndarray,
        offsets: np.ndarray,
        values: np.ndarray,
        carriers: tuple[Wire, ...],
        carried: np.ndarray,
        name: str,
    ) -> tuple[Wire, ...]:
        level = 1 + max(wire.level for wire in (*queries, *carriers))
        columns = values.shape[1]
        names = [f"{name}#{len(self.heads)}" + (f".{m}" if columns > 1 else "") for m in range(columns)]
        signals = tuple(Signal(label, level) for label in names)
        self.heads.append(CircuitHead(signals, tuple(queries), SoftHead(slopes, offsets, values), carriers, carried))
        return tuple(Wire({signal: 1.0}) for signal in signals)

    def apply(self, keys: SoftHead[np.ndarray], query: Wire, *, name: str = "head") -> Wire:
        """A(query), for a head A of one input and one output, whose keys may carry the query."""
        carried = None if keys.carried is None else keys.carried[:, :, 0]
        carrier = None if carried is None else query
        (wire,) = self.head(
            [query], keys.slopes, keys.offsets, keys.values, carrier=carrier, carried=carried, name=name
        )
        return wire

    def gate(self, keys: SoftHead[np.ndarray], query: Wire, carrier: Wire, *, name: str = "gate") -> Wire:
        """carrier·A(query): the key tokens carry the carrier."""
        constant = np.zeros_like(keys.values)
        (wire,) = self.head(
            [query], keys.slopes, keys.offsets, constant, carrier=carrier, carried=keys.values, name=name
        )
        return wire

    def build(self, outputs: Sequence[Wire], output_shape: tuple[int, ...], dtype: str) -> Program:
        """Only the heads that the outputs need."""
        levels = self._needed(outputs)
        last_read: dict[Signal, int] = {s: len(levels) for wire in outputs for s in wire.terms}
        for number, heads in reversed(list(enumerate(levels))):
            for signal in {s for head in heads for s in head.reads}:
                last_read.setdefault(signal, number)
        state: list[Signal] = list(self.inputs)
        channels_in = [f"in.{i}" for i in range(len(state))]
        tokens, layers = 1, list[Layer]()
        for number, heads in enumerate(levels):
            kept = [s for s in state if last_read.get(s, -1) >= number]
            place, attend = _level(number + 1, heads, state, kept, channels_in, tokens, dtype)
            layers += [place, attend]
            tokens, channels_in = place.weight.shape[0], list(attend.channels)
            state = [*kept, *(s for head in heads for s in head.signals)]
        layers.append(_read(outputs, state, channels_in, tokens, dtype))
        return check(Program(tuple(layers), ((len(self.inputs),),), output_shape))

    def _needed(self, outputs: Sequence[Wire]) -> list[list[CircuitHead]]:
        """The heads that the outputs need, level by level; levels that nothing needs are closed up."""
        makers = {signal: head for head in self.heads for signal in head.signals}
        wanted = [s for wire in outputs for s in wire.terms]
        needed: dict[int, CircuitHead] = {}
        while wanted:
            head = makers.get(wanted.pop())
            if head is not None and id(head) not in needed:
                needed[id(head)] = head
                wanted.extend(head.reads)
        chosen = [head for head in self.heads if id(head) in needed]
        return [[head for head in chosen if head.level == level] for level in sorted({head.level for head in chosen})]


def channel_of(signal: Signal) -> str:
    """The channel of the state that carries it."""
    return f"signal.{signal.name}"


def _level(
    number: int,
    heads: Sequence[CircuitHead],
    state: Sequence[Signal],
    kept: Sequence[Signal],
    channels_in: Sequence[str],
    tokens_in: int,
    dtype: str,
) -> tuple[Affine, Attention]:
    """Token 0 is the state and the only query that is read; the keys of all heads lie side by side in every token."""
    names_in = {signal: channels_in[i] for i, signal in enumerate(state)}
    made = [s for head in heads for s in head.signals]
    tokens = max(head.p for head in heads)
    key_channels = [
        f"{part}.{head.name}"
        for head in heads
        for part in (
            *(f"key{i}" for i in range(len(head.queries))),
            "bias",
            *(f"value{m}" for m in range(len(head.signals))),
        )
    ]
    channels = (*(channel_of(s) for s in kept), *(channel_of(s) for s in made), ONE, *key_channels)
    place = AffineBuilder(tokens_in, channels_in, tokens, channels)
    for signal in kept:
        place.link(0, channel_of(signal), 0, names_in[signal])
    place.set(0, ONE, 1.0)
    built = []
    for head in heads:
        keys = np.arange(head.p)
        for i, slopes in enumerate(head.keys.slopes.T):
            place.set(keys, f"key{i}.{head.name}", slopes)
        place.set(keys, f"bias.{head.name}", head.keys.offsets)
        for m in range(len(head.signals)):
            value, constant = f"value{m}.{head.name}", head.keys.values[:, m]
            linked: dict[Signal, np.ndarray] = {}
            for carrier, carried in zip(head.carriers, head.carried[:, :, m], strict=True):
                constant = constant + carrier.constant * carried
                for signal, coefficient in carrier.terms.items():
                    linked[signal] = linked.get(signal, 0.0) + coefficient * carried
            for signal, coefficients in linked.items():
                place.link(keys, value, 0, names_in[signal], coefficients)
            place.set(keys, value, constant)
        built.append(_head(head, tokens, channels, dtype))
    return place.build(f"place{number}", dtype), Attention(f"attend{number}", tuple(built), channels, residual=True)


def _head(head: CircuitHead, tokens: int, channels: tuple[str, ...], dtype: str) -> Head:
    scores = (*(f"by{i}" for i in range(len(head.queries))), "constant")
    queries = {(ONE, "constant"): 1.0}
    for i, wire in enumerate(head.queries):
        queries |= {(channel_of(s), f"by{i}"): coefficient for s, coefficient in wire.terms.items()}
        queries |= {(ONE, f"by{i}"): wire.constant}
    keys = {(f"key{i}.{head.name}", f"by{i}"): 1.0 for i in range(len(head.queries))}
    keys |= {(f"bias.{head.name}", "constant"): 1.0}
    values = {(f"value{m}.{head.name}", s.name): 1.0 for m, s in enumerate(head.signals)}
    names = [s.name for s in head.signals]
    mask = None
    if head.p < tokens:  # the tokens beyond are keys of other heads
        segments = np.where(np.arange(tokens) < head.p, EVERY_QUERY, 1).astype(np.int32)
        mask = Mask(np.zeros(tokens, np.int32), segments)
    return Head(
        projection(channels, scores, queries, dtype),
        projection(channels, scores, keys, dtype),
        projection(channels, names, values, dtype),
        projection(names, channels, {(s.name, channel_of(s)): 1.0 for s in head.signals}, dtype),
        mask,
    )


def _read(
    outputs: Sequence[Wire], state: Sequence[Signal], channels_in: Sequence[str], tokens_in: int, dtype: str
) -> Affine:
    names = [f"out.{j}" for j in range(len(outputs))]
    read = AffineBuilder(tokens_in, channels_in, 1, names)
    for name, wire in zip(names, outputs, strict=True):
        for signal, coefficient in wire.terms.items():
            read.link(0, name, 0, channels_in[list(state).index(signal)], coefficient)
        read.set(0, name, wire.constant)
    return read.build("read", dtype)
