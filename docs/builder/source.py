"""What the source of quire says about itself: modules, what they stand on, and the tree of errors.

Nothing is imported here. Modules are parsed, and names are followed through their imports.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "quire"


@dataclass(frozen=True)
class Module:
    """A file of quire: its dotted name, its path and its parsed content."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def doc(self) -> str:
        """The docstring."""
        return ast.get_docstring(self.tree) or ""

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> the dotted name of quire that it stands for."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire"):
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            elif isinstance(node, ast.Import):
                quires = [a for a in node.names if a.name.split(".")[0] == "quire"]
                found |= {a.asname or "quire": a.name if a.asname else "quire" for a in quires}
        return found

    @functools.cached_property
    def definitions(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        """The functions and classes at the top of the file."""
        kinds = (ast.FunctionDef, ast.ClassDef)
        return {node.name: node for node in self.tree.body if isinstance(node, kinds)}

    @functools.cached_property
    def stated(self) -> dict[str, str]:
        """Constant -> the docstring that stands below it."""
        found = {}
        for node, below in zip(self.tree.body, self.tree.body[1:], strict=False):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                targets = node.targets if isinstance(node, ast.Assign) else []
                targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
                found |= {t.id: text.value for t in targets if isinstance(t, ast.Name)}
        return found


@functools.cache
def modules() -> Mapping[str, Module]:
    """Return all modules of quire by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text()))
    return found


def module_of(name: str) -> str | None:
    """Return the module that a dotted name lies in: `quire.ir.ops.OPS` lies in `quire.ir.ops`."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def stands_on(module: str) -> list[str]:
    """Return the modules of quire that a module imports."""
    found = {module_of(name) for name in modules()[module].imports.values()}
    return sorted(name for name in found if name and name != module)


@functools.cache
def _users() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in modules():
        for below in stands_on(name):
            found.setdefault(below, []).append(name)
    return found


def used_by(module: str) -> list[str]:
    """Return the modules of quire that import a module."""
    return sorted(_users().get(module, []))


# Errors


@dataclass(frozen=True)
class Drawn:
    """A line of the tree of errors: what it means, and what else it derives from."""

    name: str
    meaning: str
    bases: str


@functools.cache
def drawn_errors() -> dict[str, Drawn]:
    """Return the tree of errors as the docstring of `quire.errors` draws it."""
    found: dict[str, Drawn] = {}
    above: list[str] = []
    for line in modules()["quire.errors"].doc.split("\n\n")[1].splitlines():
        match = re.fullmatch(r"([│├└─ ]*)(\w+)(?:\s{2,}(.+?))?(?:\s{2,}(.+))?", line)
        if match is None:
            continue
        indent, name, meaning, bases = match.groups()
        above[(len(indent) - 4) // 4 :] = [name]
        if bases == "(as above)":
            bases = found[above[-2]].bases
        found[name] = Drawn(name, meaning or "", bases or "")
    return found


def resolve(name: str) -> tuple[str, str] | None:
    """Return the module and the name where a dotted name is defined, through re-exports."""
    for _ in range(8):
        module = module_of(name)
        if module is None or module == name:
            return None
        rest = name[len(module) + 1 :]
        first = rest.split(".")[0]
        if first in modules()[module].definitions:
            return module, rest
        if first not in modules()[module].imports:
            return None
        name = modules()[module].imports[first] + rest[len(first) :]
    return None
