"""The phases of a tile in the backward pass, on the micro kernel of `tiles.py`.

Lanes run over queries where scores are made, as in the forward pass, and over head dims where
gradients are summed:

    add_queries    grad_query[query] += sum_key slopes[key, query] keys[key]
    add_keys       grad_key[key]     += sum_query slopes[key, query] queries[query]
                   grad_value[key]   += sum_query weights[key, query] grad_out[query]

Weights and slopes are panels [key, query] whose numbers are broadcast one by one, so nothing is
transposed. Sums start at zero in every tile. Rows are padded to whole pairs of vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from quire.codegen.convention import BLOCK_Q
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I1, I64, Type, typed
from quire.codegen.phases.tiles import SMALL_ROWS, TileShape, across, large_rows, outer_product
from quire.codegen.scratch import weights_stride

UNROLLED = 2  # queries at a time in sums over queries


def query_strips(tile: TileShape) -> list[tuple[int, int]]:
    """The queries of a panel in strips of about equal size: (first, count)."""
    parts = -(-tile.width // tile.target.rows)
    ends = [tile.width * part // parts for part in range(parts + 1)]
    return [(first, end - first) for first, end in itertools.pairwise(ends)]


def column_strips(
    f: Function, tile: TileShape, columns: Value
) -> Iterator[tuple[TileShape, Value]]:
    """The columns of rows in strips: as wide as a panel, and at the end perhaps half as wide.

    Yields a TileShape as wide as the strip, and the first column.
    """
    whole = columns & -tile.width
    with f.range(0, whole, tile.width) as d:
        yield tile, d
    if tile.vectors > 2:
        with f.when(whole < columns):
            yield tile._replace(part=2), whole


def write_add_queries(module: Module, tile: TileShape) -> Function:
    """The function that adds slopes[:, query] . keys to grads[query], for a panel of queries."""
    parameters = typed("ptr slopes keys, i64 stride count, ptr grads, i64 grad_stride columns")
    with module.function("add_queries", parameters, internal=True) as f:
        given = f.given
        slopes, keys, stride = given["slopes"], given["keys"], given["stride"]

        def add(tile: TileShape, first: int, rows: int, d: Value) -> None:
            column = f.offset(keys, d, tile.element)

            def numbers(j: Value) -> list[Value]:
                at = f.offset(slopes, j * weights_stride(tile) + first, tile.element)
                return [f.load(tile.element, at, r) for r in range(rows)]

            def vectors(j: Value) -> list[Value]:
                return tile.load_row(f, f.offset(column, j * stride, tile.element))

            sums = outer_product(f, tile, given["count"], numbers, vectors, rows=rows)
            for r, row in enumerate(tile.rows(sums)):
                place = given["grad_stride"] * (first + r) + d
                target = f.offset(given["grads"], place, tile.element)
                _add_row(f, tile, row, target)

        for some, d in column_strips(f, tile, given["columns"]):
            for first, rows in query_strips(tile):
                add(some, first, rows, d)
    return f


def key_strips(
    f: Function, tile: TileShape, first: Value, end: Value
) -> Iterator[tuple[Value, list[Value]]]:
    """The keys [first, end) in strips: the first key of a strip, and all its keys.

    Past the end the last key is repeated.
    """
    large = first + large_rows(tile, end - first)
    with f.range(first, large, tile.target.rows) as key:
        yield key, [key + r for r in range(tile.target.rows)]
    with f.range(large, end, SMALL_ROWS) as key:
        yield key, [f.minimum(key + r, end - 1) for r in range(SMALL_ROWS)]


def write_find_query_ranges(module: Module, tile: TileShape) -> Function:
    """The function that finds for each strip of keys the range of queries that read some of them.

    `key_ranges` has the range of keys that each panel reads. A strip's range of queries is stored
    at the place of its first key.
    """
    parameters = typed("ptr key_ranges, i64 panels, ptr query_ranges, i64 first end")
    with module.function("find_query_ranges", parameters, internal=True) as f:
        key_ranges, panels, query_ranges, first, end = f.parameters
        for key, strip in key_strips(f, tile, first, end):

            def widen(
                p: Value, span: list[Value], key: Value = key, last: Value = strip[-1]
            ) -> list[Value]:
                low, high = (f.load(I64, key_ranges, p * 2 + side) for side in (0, 1))
                reached = (low <= last) & (high > key)
                start, stop = p * tile.width, p * tile.width + tile.width
                return [
                    f.select(reached, f.minimum(span[0], start), span[0]),
                    f.select(reached, stop, span[1]),
                ]

            span = f.loop(0, panels, widen, carry=[f.value(BLOCK_Q, I64), f.value(0, I64)])
            for side in (0, 1):
                f.store(span[side], query_ranges, key * 2 + side)
    return f


def write_add_keys(module: Module, tile: TileShape) -> Function:
    """The function that adds weights[key] . rows to grads[key], for the keys [first, end).

    Each strip of keys sums over its range of queries.
    """
    parameters = typed("ptr weights query_ranges rows, i64 stride, ptr grads, i64 grad_stride")
    parameters |= typed("i64 first end columns")
    with module.function("add_keys", parameters, internal=True) as f:
        given = f.given
        stride, end = given["stride"], given["end"]

        def add(tile: TileShape, key: Value, strip: list[Value], d: Value) -> None:
            start, stop = (f.load(I64, given["query_ranges"], key * 2 + side) for side in (0, 1))
            step = weights_stride(tile)
            mine = [f.offset(given["weights"], at * step + start, tile.element) for at in strip]
            column = f.offset(given["rows"], start * stride + d, tile.element)
            targets = [
                f.offset(given["grads"], at * given["grad_stride"] + d, tile.element)
                for at in strip
            ]
            for target in targets:  # they are in memory, or in a far cache
                f.prefetch(target)
            sums = outer_product(
                f,
                tile,
                stop - start,
                lambda q: [f.load(tile.element, each, q) for each in mine],
                lambda q: tile.load_row(f, f.offset(column, q * stride, tile.element)),
                rows=len(strip),
                unroll=UNROLLED,
            )
            for r, row in enumerate(tile.rows(sums)):
                with f.when(key + r < end):
                    _add_row(f, tile, row, targets[r])

        for some, d in column_strips(f, tile, given["columns"]):
            for key, strip in key_strips(f, tile, given["first"], end):
                add(some, key, strip, d)
    return f


def _add_row(f: Function, tile: TileShape, row: Sequence[Value], target: Value) -> None:
    old = tile.load_row(f, target)
    tile.store_row(f, [a + b for a, b in zip(old, row, strict=True)], target)


def write_clear(module: Module, tile: TileShape) -> Function:
    """The function that sets the keys [first, end) of a panel to zero."""
    parameters = typed("ptr panel, i64 first end")
    with module.function("clear", parameters, internal=True) as f:
        panel, first, end = f.parameters
        with f.range(first, end) as j:
            tile.store_row(f, tile.row(f, 0.0), panel, j, weights_stride(tile))
    return f


def write_add_masses(module: Module, tile: TileShape) -> Function:
    """The function that adds the sum of a key's weights to masses[key]."""
    parameters = typed("ptr weights masses, i64 count")
    with module.function("add_masses", parameters, internal=True) as f:
        weights, masses, count = f.parameters
        with f.range(0, count) as j:
            total, *others = tile.load_row(f, weights, j, weights_stride(tile))
            for other in others:
                total = total + other
            mass = f.extract(across(f, total, lambda a, b: a + b), 0)
            f.store(f.load(tile.element, masses, j) + mass, masses, j)
    return f


