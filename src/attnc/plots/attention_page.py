"""Attention maps as one page that needs no other file, no network and no server.

For every head: destinations × sources over the tokens of its layer, for each of some points. The page holds weights
from LEAST_WEIGHT on. It draws maps with thousands of sources on a canvas: a column of pixels shows the largest weight
of its sources, and the wheel zooms. All text is data of the page, never markup.
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from attnc.errors import FileError, InputError
from attnc.exports.safe_files import why_not_into, write_file_whole
from attnc.ir.program import Program
from attnc.ir.shapes import PlacedLayer, streams

TEMPLATE = "attention.html"
PLACE = "/*DATA*/"
"""The place of the data in the template."""
LEAST_WEIGHT = 1e-7
"""Smaller weights are left out. On a screen they cannot be told from zero, and they are most of a long map."""
MOST_PAGE_POINTS = 256
"""Limit of the number of points of a page."""
MOST_WEIGHTS = 2**21
"""Limit of the number of weights of a page. Each takes 11 bytes: such a page has 22 MiB, and opens in 2 s."""
FRAME_HEIGHT = 640
"""Height in pixels of the page in a notebook."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionView:
    """Attention maps of a network at some points, for a notebook or as a page.

    A notebook shows it if it is the last value of a cell. The page works without a connection.

    Attributes
    ----------
    page : str
        The whole page, as HTML.

    Examples
    --------
    >>> import attnc, os, tempfile
    >>> view = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).show_attention([[0.5]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     view.save(f"{folder}/attention.html")
    ...     os.listdir(folder)
    ['attention.html']
    """

    page: str

    def __repr__(self) -> str:
        return f"<AttentionView: a page of {len(self.page) / 2**10:,.0f} KiB; .save(path) writes it>"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that it meets no script or style of the notebook."""
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts" '
            f'style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, whole or not at all.

        Parameters
        ----------
        path : str or path
            The file, which ends in .html.

        Raises
        ------
        InputError
            If the name does not end in .html.
        FileError
            If the file cannot be written.

        Examples
        --------
        >>> import attnc
        >>> view = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).show_attention([[0.5]])
        >>> try:
        ...     view.save("attention.png")
        ... except attnc.InputError as refusal:
        ...     print(refusal)
        the page is written to a file whose name ends in .html, found 'attention.png'
        """
        if not isinstance(path, str | os.PathLike) or Path(path).suffix.lower() not in (".html", ".htm"):
            found = os.fspath(path) if isinstance(path, os.PathLike) else path
            raise InputError(f"the page is written to a file whose name ends in .html, found {found!r:.80}")
        reason = why_not_into(str(Path(path).parent))
        if reason is not None:
            raise FileError(f"cannot write {os.fspath(path)!r}: {reason}")
        write_file_whole(str(path), self.page.encode())


def attention_view(
    program: Program,
    cache: Mapping[str, np.ndarray],
    points: Sequence[Mapping[str, Any]],
    title: str,
) -> AttentionView:
    """Return the page of these maps, as `net.run(cache=True)` names them. A point has a `label` and an `output`."""
    layers = []
    num_weights = 0
    for prefix, stream in zip(("memory.", ""), streams(program), strict=True):
        for step in stream.steps:
            heads = []
            for number in range(len(step.layer.heads)):
                name = f"{prefix}{step.layer.name}.head{number}"
                packed, count = _packed(cache[f"{name}.pattern"])
                num_weights += count
                heads.append({"name": name, "points": packed})
            if heads and len(step.tokens):
                layers.append(_layer(step, prefix + step.layer.name, heads))
    if not layers:
        raise InputError("the network has no attention map. Compile a function that is not affine.")
    if num_weights > MOST_WEIGHTS:
        raise InputError(
            f"the maps of {len(points):,} point(s) have {num_weights:,} weights from {LEAST_WEIGHT:g} on; a page holds "
            f"{MOST_WEIGHTS:,}. Pass fewer points."
        )
    data = {"title": title, "least": LEAST_WEIGHT, "points": list(points), "layers": layers}
    template = resources.files("attnc.plots").joinpath(TEMPLATE).read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return AttentionView(template.replace(PLACE, text))


def _layer(step: PlacedLayer, name: str, heads: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "sources": step.num_keys, "destinations": step.tokens.tolist(), "heads": heads}


def _packed(patterns: np.ndarray) -> tuple[list[list[str]], int]:
    """Return, for each point, the places row·sources + column and the weights, as little-endian bytes in base 64."""
    packed, count = [], 0
    for pattern in patterns:
        flat = pattern.reshape(-1)
        places = np.flatnonzero(flat >= LEAST_WEIGHT)
        count += len(places)
        if count > MOST_WEIGHTS:  # the caller refuses; do not make a page that large first
            packed.append(["", ""])
            continue
        arrays = (places.astype("<u4"), flat[places].astype("<f4"))
        packed.append([base64.b64encode(array.tobytes()).decode() for array in arrays])
    return packed, count
