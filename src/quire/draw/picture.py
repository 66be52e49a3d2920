"""Pictures with matplotlib: cells in colours, with numbers along two axes.

    name
    1,024 queries x 1,024 keys in blocks of 128, sparsity 43.8 %

            keys
            0     512   1024
    queries ┌──────────────┐
        512 │              │
       1024 └──────────────┘
            ■ full  ■ partial  ■ empty

Lengths are in pixels of 1/96 inch. A PNG has RESOLUTION dots per pixel, and cells are whole numbers
of dots wide. Figures do not use pyplot and its state, so a drawing is always the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.block_mask.blocks import EMPTY, FULL, PARTIAL, ceil_div
from quire.draw.scale import scale
from quire.draw.scores import HeatMap, Values
from quire.draw.subject import Subject
from quire.draw.survey import Kinds, Pair
from quire.draw.text import cell_size, facts, sample, score_facts, words
from quire.errors import MissingPackageError
from quire.support.locks import lock

try:
    import matplotlib
    from matplotlib import cm, colors, offsetbox, patches
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path
    from matplotlib.textpath import text_to_path
except ModuleNotFoundError as missing:
    raise MissingPackageError(
        f"matplotlib must be installed to make pictures, but importing it raises: {missing}. "
        f"Install it: pip install 'quire[draw]'. Printing a drawing as text does not need it."
    ) from missing

Pixels: TypeAlias = tuple[float, float]
"""The lengths of the two sides of all cells together."""

RESOLUTION = 2
POINT = 0.75  # of a pixel
THIN = POINT / RESOLUTION
SIDE, LEAST_SIDE = 512, 24  # of all cells: the longer side, and the least for the other
MARGIN, LEFT, TOP, BELOW, LINE = 28, 92, 124, 56, 22  # space around cells, and of a line of text
LARGE, MEDIUM, SMALL = 18, 12.5, 11.5  # sizes of text
LARGEST, LINES_FROM = 80, 6  # dots: the largest cell, and the least one with lines around it

PAPER, INK, QUIET = "#ffffff", "#181c23", "#626a76"
# People with colour blindness can tell these apart, and they differ in shades of grey.
COLOURS = {EMPTY: "#eef0f3", PARTIAL: "#f0a63c", FULL: "#205493"}
LOWERED = ("#7f3b08", "#b35806", "#e08214", "#fdb863", "#fee0b6")
RAISED = ("#d1e5f0", "#92c5de", "#4393c3", "#2166ac", "#053061")
HEAT = colors.LinearSegmentedColormap.from_list("quire", (*LOWERED, "#f7f7f7", *RAISED))
SPECIAL = {"-inf": "#bcc2cb", "inf": "#181c23", "nan": "#c2185b"}

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "quire",
    "text.parse_math": False,
    "text.color": INK,
    "font.size": SMALL * POINT,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # similar widths, for viewers of SVG
    "axes.edgecolor": QUIET,
    "axes.linewidth": THIN,
    "axes.labelcolor": INK,
    "axes.labelsize": MEDIUM * POINT,
    **{f"{axis}tick.color": QUIET for axis in "xy"},
    **{f"{axis}tick.major.width": THIN for axis in "xy"},
}


_rendering = lock()  # all threads share matplotlib's settings


def rendered(figure: Callable[[], Figure], kind: str) -> bytes:
    """Return the content of a png or svg file. The user's settings of matplotlib are ignored."""
    file = io.BytesIO()
    with _rendering, matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        made = figure()
        title = ": ".join(text.get_text() for text in made.texts)
        absent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        metadata = {"Software": None} if kind == "png" else {"Title": title, **absent}
        made.savefig(file, format=kind, dpi=96 * RESOLUTION, metadata=metadata)
    return file.getvalue()


def mask_figure(subject: Subject) -> Figure:
    """Return a picture of a mask."""
    cells = subject.cells(room := most_pixels(subject.lengths))
    pixels = whole_dots(subject.lengths, cells.step, room)
    note = cell_size(subject, cells)
    about = subject.name, facts(subject, cells)
    figure, axes = sheet(*about, subject.lengths, pixels, lines=1 + bool(note))
    paint(axes, cells.kinds, cells.step, COLOURS)
    _lines(axes, subject.lengths, pixels, cells.step, PAPER)
    if subject.elementwise:
        _lines(axes, subject.lengths, pixels, subject.outline, QUIET)
    legend(axes, {word: [COLOURS[kind]] for kind, word in words(subject, cells).items()}, note)
    return figure


