"""Block masks for tests: mods of many kinds, masks listed by hand, and what they allow."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from quire.block_mask import BlockMask, create_block_mask
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL, ceil_div
from quire.reference import block_mask_elements

LENGTHS = (13, 18)
SHORT = torch.tensor([True, False, True, True])


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 5


def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 7 * b + 3) | (q_idx < 4 * h)


def aligned(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 4) >= (kv_idx // 4)


def always(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return True


def never(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx < 0


def untraceable(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.special.bessel_j0(q_idx.float()) > torch.special.bessel_j0(kv_idx.float())


def only_first_queries(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Fails beyond the fourth query."""
    return SHORT[q_idx] & (kv_idx % 3 > 0)


MODS = (causal, window, by_batch, aligned, always, never, untraceable)
BLOCK_SIZES = ((4, 4), (2, 8), (4, 2), (8, 8), (16, 4), (32, 32))


def from_cells(
    cells: Any, mod: Any = causal, block: Any = (4, 4), lengths: Any = None
) -> BlockMask:
    """A mask with these cells [.., rows, columns], whatever its mod says."""
    cells = torch.as_tensor(cells, dtype=torch.int32)
    cells = cells.reshape((1,) * (4 - cells.dim()) + cells.shape)
    if lengths is None:
        lengths = (cells.shape[-2] * block[0], cells.shape[-1] * block[1])
    return BlockMask._from_cells(cells, True, BLOCK_SIZE=block, mask_mod=mod, seq_lengths=lengths)


@st.composite
def block_masks(draw: st.DrawFn, lengths: tuple[int, int] = LENGTHS) -> BlockMask:
    """Masks created from a mod, and masks listed by hand that do not agree with theirs."""
    batch = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    block = draw(st.sampled_from(BLOCK_SIZES))
    if draw(st.booleans()):
        # A mask for all batches must come from a mod that does not tell them apart.
        mods = MODS if batch == (2, 2) else [mod for mod in MODS if mod is not by_batch]
        mod, separate = draw(st.sampled_from(mods)), draw(st.booleans())
        return create_block_mask(
            mod, *batch, *lengths, "cpu", BLOCK_SIZE=block, separate_full_blocks=separate
        )
    grid = tuple(map(ceil_div, lengths, block))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    kinds = torch.tensor(draw(st.sampled_from([(0, 1, 2), (0, 1), (0, 2), (1, 2), (1,)])))
    cells = kinds[torch.randint(0, len(kinds), (*batch, *grid), generator=generator)]
    mod = draw(st.sampled_from((*MODS, only_first_queries)))
    if mod is only_first_queries:
        last = torch.arange(grid[0]) * block[0] + block[0]
        fails = (last > len(SHORT)).view(-1, 1) & (cells == PARTIAL)
        cells = torch.where(fails, draw(st.sampled_from([EMPTY, FULL])), cells)
    return from_cells(cells, mod, block, lengths)


def allowed(mask: BlockMask, batch: tuple[int, int] = (2, 2)) -> Tensor:
    """Every element that a mask allows."""
    return block_mask_elements(mask, (*batch, *mask.seq_lengths))


def true_cells(elements: Tensor, block: tuple[int, int]) -> Tensor:
    """What each block is by its elements, border blocks included."""
    num_rows, num_columns = map(ceil_div, elements.shape[2:], block)
    cells = torch.empty((*elements.shape[:2], num_rows, num_columns), dtype=torch.int32)
    for row in range(num_rows):
        for column in range(num_columns):
            q, kv = row * block[0], column * block[1]
            inside = elements[:, :, q : q + block[0], kv : kv + block[1]].flatten(2)
            kind = torch.where(inside.all(-1), FULL, torch.where(inside.any(-1), PARTIAL, EMPTY))
            cells[:, :, row, column] = kind
    return cells
