"""Block masks combined: `a & b`, `a | b`, `~a`, exact in every element.

a    b    a & b   a | b   ~a         . empty   ░ partial   █ full
.    .      .       .      █
.    ░      .       ░      █         The cells of `a & b` are the minimum of both cells, those of
░    ░      ░       ░      ░         `a | b` the maximum. Where the result is partial, the mask_mods
░    █      ░       █      ░         are combined and each block is classified again, since it may
█    █      █       █      .         have become empty or full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.block_mask.blocks import FULL, PARTIAL
from quire.block_mask.checks import check_devices
from quire.block_mask.elements import Elements, four_dimensional, reclassified
from quire.block_mask.tensors import BlockTensors, Mask
from quire.block_mask.tiles import Sizes
from quire.errors import BlockMaskShapeError
from quire.mods.compose import MaskMod, and_masks, not_mask, or_masks


class Operator(NamedTuple):
    """How `&` or `|` combines the cells and the mask_mods of two masks."""

    cells: Callable[[Tensor, Tensor], Tensor]
    mods: Callable[[MaskMod, MaskMod], MaskMod]


AND = Operator(torch.minimum, and_masks)
OR = Operator(torch.maximum, or_masks)


def complement(mask: Mask) -> Mask:
    """Return the mask that allows exactly what `mask` does not allow."""
    elements = Elements(mask, mask.BLOCK_SIZE)
    cells = FULL - elements.cells
    if (cells == PARTIAL).any():
        cells = reclassified(cells, not_mask(elements.safe_mod), elements.sizes, mask.BLOCK_SIZE)
    return mask._with_cells(cells, separate_full_blocks=True, mask_mod=not_mask(elements.mod))


def join(one: Mask, other: BlockTensors, combine: Operator) -> Mask:
    """Return the mask of what both masks allow (AND), or of what at least one allows (OR)."""
    check_devices(four_dimensional(one), four_dimensional(other))
    sizes = _common_sizes(one, other)
    block_size = _common_block_size(one, other, sizes)
    left, right = Elements(one, block_size, sizes), Elements(other, block_size, sizes)
    cells = combine.cells(left.cells, right.cells)
    # Where the result is partial, one side is partial and the other is partial or changes nothing.
    in_left, in_right = left.cells == PARTIAL, right.cells == PARTIAL
    found = torch.where(in_left, left.known, right.known)
    if (in_left & in_right).any():
        both = combine.mods(left.safe_mod, right.safe_mod)
        found = torch.where(in_left & in_right, reclassified(cells, both, sizes, block_size), found)
    cells = torch.where(cells == PARTIAL, found, cells)
    return one._from_cells(
        cells.expand(*sizes[:2], -1, -1),
        separate_full_blocks=True,
        BLOCK_SIZE=block_size,
        mask_mod=_combined_mod(left, right, cells == PARTIAL, combine),
        seq_lengths=sizes[2:],
    )


def _combined_mod(left: Elements, right: Elements, partial: Tensor, combine: Operator) -> MaskMod:
    """The mask_mod of a result that is called in the blocks `partial` [B, H, rows, columns].

    If a side is partial in none of these blocks, it changes nothing there. We leave its mod out if
    it could disagree with its cells.
    """
    for side, opposite in ((left, right), (right, left)):
        unneeded = not (partial & (side.cells == PARTIAL)).any()
        if unneeded and side.disputed(partial).any():
            return opposite.mod_in(partial)
    return combine.mods(left.mod_in(partial), right.mod_in(partial))


def _common_sizes(one: BlockTensors, other: BlockTensors) -> Sizes:
    batch = []
    for name, *counts in zip("BH", _batch(one), _batch(other), strict=False):
        if len({*counts} - {1}) > 1:
            raise BlockMaskShapeError(
                f"two block masks must have the same {name}, or one of them {name}=1, but have "
                f"{name}={counts[0]} and {name}={counts[1]}. Create both with the same {name}."
            )
        batch.append(counts[1] if counts[0] == 1 else counts[0])
    if one.is_endless or one.seq_lengths == other.seq_lengths:
        return (batch[0], batch[1], *other.seq_lengths)
    if not other.is_endless:
        raise BlockMaskShapeError(
            f"two block masks must have the same lengths, but have {one.seq_lengths} and "
            f"{other.seq_lengths}. Change the lengths of one with mask.resize{other.seq_lengths}."
        )
    return (batch[0], batch[1], *one.seq_lengths)


def _batch(mask: BlockTensors) -> tuple[int, int]:
    batch, heads = four_dimensional(mask).shape[:2]
    return batch, heads


def _common_block_size(one: BlockTensors, other: BlockTensors, sizes: Sizes) -> tuple[int, int]:
    """The smaller block size in each direction."""
    pairs = zip(one.BLOCK_SIZE, other.BLOCK_SIZE, sizes[2:], strict=True)
    for fine, coarse, length in ((*sorted(pair), length) for *pair, length in pairs):
        if coarse % fine and coarse < length:  # a block that holds everything has no borders inside
            raise BlockMaskShapeError(
                f"one of two block sizes must divide the other, but they are {one.BLOCK_SIZE} and "
                f"{other.BLOCK_SIZE}. Create one of the masks again with the BLOCK_SIZE of the "
                f"other, or with one that divides it."
            )
    q_block, kv_block = map(min, one.BLOCK_SIZE, other.BLOCK_SIZE)
    return q_block, kv_block
