"""Copies rows between the user's tensors and scratch memory.

A `PLACEMENT` record says where the rows of one tensor are, for one sequence and head. What is
computed after `gather` does not know whether rows were dense, ragged or paged, or of which dtype:

    row at position p  =  base + table[p // page_size] * page_stride
                               + (p % page_size) * row_stride          (in elements)

Dense and ragged memory have no table and one endless page.

Scratch holds rows of float32, or float64 if queries are float64, at a stride of whole vectors and
filled up with zeros to `padded(width)`. The user's memory is never read or written outside of the
rows and columns that the record names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import F32, I1, I32, I64, PTR, Layout, Type, typed
from quire.codegen.phases.storage import Storage
from quire.codegen.phases.tiles import SMALL_ROWS, TileShape, apply_share
from quire.codegen.phases.transpose import transpose

PLACEMENT = Layout(
    "rows",
    {
        "base": PTR,
        "table": PTR,  # page numbers as i32; null: no pages
        "page_size": I64,
        "page_stride": I64,
        "row_stride": I64,
        "column_stride": I64,
        "width": I64,
        "scales": PTR,  # of rows of 8 bits: a float32 for each row
        "scale_page_stride": I64,
        "scale_row_stride": I64,
    },
)
ENDLESS = 1 << 62  # the page size where there are no pages

Number = TypeVar("Number", int, Value)


def padded(tile: TileShape, width: Number) -> Number:
    """The width of a row in scratch: whole vectors, and a multiple of SMALL_ROWS."""
    unit = max(tile.lanes, SMALL_ROWS)
    return (width + (unit - 1)) & -unit


def scratch_stride(tile: TileShape, width: Number) -> Number:
    """The distance between rows in scratch: a vector more than they are wide.

    Rows at a distance of a power of two would compete for the same lines of the cache.
    """
    return padded(tile, width) + max(tile.lanes, SMALL_ROWS)


class Run(NamedTuple):
    """Positions [begin, end) that lie on one page; the first is its row `offset`."""

    page: Value  # its index in the table of pages
    begin: Value
    end: Value
    offset: Value


def each_run(
    f: Function, rows: Value, begin: Value, end: Value, body: Callable[[Run], None]
) -> None:
    """Call `body` for the positions [begin, end), page by page."""
    page_size = f.field(PLACEMENT, rows, "page_size")

    def one(carried: list[Value]) -> list[Value]:
        (position,) = carried
        page = position.udiv(page_size)
        offset = position - page * page_size
        stop = f.minimum(end, position + (page_size - offset))
        body(Run(page, position, stop, offset))
        return [stop]

    f.repeat(lambda carried: carried[0] < end, one, [begin])


def write_gather(
    module: Module, tile: TileShape, stored: Storage, *, scaled: bool = True
) -> Function:
    """The function that copies the rows at positions [begin, end) to scratch.

    With `scaled`, rows of 8 bits are multiplied by their scales.
    """
    scaled = scaled and stored.has_scales
    parameters = typed("ptr rows, i64 begin end, ptr into, i64 stride")
    with module.function(f"gather_{stored.name}", parameters, internal=True) as f:
        rows, begin, end, into, stride = f.parameters
        row_stride = f.field(PLACEMENT, rows, "row_stride")
        column_stride = f.field(PLACEMENT, rows, "column_stride")
        width = f.field(PLACEMENT, rows, "width")
        by_vector = f.select(column_stride.equals(1), width & -tile.lanes, 0)

        def copy(source: Value, target: Value, column: Value, type: Type, scale: Value) -> None:
            raw = f.load(stored.memory.like(type), source, column * column_stride)
            number = stored.read(f, raw, tile.element)
            if scaled:
                number = number * (f.splat(scale, type) if type.lanes else scale)
            f.store(number, target, column)

        def copy_row(source: Value, target: Value, scale: Value) -> None:
            with f.range(0, by_vector, tile.lanes) as c:
                # Prefetch what follows in memory: the next row, or that of the next head.
                f.prefetch(f.offset(source, c + width, stored.memory))
                copy(source, target, c, tile.vector, scale)
            with f.range(by_vector, width) as c:
                copy(source, target, c, tile.element, scale)
            with f.range(width, padded(tile, width)) as c:
                f.store(f.value(0.0, tile.element), target, c)

        def copy_run(run: Run) -> None:
            source = page_start(f, stored, rows, run.page)
            scales = scale_start(f, rows, run.page) if scaled else f.null()
            with f.range(run.begin, run.end) as p:
                place = p - run.begin + run.offset
                row = f.offset(source, place * row_stride, stored.memory)
                scale = f.value(1.0, tile.element)
                if scaled:
                    step = f.field(PLACEMENT, rows, "scale_row_stride")
                    scale = f.convert(f.load(F32, scales, place * step), tile.element)
                    scale = scale * stored.unit
                copy_row(row, f.offset(into, (p - begin) * stride, tile.element), scale)

        each_run(f, rows, begin, end, copy_run)
    return f


def scale_start(f: Function, rows: Value, page: Value) -> Value:
    """The address of the scales of a page's rows."""
    number = _page_number(f, rows, page)
    scales = f.field(PLACEMENT, rows, "scales")
    return f.offset(scales, number * f.field(PLACEMENT, rows, "scale_page_stride"), F32)


