"""A program as a torch module: differentiable in its inputs, in the program's dtype, with bounded memory.

It works on the normal form, so constant keys are projected once. A mask becomes gathering: a query gets only the keys
that it sees. So work grows with the visible keys, and no score is ever −∞.

Points are taken in blocks, and the queries of a head in pieces, of about CELLS_PER_TORCH_BLOCK array cells. With more
than one block, only the inputs are kept for a gradient, and backward computes every block again. Gradients then cost
one more evaluation, but no more memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from attnc.errors import InputError, MissingExtra
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, SoftmaxStage, normal_form
from attnc.ir.program import Program, require_shapes
from attnc.ir.summing import BLOCK
from attnc.numerics.arithmetic import warn_of_fault

try:
    import torch
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint
except ImportError as error:
    raise MissingExtra("to_torch needs", "torch", "torch", error) from error

CELLS_PER_TORCH_BLOCK = 2**22
"""Number of array cells of a block of points or a piece of queries: 32 MiB of float64. A single row of scores may be
longer."""
DENSE_CELLS = 2**16
"""Maximum number of entries of a linear map that is always dense: 512 KiB. A larger map that is mostly zeros is
sparse."""


Limits = tuple[np.ndarray, np.ndarray]
"""The least and the largest value of every variable."""


def to_torch(program: Program, limits: Limits | None = None, *, is_nan_outside: bool = False) -> TorchNetwork:
    """Return the program as a module. Its weights are buffers, named like `stages.0_select.heads.0.keys.constant`.

    Points beyond `limits`, if there are any, are moved to them, or their outputs are NaN.
    """
    return TorchNetwork(program, limits, is_nan_outside=is_nan_outside)


class TorchNetwork(nn.Module):
    """A module that takes the program's inputs, batch first, as real tensors of any dtype.

    They are cast to its own dtype.

    Without limits, inputs are not checked against a box. Outside of it the module still computes, but no bound is
    claimed. A hook on a module `….pattern` sees the scores and attention weights of one block of points at a time.
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
        form = normal_form(program)
        self.input_shapes, self.output_shape = program.input_shapes, program.output_shape
        self.stages = nn.ModuleDict()
        cells = form.output.shape[0] * form.output.shape[1]
        for number, stage in enumerate(form.stages):
            module = _TorchAttention(stage) if isinstance(stage, AttentionStage) else _TorchSoftmax(stage)
            self.stages[f"{number}_{stage.name.replace('.', '_')}"] = module
            cells += module.cells_per_point
        self.output = _TorchForm(form.output)
        self.points_per_block = max(1, CELLS_PER_TORCH_BLOCK // max(1, cells))

    @property
    def dtype(self) -> torch.dtype:
        return self.output.constant.dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            warn_of_fault()
        given = self._variables(inputs)
        u = given.clamp(self.least, self.most) if self.is_limited else given
        is_trained = torch.is_grad_enabled() and any(buffer.requires_grad for buffer in self.buffers())
        if len(u) <= self.points_per_block or is_trained:  # only this way weights get gradients; it takes more memory
            out = self._run(u)
        else:
            out = _Blocks.apply(self._run, self.points_per_block, self.output.shape, u)  # type: ignore[no-untyped-call]
        if self.is_nan_outside:
            is_moved = (given != u).any(dim=1)  # a NaN differs from itself
            out = torch.where(is_moved[:, None, None], torch.nan, out)
        return out.reshape(len(u), *self.output_shape)

    def _variables(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the inputs, flattened and side by side: (batch, variables)."""
        for given in inputs:
            if not isinstance(given, Tensor) or given.is_complex():
                raise InputError(f"the network takes real torch tensors; found {getattr(given, 'dtype', type(given))}")
        require_shapes("network", self.input_shapes, inputs)
        return torch.cat([given.to(self.dtype).flatten(1) for given in inputs], dim=1)

    def _run(self, u: Tensor) -> Tensor:
        for stage in self.stages.values():
            u = stage(u)
        return self.output.batched(u)


class _Blocks(torch.autograd.Function):
    """The function run(u), applied block by block. Only u is kept for backward, which computes every block again.

    There is one node for all blocks, and not a checkpoint for each. The arrays that checkpoints keep are scattered
    among the freed ones, whose memory the C library then cannot use again (a million keys and 1,000 points took 6 GiB).
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], step: int, shape: tuple[int, int], u: Tensor) -> Tensor:
        ctx.run, ctx.step = run, step
        ctx.save_for_backward(u)
        out = u.new_empty(len(u), *shape)
        for start in range(0, len(u), step):
            out[start : start + step] = run(u[start : start + step])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, Tensor]:
        (u,), (grad,) = ctx.saved_tensors, grads
        is_differentiated_again = torch.is_grad_enabled()
        found = torch.zeros_like(u)
        for start in range(0, len(u), ctx.step):
            rows = slice(start, start + ctx.step)
            with torch.enable_grad():
                block = u[rows] if is_differentiated_again else u[rows].detach().requires_grad_()
                out = ctx.run(block)
            if out.requires_grad:
                (found[rows],) = torch.autograd.grad(out, block, grad[rows], create_graph=is_differentiated_again)
        return None, None, None, found


