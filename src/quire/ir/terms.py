"""Functions that write graphs by hand. Every node is simplified."""

from __future__ import annotations

import functools

import torch

from quire.ir.graph import Node, cast, const
from quire.ir.simplify import applied, simplest

BOOL, I64 = torch.bool, torch.int64
TRUE, FALSE = const(True, BOOL), const(False, BOOL)


def term(op: str, *args: Node) -> Node:
    """The node of an op; operands, except the condition of `where`, have one dtype."""
    dtype = BOOL if op in ("lt", "le", "eq") else args[-1].dtype
    return applied(op, args, dtype)


@functools.lru_cache(maxsize=1024)
def whole(number: int) -> Node:
    """An int64 constant."""
    return const(number, I64)


def as_dtype(node: Node, dtype: torch.dtype) -> Node:
    """A node converted to a dtype."""
    return node if node.dtype == dtype else simplest(cast(node, dtype))


def both(a: Node, b: Node) -> Node:
    """a and b."""
    return term("and", a, b)


def either(a: Node, b: Node) -> Node:
    """a or b."""
    return term("or", a, b)


def denied(a: Node) -> Node:
    """not a."""
    return term("not", a)


@functools.lru_cache(maxsize=1024)
def hidden_where(mask: Node | None, page: int, slot: int) -> Node:
    """A mask that also hides holes: tensor `slot` [B, most] says which pages there are."""
    b, kv_idx = (Node("input", (), I64, name) for name in ("b", "kv_idx"))
    there = Node("load", (b, term("floordiv", kv_idx, whole(page))), BOOL, slot)
    return there if mask is None else both(mask, there)
