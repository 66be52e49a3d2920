"""Every op, in every dtype, at the ends of its range: compiled code gives what torch gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from codegen.panels import PanelRun, host_with
from codegen.test_lower import ULPS, cases, graph
from torch import Tensor

import quire
from quire import Dense
from quire.codegen.llvm.target import Target
from quire.config import Backend
from quire.ir.graph import Node, cast, const
from quire.ir.interpret import interpret
from quire.ir.ops import OPS, Typing

I64, F64 = torch.int64, torch.float64
KEY = Node("input", (), I64, "kv_idx")
QUERY = Node("input", (), I64, "q_idx")
SMALL = (-70, -64, -63, -33, -9, -8, -7, -3, -2, -1, 0, 1, 2, 3, 5, 7, 8, 9, 31, 32, 63, 64, 65, 70)
FRACTIONS = (0.0, 1.0, 0.5, 2.5, 1 / 3, 3.0, 7.0, 1e-9, 100.0, 1e4, 1e9, 1e15, 1e30, math.inf)


def ends(dtype: torch.dtype) -> Tensor:
    """Numbers of a dtype: small ones, its lowest and its highest, and what is no number."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        few = {number for number in SMALL if info.min <= number <= info.max}
        few |= {info.min, info.min + 1, info.max // 2, info.max - 1, info.max}
        return torch.tensor(sorted(few)).to(dtype)
    limits = torch.finfo(dtype)
    sizes = [*FRACTIONS, limits.max, limits.tiny, limits.smallest_normal * limits.eps, limits.eps]
    numbers = [number for size in sizes for number in (size, -size)]
    return torch.tensor([*numbers, math.nan], dtype=F64).to(dtype)


def operands(op: str, dtype: torch.dtype) -> list[Tensor]:
    """Every combination of two ends; integers are not divided by 0."""
    arity = OPS[op].arity or 0
    columns = [ends(dtype)] * min(arity, 2)
    if OPS[op].typing is Typing.WHERE:
        columns = [ends(torch.bool), *columns]
    rows = list(itertools.product(*columns))
    if op in ("floordiv", "mod") and not dtype.is_floating_point:
        rows = [row for row in rows if row[1] != 0]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def exact(op: str, dtype: torch.dtype, captures: list[Tensor]) -> Tensor:
    """What torch gives, which is our interpreter's meaning of an op.

    Functions are computed in float64, and narrow floats in float32, as the tracer has it: torch
    flushes and rounds in between.
    """
    wide = dtype
    if dtype.is_floating_point and (op in ULPS or dtype.itemsize < 4):
        wide = F64 if op in ULPS else torch.float32
    given = [column.to(wide) if column.dtype == dtype else column for column in captures]
    root = graph(op, wide, KEY)
    expected = interpret(root, {"kv_idx": torch.arange(len(given[0]))}, given)
    if op == "mod" and dtype.is_floating_point:
        # The vector code of torch gives NaN where the quotient overflows; C's fmod does not.
        a, b = given
        pairs = zip(a.tolist(), b.tolist(), strict=True)
        left = torch.tensor([_fmod(x, y) for x, y in pairs], dtype=F64).to(wide)
        mended = torch.where((left != 0) & ((b < 0) != (left < 0)), left + b, left)
        assert bool(((expected == mended) | expected.isnan()).all())
        expected = mended
    return expected.to(dtype) if expected.dtype == wide else expected


def _fmod(x: float, y: float) -> float:
    defined = math.isfinite(x) and y == y and y != 0
    return math.fmod(x, y) if defined else math.nan


def in_halves(root: Node) -> list[Node]:
    """An int64 as two numbers that a float64 holds; anything else as it is."""
    if root.dtype != I64:
        return [root]
    low = Node("and", (root, const(2**32 - 1, I64)), I64)
    return [low, Node("shr", (root, const(32, I64)), I64)]


def compiled(root: Node, captures: list[Tensor], target: Target, lanes: bool) -> Tensor:
    """Computed for one query after the other in lanes, or for one key after the other."""
    run = PanelRun(cast(root, F64), [], captures, F64, target)
    width = run.tile.width if lanes else 1
    result, wrong = run(torch.zeros(len(captures[0]) // width, width, dtype=F64))
    assert not wrong
    return result.flatten()


@pytest.mark.parametrize(("bits", "lanes"), [(0, False), (128, True), (256, True), (512, True)])
@pytest.mark.parametrize(("op", "dtype"), cases(), ids=str)
def test_ends(op: str, dtype: torch.dtype, bits: int, lanes: bool) -> None:
    target = host_with(bits) if bits else Target.host()
    captures, place = operands(op, dtype), KEY
    if lanes:
        width = target.vectors * target.vector_bits // 64
        captures = [column.repeat(width) for column in captures]  # whole panels
        place = Node("add", (Node("mul", (KEY, const(width, I64)), I64), QUERY), I64)
    wanted = exact(op, dtype, captures)
    for root, expected in zip(in_halves(graph(op, dtype, place)), halves(wanted), strict=True):
        assert_close(op, compiled(root, captures, target, lanes), expected, captures)


def halves(numbers: Tensor) -> list[Tensor]:
    return [numbers & 2**32 - 1, numbers >> 32] if numbers.dtype == I64 else [numbers]


def assert_close(op: str, actual: Tensor, expected: Tensor, captures: list[Tensor]) -> None:
    """Equal, NaN included; within some units in the last place where an op is approximated."""
    wide = expected.double()
    bound = torch.zeros_like(wide)
    if op in ULPS and expected.dtype.is_floating_point:
        info = torch.finfo(expected.dtype)
        size = wide.abs().nan_to_num(0.0, 0.0, 0.0)
        ulps = torch.full_like(wide, ULPS[op])
        if op == "pow" and expected.dtype == F64:
            ulps = 4 + 2 * size.log2().abs().nan_to_num(0.0, 1100.0, 1100.0)
        bound = ulps * (info.eps * size + info.tiny * info.eps)
        if op in ("sin", "cos") and expected.dtype == F64:
            bound = bound.clamp(min=ULPS[op] * info.eps / 4)
    same = (actual == wide) | (actual.isnan() & wide.isnan()) | ((actual - wide).abs() <= bound)
    for at in (~same).nonzero().flatten().tolist()[:5]:
        given = [column[at].item() for column in captures]
        print(f"{op}({given}) is {actual[at].item()!r}, torch has {wide[at].item()!r}")
    assert bool(same.all()), f"{int((~same).sum())} of {len(same)} are wrong"


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


DIVISIONS: dict[str, tuple[Callable[..., Any], Callable[[int, int], int]]] = {
    "floor": (lambda a, b: a // b, lambda a, b: a // b),
    "remainder": (lambda a, b: a % b, lambda a, b: a % b),
    "trunc": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), truncated),
    "fmod": (torch.fmod, lambda a, b: a - b * truncated(a, b)),
}


@pytest.mark.parametrize("backend", ["jit", "eager"])
@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, I64], ids=str)
def test_divisions_of_the_lowest_integer(dtype: torch.dtype, name: str, backend: Backend) -> None:
    """torch ends the process where it rounds the lowest integer over -1 towards zero."""
    divide, meaning = DIVISIONS[name]
    numbers = ends(dtype)
    divisors = numbers[numbers != 0]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return divide(numbers[q_idx], divisors[kv_idx]) == wanted[q_idx, kv_idx]

    rows = [[meaning(a, b) for b in divisors.tolist()] for a in numbers.tolist()]
    limit, wrap = torch.iinfo(dtype).max, 2 ** torch.iinfo(dtype).bits
    wanted = torch.tensor([[x - wrap if x > limit else x for x in row] for row in rows]).to(dtype)
    query, key = torch.zeros(1, 1, len(numbers), 16), torch.zeros(1, 1, len(divisors), 16)
    values = torch.eye(len(divisors))[None, None]
    read = quire.attention(query, Dense(key, values), mask=mask, backend=backend)
    torch.testing.assert_close(read, torch.full_like(read, 1 / len(divisors)))
