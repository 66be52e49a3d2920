"""Short vectors of symbols, for mods that compute with rows of captured tensors.

    def nearer_first(score, b, h, q_idx, kv_idx):
        return score - (pos[b, q_idx] - pos[b, kv_idx]).norm()

`pos[b, q_idx]` of a tensor [B, N, 3] is a vector of three symbols, each a load with a constant last
index. An operation on vectors is the operation on their elements, and a sum is a tree of additions:
a graph has single numbers only, so nothing after the tracer knows vectors.

Shapes are those of torch, with broadcasting; a vector may have any number of dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from quire.errors import CapturedIndexError
from quire.ir.source import here
from quire.ir.symbol import Recorded, Recorder, Symbol, unsupported

LONGEST = 64
"""The most numbers of a vector. Every one of them takes nodes of its own."""

Array: TypeAlias = np.ndarray[Any, Any]
"""Symbols with a shape: an array of objects. No function of numpy looks into them."""


class Vector(Recorded):
    """Up to LONGEST symbols of one dtype."""

    __slots__ = ("array",)

    def __init__(self, array: Array, recorder: Recorder) -> None:
        self.array = array
        self.recorder = recorder

    @staticmethod
    def of(array: Array, recorder: Recorder) -> Vector | Symbol:
        """These symbols as a vector; a single one without dimensions as it is."""
        if array.ndim == 0:
            symbol: Symbol = array.item()
            return symbol
        if not 0 < array.size <= LONGEST:
            raise unsupported(f"a vector of {array.size} numbers, where {LONGEST} is the most,")
        return Vector(array, recorder)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        first: Symbol = self.array.flat[0]
        return first.dtype

    @property
    def shape(self) -> torch.Size:
        """The sizes of its dimensions."""
        return torch.Size(self.array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Vector | Symbol]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, index: Any) -> Vector | Symbol:
        items = index if isinstance(index, tuple) else (index,)
        if not all(_is_constant(item) for item in items):
            raise unsupported("indexing a vector by anything but constants")
        try:
            found = self.array[items]
        except IndexError as error:
            raise CapturedIndexError(
                f"an index of a vector must be within its shape {list(self.shape)}, but is "
                f"{index!r}{here()}. Count from 0, or from -1 at the end."
            ) from error
        return found if isinstance(found, Symbol) else Vector.of(found, self.recorder)

    def __repr__(self) -> str:
        return f"Vector({', '.join(map(repr, self.array.flat))})"


def _is_constant(item: object) -> bool:
    if isinstance(item, slice):
        return (item.step or 1) > 0
    return type(item) is int or item is None or item is Ellipsis


def filled_array(symbols: Iterable[Symbol], shape: Sequence[int]) -> Array:
    """An array of some shape that holds `symbols`, the last dimension fastest."""
    array = np.empty(math.prod(shape), dtype=object)
    for place, symbol in enumerate(symbols):
        array[place] = symbol
    return array.reshape(tuple(shape))
