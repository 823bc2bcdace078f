"""A program as a torch module: differentiable in its inputs, in the program's dtype, with bounded memory.

It works on the normal form, so constant keys are projected once. The variables of all points are a matrix with one
column per point. So every affine form is one matrix product, and none is made per point. A head with few constant keys
has a row of scores for each key, and its softmax runs over these rows. With more keys, or keys that move, each point
has a row of its own. A mask becomes gathering: a query gets only the keys that it sees. So work grows with the visible
keys, and no score is ever −∞.

Without a gradient, a program with few keys runs in the compiled loops of `fused_numba`, on the memory of the tensors,
if numba is installed. Else points are taken in blocks that stay in the cache. With a gradient, blocks of points and
pieces of the queries of a head have about CELLS_PER_TORCH_BLOCK array cells. With more than one such block, only the
inputs are kept, and backward computes every block again. Gradients then cost one more evaluation, but no more memory. A
compiled or exported module takes all points at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from attnc.engines.fused import Fused
from attnc.engines.numpy_engine import LEAST_COMPILED, has_numba, in_parts
from attnc.engines.query_pieces import QueryPieces
from attnc.engines.torch_module import Limits, ProgramModule, key_mix
from attnc.engines.torch_rows import FEWEST_POINTS, Average, FewKeys, Prepared, Row, is_plain, row_of
from attnc.errors import MissingExtra
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage, normal_form, pruned
from attnc.ir.program import Program
from attnc.ir.summing import BLOCK, MOST_KEYS

try:
    import torch
    from torch import Tensor, nn
    from torch.autograd import forward_ad
    from torch.utils.checkpoint import checkpoint
except ImportError as error:
    raise MissingExtra("to_torch needs", "torch", "torch", error) from error

AUTO = "auto"
"""The size of blocks that is chosen by the constants below."""
CELLS_PER_TORCH_BLOCK = 2**22
"""Number of array cells of a block of points or a piece of queries: 32 MiB of float64. A single row of scores may be
longer."""
SCORES_PER_TORCH_BLOCK = 2**20
"""Number of scores of the largest head for a block of points without a gradient: 8 MiB of float64. Measured with heads
of 2 to 17 keys: an eighth of it takes 1.7 times as long, because each operation has a fixed cost, and twice as many
take as long."""
KEPT_BYTES = 2**25 - 2**16
"""The size of an array that is freed before an evaluation without a gradient. glibc keeps the memory of arrays of up to
2^25 bytes for later ones, and a little more belongs to each."""
DENSE_CELLS = 2**16
"""Maximum number of entries of a linear map that is always dense: 512 KiB. A larger map that is mostly zeros is
sparse."""
MOST_COMPARED = 2**15
"""The largest number of stored numbers that are compared before compiled loops run: in about 10 µs."""


def to_torch(
    program: Program,
    limits: Limits | None = None,
    *,
    is_nan_outside: bool = False,
    block: int | str | None = AUTO,
    trainable: bool = False,
) -> TorchNetwork:
    """Return the folded program as a module. Weights have names like `stages.0_select.heads.0.keys.constant`.

    Points beyond `limits`, if there are any, are moved to them, or their outputs are NaN. Points are taken in blocks of
    `block` points, or all at once if it is None. Weights are buffers, or parameters if they are `trainable`.
    """
    module = TorchNetwork(program, limits, is_nan_outside=is_nan_outside, block=block).eval()
    if trainable:
        for part in module.modules():
            for name in [name for name in part._buffers if name not in part._non_persistent_buffers_set]:
                weight = part._buffers.pop(name)
                if weight is not None and weight.is_floating_point() and weight.numel():
                    part.register_parameter(name, nn.Parameter(weight))
                else:
                    part._buffers[name] = weight
    return module


class TorchNetwork(ProgramModule):
    """The folded form of a program.

    A hook on a module `….pattern` sees the scores and attention weights of one block of points at a time, unless
    `block` is None.
    """

    def __init__(
        self,
        program: Program,
        limits: Limits | None = None,
        *,
        is_nan_outside: bool = False,
        block: int | str | None = AUTO,
    ) -> None:
        super().__init__(program, limits, is_nan_outside=is_nan_outside)
        form = pruned(normal_form(program))
        self.stages = nn.ModuleDict()
        most_cells = sys.maxsize if block is None else CELLS_PER_TORCH_BLOCK
        cells, most, largest = form.output.shape[0] * form.output.shape[1], 1, 1
        for number, stage in enumerate(form.stages):
            module = _TorchAttention(stage, most_cells) if isinstance(stage, AttentionStage) else _TorchSoftmax(stage)
            self.stages[f"{number}_{stage.name.replace('.', '_')}"] = module
            cells, most = cells + module.cells_per_point, max(most, module.cells_per_point)
            largest = max(largest, module.scores_per_point)
        self.readout, self._row = _TorchForm(form.output), Prepared()  # nnsight has an `output` of its own
        self.points_per_block = max(1, CELLS_PER_TORCH_BLOCK // max(1, cells))
        self.points_evaluated = max(1, min(CELLS_PER_TORCH_BLOCK // most, SCORES_PER_TORCH_BLOCK // largest))
        if block != AUTO:
            self.points_per_block = self.points_evaluated = sys.maxsize if block is None else int(block)
        self._loops = _CompiledLoops.of(form, program.dtype, _stored(_parts(self)))

    @property
    def dtype(self) -> torch.dtype:
        return self.readout.constant.dtype

    def _outputs(self, variables: Tensor) -> Tensor:
        compiled = self._compiled(variables)
        return self._in_blocks(variables.mT).mT if compiled is None else compiled

    def _compiled(self, u: Tensor) -> Tensor | None:
        """Return the outputs by compiled loops: (batch, outputs). None: a gradient, a tracer or a hook needs more."""
        if self._loops is None or torch.compiler.is_compiling() or u.shape[0] < FEWEST_POINTS or not u.shape[1]:
            return None
        if torch.is_autocast_enabled("cpu") or is_observed() or not is_plain(u.mT):
            return None
        parts = _parts(self)
        return None if any(map(_is_watched, parts)) else self._loops(u, _stored(parts))

    def _in_blocks(self, u: Tensor) -> Tensor:
        """Return the outputs (outputs, batch) for the variables (variables, batch)."""
        if torch.compiler.is_compiling():
            return self._run(u)
        if not torch.is_grad_enabled():
            if u.shape[1] >= FEWEST_POINTS:
                # Once an array of this size was freed, glibc keeps the memory of arrays for the next ones. Else every
                # page that is written is a fault, which took up to twice as long.
                u.new_empty(KEPT_BYTES // u.element_size())
            return _by_blocks(self._run, self.points_evaluated, u)
        is_trained = any(tensor.requires_grad for tensor in (*self.parameters(), *self.buffers()))
        if u.shape[1] <= self.points_per_block or is_trained:  # only this way weights get gradients, with more memory
            return self._run(u)
        return _Blocks.apply(self._run, self.points_per_block, u)  # type: ignore[no-untyped-call]

    def _run(self, u: Tensor) -> Tensor:
        for stage in self.stages.values():
            u = stage(u)
        output = self.readout
        is_few = output.shape == (1, 1) and output.is_dense
        if is_few and is_plain(u, *output.stored) and not _is_watched(output):
            row = self._row.get(
                output.stored, lambda: row_of(output.coefficients(u.shape[0])[0], float(output.constant))
            )
            return row(list(u), u.dtype)[None]
        return output.batched(u).flatten(0, 1)


class _CompiledLoops:
    """Runs the instructions of a program on the memory of tensors, as long as the stored numbers are those it has."""

    def __init__(self, loops: Fused, stored: list[Tensor]) -> None:
        self._loops, self._kept = loops, _joined(stored)
        most = np.full(loops.num_inputs, np.inf, loops.dtype)
        self._limits = -most, most

    @classmethod
    def of(cls, form: NormalForm, dtype: np.dtype[Any], stored: list[Tensor]) -> _CompiledLoops | None:
        """Return None without numba, or if there are too many keys or numbers."""
        if not has_numba() or sum(each.numel() for each in stored) > MOST_COMPARED:
            return None
        loops = Fused.of(form, dtype)
        return None if loops is None else cls(loops, stored)

    def __call__(self, u: Tensor, stored: list[Tensor]) -> Tensor | None:
        """Return the outputs, or None if a stored number has changed, or is not a plain number of a CPU."""
        for each in stored:
            if (
                type(each) is not Tensor
                or each.device.type != "cpu"
                or (each.requires_grad and torch.is_grad_enabled())
            ):
                return None
        kept, now = self._kept, _joined(stored)
        if [each.dtype for each in now] != [each.dtype for each in kept] or not all(map(torch.equal, kept, now)):
            return None
        run = self._loops.run(u.shape[0], True)
        assert run is not None
        out = u.new_empty(u.shape[0], self._loops.num_outputs)
        points, found = u.detach().numpy(), out.numpy()
        work, threads = self._loops.work_per_point, torch.get_num_threads()
        in_parts(run, points, found, self._limits, 1, work, least=LEAST_COMPILED, threads=threads)
        return out

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_loops": self._loops.without_caches()}  # compiled functions cannot be pickled


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return a module and those in it. `nn.Module.modules` takes ten times as long."""
    found = [module]
    for part in found:
        found += [each for each in part._modules.values() if each is not None]
    return found


