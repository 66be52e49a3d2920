"""Pages of keys or values, sent to the ranks whose queries read them; and their gradients back.

Sending is a linear map, and its transpose is the way back: a rank receives the gradients of all
copies of its pages and adds them, those of rank 0 first. So sums do not depend on what arrives
first. `add_slices` adds in the order of one process: slice by slice of the queries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.distributed.context_plan import ContextPlan
from quire.distributed.reads import Numbers
from quire.distributed.routes import SliceRoute
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


def return_rows(
    plan: ContextPlan, shapes: list[torch.Size], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Send gradients of pages back; return those of own rows, which have these shapes."""
    given = [(x, shape) for x, shape in zip(grads, shapes, strict=True) if x is not None]
    pages, sizes = [x for x, _ in given], [shape for _, shape in given]
    found = iter(_Returned.apply(plan, sizes, *pages))  # type: ignore[no-untyped-call]
    return tuple(None if x is None else next(found) for x in grads)


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


def send(plan: ContextPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return what `spread` returns, without autograd."""
    with torch.no_grad():
        return tuple(_sent(plan, rows.detach()) for rows in tensors)


def add_slices(plan: ContextPlan, route: SliceRoute, sums: Tensor, columns: Numbers) -> Tensor:
    """Return the gradients of own rows [B, H, tokens, D], from the sums of the slices of all ranks.

    `sums` [slices, B, H, keys, D] are those of the own slices, for the keys that this rank has
    side by side; the block b of the sequence begins at key `columns[b] * block` of them.
    """
    _, batch, heads, _, width = sums.shape

    def pages(places: Numbers | int, entries: Numbers, blocks: Numbers) -> Tensor:
        rows = torch.from_numpy(columns[blocks] * plan.block).unsqueeze(1)
        rows = (rows + torch.arange(plan.block)).clamp(max=max(0, sums.shape[3] - 1))
        at = (torch.as_tensor(x).unsqueeze(-1) for x in (places, entries))
        place, entry = at
        return sums[place, entry, :, rows]  # past the last key it is repeated, and cut off later

    leaving = pages(*route.leaving.T)
    arriving = leaving.new_empty((int(route.num_received.sum()), plan.block, heads, width))
    plan.group.exchange(leaving, arriving, route.num_sent, route.num_received)
    own = plan.route(batch).own
    total = sums.new_zeros((batch * len(own), plan.block, heads, width))
    for slice, first, entries, blocks, at in route.additions:
        if slice >= 0:
            part = pages(np.full_like(entries, slice), entries, blocks)
        else:
            part = arriving[first : first + len(at)]
        total.index_add_(0, torch.from_numpy(at), part)
    rows = total.view(batch, len(own) * plan.block, heads, width)
    return rows[:, : len(plan.positions)].transpose(1, 2)


def add_captured(plan: ContextPlan, route: SliceRoute, sums: Tensor) -> Tensor:
    """Return on rank 0 the sum over all slices of all ranks, in their order, and zeros elsewhere.

    `sums` [slices, ...] are those of the own slices. However ranks then add up their gradients,
    the total has the bits of one process.
    """
    counts = np.bincount(plan.of_slices, minlength=plan.num_ranks)
    nothing, is_first = np.zeros_like(counts), plan.rank == 0
    num_sent, num_received = nothing.copy(), counts.copy() if is_first else nothing
    if is_first:
        num_received[0] = 0
    else:
        num_sent[0] = len(route.slices)
    leaving = sums.contiguous()[: num_sent[0]]
    arriving = sums.new_empty((int(num_received.sum()), *sums.shape[1:]))
    plan.group.exchange(leaving, arriving, num_sent, num_received)
    total = sums.new_zeros(sums.shape[1:])
    if is_first:
        every = torch.cat([sums, arriving])
        order = np.argsort(np.argsort(plan.of_slices, kind="stable"), kind="stable")
        for place in order.tolist():
            total += every[place]
    return total


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
