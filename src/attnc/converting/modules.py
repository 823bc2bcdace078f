"""Activations as attention, for torch: every element is a query over a few constant keys.

    y = Σ_k w_k(x)(v_k + V_k·x),   w = softmax over k of (a_k·x + c_k)

There are five ways to compute this, from the same stored keys:

- on the CPU with numba, compiled loops that take one exponential per element if the keys allow it (`evaluation`);
- on the CPU without numba, torch functions with one exponential or two, in blocks of elements (`plain`);
- otherwise torch's own softmax over the keys;
- while torch traces or exports, or under torch.func, one expression of torch functions without branches;
- under torch.compile the same expression, key by key, so that the compiler makes one vectorised loop of it.

No kernel of an activation runs, forwards or backwards.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from attnc.converting import kernels, plain
from attnc.converting.activations import Solved, key_arrays
from attnc.converting.evaluation import Evaluation, evaluation_of, evaluation_text
from attnc.converting.kernels import ActivationLoops
from attnc.converting.report import Replaced
from attnc.errors import InputError

SCORE_BYTES = 2**20
"""Size of the scores of one block, in bytes: 1 MiB, so that a block and its temporaries stay in the second cache."""
SCORE_BYTES_ELSEWHERE = 2**26
"""Size of the scores of one block on other devices, in bytes: 64 MiB. There, starting a kernel costs more than
memory."""
HALVES = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""
DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float32", torch.bfloat16: "float32"}
"""dtype of a tensor → dtype of its keys. Half precision is computed in float32 and rounded once."""
DTYPE_NAMES = ", ".join(map(str, DTYPES))
KEY_TENSORS = ("slopes", "offsets", "values", "carried")
"""The names of the tensors that hold the keys."""
Keys = tuple[Tensor, Tensor, Tensor, Tensor]
"""The four key tensors, in the dtype and on the device of the queries."""


# --- torch functions --------------------------------------------------------------------------------------------------


def scale_of(solved: Solved) -> float:
    """Return the least power of two ≥ the largest |slope|."""
    largest = float(abs(solved.keys.slopes).max())
    return 2.0 ** math.ceil(math.log2(max(largest, 2.0**-100)))


def weights_of(x: Tensor, slopes: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """Return the weights of the queries x, with a last axis for the keys.

    x is bounded. A score is then finite, because |slope| ≤ scale, and one key has all the weight there.
    """
    return torch.softmax(bounded(x, scale).unsqueeze(-1) * slopes + offsets, -1)


def bounded(x: Tensor, scale: float) -> Tensor:
    """Return x where x·scale is finite, and beyond that the largest such number. NaN stays NaN."""
    most = torch.finfo(x.dtype).max / max(scale, 1.0)
    return torch.where(x > most, most, torch.where(x < -most, -most, x))


def expression(x: Tensor, keys: Keys, scale: float, is_product: bool = False) -> Tensor:
    """Return the attention of the queries x as one expression, with limits for infinite x, and NaN for NaN.

    The means are sums of products. A matrix product might run in TF32, or in bfloat16 under autocast.
    """
    slopes, offsets, values, carried = keys
    weights = weights_of(x, slopes, offsets, scale)
    constant = (weights * values).sum(-1)  # NaN for NaN
    y = constant + product_with((weights * carried).sum(-1), x)
    return product_with(y, x) if is_product else y


def key_by_key(x: Tensor, keys: Keys, scale: float, is_product: bool = False) -> Tensor:
    """Return the same attention as sums of one term per key, for torch.compile.

    The compiler turns elementwise functions into one vectorised loop, and a softmax over a short last axis into a slow
    one. The maximum is that of the scores. It cancels, so it has no gradient.
    """
    near = bounded(x, scale)
    slopes, offsets, values, carried = (key.unbind() for key in keys)
    scores = [near * slope + offset for slope, offset in zip(slopes, offsets, strict=True)]
    top = functools.reduce(torch.maximum, [score.detach() for score in scores])
    powers = [torch.exp(score - top) for score in scores]
    total = sum_of(powers)
    constant, rise = (
        sum_of([power * number for power, number in zip(powers, numbers, strict=True)]) / total
        for numbers in (values, carried)
    )
    y = constant + product_with(rise, x)
    return product_with(y, x) if is_product else y


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def product_with(factor: Tensor, x: Tensor) -> Tensor:
    """Return factor·x with 0·∞ = 0. NaN stays NaN."""
    return torch.where(factor == 0, 0.0, factor * x)


def exported(x: Tensor, keys: Keys, is_product: bool = False, is_constant: bool = False) -> Tensor:
    """Return the same attention of the queries x in the operators of attention: MatMul, Add and Softmax.

    Nothing else is in an ONNX file, so infinite x give NaN, as ∞ − ∞ is, and so do |x| whose scores overflow. `carried`
    may have leading axes that fit those of x. If `is_constant`, no key carries x.
    """
    slopes, offsets, values, carried = keys
    query = x.unsqueeze(-1)
    weights = exported_weights(x, slopes, offsets)
    if is_constant:
        y = torch.matmul(weights, values.unsqueeze(-1)).squeeze(-1)
    elif carried.ndim > 1:
        y = exported_mean(weights, torch.matmul(query.unsqueeze(-1), carried.unsqueeze(-2)).squeeze(-2) + values)
    else:
        y = exported_mean(weights, torch.matmul(query, carried.unsqueeze(0)) + values)
    return exported_product(y, x) if is_product else y


def exported_weights(x: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
    return torch.softmax(torch.matmul(x.unsqueeze(-1), slopes.unsqueeze(0)) + offsets, -1)


def exported_mean(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ w_k·value_k over the last axis as a matrix product for every query."""
    return torch.matmul(weights.unsqueeze(-2), values.unsqueeze(-1)).squeeze(-1).squeeze(-1)


