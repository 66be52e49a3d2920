"""Writing new rows into pages: by a compiled kernel, or in torch where none can be compiled.

A `PageWriter` knows the pages of some layers, a `SlotWriter` where the new rows of a step go in all
of them. What does not change from layer to layer is worked out once, and so each costs two or three
microseconds besides the bytes it moves.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.codegen.kernels.append import APPEND, LARGEST_INT8, LAYER, NAME, write_append
from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.runtime import processor
from quire.runtime.cache import cache_key, code_of
from quire.runtime.launch import num_threads, ready

WORTH_THREADS = 1 << 18  # bytes: a parallel region costs what it takes to copy a part of that
WORTH_STREAMING = 1 << 22  # bytes of a layer's keys: as many are in no cache when they are written
LINE = 64  # bytes of a cache line
MOST_OF_BLOCK = 64  # tokens: who takes more leaves the others without

_OF_PAGES = APPEND.index("heads")  # the fields from there on are those of the pages
_OF_STEP = struct.Struct(f"{_OF_PAGES - APPEND.index('slots')}q")
_pack_call = struct.Struct(f"{APPEND.index('slots')}q{_OF_STEP.size}s").pack_into


class PageTensors(NamedTuple):
    """The pages of a layer, [P, Hkv, page, D] and [P, Hkv, page, Dv], contiguous.

    Pages of int8 have a scale for each row, [P, Hkv, page] of float32: row = int8 * scale.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


class PageWriter:
    """The pages of some layers, all alike, and the record that a kernel writes to them by."""

    def __init__(self, layers: Mapping[int, PageTensors]) -> None:
        self.record = (ctypes.c_int64 * len(APPEND))()
        self._argument = ctypes.addressof(self.record)
        self._kernels: dict[torch.dtype, int | None] = {}
        self.last: Call | None = None  # of rows of one layer, which the next step has again
        self._calls: dict[int, Call] = {}  # the last for so many layers
        self.turn_to(layers)

    def turn_to(self, layers: Mapping[int, PageTensors]) -> None:
        """Write to these pages from now on, also what is written `at` slots from before."""
        self.layers = dict(layers)
        records = [(layer, *map(_address, pages)) for layer, pages in self.layers.items()]
        self.table = torch.tensor(records, dtype=torch.int64)
        start = self.table.data_ptr()
        self.record_of = {
            layer: start + place * LAYER.size for place, layer in enumerate(self.layers)
        }
        pages = next(iter(self.layers.values()))
        self._dtype, self._on_cpu = pages.key.dtype, pages.key.is_cpu
        _, heads, page_size, head_dim = pages.key.shape
        value_dim = pages.value.shape[3]
        self._token_numbers = heads * (head_dim + value_dim)
        self.record[_OF_PAGES:] = [
            *(heads, page_size),
            *(head_dim, self._worth_streaming("key"), value_dim, self._worth_streaming("value")),
        ]

    def _worth_streaming(self, side: str) -> bool:
        """Whole lines, each written as a whole, into more memory than caches hold."""
        every = [getattr(pages, side) for pages in self.layers.values()]
        row = every[0].shape[3] * every[0].element_size()
        aligned = row % LINE == 0 and all(pages.data_ptr() % LINE == 0 for pages in every)
        return aligned and every[0].nbytes >= WORTH_STREAMING

    def kernel(self, key: Tensor, value: Tensor) -> int | None:
        """Where the code is, if these rows can be read by it."""
        if key.dtype != value.dtype or not (key.is_cpu and value.is_cpu and self._on_cpu):
            return None
        if key.dtype not in self._kernels:
            runs = processor.obstacle() is None
            code = _code(Target.host(), key.dtype, self._dtype) if runs else None
            self._kernels[key.dtype] = None if code is None else code.address(NAME)
        return self._kernels[key.dtype]

    def call(self, key: Tensor, value: Tensor, layers: int, tokens: int) -> Call:
        """How rows of the form of these are written."""
        form, limit = form_of(key, value), num_threads()
        known = self._calls.get(layers)
        if known is None or (known.form, known.limit) != (form, limit):
            known = self._calls[layers] = self._new_call(form, limit, key, value, layers, tokens)
        return known

    def _new_call(
        self, form: Form, limit: int, key: Tensor, value: Tensor, layers: int, tokens: int
    ) -> Call:
        kernel = self.kernel(key, value)
        if kernel is None:
            return Call(form, tokens, limit, None, False, ())
        copies = not key.stride(-1) == value.stride(-1) == 1
        if copies:
            key, value = key.contiguous(), value.contiguous()
        size = layers * tokens * self._token_numbers * key.element_size()
        threads = limit if size >= WORTH_THREADS else 1
        block = block_of(layers * tokens, threads)
        fixed = tokens, block, *_strides(key), *_strides(value)
        return Call(form, tokens, limit, ready(kernel, self._argument, threads), copies, fixed)

    def at(self, slots: Tensor) -> SlotWriter:
        """What writes rows to slots: page * page_size + the row in it.

        Slots are contiguous, of int64, and name rows of the pages.
        """
        return SlotWriter(self, slots)


Form: TypeAlias = tuple[object, ...]


