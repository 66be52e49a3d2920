"""What the elements of a block mask are, said by a mod.

    cells             mask_mod          elements
    █ .               1 1 0 0           1 1 0 0      the mask_mod is asked in ░ and nowhere else: it
    . ░               0 0 1 0           0 0 1 0      need not agree with a mask that someone listed
                      1 0 0 1           0 0 0 1      by hand, and may fail where it is not asked

Comes in: a mask. Goes out: its cells on a grid as fine as another's, and a mod that is right in
whatever blocks it will be asked: the mask_mod itself where that is enough, else one that looks the
block up first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.block_mask.classify import classify
from quire.block_mask.lists import EMPTY, FULL, NOOP_BLOCK_SIZE, PARTIAL, ceil_div
from quire.block_mask.mask_mods import MaskMod, sliced_mask_mod
from quire.block_mask.tiles import Sizes, fastest_form
from quire.errors import BlockMaskShapeError
from quire.ir.graph import inputs
from quire.ir.trace import Traced, mod_name

if TYPE_CHECKING:
    from quire.block_mask.mask import BlockMask


class Elements:
    """The elements of a mask, for a number of batches and heads and on a grid of blocks.

    `cells` are [B or 1, H or 1, rows, columns]; `sizes` are those of the masks that it is for.
    """

    def __init__(
        self, mask: BlockMask, block_size: tuple[int, int], sizes: Sizes | None = None
    ) -> None:
        cells = four_dimensional(mask)
        self.sizes = sizes or (cells.shape[0], cells.shape[1], *mask.seq_lengths)
        for dim, (length, fine, own) in enumerate(
            zip(self.sizes[2:], block_size, mask.BLOCK_SIZE, strict=True), 2
        ):
            starts = torch.arange(ceil_div(length, fine), device=cells.device) * fine
            cells = cells.index_select(dim, starts // own)
        self.cells, self.block_size, self.mod = cells, block_size, mask.mask_mod

    @functools.cached_property
    def kinds(self) -> Tensor | None:
        """What each block would be if the mask_mod alone decided; None where that is not known."""
        return kinds(self.mod, self.sizes, self.block_size, self.cells.device)

    @functools.cached_property
    def known(self) -> Tensor:
        """What each partial block is by its elements, as far as that is known."""
        found = self.kinds
        if found is None:
            found = kinds(self.safe_mod, self.sizes, self.block_size, self.cells.device)
        return torch.full_like(self.cells, PARTIAL) if found is None else found

    @functools.cached_property
    def safe_mod(self) -> MaskMod:
        """A mod that is right in partial blocks, and does not fail in the others."""
        if self.kinds is None:
            return looked_up(self.mod, self.cells, self.block_size, only_in_partial=True)
        return self.mod

    def disputed(self, asked: Tensor) -> Tensor:
        """The blocks `asked` in which the mask_mod is not known to agree with the cells."""
        foreign = asked & (self.cells != PARTIAL)
        if not foreign.any() or self.kinds is None:
            return foreign
        wrong = foreign & (self.kinds != self.cells)
        if (wrong & (self.cells == FULL)).any():
            # A block beyond the last token is never called full. It is if nothing is left out.
            holes = kinds(inverted(self.mod), self.sizes, self.block_size, self.cells.device)
            if holes is not None:
                wrong &= (self.cells != FULL) | (holes != EMPTY)
        return wrong

    def mod_in(self, asked: Tensor) -> MaskMod:
        """A mod that is right in the blocks `asked`: [B or 1, H or 1, rows, columns]."""
        if not self.disputed(asked).any():
            return self.mod
        careful = self.kinds is None
        return looked_up(self.mod, self.cells, self.block_size, only_in_partial=careful)


def four_dimensional(mask: BlockMask) -> Tensor:
    """The cells of a mask that has a mask_mod, as [B, H, rows, columns]."""
    cells = mask._cells()
    if mask.is_sliced:
        sliced_mask_mod(cells, cells, cells, cells)
    if cells.dim() > 4:
        raise BlockMaskShapeError(
            f"expected a block mask with cells of shape [B, H, rows, columns], got "
            f"{list(cells.shape)}. Flatten its batch dimensions into one."
        )
    return cells.reshape((1,) * (4 - cells.dim()) + cells.shape)


def is_endless(mask: BlockMask) -> bool:
    """Whether a mask is good for every length."""
    return mask.BLOCK_SIZE == (NOOP_BLOCK_SIZE, NOOP_BLOCK_SIZE)


def kinds(
    mod: MaskMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor | None:
    """What each block of a mask_mod is; None where it cannot be asked everywhere.

    Nor can it if the mask is for every length, or if the mod tells batches or heads apart of which
    the sizes have one that stands for all.
    """
    form = fastest_form(mod, "mask", device)
    reads = inputs(form.output) if isinstance(form, Traced) else {"b", "h"}
    stands_for_all = {name for name, size in zip("bh", sizes, strict=False) if size == 1}
    if reads & stands_for_all or block_size == (NOOP_BLOCK_SIZE, NOOP_BLOCK_SIZE):
        return None
    return created(form, sizes, block_size, device)


def created(
    mod: MaskMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor | None:
    """The cells that create_block_mask would find; None where the mod cannot be asked."""
    form = fastest_form(mod, "mask", device)
    try:
        runs = classify(form, sizes, block_size, device)
    except (IndexError, ZeroDivisionError):  # only where it is asked must a mask_mod be right
        return None
    return torch.from_numpy(runs.cells()).to(device)


def look_again(cells: Tensor, mod: MaskMod, sizes: Sizes, block_size: tuple[int, int]) -> Tensor:
    """`cells`, of which those that are partial are what `mod` says if it can be asked."""
    found = kinds(mod, sizes, block_size, cells.device)
    return cells if found is None else torch.where(cells == PARTIAL, found, cells)


def element_mod(mask: BlockMask) -> MaskMod:
    """A mod that is right everywhere in the blocks of a mask."""
    if is_endless(mask):
        return mask.mask_mod
    return looked_up(mask.mask_mod, four_dimensional(mask), mask.BLOCK_SIZE, only_in_partial=True)


def looked_up(
    mod: MaskMod, cells: Tensor, block_size: tuple[int, int], *, only_in_partial: bool
) -> MaskMod:
    """A mod that says what blocks say: all of a full one, nothing of an empty one.

    With `only_in_partial`, `mod` sees positions of partial blocks alone: elsewhere, those of the
    first element of one.
    """
    partial = (cells == PARTIAL).nonzero()
    table = cells.to(torch.int8)
    batch = [dim for dim in (0, 1) if cells.shape[dim] > 1]
    for dim in (1, 0):
        table = table if dim in batch else table.squeeze(dim)
    q_block, kv_block = block_size

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kind = table[(*((b, h)[dim] for dim in batch), q_idx // q_block, kv_idx // kv_block)]
        if not len(partial):
            return kind == FULL
        inside = kind == PARTIAL
        if only_in_partial:
            pairs = zip((b, h, q_idx, kv_idx), first, strict=True)
            b, h, q_idx, kv_idx = (torch.where(inside, index, known) for index, known in pairs)
        return (kind == FULL) | (inside & mod(b, h, q_idx, kv_idx))

    if len(partial):
        batch_idx, head, row, column = partial[0].tolist()
        first = (batch_idx, head, row * q_block, column * kv_block)
    mask.__name__ = mask.__qualname__ = f"blocks of {mod_name(mod)}"
    return mask


def inverted(mod: MaskMod) -> MaskMod:
    """The mod that allows what `mod` does not."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed: Tensor | bool = mod(b, h, q_idx, kv_idx)
        if isinstance(allowed, bool):  # a user's mod may return Python's own
            return b < 0 if allowed else b >= 0
        return ~allowed

    mask.__name__ = mask.__qualname__ = f"~{mod_name(mod)}"
    return mask
