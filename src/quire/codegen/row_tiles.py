"""The phases of the kernel for few queries, each a small function of its own.

Lanes run over columns. A set is up to `MOST_TOGETHER` query rows that share each load of a key or
value; what a row computes, and in which order, does not depend on who else is in its set:

    multiply_keys      products[key, row] = sum_d keys[key, d] queries[row, d]
    turn               scores[row, key] = products[key, row]
    exponentiate       weights[key] = exp2(scores - maximum of the row so far)
    multiply_values    out[row, d] = out alpha + sum_key weights[row, key] values[key, d]

Keys and values are found through a table of addresses, one for each row, so that nothing here knows
of pages. They are read from left to right and in the order of that table, and asked for likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from quire.codegen import observe, vecmath
from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import row_stride
from quire.codegen.row_stream import LINE, Stream, columns_of_line
from quire.codegen.staging import Storage
from quire.codegen.tiles import UNREAD, Tile, across
from quire.codegen.types import I64, PTR

SUMS = 8  # vectors that are summed at once
SUMS_AGAIN = 12  # the same, where memory does not matter
MOST_TOGETHER = 4
KEYS_TOGETHER = 4  # whose values are added to a set's sums at once
READERS = 1  # sets that read a block from memory
KEYS_AGAIN = 48  # and
COLUMNS_AGAIN = 32  # that stay in the nearest cache for all other sets


def set_sizes(tile: Tile) -> list[int]:
    """How many rows a set may have, in the order in which they are tried."""
    return [size for size in (4, 2, 1) if size <= min(tile.lanes, MOST_TOGETHER)]


def write_multiply_keys(
    module: Module, tile: Tile, kind: Storage, rows: int, *, again: bool = False
) -> Function:
    """products[key, row] = keys[key] . queries[row]; some more than `count` are written.

    Every product adds up in a register of its own, before its lanes are added up. With `again`,
    keys were read before: nothing is asked for.
    """
    parameters = {
        "keys": PTR,
        "stream": PTR,
        "queries": PTR,
        "query_stride": I64,
        "depth": I64,
        "products": PTR,
        "count": I64,
    }
    name = f"multiply_keys_{kind.name}_{rows}" + "_again" * again
    with module.function(name, parameters, internal=True) as f:
        keys, stream, queries, query_stride, depth, products, count = f.parameters
        ahead = Stream(f, stream)
        together = (SUMS_AGAIN if again and not kind.folds(tile.element) else SUMS) // rows
        line = columns_of_line(tile, kind)
        lines = line * kind.memory.size // LINE
        starts = [f.offset(queries, r * query_stride, tile.element) for r in range(rows)]

        def multiply(j: Value, place: list[Value]) -> list[Value]:
            here = [f.load(PTR, keys, f.minimum(j + t, count - 1)) for t in range(together)]

            def add(d: Value, parts: list[Value], sums: list[Value]) -> list[Value]:
                result = list(sums)
                for r, start in enumerate(starts):
                    query = tile.load(f, start, d)
                    for t, part in enumerate(parts):
                        result[t * rows + r] = f.fma(part, query, sums[t * rows + r])
                return result

            def add_line(d: Value, carried: list[Value]) -> list[Value]:
                place, sums = carried[:2], carried[2:]
                if not again:
                    place = ahead.ask(place, together * lines)
                for step in range(0, line, 2 * tile.lanes):
                    pairs = [kind.read_pair(f, key, d + step, tile.vector) for key in here]
                    for v, parts in enumerate(zip(*pairs, strict=True)):
                        sums = add(d + (step + v * tile.lanes), list(parts), sums)
                return [*place, *sums]

            def add_rest(d: Value, sums: list[Value]) -> list[Value]:
                return add(d, [kind.read_columns(f, key, d, tile.vector) for key in here], sums)

            whole = depth & -line
            sums = [f.value(0.0, tile.vector)] * (together * rows)
            row, offset, *sums = f.loop(0, whole, add_line, carry=[*place, *sums], step=line)
            sums = f.loop(whole, depth, add_rest, carry=sums, step=tile.lanes)
            for first in range(0, len(sums), tile.lanes):
                total = add_lanes(f, sums[first : first + tile.lanes])
                f.store(total, products, j * rows + first)
            return [row, offset]

        ahead.keep(f.loop(0, count, multiply, carry=ahead.place(), step=together))
    return f


def add_lanes(f: Function, vectors: list[Value]) -> Value:
    """The sum of all lanes of each vector, side by side, in the same tree for every one."""
    lanes, element = vectors[0].type.lanes, vectors[0].type.scalar
    half = max(1, 128 // element.bits) // 2  # of what one instruction shuffles
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


def write_scale_weights(module: Module, tile: Tile) -> Function:
    """weights[key] times its factor; a key that is not read stays one."""
    parameters = {"weights": PTR, "scales": PTR, "count": I64}
    with module.function("scale_weights", parameters, internal=True) as f:
        weights, scales, count = f.parameters
        bits = tile.element.as_int
        unread = f.bitcast(f.value(UNREAD, tile.vector), bits)
        with f.range(0, count, tile.lanes) as j:
            weight = tile.load(f, weights, j)
            kept = f.bitcast(weight, bits).equals(unread)
            tile.store(f, f.select(kept, weight, weight * tile.load(f, scales, j)), weights, j)
    return f


def write_turn(module: Module, tile: Tile, rows: int, scaled: bool) -> Function:
    """scores[row, key] = products[key, row], -inf past the last key up to whole vectors.

    Where keys have factors, times these.
    """
    parameters = {
        "products": PTR,
        "scales": PTR,
        "scores": PTR,
        "score_stride": I64,
        "count": I64,
    }
    with module.function(f"turn_{rows}", parameters, internal=True) as f:
        products, scales, scores, score_stride, count = f.parameters
        lanes = tile.element.as_int.vector(tile.lanes)
        with f.range(0, count, tile.lanes) as j:
            start = f.offset(products, j * rows, tile.element)
            square = [tile.load(f, start, v * tile.lanes) for v in range(rows)]
            left = f.splat(f.convert(count - j, lanes.scalar), lanes)
            exists = f.iota(lanes) < left
            for r, row in enumerate(_columns(f, square)):
                if scaled:
                    row = row * tile.load(f, scales, j)
                into = f.offset(scores, r * score_stride + j, tile.element)
                tile.store(f, f.select(exists, row, -math.inf), into)
    return f


def _columns(f: Function, vectors: list[Value]) -> list[Value]:
    """Every so many lanes of vectors that follow one another, `len(vectors)` being how many."""
    if len(vectors) == 1:
        return vectors
    lanes = vectors[0].type.lanes
    even = [lane for lane in range(2 * lanes) if lane % 2 == 0]
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    evens = _columns(f, [f.shuffle(a, b, even) for a, b in pairs])
    odds = _columns(f, [f.shuffle(a, b, [lane + 1 for lane in even]) for a, b in pairs])
    return [x for both in zip(evens, odds, strict=True) for x in both]


def write_exponentiate(module: Module, tile: Tile) -> Function:
    """scores become weights; the row's running maximum and sums move on, all in vectors."""
    parameters = {
        "scores": PTR,
        "running_max": PTR,
        "running_sum": PTR,
        "alpha": PTR,
        "count": I64,
    }
    with module.function("exponentiate_row", parameters, internal=True) as f:
        scores, running_max, running_sum, alpha, count = f.parameters

        def higher(j: Value, best: list[Value]) -> list[Value]:
            return [f.maximum(best[0], tile.load(f, scores, j))]

        before = tile.load(f, running_max)
        lowest = f.value(-math.inf, tile.vector)
        (best,) = f.loop(0, count, higher, carry=[lowest], step=tile.lanes)
        best = across(f, best, f.maximum)
        after = f.maximum(before, best)
        shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
        moved = vecmath.exp2(f, before - shift)

        def weigh_all(exp2: Callable[[Function, Value], Value]) -> list[Value]:
            def weigh(j: Value, total: list[Value]) -> list[Value]:
                score = tile.load(f, scores, j)
                weight = exp2(f, score - shift)
                tile.store(f, f.select(score.equals(-math.inf), UNREAD, weight), scores, j)
                return [total[0] + weight]

            return f.loop(0, count, weigh, carry=[f.value(0.0, tile.vector)], step=tile.lanes)

        endless = f.extract(after, 0).equals(math.inf)  # then scores are not below `shift`
        (total,) = f.choose(
            endless,
            lambda: weigh_all(vecmath.exp2),
            lambda: weigh_all(vecmath.exp2_nonpositive),
        )
        tile.store(f, after, running_max)
        tile.store(f, f.fma(tile.load(f, running_sum), moved, total), running_sum)
        tile.store(f, moved, alpha)
    return f


