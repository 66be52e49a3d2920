"""Every rule keeps every value, NaN and signed zero included, in every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from ir.random_graphs import SPECIAL_FLOATS, SPECIAL_INTS, environment, random_graphs
from torch import Tensor

from quire.ir.graph import Node, const, text, walk
from quire.ir.interpret import interpret
from quire.ir.ops import OPS
from quire.ir.simplify import RULES, simplest, simplify

F32, F64, I32, I64, BOOL = torch.float32, torch.float64, torch.int32, torch.int64, torch.bool
BF16, F16, U8 = torch.bfloat16, torch.float16, torch.uint8


def x_of(dtype: torch.dtype, name: str = "x") -> Node:
    return Node("input", (), dtype, name)


def values_of(dtype: torch.dtype) -> Tensor:
    if dtype == BOOL:
        return torch.tensor([True, False])
    return torch.tensor(SPECIAL_FLOATS if dtype.is_floating_point else SPECIAL_INTS).to(dtype)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    """Equal in dtype and value; zeros equal in sign."""
    assert one.dtype == other.dtype
    one, other = torch.broadcast_tensors(one, other)
    assert torch.equal(one.isnan(), other.isnan())
    known = ~one.isnan()
    assert torch.equal(one[known], other[known])
    assert torch.equal(one[known].signbit(), other[known].signbit())


def assert_becomes(before: Node, after: Node) -> None:
    """`before` is simplified to `after`, and both have the same values."""
    assert simplest(before) is after, f"{text(simplest(before))}\n\nexpected\n\n{text(after)}"
    leaves = {str(n.payload): n.dtype for n in walk(before) if n.op == "input"}
    env = {name: values_of(dtype) for name, dtype in leaves.items()}
    if len(env) > 1:
        env = {
            name: value.view([-1 if i == axis else 1 for axis in range(len(env))])
            for i, (name, value) in enumerate(env.items())
        }
    assert_same_bits(interpret(before, env), interpret(after, env))


def assert_stays(node: Node) -> None:
    assert simplest(node) is node


ALL = (BOOL, U8, I32, I64, F32, F64)
INTS = (U8, I32, I64)
FLOATS = (F32, F64)


# Constants


@pytest.mark.parametrize(
    ("op", "values", "dtype", "result"),
    [
        ("add", (2, 3), I64, 5),
        ("add", (2**31 - 1, 1), I32, -(2**31)),
        ("sub", (1, 2), U8, 255),
        ("mul", (0.1, 3.0), F32, 0.30000001192092896),
        ("div", (1.0, 0.0), F64, math.inf),
        ("floordiv", (-7, 2), I64, -4),
        ("mod", (-7, 3), I64, 2),
        ("mod", (7, -3), I64, -2),
        ("max", (math.nan, 1.0), F32, math.nan),
        ("neg", (0.0,), F32, -0.0),
        ("shl", (3, 2), I64, 12),
        ("not", (True,), BOOL, False),
        ("not", (5,), I64, -6),
        ("sqrt", (-1.0,), F64, math.nan),
    ],
)
def test_constants_are_folded(
    op: str, values: tuple[float, ...], dtype: torch.dtype, result: float
) -> None:
    before = Node(op, tuple(const(value, dtype) for value in values), dtype)
    assert_becomes(before, const(result, dtype))


def test_comparisons_and_choices_of_constants_are_folded() -> None:
    assert_becomes(Node("lt", (const(1, I64), const(2, I64)), BOOL), const(True, BOOL))
    choice = Node("where", (const(False, BOOL), const(1.0, F32), const(2.0, F32)), F32)
    assert_becomes(choice, const(2.0, F32))
    assert_becomes(Node("cast", (const(2.5, F64),), I64), const(2, I64))


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_a_division_by_zero_is_left_for_the_run(op: str) -> None:
    assert_stays(Node(op, (const(1, I64), const(0, I64)), I64))


# Neutral operands


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_neutral_operands_of_integers(dtype: torch.dtype) -> None:
    x, zero, one = x_of(dtype), const(0, dtype), const(1, dtype)
    for op, args in (
        ("add", (x, zero)),
        ("add", (zero, x)),
        ("sub", (x, zero)),
        ("mul", (x, one)),
        ("mul", (one, x)),
        ("floordiv", (x, one)),
    ):
        assert_becomes(Node(op, args, dtype), x)
    assert_stays(Node("sub", (zero, x), dtype))
    assert_stays(Node("mul", (x, zero), dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_neutral_operands_of_floats(dtype: torch.dtype) -> None:
    x, one = x_of(dtype), const(1.0, dtype)
    assert_becomes(Node("mul", (x, one), dtype), x)
    assert_becomes(Node("mul", (one, x), dtype), x)
    assert_becomes(Node("div", (x, one), dtype), x)
    for zero in (const(0.0, dtype), const(-0.0, dtype)):  # -0.0 + 0.0 is 0.0
        assert_stays(Node("add", (x, zero), dtype))
        assert_stays(Node("add", (zero, x), dtype))
        assert_stays(Node("sub", (x, zero), dtype))
        assert_stays(Node("mul", (x, zero), dtype))  # 0 * inf and 0 * nan are nan
    assert_stays(Node("floordiv", (x, one), dtype))


def test_neutral_operands_of_truth_values() -> None:
    x = x_of(BOOL)
    assert_becomes(Node("add", (x, const(False, BOOL)), BOOL), x)
    assert_becomes(Node("mul", (x, const(True, BOOL)), BOOL), x)


# Casts


@pytest.mark.parametrize(
    ("dtype", "via", "to"),
    [
        (BOOL, I64, F32),
        (BOOL, F16, I32),
        (I32, I64, torch.int8),
        (I32, I64, F32),
        (U8, I32, F64),
        (F32, F64, F16),
        (BF16, F32, F64),
        (F16, F32, BOOL),
    ],
    ids=str,
)
def test_a_cast_that_keeps_every_value_is_skipped(
    dtype: torch.dtype, via: torch.dtype, to: torch.dtype
) -> None:
    x = x_of(dtype)
    before = Node("cast", (Node("cast", (x,), via),), to)
    assert_becomes(before, Node("cast", (x,), to))


@pytest.mark.parametrize(("dtype", "via"), [(I32, I64), (F32, F64), (BF16, F32), (BOOL, I64)])
def test_there_and_back_is_nothing(dtype: torch.dtype, via: torch.dtype) -> None:
    x = x_of(dtype)
    assert_becomes(Node("cast", (Node("cast", (x,), via),), dtype), x)


@pytest.mark.parametrize(
    ("dtype", "via", "to"),
    [
        (I64, I32, I64),
        (F64, F32, F64),
        (F32, BF16, F32),
        (F16, BF16, F32),
        (BF16, F16, F32),
        (I64, F64, I64),
        (I64, BOOL, I64),
        (F32, I64, F32),
        (torch.int8, U8, I64),
    ],
    ids=str,
)
def test_a_cast_that_loses_values_stays(
    dtype: torch.dtype, via: torch.dtype, to: torch.dtype
) -> None:
    assert_stays(Node("cast", (Node("cast", (x_of(dtype),), via),), to))


# Logic


def test_logic_of_truth_values() -> None:
    x, true, false = x_of(BOOL), const(True, BOOL), const(False, BOOL)
    for op, args, after in (
        ("and", (x, true), x),
        ("and", (true, x), x),
        ("and", (x, false), false),
        ("and", (false, x), false),
        ("or", (x, false), x),
        ("or", (false, x), x),
        ("or", (x, true), true),
        ("or", (true, x), true),
        ("and", (x, x), x),
        ("or", (x, x), x),
    ):
        assert_becomes(Node(op, args, BOOL), after)
    assert_stays(Node("xor", (x, true), BOOL))


@pytest.mark.parametrize("dtype", [BOOL, *INTS], ids=str)
def test_not_not(dtype: torch.dtype) -> None:
    x = x_of(dtype)
    assert_becomes(Node("not", (Node("not", (x,), dtype),), dtype), x)


def test_bits_of_integers_are_not_truth_values() -> None:
    x = x_of(I64)
    assert_stays(Node("and", (x, const(1, I64)), I64))
    assert_stays(Node("or", (x, const(1, I64)), I64))


# Choices


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_choice_that_is_made(dtype: torch.dtype) -> None:
    x, y = x_of(dtype), x_of(dtype, "y")
    assert simplest(Node("where", (const(True, BOOL), x, y), dtype)) is x
    assert simplest(Node("where", (const(False, BOOL), x, y), dtype)) is y
    assert_becomes(Node("where", (x_of(BOOL, "c"), x, x), dtype), x)
    assert_stays(Node("where", (x_of(BOOL, "c"), x, y), dtype))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("op", ["min", "max"])
def test_the_extremum_of_one_value(op: str, dtype: torch.dtype) -> None:
    x = x_of(dtype)
    assert_becomes(Node(op, (x, x), dtype), x)


@pytest.mark.parametrize(("op", "holds"), [("lt", False), ("le", True), ("eq", True)])
def test_an_exact_value_compared_with_itself(op: str, holds: bool) -> None:
    for dtype in (BOOL, *INTS):
        x = x_of(dtype)
        assert_becomes(Node(op, (x, x), BOOL), const(holds, BOOL))
    for dtype in FLOATS:  # nan equals nothing
        x = x_of(dtype)
        assert_stays(Node(op, (x, x), BOOL))


# The whole


def test_rules_stand_in_a_table_by_op() -> None:
    assert all(rules for rules in RULES.values())
    assert RULES.keys() <= OPS.keys()


def test_a_graph_is_simplified_from_its_leaves() -> None:
    x = x_of(I64)
    nothing = Node("mul", (Node("add", (x, const(0, I64)), I64), const(1, I64)), I64)
    total = Node("sub", (nothing, Node("sub", (const(5, I64), const(5, I64)), I64)), I64)
    assert simplify(total) is x


@given(random_graphs())
def test_random_graphs_keep_their_bits(root: Node) -> None:
    simple = simplify(root)
    assert simplify(simple) is simple
    assert len(list(walk(simple))) <= len(list(walk(root)))
    before, after = (interpret(node, environment()) for node in (root, simple))
    if {node.op for node in walk(root)} & {"min", "max"}:  # of 0.0 and -0.0 either may win
        before, after = (
            value + 0 if value.is_floating_point() else value for value in (before, after)
        )
    assert_same_bits(before, after)
