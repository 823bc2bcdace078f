"""The claims of a staged proof: every channel that attention writes is carrier·g(t), with t affine in the state.

The construction of a composition provides its derivation. The derivations of a ReLU network and of truncated linear
functions follow from the target. The scales of their units are read off the weights. Nothing is taken on trust: each
claim is proved from the weights. That the claims together are the target is checked (`check_derivation`), or follows
because they are built from it.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType, NoneType
from typing import ClassVar

import numpy as np

from attnc.errors import ExpressionError, ProgramError
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, down, gamma, up
from attnc.proofs.margins import RANGE_ROOM
from attnc.proofs.proof import HeadProof
from attnc.proofs.staged.lines import Channel, ratios
from attnc.proofs.stages.extraction import ProgramStage, StateForm
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.canonical import equivalent
from attnc.targets.expressions.coefficient import UNIT, ZERO, Coefficient
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call, Negate, Node, Number, Product, Sum, Variable, is_constant, to_text
from attnc.targets.linear import ReLUNetwork, TruncatedLinear, affine_range, affine_text, exact_text, free_letter
from attnc.targets.parts.part import (
    Combination,
    Derivation,
    HeadClaim,
    Multiply,
    Part,
    Source,
    T,
    Unary,
    combination,
    in_order,
    operands_of,
)
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes
from attnc.targets.target import Target

U = UNIT_ROUNDOFF["float64"]
MAX_CLIP_ANCHORS, CLIP_LEAVES = 4000, 4
"""Maximum number of anchors of truncated linear functions that are proved. A clip takes about two leaves per anchor,
and CLIP_LEAVES times as many if several heads write it. With more anchors the checker would need minutes."""
MAX_SLOPES = 2**26
"""The largest number of slopes of the scores of all clips that are read one by one: they take 512 MB."""
FEWEST_ANCHORS = 3
"""The spacing of a clip cannot be read off fewer anchors."""
APPROXIMATION = "approximation"


class NotBoundedError(Exception):
    """The range of a part of the target is not known."""


@dataclass(frozen=True, eq=False)
class State:
    """The channels between two stages, each with the name of the input or head in it, its size and its error."""

    names: tuple[str, ...]
    sizes: Float[np.ndarray, " channels"]  # of the exact number: |carrier|·|g|, which is also the checker's bound
    errors: Float[np.ndarray, " channels"]  # for any signs of the errors before
    passing: Float[np.ndarray, " channels"]  # the part of the errors that began when channels were passed on

    @property
    def reach(self) -> Float[np.ndarray, " channels"]:
        """The largest absolute value of every channel, as computed."""
        return up(self.sizes + self.errors)

    def bounded(self) -> State:
        """Return the state itself. Raise NotBoundedError if a channel may be infinite."""
        if not np.isfinite(self.reach).all():
            raise NotBoundedError
        return self


@dataclass(frozen=True, eq=False)
class Stated:
    """A combination of the state whose exact value is in [lo, hi], and its text in the names of the state."""

    form: StateForm
    lo: float
    hi: float
    text: str
    known_as: str | None = None  # an equal expression of the variables, if its range is narrower
    is_input: bool = False  # it is an input, and its range is exact

    @property
    def size(self) -> float:
        return max(abs(self.lo), abs(self.hi))


@dataclass(frozen=True, eq=False)
class ChannelClaim:
    """The heads of channel `output` of a stage compute carrier·function(t) at t = argument.

    Beyond `limit`, which no exact t exceeds, the function is constant.
    """

    output: int
    name: str
    term: str  # the term of the ledger for its error
    function: Node
    argument: Stated
    carrier: Stated | None = None
    limit: float = math.inf
    wording: str | None = None  # the text of the function, if it differs from that of its tree

    @property
    def function_text(self) -> str:
        return to_text(self.function) if self.wording is None else self.wording


class Claims(abc.ABC):
    """The claims of a derivation, stage by stage. An object is used for one walk through a program."""

    target: ClassVar[type[Target]]
    derivation: ClassVar[type]
    """The types of the target and of its derivation: NoneType if the claims follow from the target alone."""

    divides: ClassVar[bool]
    """Whether errors are added up over parts of the box. Then each head has leaves of its own, with local bounds;
    otherwise heads that are the same function of t share their leaves."""

    claimed: Mapping[str, object] = MappingProxyType({})
    """The channels for which the derivation has a claim, by name. Empty if claims follow from the weights."""

    @abc.abstractmethod
    def of_stage(self, part: ProgramStage, channels: Mapping[int, Channel], state: State) -> Sequence[ChannelClaim]:
        """Return the claims of a stage that reads this state. Raise ProgramError if its weights contradict them."""

    @abc.abstractmethod
    def outputs(self, state: State) -> Sequence[tuple[StateForm, str]]:
        """Return every output of the target as a combination of the last state, and as a text in the names of heads."""

    def ranges(self, boxes: Interval) -> tuple[Interval, Interval]:
        """Return the ranges of the arguments and carriers of all heads over boxes, (boxes, heads), if it is divided."""
        raise NotImplementedError

    def arguments(self) -> list[str]:
        """Return the arguments of all heads as expressions of the variables, if errors are added up over parts."""
        raise NotImplementedError


class ExpressionClaims(Claims):
    """The claims of a composition. Its derivation states the part of the expression that every head computes."""

    target, derivation, divides = ExpressionTarget, Derivation, True

    def __init__(self, target: ExpressionTarget, derivation: Derivation, *_: object) -> None:
        self._derivation, self.claimed = derivation, derivation.heads
        self._ranges = PartRanges(sub_boxes(target.box), target.expression.variables)
        check_derivation(derivation, target, self._ranges)
        parts = in_order(derivation.outputs)
        self._ranges.require_bounded(parts)
        variables = target.expression.variables
        self._names = {id(part): variables[part.index] for part in parts if isinstance(part, Source)}
        self._prefix = "s" + "_" * max(map(len, variables))  # no variable has this name
        self._heads: list[HeadClaim] = []

    def of_stage(self, part: ProgramStage, channels: Mapping[int, Channel], state: State) -> list[ChannelClaim]:
        found = []
        for output, channel in channels.items():
            if channel.numbers and channel.name in self.claimed:
                claim = self._derivation.heads[channel.name]
                term = f"{to_text(claim.tree)} of {self._ranges.describe(claim.argument)}"
                argument, carrier = self._stated(claim.argument, state), None
                if claim.carrier is not None:
                    carrier = self._stated(claim.carrier, state)
                    term = f"{term}, times {self._ranges.describe(claim.carrier)}"
                name = f"{self._prefix}{len(self._heads)}"
                found.append(ChannelClaim(output, name, term, claim.tree, argument, carrier))
                self._heads.append(claim)
        for made, claim in zip(found, self._heads[len(self._heads) - len(found) :], strict=True):
            self._names[id(claim.part)] = made.name
        return found

    def outputs(self, state: State) -> list[tuple[StateForm, str]]:
        return [(self._form(part, state), self._text(part)) for part in self._derivation.outputs]

    def ranges(self, boxes: Interval) -> tuple[Interval, Interval]:
        found = self._ranges.on(boxes)
        found.find([part for claim in self._heads for part in (claim.argument, claim.carrier) if part is not None])
        arguments = [found.over(claim.argument) for claim in self._heads]
        ones = Interval.point(np.ones(len(boxes)))
        carriers = [ones if claim.carrier is None else found.over(claim.carrier) for claim in self._heads]
        t, C = (
            Interval(*(np.array([getattr(x, end) for x in each]).reshape(-1, len(boxes)).T for end in ("lo", "hi")))
            for each in (arguments, carriers)
        )
        return t, C

    def arguments(self) -> list[str]:
        return [self._ranges.describe(claim.argument) for claim in self._heads]

    def _stated(self, part: Part, state: State) -> Stated:
        is_known = isinstance(part, Combination) and part.known is not None
        known_as = self._ranges.describe(part) if is_known else None
        form = self._form(part, state)
        return Stated(form, *self._ranges(part), self._text(part), known_as, isinstance(part, Source))

    def _text(self, part: Part) -> str:
        """Return the name of a part in the state, or its text as a combination of such parts."""
        if id(part) in self._names or not isinstance(part, Combination):
            return self._names[id(part)]
        terms = [Product((c.tree, Variable(self._names[id(inner)]))) for inner, c in part.terms if c.value != 0]
        return to_text(Sum((*terms, part.constant.tree)))

    def _form(self, part: Part, state: State) -> StateForm:
        """Return a part as a combination of the state."""
        places = {name: i for i, name in enumerate(state.names)}
        if self._names.get(id(part)) in places:
            part = Combination(((part, UNIT),), ZERO)
        if not isinstance(part, Combination):
            raise ProgramError(f"{self._ranges.describe(part)} is not in the state, nor a combination of it")
        weights, slack = np.zeros(len(state.names)), part.constant.slack
        for inner, coefficient in part.terms:
            if coefficient.value != 0:
                name = self._names.get(id(inner))
                if name not in places:
                    raise ProgramError(f"{self._ranges.describe(inner)} is not in the state")
                weights[places[name]] += coefficient.value
            if coefficient.slack > 0:
                slack = float(up(slack + coefficient.slack * self._ranges.size(inner), 2))
        return StateForm(weights, part.constant.value, slack)


def check_derivation(derivation: Derivation, target: ExpressionTarget, ranges: PartRanges) -> None:
    """Raise ProgramError unless the outputs are those of the target, and every claim fits the part of its head.

    A proof of the heads shows that the program computes the derivation. This check shows that the derivation computes
    the target. Without it, another function would be proved.
    """
    wanted = target.expression.outputs
    if len(derivation.outputs) != len(wanted):
        raise ProgramError(f"the derivation has {len(derivation.outputs)} outputs, the target {len(wanted)}")
    claims = derivation.heads.values()
    parts = [part for claim in claims for part in (claim.part, claim.argument, claim.carrier) if part is not None]
    for part in _reachable([*derivation.outputs, *parts]):
        if isinstance(part, Source) and not 0 <= part.index < target.box.d:
            raise ProgramError(f"the derivation reads input {part.index}, the target has {target.box.d}")
        if isinstance(part, Combination) and part.known is not None:
            terms = ranges.tree(dataclasses.replace(part, known=None))
            if not equivalent([terms], [ranges.tree(part.known)]):
                raise ProgramError(
                    f"{ranges.describe(part)} is not known to be the combination that the derivation states"
                )
    for channel, claim in derivation.heads.items():
        if not _is_of_its_part(claim):
            raise ProgramError(
                f"by the derivation {channel} stands for {ranges.describe(claim.part)}, but it claims another "
                f"function for its head, with the argument {ranges.describe(claim.argument)}"
            )
    if not equivalent([ranges.tree(part) for part in derivation.outputs], wanted):
        raise ProgramError(
            f"the derivation is not known to compute {target.describe()}: its outputs are "
            f"{', '.join(map(ranges.describe, derivation.outputs))}"
        )


def _reachable(parts: list[Part]) -> list[Part]:
    """Return all parts from which these are made, and those from which their ranges are computed."""
    found: dict[int, Part] = {}
    pending = list(parts)
    while pending:
        part = pending.pop()
        if id(part) not in found:
            found[id(part)] = part
            pending.extend(operands_of(part))
            if isinstance(part, Combination) and part.known is not None:
                pending.append(part.known)
    return list(found.values())


def _is_of_its_part(claim: HeadClaim) -> bool:
    """Return whether carrier·tree(argument) is the part as it is written."""
    part, ways = claim.part, list[tuple[Part, Node, Part | None]]()
    if isinstance(part, Unary):
        ways = [(part.base, part.tree, None)]
    elif isinstance(part, Multiply):
        for factor, carrier in ((part.left, part.right), (part.right, part.left)):
            ways.append((factor, T, carrier))
            if isinstance(factor, Unary):
                ways.append((factor.base, factor.tree, carrier))
    return any(
        claim.argument is argument and claim.tree == tree and claim.carrier is carrier
        for argument, tree, carrier in ways
    )


def stated_derivation(stages: Sequence[HeadProof], outputs: Sequence[str], variables: Sequence[str]) -> Derivation:
    """Read the derivation of an expression from a certificate. Raise ProgramError if it cannot be read.

    It is proved like any other derivation, so nothing else has to be checked here.
    """
    parts: dict[str, Part] = {name: Source(i) for i, name in enumerate(variables)}
    heads: dict[str, HeadClaim] = {}
    try:
        for stage in stages:
            (tree,) = Expression.parse(stage.function).outputs
            argument = _combination_of(stage.argument, parts)
            carrier = None if stage.carrier is None else _combination_of(stage.carrier, parts)
            part: Part = argument if carrier is not None and tree == T else Unary(argument, tree)
            part = part if carrier is None else Multiply(part, carrier)
            heads[stage.channel] = HeadClaim(part, argument, tree, carrier)
            parts[stage.name] = part
        return Derivation(tuple(_combination_of(output, parts) for output in outputs), heads)
    except (ExpressionError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"the stages of the certificate cannot be read: {type(error).__name__}: {error}") from None


def _combination_of(text: str, parts: Mapping[str, Part]) -> Part:
    """Read a combination of parts, such as 2*x + -1*s_0 + 0.5."""
    (tree,) = Expression.parse(text).outputs
    terms, constant = list[tuple[Part, Coefficient]](), ZERO

    def add(node: Node, scale: Coefficient) -> None:
        nonlocal constant
        if is_constant(node):
            constant = constant + scale * Coefficient(node)
            return
        match node:
            case Variable(name):
                terms.append((parts[name], scale))
            case Negate(operand):
                add(operand, -scale)
            case Sum(summands):
                for summand in summands:
                    add(summand, scale)
            case Product((factor, operand)) if is_constant(factor):
                add(operand, scale * Coefficient(factor))
            case _:
                raise ValueError(f"{text!r} is not a combination of parts")

    add(tree, UNIT)
    return combination(terms, constant)


@dataclass(frozen=True, eq=False)
class _Scaled:
    """The units h of a layer as they are in the state: v = gain·h + shift, with these names."""

    names: Sequence[str]
    gain: Float[np.ndarray, " units"]
    shift: Float[np.ndarray, " units"]

    @cached_property
    def _texts(self) -> list[str]:
        """The exact text of every h in the name of its v."""
        units = [
            name if gain == 1 and shift == 0 else f"({name} - {exact_text(shift)})/({exact_text(gain)})"
            for name, gain, shift in zip(self.names, self.gain.tolist(), self.shift.tolist(), strict=True)
        ]
        return [unit.replace("- -", "+ ") for unit in units]

    def text(self, W: Float[np.ndarray, " units"], b: float) -> str:
        """Return the exact text of W·h + b in the names of v."""
        return affine_text(W, self._texts, b)

    def form(self, W: Float[np.ndarray, " units"], b: float, scale: float, state: State) -> StateForm:
        """Return scale·(W·h + b) as a combination of v."""
        weights = scale * (W / self.gain)
        moved = weights * self.shift
        constant = float(scale * b - moved.sum())
        n = len(W) + 8
        slack = 8 * U * (np.abs(weights) @ state.sizes) + gamma(n, U) * (np.abs(moved).sum() + abs(scale * b))
        is_exact = scale == 1 and not self.shift.any() and (self.gain == 1).all()
        return StateForm(weights, constant, 0.0 if is_exact else float(up(slack * (1 + n * U), 4)))


class NetworkClaims(Claims):
    """The claims of a ReLU network. For every unit the program computes v = gain·relu(z) + shift, z = W·h + b.

    Unit j of a layer is relu(t) + shift at t = gain·z_j, and constant beyond a limit that no exact t exceeds. Gains and
    shifts are read off the heads. Any values of them are sound, because the claim is proved. Units that nothing reads
    are left out.
    """

    target, derivation, divides = ReLUNetwork, NoneType, False

    def __init__(self, target: ReLUNetwork, _: None, program: Program, read: StateForm, num_stages: int) -> None:
        hidden = len(target.weights) - 1
        if num_stages != hidden:
            raise ProgramError(f"the program has {num_stages} stages, the network {hidden} hidden layers")
        self._target = target
        # The units of every layer that a later layer reads.
        self._live = [np.flatnonzero(W.any(axis=0)) for W in target.weights[1:]]
        rows, columns = [*self._live, np.arange(len(target.weights[-1]))], [np.arange(target.box.d), *self._live]
        self._weights = [W[np.ix_(*kept)] for W, *kept in zip(target.weights, rows, columns, strict=True)]
        _require_moving(self._weights)
        ones = np.ones(target.box.d)
        self._ranges, self._before, self._layer = target.ranges(), _Scaled(target.box.names, ones, 0 * ones), 0

    def of_stage(self, part: ProgramStage, channels: Mapping[int, Channel], state: State) -> list[ChannelClaim]:
        layer, live = self._layer, self._live[self._layer]
        W, b, count = self._weights[layer], self._target.biases[layer][live], len(live)
        if not count or len(part.tokens) != count or len(set(part.tokens.tolist())) != count:
            raise ProgramError(
                f"stage {part.name!r} writes {len(part.outputs)} numbers, but needs one token for each of the {count} "
                "units that are read"
            )
        forms = [self._before.form(row, float(offset), 1.0, state) for row, offset in zip(W, b, strict=True)]
        clips: dict[bytes, tuple[float, float, float]] = {}
        units = [_read_unit(part.name, channels[output], form, clips) for output, form in enumerate(forms)]
        gain, shift, limit = np.array(units).T
        pre = self._ranges[layer][live]
        lo, hi = down(gain * pre.lo), up(gain * pre.hi)
        limit = np.maximum(limit, up(np.maximum(hi, 0.0) * (1 + RANGE_ROOM), 2))
        z, _, s = self._target.letters
        names = [f"{s}{layer + 1}_{j}" for j in live]
        relu, term, found = Call("relu", (T,)), f"hidden layer {layer + 1}", []
        for j, name in enumerate(names):
            scale = "" if gain[j] == 1 else f"{exact_text(gain[j])}*"
            form = self._before.form(W[j], float(b[j]), float(gain[j]), state)
            text, known_as = f"{scale}({self._before.text(W[j], b[j])})", f"{scale}{z}{layer + 1}_{live[j]}"
            function = Sum((relu, Number(Fraction(shift[j])))) if shift[j] else relu
            argument = Stated(form, float(lo[j]), float(hi[j]), text, known_as)
            found.append(ChannelClaim(j, name, term, function, argument, limit=float(limit[j])))
        self._before, self._layer = _Scaled(names, gain, shift), layer + 1
        return found

    def outputs(self, state: State) -> list[tuple[StateForm, str]]:
        rows = zip(self._weights[-1], self._target.biases[-1].tolist(), strict=True)
        return [(self._before.form(W, b, 1.0, state), self._before.text(W, b)) for W, b in rows]


def _require_moving(weights: Sequence[Float[np.ndarray, "out in"]]) -> None:
    """Raise ProgramError if a unit reads constant units only, because its scores do not show which ones."""
    moves: np.ndarray = np.ones(weights[0].shape[1], dtype=bool)
    for W in weights[:-1]:
        moves, reads = np.any(W[:, moves], axis=1), np.any(W, axis=1)
        if (reads & ~moves).any():
            raise ProgramError("a unit of the network reads constant units alone")


def _read_unit(
    stage: str, unit: Channel, form: StateForm, clips: dict[bytes, tuple[float, float, float]]
) -> tuple[float, float, float]:
    """Return gain, shift and limit of a unit: v = relu(t) + shift ≤ limit + shift at t = gain·z, z = form.

    Units with equal values get the shift and the limit of the first one, which `clips` keeps by these values.
    """
    if len(unit.numbers) != 1:
        raise ProgramError(f"{unit.name} is written by {len(unit.numbers)} heads, not by one")
    (head,) = unit.heads
    values, z = head.values.mid[:, unit.column], abs(float(form.constant))
    if not form.weights.any():
        # The gain of a constant unit cannot be read off. Take one for which its values reach twice as far as the unit.
        limit = float(np.ptp(values))
        gain = limit / (2 * z) if z > 0 else limit
        return gain if gain > 0 else 1.0, float(values.min()), limit
    kappa = ratios(head.slopes.mid, head.offsets.mid, form, unit.sizes)
    steepest = float(np.abs(kappa).max())
    if not steepest > 0:
        raise ProgramError(f"a unit of stage {stage!r} does not depend on its input")
    if head.carried is not None and head.carried.mid[:, unit.column].any():
        return 1.0, 0.0, math.inf  # a gate, whose values are those of z
    key = (values + 0.0).tobytes()
    if key not in clips:
        clips[key] = _read_clip(stage, kappa / steepest, head.offsets.mid - kappa * form.constant, values)
    slope, shift, limit = clips[key]
    return slope * steepest, shift, limit


def _read_clip(
    stage: str,
    kappa: Float[np.ndarray, " keys"],
    offsets: Float[np.ndarray, " keys"],
    values: Float[np.ndarray, " keys"],
) -> tuple[float, float, float]:
    """Return slope, shift and limit of a head that computes slope·clip(y, 0, limit) + shift. Any numbers are sound.

    Neighbours in the order of their slopes have equal scores at y_1 < y_2 < …, midway between two anchors. If the
    anchors are equally spaced, they span (y_last − y_1)·(p − 1)/(p − 2). The first anchor is at the kink.
    """
    kappa, first = np.unique(kappa, return_index=True)
    offsets, values = offsets[first], values[first]
    p = len(kappa)
    if p < FEWEST_ANCHORS:
        raise ProgramError(f"the units of stage {stage!r} have {p} anchors, too few for a clip")
    crossings = -np.diff(offsets) / np.diff(kappa)
    reach = (crossings[-1] - crossings[0]) * (p - 1) / (p - 2)
    slope = (values[-1] - values[0]) / reach if reach else math.inf
    if not (slope > 0 and np.isfinite(slope)):
        raise ProgramError(f"the units of stage {stage!r} do not grow with their inputs")
    return float(slope), float(values[0]), float(values[-1] - values[0])


class ClipClaims(Claims):
    """The claims of truncated linear functions: output i is m + Δ·v, v = (clip(t, a, b) − m)/Δ at t = w_i·x_i + t_i.

    m and Δ are read off the last affine map. For any number of variables, t is one number.
    """

    target, derivation, divides = TruncatedLinear, NoneType, False

    def __init__(self, target: TruncatedLinear, _: None, program: Program, read: StateForm, num_stages: int) -> None:
        if target.text is None and target.definitions is None:
            raise ProgramError(f"{target.describe()}: there are too many to be stated")
        if program.num_anchors * (CLIP_LEAVES if program.num_heads > 1 else 1) > MAX_CLIP_ANCHORS:
            raise ProgramError(f"leaves of {program.num_anchors:,} anchors would be too many")
        if program.num_anchors * target.box.d * len(target.W) > MAX_SLOPES:
            raise ProgramError(f"{target.describe()}: there are too many scores to be read one by one")
        if num_stages != 1:
            raise ProgramError(f"the program has {num_stages} stages, not one")
        rows, counts = read.weights, np.count_nonzero(read.weights, axis=1)
        if (counts != 1).any():
            i = int(np.argmax(counts != 1))
            raise ProgramError(f"output {i} is read from {counts[i]} entries, not from one")
        self._target, self._entries = target, np.argmax(rows != 0, axis=1)
        if len(set(self._entries.tolist())) != len(rows):
            raise ProgramError("two outputs are read from one entry")
        self._m, self._delta = np.asarray(read.constant), rows[np.arange(len(rows)), self._entries]
        self._prefix = free_letter("s", target.box.names)

    def of_stage(self, part: ProgramStage, channels: Mapping[int, Channel], state: State) -> list[ChannelClaim]:
        target, found = self._target, []
        (n, d), box = target.W.shape, target.box
        ranges = affine_range(target.W, target.t, Interval(box.lo[:d], box.hi[:d]))  # tokens have one box
        for i, entry in enumerate(self._entries.tolist()):
            if not channels[entry].numbers:
                raise ProgramError(f"{channels[entry].name} is written by no head")
            weights = np.zeros((n, d))
            weights[i] = target.W[i]
            text = affine_text(target.W[i], box.names[i * d : (i + 1) * d], float(target.t[i]))
            form = StateForm(weights.ravel(), float(target.t[i]), 0.0)
            argument = Stated(form, float(ranges.lo[i]), float(ranges.hi[i]), text)
            name, function = f"{self._prefix}{i}", self._function(i)
            tree = Expression.parse(function).outputs[0]
            found.append(ChannelClaim(entry, name, APPROXIMATION, tree, argument, wording=function))
        return found

    def outputs(self, state: State) -> list[tuple[StateForm, str]]:
        found = []
        for i, (m, delta) in enumerate(zip(self._m.tolist(), self._delta.tolist(), strict=True)):
            weights = np.where([name == f"{self._prefix}{i}" for name in state.names], delta, 0.0)
            text = f"{exact_text(delta)}*{self._prefix}{i} + {exact_text(m)}".replace("+ -", "- ")
            found.append((StateForm(weights, m, 0.0), text))
        return found

    def _function(self, i: int) -> str:
        a, b, m, delta = map(exact_text, (self._target.a, self._target.b, self._m[i], self._delta[i]))
        centred = f"(clip(t, {a}, {b}) - ({m}))" if self._m[i] else f"clip(t, {a}, {b})"
        return f"{centred}*(1/({delta}))"


CLAIMS: list[type[Claims]] = [ExpressionClaims, NetworkClaims, ClipClaims]
"""All claims. A new kind of target that is proved head by head is one row more."""


def claims_for(target: Target, derivation: Derivation | None) -> Callable[..., Claims] | None:
    """Return the first claims for targets and derivations of these types or of their base types; None if none fit."""
    fitting = (c for c in CLAIMS if isinstance(target, c.target) and isinstance(derivation, c.derivation))
    return next(fitting, None)
