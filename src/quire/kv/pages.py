"""The memory of one layer: pages of keys and values that rows of tokens are written to.

    key    [P, Hkv, page, D]     row t of a page, head h: key[page, h, t]
    value  [P, Hkv, page, Dv]
    key_scale, value_scale  [P, Hkv, page]     where pages are of int8: row = int8 * scale

A slot is page * page_size + the row in it. Whoever calls has checked shapes, dtypes and slots.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checks import check_kind
from quire.checks.arguments import whole_number
from quire.errors import DtypeError, ShapeError
from quire.kv.table import Copies
from quire.runtime.append import PageTensors, place_rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8)

ROOM = 4  # addresses are set aside for so many times the pages that there are
WORTH_ROOM = 1 << 22  # bytes: what is less is copied in no time


@dataclass(frozen=True)
class PageShape:
    """What one page of a layer is made of."""

    heads: int
    page_size: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def checked(cls, dtype: torch.dtype, **sizes: int) -> PageShape:
        """One of these sizes, if pages can have them."""
        if dtype not in DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
            raise DtypeError(f"expected a dtype out of {names}, got {dtype}. Choose one of these.")
        for name, size in sizes.items():
            whole_number(name, size, minimum=1, advice="Give the size that the model has.")
        return cls(dtype=dtype, **sizes)

    def expect_rows(self, side: str, tensor: Tensor, rows: torch.Size, tokens: int) -> None:
        """An error unless `tensor` has rows for so many tokens that can be the keys or values."""
        wanted = (tokens, self.heads, self.head_dim if side == "key" else self.value_dim)
        if rows != wanted:
            raise ShapeError(
                f"expected {side} [tokens, Hkv, width] of {list(wanted)}, got {list(rows)}. Give a "
                f"row for each new token, those of the first sequence first."
            )
        if tensor.dtype not in FLOATS:
            raise DtypeError(f"expected {side} of floats, got {tensor.dtype}. Convert it.")
        check_kind(side, tensor)

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


class Room(NamedTuple):
    """Pages of one tensor, and of those to come as many as there are addresses for.

    Addresses cost nothing: a system gives them memory when they are first written to.
    """

    pages: Tensor
    memory: mmap.mmap | None = None  # behind the pages, if it is the system's

    @staticmethod
    def of(num_pages: int, page: tuple[int, ...], dtype: torch.dtype) -> Room:
        """So many pages that are not filled, and addresses for more where that is worth it."""
        size = ROOM * num_pages * math.prod(page) * dtype.itemsize
        if size >= WORTH_ROOM and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system that counts addresses as memory
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return Room(torch.frombuffer(memory, dtype=dtype).view(-1, *page), memory)
        return Room(torch.empty((num_pages, *page), dtype=dtype))

    def first(self, num_pages: int) -> Tensor:
        """So many pages, in huge pages of the system where there are some.

        Rows of one token lie far apart, and would each miss the table of addresses.
        """
        pages = self.pages[:num_pages]
        if self.memory is not None:
            with contextlib.suppress(OSError):
                self.memory.madvise(mmap.MADV_HUGEPAGE, 0, pages.nbytes)
        return pages


class LayerPages:
    """Keys and values of all pages of a layer."""

    def __init__(self, shape: PageShape) -> None:
        self.shape = shape
        page = shape.heads, shape.page_size
        parts = shape.parts.items()
        self._rooms = {name: Room.of(0, (*page, *row), dtype) for name, (row, dtype) in parts}
        self.tensors = PageTensors(**{name: room.pages for name, room in self._rooms.items()})

    def grow(self, num_pages: int) -> None:
        """Have so many pages: in place, or a copy. Who has read from here keeps the old memory."""
        if len(self.tensors.key) >= num_pages:  # memory ran out the last time, after this layer
            return
        rooms = dict(self._rooms)
        for name, (pages, _) in self._rooms.items():
            if len(pages) < num_pages:
                rooms[name] = Room.of(num_pages, pages.shape[1:], pages.dtype)
        new = {name: room.first(num_pages) for name, room in rooms.items()}
        for name, old in self._parts().items():
            if rooms[name] is not self._rooms[name]:
                new[name][: len(old)] = old
        self._rooms, self.tensors = rooms, PageTensors(**new)

    def copy(self, copies: Copies) -> None:
        """Copy whole pages."""
        source, target = (torch.from_numpy(pages).long() for pages in copies)
        for pages in self._parts().values():
            pages[target] = pages[source]

    def move(self, source: Tensor, target: Tensor, copies: Copies) -> None:
        """Copy whole pages, and then rows from slots to slots, as all of them were before."""
        rows = self.read(source)
        if len(copies.source):
            self.copy(copies)
        self.place(target, rows)

    def place(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Write rows as they were read: for each part, [tokens, Hkv, ...]."""
        for name, pages in self._parts().items():
            place_rows(pages, slots, rows[name])

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """The rows in some slots: for each part, [tokens, Hkv, ...]."""
        size = self.shape.page_size
        page, row = slots.div(size, rounding_mode="floor"), slots.remainder(size)
        return {name: pages.transpose(1, 2)[page, row] for name, pages in self._parts().items()}

    def _parts(self) -> dict[str, Tensor]:
        return {name: getattr(self.tensors, name) for name in self.shape.parts}
