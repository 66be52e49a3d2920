"""The gallery: each mod of the library and of the examples as a picture, with code and figures."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import quire
from builder.plots import LINES, THEMES, svg
from builder.results import named
from builder.source import ROOT
from builder.symbols import symbols

sys.path.insert(0, str(ROOT / "examples"))

import catalogue
import weight_curves
from matplotlib.figure import Figure

SAME = {"sharpen": "prob ** 2"}
"""What the benchmark of mods on probabilities calls a mod of the gallery."""


def pictures() -> dict[str, str | bytes]:
    """Return the pictures by path."""
    found: dict[str, str | bytes] = {
        f"gallery/{name}-{theme}.svg": svg(curve(mod), theme, (3.8, 2.6))
        for name, mod in catalogue.PROBS.items()
        for theme in THEMES
    }
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
            "## Learned score mods",
            LEARNED,
            *map(learned, learning()),
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
    if name in catalogue.ORIGINS:
        code = definition(name) + ("" if code == name else f"\n\n\n{code}")
    return (
        f"### {name}\n\n{shown}\n\n```python\n{code}\n```\n\n"
        f"```{{image}} gallery/{name}.png\n:alt: {name}\n:width: 340px\n```"
    )


def origin(name: str) -> str:
    """Return a link to the script that a mod is from, if it is not of the library."""
    path = catalogue.ORIGINS.get(name)
    return f", from [{path}](source/{path.removesuffix('.py')}.md)" if path else ""


def definition(name: str) -> str:
    """Return the code of a mod of an example, and the constants that it names."""
    text = (ROOT / catalogue.ORIGINS[name]).read_text()
    made: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            made[node.name] = ast.get_source_segment(text, node) or ""
        elif isinstance(node, ast.Assign):
            (target,), value = node.targets, node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for one, its in (
                zip(target.elts, value.elts, strict=True) if several else [(target, value)]
            ):
                made[ast.unparse(one)] = f"{ast.unparse(one)} = {ast.unparse(its)}"
    names = (each.id for each in ast.walk(ast.parse(made[name])) if isinstance(each, ast.Name))
    constants = [made[each] for each in sorted(set(names)) if each.isupper() and each in made]
    return ("\n\n\n" if made[name].startswith("def ") else "\n").join([*constants, made[name]])


def prob(name: str, mod: Callable[..., object]) -> str:
    """Return one mod on probabilities: name, figures, code, curve."""
    times = [
        f"{row['case'].partition(', ')[2]}: {row['figure']:.2f} x as fast as no mod ({part.label})"
        for part in named("beyond", "prob_mods")
        for row in part.rows
        if row["case"].partition(", ")[0] == SAME.get(name)
    ] or ["No figure of it is kept."]
    shown = "\\\n".join([f"`{name}`{origin(name)}", *times])
    drawn = "\n\n".join(
        f"````{{container}} only-{theme}\n```{{image}} gallery/{name}-{theme}.svg\n"
        f":alt: What {name} makes of a probability\n:width: 365px\n```\n````"
        for theme in THEMES
    )
    return f"### {name}\n\n{shown}\n\n```python\n{inspect.getsource(mod)}```\n\n{drawn}"


def curve(mod: Callable[..., torch.Tensor]) -> Callable[[Figure], None]:
    """Return what draws a mod on probabilities, beside the line of no mod."""
    probs = torch.linspace(0.002, 0.998, 499)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], ":", color=LINES[8], linewidth=1, label="no mod")
        axes.plot(probs, weight_curves.prob_curve(mod, probs), color=LINES[0])
        axes.set(xlabel="probability", ylabel="after the mod", xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper left")

    return draw


LEARNED = (
    "Modules whose parameters are trained. They start as the mod of the same kind, or add 0, and "
    "then look as their parameters make them."
)


def learning() -> list[str]:
    """Return the names of learned modules of the library."""
    mods = (each for each in symbols().values() if each.module == "quire.mods")
    return sorted(each.short for each in mods if each.is_class and each.short[:7] == "Learned")


def learned(name: str) -> str:
    """Return one learned module: name, what it is, and the mod of its kind."""
    known = symbols()[f"quire.mods.{name}"]
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("Learned")).lower()
    return f"- [{name}](reference/{known.page}.md), like [{kind}](#{kind}): {known.summary}"


KINDS = {"Mask", "MaskMod", "ScoreChange", "ScoreMod", "ScoreModule"}
"""What mods are made of, and no mods."""


def missing() -> list[str]:
    """Return the mods of the library and of the examples that the gallery does not show."""
    shown = catalogue.MASKS.keys() | catalogue.SCORES.keys() | catalogue.PROBS.keys()
    shown |= set(learning())
    mods: list[Any] = [each for each in symbols().values() if each.module == "quire.mods"]
    names = {each.short for each in mods} - KINDS
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
