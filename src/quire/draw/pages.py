"""The pages of a cache over time, as a picture: a column for each map, a row for each page.

    maps.append(cache.page_map())            # after each step
    draw_pages(maps, path="pages.svg")

Sequences take four colours in turn, so that neighbours differ. Shared, kept and free pages have
other colours. If there are too many steps or pages, some of them are shown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.block_mask.blocks import ceil_div
from quire.draw.base import Drawing
from quire.draw.survey import Kinds, Pair
from quire.errors import ArgumentError
from quire.kv.page_map import FREE, KEPT, OWNED, SHARED, PageMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_pages"]

MOST = 1024  # the largest number of rows and of columns
LARGEST = 24  # the largest size of a cell in dots

COLOURS = {
    FREE: "#eef0f3",
    KEPT: "#c4cad2",
    SHARED: "#181c23",
    OWNED: "#205493",
    OWNED + 1: "#f0a63c",
    OWNED + 2: "#54aabe",
    OWNED + 3: "#963c6e",
}
NUM_COLOURS = len(COLOURS) - OWNED  # for sequences
SEQUENCES = range(OWNED, OWNED + NUM_COLOURS)
MEANINGS = {"sequences, in turn": SEQUENCES, "shared": [SHARED], "kept": [KEPT], "free": [FREE]}


@dataclass(frozen=True, eq=False, repr=False)
class PageDrawing(Drawing):
    """A drawing of page maps: the last one as text, all of them as a picture."""

    maps: Sequence[PageMap]

    def __str__(self) -> str:
        return str(self.maps[-1])

    def kinds(self) -> Kinds:
        """Return the state of each page after each step, a key of COLOURS: [pages, steps]."""
        num_pages = max(len(each.owners) for each in self.maps)
        owners = np.full((num_pages, len(self.maps)), FREE, np.int64)
        for step, each in enumerate(self.maps):
            owners[: len(each.owners), step] = each.owners
        turn = OWNED + (owners - OWNED) % NUM_COLOURS
        return np.where(owners >= OWNED, turn, owners).astype(np.uint8)

    def _figure(self) -> Figure:
        from quire.draw.picture import SIDE, legend, paint, sheet, whole_dots

        kinds = self.kinds()
        lengths: Pair = kinds.shape
        step = ceil_div(lengths[0], MOST), ceil_div(lengths[1], MOST)
        pixels = whole_dots(lengths, step, (SIDE, SIDE), LARGEST)
        about = "pages over time", f"{len(self.maps)} steps; at the end {self.maps[-1].facts}"
        figure, axes = sheet(*about, lengths, pixels, ("pages", "steps"), lines=1)
        paint(axes, kinds[:: step[0], :: step[1]], step, COLOURS)
        legend(axes, {word: [COLOURS[each] for each in of] for word, of in MEANINGS.items()})
        return figure


def draw_pages(
    maps: Sequence[PageMap], *, path: str | os.PathLike[str] | None = None
) -> PageDrawing:
    """Draw page maps, which follow each other in time, as a picture."""
    if not maps or not all(isinstance(each, PageMap) and len(each.owners) for each in maps[-1:]):
        raise ArgumentError(
            "maps must be page maps, the last one with pages, but are not. Make them with "
            "cache.page_map()."
        )
    drawing = PageDrawing(list(maps))
    if path is not None:
        drawing.save(path)
    return drawing
