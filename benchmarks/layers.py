"""The speed of layers beside interpolation kernels: np.interp and torch.nn.functional.grid_sample, in one run.

    python benchmarks/layers.py             # the table of docs/layers.md
    python benchmarks/layers.py --json

Every row is one task. Its contenders take turns in one process. A ratio is the time of the layer divided by that of the
peer. Errors are the largest seen at the queries: of interpolation kernels, on a grid of the same points.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from timing import alternated, busy_warning, load_per_core, processor, versions

import attnc.nn

QUERIES = 100_000
"""Number of queries of every task."""
NODES, NODES_PER_AXIS = 1000, 32
"""Numbers of points of a table of one variable, and per axis of one of two."""
TURNS, SECONDS = 200, 1.5
"""Most turns of the contenders of a task, and its time limit."""

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    task: str
    peer: str
    layer_ms: float
    peer_ms: float
    keys: int
    bound: float
    error: float | None  # None: the task has no function to compare with
    peer_error: float | None

    @property
    def ratio(self) -> float:
        return self.layer_ms / self.peer_ms


def curve(x: np.ndarray) -> np.ndarray:
    """A calibration curve: smooth, with a knee."""
    return np.tanh(4 * x - 2) + 0.3 * x + 0.05 * np.sin(20 * x)


def measured(
    task: str, peer: str, layer: attnc.nn.Function | attnc.nn.Table, runs: tuple[Run, Run], *errors: float
) -> Row:
    times = alternated({"layer": runs[0], "peer": runs[1]}, TURNS, SECONDS)
    keys, bound = layer.network.num_anchors, layer.certificate.bound
    assert bound is not None
    error, peer_error = errors or (None, None)
    return Row(task, peer, 1e3 * times["layer"], 1e3 * times["peer"], keys, bound, error, peer_error)


def with_gradient(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Run:
    """Return a run forwards and backwards."""
    x = x.clone().requires_grad_()

    def both() -> object:
        (found,) = torch.autograd.grad(run(x).sum(), x)
        return found

    return both


def one_variable(queries: int) -> list[Row]:
    """Tables of one variable beside np.interp and grid_sample."""
    rng = np.random.default_rng(0)
    points, x = np.linspace(0, 1, NODES), rng.random(queries)
    smooth, rough = curve(points), curve(points) + 1e-3 * rng.normal(size=NODES)
    found = []
    for name, values, exact in (("smooth", smooth, curve(x)), ("noisy", rough, None)):
        layer, given = attnc.nn.Table(points, values, 1e-6), torch.tensor(x)
        image = torch.tensor(values)[None, None, None]
        grid = torch.stack([2 * given - 1, torch.zeros_like(given)], dim=-1)[None, None]

        def sampled(grid: torch.Tensor = grid, image: torch.Tensor = image) -> torch.Tensor:
            return torch.nn.functional.grid_sample(image, grid, align_corners=True)

        def interpolated(values: np.ndarray = values) -> np.ndarray:
            return np.interp(x, points, values)

        def run(layer: attnc.nn.Table = layer, given: torch.Tensor = given) -> torch.Tensor:
            with torch.no_grad():
                return layer(given)

        errors = (
            () if exact is None else tuple(np.abs(np.asarray(y).ravel() - exact).max() for y in (run(), interpolated()))
        )
        task = f"table of {NODES:,} points, {name}"
        found.append(measured(task, "np.interp", layer, (run, interpolated), *errors))
        found.append(measured(task, "grid_sample", layer, (run, sampled), *errors))

        def backwards(x: torch.Tensor, image: torch.Tensor = image) -> torch.Tensor:
            grid = torch.stack([2 * x - 1, torch.zeros_like(x)], dim=-1)[None, None]
            return torch.nn.functional.grid_sample(image, grid, align_corners=True)

        runs = with_gradient(layer, given), with_gradient(backwards, given)
        found.append(measured(f"{task}, with gradient", "grid_sample", layer, runs))
    return found


def two_variables(queries: int) -> list[Row]:
    """A function and a table of two variables beside grid_sample, in float32, as models use them."""
    axis = torch.linspace(-1, 1, NODES_PER_AXIS, dtype=torch.float64)
    x, y = torch.meshgrid(axis, axis, indexing="ij")
    values = torch.exp(-x) * torch.sin(3 * y)
    points = torch.stack([x.ravel(), y.ravel()], dim=1)
    where = torch.rand(queries, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    exact = torch.exp(-where[:, 0].double()) * torch.sin(3 * where[:, 1].double())
    layers = {
        "exp(-x)*sin(3*y)": attnc.nn.Function("exp(-x)*sin(3*y)", {"x": (-1, 1), "y": (-1, 1)}, 3e-5, dtype="float32"),
        f"table of {NODES_PER_AXIS} × {NODES_PER_AXIS} points": attnc.nn.Table(
            points, values.ravel(), 1e-4, dtype="float32"
        ),
    }
    image = values.float()[None, None]

    def kernel(at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grid_sample(image, at.flip(-1)[None, None], align_corners=True)

    found = []
    for name, layer in layers.items():

        def run(layer: torch.nn.Module = layer) -> torch.Tensor:
            with torch.no_grad():
                return layer(where)

        errors = tuple(float((each.double().ravel() - exact).abs().max()) for each in (run(), kernel(where)))
        found.append(measured(name, "grid_sample", layer, (run, lambda: kernel(where)), *errors))
        runs = with_gradient(layer, where), with_gradient(kernel, where)
        found.append(measured(f"{name}, with gradient", "grid_sample", layer, runs, *errors))
    return found


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""

    def shown(error: float | None) -> str:
        return "" if error is None else f"{error:.1e}"

    lines = [
        "| layer | keys | proven | seen | peer | seen, peer | time, layer/peer |",
        "| :-- | --: | --: | --: | :-- | --: | --: |",
    ]
    lines += [
        f"| {row.task} | {row.keys} | {row.bound:.1e} | {shown(row.error)} | {row.peer} | {shown(row.peer_error)} "
        f"| {row.ratio:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=QUERIES, help="number of queries of every task")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    load = load_per_core()
    rows = one_variable(given.queries) + two_variables(given.queries)
    if given.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))
        return
    print(table(rows))
    print(f"\n{given.queries:,} queries; {processor()}; {versions(('attnc', 'numpy', 'torch', 'numba'))}")
    if warning := busy_warning(load):
        print(warning)


if __name__ == "__main__":
    main()
