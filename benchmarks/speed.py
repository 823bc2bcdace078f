"""How fast networks are evaluated, compiled and verified, and their memory, as ratios within one run.

`make bench-speed`, or `python benchmarks/speed.py [--quick] [-k TEXT]`: one table and one figure, in four minutes. A
full run also replaces those of docs/benchmarks.md.

Contenders take turns, and a time is the least of several. The unit is numpy's own expression on the columns of the same
array of points (`bench_functions`). Goals are shown beside the figures, and never checked: times depend on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench import ROOT, replaced
from bench_functions import TIMED, WAVE, Function
from rich.console import Console
from timing import alternated, busy_warning, load_per_core, processor, versions

import attnc
import attnc_checker
from attnc.constructions import spectral_grid
from attnc.engines.grid import GridHead
from attnc.engines.numpy_engine import NumpyEngine, has_numba

HERE = Path(__file__).resolve().parent
NUM_POINTS, NUM_TORCH = 10**6, 10**5
SPLINE_NODES = 65
TURNS = 5
SECONDS_PER_FUNCTION = 2.0
"""Time for the turns of one function. Then no new turn starts: 19 functions take about a minute."""
TURN_SECONDS = 0.1
"""A contender that takes less is repeated for so long in its turn: fast ones vary most."""
GOAL_SPLINE, GOAL_TORCH, GOAL_JAX, GOAL_POINT = 0.25, 6.0, 3.0, 15e-6
GOAL_GRID = {True: 4.0, False: 1.5}
"""SciPy's time over that of the grid engine: with numba, and without."""
GOAL_BYTES = 2**30

