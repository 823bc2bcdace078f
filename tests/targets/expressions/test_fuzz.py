"""Whatever the text: an Expression or an ExpressionError, soon, and nothing executed."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from attnc.errors import ExpressionError
from attnc.functions.registry import FUNCTIONS
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import to_text

_SEEDS = [
    "sin(x)*y + exp(-x**2)/2",
    "max(x, y, 0.5) - clip(x, -1, 1)",
    "(x*y, x + y, 1/3)",
    "log(1 + x**2) - sqrt(abs(y))",
    "2**x + x**-2 - 1e-3*pi",
    "__import__('os').system('true')",
    "().__class__.__bases__[0].__subclasses__()",
    "[c for c in (1,2)]",
    "(lambda: 1)()",
    "(x := 9**9**9)",
    "f'{x!r}'",
    "exec('x=1')",
    "open('/etc/passwd')",
    "x.__class__",
    "print(1)",
    "{**x}",
    "x if y else z",
    "yield x",
    "await x",
    "9**9**9**9",
    "...",
    "x; y",
    "x\n\ny",
    "b'\\x00'",
    "1e99999999999",
    "'a'*10**9",
]
_TOKENS = [
    *FUNCTIONS,
    *"xye+-*/(),1^:[]{}.'\"\\#@%~=_\n\0πé\u202e９ｘ\ud800",
    *("pi", "**", "//", "0.5", "1e9", "1e-400", "lambda", "for", "in", "if", "else", "__class__", "f'"),
    *("<<", "==", ":=", "True", "None", "0x1", "1j"),
]

_FORBIDDEN = ("exec", "import", "open", "os.system", "subprocess.Popen", "socket.connect", "code.__new__")
_watching = False
_seen: list[str] = []


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in _FORBIDDEN:
        _seen.append(event)


sys.addaudithook(_hook)


@contextmanager
def _guarded() -> Iterator[None]:
    """Notes calls that execute or open, and interrupts calls that hang (a minute is for machines under load)."""
    global _watching

    def stop(*_: object) -> None:
        raise TimeoutError("parsing hangs")

    can_interrupt = threading.current_thread() is threading.main_thread()
    if can_interrupt:
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 60)
    _watching = True
    try:
        yield
    finally:
        _watching = False
        if can_interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _random_text(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:  # mutations
        text = list(rng.choice(_SEEDS))
        for _ in range(rng.randrange(1, 6)):
            i = rng.randrange(len(text) + 1)
            text[i : i + rng.randrange(3)] = rng.choice(_TOKENS)
        return "".join(text)
    if kind == 1:  # token soup
        return rng.choice(["", " "]).join(rng.choice(_TOKENS) for _ in range(rng.randrange(1, 25)))
    if kind == 2:  # any characters
        return "".join(
            chr(rng.choice([rng.randrange(128), rng.randrange(0x3000)])) for _ in range(rng.randrange(1, 30))
        )
    if kind == 3:  # two pieces of sentences
        a, b = rng.choice(_SEEDS), rng.choice(_SEEDS)
        return a[: rng.randrange(len(a))] + b[rng.randrange(len(b)) :]
    if kind == 4:  # repetition
        opening, closing = rng.choice(
            [("(", ")"), ("sin(", ")"), ("-", ""), ("x**", ""), ("x/", ""), ("1+(", ")"), ("2*", "")]
        )
        n = rng.choice([3, 50, 99, 101, 150]) if rng.random() < 0.95 else rng.randrange(1500)
        return opening * n + "x" + closing * (n - (rng.random() < 0.1))
    return rng.choice(_SEEDS) + rng.choice(_TOKENS) + rng.choice(_SEEDS)


def _parse(text: str) -> Expression | ExpressionError:
    try:
        with _guarded():
            return Expression.parse(text)
    except ExpressionError as error:
        return error
    except Exception as error:
        raise AssertionError(f"{text!r} raised {error!r}") from error


@pytest.mark.parametrize(("count", "seed"), [(2_000, 1), pytest.param(100_000, 2, marks=pytest.mark.slow)])
def test_fuzz(count: int, seed: int) -> None:
    rng = random.Random(seed)
    read = 0
    for _ in range(count):
        text = _random_text(rng)
        f = _parse(text)
        if isinstance(f, ExpressionError):
            assert f.position is None or 0 <= f.position <= len(text)
            continue
        read += 1
        again = Expression.parse(", ".join(to_text(node) for node in f.outputs))
        assert again.outputs == f.outputs, text
        assert f(np.full((1, len(f.variables)), 0.5)).shape == (1, len(f.outputs))
    assert _seen == []
    assert read > count // 50
