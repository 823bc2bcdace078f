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

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flint import arb, fmpq

from attnc_checker.files import Refused
from attnc_checker.program import Program
from attnc_checker.rounding import most

ONE = -1
"""The key of a form's constant; i ≥ 0 is the input x_i, (layer, query, head, e) an average, and (layer, token, feature)
what attention wrote, of a deep program."""
SMALLEST = {"float64": arb(2) ** -1022, "float32": arb(2) ** -126}
LARGEST = {"float64": arb(2) ** 1000, "float32": arb(2) ** 104}
"""MAX_TOKENS terms below these do not add up to an overflow."""
MORE = arb(2) ** -26
"""Roundings of float32 that are eight of float64."""
TOKEN = re.compile("[0-9]{0,7}")

Row = tuple[Any, ...]
"""(constant, coefficient of x_1, …, of x_d)."""


class Form(NamedTuple):
    terms: dict[Any, Any]  # fmpq
    sizes: dict[Any, Any]  # arb
    n: int = 0
    maps: int = 0

    def is_power_of_two(self) -> bool:
        """An exact ±2^k: products with it are exact."""
        return self.n == 0 and list(self.sizes) == [ONE] and _is_power_of_two(self.terms.get(ONE, fmpq(0)))

    def folded(self) -> Form:
        return self._replace(n=self.n + len(self.sizes)) if self.maps > 1 else self

    def rows(self, inputs: Sequence[Any]) -> tuple[Row, Row]:
        keys = (ONE, *inputs)
        return tuple(self.terms.get(key, fmpq(0)) for key in keys), tuple(self.sizes.get(key, arb(0)) for key in keys)


@dataclass(frozen=True, eq=False)
class ScoreRoundings:
    """The roundings of scores in float32, apart by where they arise; with v = u/(1 − n·u) for `n`:

    A component j of the query is off by an e_j, |e_j| ≤ v·query_j(|x|), the same for all keys; that adds e_j·parts_kj
    to score k. Products and keys are off by v·own_k(|x|). Then `terms` numbers are added, in any order.
    Engines that compute parts of it in float64 are covered by MORE roundings of each.
    """

    query: list[Row]
    parts: list[list[Any]]
    own: list[Row]
    n: int
    terms: int

    def of_keys(self, kept: list[int]) -> ScoreRoundings:
        return replace(self, parts=[self.parts[k] for k in kept], own=[self.own[k] for k in kept])


@dataclass(frozen=True, eq=False)
class Head:
    """Key k has the score c_k + a_k·x and, for every output o that reads the head, the value v_k + V_k·x."""

    scores: list[Row]
    score_sizes: list[Row]
    n_score: int
    values: dict[int, list[Row]]
    value_sizes: dict[int, list[Row]]
    n_value: dict[int, int]
    score_slack: list[Any] = field(default_factory=list)  # what scores may be off by besides
    roundings: ScoreRoundings | None = None  # a closer look at what γ_{n_score}·score_sizes bounds
    depth: int = 10**9  # the most additions that a term of its sums over keys passes through


@dataclass(frozen=True, eq=False)
class Stage:
    heads: list[Head]
    affine: list[Row]  # (b_o, B_o)
    affine_sizes: list[Row]
    n_affine: list[int]

    def largest(self, reach: list[Any]) -> Any:
        """Above |out| in exact arithmetic, over all outputs."""

        def sizes(rows: list[Row]) -> Any:
            return most(row[0] + sum(x * r for x, r in zip(row[1:], reach, strict=False)) for row in rows)

        return sizes(self.affine_sizes) + sum(sizes(rows) for head in self.heads for rows in head.value_sizes.values())


class Link(NamedTuple):
    """What attention wrote at a place, as a stage of what was read before it."""

    place: Any
    inputs: list[Any]
    stage: Stage


def _is_power_of_two(q: Any) -> bool:
    return all(int(n).bit_count() == 1 for n in (abs(q.p), q.q))


