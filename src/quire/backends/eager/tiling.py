"""Which tiles there are, and in which order they are visited.

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

from quire.block_mask.lists import FULL
from quire.block_mask.rows import BlockRows
from quire.block_mask.runs import Runs
from quire.memory import Placed
from quire.request import Problem, ReadyMod

TILE_ELEMENTS = 2**18
"""The most scores that are made at once: a megabyte, which stays in the cache of a core."""

TILE_SIDE = 256
"""How many queries a tile has at most, and how many keys it should have at least."""


class Keys(NamedTuple):
    """A range of keys and the masks that hold in it."""

    positions: slice
    masks: tuple[ReadyMod, ...]


class Stripe(NamedTuple):
    """A range of query rows for some batches and heads, and the keys it reads, tile by tile."""

    batch: slice
    heads: slice
    kv_heads: slice
    queries: slice
    tiles: list[Keys]

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Where the stripe lies in a tensor [B, Hq, L, ...]."""
        return self.batch, self.heads, self.queries

    def rows_of(self, keys: Keys, tensor: Tensor) -> tuple[slice, slice, slice]:
        """Where the keys it reads lie in a tensor [B or 1, Hkv, S, ...]."""
        batch = self.batch if tensor.shape[0] > 1 else slice(0, 1)
        return batch, self.kv_heads, keys.positions


class Sizes(NamedTuple):
    """The axis lengths of one call."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @staticmethod
    def of(placed: Placed) -> Sizes:
        """Read off query [B, Hq, L, D] and key [., Hkv, S, D]."""
        (batch, q_heads, q_len, _), key = placed.query.shape, placed.key
        return Sizes(batch, q_heads, key.shape[1], q_len, key.shape[2])

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.q_heads // self.kv_heads


def stripes(problem: Problem, placed: Placed, blocks: BlockRows | None = None) -> Iterator[Stripe]:
    """All the work of a call, a stripe at a time; `blocks` are by default those of the mask now."""
    sizes = Sizes.of(placed)
    if 0 in (sizes.batch, sizes.q_heads, sizes.q_len):
        return
    blocks = blocks or _block_rows(problem, sizes)
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
                for span in blocks.spans(batch.start, heads.start, row)
                for part in _pieces(span.start, span.stop, width)
            ]
            for queries in _pieces(first, last, height):
                yield Stripe(batch, heads, kv_heads, queries, tiles)


def _block_rows(problem: Problem, sizes: Sizes) -> BlockRows:
    """The block mask as it is walked; without one, all is one full block."""
    lengths = (sizes.q_len, sizes.kv_len)
    if problem.block_mask is not None:
        return problem.block_mask.rows(*lengths)
    whole = Runs.of_cells(np.full((1, 1, 1, 1), FULL, dtype=np.int32))
    return BlockRows(whole, lengths, lengths)


def _pair_ranges(sizes: Sizes, blocks: BlockRows, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Batches and heads in ranges of about `pairs` that read the same blocks.

    A range has whole groups of heads, or one head where every head has blocks of its own.
    """
    each_batch, each_head = (count > 1 for count in blocks.runs.shape[:2])
    heads = 1 if each_head else min(sizes.q_heads, max(1, pairs // sizes.group) * sizes.group)
    batches = 1 if each_batch or heads < sizes.q_heads else max(1, pairs // heads)
    for batch in _pieces(0, sizes.batch, batches):
        for part in _pieces(0, sizes.q_heads, heads):
            yield batch, part


def _pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    """[start, stop) cut into ranges of `size` and a rest."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