def write_place(module: Module, tile: TileShape, stored: Storage) -> Function:
    """The function that gives the address of rows that lie in memory as they would in scratch.

    It returns null for rows on several pages, with strided columns, or of a width to be padded.
    """
    parameters = typed("ptr rows, i64 begin end")
    with module.function(f"place_{stored.name}", parameters, PTR, internal=True) as f:
        rows, begin, end = f.parameters
        page_size, width = f.field(PLACEMENT, rows, "page_size"), f.field(PLACEMENT, rows, "width")
        page = begin.udiv(page_size)
        whole = padded(tile, width).equals(width)
        readable = f.field(PLACEMENT, rows, "column_stride").equals(1) & whole
        alone = page.equals((end - 1).udiv(page_size))

        def found() -> list[Value]:
            row = (begin - page * page_size) * f.field(PLACEMENT, rows, "row_stride")
            return [f.offset(page_start(f, stored, rows, page), row, stored.memory)]

        f.give_back(f.choose(readable & alone, found, lambda: [f.null()])[0])
    return f


def page_start(f: Function, stored: Storage, rows: Value, page: Value) -> Value:
    """The address of a sequence's page."""
    number = _page_number(f, rows, page)
    base = f.field(PLACEMENT, rows, "base")
    return f.offset(base, number * f.field(PLACEMENT, rows, "page_stride"), stored.memory)


def _page_number(f: Function, rows: Value, page: Value) -> Value:
    table = f.field(PLACEMENT, rows, "table")

    def look_up() -> list[Value]:
        return [f.convert(f.load(I32, table, page), I64)]

    (number,) = f.choose(table.differs(f.null()), look_up, lambda: [f.value(0, I64)])
    return number


def write_scatter(module: Module, tile: TileShape, stored: Storage) -> Function:
    """The function that copies rows from scratch to the positions [begin, end) of a tensor."""
    parameters = typed("ptr rows, i64 begin end, ptr source, i64 stride")
    with module.function(f"scatter_{stored.name}", parameters, internal=True) as f:
        rows, begin, end, source, stride = f.parameters
        base, row_stride = f.field(PLACEMENT, rows, "base"), f.field(PLACEMENT, rows, "row_stride")
        column_stride, width = (
            f.field(PLACEMENT, rows, "column_stride"),
            f.field(PLACEMENT, rows, "width"),
        )
        by_vector = f.select(column_stride.equals(1), width & -tile.lanes, 0)
        with f.range(begin, end) as p:
            target = f.offset(base, p * row_stride, stored.memory)
            row = f.offset(source, (p - begin) * stride, tile.element)
            with f.range(0, by_vector, tile.lanes) as c:
                f.store(stored.write(f, f.load(tile.vector, row, c)), target, c)
            with f.range(by_vector, width) as c:
                x = stored.write(f, f.load(tile.element, row, c))
                f.store(x, target, c * column_stride)
    return f


