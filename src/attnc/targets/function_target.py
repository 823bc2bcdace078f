"""Python code as a target: a function of points, or of sequences."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import AttncError, InputError, real_number
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.box import Box
from attnc.targets.target import Target, show_point

if TYPE_CHECKING:
    from attnc.targets.target import Points, Values


MAX_CORNERS = 64
"""Maximum number of corners of a cell at which f is sampled if second derivatives are bounded: those of six
variables."""


class FunctionTarget(Target, abc.ABC):
    """A vectorised Python function, with constants that are given, never derived from samples.

    `lipschitz` refers to the 2-norm of all inputs together and the max-norm of the output. `hessian_bound` bounds
    |∂²f/∂x_i²| of every output along every axis. A bound of the Hessian's norm is such a bound.

    Theorem.  The multilinear interpolant If of f at the corners of a cell with half-widths r is within
              min(Λ·|r|₂, Γ·Σ r_i²/2) of f on the cell, where Λ is `lipschitz` and Γ is `hessian_bound`.
    Proof.    If(x) = Σ w_v f(v) with w ≥ 0, Σ w = 1, Σ w_v v = x: |f − If| ≤ Λ Σ w_v |x − v| ≤ Λ (Σ w_v |x − v|²)^½ =
              Λ (Σ_i (x_i − a_i)(b_i − x_i))^½. Axis by axis, f − I_1…I_d f = Σ_i I_1…I_{i−1}(f − I_i f), and linear
              interpolation along one axis has an error of at most Γ r_i²/2.
    """

    fn: Callable[..., Any]
    lipschitz: float | None
    hessian_bound: float | None

    @property
    def is_known_on_cells(self) -> bool:
        return self.given is not None

    @property
    def interpolated(self) -> FunctionTarget:
        return self

    def _take(self, fn: Callable[..., Any], lipschitz: float | None, hessian_bound: float | None) -> None:
        """Check the function and its constants. The box and the shapes of the inputs must be set before."""
        if not callable(fn):
            raise InputError(f"expected a function, found a {type(fn).__name__}")
        self.fn = fn
        self.lipschitz, self.hessian_bound = _size("lipschitz", lipschitz), _size("hessian_bound", hessian_bound)
        short, long = [], []
        if self.lipschitz is not None:
            short.append(f"Lipschitz constant {self.lipschitz!r}")
            long.append(
                f"is Lipschitz with constant {self.lipschitz!r} from the 2-norm of the input to the max-norm of the "
                "output"
            )
        if self.hessian_bound is not None:
            short.append(f"second derivatives at most {self.hessian_bound!r}")
            long.append(f"has second derivatives along the axes of at most {self.hessian_bound!r} in absolute value")
        if long:
            self.given = " and ".join(short)
            self.assumptions = (
                f"given, not proved: {self.describe()} {' and '.join(long)}, and the values that it returns are exact: "
                "its own rounding is not counted",
            )
        self.output_shape = self._probed_shape()

    def __call__(self, points: Points) -> Values:
        found = self._call(points)
        if found.shape != (len(points), *self.output_shape):
            wanted = ", ".join(["batch", *map(str, self.output_shape)])
            raise InputError(
                f"the function {self.describe()} returned shape {found.shape} for a batch of {len(points)}; "
                f"it must be ({wanted}), as it was before"
            )
        values = found.reshape(len(points), self.num_outputs)
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            where = show_point(self.box.names, points[np.argmax(bad)])
            raise InputError(f"the function {self.describe()} returned NaN or inf at {where}")
        return values

    def _call(self, points: Points) -> np.ndarray:
        inputs = [part.copy() for part in self.split(points)]
        try:
            found = np.asarray(self.fn(*inputs))
        except AttncError:
            raise
        except Exception as error:
            shapes = ", ".join(str(part.shape) for part in inputs)
            raise InputError(
                f"the function {self.describe()} failed on inputs of shape {shapes}: {type(error).__name__}: {error}"
            ) from error
        if found.dtype.kind not in "fiub":
            raise InputError(f"the function {self.describe()} returned {found.dtype}: it must return real numbers")
        return found.astype(np.float64)

    def _probed_shape(self) -> tuple[int, ...]:
        """Return the shape that the function returns for a batch of three."""
        box = self.box
        found = self._call(np.stack([box.lo, box.lo / 2 + box.hi / 2, box.hi]))
        if found.ndim == 0 or len(found) != 3:
            raise InputError(
                f"the function {self.describe()} returned shape {found.shape} for a batch of 3: it must keep the batch "
                "as its first axis"
            )
        if not found.size:
            raise InputError(f"the function {self.describe()} returned shape {found.shape}: it has no output")
        return found.shape[1:]

    def variation(self, cells: Interval, centres: Points, values: Values | None = None) -> Float[np.ndarray, " cells"]:
        if self.given is None:
            raise InputError(
                f"the function {self.describe()} is given as Python code: samples of it prove nothing. State a "
                "Lipschitz constant (lipschitz=…) or a bound of its second derivatives (hessian_bound=…), or give an "
                "expression."
            )
        found = self._change(up(np.maximum(cells.hi - centres, centres - cells.lo)))
        if values is not None and self.lipschitz is not None:
            found = up(found + self.distance(centres, values))
        if self.hessian_bound is not None and self._has_corners:
            held = self(centres) if values is None else values
            farthest = up(np.abs(self.corners(cells) - held[:, None]).max(axis=(1, 2)))
            found = np.minimum(found, up(farthest + self.interpolation_error(cells)))
        return np.asarray(found)

    def enclosure(self, cells: Interval) -> Interval:
        # The centre and the Lipschitz constant, and the corners, where an interpolant has its extremes.
        if self.hessian_bound is None or not self._has_corners:
            return super().enclosure(cells)
        corners, off = self.corners(cells), self.interpolation_error(cells)[:, None]
        lo, hi = -up(off - corners.min(axis=1)), up(corners.max(axis=1) + off)
        if self.lipschitz is not None:
            found = super().enclosure(cells)
            lo, hi = np.maximum(found.lo, lo), np.minimum(found.hi, hi)
        if (lo > hi).any():
            raise InputError(
                f"the Lipschitz constant {self.lipschitz!r} and the bound {self.hessian_bound!r} of second derivatives "
                f"that were given contradict the values of {self.describe()}. State larger ones."
            )
        return Interval(lo, hi)

    def corners(self, cells: Interval) -> Float[np.ndarray, "cells corners outputs"]:
        """Return the values at the corners of every cell. The last axis varies fastest.

        Parameters
        ----------
        cells : Interval
            The lower and upper ends of the cells, two arrays (cells, d).

        Returns
        -------
        array of shape (cells, corners, outputs)
            The values at the 2^d corners of each cell.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> from attnc.numerics.intervals import Interval
        >>> target = attnc.SequenceTarget(lambda X: 2 * X, tokens=1, width=1, box=(-1, 1), lipschitz=2.0)
        >>> target.corners(Interval(np.array([[0.0]]), np.array([[0.5]]))).tolist()
        [[[0.0], [1.0]]]
        """
        n, d = cells.shape
        upper = np.array(list(itertools.product((False, True), repeat=d)))
        points = np.where(upper, cells.hi[:, None], cells.lo[:, None])
        values = self(points.reshape(-1, d)).reshape(n, len(upper), self.num_outputs)
        self._check_constants(cells, points, values)
        return values

    def interpolation_error(self, cells: Interval) -> Float[np.ndarray, " cells"]:
        """Return a bound of the distance between f and its multilinear interpolant on each cell.

        Parameters
        ----------
        cells : Interval
            The lower and upper ends of the cells, two arrays (cells, d).

        Returns
        -------
        array of shape (cells,)
            A bound for each cell, for the given constants.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> from attnc.numerics.intervals import Interval
        >>> target = attnc.SequenceTarget(lambda X: 2 * X, tokens=1, width=1, box=(-1, 1), lipschitz=2.0)
        >>> bool(target.interpolation_error(Interval(np.array([[0.0]]), np.array([[0.5]])))[0] >= 0.0)
        True
        """
        radii = up(up(cells.hi - cells.lo) / 2)
        found = self._change(radii)
        if self.hessian_bound is not None:
            found = np.minimum(found, up(self.hessian_bound * up((radii**2).sum(axis=1), self.box.d + 1) / 2))
        return found

    def _change(self, reach: Float[np.ndarray, "rows d"]) -> Float[np.ndarray, " rows"]:
        """Return lipschitz·|reach|₂, rounded up. It is infinite without a Lipschitz constant."""
        if self.lipschitz is None:
            return np.full(len(reach), np.inf)
        return np.asarray(up(self.lipschitz * up(np.sqrt(up((reach**2).sum(axis=1), reach.shape[1] + 1)))))

    @property
    def _has_corners(self) -> bool:
        if 2**self.box.d > MAX_CORNERS and self.lipschitz is None:
            raise InputError(
                f"hessian_bound takes functions of up to {MAX_CORNERS.bit_length() - 1} variables, which are sampled "
                f"at the corners of cells; {self.describe()} has {self.box.d}. State lipschitz=… instead."
            )
        return 2**self.box.d <= MAX_CORNERS

    def _check_constants(self, cells: Interval, points: np.ndarray, values: np.ndarray) -> None:
        """Raise InputError if values at corners or the middle of a cell contradict the constants beyond rounding."""
        rounding = 1e-12 * np.abs(values).max(initial=0.0)
        if self.lipschitz is not None:
            reach = np.sqrt(((points[:, 1:] - points[:, :1]) ** 2).sum(axis=2))
            change = np.abs(values[:, 1:] - values[:, :1]).max(axis=2)
            excess = change - (1 + 1e-6) * self.lipschitz * reach - rounding
            if (excess > 0).any():
                cell, corner = np.unravel_index(int(np.argmax(excess)), change.shape)
                one, other = (show_point(self.box.names, points[cell, i]) for i in (0, corner + 1))
                raise InputError(
                    f"the Lipschitz constant {self.lipschitz:g} that was given cannot be right: {self.describe()} "
                    f"changes by {change[cell, corner]:.6g} between {one} and {other}, which are "
                    f"{reach[cell, corner]:.6g} apart. State a larger one."
                )
        bent = np.abs(self(cells.mid) - values.mean(axis=1)).max(axis=1)
        excess = bent - 1.01 * self.interpolation_error(cells) - rounding
        if (excess > 0).any():
            where = show_point(self.box.names, cells.mid[int(np.argmax(excess))])
            raise InputError(
                f"the constants given for {self.describe()} ({self.given}) cannot be right: it bends more near "
                f"{where}. State a larger number."
            )

    def describe(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)


class CallableTarget(FunctionTarget):
    """fn: (batch, d) → (batch,) or (batch, k)."""

    def __init__(
        self,
        fn: Callable[[np.ndarray], Any],
        box: Box,
        lipschitz: float | None = None,
        hessian_bound: float | None = None,
    ) -> None:
        if not box.is_bounded:
            raise InputError(
                f"a Python function needs a finite box, found {box}; an expression may have an infinite one"
            )
        self.box, self.input_shapes = box, ((box.d,),)
        self._take(fn, lipschitz, hessian_bound)
        if len(self.output_shape) > 1:
            raise InputError(
                f"the function {self.describe()} returned shape (batch, {', '.join(map(str, self.output_shape))}); "
                "it must map (batch, d) to (batch,) or (batch, k). For sequences use attnc.SequenceTarget."
            )


class SequenceTarget(FunctionTarget):
    """A function of one sequence of tokens, or of two.

    Parameters
    ----------
    fn : callable
        Maps (batch, n, d) to (batch, n, k); or fn(X, Y) maps two sequences to (batch, n, k), with n the tokens of X.
    tokens, width : int or pair of int
        The number of tokens and their width; pairs for two sequences.
    box : pair of float
        The range (lo, hi) of every entry.
    lipschitz : float, optional
        A Lipschitz constant from the 2-norm of the input to the max-norm of the output, taken on trust. Without it
        nothing is proved, and the certificate has no bound.
    hessian_bound : float, optional
        A bound of |∂²f/∂x_i²| of every output along every axis, taken on trust.

    Raises
    ------
    InputError
        If the sizes are not whole numbers ≥ 1, or `fn` returns another shape than (batch, n, k).

    Examples
    --------
    >>> import attnc
    >>> target = attnc.SequenceTarget(lambda X: X / 2, tokens=2, width=1, box=(-1, 1), lipschitz=0.5)
    >>> net = attnc.compile(target, eps=0.5)
    >>> net([[[0.2], [-0.4]]]).shape
    (1, 2, 1)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        tokens: int | tuple[int, int],
        width: int | tuple[int, int],
        box: tuple[float, float] = (-1.0, 1.0),
        lipschitz: float | None = None,
        hessian_bound: float | None = None,
    ) -> None:
        sizes = [_sizes("tokens", tokens), _sizes("width", width)]
        if len(sizes[0]) != len(sizes[1]):
            raise InputError(f"tokens={tokens} and width={width} differ in how many sequences they describe")
        self.input_shapes = tuple(zip(*sizes, strict=True))
        names = [
            f"{letter}{token}_{column}"
            for letter, (n, d) in zip("xy", self.input_shapes, strict=False)
            for token in range(n)
            for column in range(d)
        ]
        self.box = Box.parse([box] * len(names), names)
        self._take(fn, lipschitz, hessian_bound)
        n, found = self.input_shapes[0][0], self.output_shape
        if len(found) != 2 or found[0] != n:
            raise InputError(
                f"the sequence function {self.describe()} returned shape (batch, {', '.join(map(str, found))}); it "
                f"must return (batch, {n}, k): one row for each of the {n} tokens of its first input"
            )


def _size(name: str, given: float | None) -> float | None:
    value = None if given is None else real_number(name, given)
    if value is not None and value < 0:
        raise InputError(f"{name} must be ≥ 0, found {given}")
    return value


def _sizes(name: str, given: Any) -> tuple[int, ...]:
    sizes = given if isinstance(given, tuple | list) else (given,)
    if len(sizes) not in (1, 2) or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in sizes):
        raise InputError(f"{name} must be a whole number ≥ 1, or a pair of them for two sequences; found {given!r}")
    return tuple(sizes)
