"""Minima and maxima of all ranges of a tensor that a bound may ask about."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ir.graph import Number


class Pyramid(NamedTuple):
    """Minima, or maxima, of ranges of a captured tensor along one dimension, as a heap.

    Entry 1 is that of the whole, entry i that of entries 2 i and 2 i + 1; with `leaves`, a power
    of two, entry leaves + i is that of element i.
    """

    slot: int
    dim: int
    largest: bool
    leaves: int


def heap(tensor: Tensor, pyramid: Pyramid) -> Tensor:
    """The entries of a pyramid, in the place of its dimension. Missing leaves change nothing."""
    rows = tensor.movedim(pyramid.dim, -1)
    missing = missing_leaf(tensor.dtype, pyramid.largest)
    entries = rows.new_full((*rows.shape[:-1], 2 * pyramid.leaves), missing)
    entries[..., pyramid.leaves : pyramid.leaves + rows.shape[-1]] = rows
    combine = torch.maximum if pyramid.largest else torch.minimum
    size = pyramid.leaves
    while size > 1:
        below = entries[..., size : 2 * size].unflatten(-1, (size // 2, 2))
        entries[..., size // 2 : size] = combine(below[..., 0], below[..., 1])
        size //= 2
    return entries.movedim(-1, pyramid.dim)


def missing_leaf(dtype: torch.dtype, largest: bool) -> Number:
    """What changes no minimum, or with `largest` no maximum."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return int(info.min if largest else info.max)
