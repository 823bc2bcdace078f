"""Deep programs, proved stage by stage.

A derivation says what every head is for: carrier·g(t), with t an affine combination of what the state already holds.
Nothing of it is believed. That it is a derivation of the target is checked (`deep.derivation_check`). From the weights
of a stage it is found how its scores and values depend on the state; what differs from the combination that was claimed
counts as an error. Then the head is a function of t alone, and is proved against g on the range of t, enlarged by the
error that t already has: |head − carrier·g(t̂)| ≤ |carrier|·δ + what the weights differ by + rounding. How such errors
travel to the outputs, and what of them cancels there, is found over many parts of the box (`deep.composed_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.deep.composed_bound import NOT_BOUNDED, Composed, Output, composed_bound
from attnc.proofs.deep.derivation_check import check_derivation
from attnc.proofs.deep.head_lines import StateForm, Writer, read_out_size, writes
from attnc.proofs.deep.line_proof import prove_line
from attnc.proofs.deep.rounded_leaves import leaf_intervals
from attnc.proofs.deep.staged_proof import HeadProof, StagedProof
from attnc.proofs.rounding.program import roundings
from attnc.proofs.stages.extraction import ProgramStage, ReadOut, stages, stages_and_read_out
from attnc.proofs.stages.one_stage import OneStage
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.tree import Product, Sum, Variable, to_text
from attnc.targets.parts.error_flow import Affine, Deviations, Link, Slopes
from attnc.targets.parts.part import Combination, Derivation, HeadClaim, Part, Source, in_order
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]
SPARE = 2.0**-44
"""By which ranges are taken larger, relatively: no checker, whose roundings are other ones, has to agree in the last
digits."""
LEAST_LEVEL = 6
"""Of the leaves of a head: its error swings along the interval, and is carried on as it is on each leaf."""
LEAST_SHARE = 2.0**-6
"""Of the largest: no leaf is stated to be closer, as that gains nothing and would have to be found again."""
ROOM = 1.125
"""By which errors of arguments are taken larger: slopes that a checker finds are not the same, and all that depends on
these errors is how far arguments reach."""


@dataclass(frozen=True, eq=False)
class _Known:
    """A channel of the state stands for a part, and is off by this error at most, whatever the signs of errors."""

    part: Part
    error: float
    size: float  # of the part: |carrier|·|g|, though the product may be smaller, as that is what a checker knows


def prove_staged(
    program: Program,
    target: ExpressionTarget,
    derivation: Derivation,
    *,
    time_budget: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
) -> StagedProof:
    """ProgramError where the weights are not what the derivation says, or not of this kind, or it is of another target.

    The bound is ∞ where the box is too wide for the range of a part to be known.
    """
    check(program)
    num_outputs = len(target.expression.outputs)
    if program.input_shapes != ((target.box.d,),) or math.prod(program.output_shape) != num_outputs:
        raise ProgramError(
            f"the program maps {program.input_shapes} to {program.output_shape}, the target {target.box.d} variables "
            f"to {num_outputs} outputs"
        )
    ranges = PartRanges(sub_boxes(target.box), target.expression.variables)
    check_derivation(derivation, target, ranges)
    ranges.require_bounded(in_order(derivation.outputs))
    sources = {part.index: part for part in in_order(derivation.outputs) if isinstance(part, Source)}
    inputs = [
        _Known(sources.get(i, Source(i)), _input_error(program, target, i), float(size))
        for i, size in enumerate(target.box.magnitude)
    ]
    found, read = stages_and_read_out(program)
    names = {id(known.part): name for known, name in zip(inputs, target.expression.variables, strict=True)}
    walk = _Walk(ranges, derivation, names, time_budget / max(1, len(derivation.heads)))
    state: list[_Known] = inputs
    for number, stage in enumerate(found):
        if progress is not None:
            progress("proving", number / len(found))
        state = walk.through(stage, state)
    composed = walk.composed(read, state)
    outputs = tuple(map(walk.text, derivation.outputs)) if math.isfinite(composed.bound) else ()
    return StagedProof(composed.bound, composed.terms, tuple(walk.heads), outputs, composed.axes)


def _input_error(program: Program, target: ExpressionTarget, i: int) -> float:
    """An input is exact in float64, and rounded once in float32."""
    if str(program.dtype) == "float64":
        return 0.0
    return float(up(UNIT_ROUNDOFF[str(program.dtype)] * target.box.magnitude[i], 2))


class _Walk:
    def __init__(
        self,
        ranges: PartRanges,
        derivation: Derivation,
        names: dict[int, str],
        seconds: float,
    ) -> None:
        self.ranges, self.derivation, self.names, self.seconds = ranges, derivation, names, seconds
        self.prefix = "s" + "_" * max(map(len, names.values()))  # no variable is called so
        self.heads: list[HeadProof] = []
        self.links: list[Link] = []

    def through(self, part: ProgramStage, state: Sequence[_Known]) -> list[_Known]:
        """What the channels after a stage stand for."""
        after: dict[int, _Known] = {}
        all_rounds = roundings(part, casts_input=False)
        for (stage, outputs), rounds in zip(stages(part), all_rounds, strict=True):
            for column, output in enumerate(outputs.tolist()):
                name = part.outputs[output]
                writers = [number for number, head in enumerate(rounds.heads) if writes(head, column)]
                if not writers and name in self.derivation.heads:
                    writers = part.silent_writers(name, len(stage.heads))
                if not writers:
                    after[output] = _carried(stage, column, state, name)
                elif len(writers) == 1 and name in self.derivation.heads:
                    after[output] = self._head(part.name, name, Writer(stage, rounds, writers[0], column), state)
                else:
                    raise ProgramError(
                        f"{name} is written by {len(writers)} heads, and the derivation does not say why"
                    )
        return [after[output] for output in range(len(part.outputs))]

    def _head(self, stage: str, name: str, writer: Writer, state: Sequence[_Known]) -> _Known:
        claim, sizes = self.derivation.heads[name], self._sizes(state)
        writer.require_alone(name)
        lo, hi = self.ranges(claim.argument)
        argument, carrier, size, off = self._affine(claim.argument, state), None, 1.0, 0.0
        if claim.carrier is not None:
            carrier = self._affine(claim.carrier, state)
            off = self._error_of(carrier, state)
            size = float(up(self.ranges.size(claim.carrier) + off))
        e_t = self._error_of(argument, state)
        if not isinstance(claim.argument, Source):  # where rounding differs in the ranges of t and in its error
            e_t = float(up(e_t * ROOM + SPARE * max(abs(lo), abs(hi)), 4))
        if not np.isfinite([lo, hi, e_t, size, *sizes]).all():
            return _Known(claim.part, math.inf, math.inf)  # an enclosure was too wide: nothing is proved from here on
        line, unsure = writer.along(argument, carrier, sizes)
        proof, box, held = prove_line((line,), claim.tree, lo, hi, e_t, self.seconds, LEAST_LEVEL)
        rounding, proof = writer.rounding(line, argument, unsure, size, sizes, proof)
        deltas = up(proof.leaf_bounds[:, 0] + up(rounding / size), 2) if size > 0 else proof.leaf_bounds[:, 0]
        delta = float(deltas.max())
        deltas = np.maximum(deltas, LEAST_SHARE * delta)
        own = float(up(size * delta + unsure, 2))
        fixed = 0.0 if carrier is None else writer.fixed_size(carrier, sizes)
        deviations = Deviations(leaf_intervals(proof), deltas, size, fixed, unsure)
        slopes, read = Slopes.of(claim.tree, lo, hi, e_t, held), _read(claim.argument, argument, state, e_t)
        carried = None
        if claim.carrier is not None and carrier is not None:
            carried = _read(claim.carrier, carrier, state, off)
        self.links.append(Link(claim.part, read, slopes, carried, own, rounding, deviations))
        text = self._claim(claim) | {"carrier_size": None if carrier is None else size}
        times = "" if claim.carrier is None else f", times {self.ranges.describe(claim.carrier)}"
        text |= {"term": f"{to_text(claim.tree)} of {self.ranges.describe(claim.argument)}{times}"}
        ends = float(box.lo[0]), float(box.hi[0])
        self.heads.append(HeadProof(stage, name, text, *ends, deltas, held, proof))
        self.names[id(claim.part)] = f"{self.prefix}{len(self.heads) - 1}"
        largest = slopes.values.mag.max()
        error = float(up(own + size * slopes.change + largest * off, 4))
        return _Known(claim.part, error, float(up(largest * (size if carrier is not None else 1.0), 2)))

    def _claim(self, claim: HeadClaim) -> dict[str, Any]:
        """name = carrier·function(t) at t = argument."""
        found: dict[str, Any] = {"name": f"{self.prefix}{len(self.heads)}", "function": to_text(claim.tree)}
        for name, part in (("argument", claim.argument), ("carrier", claim.carrier)):
            found[name] = None if part is None else self.text(part)
            if isinstance(part, Combination) and part.known is not None:
                found[f"{name}_as"] = self.ranges.describe(part)
        return found

    def text(self, part: Part) -> str:
        """A part of the state by its name, or as a combination of these."""
        if id(part) in self.names or not isinstance(part, Combination):
            return self.names[id(part)]
        terms = [Product((c.tree, Variable(self.names[id(inner)]))) for inner, c in part.terms if c.value != 0]
        return to_text(Sum((*terms, part.constant.tree)))

    def _sizes(self, state: Sequence[_Known]) -> Float[np.ndarray, " channels"]:
        """What every channel is at most, in absolute value."""
        return np.array([float(up(known.size + known.error)) for known in state])

    def _affine(self, part: Part, state: Sequence[_Known]) -> StateForm:
        """A part as a combination of what the state holds."""
        places = {id(known.part): i for i, known in enumerate(state)}
        weights, constant, slack = np.zeros(len(state)), 0.0, 0.0
        if id(part) in places:
            weights[places[id(part)]] = 1.0
            return StateForm(weights, 0.0, 0.0)
        if not isinstance(part, Combination):
            raise ProgramError(f"{self.ranges.describe(part)} is not in the state, nor a combination of what is")
        constant, slack = part.constant.value, part.constant.slack
        for inner, coefficient in part.terms:
            if id(inner) not in places and coefficient.value != 0:
                raise ProgramError(f"{self.ranges.describe(inner)} is not in the state")
            if coefficient.value != 0:
                weights[places[id(inner)]] += coefficient.value
            if coefficient.slack > 0:
                slack = float(up(slack + coefficient.slack * self.ranges.size(inner), 2))
        return StateForm(weights, constant, slack)

    def _error_of(self, affine: StateForm, state: Sequence[_Known]) -> float:
        """Of a combination, whatever the signs."""
        errors = [known.error for known in state]
        return float(up(np.abs(affine.weights) @ errors + affine.slack, len(state) + 2))

    def composed(self, read: ReadOut, state: Sequence[_Known]) -> Composed:
        """The bound of the outputs: the errors of the state, what the read-out differs by, and rounding."""
        sizes, unit, outputs = self._sizes(state), UNIT_ROUNDOFF[str(read.dtype)], []
        if not np.isfinite(sizes).all():
            return NOT_BOUNDED
        for row, offset, part in zip(read.rows, read.constants, self.derivation.outputs, strict=True):
            wanted, count = self._affine(part, state), int(np.count_nonzero(row))
            differs = np.abs(row - wanted.weights) @ sizes + abs(float(offset) - wanted.constant) + wanted.slack
            size = read_out_size(row, float(offset), sizes, read.dtype)
            rounded = gamma(count + 2, unit) * size if count > 1 or offset else 0.0
            if count == 1 and not offset and not np.isin(np.abs(row[row != 0]), (1.0, 2.0)).all():
                rounded = unit * size
            off = float(up(differs * (1 + 4 * len(row) * U), 4)) if differs > 0 else 0.0
            form = _read(part, StateForm(row, float(offset), 0.0), state)
            rounded = float(up(rounded + form.rounding, 8)) if rounded + form.rounding else 0.0
            outputs.append(Output(form.heads, off, rounded))
        names = [head.claim["term"] for head in self.heads]
        return composed_bound(self.ranges, self.links, names, outputs)


def _read(part: Part, form: StateForm, state: Sequence[_Known], error: float = 0.0) -> Affine:
    """A combination of channels as one of the heads that they stand for; of the inputs, what they are off by."""
    heads, casts = [], 0.0
    for known, weight in zip(state, form.weights.tolist(), strict=True):
        if weight and isinstance(known.part, Source):
            casts = float(up(casts + up(abs(weight) * known.error))) if known.error else casts
        elif weight:
            heads.append((known.part, weight))
    return Affine(part, heads, float(up(form.slack + casts)) if casts else form.slack, error, casts)


def _carried(stage: OneStage, column: int, state: Sequence[_Known], name: str) -> _Known:
    """A channel that is passed on as it is."""
    row = stage.linear.mid[column]
    (places,) = np.nonzero(row)
    off = (stage.linear.radius[column], stage.constant.mid[column], stage.constant.radius[column])
    exact = len(places) == 1 and row[places[0]] == 1 and not any(part.any() for part in off)
    known = state[int(places[0])] if exact else None
    if known is None:
        raise ProgramError(f"{name} is neither made by a head nor passed on as it is")
    return known
