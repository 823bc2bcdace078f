"""Object code of x86-64 Linux as a shared library with one function, linked without a linker.

The code refers to its own sections, and to a few functions of the C library. References to the former are filled in
here, because their distances do not change when the file is loaded. A function of the C library is called by a jump
through a table, into which the loader writes its address. Anything else raises NotLinked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

C_FUNCTIONS = frozenset({"memcpy", "memmove", "memset", "sqrt", "sqrtf"})
"""The functions that LLVM calls on its own account. Every process with Python and torch has them."""
PAGE = 4096
HEADER, PROGRAM, SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")
SYMBOL, RELOCATION, DYNAMIC = struct.Struct("<IBBHQQ"), struct.Struct("<QQq"), struct.Struct("<qQ")
RELATIVE, CALL, TO_TABLE, TABLE_ENTRY = 2, 4, (9, 41, 42), 6
"""Kinds of references: PC32, PLT32, three GOTPCRELs, and GLOB_DAT."""
WRITTEN, ALLOCATED = 1, 2
X86_64, FUNCTION = 62, 0x12
JUMP = 6
"""Number of bytes of a jump through the table."""


class NotLinked(Exception):
    """The object has something that is not linked here."""


@dataclass(frozen=True)
class Section:
    """The header of a section: the numbers of the file format that are used here."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


@dataclass(eq=False)
class ObjectFile:
    """The sections and symbols of an object file."""

    content: bytes
    sections: list[Section] = field(init=False)
    symbols: list[tuple[str, int, int, int]] = field(init=False)  # name, section, value and size

    def __post_init__(self) -> None:
        if len(self.content) < HEADER.size or self.content[:6] != b"\x7fELF\x02\x01":
            raise NotLinked("this is no object file of 64 bits")
        _, kind, machine, _, _, _, at, _, _, _, _, size, count, _ = HEADER.unpack_from(self.content)
        if (kind, machine, size) != (1, X86_64, SECTION.size):
            raise NotLinked("this is no object file of x86-64")
        self.sections = [Section(*SECTION.unpack_from(self.content, at + i * size)) for i in range(count)]
        self.symbols = []
        for table in self.of_kind(2):
            strings = self.sections[table.link].offset
            for start in range(table.offset, table.offset + table.size, SYMBOL.size):
                name, _, _, section, value, length = SYMBOL.unpack_from(self.content, start)
                end = self.content.index(b"\0", strings + name)
                self.symbols.append((self.content[strings + name : end].decode(), section, value, length))

    def of_kind(self, kind: int) -> list[Section]:
        return [section for section in self.sections if section.kind == kind]

    def kept(self) -> dict[int, Section]:
        """Return the sections with code and constants, by number."""
        loaded = {i: each for i, each in enumerate(self.sections) if each.flags & ALLOCATED and each.size}
        if any(each.flags & WRITTEN for each in loaded.values()):
            raise NotLinked("the object has variables")
        return {i: each for i, each in loaded.items() if each.kind == 1}  # others hold tables for debuggers


@dataclass(frozen=True)
class Layout:
    """The places of all parts in the file, which are also those in memory.

    The first page or pages hold headers, tables for the loader, code and constants. The next page holds the table of
    addresses that the loader writes, and behind it the list of all tables.
    """

    hash: int
    symbols: int
    names: int
    entries: int
    sections: dict[int, int]
    jumps: int
    addresses: int

    @classmethod
    def of(cls, kept: dict[int, Section], num_external: int, num_letters: int) -> Layout:
        sizes = [4 * (5 + num_external), SYMBOL.size * (2 + num_external), num_letters, RELOCATION.size * num_external]
        end, places = HEADER.size + 4 * PROGRAM.size, list[int]()
        for size in sizes:
            places.append(_aligned(end, 8))
            end = places[-1] + size
        sections = dict[int, int]()
        for number, section in kept.items():
            sections[number] = _aligned(end, section.alignment)
            end = sections[number] + section.size
        return cls(places[0], places[1], places[2], places[3], sections, end, _aligned(end + JUMP * num_external, PAGE))

    def jump(self, i: int) -> int:
        """Return the place of the jump to a function of the C library."""
        return self.jumps + JUMP * i

    def address(self, i: int) -> int:
        return self.addresses + 8 * i


