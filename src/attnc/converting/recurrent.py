"""LSTM, GRU and RNN, and their cells, with attention for activations.

Sigmoid and tanh are softmaxes of two keys, so the gates are exact. The parameters are those of the torch module, under
the same names, and so are the arguments and results. Every step of time is computed by itself: no fused kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from attnc.converting.modules import KEY_TENSORS, AttentionActivation
from attnc.errors import InputError

State = tuple[Tensor, ...]
"""The state of a layer: (h,), or (h, c) for an LSTM."""
Gates = nn.ModuleDict
KINDS: dict[type[nn.Module], str] = {
    nn.LSTM: "lstm",
    nn.LSTMCell: "lstm",
    nn.GRU: "gru",
    nn.GRUCell: "gru",
    nn.RNN: "rnn",
    nn.RNNCell: "rnn",
}
NUM_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def activations_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return the activations of a recurrent module, or None for other modules and classes with a forward of their own.

    Subclasses of torch's modules that keep its forward count.
    """
    base = next((base for base in type(module).__mro__ if base in KINDS), None)
    if base is None or type(module).forward is not base.forward:
        return None
    if KINDS[base] != "rnn":
        return ("sigmoid", "tanh")
    name = getattr(module, "nonlinearity", "tanh")
    return (str(name),)


def recurrent(module: nn.Module, gate: Callable[[str], AttentionActivation]) -> nn.Module:
    """Return the module with attention for its activations. `gate` makes the one of that name."""
    names = activations_of(module)
    assert names is not None
    gates = nn.ModuleDict({name: gate(name) for name in names})
    for made in gates.values():
        made._non_persistent_buffers_set.update(KEY_TENSORS)  # so that state_dict has the entries of the original
    base = next(base for base in type(module).__mro__ if base in KINDS)
    kind = AttentionCell if isinstance(module, nn.RNNCellBase) else AttentionRecurrence
    return kind(module, KINDS[base], gates)


def step(kind: str, gates: Gates, from_input: Tensor, state: State, W: Tensor, b: Tensor | None) -> State:
    """Return the next state. `from_input` is W_i·x + b_i, and W and b are W_h and b_h."""
    if kind == "gru":
        ours = F.linear(state[0], W, b)
        (r_i, z_i, n_i), (r_h, z_h, n_h) = from_input.chunk(3, -1), ours.chunk(3, -1)
        r, z = gates["sigmoid"](torch.cat([r_i + r_h, z_i + z_h], -1)).chunk(2, -1)
        n = gates["tanh"](n_i + r * n_h)
        return (n + z * (state[0] - n),)
    total = from_input + F.linear(state[0], W, b)
    if kind == "rnn":
        (only,) = gates.values()
        return (only(total),)
    i, f, g, o = total.chunk(4, -1)
    i, f, o = gates["sigmoid"](torch.cat([i, f, o], -1)).chunk(3, -1)
    c = f * state[1] + i * gates["tanh"](g)
    return o * gates["tanh"](c), c


class _Recurrent(nn.Module):
    """The parameters and attributes of a torch module, and its gates."""

    kind: str
    gates: Gates
    bias: bool

    def __init__(self, module: nn.Module, kind: str, gates: Gates) -> None:
        super().__init__()
        own = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
        self.__dict__.update({name: value for name, value in vars(module).items() if name not in own})
        for name, parameter in module._parameters.items():
            self.register_parameter(name, parameter)
        self.kind, self.gates = kind, gates


