"""Which keys the decode kernel computes together: blocks side by side, or entries of a tile list.

Entries of a list are 128 positions, of which perhaps 16 are listed. One pass over so few keys takes
longer than its products. So keys of several entries are counted side by side, each as a section.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from quire.codegen.convention import EMPTY
from quire.codegen.kernels.items import QueryBlock
from quire.codegen.kernels.visits import BlockWalk, Judge, KeyBlock, Visits
from quire.codegen.llvm.builder import Value
from quire.codegen.llvm.types import I1, I64
from quire.codegen.scratch import BLOCKS_TOGETHER, SECTION_SIZE

SECTION = SECTION_SIZE // I64.size  # numbers of a section in memory: the first fields of KeyBlock
BEGIN = KeyBlock._fields.index("begin")


class KeyBlocks(NamedTuple):
    """Keys that are computed together: [begin, end), in sections.

    sections of a tile list    | 64 keys of block 3 | 128 of block 7 | 16 of block 9 |
    counted from               0                    64               192
    """

    begin: Value
    end: Value
    sections: Value  # their number
    following: Value


class Here(NamedTuple):
    """A section of the keys that are computed together, and the number of rows."""

    blocks: KeyBlocks
    section: KeyBlock
    rows: Value


class Sections:
    """Visits keys; `memory` has the number of the next block or entry, then the sections."""

    def __init__(self, visits: Visits, memory: Value) -> None:
        self.visits, self.f, self.memory = visits, visits.f, memory

    @contextmanager
    def key_blocks(self, queries: QueryBlock, judge: Judge) -> Iterator[KeyBlocks]:
        """The keys that queries attend to, in ascending order; `judge` gives the kind of blocks.

        Without a tile list, aligned groups of BLOCKS_TOGETHER blocks are one section.
        """
        f, visits = self.f, self.visits
        walk = BlockWalk(visits.items, queries, judge, visits.spec.target.block_kv)
        first, last = walk.numbers()
        f.store(first, self.memory)
        with (
            visits.spans(walk, first, last) as (start, stop, span),
            f.range(start, stop) as number,
            f.when(number >= f.load(I64, self.memory)),
        ):
            after, count, end = f.choose(
                walk.listed,
                lambda: self._entries(walk, number, stop),
                lambda: self._group(walk, number, stop, span),
            )
            f.store(after, self.memory)
            with f.when(count > 0):
                (following,) = f.choose(
                    walk.listed,
                    lambda: [walk.following(after - 1, last)],
                    lambda: [f.load(I64, self.memory, SECTION) + end],
                )
                begin = f.load(I64, self.memory, SECTION + BEGIN)
                yield KeyBlocks(begin, end, count, following)

    @contextmanager
    def of(self, blocks: KeyBlocks) -> Iterator[KeyBlock]:
        """The sections of some keys."""
        f = self.f
        with f.range(0, blocks.sections) as n:
            names = KeyBlock._fields[:SECTION]
            fields = {
                name: f.load(I64, self.memory, (n + 1) * SECTION + k)
                for k, name in enumerate(names)
            }
            yield KeyBlock(**fields, following=blocks.following)

    def _keep(self, place: Value, block: KeyBlock) -> None:
        """Write a section to memory."""
        for k, value in enumerate(block[:SECTION]):
            self.f.store(value, self.memory, (place + 1) * SECTION + k)

    def _group(self, walk: BlockWalk, number: Value, stop: Value, span: Value) -> list[Value]:
        """Write a group of blocks as a section: next number, number of sections, end of keys."""
        f, size = self.f, walk.size
        after = f.minimum((number | (BLOCKS_TOGETHER - 1)) + 1, stop)
        low, high, kind, runs = walk.blocks(number, after, span)
        block = self.visits.block(walk.queries, low * size, high * size, kind, runs)
        there = (block.begin < block.end) & kind.differs(EMPTY)
        self._keep(f.value(0, I64), block)
        return [after, f.select(there, f.value(1, I64), 0), block.end]

    def _entries(self, walk: BlockWalk, number: Value, stop: Value) -> list[Value]:
        """Write entries of the list as sections, as many as fit; returns the same."""
        f, size = self.f, walk.size

        def add(carried: list[Value]) -> list[Value]:
            entry, count, end, _ = carried
            low, high, kind, runs = walk.entry(entry)
            block = self.visits.block(walk.queries, low * size, high * size, kind, runs)
            there = (block.begin < block.end) & kind.differs(EMPTY)
            after = end + block.end  # a multiple of a run, but for the last key of a sequence
            fits = ~there | (after <= BLOCKS_TOGETHER * size)
            added = there & fits
            with f.when(added):
                section = block._replace(start=end, begin=end + block.begin, end=after)
                self._keep(count, section)
            return [
                f.select(fits, entry + 1, entry),
                f.select(added, count + 1, count),
                f.select(added, after, end),
                fits,
            ]

        zero = f.value(0, I64)
        start = [number, zero, zero, f.value(True, I1)]
        return f.repeat(lambda x: (x[0] < stop) & x[3], add, start)[:3]
