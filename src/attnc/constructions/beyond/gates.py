"""Activations and products as attention whose values carry x (the case of one head per neuron: arXiv 2309.08593)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from attnc.constructions.built import Built, Progress, too_many_anchors
from attnc.constructions.construction import EXPRESSION, MAX_ANCHORS, MAX_BYTES, Construction, Request, for_eps
from attnc.constructions.fitting.circuit import PartFit, build_parts
from attnc.constructions.fitting.gate import (
    GATES,
    MAX_EXPONENT,
    Gate,
    OutOfReach,
    function_gate,
    max_gate,
    min_gate,
    product_gate,
    square_gate,
)
from attnc.constructions.fitting.selection import allowed_anchors
from attnc.errors import BoundNotMet, InputError
from attnc.functions.gate_recipes import Decay, ExactKeys
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.threads import one_thread
from attnc.targets.expressions.coefficient import UNIT, ZERO, Coefficient
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call
from attnc.targets.parts.lowering import Lowering
from attnc.targets.parts.part import Choice, Combination, Multiply, Part, Source, T, Unary, combination, in_order
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes
from attnc.targets.target import Target

__all__ = ["GATES", "Gate", "gates", "max_gate", "min_gate", "product_gate", "square_gate"]

DEFAULT_GATE_EPS = 1e-6
"""The error asked for if none is given."""


@one_thread()
def gates(
    target: Target,
    *,
    eps: float | None = None,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One layer of heads for affine combinations of activations of affine functions and of products of two of them.

    Theorem.  |out − f| ≤ Σ |coefficient|·error of the gate, on the whole box. An end of the box may be infinite if the
              gates hold there: all gates do, except products at both ends and exp at +∞.
    Weights.  Every gate is a head on the state token, over keys that carry its argument: see `fitting.gate`. The head
              of a product multiplies the factors minus the middles of their ranges; the rest of the product is affine.
    Errors.   The gates get equal shares of eps. Rounding is not part of the error.

    Parameters
    ----------
    target : Target
        A sum of multiples of activations, and of products, of affine functions. The range of a single variable may be
        infinite.
    eps : float, optional
        The largest error allowed; 1e-6 if it is not given.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of keys and on the memory for the program, in bytes.
    progress : callable, optional
        Called once, with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program. Its `parameters` are the names and keys of its gates and the sum of their errors.

    Raises
    ------
    InputError
        If the target is not such an expression. The message names the part that no gate computes.
    BoundNotMet
        If the gates do not reach eps, or if they have more keys than `max_anchors` and `max_bytes` allow.

    Examples
    --------
    >>> import math
    >>> import attnc
    >>> target = attnc.as_target("tanh(x) + relu(x)", {"x": (-math.inf, math.inf)})
    >>> built = attnc.constructions.gates(target, eps=1e-6)
    >>> built.program.num_anchors
    4
    """
    eps = DEFAULT_GATE_EPS if eps is None else eps
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    GATES_CONSTRUCTION.accept(target, request)
    assert target.expression is not None
    try:
        plan = _GatePlan(target, target.expression, eps)
    except OutOfReach as refusal:
        raise BoundNotMet(
            f"gates cannot bring {target.describe()} on {target.box} to eps={eps:g}: {refusal}",
            eps=eps,
            reach=eps * refusal.error / refusal.eps,
        ) from None
    num_anchors, most = sum(gate.num_anchors for gate, _ in plan.heads), allowed_anchors(target, request)
    if num_anchors > most:
        limit = f"max_anchors and max_bytes ({most:,})"
        raise too_many_anchors(target, eps, "gates", f"{num_anchors:,} anchors", limit)
    program, derivation = build_parts(target, plan.outputs, plan.factors, plan.fits, dtype)
    request.report("building gates", 1.0)
    names = ", ".join(f"{gate.name} ({gate.num_anchors})" for gate, _ in plan.heads)
    parameters = (("gates", names), ("error", plan.error))
    # A staged proof needs heads of one argument and a bounded box.
    is_staged = target.box.is_bounded and not any(isinstance(part, Choice) for _, part in plan.heads)
    proved_by = derivation if is_staged else None
    return Built(program, "gates", None, parameters=parameters, derivation=proved_by, observed=plan.error)


