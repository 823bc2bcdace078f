"""The number of roundings of a stage, and the sizes of the numbers that are rounded, for every engine at once.

An evaluation of affine maps only multiplies and adds. Every path from an input to a result is a product of weights.
Each multiplication and addition on it rounds once, and n roundings are a factor 1 + θ, |θ| ≤ γ_n. So a result is off by
at most γ_n times the sum of the absolute values of all its paths, which is a `SizeForm`. `RoundingForm` counts n. Both
are types of numbers for `attnc.ir.normal_form`, which folds a program once for each type. Exact operations are not
counted: products with ±2^k, sums of one term.

Engines fold several affine maps into one before they read an input. The products are the same in another order, and the
sum over the inputs comes last. If two maps or more round, its terms are counted as well. Some engines move the origin
of an axis, so a sum of products counts as a sum of at least three terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from attnc.ir.layers import Affine
from attnc.ir.normal_form import AttentionStage, FoldedHead, SoftmaxStage
from attnc.ir.program import Program
from attnc.ir.summing import MOST_KEYS, depth
from attnc.numerics.arrays import Bool, Float, Int
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.stages.enclosed_sparse import EnclosedForm, EnclosedSparse, SizeForm
from attnc.proofs.stages.extraction import (
    FoldedStage,
    OutputGroup,
    ProgramStage,
    QueryHead,
    affine_part,
    only_stage,
    output_groups,
    query_heads,
    value_forms,
)

FAR_FROM_OVERFLOW = 2.0**-24
"""The share of the largest number below which all numbers of an engine stay on a half-line. The checker asks for it:
sums of 2^21 terms then do not overflow."""


@dataclass(frozen=True)
class Gain:
    """The effect of underflow: `terms` products are each off by a subnormal number, which grows by at most `factor`.

    A product that underflows is multiplied by weights of later maps or, if maps are folded first, by an input.
    """

    terms: int = 0
    factor: float = 1.0

    def through(self, weights: Float[np.ndarray, " entries"], row: Int[np.ndarray, " entries"]) -> Gain:
        if not len(row):
            return self
        rows = np.bincount(row, np.abs(weights).astype(np.float64))
        return Gain(self.terms + int(np.bincount(row).max()), self.factor * max(1.0, float(rows.max()) * (1 + 1e-9)))

    @property
    def size(self) -> float:
        return self.terms * self.factor


@dataclass(frozen=True, eq=False)
class RoundingForm:
    """The roundings of every entry of a (rows, columns) state, flat. `is_there` is False for entries that are zero.

    `count` is the number of roundings of an entry, and `maps` the number of maps that round it. `is_power` means that
    it is a constant ±2^k, k ≥ 0. `size` is the sum of the absolute values of all its paths, for |u| ≤ 1. `peak` is the
    largest size in this state and in those before it.
    """

    shape: tuple[int, int]
    is_there: Bool[np.ndarray, " entries"]
    count: Int[np.ndarray, " entries"]
    maps: Int[np.ndarray, " entries"]
    is_power: Bool[np.ndarray, " entries"]
    size: Float[np.ndarray, " entries"]
    gain: Gain
    peak: float
    num_variables: int

    @classmethod
    def identity(cls, shape: tuple[int, int], variables: np.ndarray, count: int, dtype: np.dtype[Any]) -> RoundingForm:
        size = shape[0] * shape[1]
        zero, no, yes = np.zeros(size, np.int64), np.zeros(size, bool), np.ones(size, bool)
        return cls(shape, yes, zero, zero, no, np.ones(size), Gain(), 1.0, count)

    @classmethod
    def after_stage(
        cls, writes: np.ndarray, residual: RoundingForm | None, num_carried: int, dtype: np.dtype[Any]
    ) -> tuple[RoundingForm, np.ndarray]:
        """Start the counts anew: every entry of the state after a stage is a variable."""
        written = np.arange(writes.size)
        return cls.identity((len(writes), writes.shape[1]), written, writes.size + num_carried, dtype), written

    def rows(self, rows: Int[np.ndarray, " chosen"]) -> RoundingForm:
        places = (np.asarray(rows)[:, None] * self.shape[1] + np.arange(self.shape[1])).ravel()
        names = ("is_there", "count", "maps", "is_power", "size")
        chosen = {name: getattr(self, name)[places] for name in names}
        return replace(self, shape=(len(rows), self.shape[1]), **chosen)

    def times(self, matrix: Float[np.ndarray, "columns new_columns"]) -> RoundingForm:
        (tokens, width), new_width = self.shape, matrix.shape[1]
        j, m = np.nonzero(matrix)
        token = np.arange(tokens)[:, None]
        row, column = (token * new_width + m).ravel(), (token * width + j).ravel()
        weights = np.broadcast_to(matrix[j, m], (tokens, len(j))).ravel()
        return self._mapped((tokens, new_width), row, column, weights, np.zeros(tokens * new_width))

    def through(self, layer: Affine) -> RoundingForm:
        weight, constants = layer.weight, layer.constant.dense().astype(np.float64).ravel()
        row, column = weight.flat(slice(0, 2)), weight.flat(slice(2, None))
        return self._mapped((weight.shape[0], weight.shape[1]), row, column, weight.values, constants)

    def _mapped(
        self,
        shape: tuple[int, int],
        row: Int[np.ndarray, " entries"],
        column: Int[np.ndarray, " entries"],
        weights: Float[np.ndarray, " entries"],
        constants: Float[np.ndarray, " rows"],
    ) -> RoundingForm:
        """Return the form after an affine map with these weights at (row, column), and these constants."""
        total, gain = shape[0] * shape[1], self.gain.through(weights, row)
        kept = (weights != 0) & self.is_there[column]
        row, column, weights = row[kept], column[kept], weights[kept].astype(np.float64)
        terms = np.bincount(row, minlength=total) + (constants != 0)
        is_exact = _is_power(weights) | self.is_power[column]
        inexact = np.bincount(row, ~is_exact, total) > 0
        count, maps = np.zeros((2, total), np.int64)
        np.maximum.at(count, row, self.count[column])
        np.maximum.at(maps, row, self.maps[column])
        single = np.bincount(row, _is_power(weights) & self.is_power[column], total) > 0
        is_power = (terms == 1) & np.where(constants != 0, _is_power(constants), single)
        rounds = np.maximum(terms - 1, 0) + inexact
        with quiet():
            size = np.bincount(row, np.abs(weights) * self.size[column], total) + np.abs(constants)
        peak = max(self.peak, float(size.max(initial=0.0)))
        return RoundingForm(
            shape, terms > 0, count + rounds, maps + (rounds > 0), is_power, size, gain, peak, self.num_variables
        )

    def variables_used(self) -> Int[np.ndarray, " used"]:
        """Return no variables: a count of roundings does not depend on any."""
        return np.zeros(0, np.int64)

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> RoundingForm:
        return replace(self, num_variables=count)

    def folded(self, num_terms: Int[np.ndarray, " entries"]) -> Int[np.ndarray, " entries"]:
        """Return the roundings of the entries, whether maps are folded or not.

        If several maps that round are folded, the terms of each entry are summed once more.
        """
        return self.count + np.where(self.maps > 1, num_terms, 0)


def _is_power(x: np.ndarray) -> np.ndarray:
    """Return whether x is ±2^k, k ≥ 0. Products with smaller powers may underflow."""
    return (np.abs(np.frexp(x)[0]) == 0.5) & (np.abs(x) >= 1)


@dataclass(frozen=True, eq=False)
class ScoreRoundings:
    """The roundings of scores, separated by their origin. Rows are forms of (|x|, 1).

    An error e_j of the query, |e_j| ≤ query_j, adds e_j·keys_kj to the score of every key k. So only the differences of
    keys matter. Products and keys are off by own_k. The n terms of the sum have absolute values that add up to sizes_k.
    No partial sum is above (sizes_k + |s_k|)/2, and the last one is s_k. So in any order the additions cost
    u((n − 2)(sizes_k + |s_k|)/2 + |s_k|), up to second order.
    """

    query: Float[np.ndarray, "components forms"]
    keys: Float[np.ndarray, "keys components"]
    own: Float[np.ndarray, "keys forms"]
    sizes: Float[np.ndarray, "keys forms"]
    num_terms: int


@dataclass(frozen=True, eq=False)
class HeadRoundings:
    """The effect of rounding on one head, at x, with n(x) = 1 + Σ|x_i|. Errors and sizes are forms of (|x|, 1).

    A computed score is within score_errors + score_underflow·n(x) of the exact one, as one factor of each of its
    products is constant. The values have the sizes `value_sizes` in the outputs. If no value depends on x, these have
    only the constant entry. Values round `count` times. This does not include the sum over the keys, in which a term
    passes through at most `depth` additions. In that sum, and in the values, underflow costs at most underflow·n(x).
    """

    score_errors: Float[np.ndarray, "keys forms"]
    score_underflow: Float[np.ndarray, " keys"]
    value_sizes: Float[np.ndarray, "keys outputs forms"]
    count: int
    depth: int
    underflow: Float[np.ndarray, " outputs"]
    scores: ScoreRoundings | None = None  # the errors of scores in more detail, without underflow
    fewest: int = 1  # the products of a score that move count at least this number of times in `score_errors`

    def slope_sizes(self, unit: float) -> Float[np.ndarray, "keys d"]:
        """Bound the sums of the absolute values of all products in the slopes of scores."""
        if self.scores is not None:
            return self.scores.sizes[:, :-1]
        return up(self.score_errors[:, :-1] / gamma(self.fewest, unit), 2)


@dataclass(frozen=True, eq=False)
class Roundings:
    """The effect of rounding on a stage. Its residual and constants have these sizes, forms of (|x|, 1).

    They round `count` times. No number of an engine is larger than peak·n(x)^degree. `peak` is 0 if overflow is
    excluded elsewhere. In errors and sizes, |x| counts as at most `farthest`.
    """

    dtype: str
    heads: tuple[HeadRoundings, ...]
    sizes: Float[np.ndarray, "outputs forms"]
    count: int
    underflow: float
    peak: float = 0.0
    degree: int = 2
    farthest: float = math.inf

    @property
    def unit(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]

    @property
    def is_in_any_order(self) -> bool:
        """Whether a head in float32 adds up its few keys in no blocks, because there are too many tokens."""
        is_deep = (len(head.value_sizes) <= MOST_KEYS <= head.depth for head in self.heads)
        return self.dtype == "float32" and any(is_deep)

    @property
    def reach(self) -> float:
        """The largest power of two up to which |x| makes no number overflow, with FAR_FROM_OVERFLOW to spare."""
        largest = FAR_FROM_OVERFLOW * float(np.finfo(self.dtype).max) / max(1.0, self.peak)
        return float(2.0 ** (math.floor(math.log2(largest) / self.degree) - 1))


def sizes_at(forms: Float[np.ndarray, "outputs forms"], reach: Float[np.ndarray, "boxes d"]) -> np.ndarray:
    """Return forms of (|x|, 1) for |x| ≤ reach, rounded up: (boxes, outputs), or (1, outputs) for constants alone."""
    if forms.shape[1] == 1:
        return forms.T
    return up(forms[:, -1] + reach @ forms[:, :-1].T, reach.shape[1] + 2)


def roundings(program: Program | ProgramStage, *, casts_input: bool | None = None) -> tuple[Roundings, ...]:
    """Return the roundings of every stage of `extraction.stages`, for evaluation in the program's dtype.

    With `casts_input` the input is rounded to the dtype first. This is the default in float32.
    """
    dtype = str(program.dtype)
    stage = only_stage(program) if isinstance(program, Program) else program
    casts_input = dtype == "float32" if casts_input is None else casts_input
    forms = stage.folded(EnclosedForm), stage.folded(SizeForm), stage.folded(RoundingForm)
    counted = _Counted(*forms, dtype, casts_input)
    return tuple(counted.part(group) for group in output_groups(stage))


@dataclass(frozen=True, eq=False)
class _Counted:
    """A stage in the three types of numbers that bound its rounding."""

    signed: FoldedStage[EnclosedForm]
    sizes: FoldedStage[SizeForm]
    counts: FoldedStage[RoundingForm]
    dtype: str
    casts_input: bool

    @property
    def unit(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]

    @property
    def least_normal(self) -> float:
        """The largest error of one underflow, also in engines that flush subnormal numbers to zero."""
        return float(np.finfo(self.dtype).smallest_normal)

    @cached_property
    def read_counts(self) -> Int[np.ndarray, " outputs"]:
        """Roundings of each output in the read-out."""
        return self.counts.read.folded(_num_terms(self.sizes.read))

    def part(self, group: OutputGroup) -> Roundings:
        """Return the roundings of a group of outputs.

        After the attention layer these are the roundings of the sum over heads, and of the read-out.
        """
        softmax, gain = self.counts.softmax, self.counts.read.gain
        after = int(self.read_counts[group.outputs].max(initial=0))
        before, residual_count = Gain(), 0
        if isinstance(softmax, AttentionStage):
            after += len(softmax.heads) - 1 + softmax.is_residual
            before = softmax.queried.gain
            if softmax.is_residual:
                num_terms = np.full(len(softmax.queried.count), softmax.queried.num_variables + 1)
                residual_count = int(softmax.queried.folded(num_terms).max(initial=0))
        pairs = zip(query_heads(self.sizes, group), query_heads(self.signed, group), strict=True)
        if isinstance(softmax, AttentionStage):
            heads = [self._head(size, signed, softmax.heads[size.head_number], after) for size, signed in pairs]
        else:
            heads = [self._row(size, signed, softmax, group) for size, signed in pairs if softmax is not None]
        tiny = self.least_normal * (before.terms + gain.terms + 1) * before.factor * gain.factor
        sizes, count = affine_part(self.sizes, group).largest(len(group.outputs)), after + residual_count
        count += self.casts_input
        return Roundings(self.dtype, tuple(heads), sizes, count, tiny, self.peak, self.degree)

    @property
    def degree(self) -> int:
        """2 if a product of a query and a key, even of one that no output needs, has two factors that move; or 1."""
        softmax = self.sizes.softmax
        heads = softmax.heads if isinstance(softmax, AttentionStage) else ()
        return 2 if any(_moving(head.queries) & _moving(head.keys) for head in heads) else 1

    @cached_property
    def peak(self) -> float:
        """The largest size of any intermediate number, for |x| ≤ 1, whether maps are folded or not."""
        softmax, read = self.counts.softmax, self.counts.read
        if not isinstance(softmax, AttentionStage):
            found = [read.peak] if softmax is None else [read.peak, softmax.logits.peak, float(softmax.logits.shape[1])]
            return 2 * max(found)
        written = softmax.queried.size.reshape(softmax.queried.shape) if softmax.is_residual else np.zeros((1, 1))
        found = [softmax.queried.peak]
        for head in softmax.heads:
            forms = (head.queries, head.keys, head.values)
            queries, keys, values = (form.size.reshape(form.shape).max(axis=0, initial=0.0) for form in forms)
            sums = head.values.shape[0] * values  # engines compute an average as a sum, then divide
            found += [float(queries @ keys), *sums.tolist(), *(form.peak for form in forms)]
            written = written + sums @ np.abs(head.W_O.astype(np.float64))
        largest = float(written.max(initial=0.0))
        return 2 * max(*found, largest, max(1.0, largest) * read.peak)

    def _head(self, size: QueryHead, signed: QueryHead, counted: FoldedHead[RoundingForm], after: int) -> HeadRoundings:
        p = size.num_keys
        queries, keys = counted.queries.rows(np.array([size.query_number])), counted.keys.rows(size.seen)
        of_query, of_products, num_active = _score_counts(size, queries, keys)
        counts = of_query + of_products + max(2, num_active - 1)
        factors = self._gammas(counts)
        errors = self._with_cast(size.scores(factors).largest(p), signed.scores)
        key_sizes = np.bincount(size.keys.entries.row // max(1, size.keys.shape[1]), size.keys.entries.mid, p)
        query_size = float(size.query.entries.mid.sum())
        tiny = queries.gain.size * key_sizes + keys.gain.size * query_size + num_active + 1
        W_O, values = counted.W_O, counted.values.rows(size.seen)
        written = RoundingForm.identity((1, len(W_O)), np.arange(len(W_O)), len(W_O), W_O.dtype).times(W_O)
        count = int(values.folded(_num_terms(size.values)).max(initial=0)) + int(written.count.max(initial=0)) + after
        fine = self._scores(size, signed, of_query, of_products, num_active)
        additions, lost = depth(counted.keys.shape[0], self.dtype), values.gain.size + 2 * p + 4
        moving = sorted(_moving(size.query) | _moving(size.keys))
        fewest = int(counts[moving].min()) if moving else 1
        return self._made(size, errors, tiny, count, additions, lost, len(W_O), fewest, fine)

    def _row(
        self, size: QueryHead, signed: QueryHead, counted: SoftmaxStage[RoundingForm], group: OutputGroup
    ) -> HeadRoundings:
        """Return the roundings of a row of a softmax over features. Its logits and its outputs are affine maps.

        The read-out adds up the products of all rows, in any order. For the m products of this row, m − 1 of the
        additions are those of the sum over the keys. The others count as roundings of the read-out.
        """
        p, logits = size.num_keys, counted.logits.rows(np.array([size.query_number]))
        num_active = len(np.unique(size.query.entries.column))
        count = max(3, num_active, int(logits.folded(_num_terms(size.query)).max(initial=0)))
        errors = self._with_cast(up(size.scores().largest(p) * gamma(count, self.unit)), signed.scores)
        own = np.bincount(size.writes.column, minlength=len(group.outputs))
        others = int((self.read_counts[group.outputs] - np.maximum(own - 1, 0)).max(initial=0))
        tiny = np.full(p, logits.gain.size + num_active + 1)
        return self._made(size, errors, tiny, others, max(0, p - 1), 2 * p + 4, p, count)

    def _made(
        self,
        size: QueryHead,
        score_errors: Float[np.ndarray, "keys forms"],
        tiny: Float[np.ndarray, " keys"],
        count: int,
        additions: int,
        lost: float,
        width: int,
        fewest: int,
        scores: ScoreRoundings | None = None,
    ) -> HeadRoundings:
        """Return the roundings of a head.

        `tiny` counts the products in its scores that may underflow. `lost` and `width` count those in its values and in
        what it writes.
        """
        values, gain = value_forms(size), self.counts.read.gain
        writes = np.bincount(size.writes.column, size.writes.mid, size.writes.num_columns)
        spent = 2 * self.least_normal * (lost * (1 + writes) + (gain.terms + width) * gain.factor)
        count += self.casts_input and values.mid.shape[2] > 1
        sizes, underflow = up(values.mid + values.radius), 2 * self.least_normal * tiny
        return HeadRoundings(score_errors, underflow, sizes, count, additions, spent, scores, fewest)

    def _gammas(self, counts: Int[np.ndarray, " any"]) -> Float[np.ndarray, " any"]:
        return np.array([gamma(int(n), self.unit) for n in counts])

    def _with_cast(self, errors: Float[np.ndarray, "rows forms"], exact: Callable[[], EnclosedSparse]) -> np.ndarray:
        """Add the errors that a cast of the input causes in the exact forms to the errors of forms of x."""
        if self.casts_input:
            errors[:, :-1] = up(errors + up(self.unit * exact().largest(len(errors))))[:, :-1]
        return errors

    def _scores(
        self, size: QueryHead, signed: QueryHead, of_query: np.ndarray, of_products: np.ndarray, num_active: int
    ) -> ScoreRoundings | None:
        """Return the detailed roundings of scores, or None. They exist in float32, for keys that do not depend on x.

        Engines for grids compute scores in float64, and γ_8 of float64 covers their steps. If the dtype is float64,
        these engines move origins and round at other places, so there are no detailed roundings.
        """
        p, d_k, keys = size.num_keys, max(1, size.query.shape[1]), signed.keys.entries
        moves = (size.keys.entries.column < size.query.num_variables).any()
        if self.dtype != "float32" or moves or keys.radius.any():
            return None
        inner, sizes_of_query = gamma(8, UNIT_ROUNDOFF["float64"]), size.query.entries.largest(d_k)
        # The checker counts the cast of the input as a rounding of all terms, the constant included.
        of_query = of_query + (self.casts_input & sizes_of_query[:, :-1].any(axis=1))
        query = up(sizes_of_query * (self._gammas(of_query) + inner)[:, None], 2)
        key_table = np.zeros(p * d_k)
        key_table[keys.row] = keys.mid
        # The factor by which |q̂| may exceed |q|, in sizes and in products.
        grown = 1 + gamma(int((of_query + of_products).max(initial=0)) + 2, self.unit)
        own, sizes = (
            up(size.scores(factors).largest(p) * grown, 2) for factors in (self._gammas(of_products) + inner, None)
        )
        return ScoreRoundings(query, key_table.reshape(p, d_k), own, sizes, num_active)


def _moving(form: EnclosedForm) -> set[int]:
    """The columns in which an entry depends on the input."""
    rows = form.entries.row[form.entries.column < form.num_variables]
    return set(np.unique(rows % max(1, form.shape[1])).tolist())


def _score_counts(size: QueryHead, query: RoundingForm, keys: RoundingForm) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the roundings of each component of the query, those of its products with keys, and the component count."""
    p, d_k = keys.shape
    if not d_k:
        return np.zeros(1, np.int64), np.zeros(1, np.int64), 0
    of_query = query.folded(_num_terms(size.query))
    of_key = keys.folded(_num_terms(size.keys)).reshape(p, d_k)
    there = keys.is_there.reshape(p, d_k)
    active = query.is_there & there.any(axis=0)
    is_exact = query.is_power | (keys.is_power.reshape(p, d_k) | ~there).all(axis=0)
    most = np.where(there, of_key, 0).max(axis=0, initial=0)
    return of_query, most + ~is_exact, int(active.sum())


def _num_terms(form: EnclosedForm) -> Int[np.ndarray, " entries"]:
    """Return the number of terms of every entry as a sum over x and a constant. Underflow counts as the constant."""
    moving = form.entries.row[form.entries.column < form.num_variables]
    return 1 + np.bincount(moving, minlength=form.shape[0] * form.shape[1])
