"""Error against the number of anchors: analytic functions, kinks and singular points, against the papers' O(1/p).

One head each time. `max_affine` samples f and selects: its error falls like 1/p. `spectral_grid` solves its values at a
moderate temperature: for analytic f the slope in a log-log plot keeps steepening, down to rounding. `graded` puts a
group of keys on every smooth piece, and crowds them where f is singular. Errors are observed, not proven.

    python examples/rates.py [rates.png]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import attnc
from attnc.constructions import Built, max_affine, spectral_grid
from attnc.constructions.beyond.graded import graded
from attnc.engines.numpy_engine import NumpyEngine
from attnc.proofs.observed import observed_error
from attnc.targets.target import Target


class Case(NamedTuple):
    """A function of x, and how many anchors it is given."""

    text: str
    box: tuple[float, float]
    sizes: tuple[int, ...]


EVEN = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
ANALYTIC = (
    Case("sin(x)", (-3, 3), EVEN[:5]),
    Case("exp(sin(3*x))", (-1, 1), EVEN[:7]),
    Case("1/(1+25*x**2)", (-1, 1), EVEN),
)
BROKEN = (
    Case("relu(x)", (-1, 1), (2, 3, 4, 5, 6, 7, 8)),
    Case("abs(x-0.3)", (-1, 1), (2, 3, 4, 6, 8)),
    Case("sqrt(x)", (0, 1), (2, 4, 6, 9, 12, 16, 20, 25, 30, 36)),
)
"""Sizes end where rounding takes over."""
SAMPLED = (4, 8, 16, 32, 64, 128)


class Line(NamedTuple):
    """log error ≈ intercept − rate·t, by least squares."""

    rate: float
    r_squared: float


def target_of(case: Case) -> Target:
    return attnc.as_target(case.text, {"x": case.box})


def observed(target: Target, built: Built) -> float:
    """The largest error at a dense sample, followed uphill from its worst points."""
    engine = NumpyEngine(built.program)
    return observed_error(
        lambda points: engine(points).reshape(len(points), -1), target, max(1, built.program.num_anchors)
    )


def errors(case: Case, build: Callable[[Target, int], Built], sizes: Sequence[int] | None = None) -> np.ndarray:
    target = target_of(case)
    return np.array([observed(target, build(target, p)) for p in (case.sizes if sizes is None else sizes)])


def by_solving(target: Target, p: int) -> Built:
    return spectral_grid(target, num_anchors=p)


def by_pieces(target: Target, p: int) -> Built:
    return graded(target, num_anchors=p)


def by_sampling(target: Target, p: int) -> Built:
    return max_affine(target, points_per_axis=p)


def fitted(t: Sequence[float] | np.ndarray, found: np.ndarray) -> Line:
    t, logs = np.asarray(t, float), np.log(found)
    slope, intercept = np.polyfit(t, logs, 1)
    left = ((logs - slope * t - intercept) ** 2).sum()
    return Line(-float(slope), 1 - float(left / ((logs - logs.mean()) ** 2).sum()))


def best_law(sizes: Sequence[int], found: np.ndarray) -> tuple[str, Line]:
    """A power, a root-exponential or an exponential, whichever leaves the least."""
    laws = {
        "p^−{:.2f}": fitted(np.log(sizes), found),
        "e^(−{:.2f}√p)": fitted(np.sqrt(sizes), found),
        "e^(−{:.2f}p)": fitted(sizes, found),
    }
    return max(laws.items(), key=lambda law: law[1].r_squared)


def local_slopes(sizes: Sequence[int], found: np.ndarray) -> np.ndarray:
    """The slopes of the log-log plot from one size to the next: k for an error that falls like p^−k."""
    return -np.diff(np.log(found)) / np.diff(np.log(sizes))


@functools.cache
def sweeps() -> dict[str, dict[Case, np.ndarray]]:
    """Every curve of the figure."""
    return {
        "spectral_grid": {case: errors(case, by_solving) for case in ANALYTIC},
        "graded": {case: errors(case, by_pieces) for case in BROKEN},
        "max_affine": {case: errors(case, by_sampling, SAMPLED) for case in (*ANALYTIC, *BROKEN)},
    }


def rows() -> list[tuple[str, ...]]:
    """As in HEADER; the slope of the log-log plot at the beginning and at the end."""
    table = []
    for name, curves in sweeps().items():
        for case, found in curves.items():
            sizes = SAMPLED if name == "max_affine" else case.sizes
            slopes = local_slopes(sizes, found)
            law, line = best_law(sizes, found)
            ends = f"{found[0]:.1e} … {found[-1]:.1e}"
            shown = f"{slopes[0]:.1f} … {slopes[-1]:.1f}"
            anchors = f"{sizes[0]} … {sizes[-1]}"
            table.append((f"`{case.text}`", name, anchors, ends, shown, law.format(line.rate), f"{line.r_squared:.3f}"))
    return table


HEADER = ("f", "construction", "anchors p", "observed error", "log-log slope", "fitted law", "R²")


def draw(path: Path) -> None:
    """Analytic functions on log-log axes; kinks and singular points over √p, where e^{−C√p} is a straight line."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = picture.subplots(1, 2, sharey=True)
    colours, markers = ("#0072b2", "#d55e00", "#009e73"), "os^"  # Okabe and Ito's
    found = sweeps()
    for axes, name, cases, x in (
        (left, "spectral_grid", ANALYTIC, np.asarray),
        (right, "graded", BROKEN, np.sqrt),
    ):
        for case, colour, marker in zip(cases, colours, markers, strict=True):
            sampled = found["max_affine"][case]
            axes.semilogy(x(SAMPLED), sampled, ":", color=colour, lw=1.4)
            label = case.text.replace("**2", "²").replace("*", "")
            axes.semilogy(x(case.sizes), found[name][case], "-", marker=marker, color=colour, ms=4, lw=1.4, label=label)
        axes.grid(which="major", color="#d5dae0", lw=0.6)
        axes.legend(frameon=False, fontsize=9, loc="lower left" if axes is left else "lower right")
    left.set_xscale("log", base=2)
    left.set_xticks([4, 8, 16, 32, 64, 128], labels=["4", "8", "16", "32", "64", "128"])
    places = [2, 4, 9, 16, 25, 36]
    right.set_xticks(np.sqrt(places), labels=[str(p) for p in places])
    right.set_xlim(1.2, 6.5)
    left.set_ylim(1e-13, 3)
    left.set_xlabel("anchors p (logarithmic)")
    right.set_xlabel("anchors p (square roots)")
    left.set_ylabel("observed error")
    left.set_title("analytic: spectral_grid; dotted: max_affine", loc="left", fontsize=10)
    right.set_title("kinks and √x: graded; dotted: max_affine", loc="left", fontsize=10)
    picture.savefig(path, dpi=130, facecolor="white")


def main() -> None:
    widths = (16, 15, 11, 21, 15, 15, 6)
    for row in (HEADER, *rows()):
        print("  ".join(cell.strip("`").ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for name in sys.argv[1:]:
        draw(Path(name))


if __name__ == "__main__":
    main()
