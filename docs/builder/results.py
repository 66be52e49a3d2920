"""The figures that are committed: benchmarks/results/PROCESSOR/SCRIPT.json."""

from __future__ import annotations

import ast
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder import source
from builder.source import ROOT

BENCHMARKS = ROOT / "benchmarks"
MOST_PARTS, MOST_ROWS = 2, 3
"""How much of the figures the page of a name shows."""


@dataclass(frozen=True)
class Part:
    """One part of a script, as it was measured on one processor."""

    script: str
    name: str
    target: str
    processor: str
    kept: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows: case, figure, unit, wanted, and more by name."""
        rows: list[dict[str, Any]] = self.kept["rows"]
        return rows

    @property
    def command(self) -> str:
        """The command that measures it again."""
        return str(self.kept["command"])

    def figure(self, case: str) -> float:
        """Return the figure of a case."""
        (found,) = (row["figure"] for row in self.rows if row["case"] == case)
        return float(found)

    def conditions(self) -> str:
        """Return when and with what it was measured, as one line."""
        kept, versions = self.kept, self.kept["versions"]
        return (
            f"{self.processor} ({self.target}), {kept['threads']} threads, torch "
            f"{versions['torch'].split('+')[0]}, Python {versions['python']}, {kept['date']}, "
            f"commit {kept['commit']}"
        )


@functools.cache
def parts() -> tuple[Part, ...]:
    """Return everything that is kept."""
    found = []
    for path in sorted((BENCHMARKS / "results").glob("*/*.json")):
        content = json.loads(path.read_text())
        for name, kept in content["parts"].items():
            found.append(Part(path.stem, name, content["target"], content["processor"], kept))
    return tuple(found)


def part(script: str, name: str, target: str = "znver5") -> Part:
    """Return one part on one processor."""
    wanted = (script, name, target)
    (found,) = (each for each in parts() if (each.script, each.name, each.target) == wanted)
    return found


@functools.cache
def touched(script: str, name: str) -> frozenset[tuple[str, str]]:
    """Return what a part of a script uses of quire: pairs of module and name."""
    definitions, imports = _benchmark(script)
    seen, todo, found = set[str](), [name], set[tuple[str, str]]()
    while todo:
        here = todo.pop()
        if here in seen or here not in definitions:
            continue
        seen.add(here)
        for node in ast.walk(definitions[here]):
            text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            first, _, rest = text.partition(".")
            if not rest:
                todo.append(first)
            if first in imports:
                where = source.resolve(imports[first] + (f".{rest}" if rest else ""))
                found |= {where} if where else set()
    return frozenset(found)


@functools.cache
def _benchmark(script: str) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """Return the functions and constants of a script and of what it shares, and its imports."""
    tree = ast.parse((BENCHMARKS / f"{script}.py").read_text())
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("_"):
            path = BENCHMARKS / f"{node.module}.py"
            if path.exists() and path.stem not in ("_race", "_results", "_limits"):
                more, known = _benchmark(path.stem)
                definitions |= more
                imports |= known
    imports |= source.Module(script, Path(script), tree).imports
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign):
            names = (each.id for each in node.targets if isinstance(each, ast.Name))
            definitions |= dict.fromkeys(names, node)
    return definitions, imports


def rows_about(module: str | None, name: str) -> list[tuple[Part, dict[str, Any]]]:
    """Return rows about a name: its own in the gallery, or some of the parts that use it.

    Parts that use few names come first, since their figures say most about each.
    """
    if module and module.startswith("quire.mods"):
        shown = [each for each in parts() if each.script == "gallery"]
        if own := [(each, row) for each in shown for row in each.rows if row["case"] == name]:
            return own
    using = [each for each in parts() if (module, name) in touched(each.script, each.name)]
    using.sort(key=lambda each: len(touched(each.script, each.name)))
    return [
        (each, row)
        for each in using[:MOST_PARTS]
        for row in each.rows[:: max(1, len(each.rows) // MOST_ROWS)][:MOST_ROWS]
    ]
