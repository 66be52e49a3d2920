"""The page of figures: plots, and a table of every part that is kept."""

from __future__ import annotations

from builder.plots import THEMES, plots, svg
from builder.results import Part, parts


def pictures() -> dict[str, str]:
    """Return the plots as SVG by path."""
    return {
        f"figures/{name}-{theme}.svg": svg(draw, theme, size)
        for name, (_, _, draw, size) in plots().items()
        for theme in THEMES
    }


def page() -> str:
    """Return what the page of figures has below its introduction."""
    shown = [
        f"## {title}\n\n{text}\n\n"
        + "\n\n".join(
            f"```{{image}} figures/{name}-{theme}.svg\n:alt: {title}\n:class: only-{theme}\n```"
            for theme in THEMES
        )
        for name, (title, text, _, _) in plots().items()
    ]
    return "\n\n".join([*shown, "## All rows", *map(table, parts())]) + "\n"


def table(part: Part) -> str:
    """Return all rows of a part with the conditions under which they were measured."""
    lines = [
        f"| {row['case']} | {row['figure']:.3g} {row['unit']} | {verdict(row)} |"
        for row in part.rows
    ]
    head = "| case | figure | wanted |\n|---|---|---|"
    title = f"### {part.script}: {part.name} ({part.target})"
    return f"{title}\n\n`{part.command}`\\\n{part.conditions()}\n\n{head}\n" + "\n".join(lines)


def verdict(row: dict[str, object]) -> str:
    """Return the limit of a row; in bold, with "missed", if the figure does not keep it."""
    wanted = str(row["wanted"])
    if not wanted:
        return ""
    sign, limit = wanted.split()[0], float(wanted.split()[1])
    figure = float(str(row["figure"]))
    kept = {
        ">=": figure >= limit,
        ">": figure > limit,
        "<=": figure <= limit,
        "<": figure < limit,
    }[sign]
    return wanted if kept else f"**{wanted}, missed**"
