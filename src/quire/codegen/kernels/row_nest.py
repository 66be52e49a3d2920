"""What the decode kernel does with one block of keys: all rows of a piece, lanes over columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.codegen.convention import OBSERVE, ROW_REWRITE, KernelSpec, Record
from quire.codegen.kernels.items import Member, Piece, QueryBlock
from quire.codegen.kernels.nest import Nest
from quire.codegen.kernels.visits import KeyBlock
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I8, I64, PTR
from quire.codegen.phases import observe
from quire.codegen.phases.row_keys import set_sizes, write_multiply_keys
from quire.codegen.phases.row_softmax import write_exponentiate, write_merge, write_scale_weights
from quire.codegen.phases.row_stream import (
    ASKED,
    LINE,
    MOST_AHEAD,
    write_copy,
    write_gather_scales,
    write_point,
)
from quire.codegen.phases.row_values import (
    write_add_read_values,
    write_multiply_columns,
    write_multiply_values,
)
from quire.codegen.phases.staging import storage, write_gather, write_scatter
from quire.codegen.scratch import Regions, row_regions, row_stride

READERS = 1  # sets that read a block from memory; all later ones find it in the caches
KEYS_AGAIN = 48  # keys that stay in the L1 cache while all later sets use them
COLUMNS_AGAIN = 32  # the same for columns of the values of a block


class RowPhases:
    """The functions that the kernel calls, some by dtype or by the number of rows of a set."""

    def __init__(self, module: Module, spec: KernelSpec) -> None:
        tile, sizes = spec.tile, set_sizes(spec.tile)
        key, value = storage(spec.key), storage(spec.value)
        read = {stored.name: stored for stored in (key, value)}

        def multiply_keys(rows: int, *, again: bool = False) -> Function:
            return write_multiply_keys(module, tile, key, rows, spec.head_dim, again=again)

        careful = write_add_read_values(module, tile, value)
        self.gather = write_gather(module, tile, storage(spec.query))
        self.points = {name: write_point(module, tile, stored) for name, stored in read.items()}
        self.copies = {name: write_copy(module, tile, stored) for name, stored in read.items()}
        self.scatter = write_scatter(module, tile, storage(spec.out))
        self.multiply_keys = {rows: multiply_keys(rows) for rows in sizes}
        self.multiply_values = {
            rows: write_multiply_values(module, tile, value, rows, careful, width=spec.value_dim)
            for rows in sizes
        }
        self.multiply_keys_again = multiply_keys(sizes[0], again=True)
        self.multiply_columns = write_multiply_columns(module, tile, value, sizes[0], careful)
        self.gather_scales = write_gather_scales(module, tile)
        self.scale_weights = write_scale_weights(module, tile)
        self.exponentiate = write_exponentiate(module, tile, value, spec.value_dim)
        self.merge = write_merge(module, tile)


class Row(NamedTuple):
    """One query of one head: its row among those of its sequence, its head, its number."""

    place: Value
    h: Value
    q: Value


class RowNest(Nest):
    """The part of the decode kernel that computes blocks of keys."""

    def __init__(self, spec: KernelSpec, f: Function, phases: RowPhases) -> None:
        def regions(arg: Record) -> Regions[Value]:
            rows = arg["block_q"] * arg["row_group"] * arg["members"]
            return row_regions(spec.tile, arg["head_dim"], arg["value_dim"], rows)

        super().__init__(spec, f, regions, ("query", "key", "value", "out"))
        self.phases = phases

    # --- rows

    def count(self, piece: Piece) -> Value:
        """How many rows a piece has."""
        return self.arg["row_group"] * piece.queries.q_count * piece.members

    def at(self, region: str, row: Value) -> Value:
        """The address of a row in a region of scratch."""
        widths: dict[str, Value | int] = {
            "queries": self.stride["key"],
            "out": self.stride["value"],
            "scores": row_stride(self.tile),
        }
        width = widths.get(region, self.tile.lanes)
        return self.f.offset(self.scratch[region], row * width, self.tile.element)

    def observed(self, row: Value) -> observe.State:
        """What a row of scratch has for the argmax and the entropy."""
        return observe.State(*(self.at(name, row) for name in observe.State._fields))

    def each_head(self, queries: QueryBlock, body: Callable[[Value, Value], None]) -> None:
        """`body(head, row)` for every head of an item; the row is that of its first query."""
        with self.f.range(0, self.arg["row_group"]) as g:
            body(queries.h * self.arg["row_group"] + g, g * queries.q_count)

    def each_row(self, queries: QueryBlock, body: Callable[[Row], None]) -> None:
        """`body` for every query of every head of an item."""

        def each_query(head: Value, first: Value) -> None:
            with self.f.range(0, queries.q_count) as q:
                body(Row(first + q, head, q))

        self.each_head(queries, each_query)

    def each_set(
        self,
        piece: Piece,
        first_time: Callable[[Value, int], None],
        again: Callable[[Value, Value], None],
    ) -> None:
        """`first_time(row, size)` for sets that read keys or values from memory: first row, size.

        All later sets of the largest size find them in a cache: `again(begin, end)`, by rows.
        """
        f, count = self.f, self.count(piece)
        most, *fewer = set_sizes(self.tile)
        done = (count + most // 4) & -most  # three rows are computed as four: the last is zero
        readers = f.minimum(done, READERS * most)
        with f.range(0, readers, most) as first:
            first_time(first, most)
        again(readers, done)
        for size in fewer:
            stop = count & -size
            with f.range(done, stop, size) as first:
                first_time(first, size)
            done = f.maximum(done, stop)

    # --- one block of keys

    def attend_block(self, piece: Piece, block: KeyBlock) -> None:
        """Compute all rows of a piece with one block of keys."""
        f = self.f
        count, keys = block.end - block.begin, self.scratch["rows"]
        values = f.offset(keys, count, PTR)
        self._stage(block, "key", keys)
        self._stage(block, "value", values)
        self._read_on(piece.queries, block)
        self._multiply_keys(piece, keys, count)
        with self.items.members_of(piece) as member:
            self.each_row(member.queries, lambda row: self._weigh(member, block, row))
        self._multiply_values(piece, values, count)

    def _multiply_keys(self, piece: Piece, keys: Value, count: Value) -> None:
        """Scores of all rows and `count` keys."""
        f, element, most = self.f, self.tile.element, set_sizes(self.tile)[0]

        def multiply(function: Function, first: Value, j: Value | int, some: Value) -> None:
            f.call(
                function,
                keys=f.offset(keys, j, PTR),
                scales=f.offset(self.scratch["key_scales"], j, element),
                queries=self.at("queries", first),
                query_stride=self.stride["key"],
                depth=self.depth["key"],
                scores=f.offset(self.at("scores", first), j, element),
                count=some,
            )

        def first_time(first: Value, size: int) -> None:
            multiply(self.phases.multiply_keys[size], first, 0, count)

        def again(begin: Value, end: Value) -> None:
            with f.range(0, count, KEYS_AGAIN) as j, f.range(begin, end, most) as first:
                some = f.minimum(count - j, KEYS_AGAIN)
                multiply(self.phases.multiply_keys_again, first, j, some)

        self.each_set(piece, first_time, again)

    def _multiply_values(self, piece: Piece, values: Value, count: Value) -> None:
        """What `count` values add to the results of all rows."""
        f, most, columns = self.f, set_sizes(self.tile)[0], self.depth["value"]

        def operands(first: Value) -> dict[str, Value]:
            return {
                "values": values,
                "weights": self.at("scores", first),
                "sums": self.scratch["sums"],
                "out": self.at("out", first),
                "out_stride": self.stride["value"],
                "alpha": self.at("alpha", first),
                "count": count,
                "columns": columns,
            }

        def first_time(first: Value, size: int) -> None:
            f.call(self.phases.multiply_values[size], **operands(first))

        def again(begin: Value, end: Value) -> None:
            with f.range(0, columns, COLUMNS_AGAIN) as d, f.range(begin, end, most) as first:
                stop = f.minimum(d + COLUMNS_AGAIN, columns)
                f.call(self.phases.multiply_columns, **operands(first), begin=d, end=stop)

        self.each_set(piece, first_time, again)

    def _weigh(self, member: Member, block: KeyBlock, row: Row) -> None:
        """From the scores of one row and one block of keys to its weights."""
        f, arg, queries = self.f, self.arg, member.queries
        count, place = block.end - block.begin, member.first_row + row.place
        scores = self.at("scores", place)

        def rewrite(mod: Value) -> None:
            where = {"q_idx": queries.q_idx + row.q, "kv_idx": block.origin + block.begin}
            with f.when(mod.differs(f.null())):
                head = {"arguments": arg["arguments"], "b": queries.b, "h": row.h}
                f.call_pointer(mod, ROW_REWRITE, scores=scores, **head, **where, keys=count)

        rewrite(self.visits.mod(block.kind))
        running = {name: self.at(name, place) for name in ("running_max", "running_sum")}
        with f.when(self.wanted("observe")):
            first = block.origin + block.begin - queries.kv_begin
            state = {"running_sum": running["running_sum"], **self.observed(place)._asdict()}
            function = arg["observe"]
            f.call_pointer(function, OBSERVE, scores=scores, **state, first=first, keys=count)
        alpha = self.at("alpha", place)
        rows = self._not_asked_for(count, place)
        state = {"scores": scores, **running, "alpha": alpha}
        f.call(self.phases.exponentiate, **state, count=count, rows=rows)
        rewrite(arg["weights_mod"])
        if storage(self.spec.value).has_scales:
            f.call(self.phases.scale_weights, scores, self.scratch["value_scales"], count)

    # --- where keys and values are, and prefetching them

    def _stage(self, block: KeyBlock, name: str, rows: Value) -> None:
        """Write the addresses of the keys or values of a block to the table `rows`.

        If a product cannot read them where they are, they are copied to scratch.
        """
        f, record, dtype = self.f, self.placements[name], self.spec.dtype_of(name)
        begin, end = block.origin + block.begin, block.origin + block.end
        in_place = f.call(self.phases.points[dtype], record, begin, end, rows)
        with f.when(in_place.equals(0)):
            copy = {"rows": record, "addresses": rows, "count": end - begin}
            into = {"into": self.scratch[f"{name}s"], "stride": self.stride[name]}
            f.call(self.phases.copies[dtype], **copy, **into)
        if storage(dtype).has_scales:
            scales = self.scratch[f"{name}_scales"]
            f.call(self.phases.gather_scales, record, begin, end, scales)

    def _read_on(self, queries: QueryBlock, block: KeyBlock) -> None:
        """Append the addresses of the next block's first keys, so that prefetching can run ahead.

        At the end there are none: the first keys of this block are appended again.
        """
        f = self.f
        following = block.origin + block.end
        here = block.origin + block.begin
        begin = f.select(following < queries.kv_end, following, here)
        end = f.minimum(begin + MOST_AHEAD, queries.kv_end)
        into = f.offset(self.scratch["rows"], 2 * (block.end - block.begin), PTR)
        f.call(self.phases.points[self.spec.key], self.placements["key"], begin, end, into)

    def ask_for_first(self, queries: QueryBlock) -> None:
        """Prefetch the first keys of a piece."""
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
        """The table of addresses from the first value on that has not been prefetched yet.

        The products with keys prefetch some values, and so does the softmax of every earlier row.
        """
        f = self.f
        values = f.offset(self.scratch["rows"], count, PTR)
        if not self.spec.value_dim:
            return values
        lines = (count + (self.tile.lanes - 1)).udiv(self.tile.lanes)  # prefetched with each row
        asked = (ASKED[0] + place * lines * LINE).udiv(self._row_bytes("value"))
        return f.offset(values, f.minimum(asked, count + MOST_AHEAD - lines), PTR)

    def _row_bytes(self, name: str) -> Value:
        """The bytes of a row of keys or values, at least 1."""
        size = storage(self.spec.dtype_of(name)).memory.size
        return self.f.maximum(self.depth[name] * size, 1)
