"""A network as a prompt of `attnc.incontext.Interpreter`: its heads, one after the other, with a proven bound.

The heads are those of the network if their keys and values are constants, and are fitted anew from the expression
otherwise. An interpreter adds nothing up but the values of keys. So an output that is no single head, such as a sum, is
read by one more head, which computes t ↦ t.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from attnc.constructions.beyond.binomial import binomial
from attnc.constructions.beyond.compose import compose
from attnc.constructions.built import Progress
from attnc.errors import BoundNotMet, InputError
from attnc.exports.stock_layout import ONE, StockHead, StockNetwork, input_channel
from attnc.incontext.interpreter import EncodedHead, EncodedProgram
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY, Attention, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import OutOfTime, time_limit
from attnc.numerics.rounding import up
from attnc.proofs.observed import observed_error
from attnc.proofs.prover import PROOF_SECONDS, ProofRequest
from attnc.proofs.provers import best_proof
from attnc.stock.heads import Combination, stock_network
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.parts.part import Derivation, HeadClaim, T, Unary
from attnc.targets.target import Target

READING_SHARE = 0.125
"""The share of eps that the heads which read outputs may use. Each has one or two keys more than with the whole."""
LEAST_EPS_OF_READER = 1e-12
"""Least error of a head that reads an output, relative to its range: below it float64 has few digits left."""


def encoded_program(
    target: Target,
    program: Program,
    derivation: Derivation | None,
    eps: float,
    progress: Progress | None = None,
) -> EncodedProgram:
    """Return a network as a prompt. Its bound is proved from the encoded heads.

    Raises
    ------
    InputError
        If the network cannot be encoded. The message gives the reason.
    BoundNotMet
        If nothing can be proved about the encoded heads.
    """
    if len(target.input_shapes) != 1 or len(target.input_shapes[0]) != 1 or not target.box.is_bounded:
        raise InputError(
            f"{target.describe()} takes inputs of shapes {target.input_shapes} on {target.box}, and a prompt encodes "
            "functions of one vector on a bounded box: compile a function of the entries, f(x, y, …), on such a box"
        )
    share = (1 - READING_SHARE) * eps
    try:
        network = stock_network(program, target.box)
    except InputError as error:
        if target.expression is None:
            raise InputError(
                f"the network cannot be encoded as it is: {error}. Without an expression it cannot be fitted anew."
            ) from None
        built = compose(target, eps=share, constant_keys=True, progress=progress)
        network, derivation = stock_network(built.program, target.box), built.derivation
    encoding = _Encoding(network, target, derivation, READING_SHARE * eps)
    heads = encoding.heads()
    bound = _proved(heads, target, encoding.derived, eps, progress)
    if bound is None:
        raise BoundNotMet(
            f"no bound of {target.describe()} on {target.box} as a prompt could be proved. Choose a larger eps or a "
            "smaller box.",
            eps=eps,
        )
    slope = math.inf
    values = np.array([[-math.inf, math.inf]] * len(network.outputs))
    if isinstance(target, ExpressionTarget):
        cell = Interval(target.box.lo[None], target.box.hi[None])
        ranges, gradients = target.expression.ranges_and_gradients(cell, violations="infinite")
        values = np.column_stack([ranges.lo[0], ranges.hi[0]])
        slope = float(up(np.sqrt(up((gradients.mag[0] ** 2).sum(axis=1), target.box.d + 1)), 2).max())
    return EncodedProgram(target.describe(), target.box, heads, len(network.outputs), bound, values, slope)


class _Encoding:
    """The channels of a network get the names of an interpreter's, and its outputs heads that read them."""

    def __init__(self, network: StockNetwork, target: Target, derivation: Derivation | None, eps: float) -> None:
        self.network, self.target, self.derivation, self.eps = network, target, derivation, eps
        self.names = {input_channel(name): f"in.{i}" for i, name in enumerate(network.box.names)}
        self.direct = self._direct()
        self.names |= {channel: f"out.{j}" for j, channel in self.direct.items()}
        passed = [channel for head in network.heads for channel in head.writes if channel not in self.names]
        self.names |= {channel: f"signal.{m}" for m, channel in enumerate(passed)}

    def heads(self) -> tuple[EncodedHead, ...]:
        """Return all heads in an order in which they can run."""
        made = [self._encoded(head) for head in sorted(self.network.heads, key=lambda head: head.layer)]
        ranges = self._ranges()
        for j, output in enumerate(self.network.outputs):
            if j not in self.direct:
                made.append(self._reader(j, output, ranges[j]))
        return tuple(made)

    @property
    def derived(self) -> Derivation | None:
        """The derivation of the encoded heads, if the network has one."""
        if self.derivation is None:
            return None
        claims = {self.names[channel]: claim for channel, claim in self.derivation.heads.items()}
        outputs = []
        for j, part in enumerate(self.derivation.outputs):
            if j not in self.direct:
                claims[f"out.{j}"] = HeadClaim(Unary(part, T), part, T)
            outputs.append(claims[f"out.{j}"].part)
        return Derivation(tuple(outputs), claims)

    def _direct(self) -> dict[int, str]:
        """Return the outputs that are one channel which nothing else reads, with this channel."""
        written = {channel for head in self.network.heads for channel in head.writes}
        uses = Counter(
            channel
            for combination in (*(q for head in self.network.heads for q in head.queries), *self.network.outputs)
            for channel in combination
        )
        found = {}
        for j, output in enumerate(self.network.outputs):
            ((channel, coefficient),) = output.items() if len(output) == 1 else [("", 0.0)]
            if channel in written and coefficient == 1 and uses[channel] == 1:
                found[j] = channel
        return found

    def _encoded(self, head: StockHead) -> EncodedHead:
        return _through(head.keys, head.queries, self.names, tuple(self.names[channel] for channel in head.writes))

    def _reader(self, j: int, output: Mapping[str, float], ends: tuple[float, float]) -> EncodedHead:
        """Return the head that computes t ↦ t on the range of an output."""
        if not output.keys() - {ONE}:
            constant = SoftHead(np.zeros((1, 0)), np.zeros(1), np.array([[output.get(ONE, 0.0)]]))
            return EncodedHead((), constant, (f"out.{j}",))
        lo, hi = ends
        line = ExpressionTarget(Expression.parse("t"), Box.parse({"t": (lo, hi)}))
        built = binomial(line, eps=max(self.eps, LEAST_EPS_OF_READER * (hi - lo)))
        (head,) = stock_network(built.program, line.box).heads
        queries = tuple(_scaled(query, output, input_channel("t")) for query in head.queries)
        return _through(head.keys, queries, self.names, (f"out.{j}",))

    def _ranges(self) -> list[tuple[float, float]]:
        """Return an interval that holds each output, a little wider than needed."""
        hulls = {ONE: (1.0, 1.0)}
        for name, lo, hi in zip(self.network.box.names, self.network.box.lo, self.network.box.hi, strict=True):
            hulls[input_channel(name)] = float(lo), float(hi)
        for head in self.network.heads:
            for column, channel in enumerate(head.writes):
                values = head.keys.values[:, column]
                hulls[channel] = float(values.min()), float(values.max())
        found = []
        for output in self.network.outputs:
            ends = [sorted(c * end for end in hulls[channel]) for channel, c in output.items()]
            found.append((sum(lo for lo, _ in ends), sum(hi for _, hi in ends)))
        if isinstance(self.target, ExpressionTarget):
            box = self.network.box
            ranges = self.target.enclosure(Interval(box.lo[None], box.hi[None]))
            known = zip(found, ranges.lo[0].tolist(), ranges.hi[0].tolist(), strict=True)
            found = [(max(lo, below), min(hi, above)) for (lo, hi), below, above in known]
        slack = [max(1.0, abs(lo), abs(hi)) * 2.0**-10 for lo, hi in found]
        return [(lo - more, hi + more) for (lo, hi), more in zip(found, slack, strict=True)]


