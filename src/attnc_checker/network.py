"""The stored program, reduced in exact arithmetic to one stage:

    out_o(x) = b_o + B_o·x + Σ_h Σ_k p_hk(x)·(v_hko + V_hko·x),   p_h = softmax over k of c_hk + a_hk·x.

Before the attention every entry of a state is an affine form of x, after it one of x and of the averages that heads
write. Weights are dyadic rationals, forms are exact, and only what an output needs is looked at: dead tokens never
matter.

A form also carries what its rounding is measured by: `sizes`, the same form made of absolute values, and `n`, such
that any evaluation is within γ_n·sizes(|x|) of it: layer by layer, every term of the sum meets n roundings at most;
and where more than one map rounds (`maps`), engines may fold the constants first, so that the sum over x comes last and
its terms are counted besides. Where a product may underflow, the smallest normal number is added to `sizes`; u times
that is what underflow costs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flint import arb, fmpq

from attnc_checker.files import Refused
from attnc_checker.program import Program
from attnc_checker.vectors import Row, Vector, balls, most, total

ONE = -1
"""The key of a form's constant; i ≥ 0 is the input x_i, (layer, query, head, e) an average, and (layer, token, feature)
what attention wrote, of a deep program."""
SMALLEST = {"float64": arb(2) ** -1022, "float32": arb(2) ** -126}
MORE = arb(2) ** -26
"""Roundings of float32 that are eight of float64."""
UNLIMITED = 10**9
"""More additions than any term of a sum passes through."""
TOKEN = re.compile("[0-9]{0,7}")

Terms = dict[Any, Any]
"""Coefficients, of the constant ONE among them."""


class Form(NamedTuple):
    terms: Terms  # fmpq
    sizes: Terms  # arb
    n: int = 0
    maps: int = 0

    @property
    def is_constant(self) -> bool:
        return self.sizes.keys() <= {ONE}

    @property
    def is_power_of_two(self) -> bool:
        """An exact ±2^k, k ≥ 0: products with it are exact. (Those with 2^−k may underflow.)"""
        q = self.terms.get(ONE, fmpq(0))
        return self.n == 0 and self.is_constant and q.q == 1 and int(abs(q.p)).bit_count() == 1

    def folded(self) -> Form:
        return self._replace(n=self.n + len(self.sizes)) if self.maps > 1 else self


def unit(key: Any) -> Form:
    return Form({key: fmpq(1)}, {key: arb(1)})


def constant(x: Any) -> Form:
    return Form({ONE: x}, {ONE: abs(arb(x))}) if x != 0 else ZERO


ZERO = Form({}, {})


def dense(terms: Terms, inputs: Iterable[Any]) -> Row:
    zero = terms.get(ONE, fmpq(0)) * 0
    return tuple(terms.get(key, zero) for key in (ONE, *inputs))


def span(sizes: Terms, reach: Terms) -> Any:
    """Σ |coefficient|·reach: how large a form can be, or what is left over of one."""
    return total(abs(balls(x)) * reach[key] for key, x in sizes.items())


def combined(parts: Iterable[tuple[Any, Any, Form]]) -> tuple[Terms, Terms]:
    """Σ x·form, and Σ |x|·sizes: a part is (x, |x|, form)."""
    terms: Terms = {}
    sizes: Terms = {}
    for x, absolute, form in parts:
        for key, y in form.terms.items():
            terms[key] = terms.get(key, 0) + x * y
        for key, y in form.sizes.items():
            sizes[key] = sizes.get(key, arb(0)) + absolute * y
    return {key: x for key, x in terms.items() if x != 0}, sizes


def stacked(forms: list[Form]) -> Form:
    """The forms of all keys as one, the coefficients of which are vectors."""

    def columns(table: list[Terms], zero: Any) -> Terms:
        keys = dict.fromkeys((ONE, *itertools.chain(*table)))
        return {key: Vector(terms.get(key, zero) for terms in table) for key in keys}

    terms, sizes = columns([form.terms for form in forms], fmpq(0)), columns([form.sizes for form in forms], arb(0))
    return Form(terms, sizes, max(form.n for form in forms))


@dataclass(frozen=True, eq=False)
class Head:
    """The scores of all keys and, for every output that reads the head, their values.

    With v = u/(1 − n·u): as computed, scores are off by v·own(|x|) + slack, and by what the query adds to them: a
    component j of that is off by an e_j, |e_j| ≤ v·query_j(|x|), the same for all keys, times parts_j.
    """

    scores: Form
    values: dict[int, Form]
    own: Terms
    slack: Vector
    n: int
    depth: int = UNLIMITED  # the most additions that a term of its sums over keys passes through
    addends: int = 0  # of a score, if what their sum is off by, in any order, is not yet in `own`
    query: tuple[Terms, ...] = ()
    parts: tuple[Vector, ...] = ()

    @property
    def num_keys(self) -> int:
        return len(self.slack)


@dataclass(frozen=True, eq=False)
class Stage:
    heads: list[Head]
    affine: list[Form]
    inputs: list[Any]

    def largest(self, reach: Terms) -> Any:
        """Above |out| in exact arithmetic, over all outputs."""
        said = (most(span(form.sizes, reach)) for head in self.heads for form in head.values.values())
        return most(span(form.sizes, reach) for form in self.affine) + total(said)


def _is_average(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 4


class Reduction:
    """`stage` reduces a program, or says why it cannot."""

    def __init__(self, program: Program, reach: list[Any], is_deep: bool = False) -> None:
        """`reach`: the largest |x_i| of the domain, to exclude that anything overflows there.

        Of a deep program an entry that attention wrote is an input, named by its place, once its `reach` is told. The
        walk through its stages begins with the rounding of x, which is not counted here then.
        """
        self.program, self.dtype, self.num_outputs = program, program.dtype, program.num_outputs
        self.layers, self.shapes, self.is_deep = program.layers, program.shapes, is_deep
        self.reach: Terms = {ONE: arb(1), **dict(enumerate(reach))}
        self.known: dict[Any, Form] = {}
        self.projected: dict[Any, dict[int, Form]] = {}

    def stage(self) -> Stage:
        """The whole program; of a deep one, what is left after its last stage."""
        last, width = len(self.layers["layers"]), self.shapes["layers"][-1][1]
        return self._stage([self._entry("layers", last, *divmod(o, width)) for o in range(self.num_outputs)])

    def stage_at(self, layer: str, channel: str) -> tuple[Any, Stage]:
        """What attention writes into a channel of the first token, or as "channel@token" of another; and its place."""
        found = [i for i, name in enumerate(self.program.names) if name == layer]
        name, _, token = channel.partition("@")
        tokens = self.shapes["layers"][found[0] + 1][0] if len(found) == 1 else 0
        if (
            not tokens
            or name not in self.program.channels[found[0]]
            or not TOKEN.fullmatch(token)
            or int(token or 0) >= tokens
        ):
            raise Refused(f"there is no channel {channel!r:.60} of a layer {layer!r:.60}")
        place = (found[0] + 1, int(token or 0), self.program.channels[found[0]].index(name))
        written = self._written(*place)
        if written is None:
            raise Refused(f"no head writes into {channel!r:.60}")
        return place, self._stage([written])

    @property
    def inputs(self) -> list[Any]:
        return [key for key in self.reach if key != ONE]

    def _stage(self, outputs: list[Form]) -> Stage:
        outputs = [form.folded() for form in outputs]
        averages = (key for form in outputs for key in form.sizes if _is_average(key))
        heads: dict[tuple[int, int, int], None] = dict.fromkeys(key[:3] for key in averages)
        affine = [
            form._replace(
                terms={key: x for key, x in form.terms.items() if not _is_average(key)},
                sizes={key: x for key, x in form.sizes.items() if not _is_average(key)},
            )
            for form in outputs
        ]
        return Stage([self._head(*head, outputs) for head in heads], affine, self.inputs)

    def _entry(self, stream: str, i: int, token: int, feature: int) -> Form:
        """One entry of the state after i layers."""
        place = (stream, i, token, feature)
        if place not in self.known:
            self.known[place] = self._make(*place)
        return self.known[place]

    def _make(self, stream: str, i: int, token: int, feature: int) -> Form:
        if i == 0:
            x = self.program.firsts[stream] + token * self.shapes[stream][0][1] + feature
            if self.dtype == "float64" or self.is_deep:  # points are float64 numbers
                return unit(x)
            return Form({x: fmpq(1)}, {x: arb(1), ONE: SMALLEST[self.dtype]}, 1)
        layer = self.layers[stream][i - 1]
        if layer["kind"] == "affine":
            row = layer["rows"].get((token, feature), [])
            parts = [(constant(weight), self._entry(stream, i - 1, *place)) for place, weight in row]
            return self._sum([*parts, (unit(ONE), constant(layer["constant"].get((token, feature), fmpq(0))))])
        if stream == "memory":
            raise Refused(f"not a one-stage program: an output depends on {layer['where']!r}")
        if layer["kind"] == "softmax":  # a head whose keys are the features of the token
            return unit((i, token, 0, feature))
        written = self._written(i, token, feature)
        if written is not None:
            return self._named((i, token, feature), written)
        return self._entry(stream, i - 1, token, feature) if layer["residual"] else ZERO

    def _written(self, i: int, token: int, feature: int) -> Form | None:
        """What attention writes there, with what was there before; None if no head writes."""
        layer = self.layers["layers"][i - 1]
        read = ((h, *pair) for h, head in enumerate(layer.get("heads", [])) for pair in head["W_O"][feature])
        averages = [(constant(weight), unit((i, token, h, e))) for h, e, weight in read]
        if not averages:
            return None
        before = [(unit(ONE), self._entry("layers", i - 1, token, feature))] if layer["residual"] else []
        return self._sum(before + averages)

    def _named(self, place: Any, written: Form) -> Form:
        return unit(place) if place in self.reach else written

    def _sum(self, pairs: list[tuple[Form, Form]]) -> Form:
        """Σ a·b, of each pair one is constant. Zeros, and products with powers of two, do not round."""
        pairs = [(a, b) if b.is_constant else (b, a) for a, b in pairs if a.sizes and b.sizes]
        if not all(b.is_constant for _, b in pairs):
            raise Refused("not a one-stage program: queries and keys of a head both depend on the input")
        rounds = max(0, len(pairs) - 1) + any(_rounds(a, b) for a, b in pairs)
        n, maps = max((a.n + b.n for a, b in pairs), default=0), max((a.maps for a, _ in pairs), default=0)
        sums = combined((b.terms.get(ONE, fmpq(0)), b.sizes[ONE], a) for a, b in pairs)
        products = sum(b.n > 0 or abs(b.terms.get(ONE, fmpq(0))) != 1 for _, b in pairs)
        return self._underflowing(Form(*sums, n + rounds, maps + (rounds > 0)), products)

    def _underflowing(self, form: Form, products: Any) -> Form:
        """With what so many products lose to underflow: of numbers or, where engines fold, of coefficients."""
        if products != 0:
            for key in (ONE, *form.sizes.keys() - {ONE}):
                form.sizes[key] = form.sizes.get(key, arb(0)) + products * SMALLEST[self.dtype]
        return form

    def _projected(self, stream: str, i: int, token: int, matrix: list[Any]) -> dict[int, Form]:
        """By columns, those that are zero left out."""
        place = (stream, i, token, id(matrix))  # many queries read the same keys
        if place not in self.projected:
            read = ([(constant(x), self._entry(stream, i, token, row)) for row, x in column] for column in matrix)
            forms = {j: form.folded() for j, parts in enumerate(read) if (form := self._sum(parts)).sizes}
            self._read_by_heads(forms.values())
            self.projected[place] = forms
        return self.projected[place]

    def _read_by_heads(self, forms: Iterable[Form]) -> None:
        if any(_is_average(key) for form in forms for key in form.sizes):
            unproved = ", and no stage before has proved it" if self.is_deep else ""
            raise Refused(f"not a one-stage program: attention reads what attention wrote{unproved}")

    def _head(self, i: int, query: int, h: int, outputs: list[Form]) -> Head:
        layer, place = self.layers["layers"][i - 1], (i, query, h)
        reading = [o for o, form in enumerate(outputs) if any(_is_average(x) and x[:3] == place for x in form.sizes)]
        q, projected = dict[int, Form](), list[dict[int, Form]]()
        if layer["kind"] == "softmax":
            features = range(self.shapes["layers"][i][1])
            scores = [self._entry("layers", i - 1, query, k).folded() for k in features]
            values = [{k: unit(ONE)} for k in features]
            self._read_by_heads(scores)
            depth = UNLIMITED
        else:
            head = layer["heads"][h]
            stream, at = ("memory", len(self.layers["memory"])) if layer["cross"] else ("layers", i - 1)
            tokens, depth = list(range(self.shapes[stream][at][0])), self._depth(self.shapes[stream][at][0])
            if head["mask"]:
                query_segments, key_segments = head["mask"]
                tokens = [k for k in tokens if key_segments[k] in (query_segments[query], -1)]  # every query sees −1
            if not tokens:
                raise Refused(f"a query of {layer['where']!r} sees no key")
            q = self._projected("layers", i - 1, query, head["W_Q"])
            projected, values = ([self._projected(stream, at, k, head[W]) for k in tokens] for W in ("W_K", "W_V"))
            scores = [self._sum([(q[j], b) for j, b in key.items() if j in q]) for key in projected]
        said = {o: stacked([self._read_out(outputs[o], place, v, len(values)) for v in values]) for o in reading}
        whole, slack = stacked(scores), Vector([arb(0)] * len(scores))
        found = Head(whole, said, _times(whole.n, whole.sizes), slack, whole.n, depth)
        is_fine = self.dtype == "float32" and projected and all(b.is_constant for k in projected for b in k.values())
        return self._finer(found, q, projected) if is_fine else found

    def _finer(self, head: Head, q: dict[int, Form], projected: list[dict[int, Form]]) -> Head:
        """The roundings of scores in float32, apart by where they arise: in the query, in products and keys, in sums.
        Engines that compute parts of it in float64 are covered by MORE roundings of each."""
        read = {j: [forms.get(j, ZERO) for forms in projected] for j in q if any(j in forms for forms in projected)}
        parts = {j: stacked(forms) for j, forms in read.items()}
        counts = {j: b.n + any(b.sizes and _rounds(q[j], b) for b in read[j]) for j, b in parts.items()}
        _, own = combined((0, (counts[j] + MORE) * b.sizes[ONE], q[j]) for j, b in parts.items())
        own = {key: own.get(key, head.slack) + len(parts) * SMALLEST[self.dtype] for key in (ONE, *own)}
        n, said = max((q[j].n + counts[j] for j in parts), default=0), tuple(b.terms[ONE] for b in parts.values())
        query = tuple(_times(q[j].n + MORE, q[j].sizes) for j in parts)
        return replace(head, own=own, n=n + 2, query=query, parts=said, addends=len(parts))

    def _depth(self, keys: int) -> int:
        """In float32 engines sum 8 keys, hidden ones too, then 8 of such sums, and so on, up to 4096 keys."""
        depth = 0 if self.dtype == "float32" and keys <= 4096 else UNLIMITED
        while keys > 1:
            depth, keys = depth + min(8, keys) - 1, -(-keys // 8)
        return depth

    def _read_out(self, output: Form, place: tuple[int, int, int], value: dict[int, Form], keys: int) -> Form:
        """What the output makes of one key's value. The products of all keys with their weights may underflow."""
        read = [((*place, e), form) for e, form in value.items() if (*place, e) in output.sizes]
        sums = combined((output.terms.get(key, 0), output.sizes[key], form) for key, form in read)
        products = keys * sum(output.sizes[key] for key, _ in read)
        return self._underflowing(Form(*sums, output.n + max((form.n for form in value.values()), default=0)), products)


def _times(factor: Any, sizes: Terms) -> Terms:
    return {key: factor * x for key, x in sizes.items()}


def _rounds(a: Form, b: Form) -> bool:
    return not (a.is_power_of_two or b.is_power_of_two)