class _Weighted:
    """A set's products with values: what both ways to find them begin and end with."""

    parameters: ClassVar = {
        "values": PTR,
        "weights": PTR,
        "sums": PTR,
        "out": PTR,
        "out_stride": I64,
        "alpha": PTR,
        "count": I64,
        "columns": I64,
    }

    def __init__(self, f: Function, tile: Tile, rows: int, careful: Function) -> None:
        self._f, self._tile, self._rows, self._careful = f, tile, rows, careful
        self.values, self.weights, self.sums, self._out = f.parameters[:4]
        self._out_stride, self._alpha, self.count, self.columns = f.parameters[4:8]

    def weight(self, r: int, j: Value) -> Value:
        """What row r gives to key j, in all lanes."""
        f, tile = self._f, self._tile
        at = f.offset(self.weights, j + r * row_stride(tile), tile.element)
        return f.splat(f.load(tile.element, at), tile.vector)

    def sums_at(self, d: Value) -> Value:
        """Where the sums of a vector of columns are, those of all rows together."""
        return self._f.offset(self.sums, d * self._rows, self._tile.element)

    def move(self, d: Value) -> None:
        """out[row] = out[row] * alpha[row] + sums[row], for a vector of columns.

        A key that is not read has the weight -0.0, so that a finite value adds nothing. Where a sum
        is not finite it is found again, without the values that are not read.
        """
        f, tile, rows = self._f, self._tile, range(self._rows)
        found = [tile.load(f, self.sums_at(d), r * tile.lanes) for r in rows]
        odd = f.value(0.0, tile.vector)
        for total in found:  # x * 0 is NaN where x is not finite
            odd = f.fma(total, 0.0, odd)

        def carefully() -> list[Value]:
            mine = [f.offset(self.weights, r * row_stride(tile), tile.element) for r in rows]
            where = (d, self.columns, self.count)
            return [f.call(self._careful, self.values, weights, *where) for weights in mine]

        found = f.choose(f.any_lane(odd.differs(0.0)), carefully, lambda: found)
        for r, total in enumerate(found):
            into = f.offset(self._out, r * self._out_stride + d, tile.element)
            scale = tile.load(f, self._alpha, r * tile.lanes)
            tile.store(f, f.fma(tile.load(f, into), scale, total), into)


