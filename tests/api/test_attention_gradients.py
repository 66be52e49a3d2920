"""The backward pass as a function of results from elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import AuxRequest, Dense, Ragged, attention, attention_gradients, create_block_mask
from quire.errors import ShapeError
from quire.mods import causal

LSE = AuxRequest(lse=True)


def tensors(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q_len, kv_len = lengths
    shapes = ((2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 6))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_is_what_autograd_computes(dtype: torch.dtype) -> None:
    query, key, value = tensors(30, 40, dtype=dtype)
    table = torch.randn(41, requires_grad=True)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[q_idx - kv_idx]

    mods = {"score_mod": biased, "mask": causal}
    out, aux = attention(query, Dense(key, value), **mods, return_aux=LSE)
    above = torch.randn_like(out), torch.randn_like(aux.lse)
    expected = torch.autograd.grad((out, aux.lse), (query, key, value, table), above)
    found = attention_gradients(query, Dense(key, value), out, aux.lse, *above, **mods)
    ((tensor, grad),) = found.captured
    assert tensor is table
    for mine, its in zip((*found[:3], grad), expected, strict=True):
        rounded = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
        assert mine.dtype == its.dtype and not mine.requires_grad
        torch.testing.assert_close(mine, its, **rounded)


def test_shards_of_keys() -> None:
    """As in a ring: each part of the keys knows only the output of all."""
    query, key, value = tensors(50, 50, dtype=torch.float64)
    whole = attention(query, Dense(key, value), mask=causal)
    above = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (query, key, value), above)
    cuts = [(0, 17), (17, 40), (40, 50)]
    shards = [Dense(key[:, :, a:b], value[:, :, a:b], start=a) for a, b in cuts]
    parts = [attention(query, shard, mask=causal, q_start=0, return_aux=LSE) for shard in shards]
    lse = torch.stack([aux.lse for _, aux in parts]).logsumexp(0)
    out = sum(part * (aux.lse - lse).exp().unsqueeze(-1) for part, aux in parts)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, whole)
    found = [
        attention_gradients(query, shard, out, lse, above, mask=causal, q_start=0)
        for shard in shards
    ]
    torch.testing.assert_close(torch.stack([x.query for x in found]).sum(0), expected[0])
    torch.testing.assert_close(torch.cat([x.key for x in found], 2), expected[1])
    torch.testing.assert_close(torch.cat([x.value for x in found], 2), expected[2])


def test_ragged_memory_and_block_masks() -> None:
    rows = [torch.randn(20, 3, 8, requires_grad=True) for _ in range(3)]
    memory = Ragged(rows[1], rows[2], [0, 7, 7, 20])
    out, aux = attention(rows[0], memory, mask=causal, return_aux=LSE)
    above = torch.randn_like(out)
    expected = torch.autograd.grad(out, rows, above)
    found = attention_gradients(rows[0], memory, out, aux.lse, above, mask=causal)
    for mine, its in zip(found[:3], expected, strict=True):
        assert torch.equal(mine, its)
    query, key, value = tensors(40, 40)
    mask = create_block_mask(causal, None, None, 40, 40, BLOCK_SIZE=16)
    out, aux = attention(query, Dense(key, value), mask=mask, return_aux=LSE)
    expected = torch.autograd.grad(out.sum(), (query, key, value))
    ones = torch.ones_like(out)
    dense = attention_gradients(query, Dense(key, value), out, aux.lse, ones, mask=mask)
    for mine, its in zip(dense[:3], expected, strict=True):
        torch.testing.assert_close(mine, its)


def test_results_of_another_query() -> None:
    query, key, value = tensors(30, 40)
    out, aux = attention(query, Dense(key, value), return_aux=LSE)
    with pytest.raises(ShapeError, match=r"lse must have the shape \[2, 4, 30\] .* \[2, 4, 29\]"):
        attention_gradients(query, Dense(key, value), out, aux.lse[..., 1:], out)
