"""Scattered blocks of a cache are read through a page table, and give the same results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import AuxRequest, BlockMask, flex_attention
from quire.block_mask.blocks import EMPTY, PARTIAL
from quire.codegen.llvm.target import Target
from quire.ir.trace import trace
from quire.memory import TOP_LEFT, Dense, Placed
from quire.request import Problem
from quire.runtime.blocks import read_lists
from quire.runtime.gather import gather

HQ, HKV, D = 4, 2, 8


def every_third(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx + q_idx + h) % 3 != 0


def by_row(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + torch.sin(kv_idx * 0.1 + b)


def scattered(
    size: int, blocks: int, q_len: int, shape: tuple[int, int] = (2, 1), every: int = 4
) -> BlockMask:
    """A mask of which batch b reads blocks b, b + every, ... in part or in full, by chance."""
    generator = torch.Generator().manual_seed(size + q_len)
    rows = -(-q_len // 64)
    cells = torch.randint(0, 3, (*shape, rows, blocks), generator=generator)
    for b in range(shape[0]):
        cells[b, :, :, torch.arange(blocks) % every != b % every] = EMPTY
    mask = BlockMask._from_cells(
        cells, True, BLOCK_SIZE=(64, size), mask_mod=every_third, seq_lengths=(q_len, blocks * size)
    )
    mask.lists_pages = True
    return mask


def operands(mask: BlockMask, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and a cache in which whatever no batch reads is NaN."""
    torch.manual_seed(0)
    q_len, kv_len = mask.seq_lengths
    key, value = torch.randn(2, 1, HKV, kv_len, D)
    read = mask.to_dense().flatten(0, 2).any(0).repeat_interleave(mask.BLOCK_SIZE[1])
    key[:, :, ~read] = value[:, :, ~read] = math.nan
    return torch.randn(batch, HQ, q_len, D), key, value


def memory_of(mask: BlockMask, batch: int = 2) -> tuple[Problem, Placed]:
    query, key, value = operands(mask, batch)
    problem = Problem(1.0, block_mask=mask, partial_mod=trace(mask.mask_mod, "mask"))
    return problem, Dense(key, value).place(query, TOP_LEFT)


def gathers(problem: Problem, memory: Placed) -> bool:
    return gather(problem, memory) != (problem, memory)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a score_mod": {"score_mod": by_row},
    "a mask beside": {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx % 5 != 1},
    "a sink": {"sink": torch.linspace(-1, 1, HQ)},
}


@pytest.mark.parametrize("size", [16, 40, 64])
@pytest.mark.parametrize("q_len", [1, 3, 150])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_gathered_is_what_it_was(size: int, q_len: int, options: dict[str, Any]) -> None:
    mask = scattered(size, 24, q_len)
    assert gathers(*memory_of(mask))
    found, expected = (
        flex_attention(
            *operands(mask, 2),
            block_mask=mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True, max_scores=True, entropy=True, argmax=argmax),
            backend=backend,
            **options,
        )
        for backend, argmax in (("jit", False), ("eager", True))
    )
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert one is None or torch.allclose(one, other, atol=1e-5)


