"""New rows of keys and values, copied to their slots in pages: converted, or quantised, on the way.

    slot    page * page_size + the row in it
    rows    [layers, tokens, heads, width], any strides but the last
    pages   [pages, heads, page_size, width], for each layer
    scales  [pages, heads, page_size], where pages are of int8: row = int8 * scale

One call writes keys and values of one layer or of many. Threads take a block of tokens of a layer
at a time. Where the record says so, rows are streamed past the caches: they are whole cache lines
of pages that are too many to be there, and to read those only to overwrite them takes twice as
long.
"""

from __future__ import annotations

from quire.codegen.builder import Function, Module, Value
from quire.codegen.staging import Storage, storage
from quire.codegen.target import Target
from quire.codegen.types import F32, F64, I8, I32, I64, PTR, Layout, Type

NAME = "append"
INT8 = "int8"
LARGEST = 127  # of int8, on both sides of 0
SIDES = ("key", "value")
PACKED = 4  # vectors of floats become one of int8, at once

_STRIDES: dict[str, Type] = {"layer_stride": I64, "token_stride": I64, "head_stride": I64}
_FIXED: dict[str, Type] = {"width": I64, "streamed": I64}  # 1: whole lines, and not cached
APPEND = Layout(
    "append",
    {
        # of one call
        "next": I64,  # the block that the next thread begins with
        "layers": I64,
        "pages": PTR,  # a record for each layer
        **{f"{side}_rows": PTR for side in SIDES},
        # of all calls of a step
        "slots": PTR,
        "tokens": I64,
        "block": I64,  # tokens that a thread takes at a time
        **{f"{side}_{name}": type for side in SIDES for name, type in _STRIDES.items()},
        # of the pages
        "heads": I64,
        "page_size": I64,
        **{f"{side}_{name}": type for side in SIDES for name, type in _FIXED.items()},
    },
)
LAYER = Layout(
    "layer",
    {
        "layer": I64,  # its place in the rows
        **dict.fromkeys(SIDES, PTR),
        **{f"{side}_scale": PTR for side in SIDES},
    },
)


def write_append(target: Target, source: str, pages: str) -> Module:
    """A kernel over APPEND, for rows of one dtype and pages of another, by torch's names."""
    module = Module()
    with module.function(NAME, {"argument": PTR}) as f:
        writer = _Writer(f, target, storage(source), pages)
        (argument,) = f.parameters
        tokens, block = (f.field(APPEND, argument, name) for name in ("tokens", "block"))
        blocks = (tokens + block - 1).udiv(block)
        last = f.field(APPEND, argument, "layers") * blocks
        counter = f.offset(argument, APPEND.index("next"), I64)
        with f.forever() as leave:
            place = f.atomic_add(counter, 1)
            leave(place >= last)
            layer = place.udiv(blocks)
            begin = (place - layer * blocks) * block
            end = f.minimum(begin + block, tokens)
            table = f.field(APPEND, argument, "pages")
            record = f.offset(table, layer * len(LAYER), I64)
            for side in SIDES:
                writer.write(argument, record, side, begin, end)
        f.emit_void("fence seq_cst")  # what was streamed is there before anybody is told so
    return module


