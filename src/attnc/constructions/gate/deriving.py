"""What the heads of gates are for, as a derivation: then a proof takes one variable at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from attnc.constructions.circuit import Wire, channel_of
from attnc.constructions.gate.terms import Affine, Atom, Form
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.canonical import equivalent
from attnc.targets.expressions.coefficient import UNIT, Coefficient
from attnc.targets.expressions.tree import Call
from attnc.targets.parts.part import Derivation, HeadClaim, Multiply, Part, Source, T, Unary, combination
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes


def derivation_of(
    target: ExpressionTarget,
    forms: Sequence[Form],
    wires: Mapping[Atom, Wire],
    middles: Mapping[Atom, tuple[float, float]],
) -> Derivation | None:
    """None where an atom is more than a head of one argument; where the box is infinite; and where a coefficient is no
    decimal number, so that what the heads are for is not quite the expression.

    `middles`: (a, b) of a product, whose head computes (x − a)(y − b).
    """
    if not target.box.is_bounded:
        return None
    reader = _Reader(target)
    heads: dict[str, HeadClaim] = {}
    for atom, wire in wires.items():
        signals = [signal for signal in wire.terms if signal.level > 0]
        if atom.name in ("max", "min") or len(signals) != 1:
            return None
        heads[channel_of(signals[0])] = reader.claim(atom, *middles.get(atom, (0.0, 0.0)))
    outputs = tuple(map(reader.form, forms))
    trees = PartRanges(sub_boxes(target.box), target.expression.variables).tree
    is_target = equivalent([trees(part) for part in outputs], target.expression.outputs)
    return Derivation(outputs, heads) if is_target else None


class _Reader:
    """Forms as parts; an atom is one part wherever it occurs."""

    def __init__(self, target: ExpressionTarget) -> None:
        self.sources = {name: Source(i) for i, name in enumerate(target.box.names)}
        self.parts: dict[Atom, Part] = {}

    def form(self, form: Form) -> Part:
        atoms = [(self.parts[atom], _decimal(c)) for atom, c in form.atoms]
        return combination([(self.affine(form.affine), UNIT), *atoms])

    def affine(self, form: Affine) -> Part:
        terms = [(self.sources[name], _decimal(c)) for name, c in form.terms]
        return combination(terms, _decimal(form.constant))

    def claim(self, atom: Atom, a: float, b: float) -> HeadClaim:
        """What the head of an atom computes, in exact arithmetic."""
        if atom.name == "product":
            x, y = map(self.affine, atom.arguments)
            carrier, argument = (combination([(part, UNIT)], Coefficient.of(-c)) for part, c in ((x, a), (y, b)))
            product = Multiply(carrier, argument)
            rest = [(y, Coefficient.of(a)), (x, Coefficient.of(b))]
            self.parts[atom] = combination([(product, UNIT), *rest], Coefficient.of(-Fraction(a) * Fraction(b)))
            return HeadClaim(product, argument, T, carrier)
        argument = self.affine(atom.arguments[-1])
        limits = tuple(_decimal(limit).tree for limit in atom.limits or ())
        function = Unary(argument, Call(atom.inner or atom.name, (T, *limits)))
        if atom.name != "gated":
            self.parts[atom] = function
            return HeadClaim(function, argument, function.tree)
        carrier = self.affine(atom.arguments[0])
        self.parts[atom] = Multiply(carrier, function)
        return HeadClaim(self.parts[atom], argument, function.tree, carrier)


def _decimal(number: float) -> Coefficient:
    """The shortest number that is read as this one: what was written, as 0.3."""
    return Coefficient.of(Fraction(repr(float(number))))
