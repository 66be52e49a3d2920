"""Everything users write, in every form in which they write it, is what PyTorch makes of it.

Values come from captured tensors of every dtype: `x` along the queries, `y` along the keys.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_as_good_as
from ir.oracle import Outcome, assert_same, by_trace, by_vmap
from torch import Tensor

from quire.errors import UnsupportedOpError
from quire.ir.graph import walk
from quire.ir.symbol import FORMS
from quire.ir.trace import trace

Form = Callable[..., Any]

INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NARROW = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
ALL = (torch.bool, *INTS, *NARROW, *WIDE)
COMMON = (torch.bool, torch.int32, torch.int64, *NARROW, *WIDE)

NEGATIVE = (-11, -7, -3, -2, -1, 1, 2, 3, 5, 13)
POSITIVE = (1, 2, 3, 4, 5, 6, 7, 11, 13, 60)
FRACTIONS = (-7.0, -2.5, -1.5, -0.5, 0.1, 0.5, 1.5, 2.5, 3.25, 11.0)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)


def values(dtype: torch.dtype) -> Tensor:
    """Ten numbers, none of them 0, so that each can be a divisor."""
    if dtype == torch.bool:
        return torch.ones(10, dtype=dtype)
    if dtype.is_floating_point:
        return torch.tensor(FRACTIONS, dtype=dtype)
    return torch.tensor(POSITIVE if dtype == torch.uint8 else NEGATIVE, dtype=dtype)


def everything(dtype: torch.dtype) -> Tensor:
    """The same with 0, and with what only floats have."""
    more = SPECIAL if dtype.is_floating_point else (0,)
    return torch.cat([values(dtype), torch.tensor(more, dtype=dtype)])


def outcomes(form: Form, *operands: object) -> tuple[Outcome, Outcome]:
    """What the trace and what PyTorch make of `form`; operands of rank 1 are loaded from."""
    sizes = [1, 1, 1, 1]
    for axis, operand in zip((2, 3), operands, strict=False):
        if isinstance(operand, Tensor) and operand.dim() == 1:
            sizes[axis] = len(operand)
    shape = (sizes[0], sizes[1], sizes[2], sizes[3])

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        loaded = [
            operand[place] if isinstance(operand, Tensor) and operand.dim() == 1 else operand
            for operand, place in zip(operands, (q_idx, kv_idx), strict=False)
        ]
        return form(*loaded)

    score = torch.zeros(shape, dtype=torch.float64)
    try:
        theirs = by_vmap(mod, "score", score, shape)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        with pytest.raises(UnsupportedOpError):
            by_trace(mod, "score", score, shape)
        raise Refused from error
    return by_trace(mod, "score", score, shape), theirs


class Refused(Exception):
    """PyTorch refuses these operands, and so do we."""


def assert_close(ours: Outcome, theirs: Outcome) -> None:
    """The same dtype, and values that are at most two roundings apart."""
    assert ours.dtype == theirs.dtype
    eps = torch.finfo(ours.dtype).eps if ours.dtype.is_floating_point else 0
    torch.testing.assert_close(ours.values, theirs.values, rtol=2 * eps, atol=0, equal_nan=True)


# Functions of one number

EXACT = [
    torch.neg,
    torch.negative,
    torch.abs,
    torch.absolute,
    torch.sign,
    torch.sgn,
    torch.floor,
    torch.ceil,
    torch.round,
    torch.trunc,
    torch.fix,
    torch.square,
    torch.reciprocal,
    torch.relu,
    torch.isnan,
    torch.isinf,
    torch.isfinite,
    torch.isposinf,
    torch.isneginf,
    torch.nan_to_num,
    torch.bitwise_not,
    torch.logical_not,
    torch.positive,
    torch.zeros_like,
    torch.ones_like,
    torch.clone,
    operator.neg,
    operator.invert,
    operator.abs,
    F.relu,
]
ROUNDED = [
    torch.sqrt,
    torch.rsqrt,
    torch.exp,
    torch.exp2,
    torch.log,
    torch.log2,
    torch.log10,
    torch.log1p,
    torch.expm1,
    torch.tanh,
    torch.sigmoid,
    torch.special.expit,
    torch.erf,
    torch.special.erf,
    torch.sin,
    torch.cos,
    torch.tan,
    F.gelu,
    F.silu,
    F.softplus,
    F.logsigmoid,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.softplus(x, 2.0, 5.0),
    lambda x: x**0.3,
    lambda x: 2**x,
]
LENIENT = {torch.positive, torch.relu, F.relu, operator.pos}
"""Where a bool has a value here, and PyTorch refuses."""


def dtypes_for(form: Form) -> tuple[torch.dtype, ...]:
    return ALL[1:] if form in LENIENT else ALL


@pytest.mark.parametrize("form", EXACT, ids=lambda form: form.__name__)
def test_exact_functions(form: Form) -> None:
    for dtype in dtypes_for(form):
        try:
            ours, theirs = outcomes(form, everything(dtype))
        except Refused:
            continue
        assert_same(ours, theirs, f"{form} of {dtype}")


@pytest.mark.parametrize("form", ROUNDED, ids=lambda form: form.__name__)
def test_rounded_functions(form: Form) -> None:
    for dtype in ALL:
        try:
            ours, theirs = outcomes(form, values(dtype))
            _, truth = outcomes(form, values(dtype).double())
        except Refused:
            continue
        assert ours.dtype == theirs.dtype
        if ours.dtype.is_floating_point:  # 2**x of an integer is an integer
            actual, peer = (o.values.to(o.dtype) for o in (ours, theirs))
            assert_as_good_as(actual, peer, truth.values, f"{form} of {dtype}")
        else:
            assert_same(ours, theirs, f"{form} of {dtype}")


@pytest.mark.parametrize("form", ROUNDED, ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_rounded_functions_of_special_numbers(form: Form, dtype: torch.dtype) -> None:
    numbers = torch.tensor([*SPECIAL, 88.0, -88.0, 1e-30], dtype=dtype)
    ours, theirs = outcomes(form, numbers)
    # torch's vectors of 512 bits make a NaN of gelu(inf), where its own float64 has an answer.
    wide = outcomes(form, numbers.double())[1].values.to(theirs.values.dtype)
    expected = torch.where(theirs.values.isnan(), wide, theirs.values)
    torch.testing.assert_close(ours.values, expected, equal_nan=True)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.0, 3.0, 4, True])
def test_powers(exponent: float) -> None:
    for dtype in (*INTS, *WIDE):
        try:
            ours, theirs = outcomes(lambda x: x**exponent, values(dtype))
        except Refused:
            assert exponent < 0 and not dtype.is_floating_point
            continue
        if exponent in (0.5, -0.5):
            assert_close(ours, theirs)
        else:
            assert_same(ours, theirs, f"{dtype} ** {exponent}")


# Two operands

OPERATORS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lshift,
    operator.rshift,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
    operator.pow,
]
FUNCTIONS = [
    torch.minimum,
    torch.maximum,
    torch.min,
    torch.max,
    torch.fmod,
    torch.logical_and,
    torch.logical_or,
    torch.logical_xor,
    torch.clamp_min,
    torch.clamp_max,
    lambda x, y: torch.clamp(x, y, y + 1),
    lambda x, y: torch.where(x > 1, x, y),
    lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    lambda x, y: torch.div(x, y, rounding_mode="floor"),
]


def is_quirk(form: Form, *dtypes: torch.dtype) -> bool:
    """Return whether PyTorch's own kernels disagree about this form."""
    if form in (operator.floordiv, *FUNCTIONS[-2:]):
        # Whether the quotient of narrow floats is rounded before it is rounded down.
        return torch.promote_types(*dtypes) in NARROW
    # Whether a truth value may be taken from a number; a power of truth values.
    return form in (operator.sub, operator.pow) and torch.bool in dtypes


