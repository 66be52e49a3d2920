"""Which tiles a call has, and their order.

stripe: some batches x some heads x a range of queries
tile:   a stripe x a range of keys, the unit of work

            keys
         ┌──────┬──────┬──────┐
queries  │ tile │ tile │ tile │  a stripe
         ├──────┼──────┼──────┘
         │ tile │ tile │          the next one; an empty block of a block mask has no tile
         └──────┴──────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.block_mask.blocks import FULL, BlockRows, Runs
from quire.memory import Placed
from quire.request import Problem, ReadyMod

TILE_ELEMENTS = 2**18
"""The most scores of a tile: a megabyte, which stays in the cache of a core."""

TILE_SIDE = 256
"""The most queries of a tile, and the fewest keys that it should have."""


class Keys(NamedTuple):
    """A range of keys and the masks that apply to it."""

    positions: slice
    masks: tuple[ReadyMod, ...]


class Stripe(NamedTuple):
    """A range of queries of some batches and heads, and the keys that they read, tile by tile."""

    batch: slice
    heads: slice
    kv_heads: slice
    queries: slice
    tiles: list[Keys]

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Return the index of the stripe in a tensor [B, Hq, L, ...]."""
        return self.batch, self.heads, self.queries

    def rows_of(self, keys: Keys, tensor: Tensor) -> tuple[slice, slice, slice]:
        """Return the index of the keys that it reads in a tensor [B or 1, Hkv, S, ...]."""
        batch = self.batch if tensor.shape[0] > 1 else slice(0, 1)
        return batch, self.kv_heads, keys.positions


class Sizes(NamedTuple):
    """The sizes of one call."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @staticmethod
    def of(placed: Placed) -> Sizes:
        """Return the sizes of query [B, Hq, L, D] and key [B or 1, Hkv, S, D]."""
        (batch, q_heads, q_len, _), key = placed.query.shape, placed.key
        return Sizes(batch, q_heads, key.shape[1], q_len, key.shape[2])

    @property
    def group(self) -> int:
        """Return how many query heads read one key head."""
        return self.q_heads // self.kv_heads


def stripes(problem: Problem, placed: Placed, blocks: BlockRows | None = None) -> Iterator[Stripe]:
    """Yield all stripes of a call. `blocks` defaults to the current blocks of the block mask."""
    sizes = Sizes.of(placed)
    if 0 in (sizes.batch, sizes.q_heads, sizes.q_len):
        return
    blocks, one = _block_rows(problem, placed, blocks), placed.one
    before = one.kv_begin - one.kv_origin  # the first key
    rows = min(sizes.q_len, TILE_SIDE, blocks.block_size[0])
    keys = max(1, min(sizes.kv_len, TILE_SIDE))
    for batch, heads in _pair_ranges(sizes, blocks, TILE_ELEMENTS // (rows * keys)):
        pairs = (batch.stop - batch.start) * (heads.stop - heads.start)
        height = max(1, min(rows, TILE_ELEMENTS // (pairs * keys)))
        width = max(1, TILE_ELEMENTS // (pairs * height))
        kv_heads = slice(heads.start // sizes.group, (heads.stop - 1) // sizes.group + 1)
        for row, first, last in blocks.queries():
            tiles = [
                Keys(part, problem.masks(span.full))
                for span in blocks.spans(one.b + batch.start, heads.start, row)
                for part in _pieces(max(0, span.start - before), span.stop - before, width)
            ]
            for queries in _pieces(first, last, height):
                yield Stripe(batch, heads, kv_heads, queries, tiles)


def _block_rows(problem: Problem, placed: Placed, blocks: BlockRows | None) -> BlockRows:
    """Return the rows of the block mask; without one, a single full block.

    `blocks` are for all sequences, and may reach further than this one.
    """
    lengths = placed.lengths
    if blocks is not None:
        return blocks._replace(seq_lengths=lengths)
    if problem.block_mask is not None:
        return problem.block_mask.rows(*lengths)
    whole = Runs.of_cells(np.full((1, 1, 1, 1), FULL, dtype=np.int32))
    return BlockRows(whole, lengths, lengths)


def _pair_ranges(sizes: Sizes, blocks: BlockRows, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of batches and heads, of about `pairs` each, that have the same blocks.

    A range has whole groups of heads, or one head if each head has its own blocks.
    """
    each_batch, each_head = (count > 1 for count in blocks.runs.shape[:2])
    heads = 1 if each_head else min(sizes.q_heads, max(1, pairs // sizes.group) * sizes.group)
    batches = 1 if each_batch or heads < sizes.q_heads else max(1, pairs // heads)
    for batch in _pieces(0, sizes.batch, batches):
        for part in _pieces(0, sizes.q_heads, heads):
            yield batch, part


def _pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` that cover [start, stop); the last may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
