"""A laid-out picture as SVG: one path for each kind of cell, of rectangles as large as they go."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

import numpy as np

from quire.draw.sheet import LEFT, PAPER, RESOLUTION, TOP, Box, Colour, Label, Picture
from quire.draw.subject import Kinds

FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def write_svg(sheet: Picture) -> str:
    """The content of a file."""
    size = f'width="{sheet.width}" height="{sheet.height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {sheet.width} '
        f'{sheet.height}" font-family="{FONT}">',
        f"<title>{escape(sheet.title)}: {escape(sheet.facts)}</title>",
        f'<rect width="100%" height="100%" fill="{_hex(PAPER)}"/>',
        '<g shape-rendering="crispEdges">',
        *_cells(sheet),
        *map(_box, sheet.boxes()),
        "</g>",
        *map(_label, sheet.labels()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _cells(sheet: Picture) -> Iterator[str]:
    rows, columns = (
        np.minimum(np.arange(count + 1) * axis.dots / RESOLUTION, axis.side)
        for axis, count in zip((sheet.q, sheet.kv), sheet.kinds.shape, strict=True)
    )
    for kind, colour in sheet.colours.items():
        path = "".join(
            f"M{columns[left]:g} {rows[top]:g}H{columns[right]:g}V{rows[bottom]:g}"
            f"H{columns[left]:g}Z"
            for top, bottom, left, right in rectangles(sheet.kinds, kind)
        )
        if path:
            yield f'<path transform="translate({LEFT} {TOP})" fill="{_hex(colour)}" d="{path}"/>'


def rectangles(kinds: Kinds, kind: int) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles (top, bottom, left, right) that cover the cells of a kind, each cell once.

    A run of cells is continued by the same run in the next row.
    """
    growing: dict[tuple[int, int], int] = {}  # the run, and the row in which it began
    padded = np.pad(kinds == kind, ((0, 1), (1, 1)))
    for row, marked in enumerate(padded.astype(np.int8)):
        ends = np.flatnonzero(np.diff(marked)).reshape(-1, 2).tolist()
        runs = {(left, right) for left, right in ends}
        for run in growing.keys() - runs:
            yield growing.pop(run), row, *run
        for run in runs:
            growing.setdefault(run, row)


def _box(box: Box) -> str:
    return (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" '
        f'fill="{_hex(box.colour)}"/>'
    )


def _label(label: Label) -> str:
    weight = ' font-weight="600"' if label.bold else ""
    return (
        f'<text x="{label.x:g}" y="{label.y:g}" font-size="{label.size:g}"{weight} '
        f'text-anchor="{label.anchor}" fill="{_hex(label.colour)}">{escape(label.text)}</text>'
    )


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
