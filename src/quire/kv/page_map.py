"""Who holds which page, as text.

    12 pages of 4 tokens: 5 held by one sequence, 2 shared, 1 kept, 4 free
     0 aab##c+.
     8 bb..

A letter is a sequence, in the order in which sequences were made. # is a page that is held more
than once, + is kept for later prompts, . is free. `quire.draw.pages` draws several maps over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FREE, KEPT, SHARED, OWNED = range(4)
"""The states of a page. OWNED + n means that only sequence n holds it."""

SIGNS = {FREE: ".", KEPT: "+", SHARED: "#"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLUMNS = 64


@dataclass(frozen=True, eq=False)
class PageMap:
    """The state of each page of a pool at one time: `owners` [pages] is FREE, KEPT, SHARED, ...

    `held` has the pages [n] of each sequence, by its number, in the order of positions.
    """

    owners: NDArray[np.int64]
    page_size: int
    held: Mapping[int, NDArray[np.int32]] = field(default_factory=dict)

    def count(self, kind: int) -> int:
        """The number of pages that are FREE, KEPT, SHARED, or OWNED by one sequence."""
        owners = np.minimum(self.owners, OWNED)
        return int((owners == kind).sum())

    @property
    def facts(self) -> str:
        """A line with the number of pages in each state."""
        return (
            f"{len(self.owners)} pages of {self.page_size} tokens: {self.count(OWNED)} held by one "
            f"sequence, {self.count(SHARED)} shared, {self.count(KEPT)} kept, "
            f"{self.count(FREE)} free"
        )

    def __str__(self) -> str:
        signs = "".join(map(_sign, self.owners.tolist()))
        margin = len(str(max(0, len(signs) - 1)))
        rows = [
            f"{at:>{margin}} {signs[at : at + COLUMNS]}" for at in range(0, len(signs), COLUMNS)
        ]
        return "\n".join([self.facts, *rows])


def _sign(owner: int) -> str:
    return SIGNS.get(owner) or LETTERS[(owner - OWNED) % len(LETTERS)]
