"""What the forward kernel does with one tile: a panel of queries and some keys of a block."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.codegen.convention import (
    KERNEL,
    OBSERVE,
    REWRITE,
    KernelSpec,
    Record,
)
from quire.codegen.kernels.items import QueryBlock
from quire.codegen.kernels.nest import Nest
from quire.codegen.kernels.visits import KeyBlock, KeyPart, KeyRange
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.values import Signature
from quire.codegen.phases import observe, tiles
from quire.codegen.phases.merge import write_merge
from quire.codegen.phases.order import CHAINS
from quire.codegen.phases.row_stream import write_gather_scales
from quire.codegen.phases.staging import (
    scratch_stride,
    write_gather,
    write_pack,
    write_place,
    write_scatter,
    write_unpack,
)
from quire.codegen.phases.storage import Storage, storage
from quire.codegen.scratch import Regions, panel_regions

READ = ("query", "key", "value")
OPERANDS = (*READ, "out")


class Products:
    """The functions that compute a tile, for whole panels or for the first vectors of panels."""

    def __init__(self, module: Module, tile: tiles.TileShape, spec: KernelSpec) -> None:
        self.tile = tile
        scaled = storage(spec.key).has_scales
        self.multiply_keys = tiles.write_multiply_keys(
            module, tile, scaled=scaled, maxima=not spec.weighted
        )
        if not spec.weighted:
            self.exponentiate = tiles.write_exponentiate(module, tile)
        self.multiply_values = tiles.write_multiply_values(module, tile)


class PanelPhases:
    """The functions that the kernel calls; `gather` and `place` by the name of a tensor."""

    def __init__(self, module: Module, spec: KernelSpec) -> None:
        tile = spec.tile
        stored = {name: storage(spec.dtype_of(name)) for name in OPERANDS}
        in_place = [name for name in OPERANDS if stored[name].memory == tile.element]

        def distinct(names: Sequence[str]) -> list[Storage]:
            return sorted({stored[name] for name in names})

        gathers = {each: write_gather(module, tile, each, scaled=False) for each in distinct(READ)}
        places = {each: write_place(module, tile, each) for each in distinct(in_place)}
        self.gather = {name: gathers[stored[name]] for name in READ}
        self.place = {name: places[stored[name]] for name in in_place}
        self.scatter_out = write_scatter(module, tile, stored["out"])
        self.pack = write_pack(module, tile)
        self.unpack = write_unpack(module, tile, weighted=spec.weighted)
        self.whole = Products(module, tile, spec)
        self.parts = [Products(module, part, spec) for part in tile.parts()]
        self.gather_scales = {
            each.name: write_gather_scales(module, tile, each)
            for each in distinct(("key", "value"))
        }
        self.scale_weights = tiles.write_scale_weights(module, tile)
        self.find_maxima = tiles.write_find_maxima(module, tile, weighted=spec.weighted)
        self.merge = write_merge(module, tile, tile.width, weighted=spec.weighted)
        if spec.weighted:
            self.add_weights = tiles.write_add_weights(module, tile)
        else:
            self.exponentiate_carefully = tiles.write_exponentiate(module, tile, careful=True)
        self.multiply_values_carefully = tiles.write_multiply_values(module, tile, careful=True)


class Strided(NamedTuple):
    """Rows of keys, values or queries: where they begin, their stride, and perhaps scales."""

    start: Value
    stride: Value
    scales: Value | None = None


class PanelTile(NamedTuple):
    """A tile: the panel at query `q` of a block of queries, and a range of a block of keys."""

    queries: QueryBlock
    q: Value
    block: KeyBlock
    range: KeyRange
    keys: Strided  # the rows of the whole block
    values: Strided


class PanelNest(Nest):
    """The part of the forward kernel that computes tiles.

    A kernel that computes more of every tile says in `scored`, `modify`, `weighed` and `added` what
    it does beside. `depth` also has the rows of a panel of queries and of a panel of results.
    """

    layout = KERNEL
    operands: Sequence[str] = OPERANDS
    regions = staticmethod(panel_regions)
    row_stride = staticmethod(scratch_stride)

    def __init__(self, spec: KernelSpec, f: Function, phases: PanelPhases) -> None:
        def regions(arg: Record) -> Regions[Value]:
            return self.regions(spec.tile, arg["head_dim"], arg["value_dim"], arg["block_q"])

        layout, stride = self.layout, self.row_stride
        super().__init__(spec, f, regions, self.operands, layout=layout, stride=stride)
        self.depth |= {"query": self.depth["key"], "out": self.depth["value"]}
        self.phases = phases

    def query_panel(self, q: Value) -> Value:
        """The address of the panel of the queries from q on."""
        return self.f.offset(self.scratch["queries"], q * self.depth["query"], self.tile.element)

    def out_panel(self, q: Value, before: str = "") -> Value:
        """The address of the panel of results of the queries from q on; perhaps the merged one."""
        place = q * self.depth["out"]
        return self.f.offset(self.scratch[f"{before}out"], place, self.tile.element)

    def running(self, q: Value) -> tuple[Value, Value]:
        """The addresses of the running maximum and sum of the queries from q on."""
        return self.state("running_max", q), self.state("running_sum", q)

    def observed(self, q: Value) -> observe.State:
        """What the queries from q on have for the argmax and the entropy."""
        return observe.State(*(self.state(name, q) for name in observe.State._fields))

    def state(self, name: str, q: Value) -> Value:
        """The address of a state of the queries from q on."""
        return self.f.offset(self.scratch[name], q, self.tile.element)

    def attend_panel(self, at: PanelTile, careful: Value) -> None:
        """Compute a tile: scores, mods, softmax, and what its keys add to out."""
        f, scratch = self.f, self.scratch
        count, first = at.range.end - at.range.first, at.range.first - at.block.begin
        query_panel, out = self.query_panel(at.q), self.out_panel(at.q)
        running_max, running_sum = self.running(at.q)
        depth, columns = ((self.arg[name] + 3) & -4 for name in ("head_dim", "value_dim"))
        keys, values = (self._from(rows, first) for rows in (at.keys, at.values))
        left = at.queries.q_count - at.q
        softmax = {name: scratch[name] for name in ("chains", "scores", "maxima", "alpha")}
        softmax |= {"running_max": running_max, "running_sum": running_sum, "count": count}
        softmax["lead"] = at.range.first & (CHAINS - 1)

        def multiply_keys(by: Products) -> None:
            operands = {"keys": keys.start, "stride": keys.stride, "queries": query_panel}
            results = {"scores": scratch["scores"], "maxima": scratch["maxima"]}
            if keys.scales is not None:
                results["scales"] = keys.scales
            f.call(by.multiply_keys, **operands, depth=depth, **results, count=count)
            self.scored(at, by)

        def weigh(by: Products | PanelPhases, name: str) -> None:
            if not self.spec.weighted:
                f.call(getattr(by, name), **softmax)

        def accumulate(multiply_values: Function) -> None:
            self.weighed(at)
            self.drop(at)
            if values.scales is not None:
                f.call(self.phases.scale_weights, scratch["scores"], values.scales, count)
            operands = {"values": values.start, "stride": values.stride}
            operands |= {"weights": scratch["scores"], "alpha": scratch["alpha"]}
            f.call(multiply_values, **operands, out=out, count=count, columns=columns)
            self.added(at, multiply_values)

        def carefully() -> None:
            weigh(self.phases, "exponentiate_carefully")
            accumulate(self.phases.multiply_values_carefully)

        def quickly(by: Products) -> None:
            weigh(by, "exponentiate")
            accumulate(by.multiply_values)

        self._fitting(left, multiply_keys)
        self.modify(at)
        self._observe(at, running_sum, count)
        if self.spec.weighted:
            odd = careful  # a weight that is not finite makes out so, and then all is done again
            self._take_weights(at, count)
        else:
            odd = careful | self._odd(running_max, left) | self._odd(scratch["maxima"], left)
        f.choose(odd, carefully, lambda: self._fitting(left, quickly))

    def _take_weights(self, at: PanelTile, count: Value) -> None:
        """Update the sums and maxima of weights that a mod gave, if somebody wants them."""
        f, tile, scratch = self.f, self.tile, self.scratch
        maxima, (running_max, running_sum) = scratch["maxima"], self.running(at.q)
        tile.store_row(f, tile.row(f, 1.0), scratch["alpha"])
        with f.when(self.arg["stays_open"].equals(0) | self.wanted("lse")):
            chains = {"chains": scratch["chains"], "lead": at.range.first & (CHAINS - 1)}
            weights = {"weights": scratch["scores"], "running_sum": running_sum, "count": count}
            f.call(self.phases.add_weights, **chains, **weights)
        with f.when(self.wanted("max_scores")):
            f.call(self.phases.find_maxima, scratch["scores"], maxima, count)
            both = zip(tile.load_row(f, running_max), tile.load_row(f, maxima), strict=True)
            tile.store_row(f, [f.maximum(a, b) for a, b in both], running_max)

    def _from(self, rows: Strided, first: Value) -> Strided:
        """Rows without those before `first`."""
        f, element = self.f, self.tile.element
        scales = None if rows.scales is None else f.offset(rows.scales, first, element)
        return Strided(f.offset(rows.start, first * rows.stride, element), rows.stride, scales)

    def scored(self, at: PanelTile, by: Products) -> None:
        """What is computed after the scores of a tile."""

    def modify(self, at: PanelTile) -> None:
        """Apply the user's mods to the scores of a tile."""
        f, visits = self.f, self.visits
        apart = at.block.runs.differs(0)

        def together() -> None:
            self.rewrite(at, visits.mod(at.range.kind), self.scratch["scores"])

        def by_part() -> None:
            with f.when(visits.modified()):
                self._rewrite_parts(at, lambda part: visits.mod(part.kind))

        f.choose(apart, by_part, together)

    def drop(self, at: PanelTile) -> None:
        """Apply dropout to the weights of a tile."""
        f, mod = self.f, self.arg["weights_mod"]
        with f.when(mod.differs(f.null())):
            f.choose(
                at.block.runs.differs(0),
                lambda: self._rewrite_parts(at, lambda part: mod),
                lambda: self.rewrite(at, mod, self.scratch["scores"]),
            )

    def weighed(self, at: PanelTile) -> None:
        """What is computed after the weights of a tile."""

    def added(self, at: PanelTile, multiply_values: Function) -> None:
        """What is added after the values of a tile."""

    def _fitting(
        self, left: Value, run: Callable[[Products], None], parts: Sequence[Products] | None = None
    ) -> None:
        """Run the functions for the fewest vectors that hold the queries that are left."""
        parts = self.phases.parts if parts is None else parts
        if not parts:
            run(self.phases.whole)
            return
        part, *larger = parts
        fits = left <= part.tile.vectors * self.tile.lanes
        self.f.choose(fits, lambda: run(part), lambda: self._fitting(left, run, larger))

    def rewrite(
        self,
        at: PanelTile,
        mod: Value,
        scores: Value,
        signature: Signature = REWRITE,
        **more: Value,
    ) -> None:
        """Apply a mod, if there is one, to the scores or weights of a tile."""
        f, queries = self.f, at.queries
        with f.when(mod.differs(f.null())):
            panel = {"scores": scores, "maxima": self.scratch["maxima"], **more}
            where = {"b": queries.b, "h": queries.h, "q_idx": queries.q_idx + at.q}
            where |= {"queries": queries.q_count - at.q, "kv_idx": at.block.origin + at.range.first}
            size = {"keys": at.range.end - at.range.first, "arguments": self.arg["arguments"]}
            f.call_pointer(mod, signature, **panel, **where, **size)

    def _rewrite_parts(self, at: PanelTile, mod_of: Callable[[KeyPart], Value]) -> None:
        """The same for a tile whose keys are not neighbours; `mod_of` gives the mod of a part."""
        f, tile, scratch = self.f, self.tile, self.scratch
        maxima, sofar = scratch["maxima"], scratch["maxima_of_parts"]
        tile.store_row(f, tile.row(f, -math.inf), sofar)

        def one(part: KeyPart) -> None:
            mod, first = mod_of(part), part.first - at.range.first
            scores = f.offset(scratch["scores"], first * tile.width, tile.element)
            with f.when(mod.equals(f.null())):
                f.call(self.phases.find_maxima, scores, maxima, part.end - part.first)
            some = KeyRange(part.first, part.end, part.kind)
            block = at.block._replace(origin=part.position - part.first)
            self.rewrite(at._replace(block=block, range=some), mod, scores)
            both = zip(tile.load_row(f, sofar), tile.load_row(f, maxima), strict=True)
            tile.store_row(f, [f.maximum(a, b) for a, b in both], sofar)

        self.visits.each_part(at.block, one, at.range)
        tile.store_row(f, tile.load_row(f, sofar), maxima)

    def _observe(self, at: PanelTile, running_sum: Value, count: Value) -> None:
        """Show the scores of a tile to `observe`, if it is there."""
        f = self.f
        with f.when(self.wanted("observe")):
            first = at.block.origin + at.range.first - at.queries.kv_begin
            keys = {"first": first, "keys": count, "lead": at.range.first & (CHAINS - 1)}
            state = {"running_sum": running_sum, **self.observed(at.q)._asdict()}
            panel = {name: self.scratch[name] for name in ("chains", "scores")}
            f.call_pointer(self.arg["observe"], OBSERVE, **panel, **state, **keys)

    def _odd(self, maxima: Value, queries: Value) -> Value:
        """Whether the maximum of one of the first `queries` queries is +inf or NaN."""
        f, lanes = self.f, self.tile.lanes
        odd = [f.any_lane(~(x < math.inf)) for x in self.tile.load_row(f, maxima)]
        held = [x & (queries > v * lanes) if v else x for v, x in enumerate(odd)]
        return functools.reduce(operator.or_, held)