def write_multiply_values(
    module: Module, tile: Tile, kind: Storage, rows: int, careful: Function
) -> Function:
    """out[row] = out[row] * alpha[row] + weights[row] . values, key by key, as they are read."""
    parameters = _Weighted.parameters | {"stream": PTR}
    with module.function(f"multiply_values_{kind.name}_{rows}", parameters, internal=True) as f:
        of = _Weighted(f, tile, rows, careful)
        ahead = Stream(f, f.parameters[-1])
        line = columns_of_line(tile, kind)
        lines = line * kind.memory.size // LINE

        def add_some(j: Value, keys: int, place: list[Value]) -> list[Value]:
            """The values of some keys, in their order."""
            here = [f.load(PTR, of.values, j + k) for k in range(keys)]
            wide = [[of.weight(r, j + k) for k in range(keys)] for r in range(rows)]

            def add(d: Value, parts: list[list[Value]]) -> None:
                at, vectors = of.sums_at(d), range(len(parts[0]))
                for r in range(rows):
                    places = [(v * rows + r) * tile.lanes for v in vectors]
                    totals = [tile.load(f, at, place) for place in places]
                    for part, factor in zip(parts, wide[r], strict=True):
                        totals = [f.fma(part[v], factor, totals[v]) for v in vectors]
                    for place, total in zip(places, totals, strict=True):
                        tile.store(f, total, at, place)

            def add_line(d: Value, place: list[Value]) -> list[Value]:
                for step in range(0, line, 2 * tile.lanes):
                    pairs = [kind.read_pair(f, row, d + step, tile.vector) for row in here]
                    add(d + step, [list(pair) for pair in pairs])
                return ahead.ask(place, keys * lines)

            whole = of.columns & -line
            place = f.loop(0, whole, add_line, carry=place, step=line)
            with f.range(whole, of.columns, tile.lanes) as d:
                add(d, [[kind.read_columns(f, row, d, tile.vector)] for row in here])
            return place

        with f.range(0, of.columns * rows, tile.lanes) as d:
            tile.store(f, f.value(0.0, tile.vector), of.sums, d)
        whole = of.count & -KEYS_TOGETHER
        place = f.loop(
            *(0, whole),
            lambda j, place: add_some(j, KEYS_TOGETHER, place),
            carry=ahead.place(),
            step=KEYS_TOGETHER,
        )
        ahead.keep(f.loop(whole, of.count, lambda j, place: add_some(j, 1, place), carry=place))
        with f.range(0, of.columns, tile.lanes) as d:
            of.move(d)
    return f


