"""The phases of a tile in the forward kernel, each a function of its own.

Lanes run over queries. A panel is a few vectors of queries side by side, one column for each query;
a tile is what one panel does with one block of keys:

    multiply_keys      scores[key, query] = sum_d keys[key, d] queries[d, query]
    exponentiate       weights[key, query] = exp4(scores - maximum of the column so far)
    multiply_values    out[d, query] = out alpha + sum_key values[key, d] weights[key, query]

Numbers of keys and values are broadcast and never transposed; maxima and sums are plain vectors; a
block with fewer keys runs shorter loops. All operands lie in scratch memory, padded so that loops
need no remainder. Keys and values may also lie in the user's tensors if these look the same.
`staging.py` reads and writes the user's tensors.

`order.py` says in which order everything is added. Leaving out keys that no query reads does not
change the bits: a weight of 0 adds nothing.

If something is not finite, a second, careful form of the last two phases runs. There a weight of
-0.0 marks a key that is not read (its score is -inf), and its value is left out, not multiplied
by 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module, Operand, Value
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import I64, Type, typed
from quire.codegen.phases.order import exp4_carefully, over_chains

SMALL_ROWS = 4  # rows of the small micro kernel, which takes what the large one leaves over
NARROW_ROWS = 8  # rows of the large micro kernel in narrow tiles
UNREAD = -0.0  # the weight of a key that is not read, in the careful form


class TileShape(NamedTuple):
    """The shape of tiles: a target, and the type of scratch memory.

    A narrow tile has the same layout in memory, but only the first `part` vectors of its panel are
    computed. It may be the only reader of its keys and values, so it reads them from the user's
    tensors and prefetches what follows in memory: the next head reads that.
    """

    target: Target
    element: Type
    part: int = 0

    @property
    def vector(self) -> Type:
        """The type of one vector."""
        return self.target.vector(self.element)

    @property
    def lanes(self) -> int:
        """Queries in one vector."""
        return self.target.vector_bits // self.element.bits

    @property
    def in_128_bits(self) -> int:
        """Numbers in 128 bits, the part of a vector in which most shuffles work."""
        return 128 // self.element.bits

    @property
    def width(self) -> int:
        """Queries in one panel."""
        return self.target.vectors * self.lanes

    @property
    def vectors(self) -> int:
        """Vectors of a panel that are computed."""
        return self.part or self.target.vectors

    @property
    def narrow(self) -> bool:
        """Whether only the first vectors of a panel are computed."""
        return self.part > 0

    def parts(self) -> list[TileShape]:
        """The narrow tiles: those of one vector, two, four and so on."""
        sizes = (1 << n for n in range(self.target.vectors.bit_length()))
        return [self._replace(part=size) for size in sizes if size < self.target.vectors]

    @property
    def line(self) -> int:
        """Numbers in one cache line."""
        return 64 // self.element.size

    @property
    def large_rows(self) -> int:
        """The rows of the large micro kernel."""
        return NARROW_ROWS if self.narrow else self.target.rows

    def named(self, function: str) -> str:
        """The name of a function for tiles of this shape."""
        return f"{function}_{self.part}" if self.narrow else function

    def row(self, f: Function, number: float) -> list[Value]:
        """A row of a panel with one number everywhere."""
        return [f.value(number, self.vector)] * self.vectors

    def load_row(self, f: Function, panel: Value, row: Operand = 0, stride: int = 0) -> list[Value]:
        """One row of a panel in memory; rows follow each other, or at a stride."""
        at = f.offset(panel, row * (stride or self.width), self.element)
        return [self.load(f, at, v * self.lanes) for v in range(self.vectors)]

    def store_row(
        self,
        f: Function,
        values: Sequence[Value],
        panel: Value,
        row: Operand = 0,
        stride: int = 0,
    ) -> None:
        """Write one row of a panel."""
        at = f.offset(panel, row * (stride or self.width), self.element)
        for v, value in enumerate(values):
            self.store(f, value, at, v * self.lanes)

    def rows(self, sums: Sequence[Value]) -> list[Sequence[Value]]:
        """The vectors of a micro kernel, row by row."""
        return [sums[at : at + self.vectors] for at in range(0, len(sums), self.vectors)]

    def load(self, f: Function, pointer: Value, index: Operand = 0) -> Value:
        """An aligned vector."""
        return f.load(self.vector, pointer, index, align=self.target.vector_bits // 8)

    def store(self, f: Function, value: Value, pointer: Value, index: Operand = 0) -> None:
        """Write an aligned vector."""
        f.store(value, pointer, index, align=self.target.vector_bits // 8)


def across(f: Function, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes combined, in every lane: neighbours first, always in the same order."""
    lanes, step = vector.type.lanes or 1, 1
    while step < lanes:
        vector = combine(vector, f.shuffle(vector, vector, [lane ^ step for lane in range(lanes)]))
        step *= 2
    return vector