def _sparing_memory(run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return run(*tensors). If a gradient is needed, backward computes the inner arrays again."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        made: Tensor = checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
        return made
    return run(*tensors)


class _TorchForm(nn.Module):
    """An array of affine functions of u: `constant`, and `weight` or, if sparse, its `index` and `entries`."""

    constant: Tensor
    weight: Tensor
    index: Tensor
    entries: Tensor

    def __init__(self, form: FloatForm) -> None:
        super().__init__()
        self.shape, self.is_constant = form.shape, form.is_constant
        self.register_buffer("constant", torch.tensor(form.constant.toarray()))
        num_rows, num_variables = form.linear.shape
        self.is_dense = num_rows * num_variables <= max(DENSE_CELLS, 4 * form.linear.nnz)
        if self.is_constant:
            return
        if self.is_dense:
            self.register_buffer("weight", torch.tensor(form.linear.toarray()))
        else:
            linear = form.linear.copy()
            linear.sum_duplicates()  # sorts, too
            entries = linear.tocoo()
            self.register_buffer("index", torch.tensor(np.stack(entries.coords).astype(np.int64)))
            self.register_buffer("entries", torch.tensor(entries.data))

    def forward(self, u: Tensor) -> Tensor:
        """Return the array (batch, rows, columns), or (rows, columns) if the form is constant."""
        if self.is_constant:
            return self.constant
        if self.is_dense:
            moved = u @ self.weight.mT
        else:
            size = (self.shape[0] * self.shape[1], u.shape[1])
            linear = torch.sparse_coo_tensor(self.index, self.entries, size, is_coalesced=True, check_invariants=False)
            moved = torch.sparse.mm(linear, u.mT).mT
        return moved.reshape(len(u), *self.shape) + self.constant

    def batched(self, u: Tensor) -> Tensor:
        return self(u).expand(len(u), *self.shape)


class _TorchAttention(nn.Module):
    """An attention stage: (batch, variables) → (batch, moved)."""

    written: Tensor
    carried: Tensor

    def __init__(self, stage: AttentionStage) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_TorchHead(head) for head in stage.heads)
        self.residual = None if stage.residual is None else _TorchForm(stage.residual)
        self.register_buffer("written", torch.tensor(stage.written), persistent=False)
        self.register_buffer("carried", torch.tensor(stage.carried), persistent=False)
        width = stage.heads[0].queries.shape[0] * stage.heads[0].W_O.shape[1]
        self.cells_per_point = sum(head.cells_per_point + width for head in self.heads) + 3 * width

    def forward(self, u: Tensor) -> Tensor:
        parts = [*self.heads, *([] if self.residual is None else [self.residual])]
        total: Tensor = reduce(add, (part(u) for part in parts))
        return torch.cat([total.flatten(1)[:, self.written], u[:, self.carried]], dim=1)


class _TorchSoftmax(nn.Module):
    """A softmax stage, with the same call."""

    carried: Tensor

    def __init__(self, stage: SoftmaxStage) -> None:
        super().__init__()
        self.logits, self.pattern = _TorchForm(stage.logits), nn.Softmax(dim=-1)
        self.register_buffer("carried", torch.tensor(stage.carried), persistent=False)
        self.cells_per_point = 3 * stage.logits.shape[0] * stage.logits.shape[1]

    def forward(self, u: Tensor) -> Tensor:
        weights = self.pattern(self.logits.batched(u))
        return torch.cat([weights.flatten(1), u[:, self.carried]], dim=1)


class _TorchHead(nn.Module):
    """softmax(queries·keysᵀ)·values·W_O: (batch, variables) → (batch, queries, width_out)."""

    W_O: Tensor
    shared: Tensor
    order: Tensor | None

    def __init__(self, head: FoldedHead) -> None:
        super().__init__()
        plan = _QueryPieces(head, CELLS_PER_TORCH_BLOCK)
        self.queries, self.keys, self.values = _TorchForm(head.queries), _TorchForm(plan.keys), _TorchForm(plan.values)
        self.pieces = nn.ModuleList(_Piece(queries, own) for queries, own in plan.pieces)
        self.register_buffer("W_O", torch.tensor(head.W_O))
        self.register_buffer("shared", torch.tensor(plan.shared), persistent=False)
        order = np.argsort(np.concatenate([queries.ravel() for queries, _ in plan.pieces]))
        is_in_order = bool((order == np.arange(len(order))).all())
        self.register_buffer("order", None if is_in_order else torch.tensor(order), persistent=False)
        self.cells_per_point = plan.cells_per_point

    def forward(self, u: Tensor) -> Tensor:
        arrays = self.queries.batched(u), self.keys(u), self.values(u), self.shared
        if len(self.pieces) == 1:
            mixed: Tensor = self.pieces[0](*arrays)
        else:
            mixed = torch.cat([_sparing_memory(piece, *arrays) for piece in self.pieces], dim=1)
        return (mixed if self.order is None else mixed[:, self.order]) @ self.W_O


