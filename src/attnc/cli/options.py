"""The options of the commands, and readers of their values: expressions, boxes, points, numbers.

No text of a user is ever evaluated by Python.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from attnc.cli.output import Volume, set_volume
from attnc.constructions.construction import CRITERIA, SMOOTH
from attnc.errors import ExpressionError, FileError, InputError
from attnc.exports.directory import MAX_SHARDS
from attnc.numerics.rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from attnc.exports.safe_files import FolderKind
    from attnc.network import Network


def one_of(description: str, choices: Sequence[str], *names: str, default: bool = True) -> Any:
    """Return an option with these choices, which the shell completes and the help lists.

    A description that ends with a full stop names the choices itself.
    """
    listed = description if description.endswith(".") else f"{description}: {', '.join(choices[:-1])} or {choices[-1]}."
    return typer.Option(*names, help=listed, autocompletion=completed(choices), metavar="NAME", show_default=default)


def completed(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the function by which a shell completes one of these words."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


# Options of several commands. An option of one command is written where the command is.
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Saved = Annotated[Path, typer.Argument(metavar="NET", help="The folder of a saved network.")]
Ranges = Annotated[
    list[str] | None,
    typer.Option("--box", metavar="NAME=LO:HI", help="The range of a variable. Give one for each.", show_default=False),
]
Arithmetic = Annotated[str, one_of("The arithmetic of the network", tuple(UNIT_ROUNDOFF))]
Criterion = Annotated[str, one_of("The cost by which constructions are compared", CRITERIA)]
Norm = Annotated[
    str, typer.Option(metavar="P", help="The norm of the error: inf for the largest error, or a number p ≥ 1 for L_p.")
]
Table = Annotated[
    Path | None,
    typer.Option(
        "--csv",
        metavar="FILE",
        help="A table instead of an expression: a CSV or .parquet file, or a Zarr folder; - is CSV on standard input.",
        show_default=False,
    ),
]
OwnTable = Annotated[
    Path | None,
    typer.Option(
        "--csv",
        metavar="FILE",
        help="Your file of a table of which the network has the hash: a CSV or .parquet file, or a Zarr folder.",
        show_default=False,
    ),
]
Inputs = Annotated[str | None, typer.Option(metavar="X,Y", help="The input columns of the table.", show_default=False)]
Output = Annotated[
    str | None, typer.Option(metavar="Z", help="The output column of the table, or several as Y,Z.", show_default=False)
]
SkipMissing = Annotated[
    bool, typer.Option("--skip-missing", help="Leave out rows of the table with a missing number: empty, NaN or NA.")
]
Duplicates = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="Different values at one point of the table: error if they differ by more than eps, mean, or first.",
        autocompletion=completed(("error", "mean", "first")),
    ),
]
Decimal = Annotated[str, typer.Option(metavar="MARK", help="The decimal mark of the table: . or ,")]
MaxAnchors = Annotated[
    int | None,
    typer.Option(metavar="N", help="Refuse to build a network of more anchors than this.", show_default=False),
]
Seconds = Annotated[
    float | None, typer.Option(metavar="S", help="The time limit in seconds: 60 by default.", show_default=False)
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Prove in shards, in parallel: local is this machine, else the address of a dask.distributed scheduler.",
        show_default=False,
    ),
]
Shards = Annotated[
    int | None, typer.Option(metavar="N", help="The number of shards: 64 by default.", show_default=False, min=1)
]
Force = Annotated[bool, typer.Option("--force", help="Replace the files that attnc saved in --out before.")]


def read_shard(given: str) -> tuple[int, int]:
    """Return the number of a shard and the number of shards, from a text such as 3/64."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", given, re.ASCII)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MAX_SHARDS:
        raise InputError(f"--shard {given!r:.40}: expected K/N with 1 ≤ K ≤ N ≤ {MAX_SHARDS:,}, such as 3/64")
    return int(found[1]), int(found[2])


