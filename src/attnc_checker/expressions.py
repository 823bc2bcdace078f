"""Text → a list of steps, by a walk of Python's syntax tree that accepts a short list of nodes. No text is ever run.

Numbers are exact: 0.1 is 1/10. A step is a rule of arithmetic with its operands: indices of earlier steps (`Step`), and
names or numbers of its own. Equal sub-expressions are one step. `evaluate` computes the steps with any `Rules`.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

from flint import arb, fmpq

from attnc_checker.files import BadFile, require


class Step(int):
    """The index of a step."""


Smooth = str | fmpq
"""A smooth function of one number: its name, or the exponent of a power."""


class Operation(NamedTuple):
    """A method of `Rules` by its name, and its operands."""

    rule: str
    given: tuple[Step | Smooth | int, ...]


class Function(NamedTuple):
    """Operations by index, each after those that it needs, and the indices of the outputs."""

    steps: dict[int, Operation]
    outputs: Sequence[int]


V = TypeVar("V")
"""The values of an arithmetic."""
MAX_LENGTH = 50_000
"""Largest number of characters of one text. attnc writes no longer definitions."""
MAX_EXPONENT, MAX_BITS = 1000, 8192
"""The largest exponent that is accepted, and the largest number of bits of constants that are computed exactly."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TOKEN = re.compile(
    r"\s+|(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,3})?(?![A-Za-z0-9_.])"
    r"|[A-Za-z][A-Za-z0-9_]*|\*\*|[-+*/(),]"
)
NAMED: dict[str, Callable[[], arb]] = {"pi": arb.pi, "e": arb.const_e}
ON_NUMBERS: dict[type[ast.operator], Callable[[fmpq, fmpq], fmpq]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda a, n: a ** int(n.p),
}
SMOOTH = "sin cos tan exp log tanh sinh cosh atan asin acos erf sigmoid gelu silu softplus"
CALLS: dict[str, tuple[str, *tuple[Smooth, ...]]] = {name: ("apply", name) for name in SMOOTH.split()}
CALLS |= {"sqrt": ("apply", fmpq(1, 2)), "abs": ("magnitude",), "sign": ("step", "sign"), "floor": ("step", "floor")}
"""Functions of one number: the rule, and its first operand if it has one."""


def parse(text: object, variables: Sequence[str]) -> Function:
    reader = Reader(variables)
    return reader.function(reader.parse(text))


