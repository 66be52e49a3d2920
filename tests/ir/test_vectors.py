"""Vectors in mods: rows of captured tensors are what PyTorch makes of them, number by number."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ir.oracle import assert_same, by_trace, by_vmap, scores
from torch import Tensor

from quire.errors import CapturedIndexError, ModResultError, TracedBranchError, UnsupportedOpError
from quire.ir.graph import walk
from quire.ir.trace import trace
from quire.ir.vector import LONGEST

SIZES = (1, 1, 5, 7)
INTS = (torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Form = Callable[..., Any]


def rows(count: int, dtype: torch.dtype, width: int = 3) -> Tensor:
    """Rows of small numbers that are exact in every dtype; none of them twice in a row."""
    numbers = torch.stack([torch.randperm(9)[:width] for _ in range(count)]) + 1
    if dtype.is_floating_point:
        numbers = (numbers - 4.5) / 2
    return numbers.to(dtype) if dtype != torch.bool else numbers % 2 == 0


def assert_as_torch(form: Form, x: Tensor, y: Tensor, *, rounded: bool = False) -> None:
    """form(x[q_idx], y[kv_idx]) is what PyTorch makes of it; up to roundings if `rounded`."""

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return form(x[q_idx], y[kv_idx])

    score = scores(SIZES, torch.float64)
    ours, theirs = (run(mod, "score", score, SIZES) for run in (by_trace, by_vmap))
    if not rounded:
        assert_same(ours, theirs, str((x.dtype, y.dtype)))
        return
    assert ours.dtype == theirs.dtype
    eps = 4 * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.values, theirs.values, rtol=eps, atol=eps, equal_nan=True)


# Exact for small numbers, in whatever order they are added

EXACT: dict[str, Form] = {
    "sum": lambda x, y: (x - y).sum(-1),
    "sum of all": lambda x, y: torch.sum(x + y),
    "sum in float64": lambda x, y: x.sum(dim=0, dtype=torch.float64),
    "prod": lambda x, y: x.prod(),
    "amax": lambda x, y: (x - y).amax(),
    "amin": lambda x, y: torch.amin(x * 2, dim=-1),
    "max": lambda x, y: (x + y).max(),
    "max along": lambda x, y: x.max(-1).values,
    "place of the maximum": lambda x, y: x.max(dim=-1).indices,
    "min of two": lambda x, y: torch.min(x, y).sum(),
    "argmax": lambda x, y: x.argmax(),
    "argmin": lambda x, y: torch.argmin(y, dim=-1),
    "an element": lambda x, y: x[0] + y[-1],
    "a slice": lambda x, y: x[1:].sum() + y[:-1].sum(),
    "unpacked": lambda x, y: next(a * 4 + b * 2 + c for a, b, c in [x]),
    "length": lambda x, y: x[0] * len(y) + x.shape[0] + x.size(-1) + y.numel() + x.dim(),
    "unbind": lambda x, y: x.unbind(-1)[2],
    "stack": lambda x, y: torch.stack([x[0], y[1]]).sum(),
    "stack of rows": lambda x, y: torch.stack([x, y], dim=1).sum(0)[1],
    "cat": lambda x, y: torch.cat([x, y]).amax(),
    "cat of dtypes": lambda x, y: torch.cat([x, y.double()]).sum(),
    "unsqueeze": lambda x, y: (x.unsqueeze(0) + y.unsqueeze(1)).amax(0)[2],
    "squeeze": lambda x, y: x.unsqueeze(0).squeeze(0)[1] + x.sum(-1, keepdim=True).squeeze(),
    "where": lambda x, y: torch.where(x < y, x, y).sum(),
    "where by method": lambda x, y: x.where(x < y, y).sum(),
    "where of a number": lambda x, y: torch.where(x < 3, x, 0).sum(),
    "masked_fill": lambda x, y: x.masked_fill(x < y, 0).sum(),
    "clamp": lambda x, y: x.clamp(min=2).sum(),
    "clamp by a vector": lambda x, y: torch.clamp(x, min=y).sum(),
    "any": lambda x, y: (x < y).any().long(),
    "all": lambda x, y: (x < y).all(-1).long(),
    "count": lambda x, y: (x == y).sum(),
    "alpha": lambda x, y: torch.add(x, y, alpha=2).sum(),
    "conversion": lambda x, y: x.double().sum() + y.to(torch.float64)[0],
    "new": lambda x, y: torch.ones_like(x).sum() + torch.full_like(y, 2).sum(),
    "square": lambda x, y: (x**2).sum() + y.square().sum(),
}


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, dtype: torch.dtype) -> None:
    assert_as_torch(EXACT[name], rows(5, dtype), rows(7, dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
def test_truth(dtype: torch.dtype) -> None:
    x, y = rows(5, dtype), rows(7, dtype)
    for form in (
        lambda x, y: x.any(),
        lambda x, y: torch.all(y, dim=-1),
        lambda x, y: (x & y).any(),
        lambda x, y: x.sum(),
        lambda x, y: x.amax(),
    ):
        assert_as_torch(form, x, y)


ROUNDED: dict[str, Form] = {
    "distance": lambda x, y: (x - y).pow(2).sum(-1).sqrt(),
    "mean": lambda x, y: (x * y).mean(),
    "norm": lambda x, y: (x - y).norm(),
    "norm of 1": lambda x, y: (x - y).norm(p=1),
    "norm of 3": lambda x, y: torch.norm(x - y, 3),
    "largest norm": lambda x, y: torch.linalg.norm(x - y, float("inf")),
    "smallest norm": lambda x, y: torch.linalg.vector_norm(x - y, -float("inf")),
    "number that are not 0": lambda x, y: torch.linalg.vector_norm(x - x[0], 0),
    "vector norm": lambda x, y: torch.linalg.vector_norm(x, dim=-1),
    "dist": lambda x, y: torch.dist(x, y),
    "product": lambda x, y: x @ y,
    "matmul": lambda x, y: torch.matmul(x, y),
    "dot": lambda x, y: torch.dot(x, y),
    "dot by method": lambda x, y: x.dot(y),
    "inner": lambda x, y: torch.inner(x, y),
    "cross": lambda x, y: torch.cross(x, y, dim=-1)[0],
    "cross of linalg": lambda x, y: torch.linalg.cross(x, y).sum(),
    "functions": lambda x, y: (x.exp() + torch.tanh(y)).sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded(name: str, dtype: torch.dtype) -> None:
    assert_as_torch(ROUNDED[name], rows(5, dtype), rows(7, dtype), rounded=True)


@pytest.mark.parametrize("name", ["norm", "product", "mean", "distance", "cross"])
def test_narrow_floats_are_summed_in_float32(name: str) -> None:
    x, y = rows(5, torch.bfloat16), rows(7, torch.bfloat16)
    assert_as_torch(ROUNDED[name], x, y, rounded=True)


def test_matrices() -> None:
    turn, x = torch.randn(5, 3, 3).double(), torch.randn(7, 3).double()
    assert_as_torch(lambda m, v: (m @ v).norm(), turn, x, rounded=True)
    assert_as_torch(lambda m, v: (v @ m)[1], turn, x, rounded=True)
    assert_as_torch(lambda m, v: (m @ m)[0, 2], turn, x, rounded=True)
    assert_as_torch(lambda m, v: m.norm(dim=-1).amax() + m[1, 1:].sum(), turn, x, rounded=True)
    assert_as_torch(lambda m, v: m.sum((0, 1)), turn, x, rounded=True)


# Dtypes: a scalar changes that of a vector only if it is of a higher category


@pytest.mark.parametrize("scalar", [torch.bool, *INTS, *FLOATS], ids=str)
@pytest.mark.parametrize("vector", [torch.bool, *INTS, *FLOATS], ids=str)
def test_promotion(vector: torch.dtype, scalar: torch.dtype) -> None:
    table = rows(7, scalar)[:, 0].contiguous()
    for op in (operator.mul, torch.add, operator.lt, torch.maximum):
        assert_as_torch(lambda x, y, op=op: op(x, y)[1], rows(5, vector), table)


@pytest.mark.parametrize("number", [2, 0.5, True])
@pytest.mark.parametrize("dtype", [*INTS, *FLOATS], ids=str)
def test_numbers(dtype: torch.dtype, number: float) -> None:
    assert_as_torch(lambda x, y: (x * number + number)[0], rows(5, dtype), rows(7, dtype))


# Where vectors come from


def test_a_captured_tensor_takes_part_as_a_whole() -> None:
    weights = torch.tensor([0.5, 1.0, -2.0])
    x, y = rows(5, torch.float32), rows(7, torch.float32)
    assert_as_torch(lambda x, y: ((x - y) * weights).sum(), x, y, rounded=True)
    assert_as_torch(lambda x, y: weights @ x, x, y, rounded=True)
    assert_as_torch(lambda x, y: (x[0] * weights)[2] - weights[1], x, y)


def test_columns_and_parts_of_a_table() -> None:
    table = torch.randn(5, 4, 3)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        column, part = table[q_idx, :, 1], table[q_idx, 1:3, ::2]
        return column[1:].amax() + part[0, 1] + part.amin() + table[..., 0][q_idx, 2]

    score = scores((1, 1, 5, 1), torch.float64)
    assert_same(*(run(mod, "score", score, (1, 1, 5, 1)) for run in (by_trace, by_vmap)))


def test_each_element_is_loaded_once() -> None:
    x = torch.randn(5, LONGEST)
    traced = trace(lambda s, b, h, q, k: (x[q] * x[k]).sum() + x[q].norm(), "score")
    loads = [node for node in walk(traced.output) if node.op == "load"]
    assert len(loads) == 2 * LONGEST
    assert len(traced.captures) == 1


# What is refused

LONG, SHORT = torch.zeros(5, LONGEST + 1), torch.zeros(5, 3)
EAGER = (
    "at <string>:1. The call still runs, on the slower eager path; to have it compiled write it "
    "with the ops of the table."
)
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "long[q_idx].sum()": (
        UnsupportedOpError,
        "a mod computes with single numbers and vectors of up to 64, but a captured tensor of "
        "shape [65] takes part as a whole at <string>:1. The call still runs, on the slower eager "
        "path; to have it compiled index more of its dimensions, as in bias[h, q_idx].",
    ),
    "(long[q_idx, 1:].unsqueeze(0) * short[kv_idx].unsqueeze(1)).sum()": (
        UnsupportedOpError,
        f"a vector of 192 numbers, where 64 is the most, has no row in quire's table of ops "
        f"{EAGER}",
    ),
    "short[q_idx] + long[kv_idx, :2]": (
        UnsupportedOpError,
        f"an operation on vectors of the shapes [3] and [2] has no row in quire's table of ops "
        f"{EAGER}",
    ),
    "short[q_idx].sum(1)": (
        UnsupportedOpError,
        f"dimension 1 of a vector of 1 has no row in quire's table of ops {EAGER}",
    ),
    "short[q_idx] @ long[kv_idx, :2]": (
        UnsupportedOpError,
        f"a product of [3] and [2] has no row in quire's table of ops {EAGER}",
    ),
    "short[q_idx] @ score": (
        UnsupportedOpError,
        f"a product of [3] and [] has no row in quire's table of ops {EAGER}",
    ),
    "(short[q_idx] * 2)[kv_idx]": (
        UnsupportedOpError,
        f"indexing a vector by anything but constants has no row in quire's table of ops {EAGER}",
    ),
    "short[q_idx, :2][kv_idx]": (
        UnsupportedOpError,
        f"a slice of a captured tensor at a traced index has no row in quire's table of ops "
        f"{EAGER}",
    ),
    "torch.cross(long[q_idx, :2], long[kv_idx, :2], dim=-1)[0]": (
        UnsupportedOpError,
        f"cross of [2] and [2] has no row in quire's table of ops {EAGER}",
    ),
    "short[q_idx].flip(0)[0]": (
        UnsupportedOpError,
        f"Tensor.flip has no row in quire's table of ops {EAGER}",
    ),
    "short[q_idx].norm(p='nuc')": (
        UnsupportedOpError,
        f"norm of [3] with 'nuc' along None has no row in quire's table of ops {EAGER}",
    ),
    "short[q_idx].long().mean()": (
        UnsupportedOpError,
        f"mean of torch.int64 has no row in quire's table of ops {EAGER}",
    ),
    "short[q_idx, 3]": (
        CapturedIndexError,
        "index 3 is out of bounds for dimension 1 with size 3 of a captured tensor of shape [5, 3] "
        "at <string>:1. Count from 0, or from -1 at the end.",
    ),
    "(short[q_idx] * 2)[3]": (
        CapturedIndexError,
        "an index of a vector must be within its shape [3], but is 3 at <string>:1. Count from 0, "
        "or from -1 at the end.",
    ),
    "short[q_idx]": (
        ModResultError,
        "score_mod '<lambda>' must return one scalar for each element, but returned a tensor of "
        "shape [3]. Reduce or index it.",
    ),
    "short[q_idx] * 2": (
        ModResultError,
        "score_mod '<lambda>' must return one scalar for each element, but returned a tensor of "
        "shape [3]. Reduce or index it.",
    ),
    "score if (short[q_idx] > 0) else 0": (
        TracedBranchError,
        "a Python branch on a traced value at <string>:1. A mod runs once for all elements, so "
        "Python cannot choose for each: write torch.where(condition, a, b), and & | ~ in place of "
        "and, or, not.",
    ),
}


@pytest.mark.parametrize("source", REFUSED)
def test_refused(source: str) -> None:
    mod = eval(
        f"lambda score, b, h, q_idx, kv_idx: {source}",
        {"long": LONG, "short": SHORT, "torch": torch},
    )
    error, message = REFUSED[source]
    with pytest.raises(error) as caught:
        trace(mod, "score")
    assert str(caught.value) == message
