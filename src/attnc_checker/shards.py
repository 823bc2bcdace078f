"""Leaves in files of their own, each with those of a region of the box. They are read strictly, and kept as bytes.

A shard is eight bytes of length, a JSON header of this length, and a record for each leaf: kind, order and level in a
byte each, the index along every axis as a 64-bit integer, and the bound as a 64-bit float, little-endian, without gaps.
A region is a range of the cells of one level. The number of a cell has the bits of its indices in turns: the coarsest
first, and the first axis first.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

from attnc_checker.cells import SELECTION, TAYLOR, Cell, Leaf, checked_leaf, require_divided
from attnc_checker.files import BadFile, Object, Refused, field, parse_json, read_bytes, require, typed

FORMAT = "attnc.shard/1"
KINDS = (TAYLOR, SELECTION)
"""The kinds of leaves that shards have. A record has the place of its kind."""
MAX_SHARD, MAX_SHARDS, MAX_SHARD_HEADER = 2**28, 2**12, 2**16
"""Largest numbers of bytes of a shard, of shards, and of bytes of a header."""
MAX_REGION_BITS = 62
"""Largest number of bits of the number of a cell in a region."""
ENTRY = ("level", "first", "after", "leaves")
"""The numbers that the entry of a shard in the certificate and its header both state."""


class Records(NamedTuple):
    """The leaves of one shard: their number, the layout of a record, and the bytes from `start` on."""

    num_leaves: int
    layout: struct.Struct
    content: bytes
    start: int

    def leaf(self, n: int) -> Leaf:
        kind, order, level, *index, _ = self.layout.unpack_from(self.content, self.start + n * self.layout.size)
        return Leaf(KINDS[kind], order, (level, tuple(index)))

    def bounds(self) -> Iterator[float]:
        return (numbers[-1] for numbers in self.layout.iter_unpack(memoryview(self.content)[self.start :]))


class ShardLeaves(Sequence[Leaf]):
    """The leaves of all shards. A leaf is made of its record whenever it is needed."""

    def __init__(self, shards: list[Records]) -> None:
        self.shards, self.ends = shards, [*itertools.accumulate(shard.num_leaves for shard in shards)]

    def __len__(self) -> int:
        return self.ends[-1]

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bounds of all leaves, which L_p norms need."""
        return tuple(itertools.chain.from_iterable(shard.bounds() for shard in self.shards))

    @overload
    def __getitem__(self, n: int) -> Leaf: ...
    @overload
    def __getitem__(self, n: slice) -> Sequence[Leaf]: ...
    def __getitem__(self, n: int | slice) -> Leaf | Sequence[Leaf]:
        if isinstance(n, slice):
            return [self[i] for i in range(*n.indices(len(self)))]
        if not 0 <= n < len(self):
            raise IndexError(n)
        for shard, end in zip(self.shards, self.ends, strict=True):
            if n < end:
                return shard.leaf(n - end + shard.num_leaves)
        raise IndexError(n)


