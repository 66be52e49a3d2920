"""The forward kernel: flash attention with three holes.

    for every sequence, head and block of queries (an item; threads take them off a counter):
        queries to panels
        for every block of keys that the visitor names, in ascending order:
            stage keys and values                            hole 1: where rows live
            for every panel of queries:
                scores  = keys . queries
                scores  = mod(scores)                        holes 2 and 3: full or partial tiles
                weights = exp4(scores - maximum)
                out     = out alpha + values . weights
        out / sum to the user's tensor

Where half a panel is all that reads a block, keys and values are not staged but read where they
lie. Of the last panel only the vectors that hold queries are computed, so that short sequences are
no more work than they need to be.

The kernel does not know head dims, lengths, strides or mods: one per dtype and target is compiled,
and `convention.py` is what it is told. Blocks of keys start at absolute multiples of `block_kv`,
and nothing that one query computes depends on another one, on the batch or on the thread, so
neither do the bits.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from quire.codegen import observe
from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import OBSERVE, REWRITE, ForwardSpec, scratch_regions
from quire.codegen.items import KeyBlock, KeyRange, QueryBlock, Record
from quire.codegen.nest import Nest, entry
from quire.codegen.softmax import close, sink_of
from quire.codegen.staging import (
    PLACEMENT,
    Storage,
    storage,
    write_gather,
    write_pack,
    write_place,
    write_scatter,
    write_unpack,
)
from quire.codegen.tiles import (
    Tile,
    write_exponentiate,
    write_multiply_keys,
    write_multiply_values,
)
from quire.codegen.types import I1, I64

READ = ("query", "key", "value")
OPERANDS = (*READ, "out")


class _Products(NamedTuple):
    """What is computed of a tile, for panels or for the first vectors of them."""

    tile: Tile
    multiply_keys: Function
    exponentiate: Function
    multiply_values: Function


class _ForwardPhases(NamedTuple):
    """The functions that the loop nest calls; those of memory by the name of an operand."""

    gather: dict[str, Function]
    place: dict[str, Function]
    scatter_out: Function
    pack: Function
    unpack: Function
    whole: _Products
    parts: list[_Products]
    exponentiate_carefully: Function
    multiply_values_carefully: Function


def write_forward(spec: ForwardSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(FORWARD record), run by every thread."""
    module = Module()
    phases = _write_phases(module, spec)
    with entry(module) as f:
        kernel = _ForwardNest(spec, f, phases)
        with kernel.numbers() as number, kernel.work.find(number) as queries:
            kernel.attend(queries)
    return module


def _write_phases(module: Module, spec: ForwardSpec) -> _ForwardPhases:
    tile = spec.tile
    kinds = {name: storage(spec.dtype_of(name)) for name in OPERANDS}
    gathers = {kind: write_gather(module, tile, kind) for kind in _distinct(kinds, READ)}
    near = [name for name in OPERANDS if kinds[name].memory == tile.element]
    places = {kind: write_place(module, tile, kind) for kind in _distinct(kinds, near)}
    return _ForwardPhases(
        gather={name: gathers[kinds[name]] for name in READ},
        place={name: places[kinds[name]] for name in near},
        scatter_out=write_scatter(module, tile, kinds["out"]),
        pack=write_pack(module, tile),
        unpack=write_unpack(module, tile),
        whole=_write_products(module, tile),
        parts=[_write_products(module, part) for part in tile.parts()],
        exponentiate_carefully=write_exponentiate(module, tile, careful=True),
        multiply_values_carefully=write_multiply_values(module, tile, careful=True),
    )


def _distinct(kinds: dict[str, Storage], names: Sequence[str]) -> list[Storage]:
    return sorted({kinds[name] for name in names})


def _write_products(module: Module, tile: Tile) -> _Products:
    return _Products(
        tile,
        write_multiply_keys(module, tile),
        write_exponentiate(module, tile),
        write_multiply_values(module, tile),
    )


class _Strided(NamedTuple):
    """Rows of keys, values or queries: where they begin, and their stride."""

    start: Value
    stride: Value


