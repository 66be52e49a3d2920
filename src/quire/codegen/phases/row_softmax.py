"""The softmax of the decode kernel: scores to weights.

    weights[key] = exp4(scores[key] - maximum of the row so far)

Lanes run over keys. The maximum and the sum of a row are the same in all lanes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import typed
from quire.codegen.phases.order import CHAINS, exp4_carefully, sum_of_block
from quire.codegen.phases.row_stream import Ahead
from quire.codegen.phases.storage import Storage
from quire.codegen.phases.tiles import UNREAD, TileShape, across, given_weight


def write_exponentiate(
    module: Module, tile: TileShape, stored: Storage, width: int, *, weighted: bool = False
) -> Function:
    """The function that turns the scores of a row and one block of keys into weights.

    Scores of keys that do not exist are -inf. It updates the running maximum and sum of the row,
    and stores in `alpha` the factor by which earlier sums shrink. With every vector of scores it
    prefetches a line of values, from the table of addresses `rows` on, if their `width` is known.
    If scores are `weighted`, they are weights already. The block has `count` keys, or fewer than
    CHAINS less.
    """
    parameters = typed("ptr scores running_max running_sum alpha rows, i64 count")
    with module.function("exponentiate_row", parameters, internal=True) as f:
        scores, count = f.given["scores"], f.given["count"]
        ahead = Ahead(f, f.given["rows"], stored, width) if width else None
        before = tile.load(f, f.given["running_max"])

        def look(j: Value, best: list[Value]) -> list[Value]:
            some = [tile.load(f, scores, j + at) for at in range(0, CHAINS, tile.lanes)]
            return [functools.reduce(f.maximum, some, best[0])]

        nothing = [f.value(-math.inf, tile.vector)]
        (best,) = f.loop(0, count, look, carry=nothing, step=CHAINS)
        after = f.maximum(before, across(f, best, f.maximum))
        shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
        one = f.value(1.0, tile.vector)
        moved = one if weighted else exp4_carefully(f, before - shift)

        def weigh_all(exp4: Callable[[Function, Value], Value]) -> list[Value]:
            def weigh(j: Value) -> Value:
                score = tile.load(f, scores, j)
                if ahead is not None:
                    ahead.ask_line(j.udiv(tile.lanes))
                found = given_weight(f, score) if weighted else exp4(f, score - shift)
                weight = f.select(score.equals(-math.inf), UNREAD, found)
                tile.store(f, weight, scores, j)
                return weight

            return [sum_of_block(f, tile, weigh, count)]

        infinite = f.extract(after, 0).equals(math.inf)  # then scores may be above `shift`
        if weighted:
            (total,) = weigh_all(vecmath.exp4)
        else:
            (total,) = f.choose(
                infinite,
                lambda: weigh_all(exp4_carefully),
                lambda: weigh_all(vecmath.exp4_nonpositive),
            )
        running_sum = f.given["running_sum"]
        tile.store(f, after, f.given["running_max"])
        tile.store(f, f.fma(tile.load(f, running_sum), moved, total), running_sum)
        tile.store(f, moved, f.given["alpha"])
    return f


def write_scale_weights(module: Module, tile: TileShape) -> Function:
    """The function that multiplies weights by the scales of values; UNREAD stays UNREAD."""
    parameters = typed("ptr weights scales, i64 begin end")
    with module.function("scale_weights", parameters, internal=True) as f:
        weights, scales, begin, end = f.parameters
        bits = tile.element.as_int
        unread = f.bitcast(f.value(UNREAD, tile.vector), bits)
        with f.range(begin & -tile.lanes, end, tile.lanes) as j:
            weight = tile.load(f, weights, j)
            kept = f.bitcast(weight, bits).equals(unread)
            tile.store(f, f.select(kept, weight, weight * tile.load(f, scales, j)), weights, j)
    return f
