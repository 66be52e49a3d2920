"""The kernel for few queries: every row of scores by itself, lanes along keys and columns.

    for every sequence and key head (an item; `row_group` query heads at a time):
        for every block of keys that the visitor names, in ascending order:
            for every query of every head of the group:
                scores  = keys . query            lanes run over columns, then over keys
                scores  = mod(scores)             a ROW function, lanes run over keys
                weights = exp2(scores - maximum)
                out     = out alpha + weights . values
        out / sum to the user's tensor

A panel of `forward.py` would compute as many queries as it has lanes, whether they exist or not.
Here nothing is computed for nobody, and the queries of a group share each block of keys while it
is in a cache. The record, the items and the visitor are those of `forward.py`.

A weight of -0.0 marks a key that is not read (its score is -inf), and its value is left out, so
what is not finite there reaches nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.codegen import observe, vecmath
from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import OBSERVE, ROW_REWRITE, ForwardSpec, decode_regions
from quire.codegen.items import Arguments, Block, Item
from quire.codegen.nest import Nest, entry
from quire.codegen.softmax import close, sink_of
from quire.codegen.staging import (
    ROWS,
    Storage,
    storage,
    transpose,
    write_gather,
    write_place,
    write_scatter,
)
from quire.codegen.tiles import UNREAD, Tile, across
from quire.codegen.types import I1, I64, PTR

COLUMNS = 8  # vectors of values that one pass over the keys adds up


class _Phases(NamedTuple):
    """The functions that the loop nest calls. `near` ones read scratch, the others user memory."""

    gather_query: Function
    gather_key: Function
    gather_value: Function
    scatter_out: Function
    place_key: Function
    place_value: Function
    multiply_keys: Function
    multiply_keys_near: Function
    exponentiate: Function
    multiply_values: Function
    multiply_values_near: Function


def write_decode(spec: ForwardSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(FORWARD record), run by every thread."""
    module = Module()
    phases = _write_phases(module, spec)
    with entry(module) as f:
        kernel = _Kernel(spec, f, phases)
        with kernel.numbers() as number:
            kernel.attend(kernel.work.find(number))
    return module


def _write_phases(module: Module, spec: ForwardSpec) -> _Phases:
    tile = spec.tile
    near = Storage("near", tile.element)
    kinds = sorted({spec.query, spec.key, spec.value})
    gathers = {name: write_gather(module, tile, storage(name)) for name in kinds}
    read = sorted({spec.key, spec.value})
    places = {name: write_place(module, tile, storage(name)) for name in read}
    key, value = storage(spec.key), storage(spec.value)
    multiply_keys = write_multiply_keys(module, tile, key)
    multiply_values = write_multiply_values(module, tile, value)
    return _Phases(
        gathers[spec.query],
        gathers[spec.key],
        gathers[spec.value],
        write_scatter(module, tile, storage(spec.out)),
        places[spec.key],
        places[spec.value],
        multiply_keys,
        multiply_keys if key.memory == tile.element else write_multiply_keys(module, tile, near),
        write_exponentiate(module, tile),
        multiply_values,
        multiply_values
        if value.memory == tile.element
        else write_multiply_values(module, tile, near),
    )


# --- phases --------------------------------------------------------------------------------------


def write_multiply_keys(module: Module, tile: Tile, kind: Storage) -> Function:
    """scores[key] = keys[key] . query, -inf in the lanes past the last key.

    As many keys at once as a vector has lanes: each adds up in a register of its own, and a
    transposed sum puts them side by side.
    """
    parameters = {
        "keys": PTR,
        "stride": I64,
        "query": PTR,
        "depth": I64,
        "scores": PTR,
        "count": I64,
    }
    with module.function(f"multiply_keys_{kind.name}", parameters, internal=True) as f:
        keys, stride, query, depth, scores, count = f.parameters
        with f.range(0, count, tile.lanes) as j:
            places = [f.minimum(j + r, count - 1) for r in range(tile.lanes)]
            starts = [f.offset(keys, place * stride, kind.memory) for place in places]

            def add(d: Value, sums: list[Value], starts: list[Value] = starts) -> list[Value]:
                part = tile.load(f, query, d)
                memory = kind.memory.vector(tile.lanes)
                rows = [kind.read(f, f.load(memory, s, d), tile.element) for s in starts]
                return [f.fma(row, part, x) for row, x in zip(rows, sums, strict=True)]

            nothing = [f.value(0.0, tile.vector)] * tile.lanes
            sums = transpose(f, f.loop(0, depth, add, carry=nothing, step=tile.lanes))
            while len(sums) > 1:
                half = len(sums) // 2
                sums = [sums[k] + sums[k + half] for k in range(half)]
            lanes = tile.element.as_int.vector(tile.lanes)
            left = f.splat(f.convert(count - j, lanes.scalar), lanes)
            tile.store(f, f.select(f.iota(lanes) < left, sums[0], -math.inf), scores, j)
    return f


