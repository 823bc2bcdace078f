"""Deep programs that were tampered with, and derivations that lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Mask
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.targets.expressions.coefficient import Coefficient
from attnc.targets.expressions.tree import Call, Node, Number, Product, Sum
from attnc.targets.parts.part import (
    Combination,
    Derivation,
    HeadClaim,
    Multiply,
    Part,
    Source,
    T,
    Unary,
    in_order,
    operands_of,
)

Rng = np.random.Generator
Change = Callable[[Any], Any]


def with_layer(program: Program, number: int, layer: Affine | Attention) -> Program:
    layers = list(program.layers)
    layers[number] = layer
    return dataclasses.replace(program, layers=tuple(layers))


def _with_head(program: Program, number: int, which: int, **changes: Any) -> Program:
    layer = program.layers[number]
    heads = list(layer.heads)
    heads[which] = dataclasses.replace(heads[which], **changes)
    return with_layer(program, number, dataclasses.replace(layer, heads=tuple(heads)))


def with_number(program: Program, layer: int, name: str, place: int, change: Change) -> Program:
    """Another number of an affine map, in its `weight` or its `constant`."""
    sparse = getattr(program.layers[layer], name)
    values = sparse.values.copy()
    values[place] = change(values[place])
    changed = dataclasses.replace(sparse, values=values)
    return with_layer(program, layer, dataclasses.replace(program.layers[layer], **{name: changed}))


def with_entry(program: Program, layer: int, head: int, name: str, place: Sequence[int], change: Change) -> Program:
    """Another entry of a head's matrix."""
    matrix = getattr(program.layers[layer].heads[head], name).copy()
    matrix[tuple(place)] = change(matrix[tuple(place)])
    return _with_head(program, layer, head, **{name: matrix})


def with_read_out_weight(program: Program, change: Change) -> Program:
    """Another first weight in the last affine map."""
    return with_number(program, -1, "weight", 0, change)


def _some_attention(rng: Rng, program: Program) -> int:
    return int(rng.choice([i for i, layer in enumerate(program.layers) if isinstance(layer, Attention)]))


def _some_affine(rng: Rng, program: Program, name: str) -> tuple[int, Sparse]:
    """An affine map with numbers in its `weight` or its `constant`, and these."""
    affine = {i: getattr(layer, name) for i, layer in enumerate(program.layers) if isinstance(layer, Affine)}
    number = int(rng.choice([i for i, sparse in affine.items() if len(sparse.values)]))
    return number, affine[number]


def _some_head(rng: Rng, program: Program) -> tuple[int, int, Head]:
    number = _some_attention(rng, program)
    heads = program.layers[number].heads
    which = int(rng.integers(len(heads)))
    return number, which, heads[which]


def hide_a_key(rng: Rng, program: Program) -> Program:
    """The state no longer sees one of the keys, or sees one that is another head's."""
    number, which, head = _some_head(rng, program)
    tokens = program.layers[number - 1].weight.shape[0]
    of_keys = np.full(tokens, EVERY_QUERY, np.int32) if head.mask is None else head.mask.key_segments.copy()
    of_queries = np.zeros(tokens, np.int32) if head.mask is None else head.mask.query_segments
    place = int(rng.integers(tokens))
    of_keys[place] = 1 if of_keys[place] == EVERY_QUERY else EVERY_QUERY
    if not (of_keys == EVERY_QUERY).any():
        of_keys[:] = EVERY_QUERY
    return _with_head(program, number, which, mask=Mask(of_queries, of_keys))


def change_a_constant(rng: Rng, program: Program) -> Program:
    """Change a key, a value, a bias or the read-out."""
    number, sparse = _some_affine(rng, program, "constant")
    place, change = rng.integers(len(sparse.values)), rng.normal() * 10.0 ** rng.uniform(-9, 1)
    return with_number(program, number, "constant", place, lambda value: value + value.dtype.type(change))


def change_a_link(rng: Rng, program: Program) -> Program:
    """A coefficient of a channel that is passed on, of a carrier, or of the read-out."""
    number, sparse = _some_affine(rng, program, "weight")
    place, change = rng.integers(len(sparse.values)), rng.normal() * 10.0 ** rng.uniform(-14, 0)
    return with_number(program, number, "weight", place, lambda value: value * value.dtype.type(1 + change))


