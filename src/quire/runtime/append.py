"""Writing new rows into pages: by a compiled kernel, or in torch where none can be compiled.

A `PageWriter` knows the pages of some layers. What does not change from call to call is written
down once, and so a call costs a few microseconds besides the bytes it moves.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen import jit
from quire.codegen.append import APPEND, LARGEST, LAYER, NAME, write_append
from quire.codegen.target import Target
from quire.errors import BackendError
from quire.runtime.cache import cache_key
from quire.runtime.kernels import code_of
from quire.runtime.launch import launch, num_threads

WORTH_THREADS = 1 << 18  # bytes: a parallel region costs what it takes to copy a part of that
WORTH_STREAMING = 1 << 22  # bytes of a layer's keys: as many are in no cache when they are written
LINE = 64  # bytes of a cache line

_CHANGING = APPEND.index("heads")  # the fields before are those of one call


class PageTensors(NamedTuple):
    """The pages of a layer, [P, Hkv, page, D] and [P, Hkv, page, Dv], contiguous.

    Pages of int8 have a scale for each row, [P, Hkv, page] of float32: row = int8 * scale.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


class PageWriter:
    """Writes rows to slots: page * page_size + the row in it.

    Nothing is checked here; slots are contiguous, of int64, and name rows of the pages. The pages
    of all layers are alike.
    """

    def __init__(self, layers: Mapping[int, PageTensors]) -> None:
        self._layers = dict(layers)
        records = [(layer, *map(_address, pages)) for layer, pages in self._layers.items()]
        self._table = torch.tensor(records, dtype=torch.int64)
        start = self._table.data_ptr()
        self._record_of = {
            layer: start + place * LAYER.size for place, layer in enumerate(self._layers)
        }
        pages = next(iter(self._layers.values()))
        self._dtype, self._on_cpu = pages.key.dtype, pages.key.is_cpu
        _, heads, page_size, head_dim = pages.key.shape
        value_dim = pages.value.shape[3]
        self._token_numbers = heads * (head_dim + value_dim)
        self._kernels: dict[torch.dtype, int | None] = {}
        self._record = (ctypes.c_int64 * len(APPEND))()
        self._argument = ctypes.addressof(self._record)
        self._record[_CHANGING:] = [
            *(heads, page_size),
            *(head_dim, self._worth_streaming("key"), value_dim, self._worth_streaming("value")),
        ]

    def _worth_streaming(self, side: str) -> bool:
        """Whole lines, each written as a whole, into more memory than caches hold."""
        every = [getattr(pages, side) for pages in self._layers.values()]
        row = every[0].shape[3] * every[0].element_size()
        aligned = row % LINE == 0 and all(pages.data_ptr() % LINE == 0 for pages in every)
        return aligned and every[0].nbytes >= WORTH_STREAMING

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Row t of key and value, [tokens, Hkv, D], to slot t of a layer."""
        kernel = self._kernel(key, value)
        if kernel is None:
            write_in_torch(self._layers[layer], slots, key, value)
        else:
            self._run(kernel, self._record_of[layer], 1, slots, key, value)

    def write_all(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """The same for all layers: key[layer] and value[layer] go to each of them."""
        kernel = self._kernel(key, value)
        if kernel is None:
            for layer, pages in self._layers.items():
                write_in_torch(pages, slots, key[layer], value[layer])
        else:
            self._run(kernel, self._table.data_ptr(), len(self._layers), slots, key, value)

    def _kernel(self, key: Tensor, value: Tensor) -> int | None:
        """Where the code is, if these rows can be read by it."""
        if key.dtype != value.dtype or not (key.is_cpu and value.is_cpu and self._on_cpu):
            return None
        if key.dtype not in self._kernels:
            code = _code(key.dtype, self._dtype)
            self._kernels[key.dtype] = None if code is None else code.address(NAME)
        return self._kernels[key.dtype]

    def _run(
        self, kernel: int, record: int, layers: int, slots: Tensor, key: Tensor, value: Tensor
    ) -> None:
        tokens = len(slots)
        key, value = _dense_rows(key), _dense_rows(value)
        self._record[:_CHANGING] = [
            *(0, layers, record, tokens, slots.data_ptr()),
            *(key.data_ptr(), *_strides(key), value.data_ptr(), *_strides(value)),
        ]
        size = layers * tokens * self._token_numbers * key.element_size()
        launch(kernel, self._argument, num_threads() if size >= WORTH_THREADS else 1)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _strides(rows: Tensor) -> tuple[int, ...]:
    """From layer to layer, token to token and head to head."""
    strides = rows.stride()
    return strides[:3] if len(strides) == 4 else (0, *strides[:2])


def write_in_torch(pages: PageTensors, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """What `PageWriter.write` means."""
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
    scale = numbers.abs().amax(-1) / LARGEST
    usable = ((scale > 0) & (scale < torch.inf))[..., None]
    ratio = torch.where(usable, numbers / scale[..., None], 0)
    return ratio.clamp(-LARGEST, LARGEST).round().to(torch.int8), scale


def dequantise(rows: Tensor, scale: Tensor) -> Tensor:
    """What rows of int8 are read as."""
    return rows * scale[..., None]


@functools.cache
def _code(source: torch.dtype, pages: torch.dtype) -> jit.Code | None:
    """The kernel of two dtypes; none on a machine that it cannot be compiled for."""
    try:
        target = Target.host()
    except BackendError:
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (source, pages)]
    key = cache_key("append", repr(target), *names)
    return code_of(key, target, lambda: write_append(target, *names), [NAME])
