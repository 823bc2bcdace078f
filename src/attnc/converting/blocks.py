"""Proven errors of blocks in which an activation is multiplied by data: SwiGLU, GEGLU, the clipped gates of gpt-oss.

The error of act(g(x))·up(x), seen through a linear map W₂, is at most ‖|W₂|‖_∞·δ·max|up(x)|. The last factor is bounded
for all inputs if x comes from a norm layer: its output is y = g·t + b with |t|₂ ≤ √n, so that

    |(W·y + c)_j| ≤ √n·|W_j∘g|₂ + |W_j·b + c_j|.

`BlockErrors` follows one run, operator by operator: upper bounds of entries, and how often the error of each activation
counts in them. Where a factor has no bound, its size on the example stands for it, and the result is no proof. The same
holds where an error also arrives by operators without a rule here, such as a mean, or by a view that is written.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attnc.converting.activations import Solved, key_arrays
from attnc.converting.report import Replaced
from attnc.numerics.arrays import Float

ROOM = 1 + 2.0**-30
"""Factor for the rounding of sums in float64. They have fewer than 2²⁰ terms of one sign."""
SAME = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "permute",
        "slice",
        "select",
        "split",
        "chunk",
        "expand",
        "squeeze",
    ),
    *(
        "unsqueeze",
        "clone",
        "_to_copy",
        "alias",
        "detach",
        "t",
        "index",
        "split_with_sizes",
        "unbind",
        "flip",
        "contiguous",
    ),
    *("index_select", "narrow", "unsafe_split", "as_strided", "repeat"),
}
"""Operators whose results have the entries of their first argument."""
LINEAR = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "_grouped_mm": (0, 1), "linear": (0, 1)}
"""Operator → the places of its input and its matrix. That of `linear` is transposed."""


@dataclass(frozen=True)
class InputBall:
    """Vectors g·t + b along the last axis, with |t|₂ ≤ √n."""

    g: Float[np.ndarray, " n"]
    b: Float[np.ndarray, " n"]


@dataclass(frozen=True)
class Share:
    """How often the error of an activation counts: a proven bound, if there is one, and the value on the example."""

    proven: float | None
    seen: float

    def __add__(self, other: Share) -> Share:
        both = self.proven is not None and other.proven is not None
        return Share(self.proven + other.proven if both else None, self.seen + other.seen)  # type: ignore[operator]

    def times(self, proven: float | None, seen: float) -> Share:
        return Share(None if self.proven is None or proven is None else self.proven * proven, self.seen * seen)


@dataclass(eq=False)
class Known:
    """Properties of a tensor. `bound` returns an upper bound of its entries, or None; it is computed if needed."""

    bound: Callable[[], float | None] = lambda: None
    shares: dict[int, Share] = field(default_factory=dict)  # id of an entry of the report → how often its error counts
    unfollowed: frozenset[int] = frozenset()  # the ids of entries whose error also arrives in an unknown way
    difference: tuple[Tensor, Tensor] | None = None  # the tensors of which it is the difference
    ball: InputBall | None = None
    square_of: tuple[str, Tensor] | None = None  # a step of a norm: ("square" | "mean" | "inverse", the vector)

    @cached_property
    def size(self) -> float | None:
        return self.bound()

    @property
    def entries(self) -> frozenset[int]:
        """The ids of all entries whose error may be in the tensor."""
        return self.unfollowed.union(self.shares)


def numbers(tensor: Tensor) -> Float[np.ndarray, "*shape"]:
    return np.asarray(tensor.detach().double().cpu().numpy())


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and nested tensors
        return id(tensor)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, from all containers in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)


def column_sums(W: Tensor, is_transposed: bool) -> float:
    """Return the largest sum of absolute values over the inputs of a matrix, or of several."""
    return float(np.abs(numbers(W)).sum(axis=-1 if is_transposed else -2).max(initial=0.0)) * ROOM


class BlockErrors:
    """The bounds of one run. `entries` are the lines of the report by their id."""

    def __init__(self, entries: dict[int, Replaced]) -> None:
        self.entries = entries
        self.readers: dict[int, set[str]] = {}  # id of an entry → the paths of modules whose matrices take its output
        self.unproven = set[int]()  # the ids of entries whose error is multiplied by a factor without a bound
        self.known: Any = WeakIdKeyDictionary()  # tensor → what is known of it, and the number of writes before
        self.num_writes = 0
        self.written: dict[int, tuple[int, frozenset[int]]] = {}  # memory → its last write, and the entries written

    def of(self, x: Any) -> Known:
        if not isinstance(x, Tensor):
            return Known()
        found, at = self.known.get(x, (Known(), -1))
        last, entries = self.written.get(memory_of(x), (-1, frozenset()))
        return found if at >= last else Known(unfollowed=found.entries | entries)

    def note(self, x: Tensor, known: Known) -> None:
        self.known[x] = known, self.num_writes

    def write(self, x: Tensor, before: Known) -> None:
        """Note that an operator has written into the tensor. Facts about its views do not hold any more."""
        after = self.of(x)
        self.num_writes += 1
        _, entries = self.written.get(memory_of(x), (-1, frozenset()))
        self.written[memory_of(x)] = self.num_writes, entries | before.entries | after.entries
        self.note(x, after)

    def gate(self, solved: Solved, entry: Replaced, x: Tensor, y: Tensor) -> None:
        """Note the output of an activation."""
        before = self.of(x)
        steepest = solved.lipschitz if math.isfinite(solved.lipschitz) else None
        shares = {number: share.times(steepest, steepest or 1.0) for number, share in before.shares.items()}
        shares[id(entry)] = shares.get(id(entry), Share(0.0, 0.0)) + Share(1.0, 1.0)

        def bound() -> float | None:
            keys = key_arrays(solved.keys)
            flat = solved.keys.carried is None or not keys["carried"].any()
            if flat:  # a mean of the values
                return float(np.abs(keys["values"]).max()) * ROOM + solved.error
            if solved.activation.name in ("hardtanh", "relu6"):
                ends = keys["values"][keys["carried"] == 0]
                return float(np.abs(ends).max()) * ROOM + solved.error
            at_zero = float(np.abs(solved.keys(np.zeros((1, 1)))).max())
            if before.size is None or steepest is None:
                return None
            return (at_zero + 2 * solved.error + steepest * before.size) * ROOM

        self.note(y, Known(bound, shares, before.unfollowed))
        if y is x:
            self.write(y, before)

    def unknown(self, given: Any, out: Any) -> None:
        """Note the output of a module in which nothing is followed."""
        entries = frozenset().union(*(self.of(x).entries for x in tensors_of(given)))
        for x in tensors_of(out) if entries else ():
            self.note(x, Known(unfollowed=entries))

    def step(
        self,
        name: str,
        args: Any,
        options: Any,
        result: Any,
        path: str,
        is_data: Callable[[Any], bool],
        written: Sequence[Tensor] = (),
    ) -> None:
        """Note the result of an operator that the module at this path calls. It has written into some arguments."""
        before = [(x, self.of(x)) for x in written]
        entries = frozenset().union(*(self.of(x).entries for x in tensors_of((args, options))))
        self._follow(name, args, options, result, path, is_data)
        for x, known in before:
            if self.of(x) is known:  # there is no rule
                self.note(x, Known(unfollowed=known.entries | entries))
            self.write(x, known)
        place = LINEAR[name][1] if name in LINEAR else 1
        is_end = (name in LINEAR or name == "convolution") and not is_data(args[place])
        for part in tensors_of(result) if entries and not is_end else ():
            known = self.of(part)
            if not entries <= known.entries:
                self.note(part, replace(known, unfollowed=known.unfollowed | entries.difference(known.shares)))

    def _follow(
        self, name: str, args: Any, options: Any, result: Any, path: str, is_data: Callable[[Any], bool]
    ) -> None:
        if name in SAME and isinstance(args[0], Tensor):
            before = self.of(args[0])
            if not is_data(args[0]):  # the data choose entries of a constant
                constant = args[0]
                before = Known(lambda: float(np.abs(numbers(constant)).max(initial=0.0)))
            for part in [result] if isinstance(result, Tensor) else result:
                kept = before.ball is not None and part.shape[-1:] == args[0].shape[-1:] and name != "transpose"
                self.note(
                    part,
                    Known(lambda: before.size, before.shares, before.unfollowed, ball=before.ball if kept else None),
                )
        elif name in LINEAR:
            self._linear(name, args, result, path, is_data)
        elif name in ("native_layer_norm", "_fused_rms_norm") and len(args[1]) == 1:
            weight, n = args[2], args[1][0]
            bias = args[3] if name == "native_layer_norm" else None
            g = np.ones(n) if weight is None else numbers(weight)
            self._note_ball(result[0], InputBall(g, np.zeros(n) if bias is None else numbers(bias)))
        elif name in ("mul", "add", "sub", "div", "neg") and not options and isinstance(result, Tensor):
            self._arithmetic(name, args, result, is_data)
        elif name == "pow" and args[1] == 2:
            self._square(args[0], result)
        elif name in ("mean", "rsqrt"):
            self._norm_step(name, args, result)

    def _square(self, x: Tensor, result: Tensor) -> None:
        """Note x². The error e of an entry becomes at most 2·max|x|·e."""
        known, seen = self.of(x), float(x.abs().max()) if x.numel() else 0.0
        twice = None if not known.shares or known.size is None else 2 * known.size
        shares = {number: share.times(twice, 2 * seen) for number, share in known.shares.items()}
        self.note(
            result,
            Known(
                lambda: None if known.size is None else known.size * known.size * ROOM,
                shares,
                known.unfollowed,
                square_of=("square", x),
            ),
        )

    def _note_ball(self, y: Tensor, ball: InputBall) -> None:
        most = float((np.abs(ball.g) * math.sqrt(len(ball.g)) + np.abs(ball.b)).max()) * ROOM
        self.note(y, Known(lambda: most, ball=ball))

    def _norm_step(self, name: str, args: Any, result: Tensor) -> None:
        """Follow x·rsqrt(mean(x²) + eps)."""
        kind, x = self.of(args[0]).square_of or ("", None)
        over_last = len(args) > 1 and list(args[1]) in ([-1], [args[0].ndim - 1]) if name == "mean" else True
        if kind == {"mean": "square", "rsqrt": "mean"}[name] and over_last and x is not None:
            self.note(result, Known(square_of=("mean" if name == "mean" else "inverse", x)))

    def _arithmetic(self, name: str, args: Any, result: Tensor, is_data: Callable[[Any], bool]) -> None:
        x: Any = args[0]
        y: Any = args[1] if len(args) > 1 else None
        if name == "mul" and y is x:
            self._square(x, result)
            return
        a, b = self.of(x), self.of(y)
        if name == "add" and a.square_of is not None and a.square_of[0] == "mean" and not is_data(y):
            if not isinstance(y, Tensor) and y >= 0:
                self.note(result, Known(square_of=a.square_of))
            return
        if name == "mul":
            for one, other in ((a, y), (b, x)):
                if (
                    one.square_of is not None
                    and one.square_of[0] == "inverse"
                    and self._are_equal(one.square_of[1], other)
                ):
                    n = other.shape[-1]
                    self._note_ball(result, InputBall(np.ones(n), np.zeros(n)))
                    return
        if not is_data(x) and isinstance(x, Tensor) and y is not None:
            x, y, a, b = y, x, b, a
        if y is None or not is_data(y):
            self._with_constant(name, x, a, y, result)
            return
        shares: dict[int, Share] = {}
        for mine, other, values in ((a, b, y), (b, a, x)):
            for number, share in mine.shares.items():
                size = (other.size, float(values.abs().max())) if name == "mul" and values.numel() else (1.0, 1.0)
                part = share.times(*size)
                if number in other.unfollowed:
                    part = Share(None, part.seen)
                shares[number] = shares[number] + part if number in shares else part
        if name == "div":
            return

        def bound() -> float | None:
            if a.size is None or b.size is None:
                return None
            return (a.size * b.size if name == "mul" else a.size + b.size) * ROOM

        unfollowed = (a.unfollowed | b.unfollowed).difference(shares)
        self.note(result, Known(bound, shares, unfollowed, (x, y) if name == "sub" else None))

    def _are_equal(self, x: Tensor, y: Tensor) -> bool:
        """Whether two tensors are the same, or differences of the same tensors."""
        one, other = self.of(x).difference, self.of(y).difference
        return x is y or (one is not None and other is not None and all(map(operator.is_, one, other)))

    def _with_constant(self, name: str, x: Any, a: Known, c: Any, result: Tensor) -> None:
        """x·c, x/c, x ± c or −x, where c is a number or a tensor that does not depend on the data."""
        if name == "neg":
            self.note(result, Known(lambda: a.size, a.shares, a.unfollowed))
            return
        if isinstance(c, Tensor) and c.ndim and (a.ball is None or c.shape != x.shape[-1:]) and c.numel() > 2**20:
            return
        sizes = np.abs(numbers(c)) if isinstance(c, Tensor) else np.abs(np.asarray(float(c)))
        most = float(sizes.max(initial=0.0))
        if name in ("add", "sub"):
            self.note(result, Known(lambda: None if a.size is None else (a.size + most) * ROOM, a.shares, a.unfollowed))
            return
        factor = most if name == "mul" else 1 / float(sizes.min()) if sizes.size and sizes.min() > 0 else math.inf
        shares = {number: share.times(factor, factor) for number, share in a.shares.items()}
        known = Known(lambda: None if a.size is None else a.size * factor * ROOM, shares, a.unfollowed)
        if a.ball is not None and name == "mul":
            values = numbers(c) if isinstance(c, Tensor) else np.asarray(float(c))
            if values.ndim == 0 or values.shape == a.ball.g.shape:
                known.ball = InputBall(a.ball.g * values, a.ball.b * values)
        self.note(result, known)

    def _linear(self, name: str, args: Any, result: Tensor, path: str, is_data: Callable[[Any], bool]) -> None:
        places = LINEAR[name]
        if len(args) <= places[1] or is_data(args[places[1]]) or not is_data(args[places[0]]):
            return
        before, W = self.of(args[places[0]]), args[places[1]]
        bias = args[0] if name == "addmm" else args[2] if name == "linear" and len(args) > 2 else None
        is_transposed = name == "linear"
        gain = column_sums(W, is_transposed) if before.shares else 0.0
        for number, share in before.shares.items():
            share = Share(None, share.seen) if number in before.unfollowed else share
            self._block(self.entries[number], share, gain)
            self.readers.setdefault(number, set()).add(path)
        ball = before.ball

        def bound() -> float | None:
            last = 0.0 if bias is None else np.abs(numbers(bias))
            if ball is not None:
                matrix = numbers(W).swapaxes(-1, -2) if is_transposed else numbers(W)
                if matrix.shape[-2] != len(ball.g):
                    return None
                lengths = math.sqrt(len(ball.g)) * np.sqrt(np.square(ball.g[:, None] * matrix).sum(axis=-2))
                return float((lengths + np.abs(ball.b[:, None] * matrix).sum(axis=-2) + last).max()) * ROOM
            if before.size is None:
                return None
            return (before.size * column_sums(W, is_transposed) + float(np.max(last, initial=0.0))) * ROOM

        self.note(result, Known(bound))

    def _block(self, entry: Replaced, share: Share, gain: float) -> None:
        """Note that a matrix takes the error of an activation. One factor without a bound, and there is no proof."""
        entry.block_error_seen = max(gain * share.seen * entry.error * ROOM, entry.block_error_seen or 0.0)
        if share.proven is None:
            self.unproven.add(id(entry))
        proven = None if id(entry) in self.unproven else gain * (share.proven or 0.0) * entry.error * ROOM
        entry.block_error = None if proven is None else max(proven, entry.block_error or 0.0)