def optional(description: str, *names: str, metavar: str | None = None) -> Any:
    """Return an option whose default is None, which the help does not show."""
    return typer.Option(*names, help=description, metavar=metavar, show_default=False)


def _set_volume(volume: Volume) -> Callable[[bool], None]:
    return lambda is_given: set_volume(volume) if is_given else None


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print errors only. JSON and the value of eval are still printed.",
        callback=_set_volume(Volume.QUIET),
        expose_value=False,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print every step with its time, and the traceback of an error.",
        callback=_set_volume(Volume.VERBOSE),
        expose_value=False,
    ),
]


def _common_options() -> list[Any]:
    """Return the options that every command has, made from their annotations as typer makes all others."""
    carrier = typer.Typer(add_completion=False)

    @carrier.command()
    def carry(quiet: Quiet = False, verbose: Verbose = False) -> None:
        """Carry the options."""

    return [param for param in typer.main.get_command(carrier).params if param.name in ("quiet", "verbose")]


COMMON_OPTIONS = _common_options()


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Return the parameters. The help of a flag shows no type, since a flag takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command with the options that all commands have."""

    def get_params(self, ctx: Any) -> list[Any]:
        *own, help_option = super().get_params(ctx)
        return _without_flag_types([*own, *COMMON_OPTIONS, help_option])


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


class ExpressionCommand(Command):
    """A command whose argument is an expression, which may begin with a minus sign."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        takes_value = {name: not getattr(param, "is_flag", False) for param in options for name in param.opts}
        return super().parse_args(ctx, shield_expression(args, takes_value))


