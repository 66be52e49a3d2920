"""Which pages the sequences of a cache hold, in order: one table for each group of layers.

    page size 4                columns   0   1   2   3
    sequence in row 0, 9 tokens          5   2   7   .      position 6 is row 2 of page 2
    sequence in row 1, 14 tokens         ~   ~   0   3      a window of 4 has released two pages
                                         └─ first ─┘└─ end

Row r holds the pages of columns first[r] to end[r] - 1, each once in the pool's count. The cache
keeps the lengths, so methods take them as arguments. `plan` returns the pages that an extension
needs, and `plan_kept` those that are needed to keep some drafts; both change nothing. `commit`
carries a plan out, and cannot fail if enough pages are free.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from quire.kv.pool import NO_PAGES, PagePool, Pages
from quire.memory.tables import Numbers

Places: TypeAlias = tuple[Numbers, Numbers]
"""Rows, and a column or a position for each."""

NO_PLACES: Places = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class PagePlan(NamedTuple):
    """The pages that are allocated, copied and released to change some sequences."""

    rows: Numbers
    first: Numbers  # the first column that the window still reaches, for each row
    end: Numbers  # one past the last column, for each row
    copied: Places  # where shared pages lie that are written to, so that they are copied first
    num_new: int = 0
    released: Pages = NO_PAGES  # pages before the window, or with dropped tokens only
    num_freed: int = 0  # how many of the released pages become free

    @property
    def num_pages(self) -> int:
        """The number of pages to allocate: new ones and copies."""
        return self.num_new + len(self.copied[0])

    @property
    def shortage(self) -> int:
        """The number of pages that must be free before `commit`."""
        return self.num_pages - self.num_freed


class Copies(NamedTuple):
    """Pages to copy from, and the pages to copy to."""

    source: Pages
    target: Pages


class Kept(NamedTuple):
    """The tokens that stay, out of all tokens from position `start` on."""

    start: Numbers  # for each sequence
    counts: Numbers  # how many tokens stay, for each sequence
    positions: Numbers  # of the tokens that stay, those of the first sequence first

    @property
    def lengths(self) -> Numbers:
        """The number of tokens that each sequence has afterwards."""
        return self.start + self.counts


class Moves(NamedTuple):
    """Tokens that move from one position of their sequence to another."""

    rows: Numbers
    source: Numbers
    target: Numbers


class PageTable:
    """The pages of all sequences, for one group of layers."""

    def __init__(self, pool: PagePool, page_size: int, window: int | None) -> None:
        self.pool, self.page_size, self.window = pool, page_size, window
        self.pages: Pages = np.zeros((0, 0), np.int32)
        self.first: Numbers = np.zeros(0, np.int64)
        self.end: Numbers = np.zeros(0, np.int64)

    def reserve(self, rows: int, columns: int = 0) -> None:
        """Grow to at least this many rows and columns."""
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
        """The pages that a row holds, without those before the window."""
        return self.pages[row, self.first[row] : self.end[row]]

    def start(self, row: int) -> int:
        """The first position whose page is still held."""
        return int(self.first[row]) * self.page_size

    def reach(self, length: int) -> int:
        """The number of pages before the window of a sequence with `length` tokens."""
        return 0 if self.window is None else max(0, length - self.window) // self.page_size

    def most_pages(self, length: int, step: int) -> int:
        """The most pages that a row holds until it has `length` tokens, `step` more at a time."""
        whole = -(-length // self.page_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window + step) // self.page_size) + 1)

    def plan(self, rows: Numbers, lengths: Numbers, counts: Numbers) -> PagePlan:
        """Return the plan to add `counts` tokens to sequences that have `lengths` tokens."""
        end = (lengths + counts + (self.page_size - 1)) // self.page_size
        held = self.end[rows]
        new = int((end - held).sum())
        copied = NO_PLACES
        if self.pages.size and np.count_nonzero(self.pool.shared(self.pages[rows, held - 1])):
            writes = rows[np.minimum(lengths % self.page_size, counts) > 0]  # to its last page
            copied = self._shared((writes, self.end[writes] - 1))
        first = self.first[rows]
        released, freed = NO_PAGES, 0
        if self.window is not None:
            first = np.maximum(first, np.maximum(0, lengths - self.window) // self.page_size)
            released = self.pages[_spread(rows, self.first[rows], first)]
            freed = self.pool.num_freed_by(released)
        return PagePlan(rows, first, end, copied, num_new=new, released=released, num_freed=freed)

    def plan_kept(self, rows: Numbers, kept: Kept) -> tuple[PagePlan, Moves]:
        """Return the plan to keep some tokens of sequences, and the tokens that have to move.

        Tokens only move towards the front. So a token of a held page moves to a held page, or to a
        position before the window, where it is no longer needed.
        """
        first = self.first[rows]
        end = np.maximum(first, -(-kept.lengths // self.page_size))
        released: Pages = self.pages[_spread(rows, end, self.end[rows])]
        which, target = spread(rows, kept.start, kept.counts)
        moved = (kept.positions != target) & (target >= self.first[which] * self.page_size)
        moves = Moves(which[moved], kept.positions[moved], target[moved])
        copied = self._shared(self._columns(moves.rows, moves.target), released)
        freed = self.pool.num_freed_by(released)
        return PagePlan(rows, first, end, copied, released=released, num_freed=freed), moves

    def _columns(self, rows: Numbers, positions: Numbers) -> Places:
        """Return the columns of positions, each once. Positions rise within a row."""
        columns = positions // self.page_size
        new = np.ones(len(columns), np.bool_)
        new[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
        return rows[new], columns[new]

    def _shared(self, written: Places, released: Pages = NO_PAGES) -> Places:
        """Return those of the `written` places whose page must be copied, since others hold it too.

        Holders that are about to release the page, as `released` says, do not count.
        """
        pages: Pages = self.pages[written]
        copied = self.pool.shared(pages)
        if not np.count_nonzero(copied):
            return NO_PLACES
        page, first, times = np.unique(pages, return_index=True, return_counts=True)
        if len(released):
            times += np.bincount(released, minlength=self.pool.num_pages)[page]
        # If all holders are given here, the first one keeps the page and the others copy it.
        copied[first[self.pool.references(page) == times]] = False
        return written[0][copied], written[1][copied]

    def commit(self, plan: PagePlan) -> Copies:
        """Carry a plan out. Return the pages that must be copied before anything is written."""
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

    def plan_new(self, start: int, length: int) -> PagePlan:
        """Return the plan to hold positions `start` to `length` in a row that is added later."""
        first, end = start // self.page_size, -(-length // self.page_size)
        ends = np.array([-1]), np.array([first]), np.array([end])
        return PagePlan(*ends, copied=NO_PLACES, num_new=end - first)

    def adopt(self, row: int, pages: Pages, first: int = 0) -> None:
        """Put pages into an empty row, from column `first` on. Their counts include it already."""
        self.reserve(0, first + len(pages))
        self.first[row], self.end[row] = first, first + len(pages)
        self.pages[row, first : first + len(pages)] = pages

    def fork(self, row: int, into: int) -> None:
        """Let the empty row `into` share the pages of `row`."""
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
        """The slots of positions: page * page_size + the row in the page."""
        column = positions // self.page_size
        page = self.pages[rows, column].astype(np.int64)
        return (page - column) * self.page_size + positions

    def view(self, rows: Numbers) -> Pages:
        """Return the page table of some rows, [rows, columns].

        An entry before the window is the first page that the row holds, so that reading it by
        mistake never shows another sequence.
        """
        columns = int(self.end[rows].max(initial=0))
        table = self.pages[rows, :columns]
        if self.window is not None and columns:
            first = self.first[rows][:, None]
            own = np.take_along_axis(table, np.minimum(first, columns - 1), axis=1)
            table = np.where(np.arange(columns) < first, own, table)
        return np.ascontiguousarray(table)


def _spread(rows: Numbers, start: Numbers, end: Numbers) -> Places:
    """Return an index of the columns from `start` to `end` of each row."""
    return spread(rows, start, np.maximum(0, end - start))


def spread(rows: Numbers, start: Numbers, counts: Numbers) -> Places:
    """Return each row `counts` times, and for each repetition start, start + 1, ..."""
    if np.count_nonzero(counts == 1) == len(counts):
        return rows, start
    before = np.cumsum(counts) - counts
    places = np.arange(int(counts.sum())) - np.repeat(before - start, counts)
    return np.repeat(rows, counts), places


def _enough(wanted: int, there: int) -> int:
    return there if wanted <= there else max(wanted, 2 * there, 8)
