"""The sizes that are required, measured: anchors, the error found by an adversarial search, the bound, the time.

`python benchmarks/figures.py`; every row is compiled anew. Times depend on the machine and its load.
"""

from __future__ import annotations

import math
import time

import numpy as np

import attnc
from attnc.constructions import graded

INF = (-math.inf, math.inf)
TEN = "*".join(
    ["sin(a)", "exp(b)", "cos(c)", "tanh(d)", "1/(2+f)", "log(3+g)", "sqrt(4+h)", "atan(i)", "erf(j)", "k**2"]
)
ROWS = [
    ("sin(x)", {"x": (-3, 3)}, 1e-9, "spectral_grid", 17),
    ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-8, "spectral_grid", 17**2),
    ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-9, "auto", 40),
    ("exp(-x**2-y**2)*sin(3*x+y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-8, "spectral_grid", 25**2),
    ("exp(sin(x)*y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-8, "spectral_grid", 65**2),
    ("relu(x)", {"x": (-1, 1)}, 1.5e-5, "graded", 24),
    ("gelu(x)", {"x": INF}, 1e-7, "gates", 17),
    ("gelu(x)", {"x": INF}, 1e-12, "gates", 33),
    ("x*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-8, "auto", 8),
    (TEN, {name: (-1, 1) for name in "abcdfghijk"}, 1e-6, "auto", 1000),
    ("exp(-x**2-y**2)*sin(3*x+y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, "auto", None),
    ("exp(sin(x)*y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, "auto", None),
    # not named anywhere else
    ("cos(3*x)/(2+sin(x))", {"x": (-2, 5)}, 1e-8, "auto", None),
    ("log(1+x**2+y**2)*tanh(x-y)", {"x": (-2, 2), "y": (-1, 3)}, 1e-6, "auto", None),
    ("log(1+x**2+y**2)*tanh(x-y)", {"x": (-2, 2), "y": (-1, 3)}, 1e-6, "spectral_grid", None),
    ("max(sin(3*x), y**2-0.5)", {"x": (-2, 2), "y": (-1, 1)}, 1e-5, "auto", None),
    ("exp(-x*y*z)+z**3", {"x": (0, 1), "y": (-1, 1), "z": (-1, 1)}, 1e-5, "spectral_grid", None),
    ("sqrt(x)*y", {"x": (0, 1), "y": (-1, 1)}, 1e-3, "auto", None),
]


def main() -> None:
    print("| f | eps | construction | anchors | at most | bound | observed | bound/observed | method | s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for text, box, eps, construction, most in ROWS:
        start = time.perf_counter()
        try:
            net = attnc.compile(text, box, eps, construction=construction)
        except attnc.AttncError as refusal:
            print(f"| `{text}` | {eps:g} | {construction} | refused: {str(refusal)[:120]} |", flush=True)
            continue
        claim, seconds = net.certificate, time.perf_counter() - start
        ratio = claim.bound / claim.observed if claim.bound and claim.observed else math.nan
        print(
            f"| `{text}` | {eps:g} | {net.construction} | {net.num_anchors:,} | {'' if most is None else most} | "
            f"{claim.bound:.3g} | {claim.observed:.3g} | {ratio:.3g} | {claim.method} | {seconds:.2f} |",
            flush=True,
        )
    relu = attnc.as_target("relu(x)", {"x": (-1, 1)})
    for p in (8, 16, 24):
        program = graded(relu, num_anchors=p).program
        t = np.concatenate([np.linspace(-1, 1, 20_001), np.geomspace(1e-15, 1, 4000), -np.geomspace(1e-15, 1, 4000)])
        error = np.abs(program(t[:, None]) - np.maximum(t, 0)).max()
        print(f"graded relu, {p} anchors: {error:.2e} observed")


if __name__ == "__main__":
    main()