def outer_product(
    f: Function,
    tile: TileShape,
    count: Value,
    numbers: Callable[[Value], list[Value]],
    vectors: Callable[[Value], list[Value]],
    *,
    rows: int,
    unroll: int = 1,
    sums: Sequence[Value] = (),
) -> list[Value]:
    """sums[r, v] = sum of numbers(i)[r] * vectors(i)[v] over i < count, a multiple of `unroll`.

    This is the micro kernel: rows x vectors accumulators stay in registers. Nearly all time is
    spent in this loop. The sums start from `sums`, or at zero.
    """

    def add(i: Value, sums: list[Value]) -> list[Value]:
        for step in range(unroll):
            row = vectors(i + step)
            wide = [f.splat(number, tile.vector) for number in numbers(i + step)]
            products = [(number, vector) for number in wide for vector in row]
            sums = [f.fma(a, b, s) for (a, b), s in zip(products, sums, strict=True)]
        return sums

    return f.loop(0, count, add, carry=sums or tile.row(f, 0.0) * rows, step=unroll)


def large_rows(tile: TileShape, count: Value) -> Value:
    """How many of `count` rows the large micro kernel computes; the small one computes the rest."""
    unit = math.lcm(tile.large_rows, SMALL_ROWS)
    return count.udiv(unit) * unit


def write_multiply_keys(
    module: Module,
    tile: TileShape,
    *,
    maxima: bool = True,
    scaled: bool = False,
    row_stride: int = 0,
) -> Function:
    """The function that gives scores[key] = keys[key] . queries, and each query's maximum.

    Without `maxima` the maximum is left out. With `scaled`, the scores of a key are multiplied by
    its entry of `scales`.
    """
    parameters = typed("ptr keys, i64 stride, ptr queries, i64 depth, ptr scores maxima, i64 count")
    parameters |= typed("ptr scales") if scaled else {}
    with module.function(tile.named("multiply_keys"), parameters, internal=True) as f:
        given, count = f.given, f.given["count"]
        last = count - 1

        def multiply(first: Value, best: list[Value], rows: int) -> list[Value]:
            places = [first + r for r in range(rows)]
            if rows == SMALL_ROWS:  # past the end: the last key again; nobody reads its scores
                places = [f.minimum(place, last) for place in places]
            starts = [f.offset(given["keys"], at * given["stride"], tile.element) for at in places]
            for r, row in enumerate(tile.rows(_multiply_rows(f, tile, starts))):
                if scaled:
                    scale = f.splat(f.load(tile.element, given["scales"], places[r]), tile.vector)
                    row = [score * scale for score in row]
                tile.store_row(f, row, given["scores"], first + r, row_stride)
                if maxima:
                    best = [f.maximum(a, b) for a, b in zip(best, row, strict=True)]
            return best

        def multiply_few(first: Value, best: list[Value]) -> list[Value]:
            return multiply(first, best, SMALL_ROWS)

        large, rows = large_rows(tile, count), tile.large_rows
        best = tile.row(f, -math.inf) if maxima else []
        best = f.loop(0, large, lambda j, m: multiply(j, m, rows), carry=best, step=rows)
        best = f.loop(large, count, multiply_few, carry=best, step=SMALL_ROWS)
        if maxima:
            tile.store_row(f, best, given["maxima"])
    return f