def test_the_largest_score_is_at_a_place_in_the_cache() -> None:
    mask = scattered(16, 24, 2)
    request = AuxRequest(argmax=True)
    found, expected = (
        flex_attention(
            *operands(mask, 2),
            block_mask=mask,
            enable_gqa=True,
            return_aux=request,
            backend=backend,
        )[1].argmax
        for backend in ("jit", "eager")
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, HQ), (3, HQ)])
def test_masks_for_all_batches_and_for_each_head(shape: tuple[int, int]) -> None:
    mask = scattered(16, 24, 70, shape)
    assert gathers(*memory_of(mask, 3))
    found, expected = (
        flex_attention(*operands(mask, 3), block_mask=mask, enable_gqa=True, backend=backend)
        for backend in ("jit", "eager")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("q_len", [1, 70])
def test_a_batch_that_reads_nothing(q_len: int) -> None:
    mask = scattered(16, 24, q_len)
    mask.kv_num_blocks[1] = mask.full_kv_num_blocks[1] = 0
    assert gathers(*memory_of(mask))
    out = flex_attention(*operands(mask, 2), block_mask=mask, enable_gqa=True)
    assert not out[1].any() and not out[0].isnan().any()


@pytest.mark.parametrize("q_len", [2, 70])
def test_queries_that_begin_later(q_len: int) -> None:
    mask = scattered(16, 24, q_len)
    query, key, value = operands(mask, 2)
    found, expected = (
        quire.attention(query, Dense(key, value), mask=mask, q_start=7, backend=backend)
        for backend in ("jit", "eager")
    )
    torch.testing.assert_close(found, expected)


def test_edits_are_seen() -> None:
    mask = scattered(16, 24, 1)
    before = flex_attention(*operands(mask, 2), block_mask=mask, enable_gqa=True)
    mask.full_kv_indices[0, 0, 0, 0] = 99  # not there: it counts for nothing
    mask.kv_num_blocks[:] = torch.tensor([0, -1])[:, None, None]
    arguments = operands(mask, 2)
    found, expected = (
        flex_attention(*arguments, block_mask=mask, enable_gqa=True, backend=backend)
        for backend in ("auto", "eager")
    )
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(before[0], found[0])


def test_gradients() -> None:
    mask = scattered(16, 24, 70)
    grads = []
    for backend in ("jit", "eager"):
        leaves = [x.nan_to_num().requires_grad_() for x in operands(mask, 2)]
        out = flex_attention(*leaves, by_row, mask, enable_gqa=True, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def num_tiles(problem: Problem, memory: Placed) -> int:
    assert problem.block_mask is not None
    block_kv = Target.host().block_kv
    return len(read_lists(problem.block_mask, memory.lengths, 64, block_kv).entries)


def test_tiles_are_full_of_keys_that_are_read() -> None:
    mask = scattered(16, 64, 1, every=8)  # of every tile of the cache one page at most
    found = gather(*memory_of(mask))
    pages = mask.to_dense().sum(-1).flatten().tolist()
    assert num_tiles(*memory_of(mask)) == sum(pages) > 4
    assert num_tiles(*found) == 2
    assert found[1].sequences.kv_end.tolist() == [16 * count for count in pages]


def test_blocks_side_by_side_keep_the_order_of_their_lists() -> None:
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[2]]]),
        torch.tensor([[[[5, 0, 0, 0, 0, 0, 0, 0]]]]),
        torch.tensor([[[3]]]),
        torch.tensor([[[[6, 2, 3, 0, 0, 0, 0, 0]]]]),
        BLOCK_SIZE=(64, 64),
        mask_mod=every_third,
    )
    mask.lists_pages = True
    found = gather(*memory_of(mask, 1))
    assert found[1].page_table.tolist() == [[6, 2, 3, 5, 0]]
    kinds = found[0].block_mask._cells().flatten().tolist()
    assert [kind == PARTIAL for kind in kinds] == [False, False, False, True, True]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def test_what_is_left_where_it_is() -> None:
    ordinary = quire.create_block_mask(causal, None, None, 256, 256, "cpu", 64)
    window = quire.create_block_mask(
        lambda b, h, q, kv: (q - kv).abs() < 100, None, None, 640, 640, "cpu", 64
    )
    whole_tiles, unmarked = scattered(128, 24, 70), scattered(16, 24, 70)
    ordinary.lists_pages = window.lists_pages = True
    unmarked.lists_pages = False
    for mask in (ordinary, window, whole_tiles, unmarked):
        assert not gathers(*memory_of(mask, 1))
    problem, memory = memory_of(scattered(16, 24, 70))
    assert gathers(problem, memory)
    keys = memory.key.expand(2, -1, -1, -1)
    assert not gathers(problem, memory._replace(key=keys, value=keys))  # a cache for each batch
    assert not gathers(Problem(1.0), memory)
