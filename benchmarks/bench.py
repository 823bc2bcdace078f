"""Error, size, build time and evaluation time of attnc and its peers on the same functions, in one run.

`make bench`, or `python benchmarks/bench.py [--quick] [--minutes M] [--only PEER] [--from bench.json]`.

Every peer is a script of `benchmarks/peers` and runs in a virtual environment of its own, which is made here under
`benchmarks/.venvs`. A peer that cannot be installed, or fails, is named in the table. Times are relative to numpy's own
expression, which takes turns with the method in the same process. Errors are observed at test points that no method was
fitted at; the bounds of attnc are proven.

The rows go to `bench.json` and `bench.md` in the output folder. A full run also replaces the tables of README.md and
docs/benchmarks.md, and the figure. `--from` does that again from stored rows, without measuring.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from bench_functions import COMPARED, TEN, Function
from peers.protocol import Job, Row
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from timing import busy_warning, load_per_core, processor, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = HERE / ".venvs"
ACCURACIES = tuple(10.0**-k for k in range(2, 10))
SHOWN = 1e-6
"""The accuracy that the table of the README shows."""
NUM_TESTS = 50_000
DRAWN = 1e-11
"""Errors below this are drawn here: some methods are exact for some functions."""
NUM_TRAINED = 3
"""Trainings per function: an MLP, an attention layer, and pykan with two shapes that share one time."""
MINUTES = 8.0
"""Time of all trainings together. With the installations, `make bench` then takes less than 20 minutes."""
SEARCH_SECONDS = 15.0
INSTALL_SECONDS = 600.0


@dataclass(frozen=True)
class Peer:
    """A script, and the packages of its environment. Without packages it runs in the environment of attnc."""

    script: str
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.script.split("_")[0]


PEERS = (
    Peer("attnc_networks"),
    Peer("interpolation", ("numpy", "scipy")),
    Peer("torch_networks", ("numpy", "torch")),
    Peer("torchwright_graphs", ("torchwright==0.2.0", "numpy", "torch")),
    Peer(  # pykan names no dependencies
        "pykan_networks",
        (
            "pykan==0.2.8",
            "matplotlib",
            "numpy",
            "pandas",
            "pyyaml",
            "scikit-learn",
            "setuptools",
            "sympy",
            "torch",
            "tqdm",
        ),
    ),
)
"""In the order in which they run: attnc leaves the heads that torch evaluates as dense attention."""

IN_README = {
    "attnc": "**attnc**",
    "attnc, one soft head": "attnc, one soft head",
    "torch, dense attention (SDPA)": "the same head, dense in torch (SDPA)",
    "torchwright": "torchwright 0.2.0 (with feed-forward layers)",
    "pykan": "pykan 0.2.8",
    "torch, trained attention layer": "trained attention layer",
    "torch, trained MLP": "trained MLP",
    "SciPy, cubic": "SciPy, cubic",
    "SciPy, quintic": "SciPy, quintic",
    "SciPy, radial basis functions": "SciPy, radial basis functions",
    "numpy, Chebyshev series": "numpy, Chebyshev series",
    "numpy, the expression": "numpy, the expression itself",
}
"""The rows of the README's table: prefixes of the names of methods, and their names there."""
IN_COMPARISON = {
    "attnc": "attnc",
    "attnc, one soft head": "attnc, one soft head",
    "torchwright": "torchwright (with feed-forward layers)",
    "pykan": "pykan, shape of the function given",
    "SciPy, cubic": "SciPy, cubic",
    "SciPy, quintic": "SciPy, quintic",
    "numpy, Chebyshev series": "numpy, Chebyshev series (the method of Chebfun)",
}
"""The rows of the table of docs/comparison.md, for the first function."""


# --- running the peers ------------------------------------------------------------------------------------------------


