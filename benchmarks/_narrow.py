"""The parts of `beyond.py` about memory that takes fewer bytes: float8, and latents."""

from __future__ import annotations

import torch
from _race import Table, race
from paged import in_pages, operands

import quire
from quire.checks.arguments import dtype_name
from quire.kv import PagedKVCache

BATCH, KEYS, PAGE = 16, 4096, 64
WIDTH, LATENT = 576, 512  # as DeepSeek-V2 and V3 have


def float8(table: Table, seconds: float, threads: int) -> None:
    """Decoding from pages of float8, with a scale for each row, against pages of bfloat16."""
    query, key, value = operands()
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    memories = {dtype: in_pages(key, value, 64, dtype) for dtype in dtypes}
    for heads in (32, 8):
        some = query[:, :heads].contiguous()
        contestants = {
            dtype_name(dtype): lambda memory=memory, some=some: quire.attention(some, memory)
            for dtype, memory in memories.items()
        }
        times = race(contestants, seconds)
        for dtype in dtypes[1:]:
            name = dtype_name(dtype)
            table.add(
                f"decode, {name}, group of {heads // key.shape[1]}, D 128",
                times["bfloat16"] / times[name],
                "x as fast as bfloat16",
                ">= 1.2" if dtype.is_floating_point else "",
                threads=threads,
                ms=round(times[name] * 1e3, 2),
            )


def latent(table: Table, seconds: float, threads: int) -> None:
    """Decoding over latents that are stored once, against keys and values that are stored apart.

    Operations a second are compared with those of PyTorch's product of two matrices.
    """
    square = torch.randn(2048, 2048)
    product = 2 * 2048**3 / race({"product": lambda: square @ square}, seconds)["product"]
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        once, twice = (
            PagedKVCache(
                1,
                heads=1,
                head_dim=WIDTH,
                page_size=PAGE,
                n_pages=BATCH * KEYS // PAGE,
                dtype=dtype,
                **of,
            )
            for of in ({"latent": LATENT}, {"value_dim": LATENT})
        )
        share = 100 * once.shape.num_bytes / twice.shape.num_bytes
        table.add(f"latents of {dtype_name(dtype)}", share, "% of the bytes", "<= 55")
        rows = torch.randn(1, BATCH * KEYS, 1, WIDTH)
        memories = {}
        for cache, given in ((once, [rows]), (twice, [rows, rows[..., :LATENT]])):
            sequences = [cache.sequence() for _ in range(BATCH)]
            cache.append(sequences, *given)
            memories["once" if cache is once else "twice"] = cache.memory(0, sequences)
        for heads in (8, 16, 128):
            query = torch.randn(BATCH, heads, 1, WIDTH)
            contestants = {
                name: lambda memory=memory, query=query: quire.attention(query, memory)
                for name, memory in memories.items()
            }
            times = race(contestants, seconds)
            work = 2 * BATCH * KEYS * heads * (WIDTH + LATENT)
            table.add(
                f"decode, latents of {dtype_name(dtype)}, {heads} query heads",
                times["twice"] / times["once"],
                "x as fast as stored twice",
                ">= 1.3",
                threads=threads,
                ms=round(times["once"] * 1e3, 2),
                gflops=round(work / times["once"] / 1e9),
                times_product=round(work / times["once"] / product, 2),
            )


def errors(table: Table, seconds: float, threads: int) -> None:
    """How wrong the output becomes, against float64: one new token over 4,096 of random numbers."""
    for name, large in (("numbers of one size", 1.0), ("two of 128 columns of keys x 10", 10.0)):
        wrong = dict.fromkeys(
            (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2), 0.0
        )
        total = 0.0
        for seed in range(8):
            torch.manual_seed(seed)
            key, value = torch.randn(2, 1, KEYS, 8, 128)
            key[..., :2] *= large
            query = torch.randn(1, 32, 1, 128)
            wide = (x.transpose(1, 2).double() for x in (key, value))
            exact = quire.attention(query.double(), quire.Dense(*wide))
            total += float(exact.square().mean())
            for dtype in wrong:
                cache = PagedKVCache(1, heads=8, head_dim=128, n_pages=KEYS // 16, dtype=dtype)
                sequence = cache.sequence()
                cache.append([sequence], key, value)
                out = quire.attention(query, cache.memory(0, [sequence]))
                wrong[dtype] += float((out - exact).square().mean())
        for dtype, error in wrong.items():
            figure = 100 * (error / total) ** 0.5
            table.add(f"error of {dtype_name(dtype)}, {name}", figure, "% of the output")
