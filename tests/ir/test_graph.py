"""Nodes are interned and frozen; text and key are stable; what is written down can be read."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
import torch

from quire.ir import graph, promote, simplify
from quire.ir.graph import (
    Node,
    cast,
    const,
    constants,
    inputs,
    key,
    read,
    rebuild,
    rewrite,
    rows,
    text,
    walk,
)
from quire.ir.trace import trace

F32, I64, BOOL = torch.float32, torch.int64, torch.bool

Q = Node("input", (), I64, "q_idx")
KV = Node("input", (), I64, "kv_idx")


def chain(length: int) -> Node:
    """A graph deeper than Python's stack."""
    node = Q
    for value in range(length):
        node = Node("add", (node, const(value, I64)), I64)
    return node


# Interning


def test_equal_content_is_the_same_node() -> None:
    assert Node("add", (Q, KV), I64) is Node("add", (Q, KV), I64)
    assert Node("add", (Q, KV), I64) is not Node("add", (KV, Q), I64)
    assert Node("add", (Q, KV), I64) is not Node("sub", (Q, KV), I64)
    assert const(1, I64) is not const(1, torch.int32)


def test_constants_are_told_apart_by_their_bits() -> None:
    assert const(0.0, F32) is not const(-0.0, F32)
    assert math.copysign(1.0, const(-0.0, F32).payload) == -1.0  # type: ignore[arg-type]
    assert const(math.nan, F32) is const(math.nan, F32)
    assert const(True, BOOL) is not const(1, I64)


def forget_recent() -> None:
    """Empty the caches that keep the nodes of recent traces alive."""
    for cached in (graph._intern, simplify.simplest, promote._node):
        cached.cache_clear()


def test_a_node_that_nobody_holds_is_forgotten() -> None:
    node = Node("neg", (const(123_456_789, I64),), I64)
    alive = weakref.ref(node)
    forget_recent()
    del node
    gc.collect()
    assert alive() is None


def test_threads_agree_on_nodes() -> None:
    start, found = threading.Barrier(4), {}

    def make(name: int) -> None:
        start.wait()
        found[name] = [const(100_000 + value, I64) for value in range(2_000)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=make, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for nodes in zip(*found.values(), strict=True):
        assert len(set(map(id, nodes))) == 1


def test_a_node_is_frozen() -> None:
    with pytest.raises(AttributeError, match="a Node is frozen: op cannot be set"):
        Q.op = "const"
    with pytest.raises(AttributeError, match="a Node is frozen: op cannot be deleted"):
        del Q.op


def test_the_number_of_operands_is_checked() -> None:
    with pytest.raises(AssertionError, match="add takes 2 operands"):
        Node("add", (Q,), I64)


# Copies


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_node_is_the_same_node(protocol: int) -> None:
    node = Node("where", (Node("lt", (Q, KV), BOOL), Q, const(-1, I64)), I64)
    assert pickle.loads(pickle.dumps(node, protocol)) is node


def test_a_pickled_node_is_rebuilt_where_it_is_unknown() -> None:
    written = pickle.dumps(Node("mul", (Q, const(987_654_321, I64)), I64))
    forget_recent()
    gc.collect()
    assert text(pickle.loads(written)).splitlines()[-1] == "%2 = mul %0, %1 : int64"


def test_a_copied_node_is_the_same_node() -> None:
    node = Node("neg", (Q,), I64)
    assert copy.copy(node) is node
    assert copy.deepcopy([node])[0] is node


def test_a_graph_may_be_deeper_than_the_stack() -> None:
    deep = chain(5 * sys.getrecursionlimit())
    assert pickle.loads(pickle.dumps(deep)) is deep
    assert copy.deepcopy(deep) is deep
    assert rewrite(deep, rebuild) is deep
    assert len(text(deep).splitlines()) == len(list(walk(deep)))


def test_rows_are_read_back() -> None:
    node = Node("sub", (Node("abs", (Q,), I64), Q), I64)
    assert rows(node) == (
        ("input", (), I64, "q_idx"),
        ("abs", (0,), I64, None),
        ("sub", (1, 0), I64, None),
    )
    assert read(rows(node)) == list(walk(node))


# Constants and casts


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [
        (0.1, torch.float32, 0.10000000149011612),
        (0.1, torch.float64, 0.1),
        (0.1, torch.bfloat16, 0.10009765625),
        (0.1, torch.float16, 0.0999755859375),
        (1e300, torch.float32, math.inf),
        (2**24 + 1, torch.float32, 2.0**24),
        (True, torch.int64, 1),
        (2, torch.bool, True),
        (300, torch.uint8, 44),
        (2**40 + 5, torch.int32, 5),
        (2.7, torch.int64, 2),
    ],
)
def test_a_constant_is_converted_as_torch_does(
    value: float, dtype: torch.dtype, held: float
) -> None:
    node = const(value, dtype)
    assert node.payload == held
    assert type(node.payload) is type(held)


