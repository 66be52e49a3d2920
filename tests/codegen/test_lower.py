"""Every op, in every dtype, in scalars and in every lane, against the interpreter."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from codegen.panels import PanelRun
from torch import Tensor

from quire.codegen.mods.rules import MEMORY, REGISTER, RULES
from quire.ir.graph import Node, cast
from quire.ir.interpret import interpret
from quire.ir.ops import OPS, Typing

pytestmark = pytest.mark.every_width

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ULPS = {"exp": 2, "exp2": 2, "log": 2, "log2": 2, "tanh": 4, "sigmoid": 4, "erf": 4, "sin": 4,
        "cos": 4, "pow": 16, "sqrt": 1}  # fmt: skip
QUERIES, KEYS = 8, 24


def test_the_tables_have_the_same_keys() -> None:
    assert RULES.keys() | {"input", "const", "load"} == OPS.keys()
    assert REGISTER.keys() == MEMORY.keys()


def operands(op: str, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Values on which the op is defined: ordinary, negative, zero, huge and not finite."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{op} {dtype}".encode()))
    if dtype == torch.bool:
        return [torch.randint(0, 2, (count,), generator=generator).bool() for _ in range(3)]
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -100
        values = [torch.randint(low, 100, (count,), generator=generator) for _ in range(3)]
        if op in ("floordiv", "mod"):
            values[1] = torch.where(values[1] == 0, 3, values[1])
        if op in ("shl", "shr", "pow"):
            values[1] = values[1].abs() % 7
        return [value.to(dtype) for value in values]
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, 2.5, -2.5]
    if op in ("floordiv", "mod"):
        special = [1.0, -1.0, 0.5, 2.5, -2.5, math.nan, 7.0, -7.0, 3.0, -3.0]
    values = []
    for shift in range(3):
        value = torch.randn(count, generator=generator) * 4
        value[: len(special)] = torch.tensor(special[shift:] + special[:shift])
        values.append(value.abs() if op == "pow" and shift == 0 else value)
    return [value.to(dtype) for value in values]


def cases() -> list[tuple[str, torch.dtype]]:
    found = []
    for name, op in OPS.items():
        if op.typing is Typing.LEAF:
            continue
        dtypes: tuple[torch.dtype, ...] = (*FLOATS, *INTS, torch.bool)
        if op.typing is Typing.FLOAT:
            dtypes = FLOATS
        elif op.typing is Typing.BITS:
            dtypes = (*INTS, torch.bool)
        elif op.typing is Typing.SHIFT:
            dtypes = INTS
        refused = {"shl", "shr", "neg", "sub", "floordiv", "mod", "pow", "abs", "sign"}
        refused |= {"floor", "ceil", "round", "trunc"}
        if name in ("floor", "ceil", "round", "trunc"):  # the tracer leaves integers as they are
            dtypes = FLOATS
        found += [(name, d) for d in dtypes if d != torch.bool or name not in refused]
    return found


def graph(op: str, dtype: torch.dtype, index: Node) -> Node:
    arity = OPS[op].arity or 0
    loads = [Node("load", (index,), dtype, slot) for slot in range(arity)]
    if OPS[op].typing is Typing.WHERE:
        loads[0] = Node("load", (index,), torch.bool, 0)
    result = torch.bool if OPS[op].typing is Typing.COMPARE else dtype
    return Node(op, tuple(loads), result)


@pytest.mark.parametrize(("op", "dtype"), cases(), ids=str)
def test_op(op: str, dtype: torch.dtype) -> None:
    arity = OPS[op].arity or 0
    captures = operands(op, dtype, 3 * QUERIES)[:arity]
    if OPS[op].typing is Typing.WHERE:
        captures[0] = operands(op, torch.bool, 3 * QUERIES)[0]
    exact, known = dtype, captures
    if op in ULPS and dtype.is_floating_point:  # torch approximates too, on aarch64 coarsely
        exact, known = torch.float64, [values.double() for values in captures]
    query = Node("input", (), torch.int64, "q_idx")
    key = Node("input", (), torch.int64, "kv_idx")
    for index, name in ((query, "q_idx"), (key, "kv_idx")):
        root, truth = graph(op, dtype, index), graph(op, exact, index)
        run = PanelRun(cast(root, torch.float64), [], captures, torch.float64)
        for start in range(0, len(captures[0]), QUERIES):
            keys = 1 if name == "q_idx" else QUERIES
            place = {name: start}
            actual, wrong = run(torch.zeros(keys, QUERIES, dtype=torch.float64), **place)
            positions = torch.arange(start, start + QUERIES)
            expected = interpret(truth, {name: positions}, known).to(root.dtype)
            values = actual[0] if name == "q_idx" else actual[:, 0]
            assert not wrong
            assert_lanes(values, expected, ULPS.get(op, 0))


def assert_lanes(actual: Tensor, expected: Tensor, ulps: int) -> None:
    """Equal, NaN included; within some units in the last place where an op is approximated."""
    dtype = expected.dtype
    expected = expected.double()
    unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    bound = ulps * unit * expected.abs().nan_to_num(0.0, 0.0, 0.0) + (1e-300 if ulps else 0)
    close = (actual - expected).abs() <= bound
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool((close | same).all()), f"{actual.tolist()} is not {expected.tolist()}"


@pytest.mark.parametrize("source", [*FLOATS, *INTS, torch.bool], ids=str)
def test_casts(source: torch.dtype) -> None:
    values = operands("cast", source, 2 * QUERIES)[0][:QUERIES]
    if source.is_floating_point:
        values = values.nan_to_num(0.0, 50.0, 3.0).abs()
    query = Node("input", (), torch.int64, "q_idx")
    for target in (*FLOATS, *INTS, torch.bool):
        root = cast(Node("load", (query,), source, 0), target)
        run = PanelRun(cast(root, torch.float64), [], [values], torch.float64)
        actual, _ = run(torch.zeros(1, QUERIES, dtype=torch.float64))
        expected = interpret(root, {"q_idx": torch.arange(QUERIES)}, [values])
        assert_lanes(actual[0], expected, 0)
