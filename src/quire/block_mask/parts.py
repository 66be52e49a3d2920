"""Masks for a part of a mask: some rows of blocks, other lengths, some queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from quire.block_mask.elements import Elements, created_cells, is_endless, reclassified
from quire.block_mask.index import expand_index
from quire.block_mask.lists import FULL, PARTIAL, as_count, ceil_div
from quire.block_mask.mask_mods import sliced_mask_mod
from quire.block_mask.tiles import Sizes
from quire.errors import BlockIndexError, BlockMaskShapeError
from quire.ir.trace import mod_name
from quire.mods.compose import offset

if TYPE_CHECKING:
    from quire.block_mask.mask import BlockMask

Mask = TypeVar("Mask", bound="BlockMask")


# --- rows of blocks, and the upper left corner ---------------------------------------------------


def take(mask: Mask, index: object) -> Mask:
    """The mask of the batches, heads and rows of blocks that `index` selects: `mask[index]`."""
    where = expand_index(index, mask.kv_num_blocks.shape)
    full = mask._full_lists()
    part = mask.from_kv_blocks(
        mask.kv_num_blocks[where],
        mask.kv_indices[where],
        full[0][where] if full else None,
        full[1][where] if full else None,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=sliced_mask_mod,
        seq_lengths=(_num_queries(mask, where[-1]), mask.seq_lengths[1]),
        compute_q_blocks=mask.q_indices is not None,
    )
    order = mask.dq_kv_order
    if order is not None:
        order = order.expand(*mask.kv_num_blocks.shape[:-1], -1)[where[:-1]]
    return _ordered_like(part, mask, order)


def crop(mask: Mask, q_len: int, kv_len: int) -> Mask:
    """The mask of the first `q_len` queries and `kv_len` keys, with the same mask_mod."""
    lengths = as_count("new_q_len", q_len), as_count("new_kv_len", kv_len)
    if lengths[0] > mask.seq_lengths[0] or lengths[1] > mask.seq_lengths[1]:
        raise BlockMaskShapeError(
            f"the new lengths must be at most {mask.seq_lengths}, those of the block mask, but are "
            f"{lengths}. Create a new block mask for the longer sequence."
        )
    num_rows, num_columns = map(ceil_div, lengths, mask.BLOCK_SIZE)
    order = mask.dq_kv_order
    if order is not None:
        # Each row is a permutation, so each keeps `num_columns` entries.
        order = order[order < num_columns].view(*order.shape[:-1], num_columns)
    part = mask._from_cells(
        mask._cells()[..., :num_rows, :num_columns],
        mask.full_kv_num_blocks is not None,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=lengths,
        compute_q_blocks=mask.q_indices is not None,
    )
    return _ordered_like(part, mask, order)


def _num_queries(mask: BlockMask, rows: slice | Tensor) -> int:
    """How many queries the selected rows of blocks have. Only the last row may be incomplete."""
    num_rows, block = mask.kv_indices.shape[-2], mask.BLOCK_SIZE[0]
    picked = range(num_rows)[rows] if isinstance(rows, slice) else rows
    if len(picked) == 0:
        return 0
    left = mask.seq_lengths[0] - int(picked[-1]) % num_rows * block
    return (len(picked) - 1) * block + max(0, min(block, left))


def _ordered_like(part: Mask, whole: Mask, order: Tensor | None) -> Mask:
    """Give `part` the key block order `order`, and a write order if `whole` has one."""
    part.dq_kv_order, part.dq_kv_order_spt = order, whole.dq_kv_order_spt
    if whole.dq_write_order is not None:
        part._add_write_order()
    return part


# --- other lengths -------------------------------------------------------------------------------


def resize(mask: Mask, q_len: int, kv_len: int) -> Mask:
    """The mask for other lengths, both counted from the first query and key."""
    lengths = as_count("q_len", q_len), as_count("kv_len", kv_len)
    elements = Elements(mask, mask.BLOCK_SIZE)
    if is_endless(mask):
        return mask
    sizes: Sizes = (*elements.sizes[:2], *lengths)
    stray, device = _stray_block(elements), elements.cells.device
    if stray is None:
        separate = mask.separates_full_blocks
        return mask._from_mod(mask.mask_mod, sizes, mask.BLOCK_SIZE, device, separate)
    if any(new > old for new, old in zip(lengths, mask.seq_lengths, strict=True)):
        raise BlockMaskShapeError(
            f"the new lengths must be at most {mask.seq_lengths}, since the mask_mod "
            f"{mod_name(mask.mask_mod)!r} does not say which blocks this mask has (the first "
            f"difference is {stray}), but are {lengths}. List the blocks for the new lengths with "
            f"BlockMask.from_kv_blocks, or make the mask from a mask_mod that describes it."
        )
    num_rows, num_columns = map(ceil_div, lengths, mask.BLOCK_SIZE)
    cells = elements.cells[..., :num_rows, :num_columns]
    return mask._from_cells(
        reclassified(cells, mask.mask_mod, sizes, mask.BLOCK_SIZE),
        mask.separates_full_blocks,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=lengths,
    )


def _stray_block(elements: Elements) -> str | None:
    """Describe a block that create_block_mask would not have made; None if there is none."""
    if elements.kinds is not None:
        wrong = elements.disputed(torch.ones_like(elements.cells, dtype=torch.bool))
    else:  # e.g. it reads b, and the mask has one batch for all: compare with what it makes there
        made = created_cells(
            elements.mod, elements.sizes, elements.block_size, elements.cells.device
        )
        if made is None:
            return "a block in which it cannot be called"
        wrong = (elements.cells != made) & ~((elements.cells == PARTIAL) & (made == FULL))
    if not wrong.any():
        return None
    b, h, row, column = wrong.nonzero()[0].tolist()
    kind = ("empty", "partial", "full")[int(elements.cells[b, h, row, column])]
    return f"the {kind} block in row {row} and column {column} of batch {b} and head {h}"


# --- some queries --------------------------------------------------------------------------------


def for_queries(mask: Mask, start: int, stop: int) -> Mask:
    """The mask of queries `start` up to `stop` over all keys. Query `start` becomes query 0.

        rows of the mask   |0 . . . . . .|7 . . . . . .|14 . .         start 5, blocks of 7
        rows of the part             |0 . . . . . .|7 . . . . .

    A block of the part overlaps up to two rows of the mask. If they differ there, it is partial.
    """
    start, stop = as_count("start", start), as_count("stop", stop)
    lengths, block_size = mask.seq_lengths, mask.BLOCK_SIZE
    elements = Elements(mask, block_size)
    cells, mod = elements.cells, elements.mod
    if not is_endless(mask):
        if not start <= stop <= lengths[0]:
            raise BlockIndexError(
                f"start and stop must be 0 <= start <= stop <= {lengths[0]}, the number of queries "
                f"of the block mask, but are {start} and {stop}. Count tokens, not blocks."
            )
        lengths = (stop - start, lengths[1])
        rows = _rows(start, stop, block_size[0], cells.device)
        cells = _merged(cells, rows)
        sizes: Sizes = (*elements.sizes[:2], *lengths)
        mod = elements.mod_in(_called_in(elements, rows, cells))
        if lengths[0] >= block_size[0]:  # for fewer queries this takes longer than it saves
            cells = reclassified(cells, offset(mod, start), sizes, block_size)
            mod = elements.mod_in(_called_in(elements, rows, cells))
    return mask._from_cells(
        cells,
        mask.separates_full_blocks,
        BLOCK_SIZE=block_size,
        mask_mod=offset(mod, start),
        seq_lengths=lengths,
    )


def _rows(start: int, stop: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of the part: the rows of the mask that hold its first and its last query."""
    firsts = torch.arange(start, stop, block, device=device)
    return firsts // block, (firsts + block - 1).clamp(max=stop - 1) // block


def _merged(cells: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """The cells of the part: those of both rows of the mask where they agree, else PARTIAL."""
    upper, lower = (cells.index_select(2, row) for row in rows)
    return torch.where(upper == lower, upper, PARTIAL)


def _called_in(elements: Elements, rows: tuple[Tensor, Tensor], cells: Tensor) -> Tensor:
    """The blocks of the mask in which a part with these `cells` calls the mod."""
    times = torch.zeros_like(elements.cells, dtype=torch.int32)
    for row in rows:  # a row may be there twice, so count
        times.index_add_(2, row, (cells == PARTIAL).to(torch.int32))
    return times > 0
