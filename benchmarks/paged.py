"""Decoding and prefilling over pages, against the speed of memory: python benchmarks/paged.py.

The reading speed is the speed at which this machine reads the same bytes. A loop that only adds
them up measures it in the same race.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from _limits import FLOPS, multiply, reading, reading_runs
from _race import Table, race, run_parts
from torch import Tensor

import quire
from quire import Dense, Paged
from quire.checks.arguments import dtype_name
from quire.kv import PagedKVCache
from quire.mods import causal
from quire.runtime import forward as division

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, KEYS = 16, 32, 8, 128, 4096
PAGES = ((16, "15"), (64, "8"), (128, "5"))
LONG = 131_072
PREFIX, OWN, SHARING = 4096, 64, 32
PROMPT = 2048
BORDER_DTYPES = (torch.float32, torch.bfloat16)
BORDER_ROWS, BORDER_KEYS = (2, 4, 8, 16, 32), (128, 512, 1024, 4096)


def reading_pages(memory: Paged) -> Callable[[], None]:
    """Return a function that reads float32 pages in the order in which a decode step reads them."""
    addresses = []
    for pages in (memory.key, memory.value):
        heads = torch.arange(pages.shape[1])[:, None] * pages.stride(1)
        places = memory.page_table[:, None].long() * pages.stride(0) + heads
        addresses.append(pages.data_ptr() + 4 * places)
    return reading_runs(memory.key.shape[2] * memory.key.shape[3], *addresses)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query of one new token per sequence, and keys and values."""
    torch.manual_seed(0)
    query = torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    key, value = (torch.randn(BATCH, KV_HEADS, KEYS, HEAD_DIM).to(dtype) for _ in range(2))
    return query, key, value


