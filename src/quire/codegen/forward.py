"""The forward kernel: flash attention with three holes.

    for every sequence, head and block of queries (an item; threads take them off a counter):
        queries to panels
        for every block of keys that the visitor names, in ascending order:
            stage keys and values                            hole 1: where rows live
            for every panel of queries:
                scores  = keys . queries
                scores  = mod(scores)                        holes 2 and 3: full or partial tiles
                weights = exp2(scores - maximum)
                out     = out alpha + values . weights
        out / sum to the user's tensor

The kernel does not know head dims, lengths, strides or mods: one per dtype and target is compiled,
and `convention.py` is what it is told. Blocks of keys start at absolute multiples of `block_kv`,
and nothing that one query computes depends on another one, on the batch or on the thread, so
neither do the bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from quire.codegen import observe
from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import OBSERVE, REWRITE, ForwardSpec, scratch_regions
from quire.codegen.items import Arguments, Block, Item, PanelRange
from quire.codegen.nest import Nest, entry
from quire.codegen.softmax import close, sink_of
from quire.codegen.staging import (
    storage,
    write_gather,
    write_pack,
    write_scatter,
    write_unpack,
)
from quire.codegen.tiles import write_exponentiate, write_multiply_keys, write_multiply_values
from quire.codegen.types import I1, I64


class _Phases(NamedTuple):
    """The functions that the loop nest calls."""

    gather_query: Function
    gather_key: Function
    gather_value: Function
    scatter_out: Function
    pack: Function
    unpack: Function
    multiply_keys: Function
    exponentiate: Function
    exponentiate_carefully: Function
    multiply_values: Function
    multiply_values_carefully: Function


def write_forward(spec: ForwardSpec) -> Module:
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
    kinds = sorted({spec.query, spec.key, spec.value})
    gathers = {name: write_gather(module, tile, storage(name)) for name in kinds}
    return _Phases(
        gathers[spec.query],
        gathers[spec.key],
        gathers[spec.value],
        write_scatter(module, tile, storage(spec.out)),
        write_pack(module, tile),
        write_unpack(module, tile),
        write_multiply_keys(module, tile),
        write_exponentiate(module, tile),
        write_exponentiate(module, tile, careful=True),
        write_multiply_values(module, tile),
        write_multiply_values(module, tile, careful=True),
    )


class _Kernel(Nest):
    """The loop nest."""

    def __init__(self, spec: ForwardSpec, f: Function, phases: _Phases) -> None:
        def regions(arg: Arguments) -> Iterator[tuple[str, Value]]:
            return scratch_regions(spec.tile, arg["head_dim"], arg["value_dim"], arg["block_q"])

        super().__init__(spec, f, regions, ("query", "key", "value", "out"))
        self.phases = phases

    def attend(self, item: Item) -> None:
        """One item, from the queries to the results."""
        for name, record in self.rows.items():
            self.work.describe_rows(item, name, record)

        def attempt(careful: Value) -> Value:
            self._start(item)
            with self.work.visit(item) as block:
                self._stage(block)
                with self.f.range(0, item.q_count, self.tile.width) as q:
                    part = self.work.panel_range(item, block, q)
                    with self.f.when(part.first < part.end):
                        self._attend_panel(item, block, part, q, careful)
            return self._finish(item)

        # A value that is not finite reaches queries that do not read it, as 0 times NaN is NaN.
        # Then all of the item is computed again, carefully.
        self.f.repeat(
            lambda tried: tried[0] < 2,
            lambda tried: [self.f.select(attempt(tried[0].equals(1)), tried[0] + 1, 2)],
            [self.f.value(0, I64)],
        )

    def _start(self, item: Item) -> None:
        """Queries to panels, and nothing read so far."""
        f, tile, scratch, depth = self.f, self.tile, self.scratch, self.depth
        rows, stride = scratch["keys"], self.stride["key"]
        scale = f.convert(self.arg["scale"], tile.element)
        with f.range(0, item.q_count, self.spec.target.block_kv) as q:
            count = f.minimum(item.q_count - q, self.spec.target.block_kv)
            first = item.q_first + q
            panels = f.offset(scratch["queries"], q * depth["key"], tile.element)
            f.call(self.phases.gather_query, self.rows["query"], first, first + count, rows, stride)
            f.call(self.phases.pack, rows, stride, count, depth["key"], panels, scale)
        with f.range(0, item.q_count, tile.width) as q:
            maxima, sums = self._running(q)
            tile.store_row(f, tile.row(f, -math.inf), maxima)
            tile.store_row(f, tile.row(f, 0.0), sums)
            panel = f.offset(scratch["out"], q * depth["value"], tile.element)
            with f.range(0, depth["value"]) as d:
                tile.store_row(f, tile.row(f, 0.0), panel, d)
        with (
            f.when(self.arg["observe"].differs(f.null())),
            f.range(0, item.q_count, tile.lanes) as q,
        ):
            observe.forget(f, tile, *self._observed(q))

    def _observed(self, q: Value) -> list[Value]:
        """What the queries from q on have for the argmax and the entropy."""
        regions = [self.scratch[name] for name in ("best", "place", "surprise")]
        return [self.f.offset(region, q, self.tile.element) for region in regions]

    def _running(self, q: Value) -> tuple[Value, Value]:
        """The running maximum and sum of the queries from q on."""
        maxima, sums = self.scratch["running_max"], self.scratch["running_sum"]
        element = self.tile.element
        return self.f.offset(maxima, q, element), self.f.offset(sums, q, element)

    def _stage(self, block: Block) -> None:
        """A block of keys and values to scratch."""
        f = self.f
        begin, end = block.origin + block.begin, block.origin + block.end
        for name, gather in (("key", self.phases.gather_key), ("value", self.phases.gather_value)):
            stride = self.stride[name]
            into = f.offset(self.scratch[f"{name}s"], block.begin * stride, self.tile.element)
            f.call(gather, self.rows[name], begin, end, into, stride)

    def _attend_panel(
        self, item: Item, block: Block, part: PanelRange, q: Value, careful: Value
    ) -> None:
        """One tile: the panel at query q and some keys of a block."""
        f, tile, arg, scratch, phases = self.f, self.tile, self.arg, self.scratch, self.phases
        count, keys, values = part.end - part.first, self.stride["key"], self.stride["value"]
        key_rows = f.offset(scratch["keys"], part.first * keys, tile.element)
        value_rows = f.offset(scratch["values"], part.first * values, tile.element)
        queries = f.offset(scratch["queries"], q * self.depth["key"], tile.element)
        out = f.offset(scratch["out"], q * self.depth["value"], tile.element)
        scores, maxima, alpha = scratch["scores"], scratch["maxima"], scratch["alpha"]
        running_max, running_sum = self._running(q)
        depth, columns = ((arg[name] + 3) & -4 for name in ("head_dim", "value_dim"))

        def rewrite(mod: Value) -> None:
            q_idx, kv_idx = item.q_idx + q, block.origin + part.first
            place = (item.b, item.h, q_idx, item.q_count - q, kv_idx, count)
            with f.when(mod.differs(f.null())):
                f.call_pointer(mod, REWRITE, scores, maxima, arg["arguments"], *place)

        def accumulate(exponentiate: Function, multiply_values: Function) -> list[Value]:
            f.call(exponentiate, scores, maxima, running_max, running_sum, alpha, count)
            rewrite(arg["weights_mod"])
            f.call(multiply_values, value_rows, values, scores, out, alpha, count, columns)
            return []

        f.call(phases.multiply_keys, key_rows, keys, queries, depth, scores, maxima, count)
        rewrite(self.work.mod(part.kind))
        with f.when(arg["observe"].differs(f.null())):
            first = block.origin + part.first - item.kv_begin
            state = (running_sum, *self._observed(q))
            f.call_pointer(arg["observe"], OBSERVE, scores, *state, first, count)
        f.choose(
            careful | self._odd(running_max) | self._odd(maxima),
            lambda: accumulate(phases.exponentiate_carefully, phases.multiply_values_carefully),
            lambda: accumulate(phases.exponentiate, phases.multiply_values),
        )

    def _odd(self, maxima: Value) -> Value:
        """Whether some column's maximum is +inf or NaN."""
        odd = self.f.value(False, I1)
        for maximum in self.tile.load_row(self.f, maxima):
            odd = odd | self.f.any_lane(~(maximum < math.inf))
        return odd

    def _finish(self, item: Item) -> Value:
        """Divide by the sums, write out, lse and the like; whether out is not finite."""
        f, tile, scratch = self.f, self.tile, self.scratch
        self._close_sums(item)
        rows, stride, depth = scratch["values"], self.stride["value"], self.depth["value"]

        def write(q: Value, seen: list[Value]) -> list[Value]:
            count = f.minimum(item.q_count - q, self.spec.target.block_kv)
            first = item.q_first + q
            panels = f.offset(scratch["out"], q * depth, tile.element)
            _, factors = self._running(q)
            odd = f.call(self.phases.unpack, panels, factors, count, depth, rows, stride)
            f.call(self.phases.scatter_out, self.rows["out"], first, first + count, rows, stride)
            return [seen[0] | odd]

        nothing, step = f.value(False, I1), self.spec.target.block_kv
        (odd,) = f.loop(0, item.q_count, write, carry=[nothing], step=step)
        self._write_numbers(item, "lse", scratch["lse"])
        self._write_numbers(item, "max_scores", scratch["running_max"])
        self._write_numbers(item, "entropy", scratch["surprise"])
        self._write_numbers(item, "argmax", scratch["place"])
        return odd

    def _close_sums(self, item: Item) -> None:
        """From the running maximum and sum to lse, to the true maximum, 1 / sum and entropy."""
        f, tile = self.f, self.tile
        sink = sink_of(f, tile, self.arg, item.h)
        with f.range(0, item.q_count, tile.lanes) as q:
            maxima, sums = self._running(q)
            total = tile.load(f, sums)
            row = close(f, tile.load(f, maxima), total, sink)
            tile.store(f, row.lse, self.scratch["lse"], q)
            tile.store(f, row.peak, maxima)
            tile.store(f, row.share, sums)
            with f.when(self.arg["entropy"].differs(f.null())):
                surprise = tile.load(f, self.scratch["surprise"], q)
                nats = observe.entropy(f, surprise, total, row.kept, row.log_share, row.share)
                tile.store(f, nats, self.scratch["surprise"], q)

    def _write_numbers(self, item: Item, name: str, source: Value) -> None:
        """One number per query, where the caller wants it."""
        f, arg, element = self.f, self.arg, self.tile.element
        with f.when(arg[name].differs(f.null())):
            start = item.b * arg["lse_batch"] + item.h * arg["lse_head"]
            first = start + (item.q_row + item.q_first) * arg["lse_row"]
            with f.range(0, item.q_count) as q:
                if name == "argmax":
                    number = f.load(element.as_int, source, q)
                    value = observe.position(f, number, item.kv_begin)
                else:
                    value = f.load(element, source, q)
                f.store(value, arg[name], first + q * arg["lse_row"])