def exported_product(x: Tensor, y: Tensor) -> Tensor:
    """Return x·y, entry by entry, as matrix products of one row and one column."""
    return exported_mean(x.unsqueeze(-1), y.unsqueeze(-1))


def slope_expression(x: Tensor, keys: Keys, scale: float, is_product: bool = False) -> Tensor:
    """Return y′ = Σ w_k·V_k + Σ w_k(a_k − Σ w_j·a_j)·y_k, with y_k = v_k + V_k·x."""
    slopes, offsets, values, carried = keys
    reach = math.sqrt(torch.finfo(x.dtype).max)
    x = torch.nan_to_num(x, nan=math.nan, posinf=reach, neginf=-reach)
    weights = weights_of(x, slopes, offsets, scale)
    each = values + carried * x.unsqueeze(-1)
    mean = (weights * each).sum(-1, keepdim=True)
    slope = (weights * carried).sum(-1) + (weights * slopes * (each - mean)).sum(-1)
    return mean.squeeze(-1) + x * slope if is_product else slope


def by_keys(x: Tensor, keys: Keys, is_product: bool) -> Tensor:
    """Return the attention of finite queries. The keys are the first axis, where torch's softmax is fast on CPUs."""
    slopes, offsets, values, carried = keys
    weights = torch.softmax(torch.addcmul(offsets[:, None], slopes[:, None], x), 0)
    y = (weights * carried[:, None]).sum(0).mul_(x) if bool(carried.any()) else torch.zeros_like(x)
    y = y.add_((weights * values[:, None]).sum(0)) if bool(values.any()) else y
    return y.mul_(x) if is_product else y


def by_keys_slope(x: Tensor, keys: Keys, is_product: bool) -> Tensor:
    slopes, offsets, values, carried = (key[:, None] for key in keys)
    weights = torch.softmax(torch.addcmul(offsets, slopes, x), 0)
    each = torch.addcmul(values, carried, x)
    mean = (weights * each).sum(0)
    slope = (weights * torch.addcmul(carried, slopes, each.sub_(mean))).sum(0)
    return slope.mul_(x).add_(mean) if is_product else slope


