"""Plots show what files keep."""

from __future__ import annotations

import pytest
from builder import results

Figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed").Figure
plots = pytest.importorskip("builder.plots")


def test_plots_show_all_of_their_lines() -> None:
    shown = plots.by_length([results.named("forward", "sdpa")])
    figure = Figure()
    shown.draw(figure)
    drawn = [line.get_ydata() for panel in figure.axes for line in panel.get_lines()]
    low, high = figure.axes[0].get_ylim()
    titles = [panel.get_title() for panel in figure.axes if panel.get_visible()]
    assert titles == list(shown.panels) and {"Zen 4, AVX-512", "Zen 5, AVX2"} <= set(titles)
    assert low == 0 and high > max(max(values) for values in drawn)


def test_the_plots_that_readers_look_for_are_there() -> None:
    wanted = {"forward", "backward", "memory", "decode", "linear", "engine", "commits-forward"}
    assert wanted <= plots.plots().keys()
    for name, (_, _, chosen) in plots.BARS.items():
        source = (results.BENCHMARKS / f"{chosen.script}.py").read_text()
        missing = [part for part in chosen.parts if f"def {part}(table" not in source]
        assert not missing and f'"{chosen.unit}"' in source, name


def test_a_processor_has_one_colour_in_all_bars() -> None:
    colours: dict[str, set[object]] = {}
    for _, _, chosen in plots.BARS.values():
        figure = Figure()
        shown = plots.bars(chosen)
        shown.draw(figure)
        for bars in figure.axes[0].containers:
            assert len(bars) == len(shown.series[bars.get_label()]) > 0
            colours.setdefault(bars.get_label(), set()).update(bar.get_facecolor() for bar in bars)
    assert {"Zen 4, AVX-512", "Zen 5, AVX-512"} <= colours.keys()
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == len(colours)
