"""The cache of keys and values: `make bench`, or python benchmarks/kv.py.

It is compared with PyTorch's prototype of a paged cache, and with plain copies of the same bytes.
The part `waste` simulates a server; its figure does not depend on the machine.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import numpy as np
import torch
from _race import Table, race, run_parts
from torch.nn.attention.experimental._paged_attention import PagedAttention

from quire.checks.arguments import dtype_name
from quire.kv import PagedKVCache, PagePool, PrefixCache
from quire.runtime.append import PageTensors, PageWriter

LAYERS, HEADS, WIDTH, PAGE = 32, 8, 128, 16


def made(layers: int, tokens: int, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    return PagedKVCache(
        layers, heads=HEADS, head_dim=WIDTH, page_size=PAGE, n_pages=-(-tokens // PAGE), dtype=dtype
    )


def decode(table: Table, seconds: float, threads: int) -> None:
    """Append one token to each of 64 sequences, in 32 layers, against PyTorch's `assign`.

    A turn has 16 steps, in which each sequence fills one page. Sequences grow to 64 tokens and then
    start again. Together their rows take 1 GB in float32, which is more than any processor cache.

    by layer    `extend`, then `write` for each layer. Every layer gets the same new rows, and so
                does `assign`: they are in a processor cache, as if a projection had computed them.
    at once     `append` of one tensor with the new rows of all layers.
    kernel      the compiled part of a step alone: the slots of the rows are computed before.
    copy        a plain copy of the new rows for each layer, to the next of 64 places.
    """
    for dtype in (torch.float32, torch.bfloat16):
        _decode(table, seconds, dtype, dtype)
    _decode(
        table, seconds, torch.float32, torch.int8
    )  # PyTorch has no int8, and writes float32 here


def _decode(table: Table, seconds: float, dtype: torch.dtype, pages_dtype: torch.dtype) -> None:
    batch, length = 64, 64
    cache = made(LAYERS, batch * (length + PAGE), pages_dtype)
    sequences = [cache.sequence() for _ in range(batch)]
    keys, values = torch.randn(2, LAYERS, batch, HEADS, WIDTH).to(dtype)
    key, value = keys[0].clone(), values[0].clone()

    def at_once() -> None:
        cache.append(sequences, keys, values)
        start_again()

    def by_layer() -> None:
        rows = cache.extend(sequences, 1)
        for layer in range(LAYERS):
            cache.write(layer, rows, key, value)
        start_again()

    def start_again() -> None:
        if cache.length(sequences[0]) == length:
            for sequence in sequences:
                cache.truncate(sequence, 0)

    peer = PagedAttention(batch * length // PAGE, PAGE, batch, device="cpu")
    for b in range(batch):
        peer.reserve(torch.tensor(b), torch.tensor(length))
    pages = [torch.zeros(2, 1, HEADS, batch * length, WIDTH, dtype=dtype) for _ in range(LAYERS)]
    rows = torch.arange(batch)
    new = [x.view(batch, HEADS, 1, WIDTH) for x in (key, value)]
    places = itertools.cycle(range(length))

    def theirs() -> None:
        at = torch.full((batch, 1), next(places))
        for key_pages, value_pages in pages:
            peer.assign(rows, at, *new, key_pages, value_pages)

    copies = itertools.cycle(torch.zeros((length, LAYERS, 2, batch, HEADS, WIDTH), dtype=dtype))

    def copy() -> None:
        for key_copy, value_copy in next(copies):
            key_copy.copy_(key)
            value_copy.copy_(value)

    first = torch.arange(batch) * PAGE
    slots = [first + batch * (at - at % PAGE) + at % PAGE for at in range(length)]
    stacked = [x.expand(LAYERS, *x.shape) for x in (key, value)]

    def kernel() -> None:
        next(writers).write_all(*stacked)

    contestants: dict[str, Callable[[], None]] = {
        "by layer": by_layer, "at once": at_once, "kernel": kernel, "copy": copy, "peer": theirs,
    }  # fmt: skip
    for step in (by_layer, copy, theirs):  # so that the system has provided all memory
        for _ in range(length):
            step()
    writer = PageWriter({layer: _tensors(cache, layer) for layer in range(LAYERS)})
    writers = itertools.cycle([writer.at(each) for each in slots])
    turns = {name: functools.partial(_page_of, step) for name, step in contestants.items()}
    times = race(turns, seconds)
    name = dtype_name(pages_dtype)
    for how in ("by layer", "at once", "kernel", "copy"):
        wanted = ">= 20" if how in ("by layer", "at once") else ""
        case = f"append 64 x 1 token, 32 layers, {name}, {how}"
        table.add(
            case,
            times["peer"] / times[how],
            "x as fast as assign",
            wanted,
            ms=_ms(times[how] / PAGE),
        )


def _tensors(cache: PagedKVCache, layer: int) -> PageTensors:
    memory = cache.memory(layer, [])
    return PageTensors(*(getattr(memory, name) for name in PageTensors._fields))


def _page_of(step: Callable[[], None]) -> None:
    for _ in range(PAGE):
        step()


def prefill(table: Table, seconds: float, threads: int) -> None:
    """Append 2,048 tokens to one sequence in one layer, against a copy of the same bytes.

    Both write to 16 places in turn, so that no processor cache holds the memory they write to.
    """
    places, tokens = 16, 2048
    cache = made(1, (places + 1) * tokens)
    sequences = [cache.sequence() for _ in range(places)]
    key, value = torch.randn(2, 1, tokens, HEADS, WIDTH)
    copies = torch.zeros((places, 2, 1, tokens, HEADS, WIDTH))
    turn = {"ours": 0, "peer": 0}

    def ours() -> None:
        sequence = sequences[turn["ours"] % places]
        turn["ours"] += 1
        cache.truncate(sequence, 0)
        cache.append([sequence], key, value)

    def copy() -> None:
        key_copy, value_copy = copies[turn["peer"] % places]
        turn["peer"] += 1
        key_copy.copy_(key)
        value_copy.copy_(value)

    for _ in range(places):
        ours()
    times = race({"ours": ours, "peer": copy}, seconds)
    share = 100 * times["peer"] / times["ours"]
    table.add(
        "prefill append of 2,048 tokens",
        share,
        "% of the speed of a copy",
        ">= 70",
        ms=_ms(times["ours"]),
    )


def waste(table: Table, seconds: float, threads: int) -> None:
    """The share of rows in pages that hold no token, in a simulated server of 64 requests.

    Prompts and answers have lognormal lengths. The first 500 steps do not count.
    """
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
    table.add("waste, lognormal lengths, page 16, steady state", mean, "%", "< 4")


def pool(table: Table, seconds: float, threads: int) -> None:
    """Allocate 1,000 pages, share them, and release them twice."""
    pages = PagePool(100_000)

    def all_three() -> None:
        held = pages.allocate(1_000)
        pages.share(held)
        pages.release(held)
        pages.release(held)

    best = race({"ours": all_three}, seconds)["ours"]
    table.add("allocate, share, release", 1_000 / best / 1e6, "million pages a second", ">= 1")


def match(table: Table, seconds: float, threads: int) -> None:
    """Find the pages of a prompt of 8,192 tokens among 100,000 pages. All its pages are kept."""
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
    table.add("prefix match of 8,192 tokens in 100,000 pages", 1e3 * best, "ms", "< 1")


def fork(table: Table, seconds: float, threads: int) -> None:
    """Fork a sequence of 32,768 tokens, against a copy of its keys and values in one layer."""
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
    table.add("fork and free of 32,768 tokens, one layer", ratio, "x as fast as a copy")
    table.add("the same for a cache of 32 layers", 32 * ratio, "x as fast as a copy", ">= 1000")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


PARTS = (decode, prefill, waste, pool, match, fork)


if __name__ == "__main__":
    run_parts("kv", __doc__, PARTS)