def _is_average(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 4


class Reduction:
    """`stage` reduces a program, or says why it cannot."""

    def __init__(
        self, program: Program, reach: list[Any], is_deep: bool = False, chain: list[Link] | None = None
    ) -> None:
        """`reach`: the largest |x_i| of the domain, to exclude that anything overflows there.

        Of a deep program every entry that attention writes is an input of the stages after it. Its name is its place,
        and its `reach` has to be told before anything reads it. If there is a `chain`, that is done here: what is read
        is added to it, with a reach that has to be proved.
        """
        self.program, self.dtype, self.num_outputs = program, program.dtype, program.num_outputs
        self.layers, self.shapes, self.chain = program.layers, program.shapes, chain
        self.is_deep = is_deep or chain is not None
        self.reach: dict[Any, Any] = {ONE: arb(1), **dict(enumerate(reach))}
        self.written: dict[Any, Form] = {}  # of a deep program
        self.known: dict[Any, Form] = {}

    def stage(self) -> Stage:
        """The whole program; of a deep one, what is left after its last stage."""
        last, width = len(self.layers["layers"]), self.shapes["layers"][-1][1]
        outputs = [self._entry("layers", last, *divmod(o, width)).folded() for o in range(self.num_outputs)]
        return self._stage(outputs)

    def stage_at(self, layer: str, channel: str) -> tuple[Any, Stage]:
        """What attention writes into a channel of the first token, or as "channel@token" of another; and its place."""
        found = [i for i, name in enumerate(self.program.names) if name == layer]
        name, _, token = channel.partition("@")
        tokens = self.program.shapes["layers"][found[0] + 1][0] if len(found) == 1 else 0
        if (
            not tokens
            or name not in self.program.channels[found[0]]
            or not TOKEN.fullmatch(token)
            or int(token or 0) >= tokens
        ):
            raise Refused(f"there is no channel {channel!r:.60} of a layer {layer!r:.60}")
        place = (found[0] + 1, int(token or 0), self.program.channels[found[0]].index(name))
        self._entry("layers", *place)
        if place not in self.written:
            raise Refused(f"no head writes into {channel!r:.60}")
        return place, self._stage([self.written[place].folded()])

    @property
    def inputs(self) -> list[Any]:
        return [key for key in self.reach if key != ONE]

    def _stage(self, outputs: list[Form]) -> Stage:
        self._require_known(outputs)
        averages: dict[tuple[int, int, int], None] = dict.fromkeys(
            key[:3] for form in outputs for key in form.sizes if _is_average(key)
        )
        heads = [self._average(*average, outputs) for average in averages]
        affine, sizes = zip(*(form.rows(self.inputs) for form in outputs), strict=True)
        return Stage(heads, list(affine), list(sizes), [form.n for form in outputs])

    def _entry(self, stream: str, i: int, token: int, feature: int) -> Form:
        """One entry of the state after i layers."""
        place = (stream, i, token, feature)
        if place not in self.known:
            self.known[place] = self._make(*place)
        return self.known[place]

    def _make(self, stream: str, i: int, token: int, feature: int) -> Form:
        if i == 0:
            x = self.program.firsts[stream] + token * self.shapes[stream][0][1] + feature
            # Points are float64 numbers. Of a deep program, the walk through its stages begins with their rounding.
            if self.dtype == "float64" or self.is_deep:
                return Form({x: fmpq(1)}, {x: arb(1)})
            return Form({x: fmpq(1)}, {x: arb(1), ONE: SMALLEST[self.dtype]}, 1)
        layer = self.layers[stream][i - 1]
        if layer["kind"] == "affine":
            row = layer["rows"].get((token, feature), [])
            constant = layer["constant"].get((token, feature), fmpq(0))
            parts = [(weight, self._entry(stream, i - 1, *place)) for place, weight in row]
            parts += [(fmpq(1), Form({ONE: constant}, {ONE: abs(arb(constant))}))] if constant != 0 else []
            return self._sum(parts)
        if stream == "memory":
            raise Refused(f"not a one-stage program: an output depends on {layer['where']!r}")
        if layer["kind"] == "softmax":  # a head whose keys are the features of the token
            return Form({(i, token, 0, feature): fmpq(1)}, {(i, token, 0, feature): arb(1)})
        parts = [(fmpq(1), self._entry(stream, i - 1, token, feature))] if layer["residual"] else []
        for h, head in enumerate(layer["heads"]):
            for e, weight in head["W_O"][feature]:
                parts.append((weight, Form({(i, token, h, e): fmpq(1)}, {(i, token, h, e): arb(1)})))
        ends_chain = self.chain is not None and all(later["kind"] == "affine" for later in self.layers[stream][i:])
        if not self.is_deep or ends_chain or len(parts) == layer["residual"]:
            return self._sum(parts)
        place = (i, token, feature)
        self.written[place] = self._sum(parts)
        if self.chain is not None:
            stage = self._stage([self.written[place].folded()])
            self.chain.append(Link(place, self.inputs, stage))
            self.reach[place] = 2 * stage.largest(list(self.reach.values())[1:])
        return Form({place: fmpq(1)}, {place: arb(1)})

    def _sum(self, parts: list[tuple[Any, Form]]) -> Form:
        """Σ weight·form. Zeros, and products with powers of two, do not round."""
        parts = [(weight, form) for weight, form in parts if weight != 0 and form.sizes]
        terms: dict[Any, Any] = {}
        sizes: dict[Any, Any] = {}
        for weight, form in parts:
            for key, x in form.terms.items():
                terms[key] = terms.get(key, 0) + weight * x
            for key, x in form.sizes.items():
                sizes[key] = sizes.get(key, arb(0)) + abs(arb(weight)) * x
        is_rounded = any(not (_is_power_of_two(weight) or form.is_power_of_two()) for weight, form in parts)
        rounds, products = max(0, len(parts) - 1) + is_rounded, sum(abs(weight) != 1 for weight, _ in parts)
        n, maps = max((form.n for _, form in parts), default=0), max((form.maps for _, form in parts), default=0)
        terms = {key: x for key, x in terms.items() if x != 0}
        return self._checked(Form(terms, sizes, n + rounds, maps + (rounds > 0)), products)

    def _product(self, a: Form, b: Form) -> Form:
        a, b = (b, a) if b.sizes.keys() - {ONE} else (a, b)
        if b.sizes.keys() - {ONE}:
            raise Refused("not a one-stage program: queries and keys of a head both depend on the input")
        factor, size = b.terms.get(ONE, fmpq(0)), b.sizes.get(ONE, arb(0))
        terms = {key: x * factor for key, x in a.terms.items() if factor != 0}
        is_rounded = not (a.is_power_of_two() or b.is_power_of_two())
        return self._checked(Form(terms, {key: x * size for key, x in a.sizes.items()}, a.n + b.n + is_rounded), 1)

    def _checked(self, form: Form, products: int) -> Form:
        """With what the products lose to underflow, and without overflow."""
        if products:
            form.sizes[ONE] = form.sizes.get(ONE, arb(0)) + products * SMALLEST[self.dtype]
        self._bounded({key: x for key, x in form.sizes.items() if key in self.reach})
        return form

    def _bounded(self, sizes: dict[Any, Any]) -> None:
        if not sum((x * self.reach[key] for key, x in sizes.items()), arb(0)) < LARGEST[self.dtype]:
            raise Refused(f"the network may overflow in {self.dtype} on the box")

    def _projected(self, stream: str, i: int, token: int, matrix: list[Any]) -> list[Form]:
        columns = ([(weight, self._entry(stream, i, token, row)) for row, weight in column] for column in matrix)
        return self._read_by_heads([self._sum(column).folded() for column in columns])

    def _read_by_heads(self, forms: list[Form]) -> list[Form]:
        if any(_is_average(key) for form in forms for key in form.sizes):
            raise Refused("not a one-stage program: attention reads what attention wrote")
        self._require_known(forms)
        return forms

    def _require_known(self, forms: list[Form]) -> None:
        """Of a deep program: what was written is read only after a stage has proved it."""
        for layer, _, feature in (
            key for form in forms for key in form.sizes if isinstance(key, tuple) and len(key) == 3
        ):
            if (layer, _, feature) not in self.reach:
                raise Refused(
                    f"{self.program.channels[layer - 1][feature]!r:.60} is read, but no stage before has proved it"
                )

    def _average(self, i: int, query: int, h: int, outputs: list[Form]) -> Head:
        scores, values, fine = self._keys(i, query, h)
        read: dict[int, tuple[list[Row], list[Row], int]] = {}
        for o, output in enumerate(outputs):
            mine = [key for key in output.sizes if _is_average(key) and key[:3] == (i, query, h)]
            if mine:
                rows = [[self._read_out(output, mine, key, part) for key in values] for part in (0, 1)]
                read[o] = (rows[0], rows[1], output.n + max(form.n for key in values for form in key.values()))
        score_rows, size_rows = zip(*(form.rows(self.inputs) for form in scores), strict=True)
        return Head(
            list(score_rows),
            list(size_rows),
            max(form.n for form in scores),
            {o: found[0] for o, found in read.items()},
            {o: found[1] for o, found in read.items()},
            {o: found[2] for o, found in read.items()},
            roundings=fine,
            depth=self._depth(i),
        )

    def _depth(self, i: int) -> int:
        """In float32 engines sum 8 keys, hidden ones too, then 8 of such sums, and so on, up to 4096 keys."""
        layer, depth = self.layers["layers"][i - 1], 0
        stream, at = ("memory", -1) if layer.get("cross") else ("layers", i - 1)
        keys = self.shapes[stream][at][0]
        if layer["kind"] == "softmax" or self.dtype != "float32" or keys > 4096:
            return 10**9
        while keys > 1:
            depth, keys = depth + min(8, keys) - 1, -(-keys // 8)
        return depth

    def _keys(self, i: int, query: int, h: int) -> tuple[list[Form], list[dict[int, Form]], ScoreRoundings | None]:
        """The scores and the values of the keys that a query sees."""
        layer = self.layers["layers"][i - 1]
        if layer["kind"] == "softmax":
            keys, one = list(range(self.shapes["layers"][i][1])), Form({ONE: fmpq(1)}, {ONE: arb(1)})
            forms = [self._entry("layers", i - 1, query, feature).folded() for feature in keys]
            return self._read_by_heads(forms), [{k: one} for k in keys], None
        head = layer["heads"][h]
        source = ("memory", len(self.layers["memory"])) if layer["cross"] else ("layers", i - 1)
        keys = list(range(self.shapes[source[0]][source[1]][0]))
        if head["mask"]:
            query_segments, key_segments = head["mask"]
            keys = [k for k in keys if key_segments[k] in (query_segments[query], -1)]  # every query sees −1
        if not keys:
            raise Refused(f"a query of {layer['where']!r} sees no key")
        q = self._projected("layers", i - 1, query, head["W_Q"])
        scores, values, projected = [], [], []
        for k in keys:
            projected.append(self._projected(*source, k, head["W_K"]))
            pairs = zip(q, projected[-1], strict=True)
            scores.append(self._sum([(fmpq(1), self._product(a, b)) for a, b in pairs if a.sizes and b.sizes]))
            values.append(dict(enumerate(self._projected(*source, k, head["W_V"]))))
        return scores, values, self._score_roundings(q, projected) if self.dtype == "float32" else None

    def _score_roundings(self, q: list[Form], keys: list[list[Form]]) -> ScoreRoundings | None:
        if any(form.sizes.keys() - {ONE} for key in keys for form in key):
            return None  # keys move
        used = [j for j, form in enumerate(q) if form.sizes and any(key[j].sizes for key in keys)]
        own, largest = [], max((q[j].n for j in used), default=0)
        for key in keys:
            row = [len(used) * SMALLEST[self.dtype]] + [arb(0)] * len(self.inputs)
            for a, b in ((q[j], key[j]) for j in used if key[j].sizes):
                count = b.n + (not (a.is_power_of_two() or b.is_power_of_two()))
                largest, scale = max(largest, a.n + count), (count + MORE) * b.sizes[ONE]
                row = [x + scale * y for x, y in zip(row, a.rows(self.inputs)[1], strict=True)]
            own.append(tuple(row))
        query = [tuple((q[j].n + MORE) * x for x in q[j].rows(self.inputs)[1]) for j in used]
        parts = [[key[j].terms.get(ONE, fmpq(0)) for j in used] for key in keys]
        return ScoreRoundings(query, parts, own, largest + 2, len(used))

    def _read_out(self, output: Form, averages: list[Any], key: dict[int, Form], part: int) -> Row:
        """What the output makes of one key's value: its terms (part 0) or its sizes (part 1)."""
        inputs = self.inputs
        row: list[Any] = [arb(0) if part else fmpq(0)] * (len(inputs) + 1)
        for average in (average for average in averages if average[3] in key):
            factor = (output.sizes if part else output.terms).get(average, 0)
            row = [x + factor * y for x, y in zip(row, key[average[3]].rows(inputs)[part], strict=True)]
        if part:
            self._bounded(dict(zip((ONE, *inputs), row, strict=True)))
        return tuple(row)
