"""Writes new rows into pages: by a compiled kernel, or in torch if none can be compiled.

A `PageWriter` has the pages of some layers; a `SlotWriter` has the slots of the new rows of a step,
the same in all layers. All that is the same in every layer is computed once, so that a layer costs
two or three microseconds besides the bytes it moves.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.checks.arguments import dtype_name
from quire.codegen.kernels.append import APPEND, LAYER, NAME, SIDES, write_append
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.phases.storage import storage
from quire.runtime.cache import cache_key, code_of, processor_obstacle
from quire.runtime.launch import num_threads, ready

WORTH_THREADS = 1 << 18  # bytes to write; for fewer, starting threads takes too long
WORTH_STREAMING = 1 << 22  # bytes of a layer's keys; more do not fit in a cache
LINE = 64  # bytes of a cache line
MOST_OF_BLOCK = 64  # tokens that a thread takes at a time, so that all threads get some

# APPEND has the fields of a call, then those of a step from "slots", those of pages from "heads".
_FIRST_OF_PAGES = APPEND.index("heads")
_OF_STEP = struct.Struct(f"{_FIRST_OF_PAGES - APPEND.index('slots')}q")
_OF_CALL = struct.Struct(f"8x{APPEND.index('slots') - 1}q{_OF_STEP.size}s")  # 8x: the counter is 0


class PageTensors(NamedTuple):
    """The pages of a layer, [P, Hkv, page, D] and [P, Hkv, page, Dv], contiguous.

    If values are a part of the keys, there are no pages of values, and no scales of them.
    Pages of int8 have float32 scales [P, Hkv, page], and those of float8 may: row = number * scale.
    """

    key: Tensor
    value: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


class PageWriter:
    """The pages of some layers, all of one shape and dtype, and the record of the kernel."""

    def __init__(self, layers: Mapping[int, PageTensors]) -> None:
        self.record = (ctypes.c_int64 * len(APPEND))()
        self._argument = ctypes.addressof(self.record)
        # fill(layers, pages, key_rows, value_rows, fields of the step)
        self.fill = functools.partial(_OF_CALL.pack_into, self.record, 0)
        self._kernels: dict[torch.dtype, int | None] = {}
        self.last: WriteCall | None = None  # the last for one layer; the next step is like it
        self._calls: dict[int, WriteCall] = {}  # the last call by number of layers
        self.turn_to(layers)

    def turn_to(self, layers: Mapping[int, PageTensors]) -> None:
        """Write to these pages from now on; existing `SlotWriter`s do, too."""
        self.layers = dict(layers)
        records = [(layer, *map(_address, pages)) for layer, pages in self.layers.items()]
        self.table = torch.tensor(records, dtype=torch.int64, device="cpu")
        start = self.table.data_ptr()
        self.record_of = {
            layer: start + place * LAYER.size for place, layer in enumerate(self.layers)
        }
        pages = next(iter(self.layers.values()))
        self._dtype, self._on_cpu = pages.key.dtype, pages.key.is_cpu
        self._scaled = pages.key_scale is not None
        self._sides = ("key",) if pages.value is None else SIDES
        _, heads, page_size, head_dim = pages.key.shape
        value_dim = 0 if pages.value is None else pages.value.shape[3]
        self._token_numbers = heads * (head_dim + value_dim)
        sides = (head_dim, self._worth_streaming("key"), value_dim, self._worth_streaming("value"))
        self.record[_FIRST_OF_PAGES:] = [heads, page_size, *sides]

    def _worth_streaming(self, side: str) -> bool:
        """Return whether rows are whole cache lines, of more memory than caches hold."""
        tensors = [getattr(pages, side) for pages in self.layers.values()]
        if tensors[0] is None:
            return False
        row = tensors[0].shape[3] * tensors[0].element_size()
        aligned = row % LINE == 0 and all(tensor.data_ptr() % LINE == 0 for tensor in tensors)
        return aligned and tensors[0].nbytes >= WORTH_STREAMING

    def kernel(self, key: Tensor, value: Tensor) -> int | None:
        """Return the address of the kernel for these rows; None if it cannot read them."""
        if key.dtype != value.dtype or not (key.is_cpu and value.is_cpu and self._on_cpu):
            return None
        if key.dtype not in self._kernels:
            runs = processor_obstacle() is None
            kinds = key.dtype, self._dtype, self._scaled, self._sides
            code = _code(Target.host(), *kinds) if runs else None
            self._kernels[key.dtype] = None if code is None else code.address(NAME)
        return self._kernels[key.dtype]

    def call(self, key: Tensor, value: Tensor, layers: int, tokens: int) -> WriteCall:
        """Return how to write rows of the form of these, [tokens, Hkv, D] in each layer."""
        form, limit = form_of(key, value), num_threads()
        known = self._calls.get(layers)
        if known is None or (known.form, known.limit) != (form, limit):
            new = WriteCall(form, tokens, limit)
            known = self._calls[layers] = self._with_kernel(new, key, value, layers)
        return known

    def _with_kernel(self, call: WriteCall, key: Tensor, value: Tensor, layers: int) -> WriteCall:
        """Return the call with a kernel, if one can read these rows."""
        kernel, tokens = self.kernel(key, value), call.tokens
        if kernel is None:
            return call
        copies = not key.stride(-1) == value.stride(-1) == 1
        if copies:
            key, value = key.contiguous(), value.contiguous()
        size = layers * tokens * self._token_numbers * key.element_size()
        threads = call.limit if size >= WORTH_THREADS else 1
        block = block_of(layers * tokens, threads)
        fixed = tokens, block, *_strides(key), *_strides(value)
        run = ready(kernel, self._argument, threads)
        return call._replace(run=run, copies=copies, fixed=fixed)

    def at(self, slots: Tensor) -> SlotWriter:
        """Return a writer to `slots` [tokens], contiguous int64: page * page_size + row in page."""
        return SlotWriter(self, slots)


Form: TypeAlias = tuple[object, ...]


def form_of(key: Tensor, value: Tensor) -> Form:
    """Return class, dtype, device, shape and strides of two tensors, to be compared."""
    # One flat tuple: this is computed for every layer, and nested or starred ones take longer.
    return (
        type(key), key.dtype, key.is_cpu, key.shape, key.stride(),
        type(value), value.dtype, value.is_cpu, value.shape, value.stride(),
    )  # fmt: skip


class WriteCall(NamedTuple):
    """How to write rows of one form."""

    form: Form
    tokens: int
    limit: int  # the number of threads that a kernel may use
    run: Callable[[], None] | None = None  # runs the kernel; None if torch writes
    copies: bool = False  # whether rows must be made contiguous first
    fixed: tuple[int, ...] = ()  # tokens, tokens of a block, strides


class SlotWriter:
    """Writes new rows to slots of one layer after the other, or of all layers at once.

    `expect` computes all that follows from the form of the rows, so that each layer costs little
    more than the bytes it moves. `write` checks nothing: its rows must have the form `self.form`,
    which stays the same from step to step if the number of tokens does.
    """

    __slots__ = ("_call", "_of_step", "_slots", "_writer", "form")

    def __init__(self, writer: PageWriter, slots: Tensor) -> None:
        self._writer, self._slots = writer, slots
        self.form: Form | None = None
        call = writer.last
        if call is not None and call.tokens == len(slots) and call.limit == num_threads():
            self._prepare(call)

    def _prepare(self, call: WriteCall) -> None:
        self._call, self.form = call, call.form
        if call.run is not None:
            self._of_step = _OF_STEP.pack(self._slots.data_ptr(), *call.fixed)

    def expect(self, key: Tensor, value: Tensor) -> None:
        """Prepare to write rows of the form of these, [tokens, Hkv, D] and [tokens, Hkv, Dv]."""
        call = self._writer.last = self._writer.call(key, value, 1, len(self._slots))
        self._prepare(call)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write rows [tokens, Hkv, D] and [tokens, Hkv, Dv] to the slots of a layer."""
        writer, call = self._writer, self._call
        if call.run is None:
            write_in_torch(writer.layers[layer], self._slots, key, value)
            return
        if call.copies:
            key, value = key.contiguous(), value.contiguous()
        record = writer.record_of[layer]
        writer.fill(1, record, key.data_ptr(), value.data_ptr(), self._of_step)
        call.run()

    def record(self, key: Tensor, value: Tensor) -> tuple[int, bytes] | None:
        """Return the kernel and its record for rows of a layer; None if no kernel writes them.

        The record names no layer: its pages are at `PageWriter.record_of[layer]`.
        """
        self.expect(key, value)
        kernel = self._writer.kernel(key, value)
        if kernel is None or self._call.run is None or self._call.copies:
            return None
        self._writer.fill(1, 0, key.data_ptr(), value.data_ptr(), self._of_step)
        return kernel, bytes(self._writer.record)

    @property
    def pages(self) -> Tensor:
        """The pages of all layers in order, a LAYER record for each."""
        return self._writer.table

    @property
    def address(self) -> int:
        """Where the slots are."""
        return self._slots.data_ptr()

    def write_all(self, key: Tensor, value: Tensor) -> None:
        """Write key[layer] and value[layer] to the slots of each layer."""
        writer = self._writer
        layers = len(writer.layers)
        call = writer.call(key, value, layers, len(self._slots))
        if call.run is None:
            for layer, pages in writer.layers.items():
                write_in_torch(pages, self._slots, key[layer], value[layer])
            return
        if call.copies:
            key, value = key.contiguous(), value.contiguous()
        records, of_step = (
            writer.table.data_ptr(),
            _OF_STEP.pack(self._slots.data_ptr(), *call.fixed),
        )
        writer.fill(layers, records, key.data_ptr(), value.data_ptr(), of_step)
        call.run()


