"""Instructions for compiled loops: fewer passes over the rows of a block.

- A head whose averages are quotients of polynomials is one QUOTIENT per column of values (`chains`). If its query is a
  multiple of a row, it reads that row.
- A QUOTIENT and a PAIR write average·factor + addend, where factor and addend are rows. So they take in the product
  with a row that follows, and the sum with other heads. A row of ones or zeros stands for none.
- Steps whose rows nothing reads are left out. A step stands right before the first one that reads it.

Nothing here changes how often a number is rounded, but products and sums that are taken in round once together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from attnc.engines.chains import as_chains
from attnc.engines.fused import AFFINE, PAIR, PRODUCT, SIMPLE_HEAD, Instruction, Instructions

QUOTIENT = 7
"""The kind of a head of one argument as a quotient of polynomials, after those of `fused`. It reads its variable, a
factor and an addend. Its numbers are: rate, low, least, most, the query's coefficient, and the least and the most of a
single chain; the coefficients of both polynomials, chain by chain; and the offsets, slopes and values of the head."""

BYTES_PER_BLOCK = 2**16
"""The size of a block of points, with all its rows and scores. Measured with 4 to 15 rows: half and twice the size take
as long."""
FEWEST_POINTS, MOST_POINTS = 32, 1024
"""The fewest and most points of a block. Fewer leave vector units idle; more do not save time."""


def fuse(given: Instructions) -> Instructions:
    """Return instructions for compiled loops that compute the same."""
    return _Fuser(given).fused()


class _Fuser:
    def __init__(self, given: Instructions) -> None:
        self._given, self._made = given, dict[int, Instruction]()  # the step that writes a row
        self._uses = Counter(row for step in given.steps for row in step.reads)
        self._uses.update(given.outputs)
        self._num_rows = 1 + max((row for step in given.steps for row in step.writes), default=given.num_inputs)
        self._constants = dict[float, int]()
        self._one, self._zero = self._constant(1.0), self._constant(0.0)

    def fused(self) -> Instructions:
        for step in self._given.steps:
            if step.kind == SIMPLE_HEAD:
                self._quotients(step)
            elif step.kind == PAIR:
                self._put(step._replace(reads=(*step.reads, self._one, self._zero)))
            elif step.kind == PRODUCT:
                self._product(step)
            elif step.kind == AFFINE and step.reads:
                self._sum(step)
            else:
                self._put(step)
        return self._given._replace(steps=self._ordered())

    def _put(self, step: Instruction) -> None:
        self._made.update(dict.fromkeys(step.writes, step))

    def _new(self) -> int:
        self._num_rows += 1
        return self._num_rows - 1

    def _constant(self, value: float) -> int:
        """Return a row in which all numbers are this one."""
        if value not in self._constants:
            row = self._constants[value] = self._new()
            self._put(Instruction(AFFINE, (), (row,), (np.array([value], self._given.dtype),)))
        return self._constants[value]

    def _quotients(self, head: Instruction) -> None:
        offsets, slopes, values = head.numbers
        query = self._made.get(head.reads[0])
        read, factor = head.reads[0], 1.0
        if query is not None and query.kind == AFFINE and len(query.reads) == 1 and query.numbers[0][0] == 0:
            read, factor = query.reads[0], float(query.numbers[0][1])
        quotients = list[Instruction]()
        for column, row in enumerate(head.writes):
            chains = as_chains(slopes[:, 0], offsets, values[:, column], factor) if head.powers is not None else None
            if chains is None:
                self._put(head)
                return
            first = np.array(
                [chains.rate, chains.low, chains.least, chains.most, factor, *chains.inner], self._given.dtype
            )
            numbers = first, chains.weights, chains.products, offsets, slopes, values[:, column : column + 1].copy()
            quotients.append(Instruction(QUOTIENT, (read, self._one, self._zero), (row,), numbers, head.num_keys, 1))
        for quotient in quotients:
            self._put(quotient)

    def _product(self, step: Instruction) -> None:
        first, second, *added = step.reads
        for row, other in ((first, second), (second, first)):
            if self._takes(row, 1.0, is_product=True):
                self._put(self._taken(row, other, added[0] if added else self._zero, step.writes[0]))
                return
        self._put(step)

    def _sum(self, step: Instruction) -> None:
        """Add up terms by the heads that write them, one after the other."""
        (constant, *coefficients), (target,) = step.numbers[0].tolist(), step.writes
        terms = list(zip(coefficients, step.reads, strict=True))
        taken = [(c, row) for c, row in terms if self._takes(row, c)] if len(set(step.reads)) == len(terms) else []
        others = [term for term in terms if term not in taken]
        if not taken:
            self._put(step)
            return
        if not others:
            total = self._constant(constant)
        elif constant == 0 and [c for c, _ in others] == [1.0]:
            total = others[0][1]
        else:
            total = self._new()
            numbers = np.array([constant, *(c for c, _ in others)], self._given.dtype)
            self._put(Instruction(AFFINE, tuple(row for _, row in others), (total,), (numbers,)))
        for number, (c, row) in enumerate(taken):
            head = self._made[row]
            factor = head.reads[-2] if c == 1 else self._constant(c)
            after = target if number == len(taken) - 1 else self._new()
            self._put(self._taken(row, factor, total, after))
            total = after

    def _takes(self, row: int, coefficient: float, *, is_product: bool = False) -> bool:
        """Return whether the head that writes a row can multiply by a factor, if it is not 1, and add something."""
        head = self._made.get(row)
        if head is None or head.kind not in (QUOTIENT, PAIR) or self._uses[row] > 1 or head.reads[-1] != self._zero:
            return False
        return head.reads[-2] == self._one or (coefficient == 1 and not is_product)

    def _taken(self, row: int, factor: int, addend: int, target: int) -> Instruction:
        head = self._made[row]
        return head._replace(reads=(*head.reads[:-2], factor, addend), writes=(target,))

    def _ordered(self) -> tuple[Instruction, ...]:
        """Return the steps that the outputs need, each after those that it reads."""
        found, seen = list[Instruction](), set[int]()
        waiting: list[tuple[int, bool]] = [(row, False) for row in reversed(self._given.outputs)]
        while waiting:
            row, is_ready = waiting.pop()
            step = self._made.get(row)
            if step is None or step.writes[0] in seen:
                continue
            if is_ready:
                seen.add(step.writes[0])
                found.append(step)
            else:
                waiting.append((row, True))
                waiting += [(read, False) for read in reversed(step.reads)]
        return tuple(found)


def flattened(steps: Sequence[Instruction]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a table, the rows of all steps, those that are read first, and all numbers.

    A line of the table is kind, keys, queries, columns (or the rows that are read, of a sum or product), the number of
    coefficients of a polynomial, the place of the rows, and the places of up to six arrays.
    """
    table, rows, numbers, starts, count = list[list[int]](), list[int](), list[np.ndarray](), dict[int, int](), 0
    for step in steps:
        length = step.numbers[1].size if step.kind == QUOTIENT else 0
        columns = len(step.reads) if step.kind in (AFFINE, PRODUCT) else len(step.writes)
        line = [step.kind, step.num_keys, step.num_queries, columns, length, len(rows)]
        for array in step.numbers:
            if id(array) not in starts:
                starts[id(array)] = count
                count += array.size
                numbers.append(array.ravel())
            line.append(starts[id(array)])
        table.append(line + [0] * (12 - len(line)))
        rows += [*step.reads, *step.writes]
    flat = np.concatenate(numbers) if numbers else np.zeros(0)
    return np.array(table, np.int64).reshape(len(table), 12), np.array(rows, np.int64), flat


def points_per_block(bytes_per_point: int) -> int:
    """Return the number of points of a block, whose rows take this many bytes for each point."""
    return max(FEWEST_POINTS, min(MOST_POINTS, BYTES_PER_BLOCK // bytes_per_point // FEWEST_POINTS * FEWEST_POINTS))
