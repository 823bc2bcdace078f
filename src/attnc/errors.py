"""One family of errors. A message says what was asked, what was found, why it cannot be, and what to change."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any


class AttncError(Exception):
    """The base of everything attnc raises on purpose."""


class ExpressionError(AttncError):
    """The text of an expression cannot be read; `position` is the 0-based offset of the trouble in it."""

    def __init__(self, message: str, text: str = "", position: int | None = None) -> None:
        self.text, self.position = text, position
        if position is not None:
            message += "\n" + _caret(text, position)
        super().__init__(message)


def _caret(text: str, position: int, width: int = 60) -> str:
    """The piece of `text` around `position`, with a caret below it."""
    start = max(0, position - width // 2)
    piece = text[start : start + width].replace("\n", " ").replace("\t", " ")
    return f"  {piece}\n  {' ' * (position - start)}^"


class DomainError(AttncError):
    """A function is not defined on all of the box: a pole, a logarithm or root of negatives, a jump."""


class InputError(AttncError):
    """An argument does not fit: a box, an accuracy, points of the wrong width, NaN among them."""


class ProgramError(AttncError):
    """A program breaks the rules of `attnc.ir.spec`."""


class FileError(AttncError):
    """A saved network cannot be read, or cannot be written where it was asked to be."""


class BoundNotMet(AttncError):
    """The bound could not be brought to eps.

    `bound` is the best bound reached, `worst_box` the sub-box on which it is largest (name → (lo, hi)), and
    `network` the network that has that bound; it is built when first asked for, since it may be large. `reach` is an
    eps that may be met, where one is known.
    """

    def __init__(
        self,
        message: str,
        *,
        eps: float,
        bound: float | None,
        worst_box: dict[str, tuple[float, float]] | None = None,
        build: Callable[[], Any] | None = None,
        reach: float | None = None,
    ) -> None:
        super().__init__(message)
        self.eps, self.bound, self.worst_box, self.reach = eps, bound, worst_box, reach
        self._build = build
        self._network: Any = None

    def with_network(self, finish: Callable[[Any], Any]) -> BoundNotMet:
        """The same refusal, whose network is what `finish` makes of what was to be built."""
        build = self._build
        self._build = None if build is None else lambda: finish(build())
        return self

    @property
    def network(self) -> Any:
        if self._network is None and self._build is not None:
            self._network = self._build()
        return self._network


def real_number(name: str, given: Any) -> float:
    """A finite real number of any kind (int, float, numpy), or InputError with the argument's name."""
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    try:
        value = float(given) if is_number else math.nan
    except OverflowError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, found {given!r:.80}")
    return value
