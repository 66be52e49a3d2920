"""Merges pieces of attention that were computed apart, as the kernels of attention do inside.

    merge_pieces(parts, pieces, rows, width, sinks, out, lse)

    parts    for each piece the addresses of its out, sums and maxima, which are open rows
    sinks    one for each row, -inf if there is none
    out      [rows, width], lse [rows]: the result over the keys of all pieces

Pieces are added in the order in which they are given. So pieces that are cut where
`phases/order.py` cuts, in ascending order, give the bits of one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import PTR, Type, typed
from quire.codegen.phases.merge import join
from quire.codegen.phases.softmax import LOG4_E, close
from quire.codegen.phases.tiles import TileShape

MERGE = "merge_pieces"
OF_PIECE = 3  # addresses: out, sums, maxima


def write_merge_pieces(tile: TileShape) -> Module:
    """A module that exports `MERGE`, see above."""
    module = Module()
    parameters = typed("ptr parts, i64 pieces rows width, ptr sinks out lse")
    with module.function(MERGE, parameters) as f, f.range(0, f.given["rows"]) as row:
        _merge_row(f, tile, row)
    return module


def _merge_row(f: Function, tile: TileShape, row: Value) -> None:
    given, element, vector = f.given, tile.element, tile.vector
    first = row * given["width"]
    out = f.offset(given["out"], first, element)

    def columns(body: Callable[[Value, Type], None]) -> None:
        whole = given["width"] & -tile.lanes
        for begin, end, type in ((0, whole, vector), (whole, given["width"], element)):
            with f.range(begin, end, type.lanes or 1) as d:
                body(d, type)

    def load(type: Type, of: Value, d: Value) -> Value:
        return f.load(type, of, d, align=element.size)

    def add(piece: Value, state: list[Value]) -> list[Value]:
        its_out, *its = (f.load(PTR, given["parts"], piece * OF_PIECE + k) for k in range(OF_PIECE))
        total, best = (f.splat(f.load(element, of, row), vector) for of in its)
        joined, source = join(f, state[0], best), f.offset(its_out, first, element)

        def add_columns(d: Value, type: Type) -> None:
            both = joined.add(f, load(type, out, d), load(type, source, d))
            f.store(both, out, d, align=element.size)

        columns(add_columns)
        return [joined.after, joined.add(f, state[1], total)]

    columns(lambda d, type: f.store(f.value(0.0, type), out, d, align=element.size))
    nothing = [f.value(-math.inf, vector), f.value(0.0, vector)]
    best, total = f.loop(0, given["pieces"], add, carry=nothing)
    sink = f.splat(f.load(element, given["sinks"], row) * LOG4_E, vector)
    closed = close(f, best, total, sink)

    def divide(d: Value, type: Type) -> None:
        share = closed.share if type.lanes else f.extract(closed.share, 0)
        f.store(f.fma(load(type, out, d), share, 0.0), out, d, align=element.size)

    columns(divide)
    f.store(f.extract(closed.lse, 0), given["lse"], row)
