"""The phases of a tile that only the tangent kernel has, on panels like those of `tiles.py`.

    push_weights     tangents[key] = weights[key] tangents[key], and means = means alpha + their sum
    subtract_mean    tangents[d] = tangents[d] - out[d] mean of the query

Scores are multiplied by log4(e), and so are their tangents; `push_weights` takes that off again.
"""

from __future__ import annotations

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import typed
from quire.codegen.phases.softmax import LN_4
from quire.codegen.phases.tiles import TileShape


def write_push_weights(module: Module, tile: TileShape) -> Function:
    """The function that multiplies tangents of scores by weights, and adds them up."""
    parameters = typed("ptr weights tangents alpha means, i64 count")
    with module.function("push_weights", parameters, internal=True) as f:
        weights, tangents, alpha, means, count = f.parameters

        def push(j: Value, sums: list[Value]) -> list[Value]:
            rows = (tile.load_row(f, panel, j) for panel in (weights, tangents))
            pushed = [weight * (moved * LN_4) for weight, moved in zip(*rows, strict=True)]
            tile.store_row(f, pushed, tangents, j)
            return [a + b for a, b in zip(sums, pushed, strict=True)]

        sums = f.loop(0, count, push, carry=tile.row(f, 0.0))
        rows = tile.load_row(f, means), tile.load_row(f, alpha), sums
        tile.store_row(f, [f.fma(*numbers) for numbers in zip(*rows, strict=True)], means)
    return f


def write_subtract_mean(module: Module, tile: TileShape) -> Function:
    """The function that subtracts out times the mean of each query from the tangents of out."""
    parameters = typed("ptr out tangents means, i64 rows")
    with module.function("subtract_mean", parameters, internal=True) as f:
        out, tangents, means, rows = f.parameters
        mean = tile.load_row(f, means)
        with f.range(0, rows) as d:
            numbers = zip(tile.load_row(f, out, d), tile.load_row(f, tangents, d), strict=True)
            moved = [t - o * m for (o, t), m in zip(numbers, mean, strict=True)]
            tile.store_row(f, moved, tangents, d)
    return f
