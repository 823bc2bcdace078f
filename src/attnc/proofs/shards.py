"""Proofs as files: a shard has the leaves of a region of the box, in a compact binary form.

A shard is eight bytes of length, a JSON header of this length, and one record per leaf: the kind, the order and the
level in a byte each, the index along every axis as a 64-bit integer, and the bound of the leaf as a 64-bit float, all
little-endian and without gaps. Regions are ranges of the cells of one level, in the order of `dyadic.cells`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from attnc.errors import FileError, InputError
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Term
from attnc.proofs.cells.branching import MAX_LEVEL, Leaf
from attnc.proofs.cells.dyadic import Region
from attnc.proofs.proof import Leaves, Proof

SHARD_FORMAT = "attnc.shard/1"
STORED_KINDS = ("taylor", "selection")
"""The kinds of leaves in shards. A record has the place of its kind in this list."""
MAX_SHARD_HEADER = 2**16
"""Largest length of the header of a shard in bytes."""
HEADER_FIELDS = ("format", "weights_sha256", "task_sha256", "variables", "level", "first", "after", "leaves", "bound")
"""The fields of a header, besides the terms of its bound."""


def record(d: int) -> np.dtype[Any]:
    """Return the layout of a leaf in d variables."""
    return np.dtype([("kind", "u1"), ("order", "u1"), ("level", "u1"), ("index", "<u8", (d,)), ("bound", "<f8")])


@dataclass(frozen=True, eq=False)
class Shard:
    """The leaves of a region, as a file has them."""

    content: bytes

    @classmethod
    def of(cls, proof: Proof, d: int, region: Region, weights_sha256: str, task_sha256: str) -> Shard:
        """Return the shard of a proof of a region. Raise InputError if shards have no leaves of this kind."""
        if not isinstance(proof.evidence, Leaves) or not all(
            each.kind in STORED_KINDS for each in proof.evidence.leaves
        ):
            raise InputError("this network is proved by leaves that shards do not have: prove it in one piece")
        rows = np.zeros(len(proof.evidence.leaves), record(d))
        for row, leaf in zip(rows, proof.evidence.leaves, strict=True):
            row["kind"], row["order"] = STORED_KINDS.index(leaf.kind), leaf.order or 1
            row["level"], row["index"] = leaf.level, leaf.index
        rows["bound"] = proof.evidence.bounds
        header = {
            "format": SHARD_FORMAT,
            "weights_sha256": weights_sha256,
            "task_sha256": task_sha256,
            "variables": d,
            "level": region.level,
            "first": region.first,
            "after": region.after,
            "leaves": len(rows),
            "bound": float(rows["bound"].max()),
            "terms": [{"name": term.name, "value": term.value, "reason": term.reason} for term in proof.terms],
        }
        text = json.dumps(header, allow_nan=False, ensure_ascii=False).encode()
        return cls(len(text).to_bytes(8, "little") + text + rows.tobytes())

    @classmethod
    def read(cls, content: bytes, name: str) -> Shard:
        """Read a file. Raise FileError if it is cut, or states a field that does not fit its leaves."""
        shard = cls(content)
        try:
            header = shard.header
            if header["format"] != SHARD_FORMAT:
                raise FileError(
                    f"{name} has the format {header['format']!r:.40}, not {SHARD_FORMAT!r}: prove it again with this "
                    "version of attnc"
                )
            rows = shard.rows
            numbers = [header[field] for field in ("variables", "level", "first", "after", "leaves")]
            fits = all(type(x) is int and x >= 0 for x in numbers)
            fits = fits and header["leaves"] == len(rows) > 0 and header["variables"] > 0
            fits = fits and bool((rows["kind"] < len(STORED_KINDS)).all() and (rows["level"] <= MAX_LEVEL).all())
            fits = fits and float(header["bound"]) == float(rows["bound"].max())
            [Term(term["name"], float(term["value"]), term["reason"]) for term in header["terms"]]
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{name} is no whole shard: {error}") from None
        if not fits:
            raise FileError(f"{name} is no whole shard: its header does not fit its leaves")
        return shard

    @cached_property
    def _length(self) -> int:
        length = int.from_bytes(self.content[:8], "little")
        if not 0 < length <= min(MAX_SHARD_HEADER, len(self.content) - 8):
            raise ValueError("its header is cut")
        return length

    @cached_property
    def header(self) -> dict[str, Any]:
        header: dict[str, Any] = json.loads(self.content[8 : 8 + self._length])
        return header

    @cached_property
    def rows(self) -> np.ndarray:
        """The records of all leaves, without a copy."""
        return np.frombuffer(self.content, record(self.header["variables"]), offset=8 + self._length)

    @property
    def region(self) -> Region:
        return Region(*(self.header[name] for name in ("level", "first", "after")))

    @property
    def bound(self) -> float:
        return float(self.header["bound"])

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(Term(term["name"], term["value"], term["reason"]) for term in self.header["terms"])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def why_not_of(self, task_sha256: str, region: Region) -> str | None:
        """Return why this is not the shard of a region in a task, or None if it is. Coverage is counted in integers."""
        if self.header["task_sha256"] != task_sha256:
            return "it belongs to another request or another division into shards, or another version of attnc made it"
        if self.region != region:
            first, after = self.region.first, self.region.after
            return f"it proves the cells {first} to {after}, not {region.first} to {region.after}: it was renamed"
        d, rows = self.header["variables"], self.rows
        below = rows["level"].astype(np.int64) - region.level
        if (below < 0).any():
            return "a leaf is larger than the cells of its region"
        owners = Region.numbers(rows["index"].astype(np.int64) >> below[:, None], region.level)
        if not ((region.first <= owners) & (owners < region.after)).all():
            return "a leaf lies outside of its region"
        deepest = int(below.max())
        filled = sum(int(count) << d * (deepest - level) for level, count in enumerate(np.bincount(below)))
        if filled != (region.after - region.first) << d * deepest:
            return "its leaves do not cover its region"
        return None


@dataclass(frozen=True, eq=False)
class ShardedLeaves(Sequence[Leaf]):
    """The leaves of several shards, each made when it is read."""

    shards: tuple[Shard, ...]

    def __len__(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)

    @overload
    def __getitem__(self, n: int) -> Leaf: ...
    @overload
    def __getitem__(self, n: slice) -> tuple[Leaf, ...]: ...
    def __getitem__(self, n: int | slice) -> Leaf | tuple[Leaf, ...]:
        if isinstance(n, slice):
            return tuple(self[i] for i in range(*n.indices(len(self))))
        if not -len(self) <= n < len(self):
            raise IndexError(n)
        n %= len(self)
        for shard in self.shards:
            if n < len(shard.rows):
                return next(_leaves(shard.rows[n : n + 1]))
            n -= len(shard.rows)
        raise IndexError(n)

    def __iter__(self) -> Iterator[Leaf]:
        for shard in self.shards:
            yield from _leaves(shard.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedLeaves) and [s.digest for s in self.shards] == [s.digest for s in other.shards]

    __hash__ = None  # type: ignore[assignment]

    @property
    def bounds(self) -> Float[np.ndarray, " leaves"]:
        return np.concatenate([shard.rows["bound"] for shard in self.shards])

    def as_json(self) -> list[dict[str, Any]]:
        """Return the entries of a certificate. `content` is written to a file of its own."""
        return [
            {
                "sha256": shard.digest,
                **{name: shard.header[name] for name in HEADER_FIELDS[4:]},
                "content": shard.content,
            }
            for shard in self.shards
        ]

    @classmethod
    def from_json(cls, entries: Iterable[Any]) -> ShardedLeaves:
        """Read the entries of a certificate with their contents. Raise FileError or ValueError if they do not fit."""
        found = list[Shard]()
        for n, entry in enumerate(entries, 1):
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), bytes):
                raise ValueError(f"shard {n} has no file")
            shard = Shard.read(entry["content"], f"shard {n}")
            if any(entry.get(name) != shard.header[name] for name in HEADER_FIELDS[4:]):
                raise ValueError(f"the entry of shard {n} does not fit its file")
            found.append(shard)
        if len({shard.header["variables"] for shard in found}) != 1:
            raise ValueError("shards of different numbers of variables")
        return cls(tuple(found))


def _leaves(rows: np.ndarray) -> Iterator[Leaf]:
    columns = (rows[name].tolist() for name in ("kind", "order", "level", "index"))
    for kind, order, level, index in zip(*columns, strict=True):
        name = STORED_KINDS[kind]
        yield Leaf(name, order if name == "taylor" else None, level, tuple(index))
