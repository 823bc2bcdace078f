"""A program as a torch module, layer by layer as it is written: nothing is folded, and nothing is cut into blocks.

The modules have the names of the program. `attend1` is a layer, which maps one state to the next. `attend1.head0` is a
head, which returns the numbers that it adds to the state, and has the parameters W_Q, W_K, W_V and W_O. Every array
that `net.run(points, cache=True)` names passes through a hook point of the same name: a submodule that returns its
argument. A forward hook on it sees the array of all points at once. If the hook returns another array, the module goes
on with that one.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from attnc.engines.torch_module import Limits, ProgramModule, key_mix, key_sum
from attnc.errors import MissingExtra, ProgramError
from attnc.ir.layers import Affine, Attention, Head, Layer
from attnc.ir.program import Program, token_shape
from attnc.ir.reference import MEMORY, activation_shapes
from attnc.ir.shapes import PlacedLayer, streams
from attnc.ir.sparse import Sparse

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("to_torch needs", "torch", "torch", error) from error

MOST_DENSE_CELLS = 2**20
"""Maximum number of entries of an affine map that is multiplied as a dense matrix: 8 MiB. A larger one is sparse."""


def to_torch_unfolded(
    program: Program, limits: Limits | None = None, *, is_nan_outside: bool = False, trainable: bool = False
) -> UnfoldedNetwork:
    """Return the program as a module whose submodules and parameters have the names of the program.

    Points beyond `limits`, if there are any, are moved to them, or their outputs are NaN. Unless the module is
    `trainable`, its parameters need no gradient.
    """
    return UnfoldedNetwork(program, limits, is_nan_outside=is_nan_outside).eval().requires_grad_(trainable)


class HookPoint(nn.Module):
    """The identity. A forward hook on it sees one named array, or replaces it."""

    def forward(self, array: Tensor) -> Tensor:
        return array


class NamePart(nn.Module):
    """The part of a name before a dot, such as `signal` of `signal.x`. It is never called."""


class UnfoldedNetwork(ProgramModule):
    """The unfolded form of a program.

    Parameters are the stored entries of affine maps, `place1.weight` and `place1.constant`, and the matrices of heads,
    such as `attend1.head0.W_Q`. Entries of these matrices that are zero in the program get no gradient, so that
    training keeps the structure of the network. `program` has the weights with which the module was made.
    """

    def __init__(self, program: Program, limits: Limits | None = None, *, is_nan_outside: bool = False) -> None:
        super().__init__(program, limits, is_nan_outside=is_nan_outside)
        self.program = program
        self.register_buffer("_dtype", _tensor(np.zeros(0, program.dtype)), persistent=False)  # follows .double()
        self._layers: dict[str, list[str]] = {}
        for stream, prefix in zip(streams(program), (MEMORY, ""), strict=True):
            self.register_buffer(f"_read_{prefix}".rstrip("._"), torch.tensor(stream.first), persistent=False)
            self._layers[prefix] = [prefix + step.layer.name for step in stream.steps]
            for name, step in zip(self._layers[prefix], stream.steps, strict=True):
                _place(self, name, _module_of(step))
        # A name may continue another, as `embed.anchor.square` continues `embed.anchor`. The shorter one comes first.
        for name in sorted(activation_shapes(program), key=lambda name: name.count(".")):
            _place(self, name, HookPoint())
        self._activations = tuple(activation_shapes(program))

    @property
    def dtype(self) -> torch.dtype:
        return self.get_buffer("_dtype").dtype

    @property
    def hook_points(self) -> dict[str, HookPoint]:
        """The hook points by name: those of `net.run(points, cache=True)`, in its order."""
        return {name: _at(self, name) for name in self._activations}

    def _outputs(self, variables: Tensor) -> Tensor:
        columns = torch.split(variables, [int(np.prod(shape)) for shape in self.input_shapes], dim=1)
        states = [part.reshape(-1, *token_shape(shape)) for part, shape in zip(columns, self.input_shapes, strict=True)]
        main, memory = states[0], states[1] if len(states) > 1 else variables.new_zeros(len(variables), 0, 0)
        memory = memory[:, self.get_buffer("_read_memory")]
        for name in self._layers[MEMORY]:
            memory = _at(self, name)(memory, memory)
        state = main[:, self.get_buffer("_read")]
        for name in self._layers[""]:
            state = _at(self, name)(state, memory)
        return state.flatten(1)


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Make a module the descendant of `root` with this dotted name.

    `add_module` refuses names of methods, such as `half`, which a variable may have. So the module is entered directly.
    """
    *parents, last = name.split(".")
    for part in parents:
        if part not in root._modules:
            _enter(root, part, NamePart(), name)
        root = _at(root, part)
    _enter(root, last, module, name)


