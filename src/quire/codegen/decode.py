"""The kernel for few queries: every row of scores by itself, lanes along columns and keys.

    for every sequence and key head (an item; `row_group` query heads at a time):
        for every block of keys that the visitor names, in ascending order:
            scores  = keys . queries              for a set of rows at a time
            scores  = mod(scores)                 a ROW function for each row, lanes over keys
            weights = exp4(scores - maximum)
            out     = out alpha + weights . values
        out / sum to the user's tensor

A panel of `forward.py` would compute as many queries as it has lanes, whether they exist or not.
Here hardly anything is computed for nobody: the time is that of reading keys and values once, which
all rows of a group share. The record, the items and the visitor are those of `forward.py`; the
phases are in `row_tiles.py`, and how they read in `row_stream.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.codegen import observe
from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import (
    BLOCKS_TOGETHER,
    OBSERVE,
    PARTIAL_STATES,
    ROW_REWRITE,
    SEQUENCE,
    ForwardSpec,
    decode_regions,
    partial_stride,
    row_stride,
)
from quire.codegen.items import KeyBlock, Member, Piece, QueryBlock, Record
from quire.codegen.nest import Nest, entry
from quire.codegen.row_stream import (
    ASKED,
    LINE,
    MOST_AHEAD,
    fold_row,
    unfold_row,
    write_copy,
    write_gather_scales,
    write_point,
)
from quire.codegen.row_tiles import (
    COLUMNS_AGAIN,
    KEYS_AGAIN,
    READERS,
    set_sizes,
    write_add_read_values,
    write_exponentiate,
    write_merge,
    write_multiply_columns,
    write_multiply_keys,
    write_multiply_values,
    write_scale_weights,
)
from quire.codegen.softmax import close, sink_of
from quire.codegen.staging import storage, write_gather, write_scatter
from quire.codegen.tiles import across
from quire.codegen.types import I8, I64, PTR


class _DecodePhases(NamedTuple):
    """The functions that the loop nest calls, by dtype or by how many rows take part."""

    gather: Function
    points: dict[str, Function]
    copies: dict[str, Function]
    scatter: Function
    multiply_keys: dict[int, Function]
    multiply_values: dict[int, Function]
    multiply_keys_again: Function
    multiply_columns: Function
    gather_scales: Function
    scale_weights: Function
    exponentiate: Function
    merge: Function


def write_decode(spec: ForwardSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(FORWARD record), run by every thread."""
    module = Module()
    phases = _write_phases(module, spec)
    with entry(module) as f:
        kernel = _DecodeNest(spec, f, phases)
        with kernel.numbers() as number:
            kernel.attend(kernel.work.find_piece(number))
    return module


def _write_phases(module: Module, spec: ForwardSpec) -> _DecodePhases:
    tile, sizes = spec.tile, set_sizes(spec.tile)
    key, value = storage(spec.key), storage(spec.value)
    read = {stored.name: stored for stored in (key, value)}
    careful = write_add_read_values(module, tile, value)
    return _DecodePhases(
        gather=write_gather(module, tile, storage(spec.query)),
        points={name: write_point(module, tile, stored) for name, stored in read.items()},
        copies={name: write_copy(module, tile, stored) for name, stored in read.items()},
        scatter=write_scatter(module, tile, storage(spec.out)),
        multiply_keys={n: write_multiply_keys(module, tile, key, n, spec.head_dim) for n in sizes},
        multiply_values={
            n: write_multiply_values(module, tile, value, n, careful, width=spec.value_dim)
            for n in sizes
        },
        multiply_keys_again=write_multiply_keys(
            module, tile, key, sizes[0], spec.head_dim, again=True
        ),
        multiply_columns=write_multiply_columns(module, tile, value, sizes[0], careful),
        gather_scales=write_gather_scales(module, tile),
        scale_weights=write_scale_weights(module, tile),
        exponentiate=write_exponentiate(module, tile, value, spec.value_dim),
        merge=write_merge(module, tile),
    )


# --- the loop nest -------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One query of one head: the row of scratch that it has, and what the mods are told."""

    place: Value
    h: Value
    q: Value