class _ForwardNest(Nest):
    """The loop nest."""

    def __init__(self, spec: ForwardSpec, f: Function, phases: _ForwardPhases) -> None:
        def regions(arg: Record) -> Iterator[tuple[str, Value]]:
            return scratch_regions(spec.tile, arg["head_dim"], arg["value_dim"], arg["block_q"])

        super().__init__(spec, f, regions, OPERANDS)
        self.phases = phases

    def attend(self, queries: QueryBlock) -> None:
        """One block of queries, from reading them to the results."""
        for name, record in self.placements.items():
            self.work.describe_placement(queries, name, record)

        def attempt(careful: Value) -> Value:
            self._start(queries)
            with self.work.visit(queries) as block:
                keys, values = (
                    self._stage(queries, block, "key"),
                    self._stage(queries, block, "value"),
                )
                with self.f.range(0, queries.q_count, self.tile.width) as q:
                    part = self.work.key_range(queries, block, q)
                    with self.f.when(part.first < part.end):
                        self._attend_panel(queries, block, part, q, careful, keys, values)
            return self._finish(queries)

        # A value that is not finite reaches queries that do not read it, as 0 times NaN is NaN.
        # Then all of the block is computed again, carefully.
        self.f.repeat(
            lambda tried: tried[0] < 2,
            lambda tried: [self.f.select(attempt(tried[0].equals(1)), tried[0] + 1, 2)],
            [self.f.value(0, I64)],
        )

    def _start(self, queries: QueryBlock) -> None:
        """Queries to panels, and nothing read so far."""
        f, tile, scratch, depth = self.f, self.tile, self.scratch, self.depth
        scale = f.convert(self.arg["scale"], tile.element)
        with f.range(0, queries.q_count, self.spec.target.block_kv) as q:
            count = f.minimum(queries.q_count - q, self.spec.target.block_kv)
            first = queries.q_first + q
            panels = f.offset(scratch["queries"], q * depth["key"], tile.element)
            where = self._where("query", first, first + count)
            rows = self._read("query", first, first + count, where, scratch["keys"])
            f.call(
                self.phases.pack,
                rows=rows.start,
                stride=rows.stride,
                count=count,
                depth=depth["key"],
                panels=panels,
                scale=scale,
            )
        with f.range(0, queries.q_count, tile.width) as q:
            maxima, sums = self._running(q)
            tile.store_row(f, tile.row(f, -math.inf), maxima)
            tile.store_row(f, tile.row(f, 0.0), sums)
            panel = f.offset(scratch["out"], q * depth["value"], tile.element)
            with f.range(0, depth["value"]) as d:
                tile.store_row(f, tile.row(f, 0.0), panel, d)
        with (
            f.when(self.arg["observe"].differs(f.null())),
            f.range(0, queries.q_count, tile.lanes) as q,
        ):
            observe.forget(f, tile, self._observed(q))

    def _observed(self, q: Value) -> observe.State:
        """What the queries from q on have for the argmax and the entropy."""
        regions = (self.scratch[name] for name in observe.State._fields)
        return observe.State(*(self.f.offset(x, q, self.tile.element) for x in regions))

    def _running(self, q: Value) -> tuple[Value, Value]:
        """The running maximum and sum of the queries from q on."""
        maxima, sums = self.scratch["running_max"], self.scratch["running_sum"]
        element = self.tile.element
        return self.f.offset(maxima, q, element), self.f.offset(sums, q, element)

    def _stage(self, queries: QueryBlock, block: KeyBlock, name: str) -> _Strided:
        """Keys or values of a block; in scratch, unless only half a panel reads them."""
        begin, end = block.origin + block.begin, block.origin + block.end
        where = self._where(name, begin, end)
        where = self.f.select(self._is_half(queries.q_count), where, self.f.null())
        return self._read(name, begin, end, where, self.scratch[f"{name}s"])

    def _read(self, name: str, begin: Value, end: Value, where: Value, scratch: Value) -> _Strided:
        """The rows [begin, end): there, or copied to scratch if that is null."""
        f, stride = self.f, self.stride["value" if name == "value" else "key"]

        def copied() -> list[Value]:
            gather, placement = self.phases.gather[name], self.placements[name]
            f.call(gather, placement, begin, end, into=scratch, stride=stride)
            return [scratch, stride]

        return _Strided(*f.choose(where.equals(f.null()), copied, lambda: self._there(name, where)))

    def _where(self, name: str, begin: Value, end: Value) -> Value:
        """Where the rows [begin, end) are, if phases can read or write them there; else null."""
        if name not in self.phases.place:
            return self.f.null()
        return self.f.call(self.phases.place[name], self.placements[name], begin, end)

    def _there(self, name: str, where: Value) -> list[Value]:
        return [where, self.f.field(PLACEMENT, self.placements[name], "row_stride")]

    def _is_half(self, queries: Value) -> Value:
        """Whether so many queries need no more than the first half of a panel."""
        return queries <= self.tile.width // 2

    def _attend_panel(
        self,
        queries: QueryBlock,
        block: KeyBlock,
        part: KeyRange,
        q: Value,
        careful: Value,
        keys: _Strided,
        values: _Strided,
    ) -> None:
        """One tile: the panel at query q and some keys of a block."""
        f, tile, arg, scratch, phases = self.f, self.tile, self.arg, self.scratch, self.phases
        count, first = part.end - part.first, part.first - block.begin
        query_panel = f.offset(scratch["queries"], q * self.depth["key"], tile.element)
        out = f.offset(scratch["out"], q * self.depth["value"], tile.element)
        scores, maxima, alpha = scratch["scores"], scratch["maxima"], scratch["alpha"]
        running_max, running_sum = self._running(q)
        depth, columns = ((arg[name] + 3) & -4 for name in ("head_dim", "value_dim"))
        key_rows, value_rows = (
            _Strided(f.offset(rows.start, first * rows.stride, tile.element), rows.stride)
            for rows in (keys, values)
        )
        queries_left = queries.q_count - q

        def rewrite(mod: Value) -> None:
            q_idx, kv_idx = queries.q_idx + q, block.origin + part.first
            with f.when(mod.differs(f.null())):
                f.call_pointer(
                    mod,
                    REWRITE,
                    scores=scores,
                    maxima=maxima,
                    arguments=arg["arguments"],
                    b=queries.b,
                    h=queries.h,
                    q_idx=q_idx,
                    queries=queries_left,
                    kv_idx=kv_idx,
                    keys=count,
                )

        def multiply_keys(by: _Products) -> list[Value]:
            f.call(
                by.multiply_keys,
                keys=key_rows.start,
                stride=key_rows.stride,
                queries=query_panel,
                depth=depth,
                scores=scores,
                maxima=maxima,
                count=count,
            )
            return []

        def accumulate(exponentiate: Function, multiply_values: Function) -> list[Value]:
            f.call(
                exponentiate,
                scores=scores,
                maxima=maxima,
                running_max=running_max,
                running_sum=running_sum,
                alpha=alpha,
                count=count,
            )
            rewrite(arg["weights_mod"])
            f.call(
                multiply_values,
                values=value_rows.start,
                stride=value_rows.stride,
                weights=scores,
                out=out,
                alpha=alpha,
                count=count,
                columns=columns,
            )
            return []

        def accumulate_quickly(by: _Products) -> list[Value]:
            return accumulate(by.exponentiate, by.multiply_values)

        def fitting(
            run: Callable[[_Products], list[Value]], parts: Sequence[_Products] = phases.parts
        ) -> list[Value]:
            if not parts:
                return run(phases.whole)
            part, *larger = parts
            fits = queries_left <= part.tile.vectors * tile.lanes
            return f.choose(fits, lambda: run(part), lambda: fitting(run, larger))

        fitting(multiply_keys)
        rewrite(self.work.mod(part.kind))
        with f.when(arg["observe"].differs(f.null())):
            place = block.origin + part.first - queries.kv_begin
            state = self._observed(q)._asdict()
            f.call_pointer(
                arg["observe"],
                OBSERVE,
                scores=scores,
                running_sum=running_sum,
                **state,
                first=place,
                keys=count,
            )
        f.choose(
            careful | self._odd(running_max, queries_left) | self._odd(maxima, queries_left),
            lambda: accumulate(phases.exponentiate_carefully, phases.multiply_values_carefully),
            lambda: fitting(accumulate_quickly),
        )

    def _odd(self, maxima: Value, queries: Value) -> Value:
        """Whether some column's maximum is +inf or NaN, in those vectors that hold queries."""
        f, lanes = self.f, self.tile.lanes
        odd = [f.any_lane(~(x < math.inf)) for x in self.tile.load_row(f, maxima)]
        held = [x & (queries > v * lanes) if v else x for v, x in enumerate(odd)]
        return functools.reduce(operator.or_, held)

    def _finish(self, queries: QueryBlock) -> Value:
        """Divide by the sums, write out, lse and the like; whether out is not finite."""
        f, tile, scratch = self.f, self.tile, self.scratch
        self._close_sums(queries)
        depth = self.depth["value"]

        def write(q: Value, seen: list[Value]) -> list[Value]:
            count = f.minimum(queries.q_count - q, self.spec.target.block_kv)
            first = queries.q_first + q
            panels = f.offset(scratch["out"], q * depth, tile.element)
            _, factors = self._running(q)
            where = self._where("out", first, first + count)
            absent = where.equals(f.null())
            near = _Strided(scratch["values"], self.stride["value"])
            rows = _Strided(*f.choose(absent, lambda: near, lambda: self._there("out", where)))
            odd = f.call(
                self.phases.unpack,
                panels=panels,
                scales=factors,
                count=count,
                depth=depth,
                rows=rows.start,
                stride=rows.stride,
            )
            with f.when(absent):
                f.call(
                    self.phases.scatter_out,
                    self.placements["out"],
                    begin=first,
                    end=first + count,
                    source=near.start,
                    stride=near.stride,
                )
            return [seen[0] | odd]

        nothing, step = f.value(False, I1), self.spec.target.block_kv
        (odd,) = f.loop(0, queries.q_count, write, carry=[nothing], step=step)
        self._write_numbers(queries, "lse", scratch["lse"])
        self._write_numbers(queries, "max_scores", scratch["running_max"])
        self._write_numbers(queries, "entropy", scratch["surprise"])
        self._write_numbers(queries, "argmax", scratch["place"])
        return odd

    def _close_sums(self, queries: QueryBlock) -> None:
        """From the running maximum and sum to lse, to the true maximum, 1 / sum and entropy."""
        f, tile = self.f, self.tile
        sink = sink_of(f, tile, self.arg, queries.h)
        with f.range(0, queries.q_count, tile.lanes) as q:
            maxima, sums = self._running(q)
            total = tile.load(f, sums)
            row = close(f, tile.load(f, maxima), total, sink)
            tile.store(f, row.lse, self.scratch["lse"], q)
            tile.store(f, row.peak, maxima)
            tile.store(f, row.share, sums)
            with f.when(self.arg["entropy"].differs(f.null())):
                surprise = tile.load(f, self.scratch["surprise"], q)
                nats = observe.entropy(f, surprise, total, row)
                tile.store(f, nats, self.scratch["surprise"], q)

    def _write_numbers(self, queries: QueryBlock, name: str, source: Value) -> None:
        """One number per query, where the caller wants it."""
        f, arg, element = self.f, self.arg, self.tile.element
        with f.when(arg[name].differs(f.null())):
            start = queries.b * arg["lse_batch"] + queries.h * arg["lse_head"]
            first = start + (queries.q_row + queries.q_first) * arg["lse_row"]
            with f.range(0, queries.q_count) as q:
                if name == "argmax":
                    number = f.load(element.as_int, source, q)
                    value = observe.position(f, number, queries.kv_begin)
                else:
                    value = f.load(element, source, q)
                f.store(value, arg[name], first + q * arg["lse_row"])
