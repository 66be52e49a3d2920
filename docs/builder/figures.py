"""The page of figures: plots, and a table of every part that is kept."""

from __future__ import annotations

from builder.charts import THEMES, svg
from builder.plots import plots
from builder.results import Part, misses, number, parts
from builder.rows import markdown, words


def pictures() -> dict[str, str]:
    """Return the plots as SVG by path."""
    return {
        f"figures/{name}-{theme}.svg": svg(plot.draw, theme, plot.size)
        for name, plot in plots().items()
        for theme in THEMES
    }


def page() -> str:
    """Return what the page of figures has below its introduction."""
    shown = [
        f"## {plot.title}\n\n{plot.text}\n\n"
        + "\n\n".join(
            f"````{{container}} plot only-{theme}\n```{{image}} figures/{name}-{theme}.svg\n"
            f":alt: {plot.title}\n```\n````"
            for theme in THEMES
        )
        for name, plot in plots().items()
    ]
    return "\n\n".join([*shown, "## All rows", *map(table, parts())]) + "\n"


def table(part: Part) -> str:
    """Return all rows of a part, folded, with the conditions under which they were measured."""
    limits = any(row["wanted"] for row in part.rows)
    head = ["case", "figure", *["limit"] * limits]
    lines = [
        [words(row["case"]), f"{number(row)} {row['unit']}".rstrip(), *[verdict(row)] * limits]
        for row in part.rows
    ]
    missed = sum(map(misses, part.rows))
    count = f"{len(lines)} row{'s' * (len(lines) > 1)}"
    summary = f"{count}, of which {missed} miss{'es' * (missed == 1)} a limit" if missed else count
    return (
        f"### {part.title}\n\n<details><summary>{summary}</summary>\n\n"
        f"`{part.command}`\\\n{part.conditions()}\n\n{markdown(head, lines)}\n\n</details>"
    )


def verdict(row: dict[str, object]) -> str:
    """Return the limit of a row, with "missed" if the figure does not keep it."""
    return f"{row['wanted']}, missed" if misses(row) else str(row["wanted"])
