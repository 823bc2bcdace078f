"""Every nonlinear operator that a run of a model reaches: by attention, kept on purpose, or left and named.

torch dispatches every operator to `Inventory`, whichever call starts it: TorchScript and `torch.ops` too. It follows
which tensors depend on the data, from the inputs and embeddings on. A function of weights, positions or counts alone is
no nonlinearity of the model. Operators whose results do not reach the outputs are not counted: arithmetic that turned
out to be an activation leaves such results behind.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from attnc.converting.blocks import BlockErrors, memory_of, tensors_of
from attnc.converting.modules import AttentionActivation
from attnc.converting.recognising import GUARD, HUGE, READERS

ACTIVATIONS = {
    *(set(READERS) - {"clamp", "clip", "clamp_min", "clamp_max"}),
    *("log_sigmoid_forward", "_prelu_kernel", "rrelu_with_noise", "special_erf", "_transformer_encoder_layer_fwd"),
    *(
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "mkldnn_rnn_layer",
    ),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "celu", "selu"),
}
"""The names of torch's kernels that compute activations."""
ELEMENTWISE = {
    *(
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "logaddexp",
        "logaddexp2",
        "sqrt",
        "rsqrt",
        "reciprocal",
    ),
    *("pow", "sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "asinh", "acosh", "atanh", "atan2", "sinc", "erfc"),
    *("erfinv", "lgamma", "digamma", "logit", "sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "fmod"),
    *("remainder", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "heaviside", "i0"),
    *("special_i0", "special_i1", "special_ndtr", "special_log_ndtr", "hypot", "copysign", "xlogy", "nan_to_num"),
}
"""Nonlinear functions of single entries that are no activations by their name."""
LINEAR = {
    *(
        "add",
        "sub",
        "rsub",
        "neg",
        "sum",
        "mean",
        "cumsum",
        "cat",
        "stack",
        "select",
        "slice",
        "split",
        "chunk",
        "view",
    ),
    *(
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "expand",
        "squeeze",
        "unsqueeze",
        "clone",
        "copy",
        "alias",
    ),
    *("_to_copy", "to", "contiguous", "detach", "index", "index_select", "gather", "scatter", "scatter_add", "flip"),
    *("index_add", "index_put", "index_copy", "roll", "tril", "triu", "diagonal", "repeat", "repeat_interleave", "pad"),
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d", "unfold", "im2col", "col2im"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
    *("upsample_nearest2d", "upsample_nearest1d", "upsample_bilinear2d", "upsample_bicubic2d", "unbind", "lerp"),
    *("split_with_sizes", "as_strided", "narrow", "movedim", "squeeze_", "lift_fresh", "embedding", "zeros_like"),
    *(
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_empty",
        "new_ones",
        "new_full",
        "fill",
        "zero",
        "resize",
    ),
    *(
        "native_dropout",
        "bernoulli",
        "uniform",
        "normal",
        "_reshape_alias",
        "view_as_complex",
        "view_as_real",
        "pixel_shuffle",
    ),
    *("pixel_unshuffle", "channel_shuffle", "addcmul", "addcdiv", "cumsum", "logical_not", "logical_and", "logical_or"),
    *(
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "eq",
        "ne",
        "isnan",
        "isinf",
        "isfinite",
        "any",
        "all",
        "item",
        "size",
    ),
    *(
        "_local_scalar_dense",
        "is_same_size",
        "masked_scatter",
        "_nested_tensor_from_mask",
        "nonzero",
        "equal",
        "record_stream",
    ),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c", "real", "imag", "conj", "_conj", "trace", "scatter_reduce", "prims_convert"),
    *("_is_all_true", "_is_any_true", "sym_size", "sym_stride", "numel", "dim", "_has_same_storage_numel"),
    *(
        "_assert_async",
        "_assert_tensor_metadata",
        "unsafe_split",
        "unsafe_chunk",
        "hstack",
        "vstack",
        "rand_like",
        "randn_like",
    ),
}
"""Operators that are linear in the data, or read it without changing values of the model."""
CONSTRUCTORS = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
}
"""Operators that take only the shape of the data."""
PRODUCTS = {
    "mul",
    "mm",
    "bmm",
    "matmul",
    "addmm",
    "baddbmm",
    "einsum",
    "dot",
    "mv",
    "square",
    "prod",
    "linear",
    "_grouped_mm",
    "linalg_cross",
}
"""Operators that are linear in each factor. With two factors of data they are products, as in attention and gates."""
CONVOLUTIONS = {
    "convolution",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "_mkldnn_convolution",
    "mkldnn_convolution",
}
REDUCTIONS = {
    *("sum", "mean", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "amax", "amin", "max", "min"),
    *("logsumexp", "_linalg_svd", "aminmax"),
}
"""Operators whose result over an axis may normalise the data."""
KEPT = {
    **dict.fromkeys(("_softmax", "softmax", "_log_softmax", "log_softmax", "logsumexp", "_safe_softmax"), "softmax"),
    **dict.fromkeys(
        ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit_no_training"),
        "normalisation",
    ),
    **dict.fromkeys(
        ("_native_batch_norm_legit", "cudnn_batch_norm", "_fused_rms_norm", "rms_norm", "batch_norm"), "normalisation"
    ),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"), "normalisation"),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_attention_math",
            "_native_multi_head_attention",
        ),
        "attention",
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "scaled_dot_product_attention",
        ),
        "attention",
    ),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d", "max_pool1d", "adaptive_max_pool2d"), "max pooling"),
    **dict.fromkeys(("amax", "amin", "max", "min", "aminmax"), "largest entries"),
    **dict.fromkeys(("topk", "sort", "argmax", "argmin", "argsort", "kthvalue", "median"), "choice of entries"),
    **dict.fromkeys(("searchsorted", "bucketize", "histc"), "choice of entries"),
}
"""Operator → the kind of nonlinearity that stays on purpose."""