def form_of(key: Tensor, value: Tensor) -> Form:
    """What tensors of several layers have in common, all but their memory."""
    # One tuple of all: nested or starred ones take longer, and this is part of every layer.
    return (
        type(key), key.dtype, key.is_cpu, key.shape, key.stride(),
        type(value), value.dtype, value.is_cpu, value.shape, value.stride(),
    )  # fmt: skip


class Call(NamedTuple):
    """How rows of one form are written, by the record of a writer."""

    form: Form
    tokens: int
    limit: int  # how many threads a kernel might use when this was worked out
    run: Callable[[], None] | None  # the kernel; None where torch writes
    copies: bool  # whether rows have to be made contiguous first
    fixed: tuple[int, ...]  # tokens, tokens of a block, strides


class SlotWriter:
    """Writes new rows to slots of one layer after the other, or of all at once.

    `expect` says what the rows of a layer are like, and what follows from it is worked out then: a
    layer costs little more than the bytes it moves. Nothing is checked here. `form` is that of rows
    which come next; from step to step it is the same, as long as they have as many tokens.
    """

    __slots__ = ("_call", "_of_step", "_slots", "_writer", "form")

    def __init__(self, writer: PageWriter, slots: Tensor) -> None:
        self._writer, self._slots = writer, slots
        self.form: Form | None = None
        call = writer.last
        if call is not None and call.tokens == len(slots) and call.limit == num_threads():
            self._prepare(call)

    def _prepare(self, call: Call) -> None:
        self._call, self.form = call, call.form
        if call.run is not None:
            self._of_step = _OF_STEP.pack(self._slots.data_ptr(), *call.fixed)

    def expect(self, key: Tensor, value: Tensor) -> None:
        """Rows of the form of these come next, [tokens, Hkv, D]."""
        call = self._writer.last = self._writer.call(key, value, 1, len(self._slots))
        self._prepare(call)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Row t of key and value, [tokens, Hkv, D], to slot t of a layer."""
        writer, (_, _, _, run, copies, _) = self._writer, self._call
        if run is None:
            write_in_torch(writer.layers[layer], self._slots, key, value)
            return
        if copies:
            key, value = key.contiguous(), value.contiguous()
        record, keys, values = writer.record_of[layer], key.data_ptr(), value.data_ptr()
        _pack_call(writer.record, 0, 0, 1, record, keys, values, self._of_step)
        run()

    def write_all(self, key: Tensor, value: Tensor) -> None:
        """The same for all layers: key[layer] and value[layer] go to each of them."""
        writer = self._writer
        layers = len(writer.layers)
        call = writer.call(key, value, layers, len(self._slots))
        if call.run is None:
            for layer, pages in writer.layers.items():
                write_in_torch(pages, self._slots, key[layer], value[layer])
            return
        if call.copies:
            key, value = key.contiguous(), value.contiguous()
        records, keys, values = writer.table.data_ptr(), key.data_ptr(), value.data_ptr()
        of_step = _OF_STEP.pack(self._slots.data_ptr(), *call.fixed)
        _pack_call(writer.record, 0, 0, layers, records, keys, values, of_step)
        call.run()


def block_of(tokens: int, threads: int) -> int:
    """How many tokens a thread takes at a time.

    As many as there are for each, up to a limit: to take the next ones waits for all that was
    streamed so far.
    """
    return max(1, min(MOST_OF_BLOCK, -(-tokens // threads)))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(rows: Tensor) -> tuple[int, ...]:
    """From layer to layer, token to token and head to head."""
    strides = rows.stride()
    return strides[:3] if len(strides) == 4 else (0, *strides[:2])


def write_in_torch(pages: PageTensors, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """What `SlotWriter.write` means."""
    for side, rows in (("key", key), ("value", value)):
        if pages.key_scale is None:
            parts = {side: rows.detach().to(pages.key.dtype)}
        else:
            parts = dict(zip((side, f"{side}_scale"), quantise(rows), strict=True))
        for name, part in parts.items():
            place_rows(getattr(pages, name), slots, part)


def place_rows(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows [tokens, Hkv, ...] as they are into slots of pages [P, Hkv, page, ...]."""
    page_size = pages.shape[2]
    places = slots.div(page_size, rounding_mode="floor"), slots.remainder(page_size)
    pages.transpose(1, 2).index_put_(places, rows)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] in int8 and a scale for each, [...] of float32.

    The scale is the largest magnitude / 127, and numbers are rounded to even. A row of zeros has a
    scale of 0. One with an infinity or NaN has it in its scale, beside zeros: it is read as NaN.
    """
    numbers = rows.detach().float()
    scale = numbers.abs().amax(-1) / LARGEST_INT8
    usable = ((scale > 0) & (scale < torch.inf))[..., None]
    ratio = torch.where(usable, numbers / scale[..., None], 0)
    return ratio.clamp(-LARGEST_INT8, LARGEST_INT8).round().to(torch.int8), scale


def dequantise(rows: Tensor, scale: Tensor) -> Tensor:
    """What rows of int8 are read as."""
    return rows * scale[..., None]


@functools.cache
def _code(target: Target, source: torch.dtype, pages: torch.dtype) -> jit.Code:
    """The kernel of two dtypes."""
    names = [str(dtype).removeprefix("torch.") for dtype in (source, pages)]
    key = cache_key("append", repr(target), *names)
    return code_of(key, target, lambda: write_append(target, *names), [NAME])