def python_of(peer: Peer) -> Path:
    """Return the interpreter of the peer. Make its environment if there is none with these packages."""
    if not peer.packages:
        return Path(sys.executable)
    folder = ENVIRONMENTS / peer.name
    python, stamp, wanted = folder / "bin" / "python", folder / "packages.txt", "\n".join(peer.packages)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        if folder.exists():
            shutil.rmtree(folder)
        install = ("-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", ROOT / "constraints.txt")
        for command in ([sys.executable, "-m", "venv", folder], [python, *install, *peer.packages]):
            subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=INSTALL_SECONDS)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def last_words(error: subprocess.SubprocessError | OSError) -> str:
    """Return the reason of a failure in one line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:.0f} s"
    lines = [line for line in str(getattr(error, "stderr", None) or error).splitlines() if line.strip()]
    told = next(
        (line for line in reversed(lines) if re.match(r"ERROR|\w*Error", line)), lines[-1] if lines else "failed"
    )
    return told.strip()[:200]


def run_peer(python: Path, peer: Peer, job: Job, limit: float) -> tuple[list[Row], str | None]:
    """Return the rows that the peer printed, and why it ended early, if it did."""
    path = Path(job.folder, f"{peer.name}.json")
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    command = [python, HERE / "peers" / f"{peer.script}.py", path]
    printed, reason = "", None
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True, timeout=limit, env=environment
        )
        printed = done.stdout
    except (subprocess.SubprocessError, OSError) as error:
        output = getattr(error, "stdout", None) or ""
        printed, reason = output.decode() if isinstance(output, bytes) else output, last_words(error)
    whole = [line for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    return [Row(**json.loads(line)) for line in whole], reason


def measure(
    functions: Sequence[Function],
    peers: Sequence[Peer],
    accuracies: tuple[float, ...],
    minutes: float,
    num_tests: int,
    tell: Callable[[str], None],
) -> tuple[list[Row], list[str]]:
    """Return the rows of all peers, and one sentence for each that is absent or failed."""
    seconds = 60 * minutes / (NUM_TRAINED * len(functions))
    search = min(SEARCH_SECONDS, seconds)
    rows, notes = list[Row](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for number, function in enumerate(functions):
            Path(scratch, str(number)).mkdir()
            np.save(Path(scratch, str(number), "points.npy"), function.sample(num_tests, seed=3))
        for peer in peers:
            try:
                tell(f"{peer.name}: environment")
                python = python_of(peer)
            except (subprocess.SubprocessError, OSError) as error:
                notes.append(f"{peer.name} cannot be installed: {last_words(error)}.")
                python = None
            for number, function in enumerate(functions):
                tell(f"{peer.name}: {function.text[:40]}")
                if python is None:
                    continue
                folder = Path(scratch, str(number))
                job = Job(function.text, str(folder / "points.npy"), accuracies, seconds, search, str(folder))
                found, reason = run_peer(python, peer, job, limit=240 + 4 * seconds)
                rows += found
                if reason is not None:
                    notes.append(f"{peer.name} failed for `{function.text}`: {reason}.")
    return rows, notes


# --- tables -----------------------------------------------------------------------------------------------------------


def chosen(rows: Sequence[Row], function: Function, method: str, eps: float = SHOWN) -> Row | None:
    """Return the smallest row of the method that has an error of at most eps, or the one with the least error."""
    own = [row for row in rows if row.function == function.text and row.method.split(", d–")[0].startswith(method)]
    if method == "attnc":
        own = [row for row in own if row.method == method]
    met = [row for row in own if row.error <= eps]
    return min(met, key=lambda row: row.size) if met else min(own, key=lambda row: row.error, default=None)


def short(x: float) -> str:
    """Two digits, without a plus sign or leading zeros of the exponent."""
    if x == 0:
        return "0"
    text = f"{x:.1e}" if x < 1e-3 else f"{x:.2g}" if x < 100 else f"{x:,.0f}"
    return re.sub(r"e-0?", "e-", text)


def short_power(eps: float) -> str:
    return f"1e{round(math.log10(eps))}"


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    if not values:
        return "–"
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} – {high}"


def title(function: Function) -> str:
    return "ten variables" if function is TEN else f"`{function.text}`"


def readme_table(rows: Sequence[Row], notes: Sequence[str], facts: str) -> str:
    """One row per method, and one column per function with the error and the evaluation time."""
    lines = [
        "| method | " + " | ".join(title(function) for function in COMPARED) + " | numbers stored | build, s |",
        "|---" * (len(COMPARED) + 3) + "|",
    ]
    for method, name in IN_README.items():
        found = [chosen(rows, function, method) for function in COMPARED]
        known = [row for row in found if row is not None]
        if not known:
            continue
        cells = [cell(row) for row in found]
        sizes = span([row.size for row in known], lambda size: f"{size:,.0f}")
        builds = span([row.build_seconds for row in known], lambda seconds: f"{seconds:.2g}")
        is_unit = method == "numpy, the expression"
        lines.append(f"| {name} | {' | '.join(cells)} | {'–' if is_unit else sizes} | {'–' if is_unit else builds} |")
    lines += ["", *(f"{note}\n" for note in notes), facts]
    return "\n".join(lines)


def comparison_table(rows: Sequence[Row]) -> str:
    """One row per method, for the first function: its smallest size within eps, or its best error."""
    lines = [
        "| method | error, observed | bound, proven | numbers stored | build, s | time / numpy's expression |",
        "| :-- | --: | --: | --: | --: | --: |",
    ]
    for method, name in IN_COMPARISON.items():
        row = chosen(rows, COMPARED[0], method)
        if row is not None:
            bound = "–" if row.bound is None else rounded_up(row.bound)
            figures = f"{short(row.error)} | {bound} | {row.size:,} | {row.build_seconds:.2g} | {short(row.time)}"
            lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row.error == 0 and row.size == 0:
        return "1 ×"
    text = f"{short(row.error)}, {short(row.time)} ×"
    return text if row.error <= SHOWN else f"*{text}*"


def full_table(rows: Sequence[Row], notes: Sequence[str], facts: str) -> str:
    """All rows, a table per function."""
    lines = [facts, "", *(f"{note}\n" for note in notes)]
    for function in COMPARED:
        box = ", ".join(f"{name} ∈ [{lo:g}, {hi:g}]" for name, (lo, hi) in function.box.items())
        box = "all variables in [−1, 1]" if function is TEN else box.replace("-", "−")
        lines += [
            f"### `{function.text}`",
            "",
            f"{box[0].upper() + box[1:] if function is TEN else box}.",
            "",
            "| method | eps | error, observed | bound, proven | numbers stored | keys | build, s | ns per point "
            "| × numpy | threads |",
            "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for row in rows:
            if row.function == function.text:
                lines.append(
                    f"| {row.method} | {'–' if row.eps is None else short_power(row.eps)} | {short(row.error)} "
                    f"| {'–' if row.bound is None else rounded_up(row.bound)} | {row.size:,} "
                    f"| {'–' if row.keys is None else f'{row.keys:,}'} | {row.build_seconds:.2g} "
                    f"| {short(1e9 * row.seconds_per_point)} | {short(row.time)} | {row.threads} |"
                )
        lines.append("")
    return "\n".join(lines).strip()


def rounded_up(bound: float) -> str:
    """Two digits, rounded up: a printed bound is still a bound."""
    from attnc.wording import ceiling

    return re.sub(r"e-0?", "e-", ceiling(bound))


def replaced(text: str, name: str, new: str) -> str:
    """Return the text with `new` between the two comments that mark the place of this name."""
    begin, end = f"<!-- bench: {name} -->", "<!-- end of bench -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no place {begin} … {end}")
    return f"{before}{begin}\n{new}\n{end}{after}"


def figure(rows: Sequence[Row], path: Path) -> None:
    """Error against evaluation time, log-log, a panel per function."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "attnc"}
    methods = [method for method in dict.fromkeys(row.method for row in rows) if method != "numpy, the expression"]
    markers, colours = "oosDv^PX*<>hp", plt.get_cmap("tab20").colors
    fig, axes = plt.subplots(1, len(COMPARED), figsize=(3.4 * len(COMPARED), 4.6), sharey=True, layout="constrained")
    for ax, function in zip(axes, COMPARED, strict=True):
        ax.axvline(1, color="0.6", lw=1, ls="--")
        for number, method in enumerate(methods):
            own = [row for row in rows if row.function == function.text and row.method == method]
            if own:
                style = {
                    "marker": markers[number % len(markers)],
                    "color": colours[number % len(colours)],
                    "label": method,
                }
                width = 2.5 if method == "attnc" else 1
                times, errors = [row.time for row in own], [max(row.error, DRAWN) for row in own]
                ax.loglog(times, errors, lw=width, ms=5, **style)
        ax.set(
            title="ten variables" if function is TEN else function.text, xlabel="evaluation time, × numpy's expression"
        )
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("largest error observed")
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


