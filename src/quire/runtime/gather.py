"""Blocks of a cache that a mask lists in the order of its sequences, side by side by a page table.

    blocks of a cache       0   1   2   3   4   5   6   7      a block mask lists 6, 1 and 4 for b
    page table of b         6   1   4                          as in paged memory

This is for the masks of PyTorch's PagedAttention (`api/paged/`), whose blocks are pages of a cache
that many sequences share. A tile of the kernel is longer than a page. Without the page table, most
keys of a tile would belong to other batch entries; with it, all belong to b. Mods still get rows of
the cache: they compute the row from the position and the page table. Sums follow that table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask import BlockMask
from quire.block_mask.blocks import Runs
from quire.codegen.llvm.target import Target
from quire.ir.graph import Node, cast, const, rebuild, rewrite
from quire.ir.trace import Traced
from quire.memory import Placed
from quire.memory.tables import Sequences
from quire.request import Problem
from quire.runtime.blocks import blocks_of_tiles
from quire.support.bounded import BoundedDict

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
        or not mask.lists_pages
        or not placed.is_dense
        or placed.batches == 0
        or placed.key.shape[0] != 1
        or problem.dropout is not None
        or problem.prob_mod is not None
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
