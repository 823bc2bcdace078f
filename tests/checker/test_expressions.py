"""attnc and its checker read text alike, and as Python does: exact numbers, precedence of operators, long chains."""

from __future__ import annotations

import itertools
import random
import re
from fractions import Fraction

import pytest

from attnc.errors import ExpressionError
from attnc.targets.expressions.parsing import parse
from attnc.targets.expressions.tree import Negate, Node, Number, Power, Product, Quotient, Sum, children, folded
from attnc_checker import expressions as checker
from attnc_checker.files import BadFile


def random_sum(rng: random.Random, depth: int) -> str:
    """Integers, operators, signs and parentheses in any order that Python reads."""
    kind = rng.random() if depth else 0.0
    blank = rng.choice(["", "", " ", "\n "])
    if kind < 0.2:
        return str(rng.randrange(1, 10))
    if kind < 0.65:
        operands = [random_sum(rng, depth - 1) for _ in range(rng.randrange(2, 5))]
        return "".join(f"{operand}{blank}{rng.choice('+-*/')}" for operand in operands) + str(rng.randrange(1, 10))
    if kind < 0.8:
        return rng.choice("+-") + blank + random_sum(rng, depth - 1)
    if kind < 0.9:
        base = rng.choice([f"({random_sum(rng, depth - 1)})", str(rng.randrange(1, 10))])
        return f"{base}**{rng.choice(['', '-', '-+', '2**', '-3**'])}{rng.randrange(3)}"
    return f"({random_sum(rng, depth - 1)})"


def exactly(node: Node, operands: list[Fraction]) -> Fraction:
    match node, operands:
        case Number(value), _:
            return value
        case Sum(), _:
            return sum(operands, Fraction(0))
        case Negate(), [a]:
            return -a
        case Product(), [first, *others]:
            for other in others:
                first *= other
            return first
        case Quotient(), [a, b]:
            return a / b
        case Power(), [a, b]:
            return a**b
    raise AssertionError(node)


def test_both_read_what_python_reads() -> None:
    rng, compared = random.Random(5), 0
    while compared < 1000:
        text = random_sum(rng, 4)
        try:
            expected = eval(re.sub("[0-9]+", r"Fraction(\g<0>)", " ".join(text.split())))
        except ZeroDivisionError:
            continue
        (tree,), _, is_tuple = parse(text)
        assert not is_tuple
        assert folded([tree], exactly) == [expected], text
        function = checker.parse(text, [])
        if len(function.steps) == 1:  # otherwise some constants are too large to be computed exactly
            (value,) = function.steps[function.outputs[0]].given
            assert Fraction(int(value.p), int(value.q)) == expected, text
            compared += 1


@pytest.mark.parametrize(
    "text",
    ["+".join(["x"] * 4999), "-".join(["x"] * 4999), "*".join(["x"] * 4999), "1.5*x-" * 1600 + "x", "+x-x" * 2500],
    ids=["sum", "difference", "product", "multiples", "alternating"],
)
def test_long_chains_are_read_by_both(text: str) -> None:
    (tree,), variables, _ = parse(text)
    assert len(children(tree)) == len(re.split(r"[+-]|(?<!5)\*", text.lstrip("+")))
    assert variables == ("x",)
    rules = {step.rule for step in checker.parse(text, ["x"]).steps.values()}
    assert rules <= {"variable", "constant", "plus", "times", "apply"}


@pytest.mark.parametrize("opening", ["sin(", "(1-", "x**(", "-(x*"])
def test_what_attnc_reads_at_its_greatest_depth_the_checker_reads(opening: str) -> None:
    texts = [opening * count + "x" + ")" * count for count in range(1, 130)]
    read = list(itertools.takewhile(is_read, texts))
    assert 49 <= len(read) <= 100
    for text in read:
        checker.parse(text, ["x"])


def is_read(text: str) -> bool:
    try:
        return bool(parse(text))
    except ExpressionError:
        return False


REFUSED = [
    "",
    "()",
    "x +",
    "(x",
    "x)",
    "x x",
    "2 3",
    "f(x)",
    "sin x",
    "sin()",
    "sin(x, x)",
    "(x, x) + 1",
    "((x, x), x)",
]
REFUSED += ["pi(x)", "x(x)", "max(*x)", "x,,x", "012", "1.2.3", "2x", "x*/x", "**x", "x***x", "sin(x)(x)", "(x,)*2"]
REFUSED += ["min(x,)", "clip(x,1)"]
DEEP = ["(" * 1000 + "x" + ")" * 1000, "x**" * 200 + "x", "-(" * 5000, "sin(" * 5000]


@pytest.mark.parametrize("text", [*REFUSED, *DEEP])
def test_both_refuse(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)
    with pytest.raises(BadFile):
        checker.parse(text, ["x"])