# --- the command ------------------------------------------------------------------------------------------------------


def facts_of(load: float, minutes: float) -> str:
    """Return the sentences about the machine that belong beside the tables."""
    told = (
        f"Measured on {processor()} with {versions(['attnc', 'numpy', 'scipy', 'numba'])}; torch "
        f"{torch_pin()}; the trainings of all trained methods together had {minutes:g} min."
    )
    warning = busy_warning(load)
    return told if warning is None else f"{told} {warning}"


def torch_pin() -> str:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return next(line.removeprefix("torch==") for line in pins.splitlines() if line.startswith("torch=="))


def write(out: Path, rows: list[Row], notes: list[str], facts: str, *, in_docs: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stored = {"facts": facts, "notes": notes, "rows": [asdict(row) for row in rows]}
    (out / "bench.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")
    small, full = readme_table(rows, notes, facts), full_table(rows, notes, facts)
    (out / "bench.md").write_text(f"{small}\n\n{full}\n", encoding="utf-8")
    figure(rows, out / "bench.svg")
    if in_docs:
        tables = [("README.md", "summary", small), ("docs/benchmarks.md", "all", full)]
        for page, name, table in [*tables, ("docs/comparison.md", "comparison", comparison_table(rows))]:
            path = ROOT / page
            path.write_text(replaced(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")
        shutil.copyfile(out / "bench.svg", ROOT / "docs" / "figures" / "benchmarks.svg")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument(
        "--quick", action="store_true", help="three accuracies, a minute of training; leaves the docs alone"
    )
    parser.add_argument("--minutes", type=float, help=f"time of all trainings together (default: {MINUTES:g})")
    parser.add_argument(
        "--only", action="append", choices=[peer.name for peer in PEERS], help="only this peer; repeatable"
    )
    parser.add_argument("--tests", type=int, default=NUM_TESTS, help="number of test points")
    parser.add_argument("--from", dest="stored", type=Path, help="take the rows of a bench.json instead of measuring")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    if given.stored:
        stored = json.loads(given.stored.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in stored["rows"]]
        write(given.out, rows, stored["notes"], stored["facts"], in_docs=True)
        return 0
    load, start = load_per_core(), time.monotonic()
    if warning := busy_warning(load):
        console.print(warning, style="bold")
    peers = [peer for peer in PEERS if not given.only or peer.name in given.only]
    minutes = given.minutes if given.minutes is not None else 1.0 if given.quick else MINUTES
    accuracies = ACCURACIES[::3] if given.quick else ACCURACIES
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(peers) * (len(COMPARED) + 1), completed=-1)

        def tell(words: str) -> None:
            progress.update(task, advance=1, description=words)
            if not console.is_terminal:
                console.print(f"{time.monotonic() - start:5.0f} s  {words}", highlight=False)

        rows, notes = measure(COMPARED, peers, accuracies, minutes, given.tests, tell)
        progress.update(task, advance=1, description="")
    is_whole = not given.quick and not given.only
    write(given.out, rows, notes, facts_of(load, minutes), in_docs=is_whole)
    print(readme_table(rows, notes, facts_of(load, minutes)))
    print(
        f"wrote {given.out / 'bench.md'}"
        + (", the README, docs/benchmarks.md and docs/comparison.md" if is_whole else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
