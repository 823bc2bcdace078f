"""The first pass over the text of an expression: only known characters, words and numbers go on to `ast.parse`.

After it the text is one line of ASCII made of numbers, names, + - * / ** ( ) and commas: nothing that Python could
read as an attribute, a string, a comprehension, a lambda or a statement.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from fractions import Fraction

from attnc.errors import ExpressionError

MAX_LENGTH = 10_000  # characters of an expression; longer text comes from a program that can split it
MAX_DIGITS = 400  # digits of a number: more than the 309 of the largest float64
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
    "[": "Use parentheses",
    "{": "Use parentheses",
    "|": "Write abs(x)",
    "×": "Write * for a product",
    "·": "Write * for a product",
    "÷": "Write / for a quotient",
    "−": "Write the ASCII sign - for minus",
    "–": "Write the ASCII sign - for minus",
    "π": "Write pi",
    "²": "Write **2",
    "³": "Write **3",
    "√": "Write sqrt(x)",
}


@dataclass(frozen=True)
class Lexed:
    """The text on one line, character for character, and its names with their positions."""

    line: str
    names: tuple[tuple[str, int], ...]


def lex(text: str) -> Lexed:
    """Check every token of the text, or raise an ExpressionError at the first that is not allowed."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"the expression has {len(text)} characters, more than the {MAX_LENGTH} allowed. Split it into several."
        )
    if not text.strip():
        raise ExpressionError(f"the expression is empty. {ALLOWED}.", text, 0)
    names: list[tuple[str, int]] = []
    position, after_number = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.group() == "//":
            raise _unexpected(text, position, "//" if match else text[position])
        token, kind = match.group(), match.lastgroup
        if kind == "name":
            if after_number:
                raise ExpressionError(
                    f"the number before {token!r} runs into it. Write * for a product, as in 2*x.", text, position
                )
            _check_name(token, text, position)
            names.append((token, position))
        elif kind == "number" and sum(character.isdigit() for character in token) > MAX_DIGITS:
            raise ExpressionError(f"this number has more than {MAX_DIGITS} digits.", text, position)
        after_number = kind == "number"
        position = match.end()
    return Lexed(re.sub(r"[\t\r\n\f\v]", " ", text), tuple(names))


def _unexpected(text: str, position: int, found: str) -> ExpressionError:
    shown = found if found.isprintable() else f"character U+{ord(found):04X}"
    hint = _HINTS.get(found, "")
    return ExpressionError(f"{shown!r} is not allowed. {hint + '. ' if hint else ''}{ALLOWED}.", text, position)


def _check_name(name: str, text: str, position: int) -> None:
    if keyword.iskeyword(name):
        raise ExpressionError(f"{name!r} is a word of Python and cannot be used here. {ALLOWED}.", text, position)
    if name.startswith("_"):
        raise ExpressionError(
            f"{name!r} cannot be a name: names start with a letter and go on with letters, digits, _.", text, position
        )


def read_number(token: str, text: str, position: int) -> Fraction:
    """The rational number that a literal denotes: 0.1 is 1/10."""
    nearest = float(token)
    digits, _, exponent = token.lower().partition("e")
    if not digits.strip("0."):
        return Fraction(0)
    if nearest == float("inf"):
        raise ExpressionError(f"{_short(token)} is larger than the largest float64, 1.8e308.", text, position)
    if nearest == 0:
        raise ExpressionError(f"{_short(token)} is smaller than the smallest float64, 5e-324.", text, position)
    # A finite float with few digits has a small exponent, so that the power of ten is small as well.
    whole, _, decimals = digits.partition(".")
    shift = int(exponent or "0") - len(decimals)
    mantissa = int(whole + decimals)
    return Fraction(mantissa * 10**shift) if shift >= 0 else Fraction(mantissa, 10**-shift)


def _short(token: str) -> str:
    return token if len(token) <= 30 else token[:27] + "..."
