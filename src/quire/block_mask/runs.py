"""The blocks of a mask as runs: memory for what exists, however long the sequences are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.block_mask.lists import EMPTY, PARTIAL

Shape = tuple[int, int, int, int]


class Runs(NamedTuple):
    """Adjacent key blocks of one kind, row after row, ascending within a row.

    The rows of all batches and heads follow one another; row r has the runs from offsets[r] up to
    offsets[r + 1]. A batch or head count of 1 stands for every one.
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
        # Every change is an end, a start, or both: a start where what follows is not empty.
        after = padded[rows, places + 1]
        begins = after != EMPTY
        ends = padded[rows, places] != EMPTY
        return Runs.of_segments(
            shape, rows[begins], places[begins], places[ends], after[begins].astype(np.int8)
        )

    @staticmethod
    def of_segments(
        shape: tuple[int, ...],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        kinds: NDArray[np.int8],
    ) -> Runs:
        """Runs from segments that are sorted by row and start; neighbours of a kind are joined."""
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
        """The memory that they take."""
        return self.offsets.nbytes + self.starts.nbytes + self.stops.nbytes + self.kinds.nbytes

    def content(self) -> tuple[object, ...]:
        """All of it as a value."""
        arrays = (self.offsets, self.starts, self.stops, self.kinds)
        return (self.shape, *(array.tobytes() for array in arrays))

    def of_row(self, b: int, h: int, row: int) -> slice:
        """Where the runs of a row of blocks are."""
        batches, heads, num_rows, _ = self.shape
        place = (min(b, batches - 1) * heads + min(h, heads - 1)) * num_rows + row
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))

    def pick(self, rows: NDArray[np.integer], shape: Shape) -> Runs:
        """The runs of some rows, by their number among all, one after the other."""
        counts = np.diff(self.offsets)[rows]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        picked = np.arange(ends[-1]) + np.repeat(self.offsets[rows] - ends[:-1], counts)
        return Runs(shape, ends, self.starts[picked], self.stops[picked], self.kinds[picked])

    def row_ids(self) -> NDArray[np.int64]:
        """The row of each run, by its number among all."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def num_elements(self, lengths: tuple[int, int], block_size: tuple[int, int]) -> int:
        """The elements in all blocks of this size, none past the lengths."""
        (q_len, kv_len), (q_block, kv_block) = lengths, block_size
        stops = np.minimum(self.stops * kv_block, kv_len)
        widths = np.maximum(0, stops - self.starts * kv_block)
        heights = np.clip(q_len - self.row_ids() % self.shape[2] * q_block, 0, q_block)
        return int((widths * heights).sum())

    def cells(self) -> NDArray[np.int32]:
        """The grid of which these are the runs."""
        batches, heads, num_rows, columns = self.shape
        changes = np.zeros((batches * heads * num_rows, columns + 1), np.int8)
        rows = self.row_ids()
        np.add.at(changes, (rows, self.starts), self.kinds)
        np.subtract.at(changes, (rows, self.stops), self.kinds)
        grid = np.cumsum(changes[:, :-1], axis=1, dtype=np.int32)
        return grid.reshape(self.shape)

    def all_partial(self) -> Runs:
        """The same blocks, none of them full."""
        kinds = np.full_like(self.kinds, PARTIAL)
        return Runs.of_segments(self.shape, self.row_ids(), self.starts, self.stops, kinds)
