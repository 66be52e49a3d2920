"""Decoding with a cache that lies on several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import AuxRequest, Dense, Paged
from quire.distributed import attend_over_ranks, merge_over_ranks
from quire.errors import ArgumentError, DistributedError, ShapeError
from quire.kv import PagedKVCache
from quire.mods import sliding_window
from rank_cases.examples import DTYPES, slopes


def decoding(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """A cache in pages of which each rank has a part: one merge per step."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 32), *torch.randn(2, 2, 2, 150, 32)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    begin, end = (150 * n // size // 10 * 10 for n in (rank, rank + 1))
    pages = [x[:, :, begin:end].reshape(2, 2, -1, 10, 32).transpose(1, 2) for x in (key, value)]
    count = (end - begin) // 10
    table = torch.zeros(2, end // 10, dtype=torch.int32)
    table[:, begin // 10 :] = torch.arange(2 * count).view(2, count)
    cache = Paged(*(x.flatten(0, 1) for x in pages), table, [end] * 2, [begin // 10] * 2)
    options = {"mask": sliding_window(120), "q_start": 149, "return_aux": AuxRequest(lse=True)}
    out, aux = quire.attention(query, cache, score_mod=slopes, **options)
    found = merge_over_ranks(out, aux.lse, mesh=group)
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in (query, key, value))
        whole, more = quire.attention(q, Dense(k, v), score_mod=slopes, **options)
        if dtype == torch.float32:
            peers = whole, more.lse
    for mine, peer, truth in zip(found, peers, (whole, more.lse), strict=True):
        assert_as_good_as(mine, peer, truth)
    with pytest.raises(ShapeError, match=r"lse must have shape \[2, 4, 1\]"):
        merge_over_ranks(out, aux.lse[..., 0], mesh=group)
    return found


def decoding_with_caches(group: dist.ProcessGroup, dtype: str) -> None:
    """Caches of which each rank has some positions: every step has the bits of one process."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    length, steps = 1024 * size + 100, 3
    torch.manual_seed(0)
    rows = [x.to(DTYPES[dtype]) for x in torch.randn(2, 2, length + steps, 2, 32)]
    queries = torch.randn(steps, 2, 4, 1, 32).to(DTYPES[dtype])
    sink = torch.linspace(-1, 1, 4)
    shape = {"heads": 2, "head_dim": 32, "page_size": 64, "n_pages": 80}
    cache = PagedKVCache(1, **shape, dtype=DTYPES[dtype])
    mine = [cache.sequence() for _ in range(2)]
    begin = 1024 * rank
    end = length if rank == size - 1 else begin + 1024
    for n, sequence in enumerate(mine):
        cache.append([sequence], *(x[None, n, begin:end] for x in rows))
    for step in range(steps):
        now = length + step + 1
        if rank == size - 1:  # it has the new tokens
            cache.append(mine, *(x[:, now - 1].unsqueeze(0) for x in rows))
        part = cache.memory(0, mine, first_page=begin // 64)
        options = {"mask": sliding_window(2000), "score_mod": slopes, "q_start": now - 1}
        found = attend_over_ranks(queries[step], part, sink=sink, mesh=group, **options)
        key, value = (x[:, :now].transpose(1, 2) for x in rows)
        wanted = AuxRequest(lse=True)
        whole, aux = quire.attention(
            queries[step], Dense(key, value), sink=sink, return_aux=wanted, **options
        )
        assert torch.equal(found[0], whole) and torch.equal(found[1], aux.lse), f"step {step}"
    if size > 1:
        with pytest.raises((ArgumentError, DistributedError), match="must begin at a multiple"):
            attend_over_ranks(
                queries[0], cache.memory(0, mine, first_page=1), q_start=9, mesh=group
            )


def long_cache(group: object, size: int) -> None:
    """A rank has the keys of many pieces, and nobody has others."""
    torch.manual_seed(0)
    query, rows = torch.randn(1, 1, 1, 8), torch.randn(1, 1, size, 8)
    rank = dist.get_rank(group)  # type: ignore[arg-type]
    part = Dense(rows, rows) if rank == 0 else None
    found, _ = attend_over_ranks(query, part, q_start=size, mesh=group)  # type: ignore[arg-type]
    assert torch.equal(found, quire.attention(query, Dense(rows, rows), q_start=size))
