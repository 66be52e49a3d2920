"""Masks made of masks: `a & b`, `a | b`, `~a`, exact in every element.

a    b    a & b   a | b   ~a         . empty   ░ partial   █ full
.    .      .       .      █
.    ░      .       ░      █         Cells decide where they can: & is their minimum, | their
░    ░      ░       ░      ░         maximum. In what is left partial the mask_mods decide, of
░    █      ░       █      ░         which each block is looked at again, since it may have
█    █      █       █      .         become empty or full.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.block_mask.elements import (
    Elements,
    four_dimensional,
    inverted,
    is_endless,
    look_again,
)
from quire.block_mask.lists import FULL, PARTIAL, check_devices
from quire.block_mask.mask_mods import MaskMod
from quire.block_mask.tiles import Sizes
from quire.errors import BlockMaskShapeError
from quire.ir.trace import mod_name

if TYPE_CHECKING:
    from quire.block_mask.mask import BlockMask

Mask = TypeVar("Mask", bound="BlockMask")


class _Sign(NamedTuple):
    """What `&` and `|` do to names, cells and truth values."""

    text: str
    cells: Callable[[Tensor, Tensor], Tensor]
    values: Callable[[Tensor, Tensor], Tensor]


_AND = _Sign("&", torch.minimum, operator.and_)
_OR = _Sign("|", torch.maximum, operator.or_)


def intersection(one: Mask, other: BlockMask) -> Mask:
    """The mask of what both masks allow."""
    return _join(one, other, _AND)


def union(one: Mask, other: BlockMask) -> Mask:
    """The mask of what at least one of two masks allows."""
    return _join(one, other, _OR)


def complement(mask: Mask) -> Mask:
    """The mask of what a mask does not allow."""
    elements = Elements(mask, mask.BLOCK_SIZE)
    cells = FULL - elements.cells
    if (cells == PARTIAL).any():
        cells = look_again(cells, inverted(elements.safe_mod), elements.sizes, mask.BLOCK_SIZE)
    return mask._from_cells(
        cells,
        True,
        BLOCK_SIZE=elements.block_size,
        mask_mod=inverted(elements.mod),
        seq_lengths=mask.seq_lengths,
    )


def _join(one: Mask, other: BlockMask, sign: _Sign) -> Mask:
    check_devices(four_dimensional(one), four_dimensional(other))
    sizes = _common_sizes(one, other)
    block_size = _common_block_size(one, other, sizes)
    left, right = Elements(one, block_size, sizes), Elements(other, block_size, sizes)
    cells = sign.cells(left.cells, right.cells)
    # In a partial block at least one side is partial, and the other decides nothing or is too.
    in_left, in_right = left.cells == PARTIAL, right.cells == PARTIAL
    found = torch.where(in_left, left.known, right.known)
    if (in_left & in_right).any():
        both = _joined(left.safe_mod, right.safe_mod, sign)
        found = torch.where(in_left & in_right, look_again(cells, both, sizes, block_size), found)
    cells = torch.where(cells == PARTIAL, found, cells)
    return one._from_cells(
        cells.expand(*sizes[:2], -1, -1),
        True,
        BLOCK_SIZE=block_size,
        mask_mod=_joined_where(left, right, cells == PARTIAL, sign),
        seq_lengths=sizes[2:],
    )


def _joined_where(left: Elements, right: Elements, asked: Tensor, sign: _Sign) -> MaskMod:
    """The mod of a result that is asked in the blocks `asked`.

    A side whose mod would be wrong there, and which is partial in none of them, has no say.
    """
    for side, opposite in ((left, right), (right, left)):
        silent = not (asked & (side.cells == PARTIAL)).any()
        if silent and side.disputed(asked).any():
            return opposite.mod_in(asked)
    return _joined(left.mod_in(asked), right.mod_in(asked), sign)


def _joined(left: MaskMod, right: MaskMod, sign: _Sign) -> MaskMod:
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return sign.values(left(b, h, q_idx, kv_idx), right(b, h, q_idx, kv_idx))

    mask.__name__ = mask.__qualname__ = f"({mod_name(left)} {sign.text} {mod_name(right)})"
    return mask


def _common_sizes(one: BlockMask, other: BlockMask) -> Sizes:
    batch = []
    for name, *counts in zip("BH", _batch(one), _batch(other), strict=False):
        if len({*counts} - {1}) > 1:
            raise BlockMaskShapeError(
                f"expected two block masks of the same {name}, or one with {name}=1, got "
                f"{name}={counts[0]} and {name}={counts[1]}. Create both with the same {name}."
            )
        batch.append(counts[1] if counts[0] == 1 else counts[0])
    if is_endless(one) or one.seq_lengths == other.seq_lengths:
        return (batch[0], batch[1], *other.seq_lengths)
    if not is_endless(other):
        raise BlockMaskShapeError(
            f"expected two block masks of the same lengths, got {one.seq_lengths} and "
            f"{other.seq_lengths}. Bring one to the lengths of the other with "
            f"mask.resize{other.seq_lengths}."
        )
    return (batch[0], batch[1], *one.seq_lengths)


def _batch(mask: BlockMask) -> tuple[int, int]:
    batch, heads = four_dimensional(mask).shape[:2]
    return batch, heads


def _common_block_size(one: BlockMask, other: BlockMask, sizes: Sizes) -> tuple[int, int]:
    """The finer block size in each direction."""
    pairs = zip(one.BLOCK_SIZE, other.BLOCK_SIZE, sizes[2:], strict=True)
    for fine, coarse, length in ((*sorted(pair), length) for *pair, length in pairs):
        if coarse % fine and coarse < length:  # blocks that hold everything can be of any size
            raise BlockMaskShapeError(
                f"expected block sizes of which one divides the other, got {one.BLOCK_SIZE} and "
                f"{other.BLOCK_SIZE}. Create one of the masks again with the BLOCK_SIZE of the "
                f"other, or with one that divides it."
            )
    q_block, kv_block = map(min, one.BLOCK_SIZE, other.BLOCK_SIZE)
    return q_block, kv_block
