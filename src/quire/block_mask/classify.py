"""What each block of a mask is: empty, partial or full, exactly.

Bounds decide most blocks at once. The elements of the others are looked at, a bounded number at a
time. A mask_mod that has no graph is evaluated everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.block_mask.lists import EMPTY, FULL, PARTIAL, ceil_div
from quire.block_mask.mask_mods import MaskMod
from quire.block_mask.tiles import TILE_ELEMENTS, Sizes, count_blocks
from quire.ir.bound import bound, heap
from quire.ir.graph import inputs
from quire.ir.interpret import interpret
from quire.ir.trace import Traced


def classify(
    mod: MaskMod | Traced, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor:
    """EMPTY, PARTIAL or FULL for each block: int32 [B, H, rows, columns].

    As in PyTorch, a block that reaches beyond the last query or key is never full.
    """
    if not isinstance(mod, Traced) or 0 in sizes:
        counts = count_blocks(mod, sizes, block_size, device)
        full = counts == block_size[0] * block_size[1]
        return (counts > 0).to(torch.int32).masked_fill(full, FULL)
    reads = inputs(mod.output)
    # A mask that is the same for every batch or head is looked at once.
    batches, heads = (size if name in reads else 1 for size, name in zip(sizes, "bh", strict=False))
    grid = _Grid(mod, (batches, heads, *sizes[2:]), block_size, device)
    return grid.cells().expand(sizes[0], sizes[1], -1, -1)


class _Grid:
    """The blocks of a traced mask."""

    def __init__(
        self, mask: Traced, sizes: Sizes, block_size: tuple[int, int], device: torch.device
    ) -> None:
        self.mask, self.sizes, self.block_size, self.device = mask, sizes, block_size, device
        self.num_rows, self.num_columns = map(ceil_div, sizes[2:], block_size)
        ends = dict(zip(("b", "h", "q_idx", "kv_idx"), sizes, strict=True))
        ranges = {name: (0, size - 1) for name, size in ends.items()}
        self.bounds = bound(mask.output, [tuple(t.shape) for t in mask.captures], ranges)
        pyramids = [heap(mask.captures[p.slot], p) for p in self.bounds.pyramids]
        self.captures = [*mask.captures, *pyramids]

    def cells(self) -> Tensor:
        """What each block is, some rows of blocks at a time."""
        batches, heads = self.sizes[:2]
        shape = (batches, heads, self.num_rows, self.num_columns)
        cells = torch.empty(shape, dtype=torch.int32, device=self.device)
        step = max(1, TILE_ELEMENTS // max(1, batches * heads * self.num_columns))
        for first in range(0, self.num_rows, step):
            rows = torch.arange(first, min(first + step, self.num_rows), device=self.device)
            cells[:, :, first : first + step] = self._bounded(rows)
        self._look_at(cells, (cells == UNSURE).nonzero())
        return cells

    def _axis(self, name: str, index: Tensor, dim: int) -> dict[str, Tensor]:
        """The first and the last position of blocks."""
        place = 0 if name == "q" else 1
        length, size = self.sizes[2 + place], self.block_size[place]
        low = index * size
        high = (low + size).clamp(max=length) - 1
        shape = [-1 if d == dim else 1 for d in range(4)]
        return {f"{name}_low": low.view(shape), f"{name}_high": high.view(shape)}

    def _bounded(self, rows: Tensor) -> Tensor:
        """EMPTY, FULL, or UNSURE by the bounds alone."""
        batches, heads, *lengths = self.sizes
        columns = torch.arange(self.num_columns, device=self.device)
        env = {
            "b": torch.arange(batches, device=self.device).view(-1, 1, 1, 1),
            "h": torch.arange(heads, device=self.device).view(1, -1, 1, 1),
            **self._axis("q", rows, 2),
            **self._axis("kv", columns, 3),
        }
        can, must = (interpret(g, env, self.captures) for g in (self.bounds.can, self.bounds.must))
        whole_rows = ((rows + 1) * self.block_size[0] <= lengths[0]).view(-1, 1)
        whole = whole_rows & ((columns + 1) * self.block_size[1] <= lengths[1])
        kind = torch.where(must, torch.where(whole, FULL, PARTIAL), UNSURE)
        kind = torch.where(can, kind, EMPTY)
        return kind.expand(batches, heads, len(rows), self.num_columns)

    def _look_at(self, cells: Tensor, unsure: Tensor) -> None:
        """Decide the blocks [n, 4] that bounds could not decide, element by element."""
        count = max(1, TILE_ELEMENTS // (self.block_size[0] * self.block_size[1]))
        for at in unsure.split(count):
            b, h, row, column = at.unbind(-1)
            q_idx, exists_q = self._positions(row, 0)
            kv_idx, exists_kv = self._positions(column, 1)
            env = {
                "b": b.view(-1, 1, 1),
                "h": h.view(-1, 1, 1),
                "q_idx": q_idx.unsqueeze(-1),
                "kv_idx": kv_idx.unsqueeze(-2),
            }
            held = interpret(self.mask.output, env, self.mask.captures, where=self.mask.where)
            held = held & exists_q.unsqueeze(-1) & exists_kv.unsqueeze(-2)
            some, every = held.flatten(1).any(-1), held.flatten(1).all(-1)
            kind = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))
            cells[b, h, row, column] = kind.to(torch.int32)

    def _positions(self, block: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """The positions in blocks, none past the last, and whether they exist: [n, size]."""
        size, length = self.block_size[place], self.sizes[2 + place]
        positions = block.unsqueeze(-1) * size + torch.arange(size, device=self.device)
        return positions.clamp(max=length - 1), positions < length


UNSURE = 3
"""A block that bounds do not decide."""