def write_exponentiate(module: Module, tile: Tile) -> Function:
    """scores become weights; the row's running maximum and sums move on, all in vectors.

    Returns whether the row reads any of the keys.
    """
    parameters = {
        "scores": PTR,
        "running_max": PTR,
        "running_sum": PTR,
        "alpha": PTR,
        "count": I64,
    }
    with module.function("exponentiate_row", parameters, I1, internal=True) as f:
        scores, running_max, running_sum, alpha, count = f.parameters

        def higher(j: Value, best: list[Value]) -> list[Value]:
            return [f.maximum(best[0], tile.load(f, scores, j))]

        before = tile.load(f, running_max)
        lowest = f.value(-math.inf, tile.vector)
        (best,) = f.loop(0, count, higher, carry=[lowest], step=tile.lanes)
        best = across(f, best, f.maximum)
        after = f.maximum(before, best)
        shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
        moved = vecmath.exp2(f, before - shift)

        def weigh(j: Value, total: list[Value]) -> list[Value]:
            score = tile.load(f, scores, j)
            weight = vecmath.exp2(f, score - shift)
            tile.store(f, f.select(score.equals(-math.inf), UNREAD, weight), scores, j)
            return [total[0] + weight]

        nothing = f.value(0.0, tile.vector)
        (total,) = f.loop(0, count, weigh, carry=[nothing], step=tile.lanes)
        tile.store(f, after, running_max)
        tile.store(f, f.fma(tile.load(f, running_sum), moved, total), running_sum)
        tile.store(f, moved, alpha)
        f.give_back(f.any_lane(best.differs(-math.inf)))
    return f


def write_multiply_values(module: Module, tile: Tile, kind: Storage) -> Function:
    """out[d] = out[d] * alpha + weights . values[:, d], without the keys that are not read."""
    parameters = {
        "values": PTR,
        "stride": I64,
        "weights": PTR,
        "out": PTR,
        "alpha": PTR,
        "count": I64,
        "columns": I64,
    }
    with module.function(f"multiply_values_{kind.name}", parameters, internal=True) as f:
        values, stride, weights, out, alpha, count, columns = f.parameters
        scale = tile.load(f, alpha)
        bits = tile.element.as_int

        def multiply(d: Value, vectors: int) -> None:
            def add(j: Value, sums: list[Value]) -> list[Value]:
                weight = f.load(tile.element, weights, j)
                unread = f.bitcast(weight, bits).equals(
                    f.bitcast(f.value(UNREAD, tile.element), bits)
                )

                def read() -> list[Value]:
                    wide = f.splat(weight, tile.vector)
                    row = f.offset(values, j * stride + d, kind.memory)
                    memory = kind.memory.vector(tile.lanes)
                    parts = [f.load(memory, row, v * tile.lanes) for v in range(vectors)]
                    numbers = [kind.read(f, part, tile.element) for part in parts]
                    return [f.fma(x, wide, s) for x, s in zip(numbers, sums, strict=True)]

                return f.choose(unread, lambda: sums, read)

            sums = f.loop(0, count, add, carry=[f.value(0.0, tile.vector)] * vectors)
            for v, total in enumerate(sums):
                at = f.offset(out, d + v * tile.lanes, tile.element)
                tile.store(f, f.fma(tile.load(f, at), scale, total), at)

        many = columns & -(COLUMNS * tile.lanes)
        with f.range(0, many, COLUMNS * tile.lanes) as d:
            multiply(d, COLUMNS)
        with f.range(many, columns, tile.lanes) as d:
            multiply(d, 1)
    return f