def score_figure(scores: HeatMap) -> Figure:
    """Return a heat map of a score mod: orange is below the given score, blue is above it."""
    found = scores.cells(room := most_pixels(scores.lengths))
    pixels = whole_dots(scores.lengths, found.step, room)
    note, special = sample(scores, found), found.special()
    about, lines = (scores.name, score_facts(scores, found)), bool(note) + bool(special)
    figure, axes = sheet(*about, scores.lengths, pixels, lines=lines, right=76)
    rows, columns = found.values.shape
    heat = _heat(found, scores.middle)
    dots = heat.to_rgba(np.nan_to_num(found.values, posinf=0, neginf=0), bytes=True)
    for name, where in special.items():
        dots[where] = colors.to_rgba_array(SPECIAL[name]) * 255
    extent = (0, columns * found.step[1], rows * found.step[0], 0)
    axes.imshow(dots, extent=extent, aspect="auto", interpolation="none")
    axes.set(xlim=(0, scores.lengths[1]), ylim=(scores.lengths[0], 0))  # may cut the last cell
    bar = axes.inset_axes((1 + 18 / pixels[1], 0, 12 / pixels[1], 1))
    figure.colorbar(heat, cax=bar).outline.set_visible(False)
    if found.ends is not None and found.ends.low < found.ends.high:
        bar.set_ylim(*found.ends)
    legend(axes, {name: [SPECIAL[name]] for name in special}, note)
    return figure


def _heat(found: Values, score: float) -> cm.ScalarMappable:
    """Return a scale of colours whose middle is the given score."""
    middle = score if np.isfinite(score) else 0
    low, high = found.ends or (middle, middle)
    reach = max(high - middle, middle - low) or 1
    return cm.ScalarMappable(colors.Normalize(middle - reach, middle + reach), HEAT)


