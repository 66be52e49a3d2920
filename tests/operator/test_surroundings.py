"""Calls inside of graphs, under autocast, inside of torch.func, and with numbers that change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.profiler import profile

from quire import Dense, attention
from quire.mods import causal


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(**kind: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 4, 6, 16, **kind) for _ in range(3)]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, Dense(key, value), mask=causal)


@pytest.mark.parametrize("watch", ["compile", "profile"])
def test_autocast_casts_as_outside_of_the_graph(watch: str) -> None:
    def model(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(*tensors)

    tensors = operands(requires_grad=True)
    expected = model(*tensors)
    if watch == "compile":
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(*tensors)
    else:
        with profile():
            found = model(*tensors)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    gradients = [torch.autograd.grad(x.float().sum(), tensors) for x in (found, expected)]
    assert all(map(torch.equal, *gradients))


def by_jvp(*tensors: Tensor) -> Tensor:
    return torch.func.jvp(attend, tensors, tensors)[1]


def by_grad(*tensors: Tensor) -> Tensor:
    return torch.func.grad(lambda *x: attend(*x).sum())(*tensors)


def by_vmap(*tensors: Tensor) -> Tensor:
    return torch.func.vmap(lambda x: attend(x, *tensors[1:]))(torch.stack(tensors))


def by_dual_level(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = attend(forward_ad.make_dual(query, key), key, value)
        return forward_ad.unpack_dual(out).tangent


TRANSFORMS = [by_jvp, by_grad, by_vmap, by_dual_level]


@pytest.mark.parametrize("function", TRANSFORMS)
def test_a_graph_breaks_at_a_transform(function: Callable[..., Tensor]) -> None:
    tensors = operands(dtype=torch.float64)
    found = torch.compile(function, backend="aot_eager")(*tensors)
    torch.testing.assert_close(found, function(*tensors))


@pytest.mark.parametrize("function", TRANSFORMS[:3])
def test_a_transform_is_refused_if_the_graph_may_not_break(function: Callable[..., Tensor]) -> None:
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot be part of a graph"):
        compiled(*operands())


def test_a_number_that_changes_is_never_stale() -> None:
    factor = 1.0

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale = factor
        return attention(
            query, Dense(key, value), score_mod=lambda score, b, h, i, j: score * scale
        )

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in (1.0, 3.0, -0.3):
        factor = number
        assert torch.equal(compiled(*operands()), model(*operands()))
