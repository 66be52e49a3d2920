"""The page of figures: plots, and a table of every part that is kept."""

from __future__ import annotations

from builder.plots import THEMES, plots, svg
from builder.results import Part, misses, parts


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
    """Return all rows of a part with the conditions under which they were measured."""
    lines = [
        f"| {row['case']} | {row['figure']:.3g} {row['unit']} | {verdict(row)} |"
        for row in part.rows
    ]
    head = "| case | figure | wanted |\n|---|---|---|"
    return f"### {part.title}\n\n`{part.command}`\\\n{part.conditions()}\n\n{head}\n" + "\n".join(
        lines
    )


def verdict(row: dict[str, object]) -> str:
    """Return the limit of a row; in bold, with "missed", if the figure does not keep it."""
    wanted = str(row["wanted"])
    if not wanted:
        return ""
    return f"**{wanted}, missed**" if misses(row) else wanted
