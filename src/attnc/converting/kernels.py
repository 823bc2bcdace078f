"""Compiled activations on the CPU: flat memory of torch tensors, on torch's own threads.

The loops (`kernels_numba`) are C functions. `GOMP_parallel` of the OpenMP library that torch has loaded runs them, so
that they share torch's threads: no second pool starts, and none waits beside it.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from attnc.converting.compiled_loops import loop
from attnc.converting.evaluation import Evaluation

ELEMENTS_PER_THREAD = 2**14
"""The least number of elements for one more thread. Waking one takes about 5 µs, and 2¹⁴ elements take as long or
longer."""


@functools.cache
def is_available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


class Loop:
    """One compiled loop with its numbers."""

    def __init__(self, name: str, dtype: str, numbers: np.ndarray, num_keys: int) -> None:
        self.run, self.address = loop(name, dtype)
        self.make_in_place = functools.cache(lambda: Loop("lines_in_place", dtype, numbers, num_keys))
        self.is_lines = name == "lines"
        self.numbers, self.num_keys = numbers, num_keys

    def __call__(self, x: int, y: int, grad: int, count: int) -> None:
        """Compute `count` elements. x, y and grad are addresses; x and y may be the same."""
        if x == y and self.is_lines:
            self.make_in_place()(x, y, grad, count)
            return
        threads = min(torch.get_num_threads(), 1 + count // ELEMENTS_PER_THREAD)
        team = None if threads < 2 else _openmp()
        given = (ctypes.c_int64 * 9)(
            *(x, y, grad, count, self.numbers.ctypes.data, len(self.numbers), self.num_keys),
            *((1, 0) if team is None else (threads, team[1])),
        )
        if team is None:
            self.run(ctypes.addressof(given))
        else:
            team[0](self.address, ctypes.addressof(given), threads, 0)


class ActivationLoops:
    """The compiled loops of an activation in one dtype."""

    def __init__(self, evaluation: Evaluation, dtype: str) -> None:
        self.forward = Loop(evaluation.kind, dtype, evaluation.numbers, evaluation.num_keys)
        self.saves_output = evaluation.saved is not None
        name, numbers = f"{evaluation.kind}_slope", evaluation.numbers
        if evaluation.saved is not None:
            name, numbers = "saved_slope", evaluation.saved
        self.make_backward = functools.cache(lambda: Loop(name, dtype, numbers, evaluation.num_keys))

    def backward(self, x: int, y: int, grad: int, count: int) -> None:
        self.make_backward()(x, y, grad, count)


@functools.cache
def _openmp() -> tuple[ctypes._NamedFuncPointer, int] | None:
    """Return GOMP_parallel of torch's OpenMP library, and the address of its omp_get_thread_num. None if not found."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return None
    paths = dict.fromkeys(line.split()[-1] for line in lines if "omp" in line.rpartition("/")[2])
    own = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda path: not path.startswith(own)):
        try:
            library = ctypes.CDLL(path)
            run, number = library.GOMP_parallel, library.omp_get_thread_num
        except (OSError, AttributeError):
            continue
        run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        address = ctypes.cast(number, ctypes.c_void_p).value
        return (run, address) if address is not None else None
    return None
