"""Activations as attention, for torch: every element is a query over a few constant keys.

    y = Σ_k w_k(x)(v_k + u_k·x),   w = softmax over k of (a_k·x + c_k)

The softmax is torch's own, over the keys. It runs in blocks of elements whose scores stay in the processor's cache. The
mean of the values is a product and a sum over the same axis. No other nonlinear kernel runs, forwards or backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnc.converting.activations import Solved, key_arrays
from attnc.converting.report import Replaced
from attnc.errors import InputError

BLOCK_BYTES = 2**22
"""Size of the scores of one block, in bytes: 4 MiB. Larger blocks do not fit into the processor's last cache. With
smaller ones most of the time goes into starting threads."""
BLOCK_BYTES_ELSEWHERE = 2**26
"""Size of the scores of one block on other devices, in bytes: 64 MiB. There, starting a kernel costs more than
memory."""
HALVES = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""
DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float32", torch.bfloat16: "float32"}
"""dtype of a tensor → dtype of its keys. Half precision is computed in float32 and rounded once."""
DTYPE_NAMES = ", ".join(map(str, DTYPES))
KEY_TENSORS = ("slopes", "offsets", "values", "carried")
"""The names of the tensors that hold the keys."""


def scores(x: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
    """Return the scores of n queries and p keys, of shape (p, n)."""
    return torch.addcmul(offsets[:, None], slopes[:, None], x)


def mean(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ_k w_k·v_k. A matrix product is avoided: it might run in TF32, or in bfloat16 under autocast."""
    return (weights * values[:, None]).sum(0)


def mean_(weights: Tensor, values: Tensor) -> Tensor:
    """Return the same mean, and overwrite the weights."""
    return weights.mul_(values[:, None]).sum(0)


class Attend(torch.autograd.Function):
    """Attention of the queries x over constant keys, block by block. Backward recomputes the weights."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, slopes: Tensor, offsets: Tensor, values: Tensor | None, carried: Tensor | None) -> Tensor:
        """Compute the attention. `values` and `carried` are None if they are all zero."""

        def block(x: Tensor) -> Tensor:
            weights = torch.softmax(scores(x, slopes, offsets), 0)
            if carried is None:
                return mean_(weights, values) if values is not None else torch.zeros_like(x)
            constant = None if values is None else mean(weights, values)
            y = mean_(weights, carried).mul_(x)
            return y if constant is None else y.add_(constant)

        def limit(x: Tensor) -> Tensor:
            """Return the limit for large x. If nothing is carried, it is the constant and not 0·∞."""
            weights = torch.softmax(scores(within_reach(x), slopes, offsets), 0)
            constant = torch.zeros_like(x) if values is None else mean(weights, values)
            slope = torch.zeros_like(x) if carried is None else mean(weights, carried)
            return torch.where(slope == 0, constant, slope * x + constant)

        return in_blocks(or_limit(block, limit), x, len(slopes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Multiply by y′ = Σ w_k·u_k + Σ w_k·a_k·y_k − (Σ w_k·a_k)·y, with y_k = v_k + u_k·x."""
        x, slopes, offsets, values, carried = ctx.saved_tensors
        (grad,) = grads
        values = torch.zeros_like(slopes) if values is None else values
        carried = torch.zeros_like(slopes) if carried is None else carried

        def block(x: Tensor) -> Tensor:
            weights = torch.softmax(scores(x, slopes, offsets), 0)
            each = torch.addcmul(values[:, None], carried[:, None], x)
            tilt = slopes[:, None] - (weights * slopes[:, None]).sum(0)
            return (weights * (carried[:, None] + tilt * each)).sum(0)

        run = or_limit(block, lambda x: block(within_reach(x)))
        slope = run(x) if torch.is_grad_enabled() else in_blocks(run, x, len(slopes))
        return grad * slope, None, None, None, None


def within_reach(x: Tensor) -> Tensor:
    """Clip x to ±√max of its dtype. One key has all the weight there, and no score overflows."""
    reach = torch.full_like(x, math.sqrt(torch.finfo(x.dtype).max))
    return torch.where(x.abs() > reach, torch.copysign(reach, x), x)


