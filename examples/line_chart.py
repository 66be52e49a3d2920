"""Curves as an SVG, in a few lines: axes with round numbers, and a name for each curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 72, 44
INK, RULE = "#1b1f24", "#d8dee4"
STYLES = (
    'stroke="#9ec5f0" stroke-width="5"',
    'stroke="#12395f" stroke-width="1.5"',
)
"""A wide light line, and a thin dark one that can be seen on top of it."""


class Curve(NamedTuple):
    """What happened from the first step on."""

    name: str
    values: Sequence[float]


def line_chart(title: str, x_name: str, y_name: str, curves: Sequence[Curve]) -> str:
    """The content of a file that shows one or two curves."""
    top = max(value for curve in curves for value in curve.values)
    low = min(value for curve in curves for value in curve.values)
    last = max(1, *(len(curve.values) - 1 for curve in curves))
    rows, columns = ticks(low, top), ticks(0, last)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / columns[-1]

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - rows[0]) / (rows[-1] - rows[0])

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for value in rows:
        lines.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{RULE}"/>')
        lines.append(_text(LEFT - 8, y(value) + 4, f"{value:g}", "end"))
    lines += [_text(x(step), HEIGHT - BOTTOM + 18, f"{step:g}", "middle") for step in columns]
    lines.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_name, "middle"))
    lines.append(_text(LEFT - 8, TOP - 14, y_name, "end"))
    names = range(LEFT, WIDTH, WIDTH // len(STYLES))
    for (name, values), style, place in zip(curves, STYLES, names, strict=False):
        points = " ".join(f"{x(step):.1f},{y(value):.2f}" for step, value in enumerate(values))
        lines.append(f'<polyline fill="none" {style} points="{points}"/>')
        lines.append(f'<path d="M{place} 44h24" {style}/>')
        lines.append(_text(place + 32, 48, name, "start"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Some five round numbers, the first at most `low` and the last at least `high`."""
    rough = max(high - low, 1e-9) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
