"""Integers as sums, so that terms cancel: q_idx - (q_idx - kv_idx) is kv_idx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from quire.ir.graph import Node
from quire.ir.terms import term, whole

Sum: TypeAlias = Mapping[Node | None, int]
"""The factor of each term; None is the term 1."""


def sum_of(node: Node) -> Sum:
    """An integer node as a sum. A node of another op is one term with factor 1."""
    match node.op:
        case "const" if isinstance(node.payload, int):
            return {None: node.payload}
        case "add":
            return added(sum_of(node.args[0]), sum_of(node.args[1]), 1)
        case "sub":
            return added(sum_of(node.args[0]), sum_of(node.args[1]), -1)
        case "neg":
            return added({}, sum_of(node.args[0]), -1)
        case "cast" if node.args[0].dtype in (torch.int64, torch.int32):
            return sum_of(node.args[0])
        case "mul" | "shl":
            for part, factor in (node.args, node.args[::-1]):
                if factor.op == "const" and isinstance(factor.payload, int):
                    if node.op == "mul":
                        return added({}, sum_of(part), factor.payload)
                    if part is node.args[0] and 0 <= factor.payload < 32:
                        return added({}, sum_of(part), 1 << factor.payload)
    return {node: 1}


def added(a: Sum, b: Sum, times: int) -> Sum:
    """a + times * b."""
    total = dict(a)
    for part, count in b.items():
        total[part] = total.get(part, 0) + times * count
    return total


def plus(total: Node, part: Node, times: int) -> Node:
    """The graph of total + times * part."""
    op = "add" if times > 0 else "sub"
    return term(op, total, term("mul", part, whole(abs(times))))