def in_pages(key: Tensor, value: Tensor, page: int, dtype: torch.dtype | None = None) -> Paged:
    """Return keys and values [B, H, S, D] in pages. Sequences take pages in random turns."""
    batch, heads, length, width = key.shape
    cache = PagedKVCache(
        layers=1,
        heads=heads,
        head_dim=width,
        page_size=page,
        n_pages=batch * length // page,
        dtype=dtype or key.dtype,
    )
    sequences = [cache.sequence() for _ in range(batch)]
    turns = torch.arange(batch).repeat(length // page)
    for b in turns[torch.randperm(len(turns))].tolist():
        done = cache.length(sequences[b])
        rows = [x[b, :, done : done + page].transpose(0, 1)[None] for x in (key, value)]
        cache.append([sequences[b]], *rows)
    return cache.memory(0, sequences)


def contiguous(table: Table, seconds: float, threads: int) -> None:
    """Decoding from dense memory, against the reading speed and against SDPA."""
    for dtype, share, speed in (
        (torch.float32, ">= 82", ">= 3.4"),
        (torch.bfloat16, ">= 72", ">= 20"),
    ):
        query, key, value = operands(dtype)
        low = query.to(dtype)
        times = race(
            {
                "ours": lambda q=query, k=key, v=value: quire.attention(q, Dense(k, v)),
                "read": reading(key, value),
                "sdpa": lambda q=low, k=key, v=value: F.scaled_dot_product_attention(
                    q, k, v, enable_gqa=True
                ),
            },
            seconds,
        )
        name = f"decode, contiguous {dtype_name(dtype)}"
        rate = 1e-9 * (key.nbytes + value.nbytes) / times["read"]
        figure = 100 * times["read"] / times["ours"]
        table.add(name, figure, "% of the reading speed", share, read_gb_s=round(rate, 1))
        table.add(name, times["sdpa"] / times["ours"], "x as fast as SDPA", speed)


def paged(table: Table, seconds: float, threads: int) -> None:
    """Decoding from pages in random order, against decoding from dense memory."""
    query, key, value = operands()
    for page, most in PAGES:
        memory = in_pages(key, value, page)
        times = race(
            {
                "ours": lambda memory=memory: quire.attention(query, memory),
                "contiguous": lambda: quire.attention(query, Dense(key, value)),
                "read": reading(key, value),
                "pages": reading_pages(memory),
            },
            seconds,
        )
        slower, alone = (
            100 * (times[a] / times[b] - 1) for a, b in (("ours", "contiguous"), ("pages", "read"))
        )
        case, bound = f"decode, random pages of {page}", f"<= {most}"
        table.add(case, slower, "% slower", bound, only_reading=f"{alone:.1f} % slower")
        if page == 64:
            share, of_them = (100 * times[name] / times["ours"] for name in ("read", "pages"))
            table.add(
                case,
                share,
                "% of the reading speed",
                ">= 80",
                of_reading_these_pages=f"{of_them:.1f} %",
            )


def int8(table: Table, seconds: float, threads: int) -> None:
    """Decoding from pages of int8, against pages of bfloat16.

    `time from cache` is the share of the time that remains if each sequence reads one page again
    and again, from the processor's cache. The rest is the time of reading memory.
    """
    query, key, value = operands()
    low = in_pages(key.bfloat16(), value.bfloat16(), 64)
    tiny = in_pages(key, value, 64, torch.int8)
    again = tiny.page_table[:, :1].expand_as(tiny.page_table).contiguous()
    cached = dataclasses.replace(
        tiny, page_table=again
    )  # each sequence reads its first page again and again
    times = race(
        {
            "int8": lambda: quire.attention(query, tiny),
            "bfloat16": lambda: quire.attention(query, low),
            "cached": lambda: quire.attention(query, cached),
        },
        seconds,
    )
    figure, share = times["bfloat16"] / times["int8"], 100 * times["cached"] / times["int8"]
    case = "decode, int8 in pages of 64"
    table.add(case, figure, "x as fast as bfloat16", ">= 1.4", time_from_cache=f"{share:.0f} %")


def long(table: Table, seconds: float, threads: int) -> None:
    """One long sequence and one query, on two threads against one."""
    query = torch.randn(1, Q_HEADS, 1, HEAD_DIM)
    key, value = (torch.randn(1, KV_HEADS, LONG, HEAD_DIM) for _ in range(2))
    few = (
        query[:, :4],
        key[:, :1],
        value[:, :1],
    )  # with one key head, threads can only divide its keys
    for name, (q, k, v) in (("8 key heads", (query, key, value)), ("1 key head", few)):

        def attend(count: int, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            torch.set_num_threads(count)
            quire.attention(q, Dense(k, v))
            torch.set_num_threads(threads)

        times = race(
            {
                "1": functools.partial(attend, 1),
                "2": functools.partial(attend, 2),
                "read": reading(k, v),
            },
            seconds,
        )
        share = round(100 * times["read"] / times["2"], 1)
        case = f"1 sequence of {LONG}, {name}, 2 threads"
        table.add(
            case,
            times["1"] / times["2"],
            "x as fast as 1 thread",
            ">= 1.7",
            of_reading_speed=f"{share} % (or >= 85)",
        )


def prefix(table: Table, seconds: float, threads: int) -> None:
    """Sequences that begin with the same pages, against sequences that have copies of them."""
    torch.manual_seed(0)
    query = torch.randn(SHARING, Q_HEADS, 1, HEAD_DIM)
    pages, page = PREFIX // OWN, OWN
    key, value = (torch.randn(pages + SHARING, KV_HEADS, page, HEAD_DIM) for _ in range(2))
    numbers = torch.empty(SHARING, pages + 1, dtype=torch.int32)
    numbers[:, :pages] = torch.arange(pages)
    numbers[:, pages] = torch.arange(pages, pages + SHARING)
    lengths = torch.full((SHARING,), PREFIX + OWN)
    shared = Paged(key, value, numbers, lengths)
    order = torch.randperm(numbers.numel())
    places = torch.empty_like(order).index_copy_(0, order, numbers.flatten().long())
    apart = Paged(key[places], value[places], order.view(numbers.shape).int(), lengths)
    times = race(
        {
            "shared": lambda: quire.attention(query, shared, mask=causal),
            "apart": lambda: quire.attention(query, apart, mask=causal),
            "peak": functools.partial(multiply, threads),
        },
        seconds,
    )
    case = f"{SHARING} sequences of {OWN} behind one prefix of {PREFIX}"
    work = 4 * SHARING * Q_HEADS * (PREFIX + OWN) * HEAD_DIM
    least = work / (
        FLOPS * threads / times["peak"]
    )  # seconds that the multiplications take at least
    most = f"{times['apart'] / least:.1f} x"
    table.add(
        case,
        times["apart"] / times["shared"],
        "x as fast as copies",
        ">= 3",
        limit_of_multipliers=most,
    )


def prefill(table: Table, seconds: float, threads: int) -> None:
    """A prompt in pages, against the same prompt in one tensor."""
    torch.manual_seed(0)
    query = torch.randn(1, Q_HEADS, PROMPT, HEAD_DIM)
    key, value = (torch.randn(1, KV_HEADS, PROMPT, HEAD_DIM) for _ in range(2))
    memory = in_pages(key, value, 64)
    times = race(
        {
            "ours": lambda: quire.attention(query, memory, mask=causal),
            "contiguous": lambda: quire.attention(query, Dense(key, value), mask=causal),
        },
        seconds,
    )
    slower = 100 * (times["ours"] / times["contiguous"] - 1)
    table.add(f"prefill of {PROMPT}, pages of 64", slower, "% slower", "<= 5")


def border(table: Table, seconds: float, threads: int) -> None:
    """The decode kernel against panels, by rows, keys, head dim, dtype and heads of a group."""
    for dtype, width, group in itertools.product(BORDER_DTYPES, (64, 128), (1, 4)):
        for rows, keys in itertools.product(BORDER_ROWS, BORDER_KEYS):
            query = torch.randn(1, group * KV_HEADS, rows, width).to(dtype)
            key, value = (torch.randn(1, KV_HEADS, keys, width).to(dtype) for _ in range(2))
            run = {form: _by_form(form, query, Dense(key, value)) for form in ("row", "panel")}
            times = race(run, seconds / 10)
            name = f"{dtype_name(dtype)}, D {width}, group {group}, {rows} rows, {keys} keys"
            table.add(name, times["panel"] / times["row"], "x panels", threads=threads)


def _by_form(form: str, query: Tensor, memory: Dense) -> Callable[[], Tensor]:
    """Return a call that one kernel computes, whatever the border between the kernels is."""
    step = quire.plan(query, memory)
    with mock.patch.object(division, "has_few", return_value=form == "row"):
        step(query, memory)  # the kernel is chosen now
    return functools.partial(step, query, memory)


PARTS = (contiguous, paged, int8, long, prefix, prefill, border)


if __name__ == "__main__":
    run_parts("paged", __doc__, PARTS)
