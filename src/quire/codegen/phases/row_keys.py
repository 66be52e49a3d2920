"""Scores of the decode kernel: the product of keys with a set of rows.

    scores[row, key] = sum_d keys[key, d] queries[row, d]

Lanes run over keys, so that every score is one chain of multiply-adds, as in the forward kernel:
a square of as many keys as there are lanes is transposed in registers, a few columns at a time, and
a number of a query is broadcast. Keys of 8 or 16 bits are transposed as they are, several columns
in a lane, and then converted. The rows of a set share each square; what a row computes does not
depend on the other rows of its set. Keys are found through a table of addresses, so nothing here
knows about pages.

A multiply-add has to wait for the one before it in its chain. So squares take turns, a few columns
each, and their scores stay in memory meanwhile. From memory, few rows have to be read at a time,
or prefetching does not keep up: fewer squares take turns, and their columns are fewer.

If there are more rows than one set has, the first set leaves the columns that it has transposed in
scratch, and all others load them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import F32, I32, PTR, typed
from quire.codegen.phases.row_stream import Ahead, Index
from quire.codegen.phases.storage import Storage
from quire.codegen.phases.tiles import TileShape
from quire.codegen.phases.transpose import transpose_parts
from quire.codegen.scratch import row_stride

MOST_TOGETHER = 4  # rows of a set


class Turns(NamedTuple):
    """How squares take turns: how many share a number of a query, and 128 bits of a key at a time.

    `squares` is for numbers of 32 bits or more. Twice as many narrow ones take turns.
    """

    name: str
    squares: int
    pair: int
    units: int

    def keys(self, tile: TileShape, stored: Storage) -> int:
        """How many keys are read together."""
        return self.squares * tile.lanes * (2 if stored.is_narrow else 1)


STREAM = Turns("stream", squares=1, pair=1, units=1)
"""For many keys, which come from memory."""

NEAR = Turns("near", squares=2, pair=2, units=2)
"""For few keys, which may be in a cache."""


def set_sizes(tile: TileShape) -> list[int]:
    """How many rows a set may have, in the order in which they are tried."""
    return [size for size in (4, 2, 1) if size <= MOST_TOGETHER]


def write_multiply_keys(
    module: Module,
    tile: TileShape,
    stored: Storage,
    rows: int,
    width: int,
    *,
    turns: Turns,
    keep: bool = False,
) -> Function:
    """The function that multiplies `count` keys with a set of `rows` rows.

    Keys of 8 bits are multiplied by their scales. `width` is the number of columns if it is known,
    else 0. With `keep`, transposed columns are left in `kept`. Scores are written for whole squares
    of keys, past the last key too, so the table has addresses for the rest of a square.
    """
    parameters = typed("ptr keys scales queries, i64 query_stride depth, ptr scores, i64 count")
    parameters |= typed("ptr kept") if keep else {}
    name = f"multiply_keys_{stored.name}_{rows}_{turns.name}" + "_keep" * keep
    with module.function(name, parameters, internal=True) as f:
        _KeyProducts(f, tile, stored, rows, width or f.given["depth"], turns=turns).write()
    return f


class _KeyProducts:
    """The body of `multiply_keys` while it is written."""

    def __init__(
        self,
        f: Function,
        tile: TileShape,
        stored: Storage,
        rows: int,
        columns: Index,
        *,
        turns: Turns,
    ) -> None:
        self.f, self.tile, self.stored, self.columns, self.turns = f, tile, stored, columns, turns
        given = f.given
        starts = (r * given["query_stride"] for r in range(rows))
        self.queries = [f.offset(given["queries"], start, tile.element) for start in starts]
        self.scores = [
            f.offset(given["scores"], r * row_stride(tile), tile.element) for r in range(rows)
        ]
        self.packs = tile.element == F32 and stored.is_narrow

    def write(self) -> None:
        """Multiply all keys: some squares, then their columns, then square by square."""
        f, lanes, count = self.f, self.tile.lanes, self.f.given["count"]
        unit, together = self.tile.in_128_bits, self.turns.keys(self.tile, self.stored)
        part = unit * (self.turns.units if lanes == 4 * unit else 1)
        step = part * (F32.size // self.stored.memory.size if self.packs else 1)
        whole = self.columns & -step
        ahead = Ahead(f, f.given["keys"], self.stored, self.columns, together, squares=True)
        nothing = f.value(0.0, self.tile.vector)
        self._change(lambda j, score: nothing)
        with f.range(0, count, together) as first:
            end = f.minimum(first + together, count)
            several = self.turns.pair
            pairs = first + ((end - first) & -(several * lanes)) if several > 1 else end
            sets = ((first, pairs, several), (pairs, end, 1))[:several]
            with f.range(0, whole, step) as d:
                for begin, stop, number in sets:
                    with f.range(begin, stop, number * lanes) as j:
                        ahead.ask_step(j, d, step, number * lanes)
                        self._add(j, number, d, part, packed=self.packs)
            with f.range(whole, self.columns, unit) as d, f.range(first, end, lanes) as j:
                self._add(j, 1, d, unit, packed=False)
        if self.stored.has_scales:
            scales, size = f.given["scales"], self.tile.element.size
            self._change(lambda j, score: score * f.load(score.type, scales, j, align=size))

    def _change(self, change: Callable[[Value, Value], Value]) -> None:
        """Give every vector of scores another value: of its first key, and of what it was."""
        with self.f.range(0, self.f.given["count"], self.tile.lanes) as j:
            for row in self.scores:
                self._store(change(j, self._load(row, j)), row, j)

    def _load(self, row: Value, j: Value) -> Value:
        return self.f.load(self.tile.vector, row, j, align=self.tile.element.size)

    def _store(self, score: Value, row: Value, j: Value) -> None:
        self.f.store(score, row, j, align=self.tile.element.size)

    def _add(self, first: Value, number: int, d: Value, part: int, *, packed: bool) -> None:
        """Add products of columns from d on to the scores of squares, which begin with `first`."""
        f, tile, kept = self.f, self.tile, self.f.given.get("kept")
        squares = [first + square * tile.lanes for square in range(number)]
        sums = [[self._load(row, j) for j in squares] for row in self.scores]
        several = [self._columns(j, d, part, packed=packed) for j in squares]
        for c, columns in enumerate(zip(*several, strict=True)):
            if kept is not None:
                for j, column in zip(squares, columns, strict=True):
                    at = j * f.given["depth"] + (d + c) * tile.lanes
                    tile.store(f, column, kept, at)
            for r, query in enumerate(self.queries):
                wide = f.splat(f.load(tile.element, query, d + c), tile.vector)
                pairs = zip(columns, sums[r], strict=True)
                sums[r] = [f.fma(column, wide, x) for column, x in pairs]
        for row, mine in zip(self.scores, sums, strict=True):
            for j, x in zip(squares, mine, strict=True):
                self._store(x, row, j)

    def _columns(self, j: Value, d: Value, part: int, *, packed: bool) -> Iterator[Value]:
        """The columns from d on of the square of keys from j on, as far as one load goes."""
        f, tile, stored = self.f, self.tile, self.stored

        def read(t: int) -> Value:
            key = f.load(PTR, f.given["keys"], j + t)
            if packed:
                at = f.offset(key, d, stored.memory)
                return f.load(I32.vector(part), at, align=stored.memory.size)
            return stored.read_columns(f, key, d, tile.element.vector(part))

        for column in transpose_parts(f, read, tile.lanes, part, tile.in_128_bits):
            yield from stored.read_words(f, column, tile.element) if packed else (column,)


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
                at = j + s * lanes
                if stored.has_scales:
                    score = score * f.load(vector, given["scales"], at, align=tile.element.size)
                f.store(score, given["scores"], r * row_stride(tile) + at, align=tile.element.size)
    return f
