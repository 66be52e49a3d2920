"""A graph as plain values: it comes back as the same node, or not at all."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch

from quire.ir.graph import Node, const
from quire.ir.portable import portable, restore
from quire.ir.trace import trace

TABLE, HALF = torch.arange(12).view(3, 4), torch.tensor(0.5, dtype=torch.bfloat16)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    near = (q_idx - kv_idx).abs() < TABLE[b % 3, h % 4]
    warm = torch.where(near, q_idx * 0.1 + HALF, -math.inf) > kv_idx / 3
    return near & (warm | ~(q_idx == kv_idx))


def test_a_graph_survives_json() -> None:
    traced = trace(window, "mask")
    written = json.loads(json.dumps(portable(traced.output), allow_nan=False))
    assert restore(written, traced.captures) is traced.output


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 0.1, 1e-310])
def test_every_float_survives(value: float) -> None:
    number = Node("const", (), torch.float64, value)
    root = Node("eq", (number, number), torch.bool)
    assert restore(json.loads(json.dumps(portable(root))), ()) is root


GRAPH = portable(trace(lambda b, h, q_idx, kv_idx: TABLE[b, h] + 3 > q_idx, "mask").output)
"""q_idx, b, h, load, const, add, lt."""


def changed(row: int, **values: Any) -> list[Any]:
    graph = copy.deepcopy(GRAPH)
    for name, value in values.items():
        graph[row][("op", "args", "dtype", "payload").index(name)] = value
    return graph


def row_of(op: str) -> int:
    return [row[0] for row in GRAPH].index(op)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (None, "no rows"),
        ([], "no rows"),
        ({"0": 1}, "no rows"),
        ([7], "row 0 .* no list of four"),
        ([["input", [], "int64"]], "no list of four"),
        (changed(0, op="system"), "no such op"),
        (changed(0, op=["input"]), "no such op"),
        (changed(0, dtype="complex64"), "no such dtype"),
        (changed(0, dtype=["int64"]), "no such dtype"),
        (changed(0, dtype="int32"), "an input is int64"),
        (changed(0, payload="score"), "no such input"),
        (changed(0, payload=None), "no such input"),
        (changed(0, args=[0]), "no earlier rows"),
        (changed(row_of("add"), args=[0, 99]), "no earlier rows"),
        (changed(row_of("add"), args=[0, -1]), "no earlier rows"),
        (changed(row_of("add"), args=[0, True]), "no earlier rows"),
        (changed(row_of("add"), args="01"), "operands are no list"),
        (changed(row_of("add"), args=[0]), "add takes 2 operands"),
        (changed(row_of("add"), payload=1), "add carries nothing"),
        (changed(row_of("add"), dtype="bool"), "gives no torch.bool"),
        (changed(row_of("add"), op="exp2", args=[0]), "does not compute with torch.int64"),
        (changed(row_of("lt"), dtype="int64"), "lt of torch.int64 gives no torch.int64"),
        (changed(row_of("load"), payload=1), "no such tensor"),
        (changed(row_of("load"), payload=-1), "no such tensor"),
        (changed(row_of("load"), payload=False), "no such tensor"),
        (changed(row_of("load"), args=[0]), "has 2 dimensions"),
        (changed(row_of("load"), dtype="int32"), "holds torch.int64, not torch.int32"),
        (changed(row_of("const"), payload=2**63), "no torch.int64"),
        (changed(row_of("const"), payload=1.5), "no torch.int64"),
        (changed(row_of("const"), payload=True), "no torch.int64"),
        (changed(row_of("const"), dtype="float32", payload=1.5), "hexadecimal"),
        (changed(row_of("const"), dtype="float32", payload="pi"), "row . of the graph is wrong"),
        (changed(row_of("const"), dtype="float32", payload="0x1p2000"), "no torch.float32"),
        (changed(row_of("const"), dtype="float32", payload=(0.1).hex()), "no torch.float32"),
        (changed(row_of("const"), dtype="bool", payload=1), "no truth value"),
        (changed(row_of("const"), dtype="int32"), "several dtypes"),
        (GRAPH[:-1], "gives torch.int64, no truth values"),
        ([*GRAPH, ["cast", [len(GRAPH) - 1], "bool", 1]], "a cast carries nothing"),
        ([*GRAPH, ["where", [0, 0, 0], "int64", None]], "where needs a truth value"),
    ],
)
def test_what_no_tracer_made_is_refused(graph: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        restore(graph, [TABLE])


def test_narrow_floats_are_for_storage() -> None:
    half = ["const", [], "float16", (0.5).hex()]
    with pytest.raises(ValueError, match=r"lt does not compute with torch\.float16"):
        restore([half, ["lt", [0, 0], "bool", None]], [])
    wide = [half, ["cast", [0], "float32", None], ["lt", [1, 1], "bool", None]]
    assert restore(wide, []).args[0].args[0] is const(0.5, torch.float16)
