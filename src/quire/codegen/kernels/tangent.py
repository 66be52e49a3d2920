"""The tangent kernel: the forward kernel, which also computes tangents of its results.

With X' the tangent of X, S the scores after the mods, P their softmax and Z dropout:

    S'    through the mods from the tangent of the product, [K, K'] . [Q', Q]     one product
    lse'  = sum(P S')
    out'  = (Z P S') . V + (Z P) . V' - lse' out                                  two products

Every tile of the forward kernel is computed as it is there, by the same functions, so the results
have the same bits. Beside it, the tangents of its scores are a second panel; they become P S' after
the softmax, and are multiplied by the values, too. Sums of tangents shrink by the same `alpha` when
the maximum grows. How rows lie in scratch:

    keys      K  | K'         so that one product over both adds K . Q' and K' . Q
    queries   Q' | Q          rows of a panel
    values    V  | V'
    out       out | out' | sum(P S')     rows of a panel, before they are divided by the sums

An operand whose address is null does not move, and its products are left out. If a tangent is not
finite, the kernel notes it, and torch ops compute the tangents again: a value that is not finite
reaches queries that do not read it, since 0 * NaN is NaN.
"""

from __future__ import annotations

from quire.codegen.convention import PUSH, TANGENT, KernelSpec
from quire.codegen.kernels.forward import ForwardNest
from quire.codegen.kernels.items import QueryBlock
from quire.codegen.kernels.nest import entry
from quire.codegen.kernels.panel_nest import (
    OPERANDS,
    PanelPhases,
    PanelTile,
    Products,
    Strided,
)
from quire.codegen.kernels.visits import KeyBlock
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I1, I64
from quire.codegen.phases.softmax import Closed
from quire.codegen.phases.tangent_tiles import write_push_weights, write_subtract_mean
from quire.codegen.scratch import results_with_tangents, tangent_regions, tangent_stride