class _DecodeNest(Nest):
    """The loop nest."""

    def __init__(self, spec: ForwardSpec, f: Function, phases: _DecodePhases) -> None:
        def regions(arg: Record) -> Iterator[tuple[str, Value]]:
            rows = arg["block_q"] * arg["row_group"] * arg["members"]
            return decode_regions(spec.tile, arg["head_dim"], arg["value_dim"], rows)

        super().__init__(spec, f, regions, ("query", "key", "value", "out"))
        self.phases = phases

    def attend(self, piece: Piece) -> None:
        """One item, from the queries to the results of those whose last piece it is."""
        f = self.f
        for name in ("key", "value"):
            self.work.describe_placement(piece.whole, name, self.placements[name])
        self._ask_for_first(piece.queries)
        with self.work.members_of(piece) as member:
            self._start(member)
        with f.range(0, self.depth["key"], self.tile.lanes) as d:
            nothing = f.value(0.0, self.tile.vector)
            self.tile.store(f, nothing, self._at("queries", self._count(piece)), d)

        def judge(first: Value, stop: Value) -> Value:
            return self.work.common_verdict(piece, first, stop)

        with self.work.visit(piece.queries, judge, BLOCKS_TOGETHER) as block:
            self._attend_block(piece, block)
        pieces = f.field(SEQUENCE, piece.sequence, "pieces")

        def at_once() -> list[Value]:
            self._finish(piece.whole)
            return []

        def later() -> list[Value]:
            with self.work.members_of(piece) as member:
                self._leave(member, piece.place)
            with self.work.members_of(piece) as member:
                self._arrive(member)
            return []

        f.choose(pieces.equals(1) & piece.members.equals(1), at_once, later)

    def _partial(self, slot: Value, row: Value) -> Value:
        """Where a row of a piece is left."""
        rows = self.arg["block_q"] * self.arg["row_group"]
        stride = partial_stride(self.tile, self.arg["value_dim"])
        return self.f.offset(self.arg["partials"], (slot * rows + row) * stride, self.tile.element)

    def _leave(self, member: Member, piece: Value) -> None:
        """Put down what a piece has found, for whoever finishes last."""
        f, tile = self.f, self.tile

        def put_down(row: _Row) -> None:
            into = self._partial(member.first_slot + piece, row.place)
            from_row = member.first_row + row.place
            for place, name in enumerate(PARTIAL_STATES):
                tile.store(f, tile.load(f, self._at(name, from_row)), into, place * tile.lanes)
            out = f.offset(into, len(PARTIAL_STATES) * tile.lanes, tile.element)
            with f.range(0, self.depth["value"], tile.lanes) as d:
                tile.store(f, tile.load(f, self._at("out", from_row), d), out, d)

        self._each_row(member.queries, put_down)

    def _arrive(self, member: Member) -> None:
        """Count a piece of a sequence; after the last one, merge them all and write the result."""
        f = self.f
        arrivals = f.offset(self.arg["arrivals"], member.first_slot, I64)
        arrived = f.atomic_add(arrivals, 1, publish=True)

        def merge(row: _Row) -> None:
            mine = {name: self._at(name, row.place) for name in (*PARTIAL_STATES, "out")}
            with f.range(0, member.pieces) as place:  # in this order, whoever came last
                part = self._partial(member.first_slot + place, row.place)
                f.call(self.phases.merge, **mine, part=part, columns=self.depth["value"])

        with f.when(arrived.equals(member.pieces - 1)):
            self._each_row(member.queries, lambda row: self._clear(row.place))
            self._each_row(member.queries, merge)
            self._finish(member.queries)

    def _each_set(
        self,
        piece: Piece,
        body: Callable[[Value, int], None],
        again: Callable[[Value, Value], None],
    ) -> None:
        """For every set of rows: the first one, and how many there are.

        The first sets read a block from memory. All others of their size have it `again`: from
        which row on, and up to which.
        """
        f, count = self.f, self._count(piece)
        most, *fewer = set_sizes(self.tile)
        done = (count + most // 4) & -most  # three rows, and one that nobody has, are four
        readers = f.minimum(done, READERS * most)
        with f.range(0, readers, most) as first:
            body(first, most)
        again(readers, done)
        for size in fewer:
            stop = count & -size
            with f.range(done, stop, size) as first:
                body(first, size)
            done = f.maximum(done, stop)

    def _count(self, piece: Piece) -> Value:
        """How many rows a piece has."""
        return self.arg["row_group"] * piece.queries.q_count * piece.members

    def _each_head(self, queries: QueryBlock, body: Callable[[Value, Value], None]) -> None:
        """For every head of an item: its number, and the scratch row of its first query."""
        with self.f.range(0, self.arg["row_group"]) as g:
            body(queries.h * self.arg["row_group"] + g, g * queries.q_count)

    def _each_row(self, queries: QueryBlock, body: Callable[[_Row], None]) -> None:
        def each_query(head: Value, first: Value) -> None:
            with self.f.range(0, queries.q_count) as q:
                body(_Row(first + q, head, q))

        self._each_head(queries, each_query)

    def _at(self, region: str, row: Value) -> Value:
        """Where a row of scratch begins."""
        widths: dict[str, Value | int] = {
            "queries": self.stride["key"],
            "out": self.stride["value"],
            "scores": row_stride(self.tile),
        }
        return self.f.offset(
            self.scratch[region], row * widths.get(region, self.tile.lanes), self.tile.element
        )

    def _start(self, member: Member) -> None:
        """Queries to scratch, scaled, and nothing read so far."""
        f, tile, queries = self.f, self.tile, member.queries
        scale = f.splat(f.convert(self.arg["scale"], tile.element), tile.vector)

        def gather(head: Value, first: Value) -> None:
            self.work.describe_placement(
                queries._replace(h=head), "query", self.placements["query"]
            )
            begin, end = queries.q_first, queries.q_first + queries.q_count
            into = self._at("queries", member.first_row + first)
            placement, stride = self.placements["query"], self.stride["key"]
            f.call(self.phases.gather, placement, begin, end, into=into, stride=stride)

        def prepare(row: _Row) -> None:
            place = member.first_row + row.place
            with f.range(0, self.depth["key"], tile.lanes) as d:
                at = f.offset(self._at("queries", place), d, tile.element)
                tile.store(f, tile.load(f, at) * scale, at)
            fold_row(f, tile, storage(self.spec.key), self._at("queries", place), self.depth["key"])
            self._clear(place)

        self._each_head(queries, gather)
        self._each_row(queries, prepare)

    def _clear(self, row: Value) -> None:
        """Nothing read so far."""
        f, tile = self.f, self.tile
        with f.range(0, self.depth["value"], tile.lanes) as d:
            tile.store(f, f.value(0.0, tile.vector), self._at("out", row), d)
        tile.store(f, f.value(-math.inf, tile.vector), self._at("running_max", row))
        tile.store(f, f.value(0.0, tile.vector), self._at("running_sum", row))
        with f.when(self.arg["observe"].differs(f.null())):
            observe.forget(f, tile, self._observed(row))

    def _observed(self, row: Value) -> observe.State:
        """What a row of scratch has for the argmax and the entropy."""
        return observe.State(*(self._at(name, row) for name in observe.State._fields))

    def _attend_block(self, piece: Piece, block: KeyBlock) -> None:
        """All rows and one block of keys."""
        f = self.f
        count = block.end - block.begin
        keys = self.scratch["rows"]
        values = f.offset(keys, count, PTR)
        self._stage(block, "key", keys)
        self._stage(block, "value", values)
        self._read_on(piece.queries, block)

        def multiply(function: Function, first: Value, j: Value | int, some: Value) -> None:
            element = self.tile.element
            f.call(
                function,
                keys=f.offset(keys, j, PTR),
                scales=f.offset(self.scratch["key_scales"], j, element),
                queries=self._at("queries", first),
                query_stride=self.stride["key"],
                depth=self.depth["key"],
                scores=f.offset(self._at("scores", first), j, element),
                count=some,
            )

        def multiply_keys(first: Value, size: int) -> None:
            multiply(self.phases.multiply_keys[size], first, 0, count)

        def multiply_keys_again(begin: Value, end: Value) -> None:
            with f.range(0, count, KEYS_AGAIN) as j, f.range(begin, end, most) as first:
                multiply(
                    self.phases.multiply_keys_again, first, j, f.minimum(count - j, KEYS_AGAIN)
                )

        def operands(first: Value) -> dict[str, Value]:
            return {
                "values": values,
                "weights": self._at("scores", first),
                "sums": self.scratch["sums"],
                "out": self._at("out", first),
                "out_stride": self.stride["value"],
                "alpha": self._at("alpha", first),
                "count": count,
                "columns": columns,
            }

        def multiply_values(first: Value, size: int) -> None:
            f.call(self.phases.multiply_values[size], **operands(first))

        def multiply_columns(begin: Value, end: Value) -> None:
            with f.range(0, columns, COLUMNS_AGAIN) as d, f.range(begin, end, most) as first:
                stop = f.minimum(d + COLUMNS_AGAIN, columns)
                f.call(self.phases.multiply_columns, **operands(first), begin=d, end=stop)

        most, columns = set_sizes(self.tile)[0], self.depth["value"]
        self._each_set(piece, multiply_keys, multiply_keys_again)
        with self.work.members_of(piece) as member:
            self._each_row(member.queries, lambda row: self._weigh(member, block, row))
        self._each_set(piece, multiply_values, multiply_columns)

    def _stage(self, block: KeyBlock, name: str, rows: Value) -> None:
        """Where the keys or values of a block are; copied to scratch if they lie there oddly."""
        f, record, kind = self.f, self.placements[name], self.spec.dtype_of(name)
        begin, end = block.origin + block.begin, block.origin + block.end
        in_place = f.call(self.phases.points[kind], record, begin, end, rows)
        with f.when(in_place.equals(0)):
            into, stride = self.scratch[f"{name}s"], self.stride[name]
            copy, count = self.phases.copies[kind], end - begin
            f.call(copy, record, addresses=rows, count=count, into=into, stride=stride)
        if storage(kind).has_scales:
            into = self.scratch[f"{name}_scales"]
            f.call(self.phases.gather_scales, record, begin, end, into)

    def _read_on(self, queries: QueryBlock, block: KeyBlock) -> None:
        """After the keys and values of a block come keys of the next one, or what is at hand."""
        f = self.f
        following = block.origin + block.end
        here = block.origin + block.begin
        begin = f.select(following < queries.kv_end, following, here)
        end = f.minimum(begin + MOST_AHEAD, queries.kv_end)
        into = f.offset(self.scratch["rows"], 2 * (block.end - block.begin), PTR)
        f.call(self.phases.points[self.spec.key], self.placements["key"], begin, end, into)

    def _ask_for_first(self, queries: QueryBlock) -> None:
        """Ask for the first keys of all."""
        f, rows = self.f, self.scratch["rows"]
        row_bytes, begin = self._row_bytes("key"), queries.kv_begin
        count = f.minimum(f.value(ASKED[0], I64).udiv(row_bytes), MOST_AHEAD)
        end = f.minimum(begin + count, queries.kv_end)
        f.call(self.phases.points[self.spec.key], self.placements["key"], begin, end, rows)
        with f.range(0, end - begin) as j:
            row = f.load(PTR, rows, j)
            with f.range(0, row_bytes, LINE) as at:
                f.prefetch(f.offset(row, at, I8))

    def _not_asked_for(self, count: Value, place: Value) -> Value:
        """The first row of values that neither products nor the rows before have asked for."""
        f = self.f
        values = f.offset(self.scratch["rows"], count, PTR)
        if not self.spec.value_dim:
            return values
        lines = (count + (self.tile.lanes - 1)).udiv(self.tile.lanes)  # of each row
        asked = (ASKED[0] + place * lines * LINE).udiv(self._row_bytes("value"))
        return f.offset(values, f.minimum(asked, count + MOST_AHEAD - lines), PTR)

    def _row_bytes(self, name: str) -> Value:
        """How long a row of keys or values is, and never nothing."""
        size = storage(self.spec.dtype_of(name)).memory.size
        return self.f.maximum(self.depth[name] * size, 1)

    def _weigh(self, member: Member, block: KeyBlock, row: _Row) -> None:
        """From the products of one row and one block of keys to its weights."""
        f, arg, queries = self.f, self.arg, member.queries
        count, place = block.end - block.begin, member.first_row + row.place
        scores = self._at("scores", place)

        def rewrite(mod: Value) -> None:
            q_idx, kv_idx = queries.q_idx + row.q, block.origin + block.begin
            with f.when(mod.differs(f.null())):
                f.call_pointer(
                    mod,
                    ROW_REWRITE,
                    scores=scores,
                    arguments=arg["arguments"],
                    b=queries.b,
                    h=row.h,
                    q_idx=q_idx,
                    kv_idx=kv_idx,
                    keys=count,
                )

        rewrite(self.work.mod(block.kind))
        running_max, running_sum = (self._at(f"running_{x}", place) for x in ("max", "sum"))
        with f.when(arg["observe"].differs(f.null())):
            first = block.origin + block.begin - queries.kv_begin
            state = self._observed(place)._asdict()
            f.call_pointer(
                arg["observe"],
                OBSERVE,
                scores=scores,
                running_sum=running_sum,
                **state,
                first=first,
                keys=count,
            )
        alpha = self._at("alpha", place)
        values = self._not_asked_for(count, place)
        f.call(
            self.phases.exponentiate,
            scores=scores,
            running_max=running_max,
            running_sum=running_sum,
            alpha=alpha,
            count=count,
            rows=values,
        )
        rewrite(arg["weights_mod"])
        if storage(self.spec.value).has_scales:
            f.call(self.phases.scale_weights, scores, self.scratch["value_scales"], count)

    def _finish(self, queries: QueryBlock) -> None:
        """Divide by the sums and write out, lse and the like."""
        self._each_head(queries, lambda head, first: self._finish_head(queries, head, first))

    def _finish_head(self, queries: QueryBlock, head: Value, first: Value) -> None:
        f, tile, arg = self.f, self.tile, self.arg
        sink = sink_of(f, tile, arg, head)
        numbers = queries.b * arg["lse_batch"] + head * arg["lse_head"]

        with f.range(0, queries.q_count) as q:
            row = first + q
            total = across(f, tile.load(f, self._at("running_sum", row)), lambda a, b: a + b)
            closed = close(f, tile.load(f, self._at("running_max", row)), total, sink)
            with f.range(0, self.depth["value"], tile.lanes) as d:
                at = f.offset(self._at("out", row), d, tile.element)
                tile.store(f, f.fma(tile.load(f, at), closed.share, 0.0), at)
            kind = storage(self.spec.value)
            unfold_row(f, tile, kind, self._at("out", row), self.depth["value"])
            place = numbers + (queries.q_row + queries.q_first + q) * arg["lse_row"]
            for name, value in (("lse", closed.lse), ("max_scores", closed.peak)):
                with f.when(arg[name].differs(f.null())):
                    f.store(f.extract(value, 0), arg[name], place)
            observed = self._observed(row)
            with f.when(arg["argmax"].differs(f.null())):
                key = observe.first_of_best(f, tile, observed)
                f.store(observe.position(f, key, queries.kv_begin), arg["argmax"], place)
            with f.when(arg["entropy"].differs(f.null())):
                surprise = across(f, tile.load(f, observed.surprise), lambda a, b: a + b)
                nats = observe.entropy(f, surprise, total, closed)
                f.store(f.extract(nats, 0), arg["entropy"], place)
        self.work.describe_placement(queries._replace(h=head), "out", self.placements["out"])
        begin, end = queries.q_first, queries.q_first + queries.q_count
        source, stride = self._at("out", first), self.stride["value"]
        placement = self.placements["out"]
        f.call(self.phases.scatter, placement, begin, end, source=source, stride=stride)
