"""Plots of committed figures."""

from __future__ import annotations

import re
from typing import NamedTuple

from builder.charts import Bars, Panels, Plot, Points, Rows
from builder.results import Part, named
from builder.rows import own, words


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
                name = {"mkl": "MKL, packed", "onednn": "oneDNN, packed"}.get(found[1], found[1])
                lines.setdefault(name, []).append((int(found[2]), row["figure"]))
    return Panels(panels, "rows", "times as fast as nn.Linear", limit=1)


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
                    lines.setdefault(words(found[1]), []).append((place, figure))
    unit = wanted.rpartition(", ")[2]
    return Panels(panels, "commit", unit.replace("x as", "times as"), ticks=ticks)


class Choice(NamedTuple):
    """Which rows are drawn as bars, and what the axis says."""

    script: str
    parts: tuple[str, ...]
    cases: str  # its group is what stands beside the bar
    unit: str
    label: str
    scale: float = 1.0  # from the unit to that of the axis
    limit: float | None = None


def bars(chosen: Choice) -> Bars:
    """Return bars of the rows that are chosen, by processor."""
    series: dict[str, Rows] = {}
    parts = (part for name in chosen.parts for part in named(chosen.script, name))
    for part in sorted(parts, key=_order):
        for row in part.rows:
            found = re.fullmatch(chosen.cases, row["case"])
            if found and row["unit"] == chosen.unit:
                figure = chosen.scale * float(row["figure"])
                series.setdefault(part.label, []).append((found[1], figure))
    return Bars(series, chosen.label, chosen.limit)


def plots() -> dict[str, Plot]:
    """Return all plots by name."""
    lengths = "Two threads, float32, 8 heads. The dotted line is PyTorch's SDPA."
    passes = {"forward": "forward", "backward": "forward and backward"}
    peaks = {title: own("memory", name)[-1] for name, title in passes.items()}
    where = next(iter(peaks.values())).label
    drawn: dict[str, tuple[str, str, Panels | Bars]] = {
        "forward": ("Forward, by length", lengths, by_length([named("forward", "sdpa")])),
        "backward": (
            "Forward and backward, by length",
            lengths,
            by_length([named("backward", name) for name in ("dense", "masked")]),
        ),
        "memory": ("Memory of attention", f"{MEMORY} Measured on {where}.", memory(peaks)),
        **{name: (title, text, bars(chosen)) for name, (title, text, chosen) in BARS.items()},
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
    "its figure. Lengths at which PyTorch needs too much are left out, and its `flex_attention` "
    "has no backward pass on CPUs. Both axes are logarithmic."
)
LAYERS = (
    "One thread, the mean of five shapes, against `nn.Linear` in float32, the dotted line: weights "
    "in the formats of `quire.linear`, and float32 as PyTorch packs it for MKL and for oneDNN."
)
COMMITS = "Each run that is kept, by its commit. Runs differ by a few percent without any change."

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

BARS = {
    "block-memory": (
        "Memory of block masks",
        "Of a million queries and a million keys.",
        Choice("masks", ("million",), r"create_block_mask (.+), memory", "MB", "MB"),
    ),
    "block-time": (
        "Time to make a block mask",
        "Of a million queries and a million keys, with two threads.",
        Choice("masks", ("million",), r"create_block_mask (.+), 1M x 1M", "s", "ms", 1e3),
    ),
    "decode": (
        "Decoding",
        "16 sequences of 4,096 tokens. 100 is the speed at which the same bytes can be read.",
        Choice(
            "paged",
            ("contiguous", "paged"),
            r"decode, (.+)",
            "% of the reading speed",
            "% of the speed of reading",
            limit=100.0,
        ),
    ),
    "engine": (
        "Throughput of the engine",
        "16 mixed requests at once, against other engines. Longer bars are better; 1 is as fast as "
        "the other. 58m is a model of 58 million random weights, smollm2 is SmolLM2-135M.",
        Choice(
            "engine",
            ("engines_58m", "engines_smollm2"),
            r"(.+ against .+)",
            "x as fast",
            "times as fast as the other engine",
            limit=1.0,
        ),
    ),
    "engine-transformers": (
        "Throughput against transformers",
        "The same requests, against transformers' own continuous batching, and against its "
        "`generate` with quire's cache.",
        Choice(
            "engine",
            ("transformers_58m", "transformers_smollm2"),
            r"(.+ against .+)",
            "x as fast",
            "times as fast as transformers",
            limit=1.0,
        ),
    ),
}
"""Plots of bars: title, text, rows."""
