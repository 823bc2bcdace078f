"""The exact numbers in the channels of a network, also where one of them is replaced by its number at another point.

The derivation of a composition states the part of the expression that every head computes: the certificate has it in
its stages, and `compile` keeps it. The numbers of the channels follow from it without the weights, by evaluating the
parts layer by layer. A replaced channel holds the number of the other point, for all layers after it. A network of one
attention layer whose keys are constant needs no derivation, because its outputs are functions of its queries.

Nothing is guessed: where the derivation does not state the number of a channel, there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.layers import Affine, Attention, Head
from attnc.numerics.arrays import Float
from attnc.targets.expressions.expression import Expression
from attnc.targets.parts.part import Combination, Derivation, Part, Source, function_of_t
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes

if TYPE_CHECKING:
    from attnc.network import Network

STATE = "signal."
"""The beginning of the channels of a composition that hold an input or the output of a head."""

Numbers = dict[str, np.ndarray]
"""The numbers of the points in each channel of the state."""


class NotStatedError(Exception):
    """The derivation does not state the number of a channel."""


@dataclass(frozen=True, eq=False)
class ExactOutputs:
    """The exact outputs (batch, outputs) with a channel replaced.

    `is_inside` tells whether the arguments of all heads are in the intervals of the certificate's stages; None if it
    has no stages.
    """

    outputs: Float[np.ndarray, "batch outputs"]
    is_inside: bool | None


class ExactChannels:
    """The exact numbers in the channels of a network that has an expression."""

    def __init__(self, network: Network) -> None:
        self._network, self._layers = network, network.program.unrolled_layers
        self._variables = network.variables
        stages = network.certificate.by_heads
        self._intervals = {} if stages is None else {head.channel: head.interval for head in stages.heads}
        self._is_inside: bool | None = None  # of the last walk

    @cached_property
    def _expression(self) -> Expression | None:
        text = self._network.expression
        return None if text is None else Expression.parse(text).with_variables(self._variables)

    @cached_property
    def _derivation(self) -> Derivation | None:
        return self._network.known_derivation

    @cached_property
    def _symbols(self) -> dict[tuple[str, int], str]:
        """The channel of the state that holds a part: by the index of an input, or by the id of a head's part."""
        assert self._derivation is not None
        inputs = {("input", i): STATE + name for i, name in enumerate(self._variables)}
        return inputs | {("head", id(claim.part)): channel for channel, claim in self._derivation.heads.items()}

    def holds(self, channel: str) -> str | None:
        """Return the exact content of a channel of the state as an expression of the variables, if it is known."""
        if channel.startswith(STATE) and channel.removeprefix(STATE) in self._variables:
            return channel.removeprefix(STATE)
        if self._derivation is None or channel not in self._derivation.heads:
            return None
        ranges = PartRanges(sub_boxes(self._network.box), self._variables)
        return ranges.describe(self._derivation.heads[channel].part)

    def outputs(
        self,
        points: Float[np.ndarray, "batch d"],
        replaced: tuple[str, str] | None,
        other: Float[np.ndarray, "batch d"],
    ) -> ExactOutputs | None:
        """Return the outputs at `points` if the channel `replaced` (layer, channel) has its numbers at `other`."""
        if self._expression is None:
            return None
        if replaced is not None and replaced[0] == self._layers[-1].name:
            return self._with_outputs_of(points, replaced[1], other)
        if replaced is not None and self._is_whole_state(replaced[0]):
            return ExactOutputs(self._expression(other), None)
        try:
            if replaced is None:
                return ExactOutputs(self._expression(points), None)
            if self._derivation is not None:
                source = self._walk(other, None, {})
                found = self._walk(points, replaced, source)
                columns = [self._value(part, found) for part in self._derivation.outputs]
                return ExactOutputs(np.stack(columns, axis=1), self._is_inside)
            return ExactOutputs(self._expression(self._with_queries_of(points, replaced, other)), None)
        except NotStatedError:
            return None

    def _is_whole_state(self, layer: str) -> bool:
        """Return whether all outputs are functions of the one channel that the state has after a layer."""
        is_alone = len(self._network.program.input_shapes) == 1  # otherwise the memory moves, too
        return is_alone and next(len(each.channels) == 1 for each in self._layers if each.name == layer)

    def _with_outputs_of(self, points: np.ndarray, channel: str, other: np.ndarray) -> ExactOutputs | None:
        assert self._expression is not None
        channels, outputs = self._layers[-1].channels, self._expression(points)
        if len(channels) != outputs.shape[1]:
            return None
        column = channels.index(channel)
        outputs[:, column] = self._expression(other)[:, column]
        return ExactOutputs(outputs, None)

    def _with_queries_of(self, points: np.ndarray, replaced: tuple[str, str], other: np.ndarray) -> np.ndarray:
        """Return the points with one variable of the others, if the channel holds it and only queries read it."""
        match self._layers:
            case (Affine() as first, Attention(residual=False, cross=False) as attend, *rest) if all(
                isinstance(layer, Affine) for layer in rest
            ):
                read = {channel for head in attend.heads for channel in _read(first, head, "W_K", "W_V")}
                moving = {first.channels[int(column)] for column in first.weight.index[:, 1]}
                if replaced[0] != first.name or read & moving:
                    raise NotStatedError
                index = first.weight.index[first.weight.index[:, 1] == first.channels.index(replaced[1])]
                variables = np.unique(index[:, 3])
                if len(variables) != 1 or len(self._of_variable(first, int(variables[0]))) != 1:
                    raise NotStatedError
                mixed = points.copy()
                mixed[:, variables[0]] = other[:, variables[0]]
                return mixed
        raise NotStatedError

    def _of_variable(self, layer: Affine, variable: int) -> set[int]:
        """Return the channels that a variable moves."""
        return set(layer.weight.index[layer.weight.index[:, 3] == variable, 1].tolist())

    def _walk(self, points: np.ndarray, replaced: tuple[str, str] | None, source: Numbers) -> Numbers:
        """Return the numbers of all channels of the state after the last attention layer.

        `source` has the numbers that replace those of a channel. An affine map before an attention layer copies the
        state for the queries and makes the values. So a channel that is replaced after it changes the queries alone.
        """
        state = {STATE + name: points[:, i] for i, name in enumerate(self._variables)}
        self._is_inside = True if self._intervals else None
        if len(self._layers) % 2 == 0:
            raise NotStatedError
        levels = zip(self._layers[:-1:2], self._layers[1::2], self._layers[2::2], strict=True)
        for place, attend, after in levels:
            if not (isinstance(place, Affine) and isinstance(attend, Attention) and attend.residual):
                raise NotStatedError
            before, state = state, dict(state)
            replaced_here = replaced[1] if replaced is not None and replaced[0] == place.name else None
            if replaced_here in state:
                state[replaced_here] = source[replaced_here]
            found: Numbers = {}
            for head in attend.heads:
                channels = [attend.channels[i] for i in np.flatnonzero(head.W_O.any(axis=0))]
                for channel in channels:
                    found[channel] = self._written(channel, place, head, state, before, replaced_here, source)
            if replaced_here is not None and replaced_here not in state:
                self._require_read_as_values(place, attend, replaced_here)
            state |= found
            if replaced is not None and replaced[0] == attend.name:
                if replaced[1] in state:
                    state[replaced[1]] = source[replaced[1]]
                elif not isinstance(after, Affine) or attend.channels.index(replaced[1]) in after.weight.index[:, 3]:
                    raise NotStatedError
        return state

    def _written(
        self,
        channel: str,
        place: Affine,
        head: Head,
        state: Numbers,
        before: Numbers,
        replaced: str | None,
        source: Numbers,
    ) -> np.ndarray:
        """Return the numbers that a head writes into a channel."""
        assert self._derivation is not None
        claim = self._derivation.heads.get(channel)
        if claim is None:
            raise NotStatedError
        argument = self._value(claim.argument, state)
        if channel in self._intervals:
            lo, hi = self._intervals[channel]
            self._is_inside = bool(self._is_inside) and bool(((argument >= lo) & (argument <= hi)).all())
        values = function_of_t(claim.tree)(argument[:, None])[:, 0]
        is_replaced = replaced in _read(place, head, "W_V")
        if claim.carrier is not None:
            return values * self._value(claim.carrier, source if is_replaced else before)
        moving = {place.channels[int(column)] for column in place.weight.index[:, 1]}
        carries = bool(moving & set(_read(place, head, "W_V")))  # the argument itself, from before the affine map
        if carries and (is_replaced or not np.array_equal(argument, self._value(claim.argument, before))):
            raise NotStatedError
        return values

    def _require_read_as_values(self, place: Affine, attend: Attention, channel: str) -> None:
        """Raise NotStatedError if a head reads a channel besides the state as a query or key."""
        if any(channel in _read(place, head, "W_Q", "W_K") for head in attend.heads):
            raise NotStatedError

    def _value(self, part: Part, state: Numbers) -> np.ndarray:
        """Return the numbers of a part: those of its channel, or of the combination of channels that it is."""
        key = ("input", part.index) if isinstance(part, Source) else ("head", id(part))
        if self._symbols.get(key) in state:
            return state[self._symbols[key]]
        if not isinstance(part, Combination):
            raise NotStatedError
        total = np.full(len(next(iter(state.values()))), part.constant.value)
        for inner, coefficient in part.terms:
            if coefficient.value != 0:
                total = total + coefficient.value * self._value(inner, state)
        return total


def _read(layer: Affine, head: Head, *names: str) -> list[str]:
    """Return the channels that these matrices of a head read from the state after a layer."""
    rows = np.any([head.matrices[name].any(axis=1) for name in names], axis=0)
    return [layer.channels[i] for i in np.flatnonzero(rows)]
