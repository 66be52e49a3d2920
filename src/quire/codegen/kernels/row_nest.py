"""What the decode kernel does with a few blocks of keys, for all rows of a piece.

Scores of a row begin with its first block, so that vectors of scores begin at multiples of their
size. Where a block has no key the score is -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from quire.codegen.convention import OBSERVE, ROW_REWRITE, KernelSpec, Record
from quire.codegen.kernels.items import Member, Piece, QueryBlock
from quire.codegen.kernels.nest import Nest
from quire.codegen.kernels.pieces import Pieces
from quire.codegen.kernels.row_phases import RowPhases, asked_width
from quire.codegen.kernels.sections import Here, KeyBlocks, Sections
from quire.codegen.kernels.visits import KeyPart
from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import I1, I8, I64, PTR
from quire.codegen.phases import observe
from quire.codegen.phases.order import CHAINS
from quire.codegen.phases.row_keys import (
    NEAR,
    STREAM,
    Turns,
    set_sizes,
)
from quire.codegen.phases.row_stream import (
    ASKED,
    ASKED_BEHIND,
    LINE,
    MOST_AHEAD,
)
from quire.codegen.phases.staging import padded
from quire.codegen.phases.storage import storage
from quire.codegen.scratch import BLOCKS_TOGETHER, MOST_SQUARES, Regions, row_regions, row_stride

FEW_KEYS = 512  # of a piece; prefetching cannot run far ahead of so few
COLUMNS_AGAIN = 64  # columns of the values of a block that stay in the L1 cache for all later sets


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
        self.phases, self.sections = phases, Sections(self.visits, self.scratch["sections"])

    # --- rows

    def count(self, piece: Piece) -> Value:
        """How many rows a piece has."""
        return self.arg["row_group"] * piece.queries.q_count * piece.members

    def at(self, region: str, row: Value) -> Value:
        """The address of a row in a region of scratch."""
        widths: dict[str, Value | int] = {
            "queries": self.stride["key"],
            "out": self.stride["value"],
            "merged_out": self.stride["value"],
            "scores": row_stride(self.tile),
        }
        width = widths.get(region, self.tile.lanes)
        return self.f.offset(self.scratch[region], row * width, self.tile.element)

    def observed(self, row: Value, which: str = "") -> observe.State:
        """What a row of scratch has for the argmax and the entropy."""
        return observe.State(*(self.at(which + name, row) for name in observe.State._fields))

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

    def each_set(self, begin: Value, end: Value, body: Callable[[Value, int], None]) -> None:
        """`body(row, size)` for sets of the rows [begin, end): first row and size."""
        f = self.f
        most, *fewer = set_sizes(self.tile)
        done = begin + ((end - begin + most // 4) & -most)  # three are computed as four
        with f.range(begin, done, most) as first:
            body(first, most)
        for size in fewer:
            stop = begin + ((end - begin) & -size)
            with f.range(done, stop, size) as first:
                body(first, size)
            done = f.maximum(done, stop)

    # --- a few blocks of keys

    def attend_blocks(self, piece: Piece, blocks: KeyBlocks, pieces: Pieces) -> None:
        """Compute all rows of a piece with a few blocks of keys."""
        f, rows = self.f, self.scratch["rows"]
        self._stage(blocks, "key", rows)
        self._repeat(f.offset(rows, blocks.end - blocks.begin, PTR), self.tile.lanes)
        self._stage(blocks, "value", self._values(blocks))
        self._read_on(piece.queries, blocks)
        self._multiply_keys(piece, blocks)
        with self.sections.of(blocks) as section:
            pieces.enter(section)
            here = Here(blocks, section, self.count(piece))
            with f.when(self._is_changed(here)):
                self._each_member_row(piece, lambda member, row: self._modify(member, here, row))
            with f.range(section.start, section.end, self.spec.target.block_kv) as start:
                self._weigh_block(piece, here, start)
            scaled = f.value(storage(self.spec.value).has_scales, I1)
            with f.when(scaled | self.wanted("weights_mod")):
                self._each_member_row(piece, lambda member, row: self._drop(member, here, row))
            with f.range(section.start, section.end, self.spec.target.block_kv) as start:
                self._multiply_values(piece, here, start)

    def _each_member_row(self, piece: Piece, body: Callable[[Member, Row], None]) -> None:
        """`body` for every row of every member, each by its place among those of its member."""
        with self.items.members_of(piece) as member:
            self.each_row(member.queries, lambda row: body(member, row))

    def _multiply_keys(self, piece: Piece, block: KeyBlocks) -> None:
        """Scores of all rows; if they are several sets, keys are transposed for the first one."""
        f, element, most = self.f, self.tile.element, set_sizes(self.tile)[0]
        rows, count = self.count(piece), block.end - block.begin
        size = MOST_SQUARES * self.tile.lanes  # so many stay in the L1 cache for all sets

        def operands(first: Value, j: Value, some: Value) -> dict[str, Value]:
            return {
                "scales": f.offset(self.scratch["key_scales"], j, element),
                "queries": self.at("queries", first),
                "query_stride": self.stride["key"],
                "depth": (self.arg["head_dim"] + 3) & -4,  # as in panels
                "scores": f.offset(self.at("scores", first), block.begin + j, element),
                "count": some,
            }

        def one_set(turns: Turns) -> None:
            nothing, keys = f.value(0, I64), self.scratch["rows"]

            def multiply(first: Value, size: int) -> None:
                given = operands(first, nothing, count)
                f.call(self.phases.multiply_keys[size, turns], keys=keys, **given)

            self.each_set(nothing, rows, multiply)

        def one_set_of_rows() -> None:
            few = piece.queries.kv_end - piece.queries.kv_begin <= FEW_KEYS
            f.choose(few, lambda: one_set(NEAR), lambda: one_set(STREAM))

        def several_sets() -> None:
            with f.range(0, count, size) as j:
                some = f.minimum(count - j, size)
                kept, keys = self.scratch["kept"], f.offset(self.scratch["rows"], j, PTR)
                given = operands(f.value(0, I64), j, some)
                f.call(self.phases.keep_keys, keys=keys, kept=kept, **given)

                def multiply(first: Value, size: int) -> None:
                    again = operands(first, j, some)
                    f.call(self.phases.multiply_kept[size], kept=kept, **again)

                self.each_set(f.value(most, I64), rows, multiply)

        f.choose(rows <= most, one_set_of_rows, several_sets)

    def _multiply_values(self, piece: Piece, here: Here, start: Value) -> None:
        """What the values of one block, which begins at `start`, add to the results of all rows."""
        f, element, columns = self.f, self.tile.element, self.depth["value"]
        most, size = set_sizes(self.tile)[0], self.spec.target.block_kv
        begin = f.maximum(start, here.section.begin)
        count = f.minimum(here.section.end, start + size) - begin
        values = self._values(here.blocks)

        def operands(first: Value) -> dict[str, Value]:
            alpha = first * BLOCKS_TOGETHER + (start - here.section.start).udiv(size)
            return {
                "values": f.offset(values, begin - here.blocks.begin, PTR),
                "weights": f.offset(self.at("scores", first), begin, element),
                "sums": self.scratch["sums"],
                "out": self.at("out", first),
                "out_stride": self.stride["value"],
                "alpha": self.at("alpha", alpha),
                "count": count,
                "columns": columns,
            }

        def first_time(first: Value, size: int) -> None:
            f.call(self.phases.multiply_values[size], **operands(first))

        nothing, rows = f.value(0, I64), self.count(piece)
        later = f.maximum((rows + most // 4) & -most, most)  # the end of whole sets
        self.each_set(nothing, f.minimum(rows, most), first_time)
        with f.range(0, columns, COLUMNS_AGAIN) as d, f.range(most, later, most) as first:
            stop = f.minimum(d + COLUMNS_AGAIN, columns)
            f.call(self.phases.multiply_columns, **operands(first), begin=d, end=stop)
        self.each_set(later, f.maximum(rows, later), first_time)

    def _is_changed(self, here: Here) -> Value:
        """Whether scores of a section are not just those of its keys: `_modify` has to run."""
        section, lanes = here.section, self.tile.lanes
        ragged = section.begin.differs(section.start) | (section.end & (lanes - 1)).differs(0)
        return self.visits.modified() | ragged | (self._past(here) > section.end)

    def _past(self, here: Here) -> Value:
        """Where the scores of a section end: behind the last one, at the end of a block."""
        size, section = self.spec.target.block_kv, here.section
        past = section.start + ((section.end - section.start + (size - 1)) & -size)
        past = self.f.minimum(past, BLOCKS_TOGETHER * size)  # what a row has
        return self.f.select(section.end.equals(here.blocks.end), past, section.end)

    def _modify(self, member: Member, here: Here, row: Row) -> None:
        """Apply mods to the scores of one row and a section of keys."""
        scores = self.at("scores", member.first_row + row.place)
        self._fill(scores, here)
        with self.f.when(self.visits.modified()):
            self._rewrite(member, here, row, lambda part: self.visits.mod(part.kind))

    def _drop(self, member: Member, here: Here, row: Row) -> None:
        """Apply a prob_mod, dropout and the scales of values to the weights of one row."""
        f, section = self.f, here.section
        with f.when(self.wanted("weights_mod")):
            self._rewrite(member, here, row, lambda part: self.arg["weights_mod"])
        if storage(self.spec.value).has_scales:
            scores, scales = self.at("scores", member.first_row + row.place), "value_scales"
            ends = section.begin, section.end
            f.call(self.phases.scale_weights, scores, self.scratch[scales], *ends)

    def _rewrite(
        self, member: Member, here: Here, row: Row, mod_of: Callable[[KeyPart], Value]
    ) -> None:
        """Apply the mods that `mod_of` gives for parts of a section, to one row."""
        f, queries = self.f, member.queries
        scores = self.at("scores", member.first_row + row.place)

        def rewrite(part: KeyPart) -> None:
            mod, skipped = mod_of(part), part.first & (CHAINS - 1)
            at = part.first - skipped
            where = {"q_idx": queries.q_idx + row.q, "kv_idx": part.position - skipped}
            keys = {"keys": part.end - at, "skipped": skipped}
            with f.when(mod.differs(f.null())):
                head = {"arguments": self.arg["arguments"], "b": queries.b, "h": row.h}
                some = f.offset(scores, at, self.tile.element)
                f.call_pointer(mod, ROW_REWRITE, scores=some, **head, **where, **keys)

        self.visits.each_part(here.section, rewrite)

    def _weigh_block(self, piece: Piece, here: Here, start: Value) -> None:
        """From scores to weights, for all rows and the block that begins at `start`."""
        f, size, section = self.f, self.spec.target.block_kv, here.section
        with f.when(self.wanted("observe")):
            self._each_member_row(
                piece, lambda member, row: self._observe(member, here, row, start)
            )
        keys = f.minimum(section.end - start, size)
        block = (start - section.start).udiv(size)

        def weigh(first: Value, rows: int) -> None:
            given = {
                "scores": f.offset(self.at("scores", first), start, self.tile.element),
                "running_max": self.at("running_max", first),
                "running_sum": self.at("running_sum", first),
                "alpha": self.at("alpha", first * BLOCKS_TOGETHER + block),
                "rows": self._not_asked_for(here, start * here.rows + first * keys),
                "count": (keys + (CHAINS - 1)) & -CHAINS,
            }
            f.call(self.phases.exponentiate[rows], **given)

        self.each_set(f.value(0, I64), here.rows, weigh)

    def _observe(self, member: Member, here: Here, row: Row, start: Value) -> None:
        """Show the scores of one row and a block to `observe`."""
        f, size, block = self.f, self.spec.target.block_kv, here.section
        place = member.first_row + row.place
        begin = f.maximum(start, block.begin)
        position = block.origin + begin - block.start
        where = {"first": position - member.queries.kv_begin, "lead": begin - start}
        where |= {"keys": f.minimum(block.end - start, size)}
        state = {"running_sum": self.at("running_sum", place), **self.observed(place)._asdict()}
        scores = f.offset(self.at("scores", place), start, self.tile.element)
        given = {"chains": f.null(), "scores": scores}  # chains stay in registers
        f.call_pointer(self.arg["observe"], OBSERVE, **given, **state, **where)

    def _fill(self, scores: Value, here: Here) -> None:
        """The scores of keys that do not exist are -inf, up to whole blocks after the last one."""
        f, tile, block, past = self.f, self.tile, here.section, self._past(here)
        numbers = tile.element.as_int.vector(tile.lanes)

        def below(limit: Value) -> Value:
            return f.iota(numbers) < f.splat(f.convert(limit, numbers.scalar), numbers)

        with f.range(block.start, block.begin, tile.lanes) as j:
            score = tile.load(f, scores, j)
            tile.store(f, f.select(below(block.begin - j), -math.inf, score), scores, j)
        with f.range(block.end & -tile.lanes, past, tile.lanes) as j:
            score = tile.load(f, scores, j)
            tile.store(f, f.select(below(block.end - j), score, -math.inf), scores, j)

    # --- where keys and values are, and prefetching them

    def _stage(self, blocks: KeyBlocks, name: str, rows: Value) -> None:
        """Write the addresses of the keys or values of some blocks to the table `rows`.

        If a product cannot read them where they are, they are copied to scratch.
        """
        f, record, dtype = self.f, self.placements[name], self.spec.dtype_of(name)
        stored, stride = storage(dtype), self.stride[name]

        def stage(part: KeyPart) -> None:
            before, count = part.first - blocks.begin, part.end - part.first
            begin, end = part.position, part.position + count
            addresses = f.offset(rows, before, PTR)
            in_place = f.call(self.phases.points[dtype], record, begin, end, addresses)
            with f.when(in_place.equals(0)):
                into = f.offset(self.scratch[f"{name}s"], before * stride, stored.memory)
                copy = {"rows": record, "addresses": addresses, "count": count}
                f.call(self.phases.copies[dtype], **copy, into=into, stride=stride)
            if stored.has_scales:
                # Those of keys begin with the first key, those of values with the block.
                at = part.first if name == "value" else before
                scales = f.offset(self.scratch[f"{name}_scales"], at, self.tile.element)
                f.call(self.phases.gather_scales[dtype], record, begin, end, scales)

        with self.sections.of(blocks) as section:
            self.visits.each_part(section, stage)

    def _values(self, block: KeyBlocks) -> Value:
        """The table of the addresses of a block's values, behind whole squares of keys."""
        count = block.end - block.begin
        squares = (count + (self.tile.lanes - 1)) & -self.tile.lanes
        return self.f.offset(self.scratch["rows"], squares, PTR)

    def _repeat(self, end: Value, count: int) -> None:
        """From `end` on, write the last address of the table `count` times more."""
        f, several = self.f, I64.vector(8)
        address = f.splat(f.load(I64, end, -1), several)
        for place in range(0, count, several.lanes):
            f.store(address, end, place, align=I64.size)

    def _read_on(self, queries: QueryBlock, block: KeyBlocks) -> None:
        """Append the addresses of the next block's first keys, so that prefetching can run ahead.

        At the end there are none: that of the last value is appended.
        """
        f, begin = self.f, block.following
        behind = f.offset(self._values(block), block.end - block.begin, PTR)

        def point() -> None:
            end = f.minimum(begin + MOST_AHEAD, queries.kv_end)
            record = self.placements["key"]
            f.call(self.phases.points[self.spec.key], record, begin, end, behind)

        f.choose(begin < queries.kv_end, point, lambda: self._repeat(behind, MOST_AHEAD))

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

    def _not_asked_for(self, here: Here, scores: Value) -> Value:
        """The table of addresses from the first value on that has not been prefetched yet.

        The products with keys prefetch some values, and so does the softmax of earlier `scores`, a
        line with each vector.
        """
        f, blocks = self.f, here.blocks
        count, values = blocks.end - blocks.begin, self._values(blocks)
        if not asked_width(self.spec):
            return values
        each = set_sizes(self.tile)[0] * self.spec.target.block_kv // self.tile.lanes
        behind = STREAM.keys(self.tile, storage(self.spec.key)) * self._row_bytes("key")
        lines = scores.udiv(self.tile.lanes) * LINE
        asked = (behind + ASKED_BEHIND[0] + lines).udiv(self._row_bytes("value"))
        return f.offset(values, f.minimum(asked, count + MOST_AHEAD - each), PTR)

    def _row_bytes(self, name: str) -> Value:
        """The bytes of a row of keys or values, at least 1; a constant if the width is known."""
        size = storage(self.spec.dtype_of(name)).memory.size
        width = self.spec.head_dim if name == "key" else self.spec.value_dim
        if width:
            return self.f.value(padded(self.tile, width) * size, I64)
        return self.f.maximum(self.depth[name] * size, 1)