def read_another_channel(rng: Rng, program: Program) -> Program:
    """A map reads its number from elsewhere in the state."""
    number, sparse = _some_affine(rng, program, "weight")
    index = sparse.index.copy()
    index[rng.integers(len(index)), 3] = rng.integers(sparse.shape[3])
    kept = np.unique(index, axis=0, return_index=True)[1]
    weight = Sparse(sparse.shape, index[kept], sparse.values[kept])
    return with_layer(program, number, dataclasses.replace(program.layers[number], weight=weight))


def swap_channels(rng: Rng, program: Program) -> Program:
    """Exchange the results of a stage in two channels; the names stay where they are."""
    number, which, head = _some_head(rng, program)
    a, b = rng.integers(0, head.W_O.shape[1], 2)
    W_O = head.W_O.copy()
    W_O[:, [a, b]] = W_O[:, [b, a]]
    return _with_head(program, number, which, W_O=W_O)


def swap_names(rng: Rng, program: Program) -> Program:
    """Exchange two channels, so that each claim is about the other's head."""
    number = _some_attention(rng, program)
    layer = program.layers[number]
    names = list(layer.channels)
    a, b = rng.integers(0, len(names), 2)
    names[a], names[b] = names[b], names[a]
    return with_layer(program, number, dataclasses.replace(layer, channels=tuple(names)))


def swap_heads(rng: Rng, program: Program) -> Program:
    number, which, head = _some_head(rng, program)
    other = program.layers[number].heads[-1 - which]
    fits = other.W_Q.shape == head.W_Q.shape
    return _with_head(program, number, which, W_Q=other.W_Q, W_K=other.W_K) if fits else program


def drop_the_residual(rng: Rng, program: Program) -> Program:
    number = _some_attention(rng, program)
    return with_layer(program, number, dataclasses.replace(program.layers[number], residual=False))


def change_a_projection(rng: Rng, program: Program) -> Program:
    """Change an entry of a query, a key, a value or an output: a stored one, or a zero."""
    number, which, head = _some_head(rng, program)
    name = str(rng.choice(["W_Q", "W_K", "W_V", "W_O"]))
    matrix = getattr(head, name)
    places = np.argwhere(matrix != 0) if rng.random() < 0.7 else np.argwhere(matrix == 0)
    if not len(places):
        return program
    place, change = rng.choice(places), rng.normal() * 10.0 ** rng.uniform(-12, 1)
    return with_entry(program, number, which, name, place, lambda value: value + value.dtype.type(change))


PROGRAM_MUTATIONS: tuple[Callable[[Rng, Program], Program], ...] = (
    hide_a_key,
    change_a_constant,
    change_a_link,
    read_another_channel,
    swap_channels,
    swap_names,
    swap_heads,
    drop_the_residual,
    change_a_projection,
)


