"""The backward kernel: the tiles of the forward pass again, with five products in each.

    for every share (items; threads take them off a counter), for every slice of it:
        for every block of queries of the slice:
            read queries and grad_out, as rows and as panels; delta = grad_out . out
            for every block of keys that they attend to:
                copy keys and values to scratch
                for every panel of queries:
                    scores  = keys . queries
                    slopes  = values . grad_out
                    weights, slopes = derive(scores, slopes)     the mods and their derivatives
                    grad_query += slopes . keys
                grad_value += weights . grad_out
                grad_key   += slopes . queries
            write grad_query to the user's tensor
        add the sums of the slice to those of the share

Each slice has its own sums of grad_key, grad_value and of the gradients of captured tensors, which
are added in ascending order. Which slices there are depends only on the number of queries, so the
bits of a gradient depend on nothing else, and another process may compute some of them.
"""

from __future__ import annotations

import math

from quire.codegen.convention import BACKWARD, DERIVE, KernelSpec, Record, gradient_columns
from quire.codegen.kernels.items import QueryBlock, Share, Slice
from quire.codegen.kernels.key_sums import KeySums
from quire.codegen.kernels.nest import Nest, entry
from quire.codegen.kernels.visits import KeyBlock, KeyRange
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I1, I64
from quire.codegen.phases.gradient_tiles import (
    write_add_keys,
    write_add_masses,
    write_add_queries,
    write_clear,
    write_dot_rows,
    write_find_query_ranges,
    write_move_rows,
    write_scale_rows,
)
from quire.codegen.phases.softmax import EPS, LOG4_E
from quire.codegen.phases.staging import write_gather, write_pack, write_scatter
from quire.codegen.phases.storage import storage
from quire.codegen.phases.tiles import write_multiply_keys
from quire.codegen.scratch import Regions, backward_regions, gradient_stride, weights_stride
from quire.results import far_from_zero

OPERANDS = ("query", "key", "value", "out", "grad_out", "grad_query")


class _BackwardPhases:
    """The functions that the loop nest calls; `gathers` by dtype."""

    def __init__(self, module: Module, spec: KernelSpec) -> None:
        tile, stride = spec.tile, weights_stride(spec.tile)
        dtypes = sorted({spec.query, spec.key, spec.value, spec.out})
        self.gathers = {name: write_gather(module, tile, storage(name)) for name in dtypes}
        self.scatter_query = write_scatter(module, tile, storage(spec.query))
        self.pack = write_pack(module, tile)
        self.multiply = write_multiply_keys(module, tile, maxima=False, row_stride=stride)
        self.add_queries = write_add_queries(module, tile)
        self.find_query_ranges = write_find_query_ranges(module, tile)
        self.add_keys = write_add_keys(module, tile)
        self.add_masses = write_add_masses(module, tile)
        self.clear = write_clear(module, tile)
        self.dot_rows = write_dot_rows(module, tile)
        self.scale_rows = write_scale_rows(module, tile)
        self.move_rows = write_move_rows(module, tile)


