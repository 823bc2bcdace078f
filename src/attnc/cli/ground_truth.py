"""`attnc ground-truth`: make a benchmark of models whose circuits are known, and score answers to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnc.cli.commands import app
from attnc.cli.options import Command, Group, Json, completed, one_of, optional
from attnc.cli.output import plain_table, print_json, print_parts, progress_bar, say
from attnc.wording import plural

DISGUISE_NAMES = ("plain", "superposed", "split", "decoys", "noisy", "rotated", "skewed", "combined")
"""The names of all disguises. They are written here so that the help needs no import."""

ground_truth = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make a benchmark for interpretability whose answers are known and proven, and score answers to it.",
    epilog="Example:\n\nattnc ground-truth make --count 5 --seed 1 --out benchmark",
)
app.add_typer(ground_truth, name="ground-truth")


@ground_truth.command(
    "make",
    cls=Command,
    epilog="Examples:\n\nattnc ground-truth make --count 60 --seed 271828 --out benchmark\n\n"
    "attnc ground-truth make --count 20 --seed 314159 --disguise combined --out contest",
)
def make_command(
    seed: Annotated[
        int,
        typer.Option(
            metavar="S", help="The seed. The same seed gives the same files. Keep it secret: it reveals all answers."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write. It must not exist.")],
    count: Annotated[
        int, typer.Option(metavar="N", help="The number of expressions. Each becomes one model per disguise.")
    ] = 60,
    disguise: Annotated[
        list[str] | None,
        typer.Option(
            "--disguise",
            metavar="NAME",
            help=f"A disguise: {', '.join(DISGUISE_NAMES)}. Repeat it for several. By default, all.",
            autocompletion=completed(DISGUISE_NAMES),
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        optional(
            "Make the models in parallel: local is this machine, else the address of a dask.distributed scheduler.",
            metavar="ADDRESS",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Write models that plain transformers loads, with public tasks, and answers in a folder of their own.

    Every model has a proven bound. Hand out the folder `models`, and keep the folder `answers` and the seed.
    """
    with progress_bar("making models") as progress:
        from attnc import groundtruth

        rows = groundtruth.make(count, seed, out, disguises=disguise, progress=progress, cluster=cluster)
    if json_output:
        print_json(rows)
        return
    table = plain_table("disguise", "models", "largest bound", "largest observed error")
    for name in dict.fromkeys(row["disguise"] for row in sorted(rows, key=lambda row: _place(row["disguise"]))):
        mine = [row for row in rows if row["disguise"] == name]
        bound, observed = (max(row[key] for row in mine) for key in ("bound", "observed"))
        table.add_row(name, f"{len(mine)}", f"{bound:.2g}", f"{observed:.2g}")
    print_parts(table)
    say(f"wrote {out}: {plural(len(rows), 'model')}. Every bound is proven.")


def _place(name: str) -> int:
    return DISGUISE_NAMES.index(name)


@ground_truth.command("score", cls=Command, epilog="Example:\n\nattnc ground-truth score benchmark answers.json")
def score_command(
    benchmark: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a benchmark, with its answers.")],
    answers: Annotated[Path, typer.Argument(metavar="FILE", help="The answers of a reader: a JSON file.")],
    by: Annotated[str, one_of("The groups of models to show", ("disguise", "level"))] = "disguise",
    json_output: Json = False,
) -> None:
    """Score answers: circuits by edges, heads and faithfulness, causal variables by interchange and overlap."""
    from attnc.errors import InputError

    if by not in ("disguise", "level"):
        raise InputError(f"--by {by}: models are grouped by disguise or by level")
    with progress_bar("scoring"):
        from attnc import groundtruth
        from attnc.groundtruth.scoring import MEASURES

        found = groundtruth.score(benchmark, answers)
    if json_output:
        print_json(found)
        return
    shown = [name for name in MEASURES if name.endswith("f1") or "_" not in name]
    table = plain_table(by, "models", *(name.replace("_", "\n") for name in shown))
    for row in found["summary"]:
        if row["kind"] in (by, "all"):
            cells = ("" if row[name] is None else f"{row[name]:.2f}" for name in shown)
            table.add_row(row["name"], f"{row['models']}", *cells)
    print_parts(table)
    say(f"{found['method']}: answers to {found['answered']} of {len(found['models'])} models")
