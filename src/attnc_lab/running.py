"""Run the unfinished cells of experiments, in local processes or on a dask.distributed cluster."""

from __future__ import annotations

import platform
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

import attnc
from attnc.scheduling import LOCAL, finished, require_cluster
from attnc_lab.catalogue import EXPERIMENTS, named
from attnc_lab.costs import metered
from attnc_lab.experiment import PROFILES, Cell, Experiment, Row
from attnc_lab.folder import Folder

Progress = Callable[[str, float], None]
Measured = tuple[list[Row], str | None]
"""The rows of a cell, and the reason if there are none."""
Job = tuple[str, Cell, int]
"""The name of an experiment, a cell and the seed."""
Place = tuple[int, int]
"""The number of an experiment, and that of a cell among its missing cells."""
Start = Callable[[dict[Place, Job]], Iterable[tuple[Place, Measured]]]
PACKAGES = ("numpy", "scipy", "scikit-learn", "torch", "matplotlib", "jinja2")
"""The packages whose versions may change the numbers."""
ONE_AT_A_TIME = threading.Lock()


class RunFailed(attnc.AttncError):
    """Raised if some cells could not be measured. All others are kept."""


def run(
    names: Sequence[str],
    out: str | Path,
    *,
    profile: str = "quick",
    seed: int = 0,
    cluster: str | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    command: str = "attnc_lab.run",
) -> Folder:
    """Measure the missing cells of experiments, and write a CSV for each. An interrupted run is continued.

    Parameters
    ----------
    names : sequence of str
        Names from `attnc lab list`, or ["all"].
    out : path
        The folder of the run.
    profile : str
        The size of the run: "full" has longer sweeps and trainings than "quick".
    seed : int
        The seed of random numbers. The same seed gives the same results.
    cluster : str, optional
        The address of a dask.distributed scheduler.
    processes : int, optional
        The number of processes. By default one for each core.
    progress : callable, optional
        Called with a text and the finished fraction.
    command : str
        The command that the report names.

    Returns
    -------
    Folder
        The folder of the run, which `report` takes by its `path`.

    Raises
    ------
    InputError
        If a name, the profile or the seed is wrong.
    RunFailed
        If a measurement failed. The finished cells are kept.

    Examples
    --------
    A misspelt name is refused at once. `attnc_lab.run(["frequency"], "results")` would take some seconds.

    >>> import attnc, attnc_lab
    >>> try:
    ...     attnc_lab.run(["frequencies"], "results")
    ... except attnc.InputError as error:
    ...     print(error)
    there is no experiment 'frequencies'. Did you mean sequences or frequency?
    """
    experiments = list(EXPERIMENTS) if list(names) == ["all"] else [named(name) for name in names]
    if not experiments:
        raise attnc.InputError("no experiment was named: give names, or all; `attnc lab list` shows them")
    if profile not in PROFILES:
        raise attnc.InputError(f"profile must be one of {', '.join(PROFILES)}; found {profile!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise attnc.InputError(f"seed must be a whole number from 0 to 2³²−1, found {seed!r}")
    found = versions()
    require_cluster(cluster or LOCAL)
    folder = Folder.open(Path(out), profile, seed, found, command)
    _measure(
        folder,
        experiments,
        lambda jobs: finished(measure_cell, jobs, cluster or LOCAL, processes, failed=_failure),
        progress,
    )
    return folder


def versions() -> dict[str, str]:
    """Return the versions of Python, of attnc, and of the packages that its numbers depend on."""
    found = {"attnc": attnc.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise attnc.MissingExtra("the lab needs", name, "lab") from None
    return found


def _measure(folder: Folder, experiments: Sequence[Experiment], start: Start, progress: Progress | None) -> None:
    """Measure the missing cells, and write each into the folder. Raise RunFailed at the end if some failed."""
    jobs, failures = dict[Place, Job](), list[str]()
    for place, experiment in enumerate(experiments):
        cells = folder.missing(experiment)
        jobs |= {(place, number): (experiment.name, cell, folder.seed) for number, cell in enumerate(cells)}
        if not cells:
            folder.finish(experiment)
    try:
        for done, (key, (rows, failure)) in enumerate(start(jobs) if jobs else (), 1):
            experiment, (name, cell, _) = experiments[key[0]], jobs[key]
            if failure is None:
                folder.add(experiment, cell, rows)
            else:
                failures.append(f"{name} {dict(cell)}: {failure}")
            if progress:
                progress(name, done / len(jobs))
    except attnc.FileError as error:
        raise RunFailed(f"{error} The finished cells are in {folder.path}.") from None
    if failures:
        raise RunFailed(
            f"{len(failures)} of {len(jobs)} cells could not be measured; the others are in {folder.path}, and the "
            f"same command tries these again. The first:\n{failures[0]}"
        )


def _failure(error: Exception) -> Measured:
    """Return the result of a cell whose worker of the cluster was lost."""
    return [], f"{type(error).__name__}: {error}"


def measure_cell(name: str, cell: Cell, seed: int) -> Measured:
    """Return the rows of a cell, or the reason why there are none.

    A process measures one cell at a time, because torch's random numbers belong to the process. It uses one thread,
    because sums must be taken in the same order everywhere. So a cell's numbers do not depend on the machine's other
    work. The first row also has the costs of the cell, which do.
    """
    import torch
    from threadpoolctl import threadpool_limits

    try:
        with ONE_AT_A_TIME, threadpool_limits(1):
            torch.set_num_threads(1)
            rows, costs = metered(lambda: named(name).rows(cell, seed))
        return [{**rows[0], **costs}, *rows[1:]] if rows else rows, None
    except Exception:
        return [], traceback.format_exc(limit=-4)
