"""Holes in paged memory: positions that do not exist, at no cost and without a trace in results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

from quire import AuxRequest, BlockMask, Dense, Paged, attention, reference
from quire.aux_outputs import OF_KERNELS
from quire.config import Backend
from quire.memory.tables import fill
from quire.runtime import launch

PAGE, HQ, HKV, D = 16, 4, 2, 24
EVERYTHING = AuxRequest(*[True] * len(OF_KERNELS))
BACKENDS: tuple[Backend, ...] = ("jit", "eager")
LENGTHS = [190, 100, 70, 33]
HOLES = ([0, 3, 4, 7], [1, 6], [], [0, 1, 2])  # in the middle, at the end, nowhere, everywhere


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * b - 0.01 * (h + 1) * (q_idx - kv_idx)


def memory(dtype: torch.dtype = torch.float32) -> Paged:
    """Four sequences with holes. What no sequence reads is NaN."""
    torch.manual_seed(0)
    table = torch.randperm(60)[:48].view(4, 12).int()
    for row, holes in zip(table, HOLES, strict=True):
        row[holes] = -1
    key, value = torch.randn(2, 60, HKV, PAGE, D, dtype=dtype)
    unread = torch.ones(60, dtype=torch.bool)
    for row, length in zip(table.tolist(), LENGTHS, strict=True):
        unread[[page for page in row[: -(-length // PAGE)] if page >= 0]] = False
    key[unread] = value[unread] = math.nan
    return Paged(key, value, table, LENGTHS)


def expected(query: Tensor, pages: Paged, b: int, dtype: torch.dtype) -> reference.Reference:
    """What the reference gives for one sequence, with a mask that hides its holes."""
    length, row = LENGTHS[b], pages.page_table[b]
    there = (row >= 0).repeat_interleave(PAGE)[:length]
    key, value = (
        torch.where(
            there[:, None], x[row.long().clamp(min=0)].transpose(0, 1).flatten(1, 2)[:, :length], 0
        ).unsqueeze(0)
        for x in (pages.key, pages.value)
    )
    q_len = query.shape[2]
    return reference.attention(
        query[b : b + 1].to(dtype),
        key.to(dtype),
        value.to(dtype),
        score_mod=slanted,
        mask_mod=lambda b, h, q, kv: (q >= kv) & there[kv],
        q_start=max(0, length - q_len),
        b_start=b,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_len", [1, 3, 9, 70])
def test_the_reference(q_len: int, backend: Backend) -> None:
    pages = memory()
    query = torch.randn(4, HQ, q_len, D)
    options: dict[str, Any] = {"score_mod": slanted, "mask": causal, "backend": backend}
    out, aux = attention(query, pages, return_aux=EVERYTHING, **options)
    assert aux.key_mass.shape == (4, HQ, max(LENGTHS))
    for b, length in enumerate(LENGTHS):
        truth, peer = (expected(query, pages, b, t) for t in (torch.float64, torch.float32))
        found = {name: x[b : b + 1] for name, x in zip(OF_KERNELS, aux, strict=False)} | {
            "out": out[b : b + 1]
        }
        found["key_mass"] = found["key_mass"][..., :length]
        for name in ("out", "lse", "max_scores", "entropy", "key_mass"):
            assert_as_good_as(found[name], getattr(peer, name), getattr(truth, name), name)
        assert torch.equal(found["argmax"], truth.argmax)


@pytest.mark.parametrize("q_len", [1, 9])
def test_a_sequence_of_holes_reads_nothing(q_len: int) -> None:
    out, aux = attention(torch.randn(4, HQ, q_len, D), memory(), return_aux=EVERYTHING)
    assert not out[3].any() and not aux.key_mass[3].any()
    assert (aux.lse[3] == -math.inf).all() and (aux.argmax[3] == -1).all()
    nowhere = Paged(memory().key[:0], memory().value[:0], torch.full((4, 12), -1), LENGTHS)
    assert not attention(torch.randn(4, HQ, q_len, D), nowhere).any()


@pytest.mark.parametrize("page", [4, 16, 24, 64, 128])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 300), (3, 1500), (9, 300), (40, 700)])
def test_the_bits_of_a_mask_that_hides_them(page: int, q_len: int, kv_len: int) -> None:
    """Whatever is in the pages that are left out: positions and what a row sees decide."""
    torch.manual_seed(page + q_len)
    count = -(-kv_len // page)
    key, value = torch.randn(2, count, HKV, page, D)
    query, there = torch.randn(1, HQ, q_len, D), torch.rand(count) < 0.4
    dense = [x.transpose(0, 1).flatten(1, 2)[None, :, :kv_len].clone() for x in (key, value)]
    key[~there] = value[~there] = math.nan
    table = torch.where(there, torch.arange(count), -1).int()[None]
    pages = Paged(key, value, table, [kv_len])
    seen = AuxRequest(lse=True, max_scores=True)
    for wanted in (seen, AuxRequest(lse=True, max_scores=True, argmax=True, entropy=True)):
        for mask in (None, causal):

            def hidden(b: Any, h: Any, q_idx: Any, kv_idx: Any, mask: Any = mask) -> Any:
                holds = there[kv_idx // page]
                return holds if mask is None else holds & mask(b, h, q_idx, kv_idx)

            options: dict[str, Any] = {"score_mod": slanted, "return_aux": wanted}
            out, aux = attention(query, pages, mask=mask, **options)
            other, expected_aux = attention(query, Dense(*dense), mask=hidden, **options)
            assert torch.equal(out, other)
            for name in ("lse", "max_scores", "argmax", "entropy"):
                if getattr(wanted, name):
                    assert torch.equal(getattr(aux, name), getattr(expected_aux, name)), name


def test_rows_of_a_block_mask_and_pages_with_holes_have_the_same_bits() -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 1, 1, 208, D)
    query, lists = torch.randn(1, 2, 30, D), torch.rand(30, 13).argsort(-1)[:, :3].int()
    mask = BlockMask.from_kv_blocks(
        torch.full((1, 1, 30), 3, dtype=torch.int32),
        lists[None, None],
        BLOCK_SIZE=(1, 16),
        seq_lengths=(30, 208),
    )
    whole = attention(query, Dense(key, value), mask=mask, q_start=100)
    pages = [x[0, 0].unflatten(0, (-1, 16)).unsqueeze(1) for x in (key, value)]
    for row in range(0, 30, 7):
        table = torch.full((1, 13), -1, dtype=torch.int32)
        table[0, lists[row].long()] = lists[row]
        memory = Paged(*pages, table, [208])
        out = attention(query[:, :, row : row + 1], memory, q_start=100 + row)
        assert torch.equal(out, whole[:, :, row : row + 1])


@pytest.mark.parametrize("q_len", [1, 9])
def test_neither_the_batch_nor_threads_change_a_bit(q_len: int) -> None:
    pages, query = memory(), torch.randn(4, HQ, q_len, D)
    options: dict[str, Any] = {"mask": causal}
    whole = attention(query, pages, **options)
    torch.set_num_threads(1)
    assert torch.equal(attention(query, pages, **options), whole)
    for b, length in enumerate(LENGTHS):
        one = replace(pages, page_table=pages.page_table[b : b + 1], lengths=[length])
        assert torch.equal(attention(query[b : b + 1], one, **options), whole[b : b + 1])


def test_holes_at_the_ends_are_released_pages_and_shorter_sequences() -> None:
    pages, query = memory(), torch.randn(1, HQ, 1, D)
    row = pages.page_table[2:3].clone()
    row[0, :2] = row[0, 4] = -1
    found = attention(query, Paged(pages.key, pages.value, row, [70]), mask=causal)
    released = Paged(pages.key, pages.value, pages.page_table[2:3], [64], first_page=[2])
    assert torch.equal(found, attention(query, released, mask=causal, q_start=69))


def test_long_sequences_that_choose_the_same_pages() -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 160, HKV, PAGE, D)
    table = torch.arange(160).expand(3, -1).clone().int()
    table[:, 1::8] = -1  # 2,240 keys are left: two whole pieces, which are read once for all
    table[2, 150] = -1
    query, lengths = torch.randn(3, HQ, 1, D), [2560, 2550, 2560]
    whole = attention(query, Paged(key, value, table, lengths), mask=causal)
    for b in range(3):
        one = Paged(key, value, table[b : b + 1], lengths[b : b + 1])
        assert torch.equal(attention(query[b : b + 1], one, mask=causal), whole[b : b + 1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_len", [2, 9])
def test_gradients(q_len: int, backend: Backend) -> None:
    pages = memory()
    query = torch.randn(4, HQ, q_len, D, requires_grad=True)
    learned = replace(pages, key=pages.key.requires_grad_(), value=pages.value.requires_grad_())
    above = torch.randn(4, HQ, q_len, D)
    options: dict[str, Any] = {"score_mod": slanted, "mask": causal, "backend": backend}
    operands = (query, learned.key, learned.value)
    found = torch.autograd.grad(attention(query, learned, **options), operands, above)
    by_dtype = {}
    for dtype in (torch.float64, torch.float32):
        outs = [expected(query, learned, b, dtype).out for b in range(4)]
        by_dtype[dtype] = torch.autograd.grad(torch.cat(outs), operands, above.to(dtype))
    for name, grad, peer, truth in zip(
        ("query", "key", "value"),
        found,
        by_dtype[torch.float32],
        by_dtype[torch.float64],
        strict=True,
    ):
        assert_as_good_as(grad, peer, truth.double(), name, size=8.0)


@pytest.mark.parametrize("mask", [None, causal])
def test_holes_may_change_from_step_to_step(mask: Any) -> None:
    """A step with other holes, more of them or none finds the plan of an earlier one."""
    pages, query = memory(), torch.randn(4, HQ, 1, D)
    key, value = pages.key.nan_to_num(), pages.value.nan_to_num()
    row = torch.arange(48, dtype=torch.int32).view(4, 12)
    for holes in ([], [5], [1, 2, 3, 4, 5, 6, 7, 8], [0, 11], [2, 4, 6, 8, 10], []):
        table = row.clone()
        table[:3, holes] = -1
        found = attention(query, Paged(key, value, table, torch.full((4,), 192)), mask=mask)
        for b in range(4):
            there = table[b, table[b] >= 0][None]
            alone = Paged(key, value, there, torch.tensor([there.shape[1] * PAGE]))
            wanted = attention(query[b : b + 1], alone)
            torch.testing.assert_close(found[b : b + 1], wanted)


def test_holes_get_a_page_of_their_sequence() -> None:
    table = torch.tensor([[4, -1, 7, 2, -1], [1, 2, 3, -1, 5], [-1, 6, 8, -1, -1]]).int()
    ends = torch.tensor([64, 48, 80]).numpy()
    filled = fill(table, 0 * ends, ends, 16)
    assert filled.table[0, :4].tolist() == [4, 4, 7, 2] and filled.ends.tolist() == [64, 48, 48]
    assert filled.begins.tolist() == [0, 0, 16]
    assert filled.holes is not None
    assert filled.holes.there[0].tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("some", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_tables_with_any_holes(some: float) -> None:
    page, most = 16, 7
    for seed in range(40):
        random = np.random.default_rng(seed)
        table = np.where(random.random((5, most)) < some, -1, random.integers(0, 99, (5, most)))
        ends = random.integers(0, most * page + 1, 5)
        begins = np.minimum(random.integers(0, most, 5) * page, ends)
        filled = fill(torch.from_numpy(table.astype(np.int32)), begins, ends, page)
        for b, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            used = range(begin // page, -(-end // page))
            there = [at for at in used if table[b, at] >= 0]
            if not there:
                assert filled.begins[b] == filled.ends[b]
                continue
            assert filled.begins[b] == max(begin, there[0] * page)
            assert filled.ends[b] == min(end, (there[-1] + 1) * page)
            found = filled.table[b, there[0] : there[-1] + 1].tolist()
            assert all(number in table[b, there] for number in found)
            assert [found[at - there[0]] for at in there] == table[b, there].tolist()
            if filled.holes is not None:
                assert np.flatnonzero(filled.holes.there[b]).tolist() == there
                own = filled.holes.pages[filled.holes.pages // most == b]
                assert (own % most).tolist() == there
            else:
                assert len(found) == len(there)


def test_the_work_of_a_launch_is_that_of_the_pages_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a launch that takes long can be stopped, which takes a thread."""
    key, value = torch.randn(2, 4, 1, 64, 16)
    table = torch.full((1, 1024), -1).int()
    table[0, ::256] = torch.arange(4).int()
    query, stoppable = torch.randn(1, 1, 1, 16), list[object]()
    monkeypatch.setattr(launch, "LONG_WORK", 4096 * 16)
    monkeypatch.setattr(launch, "launch_stoppable", lambda *args: stoppable.append(args))
    found = attention(query, Paged(key, value, table, [1024 * 64]), backend="jit")
    assert not stoppable
    alone = Paged(key, value, torch.arange(4).int()[None], [256])
    torch.testing.assert_close(found, attention(query, alone))
