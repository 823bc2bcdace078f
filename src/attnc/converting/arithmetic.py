"""Activations that are written as arithmetic: x*(x > 0), where(x > 0, x, exp(x) - 1), x/(1 + exp(-x)), …

A torch function of one tensor and numbers extends a `Form`: an expression in the entries of one tensor. `matched` looks
for an activation that has the values of the expression, up to an affine map before and after it. That is a guess. The
error of its keys is then proved against the expression itself, so that a wrong guess cannot pass.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from attnc.constructions.fitting.gate import Gate, line_gate
from attnc.converting.activations import KnownActivation, exact_number
from attnc.errors import AttncError
from attnc.numerics.intervals import Interval
from attnc.targets.expressions.expression import Expression

Tree = tuple[Any, ...]
"""An expression of one variable: a name and its arguments, ("add", ("x",), ("number", 1.0))."""
X: Tree = ("x",)
SIGMOID = KnownActivation("sigmoid")
SOFTPLUS = KnownActivation("softplus", (("beta", 1.0),))
DTYPES = ("float64", "float32")
MAX_NODES = 200
"""Maximum number of operations of an expression. The longest known activation has 10."""
SAME = 1e-9
"""Largest relative difference between an expression and the activation that it is taken for. The proof decides."""
JUMP = 2.0**-50
"""Largest relative jump of a piecewise expression that is taken for rounding. It is added to the error."""
LIPSCHITZ_REACH, LIPSCHITZ_CELLS = 32.0, 2048
"""The slopes of an expression are bounded on this many cells of [−32, 32], and on the two half-lines beyond."""
FAR = 600.0
"""A place where smooth activations have reached their asymptotes to the last digit."""


def number(value: float) -> Tree:
    return ("number", float(value))


def called(activation: KnownActivation, u: Tree) -> Tree:
    """An activation of an expression, in numbers and texts alone: torch.compile keeps no other constants."""
    return ("call", ("known", activation.name, *itertools.chain(*activation.parameters)), u)


def value_of(tree: Tree) -> float | None:
    return tree[1] if tree[0] == "number" else None


def affine(tree: Tree) -> tuple[float, float] | None:
    """Return (a, b) if the expression is a·x + b, otherwise None."""
    match tree:
        case ("x",):
            return 1.0, 0.0
        case ("number", c):
            return 0.0, c
        case ("neg", u):
            return None if (of := affine(u)) is None else (-of[0], -of[1])
        case ("add" | "sub" | "mul" | "div" as name, u, v):
            first, second = affine(u), affine(v)
            if first is None or second is None:
                return None
            if name in ("add", "sub"):
                sign = 1.0 if name == "add" else -1.0
                return first[0] + sign * second[0], first[1] + sign * second[1]
            if name == "mul" and first[0] == 0:
                first, second = second, first
            if second[0] != 0 or (name == "div" and second[1] == 0):
                return None
            factor = second[1] if name == "mul" else 1 / second[1]
            return first[0] * factor, first[1] * factor
    return None


def negated(step: Tree) -> Tree:
    return ("step", -step[1], -step[2])


def combined(name: str, u: Tree, v: Tree) -> Tree | None:
    """Return u + v, u − v, u·v or u/v. A step, 1 where a·x + b > 0 and else 0, can only be multiplied or negated."""
    steps = [part[0] == "step" for part in (u, v)]
    if any(steps):
        if all(steps) or name not in ("mul", "sub"):
            return None
        if name == "sub":
            return negated(v) if value_of(u) == 1 and steps[1] else None
        step, other = (u, v) if steps[0] else (v, u)
        return ("where", step[1], step[2], other, number(0.0))
    if name == "div" and (found := _quotient_of_exponentials(u, v)) is not None:
        return found
    return (name, u, v)


def _exponentials(tree: Tree) -> dict[tuple[float, float], Fraction] | None:
    """Return {(a, b): c} if the expression is a sum of terms c·e^{ax + b}, otherwise None.

    All numbers must be the same in every dtype, so that sums and products of them are, too.
    """
    match tree:
        case ("number", c):
            return {(0.0, 0.0): Fraction(c)} if float(np.float32(c)) == c else None
        case ("exp", u):
            is_exact = all(float(np.float32(c)) == c for c in _numbers(u))
            return {line: Fraction(1)} if is_exact and (line := affine(u)) is not None else None
        case ("neg", u):
            return None if (of := _exponentials(u)) is None else {line: -c for line, c in of.items()}
        case ("add" | "sub" as name, u, v):
            first, second = _exponentials(u), _exponentials(v)
            if first is None or second is None:
                return None
            sign = 1 if name == "add" else -1
            return {
                line: first.get(line, Fraction(0)) + sign * second.get(line, Fraction(0))
                for line in {**first, **second}
            }
        case ("mul" | "div" as name, u, v):
            if name == "mul" and value_of(v) is None:
                u, v = v, u
            first, factor = _exponentials(u), _exponentials(v) if v[0] == "number" else None
            if first is None or not factor or not all(factor.values()):
                return None
            ((_, by),) = factor.items()
            return {line: c * by if name == "mul" else c / by for line, c in first.items()}
    return None


def _quotient_of_exponentials(u: Tree, v: Tree) -> Tree | None:
    """(n·e^k + m·e^l)/(c·e^k + c·e^l) = (n + (m − n)σ(l − k))/c, as tanh is written with e^x and e^{−x}.

    Numerators and denominators overflow far out, where the quotient has limits. A factor of the numerator is taken out
    first. Only numbers without rounding are taken.
    """
    if u[0] == "mul" and value_of(u[1]) is None and value_of(u[2]) is None:
        for factor, rest in ((u[1], u[2]), (u[2], u[1])):
            if (found := _quotient_of_exponentials(rest, v)) is not None:
                return ("mul", factor, found)
    top, bottom = _exponentials(u), _exponentials(v)
    if top is None or bottom is None or len(bottom) != 2 or not set(top) <= set(bottom):
        return None
    (k, c), (last, other) = bottom.items()
    n, m = top.get(k, Fraction(0)), top.get(last, Fraction(0))
    inner = _exact_line(last, k)
    if not c > 0 or c != other or m == n or inner is None:
        return None
    start, rise = float(n / c), float((m - n) / c)
    if Fraction(float(np.float32(start))) != n / c or Fraction(float(np.float32(rise))) != (m - n) / c:
        return None
    return ("add", number(start), ("mul", number(rise), called(SIGMOID, inner)))


def _exact_line(first: tuple[float, float], second: tuple[float, float]) -> Tree | None:
    """Return the difference of two lines, or None if its numbers have to be rounded."""
    a, b = first[0] - second[0], first[1] - second[1]
    if any(
        Fraction(float(np.float32(d))) != Fraction(p) - Fraction(q)
        for d, p, q in zip((a, b), first, second, strict=True)
    ):
        return None
    inner: Tree = X if a == 1 else ("mul", number(a), X)
    return inner if b == 0 else ("add", inner, number(b))


def logarithm(u: Tree) -> Tree:
    """log u. The logarithms of 1 + e^v and σ(v) are softplus(v) and −softplus(−v), whose tails have rules."""
    match u:
        case ("call", ("known", "sigmoid"), v):
            return ("neg", called(SOFTPLUS, ("neg", v)))
        case ("add", ("number", 1.0), ("exp", v)) | ("add", ("exp", v), ("number", 1.0)):
            return called(SOFTPLUS, v)
    terms = _exponentials(u)
    if terms is not None and len(terms) == 2 and len(set(terms.values())) == 1:  # log(c·e^k + c·e^l), as in log cosh
        (k, c), (last, _) = terms.items()
        first, rest = _exact_line(k, (0.0, 0.0)), _exact_line(last, k)
        if c > 0 and first is not None and rest is not None and Fraction(float(np.float32(float(c)))) == c:
            made = ("add", first, called(SOFTPLUS, rest))
            return made if c == 1 else ("add", made, ("log", number(float(c))))
    return ("log", u)


def extreme(name: str, u: Tree, v: Tree) -> Tree | None:
    """The maximum or minimum: for affine functions that meet at 0, or differ by x − c, one of two pieces."""
    if "step" in (u[0], v[0]):
        return None
    first, second = affine(u), affine(v)
    if first is not None and second is not None:
        a, b = first[0] - second[0], first[1] - second[1]
        if abs(a) == 1 or (a and not b):
            return ("where", a, b, u, v) if name == "max" else ("where", a, b, v, u)
    return (name, u, v)


def chosen(step: Tree, u: Tree, v: Tree) -> Tree | None:
    """u where the step is 1, otherwise v."""
    return None if "step" in (u[0], v[0]) else ("where", step[1], step[2], u, v)


def power(u: Tree, exponent: float) -> Tree | None:
    if exponent == 0.5:
        return ("sqrt", u)
    if exponent == int(exponent) and 0 < abs(exponent) <= 8:
        return ("power", u, int(exponent))
    return None


def text_of(tree: Tree, dtype: str, x: str = "x") -> str:
    """Write the expression. Its numbers are rounded as torch rounds them in that dtype."""

    def rounded(value: float) -> str:
        return exact_number(float(np.dtype(dtype).type(value)))

    def inner(part: Tree) -> str:
        return text_of(part, dtype, x)

    match tree:
        case ("x",):
            return x
        case ("number", value):
            return rounded(value)
        case ("neg", u):
            return f"(-{inner(u)})"
        case ("add" | "sub" | "mul" | "div" as name, u, v):
            sign = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[name]
            return f"({inner(u)} {sign} {inner(v)})"
        case ("power", u, n):
            return f"({inner(u)})**{n}" if n > 0 else f"(1/({inner(u)})**{-n})"
        case ("max" | "min" as name, u, v):
            return f"{name}({inner(u)}, {inner(v)})"
        case ("call", ("known", name, *parameters), u):
            activation = KnownActivation(name, tuple(zip(parameters[::2], parameters[1::2], strict=True)))
            return "(" + re.sub(r"\bx\b", f"({inner(u)})", activation.expression(dtype)) + ")"
        case ("where", a, b, u, v):
            # u(x) right of κ and v(x) left of it, if they meet there: u(max(x, κ)) + v(min(x, κ)) − u(κ)
            if a < 0:
                u, v = v, u
            at = rounded(-b / a)
            right, left = text_of(u, dtype, f"max({x}, {at})"), text_of(v, dtype, f"min({x}, {at})")
            return f"({right} + {left} - {text_of(u, dtype, at)})"
        case (name, u):
            return f"{name}({inner(u)})"
    raise AssertionError(tree)


def size_of(tree: Tree) -> int:
    return 1 + sum(size_of(part) for part in tree[1:] if isinstance(part, tuple))


def _jump(tree: Tree) -> float:
    """Return the largest relative jump of the pieces, infinite if a place of a jump is not a number of the dtypes."""
    worst = max((_jump(part) for part in tree[1:] if isinstance(part, tuple)), default=0.0)
    if tree[0] != "where":
        return worst
    _, a, b, u, v = tree
    if abs(a) != 1 and b != 0 and not all(_has_exact_root(a, b, dtype) for dtype in DTYPES):
        return math.inf
    for dtype in DTYPES:
        at = exact_number(float(np.dtype(dtype).type(-b / a)))
        sides = [float(Expression.parse(f"0*z + {text_of(part, dtype, at)}")([[0.0]])[0, 0]) for part in (u, v)]
        gap = abs(sides[0] - sides[1]) / max(1.0, *map(abs, sides))
        worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst


def _has_exact_root(a: float, b: float, dtype: str) -> bool:
    """Return whether −b/a, rounded to the dtype, is where a·x + b is 0 for a and b as the dtype rounds them."""
    slope, offset, root = (Fraction(float(np.dtype(dtype).type(value))) for value in (a, b, -b / a))
    return slope * root + offset == 0


@dataclass(frozen=True)
class Form:
    """The entries of a tensor as an expression in the entries of `source`. A constant tensor has no source.

    `is_raw` if torch computed a nonlinear part of it. `epoch` counts the in-place operations before it: each may change
    the source, so that older forms are not used.
    """

    source: Any
    tree: Tree
    epoch: int
    is_raw: bool = False


@dataclass(frozen=True)
class Written(KnownActivation):
    """An activation that is written as arithmetic: p·f(s·x + t) + q + r·x, with f the activation of this name.

    `texts` is the expression of the code in each dtype. The keys are proved against it.
    """

    affine: tuple[float, float, float, float, float] = (1.0, 0.0, 1.0, 0.0, 0.0)  # s, t, p, q, r
    texts: tuple[tuple[str, str], ...] = ()
    lipschitz: float = math.inf
    lines: tuple[tuple[float, ...], ...] = ()  # if piecewise linear: kinks, values, slopes

    def expression(self, dtype: str) -> str:
        return dict(self.texts)[dtype]

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Written:
        """Return the activation that `dataclasses.asdict` and JSON made these facts from."""
        parameters = tuple((str(name), float(value)) for name, value in facts["parameters"])
        s, t, p, q, r = map(float, facts["affine"])
        texts = tuple((str(dtype), str(text)) for dtype, text in facts["texts"])
        lines = tuple(tuple(map(float, part)) for part in facts["lines"])
        steepest = math.inf if facts["lipschitz"] is None else float(facts["lipschitz"])
        return cls(str(facts["name"]), parameters, (s, t, p, q, r), texts, steepest, lines)

    def gate(self, eps: float, *, is_one_head: bool = True) -> Gate:
        s, t, p, q, r = self.affine
        if self.lines:
            kinks, values, slopes = self.lines
            gate = line_gate(self.name, eps, kinks, list(zip(values, slopes, strict=True)))
        else:
            asked = eps / max(abs(p), 2.0**-100)
            gate = super().gate(asked, is_one_head=is_one_head)
            if gate.is_product:  # an affine map of x times a head is none
                gate = super().gate(asked)
        keys = gate.keys if (s, t) == (1.0, 0.0) else gate.keys.shifted(t).scaled(s)
        keys = keys if (p, q, r) == (1.0, 0.0, 0.0) else keys.combined(p, r, q)
        return replace(gate, keys=keys, error=gate.error * abs(p), lipschitz=self.lipschitz, is_proved=False)

    def __str__(self) -> str:
        s, t, p, q, r = self.affine
        if self.lines:
            kinks = ", ".join(f"{kink:g}" for kink in self.lines[0])
            return self.name if self.name != "lines" else f"piecewise linear (kinks: {kinks})"
        inside = KnownActivation.__str__(self)  # torch.compile does not take super()
        if (s, t) != (1.0, 0.0):
            inside += f" of {s:.4g}x{t:+.4g}" if t else f" of {s:.4g}x"
        after = "" if abs(p - 1) < SAME else f"{p:.4g} "
        return f"{after}{inside}" + (f" {q:+.4g}" if q else "") + (f" {r:+.4g}x" if r else "")


@functools.lru_cache(maxsize=512)
def matched(tree: Tree) -> Written | None:
    """Return the activation that the expression computes, or None if none is known."""
    if size_of(tree) > MAX_NODES or affine(tree) is not None or tree[0] == "step":
        return None
    try:
        with np.errstate(all="ignore"):
            if not _jump(tree) <= JUMP:
                return None
            texts = tuple((dtype, text_of(tree, dtype)) for dtype in DTYPES)
            expression = Expression.parse(texts[0][1])
            found = _guess(lambda x: expression(np.asarray(x, np.float64).reshape(-1, 1))[:, 0])
    except (AttncError, ValueError, OverflowError, ZeroDivisionError):
        return None
    if found is None:
        return None
    written = sorted(_numbers(tree))

    def snapped(value: float) -> float:
        """Return the number of the code that this value, which has rounding errors, is close to."""
        close = [c for c in written if abs(c - value) <= SAME * max(1.0, abs(c))]
        return float(min(close, key=lambda c: abs(c - value)) if close else value)

    found = replace(
        found,
        parameters=tuple((name, snapped(value)) for name, value in found.parameters),
        affine=tuple(map(snapped, found.affine)),  # type: ignore[arg-type]
        lines=tuple(tuple(map(snapped, part)) for part in found.lines),
        texts=texts,
    )
    with np.errstate(all="ignore"):
        return replace(found, lipschitz=_lipschitz(texts))


def _numbers(tree: Tree) -> set[float]:
    """Return the numbers in the expression, and their negatives."""
    own = {tree[1], -tree[1]} if tree[0] == "number" else set[float]()
    return own.union(*(_numbers(part) for part in tree[1:] if isinstance(part, tuple)))


def _lipschitz(texts: tuple[tuple[str, str], ...]) -> float:
    """Return a proven Lipschitz constant of the expression in every dtype, or infinity if intervals do not give one."""
    ends = np.concatenate([[-np.inf], np.linspace(-LIPSCHITZ_REACH, LIPSCHITZ_REACH, LIPSCHITZ_CELLS + 1), [np.inf]])
    cells = Interval(ends[:-1, None], ends[1:, None])
    largest = 0.0
    for _, text in texts:
        _, slopes = Expression.parse(text).ranges_and_gradients(cells, violations="infinite")
        largest = max(largest, float(slopes.mag.max()))
    return largest if math.isfinite(largest) else math.inf


Function = Callable[[Any], np.ndarray]


def _guess(f: Function) -> Written | None:
    return _guess_lines(f) or _guess_ramp(f) or _guess_elu(f) or _guess_sigmoid(f) or _guess_softsign(f)


def _is_same(f: Function, g: Function, reach: float = 12.0) -> bool:
    x = np.concatenate([np.linspace(-reach, reach, 397), reach * np.linspace(-5, 5, 41)])
    y, z = f(x), g(x)
    return bool(np.isfinite(y).all() and (np.abs(y - z) <= SAME * np.maximum(1.0, np.abs(y))).all())


def _guess_lines(f: Function) -> Written | None:
    """Two lines, or three whose outer slopes are equal. The kinks are sought at several scales."""
    for scale in (2.0**-3, 1.0, 2.0**4, 2.0**8, 2.0**12):
        x = scale * np.arange(-64, 65) / 8
        y = f(x)
        if not np.isfinite(y).all():
            continue
        size = max(1.0, float(np.abs(y).max()))
        bends = np.flatnonzero(np.abs(np.diff(y, 2)) > 1e-12 * size) + 1
        groups = np.split(bends, np.flatnonzero(np.diff(bends) > 1) + 1) if len(bends) else []
        if not 1 <= len(groups) <= 2 or any(len(group) > 2 for group in groups):
            continue
        starts = [0, *(group[-1] for group in groups)]
        lines = []
        for start in starts:
            if start + 1 >= len(x):
                return None
            slope = _plain((y[start + 1] - y[start]) / (x[start + 1] - x[start]))
            lines.append((_plain(y[start] - slope * x[start]), slope))
        kinks = [_plain((a[0] - b[0]) / (b[1] - a[1])) for a, b in itertools.pairwise(lines) if a[1] != b[1]]
        if len(kinks) != len(groups) or (len(lines) == 3 and lines[0][1] != lines[2][1]):
            continue

        def by_lines(x: Any, kinks: list[float] = kinks, lines: list[tuple[float, float]] = lines) -> np.ndarray:
            which = np.searchsorted(kinks, x)
            values, slopes = np.array(lines).T
            return np.asarray(values[which] + slopes[which] * x)

        if all(_is_same(f, by_lines, reach) for reach in (1.0, 8 * scale, 1e4 * scale)):
            values, slopes = zip(*lines, strict=True)
            name = {(0.0, 1.0): "relu", (-1.0, 1.0): "abs"}.get(slopes, "lines") if kinks == [0.0] else "lines"
            return Written(name, lines=(tuple(kinks), values, slopes))
    return None


def _plain(value: float) -> float:
    """Return the shortest number that is this one up to rounding."""
    short = round(float(value), 11)
    return short + 0.0 if abs(short - value) <= 1e-13 * max(1.0, abs(value)) else float(value)


def _ends(f: Function) -> tuple[float, float, float, float] | None:
    """Return the asymptotes q + L·x on the left and c + R·x on the right, or None if the function has none."""
    x = np.array([-FAR, -FAR + 60, FAR - 60, FAR])
    y = f(x)
    if not np.isfinite(y).all():
        return None
    left, right = (_plain(slope) for slope in ((y[1] - y[0]) / 60, (y[3] - y[2]) / 60))
    return left, round(y[0] - left * x[0], 11) + 0.0, right, round(y[3] - right * x[3], 11) + 0.0


def _guess_ramp(f: Function) -> Written | None:
    """p·b(s·x + t) + q + L·x, where b(z) is close to max(z, 0). Then p·s = R − L and p·t = c − q, and s is sought."""
    ends = _ends(f)
    if ends is None or ends[0] == ends[2]:
        return None
    left, q, right, c = ends
    grid = np.linspace(-12, 12, 97)
    y = f(grid)
    if not np.isfinite(y).all():
        return None
    for base in ("silu", "softplus", "gelu", "gelu_tanh", "mish", "quick_gelu"):
        parameters = (("beta", 1.0),) if base == "softplus" else ()
        of_base = _values(KnownActivation(base, parameters))

        def fitted(s: float, of_base: Function = of_base) -> tuple[float, float, float, float, float]:
            p = (right - left) / s
            return s, (c - q) / p, p, q, left

        def error(s: float, of_base: Function = of_base) -> float:
            s, t, p, _, _ = fitted(s)
            return float(np.abs(p * of_base(s * grid + t) + q + left * grid - y).max())

        start = min(np.geomspace(0.02, 50, 120), key=error)
        s = _plain(_least(error, start / 1.1, start * 1.1))
        s = min((s, float(f"{s:.7g}"), float(f"{s:.4g}")), key=error)
        affine = fitted(s)
        if _is_same(f, _transformed(of_base, affine)):
            return Written(base, parameters, affine)
    return None


def _least(error: Callable[[float], float], lo: float, hi: float) -> float:
    """The golden section search for the least error."""
    share = (math.sqrt(5) - 1) / 2
    a, b = hi - share * (hi - lo), lo + share * (hi - lo)
    for _ in range(80):
        if error(a) < error(b):
            hi = b
        else:
            lo = a
        a, b = hi - share * (hi - lo), lo + share * (hi - lo)
    return (lo + hi) / 2


def _guess_elu(f: Function) -> Written | None:
    """p·elu(x) + c + L·x with any α and width."""
    ends = _ends(f)
    if ends is None or ends[0] == ends[2]:
        return None
    left, q, right, c = ends
    p = right - left
    alpha = (c - q) / p
    inside = 1 + (float(f([-1.0])[0]) + left - c) / (p * alpha) if alpha > 0 else 0.0
    if not 0 < inside < 1:
        return None
    width = _plain(round(-1 / math.log(inside), 11))
    parameters = (("alpha", alpha), ("width", width))
    made = Written("elu", parameters, (1.0, 0.0, p, c, left))

    def elu(x: Any) -> np.ndarray:
        return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0) / width))

    return made if _is_same(f, _transformed(elu, made.affine)) else None


def _guess_sigmoid(f: Function) -> Written | None:
    """p·b(s·x + t) + q + L·x, where b goes from 0 to 1, or from −1 to 1."""
    ends = _ends(f)
    if ends is None or ends[0] != ends[2] or ends[1] == ends[3]:
        return None
    left, low, _, high = ends
    middle, lo, hi = (low + high) / 2, -FAR, FAR
    for _ in range(200):
        at = (lo + hi) / 2
        if (float(f([at])[0]) - left * at < middle) == (low < high):
            lo = at
        else:
            hi = at
    at, h = _plain(round((lo + hi) / 2, 11)), 1e-4
    near = f([at - 2 * h, at - h, at + h, at + 2 * h])
    slope = float(8 * (near[2] - near[1]) - (near[3] - near[0])) / (12 * h) - left
    for base, span, steepest in (("sigmoid", 1.0, 0.25), ("erf", 2.0, 2 / math.sqrt(math.pi))):
        p = (high - low) / span
        s = slope / (p * steepest)
        q = low if base == "sigmoid" else middle
        of_base = _values(KnownActivation(base))
        x = at + np.linspace(-3, 3, 61) / max(abs(s), 1e-6)
        y = f(x)

        def error(s: float, p: float = p, q: float = q, of_base: Function = of_base, x: Any = x, y: Any = y) -> float:
            return float(np.abs(p * of_base(s * (x - at)) + q + left * x - y).max())

        if not s:
            continue
        ends_of_s = sorted((s * (1 - 1e-5), s * (1 + 1e-5)))
        s = _plain(_least(error, *ends_of_s))
        s = min((s, float(f"{s:.7g}"), float(f"{s:.4g}")), key=error)
        affine = (s, 0.0 - s * at, p, q, left)
        if _is_same(f, _transformed(of_base, affine)):
            return Written(base, (), affine)
    return None


def _guess_softsign(f: Function) -> Written | None:
    return Written("softsign") if _is_same(f, lambda x: np.asarray(x) / (1 + np.abs(x))) else None


def _values(activation: KnownActivation) -> Function:
    expression = Expression.parse(activation.expression("float64"))
    return lambda x: expression(np.asarray(x, np.float64).reshape(-1, 1))[:, 0]


def _transformed(f: Function, affine: tuple[float, float, float, float, float]) -> Function:
    s, t, p, q, r = affine
    return lambda x: p * f(s * np.asarray(x) + t) + q + r * np.asarray(x)
