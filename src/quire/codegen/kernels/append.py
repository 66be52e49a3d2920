"""Copies new rows of keys and values to their pages, and converts or quantises them.

    slot    page * page_size + row of the page
    rows    [layers, tokens, heads, width], any strides but the last
    pages   [pages, heads, page_size, width], for each layer
    scales  [pages, heads, page_size], where pages have scales: row = numbers * scale

One call writes the keys and values of one layer or of many. Threads take a block of tokens of one
layer at a time. If the record says so, rows are streamed past the caches: a normal store would
first read the line that it overwrites, which takes twice as long if the pages are in no cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F16, F32, F64, I32, I64, PTR, Layout, Type
from quire.codegen.phases.storage import Storage, storage

NAME = "append"
SIDES = ("key", "value")
PACKED = 4  # vectors of floats that become one vector of bytes

_STRIDES: dict[str, Type] = {"layer_stride": I64, "token_stride": I64, "head_stride": I64}
_FIXED: dict[str, Type] = {"width": I64, "streamed": I64}  # 1: rows are whole cache lines, streamed
APPEND = Layout(
    "append",
    {
        # Of one call:
        "next": I64,  # the counter that threads take blocks off
        "layers": I64,
        "pages": PTR,  # a LAYER record for each layer
        **{f"{side}_rows": PTR for side in SIDES},
        # Of all calls of a step:
        "slots": PTR,
        "tokens": I64,
        "block": I64,  # tokens that a thread takes at a time
        **{f"{side}_{name}": type for side in SIDES for name, type in _STRIDES.items()},
        # Of the pages:
        "heads": I64,
        "page_size": I64,
        **{f"{side}_{name}": type for side in SIDES for name, type in _FIXED.items()},
    },
)
LAYER = Layout(
    "layer",
    {
        "layer": I64,  # its index in the rows
        **dict.fromkeys(SIDES, PTR),
        **{f"{side}_scale": PTR for side in SIDES},
    },
)


def write_append(
    target: Target,
    source: str,
    pages: str,
    *,
    scaled: bool = False,
    sides: Sequence[str] = SIDES,
) -> Module:
    """A kernel over APPEND, for rows of one dtype and pages of another, by torch's names.

    With `scaled`, pages have scales. `sides` says whether keys, values or both are written.
    """
    module = Module()
    with module.function(NAME, {"argument": PTR}) as f:
        writer = _Writer(f, target, storage(source), storage(pages), scaled=scaled)
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
            for side in sides:
                writer.write(argument, record, side, begin, end)
        f.emit_void("fence seq_cst")  # streamed rows must be in memory before the call returns
    return module


class _Writer:
    """Writes the code that copies rows of one dtype to pages of another."""

    def __init__(
        self, f: Function, target: Target, source: Storage, pages: Storage, *, scaled: bool
    ) -> None:
        self.f, self.source, self.pages, self.scaled = f, source, pages, scaled
        self.lanes = target.lanes(F32)
        self.rounds_at_once = target.triple.startswith(("aarch64", "arm64"))
        self.whole_lanes = target.lanes(source.memory.as_int)

    def write(self, argument: Value, record: Value, side: str, begin: Value, end: Value) -> None:
        """Copy the keys or the values of some tokens of one layer."""
        f = self.f
        heads, page_size, slots = (
            f.field(APPEND, argument, name) for name in ("heads", "page_size", "slots")
        )
        rows, layer_stride, token_stride, head_stride, width, streamed = (
            f.field(APPEND, argument, f"{side}_{name}") for name in ("rows", *_STRIDES, *_FIXED)
        )
        first = f.field(LAYER, record, "layer") * layer_stride
        pages, scales = f.field(LAYER, record, side), f.field(LAYER, record, f"{side}_scale")
        with f.range(begin, end) as token:
            slot = f.load(I64, slots, token)
            page = slot.udiv(page_size)
            row = page * (page_size * heads) + (slot - page * page_size)
            with f.range(0, heads) as head:
                start = first + token * token_stride + head * head_stride
                read = f.offset(rows, start, self.source.memory)
                place = row + head * page_size
                into = f.offset(pages, place * width, self.pages.memory)
                if self.scaled:
                    self._quantise(read, into, f.offset(scales, place, F32), width, streamed)
                else:
                    self._copy(read, into, width, streamed)

    def _copy(self, read: Value, into: Value, width: Value, streamed: Value) -> None:
        """Copy one head of one token: whole vectors, then the rest."""
        f, source, pages = self.f, self.source, self.pages
        # PyTorch converts between float64 and narrow dtypes by way of float32, too; on aarch64 it
        # rounds float64 to float16 at once.
        at_once = self.rounds_at_once and (source.memory, pages.memory) == (F64, F16)
        element = F64 if pages.memory == F64 or at_once else F32
        lanes = self.whole_lanes if source == pages else self.lanes * F32.bits // element.bits

        def number(column: Value, count: int) -> Value:
            if source == pages:  # as bits, so that the bits of a NaN are kept
                return f.load(source.memory.as_int.vector(count), read, column)
            number = self._number(read, column, count, F64 if at_once else F32)
            return pages.write(f, f.convert(number, element))

        def stream() -> None:
            with f.range(0, width, lanes) as column:
                _stream(f, number(column, lanes), into, column)

        def store() -> None:
            whole = width & -lanes
            with f.range(0, whole, lanes) as column:
                f.store(number(column, lanes), into, column)
            with f.range(whole, width) as column:
                f.store(number(column, 0), into, column)

        f.choose(streamed.equals(1), stream, store)

    def _quantise(
        self, read: Value, into: Value, scale_at: Value, width: Value, streamed: Value
    ) -> None:
        """Copy one head of one token with the scale max(abs(row)) / `largest` of the dtype.

        The bits of floats without their sign have the order of the floats; infinity and NaN come
        last. If the scale is 0 or not finite, the row becomes 0.
        """
        f, largest = self.f, self.pages.largest
        peak = self._peak(read, width)
        scale = f.bitcast(peak, F32) / largest
        f.store(scale, scale_at)
        usable = (scale > 0.0) & (scale < float("inf"))

        def number(column: Value, count: int) -> Value:
            ratio = self._number(read, column, count)
            ratio = f.select(usable, ratio / f.splat(scale, ratio.type), 0.0)
            return self.pages.write(f, f.maximum(f.minimum(ratio, largest), -largest))

        def stream() -> None:
            many = self.lanes * PACKED
            with f.range(0, width, many) as column:
                _stream(f, number(column, many), into, column)

        def store() -> None:
            for count, begin, end in self._runs(width):
                with f.range(begin, end, max(1, count)) as column:
                    f.store(number(column, count), into, column)

        f.choose(streamed.equals(1), stream, store)

    def _peak(self, read: Value, width: Value) -> Value:
        """The largest magnitude of a row, as bits."""
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
        """A row in runs (count, begin, end): `count` numbers at a time, 0 for a scalar."""
        many = self.lanes * PACKED
        packed, whole = width & -many, width & -self.lanes
        nothing = self.f.value(0, I64)
        return [(many, nothing, packed), (self.lanes, packed, whole), (0, whole, width)]

    def _number(self, read: Value, column: Value, count: int, element: Type = F32) -> Value:
        raw = self.f.load(self.source.memory.vector(count), read, column)
        return self.source.read(self.f, raw, element)


def _stream(f: Function, value: Value, pointer: Value, index: Value) -> None:
    """Write a vector to memory, past the caches."""
    address = f.offset(pointer, index, value.type)
    aligned = value.type.lanes * value.type.size
    text = f"store {value!r}, ptr {address.text}, align {aligned}, !nontemporal !{{i32 1}}"
    f.emit_void(text, value, address)
