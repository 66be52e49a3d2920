"""Whether a mod is a multiple of its score: mod(t * score) = t * mod(score).

    prob * gate[h]                                     is
    torch.where(kv_idx < 4, prob / 2, prob)            is
    torch.where(prob > 0.1, prob, 0)                   is not: the condition depends on prob
    prob + bias[h]                                     is not: it is not 0 where prob is 0

The answer is read off the graph. So prob * prob / prob is not found to be one.
"""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import torch

from quire.ir.graph import Node, walk

Growth: TypeAlias = Literal["zero", "constant", "multiple"] | None
"""How a node grows with the score: it is 0, or the same, or a multiple; None if none of these."""


@functools.lru_cache(maxsize=512)
def is_multiple(root: Node) -> bool:
    """Return whether a graph is a multiple of its input `score`."""
    found: dict[Node, Growth] = {}
    for node in walk(root):
        found[node] = _growth(node, [found[arg] for arg in node.args])
    return found[root] in ("multiple", "zero")


def _growth(node: Node, args: list[Growth]) -> Growth:
    """Return how a node grows, given how its operands do."""
    if node.op == "input":
        return "multiple" if node.payload == "score" else "constant"
    if node.op == "const":
        return "zero" if node.payload == 0 and node.dtype.is_floating_point else "constant"
    if all(arg in ("constant", "zero") for arg in args):
        return "constant"
    match node.op:
        case "add" | "sub" | "neg":
            return _both(args)
        case "where":
            return _both(args[1:]) if args[0] == "constant" else None
        case "mul" if None not in args and args.count("multiple") == 1:
            return "multiple"
        case "div" if args == ["multiple", "constant"]:
            return "multiple"
        case "cast" if args == ["multiple"] and _keeps_all(node):
            return "multiple"
    return None


def _both(args: list[Growth]) -> Growth:
    """Return how a sum or a choice of multiples grows."""
    return "multiple" if set(args) <= {"multiple", "zero"} else None


def _keeps_all(node: Node) -> bool:
    """Return whether a cast is one of floats that loses no bits of a float32."""
    return node.dtype in (torch.float32, torch.float64)
