"""Minima and maxima of all ranges of a tensor that a bound may ask about."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ir.graph import Node, Number
from quire.ir.intervals import Interval
from quire.ir.simplify import simplest
from quire.ir.terms import FALSE, I64, both, either, term, whole


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


def entries_of(index: Interval, length: int, leaves: int, levels: int) -> list[Node]:
    """Entries of a pyramid that cover a range of indices, exactly if it has up to 2**levels.

    A range that is a whole entry, or two, needs no levels to be covered exactly.
    """
    zero, one = whole(0), whole(1)
    first, last = (term("add", end, whole(leaves)) for end in index)
    inside, places = first, []
    for _ in range(levels):  # from below: an entry that is no left, or no right, half stands alone
        left = both(term("le", first, last), term("eq", term("and", first, one), one))
        right = both(term("le", first, last), term("eq", term("and", last, one), zero))
        places += [term("where", left, first, inside), term("where", right, last, inside)]
        first = term("shr", term("add", first, one), one)
        last = term("shr", term("sub", last, one), one)
    if levels:
        rest = term("le", first, last)
        first, last = term("where", rest, first, inside), term("where", rest, last, inside)
    level = simplest(Node("bits", (term("sub", last, first),), I64))
    places += [Node("shr", (end, level), I64) for end in (first, last)]
    # Counted from the end: the whole. Out of range nothing is sure.
    end = whole(length - 1)
    strange = FALSE
    for place in index:  # both, as a part that does not exist may end before it begins
        strange = either(strange, either(term("lt", place, zero), term("lt", end, place)))
    return [term("where", strange, one, place) for place in places]
