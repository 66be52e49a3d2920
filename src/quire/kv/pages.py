"""The memory of one layer: pages of keys and values.

    key    [P, Hkv, page, D]     row t of a page, head h: key[page, h, t]
    value  [P, Hkv, page, Dv]    or nothing, if values are the first Dv numbers of keys
    key_scale, value_scale  [P, Hkv, page]     if pages are scaled: row = numbers * scale

A slot is page * page_size + the row in the page. Callers have checked shapes, dtypes and slots.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.checks import SCALED_DTYPES, check_kind, check_unmapped
from quire.checks.arguments import dtype_name, whole_number
from quire.errors import ArgumentError, DtypeError, ShapeError
from quire.kv.table import Copies
from quire.memory import Paged
from quire.runtime.append import PageTensors, dequantise, place_rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, *SCALED_DTYPES)

View: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""The page table [B, columns], lengths [B] and first pages [B] of sequences, as in `Paged`."""

WORTH_ROOM = 1 << 20  # bytes: smaller tensors are copied when they grow, which is fast
ROOM = 4  # times as many pages, if the system has no addresses for all


@dataclass(frozen=True)
class PageShape:
    """The sizes and dtype of one page of a layer.

    `scaled` says whether rows have scales, `latent` whether values are a part of the keys.
    """

    heads: int
    page_size: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scaled: bool
    latent: bool = False

    @classmethod
    def checked(
        cls,
        dtype: torch.dtype,
        scaled: bool | None,
        *,
        latent: int | None,
        value_dim: int | None,
        **sizes: int,
    ) -> PageShape:
        """Return a shape, or raise if a page cannot have this dtype or these sizes.

        If `scaled` is None, all rows that may have scales do. If neither `latent` nor `value_dim`
        is given, values are as wide as keys.
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
        if latent is not None and value_dim is not None:
            raise ArgumentError(
                f"latent or value_dim must be None, but they are {latent} and {value_dim}. Give "
                f"latent if values are the first numbers of keys, else value_dim."
            )
        for name, size in {**sizes, "latent": latent, "value_dim": value_dim}.items():
            if size is not None:
                whole_number(name, size, minimum=1, advice="Give the size that the model has.")
        width = sizes["head_dim"] if value_dim is None else value_dim
        if latent is not None and latent > width:
            raise ArgumentError(
                f"latent must be at most head_dim, {width}, since values are a part of the keys, "
                f"but is {latent}. Give value_dim for values of their own."
            )
        return cls(
            dtype=dtype,
            scaled=may if scaled is None else scaled,
            value_dim=width if latent is None else latent,
            latent=latent is not None,
            **sizes,
        )

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that are stored: "key", and "value" unless values are a part of the keys."""
        return ("key",) if self.latent else ("key", "value")

    def value_rows(self, key: Tensor, value: Tensor | None) -> Tensor:
        """Return the rows that are given as values: those of the keys if values are a part."""
        if (value is None) != self.latent:
            raise ArgumentError(
                f"value must be {'None' if self.latent else 'a tensor'} in a cache made "
                f"{'with' if self.latent else 'without'} latent, but is "
                f"{'None' if value is None else 'a tensor'}. Values of a latent cache are a part "
                f"of its keys, and others are stored beside them."
            )
        return key if value is None else value

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
        is_stored = tensor.dtype == self.dtype and not self.scaled
        if tensor.dtype not in FLOATS and not is_stored:
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
        widths = {"key": self.head_dim, "value": self.value_dim}
        rows = {side: ((widths[side],), self.dtype) for side in self.sides}
        scales = {f"{side}_scale": ((), torch.float32) for side in self.sides if self.scaled}
        return {**rows, **scales}

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
    def of(num_pages: int, most: int, page: tuple[int, ...], dtype: torch.dtype) -> Room:
        """Return at least `num_pages` pages with undefined content, up to `most` if large."""
        one = math.prod(page) * dtype.itemsize
        if num_pages * one >= WORTH_ROOM and hasattr(mmap, "MADV_HUGEPAGE"):
            for count in (most, ROOM * num_pages):
                # Some systems count unused addresses as memory.
                with contextlib.suppress(OSError, OverflowError):
                    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                    memory = mmap.mmap(-1, count * one, flags=flags)
                    return Room(torch.frombuffer(memory, dtype=dtype).view(-1, *page), memory)
        return Room(torch.empty((num_pages, *page), dtype=dtype, device="cpu"))

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
        self._rooms = {name: Room.of(0, 0, (*page, *row), dtype) for name, (row, dtype) in parts}
        self.tensors = PageTensors(**{name: room.pages for name, room in self._rooms.items()})

    def grow(self, num_pages: int, most: int) -> None:
        """Grow to `num_pages` pages, in place or by a copy; they are `most` at last.

        After a copy, tensors that were handed out earlier still refer to the old memory.
        """
        if len(self.tensors.key) >= num_pages:  # the last growth failed at a later layer
            return
        rooms = dict(self._rooms)
        for name, (pages, _) in self._rooms.items():
            if len(pages) < num_pages:
                rooms[name] = Room.of(num_pages, most, pages.shape[1:], pages.dtype)
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

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values in some slots, [tokens, Hkv, D]: as float32 if scaled."""
        held, shape = self.read(slots), self.shape
        found = [
            dequantise(held[side], held[f"{side}_scale"]) if shape.scaled else held[side]
            for side in shape.sides
        ]
        return found[0], found[0][..., : shape.value_dim] if shape.latent else found[1]

    def memory(self, view: View) -> Paged:
        """Return the memory of the sequences of a view."""
        key, value, key_scale, value_scale = self.tensors
        if value is None:
            value, value_scale = key[..., : self.shape.value_dim], key_scale
        return Paged(key, value, *view, key_scale=key_scale, value_scale=value_scale)

    def _parts(self) -> dict[str, Tensor]:
        return {name: getattr(self.tensors, name) for name in self.shape.parts}
