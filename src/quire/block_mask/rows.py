"""A block mask as attention walks it: for each row of query blocks, spans of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.block_mask.lists import EMPTY, FULL, ceil_div


class Span(NamedTuple):
    """Adjacent key blocks of one kind, as the tokens from `start` up to `stop`."""

    start: int
    stop: int
    full: bool


class BlockRows(NamedTuple):
    """A block mask as attention walks it, read once per call.

    >>> rows = block_mask.rows()
    >>> rows.spans(b=0, h=0, row=1)
    [Span(start=0, stop=128, full=True), Span(start=128, stop=200, full=False)]
    """

    cells: NDArray[np.int32]
    """EMPTY, PARTIAL or FULL: [B, H, rows, columns]; a B or H of 1 stands for every one."""

    block_size: tuple[int, int]
    seq_lengths: tuple[int, int]

    def queries(self) -> Iterator[tuple[int, int, int]]:
        """Each row that holds queries, with its first and one past its last query."""
        (length, _), (block, _) = self.seq_lengths, self.block_size
        for row in range(ceil_div(length, block)):
            yield row, row * block, min((row + 1) * block, length)

    def spans(self, b: int, h: int, row: int) -> list[Span]:
        """The keys that row `row` of blocks reads, ascending, cut off at the last key."""
        num_batches, num_heads = self.cells.shape[:2]
        cells = self.cells[b if num_batches > 1 else 0, h if num_heads > 1 else 0, row]
        (_, length), (_, block) = self.seq_lengths, self.block_size
        edges = np.flatnonzero(np.diff(cells, prepend=-1, append=-1)).tolist()
        return [
            Span(start * block, min(stop * block, length), bool(cells[start] == FULL))
            for start, stop in itertools.pairwise(edges)
            if cells[start] != EMPTY and start * block < length
        ]
