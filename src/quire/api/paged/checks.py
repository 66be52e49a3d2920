"""Checks of what the methods of PagedAttention are given. They run before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quire.block_mask import BlockMask
from quire.checks.arguments import dtype_name, lengths_tensor, tensor_of
from quire.errors import BlockMaskShapeError, KVCacheError, ShapeError, SlotError, UnreservedError

if TYPE_CHECKING:
    from quire.api.paged.attention import PagedAttention

NO_PAGE: Final = -1
"""Marks an entry without a page in both tables, as in PyTorch."""


def as_slots(paged: PagedAttention, batch_idx: object) -> Tensor:
    """Return `batch_idx`, a number or [N], as rows of the page table: int64 [N] on its device."""
    advice = "Give the slot of each sequence."
    slots = tensor_of("integers", "batch_idx", batch_idx, ranks=(0, 1), advice=advice)
    slots = slots.reshape(-1).to(paged.page_table.device, torch.int64)
    wrong = slots[(slots < 0) | (slots >= len(paged.page_table))]
    if len(wrong):
        raise SlotError(
            f"batch_idx must be between 0 and {len(paged.page_table) - 1}, as the page table has "
            f"{len(paged.page_table)} slots, but is {int(wrong[0])}. {advice}"
        )
    return slots


def as_lengths(seq_len: object, count: int) -> list[int]:
    """Return `seq_len`, a number or [N], as a list with a number for each of `count` slots."""
    advice = "Give the number of positions for each sequence."
    lengths = tensor_of("integers", "seq_len", seq_len, ranks=(0, 1), advice=advice).reshape(-1)
    if len(lengths) not in (1, count):
        raise ShapeError(
            f"seq_len must be one number, or one for each of {count} slots, but has "
            f"{len(lengths)}. {advice}"
        )
    lengths = lengths_tensor(lengths, advice, name="seq_len")
    return [int(length) for length in lengths.expand(count).tolist()]


def as_kv_len(kv_len: object, count: int) -> Tensor:
    """Return `kv_len` as a tensor [N] with lengths for at least `count` batches."""
    advice = "Give one length for each batch of the mask."
    lengths = tensor_of("integers", "kv_len", kv_len, advice=advice)
    if len(lengths) < count:
        raise ShapeError(f"kv_len must have shape [{count}], but has [{len(lengths)}]. {advice}")
    return lengths


def slots_of_mask(paged: PagedAttention, mask: BlockMask, batch_idx: object) -> Tensor:
    """The slot [N] of each batch of a mask. A mask with one batch may be for several slots."""
    if len(mask.grid_shape) != 4 or mask.BLOCK_SIZE[1] != paged.page_size:
        raise BlockMaskShapeError(
            f"Expect block_mask has the same column block size as page_size, and kv_indices "
            f"[B, H, rows, blocks], but got size={mask.BLOCK_SIZE[1]} and size={paged.page_size} "
            f"for a mask of shape {mask.shape}. Create it with BLOCK_SIZE=(..., page_size)."
        )
    batch = mask.grid_shape[0]
    slots = as_slots(paged, torch.arange(batch) if batch_idx is None else batch_idx)
    if batch not in (1, len(slots)):
        raise ShapeError(
            f"batch_idx must have shape [{batch}], since block_mask has B={batch}, but has "
            f"[{len(slots)}]. Give one slot for each batch of the mask."
        )
    return slots


def as_positions(input_pos: object) -> Tensor:
    """Return `input_pos` [B, S] as int64."""
    advice = "Give the positions of the new tokens, [B, S]."
    return tensor_of("integers", "input_pos", input_pos, ranks=(2,), advice=advice).long()


def check_new(
    paged: PagedAttention,
    name: str,
    val: Tensor,
    cache: Tensor,
    *,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """Raise if new keys or values `val` do not fit their positions or the cache.

    `slots` [B], `positions` [B, S], `val` [B, H, S, D], `cache` [1, H, n_pages * page_size, D].
    """
    if val.requires_grad:
        raise KVCacheError(
            f"{name}_val must not require gradient, since no gradient passes through a cache, but "
            f"does. Give {name}_val.detach()."
        )
    if val.dtype != cache.dtype or val.device != cache.device:
        raise KVCacheError(
            f"{name}_val must be {dtype_name(cache.dtype)} on {cache.device}, as its cache, but is "
            f"{dtype_name(val.dtype)} on {val.device}. Convert it with .to({name}_cache)."
        )
    rows = paged.n_pages * paged.page_size
    if val.dim() != 4 or cache.dim() != 4 or cache.shape[2] < rows:
        raise ShapeError(
            f"{name}_val and {name}_cache must have shapes [B, H, S, D] and [1, H, {rows}, D], as "
            f"there are {paged.n_pages} pages of {paged.page_size}, but have {list(val.shape)} and "
            f"{list(cache.shape)}. Make the cache with n_pages * page_size rows."
        )
    for axis, one, other, sizes in (
        ("batch size B", f"{name}_val", "batch_idx", (val.shape[0], len(slots))),
        ("batch size B", "input_pos", "batch_idx", (len(positions), len(slots))),
        ("number of heads H", f"{name}_val", f"{name}_cache", (val.shape[1], cache.shape[1])),
        ("length S", f"{name}_val", "input_pos", (val.shape[2], positions.shape[1])),
        ("hidden dim D", f"{name}_val", f"{name}_cache", (val.shape[3], cache.shape[3])),
    ):
        if sizes[0] != sizes[1]:
            raise ShapeError(
                f"{one} and {other} must have the same {axis}, but have {sizes[0]} and {sizes[1]}. "
                f"Give values [B, H, S, D] for batch_idx [B] and input_pos [B, S]."
            )


def addresses(paged: PagedAttention, slots: Tensor, positions: Tensor) -> Tensor:
    """The row of the cache for each of `positions` [B, S] of `slots` [B]: int64 [B, S]."""
    blocks = positions // paged.page_size
    known = (blocks >= 0) & (blocks < paged.n_pages)
    pages = torch.full_like(blocks, NO_PAGE)
    if paged.n_pages:
        found = paged.page_table[slots].gather(1, torch.where(known, blocks, 0))
        pages = torch.where(known, found, NO_PAGE)
    if bool((pages == NO_PAGE).any()):
        b, s = (pages == NO_PAGE).nonzero()[0].tolist()
        slot = int(slots[b])
        raise UnreservedError(
            f"input_pos must be below {int(paged.capacity[slot])}, the number of positions that "
            f"slot {slot} has reserved, but is {int(positions[b, s])}. Reserve it first: nothing "
            f"was assigned."
        )
    return pages * paged.page_size + positions % paged.page_size
