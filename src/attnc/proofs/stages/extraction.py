"""From the stored weights of a program to the stages that provers work on.

A stage is one softmax, together with the folded affine maps on both sides of it. For a query and a head it has scores
s_k = q(u)·k_k(u), which are affine in u unless the query and a key both depend on u. Its values are mapped to outputs
by the W_O of the head and by the read-out. A deep program is a chain of stages. Each maps the entries of a state that
are read later to those of the next state. A program is folded once for each type of numbers (`attnc.ir.normal_form`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine, Attention
from attnc.ir.normal_form import AffineForm, AttentionStage, FoldedHead, NormalForm, Stage, entry_name, normal_form
from attnc.ir.program import Program
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.rounding import up
from attnc.proofs.stages.enclosed_sparse import EnclosedForm, EnclosedSparse, SizeForm, relative_width

F = TypeVar("F", bound=AffineForm)

MAX_SOFTMAX_BYTES = 2**30
"""The largest dense table of scores and values of one row of a softmax, in bytes: 1 GiB."""


@dataclass(frozen=True, eq=False)
class OneStage:
    """out(x) = b + B·x + Σ_h A_h(x), the function that the stored weights define in exact arithmetic."""

    heads: tuple[SoftHead[Enclosed], ...]
    constant: Enclosed  # (outputs,)
    linear: Enclosed  # (outputs, d)

    @classmethod
    def of_line(cls, heads: tuple[SoftHead[Enclosed], ...]) -> OneStage:
        """Return the sum of heads that have one input and one output."""
        nothing = Enclosed.exact(np.zeros((1, 1)))
        return cls(heads, nothing[0], nothing)

    def values(self, x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        """Return the outputs at points, to within rounding."""
        return sum((head.mid(x) for head in self.heads), self.constant.mid + x @ self.linear.mid.T)

    def gradients(self, x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs d"]:
        """Return the slopes of the outputs at points, to within rounding."""
        return sum((head.mid.gradients(x) for head in self.heads), np.repeat(self.linear.mid[None], len(x), axis=0))


@dataclass(frozen=True, eq=False)
class FoldedStage(Generic[F]):
    """A stage in one type of numbers: the folded softmax, and the outputs as affine forms of the entries it writes.

    `softmax` is None if the outputs of the program do not depend on one.
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


Foldings = Callable[..., NormalForm[Any]]
"""A function from a type of numbers to the normal form of a program in it. Results are cached."""


@dataclass(frozen=True, eq=False)
class ProgramStage:
    """One stage of a program: it maps the entries of a state that are read to those of the next, or to the outputs."""

    name: str
    outputs: tuple[str, ...]  # names of the entries that are written; empty if the outputs are those of the program
    tokens: Int[np.ndarray, " outputs"]  # the token of every output
    foldings: Foldings
    dtype: np.dtype[np.floating]
    number: int
    reads: Int[np.ndarray, " inputs"]  # the numbers of the inputs among all variables before the stage
    writes: Int[np.ndarray, " outputs"] | None  # flat entries; None if the outputs are those of the program

    def folded(self, numbers: type[F]) -> FoldedStage[F]:
        folded: NormalForm[F] = self.foldings(numbers)
        if not folded.stages:
            return FoldedStage(None, folded.output)
        stage, read = folded.stages[self.number], folded.output
        if len(self.reads) < stage.num_variables:
            stage = stage.renumbered(_positions(self.reads, stage.num_variables), len(self.reads))
        if self.writes is not None:
            size = len(stage.tokens) * len(stage.channels)
            read = numbers.identity((len(self.writes), 1), self.writes, size, self.dtype)
        return FoldedStage(stage, read)

    def silent_writers(self, output: str, num_heads: int) -> list[int]:
        """Return the heads whose W_O writes an output, although all their values there are 0: relu(−x) for x ≥ 0."""
        softmax, (name, *_) = self.foldings(SizeForm).stages[self.number], output.partition("@")
        if not isinstance(softmax, AttentionStage) or name not in softmax.channels or len(softmax.heads) != num_heads:
            return []
        column = softmax.channels.index(name)
        return [number for number, head in enumerate(softmax.heads) if head.W_O[:, column].any()]


def _foldings(program: Program) -> Foldings:
    return _foldings_of(program, relative_width())


@functools.lru_cache(maxsize=2)  # several provers, and several parts of a prover, fold the same program
def _foldings_of(program: Program, relative: float) -> Foldings:
    """Fold a program once for each type of numbers. Stored numbers are intervals of this relative half-width."""
    return functools.cache(functools.partial(normal_form, program))


def _positions(reads: Int[np.ndarray, " read"], num_variables: int) -> Int[np.ndarray, " variables"]:
    """Return the number of every variable among those that are read, and 0 for the others."""
    positions = np.zeros(num_variables, np.int64)
    positions[reads] = np.arange(len(reads))
    return positions


