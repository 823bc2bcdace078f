"""One thread of linear algebra, so that the same call gives the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Let numpy and scipy use one thread of linear algebra within the block, or within a decorated function.

    The order of the sums in products and decompositions depends on the number of threads, and so do their last digits.
    The matrices are small here: waking threads would cost more than they save.
    """
    import scipy.linalg  # noqa: F401  # a limit holds for the libraries that are loaded: this loads the one of scipy
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield
