"""A mod evaluated for all elements of a mask, tile by tile, so that memory stays bounded.

A mod, the sizes (B, H, L, S) and a block size give tiles of bools, or how many elements of each
block are True. A tile has at most TILE_ELEMENTS elements. It covers whole blocks, or a part of one
block that is larger than a tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.block_mask.blocks import ceil_div
from quire.block_mask.mask_mods import REFUSED, try_trace
from quire.errors import ModError
from quire.ir.trace import Kind, Mod
from quire.ir.vectorise import evaluate

TILE_ELEMENTS = 1 << 20
"""The most elements of a mask that are evaluated at once."""

Sizes: TypeAlias = tuple[int, int, int, int]
Tile: TypeAlias = tuple[slice, slice, slice, slice]


def evaluate_tiles(
    mod: Mod, kind: Kind, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Iterator[tuple[Tile, Tensor]]:
    """Yield each tile, with True where a query sees a key: bool [b, h, q, kv].

    A score_mod hides a key by returning -inf.
    """
    for tile in _tiles(sizes, block_size):
        b, h, q, kv = (torch.arange(part.start, part.stop, device=device) for part in tile)
        shape = (len(b), len(h), len(q), len(kv))
        with torch.no_grad():
            if kind == "mask":
                values = evaluate(mod, kind, b, h, q_idx=q, kv_idx=kv)
            else:
                score = torch.zeros((), device=device).expand(shape)
                scores = evaluate(mod, kind, b, h, q_idx=q, kv_idx=kv, score=score)
                values = ~torch.isneginf(scores)
        yield tile, values.expand(shape)


def count_blocks(
    mod: Mod, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor:
    """How many elements of each block are True: int64 [B, H, rows, columns]."""
    shape = (*sizes[:2], *map(ceil_div, sizes[2:], block_size))
    counts = torch.zeros(shape, dtype=torch.int64, device=device)
    for (b, h, q, kv), values in evaluate_tiles(mod, "mask", sizes, block_size, device):
        where = b, h, _blocks_of(q, block_size[0]), _blocks_of(kv, block_size[1])
        # Sum over rows first: that reads memory in order and leaves less to sum over columns.
        by_row = _sum_blocks(values.transpose(-2, -1), block_size[0]).transpose(-2, -1)
        counts[where] += _sum_blocks(by_row, block_size[1])
    return counts


def fastest_form(mod: Mod, kind: Kind, device: torch.device) -> Mod:
    """The trace of `mod`, which is the fastest to evaluate. Without a trace it is `mod` itself."""
    traced = try_trace(mod, kind, device)
    if isinstance(traced, REFUSED):
        raise traced  # torch could not run it either, and its message would say less
    return mod if isinstance(traced, ModError) else traced


def _sum_blocks(values: Tensor, block: int) -> Tensor:
    """Sums of `block` neighbours each along the last dimension. The last block may be shorter."""
    length = values.shape[-1]
    block = min(block, length)
    if length % block:
        values = pad(values, (0, -length % block))
    blocks: Tensor = values.unflatten(-1, (-1, block))
    return blocks.sum(-1, dtype=torch.int32)


def _blocks_of(tokens: slice, block: int) -> slice:
    return slice(tokens.start // block, ceil_div(tokens.stop, block))


def _tiles(sizes: Sizes, block_size: tuple[int, int]) -> Iterator[Tile]:
    """Tiles that cover `sizes`: first as many keys as fit into a tile, then queries, and so on."""
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
    """How many of `size` elements a tile takes: all, several whole blocks, or a part of one."""
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
