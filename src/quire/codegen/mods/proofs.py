"""Which loads need no bounds check, and which clamps can be dropped.

An index that is a sum of positions moves by the same step from key to key. If it is in range at the
first and the last key of a loop, it is in range at all of them. Both ends are checked before the
loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.codegen.llvm.builder import Value
from quire.codegen.llvm.types import I1, I64
from quire.codegen.mods.loads import Lanes, row_of
from quire.codegen.mods.lower import FASTEST, KEY, Scope, clamped, depends_on_key, rate
from quire.ir.graph import Node, walk


def provable(roots: Sequence[Node]) -> list[Node]:
    """Loads whose indices are in range at all keys if they are in range at the first and the last.

    Also the clamps in these indices: they do nothing at any key if they do nothing at both ends.
    """
    known: dict[Node, int] = {}
    paces: dict[Node, float] = {}
    found: dict[Node, None] = {}
    for node in walk(*roots):
        if (
            node.op == "load"
            and rate(node, known) & KEY
            and all(_pace(arg, paces) <= FASTEST for arg in node.args)
        ):
            clamps = (below for below in walk(*node.args) if below.op in ("min", "max"))
            found.update(dict.fromkeys(below for below in clamps if depends_on_key(below)))
            found[node] = None
    return list(found)


def distinct(nodes: Sequence[Node]) -> list[Node]:
    """One node for each proof that is needed: the elements of a row need a single one."""
    return list({(node.op, node.payload, row_of(node)): node for node in nodes}.values())


def _pace(node: Node, known: dict[Node, float]) -> float:
    """The largest step of an index from key to key; infinite if its steps differ.

    Steps are equal for a sum of positions, perhaps clamped, and of what does not depend on the key.
    """
    if node not in known:
        known[node] = math.inf
        if node.dtype in (torch.int32, torch.int64):
            known[node] = _integer_pace(node, known)
    return known[node]


def _integer_pace(node: Node, known: dict[Node, float]) -> float:
    if not depends_on_key(node):
        return 0
    if node.op == "input":
        return 1
    if node.op in ("min", "max"):
        both = all(map(depends_on_key, node.args))
        return math.inf if both else _pace(clamped(node)[0], known)
    if node.op in ("add", "sub", "neg", "cast"):
        return sum(_pace(arg, known) for arg in node.args)
    return math.inf


def proof(scope: Scope, node: Node) -> Value | None:
    """Whether a load is in range, or a clamp does nothing, in all lanes; None if unknown."""
    f, result = scope.f, scope.f.value(True, I1)
    if node.op != "load":
        inner, limit = map(scope.lower, clamped(node))
        if inner.scalar is None or limit.scalar is None or limit.step:
            return None
        low, high = _ends(scope, inner)
        bound = f.convert(limit.scalar, I64)
        return high <= bound if node.op == "min" else low >= bound
    assert isinstance(node.payload, int)
    for size, arg in zip(scope.captures[node.payload].sizes, row_of(node), strict=False):
        index = scope.lower(arg)
        if index.scalar is None:
            return None
        low, high = _ends(scope, index)
        result = result & (low >= 0) & (high < size)
    return result


def _ends(scope: Scope, lanes: Lanes) -> tuple[Value, Value]:
    """The smallest and the largest of numbers with a fixed step."""
    assert lanes.scalar is not None, "irregular lanes have no ends"
    first = scope.f.convert(lanes.scalar, I64)
    last = first + lanes.step * (scope.lanes - 1)
    return (first, last) if lanes.step >= 0 else (last, first)
