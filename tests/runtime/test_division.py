"""Blocks that a mask lists are computed by tiles, by parts of tiles or in its own small blocks.

All of them give the same bits, those of a mask that has no blocks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

from quire import AuxRequest, BlockMask, Dense, attention, plans, reference
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL
from quire.codegen.convention import KEYS_OF_RUN
from quire.memory import TOP_LEFT
from quire.runtime import forward as division
from quire.runtime.blocks import EVERY_RUN, tile_lists

HQ, HKV, D = 4, 2, 24


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + 40 >= kv_idx


def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * 7 + kv_idx * 3 + h) % 5 != 0


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * b - 0.01 * (h + 1) * (q_idx - kv_idx)


@contextmanager
def divided(in_small_blocks: bool) -> Iterator[None]:
    """Compute masks with small blocks of queries block by block, or by tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "_is_worth", lambda *_: in_small_blocks)
        patch.setattr(plans, "known", type(plans.known)(256))
        yield


class Case(NamedTuple):
    """A mask of cells [B, H, rows, columns] and the operands of a call."""

    cells: Tensor
    size: tuple[int, int]
    query: Tensor
    key: Tensor
    value: Tensor
    start: int
    options: dict[str, Any]

    @property
    def mask(self) -> BlockMask:
        lengths = self.query.shape[2], self.key.shape[2]
        mod = random.Random(sum(self.size)).choice([causal, odd])
        return BlockMask._from_cells(
            self.cells, True, BLOCK_SIZE=self.size, mask_mod=mod, seq_lengths=lengths
        )

    def run(self, mask: Any, *, observe: bool = False, rows: slice = slice(None)) -> list[Tensor]:
        """Return out, lse and max_scores."""
        aux = AuxRequest(lse=True, max_scores=True, argmax=observe, entropy=observe)
        memory = Dense(self.key, self.value, self.start)
        first = self.options["q_start"] + (rows.start or 0)
        options = self.options | {"q_start": first, "return_aux": aux}
        out, found = attention(self.query[:, :, rows], memory, mask=mask, **options)
        return [out, found.lse, found.max_scores]

    def elements(self) -> Any:
        """Return the same mask as a table of all elements."""
        shape = (*self.query.shape[:3], self.key.shape[2])
        table = reference.block_mask_elements(self.mask, shape).expand(shape).contiguous()
        first, start = self.options["q_start"], self.start

        def holds(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return table[b, h, q_idx - first, kv_idx - start]

        return holds


def random_case(seed: int) -> Case:
    """A call that divides nothing: sizes of blocks, lengths and positions are drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = (
        draw.choice([1, 1, 2, 3, 8, 16, 20, 32, 48, 64, 96]),
        draw.choice([16, 24, 32, 48, 64, 96]),
    )
    q_len, kv_len = draw.choice([1, 5, 17, 70, 130]), draw.choice([50, 128, 300, 1100])
    group, key_heads, batch = draw.choice([1, 2, 4]), draw.choice([1, 2]), draw.choice([1, 2])
    heads = draw.choice([1, key_heads, group * key_heads])
    rows, columns = -(-q_len // size[0]), -(-kv_len // size[1])
    shape = (batch, heads, rows, columns)
    cells = (torch.rand(shape) < draw.choice([0.05, 0.2, 0.8])) * torch.randint(1, 3, shape)
    if 1 < heads < group * key_heads:
        cells = cells.repeat_interleave(group, 1)
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    width = draw.choice([8, 20])
    keys = torch.randn(2, batch, key_heads, kv_len, width, dtype=dtype)
    options = {"score_mod": draw.choice([None, slanted]), "q_start": draw.choice([0, 33])}
    if draw.random() < 0.3:
        options["sink"] = torch.randn(group * key_heads)
    query = torch.randn(batch, group * key_heads, q_len, width, dtype=dtype)
    start = draw.choice([0, 0, 16, 48, 128, 5])
    return Case(cells.int(), size, query, keys[0], keys[1], start, options)


@pytest.mark.parametrize("seed", range(30))
def test_every_division_has_the_bits_of_a_mask_without_blocks(seed: int) -> None:
    case = random_case(seed)
    wanted = case.run(case.elements())
    for small in (False, True):
        with divided(small):
            found = case.run(case.mask)
            assert all(map(torch.equal, found, wanted)), small
    assert all(map(torch.equal, case.run(case.mask, observe=True), wanted))


@pytest.mark.parametrize("seed", range(100, 110))
def test_rows_alone_and_in_chunks_have_the_bits_of_all(seed: int) -> None:
    case = random_case(seed)
    wanted, q_len = case.run(case.mask), case.query.shape[2]
    step = 1 if q_len < 6 else q_len // 3
    for first in range(0, q_len, step):
        rows = slice(first, min(first + step, q_len))
        mask = case.mask.for_queries(rows.start, rows.stop)
        found = case.run(mask, rows=rows)
        assert all(torch.equal(x, y[:, :, rows]) for x, y in zip(found, wanted, strict=True))


# --- masks with lists --------------------------------------------------------------------------


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


CASES = [((1, 16), (30, 200)), ((1, 64), (9, 50)), ((3, 32), (40, 100)), ((16, 64), (70, 300))]


@pytest.mark.parametrize("heads", [1, HKV, HQ])
@pytest.mark.parametrize(("size", "lengths"), [*CASES, ((24, 64), (130, 500))])
def test_the_reference(size: tuple[int, int], lengths: tuple[int, int], heads: int) -> None:
    mask = listed(size, lengths, heads, full=size[0] > 1)
    query, key, value = operands(lengths)
    aux = AuxRequest(lse=True, max_scores=True, key_mass=True)
    with divided(in_small_blocks=True):
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
    with divided(in_small_blocks=True):
        clean = attention(query, Dense(key, value), mask=mask, q_start=0)
        read = mask.to_dense()[:, :: HQ // HKV].any(2).repeat_interleave(size[1], -1)
        unread = ~read[..., : lengths[1]]
        key[unread] = value[unread] = math.nan
        assert torch.equal(attention(query, Dense(key, value), mask=mask, q_start=0), clean)


@pytest.mark.parametrize("heads", [1, HKV, HQ])
@pytest.mark.parametrize(("size", "lengths"), CASES)
def test_layouts_threads_and_the_batch(
    size: tuple[int, int], lengths: tuple[int, int], heads: int
) -> None:
    mask = listed(size, lengths, heads)
    query, key, value = operands(lengths)
    options: dict[str, Any] = {"score_mod": slanted, "q_start": 0}
    with divided(in_small_blocks=True):
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


def test_lists_without_an_entry() -> None:
    query, key, value = operands((30, 200))
    mask = listed((1, 16), (30, 200), HQ)
    mask.kv_num_blocks.zero_()
    for small in (False, True):
        with divided(small):
            assert not attention(query, Dense(key, value), mask=mask, q_start=0).any()


# --- when it is worth it, and what is listed ---------------------------------------------------


def worth(cells: Tensor, size: tuple[int, int]) -> bool:
    runs = BlockMask._from_cells(cells, True, BLOCK_SIZE=size)._as_runs()
    return division._is_less(runs, size, cells.shape[2] * size[0], "panel")


def test_scattered_blocks_are_computed_one_by_one_and_neighbours_by_tiles() -> None:
    scattered = torch.zeros(1, 1, 512, 64, dtype=torch.int32)
    scattered.scatter_(-1, torch.rand(1, 1, 512, 64).argsort(-1)[..., :4], FULL)
    assert worth(scattered, (1, 64))
    assert worth(scattered[:, :, :64], (32, 64))
    causal_blocks = torch.ones(1, 1, 64, 64, dtype=torch.int32).tril() * PARTIAL
    assert not worth(causal_blocks, (32, 64))
    assert worth(torch.full((1, 1, 8, 8), EMPTY), (32, 64))


def test_runs_of_a_tile() -> None:
    cells = torch.tensor([[EMPTY, FULL, EMPTY, EMPTY, FULL, FULL, EMPTY, PARTIAL, FULL, EMPTY]])
    rows = BlockMask._from_cells(cells[None, None], True, BLOCK_SIZE=(8, KEYS_OF_RUN)).rows()
    lists = tile_lists(rows, 8, 128, cuts=True)
    assert lists.entries.tolist() == [1, 4 + 2] and lists.mixed is None
    assert lists.runs is not None
    assert lists.runs.tolist() == [sum(k << 2 * at for at, k in enumerate(cells[0, :8])), 0b10]
    assert lists.keys.tolist() == [4 * KEYS_OF_RUN, KEYS_OF_RUN]
    whole = tile_lists(rows._replace(seq_lengths=(8, 9 * KEYS_OF_RUN)), 8, 128, cuts=True)
    assert whole.runs is not None and whole.runs[1] == 0  # nothing is after the last key
    assert EVERY_RUN & 0b11 == PARTIAL


def test_heads_that_share_a_key_head_share_a_list() -> None:
    query, key, value = operands((30, 200))
    placed = Dense(key, value).place(query, TOP_LEFT)
    for heads, lists in ((HKV, HKV), (HQ, HQ), (1, 1)):
        mask = listed((1, 16), (30, 200), heads)
        with divided(in_small_blocks=True):
            (part,) = division.parts_of(placed, mask)
        assert part.form == "row" and part.block_q == 1 and part.lists.heads == lists
