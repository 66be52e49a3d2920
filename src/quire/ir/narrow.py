"""Graph to graph: 32-bit integers wherever the values provably fit.

Indices mean int64. Vector units have twice the lanes for int32 and convert it to float at once, so
each integer node whose range and whose operands' ranges fit is rebuilt in int32. Ranges come from
what the inputs can be; an op without a rule here, or a load, has the range of its dtype.

    q_idx < 2**20:   q_idx - kv_idx          int32
                     q_idx * 4096 + kv_idx   int64, as it reaches 2**32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from quire.ir.graph import Node, cast, rebuild, walk

Range: TypeAlias = tuple[int, int]
"""The smallest and the largest value."""

INT32: Range = (-(2**31), 2**31 - 1)


def _corners(combine: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        values = [combine(x, y) for x in a for y in b]
        return min(values), max(values)

    return rule


def _divided(a: Range, b: Range) -> Range | None:
    return _corners(lambda x, y: x // y)(a, b) if b[0] > 0 else None


def _remainder(a: Range, b: Range) -> Range | None:
    return (0, b[1] - 1) if b[0] > 0 else None


def _absolute(a: Range) -> Range:
    least = 0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return least, max(abs(a[0]), abs(a[1]))


RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(lambda x, y: x * y),
    "floordiv": _divided,
    "mod": _remainder,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _absolute,
    "sign": lambda a: (-1, 1),
    "bits": lambda a: (0, max(a[1], 0).bit_length()),
    "where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
}
"""The range of an op from the ranges of its operands; None where it can be anything."""


def ranges(root: Node, inputs: Mapping[str, Range]) -> dict[Node, Range]:
    """A range for every integer or bool node below `root`; never too small."""
    found: dict[Node, Range] = {}
    for node in walk(root):
        if not node.dtype.is_floating_point:
            found[node] = _range(node, found, inputs)
    return found


def _range(node: Node, found: dict[Node, Range], inputs: Mapping[str, Range]) -> Range:
    limits = (0, 1) if node.dtype == torch.bool else _limits(node.dtype)
    result: Range | None = None
    if node.op == "input":
        result = inputs[str(node.payload)]
    elif node.op == "const":
        assert isinstance(node.payload, int)
        result = (node.payload, node.payload)
    elif node.op == "cast":
        result = found.get(node.args[0])
    elif node.op in RULES and all(arg in found for arg in node.args):
        result = RULES[node.op](*(found[arg] for arg in node.args))
    if result is None or result[0] < limits[0] or result[1] > limits[1]:
        return limits  # it may wrap, or nothing is known
    return result


def _limits(dtype: torch.dtype) -> Range:
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def narrow(root: Node, inputs: Mapping[str, Range]) -> Node:
    """`root` with int64 nodes that fit rebuilt in int32. Its own dtype stays."""
    found = ranges(root, inputs)
    new: dict[Node, Node] = {}
    for node in walk(root):
        new[node] = _narrowed(node, found, new)
    return cast(new[root], root.dtype)


def _fits(node: Node, found: dict[Node, Range]) -> bool:
    return node.dtype == torch.int64 and INT32[0] <= found[node][0] and found[node][1] <= INT32[1]


def _narrowed(node: Node, found: dict[Node, Range], new: dict[Node, Node]) -> Node:
    wide = [arg for arg in node.args if arg.dtype == torch.int64]
    small = all(_fits(arg, found) for arg in wide)
    if node.op == "load":
        return rebuild(node, tuple(new[arg] for arg in node.args))
    if node.op == "cast" and small and wide:
        return cast(new[node.args[0]], node.dtype)
    if _fits(node, found) and small and (node.op in RULES or node.op in ("input", "const")):
        args = tuple(_as_int32(arg, new) for arg in node.args)
        return Node(node.op, args, torch.int32, node.payload)
    if _fits(node, found) and node.op == "cast":
        return cast(new[node.args[0]], torch.int32)
    if node.op in ("lt", "le", "eq") and small and wide:
        return Node(node.op, tuple(_as_int32(arg, new) for arg in node.args), node.dtype)
    return rebuild(node, tuple(cast(new[arg], arg.dtype) for arg in node.args))


def _as_int32(arg: Node, new: dict[Node, Node]) -> Node:
    return cast(new[arg], torch.int32) if arg.dtype == torch.int64 else new[arg]