# --- the loop nest -------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One query of one head: the row of scratch that it has, and what the mods are told."""

    place: Value
    h: Value
    q: Value


class _Staged(NamedTuple):
    """Rows of keys or values: where they begin, their stride, and whether that is in scratch."""

    start: Value
    stride: Value
    near: Value


class _Kernel(Nest):
    """The loop nest."""

    def __init__(self, spec: ForwardSpec, f: Function, phases: _Phases) -> None:
        def regions(arg: Arguments) -> Iterator[tuple[str, Value]]:
            rows = arg["block_q"] * arg["row_group"]
            return decode_regions(spec.tile, arg["head_dim"], arg["value_dim"], rows)

        super().__init__(spec, f, regions, ("query", "key", "value", "out"))
        self.phases = phases

    def attend(self, item: Item) -> None:
        """One item, from the queries to the results."""
        for name in ("key", "value"):
            self.work.describe_rows(item, name, self.rows[name])
        self._start(item)
        with self.work.visit(item) as block:
            keys, values = self._stage(block, "key"), self._stage(block, "value")
            self._each_row(item, lambda row: self._attend_row(item, block, row, keys, values))
        self._each_head(item, lambda head, first: self._finish(item, head, first))

    def _each_head(self, item: Item, body: Callable[[Value, Value], None]) -> None:
        """For every head of the item: its number, and the scratch row of its first query."""
        with self.f.range(0, self.arg["row_group"]) as g:
            body(item.h * self.arg["row_group"] + g, g * item.q_count)

    def _each_row(self, item: Item, body: Callable[[_Row], None]) -> None:
        def queries(head: Value, first: Value) -> None:
            with self.f.range(0, item.q_count) as q:
                body(_Row(first + q, head, q))

        self._each_head(item, queries)

    def _at(self, region: str, row: Value) -> Value:
        """Where a row of scratch begins."""
        widths = {"queries": self.stride["key"], "out": self.stride["value"]}
        return self.f.offset(
            self.scratch[region], row * widths.get(region, self.tile.lanes), self.tile.element
        )

    def _start(self, item: Item) -> None:
        """Queries to scratch, scaled, and nothing read so far."""
        f, tile = self.f, self.tile
        scale = f.splat(f.convert(self.arg["scale"], tile.element), tile.vector)

        def gather(head: Value, first: Value) -> None:
            self.work.describe_rows(item._replace(h=head), "query", self.rows["query"])
            begin, end = item.q_first, item.q_first + item.q_count
            into = self._at("queries", first)
            f.call(
                self.phases.gather_query, self.rows["query"], begin, end, into, self.stride["key"]
            )

        def clear(row: _Row) -> None:
            with f.range(0, self.depth["key"], tile.lanes) as d:
                at = f.offset(self._at("queries", row.place), d, tile.element)
                tile.store(f, tile.load(f, at) * scale, at)
            with f.range(0, self.depth["value"], tile.lanes) as d:
                tile.store(f, f.value(0.0, tile.vector), self._at("out", row.place), d)
            tile.store(f, f.value(-math.inf, tile.vector), self._at("running_max", row.place))
            tile.store(f, f.value(0.0, tile.vector), self._at("running_sum", row.place))
            with f.when(self.arg["observe"].differs(f.null())):
                observe.forget(f, tile, *self._observed(row.place))

        self._each_head(item, gather)
        self._each_row(item, clear)

    def _observed(self, row: Value) -> list[Value]:
        """What a row of scratch has for the argmax and the entropy."""
        return [self._at(name, row) for name in ("best", "place", "surprise")]

    def _stage(self, block: Block, name: str) -> _Staged:
        """Keys or values of a block: where they are, or copied to scratch."""
        f, record = self.f, self.rows[name]
        gather, place = (
            (self.phases.gather_key, self.phases.place_key)
            if name == "key"
            else (self.phases.gather_value, self.phases.place_value)
        )
        begin, end = block.origin + block.begin, block.origin + block.end
        where = f.call(place, record, begin, end)
        missing = where.equals(f.null())

        def copied() -> list[Value]:
            into, stride = self.scratch[f"{name}s"], self.stride[name]
            f.call(gather, record, begin, end, into, stride)
            return [into, stride]

        def in_place() -> list[Value]:
            return [where, f.field(ROWS, record, "row_stride")]

        start, stride = f.choose(missing, copied, in_place)
        return _Staged(start, stride, missing)

    def _attend_row(
        self, item: Item, block: Block, row: _Row, keys: _Staged, values: _Staged
    ) -> None:
        """One query and one block of keys."""
        f, arg, phases, scratch = self.f, self.arg, self.phases, self.scratch
        count = block.end - block.begin
        scores, alpha = scratch["scores"], scratch["alpha"]

        def product(near: Function, far: Function, staged: _Staged, *arguments: Value) -> None:
            def run(function: Function) -> list[Value]:
                f.call(function, staged.start, staged.stride, *arguments)
                return []

            if near is far:
                run(near)
            else:
                f.choose(staged.near, lambda: run(near), lambda: run(far))

        def rewrite(mod: Value) -> None:
            place = (item.b, row.h, item.q_idx + row.q, block.origin + block.begin, count)
            with f.when(mod.differs(f.null())):
                f.call_pointer(mod, ROW_REWRITE, scores, arg["arguments"], *place)

        query, depth = self._at("queries", row.place), self.depth["key"]
        product(
            phases.multiply_keys_near,
            phases.multiply_keys,
            keys,
            *(query, depth, scores, count),
        )
        rewrite(self.work.mod(block.kind))
        running = self._at("running_max", row.place), self._at("running_sum", row.place)
        with f.when(arg["observe"].differs(f.null())):
            first = block.origin + block.begin - item.kv_begin
            state = (running[1], *self._observed(row.place))
            f.call_pointer(arg["observe"], OBSERVE, scores, *state, first, count)
        with f.when(f.call(phases.exponentiate, scores, *running, alpha, count)):
            rewrite(arg["weights_mod"])
            out, columns = self._at("out", row.place), self.depth["value"]
            product(
                phases.multiply_values_near,
                phases.multiply_values,
                values,
                *(scores, out, alpha, count, columns),
            )

    def _finish(self, item: Item, head: Value, first: Value) -> None:
        """Divide by the sums and write out, lse and the like of one head."""
        f, tile, arg = self.f, self.tile, self.arg
        sink = sink_of(f, tile, arg, head)
        numbers = item.b * arg["lse_batch"] + head * arg["lse_head"]

        with f.range(0, item.q_count) as q:
            row = first + q
            total = across(f, tile.load(f, self._at("running_sum", row)), lambda a, b: a + b)
            closed = close(f, tile.load(f, self._at("running_max", row)), total, sink)
            with f.range(0, self.depth["value"], tile.lanes) as d:
                at = f.offset(self._at("out", row), d, tile.element)
                tile.store(f, f.fma(tile.load(f, at), closed.share, 0.0), at)
            place = numbers + (item.q_row + item.q_first + q) * arg["lse_row"]
            for name, value in (("lse", closed.lse), ("max_scores", closed.peak)):
                with f.when(arg[name].differs(f.null())):
                    f.store(f.extract(value, 0), arg[name], place)
            scores, places, surprises = self._observed(row)
            with f.when(arg["argmax"].differs(f.null())):
                key = observe.first_of_best(f, tile, scores, places)
                f.store(observe.position(f, key, item.kv_begin), arg["argmax"], place)
            with f.when(arg["entropy"].differs(f.null())):
                surprise = across(f, tile.load(f, surprises), lambda a, b: a + b)
                nats = observe.entropy(
                    f, surprise, total, closed.kept, closed.log_share, closed.share
                )
                f.store(f.extract(nats, 0), arg["entropy"], place)
        self.work.describe_rows(item._replace(h=head), "out", self.rows["out"])
        begin, end = item.q_first, item.q_first + item.q_count
        source, stride = self._at("out", first), self.stride["value"]
        f.call(self.phases.scatter_out, self.rows["out"], begin, end, source, stride)
