"""What the methods of PagedAttention accept: slots, lengths, positions, new keys and values.

Nothing is written before all of this has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor

from quire.arguments import tensor_of
from quire.block_mask import BlockMask
from quire.errors import (
    ArgumentError,
    BlockMaskShapeError,
    KVCacheError,
    ShapeError,
    SlotError,
    UnreservedError,
)

if TYPE_CHECKING:
    from quire.paged.attention import PagedAttention

Integers: TypeAlias = Tensor | Sequence[int] | int

NO_PAGE: Final = -1
"""PyTorch's word for it, in both tables."""


def as_slots(paged: PagedAttention, batch_idx: object) -> Tensor:
    """`batch_idx` as rows of the page table: int64 [N], on its device."""
    advice = "Give the slot of each sequence."
    slots = tensor_of("integers", "batch_idx", batch_idx, ranks=(0, 1), advice=advice)
    slots = slots.reshape(-1).to(paged.page_table.device, torch.int64)
    wrong = slots[(slots < 0) | (slots >= len(paged.page_table))]
    if len(wrong):
        raise SlotError(
            f"expected batch_idx between 0 and {len(paged.page_table) - 1}, as the page table has "
            f"{len(paged.page_table)} slots, got {int(wrong[0])}. {advice}"
        )
    return slots


def as_lengths(seq_len: object, count: int) -> list[int]:
    """`seq_len` as one number for each of `count` slots."""
    advice = "Give the number of positions that each sequence is to have."
    lengths = tensor_of("integers", "seq_len", seq_len, ranks=(0, 1), advice=advice).reshape(-1)
    if len(lengths) not in (1, count):
        raise ShapeError(
            f"expected one seq_len, or one for each of {count} slots, got {len(lengths)}. {advice}"
        )
    if bool((lengths < 0).any()):
        raise ArgumentError(f"seq_len must not be negative, got {int(lengths.min())}. {advice}")
    return [int(length) for length in lengths.expand(count).tolist()]


def as_kv_len(kv_len: object, count: int) -> Tensor:
    """`kv_len` as a length for each of `count` batches; there may be more."""
    advice = "Give one length for each batch of the mask."
    lengths = tensor_of("integers", "kv_len", kv_len, advice=advice)
    if len(lengths) < count:
        raise ShapeError(f"expected kv_len of shape [{count}], got {len(lengths)}. {advice}")
    return lengths


def slots_of_mask(paged: PagedAttention, mask: BlockMask, batch_idx: object) -> Tensor:
    """The slot that each batch of a mask is about. One batch may be about many."""
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
            f"expected batch_idx of shape [{batch}], since block_mask has B={batch}, got "
            f"{len(slots)} slots. Give one slot for each batch of the mask."
        )
    return slots


def as_positions(input_pos: object) -> Tensor:
    """`input_pos` as int64 [B, S]."""
    advice = "Give the positions of the new tokens, [B, S]."
    return tensor_of("integers", "input_pos", input_pos, ranks=(2,), advice=advice).long()


def check_new(
    paged: PagedAttention, slots: Tensor, positions: Tensor, name: str, val: Tensor, cache: Tensor
) -> None:
    """Refuse keys or values that do not fit their positions or their cache."""
    if val.requires_grad:
        raise KVCacheError(
            f"{name}_val must not require gradient, which does not pass through a cache. Give "
            f"{name}_val.detach()."
        )
    if val.dtype != cache.dtype or val.device != cache.device:
        raise KVCacheError(
            f"expected {name}_val as its cache, {cache.dtype} on {cache.device}, got {val.dtype} "
            f"on {val.device}. Convert it with .to({name}_cache)."
        )
    rows = paged.n_pages * paged.page_size
    if val.dim() != 4 or cache.dim() != 4 or cache.shape[2] < rows:
        raise ShapeError(
            f"expected {name}_val [B, H, S, D] and {name}_cache [1, H, {rows}, D], as there are "
            f"{paged.n_pages} pages of {paged.page_size}, got shapes {list(val.shape)} and "
            f"{list(cache.shape)}. Make the cache with a row for each position in a page."
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
                f"expected {one} and {other} to have the same {axis}, got {sizes[0]} and "
                f"{sizes[1]}. Give values [B, H, S, D] for batch_idx [B] and input_pos [B, S]."
            )


def addresses(paged: PagedAttention, slots: Tensor, positions: Tensor) -> Tensor:
    """The rows of the cache in which positions [B, S] of slots [B] are."""
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
            f"expected positions below the {int(paged.capacity[slot])} that are reserved for slot "
            f"{slot}, got {int(positions[b, s])}. Reserve it first: nothing was assigned."
        )
    return pages * paged.page_size + positions % paged.page_size
