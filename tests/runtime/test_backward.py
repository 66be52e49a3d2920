"""The backward kernel: shares of work, and the same bits wherever rows live."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.backends.eager.backward import backward as eager_backward
from quire.ir.trace import trace
from quire.memory import Dense, Paged, Placed, Queries, Ragged, packed
from quire.request import Call, Problem, Request
from quire.results import Above, Gradients, Result, Wanted, folded
from quire.runtime import backward as runtime
from quire.runtime.backward import BackwardPlan
from quire.runtime.forward import ForwardPlan
from quire.runtime.slices import Slices

pytestmark = pytest.mark.every_width

HQ, HKV, D, DV = 4, 2, 24, 20


def problem(table: Tensor) -> Problem:
    """A bias by distance, which is not told apart by batch, head or block of queries."""

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[(q_idx - kv_idx) % 13]

    return Problem(
        scale=0.2,
        score_mod=trace(biased, "score", score_dtype=table.dtype),
        mask_mod=trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask"),
    )


def forward(placed: Placed, table: Tensor) -> Result:
    request = Request(placed.query, Dense(placed.key, placed.value), aux=AuxRequest(lse=True))
    it = problem(table)
    call = Call(request, placed, it, it.captures)
    found = ForwardPlan.of(call, learns=True).run(call)
    assert found is not None
    return found


def run(placed: Placed, table: Tensor, grad_out: Tensor) -> Gradients:
    """Forward and backward, all gradients wanted."""
    result = forward(placed, table)
    assert result.lse is not None
    above = Above(result.out, result.lse, grad_out, None)
    plan = BackwardPlan.of(problem(table), placed, None, (0,), Result(result.out, result.lse))
    found = plan.run(placed, (table,), Wanted.of(True, True, True, (table,)), above)
    assert found is not None
    return found


def dense_case(batch: int, q_len: int, kv_len: int) -> tuple[Placed, Tensor, Tensor]:
    query = torch.randn(batch, HQ, q_len, D)
    key, value = torch.randn(batch, HKV, kv_len, D), torch.randn(batch, HKV, kv_len, DV)
    table = torch.randn(13, requires_grad=True)
    memory = Dense(key, value).place(query, Queries(kv_len - q_len))
    return memory, table, torch.randn(batch, HQ, q_len, DV)


def test_slices_depend_on_the_queries_of_a_sequence_alone() -> None:
    lengths = [0, 1, 512, 513, 1100, 32_768, 32_769, 100_000]
    sizes, counts = (512, 512, 512, 512, 512, 512, 1024, 2048), (1, 1, 1, 2, 3, 64, 33, 49)
    assert Slices.of(lengths) == Slices(sizes, counts)


@pytest.mark.parametrize("batch", [1, 2])  # a share is one slice, or all slices
def test_slices_agree_with_torch(batch: int) -> None:
    memory, table, grad_out = dense_case(batch, 1100, 1100)
    found = run(memory, table, grad_out)
    result = forward(memory, table)
    assert result.lse is not None
    wanted = Wanted.of(True, True, True, (table,))
    above = Above(result.out, result.lse, grad_out, None)
    with torch.no_grad():
        expected = eager_backward(problem(table), memory, None, wanted, above)
    for mine, its in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.captures[0], expected.captures[0], rtol=1e-4, atol=1e-4)


def test_rounds_leave_no_share_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, table, grad_out = dense_case(3, 70, 90)
    expected = run(memory, table, grad_out)
    for limit in (13 * 4 * HKV, 0):  # a batch at a time; a head at a time
        monkeypatch.setattr(runtime, "LARGEST_SUMS", limit)
        found = run(memory, table, grad_out)
        for mine, its in zip(found[:3], expected[:3], strict=True):
            assert mine is not None and its is not None and torch.equal(mine, its)
        torch.testing.assert_close(found.captures[0], expected.captures[0])


def test_ragged_is_dense() -> None:
    lengths = [(7, 7), (0, 3), (130, 300), (1, 129), (0, 0), (64, 64), (1030, 1030)]
    table = torch.randn(13, requires_grad=True)
    parts = [
        (torch.randn(HQ, q, D), torch.randn(HKV, k, D), torch.randn(HKV, k, DV)) for q, k in lengths
    ]
    above = [torch.randn(HQ, q, DV) for q, _ in lengths]
    query, key, value = (torch.cat([p[i].transpose(0, 1) for p in parts]) for i in range(3))
    offsets = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0) for i in (0, 1)]
    memory = Ragged(key, value, offsets[1]).place(query, Queries(offsets=offsets[0]))
    found = run(memory, table, packed(torch.cat([x.transpose(0, 1) for x in above])))
    total = torch.zeros(13)
    for number, (q, k, v) in enumerate(parts):
        rows, columns = (slice(*offsets[i][number : number + 2].tolist()) for i in (0, 1))
        alone = Dense(k[None], v[None]).place(q[None], Queries(k.shape[1] - q.shape[1]))
        expected = run(alone, table, above[number][None])
        for mine, its, part in zip(found[:3], expected[:3], (rows, columns, columns), strict=True):
            assert mine is not None and its is not None
            assert torch.equal(mine[:, :, part], its), number
        assert expected.captures[0] is not None
        total += expected.captures[0]
    torch.testing.assert_close(found.captures[0], total, rtol=1e-4, atol=1e-4)


def test_paged_is_dense() -> None:
    page, lengths, q_len = 16, [40, 300, 129], 40
    table = torch.randn(13, requires_grad=True)
    query = torch.randn(len(lengths), HQ, q_len, D)
    keys, values = torch.randn(40, HKV, page, D), torch.randn(40, HKV, page, DV)
    pages = torch.randint(40, (3, 19))  # some belong to several sequences
    memory = Paged(keys, values, pages, torch.tensor(lengths))
    in_pages = memory.place(query, Queries())
    above = torch.randn(len(lengths), HQ, q_len, DV)
    found = run(in_pages, table, memory.as_placed(query, above))
    expected_key, expected_value = torch.zeros_like(keys), torch.zeros_like(values)
    for b, length in enumerate(lengths):
        places = torch.arange(length)
        rows = pages[b, places // page] * page + places % page
        key, value = (
            x.transpose(1, 2).flatten(0, 1)[rows].transpose(0, 1)[None] for x in (keys, values)
        )
        alone = Dense(key, value).place(query[b : b + 1], Queries(length - q_len))
        expected = run(alone, table, above[b : b + 1])
        assert found.query is not None and expected.query is not None
        assert torch.equal(memory.as_given(query, found.query)[b : b + 1], expected.query)
        for total, grad in ((expected_key, expected.key), (expected_value, expected.value)):
            assert grad is not None
            for row, one in zip(rows.tolist(), grad[0].unbind(1), strict=True):
                total[row // page, :, row % page] += one
    torch.testing.assert_close(found.key, expected_key, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.value, expected_value, rtol=1e-4, atol=1e-5)


def test_folding_adds_everything() -> None:
    for count in range(1, 9):
        parts = torch.randn(count, 3, dtype=torch.float64)
        expected = parts.sum(0)
        with torch.no_grad():
            torch.testing.assert_close(folded(parts), expected)
    assert torch.equal(folded(torch.zeros(0, 3)), torch.zeros(3))