def write_multiply_columns(
    module: Module, tile: Tile, kind: Storage, rows: int, careful: Function
) -> Function:
    """The same for columns [begin, end) of values that were read before, two vectors at a time.

    Sums stay in registers. `begin` is a multiple of a line, and so is `end` but for the last one.
    """
    parameters = _Weighted.parameters | {"begin": I64, "end": I64}
    with module.function(f"multiply_columns_{kind.name}_{rows}", parameters, internal=True) as f:
        of = _Weighted(f, tile, rows, careful)
        begin, end = f.parameters[-2:]

        def add_all(d: Value, read: Callable[[Value], list[Value]], vectors: int) -> None:
            def add(j: Value, totals: list[Value]) -> list[Value]:
                parts = read(f.load(PTR, of.values, j))
                wide = [of.weight(r, j) for r in range(rows)]
                cells = [(part, factor) for part in parts for factor in wide]
                return [f.fma(*cell, total) for cell, total in zip(cells, totals, strict=True)]

            nothing = [f.value(0.0, tile.vector)] * (vectors * rows)
            for place, total in enumerate(f.loop(0, of.count, add, carry=nothing)):
                tile.store(f, total, of.sums_at(d), place * tile.lanes)

        whole = f.minimum(end, of.columns & -columns_of_line(tile, kind))
        with f.range(begin, whole, 2 * tile.lanes) as d:
            add_all(d, lambda row: list(kind.read_pair(f, row, d, tile.vector)), 2)
        with f.range(f.maximum(begin, whole), end, tile.lanes) as d:
            add_all(d, lambda row: [kind.read_columns(f, row, d, tile.vector)], 1)
        with f.range(begin, end, tile.lanes) as d:
            of.move(d)
    return f


def write_add_read_values(module: Module, tile: Tile, kind: Storage) -> Function:
    """weights . values[:, column], a vector wide, without the keys that are not read."""
    parameters = {"values": PTR, "weights": PTR, "column": I64, "columns": I64, "count": I64}
    with module.function(
        f"add_read_values_{kind.name}", parameters, tile.vector, internal=True
    ) as f:
        values, weights, column, columns, count = f.parameters
        bits = tile.element.as_int
        unread = f.bitcast(f.value(UNREAD, tile.element), bits)

        def numbers(row: Value) -> Value:
            def of_pair() -> list[Value]:
                first = column & -(2 * tile.lanes)
                even, odd = kind.read_pair(f, row, first, tile.vector)
                return [f.select(column.equals(first), even, odd)]

            paired = column < (columns & -columns_of_line(tile, kind))
            alone = kind.read_columns
            return f.choose(paired, of_pair, lambda: [alone(f, row, column, tile.vector)])[0]

        def add(j: Value, sums: list[Value]) -> list[Value]:
            weight = f.load(tile.element, weights, j)

            def read() -> list[Value]:
                number = numbers(f.load(PTR, values, j))
                return [f.fma(number, f.splat(weight, tile.vector), sums[0])]

            skipped = f.bitcast(weight, bits).equals(unread)
            return f.choose(skipped, lambda: sums, read)

        f.give_back(f.loop(0, count, add, carry=[f.value(0.0, tile.vector)])[0])
    return f


def write_merge(module: Module, tile: Tile) -> Function:
    """Add to a row's state what a piece of its keys has left, lane by lane."""
    names = ("running_max", "running_sum", "best", "place", "surprise", "out", "part")
    parameters = dict.fromkeys(names, PTR) | {"columns": I64}
    with module.function("merge", parameters, internal=True) as f:
        running_max, running_sum, best, place, surprise, out, part, columns = f.parameters
        theirs = [f.offset(part, k * tile.lanes, tile.element) for k in range(6)]
        before, other = tile.load(f, running_max), tile.load(f, theirs[0])
        after = f.maximum(before, other)
        shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
        moved, joined = vecmath.exp2(f, before - shift), vecmath.exp2(f, other - shift)

        def add(mine: Value, its: Value) -> Value:
            return f.fma(mine, moved, its * joined)

        mine, its = tile.load(f, running_sum), tile.load(f, theirs[1])
        tile.store(f, after, running_max)
        tile.store(f, add(mine, its), running_sum)
        here, there = (mine, before - shift, moved), (its, other - shift, joined)
        their_state = (theirs[2], theirs[3], theirs[4])
        observe.merge(f, tile, (best, place, surprise), their_state, here, there)
        with f.range(0, columns, tile.lanes) as d:
            total = add(tile.load(f, out, d), tile.load(f, theirs[5], d))
            tile.store(f, total, out, d)
    return f
