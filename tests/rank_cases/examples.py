"""Calls that tests of `quire.distributed` compute over ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import AuxRequest, Dense
from quire.distributed import ContextPlan, attention, plan
from quire.mods import causal, document, sliding_window

DTYPES = {x: getattr(torch, x) for x in ("float32", "bfloat16", "float16", "float64")}


def allowed_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Blocks of 24 tokens, chosen at random."""
    return RANDOM[q_idx // 24, kv_idx // 24]


def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40 + 100 * b)


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 16 + 64 * h


def never(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx < 0


def untraceable(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.special.bessel_j0(q_idx.float()) > torch.special.bessel_j0(kv_idx.float())


RANDOM = torch.rand(100, 100, generator=torch.Generator().manual_seed(3)) < 0.15

TEXTS = document(lengths=[300, 20, 500, 180, 400, 7000])

MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "window": sliding_window(100),
    "causal documents": causal & TEXTS,
    "documents": TEXTS,
    "random": allowed_blocks,
    "by batch": by_batch,
    "by head": by_head,
    "never": never,
}

SLOPES = torch.tensor([0.01, 0.02, 0.04, 0.08])

TABLE = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))


def slopes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * (q_idx - kv_idx)


def table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[b, kv_idx % 32]


SCORES = {"": None, "slopes": slopes, "table": table}


@dataclass(frozen=True)
class Example:
    """One call."""

    mask: str = "causal"
    length: int = 333
    layout: str = "auto"
    block_size: int | None = None
    dtype: str = "float32"
    heads: tuple[int, int] = (4, 2)
    width: tuple[int, int] = (16, 16)
    batch: int = 2
    score: str = ""
    sink: bool = False
    dropout_p: float = 0.0
    same_bits: bool | None = None
    method: str = "auto"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the whole query, key and value."""
        (heads, key_heads), (width, value_width) = self.heads, self.width
        shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
        dtype = DTYPES[self.dtype]
        torch.manual_seed(0)  # ranks have drawn different numbers before
        q, k, v = (torch.randn(self.batch, h, self.length, w).to(dtype) for h, w in shapes)
        return q, k, v

    def plan(self, group: object) -> ContextPlan:
        return plan(
            MASKS[self.mask],
            length=self.length,
            mesh=group,  # type: ignore[arg-type]
            layout=self.layout,
            block_size=self.block_size,
            batch=self.batch if self.mask == "by batch" else None,
            heads=self.heads[0] if self.mask == "by head" else None,
            same_bits=self.same_bits,
            method=self.method,  # type: ignore[arg-type]
        )

    @property
    def options(self) -> dict[str, Any]:
        sink = torch.linspace(-1, 1, self.heads[0]) if self.sink else None
        return {"score_mod": SCORES[self.score], "sink": sink, "dropout_p": self.dropout_p}

    def alone(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        """Return what one process computes."""
        torch.manual_seed(1)
        return quire.attention(q, Dense(k, v), mask=MASKS[self.mask], **self.options, **more)

    def together(self, divided: ContextPlan, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        """Return what this rank computes of its shards."""
        torch.manual_seed(1 + divided.rank)  # the seed of rank 0 counts
        return attention(q, Dense(k, v), plan=divided, **self.options, **more)


SOON = timedelta(seconds=3)

EVERYTHING = AuxRequest(lse=True, max_scores=True, argmax=True, entropy=True)


def as_call(shards: tuple[Tensor, ...]) -> tuple[Tensor, Dense]:
    q, k, v = shards
    return q, Dense(k, v)


def assert_as_good_as_alone(group: object, example: Example, **options: Any) -> None:
    """Results and gradients over ranks are as good as those of one process."""
    whole, divided = example.tensors(), example.plan(group)
    wanted = AuxRequest(lse=True, max_scores=True)
    above = example.alone(*whole).cos()
    found: list[list[Tensor]] = []
    for dtype in (None, torch.float64):
        tensors = [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in whole]
        out, aux = example.alone(*tensors, return_aux=wanted)
        out.backward(above.to(out.dtype))
        grads = [x.grad for x in tensors if x.grad is not None]
        found.append([out.detach(), aux.lse.detach(), *grads])
    own = [x.clone().requires_grad_() for x in divided.shard(*whole, dim=2)]
    out, aux = example.together(divided, *own, return_aux=wanted, **options)
    out.backward(divided.shard(above, dim=2)[0])
    mine = [out, aux.lse, *(x.grad for x in own)]
    for x, peer, truth in zip(mine, *found, strict=True):
        assert_as_good_as(divided.gather(x, dim=2), peer, truth, f"{example}", size=8.0)
    assert aux.max_scores is not None and not aux.max_scores.requires_grad
