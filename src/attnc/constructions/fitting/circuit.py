"""Deep programs on one token. Wires are affine in signals, and signals are inputs or outputs of heads.

The state token carries the signals that are still needed. For every level of heads an affine map places the keys. An
attention layer with a residual then writes the new signals into channels of their own, and the next level reads both.
`build_parts` makes the program of an expression whose parts have fitted heads, for `gates` and `compose`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from attnc.ir.building import AffineBuilder, Attending
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.numerics.arrays import Float
from attnc.targets.expressions.tree import to_text
from attnc.targets.parts.part import (
    Choice,
    Combination,
    Derivation,
    HeadClaim,
    Part,
    Source,
    T,
    Unary,
    in_order,
    operands_of,
)
from attnc.targets.target import Target

ONE = "one"
"""The channel of the state that holds the constant 1."""


@dataclass(frozen=True, eq=False)
class Signal:
    """An input (level 0), or an output of a head at its level."""

    name: str
    level: int


@dataclass(frozen=True, eq=False)
class Wire:
    """constant + Σ coefficient·signal. Adding and scaling wires costs no head."""

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
    """Signal m is Σ_k softmax_k(a_k·queries + c_k)·(v_km + V_km·carriers), with the numbers of `keys`."""

    signals: tuple[Signal, ...]
    queries: tuple[Wire, ...]
    keys: SoftHead[np.ndarray]  # its slopes multiply the queries, and its carried parts multiply the carriers
    carriers: tuple[Wire, ...]

    @property
    def name(self) -> str:
        return self.signals[0].name

    @property
    def key_channels(self) -> tuple[str, ...]:
        parts = (*(f"key{i}" for i in range(len(self.queries))), "bias")
        return tuple(f"{part}.{self.name}" for part in (*parts, *(f"value{m}" for m in range(len(self.signals)))))

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
        keys: SoftHead[np.ndarray],
        carriers: Sequence[Wire] | None = None,
        *,
        name: str = "head",
    ) -> tuple[Wire, ...]:
        """Add a head and return its outputs. Its keys carry the carriers, which are the queries by default."""
        carriers = () if keys.carried is None else queries if carriers is None else carriers
        level = 1 + max(wire.level for wire in (*queries, *carriers))
        label, columns = f"{name}#{len(self.heads)}", range(keys.num_outputs)
        signals = tuple(Signal(label if len(columns) == 1 else f"{label}.{m}", level) for m in columns)
        self.heads.append(CircuitHead(signals, tuple(queries), keys, tuple(carriers)))
        return tuple(Wire({signal: 1.0}) for signal in signals)

    def apply(
        self, keys: SoftHead[np.ndarray], query: Wire, carrier: Wire | None = None, *, name: str = "head"
    ) -> Wire:
        """Return A(query) or carrier·A(query), for a head A of one input and output. Its keys may carry the query."""
        if carrier is None:
            return self.head([query], keys, name=name)[0]
        assert keys.carried is None, "a key that carries its own query cannot carry another wire"
        carrying = SoftHead(keys.slopes, keys.offsets, np.zeros_like(keys.values), keys.values[:, :, None])
        return self.head([query], carrying, [carrier], name=name)[0]

    def build(self, outputs: Sequence[Wire], output_shape: tuple[int, ...], dtype: str) -> Program:
        """Return the program, with only the heads that the outputs need."""
        levels = self._needed(outputs)
        last_read: dict[Signal, int] = {s: len(levels) for wire in outputs for s in wire.terms}
        for number, heads in reversed(list(enumerate(levels))):
            for signal in {s for head in heads for s in head.reads}:
                last_read.setdefault(signal, number)
        state = {signal: f"in.{i}" for i, signal in enumerate(self.inputs)}  # the channel that carries each signal
        channels = tuple(state.values())
        tokens, layers = 1, list[Layer]()
        for number, heads in enumerate(levels):
            kept = [s for s in state if last_read.get(s, -1) >= number]
            place, attend = _level(number + 1, heads, state, kept, channels, tokens, dtype)
            layers += [place, attend]
            tokens, channels = place.weight.shape[0], attend.channels
            state = {s: channel_of(s) for s in (*kept, *(s for head in heads for s in head.signals))}
        names = [f"out.{j}" for j in range(len(outputs))]
        read = AffineBuilder(tokens, channels, 1, names)
        for name, wire in zip(names, outputs, strict=True):
            for signal, coefficient in wire.terms.items():
                read.link(0, name, 0, state[signal], coefficient)
            read.set(0, name, wire.constant)
        layers.append(read.build("read", dtype))
        return check(Program(tuple(layers), ((len(self.inputs),),), output_shape))

    def _needed(self, outputs: Sequence[Wire]) -> list[list[CircuitHead]]:
        """Return the heads that the outputs need, level by level. Empty levels are removed."""
        wanted = {s for wire in outputs for s in wire.terms}
        by_level: dict[int, list[CircuitHead]] = {}
        for head in reversed(self.heads):  # a head reads signals of earlier heads only
            if wanted.intersection(head.signals):
                wanted |= head.reads
                by_level.setdefault(head.signals[0].level, []).append(head)
        return [heads[::-1] for _, heads in sorted(by_level.items())]


def channel_of(signal: Signal) -> str:
    """Return the channel of the state that carries the signal."""
    return f"signal.{signal.name}"


def _level(
    number: int,
    heads: Sequence[CircuitHead],
    state: Mapping[Signal, str],
    kept: Sequence[Signal],
    channels_in: Sequence[str],
    tokens_in: int,
    dtype: str,
) -> tuple[Affine, Attention]:
    """Return the layers of one level. Token 0 is the state, and only its output is read.

    The keys of all heads lie side by side in every token.
    """
    made = [s for head in heads for s in head.signals]
    tokens = max(head.keys.num_keys for head in heads)
    channels = (*map(channel_of, (*kept, *made)), ONE, *(channel for head in heads for channel in head.key_channels))
    place = AffineBuilder(tokens_in, channels_in, tokens, channels)
    for signal in kept:
        place.link(0, channel_of(signal), 0, state[signal])
    place.set(0, ONE, 1.0)
    built = []
    for head in heads:
        keys = np.arange(head.keys.num_keys)
        for i, slopes in enumerate(head.keys.slopes.T):
            place.set(keys, f"key{i}.{head.name}", slopes)
        place.set(keys, f"bias.{head.name}", head.keys.offsets)
        for m in range(len(head.signals)):
            value, constant = f"value{m}.{head.name}", head.keys.values[:, m]
            linked: dict[Signal, np.ndarray] = {}
            moving = np.zeros((len(keys), 0)) if head.keys.carried is None else head.keys.carried[:, m]
            for carrier, carried in zip(head.carriers, moving.T, strict=True):
                constant = constant + carrier.constant * carried
                for signal, coefficient in carrier.terms.items():
                    linked[signal] = linked.get(signal, 0.0) + coefficient * carried
            for signal, coefficients in linked.items():
                place.link(keys, value, 0, state[signal], coefficients)
            place.set(keys, value, constant)
        built.append(_head(head, tokens, channels, dtype))
    return place.build(f"place{number}", dtype), Attention(f"attend{number}", tuple(built), channels, residual=True)


def _head(head: CircuitHead, tokens: int, channels: tuple[str, ...], dtype: str) -> Head:
    queries, keys = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
    for i, wire in enumerate(head.queries):
        queries |= {(channel_of(s), f"by{i}"): coefficient for s, coefficient in wire.terms.items()}
        queries[ONE, f"by{i}"] = wire.constant
        keys[f"key{i}.{head.name}", f"by{i}"] = 1.0
    queries[ONE, "constant"] = keys[f"bias.{head.name}", "constant"] = 1.0
    values = {(f"value{m}.{head.name}", s.name): 1.0 for m, s in enumerate(head.signals)}
    written = {(s.name, channel_of(s)): 1.0 for s in head.signals}
    mask = None
    if head.keys.num_keys < tokens:  # the tokens beyond are keys of other heads
        segments = np.where(np.arange(tokens) < head.keys.num_keys, EVERY_QUERY, 1).astype(np.int32)
        mask = Mask(np.zeros(tokens, np.int32), segments)
    return Attending(channels, channels, dtype, mask).head(queries, keys, values, written)


@dataclass(frozen=True, eq=False)
class PartFit:
    """A head A with A(scale·t + shift) within `error` of a function of t on [lo, hi]. Its keys may carry the query."""

    keys: SoftHead[np.ndarray]
    error: float
    scale: float = 1.0
    shift: float = 0.0
    lo: float = -math.inf
    hi: float = math.inf

    @property
    def num_anchors(self) -> int:
        return self.keys.num_keys

    def __call__(self, t: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        return self.keys((self.scale * t + self.shift)[:, None])[:, 0]

    def build(self, circuit: Circuit, argument: Wire, carrier: Wire | None, name: str) -> Wire:
        """Add the head to a circuit, and return A(argument) or carrier·A(argument)."""
        return circuit.apply(self.keys, argument * self.scale + self.shift, carrier, name=name)


Factors = Mapping[int, tuple[Unary, Part]]
"""id of a product → the factor that the weights of its head compute, and the factor that its keys carry."""


def build_parts(
    target: Target, outputs: Sequence[Part], factors: Factors, fits: Mapping[int, PartFit], dtype: str
) -> tuple[Program, Derivation]:
    """Return the program of these outputs, and a claim for every head. `fits` has one head per function or choice."""

    def operands(part: Part) -> tuple[Part, ...]:
        """Return the operands of a part. If the head of a product computes a factor, the factor needs no head."""
        function = factors[id(part)][0] if id(part) in factors else None
        return tuple(function.base if function is inner else inner for inner in operands_of(part))

    circuit = Circuit(target.box.names)
    wires: dict[int, Wire] = {}
    claims: dict[str, HeadClaim] = {}
    for part in in_order(outputs, operands):
        match part:
            case Source(index):
                wire = circuit.input(index)
            case Combination(terms, constant):
                wire = Wire({}, constant.value)
                for inner, coefficient in terms:
                    wire = wire + wires[id(inner)] * coefficient.value
            case Choice(name, chosen):
                (wire,) = circuit.head([wires[id(inner)] for inner in chosen], fits[id(part)].keys, name=name)
            case _:
                function, carried = (part, None) if isinstance(part, Unary) else factors[id(part)]
                carrier = None if carried is None else wires[id(carried)]
                name = "product" if function.tree is T else to_text(function.tree)
                wire = fits[id(function)].build(circuit, wires[id(function.base)], carrier, name)
                (signal,) = wire.terms
                claims[channel_of(signal)] = HeadClaim(part, function.base, function.tree, carried)
        wires[id(part)] = wire
    program = circuit.build([wires[id(part)] for part in outputs], target.output_shape, dtype)
    return program, Derivation(tuple(outputs), claims)
