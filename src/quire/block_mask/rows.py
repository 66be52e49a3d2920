"""A block mask as attention reads it: for each row of query blocks, spans of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quire.block_mask.lists import FULL, ceil_div
from quire.block_mask.runs import Runs


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
