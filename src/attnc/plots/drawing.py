"""Draw a network, and write the picture to a file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attnc.errors import FileError, InputError
from attnc.exports.safe_files import why_not_into, write_file_whole
from attnc.plots.one_variable import draw_lines
from attnc.plots.style import require_matplotlib
from attnc.plots.subject import PlotSubject, TargetLike, along_variable, cut, ridge_lines
from attnc.plots.two_variables import draw_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnc.network import Network

SUFFIXES = (".png", ".svg", ".pdf")
"""The formats of pictures, by file suffix."""


def plot(network: Network, path: str | os.PathLike[str], target: TargetLike | None = None, *, output: int = 0) -> None:
    """Write the picture of a network as SVG, PDF or PNG, by the path's suffix. The file is written whole or not at all.

    The target is read from the network's expression. A network made from a Python function has none: give the function
    or the Target, or its curves are left out.
    """
    write_figure(path, lambda: figure(network, target, output=output))


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture. Raise an error if no picture can be written there, or matplotlib is missing."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a picture is written to a file, found {path!r:.80}")
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"cannot plot to {str(path)!r}: the name must end in {', '.join(SUFFIXES)}")
    reason = why_not_into(str(path.parent))
    if reason is not None:
        raise FileError(f"cannot plot to {str(path)!r}: {reason}")
    if path.is_dir():
        raise FileError(f"cannot plot to {str(path)!r}: it is a folder")
    require_matplotlib()
    return path


def write_figure(path: str | os.PathLike[str], draw: Callable[[], Figure]) -> None:
    """Write a picture to a file. It is drawn only if the file can be written."""
    path = check_picture(path)
    suffix = path.suffix.lower()
    drawn, undated = io.BytesIO(), {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    draw().savefig(drawn, format=suffix[1:], dpi=160, facecolor="white", metadata=undated)
    write_file_whole(str(path), drawn.getvalue())


def figure(network: Network, target: TargetLike | None = None, *, output: int = 0) -> Figure:
    """Return the picture as a new matplotlib Figure.

    A network of one variable is drawn as curves, one of two variables as maps. Truncated linear functions of more
    variables are drawn over their own w·x + t, all others along one line through the middle of the box.
    """
    subject = PlotSubject.of(network, target, output)
    if network.box.d == 1:
        return draw_lines(subject, [(output, along_variable(network.box, 0))])
    ridges = ridge_lines(subject)
    if network.box.d == 2 and (ridges is None or subject.num_outputs == 1):
        return draw_maps(subject)
    if ridges is not None:
        return draw_lines(subject, ridges)
    line = cut(subject)
    return draw_lines(subject, [(shown, line) for shown in subject.shown_outputs])
