"""Which work an item is: its sequence, its head, its queries and its keys.

`Items` reads the KERNEL or BACKWARD record and the SEQUENCE records of `convention.py`. Threads
take numbers off a counter; a number becomes blocks of queries, a share or a piece here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from quire.codegen.convention import KEYS_OF_PIECE, SEQUENCE, STOPPED, Record
from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import I64


class QueryBlock(NamedTuple):
    """A block of queries of one head of one sequence, and the keys that this sequence has."""

    b: Value
    h: Value
    key_head: Value
    q_first: Value  # its first query, counted from the first one of the sequence
    q_count: Value
    q_idx: Value  # the position of its first query
    q_row: Value  # the row of the sequence's first query in query, out and the like
    kv_row: Value  # the row of position 0 in key and value
    kv_begin: Value
    kv_end: Value
    tile_row: Value


class Share(NamedTuple):
    """One slice or all slices of a sequence, in all heads that read one key head."""

    number: Value  # of the item
    sequence: Value  # its record
    b: Value
    key_head: Value
    first: Value  # its first slice
    end: Value
    in_parts: Value  # whether it has several slices, whose sums are added up one by one


class Slice(NamedTuple):
    """Some blocks of queries of a share: [first, end)."""

    share: Share
    slot: Value  # its number, counted from the first slice that is computed now
    first: Value
    end: Value


class Piece(NamedTuple):
    """A piece of the keys of one sequence, or of several members that have it in common.

    If there is work for all threads anyway, one item is all pieces of a sequence.
    """

    queries: QueryBlock  # of the first member, reading the keys of the piece alone
    whole: QueryBlock  # the same queries with all their keys
    sequence: Value  # the record of the first member
    members: Value
    block: Value  # the number of the block of queries
    place: Value  # the number of the piece
    every: Value  # whether it stands for all pieces of the sequence


class Member(NamedTuple):
    """A sequence that a piece is computed for."""

    queries: QueryBlock  # with all their keys
    first_row: Value  # the first of its rows among the rows of all members
    first_slot: Value
    pieces: Value


class Items:
    """Finds the work that belongs to the number of an item."""

    def __init__(self, f: Function, arg: Record) -> None:
        self.f, self.arg = f, arg

    def goes_on(self) -> Value:
        """Whether the results are still wanted: nobody has written STOPPED."""
        return self.f.atomic_load(self.arg["counters"]) < STOPPED

    @contextmanager
    def query_blocks(self, number: Value) -> Iterator[QueryBlock]:
        """The query blocks of an item of the forward kernel: the same queries in each head."""
        b, place, sequence = self._locate(number, lambda s: self._blocks(s) * self.arg["heads"])
        blocks, size = self._blocks(sequence), self.arg["row_group"]
        group = place.udiv(blocks)
        # The last block first: under a causal mask it takes the longest.
        block = blocks - 1 - (place - group * blocks)
        with self.f.range(group * size, (group + 1) * size) as h:
            yield self._query_block(sequence, b, h, block)

    def share(self, number: Value) -> Share:
        """The share that an item of the backward kernel is."""
        f, key_heads = self.f, self.arg["heads"].udiv(self.arg["group"])

        def shares(sequence: Value) -> Value:
            return f.field(SEQUENCE, sequence, "slices") * key_heads

        b, place, sequence = self._locate(number, shares)
        field = self.sequence_fields(sequence)
        key_head = place.udiv(field["slices"])
        # The last slice first: under a causal mask it takes the longest.
        turn = field["slices"] - 1 - (place - key_head * field["slices"])
        slice, size = field["first_slice"] + turn, field["slice_blocks"]
        count = (self._blocks(sequence) + (size - 1)).udiv(size)
        whole = self.arg["whole"].differs(0)
        return Share(
            number=number,
            sequence=sequence,
            b=b,
            key_head=key_head,
            first=f.select(whole, 0, slice),
            end=f.select(whole, count, slice + 1),
            in_parts=whole & (count > 1),
        )

    @contextmanager
    def slices_of(self, share: Share) -> Iterator[Slice]:
        """The slices of a share, in ascending order."""
        f = self.f
        size = f.field(SEQUENCE, share.sequence, "slice_blocks")
        before = f.field(SEQUENCE, share.sequence, "first_slice")
        with f.range(share.first, share.end) as n:
            end = f.minimum((n + 1) * size, self._blocks(share.sequence))
            yield Slice(share, n - before, n * size, end)

    @contextmanager
    def query_blocks_of(self, slice: Slice) -> Iterator[QueryBlock]:
        """The query blocks of a slice, in all heads that read its keys."""
        f, group, share = self.f, self.arg["group"], slice.share
        with (
            f.range(share.key_head * group, (share.key_head + 1) * group) as h,
            f.range(slice.first, slice.end) as block,
            f.when(self.goes_on()),
        ):
            yield self._query_block(share.sequence, share.b, h, block)

    def piece(self, number: Value) -> Piece:
        """The piece that an item of the decode kernel is."""
        f = self.f

        def items(sequence: Value) -> Value:
            each = self._blocks(sequence) * self.arg["heads"]
            return f.field(SEQUENCE, sequence, "slices") * each

        b, place, sequence = self._locate(number, items)
        field = self.sequence_fields(sequence)
        row = place.udiv(field["slices"])
        mine = place - row * field["slices"]
        blocks = self._blocks(sequence)
        h = row.udiv(blocks)
        block = blocks - 1 - (row - h * blocks)  # the last one first, as above
        # The pieces that a sequence shares are items of the first member alone.
        by_another = field["members"].equals(0)
        place = f.select(by_another, mine + field["shared"], mine)
        common = place < field["shared"]
        members = f.select(common & (field["members"] > 1), field["members"], 1)
        every = field["slices"].equals(1) & field["shared"].equals(0)
        whole = self._query_block(sequence, b, h, block)
        begin = (whole.kv_begin.udiv(KEYS_OF_PIECE) + place) * KEYS_OF_PIECE
        queries = whole._replace(
            kv_begin=f.select(every, whole.kv_begin, f.maximum(whole.kv_begin, begin)),
            kv_end=f.select(every, whole.kv_end, f.minimum(whole.kv_end, begin + KEYS_OF_PIECE)),
        )
        where = {"block": block, "place": place}
        return Piece(queries, whole, sequence, members=members, every=every, **where)

    @contextmanager
    def members_of(self, piece: Piece) -> Iterator[Member]:
        """The sequences that a piece is computed for."""
        f, arg, whole = self.f, self.arg, piece.whole
        with f.range(0, piece.members) as m:
            sequence = f.offset(piece.sequence, m * len(SEQUENCE), I64)
            field = self.sequence_fields(sequence)
            b = f.select(m.equals(0), whole.b, field["b"])
            queries = self._query_block(sequence, b, whole.h, piece.block)
            # Slots are counted by batch only if one record serves the whole batch.
            entry = whole.b * (1 - arg["sequence_stride"]) * arg["heads"] + whole.h
            entry = entry * self._blocks(sequence) + piece.block
            slot = field["first_slot"] + entry * field["pieces"]
            yield Member(queries, m * (arg["row_group"] * queries.q_count), slot, field["pieces"])

    def member_queries(self, piece: Piece, m: Value) -> QueryBlock:
        """The queries of the m-th member, reading the keys of the piece alone."""
        f = self.f
        sequence = f.offset(piece.sequence, m * len(SEQUENCE), I64)
        b = f.select(m.equals(0), piece.whole.b, f.field(SEQUENCE, sequence, "b"))
        queries = self._query_block(sequence, b, piece.whole.h, piece.block)
        return queries._replace(kv_begin=piece.queries.kv_begin, kv_end=piece.queries.kv_end)

    # --- sequences

    def sequence_fields(self, sequence: Value) -> dict[str, Value]:
        """All fields of a SEQUENCE record."""
        return {name: self.f.field(SEQUENCE, sequence, name) for name in SEQUENCE.fields}

    def _locate(self, number: Value, count: Callable[[Value], Value]) -> tuple[Value, Value, Value]:
        """The sequence of an item: b, the item's number in that sequence, and the record.

        `count` gives the number of items of a sequence, from its record.
        """
        f, arg = self.f, self.arg

        def divide() -> list[Value]:
            each = count(arg["sequences"])
            b = number.udiv(each)
            return [b, number - b * each, f.value(0, I64)]

        def search() -> list[Value]:
            place = self._last_sequence_at(number)
            sequence = self._sequence(place)
            first = f.field(SEQUENCE, sequence, "first_item")
            return [f.field(SEQUENCE, sequence, "b"), number - first, place]

        b, place, at = f.choose(arg["sequence_stride"].equals(0), divide, search)
        return b, place, self._sequence(at)

    def _last_sequence_at(self, number: Value) -> Value:
        """The last sequence whose first item is not after `number`; empty ones have no item."""
        f = self.f

        def halve(bounds: list[Value]) -> list[Value]:
            low, high = bounds
            middle = (low + high).udiv(2)
            fits = f.field(SEQUENCE, self._sequence(middle), "first_item") <= number
            return [f.select(fits, middle, low), f.select(fits, high, middle)]

        bounds = [f.value(0, I64), self.arg["num_sequences"]]
        return f.repeat(lambda bounds: bounds[0] + 1 < bounds[1], halve, bounds)[0]

    def _sequence(self, place: Value) -> Value:
        return self.f.offset(self.arg["sequences"], place * len(SEQUENCE), I64)

    def _blocks(self, sequence: Value) -> Value:
        size = self.arg["block_q"]
        return (self.f.field(SEQUENCE, sequence, "q_len") + (size - 1)).udiv(size)

    def _query_block(self, sequence: Value, b: Value, h: Value, block: Value) -> QueryBlock:
        f, arg, field = self.f, self.arg, self.sequence_fields(sequence)
        first = block * arg["block_q"]
        tile_row = b * arg["tile_batch_stride"] + h * arg["tile_head_stride"]
        return QueryBlock(
            b=b,
            h=h,
            key_head=h.udiv(arg["group"]),
            q_first=first,
            q_count=f.minimum(field["q_len"] - first, arg["block_q"]),
            q_idx=field["q_start"] + first,
            q_row=field["q_row"],
            kv_row=field["kv_row"],
            kv_begin=field["kv_begin"],
            kv_end=field["kv_end"],
            tile_row=tile_row + block * arg["tile_block_stride"],
        )