def block_of(tokens: int, threads: int) -> int:
    """Return how many tokens a thread takes at a time.

    Before it takes more, it waits for all streamed stores, so blocks are as large as possible.
    """
    return max(1, min(MOST_OF_BLOCK, -(-tokens // threads)))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(rows: Tensor) -> tuple[int, ...]:
    """Return the strides over layers (0 for rows of one layer), tokens and heads."""
    strides = rows.stride()
    return strides[:3] if len(strides) == 4 else (0, *strides[:2])


def write_in_torch(pages: PageTensors, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write rows [tokens, Hkv, D] to slots [tokens], as the kernel does."""
    for side, rows in (("key", key), ("value", value)):
        if getattr(pages, side) is None:
            continue
        if pages.key_scale is None:
            parts = {side: rows.detach().to(pages.key.dtype)}
        else:
            scaled = quantise(rows, pages.key.dtype)
            parts = dict(zip((side, f"{side}_scale"), scaled, strict=True))
        for name, part in parts.items():
            place_rows(getattr(pages, name), slots, part)


def place_rows(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Copy rows [tokens, Hkv, ...] into slots [tokens] of pages [P, Hkv, page, ...]."""
    page_size = pages.shape[2]
    indices = slots.div(page_size, rounding_mode="floor"), slots.remainder(page_size)
    pages.transpose(1, 2).index_put_(indices, rows)


def quantise(rows: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return rows [..., D] as int8 or float8, and their float32 scales [...].

    The scale is the largest magnitude / the largest number of the dtype (127 for int8); numbers are
    rounded half to even. A row of zeros has the scale 0. A row with inf or NaN becomes zeros with
    that scale, so it is read as NaN.
    """
    largest = storage(dtype_name(dtype)).largest
    numbers = rows.detach().float()
    scale = numbers.abs().amax(-1) / largest
    usable = ((scale > 0) & (scale < torch.inf))[..., None]
    ratio = torch.where(usable, numbers / scale[..., None], 0)
    ratio = ratio.clamp(-largest, largest)
    return (ratio.round() if dtype == torch.int8 else ratio).to(dtype), scale


def dequantise(rows: Tensor, scale: Tensor) -> Tensor:
    """Return rows of int8 or float8 [..., D] times their scales [...]."""
    return rows.float() * scale[..., None]


@functools.cache
def _code(
    target: Target, source: torch.dtype, pages: torch.dtype, scaled: bool, sides: tuple[str, ...]
) -> jit.Code:
    """Return the kernel that copies rows of one dtype to pages of another, perhaps with scales."""
    names = dtype_name(source), dtype_name(pages)
    key = cache_key("append", repr(target), *names, str(scaled), *sides)

    def write() -> Module:
        return write_append(target, *names, scaled=scaled, sides=sides)

    return code_of(key, target, write, [NAME])