def _stored(parts: list[nn.Module]) -> list[Tensor]:
    """Return all stored tensors."""
    both = [stored for part in parts for stored in (part._buffers, part._parameters) if stored]
    return [each for stored in both for each in stored.values() if each is not None]


def _joined(stored: list[Tensor]) -> list[Tensor]:
    """Return all floating-point numbers in one tensor, and all indices in another."""
    parts = (
        [each.ravel() for each in stored if each.is_floating_point()],
        [each.ravel() for each in stored if not each.is_floating_point()],
    )
    return [torch.cat(part) for part in parts if part]


def is_observed() -> bool:
    """Return whether a tracer, a mode, a transform of torch.func or a forward derivative watches operations."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return (
        bool(modes or torch._C._get_tracing_state())
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _by_blocks(run: Callable[[Tensor], Tensor], step: int, u: Tensor) -> Tensor:
    """Return run(u), computed for `step` points at a time.

    Outputs of blocks are not kept. Each would lie between the large arrays of two blocks, and memory would grow.
    """
    if u.shape[1] <= step:
        return run(u)
    out: Tensor | None = None
    for start in range(0, u.shape[1], step):
        points = slice(start, start + step)
        found = run(u[:, points])
        out = u.new_empty(found.shape[0], u.shape[1]) if out is None else out
        out[:, points] = found
        del found
    assert out is not None
    return out


class _Blocks(torch.autograd.Function):
    """The function run(u), applied block by block. Only u is kept for backward, which computes every block again.

    There is one node for all blocks, and not a checkpoint for each. The arrays that checkpoints keep are scattered
    among the freed ones, whose memory the C library then cannot use again (a million keys and 1,000 points took 6 GiB).
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], step: int, u: Tensor) -> Tensor:
        ctx.run, ctx.step = run, step
        ctx.save_for_backward(u)
        return _by_blocks(run, step, u)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        (u,), (grad,) = ctx.saved_tensors, grads
        is_differentiated_again = torch.is_grad_enabled()
        found = torch.zeros_like(u)
        for start in range(0, u.shape[1], ctx.step):
            points = slice(start, start + ctx.step)
            with torch.enable_grad():
                block = u[:, points] if is_differentiated_again else u[:, points].detach().requires_grad_()
                out = ctx.run(block)
            if out.requires_grad:
                (found[:, points],) = torch.autograd.grad(
                    out, block, grad[:, points], create_graph=is_differentiated_again
                )
        return None, None, found


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
        """Return the array (rows, columns, batch), or (rows, columns, 1) if the form is constant."""
        if self.is_constant:
            return self.constant[:, :, None]
        constant = self.constant.reshape(-1, 1)
        if self.is_dense:
            # An exported sum of a product is MatMul and Add, and not Gemm, which fewer runtimes have in float64.
            is_exported = torch.onnx.is_in_onnx_export()
            moved = self.weight @ u + constant if is_exported else torch.addmm(constant, self.weight, u)
        else:
            size = (self.shape[0] * self.shape[1], u.shape[0])
            linear = torch.sparse_coo_tensor(self.index, self.entries, size, is_coalesced=True, check_invariants=False)
            moved = torch.sparse.mm(linear, u) + constant
        return moved.reshape(*self.shape, u.shape[1])

    def batched(self, u: Tensor) -> Tensor:
        return self(u).expand(*self.shape, u.shape[1])

    @property
    def stored(self) -> list[Tensor]:
        return [self.constant] if self.is_constant else [self.constant, self.weight]

    def coefficients(self, num_variables: int) -> list[list[float]]:
        """Return those of a dense form, a list for each entry."""
        found: list[list[float]] = (
            [[0.0] * num_variables] * self.constant.numel() if self.is_constant else self.weight.tolist()
        )
        return found


