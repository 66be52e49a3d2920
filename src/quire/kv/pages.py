"""The memory of one layer: pages of keys and values that rows of tokens are written to.

    key    [P, Hkv, page, D]     row t of a page, head h: key[page, h, t]
    value  [P, Hkv, page, Dv]
    key_scale, value_scale  [P, Hkv, page]     where pages are of int8: row = int8 * scale

A slot is page * page_size + the row in it. Whoever calls has checked shapes, dtypes and slots.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kv.table import Copies
from quire.runtime.append import PageTensors, place_rows

WORTH_HUGE = 1 << 22  # bytes: two huge pages of the system


@dataclass(frozen=True)
class PageShape:
    """What one page of a layer is made of."""

    heads: int
    page_size: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Its tensors by name: the size of a row of one head, () for a scale, and the dtype."""
        rows = {"key": ((self.head_dim,), self.dtype), "value": ((self.value_dim,), self.dtype)}
        if self.dtype != torch.int8:
            return {**rows}
        return {**rows, "key_scale": ((), torch.float32), "value_scale": ((), torch.float32)}

    @property
    def num_bytes(self) -> int:
        """Of one page: keys, values and scales."""
        rows = self.heads * self.page_size
        return rows * sum(math.prod(row) * dtype.itemsize for row, dtype in self.parts.values())


class LayerPages:
    """Keys and values of all pages of a layer."""

    def __init__(self, shape: PageShape) -> None:
        self._shape = shape
        self.tensors = PageTensors(**self._empty(0))

    def _empty(self, num_pages: int) -> dict[str, Tensor]:
        page = self._shape.heads, self._shape.page_size
        parts = self._shape.parts.items()
        return {name: _empty((num_pages, *page, *row), dtype) for name, (row, dtype) in parts}

    def grow(self, num_pages: int) -> None:
        """Have so many pages. What was read from here before keeps the old memory."""
        old = self.tensors
        if len(old.key) < num_pages:  # if not, memory ran out the last time, after this layer
            new = self._empty(num_pages)
            for name, pages in new.items():
                pages[: len(old.key)] = getattr(old, name)
            self.tensors = PageTensors(**new)

    def copy(self, copies: Copies) -> None:
        """Copy whole pages."""
        source, target = (torch.from_numpy(pages).long() for pages in copies)
        for pages in self._parts().values():
            pages[target] = pages[source]

    def place(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Write rows as they were read: for each part, [tokens, Hkv, ...]."""
        for name, pages in self._parts().items():
            place_rows(pages, slots, rows[name])

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """The rows in some slots: for each part, [tokens, Hkv, ...]."""
        size = self._shape.page_size
        page, row = slots.div(size, rounding_mode="floor"), slots.remainder(size)
        return {name: pages.transpose(1, 2)[page, row] for name, pages in self._parts().items()}

    def _parts(self) -> dict[str, Tensor]:
        return {name: getattr(self.tensors, name) for name in self._shape.parts}


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that is not filled; in huge pages of the system where it is large enough for some.

    Rows of one token lie far apart, and would each miss the table of addresses.
    """
    size = math.prod(shape) * dtype.itemsize
    if size >= WORTH_HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype).view(shape)
        except OSError:
            pass  # a system without them, or without memory, of which torch tells
    return torch.empty(shape, dtype=dtype)
