"""Which blocks of keys each block of queries reads, and what follows for the ranks that share them.

Bounds of the mask decide nearly all blocks, so a million tokens take a fraction of a second. Blocks
are counted: a block of keys that a block of queries reads is one unit of work, and travels whole.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quire.block_mask.blocks import Runs, ceil_div
from quire.block_mask.classify import classify
from quire.ir.graph import inputs
from quire.ir.trace import Mod, Traced

Numbers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

_CPU = torch.device("cpu")


class Reads(NamedTuple):
    """The blocks of keys that each block of queries reads: runs [entries, heads, blocks, blocks].

    If all batch entries have the same mask, there is one entry for all of them.
    """

    runs: Runs

    @staticmethod
    def of(mask: Mod, length: int, block: int, batch: int, heads: int) -> Reads:
        """Return what a mask of `length` tokens reads, in blocks of `block` tokens."""
        names = inputs(mask.output) if isinstance(mask, Traced) else {"b", "h"}
        sizes = (batch if "b" in names else 1, heads if "h" in names else 1, length, length)
        return Reads(classify(mask, sizes, (block, block), _CPU))

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the sequence."""
        return self.runs.shape[3]

    @property
    def entries(self) -> int:
        """Return the number of batch entries with a mask of their own; 1 if all have the same."""
        return self.runs.shape[0]

    def rows(self) -> Numbers:
        """Return the block of queries of each run."""
        rows: Numbers = self.runs.row_ids() % self.num_blocks
        return rows

    def work(self) -> Numbers:
        """Return how many blocks of keys each block of queries reads, in all entries and heads."""
        widths = self.runs.stops - self.runs.starts
        return np.bincount(self.rows(), widths, self.num_blocks).astype(np.int64)

    def of_ranks(self, owner: Numbers, num_ranks: int) -> Flags:
        """Return which blocks of keys the queries of each rank read: [ranks, entries, blocks].

        `owner` [blocks] is the rank of each block of queries.
        """
        entry = self.runs.row_ids() // (self.runs.shape[1] * self.num_blocks)
        place = owner[self.rows()] * self.entries + entry
        size = (num_ranks * self.entries, self.num_blocks)
        return union(place, self.runs, size).reshape(num_ranks, self.entries, self.num_blocks)

    def at_home(self, owner: Numbers) -> Flags:
        """Return which blocks of queries [blocks] read only keys of their own rank."""
        rows, starts, stops = self.rows(), self.runs.starts, self.runs.stops
        changes = np.concatenate([[0], np.cumsum(owner[1:] != owner[:-1])])
        strange = (owner[starts] != owner[rows]) | (changes[starts] != changes[stops - 1])
        home: Flags = np.bincount(rows, strange, self.num_blocks) == 0
        return home

    def in_units(self, width: int) -> Reads:
        """Return what units of `width` neighbouring blocks read, in units."""
        if width == 1:
            return self
        batch, heads, rows, _ = self.runs.shape
        units, ids = ceil_div(rows, width), self.runs.row_ids()
        place = ids // rows * units + ids % rows // width
        cells = union(place, self.runs, (batch * heads * units, units), width)
        return Reads(Runs.of_cells(cells.reshape(batch, heads, units, units).astype(np.int8)))

    def documents(self) -> Numbers:
        """Return the number of the document of each block. No block reads another document.

        The exception is a block that holds the end of one text and the start of the next: it may
        be read from both sides.
        """
        place = np.arange(self.num_blocks)
        first, end = place.copy(), place + 1
        np.minimum.at(first, self.rows(), self.runs.starts)
        np.maximum.at(end, self.rows(), self.runs.stops)
        first = np.minimum.accumulate(first[::-1])[::-1]  # what all blocks from here on read
        end = np.maximum.accumulate(end)  # what all blocks up to here read
        begins = np.ones(len(place), np.bool_)
        begins[1:] = (first[1:] >= place[1:] - 1) & (end[:-1] <= place[1:] + 1)
        numbers: Numbers = np.cumsum(begins) - 1
        return numbers


def union(rows: Numbers, runs: Runs, size: tuple[int, int], width: int = 1) -> Flags:
    """Return which columns [rows, columns] runs cover, run i in row `rows[i]`.

    A column is `width` blocks wide.
    """
    changes = np.zeros((size[0], size[1] + 1), np.int32)
    np.add.at(changes, (rows, runs.starts // width), 1)
    np.subtract.at(changes, (rows, -(-runs.stops // width)), 1)
    covered: Flags = np.cumsum(changes[:, :-1], axis=1) > 0
    return covered


MOST_TOKENS, FEWEST_TOKENS = 128, 16  # of a block
BLOCKS_OF_RANK = 16  # at least, if blocks can be made smaller


MOST_EMPTY = 1.1  # places of blocks for each token, if blocks can be made smaller


def choose_block(lengths: Numbers, num_ranks: int) -> int:
    """Return the number of tokens of a block of sequences with these lengths.

    It is 128, or fewer if ranks would have few blocks, or if blocks would be half empty, since no
    block has tokens of two sequences.
    """
    block = MOST_TOKENS
    while block > FEWEST_TOKENS:
        counts = -(-lengths // block)
        fills = len(lengths) == 1 or counts.sum() * block <= MOST_EMPTY * lengths.sum()
        if fills and counts.sum() >= BLOCKS_OF_RANK * num_ranks:
            break
        block //= 2
    return block
