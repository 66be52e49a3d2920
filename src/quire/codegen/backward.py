"""The backward kernel: the tiles of the forward pass again, and five products in each.

    for every share (a sequence, a key head, a slice of its queries; threads take them off a
    counter):
        for every head of the group and block of queries of the slice:
            queries and grad_out, as rows and as panels; delta = grad_out . out
            for every block of keys that the visitor names:
                stage keys and values
                for every panel of queries:
                    scores  = keys . queries
                    slopes  = values . grad_out
                    weights, slopes = derive(scores, slopes)     the mods and their derivatives
                    grad_query += slopes . keys
                grad_value += weights . grad_out
                grad_key   += slopes . queries
            grad_query to the user's tensor

A share is the only one to add to its sums of grad_key, grad_value and captured tensors, and which
shares there are depends on the lengths of the sequence and on the heads alone. So do the bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import (
    BACKWARD,
    DERIVE,
    ForwardSpec,
    backward_regions,
    gradient_columns,
    gradient_stride,
    weights_stride,
)
from quire.codegen.gradient_tiles import (
    write_add_keys,
    write_add_masses,
    write_add_queries,
    write_clear,
    write_dot_rows,
    write_find_query_ranges,
    write_scale_rows,
)
from quire.codegen.items import KeyBlock, QueryBlock, Record, Share
from quire.codegen.nest import Nest, entry
from quire.codegen.softmax import LOG4_E
from quire.codegen.staging import storage, write_gather, write_pack, write_scatter
from quire.codegen.tiles import write_multiply_keys
from quire.codegen.types import I64


class _BackwardPhases(NamedTuple):
    """The functions that the loop nest calls."""

    gathers: dict[str, Function]
    scatter_query: Function
    pack: Function
    multiply: Function
    add_queries: Function
    find_query_ranges: Function
    add_keys: Function
    add_masses: Function
    clear: Function
    dot_rows: Function
    scale_rows: Function


def write_backward(spec: ForwardSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(BACKWARD record), run by every thread."""
    module = Module()
    phases = _write_phases(module, spec)
    with entry(module) as f:
        kernel = _BackwardNest(spec, f, phases)
        with kernel.numbers() as number:
            kernel.compute(kernel.work.find_share(number))
    return module


def _write_phases(module: Module, spec: ForwardSpec) -> _BackwardPhases:
    tile = spec.tile
    kinds = sorted({spec.query, spec.key, spec.value, spec.out})
    gathers = {name: write_gather(module, tile, storage(name)) for name in kinds}
    return _BackwardPhases(
        gathers=gathers,
        scatter_query=write_scatter(module, tile, storage(spec.query)),
        pack=write_pack(module, tile),
        multiply=write_multiply_keys(module, tile, maxima=False, row_stride=weights_stride(tile)),
        add_queries=write_add_queries(module, tile),
        find_query_ranges=write_find_query_ranges(module, tile),
        add_keys=write_add_keys(module, tile),
        add_masses=write_add_masses(module, tile),
        clear=write_clear(module, tile),
        dot_rows=write_dot_rows(module, tile),
        scale_rows=write_scale_rows(module, tile),
    )