class AttentionCell(_Recurrent):
    """LSTMCell, GRUCell or RNNCell."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    hidden_size: int

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        if hx is None:
            zero = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zero, zero) if self.kind == "lstm" else zero
        state = tuple(hx) if self.kind == "lstm" else (hx,)
        from_input = F.linear(input, self.weight_ih, self.bias_ih)
        made = step(self.kind, self.gates, from_input, state, self.weight_hh, self.bias_hh)
        return made if self.kind == "lstm" else made[0]


class AttentionRecurrence(_Recurrent):
    """LSTM, GRU or RNN: several layers, both directions, projections, packed sequences, and a state to go on with."""

    batch_first: bool
    bidirectional: bool
    num_layers: int
    hidden_size: int
    input_size: int
    proj_size: int
    dropout: float

    def flatten_parameters(self) -> None:
        """Do nothing. torch's modules lay out their weights for a fused kernel here."""

    @property
    def all_weights(self) -> list[list[Tensor]]:
        return [
            [getattr(self, f"{name}{end}") for name in self._names()]
            for end in (self._end(layer, way) for layer in range(self.num_layers) for way in self._ways())
        ]

    def _ways(self) -> range:
        return range(2 if self.bidirectional else 1)

    def _names(self) -> list[str]:
        return [
            "weight_ih",
            "weight_hh",
            *(["bias_ih", "bias_hh"] if self.bias else []),
            *(["weight_hr"] if self.proj_size else []),
        ]

    @staticmethod
    def _end(layer: int, way: int) -> str:
        return f"_l{layer}{'_reverse' if way else ''}"

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.ndim not in (2, 3) or input.shape[-1] != self.input_size:
            raise InputError(
                f"give a sequence of {self.input_size} features with 2 or 3 axes; found the shape {tuple(input.shape)}"
            )
        x = input[:, None] if input.ndim == 2 else input.transpose(0, 1) if self.batch_first else input
        state = self._state(x, hx, x.shape[1], is_batched=input.ndim == 3)
        y, state = self._layers(x, [x.shape[1]] * len(x), state)
        if input.ndim == 2:
            return y[:, 0], self._given(tuple(part[:, 0] for part in state))
        return (y.transpose(0, 1) if self.batch_first else y), self._given(state)

    def _packed(self, packed: PackedSequence, hx: Any) -> Any:
        """Run a packed sequence: the rows of a step of time are those of the sequences that are as long."""
        sizes = packed.batch_sizes.tolist()
        state = self._state(packed.data, hx, sizes[0], is_batched=True)
        if packed.sorted_indices is not None:
            state = tuple(part.index_select(1, packed.sorted_indices) for part in state)
        parts = torch.split(packed.data, sizes)
        widest = packed.data.new_zeros(len(sizes), sizes[0], packed.data.shape[-1])
        x = torch.stack([torch.cat([part, full[len(part) :]]) for part, full in zip(parts, widest, strict=True)])
        y, state = self._layers(x, sizes, state)
        rows = torch.cat([row[:size] for row, size in zip(y, sizes, strict=True)])
        if packed.unsorted_indices is not None:
            state = tuple(part.index_select(1, packed.unsorted_indices) for part in state)
        return (
            PackedSequence(rows, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices),
            self._given(state),
        )

    def _given(self, state: State) -> Any:
        return state if self.kind == "lstm" else state[0]

    def _state(self, x: Tensor, hx: Any, batch: int, *, is_batched: bool) -> State:
        """Return the state (h,) or (h, c), of shape (layers × directions, batch, width)."""
        layers = self.num_layers * len(self._ways())
        widths = [self.proj_size or self.hidden_size, *([self.hidden_size] if self.kind == "lstm" else [])]
        if hx is None:
            return tuple(x.new_zeros(layers, batch, width) for width in widths)
        given = tuple(hx) if self.kind == "lstm" else (hx,)
        given = given if is_batched else tuple(part[:, None] for part in given)
        for part, width in zip(given, widths, strict=True):
            if part.shape != (layers, batch, width):
                raise InputError(f"the state has the shape {tuple(part.shape)}; it must be {(layers, batch, width)}")
        return given

    def _layers(self, x: Tensor, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """Return the outputs of the last layer (steps, batch, width), and the last state. `sizes` as in a packing."""
        last: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for way in self._ways():
                place = layer * len(self._ways()) + way
                y, end = self._direction(x, sizes, tuple(part[place] for part in state), self._end(layer, way), way)
                outputs.append(y)
                last.append(end)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(parts) for parts in zip(*last, strict=True))

    def _direction(self, x: Tensor, sizes: list[int], state: State, end: str, way: int) -> tuple[Tensor, State]:
        """Run one layer in one direction. Sequences that have ended, or not begun, keep their state."""
        W, b = getattr(self, f"weight_hh{end}"), getattr(self, f"bias_hh{end}", None)
        projection = getattr(self, f"weight_hr{end}", None)
        from_input = F.linear(x, getattr(self, f"weight_ih{end}"), getattr(self, f"bias_ih{end}", None))
        outputs: list[Tensor] = []
        for time in reversed(range(len(x))) if way else range(len(x)):
            size = sizes[time]
            part = tuple(each[:size] for each in state)
            made = step(self.kind, self.gates, from_input[time, :size], part, W, b)
            if projection is not None:
                made = (F.linear(made[0], projection), *made[1:])
            if size < x.shape[1]:
                made = tuple(torch.cat([new, old[size:]]) for new, old in zip(made, state, strict=True))
            outputs.append(made[0])
            state = made
        return torch.stack(outputs[::-1] if way else outputs), state