def _multiply_rows(f: Function, tile: TileShape, starts: Sequence[Value]) -> list[Value]:
    """The scores of some keys; in a narrow tile, what follows each key in memory is prefetched."""
    depth, queries = f.given["depth"], f.given["queries"]

    def product(begin: Value, count: Value, sums: list[Value]) -> list[Value]:
        def keys(d: Value) -> list[Value]:
            return [f.load(tile.element, start, begin + d) for start in starts]

        def query_row(d: Value) -> list[Value]:
            return tile.load_row(f, queries, begin + d)

        size = {"rows": len(starts), "unroll": 1 if tile.narrow else 2}
        return outer_product(f, tile, count, keys, query_row, sums=sums, **size)

    def one_line(d: Value, sums: list[Value]) -> list[Value]:
        for start in starts:
            f.prefetch(f.offset(start, d + depth, tile.element))
        return product(d, f.minimum(depth - d, tile.line), sums)

    nothing = tile.row(f, 0.0) * len(starts)
    if tile.narrow:
        return f.loop(0, depth, one_line, carry=nothing, step=tile.line)
    return product(f.value(0, I64), depth, nothing)


def write_exponentiate(module: Module, tile: TileShape, *, careful: bool = False) -> Function:
    """The function that turns scores into weights and updates each query's maximum and sum.

    `lead` is the chain of the first key, and `chains` is memory for all chains, see `order.py`.
    """
    parameters = typed("ptr chains scores maxima running_max running_sum alpha, i64 count lead")
    name = "exponentiate_carefully" if careful else "exponentiate"
    exp4 = exp4_carefully if careful else vecmath.exp4_nonpositive
    with module.function(tile.named(name), parameters, internal=True) as f:
        chains, *pointers, count, lead = f.parameters

        # One vector of the panel at a time: the constants of exp4 need most of the registers.
        with f.range(0, tile.vectors * tile.lanes, tile.lanes) as place:
            scores, maxima, running_max, running_sum, alpha = (
                f.offset(pointer, place, tile.element) for pointer in pointers
            )
            before = tile.load(f, running_max)
            after = f.maximum(before, tile.load(f, maxima))
            # If no key was read yet, or a score is +inf, subtract 0: infinities stay as they are.
            shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
            tile.store(f, after, running_max)
            tile.store(f, exp4(f, before - shift), alpha)

            def weigh(keys: list[Value]) -> list[Value]:
                places = [f.offset(scores, j * tile.width, tile.element) for j in keys]
                found = [tile.load(f, at) for at in places]
                weights = [exp4(f, score - shift) for score in found]
                for at, score, weight in zip(places, found, weights, strict=True):
                    unread = score.equals(-math.inf)
                    tile.store(f, f.select(unread, UNREAD, weight) if careful else weight, at)
                return weights

            total = over_chains(f, tile, chains, count=count, lead=lead, terms=weigh)
            moved = f.fma(tile.load(f, running_sum), tile.load(f, alpha), total)
            tile.store(f, moved, running_sum)
    return f


def given_weight(f: Function, score: Value) -> Value:
    """A score that is a weight; -inf is the weight 0. No result is -0.0, as UNREAD is."""
    return f.select(score.equals(-math.inf), 0.0, score + 0.0)


def write_add_weights(module: Module, tile: TileShape) -> Function:
    """The function that adds up weights that a mod gave, in the order of `write_exponentiate`."""
    parameters = typed("ptr chains weights running_sum, i64 count lead")
    with module.function("add_weights", parameters, internal=True) as f:
        chains, *pointers, count, lead = f.parameters
        with f.range(0, tile.width, tile.lanes) as place:
            weights, running_sum = (f.offset(x, place, tile.element) for x in pointers)

            def found(keys: list[Value]) -> list[Value]:
                return [tile.load(f, weights, j * tile.width) for j in keys]

            total = over_chains(f, tile, chains, count=count, lead=lead, terms=found)
            tile.store(f, tile.load(f, running_sum) + total, running_sum)
    return f


def is_unread(f: Function, weight: Value) -> Value:
    """Where a weight marks a key that is not read."""
    bits = weight.type.scalar.as_int
    return f.bitcast(weight, bits).equals(f.bitcast(f.value(UNREAD, weight.type), bits))


