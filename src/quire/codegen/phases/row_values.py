"""Results of the decode kernel: the product of the weights of a set of rows with values.

    out[row, d] = out[row, d] alpha[row] + sum_key weights[row, key] values[key, d]

Lanes run over columns, and the sum over keys is the same in whichever of two ways it is computed:
value by value, as they come from memory, or column by column if the values are in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import PTR, typed
from quire.codegen.phases.row_stream import Ahead, Index, columns_of_line, over_columns
from quire.codegen.phases.storage import Storage
from quire.codegen.phases.tiles import UNREAD, TileShape
from quire.codegen.scratch import BLOCKS_TOGETHER, row_stride

WEIGHTS = 8  # weights of a set that are held at once: rows times keys
WEIGHTS_OF_NARROW = 16  # the same for numbers that are quick to load
PARAMETERS = typed("ptr values weights sums out, i64 out_stride, ptr alpha, i64 count columns")


class _ValueProducts:
    """A product with values while it is written, for `rows` rows.

    `careful` is the function of `write_add_read_values`, which leaves out values of unread keys.
    """

    def __init__(
        self, f: Function, tile: TileShape, stored: Storage, rows: int, careful: Function
    ) -> None:
        self.f, self.tile, self.stored, self.rows, self._careful = f, tile, stored, rows, careful
        self.values, self.sums = f.given["values"], f.given["sums"]
        self.count, self.columns = f.given["count"], f.given["columns"]

    def weigh(self, j: Value) -> list[Value]:
        """The weights of key j: for every row a vector of one number."""
        f, tile, weights = self.f, self.tile, self.f.given["weights"]
        places = [j + r * row_stride(tile) for r in range(self.rows)]
        return [f.splat(f.load(tile.element, weights, at), tile.vector) for at in places]

    def read(self, rows: Sequence[Value], d: Index, vectors: int) -> list[list[Value]]:
        """One vector of each row of values from column d on, or a few pairs of vectors."""
        f, vector = self.f, self.tile.vector
        if vectors == 1:
            return [[self.stored.read_columns(f, row, d, vector)] for row in rows]
        places = range(0, vectors * self.tile.lanes, 2 * self.tile.lanes)
        pairs = [self.stored.read_pairs(f, rows, d + at, vector) for at in places]
        return [[x for pair in of_row for x in pair] for of_row in zip(*pairs, strict=True)]

    def add(self, values: list[Value], weights: list[Value], sums: list[Value]) -> list[Value]:
        """`sums` plus every vector of values times the weight of every row."""
        cells = [(value, weight) for value in values for weight in weights]
        return [self.f.fma(a, b, total) for (a, b), total in zip(cells, sums, strict=True)]

    def sums_at(self, d: Index) -> Value:
        """The address of the sums of a vector of columns; those of all rows lie together."""
        return self.f.offset(self.sums, d * self.rows, self.tile.element)

    def move(self, d: Value) -> None:
        """out[row] = out[row] * alpha[row] + sums[row], for a vector of columns.

        An unread key has the weight -0.0, so a finite value adds nothing. Where a sum is not
        finite it is computed again, without the values of unread keys.
        """
        f, tile, given, rows = self.f, self.tile, self.f.given, range(self.rows)
        found = [tile.load(f, self.sums_at(d), r * tile.lanes) for r in rows]
        odd = f.value(0.0, tile.vector)
        for total in found:  # x * 0 is NaN where x is not finite
            odd = f.fma(total, 0.0, odd)

        def carefully() -> list[Value]:
            mine = [f.offset(given["weights"], r * row_stride(tile), tile.element) for r in rows]
            shared = {"values": self.values, "columns": self.columns, "count": self.count}
            return [f.call(self._careful, weights=x, column=d, **shared) for x in mine]

        found = f.choose(f.any_lane(odd.differs(0.0)), carefully, lambda: found)
        for r, total in enumerate(found):
            into = f.offset(given["out"], r * given["out_stride"] + d, tile.element)
            scale = tile.load(f, given["alpha"], r * BLOCKS_TOGETHER * tile.lanes)
            tile.store(f, f.fma(tile.load(f, into), scale, total), into)


def write_multiply_values(
    module: Module, tile: TileShape, stored: Storage, rows: int, careful: Function, *, width: int
) -> Function:
    """The function that adds values in the order in which they are read from memory.

    `width` is the number of columns if it is known, else 0.
    """
    name = f"multiply_values_{stored.name}_{rows}"
    with module.function(name, PARAMETERS, internal=True) as f:
        _StreamedValues(f, tile, stored, rows, careful).write(width)
    return f


class _StreamedValues(_ValueProducts):
    """Adds the values of a few keys at a time to sums in scratch."""

    def write(self, width: int) -> None:
        """Clear the sums, add the values of all keys, and add the sums to out."""
        f, tile, rows = self.f, self.tile, self.rows
        with f.range(0, self.columns * rows, tile.lanes) as d:
            tile.store(f, f.value(0.0, tile.vector), self.sums, d)
        together = min(WEIGHTS, (WEIGHTS_OF_NARROW if self.stored.is_narrow else WEIGHTS) // rows)
        some = self.count & -together
        for begin, end, keys, columns in (
            (0, some, together, width or self.columns),
            (some, self.count, 1, self.columns),
        ):
            ahead = Ahead(f, self.values, self.stored, columns, keys)
            with f.range(begin, end, keys) as j:
                self._add_keys(j, keys, columns, ahead)
        with f.range(0, self.columns, tile.lanes) as d:
            self.move(d)

    def _add_keys(self, j: Value, keys: int, columns: Index, ahead: Ahead) -> None:
        """Add the values of the keys from j on, and prefetch those that come later."""
        f, tile, rows = self.f, self.tile, self.rows
        line, size = columns_of_line(tile, self.stored), self.stored.memory.size
        whole = columns & -line
        here = [f.load(PTR, self.values, j + k) for k in range(keys)]
        weights = [self.weigh(j + k) for k in range(keys)] if keys * rows <= WEIGHTS else []

        def add(d: Index, vectors: int) -> None:
            places = range(0, vectors * rows * tile.lanes, tile.lanes)
            values = self.read(here, d, vectors)
            at = self.sums_at(d)
            if weights:
                self._add_by_row(at, places, values, weights)
            else:
                self._add_by_key(at, places, values, j)

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

    def _add_by_row(
        self, at: Value, places: range, values: list[list[Value]], weights: list[list[Value]]
    ) -> None:
        """The weights stay in registers; one sum after the other is loaded and stored."""
        f, tile = self.f, self.tile
        for r in range(self.rows):
            for v, place in enumerate(places[r :: self.rows]):
                total = tile.load(f, at, place)
                for parts, each in zip(values, weights, strict=True):
                    total = f.fma(parts[v], each[r], total)
                tile.store(f, total, at, place)

    def _add_by_key(self, at: Value, places: range, values: list[list[Value]], j: Value) -> None:
        """The sums stay in registers; the weights of one key after the other are loaded."""
        f, tile = self.f, self.tile
        sums = [tile.load(f, at, place) for place in places]
        for k, parts in enumerate(values):
            sums = self.add(parts, self.weigh(j + k), sums)
        for place, total in zip(places, sums, strict=True):
            tile.store(f, total, at, place)


def write_multiply_columns(
    module: Module, tile: TileShape, stored: Storage, rows: int, careful: Function
) -> Function:
    """The function that adds columns [begin, end) of values that are in a cache.

    Sums stay in registers. `begin` is a multiple of two vectors, and so is `end`, unless it is the
    last column.
    """
    name = f"multiply_columns_{stored.name}_{rows}"
    with module.function(name, PARAMETERS | typed("i64 begin end"), internal=True) as f:
        of = _ValueProducts(f, tile, stored, rows, careful)
        begin, end = f.given["begin"], f.given["end"]

        def add_all(d: Value, vectors: int) -> None:
            def add(j: Value, sums: list[Value]) -> list[Value]:
                (values,) = of.read([f.load(PTR, of.values, j)], d, vectors)
                return of.add(values, of.weigh(j), sums)

            nothing = [f.value(0.0, tile.vector)] * (vectors * rows)
            for place, total in enumerate(f.loop(0, of.count, add, carry=nothing)):
                tile.store(f, total, of.sums_at(d), place * tile.lanes)

        whole = f.minimum(end, of.columns & -columns_of_line(tile, stored))
        most = tile.target.vectors
        twice = begin + ((whole - begin) & -(most * tile.lanes))
        with f.range(begin, twice, most * tile.lanes) as d:
            add_all(d, most)
        with f.range(f.maximum(begin, twice), whole, 2 * tile.lanes) as d:
            add_all(d, 2)
        with f.range(f.maximum(begin, whole), end, tile.lanes) as d:
            add_all(d, 1)
        with f.range(begin, end, tile.lanes) as d:
            of.move(d)
    return f


def write_add_read_values(module: Module, tile: TileShape, stored: Storage) -> Function:
    """The function that gives weights . values[:, column], one vector wide, without unread keys."""
    parameters = typed("ptr values weights, i64 column columns count")
    name = f"add_read_values_{stored.name}"
    with module.function(name, parameters, tile.vector, internal=True) as f:
        values, weights, column, columns, count = f.parameters
        bits = tile.element.as_int
        unread = f.bitcast(f.value(UNREAD, tile.element), bits)

        def numbers(row: Value) -> Value:
            def of_pair() -> list[Value]:
                first = column & -(2 * tile.lanes)
                ((even, odd),) = stored.read_pairs(f, [row], first, tile.vector)
                return [f.select(column.equals(first), even, odd)]

            def alone() -> list[Value]:
                return [stored.read_columns(f, row, column, tile.vector)]

            paired = column < (columns & -columns_of_line(tile, stored))
            return f.choose(paired, of_pair, alone)[0]

        def add(j: Value, sums: list[Value]) -> list[Value]:
            weight = f.load(tile.element, weights, j)

            def read() -> list[Value]:
                number = numbers(f.load(PTR, values, j))
                return [f.fma(number, f.splat(weight, tile.vector), sums[0])]

            skipped = f.bitcast(weight, bits).equals(unread)
            return f.choose(skipped, lambda: sums, read)

        f.give_back(f.loop(0, count, add, carry=[f.value(0.0, tile.vector)])[0])
    return f
