"""Which pages of keys a rank sends to whom, which it receives, and where they then lie.

A page is a block of one batch entry. A rank has its own pages first, then those that it receives,
by the rank that sends them. Blocks that nobody sent are holes, -1:

    own: entry 0, entry 1, ...  |  from rank 0: entry 0, entry 1, ...  |  from rank 1 ...
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
    table: Numbers  # [batch, blocks]: the page of each block, or -1

    @property
    def num_own(self) -> int:
        """Return the number of pages that this rank owns."""
        return self.batch * len(self.own)

    @property
    def num_pages(self) -> int:
        """Return the number of pages that this rank has or receives."""
        return self.num_own + int(self.num_received.sum())

    @property
    def needed(self) -> Numbers:
        """Return the blocks that queries of this rank read, in some batch entry."""
        there: Flags = self.table >= 0
        blocks: Numbers = np.flatnonzero(there.any(0))
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
        table = np.full((batch, count), -1)
        pages = np.arange(first).reshape(batch, len(own))
        table[:, own] = np.where(division.needs[rank][:, own], pages, -1)
        table[at, column] = first + np.arange(len(at))
        return Route(
            batch=batch,
            own=own,
            sent=entry * len(own) + place[block],
            num_sent=np.bincount(to, minlength=ranks),
            num_received=np.bincount(division.owner[column], minlength=ranks),
            table=table,
        )


class Hop(NamedTuple):
    """Pages of sums that ranks send each other at once, in the order of ranks, then of pages.

    A page is an entry and a block, of the sums of one slice also the slice: [pages, 2 or 3].
    """

    leaving: Numbers  # by the rank that gets them
    num_sent: Numbers  # [ranks]
    arriving: Numbers  # by the rank that sends them
    num_received: Numbers  # [ranks]

    @staticmethod
    def of(pages: Numbers, sender: Numbers, receiver: Numbers, rank: int, ranks: int) -> Hop:
        """Return what `rank` sends and receives of pages with a sender and a receiver each."""
        moves = sender != receiver
        leaves = (moves & (sender == rank)).nonzero()[0]
        comes = (moves & (receiver == rank)).nonzero()[0]
        leaves = leaves[np.lexsort((*pages[leaves].T[::-1], receiver[leaves]))]
        comes = comes[np.lexsort((*pages[comes].T[::-1], sender[comes]))]
        return Hop(
            leaving=pages[leaves],
            num_sent=np.bincount(receiver[leaves], minlength=ranks),
            arriving=pages[comes],
            num_received=np.bincount(sender[comes], minlength=ranks),
        )


class Addition(NamedTuple):
    """Blocks [first, end) of one batch entry, to whose sums one slice is added."""

    slice: int  # its place among the own slices; -1 if another rank has computed it
    entry: int
    first: int
    end: int
    page: int  # the first one among the pages of such slices


class SumTurn(NamedTuple):
    """Sums arrive, and slices of this rank are added to them and to others."""

    hop: Hop
    additions: tuple[Addition, ...]  # slices ascend


class SliceRoute(NamedTuple):
    """How sums over slices of queries go from rank to rank, for a batch of `batch` entries.

    The sums of a block of keys are added in the order of slices. A rank adds its slices up to the
    first one that another rank has, and sends the sums there; the last sends them to their owner.
    If another rank has only one slice in a row, that slice is sent instead:

        slices of the ranks     0 0 0 2 0 1 1 1 0 0      block of rank 1
        are added by            0 0 0 0 0 1 1 1 0 0
        sums                    turn 0   | turn 1 | turn 2 | home
    """

    slices: Hop  # single ones
    turns: tuple[SumTurn, ...]
    home: Hop  # from the ranks that have added the last slices to the owners
    stays: Numbers  # [pages, 2]: entry and block of the sums that are complete and at home

    @staticmethod
    def of(
        division: Division, of_slices: Numbers, needs: Flags, rank: int, batch: int
    ) -> SliceRoute:
        """Return what `rank` adds, sends and receives.

        `of_slices` is the rank of each slice; `needs` [slices, entries, blocks] what each reads.
        """
        runs = SliceRuns.of(of_slices, needs, batch)
        ranks, owner = len(division.needs), division.owner
        place = np.where(of_slices == rank, np.cumsum(of_slices == rank) - 1, -1)
        cells = np.stack([runs.slice, runs.entry, runs.block], 1)
        single = Hop.of(cells, of_slices[runs.slice], runs.rank, rank, ranks)
        received = {tuple(x): n for n, x in enumerate(single.arriving.tolist())}
        turns = []
        for number in range(runs.most):
            now, mine = runs.turn == number, runs.rank == rank
            comes = now & runs.begins & (number > 0)
            pages = np.stack([runs.entry, runs.block], 1)
            hop = Hop.of(pages[comes], runs.before[comes], runs.rank[comes], rank, ranks)
            turns.append(SumTurn(hop, _additions(cells[now & mine], place, received)))
        last = pages[runs.ends] if runs.most else np.zeros((0, 2), np.int64)
        by, of = runs.rank[runs.ends], owner[last[:, 1]]
        return SliceRoute(
            slices=single._replace(
                leaving=np.concatenate([place[single.leaving[:, :1]], single.leaving[:, 1:]], 1)
            ),
            turns=tuple(turns),
            home=Hop.of(last, by, of, rank, ranks),
            stays=last[(by == rank) & (of == rank)],
        )


class SliceRuns(NamedTuple):
    """The slices that read each block, in ascending order. One rank adds those of a run."""

    slice: Numbers
    entry: Numbers
    block: Numbers
    rank: Numbers  # that adds the slice, and
    sent: Flags  # whether another one has computed it
    turn: Numbers  # how many runs come before, for the same block
    begins: Flags  # whether a run begins here, and
    ends: Flags  # whether it is the last slice of all
    before: Numbers  # the rank of the slice before
    most: int  # runs of a block

    @staticmethod
    def of(of_slices: Numbers, needs: Flags, batch: int) -> SliceRuns:
        """Return the runs of slices with these ranks, which read the blocks `needs`."""
        shape = (len(needs), batch, needs.shape[2])
        entry, block, slice = np.broadcast_to(needs, shape).transpose(1, 2, 0).nonzero()
        computed = of_slices[slice]
        same = np.zeros(len(slice), np.bool_)  # as the one before: the entry and the block
        same[1:] = (entry[1:] == entry[:-1]) & (block[1:] == block[:-1])
        begins = ~same | (computed != np.roll(computed, 1))
        single = same & begins & np.roll(begins, -1)  # the first cell begins, too
        adds = np.maximum.accumulate(np.where(single, 0, np.arange(len(slice))))
        rank = computed[adds]
        before = np.roll(rank, 1)
        begins = ~same | (rank != before)
        count = np.cumsum(begins) - 1
        first = np.maximum.accumulate(np.where(same, 0, np.arange(len(slice))))
        turn = count - count[first] if len(slice) else count
        ends = np.ones(len(slice), np.bool_)
        ends[:-1] = ~same[1:]
        most = int(turn.max(initial=-1)) + 1
        sent = rank != computed
        return SliceRuns(
            slice,
            entry,
            block,
            rank,
            sent=sent,
            turn=turn,
            begins=begins,
            ends=ends,
            before=before,
            most=most,
        )

    def arrivals(self, owner: Numbers, num_ranks: int) -> Numbers:
        """Return how many pages of sums each rank receives on their way home."""
        comes = self.begins & (self.turn > 0)
        home, by = owner[self.block[self.ends]], self.rank[self.ends]
        there = np.concatenate([self.rank[comes], self.rank[self.sent], home[home != by]])
        return np.bincount(there, minlength=num_ranks)


def _additions(
    cells: Numbers, place: Numbers, received: dict[tuple[int, ...], int]
) -> tuple[Addition, ...]:
    """Return ranges of blocks in a row, slices ascending, from cells of slice, entry and block."""
    cells = cells[np.lexsort(cells.T[::-1])]
    steps = np.diff(cells, axis=0)
    cuts = np.flatnonzero((steps[:, :2] != 0).any(1) | (steps[:, 2] != 1)) + 1
    found = []
    for part in np.split(cells, cuts):
        if len(part):
            slice, entry, first = (int(x) for x in part[0])
            page = received.get((slice, entry, first), 0)
            end = first + len(part)
            found.append(Addition(int(place[slice]), entry, first, end, page))
    return tuple(found)
