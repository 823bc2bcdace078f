"""From the stored weights of a program to the stages that provers work on.

A stage is one softmax with all that is affine on both sides of it folded: for a query and a head, scores
s_k = q(u)·k_k(u), affine in u unless a moving query meets a moving key, and values that the head's W_O and the read-out
turn into outputs. A deep program is a chain of stages, each from the entries of a state that something reads to those
of the next. All stages of a program come from one folding of it for each type of numbers (`attnc.ir.normal_form`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine, Attention
from attnc.ir.normal_form import AffineForm, AttentionStage, FoldedHead, NormalForm, Stage, entry_name, normal_form
from attnc.ir.program import Program
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.rounding import up
from attnc.proofs.stages.enclosed_sparse import EnclosedForm, EnclosedSparse, SizeForm
from attnc.proofs.stages.one_stage import OneStage

if TYPE_CHECKING:
    from jaxtyping import Float, Int

F = TypeVar("F", bound=AffineForm)

MAX_SOFTMAX_BYTES = 2**30
"""The largest table of scores and values, in bytes, that one row of a softmax is written out as: 1 GiB."""


@dataclass(frozen=True, eq=False)
class FoldedStage(Generic[F]):
    """A stage in one type of numbers: the folded softmax, and the outputs as affine forms of the entries it writes.

    There is no softmax where the outputs of the program read none.
    """

    softmax: Stage[F] | None
    read: F

    @property
    def width(self) -> int:
        """The number of entries that the softmax writes for each query."""
        return 1 if self.softmax is None else len(self.softmax.channels)

    @property
    def num_outputs(self) -> int:
        return self.read.shape[0] * self.read.shape[1]

    @property
    def num_queries(self) -> int:
        return 0 if self.softmax is None else len(self.softmax.tokens)


class _Foldings:
    """The normal forms of a program, each made when it is first asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._made: dict[type[Any], NormalForm[Any]] = {}

    def __call__(self, numbers: type[F]) -> NormalForm[F]:
        if numbers not in self._made:
            self._made[numbers] = normal_form(self.program, numbers)
        return self._made[numbers]