class Liar:
    """A derivation with one thing changed, everywhere it occurs or in one place; the program stays as it is."""

    def __init__(self, rng: Rng, derivation: Derivation) -> None:
        self.rng, self.derivation = rng, derivation

    def lie(self) -> Derivation:
        kinds = (self.another_claim, self.another_part, self.another_known, self.permuted_outputs, self.swapped_claims)
        return kinds[int(self.rng.integers(len(kinds)))]()

    def another_claim(self) -> Derivation:
        """Change one head: its function, its argument, its carrier or the part it stands for."""
        heads = dict(self.derivation.heads)
        if not heads:
            return self.permuted_outputs()
        channel = str(self.rng.choice(sorted(heads)))
        claim, other = heads[channel], heads[str(self.rng.choice(sorted(heads)))]
        changes = (
            {"tree": another_function(self.rng, claim.tree)},
            {"argument": other.argument},
            {"carrier": other.argument if claim.carrier is None else None},
            {"carrier": other.carrier},
            {"part": other.part},
            {"part": Unary(claim.argument, another_function(self.rng, claim.tree))},
        )
        heads[channel] = dataclasses.replace(claim, **changes[int(self.rng.integers(len(changes)))])
        return Derivation(self.derivation.outputs, heads)

    def another_part(self) -> Derivation:
        """A coefficient, a function, a factor or a source, in the outputs and in all claims alike."""
        parts = in_order(self.derivation.outputs)
        victim = parts[int(self.rng.integers(len(parts)))]
        return self._with(victim, self._changed(victim, parts))

    def another_known(self) -> Derivation:
        """A combination of which it is said that it is tiny."""
        parts = [p for p in in_order(self.derivation.outputs) if isinstance(p, Combination) and p.terms]
        if not parts:
            return self.another_part()
        victim = parts[int(self.rng.integers(len(parts)))]
        tiny = Product((Number(Fraction(1, 100)), Call("sin", (T,))))
        return self._with(victim, dataclasses.replace(victim, known=Unary(victim.terms[0][0], tiny)))

    def permuted_outputs(self) -> Derivation:
        outputs = list(self.derivation.outputs)
        if len(outputs) < 2:
            return Derivation((*outputs, *outputs), self.derivation.heads)
        return Derivation(tuple(outputs[1:] + outputs[:1]), self.derivation.heads)

    def swapped_claims(self) -> Derivation:
        heads = dict(self.derivation.heads)
        a, b = (str(name) for name in self.rng.choice(sorted(heads), 2))
        heads[a], heads[b] = heads[b], heads[a]
        return Derivation(self.derivation.outputs, heads)

    def _changed(self, part: Part, parts: Sequence[Part]) -> Part:
        other = parts[int(self.rng.integers(len(parts)))]
        match part:
            case Source(index):
                return Source(index + 1 if index == 0 else index - 1)
            case Combination(terms, constant) if terms and self.rng.random() < 0.7:
                i = int(self.rng.integers(len(terms)))
                factor = Coefficient.of(
                    Fraction(1) + Fraction(float(self.rng.normal() * 10.0 ** self.rng.uniform(-12, 0)))
                )
                changed = (*terms[:i], (terms[i][0], terms[i][1] * factor), *terms[i + 1 :])
                return dataclasses.replace(part, terms=changed)
            case Combination(_, constant):
                return dataclasses.replace(part, constant=constant + Coefficient.of(Fraction(1, 1000)))
            case Unary(base, tree):
                return Unary(base, another_function(self.rng, tree))
            case Multiply(left, _):
                keeps = self.rng.random() < 0.5 or part in in_order([other])  # a part is not made of itself
                return Multiply(left, left if keeps else other)
        raise AssertionError(part)

    def _with(self, victim: Part, changed: Part) -> Derivation:
        """The derivation with another part for one, in the outputs and in all claims alike."""
        heads = self.derivation.heads
        claimed = [part for claim in heads.values() for part in (claim.part, claim.argument, claim.carrier) if part]
        made: dict[int, Part] = {}
        for part in in_order([*self.derivation.outputs, *claimed]):
            same = all(made[id(inner)] is inner for inner in operands_of(part))
            made[id(part)] = changed if part is victim else part if same else _rebuilt(part, made)

        def renewed(claim: HeadClaim) -> HeadClaim:
            part = made[id(claim.part)]
            tree = part.tree if isinstance(part, Unary) else claim.tree
            carrier = None if claim.carrier is None else made[id(claim.carrier)]
            return HeadClaim(part, made[id(claim.argument)], tree, carrier)

        outputs = tuple(made[id(part)] for part in self.derivation.outputs)
        return Derivation(outputs, {channel: renewed(claim) for channel, claim in heads.items()})


def _rebuilt(part: Part, made: dict[int, Part]) -> Part:
    """The same part of other operands."""
    match part:
        case Combination(terms):
            return dataclasses.replace(part, terms=tuple((made[id(inner)], c) for inner, c in terms))
        case Unary(base):
            return dataclasses.replace(part, base=made[id(base)])
        case Multiply(left, right):
            return Multiply(made[id(left)], made[id(right)])
    raise AssertionError(part)


def another_function(rng: Rng, tree: Node) -> Node:
    """sin for cos and the like, or the same and a little more."""
    if isinstance(tree, Call) and len(tree.arguments) == 1 and rng.random() < 0.7:
        return Call("sin" if tree.name == "cos" else "cos", tree.arguments)
    return Sum((tree, Number(Fraction(float(rng.normal() * 10.0 ** rng.uniform(-9, -1))))))
