"""Python code as a target: a function of points, or of sequences."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import AttncError, InputError, real_number
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.box import Box
from attnc.targets.target import Target, show_point

if TYPE_CHECKING:
    from jaxtyping import Float


class FunctionTarget(Target, abc.ABC):
    """A vectorised Python function, with a Lipschitz constant that is given, never derived from samples.

    The constant is with respect to the 2-norm of all inputs together and the max-norm of the output.
    """

    fn: Callable[..., Any]
    lipschitz: float | None

    def _take(self, fn: Callable[..., Any], lipschitz: float | None) -> None:
        if not callable(fn):
            raise InputError(f"expected a function, found a {type(fn).__name__}")
        self.fn, self.lipschitz = fn, None if lipschitz is None else real_number("lipschitz", lipschitz)
        if self.lipschitz is not None and self.lipschitz < 0:
            raise InputError(f"lipschitz must be ≥ 0, found {lipschitz}")
        lipschitz = self.lipschitz
        if lipschitz is not None:
            self.assumptions = (
                f"given, not proved: {self.describe()} is Lipschitz with constant {lipschitz:g} from the 2-norm of the "
                "input to the max-norm of the output, and returns its values exactly",
            )

    def __call__(self, points: Float[np.ndarray, "batch d"]) -> Float[np.ndarray, "batch outputs"]:
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

    def _call(self, points: Float[np.ndarray, "batch d"]) -> np.ndarray:
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

    def _probe(self) -> tuple[int, ...]:
        """The shape that the function returns for a batch of three."""
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

    def variation(
        self,
        cells: Interval,
        centres: Float[np.ndarray, "cells d"],
        values: Float[np.ndarray, "cells outputs"] | None = None,
    ) -> Float[np.ndarray, " cells"]:
        if self.lipschitz is None:
            raise InputError(
                f"the function {self.describe()} is given as Python code: samples of it prove nothing. "
                "State a Lipschitz constant (lipschitz=…), or give an expression."
            )
        reach = up(np.maximum(cells.hi - centres, centres - cells.lo))
        distance = up(np.sqrt(up((reach**2).sum(axis=1), self.box.d + 1)))
        found = np.asarray(up(self.lipschitz * distance))
        return found if values is None else up(found + self.distance(centres, values))

    def describe(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)


class CallableTarget(FunctionTarget):
    """fn: (batch, d) → (batch,) or (batch, k)."""

    def __init__(self, fn: Callable[[np.ndarray], Any], box: Box, lipschitz: float | None = None) -> None:
        self.box, self.input_shapes = box, ((box.d,),)
        self._take(fn, lipschitz)
        self.output_shape = self._probe()
        if len(self.output_shape) > 1:
            raise InputError(
                f"the function {self.describe()} returned shape (batch, {', '.join(map(str, self.output_shape))}); "
                "it must map (batch, d) to (batch,) or (batch, k). For sequences use attnc.SequenceTarget."
            )


class SequenceTarget(FunctionTarget):
    """fn: (batch, n, d) → (batch, n, k), or of two sequences fn(X, Y) → (batch, n, k) with n the tokens of X.

    `tokens` and `width` are numbers, or pairs of them for two sequences; every entry lies in `box` = (lo, hi).
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        tokens: int | tuple[int, int],
        width: int | tuple[int, int],
        box: tuple[float, float] = (-1.0, 1.0),
        lipschitz: float | None = None,
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
        self._take(fn, lipschitz)
        found = self._probe()
        n = self.input_shapes[0][0]
        if len(found) != 2 or found[0] != n:
            shape = ", ".join(map(str, found))
            raise InputError(
                f"the sequence function {self.describe()} returned shape (batch, {shape}); it must return "
                f"(batch, {n}, k): one row for each of the {n} tokens of its first input"
            )
        self.output_shape = found


def _sizes(name: str, given: Any) -> tuple[int, ...]:
    sizes = given if isinstance(given, tuple | list) else (given,)
    if len(sizes) not in (1, 2) or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in sizes):
        raise InputError(f"{name} must be a whole number ≥ 1, or a pair of them for two sequences; found {given!r}")
    return tuple(sizes)
