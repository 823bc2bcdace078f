"""The report of a run: one page that needs no other file.

Verdicts come first, and every number comes from CSV files.
"""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import attnc
from attnc_lab.catalogue import EXPERIMENTS
from attnc_lab.drawing import to_svg
from attnc_lab.experiment import CPU_SECONDS, PEAK_MIB, Experiment, Status, Table, Verdict
from attnc_lab.folder import Folder, write_whole

NAME, TEMPLATE = "report.html", "report.html.jinja"


class Finding(NamedTuple):
    """A finished experiment with its table and verdicts."""

    experiment: Experiment
    table: Table
    verdicts: list[Verdict]

    @property
    def costs(self) -> str:
        """The processor time of all cells, and the largest memory of one; empty in a run without these columns."""
        seconds, memory = ([row[name] for row in self.table.having(name)] for name in (CPU_SECONDS, PEAK_MIB))
        parts = [f"{len(seconds):,} cells, {sum(seconds):,.1f} s of processor time"] if seconds else []
        if memory:
            parts.append(f"at most {max(memory):,.0f} MiB for one cell")
        return ", ".join(parts)

    @property
    def figure(self) -> str:
        """The figure as SVG."""
        return to_svg(lambda picture: self.experiment.draw(self.table, picture), f"f{self.experiment.number}")


def report(path: str | Path) -> Path:
    """Write report.html into the folder of a run, for its finished experiments.

    Parameters
    ----------
    path : path
        The folder of a run.

    Returns
    -------
    Path
        The path of the report.

    Raises
    ------
    InputError
        If the folder is not that of a run, or no experiment of the run is finished.

    Examples
    --------
    >>> import attnc, attnc_lab
    >>> try:
    ...     attnc_lab.report("no-such-folder")
    ... except attnc.InputError as error:
    ...     print("no-such-folder" in str(error))
    True
    """
    folder = Folder.read(Path(path))
    page = folder.path / NAME
    write_whole(page, _page(folder, findings(path)))
    return page


def findings(path: str | Path) -> list[Finding]:
    """Judge the finished experiments of a run again, from their tables."""
    folder = Folder.read(Path(path))
    found = [finding for experiment in EXPERIMENTS if (finding := _finding(folder, experiment)) is not None]
    if not found:
        raise attnc.InputError(
            f"no experiment of {folder.path} is finished: `attnc lab run all --out {folder.path}` goes on with it"
        )
    return found


def _finding(folder: Folder, experiment: Experiment) -> Finding | None:
    table = folder.table(experiment)
    if table is None:
        return None
    try:
        return Finding(experiment, table, list(experiment.judge(table)))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise attnc.FileError(
            f"{folder.table_path(experiment)} does not fit this version of the experiment "
            f"({type(error).__name__}: {error}). Delete it and the folder cells beside it, and run it again."
        ) from error


def _page(folder: Folder, found: list[Finding]) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise attnc.MissingExtra("the report needs", "jinja2", "lab", error) from None
    text = resources.files("attnc_lab").joinpath(TEMPLATE).read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
    done = {finding.experiment.name for finding in found}
    counts = Counter(verdict.status for finding in found for verdict in finding.verdicts)
    facts = {"profile": folder.profile, "seed": folder.seed, **folder.versions, "command": " ; ".join(folder.commands)}
    return template.render(
        folder=folder,
        findings=found,
        statuses=list(Status),
        counts={status: counts[status] for status in Status},
        missing=[experiment.title for experiment in EXPERIMENTS if experiment.name not in done],
        facts=facts,
    )
