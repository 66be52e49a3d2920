"""Blocks that a mask lists for few queries are pages of sequences; nothing else is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

from quire import AuxRequest, BlockMask, Dense, Paged, attention, reference
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL
from quire.runtime import chosen

HQ, HKV, D = 4, 2, 24


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + 40 >= kv_idx


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * b - 0.01 * (h + 1) * (q_idx - kv_idx)


def listed(
    size: tuple[int, int], lengths: tuple[int, int], heads: int, *, full: bool = False, b: int = 2
) -> BlockMask:
    """A mask with three blocks or fewer in each row: in any order, one of them twice."""
    generator = torch.Generator().manual_seed(sum(size) + heads)
    rows, columns = (-(-length // each) for length, each in zip(lengths, size, strict=True))
    order = torch.rand(b, heads, rows, columns, generator=generator).argsort(-1)[..., :3]
    order[..., -1] = order[..., 0]
    counts = torch.randint(0, order.shape[-1] + 1, (b, heads, rows), generator=generator)
    lists = [
        x.int().repeat_interleave(HQ // HKV if heads == HKV else 1, 1) for x in (counts, order)
    ]
    more = [lists[0].clamp(max=1), lists[1].flip(-1)] if full else [None, None]
    options = {"BLOCK_SIZE": size, "mask_mod": causal, "seq_lengths": lengths}
    return BlockMask.from_kv_blocks(*lists, *more, **options, compute_q_blocks=False)


def operands(lengths: tuple[int, int], b: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q_len, kv_len = lengths
    keys = torch.randn(2, b, HKV, kv_len, D)
    return torch.randn(b, HQ, q_len, D), keys[0], keys[1]


@pytest.fixture(autouse=True)
def always_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_is_worth", lambda *_: True)


CASES = [((1, 16), (30, 200)), ((1, 64), (9, 50)), ((3, 32), (40, 100)), ((16, 64), (70, 300))]


@pytest.mark.parametrize("heads", [1, HKV, HQ])
@pytest.mark.parametrize(("size", "lengths"), [*CASES, ((64, 128), (130, 500))])
def test_the_reference(size: tuple[int, int], lengths: tuple[int, int], heads: int) -> None:
    mask = listed(size, lengths, heads, full=size[0] > 1)
    query, key, value = operands(lengths)
    aux = AuxRequest(lse=True, max_scores=True, key_mass=True)
    out, numbers = attention(
        query, Dense(key, value), score_mod=slanted, mask=mask, q_start=0, return_aux=aux
    )
    truth, peer = (
        reference.attention(
            *(x.to(dtype) for x in (query, key, value)), score_mod=slanted, block_mask=mask
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_as_good_as(out, peer.out, truth.out)
    for name in ("lse", "max_scores", "key_mass"):
        found = getattr(numbers, name)
        assert_as_good_as(found, getattr(peer, name), getattr(truth, name), name)


@pytest.mark.parametrize(("size", "lengths"), CASES)
def test_what_is_not_listed_is_not_read(size: tuple[int, int], lengths: tuple[int, int]) -> None:
    mask = listed(size, lengths, HKV)
    query, key, value = operands(lengths)
    clean = attention(query, Dense(key, value), mask=mask, q_start=0)
    read = mask.to_dense()[:, :: HQ // HKV].any(2).repeat_interleave(size[1], -1)
    unread = ~read[..., : lengths[1]]
    key[unread] = value[unread] = math.nan
    assert torch.equal(attention(query, Dense(key, value), mask=mask, q_start=0), clean)


@pytest.mark.parametrize("heads", [1, HKV, HQ])
@pytest.mark.parametrize(("size", "lengths"), CASES)
def test_bits(size: tuple[int, int], lengths: tuple[int, int], heads: int) -> None:
    """Layouts, threads and the batch change no bit."""
    mask = listed(size, lengths, heads)
    query, key, value = operands(lengths)
    options: dict[str, Any] = {"score_mod": slanted, "q_start": 0}
    whole = attention(query, Dense(key, value), mask=mask, **options)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    other = attention(turned[0], Dense(*turned[1:]), mask=mask, **options)
    assert torch.equal(other, whole) and other.stride() == turned[0].stride()
    assert torch.equal(attention(turned[0], Dense(key, turned[2]), mask=mask, **options), whole)
    torch.set_num_threads(1)
    assert torch.equal(attention(query, Dense(key, value), mask=mask, **options), whole)
    first = mask[:1]
    first.mask_mod = causal
    one = attention(query[:1], Dense(key[:1], value[:1]), mask=first, **options)
    assert torch.equal(one, whole[:1])


@pytest.mark.parametrize("q_len", [1, 30])
def test_a_row_is_decoding_over_the_pages_that_it_lists(q_len: int) -> None:
    """The same bits as one query of one key head, over pages with holes."""
    lengths = (q_len, 208)
    mask = listed((1, 16), lengths, HKV, b=1)
    query, key, value = operands(lengths, b=1)
    whole = attention(query, Dense(key, value), mask=mask, q_start=100)
    grid = mask.to_dense()[0, :: HQ // HKV]
    for head in range(HKV):
        pages = [x[0, head].unflatten(0, (-1, 16)).unsqueeze(1) for x in (key, value)]
        group = slice(head * 2, head * 2 + 2)
        for row in range(0, q_len, 7):
            table = torch.where(grid[head, row] > 0, torch.arange(13), -1).int()[None]
            out = attention(
                query[:, group, row : row + 1],
                Paged(*pages, table, [208]),
                mask=lambda b, h, q_idx, kv_idx: q_idx + 40 >= kv_idx + 100,
                q_start=100 + row,
            )
            assert torch.equal(out, whole[:, group, row : row + 1])


@pytest.mark.parametrize(("size", "lengths"), CASES)
def test_gradients(size: tuple[int, int], lengths: tuple[int, int]) -> None:
    mask = listed(size, lengths, HKV)
    tensors = [x.requires_grad_() for x in operands(lengths)]
    above = torch.randn_like(tensors[0])

    def gradients(attend: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), tensors, above)

    found = gradients(
        lambda: attention(tensors[0], Dense(*tensors[1:]), score_mod=slanted, mask=mask, q_start=0)
    )
    options: dict[str, Any] = {"score_mod": slanted, "block_mask": mask}
    peer = gradients(lambda: reference.attention(*tensors, **options).out)
    truth = gradients(
        lambda: reference.attention(*(x.double() for x in tensors), **options).out.float()
    )
    for name, *grads in zip(("query", "key", "value"), found, peer, truth, strict=True):
        assert_as_good_as(grads[0], grads[1], grads[2].double(), name, size=8.0)


def test_a_list_may_change_from_call_to_call() -> None:
    query, key, value = operands((30, 200))
    for heads in (HKV, HQ, HKV):
        mask = listed((1, 16), (30, 200), heads)
        for _ in range(2):
            out = attention(query, Dense(key, value), mask=mask, q_start=0)
            wanted = reference.attention(query, key, value, block_mask=mask).out
            torch.testing.assert_close(out, wanted)
            mask.kv_num_blocks.fill_(1)


# --- when it is worth it ---


def worth(cells: Tensor, size: tuple[int, int]) -> bool:
    lists = chosen.Lists.of(
        BlockMask._from_cells(cells, True, BLOCK_SIZE=size), cells.shape[-1], key_heads=1
    )
    lengths = cells.shape[2] * size[0], cells.shape[3] * size[1]
    return WORTH(lists, size, lengths)


WORTH = chosen._is_worth


def test_scattered_blocks_are_chosen_and_neighbours_are_tiles() -> None:
    scattered = torch.zeros(1, 1, 512, 64, dtype=torch.int32)
    scattered.scatter_(-1, torch.rand(1, 1, 512, 64).argsort(-1)[..., :4], FULL)
    assert worth(scattered, (1, 64))
    causal_blocks = torch.ones(1, 1, 64, 64, dtype=torch.int32).tril() * PARTIAL
    assert not worth(causal_blocks, (64, 64))
    assert worth(scattered[:, :, :64], (64, 64))
    assert not worth(torch.full((1, 1, 16, 16), FULL), (128, 128))
    assert worth(torch.full((1, 1, 8, 8), EMPTY), (64, 64))


def test_what_is_left_to_tiles() -> None:
    query, key, value = operands((30, 200))
    mask = listed((1, 16), (30, 200), HQ)
    sink = torch.randn(HQ)
    out = attention(query, Dense(key, value), mask=mask, q_start=0, sink=sink)
    wanted = reference.attention(query, key, value, block_mask=mask, sink=sink).out
    torch.testing.assert_close(out, wanted)
