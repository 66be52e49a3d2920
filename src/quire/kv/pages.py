"""The memory of one layer: pages of keys and values.

    key    [P, Hkv, page, D]     row t of a page, head h: key[page, h, t]
    value  [P, Hkv, page, Dv]
    key_scale, value_scale  [P, Hkv, page]     if pages are scaled: row = numbers * scale

A slot is page * page_size + the row in the page. Callers have checked shapes, dtypes and slots.
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

from quire.checks import SCALED_DTYPES, check_kind, check_unmapped
from quire.checks.arguments import dtype_name, whole_number
from quire.errors import ArgumentError, DtypeError, ShapeError
from quire.kv.table import Copies
from quire.runtime.append import PageTensors, place_rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, *SCALED_DTYPES)

ROOM = 4  # a tensor reserves addresses for this many times its pages, so it can grow in place
WORTH_ROOM = 1 << 22  # bytes: smaller tensors are copied when they grow, which is fast


@dataclass(frozen=True)
class PageShape:
    """The sizes and dtype of one page of a layer, and whether its rows have scales."""

    heads: int
    page_size: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scaled: bool

    @classmethod
    def checked(cls, dtype: torch.dtype, scaled: bool | None, **sizes: int) -> PageShape:
        """Return a shape, or raise if a page cannot have this dtype or these sizes.

        If `scaled` is None, all rows that may have scales do.
        """
        if dtype not in DTYPES:
            names = ", ".join(map(dtype_name, DTYPES))
            raise DtypeError(f"dtype must be one of {names}, but is {dtype}. Choose one of these.")
        may = dtype in SCALED_DTYPES
        if scaled is not None and scaled != may and (scaled or dtype == torch.int8):
            raise ArgumentError(
                f"scales must be True for int8, and False for floats of more than 8 bits, but is "
                f"{scaled} for {dtype_name(dtype)}. Leave it out, or choose another dtype."
            )
        for name, size in sizes.items():
            whole_number(name, size, minimum=1, advice="Give the size that the model has.")
        return cls(dtype=dtype, scaled=may if scaled is None else scaled, **sizes)

    def expect_rows(self, side: str, tensor: Tensor, rows: torch.Size, tokens: int) -> None:
        """Raise unless `tensor` can be the keys or values ("key" or "value") of new tokens.

        `rows` is its shape without a dimension of layers, which must be [tokens, Hkv, width].
        """
        wanted = (tokens, self.heads, self.head_dim if side == "key" else self.value_dim)
        if rows != wanted:
            raise ShapeError(
                f"{side} must be [tokens, Hkv, width] of {list(wanted)}, but is {list(rows)}. Give "
                f"a row for each new token, those of the first sequence first."
            )
        if tensor.dtype not in FLOATS:
            raise DtypeError(
                f"{side} must hold floats, but is {dtype_name(tensor.dtype)}. Convert it with .to."
            )
        check_kind(side, tensor)
        check_unmapped(side, tensor)

    def expect_layers(self, side: str, tensor: Tensor, layers: int, like: Tensor) -> None:
        """Raise unless `tensor` [layers, tokens, Hkv, width] has the tokens of `like`."""
        if tensor.dim() != 4 or len(tensor) != layers:
            raise ShapeError(
                f"{side} must be [layers, tokens, Hkv, width] of {layers} layers, but has shape "
                f"{list(tensor.shape)}. Stack the layers, or write one by one."
            )
        self.expect_rows(side, tensor, tensor.shape[1:], like.shape[1])

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of a page by name: the shape of one row (() for a scale) and the dtype."""
        rows = {"key": ((self.head_dim,), self.dtype), "value": ((self.value_dim,), self.dtype)}
        if not self.scaled:
            return {**rows}
        return {**rows, "key_scale": ((), torch.float32), "value_scale": ((), torch.float32)}

    @property
    def num_bytes(self) -> int:
        """The size of one page with its keys, values and scales."""
        rows = self.heads * self.page_size
        return rows * sum(math.prod(row) * dtype.itemsize for row, dtype in self.parts.values())


class Room(NamedTuple):
    """A tensor with more pages than are used, so that it can grow in place.

    The pages that are not used take no memory: the system provides it when they are first written.
    """

    pages: Tensor
    memory: mmap.mmap | None = None  # the mapping that holds the pages, if there is one

    @staticmethod
    def of(num_pages: int, page: tuple[int, ...], dtype: torch.dtype) -> Room:
        """Return at least `num_pages` pages with undefined content, more if they are large."""
        size = ROOM * num_pages * math.prod(page) * dtype.itemsize
        if size >= WORTH_ROOM and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # some systems count unused addresses as memory
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return Room(torch.frombuffer(memory, dtype=dtype).view(-1, *page), memory)
        return Room(torch.empty((num_pages, *page), dtype=dtype))

    def first(self, num_pages: int) -> Tensor:
        """Return the first `num_pages` pages, in huge pages of the system if it has them.

        Rows of one token lie far apart. In small system pages each row would miss the TLB.
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
        """Grow to `num_pages` pages, in place or by a copy.

        After a copy, tensors that were handed out earlier still refer to the old memory.
        """
        if len(self.tensors.key) >= num_pages:  # the last growth failed at a later layer
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

    def place(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Write rows to slots. `rows` has what `read` returns: [tokens, Hkv, ...] for each part."""
        for name, pages in self._parts().items():
            place_rows(pages, slots, rows[name])

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """Return the rows in some slots: [tokens, Hkv, ...] for each part."""
        size = self.shape.page_size
        page, row = slots.div(size, rounding_mode="floor"), slots.remainder(size)
        return {name: pages.transpose(1, 2)[page, row] for name, pages in self._parts().items()}

    def _parts(self) -> dict[str, Tensor]:
        return {name: getattr(self.tensors, name) for name in self.shape.parts}
