"""Gradients of masks with chosen blocks: for each block of keys, by the queries that list it."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

from quire import AuxRequest, BlockMask, Dense, Paged, Ragged, attention, reference
from quire.block_mask import BlockRows
from quire.block_mask.blocks import FULL, Runs
from quire.memory import TOP_LEFT
from quire.request import Problem
from quire.runtime import chosen
from quire.runtime.blocks import num_tiles, tile_runs

HQ, HKV, D = 4, 2, 16
CHOOSES = chosen.turned


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + 30 >= kv_idx


def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * 7 + kv_idx * 3 + h + b) % 5 != 0


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * b - 0.01 * (h + 1) * (q_idx - kv_idx)


def for_all(turns: bool) -> Any:
    """Return what says for all lists whether they are turned around, but for learned captures."""

    def chooses(problem: Problem, placed: Any, blocks: BlockRows, *, learns: bool) -> Any:
        return np.full(blocks.runs.shape[0], turns and not learns)

    return chooses


def gated(prob: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return prob * (1 + b - 0.5 * h + (q_idx + kv_idx) % 3)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Turn all lists around; the list has an entry for each backward pass that did so."""
    found: list[int] = []
    compute = chosen.gradients

    def gradients(*args: Any) -> Any:
        found.append(1)
        return compute(*args)

    monkeypatch.setattr(chosen, "turned", for_all(True))
    monkeypatch.setattr(chosen, "gradients", gradients)
    monkeypatch.setattr(chosen, "MOST_BYTES", 2**13)  # a few sequences at a time
    return found