class _GatePlan:
    """The outputs of an expression as sums of parts that one layer of heads computes, each to an equal share of eps.

    If one layer cannot compute a part of the expression, an InputError names this part.
    """

    def __init__(self, target: Target, expression: Expression, eps: float) -> None:
        self.target, self.expression = target, expression
        self.factors: dict[int, tuple[Unary, Part]] = {}
        self.fits: dict[int, PartFit] = {}
        lowered = Lowering(expression.variables).lower(expression.outputs)
        for part in in_order(lowered):
            self._require_gate(part)
        sums, parts, shares = [_as_sum(output) for output in lowered], dict[int, Part](), dict[int, float]()
        for terms, _ in sums:
            computed = [(part, c) for part, c in terms if not isinstance(part, Source)]
            for part, coefficient in computed:
                share = eps / (len(computed) * coefficient.size)
                parts[id(part)], shares[id(part)] = part, min(shares.get(id(part), math.inf), share)
        heads = {key: self._head(part, shares[key]) for key, part in parts.items()}
        self.heads = tuple(heads.values())
        self.error = max(
            math.fsum(c.size * heads[id(part)][0].error for part, c in terms if id(part) in heads) for terms, _ in sums
        )
        self.outputs = [
            combination([(heads[id(part)][1] if id(part) in heads else part, c) for part, c in terms], constant)
            for terms, constant in sums
        ]

    def _require_gate(self, part: Part) -> None:
        reason = _refusal(part)
        if reason is not None:
            text = PartRanges(sub_boxes(self.target.box), self.expression.variables).describe(part)
            where = "" if text == self.expression.text else f" in {self.expression.text!r}"
            raise InputError(
                f"gates cannot build {text!r}{where}: {reason}. On a finite box construction='compose' takes any "
                "expression."
            )

    def _head(self, part: Part, eps: float) -> tuple[Gate, Part]:
        """Return the gate of a part, and the part as its head computes it plus an affine function of the inputs."""
        match part:
            case Multiply(left, right):
                factors = _gated(part)
                if factors is None:
                    return self._product(left, right, eps)
                self.factors[id(part)] = factors
                return self._head(factors[0], eps)[0], part
            case Choice(name, operands):
                gate = (max_gate if name == "max" else min_gate)(eps, len(operands))
            case Unary(base, Call() as call):
                gate = self._gate(base, call, eps)
            case _:
                raise AssertionError("every other part was refused")
        self.fits[id(part)] = PartFit(gate.keys, gate.error)
        return gate, part

    def _gate(self, argument: Part, call: Call, eps: float) -> Gate:
        """Return the gate of a function of t, or of its clip to two numbers."""
        if len(call.arguments) > 1:
            low, high = (Coefficient(limit).value for limit in call.arguments[1:])
            return GATES[call.name](eps, low, high)
        hi = self._range(argument)[1] if isinstance(FUNCTIONS[call.name].gate, Decay) else 0.0
        if not hi < MAX_EXPONENT:
            raise InputError(
                f"exp of an argument up to {hi:g} in {self.target.describe()}: its gate holds on (−∞, b], b < "
                f"{MAX_EXPONENT:g}. Choose a box on which the argument is bounded above."
            )
        return function_gate(call.name, eps, hi)

    def _product(self, x: Part, y: Part, eps: float) -> tuple[Gate, Part]:
        """Return the gate of (x − a)(y − b), and the sum of this product and ay + bx − ab."""
        (a, size_x), (b, size_y) = self._middle(x), self._middle(y)
        gate = product_gate(eps, size_x, size_y)
        carrier, argument = (combination([(u, UNIT)], Coefficient.of(-middle)) for u, middle in ((x, a), (y, b)))
        product, function = Multiply(carrier, argument), Unary(argument, T)
        self.factors[id(product)] = function, carrier
        self.fits[id(function)] = PartFit(gate.keys, gate.error)
        terms = [(product, UNIT), (y, Coefficient.of(a)), (x, Coefficient.of(b))]
        whole = combination(terms, Coefficient.of(-Fraction(a) * Fraction(b)))
        return gate, whole

    def _middle(self, factor: Part) -> tuple[float, float]:
        """Return the middle of the range of a factor, and a little more than half of its width."""
        lo, hi = self._range(factor)
        if not math.isfinite(hi - lo):
            raise InputError(
                f"a product needs bounded factors, and one in {self.target.describe()} takes values in "
                f"[{lo:g}, {hi:g}] on {self.target.box}. Choose a bounded box."
            )
        middle = lo / 2 + hi / 2
        return middle, max(hi - middle, middle - lo) * (1 + 1e-12)

    def _range(self, part: Part) -> tuple[float, float]:
        """Return the least and the greatest value of an affine function on the box, whose ends may be infinite."""
        terms, constant = _as_sum(part)
        box, low, high = self.target.box, constant.value, constant.value
        for source, coefficient in terms:
            assert isinstance(source, Source)
            ends = sorted(coefficient.value * float(end[source.index]) for end in (box.lo, box.hi))
            low, high = low + ends[0], high + ends[1]
        return low, high


def _as_sum(part: Part) -> tuple[tuple[tuple[Part, Coefficient], ...], Coefficient]:
    """Return the terms and the constant of a combination. Any other part is a sum with one term, itself."""
    return (part.terms, part.constant) if isinstance(part, Combination) else (((part, UNIT),), ZERO)


def _is_affine(part: Part) -> bool:
    return all(isinstance(inner, Source) for inner, _ in _as_sum(part)[0])


def _gated(product: Multiply) -> tuple[Unary, Part] | None:
    """Return (g(A), C) of C·g(A), if the keys of g are exact and carry nothing. Then they can carry an affine C."""
    for function, carrier in ((product.left, product.right), (product.right, product.left)):
        match function:
            case Unary(base, Call(name, _)) if _is_affine(base) and _is_affine(carrier):
                recipe = FUNCTIONS[name].gate
                if isinstance(recipe, ExactKeys) and not any(recipe.carried):
                    return function, carrier
    return None


def _refusal(part: Part) -> str | None:
    """Return the reason why no head of the first layer computes this part, or None if one does."""
    arguments: Sequence[Part] = ()
    match part:
        case Multiply(left, right):
            if not (_is_affine(left) and _is_affine(right)) and _gated(part) is None:
                return "a gate multiplies two affine functions, or one and a sigmoid or tanh"
        case Choice("clip", _):
            return "clip needs two numbers, the first below the second"
        case Choice(_, operands):
            arguments = operands
        case Unary(base, Call(name, _)):
            if FUNCTIONS[name].gate is None:
                others = ", ".join(other for other, function in FUNCTIONS.items() if function.gate is not None)
                return f"there is no gate for {name}; there are gates for {others}"
            arguments = (base,)
        case Unary():
            return "gates build sums, multiples, products of two and squares, and no other operation"
    return None if all(map(_is_affine, arguments)) else "the argument of an activation must be affine in the variables"


def _suits(target: Target, request: Request) -> bool:
    """Accept expressions, and every target on an infinite box, since no other construction takes one."""
    return not target.box.is_bounded or (request.is_plain(target) and target.expression is not None)


GATES_CONSTRUCTION = Construction("gates", for_eps(gates), EXPRESSION[1:], _suits, has_own_functions=True)
