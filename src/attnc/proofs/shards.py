"""Proofs as files: a shard has the leaves of a region of the box, the bound at rows of a table, or leaves of heads.

A shard is eight bytes of length, a JSON header of this length, and records, all little-endian and without gaps. That of
a region has a record per leaf: the kind, the order and the level in a byte each, the index along every axis as a 64-bit
integer, and the bound of the leaf as a 64-bit float. Regions are ranges of the cells of one level, in the order of
`dyadic.cells`.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, overload

import numpy as np

from attnc.errors import FileError, InputError
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Term
from attnc.proofs.cells.branching import MAX_LEVEL, Covering, Leaf
from attnc.proofs.cells.dyadic import Region
from attnc.proofs.kinds.point import WorstRow
from attnc.proofs.proof import Leaves, Proof
from attnc.proofs.staged.lines import LineClaim
from attnc.proofs.staged.prover import GroupProof

SHARD_FORMAT, ROWS_FORMAT, HEADS_FORMAT = "attnc.shard/1", "attnc.shard.rows/1", "attnc.shard.heads/1"
STORED_KINDS = ("taylor", "selection")
"""The kinds of leaves in shards. A record has the place of its kind in this list."""
MAX_SHARD_HEADER = 2**16
"""Largest length of the header of a shard in bytes."""
HEADER_FIELDS = ("format", "weights_sha256", "task_sha256", "variables", "level", "first", "after", "leaves", "bound")
"""The fields of a header, besides the terms of its bound."""
GROUP = np.dtype([("number", "<u4"), ("leaves", "<u4"), ("signed", "<u4"), ("complete", "u1"), ("rounding", "<f8")])
"""The layout of a group of heads: its number, the numbers of its leaves, and the rounding on them."""
LINE_LEAF = np.dtype([("kind", "u1"), ("level", "u1"), ("index", "<u8"), ("bound", "<f8"), ("middle", "<f8")])
"""The layout of a leaf of a group of heads."""


def record(d: int) -> np.dtype[Any]:
    """Return the layout of a leaf in d variables."""
    return np.dtype([("kind", "u1"), ("order", "u1"), ("level", "u1"), ("index", "<u8", (d,)), ("bound", "<f8")])


@dataclass(frozen=True, eq=False)
class ShardFile(abc.ABC):
    """A part of a proof, as a file has it: a header and records."""

    content: bytes
    format: ClassVar[str]

    @classmethod
    def made(cls, task: Mapping[str, str], fields: Mapping[str, Any], bound: float, *records: np.ndarray) -> Self:
        """Return the file of a bound. `task` has the hashes of the weights and of the request."""
        header = {"format": cls.format, **task, **fields, "bound": bound}
        text = json.dumps(header, allow_nan=False, ensure_ascii=False).encode()
        if len(text) > MAX_SHARD_HEADER:
            raise InputError("the header of a shard is too long: prove this network in one piece")
        return cls(len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in records))

    @classmethod
    def read(cls, content: bytes, name: str) -> Self:
        """Read a file. Raise FileError if it is cut, or states a field that does not fit its records."""
        shard = cls(content)
        try:
            header = shard.header
            if header["format"] != cls.format:
                raise FileError(
                    f"{name} has the format {header['format']!r:.40}, not {cls.format!r}: prove it again with this "
                    "version of attnc"
                )
            bound = float(header["bound"])
            fits = math.isfinite(bound) and bound >= 0 and shard.fits
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{name} is no whole shard: {error}") from None
        if not fits:
            raise FileError(f"{name} is no whole shard: its header does not fit its records")
        return shard

    @property
    @abc.abstractmethod
    def fits(self) -> bool:
        """Whether the header fits the records. May raise KeyError, TypeError or ValueError."""

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

    @property
    def start(self) -> int:
        """The number of bytes before the records."""
        return 8 + self._length

    @property
    def bound(self) -> float:
        return float(self.header["bound"])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def why_not_of(self, task: Mapping[str, str]) -> str | None:
        """Return why this shard does not belong to a task, or None if it does."""
        if self.header["weights_sha256"] != task["weights_sha256"]:
            return "it belongs to another network"
        if self.header["task_sha256"] != task["task_sha256"]:
            return "it belongs to another request or another division into shards, or another version of attnc made it"
        return None

    def whole_numbers(self, *fields: str) -> list[int]:
        """Return these fields of the header. Raise ValueError unless they are whole numbers from 0 on."""
        numbers = [self.header[field] for field in fields]
        if not all(type(x) is int and x >= 0 for x in numbers):
            raise ValueError(f"{', '.join(fields)} are no whole numbers")
        return numbers


@dataclass(frozen=True, eq=False)
class Shard(ShardFile):
    """The leaves of a region."""

    format = SHARD_FORMAT

    @classmethod
    def of(cls, proof: Proof, d: int, region: Region, task: Mapping[str, str]) -> Shard:
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
        fields = {
            "variables": d,
            "level": region.level,
            "first": region.first,
            "after": region.after,
            "leaves": len(rows),
            "terms": [{"name": term.name, "value": term.value, "reason": term.reason} for term in proof.terms],
        }
        return cls.made(task, fields, float(rows["bound"].max()), rows)

    @property
    def fits(self) -> bool:
        _, _, _, leaves, d = self.whole_numbers("level", "first", "after", "leaves", "variables")
        rows = self.rows
        fits = leaves == len(rows) > 0 and d > 0 and self.bound == float(rows["bound"].max())
        [Term(term["name"], float(term["value"]), term["reason"]) for term in self.header["terms"]]
        return fits and bool((rows["kind"] < len(STORED_KINDS)).all() and (rows["level"] <= MAX_LEVEL).all())

    @cached_property
    def rows(self) -> np.ndarray:
        """The records of all leaves, without a copy."""
        return np.frombuffer(self.content, record(self.header["variables"]), offset=self.start)

    @property
    def region(self) -> Region:
        return Region(*(self.header[name] for name in ("level", "first", "after")))

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(Term(term["name"], term["value"], term["reason"]) for term in self.header["terms"])

    def why_not_covering(self, region: Region) -> str | None:
        """Return why this is not the shard of a region, or None if it is. Coverage is counted in integers."""
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
class RowShard(ShardFile):
    """A bound at the rows `first` to `after` of a table, and its parts: there are no records."""

    format = ROWS_FORMAT

    @classmethod
    def of(cls, worst: WorstRow, first: int, after: int, task: Mapping[str, str]) -> RowShard:
        fields = {"first": first, "after": after, "approximation": worst.approximation, "rounding": worst.rounding}
        return cls.made(task, fields, worst.bound)

    @property
    def fits(self) -> bool:
        first, after = self.whole_numbers("first", "after")
        return first < after and len(self.content) == self.start and 0 <= self.worst.approximation <= self.bound

    @property
    def worst(self) -> WorstRow:
        return WorstRow(*(float(self.header[name]) for name in ("bound", "approximation", "rounding")))

    def why_not_rows(self, first: int, after: int) -> str | None:
        """Return why this is not the shard of these rows, or None if it is."""
        found = self.header["first"], self.header["after"]
        if found == (first, after):
            return None
        return f"it proves the rows {found[0]} to {found[1]}, not {first} to {after}: it was renamed"


@dataclass(frozen=True, eq=False)
class HeadShard(ShardFile):
    """The leaves of some groups of heads. Each group has leaves for its largest error, and perhaps leaves with signs.

    The records are those of all groups, and then their leaves: group by group, those with signs after the others.
    """

    format = HEADS_FORMAT

    @classmethod
    def of(cls, proofs: Mapping[int, GroupProof], task: Mapping[str, str]) -> HeadShard:
        groups, leaves = np.zeros(len(proofs), GROUP), [np.zeros(0, LINE_LEAF)]
        for row, (number, proof) in zip(groups, proofs.items(), strict=True):
            signed = np.zeros(0, LINE_LEAF) if proof.signed is None else _line_leaves(*proof.signed)
            plain = _line_leaves(proof.leaves, np.zeros(len(proof.leaves.cells)))
            row["number"], row["leaves"], row["signed"] = number, len(plain), len(signed)
            row["complete"], row["rounding"] = proof.leaves.complete, proof.rounding
            leaves += [plain, signed]
        rows = np.concatenate(leaves)
        fields = {"groups": len(groups), "leaves": len(rows)}
        return cls.made(task, fields, float(rows["bound"].max(initial=0.0)), groups, rows)

    @property
    def fits(self) -> bool:
        groups, leaves = self.groups, self.leaves
        count = int(groups["leaves"].sum(dtype=np.int64) + groups["signed"].sum(dtype=np.int64))
        fits = count == len(leaves) == self.header["leaves"] and bool((groups["leaves"] > 0).all())
        fits = fits and bool((groups["rounding"] >= 0).all() and (leaves["level"] <= MAX_LEVEL).all())
        fits = fits and bool((leaves["index"] < np.uint64(1) << leaves["level"].astype(np.uint64)).all())
        return fits and self.bound == float(leaves["bound"].max(initial=0.0))

    @cached_property
    def groups(self) -> np.ndarray:
        (count,) = self.whole_numbers("groups")
        return np.frombuffer(self.content, GROUP, count, self.start)

    @cached_property
    def leaves(self) -> np.ndarray:
        return np.frombuffer(self.content, LINE_LEAF, offset=self.start + self.groups.nbytes)

    def why_not_groups(self, numbers: Sequence[int]) -> str | None:
        """Return why these are not the groups of this shard, or None if they are."""
        found = self.groups["number"].tolist()
        if found == list(numbers):
            return None
        return f"it proves the groups of heads {found!r:.60}, not {list(numbers)!r:.60}: it was renamed"

    def proofs(self) -> Iterator[tuple[int, GroupRecord]]:
        """Yield the number and the records of every group."""
        end = 0
        for number, leaves, signed, complete, rounding in self.groups.tolist():
            plain, end = self.leaves[end : end + leaves], end + leaves
            with_signs, end = self.leaves[end : end + signed], end + signed
            yield number, GroupRecord(plain, with_signs, bool(complete), rounding)


class GroupRecord(NamedTuple):
    """The records of a group of heads: its leaves, those with signs, and the rounding on them."""

    leaves: np.ndarray
    signed: np.ndarray
    is_complete: bool
    rounding: float

    def proof(self, claim: LineClaim) -> GroupProof:
        """Return the proof of a claim. Raise ValueError if the leaves do not divide its interval."""
        signed = None
        if len(self.signed):
            signed = _covering_of(claim, self.signed), self.signed["middle"].astype(np.float64)
        leaves = dataclasses.replace(_covering_of(claim, self.leaves), complete=self.is_complete)
        return GroupProof(leaves, self.rounding, signed)


def _line_leaves(proof: Covering, middles: np.ndarray) -> np.ndarray:
    """Return the records of the leaves of a group."""
    rows = np.zeros(len(middles), LINE_LEAF)
    rows["kind"], rows["level"], rows["index"] = proof.cells.kind, proof.cells.level, proof.cells.index[:, 0]
    rows["bound"], rows["middle"] = proof.cells.upper[:, 0], middles
    return rows


def _covering_of(claim: LineClaim, rows: np.ndarray) -> Covering:
    level, index = rows["level"].astype(np.int64), rows["index"].astype(np.int64)
    deepest = int(level.max())
    begins = index << deepest - level
    order = np.argsort(begins)
    ends = (begins + (np.int64(1) << deepest - level))[order]
    if begins[order[0]] != 0 or ends[-1] != 1 << deepest or (begins[order][1:] != ends[:-1]).any():
        raise ValueError("the leaves of a group do not divide its interval")
    if (rows["kind"] >= len(claim.kinds)).any() or not (np.abs(rows["middle"]) <= rows["bound"]).all():
        raise ValueError("a leaf of a group has an unknown kind, or a middle above its bound")
    return claim.covering(level, index, rows["kind"].astype(np.int64), rows["bound"].astype(np.float64))


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
