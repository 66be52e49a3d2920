"""The forward kernel: flash attention in which the mods and the memory are left open.

    for every block of queries of every head and sequence (items; threads take them off a counter):
        copy the queries to panels
        for every block of keys that they attend to, in ascending order:
            copy keys and values to scratch                  wherever they lie: dense, ragged, paged
            for every panel of queries:
                scores  = keys . queries
                scores  = mod(scores)                        the user's code, called by pointer
                weights = exp4(scores - maximum)
                out     = out alpha + values . weights
        write out / sum to the user's tensor

If one panel is all that reads a block, keys and values are not copied but read where they lie.
Of the last panel only the vectors that hold queries are computed, so that short sequences cost no
more than they have to.

The kernel does not know head dims, lengths, strides or mods: it is compiled once for each dtype and
target, and the record of `convention.py` says the rest. Blocks of keys begin at multiples of
`block_kv`, and nothing that one query computes depends on another query, on the batch or on the
thread. So the bits of a result do not depend on these either.
"""

from __future__ import annotations

import math

from quire.codegen.convention import PARTIAL_STATES, KernelSpec, belongs_to
from quire.codegen.kernels.items import QueryBlock
from quire.codegen.kernels.nest import entry
from quire.codegen.kernels.panel_nest import PanelNest, PanelPhases, PanelTile, Strided
from quire.codegen.kernels.pieces import MERGED, Pieces
from quire.codegen.kernels.visits import KeyBlock, KeyPart
from quire.codegen.llvm.builder import Module, Value
from quire.codegen.llvm.types import I1, I64
from quire.codegen.phases import observe
from quire.codegen.phases.softmax import Closed, close, sink_of
from quire.codegen.phases.staging import PLACEMENT
from quire.codegen.phases.storage import storage


