"""Deep programs that were tampered with, and derivations that lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Mask
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.targets.expressions.coefficient import Coefficient
from attnc.targets.expressions.tree import Call, Node, Number, Product, Sum
from attnc.targets.parts.part import Combination, Derivation, HeadClaim, Multiply, Part, Source, T, Unary

Rng = np.random.Generator


def _attentions(program: Program) -> list[int]:
    return [i for i, layer in enumerate(program.layers) if isinstance(layer, Attention)]


def _with_layer(program: Program, number: int, layer: Affine | Attention) -> Program:
    layers = list(program.layers)
    layers[number] = layer
    return dataclasses.replace(program, layers=tuple(layers))


def with_read_out_weight(program: Program, change: Callable[[float], float]) -> Program:
    """Another first weight in the last affine map."""
    read = program.layers[-1]
    values = read.weight.values.copy()
    values[0] = change(values[0])
    weight = dataclasses.replace(read.weight, values=values)
    return _with_layer(program, len(program.layers) - 1, dataclasses.replace(read, weight=weight))


def _with_head(program: Program, number: int, which: int, head: Head) -> Program:
    layer = program.layers[number]
    heads = list(layer.heads)
    heads[which] = head
    return _with_layer(program, number, dataclasses.replace(layer, heads=tuple(heads)))


def _some_head(rng: Rng, program: Program) -> tuple[int, int, Head]:
    number = int(rng.choice(_attentions(program)))
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
    return _with_head(program, number, which, dataclasses.replace(head, mask=Mask(of_queries, of_keys)))


def change_a_constant(rng: Rng, program: Program) -> Program:
    """Of a key, a value, a bias or the read-out."""
    choices = [i for i, x in enumerate(program.layers) if isinstance(x, Affine) and len(x.constant.values)]
    number = int(rng.choice(choices))
    layer = program.layers[number]
    values = layer.constant.values.copy()
    values[rng.integers(len(values))] += values.dtype.type(rng.normal() * 10.0 ** rng.uniform(-9, 1))
    constant = Sparse(layer.constant.shape, layer.constant.index, values)
    return _with_layer(program, number, dataclasses.replace(layer, constant=constant))


def change_a_link(rng: Rng, program: Program) -> Program:
    """A coefficient of a channel that is passed on, of a carrier, or of the read-out."""
    choices = [i for i, x in enumerate(program.layers) if isinstance(x, Affine) and len(x.weight.values)]
    number = int(rng.choice(choices))
    layer = program.layers[number]
    values = layer.weight.values.copy()
    values[rng.integers(len(values))] *= values.dtype.type(1 + rng.normal() * 10.0 ** rng.uniform(-14, 0))
    weight = Sparse(layer.weight.shape, layer.weight.index, values)
    return _with_layer(program, number, dataclasses.replace(layer, weight=weight))


def read_another_channel(rng: Rng, program: Program) -> Program:
    """A map reads its number from elsewhere in the state."""
    choices = [i for i, x in enumerate(program.layers) if isinstance(x, Affine) and len(x.weight.values)]
    number = int(rng.choice(choices))
    layer = program.layers[number]
    index = layer.weight.index.copy()
    index[rng.integers(len(index)), 3] = rng.integers(layer.weight.shape[3])
    kept = np.unique(index, axis=0, return_index=True)[1]
    weight = Sparse(layer.weight.shape, index[kept], layer.weight.values[kept])
    return _with_layer(program, number, dataclasses.replace(layer, weight=weight))


def swap_channels(rng: Rng, program: Program) -> Program:
    """What a stage writes into two channels, the names staying where they are."""
    number, which, head = _some_head(rng, program)
    a, b = rng.integers(0, head.W_O.shape[1], 2)
    W_O = head.W_O.copy()
    W_O[:, [a, b]] = W_O[:, [b, a]]
    return _with_head(program, number, which, dataclasses.replace(head, W_O=W_O))


def swap_names(rng: Rng, program: Program) -> Program:
    """Of two channels, so that each claim is made of the other's head."""
    number = int(rng.choice(_attentions(program)))
    layer = program.layers[number]
    names = list(layer.channels)
    a, b = rng.integers(0, len(names), 2)
    names[a], names[b] = names[b], names[a]
    return _with_layer(program, number, dataclasses.replace(layer, channels=tuple(names)))


def swap_heads(rng: Rng, program: Program) -> Program:
    number, which, head = _some_head(rng, program)
    other = program.layers[number].heads[-1 - which]
    return _with_head(
        program,
        number,
        which,
        dataclasses.replace(head, W_Q=other.W_Q, W_K=other.W_K) if (other.W_Q.shape == head.W_Q.shape) else head,
    )


