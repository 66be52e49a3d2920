"""How the kernel for few queries reads: rows of keys and values, wherever they are.

A table holds the address of every row, so that products know nothing of pages. Rows are read from
left to right and in the order of that table, and asked for likewise, some time before.
"""

from __future__ import annotations

from quire.codegen.builder import Function, Module, Value
from quire.codegen.staging import ROWS, Run, Storage, each_run, padded, page_start, scale_start
from quire.codegen.tiles import Tile
from quire.codegen.types import F32, I1, I8, I64, PTR, Layout

AHEAD = 2048  # bytes between what is read and what is asked for
MOST_AHEAD = 16  # rows
LINE = 64  # bytes that come from memory together

STREAM = Layout(
    "stream",
    {
        "rows": PTR,  # addresses, in the order in which they are read
        "last": I64,
        "row": I64,  # what is asked for next, and bytes of it
        "offset": I64,
        "row_bytes": I64,
        "step": I64,  # rows that two lines take, at least one
    },
)


def write_point(module: Module, tile: Tile, kind: Storage) -> Function:
    """Addresses of the rows at positions [begin, end). Returns whether vectors fit there."""
    parameters = {"rows": PTR, "begin": I64, "end": I64, "into": PTR}
    with module.function(f"point_{kind.name}", parameters, I1, internal=True) as f:
        rows, begin, end, into = f.parameters
        width = f.field(ROWS, rows, "width")
        row_bytes = f.field(ROWS, rows, "row_stride") * kind.memory.size
        several = I64.vector(4)
        steps = f.iota(several) * f.splat(row_bytes, several)

        def point_run(run: Run) -> None:
            start = f.address(page_start(f, kind, rows, run.page))
            first = start + (run.offset - run.begin) * row_bytes
            with f.range(run.begin, run.end, 4) as p:
                several_rows = f.splat(first + p * row_bytes, several) + steps
                f.store(several_rows, into, p - begin)

        each_run(f, rows, begin, end, point_run)
        in_vectors = (width & (tile.lanes - 1)).equals(0)
        f.give_back(f.field(ROWS, rows, "column_stride").equals(1) & in_vectors)
    return f


def write_copy(module: Module, tile: Tile, kind: Storage) -> Function:
    """Rows whose addresses are given to scratch, as they are, with zeros up to whole vectors.

    The addresses become those of the copies.
    """
    parameters = {"rows": PTR, "addresses": PTR, "count": I64, "into": PTR, "stride": I64}
    with module.function(f"copy_{kind.name}", parameters, internal=True) as f:
        rows, addresses, count, into, stride = f.parameters
        column_stride = f.field(ROWS, rows, "column_stride")
        width = f.field(ROWS, rows, "width")
        by_vector = f.select(column_stride.equals(1), width & -tile.lanes, 0)
        memory = kind.memory.vector(tile.lanes)
        with f.range(0, count) as j:
            source, target = f.load(PTR, addresses, j), f.offset(into, j * stride, kind.memory)
            with f.range(0, by_vector, tile.lanes) as c:
                f.store(f.load(memory, source, c), target, c)
            with f.range(by_vector, width) as c:
                f.store(f.load(kind.memory, source, c * column_stride), target, c)
            with f.range(width, padded(tile, width)) as c:
                f.store(f.value(0, kind.memory), target, c)
            f.store(target, addresses, j)
    return f


def columns_of_line(tile: Tile, kind: Storage) -> int:
    """How many columns a line of memory has, and at least two vectors."""
    return max(2 * tile.lanes, LINE // kind.memory.size)


def fold_row(f: Function, tile: Tile, kind: Storage, row: Value, width: Value) -> None:
    """Put the columns of a row into the order in which `read_pair` gives them."""
    low = [2 * lane for lane in range(tile.lanes)]
    _reorder(f, tile, kind, row, width, low, [lane + 1 for lane in low])


def unfold_row(f: Function, tile: Tile, kind: Storage, row: Value, width: Value) -> None:
    """Put the columns of a row back into their own order."""
    pairs = [x for lane in range(tile.lanes) for x in (lane, tile.lanes + lane)]
    _reorder(f, tile, kind, row, width, pairs[: tile.lanes], pairs[tile.lanes :])


def _reorder(
    f: Function,
    tile: Tile,
    kind: Storage,
    row: Value,
    width: Value,
    low: list[int],
    high: list[int],
) -> None:
    if not kind.folds(tile.element):
        return
    with f.range(0, width & -columns_of_line(tile, kind), 2 * tile.lanes) as d:
        here, there = tile.load(f, row, d), tile.load(f, row, d + tile.lanes)
        tile.store(f, f.shuffle(here, there, low), row, d)
        tile.store(f, f.shuffle(here, there, high), row, d + tile.lanes)


class Stream:
    """Rows that will be read, in their order, and how far they have been asked for.

    Whoever computes asks for the next lines.
    """

    def __init__(self, f: Function, stream: Value) -> None:
        self._f, self._stream = f, stream
        self._rows = f.field(STREAM, stream, "rows")
        self._last = f.field(STREAM, stream, "last")
        self._row_bytes = f.field(STREAM, stream, "row_bytes")
        self._step = f.field(STREAM, stream, "step")

    def place(self) -> list[Value]:
        """Where to ask next: a row, and bytes of it."""
        return [self._f.field(STREAM, self._stream, name) for name in ("row", "offset")]

    def ask(self, place: list[Value], lines: int) -> list[Value]:
        """Ask for so many lines, two at a time; the place after them."""
        f, (row, offset) = self._f, place
        for _ in range(0, lines, 2):
            start = f.offset(f.load(PTR, self._rows, row), offset, I8)
            f.prefetch(start)
            f.prefetch(f.offset(start, LINE, I8))
            offset = offset + 2 * LINE
            done = offset >= self._row_bytes
            row = f.select(done, f.minimum(row + self._step, self._last), row)
            offset = f.select(done, 0, offset)
        return [row, offset]

    def keep(self, place: list[Value]) -> None:
        """Remember the place for the next phase."""
        for name, value in zip(("row", "offset"), place, strict=True):
            self._f.set_field(STREAM, self._stream, name, value)


def write_gather_scales(module: Module, tile: Tile) -> Function:
    """The factors of the rows at positions [begin, end), one after the other."""
    parameters = {"rows": PTR, "begin": I64, "end": I64, "into": PTR}
    with module.function("gather_scales", parameters, internal=True) as f:
        rows, begin, end, into = f.parameters
        row_stride = f.field(ROWS, rows, "scale_row_stride")

        def copy_run(run: Run) -> None:
            first = scale_start(f, rows, run.page)
            with f.range(run.begin, run.end) as p:
                scale = f.load(F32, first, (p - run.begin + run.offset) * row_stride)
                f.store(f.convert(scale, tile.element), into, p - begin)

        each_run(f, rows, begin, end, copy_run)
    return f
