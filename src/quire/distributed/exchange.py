"""Pages of keys or values, sent to the ranks whose queries read them; and their gradients back.

Sending is a linear map, and its transpose is the way back: a rank receives the gradients of all
copies of its pages and adds them, those of rank 0 first. So sums do not depend on what arrives
first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.distributed.context_plan import ContextPlan
from quire.results import working_dtype


def spread(rows: Tensor, plan: ContextPlan) -> Tensor:
    """Return own, received and zero pages [pages, block, H, D], from own rows [B, H, tokens, D].

    The pages are those of `plan.route(B)`. Gradients of pages travel back to their owners.
    """
    pages: Tensor = _Spread.apply(rows, plan)  # type: ignore[no-untyped-call]
    return pages


class _Spread(torch.autograd.Function):
    """Sends pages to the ranks that read them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: ContextPlan) -> Tensor:
        ctx.plan, ctx.shape = plan, rows.shape
        route = plan.route(len(rows))
        _, heads, _, width = rows.shape
        pages = rows.new_empty((route.zeros + 1, plan.block, heads, width))
        own, arriving = pages[: route.num_own], pages[route.num_own : route.zeros]
        fill_own(own, rows)
        pages[-1] = 0
        leaving = own.index_select(0, torch.from_numpy(route.sent))
        plan.group.exchange(leaving, arriving, route.num_sent, route.num_received)
        return pages

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Collected.apply(grad, ctx.plan, ctx.shape), None  # type: ignore[no-untyped-call]


class _Collected(torch.autograd.Function):
    """Sends the gradients of pages back to their owners, which add them."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, plan: ContextPlan, shape: torch.Size) -> Tensor:
        ctx.plan = plan
        batch, heads, count, width = shape
        route, rank = plan.route(batch), plan.rank
        returned = grad.new_empty((len(route.sent), *grad.shape[1:]))
        received = grad[route.num_own : route.zeros].contiguous()
        plan.group.exchange(received, returned, route.num_received, route.num_sent)
        sums = torch.zeros_like(grad[: route.num_own], dtype=working_dtype(grad.dtype))
        where = torch.from_numpy(route.sent).split(route.num_sent.tolist())
        parts = returned.split(route.num_sent.tolist())
        for other, (at, part) in enumerate(zip(where, parts, strict=True)):
            if other == rank:
                sums += grad[: route.num_own]
            else:
                sums.index_add_(0, at, part.to(sums.dtype))
        rows = sums.to(grad.dtype).view(batch, -1, heads, width)
        return rows[:, :count].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return spread(grad, ctx.plan), None, None


def fill_own(pages: Tensor, rows: Tensor) -> None:
    """Write rows [B, H, tokens, D] into pages [B * pages, block, H, D], and 0 behind the last."""
    batch, heads, count, width = rows.shape
    lines = pages.view(batch, len(pages) * pages.shape[1] // max(1, batch), heads, width)
    lines[:, :count] = rows.transpose(1, 2)
    lines[:, count:] = 0
