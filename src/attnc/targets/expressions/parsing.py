"""Parse text into a tree, in two passes. Nothing is ever evaluated.

The first pass checks that the text is made of numbers, names, + - * / ** ( ) and commas: nothing that Python could read
as an attribute, a string, a comprehension, a lambda or a statement. The second pass walks the syntax tree that Python's
`ast` makes from the text, and accepts a short list of nodes.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from operator import add, mul

from attnc.errors import ExpressionError
from attnc.functions.registry import FUNCTIONS
from attnc.targets.expressions.tree import Call, Constant, Negate, Node, Number, Power, Product, Quotient, Sum, Variable

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
"""Maximum number of nesting levels. It is far below Python's recursion limit."""
MAX_WRITTEN_EXPONENT = 1000
"""Largest exponent that may be written as a number. 2 to a larger power is near the end of float64."""
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


def parse(text: str) -> tuple[tuple[Node, ...], tuple[str, ...], bool]:
    """Read an expression or a tuple of them. An ExpressionError names the part that is not allowed, and its position.

    Returns the outputs, the variables in order of first appearance, and whether the text was a tuple.
    """
    if not isinstance(text, str):
        raise ExpressionError(f"an expression is text, such as 'sin(x)*y'; this is a {type(text).__name__}.")
    names = _checked_names(text)
    line = re.sub(r"[\t\r\n\f\v]", " ", text)
    reader = _SyntaxReader(text, len(line) - len(line.lstrip()))
    body = reader.syntax_tree(line.lstrip())
    parts = body.elts if isinstance(body, ast.Tuple) else [body]
    if not parts:
        raise ExpressionError(f"() holds no expression. {ALLOWED}.", text, reader.start)
    outputs = tuple(reader.read(part, 1) for part in parts)
    variables = dict.fromkeys(name for name in names if name not in FUNCTIONS and name not in CONSTANTS)
    return outputs, tuple(variables), isinstance(body, ast.Tuple)


