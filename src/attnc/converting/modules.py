"""Activations as attention, for torch: every element is a query over a few constant keys.

    y = Σ_k w_k(x)(v_k + u_k·x),   w = softmax over k of (a_k·x + c_k)

The softmax is torch's own, over the keys, in blocks of elements whose scores stay in the processor's cache; the mean of
the values is a product and a sum over the same axis. No other nonlinear kernel runs, forwards or backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnc.converting.activations import Solved
from attnc.converting.report import Replaced
from attnc.errors import InputError

BLOCK_BYTES = 2**22
"""Of the scores of a block. Larger ones leave the processor's last cache; smaller ones start threads too often."""
BLOCK_BYTES_ELSEWHERE = 2**26
"""On other devices the launch of a kernel costs more than the memory."""
HALVES = (torch.float16, torch.bfloat16)
DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float32", torch.bfloat16: "float32"}
"""dtype of a tensor → that of the keys that serve it: half precision is computed in float32 and rounded once."""
NAMES = ("slopes", "offsets", "values", "carried")


def scores(x: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
    """(p, n) of n queries and p keys."""
    return torch.addcmul(offsets[:, None], slopes[:, None], x)


def mean(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_k w_k·v_k. Not a matrix product: those may be done in TF32, or in bfloat16 under autocast."""
    return (weights * values[:, None]).sum(0)


def mean_(weights: Tensor, values: Tensor) -> Tensor:
    """The same, where nobody needs the weights any more."""
    return weights.mul_(values[:, None]).sum(0)


class Attend(torch.autograd.Function):
    """Attention of the queries x over constant keys, block by block; backward makes the weights again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, slopes: Tensor, offsets: Tensor, values: Tensor | None, carried: Tensor | None) -> Tensor:
        """`values` and `carried` are None where they are zero."""

        def block(x: Tensor) -> Tensor:
            weights = torch.softmax(scores(x, slopes, offsets), 0)
            if carried is None:
                return mean_(weights, values) if values is not None else torch.zeros_like(x)
            constant = None if values is None else mean(weights, values)
            y = mean_(weights, carried).mul_(x)
            return y if constant is None else y.add_(constant)

        def limit(x: Tensor) -> Tensor:
            """0·∞ is no slope at all: where nothing is carried, the constant is the limit."""
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
        """y′ = Σ w_k·u_k + Σ w_k·a_k·y_k − (Σ w_k·a_k)·y, with y_k = v_k + u_k·x."""
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
    """x, or ±√max of its dtype where it is larger: one key has all the weight by then, and no score overflows."""
    reach = torch.full_like(x, math.sqrt(torch.finfo(x.dtype).max))
    return torch.where(x.abs() > reach, torch.copysign(reach, x), x)


def or_limit(block: Callable[[Tensor], Tensor], limit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`block`, and `limit` for the blocks where scores overflow; where looking at numbers is dear, `limit` for all."""

    def run(x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x)
        if x.device.type != "cpu" or traced or type(x) is not Tensor:
            return limit(x)
        y = block(x)
        return limit(x) if math.isnan(y.detach().sum().item()) else y

    return run


def in_blocks(run: Callable[[Tensor], Tensor], x: Tensor, num_keys: int) -> Tensor:
    """run(x) of a flat x, in pieces of about BLOCK_BYTES of scores."""
    size = BLOCK_BYTES if x.device.type == "cpu" else BLOCK_BYTES_ELSEWHERE
    step = max(1, size // (num_keys * x.element_size()))
    if len(x) <= step:
        return run(x)
    out = torch.empty_like(x)
    for start in range(0, len(x), step):
        out[start : start + step] = run(x[start : start + step])
    return out


def into(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(x), written into x. Backward needs x as it was."""
    return x.copy_(run(x.clone() if x.requires_grad and torch.is_grad_enabled() else x))


class AttentionActivation(nn.Module):
    """An activation of any shape of tensor. Its keys are buffers; `train_keys` makes them parameters."""

    slopes: Tensor
    offsets: Tensor
    values: Tensor
    carried: Tensor

    def __init__(self, solved: Solved, *, inplace: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        self.solved, self.inplace = solved, inplace
        self.entry: Replaced | None = None  # of the report
        for name in NAMES:
            self.register_buffer(name, torch.tensor(getattr(solved.keys, name), device=device))

    def train_keys(self) -> AttentionActivation:
        """Slopes, offsets and values become parameters; what is proven of the keys holds until they move."""
        for name in NAMES:
            tensor = self._buffers.pop(name, None)
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return into(x, self.attend) if self.inplace else self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        return self.compute(x.to(compute_dtype(x)).reshape(-1)).reshape(x.shape).to(x.dtype)

    def compute(self, x: Tensor) -> Tensor:
        """Of a flat x, in the dtype of the result."""
        slopes, offsets, values, carried = (getattr(self, name).to(x.device, x.dtype) for name in NAMES)
        if any(key.requires_grad for key in (slopes, offsets, values, carried)):
            weights = torch.softmax(scores(x, slopes, offsets), 0)
            return mean(weights, values) + mean(weights, carried) * x
        keys = self.solved.keys
        given = (values if keys.values.any() else None, carried if keys.carried.any() else None)
        return Attend.apply(x, slopes, offsets, *given)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AttentionActivation:
        """Keys follow the model to its device, but stay float64: they are rounded to the dtype of x when used."""
        before = {name: getattr(self, name).detach() for name in NAMES}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in NAMES:
            after = getattr(self, name)
            if after.dtype != before[name].dtype:
                after.data = before[name].to(after.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.solved.activation}, keys={self.solved.num_anchors}, error≤{self.solved.error:.2g}"


class AttentionPReLU(AttentionActivation):
    """Two keys that carry weight·x and x; the weight is the learnt one, of every channel (axis 1) or of all."""

    def __init__(self, solved: Solved, weight: nn.Parameter) -> None:
        super().__init__(solved, device=weight.device)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(compute_dtype(x))
        if weight.numel() > 1:
            weight = weight.reshape(-1, *[1] * (x.ndim - 2))
        given = x.to(weight.dtype)
        right = super().compute(given.reshape(-1)).reshape(x.shape)  # of x to the right of 0, and 0 to the left
        return (right + weight * (given - right)).to(x.dtype)


class AttentionSoftsign(AttentionActivation):
    """Two layers: s = tanh(βx) and y = x·s by two keys, then s(1 − A(y)), A(y) ≈ 1/(1 + y)."""

    def compute(self, x: Tensor) -> Tensor:
        beta = self.solved.sign
        assert beta is not None
        sides = x.new_tensor([-1.0, 1.0])
        sign = Attend.apply(x, beta * sides, 0 * sides, sides, None)  # type: ignore[no-untyped-call]
        rest: Tensor = sign * (1 - super().compute(x * sign))
        return rest


class AttentionGLU(nn.Module):
    """a·f(b) of the two halves of an axis: the keys carry a, the query is b; f is a sigmoid unless told."""

    def __init__(self, gate: AttentionActivation, dim: int = -1) -> None:
        super().__init__()
        self.gate, self.dim = gate, dim

    def forward(self, x: Tensor) -> Tensor:
        carrier, query = x.chunk(2, self.dim)
        return carrier * self.gate(query)


def compute_dtype(x: Tensor) -> torch.dtype:
    if x.dtype not in DTYPES:
        raise InputError(
            f"activations by attention take {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}; "
            f"found a tensor of {str(x.dtype).removeprefix('torch.')}"
        )
    return torch.float32 if x.dtype in HALVES else x.dtype
