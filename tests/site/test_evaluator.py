"""The explorer's evaluator means by every op what quire's interpreter means by it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ir.graph import Node, cast
from quire.ir.interpret import interpret
from quire.ir.ops import COMPARE, DTYPES, LEAF, OPS, WHERE
from quire.ir.portable import dtype_name, portable
from quire.ir.promote import WORKING

SCRIPT = Path(__file__).parent.parent.parent / "docs" / "static" / "evaluate.js"
I64 = torch.int64
ROUGH = {"exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf", "sin", "cos", "pow"}
"""Ops that two libraries may round differently in the last bits."""

WHOLE = [0, 1, 2, 3, 5, 7, 8, 31, 32, 63, 64, 100, 127, -1, -2, -3, -5, -8, -100, -128]
LARGE = [2**31 - 1, -(2**31), 2**40 + 3, 2**53 + 1, 2**62, -(2**62) - 1, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.1, 3.25, -7.75, 100.0, 1e-3, 80.0]
SPECIAL = [math.inf, -math.inf, math.nan]


def values_of(dtype: torch.dtype) -> list[Any]:
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_floating_point:
        return FLOATS + SPECIAL
    limits = torch.iinfo(dtype)
    return [x for x in WHOLE + LARGE if limits.min <= x <= limits.max]


def operands(op: str, dtype: torch.dtype) -> list[Tensor]:
    """All pairs of values, or all values, one row for each."""
    values = torch.tensor(values_of(dtype), dtype=dtype)
    if OPS[op].typing is WHERE:
        both = torch.cartesian_prod(values, values).unbind(1)
        return [torch.arange(len(both[0])) % 2 == 0, *both]
    if OPS[op].arity == 1:
        return [values]
    first, second = torch.cartesian_prod(values, values).unbind(1)
    kept = torch.ones_like(first, dtype=torch.bool)
    if op in ("floordiv", "mod") and not dtype.is_floating_point:
        low = torch.iinfo(dtype).min
        kept = (second != 0) & ~((second == -1) & (first == low))  # C's own undefined case
    if op in ("shl", "shr"):
        kept = (second >= 0) & (second < dtype.itemsize * 8)
    if op == "pow" and not dtype.is_floating_point:
        kept = (second >= 0) & (second < 9)  # torch refuses others
    return [first[kept], second[kept]]


def cases() -> list[tuple[str, torch.dtype]]:
    found = []
    for op in OPS.values():
        if op.typing is not LEAF and op.name != "bits":
            allowed = op.typing.operands - set(WORKING)
            found += [(op.name, dtype) for dtype in sorted(allowed, key=str)]
    return [*found, ("bits", I64)]


def plain(tensor: Tensor) -> dict[str, Any]:
    """A captured tensor for JSON, in which large and special numbers are text."""
    data = [x if isinstance(x, bool) or abs(x) < 2**53 else str(x) for x in tensor.tolist()]
    return {"shape": list(tensor.shape), "data": data}


RUN = """([rows, captures, count]) => {
    const read = (x) => typeof x !== "string" ? x
        : /^-?[0-9]+$/.test(x) ? BigInt(x) : {inf: Infinity, "-inf": -Infinity}[x] ?? NaN;
    captures.forEach((each) => { each.data = each.data.map(read); });
    const graph = Quire.compile(rows);
    return Array.from({length: count}, (_, n) => {
        const found = graph({q_idx: n}, captures);
        return typeof found === "boolean" ? found : Object.is(found, -0) ? "-0" : String(found);
    });
}"""


def in_browser(page: Any, root: Node, captures: list[Tensor], count: int) -> list[Any]:
    rows = json.loads(json.dumps(portable(root)))
    for row in rows:  # JSON's numbers are floats in a browser
        if row[0] == "const" and isinstance(row[3], int) and abs(row[3]) >= 2**53:
            pytest.fail("a constant is too large for JSON")
    found: list[Any] = page.evaluate(RUN, [rows, [plain(each) for each in captures], count])
    return found


@pytest.fixture
def evaluator(page: Any) -> Any:
    page.goto("about:blank")
    page.evaluate(SCRIPT.read_text().replace('"use strict";', "").replace("const Quire", "Quire"))
    return page


def check(found: list[Any], expected: Tensor, rough: bool) -> None:
    if expected.dtype == torch.bool:
        assert found == expected.tolist()
    elif not expected.dtype.is_floating_point:
        assert [int(x) for x in found] == expected.tolist()
    else:
        ours = torch.tensor([float(x) for x in found], dtype=torch.float64)
        theirs = expected.double()
        if rough:
            size = 4e-7 if expected.dtype == torch.float32 else 1e-14
            torch.testing.assert_close(ours, theirs, rtol=size, atol=size, equal_nan=True)
        else:
            assert torch.equal(ours.nan_to_num(7.7), theirs.nan_to_num(7.7))


def test_each_op_means_the_same(evaluator: Any) -> None:
    wrong = []
    for op, dtype in cases():
        tensors = operands(op, dtype)
        at = Node("input", (), I64, "q_idx")
        loads = tuple(Node("load", (at,), each.dtype, n) for n, each in enumerate(tensors))
        gives = torch.bool if OPS[op].typing is COMPARE else dtype
        root = Node(op, loads, gives)
        count = len(tensors[0])
        expected = interpret(root, {"q_idx": torch.arange(count)}, tensors)
        try:
            check(in_browser(evaluator, root, tensors, count), expected, op in ROUGH)
        except AssertionError as error:
            wrong.append(f"{op} of {dtype}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


def test_every_cast_means_the_same(evaluator: Any) -> None:
    for source in sorted(DTYPES, key=str):
        values = torch.tensor(values_of(source), dtype=source)
        for target in sorted(DTYPES, key=str):
            kept = values
            if source.is_floating_point and not target.is_floating_point and target != torch.bool:
                kept = values[values.isfinite() & (values >= 0)]  # C leaves others open
            at = Node("input", (), I64, "q_idx")
            root = cast(Node("load", (at,), source, 0), target)
            expected = interpret(root, {"q_idx": torch.arange(len(kept))}, [kept])
            found = in_browser(evaluator, root, [kept], len(kept))
            check(found, expected, False)


def test_the_evaluator_knows_all_ops(evaluator: Any) -> None:
    assert set(evaluator.evaluate("() => Quire.OPS")) == set(OPS)
    assert {dtype_name(dtype) for _, dtype in cases()} <= {dtype_name(each) for each in DTYPES}


def test_floats_are_read_from_hexadecimal(evaluator: Any) -> None:
    numbers = [0.1, -2.5, 1e-310, 1e300, 5e-324, 3.0, -0.0]
    read = evaluator.evaluate(
        "(texts) => texts.map((each) => String(Quire.fromHex(each)))", [x.hex() for x in numbers]
    )
    assert [float(each) for each in read] == numbers