@dataclass(frozen=True, eq=False)
class ProgramStage:
    """One stage of a program: from the entries of a state that are read to those of the next, or to the outputs."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  # names of the entries that are written; none where the outputs are those of the program
    tokens: Int[np.ndarray, " outputs"]  # the tokens that the outputs are entries of
    foldings: _Foldings
    number: int
    reads: Int[np.ndarray, " inputs"]  # the variables that the inputs are, among all before the stage
    writes: Int[np.ndarray, " outputs"] | None  # flat entries; None where the outputs are those of the program

    @property
    def dtype(self) -> np.dtype[np.floating]:
        return self.foldings.program.dtype

    def folded(self, numbers: type[F]) -> FoldedStage[F]:
        folded = self.foldings(numbers)
        if not folded.stages:
            return FoldedStage(None, folded.output)
        stage, read = folded.stages[self.number], folded.output
        if len(self.reads) < stage.num_variables:
            positions = np.zeros(stage.num_variables, np.int64)
            positions[self.reads] = np.arange(len(self.reads))
            stage = stage.renumbered(positions, len(self.reads))
        if self.writes is not None:
            size = len(stage.tokens) * len(stage.channels)
            read = numbers.identity((len(self.writes), 1), self.writes, size, self.dtype)
        return FoldedStage(stage, read)

    def silent_writers(self, output: str, num_heads: int) -> list[int]:
        """Heads whose values in an output are all 0, as those of relu(−x) where x ≥ 0: by the entries of their W_O."""
        softmax, (name, *_) = self.foldings(SizeForm).stages[self.number], output.partition("@")
        if not isinstance(softmax, AttentionStage) or name not in softmax.channels or len(softmax.heads) != num_heads:
            return []
        column = softmax.channels.index(name)
        return [number for number, head in enumerate(softmax.heads) if head.W_O[:, column].any()]


@dataclass(frozen=True, eq=False)
class ReadOut:
    """The affine map from the entries that the last stage writes to the outputs of the program, as it is stored."""

    rows: Float[np.ndarray, "outputs entries"]
    constants: Float[np.ndarray, " outputs"]
    dtype: np.dtype[np.floating]


def stages_and_read_out(program: Program) -> tuple[tuple[ProgramStage, ...], ReadOut]:
    """The stages of a deep program, and the affine map that reads the outputs off the last state.

    ProgramError if the program has a memory, or two affine maps one after the other.
    """
    found, last = _chain(program)
    mid, radius = last.dense()
    assert not radius.any()  # one stored map
    return found, ReadOut(mid[:, :-1], mid[:, -1], program.dtype)


def stage_chain(program: Program) -> tuple[ProgramStage, ...]:
    """The same stages, the last of them with the outputs of the program: one after the other they are the program."""
    found, _ = _chain(program)
    if not found:
        raise ProgramError("the program is an affine map: it has no stages")
    *before, last = found
    return (*before, replace(last, outputs=(), tokens=np.zeros(0, np.int64), writes=None))


def _chain(program: Program) -> tuple[tuple[ProgramStage, ...], EnclosedForm]:
    """The stages, each with the entries that are read as outputs; and the outputs of the program over the last ones."""
    require_alternating(program)
    foldings = _Foldings(program)
    sizes, exact = foldings(SizeForm), foldings(EnclosedForm)
    reads = np.arange(sizes.num_inputs)
    names = tuple(f"in.{i}" for i in reads)
    found = []
    for number, stage in enumerate(sizes.stages):
        after = sizes.stages[number + 1] if number + 1 < len(sizes.stages) else sizes.output
        writes = after.variables_used()  # by sizes: an entry that cancels later on is read all the same
        outputs = tuple(entry_name(stage, int(entry)) for entry in writes)
        tokens = stage.tokens[writes // max(1, len(stage.channels))]
        found.append(ProgramStage(stage.name, names, outputs, tokens, foldings, number, reads, writes))
        names, reads = outputs, writes
    positions = np.zeros(exact.output.num_variables, np.int64)
    positions[reads] = np.arange(len(reads))
    return tuple(found), exact.output.renumbered(positions, len(reads))


def require_alternating(program: Program) -> None:
    """ProgramError unless affine maps and softmaxes alternate, as they must in a chain of stages."""
    kinds = [isinstance(layer, Affine) for layer in program.layers]
    wanted = [number % 2 == 0 for number in range(len(kinds))]
    if program.memory or len(program.input_shapes) > 1 or kinds != wanted or not kinds[-1]:
        raise ProgramError(
            "a program is proved stage by stage if affine maps and softmaxes (of attention, or of features) alternate "
            "in it, with an affine map at both ends and no memory"
        )


def only_stage(program: Program) -> ProgramStage:
    """The whole program as one stage. ProgramError if it has not exactly one attention layer."""
    kinds = [layer for layer in program.all_layers if not isinstance(layer, Affine)]
    in_main = [layer for layer in program.layers if isinstance(layer, Attention)]
    if len(kinds) != 1 or len(in_main) != 1:
        found = ", ".join(f"{layer.name!r} ({type(layer).__name__.lower()})" for layer in kinds) or "none"
        raise ProgramError(
            "a program of one stage has one attention layer in its main stream, affine maps before and after it, and a "
            f"memory of affine maps; found, beside affine maps: {found}. Prove deeper programs stage by stage."
        )
    foldings = _Foldings(program)
    reads = np.arange(foldings(EnclosedForm).num_inputs)
    names = tuple(f"in.{i}" for i in reads)
    return ProgramStage(in_main[0].name, names, (), np.zeros(0, np.int64), foldings, 0, reads, None)


def one_stage(program: Program, numbers: type[EnclosedForm] = EnclosedForm) -> OneStage:
    """The program as one stage over all its outputs: a head for each pair of a query token and a head.

    ProgramError if it has not exactly one attention layer, or scores that are not affine in the input.
    """
    forms = only_stage(program).folded(numbers)
    return _one_stage(forms, OutputGroup(np.arange(forms.num_outputs), np.arange(forms.num_queries)))


def stages(program: Program | ProgramStage) -> tuple[tuple[OneStage, Int[np.ndarray, " outputs"]], ...]:
    """(stage, the outputs that it makes), flat, one for each set of query tokens that outputs are read from."""
    stage = only_stage(program) if isinstance(program, Program) else program
    exact = stage.folded(EnclosedForm)
    return tuple((_one_stage(exact, group), group.outputs) for group in output_groups(stage))


@dataclass(frozen=True, eq=False)
class OutputGroup:
    """Outputs, and the query tokens that they are read from, as numbers among those that are read at all."""

    outputs: Int[np.ndarray, " outputs"]
    queries: Int[np.ndarray, " queries"]


def output_groups(stage: ProgramStage) -> tuple[OutputGroup, ...]:
    """The outputs by the set of their query tokens; those that are read from none go with the first group."""
    sizes = stage.folded(SizeForm)  # an entry that cancels in the outputs is read all the same
    entries, num_variables = sizes.read.entries, sizes.read.num_variables
    read: list[dict[int, None]] = [{} for _ in range(sizes.num_outputs)]  # queries in ascending order, as columns are
    for output, column in zip(entries.row.tolist(), entries.column.tolist(), strict=True):
        if column < num_variables:
            read[output][column // sizes.width] = None
    queries = [tuple(found) for found in read]
    by_queries: dict[tuple[int, ...], list[int]] = {key: [] for key in sorted({*queries} - {()})} or {(): []}
    first = next(iter(by_queries))
    for output, key in enumerate(queries):
        by_queries[key or first].append(output)
    return tuple(
        OutputGroup(np.array(outputs, np.int64), np.array(key, np.int64)) for key, outputs in by_queries.items()
    )


def _one_stage(forms: FoldedStage[EnclosedForm], group: OutputGroup) -> OneStage:
    heads = tuple(_soft_head(head, len(group.outputs)) for head in query_heads(forms, group))
    mid, radius = affine_part(forms, group)
    return OneStage(
        heads, Enclosed(mid[:, -1].copy(), radius[:, -1].copy()), Enclosed(mid[:, :-1].copy(), radius[:, :-1].copy())
    )


def _soft_head(forms: QueryHead | SoftmaxRow, num_outputs: int) -> SoftHead[Enclosed]:
    """Scores and values of one query and one head, with W_O and the read-out in the values."""
    p = forms.num_keys
    mid, radius = forms.scores().dense(p)
    constants, moving = value_parts(forms.outputs(), p, num_outputs)
    return SoftHead(
        Enclosed(mid[:, :-1].copy(), radius[:, :-1].copy()),
        Enclosed(mid[:, -1].copy(), radius[:, -1].copy()),
        Enclosed(*constants),
        None if moving is None else Enclosed(*moving),
    )


Pair = tuple[np.ndarray, np.ndarray]


def value_parts(outputs: EnclosedSparse, num_keys: int, num_outputs: int) -> tuple[Pair, Pair | None]:
    """(mid, radius) of the values as they arrive in the outputs: of their constants, (keys, outputs), and of their
    slopes, (keys, outputs, inputs), where a value moves with the inputs."""
    d = outputs.num_columns - 1
    is_constant = outputs.column == d
    fixed = outputs.where(is_constant)
    mid, radius = np.zeros((2, num_keys * num_outputs))
    mid[fixed.row], radius[fixed.row] = fixed.mid, fixed.radius
    constants = mid.reshape(num_keys, num_outputs), radius.reshape(num_keys, num_outputs)
    if is_constant.all():
        return constants, None
    mid, radius = outputs.where(~is_constant).dense(num_keys * num_outputs)
    shape = (num_keys, num_outputs, d + 1)
    return constants, (mid.reshape(shape)[..., :d].copy(), radius.reshape(shape)[..., :d].copy())


def affine_part(forms: FoldedStage[Any], group: OutputGroup) -> tuple[np.ndarray, np.ndarray]:
    """(mid, radius), each (outputs, inputs + 1): the residual, and in the last column the constants of the read-out."""
    read, softmax = forms.read.entries.rows(group.outputs), forms.softmax
    d = forms.read.num_variables if softmax is None else softmax.num_variables
    is_last = read.column == read.num_columns - 1
    part = read.where(is_last).relabelled(read.row[is_last], np.full(is_last.sum(), d), d + 1)
    if isinstance(softmax, AttentionStage) and softmax.is_residual:
        moving = read.where(~is_last)
        moving = moving.relabelled(moving.row, moving.column, read.num_columns - 1)
        part = moving.times(softmax.queried.entries).plus(part)
    return part.dense(len(group.outputs))


def query_heads(forms: FoldedStage[Any], group: OutputGroup) -> Iterator[QueryHead | SoftmaxRow]:
    """For every query of the group every head of the layer; for a softmax over features, the row of the query."""
    softmax = forms.softmax
    if softmax is None:
        return
    width, read = forms.width, forms.read.entries.rows(group.outputs)
    for query in group.queries.tolist():
        own = read.where((read.column // width == query) & (read.column < read.num_columns - 1))
        writes = own.relabelled(own.column - query * width, own.row, len(group.outputs))
        if isinstance(softmax, AttentionStage):
            for number, head in enumerate(softmax.heads):
                yield QueryHead.of(head, number, query, writes)
        else:
            yield SoftmaxRow(query, softmax.logits.rows(np.array([query])), writes)


@dataclass(frozen=True, eq=False)
class QueryHead:
    """One query and one head, over the keys that the query sees."""

    head_number: int
    query_number: int
    query: EnclosedForm  # (1, d_k)
    keys: EnclosedForm  # (keys, d_k)
    values: EnclosedForm  # (keys, d_v)
    writes: EnclosedSparse  # (d_v, outputs): W_O and the read-out
    seen: Int[np.ndarray, " keys"]

    @classmethod
    def of(cls, head: FoldedHead[Any], number: int, query: int, writes: EnclosedSparse) -> QueryHead:
        seen, own = head.seen(query), head.queries.rows(np.array([query]))
        written = EnclosedSparse.of_matrix(own.stored(head.W_O)).times(writes)
        return cls(number, query, own, head.keys.rows(seen), head.values.rows(seen), written, seen)

    @property
    def num_keys(self) -> int:
        return len(self.seen)

    def scores(self, factors: Float[np.ndarray, " d_k"] | None = None) -> EnclosedSparse:
        """(keys, inputs + 1): Σ_j q_j(u)·k_kj(u); refused if a product has two factors that move.

        With `factors`, for forms of sizes, component j of the query is taken factors[j] times, rounded up.
        """
        query, d, d_k = self.query.entries, self.query.num_variables, max(1, self.query.shape[1])
        if factors is not None:
            mid = up((query.mid + query.radius) * factors[query.row], 2)
            query = EnclosedSparse(query.row, query.column, mid, np.zeros(len(mid)), query.num_columns)
        keys = self.keys.entries
        key, component = np.divmod(keys.row, d_k)
        is_fixed = keys.column == d
        fixed = keys.where(is_fixed).relabelled(key[is_fixed], component[is_fixed], d_k)
        scores = fixed.times(query)
        if is_fixed.all():
            return scores
        moving = keys.where(~is_fixed)
        key, component = key[~is_fixed], component[~is_fixed]
        both = np.isin(component, query.row[query.column < d])
        if both.any():
            first = int(np.flatnonzero(both)[0])
            raise ProgramError(
                f"component {component[first]} of the query and of key {key[first]} both depend on the input: their "
                "product is bilinear, and the prover takes scores that are affine in the input"
            )
        constant = query.where(query.column == d)
        constant = constant.relabelled(constant.row, np.zeros(len(constant.row), np.int64), 1)
        products = moving.relabelled(key * d + moving.column, component, d_k).times(constant)
        key, column = np.divmod(products.row, d)
        return scores.plus(products.relabelled(key, column, d + 1))

    def outputs(self) -> EnclosedSparse:
        """(keys·outputs, inputs + 1): the values as they arrive in the outputs."""
        return self.values.times_enclosed(self.writes).entries


@dataclass(frozen=True, eq=False)
class SoftmaxRow:
    """One row of a softmax over features: the scores are its logits, and the values come from the read-out alone."""

    query_number: int
    logits: EnclosedForm  # (1, features)
    writes: EnclosedSparse  # (features, outputs): the read-out

    def __post_init__(self) -> None:
        inputs, outputs = self.logits.num_variables, self.writes.num_columns
        if 8 * self.num_keys * (inputs + 1 + outputs) > MAX_SOFTMAX_BYTES:
            raise ProgramError(
                f"a softmax of {self.num_keys} features, {inputs} inputs and {outputs} outputs that are read is too "
                "wide to be proved"
            )

    @property
    def num_keys(self) -> int:
        return self.logits.shape[1]

    def scores(self) -> EnclosedSparse:
        return self.logits.entries

    def outputs(self) -> EnclosedSparse:
        """(features·outputs, inputs + 1): constants."""
        writes, d = self.writes, self.logits.num_variables
        return writes.relabelled(
            writes.row * writes.num_columns + writes.column, np.full(len(writes.row), d, np.int64), d + 1
        )