def drop_the_residual(rng: Rng, program: Program) -> Program:
    number = int(rng.choice(_attentions(program)))
    return _with_layer(program, number, dataclasses.replace(program.layers[number], residual=False))


def change_a_projection(rng: Rng, program: Program) -> Program:
    """Of a query, a key, a value or an output: an entry that is there, or one that was zero."""
    number, which, head = _some_head(rng, program)
    name = str(rng.choice(["W_Q", "W_K", "W_V", "W_O"]))
    matrix = getattr(head, name).copy()
    places = np.argwhere(matrix != 0) if rng.random() < 0.7 else np.argwhere(matrix == 0)
    if not len(places):
        return program
    place = tuple(rng.choice(places))
    matrix[place] += matrix.dtype.type(rng.normal() * 10.0 ** rng.uniform(-12, 1))
    return _with_head(program, number, which, dataclasses.replace(head, **{name: matrix}))


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
        """Of one head: its function, its argument, its carrier or the part it stands for."""
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
        parts = list(self._parts().values())
        victim = parts[int(self.rng.integers(len(parts)))]
        return self._with({id(victim): self._changed(victim, parts)})

    def another_known(self) -> Derivation:
        """A combination of which it is said that it is tiny."""
        parts = [part for part in self._parts().values() if isinstance(part, Combination) and part.terms]
        if not parts:
            return self.another_part()
        victim = parts[int(self.rng.integers(len(parts)))]
        tiny = Product((Number(Fraction(1, 100)), Call("sin", (T,))))
        return self._with({id(victim): dataclasses.replace(victim, known=Unary(victim.terms[0][0], tiny))})

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

    def _parts(self) -> dict[int, Part]:
        found: dict[int, Part] = {}
        pending = list(self.derivation.outputs)
        while pending:
            part = pending.pop()
            if id(part) not in found:
                found[id(part)] = part
                pending += {
                    Source: lambda p: [],
                    Combination: lambda p: [inner for inner, _ in p.terms],
                    Unary: lambda p: [p.base],
                    Multiply: lambda p: [p.left, p.right],
                }[type(part)](part)
        return found

    def _changed(self, part: Part, parts: list[Part]) -> Part:
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
                return (
                    Multiply(left, left) if self.rng.random() < 0.5 or _contains(other, part) else Multiply(left, other)
                )
        raise AssertionError(part)

    def _with(self, changed: dict[int, Part]) -> Derivation:
        made: dict[int, Part] = {}

        def new(part: Part) -> Part:
            if id(part) not in made:
                if id(part) in changed:
                    made[id(part)] = changed[id(part)]
                    return made[id(part)]
                match part:
                    case Combination(terms, constant, known):
                        inner = tuple((new(p), c) for p, c in terms)
                        same = all(a is b for (a, _), (b, _) in zip(inner, terms, strict=True))
                        made[id(part)] = part if same else Combination(inner, constant, known)
                    case Unary(base, tree):
                        made[id(part)] = part if new(base) is base else Unary(new(base), tree)
                    case Multiply(left, right):
                        same = new(left) is left and new(right) is right
                        made[id(part)] = part if same else Multiply(new(left), new(right))
                    case _:
                        made[id(part)] = part
            return made[id(part)]

        heads = {}
        for channel, claim in self.derivation.heads.items():
            part = new(claim.part)
            tree = part.tree if isinstance(part, Unary) else claim.tree
            carrier = None if claim.carrier is None else new(claim.carrier)
            heads[channel] = HeadClaim(part, new(claim.argument), tree, carrier)
        return Derivation(tuple(new(part) for part in self.derivation.outputs), heads)


def _contains(part: Part, wanted: Part) -> bool:
    match part:
        case Combination(terms, _):
            inside = [inner for inner, _ in terms]
        case Unary(base, _):
            inside = [base]
        case Multiply(left, right):
            inside = [left, right]
        case _:
            inside = []
    return part is wanted or any(_contains(inner, wanted) for inner in inside)


def another_function(rng: Rng, tree: Node) -> Node:
    """sin for cos and the like, or the same and a little more."""
    if isinstance(tree, Call) and len(tree.arguments) == 1 and rng.random() < 0.7:
        return Call("sin" if tree.name == "cos" else "cos", tree.arguments)
    return Sum((tree, Number(Fraction(float(rng.normal() * 10.0 ** rng.uniform(-9, -1))))))