def or_limit(block: Callable[[Tensor], Tensor], limit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Use `block`, or `limit` if the scores of a block overflow.

    Devices other than the CPU and traces always use `limit`.
    """

    def run(x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x)
        if x.device.type != "cpu" or traced or type(x) is not Tensor:
            return limit(x)
        y = block(x)
        return limit(x) if math.isnan(y.detach().sum().item()) else y

    return run


def in_blocks(run: Callable[[Tensor], Tensor], x: Tensor, num_keys: int) -> Tensor:
    """Compute run(x) for a flat x, in blocks of about BLOCK_BYTES of scores."""
    size = BLOCK_BYTES if x.device.type == "cpu" else BLOCK_BYTES_ELSEWHERE
    step = max(1, size // (num_keys * x.element_size()))
    if len(x) <= step:
        return run(x)
    out = torch.empty_like(x)
    for start in range(0, len(x), step):
        out[start : start + step] = run(x[start : start + step])
    return out


def into(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Write run(x) into x. If gradients are on, the old x is copied first, because backward needs it."""
    return x.copy_(run(x.clone() if x.requires_grad and torch.is_grad_enabled() else x))


class AttentionActivation(nn.Module):
    """An activation of tensors of any shape. Its keys are buffers; `train_keys` makes them parameters."""

    slopes: Tensor
    offsets: Tensor
    values: Tensor
    carried: Tensor

    def __init__(self, solved: Solved, *, inplace: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        self.solved, self.inplace = solved, inplace
        self.entry: Replaced | None = None  # its line in the report
        for name, numbers in key_arrays(solved.keys).items():
            self.register_buffer(name, torch.tensor(numbers, device=device))

    def train_keys(self) -> AttentionActivation:
        """Turn the keys into parameters. Their proven error holds until they change."""
        for name in KEY_TENSORS:
            if (tensor := self._buffers.pop(name, None)) is not None:
                self.register_parameter(name, nn.Parameter(tensor))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return into(x, self.attend) if self.inplace else self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        return self.compute(x.to(compute_dtype(x)).reshape(-1)).reshape(x.shape).to(x.dtype)

    def compute(self, x: Tensor) -> Tensor:
        """Return the activation of a flat x, in the dtype of the result."""
        slopes, offsets, values, carried = (getattr(self, name).to(x.device, x.dtype) for name in KEY_TENSORS)
        if any(key.requires_grad for key in (slopes, offsets, values, carried)):
            weights = torch.softmax(scores(x, slopes, offsets), 0)
            return mean(weights, values) + mean(weights, carried) * x
        keys = self.solved.keys
        given = (values if keys.values.any() else None, carried if keys.carried is not None else None)
        return Attend.apply(x, slopes, offsets, *given)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AttentionActivation:
        """Move the keys to the model's device. They stay in float64, and are rounded to the dtype of x when used."""
        before = {name: getattr(self, name).detach() for name in KEY_TENSORS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in KEY_TENSORS:
            after = getattr(self, name)
            if after.dtype != before[name].dtype:
                after.data = before[name].to(after.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.solved.activation}, keys={self.solved.num_anchors}, error≤{self.solved.error:.2g}"


class AttentionPReLU(AttentionActivation):
    """PReLU by two keys that carry weight·x and x. There is one learnt weight per channel (axis 1), or one for all."""

    def __init__(self, solved: Solved, weight: nn.Parameter) -> None:
        super().__init__(solved, device=weight.device)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(compute_dtype(x))
        if weight.numel() > 1:
            weight = weight.reshape(-1, *[1] * (x.ndim - 2))
        given = x.to(weight.dtype)
        right = super().compute(given.reshape(-1)).reshape(x.shape)  # x to the right of 0, and 0 to the left
        return (right + weight * (given - right)).to(x.dtype)


class AttentionSoftsign(AttentionActivation):
    """Softsign in two layers: s = tanh(βx) by two keys and y = x·s, then s·A(y) with A(y) ≈ y/(1 + y)."""

    def compute(self, x: Tensor) -> Tensor:
        beta = self.solved.sign
        assert beta is not None
        sides = x.new_tensor([-1.0, 1.0])
        sign = Attend.apply(x, beta * sides, 0 * sides, sides, None)  # type: ignore[no-untyped-call]
        rest: Tensor = sign * super().compute(x * sign)
        return rest


class AttentionGLU(nn.Module):
    """a·f(b), where a and b are the two halves of an axis. The keys carry a, and the query is b."""

    def __init__(self, gate: AttentionActivation, dim: int = -1) -> None:
        super().__init__()
        self.gate, self.dim = gate, dim

    def forward(self, x: Tensor) -> Tensor:
        carrier, query = x.chunk(2, self.dim)
        return carrier * self.gate(query)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the activation of x is computed. Raise InputError if there is none."""
    if x.dtype not in DTYPES:
        raise InputError(f"activations by attention take {DTYPE_NAMES}; found a tensor of {x.dtype}")
    return torch.float32 if x.dtype in HALVES else x.dtype
