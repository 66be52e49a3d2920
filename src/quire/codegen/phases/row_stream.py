"""How the decode kernel reads rows of keys and values.

A table holds the address of every row, so products know nothing about pages. Rows are read from
left to right in the order of that table, and prefetched before in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import F32, I1, I8, I64, PTR, typed
from quire.codegen.phases.staging import PLACEMENT, Run, each_run, padded, page_start, scale_start
from quire.codegen.phases.storage import Storage
from quire.codegen.phases.tiles import TileShape

ASKED = (10240, 1536)  # how many bytes ahead a line is prefetched: twice
ASKED_BEHIND = (6144, 2048)  # the same behind keys that are read together
MOST_AHEAD = 128  # rows of the next block that the table has after those of a block
MORE_AHEAD = 32  # rows by which a step may prefetch further than it should
LINE = 64  # bytes of a cache line

Index: TypeAlias = Value | int
"""A column or a number of bytes: an int if it is known when the kernel is written."""


def write_point(module: Module, tile: TileShape, stored: Storage) -> Function:
    """The function that writes the addresses of the rows at positions [begin, end) to a table.

    It returns whether products can read the rows there: columns side by side, in whole vectors.
    """
    parameters = typed("ptr rows, i64 begin end, ptr into")
    with module.function(f"point_{stored.name}", parameters, I1, internal=True) as f:
        rows, begin, end, into = f.parameters
        width = f.field(PLACEMENT, rows, "width")
        row_bytes = f.field(PLACEMENT, rows, "row_stride") * stored.memory.size
        several = I64.vector(4)
        steps = f.iota(several) * f.splat(row_bytes, several)

        def point_run(run: Run) -> None:
            start = f.address(page_start(f, stored, rows, run.page))
            first = start + (run.offset - run.begin) * row_bytes
            with f.range(run.begin, run.end, 4) as p:
                several_rows = f.splat(first + p * row_bytes, several) + steps
                f.store(several_rows, into, p - begin)

        each_run(f, rows, begin, end, point_run)
        in_vectors = padded(tile, width).equals(width)
        f.give_back(f.field(PLACEMENT, rows, "column_stride").equals(1) & in_vectors)
    return f


def write_copy(module: Module, tile: TileShape, stored: Storage) -> Function:
    """The function that copies rows to scratch, given a table of their addresses.

    Rows keep their dtype and are filled up with zeros to whole vectors. The table then has the
    addresses of the copies.
    """
    parameters = typed("ptr rows addresses, i64 count, ptr into, i64 stride")
    with module.function(f"copy_{stored.name}", parameters, internal=True) as f:
        rows, addresses, count, into, stride = f.parameters
        column_stride = f.field(PLACEMENT, rows, "column_stride")
        width = f.field(PLACEMENT, rows, "width")
        by_vector = f.select(column_stride.equals(1), width & -tile.lanes, 0)
        memory = stored.memory.vector(tile.lanes)
        with f.range(0, count) as j:
            source, target = f.load(PTR, addresses, j), f.offset(into, j * stride, stored.memory)
            with f.range(0, by_vector, tile.lanes) as c:
                f.store(f.load(memory, source, c), target, c)
            with f.range(by_vector, width) as c:
                f.store(f.load(stored.memory, source, c * column_stride), target, c)
            with f.range(width, padded(tile, width)) as c:
                f.store(f.value(0, stored.memory), target, c)
            f.store(target, addresses, j)
    return f


def columns_of_line(tile: TileShape, stored: Storage) -> int:
    """How many columns a cache line has, but at least two vectors."""
    return max(2 * tile.lanes, LINE // stored.memory.size)


def unfold_row(f: Function, tile: TileShape, stored: Storage, row: Value, width: Value) -> None:
    """Put the columns of a row in order that are as `read_pairs` gives them: even, then odd."""
    if not stored.folds(tile.element):
        return
    pairs = [x for lane in range(tile.lanes) for x in (lane, tile.lanes + lane)]
    with f.range(0, width & -columns_of_line(tile, stored), 2 * tile.lanes) as d:
        here, there = tile.load(f, row, d), tile.load(f, row, d + tile.lanes)
        tile.store(f, f.shuffle(here, there, pairs[: tile.lanes]), row, d)
        tile.store(f, f.shuffle(here, there, pairs[tile.lanes :]), row, d + tile.lanes)


class Ahead:
    """Prefetches rows that will be read, line by line, while `together` rows are being read.

    The rows of `squares` are all read before one of them is left, so what is prefetched lies behind
    them. A processor may ignore a prefetch while many lines are on their way. So every line is
    prefetched again at a shorter distance.
    """

    def __init__(
        self,
        f: Function,
        rows: Value,
        stored: Storage,
        width: Index,
        together: int = 1,
        *,
        squares: bool = False,
    ) -> None:
        self._f, self._rows, self._together = f, rows, together
        self._size, row_bytes = stored.memory.size, width * stored.memory.size
        asked, behind = (ASKED_BEHIND, together) if squares else (ASKED, 0)
        most = MOST_AHEAD - (MORE_AHEAD if squares else together)
        self._whole = 0  # bytes of a row, if they are known
        if isinstance(row_bytes, int):
            self._whole = max(row_bytes & -LINE, LINE)
            ends = [behind * self._whole + distance for distance in asked]
            self._away = [min(distance, most * self._whole) for distance in ends]
        else:
            some = f.maximum(row_bytes, 1)
            far = [f.value(distance, I64).udiv(some) + behind for distance in asked]
            self._rows_away = [f.minimum(f.maximum(count, 1), most) for count in far]

    def ask(self, j: Value, at: Index, size: int) -> None:
        """Prefetch as many lines as the rows from j on have in bytes [at, at + size)."""
        for number in range(size // LINE * self._together):
            for row, offset in self._places(at, number):
                self._prefetch(j + row, offset)

    def ask_step(self, j: Value, d: Value, step: int, keys: int) -> None:
        """Prefetch as many lines as `keys` rows from j on have in `step` columns from d on.

        If the width is known, these are whole rows: a few more with every step. Otherwise they are
        lines at these columns.
        """
        f, size = self._f, step * self._size
        if self._whole:
            rows = -(-keys * size // self._whole)
            first = j + d.udiv(step) * rows
            for away in self._away:
                for k in range(rows):
                    row = f.load(PTR, self._rows, first + (away // self._whole + k))
                    for at in range(0, self._whole, LINE):
                        f.prefetch(f.offset(row, at, I8))
        else:
            steps = max(1, LINE // size)  # of one line
            rows = max(1, keys // steps)
            first = j + (d.udiv(step) & (steps - 1)) * rows
            for rows_away in self._rows_away:
                for k in range(rows):
                    self._prefetch(first + rows_away + k, (d * self._size) & -LINE)

    def ask_line(self, number: Value) -> None:
        """Prefetch a line, counting from the first row; the width of rows is known."""
        place = number * LINE
        row = place.udiv(self._whole)
        self._prefetch(row, place - row * self._whole)

    def _prefetch(self, row: Value, offset: Index) -> None:
        self._f.prefetch(self._f.offset(self._f.load(PTR, self._rows, row), offset, I8))

    def _places(self, at: Index, number: int) -> Iterator[tuple[Index, Index]]:
        """The rows and offsets to prefetch: in the order of memory, if the width is known.

        Otherwise in the order in which they will be read.
        """
        if isinstance(at, int):
            for away in self._away:
                yield divmod(at * self._together + number * LINE + away, self._whole)
        else:
            line, row = divmod(number, self._together)
            for rows_away in self._rows_away:
                yield rows_away + row, at + line * LINE


def over_columns(
    f: Function,
    begin: Index,
    end: Index,
    body: Callable[[Index, list[Value]], list[Value]],
    *,
    step: int,
    carry: Sequence[Value] = (),
) -> list[Value]:
    """`f.loop`, unrolled if both ends are known."""
    carry = list(carry)
    if isinstance(begin, Value) or isinstance(end, Value):
        return f.loop(begin, end, body, carry=carry, step=step)
    for d in range(begin, end, step):
        carry = body(d, carry)
    return carry


def write_gather_scales(module: Module, tile: TileShape, stored: Storage) -> Function:
    """The function that copies the scales of rows at [begin, end) to scratch, in its `unit`."""
    parameters = typed("ptr rows, i64 begin end, ptr into")
    with module.function(f"gather_scales_{stored.name}", parameters, internal=True) as f:
        rows, begin, end, into = f.parameters
        row_stride = f.field(PLACEMENT, rows, "scale_row_stride")

        def copy_run(run: Run) -> None:
            first = f.offset(scale_start(f, rows, run.page), run.offset * row_stride, F32)
            target = f.offset(into, run.begin - begin, tile.element)
            count = run.end - run.begin
            by_vector = f.select(row_stride.equals(1), count & -tile.lanes, 0)
            with f.range(0, by_vector, tile.lanes) as p:
                scales = f.load(F32.vector(tile.lanes), first, p)
                f.store(f.convert(scales, tile.element) * stored.unit, target, p)
            with f.range(by_vector, count) as p:
                scale = f.load(F32, first, p * row_stride)
                f.store(f.convert(scale, tile.element) * stored.unit, target, p)

        each_run(f, rows, begin, end, copy_run)
    return f
