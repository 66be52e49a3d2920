"""Masks for a part of a mask: some rows of blocks, other lengths, some queries."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.block_mask.blocks import FULL, PARTIAL, ceil_div
from quire.block_mask.checks import INDEX_DTYPES, as_count, is_readable
from quire.block_mask.elements import Elements, created_cells, reclassified
from quire.block_mask.mask_mods import sliced_mask_mod
from quire.block_mask.tensors import BlockTensors, Mask
from quire.block_mask.tiles import Sizes
from quire.checks.arguments import dtype_name
from quire.errors import BlockIndexError, BlockMaskShapeError
from quire.ir.trace import mod_name
from quire.mods.compose import offset

# --- rows of blocks, and the upper left corner ---------------------------------------------------


def take(mask: Mask, index: Any) -> Mask:
    """Return the mask of some batches, heads and rows of blocks. All dimensions stay.

    >>> part = block_mask[0, :, 1]     # batch 0, every head, the second row of blocks
    >>> part.shape[-2]                 # the queries in that row
    128

    `index` is an int, a slice, a tensor [n], a list or `...`, alone or in a tuple. The queries of a
    slice count from 0, which its mask_mod does not know. So using a slice raises an error until you
    set its mask_mod. `for_queries` gives a mask that can be used at once. If a tensor picks rows in
    another order, each counts as a whole block, except for the last one.
    """
    where = _expanded_index(index, mask.kv_num_blocks.shape)
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


def crop(mask: Mask, new_q_len: int, new_kv_len: int) -> Mask:
    """Return the mask of the first queries and keys. PyTorch calls this `_adjust`.

    The mask_mod stays the same, so this is right if it does not depend on the lengths.
    """
    lengths = as_count("new_q_len", new_q_len), as_count("new_kv_len", new_kv_len)
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
    part = mask._with_cells(
        mask._cells()[..., :num_rows, :num_columns],
        seq_lengths=lengths,
        compute_q_blocks=mask.q_indices is not None,
    )
    return _ordered_like(part, mask, order)


def _num_queries(mask: BlockTensors, rows: slice | Tensor) -> int:
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
    """Return the mask for other lengths, shorter or longer, as its mask_mod describes it.

    If the blocks were listed by hand and do not follow from the mask_mod, the lengths can only
    become shorter.
    """
    lengths = as_count("q_len", q_len), as_count("kv_len", kv_len)
    elements = Elements(mask, mask.BLOCK_SIZE)
    if mask.is_endless:
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
    cells = reclassified(cells, mask.mask_mod, sizes, mask.BLOCK_SIZE)
    return mask._with_cells(cells, seq_lengths=lengths)


def _stray_block(elements: Elements) -> str | None:
    """Describe a block that create_block_mask would not have made. None if there is none."""
    if elements.kinds is not None:
        wrong = elements.disputed(torch.ones_like(elements.cells, dtype=torch.bool))
    else:  # for example, the mod reads b, and the mask has one batch that stands for all
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
    """Return the mask of the queries from `start` up to `stop`, over the same keys.

    >>> step = block_mask.for_queries(t, t + 1)
    >>> flex_attention(query[:, :, t : t + 1], key, value, block_mask=step)

    Its mask_mod adds `start` to `q_idx`, so the result can be used as it is. `start` may be in the
    middle of a block:

        rows of the mask   |0 . . . . . .|7 . . . . . .|14 . .         start 5, blocks of 7
        rows of the part             |0 . . . . . .|7 . . . . .

    A block of the part overlaps up to two rows of the mask. If they differ there, it is partial.
    """
    start, stop = as_count("start", start), as_count("stop", stop)
    lengths, block_size = mask.seq_lengths, mask.BLOCK_SIZE
    elements = Elements(mask, block_size)
    cells, mod = elements.cells, elements.mod
    if not mask.is_endless:
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
    return mask._with_cells(cells, mask_mod=offset(mod, start), seq_lengths=lengths)


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
    for row in rows:  # a row may occur twice
        times.index_add_(2, row, (cells == PARTIAL).to(torch.int32))
    return times > 0


# --- the index in `block_mask[index]` ------------------------------------------------------------


def _expanded_index(index: object, shape: torch.Size) -> tuple[slice | Tensor, ...]:
    """Return one slice or 1-d tensor for each dimension of `shape` from what a user wrote.

    An integer becomes a slice of length 1, so that all dimensions stay.
    """
    parts = index if isinstance(index, tuple) else (index,)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    given = len(parts) - len(dots)
    if given > len(shape) or len(dots) > 1:
        raise BlockIndexError(
            f"the index of a block mask must have at most {len(shape)} parts (batch, head, row of "
            f"blocks) and one `...`, but has {given} and {len(dots)}. Index no columns of blocks."
        )
    place = dots[0] if dots else given
    everything = (slice(None),) * (len(shape) - given)
    parts = parts[:place] + everything + parts[place + 1 :]
    expanded = tuple(_expand_part(part, size) for part, size in zip(parts, shape, strict=True))
    if isinstance(expanded[-1], Tensor) and any(isinstance(part, Tensor) for part in expanded[:-1]):
        raise BlockIndexError(
            "a tensor that picks rows must be the only tensor in the index, but there are several. "
            "Index twice: mask[batches, heads][:, :, rows]."
        )
    return expanded


def _expand_part(part: object, size: int) -> slice | Tensor:
    if isinstance(part, slice):
        if part.step is not None and part.step < 1:
            raise BlockIndexError(
                f"a slice of a block mask must have a positive step, but is {part}. Pick blocks in "
                f"another order with a tensor."
            )
        return part
    if isinstance(part, (list, np.ndarray)):
        part = torch.as_tensor(part, device="cpu")
    if isinstance(part, Tensor):
        return _expand_picks(part, size)
    try:
        number = operator.index(part)  # type: ignore[arg-type]
    except TypeError:
        raise BlockIndexError(
            f"a part of an index must be an integer, a slice, a tensor or `...`, but is {part!r}. "
            f"Index batch, head and row of blocks."
        ) from None
    _check_range(number, size)
    return slice(number % size, number % size + 1)


def _expand_picks(picks: Tensor, size: int) -> Tensor:
    if picks.dtype == torch.bool and picks.shape == (size,):
        picks = picks.nonzero().squeeze(-1)
    picks = picks.reshape(1) if picks.dim() == 0 else picks
    if picks.dim() != 1 or (picks.numel() and picks.dtype not in INDEX_DTYPES):
        raise BlockIndexError(
            f"a tensor in an index must be 1-D and hold integers, or {size} truth values, but is "
            f"{dtype_name(picks.dtype)} {list(picks.shape)}. Flatten it and convert it to int64."
        )
    picks = picks.long()  # torch takes uint8 for truth values
    if is_readable(picks):
        for number in picks[(picks < -size) | (picks >= size)].tolist():
            _check_range(number, size)
    return picks


def _check_range(number: int, size: int) -> None:
    if not -size <= number < size:
        raise BlockIndexError(
            f"an index into a dimension of size {size} of a block mask must be from {-size} to "
            f"{size - 1}, but is {number}. Count batches, heads and rows of blocks, not tokens."
        )
