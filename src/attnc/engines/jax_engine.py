"""A program as a pure function of JAX arrays, in the program's dtype: jit, vmap and grad take it.

It works on the normal form. A program with few keys is a list of instructions (`fused`): every number of a point is a
row of its own, and XLA fuses all operations on the rows into few loops. This took a third of the time of arrays of
scores. A larger program runs stage by stage, with a row of scores for each query of a point. Then points are taken in
blocks, and a gradient computes every block again, so that memory stays bounded.

XLA computes on vectors of 256 bits, unless it is told otherwise. A call with arrays takes 512 bits, if the processor
has them: that needs 0.6 of the time. JAX refuses such options within another transformation, where those of the caller
hold.

XLA on a CPU takes subnormal numbers as zero. The rounding term of a certificate covers this: it counts the least normal
number for every underflow (`proofs.rounding.program`). XLA may merge two sums over axes into one, whose order is
unknown. So sums over keys in float32 are chains of additions, which it leaves as they are (`ir.summing`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from attnc.engines.fused import (
    AFFINE,
    HEAD,
    MOVING,
    PAIR,
    PRODUCT,
    SIMPLE_HEAD,
    Instruction,
    Instructions,
    instructions,
)
from attnc.engines.powers import LARGEST_EXPONENT, LOG2_E, POWER_OF_TWO, Powers, raised
from attnc.engines.query_pieces import QueryPieces
from attnc.errors import InputError, MissingExtra
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage, normal_form, pruned
from attnc.ir.program import Program, require_shapes
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.summing import BLOCK

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise MissingExtra("to_jax needs", "jax", "jax", error) from error

MOST_TERMS = 512
"""The largest number of terms of scores, averages and affine maps, summed over all instructions, that are written out.
XLA took 0.6 s to compile 128 keys, and 1.7 s with a gradient, both in proportion to the keys."""
LOG_2 = 0.6931471803691238, 1.9082149292705877e-10
"""log 2 as a sum of two numbers. The first has few bits."""
MOST_WRITTEN_KEYS = 8
"""The largest number of keys of a head whose exponentials are written out. XLA takes 0.6 s to compile 128 of its own,
and 5.5 s to compile 128 that are written out."""
SLACK = 1.001
"""The factor of a bound on numbers that are computed with rounding. Rounding alone takes less than 1 + 1e-4 of it, in
float32 and with the largest number of terms."""
SATURATED = 37.0
"""e^−37 is less than the unit roundoff of float64."""
WIDE = {"xla_cpu_prefer_vector_width": 512}
"""Options of XLA for calls with arrays. The width of vectors changes no result of operations on rows."""
CELLS_PER_JAX_BLOCK = 2**20
"""Number of array cells of a block of points in stages: 8 MiB of float64. A single row of scores may be longer."""
DENSE_CELLS = 2**16
"""Maximum number of entries of a linear map that is always dense: 512 KiB. A larger map has an index per term."""

Array = Any
Limits = tuple[np.ndarray, np.ndarray]
"""The least and the largest value of every variable."""
Run = Callable[[Array], Array]
"""Maps the variables of points, (batch, variables), to an array whose first axis is the batch."""


def to_jax(program: Program, limits: Limits | None = None, *, is_nan_outside: bool = False) -> Callable[..., Array]:
    """Return the program as a function that is compiled at the first call with arrays of some shape.

    Points beyond `limits`, if there are any, are moved to them, or their outputs are NaN.
    """
    dtype, shapes = program.dtype, program.input_shapes
    _require_dtype(dtype)
    form = pruned(normal_form(program))
    written = _written(form, dtype)
    least, most = (None, None) if limits is None else (end.astype(dtype) for end in limits)
    run = _staged(form) if written is None else functools.partial(_written_out, written, _ranges(written, limits))

    def network(*inputs: Array) -> Array:
        _require_dtype(dtype)
        for given in inputs:
            if not isinstance(given, jax.Array | np.ndarray | float | int) or jnp.iscomplexobj(given):
                raise InputError(f"the network takes real arrays; found {getattr(given, 'dtype', type(given))}")
        arrays = [jnp.asarray(given, dtype) for given in inputs]
        is_one = [array.ndim for array in arrays] == [len(shape) for shape in shapes]
        arrays = [array[None] for array in arrays] if is_one else arrays
        require_shapes("network", shapes, arrays)
        given = jnp.concatenate([jax.lax.collapse(array, 1) for array in arrays], axis=1)
        u = given if least is None else _clipped(given, least, most)
        out = run(u)
        if is_nan_outside:
            is_moved = (given != u).any(axis=1, keepdims=True)  # a NaN differs from itself
            out = jnp.where(is_moved, jnp.nan, out)
        out = out.reshape(len(u), *program.output_shape)
        return out[0] if is_one else out

    compiled = jax.jit(network)
    if written is None or not _takes_options():
        return compiled
    wide = jax.jit(network, compiler_options=WIDE)

    @functools.wraps(network)
    def evaluate(*inputs: Array) -> Array:
        if not any(isinstance(given, jax.core.Tracer) for given in inputs):
            try:
                return wide(*inputs)
            except ValueError:  # the inputs are wrong, or they are constants of a function that is being traced
                pass
        return compiled(*inputs)

    return evaluate


@functools.cache
def _takes_options() -> bool:
    """Return whether this version of XLA has the options."""
    try:
        jax.jit(operator.neg, compiler_options=WIDE)(1.0)
    except Exception:  # XLA has an error of its own
        return False
    return True


def _require_dtype(dtype: np.dtype[Any]) -> None:
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InputError(
            f'the network computes in {dtype}, which JAX has switched off. Call jax.config.update("jax_enable_x64", '
            'True) first, or take net.astype("float32"), or compile with dtype="float32".'
        )


def _written(form: NormalForm, dtype: np.dtype[Any]) -> Instructions | None:
    """Return the instructions of a program, or None if there are too many to write them out."""
    given = instructions(form, dtype)
    is_small = given is not None and sum(map(_num_terms, given.steps)) <= MOST_TERMS
    return given if is_small else None


def _num_terms(step: Instruction) -> int:
    """Return the number of terms of scores, averages and sums."""
    if step.kind == PAIR:
        return MOST_WRITTEN_KEYS  # about as many operations as eight exponentials of XLA
    if step.kind in (AFFINE, PRODUCT):
        return 1 + len(step.reads)
    return 1 + step.num_keys * max(1, step.num_queries, len(step.writes))


# --- instructions -----------------------------------------------------------------------------------------------------


def _ranges(given: Instructions, limits: Limits | None) -> dict[int, float]:
    """Return bounds of the absolute values of rows that are finite. Variables may have limits.

    An average is between the values of its keys. SLACK covers rounding.
    """
    least, most = (np.abs(end).tolist() for end in limits) if limits else ([math.inf] * given.num_inputs,) * 2
    found = dict(enumerate(map(max, least, most)))
    for kind, reads, writes, numbers, *_ in given.steps:
        sizes = [found[read] for read in reads]
        if kind == AFFINE:
            own = [abs(numbers[0][0]) + sum(abs(c) * size for c, size in zip(numbers[0][1:], sizes, strict=True))]
        elif kind == PRODUCT:
            own = [sizes[0] * sizes[1] + sum(sizes[2:])]
        elif kind == PAIR:
            own = [max(sizes[1:])]
        elif kind in (SIMPLE_HEAD, HEAD):
            own = np.abs(numbers[2]).max(axis=0).tolist()
        else:
            own = [math.inf] * len(writes)
        found |= {row: SLACK * float(size) for row, size in zip(writes, own, strict=True)}
    return found


def _clipped(x: Array, least: Any, most: Any) -> Array:
    """Return x, moved to the limits. NaN stays NaN. XLA takes twice as many operations for its own function."""
    above = jnp.where(x < least, least, x)
    return jnp.where(above > most, most, above)


def _written_out(given: Instructions, ranges: Mapping[int, float], u: Array) -> Array:
    """Run the instructions, each on whole rows. `fused` defines them."""
    state = {i: u[:, i] for i in range(given.num_inputs)}
    zero = jnp.zeros(len(u), given.dtype)
    for kind, reads, writes, numbers, keys, queries, powers in given.steps:
        rows = [state[row] for row in reads]
        found: Sequence[Array]
        if kind == AFFINE:
            constant, *coefficients = numbers[0]
            terms = [factor * row for factor, row in zip(coefficients, rows, strict=True)]
            found = [functools.reduce(operator.add, terms, jnp.full(len(u), constant))]
        elif kind == PRODUCT:
            product = rows[0] * rows[1]
            found = [product + rows[2] if len(rows) > 2 else product]
        elif kind == PAIR:
            offsets, slopes = numbers
            first, second = (slope * rows[0] + offset for slope, offset in zip(slopes[:, 0], offsets, strict=True))
            first, second = _pair(first, second)
            found = [first * rows[1] + second * rows[2]]
        elif kind in (SIMPLE_HEAD, HEAD):
            offsets, slopes, values = numbers
            found = _head(offsets, slopes, values, powers, ranges.get(reads[0], math.inf) if reads else 0.0)(
                zero, *rows
            )
        elif kind == MOVING:
            own, after = rows[queries : (1 + keys) * queries], (1 + keys) * queries
            scores = [_inner(own[k * queries : (k + 1) * queries], rows[:queries], zero) for k in range(keys)]
            moving = [rows[after + k * len(writes) : after + (k + 1) * len(writes)] for k in range(keys)]
            found = _averages(scores, moving)
        else:
            weights = _exponentials(rows)
            total = _sum(weights)
            found = [weight / total for weight in weights]
        state.update(zip(writes, found, strict=True))
    return jnp.stack([state[row] for row in given.outputs], axis=1)


@jax.custom_jvp  # type: ignore[untyped-decorator, unused-ignore]
def _pair(first: Array, second: Array) -> tuple[Array, Array]:
    """Return the softmax of two scores, by one exponential."""
    behind = first - second
    weight = exponential(-jnp.abs(behind))
    larger = 1 / (weight + 1 + (behind - behind))  # NaN if a score is not finite
    smaller = weight * larger
    return jnp.where(behind >= 0, larger, smaller), jnp.where(behind >= 0, smaller, larger)


@_pair.defjvp  # type: ignore[untyped-decorator, unused-ignore]
def _pair_derivative(scores: tuple[Array, Array], moved: tuple[Array, Array]) -> tuple[tuple[Array, Array], Any]:
    first, second = _pair(*scores)
    change = first * second * (moved[0] - moved[1])
    return (first, second), (change, -change)


def _head(
    offsets: np.ndarray, slopes: np.ndarray, values: np.ndarray, powers: Powers | None, largest: float
) -> Callable[..., tuple[Array, ...]]:
    """Return the averages of a head with constant keys as a function of a row of zeros and the rows of its query.

    The first of them is at most `largest` in absolute value.
    The derivative of an average A along query entry j is Σ_k p_k·slope_kj·(v_k − A). It is written here, because the
    derivatives of all operations one by one take XLA twenty times as long to compile.
    """
    polynomials = None if powers is None else _Polynomials.of(powers, slopes[:, 0], values)

    def run(zero: Array, *read: Array) -> tuple[Array, ...]:
        if polynomials is not None and jax.config.jax_enable_x64:
            return polynomials(read[0], largest)
        scores = [_inner(own, read, offset) + zero for own, offset in zip(slopes, offsets, strict=True)]
        return tuple(_averages(scores, values))

    def derivative(read: Sequence[Array], moved: Sequence[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        found = averages(*read)
        # Exponentials are computed again. Else XLA would store each of them, in a loop of its own. The average is that
        # by these weights: another one would be off by the errors of all weights, times slopes that are not centred.
        zero, *again = jax.lax.optimization_barrier(tuple(read))
        weights = _exponentials(
            [_inner(own, again, offset) + zero for own, offset in zip(slopes, offsets, strict=True)]
        )
        total = _sum(weights)
        changes = [zero for _ in found]
        for c in range(len(found)):
            average = _sum([weight * values[k, c] for k, weight in enumerate(weights)]) / total
            for j, change in enumerate(moved[1:]):
                terms = [weight * (slopes[k, j] * (values[k, c] - average)) for k, weight in enumerate(weights)]
                changes[c] = changes[c] + _sum(terms) / total * change
        return found, tuple(changes)

    averages: Callable[..., tuple[Array, ...]] = jax.custom_jvp(run)
    averages.defjvp(derivative)  # type: ignore[attr-defined]
    return averages


class _Polynomials:
    """The averages of a head as quotients of polynomials in E = e^{step·x} or 1/E, in float64 (`powers`).

    Rounding.  The powers of E are the same in all sums. Terms of the sum of weights round once besides additions, those
    of products with values twice, and the quotient once: certificates count one, and three. `powers` spends one
    rounding on the spacing of the slopes. If it is exact, or if the program computes in float32, the coefficient of the
    exponent may be rounded instead.

    Beyond `reach`, x is moved to it. There the first or the last key leads by SATURATED, so that all others together
    weigh less than a unit roundoff.
    """

    def __init__(self, powers: Powers, slopes: np.ndarray, values: np.ndarray, middle: int) -> None:
        weights, products = powers.coefficients, powers.coefficients[:, None] * values.astype(np.float64)
        self._rate, self._reach = _in_two_parts(powers.step), _largest(len(weights), middle) / abs(powers.step)
        if slopes.dtype == np.float32 or _is_lattice(slopes, powers.step):
            self._rate = self._rate[0], 0.0
        self._sides = [
            (sign, [each.tolist() for each in (weights[part], *products[part].T)])
            for sign, part in ((1, slice(middle, None)), (-1, slice(middle - 1, None, -1)))[: 2 if middle else 1]
        ]

    @classmethod
    def of(cls, powers: Powers, slopes: np.ndarray, values: np.ndarray) -> _Polynomials | None:
        """Return None if weights are not saturated where x is moved to.

        If positive powers are too large there, those of 1/E are used for the first half of the keys.
        """
        keys, logs = len(values), np.log(powers.coefficients)
        ends = [(end, k) for end in (0, keys - 1) for k in range(keys) if k != end]
        for middle in (0, keys // 2):
            exponent = _largest(keys, middle)
            if min(exponent * abs(end - k) + logs[end] - logs[k] for end, k in ends) >= SATURATED:
                return cls(powers, slopes, values, middle)
        return None

    def __call__(self, x: Array, largest: float) -> tuple[Array, ...]:
        """Return the averages for |x| ≤ largest."""
        given, sums = x.astype(jnp.float64), list[list[Array]]()
        near = given if largest <= self._reach else _clipped(given, -self._reach, self._reach)
        for sign, (weights, *products) in self._sides:
            first = power_of_two(near, *(sign * part for part in self._rate))
            powers = raised(first, len(weights) + (sign < 0))[sign < 0 :]
            sums.append([_polynomial(each, powers) for each in (weights, *products)])
        total, *mixed = sums[0] if len(sums) == 1 else [one + other for one, other in zip(*sums, strict=True)]
        undefined = given * 0.0  # NaN if x is not finite; one operation with the sum
        return tuple(((each + undefined) / total).astype(x.dtype) for each in mixed)


def _largest(keys: int, middle: int) -> float:
    """Return the largest exponent of E, if powers are counted from the middle key."""
    return LARGEST_EXPONENT / max(middle, keys - 1 - middle)


def _polynomial(coefficients: Sequence[float], powers: Sequence[Array]) -> Array:
    terms = [c * power for c, power in zip(coefficients, powers, strict=True) if c != 0] or [0.0 * powers[-1]]
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return terms[0]


def _is_lattice(slopes: np.ndarray, step: float) -> bool:
    """Return whether the slopes are k·step + s in exact numbers."""
    first, *others = (Fraction(slope) for slope in slopes.tolist())
    return all(slope - first == k * Fraction(step) for k, slope in enumerate(others, 1))


def _in_two_parts(exponent: float) -> tuple[float, float]:
    """Return exponent·log₂e as the sum of two numbers."""
    exact = Fraction(exponent) * LOG2_E
    return float(exact), float(exact - Fraction(float(exact)))


def power_of_two(x: Array, rate: float, low: float) -> Array:
    """Return 2^((rate + low)·x), in float64, for results that are normal numbers."""
    scaled = x * rate
    n = jnp.round(scaled)
    r = scaled - n
    return _shifted(n, r + x * low if low else r)


def _shifted(n: Array, r: Array) -> Array:
    """Return 2^(n + r) for whole numbers n and |r| ≤ ½. n is added to the bits of the exponent."""
    bits = jax.lax.bitcast_convert_type(_by_halves(POWER_OF_TWO, r) * r + 1.0, jnp.int64)
    shift = jax.lax.bitcast_convert_type(n + 1.5 * 2.0**52, jnp.int64) << 52
    return jax.lax.bitcast_convert_type(bits + shift, jnp.float64)


def _by_halves(coefficients: Sequence[Any], x: Array) -> Array:
    """Return the polynomial. Its halves do not wait for each other, which takes half the time of Horner's rule."""
    terms, power = list(coefficients), x
    while len(terms) > 1:
        pairs = [low + high * power for low, high in zip(terms[::2], terms[1::2], strict=False)]
        terms, power = pairs + terms[len(terms) & ~1 :], power * power
    return terms[0]


