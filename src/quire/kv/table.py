"""Which pages the sequences of a cache hold, in order: one table for each group of layers.

    page size 4                columns   0   1   2   3
    sequence in row 0, 9 tokens          5   2   7   .      position 6 is row 2 of page 2
    sequence in row 1, 14 tokens         ~   ~   0   3      a window of 4 has released two pages
                                         └─ first ─┘└─ end

Row r holds the pages of columns first[r] to end[r] - 1, each once in the pool's count. Lengths are
the cache's, which is why they come as arguments. `plan` says what an extension takes and changes
nothing; `commit` does it and cannot fail once the pages are there. No torch here.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.kv.pool import NO_PAGES, PagePool, Pages

Numbers: TypeAlias = NDArray[np.int64]
"""Rows, lengths or counts, one for each sequence."""


class Plan(NamedTuple):
    """What it takes to extend some sequences."""

    rows: Numbers
    first: Numbers  # the first column that the window still reaches, for each row
    end: Numbers  # one past the last column, for each row
    copied: Numbers  # rows whose last page others hold too: it is written to, so it is copied
    num_pages: int
    released: Pages  # behind the window
    num_freed: int  # of these

    @property
    def shortage(self) -> int:
        """How many pages must be free before it starts."""
        return self.num_pages - self.num_freed


class Copies(NamedTuple):
    """Pages whose content goes to others."""

    source: Pages
    target: Pages


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
        copied = self._shared(writes)
        first = self.first[rows]
        released, freed = NO_PAGES, 0
        if self.window is not None:
            first = np.maximum(first, np.maximum(0, lengths - self.window) // self.page_size)
            released = self.pages[_spread(rows, self.first[rows], first)]
            freed = self.pool.num_freed_by(released)
        return Plan(rows, first, end, copied, new + len(copied), released, freed)

    def _shared(self, rows: Numbers) -> Numbers:
        """Those that must not write to their last page, since somebody else would see it."""
        last: Pages = self.pages[rows, self.end[rows] - 1]
        copied = self.pool.shared(last)
        if not np.count_nonzero(copied):
            return rows[:0]
        page, first, times = np.unique(last, return_index=True, return_counts=True)
        copied[first[self.pool.references(page) == times]] = False  # the last holder may keep it
        return rows[copied]

    def commit(self, plan: Plan) -> Copies:
        """Extend; returns what has to be copied before anything is written."""
        if len(plan.released):
            self.pool.release(plan.released)
        self.first[plan.rows] = plan.first
        self.end[plan.rows] = np.maximum(plan.first, self.end[plan.rows])
        if not plan.num_pages:
            return Copies(NO_PAGES, NO_PAGES)
        pages = self.pool.allocate(plan.num_pages)
        copies, new = np.split(pages, [len(plan.copied)])
        self.reserve(0, int(plan.end.max(initial=0)))
        source = NO_PAGES
        if len(copies):
            last = plan.copied, self.end[plan.copied] - 1
            source = self.pages[last]
            self.pages[last] = copies
            self.pool.release(source)
        if len(new):
            self.pages[_spread(plan.rows, self.end[plan.rows], plan.end)] = new
            self.end[plan.rows] = plan.end
        return Copies(source, copies)

    def plan_new(self, start: int, length: int) -> Plan:
        """What it takes to have the positions from `start` to `length` in a row without pages."""
        first, end = start // self.page_size, -(-length // self.page_size)
        none, at = np.zeros(0, np.int64), np.array([-1])
        return Plan(at, np.array([first]), np.array([end]), none, end - first, NO_PAGES, 0)

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


def _spread(rows: Numbers, start: Numbers, end: Numbers) -> tuple[Numbers, Numbers]:
    """Index of the columns from `start` to `end` of each row, one after the other."""
    return spread(rows, start, np.maximum(0, end - start))


def spread(rows: Numbers, start: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Each row `counts` times, and beside it start, start + 1, ..."""
    if np.count_nonzero(counts == 1) == len(counts):
        return rows, start
    before = np.cumsum(counts) - counts
    places = np.arange(int(counts.sum())) - np.repeat(before - start, counts)
    return np.repeat(rows, counts), places


def _enough(wanted: int, there: int) -> int:
    return there if wanted <= there else max(wanted, 2 * there, 8)
