"""Captured tensors indexed by symbols.

`table[b, h]` of a tensor with three dimensions is a `PartialLoad`; one more index makes a `load`.
So `table[b][h][q_idx // 16]`, `table[b, :, q_idx][h]` and `table[..., q_idx]` all work.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import EllipsisType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from quire.errors import CapturedIndexError
from quire.ir.graph import Node
from quire.ir.promote import promote
from quire.ir.source import here
from quire.ir.symbol import FORMS, Recorded, Recorder, Symbol, find_recorder, unsupported


class PartialLoad(Recorded):
    """A captured tensor of which some dimensions have been indexed by symbols."""

    __slots__ = ("indices", "tensor")

    def __init__(
        self, tensor: Tensor, indices: tuple[Node | None, ...], recorder: Recorder
    ) -> None:
        self.tensor = tensor
        self.indices = indices
        self.recorder = recorder

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self.tensor.device

    @property
    def shape(self) -> torch.Size:
        """The sizes of the dimensions that have no index yet."""
        sizes = zip(self.tensor.shape, self.indices, strict=True)
        return torch.Size([size for size, index in sizes if index is None])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Symbol | PartialLoad]:
        return (self[position] for position in range(len(self)))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a row of a captured tensor has no attribute {name!r}")
        raise unsupported(f"Tensor.{name} of a row of a captured tensor")

    def __getitem__(self, index: object) -> Symbol | PartialLoad:
        items = index if isinstance(index, tuple) else (index,)
        indices = list(self.indices)
        free = [dim for dim, bound in enumerate(indices) if bound is None]
        for dim, item in _match_dimensions(items, free):
            indices[dim] = self._index_node(item)
        if None in indices:
            return PartialLoad(self.tensor, tuple(indices), self.recorder)
        args = tuple(bound for bound in indices if bound is not None)
        slot = self.recorder.slot(self.tensor)
        return self.recorder.symbol("load", args, self.tensor.dtype, slot)

    def _index_node(self, item: object) -> Node:
        value = self.recorder.lift(item)
        dtype = promote([value])
        # In PyTorch a bool or uint8 index is a mask, whose result can have any number of elements.
        if dtype.is_floating_point or dtype in (torch.bool, torch.uint8):
            raise CapturedIndexError(
                f"a captured tensor was indexed by a {dtype}{here()}. Indices are signed integers: "
                f"convert with .long(), or use torch.where for a condition."
            )
        return self.recorder.node(value, torch.int64)


def _match_dimensions(items: tuple[object, ...], free: list[int]) -> Iterator[tuple[int, object]]:
    """Pairs each index with the dimension that it indexes; full slices index none.

    table[b, ..., q_idx] of 4 dimensions:   b -> 0    ... -> 1, 2    q_idx -> 3
    """
    for item in items:
        if isinstance(item, _NEVER_INDICES) and not _is_full_slice(item):
            raise unsupported(f"indexing a captured tensor by {item!r} and a traced number")
    dots = sum(item is Ellipsis for item in items)
    if dots > 1 or len(items) > len(free) + dots:
        raise CapturedIndexError(
            f"{len(items)} indices for {len(free)} dimensions of a captured tensor{here()}. Index "
            f"each dimension once."
        )
    dims = list(free)
    for position, item in enumerate(items):
        match item:
            case EllipsisType():
                rest = len(items) - position - 1
                dims = dims[len(dims) - rest :]
            case slice():
                dims = dims[1:]
            case _:
                yield dims[0], item
                dims = dims[1:]


_NEVER_INDICES = (slice, list, np.ndarray, type(None))
"""Types that are not a single index; of these only the full slice is supported."""


def _is_full_slice(item: object) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _getitem(tensor: Any, index: object) -> Symbol | PartialLoad:
    if isinstance(tensor, Symbol | PartialLoad):
        return tensor[index]
    if type(index) is Symbol and tensor.dim() == 1 and index.dtype is torch.int64:  # nearly always
        slot = index.recorder.slot(tensor)
        return index.recorder.symbol("load", (index.node,), tensor.dtype, slot)
    recorder = find_recorder([index])
    assert recorder is not None, "an index without a symbol"
    return PartialLoad(tensor, (None,) * tensor.dim(), recorder)[index]


def _embedding(
    index: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Symbol | PartialLoad:
    """weight[index], for F.embedding and nn.Embedding; torch.embedding swaps the two."""
    if isinstance(weight, Symbol):
        index, weight = weight, index
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise unsupported("an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse")
    return _getitem(weight, index)


FORMS["getitem"] = _getitem
FORMS["embedding"] = _embedding
