"""One thread of linear algebra, so that the same call gives the same bytes on every machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Let numpy and scipy use one thread of linear algebra within the block, or within a decorated function.

    The order of the sums in products and decompositions depends on the number of threads, and so do their last digits.
    The matrices are small here: waking threads would cost more than they save.
    """
    with _libraries().limit(limits=1):
        yield


@functools.cache
def _libraries() -> ThreadpoolController:
    """Find the libraries of linear algebra, which takes 3 ms. They do not change once numpy and scipy have theirs."""
    import scipy.linalg  # noqa: F401  # only libraries that are loaded are found: this loads the one of scipy
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
