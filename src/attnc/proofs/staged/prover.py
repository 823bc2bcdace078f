"""Deep programs, proved stage by stage.

A derivation claims of every head that it computes carrier·g(t), with t an affine combination of the state so far. The
weights of a stage show how its scores and values depend on the state; where that differs from the combination that was
claimed, the difference counts as an error. Then the heads of a channel are a function of t alone, and are proved
against g on the range of t, enlarged by the error that t already has:
    |heads − carrier·g(t̂)| ≤ |carrier|·δ + the difference of the weights + rounding.
Channels whose heads are the same function of t share their leaves. How such errors travel to the outputs, and where
they cancel, is found by `error_flow`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.margins import ARGUMENT_ROOM, RANGE_ROOM, ROUNDING_ROOM
from attnc.proofs.proof import HeadProof, Leaves, Proof, Stages
from attnc.proofs.prover import ProofRequest, Prover
from attnc.proofs.staged.claims import ChannelClaim, Claims, State, Stated, claims_of, has_derivation
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
)
from attnc.proofs.staged.line_leaves import CLOSE_LEAVES, LOOSE_LEAVES, leaf_intervals, prove_line
from attnc.proofs.staged.lines import Channel, HeadLine, StateForm, channels_of, joined, read_out_size
from attnc.proofs.stages.extraction import ProgramStage, ReadOut, stages_and_read_out
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]
TRUNCATION = "anchors that the engine skips because their weights are negligible"
LEAST_LEVEL = 6
"""Leaves are at most a 64th of the interval of t if the box is divided: the error of a head swings along the interval,
and is carried on as it is on each leaf."""
LEAST_SHARE = 2.0**-6
"""No leaf is stated to be closer than this share of the worst one: that gains nothing at the outputs, and the checker
would have to find it again."""
ROUGH_SCORES = 1e-6
"""Channels whose scores round by more than this share their leaves only with those that round about as much: within
a factor of 4."""


class _NotBoundedError(Exception):
    """The range of a part of the target is not known."""


class StagedProver(Prover):
    """Proves programs head by head: compositions, ReLU networks and truncated linear functions."""

    name = "head by head"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        """Whether the claim is about the largest error, and a derivation of the target is given or follows from it."""
        return request.p == math.inf and has_derivation(target, request.derivation)

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove that the program is within a bound of the target.

        ProgramError where the weights are not those of the derivation, or where it is one of another target. The
        bound is ∞ where the box is too wide for the range of a part to be known.
        """
        check(program)
        if program.input_shapes != target.input_shapes or math.prod(program.output_shape) != target.num_outputs:
            raise ProgramError(
                f"the program maps {program.input_shapes} to {program.output_shape}, the target {target.box.d} "
                f"variables to {target.num_outputs} outputs"
            )
        found, read = stages_and_read_out(program)
        claims = claims_of(target, request.derivation, program, len(found), read)
        walk = _StageWalk(claims, target, str(program.dtype))
        try:
            for number, stage in enumerate(found):
                if request.progress is not None:
                    request.progress("proving", number / len(found))
                walk.through(stage, request.seconds / len(found))
            composed, outputs = walk.composed(read)
        except _NotBoundedError:
            composed, outputs = NOT_BOUNDED, ()
        bound, terms = composed.bound, composed.terms
        if request.truncation:
            bound = float(up(bound + request.truncation))
            terms = (*terms, Term("truncation", request.truncation, TRUNCATION))
        return Proof(bound, terms, Stages(tuple(walk.heads), outputs, composed.axes), walk.is_complete)


