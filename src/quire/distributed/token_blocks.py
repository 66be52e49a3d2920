"""Blocks of tokens, which a plan gives to ranks: of one sequence, or of several in one tensor.

    rows         0       4       8       12         of the packed tensors
    sequences    |  0            |  1 |  2      |
    blocks       | 0     | 1     | 2  | 3     |4|   of 4 tokens; a sequence begins a block

A plan counts blocks. A block travels as a page, whose last places may be empty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.distributed.reads import Numbers
from quire.ir.trace import Mod, mod_name
from quire.mods.compose import Mask


class TokenBlocks(NamedTuple):
    """The blocks of sequences that lie one after the other: the columns of a table."""

    size: int  # the most tokens of a block
    lengths: Numbers  # of the sequences
    sequence: Numbers  # of each block
    first: Numbers  # the position of its first token in its sequence
    row: Numbers  # the row of its first token
    tokens: Numbers  # how many it has

    @staticmethod
    def of(lengths: Numbers, size: int) -> TokenBlocks:
        """Return the blocks of `size` tokens of sequences with these lengths."""
        counts = -(-lengths // size)
        sequence = np.repeat(np.arange(len(lengths)), counts)
        first = (np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]) * size
        return TokenBlocks(
            size=size,
            lengths=lengths,
            sequence=sequence,
            first=first,
            row=(np.cumsum(lengths) - lengths)[sequence] + first,
            tokens=np.minimum(size, lengths[sequence] - first),
        )

    @property
    def num(self) -> int:
        """Return the number of blocks."""
        return len(self.row)

    def ranges(self, chosen: Numbers) -> tuple[tuple[int, int], ...]:
        """Return ranges of rows [start, stop), each in one sequence, from blocks that ascend."""
        goes_on = (np.diff(chosen) == 1) & (np.diff(self.sequence[chosen]) == 0)
        pieces = np.split(chosen, np.flatnonzero(~goes_on) + 1)
        ends = self.row + self.tokens
        return tuple((int(self.row[x[0]]), int(ends[x[-1]])) for x in pieces if len(x))

    def rows(self, chosen: Numbers) -> Tensor:
        """Return the rows of the tokens of some blocks, in their order."""
        return self._tokens(self.row[chosen], chosen)

    def lines(self, chosen: Numbers) -> Tensor:
        """Return where the tokens of some blocks lie in pages that follow each other."""
        return self._tokens(np.arange(len(chosen)) * self.size, chosen)

    def tokens_of(self, chosen: Numbers) -> Numbers:
        """Return how many tokens each sequence has in some blocks."""
        return np.bincount(
            self.sequence[chosen], self.tokens[chosen], minlength=len(self.lengths)
        ).astype(np.int64)

    def sequence_of(self, rows: Numbers) -> Numbers:
        """Return the sequence of each row."""
        found: Numbers = self.sequence[np.searchsorted(self.row, rows, "right") - 1]
        return found

    @property
    def begins(self) -> Numbers:
        """Return the first row of each sequence."""
        begins: Numbers = np.cumsum(self.lengths) - self.lengths
        return begins

    def positions(self, rows: Tensor) -> Tensor:
        """Return the position of each row in its sequence."""
        here = rows.numpy()
        return torch.from_numpy(here - self.begins[self.sequence_of(here)])

    def spread(self, mask: Mod) -> Mod:
        """Return a mask of places in pages that follow each other, from one of positions.

        It is called with the place of a token, `block * size` and more.
        """
        shift = self.first - np.arange(self.num) * self.size
        tables = (self.sequence, shift, self.lengths[self.sequence])
        sequence, shifts, ends = (torch.from_numpy(x.astype(np.int32)) for x in tables)
        return Mask(
            _in_pages,
            mod_name(mask),
            mask=mask,
            size=self.size,
            sequence=sequence,
            shifts=shifts,
            ends=ends,
        )

    def _tokens(self, first: Numbers, chosen: Numbers) -> Tensor:
        counts = self.tokens[chosen]
        before = np.cumsum(counts) - counts
        return torch.from_numpy(np.arange(counts.sum()) + np.repeat(first - before, counts))


def _in_pages(
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    *,
    mask: Mod,
    size: int,
    sequence: Tensor,
    shifts: Tensor,
    ends: Tensor,
) -> Tensor:
    """Return what `mask` says of the tokens at two places."""
    q_block, kv_block = q_idx // size, kv_idx // size
    q_at, kv_at = q_idx + shifts[q_block], kv_idx + shifts[kv_block]
    entry = sequence[q_block]
    there = (entry == sequence[kv_block]) & (q_at < ends[q_block]) & (kv_at < ends[kv_block])
    shown: Tensor = there & mask(entry, h, q_at, kv_at)
    return shown
