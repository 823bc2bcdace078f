"""A saved network: a directory of config.json, model.safetensors, README.md and its certificates."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from attnc.errors import FileError, InputError
from attnc.exports.safe_files import (
    CONFIG,
    MAX_JSON_BYTES,
    MAX_TENSOR_BYTES,
    FolderKind,
    PathLike,
    pack_tensors,
    parse_json,
    read_bytes,
    read_tensors,
    require_format,
    write_whole,
)
from attnc.exports.tensors import decode, encode, layout
from attnc.ir.program import Program
from attnc.ir.spec import check

FORMAT_FAMILY = "attnc.network/"
FORMAT = f"{FORMAT_FAMILY}1"
WEIGHTS, CARD, TABLE = "model.safetensors", "README.md", "table.f64"
CERTIFICATE = re.compile(r"certificate(\.[A-Za-z0-9_-]+)?\.json")
SHARD = re.compile(r"certificate(\.[A-Za-z0-9_-]+)?\.[1-9][0-9]{0,5}-of-[1-9][0-9]{0,5}\.shard")
MAX_SHARD_BYTES = 2**28
"""Largest size of a shard in bytes: seven million leaves of three variables."""
MAX_SHARDS = 2**12
"""Most shards of a certificate."""
NETWORK = FolderKind(
    "a saved network",
    FORMAT_FAMILY,
    ("format",),
    lambda name: name in (CONFIG, WEIGHTS, CARD, TABLE) or CERTIFICATE.fullmatch(name) or SHARD.fullmatch(name),
)
STOCK_FAMILY = "attnc.stock/"
STOCK = FolderKind("a stock checkpoint", STOCK_FAMILY, ("attnc", "format"), NETWORK.is_part)
FIT = "fit.safetensors"
"""The prompt of an in-context program's fit, and its weights."""
IN_CONTEXT = FolderKind(
    "an in-context program", "attnc.incontext/", ("format",), lambda name: name == FIT or NETWORK.is_part(name)
)
MAX_CERTIFICATES = 3
"""The most certificates of a network: its own, and one for each of float32 and float64."""
RESERVED = ("format", "program", "certificates")
"""The keys of config.json that `save_network` writes by itself."""


def save_network(
    path: PathLike,
    program: Program,
    config: Mapping[str, Any],
    certificates: Mapping[str, Mapping[str, Any]],
    card: str,
) -> str:
    """Write the directory, whole or not at all. Return the SHA-256 of the weights, which the certificates state."""
    files = network_files(program, config, certificates, card)
    write_whole(path, files, NETWORK)
    return hashlib.sha256(files[WEIGHTS]).hexdigest()


def network_files(
    program: Program, config: Mapping[str, Any], certificates: Mapping[str, Mapping[str, Any]], card: str
) -> dict[str, bytes]:
    """Return the files of the directory by name. The certificates state the SHA-256 of the weights."""
    check(program)
    if taken := [key for key in RESERVED if key in config]:
        raise FileError(f"the configuration may not use the key {taken[0]!r}: the saved network writes it itself")
    for name in certificates:
        if not CERTIFICATE.fullmatch(name):
            raise FileError(f"a certificate is named certificate.json or certificate.<dtype>.json; found {name!r}")
    structure, tensors = encode(program)
    weights = pack_tensors(tensors)
    digest = hashlib.sha256(weights).hexdigest()
    whole = {"format": FORMAT, **config, "certificates": sorted(certificates), "program": structure}
    files = {CONFIG: json_bytes(whole, CONFIG), WEIGHTS: weights}
    for name, certificate in certificates.items():
        stated = {**certificate, "weights_sha256": digest}
        if "shards" in stated:
            stem, count = name.removesuffix(".json"), len(stated["shards"])
            named = {shard_name(stem, k, count): entry for k, entry in enumerate(stated["shards"], 1)}
            files |= {each: entry["content"] for each, entry in named.items()}
            stated["shards"] = [
                {"file": each, **{key: value for key, value in entry.items() if key != "content"}}
                for each, entry in named.items()
            ]
        if "table_file" in stated:
            entry = stated["table_file"]
            content = entry["content"] and entry["content"]()
            if content is not None:
                files[TABLE] = content
            stated["table_file"] = {key: value for key, value in entry.items() if key != "content"}
        files[name] = json_lines(stated, name)
    files[CARD] = utf8(card, CARD)
    return files


class SavedNetwork(NamedTuple):
    """The content of a folder: the arguments of `save_network`, and the SHA-256 of every file by its name."""

    program: Program
    config: dict[str, Any]
    certificates: dict[str, dict[str, Any]]
    digests: dict[str, str]


