"""A check in parts: the leaves are proved in n shards, anywhere, and verdict files are merged to one verdict.

A verdict file is the claim of its maker. The merge refuses files that do not fit the network, this checker, each other
or themselves, and re-proves a random sample of blocks itself. A block is up to AT_ONCE leaves that follow each other.
The bounds that are found on a block depend on its leaves alone, so those of the sample must be exactly the stated ones.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import random
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnc_checker.files import BadFile, Object, Refused, read_bytes, read_json, require, typed
from attnc_checker.proving import AT_ONCE, Job, Proof

FORMAT = "attnc.verdict/1"
VERDICTS = "verdicts"
NAME = re.compile(r"([1-9][0-9]{0,5})-of-([1-9][0-9]{0,5})\.json")
MAX_FILE = 2**30
"""Largest number of bytes of a file that a verdict is about."""
SAMPLE = 16
"""The number of blocks that a merge proves again. If a tenth of the blocks is wrong, it finds one with 81 %."""
PARTS = ("certificate", "config.json", "model.safetensors")


def checker() -> str:
    """Return the name and the versions of this checker."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("attnc", "python-flint"))
    return ", ".join(versions)


def blocks(jobs: Sequence[Job]) -> list[list[Job]]:
    """Divide all jobs into blocks."""
    return [list(jobs[i : i + AT_ONCE]) for i in range(0, len(jobs), AT_ONCE)]


def range_of(count: int, k: int, n: int) -> tuple[int, int]:
    """Return the first block of shard k of n, and the one after its last."""
    return count * (k - 1) // n, count * k // n


def hashes(folder: Path, name: str) -> dict[str, str]:
    """Return the SHA-256 of the files that a verdict is about. The certificate states those of its shards."""
    files = dict(zip(PARTS, (name, *PARTS[1:]), strict=True))
    return {part: hashlib.sha256(read_bytes(folder / file, MAX_FILE)).hexdigest() for part, file in files.items()}


def statement(k: int, n: int, claims: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a verdict file. Its hash shows accidents, and no lies."""
    stated = {"format": FORMAT, "checker": checker(), "shard": k, "of": n, "claims": claims}
    return {**stated, "sha256": _digest(stated)}


def _digest(stated: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def write(folder: Path, stated: dict[str, Any]) -> Path:
    """Write a verdict file, whole or not at all."""
    place = folder / VERDICTS
    path = place / f"{stated['shard']}-of-{stated['of']}.json"
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        place.mkdir(exist_ok=True)
        try:
            new.write_text(json.dumps(stated) + "\n", encoding="utf-8")
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise BadFile(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def read_all(folder: Path) -> list[Object]:
    """Read the verdict files of a folder, in order. Refuse unless there is exactly one for every shard."""
    place = folder / VERDICTS
    require(place.is_dir(), f"{place} is missing: prove shards first, with --shard k/n", BadFile)
    named = {path: found for path in sorted(place.iterdir()) if (found := NAME.fullmatch(path.name))}
    require(bool(named), f"{place} has no verdict files: prove shards first, with --shard k/n", BadFile)
    counts = {int(found[2]) for found in named.values()}
    require(len(counts) == 1, f"{place} has verdicts of {len(counts)} divisions: remove those of all but one")
    (n,) = counts
    by_number = {int(found[1]): path for path, found in named.items()}
    missing = [k for k in range(1, n + 1) if k not in by_number]
    more = " …" if len(missing) > 10 else ""
    listed = ", ".join(f"{k}/{n}" for k in missing[:10])
    require(not missing, f"{len(missing):,} of {n:,} verdicts are missing: {listed}{more}")
    require(len(by_number) == n, f"{place} has verdicts beyond {n} of {n}: remove them")
    stated, seen = list[Object](), dict[object, str]()
    for k in range(1, n + 1):
        path = by_number[k]
        data = read_json(path)
        if data.get("format") != FORMAT:
            raise BadFile(
                f"{path.name} has the format {data.get('format')!r:.40}, not {FORMAT!r}: prove the shard again"
            )
        own = {key: value for key, value in data.items() if key != "sha256"}
        require(_digest(own) == data.get("sha256"), f"{path.name} was changed: its SHA-256 is not the one it states")
        require(
            data.get("checker") == checker(),
            f"{path.name} was made by {data.get('checker')!r:.80}, and this is {checker()}: prove the shard again",
        )
        number = data.get("shard")
        require(
            number not in seen, f"{path.name} has the verdict on shard {number}, which {seen.get(number)} has already"
        )
        seen[number] = path.name
        require(
            number == k and data.get("of") == n, f"{path.name} has the verdict on shard {number} of {data.get('of')}"
        )
        stated.append(data)
    return stated


def found_in(data: Object, name: str, folder: Path, proof: Proof, files: dict[str, str]) -> list[float]:
    """Return the bounds that a verdict file states for a certificate. Refuse them if they do not fit."""
    k, n = typed(data["shard"], int, "shard"), typed(data["of"], int, "of")
    about = f"{k}-of-{n}.json"
    claims = typed(data.get("claims"), dict, "claims")
    require(name in claims, f"{about} has no verdict on {name}")
    claim = typed(claims[name], dict, f"claims.{name}")
    for part in PARTS:
        is_same = claim.get(part) == files[part]
        require(is_same, f"{about} is about another network: {part} has another SHA-256 in {folder}")
    jobs = proof.jobs
    all_blocks = blocks(jobs)
    first, after = range_of(len(all_blocks), k, n)
    is_own = claim.get("blocks") == [first, after] and claim.get("leaves") == len(jobs)
    require(
        is_own, f"{about} is about the blocks {claim.get('blocks')!r:.40}, and shard {k} of {n} has {first} to {after}"
    )
    found = typed(claim.get("found"), tuple[float, ...], "found")
    own = [job for block in all_blocks[first:after] for job in block]
    require(len(found) == len(own), f"{about} has {len(found):,} bounds for {len(own):,} leaves")
    for job, bound in zip(own, found, strict=True):
        subject, leaf = proof.subjects[job[0]], job[1]
        require(subject.allows(leaf, bound), f"{about} states the bound {bound:.6g} on a leaf, above the claim")
    return list(found)


def sampled(proof: Proof, found: Sequence[float]) -> int:
    """Prove a random sample of blocks again, and return the number of its leaves. Refuse any other bounds."""
    every = blocks(proof.jobs)
    chosen = sorted(random.SystemRandom().sample(range(len(every)), min(SAMPLE, len(every))))
    count = 0
    for number in chosen:
        again = proof.prove_block(every[number])
        start = number * AT_ONCE
        if again != list(found[start : start + len(again)]):
            raise Refused(
                f"the leaves {start:,} to {start + len(again):,} have other bounds than a verdict file states: it is "
                "wrong, or was made on a machine whose arithmetic is. Prove its shard again."
            )
        count += len(again)
    return count
