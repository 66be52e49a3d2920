"""Gradients over ragged memory: those of each sequence alone, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import Dense, Ragged, attention
from quire.mods import causal

pytestmark = pytest.mark.every_width

Q_LENGTHS = [7, 0, 130, 1, 4, 5, 300]
KV_LENGTHS = [7, 3, 300, 129, 40, 0, 300]
HQ, HKV, D, DV = 4, 2, 24, 20


def offsets(lengths: list[int], hole: int) -> tuple[Tensor, Tensor]:
    """With a hole after each sequence."""
    steps = torch.tensor([0, *(length + hole for length in lengths)])
    return steps.cumsum(0), torch.tensor(lengths)


def leaves(
    q_lengths: list[int], kv_lengths: list[int], hole: int, dtype: torch.dtype, heads: int = HKV
) -> list[Tensor]:
    torch.manual_seed(0)
    q_total, kv_total = (int(offsets(n, hole)[0][-1]) for n in (q_lengths, kv_lengths))
    shapes = ((q_total, 2 * heads, D), (kv_total, heads, D), (kv_total, heads, DV))
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    for tensor, lengths in zip(made, (q_lengths, kv_lengths, kv_lengths), strict=True):
        for first, length in zip(*offsets(lengths, hole), strict=False):
            tensor[first + length : first + length + hole] = math.nan
    return [tensor.requires_grad_() for tensor in made]


def gradients(out: Tensor, above: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, wanted, above)


@pytest.mark.parametrize("hole", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "kv_lengths", "heads"),
    [
        (Q_LENGTHS, KV_LENGTHS, HKV),
        ([2600, 5, 700, 1300], [40, 5, 70, 33], 1),  # shared out by 5, 1, 1 and 2
    ],
    ids=["short", "shared out"],
)
def test_the_bits_are_those_of_each_sequence_alone(
    q_lengths: list[int], kv_lengths: list[int], heads: int, dtype: torch.dtype, hole: int
) -> None:
    query, key, value = operands = leaves(q_lengths, kv_lengths, hole, dtype, heads)
    q_offsets, q_own = offsets(q_lengths, hole)
    kv_offsets, kv_own = offsets(kv_lengths, hole)
    memory = Ragged(key, value, kv_offsets, kv_own)
    out = attention(query, memory, q_offsets=q_offsets, q_lengths=q_own, mask=causal)
    above = torch.randn(out.shape).to(dtype)
    found = gradients(out, above, operands)
    rest = [torch.ones(len(x), dtype=torch.bool) for x in operands]
    for b in range(len(q_lengths)):
        rows = slice(int(q_offsets[b]), int(q_offsets[b] + q_own[b]))
        keys = slice(int(kv_offsets[b]), int(kv_offsets[b] + kv_own[b]))
        places = (rows, keys, keys)
        parts = [
            x.detach()[at].transpose(0, 1)[None] for x, at in zip(operands, places, strict=True)
        ]
        own = [part.requires_grad_() for part in parts]
        alone = attention(own[0], Dense(own[1], own[2]), mask=causal)
        expected = gradients(alone, above[rows].transpose(0, 1)[None], own)
        for name, grad, at, wanted, other in zip("qkv", found, places, expected, rest, strict=True):
            assert torch.equal(grad[at].transpose(0, 1), wanted[0]), (b, name)
            other[at] = False
    for grad, other in zip(found, rest, strict=True):
        assert bool((grad[other] == 0).all())


def test_a_sink_learns_nothing_from_holes() -> None:
    query, key, value = leaves([3, 2], [3, 4], 2, torch.float32)
    sink = torch.zeros(HQ, requires_grad=True)
    memory = Ragged(key, value, *offsets([3, 4], 2))
    q_offsets, q_lengths = offsets([3, 2], 2)
    out = attention(query, memory, q_offsets=q_offsets, q_lengths=q_lengths, sink=sink)
    (found,) = torch.autograd.grad(out.sum(), sink)
    eager = attention(
        *(query, memory), q_offsets=q_offsets, q_lengths=q_lengths, sink=sink, backend="eager"
    )
    torch.testing.assert_close(found, torch.autograd.grad(eager.sum(), sink)[0])


def small(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Any]:
    """Operands and a function of them, with something that a mod learns."""
    torch.manual_seed(0)
    operands = [torch.randn(9, 2, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    slopes = torch.rand(3, dtype=dtype, requires_grad=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return torch.tanh(score) * slopes[b]

        memory = Ragged(key, value, [0, 5, 5, 9], [4, 0, 4])
        return attention(query, memory, score_mod=mod, mask=causal)

    return [*operands, slopes], attend


def test_gradients_of_gradients() -> None:
    operands, attend = small()
    assert torch.autograd.gradcheck(attend, operands)
    assert torch.autograd.gradgradcheck(attend, operands)


def test_transforms() -> None:
    operands, attend = small()
    expected = torch.autograd.grad(attend(*operands).square().sum(), operands)
    detached = [x.detach() for x in operands]
    found = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=(0, 1, 2, 3))(*detached)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_number_that_is_not_finite_stays_in_its_sequence() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, 2, 4, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        value[2] = math.inf
    out = attention(query, Ragged(key, value, [0, 5, 9]), mask=causal)
    found = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(bool(grad[5:].isfinite().all()) for grad in found)
    assert not bool(found[0][:5].isfinite().all())
