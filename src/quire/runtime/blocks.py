"""Tile lists: what a kernel makes of a block mask.

A tile list names the blocks of keys that a block of queries visits, ascending (`convention.py`).

    positions          0       4       8       12        blocks of 4 keys: 0, 1, 2, 3
    blocks of a mask             0     1     2           of 3 keys, the first at position 5
    tiles of the mask          1       2       3

Kernels cut keys by position, while a mask counts from the first key, at `kv_begin`. So a tile of
the kernel may touch several blocks of the mask. There are two ways to list such a tile:

    cut     A run of 16 keys is in one block of the mask, and a block of queries, too: then each run
            of a tile has its own kind. Lists take memory for what a mask lists.
    mixed   Otherwise a tile is full if all blocks that it touches are full, absent if all are, and
            else partial. If a partial tile touches blocks of several kinds, the mask_mod alone is
            not enough: `mixed` then has the block mask, to look up each element.

What a query computes does not depend on the way, because a key that is skipped and one that is
masked are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask import BlockMask, BlockRows
from quire.block_mask.blocks import FULL as FULL_BLOCK
from quire.block_mask.blocks import PARTIAL as PARTIAL_BLOCK
from quire.block_mask.blocks import Runs
from quire.codegen.convention import BLOCK_Q, FULL, KEYS_OF_RUN, PARTIAL, tile_entry
from quire.codegen.llvm.target import Target
from quire.ir.graph import Node, cast, const
from quire.ir.simplify import simplify
from quire.ir.trace import Traced
from quire.memory import One
from quire.memory.tables import Holes, Sequences
from quire.support.bounded import BoundedDict

AT_ONCE = 2**18
"""How many blocks of a mask are counted at a time, unless one row of tiles has more."""

EVERY_RUN = 0x5555  # times a kind: that kind for each of the eight runs of a block of keys


class TileLists(NamedTuple):
    """The entries of all rows, one row after the other, and where each row starts.

    `runs` has the kinds of the runs of each entry, 0 if the whole block is listed, or is None if
    all blocks are. The number of a row is that of its batch entry, head and block of queries,
    times these strides.
    """

    offsets: NDArray[np.int64]
    entries: NDArray[np.int32]
    runs: NDArray[np.uint16] | None = None
    batch_stride: int = 0
    head_stride: int = 0
    block_stride: int = 0
    heads: int = 1  # that have lists of their own
    mixed: BlockRows | None = None
    offsets_address: int = 0
    entries_address: int = 0
    runs_address: int = 0

    @staticmethod
    def of(
        offsets: NDArray[np.int64],
        entries: NDArray[np.int32],
        runs: NDArray[np.uint16] | None,
        shape: tuple[int, int, int],
        mixed: BlockRows | None = None,
    ) -> TileLists:
        """Return the lists of so many batch entries, heads and blocks of queries; 1 is for all."""
        batches, heads, rows = shape
        return TileLists(
            offsets,
            entries,
            runs,
            batch_stride=heads * rows if batches > 1 else 0,
            head_stride=rows if heads > 1 else 0,
            block_stride=1,
            heads=heads,
            mixed=mixed,
            offsets_address=offsets.ctypes.data,
            entries_address=entries.ctypes.data,
            runs_address=0 if runs is None else runs.ctypes.data,
        )

    @property
    def keys(self) -> NDArray[np.int64]:
        """Return how many keys each entry lists."""
        if self.runs is None:
            return np.full(len(self.entries), 8 * KEYS_OF_RUN)
        listed = np.bitwise_count((self.runs | (self.runs >> 1)) & EVERY_RUN)
        counts: NDArray[np.int64] = np.where(self.runs == 0, 8, listed).astype(np.int64)
        return counts * KEYS_OF_RUN


NO_LISTS = TileLists(np.empty(0, np.int64), np.empty(0, np.int32))
"""The lists without a block mask: every tile is visited."""


def cut_tiles(blocks: BlockRows) -> bool:
    """Return whether the blocks of a mask are not made of whole tiles."""
    q_size, kv_size = blocks.block_size
    return bool(q_size % BLOCK_Q or kv_size % Target.host().block_kv)


def read_lists(
    mask: BlockMask,
    lengths: tuple[int, int],
    block_q: int,
    block_kv: int,
    kv_begin: int = 0,
    *,
    cuts: bool = False,
    key_heads: int = 0,
) -> TileLists:
    """Return the tiles of `block_q` x `block_kv` that a mask lists.

    With `key_heads`, there is one list for all heads that read a key head, if these have the same.
    The user may edit the tensors of a mask, so the cache of lists compares their content.
    """
    key = (mask.content(), lengths, block_q, block_kv, kv_begin, cuts, key_heads)
    lists = _known.get(key)
    if lists is not None:
        return lists
    rows = mask.rows(*lengths, groups=key_heads)
    lists = tile_lists(rows, block_q, block_kv, kv_begin, cuts=cuts)
    if lists.mixed is not None and key_heads:
        lists = lists._replace(mixed=mask.rows(*lengths))  # elements have query heads
    return _known.keep(key, lists)


_known: BoundedDict[tuple[object, ...], TileLists] = BoundedDict(16)


def tile_lists(
    rows: BlockRows, block_q: int, block_kv: int, kv_begin: int = 0, *, cuts: bool = False
) -> TileLists:
    """Return the tiles of `block_q` x `block_kv` that rows of blocks list.

    `cuts` says whether the kernel can compute some runs of a tile and leave out the others.
    """
    (_, kv_size), ahead = rows.block_size, kv_begin % block_kv
    if cuts and can_cut(rows, block_q, kv_begin) and (kv_size % block_kv or ahead):
        return _cut(rows, block_q, block_kv, kv_begin)
    runs, mixed = tile_runs(rows, block_q, block_kv, kv_begin)
    lengths = runs.stops - runs.starts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    first = kv_begin // block_kv
    tiles = np.arange(ends[-1]) + np.repeat(runs.starts - ends[:-1], lengths) + first
    entries = (tiles * tile_entry(1, 0) + np.repeat(runs.kinds, lengths)).astype(np.int32)
    return TileLists.of(ends[runs.offsets], entries, None, runs.shape[:3], mixed)


def within_rows(rows: BlockRows, block_q: int) -> bool:
    """Return whether each block of queries is in one row of blocks."""
    q_len, q_size = rows.seq_lengths[0], rows.block_size[0]
    return q_size % block_q == 0 or q_len <= min(q_size, block_q)


def can_cut(rows: BlockRows, block_q: int, kv_begin: int) -> bool:
    """Return whether each run of keys is in one block, and each block of queries in one row."""
    aligned = rows.block_size[1] % KEYS_OF_RUN == 0 == kv_begin % KEYS_OF_RUN
    return aligned and within_rows(rows, block_q)


def _cut(rows: BlockRows, block_q: int, block_kv: int, kv_begin: int) -> TileLists:
    """Return the tiles of a mask, each with the kinds of its runs."""
    kv_len, kv_size, in_tile = rows.seq_lengths[1], rows.block_size[1], block_kv // KEYS_OF_RUN
    tiles = _rows_of_tiles(rows, block_q)
    stops = kv_begin + np.minimum(tiles.stops * kv_size, kv_len)
    # What is before the first key and after the last one counts as listed, to have whole tiles.
    first = np.where(tiles.starts == 0, kv_begin - kv_begin % block_kv, kv_begin)
    first = (first + tiles.starts * kv_size) // KEYS_OF_RUN
    at_end = stops == kv_begin + kv_len
    last = np.where(at_end, -(-stops // block_kv) * in_tile, stops // KEYS_OF_RUN)
    low, high = first // in_tile, -(-last // in_tile)
    counts = np.where(tiles.starts * kv_size < kv_len, high - low, 0)
    run = np.repeat(np.arange(len(counts)), counts)
    tile = low[run] + np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin, end = (np.clip(x[run] - tile * in_tile, 0, in_tile) for x in (first, last))
    kinds = ((1 << 2 * end) - (1 << 2 * begin)) & (EVERY_RUN * tiles.kinds.astype(np.int64)[run])
    row = tiles.row_ids()[run]
    new = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(tile, prepend=-1) != 0))
    kinds = np.bitwise_or.reduceat(kinds, new) if len(new) else kinds
    kind = np.where(kinds & EVERY_RUN, PARTIAL, FULL)
    whole = kinds == EVERY_RUN * kind
    entries = (tile[new] * tile_entry(1, 0) + kind).astype(np.int32)
    runs = None if whole.all() else np.where(whole, 0, kinds).astype(np.uint16)
    offsets = np.zeros(len(tiles.offsets), np.int64)
    np.cumsum(np.bincount(row[new], minlength=len(offsets) - 1), out=offsets[1:])
    return TileLists.of(offsets, entries, runs, tiles.shape[:3])


def tile_runs(
    rows: BlockRows, block_q: int, block_kv: int, kv_begin: int = 0
) -> tuple[Runs, BlockRows | None]:
    """Return whole tiles as runs, and `rows` if a partial tile has blocks of several kinds.

    Runs count from the tile of the first key.
    """
    (_, kv_size), ahead = rows.block_size, kv_begin % block_kv
    if kv_size % block_kv == 0 and not ahead and within_rows(rows, block_q):
        # Every tile is within one block.
        return _divided(rows, block_q, kv_size // block_kv), None
    kinds, mixed = _kinds(rows, block_q, block_kv, ahead)
    return Runs.of_cells(kinds), rows if mixed else None


def num_tiles(runs: Runs, size: tuple[int, int], tall: int, wide: int) -> NDArray[np.int64]:
    """Return how many tiles of `tall` x `wide` hold a block, for each batch entry of the lists.

    Blocks of `size` are not larger than tiles. Memory is in proportion to the runs. In the line of
    all rows of tiles, each run is an interval.
    """
    q_size, kv_size = size
    lists, row = np.divmod(runs.row_ids(), runs.shape[2])
    tile = lists * -(-runs.shape[2] * q_size // tall) + row * q_size // tall
    columns = -(-runs.shape[3] * kv_size // wide) + 2
    begin = tile * columns + runs.starts * kv_size // wide
    end = tile * columns + (runs.stops * kv_size - 1) // wide + 1
    order = np.argsort(begin, kind="stable")
    covered = np.maximum.accumulate(end[order])
    new = np.maximum(covered - np.maximum(begin[order], np.append(0, covered)[:-1]), 0)
    ends = np.append(0, np.cumsum(new))[runs.offsets[:: runs.shape[1] * runs.shape[2]]]
    return np.diff(ends)


def _rows_of_tiles(rows: BlockRows, block_q: int) -> Runs:
    """Return for each block of queries the runs of the row of blocks that it is in."""
    runs, q_len = rows.runs, rows.seq_lengths[0]
    batches, heads, mask_rows, columns = runs.shape
    num_rows = -(-q_len // block_q)
    mask_row = np.arange(num_rows) * block_q // rows.block_size[0]
    sources = (np.arange(batches * heads)[:, None] * mask_rows + mask_row).ravel()
    return runs.pick(sources, (batches, heads, num_rows, columns))


def _divided(rows: BlockRows, block_q: int, wide: int) -> Runs:
    """Return the runs of tiles if each block holds `wide` whole tiles side by side."""
    kv_len, kv_size = rows.seq_lengths[1], rows.block_size[1]
    num_columns = -(-kv_len // (kv_size // wide))
    tiles = _rows_of_tiles(rows, block_q)
    starts, stops = (np.minimum(ends * wide, num_columns) for ends in (tiles.starts, tiles.stops))
    return tiles._replace(shape=(*tiles.shape[:3], num_columns), starts=starts, stops=stops)


def _kinds(
    rows: BlockRows, block_q: int, block_kv: int, ahead: int
) -> tuple[NDArray[np.integer], bool]:
    """Return the kind of each tile, and whether a partial one touches blocks of several kinds.

    The first tile has `ahead` positions before the first key. Cells are counted for some rows of
    tiles at a time.
    """
    (q_len, kv_len), (q_size, kv_size) = rows.seq_lengths, rows.block_size
    q_ranges = blocks_of_tiles(q_len, block_q, q_size)
    kv_ranges = blocks_of_tiles(kv_len, block_kv, kv_size, ahead)
    batches, heads, num_rows, columns = rows.runs.shape
    found = np.zeros((batches, heads, q_ranges.shape[1], kv_ranges.shape[1]), np.int8)
    tall = max(1, AT_ONCE // max(1, batches * heads * columns * -(-block_q // q_size)))
    uniform = True
    for at in range(0, q_ranges.shape[1], tall):
        tiles = slice(at, at + tall)
        low, high = int(q_ranges[0, at]), min(int(q_ranges[1, tiles].max()), num_rows)
        cells = rows.runs.of_rows(min(low, high), high).cells(np.int8)
        here = q_ranges[:, tiles] - low
        present = _count(cells != 0, here, kv_ranges)
        full = _count(cells == FULL_BLOCK, here, kv_ranges)
        touched = np.outer(here[1] - here[0], kv_ranges[1] - kv_ranges[0])
        kinds = np.where(present == 0, 0, np.where(full == touched, FULL, PARTIAL))
        found[:, :, tiles] = kinds
        alike = (present == touched) & (full == 0)
        uniform = uniform and not ((kinds == PARTIAL) & ~alike).any()
    return found, not uniform


def blocks_of_tiles(length: int, tile: int, block: int, ahead: int = 0) -> NDArray[np.int64]:
    """Return the first block that each tile touches, and one past the last: [2, tiles].

    The first tile begins `ahead` positions before the first block.
    """
    starts = np.arange(-ahead, length, tile, dtype=np.int64)
    stops = np.minimum(starts + tile, length)
    return np.stack([np.maximum(starts, 0) // block, -(-stops // block)])


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


def within_blocks(mod: Traced, blocks: BlockRows, rows: One | Sequences) -> Traced:
    """Return a mask_mod that looks up the kind of block of every element, and applies it."""
    cells = torch.from_numpy(blocks.runs.cells(np.int8))
    slot = len(mod.captures)
    tables: tuple[Tensor, ...] = (cells,)
    if isinstance(rows, One):
        q_start, kv_origin = const(rows.q_start, torch.int64), rows.kv_origin
    else:
        starts = torch.zeros(int(rows.b.max(initial=0)) + 1, dtype=torch.int64, device="cpu")
        starts[torch.from_numpy(rows.b)] = torch.from_numpy(+rows.q_start)
        b = Node("input", (), torch.int64, "b")
        q_start, kv_origin = Node("load", (b,), torch.int64, slot + 1), 0
        tables += (starts,)

    def index(name: str, start: Node, size: int) -> Node:
        position = Node("input", (), torch.int64, name)
        from_start = Node("sub", (position, start), torch.int64)
        return Node("floordiv", (from_start, const(size, torch.int64)), torch.int64)

    def index_or_0(name: str, count: int) -> Node:  # a size of 1 is shared
        return Node("input", (), torch.int64, name) if count > 1 else const(0, torch.int64)

    indices = (
        index_or_0("b", cells.shape[0]),
        index_or_0("h", cells.shape[1]),
        index("q_idx", q_start, blocks.block_size[0]),
        index("kv_idx", const(kv_origin, torch.int64), blocks.block_size[1]),
    )
    cell = cast(Node("load", indices, torch.int8, slot), torch.int32)

    def kind(number: int) -> Node:
        return Node("eq", (cell, const(number, torch.int32)), torch.bool)

    held = Node("and", (kind(PARTIAL_BLOCK), mod.output), torch.bool)
    output = simplify(Node("or", (kind(FULL_BLOCK), held), torch.bool))
    return Traced(output, (*mod.captures, *tables), "mask", mod.name, mod.lines)


# --- holes of page tables -------------------------------------------------------------------------


BY_SEQUENCE = NO_LISTS._replace(batch_stride=1)
"""The strides of lists that all heads and queries of a sequence share."""


def hole_lists(holes: Holes, page: int, kind: int, block_kv: int) -> TileLists:
    """Return lists of the pages that each sequence has, as tiles of a kind with their runs."""
    if page % KEYS_OF_RUN == 0 and block_kv % page == 0:
        lists = _pages_in_tiles(holes, kind, block_kv // page)
    else:
        lists = tile_lists(_as_rows(holes.there.numpy(), page, kind), 1, block_kv, cuts=True)
    return lists._replace(batch_stride=1, block_stride=0)


def _pages_in_tiles(holes: Holes, kind: int, each: int) -> TileLists:
    """Return the tiles of pages of which there are `each` in a tile, in a few steps.

    A program that chooses its pages has other holes in every layer of every step.
    """
    batch, most = holes.there.shape
    columns, bits = -(-most // each), 16 // each
    row, column = np.divmod(holes.pages, most)
    tile, place = np.divmod(column, each)
    tile += row * columns
    kinds = (kind * (EVERY_RUN & (1 << bits) - 1) << np.arange(each) * bits)[place]
    if most % each:  # what is behind the last page counts as listed, to have whole tiles
        kinds |= np.where(column == most - 1, kind * EVERY_RUN & -1 << (most % each) * bits, 0)
    new = np.flatnonzero(np.diff(tile, prepend=-1))
    found, tile = np.bitwise_or.reduceat(kinds, new) if len(new) else kinds, tile[new]
    whole = found == kind * EVERY_RUN
    runs = None if whole.all() else np.where(whole, 0, found).astype(np.uint16)
    offsets = np.searchsorted(tile, np.arange(batch + 1) * columns)
    entries = (tile % columns * tile_entry(1, 0) + kind).astype(np.int32)
    return TileLists.of(offsets, entries, runs, (batch, 1, 1))


def _as_rows(there: NDArray[np.bool_], page: int, kind: int) -> BlockRows:
    """Return the pages that each sequence has as a row of a block mask, in blocks of one run."""
    b, column = np.nonzero(there)
    first, stop = column * page // KEYS_OF_RUN, -(-(column + 1) * page // KEYS_OF_RUN)
    if page % KEYS_OF_RUN:  # pages may share runs, in which the mask says what is there
        first = np.maximum(first, np.where(np.diff(b, prepend=-1) == 0, np.roll(stop, 1), 0))
        held = first < stop
        b, first, stop = b[held], first[held], stop[held]
    columns = -(-there.shape[1] * page // KEYS_OF_RUN)
    kinds = np.full(len(b), kind, np.int8)
    runs = Runs.of_segments((len(there), 1, 1, columns), b, first, stop, kinds)
    return BlockRows(runs, (1, KEYS_OF_RUN), (1, columns * KEYS_OF_RUN))
