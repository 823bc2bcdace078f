"""Measures every table and draws every figure of the docs: `python docs/builders/tables.py [--figures] [NAME ...]`.

Tables are printed, and written into docs/*.md between `<!-- table: NAME -->` and `<!-- end -->`; those named `cli-…`
are transcripts of commands. With --figures the pictures in docs/figures are drawn anew. Names choose some of the
tables or figures. Everything is deterministic.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import attnc
import attnc_lab
import checker_table
from attnc import constructions, planning
from attnc.constructions.construction import Request
from attnc.constructions.fitting.clips import ClipLayer
from attnc.wording import ceiling
from figures import figures, optimise, rates
from subjects import HAT, PAIR, SEQUENCE, SPIKE, SPIKE_BOX, WAVE, WAVE_BOX, observe, small_mlp, sweeps
from transcripts import cli

DOCS = Path(__file__).resolve().parent.parent
FIGURES = DOCS / "figures"

Row = Sequence[object]


def figure_of(x: float | None) -> str:
    """A bound, rounded up to three digits; an observed error is rounded to nearest by `seen`."""
    return "–" if x is None else ceiling(x)


def seen(x: float | None) -> str:
    return "–" if x is None else f"{x:.3g}"


def markdown(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, [":--" if i == 0 else "--:" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


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
        net = attnc.compile(text, box, eps, norm=p, construction="max_affine")
        layer = next((t.value for t in net.certificate.terms if t.name in ("boundary layer", "jump")), None)
        rows.append((f"`{text}`", name, f"L{p}", eps, f"{net.num_anchors:,}", *claims(net)[:2], figure_of(layer)))
    return markdown(("f", "box", "norm", "eps", "anchors", "bound (proven)", "observed", "where f jumps"), rows)


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
        "anchors per step",
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
    """The sizes that `plan` expects of max_affine, without its limits."""
    max_affine, request = planning.construction_named("max_affine"), Request(eps, dtype, max_anchors=10**40)
    row = planning.estimate(max_affine, target, request)
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


def of_lab(name: str, **wanted: object) -> list[dict[str, Any]]:
    """The rows of an experiment's cells with these values, by the full profile and the seed of the report."""
    experiment = attnc_lab.named(name)
    cells = (cell for cell in experiment.cells("full") if wanted.items() <= dict(cell).items())
    return [{**cell, **row} for cell in cells for row in experiment.rows(cell, 0)]


def compose_families() -> str:
    header = (
        "family",
        "operations",
        "variables",
        "heads",
        "attention layers",
        "keys of `compose`",
        "keys of the theorem",
    )
    rows = [
        (row["family"], f"{row['operations']:,}", row["variables"], row["heads"], row["layers"], row["anchors"],
         f"{row['theorem']:,.0f}", seen(row["max_error"]))
        for row in of_lab("scaling", kind="family")
    ]  # fmt: skip
    return markdown((*header, "observed"), rows)


def networks() -> str:
    header = ("units", "construction", "eps", "anchors", "bound (proven)", "observed")
    rows = [
        (row["activation"], row["construction"], f"{row['eps']:g}", f"{row['anchors']:,}", figure_of(row.get("bound")),
         seen(row["error"]))
        for row in of_lab("beyond_the_box", kind="network")
    ]  # fmt: skip
    return markdown(header, rows)


def plan_refusal() -> str:
    """The refusal of Python code in eight variables, in lines that fit a page."""

    def g(X: np.ndarray) -> np.ndarray:
        return np.sin(X.sum(axis=1))

    try:
        attnc.compile(g, [(-1, 1)] * 8, eps=1e-3)
    except attnc.BoundNotMet as refusal:
        wrapped = [textwrap.wrap(line, 112, subsequent_indent=" " * 24) for line in str(refusal).splitlines()]
        return "```text\n" + "\n".join(line for lines in wrapped for line in lines) + "\n```"
    raise AssertionError("a construction takes Python code in eight variables, against the page")


def rates_table() -> str:
    measured = rates()
    return markdown(measured["HEADER"], measured["rows"]())


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
    "compose_families": compose_families,
    "networks": networks,
    "plan-refusal": plan_refusal,
    "checker-files": checker_table.table,
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
        os.environ["XDG_CACHE_HOME"] = folder  # or the words for a bound would depend on earlier verifications
        names = [name for name in asked.names if name in TABLES]
        if any(name.startswith("cli-") for name in names) and "cli-compile" not in names:
            names.insert(0, "cli-compile")  # saves the network that the others use
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
