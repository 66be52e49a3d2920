"""A latent cache: values are a part of the keys, and each token is stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import Dense, Paged, Ragged, attention
from quire.errors import ArgumentError, SequenceFileError
from quire.kv import Group, PagedKVCache
from quire.mods import causal

WIDTH, LATENT = 72, 64
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def made(**options: Any) -> PagedKVCache:
    sizes = {"layers": 2, "heads": 1, "head_dim": WIDTH, "page_size": 4, "n_pages": 60}
    return PagedKVCache(**{**sizes, **options})


def both(**options: Any) -> tuple[PagedKVCache, PagedKVCache]:
    """A latent cache, and one that stores the values again."""
    return made(latent=LATENT, **options), made(value_dim=LATENT, **options)


def rows(tokens: int, layers: int = 2) -> Tensor:
    return torch.randn(layers, tokens, 1, WIDTH)


@pytest.mark.parametrize("q_len", [1, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_stored_twice(dtype: torch.dtype, q_len: int) -> None:
    caches, key = both(dtype=dtype), rows(50)
    query = torch.randn(2, 16, q_len, WIDTH, dtype=dtype)
    outs = []
    for cache, given in zip(caches, ([key], [key, key[..., :LATENT]]), strict=True):
        sequences = [cache.sequence() for _ in range(2)]
        cache.append(sequences, *given)
        outs.append([attention(query, cache.memory(n, sequences), mask=causal) for n in range(2)])
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_token_takes_half_of_the_memory(dtype: torch.dtype) -> None:
    once, twice = (
        PagedKVCache(1, heads=1, head_dim=576, n_pages=8, dtype=dtype, **width)
        for width in ({"latent": 512}, {"value_dim": 512})
    )
    assert once.shape.num_bytes <= 0.55 * twice.shape.num_bytes
    for cache, sides in ((once, 1), (twice, 2)):
        sequence = cache.sequence()
        cache.append([sequence], *[torch.randn(1, 3, 1, n) for n in (576, 512)][:sides])
    assert once.statistics().num_bytes <= 0.55 * twice.statistics().num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_dense_fork_truncate_and_files(dtype: torch.dtype, tmp_path: Path) -> None:
    cache = made(latent=LATENT, dtype=dtype)
    a, key = cache.sequence(), rows(9)
    taken = cache.extend([a], 9)
    for layer in range(2):
        cache.write(layer, taken, key[layer])
    held = cache.dense(1, a)
    assert torch.equal(held.value, held.key[..., :LATENT])
    torch.testing.assert_close(held.key[0, 0].float(), key[1, :, 0], rtol=0.07, atol=0.03)
    child = cache.fork(a)
    cache.append([child], rows(3))
    cache.truncate(a, 5)
    assert torch.equal(cache.dense(1, child).key[:, :, :9], held.key)
    assert torch.equal(cache.dense(1, a).key, held.key[:, :, :5])
    cache.save(child, tmp_path / "a")
    other = made(latent=LATENT, dtype=dtype)
    loaded = other.load(tmp_path / "a")
    assert torch.equal(other.dense(0, loaded).key, cache.dense(0, child).key)
    with pytest.raises(SequenceFileError, match="has other tensors"):
        made(value_dim=LATENT, dtype=dtype).load(tmp_path / "a")
    memory, again = cache.memory(0, [child]), other.memory(0, [loaded])
    query = torch.randn(1, 4, 1, WIDTH)
    assert torch.equal(attention(query, memory), attention(query, again))
    cache.check_integrity()


def test_windows() -> None:
    groups = [Group([0]), Group([1], window=6)]
    cache = made(layers=None, groups=groups, latent=LATENT)
    sequence = cache.sequence()
    for _ in range(30):
        cache.append([sequence], rows(1))
    assert cache.start(1, sequence) > 16
    query = torch.randn(1, 4, 1, WIDTH)
    held = cache.dense(1, sequence)
    assert torch.equal(
        attention(query, cache.memory(1, [sequence])),
        attention(query, Dense(held.key, held.value, start=held.start)),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latent": 73}, r"latent must be at most head_dim, 72, since .* but is 73\."),
        ({"latent": 8, "value_dim": 8}, "latent or value_dim must be None, but they are 8 and 8"),
        ({"latent": 0}, "latent must be"),
        ({"scales": True}, "scales must be True for int8, and False .* True for float32"),
        ({"scales": False, "dtype": torch.int8}, "scales must be True for int8"),
    ],
)
def test_what_a_cache_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(**options)


def test_values_where_none_or_some_are_stored() -> None:
    latent, plain = both()
    key = rows(2)
    for cache, given, message in (
        (latent, [key, key[..., :LATENT]], "value must be None in a cache made with latent, but"),
        (plain, [key], "value must be a tensor in a cache made without latent, but is None"),
    ):
        sequence = cache.sequence()
        with pytest.raises(ArgumentError, match=message):
            cache.append([sequence], *given)
        taken = cache.extend([sequence], 2)
        with pytest.raises(ArgumentError, match=message):
            cache.write(0, taken, *(each[0] for each in given))
        cache.truncate(sequence, 0)
        assert cache.statistics().tokens == 0


# --- values that are a view of the keys, without a cache


@pytest.mark.parametrize("memory", ["dense", "ragged", "paged"])
@pytest.mark.parametrize("backend", ["jit", "eager"])
def test_gradients_of_both_uses_are_added(memory: str, backend: Any) -> None:
    latent = torch.randn(1, 1, 40, WIDTH, requires_grad=True)
    query = torch.randn(1, 8, 40, WIDTH, requires_grad=True)

    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options: dict[str, Any] = {"mask": causal, "backend": backend}
        if memory == "dense":
            return attention(query, Dense(key, value), **options)
        if memory == "ragged":
            packed = [x[0].transpose(0, 1) for x in (query, key, value)]
            out = attention(packed[0], Ragged(*packed[1:], [0, 40]), **options)
            return out.transpose(0, 1)[None]
        pages = [x.view(1, 10, 4, -1).transpose(0, 1) for x in (key, value)]
        table = torch.arange(10, dtype=torch.int32)[None]
        return attention(query, Paged(*pages, table, [40]), **options)

    out = attended(query, latent, latent[..., :LATENT])
    above = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, latent), above)
    key, value = (x.detach().clone().requires_grad_() for x in (latent, latent[..., :LATENT]))
    again = attended(query, key, value)
    assert torch.equal(out, again)
    wanted = torch.autograd.grad(again, (query, key, value), above)
    assert torch.equal(found[0], wanted[0])
    whole = wanted[1].clone()
    whole[..., :LATENT] += wanted[2]
    torch.testing.assert_close(found[1], whole)


@pytest.mark.parametrize("heads", [16, 128])
def test_many_query_heads_over_one_key_head(heads: int) -> None:
    """As DeepSeek has: the same bits whether keys are in pages, and for any order of the heads."""
    latent, query = torch.randn(1, 1, 300, WIDTH), torch.randn(1, heads, 1, WIDTH)
    out = attention(query, Dense(latent, latent[..., :LATENT]))
    pages = latent.view(20, 1, 15, WIDTH)
    table = torch.arange(20, dtype=torch.int32)[None]
    assert torch.equal(out, attention(query, Paged(pages, pages[..., :LATENT], table, [300])))
    some = torch.randperm(heads)[: heads // 4]
    assert torch.equal(out[:, some], attention(query[:, some], Dense(latent, latent[..., :LATENT])))
