"""`attnc certify-heads`: proven facts about the heads of a stock attention layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnc.cli.commands import app
from attnc.cli.options import Command, Json, one_of, optional
from attnc.cli.output import plain_table, print_json, print_parts, progress_bar, say
from attnc.cli.tables import read_matrix
from attnc.errors import FileError, InputError
from attnc.exports.safe_files import read_stored, stored_tensors
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.wording import ceiling, floor, one_line

if TYPE_CHECKING:
    import numpy as np

    from attnc.heads.report import HeadReport

MAX_LISTED = 2**16
"""The most numbers of a list such as 0:15, which bounds its memory."""
MAX_FILE_NUMBERS = 2**26
"""The most numbers of a file of keys or queries: 512 MiB of float64."""
SHOWN_KEYS = 4
"""The most selected keys of a row of the table."""


@app.command(
    "certify-heads",
    cls=Command,
    epilog="Examples:\n\nattnc certify-heads model/ --layer 0 --tokens 0:15 --query-tokens 15\n\n"
    "attnc certify-heads model.safetensors --layer 3 --keys keys.csv --queries queries.csv --radius 0.01 --json",
)
def certify_heads_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A folder with config.json and safetensors files, or such a file beside config.json."
        ),
    ],
    layer: Annotated[int, typer.Option(metavar="N", help="The layer, counted from 0.")],
    keys: Annotated[
        Path | None,
        optional("The inputs of the layer at the keys, one row each: .csv or .safetensors.", metavar="FILE"),
    ] = None,
    tokens: Annotated[
        str | None, optional("Ids of tokens, whose embeddings are the keys, e.g. 0:15 or 3,5,9.", metavar="IDS")
    ] = None,
    queries: Annotated[
        Path | None, optional("The inputs of the layer at the query, one row for each query.", metavar="FILE")
    ] = None,
    query_tokens: Annotated[
        str | None, optional("Ids of tokens, whose embeddings are the queries.", metavar="IDS")
    ] = None,
    corners: Annotated[
        Path | None, optional("The lower and the upper corner of a box of queries: two rows.", metavar="FILE")
    ] = None,
    radius: Annotated[
        float, typer.Option(metavar="R", help="Prove it for all inputs within this distance of a query (2-norm).")
    ] = 0.0,
    only_heads: Annotated[str | None, optional("The heads, e.g. 0:4 or 1,7. By default all.", metavar="LIST")] = None,
    position: Annotated[
        int | None, optional("The position of the query. By default it is behind the keys.", metavar="N")
    ] = None,
    leak: Annotated[
        float, typer.Option(metavar="T", help="The weight that all keys but the selected one may have together.")
    ] = 0.01,
    dtype: Annotated[
        str, one_of("The arithmetic that decides whether a head is safe", tuple(sorted(UNIT_ROUNDOFF)))
    ] = "float32",
    json_output: Json = False,
) -> None:
    """Prove how surely the heads of a layer of a stock model select one of some keys.

    The gap is a lower bound of the distance of the selected key's score from all others; rounding leaves the margin.

    The leak is an upper bound of the weight of all other keys together.

    The longest sequence has a leak of at most --leak if all further keys are as far behind.

    The exit code is 0 if all heads are safe, and 1 if one is not.
    """
    given_keys = _one("--keys", keys, "--tokens", tokens)
    box = None
    if corners is None:
        asked = _one("--queries", queries, "--query-tokens", query_tokens)
    elif queries is not None or query_tokens is not None:
        raise InputError("--corners is a box of queries: leave --queries and --query-tokens out")
    else:
        rows = _matrix(corners, "corners")
        if len(rows) != 2:
            raise InputError(f"{corners}: a box has two rows, its lower and its upper corner; found {len(rows):,}")
        asked, box = None, (rows[0], rows[1])
    from attnc.heads import certify_heads

    with progress_bar("proving"):
        report = certify_heads(
            model,
            layer,
            keys=given_keys,
            queries=asked,
            radius=radius,
            box=box,
            heads=None if only_heads is None else _listed("--only-heads", only_heads),
            position=position,
            leak=leak,
            dtype=dtype,
        )
    if json_output:
        print_json(report.to_json())
    else:
        _print(report)
    raise typer.Exit(0 if report.is_safe else 1)


def _one(file_option: str, file: Path | None, list_option: str, listed: str | None) -> Any:
    """Return the rows of a file, or the ids of a list."""
    if (file is None) == (listed is None):
        raise InputError(f"give {file_option} FILE or {list_option} IDS, and not both")
    if file is not None:
        return _matrix(file, file_option.lstrip("-"))
    return _listed(list_option, str(listed))


def _listed(option: str, text: str) -> list[int]:
    """Read numbers and ranges such as 3,5,9 or 0:15, without the upper end."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", part, re.ASCII)
        if match is None:
            raise InputError(f"{option} {text!r:.60}: expected numbers and ranges such as 3,5,9 or 0:15")
        start = int(match[1])
        end = start + 1 if match[2] is None else int(match[2])
        if not 1 <= end - start <= MAX_LISTED - len(found):
            raise InputError(f"{option} {text!r:.60}: {part.strip()!r:.30} has no number, or more than {MAX_LISTED:,}")
        found.extend(range(start, end))
    return found


def _matrix(path: Path, name: str) -> np.ndarray:
    """Read rows from a CSV file with a header, or the tensor `name`, or the only one, of a safetensors file."""
    if path.suffix.lower() != ".safetensors":
        return read_matrix(path)
    stored = stored_tensors(path)
    chosen = name if name in stored else next(iter(stored), name)
    if chosen not in stored or (len(stored) > 1 and chosen != name):
        raise FileError(f"{path}: there are {len(stored)} tensors, and none is named {name!r}")
    tensor = stored[chosen]
    if len(tensor.shape) != 2 or tensor.shape[0] * tensor.shape[1] > MAX_FILE_NUMBERS:
        raise FileError(f"{path}: {chosen!r} has the shape {tensor.shape}; rows of numbers are expected")
    return read_stored(path, tensor)


def _print(report: HeadReport) -> None:
    from rich.text import Text

    say(
        f"{one_line(report.name)} of {one_line(report.model)}: {report.num_keys:,} keys, {report.region}. "
        f"A head is safe if it leaks at most {report.leak:g} in {report.dtype}."
    )
    columns = ("head", "selects key", "gap", "leak", "margin float32", "margin float64", "longest", "")
    table = plain_table(*columns, left=2, is_tight=True)
    for head in report.heads:
        longest = head.lengths[report.dtype]
        chosen = ", ".join(map(str, head.selected[:SHOWN_KEYS]))
        more = f" … +{len(head.selected) - SHOWN_KEYS}" if len(head.selected) > SHOWN_KEYS else ""
        is_safe = report.is_head_safe(head)
        table.add_row(
            str(head.head),
            chosen + more,
            floor(head.gap, 3),
            ceiling(min(1.0, head.leaks[report.dtype])),
            *(floor(head.margins[each], 3) for each in ("float32", "float64")),
            "no limit" if longest is None else f"{longest:,}",
            Text("safe" if is_safe else "not safe", "green" if is_safe else "yellow"),
        )
    print_parts(table, *(Text(f"assumed: {one_line(each)}", "dim") for each in report.assumptions))