def write_tangent(spec: KernelSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(TANGENT record), called by every thread."""
    module = Module()
    phases = _TangentPhases(module, spec)
    with entry(module) as f:
        _TangentNest(spec, f, phases).attend_all()
    return module


class _TangentPhases(PanelPhases):
    """The functions of the forward kernel, and two more."""

    def __init__(self, module: Module, spec: KernelSpec) -> None:
        super().__init__(module, spec)
        self.push_weights = write_push_weights(module, spec.tile)
        self.subtract_mean = write_subtract_mean(module, spec.tile)


class _TangentNest(ForwardNest):
    """The loop nest of the forward kernel, and what is computed beside it."""

    phases: _TangentPhases
    layout = TANGENT
    operands = (*OPERANDS, *(f"{name}_tangent" for name in OPERANDS))
    regions = staticmethod(tangent_regions)
    row_stride = staticmethod(tangent_stride)

    def __init__(self, spec: KernelSpec, f: Function, phases: _TangentPhases) -> None:
        super().__init__(spec, f, phases)
        rows = results_with_tangents(self.tile, self.arg["value_dim"])
        self.depth |= {"query": self.depth["key"] * 2, "out": rows}

    @property
    def moves(self) -> Value:
        """Whether scores have a tangent."""
        return self.arg["moves"].differs(0)

    # --- where numbers are in scratch

    def query_panel(self, q: Value) -> Value:
        """The address of the panel of the queries from q on; their tangents are before it."""
        return self._row(super().query_panel(q), self.depth["key"])

    def _row(self, panel: Value, row: Value) -> Value:
        return self.f.offset(panel, row * self.tile.width, self.tile.element)

    def _tangent_panel(self, q: Value) -> Value:
        """The address of the panel of the tangents of out, of the queries from q on."""
        return self._row(self.out_panel(q), self.depth["value"])

    def _means(self, q: Value) -> Value:
        """The address of sum(P S') of the queries from q on; q need not begin a panel."""
        panel = q & -self.tile.width
        sums = self._row(self.out_panel(panel), self.depth["value"] * 2)
        return self.f.offset(sums, q - panel, self.tile.element)

    # --- queries, keys and values to scratch

    def pack(self, queries: QueryBlock, q: Value, name: str, panel: Value) -> None:
        """Copy the queries from q on to a panel, and their tangents to the rows before it."""
        super().pack(queries, q, name, panel)
        with self.f.when(self.wanted("query_tangent")):
            super().pack(queries, q, "query_tangent", super().query_panel(q))

    def _stage(self, queries: QueryBlock, block: KeyBlock, name: str) -> Strided:
        """Copy keys or values of a block to scratch, and their tangents beside them."""
        rows = Strided(self.scratch[f"{name}s"], self.stride[name])
        self._gather(block, name, rows.start)
        with self.f.when(self.wanted(f"{name}_tangent")):
            beside = self.f.offset(rows.start, self.depth[name], self.tile.element)
            self._gather(block, f"{name}_tangent", beside)
        return rows

    def _gather(self, block: KeyBlock, name: str, into: Value) -> None:
        begin, end = block.origin + block.begin, block.origin + block.end
        self._read(name, begin, end, self.f.null(), into)

    # --- tiles

    def scored(self, at: PanelTile, by: Products) -> None:
        """The tangents of the products: [keys, their tangents] . [tangents of queries, queries].

        If only one of both moves, the product begins or ends halfway.
        """
        f, scratch = self.f, self.scratch
        query, key = self.wanted("query_tangent"), self.wanted("key_tangent")
        keys, half = self._first_key(at, at.keys), self.depth["key"]
        beside = f.offset(keys, half, self.tile.element)
        width = (self.arg["head_dim"] + 3) & -4
        with f.when(query | key):
            operands = {"keys": f.select(query, keys, beside), "stride": at.keys.stride}
            operands["queries"] = f.select(query, super().query_panel(at.q), self.query_panel(at.q))
            operands["depth"] = f.select(query & key, half + width, width)
            panel = {"scores": scratch["tangents"], "maxima": scratch["spare"]}
            count = at.range.end - at.range.first
            f.call(by.multiply_keys, **operands, **panel, count=count)

    def _first_key(self, at: PanelTile, rows: Strided) -> Value:
        """The address of the first key, or value, of a tile."""
        first = (at.range.first - at.block.begin) * rows.stride
        return self.f.offset(rows.start, first, self.tile.element)

    def modify(self, at: PanelTile) -> None:
        """Apply the user's mods to scores and their tangents."""
        mod, tangents = self.visits.mod(at.range.kind), self.scratch["tangents"]
        self.rewrite(at, mod, self.scratch["scores"], PUSH, tangents=tangents)

    def weighed(self, at: PanelTile) -> None:
        """From the tangents S' of scores to P S', and add these up; dropout comes after that."""
        f, scratch = self.f, self.scratch
        with f.when(self.moves):
            panels = {"weights": scratch["scores"], "tangents": scratch["tangents"]}
            sums = {"alpha": scratch["alpha"], "means": self._means(at.q)}
            count = at.range.end - at.range.first
            f.call(self.phases.push_weights, **panels, **sums, count=count)
            self.rewrite(at, self.arg["weights_mod"], scratch["tangents"])

    def added(self, at: PanelTile, multiply_values: Function) -> None:
        """Add P S' times the values, and P times their tangents."""
        f, scratch, tile = self.f, self.scratch, self.tile
        values = self._first_key(at, at.values)
        size = {"stride": at.values.stride, "count": at.range.end - at.range.first}
        size |= {"columns": (self.arg["value_dim"] + 3) & -4, "out": self._tangent_panel(at.q)}
        with f.when(self.moves):
            pushed = {"weights": scratch["tangents"], "alpha": scratch["alpha"]}
            f.call(multiply_values, values=values, **pushed, **size)
        with f.when(self.wanted("value_tangent")):
            tile.store_row(f, tile.row(f, 1.0), scratch["spare"])
            beside = f.offset(values, self.depth["value"], tile.element)
            alpha = f.select(self.moves, scratch["spare"], scratch["alpha"])  # once is enough
            f.call(multiply_values, values=beside, weights=scratch["scores"], alpha=alpha, **size)

    # --- results

    def closed(self, queries: QueryBlock, q: Value, row: Closed) -> None:
        """The tangent of lse; a sink is one more score."""
        f, tile, arg = self.f, self.tile, self.arg
        (sink,) = f.choose(
            self.wanted("sink_tangent"),
            lambda: [f.load(tile.element, arg["sink_tangent"], queries.h)],
            lambda: [f.value(0.0, tile.element)],
        )
        mean = tile.load(f, self._means(q)) * row.share
        moved = f.fma(row.sunk, f.splat(sink, tile.vector), mean)
        tile.store(f, moved, self.scratch["lse_tangent"], q)

    def _finish(self, queries: QueryBlock) -> Value:
        """Write all results and their tangents; returns whether out is not finite."""
        f, tile = self.f, self.tile
        odd = super()._finish(queries)

        def write(q: Value, seen: list[Value]) -> list[Value]:
            means = f.offset(self.scratch["lse_tangent"], q, tile.element)
            panels = {"out": self.out_panel(q), "tangents": self._tangent_panel(q)}
            f.call(self.phases.subtract_mean, **panels, means=means, rows=self.depth["value"])
            return [seen[0] | self.unpack(queries, q, "out_tangent", self._tangent_panel(q))]

        nothing = f.value(False, I1)
        (seen,) = f.loop(0, queries.q_count, write, carry=[nothing], step=tile.width)
        with f.when(seen | self._write_means(queries)):
            f.store(f.value(1, I64), self.arg["odd"])
        return odd

    def _write_means(self, queries: QueryBlock) -> Value:
        """Write the tangent of lse; returns whether a number is not finite."""
        f, arg, element = self.f, self.arg, self.tile.element
        start = queries.b * arg["lse_batch"] + queries.h * arg["lse_head"]
        first = start + (queries.q_row + queries.q_first) * arg["lse_row"]

        def write(q: Value, seen: list[Value]) -> list[Value]:
            mean = f.load(element, self.scratch["lse_tangent"], q)
            f.store(mean, arg["lse_tangent"], first + q * arg["lse_row"])
            return [seen[0] | ~(mean * 0.0).equals(0.0)]

        return f.loop(0, queries.q_count, write, carry=[f.value(False, I1)])[0]
