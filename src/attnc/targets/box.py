"""The domain: an interval for every variable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float

BoxLike = Mapping[str, tuple[float, float]] | Sequence[tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Box:
    """The domain: lo ≤ x ≤ hi for every variable, with lo < hi. Ends may be infinite if there is a single variable.

    Parameters
    ----------
    names : tuple of str
        The names of the variables.
    lo, hi : array (d,)
        The ends; `Box.parse` checks them.

    Examples
    --------
    >>> import attnc
    >>> box = attnc.Box.parse({"x": (-1, 1), "y": (0, 2)})
    >>> print(box, box.d, box.is_bounded)
    x ∈ [-1, 1], y ∈ [0, 2] 2 True
    """

    names: tuple[str, ...]
    lo: Float[np.ndarray, " d"]
    hi: Float[np.ndarray, " d"]

    @classmethod
    def parse(cls, given: BoxLike, names: Sequence[str] | None = None) -> Box:
        """Make a box from ranges.

        Parameters
        ----------
        given : mapping or sequence
            {name: (lo, hi)}, or pairs (lo, hi) in the order of `names`.
        names : sequence of str, optional
            The variables, by default x0, x1, ….

        Returns
        -------
        Box

        Raises
        ------
        InputError
            If a range is not two numbers in ascending order, or names and ranges do not fit.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse({"x": (-3, 3), "y": (0, 1)}).names
        ('x', 'y')
        """
        if isinstance(given, Mapping):
            order: Sequence[str] = tuple(given)
            pairs: list[Any] = list(given.values())
        else:
            if not isinstance(given, list | tuple | np.ndarray):
                raise InputError(f"box: expected {{name: (lo, hi)}} or a list of (lo, hi), found {given!r}")
            pairs = list(given)
            order = names if names is not None else [f"x{i}" for i in range(len(pairs))]
            if len(pairs) == 2 and all(isinstance(end, int | float | np.number) for end in pairs):
                one = f"({pairs[0]}, {pairs[1]})"
                raise InputError(f"box: {one} is a single range; write [{one}] for one variable, or a range for each")
            if len(order) != len(pairs):
                raise InputError(f"box: {len(pairs)} interval(s) for {len(order)} variable(s) ({', '.join(order)})")
        if not pairs:
            raise InputError("box: at least one variable is needed")
        bounds = [_interval(name, pair) for name, pair in zip(order, pairs, strict=True)]
        lo, hi = np.array(bounds, np.float64).T
        box = cls(tuple(order), lo, hi)
        if box.d > 1 and not box.is_bounded:
            raise InputError(f"box: {box} is not finite; only a function of one variable can have an infinite range")
        return box

    @property
    def d(self) -> int:
        """The number of variables.

        Examples
        --------
        >>> import attnc
        >>> box = attnc.Box.parse({"x": (-3, 3), "y": (0, 1)})
        >>> box.d
        2
        """
        return len(self.names)

    @cached_property
    def is_bounded(self) -> bool:
        """Whether all ends are finite.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse({"x": (0, 1)}).is_bounded, attnc.Box.parse({"x": (0, float("inf"))}).is_bounded
        (True, False)
        """
        return bool(np.isfinite(self.lo).all() and np.isfinite(self.hi).all())

    def core(self, reach: float) -> Box:
        """Return the box with infinite ends replaced by ±reach, or by the other end ± reach if that is farther out.

        Parameters
        ----------
        reach : float
            The distance from 0 at which infinite ends are cut.

        Returns
        -------
        Box
            A finite box.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse({"x": (0, float("inf"))}).core(10.0).as_dict()
        {'x': (0.0, 10.0)}
        """
        lo = np.where(np.isinf(self.lo), np.minimum(-reach, np.where(np.isinf(self.hi), 0.0, self.hi) - reach), self.lo)
        hi = np.where(np.isinf(self.hi), np.maximum(reach, np.where(np.isinf(self.lo), 0.0, self.lo) + reach), self.hi)
        return Box(self.names, lo, hi)

    @property
    def infinite_sides(self) -> tuple[int, ...]:
        """The sides on which a box of one variable is infinite: −1 for x → −∞, 1 for x → ∞.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse({"x": (0, float("inf"))}).infinite_sides
        (1,)
        """
        return tuple(side for side, end in ((-1, self.lo[0]), (1, self.hi[0])) if np.isinf(end))

    @property
    def widths(self) -> Float[np.ndarray, " d"]:
        """The lengths of the sides.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse({"x": (-3, 3), "y": (0, 1)}).widths.tolist()
        [6.0, 1.0]
        """
        return self.hi - self.lo

    @property
    def magnitude(self) -> Float[np.ndarray, " d"]:
        """The largest |x| per coordinate.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse({"x": (-3, 2), "y": (0, 1)}).magnitude.tolist()
        [3.0, 1.0]
        """
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    def contains(self, points: Float[np.ndarray, "batch d"]) -> np.ndarray:
        """Return whether each point is in the box.

        Parameters
        ----------
        points : array of shape (batch, d)

        Returns
        -------
        Array of bool, of shape (batch,).

        Examples
        --------
        >>> import attnc
        >>> box = attnc.Box.parse({"x": (-3, 3), "y": (0, 1)})
        >>> box.contains([[0, 0.5], [4, 0.5]]).tolist()
        [True, False]
        """
        return np.all((points >= self.lo) & (points <= self.hi), axis=1)

    def as_dict(self) -> dict[str, tuple[float, float]]:
        """Return {name: (lo, hi)}.

        Returns
        -------
        dict
            The ends of the range of every variable.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse([(-1, 1)]).as_dict()
        {'x0': (-1.0, 1.0)}
        """
        return {name: (float(lo), float(hi)) for name, lo, hi in zip(self.names, self.lo, self.hi, strict=True)}

    def as_json(self) -> dict[str, list[float | str]]:
        """Return {name: [lo, hi]}. JSON has no infinite numbers, so infinite ends are the texts "-inf" and "inf".

        Returns
        -------
        dict
            Lists of two numbers or texts.

        Examples
        --------
        >>> import attnc
        >>> attnc.Box.parse({"x": (0, float("inf"))}).as_json()
        {'x': [0.0, 'inf']}
        """
        return {name: [x if math.isfinite(x) else str(x) for x in ends] for name, ends in self.as_dict().items()}

    def __str__(self) -> str:
        return show_intervals(self.as_dict())


def show_intervals(intervals: Mapping[str, tuple[float, float]]) -> str:
    """Return the text of intervals, with enough digits to distinguish both ends."""

    def show(lo: float, hi: float) -> str:
        texts = ((f"{lo:.{digits}g}", f"{hi:.{digits}g}") for digits in (6, 9, 12, 17))
        return ", ".join(next((pair for pair in texts if pair[0] != pair[1]), (str(lo), str(hi))))

    return ", ".join(f"{name} ∈ [{show(lo, hi)}]" for name, (lo, hi) in intervals.items())


def _interval(name: str, pair: Any) -> tuple[float, float]:
    try:
        if isinstance(pair, str | bytes | set | frozenset | Mapping):
            raise TypeError
        lo, hi = (float(end) for end in pair)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"box: {name} needs two numbers (lo, hi), found {pair!r}") from None
    if math.isnan(lo) or math.isnan(hi):
        raise InputError(f"box: {name} ∈ [{lo}, {hi}] is not a range; give two numbers (lo, hi)")
    if lo >= hi or lo == math.inf or hi == -math.inf:
        kind = "reversed" if lo > hi else "empty"
        raise InputError(f"box: {name} ∈ [{lo}, {hi}] is {kind}; the first number must be below the second")
    if math.isfinite(lo) and math.isfinite(hi) and not math.isfinite(hi - lo):
        raise InputError(f"box: {name} ∈ [{lo}, {hi}] is wider than float64 can hold")
    return lo, hi
