"""Deep programs, proved stage by stage.

A derivation claims that every head computes carrier·g(t), where t is an affine combination of the state so far. The
weights of a stage show how its scores and values depend on the state. If that differs from the claimed combination, the
difference counts as an error. So the heads of a channel are a function of t alone. They are proved against g on the
range of t, enlarged by the error that t already has:
    |heads − carrier·g(t̂)| ≤ |carrier|·δ + the difference of the weights + rounding.
Channels whose heads are the same function of t share their leaves. `error_flow` follows these errors to the outputs,
with their signs, because they may cancel.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import check_time, time_share
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.branching import PROVING, Covering
from attnc.proofs.kinds.taylor import TaylorKind
from attnc.proofs.margins import ANY_ORDER_ROUNDING, ARGUMENT_ROOM, RANGE_ROOM, ROUNDING_ROOM
from attnc.proofs.proof import HeadProof, Leaves, Proof, Stages
from attnc.proofs.prover import ProofRequest, Prover, require_same_shapes
from attnc.proofs.staged.claims import ChannelClaim, Claims, NotBoundedError, State, Stated, claims_for
from attnc.proofs.staged.error_flow import (
    NOT_BOUNDED,
    SLOPE_PIECES,
    Composed,
    Deviations,
    FlowStage,
    Outputs,
    Readings,
    Slopes,
    composed_bound,
    has_middles,
)
from attnc.proofs.staged.lines import (
    CLOSE_LEAVES,
    LOOSE_LEAVES,
    Channel,
    HeadLine,
    LineClaim,
    channels_of,
    joined,
    leaf_intervals,
)
from attnc.proofs.staged.signed import shifted_values, signed_leaves
from attnc.proofs.stages.extraction import ProgramStage, StateForm, stages_and_read_out
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

U = UNIT_ROUNDOFF["float64"]
TRUNCATION = "anchors that the engine skips because their weights are negligible"
LEAST_LEVEL = 6
"""Leaves are at most a 64th of the interval of t if the box is divided: the error of a head swings along the interval,
and is carried on as it is on each leaf."""
LEAST_SHARE = 2.0**-6
"""No leaf is stated to be closer than this share of the worst one: that gains nothing at the outputs, and the checker
would have to find it again."""
WORTH_SIGNS = 1.1
"""The errors of heads are stated with their signs if the bound exceeds the largest error that was seen by this factor.
That takes about as long again, and heads whose errors never oppose each other have nothing to gain."""
ALLOWED_TOLERANCE, ALLOWED = 1.0, 1.25
"""The tolerance of the leaves by which errors are allowed to heads before their proof, and the multiple of their bound.
A proof with a smaller tolerance finds at most 1.05 times the largest error, and these leaves find at least that."""
ROUGH_SCORES = 1e-6
"""Channels whose scores round by more than this share their leaves only with those that round about as much: within
a factor of 4."""


class StagedProver(Prover):
    """Proves programs head by head: compositions, ReLU networks and truncated linear functions."""

    name = "head by head"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        """Return whether the norm is the largest error, and a derivation is given or follows from the target."""
        return request.p == math.inf and claims_for(target, request.derivation) is not None

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove that the program is within a bound of the target.

        Raise ProgramError if the weights do not fit the derivation, or if the derivation is that of another target. The
        bound is ∞ if the box is too wide to bound the range of a part.
        """
        walk, read = begun(program, target, request)
        try:
            walk.through_all(request)
            LAST_WALK.value = program, target, request.derivation, walk, read
        except NotBoundedError:
            return Proof(NOT_BOUNDED.bound, NOT_BOUNDED.terms, Stages(tuple(walk.heads), ()), walk.is_complete)
        return walk.proof(read, str(program.dtype), request)


class _LastWalk(threading.local):
    """The walk of the last proof of this thread. The bound of the gradients of the same network begins with it."""

    value: tuple[Program, Target, Derivation | None, StageWalk, StateForm] | None = None


LAST_WALK = _LastWalk()


