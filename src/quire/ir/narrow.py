"""Graph to graph: 32-bit integers wherever the values provably fit.

Indices mean int64. A vector register holds twice as many int32 numbers, and converts them to float
in one instruction. So each int64 node is rebuilt in int32 if its range and those of its operands
fit (`ranges.py`).

    q_idx < 2**20:   q_idx - kv_idx          int32
                     q_idx * 4096 + kv_idx   int64, as it reaches 2**32
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.ir.graph import Node, cast, rebuild, walk
from quire.ir.ranges import RULES, Range, Ranges

INT32: Range = (-(2**31), 2**31 - 1)


def narrow(root: Node, inputs: Mapping[str, Range]) -> Node:
    """`root` with int64 nodes that fit rebuilt in int32. Its own dtype stays."""
    found = Ranges(inputs)
    new: dict[Node, Node] = {}
    for node in walk(root):
        new[node] = _narrowed(node, found, new)
    return cast(new[root], root.dtype)


def _fits(node: Node, found: Ranges) -> bool:
    size = found.of(node)
    in_range = size is not None and INT32[0] <= size[0] and size[1] <= INT32[1]
    return node.dtype == torch.int64 and in_range


def _narrowed(node: Node, found: Ranges, new: dict[Node, Node]) -> Node:
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
