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


def spread(plan: ContextPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return own, received and zero pages [pages, block, H, D], from own rows [B, H, tokens, D].

    The pages are those of `plan.route(B)`. Gradients of pages travel back to their owners. Tensors
    are sent in their order, there and back, so that all ranks send the same at the same time.
    """
    pages: tuple[Tensor, ...] = _Spread.apply(plan, *tensors)  # type: ignore[no-untyped-call]
    return pages


class _Spread(torch.autograd.Function):
    """Sends pages to the ranks that read them."""

    @staticmethod
    def forward(ctx: Any, plan: ContextPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.shapes = plan, [rows.shape for rows in tensors]
        return tuple(_sent(plan, rows) for rows in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = _Returned.apply(ctx.plan, ctx.shapes, *grads)  # type: ignore[no-untyped-call]
        return (None, *rows)


class _Returned(torch.autograd.Function):
    """Sends the gradients of pages back to their owners, which add them."""

    @staticmethod
    def forward(
        ctx: Any, plan: ContextPlan, shapes: list[torch.Size], *grads: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan = plan
        both = zip(grads, shapes, strict=True)
        return tuple(_returned(plan, grad, shape) for grad, shape in both)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *spread(ctx.plan, *grads))


def _sent(plan: ContextPlan, rows: Tensor) -> Tensor:
    """Send own pages to the ranks that read them, and return all pages of this rank."""
    batch, heads, _, width = rows.shape
    route = plan.route(batch)
    pages = rows.new_empty((route.zeros + 1, plan.block, heads, width))
    own, arriving = pages[: route.num_own], pages[route.num_own : route.zeros]
    fill_own(own, rows)
    pages[-1] = 0
    leaving = own.index_select(0, torch.from_numpy(route.sent))
    plan.group.exchange(leaving, arriving, route.num_sent, route.num_received)
    return pages


def _returned(plan: ContextPlan, grad: Tensor, shape: torch.Size) -> Tensor:
    """Send gradients of received pages back, and return the sums of those of own rows."""
    batch, heads, count, width = shape
    route = plan.route(batch)
    leaving = grad[route.num_own : route.zeros]
    arriving = grad.new_empty((len(route.sent), *grad.shape[1:]))
    plan.group.exchange(leaving.contiguous(), arriving, route.num_received, route.num_sent)
    sums = torch.zeros_like(grad[: route.num_own], dtype=working_dtype(grad.dtype))
    places = torch.from_numpy(route.sent).split(route.num_sent.tolist())
    parts = arriving.split(route.num_sent.tolist())
    for rank, (at, part) in enumerate(zip(places, parts, strict=True)):
        if rank == plan.rank:
            sums += grad[: route.num_own]
        else:
            sums.index_add_(0, at, part.to(sums.dtype))
    rows = sums.to(grad.dtype).view(batch, len(route.own) * plan.block, heads, width)
    return rows[:, :count].transpose(1, 2)


def fill_own(pages: Tensor, rows: Tensor) -> None:
    """Write rows [B, H, tokens, D] into pages [B * pages, block, H, D], and 0 behind the last."""
    batch, heads, count, width = rows.shape
    lines = pages.view(batch, len(pages) * pages.shape[1] // max(1, batch), heads, width)
    lines[:, :count] = rows.transpose(1, 2)
    lines[:, count:] = 0
