"""Attention with vectors in mods: compiled, with the same bits everywhere, also in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import Dense, Paged, Ragged, attention, create_block_mask, flex_attention, reference
from quire.errors import CapturedIndexError

POINTS = torch.randn(2, 80, 3, generator=torch.Generator().manual_seed(5))


def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - (POINTS[0, q_idx] - POINTS[0, kv_idx]).norm()


def sphere(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (POINTS[0, q_idx] - POINTS[0, kv_idx]).pow(2).sum(-1) < 1.5


def operands(q_len: int = 80) -> list[Tensor]:
    return [torch.randn(1, 4, length, 16) for length in (q_len, 80, 80)]


@pytest.mark.parametrize("q_len", [1, 3, 80])
def test_it_is_the_reference_without_a_warning(q_len: int) -> None:
    tensors = operands(q_len)
    found = flex_attention(*tensors, score_mod=near, mask_mod=sphere, backend="jit")
    wanted = reference.attention(*tensors, score_mod=near, mask_mod=sphere).out
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_eager_computes_the_same() -> None:
    tensors = operands()
    compiled, eager = (
        flex_attention(*tensors, score_mod=near, mask_mod=sphere, backend=backend)
        for backend in ("jit", "eager")
    )
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_the_same_bits_in_every_memory() -> None:
    query, key, value = operands()
    options: dict[str, Any] = {"score_mod": near, "mask": sphere}
    dense = attention(query, Dense(key, value), **options)
    rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    offsets = torch.tensor([0, 80])
    ragged = attention(rows[0], Ragged(*rows[1:], offsets), q_offsets=offsets, **options)
    assert torch.equal(ragged.transpose(0, 1), dense[0])
    pages = [x[0].unflatten(1, (5, 16)).transpose(0, 1).contiguous() for x in (key, value)]
    table, lengths = torch.arange(5)[None], torch.tensor([80])
    paged = attention(query, Paged(*pages, table, lengths), **options)
    assert torch.equal(paged, dense)


def test_a_mask_of_vectors_has_blocks() -> None:
    blocks = create_block_mask(sphere, 1, 1, 80, 80, device="cpu", BLOCK_SIZE=16)
    tensors = operands()
    assert torch.equal(
        flex_attention(*tensors, block_mask=blocks), flex_attention(*tensors, mask_mod=sphere)
    )


def test_near_points_that_are_neighbours_bound_a_mask() -> None:
    line = torch.arange(1024)[:, None].expand(-1, 3).float()

    def close(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (line[q_idx] - line[kv_idx]).norm() < 50

    query = torch.randn(1, 1, 1024, 8)
    said = quire.explain(query, query, query, mask_mod=close)
    (share,) = (
        float(line.split("(")[1].split(" %")[0]) for line in said.splitlines() if "%" in line
    )
    assert share < 30


@pytest.mark.parametrize("last", [0, 2])
def test_an_index_outside_of_a_row_is_refused(last: int) -> None:
    points = torch.randn(79, 3)
    tensors = operands()
    with pytest.raises(CapturedIndexError, match="index 79 is out of bounds for dimension 0"):
        flex_attention(*tensors, score_mod=lambda s, b, h, q, k: s + points[k, last:].sum())
    with pytest.raises(CapturedIndexError, match="index 79 is out of bounds for dimension 0"):
        flex_attention(*tensors, score_mod=lambda s, b, h, q, k: s + points[q, last:].sum())


def test_an_index_that_a_mask_hides_may_be_outside() -> None:
    points, tensors = torch.randn(79, 3), operands()

    def inside(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 79

    options: dict[str, Any] = {"mask_mod": inside}
    options["score_mod"] = lambda s, b, h, q, k: s + points[k].sum()
    found = flex_attention(*tensors, **options)
    wanted = reference.attention(
        *(x[:, :, :n] for x, n in zip(tensors, (80, 79, 79), strict=True)),
        score_mod=options["score_mod"],
    ).out
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_row_of_more_than_64_numbers_runs_with_a_warning() -> None:
    wide = torch.randn(80, 65) / 65
    tensors = operands()
    with pytest.warns(
        UserWarning, match=r"vectors of up to 64, but a captured tensor of .* \[65\]"
    ):
        found = flex_attention(*tensors, score_mod=lambda s, b, h, q, k: s + wide[q] @ wide[k])
    table = wide @ wide.T
    wanted = flex_attention(*tensors, score_mod=lambda s, b, h, q, k: s + table[q, k])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_graph_of_pytorch_holds_vectors() -> None:
    points = POINTS.clone().requires_grad_()

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            x, y, _ = apart = points[b, q_idx] - points[b, kv_idx]
            return score - apart.norm() + torch.stack([x, y]).amax() * apart[1:].sum()

        return attention(query, Dense(key, value), score_mod=bias)

    tensors, graph = operands(), torch.compile(model, backend="aot_eager", fullgraph=True)
    found, wanted = graph(*tensors), model(*tensors)
    assert torch.equal(found, wanted)
    gradients = [torch.autograd.grad(out.square().sum(), points)[0] for out in (found, wanted)]
    assert torch.equal(*gradients)
    torch._dynamo.reset()


def test_why_shows_every_number() -> None:
    said = str(quire.why(near, b=0, h=0, q_idx=3, kv_idx=5))
    assert "POINTS[0, q_idx, 2]" in said
    assert said.endswith(f"near = {-(POINTS[0, 3] - POINTS[0, 5]).norm().item():.6g}")


def test_many_numbers_take_little_code() -> None:
    wide = torch.randn(80, 64)
    llvm = quire.kernel(score_mod=lambda s, b, h, q, k: s + wide[q] @ wide[k]).stages["llvm"]
    assert len(llvm.splitlines()) < 6000