def write_pack(module: Module, tile: TileShape) -> Function:
    """The function that copies rows of queries to panels, times `scale`.

    A query becomes a column of a panel. Lanes past the last query repeat it.
    """
    parameters = typed("ptr rows, i64 stride count depth, ptr panels") | {"scale": tile.element}
    with module.function("pack_queries", parameters, internal=True) as f:
        given = f.given
        count, depth = given["count"], given["depth"]
        wide = f.splat(given["scale"], tile.vector)
        with f.range(0, count, tile.lanes) as first:
            places = [f.minimum(first + r, count - 1) for r in range(tile.lanes)]
            starts = [
                f.offset(given["rows"], place * given["stride"], tile.element) for place in places
            ]
            panel = _column_start(f, tile, given["panels"], first, depth)
            with f.range(0, depth, tile.lanes) as d:
                _expect(f, tile, starts, d + depth)
                square = transpose(f, [f.load(tile.vector, start, d) for start in starts])
                for k, column in enumerate(square):
                    tile.store(f, column * wide, panel, (d + k) * tile.width)
    return f


def write_unpack(module: Module, tile: TileShape, *, weighted: bool) -> Function:
    """The function that copies panels of results to rows, every query times its entry of `scales`.

    If scores are `weighted`, every query is divided by its entry. The function returns whether some
    result is not finite.
    """
    parameters = typed("ptr panels scales, i64 count depth, ptr rows, i64 stride")
    with module.function("unpack_out", parameters, I1, internal=True) as f:
        given = f.given
        count, depth = given["count"], given["depth"]
        bits = tile.element.as_int

        def columns(
            starts: Sequence[Value], panel: Value, d: Value, scale: Value, seen: Value
        ) -> Value:
            square = [
                # + 0.0 turns -0.0 into 0.0, so that skipped and masked tiles give the same bits.
                apply_share(f, tile.load(f, panel, (d + k) * tile.width), scale, weighted=weighted)
                for k in range(tile.lanes)
            ]
            _expect(f, tile, starts, d + depth)
            for start, row in reversed(list(zip(starts, transpose(f, square), strict=True))):
                f.store(row, start, d)
            for column in square:  # x * 0 is NaN if x is not finite, else a zero
                seen = seen | f.bitcast(column * 0.0, seen.type)
            return seen

        def queries(first: Value, seen: list[Value]) -> list[Value]:
            # Lanes past the last query write to its row, before it is written itself.
            places = [f.minimum(first + r, count - 1) for r in range(tile.lanes)]
            starts = [
                f.offset(given["rows"], place * given["stride"], tile.element) for place in places
            ]
            scale = tile.load(f, given["scales"], first)
            panel = _column_start(f, tile, given["panels"], first, depth)
            return f.loop(
                0,
                depth,
                lambda d, seen: [columns(starts, panel, d, scale, seen[0])],
                carry=seen,
                step=tile.lanes,
            )

        nothing = f.value(0, bits.like(tile.vector))
        (seen,) = f.loop(0, count, queries, carry=[nothing], step=tile.lanes)
        f.give_back(f.any_lane((seen & ((1 << (bits.bits - 1)) - 1)).differs(0)))
    return f


def _expect(f: Function, tile: TileShape, starts: Sequence[Value], column: Value) -> None:
    """Prefetch what follows some rows in memory: the next head reads it."""
    for start in starts:
        f.prefetch(f.offset(start, column, tile.element))


def _column_start(f: Function, tile: TileShape, panels: Value, query: Value, depth: Value) -> Value:
    """The address of a query's column in panels of `depth` rows."""
    panel = query.udiv(tile.width)
    start = panel * (depth * tile.width) + (query - panel * tile.width)
    return f.offset(panels, start, tile.element)
