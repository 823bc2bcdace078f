"""Certify the heads of one layer of a stock checkpoint, for a set of keys and some queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attnc.errors import InputError, real_number, whole_number
from attnc.exports.safe_files import PathLike
from attnc.heads.selecting import DTYPES, LARGEST_POSITION, LayerClaims, QueryRegion, SelectionClaim
from attnc.heads.stock_layer import StockLayer, StockModel
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import ENGINE_ULPS

MAX_KEYS = 2**16
MAX_QUERIES = 2**10
MAX_KEY_NUMBERS = 2**24
"""The most numbers of the keys: 128 MiB of float64. A head needs about ten times as much memory."""
DEFAULT_LEAK = 0.01


@dataclass(frozen=True)
class HeadReport:
    """The proven facts about the heads of a layer.

    Attributes
    ----------
    model : str
        The path of the model.
    layer : int
        The number of the layer.
    name : str
        The name of the layer in the file.
    num_keys, num_queries : int
        The sizes of the sets.
    region : str
        The set of queries in words.
    leak : float
        The weight that all keys but the selected one may have together.
    dtype : str
        The arithmetic that decides `is_safe`.
    assumptions : tuple of str
        Facts that the proof takes on trust.
    heads : tuple of SelectionClaim
        The heads.

    Examples
    --------
    >>> from attnc.heads import HeadReport
    >>> HeadReport("model", 0, "layers.0", 2, 1, "1 query", 0.01, "float32", (), ()).is_safe
    True
    """

    model: str
    layer: int
    name: str
    num_keys: int
    num_queries: int
    region: str
    leak: float
    dtype: str
    assumptions: tuple[str, ...]
    heads: tuple[SelectionClaim, ...]

    @property
    def is_safe(self) -> bool:
        """Whether every head leaks at most `leak`, as computed in `dtype`.

        Examples
        --------
        >>> from attnc.heads import HeadReport
        >>> HeadReport("model", 0, "layers.0", 2, 1, "1 query", 0.01, "float32", (), ()).is_safe  # it has no heads
        True
        """
        return all(self.is_head_safe(head) for head in self.heads)

    def is_head_safe(self, head: SelectionClaim) -> bool:
        """Return whether a head leaks at most `leak`, as computed in `dtype`.

        Parameters
        ----------
        head : SelectionClaim
            The claim about one head.

        Returns
        -------
        bool
            True if its leak is at most the one allowed.

        Examples
        --------
        >>> from attnc.heads import HeadReport, SelectionClaim
        >>> facts = {"float32": 10.0, "float64": 10.0}
        >>> head = SelectionClaim(0, (3,), 10.1, 1e-4, facts, dict.fromkeys(facts, 1e-4), dict.fromkeys(facts, 221), 0)
        >>> HeadReport("model", 0, "layers.0", 4, 1, "1 query", 0.01, "float32", (), (head,)).is_head_safe(head)
        True
        """
        return head.leaks[self.dtype] <= self.leak

    def to_json(self) -> dict[str, Any]:
        """Return the report as objects of JSON.

        Returns
        -------
        dict
            Plain lists, texts and numbers, as `json.dumps` takes them.

        Examples
        --------
        >>> from attnc.heads import HeadReport
        >>> report = HeadReport("model", 0, "layers.0", 2, 1, "1 query", 0.01, "float32", (), ())
        >>> report.to_json()["leak"]
        0.01
        """
        facts = {name: value for name, value in asdict(self).items() if name != "heads"}
        heads = [
            {"name": f"head {head.head}", **asdict(head), "is_safe": self.is_head_safe(head)} for head in self.heads
        ]
        return {**facts, "is_safe": self.is_safe, "heads": heads}


def certify_heads(
    model: PathLike,
    layer: int,
    *,
    keys: Float[np.ndarray, "keys width"] | Sequence[int],
    queries: Float[np.ndarray, "queries width"] | Sequence[int] | None = None,
    radius: float = 0.0,
    box: tuple[Float[np.ndarray, " width"], Float[np.ndarray, " width"]] | None = None,
    heads: Sequence[int] | None = None,
    position: int | None = None,
    leak: float = DEFAULT_LEAK,
    dtype: str = "float32",
) -> HeadReport:
    """Prove how surely the heads of a layer of a stock checkpoint select one of some keys.

    Parameters
    ----------
    model : path
        A folder with config.json and safetensors files, or a safetensors file beside config.json: of type bert, gpt2,
        llama, mistral, qwen2 or smollm3.
    layer : int
        The number of the layer, from 0.
    keys : array_like
        The input of the layer at the positions of the keys, (keys, width), in order from position 0; or the ids of
        tokens, whose embeddings are used.
    queries : array_like, optional
        The input of the layer at the position of the query, (queries, width), or ids of tokens.
    radius : float
        The claims hold for all inputs within this distance of a query, in the 2-norm.
    box : pair of arrays, optional
        The lower and the upper corner of a box of inputs, instead of queries.
    heads : sequence of int, optional
        The heads. By default all.
    position : int, optional
        The position of the query. By default it is behind the keys.
    leak : float
        The weight that all keys but the selected one may have together.
    dtype : str
        The arithmetic that decides whether a head is safe: "float32" or "float64".

    Returns
    -------
    HeadReport
        The claims.

    Raises
    ------
    InputError
        If the arguments do not fit the model, or its scores are not known here.
    FileError
        If a file cannot be read.

    Examples
    --------
    >>> import json, os, tempfile
    >>> import numpy as np
    >>> from attnc.heads import certify_heads
    >>> from safetensors.numpy import save_file
    >>> name = "encoder.layer.0.attention.self"
    >>> weights = {f"{name}.{part}.weight": 4 * np.eye(2, dtype="f4") for part in ("query", "key")}
    >>> weights |= {f"{name}.{part}.bias": np.zeros(2, "f4") for part in ("query", "key")}
    >>> config = {"model_type": "bert", "hidden_size": 2, "num_attention_heads": 1, "num_hidden_layers": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(weights, f"{folder}/model.safetensors")
    ...     with open(f"{folder}/config.json", "w") as file:
    ...         json.dump(config, file)
    ...     report = certify_heads(folder, 0, keys=np.eye(2), queries=[[1.0, 0.0]], radius=0.1)
    >>> report.is_safe, report.heads[0].selected, round(report.heads[0].gap, 2)
    (True, (0,), 9.71)
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}; found {dtype!r:.60}")
    if not 0 < real_number("leak", leak) < 1:
        raise InputError(f"leak must be between 0 and 1, found {leak!r}")
    if not real_number("radius", radius) >= 0:
        raise InputError(f"radius must be at least 0, found {radius!r}")
    if (queries is None) == (box is None):
        raise InputError("give queries, or a box of them, and not both")
    if box is not None and radius:
        raise InputError(f"radius = {radius:g} belongs to queries; a box has its own widths")
    files = StockModel(model)
    found = files.layer(whole_number("layer", layer, 0))
    assumptions = [
        "the layer computes its scores in float32 or float64 with IEEE rounding, in any order of summation, and its "
        f"exponentials are within {ENGINE_ULPS['float32']} ulp of float32; TF32, bfloat16, float16 and quantized "
        "weights are outside this",
    ]
    if found.norm is not None and found.norm.is_centred:
        assumptions.append("the norm computes its mean square from the entries less their mean")
    rows, are_tokens = _states(files, found, "keys", keys, None)
    if len(rows) > MAX_KEYS or rows.size > MAX_KEY_NUMBERS:
        raise InputError(
            f"{len(rows):,} keys of width {found.width:,}; at most {MAX_KEYS:,} keys and {MAX_KEY_NUMBERS:,} numbers "
            "are taken"
        )
    if found.window is not None and len(rows) >= found.window:
        raise InputError(f"{len(rows):,} keys and a query: the layer sees a window of {found.window:,} tokens")
    place = len(rows) if position is None else whole_number("position", position, 0, LARGEST_POSITION)
    regions, asked_tokens = _regions(files, found, queries, radius, box, place)
    if are_tokens or asked_tokens:
        before = "" if layer == 0 else ", as if earlier layers wrote nothing into the channels that it reads"
        assumptions.append(f"the layer receives the embeddings of the tokens{before}")
    if found.rotation is not None:
        assumptions.append(f"keys are at the positions 0 to {len(rows) - 1}, and queries at {place}")
    claims = LayerClaims(found, rows, place)
    chosen = range(found.num_heads) if heads is None else heads
    for head in chosen:
        if not 0 <= whole_number("head", head, 0) < found.num_heads:
            raise InputError(f"head {head}: the layer has the heads 0 to {found.num_heads - 1}")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        made = tuple(claims.head(int(head), regions, leak) for head in chosen)
    for claim in made:
        if math.isnan(claim.gap) or any(map(math.isnan, claim.margins.values())):
            raise InputError(f"the scores of head {claim.head} overflow. Give smaller keys or queries.")
    if box is not None:
        region = "all queries of a box"
    else:
        count = f"{len(regions):,} quer{'y' if len(regions) == 1 else 'ies'}"
        region = f"all within {radius:g} of {count}" if radius else count
    return HeadReport(
        str(model), layer, found.name, len(rows), len(regions), region, leak, dtype, tuple(assumptions), made
    )