def in_blocks(run: Callable[[Tensor], Tensor], x: Tensor, num_keys: int) -> Tensor:
    """Compute run(x) for a flat x, in blocks of about SCORE_BYTES of scores."""
    size = SCORE_BYTES if x.is_cpu else SCORE_BYTES_ELSEWHERE
    step = max(1, size // (num_keys * x.element_size()))
    if len(x) <= step:
        return run(x)
    out = torch.empty_like(x)
    for start in range(0, len(x), step):
        out[start : start + step] = run(x[start : start + step])
    return out


def or_limits(fast: Callable[[Tensor], Tensor], limits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `fast`, and `limits` for blocks with infinite numbers or NaN. Only eager code runs it."""

    def run(x: Tensor) -> Tensor:
        y = fast(x)
        return y if torch.isfinite(y.sum()) else limits(x)

    return run


class Attend(torch.autograd.Function):
    """Attention of flat queries over constant keys, block by block. Backward recomputes the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keys: Keys, scale: float, is_product: bool, evaluation: Evaluation | None
    ) -> Tensor:
        ctx.save_for_backward(x, *keys)
        ctx.others = scale, is_product, evaluation

        def limits(x: Tensor) -> Tensor:
            return expression(x, keys, scale, is_product)

        if evaluation is None:
            return in_blocks(limits, x, len(keys[0]))
        if evaluation.num_plain_exponentials is not None:
            return plain.run(evaluation, keys, is_product, x, limits)
        return in_blocks(or_limits(lambda x: by_keys(x, keys, is_product), limits), x, len(keys[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, *stored = ctx.saved_tensors
        scale, is_product, evaluation = ctx.others
        keys: Keys = tuple(stored)

        def limits(x: Tensor) -> Tensor:
            return slope_expression(x, keys, scale, is_product)

        if torch.is_grad_enabled() or not is_eager(grads[0]):
            found = grads[0] * limits(x)
        elif evaluation is None:
            found = grads[0] * in_blocks(limits, x, len(keys[0]))
        elif evaluation.num_plain_exponentials is not None:
            found = plain.run_backward(evaluation, keys, is_product, x, grads[0], limits)
        else:
            run = or_limits(lambda x: by_keys_slope(x, keys, is_product), limits)
            found = grads[0] * in_blocks(run, x, len(keys[0]))
        return found, None, None, None, None


# --- compiled loops ---------------------------------------------------------------------------------------------------


def is_eager(x: Tensor) -> bool:
    """Whether x is a tensor with memory of its own, and nothing traces it or computes derivatives forwards."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and forward_ad._current_level < 0
        and torch._C._has_storage(x)  # tensors of torch.vmap have none
        and not x._is_zerotensor()
        and not x.is_neg()
    )


def same_layout(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the strides of `like`, whose elements fill their memory."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def fills_memory(x: Tensor) -> bool:
    """Return whether the elements of x fill their memory without overlaps."""
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()


def dense(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in memory that its elements fill, and an empty tensor of the same layout."""
    y = torch.empty_like(x)
    if y.stride() == x.stride():
        return x, y
    return x.contiguous(), y if y.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


class FusedAttend(torch.autograd.Function):
    """The compiled loops, with a gradient. Backward keeps x, or the output if that is enough."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: AttentionActivation, fused: ActivationLoops, inplace: bool) -> Tensor:
        if inplace:
            kept, y = x.clone(), x
            ctx.mark_dirty(x)
        else:
            kept, y = dense(x)
        fused.forward(kept.data_ptr(), y.data_ptr(), 0, y.numel())
        ctx.save_for_backward(y if fused.saves_output else kept)
        ctx.gate, ctx.fused = gate, fused
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (kept,), (grad,) = ctx.saved_tensors, grads
        fused, gate = ctx.fused, ctx.gate
        if torch.is_grad_enabled() or not is_eager(grad):
            if fused.saves_output:
                factor, first, last = (float(number) for number in fused.make_backward().numbers)
                return grad * (factor * ((kept - first) * (last - kept))), None, None, None
            slope = slope_expression(kept, gate.keys(kept), gate.scale, gate.solved.is_product)
            return grad * slope, None, None, None
        grad, found = same_layout(grad, kept), torch.empty_like(kept)
        fused.backward(kept.data_ptr(), found.data_ptr(), grad.data_ptr(), found.numel())
        return found, None, None, None


class PreparedKeys:
    """How a gate is evaluated, by dtype, with the keys it was made of. Copies of a gate begin without any."""

    def __init__(self) -> None:
        self.made: dict[torch.dtype, tuple[bytes, Evaluation]] = {}
        self.loops: dict[torch.dtype, tuple[Evaluation, ActivationLoops]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedKeys:
        return PreparedKeys()

    def __reduce__(self) -> tuple[type[PreparedKeys], tuple[()]]:
        return PreparedKeys, ()

    def evaluation(self, gate: AttentionActivation, dtype: torch.dtype) -> Evaluation:
        """Return the evaluation of the keys as they are stored now."""
        stored = [gate._buffers[name] for name in KEY_TENSORS]
        content = b"".join([ctypes.string_at(k.data_ptr(), 8 * k.numel()) for k in stored])  # type: ignore[union-attr]
        found = self.made.get(dtype)
        if found is None or found[0] != content:
            keys = {name: getattr(gate, name).numpy() for name in KEY_TENSORS}
            found = self.made[dtype] = (
                content,
                evaluation_of(keys, DTYPES[dtype], is_product=gate.solved.is_product),
            )
        return found[1]

    def get(self, gate: AttentionActivation, dtype: torch.dtype) -> ActivationLoops:
        """Return the compiled loops for the keys as they are stored now."""
        evaluation, found = self.evaluation(gate, dtype), self.loops.get(dtype)
        if found is None or found[0] is not evaluation:
            found = self.loops[dtype] = evaluation, ActivationLoops(evaluation, DTYPES[dtype])
        return found[1]


# --- modules ----------------------------------------------------------------------------------------------------------


def into(x: Tensor, gate: AttentionActivation) -> Tensor:
    """Write the activation of x into x."""
    return gate.write_into(x)


class AttentionActivation(nn.Module):
    """An activation of tensors of any shape. Its keys are buffers; `train_keys` makes them parameters."""

    slopes: Tensor
    offsets: Tensor
    values: Tensor
    carried: Tensor

    def __init__(self, solved: Solved, *, inplace: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        self.solved, self.inplace, self.scale = solved, inplace, scale_of(solved)
        self.entry: Replaced | None = None  # its line in the report
        self.prepared = PreparedKeys()
        for name, numbers in key_arrays(solved.keys).items():
            self.register_buffer(name, torch.tensor(numbers, device=device))

    def train_keys(self) -> AttentionActivation:
        """Turn the keys into parameters. Their proven error holds until they change."""
        for name in KEY_TENSORS:
            if (tensor := self._buffers.pop(name, None)) is not None:
                self.register_parameter(name, nn.Parameter(tensor))
        return self

    @property
    def evaluation(self) -> str:
        """How the activation is computed on a CPU, outside traces."""
        if self._parameters:
            return "softmax in torch"
        keys = {name: getattr(self, name).cpu().numpy() for name in KEY_TENSORS}
        return evaluation_text(keys, self.solved.dtypes[-1], is_product=self.solved.is_product)

    def keys(self, x: Tensor) -> Keys:
        """Return the keys in the dtype and on the device of x."""
        found = [getattr(self, name) for name in KEY_TENSORS]
        return tuple(key.to(x.device, x.dtype) for key in found)

    def forward(self, x: Tensor) -> Tensor:
        return self.write_into(x) if self.inplace else self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        """Return the activation of x, in the shape and dtype of x."""
        dtype = compute_dtype(x)
        return self.compute(x) if x.dtype == dtype else self.compute(x.to(dtype)).to(x.dtype)

    def write_into(self, x: Tensor) -> Tensor:
        """Write the activation of x into x. With gradients, the old x is copied first, because backward needs it."""
        is_transformed = not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x)
        needs_grad = (x.requires_grad or is_transformed) and torch.is_grad_enabled()
        if self.is_fused(x) and x.dtype == compute_dtype(x) and fills_memory(x):
            fused = self.prepared.get(self, x.dtype)
            if needs_grad:
                return FusedAttend.apply(x, self, fused, True)  # type: ignore[no-untyped-call]
            fused.forward(x.data_ptr(), x.data_ptr(), 0, x.numel())
            increment_version(x)
            return x
        return x.copy_(self.attend(x.clone() if needs_grad else x))

    def is_fused(self, x: Tensor) -> bool:
        """Whether compiled loops compute the activation of x."""
        is_constant = "slopes" in self._buffers and self.slopes.is_cpu
        return x.is_cpu and is_constant and type(self).compute is AttentionActivation.compute and _loops_run_on(x)

    def compute(self, x: Tensor) -> Tensor:
        """Return the activation of x, whose dtype is that of the result."""
        is_product = self.solved.is_product
        if x.is_cpu and "slopes" in self._buffers and self.slopes.is_cpu and _loops_run_on(x):
            fused = self.prepared.get(self, x.dtype)
            if x.requires_grad and torch.is_grad_enabled():
                return FusedAttend.apply(x, self, fused, False)  # type: ignore[no-untyped-call]
            x, y = dense(x)
            fused.forward(x.data_ptr(), y.data_ptr(), 0, x.numel())
            return y
        keys = self.keys(x)
        if torch.onnx.is_in_onnx_export():
            is_constant = self.solved.keys.carried is None and "carried" in self._buffers
            return exported(x, keys, is_product, is_constant)
        if is_eager(x) and not any(key.requires_grad for key in keys):
            is_constant = x.is_cpu and "slopes" in self._buffers and self.slopes.is_cpu
            evaluation = self.prepared.evaluation(self, x.dtype) if is_constant else None
            flat: Tensor = Attend.apply(x.reshape(-1), keys, self.scale, is_product, evaluation)  # type: ignore[no-untyped-call]
            return flat.reshape(x.shape)
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            with torch._C.DisableTorchFunction():  # no mode answers the functions of a gate
                return key_by_key(x, keys, self.scale, is_product)
        return expression(x, keys, self.scale, is_product)

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


def _loops_run_on(x: Tensor) -> bool:
    return is_eager(x) and kernels.is_available()


def two_slopes(x: Tensor, gate: AttentionActivation, weight: Tensor) -> Tensor:
    """Return x to the right of 0 and weight·x to the left. The gate is that of the ReLU, with two keys."""
    if torch.onnx.is_in_onnx_export():
        slopes, offsets, values, _ = gate.keys(x)
        left = weight.unsqueeze(-1)
        return exported(x, (slopes, offsets, values, torch.cat([left, torch.ones_like(left)], -1)))
    right = gate.compute(x)
    left = torch.nan_to_num(x - right, nan=0.0, posinf=math.inf, neginf=-math.inf)  # here ∞ − ∞ = 0
    return right + weight * left


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
        return two_slopes(given, self, weight).to(x.dtype)


class AttentionSoftsign(AttentionActivation):
    """Softsign in two layers: s = tanh(βx) by two keys and y = x·s, then s·A(y) with A(y) ≈ y/(1 + y)."""

    def __init__(self, solved: Solved, *, inplace: bool = False, device: torch.device | None = None) -> None:
        super().__init__(solved, inplace=inplace, device=device)
        assert solved.sign is not None
        self.sign = AttentionActivation(solved.sign_layer, device=device)

    def compute(self, x: Tensor) -> Tensor:
        sign = self.sign.compute(x)
        if torch.onnx.is_in_onnx_export():
            return exported_product(sign, super().compute(exported_product(x, sign)))
        return sign * super().compute(x * sign)


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
