"""The figures that are committed: benchmarks/results/PROCESSOR/SCRIPT.json."""

from __future__ import annotations

import ast
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder import source
from builder.source import ROOT

BENCHMARKS = ROOT / "benchmarks"
MOST_PARTS, MOST_ROWS = 2, 3
"""How much of the figures the page of a name shows."""

NAMES = {"znver4": "Zen 4", "znver5": "Zen 5"}
INSTRUCTIONS = {"znver4": "AVX-512", "znver5": "AVX-512", "x86-64-v3": "AVX2"}
"""What LLVM's names of processors stand for."""

UNKNOWN = "unknown"
"""What files have in place of a commit that is in no history."""


@dataclass(frozen=True)
class Part:
    """One part of a script, as it was measured on one processor."""

    script: str
    name: str
    machine: str  # LLVM's name of the processor
    target: str  # what the code was for; as a rule the machine
    processor: str
    kept: dict[str, Any]

    @property
    def place(self) -> str:
        """The folder of its file."""
        return self.machine if self.machine == self.target else f"{self.machine}-{self.target}"

    @property
    def label(self) -> str:
        """The processor, and the instructions that were used: `Zen 5, AVX2`."""
        known = (NAMES.get(self.machine, self.machine), INSTRUCTIONS.get(self.target, ""))
        return ", ".join(filter(None, known))

    @property
    def title(self) -> str:
        """What its table on the page of figures is called."""
        return f"{self.script}: {self.name} ({self.label})"

    @property
    def anchor(self) -> str:
        """Where that table is."""
        return re.sub(r"[^\w-]", "", self.title.lower().replace(" ", "-"))

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

    def runs(self) -> list[tuple[str, dict[str, float]]]:
        """Return the commit and the figures of each run, from the first to the last.

        Figures are those of rows that should keep a limit, by case and unit.
        """
        last = {f"{row['case']}, {row['unit']}": row["figure"] for row in self.rows}
        before = [(run["commit"], run["figures"]) for run in self.kept.get("earlier", [])]
        return [*before, (self.kept["commit"], last)]

    def conditions(self) -> str:
        """Return when and with what it was measured, as one line."""
        kept, versions = self.kept, self.kept["versions"]
        commit, changed, _ = str(kept["commit"]).partition("-dirty")
        source = f"commit {commit}" + (" with changes" if changed else "")
        return (
            f"{self.processor} ({self.label}), {kept['threads']} threads, torch "
            f"{versions['torch'].split('+')[0]}, Python {versions['python']}, {kept['date']}, "
            f"{source if commit != UNKNOWN else 'the commit was not kept'}"
        )


def misses(row: dict[str, Any]) -> bool:
    """Whether a row does not keep the limit that it should keep, if it has one."""
    if not (wanted := str(row["wanted"])):
        return False
    sign, text = wanted.split()
    figure, limit = float(row["figure"]), float(text)
    return (
        figure > limit or (sign == "<" and figure == limit)
        if sign[0] == "<"
        else (figure < limit or (sign == ">" and figure == limit))
    )


def number(row: dict[str, Any]) -> str:
    """Return the figure of a row, in bold if it misses its limit."""
    figure = float(row["figure"])
    digits = "#.3g" if row["unit"] else "#.4g"  # what has no unit is a share or a perplexity
    whole = isinstance(row["figure"], int) or abs(figure) >= 1000
    text = f"{figure:,.0f}" if whole else f"{figure:{digits}}".rstrip(".")
    return f"**{text}**" if misses(row) else text


@functools.cache
def parts() -> tuple[Part, ...]:
    """Return everything that is kept."""
    found = []
    for path in sorted((BENCHMARKS / "results").glob("*/*.json")):
        content = json.loads(path.read_text())
        for name, kept in content["parts"].items():
            target = content["target"]
            machine = content.get("machine", target)
            found.append(Part(path.stem, name, machine, target, content["processor"], kept))
    return tuple(sorted(found, key=lambda each: (each.target != each.machine, each.place)))


def named(script: str, name: str) -> list[Part]:
    """Return a part as measured on each processor; code for another than the machine comes last."""
    return [each for each in parts() if (each.script, each.name) == (script, name)]


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

    Parts that use few names come first, since their figures say most about each. Of each part,
    the figures of the newest processor are shown.
    """
    if module and module.startswith("quire.mods"):
        shown = [each for each in parts() if each.script == "gallery"]
        if named := [(each, row) for each in shown for row in each.rows if row["case"] == name]:
            return named
    own = (each for each in parts() if each.target == each.machine)
    once = {(each.script, each.name): each for each in own}.values()  # the last one stays
    using = [each for each in once if (module, name) in touched(each.script, each.name)]
    using.sort(key=lambda each: (len(touched(each.script, each.name)), each.script, each.name))
    return [
        (each, row)
        for each in using[:MOST_PARTS]
        for row in each.rows[:: max(1, len(each.rows) // MOST_ROWS)][:MOST_ROWS]
    ]
