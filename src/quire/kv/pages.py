"""The memory of one layer: pages of keys and values that rows of tokens are written to.

    key    [P, Hkv, page, D]     row t of a page, head h: key[page, h, t]
    value  [P, Hkv, page, Dv]

A slot is page * page_size + the row in it. Whoever calls has checked shapes, dtypes and slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kv.table import Copies
from quire.runtime.append import PagePair, append


@dataclass(frozen=True)
class PageShape:
    """What one page of a layer is made of."""

    heads: int
    page_size: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the keys and values of one page."""
        width = self.head_dim + self.value_dim
        return self.heads * self.page_size * width * self.dtype.itemsize


class LayerPages:
    """Keys and values of all pages of a layer."""

    def __init__(self, shape: PageShape) -> None:
        self._shape = shape
        self.key = self._empty(0, shape.head_dim)
        self.value = self._empty(0, shape.value_dim)

    def _empty(self, num_pages: int, width: int) -> Tensor:
        shape = self._shape
        return torch.empty(num_pages, shape.heads, shape.page_size, width, dtype=shape.dtype)

    def grow(self, num_pages: int) -> None:
        """Have so many pages. What was read from here before keeps the old memory."""
        self.key = self._grown(self.key, num_pages)
        self.value = self._grown(self.value, num_pages)

    def _grown(self, old: Tensor, num_pages: int) -> Tensor:
        if len(old) >= num_pages:  # memory ran out the last time, after this layer
            return old
        new = self._empty(num_pages, old.shape[-1])
        new[: len(old)] = old
        return new

    def copy(self, copies: Copies) -> None:
        """Copy whole pages."""
        source, target = (torch.from_numpy(pages).long() for pages in copies)
        for pages in (self.key, self.value):
            pages[target] = pages[source]

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write rows [tokens, Hkv, D] of keys, and as many of values."""
        append(PagePair(self.key, self.value), slots, key, value)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The rows in some slots, [tokens, Hkv, D]."""
        size = self._shape.page_size
        page, row = slots.div(size, rounding_mode="floor"), slots.remainder(size)
        return self.key.transpose(1, 2)[page, row], self.value.transpose(1, 2)[page, row]