class _TorchAttention(nn.Module):
    """An attention stage: (variables, batch) → (moved, batch)."""

    written: Tensor | None
    carried: Tensor

    def __init__(self, stage: AttentionStage, most_cells: int) -> None:
        super().__init__()
        width = stage.heads[0].W_O.shape[1]
        columns, places = np.unique(stage.written % width, return_inverse=True)  # the channels that are read later
        heads = [_TorchHead(head, columns, most_cells) for head in stage.heads]
        self.heads = nn.ModuleList(heads)
        self.num_queries, self.num_columns = stage.heads[0].queries.shape[0], len(columns)
        residual = stage.queried.columns(columns) if stage.is_residual else None
        has_residual = residual is not None and residual.linear.nnz + residual.constant.nnz > 0
        self.residual = _TorchForm(residual) if residual is not None and has_residual else None
        written = stage.written // width * len(columns) + places
        is_all = len(written) == self.num_queries * len(columns)
        self.register_buffer("written", None if is_all else torch.tensor(written), persistent=False)
        self.register_buffer("carried", torch.tensor(stage.carried), persistent=False)
        cells = self.num_queries * len(columns)
        self.cells_per_point: int = sum(head.cells_per_point + cells for head in heads) + 3 * cells
        self.scores_per_point: int = max(head.scores_per_point for head in heads)
        self._rows = Prepared()

    def forward(self, u: Tensor) -> Tensor:
        averages = [head(u) for head in self.heads]
        if self._has_rows(u, averages):
            return self._by_rows(u, averages)
        outs = [head.W_O.mT @ average for head, average in zip(self.heads, averages, strict=True)]
        total = sum(outs[1:], outs[0]).reshape(self.num_columns, self.num_queries, u.shape[1]).transpose(0, 1)
        if self.residual is not None:
            total = total + self.residual(u)
        moved = total.flatten(0, 1) if self.written is None else total.flatten(0, 1)[self.written]
        return torch.cat([moved, u[self.carried]]) if len(self.carried) else moved

    def _has_rows(self, u: Tensor, averages: list[Tensor]) -> bool:
        """Return whether each entry is computed as a sum of rows: then those that are zero cost nothing."""
        residual = self.residual
        is_few = self.num_queries == 1 and (residual is None or residual.is_dense)
        return is_few and is_plain(u, *averages, *self._stored())

    def _stored(self) -> list[Tensor]:
        own = [_tensor(head.W_O) for head in self.heads]
        return [*own, *([] if self.residual is None else self.residual.stored)]

    def _by_rows(self, u: Tensor, averages: list[Tensor]) -> Tensor:
        rows = [row for each in (*averages, u) for row in each]
        prepared: list[Row] = self._rows.get(self._stored(), lambda: self._made(u.shape[0]))
        made = [row(rows, u.dtype) for row in prepared]
        return torch.stack(made) if len(made) > 1 else made[0][None]

    def _made(self, num_variables: int) -> list[Row]:
        """Return the entries of the next u as affine functions of all averages and the u before."""
        coefficients = np.concatenate([_tensor(head.W_O).detach().double().numpy() for head in self.heads]).T.tolist()
        moved, constants = [[0.0] * num_variables] * self.num_columns, [0.0] * self.num_columns
        if self.residual is not None:
            moved, constants = self.residual.coefficients(num_variables), self.residual.constant.ravel().tolist()
        entries = range(self.num_columns) if self.written is None else self.written.tolist()
        found = [row_of([*coefficients[i], *moved[i]], constants[i]) for i in entries]
        num_averages = len(coefficients[0])
        return found + [Row(((num_averages + i, 1.0),), 1.0, 0.0) for i in self.carried.tolist()]