class _StageWalk:
    """From stage to stage: `state` is the state after the last one."""

    def __init__(self, claims: Claims, target: Target, dtype: str) -> None:
        self.claims, self.box = claims, target.box
        sizes = self.box.magnitude
        casts = up(UNIT_ROUNDOFF[dtype] * sizes, 2) if dtype != "float64" else np.zeros(self.box.d)
        self.state = State(self.box.names, sizes, casts)
        self.heads: list[HeadProof] = []
        self.flow: list[FlowStage] = []
        self.is_complete = True
        self._ranges: list[tuple[float, float]] = []  # of the arguments of all heads
        self._numbers: dict[str, int] = {}  # of the heads, by name

    def through(self, part: ProgramStage, seconds: float) -> None:
        """Prove the heads of a stage, and find the state after it."""
        channels = channels_of(part, self.claims.claimed)
        claims = self.claims.of_stage(part, channels, self.state)
        claimed = {claim.output for claim in claims}
        passed = [self._passed(channels[i], i) for i in range(len(channels)) if i not in claimed]
        stage = _StageProof(part, claims, channels, self.state, self.claims.divides)
        stage.prove(seconds)
        self.heads += stage.heads
        self.is_complete &= stage.is_complete
        self.flow += [self._flow(stage)] if stage.order else []
        self._ranges += [(claim.argument.lo, claim.argument.hi) for claim in stage.order]
        self._numbers |= {claim.name: len(self._numbers) + i for i, claim in enumerate(stage.order)}
        known = list(zip(self.state.names, self.state.sizes, self.state.errors, strict=True))
        after = {i: known[source] for i, source in passed}
        for claim, size, error in zip(stage.order, stage.sizes, stage.errors, strict=True):
            after[claim.output] = (claim.name, size, error)
        rows = [after[i] for i in range(len(channels))]
        sizes, errors = (np.array([row[i] for row in rows], np.float64) for i in (1, 2))
        self.state = State(tuple(row[0] for row in rows), sizes, errors)

    def _passed(self, channel: Channel, output: int) -> tuple[int, int]:
        """A channel that is passed on as it is, and the one that it comes from."""
        if channel.numbers:
            raise ProgramError(
                f"{channel.name} is written by {len(channel.numbers)} heads, and the derivation does not say why"
            )
        if channel.source is None:
            raise ProgramError(f"{channel.name} is neither made by a head nor passed on as it is")
        return output, channel.source

    def _flow(self, stage: _StageProof) -> FlowStage:
        arguments = self._readings([claim.argument.form for claim in stage.order], stage.argument_errors)
        carriers = None
        if any(claim.carrier is not None for claim in stage.order):
            nothing = StateForm(np.zeros(len(self.state.names)), 0.0, 0.0)
            forms = [nothing if claim.carrier is None else claim.carrier.form for claim in stage.order]
            carriers = self._readings(forms, stage.carrier_errors)
        slopes = Slopes.stacked(stage.slopes)
        return FlowStage(arguments, slopes, stage.own, stage.rounding, carriers, tuple(stage.deviations))

    def _readings(self, forms: Sequence[StateForm], errors: Float[np.ndarray, " rows"]) -> Readings:
        """Combinations of channels as ones of the heads that they hold. An input adds no error but its rounding."""
        state, rows = self.state, np.array([form.weights for form in forms]).reshape(len(forms), -1)
        weights, casts = np.zeros((len(forms), len(self._numbers))), np.zeros(len(forms))
        for i, name in enumerate(state.names):
            if name in self._numbers:
                weights[:, self._numbers[name]] += rows[:, i]
            elif state.errors[i]:
                casts = up(casts + up(np.abs(rows[:, i]) * state.errors[i]))
        slack = np.array([form.slack for form in forms])
        return Readings(weights, np.where(casts > 0, up(slack + casts), slack), casts, errors)

    def composed(self, read: ReadOut) -> tuple[Composed, tuple[str, ...]]:
        """The bound of the outputs: the errors of the heads, of the stored coefficients, and rounding."""
        reach, unit = self.state.reach, UNIT_ROUNDOFF[str(read.dtype)]
        if not np.isfinite(reach).all():
            raise _NotBoundedError
        wanted = self.claims.outputs(self.state)
        stored = [StateForm(row, offset, 0.0) for row, offset in zip(read.rows, read.constants.tolist(), strict=True)]
        readings = self._readings(stored, np.zeros(len(stored)))
        differs, rounding = np.zeros((2, len(stored)))
        for i, (form, (goal, _)) in enumerate(zip(stored, wanted, strict=True)):
            row, offset, count = form.weights, form.constant, int(np.count_nonzero(form.weights))
            off = np.abs(row - goal.weights) @ reach + abs(offset - goal.constant) + goal.slack
            differs[i] = up(off * (1 + 4 * len(row) * U), 4) if off > 0 else 0.0
            size = read_out_size(row, offset, reach, read.dtype)
            rounded = gamma(count + 2, unit) * size if count > 1 or offset else 0.0
            if count == 1 and not offset and not np.isin(np.abs(row[row != 0]), (1.0, 2.0)).all():
                rounded = unit * size
            total = rounded * (1.0 if self.claims.divides else ROUNDING_ROOM) + readings.casts[i]
            rounding[i] = up(total, 8) if total else 0.0
        if not self.claims.divides:  # coefficients are those of the target, up to the rounding of gains
            differs, rounding = np.zeros(len(stored)), up(differs + rounding)
        box = Interval(self.box.lo[None], self.box.hi[None])
        outputs = Outputs(readings.weights, differs, rounding)
        names = [head.term for head in self.heads]
        composed = composed_bound(self.flow, names, outputs, self._ranges_on, box, self.claims.divides)
        texts = tuple(text for _, text in wanted) if math.isfinite(composed.bound) else ()
        return composed, texts

    def _ranges_on(self, boxes: Interval) -> tuple[Interval, Interval | None]:
        if self.claims.divides:
            return self.claims.ranges(boxes)
        return Interval(*np.array(self._ranges).reshape(1, -1, 2).transpose(2, 0, 1)), None


