"""The cache of keys and values: `make bench`, or python benchmarks/kv.py.

PyTorch's prototype of a paged cache, a plain copy of the same bytes and a copy of a whole cache are
raced in this process. Waste is that of a simulated server, and does not depend on the machine.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from _race import Table, race, run_parts
from torch.nn.attention.experimental._paged_attention import PagedAttention

from quire.kv import PagedKVCache, PagePool, PrefixCache

LAYERS, HEADS, WIDTH, PAGE = 32, 8, 128, 16


def made(layers: int, tokens: int) -> PagedKVCache:
    return PagedKVCache(
        layers, heads=HEADS, head_dim=WIDTH, page_size=PAGE, n_pages=-(-tokens // PAGE)
    )


def decode(table: Table, seconds: float, threads: int) -> None:
    """One token for each of 64 sequences, in 32 layers, against PyTorch's `assign`."""
    batch, length = 64, 64  # the pages of both are there beforehand
    cache = made(LAYERS, batch * (length + PAGE))
    sequences = [cache.sequence() for _ in range(batch)]
    key, value = torch.randn(2, LAYERS, batch, HEADS, WIDTH)

    def ours() -> None:
        rows = cache.extend(sequences, 1)
        for layer in range(LAYERS):
            cache.write(layer, rows, key[layer], value[layer])
        if cache.length(sequences[0]) == length:
            for sequence in sequences:
                cache.truncate(sequence, 0)

    peer = PagedAttention(batch * length // PAGE, PAGE, batch, device="cpu")
    for b in range(batch):
        peer.reserve(torch.tensor(b), torch.tensor(length))
    pages = [torch.zeros(2, 1, HEADS, batch * length, WIDTH) for _ in range(LAYERS)]
    rows = torch.arange(batch)
    new = [x.view(LAYERS, batch, HEADS, 1, WIDTH) for x in (key, value)]
    place = 0

    def theirs() -> None:
        nonlocal place
        at = torch.full((batch, 1), place)
        for layer, (key_pages, value_pages) in enumerate(pages):
            peer.assign(rows, at, new[0][layer], new[1][layer], key_pages, value_pages)
        place = (place + 1) % length

    times = race({"ours": ours, "peer": theirs}, seconds)
    case = "append 64 sequences x 1 token, 32 layers, H 8, D 128"
    table.add(case, times["peer"] / times["ours"], "x assign", "20", ms=_ms(times["ours"]))


def prefill(table: Table, seconds: float, threads: int) -> None:
    """2,048 tokens of one sequence, in one layer, against a copy of the same bytes."""
    cache = made(1, 4096)
    sequence = cache.sequence()
    key, value = torch.randn(2, 1, 2048, HEADS, WIDTH)
    copies = torch.empty_like(key), torch.empty_like(value)

    def ours() -> None:
        cache.append([sequence], key, value)
        cache.truncate(sequence, 0)

    def copy() -> None:
        copies[0].copy_(key)
        copies[1].copy_(value)

    times = race({"ours": ours, "peer": copy}, seconds)
    share = 100 * times["peer"] / times["ours"]
    table.add("prefill append of 2,048 tokens", share, "% of copy", "70", ms=_ms(times["ours"]))


def waste(table: Table, seconds: float, threads: int) -> None:
    """A server in its steady state: 64 requests, prompts and answers of lognormal lengths."""
    chance = random.Random(0)
    cache = PagedKVCache(1, heads=1, head_dim=1, page_size=PAGE, max_bytes=1 << 30)
    one = torch.zeros(1, 64, 1, 1)

    def request() -> list[int]:
        prompt, answer = (int(chance.lognormvariate(mean, 0.8)) + 1 for mean in (5.3, 5.0))
        return [prompt, answer]

    running: dict[object, int] = {}
    shares = []
    for step in range(4_000):
        while len(running) < 64:
            prompt, answer = request()
            sequence = cache.sequence()
            rows = torch.zeros(1, prompt, 1, 1)
            cache.append([sequence], rows, rows)
            running[sequence] = answer
        cache.append(list(running), one, one)  # type: ignore[arg-type]
        running = {each: left - 1 for each, left in running.items()}
        for each in [each for each, left in running.items() if left == 0]:
            cache.free(each)  # type: ignore[arg-type]
            del running[each]
        if step >= 500 and step % 10 == 0:
            shares.append(100 * cache.statistics().waste)
    mean = sum(shares) / len(shares)
    table.add("waste, lognormal lengths, page 16, steady state", mean, "%", "<4")


def pool(table: Table, seconds: float, threads: int) -> None:
    """Allocate, share, release and release again, 1,000 pages at a time."""
    pages = PagePool(100_000)

    def all_three() -> None:
        held = pages.allocate(1_000)
        pages.share(held)
        pages.release(held)
        pages.release(held)

    best = race({"ours": all_three}, seconds)["ours"]
    table.add("allocate, share, release", 1_000 / best / 1e6, "M pages/s", "1")


def match(table: Table, seconds: float, threads: int) -> None:
    """A prompt of 8,192 tokens that is known as a whole, among 100,000 pages."""
    pages = PagePool(100_000)
    prefix = PrefixCache(pages, PAGE)
    chance = np.random.default_rng(0)
    prompts = chance.integers(0, 50_000, (100_000 * PAGE // 8192, 8192))
    for prompt in prompts:
        held = pages.allocate(8192 // PAGE)
        prefix.insert(prompt, held)
        pages.release(held)
    wanted = iter(np.tile(np.arange(len(prompts)), 1_000_000 // len(prompts)).tolist())

    def ours() -> None:
        found = prefix.match(prompts[next(wanted)])
        pages.release(found)

    best = race({"ours": ours}, seconds)["ours"]
    table.add("prefix match of 8,192 tokens in 100,000 pages", 1e3 * best, "ms", "<1")


def fork(table: Table, seconds: float, threads: int) -> None:
    """A sequence of 32,768 tokens, one layer, against a copy of its keys and values."""
    cache = made(1, 32_768)
    sequence = cache.sequence()
    key, value = torch.randn(2, 1, 32_768, HEADS, WIDTH)
    cache.append([sequence], key, value)
    copies = torch.empty_like(key), torch.empty_like(value)

    def ours() -> None:
        cache.free(cache.fork(sequence))

    def copy() -> None:
        copies[0].copy_(key)
        copies[1].copy_(value)

    times = race({"ours": ours, "peer": copy}, seconds)
    ratio = times["peer"] / times["ours"]
    table.add("fork and free of 32,768 tokens, one layer", ratio, "x copy")
    table.add("the same for a cache of 32 layers", 32 * ratio, "x copy", "1000")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


PARTS = (decode, prefill, waste, pool, match, fork)


if __name__ == "__main__":
    run_parts("kv", __doc__, PARTS)
