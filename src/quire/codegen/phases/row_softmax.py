"""The softmax of the decode kernel: scores to weights, and pieces to one result.

    weights[key] = exp4(scores[key] - maximum of the row so far)

Lanes run over keys. Maxima are the same in all lanes; sums are kept lane by lane until the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.codegen.convention import PARTIAL_STATES
from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import typed
from quire.codegen.phases import observe
from quire.codegen.phases.row_stream import Ahead
from quire.codegen.phases.staging import Storage
from quire.codegen.phases.tiles import UNREAD, TileShape, across


def write_exponentiate(module: Module, tile: TileShape, stored: Storage, width: int) -> Function:
    """The function that turns the scores of a row into weights.

    It updates the running maximum and sum of the row, and stores in `alpha` the factor by which
    earlier sums shrink. With every vector of scores it prefetches a line of values, from the table
    of addresses `rows` on, if their `width` is known.
    """
    parameters = typed("ptr scores running_max running_sum alpha, i64 count, ptr rows")
    with module.function("exponentiate_row", parameters, internal=True) as f:
        scores, count = f.given["scores"], f.given["count"]
        ahead = Ahead(f, f.given["rows"], stored, width) if width else None

        def higher(j: Value, best: list[Value]) -> list[Value]:
            return [f.maximum(best[0], tile.load(f, scores, j))]

        before = tile.load(f, f.given["running_max"])
        lowest = f.value(-math.inf, tile.vector)
        (best,) = f.loop(0, count, higher, carry=[lowest], step=tile.lanes)
        best = across(f, best, f.maximum)
        after = f.maximum(before, best)
        shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
        moved = vecmath.exp4(f, before - shift)

        def weigh_all(exp4: Callable[[Function, Value], Value]) -> list[Value]:
            def weigh(j: Value, total: list[Value]) -> list[Value]:
                score = tile.load(f, scores, j)
                if ahead is not None:
                    ahead.ask_line(j.udiv(tile.lanes))
                weight = exp4(f, score - shift)
                tile.store(f, f.select(score.equals(-math.inf), UNREAD, weight), scores, j)
                return [total[0] + weight]

            return f.loop(0, count, weigh, carry=[f.value(0.0, tile.vector)], step=tile.lanes)

        infinite = f.extract(after, 0).equals(math.inf)  # then scores may be above `shift`
        (total,) = f.choose(
            infinite,
            lambda: weigh_all(vecmath.exp4),
            lambda: weigh_all(vecmath.exp4_nonpositive),
        )
        running_sum = f.given["running_sum"]
        tile.store(f, after, f.given["running_max"])
        tile.store(f, f.fma(tile.load(f, running_sum), moved, total), running_sum)
        tile.store(f, moved, f.given["alpha"])
    return f


def write_scale_weights(module: Module, tile: TileShape) -> Function:
    """The function that multiplies weights by the scales of int8 values; UNREAD stays UNREAD."""
    parameters = typed("ptr weights scales, i64 count")
    with module.function("scale_weights", parameters, internal=True) as f:
        weights, scales, count = f.parameters
        bits = tile.element.as_int
        unread = f.bitcast(f.value(UNREAD, tile.vector), bits)
        with f.range(0, count, tile.lanes) as j:
            weight = tile.load(f, weights, j)
            kept = f.bitcast(weight, bits).equals(unread)
            tile.store(f, f.select(kept, weight, weight * tile.load(f, scales, j)), weights, j)
    return f


def write_merge(module: Module, tile: TileShape) -> Function:
    """The function that adds the partial result of a piece, at `part`, to the state of a row."""
    parameters = typed("ptr running_max running_sum best place surprise out part, i64 columns")
    with module.function("merge", parameters, internal=True) as f:
        given, names = f.given, (*PARTIAL_STATES, "out")
        theirs = {
            name: f.offset(given["part"], k * tile.lanes, tile.element)
            for k, name in enumerate(names)
        }
        before, other = (tile.load(f, of["running_max"]) for of in (given, theirs))
        after = f.maximum(before, other)
        shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
        moved, joined = vecmath.exp4(f, before - shift), vecmath.exp4(f, other - shift)

        def add(mine: Value, its: Value) -> Value:
            return f.fma(mine, moved, its * joined)

        mine, its = (tile.load(f, of["running_sum"]) for of in (given, theirs))
        tile.store(f, after, given["running_max"])
        tile.store(f, add(mine, its), given["running_sum"])
        my_state, their_state = (
            observe.State(*(of[name] for name in observe.State._fields)) for of in (given, theirs)
        )
        here = observe.ObservedPart(my_state, mine, before - shift, moved)
        there = observe.ObservedPart(their_state, its, other - shift, joined)
        observe.merge(f, tile, here, there)
        with f.range(0, given["columns"], tile.lanes) as d:
            total = add(tile.load(f, given["out"], d), tile.load(f, theirs["out"], d))
            tile.store(f, total, given["out"], d)
    return f
