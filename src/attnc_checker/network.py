"""The stored program, reduced in exact arithmetic to one stage:

    out_o(x) = b_o + B_o·x + Σ_h Σ_k p_hk(x)·(v_hko + V_hko·x),   p_h = softmax over k of c_hk + a_hk·x.

Before the attention, every entry of a state is an affine form of x. After the attention, it is an affine form of x and
of the averages that heads write. Weights are dyadic rationals, and forms are exact. Only entries that an output needs
are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from flint import arb, fmpq

from attnc_checker.files import require
from attnc_checker.float32 import finer
from attnc_checker.forms import (
    ONE,
    SMALLEST,
    UNLIMITED,
    ZERO,
    Form,
    Head,
    Key,
    Terms,
    combined,
    constant,
    rounds,
    stacked,
    unit,
)
from attnc_checker.program import AffineLayer, AttentionLayer, Matrix, Program, SoftmaxLayer, Stream

MAX_KEYS = 2**18
"""Largest number of keys of all heads together, as a small file can have many keys. A key takes 140 µs and 7 kB. So
this number takes 36 s and 1.9 GB, more than the default limit on memory."""


@dataclass(frozen=True, eq=False)
class Stage:
    heads: list[Head]
    affine: list[Form]
    inputs: list[Key]


def _is_average(key: Key) -> bool:
    return isinstance(key, tuple) and len(key) == 4


def _affine(terms: Terms) -> Terms:
    return {key: x for key, x in terms.items() if not _is_average(key)}


class Reduction:
    """Reduces a program to one stage, or raises Refused with the reason.

    A deep program is reduced stage by stage. An entry that attention wrote becomes an input of later stages, named by
    its place (layer, token, feature), once its `reach` is known. There the cast of the inputs to float32 is counted in
    the first stages, and not in the forms here.
    """

    def __init__(self, program: Program, reach: list[arb], is_deep: bool = False) -> None:
        """`reach` has the largest |x_i| of the domain."""
        self.program, self.dtype, self.is_deep = program, program.dtype, is_deep
        self.main, self.memory = program.main, program.memory
        self.reach: Terms = {ONE: arb(1), **dict(enumerate(reach))}
        self.num_keys = 0
        self.known: dict[tuple[bool, int, int, int], Form] = {}
        self.projected: dict[tuple[bool, int, int, int], dict[int, Form]] = {}
        self.heads_met: set[tuple[int, int]] = set()  # the layers and numbers of all heads that outputs depend on

    def stage(self) -> Stage:
        """Return the whole program as a stage, or for a deep program the part after its last proved stage."""
        return self.stage_of(self.outputs())

    def outputs(self) -> list[Form]:
        last, width = len(self.main.layers), self.main.shapes[-1][1]
        return [self._entry(self.main, last, *divmod(o, width)) for o in range(self.program.num_outputs)]

    @property
    def inputs(self) -> list[Key]:
        return [key for key in self.reach if key != ONE]

    def stage_of(self, outputs: list[Form]) -> Stage:
        outputs = [form.folded() for form in outputs]
        heads: dict[tuple[int, int, int], dict[int, Form]] = {}  # (layer, query, number): the outputs that read it
        for o, form in enumerate(outputs):
            averages = [key for key in form.sizes if isinstance(key, tuple) and _is_average(key)]
            for layer, query, number in dict.fromkeys(key[:3] for key in averages):
                heads.setdefault((layer, query, number), {})[o] = form
        affine = [form._replace(terms=_affine(form.terms), sizes=_affine(form.sizes)) for form in outputs]
        return Stage([self._head(*head, read_by) for head, read_by in heads.items()], affine, self.inputs)

    def _entry(self, stream: Stream, i: int, token: int, feature: int) -> Form:
        """Return one entry of the state after i layers."""
        place = (stream is self.main, i, token, feature)
        if place not in self.known:
            self.known[place] = self._make(stream, i, token, feature)
        return self.known[place]

    def _make(self, stream: Stream, i: int, token: int, feature: int) -> Form:
        if i == 0:
            return self._input(stream.first + token * stream.shapes[0][1] + feature)
        layer = stream.layers[i - 1]
        if isinstance(layer, AffineLayer):
            row = layer.rows.get((token, feature), [])
            parts = [(constant(weight), self._entry(stream, i - 1, *place)) for place, weight in row]
            return self._sum([*parts, (unit(ONE), constant(layer.constant.at(token, feature)))])
        require(stream is self.main, f"not a one-stage program: an output depends on {layer.where!r}")
        if isinstance(layer, SoftmaxLayer):  # a head whose keys are the features of the token
            return unit((i, token, 0, feature))
        written = self.written(i, token, feature)
        if written is not None:
            return unit((i, token, feature)) if (i, token, feature) in self.reach else written
        return self._entry(stream, i - 1, token, feature) if layer.residual else ZERO

    def written(self, i: int, token: int, feature: int) -> Form | None:
        """Return the entry that attention writes, with the residual, or None if no head writes there."""
        layer = self.main.layers[i - 1]
        if not isinstance(layer, AttentionLayer):
            return None
        read = ((h, *pair) for h, head in enumerate(layer.heads) for pair in head.W_O[feature])
        averages = [(constant(weight), unit((i, token, h, e))) for h, e, weight in read]
        if not averages:
            return None
        before = [(unit(ONE), self._entry(self.main, i - 1, token, feature))] if layer.residual else []
        return self._sum(before + averages)

    def _input(self, x: int) -> Form:
        """Return the form of an input. Points are float64 numbers."""
        is_exact = self.is_deep or self.dtype == "float64"
        least = SMALLEST[self.dtype] + self.program.flush * arb(2) ** 24  # one rounding of it is the flush
        return unit(x) if is_exact else Form({x: fmpq(1)}, {x: arb(1), ONE: least}, 1)

    def _sum(self, pairs: list[tuple[Form, Form]]) -> Form:
        """Return Σ a·b, where one of each pair is constant. Zeros and products with powers of two do not round."""
        pairs = [(a, b) if b.is_constant else (b, a) for a, b in pairs if a.sizes and b.sizes]
        is_affine = all(b.is_constant for _, b in pairs)
        require(is_affine, "not a one-stage program: queries and keys of a head both depend on the input")
        roundings = max(0, len(pairs) - 1) + any(rounds(a, b) for a, b in pairs)
        n, maps = max((a.n + b.n for a, b in pairs), default=0), max((a.maps for a, _ in pairs), default=0)
        sums = combined((b.terms.get(ONE, fmpq(0)), b.sizes[ONE], a) for a, b in pairs)
        products = sum(b.n > 0 or abs(b.terms.get(ONE, fmpq(0))) != 1 for _, b in pairs)
        return self._underflowing(Form(*sums, n + roundings, maps + (roundings > 0)), products)

    def _underflowing(self, form: Form, products: arb | int) -> Form:
        """Add the loss of products by underflow to all sizes: if engines fold maps, coefficients may underflow, too."""
        if products != 0:
            for key in (ONE, *form.sizes.keys() - {ONE}):
                form.sizes[key] = form.sizes.get(key, arb(0)) + products * SMALLEST[self.dtype]
        return form

    def _projected(self, stream: Stream, i: int, token: int, matrix: Matrix) -> dict[int, Form]:
        """Return the token times the matrix, by columns. Columns that are zero are left out."""
        place = (stream is self.main, i, token, id(matrix))  # many queries read the same keys
        if place not in self.projected:
            read = ([(constant(x), self._entry(stream, i, token, row)) for row, x in column] for column in matrix)
            forms = {j: form.folded() for j, parts in enumerate(read) if (form := self._sum(parts)).sizes}
            self._read_by_heads(forms.values())
            self.projected[place] = forms
        return self.projected[place]

    def _read_by_heads(self, forms: Iterable[Form]) -> None:
        unproved = ", and no stage before has proved it" if self.is_deep else ""
        are_inputs = not any(_is_average(key) for form in forms for key in form.sizes)
        require(are_inputs, f"not a one-stage program: attention reads an entry that attention wrote{unproved}")

    def _head(self, i: int, query: int, h: int, outputs: dict[int, Form]) -> Head:
        """Return the head. `outputs` are the outputs that read it."""
        layer = self.main.layers[i - 1]

        def head(scores: list[Form], values: list[dict[int, Form]]) -> Head:
            def read(output: Form) -> Form:
                return stacked([self._read_out(output, (i, query, h), value, len(values)) for value in values])

            return Head.of(scores, {o: read(output) for o, output in outputs.items()})

        if not isinstance(layer, AttentionLayer):
            features = range(self.main.shapes[i][1])
            scores = [self._entry(self.main, i - 1, query, k).folded() for k in features]
            self._read_by_heads(scores)
            return head(scores, [{k: unit(ONE)} for k in features])
        weights = layer.heads[h]
        stream, at = (self.memory, len(self.memory.layers)) if layer.cross else (self.main, i - 1)
        num_tokens = stream.shapes[at][0]
        seen = range(num_tokens) if weights.mask is None else weights.mask.seen_by(query)
        self.num_keys += len(seen)
        require(self.num_keys <= MAX_KEYS, f"the heads have more than {MAX_KEYS:,} keys in all")
        q = self._projected(self.main, i - 1, query, weights.W_Q)
        keys, values = ([self._projected(stream, at, k, W) for k in seen] for W in (weights.W_K, weights.W_V))
        found = head([self._sum([(q[j], b) for j, b in key.items() if j in q]) for key in keys], values)
        self.heads_met.add((i, h))
        if self.dtype == "float32":
            found = finer(found, q, keys, num_tokens)
        if self.program.has_silent_keys:
            found = replace(found, depth=UNLIMITED, silent=num_tokens - len(seen))
        return found

    def _read_out(self, output: Form, place: tuple[int, int, int], value: dict[int, Form], keys: int) -> Form:
        """Return the value of one key as it enters the output. The products of weights and values may underflow."""
        read: list[tuple[Key, Form]] = [((*place, e), form) for e, form in value.items() if (*place, e) in output.sizes]
        sums = combined((output.terms.get(key, 0), output.sizes[key], form) for key, form in read)
        products: Any = keys * sum(output.sizes[key] for key, _ in read)
        return self._underflowing(Form(*sums, output.n + max((form.n for form in value.values()), default=0)), products)