class _Writer:
    """What the rows of one kernel go through."""

    def __init__(self, f: Function, target: Target, source: Storage, pages: str) -> None:
        self.f, self.source = f, source
        self.pages = None if pages == INT8 else storage(pages)
        self.lanes = target.lanes(F32)
        self.whole_lanes = target.lanes(source.memory.as_int)

    def write(self, argument: Value, record: Value, side: str, begin: Value, end: Value) -> None:
        """Some tokens of one layer: its keys, or its values."""
        f = self.f
        heads, page_size, slots = (
            f.field(APPEND, argument, name) for name in ("heads", "page_size", "slots")
        )
        rows, layer_stride, token_stride, head_stride, width, streamed = (
            f.field(APPEND, argument, f"{side}_{name}") for name in ("rows", *_STRIDES, *_FIXED)
        )
        first = f.field(LAYER, record, "layer") * layer_stride
        pages, scales = f.field(LAYER, record, side), f.field(LAYER, record, f"{side}_scale")
        memory = I8 if self.pages is None else self.pages.memory
        with f.range(begin, end) as token:
            slot = f.load(I64, slots, token)
            page = slot.udiv(page_size)
            row = page * (page_size * heads) + (slot - page * page_size)
            with f.range(0, heads) as head:
                start = first + token * token_stride + head * head_stride
                read = f.offset(rows, start, self.source.memory)
                place = row + head * page_size
                into = f.offset(pages, place * width, memory)
                if self.pages is None:
                    self._quantise(read, into, f.offset(scales, place, F32), width, streamed)
                else:
                    self._copy(self.pages, read, into, width, streamed)

    def _copy(
        self, pages: Storage, read: Value, into: Value, width: Value, streamed: Value
    ) -> None:
        """One head of one token: whole vectors, then what is left."""
        f, source = self.f, self.source
        # Torch converts between double and the narrow dtypes by way of float, too.
        element = F64 if pages.memory == F64 else F32
        lanes = self.whole_lanes if source == pages else self.lanes * F32.bits // element.bits

        def number(column: Value, count: int) -> Value:
            if source == pages:  # as bits, so that NaNs stay the very ones
                return f.load(source.memory.as_int.vector(count), read, column)
            return pages.write(f, f.convert(self._number(read, column, count), element))

        def stream() -> list[Value]:
            with f.range(0, width, lanes) as column:
                _stream(f, number(column, lanes), into, column)
            return []

        def store() -> list[Value]:
            whole = width & -lanes
            with f.range(0, whole, lanes) as column:
                f.store(number(column, lanes), into, column)
            with f.range(whole, width) as column:
                f.store(number(column, 0), into, column)
            return []

        f.choose(streamed.equals(1), stream, store)

    def _quantise(
        self, read: Value, into: Value, scale_at: Value, width: Value, streamed: Value
    ) -> None:
        """One head of one token in int8, and beside it its scale: the largest of it / LARGEST.

        The bits of a float without its sign are ordered as the floats are, infinity and then NaN at
        the end. Where the scale is 0 or not finite, so that no number can be divided by it, all of
        the row is 0.
        """
        f = self.f
        peak = self._peak(read, width)
        scale = f.bitcast(peak, F32) / float(LARGEST)
        f.store(scale, scale_at)
        usable = (scale > 0.0) & (scale < float("inf"))

        def number(column: Value, count: int) -> Value:
            ratio = self._number(read, column, count)
            ratio = f.select(usable, ratio / f.splat(scale, ratio.type), 0.0)
            ratio = f.maximum(f.minimum(ratio, float(LARGEST)), -float(LARGEST))
            return f.convert(f.convert(f.intrinsic("rint", ratio), I32), I8)  # to even

        def stream() -> list[Value]:
            many = self.lanes * PACKED
            with f.range(0, width, many) as column:
                _stream(f, number(column, many), into, column)
            return []

        def store() -> list[Value]:
            for count, begin, end in self._runs(width):
                with f.range(begin, end, max(1, count)) as column:
                    f.store(number(column, count), into, column)
            return []

        f.choose(streamed.equals(1), stream, store)

    def _peak(self, read: Value, width: Value) -> Value:
        """The largest of a row, as bits."""
        peak = self.f.value(0, I32)
        for count, begin, end in self._runs(width):
            peak = self._larger(read, count, begin, end, peak)
        return peak

    def _larger(self, read: Value, count: int, begin: Value, end: Value, than: Value) -> Value:
        f, bits = self.f, I32.vector(count)

        def larger(column: Value, found: list[Value]) -> list[Value]:
            number = f.bitcast(self._number(read, column, count), I32) & 0x7FFF_FFFF
            return [f.maximum(number, found[0])]

        carry = [f.splat(than, bits)]
        (most,) = f.loop(begin, end, larger, carry=carry, step=max(1, count))
        return f.reduce("smax", most) if count else most

    def _runs(self, width: Value) -> list[tuple[int, Value, Value]]:
        """How many numbers of a row are taken at once, 0 for one alone; from where to where."""
        many = self.lanes * PACKED
        packed, whole = width & -many, width & -self.lanes
        nothing = self.f.value(0, I64)
        return [(many, nothing, packed), (self.lanes, packed, whole), (0, whole, width)]

    def _number(self, read: Value, column: Value, count: int) -> Value:
        raw = self.f.load(self.source.memory.vector(count), read, column)
        return self.source.read(self.f, raw, F32)


def _stream(f: Function, value: Value, pointer: Value, index: Value) -> None:
    """Write a vector to memory, past the caches; whole lines of it come one after the other."""
    address = f.offset(pointer, index, value.type)
    aligned = value.type.lanes * value.type.size
    text = f"store {value!r}, ptr {address.text}, align {aligned}, !nontemporal !{{i32 1}}"
    f.emit_void(text, value, address)
