"""Networks of ReLUs, proved layer by layer: every unit from the weights of its head, its error carried to the outputs.

Unit j of a hidden layer is relu(z_j), z = W·h + b. The program holds v_j ≈ gain_j·h_j + shift; from the weights of a
head it is found how its scores depend on t = gain_j·z_j, and leaves prove that it computes relu(t) + shift to within δ,
on the range of t enlarged by the error that t already has; relu is held at a limit that no exact t exceeds. Units whose
heads have the same keys are the same function of t, and are proved at once. Gains and shifts are read off the heads;
whatever they are, δ is proved.

Errors are affine forms. With d_lj the deviation of unit j of layer l itself, and σ its slope between the z that should
be and the z that is, 0 ≤ σ ≤ 1, and exactly 0 or 1 where the unit is off or on all over a part of the box,

    out − network(x) = Σ_l W_L·σ_{L−1}·W_{L−1}⋯σ_{l+1}·W_{l+1}·d_l + what the read-out differs by:

intervals of the σ, multiplied out with their signs, over many parts of the box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.ir.spec import check
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, up
from attnc.proofs.deep.head_lines import Writer, line_rounding, writes
from attnc.proofs.deep.like_units import (
    MORE_ROUNDING,
    SPARE,
    TOLERANCE,
    NetworkProof,
    UnitsProof,
    joined_line,
    joined_roundings,
    value_bytes,
)
from attnc.proofs.deep.line_proof import prove_line
from attnc.proofs.deep.relu_errors import (
    Units,
    error_terms,
    layer_term,
    read_out_error,
    sensitivities_of,
    unit_slopes,
)
from attnc.proofs.rounding.program import HeadRoundings, roundings
from attnc.proofs.stages.extraction import ProgramStage, stages, stages_and_read_out
from attnc.targets.expressions.tree import Call, Node, Number, Sum, to_text
from attnc.targets.linear import ReLUNetwork, exact_text
from attnc.targets.parts.part import T

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ROUGH = 1e-6
"""Units whose scores round by more than this are proved together only with those that round about as much."""


def prove_relu(
    program: Program,
    target: ReLUNetwork,
    *,
    time_budget: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
) -> NetworkProof:
    """ProgramError where the program is not the network layer by layer, unit j at token j."""
    check(program)
    if program.input_shapes != target.input_shapes or program.output_shape != target.output_shape:
        raise ProgramError(f"the program maps {program.input_shapes} to {program.output_shape}; {target.describe()}")
    found, read = stages_and_read_out(program)
    hidden = len(target.weights) - 1
    if len(found) != hidden:
        raise ProgramError(f"the program has {len(found)} stages, the network {hidden} hidden layers")
    live = [np.flatnonzero(W.any(axis=0)) for W in target.weights[1:]]  # of every hidden layer, the units that are read
    rows, columns = [*live, np.arange(len(target.weights[-1]))], [np.arange(target.box.d), *live]
    weights = [W[np.ix_(*kept)] for W, *kept in zip(target.weights, rows, columns, strict=True)]
    _require_moving(weights)
    pre = [
        Interval(found.lo[None, kept], found.hi[None, kept])
        for found, kept in zip(target.ranges()[:-1], live, strict=True)
    ]
    n, casts = target.box.d, str(program.dtype) != "float64"
    magnitude = target.box.magnitude
    cast = up(UNIT_ROUNDOFF[str(program.dtype)] * magnitude, 2) if casts else np.zeros(n)
    units = [Units(target.box.names, np.ones(n), np.zeros(n), magnitude, cast, cast, cast)]
    proofs: list[UnitsProof] = []
    slacks, limits = [], []
    for l, stage in enumerate(found):  # noqa: E741
        if progress is not None:
            progress("proving", l / hidden)
        layer = _Layer(target, l, stage, units[-1], weights[l], live[l])
        units.append(layer.prove(time_budget / hidden))
        proofs += layer.proofs
        slacks.append(layer.slack)
        limits.append(layer.limits)
    slopes = [unit_slopes(*known) for known in zip(pre, (layer.error for layer in units[1:]), limits, strict=True)]
    sensitivities = sensitivities_of(weights, slopes, 1)
    terms = error_terms(sensitivities, units, slacks, read_out_error(read, units[-1], weights[-1], target.biases[-1]))
    bound = float(up(sum(term.value for term in terms) * (1 + SPARE), 8))
    outputs = map(units[-1].text, weights[-1], target.biases[-1])
    return NetworkProof(bound, terms, tuple(proofs), tuple(outputs))


def _require_moving(weights: Sequence[Float[np.ndarray, "out in"]]) -> None:
    """ProgramError where a unit reads units, and none that moves: from its scores it cannot be told what it reads."""
    moves: np.ndarray = np.ones(weights[0].shape[1], dtype=bool)
    for W in weights[:-1]:
        moves, reads = np.any(W[:, moves], axis=1), np.any(W, axis=1)
        if (reads & ~moves).any():
            raise ProgramError("a unit of the network reads constant units alone")


class _Layer:
    """A hidden layer: the stage that makes it, what it reads, and what it should be; units that nothing reads apart."""

    def __init__(
        self,
        target: ReLUNetwork,
        number: int,
        stage: ProgramStage,
        before: Units,
        W: Float[np.ndarray, "units before"],
        live: Int[np.ndarray, " units"],
    ) -> None:
        self.stage, self.before, self.number = stage, before, number
        self.W, self.b = W, b = W, target.biases[number][live]
        self.forms = [before.form(row, float(offset)) for row, offset in zip(W, b, strict=True)]
        brought = up(np.abs(W) @ before.error, W.shape[1] + 1)
        off = up(brought + np.array([form.slack for form in self.forms]))
        whole = target.ranges()[number]  # over the box as one: what others find in its parts is no wider
        self.lo, self.hi = whole.lo[live], whole.hi[live]
        self.off = up(off * (1 + SPARE) + SPARE**2 * np.maximum(np.abs(self.lo), np.abs(self.hi)), 4)  # of every z
        self.slack = up(self.off - brought)  # the part of it that is new here
        z, _, s = target.letters
        self.inputs = [f"{z}{number + 1}_{j}" for j in live]
        self.names = tuple(f"{s}{number + 1}_{j}" for j in live)
        self.proofs: list[UnitsProof] = []
        self.limits = np.zeros(len(W))  # relu(z) is what a unit computes up to this z

    def prove(self, seconds: float) -> Units:
        """Every unit, and what it is off by."""
        count = len(self.forms)
        if not count or len(self.stage.tokens) != count or len(set(self.stage.tokens.tolist())) != count:
            raise ProgramError(
                f"stage {self.stage.name!r} makes {len(self.stage.outputs)} numbers, not one token for each of "
                f"{count} units that are read"
            )
        units, sizes = self._writers(), self.before.sizes
        lines = [writer.along(form, None, sizes) for writer, form in zip(units, self.forms, strict=True)]
        groups: dict[tuple[bytes, int, int | None], list[int]] = {}
        for unit, (writer, (head, _)) in enumerate(zip(units, lines, strict=True)):
            rounded = writer.flat_roundings(self.forms[unit], sizes)[0].score_offsets.max()
            size = round(math.log2(max(ROUGH, float(rounded))) / 2) if math.isfinite(rounded) else 0
            alone = None if self.forms[unit].weights.any() else unit  # at its constant input
            groups.setdefault((value_bytes(head), size, alone), []).append(unit)
        gain, shift, own, rounding = np.ones((4, count))
        for members in groups.values():
            of_group = _Group(self, [units[j] for j in members], [lines[j] for j in members], np.array(members))
            line = of_group.prove(seconds / len(groups))
            gain[members], shift[members] = line.gain, line.shift
            own[members], rounding[members] = line.own, line.rounding
        largest = np.maximum(self.hi, 0.0)
        return Units(self.names, gain, shift, largest, up(own + self.off), own, rounding)

    def claim(self, j: int, gain: float) -> dict[str, Any]:
        """What unit j is for: a function of t = gain·z_j."""
        scale = "" if gain == 1 else f"{exact_text(gain)}*"
        return {
            "stage": self.stage.name,
            "channel": self.stage.outputs[j],
            "name": self.names[j],
            "term": layer_term(self.number + 1),
            "argument": f"{scale}({self.before.text(self.W[j], self.b[j])})",
            "argument_as": f"{scale}{self.inputs[j]}",
        }

    def _writers(self) -> list[Writer]:
        found: dict[int, Writer] = {}
        program = self.stage
        for (stage, outputs), rounds in zip(stages(program), roundings(program, casts_input=False), strict=True):
            for column, output in enumerate(outputs.tolist()):
                numbers = [number for number, head in enumerate(rounds.heads) if writes(head, column)]
                if len(numbers) != 1:
                    raise ProgramError(f"{self.stage.outputs[output]} is written by {len(numbers)} heads, not by one")
                found[output] = Writer(stage, rounds, numbers[0], column)
                found[output].require_alone(self.stage.outputs[output])
        return [found[output] for output in range(len(self.stage.outputs))]


@dataclass(frozen=True, eq=False)
class _Found:
    gain: Float[np.ndarray, " units"]
    shift: float
    own: Float[np.ndarray, " units"]
    rounding: Float[np.ndarray, " units"]


class _Group:
    """Units of one layer whose heads have the same values: as functions of t = gain·z they are one."""

    def __init__(
        self,
        layer: _Layer,
        writers: Sequence[Writer],
        lines: Sequence[tuple[SoftHead[Enclosed], float]],
        members: Int[np.ndarray, " units"],
    ) -> None:
        self.layer, self.writers, self.members = layer, writers, members
        self.unsure = max(unsure for _, unsure in lines)
        kappas = np.array([line.slopes.mid[:, 0] for line, _ in lines])
        steepest = np.abs(kappas).max(axis=1)
        first, is_constant = lines[0][0], not layer.forms[members[0]].weights.any()
        if not is_constant and not (steepest > 0).all():
            raise ProgramError(f"a unit of stage {layer.stage.name!r} does not depend on its input")
        self.gain, self.limit, self.shift = np.ones(len(lines)), math.inf, 0.0  # of a gate, whose values are those of z
        if is_constant:
            # Of a unit at one place a gain cannot be seen: one for which its values reach twice as far as it does.
            values, z = first.values.mid[:, 0], abs(float(layer.b[members[0]]))
            self.limit, self.shift = float(np.ptp(values)), float(values.min())
            self.gain *= self.limit / (2 * z) if z > 0 else self.limit
        elif first.carried is None:
            kappa = kappas[0] / steepest[0]
            slope, self.limit, self.shift = self._read_off(kappa, first.offsets.mid, first.values.mid[:, 0])
            self.gain = slope * steepest
        self.line = joined_line([line for line, _ in lines], self.gain)
        lo, hi, off = layer.lo[members], layer.hi[members], layer.off[members]
        self.lo = float(-up(self.gain * up(off - lo), 2).max())
        self.hi = float(up(self.gain * up(hi + off), 2).max())
        self.limit = max(self.limit, float(up(self.gain * np.maximum(hi, 0.0) * (1 + SPARE**2), 2).max()))

    def prove(self, seconds: float) -> _Found:
        layer, members = self.layer, self.members
        relu = _relu(self.limit, self.shift)
        proof = prove_line((self.line,), relu, self.lo, self.hi, 0.0, seconds, tolerance=TOLERANCE)[0]
        flat, peak = self._roundings()
        rounds = self.writers[0].roundings
        rounding, proof = line_rounding((self.line,), (flat,), rounds.dtype, self.unsure, 1.0, peak, proof)
        rounding = float(up(MORE_ROUNDING * rounding))
        units = tuple(layer.claim(j, gain) for j, gain in zip(members.tolist(), self.gain.tolist(), strict=True))
        bound = float(up(proof.bound + rounding, 2))
        held = None if self.limit == math.inf else (float(proof.box.lo[0]), self.limit)
        layer.proofs.append(UnitsProof(to_text(_relu(math.inf, self.shift)), held, bound, proof, units))
        layer.limits[members] = self.limit / self.gain * (1 - 2.0**-40)
        rounded = up(rounding / self.gain, 4)
        own = up(up((proof.bound + self.unsure) / self.gain, 4) + rounded)
        return _Found(self.gain, self.shift, own, rounded)

    def _read_off(
        self, kappa: Float[np.ndarray, " keys"], offsets: Float[np.ndarray, " keys"], values: Float[np.ndarray, " keys"]
    ) -> tuple[float, float, float]:
        """slope, limit and shift, if it is slope·clip(y, 0, limit) + shift: any numbers would do for a proof.

        Neighbours in the order of their slopes have equal scores at y_1 < y_2 < …, midway between two anchors; so the
        anchors reach over (y_last − y_1)·(p − 1)/(p − 2) if they are equally spaced. The first is at the kink.
        """
        kappa, first = np.unique(kappa, return_index=True)
        offsets, values = offsets[first], values[first]
        p = len(kappa)
        if p < 3:
            raise ProgramError(f"the units of stage {self.layer.stage.name!r} have {p} anchors, too few for a clip")
        crossings = -np.diff(offsets) / np.diff(kappa)
        reach = (crossings[-1] - crossings[0]) * (p - 1) / (p - 2)
        slope = (values[-1] - values[0]) / reach if reach else math.inf
        if not (slope > 0 and np.isfinite(slope)):
            raise ProgramError(f"the units of stage {self.layer.stage.name!r} do not grow with their inputs")
        return float(slope), float(values[-1] - values[0]), float(values[0])

    def _roundings(self) -> tuple[HeadRoundings, float]:
        """The largest of all units, key by key."""
        sizes = self.layer.before.sizes
        found = [
            writer.flat_roundings(self.layer.forms[j], sizes)
            for writer, j in zip(self.writers, self.members, strict=True)
        ]
        return joined_roundings([flat for flat, _ in found], self.gain), max(peak for _, peak in found)


def _relu(limit: float, shift: float) -> Node:
    """relu(t) + shift, held at the limit."""
    relu = Call("relu", (T,)) if limit == math.inf else Call("clip", (T, Number(Fraction(0)), Number(Fraction(limit))))
    return Sum((relu, Number(Fraction(shift)))) if shift else relu