def _scaled(query: Mapping[str, float], output: Mapping[str, float], name: str) -> Combination:
    """Return the combination that a query is if the channel `name` stands for `output`."""
    factor = query.get(name, 0.0)
    found = {channel: factor * c for channel, c in output.items()}
    found[ONE] = found.get(ONE, 0.0) + query.get(ONE, 0.0)
    return found


def _through(
    keys: SoftHead[np.ndarray], queries: Sequence[Mapping[str, float]], names: dict[str, str], writes: tuple[str, ...]
) -> EncodedHead:
    """Return a head whose queries are combinations of channels as one that reads the channels themselves."""
    channels = sorted({channel for query in queries for channel in query if channel != ONE})
    mixed = np.array([[query.get(channel, 0.0) for channel in channels] for query in queries])
    constants = np.array([query.get(ONE, 0.0) for query in queries])
    offsets = keys.offsets + keys.slopes @ constants
    soft = SoftHead(keys.slopes @ mixed, offsets - offsets.max(), keys.values)
    return EncodedHead(tuple(names[channel] for channel in channels), soft, writes)


def plain_program(heads: tuple[EncodedHead, ...], num_inputs: int, num_outputs: int) -> Program:
    """Return encoded heads as a program with one layer of attention for each. Provers take it apart stage by stage.

    Token 0 holds the state, and is hidden as a key. An affine map before each layer places the keys of its head.
    """
    inputs = tuple(f"in.{i}" for i in range(num_inputs))
    state, tokens, channels, layers = inputs, 1, inputs, list[Layer]()
    for t, head in enumerate(heads, 1):
        own = (*(f"slope.{name}" for name in head.reads), "offset", *(f"value.{name}" for name in head.writes))
        after = (*state, *head.writes)
        place = AffineBuilder(tokens, channels, 1 + head.keys.num_keys, (*after, ONE, *own))
        place.copy(0, 0, state)
        place.set(0, ONE, 1.0)
        keys = np.arange(1, 1 + head.keys.num_keys)
        columns = np.column_stack([head.keys.slopes, head.keys.offsets, head.keys.values])
        for name, column in zip(own, columns.T, strict=True):
            place.set(keys, name, column)
        state, tokens, channels = after, 1 + head.keys.num_keys, (*after, ONE, *own)
        seen = np.full(tokens, EVERY_QUERY, np.int32)
        seen[0] = 1
        queries = {(name, f"slope.{name}"): 1.0 for name in head.reads} | {(ONE, "offset"): 1.0}
        values = {(f"value.{name}", name): 1.0 for name in head.writes}
        made = Attending(channels, channels, "float64", Mask(np.zeros(tokens, np.int32), seen)).head(
            queries, {(k, k): 1.0 for _, k in queries}, values, {(name, name): 1.0 for name in head.writes}
        )
        layers += [place.build(f"place{t}"), Attention(f"step{t}", (made,), channels, residual=True)]
    outputs = {f"out.{j}": f"out.{j}" for j in range(num_outputs)}
    layers.append(reading("answer", tokens, channels, [0], outputs, "float64"))
    return check(Program(tuple(layers), ((num_inputs,),), (num_outputs,)))


def _proved(
    heads: tuple[EncodedHead, ...],
    target: Target,
    derivation: Derivation | None,
    eps: float,
    progress: Progress | None,
) -> float | None:
    """Return a bound of |heads − target| that the prover derives from the heads, or None."""
    program = replace(plain_program(heads, target.box.d, target.num_outputs), output_shape=target.output_shape)

    def outputs(points: np.ndarray) -> np.ndarray:
        return program(points).reshape(len(points), -1)

    observed = observed_error(outputs, target, program.num_anchors, math.inf)
    request = ProofRequest(eps=eps, observed=observed, progress=progress, derivation=derivation)
    with contextlib.suppress(OutOfTime), time_limit(counted=PROOF_SECONDS):
        proof = best_proof(program, target, request)
        if proof is not None and math.isfinite(proof.bound):
            return proof.bound
    return None
