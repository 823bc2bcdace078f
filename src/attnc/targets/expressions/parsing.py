"""Parse text into a tree, in two passes. Nothing is ever evaluated.

The first pass cuts the text into numbers, names, + - * / ** ( ) and commas. The second pass reads them by the rules of
Python: powers from the right, then signs, then products and sums from the left. It calls itself for parentheses and
exponents only, so that chains of operators may be long.
"""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate
from operator import add, mul
from typing import NamedTuple

from attnc.errors import ExpressionError
from attnc.functions.registry import FUNCTIONS
from attnc.targets.expressions.tree import (
    Call,
    Constant,
    Negate,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Variable,
    children,
    folded,
)

MAX_LENGTH = 10_000
"""Maximum number of characters of an expression. Longer text comes from a program, which can split it."""
MAX_DIGITS = 400
"""Maximum number of digits of a number: more than the 309 of the largest float64."""
ALLOWED = "An expression is made of numbers, variables, + - * / **, parentheses and calls such as sin(x)"

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n\f\v]+)"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<operator>\*\*|//|[-+*/(),])"
)
_HINTS = {
    "^": "Write x**2 for a power",
    "//": "Write floor(x/y)",
    "%": "Write x - y*floor(x/y)",
    ".": "There are no attributes; a decimal point needs a digit beside it",
    "=": "Give the right-hand side only",
    **dict.fromkeys("[{", "Use parentheses"),
    "|": "Write abs(x)",
    **dict.fromkeys("×·", "Write * for a product"),
    "÷": "Write / for a quotient",
    **dict.fromkeys("−–", "Write the ASCII sign - for minus"),
    "π": "Write pi",
    "²": "Write **2",
    "³": "Write **3",
    "√": "Write sqrt(x)",
}
MAX_DEPTH = 100
"""Maximum number of nesting levels: of parentheses and exponents, of operations, and of signs in a row. Each takes up
to 5 of Python's 1000 levels of recursion. A sum or a product of any length is one level."""
MAX_WRITTEN_EXPONENT = 1000
"""Largest constant exponent that may be written. 2 to a larger power is near the end of float64."""
TOO_LARGE = f"the exponent is beyond {MAX_WRITTEN_EXPONENT} in size. Write exp(...) if that is meant."
TOO_DEEP = f"the expression is nested more than {MAX_DEPTH} levels deep."
CONSTANTS = ("pi", "e")
OTHER_NAMES = {
    "log2": "log(x)/log(2)",
    "log10": "log(x)/log(10)",
    "log1p": "log(1 + x)",
    "expm1": "exp(x) - 1",
    **dict.fromkeys(("pow", "power"), "x**y"),
    "square": "x**2",
    "cbrt": "x**(1/3) for x ≥ 0",
    "heaviside": "(1 + sign(x))/2",
    "ceil": "-floor(-x)",
    "mod": "x - y*floor(x/y)",
    "cot": "1/tan(x)",
    "sec": "1/cos(x)",
    "csc": "1/sin(x)",
    "sinc": "sin(x)/x, or sin(pi*x)/(pi*x), on a box without 0",
    "hypot": "sqrt(x**2 + y**2)",
}
"""Functions that the language does not have, and expressions that replace them."""
MAX_FOLDED = 2**53
"""Constants are folded while numerators and denominators are at most this, because they are then exact in float64."""


class _Token(NamedTuple):
    kind: str  # number, name, operator, or end
    text: str
    position: int


def parse(text: str) -> tuple[tuple[Node, ...], tuple[str, ...], bool]:
    """Read an expression or a tuple of them. An ExpressionError names the part that is not allowed, and its position.

    Returns the outputs, the variables in order of first appearance, and whether the text was a tuple.
    """
    if not isinstance(text, str):
        raise ExpressionError(f"an expression is text, such as 'sin(x)*y'; this is a {type(text).__name__}.")
    tokens = _tokens(text)
    outputs, is_tuple = _Reader(text, tokens).outputs()
    names = (token.text for token in tokens if token.kind == "name")
    variables = dict.fromkeys(name for name in names if name not in FUNCTIONS and name not in CONSTANTS)
    return outputs, tuple(variables), is_tuple