@pytest.mark.parametrize("seed", range(16))
def test_the_reference(seed: int, turned: list[int]) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = draw.choice([1, 1, 3, 8, 16, 20, 64]), draw.choice([16, 24, 64, 128])
    q_len, kv_len = draw.choice([1, 17, 70, 130]), draw.choice([50, 128, 300])
    batch, heads = draw.choice([1, 2]), draw.choice([1, HKV, HQ])
    shape = (draw.choice([1, batch]), heads, -(-q_len // size[0]), -(-kv_len // size[1]))
    cells = (torch.rand(shape) < draw.choice([0.05, 0.3])).int() * torch.randint(1, 3, shape).int()
    if heads == HKV:
        cells = cells.repeat_interleave(HQ // HKV, 1)
    mask = BlockMask._from_cells(
        cells,
        True,
        BLOCK_SIZE=size,
        mask_mod=draw.choice([causal, odd]),
        seq_lengths=(q_len, kv_len),
    )
    score, prob = draw.choice([None, slanted]), draw.choice([None, gated])
    query = torch.randn(batch, HQ, q_len, D, requires_grad=True)
    key, value = (torch.randn(batch, HKV, kv_len, D, requires_grad=True) for _ in range(2))
    tensors, above = (query, key, value), torch.randn(batch, HQ, q_len, D)

    def gradients(attend: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), tensors, above, materialize_grads=True)

    found = gradients(
        lambda: attention(
            query, Dense(key, value), score_mod=score, prob_mod=prob, mask=mask, q_start=0
        )
    )
    assert len(turned) == 1
    options: dict[str, Any] = {"score_mod": score, "prob_mod": prob, "block_mask": mask}
    peer = gradients(lambda: reference.attention(*tensors, **options).out)
    truth = gradients(
        lambda: reference.attention(*(x.double() for x in tensors), **options).out.float()
    )
    for name, *grads in zip(("query", "key", "value"), found, peer, truth, strict=True):
        assert_as_good_as(grads[0], grads[1], grads[2].double(), name, size=8.0)


def scattered(length: int, columns: int, most: int) -> BlockMask:
    """Each token lists `most` blocks of 16 keys."""
    generator = torch.Generator().manual_seed(length)
    lists = torch.rand(1, 1, length, columns, generator=generator).argsort(-1)[..., :most].int()
    counts = torch.full((1, 1, length), most, dtype=torch.int32)
    lengths = (length, columns * 16)
    return BlockMask.from_kv_blocks(
        counts, lists, BLOCK_SIZE=(1, 16), seq_lengths=lengths, compute_q_blocks=False
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_lse_and_sinks(dtype: torch.dtype, turned: list[int]) -> None:
    """As by tiles: the gradient of a sink needs `delta`, and lse may have a gradient."""
    torch.manual_seed(0)
    mask, sink = scattered(40, 12, 3), torch.randn(HQ, requires_grad=True)
    query = torch.randn(1, HQ, 40, D, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, HKV, 192, D, dtype=dtype, requires_grad=True) for _ in range(2))
    found = []
    for turns in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chosen, "turned", for_all(turns))
            out, aux = attention(
                query, Dense(key, value), mask=mask, sink=sink, return_aux=AuxRequest(lse=True)
            )
            total = (out * 2).sum() + aux.lse.square().sum()
            found.append(torch.autograd.grad(total, (query, key, value, sink)))
    assert len(turned) == 1
    limit = 1e-10 if dtype == torch.float64 else 0.03
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def test_threads_and_chunks(turned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mask = scattered(60, 20, 4)
    query = torch.randn(1, HQ, 60, D, requires_grad=True)
    key, value = (torch.randn(1, HKV, 320, D, requires_grad=True) for _ in range(2))

    def gradients() -> tuple[Tensor, ...]:
        out = attention(query, Dense(key, value), mask=mask)
        return torch.autograd.grad(out.square().sum(), (query, key, value))

    whole = gradients()
    torch.set_num_threads(1)
    assert all(map(torch.equal, gradients(), whole))
    monkeypatch.setattr(chosen, "MOST_BYTES", 2**25)
    assert all(map(torch.equal, gradients(), whole))
    assert len(turned) == 3


@pytest.mark.parametrize(
    ("kind", "own", "dtype"),
    [
        ("dense", 1, torch.float32),
        ("dense", HQ, torch.bfloat16),
        ("ragged", HKV, torch.float32),
        ("paged", HQ, torch.float32),
    ],
)
@pytest.mark.parametrize("which", ["all", "some"])
def test_a_sequence_alone_and_in_a_batch(
    which: str,
    dtype: torch.dtype,
    own: int,
    kind: str,
    turned: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether lists are turned around follows from those of a sequence alone."""
    monkeypatch.setattr(chosen, "MOST_BYTES", 2**16)
    length, kv_len, listed = 41, 192, (0.2, 0.4, 0.6)
    if which == "some":
        monkeypatch.setattr(chosen, "turned", CHOOSES)
        length, listed = 200, (0.05, 0.95, 0.05)
    cells = torch.zeros(3, own, length, kv_len // 16, dtype=torch.int32)
    for b in range(3):
        cells[b] = (torch.rand(cells.shape[1:]) < listed[b]).int()
        cells[b] *= torch.randint(1, 3, cells.shape[1:])
    if own == HKV:
        cells = cells.repeat_interleave(HQ // HKV, 1)
    query = torch.randn(3, HQ, length, D).to(dtype)
    key, value = (torch.randn(3, HKV, kv_len, D).to(dtype) for _ in range(2))

    def gradients(which: slice) -> list[Tensor]:
        mask = BlockMask._from_cells(
            cells[which], True, BLOCK_SIZE=(1, 16), mask_mod=causal, seq_lengths=(length, kv_len)
        )
        tensors = [x[which].clone().requires_grad_() for x in (query, key, value)]
        count = len(tensors[0])
        if kind == "dense":
            out = attention(tensors[0], Dense(*tensors[1:]), mask=mask, q_start=0)
        elif kind == "ragged":
            rows = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
            offsets = [x * kv_len for x in range(count + 1)]
            starts = [x * length for x in range(count + 1)]
            memory = Ragged(*rows[1:], offsets)
            out = attention(rows[0], memory, mask=mask, q_offsets=starts, q_start=0)
        else:
            pages = [x.unflatten(2, (-1, 16)).transpose(1, 2).flatten(0, 1) for x in tensors[1:]]
            table = torch.arange(count * 12, dtype=torch.int32).view(count, 12)
            memory = Paged(*pages, table, [kv_len] * count)
            out = attention(tensors[0], memory, mask=mask, q_start=0)
        return list(torch.autograd.grad((out * out).sum(), tensors))

    whole = gradients(slice(0, 3))
    for b in range(3):
        for one, other in zip(gradients(slice(b, b + 1)), whole, strict=True):
            assert torch.equal(one, other[b : b + 1])
    assert len(turned) == (4 if which == "all" else 3)


def test_numbers_that_are_not_finite_reach_those_who_read_them(turned: list[int]) -> None:
    torch.manual_seed(0)
    mask = scattered(30, 12, 2)
    query = torch.randn(1, HQ, 30, D, requires_grad=True)
    key, value = (torch.randn(1, HKV, 192, D) for _ in range(2))
    unread = ~mask.to_dense().bool().any(2).repeat_interleave(16, -1)[0, 0]
    key[:, :, unread] = value[:, :, unread] = math.nan
    key[:, :, 0] = math.inf
    key.requires_grad_()
    value.requires_grad_()
    out = attention(query, Dense(key, value), mask=mask)
    found = torch.autograd.grad(out.nan_to_num().sum(), (query, key, value))
    assert turned
    readers = mask.to_dense()[0, 0, :, 0].bool()
    assert not found[0][:, :, ~readers].isnan().any()
    assert not found[1][:, :, unread].any() and not found[2][:, :, unread].any()


def test_when_it_is_worth_it() -> None:
    def worth(mask: BlockMask, learns: bool = False) -> bool:
        q_len, kv_len = mask.seq_lengths
        query, key = torch.empty(1, 1, q_len, D), torch.empty(1, 1, kv_len, D)
        placed = Dense(key, key).place(query, TOP_LEFT)
        (found,) = chosen.turned(Problem(1.0), placed, mask.rows(), learns=learns)
        return bool(found)

    few = scattered(2048, 128, 8)
    assert worth(few) and not worth(few, learns=True)
    assert not worth(scattered(2048, 128, 120))
    every = torch.full((1, 1, 16, 16), FULL, dtype=torch.int32)
    assert not worth(BlockMask._from_cells(every, True, BLOCK_SIZE=(128, 128)))
    assert not worth(BlockMask._from_cells(every, True, BLOCK_SIZE=(64, 64)))


def slow_num_tiles(runs: Runs, size: tuple[int, int], tall: int, wide: int) -> list[int]:
    """Count the tiles of each batch entry one by one."""
    _, heads, num_rows, _ = runs.shape
    tiles = {
        (row // num_rows, row % num_rows * size[0] // tall, position // wide)
        for row, start, stop in zip(runs.row_ids(), runs.starts, runs.stops, strict=True)
        for position in range(start * size[1], stop * size[1], min(wide, size[1]))
    }
    return [sum(entry // heads == b for entry, *_ in tiles) for b in range(runs.shape[0])]


@pytest.mark.parametrize("seed", range(8))
def test_how_many_tiles_hold_a_block(seed: int) -> None:
    cells = np.random.default_rng(seed).integers(-2, 3, (2, 2, 9, 13)).clip(0)
    runs = Runs.of_cells(cells)
    for size in ((1, 16), (8, 8), (64, 64)):
        found = num_tiles(runs, size, 64, 64)
        assert found.tolist() == slow_num_tiles(runs, size, 64, 64)
    assert num_tiles(Runs.of_cells(cells * 0), (8, 8), 64, 64).tolist() == [0, 0]


@pytest.mark.parametrize("below", [False, True])
def test_the_estimate_takes_memory_for_runs(below: bool) -> None:
    """A million tokens in blocks of 64: a table of all tiles would have 268 million entries."""
    count = 2**14
    rows = np.arange(count)
    starts = np.zeros_like(rows) if below else rows * 31 % count
    stops = rows + 1 if below else starts + 1
    kinds = np.full(count, FULL, np.int8)
    runs = Runs((1, 1, count, count), np.arange(count + 1), starts, stops, kinds)
    length = 64 * count
    blocks = BlockRows(runs, (64, 64), (length, length))
    operand = torch.empty(1).expand(1, 1, length, D)
    placed = Dense(operand, operand).place(operand, TOP_LEFT)
    tracemalloc.start()
    (worth,) = chosen.turned(Problem(1.0), placed, blocks, learns=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not worth and peak < 100 * 8 * count


def test_tiles_are_counted_in_parts() -> None:
    """A grid of 16 million cells is never whole in memory."""
    count = 2**12
    starts, kinds = np.arange(count) * 31 % count, np.full(count, FULL, np.int8)
    runs = Runs((1, 1, count, count), np.arange(count + 1), starts, starts + 1, kinds)
    blocks = BlockRows(runs, (16, 16), (16 * count, 16 * count))
    tracemalloc.start()
    found, mixed = tile_runs(blocks, 128, 128)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mixed is blocks and int((found.stops - found.starts).sum()) == count
    assert peak < count * count


MEASURED = """
import resource, torch
from quire import BlockMask, Dense, Paged, attention

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
def step(length):
    columns = length // 64
    lists = torch.randint(0, columns, (1, 1, length, 4), dtype=torch.int32)
    counts = torch.full((1, 1, length), 4, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=(1, 64),
                                    seq_lengths=(length, length), compute_q_blocks=False)
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    memory = Dense(k, v)
    if %r:
        table = torch.arange(columns, dtype=torch.int32).view(1, -1)
        memory = Paged(*(x.view(columns, 1, 64, 16) for x in (k, v)), table, [length])
    attention(q, memory, mask=mask).sum().backward()
    return mask
step(256)
before = peak()
step(%d)
print(peak() - before)
"""


@pytest.mark.parametrize("in_pages", [False, True])
def test_memory_is_that_of_the_lists(in_pages: bool) -> None:
    """A table of all blocks would have 131,072 x 2,048 cells of four bytes, which are 1 GB."""
    length = 2**17
    code = MEASURED % (in_pages, length)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed = length * 4  # blocks, each with the copies of a query and two gradients of it
    assert int(ran.stdout) < 800 * listed < length * (length // 64) * 4
