"""What every memory must do: each class that `attention` takes has an example here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

import quire
from quire import Dense, Paged, Ragged, attention
from quire.errors import ArgumentError
from quire.memory import Memory, Queries
from quire.mods import causal

B, HQ, HKV, L, S, D, PAGE = 2, 4, 2, 3, 40, 16, 16
SLOPES = torch.linspace(0.1, 0.4, HQ)


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * (q_idx - kv_idx) * (b + 1)


class Example(NamedTuple):
    """The keys and values [B, Hkv, S, D] of two sequences, as a memory holds them."""

    memory: Callable[[Tensor, Tensor], Memory]
    query: Callable[[Tensor], Tensor]  # from [B, Hq, L, D] to what it is called with
    out: Callable[[Tensor], Tensor]  # the other way round
    q_offsets: list[int] | None = None


def packed(rows: Tensor) -> Tensor:
    return rows.transpose(1, 2).flatten(0, 1)


def in_pages(rows: Tensor) -> Tensor:
    """Two sequences of 40 rows in six pages of 16."""
    whole = torch.nn.functional.pad(rows, (0, 0, 0, 3 * PAGE - S))
    return whole.unflatten(2, (3, PAGE)).transpose(1, 2).flatten(0, 1)


def same(rows: Tensor) -> Tensor:
    return rows


EXAMPLES: dict[type, Example] = {
    Dense: Example(Dense, same, same),
    Ragged: Example(
        memory=lambda key, value: Ragged(packed(key), packed(value), [0, S, 2 * S]),
        query=packed,
        out=lambda rows: rows.unflatten(0, (B, L)).transpose(1, 2),
        q_offsets=[0, L, 2 * L],
    ),
    Paged: Example(
        memory=lambda key, value: Paged(
            in_pages(key), in_pages(value), torch.arange(6).view(2, 3), [S, S]
        ),
        query=same,
        out=same,
    ),
}
each = pytest.mark.parametrize("kind", get_args(Memory))


@each
def test_it_has_an_example_and_a_public_name(kind: type) -> None:
    assert kind in EXAMPLES
    assert getattr(quire, kind.__name__) is kind
    assert kind.__name__ in quire.__all__


@each
@pytest.mark.parametrize("backend", ["jit", "eager"])
def test_it_computes_what_dense_memory_computes(kind: type, backend: Any) -> None:
    example, (query, key, value) = EXAMPLES[kind], operands()
    options: Any = {"mask": causal, "score_mod": slanted, "backend": backend}
    found = compute(example, query, key, value, **options)
    alone = attention(query, Dense(key, value), **options)
    torch.testing.assert_close(found, alone)
    if backend == "jit":
        assert torch.equal(found, alone)
    above = torch.randn_like(alone)
    gradients = (torch.autograd.grad(out, (query, key, value), above) for out in (found, alone))
    torch.testing.assert_close(*gradients)


@each
def test_its_rows_come_back_as_they_were_given(kind: type) -> None:
    example, (query, key, value) = EXAMPLES[kind], operands()
    given, memory = example.query(query), example.memory(key, value)
    placed = memory.place(given, Queries(offsets=example.q_offsets))
    assert torch.equal(memory.as_placed(given, given), placed.query)
    assert torch.equal(memory.as_given(given, placed.query), given)


@each
def test_errors_name_it(kind: type) -> None:
    query, key, _ = operands()
    with pytest.raises(ArgumentError, match=rf"memory must be .*\b{kind.__name__}\b.*, but"):
        attention(query, key)  # type: ignore[call-overload]


@each
def test_a_plan_takes_it_or_says_that_it_does_not(kind: type) -> None:
    example, (query, key, value) = EXAMPLES[kind], (x.detach() for x in operands())
    given, memory = example.query(query), example.memory(key, value)
    if kind is Dense:
        assert torch.equal(quire.plan(given, memory)(given, memory), attention(given, memory))
        return
    with pytest.raises(ArgumentError, match=rf"plan .*\bDense\b.*\b{kind.__name__}\b"):
        quire.plan(given, memory)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, HQ, L, D), (B, HKV, S, D), (B, HKV, S, D))
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return query, key, value


def compute(example: Example, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    memory = example.memory(key, value)
    out = attention(example.query(query), memory, q_offsets=example.q_offsets, **options)
    return example.out(out)
