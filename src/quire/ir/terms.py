"""Writing graphs by hand: each op in its simplest form, with the dtype that follows."""

from __future__ import annotations

import torch

from quire.ir.graph import Node, cast, const
from quire.ir.simplify import simplest

BOOL, I64 = torch.bool, torch.int64
TRUE, FALSE = const(True, BOOL), const(False, BOOL)


def term(op: str, *args: Node) -> Node:
    """An op of operands that are simple and, but for a condition, have one dtype."""
    dtype = BOOL if op in ("lt", "le", "eq") else args[-1].dtype
    return simplest(Node(op, args, dtype))


def whole(number: int) -> Node:
    """An int64 constant."""
    return const(number, I64)


def as_dtype(node: Node, dtype: torch.dtype) -> Node:
    """A number in another dtype."""
    return node if node.dtype == dtype else simplest(cast(node, dtype))


def both(a: Node, b: Node) -> Node:
    """Whether both hold."""
    return term("and", a, b)


def either(a: Node, b: Node) -> Node:
    """Whether one of them holds."""
    return term("or", a, b)


def denied(a: Node) -> Node:
    """Whether it does not hold."""
    return term("not", a)