def read_shards(folder: Path, name: str, data: Object, d: int, bound: float) -> ShardLeaves:
    """Read the shards that the certificate `name` lists. Refuse unless they divide the box into leaves,
    each with a bound that is at most `bound`.

    Everything is counted in integers: regions follow each other from the first cell to the last, and the leaves of each
    divide its region.
    """
    entries = [typed(entry, dict, "shards") for entry in field(data, "shards", list)]
    require(0 < len(entries) <= MAX_SHARDS, f"there are {len(entries):,} shards, not 1 to {MAX_SHARDS:,}", BadFile)
    require(not data["leaves"] and not data.get("leaf_bounds"), "a certificate has leaves of its own or shards")
    found, end, levels = list[Records](), 0, set[int]()
    stem, count = name.removesuffix(".json"), len(entries)
    for k, entry in enumerate(entries, 1):
        file = f"{stem}.{k}-of-{count}.shard"
        if field(entry, "file", str, f"shards[{k - 1}].") != file:
            raise Refused(f"shard {k} of {count} is named {entry['file']!r:.60}, not {file!r}: shards were reordered")
        level, first, after, leaves = (field(entry, each, int, f"shards[{k - 1}].") for each in ENTRY)
        levels.add(level)
        require(len(levels) == 1, f"{file} is a region of another level than the shards before it")
        require(level >= 0 and d * level <= MAX_REGION_BITS, f"{file} has the level {level}, which is not read here")
        require(first <= end, f"the shards do not cover the box: the cells {end} to {first} before {file} are missing")
        require(first >= end, f"the shards overlap: {file} begins at cell {first}, and those before it end at {end}")
        require(first < after, f"{file} has an empty region")
        content = _content(folder / file)
        digest = hashlib.sha256(content).hexdigest()
        require(
            digest == entry.get("sha256"), f"{file} was changed: its SHA-256 is {digest}, and the certificate's not"
        )
        records, header = _records(content, file, d)
        require(header.get("weights_sha256") == data["weights_sha256"], f"{file} belongs to another network")
        same = all(header.get(each) == entry[each] for each in ENTRY)
        require(same and records.num_leaves == leaves, f"{file} and the certificate differ in the region or the leaves")
        require_region(records, file, d, level, (first, after))
        require(all(0 <= x <= bound for x in records.bounds()), f"{file} has a bound that is not between 0 and {bound}")
        found.append(records)
        end = after
    whole = 1 << d * levels.pop()
    require(end >= whole, f"the shards do not cover the box: the cells {end} to {whole} after the last are missing")
    require(end == whole, f"the shards end at cell {end}, and the box at {whole}")
    return ShardLeaves(found)


def _content(path: Path) -> bytes:
    require(path.exists(), f"{path.name} is missing", BadFile)
    return read_bytes(path, MAX_SHARD)


def _records(content: bytes, file: str, d: int) -> tuple[Records, Object]:
    """Return the records and the header of a shard. Every record is checked."""
    length = int.from_bytes(content[:8], "little")
    require(8 < 8 + length <= min(len(content), 8 + MAX_SHARD_HEADER), f"{file} is cut, or is no shard", BadFile)
    header = parse_json(content[8 : 8 + length], f"the header of {file}")
    if header.get("format") != FORMAT:
        raise BadFile(
            f"{file} has the format {header.get('format')!r:.40}, not {FORMAT!r}: check it with the version of attnc "
            "that wrote it"
        )
    require(header.get("variables") == d, f"{file} is not about {d} variable(s)")
    layout = struct.Struct(f"<3B{d}Qd")
    count, rest = divmod(len(content) - 8 - length, layout.size)
    require(rest == 0 and count > 0, f"{file} is cut: it has no whole number of leaves", BadFile)
    records = Records(count, layout, content, 8 + length)
    for kind, order, level, *index, bound in layout.iter_unpack(memoryview(content)[8 + length :]):
        require(kind < len(KINDS), f"{file} has a leaf of an unknown kind", BadFile)
        require(math.isfinite(bound), f"{file} has a bound that is no number", BadFile)
        checked_leaf(KINDS[kind], order, level, index, d)
    return records, header


def require_region(records: Records, file: str, d: int, level: int, region: tuple[int, int]) -> None:
    """Refuse unless the leaves divide the region."""
    cells = [_cell(records.leaf(n)) for n in range(records.num_leaves)]
    require(all(cell[0] >= level for cell in cells), f"{file} has a leaf that is larger than the cells of its region")
    inside = require_divided(cells, d, level, f"the leaves of {file} do not divide its region")
    numbers = {_number(index, level) for index in inside}
    first, after = region
    require(all(first <= n < after for n in numbers), f"{file} has a leaf outside of its region")
    require(len(numbers) == after - first, f"the leaves of {file} do not cover its region")


def _cell(leaf: Leaf) -> Cell:
    assert leaf.cell is not None
    return leaf.cell


def _number(index: Sequence[int], level: int) -> int:
    number = 0
    for depth in reversed(range(level)):
        for i in index:
            number = 2 * number + (i >> depth & 1)
    return number
