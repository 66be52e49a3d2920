"""Graph to graph: the same value with fewer nodes.

The pass is a table of rules. A rule takes a node whose operands are already simple, and returns a
simpler node or None. Rules keep every value in every dtype, also NaN and signed zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch

from quire.ir.graph import Node, cast, const, rebuild, rewrite
from quire.ir.interpret import LEAVES, interpret

Rule: TypeAlias = Callable[[Node], Node | None]


def _is(node: Node, value: bool | int) -> bool:
    return node.op == "const" and node.payload == value


def _exact(node: Node) -> bool:
    """Whether arithmetic on this dtype is exact, so that x + 0 and x * 1 are x."""
    return not node.dtype.is_floating_point


def fold(node: Node) -> Node | None:
    """An op on constants is a constant."""
    for arg in node.args:
        if arg.op != "const":
            return None
    if node.op in ("floordiv", "mod") and _exact(node) and _is(node.args[1], 0):
        return None
    return const(interpret(node, {}).item(), node.dtype)


def widened_first(node: Node) -> Node | None:
    """Two casts are one if the first keeps every value."""
    if node.op != "cast" or node.args[0].op != "cast":
        return None
    wide = node.args[0]
    (inner,) = wide.args
    return cast(inner, node.dtype) if _keeps_values(inner.dtype, wide.dtype) else None


def _keeps_values(dtype: torch.dtype, wider: torch.dtype) -> bool:
    if torch.promote_types(dtype, wider) != wider:
        return False
    return dtype == torch.bool or dtype.is_floating_point == wider.is_floating_point


def neutral(node: Node) -> Node | None:
    """x + 0, x - 0, x * 1, x // 1 of integers; x * 1.0 of floats."""
    if len(node.args) != 2:
        return None
    a, b = node.args
    match node.op:
        case "add" if _exact(node) and _is(a, 0):
            return b
        case "add" | "sub" if _exact(node) and _is(b, 0):
            return a
        case "mul" if _is(b, 1):
            return a
        case "mul" if _is(a, 1):
            return b
        case "div" if _is(b, 1):
            return a
        case "floordiv" if _exact(node) and _is(b, 1):
            return a
    return None


def logic(node: Node) -> Node | None:
    """and, or and not of truth values: x & True, x | x, ~~x and the like."""
    if node.op == "not" and node.args[0].op == "not":
        return node.args[0].args[0]
    if node.dtype != torch.bool or node.op not in ("and", "or"):
        return None
    a, b = node.args
    if a is b:
        return a
    absorbing = node.op == "or"
    for this, other in ((a, b), (b, a)):
        if this.op == "const":
            return this if this.payload is absorbing else other
    return None


def choice(node: Node) -> Node | None:
    """where with a constant condition, or with equal operands."""
    if node.op != "where":
        return None
    condition, a, b = node.args
    if condition.op == "const":
        return a if condition.payload else b
    return a if a is b else None


def idempotent(node: Node) -> Node | None:
    """min(x, x) and max(x, x)."""
    return node.args[0] if node.op in ("min", "max") and node.args[0] is node.args[1] else None


def comparison(node: Node) -> Node | None:
    """An integer or bool compared with itself."""
    if node.op not in ("lt", "le", "eq") or node.args[0] is not node.args[1]:
        return None
    return const(node.op != "lt", torch.bool) if _exact(node.args[0]) else None


RULES: dict[str, tuple[Rule, ...]] = {
    "cast": (fold, widened_first),
    "add": (fold, neutral),
    "sub": (fold, neutral),
    "mul": (fold, neutral),
    "div": (fold, neutral),
    "floordiv": (fold, neutral),
    "min": (fold, idempotent),
    "max": (fold, idempotent),
    "lt": (fold, comparison),
    "le": (fold, comparison),
    "eq": (fold, comparison),
    "and": (fold, logic),
    "or": (fold, logic),
    "not": (fold, logic),
    "where": (fold, choice),
}
"""The rules that can apply to an op. Every other op is only folded."""


@functools.lru_cache(maxsize=4096)
def simplest(node: Node) -> Node:
    """Rewrite a node with simple operands until no rule applies."""
    while node.op not in _ATOMS:
        for rule in RULES.get(node.op, (fold,)):
            better = rule(node)
            if better is not None:
                node = better
                break
        else:
            return node
    return node


_ATOMS = LEAVES - {"cast"}


@functools.lru_cache(maxsize=4096)  # the same masks are bounded again and again
def applied(op: str, args: tuple[Node, ...], dtype: torch.dtype) -> Node:
    """An op on nodes, in its simplest form."""
    return simplest(Node(op, args, dtype))


def simplify(root: Node) -> Node:
    """The whole graph in its simplest form."""
    return rewrite(root, lambda node, args: simplest(rebuild(node, args)))
