"""Turns a block mask into tile lists: for each block of queries, the tiles to visit, ascending.

A tile of the kernel may touch several blocks of the mask. It is full if all of them are full,
absent if all are absent, and partial otherwise. If a partial tile touches blocks of several kinds,
the mask_mod alone is not enough: `mixed` then has the block mask, to look up each element.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.block_mask import BlockMask, BlockRows
from quire.block_mask.lists import FULL as FULL_BLOCK
from quire.block_mask.runs import Runs
from quire.codegen.convention import FULL, PARTIAL, tile_entry
from quire.support.bounded import BoundedDict


class TileLists(NamedTuple):
    """The entries of all rows, one row after the other, and where each row starts."""

    offsets: NDArray[np.int64]
    entries: NDArray[np.int32]
    batch_stride: int = 0
    per_head: int = 0
    mixed: BlockRows | None = None
    offsets_address: int = 0
    entries_address: int = 0


NO_LISTS = TileLists(np.empty(0, np.int64), np.empty(0, np.int32))
"""The lists without a block mask: every tile is visited."""


def read_lists(mask: BlockMask, lengths: tuple[int, int], block_q: int, block_kv: int) -> TileLists:
    """Return the tiles of `block_q` x `block_kv` that a mask lists.

    The user may edit the tensors of a mask, so the cache of lists compares their content.
    """
    key = (mask.content(), lengths, block_q, block_kv)
    lists = _known.get(key)
    return lists or _known.keep(key, tile_lists(mask.rows(*lengths), block_q, block_kv))


_known: BoundedDict[tuple[object, ...], TileLists] = BoundedDict(16)


def tile_lists(rows: BlockRows, block_q: int, block_kv: int) -> TileLists:
    """Return the tiles of `block_q` x `block_kv` that rows of blocks list."""
    runs, mixed = tile_runs(rows, block_q, block_kv)
    lengths = runs.stops - runs.starts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    offsets = ends[runs.offsets]
    tiles = np.arange(ends[-1]) + np.repeat(runs.starts - ends[:-1], lengths)
    entries = (tiles * tile_entry(1, 0) + np.repeat(runs.kinds, lengths)).astype(np.int32)
    num_batches, num_heads, num_rows, _ = runs.shape
    return TileLists(
        offsets,
        entries,
        batch_stride=num_heads * num_rows if num_batches > 1 else 0,
        per_head=int(num_heads > 1),
        mixed=mixed,
        offsets_address=offsets.ctypes.data,
        entries_address=entries.ctypes.data,
    )


def tile_runs(rows: BlockRows, block_q: int, block_kv: int) -> tuple[Runs, BlockRows | None]:
    """Return the same tiles as runs, and `rows` if a partial tile has blocks of several kinds."""
    q_size, kv_size = rows.block_size
    if q_size % block_q == 0 and kv_size % block_kv == 0:  # every tile is within one block
        return _divided(rows, q_size // block_q, kv_size // block_kv), None
    kinds, mixed = _kinds(rows, block_q, block_kv)
    return Runs.of_cells(kinds), rows if mixed else None


def _divided(rows: BlockRows, tall: int, wide: int) -> Runs:
    """Return the runs of tiles if each block holds `tall` x `wide` whole tiles."""
    runs, (q_len, kv_len), (q_size, kv_size) = rows.runs, rows.seq_lengths, rows.block_size
    num_rows, num_columns = -(-q_len // (q_size // tall)), -(-kv_len // (kv_size // wide))
    batches, heads, mask_rows, _ = runs.shape
    # Each row of tiles has the runs of the row of blocks that it is in, cut off at the last key.
    mask_row = np.arange(num_rows) // tall
    sources = (np.arange(batches * heads)[:, None] * mask_rows + mask_row).ravel()
    tiles = runs.pick(sources, (batches, heads, num_rows, num_columns))
    starts, stops = (np.minimum(ends * wide, num_columns) for ends in (tiles.starts, tiles.stops))
    return tiles._replace(starts=starts, stops=stops)


def _kinds(rows: BlockRows, block_q: int, block_kv: int) -> tuple[NDArray[np.integer], bool]:
    """Return the kind of each tile, and whether a partial one touches blocks of several kinds."""
    (q_len, kv_len), (q_size, kv_size) = rows.seq_lengths, rows.block_size
    q_ranges = blocks_of_tiles(q_len, block_q, q_size)
    kv_ranges = blocks_of_tiles(kv_len, block_kv, kv_size)
    cells = rows.runs.cells()
    present = _count(cells != 0, q_ranges, kv_ranges)
    full = _count(cells == FULL_BLOCK, q_ranges, kv_ranges)
    touched = np.outer(q_ranges[1] - q_ranges[0], kv_ranges[1] - kv_ranges[0])
    kinds = np.where(present == 0, 0, np.where(full == touched, FULL, PARTIAL))
    uniform = (present == touched) & (full == 0)
    return kinds, bool(((kinds == PARTIAL) & ~uniform).any())


def blocks_of_tiles(length: int, tile: int, block: int) -> NDArray[np.int64]:
    """Return the first block that each tile touches, and one past the last: [2, tiles]."""
    starts = np.arange(0, length, tile, dtype=np.int64)
    stops = np.minimum(starts + tile, length)
    return np.stack([starts // block, -(-stops // block)])


def _count(
    cells: NDArray[np.bool_], q_ranges: NDArray[np.int64], kv_ranges: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many cells are true in the blocks of each tile, from cumulative sums."""
    counts = cells.astype(np.int64)
    for axis, (first, last) in ((-2, q_ranges), (-1, kv_ranges)):
        one_before = [(0, 0)] * 4
        one_before[axis] = (1, 0)
        sums = np.cumsum(np.pad(counts, one_before), axis)
        top = sums.shape[axis] - 1
        upper, lower = (np.take(sums, np.minimum(ends, top), axis) for ends in (last, first))
        counts = upper - lower
    return counts