def most_pixels(lengths: Pair) -> Pair:
    """Return the largest sides, in the proportion of the lengths, but at least LEAST_SIDE."""
    q_side, kv_side = (max(LEAST_SIDE, SIDE * length // max(lengths)) for length in lengths)
    return q_side, kv_side


def whole_dots(lengths: Pair, step: Pair, room: Pair, largest: int = LARGEST) -> Pixels:
    """Return the sides, at most `room`, for which a cell of `step` tokens is whole dots wide."""
    q_side, kv_side = (
        max(1, round(n / size * min(largest, max(1, most * RESOLUTION // ceil_div(n, size)))))
        for n, size, most in zip(lengths, step, room, strict=True)
    )
    return q_side / RESOLUTION, kv_side / RESOLUTION


def sheet(
    title: str,
    about: str,
    lengths: Pair,
    pixels: Pixels,
    names: tuple[str, str] = ("queries", "keys"),
    *,
    lines: int,
    right: float = 0,
) -> tuple[Figure, Axes]:
    """Return an empty picture with title and axes, and space for `lines` of text below."""
    inner = max(LEFT - MARGIN + pixels[1] + right, _width(about, MEDIUM))
    title = title if len(title) < inner / 4 else title[: int(inner / 4)] + "…"
    while _width(title, LARGE) > inner:
        title = title[:-2] + "…"
    width = round(2 * MARGIN + inner)
    height = round(TOP + pixels[0] + BELOW + LINE * (lines - 1))
    figure = Figure((width / 96, height / 96), facecolor=PAPER)
    figure.text(MARGIN / width, 1 - 40 / height, title, size=LARGE * POINT, weight="bold")
    figure.text(MARGIN / width, 1 - 64 / height, about, size=MEDIUM * POINT, color=QUIET)
    left, bottom = LEFT / width, 1 - (TOP + pixels[0]) / height
    axes = figure.add_axes((left, bottom, pixels[1] / width, pixels[0] / height))
    axes.set(xlim=(0, lengths[1]), ylim=(lengths[0], 0))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(names[1], loc="left", labelpad=6)
    axes.set_xticks(*_ticks(lengths[1], pixels[1]))
    places, numbers = _ticks(lengths[0], pixels[0])
    axes.set_yticks(places, [names[0], *numbers[1:]])  # the name stands in place of the 0
    axes.get_yticklabels()[0].set(color=INK, size=MEDIUM * POINT)
    return figure, axes


def _ticks(length: int, pixels: float) -> tuple[list[int], list[str]]:
    labels = scale(length, max(1, min(5, int(pixels / 40))))
    return [at for at, _ in labels], [text for _, text in labels]


def _width(text: str, size: float) -> float:
    """Return the width of a text in pixels. From LARGE on, text is bold."""
    letters = FontProperties(size=size, weight="bold" if size >= LARGE else "normal")
    return float(text_to_path.get_text_width_height_descent(text, letters, ismath=False)[0])


def paint(axes: Axes, kinds: Kinds, step: Pair, colours: Mapping[int, str]) -> None:
    """Draw cells in layers. The layer of a kind has all cells of this kind and of higher ones.

    So there are few rectangles, and no gaps between cells of different kinds.
    """
    for kind in np.unique(kinds).tolist():
        boxes = np.array(list(rectangles(kinds >= kind)), float)
        top, bottom, left, right = (boxes * np.repeat(step, 2)).T
        corners = np.stack([left, top, right, top, right, bottom, left, bottom], -1)
        path = Path.make_compound_path_from_polys(corners.reshape(-1, 4, 2))
        options: dict[str, Any] = {"linewidth": 0, "antialiased": False, "snap": False}
        # add_artist is faster than add_patch, which updates the limits of the axes.
        axes.add_artist(patches.PathPatch(path, facecolor=colours[kind], **options))


def rectangles(marked: NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int]]:
    """Yield rectangles (top, bottom, left, right) that cover each marked cell once.

    A rectangle grows while the next row has the same run of cells.
    """
    growing: dict[tuple[int, int], int] = {}  # run of cells -> the row in which it began
    padded = np.pad(marked, ((0, 1), (1, 1)))
    for row, cells in enumerate(padded.astype(np.int8)):
        ends = np.flatnonzero(np.diff(cells)).reshape(-1, 2).tolist()
        runs = {(left, right) for left, right in ends}
        for run in sorted(growing.keys() - runs):
            yield growing.pop(run), row, *run
        for run in runs:
            growing.setdefault(run, row)


def _lines(axes: Axes, lengths: Pair, pixels: Pixels, size: Pair, colour: str) -> None:
    """Draw lines every `size` tokens, if they are far enough apart."""
    dots = (RESOLUTION * p * each / n for p, each, n in zip(pixels, size, lengths, strict=True))
    if min(dots) >= LINES_FROM:
        options: dict[str, Any] = {"colors": colour, "linewidths": THIN, "antialiased": False}
        axes.hlines(np.arange(size[0], lengths[0], size[0]), 0, lengths[1], **options)
        axes.vlines(np.arange(size[1], lengths[1], size[1]), 0, lengths[0], **options)


def legend(axes: Axes, meanings: Mapping[str, Sequence[str]], note: str = "") -> None:
    """Draw below the cells: each meaning with its colours, and a note."""
    entries: list[Artist] = [
        offsetbox.HPacker(children=[_swatches(colours), _words(word)], sep=5)
        for word, colours in meanings.items()
    ]
    rows: list[Artist] = [offsetbox.HPacker(children=entries, sep=18)] if entries else []
    rows += [_words(note)] if note else []
    if rows:
        box = offsetbox.VPacker(children=rows, sep=8)
        place: dict[str, Any] = {"xycoords": "axes fraction", "boxcoords": "offset points"}
        place |= {"xybox": (0, -14), "box_alignment": (0, 1), "frameon": False, "pad": 0}
        axes.add_artist(offsetbox.AnnotationBbox(box, (0, 0), **place))


def _words(text: str) -> offsetbox.TextArea:
    return offsetbox.TextArea(text, textprops={"color": QUIET})


def _swatches(colours: Sequence[str]) -> offsetbox.DrawingArea:
    size, step = 8, 10  # points
    area = offsetbox.DrawingArea(step * len(colours) + size - step, size)
    for at, colour in enumerate(colours):
        area.add_artist(
            patches.Rectangle((at * step, 0), size, size, fc=colour, ec=QUIET, linewidth=THIN)
        )
    return area
