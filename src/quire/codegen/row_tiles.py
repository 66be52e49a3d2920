"""The phases of the kernel for few queries, each a small function of its own.

Lanes run over columns. A set is up to `MOST_TOGETHER` query rows that share each load of a key or
value; what a row computes, and in which order, does not depend on who else is in its set:

    multiply_keys      scores[row, key] = sum_d keys[key, d] queries[row, d]
    exponentiate       weights[key] = exp4(scores - maximum of the row so far)
    multiply_values    out[row, d] = out alpha + sum_key weights[row, key] values[key, d]

Keys and values are found through a table of addresses, one for each row, so that nothing here knows
of pages. They are read from left to right and in the order of that table, and asked for likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from quire.codegen import observe, vecmath
from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import PARTIAL_STATES, row_stride
from quire.codegen.row_stream import Ahead, Index, columns_of_line, over_columns
from quire.codegen.staging import Storage
from quire.codegen.tiles import UNREAD, Tile, across
from quire.codegen.types import I64, PTR, fields

SUMS = 8  # vectors that are summed at once
MOST_TOGETHER = 4
WEIGHTS = 8  # that a set has for those keys whose values are added at once, and
WEIGHTS_OF_NARROW = 16  # for narrow numbers
READERS = 1  # sets that read a block from memory
KEYS_AGAIN = 48  # and
COLUMNS_AGAIN = 32  # that stay in the nearest cache for all other sets


def set_sizes(tile: Tile) -> list[int]:
    """How many rows a set may have, in the order in which they are tried."""
    return [size for size in (4, 2, 1) if size <= min(tile.lanes, MOST_TOGETHER)]


def write_multiply_keys(
    module: Module, tile: Tile, stored: Storage, rows: int, width: int, *, again: bool = False
) -> Function:
    """scores[row, key] = keys[key] . queries[row], -inf past the last key up to whole vectors.

    Every product adds up in a register of its own, before its lanes are added up. Where keys have
    factors, it is times these. With `again`, keys were read before: nothing is asked for.
    """
    parameters = {
        "keys": PTR,
        "scales": PTR,
        "queries": PTR,
        "query_stride": I64,
        "depth": I64,
        "scores": PTR,
        "count": I64,
    }
    name = f"multiply_keys_{stored.name}_{rows}" + "_again" * again
    with module.function(name, parameters, internal=True) as f:
        given = f.given
        keys, scores, count = given["keys"], given["scores"], given["count"]
        columns: Index = width or given["depth"]
        together = SUMS // rows
        line, size = columns_of_line(tile, stored), stored.memory.size
        ahead = None if again else Ahead(f, keys, stored, columns, together)
        queries, stride = given["queries"], given["query_stride"]
        starts = [f.offset(queries, r * stride, tile.element) for r in range(rows)]

        with f.range(0, count, together) as j:
            here = [f.load(PTR, keys, f.minimum(j + t, count - 1)) for t in range(together)]

            def add(d: Index, parts: Sequence[Value], sums: list[Value]) -> list[Value]:
                result = []
                for r, start in enumerate(starts):
                    query, mine = tile.load(f, start, d), sums[r * together : (r + 1) * together]
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

            whole = columns & -line
            sums = [f.value(0.0, tile.vector)] * (together * rows)
            sums = over_columns(f, 0, whole, add_line, step=line, carry=sums)
            sums = over_columns(f, whole, columns, add_rest, step=tile.lanes, carry=sums)
            for place, products in _side_by_side(f, sums, together):
                r, t = divmod(place, together)
                if stored.has_scales:
                    products = products * f.load(products.type, given["scales"], j + t)
                f.store(products, scores, j + (r * row_stride(tile) + t))

        last = count & -tile.lanes
        lanes = tile.element.as_int.vector(tile.lanes)
        exists = f.iota(lanes) < f.splat(f.convert(count - last, lanes.scalar), lanes)
        for r in range(rows):
            at = f.offset(scores, last + r * row_stride(tile), tile.element)
            tile.store(f, f.select(exists, tile.load(f, at), -math.inf), at)
    return f


def _side_by_side(f: Function, sums: list[Value], together: int) -> Iterator[tuple[int, Value]]:
    """The sums of lanes of vectors, so many together if they fit; which is the first of them."""
    lanes = sums[0].type.lanes
    few = min(together, lanes)
    for first in range(0, len(sums), lanes):
        total = add_lanes(f, sums[first : first + lanes])
        for place in range(first, min(first + lanes, len(sums)), few):
            yield place, f.shuffle(total, total, range(place - first, place - first + few))


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


def write_exponentiate(module: Module, tile: Tile, stored: Storage, width: int) -> Function:
    """scores become weights; the row's running maximum and sums move on, all in vectors.

    Meanwhile a line of values, from those at `rows` on, is asked for with every vector.
    """
    parameters = {
        "scores": PTR,
        "running_max": PTR,
        "running_sum": PTR,
        "alpha": PTR,
        "count": I64,
        "rows": PTR,
    }
    with module.function("exponentiate_row", parameters, internal=True) as f:
        given = f.given
        scores, count = given["scores"], given["count"]
        ahead = Ahead(f, given["rows"], stored, width) if width else None

        def higher(j: Value, best: list[Value]) -> list[Value]:
            return [f.maximum(best[0], tile.load(f, scores, j))]

        before = tile.load(f, given["running_max"])
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

        endless = f.extract(after, 0).equals(math.inf)  # then scores are not below `shift`
        (total,) = f.choose(
            endless,
            lambda: weigh_all(vecmath.exp4),
            lambda: weigh_all(vecmath.exp4_nonpositive),
        )
        running_sum = given["running_sum"]
        tile.store(f, after, given["running_max"])
        tile.store(f, f.fma(tile.load(f, running_sum), moved, total), running_sum)
        tile.store(f, moved, given["alpha"])
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

    def __init__(
        self, f: Function, tile: Tile, stored: Storage, rows: int, careful: Function
    ) -> None:
        self._f, self._tile, self._kind, self._rows, self._careful = f, tile, stored, rows, careful
        given = f.given
        self.values, self.weights, self.sums = given["values"], given["weights"], given["sums"]
        self.count, self.columns = given["count"], given["columns"]
        self._out, self._out_stride, self._alpha = given["out"], given["out_stride"], given["alpha"]

    def weigh(self, j: Value) -> list[Value]:
        """What every row gives to key j, in all lanes."""
        f, tile = self._f, self._tile
        places = [j + r * row_stride(tile) for r in range(self._rows)]
        return [f.splat(f.load(tile.element, self.weights, at), tile.vector) for at in places]

    def read(self, row: Value, d: Index, vectors: int) -> list[Value]:
        """One or two vectors of a row of values."""
        f, stored, vector = self._f, self._kind, self._tile.vector
        return (
            list(stored.read_pair(f, row, d, vector))
            if vectors == 2
            else [stored.read_columns(f, row, d, vector)]
        )

    def add(self, values: list[Value], weights: list[Value], sums: list[Value]) -> list[Value]:
        """Sums, and vectors of one row of values times the weights of all rows."""
        cells = [(value, weight) for value in values for weight in weights]
        return [self._f.fma(*cell, total) for cell, total in zip(cells, sums, strict=True)]

    def sums_at(self, d: Index) -> Value:
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
            shared = {"values": self.values, "columns": self.columns, "count": self.count}
            return [f.call(self._careful, weights=x, column=d, **shared) for x in mine]

        found = f.choose(f.any_lane(odd.differs(0.0)), carefully, lambda: found)
        for r, total in enumerate(found):
            into = f.offset(self._out, r * self._out_stride + d, tile.element)
            scale = tile.load(f, self._alpha, r * tile.lanes)
            tile.store(f, f.fma(tile.load(f, into), scale, total), into)


def write_multiply_values(
    module: Module, tile: Tile, stored: Storage, rows: int, careful: Function, *, width: int
) -> Function:
    """out[row] = out[row] * alpha[row] + weights[row] . values, key by key, as they are read."""
    name = f"multiply_values_{stored.name}_{rows}"
    with module.function(name, _Weighted.parameters, internal=True) as f:
        of = _Weighted(f, tile, stored, rows, careful)
        line, size = columns_of_line(tile, stored), stored.memory.size

        def add_some(j: Value, keys: int, columns: Index, ahead: Ahead) -> None:
            """The values of some keys, in their order."""
            whole = columns & -line
            here = [f.load(PTR, of.values, j + k) for k in range(keys)]
            known = [of.weigh(j + k) for k in range(keys)] if keys * rows <= WEIGHTS else []

            def add_by_row(at: Value, places: range, values: list[list[Value]]) -> None:
                """Weights stay in registers, sums come and go."""
                for r in range(rows):
                    for v, place in enumerate(places[r::rows]):
                        total = tile.load(f, at, place)
                        for parts, weights in zip(values, known, strict=True):
                            total = f.fma(parts[v], weights[r], total)
                        tile.store(f, total, at, place)

            def add_by_key(at: Value, places: range, values: list[list[Value]]) -> None:
                """Sums stay in registers, weights come and go."""
                sums = [tile.load(f, at, place) for place in places]
                for k, parts in enumerate(values):
                    sums = of.add(parts, of.weigh(j + k), sums)
                for place, total in zip(places, sums, strict=True):
                    tile.store(f, total, at, place)

            def add(d: Index, vectors: int) -> None:
                places = range(0, vectors * rows * tile.lanes, tile.lanes)
                values = [of.read(row, d, vectors) for row in here]
                (add_by_row if known else add_by_key)(of.sums_at(d), places, values)

            def add_line(d: Index, nothing: list[Value]) -> list[Value]:
                for step in range(0, line, 2 * tile.lanes):
                    add(d + step, 2)
                ahead.ask(j, d * size, line * size)
                return nothing

            def add_rest(d: Index, nothing: list[Value]) -> list[Value]:
                add(d, 1)
                return nothing

            over_columns(f, 0, whole, add_line, step=line)
            over_columns(f, whole, columns, add_rest, step=tile.lanes)

        with f.range(0, of.columns * rows, tile.lanes) as d:
            tile.store(f, f.value(0.0, tile.vector), of.sums, d)
        together = min(WEIGHTS, (WEIGHTS_OF_NARROW if stored.is_narrow else WEIGHTS) // rows)
        some = of.count & -together
        for begin, end, keys, columns in (
            (0, some, together, width or of.columns),
            (some, of.count, 1, of.columns),
        ):
            ahead = Ahead(f, of.values, stored, columns, keys)
            with f.range(begin, end, keys) as j:
                add_some(j, keys, columns, ahead)
        with f.range(0, of.columns, tile.lanes) as d:
            of.move(d)
    return f


def write_multiply_columns(
    module: Module, tile: Tile, stored: Storage, rows: int, careful: Function
) -> Function:
    """The same for columns [begin, end) of values that were read before, two vectors at a time.

    Sums stay in registers. `begin` is a multiple of two vectors, and so is `end`, but for the last.
    """
    parameters = _Weighted.parameters | {"begin": I64, "end": I64}
    with module.function(f"multiply_columns_{stored.name}_{rows}", parameters, internal=True) as f:
        of = _Weighted(f, tile, stored, rows, careful)
        begin, end = f.given["begin"], f.given["end"]

        def add_all(d: Value, vectors: int) -> None:
            def add(j: Value, sums: list[Value]) -> list[Value]:
                return of.add(of.read(f.load(PTR, of.values, j), d, vectors), of.weigh(j), sums)

            nothing = [f.value(0.0, tile.vector)] * (vectors * rows)
            for place, total in enumerate(f.loop(0, of.count, add, carry=nothing)):
                tile.store(f, total, of.sums_at(d), place * tile.lanes)

        whole = f.minimum(end, of.columns & -columns_of_line(tile, stored))
        with f.range(begin, whole, 2 * tile.lanes) as d:
            add_all(d, 2)
        with f.range(f.maximum(begin, whole), end, tile.lanes) as d:
            add_all(d, 1)
        with f.range(begin, end, tile.lanes) as d:
            of.move(d)
    return f


def write_add_read_values(module: Module, tile: Tile, stored: Storage) -> Function:
    """weights . values[:, column], a vector wide, without the keys that are not read."""
    parameters = {"values": PTR, "weights": PTR, "column": I64, "columns": I64, "count": I64}
    with module.function(
        f"add_read_values_{stored.name}", parameters, tile.vector, internal=True
    ) as f:
        values, weights, column, columns, count = f.parameters
        bits = tile.element.as_int
        unread = f.bitcast(f.value(UNREAD, tile.element), bits)

        def numbers(row: Value) -> Value:
            def of_pair() -> list[Value]:
                first = column & -(2 * tile.lanes)
                even, odd = stored.read_pair(f, row, first, tile.vector)
                return [f.select(column.equals(first), even, odd)]

            paired = column < (columns & -columns_of_line(tile, stored))
            alone = stored.read_columns
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
    state = fields(PTR, "running_max running_sum best place surprise out part")
    parameters = state | {"columns": I64}
    with module.function("merge", parameters, internal=True) as f:
        given, part = f.given, f.given["part"]
        names = (*PARTIAL_STATES, "out")
        theirs = {x: f.offset(part, k * tile.lanes, tile.element) for k, x in enumerate(names)}
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
        here = observe.Part(my_state, mine, before - shift, moved)
        there = observe.Part(their_state, its, other - shift, joined)
        observe.merge(f, tile, here, there)
        with f.range(0, given["columns"], tile.lanes) as d:
            total = add(tile.load(f, given["out"], d), tile.load(f, theirs["out"], d))
            tile.store(f, total, given["out"], d)
    return f
