"""The phases of the kernel for few queries, each a small function of its own.

Lanes run over columns. A set is up to `MOST_TOGETHER` query rows that share each load of a key or
value; what a row computes, and in which order, does not depend on who else is in its set:

    multiply_keys      products[key, row] = sum_d keys[key, d] queries[row, d]
    turn               scores[row, key] = products[key, row]
    exponentiate       weights[key] = exp2(scores - maximum of the row so far)
    multiply_values    out[row, d] = out alpha + sum_key weights[row, key] values[key, d]

Keys and values are found through tables of addresses, one for each row, so that nothing here knows
of pages; and while one block is computed with, the rows of another are asked for.
"""

from __future__ import annotations

import math

from quire.codegen import observe, vecmath
from quire.codegen.builder import Function, Module, Value
from quire.codegen.staging import ROWS, Run, Storage, each_run, page_start, scale_start
from quire.codegen.tiles import UNREAD, Tile, across
from quire.codegen.types import F32, I1, I8, I64, PTR

SUMS = 8  # vectors that are summed at once
MOST_TOGETHER = 4
MOST_KEYS = 16  # that a set multiplies at once
LINE = 64  # bytes that come from memory together


def set_sizes(tile: Tile) -> list[int]:
    """How many rows a set may have, in the order in which they are tried."""
    return [size for size in (4, 2, 1) if size <= min(tile.lanes, MOST_TOGETHER)]


def write_point(module: Module, tile: Tile, kind: Storage) -> Function:
    """Addresses of the rows at positions [begin, end), and the last one again a few times.

    Returns whether vectors can be read from there.
    """
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
        last = f.load(I64, into, end - begin - 1)
        with f.range(end - begin, end - begin + MOST_KEYS) as p:
            f.store(last, into, p)
        in_vectors = (width & (tile.lanes - 1)).equals(0)
        f.give_back(f.field(ROWS, rows, "column_stride").equals(1) & in_vectors)
    return f


