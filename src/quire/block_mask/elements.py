"""The elements of a block mask, as a mod.

    cells             mask_mod          elements          . empty   ░ partial   █ full
    █ .               1 1 0 0           1 1 0 0           blocks of 2 x 2
    . ░               0 0 1 0           1 1 0 0
                      1 0 1 0           0 0 1 0
                      1 0 0 1           0 0 0 1

The mask_mod of a block mask is called in partial blocks (░) and nowhere else. A user who lists
blocks by hand may give a mask_mod that disagrees with them elsewhere, or that fails there.

`Elements` takes a mask and a block size. It gives the cells of the mask in blocks of that size, and
for any set of blocks a mod that is right in them: the mask_mod itself if it is, else a mod that
looks up the kind of the block first.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quire.block_mask.blocks import EMPTY, FULL, NOOP_BLOCK_SIZE, PARTIAL, ceil_div
from quire.block_mask.classify import classify
from quire.block_mask.mask_mods import sliced_mask_mod
from quire.block_mask.tensors import BlockTensors
from quire.block_mask.tiles import Sizes, fastest_form
from quire.errors import BlockMaskShapeError
from quire.ir.graph import inputs
from quire.ir.trace import Traced, mod_name
from quire.mods.compose import MaskMod, named, not_mask


class Elements:
    """The cells [B or 1, H or 1, rows, columns] of a mask in blocks of `block_size`, and its mod.

    `sizes` are the B, H, L, S of the mask that will use them, by default those of `mask`.
    """

    def __init__(
        self, mask: BlockTensors, block_size: tuple[int, int], sizes: Sizes | None = None
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
        """The kind that the mask_mod alone would give each block. None if that is not known."""
        return kinds_of(self.mod, self.sizes, self.block_size, self.cells.device)

    @functools.cached_property
    def known(self) -> Tensor:
        """The kind of each partial block by its elements. PARTIAL if that is not known."""
        found = self.kinds
        if found is None:
            found = kinds_of(self.safe_mod, self.sizes, self.block_size, self.cells.device)
        return torch.full_like(self.cells, PARTIAL) if found is None else found

    @functools.cached_property
    def safe_mod(self) -> MaskMod:
        """A mod that is right in partial blocks and does not fail in the others."""
        if self.kinds is None:
            return by_block(self.mod, self.cells, self.block_size, only_in_partial=True)
        return self.mod

    def disputed(self, blocks: Tensor) -> Tensor:
        """Those of `blocks` in which the mask_mod may disagree with the cells: bool."""
        foreign = blocks & (self.cells != PARTIAL)
        if not foreign.any() or self.kinds is None:
            return foreign
        wrong = foreign & (self.kinds != self.cells)
        if (wrong & (self.cells == FULL)).any():
            # `kinds` never has FULL for a block that reaches beyond the last token. Such a block
            # agrees with a full cell if the inverse of the mod is empty there.
            holes = kinds_of(not_mask(self.mod), self.sizes, self.block_size, self.cells.device)
            if holes is not None:
                wrong &= (self.cells != FULL) | (holes != EMPTY)
        return wrong

    def mod_in(self, blocks: Tensor) -> MaskMod:
        """A mod that is right in `blocks`, a bool tensor like `cells`."""
        if not self.disputed(blocks).any():
            return self.mod
        may_fail = self.kinds is None
        return by_block(self.mod, self.cells, self.block_size, only_in_partial=may_fail)


def four_dimensional(mask: BlockTensors) -> Tensor:
    """The cells of a mask as [B, H, rows, columns]. Raise if it is a slice without a mask_mod."""
    cells = mask._cells()
    if mask.is_sliced:
        sliced_mask_mod(cells, cells, cells, cells)
    if cells.dim() > 4:
        raise BlockMaskShapeError(
            f"a block mask must have cells of shape [B, H, rows, columns], but has "
            f"{list(cells.shape)}. Flatten its batch dimensions into one."
        )
    return cells.reshape((1,) * (4 - cells.dim()) + cells.shape)


def kinds_of(
    mod: MaskMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor | None:
    """The kind of each block by the mask_mod alone. None if it cannot be called everywhere.

    Also None for a mask of unlimited length, and if the mod uses `b` or `h` while the sizes have
    one batch or head that stands for all.
    """
    form = fastest_form(mod, "mask", device)
    reads = inputs(form.output) if isinstance(form, Traced) else {"b", "h"}
    stands_for_all = {name for name, size in zip("bh", sizes, strict=False) if size == 1}
    if reads & stands_for_all or block_size == (NOOP_BLOCK_SIZE, NOOP_BLOCK_SIZE):
        return None
    return created_cells(form, sizes, block_size, device)


def created_cells(
    mod: MaskMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor | None:
    """The cells that create_block_mask would make. None if the mod fails somewhere."""
    form = fastest_form(mod, "mask", device)
    try:
        runs = classify(form, sizes, block_size, device)
    except (IndexError, ZeroDivisionError):  # a mask_mod may fail outside of partial blocks
        return None
    return torch.from_numpy(runs.cells()).to(device)


def reclassified(cells: Tensor, mod: MaskMod, sizes: Sizes, block_size: tuple[int, int]) -> Tensor:
    """`cells`, with partial ones replaced by their kind under `mod` if that can be computed."""
    found = kinds_of(mod, sizes, block_size, cells.device)
    return cells if found is None else torch.where(cells == PARTIAL, found, cells)


def element_mod(mask: BlockTensors) -> MaskMod:
    """A mod that is right in all blocks of a mask: it hides what no block has."""
    cells = four_dimensional(mask)
    if mask.is_endless and bool((cells == PARTIAL).all()):
        return mask.mask_mod
    return by_block(mask.mask_mod, cells, mask.BLOCK_SIZE, only_in_partial=True)


def by_block(
    mod: MaskMod, cells: Tensor, block_size: tuple[int, int], *, only_in_partial: bool
) -> MaskMod:
    """A mod that is True in full blocks, False in empty ones, and `mod` in partial ones.

    `mod` is computed for every element and its result used in partial blocks. If `mod` could fail
    elsewhere, set `only_in_partial`: then other elements call it with the first element of a
    partial block.
    """
    partial = (cells == PARTIAL).nonzero()
    table = cells.to(torch.int8)
    batch = [dim for dim in (0, 1) if cells.shape[dim] > 1]
    for dim in (1, 0):
        table = table if dim in batch else table.squeeze(dim)
    q_block, kv_block = block_size

    @named(f"blocks of {mod_name(mod)}")
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
    return mask
