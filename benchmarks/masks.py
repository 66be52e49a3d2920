"""Making masks, and attention that skips what they hide: python benchmarks/masks.py, `make bench`.

Time and peak memory of making a block mask are measured in new processes. PyTorch's own function
takes half a minute and 11 GB at 32,768 tokens. Attention is measured in this process.
"""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire.mods import and_masks, causal, document, or_masks, prefix_lm, sliding_window
from quire.tools import measure

N, MILLION = 32_768, 1 << 20
EXAMPLE = Path(__file__).parent.parent / "examples" / "long_context.py"


def documents(total: int, count: int) -> torch.Tensor:
    """Return random lengths [count] of documents. They add up to `total`."""
    random = torch.Generator().manual_seed(0)
    cuts = torch.randperm(total - 1, generator=random)[: count - 1].sort().values + 1
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])])
    return torch.diff(ends)


def mask_named(name: str, n: int):
    return {
        "causal": lambda: causal,
        "window 256": lambda: sliding_window(256),
        "window 4096": lambda: sliding_window(4096),
        "documents": lambda: document(lengths=documents(n, n // 100)),
        "prefix + window": lambda: or_masks(prefix_lm(4096), sliding_window(4096)),
    }[name]()


def ours(name: str, n: int):
    return functools.partial(
        quire.create_block_mask, mask_named(name, n), None, None, Q_LEN=n, KV_LEN=n
    )


def theirs(name: str, n: int, compiled: bool = False):
    create = torch_flex.create_block_mask
    create = torch.compile(create) if compiled else create
    make = functools.partial(
        create, mask_named(name, n), None, None, Q_LEN=n, KV_LEN=n, device="cpu"
    )
    if compiled:
        make()
    return make


def picture():
    """Return a function that draws the README's picture of a million tokens, as PNG."""
    mask = runpy.run_path(str(EXAMPLE))["long_context"]
    return lambda: quire.draw(mask, MILLION, MILLION).png()


def create(table: Table, seconds: float, threads: int) -> None:
    """create_block_mask for 32,768 tokens, against PyTorch's own, eager and compiled."""
    for name in ("causal", "window 256", "documents"):
        peers = {"eager": (">= 200", False), "torch.compile": (">= 10", True)}
        for peer, (wanted, compiled) in peers.items():
            mine, other = measure.race(
                functools.partial(ours, name, N),
                functools.partial(theirs, name, N, compiled),
                seconds=1.0,
                threads=threads,
            )
            case = f"create_block_mask {name}, 32k x 32k"
            if other.refusal:
                print(f"  {case}: {peer} refused: {other.refusal}")
                continue
            table.add(case, other.seconds / mine.seconds, f"x as fast as {peer}", wanted)
            if not compiled and mine.peak_bytes and other.peak_bytes:
                share = 100 * mine.peak_bytes / other.peak_bytes
                table.add(f"{case}, memory", share, f"% of {peer}'s memory", "< 1")


def million(table: Table, seconds: float, threads: int) -> None:
    """A million tokens, which are too many for PyTorch: the README's picture, and block masks."""
    (mine,) = measure.race(picture, seconds=1.0, threads=threads)
    table.add("draw examples/long_context.py, 1M x 1M, as PNG", mine.seconds, "s")
    for name in ("causal", "window 4096", "documents", "prefix + window"):
        (mine,) = measure.race(functools.partial(ours, name, MILLION), seconds=1.0, threads=threads)
        table.add(f"create_block_mask {name}, 1M x 1M", mine.seconds, "s", "< 2")
        if mine.peak_bytes:
            table.add(f"create_block_mask {name}, memory", mine.peak_bytes / 1e6, "MB", "< 300")


def attention(table: Table, seconds: float, threads: int) -> None:
    """Attention with a mask_mod alone, against its block mask and against a loop of SDPA."""
    for n in (512, 2048):
        q, k, v = (torch.randn(1, 8, n, 64) for _ in range(3))
        for name in ("causal", "window 256", "documents"):
            mask = mask_named(name, n)
            block_mask = quire.create_block_mask(mask, None, None, n, n)
            times = race(
                {
                    "mod": functools.partial(quire.flex_attention, q, k, v, mask_mod=mask),
                    "blocks": functools.partial(
                        quire.flex_attention, q, k, v, block_mask=block_mask
                    ),
                },
                seconds,
            )
            cost = times["mod"] / times["blocks"]
            table.add(f"mask_mod alone, {name} N {n}", cost, "x the time of a BlockMask", "< 1.03")
    packed(table, seconds)


def tables(table: Table, seconds: float, threads: int) -> None:
    """A mask that reads a table, against its block mask and against the same mask in arithmetic."""
    n = 8192
    q, k, v = (torch.randn(1, 8, n, 64) for _ in range(3))
    positions = torch.arange(n)
    blocks, own = torch.eye(n // 64, dtype=torch.bool), positions // 100
    same = torch.eye(n // 100 + 1, dtype=torch.bool)
    elements = positions[:, None] // 64 == positions // 64
    block = lambda b, h, i, j: i // 64 == j // 64  # noqa: E731
    cases = {
        "blocks of 64": (lambda b, h, i, j: blocks[i // 64, j // 64], block, 64),
        "documents of 100": (
            lambda b, h, i, j: same[own[i], own[j]],
            lambda b, h, i, j: own[i] == own[j],
            128,
        ),
        "elements": (lambda b, h, i, j: elements[i, j], block, 64),
    }
    for name, (looked_up, computed, size) in cases.items():
        block_mask = quire.create_block_mask(looked_up, None, None, n, n, BLOCK_SIZE=size)
        attention = functools.partial(quire.flex_attention, q, k, v)
        times = race(
            {
                "table": functools.partial(attention, mask_mod=looked_up),
                "blocks": functools.partial(attention, block_mask=block_mask),
                "arithmetic": functools.partial(attention, mask_mod=computed),
            },
            seconds,
        )
        case = f"table of {name}, N {n}"
        table.add(case, times["table"] / times["blocks"], "x the time of a BlockMask", "< 1.5")
        table.add(case, times["table"] / times["arithmetic"], "x the time of arithmetic")


def packed(table: Table, seconds: float) -> None:
    """1,000 documents in 100,000 tokens, causal within each, against a loop of SDPA over them."""
    lengths = documents(100_000, 1_000)
    q, k, v = (torch.randn(1, 4, 100_000, 64) for _ in range(3))
    mask = and_masks(document(lengths=lengths), causal)
    ends = lengths.cumsum(0).tolist()

    def one_by_one() -> None:
        start = 0
        for end in ends:
            part = (x[:, :, start:end] for x in (q, k, v))
            F.scaled_dot_product_attention(*part, is_causal=True)
            start = end

    times = race(
        {
            "ours": functools.partial(quire.flex_attention, q, k, v, mask_mod=mask),
            "peer": one_by_one,
        },
        max(seconds, 5.0),
    )
    case = "1,000 documents in 100,000 tokens, mask_mod"
    table.add(case, times["peer"] / times["ours"], "x as fast as a loop of SDPA", ">= 1.2")


def linear(table: Table, seconds: float, threads: int) -> None:
    """The time per token with a window of 256, at a million tokens and at 65,536."""
    runs = {}
    for n in (65_536, MILLION):
        q = torch.randn(1, 1, n, 64)
        runs[n] = functools.partial(quire.flex_attention, q, q, q, mask_mod=sliding_window(256))
    times = race({str(n): run for n, run in runs.items()}, seconds)
    growth = (times[str(MILLION)] / MILLION) / (times["65536"] / 65_536)
    table.add("window 256, time per token at 1M tokens", growth, "x the time at 64k", "< 1.15")


PARTS = (attention, tables, linear, million, create)


if __name__ == "__main__":
    run_parts("masks", __doc__, PARTS)
