"""Measures every table and draws every figure of the docs: `python examples/docs_tables.py [--figures] [NAME ...]`.

Tables are printed, and written into docs/*.md between `<!-- table: NAME -->` and `<!-- end -->`; those named `cli-…`
are transcripts of commands. With --figures the pictures in docs/figures are drawn anew. Names choose some of the
tables or figures. Everything is deterministic.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import attnc
from attnc import constructions, planning
from attnc.certificates.observed import observed_error
from attnc.constructions.estimate import Wanted
from attnc.constructions.truncation.clip import ClipLayer
from attnc.engines.numpy_engine import NumpyEngine
from attnc.model_card import ceiling

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIGURES = DOCS / "figures"
MAX_FIGURE_BYTES, MAX_DEMO_BYTES = 120_000, 150_000
WAVE, WAVE_BOX = "sin(x)+cos(y)", [(-3, 3)] * 2
SPIKE, SPIKE_BOX = "exp(-20*(x**2+y**2))", [(-2, 2)] * 2
HAT = attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.5, 1.5))
"""clip(x, 0, 1) on [−½, 3/2]: the truncation is in the box."""


def small_mlp() -> attnc.ReLUNetwork:
    rng, sizes = np.random.default_rng(0), [(8, 2), (8, 8), (1, 8)]
    weights, biases = [rng.normal(size=s) / 2 for s in sizes], [rng.normal(size=s[0]) / 2 for s in sizes]
    return attnc.ReLUNetwork(weights, biases, (-1, 1))


def centred(X: np.ndarray) -> np.ndarray:
    return np.tanh(X - X.mean(axis=1, keepdims=True))


def mixed(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    return np.sin(X) * Y.mean(axis=1, keepdims=True)


SEQUENCE = attnc.SequenceTarget(centred, tokens=2, width=1, box=(-1, 1), lipschitz=0.7072)
"""On two tokens X − mean is (x0 − x1)/2 · (1, −1), which is 1/√2-Lipschitz from the 2-norm to the max-norm."""
PAIR = attnc.SequenceTarget(mixed, tokens=(1, 2), width=(1, 1), box=(-1, 1), lipschitz=1.0)
"""The gradient is (cos x·ȳ, sin x/2, sin x/2): its square is at most cos²x + sin²x/2 ≤ 1."""


# --- tables -----------------------------------------------------------------------------------------------------------

Row = Sequence[object]


def figure_of(x: float | None) -> str:
    """A bound, rounded up to three digits; an observed error is rounded to nearest by `seen`."""
    return "–" if x is None else ceiling(x)


def seen(x: float | None) -> str:
    return "–" if x is None else f"{x:.3g}"


def markdown(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, [":--" if i == 0 else "--:" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def observe(target: attnc.targets.target.Target, built: constructions.Built, p: float = math.inf) -> float:
    """As for a certificate: the largest error at a dense sample (in L_p: by quadrature)."""
    engine = NumpyEngine(built.program)

    def evaluate(points: np.ndarray) -> np.ndarray:
        return engine(*target.split(points)).reshape(len(points), -1)

    return observed_error(evaluate, target, built.program.num_anchors, p)


def claims(net: attnc.Network) -> tuple[str, str, str]:
    bound, observed = net.certificate.bound, net.certificate.observed
    return figure_of(bound), seen(observed), f"{bound / observed:.2f}"


def max_affine() -> str:
    def row(name: str, box: str, eps: float, net: attnc.Network) -> Row:
        return f"`{name}`", box, eps, net.dtype, f"{net.num_anchors:,}", *claims(net)

    build = functools.partial(attnc.compile, construction="max_affine")
    cases = [(WAVE, "[−3, 3]²", WAVE_BOX, 0.3), (WAVE, "[−3, 3]²", WAVE_BOX, 0.1)]
    cases += [("3*x-2*y", "[−1, 1] × [0, 5]", [(-1, 1), (0, 5)], 0.3), ("abs(x)+y+z", "[−1, 1]³", [(-1, 1)] * 3, 0.3)]
    rows = [row(text, name, eps, build(text, box, eps)) for text, name, box, eps in cases]
    rows.append(row(WAVE, "[−3, 3]²", 0.1, build(WAVE, WAVE_BOX, 0.1, dtype="float32")))
    rows.append(row("sqrt(x)", "[0, 1]", 0.02, build("sqrt(x)", [(0, 1)], 0.02)))
    rows.append(row("tanh(X − mean X)", "2 tokens in [−1, 1]", 0.1, build(SEQUENCE, eps=0.1)))
    return markdown(("f", "box", "eps", "dtype", "anchors", "bound (proven)", "observed", "bound/observed"), rows)


def max_affine_lp() -> str:
    rows = []
    for text, name, box, p, eps in [
        ("sign(x)*y", "[−1, 1]²", [(-1, 1)] * 2, 1, 0.1),
        ("sign(x)*y", "[−1, 1]²", [(-1, 1)] * 2, 2, 0.1),
        ("floor(3*x)", "[−1, 1]", [(-1, 1)], 1, 0.1),
        ("sign(x+y)", "[−1, 1]²", [(-1, 1)] * 2, 1, 0.5),
        (WAVE, "[−3, 3]²", WAVE_BOX, 2, 0.3),
    ]:
        net = attnc.compile(text, box, eps, norm=p)
        layer = next((t.value for t in net.certificate.terms if t.name == "boundary layer"), None)
        rows.append((f"`{text}`", name, f"L{p}", eps, f"{net.num_anchors:,}", figure_of(layer), *claims(net)[:2]))
    return markdown(("f", "box", "norm", "eps", "anchors", "boundary layer", "bound (proven)", "observed"), rows)


def max_affine_adaptive() -> str:
    rows = []
    for text, name, box, eps in [
        (WAVE, "[−3, 3]²", WAVE_BOX, 0.1),
        ("sqrt(x)", "[0, 1]", [(0, 1)], 0.02),
        ("abs(x)**0.5*y", "[−1, 1]²", [(-1, 1)] * 2, 0.2),
        (SPIKE, "[−2, 2]²", SPIKE_BOX, 0.05),
    ]:
        grid, adaptive = (attnc.compile(text, box, eps, centres=centres) for centres in ("grid", "adaptive"))
        ratio = f"{grid.num_anchors / adaptive.num_anchors:.1f} ×"
        found = (figure_of(adaptive.certificate.bound), seen(adaptive.certificate.observed))
        rows.append((f"`{text}`", name, eps, f"{grid.num_anchors:,}", f"{adaptive.num_anchors:,}", ratio, *found))
    header = ("f", "box", "eps", "anchors, grid", "anchors, adaptive", "saved", "bound, adaptive", "observed, adaptive")
    return markdown(header, rows)


def max_affine_domain() -> str:
    rows = []
    for r in (3.0, 1.5, 0.75, 0.375):
        net = attnc.compile(WAVE, [(-r, r)] * 2, 0.1, construction="max_affine")
        rows.append((f"[−{r:g}, {r:g}]²", f"{net.num_anchors:,}", f"{net.num_anchors / r**2:.0f}", *claims(net)[:2]))
    return markdown(("box", "anchors", "anchors / r²", "bound (proven)", "observed"), rows)


def max_affine_cross() -> str:
    rows = []
    for name, net in [
        ("`sin(x)+cos(y)`, a constant memory", attnc.compile(WAVE, WAVE_BOX, 0.1, construction="max_affine_cross")),
        (
            "tanh(X − mean X), constant memory",
            attnc.compile(SEQUENCE, eps=0.1, construction="max_affine_cross"),
        ),
        ("sin(X)·mean(Y), X 1 token, Y 2 tokens", attnc.compile(PAIR, eps=0.2)),
    ]:
        layers = " → ".join(layer.name for layer in net.program.all_layers)
        rows.append((name, net.eps, layers, f"{net.num_anchors:,}", *claims(net)))
    return markdown(("f", "eps", "layers", "anchors", "bound (proven)", "observed", "bound/observed"), rows)


def truncated_linear() -> str:
    rows = []
    for p in (3, 9, 33, 129, 513):
        soft = constructions.truncated_linear(HAT, num_anchors=p)
        hard = constructions.truncated_linear(HAT, num_anchors=p, beta=1e4)
        of_soft, of_hard = observe(HAT, soft), observe(HAT, hard)
        unit = p - 1  # Δ = 1/(p − 1)
        cells = (figure_of(hard.bound.value), seen(of_hard), figure_of(soft.bound.value), seen(of_soft))
        rows.append((p, *cells, f"{of_soft * unit:.4f}", f"{of_hard / of_soft:.1f} ×"))
    header = ("p", "bound, hard", "observed, hard", "bound, β = 2.72", "observed, β = 2.72", "observed/Δ", "gain")
    return markdown(header, rows)


def truncated_linear_beta() -> str:
    rows = []
    for beta in (0.5, 1.0, 2.0, 2.72, 3.0, 4.0, 8.0, 32.0, 1e3):
        built = constructions.truncated_linear(HAT, num_anchors=33, beta=beta)
        rows.append((f"{beta:g}", figure_of(32 * built.bound.value), f"{32 * observe(HAT, built):.4f}"))
    return markdown(("β", "bound/Δ (proven)", "observed/Δ"), rows)


def truncated_linear_dtype() -> str:
    rows = []
    for p in (9, 33, 129, 257, 513):
        rows.append((p, *(figure_of(ClipLayer(p, dtype=dtype).error) for dtype in ("float64", "float32"))))
    return markdown(("p", "float64", "float32"), rows)


def heads_networks() -> Iterator[tuple[str, constructions.Built]]:
    """The same error, 1e-3, by one head and by ever more heads over ever fewer tokens."""
    yield "1 (`truncated_linear`)", constructions.truncated_linear(HAT, eps=1e-3)
    for n in (64, 32, 16, 8, 4, 3):
        built = constructions.truncated_linear_heads(HAT, eps=1e-3, num_tokens=n)
        yield str(dict(built.parameters)["num_heads"]), built
    built = constructions.truncated_linear_heads(HAT, eps=1e-3, num_tokens=16, sentinels=3)
    yield f"{dict(built.parameters)['num_heads']} (s = 3)", built


def truncated_linear_heads() -> str:
    rows = []
    for heads, built in heads_networks():
        program, facts = built.program, dict(built.parameters)
        tokens = program.layers[0].weight.shape[0]
        sizes = (tokens, f"{facts['num_anchors']:,}", f"{program.num_anchors:,}", f"{program.num_parameters:,}")
        cells = (f"{facts['beta']:.3g}", figure_of(built.bound.value), seen(observe(HAT, built)))
        rows.append((heads, *sizes, *cells))
    header = ("heads H", "tokens n", "N", "(head, key) pairs", "parameters", "β", "bound (proven)", "observed")
    return markdown(header, rows)


@functools.cache
def sweeps() -> dict[str, tuple[str, list[tuple[int, float, float]]]]:
    """name → (what runs along the axis, [(its value, bound, observed)])."""

    def found(built: constructions.Built) -> tuple[float, float]:
        return built.bound.value, observe(HAT, built)

    def heads(H: int, n: int, **more: int) -> tuple[float, float]:
        return found(constructions.truncated_linear_heads(HAT, num_heads=H, num_tokens=n, **more))

    soft = {p: found(constructions.truncated_linear(HAT, num_anchors=p)) for p in (9, 17, 33, 65, 129, 257, 513)}
    hard = {p: found(constructions.truncated_linear(HAT, num_anchors=p, beta=1e4)) for p in soft}
    return {
        "one head, β = 2.72": ("p", [(p, *pair) for p, pair in soft.items()]),
        "one head, hard": ("p", [(p, *pair) for p, pair in hard.items()]),
        "n = 10 tokens, H heads": ("H", [(H, *heads(H, 10)) for H in (2, 4, 8, 16, 32, 64)]),
        "H = 8 heads, n tokens": ("n − 2", [(n - 2, *heads(8, n)) for n in (4, 6, 10, 18, 34, 66)]),
        "n = 10, H heads, s = 3": ("H", [(H, *heads(H, 10, sentinels=3)) for H in (2, 4, 8, 16, 32, 64)]),
    }


def truncated_linear_slopes() -> str:
    rows = []
    for name, (axis, points) in sweeps().items():
        x, bounds, observed = (np.log(column) for column in zip(*points, strict=True))
        slopes = (f"{np.polyfit(x, y, 1)[0]:.2f}" for y in (bounds, observed))
        rows.append((name, f"{axis} = {points[0][0]} … {points[-1][0]}", *slopes))
    return markdown(("sweep", "range", "slope of log bound", "slope of log observed"), rows)


def bumps_table(name: str) -> str:
    rows = []
    for text, box_name, box, eps, heads in [
        (WAVE, "[−3, 3]²", WAVE_BOX, 0.3, None),
        (WAVE, "[−3, 3]²", WAVE_BOX, 0.3, 4),
        (WAVE, "[−3, 3]²", WAVE_BOX, 0.2, None),
        ("sin(3*x)", "[−2, 2]", [(-2, 2)], 0.05, None),
    ]:
        net = attnc.compile(text, box, eps, construction=name, heads=heads)
        facts = net.parameters
        sizes = (facts["points_per_axis"], facts["step_heads"], facts["step_anchors"], f"{net.num_anchors:,}")
        rows.append((f"`{text}`", box_name, eps, *sizes, f"{facts['beta']:g}", *claims(net)[:2]))
    header = (
        "f",
        "box",
        "eps",
        "cells",
        "heads of layer 1",
        "anchors a step",
        "anchors",
        "β",
        "bound (proven)",
        "observed",
    )
    return markdown(header, rows)


def relu_network() -> str:
    rows = []
    target = small_mlp()
    for eps, dtype in ((0.1, "float64"), (0.01, "float64"), (0.001, "float64"), (0.1, "float32")):
        net = attnc.compile(target, eps=eps, dtype=dtype)
        rounding = next(term.value for term in net.certificate.terms if term.name == "rounding")
        sizes = (net.parameters["num_anchors"], f"{net.num_parameters:,}")
        rows.append((eps, dtype, *sizes, figure_of(rounding), *claims(net)))
    header = (
        "eps",
        "dtype",
        "anchors",
        "parameters",
        "rounding",
        "bound (proven)",
        "observed",
        "bound/observed",
    )
    return markdown(header, rows)


SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def box_name(box: attnc.targets.box.Box) -> str:
    """[−1, 1]³, or sides one by one where they differ."""
    sides = [f"[{lo:g}, {hi:g}]".replace("-", "−") for lo, hi in zip(box.lo, box.hi, strict=True)]
    if len(set(sides)) > 1:
        return " × ".join(sides)
    return sides[0] + (str(box.d).translate(SUPERSCRIPTS) if box.d > 1 else "")


def papers_anchors(target: attnc.targets.target.Target, eps: float, dtype: str) -> str:
    """What `plan` expects of max_affine, whatever the limits."""
    (row,) = planning.plan(target, Wanted(eps, dtype, max_anchors=10**40), ("max_affine",))
    return f"{row.anchors:.0e}".replace("e+", "e").replace("e0", "e")


def spectral_grid() -> str:
    rows = []
    for text, variables, lo, hi, eps, dtype in [
        ("sin(x)", "x", -3, 3, 1e-10, "float64"),
        ("sin(x)", "x", -3, 3, 2e-6, "float32"),
        ("tanh(x)", "x", -4, 4, 7e-9, "float64"),
        ("1/(1+25*x**2)", "x", -1, 1, 4e-9, "float64"),
        ("x**2*y", "xy", -1, 1, 1e-6, "float64"),
        ("sin(x)+cos(y)", "xy", -3, 3, 4e-10, "float64"),
        ("sin(x)+cos(y)", "xy", -3, 3, 1e-5, "float32"),
        ("exp(-x**2-y**2)*sin(3*x+y)", "xy", -2, 2, 2e-10, "float64"),
        ("sqrt(1+x**2+y**2)", "xy", -3, 3, 2e-8, "float64"),
        ("exp(sin(x)*y)", "xy", -3, 3, 1e-8, "float64"),
        ("1/(1+x**2+y**2+z**2)", "xyz", -1, 1, 1e-4, "float64"),
        ("log(3+x+y*z)", "xyz", -1, 1, 1e-6, "float64"),
        ("exp(x*y-z*u)", "xyzu", -1, 1, 1e-3, "float64"),
        ("x*y+z*u+v*w", "xyzuvw", -1, 1, 0.05, "float64"),
    ]:
        target = attnc.as_target(text, {name: (lo, hi) for name in variables})
        built = constructions.spectral_grid(target, eps=eps, dtype=dtype)
        facts = dict(built.parameters)
        counts = " × ".join(str(facts[f"anchors_{name}"]) for name in target.box.names)
        found = (f"{facts['largest value']:.3g}", seen(observe(target, built)))
        about = papers_anchors(target, eps, dtype)
        rows.append((f"`{text}`", box_name(target.box), f"{eps:g}", dtype, counts, *found, about))
    header = ("f", "box", "eps", "dtype", "anchors", "largest \\|value\\|", "observed", "papers' anchors, about")
    return markdown(header, rows)


def compose_row(name: str, target: attnc.targets.target.Target, eps: float) -> Row:
    built = constructions.compose(target, eps=eps)
    program, composed = built.program, dict(built.parameters)["composed error"]
    sizes = (program.num_anchors, program.num_heads, program.num_attention_layers, program.num_parameters)
    found = (seen(observe(target, built)), seen(composed))
    return f"`{name}`", target.box.d, box_name(target.box), f"{eps:g}", *sizes, *found


COMPOSE_HEADER = (
    "expression",
    "variables",
    "box",
    "eps",
    "anchors",
    "heads",
    "attention layers",
    "parameters",
    "observed",
    "composed error",
)


def compose() -> str:
    rows = []
    for text, box, eps in [
        ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-9),
        ("x*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-8),
        ("x/y", {"x": (-1, 1), "y": (0.5, 3)}, 1e-6),
        ("x**y", {"x": (0.5, 2), "y": (-1, 2)}, 1e-6),
        ("tanh(x)", {"x": (-4, 4)}, 1e-9),
        ("tanh(x)*sigmoid(y)-relu(x)*silu(y)", {"x": (-4, 4), "y": (-4, 4)}, 1e-6),
        ("max(x, y, z)+min(x*y, z)", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}, 1e-6),
        ("exp(sin(x)*y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-9),
        ("sqrt(1+x**2+y**2)", {"x": (-3, 3), "y": (-3, 3)}, 2e-8),
        ("(x+y+z)**9", {"x": (-1, 1), "y": (-1, 1), "z": (-1, 1)}, 1e-3),
        ("sin(100*x)*y", {"x": (-2, 2), "y": (-2, 2)}, 1e-6),
        ("sin(x)", {"x": (-1000, 1000)}, 1e-4),
    ]:
        rows.append(compose_row(text, attnc.as_target(text, box), eps))
    ten = {name: (-1, 1) for name in "abcdfghijk"}
    factors = ["sin(a)", "exp(b)", "cos(c)", "tanh(d)", "1/(2+f)", "log(3+g)", "sqrt(4+h)", "atan(i)", "erf(j)", "k**2"]
    squares, exponentials = (" + ".join(form.format(name) for name in ten) for form in ("{}**2", "exp({})"))
    for name, text in [
        ("sin(a)·exp(b)·cos(c)·…, ten factors", "*".join(factors)),
        ("exp(−(a² + b² + … + k²)/10)", f"exp(-({squares})/10)"),
        ("log(exp(a) + exp(b) + … + exp(k))", f"log({exponentials})"),
    ]:
        rows.append(compose_row(name, attnc.as_target(text, ten), 1e-6))
    return markdown(COMPOSE_HEADER, rows)


def compose_dimension() -> str:
    rows = []
    for d in (2, 4, 8, 16, 32):
        text = " + ".join(f"sin({i + 1}*x{i}/{d})*x{(i + 1) % d}" for i in range(d))
        target = attnc.as_target(text, {f"x{i}": (-1, 1) for i in range(d)})
        rows.append(compose_row("Σ sin((i+1)·xᵢ/d)·xᵢ₊₁", target, 1e-5))
    return markdown(COMPOSE_HEADER, rows)


def plan_refusal() -> str:
    """What is said of Python code in eight variables, in lines that fit a page."""

    def g(X: np.ndarray) -> np.ndarray:
        return np.sin(X.sum(axis=1))

    try:
        attnc.compile(g, [(-1, 1)] * 8, eps=1e-3)
    except attnc.BoundNotMet as refusal:
        wrapped = [textwrap.wrap(line, 112, subsequent_indent=" " * 24) for line in str(refusal).splitlines()]
        return "```text\n" + "\n".join(line for lines in wrapped for line in lines) + "\n```"
    raise AssertionError("a construction serves Python code in eight variables: the page says otherwise")


def rates_table() -> str:
    import rates  # beside this script

    return markdown(rates.HEADER, rates.rows())


# --- transcripts ------------------------------------------------------------------------------------------------------


def run(line: str) -> str:
    """What a command prints."""
    from attnc.cli import main

    if line.startswith("attnc verify"):  # a process of its own, which writes past this one's stdout
        command = [sys.executable, "-m", "attnc.cli", *shlex.split(line)[1:]]
        return subprocess.run(command, check=False, capture_output=True, encoding="utf-8").stdout.rstrip()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main(shlex.split(line)[1:])
    return out.getvalue().rstrip()


def transcript(*lines: str) -> str:
    parts = [f"$ {line}\n" + "\n".join(text.rstrip() for text in run(line).split("\n")) for line in lines]
    return "```console\n" + "\n".join(part.rstrip("\n") for part in parts) + "\n```"


def cli() -> dict[str, Callable[[], str]]:
    """In this order, in one folder: later commands use what earlier ones saved."""
    wave = 'attnc compile "sin(x)+cos(y)" --box x=-3:3 --box y=-3:3 --eps 0.1'
    return {
        "cli-compile": lambda: transcript(f"{wave} --out net"),
        "cli-json": lambda: transcript('attnc compile "-x**2" --box x=-pi:pi --eps 0.5 --json'),
        "cli-norm": lambda: transcript('attnc compile "sign(x)*y" --box x=-1:1 --box y=-1:1 --eps 0.1 --norm 2'),
        "cli-eval": lambda: transcript("attnc eval net x=0.5 y=pi/4", "attnc eval net x=0.5 y=1 --json"),
        "cli-outside": lambda: transcript("attnc eval net x=4 y=0 --outside clamp"),
        "cli-info": lambda: transcript("attnc info net"),
        "cli-export": lambda: transcript("attnc export net --to onnx --out net.onnx"),
        "cli-bad": lambda: transcript('attnc compile "log(x)" --box x=-1:1', "attnc eval net x=4 y=0"),
        "cli-not-met": lambda: transcript(f"{wave} --max-anchors 100 --construction max_affine"),
        "cli-verify": lambda: transcript("attnc verify net"),
        "plan-expression": lambda: transcript('attnc plan "exp(sin(x)*y)" --box x=-2:2 --box y=-2:2 --eps 1e-6'),
        "plan-all": lambda: transcript('attnc plan "sin(x)+cos(y)" --box x=-3:3 --box y=-3:3 --eps 0.1'),
        "cli-expressions": lambda: transcript(
            'attnc compile "2x + 1" --box x=0:1',
            'attnc compile "1/x" --box x=-1:1',
            'attnc compile "sign(x)" --box x=-1:1',
        ),
    }


TABLES: dict[str, Callable[[], str]] = {
    "max_affine": max_affine,
    "max_affine_lp": max_affine_lp,
    "max_affine_adaptive": max_affine_adaptive,
    "max_affine_domain": max_affine_domain,
    "max_affine_cross": max_affine_cross,
    "truncated_linear": truncated_linear,
    "truncated_linear_beta": truncated_linear_beta,
    "truncated_linear_dtype": truncated_linear_dtype,
    "truncated_linear_heads": truncated_linear_heads,
    "truncated_linear_slopes": truncated_linear_slopes,
    "two_layer": lambda: bumps_table("two_layer"),
    "attention_softmax": lambda: bumps_table("attention_softmax"),
    "relu_network": relu_network,
    "spectral_grid": spectral_grid,
    "rates": rates_table,
    "compose": compose,
    "compose_dimension": compose_dimension,
    "plan-refusal": plan_refusal,
    **cli(),
}


def write(name: str, text: str) -> bool:
    """Into every page that has the markers; whether one has."""
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    is_found = False
    for path in sorted(DOCS.glob("*.md")):
        old = path.read_text()
        new, count = pattern.subn(lambda match: match[1] + text + "\n" + match[2], old)
        is_found |= count > 0
        if new != old:
            path.write_text(new)
    return is_found


# --- figures ----------------------------------------------------------------------------------------------------------


def as_network(target: attnc.targets.target.Target, built: constructions.Built) -> attnc.Network:
    """A construction with parameters of its own as a network, for its picture."""
    from attnc.certificates.certificate import Certificate

    bound, method = (None, "estimate") if built.bound is None else (built.bound.value, "theorem")
    terms = () if built.bound is None else built.bound.terms
    claim = Certificate(bound, observe(target, built), terms, target.assumptions, "float64", method)
    return attnc.Network(
        built.program, claim, target.box, built.construction, target.text, None, dict(built.parameters)
    )


def draw_demo(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(f"attnc demo --out {folder}")
        os.replace(Path(folder) / "demo-fine.png", path)


def draw_slopes(path: Path) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = picture.subplots()
    colours = ("#0072b2", "#5b6470", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's
    scale = {"H": 8, "n − 2": 8, "p": 1}  # N anchors for every unit of what is varied
    for (name, (axis, points)), colour in zip(sweeps().items(), colours, strict=True):
        x, bounds, observed = zip(*points, strict=True)
        unit = 4 if "s = 3" in name else scale[axis]
        anchors = [unit * value for value in x]
        wide = axis == "H" and unit == 8  # it coincides with the sweep over n: drawn wider, below it
        axes.loglog(anchors, bounds, "-", color=colour, lw=5 if wide else 1.4, alpha=0.4 if wide else 1, label=name)
        axes.loglog(anchors, observed, "o", color=colour, ms=8 if wide else 4, alpha=0.4 if wide else 1)
    axes.set_xlabel("anchors N")
    axes.set_ylabel("error for clip(x, 0, 1)")
    axes.set_title("lines: bound (proven); dots: observed (sampled)", loc="left", fontsize=10)
    axes.grid(which="major", color="#d5dae0", lw=0.6)
    axes.legend(frameon=False, fontsize=9)
    picture.savefig(path, dpi=130, facecolor="white")


def draw_spectral(path: Path) -> None:
    attnc.compile("x*sin(3*x)", {"x": (-2, 2)}, 1e-3, construction="spectral_grid").plot(path)


def draw_rates(path: Path) -> None:
    import rates  # beside this script

    rates.draw(path)


class DrawnHead(NamedTuple):
    """A head of a composed program as its stored weights show it."""

    name: str
    level: int
    keys: int
    queries: tuple[str, ...]  # signals that the scores read
    carried: tuple[str, ...]  # signals that the keys carry


def drawn_heads(program: attnc.Program, inputs: Sequence[str]) -> tuple[list[DrawnHead], tuple[str, ...]]:
    """The heads level by level, and the signals that the output reads."""
    before, heads = [f"signal.{name}" for name in inputs], list[DrawnHead]()
    *pairs, read = program.layers
    for level, (place, attend) in enumerate(zip(pairs[::2], pairs[1::2], strict=True), 1):
        for head in attend.heads:
            (made,) = (attend.channels[i] for i in np.flatnonzero(head.W_O.any(axis=0)))
            asked = [attend.channels[i] for i in np.flatnonzero(head.W_Q.any(axis=1))]
            values = [i for i in np.flatnonzero(head.W_V.any(axis=1))]
            links = place.weight.index[np.isin(place.weight.index[:, 1], values)]
            keys = place.weight.shape[0] if head.mask is None else int(head.mask.num_visible()[0])
            queries = tuple(name for name in asked if name.startswith("signal."))
            heads.append(DrawnHead(made, level, keys, queries, tuple(before[i] for i in np.unique(links[:, 3]))))
        before = list(attend.channels)
    return heads, tuple(before[i] for i in np.unique(read.weight.index[:, 3]))


COMPOSED = "exp(sin(x)*y)*(x*y-z) + abs(x*y-z)"
COMPOSED_BOX = {"x": (-2.0, 2.0), "y": (-2.0, 2.0), "z": (-1.0, 1.0)}


def draw_compose(path: Path) -> None:
    """Heads in columns, one for each attention layer; what a head asks with, and what its keys carry."""
    from matplotlib.figure import Figure

    target = attnc.as_target(COMPOSED, COMPOSED_BOX)
    program = constructions.compose(target, eps=1e-6).program
    heads, read = drawn_heads(program, target.box.names)
    blue, orange, grey, ink = "#0072b2", "#d55e00", "#5b6470", "#1b1f24"
    depth = heads[-1].level
    arrows = [(source, head.name, head.level, blue, "-") for head in heads for source in head.queries]
    arrows += [(source, head.name, head.level, orange, "--") for head in heads for source in head.carried]
    arrows += [(source, "out", depth + 1, grey, "-") for source in read]
    made = {f"signal.{name}": 0 for name in target.box.names} | {head.name: head.level for head in heads}
    needed = {name: max(level for source, _, level, _, _ in arrows if source == name) for name in made}
    columns = [
        [name for name in made if made[name] == level] + [name for name in made if made[name] < level < needed[name]]
        for level in range(depth + 1)
    ] + [["out"]]
    places = {
        (name, i): (2.2 * i, (len(column) - 1) / 2 - j)
        for i, column in enumerate(columns)
        for j, name in enumerate(column)
    }
    picture = Figure(figsize=(8.2, 3.4), layout="constrained")
    axes = picture.subplots()

    def arrow(source: str, end: str, level: int, colour: str, style: str) -> None:
        (x0, y0), (x1, y1) = places[source, level - 1], places[end, level]
        half = {0: 0.16, depth + 1: 0.26}
        wide = 0.32 if made[source] == level - 1 else 0.12
        shift = {blue: 0.1, orange: -0.1, grey: 0.0}[colour]
        there = (x1 - (0.32 if made.get(end) == level else half.get(level, 0.12)), y1 + shift)
        shape = {"arrowstyle": "-|>" if made.get(end, level) == level else "-", "color": colour, "ls": style, "lw": 1.2}
        axes.annotate("", there, (x0 + half.get(level - 1, wide), y0 + shift / 2), arrowprops=shape)

    for source, end, level, colour, style in arrows:
        arrow(source, end, level, colour, style)
    for i, column in enumerate(columns):
        for name in column:
            (x, y), label = places[name, i], name.removeprefix("signal.").split("#")[0]
            keys = [f"{head.keys} keys" for head in heads if head.name == name]
            if name != "out" and made[name] < i:  # passes by, in the state
                arrow(name, name, i, grey, "-")
                axes.text(x, y, label, ha="center", va="center", fontsize=10, color=grey)
                continue
            box = {"boxstyle": "round,pad=0.45", "fc": "white" if keys else "#eef1f4", "ec": ink, "lw": 0.8}
            axes.text(x, y, "\n".join([label, *keys]), ha="center", va="center", fontsize=10, color=ink, bbox=box)
        title = "inputs" if i == 0 else "output" if i > depth else f"layer {i}"
        axes.text(2.2 * i, 1.65, title, ha="center", fontsize=10, color=grey)
    for x, colour, style, label in ((0.0, blue, "-", "read by the scores"), (3.2, orange, "--", "carried by the keys")):
        axes.plot([x, x + 0.5], [-1.75, -1.75], color=colour, ls=style, lw=1.2)
        axes.text(x + 0.65, -1.75, label, va="center", fontsize=10, color=grey)
    axes.set_xlim(-0.3, 2.2 * (depth + 1) + 0.4)
    axes.set_ylim(-1.95, 1.85)
    axes.axis("off")
    picture.savefig(path, dpi=130, facecolor="white")


def figures() -> dict[str, Callable[[Path], None]]:
    def of_text(text: str, box: Sequence[tuple[float, float]], eps: float, **options: object) -> Callable[[Path], None]:
        return lambda path: attnc.compile(text, box, eps, **options).plot(path)  # type: ignore[arg-type]

    def of_clip(make: Callable[..., constructions.Built], **options: object) -> Callable[[Path], None]:
        return lambda path: as_network(HAT, make(HAT, **options)).plot(path, HAT)

    mlp = small_mlp()
    return {
        "demo": draw_demo,
        "max_affine": of_text("x*sin(3*x)", [(-2, 2)], 0.5, construction="max_affine"),
        "max_affine_adaptive": of_text(SPIKE, SPIKE_BOX, 0.1, centres="adaptive"),
        "max_affine_cross": of_text("sin(x)*y", [(-3, 3), (-1, 1)], 0.3, construction="max_affine_cross"),
        "truncated_linear": of_clip(constructions.truncated_linear, num_anchors=9),
        "truncated_linear_heads": of_clip(constructions.truncated_linear_heads, num_heads=4, num_tokens=5),
        "truncated_linear_slopes": draw_slopes,
        "two_layer": of_text(WAVE, WAVE_BOX, 0.5, construction="two_layer"),
        "attention_softmax": of_text("sin(3*x)", [(-2, 2)], 0.3, construction="attention_softmax"),
        "relu_network": lambda path: attnc.compile(mlp, eps=0.1).plot(path, mlp),
        "spectral_grid": draw_spectral,
        "compose": draw_compose,
        "rates": draw_rates,
    }


def optimise(path: Path) -> None:
    """256 colours, and as wide as fits into MAX_FIGURE_BYTES."""
    from PIL import Image

    whole = Image.open(path).convert("RGB")
    limit = MAX_DEMO_BYTES if path.stem == "demo" else MAX_FIGURE_BYTES
    for width in range(1000, 500, -50):
        height = round(whole.height * width / whole.width)
        small = whole.resize((width, height), Image.Resampling.LANCZOS) if width < whole.width else whole
        small.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < limit:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figures", action="store_true", help="draw docs/figures/*.png")
    parser.add_argument("names", nargs="*", help="only these tables or figures")
    asked = parser.parse_args()
    start = time.perf_counter()
    os.environ.pop("COLUMNS", None)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names = [name for name in asked.names if name in TABLES]
        if any(name.startswith("cli-") for name in names) and "cli-compile" not in names:
            names.insert(0, "cli-compile")  # saves what the others use
        for name in names if asked.names else TABLES:
            text = TABLES[name]()
            print(f"<!-- table: {name} -->\n{text}\n<!-- end -->\n", flush=True)
            if not write(name, text):
                print(f"no page has a place for {name}\n")
        os.chdir(before)
    if asked.figures:
        FIGURES.mkdir(parents=True, exist_ok=True)
        for name, draw in figures().items():
            if asked.names and name not in asked.names:
                continue
            path = FIGURES / f"{name}.png"
            draw(path)
            optimise(path)
            print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size:,} bytes", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
