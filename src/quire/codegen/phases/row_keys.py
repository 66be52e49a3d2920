"""Scores of the decode kernel: the product of keys with a set of rows.

    scores[row, key] = sum_d keys[key, d] queries[row, d]

Lanes run over columns. The rows of a set share each load of a key; what a row computes, and in
which order, does not depend on the other rows of its set. Keys are found through a table of
addresses, so nothing here knows about pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import PTR, typed
from quire.codegen.phases.row_stream import Ahead, Index, columns_of_line, over_columns
from quire.codegen.phases.staging import Storage
from quire.codegen.phases.tiles import TileShape
from quire.codegen.scratch import row_stride

SUMS = 8  # products of a row and a key that are summed at once, a register each
MOST_TOGETHER = 4  # rows of a set


def set_sizes(tile: TileShape) -> list[int]:
    """How many rows a set may have, in the order in which they are tried."""
    return [size for size in (4, 2, 1) if size <= min(tile.lanes, MOST_TOGETHER)]


def write_multiply_keys(
    module: Module, tile: TileShape, stored: Storage, rows: int, width: int, *, again: bool = False
) -> Function:
    """The function that multiplies `count` keys with a set of `rows` rows.

    Keys of int8 are multiplied by their scales. Scores past the last key are -inf, up to whole
    vectors. `width` is the number of columns if it is known, else 0. With `again`, the keys were
    read before and are in a cache: nothing is prefetched.
    """
    parameters = typed("ptr keys scales queries, i64 query_stride depth, ptr scores, i64 count")
    name = f"multiply_keys_{stored.name}_{rows}" + "_again" * again
    with module.function(name, parameters, internal=True) as f:
        products = _KeyProducts(f, tile, stored, rows, width or f.given["depth"])
        products.write(prefetch=not again)
    return f


class _KeyProducts:
    """The body of `multiply_keys` while it is written."""

    def __init__(
        self, f: Function, tile: TileShape, stored: Storage, rows: int, columns: Index
    ) -> None:
        self.f, self.tile, self.stored, self.rows, self.columns = f, tile, stored, rows, columns
        self.together = SUMS // rows  # keys at a time

    def write(self, *, prefetch: bool) -> None:
        """All keys, a few at a time."""
        f, given, together = self.f, self.f.given, self.together
        keys, count = given["keys"], given["count"]
        ahead = Ahead(f, keys, self.stored, self.columns, together) if prefetch else None
        queries, stride = given["queries"], given["query_stride"]
        starts = [f.offset(queries, r * stride, self.tile.element) for r in range(self.rows)]
        with f.range(0, count, together) as j:
            here = [f.load(PTR, keys, f.minimum(j + t, count - 1)) for t in range(together)]
            self._store(j, self._sums(j, here, starts, ahead))
        self._fill_up()

    def _sums(
        self, j: Value, here: Sequence[Value], starts: Sequence[Value], ahead: Ahead | None
    ) -> list[Value]:
        """For every row and key at hand, a vector whose lanes add up to the score."""
        f, tile, stored = self.f, self.tile, self.stored
        line, size = columns_of_line(tile, stored), stored.memory.size

        def add(d: Index, parts: Sequence[Value], sums: list[Value]) -> list[Value]:
            result = []
            for r, start in enumerate(starts):
                query = tile.load(f, start, d)
                mine = sums[r * self.together : (r + 1) * self.together]
                result += [f.fma(x, query, y) for x, y in zip(parts, mine, strict=True)]
            return result

        def add_line(d: Index, sums: list[Value]) -> list[Value]:
            if ahead is not None:
                ahead.ask(j, d * size, line * size)
            for step in range(0, line, 2 * tile.lanes):
                pairs = [stored.read_pair(f, key, d + step, tile.vector) for key in here]
                for v, parts in enumerate(zip(*pairs, strict=True)):
                    sums = add(d + (step + v * tile.lanes), parts, sums)
            return sums

        def add_rest(d: Index, sums: list[Value]) -> list[Value]:
            return add(d, [stored.read_columns(f, key, d, tile.vector) for key in here], sums)

        whole = self.columns & -line
        sums = [f.value(0.0, tile.vector)] * (self.together * self.rows)
        sums = over_columns(f, 0, whole, add_line, step=line, carry=sums)
        return over_columns(f, whole, self.columns, add_rest, step=tile.lanes, carry=sums)

    def _store(self, j: Value, sums: list[Value]) -> None:
        f, given = self.f, self.f.given
        for place, products in _side_by_side(f, sums, self.together):
            r, t = divmod(place, self.together)
            if self.stored.has_scales:
                products = products * f.load(products.type, given["scales"], j + t)
            f.store(products, given["scores"], j + (r * row_stride(self.tile) + t))

    def _fill_up(self) -> None:
        """Scores past the last key are -inf."""
        f, tile, count = self.f, self.tile, self.f.given["count"]
        last = count & -tile.lanes
        lanes = tile.element.as_int.vector(tile.lanes)
        exists = f.iota(lanes) < f.splat(f.convert(count - last, lanes.scalar), lanes)
        for r in range(self.rows):
            at = f.offset(f.given["scores"], last + r * row_stride(tile), tile.element)
            tile.store(f, f.select(exists, tile.load(f, at), -math.inf), at)


def _side_by_side(f: Function, sums: list[Value], together: int) -> Iterator[tuple[int, Value]]:
    """The sum of the lanes of each vector, for up to `together` vectors at a time.

    Gives the number of the first vector, and the sums side by side.
    """
    lanes = sums[0].type.lanes
    few = min(together, lanes)
    for first in range(0, len(sums), lanes):
        total = add_lanes(f, sums[first : first + lanes])
        for place in range(first, min(first + lanes, len(sums)), few):
            yield place, f.shuffle(total, total, range(place - first, place - first + few))


def add_lanes(f: Function, vectors: list[Value]) -> Value:
    """The sum of all lanes of each vector, side by side, always added in the same order."""
    lanes, element = vectors[0].type.lanes, vectors[0].type.scalar
    half = max(1, 128 // element.bits) // 2  # one instruction shuffles 128 bits
    unit = 1
    while unit < lanes:
        if unit <= half:
            runs = [
                range(block + at, block + at + unit)
                for block in range(0, lanes, 2 * half)
                for at in range(0, half, unit)
            ]
            low = [x for run in runs for x in (*run, *(lanes + lane for lane in run))]
            high = [lane + half for lane in low]
        else:
            low = [lane for lane in range(2 * lanes) if not lane & (2 * half)]
            high = [lane + 2 * half for lane in low]
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False))
        pairs += [(vectors[-1], vectors[-1])] * (len(vectors) % 2)
        vectors = [f.shuffle(a, b, low) + f.shuffle(a, b, high) for a, b in pairs]
        unit *= 2
    return vectors[0]
