"""The pages of a cache over time, as a picture: a column for each map, a row for each page.

    maps.append(cache.page_map())            # after each step
    draw_pages(maps, path="pages.svg")

Sequences take turns in four colours, so that neighbours differ; shared, kept and free pages have
their own. Long runs show some of the steps and some of the pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.draw.drawing import save_picture
from quire.draw.png import write_png
from quire.draw.sheet import (
    INK,
    LARGE,
    LEFT,
    MARGIN,
    MEDIUM,
    QUIET,
    RESOLUTION,
    SIDE,
    SMALL,
    THIN,
    TOP,
    Axis,
    Box,
    Colour,
    Label,
    frame,
    numbers,
)
from quire.draw.strokes import text_width
from quire.draw.subject import Kinds
from quire.draw.svg import write_svg
from quire.errors import ArgumentError
from quire.kv.page_map import FREE, KEPT, OWNED, SHARED, PageMap

NUM_COLOURS = 4  # for sequences
LARGEST = 24  # dots of a cell
BELOW = 60

COLOURS: dict[int, Colour] = {
    FREE: (238, 240, 243),
    KEPT: (196, 202, 210),
    SHARED: (24, 28, 35),
    OWNED: (32, 84, 147),
    OWNED + 1: (240, 166, 60),
    OWNED + 2: (84, 170, 190),
    OWNED + 3: (150, 60, 110),
}
WORDS = {OWNED: "sequences, in turn", SHARED: "shared", KEPT: "kept", FREE: "free"}


class PageSheet:
    """A picture of page maps, laid out."""

    colours = COLOURS

    def __init__(self, maps: Sequence[PageMap]) -> None:
        num_pages = max(len(each.owners) for each in maps)
        owners = np.full((num_pages, len(maps)), FREE, np.int64)
        for step, each in enumerate(maps):
            owners[: len(each.owners), step] = each.owners
        turn = OWNED + (owners - OWNED) % NUM_COLOURS
        kinds = np.where(owners >= OWNED, turn, owners).astype(np.uint8)
        folds = [-(-count // (SIDE * RESOLUTION)) for count in kinds.shape]
        self.kinds: Kinds = kinds[:: folds[0], :: folds[1]]
        self.q, self.kv = (
            Axis(length, fold, min(LARGEST, max(1, SIDE * RESOLUTION // count)))
            for length, fold, count in zip(kinds.shape, folds, self.kinds.shape, strict=True)
        )
        self.title = "pages over time"
        self.facts = f"{len(maps)} steps; at the end {maps[-1].facts}"
        inner = max(LEFT - MARGIN + self.kv.side, text_width(self.facts, MEDIUM))
        self.width, self.height = round(2 * MARGIN + inner), round(TOP + self.q.side + BELOW)

    def boxes(self) -> list[Box]:
        """Everything but cells and words, in the order of drawing."""
        return [*frame(self.q, self.kv), *self._swatches()]

    def labels(self) -> Iterator[Label]:
        """All words."""
        yield Label(MARGIN, 42, self.title, LARGE, INK, bold=True)
        yield Label(MARGIN, 66, self.facts, MEDIUM)
        yield Label(LEFT, TOP - 30, "steps", MEDIUM, INK)
        yield Label(LEFT - 12, TOP + 4, "pages", MEDIUM, INK, "end")
        yield from numbers(self.q, self.kv)
        for x, kinds, word in self._legend():
            yield Label(x + 14 * len(kinds) + 4, TOP + self.q.side + 31, word, SMALL)

    def _legend(self) -> Iterator[tuple[float, list[int], str]]:
        x = float(LEFT)
        for kind, word in WORDS.items():
            kinds = list(range(OWNED, OWNED + NUM_COLOURS)) if kind == OWNED else [kind]
            yield x, kinds, word
            x += 14 * len(kinds) + 4 + text_width(word, SMALL) + 20

    def _swatches(self) -> Iterator[Box]:
        y = TOP + self.q.side + 21
        for x, kinds, _ in self._legend():
            for place, kind in enumerate(kinds):
                left = x + 14 * place
                yield Box(left - THIN, y - THIN, 11 + 2 * THIN, 11 + 2 * THIN, QUIET)
                yield Box(left, y, 11, 11, COLOURS[kind])


@dataclass(frozen=True, eq=False)
class PageDrawing:
    """Page maps, the last as text when it is printed, all as a picture when it is saved."""

    maps: Sequence[PageMap]

    def __str__(self) -> str:
        return str(self.maps[-1])

    def svg(self) -> str:
        """The picture as SVG."""
        return write_svg(PageSheet(self.maps))

    def png(self) -> bytes:
        """The picture as PNG."""
        return write_png(PageSheet(self.maps))

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self.png()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file whose name ends in .png or .svg."""
        save_picture(PageSheet(self.maps), path, "pages")


def draw_pages(
    maps: Sequence[PageMap], *, path: str | os.PathLike[str] | None = None
) -> PageDrawing:
    """Page maps, one after the other in time, as a picture."""
    if not maps or not all(isinstance(each, PageMap) and len(each.owners) for each in maps[-1:]):
        raise ArgumentError(
            "expected page maps of a cache that holds something at the end, got none. "
            "cache.page_map() makes one."
        )
    drawing = PageDrawing(list(maps))
    if path is not None:
        drawing.save(path)
    return drawing
