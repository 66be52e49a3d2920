"""Scores of the decode kernel: the product of keys with a set of rows.

    scores[row, key] = sum_d keys[key, d] queries[row, d]

Lanes run over keys, so that every score is one chain of multiply-adds, as in the forward kernel:
a square of as many keys as there are lanes is transposed in registers, a few columns at a time, and
a number of a query is broadcast. Keys of 8 or 16 bits are transposed as they are, several columns
in a lane, and then converted. The rows of a set share each square; what a row computes does not
depend on the other rows of its set. Keys are found through a table of addresses, so nothing here
knows about pages.

If there are more rows than one set has, the first set leaves the columns that it has transposed in
scratch, and all others load them from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import F32, I32, PTR, typed
from quire.codegen.phases.row_stream import LINE, Ahead, Index, over_columns
from quire.codegen.phases.storage import Storage
from quire.codegen.phases.tiles import TileShape
from quire.codegen.phases.transpose import side_by_side, transpose_units
from quire.codegen.scratch import row_stride

SQUARES = 1  # squares of keys that are computed at once; two would not stay in the L1 cache
MOST_TOGETHER = 4  # rows of a set


def set_sizes(tile: TileShape) -> list[int]:
    """How many rows a set may have, in the order in which they are tried."""
    return [size for size in (4, 2, 1) if size <= MOST_TOGETHER]


def write_multiply_keys(
    module: Module, tile: TileShape, stored: Storage, rows: int, width: int, *, keep: bool = False
) -> Function:
    """The function that multiplies `count` keys with a set of `rows` rows.

    Keys of 8 bits are multiplied by their scales. `width` is the number of columns if it is known,
    else 0. With `keep`, transposed columns are left in `kept`. Scores are written for whole squares
    of keys, past the last key too.
    """
    parameters = typed("ptr keys scales queries, i64 query_stride depth, ptr scores, i64 count")
    parameters |= typed("ptr kept") if keep else {}
    name = f"multiply_keys_{stored.name}_{rows}" + "_keep" * keep
    with module.function(name, parameters, internal=True) as f:
        _KeyProducts(f, tile, stored, rows, width or f.given["depth"]).write()
    return f


class _KeyProducts:
    """The body of `multiply_keys` while it is written."""

    def __init__(
        self, f: Function, tile: TileShape, stored: Storage, rows: int, columns: Index
    ) -> None:
        self.f, self.tile, self.stored, self.rows, self.columns = f, tile, stored, rows, columns
        self.together = SQUARES * tile.lanes  # keys at a time
        given = f.given
        starts = (r * given["query_stride"] for r in range(rows))
        self.queries = [f.offset(given["queries"], start, tile.element) for start in starts]

    def write(self) -> None:
        """All keys, a few squares at a time."""
        f, together = self.f, self.together
        keys, count = f.given["keys"], f.given["count"]
        ahead = Ahead(f, keys, self.stored, self.columns, together, square=True)
        with f.range(0, count, together) as j:
            here = [f.load(PTR, keys, f.minimum(j + t, count - 1)) for t in range(together)]
            self._store(j, self._scores(j, here, ahead))

    def _scores(self, j: Value, here: Sequence[Value], ahead: Ahead) -> list[Value]:
        """The scores of all rows with the keys at hand: square by square, then row by row."""
        f, lanes, size = self.f, self.tile.lanes, self.stored.memory.size
        squares = [here[first : first + lanes] for first in range(0, len(here), lanes)]
        packs = self.tile.element == F32 and size < F32.size
        single = self.tile.in_128_bits
        several = single * (F32.size // size) if packs else single
        line = max(several, LINE // size)

        def add(d: Index, sums: list[Value], *, packed: bool) -> list[Value]:
            result: list[Value] = []
            for number, square in enumerate(squares):
                mine = sums[number * self.rows : (number + 1) * self.rows]
                columns = self._columns(square, d, packed=packed)
                result += self._add(j, number, d, columns, mine)
            return result

        def add_line(d: Index, sums: list[Value]) -> list[Value]:
            ahead.ask(j, d * size, line * size)
            for step in range(0, line, several):
                sums = add(d + step, sums, packed=packs)
            return sums

        def add_rest(d: Index, sums: list[Value]) -> list[Value]:
            return add(d, sums, packed=False)

        whole = self.columns & -line
        sums = [f.value(0.0, self.tile.vector)] * (SQUARES * self.rows)
        sums = over_columns(f, 0, whole, add_line, step=line, carry=sums)
        return over_columns(f, whole, self.columns, add_rest, step=single, carry=sums)

    def _columns(self, keys: Sequence[Value], d: Index, *, packed: bool) -> Iterator[Value]:
        """The columns from d on of as many keys as there are lanes, as far as 128 bits go.

        Each load has 128 bits of a key. They are put side by side for every fourth key, so that
        shuffles within 128 bits do the rest.
        """
        f, tile, stored = self.f, self.tile, self.stored
        unit = tile.in_128_bits

        def read(key: Value) -> Value:
            if packed:
                at = f.offset(key, d, stored.memory)
                return f.load(I32.vector(unit), at, align=stored.memory.size)
            return stored.read_columns(f, key, d, tile.element.vector(unit))

        rows = [side_by_side(f, [read(key) for key in keys[r::unit]]) for r in range(unit)]
        for column in transpose_units(f, rows):
            yield from stored.read_words(f, column, tile.element) if packed else (column,)

    def _add(
        self, j: Value, square: int, d: Index, columns: Iterator[Value], sums: list[Value]
    ) -> list[Value]:
        """Add the products of columns from d on to the scores of each row."""
        f, tile = self.f, self.tile
        for c, column in enumerate(columns):
            if "kept" in f.given:
                depth, lanes = f.given["depth"], tile.lanes
                tile.store(
                    f, column, f.given["kept"], (j + square * lanes) * depth + (d + c) * lanes
                )
            numbers = [f.load(tile.element, query, d + c) for query in self.queries]
            wide = [f.splat(number, tile.vector) for number in numbers]
            sums = [f.fma(column, number, x) for number, x in zip(wide, sums, strict=True)]
        return sums

    def _store(self, j: Value, scores: list[Value]) -> None:
        f = self.f
        for place, score in enumerate(scores):
            square, r = divmod(place, self.rows)
            at = j + square * self.tile.lanes
            store_scores(f, self.tile, self.stored, score, j=at, row=r)


def store_scores(
    f: Function, tile: TileShape, stored: Storage, score: Value, *, j: Value, row: int
) -> None:
    """Write the scores of a row with the keys from j on, times the scales of rows of 8 bits."""
    if stored.has_scales:
        score = score * f.load(score.type, f.given["scales"], j, align=tile.element.size)
    at = j + row * row_stride(tile)
    f.store(score, f.given["scores"], at, align=tile.element.size)


def write_multiply_kept(module: Module, tile: TileShape, stored: Storage, rows: int) -> Function:
    """The function that multiplies `count` keys, transposed in `kept`, with a set of rows."""
    parameters = typed("ptr kept scales queries, i64 query_stride depth, ptr scores, i64 count")
    squares = 4 if tile.target.registers == 32 else 2
    with module.function(f"multiply_kept_{rows}", parameters, internal=True) as f:
        given, lanes = f.given, tile.lanes
        depth, vector = given["depth"], tile.vector
        offsets = (r * given["query_stride"] for r in range(rows))
        queries = [f.offset(given["queries"], offset, tile.element) for offset in offsets]
        with f.range(0, given["count"], squares * lanes) as j:
            starts = [
                f.offset(given["kept"], (j + s * lanes) * depth, tile.element)
                for s in range(squares)
            ]

            def add(d: Value, sums: list[Value], starts: list[Value] = starts) -> list[Value]:
                columns = [tile.load(f, start, d * lanes) for start in starts]
                wide = [f.splat(f.load(tile.element, query, d), vector) for query in queries]
                cells = [(column, number) for number in wide for column in columns]
                return [f.fma(a, b, x) for (a, b), x in zip(cells, sums, strict=True)]

            nothing = [f.value(0.0, vector)] * (squares * rows)
            for place, score in enumerate(f.loop(0, depth, add, carry=nothing)):
                r, s = divmod(place, squares)
                store_scores(f, tile, stored, score, j=j + s * lanes, row=r)
    return f