def linked(content: bytes, entry: str) -> bytes:
    """Return a shared library whose only function is `entry` of the object file."""
    given = ObjectFile(content)
    kept = given.kept()
    references = [
        (table.info, *RELOCATION.unpack_from(content, start))
        for table in given.of_kind(4)
        if table.info in kept
        for start in range(table.offset, table.offset + table.size, RELOCATION.size)
    ]
    used = {given.symbols[info >> 32] for _, _, info, _ in references}
    external = sorted({name for name, section, _, _ in used if section == 0})
    if unknown := set(external) - C_FUNCTIONS:
        raise NotLinked(f"the object calls {', '.join(sorted(unknown))}")
    names = [entry, *external]
    layout = Layout.of(kept, len(external), len(_joined(names)))
    image = bytearray(layout.addresses)
    for number, section in kept.items():
        place = layout.sections[number]
        image[place : place + section.size] = content[section.offset : section.offset + section.size]
    for number, offset, info, addend in references:
        name, target, value, _ = given.symbols[info >> 32]
        kind, at = info & 0xFFFFFFFF, layout.sections[number] + offset
        if kind in (RELATIVE, CALL) and target in kept:
            aim = layout.sections[target] + value
        elif kind == CALL and target == 0:
            aim = layout.jump(external.index(name))
        elif kind in TO_TABLE and target == 0:
            aim = layout.address(external.index(name))
        else:
            raise NotLinked(f"the object has a reference of kind {kind} to {name or 'a section'}")
        struct.pack_into("<i", image, at, aim + addend - at)
    found = [(target, value, length) for name, target, value, length in given.symbols if name == entry]
    if len(found) != 1 or found[0][0] not in kept:
        raise NotLinked(f"the object has no function {entry}")
    target, value, length = found[0]
    _write_tables(image, layout, names, layout.sections[target] + value, length)
    end = _list_of_tables(layout, names)
    _write_headers(image, layout, len(external), len(end))
    return bytes(image) + bytes(8 * len(external)) + end


def _joined(names: list[str]) -> bytes:
    return b"\0" + b"".join(name.encode() + b"\0" for name in names)


def _write_tables(image: bytearray, layout: Layout, names: list[str], function: int, length: int) -> None:
    """Write the symbols with their names, the addresses that the loader fills in, and the jumps to them."""
    count, text = 1 + len(names), _joined(names)
    image[layout.names : layout.names + len(text)] = text
    struct.pack_into(f"<{3 + count}I", image, layout.hash, 1, count, 1, *[0] * count)  # one bucket, with symbol 1
    SYMBOL.pack_into(image, layout.symbols + SYMBOL.size, 1, FUNCTION, 0, 1, function, length)
    for i in range(len(names) - 1):
        symbol, slot = 2 + i, layout.address(i)
        place = len(_joined(names[: i + 1]))
        SYMBOL.pack_into(image, layout.symbols + SYMBOL.size * symbol, place, FUNCTION, 0, 0, 0, 0)
        RELOCATION.pack_into(image, layout.entries + RELOCATION.size * i, slot, symbol << 32 | TABLE_ENTRY, 0)
        jump = layout.jump(i)
        image[jump : jump + JUMP] = b"\xff\x25" + struct.pack("<i", slot - jump - JUMP)  # jmp [rip + distance]


def _list_of_tables(layout: Layout, names: list[str]) -> bytes:
    tags = [(4, layout.hash), (5, layout.names), (6, layout.symbols), (10, len(_joined(names))), (11, SYMBOL.size)]
    if len(names) > 1:
        tags += [(7, layout.entries), (8, RELOCATION.size * (len(names) - 1)), (9, RELOCATION.size)]
    return b"".join(DYNAMIC.pack(*tag) for tag in (*tags, (0, 0)))


def _write_headers(image: bytearray, layout: Layout, num_external: int, length: int) -> None:
    """Write the file's header and those of its parts: code, tables that the loader writes, their list, and a stack."""
    HEADER.pack_into(
        *(image, 0, b"\x7fELF\x02\x01\x01", 3, X86_64, 1, 0, HEADER.size, 0, 0, HEADER.size, PROGRAM.size, 4),
        *(SECTION.size, 0, 0),
    )
    read, table, dynamic = layout.jump(num_external), layout.addresses, layout.address(num_external)
    written = dynamic + length - table
    parts = (
        (1, 5, 0, 0, 0, read, read, PAGE),
        (1, 6, table, table, table, written, written, PAGE),
        (2, 6, dynamic, dynamic, dynamic, length, length, 8),
        (0x6474E551, 6, 0, 0, 0, 0, 0, 16),
    )
    for i, part in enumerate(parts):
        PROGRAM.pack_into(image, HEADER.size + i * PROGRAM.size, *part)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // max(1, alignment)) * max(1, alignment)