def walked(program: Program, target: Target, request: ProofRequest) -> tuple[StageWalk, StateForm]:
    """Return the walk through a program. Raise what `begun` raises, and NotBoundedError if a range is not known."""
    last = LAST_WALK.value
    given = program, target, request.derivation
    if last is not None and all(x is y for x, y in zip(last, given, strict=False)) and not last[3].noise:
        return last[3], last[4]
    walk, read = begun(program, target, request)
    walk.through_all(request)
    return walk, read


def begun(
    program: Program,
    target: Target,
    request: ProofRequest,
    prove_group: Callable[[HeadGroup], ProvedGroup] | None = None,
) -> tuple[StageWalk, StateForm]:
    """Return a walk through the program, before its first stage, and the affine map that reads the outputs.

    `prove_group` proves the heads of a group; by default by leaves, at once. Raise ProgramError if the program has
    another form, or the derivation is that of another target.
    """
    check(program)
    require_same_shapes(program, target)
    found, read = stages_and_read_out(program)
    made = claims_for(target, request.derivation)
    if made is None:
        raise ProgramError(f"there is no derivation by which {target.describe()} could be proved head by head")
    claims = made(target, request.derivation, program, read, len(found))
    return StageWalk(found, claims, target, str(program.dtype), request.noise, prove_group), read


def claimed_stages(program: Program, target: Target, request: ProofRequest) -> Stages:
    """Return the claims about all heads, without leaves: nothing is proved. Raise what `begun` and `walked` raise."""
    walk, _ = begun(program, target, request, lambda group: ProvedGroup(group, group.allowed()))
    walk.through_all(request)
    nothing = Leaves((), np.zeros(0))
    heads = (head if head.leaves is None else dataclasses.replace(head, leaves=nothing) for head in walk.heads)
    return Stages(tuple(heads), tuple(text for _, text in walk.claims.outputs(walk.state)))


