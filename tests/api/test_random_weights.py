"""Random expressions, vectors among them, as weights and as mods on probabilities.

Queries and keys are small integers, so that scores have no rounding, and a random weight has the
same bits however it is computed. Values are the unit matrix, so that the output is the weights.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.random_graphs import RandomMod, random_mods
from torch import Tensor

from quire import Dense, Paged, Ragged, attention, reference
from quire.memory import Memory
from quire.mods import causal

SIZES = st.sampled_from([(1, 7), (3, 40), (20, 33)])


def operands(q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.Generator().manual_seed(q_len)
    query = torch.randint(-2, 3, (1, 2, q_len, 4), generator=seed).float()
    key = torch.randint(-2, 3, (1, 1, kv_len, 4), generator=seed).float()
    return query, key, torch.eye(kv_len)[None, None]


def memories(key: Tensor, value: Tensor) -> dict[str, Memory]:
    """The same keys in every memory; pages are in reverse order."""
    kv_len = key.shape[2]
    count = -(-kv_len // 8)
    pages = [torch.full((count, 1, 8, x.shape[3]), math.nan) for x in (key, value)]
    for x, held in zip((key, value), pages, strict=True):
        for page in range(count):
            some = x[0, :, 8 * page : 8 * (page + 1)]
            held[count - 1 - page, :, : some.shape[1]] = some
    table = torch.arange(count - 1, -1, -1, dtype=torch.int32)[None]
    packed = (x[0].transpose(0, 1) for x in (key, value))
    return {
        "dense": Dense(key, value),
        "ragged": Ragged(*packed, [0, kv_len]),
        "paged": Paged(*pages, table, [kv_len]),
    }


def attended(query: Tensor, memory: Memory, **options: Any) -> Tensor:
    if isinstance(memory, Ragged):
        rows = query[0].transpose(0, 1)
        out = attention(rows, memory, q_offsets=[0, query.shape[2]], **options)
        return out.transpose(0, 1)[None]
    return attention(query, memory, **options)


def gradients(out: Tensor, inputs: tuple[Tensor, ...], above: Tensor) -> tuple[Tensor, ...]:
    """The gradients; 0 where nothing depends on an input, as in rows that read no key."""
    return torch.autograd.grad(out, inputs, above, allow_unused=True, materialize_grads=True)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7e7, 8e8, 9e9), b.nan_to_num(7e7, 8e8, 9e9))


@settings(max_examples=25)
@given(random_mods("score"), SIZES)
def test_weights(mod: RandomMod, sizes: tuple[int, int]) -> None:
    """Negative and infinite weights and NaN among them: the bits of the reference."""
    query, key, value = operands(*sizes)
    start = sizes[1] - sizes[0]
    exact = reference.attention(
        query, key, value, score_mod=mod, weighting="sums", scale=0.5, q_start=start
    )
    options: dict[str, Any] = {"weight": mod, "normalise": False, "scale": 0.5}
    for name, memory in memories(key, value).items():
        for backend in ("jit", "eager") if name == "dense" else ("jit",):
            out = attended(query, memory, backend=backend, **options)
            assert same(out, exact.out), (name, backend)


def has_extreme(mod: RandomMod) -> bool:
    """Whether more than two numbers may tie: torch gives them other shares of the gradient."""
    return "amin" in mod.source or "amax" in mod.source


@settings(max_examples=12)
@given(random_mods("score", smooth=True).filter(lambda mod: not has_extreme(mod)), SIZES)
def test_gradients_of_weights(mod: RandomMod, sizes: tuple[int, int]) -> None:
    query, key, value = (x.requires_grad_() for x in operands(*sizes))
    start = sizes[1] - sizes[0]
    above = torch.randn(1, 2, sizes[0], sizes[1], generator=torch.Generator().manual_seed(1))
    exact = reference.attention(
        query, key, value, score_mod=mod, weighting="sums", scale=0.5, q_start=start
    )
    wanted = gradients(exact.out, (query, key, value), above)
    for name, memory in memories(key, value).items():
        out = attended(query, memory, weight=mod, normalise=False, scale=0.5)
        found = gradients(out, (query, key, value), above)
        for mine, other in zip(found, wanted, strict=True):
            size = float(other.nan_to_num(0, 0, 0).abs().max())
            torch.testing.assert_close(
                mine, other, rtol=1e-3, atol=1e-5 + 1e-4 * size, equal_nan=True, msg=name
            )


@settings(max_examples=12)
@given(random_mods("score", smooth=True), SIZES)
def test_mods_on_probabilities(mod: RandomMod, sizes: tuple[int, int]) -> None:
    query, key, value = operands(*sizes)
    start = sizes[1] - sizes[0]
    exact = reference.attention(
        query, key, value, mask_mod=causal, prob_mod=mod, scale=0.5, q_start=start
    )
    size = float(exact.out.nan_to_num(0, 0, 0).abs().max())
    outs = []
    for name, memory in memories(key, value).items():
        out = attended(query, memory, mask=causal, prob_mod=mod, scale=0.5)
        torch.testing.assert_close(
            out, exact.out, rtol=1e-3, atol=1e-5 + 1e-4 * size, equal_nan=True, msg=name
        )
        outs.append(out)
    assert same(outs[0], outs[1]) and same(outs[0], outs[2])


@settings(max_examples=12)
@given(random_mods("mask"), SIZES)
def test_multiples_of_probabilities(mask: RandomMod, sizes: tuple[int, int]) -> None:
    """A random condition chooses the factor, so one pass computes the mod."""
    query, key, value = operands(*sizes)

    def halved(prob: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(mask(b, h, q_idx, kv_idx), prob * -1.5, prob / 2)

    options: dict[str, Any] = {"prob_mod": halved, "scale": 0.5}
    start = sizes[1] - sizes[0]
    exact = reference.attention(query, key, value, mask_mod=causal, q_start=start, **options)
    outs = [attended(query, x, mask=causal, **options) for x in memories(key, value).values()]
    torch.testing.assert_close(outs[0], exact.out, rtol=1e-5, atol=1e-6)
    assert same(outs[0], outs[1]) and same(outs[0], outs[2])


SPECIAL = {
    "negative": [1.0, -2.0, 0.5],
    "cancel": [1.0, -1.0, 0.0],
    "infinite": [math.inf, 1.0, 1.0],
    "both infinities": [math.inf, 1.0, -math.inf],
    "nan": [math.nan, 1.0, 1.0],
    "no key": [-math.inf, -math.inf, -math.inf],
    "-0": [-0.0, -0.0, -0.0],
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("q_len", [1, 20])
def test_special_weights_in_every_memory(name: str, normalise: bool, q_len: int) -> None:
    """Out and gradients, with a value of NaN behind a weight of -inf."""
    table = torch.tensor(SPECIAL[name]).repeat(7)
    query, key, _ = operands(q_len, 21)
    value = torch.randn(1, 1, 21, 5)
    if table[2] == -math.inf:
        value[0, 0, 2] = math.nan
    query, key, value = (x.requires_grad_() for x in (query, key, value))

    def weight(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[kv_idx] + 0 * score

    exact = reference.attention(
        query, key, value, score_mod=weight, weighting="shares" if normalise else "sums"
    )
    above = torch.randn_like(exact.out)
    wanted = gradients(exact.out, (query, key, value), above)
    for each, memory in memories(key, value).items():
        out = attended(query, memory, weight=weight, normalise=normalise)
        torch.testing.assert_close(out, exact.out, equal_nan=True, msg=each)
        found = gradients(out, (query, key, value), above)
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, equal_nan=True, msg=each)
