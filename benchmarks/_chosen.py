"""The parts of `beyond.py` about keys that are chosen at run time."""

from __future__ import annotations

import itertools

import torch
from _race import Table, race
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from quire import BlockMask, Dense, Paged, attention
from quire.mods import Mask, causal, sliding_window

LENGTH, GROUP, WIDTH, BLOCK, CHOSEN = 8192, 4, 128, 64, 16


def tokens(table: Table, seconds: float, threads: int) -> None:
    """Each token and key head chooses 16 blocks of 64 keys, against all earlier keys."""
    query, key, value = _operands(key_heads=2)
    mask = _choice(key_heads=2, q_block=1)
    keys, values = (x.repeat_interleave(GROUP, 1) for x in (key, value))
    contestants = {
        "chosen": lambda: attention(query, Dense(key, value), mask=mask, q_start=0),
        "causal": lambda: attention(query, Dense(key, value), mask=causal, q_start=0),
        "SDPA": lambda: sdpa(query, keys, values, is_causal=True),
    }
    times = race(contestants, seconds)
    listed = int(mask.kv_num_blocks.sum()) * BLOCK
    work = query.shape[1] * LENGTH * (LENGTH + 1) / 2 / listed
    table.add(
        "16 blocks of 64 keys for each token, N 8192, group 4, D 128",
        times["SDPA"] / times["chosen"],
        "x SDPA",
        f">= {work / 2:.2f}",
        threads=threads,
        work_ratio=round(work, 2),
        our_causal=round(times["causal"] / times["chosen"], 2),
        ms=round(times["chosen"] * 1e3, 1),
    )


def tokens_backward(table: Table, seconds: float, threads: int) -> None:
    """The same, forward and backward, against quire's own causal mask."""
    tensors = [x.requires_grad_() for x in _operands(key_heads=2)]
    above = torch.randn_like(tensors[0])

    def step(mask: Mask | BlockMask) -> object:
        out = attention(tensors[0], Dense(*tensors[1:]), mask=mask, q_start=0)
        return torch.autograd.grad(out, tensors, above)

    mask = _choice(key_heads=2, q_block=1)
    times = race({"chosen": lambda: step(mask), "causal": lambda: step(causal)}, seconds)
    table.add(
        "the same, forward and backward",
        times["causal"] / times["chosen"],
        "x our causal mask",
        threads=threads,
        ms=round(times["chosen"] * 1e3, 1),
    )


def blocks(table: Table, seconds: float, threads: int) -> None:
    """Each 64 tokens choose 16 blocks of 64 keys, against a causal mask with as many tiles.

    Once over keys that are in the processor's outer caches, and once over few, in the inner ones.
    That causal mask has fewer queries, so that less is read and written beside the tiles. A window
    of 16 blocks has as many queries and as many tiles.
    """
    for length in (LENGTH, LENGTH // 4):
        _blocks(table, seconds, threads, length)


def _blocks(table: Table, seconds: float, threads: int, length: int) -> None:
    query, key, value = _operands(key_heads=2, length=length)
    mask = _choice(key_heads=2, q_block=BLOCK, length=length)
    listed = int(mask.kv_num_blocks[0, 0].sum())
    side = round(((8 * listed + 1) ** 0.5 - 1) / 2)  # a triangle of as many blocks
    short = [x[:, :, : side * BLOCK] for x in (query, key, value)]
    near = causal & sliding_window((CHOSEN - 1) * BLOCK + 1)
    contestants = {
        "chosen": lambda: attention(query, Dense(key, value), mask=mask, q_start=0),
        "causal": lambda: attention(short[0], Dense(*short[1:]), mask=causal, q_start=0),
        "window": lambda: attention(query, Dense(key, value), mask=near, q_start=0),
    }
    times = race(contestants, seconds)
    share = listed / (side * (side + 1) / 2)
    table.add(
        f"16 blocks of 64 keys for each 64 of {length} tokens, as many tiles",
        times["causal"] / times["chosen"] * share,
        "x causal",
        ">= 0.9",
        threads=threads,
        of_a_window=round(times["window"] / times["chosen"], 3),
        ms=round(times["chosen"] * 1e3, 1),
    )


def pages(table: Table, seconds: float, threads: int) -> None:
    """Decode over 16 of 1,024 pages, against a sequence that has just these pages."""
    for dtype, mask in ((torch.bfloat16, None), (torch.float32, None), (torch.float32, causal)):
        _pages(table, seconds, threads, dtype, mask)


def pages_anew(table: Table, seconds: float, threads: int) -> None:
    """The same if every call chooses other pages, as each layer of a step does."""
    _pages(table, seconds, threads, torch.bfloat16, None, choices=32)


def _pages(
    table: Table,
    seconds: float,
    threads: int,
    dtype: torch.dtype,
    mask: Mask | None,
    choices: int = 1,
) -> None:
    torch.manual_seed(0)
    query = torch.randn(4, 16, 1, WIDTH, dtype=dtype)
    key, value = (torch.randn(1024, 4, BLOCK, WIDTH, dtype=dtype) for _ in range(2))
    every = torch.stack([torch.randperm(1024) for _ in range(4)]).int()
    ends = torch.full((4,), 1024 * BLOCK)
    memories: dict[str, list[Paged]] = {"chosen": [], "alone": []}
    for _ in range(choices):
        kept = torch.rand(4, 1024).argsort(-1)[:, :CHOSEN].sort(-1).values
        found = every.gather(1, kept)
        holes = torch.full_like(every, -1).scatter(1, kept, found)
        memories["chosen"].append(Paged(key, value, holes, ends))
        memories["alone"].append(Paged(key, value, found, torch.full((4,), CHOSEN * BLOCK)))
    turns = {name: itertools.cycle(those) for name, those in memories.items()}
    contestants = {
        name: lambda those=those: attention(query, next(those), mask=mask)
        for name, those in turns.items()
    }
    times = race(contestants, seconds)  # both read the same rows of memory
    name = f"{str(dtype).removeprefix('torch.')}, {'causal' if mask else 'no mask'}"
    table.add(
        f"decode, 16 of 1,024 pages, {name}" + ", other pages in each call" * (choices > 1),
        times["alone"] / times["chosen"],
        "x alone",
        "" if choices > 1 else ">= 0.95",
        threads=threads,
        us=round(times["chosen"] * 1e6, 1),
    )


def _operands(key_heads: int, length: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    counts = (key_heads * GROUP, key_heads, key_heads)
    return [torch.randn(1, heads, length, WIDTH) for heads in counts]


def _choice(key_heads: int, q_block: int, length: int = LENGTH) -> BlockMask:
    """Return a mask in which blocks of queries choose the first block, their own, and others."""
    rows, columns = length // q_block, length // BLOCK
    own = torch.arange(rows) * q_block // BLOCK
    liking = torch.rand(1, key_heads, rows, columns)
    liking[..., 0] = 2
    liking.masked_fill_(torch.arange(columns) > own[:, None], -1)
    liking.scatter_(-1, own.expand(1, key_heads, rows).unsqueeze(-1), 3)
    found = liking.topk(CHOSEN)
    counts = (found.values >= 0).sum(-1)
    lists = (x.int().repeat_interleave(GROUP, 1) for x in (counts, found.indices))
    return BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=(q_block, BLOCK),
        mask_mod=causal,
        seq_lengths=(length, length),
        compute_q_blocks=False,
    )
