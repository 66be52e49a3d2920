"""Which pages the sequences of a cache hold, in order: one table for each group of layers.

    page size 4                columns   0   1   2   3
    sequence in row 0, 9 tokens          5   2   7   .      position 6 is row 2 of page 2
    sequence in row 1, 14 tokens         ~   ~   0   3      a window of 4 has released two pages
                                         └─ first ─┘└─ end

Row r holds the pages of columns first[r] to end[r] - 1, each once in the pool's count. Lengths are
the cache's, which is why they come as arguments. `plan` says what an extension takes, `plan_kept`
what it takes to keep some tokens of a draft, and both change nothing; `commit` does it and cannot
fail once the pages are there. No torch here.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.kv.pool import NO_PAGES, PagePool, Pages

Numbers: TypeAlias = NDArray[np.int64]
"""Rows, lengths or counts, one for each sequence."""


Places: TypeAlias = tuple[Numbers, Numbers]
"""Rows, and beside each a column or a position."""


class Plan(NamedTuple):
    """What it takes to extend some sequences, or to drop some of their tokens."""

    rows: Numbers
    first: Numbers  # the first column that the window still reaches, for each row
    end: Numbers  # one past the last column, for each row
    copied: Places  # of pages that are written to and that others hold too
    num_pages: int
    released: Pages  # behind the window, or with dropped tokens alone
    num_freed: int  # of these

    @property
    def shortage(self) -> int:
        """How many pages must be free before it starts."""
        return self.num_pages - self.num_freed


class Copies(NamedTuple):
    """Pages whose content goes to others."""

    source: Pages
    target: Pages


class Kept(NamedTuple):
    """Tokens that stay, of all from a position on."""

    start: Numbers  # that position, for each sequence
    counts: Numbers  # how many tokens stay of it
    positions: Numbers  # where these are now, in order, those of the first sequence first

    @property
    def lengths(self) -> Numbers:
        """How many tokens each sequence has in the end."""
        return self.start + self.counts


class Moves(NamedTuple):
    """Tokens that go to other positions of their sequences."""

    rows: Numbers
    source: Numbers
    target: Numbers


class PageTable:
    """The pages of sequences, for layers that keep the same positions."""

    def __init__(self, pool: PagePool, page_size: int, window: int | None) -> None:
        self.pool, self.page_size, self.window = pool, page_size, window
        self.pages: Pages = np.zeros((0, 0), np.int32)
        self.first: Numbers = np.zeros(0, np.int64)
        self.end: Numbers = np.zeros(0, np.int64)

    def reserve(self, rows: int, columns: int = 0) -> None:
        """Have room for so many rows and columns."""
        old_rows, old_columns = self.pages.shape
        if rows > old_rows or columns > old_columns:
            shape = _enough(rows, old_rows), _enough(columns, old_columns)
            pages = np.zeros(shape, np.int32)
            pages[:old_rows, :old_columns] = self.pages
            self.pages = pages
            self.first, self.end = (
                np.concatenate([each, np.zeros(shape[0] - old_rows, np.int64)])
                for each in (self.first, self.end)
            )

    def held(self, row: int) -> Pages:
        """The pages of a row, those behind the window left out."""
        return self.pages[row, self.first[row] : self.end[row]]

    def start(self, row: int) -> int:
        """The first position whose page is still held."""
        return int(self.first[row]) * self.page_size

    def reach(self, length: int) -> int:
        """How many pages a window leaves behind that ends before position `length`."""
        return 0 if self.window is None else max(0, length - self.window) // self.page_size

    def plan(self, rows: Numbers, lengths: Numbers, counts: Numbers) -> Plan:
        """What it takes to write `counts` tokens behind `lengths`."""
        end = (lengths + counts + (self.page_size - 1)) // self.page_size
        new = int((end - self.end[rows]).sum())
        writes = rows[np.minimum(lengths % self.page_size, counts) > 0]  # to a page that has room
        copied = self._shared((writes, self.end[writes] - 1))
        first = self.first[rows]
        released, freed = NO_PAGES, 0
        if self.window is not None:
            first = np.maximum(first, np.maximum(0, lengths - self.window) // self.page_size)
            released = self.pages[_spread(rows, self.first[rows], first)]
            freed = self.pool.num_freed_by(released)
        return Plan(rows, first, end, copied, new + len(copied[0]), released, freed)

    def plan_kept(self, rows: Numbers, kept: Kept) -> tuple[Plan, Moves]:
        """What it takes to keep some tokens of sequences, and which of them have to move.

        They only move to the front, so a token whose page is held goes to one that is held, or to
        where a window has left all pages behind: there it is no longer needed.
        """
        first = self.first[rows]
        end = np.maximum(first, -(-kept.lengths // self.page_size))
        released: Pages = self.pages[_spread(rows, end, self.end[rows])]
        which, target = spread(rows, kept.start, kept.counts)
        moved = (kept.positions != target) & (target >= self.first[which] * self.page_size)
        moves = Moves(which[moved], kept.positions[moved], target[moved])
        copied = self._shared(self._columns(moves.rows, moves.target), released)
        freed = self.pool.num_freed_by(released)
        return Plan(rows, first, end, copied, len(copied[0]), released, freed), moves

    def _columns(self, rows: Numbers, positions: Numbers) -> Places:
        """The columns that positions lie in, each once; they rise within a row."""
        columns = positions // self.page_size
        new = np.ones(len(columns), np.bool_)
        new[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
        return rows[new], columns[new]

    def _shared(self, written: Places, released: Pages = NO_PAGES) -> Places:
        """Those whose page must not be written to, since somebody else would see it.

        Whoever holds a page of `released` drops it and sees nothing any more.
        """
        pages: Pages = self.pages[written]
        copied = self.pool.shared(pages)
        if not np.count_nonzero(copied):
            return written[0][:0], written[1][:0]
        page, first, times = np.unique(pages, return_index=True, return_counts=True)
        if len(released):
            times += np.bincount(released, minlength=self.pool.num_pages)[page]
        copied[first[self.pool.references(page) == times]] = False  # the last holder may keep it
        return written[0][copied], written[1][copied]

    def commit(self, plan: Plan) -> Copies:
        """Do it; returns what has to be copied before anything is written."""
        if len(plan.released):
            self.pool.release(plan.released)
        held = np.maximum(plan.first, self.end[plan.rows])
        self.first[plan.rows], self.end[plan.rows] = plan.first, plan.end
        if not plan.num_pages:
            return Copies(NO_PAGES, NO_PAGES)
        pages = self.pool.allocate(plan.num_pages)
        copies, new = np.split(pages, [len(plan.copied[0])])
        self.reserve(0, int(plan.end.max(initial=0)))
        source = NO_PAGES
        if len(copies):
            source = self.pages[plan.copied]
            self.pages[plan.copied] = copies
            self.pool.release(source)
        if len(new):
            self.pages[_spread(plan.rows, held, plan.end)] = new
        return Copies(source, copies)

    def plan_new(self, start: int, length: int) -> Plan:
        """What it takes to have the positions from `start` to `length` in a row without pages."""
        first, end = start // self.page_size, -(-length // self.page_size)
        none, at = np.zeros(0, np.int64), np.array([-1])
        return Plan(at, np.array([first]), np.array([end]), (none, none), end - first, NO_PAGES, 0)

    def adopt(self, row: int, pages: Pages, first: int = 0) -> None:
        """Let an empty row have pages that are held for it already."""
        self.reserve(0, first + len(pages))
        self.first[row], self.end[row] = first, first + len(pages)
        self.pages[row, first : first + len(pages)] = pages

    def fork(self, row: int, into: int) -> None:
        """Let an empty row share the pages of another."""
        pages = self.held(row)
        self.pool.share(pages)
        self.adopt(into, pages, int(self.first[row]))

    def truncate(self, row: int, length: int) -> None:
        """Release the pages after `length` tokens."""
        end = max(int(self.first[row]), -(-length // self.page_size))
        self.pool.release(self.pages[row, end : self.end[row]])
        self.end[row] = end

    def clear(self, row: int) -> None:
        """Release all pages of a row."""
        self.pool.release(self.held(row))
        self.first[row] = self.end[row] = 0

    def slots(self, rows: Numbers, positions: Numbers) -> Numbers:
        """Where positions lie: page * page_size + the row in it."""
        column = positions // self.page_size
        page = self.pages[rows, column].astype(np.int64)
        return (page - column) * self.page_size + positions

    def view(self, rows: Numbers) -> Pages:
        """The table of some rows, [rows, columns].

        Where a window has left a page behind stands the first that is held, so that whoever looks
        at it by mistake never sees another sequence.
        """
        columns = int(self.end[rows].max(initial=0))
        table = self.pages[rows, :columns]
        if self.window is not None and columns:
            first = self.first[rows][:, None]
            own = np.take_along_axis(table, np.minimum(first, columns - 1), axis=1)
            table = np.where(np.arange(columns) < first, own, table)
        return np.ascontiguousarray(table)


def _spread(rows: Numbers, start: Numbers, end: Numbers) -> Places:
    """Index of the columns from `start` to `end` of each row, one after the other."""
    return spread(rows, start, np.maximum(0, end - start))


def spread(rows: Numbers, start: Numbers, counts: Numbers) -> Places:
    """Each row `counts` times, and beside it start, start + 1, ..."""
    if np.count_nonzero(counts == 1) == len(counts):
        return rows, start
    before = np.cumsum(counts) - counts
    places = np.arange(int(counts.sum())) - np.repeat(before - start, counts)
    return np.repeat(rows, counts), places


def _enough(wanted: int, there: int) -> int:
    return there if wanted <= there else max(wanted, 2 * there, 8)
