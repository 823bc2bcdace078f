"""Floating-point warnings of numpy, switched off once.

To enter `numpy.errstate` takes longer than an operation on a small array, and proofs would enter it a million times. So
code that may overflow, underflow or divide by 0 asks for silence here, which costs nothing within a block that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)
is_quiet = _is_quiet.get
"""Return whether this code runs within `quiet`. A thread of its own starts outside of it, as it does for numpy."""


class _Silence:
    """The outermost block without warnings."""

    def __enter__(self) -> None:
        self._ignoring = np.errstate(all="ignore")
        self._ignoring.__enter__()
        self._token: Token[bool] = _is_quiet.set(True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _is_quiet.reset(self._token)
        self._ignoring.__exit__(kind, error, at)


_NOTHING = nullcontext()


def quiet() -> AbstractContextManager[None]:
    """Return a block within which numpy warns of no overflow, underflow, division by 0 or invalid operation."""
    return _NOTHING if is_quiet() else _Silence()


def quietly(work: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that runs within `quiet`."""

    @wraps(work)
    def run(*args: P.args, **options: P.kwargs) -> R:
        if is_quiet():
            return work(*args, **options)
        with quiet():
            return work(*args, **options)

    return run
