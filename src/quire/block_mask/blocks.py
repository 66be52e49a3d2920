"""The key blocks that each row of query blocks reads: as lists, as a grid of cells, as runs.

    indices  num_blocks            cells                runs
    0 . . .       1                █ . . .              full 0..1
    2 0 . .       2        <->     ░ . █ .      <->     partial 0..1, full 2..3
    1 3 2 .       3                . ░ ░ █              partial 1..3, full 3..4

The list of a row is the first `num_blocks` entries of `indices`, in any order; the entries after
them are not read. A block mask has two lists for each row: the partial blocks (░), in which the
mask_mod decides, and the full ones (█). A block that is listed twice counts once. A block in both
lists is full. An entry beyond the last block is ignored.

Lists and grids are tensors with any leading dimensions, on any device. The memory of runs depends
on their number, not on the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EMPTY: Final = 0
PARTIAL: Final = 1
FULL: Final = 2

NOOP_BLOCK_SIZE: Final = 1 << 30
"""A mask with blocks of this size in both directions can be used with sequences of any length."""

Shape = tuple[int, int, int, int]


def ceil_div(length: int, block: int) -> int:
    """The number of blocks that cover `length` tokens."""
    return -(-length // block)


def lists_to_grid(num_blocks: Tensor, indices: Tensor, num_columns: int) -> Tensor:
    """Turn lists [..., R], [..., R, W] into an int32 grid [..., R, num_columns] of 0 and 1."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks.unsqueeze(-1)
    columns = indices.long()
    inside = listed & (columns >= 0) & (columns < num_columns)
    # Entries that are not listed are written to an additional last column, which is cut off.
    grid = indices.new_zeros((*indices.shape[:-1], num_columns + 1), dtype=torch.int32)
    grid = grid.scatter(-1, torch.where(inside, columns, num_columns), 1)
    return grid[..., :num_columns].contiguous()