@jax.custom_jvp  # type: ignore[untyped-decorator, unused-ignore]
def exponential(x: Array) -> Array:
    """Return e^x for x ≤ 0. XLA's own exponential takes twice as long in a loop with other operations, in float64."""
    if x.dtype != jnp.float64:
        return jnp.exp(x)
    x = jnp.maximum(x, NEGLIGIBLE["float64"])
    n = jnp.round(x * float(LOG2_E))
    return _shifted(n, ((x - n * LOG_2[0]) - n * LOG_2[1]) * float(LOG2_E))  # n·LOG_2[0] is exact


@exponential.defjvp  # type: ignore[untyped-decorator, unused-ignore]
def _exponential_derivative(x: tuple[Array], moved: tuple[Array]) -> tuple[Array, Array]:
    found = exponential(*x)
    return found, found * moved[0]


def _inner(factors: Iterable[Array], rows: Sequence[Array], constant: Array) -> Array:
    """Return constant + Σ factors·rows. The products are added up first."""
    products = [factor * row for factor, row in zip(factors, rows, strict=True)]
    return functools.reduce(operator.add, [*products, constant])


def _exponentials(scores: Sequence[Array]) -> list[Array]:
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, scores))
    own = exponential if len(scores) <= MOST_WRITTEN_KEYS else jnp.exp
    return [own(score - top) for score in scores]


