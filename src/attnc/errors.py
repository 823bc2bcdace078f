"""One family of errors. A message states what was asked, what was found, why this is an error, and what to change."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any


class AttncError(Exception):
    """The base of all errors that attnc raises on purpose.

    Examples
    --------
    >>> import attnc
    >>> try:
    ...     attnc.compile("sin(x", {"x": (0, 1)}, eps=0.1)
    ... except attnc.AttncError as error:
    ...     print(type(error).__name__)
    ExpressionError
    """


class ExpressionError(AttncError):
    """The text of an expression cannot be read.

    Attributes
    ----------
    text : str
        The expression.
    position : int or None
        The place of the problem in it: a number of characters from its start.

    Examples
    --------
    >>> import attnc
    >>> try:
    ...     attnc.as_target("2x", {"x": (0, 1)})
    ... except attnc.ExpressionError as error:
    ...     print(error.position)
    1
    """

    def __init__(self, message: str, text: str = "", position: int | None = None) -> None:
        self.text, self.position = text, position
        if position is not None:
            message += "\n" + _caret(text, position)
        super().__init__(message)


def _caret(text: str, position: int, width: int = 60) -> str:
    """Return the part of `text` around `position`, with a caret below it."""
    start = max(0, position - width // 2)
    piece = text[start : start + width].replace("\n", " ").replace("\t", " ")
    return f"  {piece}\n  {' ' * (position - start)}^"


class DomainError(AttncError):
    """A function is undefined or discontinuous somewhere on the box: a pole, a root of a negative number, a jump.

    Examples
    --------
    >>> import attnc
    >>> try:
    ...     attnc.compile("1/x", {"x": (-1, 1)}, eps=0.1)
    ... except attnc.DomainError:
    ...     print("refused")
    refused
    """


class InputError(AttncError):
    """An argument is not valid: a reversed box, a negative eps, points of the wrong width, NaN.

    Examples
    --------
    >>> import attnc
    >>> try:
    ...     attnc.compile("x", {"x": (1, 0)}, eps=0.1)
    ... except attnc.InputError as error:
    ...     print(error)
    box: x ∈ [1.0, 0.0] is reversed; the first number must be below the second
    """


class MissingExtra(InputError):
    """A package of an optional extra cannot be imported. The message states the command that installs it.

    Parameters
    ----------
    what : str
        The feature that needs the package, with its verb: "pictures need".
    package : str
        The package.
    extra : str
        The extra of attnc that installs it.
    found : ImportError, optional
        The error of the import. Its message may state another cause than a missing package.

    Examples
    --------
    >>> import attnc
    >>> print(attnc.MissingExtra("pictures need", "matplotlib", "plots"))
    pictures need matplotlib. Install it with: pip install 'attnc[plots]' (in a checkout: ...)
    """

    def __init__(self, what: str, package: str, extra: str, found: ImportError | None = None) -> None:
        because = "" if found is None else f", which cannot be imported ({found})"
        super().__init__(
            f"{what} {package}{because}. Install it with: pip install 'attnc[{extra}]' (in a checkout: "
            f"pip install -c constraints.txt -e '.[{extra}]')"
        )


class ProgramError(AttncError):
    """A program breaks the rules of `attnc.ir.spec`, such as widths that do not fit.

    Examples
    --------
    >>> import attnc
    >>> issubclass(attnc.ProgramError, attnc.AttncError)
    True
    """


class FileError(AttncError):
    """A file cannot be read or written.

    Examples
    --------
    >>> import attnc
    >>> try:
    ...     attnc.load("no-such-folder")
    ... except attnc.FileError:
    ...     print("refused")
    refused
    """


class BoundNotMet(AttncError):
    """The bound could not be brought to eps.

    Attributes
    ----------
    eps : float
        The error that was asked for.
    bound : float or None
        The best bound reached.
    worst_box : dict or None
        The sub-box on which that bound is largest, name → (lo, hi).
    network : Network or None
        The network that has that bound. It may be large, so it is built on first use.
    reach : float or None
        An eps that is met, or expected to be met, if one is known. The message begins with it.

    Examples
    --------
    >>> import attnc
    >>> try:
    ...     attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3, construction="max_affine", max_anchors=10)
    ... except attnc.BoundNotMet as refusal:
    ...     print(refusal.eps)
    0.001
    """

    def __init__(
        self,
        message: str,
        *,
        eps: float,
        bound: float | None = None,
        worst_box: dict[str, tuple[float, float]] | None = None,
        build: Callable[[], Any] | None = None,
        network: Any = None,
        reach: float | None = None,
    ) -> None:
        super().__init__(message)
        self.eps, self.bound, self.worst_box, self.reach = eps, bound, worst_box, reach
        self._build = build
        self._network = network

    @property
    def is_built(self) -> bool:
        """Whether `network` has been built already."""
        return self._network is not None

    def with_network(self, finish: Callable[[Any], Any]) -> BoundNotMet:
        """Return the same refusal, with `finish` applied to its network when that is built."""
        build = self._build
        self._build = None if build is None else lambda: finish(build())
        return self

    @property
    def network(self) -> Any:
        """The network that has `bound`, or None."""
        if self._network is None and self._build is not None:
            self._network = self._build()
        return self._network


class ParityExceeded(AttncError):
    """An exported file and the reference disagree. It was not written.

    Attributes
    ----------
    parity : Parity
        The difference on the sample, and the one that rounding allows.

    Examples
    --------
    >>> import attnc
    >>> found = attnc.Parity(num_points=200, difference=1e-3, allowed=1e-14, is_within=False)
    >>> attnc.ParityExceeded("net.onnx", found).parity.allowed
    1e-14
    """

    def __init__(self, path: str, parity: Any) -> None:
        super().__init__(
            f"{path} was not written: on {parity.num_points:,} points ONNX Runtime and the reference differ by "
            f"{parity.difference:.3g}; rounding allows {parity.allowed:.3g}. Use another version of onnxruntime, or "
            "net.to_torch()."
        )
        self.parity = parity


def real_number(name: str, given: Any) -> float:
    """Return a finite real number of any kind (int, float, numpy) as a float, or raise InputError with its name."""
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    try:
        value = float(given) if is_number else math.nan
    except OverflowError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, found {given!r:.80}")
    return value


def positive_number(name: str, given: Any) -> float:
    """Return a finite real number > 0 as a float, or raise InputError with its name."""
    value = real_number(name, given)
    if not value > 0:
        raise InputError(f"{name} must be a finite number > 0, found {given!r}")
    return value


def whole_number(name: str, given: Any, least: int, most: float = math.inf) -> int:
    """Return an int from `least` to `most`, or raise InputError with its name."""
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        wanted = f"≥ {least}" if most == math.inf else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {wanted}, found {given!r}")
    return given
