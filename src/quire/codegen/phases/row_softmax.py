"""The softmax of the decode kernel: scores to weights.

    weights[key] = exp4(scores[key] - maximum of the row so far)

Lanes run over keys. The maximum and the sum of a row are the same in all lanes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import typed
from quire.codegen.phases.order import CHAINS, exp4_carefully, sums_of_block
from quire.codegen.phases.row_stream import Ahead
from quire.codegen.phases.storage import Storage
from quire.codegen.phases.tiles import UNREAD, TileShape, across, given_weight
from quire.codegen.scratch import BLOCKS_TOGETHER, row_stride


def write_exponentiate(
    module: Module, tile: TileShape, stored: Storage, rows: int, width: int, *, weighted: bool
) -> Function:
    """The function that turns the scores of a set of rows and one block of keys into weights.

    Scores of keys that do not exist are -inf. It updates the running maximum and sum of each row,
    and stores in `alpha` the factor by which earlier sums shrink. With every vector of scores it
    prefetches a line of values, from the table of addresses `rows` on, if their `width` is known.
    If scores are `weighted`, they are weights already. The block has `count` keys, or fewer than
    CHAINS less.
    """
    parameters = typed("ptr scores running_max running_sum alpha rows, i64 count")
    with module.function(f"exponentiate_{rows}", parameters, internal=True) as f:
        ahead = Ahead(f, f.given["rows"], stored, width) if width else None
        # All rows at once need too many registers if the chains of a row are several vectors.
        size = rows if tile.lanes == CHAINS else 1
        for first in range(0, rows, size):
            _RowWeights(f, tile, range(first, first + size), rows, ahead).write(weighted=weighted)
    return f


class _RowWeights:
    """The weights of some rows of a set while they are written."""

    def __init__(
        self, f: Function, tile: TileShape, rows: range, of_set: int, ahead: Ahead | None
    ) -> None:
        self.f, self.tile, self.rows, self.of_set, self.ahead = f, tile, rows, of_set, ahead

    def at(self, name: str, stride: int) -> list[Value]:
        """The addresses of what each row has."""
        return [self.f.offset(self.f.given[name], r * stride, self.tile.element) for r in self.rows]

    def write(self, *, weighted: bool) -> None:
        """Find the maxima, then the weights and their sums."""
        f, tile = self.f, self.tile
        self.scores, maxima = (
            self.at("scores", row_stride(tile)),
            self.at("running_max", tile.lanes),
        )
        before = [tile.load(f, at) for at in maxima]
        best = f.loop(
            0,
            f.given["count"],
            self._look,
            carry=[f.value(-math.inf, tile.vector)] * len(self.rows),
            step=CHAINS,
        )
        after = [f.maximum(a, across(f, b, f.maximum)) for a, b in zip(before, best, strict=True)]
        shifts = [f.select(f.intrinsic("fabs", x).equals(math.inf), 0.0, x) for x in after]
        one = f.value(1.0, tile.vector)
        moved = [
            one if weighted else exp4_carefully(f, a - b)
            for a, b in zip(before, shifts, strict=True)
        ]
        if weighted:
            totals = self._weigh(lambda score, shift: given_weight(f, score), shifts)
        else:
            # Then scores may be above `shift`.
            infinite = [f.extract(x, 0).equals(math.inf) for x in after]
            totals = f.choose(
                functools.reduce(operator.or_, infinite),
                lambda: self._weigh(lambda score, shift: exp4_carefully(f, score - shift), shifts),
                lambda: self._weigh(
                    lambda score, shift: vecmath.exp4_nonpositive(f, score - shift), shifts
                ),
            )
        sums, alphas = (
            self.at("running_sum", tile.lanes),
            self.at("alpha", BLOCKS_TOGETHER * tile.lanes),
        )
        for number, alpha in enumerate(moved):
            total = f.fma(tile.load(f, sums[number]), alpha, totals[number])
            tile.store(f, after[number], maxima[number])
            tile.store(f, total, sums[number])
            tile.store(f, alpha, alphas[number])

    def _look(self, j: Value, best: list[Value]) -> list[Value]:
        f, tile, places = self.f, self.tile, range(0, CHAINS, self.tile.lanes)
        return [
            functools.reduce(f.maximum, [tile.load(f, scores, j + at) for at in places], known)
            for scores, known in zip(self.scores, best, strict=True)
        ]

    def _weigh(self, weight: Callable[[Value, Value], Value], shifts: list[Value]) -> list[Value]:
        """Store the weights, and return the sum of each row."""
        f, tile = self.f, self.tile

        def weigh(j: Value) -> list[Value]:
            found = []
            for row, scores, shift in zip(self.rows, self.scores, shifts, strict=True):
                if self.ahead is not None:
                    self.ahead.ask_line(j.udiv(tile.lanes) * self.of_set + row)
                score = tile.load(f, scores, j)
                unread = score.equals(-math.inf)
                found.append(f.select(unread, UNREAD, weight(score, shift)))
                tile.store(f, found[-1], scores, j)
            return found

        return sums_of_block(f, tile, weigh, len(self.rows), f.given["count"])


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
