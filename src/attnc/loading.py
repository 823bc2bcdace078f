"""Reads saved networks. Files that do not fit are refused before memory is allocated for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnc.errors import FileError, InputError
from attnc.exports.directory import folder_named, load_network
from attnc.exports.safe_files import MAX_TENSOR_BYTES
from attnc.ir.layers import Affine
from attnc.network import Network
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.certificate import Certificate, Standing
from attnc.targets.box import Box
from attnc.verifying import fingerprint, is_remembered

FREE_TOKENS, TOKENS_PER_NUMBER = 10**6, 16
"""A layer may have FREE_TOKENS tokens, and TOKENS_PER_NUMBER more per number in its file. Otherwise a small file could
make a run allocate any amount of memory. A million tokens take 8 MB per channel. In networks of all constructions, a
layer has at most one token per number."""


def load(path: str | Path, *, max_bytes: int = MAX_TENSOR_BYTES) -> Network:
    """Read a saved network.

    Parameters
    ----------
    path : str or path
        The folder that `Network.save` wrote.
    max_bytes : int
        Size limit of the weights, in bytes.

    Returns
    -------
    Network
        The network with its certificates, as it was saved. Their bounds are those that the files state:
        `certificate.standing` tells whether they were re-proved on this machine.

    Raises
    ------
    FileError
        If a file is missing, malformed or too large, or contradicts another. No memory of its size is allocated first.
    InputError
        If `path` is not a path.

    Examples
    --------
    >>> import tempfile, attnc
    >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     net.save(f"{folder}/net")
    ...     again = attnc.load(f"{folder}/net")
    >>> again.certificate == net.certificate
    True
    """
    try:
        program, config, certificates, digests = load_network(folder_named(path), max_bytes=max_bytes)
    except MemoryError:
        raise FileError(f"{path}: the network is too large for this machine's memory") from None
    for layer in program.all_layers:
        if isinstance(layer, Affine):
            tokens, entries = layer.weight.shape[0], len(layer.weight.values) + len(layer.constant.values)
            if tokens > FREE_TOKENS + TOKENS_PER_NUMBER * entries:
                raise FileError(f"{path}: layer {layer.name!r} claims {tokens:,} tokens with {entries:,} numbers")
    if "certificate.json" not in certificates:
        raise FileError(f"{path}: certificate.json is missing")
    file = "config.json"
    try:
        box = Box.parse({str(name): tuple(ends) for name, ends in config["box"].items()})
        own = str(program.dtype)
        by_dtype = {}
        for file, claim in certificates.items():
            dtype = file.removeprefix("certificate").removesuffix(".json").removeprefix(".") or own
            by_dtype[dtype] = _certificate(claim, dtype, box, config["expression"])
            if is_remembered(fingerprint(digests, file)):
                by_dtype[dtype] = dataclasses.replace(by_dtype[dtype], standing=Standing.REPROVED)
        file, certificate = "config.json", by_dtype.pop(own)
        _require_same("variables", config["variables"], list(box.names))
        if box.d != sum(math.prod(shape) for shape in program.input_shapes):
            raise InputError(f"a box of {box.d} variables for inputs of shape {program.input_shapes}")
        stated = _typed(config, "expression", str | None)
        is_defined = stated is not None and "=" in stated
        return Network(
            program,
            certificate,
            box,
            construction=_typed(config, "construction", str),
            expression=None if is_defined else stated,
            definitions=stated if is_defined else None,
            eps=_typed(config, "eps", float | int | None),
            parameters=_typed(config, "parameters", dict),
            command=_typed(config, "command", str | None),
            also=by_dtype,
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, InputError) as error:
        reason = f"the field {error} is missing" if isinstance(error, KeyError) else error
        raise FileError(f"{path}: {file} does not fit: {reason}") from None


def _certificate(claim: Mapping[str, Any], dtype: str, box: Box, expression: Any) -> Certificate:
    """Return the certificate, which must be of this dtype, box and expression."""
    certificate = Certificate.from_json(claim)
    _require_same("box", claim["box"], box.as_json())
    _require_same("expression", claim["expression"], expression)
    _require_same("dtype", certificate.dtype, dtype)
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"dtype: {dtype!r:.40} is none of {', '.join(UNIT_ROUNDOFF)}")
    return certificate


def _require_same(name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise ValueError(f"{name}: {found!r:.80} and {wanted!r:.80} do not agree")


def _typed(config: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = config[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key} is {value!r:.80}")
    return value
