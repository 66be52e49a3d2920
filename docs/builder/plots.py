"""Plots of committed figures, as SVG for light and for dark pages."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from builder.results import Part, named

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
        return WIDTH, 0.8 + 2.4 * math.ceil(len(self.panels) / 2)

    def draw(self, figure: Figure) -> None:
        """Draw the panels, two beside each other; the legend is below them."""
        count = len(self.panels)
        shape = math.ceil(count / 2), min(count, 2)
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
        for panel in axes[::2]:
            panel.set_ylabel(self.ylabel)
        if not self.logarithmic:
            axes[0].set_ylim(bottom=0)  # after all lines are drawn: panels share the axis
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


def by_length(groups: list[list[Part]]) -> Panels:
    """How many times as fast as SDPA, by length; a panel for each processor."""
    panels: dict[str, Points] = {}
    for part in sorted((part for group in groups for part in group), key=_order):
        for row in part.rows:
            if found := CASE.fullmatch(row["case"]):
                kind, length, width = found.groups()
                lines = panels.setdefault(part.label, {})
                line = lines.setdefault(f"{kind}, heads of {width}", [])
                line.append((int(length), row["figure"]))
    return Panels(panels, "tokens", "times as fast as SDPA", limit=1)


CASE = re.compile(r"(dense|causal) N (\d+) D (\d+) threads 2")


def _order(part: Part) -> tuple[bool, str]:
    return part.target != part.machine, part.place


def memory(measured: dict[str, Part]) -> Panels:
    """Peak memory by length; a panel for each pass."""
    panels: dict[str, Points] = {}
    for title, part in measured.items():
        for row in part.rows:
            name, _, length = row["case"].rpartition(", N ")
            megabytes = row["figure"] + row.get("bias_mb", 0)
            panels.setdefault(title, {}).setdefault(name, []).append((int(length), megabytes))
    return Panels(panels, "tokens", "MB", logarithmic=True)


def linear(measured: list[Part]) -> Panels:
    """Linear layers against PyTorch's by rows; a panel for each processor."""
    panels: dict[str, Points] = {}
    for part in measured:
        for row in part.rows:
            if found := re.fullmatch(r"(\w+), (\d+) rows, 1 thread", row["case"]):
                lines = panels.setdefault(part.label, {})
                lines.setdefault(found[1], []).append((int(found[2]), row["figure"]))
    return Panels(panels, "rows", "times as fast as nn.Linear in float32", limit=1)


def over_commits(measured: list[Part], wanted: str) -> Panels:
    """Figures of all runs that are kept, by commit; a panel for each processor with several."""
    panels: dict[str, Points] = {}
    ticks = {}
    for part in measured:
        if len(runs := part.runs()) < 2:
            continue
        lines = panels.setdefault(part.label, {})
        ticks[part.label] = [commit[:7] for commit, _ in runs]
        for place, (_, figures) in enumerate(runs):
            for case, figure in figures.items():
                if found := re.fullmatch(wanted, case):
                    lines.setdefault(found[1], []).append((place, figure))
    unit = wanted.rpartition(", ")[2]
    return Panels(panels, "commit", unit.replace("x as", "times as"), ticks=ticks)


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
        for nth, (label, rows) in enumerate(self.series.items()):
            middle = 0.4 - height * (nth + 0.5)
            places = [middle - cases.index(case) for case, _ in rows]
            values = [value for _, value in rows]
            axes.barh(places, values, color=LINES[nth], height=height * 0.9, label=label)
            for place, value in zip(places, values, strict=True):
                axes.text(value, place, f" {value:.3g}", va="center", fontsize=8)
        names = [case.removeprefix("create_block_mask ").removesuffix(", memory") for case in cases]
        axes.set_yticks([-n for n in range(len(cases))], names)
        axes.grid(visible=False)
        if self.limit is not None:
            axes.axvline(self.limit, color=matplotlib.rcParams["axes.edgecolor"], linestyle=":")
        axes.set_xlabel(self.label)
        axes.margins(x=0.12)
        figure.legend(loc="outside lower center", ncols=3)


