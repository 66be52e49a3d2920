"""Charts of the examples, drawn by matplotlib: curves, and texts in batches with padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (7.5, 4.2)  # inches
DARK, LIGHT, TIME, RULE = "#12395f", "#b9d5f2", "#e0863c", "#e3e7ec"
STYLES = ({"color": LIGHT, "linewidth": 4}, {"color": DARK, "linewidth": 1.2})
"""A wide light line, and a thin dark one that can be seen on top of it."""


def save(chart: Callable[[], Figure], path: Path) -> None:
    """Write a chart to a PNG or an SVG, as quire writes its own pictures."""
    from quire.draw.picture import rendered

    path.write_bytes(rendered(chart, "png" if path.suffix == ".png" else "svg"))


class Curve(NamedTuple):
    """A line of the chart: its name, and a value for each step."""

    name: str
    values: Sequence[float]


def line_chart(title: str, x_name: str, y_name: str, curves: Sequence[Curve]) -> Figure:
    """Return a chart of one or two curves, with the names of its axes."""
    figure = _figure(title)
    axes = figure.add_axes((0.08, 0.13, 0.89, 0.69))
    for (name, values), style in zip(curves, STYLES, strict=False):
        axes.plot(values, label=name, **style)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name, loc="top")
    axes.locator_params(axis="y", nbins=5)
    axes.margins(x=0)
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.02), ncols=2, frameon=False, borderpad=0)
    return figure


class Panel(NamedTuple):
    """One way to divide texts into batches, and how long it took."""

    name: str
    batches: Sequence[Sequence[int]]  # the lengths of the texts of each batch
    padded: bool
    seconds: float

    @property
    def computed(self) -> int:
        """The number of tokens that the model computes, including padding."""
        if self.padded:
            return sum(len(batch) * max(batch) for batch in self.batches)
        return sum(map(sum, self.batches))


def padding_chart(title: str, panels: Sequence[Panel]) -> Figure:
    """Return a chart with panels side by side: a line for each text, and below it a bar of time.

    All panels have the same scale, so that lines and bars can be compared.
    """
    figure = _figure(title)
    grid = {"left": 0.03, "right": 0.97, "top": 0.76, "bottom": 0.1, "wspace": 0.1, "hspace": 0.35}
    rows = figure.subplots(2, len(panels), sharex="row", height_ratios=(16, 1), gridspec_kw=grid)
    for texts, time, panel in zip(*rows, panels, strict=True):
        _texts(texts, panel)
        time.barh(0, panel.seconds, color=TIME)
        time.text(0, -0.3, f"{panel.seconds:.2f} s", transform=time.transAxes, va="top")
        time.set_axis_off()
    place = {"loc": "upper left", "bbox_to_anchor": (0.03, 0.89), "borderaxespad": 0}
    explained = rows[0][0].get_legend_handles_labels()
    figure.legend(*explained, **place, ncols=2, frameon=False, borderpad=0, handlelength=1)
    return figure


def _texts(axes: Axes, panel: Panel) -> None:
    lengths = [length for batch in panel.batches for length in batch]
    starts = list(accumulate(map(len, panel.batches), initial=0))
    shown = {"orientation": "horizontal", "fill": True, "linewidth": 0}
    axes.stairs(lengths, color=DARK, label="tokens of a text", zorder=2, **shown)
    if panel.padded:
        longest = [max(batch) for batch in panel.batches]
        axes.stairs(longest, starts, color=LIGHT, label="padding of its batch", **shown)
    axes.set(xlim=(0, None), ylim=(len(lengths), 0))
    axes.set_axis_off()
    axes.set_title(panel.name, loc="left", size="medium")
    note = f"{panel.computed:,} tokens computed"
    axes.text(0, -0.03, note, transform=axes.transAxes, va="top")


def _figure(title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(SIZE, facecolor="white")
    figure.text(0.03, 0.93, title, size=12, weight="bold")
    return figure