def _averages(scores: Sequence[Array], values: Iterable[Iterable[Array]]) -> list[Array]:
    """Return the average of each column of the values, (keys, columns), with the softmax of the scores as weights."""
    weights = _exponentials(scores)
    total = _sum(weights)
    return [
        _sum([weight * value for weight, value in zip(weights, column, strict=True)]) / total
        for column in zip(*values, strict=True)
    ]


def _sum(terms: Sequence[Array]) -> Array:
    """Return the sum, in blocks as in `ir.summing`."""
    while len(terms) > 1:
        terms = [functools.reduce(operator.add, terms[i : i + BLOCK]) for i in range(0, len(terms), BLOCK)]
    return terms[0]


# --- stages -----------------------------------------------------------------------------------------------------------


def _staged(form: NormalForm) -> Run:
    stages = [_Attention(stage) if isinstance(stage, AttentionStage) else _Softmax(stage) for stage in form.stages]
    output, num_outputs = _Form(form.output), math.prod(form.output.shape)
    step = max(1, CELLS_PER_JAX_BLOCK // max(1, num_outputs, *(stage.cells_per_point for stage in stages)))

    def run(u: Array) -> Array:
        for stage in stages:
            u = stage(u)
        return jnp.broadcast_to(output(u), (len(u), *form.output.shape)).reshape(len(u), num_outputs)

    def in_blocks(u: Array) -> Array:
        if len(u) <= step:
            return run(u)
        blocks = jnp.pad(u, ((0, -len(u) % step), (0, 0)), mode="edge").reshape(-1, step, u.shape[1])
        return jax.lax.map(jax.checkpoint(run), blocks).reshape(-1, num_outputs)[: len(u)]

    return in_blocks


class _Form:
    """An array of affine functions of u: (batch, variables) → (batch, rows, columns), or (rows, columns) if constant.

    A linear map that is large has, for each entry, the numbers of its variables and their coefficients.
    """

    def __init__(self, form: FloatForm) -> None:
        self.is_constant, self.constant, self._shape = form.is_constant, form.constant.toarray(), form.shape
        num_entries, num_variables = form.linear.shape
        self._is_dense = num_entries * num_variables <= DENSE_CELLS
        if self.is_constant or self._is_dense:
            self._weight, self.cells_per_point = form.linear.toarray().T if not self.is_constant else None, num_entries
            return
        counts = np.diff(form.linear.indptr)
        self._which, self._coefficients = (
            np.zeros((num_entries, counts.max()), dtype) for dtype in (np.int64, form.linear.dtype)
        )
        places = np.arange(counts.max()) < counts[:, None]
        self._which[places], self._coefficients[places] = form.linear.indices, form.linear.data
        self.cells_per_point = 2 * self._which.size + num_entries

    def __call__(self, u: Array) -> Array:
        if self.is_constant:
            return self.constant
        moved = matmul(u, self._weight) if self._is_dense else (u[:, self._which] * self._coefficients).sum(axis=-1)
        return moved.reshape(len(u), *self._shape) + self.constant


class _Attention:
    """An attention stage: (batch, variables) → (batch, moved)."""

    def __init__(self, stage: AttentionStage) -> None:
        width = stage.heads[0].W_O.shape[1]
        columns, places = np.unique(stage.written % width, return_inverse=True)  # the channels that are read later
        self._heads = [_Head(head, columns) for head in stage.heads]
        self._written, self._carried = stage.written // width * len(columns) + places, stage.carried
        self._residual = _Form(stage.queried.columns(columns)) if stage.is_residual else None
        cells = stage.heads[0].queries.shape[0] * len(columns)
        self.cells_per_point: int = sum(head.cells_per_point + cells for head in self._heads) + 3 * cells
        self.cells_per_point += 0 if self._residual is None else self._residual.cells_per_point

    def __call__(self, u: Array) -> Array:
        total = functools.reduce(operator.add, [head(u) for head in self._heads])
        if self._residual is not None:
            total = total + self._residual(u)
        return jnp.concatenate([jax.lax.collapse(total, 1)[:, self._written], u[:, self._carried]], axis=1)


class _Softmax:
    """A softmax stage, with the same call."""

    def __init__(self, stage: SoftmaxStage) -> None:
        self._logits, self._shape, self._carried = _Form(stage.logits), stage.logits.shape, stage.carried
        self.cells_per_point = 3 * math.prod(stage.logits.shape) + self._logits.cells_per_point

    def __call__(self, u: Array) -> Array:
        weights = exponentials(jnp.broadcast_to(self._logits(u), (len(u), *self._shape)))
        weights = weights / _key_sum(weights)[..., None]
        return jnp.concatenate([jax.lax.collapse(weights, 1), u[:, self._carried]], axis=1)


class _Head:
    """softmax(queries·keysᵀ)·values·W_O: (batch, variables) → (batch, queries, columns that are read later)."""

    def __init__(self, head: FoldedHead, columns: np.ndarray) -> None:
        plan = QueryPieces(head, CELLS_PER_JAX_BLOCK)
        self._queries, self._keys, self._values = _Form(head.queries), _Form(plan.keys), _Form(plan.values)
        self._shape, self._W_O, self._shared = head.queries.shape, head.W_O[:, columns], plan.shared
        self._pieces, self._order = plan.pieces, np.argsort(np.concatenate([which.ravel() for which, _ in plan.pieces]))
        self.cells_per_point = plan.cells_per_point + sum(
            form.cells_per_point for form in (self._queries, self._keys, self._values) if not form.is_constant
        )

    def __call__(self, u: Array) -> Array:
        queries = jnp.broadcast_to(self._queries(u), (len(u), *self._shape))
        keys, values = self._keys(u), self._values(u)
        pieces = [self._average(queries[:, which], keys, values, own) for which, own in self._pieces]
        mixed = jnp.concatenate([jax.lax.collapse(piece, 1, -1) for piece in pieces], axis=1)
        return matmul(mixed[:, self._order], self._W_O)

    def _average(self, queries: Array, keys: Array, values: Array, own: np.ndarray | None) -> Array:
        """Return the averages for some queries: (batch, queries, …), or (batch, s, q, …) if row s sees keys own[s]."""
        if own is not None:
            seen = np.concatenate([np.broadcast_to(self._shared, (len(own), len(self._shared))), own], axis=1)
            keys, values = keys[..., seen, :], values[..., seen, :]
        weights = exponentials(matmul(queries, jnp.swapaxes(keys, -1, -2)))
        return _key_mix(weights, values) / _key_sum(weights)[..., None]


def matmul(a: Array, b: Array) -> Array:
    """Return a @ b. Some devices would use fewer digits by default."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def exponentials(scores: Array) -> Array:
    """Return exponentials of the scores less the largest, over the last axis."""
    return jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))


def _key_sum(terms: Array) -> Array:
    """Return the sum over the last axis, in blocks for float32."""
    return _sum_of_runs(jnp.moveaxis(terms, -1, 0)) if terms.dtype == jnp.float32 else terms.sum(axis=-1)


def _key_mix(weights: Array, values: Array) -> Array:
    """Return weights @ values, (…, q, keys) and (…, keys, v) → (…, q, v), in blocks for float32."""
    n, v = values.shape[-2:]
    if weights.dtype != jnp.float32 or n <= BLOCK:
        return matmul(weights, values)
    whole = n - n % BLOCK
    values = values.reshape(*(1,) * (weights.ndim - values.ndim), *values.shape)
    of_blocks = jnp.moveaxis(weights[..., :whole].reshape(*weights.shape[:-1], whole // BLOCK, BLOCK), -2, 0)
    by_blocks = jnp.moveaxis(values[..., :whole, :].reshape(*values.shape[:-2], whole // BLOCK, BLOCK, v), -3, 0)
    sums = matmul(of_blocks, by_blocks)
    if whole < n:
        sums = jnp.concatenate([sums, matmul(weights[..., whole:], values[..., whole:, :])[None]])
    return _sum_of_runs(sums)


def _sum_of_runs(terms: Array) -> Array:
    """Return the sum over the first axis. A block takes one term from each of 8 runs, so that long rows are added."""
    while (n := len(terms)) > BLOCK:
        step = n // BLOCK
        runs = [terms[i * step : (i + 1) * step] for i in range(BLOCK)]
        rest = [functools.reduce(operator.add, list(terms[step * BLOCK :]))[None]] if n % BLOCK else []
        terms = jnp.concatenate([functools.reduce(operator.add, runs), *rest])
    return functools.reduce(operator.add, list(terms))