class Reader:
    """Collects the steps of texts. `names` in a text refer to earlier steps."""

    def __init__(self, variables: Sequence[str]) -> None:
        self.steps: list[Operation] = []
        self.places: dict[Operation, Step] = {}
        if taken := sorted(NAMED.keys() & set(variables)):
            raise BadFile(f"{taken[0]} is a number, and no name of a variable or of a stage")
        self.variables = {name: self.add("variable", i) for i, name in enumerate(variables)}

    def function(self, outputs: Sequence[Step]) -> Function:
        """Return the steps that the outputs need."""
        needed = set(outputs)
        for number in range(len(self.steps) - 1, -1, -1):
            if number in needed:
                needed.update(x for x in self.steps[number].given if isinstance(x, Step))
        return Function({number: self.steps[number] for number in sorted(needed)}, outputs)

    def parse(self, text: object, names: dict[str, Step] | None = None) -> list[Step]:
        """Return the indices of the outputs.

        Without `names` the text may use the variables, and names that it defines: "u = x*y; v = sin(u); u + v".
        """
        definitions, outputs = list[str](), text
        if isinstance(text, str) and names is None:
            *definitions, outputs = text.split(";")
        for name, _, body in (definition.partition("=") for definition in definitions):
            name = name.strip()
            if not NAME.fullmatch(name) or name in self.variables or name in NAMED:
                raise BadFile(f"the expression defines {name!r:.40}, which is no name, or known already")
            self.variables[name], *others = self._outputs(body, self.variables)
            require(not others, f"the expression defines {name!r:.40} to be several numbers", BadFile)
        return self._outputs(outputs, self.variables if names is None else names)

    def _outputs(self, text: object, names: dict[str, Step]) -> list[Step]:
        if not isinstance(text, str) or len(text) > MAX_LENGTH:
            raise BadFile(f"the certificate's expression is no text of at most {MAX_LENGTH:,} characters")
        try:
            if unknown := TOKEN.sub("", text):
                raise ValueError(f"unknown characters {unknown[:20]!r}")
            self.line, self.names = re.sub(r"\s", " ", text).strip(), names
            body = ast.parse(self.line, mode="eval").body
            return [self._read(part) for part in (body.elts if isinstance(body, ast.Tuple) else [body])]
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise BadFile(f"the expression {text[:60]!r} cannot be read: {error}") from None

    def _read(self, node: ast.expr) -> Step:
        match node:
            case ast.Constant(value=int() | float()) if type(node.value) is not bool:
                value = Fraction(self.line[node.col_offset : node.end_col_offset])
                return self.add("constant", fmpq(value.numerator, value.denominator))
            case ast.Name(id="pi" | "e"):
                return self.add("named", node.id)
            case ast.Name() if node.id in self.names:
                return self.names[node.id]
            case ast.UnaryOp(op=ast.UAdd()):
                return self._read(node.operand)
            case ast.UnaryOp(op=ast.USub()):
                return self._arithmetic(ast.Sub, self.add("constant", fmpq(0)), self._read(node.operand))
            case ast.BinOp() if type(node.op) in ON_NUMBERS:
                return self._arithmetic(type(node.op), self._read(node.left), self._read(node.right))
            case ast.Call(func=ast.Name(id=name), args=[one], keywords=[]) if name in CALLS:
                return self.add(*CALLS[name], self._read(one))
            case ast.Call(func=ast.Name(id="relu"), args=[one], keywords=[]):
                return self.add("maximum", self._read(one), self.add("constant", fmpq(0)))
            case ast.Call(func=ast.Name(id="clip"), args=[_, _, _] as three, keywords=[]):
                return self.add("clip", *map(self._read, three))
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as many, keywords=[]):
                return reduce(lambda a, b: self.add(f"{name}imum", a, b), map(self._read, many))
        raise ValueError(f"{ast.unparse(node)[:40]!r} is not allowed here")

    def _arithmetic(self, operation: type[ast.operator], a: Step, b: Step) -> Step:
        """Add a step. Constants are computed exactly unless they grow large, so that x**(6/3) is x**2."""
        numbers = [
            x for i in (a, b) if self.steps[i].rule == "constant" for x in self.steps[i].given if type(x) is fmpq
        ]
        is_power = operation is ast.Pow and self.steps[b].rule == "constant"
        exponent = numbers[-1] if is_power else fmpq(1)
        require(abs(exponent) <= MAX_EXPONENT, f"an exponent is beyond {MAX_EXPONENT}", ValueError)
        bits = abs(exponent) * sum(int(x.p).bit_length() + int(x.q).bit_length() for x in numbers)
        if len(numbers) == 2 and exponent.q == 1 and bits <= MAX_BITS:
            with contextlib.suppress(ZeroDivisionError):  # the evaluation then finds no bound
                return self.add("constant", ON_NUMBERS[operation](*numbers))
        if is_power:
            return self.add("apply", exponent, a)
        if operation is ast.Pow:
            return self.add("raised", a, b)
        if operation is ast.Div:
            return self.add("times", a, self.add("apply", fmpq(-1), b))
        if operation is ast.Mult:
            return self.add("times", a, b) if a != b else self.add("apply", fmpq(2), a)
        return self.add("plus", a, b, 1 if operation is ast.Add else -1)

    def add(self, rule: str, *given: Step | Smooth | int) -> Step:
        """Add a step by the method of `Rules` of this name, and return its index."""
        step = Operation(rule, given)
        if step not in self.places:
            self.places[step] = Step(len(self.steps))
            self.steps.append(step)
        return self.places[step]


class Rules(ABC, Generic[V]):
    """An arithmetic: of Taylor models or ranges on a box, of functions on a tail, or of normal forms."""

    @abstractmethod
    def constant(self, x: fmpq | arb) -> V: ...
    @abstractmethod
    def plus(self, a: V, b: V, sign: int = 1) -> V: ...
    @abstractmethod
    def times(self, a: V, b: V) -> V: ...
    @abstractmethod
    def maximum(self, a: V, b: V) -> V: ...
    @abstractmethod
    def apply(self, name: Smooth, a: V) -> V: ...

    def named(self, name: str) -> V:
        return self.constant(NAMED[name]())

    def power(self, a: V, n: int) -> V:
        """a^n, n ≥ 0."""
        result = self.constant(fmpq(1))
        for bit in f"{n:b}":
            result = self.times(result, result)
            result = self.times(result, a) if bit == "1" else result
        return result

    def raised(self, a: V, b: V) -> V:
        return self.apply("exp", self.times(b, self.apply("log", a)))

    def minus(self, a: V) -> V:
        return self.plus(self.constant(fmpq(0)), a, -1)

    def minimum(self, a: V, b: V) -> V:
        return self.minus(self.maximum(self.minus(a), self.minus(b)))

    def magnitude(self, a: V) -> V:
        return self.maximum(a, self.minus(a))

    def clip(self, a: V, low: V, high: V) -> V:
        return self.minimum(self.maximum(a, low), high)


def evaluate(function: Function, rules: Rules[V]) -> list[V]:
    done: dict[int, V] = {}
    for number, (rule, given) in function.steps.items():
        done[number] = getattr(rules, rule)(*(done[x] if isinstance(x, Step) else x for x in given))
    return [done[i] for i in function.outputs]