class _TorchSoftmax(nn.Module):
    """A softmax stage, with the same call."""

    carried: Tensor

    def __init__(self, stage: SoftmaxStage) -> None:
        super().__init__()
        self.logits, self.pattern = _TorchForm(stage.logits), _KeysFirst()
        self.register_buffer("carried", torch.tensor(stage.carried), persistent=False)
        self.scores_per_point = stage.logits.shape[0] * stage.logits.shape[1]
        self.cells_per_point = 3 * self.scores_per_point

    def forward(self, u: Tensor) -> Tensor:
        weights = self.pattern(self.logits.batched(u).movedim(-1, 0)).movedim(0, -1)
        return torch.cat([weights.flatten(0, 1), u[self.carried]])


class _KeysFirst(nn.Module):
    """A softmax over the last axis, whose arrays have a row in memory for each key."""

    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores.movedim(-1, 0), dim=0).movedim(0, -1)


class _TorchHead(nn.Module):
    """softmax(queries·keysᵀ)·values: (variables, batch) → (d_v, queries·batch).

    W_O is left to the stage. It has only the `columns` that are read later.
    """

    W_O: Tensor
    shared: Tensor
    order: Tensor | None

    def __init__(self, head: FoldedHead, columns: np.ndarray, most_cells: int) -> None:
        super().__init__()
        plan = QueryPieces(head, most_cells)
        self.queries, self.keys, self.has_few_keys = (
            _TorchForm(head.queries),
            _TorchForm(plan.keys),
            _has_few_keys(plan),
        )
        self.values = (
            _CarriedValues(plan.values, head.queries.shape[0]) if self.has_few_keys else _TorchForm(plan.values)
        )
        pieces = [_FewKeys()] if self.has_few_keys else [_Piece(queries, own) for queries, own in plan.pieces]
        self.pieces = nn.ModuleList(pieces)
        self.register_buffer("W_O", torch.tensor(head.W_O[:, columns]))
        self.register_buffer("shared", torch.tensor(plan.shared), persistent=False)
        order = np.argsort(np.concatenate([queries.ravel() for queries, _ in plan.pieces]))
        is_in_order = bool((order == np.arange(len(order))).all())
        self.register_buffer("order", None if is_in_order else torch.tensor(order), persistent=False)
        self.cells_per_point, self.scores_per_point = plan.cells_per_point, plan.scores_per_point
        self._average = Prepared()

    def forward(self, u: Tensor) -> Tensor:
        if self.has_few_keys:
            quick = self._quick(u)
            if quick is not None:
                return quick
            weights: Tensor = self.pieces[0](self.queries.batched(u), self.keys.constant)
            averages: Tensor = self.values(weights, u)
            return averages
        queries, keys, values = (form(u).movedim(-1, 0) for form in (self.queries, self.keys, self.values))
        arrays = queries.expand(u.shape[1], -1, -1), keys, values, self.shared
        if len(self.pieces) == 1:
            mixed: Tensor = self.pieces[0](*arrays)
        else:
            mixed = torch.cat([_sparing_memory(piece, *arrays) for piece in self.pieces], dim=1)
        mixed = mixed if self.order is None else mixed[:, self.order]
        return mixed.permute(2, 1, 0).flatten(1)

    def _quick(self, u: Tensor) -> Tensor | None:
        """Return the averages by `torch_rows`, or None if a gradient or a hook needs the weights of all keys."""
        if self.queries.shape[0] != 1 or not self.queries.is_dense:
            return None
        own = [_tensor(each) for each in (self.values.constant, self.values.carried)]
        stored = [*self.queries.stored, self.keys.constant, *own]
        if not is_plain(u, *stored) or any(_is_watched(part) for part in self.modules() if part is not self):
            return None
        average = self._average.get(stored, self._made)
        return None if average is None else average(list(u))

    def _made(self) -> Average | None:
        if self.queries.is_constant or self.keys.constant.dtype not in (torch.float32, torch.float64):
            return None  # numpy has no bfloat16
        values = self.values
        assert isinstance(values, _CarriedValues)
        numbers = [each.detach().numpy() for each in (self.keys.constant, values.constant, values.carried)]
        query, constant = self.queries.weight.detach().numpy(), self.queries.constant[0].detach().numpy()
        return FewKeys(query, constant, numbers[0], numbers[1], numbers[2], values.variables).average()


