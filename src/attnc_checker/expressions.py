"""Text → a list of steps. The grammar has numbers, names, calls, tuples, + - * / ** and parentheses, as in Python.

Numbers are exact: 0.1 is 1/10. A step is a rule of arithmetic with its operands: indices of earlier steps (`Step`), and
names or numbers of its own. Equal sub-expressions are one step. `evaluate` computes the steps with any `Rules`.
"""

from __future__ import annotations

import contextlib
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial, reduce
from itertools import accumulate
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
MAX_NESTED = 120
"""Largest number of parentheses and exponents within each other. attnc reads 100, and Python's stack has room for it.
Sums and products may be as long as the text."""
MAX_EXPONENT, MAX_BITS = 1000, 8192
"""The largest exponent that is accepted, and the largest number of bits of constants that are computed exactly."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TOKEN = re.compile(
    r"\s+|(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,3})?(?![A-Za-z0-9_.])"
    r"|[A-Za-z][A-Za-z0-9_]*|\*\*|[-+*/(),]"
)
NAMED: dict[str, Callable[[], arb]] = {"pi": arb.pi, "e": arb.const_e}
ON_NUMBERS: dict[str, Callable[[fmpq, fmpq], fmpq]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": lambda a, n: a ** int(n.p),
}
NUMBERS = 4096
"""How many numbers are kept as fractions: a claim about stages repeats those of its expression."""
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
        needed, pending = set(outputs), [*outputs]
        while pending:
            new = {x for x in self.steps[pending.pop()].given if isinstance(x, Step)} - needed
            needed |= new
            pending += new
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
            tokens = [token for token in TOKEN.findall(text) if not token.isspace()]
            for _ in range(MAX_NESTED):  # (x, y) is a tuple
                if not _is_enclosed(tokens):
                    break
                tokens = tokens[1:-1]
            self.left, self.names, self.depth = ["", *reversed(tokens)], names, 0
            return self._list("")
        except (RecursionError, ValueError) as error:
            raise BadFile(f"the expression {text[:60]!r} cannot be read: {error}") from None

    def _list(self, end: str, is_tuple: bool = True) -> list[Step]:
        """Read sums up to the token `end`, with commas between them, or one sum. A tuple may end with a comma."""
        found = [self._chain("+-")]
        while is_tuple and self._take(","):
            if self.left[-1] != end:
                found.append(self._chain("+-"))
        token = self.left.pop()
        require(token == end, f"{token!r:.40} is not allowed here", ValueError)
        return found

    def _take(self, *tokens: str) -> str | None:
        """Return the next token and go on if it is one of these. The empty token is the end of the text."""
        return self.left.pop() if self.left[-1] in tokens else None

    def _chain(self, signs: str) -> Step:
        """Read a sum, or a product (signs are * and /), from the left."""
        read = self._signed if signs == "*/" else partial(self._chain, "*/")
        found = read()
        while sign := self._take(*signs):
            found = self._arithmetic(sign, found, read())
        return found

    def _signed(self) -> Step:
        """Read signs, an operand and its power: −x**−y is −(x**(−y)), and powers are from the right."""
        self.depth += 1
        require(self.depth <= MAX_NESTED, "it is nested too deep", ValueError)
        is_negative = False
        while sign := self._take("+", "-"):
            is_negative ^= sign == "-"
        found = self._operand()
        if self._take("**"):
            found = self._arithmetic("**", found, self._signed())
        self.depth -= 1
        return self._arithmetic("-", self.add("constant", fmpq(0)), found) if is_negative else found

    def _operand(self) -> Step:
        token = self.left.pop()
        if token == "(":
            return self._list(")", is_tuple=False)[0]
        if token[:1].isdigit() or token[:1] == ".":
            require(not re.fullmatch("0+[1-9][0-9]*", token), f"{token:.40} begins with 0", ValueError)
            return self.add("constant", _number(token))
        is_name = NAME.fullmatch(token) is not None
        match token, self._list(")") if is_name and self._take("(") else []:
            case name, [] if name in NAMED:
                return self.add("named", name)
            case name, [] if is_name and name in self.names:
                return self.names[name]
            case name, [one] if name in CALLS:
                return self.add(*CALLS[name], one)
            case "relu", [one]:
                return self.add("maximum", one, self.add("constant", fmpq(0)))
            case "clip", [_, _, _] as three:
                return self.add("clip", *three)
            case "min" | "max" as name, [_, _, *_] as many:
                return reduce(lambda a, b: self.add(f"{name}imum", a, b), many)
        raise ValueError(f"{token!r:.40} is not allowed here")

    def _arithmetic(self, operation: str, a: Step, b: Step) -> Step:
        """Add a step. Constants are computed exactly unless they grow large, so that x**(6/3) is x**2."""
        constants = [self.steps[i].given[0] for i in (a, b) if self.steps[i].rule == "constant"]
        numbers = [x for x in constants if type(x) is fmpq]
        is_power = operation == "**" and self.steps[b].rule == "constant"
        exponent = numbers[-1] if is_power else fmpq(1)
        require(abs(exponent) <= MAX_EXPONENT, f"an exponent is beyond {MAX_EXPONENT}", ValueError)
        if len(numbers) == 2 and exponent.q == 1 and abs(exponent) * sum(map(_bits, numbers)) <= MAX_BITS:
            with contextlib.suppress(ZeroDivisionError):  # the evaluation then finds no bound
                return self.add("constant", ON_NUMBERS[operation](*numbers))
        if is_power:
            return self.add("apply", exponent, a)
        if operation == "**":
            return self.add("raised", a, b)
        if operation == "/":
            return self.add("times", a, self.add("apply", fmpq(-1), b))
        if operation == "*":
            return self.add("times", a, b) if a != b else self.add("apply", fmpq(2), a)
        return self.add("plus", a, b, 1 if operation == "+" else -1)

    def add(self, rule: str, *given: Step | Smooth | int) -> Step:
        """Add a step by the method of `Rules` of this name, and return its index."""
        step = Operation(rule, given)
        place = self.places.setdefault(step, Step(len(self.steps)))
        if place == len(self.steps):
            self.steps.append(step)
        return place


@lru_cache(NUMBERS)
def _number(token: str) -> fmpq:
    value = Fraction(token)
    return fmpq(value.numerator, value.denominator)


def _bits(x: fmpq) -> int:
    return int(x.p).bit_length() + int(x.q).bit_length()


def _is_enclosed(tokens: list[str]) -> bool:
    """Return whether the first token opens a parenthesis that the last one closes."""
    if tokens[:1] != ["("]:
        return False
    opened = list(accumulate((token == "(") - (token == ")") for token in tokens))
    return 0 not in opened[:-1] and opened[-1] == 0


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
