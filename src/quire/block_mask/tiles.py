"""A mod evaluated over a whole mask, tile by tile, so that memory stays bounded.

Comes in: a mod, the sizes (B, H, L, S) and a block size. Goes out: tiles of truth values, or their
number in each block. A tile never has more than TILE_ELEMENTS elements and never straddles blocks:
it covers whole blocks, or a piece of one that is itself too large.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.block_mask.lists import ceil_div
from quire.block_mask.mask_mods import REFUSED, try_trace
from quire.errors import ModError
from quire.ir.graph import inputs
from quire.ir.trace import Kind, Mod, Traced
from quire.vectorise import evaluate

TILE_ELEMENTS = 1 << 20
"""How many elements of a mask are evaluated at once."""

Sizes: TypeAlias = tuple[int, int, int, int]
Tile: TypeAlias = tuple[slice, slice, slice, slice]


def evaluate_tiles(
    mod: Mod, kind: Kind, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Iterator[tuple[Tile, Tensor]]:
    """Where `mod` lets attention through, for each tile: bool [b, h, q, kv].

    A score_mod lets through what it does not turn into -inf.
    """
    for tile in _tiles(sizes, block_size):
        b, h, q, kv = (torch.arange(part.start, part.stop, device=device) for part in tile)
        shape = (len(b), len(h), len(q), len(kv))
        with torch.no_grad():
            if kind == "mask":
                values = evaluate(mod, kind, b, h, q, kv)
            else:
                score = torch.zeros((), device=device).expand(shape)
                values = ~torch.isneginf(evaluate(mod, kind, b, h, q, kv, score=score))
        yield tile, values.expand(shape)


def count_blocks(
    mod: Mod, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor:
    """How many elements of each block the mask_mod lets through: int64 [B, H, rows, columns]."""
    num_batches, num_heads, *lengths = sizes
    # A mask that is the same for every batch or head is counted once.
    reads = inputs(mod.output) if isinstance(mod, Traced) else {"b", "h"}
    batch = (
        num_batches if "b" in reads else min(num_batches, 1),
        num_heads if "h" in reads else min(num_heads, 1),
    )
    num_blocks = tuple(map(ceil_div, lengths, block_size))
    counts = torch.zeros((*batch, *num_blocks), dtype=torch.int64, device=device)
    tiles = evaluate_tiles(mod, "mask", (*batch, *sizes[2:]), block_size, device)
    for (b, h, q, kv), values in tiles:
        where = b, h, _blocks_of(q, block_size[0]), _blocks_of(kv, block_size[1])
        # Rows first: they lie side by side in memory, and leave little for the columns.
        by_row = _sum_blocks(values.transpose(-2, -1), block_size[0]).transpose(-2, -1)
        counts[where] += _sum_blocks(by_row, block_size[1])
    return counts.expand(num_batches, num_heads, *num_blocks)


def fastest_form(mod: Mod, kind: Kind, device: torch.device) -> Mod:
    """The trace of `mod`, which is evaluated at the shape it depends on, or `mod` itself."""
    traced = try_trace(mod, kind, device)
    if isinstance(traced, REFUSED):
        raise traced  # torch could not run it either, and says less about it
    return mod if isinstance(traced, ModError) else traced


def _sum_blocks(values: Tensor, block: int) -> Tensor:
    """Sums over the last dimension, `block` at a time; a last block may be short."""
    length = values.shape[-1]
    block = min(block, length)
    if length % block:
        values = pad(values, (0, -length % block))
    blocks: Tensor = values.unflatten(-1, (-1, block))
    return blocks.sum(-1, dtype=torch.int32)


def _blocks_of(tokens: slice, block: int) -> slice:
    return slice(tokens.start // block, ceil_div(tokens.stop, block))


def _tiles(sizes: Sizes, block_size: tuple[int, int]) -> Iterator[Tile]:
    """Tiles that cover `sizes`: as much of the innermost dimension as fits, then of the next."""
    if 0 in sizes:
        return
    budget = TILE_ELEMENTS
    ranges: list[list[slice]] = []
    for size, block in zip(reversed(sizes), (*reversed(block_size), 1, 1), strict=True):
        step = _step(size, block, budget)
        ranges.insert(0, _pieces(size, block, step))
        budget //= step
    b_ranges, h_ranges, q_ranges, kv_ranges = ranges
    yield from itertools.product(b_ranges, h_ranges, q_ranges, kv_ranges)


def _step(size: int, block: int, budget: int) -> int:
    """How many of `size` elements a tile takes: all, some whole blocks, or a piece of one."""
    if size <= budget:
        return size
    return budget // block * block if block <= budget else max(budget, 1)


def _pieces(size: int, block: int, step: int) -> list[slice]:
    """Half-open ranges that cover [0, size).

    block 4, step 8:  |0 . . . 4 . . .|8 . .|       block 4, step 3:  |0 . .|3|4 . .|7|8 . .|
    """
    return [
        slice(start, min(start + step, stop))
        for first in range(0, size, max(step, block))
        for stop in [min(first + max(step, block), size)]
        for start in range(first, stop, step)
    ]
