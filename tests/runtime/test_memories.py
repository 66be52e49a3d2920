"""The same bits wherever rows live, however many threads, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.ir.trace import trace
from quire.memory import Dense, Paged, Placed, Queries, Ragged
from quire.request import Call, Problem, Request
from quire.runtime.forward import ForwardPlan

pytestmark = pytest.mark.every_width

HQ, HKV, D, DV = 4, 2, 24, 20
SLOPES = torch.linspace(0.1, 0.4, HQ)


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - SLOPES[h] * (q_idx - kv_idx)


def causal_alibi(dtype: torch.dtype) -> Problem:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Problem(
        scale=0.2,
        score_mod=trace(alibi, "score", score_dtype=wide),
        mask_mod=trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask"),
    )


def run(placed: Placed) -> tuple[Tensor, Tensor]:
    request = Request(placed.query, Dense(placed.key, placed.value), aux=AuxRequest(lse=True))
    it = causal_alibi(placed.query.dtype)
    call = Call(request, placed, it, it.captures)
    found = ForwardPlan.of(call, learns=False).run(call)
    assert found is not None and found.lse is not None
    return found.out, found.lse


def sequence(q_len: int, kv_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((HQ, q_len, D), (HKV, kv_len, D), (HKV, kv_len, DV))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def alone(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence as a dense batch of one."""
    out, lse = run(Dense(k[None], v[None]).place(q[None], Queries(k.shape[1] - q.shape[1])))
    return out[0], lse[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_ragged_is_dense(dtype: torch.dtype) -> None:
    lengths = [(7, 7), (0, 3), (130, 300), (1, 129), (0, 0), (64, 64), (257, 257)]
    parts = [sequence(*pair, dtype) for pair in lengths]
    q, k, v = (torch.cat([p[i].transpose(0, 1) for p in parts]) for i in range(3))
    offsets = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0) for i in (0, 1)]
    got, lse = run(Ragged(k, v, offsets[1]).place(q, Queries(offsets=offsets[0])))
    for part, start, stop in zip(parts, offsets[0], offsets[0][1:], strict=False):
        expected, expected_lse = alone(*part)
        assert torch.equal(got[0, :, start:stop], expected)
        assert torch.equal(lse[0, :, start:stop], expected_lse)


@pytest.mark.parametrize("page", [8, 16, 50, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_paged_is_dense(page: int, dtype: torch.dtype) -> None:
    q_len, lengths = 40, [40, 41, 300, 129]
    parts = [sequence(q_len, length, dtype) for length in lengths]
    needed = [-(-length // page) for length in lengths]
    ids = torch.randperm(sum(needed) + 3)
    keys = torch.full((len(ids), HKV, page, D), float("nan"), dtype=dtype)
    values = torch.full((len(ids), HKV, page, DV), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(needed)), 10**6)
    for b, ((_, k, v), count) in enumerate(zip(parts, needed, strict=True)):
        own, ids = ids[:count], ids[count:]
        table[b, :count] = own
        for number, at in zip(own, range(0, k.shape[1], page), strict=True):
            stop = min(at + page, k.shape[1])
            keys[number, :, : stop - at] = k[:, at:stop]
            values[number, :, : stop - at] = v[:, at:stop]
    memory = Paged(keys, values, table, torch.tensor(lengths))
    q = torch.stack([part[0] for part in parts])
    out, lse = run(memory.place(q, Queries()))
    for b, part in enumerate(parts):
        expected, expected_lse = alone(*part)
        assert torch.equal(memory.as_given(q, out)[b], expected)
        assert torch.equal(memory.as_given(q, lse)[b], expected_lse)


def test_threads_and_batches_do_not_matter() -> None:
    q, k, v = (
        torch.stack(x)
        for x in zip(*(sequence(300, 300, torch.float32) for _ in range(3)), strict=True)
    )
    results = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            results.append(run(Dense(k, v).place(q, Queries(0)))[0])
        finally:
            torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for b in range(3):
        assert torch.equal(results[0][b], alone(q[b], k[b], v[b])[0])
