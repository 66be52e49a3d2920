"""Graphs in 32 bits have the values that they have in 64."""

from __future__ import annotations

import torch
from hypothesis import given
from ir.random_graphs import random_graphs

from quire.ir.graph import Node, text, walk
from quire.ir.interpret import interpret
from quire.ir.narrow import narrow
from quire.ir.trace import trace

LIMITS = {"q_idx": (0, 2**20 - 1), "kv_idx": (0, 2**20 - 1)}
ENDS = torch.tensor([0, 1, 5, 4095, 4096, 2**20 - 1])
ENVIRONMENT = {
    "score": torch.tensor([0.5, -3.0, 1e9]).view(-1, 1, 1),
    "q_idx": ENDS.view(1, -1, 1),
    "kv_idx": ENDS.view(1, 1, -1),
}


def dtypes_of(op: str, source: str) -> set[torch.dtype]:
    mask = trace(eval(f"lambda b, h, q_idx, kv_idx: {source}"), "mask").output
    return {node.dtype for node in walk(narrow(mask, LIMITS)) if node.op == op}


def test_what_fits_is_narrowed() -> None:
    assert dtypes_of("sub", "q_idx - kv_idx < 128") == {torch.int32}
    assert dtypes_of("mod", "q_idx % 4096 == kv_idx % 4096") == {torch.int32}


def test_what_may_overflow_is_not() -> None:
    assert dtypes_of("mul", "q_idx * 4096 + kv_idx > 0") == {torch.int64}
    assert dtypes_of("sub", "q_idx - (kv_idx - 2**31) < 3") == {torch.int64}


@given(random_graphs(torch.int64) | random_graphs(torch.bool) | random_graphs(torch.float32))
def test_values_stay(root: Node) -> None:
    small = narrow(root, LIMITS)
    before, after = (interpret(node, ENVIRONMENT) for node in (root, small))
    assert before.dtype == after.dtype
    same = (before == after) | (before.isnan() & after.isnan())
    assert bool(same.all()), f"{text(root)}\n\n{text(small)}"
