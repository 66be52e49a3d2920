"""One arithmetic: a query has the same bits alone, in any chunk, and among any other queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
from quire.runtime import forward as division

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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
)
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


def with_kernel(form: str, query: Tensor, memory: Memory, **options: Any) -> list[Tensor]:
    """All results, computed by one kernel however many queries there are."""
    most = 0 if form == "panel" else 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "FEW_ROWS", most)
        patch.setattr(division, "MOST_ROWS", most)
        return in_chunks(query, memory, (query.shape[2],), **options)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("length", [1, 5, 16, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_either_kernel_computes_any_number_of_queries(dtype: torch.dtype, length: int) -> None:
    query, key, value = (x.to(dtype) for x in operands(length, 1100, 20, 40, group=3))
    options = {"mask": causal, "q_start": 1100 - length}
    memory = Dense(key, value)
    assert_same(
        with_kernel("row", query, memory, **options), with_kernel("panel", query, memory, **options)
    )


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "exp": lambda s, q, k: torch.exp(s * 0.5) + torch.exp(-0.1 * q),
    "log": lambda s, q, k: s * torch.log(q + 1.5) - torch.log(1.0 + k),
    "sin and cos": lambda s, q, k: s * torch.sin(q * 0.1 + k) + torch.cos(s),
    "tan": lambda s, q, k: s + torch.tan(k * 0.01),
    "tanh": lambda s, q, k: 9 * torch.tanh(s + k * 1e-3),
    "erf": lambda s, q, k: torch.erf(s) * 4,
    "powers of two": lambda s, q, k: torch.exp2(s * 0.3) - torch.log2(1.0 + q),
    "sigmoid": lambda s, q, k: torch.sigmoid(s) * 7,
    "power": lambda s, q, k: torch.abs(s) ** 1.7 - s**2,
    "root": lambda s, q, k: torch.sqrt(torch.abs(s)) / torch.rsqrt(k + 1.0),
    "division": lambda s, q, k: s / (1.0 + torch.abs(q - k)) + (k % 7) // 3,
    "rounding": lambda s, q, k: torch.floor(s * 3) + torch.round(s) - torch.ceil(s),
    "choice": lambda s, q, k: torch.where((q + k) % 2 == 0, s, s * 1.5),
    "half": lambda s, q, k: (s.bfloat16() * 1.1).float() + s.half().float(),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_scores_and_positions(function: str) -> None:
    """Lanes run over keys in one kernel and over queries in the other."""
    query, key, value = operands(20, 200)
    options = {"score_mod": lambda s, b, h, q, k: FUNCTIONS[function](s, q, k), "q_start": 180}
    memory = Dense(key, value)
    assert_same(
        with_kernel("row", query, memory, **options), with_kernel("panel", query, memory, **options)
    )


MASKS = {
    "none": None,
    "causal": causal,
    "window": sliding_window(100),
    "every third": lambda b, h, q, k: (k % 3 == h % 3) & (k <= q),
    "some blocks": lambda b, h, q, k: ((k // 128) % 3 == 0) & (q >= k),
}


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.sampled_from([1, 17, 128, 129, 700, 1024, 1025, 2100]))
    length = min(keys, draw(st.integers(1, 60)))
    row = draw(st.integers(0, length - 1))
    begin = draw(st.integers(0, row))
    return {
        "keys": keys,
        "length": length,
        "row": row,
        "chunk": (begin, draw(st.integers(row + 1, length))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "widths": draw(st.sampled_from([(64, 64), (128, 128), (5, 9), (20, 33), (80, 1)])),
        "group": draw(st.sampled_from([1, 2, 3, 8])),
        "mask": draw(st.sampled_from(list(MASKS))),
        "score_mod": draw(st.sampled_from([None, softcap(2.0)])),
        "sink": draw(st.booleans()),
        "odd": draw(st.sampled_from([None, None, None, "key", "value"])),
        "threads": draw(st.sampled_from([1, 2])),
        "seed": draw(st.integers(0, 99)),
    }


@given(problem=problems())
def test_a_row_alone_in_a_chunk_and_in_the_whole(problem: dict[str, Any]) -> None:
    """Keys that the mask hides from a causal row may also be missing."""
    torch.manual_seed(problem["seed"])
    torch.set_num_threads(problem["threads"])
    keys, length, row, group = (problem[name] for name in ("keys", "length", "row", "group"))
    query, key, value = (
        x.to(problem["dtype"]) for x in operands(length, keys, *problem["widths"], group=group)
    )
    if problem["odd"] is not None:
        (key if problem["odd"] == "key" else value)[:, :, keys // 2] = torch.inf
    options = {"mask": MASKS[problem["mask"]], "score_mod": problem["score_mod"]}
    if problem["sink"]:
        options["sink"] = torch.randn(2 * group).to(problem["dtype"])
    start = keys - length
    whole = in_chunks(query, Dense(key, value), (length,), q_start=start, **options)
    for begin, end in ((row, row + 1), problem["chunk"]):
        some = query[:, :, begin:end]
        expected = [x[:, :, begin:end] for x in whole]
        given = {"q_start": start + begin, **options}
        assert_same(in_chunks(some, Dense(key, value), (end - begin,), **given), expected)
        if problem["mask"] != "none":
            fewer = Dense(*(x[:, :, : start + end] for x in (key, value)))
            assert_same(in_chunks(some, fewer, (end - begin,), **given), expected)


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