def write_dot_rows(module: Module, tile: TileShape) -> Function:
    """The function that gives dots[q] = a[q] . b[q] for rows in scratch of whole vectors."""
    parameters = typed("ptr a b, i64 stride depth count, ptr dots")
    with module.function("dot_rows", parameters, internal=True) as f:
        given = f.given
        with f.range(0, given["count"]) as q:
            first, second = (
                f.offset(given[side], q * given["stride"], tile.element) for side in ("a", "b")
            )

            def add(
                d: Value, sums: list[Value], first: Value = first, second: Value = second
            ) -> list[Value]:
                return [f.fma(tile.load(f, first, d), tile.load(f, second, d), sums[0])]

            nothing = [f.value(0.0, tile.vector)]
            (total,) = f.loop(0, given["depth"], add, carry=nothing, step=tile.lanes)
            f.store(f.extract(across(f, total, lambda x, y: x + y), 0), given["dots"], q)
    return f


def write_scale_rows(module: Module, tile: TileShape) -> Function:
    """The function that multiplies rows by `scale`, and returns whether some are not finite."""
    parameters = typed("ptr rows, i64 stride count columns") | {"scale": tile.element}

    def scaled(f: Function, at: Value, scale: Value) -> Value:
        x = tile.load(f, f.given["rows"], at) * scale
        tile.store(f, x, f.given["rows"], at)
        return x

    return _write_each_vector(module, tile, "scale_rows", parameters, scaled)


def write_move_rows(module: Module, tile: TileShape) -> Function:
    """The function that adds rows times `scale` to the rows at `into`, and leaves zeros.

    It returns whether some sum is not finite.
    """
    parameters = typed("ptr rows into, i64 stride count columns") | {"scale": tile.element}

    def moved(f: Function, at: Value, scale: Value) -> Value:
        rows, into = f.given["rows"], f.given["into"]
        total = tile.load(f, into, at) + tile.load(f, rows, at) * scale
        tile.store(f, total, into, at)
        tile.store(f, f.value(0.0, tile.vector), rows, at)
        return total

    return _write_each_vector(module, tile, "move_rows", parameters, moved)


def _write_each_vector(
    module: Module,
    tile: TileShape,
    name: str,
    parameters: dict[str, Type],
    change: Callable[[Function, Value, Value], Value],
) -> Function:
    """The function that calls `change` for every vector of some rows, with its offset and scale.

    It returns whether a number that `change` gives is not finite.
    """
    with module.function(name, parameters, I1, internal=True) as f:
        given = f.given
        bits, wide = tile.element.as_int, f.splat(given["scale"], tile.vector)

        def one_row(q: Value, seen: list[Value]) -> list[Value]:
            def vector(d: Value, seen: list[Value]) -> list[Value]:
                x = change(f, q * given["stride"] + d, wide)
                # x * 0 is NaN if x is not finite, else a zero
                return [seen[0] | f.bitcast(x * 0.0, seen[0].type)]

            return f.loop(0, given["columns"], vector, carry=seen, step=tile.lanes)

        nothing = f.value(0, bits.like(tile.vector))
        (seen,) = f.loop(0, given["count"], one_row, carry=[nothing])
        f.give_back(f.any_lane((seen & ((1 << (bits.bits - 1)) - 1)).differs(0)))
    return f