class _StageProof:
    """The heads of one stage: `order` are their claims, group by group, and the arrays are in that order."""

    def __init__(
        self,
        part: ProgramStage,
        claims: Sequence[ChannelClaim],
        channels: dict[int, Channel],
        state: State,
        divides: bool,
    ) -> None:
        self.part, self.channels, self.state, self.divides = part, channels, state, divides
        self.reach = state.reach
        if not np.isfinite(self.reach).all():
            raise _NotBoundedError
        self._lines = [self._line(claim) for claim in claims]
        self.groups = self._grouped(claims)
        places = [place for group in self.groups for place in group]
        self.order, self._lines = [claims[place] for place in places], [self._lines[place] for place in places]
        self.argument_errors = np.array([self._argument_error(claim.argument) for claim in self.order])
        self.carrier_errors = np.array([0.0 if c.carrier is None else self._error(c.carrier.form) for c in self.order])
        sizes = np.array([1.0 if claim.carrier is None else claim.carrier.size for claim in self.order])
        self.carrier_sizes = np.where(self.carrier_errors > 0, up(sizes + self.carrier_errors), sizes)
        ends = np.array([(claim.argument.lo, claim.argument.hi) for claim in self.order])
        if not np.isfinite([*self.argument_errors, *self.carrier_sizes, *ends.ravel()]).all():
            raise _NotBoundedError
        self.own, self.rounding, self.sizes, self.errors = np.zeros((4, len(self.order)))
        self.heads: list[HeadProof] = []
        self.slopes: list[Slopes] = []
        self.deviations: list[Deviations] = []
        self.is_complete = True

    def _line(self, claim: ChannelClaim) -> HeadLine:
        carrier = None if claim.carrier is None else claim.carrier.form
        return self.channels[claim.output].line(claim.argument.form, carrier, self.reach)

    def _grouped(self, claims: Sequence[ChannelClaim]) -> list[list[int]]:
        """Claims that are the same function of t; those at a constant t, and all if the box is divided, are alone."""
        if self.divides:
            return [[place] for place in range(len(claims))]
        found: dict[tuple[object, ...], list[int]] = {}
        for place, (claim, line) in enumerate(zip(claims, self._lines, strict=True)):
            rounds = line.score_rounding
            roughness = round(math.log2(max(ROUGH_SCORES, rounds)) / 2) if math.isfinite(rounds) else 0
            alone = None if claim.argument.form.weights.any() else place
            found.setdefault((claim.function_text, line.value_bytes, roughness, alone), []).append(place)
        return list(found.values())

    def _error(self, form: StateForm) -> float:
        """The error of a combination, whatever the signs of the errors of the state."""
        return float(up(np.abs(form.weights) @ self.state.errors + form.slack, len(form.weights) + 2))

    def _argument_error(self, argument: Stated) -> float:
        """By how much t may leave its exact range, with room for the checker unless it is an input."""
        error = self._error(argument.form)
        return error if argument.is_input else float(up(error * ARGUMENT_ROOM + RANGE_ROOM * argument.size, 4))

    def prove(self, seconds: float) -> None:
        first = 0
        for group in self.groups:
            self._prove(slice(first, first + len(group)), seconds / len(self.groups))
            first += len(group)

    def _prove(self, rows: slice, seconds: float) -> None:
        """Prove a group of claims by the leaves of the first one."""
        members, line = self.order[rows], joined(self._lines[rows])
        claim, size = members[0], float(self.carrier_sizes[rows].max())
        lo, hi = np.array([(member.argument.lo, member.argument.hi) for member in members]).T
        errors, limit = self.argument_errors[rows], max(member.limit for member in members)
        proof, box, held = prove_line(
            line.heads,
            claim.function,
            float(lo.min()),
            float(hi.max()),
            float(errors.max()),
            seconds,
            least_level=LEAST_LEVEL if self.divides else 0,
            tolerance=LOOSE_LEAVES if self.divides else CLOSE_LEAVES,
            limit=limit,
        )
        rounding, proof = line.rounding(size, proof)
        rounding = rounding if self.divides else float(up(ROUNDING_ROOM * rounding))
        deltas = up(proof.leaf_bounds[:, 0] + up(rounding / size), 2) if size > 0 else proof.leaf_bounds[:, 0]
        delta = float(deltas.max())
        deltas = np.maximum(deltas, LEAST_SHARE * delta) if self.divides else np.full(len(deltas), delta)
        slopes = Slopes.of(claim.function, lo, hi, errors, held, SLOPE_PIECES if self.divides else 1)
        self.slopes.append(slopes)
        own = float(up(size * delta + line.unsure, 2))
        self.own[rows], self.rounding[rows] = own, rounding
        if self.divides:
            fixed = 0.0
            if claim.carrier is not None:
                fixed = self.channels[claim.output].fixed_size(claim.carrier.form, self.reach)
            self.deviations.append(Deviations(leaf_intervals(proof), deltas, size, fixed, line.unsure))
        largest = slopes.values.mag.max(axis=1)
        self.errors[rows] = up(own + size * slopes.change + largest * self.carrier_errors[rows], 4)
        self.sizes[rows] = up(largest * size, 2) if claim.carrier is not None else up(largest, 2)
        self.is_complete &= proof.complete
        interval, leaves = (float(box.lo[0]), float(box.hi[0])), Leaves(proof.leaves, deltas)
        self.heads += [self._stated(member, interval, delta, held, claim.name, leaves) for member in members]

    def _stated(
        self,
        claim: ChannelClaim,
        interval: tuple[float, float],
        delta: float,
        held: tuple[float, float] | None,
        like: str,
        leaves: Leaves,
    ) -> HeadProof:
        """A claim with the leaves that prove it, or with the name of the head whose leaves do."""
        argument, carrier, is_first = claim.argument, claim.carrier, claim.name == like
        return HeadProof(
            stage=self.part.name,
            channel=self.part.outputs[claim.output],
            name=claim.name,
            term=claim.term,
            function=claim.function_text,
            argument=argument.text,
            interval=interval,
            bound=delta,
            argument_as=argument.known_as,
            carrier=None if carrier is None else carrier.text,
            carrier_as=None if carrier is None else carrier.known_as,
            carrier_size=None if carrier is None else float(self.carrier_sizes[self.order.index(claim)]),
            held=held,
            like=None if is_first else like,
            leaves=leaves if is_first else None,
        )
