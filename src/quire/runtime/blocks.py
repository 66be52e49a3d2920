"""What a kernel makes of a block mask: tile lists, and gathered blocks.

A tile list names the tiles that a block of queries visits, ascending.

    positions          0       4       8       12        tiles of 4 keys: 0, 1, 2, 3
    blocks of a mask             0     1     2           of 3 keys, the first at position 5
    tiles of the mask          1       2       3

Kernels cut keys into tiles by position, while a mask counts from the first key, at `kv_begin`. So a
tile of the kernel may touch several blocks of the mask. It is full if all of them are full, absent
if all are absent, and partial otherwise. If a partial tile touches blocks of several kinds, the
mask_mod alone is not enough: `mixed` then has the block mask, to look up each element.

If the blocks of keys that a mask lists are small and scattered, `gather` puts them side by side, by
a page table:

    blocks of a cache       0   1   2   3   4   5   6   7      a block mask lists 1, 4 and 6 for b
    page table of b         1   4   6                          as in paged memory

A tile of the kernel is longer than such a block. Without the page table, most keys of a tile would
belong to other batch entries; with it, all belong to b. Mods still get rows of the cache: they
compute the row from the position and the page table.
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
from quire.codegen.convention import FULL, PARTIAL, tile_entry
from quire.codegen.llvm.target import Target
from quire.ir.graph import Node, cast, const, rebuild, rewrite
from quire.ir.simplify import simplify
from quire.ir.trace import Traced
from quire.memory import One, Placed
from quire.memory.tables import Sequences
from quire.request import Problem
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


def read_lists(
    mask: BlockMask, lengths: tuple[int, int], block_q: int, block_kv: int, kv_begin: int = 0
) -> TileLists:
    """Return the tiles of `block_q` x `block_kv` that a mask lists.

    The user may edit the tensors of a mask, so the cache of lists compares their content.
    """
    key = (mask.content(), lengths, block_q, block_kv, kv_begin)
    lists = _known.get(key)
    return lists or _known.keep(key, tile_lists(mask.rows(*lengths), block_q, block_kv, kv_begin))


_known: BoundedDict[tuple[object, ...], TileLists] = BoundedDict(16)


def tile_lists(rows: BlockRows, block_q: int, block_kv: int, kv_begin: int = 0) -> TileLists:
    """Return the tiles of `block_q` x `block_kv` that rows of blocks list."""
    runs, mixed = tile_runs(rows, block_q, block_kv, kv_begin)
    lengths = runs.stops - runs.starts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    offsets = ends[runs.offsets]
    first = kv_begin // block_kv
    tiles = np.arange(ends[-1]) + np.repeat(runs.starts - ends[:-1], lengths) + first
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


def tile_runs(
    rows: BlockRows, block_q: int, block_kv: int, kv_begin: int = 0
) -> tuple[Runs, BlockRows | None]:
    """Return the same tiles as runs, and `rows` if a partial tile has blocks of several kinds.

    Runs count from the tile of the first key.
    """
    (q_size, kv_size), ahead = rows.block_size, kv_begin % block_kv
    if q_size % block_q == 0 and kv_size % block_kv == 0 and not ahead:
        # Every tile is within one block.
        return _divided(rows, q_size // block_q, kv_size // block_kv), None
    kinds, mixed = _kinds(rows, block_q, block_kv, ahead)
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


def _kinds(
    rows: BlockRows, block_q: int, block_kv: int, ahead: int
) -> tuple[NDArray[np.integer], bool]:
    """Return the kind of each tile, and whether a partial one touches blocks of several kinds.

    The first tile has `ahead` positions before the first key.
    """
    (q_len, kv_len), (q_size, kv_size) = rows.seq_lengths, rows.block_size
    q_ranges = blocks_of_tiles(q_len, block_q, q_size)
    kv_ranges = blocks_of_tiles(kv_len, block_kv, kv_size, ahead)
    cells = rows.runs.cells()
    present = _count(cells != 0, q_ranges, kv_ranges)
    full = _count(cells == FULL_BLOCK, q_ranges, kv_ranges)
    touched = np.outer(q_ranges[1] - q_ranges[0], kv_ranges[1] - kv_ranges[0])
    kinds = np.where(present == 0, 0, np.where(full == touched, FULL, PARTIAL))
    uniform = (present == touched) & (full == 0)
    return kinds, bool(((kinds == PARTIAL) & ~uniform).any())


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


def within_blocks(mod: Traced, blocks: BlockRows, rows: One) -> Traced:
    """Return a mask_mod that looks up the kind of block of every element, and applies it."""
    cells = torch.from_numpy(blocks.runs.cells()).to(torch.int8)
    slot = len(mod.captures)

    def index(name: str, start: int, size: int) -> Node:
        position = Node("input", (), torch.int64, name)
        from_start = Node("sub", (position, const(start, torch.int64)), torch.int64)
        return Node("floordiv", (from_start, const(size, torch.int64)), torch.int64)

    def index_or_0(name: str, count: int) -> Node:  # a size of 1 is shared
        return Node("input", (), torch.int64, name) if count > 1 else const(0, torch.int64)

    indices = (
        index_or_0("b", cells.shape[0]),
        index_or_0("h", cells.shape[1]),
        index("q_idx", rows.q_start, blocks.block_size[0]),
        index("kv_idx", rows.kv_begin, blocks.block_size[1]),
    )
    cell = cast(Node("load", indices, torch.int8, slot), torch.int32)

    def kind(number: int) -> Node:
        return Node("eq", (cell, const(number, torch.int32)), torch.bool)

    held = Node("and", (kind(PARTIAL_BLOCK), mod.output), torch.bool)
    output = simplify(Node("or", (kind(FULL_BLOCK), held), torch.bool))
    return Traced(output, (*mod.captures, cells), "mask", mod.name, mod.lines)


# --- gathered blocks ------------------------------------------------------------------------------


WORTH = 0.75
"""Gather if at most this part of the tiles is left."""


class Gathered(NamedTuple):
    """The blocks that each batch reads [B or 1, most], their number, and a mask over them."""

    table: Tensor
    counts: NDArray[np.int64]
    mask: BlockMask


def gather(problem: Problem, placed: Placed) -> tuple[Problem, Placed]:
    """Return the problem over the gathered blocks; unchanged if they are not scattered."""
    found = _find(problem, placed)
    if found is None:
        return problem, placed
    page, batch = found.mask.BLOCK_SIZE[1], placed.batches
    table = found.table.expand(batch, -1).contiguous()
    one = placed.one
    zeros = np.zeros(batch, np.int64)
    sequences = Sequences(
        b=np.arange(batch),
        q_len=zeros + one.q_len,
        q_start=zeros + one.q_start,
        kv_begin=zeros,
        kv_end=zeros + found.counts * page,
        q_row=zeros,
        kv_row=zeros,
    )
    key, value = (x[0].unflatten(1, (-1, page)).transpose(0, 1) for x in (placed.key, placed.value))
    mods = {
        name: _reading(mod, table, page)
        for name, mod in problem.mods.items()
        if isinstance(mod, Traced)
    }
    return (
        problem._replace(block_mask=found.mask, **mods),  # type: ignore[arg-type]
        Placed(placed.query, key, value, sequences, page_table=table),
    )


def _find(problem: Problem, placed: Placed) -> Gathered | None:
    """Return the gathered blocks of a problem; None if it is not worth it or not possible."""
    mask, rows = problem.block_mask, placed.key.shape[2]
    if (
        mask is None
        or not placed.is_dense
        or placed.batches == 0
        or placed.key.shape[0] != 1
        or problem.dropout is not None
        or placed.one.kv_begin != 0
        or mask.BLOCK_SIZE[1] % Target.host().block_kv == 0
        or rows % mask.BLOCK_SIZE[1] != 0
    ):
        return None
    key = (mask.content(), placed.lengths)
    if key in _known_gathers:
        return _known_gathers.get(key)
    return _known_gathers.keep(key, _gathered(mask, placed.lengths, Target.host().block_kv))


_known_gathers: BoundedDict[tuple[object, ...], Gathered | None] = BoundedDict(16)


def _gathered(mask: BlockMask, lengths: tuple[int, int], block_kv: int) -> Gathered | None:
    """Return the blocks that each batch reads; None if gathering saves too few tiles."""
    runs, size = mask.rows(*lengths).runs, mask.BLOCK_SIZE[1]
    read = _read_blocks(runs)
    counts = read.sum(axis=1)
    most = int(counts.max(initial=0))
    if most == 0:
        return None
    order, in_disorder = _order(mask, read)
    tiles = _num_touched(read, blocks_of_tiles(lengths[1], block_kv, size))
    fewer = (-(-counts * size // block_kv)).sum() <= WORTH * tiles
    if not fewer and not in_disorder:
        return None
    order = order[:, :most]
    cells = np.take_along_axis(runs.cells(), order[:, None, None, :], axis=-1)
    gathered_mask = BlockMask._from_runs(
        Runs.of_cells(cells),
        True,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=(lengths[0], most * size),
        device=torch.device("cpu"),
    )
    return Gathered(torch.from_numpy(order.astype(np.int32)), counts, gathered_mask)


def _read_blocks(runs: Runs) -> NDArray[np.bool_]:
    """Return which key blocks each batch reads in any head and row: [B or 1, columns]."""
    batches, heads, num_rows, columns = runs.shape
    changes = np.zeros((batches, columns + 1), np.int64)
    batch = runs.row_ids() // max(1, heads * num_rows)
    np.add.at(changes, (batch, runs.starts), 1)
    np.subtract.at(changes, (batch, runs.stops), 1)
    read: NDArray[np.bool_] = np.cumsum(changes[:, :-1], axis=1) > 0
    return read


def _order(mask: BlockMask, read: NDArray[np.bool_]) -> tuple[NDArray[np.int64], bool]:
    """Return the order of blocks, those that are read first, and whether a list is not ascending.

    Blocks come in the order of the longest list of each batch. A list of pages has the order of the
    sequence; in that order, fewer tiles are partial.
    """
    columns = read.shape[1]
    rank = np.where(read, columns, 2 * columns) + np.arange(columns)
    in_disorder = False
    if mask._runs is None:
        lists = [(mask.kv_num_blocks, mask.kv_indices)]
        if full := mask._full_lists():
            lists.insert(0, full)
        counts = np.stack([count.flatten(1).numpy() for count, _ in lists])
        blocks = [indices.flatten(1, 2).numpy() for _, indices in lists]
        for b, row in enumerate(counts.sum(axis=0).argmax(axis=1)):
            listed = [x[b, row, :count] for x, count in zip(blocks, counts[:, b, row], strict=True)]
            in_disorder |= any((np.diff(each) < 0).any() for each in listed)
            in_order = np.concatenate(listed)
            in_order = in_order[(in_order >= 0) & (in_order < columns)]
            in_order = in_order[read[b, in_order]]  # the user may have edited the lists
            rank[b, in_order] = np.arange(len(in_order)) - len(in_order)
    order: NDArray[np.int64] = np.argsort(rank, axis=1)
    return order, in_disorder


def _num_touched(read: NDArray[np.bool_], blocks: NDArray[np.int64]) -> int:
    """Return how many tiles have a block that is read; `blocks` [2, tiles] are first and stop."""
    before = np.pad(np.cumsum(read, axis=1), ((0, 0), (1, 0)))
    first, stop = np.minimum(blocks, read.shape[1])
    return int((before[:, stop] > before[:, first]).sum())


def _reading(mod: Traced, table: Tensor, page: int) -> Traced:
    """Return `mod` with kv_idx replaced by the row of the cache, which `table` gives."""
    kv_idx, b = (Node("input", (), torch.int64, name) for name in ("kv_idx", "b"))
    size = const(page, torch.int64)
    column, offset = (Node(op, (kv_idx, size), torch.int64) for op in ("floordiv", "mod"))
    block = cast(Node("load", (b, column), table.dtype, len(mod.captures)), torch.int64)
    row = Node("add", (Node("mul", (block, size), torch.int64), offset), torch.int64)
    # A mod of paged attention needs only the block and the offset, not the row.
    replaced = {kv_idx: row, column: block, offset: offset}

    def visit(node: Node, args: tuple[Node, ...]) -> Node:
        return replaced[node] if node in replaced else rebuild(node, args)

    output = rewrite(mod.output, visit)
    if output is mod.output:
        return mod
    return Traced(output, (*mod.captures, table), mod.kind, mod.name, mod.lines)
