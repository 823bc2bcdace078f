"""Text → a list of steps, by a walk of Python's syntax tree that knows a short list of nodes. Nothing is ever run.

Numbers are exact: 0.1 is 1/10. A step is (operation, *operands): ("number", q), ("variable", i), ("pi",), ("e",),
("power", step, n) with a whole number n, ("root", step, q) with any other rational one, or an operator or function with
the numbers of earlier steps. Equal sub-expressions are one step. `evaluate` goes through the steps by any rules of
arithmetic.
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
from typing import Any

from flint import fmpq

from attnc_checker.files import BadFile

Function = tuple[list[tuple[Any, ...]], list[int]]
"""Steps, and the numbers of those that are outputs."""

MAX_LENGTH, MAX_EXPONENT, MAX_BITS = 50_000, 1000, 8192
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TOKEN = re.compile(
    r"\s+|(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,3})?(?![A-Za-z0-9_.])"
    r"|[A-Za-z][A-Za-z0-9_]*|\*\*|[-+*/(),]"
)
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": lambda a, n: a ** int(n.p),
}
UNARY = "sin cos tan exp log sqrt abs tanh sinh cosh atan asin acos erf sigmoid relu gelu silu softplus sign floor"
ARITY = {name: (1, 1) for name in UNARY.split()} | {"min": (2, 999), "max": (2, 999), "clip": (3, 3)}


def parse(text: Any, variables: Sequence[str]) -> Function:
    reader = Reader(variables)
    outputs = reader.parse(text)
    return reader.steps, outputs


def constants(values: Sequence[float]) -> Function:
    return [("number", fmpq(*x.as_integer_ratio())) for x in values], list(range(len(values)))


class Reader:
    """Collects the steps of texts, in which `names` stand for earlier steps."""

    def __init__(self, variables: Sequence[str]) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.places: dict[tuple[Any, ...], int] = {}
        self.variables = {name: self.add("variable", i) for i, name in enumerate(variables)}

    def parse(self, text: Any, names: dict[str, int] | None = None) -> list[int]:
        """The numbers of the outputs. Without names, the variables are meant, and what is defined before the outputs:

        "u = x*y; v = sin(u); u + v".
        """
        *definitions, outputs = text.split(";") if isinstance(text, str) and names is None else [text]
        for name, _, body in (definition.partition("=") for definition in definitions):
            name = name.strip()
            if not NAME.fullmatch(name) or name in (*self.variables, "pi", "e"):
                raise BadFile(f"the expression defines {name!r:.40}, which is no name, or known already")
            (self.variables[name],) = self.outputs(body, self.variables)
        return self.outputs(outputs, self.variables if names is None else names)

    def outputs(self, text: Any, names: dict[str, int]) -> list[int]:
        if not isinstance(text, str) or len(text) > MAX_LENGTH:
            raise BadFile(f"the certificate's expression is no text of at most {MAX_LENGTH:,} characters")
        try:
            position = 0
            while position < len(text):
                if not (token := TOKEN.match(text, position)):
                    raise ValueError(f"unknown characters at {text[position : position + 20]!r}")
                position = token.end()
            self.line, self.names = re.sub(r"\s", " ", text).strip(), names
            body = ast.parse(self.line, mode="eval").body
            return [self.read(part) for part in (body.elts if isinstance(body, ast.Tuple) else [body])]
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise BadFile(f"the expression {text[:60]!r} cannot be read: {error}") from None

    def read(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() | float()) if type(node.value) is not bool:
                value = Fraction(self.line[node.col_offset : node.end_col_offset])
                return self.add("number", fmpq(value.numerator, value.denominator))
            case ast.Name(id="pi" | "e"):
                return self.add(node.id)
            case ast.Name() if node.id in self.names:
                return self.names[node.id]
            case ast.UnaryOp(op=ast.UAdd()):
                return self.read(node.operand)
            case ast.UnaryOp(op=ast.USub()):
                return self.arithmetic("neg", self.read(node.operand))
            case ast.BinOp() if type(node.op) in OPERATORS:
                return self.arithmetic(OPERATORS[type(node.op)], self.read(node.left), self.read(node.right))
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in ARITY:
                if ARITY[name][0] <= len(node.args) <= ARITY[name][1]:
                    return self.add(name, *map(self.read, node.args))
        raise ValueError(f"{ast.unparse(node)[:40]!r} is not allowed here")

    def arithmetic(self, operation: str, *operands: int) -> int:
        """Numbers are computed with exactly, so that x**(6/3) is x**2, unless they would grow large."""
        numbers = [self.steps[i][1] for i in operands if self.steps[i][0] == "number"]
        is_power = operation == "**" and self.steps[operands[1]][0] == "number"
        exponent = numbers[-1] if is_power else fmpq(1)
        if abs(exponent) > MAX_EXPONENT:
            raise ValueError(f"an exponent is beyond {MAX_EXPONENT}")
        bits = abs(exponent) * sum(int(x.p).bit_length() + int(x.q).bit_length() for x in numbers)
        if len(numbers) == len(operands) and exponent.q == 1 and bits <= MAX_BITS:
            with contextlib.suppress(ZeroDivisionError):  # left to the evaluation, which finds no bound
                return self.add("number", ON_NUMBERS[operation](*numbers))
        if is_power and exponent.q == 1:
            return self.add("power", operands[0], int(exponent.p))
        if is_power:
            return self.add("root", operands[0], exponent)
        return self.add(operation, *operands)

    def add(self, *step: Any) -> int:
        if step not in self.places:
            self.places[step] = len(self.steps)
            self.steps.append(step)
        return self.places[step]


class Rules(ABC):
    """An arithmetic: of Taylor models or ranges on a box, or of what is known on a tail."""

    @abstractmethod
    def constant(self, x: Any) -> Any: ...  # a rational number
    @abstractmethod
    def named(self, name: str) -> Any: ...  # pi or e
    @abstractmethod
    def variable(self, i: int) -> Any: ...
    @abstractmethod
    def plus(self, a: Any, b: Any, sign: int = 1) -> Any: ...
    @abstractmethod
    def times(self, a: Any, b: Any) -> Any: ...
    @abstractmethod
    def maximum(self, a: Any, b: Any) -> Any: ...
    @abstractmethod
    def apply(self, name: str, a: Any) -> Any: ...  # a smooth function of one variable, or "inverse"
    @abstractmethod
    def step(self, name: str, a: Any) -> Any: ...  # sign or floor

    def power(self, a: Any, n: int) -> Any:
        """a^n, n ≥ 0."""
        result = self.constant(fmpq(1))
        for bit in f"{n:b}":
            result = self.times(result, result)
            result = self.times(result, a) if bit == "1" else result
        return result

    def root(self, a: Any, q: Any) -> Any:
        """a^q, a ≥ 0."""
        return self.apply("exp", self.times(self.constant(q), self.apply("log", a)))

    def minus(self, a: Any) -> Any:
        return self.plus(self.constant(fmpq(0)), a, -1)

    def minimum(self, a: Any, b: Any) -> Any:
        return self.minus(self.maximum(self.minus(a), self.minus(b)))

    def magnitude(self, a: Any) -> Any:
        return self.maximum(a, self.minus(a))

    def clip(self, a: Any, low: Any, high: Any) -> Any:
        return self.minimum(self.maximum(a, low), high)


def evaluate(function: Function, rules: Rules) -> list[Any]:
    def inverse(a: Any) -> Any:
        return rules.apply("inverse", a)

    known: dict[str, Callable[..., Any]] = {
        "number": rules.constant,
        "variable": rules.variable,
        "pi": lambda: rules.named("pi"),
        "e": lambda: rules.named("e"),
        "neg": rules.minus,
        "+": rules.plus,
        "-": lambda a, b: rules.plus(a, b, -1),
        "*": rules.times,
        "/": lambda a, b: rules.times(a, inverse(b)),
        "power": lambda a, n: rules.power(a, n) if n >= 0 else inverse(rules.power(a, -n)),
        "root": rules.root,
        "**": lambda a, b: rules.apply("exp", rules.times(b, rules.apply("log", a))),
        "abs": rules.magnitude,
        "relu": lambda a: rules.maximum(a, rules.constant(fmpq(0))),
        "max": lambda *a: reduce(rules.maximum, a),
        "min": lambda *a: reduce(rules.minimum, a),
        "clip": rules.clip,
        "sign": lambda a: rules.step("sign", a),
        "floor": lambda a: rules.step("floor", a),
    }
    done: dict[int, Any] = {}
    for number in _needed(function):
        operation, *operands = function[0][number]
        steps = _steps(function[0][number])
        values = [*(done[i] for i in steps), *operands[len(steps) :]]
        done[number] = known[operation](*values) if operation in known else rules.apply(operation, *values)
    return [done[i] for i in function[1]]


def _steps(step: tuple[Any, ...]) -> tuple[int, ...]:
    """The earlier steps that this one is made of."""
    return () if step[0] in ("number", "variable") else step[1:2] if step[0] in ("power", "root") else step[1:]


def _needed(function: Function) -> list[int]:
    needed = set(function[1])
    for number in range(len(function[0]) - 1, -1, -1):
        if number in needed:
            needed.update(_steps(function[0][number]))
    return sorted(needed)
