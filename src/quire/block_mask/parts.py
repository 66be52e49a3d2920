"""A mask for other lengths, and a mask for some of its queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from quire.block_mask.classify import classify
from quire.block_mask.elements import Elements, created, is_endless, look_again
from quire.block_mask.lists import FULL, PARTIAL, as_count, ceil_div
from quire.block_mask.mask_mods import MaskMod
from quire.block_mask.tiles import Sizes, fastest_form
from quire.errors import BlockIndexError, BlockMaskShapeError
from quire.ir.trace import mod_name

if TYPE_CHECKING:
    from quire.block_mask.mask import BlockMask

Mask = TypeVar("Mask", bound="BlockMask")


def resize(mask: Mask, q_len: int, kv_len: int) -> Mask:
    """The mask for other lengths, both counted from the first query and key."""
    lengths = as_count("q_len", q_len), as_count("kv_len", kv_len)
    elements = Elements(mask, mask.BLOCK_SIZE)
    if is_endless(mask):
        return mask
    sizes: Sizes = (*elements.sizes[:2], *lengths)
    stray, device = _stray_block(elements), elements.cells.device
    if stray is None:
        form = fastest_form(mask.mask_mod, "mask", device)
        return mask._from_runs(
            classify(form, sizes, mask.BLOCK_SIZE, device),
            mask.separates_full_blocks,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mask.mask_mod,
            seq_lengths=lengths,
            device=device,
        )
    if any(new > old for new, old in zip(lengths, mask.seq_lengths, strict=True)):
        raise BlockMaskShapeError(
            f"expected lengths of at most {mask.seq_lengths}, since this mask lists blocks that do "
            f"not follow from its mask_mod, {mod_name(mask.mask_mod)!r} (the first is {stray}), so "
            f"that nothing says which blocks lie beyond; got {lengths}. List those too, with "
            f"BlockMask.from_kv_blocks, or make the mask from a mask_mod that says all of it."
        )
    num_rows, num_columns = map(ceil_div, lengths, mask.BLOCK_SIZE)
    cells = elements.cells[..., :num_rows, :num_columns]
    return mask._from_cells(
        look_again(cells, mask.mask_mod, sizes, mask.BLOCK_SIZE),
        mask.separates_full_blocks,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=lengths,
    )


def for_queries(mask: Mask, start: int, stop: int) -> Mask:
    """The mask of queries `start` up to `stop`, which count from 0, over all keys.

        rows of the mask   |0 . . . . . .|7 . . . . . .|14 . .         start 5, blocks of 7
        rows of the part             |0 . . . . . .|7 . . . . .

    A block of the part lies in two rows of the mask. Where they differ its mask_mod decides.
    """
    start, stop = as_count("start", start), as_count("stop", stop)
    lengths, block_size = mask.seq_lengths, mask.BLOCK_SIZE
    elements = Elements(mask, block_size)
    cells, mod = elements.cells, elements.mod
    if not is_endless(mask):
        if not start <= stop <= lengths[0]:
            raise BlockIndexError(
                f"expected 0 <= start <= stop <= {lengths[0]}, the number of queries of the block "
                f"mask, got start={start} and stop={stop}. Count tokens, not blocks."
            )
        lengths = (stop - start, lengths[1])
        rows = _rows(start, stop, block_size[0], cells.device)
        cells = _merged(cells, rows)
        sizes: Sizes = (*elements.sizes[:2], *lengths)
        mod = elements.mod_in(_asked(elements, rows, cells))
        if lengths[0] >= block_size[0]:  # decoding a few tokens is done before that would pay
            cells = look_again(cells, _shifted(mod, start), sizes, block_size)
            mod = elements.mod_in(_asked(elements, rows, cells))
    return mask._from_cells(
        cells,
        mask.separates_full_blocks,
        BLOCK_SIZE=block_size,
        mask_mod=_shifted(mod, start),
        seq_lengths=lengths,
    )


def _rows(start: int, stop: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of a mask in which blocks of the part that begins at `start` begin and end."""
    firsts = torch.arange(start, stop, block, device=device)
    return firsts // block, (firsts + block - 1).clamp(max=stop - 1) // block


def _merged(cells: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """What both rows of blocks are; PARTIAL where they differ."""
    upper, lower = (cells.index_select(2, row) for row in rows)
    return torch.where(upper == lower, upper, PARTIAL)


def _asked(elements: Elements, rows: tuple[Tensor, Tensor], cells: Tensor) -> Tensor:
    """The blocks of the mask in which a part with these `cells` asks the mod."""
    times = torch.zeros_like(elements.cells, dtype=torch.int32)
    for row in rows:  # one row may come twice
        times.index_add_(2, row, (cells == PARTIAL).to(torch.int32))
    return times > 0


def _shifted(mod: MaskMod, start: int) -> MaskMod:
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(b, h, q_idx + start, kv_idx)

    mask.__name__ = mask.__qualname__ = f"{mod_name(mod)} from query {start}"
    return mask


def _stray_block(elements: Elements) -> str | None:
    """A block of which create_block_mask would not have made what it is; None if there is none."""
    if elements.kinds is not None:
        wrong = elements.disputed(torch.ones_like(elements.cells, dtype=torch.bool))
    else:  # the mod cannot be judged as a whole, but may be the origin of these blocks
        made = created(elements.mod, elements.sizes, elements.block_size, elements.cells.device)
        if made is None:
            return "one in which it cannot be asked"
        wrong = (elements.cells != made) & ~((elements.cells == PARTIAL) & (made == FULL))
    if not wrong.any():
        return None
    b, h, row, column = wrong.nonzero()[0].tolist()
    kind = ("empty", "partial", "full")[int(elements.cells[b, h, row, column])]
    return f"the {kind} block in row {row} and column {column} of batch {b} and head {h}"