def _enter(parent: nn.Module, part: str, module: nn.Module, name: str) -> None:
    taken = {*parent._modules, *parent._parameters, *parent._buffers, *vars(parent)}
    if not part or part in taken:
        raise ProgramError(
            f"no torch module can have the name {name!r}: its part {part!r} is {'taken' if part else 'empty'}. Rename "
            "the variable, layer or channel, or use the folded form, to_torch()."
        )
    parent._modules[part] = module


def _at(root: nn.Module, name: str) -> Any:
    """Return the descendant with this dotted name. Its parts may be names of methods."""
    for part in name.split("."):
        root = root._modules[part]  # type: ignore[assignment]
    return root


def _module_of(step: PlacedLayer) -> _UnfoldedLayer:
    layer = step.layer
    if isinstance(layer, Affine):
        return _UnfoldedAffine(layer, step)
    return _UnfoldedAttention(layer, step) if isinstance(layer, Attention) else _UnfoldedSoftmax(layer)


class _UnfoldedLayer(nn.Module, abc.ABC):
    """A layer: (state, memory) → state, each (batch, tokens, width), with a hook point for each channel."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._channels = layer.channels

    @abc.abstractmethod
    def _computed(self, state: Tensor, memory: Tensor) -> Tensor:
        """Return the state before its channels pass through their hook points."""

    def forward(self, state: Tensor, memory: Tensor) -> Tensor:
        found = self._computed(state, memory)
        columns = [_at(self, channel)(found[:, :, i]) for i, channel in enumerate(self._channels)]
        return torch.stack(columns, dim=-1) if columns else found


class _UnfoldedAffine(_UnfoldedLayer):
    """An affine map. `weight` and `constant` are the stored entries of the program, in its order."""

    def __init__(self, layer: Affine, step: PlacedLayer) -> None:
        super().__init__(layer)
        self.weight, self.constant = (
            nn.Parameter(_tensor(layer.weight.values)),
            nn.Parameter(_tensor(layer.constant.values)),
        )
        # The places of the entries tell which of them are read: each is its own number, from 1, in a map of numbers.
        live = PlacedLayer(_numbered(layer), step.after, step.read, step.tokens, step.num_keys).live_layer
        assert isinstance(live, Affine)
        self._shape, self._size = (
            live.constant.shape,
            (int(np.prod(live.constant.shape)), int(np.prod(live.weight.shape[2:]))),
        )
        for name, part, rank in (("weight", live.weight, 2), ("constant", live.constant, 1)):
            places = [part.flat(slice(0, 2)), part.flat(slice(2, None))][:rank]
            self.register_buffer(f"_{name}_places", torch.tensor(np.stack(places)), persistent=False)
            self.register_buffer(f"_{name}_read", torch.tensor(part.values.astype(np.int64) - 1), persistent=False)

    def _computed(self, state: Tensor, memory: Tensor) -> Tensor:
        weight, rows = self._entries("weight")
        constant, places = self._entries("constant")
        flat = state.flatten(1).mT
        if self._size[0] * self._size[1] <= MOST_DENSE_CELLS:
            moved = weight.new_zeros(self._size).index_put(tuple(rows), weight) @ flat
        else:
            moved = torch.sparse.mm(torch.sparse_coo_tensor(rows, weight, self._size, check_invariants=False), flat)
        constants = constant.new_zeros(self._size[:1]).index_put(tuple(places), constant)
        return (moved.mT + constants).reshape(len(state), *self._shape)

    def _entries(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the entries that are read, and their places."""
        return self.get_parameter(name)[self.get_buffer(f"_{name}_read")], self.get_buffer(f"_{name}_places")