def write_multiply_keys(module: Module, tile: Tile, kind: Storage, rows: int) -> Function:
    """products[key, row] = keys[key] . queries[row]; some more than `count` are written.

    Every product adds up in a register of its own, before its lanes are added up.
    """
    parameters = {
        "keys": PTR,
        "ahead": PTR,
        "queries": PTR,
        "query_stride": I64,
        "depth": I64,
        "products": PTR,
        "count": I64,
    }
    name = f"multiply_keys_{kind.name}_{rows}"
    with module.function(name, parameters, internal=True) as f:
        keys, ahead, queries, query_stride, depth, products, count = f.parameters
        together = SUMS // rows
        line = max(tile.lanes, LINE // kind.memory.size)
        memory = kind.memory.vector(tile.lanes)
        starts = [f.offset(queries, r * query_stride, tile.element) for r in range(rows)]
        asks = ahead.differs(f.null())
        with f.range(0, count, together) as j:
            here = [f.load(PTR, keys, j + t) for t in range(together)]

            def add(d: Value, sums: list[Value], here: list[Value] = here) -> list[Value]:
                parts = [kind.read(f, f.load(memory, key, d), tile.element) for key in here]
                result = list(sums)
                for r, start in enumerate(starts):
                    query = tile.load(f, start, d)
                    for t, part in enumerate(parts):
                        result[t * rows + r] = f.fma(part, query, sums[t * rows + r])
                return result

            whole = depth & -line
            with f.when(asks):
                for t in range(together):
                    row = f.load(PTR, ahead, j + t)
                    with f.range(0, whole, line) as d:
                        f.prefetch(f.offset(row, d, kind.memory))

            def add_line(d: Value, sums: list[Value]) -> list[Value]:
                for step in range(0, line, tile.lanes):
                    sums = add(d + step, sums)
                return sums

            sums = [f.value(0.0, tile.vector)] * (together * rows)
            sums = f.loop(0, whole, add_line, carry=sums, step=line)
            sums = f.loop(whole, depth, add, carry=sums, step=tile.lanes)
            for first in range(0, len(sums), tile.lanes):
                total = add_lanes(f, sums[first : first + tile.lanes])
                f.store(total, products, j * rows + first)
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

        def weigh(j: Value, total: list[Value]) -> list[Value]:
            score = tile.load(f, scores, j)
            weight = vecmath.exp2(f, score - shift)
            tile.store(f, f.select(score.equals(-math.inf), UNREAD, weight), scores, j)
            return [total[0] + weight]

        nothing = f.value(0.0, tile.vector)
        (total,) = f.loop(0, count, weigh, carry=[nothing], step=tile.lanes)
        tile.store(f, after, running_max)
        tile.store(f, f.fma(tile.load(f, running_sum), moved, total), running_sum)
        tile.store(f, moved, alpha)
    return f


def write_multiply_values(
    module: Module, tile: Tile, kind: Storage, rows: int, careful: Function
) -> Function:
    """out[row] = out[row] * alpha[row] + weights[row] . values.

    A key that is not read has the weight -0.0, so that a finite value adds nothing. Where a sum is
    not finite it is found again by `careful`, without the values that are not read.
    """
    parameters = {
        "values": PTR,
        "ahead": PTR,
        "ahead_bytes": I64,
        "weights": PTR,
        "weight_stride": I64,
        "out": PTR,
        "out_stride": I64,
        "alpha": PTR,
        "count": I64,
        "columns": I64,
    }
    name = f"multiply_values_{kind.name}_{rows}"
    with module.function(name, parameters, internal=True) as f:
        values, ahead, ahead_bytes, weights, weight_stride, out, out_stride = f.parameters[:7]
        alpha, count, columns = f.parameters[7:]
        memory = kind.memory.vector(tile.lanes)
        mine = [f.offset(weights, r * weight_stride, tile.element) for r in range(rows)]

        def add(j: Value, d: Value, sums: list[Value], vectors: int) -> list[Value]:
            row = f.offset(f.load(PTR, values, j), d, kind.memory)
            parts = [
                kind.read(f, f.load(memory, row, v * tile.lanes), tile.element)
                for v in range(vectors)
            ]
            result = []
            for r, start in enumerate(mine):
                wide = f.splat(f.load(tile.element, start, j), tile.vector)
                old = sums[r * vectors : (r + 1) * vectors]
                result += [f.fma(x, wide, s) for x, s in zip(parts, old, strict=True)]
            return result

        def ask(place: list[Value], lines: int) -> list[Value]:
            row, offset = place
            for _ in range(lines):
                f.prefetch(f.offset(f.load(PTR, ahead, row), offset, I8))
                offset = offset + LINE
                done = offset >= ahead_bytes
                row = f.select(done, f.minimum(row + 1, count - 1), row)
                offset = f.select(done, 0, offset)
            return [row, offset]

        def move(d: Value, sums: list[Value], vectors: int) -> None:
            odd = f.value(0.0, tile.vector)
            for total in sums:  # x * 0 is NaN where x is not finite
                odd = f.fma(total, 0.0, odd)
            places = [(r, d + v * tile.lanes) for r in range(rows) for v in range(vectors)]

            def again() -> list[Value]:
                return [f.call(careful, values, mine[r], column, count) for r, column in places]

            sums = f.choose(f.any_lane(odd.differs(0.0)), again, lambda: sums)
            for (r, column), total in zip(places, sums, strict=True):
                at = f.offset(out, r * out_stride + column, tile.element)
                scale = tile.load(f, alpha, r * tile.lanes)
                tile.store(f, f.fma(tile.load(f, at), scale, total), at)

        def passes(vectors: int, first: Value, place: list[Value]) -> tuple[Value, list[Value]]:
            """Columns from `first` on, some vectors at a time, as long as there are so many."""
            taken = vectors * tile.lanes * kind.memory.size  # bytes of a row
            lines, unroll = max(1, taken // LINE), 1 << max(0, (LINE // taken).bit_length() - 1)

            def one(d: Value, place: list[Value]) -> list[Value]:
                def step(j: Value, carried: list[Value]) -> list[Value]:
                    place, sums = ask(carried[:2], lines), carried[2:]
                    for k in range(unroll):
                        sums = add(j + k, d, sums, vectors)
                    return [*place, *sums]

                whole = f.select(ahead.differs(f.null()), count & -unroll, 0)
                sums = [f.value(0.0, tile.vector)] * (rows * vectors)
                row, offset, *sums = f.loop(0, whole, step, carry=[*place, *sums], step=unroll)
                sums = f.loop(whole, count, lambda j, sums: add(j, d, sums, vectors), carry=sums)
                move(d, sums, vectors)
                return [row, offset]

            width = vectors * tile.lanes
            stop = first + (columns - first).udiv(width) * width
            return stop, f.loop(first, stop, one, carry=place, step=width)

        first, place = f.value(0, I64), [f.value(0, I64)] * 2
        most = SUMS // rows
        for vectors in [most, *(size for size in (4, 2, 1) if size < most)]:
            first, place = passes(vectors, first, place)
    return f


def write_add_read_values(module: Module, tile: Tile, kind: Storage) -> Function:
    """weights . values[:, column], a vector wide, without the keys that are not read."""
    parameters = {"values": PTR, "weights": PTR, "column": I64, "count": I64}
    with module.function(
        f"add_read_values_{kind.name}", parameters, tile.vector, internal=True
    ) as f:
        values, weights, column, count = f.parameters
        bits = tile.element.as_int
        unread = f.bitcast(f.value(UNREAD, tile.element), bits)

        def add(j: Value, sums: list[Value]) -> list[Value]:
            weight = f.load(tile.element, weights, j)

            def read() -> list[Value]:
                memory = kind.memory.vector(tile.lanes)
                raw = f.load(memory, f.load(PTR, values, j), column)
                number = kind.read(f, raw, tile.element)
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
