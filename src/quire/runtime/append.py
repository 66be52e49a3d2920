"""Writing new rows into pages: by a compiled kernel, or in torch where none can be compiled."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen import jit
from quire.codegen.append import APPEND, NAME, write_append
from quire.codegen.target import Target
from quire.errors import BackendError
from quire.runtime.cache import cache_key
from quire.runtime.kernels import compiled_object
from quire.runtime.launch import launch, num_threads

WORTH_THREADS = 1 << 18  # bytes: a parallel region costs what it takes to copy a part of that


class PagePair(NamedTuple):
    """The pages of a layer, [P, Hkv, page, D] and [P, Hkv, page, Dv], contiguous."""

    key: Tensor
    value: Tensor


def append(pages: PagePair, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write row t of key and value, [tokens, Hkv, D], to slot t: page * page_size + row.

    Nothing is checked here; slots are contiguous, of int64, and name rows of the pages.
    """
    code = None
    if key.dtype == value.dtype and pages.key.is_cpu and key.is_cpu:
        code = _code(key.dtype, pages.key.dtype)
    if code is None:
        append_in_torch(pages, slots, key, value)
    else:
        _append(code, pages, slots, key, value)


def append_in_torch(pages: PagePair, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """What `append` means."""
    page_size = pages.key.shape[2]
    places = slots.div(page_size, rounding_mode="floor"), slots.remainder(page_size)
    for target, rows in zip(pages, (key, value), strict=True):
        target.transpose(1, 2).index_put_(places, rows.detach().to(target.dtype))


def _append(code: jit.Code, pages: PagePair, slots: Tensor, key: Tensor, value: Tensor) -> None:
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    tokens, heads, head_dim = key.shape
    value_dim = value.shape[2]
    record = ctypes.create_string_buffer(
        APPEND.pack_in_order(
            *(0, tokens, heads, pages.key.shape[2], slots.data_ptr()),
            *(key.data_ptr(), pages.key.data_ptr(), key.stride(0), key.stride(1), head_dim),
            *(value.data_ptr(), pages.value.data_ptr(), value.stride(0), value.stride(1)),
            value_dim,
        ),
        APPEND.size,
    )
    size = tokens * heads * (head_dim + value_dim) * pages.key.element_size()
    threads = num_threads() if size >= WORTH_THREADS else 1
    launch(code.address(NAME), ctypes.addressof(record), threads)


@functools.cache
def _code(source: torch.dtype, pages: torch.dtype) -> jit.Code | None:
    """The kernel of two dtypes; none on a machine that it cannot be compiled for."""
    try:
        target = Target.host()
    except BackendError:
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (source, pages)]
    key = cache_key("append", repr(target), *names)
    image = compiled_object(key, target, lambda: write_append(target, *names).text)
    return jit.load(image, [NAME])