GRIDS = ("exp(sin(x)*y)", "sin(3*x*y+x)/(1+x**2+y**2)")
GRID_NODES = 129
MEMORY_NODES = 100
"""Keys per axis of the network whose memory is measured: 10⁴ keys."""
MEMORY_SECONDS = 15.0
"""A child that evaluates 10⁶ points × 10⁴ keys is ended after this time. Its blocks have one size, so that its peak is
reached early."""
PROVED = (
    ("sin(x)", {"x": (-3, 3)}, 1e-6, "auto"),
    ("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, "auto"),
    ("exp(sin(x)*y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, "auto"),
    ("log(1+x**2+y**2)*tanh(x-y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, "auto"),
    ("sqrt(x)*y", {"x": (0, 1), "y": (-1, 1)}, 1e-3, "auto"),
    ("exp(-x**2-y**2)*sin(3*x+y)", {"x": (-2, 2), "y": (-2, 2)}, 1e-6, "spectral_grid"),
    ("exp(-x*y*z)+z**3", {"x": (0, 1), "y": (-1, 1), "z": (-1, 1)}, 1e-3, "spectral_grid"),  # about 9³ keys
)
"""The cases that are compiled and verified: function, box, eps, construction."""
CHECK_SECONDS = 20.0


# --- evaluation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Times of one function, in seconds. None: not installed, or not defined for it."""

    function: Function
    keys: int
    unit: float  # numpy's expression on columns of the points
    contiguous: float  # numpy's expression on contiguous columns
    fast: float | None  # net(points)
    plain: float  # the same without numba
    spline: float | None
    torch: float | None  # NUM_TORCH points, as the next two
    jax: float | None
    jitted: float | None  # the JAX function within a `jax.jit` of the caller
    torch_unit: float
    point: float  # one point


def timed(function: Function, num_points: int, num_torch: int, turns: int) -> Speed:
    """Measure one function. All contenders get the same points."""
    net = attnc.compile(function.text, function.box, function.eps, dtype=function.dtype)
    points = function.sample(num_points, seed=0)
    few, one, columns = points[:num_torch], points[:1], np.ascontiguousarray(points.T)
    runs: dict[str, Callable[[], object]] = {
        "unit": lambda: function(points),
        "contiguous": lambda: function.numpy(*columns),
        "plain": lambda: net.at(points),
    }
    if has_numba():
        runs["fast"] = lambda: net(points)
    if len(function.box) == 2:
        spline = surface(function)
        x, y = columns.astype(np.float64)
        runs["spline"] = lambda: spline.ev(x, y)
    took = alternated(runs, turns, SECONDS_PER_FUNCTION, TURN_SECONDS)
    runs = {"torch_unit": lambda: function(few)}
    if importlib.util.find_spec("torch"):
        runs["torch"] = torch_run(net, few)
    if importlib.util.find_spec("jax") and hasattr(net, "to_jax"):
        runs |= jax_runs(net, few)
    took |= alternated(runs, turns, SECONDS_PER_FUNCTION / 2, TURN_SECONDS)

    def thousand() -> None:
        for _ in range(1000):
            net(one)

    took |= {"point": alternated({"point": thousand}, 3, 0.2)["point"] / 1000}
    names = ("unit", "contiguous", "fast", "plain", "spline", "torch", "jax", "jitted", "torch_unit", "point")
    return Speed(function, net.num_anchors, **{name: took.get(name) for name in names})


def surface(function: Function):
    from scipy.interpolate import RectBivariateSpline

    axes = [np.linspace(lo, hi, SPLINE_NODES) for lo, hi in function.box.values()]
    return RectBivariateSpline(*axes, function.numpy(*np.meshgrid(*axes, indexing="ij")), kx=5, ky=5)


def torch_run(net: attnc.Network, points: np.ndarray) -> Callable[[], object]:
    import torch

    module, tensor = net.to_torch(), torch.as_tensor(points)

    def run() -> object:
        with torch.no_grad():
            return module(tensor)

    return run


def jax_runs(net: attnc.Network, points: np.ndarray) -> dict[str, Callable[[], object]]:
    import jax

    jax.config.update("jax_enable_x64", True)
    function, array = net.to_jax(), jax.numpy.asarray(points)
    jitted = jax.jit(function)
    return {
        "jax": lambda: function(array).block_until_ready(),
        "jitted": lambda: jitted(array).block_until_ready(),
    }


# --- the grid engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridSpeed:
    """The grid engine beside SciPy's cubic spline with the same number of nodes."""

    text: str
    nodes: int
    seconds: dict[bool, float]  # with numba, and without
    scipy: float
    error: float
    scipy_error: float


def timed_grid(text: str, nodes: int, num_points: int, turns: int) -> GridSpeed:
    from scipy.interpolate import RegularGridInterpolator

    target = attnc.as_target(text, {"x": (-2, 2), "y": (-2, 2)})
    points = target.box.lo + np.random.default_rng(0).random((num_points, 2)) * target.box.widths
    engine = NumpyEngine(spectral_grid(target, num_anchors=nodes).program)
    assert isinstance(engine._stages[0].heads[0], GridHead)
    axes = [np.linspace(lo, hi, nodes) for lo, hi in zip(target.box.lo, target.box.hi, strict=True)]
    mesh = np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], axis=1)
    spline = RegularGridInterpolator(
        axes, target(mesh).reshape(nodes, nodes), method="cubic", solver_args={"rtol": 1e-12}
    )
    runs: dict[str, Callable[[], object]] = {
        "scipy": lambda: spline(points),
        "plain": lambda: engine(points, is_compiled=False),
    }
    if has_numba():
        runs["fast"] = lambda: engine(points, is_compiled=True)
    took, exact = alternated(runs, turns, 2 * SECONDS_PER_FUNCTION, TURN_SECONDS), target(points)[:, 0]
    seconds = {False: took["plain"]} | ({True: took["fast"]} if has_numba() else {})
    errors = [float(np.abs(found.ravel() - exact).max()) for found in (engine(points), spline(points))]
    return GridSpeed(text, nodes, seconds, took["scipy"], *errors)


# --- memory -----------------------------------------------------------------------------------------------------------

ENGINES = ("grid, numba", "grid, numpy", "streamed over keys", "instructions, numba", "torch", "jax")


def evaluate_by(engine: str, nodes: int, num_points: int) -> None:
    """Evaluate many points over nodes² keys by one engine: the work of a child process whose memory is measured."""
    points = WAVE.sample(num_points, seed=0)
    target = attnc.as_target(WAVE.text, WAVE.box)
    if engine == "instructions, numba":  # these programs have few keys
        attnc.compile(WAVE.text, WAVE.box, WAVE.eps)(points)
        return
    program = spectral_grid(target, num_anchors=nodes).program
    if engine.startswith("grid"):
        NumpyEngine(program)(points, is_compiled=engine == "grid, numba")
    elif engine == "streamed over keys":
        NumpyEngine(program, with_grids=False)(points)
    elif engine == "torch":
        import torch

        from attnc.engines.torch_engine import to_torch

        with torch.no_grad():
            to_torch(program)(torch.as_tensor(points))
    else:
        import jax

        from attnc.engines.jax_engine import to_jax

        jax.config.update("jax_enable_x64", True)
        jax.jit(to_jax(program))(jax.numpy.asarray(points)).block_until_ready()


def is_there(engine: str) -> bool:
    needed = {"numba": "numba", "torch": "torch", "jax": "jax"}.get(engine.split(", ")[-1])
    has_engine = engine != "jax" or importlib.util.find_spec("attnc.engines.jax_engine") is not None
    return has_engine and (needed is None or importlib.util.find_spec(needed) is not None)


def peak_memory(engine: str, nodes: int, num_points: int, limit: float) -> tuple[int, bool] | None:
    """Return the peak of resident bytes of a child process, and whether it finished. None: it failed, or no /proc."""
    command = [sys.executable, __file__, "--evaluate", engine, str(nodes), str(num_points)]
    child, end, peak = subprocess.Popen(command, stderr=subprocess.DEVNULL), time.monotonic() + limit, 0
    try:
        while time.monotonic() < end:
            peak = max(peak, resident_peak(child.pid))
            if child.poll() is not None:
                return (peak, True) if child.returncode == 0 and peak else None
            time.sleep(0.02)
        return (peak, False) if peak else None
    finally:
        child.kill()
        child.wait()


def resident_peak(pid: int) -> int:
    """Return the largest number of resident bytes that a process had so far. 0 if it has ended, or without /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


# --- compiling and verifying ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proved:
    """CPU seconds of a compilation, and of the checker in one process.

    `check` is None if it ran out of time, and `keys` is 0 if the compilation was refused.
    """

    text: str
    eps: float
    construction: str
    keys: int
    compile: float
    check: float | None


def proved(text: str, box: dict[str, tuple[float, float]], eps: float, construction: str) -> Proved:
    start = time.process_time()
    try:
        net = attnc.compile(text, box, eps, construction=construction)
    except attnc.AttncError:
        return Proved(text, eps, "refused", 0, time.process_time() - start, None)
    compiled = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        net.save(f"{folder}/net")
        start = time.process_time()
        verdict = attnc_checker.check(f"{folder}/net", processes=1, seconds=CHECK_SECONDS)
        checked = time.process_time() - start
    return Proved(text, eps, net.construction, net.num_anchors, compiled, checked if verdict.proved else None)


# --- the table and the figure -----------------------------------------------------------------------------------------


def ratio(part: float | None, whole: float | None, goal: float | None = None, *, is_least: bool = False) -> str:
    """A ratio with two digits, bold if it misses its goal. A goal is a largest ratio, or a least one."""
    if part is None or whole is None:
        return "–"
    found = part / whole
    is_missed = goal is not None and (found < goal if is_least else found > goal)
    return f"**{found:.2g}**" if is_missed else f"{found:.2g}"


def speed_table(speeds: Sequence[Speed], num_points: int) -> Iterator[str]:
    yield (
        "| function | eps | keys | net, × numpy | goal | net, × spline | without numba, × numpy | × spline "
        "| to_torch, × numpy | to_jax, × numpy | in the caller's jit "
        "| one point, µs | numpy, ns | numpy on contiguous columns |"
    )
    yield "|:--|" + "--:|" * 13
    for one in speeds:
        function = one.function
        point = f"{1e6 * one.point:.1f}"
        cells = (
            f"`{function.text}`" + ("" if function.dtype == "float64" else f" {function.dtype}"),
            f"{function.eps:.0e}",
            one.keys,
            ratio(one.fast, one.unit, function.goal),
            f"{function.goal:g}",
            ratio(one.fast, one.spline, GOAL_SPLINE),
            ratio(one.plain, one.unit),
            ratio(one.plain, one.spline),
            ratio(one.torch, one.torch_unit, GOAL_TORCH),
            ratio(one.jax, one.torch_unit, GOAL_JAX),
            ratio(one.jitted, one.torch_unit, GOAL_JAX),
            f"**{point}**" if one.point > GOAL_POINT else point,
            f"{1e9 * one.unit / num_points:.1f}",
            ratio(one.contiguous, one.unit),
        )
        yield "| " + " | ".join(map(str, cells)) + " |"


def grid_table(grids: Sequence[GridSpeed]) -> Iterator[str]:
    yield "| grid engine | nodes | SciPy's cubic ÷ engine | goal | without numba | goal | error | SciPy's error |"
    yield "|:--|" + "--:|" * 7
    for grid in grids:
        cells = [f"`{grid.text}`", f"{grid.nodes}²"]
        for has in (True, False):
            cells += [ratio(grid.scipy, grid.seconds.get(has), GOAL_GRID[has], is_least=True), f"≥ {GOAL_GRID[has]:g}"]
        yield "| " + " | ".join([*cells, f"{grid.error:.1e}", f"{grid.scipy_error:.1e}"]) + " |"


def memory_table(peaks: dict[str, tuple[int, bool] | None], num_points: int, nodes: int) -> Iterator[str]:
    yield f"| memory, {num_points:,} points × {nodes**2:,} keys | peak of the process, MiB | |"
    yield "|:--|--:|:--|"
    for engine in ENGINES:
        if engine not in peaks:
            yield f"| {engine} | – | not installed, or no such engine |"
        elif (found := peaks[engine]) is None:
            yield f"| {engine} | – | failed |"
        else:
            size = f"{found[0] / 2**20:.0f}"
            note = "" if found[1] else f"ended after {MEMORY_SECONDS:g} s"
            note = "such programs have few keys: `sin(x)+cos(y)` at 1e-6" if engine.startswith("instr") else note
            yield f"| {engine} | {f'**{size}**' if found[0] > GOAL_BYTES else size} | {note} |"


def proof_table(proofs: Sequence[Proved]) -> Iterator[str]:
    yield "| compile and verify | eps | construction | keys | compile, CPU s | verify, CPU s |"
    yield "|:--|--:|:--|--:|--:|--:|"
    for one in proofs:
        late = f"> {CHECK_SECONDS:g}" if one.keys else "–"
        check = late if one.check is None else f"{one.check:.2f}"
        yield f"| `{one.text}` | {one.eps:.0e} | {one.construction} | {one.keys} | {one.compile:.2f} | {check} |"


def figure(speeds: Sequence[Speed], path: Path) -> None:
    """Bars of times relative to numpy's expression, on a logarithmic axis, with the goals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "attnc"}
    kinds: list[tuple[str, str, Callable[[Speed], float | None], Callable[[Speed], float | None]]] = [
        ("net(points), numba", "#1b7837", lambda s: s.fast and s.fast / s.unit, lambda s: s.function.goal),
        ("net(points), numpy alone", "#a6dba0", lambda s: s.plain / s.unit, lambda s: None),
        ("to_torch()", "#e08214", lambda s: s.torch and s.torch / s.torch_unit, lambda s: GOAL_TORCH),
        ("to_jax()", "#8073ac", lambda s: s.jax and s.jax / s.torch_unit, lambda s: GOAL_JAX),
        ("RectBivariateSpline", "#bdbdbd", lambda s: s.spline and s.spline / s.unit, lambda s: None),
    ]
    kinds = [kind for kind in kinds if any(kind[2](speed) for speed in speeds)]
    height = 0.8 / len(kinds)
    fig, ax = plt.subplots(figsize=(9, 1.2 + 0.16 * len(kinds) * len(speeds)), layout="constrained")
    for number, (label, colour, value, goal) in enumerate(kinds):
        ax.fill([], [], color=colour, label=label)
        for row, speed in enumerate(speeds):
            y = row + (number - (len(kinds) - 1) / 2) * height
            if (x := value(speed)) is not None:
                ax.barh(y, x, height, color=colour)
                if (most := goal(speed)) is not None:
                    ax.plot([most, most], [y - height / 2, y + height / 2], color="black", lw=2, zorder=3)
    ax.plot([], [], color="black", lw=2, label="goal")
    ax.axvline(1, color="0.3", lw=1, ls="--")
    ax.set_yticks(range(len(speeds)), [speed.function.name for speed in speeds])
    ax.set_ylim(len(speeds) - 0.4, -0.6)
    ax.set(xscale="log", xlabel="evaluation time, × numpy's expression")
    ax.set_xlim(left=0.05)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.grid(axis="x", alpha=0.3)
    fig.legend(loc="outside lower center", ncols=3, frameon=False)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the points: only to see that it runs")
    parser.add_argument("-k", metavar="TEXT", default="", help="only the functions whose text contains this")
    parser.add_argument("--evaluate", nargs=3, metavar=("ENGINE", "NODES", "POINTS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.evaluate:
        evaluate_by(given.evaluate[0], *map(int, given.evaluate[1:]))
        return 0
    share = 100 if given.quick else 1
    functions = [function for function in TIMED if given.k in function.text]
    text = report(functions, share, given.out, Console(stderr=True))
    print(text)
    is_whole = not given.quick and not given.k
    if is_whole:
        page = ROOT / "docs" / "benchmarks.md"
        page.write_text(replaced(page.read_text(encoding="utf-8"), "speed", text), encoding="utf-8")
        shutil.copyfile(given.out / "speed.svg", ROOT / "docs" / "figures" / "speed.svg")
    print(
        f"wrote {given.out / 'speed.md'} and {given.out / 'speed.svg'}"
        + (" and docs/benchmarks.md" if is_whole else "")
    )
    return 0


def report(functions: Sequence[Function], share: int, out: Path, console: Console) -> str:
    """Measure all, with 1/share of the points, write the table and the figure, and return the table."""
    load, start = load_per_core(), time.monotonic()
    warning = busy_warning(load)
    if warning:
        console.print(warning, style="bold")

    def tell(words: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  {words}", highlight=False, markup=False)

    speeds, grids, peaks, proofs = [], [], {}, []
    nodes, grid_nodes = (MEMORY_NODES, GRID_NODES) if share == 1 else (20, 33)
    for function in functions:
        tell(function.name)
        speeds.append(timed(function, NUM_POINTS // share, NUM_TORCH // share, TURNS))
    for text in GRIDS:
        tell(f"grid engine: {text}")
        grids.append(timed_grid(text, grid_nodes, NUM_POINTS // share, TURNS))
    for case in PROVED if share == 1 else PROVED[:1]:
        tell(f"compile and verify: {case[0]}")
        proofs.append(proved(*case))
    for engine in filter(is_there, ENGINES):
        tell(f"memory: {engine}")
        peaks[engine] = peak_memory(engine, nodes, NUM_POINTS // share, MEMORY_SECONDS)
    facts = (
        f"{NUM_POINTS // share:,} points, {NUM_TORCH // share:,} for to_torch and to_jax; networks, torch and jax have "
        f"{os.cpu_count()} threads, numpy and SciPy have one. {processor()}; "
        f"{versions(['attnc', 'numpy', 'scipy', 'numba', 'torch', 'jax'])}; load average per core {load:.2f} at the "
        "start. Times are wall-clock, the least of several turns. A bold figure misses its goal."
    )
    if warning:
        facts = f"{facts} {warning}"
    tables = (
        speed_table(speeds, NUM_POINTS // share),
        grid_table(grids),
        memory_table(peaks, NUM_POINTS // share, nodes),
        proof_table(proofs),
    )
    written = "\n\n".join([facts, *("\n".join(table) for table in tables)])
    out.mkdir(parents=True, exist_ok=True)
    (out / "speed.md").write_text(written + "\n", encoding="utf-8")
    figure(speeds, out / "speed.svg")
    return written


if __name__ == "__main__":
    sys.exit(main())
