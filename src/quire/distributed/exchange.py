"""Pages of keys or values, sent to the ranks whose queries read them; and their gradients back.

Sending is a linear map, and its transpose is the way back: a rank receives the gradients of all
copies of its pages and adds them, those of rank 0 first. So sums do not depend on what arrives
first. `AddedSlices` adds in the order of one process, slice by slice of the queries: sums go from
rank to rank.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.distributed.context_plan import ContextPlan
from quire.distributed.group import Exchanged, Passing
from quire.distributed.reads import Numbers
from quire.distributed.routes import Addition, Hop
from quire.results import working_dtype
from quire.runtime.slices import Round


def spread(plan: ContextPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return own and received pages [pages, H, block, D], from own rows [B, H, tokens, D].

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
        return Sending(plan, *tensors).begin().wait()

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


class Sending:
    """What `spread` returns, without autograd, and before all of it is there.

    Own pages are there from the start, and so is memory for all others: an error of a rank in this
    is raised before others wait for its pages. These are on their way from `begin` to `wait`. If
    pages are `lent`, they are in memory of the plan, until they are given back.
    """

    def __init__(self, plan: ContextPlan, *tensors: Tensor, lent: bool = False) -> None:
        self._plan, self._lent, made = plan, [], []
        for rows in tensors:
            batch, heads, _, width = rows.shape
            shape = (plan.route(batch).num_pages, heads, plan.block, width)
            if lent:
                size = math.prod(shape) * rows.itemsize
                self._lent.append(plan.kept_pages.take(size))
                made.append(self._lent[-1][:size].view(rows.dtype).view(shape))
            else:
                made.append(rows.new_empty(shape))
        self.pages = tuple(made)
        with torch.no_grad():
            self._parts = [_parts(plan, x, rows) for x, rows in zip(made, tensors, strict=True)]
        self._passing = Passing()

    def begin(self) -> Sending:
        """Begin to send own pages to the ranks that read them, and to receive all others."""
        self._passing, self._parts = self._plan.group.exchange(*self._parts), []
        return self

    def wait(self) -> tuple[Tensor, ...]:
        """Return all pages, when they are there."""
        self._passing.wait()
        self._passing = Passing()
        return self.pages

    def give_back(self) -> None:
        """Let the next call use the memory of the pages."""
        for memory in self._lent:
            self._plan.kept_pages.give_back(memory)
        self._lent, self.pages = [], ()


class AddedSlices:
    """The gradients of own rows [B, H, tokens, D], from the sums of the slices of all ranks.

    Keys that this rank has lie side by side; the block b of the sequence begins at the row
    `columns[b] * block`.
    """

    def __init__(self, plan: ContextPlan, columns: Numbers, keys: dict[str, Tensor]) -> None:
        self._plan, self._starts = plan, columns * plan.block
        own = (plan.division.owner == plan.rank).nonzero()[0]
        self._own_starts = np.zeros(plan.num_blocks, np.int64)
        self._own_starts[own] = np.arange(len(own)) * plan.block
        self._rows = {
            name: x.new_zeros(
                (*x.shape[:2], len(own) * plan.block, x.shape[3]), dtype=working_dtype(x.dtype)
            )
            for name, x in keys.items()
        }

    def total(self, name: str) -> Tensor | None:
        """Return the sums over all slices; None if they were not wanted."""
        rows = self._rows.get(name)
        return None if rows is None else rows[:, :, : len(self._plan.rows)]

    def take(self, part: Round, sums: dict[str, Tensor]) -> None:
        """Add up the sums [slices, b, key heads, rows, D] of a round, over the slices of all ranks.

        Sums of keys and values travel together. Columns behind D are not used. Ranks agree first,
        since one may have had an error while it computed the round.
        """
        if not sums:
            return
        plan = self._plan
        plan.group.agree({"gradients": "of slices"})
        each = [x[..., : self._rows[name].shape[3]] for name, x in sums.items()]
        route = plan.slice_route(part.b, part.b_stop)
        totals = [torch.zeros_like(x[0]) for x in each]
        single = self._sent(route.slices, each)
        for number, turn in enumerate(route.turns):
            if number:
                for total, pages in zip(totals, self._sent(turn.hop, totals), strict=True):
                    _put(total, self._starts, turn.hop.arriving, pages)
            for total, slices, pages in zip(totals, each, single, strict=True):
                self._add(turn.additions, total, slices, pages)
        stays, arriving = route.stays, self._sent(route.home, totals)
        for name, total, pages in zip(sums, totals, arriving, strict=True):
            rows = self._rows[name][part.b : part.b_stop, part.h : part.h_stop]
            _put(rows, self._own_starts, stays, self._pages(total, stays))
            _put(rows, self._own_starts, route.home.arriving, pages)

    def _add(
        self, additions: tuple[Addition, ...], total: Tensor, slices: Tensor, pages: Tensor
    ) -> None:
        """Add own slices [slices, b, H, rows, D], and received ones in pages [n, block, H, D]."""
        for place, entry, first, end, page in additions:
            at = int(self._starts[first])
            rows = slice(at, at + (end - first) * self._plan.block)
            into = total[entry, :, rows]
            if place >= 0:
                into += slices[place, entry, :, rows]
            else:
                given = pages[page : page + end - first].flatten(0, 1).transpose(0, 1)
                into += given[:, : into.shape[1]]

    def _sent(self, hop: Hop, sums: list[Tensor]) -> list[Tensor]:
        """Send sums to the ranks that go on with them, and return what arrives."""
        leaving = torch.cat([self._pages(x, hop.leaving) for x in sums], -1)
        arriving = leaving.new_empty((len(hop.arriving), *leaving.shape[1:]))
        parts = leaving.split(hop.num_sent.tolist()), arriving.split(hop.num_received.tolist())
        self._plan.group.exchange(parts).wait()
        return [*arriving.split([x.shape[-1] for x in sums], -1)]

    def _pages(self, sums: Tensor, pages: Numbers) -> Tensor:
        """Return pages [n, block, H, D] of [b, H, rows, D], or of [slices, b, H, rows, D].

        Past the last row it repeats.
        """
        *first, blocks = pages.T
        at = tuple(torch.from_numpy(x).unsqueeze(1) for x in first)
        rows = torch.from_numpy(self._starts[blocks]).unsqueeze(1) + torch.arange(self._plan.block)
        rows.clamp_(max=max(0, sums.shape[-2] - 1))
        chosen: Tensor = sums.movedim(-3, -2)[(*at, rows)]
        return chosen


def _put(rows: Tensor, starts: Numbers, pages: Numbers, sums: Tensor) -> None:
    """Write pages [n, block, H, D] to rows [b, H, rows, D], where their blocks start."""
    for (entry, block), page in zip(pages.tolist(), sums, strict=True):
        into = rows[entry, :, starts[block] : starts[block] + len(page)]
        into.copy_(page.transpose(0, 1)[:, : into.shape[1]])


def add_captured(plan: ContextPlan, sums: Tensor) -> Tensor:
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
        num_sent[0] = counts[plan.rank]
    leaving = sums.contiguous()[: num_sent[0]]
    arriving = sums.new_empty((int(num_received.sum()), *sums.shape[1:]))
    parts = leaving.split(num_sent.tolist()), arriving.split(num_received.tolist())
    plan.group.exchange(parts).wait()
    total = sums.new_zeros(sums.shape[1:])
    if is_first:
        every = torch.cat([sums, arriving])
        order = np.argsort(np.argsort(plan.of_slices, kind="stable"), kind="stable")
        for place in order.tolist():
            total += every[place]
    return total


def _parts(plan: ContextPlan, pages: Tensor, rows: Tensor) -> Exchanged:
    """Fill own pages, and return those that leave to each rank, and the places of those that come.

    Pages that lie one after the other leave from where they are.
    """
    route = plan.route(len(rows))
    own, *arriving = pages.split([route.num_own, *route.num_received.tolist()])
    fill_own(plan, own, rows.detach())
    leaving = []
    for sent in np.split(route.sent, np.cumsum(route.num_sent)[:-1]):
        first = int(sent[0]) if len(sent) else 0
        in_a_row = np.array_equal(sent, np.arange(first, first + len(sent)))
        at = torch.from_numpy(sent).to(own.device)
        leaving.append(own[first : first + len(sent)] if in_a_row else own.index_select(0, at))
    return leaving, arriving


def _returned(plan: ContextPlan, grad: Tensor, shape: torch.Size) -> Tensor:
    """Send gradients of received pages back, and return the sums of those of own rows."""
    batch, _, count, _ = shape
    route = plan.route(batch)
    leaving = grad[route.num_own :].contiguous().split(route.num_received.tolist())
    arriving = grad.new_empty((len(route.sent), *grad.shape[1:]))
    parts = arriving.split(route.num_sent.tolist())
    plan.group.exchange((leaving, parts)).wait()
    sums = torch.zeros_like(grad[: route.num_own], dtype=working_dtype(grad.dtype))
    places = torch.from_numpy(route.sent).to(grad.device).split(route.num_sent.tolist())
    for rank, (at, part) in enumerate(zip(places, parts, strict=True)):
        if rank == plan.rank:
            sums += grad[: route.num_own]
        else:
            sums.index_add_(0, at, part.to(sums.dtype))
    whole = sums.to(grad.dtype).unflatten(0, (batch, len(route.own))).transpose(1, 2).flatten(2, 3)
    rows: Tensor = whole[:, :, :count] if plan.lines is None else whole[:, :, plan.lines]
    return rows


def fill_own(plan: ContextPlan, pages: Tensor, rows: Tensor) -> None:
    """Write rows [B, H, tokens, D] into pages [B * pages, H, block, D], and 0 where none is."""
    batch, _, count, _ = rows.shape
    blocks = pages.unflatten(0, (batch, len(pages) // max(1, batch))).transpose(1, 2)
    if plan.lines is not None:
        pages.zero_()
        blocks[:, :, plan.lines // plan.block, plan.lines % plan.block] = rows
        return
    whole, rest = divmod(count, plan.block)
    end = whole * plan.block
    blocks[:, :, :whole] = rows[:, :, :end].unflatten(2, (whole, plan.block))
    if rest:
        blocks[:, :, whole, :rest] = rows[:, :, end:]
        blocks[:, :, whole, rest:] = 0
