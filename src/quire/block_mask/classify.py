"""Which blocks of a mask are empty, partial or full, exactly.

Bounds of the mask_mod decide most blocks (`ir/bound.py`): we ask about wide spans of blocks first,
then about single ones. If the bounds of a block are unsure, we evaluate a few of its elements: one
that is True and one that is False make it partial. If that does not decide, we evaluate all of its
elements. Memory is bounded. A mask_mod that cannot be traced is evaluated for all elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.block_mask.blocks import EMPTY, FULL, PARTIAL, Runs, ceil_div
from quire.block_mask.tiles import TILE_ELEMENTS, Sizes, count_blocks
from quire.ir.bound import bound
from quire.ir.graph import inputs
from quire.ir.interpret import interpret
from quire.ir.pyramid import heap
from quire.ir.ranges import Range
from quire.ir.terms import term, whole
from quire.ir.trace import MASK_INPUTS, Mod, Traced

SPAN = 64  # blocks in a span
TRIED = 4  # elements that are evaluated first, along each side of a block
ASKED = 2**18  # spans or blocks whose bounds are computed at once
UNSURE = 3  # the kind of a block that is not decided yet


def classify(mod: Mod, sizes: Sizes, block_size: tuple[int, int], device: torch.device) -> Runs:
    """The blocks of a mask that are not empty. One that reaches beyond an end is never full."""
    batches, heads, q_len, kv_len = sizes
    # If all batches or heads have the same mask, classify the blocks of one.
    reads = inputs(mod.output) if isinstance(mod, Traced) else {"b", "h"}
    once = (
        batches if "b" in reads else min(1, batches),
        heads if "h" in reads else min(1, heads),
        *sizes[2:],
    )
    elements = min(block_size[0], q_len) * min(block_size[1], kv_len)
    if isinstance(mod, Traced) and 0 < elements <= TILE_ELEMENTS and 0 not in sizes:
        runs = Grid(mod, once, block_size, device).runs()
    else:
        counts = count_blocks(mod, once, block_size, device)
        full = counts == block_size[0] * block_size[1]
        cells = (counts > 0).to(torch.int32).masked_fill(full, FULL)
        runs = Runs.of_cells(cells.cpu().numpy())
    return _repeated(runs, batches, heads)


def _repeated(runs: Runs, batches: int, heads: int) -> Runs:
    """The runs of one batch or head, repeated for all of them."""
    if runs.shape[:2] == (batches, heads):
        return runs
    _, _, num_rows, columns = runs.shape
    rows = np.arange(math.prod(runs.shape[:3])).reshape(runs.shape[:3])
    sources = np.broadcast_to(rows, (batches, heads, num_rows)).ravel()
    return runs.pick(sources, (batches, heads, num_rows, columns))


class Rectangles:
    """Bounds of a traced mask over rectangles of queries and keys, and its elements."""

    def __init__(self, mask: Traced, ranges: Mapping[str, Range], levels: int = 0) -> None:
        self.mask = mask
        shapes = [tuple(tensor.shape) for tensor in mask.captures]
        bounds = bound(mask.output, shapes, ranges, levels)
        # One graph for both bounds, so that their common parts are computed once.
        known = term("where", bounds.must, whole(FULL), whole(UNSURE))
        self.kind = term("where", bounds.can, known, whole(EMPTY))
        pyramids = [heap(mask.captures[p.slot], p) for p in bounds.pyramids]
        self.captures = [*mask.captures, *pyramids]

    def kinds(self, env: Mapping[str, Tensor]) -> Tensor:
        """EMPTY, FULL or UNSURE by the bounds, from b, h, q_low, q_high, kv_low and kv_high."""
        return interpret(self.kind, env, self.captures)

    def holds(self, env: Mapping[str, Tensor]) -> Tensor:
        """The values of the mask, from b, h, q_idx and kv_idx."""
        return interpret(self.mask.output, env, self.mask.captures, where=self.mask.where)


class Grid:
    """The grid of blocks of a traced mask."""

    def __init__(
        self, mask: Traced, sizes: Sizes, block_size: tuple[int, int], device: torch.device
    ) -> None:
        self.mask, self.sizes, self.block_size, self.device = mask, sizes, block_size, device
        self.num_rows, self.num_columns = map(ceil_div, sizes[2:], block_size)
        ranges = {name: (0, size - 1) for name, size in zip(MASK_INPUTS, sizes, strict=True)}
        # A block whose size is a power of two is one entry of a pyramid of loads. Blocks of other
        # sizes need bounds that are exact for ranges that begin anywhere.
        odd = [size for size in block_size if size & (size - 1)]
        levels = min(8, max(odd).bit_length()) if odd else 0
        self.rectangles = Rectangles(mask, ranges, levels)

    def runs(self) -> Runs:
        """Classify all blocks, from wide spans down to elements."""
        span = SPAN if self.num_columns > 2 * SPAN else 1
        rows, spans = math.prod(self.sizes[:2]) * self.num_rows, ceil_div(self.num_columns, span)
        decided: list[Tensor] = []
        start = torch.arange(0, spans, device=self.device).view(1, -1) * span
        for row in torch.arange(rows, device=self.device).split(max(1, ASKED // spans)):
            decided += self._classified(row.view(-1, 1), start, start + span)
        none = torch.empty(0, 4, dtype=torch.int64, device=self.device)
        segments = torch.cat([none, *decided])
        segments = segments[(segments[:, 0] * (self.num_columns + 1) + segments[:, 1]).argsort()]
        row, start, stop, kind = segments.cpu().numpy().T
        shape = (*self.sizes[:2], self.num_rows, self.num_columns)
        return Runs.of_segments(shape, row, start, stop, kind.astype(np.int8))

    def _classified(self, row: Tensor, start: Tensor, stop: Tensor) -> list[Tensor]:
        """Classify spans of blocks: segments [k, 4] of row, start, stop and kind, without EMPTY.

        `row` is [n, 1]; `start` and `stop` are [n, m], or [1, m] if all rows have the same spans.
        So whatever depends on the row alone, or on the span alone, is computed once.
        """
        stop = stop.clamp(max=self.num_columns)
        kind = self._by_bounds(row, start, stop)
        row, start, stop = (part.expand(kind.shape) for part in (row, start, stop))
        wide = (kind == UNSURE) & (stop - start > 1)
        result = []
        if wide.any():
            blocks = torch.arange(SPAN, device=self.device)
            spans = torch.stack([row[wide], start[wide]], -1)
            for rows, starts in (part.split(1, -1) for part in spans.split(ceil_div(ASKED, SPAN))):
                result += self._classified(rows, starts + blocks, starts + blocks + 1)
        single = (kind == UNSURE) & ~wide
        kind[single] = self._by_elements(row[single], start[single])
        present = (kind != EMPTY) & ~wide
        parts = (row[present], start[present], stop[present], kind[present])
        return [*result, torch.stack(parts, -1)]

    def _place(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batch, head and row within them, from row numbers that count through all of them."""
        pair = row // self.num_rows
        return pair // self.sizes[1], pair % self.sizes[1], row % self.num_rows

    def _by_bounds(self, row: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        """The kind of each span by the bounds [n, m]. EMPTY for a span after the last column."""
        (q_size, kv_size), (q_len, kv_len) = self.block_size, self.sizes[2:]
        b, h, q = self._place(row)
        env = {
            "b": b,
            "h": h,
            "q_low": q * q_size,
            "q_high": ((q + 1) * q_size).clamp(max=q_len) - 1,
            "kv_low": (start * kv_size).clamp(max=kv_len - 1),
            "kv_high": (stop * kv_size).clamp(max=kv_len) - 1,
        }
        kind = self.rectangles.kinds(env).expand(len(row), start.shape[1])
        complete = ((q + 1) * q_size <= q_len) & (stop * kv_size <= kv_len)
        # A block that reaches beyond an end is partial. A span with such a block is split.
        ragged = torch.where(stop - start > 1, UNSURE, PARTIAL)
        kind = torch.where((kind == FULL) & ~complete, ragged, kind)
        return torch.where(start < stop, kind, EMPTY)

    def _by_elements(self, row: Tensor, column: Tensor) -> Tensor:
        """The kinds of single blocks by their elements: by a few of them first, then by all."""
        kind = torch.full_like(row, UNSURE)
        for sides in ((TRIED, TRIED), self.block_size):  # no more than TILE_ELEMENTS
            left = (kind == UNSURE).nonzero().flatten()
            if len(left) == 0:
                break
            for at in left.split(max(1, TILE_ELEMENTS // (sides[0] * sides[1]))):
                kind[at] = self._by_some_elements(row[at], column[at], sides)
        return kind

    def _by_some_elements(self, row: Tensor, column: Tensor, sides: tuple[int, int]) -> Tensor:
        """The kinds of blocks by `sides` elements. UNSURE if these agree and are not all."""
        b, h, q = self._place(row)
        q_idx, exists_q = self._positions(q, sides[0], 0)
        kv_idx, exists_kv = self._positions(column, sides[1], 1)
        env = {
            "b": b.view(-1, 1, 1),
            "h": h.view(-1, 1, 1),
            "q_idx": q_idx.unsqueeze(-1),
            "kv_idx": kv_idx.unsqueeze(-2),
        }
        held = self.rectangles.holds(env) & exists_q.unsqueeze(-1) & exists_kv.unsqueeze(-2)
        some, every = held.flatten(1).any(-1), held.flatten(1).all(-1)
        if sides == self.block_size:
            return torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))
        return torch.where(some & ~every, PARTIAL, UNSURE)

    def _positions(self, block: Tensor, count: int, axis: int) -> tuple[Tensor, Tensor]:
        """`count` positions spread over each block, and whether they exist: [n, count] each.

        A position that does not exist is replaced by the last one.
        """
        size, length = self.block_size[axis], self.sizes[2 + axis]
        count = min(count, size)
        places = torch.linspace(0, size - 1, count, dtype=torch.float64, device=self.device)
        positions = block.unsqueeze(-1) * size + places.round().long()
        return positions.clamp(max=length - 1), positions < length