def test_a_constant_does_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        assert const(0.5, torch.float16).payload == 0.5


def test_a_cast_of_a_constant_is_a_constant() -> None:
    assert cast(const(1, I64), F32) is const(1.0, F32)
    assert cast(const(0.1, torch.float64), F32) is const(0.1, F32)
    assert cast(Q, I64) is Q
    assert cast(Q, F32) is Node("cast", (Q,), F32)


# Walking


def test_walk_gives_operands_first_and_each_node_once() -> None:
    shared = Node("add", (Q, KV), I64)
    root = Node("mul", (shared, Node("sub", (shared, Q), I64)), I64)
    order = list(walk(root, shared))
    assert len(order) == len(set(order)) == 5
    for position, node in enumerate(order):
        assert all(order.index(arg) < position for arg in node.args)


def test_rewrite_replaces_below() -> None:
    root = Node("add", (Node("neg", (Q,), I64), Q), I64)
    swapped = rewrite(root, lambda node, args: KV if node is Q else rebuild(node, args))
    assert swapped is Node("add", (Node("neg", (KV,), I64), KV), I64)


def test_inputs_and_constants() -> None:
    root = Node("where", (Node("lt", (Q, const(3, I64)), BOOL), KV, const(4, I64)), I64)
    assert inputs(root) == {"q_idx", "kv_idx"}
    assert constants(root) == (const(3, I64), const(4, I64))


# Text and key


def biased(window: int, scale: float, bias: torch.Tensor) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        inside = (distance >= 0) & (distance < window)
        return torch.where(inside, score * scale + bias[h, distance], -math.inf)

    return trace(score_mod, "score").output


GOLDEN = """
    %0 = const 0 : int64
    %1 = input q_idx : int64
    %2 = input kv_idx : int64
    %3 = sub %1, %2 : int64
    %4 = le %0, %3 : bool
    %5 = const 128 : int64
    %6 = lt %3, %5 : bool
    %7 = and %4, %6 : bool
    %8 = input score : float32
    %9 = const 0.5 : float32
    %10 = mul %8, %9 : float32
    %11 = input h : int64
    %12 = load captured0[%11, %3] : float32
    %13 = add %10, %12 : float32
    %14 = const -inf : float32
    %15 = where %7, %13, %14 : float32
"""
GOLDEN_KEY = "fd859e32c9e5e63fa1a1eadaf56f785dc615e07fc98e50ac27eaa7fb9409aba3"


def test_text_is_stable() -> None:
    assert text(biased(128, 0.5, torch.zeros(4, 256))) == inspect.cleandoc(GOLDEN)


def test_key_is_stable() -> None:
    assert key(biased(128, 0.5, torch.zeros(4, 256))) == GOLDEN_KEY


def test_the_key_ignores_constants_and_captured_values() -> None:
    one, other = biased(128, 0.5, torch.zeros(4, 256)), biased(77, 2.5, torch.ones(2, 9).T)
    assert one is not other
    assert key(one) == key(other)
    assert [node.payload for node in constants(other)] == [0, 77, 2.5, -math.inf]


def test_the_key_knows_dtypes_and_structure() -> None:
    zeros = torch.zeros(4, 256)
    keys = {
        key(biased(128, 0.5, zeros)),
        key(biased(128, 0.5, zeros.half())),
        key(biased(128, 1.0, zeros)),  # score * 1.0 is score
        key(Node("add", (Q, KV), I64)),
        key(Node("add", (KV, Q), I64)),
        key(Node("add", (Q, Q), I64)),
    }
    assert len(keys) == 6


def test_slots_are_numbered_as_constants_are_listed() -> None:
    root = biased(128, 0.5, torch.zeros(4, 256))
    lines = [line for line in text(root, values=False).splitlines() if " const " in line]
    assert [line.split()[3] for line in lines] == ["$0", "$1", "$2", "$3"]
    assert len(constants(root)) == 4


def test_several_roots_are_named_at_the_end() -> None:
    total = Node("add", (Q, KV), I64)
    assert text(total, Q).splitlines()[-1] == "return %2, %0"


def test_repr_shows_the_last_line() -> None:
    assert repr(Q) == "<Node input q_idx : int64>"
    assert repr(Node("add", (Q, KV), I64)) == "<Node add %0, %1 : int64>"


def test_the_example_in_the_docstring() -> None:
    causal = trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").output
    assert textwrap.indent(text(causal), "    ") in (graph.__doc__ or "")
