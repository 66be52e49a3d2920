"""The gallery: each mod of the library and of the examples as a picture, with code and figures."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import quire
from builder.results import part
from builder.source import ROOT
from builder.symbols import symbols

sys.path.insert(0, str(ROOT / "examples"))

import catalogue


def pictures() -> dict[str, bytes]:
    """Return the pictures by path."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, expression in (catalogue.MASKS | catalogue.SCORES).items():
            path = Path(folder) / f"{name}.png"
            quire.draw(catalogue.made(expression), catalogue.LENGTH, path=path)
            found[f"gallery/{path.name}"] = path.read_bytes()
    return found


def page() -> str:
    """Return what the page of the gallery has below its introduction."""
    masks = [entry(name, code, "masks") for name, code in catalogue.MASKS.items()]
    scores = [entry(name, code, "scores") for name, code in catalogue.SCORES.items()]
    measured = part("gallery", "masks")
    return "\n\n".join(
        [
            f"Measured by `{measured.command.split(' --')[0]}` on {measured.conditions()}.",
            "## Masks",
            *masks,
            "## Score mods",
            *scores,
        ]
    )


def entry(name: str, code: str, where: str) -> str:
    """Return one mod: name, code, figures, picture."""
    (row,) = (row for row in part("gallery", where).rows if row["case"] == name)
    known = symbols().get(f"quire.mods.{name}")
    title = f"[{name}](reference/{known.page}.md)" if known else f"`{name}`"
    origin = catalogue.ORIGINS.get(name)
    source = f", from [{origin}](source/{origin.removesuffix('.py')}.md)" if origin else ""
    facts = [f"sparsity {row['sparsity']} %"] if "sparsity" in row else []
    facts += [f"{row['ours_ms']:.1f} ms", f"{row['figure']:.1f} {row['unit']}"]
    return (
        f"### {name}\n\n{title}{source}: {', '.join(facts)}\n\n```python\n{code}\n```\n\n"
        f"```{{image}} gallery/{name}.png\n:alt: {name}\n:width: 340px\n```"
    )


def missing() -> list[str]:
    """Return the mods of the library that the gallery does not show."""
    shown = catalogue.MASKS.keys() | catalogue.SCORES.keys()
    mods: list[Any] = [each for each in symbols().values() if each.name.startswith("quire.mods.")]
    names = {each.short for each in mods if not each.is_class and each.short[0].islower()}
    return sorted(names - shown)
