"""Pyramids: the minimum or maximum of a tensor over any range, from few loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ir.graph import Node, Number
from quire.ir.intervals import Interval
from quire.ir.simplify import simplest
from quire.ir.terms import FALSE, I64, both, either, term, whole

MOST_BYTES = 2**22
"""The most bytes of a pyramid. For a larger tensor each leaf stands for several elements."""


class Axis(NamedTuple):
    """The ranges along one dimension of a tensor, as a binary heap.

    Entry 1 is the whole dimension, and entry i joins the entries 2 i and 2 i + 1. `leaves` is a
    power of two; entry leaves + i stands for the 2**grain elements from i * 2**grain on.
    """

    dim: int
    leaves: int
    grain: int = 0


class Pyramid(NamedTuple):
    """The minima, or maxima, of a captured tensor over ranges along some dimensions.

    With two axes, entry (i, j) is the extreme of a rectangle: entry i of the first axis by entry j
    of the second.
    """

    slot: int
    axes: tuple[Axis, ...]
    largest: bool

    def shape(self, sizes: Sequence[int]) -> list[int]:
        """The shape of the pyramid of a tensor of `sizes`."""
        entries = {axis.dim: 2 * axis.leaves for axis in self.axes}
        return [entries.get(dim, size) for dim, size in enumerate(sizes)]


def axes_of(sizes: Sequence[int], dims: Sequence[int], itemsize: int) -> tuple[Axis, ...]:
    """The axes of a pyramid; leaves are single elements unless that takes too much memory."""
    axes = {dim: Axis(dim, _power_of_two(sizes[dim])) for dim in dims}
    others = math.prod(size for dim, size in enumerate(sizes) if dim not in axes)
    while True:
        widest = max(axes.values(), key=lambda axis: (axis.leaves, axis.dim))
        entries = others * math.prod(2 * axis.leaves for axis in axes.values())
        if entries * itemsize <= MOST_BYTES or widest.leaves == 1:
            return tuple(axes.values())
        axes[widest.dim] = Axis(widest.dim, widest.leaves // 2, widest.grain + 1)


def _power_of_two(length: int) -> int:
    """The smallest power of two that is at least `length`."""
    return 1 << max(0, length - 1).bit_length()


def heap(tensor: Tensor, pyramid: Pyramid) -> Tensor:
    """A pyramid of a tensor, computed in torch. Leaves without elements change no extreme."""
    for axis in pyramid.axes:
        tensor = _along(tensor, axis, pyramid.largest)
    return tensor


def _along(tensor: Tensor, axis: Axis, largest: bool) -> Tensor:
    rows = tensor.movedim(axis.dim, -1)
    missing = missing_leaf(tensor.dtype, largest)
    if axis.grain:
        grains = rows.new_full((*rows.shape[:-1], axis.leaves << axis.grain), missing)
        grains[..., : rows.shape[-1]] = rows
        grains = grains.unflatten(-1, (axis.leaves, -1))
        rows = grains.amax(-1) if largest else grains.amin(-1)
    entries = rows.new_full((*rows.shape[:-1], 2 * axis.leaves), missing)
    entries[..., axis.leaves : axis.leaves + rows.shape[-1]] = rows
    combine = torch.maximum if largest else torch.minimum
    size = axis.leaves
    while size > 1:
        below = entries[..., size : 2 * size].unflatten(-1, (size // 2, 2))
        entries[..., size // 2 : size] = combine(below[..., 0], below[..., 1])
        size //= 2
    return entries.movedim(-1, axis.dim)


def missing_leaf(dtype: torch.dtype, largest: bool) -> Number:
    """A number that is never the minimum, or with `largest` never the maximum."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return int(info.min if largest else info.max)


def anything(tensor: Tensor, pyramid: Pyramid) -> Tensor:
    """Stands in for a pyramid that was not built: every entry allows all values of the dtype."""
    dtype = tensor.dtype
    end = math.nan if dtype.is_floating_point else missing_leaf(dtype, not pyramid.largest)
    return torch.full((), end, dtype=dtype, device=tensor.device).expand(
        pyramid.shape(tensor.shape)
    )


def entries_of(index: Interval, axis: Axis, length: int, levels: int) -> list[Node]:
    """Entries along an axis that together cover a range of indices: two, as small as possible.

    With `levels`, more entries, which cover ranges of up to 2**levels leaves exactly.
    """
    zero, one = whole(0), whole(1)
    first, last = (
        term("add", _shifted(end, whole(axis.grain)), whole(axis.leaves)) for end in index
    )
    inside, places = first, []
    # From the leaves up, take a right half at the left end and a left half at the right end.
    for _ in range(levels):
        left = both(term("le", first, last), term("eq", term("and", first, one), one))
        right = both(term("le", first, last), term("eq", term("and", last, one), zero))
        places += [term("where", left, first, inside), term("where", right, last, inside)]
        first = term("shr", term("add", first, one), one)
        last = term("shr", term("sub", last, one), one)
    if levels:
        rest = term("le", first, last)
        first, last = term("where", rest, first, inside), term("where", rest, last, inside)
    # Two or three entries that are half as wide as the range cover it.
    level = simplest(Node("bits", (term("shr", term("sub", last, first), one),), I64))
    apart = term("sub", _shifted(last, level), _shifted(first, level))
    level = term("where", term("lt", one, apart), term("add", level, one), level)
    places += [_shifted(end, level) for end in (first, last)]
    # Negative indices take entry 1, the whole; so do indices out of range.
    end = whole(length - 1)
    strange = FALSE
    for place in index:  # both, since an empty part may end before it begins
        strange = either(strange, either(term("lt", place, zero), term("lt", end, place)))
    return [term("where", strange, one, place) for place in places]


def _shifted(number: Node, bits: Node) -> Node:
    """number >> bits."""
    return number if bits.payload == 0 else term("shr", number, bits)
