"""The causal model behind a checkpoint: the exact content of every channel, and how far the checkpoint may be from it.

A channel holds function(t), with t affine in the variables and in earlier channels. The certificate proves for each
channel that its heads are within `error` of function(t̂) for every t̂ in `interval`, where t̂ is the argument as the
checkpoint has it. So intervals can follow the checkpoint through its channels: if t̂ lies in an interval T, the channel
lies in function(T) ± error. This holds too if some channels are replaced by values of another run, as long as every
argument stays in its proven interval. That gives the effect of an intervention, with a proven tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.proofs.proof import HeadProof
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Node, Variable, children, to_text, walk, with_children


@dataclass(frozen=True)
class CausalVariable:
    """A channel: function(t) of a combination t of variables and earlier channels, and a proven bound of its error."""

    name: str
    function: Expression
    argument: Expression
    interval: tuple[float, float]
    error: float

    @property
    def parents(self) -> tuple[str, ...]:
        """The variables and channels that it reads."""
        return used_by(self.argument)


@dataclass(frozen=True)
class Effect:
    """The exact output of an intervention, and how far the checkpoint may be from it.

    The tolerance is infinite where an argument may leave the interval on which its head is proved.
    """

    output: Float[np.ndarray, " batch"]
    tolerance: Float[np.ndarray, " batch"]


@dataclass(frozen=True)
class CausalModel:
    """The variables, the channels in the order of their computation, and the output."""

    variables: tuple[str, ...]
    channels: tuple[CausalVariable, ...]
    output: Expression
    output_error: float = 0.0
    """A bound of the rounding with which the output is read."""

    @classmethod
    def of(
        cls,
        heads: Sequence[HeadProof],
        output: str,
        variables: Sequence[str],
        errors: Mapping[str, float],
        output_error: float,
    ) -> CausalModel:
        """Read the model from the stages of a certificate. `errors` are by the names of heads."""
        found = []
        for head in heads:
            function = Expression.parse(head.function).with_variables(("t",))
            argument = Expression.parse(head.argument)
            found.append(CausalVariable(head.name, function, argument, head.interval, errors[head.name]))
        return cls(tuple(variables), tuple(found), Expression.parse(output), output_error)

    @property
    def parents_of_output(self) -> tuple[str, ...]:
        return used_by(self.output)

    def renamed(self, names: Mapping[str, str]) -> CausalModel:
        """Return the same model with other names of channels."""
        channels = tuple(
            replace(each, name=names[each.name], argument=_renamed(each.argument, names)) for each in self.channels
        )
        return replace(self, channels=channels, output=_renamed(self.output, names))

    @cached_property
    def expressions(self) -> dict[str, str]:
        """Every channel as an expression of the variables."""
        trees: dict[str, Node] = {name: Variable(name) for name in self.variables}
        for channel in self.channels:
            (argument,), (function,) = channel.argument.outputs, channel.function.outputs
            trees[channel.name] = _substituted(function, {"t": _substituted(argument, trees)})
        return {channel.name: to_text(trees[channel.name]) for channel in self.channels}

    def values(
        self,
        points: Float[np.ndarray, "batch variables"],
        patch: Mapping[str, Interval] | None = None,
        *,
        computed: bool = False,
    ) -> tuple[dict[str, Interval], Interval, np.ndarray]:
        """Enclose every channel, and the output, at points where some channels are replaced.

        With `computed` the enclosures hold for the checkpoint, and otherwise for exact arithmetic. The third result is
        False where an argument may leave its proven interval.
        """
        given, inside = patch or {}, np.ones(len(points), bool)
        casts = np.abs(points) * 2.0**-24 if computed else np.zeros_like(points)  # inputs become float32
        known = {name: Interval(x - r, x + r) for name, x, r in zip(self.variables, points.T, casts.T, strict=True)}
        for channel in self.channels:
            if channel.name in given:
                known[channel.name] = given[channel.name]
                continue
            t = _over(channel.argument, known, len(points))
            inside &= (channel.interval[0] <= t.lo) & (t.hi <= channel.interval[1])
            found = channel.function.ranges(Interval(t.lo[:, None], t.hi[:, None]), violations="infinite")[:, 0]
            if computed:
                found = found + Interval(np.full(len(points), -channel.error), np.full(len(points), channel.error))
            known[channel.name] = found
        out = _over(self.output, known, len(points))
        if computed and self.output_error:
            out = out + Interval(np.full(len(points), -self.output_error), np.full(len(points), self.output_error))
        return {channel.name: known[channel.name] for channel in self.channels}, out, inside

    def effect(
        self,
        clean: Float[np.ndarray, "batch variables"],
        corrupted: Float[np.ndarray, "batch variables"],
        channel: str | None = None,
    ) -> Effect:
        """Return the output on clean inputs if one channel is taken from the run on corrupted inputs.

        Without a channel it is the output on the clean inputs.
        """
        outputs, bad = [], np.zeros(len(clean), bool)
        for computed in (False, True):
            patch: dict[str, Interval] = {}
            if channel is not None:
                others, _, inside = self.values(corrupted, computed=computed)
                patch, bad = {channel: others[channel]}, bad | ~inside
            _, out, inside = self.values(clean, patch, computed=computed)
            outputs.append(out)
            bad |= ~inside
        exact, possible = outputs
        output = exact.mid
        tolerance = up(np.maximum(possible.hi - output, output - possible.lo), 2)
        return Effect(output, np.where(bad, np.inf, tolerance))


def used_by(expression: Expression) -> tuple[str, ...]:
    """Return the names in an expression, in the order of their appearance."""
    return tuple(dict.fromkeys(node.name for node in walk(expression.outputs) if isinstance(node, Variable)))


def _over(expression: Expression, known: Mapping[str, Interval], batch: int) -> Interval:
    names = used_by(expression)
    if not names:
        return expression.with_variables(("t",)).ranges(Interval.point(np.zeros((batch, 1))))[:, 0]
    lo, hi = (np.stack([getattr(known[name], end) for name in names], axis=1) for end in ("lo", "hi"))
    return expression.with_variables(names).ranges(Interval(lo, hi), violations="infinite")[:, 0]


def _substituted(node: Node, trees: Mapping[str, Node]) -> Node:
    if isinstance(node, Variable):
        return trees[node.name]
    return with_children(node, [_substituted(child, trees) for child in children(node)])


def _renamed(expression: Expression, names: Mapping[str, str]) -> Expression:
    trees = {name: Variable(names.get(name, name)) for name in used_by(expression)}
    outputs = tuple(_substituted(node, trees) for node in expression.outputs)
    return Expression.parse(", ".join(map(to_text, outputs)))
