"""The command line: `attnc`. Each command is a thin layer over the public API."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from attnc.cli import ground_truth, heads, icl, lab, serve  # noqa: F401  # they register their commands
from attnc.cli.commands import app
from attnc.cli.output import Volume, print_json, reset_volume, volume
from attnc.errors import AttncError, BoundNotMet, ExpressionError, FileError, InputError, ParityExceeded
from attnc.wording import printable

DONE, NOT_MET, BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141
"""The exit codes. The last two follow the rule of shells: 128 plus the number of the signal."""
WHOLE = "no file is left half written"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command. A user's error ends in a message and an exit code, never in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # print what the encoding lacks as an escape sequence
    if sys.stdout is None:  # closed by the caller
        sys.stdout = io.StringIO()
    code = _run(list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the rest of the buffer fails again at exit
        code = CLOSED_PIPE
        if not isinstance(error, BrokenPipeError):
            code = BAD_INPUT
            print(f"error: cannot write the output: {error.strerror or error}", file=sys.stderr)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    reset_volume()
    try:
        app(args=arguments, prog_name="attnc")
    except AttncError as error:
        _report(error, as_json)
        return NOT_MET if isinstance(error, BoundNotMet | ParityExceeded) else BAD_INPUT
    except MemoryError:
        _report(InputError("not enough memory. Choose a larger eps, or smaller max_anchors and max_bytes."), as_json)
        return BAD_INPUT
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return CLOSED_PIPE
        _report(FileError(f"cannot write the output: {error.strerror or error}"), as_json=False)
        return BAD_INPUT
    except SystemExit as ending:
        # typer and rich end the program themselves; the cause is the exception's context.
        if isinstance(ending.__context__, BrokenPipeError):
            return CLOSED_PIPE
        cause = None if ending.__context__ is None else ending.__context__.__cause__
        if isinstance(cause, KeyboardInterrupt):
            return _interrupted(cause)
        message = getattr(ending.__context__, "format_message", None)
        if as_json and ending.code == BAD_INPUT and message is not None:
            print_json({"error": {"type": "UsageError", "message": message()}})
        return ending.code if isinstance(ending.code, int) else DONE
    return DONE


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """Print that the work was interrupted and which files remain, and return the exit code."""
    print(f"interrupted: {interrupt.args[0] if interrupt.args else WHOLE}", file=sys.stderr)
    return INTERRUPTED


def _report(error: AttncError, as_json: bool) -> None:
    if volume() is Volume.VERBOSE:
        traceback.print_exception(error)
    print(f"error: {printable(str(error))}", file=sys.stderr)
    if not as_json:
        return
    found: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, BoundNotMet):
        found |= {"eps": error.eps, "met": error.reach, "bound": error.bound, "worst_box": error.worst_box}
    if isinstance(error, ExpressionError):
        found |= {"position": error.position}
    if isinstance(error, ParityExceeded):
        found |= error.parity._asdict()
    print_json({"error": found})
