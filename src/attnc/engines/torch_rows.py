"""Rows of points in torch without a gradient: heads that take one exponential per point, and affine maps.

Every number of a point is a row, as in `fused`. A head of one query over few constant keys takes one exponential in two
cases: if it has two keys, and if its weights are powers of one exponential (`powers`). Otherwise it takes one for each
key. All are computed in float64, also for a float32 program, whose averages are then rounded once.

Rounding.  Exponents are in units of log 2. A coefficient step·w·log₂e of an exponent is rounded once, then its product
with a variable, then sums. A certificate counts the roundings of the query, those of its products with slopes, and two
more.
- Powers: `powers` spends one rounding on δ·x and one on the spacing. Here a rounding of the coefficient is added, and
  that of the query's own product is saved. If this product is exact, w is ±2^k. Then the product with slopes is
  counted, or all slopes are powers of two and equally spaced exactly. Powers are made by the same products as in
  `powers`. The sums over keys are those of C_k·E^k and of (v_k·C_k)·E^k. Terms of the first round once besides
  additions, those of the second twice, and the average once: certificates count one, and three.
- Two keys: the weights are 1 and E, the exponential of the difference of the scores. The errors of both scores cover
  the roundings of their difference. E is at most e^700, so that a smaller weight of the other key becomes e^−700.
- One exponential for each key: a slope and an offset times log₂e are rounded once, the product once, the sum once. The
  product with slopes is counted, unless all are powers of two. Then this module leaves the head to the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

import numpy as np

from attnc.engines.powers import GROUP, LARGEST_EXPONENT, LARGEST_VALUE, LOG2_E, as_powers
from attnc.errors import MissingExtra
from attnc.ir.rounding import NEGLIGIBLE

try:
    import torch
    from torch import Tensor
    from torch.autograd.forward_ad import unpack_dual
except ImportError as error:
    raise MissingExtra("to_torch needs", "torch", "torch", error) from error

FEWEST_POINTS = 512
"""The smallest number of points for which rows are used: comparing the stored numbers has a fixed cost. This value was
not measured."""
LARGEST_POWER = -NEGLIGIBLE["float64"] * float(LOG2_E)
"""The largest exponent of two keys: 2 to this power is e^700."""
LARGEST_PLAIN_VALUE = 1e3
"""The largest value of two keys that is multiplied by an exponential: e^700 times it is a finite number."""

T = TypeVar("T")
Average = Callable[[Sequence[Tensor]], Tensor | None]
"""Maps the rows of the variables to the averages of a head, (d_v, batch), or to None where it cannot."""


def is_plain(u: Tensor, *others: Tensor) -> bool:
    """Return whether u has enough points, and no tensor is traced or differentiated, or elsewhere than on the CPU."""
    if torch.compiler.is_compiling() or u.shape[-1] < FEWEST_POINTS:
        return False
    for tensor in (u, *others):
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or not tensor.is_floating_point():
            return False
        if (torch.is_grad_enabled() and tensor.requires_grad) or unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            return False
        try:
            tensor.data_ptr()
        except RuntimeError:  # a tensor of torch.func: it has no memory of its own
            return False
    return True


class Prepared:
    """A result of some stored tensors. It is computed anew if one of their numbers has changed."""

    def __init__(self) -> None:
        self._made: tuple[list[Tensor], object] | None = None

    def get(self, stored: Sequence[Tensor], make: Callable[[], T]) -> T:
        made = self._made
        if made is None or not all(map(_is_same, made[0], stored)):
            made = self._made = [tensor.clone() for tensor in stored], make()
        found: T = made[1]  # type: ignore[assignment]
        return found


def _is_same(kept: Tensor, given: Tensor) -> bool:
    return kept.dtype == given.dtype and torch.equal(kept, given)


# --- affine maps ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The affine function constant + scale·Σ coefficient·row of some rows."""

    terms: tuple[tuple[int, float], ...]  # (number of a row, coefficient)
    scale: float
    constant: float

    def __call__(self, rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the new row, or one of the rows if the function is that row."""
        if not self.terms:
            return rows[0].new_full(rows[0].shape, self.constant, dtype=dtype)
        (first, factor), *others = self.terms
        given = found = rows[first].to(dtype)
        if factor != 1:
            found = found * factor
        for row, factor in others:
            found = torch.add(found, rows[row], alpha=factor, out=None if found is given else found)
        if self.scale != 1:
            found = torch.mul(found, self.scale, out=None if found is given else found)
        return found if self.constant == 0 else torch.add(found, self.constant, out=None if found is given else found)

    @property
    def negative(self) -> Row:
        return Row(tuple((row, -factor) for row, factor in self.terms), self.scale, -self.constant)


def row_of(coefficients: Sequence[float], constant: float) -> Row:
    """Return the affine function. Coefficients of one size are signs, and their size is the scale: one product less."""
    terms = [(i, c) for i, c in enumerate(coefficients) if c != 0]
    sizes = {abs(c) for _, c in terms}
    if len(terms) < 2 or len(sizes) > 1:
        return Row(tuple(terms), 1.0, constant)
    (size,) = sizes
    return Row(tuple((i, c / size) for i, c in terms), size, constant)


# --- heads ------------------------------------------------------------------------------------------------------------


class FewKeys(NamedTuple):
    """A head with one query over few constant keys: numbers of the stored tensors, in the program's dtype."""

    query: np.ndarray  # (d_k, variables)
    constant: np.ndarray  # (d_k,)
    keys: np.ndarray  # (keys, d_k)
    values: np.ndarray  # (keys, d_v)
    carried: np.ndarray  # (moving, keys, d_v): the coefficients of variables[j] in the values
    variables: list[int]

    def average(self) -> Average | None:
        """Return how to compute its averages with one exponential per point. None: it needs more."""
        if not np.isfinite(np.concatenate([each.ravel() for each in self[:5]])).all():
            return None
        return _TwoKeys(self) if len(self.keys) == 2 else _weighted(self)


class _TwoKeys:
    """The weights are E and 1, where E is the exponential of the difference of the scores."""

    def __init__(self, head: FewKeys) -> None:
        pairs = zip(*head.keys.tolist(), strict=True)
        self._exponent = _exponent(head, [Fraction(first) - Fraction(second) for first, second in pairs])
        self._is_plain = not head.variables and np.abs(head.values).max(initial=0.0) <= LARGEST_PLAIN_VALUE
        coefficients = np.zeros((*head.values.shape, head.query.shape[1]))
        coefficients[:, :, head.variables] = np.moveaxis(head.carried, 0, -1)
        self._values = [
            [row_of(linear.tolist(), float(constant)) for linear, constant in zip(*of_column, strict=True)]
            for of_column in zip(coefficients.swapaxes(0, 1), head.values.T, strict=True)
        ]

    def __call__(self, u: Sequence[Tensor]) -> Tensor:
        first = self._exponent(u, torch.float64).clamp(max=LARGEST_POWER).exp2_()
        total = first + 1
        if self._is_plain:
            found = [(first * one.constant).add_(other.constant).div_(total) for one, other in self._values]
        else:
            second = total.reciprocal_()
            first *= second
            found = [_mixed(first, second, one, other, u) for one, other in self._values]
        return _stacked(found, u[0].dtype)


def _mixed(first: Tensor, second: Tensor, one: Row, other: Row, u: Sequence[Tensor]) -> Tensor:
    """Return first·one + second·other. Values that differ by their sign are multiplied once."""
    value = other(u, torch.float64)
    if one == other.negative:
        return (second - first).mul_(value)
    return torch.addcmul(second * value, first, one(u, torch.float64))


def _stacked(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (torch.stack(tuple(rows)) if len(rows) > 1 else rows[0][None]).to(dtype)


def _exponent(head: FewKeys, slopes: Sequence[Fraction]) -> Row:
    """Return the row log₂e·Σ_j slopes_j·query_j. Each coefficient is rounded once."""
    constants = [Fraction(float(c)) for c in head.constant]
    factors = [LOG2_E * slope for slope in slopes]
    columns = [[Fraction(float(w)) for w in column] for column in head.query.T]
    coefficients = [float(sum((f * w for f, w in zip(factors, column, strict=True)), Fraction())) for column in columns]
    return row_of(coefficients, float(sum((f * c for f, c in zip(factors, constants, strict=True)), Fraction())))


class _ValueSums:
    """The averages of values that are constant, or multiples of variables. Columns of zeros are left out."""

    def __init__(self, head: FewKeys, columns: np.ndarray, coefficients: np.ndarray) -> None:
        kept, d_v = columns.any(axis=0), head.values.shape[1]
        sums = coefficients[:, None] * np.column_stack([np.ones(len(columns)), columns[:, kept]])
        self.sums = torch.tensor(sums.T.copy())
        places = np.where(kept, np.cumsum(kept), 0).reshape(-1, d_v).T.tolist()  # row 0 is the sum of the weights
        self._terms = [
            [(place, factor) for place, factor in zip(row, (None, *head.variables), strict=True) if place]
            for row in places
        ]

    def __call__(self, sums: Tensor, u: Sequence[Tensor]) -> Tensor:
        """Return the averages for the sums of the weights and of their products with all columns."""
        sums[1:] /= sums[0]
        found = []
        for terms in self._terms:
            parts = [sums[place] if factor is None else sums[place] * u[factor] for place, factor in terms]
            found.append(sum(parts[1:], parts[0]) if parts else torch.zeros_like(sums[0]))
        return _stacked(found, u[0].dtype)


class _Powers:
    """The weights are coefficients[k]·E^k. The exponent of E is at most `limit`."""

    def __init__(self, exponent: Row, limit: float, columns: _ValueSums) -> None:
        self._exponent, self._limit, self._columns = exponent, limit, columns
        self._first, self._others = columns.sums[:, :1], columns.sums[:, 1:].contiguous()

    def __call__(self, u: Sequence[Tensor]) -> Tensor | None:
        exponent = self._exponent(u, torch.float64)
        if not _largest(exponent) <= self._limit:
            return None
        powers = exponent.new_empty(1 + self._others.shape[1], len(exponent))
        torch.exp2(exponent, out=powers[1])
        _raise(powers)
        return self._columns(torch.addmm(self._first, self._others, powers[1:]), u)


class _Exponentials:
    """The weights are the exponentials of slopes·x + offsets, in units of log 2, for |x| ≤ limit."""

    def __init__(self, x: Row, slopes: np.ndarray, offsets: np.ndarray, limit: float, columns: _ValueSums) -> None:
        self._x, self._limit, self._columns = x, limit, columns
        self._slopes, self._offsets = torch.tensor(slopes)[:, None], torch.tensor(offsets)[:, None]

    def __call__(self, u: Sequence[Tensor]) -> Tensor | None:
        x = self._x(u, torch.float64)
        if not _largest(x) <= self._limit:
            return None
        weights = (self._slopes * x).add_(self._offsets).exp2_()
        return self._columns(self._columns.sums @ weights, u)


def _largest(row: Tensor) -> float:
    """Return the largest absolute value: NaN if there is a NaN."""
    lo, hi = torch.aminmax(row)
    return max(-float(lo), float(hi))


def _raise(powers: Tensor) -> None:
    """Set row k to the k-th power of row 1, by the products that `powers` counts. Row 0 is not set."""
    num_keys = len(powers)

    def multiply(base: int, count: int) -> None:
        """Set the rows after `base` to its products with the rows 1 to count."""
        count = min(count, num_keys - base - 1)
        if count > 0:
            torch.mul(powers[base], powers[1 : 1 + count], out=powers[base + 1 : base + 1 + count])

    multiply(1, 1)
    multiply(2, 2)
    multiply(4, 3)
    if num_keys > GROUP:
        torch.mul(powers[4], powers[4], out=powers[GROUP])
        multiply(GROUP, GROUP - 1)
    for base in range(2 * GROUP, num_keys, GROUP):
        torch.mul(powers[base - GROUP], powers[GROUP], out=powers[base])
        multiply(base, GROUP - 1)


def _weighted(head: FewKeys) -> _Powers | _Exponentials | None:
    moves = head.query.any(axis=1) & head.keys.any(axis=0)
    if moves.sum() != 1 or not len(head.keys):
        return None
    (moving,), still = np.flatnonzero(moves), ~head.query.any(axis=1)
    slopes, columns = head.keys[:, moving], np.concatenate([head.values, *head.carried], axis=1).astype(np.float64)
    found = as_powers(slopes, head.keys[:, still] @ head.constant[still], columns)
    if found is not None:
        factors = [Fraction(found.step if j == moving else 0.0) for j in range(len(head.constant))]
        limit = found.reach * abs(found.step) * float(LOG2_E)
        return _Powers(_exponent(head, factors), limit, _ValueSums(head, columns, found.coefficients))
    if slopes.dtype == np.float64 and _is_power_of_two(slopes).all():
        return None
    constants = [Fraction(c) for c in head.constant[still].tolist()]
    offsets = [
        sum((Fraction(k) * c for k, c in zip(keys, constants, strict=True)), Fraction())
        for keys in head.keys[:, still].tolist()
    ]
    scaled = np.array(
        [[float(LOG2_E * Fraction(a)), float(LOG2_E * c)] for a, c in zip(slopes.tolist(), offsets, strict=True)]
    )
    room = LARGEST_EXPONENT * float(LOG2_E) - np.abs(scaled[:, 1]).max()
    if room <= 0 or np.abs(columns).max(initial=0.0) > LARGEST_VALUE:
        return None
    x = row_of(head.query[moving].tolist(), float(head.constant[moving]))
    limit = float(room / np.abs(scaled[:, 0]).max())
    return _Exponentials(x, scaled[:, 0], scaled[:, 1], limit, _ValueSums(head, columns, np.ones(len(slopes))))


def _is_power_of_two(x: np.ndarray) -> np.ndarray:
    return (x == 0) | (np.abs(np.frexp(x)[0]) == 0.5)
