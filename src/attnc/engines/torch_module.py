"""The parts that both torch modules of a program share: their inputs, the box, and sums over keys."""

from __future__ import annotations

import abc
from collections.abc import Callable

import numpy as np

from attnc.errors import InputError, MissingExtra
from attnc.ir.program import Program, require_shapes
from attnc.ir.summing import BLOCK
from attnc.numerics.arithmetic import warn_of_fault

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("to_torch needs", "torch", "torch", error) from error

Limits = tuple[np.ndarray, np.ndarray]
"""The least and the largest value of every variable."""


class ProgramModule(nn.Module, abc.ABC):
    """A module that takes the program's inputs, batch first, as real tensors of any dtype.

    They are cast to its own dtype. Points beyond the limits, if there are any, are moved to them, or their outputs are
    NaN. Without limits, inputs are not checked against a box. Outside of it the module still computes, but no bound is
    claimed.
    """

    least: Tensor
    most: Tensor

    def __init__(self, program: Program, limits: Limits | None = None, *, is_nan_outside: bool = False) -> None:
        super().__init__()
        self.is_limited, self.is_nan_outside = limits is not None, is_nan_outside
        if limits is not None:
            dtype = program.dtype
            self.register_buffer("least", torch.tensor(limits[0].astype(dtype)), persistent=False)
            self.register_buffer("most", torch.tensor(limits[1].astype(dtype)), persistent=False)
        self.input_shapes, self.output_shape = program.input_shapes, program.output_shape

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abc.abstractmethod
    def _outputs(self, variables: Tensor) -> Tensor:
        """Return the outputs (batch, outputs) for the variables (batch, variables)."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.within_limits(inputs, self._outputs)

    def within_limits(self, inputs: tuple[Tensor, ...], run: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs by `run`, which takes the variables (batch, variables), moved to the limits."""
        if not torch.compiler.is_compiling():
            warn_of_fault()
        given = self._variables(inputs)
        u = given.clamp(self.least, self.most) if self.is_limited else given
        out = run(u)
        if self.is_nan_outside:
            is_moved = (given != u).any(dim=1, keepdim=True)  # a NaN differs from itself
            out = torch.where(is_moved, torch.nan, out)
        return out.reshape(u.shape[0], *self.output_shape)

    def _variables(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the inputs, flattened and side by side: (batch, variables)."""
        for given in inputs:
            if not isinstance(given, Tensor) or given.is_complex():
                raise InputError(f"the network takes real torch tensors; found {getattr(given, 'dtype', type(given))}")
        require_shapes("network", self.input_shapes, inputs)
        columns = [given.to(self.dtype).flatten(1) for given in inputs]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def key_mix(values: Tensor, weights: Tensor) -> Tensor:
    """Return values @ weights, the sums over keys: (…, d_v, keys) and (…, keys, n) → (…, d_v, n).

    In float32 they are summed in blocks (`ir.summing`).
    """
    n = weights.shape[-2]
    if weights.dtype != torch.float32 or n <= BLOCK:
        return values @ weights
    whole = n - n % BLOCK
    by_blocks = values[..., :whole].reshape(*values.shape[:-1], whole // BLOCK, BLOCK).movedim(-2, 0)
    of_blocks = weights[..., :whole, :].reshape(*weights.shape[:-2], whole // BLOCK, BLOCK, weights.shape[-1])
    of_blocks = of_blocks.movedim(-3, 0)
    alike = (1,) * (of_blocks.ndim - by_blocks.ndim)
    sums = by_blocks.reshape(whole // BLOCK, *alike, *by_blocks.shape[1:]) @ of_blocks
    if whole < n:
        sums = torch.cat([sums, (values[..., whole:] @ weights[..., whole:, :])[None]])
    return key_sum(sums)


def key_sum(terms: Tensor) -> Tensor:
    """Return the sum over the first axis. A block takes one term from each of 8 runs, so that long rows are added."""
    while (n := len(terms)) > BLOCK:
        step = n // BLOCK
        sums = terms[: step * BLOCK].reshape(BLOCK, step, *terms.shape[1:]).sum(dim=0)
        terms = torch.cat([sums, terms[step * BLOCK :].sum(dim=0, keepdim=True)]) if n % BLOCK else sums
    return terms.sum(dim=0)
