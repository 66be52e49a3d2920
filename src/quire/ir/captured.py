"""Captured tensors indexed by symbols.

`table[b, h]` of a tensor with three dimensions is a `PartialLoad`; one more index makes a `load`.
So `table[b][h][q_idx // 16]`, `table[b, :, q_idx][h]` and `table[..., q_idx]` all work. Anything
else that a mod does with a `PartialLoad` makes a vector of it, with a load for each element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import CapturedIndexError, UnsupportedOpError
from quire.ir.graph import Node, const
from quire.ir.promote import promote
from quire.ir.source import here
from quire.ir.symbol import FORMS, Recorded, Recorder, Symbol, find_recorder, unsupported
from quire.ir.vector import LONGEST, filled_array


class PartialLoad(Recorded):
    """A captured tensor of which some dimensions have been indexed by symbols.

    `indices` has for each dimension its index, or the range of positions that are left of it; None
    if all are. In a graph of torch.compile a size may be a symbol, which a range would fix.
    """

    __slots__ = ("indices", "tensor")

    def __init__(
        self, tensor: Tensor, indices: tuple[Node | range | None, ...], recorder: Recorder
    ) -> None:
        self.tensor = tensor
        self.indices = indices
        self.recorder = recorder

    @staticmethod
    def whole(tensor: Tensor, recorder: Recorder) -> PartialLoad:
        """A captured tensor without any index."""
        return PartialLoad(tensor, (None,) * tensor.dim(), recorder)

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
        sizes = zip(self.indices, self.tensor.shape, strict=True)
        free = [(left, size) for left, size in sizes if not isinstance(left, Node)]
        return torch.Size([size if left is None else len(left) for left, size in free])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Symbol | PartialLoad]:
        return (self[position] for position in range(len(self)))

    def __getitem__(self, index: object) -> Symbol | PartialLoad:
        items = index if isinstance(index, tuple) else (index,)
        indices = list(self.indices)
        free = [dim for dim, left in enumerate(indices) if not isinstance(left, Node)]
        for dim, item in _match_dimensions(items, free):
            left = indices[dim]
            assert not isinstance(left, Node), "only free dimensions are matched"
            indices[dim] = self._indexed(dim, left, item)
        nodes = tuple(left for left in indices if isinstance(left, Node))
        if len(nodes) < len(indices):
            return PartialLoad(self.tensor, tuple(indices), self.recorder)
        return self._load(nodes)

    def _load(self, indices: tuple[Node, ...]) -> Symbol:
        slot = self.recorder.slot(self.tensor)
        return self.recorder.symbol("load", indices, self.tensor.dtype, slot)

    def _indexed(self, dim: int, left: range | None, item: object) -> Node | range:
        """What an index or a slice leaves of the positions of a dimension."""
        size = self.tensor.shape[dim] if left is None else len(left)
        if isinstance(item, slice):
            return (range(size) if left is None else left)[item]
        value = self.recorder.lift(item)
        dtype = promote([value])
        # In PyTorch a bool or uint8 index is a mask, whose result can have any number of elements.
        if dtype.is_floating_point or dtype in (torch.bool, torch.uint8):
            raise CapturedIndexError(
                f"a captured tensor was indexed by a {dtype}{here()}. Indices are signed integers: "
                f"convert with .long(), or use torch.where for a condition."
            )
        node = self.recorder.node(value, torch.int64)
        place = node.payload if node.op == "const" else None
        if isinstance(place, int) and not -size <= place < size:
            raise CapturedIndexError(
                f"index {place} is out of bounds for dimension {dim} with size {size} of a "
                f"captured tensor of shape {list(self.tensor.shape)}{here()}. Count from 0, or "
                f"from -1 at the end."
            )
        if left is None or size == self.tensor.shape[dim]:
            return node
        if not isinstance(place, int):  # some positions were cut off by a slice
            raise unsupported("a slice of a captured tensor at a traced index")
        return const(left[place], torch.int64)

    def array(self) -> np.ndarray[Any, Any]:
        """A load for each element, as symbols; raises if there are too many."""
        if not 0 < self.numel() <= LONGEST:
            raise UnsupportedOpError(
                f"a mod computes with single numbers and vectors of up to {LONGEST}, but a "
                f"captured tensor of shape {list(self.shape)} takes part as a whole{here()}. The "
                f"call still runs, on the slower eager path; to have it compiled index more of "
                f"its dimensions, as in bias[h, q_idx]."
            )
        places = itertools.product(
            *(
                [left]
                if isinstance(left, Node)
                else [
                    const(place, torch.int64) for place in (range(size) if left is None else left)
                ]
                for left, size in zip(self.indices, self.tensor.shape, strict=True)
            )
        )
        return filled_array(map(self._load, places), self.shape)


def _match_dimensions(items: tuple[object, ...], free: list[int]) -> Iterator[tuple[int, object]]:
    """Pairs each index or slice with the dimension that it belongs to.

    table[b, ..., q_idx] of 4 dimensions:   b -> 0    ... -> 1, 2    q_idx -> 3
    """
    for item in items:
        if isinstance(item, _NEVER_INDICES) and not _is_slice(item):
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
            case _:
                yield dims[0], item
                dims = dims[1:]


_NEVER_INDICES = (slice, list, np.ndarray, type(None))
"""Types that are not a single index; of these only slices by constants are supported."""


def _is_slice(item: object) -> bool:
    """Whether `item` is a slice by constants that goes forward; torch has no other."""
    if not isinstance(item, slice):
        return False
    ends = (item.start, item.stop, item.step)
    return all(end is None or type(end) is int for end in ends) and (item.step or 1) > 0


def _getitem(tensor: Any, index: object) -> Any:
    if isinstance(tensor, Recorded):
        return tensor[index]  # type: ignore[index]  # all of them can be indexed
    if type(index) is Symbol and tensor.dim() == 1 and index.dtype is torch.int64:  # nearly always
        slot = index.recorder.slot(tensor)
        return index.recorder.symbol("load", (index.node,), tensor.dtype, slot)
    recorder = find_recorder([index])
    assert recorder is not None, "an index without a symbol"
    return PartialLoad.whole(tensor, recorder)[index]


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
    found: Symbol | PartialLoad = _getitem(weight, index)
    return found


FORMS["getitem"] = _getitem
FORMS["embedding"] = _embedding
