"""`attnc lab`: the experiments, their report, and the diagnosis of a saved network."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from attnc.cli.commands import app
from attnc.cli.options import Command, Group, Json, Saved, completed, one_of, optional
from attnc.cli.output import plain_table, print_json, print_parts, progress_bar, say

lab = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Run experiments on the claims of the two papers, and write a report with a verdict on each claim.",
    epilog="Example:\n\nattnc lab run all --profile quick --out lab",
)
app.add_typer(lab, name="lab")

Run = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")]


def _experiments(incomplete: str) -> list[str]:
    from attnc_lab import EXPERIMENTS

    return completed([*(experiment.name for experiment in EXPERIMENTS), "all"])(incomplete)


@lab.command("list", cls=Command, epilog="Example:\n\nattnc lab list")
def list_command(json_output: Json = False) -> None:
    """List the experiments."""
    from attnc_lab import EXPERIMENTS

    if json_output:
        fields = ("number", "name", "title", "question", "prediction", "source")
        print_json([{field: getattr(experiment, field) for field in fields} for experiment in EXPERIMENTS])
        return
    from rich.text import Text

    table = plain_table("name", "question", left=2)
    table.columns[0].no_wrap, table.columns[0].style = True, "cyan"
    for experiment in EXPERIMENTS:
        table.add_row(experiment.name, Text(experiment.question))  # brackets are no markup
    print_parts(table)


@lab.command(
    "run",
    cls=Command,
    epilog="Examples:\n\nattnc lab run all\n\nattnc lab run rate_in_p noise --profile full --out lab-full",
)
def run_command(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Names from attnc lab list, or all.", autocompletion=_experiments),
    ],
    profile: Annotated[
        str, one_of("The size of the run: full has longer sweeps and trainings than quick.", ("quick", "full"))
    ] = "quick",
    seed: Annotated[
        int, typer.Option(metavar="N", help="The seed of random numbers. The same seed gives the same results.")
    ] = 0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the run. A run that is there already is continued.")
    ] = Path("lab"),
    cluster: Annotated[
        str | None,
        optional(
            "The address of a dask scheduler, to use its workers instead of processes on this machine.",
            metavar="ADDRESS",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Run experiments and write the report. Measurements that are there already are not repeated."""
    from attnc_lab import report, run

    options = [*names, "--profile", profile, "--seed", str(seed), "--out", str(out)]
    command = shlex.join(["attnc", "lab", "run", *options, *([] if cluster is None else ["--cluster", cluster])])
    try:
        with progress_bar("measuring") as progress:
            run(names, out, profile=profile, seed=seed, cluster=cluster, progress=progress, command=command)
            progress("writing the report", 1.0)
            page = report(out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the finished cells are in {out}; the same command goes on from there") from None
    _print_verdicts(out, page, json_output)


@lab.command("report", cls=Command, epilog="Example:\n\nattnc lab report lab")
def report_command(folder: Run, json_output: Json = False) -> None:
    """Write the report of a run again, from its tables, as DIR/report.html."""
    from attnc_lab import report

    _print_verdicts(folder, report(folder), json_output)


@lab.command("diagnose", cls=Command, epilog="Example:\n\nattnc lab diagnose net")
@app.command("diagnose", cls=Command, epilog="Example:\n\nattnc diagnose net")
def diagnose_command(
    net: Saved,
    eps: Annotated[
        float | None, optional("The largest error that is tolerated. By default the eps of the network.", metavar="E")
    ] = None,
    json_output: Json = False,
) -> None:
    """Look for known failures of a saved network, with evidence and remedy. The exit code is 1 if there are any."""
    from attnc import diagnose, load

    with progress_bar("loading") as progress:
        network = load(net)
        progress("diagnosing", 0.0)
        found = diagnose(network, eps=eps)
    if json_output:
        rows = [
            {"name": s.name, "evidence": s.evidence, "where": s.where, "remedy": s.remedy, "numbers": dict(s.numbers)}
            for s in found.symptoms
        ]
        facts = {"healthy": found.is_healthy, "max_error": found.max_error, "eps": found.eps}
        print_json(facts | {"points": found.num_points, "symptoms": rows})
    else:
        say(str(found))
    raise typer.Exit(0 if found.is_healthy else 1)


def _print_verdicts(folder: Path, page: Path, json_output: bool) -> None:
    from rich.text import Text

    from attnc_lab.report import findings

    found = findings(folder)
    if json_output:
        rows = [
            {
                "name": experiment.name,
                "claim": v.claim,
                "verdict": v.status.value,
                "label": v.label,
                "because": v.because,
                "numbers": dict(v.numbers),
            }
            for experiment, _, verdicts in found
            for v in verdicts
        ]
        print_json({"report": str(page), "verdicts": rows})
        return
    table = plain_table("experiment", "claim", "verdict", left=3)
    for experiment, _, verdicts in found:
        for i, verdict in enumerate(verdicts):
            style = "green" if verdict.status.value.startswith("holds") else "yellow"
            table.add_row(experiment.name if i == 0 else "", Text(verdict.claim), Text(verdict.label, style))
    print_parts(table, Text.assemble(("wrote ", "green"), str(page)))
