"""Which pages of keys a rank sends to whom, which it receives, and where they then lie.

A page is a block of one batch entry. A rank has its own pages first, then those that it receives,
by the rank that sends them, and last a page of zeros, which stands for all blocks that nobody sent:

    own: entry 0, entry 1, ...  |  from rank 0: entry 0, entry 1, ...  |  from rank 1 ...  |  zeros
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.distributed.layouts import Division
from quire.distributed.reads import Flags, Numbers


class Route(NamedTuple):
    """The pages that one rank sends and receives, for a batch of `batch` entries."""

    batch: int
    own: Numbers  # the blocks of this rank, ascending
    sent: Numbers  # own pages in the order in which they are sent, by the rank that gets them
    num_sent: Numbers  # [ranks]
    num_received: Numbers  # [ranks]
    table: Numbers  # [batch, blocks]: the page of each block

    @property
    def num_own(self) -> int:
        """Return the number of pages that this rank owns."""
        return self.batch * len(self.own)

    @property
    def zeros(self) -> int:
        """Return the number of the page of zeros, which is the last."""
        return self.num_own + int(self.num_received.sum())

    @property
    def needed(self) -> Numbers:
        """Return the blocks that queries of this rank read, in some batch entry."""
        blocks: Numbers = (self.table != self.zeros).any(0).nonzero()[0]
        return blocks

    @staticmethod
    def of(division: Division, rank: int, batch: int) -> Route:
        """Return what `rank` sends and receives."""
        ranks, _, count = division.needs.shape
        own = (division.owner == rank).nonzero()[0]
        arrives = division.arrives
        shape = (ranks, batch, count)
        leaves = np.broadcast_to(arrives & (division.owner == rank), shape)
        to, entry, block = leaves.nonzero()  # by rank, then entry, then block
        place = np.zeros(count, np.int64)
        place[own] = np.arange(len(own))
        comes = np.broadcast_to(arrives[rank], (batch, count))
        at, column = comes.nonzero()
        order = np.lexsort((column, at, division.owner[column]))
        at, column = at[order], column[order]
        first = batch * len(own)
        table = np.full((batch, count), first + len(at))
        pages = np.arange(first).reshape(batch, len(own))
        table[:, own] = np.where(division.needs[rank][:, own], pages, table[:, own])
        table[at, column] = first + np.arange(len(at))
        return Route(
            batch=batch,
            own=own,
            sent=entry * len(own) + place[block],
            num_sent=np.bincount(to, minlength=ranks),
            num_received=np.bincount(division.owner[column], minlength=ranks),
            table=table,
        )


class Addition(NamedTuple):
    """The pages that one slice adds to the gradients of own keys."""

    slice: int  # its place among the own slices; -1 if another rank has computed it
    first: int  # of its pages among the received ones
    entries: Numbers  # the batch entry and the block of each page
    blocks: Numbers
    pages: Numbers  # the own page that it is added to


class SliceRoute(NamedTuple):
    """The pages of gradients that one rank sends and receives, for a batch of `batch` entries.

    Each slice of queries has a page for every block of keys that it reads. Pages are in the order
    of the rank that gets them, or that sends them, then of slices, entries and blocks.
    """

    slices: Numbers  # of this rank, ascending
    leaving: Numbers  # [pages, 3]: place of the slice among the own ones, entry, block
    num_sent: Numbers  # [ranks]
    num_received: Numbers  # [ranks]
    additions: tuple[Addition, ...]  # of all slices, ascending

    @staticmethod
    def of(
        division: Division, of_slices: Numbers, needs: Flags, rank: int, batch: int
    ) -> SliceRoute:
        """Return what `rank` sends and receives.

        `of_slices` is the rank of each slice; `needs` [slices, entries, blocks] what each reads.
        """
        owner, ranks = division.owner, len(division.needs)
        num_slices, _, count = needs.shape
        slices, entries, blocks = np.broadcast_to(needs, (num_slices, batch, count)).nonzero()
        computed, kept = of_slices[slices] == rank, owner[blocks] == rank
        own, place = (of_slices == rank).nonzero()[0], np.full(num_slices, -1)
        place[own] = np.arange(len(own))
        sent = (computed & ~kept).nonzero()[0]
        sent = sent[np.argsort(owner[blocks[sent]], kind="stable")]
        got = (~computed & kept).nonzero()[0]
        got = got[np.argsort(of_slices[slices[got]], kind="stable")]
        where = np.full(len(slices), -1)
        where[got] = np.arange(len(got))
        own_blocks = (owner == rank).nonzero()[0]
        column = np.zeros(count, np.int64)
        column[own_blocks] = np.arange(len(own_blocks))
        additions = []
        for number in range(num_slices):
            here = (kept & (slices == number)).nonzero()[0]
            if len(here):
                at = entries[here], blocks[here]
                pages = at[0] * len(own_blocks) + column[at[1]]
                additions.append(Addition(int(place[number]), int(where[here[0]]), *at, pages))
        return SliceRoute(
            slices=own,
            leaving=np.stack([place[slices[sent]], entries[sent], blocks[sent]], 1),
            num_sent=np.bincount(owner[blocks[sent]], minlength=ranks),
            num_received=np.bincount(of_slices[slices[got]], minlength=ranks),
            additions=tuple(additions),
        )
