"""The phases of a tile, each a small function of its own.

Lanes run over queries. A panel is a handful of vectors of queries side by side, one column per
query; a tile is what one panel does with one block of keys:

    scores[key, query] = sum_d keys[key, d] queries[d, query]           multiply_keys
    weights            = exp2(scores - maximum)                         exponentiate
    out[d, query]      = out alpha + sum_key values[key, d] weights     multiply_values

Keys and values come as broadcast numbers and are never transposed, maxima and sums are plain
vectors, and a block with fewer keys just runs shorter loops. Everything here lies in scratch
memory, in the type that is accumulated in, padded so that no loop has a ragged end; reading and
writing the user's tensors is in `staging.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire.codegen import vecmath
from quire.codegen.builder import Function, Module, Value
from quire.codegen.target import Target
from quire.codegen.types import I64, PTR, Type

NEGATIVE_ZERO = -0.0
SMALL_ROWS = 4  # rows of the second micro kernel, which takes what the first one leaves


@dataclass(frozen=True)
class Tile:
    """The shape of a tile: a target, and the type that scratch memory holds."""

    target: Target
    element: Type

    @property
    def vector(self) -> Type:
        """The type of one vector."""
        return self.target.vector(self.element)

    @property
    def lanes(self) -> int:
        """Queries in one vector."""
        return self.target.lanes(self.element)

    @property
    def width(self) -> int:
        """Queries in one panel."""
        return self.target.panel(self.element)

    def load_row(self, f: Function, pointer: Value, row: Value | int = 0) -> list[Value]:
        """One row of a panel."""
        at = f.offset(pointer, row * self.width, self.element)
        return [
            f.load(self.vector, at, v * self.lanes, align=self.target.vector_bits // 8)
            for v in range(self.target.vectors)
        ]

    def store_row(
        self, f: Function, values: list[Value], pointer: Value, row: Value | int = 0
    ) -> None:
        """Write one row of a panel."""
        at = f.offset(pointer, row * self.width, self.element)
        for v, value in enumerate(values):
            f.store(value, at, v * self.lanes, align=self.target.vector_bits // 8)

    def constant_row(self, f: Function, number: float) -> list[Value]:
        """A row that is the same number everywhere."""
        return [f.value(number, self.vector)] * self.target.vectors


def outer_product(
    f: Function,
    tile: Tile,
    rows: int,
    count: Value,
    numbers: Callable[[Value], list[Value]],
    row: Callable[[Value], list[Value]],
    unroll: int,
) -> list[Value]:
    """sum_i numbers(i)[r] * row(i)[v]: rows x vectors accumulators that start at zero.

    This is the loop that all the time is spent in.
    """

    def once(i: Value, sums: list[Value], steps: int) -> list[Value]:
        for step in range(steps):
            vectors = row(i + step if step else i)
            scalars = numbers(i + step if step else i)
            for r, number in enumerate(scalars):
                wide = f.splat(number, tile.vector)
                for v, vector in enumerate(vectors):
                    k = r * len(vectors) + v
                    sums = [*sums[:k], f.fma(wide, vector, sums[k]), *sums[k + 1 :]]
        return sums

    zeros = tile.constant_row(f, 0.0) * rows
    whole = count & -unroll
    sums = f.loop(0, whole, lambda i, s: once(i, s, unroll), carry=zeros, step=unroll)
    if unroll == 1:
        return sums
    return f.loop(whole, count, lambda i, s: once(i, s, 1), carry=sums)


def split_rows(tile: Tile, count: Value) -> Value:
    """How many of `count` rows (a multiple of 4) the large micro kernel takes."""
    unit = math.lcm(tile.target.rows, SMALL_ROWS)
    return count.udiv(unit) * unit
QK_UNROLL=2; PV_UNROLL=1; SM_UNROLL=2

def write_multiply_keys(module: Module, tile: Tile) -> Function:
    """scores[j] = keys[j] . queries for `count` keys, and the maximum of every column."""
    parameters = {
        "keys": PTR, "key_stride": I64, "queries": PTR, "scores": PTR,
        "maxima": PTR, "count": I64, "depth": I64,
    }
    with module.function("multiply_keys", parameters, internal=True) as f:
        keys, key_stride, queries, scores, maxima, count, depth = f.parameters

        def rows_from(rows: int) -> Callable[[Value, list[Value]], list[Value]]:
            def body(j: Value, best: list[Value]) -> list[Value]:
                # Rows past the end repeat the last key; their scores land in the padding.
                key_rows = [
                    f.offset(keys, f.minimum(j + r, count - 1) * key_stride if rows==SMALL_ROWS else (j+r)*key_stride, tile.element)
                    for r in range(rows)
                ]
                sums = outer_product(
                    f, tile, rows, depth,
                    lambda d: [f.load(tile.element, at, d) for at in key_rows],
                    lambda d: tile.load_row(f, queries, d),
                    unroll=QK_UNROLL,
                )
                n = tile.target.vectors
                for r in range(rows):
                    row = sums[r * n : (r + 1) * n]
                    tile.store_row(f, row, scores, j + r)
                    best = [f.maximum(b, s) for b, s in zip(best, row, strict=True)]
                return best

            return body

        large = split_rows(tile, (count + 3) & -4)
        best = tile.constant_row(f, -math.inf)
        best = f.loop(0, large, rows_from(tile.target.rows), carry=best, step=tile.target.rows)
        best = f.loop(large, count, rows_from(SMALL_ROWS), carry=best, step=SMALL_ROWS)
        tile.store_row(f, best, maxima)
    return f


def write_exponentiate(module: Module, tile: Tile, *, careful: bool) -> Function:
    """weights = exp2(scores - maximum) in place; the running maximum and sum move on."""
    name = "exponentiate_carefully" if careful else "exponentiate"
    parameters = {"scores": PTR, "maxima": PTR, "running_max": PTR, "running_sum": PTR, "alpha": PTR, "count": I64}
    with module.function(name, parameters, internal=True) as f:
        scores, maxima, running_max, running_sum, alpha, count = f.parameters
        exp2 = vecmath.exp2 if careful else vecmath.exp2_nonpositive
        for v in range(tile.target.vectors):
            at = v * tile.lanes
            before = f.load(tile.vector, running_max, at)
            after = f.maximum(before, f.load(tile.vector, maxima, at))
            # A column without any finite maximum subtracts 0: -inf stays -inf and +inf stays +inf.
            shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
            f.store(after, running_max, at)
            f.store(exp2(f, before - shift), alpha, at)

            def once(j: Value, sums: list[Value], steps: int) -> list[Value]:
                s, = sums
                base = f.offset(scores, j * tile.width + at, tile.element)
                for step in range(steps):
                    score = f.load(tile.vector, base, step * tile.width)
                    weight = exp2(f, score - shift)
                    s = s + weight
                    if careful:
                        weight = f.select(score.equals(-math.inf), NEGATIVE_ZERO, weight)
                    f.store(weight, base, step * tile.width)
                return [s]

            whole = count & -SM_UNROLL
            sums = f.loop(0, whole, lambda j, s: once(j, s, SM_UNROLL), carry=[f.value(0.0, tile.vector)], step=SM_UNROLL)
            sums = f.loop(whole, count, lambda j, s: once(j, s, 1), carry=sums)
            total = f.fma(f.load(tile.vector, running_sum, at), f.load(tile.vector, alpha, at), sums[0])
            f.store(total, running_sum, at)
    return f

PACKED=True
def write_multiply_values(module: Module, tile: Tile) -> Function:
    """out = out * alpha + values . weights."""
    parameters = {"values": PTR, "value_stride": I64, "weights": PTR, "out": PTR, "alpha": PTR, "first": I64, "count": I64, "columns": I64}
    with module.function("multiply_values", parameters, internal=True) as f:
        values, value_stride, weights, out, alpha, first, count, columns = f.parameters
        large = split_rows(tile, columns)
        scale = tile.load_row(f, alpha)
        for rows, start, stop in ((tile.target.rows, 0, large), (SMALL_ROWS, large, columns)):
            with f.range(start, stop, rows) as d:
                if PACKED: 
                    base = f.offset(f.offset(values, d * tile.target.block_kv, tile.element), first * rows, tile.element)
                    def numbers(j: Value) -> list[Value]:
                        at = f.offset(base, j * rows, tile.element)
                        return [f.load(tile.element, at, r) for r in range(rows)]
                else:
                    base = f.offset(f.offset(values, d, tile.element), first * value_stride, tile.element)
                    def numbers(j: Value) -> list[Value]:
                        at = f.offset(base, j * value_stride, tile.element)
                        return [f.load(tile.element, at, r) for r in range(rows)]
                sums = outer_product(f, tile, rows, count, numbers, lambda j: tile.load_row(f, weights, j), unroll=PV_UNROLL)
                n = tile.target.vectors
                for r in range(rows):
                    old = tile.load_row(f, out, d + r)
                    tile.store_row(f, [f.fma(o, a, s) for o, a, s in zip(old, scale, sums[r*n:(r+1)*n], strict=True)], out, d + r)
    return f
