"""Proven bounds of |converted − original| for all inputs of a box, from end to end."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from attnc.converting.activations import Solved, key_arrays
from attnc.converting.measuring import numbers
from attnc.converting.modules import DTYPES, HALVES, AttentionActivation, AttentionPReLU
from attnc.converting.propagation import (
    TORCH_ULPS,
    Norm,
    Reached,
    SelfAttention,
    activated,
    added,
    attended,
    linear,
    normed,
)
from attnc.converting.report import BlockOnBox, OnBox
from attnc.errors import InputError
from attnc.numerics.bound import Bound, Term
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LIBM_ASSUMPTION, engine_assumption, up
from attnc.targets.box import BoxLike
from attnc.targets.linear import feature_box

MAX_TOKENS = 128
"""Largest number of tokens of an input if no example shows it. It enters the rounding of attention alone."""
NORM_ASSUMPTION = (
    "a norm layer over n entries computes their mean, and the root of their mean square around it, to within "
    "gamma(2n + 16)*max|x|, as two passes over the entries do"
)
MAX_PARTS, MAX_AXES = 32, 4
"""Largest number of parts of a box, and of axes of a box that is divided. With more axes, 32 parts are hardly narrower
than the box."""
MAX_WEIGHTS = 2**21
"""Largest number of weights times parts: 32 parts of three layers of 128 units take about 5 s."""
FIRST_PARTS, LEAST_GAIN = 8, 0.9
"""If these parts do not lower the bound by a tenth, the box is not divided further."""
Gaps = tuple[float, float, float]
"""The largest gaps for each of `propagation.COMPARISONS`."""
SILENT = (nn.Dropout, nn.Dropout1d, nn.Identity)
"""Modules that do nothing in evaluation."""


def on_box(original: nn.Module, converted: nn.Module, box: BoxLike | tuple[float, float], example: Any = None) -> OnBox:
    """Bound |converted − original| on a box, where both are computed in the dtype of the model.

    The two modules have the same structure, and the same weights, which is checked.
    """
    walk = _Walk(original, converted, _dtype(original))
    tokens = _tokens(example)
    domain = feature_box(box, _width(original, example))
    x = Reached.of(Interval(domain.lo, domain.hi), walk.dtype, MAX_TOKENS if tokens is None else tokens)
    with quiet():
        y = walk.whole(x)
        # tokens of one sequence may lie in different parts, and only the errors of kinks are smaller in parts
        is_divided = "kink" in walk.kinds and "attention" not in walk.kinds
        reached = None if y is None else _in_parts(walk, Interval(domain.lo, domain.hi), x, y, is_divided=is_divided)
    assumptions = (engine_assumption(walk.dtype), LIBM_ASSUMPTION, *walk.assumptions())
    stated = (str(domain) if not _is_pair(box) else f"[{box[0]:g}, {box[1]:g}]^{domain.d}", x.tokens, walk.dtype)  # type: ignore[index]
    if reached is None:
        return OnBox(*stated, None, None, walk.vacuous_at, tuple(walk.blocks), assumptions)
    terms, width = _terms(reached[0], walk.dtype), float(up(reached[1].width).max())
    where = walk.vacuous_at if terms.value >= width else None
    return OnBox(*stated, terms, width, where, tuple(walk.blocks), assumptions)


def _is_pair(box: Any) -> bool:
    return isinstance(box, tuple) and len(box) == 2 and all(isinstance(end, int | float) for end in box)


def _in_parts(walk: _Walk, box: Interval, x: Reached, y: Reached, *, is_divided: bool) -> tuple[Gaps, Interval]:
    """Halve the part of the box with the largest bound, again and again. Return the largest gaps, and the range.

    `y` is the output for the whole box. Unless `is_divided`, its gaps and range are returned.

    In a smaller part fewer units can be at their kinks, where the errors of ReLUs are.
    """
    parts, started = [(_gaps(y), y.within, box)], _total(_gaps(y))
    most = min(MAX_PARTS, MAX_WEIGHTS // max(1, sum(each.numel() for each in walk.original.parameters())))
    while is_divided and len(parts) < most and len(box) <= MAX_AXES:
        parts.sort(key=lambda part: _total(part[0]))
        whole = _total(parts[-1][0])
        if not whole or (len(parts) == FIRST_PARTS and whole > LEAST_GAIN * started):
            break
        *parts, (_, _, widest) = parts
        axis = int(np.argmax(widest.width / np.where(box.width > 0, box.width, math.inf)))
        middle = float(widest.mid[axis])
        if not widest.lo[axis] < middle < widest.hi[axis]:
            return _gaps(y), y.within
        for first, last in ((widest.lo[axis], middle), (middle, widest.hi[axis])):
            lo, hi = widest.lo.copy(), widest.hi.copy()
            lo[axis], hi[axis] = first, last
            part = Interval(lo, hi)
            reached = walk.whole(Reached.of(part, x.dtype, x.tokens))
            if reached is None:
                return _gaps(y), y.within
            parts.append((_gaps(reached), reached.within, part))
    largest = tuple(max(sizes) for sizes in zip(*(gaps for gaps, _, _ in parts), strict=True))
    lows, highs = (np.array([getattr(within, end) for _, within, _ in parts]) for end in ("lo", "hi"))
    return (largest[0], largest[1], largest[2]), Interval(lows.min(axis=0), highs.max(axis=0))


def _gaps(y: Reached) -> Gaps:
    conversion, computed, original = (float(gap.size.max(initial=0.0)) for gap in y.gaps)
    return conversion, computed, original


def _total(gaps: Gaps) -> float:
    conversion, computed, original = gaps
    return max(conversion, computed) + original


def _terms(gaps: Gaps, dtype: str) -> Bound:
    """Return the terms of the bound. The first two together are at least the gap of the converted network."""
    conversion, computed, original = gaps
    return Bound(
        (
            Term("conversion", conversion, "attention for activations, in exact arithmetic"),
            Term("rounding of the converted", float(up(max(0.0, computed - conversion))), dtype),
            Term("rounding of the original", original, dtype),
        )
    )


class _NotFinite(Exception):
    """A range or a gap is not finite, so that nothing can be said beyond it."""


@dataclass(eq=False)
class _Walk:
    """A walk through both models, in the order in which they compute."""

    original: nn.Module
    converted: nn.Module
    dtype: str
    vacuous_at: str | None = None  # the first place where a gap is as wide as the values
    blocks: list[BlockOnBox] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    def whole(self, x: Reached) -> Reached | None:
        """Carry x through the model. Return None if a range or a gap is not finite."""
        try:
            self.mark("", x)
            return self.through("", x)
        except _NotFinite:
            return None

    def mark(self, path: str, x: Reached) -> Reached:
        """Return x, after noting whether the gaps are still smaller than the range."""
        gap = max(float(gap.size.max(initial=0.0)) for gap in x.gaps)
        if self.vacuous_at is None and not gap < float(x.within.width.max(initial=0.0)) and gap > 0:
            self.vacuous_at = path
        if not x.is_finite:
            self.vacuous_at = path if self.vacuous_at is None else self.vacuous_at
            raise _NotFinite
        return x

    def part(self, path: str) -> Any:
        """Return the module of the converted model."""
        return self.converted.get_submodule(path)

    def through(self, path: str, x: Reached) -> Reached:
        """Carry x through the module at this path."""
        module = self.original.get_submodule(path)
        return self.mark(path, self._rule(module, path)(x))

    def _rule(self, module: nn.Module, path: str) -> Callable[[Reached], Reached]:
        made = self.part(path)
        if isinstance(module, SILENT):
            return lambda x: x
        if isinstance(made, AttentionActivation):
            self.kinds |= {"kink"} if made.solved.method == "closed form" and made.solved.error else set()
            return lambda x: activated(x, _proved(made, path), self._weight(made, x, path))
        if isinstance(module, nn.Linear):
            return lambda x: self._linear(module, path, x)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return lambda x: normed(x, self._norm(module, path))
        if isinstance(module, nn.MultiheadAttention):
            return lambda x: attended(x, self._attention(module, path))
        if isinstance(module, nn.TransformerEncoderLayer):
            return lambda x: self._encoder_layer(module, path, x)
        if isinstance(module, nn.Sequential):
            return lambda x: self._chain([_joined(path, name) for name in module._modules], x)
        if isinstance(module, nn.TransformerEncoder):
            return lambda x: self._encoder(module, path, x)
        return lambda x: self._traced(module, path, x)

    def _weight(self, made: AttentionActivation, x: Reached, path: str) -> np.ndarray | None:
        if not isinstance(made, AttentionPReLU):
            return None
        if made.weight.numel() > 1 and "attention" in self.kinds:
            raise _unknown(path, "a PReLU with a weight per channel takes the axis of the tokens for channels")
        return np.broadcast_to(numbers(made.weight), x.within.shape)

    def _chain(self, paths: Sequence[str], x: Reached) -> Reached:
        for path in paths:
            x = self.through(path, x)
        return x

    def _linear(self, module: nn.Linear, path: str, x: Reached) -> Reached:
        self._same(module, path, "weight", "bias")
        W = numbers(module.weight)
        if W.shape[1] != len(x.within):
            raise _unknown(path, f"it takes {W.shape[1]} features, and {len(x.within)} arrive")
        return linear(x, W, np.zeros(len(W)) if module.bias is None else numbers(module.bias))

    def _norm(self, module: nn.LayerNorm | nn.RMSNorm, path: str) -> Norm:
        self._same(module, path, "weight", "bias")
        self.kinds.add("norm")
        if len(module.normalized_shape) != 1:
            raise _unknown(path, "it is normalised over several axes")
        n, bias = module.normalized_shape[0], getattr(module, "bias", None)
        eps = torch.finfo(_TORCH[self.dtype]).eps if module.eps is None else module.eps
        gain = np.ones(n) if module.weight is None else numbers(module.weight)
        return Norm(gain, np.zeros(n) if bias is None else numbers(bias), eps, isinstance(module, nn.LayerNorm))

    def _attention(self, module: nn.MultiheadAttention, path: str) -> SelfAttention:
        self.kinds.add("attention")
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise _unknown(path, "it has widths of its own for keys and values, or constant keys")
        self._same(module, path, "in_proj_weight", "in_proj_bias")
        self._same(module.out_proj, _joined(path, "out_proj"), "weight", "bias")
        n, bias, last = module.embed_dim, module.in_proj_bias, module.out_proj.bias
        W_Q, W_K, W_V = np.split(numbers(module.in_proj_weight), 3)
        b_Q, b_K, b_V = np.split(np.zeros(3 * n) if bias is None else numbers(bias), 3)
        return SelfAttention(
            *(W_Q, W_K, W_V, b_Q, b_K, b_V),
            numbers(module.out_proj.weight),
            np.zeros(n) if last is None else numbers(last),
            module.num_heads,
        )

    def _encoder_layer(self, module: nn.TransformerEncoderLayer, path: str, x: Reached) -> Reached:
        """Carry x through torch's layer, with the norms first or last."""

        def part(x: Reached, *names: str) -> Reached:
            return self._chain([_joined(path, name) for name in names], x)

        def activation(x: Reached) -> Reached:
            name = _joined(path, "activation")
            made = self.part(name)
            if not isinstance(made, AttentionActivation):
                raise _unknown(name, "it was not converted")
            return self.mark(name, activated(x, _proved(made, name), self._weight(made, x, name)))

        def feed_forward(x: Reached) -> Reached:
            return part(activation(part(x, "linear1")), "linear2")

        if module.norm_first:
            x = added(x, part(x, "norm1", "self_attn"))
            return added(x, feed_forward(part(x, "norm2")))
        x = part(added(x, part(x, "self_attn")), "norm1")
        return part(added(x, feed_forward(x)), "norm2")

    def _encoder(self, module: nn.TransformerEncoder, path: str, x: Reached) -> Reached:
        """Carry x through all layers. Every layer also gets a bound of its own, for equal inputs to both models."""
        composed: Reached | None = x
        for name in module.layers._modules:
            layer = _joined(path, f"layers.{name}")
            if composed is not None:
                try:
                    composed = self.through(layer, composed)
                except _NotFinite:
                    composed = None
            kept = self.vacuous_at
            try:
                x = self.through(layer, x.exact_again())
            except _NotFinite:
                self.blocks.append(BlockOnBox(layer, None, None, None))
                raise
            finally:
                self.vacuous_at = kept
            width = float(up(x.within.width).max())
            alone, together = (None if y is None else _terms(_gaps(y), self.dtype).value for y in (x, composed))
            if together is not None and together >= width:
                together = None
            useful = alone if alone is not None and alone < width else None
            self.blocks.append(BlockOnBox(layer, useful, together, width))
        if composed is None:
            raise _NotFinite
        return composed if module.norm is None else self.through(_joined(path, "norm"), composed)

    def _traced(self, module: nn.Module, path: str, x: Reached) -> Reached:
        """Carry x through a module of another class, if its code calls modules and adds their results."""
        try:
            graph = _Tracer().trace(module)
        except Exception as error:  # a tracer runs the module's own code, which may raise anything
            raise _unknown(path, f"{type(module).__name__} cannot be traced ({type(error).__name__})") from error
        known: dict[fx.Node, Reached] = {}
        for node in graph.nodes:
            if node.op == "placeholder" and not known:
                known[node] = x
            elif node.op == "output" and isinstance(node.args[0], fx.Node):
                return known[node.args[0]]
            elif not all(given in known for given in node.all_input_nodes) or node.kwargs:
                raise _unknown(path, f"{node.target} has other arguments than the results of earlier layers")
            elif node.op == "call_module" and len(node.args) == 1:
                known[node] = self.through(_joined(path, str(node.target)), known[node.args[0]])
            elif node.op == "call_function" and node.target in (operator.add, torch.add) and len(node.args) == 2:
                a, b = node.args
                if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or len(known[a].within) != len(
                    known[b].within
                ):
                    raise _unknown(path, "it adds other things than the results of two layers of one width")
                known[node] = self.mark(path, added(known[a], known[b]))
            else:
                raise _unknown(path, f"{type(module).__name__} calls {node.target}, for which there is no rule")
        raise _unknown(path, f"{type(module).__name__} does not return one tensor")

    def _same(self, module: nn.Module, path: str, *names: str) -> None:
        """Raise InputError unless the converted model has the same tensors."""
        made = self.part(path)
        for name in names:
            before, after = getattr(module, name, None), getattr(made, name, None)
            if (before is None) != (after is None) or (before is not None and not torch.equal(before, after)):  # type: ignore[arg-type]
                raise InputError(f"{path}.{name} is not the same in the two models: the bound needs equal weights")

    def assumptions(self) -> Iterator[str]:
        yield f"torch's own activations are within {TORCH_ULPS} ulp of max(1, |x|, |f(x)|)"
        if "norm" in self.kinds:
            yield NORM_ASSUMPTION
        if "attention" in self.kinds:
            yield "every query sees at least one key, and no score is masked by a finite number"