def grid_to_lists(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a grid [..., R, C] into int32 lists [..., R], [..., R, C].

    A row lists its blocks in ascending order and after them, as PyTorch does, all other blocks.
    """
    marked = (grid != EMPTY).to(torch.int32)
    order = torch.argsort(marked, dim=-1, descending=True, stable=True)
    return marked.sum(-1).to(torch.int32), order.to(torch.int32)


def transpose_lists(num_blocks: Tensor, indices: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """The query blocks that read each key block: lists [..., C], [..., C, R]."""
    return grid_to_lists(lists_to_grid(num_blocks, indices, num_columns).transpose(-2, -1))


def write_order(grid: Tensor, q_indices: Tensor, order: Tensor | bool | None) -> Tensor:
    """The turn at which a key block adds to the gradient of each query block in `q_indices`.

    Each key block that a query block reads adds to its gradient. If they add in a fixed order, the
    sum is deterministic. The order is ascending key blocks, descending ones if `order` is True, or
    a permutation `order` [..., C] of the key blocks. Grid [..., R, C] and lists `q_indices`
    [..., C, R] give int32 [..., C, R].
    """
    reads = (grid != EMPTY).to(torch.int32)
    if isinstance(order, Tensor):
        by_rank = order.long().unsqueeze(-2).expand_as(reads)
        arranged = reads.gather(-1, by_rank)
        before = arranged.cumsum(-1) - arranged
        ranks = torch.empty_like(before).scatter(-1, by_rank, before)
    else:
        ranks = reads.cumsum(-1) - reads
        if order:
            ranks = reads.sum(-1, keepdim=True) - 1 - ranks
    rows = q_indices.long().clamp(0, max(grid.shape[-2] - 1, 0))
    return ranks.transpose(-2, -1).gather(-1, rows).to(torch.int32)


class Runs(NamedTuple):
    """Neighbouring key blocks of one kind, row after row, ascending within a row.

    Rows are numbered through all batches and heads. Row r has the runs from `offsets[r]` up to
    `offsets[r + 1]`; run i covers the columns from `starts[i]` up to `stops[i]`. A batch or head
    count of 1 stands for any number.
    """

    shape: Shape  # batches, heads, rows, columns
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    kinds: NDArray[np.int8]  # PARTIAL or FULL

    @staticmethod
    def of_cells(cells: NDArray[np.integer]) -> Runs:
        """The runs of a grid [batches, heads, rows, columns] of EMPTY, PARTIAL and FULL."""
        *_, columns = shape = cells.shape
        flat = cells.reshape(math.prod(shape[:-1]), columns)
        padded = np.full((len(flat), columns + 2), EMPTY, np.int8)
        padded[:, 1:-1] = flat
        rows, places = np.nonzero(padded[:, 1:] != padded[:, :-1])
        # A change is the start of a run, the end of one, or both.
        after = padded[rows, places + 1]
        begins = after != EMPTY
        ends = padded[rows, places] != EMPTY
        return Runs.of_segments(
            shape, rows[begins], places[begins], places[ends], after[begins].astype(np.int8)
        )

    @staticmethod
    def of_lists(
        shape: Shape, *lists: tuple[NDArray[np.integer], NDArray[np.integer], int]
    ) -> Runs:
        """The runs of lists: counts [B, H, R], indices [B, H, R, W], and their kind."""
        columns = shape[-1]
        places, kinds = [], []
        for counts, indices, kind in lists:
            width = min(int(counts.max(initial=0)), indices.shape[-1])
            num_rows = counts.size
            blocks = indices[..., :width].reshape(num_rows, width).astype(np.int64)
            there = np.arange(width) < counts.reshape(num_rows, 1)
            there &= (blocks >= 0) & (blocks < columns)
            places.append((blocks + np.arange(num_rows)[:, None] * columns)[there])
            kinds.append(np.full(len(places[-1]), kind, np.int8))
        place, found = np.concatenate(places), np.concatenate(kinds)
        if not (place[1:] > place[:-1]).all():
            order = np.lexsort((-found, place))  # full comes before partial, and counts
            place, found = place[order], found[order]
            first = np.diff(place, prepend=-1) > 0
            place, found = place[first], found[first]
        rows, starts = np.divmod(place, max(1, columns))
        return Runs.of_segments(shape, rows, starts, starts + 1, found)

    @staticmethod
    def of_segments(
        shape: tuple[int, ...],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        kinds: NDArray[np.int8],
    ) -> Runs:
        """The runs of segments, sorted by row and start. Neighbours of one kind are joined."""
        batches, heads, num_rows, columns = shape
        if len(rows):
            joins = (rows[1:] == rows[:-1]) & (starts[1:] == stops[:-1]) & (kinds[1:] == kinds[:-1])
            first = np.concatenate([[True], ~joins])
            last = np.concatenate([~joins, [True]])
            rows, starts, stops, kinds = rows[first], starts[first], stops[last], kinds[first]
        offsets = np.zeros(batches * heads * num_rows + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=len(offsets) - 1), out=offsets[1:])
        return Runs((batches, heads, num_rows, columns), offsets, starts, stops, kinds)

    @property
    def nbytes(self) -> int:
        """The memory of the arrays in bytes."""
        return self.offsets.nbytes + self.starts.nbytes + self.stops.nbytes + self.kinds.nbytes

    def content(self) -> tuple[object, ...]:
        """A hashable value that is equal for equal runs."""
        arrays = (self.offsets, self.starts, self.stops, self.kinds)
        return (self.shape, *(array.tobytes() for array in arrays))

    def of_row(self, b: int, h: int, row: int) -> slice:
        """The places of the runs of a row of blocks."""
        batches, heads, num_rows, _ = self.shape
        place = (min(b, batches - 1) * heads + min(h, heads - 1)) * num_rows + row
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))

    def pick(self, rows: NDArray[np.integer], shape: Shape) -> Runs:
        """The runs of the rows with the numbers `rows`, in that order, as a mask of `shape`."""
        counts = np.diff(self.offsets)[rows]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        picked = np.arange(ends[-1]) + np.repeat(self.offsets[rows] - ends[:-1], counts)
        return Runs(shape, ends, self.starts[picked], self.stops[picked], self.kinds[picked])

    def by_group(self, groups: int) -> Runs:
        """The runs of the first head of each group, if all heads of each group have the same."""
        batches, heads, num_rows, columns = self.shape
        if heads in (1, groups) or not groups:
            return self
        size, ends = heads // groups, self.offsets[::num_rows] if num_rows else self.offsets
        counts = np.diff(self.offsets).reshape(batches, groups, size, num_rows)
        if (counts != counts[:, :, :1]).any():
            return self
        for first in range(0, batches * heads, size):
            pieces = [slice(ends[at], ends[at + 1]) for at in range(first, first + size)]
            for part in (self.starts, self.stops, self.kinds):
                if any(not np.array_equal(part[pieces[0]], part[at]) for at in pieces[1:]):
                    return self
        rows = np.arange(len(self.offsets) - 1).reshape(batches, groups, size, num_rows)
        return self.pick(rows[:, :, 0].ravel(), (batches, groups, num_rows, columns))

    def row_ids(self) -> NDArray[np.int64]:
        """The number of the row of each run."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def num_elements(self, lengths: tuple[int, int], block_size: tuple[int, int]) -> int:
        """How many elements the blocks have, without those beyond the lengths."""
        (q_len, kv_len), (q_block, kv_block) = lengths, block_size
        stops = np.minimum(self.stops * kv_block, kv_len)
        widths = np.maximum(0, stops - self.starts * kv_block)
        heights = np.clip(q_len - self.row_ids() % self.shape[2] * q_block, 0, q_block)
        return int((widths * heights).sum())

    def cells(self, dtype: type[np.integer] = np.int32) -> NDArray[np.integer]:
        """The grid [batches, heads, rows, columns] of EMPTY, PARTIAL and FULL."""
        batches, heads, num_rows, columns = self.shape
        changes = np.zeros((batches * heads * num_rows, columns + 1), np.int8)
        rows = self.row_ids()
        np.add.at(changes, (rows, self.starts), self.kinds)
        np.subtract.at(changes, (rows, self.stops), self.kinds)
        grid: NDArray[np.integer] = np.cumsum(changes[:, :-1], axis=1, dtype=dtype)
        return grid.reshape(self.shape)

    def all_partial(self) -> Runs:
        """The same blocks, all of them partial."""
        kinds = np.full_like(self.kinds, PARTIAL)
        return Runs.of_segments(self.shape, self.row_ids(), self.starts, self.stops, kinds)

    def of_rows(self, first: int, stop: int) -> Runs:
        """The runs of some rows of blocks of each head."""
        batches, heads, num_rows, columns = self.shape
        rows = np.arange(batches * heads)[:, None] * num_rows + np.arange(first, stop)
        return self.pick(rows.ravel(), (batches, heads, stop - first, columns))

    def only(self, batches: NDArray[np.bool_]) -> Runs:
        """The runs of the batches where `batches` [B] is true; the others read nothing."""
        _, heads, num_rows, _ = self.shape
        kept = np.repeat(batches, heads * num_rows)
        counts = np.where(kept, np.diff(self.offsets), 0)
        mine = np.repeat(kept, np.diff(self.offsets))
        offsets = np.append(0, np.cumsum(counts))
        return Runs(self.shape, offsets, self.starts[mine], self.stops[mine], self.kinds[mine])

    def repeated(self, times: int) -> Runs:
        """The runs of a batch that repeats this one; a batch of 1 stands for any number."""
        batch, *others = self.shape
        if batch == 1:
            return self
        heads, rows, columns = others
        places = np.tile(np.arange(len(self.offsets) - 1), times)
        return self.pick(places, (batch * times, heads, rows, columns))


class Span(NamedTuple):
    """Neighbouring key blocks of one kind, as the keys from `start` up to `stop`."""

    start: int
    stop: int
    full: bool


class BlockRows(NamedTuple):
    """The rows of blocks of a mask, which a call reads once.

    >>> rows = block_mask.rows()
    >>> rows.spans(b=0, h=0, row=1)
    [Span(start=0, stop=128, full=True), Span(start=128, stop=200, full=False)]
    """

    runs: Runs
    block_size: tuple[int, int]
    seq_lengths: tuple[int, int]

    def queries(self) -> Iterator[tuple[int, int, int]]:
        """Each row that has queries, with its first query and the one after its last."""
        (length, _), (block, _) = self.seq_lengths, self.block_size
        for row in range(ceil_div(length, block)):
            yield row, row * block, min((row + 1) * block, length)

    def spans(self, b: int, h: int, row: int) -> list[Span]:
        """The spans of keys that row `row` of blocks reads, ascending, up to the last key."""
        (_, length), (_, block) = self.seq_lengths, self.block_size
        at = self.runs.of_row(b, h, row)
        found = zip(*(part[at].tolist() for part in self.runs[2:]), strict=True)
        return [
            Span(start * block, min(stop * block, length), kind == FULL)
            for start, stop, kind in found
            if start * block < length
        ]

    def only(self, batches: NDArray[np.bool_]) -> BlockRows:
        """The rows of the batches where `batches` [B] is true; the others read nothing."""
        return self._replace(runs=self.runs.only(batches))

    def repeated(self, times: int) -> BlockRows:
        """The rows of a batch that repeats this one; a batch of 1 stands for any number."""
        return self._replace(runs=self.runs.repeated(times))