@pytest.mark.parametrize("form", [*OPERATORS, *FUNCTIONS], ids=lambda form: form.__name__)
def test_two_operands_of_every_dtype(form: Form) -> None:
    compared = 0
    for one in COMMON:
        for other in COMMON:
            if is_quirk(form, one, other):
                continue
            try:
                ours, theirs = outcomes(form, values(one), values(other))
            except Refused:
                continue
            if form is operator.pow:
                assert_close(ours, theirs)
            else:
                assert_same(ours, theirs, f"{form}({one}, {other})")
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("form", OPERATORS, ids=lambda form: form.__name__)
def test_special_numbers(form: Form) -> None:
    for dtype in WIDE:
        try:
            ours, theirs = outcomes(form, everything(dtype), everything(dtype))
        except Refused:
            continue
        if form is operator.pow:
            assert_close(ours, theirs)
        else:
            assert_same(ours, theirs, f"{form} of {dtype}")


NUMBERS = (True, 3, -2, 0.3)
OTHER_NUMBERS = (
    math.inf,
    np.int64(3),
    np.float32(0.3),
    np.float64(2.5),
    torch.tensor(2),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor(3, dtype=torch.int32),
)


def numbers_for(form: Form, dtype: torch.dtype) -> Iterator[Any]:
    more = OTHER_NUMBERS if dtype in (torch.bool, torch.int32, torch.float32) else ()
    for number in (*NUMBERS, *more):
        if not is_quirk(form, dtype, torch.bool if number is True else dtype):
            yield number


