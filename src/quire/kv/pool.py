"""A pool of numbered pages with a count of holders for each. A page without holders is free.

    pool = PagePool(1024)
    pages = pool.allocate(4)      # 0 1 2 3, held once each
    pool.share(pages[:2])         # 0 and 1 are held twice
    pool.release(pages)           # gives back 2 and 3; 0 and 1 are held once

The pool only counts. It has no tensors and does not know what a page contains. All calls take many
pages at once and check everything first, so a call that raises leaves the pool as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.errors import OutOfPages, PageError

Pages: TypeAlias = NDArray[np.int32]
"""Ids of pages."""

NO_PAGES: Pages = np.zeros(0, np.int32)


class PagePool:
    """Pages 0 to num_pages - 1, each with a count of how often it is held.

    Methods take the ids of pages: `pages` [n] and `held` [n] are arrays or lists.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise PageError(f"num_pages must be at least 0, but is {num_pages}. Give 0 or more.")
        self._counts: Pages = np.zeros(num_pages, np.int32)
        # A stack: _free[:_num_free] are the free pages. The last one is allocated next.
        self._free: Pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self._num_free = num_pages
        self._place: Pages = np.zeros(num_pages, np.int32)  # working memory of `_tally`

    def __repr__(self) -> str:
        return f"PagePool({self.num_pages} pages, {self.num_free} free, {self.num_shared} shared)"

    @property
    def num_pages(self) -> int:
        """The number of pages."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """The number of pages that nobody holds."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """The number of pages that somebody holds."""
        return self.num_pages - self._num_free

    @property
    def num_shared(self) -> int:
        """The number of pages that are held more than once."""
        return int((self._counts > 1).sum())

    @property
    def free_pages(self) -> Pages:
        """The pages that nobody holds, in no order."""
        return self._free[: self._num_free].copy()

    def references(self, pages: Pages | Sequence[int]) -> Pages:
        """Return how often each of `pages` is held."""
        return self._counts[self._checked(pages)]

    def shared(self, pages: Pages) -> NDArray[np.bool_]:
        """Return which of `pages` are held more than once. Their ids are not checked."""
        more: NDArray[np.bool_] = self._counts[pages] > 1
        return more

    def num_freed_by(self, pages: Pages) -> int:
        """The number of pages that would become free if `pages` were released."""
        if not len(pages):
            return 0
        held, times = self._tally(pages)
        return int((self._counts[held] == times).sum())

    def allocate(self, count: int) -> Pages:
        """Return `count` free pages, which are then held once each."""
        if count < 0:
            raise PageError(f"count must be at least 0, but is {count}. Give 0 or more.")
        if count > self._num_free:
            raise OutOfPages(
                f"count must be at most {self._num_free}, as so many of {self.num_pages} pages are "
                f"free, but is {count}. Release some, or make the pool larger."
            )
        left = self._num_free - count
        pages: Pages = self._free[left : self._num_free][::-1].copy()
        self._num_free = left
        self._counts[pages] = 1
        return pages

    def share(self, pages: Pages | Sequence[int]) -> None:
        """Hold each page once more, or twice more if it is given twice."""
        held, times = self._tally(pages)
        self._counts[held] += times

    def release(self, pages: Pages | Sequence[int]) -> Pages:
        """Hold each page once less. Return the pages that become free."""
        if not len(pages):  # common: a draft that is dropped often fills no page
            return NO_PAGES
        held, times = self._tally(pages)
        counts = self._counts[held] - times
        if np.count_nonzero(counts < 0):
            raise PageError(
                f"pages must be released only as often as they are held, but page "
                f"{held[counts.argmin()]} is released more often. Release what you hold, once."
            )
        self._counts[held] = counts
        freed: Pages = held[counts == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)
        return freed

    def grow(self, num_pages: int) -> None:
        """Add free pages until there are `num_pages`."""
        more = num_pages - self.num_pages
        if more < 0:
            raise PageError(
                f"num_pages must be at least {self.num_pages}, since a pool only grows, but is "
                f"{num_pages}. Make a new pool."
            )
        new = np.arange(self.num_pages, num_pages, dtype=np.int32)[::-1]
        free, rest = np.split(self._free, [self._num_free])
        self._free = np.concatenate([new, free, rest])  # old pages are taken first
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int32)])
        self._place = np.zeros(num_pages, np.int32)
        self._num_free += more

    def check_integrity(self, held: Pages | Sequence[int] | None = None) -> None:
        """Raise PageError unless each page is either held, or listed once as free.

        With `held`, which lists the pages of all holders, also raise if a count is not the number
        of times that its page is listed.
        """
        free = self._free[: self._num_free]
        _expect(self._num_free >= 0, "the number of free pages is negative")
        _expect(len(self._free) == self.num_pages, "the list of free pages has another length")
        _expect(bool((self._counts >= 0).all()), "a count is negative")
        _expect(
            bool((np.bincount(free, minlength=self.num_pages) <= 1).all()), "a page is free twice"
        )
        _expect(bool((self._counts[free] == 0).all()), "a page is free and held")
        used = np.count_nonzero(self._counts)
        _expect(used == self.num_used, f"{self.num_used - used} pages are lost")
        if held is not None:
            true = np.bincount(np.asarray(held, np.int64), minlength=self.num_pages)
            wrong = np.flatnonzero(true != self._counts)
            _expect(
                len(wrong) == 0,
                f"pages {wrong[:5].tolist()} are held {true[wrong[:5]].tolist()} times and counted "
                f"{self._counts[wrong[:5]].tolist()} times",
            )

    def _checked(self, pages: Pages | Sequence[int]) -> Pages:
        ids: Pages = np.asarray(pages, np.int32)
        # As unsigned numbers, negative ones are the largest.
        if ids.size and ids.view(np.uint32).max() >= self.num_pages:
            wrong = ids[(ids < 0) | (ids >= self.num_pages)][0]
            raise PageError(
                f"pages must be from 0 to {self.num_pages - 1}, but one is {wrong}. Give pages "
                f"that allocate has returned."
            )
        return ids

    def _held(self, pages: Pages | Sequence[int]) -> Pages:
        ids = self._checked(pages)
        if np.count_nonzero(self._counts[ids]) < ids.size:
            free = ids[self._counts[ids] == 0][0]
            raise PageError(
                f"pages must be held, but page {free} is free. Give pages that you hold."
            )
        return ids

    def _tally(self, pages: Pages | Sequence[int]) -> tuple[Pages, Pages]:
        """Return the distinct pages, and how often each is given."""
        ids = self._held(pages)
        # Write the place of each entry to its page. If every entry reads its own place back, no
        # page is given twice, and nothing has to be sorted.
        places = np.arange(len(ids), dtype=np.int32)
        self._place[ids] = places
        if not np.count_nonzero(self._place[ids] != places):
            return ids, np.ones(len(ids), np.int32)
        named, times = np.unique(ids, return_counts=True)
        return named, times.astype(np.int32)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PageError(f"each page must be free or held, but {otherwise}. Report this bug.")
