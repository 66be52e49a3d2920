"""Block masks over keys and queries that do not begin at position 0: masks count from their own.

Kernels cut keys into tiles by position, so the tiles of one mask differ from start to start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire import AuxRequest, BlockMask, Dense, attention, create_block_mask, merge_attention

pytestmark = pytest.mark.every_width

STARTS = (1, 64, 128, 1000, 1024)
SIZES = (128, (64, 48), (256, 32), (32, 16))
S = 300


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx + 2 * b - h).abs() < 90


def scattered(size: tuple[int, int], q_len: int) -> BlockMask:
    """A mask that lists blocks by hand; its mask_mod disagrees with them."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = -(-q_len // size[0]), -(-S // size[1])
    cells = torch.randint(0, 3, (2, 1, rows, columns), generator=generator)
    lists = []
    for kind in (1, 2):
        there = (cells == kind).int()
        order = there.argsort(dim=-1, descending=True, stable=True).int()
        lists += [there.sum(-1, dtype=torch.int32), order]
    lengths = (q_len, S)
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=size, mask_mod=lambda b, h, i, j: (i + j) % 3 > 0, seq_lengths=lengths
    )


def operands(heads: int, q_len: int, *, learn: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + q_len)
    shapes = ((2, heads, q_len, 16), (2, 2, S, 16), (2, 2, S, 16))
    return [torch.randn(s, generator=generator).requires_grad_(learn) for s in shapes]


def gradients(run: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out = run(*tensors)
    return torch.autograd.grad(out, tensors, torch.linspace(-1, 1, out.numel()).view_as(out))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("heads", "q_len"), [(2, 300), (4, 130), (2, 1), (6, 4)])
def test_where_the_first_key_is_does_not_matter(
    size: int | tuple[int, int], heads: int, q_len: int
) -> None:
    query, key, value = operands(heads, q_len)
    mask = create_block_mask(window, 2, heads, q_len, S, BLOCK_SIZE=size)
    expected = attention(query, Dense(key, value), mask=mask, backend="eager")
    for start, q_start in itertools.product(STARTS, (None, 37)):
        found = attention(
            query, Dense(key, value, start=start), mask=mask, q_start=q_start, backend="jit"
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [(64, 48), (256, 32), (32, 128)])
@pytest.mark.parametrize("q_len", [2, 200])
def test_blocks_that_were_listed_by_hand(size: tuple[int, int], q_len: int) -> None:
    query, key, value = operands(4, q_len)
    mask = scattered(size, q_len)
    expected = attention(query, Dense(key, value), mask=mask, q_start=0, backend="eager")
    for start in STARTS:
        memory = Dense(key, value, start=start)
        torch.testing.assert_close(attention(query, memory, mask=mask, q_start=5), expected)


@pytest.mark.parametrize("size", [128, (64, 48)])
@pytest.mark.parametrize(("heads", "q_len"), [(2, 200), (4, 3)])
def test_gradients(size: int | tuple[int, int], heads: int, q_len: int) -> None:
    tensors = operands(heads, q_len, learn=True)
    mask = create_block_mask(window, 2, heads, q_len, S, BLOCK_SIZE=size)
    expected = gradients(
        lambda q, k, v: attention(q, Dense(k, v), mask=mask, backend="eager"), tensors
    )
    for start in (1, 128, 1000):
        found = gradients(
            lambda q, k, v, s=start: attention(q, Dense(k, v, start=s), mask=mask, backend="jit"),
            tensors,
        )
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there)


@pytest.mark.parametrize("q_len", [3, 200])
def test_mods_still_see_positions(q_len: int) -> None:
    """The score_mod counts from position 0."""
    query, key, value = operands(4, q_len)
    mask = create_block_mask(window, 2, 4, q_len, S, BLOCK_SIZE=(64, 48))

    def distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - 0.01 * (q_idx - kv_idx).abs()

    wanted = AuxRequest(lse=True, max_scores=True, argmax=True, entropy=True, key_mass=True)
    for start in (77, 256):
        (out, aux), (expected, expected_aux) = (
            attention(
                query,
                Dense(key, value, start=start),
                score_mod=distance,
                mask=mask,
                return_aux=wanted,
                backend=backend,
            )
            for backend in ("jit", "eager")
        )
        torch.testing.assert_close(out, expected)
        for name in ("lse", "max_scores", "argmax", "entropy", "key_mass"):
            torch.testing.assert_close(getattr(aux, name), getattr(expected_aux, name))


def test_shards_of_keys_merge() -> None:
    query, key, value = operands(2, 200)
    mask = create_block_mask(window, 2, 2, 200, S, BLOCK_SIZE=64)
    parts: list[Tensor] = []
    for first, end in ((0, 128), (128, 192), (192, S)):
        shard = Dense(key[:, :, first:end], value[:, :, first:end], start=first)
        part = create_block_mask(
            lambda b, h, i, j, at=first: window(b, h, i, j + at), 2, 2, 200, end - first
        )
        out, aux = attention(query, shard, mask=part, q_start=0, return_aux=AuxRequest(lse=True))
        parts = list(merge_attention(*parts, out, aux.lse)) if parts else [out, aux.lse]
    torch.testing.assert_close(parts[0], attention(query, Dense(key, value), mask=mask))
