"""One arithmetic: a query has the same bits alone, in any chunk, and among any other queries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire import AuxRequest, Dense, Paged, attention, create_block_mask
from quire.codegen.convention import KEYS_OF_PIECE, MOST_ROWS
from quire.kv import PagedKVCache
from quire.memory import Memory
from quire.mods import alibi, causal, sliding_window, softcap

pytestmark = pytest.mark.every_width

ALL = AuxRequest(lse=True, max_scores=True, argmax=True, entropy=True)
SIZES = ((1,), (3, MOST_ROWS, 1, MOST_ROWS + 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def operands(
    length: int, keys: int, width: int = 16, value_width: int = 24, group: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, 2 * group, length, width),
        torch.randn(2, 2, keys, width),
        torch.randn(2, 2, keys, value_width),
    )


def in_chunks(
    query: Tensor, memory: Memory, sizes: tuple[int, ...], **options: Any
) -> list[Tensor]:
    """All results of the last queries of a memory, computed some at a time, sizes in turns."""
    length, at, turn = query.shape[2], 0, 0
    start = options.pop("q_start")
    parts = []
    while at < length:
        size = min(sizes[turn % len(sizes)], length - at)
        chunk = query[:, :, at : at + size]
        if "dropout_p" in options:
            options["generator"] = torch.Generator().manual_seed(3)
        out, aux = attention(
            chunk, memory, q_start=start + at, return_aux=ALL, backend="jit", **options
        )
        parts.append((out, aux.lse, aux.max_scores, aux.argmax, aux.entropy))
        at, turn = at + size, turn + 1
    return [torch.cat(each, 2) for each in zip(*parts, strict=True)]


def assert_one_arithmetic(query: Tensor, memory: Memory, keys: int, **options: Any) -> None:
    options.setdefault("q_start", keys - query.shape[2])
    whole = in_chunks(query, memory, (query.shape[2],), **options)
    for sizes in SIZES:
        for a, b in zip(whole, in_chunks(query, memory, sizes, **options), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("keys", [1, 16, 130, 1500, 2 * KEYS_OF_PIECE + 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_and_dtypes(dtype: torch.dtype, keys: int) -> None:
    query, key, value = (x.to(dtype) for x in operands(min(keys, 40), keys))
    assert_one_arithmetic(query, Dense(key, value), keys, mask=causal)


@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (128, 96), (7, 5), (80, 33), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths(width: int, value_width: int, dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in operands(37, 300, width, value_width, group=3))
    assert_one_arithmetic(query, Dense(key, value), 300)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": causal, "score_mod": alibi(4)},
        {"mask": sliding_window(100)},
        {"score_mod": softcap(2.0), "mask": lambda b, h, q, kv: (kv + q) % 3 != h % 3},
        {"mask": causal, "sink": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"mask": causal, "dropout_p": 0.4},
    ],
    ids=["alibi", "window", "softcap", "sink", "dropout"],
)
def test_mods_masks_sinks_and_dropout(options: dict[str, Any]) -> None:
    query, key, value = operands(40, 1300)
    assert_one_arithmetic(query, Dense(key, value), 1300, **options)


@pytest.mark.parametrize("start", [1, 100, 1000])
def test_memories_that_begin_in_a_block(start: int) -> None:
    query, key, value = operands(20, 700)
    memory = Dense(key, value, start=start)
    assert_one_arithmetic(query, memory, 700, q_start=start + 680, mask=causal)


@pytest.mark.parametrize("first", [16, 100, 1000])
@pytest.mark.parametrize("length", [1, 20])
def test_keys_that_no_query_reads_may_be_missing(first: int, length: int) -> None:
    query, key, value = operands(length, 1400)
    options = {"mask": sliding_window(250), "q_start": 1400 - length, "backend": "jit"}
    whole = attention(query, Dense(key, value), **options)
    fewer = Dense(key[:, :, first:], value[:, :, first:], start=first)
    assert torch.equal(whole, attention(query, fewer, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("page", [16, 48])
def test_pages(page: int, dtype: torch.dtype) -> None:
    query, key, value = operands(20, 1200, 64, 64)
    cache = PagedKVCache(layers=1, heads=2, head_dim=64, page_size=page, n_pages=200, dtype=dtype)
    sequences = [cache.sequence() for _ in range(2)]
    rows = (key.transpose(1, 2), value.transpose(1, 2))
    for at in range(0, 1200, 200):
        cache.append(sequences, *(x[:, at : at + 200].flatten(0, 1)[None] for x in rows))
    memory = cache.memory(0, sequences)
    whole = attention(query, memory, mask=causal, backend="jit")
    lengths = memory.lengths if isinstance(memory, Paged) else None
    assert lengths is not None
    for end in range(1, 20, 7):  # the queries before the last ones, with as many keys as they read
        shorter = dataclasses.replace(memory, lengths=lengths - end)
        some = attention(query[:, :, 20 - end - 1 : 20 - end], shorter, mask=causal, backend="jit")
        assert torch.equal(some, whole[:, :, 20 - end - 1 : 20 - end])


def test_block_masks() -> None:
    query, key, value = operands(200, 200)
    mask = create_block_mask(causal, None, None, 200, 200)
    whole = attention(query, Dense(key, value), mask=mask, backend="jit")
    assert torch.equal(whole, attention(query, Dense(key, value), mask=causal, backend="jit"))
    assert_one_arithmetic(query, Dense(key, value), 200, q_start=0, mask=causal)


def test_values_that_are_not_finite() -> None:
    query, key, value = operands(30, 400)
    value[:, :, 250, 3], value[:, :, 390, 5], key[:, :, 395] = float("inf"), float("nan"), 1e30
    assert_one_arithmetic(query, Dense(key, value), 400, mask=causal)


def test_tiny_weights_are_the_same_beside_infinities() -> None:
    query, key, value = operands(30, 256)
    key *= 40
    value[:, :, 128:] = 0  # what is left of earlier keys is seen
    key[:, :, 255] = 1e38
    assert_one_arithmetic(query, Dense(key, value), 256, mask=causal)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads: int) -> None:
    query, key, value = operands(40, 3000, 64, 64)
    before = attention(query, Dense(key, value), mask=causal, q_start=2960, backend="jit")
    torch.set_num_threads(threads)
    assert_one_arithmetic(query, Dense(key, value), 3000, mask=causal)
    after = attention(query, Dense(key, value), mask=causal, q_start=2960, backend="jit")
    assert torch.equal(before, after)


@given(
    keys=st.integers(1, 1400),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_cut(keys: int, cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    length = min(keys, 50)
    query, key, value = operands(length, keys)
    options = {"mask": causal, "q_start": keys - length}
    whole = in_chunks(query, Dense(key, value), (length,), **options)
    for a, b in zip(
        whole, in_chunks(query, Dense(key, value), tuple(cuts), **options), strict=True
    ):
        assert torch.equal(a, b)
