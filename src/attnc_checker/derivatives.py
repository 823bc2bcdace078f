"""The partial derivatives of an expression, as steps of the same language."""

from __future__ import annotations

from flint import fmpq

from attnc_checker.expressions import Function, Operation, Reader, Smooth, Step
from attnc_checker.files import require
from attnc_checker.ranges import Range, Ranges

DERIVATIVES = {
    "sin": "cos(t)",
    "cos": "-sin(t)",
    "tan": "1 + tan(t)**2",
    "exp": "exp(t)",
    "log": "1/t",
    "tanh": "1 - tanh(t)**2",
    "sinh": "cosh(t)",
    "cosh": "sinh(t)",
    "atan": "1/(1 + t**2)",
    "asin": "1/sqrt(1 - t**2)",
    "acos": "-1/sqrt(1 - t**2)",
    "erf": "2/sqrt(pi)*exp(-t**2)",
    "sigmoid": "(1 - tanh(t/2)**2)/4",
    "softplus": "sigmoid(t)",
}
"""Derivatives, in a form that interval arithmetic encloses tightly."""
WIDER = {
    "silu": "sigmoid(t) + t*sigmoid(t)*sigmoid(-t)",
    "gelu": "(1 + erf(t/sqrt(2)))/2 + t*exp(-t**2/2)/sqrt(2*pi)",
}
"""Derivatives that intervals enclose loosely, and Taylor models tightly."""


def gradient(function: Function, variables: tuple[str, ...]) -> Function:
    """Return ∂f_o/∂x_i as one function, whose outputs are ordered by o, then by i. Raise ValueError if there is none.

    The derivative of max(a, b) is H·a′ + (1 − H)·b′, H = (1 + sign(a − b))/2: at a kink between those of both sides.
    """
    differentiation = _Differentiation(function, variables)
    columns = [differentiation.along(i) for i in range(len(variables))]
    outputs = [column[o] for o in function.outputs for column in columns]
    return differentiation.reader.function(outputs)


class _Differentiation:
    """Copies of the steps of a function, and of their derivatives, in one reader. A derivative that is 0 is None."""

    def __init__(self, function: Function, variables: tuple[str, ...]) -> None:
        self.function, self.reader, self.copies = function, Reader(variables), dict[int, Step]()
        for number, (rule, given) in function.steps.items():
            copied = (self.copies[x] if isinstance(x, Step) else x for x in given)
            self.copies[number] = self.reader.add(rule, *copied)

    def along(self, i: int) -> dict[int, Step]:
        found: dict[int, Step | None] = {}
        for number, (rule, given) in self.function.steps.items():
            if rule == "variable":
                found[number] = self._number(1) if given == (i,) else None
                continue
            slopes = [found[x] for x in given if isinstance(x, Step)]
            is_constant = all(slope is None for slope in slopes)
            found[number] = None if is_constant else self._step(number, Operation(rule, given), slopes)
        return {number: self._number(0) if slope is None else slope for number, slope in found.items()}

    def _step(self, number: int, operation: Operation, slopes: list[Step | None]) -> Step | None:
        """Return the derivative of one step, some of whose operands have one."""
        rule, given = operation
        own = [self.copies[x] for x in given if isinstance(x, Step)]
        match rule, [x for x in given if not isinstance(x, Step)]:
            case "plus", sign:
                return self._plus(slopes[0], slopes[1], -1 if sign == [-1] else 1)
            case "times", []:
                return self._plus(self._times(slopes[0], own[1]), self._times(own[0], slopes[1]))
            case "apply", [name]:
                return self._times(self._outer(name, own[0]), slopes[0])
            case "raised", []:
                lower = self.reader.add("raised", own[0], self.reader.add("plus", own[1], self._number(1), -1))
                by_base = self._times(self._times(own[1], lower), slopes[0])
                log = self.reader.add("apply", "log", own[0])
                return self._plus(by_base, self._times(self._times(self.copies[number], log), slopes[1]))
            case "magnitude", []:
                return self._times(self.reader.add("step", "sign", own[0]), slopes[0])
            case "maximum", []:
                return self._chosen(own[0], own[1], *slopes)
            case "minimum", []:
                return self._chosen(own[1], own[0], *slopes)
            case "clip", []:
                raised = self.reader.add("maximum", own[0], own[1])
                slope = self._chosen(own[0], own[1], slopes[0], slopes[1])
                return self._chosen(own[2], raised, slope, slopes[2])
        raise ValueError(f"there is no derivative of {rule}")

    def _outer(self, name: Smooth | int, a: Step) -> Step | None:
        if isinstance(name, fmpq):
            lower = self._number(1) if name == 1 else a if name == 2 else self.reader.add("apply", name - 1, a)
            return self._times(self._number(name), lower)
        texts = DERIVATIVES | WIDER
        require(name in texts, f"the derivative of {name} is not known", ValueError)
        (found,) = self.reader.parse(texts[str(name)], {"t": a})
        return found

    def _chosen(self, larger: Step, smaller: Step, first: Step | None, second: Step | None) -> Step | None:
        """Return H·first + (1 − H)·second with H = (1 + sign(larger − smaller))/2."""
        side = self.reader.add("step", "sign", self.reader.add("plus", larger, smaller, -1))
        half = self.reader.add("constant", fmpq(1, 2))
        wins, loses = (self._times(half, self.reader.add("plus", self._number(1), side, sign)) for sign in (1, -1))
        return self._plus(self._times(wins, first), self._times(loses, second))

    def _number(self, x: int | fmpq) -> Step:
        return self.reader.add("constant", fmpq(x))

    def _plus(self, a: Step | None, b: Step | None, sign: int = 1) -> Step | None:
        if b is None:
            return a
        return self.reader.add("plus", self._number(0) if a is None else a, b, sign)

    def _times(self, a: Step | None, b: Step | None) -> Step | None:
        return None if a is None or b is None else self.reader.add("times", a, b)


class Kinks(Ranges):
    """Ranges on a box. `are_met` tells whether there may be a kink of a function, from the signs in its derivatives."""

    are_met = False

    def step(self, name: str, a: Range) -> Range:
        self.are_met |= not (a[0] > 0 or a[1] < 0)
        return super().step(name, a)