@pytest.mark.parametrize("form", OPERATORS, ids=lambda form: form.__name__)
def test_an_operand_may_be_a_number(form: Form) -> None:
    for dtype in COMMON:
        for number in numbers_for(form, dtype):
            try:
                ours, theirs = outcomes(form, values(dtype), number)
            except Refused:
                continue
            if form is operator.pow:
                assert_close(ours, theirs)
            else:
                assert_same(ours, theirs, f"{form}({dtype}, {number!r})")


@pytest.mark.parametrize("form", OPERATORS, ids=lambda form: form.__name__)
def test_the_first_operand_may_be_a_number(form: Form) -> None:
    for dtype in COMMON:
        for number in numbers_for(form, dtype):
            try:
                ours, theirs = outcomes(lambda x, n: form(n, x), values(dtype), number)
            except Refused:
                continue
            if form in (operator.pow, operator.truediv):  # PyTorch multiplies by a reciprocal
                assert_close(ours, theirs)
            else:
                assert_same(ours, theirs, f"{form}({number!r}, {dtype})")


def test_alpha_multiplies_the_second_operand() -> None:
    for one in (torch.bool, *INTS):
        for other in (torch.bool, torch.uint8, torch.int64):
            ours, theirs = outcomes(
                lambda x, y: torch.add(x, y, alpha=3), values(one), values(other)
            )
            assert_same(ours, theirs, f"{one}, {other}")
    ours, theirs = outcomes(lambda x: x.sub(4, alpha=2), values(torch.int64))
    assert_same(ours, theirs)


# Clamps, choices, conversions, new scalars

