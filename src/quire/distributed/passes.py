"""Forward and backward passes over ranks, for autograd: what `autograd.recorded` asks a plan for.

Operands are this rank's shards. A pass sends keys to the ranks whose queries read them, computes
the own queries over blocks that are gathered side by side, and in the backward pass sends gradients
of keys back. Received keys are kept from the forward pass for the backward pass.
"""

from __future__ import annotations

from torch import Tensor

from quire.autograd.folding import Change
from quire.autograd.steps import Passes
from quire.distributed.context_plan import ContextPlan
from quire.distributed.exchange import (
    add_captured,
    add_slices,
    return_rows,
    send,
    spread,
)
from quire.distributed.local import LocalCall, SideBySide
from quire.distributed.routes import SliceRoute
from quire.errors import OptionError
from quire.memory import Placed
from quire.request import Call, Problem, Request
from quire.results import Above, Gradients, Moved, Result, Tangents, Wanted


class Reverse:
    """The passes of one call on this rank, which can be differentiated in reverse mode alone."""

    def __init__(self, plan: ContextPlan, wanted: Request, problem: Problem) -> None:
        self.plan, self.wanted, self.problem = plan, wanted, problem

    def tangent(
        self,
        placed: Placed,
        captures: tuple[Tensor, ...],
        above: Above,
        along: Tangents,
        *,
        in_torch: bool = False,
    ) -> Result:
        """Raise: forward mode is not computed over ranks."""
        raise unknown("forward mode")

    def moved(self, call: Call, along: Tangents) -> Moved | None:
        """Raise: forward mode is not computed over ranks."""
        raise unknown("forward mode")

    def changed(self, change: Change) -> Passes:
        """Raise: calls are not mapped over ranks."""
        raise unknown("torch.vmap")


def unknown(what: str) -> OptionError:
    """Return the error for a derivative that is not computed over ranks."""
    return OptionError(
        f"attention over ranks must be differentiated once, in reverse mode, but {what} is asked "
        f"for. Call quire.attention in one process for it."
    )


class PagePasses(Reverse):
    """Each rank receives the keys that its queries read, and computes its queries in one call."""

    def __init__(self, plan: ContextPlan, wanted: Request, problem: Problem) -> None:
        super().__init__(plan, wanted, problem)
        self._side: SideBySide | None = None
        self._local: LocalCall | None = None
        self._keys: tuple[Tensor, ...] = ()

    def forward(self, call: Call) -> Result:
        """Return the results of this rank's queries, `out` in the working dtype, and lse."""
        query, key, value = call.placed[:3]
        pages = send(self.plan, key, value)
        side = SideBySide.of(self.plan, len(query))
        request = self.wanted._replace(sink=call.request.sink, learns=True)
        made, local = side.call(request, query, *pages)
        self._side, self._local = side, LocalCall.of(made, local, call)
        self._keys = local.placed[1:3]
        return side.with_positions(made.forward(local))

    def backward(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool = False
    ) -> Gradients:
        """Return the gradients of the shards; those of captured tensors as `attention` says."""
        assert self._local is not None and self._side is not None, "forward comes first"
        plan, side, local, keys = self.plan, self._side, self._local, self._keys
        if in_torch:
            keys = tuple(side.gathered(x) for x in spread(plan, placed.key, placed.value))
        here, mine = local.placed.on(placed.query, *keys), local.wanted(wanted)
        route = plan.slice_route(side.batch)
        if route is not None and not in_torch:
            found = local.plan.gradients_of_slices(here, mine, above, plan.slice_size)
            told = plan.group.agree({"note": found is not None})
            if found is not None and all(told):
                return self._of_slices(found, route, local.captured(found, wanted))
        found = local.plan.backward(here, mine, above, in_torch=in_torch)
        pages = (None if x is None else side.scattered(x) for x in (found.key, found.value))
        shapes = [placed.key.shape, placed.value.shape]
        key, value = return_rows(plan, shapes, *pages)
        captures = tuple(local.captured(found, wanted))
        return found._replace(key=key, value=value, captures=captures)

    def _of_slices(
        self, found: Gradients, route: SliceRoute, captured: list[Tensor | None]
    ) -> Gradients:
        """Add up the sums of all slices of all ranks, in the order of one process."""
        assert self._side is not None
        plan, columns = self.plan, self._side.columns
        key, value = (
            None if x is None else add_slices(plan, route, x, columns)
            for x in (found.key, found.value)
        )
        captures = [
            None if x is None else add_captured(plan, route, _of_each(x, len(route.slices)))
            for x in captured
        ]
        delta, lse = found.delta, found.lse
        assert delta is not None and lse is not None
        sink = self.wanted.sink
        if sink is not None and sink.requires_grad:  # rank 0 computes its gradient from all rows
            delta, lse = (plan.gather(x, dim=2) for x in (delta, lse))
            if plan.rank:
                delta, lse = delta[:, :, :0], lse[:, :, :0]
        return Gradients(found.query, key, value, tuple(captures), delta=delta, lse=lse)


def _of_each(sums: Tensor, count: int) -> Tensor:
    """Return sums [slices, ...]; a tensor that no slice adds to has one for all, which is 0."""
    return sums if len(sums) == count else sums[:1].expand(count, *sums.shape[1:])