def write_scale_weights(module: Module, tile: TileShape) -> Function:
    """The function that multiplies weights by the factors of values; UNREAD stays UNREAD."""
    parameters = typed("ptr weights scales, i64 count")
    with module.function("scale_weights", parameters, internal=True) as f:
        weights, scales, count = f.parameters
        with f.range(0, count) as j:
            scale = f.splat(f.load(tile.element, scales, j), tile.vector)
            row = tile.load_row(f, weights, j)
            kept = [is_unread(f, weight) for weight in row]
            scaled = [f.select(k, w, w * scale) for k, w in zip(kept, row, strict=True)]
            tile.store_row(f, scaled, weights, j)
    return f


def write_find_maxima(module: Module, tile: TileShape, *, weighted: bool = False) -> Function:
    """The function that gives each query's largest score, or weight, of `count` keys."""
    with module.function("find_maxima", typed("ptr scores maxima, i64 count"), internal=True) as f:
        scores, maxima, count = f.parameters

        def look(j: Value, best: list[Value]) -> list[Value]:
            row = tile.load_row(f, scores, j)
            if weighted:
                row = [f.select(is_unread(f, weight), -math.inf, weight) for weight in row]
            return [f.maximum(a, b) for a, b in zip(best, row, strict=True)]

        tile.store_row(f, f.loop(0, count, look, carry=tile.row(f, -math.inf)), maxima)
    return f


def write_multiply_values(module: Module, tile: TileShape, *, careful: bool = False) -> Function:
    """The function that gives out[d] = out[d] * alpha + values[:, d] . weights.

    `columns` is a multiple of SMALL_ROWS.
    """
    parameters = typed("ptr values, i64 stride, ptr weights out alpha, i64 count columns")
    name = "multiply_values_carefully" if careful else "multiply_values"
    with module.function(tile.named(name), parameters, internal=True) as f:
        given = f.given
        out, columns = given["out"], given["columns"]
        scale = tile.load_row(f, given["alpha"])

        def multiply(d: Value, rows: int) -> None:
            start = f.offset(given["values"], d, tile.element)

            def column(j: Value) -> list[Value]:
                at = f.offset(start, j * given["stride"], tile.element)
                if tile.narrow:
                    f.prefetch(f.offset(at, columns, tile.element))
                return [f.load(tile.element, at, r) for r in range(rows)]

            def weights(j: Value) -> list[Value]:
                return tile.load_row(f, given["weights"], j)

            product = _selecting_product if careful else outer_product
            sums = product(f, tile, given["count"], column, weights, rows=rows)
            for r, row in enumerate(tile.rows(sums)):
                old = tile.load_row(f, out, d + r)
                moved = [f.fma(o, a, s) for o, a, s in zip(old, scale, row, strict=True)]
                tile.store_row(f, moved, out, d + r)

        large, rows = large_rows(tile, columns), tile.large_rows
        if not careful:
            with f.range(0, large, rows) as d:
                multiply(d, rows)
        with f.range(0 if careful else large, columns, SMALL_ROWS) as d:
            multiply(d, SMALL_ROWS)
    return f


def _selecting_product(
    f: Function,
    tile: TileShape,
    count: Value,
    numbers: Callable[[Value], list[Value]],
    vectors: Callable[[Value], list[Value]],
    *,
    rows: int,
) -> list[Value]:
    """`outer_product` without the terms whose weight is UNREAD."""

    def add(i: Value, sums: list[Value]) -> list[Value]:
        row = vectors(i)
        skip = [is_unread(f, weight) for weight in row]
        wide = [f.splat(number, tile.vector) for number in numbers(i)]
        terms = [
            (number, weight, no) for number in wide for weight, no in zip(row, skip, strict=True)
        ]
        return [
            f.select(no, s, f.fma(number, weight, s))
            for (number, weight, no), s in zip(terms, sums, strict=True)
        ]

    return f.loop(0, count, add, carry=tile.row(f, 0.0) * rows)


def apply_share(f: Function, sums: Value, share: Value, *, weighted: bool) -> Value:
    """Sums of weights times values, times `share` or, if `weighted`, divided by it; never -0.0."""
    return sums / share + 0.0 if weighted else f.fma(sums, share, 0.0)