def _numbered(layer: Affine) -> Affine:
    """Return the map with the numbers 1, 2, … in place of its entries."""

    def numbered(tensor: Sparse) -> Sparse:
        return Sparse(tensor.shape, tensor.index, np.arange(1.0, len(tensor.values) + 1))

    return Affine(layer.name, numbered(layer.weight), numbered(layer.constant), layer.channels)


class _UnfoldedAttention(_UnfoldedLayer):
    """An attention layer: the sum of its heads, and the state itself if it has a residual."""

    def __init__(self, layer: Attention, step: PlacedLayer) -> None:
        super().__init__(layer)
        self._is_residual, self._is_cross, self._heads = layer.residual, layer.cross, list[str]()
        self.register_buffer("_rows", torch.tensor(step.rows), persistent=False)
        for h, head in enumerate(layer.heads):
            self._heads.append(f"head{h}")
            _place(self, f"head{h}", _UnfoldedHead(head, step))

    def _computed(self, state: Tensor, memory: Tensor) -> Tensor:
        queried, keyed = state[:, self.get_buffer("_rows")], memory if self._is_cross else state
        if not queried.shape[1]:  # nothing reads this layer, and its heads have no hook points
            return queried.new_zeros(len(state), 0, len(self._channels))
        written = [_at(self, head)(queried, keyed) for head in self._heads]
        return sum(written, queried) if self._is_residual else sum(written[1:], written[0])


class _UnfoldedHead(nn.Module):
    """A head: the numbers that it adds to the state, (batch, queries, width)."""

    W_Q: nn.Parameter
    W_K: nn.Parameter
    W_V: nn.Parameter
    W_O: nn.Parameter

    def __init__(self, head: Head, step: PlacedLayer) -> None:
        super().__init__()
        for name, W in head.matrices.items():
            self.register_parameter(name, nn.Parameter(_tensor(W)))
            self.register_buffer(f"_is_trained_{name}", torch.tensor(W != 0), persistent=False)
        visible = None if head.mask is None else torch.tensor(head.mask.visible(step.tokens))
        self.register_buffer("_visible", visible, persistent=False)

    def forward(self, queried: Tensor, keyed: Tensor) -> Tensor:
        queries, keys, values = queried @ self._matrix("W_Q"), keyed @ self._matrix("W_K"), keyed @ self._matrix("W_V")
        scores = queries @ keys.mT
        visible = self._buffers["_visible"]
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        scores = _at(self, "scores")(scores)
        pattern = _at(self, "pattern")(_softmax(scores))
        z = _at(self, "z")(key_mix(values.mT, pattern.mT).mT)
        return z @ self._matrix("W_O")

    def _matrix(self, name: str) -> Tensor:
        """Return a matrix. Entries that are zero in the program get no gradient."""
        W = self.get_parameter(name)
        return torch.where(self.get_buffer(f"_is_trained_{name}"), W, W.detach()) if W.requires_grad else W


class _UnfoldedSoftmax(_UnfoldedLayer):
    """A softmax over the features of each token."""

    def _computed(self, state: Tensor, memory: Tensor) -> Tensor:
        return _softmax(state)


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last axis. In float32, weights are summed in blocks (`ir.summing`)."""
    if scores.dtype != torch.float32:
        return torch.softmax(scores, dim=-1)
    weights = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True))
    return weights / key_sum(weights.movedim(-1, 0))[..., None]


def _tensor(array: np.ndarray) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array))
