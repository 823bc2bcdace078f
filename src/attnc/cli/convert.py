"""`attnc convert`: a Hugging Face model directory into one whose activations are attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.commands import Json, app
from attnc.cli.output import print_json, print_parts, progress_bar
from attnc.errors import FileError

if TYPE_CHECKING:
    from attnc.converting.report import Report

MAX_TEXT_BYTES = 2**20


@app.command("convert", epilog="Example:\n\nattnc convert all-MiniLM-L6-v2 --out converted --texts sentences.txt")
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face model folder, with safetensors.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    eps: Annotated[float, typer.Option(help="The largest error of each activation, proven.")] = 1e-6,
    texts: Annotated[
        Path | None, typer.Option(help="A file of texts, one a line, to measure on.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if anything cannot be converted.")] = False,
    json_output: Json = False,
) -> None:
    """Replace every activation of a pretrained model by attention, and measure what that changes."""
    from attnc.converting import need_torch

    need_torch()
    from attnc.converting.huggingface import convert_directory, why_not_writable

    reason = why_not_writable(out)
    if reason is not None:
        raise FileError(f"--out: {reason}")
    lines = None if texts is None else _lines(texts)
    with progress_bar():
        report = convert_directory(source, out, eps, texts=lines, strict=strict)
    if json_output:
        print_json(report.as_json() | {"out": str(out)})
    else:
        _print(report, out)


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise FileError(f"{path}: more than {MAX_TEXT_BYTES:,} bytes of texts")
        found = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read {path}: {error}") from None
    kept = [line for line in found if line]
    if not kept:
        raise FileError(f"{path}: there is no text in it; write one on each line")
    return kept


def _print(report: Report, out: Path) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from attnc.converting.report import HEADERS
    from attnc.model_card import one_line

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if number < 2 else "right", overflow="fold")
    for row in report.rows():
        table.add_row(*(Text(one_line(cell)) for cell in row))
    print_parts(table, *(Text(one_line(line)) for line in report.remarks()), Text(f"saved {out}"))