def write_forward(spec: KernelSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(KERNEL record), called by every thread."""
    module = Module()
    phases = PanelPhases(module, spec)
    with entry(module) as f:
        ForwardNest(spec, f, phases).attend_all()
    return module


class ForwardNest(PanelNest):
    """The loop nest: from the queries of a block to their results."""

    def attend_all(self) -> None:
        """Compute the items of a thread."""
        with self.numbers() as number, self.items.query_blocks(number) as queries:
            self.attend(queries)

    def attend(self, queries: QueryBlock) -> None:
        """Compute one block of queries."""
        for name in self.placements:
            self.place(queries, name)
        pieces = Pieces(
            self.f,
            self.scratch["pieces"],
            clear=lambda which: self._clear(queries, which),
            merge=lambda: self._merge(queries),
        )

        def attempt(careful: Value) -> Value:
            self._start(queries)
            pieces.start()
            with self.visits.key_blocks(queries) as block:
                pieces.enter(block)
                keys, values = (self._stage(queries, block, name) for name in ("key", "value"))
                with self.f.range(0, queries.q_count, self.tile.width) as q:
                    range = self.visits.key_range(queries, block, q)
                    with self.f.when(range.first < range.end):
                        tile = PanelTile(queries, q, block, range, keys=keys, values=values)
                        self.attend_panel(tile, careful)
            pieces.merge_last(lambda: self._take_merged(queries))
            return self._finish(queries)

        # A value that is not finite reaches queries that do not read it, since 0 * NaN is NaN.
        # If out is not finite, the whole block is computed again, carefully.
        self.f.repeat(
            lambda tried: tried[0] < 2,
            lambda tried: [self.f.select(attempt(tried[0].equals(1)), tried[0] + 1, 2)],
            [self.f.value(0, I64)],
        )

    # --- queries, keys and values to scratch

    def _start(self, queries: QueryBlock) -> None:
        """Copy the queries to panels."""
        with self.f.range(0, queries.q_count, self.tile.width) as q:
            self.pack(queries, q, "query", self.query_panel(q))

    def _clear(self, queries: QueryBlock, before: str = "") -> None:
        """Reset what queries have: no key has been read."""
        f, tile = self.f, self.tile
        with f.range(0, queries.q_count, tile.width) as q:
            maxima, sums = (self.state(before + name, q) for name in ("running_max", "running_sum"))
            tile.store_row(f, tile.row(f, -math.inf), maxima)
            tile.store_row(f, tile.row(f, 0.0), sums)
            with f.range(0, self.depth["out"]) as d:
                tile.store_row(f, tile.row(f, 0.0), self.out_panel(q, before), d)
        with f.when(self.wanted("observe")), f.range(0, queries.q_count, tile.lanes) as q:
            names = (before + name for name in observe.State._fields)
            observe.forget(f, tile, observe.State(*(self.state(name, q) for name in names)))

    # --- pieces

    def _merge(self, queries: QueryBlock) -> None:
        """Add the results of a piece to those of the pieces before it."""
        f, tile = self.f, self.tile
        with f.range(0, queries.q_count, tile.lanes) as q:
            panel = q & -tile.width

            def states(before: str) -> dict[str, Value]:
                found = {name: self.state(before + name, q) for name in PARTIAL_STATES}
                out = f.offset(self.out_panel(panel, before), q - panel, tile.element)
                return found | {"out": out}

            theirs = {f"piece_{name}": at for name, at in states("").items()}
            size = {"end": self.depth["out"] * tile.width, "count": f.value(1, I64)}
            more = {"observe": self.arg["observe"], "stride": f.value(0, I64), **size}
            f.call(self.phases.merge, **states(MERGED), **theirs, **more)

    def _take_merged(self, queries: QueryBlock) -> None:
        """Copy the states of all pieces to where those of one are."""
        f, tile = self.f, self.tile
        with f.range(0, queries.q_count, tile.width) as q:
            for name in PARTIAL_STATES:
                tile.store_row(
                    f, tile.load_row(f, self.state(MERGED + name, q)), self.state(name, q)
                )
            with f.range(0, self.depth["out"]) as d:
                merged = tile.load_row(f, self.out_panel(q, MERGED), d)
                tile.store_row(f, merged, self.out_panel(q), d)

    # --- keys and values

    def pack(self, queries: QueryBlock, q: Value, name: str, panel: Value) -> None:
        """Copy the queries from q on to a panel, or their tangents."""
        f, count = self.f, self.f.minimum(queries.q_count - q, self.tile.width)
        first = queries.q_first + q
        where = self._where(name, first, first + count)
        rows = self._read(name, first, first + count, where, self.scratch["keys"])
        source = {"rows": rows.start, "stride": rows.stride, "count": count}
        size = {
            "depth": self.depth["key"],
            "scale": f.convert(self.arg["scale"], self.tile.element),
        }
        f.call(self.phases.pack, **source, **size, panels=panel)

    def _stage(self, queries: QueryBlock, block: KeyBlock, name: str) -> Strided:
        """The keys or values of a block; copied to scratch unless only one panel reads them."""
        f, element, scratch = self.f, self.tile.element, self.scratch[f"{name}s"]
        begin, end = block.origin + block.begin, block.origin + block.end
        placement, gather = self.placements[name], self.phases.gather[name]
        stride, scales = self.stride[name], self.scratch[f"{name}_scales"]
        dtype = self.spec.dtype_of(name)

        def together() -> list[Value]:
            alone = queries.q_count <= self.tile.width
            where = f.select(alone, self._where(name, begin, end), f.null())
            return list(self._read(name, begin, end, where, scratch)[:2])

        def copy(part: KeyPart) -> None:
            before, stop = part.first - block.begin, part.position + (part.end - part.first)
            into = f.offset(scratch, before * stride, element)
            f.call(gather, placement, part.position, stop, into=into, stride=stride)

        def apart() -> list[Value]:
            self.visits.each_part(block, copy)
            return [scratch, stride]

        def copy_scales(part: KeyPart) -> None:
            stop = part.position + (part.end - part.first)
            into = f.offset(scales, part.first - block.begin, element)
            f.call(self.phases.gather_scales[dtype], placement, part.position, stop, into)

        rows = Strided(*f.choose(block.runs.equals(0), together, apart))
        if not storage(dtype).has_scales:
            return rows
        self.visits.each_part(block, copy_scales)
        return rows._replace(scales=scales)

    def _read(self, name: str, begin: Value, end: Value, where: Value, scratch: Value) -> Strided:
        """The rows [begin, end) at an address; if that is null, copied to scratch."""
        of = belongs_to(name)
        f, stride = self.f, self.stride["value" if of == "value" else "key"]

        def copied() -> list[Value]:
            gather, placement = self.phases.gather[of], self.placements[name]
            f.call(gather, placement, begin, end, into=scratch, stride=stride)
            return [scratch, stride]

        absent = where.equals(f.null())
        return Strided(*f.choose(absent, copied, lambda: self._there(name, where)))

    def _where(self, name: str, begin: Value, end: Value) -> Value:
        """The address of the rows [begin, end), if phases can use them where they are; or null."""
        place = self.phases.place.get(belongs_to(name))
        if place is None:
            return self.f.null()
        return self.f.call(place, self.placements[name], begin, end)

    def _there(self, name: str, where: Value) -> list[Value]:
        return [where, self.f.field(PLACEMENT, self.placements[name], "row_stride")]

    # --- results

    def _finish(self, queries: QueryBlock) -> Value:
        """Divide by the sums and write all results; returns whether out is not finite."""
        f, tile, scratch = self.f, self.tile, self.scratch
        self._close_sums(queries)

        def write(q: Value, seen: list[Value]) -> list[Value]:
            return [seen[0] | self.unpack(queries, q, "out", self.out_panel(q))]

        nothing = f.value(False, I1)
        (odd,) = f.loop(0, queries.q_count, write, carry=[nothing], step=tile.width)
        self._write_numbers(queries, "lse", scratch["lse"])
        self._write_numbers(queries, "max_scores", scratch["running_max"])
        self._write_numbers(queries, "entropy", scratch["surprise"])
        self._write_numbers(queries, "argmax", scratch["place"])
        return odd

    def unpack(self, queries: QueryBlock, q: Value, name: str, panel: Value) -> Value:
        """Write a panel of results to the user's tensor; returns whether one is not finite."""
        f, count = self.f, self.f.minimum(queries.q_count - q, self.tile.width)
        first = queries.q_first + q
        where = self._where(name, first, first + count)
        absent = where.equals(f.null())
        near = [self.scratch["values"], self.stride["value"]]
        rows = Strided(*f.choose(absent, lambda: near, lambda: self._there(name, where)))
        source = {"panels": panel, "scales": self.running(q)[1], "count": count}
        into = {"depth": self.depth["value"], "rows": rows.start, "stride": rows.stride}
        odd = f.call(self.phases.unpack, **source, **into)
        with f.when(absent):
            place = {"rows": self.placements[name], "begin": first, "end": first + count}
            f.call(self.phases.scatter_out, **place, source=near[0], stride=near[1])
        return odd

    def _close_sums(self, queries: QueryBlock) -> None:
        """From the running maximum and sum to lse, the largest score, 1 / sum and the entropy."""
        f, tile = self.f, self.tile
        sink = sink_of(f, tile, self.arg, queries.h)
        with f.range(0, queries.q_count, tile.lanes) as q:
            maxima, sums = self.running(q)
            total = tile.load(f, sums)
            stays_open = self.arg["stays_open"]
            row = close(
                f,
                tile.load(f, maxima),
                total,
                sink,
                stays_open=stays_open,
                weighted=self.spec.weighted,
            )
            tile.store(f, row.lse, self.scratch["lse"], q)
            tile.store(f, row.peak, maxima)
            tile.store(f, row.share, sums)
            self.closed(queries, q, row)
            with f.when(self.wanted("entropy")):
                surprise = tile.load(f, self.scratch["surprise"], q)
                nats = observe.entropy(f, surprise, total, row)
                tile.store(f, nats, self.scratch["surprise"], q)

    def closed(self, queries: QueryBlock, q: Value, row: Closed) -> None:
        """What is computed when the sums of the queries from q on are known."""

    def _write_numbers(self, queries: QueryBlock, name: str, source: Value) -> None:
        """Write one number for each query, if the caller wants it."""
        f, arg, element = self.f, self.arg, self.tile.element
        with f.when(self.wanted(name)):
            start = queries.b * arg["lse_batch"] + queries.h * arg["lse_head"]
            first = start + (queries.q_row + queries.q_first) * arg["lse_row"]
            with f.range(0, queries.q_count) as q:
                if name == "argmax":
                    number = f.load(element.as_int, source, q)
                    value = observe.position(f, number, queries.kv_begin)
                else:
                    value = f.load(element, source, q)
                f.store(value, arg[name], first + q * arg["lse_row"])
