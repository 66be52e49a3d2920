"""Pages by number: who allocates one holds it, who shares it holds it too, the others are free.

    pool = PagePool(1024)
    pages = pool.allocate(4)      # 0 1 2 3, held once each
    pool.share(pages[:2])         # 0 and 1 are held twice
    pool.release(pages)           # gives back 2 and 3; 0 and 1 are held once

In: numbers of pages, and arrays of their ids. Out: arrays of ids. There is no memory here and no
torch; what lies in a page is the business of whoever holds it. All calls take many pages at once,
check everything first, and leave the pool as it was if they refuse.
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
    """A number of pages, each with a count of how often it is held."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise PageError(f"expected a number of pages, got {num_pages}. Give 0 or more.")
        self._counts: Pages = np.zeros(num_pages, np.int32)
        # A stack: _free[:_num_free] are the free pages, the next one last.
        self._free: Pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self._num_free = num_pages
        self._place: Pages = np.zeros(num_pages, np.int32)  # what it holds means nothing

    def __repr__(self) -> str:
        return f"PagePool({self.num_pages} pages, {self.num_free} free, {self.num_shared} shared)"

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """How many of them nobody holds."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """How many of them somebody holds."""
        return self.num_pages - self._num_free

    @property
    def num_shared(self) -> int:
        """How many of them are held more than once."""
        return int((self._counts > 1).sum())

    @property
    def free_pages(self) -> Pages:
        """The pages that nobody holds, in no order."""
        return self._free[: self._num_free].copy()

    def references(self, pages: Pages | Sequence[int]) -> Pages:
        """How often each of some pages is held."""
        return self._counts[self._checked(pages)]

    def shared(self, pages: Pages) -> NDArray[np.bool_]:
        """Which pages are held more than once. These are the caller's own, and not checked."""
        more: NDArray[np.bool_] = self._counts[pages] > 1
        return more

    def num_freed_by(self, pages: Pages) -> int:
        """How many pages would become free if these were released."""
        if not len(pages):
            return 0
        held, times = self._tally(pages)
        return int((self._counts[held] == times).sum())

    def allocate(self, count: int) -> Pages:
        """Free pages, held once from now on."""
        if count < 0:
            raise PageError(f"expected a number of pages, got {count}. Give 0 or more.")
        if count > self._num_free:
            raise OutOfPages(
                f"expected at most {self._num_free} pages, which are free of {self.num_pages}, got "
                f"a request for {count}. Release some, or make the pool larger."
            )
        left = self._num_free - count
        pages: Pages = self._free[left : self._num_free][::-1].copy()
        self._num_free = left
        self._counts[pages] = 1
        return pages

    def share(self, pages: Pages | Sequence[int]) -> None:
        """Hold pages once more; one that is named twice, twice."""
        held, times = self._tally(pages)
        self._counts[held] += times

    def release(self, pages: Pages | Sequence[int]) -> Pages:
        """Hold pages once less; returns those that have become free."""
        if not len(pages):  # as where a draft is cut off within a page
            return NO_PAGES
        held, times = self._tally(pages)
        counts = self._counts[held] - times
        if np.count_nonzero(counts < 0):
            raise PageError(
                f"expected pages to be released as often as they are held, got page "
                f"{held[counts.argmin()]} more often. Release what you hold, once."
            )
        self._counts[held] = counts
        freed: Pages = held[counts == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)
        return freed

    def grow(self, num_pages: int) -> None:
        """Add free pages, until there are `num_pages`."""
        more = num_pages - self.num_pages
        if more < 0:
            raise PageError(
                f"expected at least {self.num_pages} pages, got {num_pages}. A pool only grows."
            )
        new = np.arange(self.num_pages, num_pages, dtype=np.int32)[::-1]
        free, rest = np.split(self._free, [self._num_free])
        self._free = np.concatenate([new, free, rest])  # old pages are taken first
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int32)])
        self._place = np.zeros(num_pages, np.int32)
        self._num_free += more

    def check_integrity(self, held: Pages | Sequence[int] | None = None) -> None:
        """A PageError unless each page is either free, once, or held.

        With `held`, the ids of all pages that anybody holds, as often as they do, each count has
        to be the true one.
        """
        free = self._free[: self._num_free]
        _expect(self._num_free >= 0, "fewer than no pages are free")
        _expect(len(self._free) == self.num_pages, "the list of free pages has another length")
        _expect(bool((self._counts >= 0).all()), "a page is held less than never")
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
            raise PageError(f"expected pages from 0 to {self.num_pages - 1}, got {wrong}.")
        return ids

    def _held(self, pages: Pages | Sequence[int]) -> Pages:
        ids = self._checked(pages)
        if np.count_nonzero(self._counts[ids]) < ids.size:
            free = ids[self._counts[ids] == 0][0]
            raise PageError(f"expected pages that are held, got page {free}, which is free.")
        return ids

    def _tally(self, pages: Pages | Sequence[int]) -> tuple[Pages, Pages]:
        """Each of some pages once, and how often it was named."""
        ids = self._held(pages)
        # Each is told its place; if all remember theirs, none was told two. That saves a sort.
        places = np.arange(len(ids), dtype=np.int32)
        self._place[ids] = places
        if not np.count_nonzero(self._place[ids] != places):
            return ids, np.ones(len(ids), np.int32)
        named, times = np.unique(ids, return_counts=True)
        return named, times.astype(np.int32)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PageError(f"expected each page to be free or held, but {otherwise}: a bug.")
