"""The speed of a grid of anchors beside the dense softmax and SciPy's cubic spline with the same number of nodes.

    python benchmarks/grid_speed.py [--points 1000000] [--anchors 129]

All in one run, taking turns; a time is the best of `--repeats`. The dense ways are timed on fewer points and scaled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from attnc.constructions.beyond.spectral_grid import spectral_grid
from attnc.engines.grid import GridHead
from attnc.engines.numpy_engine import NumpyEngine, has_numba, streamed
from attnc.ir.normal_form import AttentionStage, FoldedHead, normal_form
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression

FUNCTIONS = ("exp(sin(x)*y)", "sin(3*x*y + x)/(1 + x**2 + y**2)")
BOX = Box.parse({"x": (-2.0, 2.0), "y": (-2.0, 2.0)})
DENSE_POINTS = 4000


def plain_softmax(head: FoldedHead, points: np.ndarray) -> np.ndarray:
    """softmax(a·x + c) @ v, as one would write it."""
    soft, outs = head.over_queries(), []
    points = head.queries(points)[:, 0]
    for block in np.array_split(points, max(1, len(points) // 250)):
        scores = block @ soft.slopes.T + soft.offsets
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        outs.append(weights @ soft.values / weights.sum(axis=1, keepdims=True))
    return np.concatenate(outs)


def seconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(runs, np.inf)
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(source: str, num_anchors: int, num_points: int, repeats: int, is_compiled: bool) -> list[str]:
    target = ExpressionTarget(Expression.parse(source), BOX)
    points = np.random.default_rng(0).uniform(BOX.lo, BOX.hi, (num_points, 2))
    few = points[:DENSE_POINTS]
    exact = target(points)[:, 0]

    program = spectral_grid(target, num_anchors=num_anchors).program
    engine = NumpyEngine(program)
    (stage,) = normal_form(program).stages
    assert isinstance(stage, AttentionStage)
    (head,) = stage.heads
    assert isinstance(engine._stages[0].heads[0], GridHead)
    dense = NumpyEngine(program)  # as it would run a head that is no grid
    dense._stages[0].heads = [streamed(head)]
    dense.work_per_point = dense._stages[0].heads[0].work_per_point

    nodes = [np.linspace(lo, hi, num_anchors) for lo, hi in zip(BOX.lo, BOX.hi, strict=True)]
    mesh = np.stack([axis.ravel() for axis in np.meshgrid(*nodes, indexing="ij")], axis=1)
    spline = RegularGridInterpolator(
        nodes, target(mesh).reshape(num_anchors, num_anchors), method="cubic", solver_args={"rtol": 1e-12}
    )

    found = engine(points, is_compiled=is_compiled)  # compiles
    many = {"grid": lambda: engine(points, is_compiled=is_compiled), "scipy": lambda: spline(points)}
    scaled = {"plain": lambda: plain_softmax(head, few), "stream": lambda: dense(few)}
    took = seconds(many, repeats)
    took |= {name: t * num_points / len(few) for name, t in seconds(scaled, 2).items()}

    def error(values: np.ndarray, over: np.ndarray = exact) -> str:
        return f"{np.abs(values.ravel() - over).max():.1e}"

    rows = [
        ("grid engine", took["grid"], error(found)),
        ("SciPy cubic", took["scipy"], error(spline(points))),
        ("streamed over keys", took["stream"], error(dense(few), exact[: len(few)])),
        ("dense softmax in numpy", took["plain"], error(plain_softmax(head, few), exact[: len(few)])),
    ]
    lines = [f"| `{source}` | {name} | {t:.3f} | {t / took['grid']:.1f} | {off} |" for name, t, off in rows]
    return [*lines, f"| | (stated truncation) | | | {engine.truncation:.1e} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10**6)
    parser.add_argument("--anchors", type=int, default=129)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-numba", action="store_true")
    given = parser.parse_args()
    is_compiled = has_numba() and not given.without_numba
    print(f"{given.anchors}² anchors, {given.points:,} points, {'with' if is_compiled else 'without'} numba\n")
    print("| function | evaluated by | seconds | × the grid's time | largest error |\n|---|---|---|---|---|")
    for source in FUNCTIONS:
        print("\n".join(measure(source, given.anchors, given.points, given.repeats, is_compiled)), flush=True)


if __name__ == "__main__":
    main()