def _regions(
    files: StockModel,
    layer: StockLayer,
    queries: Any,
    radius: float,
    box: tuple[Any, Any] | None,
    place: int,
) -> tuple[list[QueryRegion], bool]:
    if box is None:
        rows, are_tokens = _states(files, layer, "queries", queries, place)
        if len(rows) > MAX_QUERIES:
            raise InputError(f"{len(rows):,} queries; at most {MAX_QUERIES:,} are taken at a time")
        return [QueryRegion(row, float(radius)) for row in rows], are_tokens
    corners, _ = _states(files, layer, "box", np.stack([_numbers("box", corner) for corner in box]), None)
    lo, hi = corners
    if (lo > hi).any():
        channel = int((lo > hi).argmax())
        raise InputError(
            f"box: channel {channel} has the lower end {lo[channel]:g} above the upper one {hi[channel]:g}"
        )
    centre = lo / 2 + hi / 2
    widths = np.nextafter(np.maximum(hi - centre, centre - lo), np.inf)
    return [QueryRegion(centre, widths=np.where(lo == hi, 0.0, widths))], False


def _states(
    files: StockModel, layer: StockLayer, name: str, given: Any, place: int | None
) -> tuple[Float[np.ndarray, "rows width"], bool]:
    """Return inputs of the layer, and whether they were given as tokens."""
    array = _numbers(name, given)
    if array.ndim == 1 and array.dtype.kind in "iu":
        tokens = [int(token) for token in array[: MAX_KEYS + 1]]
        if not tokens:
            raise InputError(f"{name}: there is no token")
        positions = range(len(tokens)) if place is None else [place] * len(tokens)
        rows = files.embedding(tokens, positions)
        is_of_tokens = True
    else:
        rows, is_of_tokens = array.astype(np.float64), False
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != layer.width:
        raise InputError(f"{name} of shape {rows.shape}: the layer takes rows of {layer.width:,} numbers")
    if not np.isfinite(rows).all():
        raise InputError(f"{name}: row {int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])} is not finite")
    return rows, is_of_tokens


def _numbers(name: str, given: Any) -> np.ndarray:
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise InputError(f"{name} do not form an array: {error}") from None
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name} must be real numbers, found an array of {array.dtype}")
    return array