def _checked_names(text: str) -> list[str]:
    """Check every token of the text, and list the names. An ExpressionError names the first token not allowed."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"the expression has {len(text)} characters, more than the {MAX_LENGTH} allowed. Split it into several."
        )
    if not text.strip():
        raise ExpressionError(f"the expression is empty. {ALLOWED}.", text, 0)
    names: list[str] = []
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
            names.append(token)
        elif kind == "number" and sum(character.isdigit() for character in token) > MAX_DIGITS:
            raise ExpressionError(f"this number has more than {MAX_DIGITS} digits.", text, position)
        after_number = kind == "number"
        position = match.end()
    return names


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


@dataclass(frozen=True)
class _SyntaxReader:
    text: str
    start: int  # the number of blanks stripped from the front of the text

    def syntax_tree(self, line: str) -> ast.expr:
        try:
            return ast.parse(line, mode="eval").body
        except SyntaxError as error:
            # Python gives offset 0 when the text ends too early.
            position = self.start + error.offset - 1 if error.offset else len(self.text.rstrip())
            reason = "it ends too early" if not error.offset else error.msg.partition(". Perhaps")[0].partition(";")[0]
            raise self.error(f"the expression cannot be read: {reason}. {ALLOWED}.", position) from None
        except (RecursionError, MemoryError, ValueError, OverflowError):
            raise self.error("the expression is nested too deeply, or its chain of operators is too long.", 0) from None

    def error(self, message: str, where: ast.expr | int) -> ExpressionError:
        position = where if isinstance(where, int) else self.start + where.col_offset
        return ExpressionError(message, self.text, min(position, len(self.text)))

    def read(self, node: ast.expr, depth: int) -> Node:
        """Return the tree of one syntax node, `depth` levels down."""
        if depth > MAX_DEPTH:
            raise self.error(f"the expression is nested more than {MAX_DEPTH} levels deep.", node)
        match node:
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
                token = self.text[self.start + node.col_offset : self.start + (node.end_col_offset or 0)]
                return Number(_number(token, self.text, self.start + node.col_offset))
            case ast.Name(id=name):
                return self._name(name, node)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.read(operand, depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _negated(self.read(operand, depth + 1))
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self._sum(node, depth)
            case ast.BinOp(op=ast.Mult() | ast.Div()):
                return self._product(node, depth)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._power(self.read(left, depth + 1), self.read(right, depth + 1), right)
            case ast.Call():
                return self._call(node, depth)
            case ast.Tuple():
                raise self.error("a tuple is allowed only around the whole expression, for several outputs.", node)
            case _:
                raise self.error(f"{type(node).__name__.lower()} is not allowed. {ALLOWED}.", node)

    def _name(self, name: str, node: ast.expr) -> Node:
        if name in CONSTANTS:
            return Constant(name)
        if name in FUNCTIONS:
            raise self.error(f"{name} is a function: call it, as in {name}(x), or choose another name.", node)
        return Variable(name)

    def _sum(self, node: ast.BinOp, depth: int) -> Node:
        """Read a chain of + and −, down its left side. It is one level, however long."""
        first, chain = _chain(node, (ast.Add, ast.Sub))
        terms = [self.read(first, depth + 1)]
        for link in chain:
            term = self.read(link.right, depth + 1)
            _extend(terms, _negated(term) if isinstance(link.op, ast.Sub) else term, add)
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _product(self, node: ast.BinOp, depth: int) -> Node:
        """Read a chain of * and /.

        It is one level, plus one for each division, whose dividend is the chain before it.
        """
        first, chain = _chain(node, (ast.Mult, ast.Div))
        depth += 1 + sum(isinstance(link.op, ast.Div) for link in chain)
        factors = [self.read(first, depth)]
        for link in chain:
            depth -= isinstance(link.op, ast.Div)
            right = self.read(link.right, depth)
            if isinstance(link.op, ast.Mult):
                _extend(factors, right, mul)
            else:
                factors = [_quotient(factors[0] if len(factors) == 1 else Product(tuple(factors)), right)]
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def _power(self, base: Node, exponent: Node, where: ast.expr) -> Node:
        if isinstance(exponent, Number) and abs(exponent.value) > MAX_WRITTEN_EXPONENT:
            raise self.error(
                f"the exponent is beyond {MAX_WRITTEN_EXPONENT} in size. Write exp(...) if that is meant.", where
            )
        return _folded_power(base, exponent) or Power(base, exponent)

    def _call(self, node: ast.Call, depth: int) -> Node:
        if not isinstance(node.func, ast.Name):
            raise self.error("only a function can be called. Write * for a product, as in 2*(x + 1).", node.func)
        name = node.func.id
        if name not in FUNCTIONS:
            raise self.error(_unknown(name), node.func)
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                raise self.error("arguments cannot be starred: write them out.", argument)
        if node.keywords:
            raise self.error(f"{name} takes its arguments by position only.", node.func)
        function, given = FUNCTIONS[name], len(node.args)
        if given < function.arity or (given > function.arity and not function.is_variadic):
            wanted = f"{function.arity}{' or more' if function.is_variadic else ''}"
            plural = "s" if function.arity > 1 else ""
            raise self.error(f"{name} takes {wanted} argument{plural}, and got {given}.", node.func)
        return Call(name, tuple(self.read(argument, depth + 1) for argument in node.args))


def _chain(node: ast.BinOp, operators: tuple[type[ast.operator], ...]) -> tuple[ast.expr, list[ast.BinOp]]:
    """Return the first operand of a left-leaning chain, and its links from left to right."""
    links: list[ast.BinOp] = []
    left: ast.expr = node
    while isinstance(left, ast.BinOp) and isinstance(left.op, operators):
        links.append(left)
        left = left.left
    return left, links[::-1]


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