class StageWalk:
    """A walk through the stages. `state` is the state after the last one, `flow` has the errors of all heads so far."""

    def __init__(
        self,
        stages: Sequence[ProgramStage],
        claims: Claims,
        target: Target,
        dtype: str,
        noise: Mapping[str, float],
        prove_group: Callable[[HeadGroup], ProvedGroup] | None = None,
    ) -> None:
        self.prove_group = prove_group or (lambda group: ProvedGroup(group, group.proof()))
        self.stages, self.claims, self.box, self.noise = stages, claims, target.box, noise
        sizes = self.box.magnitude
        casts = up(UNIT_ROUNDOFF[dtype] * sizes, 2) if dtype != "float64" else np.zeros(self.box.d)
        self.state = State(self.box.names, sizes, casts, np.zeros(self.box.d))
        self.heads: list[HeadProof] = []
        self.flow: list[FlowStage] = []
        self.states: list[State] = []  # before every stage of `flow`
        self.groups: list[list[ProvedGroup]] = []  # of every stage of `flow`
        self.is_complete = True
        self.axes: tuple[int, ...] = ()  # along which the box was halved to add up the errors of values
        self._ranges: list[tuple[float, float]] = []  # of the arguments of all heads

    def through_all(self, request: ProofRequest) -> None:
        """Prove the heads of all stages. Raise NotBoundedError if the range of a part is not known."""
        for number, stage in enumerate(self.stages):
            request.report(number / len(self.stages))
            with time_share(1 / (len(self.stages) - number)):
                self.through(stage)

    def through(self, part: ProgramStage) -> None:
        """Prove the heads of a stage, and compute the state after it."""
        state = self.state.bounded()
        channels = channels_of(part, state.reach, self.claims.claimed)
        claims = self.claims.of_stage(part, channels, state)
        after = self._passed_on(channels, {claim.output for claim in claims})
        heads = [ClaimedHead.of(claim, channels[claim.output], state, self.noise) for claim in claims]
        groups = self._grouped(heads)
        proved = list[ProvedGroup]()
        for number, alike in enumerate(groups):
            check_time(PROVING)
            with time_share(1 / (len(groups) - number)):
                proved.append(self.prove_group(HeadGroup.of(alike, part, self.claims.divides)))
        if proved:
            self.flow.append(self._flow(proved))
            self.states.append(state)
            self.groups.append(proved)
        for group in proved:
            self.heads += group.proofs
            self.is_complete &= group.is_complete
            for head, size, error in zip(group.heads, group.sizes, group.errors, strict=True):
                self._ranges.append((head.argument.lo, head.argument.hi))
                after[head.claim.output] = (head.claim.name, size, error, 0.0)
        names, *numbers = zip(*(after[i] for i in range(len(channels))), strict=True) if channels else [()] * 4
        self.state = State(names, *(np.array(each, np.float64) for each in numbers))

    def proof(self, read: StateForm, dtype: str, request: ProofRequest) -> Proof:
        """Return the proof, once the heads of all stages are proved."""
        try:
            composed, outputs = self.composed(read, dtype)
            if self.claims.divides and WORTH_SIGNS * request.observed < composed.bound < math.inf:
                self.take_signs()
                composed, outputs = self.composed(read, dtype)
        except NotBoundedError:
            composed, outputs = NOT_BOUNDED, ()
        bound, terms = composed.bound, composed.terms
        if request.truncation:
            bound = float(up(bound + request.truncation))
            terms = (*terms, Term("truncation", request.truncation, TRUNCATION))
        return Proof(bound, terms, Stages(tuple(self.heads), outputs, composed.axes), self.is_complete)

    def take_signs(self) -> None:
        """State the errors of all heads with their signs."""
        for number, groups in enumerate(self.groups):
            for group in groups:
                group.take_signs()
            deviations = tuple(group.deviations for group in groups if group.deviations is not None)
            self.flow[number] = dataclasses.replace(self.flow[number], deviations=deviations)
        self.axes = ()
        self.heads[:] = [proof for groups in self.groups for group in groups for proof in group.proofs]

    @property
    def has_signs(self) -> bool:
        """Whether errors are stated with their signs."""
        return any(has_middles(stage.deviations) for stage in self.flow)

    def _passed_on(
        self, channels: Mapping[int, Channel], claimed: set[int]
    ) -> dict[int, tuple[str, float, float, float]]:
        """Return the name, the size, the error and the passing error of every channel that a stage passes on."""
        state, found = self.state, dict[int, tuple[str, float, float, float]]()
        for i, channel in channels.items():
            if i in claimed:
                continue
            if channel.numbers:
                raise ProgramError(
                    f"{channel.name} is written by {len(channel.numbers)} heads, but the derivation has no claim for it"
                )
            if channel.source is None:
                raise ProgramError(f"{channel.name} is neither written by a head nor passed on unchanged")
            size, error, passing = (each[channel.source] for each in (state.sizes, state.errors, state.passing))
            if channel.passing:
                error, passing = up(error + channel.passing), up(passing + channel.passing)
            found[i] = state.names[channel.source], size, error, passing
        return found

    def _grouped(self, heads: Sequence[ClaimedHead]) -> list[list[ClaimedHead]]:
        """Group heads that are the same function of t.

        A head at a constant t or with noise is a group of its own, and every head is if the box is divided.
        """
        found: dict[tuple[object, ...], list[ClaimedHead]] = {}
        for place, head in enumerate(heads):
            rounds = max(float(each.score_errors[:, -1].max()) for each in head.line.roundings)  # errors at t = 0
            roughness = round(math.log2(max(ROUGH_SCORES, rounds)) / 2) if math.isfinite(rounds) else 0
            alone = place if self.claims.divides or head.noise or not head.argument.form.weights.any() else None
            key = head.claim.function_text, head.line.value_bytes, roughness, alone
            found.setdefault(key, []).append(head)
        return list(found.values())

    def _flow(self, groups: Sequence[ProvedGroup]) -> FlowStage:
        heads, d = [head for group in groups for head in group.heads], len(self.state.names)
        errors = np.array([(head.argument_error, head.carrier_error) for head in heads]).T
        arguments = self._readings(StateForm.stacked([head.argument.form for head in heads], d), errors[0])
        carriers, nothing = [head.claim.carrier for head in heads], StateForm(np.zeros(d), 0.0)
        carried = None
        if any(carrier is not None for carrier in carriers):
            forms = [nothing if carrier is None else carrier.form for carrier in carriers]
            carried = self._readings(StateForm.stacked(forms, d), errors[1])
        own, rounding = np.array([(group.own, group.rounding) for group in groups for _ in group.heads]).T
        deviations = tuple(group.deviations for group in groups if group.deviations is not None)
        slopes = Slopes.stacked([group.slopes for group in groups])
        return FlowStage(arguments, slopes, own, rounding, carried, deviations)

    def _readings(self, forms: StateForm, errors: Float[np.ndarray, " rows"]) -> Readings:
        """Rewrite combinations of channels as combinations of the heads in them.

        An input adds only its rounding, and a channel that was passed on the error of that.
        """
        numbers, state = {head.name: number for number, head in enumerate(self.heads)}, self.state
        weights, casts, passed = np.zeros((len(errors), len(numbers))), np.zeros(len(errors)), np.zeros(len(errors))
        channels = zip(state.names, forms.weights.T, state.errors, state.passing, strict=True)
        for name, column, error, passing in channels:
            if name in numbers:
                weights[:, numbers[name]] += column
                if passing:
                    passed = up(passed + up(np.abs(column) * passing))
            elif error:
                casts = up(casts + up(np.abs(column) * error))
        beside = np.where(passed > 0, up(casts + passed), casts)
        return Readings(weights, np.where(beside > 0, up(forms.slack + beside), forms.slack), casts, errors)

    def composed(self, read: StateForm, dtype: str) -> tuple[Composed, tuple[str, ...]]:
        """Bound the outputs by the errors of the heads and of the stored coefficients, and by rounding."""
        reach, unit, divides = self.state.bounded().reach, UNIT_ROUNDOFF[dtype], self.claims.divides
        goals, texts = zip(*self.claims.outputs(self.state), strict=True)
        goal, rows = StateForm.stacked(goals, len(reach)), read.weights
        if goal.weights.shape != rows.shape:
            raise ProgramError(f"the program has {len(rows)} outputs, but the derivation claims {len(goals)}")
        readings = self._readings(read, np.zeros(len(rows)))
        off = np.abs(rows - goal.weights) @ reach + np.abs(read.constant - goal.constant) + goal.slack
        if read.spread is not None:
            off = off + read.spread[:, :-1] @ reach + read.spread[:, -1] + np.abs(rows) @ self.state.passing
        differs = np.where(off > 0, up(off * (1 + 4 * len(reach) * U), 4), 0.0)
        # Each product that may underflow adds the smallest normal number, also to coefficients, which engines fold.
        is_exact, counts = np.isin(np.abs(rows), (0.0, 1.0)), np.count_nonzero(rows, axis=1)
        lost = float(np.finfo(dtype).smallest_normal) * np.count_nonzero(~is_exact, axis=1)
        sizes = (np.abs(rows) + lost[:, None] * (rows != 0)) @ reach + np.abs(read.constant) + lost
        # A single product rounds once, unless it is with 1 or 2.
        is_sum, is_easy = (counts > 1) | (read.constant != 0), np.isin(np.abs(rows), (0.0, 1.0, 2.0)).all(axis=1)
        shares = np.array([gamma(int(count) + 2, unit) for count in counts])
        shares = np.where(is_sum, shares, np.where((counts == 1) & ~is_easy, unit, 0.0))
        rounded = np.where(shares > 0, sizes * shares, 0.0)  # a size may be infinite
        total = rounded * (1.0 if divides else ROUNDING_ROOM) + readings.casts
        rounding = np.where(total == 0, 0.0, up(total, 8))
        if not divides:  # the coefficients are those of the target, up to the rounding of gains
            differs, rounding = np.zeros(len(rows)), up(differs + rounding)
        box, terms = Interval(self.box.lo[None], self.box.hi[None]), [head.term for head in self.heads]
        outputs = Outputs(readings.weights, differs, rounding)
        composed = composed_bound(self.flow, terms, outputs, self._ranges_on, box, divides, self.axes)
        self.axes = composed.axes[: composed.num_chosen]
        return composed, texts if math.isfinite(composed.bound) else ()

    def _ranges_on(self, boxes: Interval) -> tuple[Interval, Interval | None]:
        """Return the ranges of arguments and carriers of all heads over boxes, or on the whole box if not divided."""
        if self.claims.divides:
            return self.claims.ranges(boxes)
        return Interval(*np.array(self._ranges).reshape(1, -1, 2).transpose(2, 0, 1)), None


