"""Batches of texts as an SVG: a line for each text, the padding behind it, and the time below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 400
LEFT, TOP, BOTTOM, GAP = 16, 72, 76, 28
INK, TEXT, PADDING = "#1b1f24", "#12395f", "#c9dff6"


class Panel(NamedTuple):
    """One way to go through the texts."""

    name: str
    batches: Sequence[Sequence[int]]  # the lengths of the texts of each
    padded: bool
    seconds: float

    @property
    def computed(self) -> int:
        """How many tokens the model sees, padding included."""
        if self.padded:
            return sum(len(batch) * max(batch) for batch in self.batches)
        return sum(map(sum, self.batches))


def padding_chart(title: str, panels: Sequence[Panel]) -> str:
    """The content of a file that shows panels side by side, in one scale."""
    width = (WIDTH - 2 * LEFT - GAP * (len(panels) - 1)) / len(panels)
    longest = max(max(batch) for panel in panels for batch in panel.batches)
    slowest = max(panel.seconds for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="36" width="10" height="10" fill="{TEXT}"/>'
        f'<text x="{LEFT + 16}" y="45">tokens of a text</text>',
        f'<rect x="{LEFT + 120}" y="36" width="10" height="10" fill="{PADDING}"/>'
        f'<text x="{LEFT + 136}" y="45">padding of its batch</text>',
    ]
    for number, panel in enumerate(panels):
        left = LEFT + number * (width + GAP)
        lines.append(f'<text x="{left:.1f}" y="{TOP - 8}">{escape(panel.name)}</text>')
        if panel.padded:
            filled = [[max(batch)] * len(batch) for batch in panel.batches]
            lines.append(_rows(filled, left, width / longest, PADDING))
        lines.append(_rows(panel.batches, left, width / longest, TEXT))
        lines += _time(panel, left, width * panel.seconds / slowest)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rows(batches: Sequence[Sequence[int]], left: float, scale: float, colour: str) -> str:
    """One outline around all texts, from the first at the top down."""
    lengths = [length for batch in batches for length in batch]
    step = (HEIGHT - TOP - BOTTOM) / len(lengths)
    path = "".join(
        f"H{left + length * scale:.1f}V{TOP + number * step:.1f}"
        for number, length in enumerate(lengths, 1)
    )
    return f'<path d="M{left:.1f} {TOP}{path}H{left:.1f}z" fill="{colour}"/>'


def _time(panel: Panel, left: float, width: float) -> list[str]:
    bottom = HEIGHT - BOTTOM
    return [
        f'<text x="{left:.1f}" y="{bottom + 22}">{panel.computed:,} tokens computed</text>',
        f'<rect x="{left:.1f}" y="{bottom + 32}" width="{width:.1f}" height="10" fill="#e0863c"/>',
        f'<text x="{left:.1f}" y="{bottom + 60}">{panel.seconds:.2f} s</text>',
    ]