def bars(script: str, names: tuple[str, ...], unit: str, limit: float | None) -> Bars:
    """Return bars of the rows that have a unit, of some parts of a script."""
    series: dict[str, Rows] = {}
    for part in (part for name in names for part in named(script, name)):
        rows = [(row["case"], float(row["figure"])) for row in part.rows if row["unit"] == unit]
        if rows:
            series.setdefault(part.label, []).extend(rows)
    return Bars(series, unit.replace("x as", "times as"), limit)


def plots() -> dict[str, Plot]:
    """Return all plots by name."""
    lengths = "Two threads, float32, 8 heads. The dotted line is PyTorch's SDPA."
    passes = {"forward": "forward", "backward": "forward and backward"}
    peaks = {
        title: named("memory", name)[0] for name, title in passes.items() if named("memory", name)
    }
    drawn: dict[str, tuple[str, str, Panels | Bars]] = {
        "forward": ("Forward, by length", lengths, by_length([named("forward", "sdpa")])),
        "backward": (
            "Forward and backward, by length",
            lengths,
            by_length([named("backward", name) for name in ("dense", "masked")]),
        ),
        "memory": ("Memory of attention", MEMORY, memory(peaks)),
        **{name: (title, text, bars(*what)) for name, (title, text, what) in BARS.items()},
        "linear": ("Linear layers", LAYERS, linear(named("linear", "layers"))),
        **{
            f"commits-{script}": (title, COMMITS, over_commits(named(script, name), wanted))
            for title, script, name, wanted in HEADLINES
        },
    }
    return {
        name: Plot(title, text, what.draw, what.size)
        for name, (title, text, what) in drawn.items()
        if (what.panels if isinstance(what, Panels) else what.series)
    }


MEMORY = (
    "Peak of a call over the memory before it, with the output and gradients, without inputs: "
    "4 heads of 64, float32, causal with ALiBi. SDPA takes that as a bias [4, N, N], which is in "
    "its figure. Lengths at which PyTorch needs too much are left out. Both axes are logarithmic."
)
LAYERS = "One thread, the mean of five shapes; weights in the formats of `quire.linear`."
COMMITS = "Every run that is kept, by its commit."

HEADLINES = (
    (
        "Forward, over commits",
        "forward",
        "sdpa",
        r"(\w+ N (?:512|8192) D 64) threads 2, x as fast as SDPA",
    ),
    (
        "Forward and backward, over commits",
        "backward",
        "masked",
        r"(\w+ N (?:512|4096) D 64) threads 2, x as fast as SDPA",
    ),
    (
        "Decoding, over commits",
        "paged",
        "contiguous",
        r"decode, (contiguous \w+), % of the reading speed",
    ),
)
"""What is plotted over commits: title, script and part, and the rows."""

BARS: dict[str, tuple[str, str, tuple[str, tuple[str, ...], str, float | None]]] = {
    "block-memory": (
        "Memory of block masks",
        "Of a million tokens.",
        ("masks", ("million",), "MB", None),
    ),
    "block-time": (
        "Time to make a block mask",
        "Of a million tokens. Bounds decide most of it.",
        ("masks", ("million",), "s", None),
    ),
    "decode": (
        "Decoding",
        "16 sequences of 4,096 tokens. 100 is the speed of only reading the same bytes.",
        ("paged", ("contiguous", "int8"), "% of the reading speed", 100.0),
    ),
    "engine": (
        "Throughput of the engine",
        "16 mixed requests at once, against other engines. 1 is as fast as the other.",
        (
            "engine",
            ("transformers_58m", "engines_58m", "transformers_smollm2", "engines_smollm2"),
            "x as fast",
            1.0,
        ),
    ),
}
"""Plots of bars: title, text; script and parts, unit of the rows, where a line is drawn."""
