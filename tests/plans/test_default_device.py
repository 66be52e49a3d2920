"""A call on CPU tensors gives the same bits, whatever torch's default device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import quire
from quire import AuxRequest, Paged, Ragged, attention, flex_attention
from quire.kv import PagedKVCache
from quire.mods import causal
from quire.runtime import pyramids

OPERANDS = torch.randn(3, 2, 4, 40, 8, generator=torch.Generator().manual_seed(0))
TABLE, LENGTHS = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.tensor([40, 25])
SLOPES, ROWS = torch.tensor([0.5, 0.25, 1.0, 0.0]), torch.arange(47) // 7
EVERY = AuxRequest(*5 * [True], weights=[0, -1])


def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - SLOPES[h] * (q_idx - kv_idx)


def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (ROWS[q_idx] >= ROWS[kv_idx]) & (SLOPES[h] * kv_idx < 30)


def untraced(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.lgamma(1.0 + q_idx) >= torch.lgamma(1.0 + kv_idx)


def learned(call: Callable[..., Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in OPERANDS]
        out = call(*leaves)
        return out, *torch.autograd.grad(out.sum(), leaves)

    return run


def paged(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    pages = (x.view(2, 4, 2, 20, 8).transpose(1, 2).flatten(0, 1) for x in (key, value))
    return attention(query, Paged(*pages, TABLE, LENGTHS), mask=causal, **options)


def ragged(*tensors: Tensor, **options: Any) -> Any:
    query, *memory = (x.transpose(1, 2).flatten(0, 1) for x in tensors)
    return attention(query, Ragged(*memory, torch.tensor([0, 33, 80], device="cpu")), **options)


def cached() -> Tensor:
    cache = PagedKVCache(layers=1, heads=4, head_dim=8, page_size=4, n_pages=20, prefix=True)
    one = cache.sequence(range(40))
    cache.append([one], *OPERANDS[1:, :1].transpose(2, 3))
    other = cache.fork(one)
    cache.append([one, other], *OPERANDS[1:, :, :, :1].permute(0, 3, 1, 2, 4))
    return attention(OPERANDS[0], cache.memory(0, [one, other]), mask=causal)


def blocks() -> list[Tensor]:
    masks = [
        quire.create_block_mask(mod, None, 4, 40, 40, device="cpu", BLOCK_SIZE=8)
        for mod in (same, untraced)
    ]
    some = masks[0][:, [3, 1]]
    listed = quire.BlockMask.from_kv_blocks(some.kv_num_blocks, some.kv_indices, BLOCK_SIZE=8)
    return [x for mask in (*masks, some, listed) for x in (mask.to_dense(), *mask.as_tuple()[2:4])]


def nested() -> Tensor:
    offsets = torch.tensor([0, 1, 4], device="cpu")
    x = torch.nested.nested_tensor_from_jagged(OPERANDS[0, 0], offsets)
    with quire.patch_torch():
        return F.scaled_dot_product_attention(*3 * [x.transpose(1, 2)], is_causal=True).values()


CALLS: dict[str, Callable[[], Any]] = {
    "dense": learned(lambda *x: flex_attention(*x, bias, mask_mod=same)),
    "lists of blocks": learned(
        lambda *x: flex_attention(
            *x, block_mask=quire.create_block_mask(same, 1, 4, 40, 40, "cpu", BLOCK_SIZE=8)
        )
    ),
    "eager": learned(lambda *x: flex_attention(*x, bias, mask_mod=same, backend="eager")),
    "ragged": learned(lambda *x: ragged(*x, score_mod=bias, mask=same)),
    "paged": learned(lambda *x: paged(*x, score_mod=bias)),
    "paged, eager": learned(lambda *x: paged(*x, score_mod=bias, backend="eager")),
    "probabilities": learned(lambda *x: paged(*x, prob_mod=lambda p, b, h, q, k: p**2)),
    "every result": lambda: flex_attention(*OPERANDS, bias, mask_mod=same, return_aux=EVERY)[1],
    "every paged result": lambda: paged(*OPERANDS, return_aux=EVERY)[1],
    "no weights": lambda: flex_attention(*OPERANDS, return_aux=AuxRequest(weights=[]))[1].weights,
    "mapped": lambda: torch.vmap(lambda x: flex_attention(*x, bias))(OPERANDS[None]),
    "forward mode": lambda: torch.func.jvp(
        lambda x: flex_attention(x, x, x, bias), (OPERANDS[0],), (OPERANDS[1],)
    ),
    "cache": cached,
    "block masks": blocks,
    "dense mask": lambda: quire.create_mask(bias, None, 4, 9, 9, device="cpu"),
    "empty mask": lambda: quire.create_mask(untraced, None, 4, 0, 9, device="cpu"),
    "nested": nested,
    "why": lambda: SLOPES * quire.why(bias, b=0, h=0, q_idx=3, kv_idx=1, score=1.0).value,
}


@pytest.mark.filterwarnings("ignore::quire.request.EagerModWarning")
@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_does_not_matter(name: str) -> None:
    pyramids._builder.cache_clear()
    with torch.device("meta"):
        found = CALLS[name]()
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (found, CALLS[name]())), strict=True)
    for one, other in pairs:
        assert one is other is None or torch.equal(one.cpu(), other)
