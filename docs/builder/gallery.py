"""The gallery: each mod of the library and of the examples as a picture, with code and figures."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import quire
from builder.charts import LINES, THEMES, svg
from builder.results import named
from builder.source import ROOT
from builder.symbols import Symbol, symbols
from quire.mods import Mask, ScoreChange, ScoreModule

sys.path.insert(0, str(ROOT / "examples"))

import catalogue
import weight_curves

CURVES = {"weights": catalogue.WEIGHTS, "probs": catalogue.PROBS}
"""Mods that are drawn as curves, by the part of the benchmark that times them."""

KINDS = {"masks": catalogue.MASKS, "scores": catalogue.SCORES, **CURVES}
"""All mods of the gallery."""

TITLES = {
    "masks": "Masks",
    "scores": "Score mods",
    "weights": "Weights",
    "probs": "Mods on probabilities",
}


def pictures() -> dict[str, str | bytes]:
    """Return the pictures by path."""
    found: dict[str, str | bytes] = {}
    for kind, mods in CURVES.items():
        for name, expression in mods.items():
            drawn = curve(kind, catalogue.made(expression))
            found |= {f"gallery/{name}-{x}.svg": svg(drawn, x, (3.8, 2.6)) for x in THEMES}
    with tempfile.TemporaryDirectory() as folder:
        for name, expression in (catalogue.MASKS | catalogue.SCORES).items():
            path = Path(folder) / f"{name}.png"
            quire.draw(catalogue.made(expression), catalogue.LENGTH, path=path)
            found[f"gallery/{path.name}"] = path.read_bytes()
    return found


def curve(kind: str, mod: Callable[..., torch.Tensor]) -> Callable[[Figure], None]:
    """Return what draws a weight by score, or a mod on probabilities beside the line of no mod."""
    scores, probs = torch.linspace(-3, 3, 241), torch.linspace(0.002, 0.998, 499)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if kind == "weights":
            axes.plot(scores, weight_curves.weight_curve(mod, scores), color=LINES[0])
            axes.set(xlabel="score", ylabel="weight", ylim=(-0.1, 4))
            return
        axes.plot([0, 1], [0, 1], ":", color=LINES[8], linewidth=1, label="no mod")
        axes.plot(probs, weight_curves.prob_curve(mod, probs), color=LINES[0])
        axes.set(xlabel="probability", ylabel="after the mod", xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper left")

    return draw


def page() -> str:
    """Return what the page of the gallery has below its introduction."""
    sections = []
    for kind, mods in KINDS.items():
        entries = (entry(name, code, kind) for name, code in mods.items())
        where = "; ".join(dict.fromkeys(part.conditions() for part in named("gallery", kind)))
        command = f"Measured by `python benchmarks/gallery.py --only {kind}` on {where}."
        sections += [f"## {TITLES[kind]}", *([command] if where else []), *entries]
    return "\n\n".join([*sections, "## Names of attention-gym", RENAMED, renamed()])


def entry(name: str, expression: str, kind: str) -> str:
    """Return one mod: name, figures, code, picture."""
    rows = [(part, row) for part in named("gallery", kind) for row in part.rows]
    measured = [(part, row) for part, row in rows if row["case"] == name]
    known = next((each for each in public() if each.short == name), None)
    title = f"[{name}](reference/{known.page}.md)" if known else f"`{name}`"
    facts = [f"sparsity {row['sparsity']} %" for _, row in measured[-1:] if "sparsity" in row]
    times = [
        f"{row['ours_ms']:.1f} ms, {row['figure']:.1f} {row['unit']} ({part.label})"
        for part, row in measured
    ]
    title += origin(name) + (f": {known.summary}" if known else "")
    shown = "\\\n".join([title, *facts, *times])
    made = [expression] if expression != name else []
    code = "\n\n\n".join([*definition(name, expression), *made]) or name
    return f"### {name}\n\n{shown}\n\n{picture(name, kind)}\n\n```python\n{code}\n```"


def picture(name: str, kind: str) -> str:
    """Return the picture of a mod; a curve has one for each theme."""
    if kind not in CURVES:
        return f"```{{image}} gallery/{name}.png\n:alt: {name}\n:width: 340px\n```"
    return "\n\n".join(
        f"````{{container}} only-{theme}\n```{{image}} gallery/{name}-{theme}.svg\n"
        f":alt: What {name} makes of a {'score' if kind == 'weights' else 'probability'}\n"
        ":width: 340px\n```\n````"
        for theme in THEMES
    )


def origin(name: str) -> str:
    """Return a link to the script that a mod is from, if it is not of the library."""
    path = catalogue.ORIGINS.get(name)
    return f", from [{path}](source/{path.removesuffix('.py')}.md)" if path else ""


# Code


def definition(name: str, expression: str) -> list[str]:
    """Return the code of a mod, and the constants that it names."""
    if name in catalogue.ORIGINS:
        return written(name)
    mod = catalogue.made(expression)
    if isinstance(mod, ScoreModule):
        return [bare(type(mod).forward)]
    own = mod.function.__name__.strip("_") == name
    return [bare(mod.function)] if own else []


def bare(function: Callable[..., object]) -> str:
    """Return the code of a function without decorators and docstring."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.FunctionDef)
    if ast.get_docstring(node) is not None:
        del lines[node.body[0].lineno - 1 : node.body[0].end_lineno]
    return "\n".join(lines[node.lineno - 1 :])


