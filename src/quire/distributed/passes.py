"""Forward and backward passes over ranks, for autograd: what `autograd.recorded` asks a plan for.

Operands are this rank's shards. A pass sends keys to the ranks whose queries read them, and
computes the own queries. The backward pass gathers blocks side by side, and sends gradients of keys
back. Received keys are kept from the forward pass for the backward pass.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.autograd.folding import Change
from quire.autograd.steps import Passes
from quire.distributed.context_plan import ContextPlan
from quire.distributed.exchange import AddedSlices, Sending, add_captured, return_rows, spread
from quire.distributed.group import RankGroup
from quire.distributed.local import LocalCall, SideBySide, compute_in_pages
from quire.errors import OptionError
from quire.memory import Placed
from quire.request import Call, Problem, Request
from quire.results import Above, Gradients, Moved, Result, Tangents, Wanted, working_dtype
from quire.runtime.slices import AtOnce, Taking

LARGEST_SUMS = 2**27
"""The most bytes for sums of slices, if those of one head of one sequence do not need more."""

_NO_KEYS = torch.empty(0, 0)


class Reverse:
    """The passes of one call on this rank, which can be differentiated in reverse mode alone."""

    def __init__(self, plan: ContextPlan, wanted: Request, problem: Problem) -> None:
        self.plan, self.wanted, self.problem = plan, wanted, problem

    def backward(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool = False
    ) -> Gradients:
        """Return the gradients of the shards, and this rank's part of those of captured tensors."""
        with self.plan.group.telling():
            return self._gradients(placed, wanted, above, in_torch=in_torch)

    def _gradients(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool
    ) -> Gradients:
        raise NotImplementedError

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


class Telling:
    """The passes of a call of one process; other ranks are told of an error in a backward pass."""

    def __init__(self, group: RankGroup, passes: Passes) -> None:
        self._group, self._passes, self.problem = group, passes, passes.problem

    def forward(self, call: Call) -> Result:
        """Return the results."""
        return self._passes.forward(call)

    def backward(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool = False
    ) -> Gradients:
        """Return the gradients."""
        with self._group.telling():
            return self._passes.backward(placed, wanted, above, in_torch=in_torch)

    def tangent(
        self,
        placed: Placed,
        captures: tuple[Tensor, ...],
        above: Above,
        along: Tangents,
        *,
        in_torch: bool = False,
    ) -> Result:
        """Return the tangents of out and lse."""
        return self._passes.tangent(placed, captures, above, along, in_torch=in_torch)

    def moved(self, call: Call, along: Tangents) -> Moved | None:
        """Return the results of a call and their tangents."""
        return self._passes.moved(call, along)

    def changed(self, change: Change) -> Passes:
        """Return what computes another problem."""
        return Telling(self._group, self._passes.changed(change))


class PagePasses(Reverse):
    """Each rank receives the keys that its queries read, and computes its queries in one call."""

    def __init__(
        self, plan: ContextPlan, wanted: Request, problem: Problem, sending: Sending
    ) -> None:
        super().__init__(plan, wanted, problem)
        self._sending: Sending | None = sending
        self._pages: tuple[Tensor, ...] = ()
        self._captures: tuple[Tensor, ...] = ()
        self._sink: Tensor | None = None

    def forward(self, call: Call) -> Result:
        """Return the results of this rank's queries, `out` in the working dtype, and lse."""
        sending, self._sending = self._sending, None
        assert sending is not None, "there is one forward pass"
        query, sending = call.placed.query, sending.begin()
        self._pages, self._captures, self._sink = sending.pages, call.captures, call.request.sink
        if len(self.plan.rows):
            return compute_in_pages(self.plan, self._request, query, sending)
        sending.wait()
        made, local = SideBySide.of(self.plan, len(query)).call(self._request, query, *self._pages)
        return made.forward(local)

    @property
    def _request(self) -> Request:
        return self.wanted._replace(sink=self._sink, learns=True)

    def _gathered(self, query: Tensor) -> tuple[SideBySide, LocalCall, tuple[Tensor, ...]]:
        """Return blocks side by side, the call on them, and its keys and values."""
        side = SideBySide.of(self.plan, len(query))
        made, local = side.call(self._request, query, *self._pages)
        return side, LocalCall.of(made, local, self._captures), local.placed[1:3]

    def _gradients(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool
    ) -> Gradients:
        plan, (side, local, keys) = self.plan, self._gathered(placed.query)
        if in_torch:
            keys = tuple(side.gathered(x) for x in spread(plan, placed.key, placed.value))
        here, mine = local.placed.on(placed.query, *keys), local.wanted(wanted)
        if plan.same_bits and not in_torch:
            summed = self._of_slices(side, local, here, wanted, above)
            if summed is not None:
                return summed
        found = local.plan.backward(here, mine, above, in_torch=in_torch)
        plan.group.agree({"gradients": [x is not None for x in (found.key, found.value)]})
        pages = (None if x is None else side.scattered(x) for x in (found.key, found.value))
        shapes = [placed.key.shape, placed.value.shape]
        key, value = return_rows(plan, shapes, *pages)
        captures = tuple(local.captured(found, wanted))
        return found._replace(key=key, value=value, captures=captures)

    def _of_slices(
        self, side: SideBySide, local: LocalCall, here: Placed, wanted: Wanted, above: Above
    ) -> Gradients | None:
        """Add up the sums of all slices of all ranks, in the order of one process.

        Return None if a rank has no kernel that can compute its slices.
        """
        plan, group = self.plan, self.plan.group
        mine, keys = local.wanted(wanted), {"key": here.key, "value": here.value}
        keys = {name: x for name, x in keys.items() if getattr(mine, name)}
        if not all(group.agree({"gradients": [*keys], "note": local.plan.has_slices})):
            return None
        added = AddedSlices(plan, side.columns, keys)
        taking = Taking(plan.slice_size, self._at_once(keys), added.take, plan.kept)
        found = local.plan.gradients_of_slices(here, mine, above, taking)
        if not all(group.agree({"note": found is not None})) or found is None:
            return None
        count = int((plan.of_slices == plan.rank).sum())
        captures = [
            None if x is None else add_captured(plan, _of_each(x, count))
            for x in local.captured(found, wanted)
        ]
        delta, lse = found.delta, found.lse
        assert delta is not None and lse is not None
        sink = self.wanted.sink
        if sink is not None and sink.requires_grad:  # rank 0 computes its gradient from all rows
            delta, lse = (plan.gather(x, dim=2) for x in (delta, lse))
            if plan.rank:
                delta, lse = delta[:, :, :0], lse[:, :, :0]
        key, value = (added.total(name) for name in ("key", "value"))
        return Gradients(found.query, key, value, tuple(captures), delta=delta, lse=lse)

    def _at_once(self, keys: dict[str, Tensor]) -> AtOnce:
        """Return of how many sequences and heads sums are kept at a time: the same on all ranks."""
        plan, (_, heads) = self.plan, next(iter(keys.values()), _NO_KEYS).shape[:2]
        slices = int(np.bincount(plan.of_slices).max())
        rows = int(plan.division.needs.any(1).sum(1).max()) * plan.block
        width = sum(x.shape[3] * working_dtype(x.dtype).itemsize for x in keys.values())
        count = max(1, LARGEST_SUMS // max(1, slices * rows * width))
        return AtOnce(max(1, count // max(1, heads)), min(heads, count))


def _of_each(sums: Tensor, count: int) -> Tensor:
    """Return sums [slices, ...]; a tensor that no slice adds to has one for all, which is 0."""
    return sums if len(sums) == count else sums[:1].expand(count, *sums.shape[1:])
