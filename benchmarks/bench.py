"""Size, build time, error and speed of every method on the same functions, in one run: a table and a figure.

Run `make bench`, or `python benchmarks/bench.py --out DIR [--quick]`. Times are of this machine at this moment: compare
them with one another, not with those of another run. Errors are the largest seen on a sample that no method was fitted
on; nothing here is a proven bound.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers import cubic_grid, quintic_spline, trained_attention, trained_mlp

import attnc

FUNCTIONS: dict[str, dict[str, tuple[float, float]]] = {
    "sin(x)+cos(y)": {"x": (-3, 3), "y": (-3, 3)},
    "exp(sin(x)*y)": {"x": (-2, 2), "y": (-2, 2)},
    "abs(x-y)": {"x": (-1, 1), "y": (-1, 1)},
    "1/(1+25*x**2)": {"x": (-1, 1)},
    "sin(a)*exp(b)*cos(c)+tanh(d)*f/(2+g)+log(3+h)*sqrt(4+i)-atan(j)*k**2": {n: (-1, 1) for n in "abcdfghijk"},
}
ACCURACIES = [10.0**-k for k in range(2, 10)]
OURS = ("auto", "spectral_grid", "max_affine")
MAX_ANCHORS = 300_000
NUM_TESTS = 100_000


@dataclass(frozen=True)
class Row:
    function: str
    method: str
    eps: float | None  # what was asked for; None where nothing can be asked for
    parameters: int
    anchors: int | None
    build_seconds: float
    error: float
    points_per_second: float


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    arguments.add_argument("--quick", action="store_true", help="three accuracies, short training")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    accuracies = ACCURACIES[::3] if given.quick else ACCURACIES
    seconds = 2.0 if given.quick else 15.0
    rows = []
    for text, box in FUNCTIONS.items():
        for row in measure(text, box, accuracies, seconds):
            print(f"{row.function[:24]:<26}{row.method:<28}{row.eps or float('nan'):<9.0e}{row.error:.2e}", flush=True)
            rows.append(row)
    (given.out / "bench.md").write_text(markdown(rows), encoding="utf-8")
    figure(rows, given.out / "bench.svg")
    print(f"wrote {given.out / 'bench.md'} and {given.out / 'bench.svg'}")


def measure(text: str, box: dict[str, tuple[float, float]], accuracies: list[float], seconds: float) -> Iterator[Row]:
    target = attnc.as_target(text, box)
    lo, hi = target.box.lo, target.box.hi
    tests = lo + np.random.default_rng(3).random((NUM_TESTS, target.box.d)) * (hi - lo)
    wanted = target(tests)[:, 0]

    def judged(method: str, eps: float | None, build: Callable[[], tuple[Callable, int, int | None]]) -> Row:
        start = time.perf_counter()
        evaluate, parameters, anchors = build()
        built = time.perf_counter() - start
        evaluate(tests[:1000])
        start = time.perf_counter()
        found = evaluate(tests)
        speed = NUM_TESTS / (time.perf_counter() - start)
        return Row(text, method, eps, parameters, anchors, built, float(np.abs(found - wanted).max()), speed)

    def ours(construction: str, eps: float) -> Callable[[], tuple[Callable, int, int | None]]:
        def build() -> tuple[Callable, int, int | None]:
            network = attnc.compile(text, box, eps, construction=construction, max_anchors=MAX_ANCHORS)
            return network, network.num_parameters, network.num_anchors

        return build

    for construction in OURS:
        for eps in accuracies:
            try:
                yield judged(f"attnc {construction}", eps, ours(construction, eps))
            except attnc.AttncError:
                break  # out of reach of this construction, and so is every smaller eps
    for name, fit in (("scipy cubic grid", cubic_grid), ("scipy quintic spline", quintic_spline)):
        for eps in accuracies:
            peer = fit(target, eps)
            if peer is None:
                break
            yield judged(name, eps, peer)
    for name, train in (("trained MLP", trained_mlp), ("trained attention", trained_attention)):
        yield judged(name, None, lambda train=train: train(target, seconds))


def markdown(rows: list[Row]) -> str:
    """One table; speeds as ratios to that of the first row of their function."""
    lines = [
        "| function | method | asked | parameters | anchors | build s | L∞ error seen | speed, ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, float] = {}
    for row in rows:
        unit = first.setdefault(row.function, row.points_per_second)
        asked = "" if row.eps is None else f"{row.eps:.0e}"
        anchors = "" if row.anchors is None else f"{row.anchors:,}"
        lines.append(
            f"| `{row.function}` | {row.method} | {asked} | {row.parameters:,} | {anchors} | {row.build_seconds:.2f} "
            f"| {row.error:.1e} | {row.points_per_second / unit:.2g} |"
        )
    return "\n".join(lines) + "\n"


def figure(rows: list[Row], path: Path) -> None:
    """Error against parameters, log-log, a panel for each function."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(row.method for row in rows))
    markers = "osD^vPX*"
    fig, axes = plt.subplots(1, len(FUNCTIONS), figsize=(4 * len(FUNCTIONS), 4.2), sharey=True, layout="constrained")
    for ax, text in zip(axes, FUNCTIONS, strict=True):
        for number, method in enumerate(methods):
            chosen = [row for row in rows if row.function == text and row.method == method]
            if chosen:
                sizes, errors = [row.parameters for row in chosen], [max(row.error, 1e-16) for row in chosen]
                ax.loglog(sizes, errors, marker=markers[number % len(markers)], label=method, lw=1.2, ms=5)
        ax.set(title=text if len(text) < 30 else "ten variables", xlabel="parameters")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("largest error seen")
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    fig.savefig(path)
    plt.close(fig)


if __name__ == "__main__":
    main()
