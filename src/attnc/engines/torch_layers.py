"""A deep program as a torch module, layer by layer: equal layers are one module, which is called once for every turn.

`torch_engine` folds a program into few stages, and `torch_unfolded` has a hook point for every activation. A program
that takes a thousand steps on a prompt has too many of both. Here layers that repeat (`ir.repeats`) store their
weights once, an affine map computes the numbers that change (`ir.affine_rows`), and the queries of a mask's segment
meet the keys that they see.
"""

from __future__ import annotations

import abc

import numpy as np

from attnc.engines.torch_module import ProgramModule
from attnc.errors import MissingExtra
from attnc.ir.affine_rows import AffineRows
from attnc.ir.layers import MOST_VIEWS, Affine, Attention, Head, Layer
from attnc.ir.program import Program, token_shape
from attnc.ir.repeats import Repeat, runs

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("to_torch needs", "torch", "torch", error) from error


class LayeredNetwork(ProgramModule):
    """A program whose equal layers share their weights.

    Parameters are named after the first layer that has them: `gradient2.head0.W_Q`. With `trainable` they need a
    gradient; steps that are stored once stay equal in training.
    """

    def __init__(self, program: Program, *, trainable: bool = False) -> None:
        super().__init__(program)
        self._shapes = [token_shape(shape) for shape in program.input_shapes]
        known: dict[int, nn.Parameter] = {}
        self.memory = nn.ModuleList(_Run(run, known) for run in runs(program.memory))
        self.main = nn.ModuleList(_Run(run, known) for run in runs(program.layers))
        self.register_buffer("_dtype", torch.tensor(np.zeros(0, program.dtype)), persistent=False)
        self.requires_grad_(trainable)

    @property
    def dtype(self) -> torch.dtype:
        return self.get_buffer("_dtype").dtype

    def _outputs(self, variables: Tensor) -> Tensor:
        columns = torch.split(variables, [tokens * width for tokens, width in self._shapes], dim=1)
        states = [part.reshape(-1, *shape) for part, shape in zip(columns, self._shapes, strict=True)]
        memory = states[1] if len(states) > 1 else variables.new_zeros(len(variables), 0, 0)
        for run in self.memory:
            memory = run(memory, memory)
        state = states[0]
        for run in self.main:
            state = run(state, memory)
        return state.flatten(1)


class _Run(nn.Module):
    """The turns of a repeat."""

    def __init__(self, run: Repeat, known: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self.count = run.count
        self.body = nn.ModuleList(_layer(run, place, known) for place in range(len(run.layers)))

    def forward(self, state: Tensor, memory: Tensor) -> Tensor:
        for turn in range(self.count):
            for layer in self.body:
                state = layer(state, memory, turn)
        return state


def _layer(run: Repeat, place: int, known: dict[int, nn.Parameter]) -> _Layer:
    layer = run.layers[place]
    if isinstance(layer, Affine):
        return _AffineLayer(AffineRows.of(layer, *(run.varying.get((place, part)) for part in ("weight", "constant"))))
    return _AttentionLayer(layer, known) if isinstance(layer, Attention) else _SoftmaxLayer(layer)


class _Layer(nn.Module, abc.ABC):
    """A layer: (state, memory, number of the turn) → state."""

    @abc.abstractmethod
    def forward(self, state: Tensor, memory: Tensor, turn: int) -> Tensor: ...


class _AffineLayer(_Layer):
    def __init__(self, rows: AffineRows) -> None:
        super().__init__()
        self.shape = rows.shape
        self.weights, self.constants = (nn.Parameter(_tensor(each.distinct)) for each in (rows.weights, rows.constants))
        self.kinds = (rows.weights.of_turn.tolist(), rows.constants.of_turn.tolist())
        self.register_buffer("is_entry", _tensor((rows.weights.distinct != 0).any(axis=0)), persistent=False)
        self.register_buffer("columns", _tensor(rows.columns), persistent=False)
        self.register_buffer("selected", _tensor(rows.selected), persistent=False)

    def forward(self, state: Tensor, memory: Tensor, turn: int) -> Tensor:
        flat, (of_weights, of_constants) = state.flatten(1), self.kinds
        made = self.constants[of_constants[turn] if of_constants else 0].expand(len(flat), -1)
        if flat.shape[1]:
            weights = _structured(self.weights[of_weights[turn] if of_weights else 0], self.get_buffer("is_entry"))
            made = made + (flat[:, self.get_buffer("columns")] * weights).sum(-1)
        return torch.cat([flat, made], dim=1)[:, self.get_buffer("selected")].reshape(len(flat), *self.shape)


class _AttentionLayer(_Layer):
    def __init__(self, layer: Attention, known: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self.residual, self.cross, self.width = layer.residual, layer.cross, len(layer.channels)
        self.heads = nn.ModuleList(_LayerHead(head, known) for head in layer.heads)

    def forward(self, state: Tensor, memory: Tensor, turn: int) -> Tensor:
        keyed = memory if self.cross else state
        out = state if self.residual else state.new_zeros(*state.shape[:2], self.width)
        for head in self.heads:
            out = out + head(state, keyed)
        return out


class _LayerHead(nn.Module):
    """A head. Arrays that several heads share are one parameter."""

    def __init__(self, head: Head, known: dict[int, nn.Parameter]) -> None:
        super().__init__()
        for name, W in head.matrices.items():
            self.register_parameter(name, known.setdefault(id(W), nn.Parameter(_tensor(W))))
            self.register_buffer(f"is_entry_{name}", _tensor(W != 0), persistent=False)
        views = head.mask.views() if head.mask is not None else []
        visible = None
        if head.mask is not None and len(views) > MOST_VIEWS:
            views, visible = [], _tensor(head.mask.visible(slice(None)))
        self.register_buffer("visible", visible, persistent=False)
        self.num_views = len(views)
        for number, (queries, seen) in enumerate(views):
            self.register_buffer(f"queries{number}", _tensor(queries), persistent=False)
            self.register_buffer(f"seen{number}", _tensor(seen), persistent=False)

    def forward(self, state: Tensor, keyed: Tensor) -> Tensor:
        Q, K, V = state @ self._matrix("W_Q"), keyed @ self._matrix("W_K"), keyed @ self._matrix("W_V")
        if not self.num_views:
            scores, visible = Q @ K.mT, self._buffers["visible"]
            z = torch.softmax(scores if visible is None else scores.masked_fill(~visible, -torch.inf), dim=-1) @ V
        else:
            z = Q.new_zeros(*Q.shape[:2], V.shape[-1])
            for number in range(self.num_views):
                queries, seen = self.get_buffer(f"queries{number}"), self.get_buffer(f"seen{number}")
                mixed = torch.softmax(Q[:, queries] @ K[:, seen].mT, dim=-1) @ V[:, seen]
                z = z.index_copy(1, queries, mixed)
        return z @ self._matrix("W_O")

    def _matrix(self, name: str) -> Tensor:
        return _structured(self.get_parameter(name), self.get_buffer(f"is_entry_{name}"))


class _SoftmaxLayer(_Layer):
    def __init__(self, layer: Layer) -> None:
        super().__init__()

    def forward(self, state: Tensor, memory: Tensor, turn: int) -> Tensor:
        return torch.softmax(state, dim=-1)


def _structured(weights: Tensor, is_entry: Tensor) -> Tensor:
    """Return the weights. Those that are zero in the program get no gradient, so that training keeps its structure."""
    return torch.where(is_entry, weights, weights.detach()) if weights.requires_grad else weights


def _tensor(array: np.ndarray) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array))
