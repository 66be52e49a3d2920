"""The output of the demo: text of at most 80 columns, in colour if there is a terminal."""

from __future__ import annotations

import math

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quire.draw.text import SIGNS
from quire.tools.colour import coloured
from quire.tools.demo.check import Check, check
from quire.tools.demo.contest import Outcome, comparisons, measure
from quire.tools.demo.mod import HEAD_DIM, HEADS, SOURCE, block_mask
from quire.tools.demo.page import say, title
from quire.tools.doctor import report
from quire.tools.measure import Reading

CHECKED_TOKENS = 1024  # few, since float64 results need whole score matrices
PICTURE_SIDE = 16
NOISE_BYTES = 2_000_000  # smaller amounts of memory are not compared


def run(console: Console, tokens: int, seconds: float, threads: int) -> bool:
    """Print the demo, measuring each row for `seconds`. Return whether all checks hold."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    title(console, "A mod is plain Python")
    say(console, coloured(SOURCE, "python"))
    title(console, "What it lets attention see")
    say(console, _picture(tokens))

    title(console, "The same numbers as PyTorch")
    with console.status("computing it three times: by PyTorch, by quire, in float64"):
        checks = list(check(min(tokens, CHECKED_TOKENS)))
    say(console, _check_table(checks))

    title(console, "Time and peak memory beside PyTorch")
    outcomes = _measure(console, tokens, seconds, threads)
    say(console, _contest_table(outcomes))
    say(console, _footnotes(tokens, seconds, threads, outcomes))
    return all(row.holds for row in checks)


def _picture(tokens: int) -> Table:
    """Return a picture with one sign for each block of queries and keys, and its legend."""
    cells = block_mask(tokens, math.ceil(tokens / PICTURE_SIDE)).rows().runs.cells()[0, 0]
    picture = Text("\n".join("".join(SIGNS[cell] for cell in row) for row in cells), "green")
    picture.highlight_regex("·", "bright_black")
    legend = (
        f"{tokens:,} queries from top to bottom,\n"
        f"{tokens:,} keys from left to right.\n\n"
        f"██  every query sees every key\n"
        f"▒▒  some do: the mod decides\n"
        f"·   none does: nothing is computed\n\n"
        f"In blocks of 128, {block_mask(tokens).sparsity():.0f} % are skipped."
    )
    grid = Table.grid(padding=(0, 3))
    grid.add_row(picture, legend)
    return grid


def _table(title: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(title, header_style="dim", min_width=29)
    table.add_column("PyTorch", header_style="dim", justify="right", min_width=8)
    table.add_column("quire", header_style="bold", justify="right", min_width=8)
    table.add_column("")
    return table


def _check_table(checks: list[Check]) -> Table:
    table = _table("largest error against float64")
    for row in checks:
        verdict = Text("✓", style="green") if row.holds else Text("✗ too large", style="bold red")
        table.add_row(row.name, f"{row.theirs:.1e}", f"{row.ours:.1e}", verdict)
    return table


def _measure(console: Console, tokens: int, seconds: float, threads: int) -> list[Outcome]:
    contest, outcomes = comparisons(tokens), list[Outcome]()
    columns = (TextColumn("  {task.description:<29}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=len(contest))

        def tick(name: str, share: float) -> None:
            progress.update(bar, description=name, completed=len(outcomes) + share)

        for outcome in measure(contest, seconds, threads, tick):
            outcomes.append(outcome)
    return outcomes


def _contest_table(outcomes: list[Outcome]) -> Table:
    table = _table("best time, peak memory")
    for name, theirs, ours in outcomes:
        speed = _ratio(theirs.seconds, ours.seconds, "faster", "slower")
        saving = _ratio(theirs.peak_bytes, ours.peak_bytes, "less", "more", least=NOISE_BYTES)
        table.add_row(name, _time(theirs), _time(ours), speed)
        table.add_row("", _memory(theirs), _memory(ours), saving)
    return table


def _time(reading: Reading) -> str:
    if reading.refusal is not None:
        return "refuses"
    seconds = reading.seconds
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _memory(reading: Reading) -> str:
    if reading.refusal is not None:
        return ""
    return "unknown" if reading.peak_bytes is None else f"{reading.peak_bytes / 1e6:,.0f} MB"


def _ratio(
    theirs: float | None, ours: float | None, better: str, worse: str, least: float = 0.0
) -> Text:
    """Return how many times better or worse quire is, or nothing if figures are missing."""
    if not theirs or not ours or math.inf in (theirs, ours) or max(theirs, ours) < least:
        return Text()
    word, style = (better, "green") if ours <= theirs else (worse, "yellow")
    times = max(ours, theirs) / min(ours, theirs)
    return Text(f"{times:.{1 if times < 10 else 0}f} x {word}", style=style)


def _footnotes(tokens: int, seconds: float, threads: int, outcomes: list[Outcome]) -> Text:
    lines = [
        f"{tokens:,} tokens, {HEADS} heads of {HEAD_DIM}, float32; "
        f"{dict(report())['cpu']}, {threads} thread{'s' * (threads > 1)}.",
        f"In turns for {seconds:g} s each; memory beyond the inputs, in fresh processes.",
        "PyTorch is eager flex_attention, and in the last two rows SDPA.",
    ]
    for name, *readings in outcomes:
        for who, reading in zip(("PyTorch", "quire"), readings, strict=True):
            if reading.refusal is not None:
                lines.append(f"{who}, {name}: {reading.refusal.partition('. ')[0]}.")
    return Text("\n".join(["", *lines]), style="dim")