class _BackwardNest(Nest):
    """The loop nest."""

    def __init__(self, spec: ForwardSpec, f: Function, phases: _BackwardPhases) -> None:
        def regions(arg: Record) -> Iterator[tuple[str, Value]]:
            return backward_regions(spec.tile, arg["head_dim"], arg["value_dim"], arg["block_q"])

        rows = ("query", "key", "value", "out", "grad_out", "grad_query")
        super().__init__(spec, f, regions, rows, layout=BACKWARD, stride=gradient_stride)
        self.phases = phases

    def compute(self, share: Share) -> None:
        """All that a share adds."""
        with self.work.query_blocks_of(share) as queries:
            for name, record in self.placements.items():
                self.work.describe_placement(queries, name, record)
            self._start(queries)
            with self.work.visit(queries) as block:
                self._stage(block)
                self._compute_panels(share, queries, block)
                self._add_to_keys(share, queries, block)
            self._finish(queries)
        self._close(share)

    def _wanted(self, name: str) -> Value:
        return self.arg[name].differs(self.f.null())

    def _gather(self, name: str, first: Value, count: Value, into: Value, stride: Value) -> None:
        gather = self.phases.gathers[self.spec.dtype_of(name)]
        rows = {"rows": self.placements[name], "begin": first, "end": first + count}
        self.f.call(gather, **rows, into=into, stride=stride)

    def _pack(self, name: str, into: str, count: Value, scale: Value) -> None:
        """Rows of queries, or of the gradient of out, to panels."""
        side = "key" if name == "query_rows" else "value"
        self.f.call(
            self.phases.pack,
            rows=self.scratch[name],
            stride=self.stride[side],
            count=count,
            depth=self.depth[side],
            panels=self.scratch[into],
            scale=scale,
        )

    # --- the queries of a block

    def _start(self, queries: QueryBlock) -> None:
        """Queries and the gradient of out as rows and as panels, what rows know, and no sums."""
        f, tile, arg, scratch = self.f, self.tile, self.arg, self.scratch
        first, count, one = queries.q_first, queries.q_count, f.value(1.0, tile.element)
        scale = f.convert(arg["scale"], tile.element)
        rows, stride = scratch["query_rows"], self.stride["key"]
        whole = (count + (tile.width - 1)) & -tile.width  # panels: what is in no row is zero
        self._gather("query", first, count, rows, stride)
        self._clear_rows(rows, stride, count)
        self._pack("query_rows", "queries", whole, scale)
        with f.range(0, arg["block_q"], tile.lanes) as q:
            tile.store(f, f.value(math.inf, tile.vector), scratch["shift"], q)
            tile.store(f, f.value(0.0, tile.vector), scratch["delta"], q)
        with f.when(self._wanted("grad_out")):
            rows, stride = scratch["grad_rows"], self.stride["value"]
            self._gather("grad_out", first, count, rows, stride)
            self._clear_rows(rows, stride, count)
            self._pack("grad_rows", "grads", whole, one)
        with f.when(self._wanted("delta")):
            # Where values will be is room for the rows of out.
            outs, step = scratch["values"], self.stride["value"]
            with f.range(0, count, tile.width) as q:
                some = f.minimum(count - q, tile.width)
                self._gather("out", first + q, some, outs, step)
                grads = f.offset(scratch["grad_rows"], q * step, tile.element)
                dots = f.offset(scratch["delta"], q, tile.element)
                f.call(
                    self.phases.dot_rows,
                    a=outs,
                    b=grads,
                    stride=step,
                    depth=self.depth["value"],
                    count=some,
                    dots=dots,
                )
        self._read_numbers(queries)
        with f.when(self._wanted("grad_query")):
            self._clear_rows(scratch["grad_query"], self.stride["key"], f.value(0, I64))

    def _clear_rows(self, rows: Value, stride: Value, first: Value) -> None:
        """Rows are zero from the first on, where there are no more queries."""
        f, tile = self.f, self.tile
        with f.range(first, self.arg["block_q"]) as q:
            row = f.offset(rows, q * stride, tile.element)
            with f.range(0, stride, tile.lanes) as d:
                tile.store(f, f.value(0.0, tile.vector), row, d)

    def _read_numbers(self, queries: QueryBlock) -> None:
        """lse to `shift`, the gradient of lse off `delta`, and `delta` to whom wants it."""
        f, arg, scratch, element = self.f, self.arg, self.scratch, self.tile.element
        start = queries.b * arg["lse_batch"] + queries.h * arg["lse_head"]
        first = start + (queries.q_row + queries.q_first) * arg["lse_row"]
        with f.range(0, queries.q_count) as q:
            at = first + q * arg["lse_row"]
            lse = f.load(element, arg["lse"], at)
            # An infinite lse is that of a row that reads nothing, or of one that is NaN.
            infinite = f.intrinsic("fabs", lse).equals(math.inf)
            f.store(f.select(infinite, math.nan, lse * LOG4_E), scratch["shift"], q)
            with f.when(self._wanted("grad_lse")):
                given = f.load(element, arg["grad_lse"], at)
                f.store(f.load(element, scratch["delta"], q) - given, scratch["delta"], q)
            with f.when(self._wanted("delta")):
                f.store(f.load(element, scratch["delta"], q), arg["delta"], at)

    def _finish(self, queries: QueryBlock) -> None:
        """The gradient of the queries to where the caller wants it."""
        f, rows, stride = self.f, self.scratch["grad_query"], self.stride["key"]
        with f.when(self._wanted("grad_query")):
            self._scale(rows, stride, queries.q_count, self.depth["key"], self.arg["slope_scale"])
            last = queries.q_first + queries.q_count
            place = {"rows": self.placements["grad_query"], "begin": queries.q_first, "end": last}
            f.call(self.phases.scatter_query, **place, source=rows, stride=stride)

    def _scale(
        self, rows: Value, stride: Value, count: Value, columns: Value, scale: Value
    ) -> None:
        """Rows times a number; takes a note if some are not finite."""
        f = self.f
        number = f.convert(scale, self.tile.element)
        size = {"count": count, "columns": columns}
        odd = f.call(self.phases.scale_rows, rows=rows, stride=stride, **size, scale=number)
        with f.when(odd):
            f.store(f.value(1, I64), self.arg["odd"])

    # --- the keys of a block

    def _stage(self, block: KeyBlock) -> None:
        """A block of keys and values to scratch."""
        count = block.end - block.begin
        for name in ("key", "value"):
            stride = self.stride[name]
            into = self.f.offset(self.scratch[f"{name}s"], block.begin * stride, self.tile.element)
            self._gather(name, block.origin + block.begin, count, into, stride)

    def _compute_panels(self, share: Share, queries: QueryBlock, block: KeyBlock) -> None:
        """Weights and slopes of every panel, and what they add to the gradient of its queries."""
        f, tile, scratch = self.f, self.tile, self.scratch
        with f.range(0, queries.q_count, tile.width) as q:
            part = self.work.key_range(queries, block, q)
            number = q.udiv(tile.width)
            f.store(part.first, scratch["key_ranges"], number * 2)
            f.store(part.end, scratch["key_ranges"], number * 2 + 1)
            weights, slopes = (
                f.offset(scratch[name], q, tile.element) for name in ("weights", "slopes")
            )
            with f.when(part.first < part.end):
                count = part.end - part.first
                at = part.first * weights_stride(tile)
                mine = [f.offset(x, at, tile.element) for x in (weights, slopes)]
                self._multiply("key", part.first, count, q, mine[0])
                with f.when(self.arg["wants_slopes"].differs(0)):
                    self._multiply("value", part.first, count, q, mine[1])
                shift, delta = (
                    f.offset(scratch[name], q, tile.element) for name in ("shift", "delta")
                )
                f.call_pointer(
                    self.work.mod(part.kind),
                    DERIVE,
                    scores=mine[0],
                    slopes=mine[1],
                    shift=shift,
                    delta=delta,
                    arguments=self.arg["arguments"],
                    captured=self.arg["captured"],
                    b=queries.b,
                    h=queries.h,
                    key_head=share.key_head,
                    slice=share.slice,
                    q_idx=queries.q_idx + q,
                    queries=queries.q_count - q,
                    kv_idx=block.origin + part.first,
                    keys=count,
                )
                with f.when(self._wanted("grad_query")):
                    stride = self.stride["key"]
                    keys = f.offset(scratch["keys"], part.first * stride, tile.element)
                    grads = f.offset(scratch["grad_query"], q * stride, tile.element)
                    columns = gradient_columns(tile, self.arg["head_dim"])
                    f.call(
                        self.phases.add_queries,
                        slopes=mine[1],
                        keys=keys,
                        stride=stride,
                        count=count,
                        grads=grads,
                        grad_stride=stride,
                        columns=columns,
                    )
                with f.when(self._wanted("masses")):
                    base = self._sums_of(share, queries.h, "masses")
                    row = queries.kv_row + block.origin + part.first
                    masses = f.offset(base, row, tile.element)
                    f.call(self.phases.add_masses, mine[0], masses, count)
            for each in (weights, slopes):
                f.call(self.phases.clear, each, block.begin, part.first)
                f.call(self.phases.clear, each, part.end, block.end)

    def _multiply(self, name: str, first: Value, count: Value, q: Value, into: Value) -> None:
        """Keys times queries, or values times the gradient of out."""
        f, tile, scratch = self.f, self.tile, self.scratch
        stride = self.stride[name]
        rows = f.offset(scratch[f"{name}s"], first * stride, tile.element)
        panels = scratch["queries" if name == "key" else "grads"]
        panel = f.offset(panels, q * self.depth[name], tile.element)
        width = self.arg["head_dim" if name == "key" else "value_dim"]
        depth = (width + 3) & -4
        f.call(
            self.phases.multiply,
            keys=rows,
            stride=stride,
            queries=panel,
            depth=depth,
            scores=into,
            maxima=f.null(),
            count=count,
        )

    def _add_to_keys(self, share: Share, queries: QueryBlock, block: KeyBlock) -> None:
        """What all panels add to the gradients of keys and values."""
        f, tile, scratch = self.f, self.tile, self.scratch
        panels = (queries.q_count + (tile.width - 1)).udiv(tile.width)
        ends = {"first": block.begin, "end": block.end}
        ranges = {name: scratch[name] for name in ("key_ranges", "query_ranges")}
        f.call(self.phases.find_query_ranges, **ranges, panels=panels, **ends)
        for name, tiles, rows, width in (
            ("value", "weights", "grad_rows", "value_dim"),
            ("key", "slopes", "query_rows", "head_dim"),
        ):
            with f.when(self._wanted(f"grad_{name}")):
                stride, step = self.stride[name], self.arg[f"grad_{name}_row"]
                base = self._sums_of(share, share.key_head, f"grad_{name}")
                row = queries.kv_row + block.origin
                f.call(
                    self.phases.add_keys,
                    weights=scratch[tiles],
                    query_ranges=scratch["query_ranges"],
                    rows=scratch[rows],
                    stride=stride,
                    grads=f.offset(base, row * step, tile.element),
                    grad_stride=step,
                    **ends,
                    columns=gradient_columns(tile, self.arg[width]),
                )

    def _sums_of(self, share: Share, head: Value, name: str) -> Value:
        """Where a share adds up the gradients of a head."""
        arg = self.arg
        at = share.slice * arg[f"{name}_slice"] + share.b * arg[f"{name}_batch"]
        return self.f.offset(arg[name], at + head * arg[f"{name}_head"], self.tile.element)

    def _close(self, share: Share) -> None:
        """Scale the sums of a share."""
        f, arg = self.f, self.arg
        field = self.work.sequence_fields(share.sequence)
        first, last = (field["kv_row"] + field[end] for end in ("kv_begin", "kv_end"))
        one = f.value(1.0, arg["slope_scale"].type)
        for name, scale in (("key", arg["slope_scale"]), ("value", one)):
            with f.when(self._wanted(f"grad_{name}")):
                step = arg[f"grad_{name}_row"]
                base = self._sums_of(share, share.key_head, f"grad_{name}")
                rows = f.offset(base, first * step, self.tile.element)
                self._scale(rows, step, last - first, self.depth[name], scale)