class _QueryPieces:
    """The queries of a head in pieces, each with the keys that it sees.

    A piece has about `most` scores, none hidden.
    """

    def __init__(self, head: FoldedHead, most: int) -> None:
        self._most = most
        self.keys, self.values, self.shared = head.keys, head.values, np.zeros(0, np.int64)
        groups: list[tuple[np.ndarray, np.ndarray]] = []
        if head.mask is not None:
            self.shared = head.mask.shared
            alike = defaultdict(list)  # groups with equally many queries and keys are stacked
            for queries, own in head.mask.groups():
                alike[len(queries), len(own)].append((queries, own))
            groups = [(np.stack([q for q, _ in group]), np.stack([k for _, k in group])) for group in alike.values()]
            if len(groups) == 1 and len(groups[0][0]) == 1:  # all queries see the same keys: keep those alone
                visible = np.sort(np.concatenate([self.shared, groups[0][1][0]]))
                self.keys, self.values, groups = self.keys.rows(visible), self.values.rows(visible), []
        self.pieces: list[tuple[np.ndarray, np.ndarray | None]] = []
        d_k, d_v = self.keys.shape[1], self.values.shape[1]
        self.cells_per_point = head.queries.shape[0] * (2 * d_k + d_v)
        for queries, own in groups:
            num_keys = len(self.shared) + own.shape[1]
            self.cells_per_point += len(own) * num_keys * (2 * queries.shape[1] + d_k + d_v)
            step = max(1, self._most // (num_keys * queries.shape[1]))
            for start in range(0, len(own), step):
                self._add(queries[start : start + step], own[start : start + step], num_keys)
        if not groups:
            num_keys = self.keys.shape[0]
            self.cells_per_point += 2 * head.queries.shape[0] * num_keys
            self.cells_per_point += 0 if self.keys.is_constant else num_keys * d_k
            self.cells_per_point += 0 if self.values.is_constant else num_keys * d_v
            self._add(np.arange(head.queries.shape[0]), None, num_keys)

    def _add(self, queries: np.ndarray, own: np.ndarray | None, num_keys: int) -> None:
        step = max(1, self._most // num_keys)
        for start in range(0, queries.shape[-1], step):
            self.pieces.append((queries[..., start : start + step], own))


class _Piece(nn.Module):
    """Some queries: one row that sees every key, or rows (s, q) of which row s sees the keys own[s] and `shared`."""

    chosen: Tensor
    own: Tensor | None

    def __init__(self, chosen: np.ndarray, own: np.ndarray | None) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.tensor(chosen), persistent=False)
        self.register_buffer("own", None if own is None else torch.tensor(own), persistent=False)
        self.pattern = nn.Softmax(dim=-1)  # a module, so that a hook sees scores and weights

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, shared: Tensor) -> Tensor:
        if self.own is not None:
            seen = torch.cat([shared.expand(len(self.own), -1), self.own], dim=1)
            keys, values = keys[..., seen, :], values[..., seen, :]
        weights = self.pattern(queries[:, self.chosen] @ keys.mT)
        return _mix(weights, values).flatten(1, -2)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights @ values.

    In float32 both the products and the weights are summed in blocks (`ir.summing`), and the sums are divided. The
    reason is that a softmax sums its weights in an unknown order.
    """
    n = weights.shape[-1]
    if weights.dtype != torch.float32 or n <= BLOCK:
        return weights @ values
    if values.shape[-1] == 1:
        mixed = _sum(weights * values.mT)[..., None]
    else:
        of_keys = [nn.functional.pad(part, (0, -n % BLOCK)) for part in (weights, values.mT)]
        blocks = [part.reshape(*part.shape[:-1], part.shape[-1] // BLOCK, BLOCK) for part in of_keys]
        mixed = _sum(torch.einsum("...qmb,...vmb->...qvm", *blocks))
    return mixed / _sum(weights)[..., None]


def _sum(terms: Tensor) -> Tensor:
    """Return the sum over the last axis. A block takes one term from each of 8 runs, so that long rows are added."""
    while (n := terms.shape[-1]) > BLOCK:
        step = n // BLOCK
        sums = terms[..., : step * BLOCK].reshape(*terms.shape[:-1], BLOCK, step).sum(dim=-2)
        rest = terms[..., step * BLOCK :].sum(dim=-1, keepdim=True)
        terms = torch.cat([sums, rest], dim=-1) if n % BLOCK else sums
    return terms.sum(dim=-1)