@dataclass(frozen=True, eq=False)
class StateForm:
    """T(u) = Σ weight_i·u_i + constant in floats. The exact combination is within `slack` of T at the exact state u.

    Several combinations of one state have one row each, in all arrays. If weights are intervals, `spread` has their
    half-widths, and those of the constants in its last column.
    """

    weights: Float[np.ndarray, "*rows channels"]
    constant: Float[np.ndarray, " *rows"] | float
    slack: Float[np.ndarray, " *rows"] | float = 0.0
    spread: Float[np.ndarray, "*rows channels+1"] | None = None

    @classmethod
    def stacked(cls, forms: Sequence[StateForm], num_channels: int) -> StateForm:
        weights = np.array([form.weights for form in forms]).reshape(len(forms), num_channels)
        return cls(weights, *(np.array([getattr(form, name) for form in forms]) for name in ("constant", "slack")))

    def error(self, errors: Float[np.ndarray, " channels"]) -> Float[np.ndarray, " *rows"]:
        """Bound the error of each combination of a state with these errors of any signs."""
        return up(np.abs(self.weights) @ errors + self.slack, self.weights.shape[-1] + 2)


def stages_and_read_out(program: Program) -> tuple[tuple[ProgramStage, ...], StateForm]:
    """Return the stages of a deep program, and the affine map that reads the outputs off the last state.

    Raise ProgramError if the program has a memory, or two affine maps in a row.
    """
    kinds = [isinstance(layer, Affine) for layer in program.unrolled_layers]
    wanted = [number % 2 == 0 for number in range(len(kinds))]
    if program.memory or len(program.input_shapes) > 1 or kinds != wanted or not kinds[-1]:
        raise ProgramError(
            "a program is proved stage by stage if affine maps and softmaxes (of attention, or of features) alternate "
            "in it, with an affine map at both ends and no memory"
        )
    foldings = _foldings(program)
    sizes, output = foldings(SizeForm), foldings(EnclosedForm).output
    reads = np.arange(sizes.num_inputs)
    found = []
    for number, stage in enumerate(sizes.stages):
        after = sizes.stages[number + 1] if number + 1 < len(sizes.stages) else sizes.output
        writes = after.variables_used()  # found by sizes: an entry that cancels later is still read
        outputs = tuple(entry_name(stage, int(entry)) for entry in writes)
        tokens = stage.tokens[writes // max(1, len(stage.channels))]
        found.append(ProgramStage(stage.name, outputs, tokens, foldings, program.dtype, number, reads, writes))
        reads = writes
    read = output.renumbered(_positions(reads, output.num_variables), len(reads)).dense()
    spread = read.radius if read.radius.any() else None  # one stored map is exact, unless weights are intervals
    return tuple(found), StateForm(read.mid[:, :-1], read.mid[:, -1], spread=spread)


def stage_chain(program: Program) -> tuple[ProgramStage, ...]:
    """Return the same stages, but the last one maps to the outputs of the program: composed they are the program."""
    found, read = stages_and_read_out(program)
    if read.spread is not None:
        raise ProgramError("stages are enclosed one by one only for exact weights, not for intervals of weights")
    if not found:
        raise ProgramError("the program is an affine map: it has no stages")
    *before, last = found
    return (*before, replace(last, outputs=(), tokens=np.zeros(0, np.int64), writes=None))


def only_stage(program: Program) -> ProgramStage:
    """Return the whole program as one stage. Raise ProgramError if it does not have exactly one attention layer."""
    kinds = [layer for layer in program.all_layers if not isinstance(layer, Affine)]
    in_main = [layer for layer in program.unrolled_layers if isinstance(layer, Attention)]
    if len(kinds) != 1 or len(in_main) != 1:
        found = ", ".join(f"{layer.name!r} ({type(layer).__name__.lower()})" for layer in kinds) or "none"
        raise ProgramError(
            "a program of one stage has one attention layer in its main stream, affine maps before and after it, and a "
            f"memory of affine maps; found, beside affine maps: {found}. Prove deeper programs stage by stage."
        )
    foldings = _foldings(program)
    reads = np.arange(foldings(EnclosedForm).num_inputs)
    return ProgramStage(in_main[0].name, (), np.zeros(0, np.int64), foldings, program.dtype, 0, reads, None)


def stages(program: Program | ProgramStage) -> tuple[tuple[OneStage, Int[np.ndarray, " outputs"]], ...]:
    """Return (stage, the numbers of its outputs, flat) for each set of query tokens that outputs are read from.

    Raise ProgramError unless there is exactly one attention layer, and scores are affine in the input.
    """
    stage = only_stage(program) if isinstance(program, Program) else program
    exact = stage.folded(EnclosedForm)
    return tuple((one_stage(exact, group), group.outputs) for group in output_groups(stage))


@dataclass(frozen=True, eq=False)
class OutputGroup:
    """Outputs, and the numbers of the query tokens that they are read from. Tokens that are not read have no number."""

    outputs: Int[np.ndarray, " outputs"]
    queries: Int[np.ndarray, " queries"]


def output_groups(stage: ProgramStage) -> tuple[OutputGroup, ...]:
    """Group the outputs by the set of their query tokens. Outputs that are read from none join the first group."""
    sizes = stage.folded(SizeForm)  # an entry that cancels in the outputs is still read
    read = sizes.read.entries.where(sizes.read.entries.column < sizes.read.num_variables)
    by_output = np.split(read.column // sizes.width, np.searchsorted(read.row, np.arange(1, sizes.num_outputs)))
    # np.split returns one part even if there are no outputs.
    queries = [tuple(np.unique(found).tolist()) for found in by_output[: sizes.num_outputs]]
    by_queries: dict[tuple[int, ...], list[int]] = {key: [] for key in sorted({*queries} - {()})} or {(): []}
    first = next(iter(by_queries))
    for output, key in enumerate(queries):
        by_queries[key or first].append(output)
    return tuple(
        OutputGroup(np.array(outputs, np.int64), np.array(key, np.int64)) for key, outputs in by_queries.items()
    )


def one_stage(forms: FoldedStage[EnclosedForm], group: OutputGroup) -> OneStage:
    """Return the outputs of a stage, with a soft head for each pair of a query token and a head."""
    heads = []
    for head in query_heads(forms, group):
        slopes, offsets = _split(head.scores().dense(head.num_keys))
        carried, constants = _split(value_forms(head))
        heads.append(SoftHead(slopes, offsets, constants, carried if carried.mid.shape[-1] else None))
    linear, constants = _split(affine_part(forms, group).dense(len(group.outputs)))
    return OneStage(tuple(heads), constants, linear)


def _split(forms: Enclosed) -> tuple[Enclosed, Enclosed]:
    """Split affine forms into their linear parts and their constants, which come last."""
    linear, constants = (
        Enclosed(np.ascontiguousarray(part.mid), np.ascontiguousarray(part.radius))
        for part in (forms[..., :-1], forms[..., -1])
    )
    return linear, constants


def value_forms(head: QueryHead) -> Enclosed:
    """Return the values as they arrive in the outputs, (keys, outputs, inputs + 1). Constants have 1 for inputs + 1."""
    outputs = head.outputs()
    if (outputs.column == outputs.num_columns - 1).all():
        outputs = replace(outputs, column=np.zeros_like(outputs.column), num_columns=1)
    shape = head.num_keys, head.writes.num_columns, outputs.num_columns
    found = outputs.dense(shape[0] * shape[1])
    return Enclosed(found.mid.reshape(shape), found.radius.reshape(shape))


def affine_part(forms: FoldedStage[Any], group: OutputGroup) -> EnclosedSparse:
    """Return the residual, and in the last column the constants of the read-out: (outputs, inputs + 1)."""
    read, softmax = forms.read.entries.rows(group.outputs), forms.softmax
    d = forms.read.num_variables if softmax is None else softmax.num_variables
    is_last = read.column == read.num_columns - 1
    part = read.where(is_last).relabelled(read.row[is_last], np.full(is_last.sum(), d), d + 1)
    if isinstance(softmax, AttentionStage) and softmax.is_residual:
        moving = replace(read.where(~is_last), num_columns=read.num_columns - 1)
        part = moving.times(softmax.queried.entries).plus(part)
    return part


def query_heads(forms: FoldedStage[Any], group: OutputGroup) -> Iterator[QueryHead]:
    """Yield every head of the layer for every query of the group. For a softmax over features, yield its rows."""
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
            yield QueryHead.of_logits(softmax.logits.rows(np.array([query])), query, writes)


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
        written = own.stored_matrix(head.W_O).times(writes)
        return cls(number, query, own, head.keys.rows(seen), head.values.rows(seen), written, seen)

    @classmethod
    def of_logits(cls, logits: EnclosedForm, query: int, writes: EnclosedSparse) -> QueryHead:
        """Return one row of a softmax over features: keys and values are unit vectors, and the query is the logits."""
        p, d = logits.shape[1], logits.num_variables
        if 8 * p * (d + 1 + writes.num_columns) > MAX_SOFTMAX_BYTES:
            raise ProgramError(
                f"a softmax of {p} features, {d} inputs and {writes.num_columns} outputs that are read is too wide to "
                "be proved"
            )
        ones = EnclosedSparse.exact(np.arange(p) * (p + 1), np.full(p, d), np.ones(p), d + 1)
        units = replace(logits, shape=(p, p), entries=ones)
        return cls(0, query, logits, units, units, writes, np.arange(p))

    @property
    def num_keys(self) -> int:
        return len(self.seen)

    def scores(self, factors: Float[np.ndarray, " d_k"] | None = None) -> EnclosedSparse:
        """Return the scores Σ_j q_j(u)·k_kj(u), (keys, inputs + 1).

        Raise ProgramError if both factors of a product depend on u. With `factors`, for forms of sizes, component j of
        the query is multiplied by factors[j], rounded up.
        """
        query, d, d_k = self.query.entries, self.query.num_variables, max(1, self.query.shape[1])
        if factors is not None:
            mid = up((query.mid + query.radius) * factors[query.row], 2)
            query = replace(query, mid=mid, radius=np.zeros(len(mid)))
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
        """Return the values as they arrive in the outputs, (keys·outputs, inputs + 1)."""
        return self.values.times_enclosed(self.writes).entries