def shield_expression(args: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """Move an expression such as -x**2 to the end, after `--`. A text that looks like a mistyped option stays in place.

    `--word` looks like an option, unless the box has a variable `word`. `-word` does, too, if there is another
    argument.
    """
    variables = {
        word.removeprefix("--box=").partition("=")[0].strip()
        for before, word in pairwise(["", *args])
        if before == "--box" or word.startswith("--box=")
    }
    dashed, num_plain = list[int](), 0
    i = 0
    while i < len(args):
        name, has_value, _ = args[i].partition("=")
        if args[i] == "--":
            return list(args)
        if name in takes_value and not (len(name) == 2 and name[1] in variables):  # -h may be minus the variable h
            i += takes_value[name] and not has_value
        elif len(args[i]) > 1 and args[i].startswith("-"):
            dashed.append(i)
        else:
            num_plain += 1
        i += 1

    def is_expression(text: str) -> bool:
        option = re.fullmatch(r"(--?)[A-Za-z][\w-]*(=.*)?", text, re.DOTALL)
        if option is None or text.lstrip("-") in variables:
            return True
        return option[1] == "-" and not num_plain

    expressions = [i for i in dashed if is_expression(args[i])]
    if len(expressions) != 1:
        return list(args)
    at = expressions[0]
    others = [*args[:at], *args[at + 1 :]]
    if takes_value.get(
        others[-1] if others else ""
    ):  # the value of the last option is missing: `--` must not become it
        return others
    return [*others, "--", args[at]]


NOT_STATED = {
    "criterion": (None, "multiply_adds"),
    "skip_missing": (None, False),
    "duplicates": (None, "error"),
    "decimal": (None, "."),
}
"""Values of options that a stored command leaves out, beside None: the defaults of options that are seldom given."""


def command_line(expression: str | None, given: Mapping[str, Any]) -> str:
    """Return the command that makes the same network again, without options that are None and the default criterion."""
    words = []
    for name, value in given.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            option = f"--{name.replace('_', '-')}"
            words += [] if one in NOT_STATED.get(name, (None,)) else [option] if one is True else [option, str(one)]
    if expression is not None:  # a table has none
        words = [*words, "--", expression] if expression.startswith("-") else [expression, *words]
    return shlex.join(["attnc", "compile", *words])


def read_box(given: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Read the ranges NAME=LO:HI of all variables."""
    ranges: dict[str, tuple[float, float]] = {}
    if not given:
        raise InputError("--box: state the range of every variable, e.g. --box x=-3:3")
    for text in given:
        option = f"--box {text}"
        name, _, range_ = (part.strip() for part in text.partition("="))
        lo, colon, hi = range_.partition(":")
        if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or not colon or ":" in hi:
            raise InputError(f"{option}: expected NAME=LO:HI, e.g. --box x=-3:3")
        if name in ranges:
            raise InputError(f"{option}: {name} has a range already, {ranges[name][0]:g}:{ranges[name][1]:g}")
        ends = [float(end) if re.fullmatch(r"\s*[+-]?inf\s*", end) else read_number(end, option) for end in (lo, hi)]
        ranges[name] = start, stop = ends[0], ends[1]
        if start >= stop:
            kind = "reversed" if start > stop else "empty"
            raise InputError(f"{option}: the range is {kind}; the first number must be below the second")
    return ranges


def read_number(text: str, where: str, wanted: str = "a number such as 0.5, 1e-3 or 2*pi") -> float:
    """Read a number, or a constant such as 2*pi, by the parser of expressions."""
    import numpy as np

    from attnc.targets.expressions.expression import Expression

    text = text.strip()
    if re.fullmatch(r"[+-]?(inf|infinity|nan)", text, re.IGNORECASE):
        raise InputError(f"{where}: {text} is not finite; expected {wanted}")
    try:
        expression = Expression.parse(text)
    except ExpressionError:
        raise InputError(f"{where}: {text!r} is not {wanted}") from None
    if expression.variables or expression.is_tuple:
        raise InputError(f"{where}: {text!r} is not {wanted}")
    with np.errstate(all="ignore"):
        value = float(expression(np.zeros((1, 0)))[0, 0])
    if not math.isfinite(value):
        raise InputError(f"{where}: {text} is not finite; expected {wanted}")
    return value


def read_point(network: Network, assignments: Sequence[str]) -> dict[str, float]:
    """Read NAME=VALUE for every variable of a network."""
    given: dict[str, float] = {}
    known = ", ".join(network.variables)
    for text in assignments:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise InputError(f"{text!r}: expected NAME=VALUE, e.g. {network.variables[0]}=0.5")
        if name not in network.variables:
            raise InputError(f"{text!r}: {name} is not a variable of this network (its variables: {known})")
        if name in given:
            raise InputError(f"{text!r}: {name} has a value already, {given[name]:g}")
        given[name] = read_number(value, repr(text))
    missing = [name for name in network.variables if name not in given]
    if missing:
        raise InputError(f"no value for {', '.join(missing)}: give {' '.join(f'{name}=…' for name in missing)}")
    return given


def check_writable(out: Path, kind: FolderKind, *, force: bool) -> None:
    """Raise FileError before the work if a folder of this kind cannot be saved there, or if one would be replaced."""
    from attnc.exports.safe_files import why_not_writable

    reason = why_not_writable(out, kind)
    if reason is None and not force and out.is_dir() and any(out.iterdir()):
        reason = f"{str(out)!r} is {kind.name} already. Add --force to replace it, or choose another name."
    if reason is not None:
        raise FileError(f"--out: {reason}")


def read_counts(text: str) -> tuple[int, ...] | int:
    """Read the cells per axis: one whole number for all axes, or one for each, as in 9,7."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part, re.ASCII) for part in parts):
        raise InputError(f"--points-per-axis {text}: expected a whole number, or one for every axis, e.g. 9 or 9,7")
    counts = tuple(map(int, parts))
    return counts if len(counts) > 1 else counts[0]


def read_norm(text: str) -> float | str:
    """Read "inf", or a number for an L_p norm."""
    return text if text in ("inf", SMOOTH) else read_number(text, f"--norm {text}", "inf or a number p ≥ 1")