def _tokens(text: str) -> list[_Token]:
    """Cut the text into tokens and its end. An ExpressionError names the first token that is not allowed."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"the expression has {len(text)} characters, more than the {MAX_LENGTH} allowed. Split it into several."
        )
    if not text.strip():
        raise ExpressionError(f"the expression is empty. {ALLOWED}.", text, 0)
    tokens, opened = list[_Token](), list[int]()
    position, after_number = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.group() == "//":
            found = "//" if match else text[position]
            shown = found if found.isprintable() else f"character U+{ord(found):04X}"
            hint = f"{_HINTS[found]}. " if found in _HINTS else ""
            raise ExpressionError(f"{shown!r} is not allowed. {hint}{ALLOWED}.", text, position)
        token, kind = match.group(), match.lastgroup
        if kind == "name":
            if after_number:
                raise ExpressionError(
                    f"the number before {token!r} runs into it. Write * for a product, as in 2*x.", text, position
                )
            if keyword.iskeyword(token):
                raise ExpressionError(
                    f"{token!r} is a word of Python and cannot be used here. {ALLOWED}.", text, position
                )
            if token.startswith("_"):
                why = "names start with a letter and go on with letters, digits, _"
                raise ExpressionError(f"{token!r} cannot be a name: {why}.", text, position)
        elif kind == "number" and sum(character.isdigit() for character in token) > MAX_DIGITS:
            raise ExpressionError(f"this number has more than {MAX_DIGITS} digits.", text, position)
        elif token == "(":
            opened.append(position)
        elif token == ")":
            if not opened:
                raise ExpressionError(f"the expression cannot be read: unmatched ')'. {ALLOWED}.", text, position)
            opened.pop()
        after_number = kind == "number"
        if kind != "space":
            tokens.append(_Token(str(kind), token, position))
        position = match.end()
    if opened:
        raise ExpressionError(f"the expression cannot be read: '(' was never closed. {ALLOWED}.", text, opened[-1])
    return [*tokens, _Token("end", "", len(text.rstrip()))]


def _number(token: str, text: str, position: int) -> Fraction:
    """Return the rational number that a literal denotes: 0.1 is 1/10."""
    nearest = float(token)
    if not token.lower().partition("e")[0].strip("0."):
        return Fraction(0)
    if nearest == float("inf"):
        raise ExpressionError(f"{_short(token)} is larger than the largest float64, 1.8e308.", text, position)
    if nearest == 0:
        raise ExpressionError(f"{_short(token)} is smaller than the smallest float64, 5e-324.", text, position)
    return Fraction(token)  # fast, because a finite float with few digits has a small exponent


def _short(token: str) -> str:
    return token if len(token) <= 30 else token[:27] + "..."


class _Reader:
    """Reads tokens from the left. Every method reads one part, and leaves the tokens after it."""

    def __init__(self, text: str, tokens: list[_Token]) -> None:
        for _ in range(MAX_DEPTH):
            tokens = [*tokens[1:-2], tokens[-1]] if _is_enclosed(tokens[:-1]) else tokens
        self.text, self.left, self.level = text, tokens[::-1], 0

    def outputs(self) -> tuple[tuple[Node, ...], bool]:
        """Read all: the expressions, and whether they are a tuple."""
        if self.left[-1].kind == "end":
            raise self.error(f"() holds no expression. {ALLOWED}.", 0)
        outputs, is_tuple = [self._sum()], False
        while self._take(","):
            is_tuple = True
            if self.left[-1].kind != "end":
                outputs.append(self._sum())
        if self.left[-1].kind != "end":
            raise self._misplaced()
        if max(folded(outputs, _height)) > MAX_DEPTH:
            raise self.error(TOO_DEEP, 0)
        return tuple(outputs), is_tuple

    def error(self, message: str, position: int) -> ExpressionError:
        return ExpressionError(message, self.text, position)

    def _misplaced(self) -> ExpressionError:
        """Return the error about the next token."""
        token = self.left[-1]
        reason = f"{token.text!r} is not allowed here"
        if token.kind == "end":
            reason = "it ends too early"
        elif token.kind != "operator":
            reason = f"an operator is missing before {_short(token.text)!r}"
        return self.error(f"the expression cannot be read: {reason}. {ALLOWED}.", token.position)

    def _take(self, *texts: str) -> _Token | None:
        """Return the next token and go on, if it is one of these."""
        return self.left.pop() if self.left[-1].text in texts else None

    def _sum(self) -> Node:
        """Read a chain of + and −. It is one level, however long."""
        terms = _operands(Sum, self._product())
        while sign := self._take("+", "-"):
            term = self._product()
            _extend(terms, _negated(term) if sign.text == "-" else term, add)
        return _chain(Sum, terms)

    def _product(self) -> Node:
        """Read a chain of * and /.

        It is one level, plus one for each division, whose dividend is the chain before it.
        """
        factors = _operands(Product, self._signed())
        while sign := self._take("*", "/"):
            right = self._signed()
            if sign.text == "*":
                _extend(factors, right, mul)
            else:
                factors = [_quotient(_chain(Product, factors), right)]
        return _chain(Product, factors)

    def _signed(self) -> Node:
        """Read signs, an operand and its power. The signs are those of the power."""
        signs = list[_Token]()
        while sign := self._take("+", "-"):
            signs.append(sign)
        start = self.left[-1].position
        self.level += 1
        if max(self.level, len(signs)) > MAX_DEPTH:
            raise self.error(TOO_DEEP, start)
        node = self._operand()
        if self.left[-1].text == "(":
            raise self.error("only a function can be called. Write * for a product, as in 2*(x + 1).", start)
        if self._take("**"):
            where = self.left[-1].position
            node = self._power(node, self._signed(), where)
        self.level -= 1
        for each in signs:
            node = _negated(node) if each.text == "-" else node
        return node

    def _operand(self) -> Node:
        token = self.left[-1]
        if token.kind not in ("number", "name") and token.text != "(":
            raise self._misplaced()
        self.left.pop()
        if token.kind == "number":
            return Number(self._number(token))
        if token.kind == "name":
            return self._call(token) if self._take("(") else self._name(token)
        node = self._sum() if self.left[-1].text != ")" else None
        if node and self._take(")"):
            return node
        if node and self.left[-1].text != ",":
            raise self._misplaced()
        raise self.error("a tuple is allowed only around the whole expression, for several outputs.", token.position)

    def _number(self, token: _Token) -> Fraction:
        if token.text.isdigit() and token.text.lstrip("0") not in ("", token.text):
            raise self.error(f"{_short(token.text)} begins with zeros. Write the number without them.", token.position)
        return _number(token.text, self.text, token.position)

    def _name(self, token: _Token) -> Node:
        name = token.text
        if name in CONSTANTS:
            return Constant(name)
        if name in FUNCTIONS:
            raise self.error(f"{name} is a function: call it, as in {name}(x), or choose another name.", token.position)
        return Variable(name)

    def _power(self, base: Node, exponent: Node, where: int) -> Node:
        if isinstance(exponent, Number) and abs(exponent.value) > MAX_WRITTEN_EXPONENT:
            raise self.error(TOO_LARGE, where)
        return _folded_power(base, exponent) or Power(base, exponent)

    def _call(self, token: _Token) -> Node:
        name, position = token.text, token.position
        if name not in FUNCTIONS:
            raise self.error(_unknown(name), position)
        arguments = list[Node]()
        while not self._take(")"):
            if star := self._take("*"):
                raise self.error("arguments cannot be starred: write them out.", star.position)
            if self._take("**"):
                raise self.error(f"{name} takes its arguments by position only.", position)
            arguments.append(self._sum())
            if not self._take(",") and self.left[-1].text != ")":
                raise self._misplaced()
        function, given = FUNCTIONS[name], len(arguments)
        if given < function.arity or (given > function.arity and not function.is_variadic):
            wanted = f"{function.arity}{' or more' if function.is_variadic else ''}"
            plural = "s" if function.arity > 1 else ""
            raise self.error(f"{name} takes {wanted} argument{plural}, and got {given}.", position)
        return Call(name, tuple(arguments))


def _is_enclosed(tokens: list[_Token]) -> bool:
    """Return whether the first token opens a parenthesis that the last one closes."""
    opened = list(accumulate((token.text == "(") - (token.text == ")") for token in tokens))
    return bool(tokens) and tokens[0].text == "(" and 0 not in opened[:-1]


def _height(node: Node, heights: list[int]) -> int:
    """Return the number of levels of a node from those of its operands. A sign is no level."""
    return max(heights, default=0) + (not isinstance(node, Negate))


def _operands(kind: type[Sum] | type[Product], first: Node) -> list[Node]:
    """Return the operands with which a chain begins: (x + y) + z is x + y + z."""
    return [*children(first)] if isinstance(first, kind) else [first]


def _chain(kind: type[Sum] | type[Product], operands: list[Node]) -> Node:
    """Return the chain of these operands. One operand is no chain."""
    return operands[0] if len(operands) == 1 else kind(tuple(operands))


def _unknown(name: str) -> str:
    if name in CONSTANTS:
        return f"{name} is a number, not a function. Write * for a product, as in {name}*(x + 1)."
    others = {other: f"{function.name}(x)" for function in FUNCTIONS.values() for other in function.other_names}
    meant = (OTHER_NAMES | others).get(name)
    if meant is not None:
        return f"{name} is not a function here. Write {meant}."
    if len(name) == 1:
        return f"{name} is not a function. Write * for a product, as in {name}*(x + 1)."
    near = difflib.get_close_matches(name[:20].lower(), FUNCTIONS, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]}?" if near else ""
    return f"{name[:40]} is not a function.{guess} The functions are {', '.join(FUNCTIONS)}."


def _negated(node: Node) -> Node:
    return Number(-node.value) if isinstance(node, Number) else Negate(node)


def _small(*values: Fraction) -> bool:
    return all(abs(value.numerator) <= MAX_FOLDED and value.denominator <= MAX_FOLDED for value in values)


def _extend(operands: list[Node], node: Node, operation: Callable[[Fraction, Fraction], Fraction]) -> None:
    """Append to a chain of operands.

    If the chain is one number and the node is a number, fold them if all stay small.
    """
    match operands, node:
        case [Number(a)], Number(b) if _small(a, b, operation(a, b)):
            operands[0] = Number(operation(a, b))
        case _:
            operands.append(node)


def _quotient(a: Node, b: Node) -> Node:
    if isinstance(b, Number) and b.value:
        factors = [a]
        _extend(factors, Number(1 / b.value), mul)
        if len(factors) == 1:
            return factors[0]
    return Quotient(a, b)


def _folded_power(a: Node, b: Node) -> Number | None:
    if not (isinstance(a, Number) and isinstance(b, Number) and _small(a.value) and b.value.denominator == 1):
        return None
    n = int(b.value)
    bits = max(abs(a.value.numerator).bit_length(), a.value.denominator.bit_length()) - 1
    if bits * abs(n) > 53 or (n <= 0 and not a.value):
        return None
    power = a.value**n
    return Number(power) if _small(power) else None
