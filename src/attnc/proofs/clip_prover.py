"""Truncated linear functions, proved from the weights: every output is a function of one number.

Output i is m + Δ·v, v what attention writes into one entry. From the weights it is found how the scores of its heads
depend on t = w_i·x_i + t_i; leaves prove that v is g(t) = (clip(t, a, b) − m)/Δ to within δ, on the range of t enlarged
by what t is off by. So the output is within |Δ|·δ of clip(t, a, b), up to what t is off by, as clips are 1-Lipschitz,
and up to the rounding of the last map. Outputs whose heads have the same keys are proved at once. However many
variables there are, leaves are those of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.ir.spec import check
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.deep.head_lines import StateForm, Writer, line_rounding, read_out_size, writes
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
from attnc.proofs.rounding.program import roundings
from attnc.proofs.stages.extraction import ProgramStage, ReadOut, stages, stages_and_read_out
from attnc.targets.expressions.expression import Expression
from attnc.targets.linear import TruncatedLinear, affine_range, affine_text, exact_text, free_letter

MAX_ANCHORS, HEADED = 4000, 4
"""Leaves are some two for each anchor, and for those of several heads so many times as many: with more, to prove them
again would take minutes."""
MAX_NUMBERS = 2**26
"""Slopes of the scores of all outputs: more are not looked at."""
MOST_SLACK = 0.25
"""Scores that are off by more are not those of w·x + t."""
APPROXIMATION = "approximation"


def prove_clips(
    program: Program,
    target: TruncatedLinear,
    *,
    time_budget: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
) -> NetworkProof:
    """ProgramError where the program is not one stage, of which every output reads one entry."""
    check(program)
    if program.input_shapes != target.input_shapes or program.output_shape != target.output_shape:
        raise ProgramError(f"the program maps {program.input_shapes} to {program.output_shape}; {target.describe()}")
    if target.text is None and target.definitions is None:
        raise ProgramError(f"{target.describe()}: they are too many to be stated")
    anchors = program.num_anchors * (HEADED if program.num_heads > 1 else 1)
    if anchors > MAX_ANCHORS:
        raise ProgramError(f"leaves of {program.num_anchors:,} anchors would be too many")
    if program.num_anchors * target.box.d * len(target.W) > MAX_NUMBERS:
        raise ProgramError(f"the scores of {target.describe()} are too many to be looked at one by one")
    found, read = stages_and_read_out(program)
    if len(found) != 1:
        raise ProgramError(f"the program has {len(found)} stages, not one")
    clips = _Clips(target, found[0], read)
    groups = clips.groups()
    proofs = []
    for number, members in enumerate(groups):
        if progress is not None:
            progress("proving", number / len(groups))
        proofs.append(clips.prove(members, time_budget / len(groups)))
    worst = max(proofs, key=lambda proof: proof.approximation + proof.rounding)
    terms = (
        Term(APPROXIMATION, worst.approximation, "of the clip by its anchors, and of what they are stored as"),
        Term("rounding", worst.rounding, "of the engine: of w·x + t, of scores and weights, and of sums"),
    )
    bound = float(up(sum(term.value for term in terms) * (1 + SPARE), 4))
    return NetworkProof(bound, terms, tuple(proof.units for proof in proofs), tuple(map(clips.text, clips.outputs)))


@dataclass(frozen=True, eq=False)
class _Output:
    """Output `number` is m + delta·v, v an entry of the state that these heads write."""

    number: int
    entry: int
    m: float
    delta: float
    form: StateForm  # t as a combination of the inputs
    writers: tuple[Writer, ...]
    lines: tuple[tuple[SoftHead[Enclosed], float], ...]  # the heads as ones of t, and what their values are off by


@dataclass(frozen=True, eq=False)
class _Proved:
    """What the outputs of a group are off by, at most."""

    units: UnitsProof
    approximation: float
    rounding: float


class _Clips:
    def __init__(self, target: TruncatedLinear, stage: ProgramStage, read: ReadOut) -> None:
        self.target, self.stage = target, stage
        (n, d), box = target.W.shape, target.box
        self.unit = UNIT_ROUNDOFF[str(read.dtype)]
        cast = up(self.unit * box.magnitude, 2) if str(read.dtype) != "float64" else np.zeros(box.d)
        self.sizes = up(box.magnitude + cast)  # of the inputs, as they are read
        self.cast = up((np.abs(target.W) * cast.reshape(n, d)).sum(axis=1), d + 1)  # of every t
        self.range = affine_range(target.W, target.t, Interval(box.lo[:d], box.hi[:d]))  # tokens have one box
        largest = np.maximum(np.abs(self.range.lo), np.abs(self.range.hi))
        self.off = up(self.cast * (1 + SPARE) + SPARE**2 * largest, 3)
        self.prefix = free_letter("s", box.names)
        self.outputs = self._outputs(read)

    def _outputs(self, read: ReadOut) -> list[_Output]:
        n, d = self.target.W.shape
        writers, found = self._writers(), []
        for i, (row, m) in enumerate(zip(read.rows, read.constants.tolist(), strict=True)):
            (entries,) = np.nonzero(row)
            if len(entries) != 1:
                raise ProgramError(f"output {i} is read from {len(entries)} entries, not from one")
            entry, weights = int(entries[0]), np.zeros((n, d))
            weights[i] = self.target.W[i]
            form = StateForm(weights.ravel(), float(self.target.t[i]), 0.0)
            lines = tuple(writer.along(form, None, self.sizes) for writer in writers[entry])
            if not max(float(line.offsets.radius.max()) for line, _ in lines) <= MOST_SLACK:
                raise ProgramError(f"the scores of output {i} do not depend on w·x + t alone")
            found.append(_Output(i, entry, m, float(row[entry]), form, writers[entry], lines))
        if len({output.entry for output in found}) != n:
            raise ProgramError("two outputs are read from one entry")
        return found

    def _writers(self) -> list[tuple[Writer, ...]]:
        found: dict[int, tuple[Writer, ...]] = {}
        program = self.stage
        for (stage, entries), rounds in zip(stages(program), roundings(program, casts_input=False), strict=True):
            for column, entry in enumerate(entries.tolist()):
                numbers = [number for number, head in enumerate(rounds.heads) if writes(head, column)]
                if not numbers:
                    raise ProgramError(f"{self.stage.outputs[entry]} is written by no head")
                found[entry] = tuple(Writer(stage, rounds, number, column) for number in numbers)
                found[entry][0].require_alone(self.stage.outputs[entry])
        return [found[entry] for entry in range(len(self.stage.outputs))]

    def groups(self) -> list[list[_Output]]:
        """Outputs that are one function of t, and have one of their own if t is constant."""
        found: dict[Any, list[_Output]] = {}
        for output in self.outputs:
            alone = None if output.form.weights.any() else output.number
            values = tuple(value_bytes(line) for line, _ in output.lines)
            found.setdefault((output.m, output.delta, alone, values), []).append(output)
        return list(found.values())

    def prove(self, members: Sequence[_Output], seconds: float) -> _Proved:
        first, ones = members[0], np.ones(len(members))
        numbers = [output.number for output in members]
        lines = tuple(
            joined_line([line for line, _ in same], ones)
            for same in zip(*(output.lines for output in members), strict=True)
        )
        unsure = float(up(max(sum(off for _, off in output.lines) for output in members), len(lines)))
        off = self.off[numbers]
        lo, hi = -float(up(off - self.range.lo[numbers]).max()), float(up(self.range.hi[numbers] + off).max())
        function = self._function(first)
        tree = Expression.parse(function).outputs[0]
        proof = prove_line(lines, tree, lo, hi, 0.0, seconds, tolerance=TOLERANCE)[0]
        rounds, peak, beside = self._roundings(members)
        dtype = first.writers[0].roundings.dtype
        rounding, proof = line_rounding(lines, rounds, dtype, unsure, 1.0, peak, proof)
        rounding = float(up(MORE_ROUNDING * up(rounding + beside)))
        units = UnitsProof(function, None, float(up(proof.bound + rounding, 2)), proof, tuple(map(self._unit, members)))
        delta = abs(first.delta)
        largest = max(abs(self.target.a - first.m), abs(self.target.b - first.m)) / delta
        written = up(np.array([largest + units.bound + unsure]), 4)
        size = read_out_size(np.array([delta]), first.m, written, np.dtype(dtype))
        read = MORE_ROUNDING * gamma(4, self.unit) * size
        approximation = float(up(delta * (proof.bound + unsure), 4))
        return _Proved(units, approximation, float(up(delta * rounding + read + self.off[numbers].max(), 8)))

    def _roundings(self, members: Sequence[_Output]) -> tuple[tuple[Any, ...], float, float]:
        """Of every head the largest of all members; the largest number on the way; and what is added to the heads."""
        found = [[writer.flat_roundings(output.form, self.sizes) for writer in output.writers] for output in members]
        ones = np.ones(len(members))
        rounds = tuple(joined_roundings([flat for flat, _ in same], ones) for same in zip(*found, strict=True))
        reach = up(self.sizes * (1 + 2 * self.unit), 2)
        beside = 0.0
        for output in members:
            whole, column = output.writers[0].roundings, output.writers[0].column
            size = whole.sizes[column] + whole.size_slopes[column] @ reach
            beside = max(beside, float(up(gamma(whole.count, self.unit) * size, len(reach) + 4)))
        return rounds, max(peak for same in found for _, peak in same), beside

    def _function(self, output: _Output) -> str:
        a, b, m, delta = map(exact_text, (self.target.a, self.target.b, output.m, output.delta))
        centred = f"(clip(t, {a}, {b}) - ({m}))" if output.m else f"clip(t, {a}, {b})"
        return f"{centred}*(1/({delta}))"

    def _unit(self, output: _Output) -> dict[str, Any]:
        i, (_, d) = output.number, self.target.W.shape
        names = self.target.box.names[i * d : (i + 1) * d]
        return {
            "stage": self.stage.name,
            "channel": self.stage.outputs[output.entry],
            "name": f"{self.prefix}{i}",
            "term": APPROXIMATION,
            "argument": affine_text(self.target.W[i], names, float(self.target.t[i])),
        }

    def text(self, output: _Output) -> str:
        """The output in the name of what it is read from."""
        return f"{exact_text(output.delta)}*{self.prefix}{output.number} + {exact_text(output.m)}".replace("+ -", "- ")
