"""Plots of committed figures, as SVG for light and for dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from builder.results import Part, parts

THEMES = {
    "light": {"ink": "#181c23", "quiet": "#626a76", "grid": "#d9dde3"},
    "dark": {"ink": "#e6e9ee", "quiet": "#a3abb8", "grid": "#3a4049"},
}
LINES = ("#3b7dd8", "#e08a1e", "#2a9d6f", "#b0569e")  # to be told apart on both papers
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "quire",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "legend.frameon": False,
}


def svg(draw: Callable[[Figure], None], theme: str, size: tuple[float, float]) -> str:
    """Return a plot as SVG without a background, in the colours of a theme."""
    colours = THEMES[theme]
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), colours["ink"])
    quiet = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), colours["quiet"])
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**STYLE, **ink, **quiet, "grid.color": colours["grid"]})
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        file = io.BytesIO()
        absent = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=absent)
    return file.getvalue().decode()


def named(script: str, name: str) -> list[Part]:
    """Return a part as measured on each processor."""
    return [each for each in parts() if (each.script, each.name) == (script, name)]


CASE = re.compile(r"(dense|causal) N (\d+) D (\d+) threads 2")


def speed_by_length(figure: Figure, scripts: list[list[Part]]) -> None:
    """Draw how many times as fast as SDPA, by length; a panel for each processor."""
    targets = list(dict.fromkeys(part.target for group in scripts for part in group))
    axes = figure.subplots(1, len(targets), sharey=True, squeeze=False)[0]
    for panel, target in zip(axes, targets, strict=True):
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for part in (part for group in scripts for part in group if part.target == target):
            for row in part.rows:
                if found := CASE.fullmatch(row["case"]):
                    kind, length, width = found.groups()
                    lines.setdefault((kind, width), []).append((int(length), row["figure"]))
        for colour, ((kind, width), points) in zip(LINES, sorted(lines.items()), strict=False):
            x, y = zip(*sorted(points), strict=True)
            panel.plot(x, y, marker="o", color=colour, label=f"{kind}, heads of {width}")
        panel.axhline(1, color=matplotlib.rcParams["axes.edgecolor"], linewidth=1, linestyle=":")
        panel.set(xscale="log", xlabel="tokens", title=target)
        panel.set_xticks([512, 2048, 8192], ["512", "2,048", "8,192"])
        panel.minorticks_off()
    axes[0].set_ylabel("times as fast as SDPA")
    axes[0].set_ylim(bottom=0)  # after all lines are drawn: panels share the axis
    axes[-1].legend()


def bars(figure: Figure, rows: list[tuple[str, float]], label: str, limit: float | None) -> None:
    """Draw a bar for each row, and a line at `limit`."""
    axes = figure.subplots()
    places = range(len(rows))[::-1]
    axes.barh(places, [value for _, value in rows], color=LINES[0], height=0.65)
    axes.set_yticks(places, [name for name, _ in rows])
    axes.grid(visible=False)
    for place, (_, value) in zip(places, rows, strict=True):
        axes.text(value, place, f" {value:.3g}", va="center")
    if limit is not None:
        axes.axvline(limit, color=matplotlib.rcParams["axes.edgecolor"], linestyle=":")
    axes.set_xlabel(label)
    axes.margins(x=0.12)


def plots() -> dict[str, tuple[str, str, Callable[[Figure], None], tuple[float, float]]]:
    """Return all plots by name: title, what it shows, how it is drawn, its size."""
    found: dict[str, tuple[str, str, Callable[[Figure], None], tuple[float, float]]] = {}
    for name, title, script, wanted in (
        ("forward", "Forward, by length", "forward", ["sdpa"]),
        ("backward", "Forward and backward, by length", "backward", ["dense", "masked"]),
    ):
        groups = [named(script, part) for part in wanted]
        if any(groups):
            text = "Two threads, float32, 8 heads. The dotted line is PyTorch's SDPA."
            draw = _speed(groups)
            targets = {part.target for group in groups for part in group}
            found[name] = (title, text, draw, (3.6 * max(1, len(targets)) + 0.6, 3.0))
    for name, title, script, part, unit, text, limit in BARS:
        for measured in named(script, part):
            rows = [(r["case"], float(r["figure"])) for r in measured.rows if unit in r["unit"]]
            if rows:
                place = f"{name}-{measured.target}"
                size = (7.2, 0.7 + 0.3 * len(rows))
                found[place] = (
                    f"{title} ({measured.target})",
                    text,
                    _bars(rows, unit, limit),
                    size,
                )
    return found


BARS: tuple[tuple[str, str, str, str, str, str, float | None], ...] = (
    ("memory", "Memory of block masks", "masks", "million", "MB", "Of a million tokens.", None),
    (
        "time",
        "Time to make a block mask",
        "masks",
        "million",
        "s",
        "Of a million tokens. Bounds decide most of it.",
        None,
    ),
    (
        "decode",
        "Decoding",
        "paged",
        "contiguous",
        "% of the reading speed",
        "16 sequences of 4,096 tokens. 100 is the speed of only reading the same bytes.",
        100.0,
    ),
    *(
        (
            f"engine-{part}",
            f"Throughput of the engine, {part}",
            "engine",
            part,
            "x as fast",
            "16 mixed requests at once, against other engines. 1 is as fast as the other.",
            1.0,
        )
        for part in ("random_llama", "smollm2_135m")
    ),
)
"""Plots of bars: name, title, script and part, unit of the rows, text, where a line is drawn."""


def _speed(groups: list[list[Part]]) -> Callable[[Figure], None]:
    return lambda figure: speed_by_length(figure, groups)


def _bars(
    rows: list[tuple[str, float]], label: str, limit: float | None
) -> Callable[[Figure], None]:
    return lambda figure: bars(figure, rows, label, limit)