def write_backward(spec: KernelSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(BACKWARD record), for every thread."""
    module = Module()
    phases = _BackwardPhases(module, spec)
    with entry(module) as f:
        nest = _BackwardNest(spec, f, phases)
        with nest.numbers() as number:
            nest.compute(nest.items.share(number))
    return module


class _BackwardNest(Nest):
    """The loop nest: all that a share adds to gradients."""

    def __init__(self, spec: KernelSpec, f: Function, phases: _BackwardPhases) -> None:
        def regions(arg: Record) -> Regions[Value]:
            return backward_regions(spec.tile, arg["head_dim"], arg["value_dim"], arg["block_q"])

        super().__init__(spec, f, regions, OPERANDS, layout=BACKWARD, stride=gradient_stride)
        self.phases = phases
        self.sums = KeySums(self)

    def compute(self, share: Share) -> None:
        """Compute one share."""
        with self.items.slices_of(share) as slice:
            self.sums.begin()
            with self.items.query_blocks_of(slice) as queries:
                for name in self.placements:
                    self.place(queries, name)
                self._start(queries)
                with self.visits.key_blocks(queries) as block:
                    self._stage(block)
                    self._compute_panels(slice, queries, block)
                    self._add_to_keys(slice, queries, block)
                self._finish(queries)
            self._close(slice)

    def _gather(self, name: str, first: Value, count: Value, into: Value, stride: Value) -> None:
        """Copy `count` rows of a tensor to scratch."""
        gather = self.phases.gathers[self.spec.dtype_of(name)]
        rows = {"rows": self.placements[name], "begin": first, "end": first + count}
        self.f.call(gather, **rows, into=into, stride=stride)

    # --- the queries of a block

    def _start(self, queries: QueryBlock) -> None:
        """Read queries, grad_out, lse and delta, and clear the gradient of the queries."""
        f, tile, scratch = self.f, self.tile, self.scratch
        count, one = queries.q_count, f.value(1.0, tile.element)
        scale = f.convert(self.arg["scale"], tile.element)
        whole = (count + (tile.width - 1)) & -tile.width  # whole panels: missing rows are zero
        self._read_rows(queries, "query", "query_rows", "queries", panels=whole, scale=scale)
        with f.range(0, self.arg["block_q"], tile.lanes) as q:
            nothing = 0.0 if self.spec.weighted else math.inf
            tile.store(f, f.value(nothing, tile.vector), scratch["shift"], q)
            tile.store(f, f.value(0.0, tile.vector), scratch["delta"], q)
        with f.when(self.wanted("grad_out")):
            self._read_rows(queries, "grad_out", "grad_rows", "grads", panels=whole, scale=one)
        with f.when(self.wanted("delta")), f.range(0, count, tile.width) as q:
            self._multiply_by_out(queries, q)
        self._read_numbers(queries)
        with f.when(self.wanted("grad_query")):
            self._clear_rows(scratch["grad_query"], self.stride["key"], f.value(0, I64))

    def _read_rows(
        self, queries: QueryBlock, name: str, rows: str, into: str, *, panels: Value, scale: Value
    ) -> None:
        """Copy rows of a tensor to scratch: as rows, and times `scale` as panels of queries."""
        side, start = "key" if name == "query" else "value", self.scratch[rows]
        stride, depth = self.stride[side], self.depth[side]
        self._gather(name, queries.q_first, queries.q_count, start, stride)
        self._clear_rows(start, stride, queries.q_count)
        size = {"stride": stride, "count": panels, "depth": depth}
        self.f.call(self.phases.pack, rows=start, **size, panels=self.scratch[into], scale=scale)

    def _multiply_by_out(self, queries: QueryBlock, q: Value) -> None:
        """delta = grad_out . out, for the queries of the panel at q."""
        f, tile, step = self.f, self.tile, self.stride["value"]
        some = f.minimum(queries.q_count - q, tile.width)
        out = self.scratch["values"]  # which holds no values yet
        self._gather("out", queries.q_first + q, some, out, step)
        grads = f.offset(self.scratch["grad_rows"], q * step, tile.element)
        dots = f.offset(self.scratch["delta"], q, tile.element)
        size = {"stride": step, "depth": self.depth["value"], "count": some}
        f.call(self.phases.dot_rows, a=out, b=grads, **size, dots=dots)

    def _clear_rows(self, rows: Value, stride: Value, first: Value) -> None:
        """Set the rows of a block of queries to zero, from the first one on."""
        f, tile = self.f, self.tile
        with f.range(first, self.arg["block_q"]) as q:
            row = f.offset(rows, q * stride, tile.element)
            with f.range(0, stride, tile.lanes) as d:
                tile.store(f, f.value(0.0, tile.vector), row, d)

    def _read_numbers(self, queries: QueryBlock) -> None:
        """Copy lse to `shift`, subtract grad_lse from `delta`, write delta if it is wanted."""
        f, arg, scratch, element = self.f, self.arg, self.scratch, self.tile.element
        start = queries.b * arg["lse_batch"] + queries.h * arg["lse_head"]
        first = start + (queries.q_row + queries.q_first) * arg["lse_row"]
        with f.range(0, queries.q_count) as q:
            at = first + q * arg["lse_row"]
            lse = f.load(element, arg["lse"], at)
            if self.spec.weighted:  # it is the factor of each weight
                f.store(lse, scratch["shift"], q)
            else:
                self._read_lse(q, at, lse)
            with f.when(self.wanted("grad_lse")):
                given = f.load(element, arg["grad_lse"], at)
                f.store(f.load(element, scratch["delta"], q) - given, scratch["delta"], q)
            with f.when(self.wanted("delta")):
                f.store(f.load(element, scratch["delta"], q), arg["delta"], at)

    def _read_lse(self, q: Value, at: Value, lse: Value) -> None:
        """Write an lse to `shift`. A row that reads nothing, or is NaN, has an infinite one."""
        f, element = self.f, self.tile.element
        size = f.intrinsic("fabs", lse)
        infinite = size.equals(math.inf)
        with f.when((size >= far_from_zero(EPS[element])) & ~infinite):
            self._note_far(q, at)
        f.store(f.select(infinite, math.nan, lse * LOG4_E), self.scratch["shift"], q)

    def _note_far(self, q: Value, at: Value) -> None:
        """Set the second flag of `odd` for a row whose lse is too far from 0 to be precise.

        A row whose gradients are all 0 does not need it.
        """
        f, arg, tile, stride = self.f, self.arg, self.tile, self.stride["value"]
        row = f.offset(self.scratch["grad_rows"], q * stride, tile.element)

        def seen(d: Value, counts: list[Value]) -> list[Value]:
            return [counts[0] | f.any_lane(tile.load(f, row, d).differs(0.0))]

        def in_row() -> list[Value]:
            return f.loop(0, stride, seen, carry=[f.value(False, I1)], step=tile.lanes)

        # Without gradients, weights are wanted for themselves.
        counts = f.choose(self.wanted("grad_out"), in_row, lambda: [f.value(True, I1)])
        given = f.choose(
            self.wanted("grad_lse"),
            lambda: [f.load(tile.element, arg["grad_lse"], at)],
            lambda: [f.value(0.0, tile.element)],
        )
        with f.when((counts[0] | given[0].differs(0.0)) & self.wanted("odd")):
            f.store(f.value(1, I64), arg["odd"], 1)

    def _finish(self, queries: QueryBlock) -> None:
        """Write the gradient of the queries to the user's tensor."""
        f, rows, stride = self.f, self.scratch["grad_query"], self.stride["key"]
        with f.when(self.wanted("grad_query")):
            size = {"stride": stride, "count": queries.q_count, "columns": self.depth["key"]}
            scale = f.convert(self.arg["slope_scale"], self.tile.element)
            self._note_odd(f.call(self.phases.scale_rows, rows=rows, **size, scale=scale))
            end = queries.q_first + queries.q_count
            place = {"rows": self.placements["grad_query"], "begin": queries.q_first, "end": end}
            f.call(self.phases.scatter_query, **place, source=rows, stride=stride)

    def _note_odd(self, odd: Value) -> None:
        """Set the first flag of `odd` if some gradient is not finite."""
        with self.f.when(odd):
            self.f.store(self.f.value(1, I64), self.arg["odd"])

    # --- the keys of a block

    def _stage(self, block: KeyBlock) -> None:
        """Copy a block of keys and values to scratch."""
        count = block.end - block.begin
        for name in ("key", "value"):
            stride = self.stride[name]
            into = self.f.offset(self.scratch[f"{name}s"], block.begin * stride, self.tile.element)
            self._gather(name, block.origin + block.begin, count, into, stride)

    def _compute_panels(self, slice: Slice, queries: QueryBlock, block: KeyBlock) -> None:
        """Weights and slopes of every panel; what a panel does not read is zero."""
        f, tile, scratch = self.f, self.tile, self.scratch
        with f.range(0, queries.q_count, tile.width) as q:
            range = self.visits.key_range(queries, block, q)
            number = q.udiv(tile.width)
            f.store(range.first, scratch["key_ranges"], number * 2)
            f.store(range.end, scratch["key_ranges"], number * 2 + 1)
            panels = [f.offset(scratch[name], q, tile.element) for name in ("weights", "slopes")]
            with f.when(range.first < range.end):
                count = range.end - range.first
                at = range.first * weights_stride(tile)
                weights, slopes = (f.offset(panel, at, tile.element) for panel in panels)
                self._multiply("key", range.first, count, q, weights)
                with f.when(self.arg["wants_slopes"].differs(0)):
                    self._multiply("value", range.first, count, q, slopes)
                tile_of = {"scores": weights, "slopes": slopes, "keys": count}
                self._derive(slice, queries, block, range, q=q, tile=tile_of)
                with f.when(self.wanted("grad_query")):
                    self._add_to_queries(range.first, count, q, slopes)
                with f.when(self.wanted("masses")):
                    base = self.sums.of_head(slice.share, slice.slot, queries.h, "masses")
                    row = queries.kv_row + block.origin + range.first
                    masses = f.offset(base, row, tile.element)
                    f.call(self.phases.add_masses, weights, masses, count)
            for panel in panels:
                f.call(self.phases.clear, panel, block.begin, range.first)
                f.call(self.phases.clear, panel, range.end, block.end)

    def _derive(
        self,
        slice: Slice,
        queries: QueryBlock,
        block: KeyBlock,
        range: KeyRange,
        *,
        q: Value,
        tile: dict[str, Value],
    ) -> None:
        """From scores and products with grad_out to weights and slopes, of one tile."""
        f, arg = self.f, self.arg
        rows = {x: f.offset(self.scratch[x], q, self.tile.element) for x in ("shift", "delta")}
        mod = self.visits.mod(range.kind)
        arguments = {name: arg[name] for name in ("arguments", "captured")}
        head = {"b": queries.b, "h": queries.h, "key_head": queries.key_head, "slice": slice.slot}
        where = {"q_idx": queries.q_idx + q, "queries": queries.q_count - q}
        where |= {"kv_idx": block.origin + range.first}
        f.call_pointer(mod, DERIVE, **tile, **rows, **arguments, **head, **where)

    def _multiply(self, name: str, first: Value, count: Value, q: Value, into: Value) -> None:
        """Keys times the panel of queries at q, or values times that of grad_out."""
        f, tile, scratch = self.f, self.tile, self.scratch
        stride = self.stride[name]
        rows = f.offset(scratch[f"{name}s"], first * stride, tile.element)
        panels = scratch["queries" if name == "key" else "grads"]
        panel = f.offset(panels, q * self.depth[name], tile.element)
        width = self.arg["head_dim" if name == "key" else "value_dim"]
        depth = (width + 3) & -4
        operands = {"keys": rows, "stride": stride, "queries": panel, "depth": depth}
        f.call(self.phases.multiply, **operands, scores=into, maxima=f.null(), count=count)

    def _add_to_queries(self, first: Value, count: Value, q: Value, slopes: Value) -> None:
        """grad_query += slopes . keys, for the panel at q."""
        f, tile, stride = self.f, self.tile, self.stride["key"]
        keys = f.offset(self.scratch["keys"], first * stride, tile.element)
        grads = f.offset(self.scratch["grad_query"], q * stride, tile.element)
        columns = gradient_columns(tile, self.arg["head_dim"])
        operands = {"slopes": slopes, "keys": keys, "stride": stride, "count": count}
        results = {"grads": grads, "grad_stride": stride, "columns": columns}
        f.call(self.phases.add_queries, **operands, **results)

    def _add_to_keys(self, slice: Slice, queries: QueryBlock, block: KeyBlock) -> None:
        """grad_value += weights . grad_out and grad_key += slopes . queries, for all panels."""
        f, tile, scratch = self.f, self.tile, self.scratch
        panels = (queries.q_count + (tile.width - 1)).udiv(tile.width)
        ends = {"first": block.begin, "end": block.end}
        ranges = {name: scratch[name] for name in ("key_ranges", "query_ranges")}
        f.call(self.phases.find_query_ranges, **ranges, panels=panels, **ends)
        self.sums.touch(block)
        for name, tiles, rows, width in (
            ("value", "weights", "grad_rows", "value_dim"),
            ("key", "slopes", "query_rows", "head_dim"),
        ):
            with f.when(self.wanted(f"grad_{name}")):
                stride, step = self.stride[name], self.arg[f"grad_{name}_row"]
                total, part = self.sums.of_keys(slice, name)
                base = f.select(slice.share.in_parts, part, total)
                f.call(
                    self.phases.add_keys,
                    weights=scratch[tiles],
                    query_ranges=scratch["query_ranges"],
                    rows=scratch[rows],
                    stride=stride,
                    grads=f.offset(base, block.origin * step, tile.element),
                    grad_stride=step,
                    **ends,
                    columns=gradient_columns(tile, self.arg[width]),
                )

    def _close(self, slice: Slice) -> None:
        """Multiply the sums of a slice by their scale, and add them to those of its share."""
        f, arg, tile = self.f, self.arg, self.tile
        one = f.value(1.0, arg["slope_scale"].type)
        for name, scale in (("key", arg["slope_scale"]), ("value", one)):
            with self.sums.touched_rows(slice, name) as (total, part, count):
                size = {"stride": arg[f"grad_{name}_row"], "count": count}
                size["columns"] = self.depth[name]  # what is behind them is never read
                size["scale"] = f.convert(scale, tile.element)
                with f.when(slice.share.in_parts):
                    move = self.phases.move_rows
                    self._note_odd(f.call(move, rows=part, into=total, **size))
                with f.when(~slice.share.in_parts):
                    self._note_odd(f.call(self.phases.scale_rows, rows=total, **size))
        self.sums.tell_touched(slice.share)
