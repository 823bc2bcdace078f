"""Deep programs, proved stage by stage.

A derivation says what every head is for: carrier·g(t), with t an affine combination of what the state already holds.
Nothing of it is believed. That it is a derivation of the target is checked (`derivation_check`). From the weights of a
stage it is found how its scores and values depend on the state; what differs from the combination that was claimed
counts as an error. Then the head is a function of t alone, and is proved against g on the range of t, enlarged by the
error that t already has. With e_t that error,

    |head − carrier·g(t)| ≤ |carrier|·(δ + ω_g(e_t)) + |g|·e_carrier + what the weights differ by + rounding.

Every error is kept as a sum over its sources, so that the ledger says what each head costs in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.certificates.branching import Proof
from attnc.certificates.derivation_check import check_derivation
from attnc.certificates.extraction import stages
from attnc.certificates.head_lines import StateForm, Writer, leaf_boxes, writes
from attnc.certificates.line_proof import modulus, prove_line
from attnc.certificates.one_stage import OneStage
from attnc.certificates.program_roundings import roundings
from attnc.certificates.slices import Slice, slices
from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.numerics.bound import Term
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.part_ranges import PartRanges
from attnc.targets.parts import Combination, Derivation, HeadClaim, Part, Source, Unary, in_order
from attnc.targets.tree import Product, Sum, Variable, to_text

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]
SPARE = 2.0**-22
"""By which errors of arguments are taken larger, relatively, and as a square ranges: no checker, whose roundings are
other ones, has to agree in the last digits."""
Errors = Mapping[str, float]
"""By source; they add up."""


@dataclass(frozen=True, eq=False)
class HeadProof:
    """|A(t) − g(t)| ≤ delta for t in [lo, hi], for the head that writes `channel`."""

    stage: str
    channel: str
    claim: Mapping[str, Any]  # what it is for, in the names of the inputs and of the heads before it
    lo: float
    hi: float
    delta: float
    rounding: float  # of the carrier's largest
    passed: float  # what g makes of the error that its argument already has
    held: tuple[float, float] | None  # where g is held at its ends, beyond which it is not defined
    proof: Proof

    def as_json(self) -> dict[str, Any]:
        """The claim with the leaves that prove it."""
        return {
            "stage": self.stage,
            "channel": self.channel,
            **self.claim,
            "interval": [self.lo, self.hi],
            "held": None if self.held is None else list(self.held),
            "bound": float(up(self.delta + self.rounding, 2)),
            "passed": self.passed,
            "leaves": [leaf.as_json() for leaf in self.proof.leaves],
        }


@dataclass(frozen=True, eq=False)
class StagedProof:
    """sup |f − program| ≤ bound: the errors of all heads, carried to the outputs, which are combinations of heads."""

    bound: float
    terms: tuple[Term, ...]
    heads: tuple[HeadProof, ...]
    outputs: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return all(head.proof.complete for head in self.heads)

    def as_json(self) -> tuple[dict[str, Any], ...]:
        return tuple(head.as_json() for head in self.heads)


@dataclass(frozen=True, eq=False)
class _Known:
    """A channel of the state stands for a part, and is off by these errors."""

    part: Part
    errors: Errors

    @property
    def error(self) -> float:
        return total(self.errors)


def total(errors: Errors) -> float:
    return float(up(math.fsum(errors.values()), 2)) if errors else 0.0


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
    ranges = PartRanges(target.box, target.expression.variables)
    check_derivation(derivation, target, ranges)
    ranges.require_bounded(in_order(derivation.outputs))
    sources = {part.index: part for part in in_order(derivation.outputs) if isinstance(part, Source)}
    inputs = [_Known(sources.get(i, Source(i)), _input_errors(program, target, i)) for i in range(target.box.d)]
    found, read = slices(program)
    names = {id(known.part): name for known, name in zip(inputs, target.expression.variables, strict=True)}
    walk = _Walk(ranges, derivation, names, time_budget / max(1, len(derivation.heads)))
    state: list[_Known | None] = list(inputs)
    for number, stage in enumerate(found):
        if progress is not None:
            progress("proving", number / len(found))
        state = walk.through(stage, state)
    errors = walk.outputs(read, state)
    totals = np.array([total(of_output) for of_output in errors])
    worst = errors[int(np.argmax(np.where(np.isnan(totals), math.inf, totals)))]
    ledger = sorted(worst.items(), key=lambda item: -item[1])
    terms = tuple(Term(name, value, _reason(name)) for name, value in ledger)
    outputs = tuple(map(walk.text, derivation.outputs)) if math.isfinite(total(worst)) else ()
    return StagedProof(total(worst), terms, tuple(walk.heads), outputs)


def _reason(name: str) -> str:
    if name == "coefficients":
        return "affine coefficients of the expression, as they are stored"
    return "of the engine, in all stages" if name == "rounding" else "of this head, as far as it moves the output"


def _input_errors(program: Program, target: ExpressionTarget, i: int) -> Errors:
    """An input is exact in float64, and rounded once in float32."""
    if str(program.dtype) == "float64":
        return {}
    return {"rounding": float(up(UNIT_ROUNDOFF[str(program.dtype)] * target.box.magnitude[i], 2))}


class _Walk:
    def __init__(self, ranges: PartRanges, derivation: Derivation, names: dict[int, str], seconds: float) -> None:
        self.ranges, self.derivation, self.names, self.seconds = ranges, derivation, names, seconds
        self.prefix = "s" + "_" * max(map(len, names.values()))  # no variable is called so
        self.heads: list[HeadProof] = []

    def through(self, part: Slice, state: Sequence[_Known | None]) -> list[_Known | None]:
        """What the channels after a stage stand for."""
        after: dict[int, _Known] = {}
        all_rounds = roundings(part.program, casts_input=False)
        for (stage, outputs), rounds in zip(stages(part.program), all_rounds, strict=True):
            for column, output in enumerate(outputs.tolist()):
                name = part.outputs[output]
                writers = [number for number, head in enumerate(rounds.heads) if writes(head, column)]
                if not writers:
                    after[output] = _carried(stage, column, state, name)
                elif len(writers) == 1 and name in self.derivation.heads:
                    after[output] = self._head(part.name, name, Writer(stage, rounds, writers[0], column), state)
                else:
                    raise ProgramError(
                        f"{name} is written by {len(writers)} heads, and the derivation does not say why"
                    )
        return [after[output] for output in range(len(part.outputs))]

    def _head(self, stage: str, name: str, writer: Writer, state: Sequence[_Known | None]) -> _Known:
        claim, sizes = self.derivation.heads[name], self._sizes(state)
        writer.require_alone(name)
        lo, hi = self.ranges(claim.argument)
        largest = self.ranges.size(Unary(claim.argument, claim.tree))
        if not np.isfinite([lo, hi, largest, *sizes]).all():
            return _Known(claim.part, {name: math.inf})  # an enclosure was too wide: nothing is proved from here on
        argument, carrier = self._affine(claim.argument, state), None
        off: dict[str, float] = {}
        size = 1.0  # of the carrier
        if claim.carrier is not None:
            carrier = self._affine(claim.carrier, state)
            off = self._errors_of(carrier, state)
            size = float(up(self.ranges.size(claim.carrier) + total(off) + carrier.slack, 2))
        line, unsure = writer.along(argument, carrier, sizes)
        before = self._errors_of(argument, state)
        e_t = float(up(total(before) + argument.slack, 2))
        if not isinstance(claim.argument, Source):  # where rounding differs in the ranges of t and in its error
            e_t = float(up(e_t * (1 + SPARE) + SPARE**2 * max(abs(lo), abs(hi)), 4))
        if not math.isfinite(e_t + size):
            return _Known(claim.part, {name: math.inf})
        proof, box, held = prove_line(line, claim.tree, lo, hi, e_t, self.seconds)
        passed = float(up(modulus(claim.tree, lo, hi, e_t) * (1 + SPARE)))
        errors = {source: value * (passed / e_t) for source, value in before.items()} if e_t > 0 else {}
        own = f"{to_text(claim.tree)} of {self.ranges.describe(claim.argument)}"
        fresh = passed * (e_t - total(before)) / e_t if e_t > 0 else 0.0
        errors[own] = errors.get(own, 0.0) + proof.bound + float(up(fresh, 4))
        # e_t is some units in the last place above what it is the sum of, and so are the parts of ω(e_t) below.
        errors = {source: float(up(value * size, 32)) for source, value in errors.items()}
        if carrier is not None:
            for source, value in (*off.items(), (own, carrier.slack)):
                errors[source] = float(up(errors.get(source, 0.0) + up(value * largest)))
        errors[own] = float(up(errors[own] + unsure, 4))
        rounding = writer.rounding(line, argument, unsure, size, sizes, *leaf_boxes(proof))
        own_rounding = float(up(rounding / size, 2)) if size > 0 else 0.0
        ends = float(box.lo[0]), float(box.hi[0])
        self.heads.append(
            HeadProof(
                stage, name, self._claim(claim) | {"term": own}, *ends, proof.bound, own_rounding, passed, held, proof
            )
        )
        self.names[id(claim.part)] = f"{self.prefix}{len(self.heads) - 1}"
        errors["rounding"] = float(up(errors.get("rounding", 0.0) + rounding))
        return _Known(claim.part, errors)

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

    def _sizes(self, state: Sequence[_Known | None]) -> Float[np.ndarray, " channels"]:
        """What every channel is at most, in absolute value."""
        return np.array([0.0 if k is None else float(up(self.ranges.size(k.part) + k.error)) for k in state])

    def _affine(self, part: Part, state: Sequence[_Known | None]) -> StateForm:
        """A part as a combination of what the state holds."""
        places = {id(known.part): i for i, known in enumerate(state) if known is not None}
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
            slack = float(up(slack + coefficient.slack * self.ranges.size(inner), 2))
        return StateForm(weights, constant, slack)

    def _errors_of(self, affine: StateForm, state: Sequence[_Known | None]) -> dict[str, float]:
        errors: dict[str, float] = {}
        for weight, known in zip(affine.weights, state, strict=True):
            if weight and known is not None:
                for source, value in known.errors.items():
                    errors[source] = float(up(errors.get(source, 0.0) + up(abs(weight) * value)))
        return errors

    def outputs(self, read: Program, state: Sequence[_Known | None]) -> list[dict[str, float]]:
        """The errors of the outputs: those of the state, what the read-out differs by, and rounding."""
        layer = read.layers[0]
        weight = layer.weight.matrix(2).toarray()  # type: ignore[union-attr]
        constant = layer.constant.matrix(1).toarray().ravel()  # type: ignore[union-attr]
        sizes, found = self._sizes(state), []
        if not np.isfinite(sizes).all():
            return [{"not bounded": math.inf}]
        unit = UNIT_ROUNDOFF[str(read.dtype)]
        for row, offset, part in zip(weight, constant, self.derivation.outputs, strict=True):
            wanted = self._affine(part, state)
            errors = self._errors_of(StateForm(row.astype(float), float(offset), 0.0), state)
            differs = np.abs(row - wanted.weights) @ sizes + abs(float(offset) - wanted.constant) + wanted.slack
            if differs > 0:
                errors["coefficients"] = float(up(differs * (1 + 4 * len(row) * U), 4))
            size = np.abs(row) @ sizes + abs(float(offset))
            rounded = gamma(int(np.count_nonzero(row)) + 2, unit) * size if np.count_nonzero(row) > 1 or offset else 0.0
            if np.count_nonzero(row) == 1 and not offset and not np.isin(np.abs(row[row != 0]), (1.0, 2.0, 0.5)).all():
                rounded = unit * size
            errors["rounding"] = float(up(errors.get("rounding", 0.0) + rounded, 8))
            found.append({source: value for source, value in errors.items() if value > 0} or {"rounding": 0.0})
        return found


def _carried(stage: OneStage, column: int, state: Sequence[_Known | None], name: str) -> _Known:
    """A channel that is passed on as it is."""
    row = stage.linear.mid[column]
    (places,) = np.nonzero(row)
    off = (stage.linear.radius[column], stage.constant.mid[column], stage.constant.radius[column])
    exact = len(places) == 1 and row[places[0]] == 1 and not any(part.any() for part in off)
    known = state[int(places[0])] if exact else None
    if known is None:
        raise ProgramError(f"{name} is neither made by a head nor passed on as it is")
    return known
