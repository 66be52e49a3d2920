"""Which tiles are computed: the blocks of keys that queries attend to, and the keys of each panel.

Either the tile list says which blocks of keys there are, or all blocks are visited. The mask's
`verdict`, if there is one, says which of them to skip. Only this file knows about either.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from quire.codegen.convention import (
    EMPTY,
    EXTENT,
    FULL,
    KEYS_OF_RUN,
    PARTIAL,
    PLAIN,
    VERDICT,
    KernelSpec,
)
from quire.codegen.kernels.items import Items, Piece, QueryBlock
from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import I16, I32, I64

SPAN = 64  # blocks of keys that are skipped together
ONES = 0x55555  # times a kind: that kind in every run, and in two beyond the last one
KEYS_OF_BIT = KEYS_OF_RUN // 2


class KeyBlock(NamedTuple):
    """A block of keys, or a few: the keys at positions [origin + begin, origin + end).

    If `runs` is not 0, some keys of the block are left out, or there are several kinds. Then the
    others are counted without these, from the first run on, and `each_part` says where they are.
    A section of several blocks is counted from `start` on, which is 0 for a block that is alone:
    its keys are [begin, end) among all of them, and `origin` is the position of `start`.
    """

    origin: Value
    begin: Value
    end: Value
    kind: Value
    runs: Value
    start: Value
    following: Value  # the position of the keys that come next


class KeyPart(NamedTuple):
    """The keys [first, end) of a block: they are neighbours, and have one kind."""

    first: Value
    end: Value
    position: Value  # of the first one
    kind: Value


class KeyRange(NamedTuple):
    """The keys [first, end) of a block that one panel reads, and the kind of that tile."""

    first: Value
    end: Value
    kind: Value


Judge: TypeAlias = Callable[[Value, Value], Value]
"""Gives the kind of the tiles with the keys from a first position up to an end."""


@dataclass
class BlockWalk:
    """One walk over blocks of keys, by numbers: entries of the tile list, or blocks of keys."""

    items: Items
    queries: QueryBlock
    judge: Judge
    size: int  # keys of a block

    def __post_init__(self) -> None:
        self.f, self.arg = self.items.f, self.items.arg
        self.listed = self.arg["tile_offsets"].differs(self.f.null())
        self.judged = self.arg["verdict"].differs(self.f.null())

    def numbers(self) -> list[Value]:
        """The first number and the end."""
        f, size, queries = self.f, self.size, self.queries

        def entries() -> list[Value]:
            return [f.load(I64, self.arg["tile_offsets"], queries.tile_row + k) for k in (0, 1)]

        def blocks() -> list[Value]:
            return [queries.kv_begin.udiv(size), (queries.kv_end + (size - 1)).udiv(size)]

        return f.choose(self.listed, entries, blocks)

    def kind_of_span(self, start: Value, stop: Value) -> Value:
        """The kind of all tiles of some blocks, as far as it is known without the tile list."""
        ask = self.judged & ~self.listed
        return self.f.choose(
            ask, lambda: [self._kind(start, stop)], lambda: [self.arg["tile_kind"]]
        )[0]

    def blocks(self, number: Value, end: Value, span: Value) -> list[Value]:
        """First block, end, kind, runs: of one entry of the list, or of the blocks [number, end).

        Blocks that are EMPTY at either side are left out; `span` is the kind of all of the span.
        """
        f = self.f

        def unlisted() -> list[Value]:
            return [*self._unlisted(number, end, span), f.value(0, I64)]

        return f.choose(self.listed, lambda: self.entry(number), unlisted)

    def following(self, number: Value, last: Value) -> Value:
        """The position of the first key of the next entry; of the end, after the last one."""
        f, queries = self.f, self.queries

        def next_entry() -> list[Value]:
            entry, runs = self._listed(number + 1)
            run = f.trailing_zeros(runs | (1 << 16)) & -2
            first = f.select(runs.equals(0), 0, run * KEYS_OF_BIT)
            return [f.maximum((entry >> 2) * self.size + first, queries.kv_begin)]

        return f.choose(number + 1 < last, next_entry, lambda: [queries.kv_end])[0]

    def _listed(self, number: Value) -> list[Value]:
        """An entry of the list, and its runs; 0 if all keys of the block are listed."""
        f = self.f
        entry = f.convert(f.load(I32, self.arg["tile_entries"], number), I64)

        def some() -> list[Value]:
            return [f.zero_extend(f.load(I16, self.arg["tile_runs"], number), I64)]

        listed = self.arg["tile_runs"].differs(f.null())
        return [entry, *f.choose(listed, some, lambda: [f.value(0, I64)])]

    def entry(self, number: Value) -> list[Value]:
        """First block, end, kind and runs of one entry of the list."""
        f = self.f
        entry, runs = self._listed(number)
        block, kind = entry >> 2, entry & 3
        ask = self.judged & kind.equals(PARTIAL)
        (found,) = f.choose(ask, lambda: [self._kind(block, block + 1)], lambda: [kind])
        there = (runs | (runs >> 1)) & ONES
        return [block, block + 1, found, f.select(found.equals(PLAIN), there * PLAIN, runs)]

    def _unlisted(self, number: Value, end: Value, span: Value) -> list[Value]:
        ask = self.judged & span.equals(PARTIAL)
        return self.f.choose(ask, lambda: self._judged(number, end), lambda: [number, end, span])

    def _judged(self, number: Value, end: Value) -> list[Value]:
        """Ask about every block; together they are PARTIAL if they differ or leave a hole."""
        f = self.f

        def add(block: Value, known: list[Value]) -> list[Value]:
            (low, high, kind), here = known, self._kind(block, block + 1)
            there, alike = here.differs(EMPTY), here.equals(kind) & high.equals(block)
            both = f.select(alike | kind.equals(EMPTY), here, PARTIAL)
            return [
                f.select(there, f.minimum(low, block), low),
                f.select(there, block + 1, high),
                f.select(there, both, kind),
            ]

        return f.loop(number, end, add, carry=[end, number, f.value(EMPTY, I64)])

    def _kind(self, first: Value, end: Value) -> Value:
        return self.judge(first * self.size, end * self.size)


class Visits:
    """Visits the tiles of blocks of queries."""

    def __init__(self, f: Function, spec: KernelSpec, items: Items) -> None:
        self.f, self.spec, self.items, self.arg = f, spec, items, items.arg

    @contextmanager
    def key_blocks(self, queries: QueryBlock) -> Iterator[KeyBlock]:
        """The blocks of keys that queries attend to, in ascending order."""
        f, size = self.f, self.spec.target.block_kv
        walk = BlockWalk(
            self.items, queries, lambda first, end: self.verdict(queries, first, end), size
        )
        first, last = walk.numbers()
        with self.spans(walk, first, last) as (start, stop, span), f.range(start, stop) as number:
            low, high, kind, runs = walk.blocks(number, number + 1, span)
            block = self.block(queries, low * size, high * size, kind, runs)
            with f.when((block.begin < block.end) & kind.differs(EMPTY)):
                yield block

    @contextmanager
    def spans(
        self, walk: BlockWalk, first: Value, last: Value
    ) -> Iterator[tuple[Value, Value, Value]]:
        """Spans of numbers that are not skipped: first, end, and kind of all."""
        f = self.f
        with f.range(first, last, SPAN) as start:
            stop = f.minimum(start + SPAN, last)
            span = walk.kind_of_span(start, stop)
            seen = (span.differs(EMPTY) | walk.listed) & self.items.goes_on()
            with f.when(seen):
                yield start, stop, span

    def block(
        self, queries: QueryBlock, first: Value, end: Value, kind: Value, runs: Value
    ) -> KeyBlock:
        """The keys of a sequence from position `first` up to `end`, or those of some runs."""
        f = self.f

        def every() -> list[Value]:
            begin = f.maximum(queries.kv_begin - first, 0)
            return [first, begin, f.minimum(queries.kv_end, end) - first, kind, runs]

        def some() -> list[Value]:
            return self._listed_runs(queries, first, runs)

        origin, begin, stop, kind, runs = f.choose(runs.equals(0), every, some)
        alone = f.value(0, I64)
        return KeyBlock(origin, begin, stop, kind, runs, start=alone, following=origin + stop)

    def _listed_runs(self, queries: QueryBlock, first: Value, runs: Value) -> list[Value]:
        """Origin, begin, end, kind and runs of the listed keys of a block that a sequence has."""
        f = self.f

        def bits(keys: Value) -> Value:  # up to a key of this block
            return f.minimum(f.maximum(keys, 0), 8 * KEYS_OF_RUN).udiv(KEYS_OF_RUN) * 2

        runs = runs & (f.value(-1, I64) << bits(queries.kv_begin - first))
        runs = runs & ~(f.value(-1, I64) << bits(queries.kv_end - first + (KEYS_OF_RUN - 1)))
        low, high, kind = self._neighbours(runs)
        alone = (runs >> high).equals(0)
        origin = first + low * KEYS_OF_BIT
        there = (runs | (runs >> 1)) & ONES
        past = f.value(64, I64) - f.leading_zeros(there | 1)  # one bit after the last run's first
        cut = f.maximum(first + (past + 1) * KEYS_OF_BIT - queries.kv_end, 0)
        return [
            f.select(alone, origin, first),
            f.maximum(queries.kv_begin - origin, 0),
            f.intrinsic("ctpop", there) * KEYS_OF_RUN - cut,
            kind,
            f.select(alone, 0, runs),
        ]

    def _neighbours(self, runs: Value) -> tuple[Value, Value, Value]:
        """The first bit of the first run, the end of its neighbours of one kind, and that kind."""
        f = self.f
        low = f.trailing_zeros(runs | (1 << 16)) & -2
        rest = runs >> low
        kind = rest & 3
        size = f.trailing_zeros((rest ^ (kind * ONES)) | (1 << 18)) & -2
        return low, low + size, kind

    def each_part(
        self,
        block: KeyBlock,
        body: Callable[[KeyPart], None],
        within: KeyRange | None = None,
    ) -> None:
        """Call `body` for the parts of a block, or for those of a range of its keys."""
        f = self.f
        begin, end, kind = within or (block.begin, block.end, block.kind)
        whole = block.runs.equals(0)

        def one(carried: list[Value]) -> list[Value]:
            at, runs = carried
            low, high, listed = self._neighbours(runs)
            stop = f.select(whole, end, at + (high - low) * KEYS_OF_BIT)
            first = f.maximum(at, begin)
            place = f.select(whole, first - block.start, first - at + low * KEYS_OF_BIT)
            position = block.origin + place
            part = KeyPart(first, f.minimum(stop, end), position, f.select(whole, kind, listed))
            with f.when(part.first < part.end):
                body(part)
            return [stop, runs & (f.value(-1, I64) << high)]

        f.repeat(lambda carried: carried[0] < end, one, [block.start, block.runs])

    def verdict(self, queries: QueryBlock, kv_first: Value, kv_end: Value) -> Value:
        """The kind that all queries of a block and the keys [kv_first, kv_end) have."""
        ends = (queries.q_idx, queries.q_idx + (queries.q_count - 1))
        return self._verdict(queries, ends, kv_first, kv_end)

    def common_verdict(self, piece: Piece, kv_first: Value, kv_end: Value) -> Value:
        """The kind for all members of a piece: PARTIAL if they differ."""
        f = self.f

        def of(m: Value) -> Value:
            return self.verdict(self.items.member_queries(piece, m), kv_first, kv_end)

        def add(m: Value, known: list[Value]) -> list[Value]:
            found = of(m)
            return [f.select(found.equals(known[0]), found, PARTIAL)]

        return f.loop(1, piece.members, add, carry=[of(f.value(0, I64))])[0]

    def _verdict(
        self, queries: QueryBlock, ends: tuple[Value, Value], kv_first: Value, kv_end: Value
    ) -> Value:
        """The kind for the queries from one position to another, both included."""
        f = self.f
        low = f.maximum(kv_first, queries.kv_begin)
        high = f.minimum(kv_end, queries.kv_end) - 1
        arguments, verdict = self.arg["arguments"], self.arg["verdict"]
        where = {"b": queries.b, "h": queries.h, "q_low": ends[0], "q_high": ends[1]}
        keys = {"kv_low": low, "kv_high": high}
        return f.call_pointer(verdict, VERDICT, arguments=arguments, **where, **keys)

    def key_range(self, queries: QueryBlock, block: KeyBlock, q: Value) -> KeyRange:
        """The keys of a block that the panel at query q reads."""
        f, arg = self.f, self.arg
        count = f.minimum(queries.q_count - q, self.spec.tile.width)
        q_idx, kv_idx = queries.q_idx + q, block.origin + block.begin

        def judged() -> list[Value]:
            ends = (q_idx, q_idx + (count - 1))
            return [self._verdict(queries, ends, kv_idx, block.origin + block.end)]

        def looked_at() -> list[Value]:
            keys, extent = block.end - block.begin, arg["extent"]
            where = {"b": queries.b, "h": queries.h, "q_idx": q_idx, "queries": count}
            where |= {"kv_idx": kv_idx, "keys": keys}
            answer = f.call_pointer(extent, EXTENT, arguments=arg["arguments"], **where)
            first, last = answer & 0xFFFF, (answer >> 16) & 0xFFFF
            every = (answer >> 32).differs(0)
            kind = f.select(every, PLAIN, block.kind)
            return [block.begin + first, block.begin + last, kind]

        uncut = block.runs.equals(0)
        open_question = block.kind.equals(PARTIAL) & arg["verdict"].differs(f.null()) & uncut
        (kind,) = f.choose(open_question, judged, lambda: [block.kind])
        open_question = kind.equals(PARTIAL) & arg["extent"].differs(f.null()) & uncut
        whole = [block.begin, block.end, kind]
        first, end, kind = f.choose(open_question, looked_at, lambda: whole)
        return KeyRange(first, f.select(kind.equals(EMPTY), first, end), kind)

    def modified(self) -> Value:
        """Whether some tiles may have a mod."""
        f, arg = self.f, self.arg
        kinds = ("full_mod", "partial_mod", "plain_mod")
        return functools.reduce(operator.or_, [arg[name].differs(f.null()) for name in kinds])

    def mod(self, kind: Value) -> Value:
        """The address of the function that rewrites the scores of a tile, or null."""
        f, arg = self.f, self.arg
        masked = f.select(kind.equals(FULL), arg["full_mod"], arg["partial_mod"])
        return f.select(kind.equals(PLAIN), arg["plain_mod"], masked)
