"""Which errors code may raise: those that it names, and those of all that it calls.

Functions are followed by their names. Of a class that is called, its constructor is followed. Of a
class that is only named, as in an annotation, a method is followed if code that was followed uses
an attribute of that name. Errors in `except` and `isinstance` are not raised there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Set
from typing import NamedTuple

from builder.source import Drawn, drawn_errors, modules, resolve

Place = tuple[str, str]
"""A module, and a name in it: a function, a class, or `Class.method`."""

CONSTRUCTORS = {"__new__", "__init__", "__post_init__"}
COPIES = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"}
"""Methods that only copying and pickling use. Operators use others without naming them."""

CHECKS = {"isinstance", "issubclass", "cast"}
ERRORS = "quire.errors"


class Uses(NamedTuple):
    """What code uses: functions and classes that it calls, classes it names, attributes."""

    called: frozenset[Place]
    named: frozenset[Place]
    attributes: frozenset[str]


class _Reader(ast.NodeVisitor):
    """Collects names as they are written, apart for those that are evaluated and other ones."""

    def __init__(self, foreign: frozenset[str] = frozenset()) -> None:
        self.foreign = foreign  # modules that are not of quire
        self.called: set[str] = set()
        self.named: set[str] = set()
        self.attributes: set[str] = set()

    def name_only(self, node: ast.AST | None) -> None:
        """Collect what is an annotation or a pattern."""
        if node is not None:
            inner = _Reader()
            inner.visit(node)
            self.named |= inner.called | inner.named

    def visit_Name(self, node: ast.Name) -> None:
        self.called.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (text := _dotted(node)):
            self.attributes.add(node.attr)
            self.generic_visit(node)
            return
        first, *rest = text.split(".")
        self.called.add(text)
        self.named.add(first)
        if first not in self.foreign:
            self.attributes.update(rest)

    def visit_arg(self, node: ast.arg) -> None:
        self.name_only(node.annotation)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.name_only(node.returns)
        for each in (*node.decorator_list, node.args, *node.body):
            self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.name_only(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in CHECKS and len(node.args) == 2:
            checked, kinds = node.args[:: 1 if node.func.id != "cast" else -1]
            self.visit(checked)
            self.name_only(kinds)
        else:
            self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.name_only(node.cls)
        for each in (*node.patterns, *node.kwd_patterns):
            self.visit(each)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for each in node.body:
            self.visit(each)


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` as it is written; nothing for attributes of what is no name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _definition(place: Place) -> ast.FunctionDef | ast.ClassDef | None:
    return modules()[place[0]].definitions.get(place[1].partition(".")[0])


@functools.cache
def methods(place: Place) -> dict[str, tuple[Place, ast.FunctionDef]]:
    """Return the methods of a class by name, with those that it inherits, and where they are."""
    node = _definition(place)
    if not isinstance(node, ast.ClassDef):
        return {}
    found: dict[str, tuple[Place, ast.FunctionDef]] = {}
    for base in reversed(node.bases):
        for above in _places(place, {_dotted(base)}):
            found |= methods(above)
    own = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return found | {each.name: ((place[0], f"{node.name}.{each.name}"), each) for each in own}


def _places(here: Place, texts: set[str]) -> Iterator[Place]:
    """Yield where names lie that are written in a place."""
    module, owner = modules()[here[0]], here[1].partition(".")[0]
    for text in texts:
        first, _, rest = text.partition(".")
        if first in ("self", "cls") and rest:
            yield here[0], f"{owner}.{rest.split('.')[0]}"
        elif first in module.definitions:
            yield here[0], ".".join([first, *rest.split(".")[:1]]) if rest else first
        elif first in module.imports:
            found = resolve(module.imports[first] + (f".{rest}" if rest else ""))
            yield from [found] if found else []


@functools.cache
def _foreign(module: str) -> frozenset[str]:
    """Return the names of modules that a module imports and that are not of quire."""
    imports = (each for each in ast.walk(modules()[module].tree) if isinstance(each, ast.Import))
    names = (
        alias.asname or alias.name.partition(".")[0] for each in imports for alias in each.names
    )
    return frozenset(names) - {"quire"}


@functools.cache
def uses(place: Place) -> Uses:
    """Return what a function or method uses; of a class, what its body does beside its methods."""
    node = _definition(place)
    reader = _Reader(_foreign(place[0]))
    if isinstance(node, ast.ClassDef) and "." in place[1]:
        found = methods((place[0], node.name)).get(place[1].partition(".")[2].split(".")[0])
        if found and found[0] != place:
            return Uses(frozenset({found[0]}), frozenset(), frozenset())
        node = found[1] if found else None
    body = node.body if isinstance(node, ast.ClassDef) else [node] if node else []
    for each in body:
        if not isinstance(node, ast.ClassDef) or not isinstance(each, ast.FunctionDef):
            reader.visit(each)
    named = set(_places(place, reader.called | reader.named))
    classes = {(module, name.partition(".")[0]) for module, name in named}
    return Uses(
        frozenset(_places(place, reader.called)),
        frozenset(each for each in classes if isinstance(_definition(each), ast.ClassDef)),
        frozenset(reader.attributes),
    )


def reached(start: Place) -> set[Place]:
    """Return the functions, methods and classes that are used from a place, and errors."""
    seen, todo = set[Place](), [start]
    if isinstance(_definition(start), ast.ClassDef) and "." not in start[1]:
        todo += [place for place, _ in methods(start).values()]
    classes, attributes = set[Place](), set[str]()
    while todo:
        here = todo.pop()
        if here in seen or here[0] not in modules():
            continue
        seen.add(here)
        if here[0] == ERRORS:
            continue
        found = uses(here)
        todo += found.called
        if isinstance(_definition(here), ast.ClassDef) and "." not in here[1]:
            todo += [where for name, (where, _) in methods(here).items() if name in CONSTRUCTORS]
        fresh, more = found.named - classes, found.attributes - attributes
        classes |= fresh
        attributes |= more
        todo += _methods_named(fresh, attributes) + _methods_named(classes, more)
    return seen


def _methods_named(classes: Set[Place], names: Set[str]) -> list[Place]:
    """Return methods of classes that are used by name, or by operators."""
    return [
        where
        for each in classes
        for name, (where, node) in methods(each).items()
        if is_operator(name) or (name in names and not _of_class(node))
    ]


def is_operator(name: str) -> bool:
    """Whether Python or PyTorch calls a method, so that no code names it."""
    return name.startswith("__") and name not in CONSTRUCTORS | COPIES


def _of_class(node: ast.FunctionDef) -> bool:
    """Whether a method is called with its class, so that following `Class.method` is enough."""
    return any(ast.unparse(each) in ("classmethod", "staticmethod") for each in node.decorator_list)


def raises(module: str, name: str) -> list[Drawn]:
    """Return the errors that code names, in a function and in all that it calls, by the tree."""
    named = {each for where, each in reached((module, name)) if where == ERRORS}
    return [line for line in drawn_errors().values() if line.name in named]