_TORCH = {name: dtype for dtype, name in DTYPES.items() if dtype not in HALVES}


class _Tracer(fx.Tracer):
    """A tracer that stops at every module of torch, and at every module within the one that it traces."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _proved(made: AttentionActivation, path: str) -> Solved:
    """Return the keys of a gate with their proof, if these are the keys that the module has."""
    for name, proved in key_arrays(made.solved.keys).items():
        if not np.array_equal(numbers(getattr(made, name)), proved):
            raise InputError(f"{path}: its {name} are not those that were proved; convert the model again")
    return made.solved


def _unknown(path: str, reason: str) -> InputError:
    return InputError(
        f"no bound on the box: {path or 'the model'}: {reason}. There are rules for Linear, activations, LayerNorm, "
        "RMSNorm, Dropout, Sequential, residual sums and TransformerEncoder(Layer). Leave box out to convert it."
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _dtype(module: nn.Module) -> str:
    found = {tensor.dtype for tensor in module.parameters()}
    if len(found) != 1 or found & set(HALVES):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found)) or "none"
        raise InputError(f"a bound on a box needs parameters of one dtype, float32 or float64; found {names}")
    return DTYPES[found.pop()]


def _tokens(example: Any) -> int | None:
    x = _first(example)
    return None if x is None or x.ndim < 2 else max(x.shape[:-1])


def _width(module: nn.Module, example: Any) -> int:
    """Return the number of features: that of the example, or of the first module that tells it."""
    if (x := _first(example)) is not None and x.ndim:
        return int(x.shape[-1])
    for part in module.modules():
        if isinstance(part, nn.Linear):
            return part.in_features
        if isinstance(part, nn.LayerNorm | nn.RMSNorm):
            return int(part.normalized_shape[-1])
        if isinstance(part, nn.MultiheadAttention):
            return part.embed_dim
    raise InputError("give example= with the box: no module tells the number of features of an input")


def _first(example: Any) -> Tensor | None:
    x = example[0] if isinstance(example, tuple) and example else example
    return x if isinstance(x, Tensor) and x.is_floating_point() else None
