"""The layout of a picture: where cells, lines and words stand. Whoever writes a file reads it off.

    name
    1,024 queries x 1,024 keys in blocks of 128, sparsity 43.8 %

            keys
            0     512   1024
    queries ┌──────────────┐
        512 │              │
       1024 └──────────────┘
            ■ full  ■ partial  ■ empty

Lengths are in pixels; a PNG has RESOLUTION dots in each, and cells are whole numbers of dots wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol, TypeAlias

from quire.block_mask.lists import EMPTY, FULL, PARTIAL
from quire.draw.scale import scale
from quire.draw.strokes import text_width
from quire.draw.subject import Kinds, Pair, Subject
from quire.draw.text import cell_size, facts, words

Colour: TypeAlias = tuple[int, int, int]
Anchor: TypeAlias = Literal["start", "middle", "end"]

RESOLUTION = 2
THIN = 1 / RESOLUTION
SIDE, LEAST_SIDE = 512, 24  # of the drawing: along its longer axis, and along the other
MARGIN, LEFT, TOP, BELOW = 28, 92, 132, 72  # around it
LARGE, MEDIUM, SMALL = 20, 13, 12  # of words
LARGEST, LINES_FROM = 80, 6  # dots: of a cell, and of one that has lines around it

# Told apart by those who see no red, no green or no blue, and in shades of grey.
COLOURS: dict[int, Colour] = {EMPTY: (238, 240, 243), PARTIAL: (240, 166, 60), FULL: (32, 84, 147)}
PAPER, INK, QUIET = (255, 255, 255), (24, 28, 35), (98, 106, 118)


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: Colour


class Label(NamedTuple):
    """Words that start, end or have their middle at x, and stand on y."""

    x: float
    y: float
    text: str
    size: float
    colour: Colour = QUIET
    anchor: Anchor = "start"
    bold: bool = False


class Axis(NamedTuple):
    """The queries or the keys along a side of the drawing."""

    length: int  # in tokens
    step: int  # tokens in a cell
    dots: int  # of a cell

    @property
    def side(self) -> float:
        """How long it is: a last cell that is short is drawn short."""
        return self.place(self.length)

    def place(self, token: int) -> float:
        """How far from the start a token is."""
        return max(round(token / self.step * self.dots), min(token, 1)) / RESOLUTION

    def edges(self, size: int) -> list[float]:
        """Where blocks of `size` tokens meet."""
        return [self.place(token) for token in range(size, self.length, size)]

    def is_fine(self, size: int) -> bool:
        """Whether blocks of `size` tokens are too small to have lines between them."""
        return size * self.dots < LINES_FROM * self.step

    def numbers(self, room: float) -> list[tuple[float, str]]:
        """The places and texts of numbers along it, so many that each has `room`."""
        most = max(1, min(5, int(self.side / room)))
        return [(self.place(at), text) for at, text in scale(self.length, most).labels]


class Picture(Protocol):
    """What is read off a layout: cells of some kinds between two axes, and what stands around."""

    title: str
    facts: str
    width: int
    height: int
    q: Axis  # down
    kv: Axis  # to the right
    colours: dict[int, Colour]

    @property
    def kinds(self) -> Kinds:
        """The kind of each cell, a key of `colours`."""

    def boxes(self) -> list[Box]:
        """Everything but cells and words, in the order of drawing."""

    def labels(self) -> Iterator[Label]:
        """All words."""


class Sheet:
    """A picture of a subject, laid out."""

    colours = COLOURS

    def __init__(self, subject: Subject) -> None:
        sides = _sides(subject.lengths)
        self.subject, self.cells = subject, subject.cells(sides)
        counts = self.cells.kinds.shape
        self.q, self.kv = (
            Axis(length, step, min(LARGEST, max(1, side * RESOLUTION // count)))
            for length, step, side, count in zip(
                subject.lengths, self.cells.step, sides, counts, strict=True
            )
        )
        self.facts = facts(subject, self.cells)
        inner = max(LEFT - MARGIN + self.kv.side, text_width(self.facts, MEDIUM))
        self.width, self.height = round(2 * MARGIN + inner), round(TOP + self.q.side + BELOW)
        self.title = _shortened(subject.name, LARGE, inner)

    @property
    def kinds(self) -> Kinds:
        """EMPTY, PARTIAL or FULL."""
        return self.cells.kinds

    def boxes(self) -> list[Box]:
        """Everything but cells and words, in the order of drawing."""
        return [*self._lines(), *frame(self.q, self.kv), *self._swatches()]

    def labels(self) -> Iterator[Label]:
        """All words."""
        yield Label(MARGIN, 42, self.title, LARGE, INK, bold=True)
        yield Label(MARGIN, 66, self.facts, MEDIUM)
        yield Label(LEFT, TOP - 30, "keys", MEDIUM, INK)
        yield Label(LEFT - 12, TOP + 4, "queries", MEDIUM, INK, "end")
        yield from numbers(self.q, self.kv)
        below = TOP + self.q.side
        for x, _, word in self._legend():
            yield Label(x + 18, below + 31, word, SMALL)
        if size := cell_size(self.subject, self.cells):
            yield Label(LEFT, below + 52, size, SMALL)

    def _legend(self) -> list[tuple[float, int, str]]:
        """Where each kind is explained, and how."""
        found, x = [], float(LEFT)
        for kind, word in words(self.subject, self.cells).items():
            found.append((x, kind, word))
            x += 18 + text_width(word, SMALL) + 24
        return found

    def _swatches(self) -> Iterator[Box]:
        for x, kind, _ in self._legend():
            y = TOP + self.q.side + 21
            yield Box(x - THIN, y - THIN, 11 + 2 * THIN, 11 + 2 * THIN, QUIET)
            yield Box(x, y, 11, 11, COLOURS[kind])

    def _lines(self) -> Iterator[Box]:
        """Between cells, light; between the blocks of single elements, dark."""
        yield from self._grid(self.cells.step, PAPER)
        if self.subject.elementwise:
            yield from self._grid(self.subject.outline, QUIET)

    def _grid(self, size: Pair, colour: Colour) -> Iterator[Box]:
        if self.q.is_fine(size[0]) or self.kv.is_fine(size[1]):
            return
        for y in self.q.edges(size[0]):
            yield Box(LEFT, TOP + y - THIN, self.kv.side, THIN, colour)
        for x in self.kv.edges(size[1]):
            yield Box(LEFT + x - THIN, TOP, THIN, self.q.side, colour)


def frame(q: Axis, kv: Axis) -> Iterator[Box]:
    """Lines around the cells, and ticks where numbers stand."""
    for y in (TOP - THIN, TOP + q.side):
        yield Box(LEFT - THIN, y, kv.side + 2 * THIN, THIN, QUIET)
    for x in (LEFT - THIN, LEFT + kv.side):
        yield Box(x, TOP, THIN, q.side, QUIET)
    for x, _ in kv.numbers(room=40):
        yield Box(LEFT + x - THIN * (x == 0), TOP - 5, THIN, 5, QUIET)
    for y, _ in q.numbers(room=40):
        yield Box(LEFT - 5, TOP + y - THIN * (y == 0), 5, THIN, QUIET)


def numbers(q: Axis, kv: Axis) -> Iterator[Label]:
    """The numbers along both axes."""
    for x, text in kv.numbers(room=40):
        yield Label(LEFT + x, TOP - 10, text, SMALL, anchor="middle")
    for y, text in q.numbers(room=40)[1:]:
        yield Label(LEFT - 12, TOP + y + 4, text, SMALL, anchor="end")


def _sides(lengths: Pair) -> Pair:
    """How long the two sides may be, in the proportion of the lengths unless that is too flat."""
    longest = max(lengths)
    q_side, kv_side = (max(LEAST_SIDE, SIDE * length // longest) for length in lengths)
    return q_side, kv_side


def _shortened(text: str, size: float, room: float) -> str:
    """As much of a text as fits."""
    if text_width(text, size) <= room:
        return text
    while text and text_width(text + "…", size) > room:
        text = text[:-1]
    return text + "…"
