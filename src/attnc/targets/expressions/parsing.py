"""Text → tree, by a walk of Python's syntax tree that accepts a short list of nodes. Nothing is ever evaluated."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from fractions import Fraction

from attnc.errors import ExpressionError
from attnc.functions.registry import FUNCTIONS
from attnc.targets.expressions.lexing import ALLOWED, lex, read_number
from attnc.targets.expressions.tree import Call, Constant, Negate, Node, Number, Power, Product, Quotient, Sum, Variable

MAX_DEPTH = 100  # levels of nesting, far below the recursion limit of Python
MAX_WRITTEN_EXPONENT = 1000  # 2 to a larger power is near the end of float64
CONSTANTS = ("pi", "e")
OTHER_NAMES = {
    "log2": "log(x)/log(2)",
    "log10": "log(x)/log(10)",
    "log1p": "log(1 + x)",
    "expm1": "exp(x) - 1",
    "pow": "x**y",
    "power": "x**y",
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
"""Functions that the language does not have, and how to write them."""
MAX_FOLDED = 2**53  # constants are folded while numerators and denominators are exact in float64


@dataclass(frozen=True)
class Parsed:
    """The outputs, the variables in order of first appearance, and whether the text was a tuple."""

    outputs: tuple[Node, ...]
    variables: tuple[str, ...]
    is_tuple: bool


def parse(text: str) -> Parsed:
    """Read an expression or a tuple of them; an ExpressionError names the part that is not allowed, and its place."""
    if not isinstance(text, str):
        raise ExpressionError(f"an expression is text, such as 'sin(x)*y'; this is a {type(text).__name__}.")
    lexed = lex(text)
    line = lexed.line.lstrip()
    reader = _SyntaxReader(text, len(lexed.line) - len(line))
    body = reader.syntax_tree(line)
    is_tuple = isinstance(body, ast.Tuple)
    parts = body.elts if isinstance(body, ast.Tuple) else [body]
    if not parts:
        raise ExpressionError(f"() holds no expression. {ALLOWED}.", text, reader.start)
    outputs = tuple(reader.read(part, 1) for part in parts)
    names = dict.fromkeys(name for name, _ in lexed.names if name not in FUNCTIONS and name not in CONSTANTS)
    return Parsed(outputs, tuple(names), is_tuple)


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
            raise self.error("the expression is nested too deeply, or has too long a chain of operators.", 0) from None

    def error(self, message: str, where: ast.expr | int) -> ExpressionError:
        position = where if isinstance(where, int) else self.start + where.col_offset
        return ExpressionError(message, self.text, min(position, len(self.text)))

    def read(self, node: ast.expr, depth: int) -> Node:
        """The tree of one syntax node, `depth` levels down."""
        if depth > MAX_DEPTH:
            raise self.error(f"the expression is nested more than {MAX_DEPTH} levels deep.", node)
        match node:
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
                token = self.text[self.start + node.col_offset : self.start + (node.end_col_offset or 0)]
                return Number(read_number(token, self.text, self.start + node.col_offset))
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
        """A chain of + and −, down its left side: one level, however long."""
        first, chain = _chain(node, (ast.Add, ast.Sub))
        terms = [self.read(first, depth + 1)]
        for link in chain:
            term = self.read(link.right, depth + 1)
            term = _negated(term) if isinstance(link.op, ast.Sub) else term
            folded = _folded_sum(terms[0], term) if len(terms) == 1 else None
            if folded:
                terms = [folded]
            else:
                terms.append(term)
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _product(self, node: ast.BinOp, depth: int) -> Node:
        """A chain of * and /: one level, and one more for each division, whose dividend is the chain before it."""
        first, chain = _chain(node, (ast.Mult, ast.Div))
        depth += 1 + sum(isinstance(link.op, ast.Div) for link in chain)
        factors = [self.read(first, depth)]
        for link in chain:
            depth -= isinstance(link.op, ast.Div)
            right = self.read(link.right, depth)
            if isinstance(link.op, ast.Mult):
                folded = _folded_product(factors[0], right) if len(factors) == 1 else None
                if folded:
                    factors = [folded]
                else:
                    factors.append(right)
            else:
                dividend = factors[0] if len(factors) == 1 else Product(tuple(factors))
                factors = [_quotient(dividend, right)]
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
    """The first operand of a left-leaning chain, and its links from left to right."""
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


def _folded_sum(a: Node, b: Node) -> Number | None:
    """a + b as one number, if both are numbers and all stay small."""
    if isinstance(a, Number) and isinstance(b, Number) and _small(a.value, b.value, total := a.value + b.value):
        return Number(total)
    return None


def _folded_product(a: Node, b: Node) -> Number | None:
    if isinstance(a, Number) and isinstance(b, Number) and _small(a.value, b.value, product := a.value * b.value):
        return Number(product)
    return None


def _quotient(a: Node, b: Node) -> Node:
    if isinstance(b, Number) and b.value:
        folded = _folded_product(a, Number(1 / b.value))
        if folded:
            return folded
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
