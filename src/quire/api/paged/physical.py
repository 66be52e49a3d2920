"""Masks and mods over positions of sequences, turned into ones over rows of a cache.

A position of a sequence is called logical, a row of the cache physical.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.api.paged.checks import NO_PAGE, as_kv_len, as_slots, slots_of_mask
from quire.block_mask import BlockMask
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL, grid_to_lists
from quire.block_mask.elements import Elements
from quire.ir.trace import mod_name
from quire.mods.compose import MaskMod, ScoreMod, named, noop_mask

if TYPE_CHECKING:
    from quire.api.paged.attention import PagedAttention


def physical_block_mask(
    paged: PagedAttention, mask: BlockMask, batch_idx: Tensor | None, kv_len: Tensor | None
) -> BlockMask:
    """Turn a mask over logical positions into a mask over rows of the cache.

    A full block that reaches beyond `kv_len` becomes partial, so that the mask_mod is called in it.
    """
    slots = slots_of_mask(paged, mask, batch_idx)
    num_columns = mask.grid_shape[-1]
    pages = paged.page_table[slots][:, None, None, :num_columns]
    cells = torch.where(pages != NO_PAGE, mask._cells()[..., : paged.n_pages], EMPTY)
    mask_mod: MaskMod = mask.mask_mod
    if kv_len is not None:
        stops = torch.arange(1, cells.shape[-1] + 1, device=cells.device) * paged.page_size
        ends = as_kv_len(kv_len, len(slots))[: len(slots), None, None, None]
        cut = (cells == FULL) & (ends < stops)
        if cut.any():
            cells = torch.where(cut, PARTIAL, cells)
            cut_blocks = pad(cut, (0, num_columns - cut.shape[-1]))
            mask_mod = Elements(mask, mask.BLOCK_SIZE).mod_in(cut_blocks)
    partial, full = (_page_lists(cells == kind, pages, paged.n_pages) for kind in (PARTIAL, FULL))
    separate = mask.separates_full_blocks
    found = BlockMask.from_kv_blocks(
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0] if separate else None,
        full_kv_indices=full[1] if separate else None,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=physical_mask(paged, mask_mod, kv_len, batch_idx),
        seq_lengths=(mask.seq_lengths[0], paged.n_pages * paged.page_size),
    )
    found.lists_pages = True
    return found


def _page_lists(chosen: Tensor, pages: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The pages of chosen blocks [B, H, R, C], in the order of the sequence.

    Returns counts [B, H, R] and pages [B, H, R, room]. A row begins with the pages of its blocks,
    as many as its count says.
    """
    counts, blocks = grid_to_lists(chosen)
    listed = torch.arange(chosen.shape[-1], device=chosen.device) < counts.unsqueeze(-1)
    found = torch.where(listed, pages.expand(chosen.shape).gather(-1, blocks.long()), 0)
    return counts, pad(found.to(torch.int32), (0, room - chosen.shape[-1]))


def physical_mask(
    paged: PagedAttention, mask_mod: MaskMod | None, kv_len: Tensor | None, batch_idx: Tensor | None
) -> MaskMod:
    """`mask_mod` over rows of the cache; False for rows of other slots and from `kv_len` on."""
    logical, inner = _to_logical(paged, kv_len, batch_idx), mask_mod or noop_mask

    @named(f"{mod_name(inner)} in pages")
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, physical_kv_idx: Tensor) -> Tensor:
        held, kv_idx = logical(b, physical_kv_idx)
        return torch.where(held, inner(b, h, q_idx, kv_idx), False)

    return mask


def physical_score(
    paged: PagedAttention,
    score_mod: ScoreMod | None,
    kv_len: Tensor | None,
    batch_idx: Tensor | None,
) -> ScoreMod:
    """`score_mod` over rows of the cache; -inf for rows of other slots and from `kv_len` on."""
    logical = _to_logical(paged, kv_len, batch_idx)

    @named("pages" if score_mod is None else f"{mod_name(score_mod)} in pages")
    def score_of(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, physical_kv_idx: Tensor
    ) -> Tensor:
        held, kv_idx = logical(b, physical_kv_idx)
        found = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(held, found, -math.inf)

    return score_of


def _to_logical(
    paged: PagedAttention, kv_len: Tensor | None, batch_idx: Tensor | None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A function from `b` and a row of the cache to whether the slot has it, and its position.

    The position is 0 if the slot does not have the row, or if it is from `kv_len` on.
    """
    slots = None if batch_idx is None else as_slots(paged, batch_idx)

    def logical(b: Tensor, physical: Tensor) -> tuple[Tensor, Tensor]:
        slot = b if slots is None else slots[b]
        block = paged.physical_to_logical[slot, physical // paged.page_size]
        kv_idx = block * paged.page_size + physical % paged.page_size
        held = block >= 0
        if kv_len is not None:
            held = held & (kv_idx < kv_len[b])
        return held, torch.where(held, kv_idx, 0)

    return logical