@dataclass(frozen=True, eq=False)
class ClaimedHead:
    """A claim about a channel, its heads as a function of t, and the errors of t and of the carrier."""

    claim: ChannelClaim
    channel: Channel
    line: HeadLine
    argument_error: float
    carrier_error: float
    carrier_size: float
    noise: float

    @classmethod
    def of(cls, claim: ChannelClaim, channel: Channel, state: State, noise: Mapping[str, float]) -> ClaimedHead:
        """Make the head. Raise NotBoundedError if a number is infinite.

        The error of t includes room for the checker, unless t is an input.
        """
        argument, carrier = claim.argument, claim.carrier
        line = channel.line(argument.form, None if carrier is None else carrier.form)
        error = float(argument.form.error(state.errors))
        if not argument.is_input:
            error = float(up(error * ARGUMENT_ROOM + RANGE_ROOM * argument.size, 4))
        off, size = (0.0, 1.0) if carrier is None else (float(carrier.form.error(state.errors)), carrier.size)
        size = float(up(size + off)) if off > 0 else size
        if not np.isfinite([error, size, argument.lo, argument.hi]).all():
            raise NotBoundedError
        return cls(claim, channel, line, error, off, size, noise.get(channel.name, 0.0))

    @property
    def argument(self) -> Stated:
        return self.claim.argument


