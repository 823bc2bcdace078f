"""How often a program of one stage rounds, on which sizes: read off its weights, for every engine at once.

A result of affine maps is off by at most γ_n times the sum of the absolute values of all its paths, which is the result
of `forms.absolute`; n is counted in `counts`. Engines fold affine maps into one before they see an input. The
products are the same in another order; the sum over the inputs then comes last, and where two maps or more round, its
terms are counted besides. A sum of products counts as one of three at least, for engines that move an axis' origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Attention, Head
from attnc.ir.program import Program
from attnc.ir.shapes import main_start, memory_start
from attnc.ir.summing import depth
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.rounding.counts import Counts, Gain, folded, sizes_through, through_layers
from attnc.proofs.stages.enclosed_sparse import EnclosedSparse
from attnc.proofs.stages.extraction import output_groups
from attnc.proofs.stages.forms import Anatomy, Group, HeadForms, absolute

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class ScoreRoundings:
    """The roundings of scores, apart by where they arise; rows are forms of (|x|, 1).

    An error e_j of the query, |e_j| ≤ query_j, adds e_j·keys_kj to the score of every key k: only what keys differ by
    matters. Products, and keys, are off by own_k. The n terms of the sum have absolute values that add up to sizes_k;
    no partial sum of theirs is above (sizes_k + |s_k|)/2, and the last one is s_k. So sums add, in any order,
    u((n − 2)(sizes_k + |s_k|)/2 + |s_k|), up to second order.
    """

    query: Float[np.ndarray, "components forms"]
    keys: Float[np.ndarray, "keys components"]
    own: Float[np.ndarray, "keys forms"]
    sizes: Float[np.ndarray, "keys forms"]
    num_terms: int


@dataclass(frozen=True, eq=False)
class HeadRoundings:
    """What rounding does to one head, at x, with n(x) = 1 + Σ|x_i|.

    A computed score is within score_slopes·|x| + score_offsets + score_underflow·n(x)² of the exact one. The values
    have sizes value_sizes + value_size_slopes·|x| in the outputs and round `count` times, the sum over the keys apart,
    in which a term passes `depth` additions at most; in that, and in the values, underflow costs at most
    underflow·n(x).
    """

    score_slopes: Float[np.ndarray, "keys d"]
    score_offsets: Float[np.ndarray, " keys"]
    score_underflow: Float[np.ndarray, " keys"]
    value_sizes: Float[np.ndarray, "keys outputs"]
    value_size_slopes: Float[np.ndarray, "keys outputs d"] | None
    count: int
    depth: int
    underflow: Float[np.ndarray, " outputs"]
    scores: ScoreRoundings | None = None  # the same in more detail, underflow apart


@dataclass(frozen=True, eq=False)
class Roundings:
    """The same for a stage: its residual and constants have sizes + size_slopes·|x|, and round `count` times.

    No number on the way to the outputs is larger than peak·n(x)²; 0 where overflow is ruled out by other means.
    """

    dtype: str
    heads: tuple[HeadRoundings, ...]
    sizes: Float[np.ndarray, " outputs"]
    size_slopes: Float[np.ndarray, "outputs d"]
    count: int
    underflow: float
    peak: float = 0.0

    @property
    def unit(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]


def roundings(program: Program, dtype: str | None = None, *, casts_input: bool | None = None) -> tuple[Roundings, ...]:
    """For every stage of `extraction.stages`, in its order, for evaluation in `dtype` (the program's own by default).

    `casts_input`: the input is rounded to the dtype first (by default in float32, where inputs are any numbers).
    """
    own = str(program.dtype)
    dtype = own if dtype is None else dtype
    if dtype not in UNIT_ROUNDOFF or (own, dtype) == ("float64", "float32"):
        raise ProgramError(f"a program in {own} cannot be certified for {dtype!r}: cast its weights first")
    counted = _Counted(program, dtype, dtype == "float32" if casts_input is None else casts_input)
    return tuple(counted.stage(group) for group in output_groups(program))


@dataclass(frozen=True, eq=False)
class _Counted:
    program: Program
    dtype: str
    casts_input: bool

    @cached_property
    def sizes(self) -> Anatomy:
        return Anatomy.of(absolute(self.program))

    @cached_property
    def signed(self) -> Anatomy:
        return Anatomy.of(self.program)

    @property
    def layer(self) -> Attention:
        return self.signed.place.layer

    @property
    def unit(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]

    @property
    def least_normal(self) -> float:
        """Underflow costs at most this, engines that flush subnormal numbers to zero included."""
        return float(np.finfo(self.dtype).smallest_normal)

    @cached_property
    def queried(self) -> tuple[Counts, Gain]:
        """(tokens·width) entries of the state before the attention layer."""
        before = self.program.layers[: self.signed.place.number]
        tokens, width = main_start(self.program)
        return through_layers(before, Counts.inputs(tokens * width)), Gain().through_layers(before)

    @cached_property
    def keyed(self) -> tuple[Counts, Gain]:
        if not self.layer.cross:
            return self.queried
        tokens, width = memory_start(self.program)
        memory = self.program.memory
        return through_layers(memory, Counts.inputs(tokens * width)), Gain().through_layers(memory)

    def _read(self, group: Group) -> tuple[int, Gain]:
        """Roundings after the attention layer: the sum over heads, and the read-out."""
        place, layers = self.signed.place, self.program.layers
        written = Counts.inputs(place.width * self.signed.num_tokens)
        counts = through_layers(layers[place.number + 1 :], written)
        terms = _num_terms(self.sizes.read, len(counts.count))
        count = int(folded(counts, terms)[group.outputs].max(initial=0))
        adds = len(self.layer.heads) - 1 + self.layer.residual
        return count + adds, Gain().through_layers(layers[place.number + 1 :])

    def stage(self, group: Group) -> Roundings:
        place, num_outputs = self.signed.place, len(group.outputs)
        after, gain = self._read(group)
        state, before = self.queried
        forms = zip(self.sizes.heads(group), self.signed.heads(group), strict=True)
        heads = []
        for query in group.queries.tolist():
            width = self.layer.heads[0].W_Q.shape[0]
            own = state.at(place.queries[query] * width + np.arange(width))
            for head in self.layer.heads:
                size, signed = next(forms)
                heads.append(self._head(head, int(place.queries[query]), own, size, signed, after, num_outputs, gain))
        mid, radius = self.sizes.affine_part(group.outputs).dense(num_outputs)
        sizes = up(mid + radius)
        d = sizes.shape[1] - 1
        count = after + self.casts_input
        if self.layer.residual:
            count += int(folded(state, np.full(len(state.count), d + 1)).max(initial=0))
        tiny = self.least_normal * (before.terms + gain.terms + 1) * before.factor * gain.factor
        return Roundings(self.dtype, tuple(heads), sizes[:, d], sizes[:, :d], count, tiny, self.peak)

    @cached_property
    def peak(self) -> float:
        """The largest size of anything that is made, for |x| ≤ 1, whether maps are folded or not."""
        place, program = self.signed.place, self.program
        tokens, width = main_start(program)
        states = sizes_through(program.layers[: place.number], np.ones(tokens * width))
        memory_tokens, memory_width = memory_start(program)
        memory = sizes_through(program.memory, np.ones(memory_tokens * memory_width))
        state = states[-1].reshape(self.signed.num_tokens, -1)
        keyed = memory[-1].reshape(self.signed.num_keys, -1) if self.layer.cross else state
        written = state if self.layer.residual else np.zeros((len(state), place.width))
        found = [*states, *memory]
        for head in self.layer.heads:
            W_Q, W_K, W_V, W_O = (np.abs(W.astype(np.float64)) for W in (head.W_Q, head.W_K, head.W_V, head.W_O))
            queries, keys, values = state @ W_Q, keyed @ W_K, keyed @ W_V
            largest = queries.max(axis=0, initial=0.0) @ keys.max(axis=0, initial=0.0)
            sums = len(keyed) * values.max(axis=0, initial=0.0)  # before it is divided, an average is a sum
            found += [queries, keys, values, np.array([largest]), sums]
            written = written + sums @ W_O
        found += sizes_through(program.layers[place.number + 1 :], written.ravel())
        return 2 * max(float(part.max(initial=0.0)) for part in found)

    def _head(
        self,
        head: Head,
        token: int,
        own: Counts,
        size: HeadForms,
        signed: HeadForms,
        after: int,
        num_outputs: int,
        gain: Gain,
    ) -> HeadRoundings:
        p, d_k = size.num_keys, size.d_k
        d = size.query.num_columns - 1
        keys, of_keys = self.keyed
        width = head.W_K.shape[0]
        seen = (
            np.arange(p) if head.mask is None else np.flatnonzero(head.mask.visible(np.array([token]), slice(None))[0])
        )
        keys = keys.at((seen[:, None] * width + np.arange(width)).ravel())

        of_query, of_products, num_active = self._score_counts(head, own, keys, size)
        counts = of_query + of_products + max(2, num_active - 1)
        factors = np.array([gamma(int(n), self.unit) for n in counts])
        mid, radius = size.with_query_scaled(factors).scores().dense(p)
        error = up(mid + radius)
        if self.casts_input:
            mid, radius = signed.scores().dense(p)
            error[:, :d] = up(error[:, :d] + up(self.unit * up(np.abs(mid) + radius))[:, :d])

        q_gain, k_gain = self.queried[1].through_matrix(head.W_Q), of_keys.through_matrix(head.W_K)
        key_sizes = np.bincount(size.keys.row // d_k, size.keys.mid, p)
        query_size = float(size.query.mid.sum())
        tiny = q_gain.size * key_sizes + k_gain.size * query_size + num_active + 1

        value_counts = keys.through_columns(p, head.W_V)
        terms = _num_terms(size.values, len(value_counts.count))
        written = Counts.inputs(head.W_O.shape[0]).through_columns(1, head.W_O)
        count = int(folded(value_counts, terms).max(initial=0)) + int(written.count.max(initial=0)) + after
        values = size.outputs().dense(p * num_outputs)
        sizes = up(values[0] + values[1]).reshape(p, num_outputs, d + 1)
        moves = bool((size.values.column < d).any())
        v_gain = of_keys.through_matrix(head.W_V)
        writes = np.bincount(size.writes.column, size.writes.mid, num_outputs)
        spent = (v_gain.size + 2 * p + 4) * (1 + writes) + (gain.terms + head.W_O.shape[0]) * gain.factor
        return HeadRoundings(
            error[:, :d],
            error[:, d],
            2 * self.least_normal * tiny,
            sizes[..., d],
            sizes[..., :d] if moves else None,
            count + (moves and self.casts_input),
            depth(p if head.mask is None else len(head.mask.key_segments), self.dtype),
            2 * self.least_normal * spent,
            self._scores(size, signed, of_query, of_products, num_active),
        )

    def _scores(
        self, size: HeadForms, signed: HeadForms, of_query: np.ndarray, of_products: np.ndarray, num_active: int
    ) -> ScoreRoundings | None:
        """In float32, for keys that do not move. Engines for grids compute in float64: γ_8 of that covers what they do.

        In float64 these move origins, and round in other places than the others.
        """
        d, p, d_k = size.query.num_columns - 1, size.num_keys, size.d_k
        if self.dtype != "float32" or (size.keys.column < d).any() or signed.keys.radius.any():
            return None
        inner = gamma(8, UNIT_ROUNDOFF["float64"])
        mid, radius = size.query.dense(d_k)
        of_size = np.array([gamma(int(n), self.unit) for n in of_query]) + inner
        query = up(up(mid + radius) * of_size[:, None], 2)
        if self.casts_input:
            mid, radius = signed.query.dense(d_k)
            query[:, :d] = up(query[:, :d] + up(self.unit * up(np.abs(mid) + radius))[:, :d])
        keys = np.zeros((p, d_k))
        keys.ravel()[signed.keys.row] = signed.keys.mid
        factors = np.array([gamma(int(n), self.unit) for n in of_products]) + inner
        mid, radius = size.with_query_scaled(factors).scores().dense(p)
        sizes, slack = size.scores().dense(p)
        # What |q̂| may be above |q|, in sizes and products alike.
        grown = 1 + gamma(int((of_query + of_products).max(initial=0)) + 2, self.unit)
        return ScoreRoundings(
            query, keys, up(up(mid + radius) * grown, 2), up(up(sizes + slack) * grown, 2), num_active
        )

    def _score_counts(
        self, head: Head, own: Counts, keys: Counts, size: HeadForms
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Roundings of each component of the query, and of its products with keys; and the number of components."""
        p, d_k = size.num_keys, size.d_k
        query, key = own.through_columns(1, head.W_Q), keys.through_columns(p, head.W_K)
        if not head.W_Q.shape[1]:
            return np.zeros(d_k, np.int64), np.zeros(d_k, np.int64), 0
        of_query = folded(query, _num_terms(size.query, d_k))
        of_key = folded(key, _num_terms(size.keys, p * d_k)).reshape(p, d_k)
        there = key.is_there.reshape(p, d_k)
        active = query.is_there & there.any(axis=0)
        is_exact = query.is_power | (key.is_power.reshape(p, d_k) | ~there).all(axis=0)
        num_active = int(active.sum())
        most = np.where(there, of_key, 0).max(axis=0, initial=0)
        return of_query, most + ~is_exact, num_active


def _num_terms(form: EnclosedSparse, num_rows: int) -> Int[np.ndarray, " rows"]:
    """Of every row as a sum over x, with a constant even where there is none: what underflows is counted as one."""
    moving = form.row[form.column < form.num_columns - 1]
    return 1 + np.bincount(moving, minlength=num_rows)