def load_network(path: PathLike, max_bytes: int = MAX_TENSOR_BYTES) -> SavedNetwork:
    """Read the folder of a saved network.

    Everything is checked before it is used, and sizes are checked before memory is allocated. `max_bytes` bounds the
    total size of the tensors.
    """
    folder = require_folder(path)
    digests: dict[str, str] = {}
    config = _read(folder, CONFIG, digests)
    if STOCK.includes(folder):
        raise FileError(
            f"cannot load {folder!r}: it is a stock checkpoint, which transformers loads. Its {CARD} shows how, and "
            "`attnc verify` proves its bound again."
        )
    refuse_in_context(folder)
    require_format(config.get("format"), FORMAT, f"cannot load {folder!r}: its {CONFIG}")
    for key in RESERVED:
        if key not in config:
            raise FileError(f"{folder!r}: {CONFIG} lacks the key {key!r}")
    structure = config["program"]
    try:
        expected = layout(structure)
    except FileError as error:
        raise FileError(f"{folder!r}: {CONFIG} does not describe a program: {error}") from error
    certificates = _read_certificates(folder, config["certificates"], digests)
    tensors, digest = read_tensors(os.path.join(folder, WEIGHTS), expected, max_bytes)
    digests[WEIGHTS] = digest
    for name, certificate in certificates.items():
        if certificate.get("weights_sha256") != digest:
            raise FileError(
                f"{os.path.join(folder, name)!r}: the certificate belongs to other weights: it states SHA-256 "
                f"{str(certificate.get('weights_sha256'))[:64]!r}, {WEIGHTS} has {digest!r}. Save the network again."
            )
    try:
        program = decode(structure, tensors)
    except FileError as error:
        raise FileError(f"cannot load {folder!r}: {error}") from error
    kept = {key: value for key, value in config.items() if key not in RESERVED}
    return SavedNetwork(program, kept, certificates, digests)


def folder_named(path: Any) -> PathLike:
    """Return the path of a saved network. Raise InputError if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a saved network is named by its folder, found {path!r:.80}")
    return path


def require_folder(path: PathLike) -> str:
    """Return the path of a folder as text. Raise FileError if there is none."""
    folder = os.fspath(path)
    if not os.path.isdir(folder):
        problem = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise FileError(f"cannot load {folder!r}: it {problem}. A saved network is a folder with a {CONFIG} in it.")
    return folder


def refuse_in_context(folder: str) -> None:
    """Raise FileError if a folder is an in-context program, which is not a network."""
    if IN_CONTEXT.includes(folder):
        raise FileError(
            f"{folder!r} is an in-context program, not a network. Load it by `attnc.incontext.load`. `attnc verify` "
            "proves its fit again, in one piece."
        )


def _read(folder: str, name: str, digests: dict[str, str]) -> dict[str, Any]:
    """Read a JSON file, and note the hash of the bytes that were read."""
    path = os.path.join(folder, name)
    raw = read_bytes(path, MAX_JSON_BYTES)
    digests[name] = hashlib.sha256(raw).hexdigest()
    return parse_json(raw, path)


def _read_certificates(folder: str, listed: Any, digests: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Read the certificates that the configuration lists, which must exist, and any others in the folder."""
    names = listed if isinstance(listed, list) else [None]
    if not all(isinstance(name, str) and CERTIFICATE.fullmatch(name) for name in names):
        raise FileError(f"{folder!r}: {CONFIG} does not list its certificates by name")
    try:
        found = [name for name in os.listdir(folder) if CERTIFICATE.fullmatch(name)]
    except OSError as error:
        raise FileError(f"cannot load {folder!r}: {error.strerror or error}") from error
    every = sorted({*listed, *found})
    if len(every) > MAX_CERTIFICATES:
        raise FileError(f"cannot load {folder!r}: it has {len(every):,} certificates, more than {MAX_CERTIFICATES}")
    return {name: _with_shards(folder, name, _read(folder, name, digests)) for name in every}


def shard_name(stem: str, k: int, n: int) -> str:
    """Return the name of the file of shard k of n."""
    return f"{stem}.{k}-of-{n}.shard"


def _with_shards(folder: str, name: str, certificate: dict[str, Any]) -> dict[str, Any]:
    """Return a certificate with the contents of its shards, whose hashes it states."""
    if "shards" not in certificate:
        return certificate
    entries, found = certificate["shards"], []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FileError(f"{folder!r}: {name} does not list its shards")
    if len(entries) > MAX_SHARDS:
        raise FileError(f"{folder!r}: {name} lists {len(entries):,} shards, more than {MAX_SHARDS:,}")
    for k, entry in enumerate(entries, 1):
        path = os.path.join(folder, shard_name(name.removesuffix(".json"), k, len(entries)))
        if entry.get("file") != os.path.basename(path):
            raise FileError(f"{folder!r}: {name} names shard {k} {entry.get('file')!r:.60}, not {path!r}")
        content = read_bytes(path, MAX_SHARD_BYTES)
        if hashlib.sha256(content).hexdigest() != entry.get("sha256"):
            raise FileError(f"{path!r} is not the shard that {name} states: its SHA-256 is another one")
        found.append({**{key: value for key, value in entry.items() if key != "file"}, "content": content})
    return {**certificate, "shards": found}


def json_bytes(value: Any, name: str) -> bytes:
    """Return a JSON file that `read_json` can read back."""
    return _readable(_json_text(value, name, indent=2) + "\n", name)


def json_lines(value: Mapping[str, Any], name: str) -> bytes:
    """Return one line per key. Certificates can be long, and json writes ten times faster without indentation."""
    lines = [_json_text({key: member}, name)[1:-1] for key, member in value.items()]
    return _readable("{\n  " + ",\n  ".join(lines) + "\n}\n", name)


def _json_text(value: Any, name: str, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError(f"cannot write {name}: {error}") from error


def _readable(text: str, name: str) -> bytes:
    """Return the bytes of a JSON text that `read_json` can read back."""
    raw = utf8(text, name)
    try:
        parse_json(raw, name)
    except FileError as error:
        raise FileError(f"cannot write a file that could not be read back: {error}") from error
    return raw


def utf8(text: str, name: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FileError(f"cannot write {name}: {error}") from error
