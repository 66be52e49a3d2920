"""Which work there is: items, where their rows live, and which blocks of keys they visit.

These are the parts of the forward kernel that know about sequences, memories and tile lists; see
`convention.py` for the records they read. `forward.py` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from quire.codegen.builder import Function, Value
from quire.codegen.convention import (
    EMPTY,
    EXTENT,
    FORWARD,
    FULL,
    KEYS_OF_PIECE,
    PARTIAL,
    PLAIN,
    SEQUENCE,
    STOPPED,
    VERDICT,
    ForwardSpec,
)
from quire.codegen.staging import ENDLESS, PLACEMENT, storage
from quire.codegen.types import F32, I32, I64, Layout

SPAN = 64  # blocks of keys that are skipped at once


class QueryBlock(NamedTuple):
    """One block of queries of one head of one sequence."""

    b: Value
    h: Value
    key_head: Value
    q_first: Value  # its first query, counted from the first one of the sequence
    q_count: Value
    q_idx: Value  # the position of its first query
    q_row: Value  # rows of query and out, counted from the sequence's first query
    kv_row: Value
    kv_begin: Value
    kv_end: Value
    tile_row: Value


class Share(NamedTuple):
    """The query blocks of one slice of a sequence, in all heads that read one key head."""

    sequence: Value  # its record
    b: Value
    key_head: Value
    slice: Value
    slices: Value


class Piece(NamedTuple):
    """A piece of the keys of one sequence, or of several that have it in common.

    `queries` attend to this piece alone and `whole` to all keys, both of the first sequence.
    """

    queries: QueryBlock
    whole: QueryBlock
    sequence: Value  # the record of the first
    members: Value
    place: Value  # among the pieces


class Member(NamedTuple):
    """A sequence that a piece is computed for: all of its keys, and where its pieces are left."""

    queries: QueryBlock
    first_row: Value  # among the rows of the piece
    first_slot: Value
    pieces: Value


class KeyBlock(NamedTuple):
    """A block of keys to be attended to: positions [origin + begin, origin + end) exist."""

    origin: Value
    begin: Value
    end: Value
    kind: Value


class KeyRange(NamedTuple):
    """The keys [first, end) of a block that one panel attends to, and whether to ask the mask."""

    first: Value
    end: Value
    kind: Value


Judge: TypeAlias = Callable[[Value, Value], Value]
"""What is known of the keys from a first one up to another."""


class Record:
    """A kernel's record. Each use loads its field again, which keeps registers free."""

    def __init__(self, f: Function, layout: Layout, args: Value) -> None:
        self._f, self._layout, self._args = f, layout, args

    def __getitem__(self, name: str) -> Value:
        return self._f.field(self._layout, self._args, name)


