"""A mask that reads a table skips the tiles, and gives the bits, of the same mask in arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import Dense, Paged, Ragged, attention, create_block_mask, flex_attention, reference
from quire.errors import CapturedIndexError
from quire.ir import pyramid
from quire.runtime import pyramids

N, H, D, PAGE = 512, 4, 24, 16
SCORES = H * N * N
BLOCKS = torch.eye(N // 64, dtype=torch.bool)
BLOCKS[5, 1] = True
OWNER = torch.arange(N) // 100
FRIENDS = torch.eye(6, dtype=torch.bool)
PER_HEAD = torch.stack([BLOCKS, BLOCKS.T, ~BLOCKS, torch.ones_like(BLOCKS)])
Mask = Callable[..., Any]


def in_block(i: Any, j: Any) -> Any:
    return (i // 64 == j // 64) | ((i // 64 == 5) & (j // 64 == 1))


PAIRS: dict[str, tuple[Mask, Mask]] = {  # by a table, and by arithmetic
    "blocks": (
        lambda b, h, i, j: BLOCKS[i // 64, j // 64],
        lambda b, h, i, j: in_block(i, j),
    ),
    "heads": (
        lambda b, h, i, j: PER_HEAD[h, i // 64, j // 64],
        lambda b, h, i, j: torch.where(
            h == 0,
            in_block(i, j),
            torch.where(h == 1, in_block(j, i), torch.where(h == 2, ~in_block(i, j), h == 3)),
        ),
    ),
    "documents": (
        lambda b, h, i, j: FRIENDS[OWNER[i], OWNER[j]] & (j <= i),
        lambda b, h, i, j: (i // 100 == j // 100) & (j <= i),
    ),
    "from the end": (
        lambda b, h, i, j: BLOCKS[i // 64 - 8, j // 64 - 8],
        lambda b, h, i, j: in_block(i, j),
    ),
}


def qkv(q_len: int = N) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, H, n, D, generator=random) for n in (q_len, N, N)]


@pytest.mark.parametrize("q_len", [1, 3, 4, 40, N])
@pytest.mark.parametrize("name", PAIRS)
def test_a_table_gives_the_bits_of_arithmetic(name: str, q_len: int) -> None:
    q, k, v = qkv(q_len)
    start = N - q_len
    by_table, by_number = (
        attention(q, Dense(k, v), mask=mask, q_start=start, backend="jit") for mask in PAIRS[name]
    )
    assert torch.equal(by_table, by_number)
    shifted = lambda b, h, i, j: PAIRS[name][1](b, h, i + start, j)  # noqa: E731
    expected = reference.attention(q, k, v, mask_mod=shifted).out
    torch.testing.assert_close(by_table, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_those_of_arithmetic(name: str) -> None:
    found = []
    for mask in PAIRS[name]:
        operands = [x.requires_grad_() for x in qkv()]
        flex_attention(*operands, mask_mod=mask, backend="jit").square().sum().backward()
        found.append([x.grad for x in operands])
    for by_table, by_number in zip(*found, strict=True):
        assert torch.equal(by_table, by_number)


@pytest.mark.parametrize("name", PAIRS)
def test_all_memories_give_the_same_bits(name: str) -> None:
    q, k, v = qkv()
    mask = PAIRS[name][0]
    expected = attention(q, Dense(k, v), mask=mask)[0].transpose(0, 1)
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    ragged = attention(rows[0], Ragged(rows[1], rows[2], [0, N]), mask=mask)
    assert torch.equal(ragged, expected)
    table = torch.randperm(N // PAGE)[None]
    pages = []
    for x in (k, v):
        own = x[0].unflatten(1, (-1, PAGE)).transpose(0, 1)
        pages.append(torch.empty_like(own).index_copy_(0, table[0], own))
    paged = attention(q, Paged(*pages, table, [N]), mask=mask)
    assert torch.equal(paged[0].transpose(0, 1), expected)


@pytest.mark.parametrize("block_size", [64, (16, 128), (48, 80)], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_the_blocks_are_those_of_arithmetic(name: str, block_size: Any) -> None:
    by_table, by_number = (
        create_block_mask(mask, 1, H, N, N, BLOCK_SIZE=block_size).rows().runs.content()
        for mask in PAIRS[name]
    )
    assert by_table == by_number


def test_a_table_that_changed_is_read_again() -> None:
    q, k, v = qkv()
    table = BLOCKS.clone()
    run = lambda: flex_attention(q, k, v, mask_mod=lambda b, h, i, j: table[i // 64, j // 64])  # noqa: E731
    run()
    table.copy_(table.roll(1, 0))
    expected = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: in_block((i - 64) % N, j))
    assert torch.equal(run(), expected)


def test_a_table_of_elements_in_leaves_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    positions = torch.arange(N)
    table = in_block(positions[:, None], positions)
    monkeypatch.setattr(pyramid, "MOST_BYTES", 64 * 64)
    by_table = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: table[i, j])
    expected = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: in_block(i, j))
    assert torch.equal(by_table, expected)


@pytest.mark.parametrize("q_len", [1, N])
def test_whether_a_table_is_read_changes_no_bit(
    q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(q_len)
    run = lambda: attention(q, Dense(k, v), mask=PAIRS["documents"][0], q_start=N - q_len)  # noqa: E731
    read = run()
    monkeypatch.setattr(pyramids, "WORTH", 2**60)
    assert torch.equal(run(), read)


def test_an_index_out_of_range_says_what_the_eager_path_says() -> None:
    q, k, v = qkv()
    messages = []
    for backend in ("jit", "eager"):
        with pytest.raises(CapturedIndexError) as error:
            flex_attention(
                *(q, k, v), mask_mod=lambda b, h, i, j: BLOCKS[i // 64, j // 60], backend=backend
            )
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "index 8 is out of bounds for dimension 1 with size 8" in messages[0]


# --- what quire.explain says


def computed(mask: Mask, q_len: int = N) -> str:
    """The line of `explain` about tiles that are computed unread; empty if there is none."""
    lines = quire.explain(*qkv(q_len), mask_mod=mask, backend="jit").splitlines()
    return next((line for line in lines if line.startswith("jit computes")), "")


ADVICE = "A block_mask, made once with create_block_mask, says which tiles no query reads."


def test_a_mask_that_is_bounded_needs_no_word() -> None:
    assert [computed(mask) for pair in PAIRS.values() for mask in pair] == [""] * 8
    assert computed(lambda b, h, i, j: (i * 7 % 5 == 0) | (j < i)) == ""


def test_a_mask_that_nothing_bounds() -> None:
    def powers(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.pow(q_idx, kv_idx) > 7

    line = inspect.getsourcelines(powers)[1] + 1
    assert computed(powers) == (
        f"jit computes every tile, {SCORES:,} scores in all: in the mask_mod 'powers' nothing "
        f"bounds 'pow' at test_table_masks.py:{line}: `return torch.pow(q_idx, kv_idx) > 7`. "
        f"{ADVICE}"
    )


def test_a_mask_of_which_a_part_is_bounded() -> None:
    def powers(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (torch.pow(q_idx, kv_idx) > 7)

    found = computed(powers)
    assert found.startswith(
        f"jit computes tiles that nothing else rules out, of {SCORES:,} scores in all: in the "
        f"mask_mod"
    )
    assert "nothing bounds 'pow' at" in found and found.endswith(ADVICE)


def test_a_table_that_is_not_worth_to_be_read() -> None:
    positions = torch.arange(N)
    table = in_block(positions[:, None], positions)

    def elements(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[q_idx, kv_idx]

    assert computed(elements) == ""
    assert computed(elements, q_len=1) == (
        f"jit computes tiles that nothing else rules out, of {SCORES // N:,} scores in all: in the "
        f"mask_mod 'elements' a table of shape [512, 512] is too large for so few scores. {ADVICE}"
    )


def test_a_block_mask_needs_no_word() -> None:
    mask = create_block_mask(lambda b, h, i, j: torch.pow(i, j) > 7, None, None, N, N)
    assert "computes" not in quire.explain(*qkv(), block_mask=mask, backend="jit")