@dataclass
class Fact:
    """The origin of a tensor: its operators, and whether it is a reduction, or numbers of chosen entries."""

    number: int
    is_reduced: bool = False
    is_choice: bool = False


@dataclass(frozen=True)
class Found:
    """A nonlinear operator of a run."""

    kind: str  # "left", or the kind that is kept
    operator: str
    path: str
    place: str  # file and line of the code that calls it


class Inventory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the nonlinear operators on data. `with inventory.watching(model, ours):` around a run."""

    def __init__(self, inputs: Iterable[Tensor] | None, blocks: BlockErrors | None = None) -> None:
        """Without inputs, the tensors with which code outside the model calls it are the data."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.facts: Any = WeakIdKeyDictionary()
        self.written: dict[int, Fact] = {}  # the memory of a tensor → the last result that was written there
        self.parents: list[tuple[int, ...]] = []  # operator → those whose results it takes
        self.found: dict[int, Found] = {}
        self.paths: list[str] = [""]
        self.depth = 0  # inside a module that computes by attention
        self.blocks = blocks
        self.has_inputs = inputs is not None
        for tensor in inputs or ():
            self.facts[tensor] = Fact(self._new(()))

    def _new(self, parents: Iterable[int]) -> int:
        self.parents.append(tuple(parents))
        return len(self.parents) - 1

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*args, **options)
        if self.depth:
            return result
        schema = function._schema
        if not any(returned.alias_info is not None for returned in schema.returns):
            for tensor in tensors_of(result):
                self.written.pop(memory_of(tensor), None)  # new memory, where another tensor may have been before
                if self.blocks is not None:
                    self.blocks.written.pop(memory_of(tensor), None)
        given = [(tensor, fact) for tensor in tensors_of((args, options)) for fact in self.facts_of(tensor)]
        known = [fact for _, fact in given]
        spelled = function.overloadpacket.__name__
        name = spelled.removesuffix("_") if not spelled.endswith("__") else spelled
        if name == "embedding":
            known = [*known, Fact(self._new(()))]
        if not known:
            return result
        if name in CONSTRUCTORS:
            return result
        data = list({id(tensor): tensor for tensor, _ in given}.values())
        is_reduced = all(fact.is_reduced for fact in known) or name in REDUCTIONS
        is_choice = all(fact.is_choice for fact in known)
        number = self._new(fact.number for fact in known)
        kind = self._kind(name, args, data, known)
        if kind is not None:
            self.found[number] = Found(kind, name, self.paths[-1], _place())
        for tensor in tensors_of(result):
            is_index = KEPT.get(name) == "choice of entries" and not tensor.is_floating_point()
            self.facts[tensor] = Fact(number, is_reduced, is_choice or is_index)
        if self.blocks is not None:
            written = [
                tensor
                for argument, tensor in zip(schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(tensor, Tensor)
            ]
            self.blocks.step(name, args, options, result, self.paths[-1], self.is_data, written)
        if schema.is_mutable:  # a view that is written changes the tensor that it is a view of
            for argument, tensor in zip(schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for changed in tensors_of(tensor):
                        self.facts[changed] = Fact(number, is_reduced, is_choice)
                        self.written[memory_of(changed)] = Fact(number, is_reduced, is_choice)
        return result

    def is_data(self, x: Any) -> bool:
        return isinstance(x, Tensor) and bool(self.facts_of(x))

    def facts_of(self, tensor: Tensor) -> list[Fact]:
        """Return the origins of a tensor, and of the last result that was written into its memory."""
        found = (self.facts.get(tensor), self.written.get(memory_of(tensor)) if self.written else None)
        return [fact for fact in found if fact is not None]

    def _kind(self, name: str, args: Any, data: list[Tensor], known: list[Fact]) -> str | None:
        """Return the kind of a nonlinearity, or None if the operator is linear in the data."""
        is_float = any(tensor.is_floating_point() for tensor in data)
        if not is_float and name not in ("where", "masked_fill"):
            return None  # choices and comparisons were counted where they were made
        if name in ("gt", "lt", "ge", "le"):
            return "left"
        if name in ACTIVATIONS:
            return "normalisation" if all(fact.is_reduced for fact in known) and name == "abs" else "left"
        if name in KEPT:
            return KEPT[name]
        if name == "div":
            return self._division(args)
        if name == "pow":
            exponent = args[1] if len(args) > 1 else None
            if isinstance(exponent, int | float) and exponent == int(exponent) and exponent >= 0:
                return "product" if exponent > 1 else None
        if name in ELEMENTWISE:
            if all(fact.is_reduced for fact in known):
                return "normalisation"
            return _clamp_kind(name, args)
        if name in ("where", "masked_fill"):
            condition = args[0] if name == "where" else args[1]
            chosen_by = self.facts_of(condition)
            if chosen_by and all(fact.is_choice for fact in chosen_by):
                return "choice of entries"
            return "left" if chosen_by else None
        if name in PRODUCTS or name in CONVOLUTIONS:
            return "product" if len(data) > 1 or name in ("square", "prod") else None
        return None if name in LINEAR else name

    def _division(self, args: Any) -> str | None:
        divisor = self.facts_of(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else []
        if not divisor:
            return None
        return "normalisation" if all(fact.is_reduced for fact in divisor) else "left"

    def reached(self, outputs: Iterable[Tensor]) -> list[Found]:
        """Return the nonlinear operators on which the outputs depend, in the order of the run.

        If no output is known, for example because it is a number, those are all operators of the run.
        """
        waiting = [fact.number for tensor in outputs for fact in self.facts_of(tensor)] or list(self.found)
        seen = set(waiting)
        while waiting:
            for parent in self.parents[waiting.pop()]:
                if parent not in seen:
                    seen.add(parent)
                    waiting.append(parent)
        return [found for number, found in sorted(self.found.items()) if number in seen]

    @contextlib.contextmanager
    def watching(self, model: nn.Module, ours: Iterable[nn.Module]) -> Iterator[Inventory]:
        """Record a run of the model. Modules of `ours` compute by attention: nothing inside them is recorded."""
        by_attention = set(ours)
        with contextlib.ExitStack() as hooks:
            for path, module in model.named_modules():
                is_ours = module in by_attention

                def before(
                    module: nn.Module, args: Any, options: Any, path: str = path, is_ours: bool = is_ours
                ) -> None:
                    for tensor in tensors_of((args, options)):
                        is_new = len(self.paths) == 1 and not self.has_inputs and not self.facts_of(tensor)
                        if is_new and tensor.is_floating_point():
                            self.facts[tensor] = Fact(self._new(()))
                    self.paths.append(path)
                    self.depth += is_ours

                def after(module: nn.Module, args: Any, options: Any, out: Any, is_ours: bool = is_ours) -> None:
                    self.paths.pop()
                    self.depth -= is_ours
                    if self.blocks is not None and isinstance(module, AttentionActivation) and module.entry is not None:
                        self.blocks.gate(module.solved, module.entry, args[0], out)
                    elif self.blocks is not None and is_ours:
                        self.blocks.unknown(args, out)
                    if is_ours and not self.depth:
                        known = [fact.number for x in tensors_of(args) for fact in self.facts_of(x)]
                        if known:
                            number = self._new(known)
                            for tensor in tensors_of(out):
                                self.facts[tensor] = Fact(number)

                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            with self:
                yield self


def _clamp_kind(name: str, args: Any) -> str | None:
    """Return None for bounds that only replace infinities, "guard" for those against a division by 0, else "left"."""
    if name == "nan_to_num":
        return None
    if name in ("clamp", "clip", "clamp_min", "clamp_max"):
        lo = args[1] if len(args) > 1 and name != "clamp_max" else None
        hi = args[2] if len(args) > 2 else args[1] if name == "clamp_max" else None
        bounds = [bound for bound in (lo, hi) if bound is not None]
        if all(isinstance(bound, int | float) and abs(bound) >= HUGE for bound in bounds):
            return None
        if hi is None and isinstance(lo, int | float) and 0 < lo <= GUARD:
            return "guard"
    return "left"


def _place() -> str:
    """Return file and line of the innermost code that is neither torch's nor ours."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "attnc", "contextlib"):
            path = Path(frame.f_code.co_filename)
            return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def counted(found: Iterable[Found]) -> Counter[str]:
    """Return how often each kind that is kept occurs."""
    return Counter(each.kind for each in found if each.kind != "left")