OTHERS: dict[str, Form] = {
    "clamp(min=)": lambda x: x.clamp(min=-1),
    "clamp(max=)": lambda x: x.clamp(max=1.5),
    "clamp(min, max)": lambda x: torch.clamp(x, -1, 2),
    "clamp(low above high)": lambda x: torch.clamp(x, 2, -1),
    "clip": lambda x: x.clip(0, 2),
    "clamp_min": lambda x: x.clamp_min(1),
    "where of numbers": lambda x: torch.where(x > 1, 1, 0),
    "where of floats": lambda x: torch.where(x > 1, 1.0, 0),
    "where of truths": lambda x: torch.where(x > 1, True, False),
    "where by name": lambda x: torch.where(condition=x > 1, input=x, other=x + 1),
    "Tensor.where": lambda x: x.where(x > 1, x + x),
    "masked_fill": lambda x: x.masked_fill(x > 1, 2),
    "masked_fill of a tensor": lambda x: x.masked_fill(x > 1, torch.tensor(2)),
    "full_like": lambda x: torch.full_like(x, 2),
    "full_like float": lambda x: torch.full_like(x, 2.7),
    "full_like dtype": lambda x: torch.full_like(x, 2.7, dtype=torch.float64),
    "zeros_like dtype": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "new_zeros": lambda x: x.new_zeros(()),
    "new_ones": lambda x: x.new_ones([]),
    "new_full": lambda x: x.new_full((), 3),
    "new_tensor": lambda x: x.new_tensor(3),
    "nan_to_num": lambda x: x.nan_to_num(1.0, 2.0, -3.0),
    "to dtype": lambda x: x.to(torch.float64),
    "to name": lambda x: x.to(dtype=torch.int32),
    "to device": lambda x: x.to("cpu"),
    "to device and dtype": lambda x: x.to(x.device, torch.float16),
    "to other": lambda x: x.to(torch.zeros(3, dtype=torch.bfloat16)),
    "type": lambda x: x.type(torch.float64),
    "type_as": lambda x: x.type_as(torch.zeros(3, dtype=torch.int64)),
    "cpu": lambda x: x.cpu(),
    "contiguous": lambda x: x.contiguous(),
    "squeeze": lambda x: x.squeeze(),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("form", OTHERS.values(), ids=OTHERS.keys())
def test_other_forms(form: Form) -> None:
    for dtype in COMMON:
        try:
            ours, theirs = outcomes(form, values(dtype))
        except Refused:
            continue
        assert_same(ours, theirs, str(dtype))


@pytest.mark.parametrize(
    "name",
    ["float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool"],
)
def test_conversions(name: str) -> None:
    for dtype in ALL:
        numbers = values(dtype)
        if name == "byte" and dtype != torch.bool:
            numbers = numbers.abs()
        ours, theirs = outcomes(operator.methodcaller(name), numbers)
        assert_same(ours, theirs, f"{dtype}.{name}()")


def test_the_default_dtype_is_torch_s() -> None:
    torch.set_default_dtype(torch.float64)  # restored after each test
    for form in (torch.exp, lambda x: x / 2, lambda x: x * 0.5):
        ours, theirs = outcomes(form, values(torch.int64))
        assert ours.dtype == torch.float64
        assert_same(ours, theirs)


# One operation has one node, however it is written

SPELLINGS: dict[str, list[Form]] = {
    "add": [
        lambda x, y: x + y,
        torch.add,
        operator.add,
        lambda x, y: x.add(y),
        lambda x, y: torch.add(input=x, other=y),
        lambda x, y: x.add(other=y),
        lambda x, y: x.__add__(y),
    ],
    "sub": [lambda x, y: x - y, torch.sub, torch.subtract, lambda x, y: torch.rsub(y, x)],
    "mul": [lambda x, y: x * y, torch.mul, torch.multiply, lambda x, y: x.mul(y)],
    "div": [lambda x, y: x / y, torch.div, torch.divide, torch.true_divide, lambda x, y: x.div(y)],
    "floordiv": [
        lambda x, y: x // y,
        torch.floor_divide,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
    ],
    "mod": [lambda x, y: x % y, torch.remainder, lambda x, y: x.remainder(y)],
    "lt": [
        lambda x, y: x < y,
        lambda x, y: y > x,
        torch.lt,
        torch.less,
        lambda x, y: torch.gt(y, x),
        lambda x, y: torch.greater(y, x),
        lambda x, y: x.lt(y),
    ],
    "le": [
        lambda x, y: x <= y,
        lambda x, y: y >= x,
        torch.le,
        torch.less_equal,
        lambda x, y: torch.greater_equal(y, x),
    ],
    "eq": [lambda x, y: x == y, torch.eq, lambda x, y: x.eq(y)],
    "not": [lambda x, y: x != y, torch.ne, torch.not_equal, lambda x, y: ~(x == y)],
    "min": [torch.minimum, torch.min, lambda x, y: x.minimum(y), lambda x, y: x.min(y)],
    "max": [torch.maximum, torch.max, lambda x, y: torch.max(x, other=y)],
    "where": [
        lambda x, y: torch.where(x < y, x, y),
        lambda x, y: x.where(x < y, y),
        lambda x, y: torch.where(x < y, input=x, other=y),
    ],
}


@pytest.mark.parametrize(("op", "spellings"), SPELLINGS.items(), ids=SPELLINGS.keys())
def test_spellings_of_one_operation_are_one_node(op: str, spellings: list[Form]) -> None:
    nodes = {
        trace(lambda score, b, h, q_idx, kv_idx, f=f: f(score, score * 2), "score").output
        for f in spellings
    }
    assert len(nodes) == 1
    (node,) = nodes
    assert op in (node.op, node.args[0].op if node.args else None)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: torch.exp(x),
        lambda x: x.exp(),
        lambda x: torch.special.exp2(x),
    ],
)
def test_functions_and_methods(form: Form) -> None:
    traced = trace(lambda score, b, h, q_idx, kv_idx: form(score), "score")
    assert traced.output.op in ("exp", "exp2")


def test_in_place_operators_bind_a_new_value() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        shifted = score
        shifted += 1
        shifted *= 2
        return shifted - score

    spelled = trace(lambda score, b, h, q_idx, kv_idx: (score + 1) * 2 - score, "score")
    assert trace(mod, "score").output is spelled.output


# Narrow floats are rounded once per operation


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_are_computed_in_float32(dtype: torch.dtype) -> None:
    table = torch.randn(8).to(dtype)
    traced = trace(lambda score, b, h, q_idx, kv_idx: F.gelu(table[h] * 0.1 + 1) / 3, "score")
    narrow = {node.op for node in walk(traced.output) if node.dtype == dtype}
    assert narrow == {"load", "cast"}
    wide = {node.dtype for node in walk(traced.output) if node.op in ("mul", "add", "erf", "div")}
    assert wide == {torch.float32}


def test_the_documented_table_of_what_can_be_written_is_this_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "masks.md").read_text()
    section = page.split("## What a mod can be written with")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == len(set(named))
    homes = (torch, torch.Tensor, torch.special, F)
    names = {"logsigmoid" if name == "log_sigmoid" else name for name in FORMS}
    known = {name for name in names if any(hasattr(home, name) for home in homes)}
    known.remove("rand")  # the other side's `&`, and no random number
    assert set(named) == known