def _tensor(buffer: Tensor | nn.Module) -> Tensor:
    assert isinstance(buffer, Tensor)
    return buffer


def _is_watched(module: nn.Module) -> bool:
    """Return whether a hook waits for a call of the module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _has_few_keys(plan: QueryPieces) -> bool:
    """Return whether all queries see the same constant keys, and the averages of few numbers give those of values."""
    (num_keys, d_v), num_moving = plan.values.shape, len(plan.values.variables_used())
    is_plain = plan.is_shared and plan.keys.is_constant and num_keys <= MOST_KEYS
    return is_plain and num_moving * num_keys * d_v <= DENSE_CELLS


class _FewKeys(nn.Module):
    """The weights (keys, queries·batch) of few constant keys, which all queries see."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern = _KeysFirst()

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        scores = keys @ queries.transpose(0, 1).flatten(1)
        weights: Tensor = self.pattern(scores.reshape(keys.shape[0], *queries.shape[::2]).permute(2, 1, 0))
        return weights.permute(2, 1, 0).flatten(1)


class _CarriedValues(nn.Module):
    """Values `constant` + Σ_j carried[j]·u[variables[j]] of all keys. The averages over keys are taken first."""

    constant: Tensor
    carried: Tensor

    def __init__(self, values: FloatForm, num_queries: int) -> None:
        super().__init__()
        self.num_queries, self.variables = num_queries, list[int](values.variables_used().tolist())
        self.register_buffer("constant", torch.tensor(values.constant.toarray()))
        moving = values.linear[:, self.variables].toarray().T.reshape(len(self.variables), *values.shape)
        self.register_buffer("carried", torch.tensor(moving))

    def forward(self, weights: Tensor, u: Tensor) -> Tensor:
        """Return the averages (d_v, queries·batch) for weights (keys, queries·batch)."""
        if not self.variables:
            return _mix(self.constant.mT, weights)
        averages = _mix(torch.cat([self.constant, *self.carried], dim=1).mT, weights)
        total, *moving = averages.chunk(1 + len(self.variables))
        for variable, average in zip(self.variables, moving, strict=True):
            total = torch.addcmul(total, average, u[variable].repeat(self.num_queries))
        return total


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
        return _mix(values.mT, weights.mT).mT.flatten(1, -2)


def _mix(values: Tensor, weights: Tensor) -> Tensor:
    """Return values @ weights, the sums over keys: (…, d_v, keys) and (…, keys, n) → (…, d_v, n).

    In float32 both the products and the weights are summed in blocks (`ir.summing`), and the sums are divided. The
    reason is that a softmax sums its weights in an unknown order.
    """
    if weights.dtype != torch.float32 or weights.shape[-2] <= BLOCK:
        return values @ weights
    sums = key_mix(nn.functional.pad(values, (0, 0, 0, 1), value=1.0), weights)
    mixed, total = torch.split(sums, [values.shape[-2], 1], dim=-2)
    return mixed / total