@dataclass(frozen=True, eq=False)
class GroupProof:
    """The leaves of a group with the rounding on them, and its leaves with signs with their middles, if it has them."""

    leaves: Covering
    rounding: float
    signed: tuple[Covering, Float[np.ndarray, " leaves"]] | None = None


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Heads that are the same function of t, before their proof. The leaves of the first one prove all of them."""

    heads: tuple[ClaimedHead, ...]
    part: ProgramStage
    divides: bool
    line: HeadLine
    size: float
    claim: LineClaim

    @classmethod
    def of(cls, heads: Sequence[ClaimedHead], part: ProgramStage, divides: bool) -> HeadGroup:
        line = joined([head.line for head in heads])
        claim = LineClaim.of(
            line.heads,
            heads[0].claim.function,
            min(head.argument.lo for head in heads),
            max(head.argument.hi for head in heads),
            max(head.argument_error for head in heads),
            limit=max(head.claim.limit for head in heads),
        )
        return cls(tuple(heads), part, divides, line, max(head.carrier_size for head in heads), claim)

    def proof(self) -> GroupProof:
        """Prove the heads by leaves."""
        return self._rounded(
            self.claim.proof(LEAST_LEVEL if self.divides else 0, LOOSE_LEAVES if self.divides else CLOSE_LEAVES)
        )

    def with_signs(self, proof: GroupProof) -> GroupProof:
        """Return the proof with leaves that state errors with their signs. They are proved if they are not known."""
        if proof.signed is not None or not self.divides or not self.size > 0:
            return proof
        kind = self.claim.kinds[0]
        assert isinstance(kind, TaylorKind)
        with quiet():
            signed = signed_leaves(proof.leaves, self.claim.differences, shifted_values(kind))
        return dataclasses.replace(proof, signed=signed)

    def allowed(self) -> GroupProof:
        """Return the error that is allowed to the heads before their proof, by few leaves.

        Later heads are proved for arguments that are off by as much, so that heads can be proved in any order.
        """
        found = self.claim.proof(0, ALLOWED_TOLERANCE)
        cells = dataclasses.replace(found.cells, upper=ALLOWED * found.cells.upper + 2 * self.claim.floor)
        return self._rounded(dataclasses.replace(found, cells=cells))

    def _rounded(self, proof: Covering) -> GroupProof:
        rounding, proof = self.line.rounding(self.size, proof)
        return GroupProof(proof, rounding)


class ProvedGroup:
    """A group with its proof, and the sizes and errors of the channels that its heads write.

    If another one is `allowed`, the errors that later stages reckon with are those of that one.
    """

    def __init__(self, group: HeadGroup, proved: GroupProof, allowed: ProvedGroup | None = None) -> None:
        self.group, self.proved, heads, part = group, proved, group.heads, group.part
        line, divides, first, size = group.line, group.divides, group.heads[0], group.size
        claim, proof, box, held = first.claim, proved.leaves, group.claim.box, group.claim.held
        lo, hi = np.array([(head.argument.lo, head.argument.hi) for head in heads]).T
        errors = np.array([head.argument_error for head in heads])
        self.heads, self.line, self.box, self.held, self.size = heads, line, box, held, size
        any_order = any(head.channel.roundings.is_in_any_order for head in heads)
        room = ANY_ORDER_ROUNDING if any_order else 1.0 if divides else ROUNDING_ROOM
        self.rounding = proved.rounding if room == 1 else float(up(room * proved.rounding))
        self.proof, deltas = proof, self._deltas(proof)
        delta = float(deltas.max())
        deltas = np.maximum(deltas, LEAST_SHARE * delta) if divides else np.full(len(deltas), delta)
        unsure = float(up(line.unsure + first.noise)) if first.noise else line.unsure
        self.own, self.is_complete = float(up(size * delta + unsure, 2)), proof.complete
        self.deviations = None
        if divides:
            fixed = 0.0 if claim.carrier is None else first.channel.fixed_size(claim.carrier.form)
            self.deviations = Deviations(leaf_intervals(proof), deltas, size, fixed, unsure)
        self.slopes = Slopes.of(claim.function, lo, hi, errors, held, SLOPE_PIECES if divides else 1)
        largest, carried = self.slopes.values.mag.max(axis=1), np.array([head.carrier_error for head in heads])
        own = self.own if allowed is None else allowed.own
        self.errors = up(own + size * self.slopes.change + largest * carried, 4)
        self.sizes = up(largest * size, 2) if claim.carrier is not None else up(largest, 2)
        interval, leaves = (float(box.lo[0]), float(box.hi[0])), Leaves(proof.leaves, deltas)
        self.proofs = [
            HeadProof(
                stage=part.name,
                channel=part.outputs[head.claim.output],
                name=head.claim.name,
                term=head.claim.term,
                function=head.claim.function_text,
                argument=head.argument.text,
                interval=interval,
                bound=delta,
                argument_as=head.argument.known_as,
                carrier=None if head.claim.carrier is None else head.claim.carrier.text,
                carrier_as=None if head.claim.carrier is None else head.claim.carrier.known_as,
                carrier_size=None if head.claim.carrier is None else head.carrier_size,
                held=held,
                like=None if head is first else claim.name,
                leaves=leaves if head is first else None,
                noise=head.noise,
            )
            for head in heads
        ]

    def _deltas(self, proof: Covering) -> Float[np.ndarray, " leaves"]:
        """Return the bounds of leaves, rounding included, in units of the carrier."""
        found, size = proof.cells.upper[:, 0], self.size
        return np.asarray(up(found + up(self.rounding / size), 2) if size > 0 else found)

    def take_signs(self) -> None:
        """State the error with its sign, on narrow leaves. Nothing changes if it is rounding alone."""
        self.proved = self.group.with_signs(self.proved)
        known = self.deviations
        if known is None or self.proved.signed is None:
            return
        proof, middles = self.proved.signed
        deltas = self._deltas(proof)
        self.deviations = dataclasses.replace(known, edges=leaf_intervals(proof), deltas=deltas, middles=middles)
        leaves = Leaves(proof.leaves, deltas, middles=tuple(middles.tolist()) if middles.any() else ())
        self.proofs[0] = dataclasses.replace(self.proofs[0], leaves=leaves)
