"""The stored program, reduced in exact arithmetic to one stage:

    out_o(x) = b_o + B_o·x + Σ_h Σ_k p_hk(x)·(v_hko + V_hko·x),   p_h = softmax over k of c_hk + a_hk·x.

Before the attention every entry of a state is an affine form of x, after it one of x and of the averages that heads
write. Weights are dyadic rationals, forms are exact, and only what an output needs is looked at: dead tokens never
matter.

The keys of a form: ONE, i ≥ 0 for the input x_i, (layer, query, head, e) for an average, and (layer, token, feature)
for what attention wrote, of a deep program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flint import arb, fmpq

from attnc_checker.files import Refused
from attnc_checker.float32 import depth_of_sums, finer
from attnc_checker.forms import (
    ONE,
    SMALLEST,
    UNLIMITED,
    ZERO,
    Form,
    Head,
    Terms,
    combined,
    constant,
    rounds,
    stacked,
    times,
    unit,
)
from attnc_checker.program import Program
from attnc_checker.vectors import Vector

MAX_KEYS = 2**18


@dataclass(frozen=True, eq=False)
class Stage:
    heads: list[Head]
    affine: list[Form]
    inputs: list[Any]


def _is_average(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 4


def _affine(terms: Terms) -> Terms:
    return {key: x for key, x in terms.items() if not _is_average(key)}


class Reduction:
    """`stage` reduces a program, or says why it cannot."""

    unproved = ""

    def __init__(self, program: Program, reach: list[Any]) -> None:
        """`reach`: the largest |x_i| of the domain."""
        self.program, self.dtype = program, program.dtype
        self.layers, self.shapes = program.layers, program.shapes
        self.reach: Terms = {ONE: arb(1), **dict(enumerate(reach))}
        self.num_keys, self.known = 0, dict[Any, Form]()
        self.projected: dict[Any, dict[int, Form]] = {}

    def stage(self) -> Stage:
        """The whole program; of a deep one, what is left after its last stage."""
        last, width = len(self.layers["layers"]), self.shapes["layers"][-1][1]
        return self._stage([self._entry("layers", last, *divmod(o, width)) for o in range(self.program.num_outputs)])

    @property
    def inputs(self) -> list[Any]:
        return [key for key in self.reach if key != ONE]

    def _stage(self, outputs: list[Form]) -> Stage:
        outputs = [form.folded() for form in outputs]
        heads: dict[tuple[int, int, int], dict[int, Form]] = {}  # (layer, query, number): the outputs that read it
        for o, form in enumerate(outputs):
            for head in dict.fromkeys(key[:3] for key in form.sizes if _is_average(key)):
                heads.setdefault(head, {})[o] = form
        affine = [form._replace(terms=_affine(form.terms), sizes=_affine(form.sizes)) for form in outputs]
        return Stage([self._head(*head, read_by) for head, read_by in heads.items()], affine, self.inputs)

    def _entry(self, stream: str, i: int, token: int, feature: int) -> Form:
        """One entry of the state after i layers."""
        place = (stream, i, token, feature)
        if place not in self.known:
            self.known[place] = self._make(*place)
        return self.known[place]

    def _make(self, stream: str, i: int, token: int, feature: int) -> Form:
        if i == 0:
            return self._input(self.program.firsts[stream] + token * self.shapes[stream][0][1] + feature)
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
            return self._read_later((i, token, feature), written)
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

    def _input(self, x: int) -> Form:
        """Points are float64 numbers."""
        is_exact = self.dtype == "float64"
        return unit(x) if is_exact else Form({x: fmpq(1)}, {x: arb(1), ONE: SMALLEST[self.dtype]}, 1)

    def _read_later(self, place: Any, written: Form) -> Form:
        return written

    def _sum(self, pairs: list[tuple[Form, Form]]) -> Form:
        """Σ a·b, of each pair one is constant. Zeros, and products with powers of two, do not round."""
        pairs = [(a, b) if b.is_constant else (b, a) for a, b in pairs if a.sizes and b.sizes]
        if not all(b.is_constant for _, b in pairs):
            raise Refused("not a one-stage program: queries and keys of a head both depend on the input")
        roundings = max(0, len(pairs) - 1) + any(rounds(a, b) for a, b in pairs)
        n, maps = max((a.n + b.n for a, b in pairs), default=0), max((a.maps for a, _ in pairs), default=0)
        sums = combined((b.terms.get(ONE, fmpq(0)), b.sizes[ONE], a) for a, b in pairs)
        products = sum(b.n > 0 or abs(b.terms.get(ONE, fmpq(0))) != 1 for _, b in pairs)
        return self._underflowing(Form(*sums, n + roundings, maps + (roundings > 0)), products)

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
            raise Refused(f"not a one-stage program: attention reads what attention wrote{self.unproved}")

    def _head(self, i: int, query: int, h: int, outputs: dict[int, Form]) -> Head:
        """`outputs`: those that read it."""
        layer, place = self.layers["layers"][i - 1], (i, query, h)
        q, projected, depth = dict[int, Form](), list[dict[int, Form]](), UNLIMITED
        if layer["kind"] == "softmax":
            features = range(self.shapes["layers"][i][1])
            scores = [self._entry("layers", i - 1, query, k).folded() for k in features]
            values = [{k: unit(ONE)} for k in features]
            self._read_by_heads(scores)
        else:
            head = layer["heads"][h]
            stream, at = ("memory", len(self.layers["memory"])) if layer["cross"] else ("layers", i - 1)
            tokens = list(range(self.shapes[stream][at][0]))
            depth = depth_of_sums(len(tokens)) if self.dtype == "float32" else depth
            if head["mask"]:
                query_segments, key_segments = head["mask"]
                tokens = [k for k in tokens if key_segments[k] in (query_segments[query], -1)]  # every query sees −1
            self.num_keys += len(tokens)
            if self.num_keys > MAX_KEYS:  # of which few may be stored
                raise Refused(f"the heads have more than {MAX_KEYS:,} keys in all")
            q = self._projected("layers", i - 1, query, head["W_Q"])
            projected, values = ([self._projected(stream, at, k, head[W]) for k in tokens] for W in ("W_K", "W_V"))
            scores = [self._sum([(q[j], b) for j, b in key.items() if j in q]) for key in projected]
        said = {
            o: stacked([self._read_out(output, place, v, len(values)) for v in values]) for o, output in outputs.items()
        }
        whole, slack = stacked(scores), Vector([arb(0)] * len(scores))
        found = Head(whole, said, times(whole.n, whole.sizes), slack, whole.n, depth)
        is_fine = self.dtype == "float32" and projected and all(b.is_constant for k in projected for b in k.values())
        return finer(found, q, projected) if is_fine else found

    def _read_out(self, output: Form, place: tuple[int, int, int], value: dict[int, Form], keys: int) -> Form:
        """What the output makes of one key's value. The products of all keys with their weights may underflow."""
        read = [((*place, e), form) for e, form in value.items() if (*place, e) in output.sizes]
        sums = combined((output.terms.get(key, 0), output.sizes[key], form) for key, form in read)
        products = keys * sum(output.sizes[key] for key, _ in read)
        return self._underflowing(Form(*sums, output.n + max((form.n for form in value.values()), default=0)), products)