class Work:
    """Everything that the kernel's arguments say about what is to be done."""

    def __init__(
        self, f: Function, spec: ForwardSpec, args: Value, layout: Layout = FORWARD
    ) -> None:
        self.f, self.spec = f, spec
        self.arg = Record(f, layout, args)

    def goes_on(self) -> Value:
        """Whether the results are still wanted."""
        return self.f.atomic_load(self.arg["counters"]) < STOPPED

    # --- items

    @contextmanager
    def find(self, number: Value) -> Iterator[QueryBlock]:
        """Which sequence, heads and queries an item is: one head after the other."""
        b, place, sequence = self._locate(number, lambda s: self._blocks(s) * self.arg["heads"])
        blocks, size = self._blocks(sequence), self.arg["row_group"]
        group = place.udiv(blocks)
        # The last block first: under a causal mask it is the longest one.
        block = blocks - 1 - (place - group * blocks)
        with self.f.range(group * size, (group + 1) * size) as h:
            yield self._query_block(sequence, b, h, block)

    def find_share(self, number: Value) -> Share:
        """Which sequence, key head and slice of its items a share is."""
        key_heads = self.arg["heads"].udiv(self.arg["group"])

        def shares(sequence: Value) -> Value:
            return self.f.field(SEQUENCE, sequence, "slices") * key_heads

        b, place, sequence = self._locate(number, shares)
        slices = self.f.field(SEQUENCE, sequence, "slices")
        key_head = place.udiv(slices)
        return Share(sequence, b, key_head, place - key_head * slices, slices)

    def find_piece(self, number: Value) -> Piece:
        """Which sequence and head an item of few queries is, and which of its keys it reads."""
        f = self.f

        def items(sequence: Value) -> Value:
            return f.field(SEQUENCE, sequence, "slices") * self.arg["heads"]

        b, place, sequence = self._locate(number, items)
        field = self.sequence_fields(sequence)
        h = place.udiv(field["slices"])
        mine = place - h * field["slices"]
        by_another = field["members"].equals(0)
        place = f.select(by_another, mine + field["shared"], mine)
        common = place < field["shared"]
        members = f.select(common & (field["members"] > 1), field["members"], 1)
        whole = self._query_block(sequence, b, h, f.value(0, I64))
        begin = (whole.kv_begin.udiv(KEYS_OF_PIECE) + place) * KEYS_OF_PIECE
        queries = whole._replace(
            kv_begin=f.maximum(whole.kv_begin, begin),
            kv_end=f.minimum(whole.kv_end, begin + KEYS_OF_PIECE),
        )
        return Piece(queries, whole, sequence, members, place)

    @contextmanager
    def members_of(self, piece: Piece) -> Iterator[Member]:
        """The sequences that a piece is computed for."""
        f, arg, whole = self.f, self.arg, piece.whole
        with f.range(0, piece.members) as m:
            sequence = f.offset(piece.sequence, m * len(SEQUENCE), I64)
            field = self.sequence_fields(sequence)
            b = f.select(m.equals(0), whole.b, field["b"])
            queries = self._query_block(sequence, b, whole.h, f.value(0, I64))
            # One record stands for all batches, or every sequence has its own.
            entry = whole.b * (1 - arg["sequence_stride"]) * arg["heads"] + whole.h
            slot = field["first_slot"] + entry * field["pieces"]
            yield Member(queries, m * (arg["row_group"] * queries.q_count), slot, field["pieces"])

    @contextmanager
    def query_blocks_of(self, share: Share) -> Iterator[QueryBlock]:
        """The query blocks of a share: every so many of all heads that read its keys."""
        f, group = self.f, self.arg["group"]
        blocks = self._blocks(share.sequence)
        with f.range(
            0, (blocks * group - share.slice + (share.slices - 1)).udiv(share.slices)
        ) as n:
            place = share.slice + n * share.slices
            head = place.udiv(blocks)
            h = share.key_head * group + head
            with f.when(self.goes_on()):
                yield self._query_block(share.sequence, share.b, h, place - head * blocks)

    def _locate(self, number: Value, count: Callable[[Value], Value]) -> tuple[Value, Value, Value]:
        """The sequence that something is part of, which has `count`: b, place in it, its record."""
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

    def _query_block(self, sequence: Value, b: Value, h: Value, block: Value) -> QueryBlock:
        f, arg, field = self.f, self.arg, self.sequence_fields(sequence)
        first = block * arg["block_q"]
        tile_row = field["tile_row"] + b * arg["tile_batch_stride"] + block
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
            tile_row=tile_row + h * arg["tile_per_head"] * self._blocks(sequence),
        )

    def sequence_fields(self, sequence: Value) -> dict[str, Value]:
        """What a record says."""
        return {name: self.f.field(SEQUENCE, sequence, name) for name in SEQUENCE.fields}

    def _sequence(self, place: Value) -> Value:
        return self.f.offset(self.arg["sequences"], place * len(SEQUENCE), I64)

    def _blocks(self, sequence: Value) -> Value:
        size = self.arg["block_q"]
        return (self.f.field(SEQUENCE, sequence, "q_len") + (size - 1)).udiv(size)

    def _last_sequence_at(self, number: Value) -> Value:
        """The last sequence whose first item is not past `number`; empty ones have no item."""
        f = self.f

        def halve(bounds: list[Value]) -> list[Value]:
            low, high = bounds
            middle = (low + high).udiv(2)
            fits = f.field(SEQUENCE, self._sequence(middle), "first_item") <= number
            return [f.select(fits, middle, low), f.select(fits, high, middle)]

        bounds = [f.value(0, I64), self.arg["num_sequences"]]
        return f.repeat(lambda bounds: bounds[0] + 1 < bounds[1], halve, bounds)[0]

    # --- where rows live

    def describe_placement(self, queries: QueryBlock, name: str, record: Value) -> None:
        """Fill in the PLACEMENT record of `name`: query, key, value, out or a gradient of one."""
        f, arg = self.f, self.arg
        in_memory = name in ("key", "value")
        head, row = (queries.key_head, queries.kv_row) if in_memory else (queries.h, queries.q_row)
        start = queries.b * arg[f"{name}_batch"] + head * arg[f"{name}_head"]
        kind = storage(self.spec.dtype_of(name))
        pages = f.offset(arg["page_table"], queries.b * arg["page_table_stride"], I32)
        paged = arg["page_table"].differs(f.null())
        for field, value in {
            "base": f.offset(arg[name], start + row * arg[f"{name}_row"], kind.memory),
            "table": f.select(paged, pages, f.null()) if in_memory else f.null(),
            "page_size": arg["page_size"] if in_memory else ENDLESS,
            "page_stride": arg[f"{name}_page"] if in_memory else 0,
            "row_stride": arg[f"{name}_row"],
            "column_stride": arg[f"{name}_column"],
            "width": arg["head_dim" if name.endswith(("query", "key")) else "value_dim"],
        }.items():
            f.set_field(PLACEMENT, record, field, value)
        if in_memory and kind.has_scales:
            at = f.offset(arg[f"{name}_scale"], head * arg[f"{name}_scale_head"], F32)
            f.set_field(PLACEMENT, record, "scales", at)
            f.set_field(PLACEMENT, record, "scale_page_stride", arg[f"{name}_scale_page"])
            f.set_field(PLACEMENT, record, "scale_row_stride", arg[f"{name}_scale_row"])

    # --- blocks of keys

    @contextmanager
    def visit(
        self, queries: QueryBlock, judge: Judge | None = None, together: int = 1
    ) -> Iterator[KeyBlock]:
        """The blocks of keys that a block of queries attends to, in ascending order.

        This is all that knows the tile list, and asks the bounds of the mask, by `judge` if an
        item has several sequences. Where there is no list, `together` blocks, a power of two,
        are one; those at its ends that are EMPTY are left out.
        """
        f, arg, size = self.f, self.arg, self.spec.target.block_kv
        listed = arg["tile_offsets"].differs(f.null())

        def listed_places() -> list[Value]:
            return [f.load(I64, arg["tile_offsets"], queries.tile_row + k) for k in (0, 1)]

        def all_places() -> list[Value]:
            return [queries.kv_begin.udiv(size), (queries.kv_end + (size - 1)).udiv(size)]

        asked = arg["verdict"].differs(f.null())
        judge = judge or (lambda first, stop: self.verdict(queries, first, stop))

        def about(first: Value, last: Value) -> list[Value]:
            return [judge(first * size, last * size)]

        first, last = f.choose(listed, listed_places, all_places)
        with f.range(first, last, SPAN) as start:
            stop = f.minimum(start + SPAN, last)
            (span,) = f.choose(asked, lambda: about(start, stop), lambda: [arg["tile_kind"]])
            seen = (span.differs(EMPTY) | listed) & self.goes_on()
            with f.when(seen), f.range(start, stop) as t:
                end = f.minimum((t | (together - 1)) + 1, stop)

                def listed_block() -> list[Value]:
                    entry = f.convert(f.load(I32, arg["tile_entries"], t), I64)
                    return [entry >> 2, (entry >> 2) + 1, entry & 3]

                def add(block: Value, known: list[Value]) -> list[Value]:
                    (low, high, kind), (here,) = known, about(block, block + 1)
                    there, alike = here.differs(EMPTY), here.equals(kind) & high.equals(block)
                    both = f.select(alike | kind.equals(EMPTY), here, PARTIAL)  # or with a hole
                    return [
                        f.select(there, f.minimum(low, block), low),
                        f.select(there, block + 1, high),
                        f.select(there, both, kind),
                    ]

                def judged() -> list[Value]:
                    return f.loop(t, end, add, carry=[end, t, f.value(EMPTY, I64)])

                def blocks() -> list[Value]:
                    return f.choose(asked & span.equals(PARTIAL), judged, lambda: [t, end, span])

                leads = listed | t.equals(start) | (t & (together - 1)).equals(0)
                with f.when(leads):
                    low, high, kind = f.choose(listed, listed_block, blocks)
                    origin = low * size
                    begin = f.maximum(queries.kv_begin - origin, 0)
                    stop_at = f.minimum(queries.kv_end - origin, (high - low) * size)
                    with f.when((begin < stop_at) & kind.differs(EMPTY)):
                        yield KeyBlock(origin, begin, stop_at, kind)

    def verdict(self, queries: QueryBlock, kv_first: Value, kv_stop: Value) -> Value:
        """What is known of all queries of a block and some keys."""
        ends = (queries.q_idx, queries.q_idx + (queries.q_count - 1))
        return self._verdict(queries, ends, kv_first, kv_stop)

    def common_verdict(self, piece: Piece, kv_first: Value, kv_stop: Value) -> Value:
        """What is known of all sequences of a piece: PARTIAL where they differ."""
        f, ends = self.f, (piece.queries.kv_begin, piece.queries.kv_end)

        def of(m: Value) -> Value:
            sequence = f.offset(piece.sequence, m * len(SEQUENCE), I64)
            b = f.select(m.equals(0), piece.whole.b, f.field(SEQUENCE, sequence, "b"))
            queries = self._query_block(sequence, b, piece.whole.h, f.value(0, I64))
            mine = queries._replace(kv_begin=ends[0], kv_end=ends[1])
            return self.verdict(mine, kv_first, kv_stop)

        def add(m: Value, known: list[Value]) -> list[Value]:
            found = of(m)
            return [f.select(found.equals(known[0]), found, PARTIAL)]

        return f.loop(1, piece.members, add, carry=[of(f.value(0, I64))])[0]

    def _verdict(
        self, queries: QueryBlock, ends: tuple[Value, Value], kv_first: Value, kv_stop: Value
    ) -> Value:
        """What is known of some queries and the keys from kv_first up to kv_stop."""
        f, arg = self.f, self.arg
        low = f.maximum(kv_first, queries.kv_begin)
        high = f.minimum(kv_stop, queries.kv_end) - 1
        arguments, pointer = arg["arguments"], arg["verdict"]
        return f.call_pointer(
            pointer,
            VERDICT,
            arguments=arguments,
            b=queries.b,
            h=queries.h,
            q_low=ends[0],
            q_high=ends[1],
            kv_low=low,
            kv_high=high,
        )

    def key_range(self, queries: QueryBlock, block: KeyBlock, q: Value) -> KeyRange:
        """The part of a block that the panel at query q attends to."""
        f, arg = self.f, self.arg
        count = f.minimum(queries.q_count - q, self.spec.tile.width)
        q_idx, kv_idx = queries.q_idx + q, block.origin + block.begin
        whole = [block.begin, block.end, block.kind]

        def look() -> list[Value]:
            keys, pointer = block.end - block.begin, arg["extent"]
            answer = f.call_pointer(
                pointer,
                EXTENT,
                arguments=arg["arguments"],
                b=queries.b,
                h=queries.h,
                q_idx=q_idx,
                queries=count,
                kv_idx=kv_idx,
                keys=keys,
            )
            first, last = answer & 0xFFFF, (answer >> 16) & 0xFFFF
            every = (answer >> 32).differs(0)
            kind = f.select(every, PLAIN, block.kind)
            return [block.begin + first, block.begin + last, kind]

        def judge() -> list[Value]:
            ends = (q_idx, q_idx + (count - 1))
            return [self._verdict(queries, ends, kv_idx, block.origin + block.end)]

        (kind,) = f.choose(
            block.kind.equals(PARTIAL) & arg["verdict"].differs(f.null()),
            judge,
            lambda: [block.kind],
        )
        asked = kind.equals(PARTIAL) & arg["extent"].differs(f.null())
        first, last, kind = f.choose(asked, look, lambda: [*whole[:2], kind])
        return KeyRange(first, f.select(kind.equals(EMPTY), first, last), kind)

    def mod(self, kind: Value) -> Value:
        """The code that rewrites the scores of a tile."""
        f, arg = self.f, self.arg
        masked = f.select(kind.equals(FULL), arg["full_mod"], arg["partial_mod"])
        return f.select(kind.equals(PLAIN), arg["plain_mod"], masked)