def written(name: str) -> list[str]:
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
    function = made[name].startswith("def ")
    return [*constants, made[name]] if function else ["\n".join([*constants, made[name]])]


# What there is

MADE = {"Mask", "ScoreChange", "ScoreChange | ScoreModule", "_Mod"}
"""What functions return that make mods."""

GYM = "quire.mods.attention_gym"
RENAMED = "`quire.mods.attention_gym` has mods of above under the names that attention-gym uses."


def is_mod(value: Any) -> bool:
    """Whether a public value is a mod, a class of mods with parameters, or makes a mod."""
    if inspect.isclass(value):
        return issubclass(value, ScoreModule) and value is not ScoreModule
    made = getattr(value, "__annotations__", {}).get("return")
    return isinstance(value, Mask | ScoreChange) or (inspect.isfunction(value) and made in MADE)


def public() -> list[Symbol]:
    """Return the public names of mods. Of two names of one mod, the longer is first."""
    found = [each for each in symbols().values() if is_mod(each.value)]
    return sorted(found, key=lambda each: (each.module == GYM, -each.name.count(".")))


def renamed() -> str:
    """Return a table of attention-gym's names, each with the mods of the gallery that it is."""
    own = {each.short: each for each in public() if each.module != GYM}
    lines = ["| attention-gym | quire |", "|---|---|"]
    for each in sorted(set(public()) - set(own.values()), key=lambda one: one.name):
        if each.module == GYM:
            same = [name for name, mod in own.items() if mod.value is each.value]
            meant = same or [x for x in re.findall(r"`(\w+)`", each.summary) if x in own]
            links = " and ".join(f"[{name}](#{name})" for name in meant)
            assert links, f"the docstring of {each.name} names no mod that it is made of"
            lines.append(f"| [{each.short}](reference/{each.page}.md) | {links} |")
    return "\n".join(lines)


def of_examples() -> set[str]:
    """Return the names of mods that the scripts of examples/ define."""
    found = set()
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                places = {each.arg for each in node.args.args}
                found |= {node.name} if {"b", "h", "q_idx"} <= places else set()
        values = vars(importlib.import_module(path.stem))
        found |= {name for name, value in values.items() if is_mod(value)}
    return found


def missing() -> list[str]:
    """Return the mods of the library and of the examples that the gallery does not show."""
    shown = {name for mods in KINDS.values() for name in mods}
    names = {each.short for each in public() if each.module != GYM}
    return sorted((names | of_examples()) - shown)
