"""Kinds of plots, as SVG for light and for dark pages."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from builder.results import NAMES
from builder.rows import words

THEMES = {
    "light": {"ink": "#181c23", "quiet": "#626a76", "grid": "#d9dde3"},
    "dark": {"ink": "#e6e9ee", "quiet": "#a3abb8", "grid": "#3a4049"},
}
LINES = (
    "#3b7dd8",
    "#e08a1e",
    "#2a9d6f",
    "#b0569e",
    "#8a8f3c",
    "#c0504d",
    "#7a6fc4",
    "#3fa7b5",
    "#a9745a",
    "#d46fb0",
)  # to be told apart on both papers
WIDTH = 7.2  # inches of every plot
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


class Plot(NamedTuple):
    """A plot: its title, what it shows, how it is drawn, and its size in inches."""

    title: str
    text: str
    draw: Callable[[Figure], None]
    size: tuple[float, float]


Points = dict[str, list[tuple[float, float]]]
"""The points of each line of a panel, by its label."""


class Panels(NamedTuple):
    """Panels beside each other, with lines that have one meaning in all of them."""

    panels: dict[str, Points]
    xlabel: str
    ylabel: str
    limit: float | None = None
    logarithmic: bool = False
    ticks: dict[str, list[str]] | None = None  # words below the panels, in place of numbers

    @property
    def size(self) -> tuple[float, float]:
        """The size of the plot in inches."""
        return WIDTH, 0.8 + 2.4 * math.ceil(len(self.panels) / self.columns)

    @property
    def columns(self) -> int:
        """How many panels stand beside each other."""
        return 3 if len(self.panels) % 3 == 0 else min(len(self.panels), 2)

    def draw(self, figure: Figure) -> None:
        """Draw the panels, some beside each other; the legend is below them."""
        count = len(self.panels)
        shape = math.ceil(count / self.columns), self.columns
        grid = figure.subplots(*shape, sharey=True, squeeze=False).flatten()
        axes = grid[:count]
        for spare in grid[count:]:
            spare.set_visible(False)
        labels = sorted({label for points in self.panels.values() for label in points})
        colours = dict(zip(labels, LINES, strict=False))
        for panel, (title, lines) in zip(axes, self.panels.items(), strict=True):
            for label, points in sorted(lines.items()):
                x, y = zip(*sorted(points), strict=True)
                panel.plot(x, y, marker="o", color=colours[label], label=label)
            panel.set(xlabel=self.xlabel, title=title)
            if self.limit is not None:
                ink = matplotlib.rcParams["axes.edgecolor"]
                panel.axhline(self.limit, color=ink, linewidth=1, linestyle=":")
            self._scale(panel, title, [x for points in lines.values() for x, _ in points])
        for panel in axes[:: self.columns]:
            panel.set_ylabel(self.ylabel)
        if self.logarithmic:
            axes[0].yaxis.set_major_formatter("{x:,.0f}")
        else:  # after all lines are drawn: panels share the axis
            axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])
        known = {line.get_label(): line for panel in axes for line in panel.get_lines()}
        shown = [known[label] for label in labels]
        figure.legend(shown, labels, loc="outside lower center", ncols=4 if count > 1 else 7)

    def _scale(self, panel: Any, title: str, places: list[float]) -> None:
        if self.ticks is not None:
            panel.set_xticks(range(len(self.ticks[title])), self.ticks[title], rotation=30)
            return
        panel.set(xscale="log", yscale="log" if self.logarithmic else "linear")
        panel.set_xticks(sorted(set(places)), [f"{x:,.0f}" for x in sorted(set(places))])
        panel.minorticks_off()


Rows = list[tuple[str, float]]


class Bars(NamedTuple):
    """Bars for each case, one for each processor."""

    series: dict[str, Rows]
    label: str
    limit: float | None = None

    @property
    def cases(self) -> list[str]:
        """The cases from top to bottom."""
        return list(dict.fromkeys(case for rows in self.series.values() for case, _ in rows))

    @property
    def size(self) -> tuple[float, float]:
        """The size of the plot in inches."""
        count = sum(map(len, self.series.values()))
        return WIDTH, 1.0 + 0.15 * len(self.cases) + 0.19 * count

    def draw(self, figure: Figure) -> None:
        """Draw the bars, with their figures beside them."""
        axes = figure.subplots()
        cases, height = self.cases, 0.8 / len(self.series)
        for label, rows in self.series.items():
            places = [self._place(case, label, height) for case, _ in rows]
            values = [value for _, value in rows]
            colour = LINES[(*NAMES.values(), "").index(label.partition(",")[0])]
            axes.barh(places, values, color=colour, height=height * 0.9, label=label)
            for place, value in zip(places, values, strict=True):
                axes.text(value, place, f" {value:.3g}", va="center", fontsize=8)
        axes.set_yticks([-n for n in range(len(cases))], [words(case) for case in cases])
        axes.grid(visible=False)
        if self.limit is not None:
            axes.axvline(self.limit, color=matplotlib.rcParams["axes.edgecolor"], linestyle=":")
        axes.set_xlabel(self.label)
        axes.margins(x=0.12)
        figure.legend(loc="outside lower center", ncols=3)

    def _place(self, case: str, label: str, height: float) -> float:
        """Return where the bar of a case is: the bars of one case are around its place."""
        beside = [name for name, rows in self.series.items() if case in dict(rows)]
        return (len(beside) / 2 - beside.index(label) - 0.5) * height - self.cases.index(case)
