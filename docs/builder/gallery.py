"""The gallery: each mod of the library and of the examples as a picture, with code and figures."""

from __future__ import annotations

import ast
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quire
from builder.results import named
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
    measured = named("gallery", "masks")
    where = "; ".join(each.conditions() for each in measured)
    return "\n\n".join(
        [
            f"Measured by `{measured[0].command.split(' --')[0]}` on {where}.",
            "## Masks",
            *masks,
            "## Score mods",
            *scores,
            "## Mods on probabilities",
            *(prob(name, mod) for name, mod in catalogue.PROBS.items()),
        ]
    )


def entry(name: str, code: str, where: str) -> str:
    """Return one mod: name, code, figures, picture."""
    measured = [
        (each, row) for each in named("gallery", where) for row in each.rows if row["case"] == name
    ]
    known = symbols().get(f"quire.mods.{name}")
    title = f"[{name}](reference/{known.page}.md)" if known else f"`{name}`"
    facts = [f"sparsity {row['sparsity']} %" for _, row in measured[:1] if "sparsity" in row]
    times = [
        f"{row['ours_ms']:.1f} ms, {row['figure']:.1f} {row['unit']} ({part.label})"
        for part, row in measured
    ] or ["No figure of it is kept."]
    shown = "\\\n".join([f"{title}{origin(name)}: {', '.join(facts)}".rstrip(": "), *times])
    return (
        f"### {name}\n\n{shown}\n\n```python\n{code}\n```\n\n"
        f"```{{image}} gallery/{name}.png\n:alt: {name}\n:width: 340px\n```"
    )


def origin(name: str) -> str:
    """Return a link to the script that a mod is from, if it is not of the library."""
    path = catalogue.ORIGINS.get(name)
    return f", from [{path}](source/{path.removesuffix('.py')}.md)" if path else ""


def prob(name: str, mod: Callable[..., object]) -> str:
    """Return one mod on probabilities: name, code, curve."""
    return (
        f"### {name}\n\n`{name}`{origin(name)}\n\n```python\n{inspect.getsource(mod)}```\n\n"
        "```{image} weight_curves.svg\n:alt: The right curves are those of mods on probabilities\n"
        ":width: 620px\n```"
    )


def missing() -> list[str]:
    """Return the mods of the library and of the examples that the gallery does not show."""
    shown = catalogue.MASKS.keys() | catalogue.SCORES.keys() | catalogue.PROBS.keys()
    mods: list[Any] = [each for each in symbols().values() if each.module == "quire.mods"]
    names = {each.short for each in mods if not each.is_class and each.short[0].islower()}
    return sorted((names | written()) - shown)


def written() -> set[str]:
    """Return the names of functions in examples that have the arguments of a mod."""
    files = (path.read_text() for path in (ROOT / "examples").glob("*.py"))
    nodes = (node for text in files for node in ast.walk(ast.parse(text)))
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and {"q_idx", "kv_idx"} <= {each.arg for each in node.args.args}
    }
