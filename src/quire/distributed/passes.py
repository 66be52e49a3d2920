"""Forward and backward passes over ranks, for autograd: what `autograd.recorded` asks a plan for.

Operands are this rank's shards. A pass sends keys to the ranks whose queries read them, computes
the own queries over blocks that are gathered side by side, and in the backward pass sends gradients
of keys back. Received keys are kept from the forward pass for the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.autograd.folding import Change
from quire.distributed.context_plan import ContextPlan
from quire.distributed.exchange import (
    add_captured,
    add_slices,
    return_rows,
    send,
    spread,
)
from quire.distributed.local import SideBySide
from quire.errors import OptionError
from quire.memory import Placed
from quire.plans import CallPlan
from quire.request import Call, Problem, Request
from quire.results import Above, Gradients, Moved, Result, Tangents, Wanted


class _Local(NamedTuple):
    """What the forward pass leaves for the backward pass of this rank."""

    side: SideBySide
    plan: CallPlan
    placed: Placed
    captures: tuple[Tensor, ...]
    given: dict[int, int]  # the number of a captured tensor -> that of the user's


class RankPasses:
    """Computes the passes of one call on this rank."""

    def __init__(self, plan: ContextPlan, wanted: Request, problem: Problem) -> None:
        self.plan, self.wanted, self.problem = plan, wanted, problem
        self._local: _Local | None = None

    def forward(self, call: Call) -> Result:
        """Return the results of this rank's queries, `out` in the working dtype, and lse."""
        query, key, value = call.placed[:3]
        pages = send(self.plan, key, value)
        side = SideBySide.of(self.plan, len(query))
        request = self.wanted._replace(sink=call.request.sink, learns=True)
        made, local = side.call(request, query, *pages)
        numbers = {id(x): n for n, x in reversed([*enumerate(call.captures)])}
        given = {n: numbers[id(x)] for n, x in enumerate(local.captures) if id(x) in numbers}
        self._local = _Local(side, made, local.placed, local.captures, given)
        return side.with_positions(made.forward(local))

    def backward(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool = False
    ) -> Gradients:
        """Return the gradients of the shards; those of captured tensors as `attention` says."""
        assert self._local is not None, "a backward pass comes after the forward pass"
        local, query = self._local, placed.query
        if in_torch:
            pages = spread(self.plan, placed.key, placed.value)
            rows = [local.side.gathered(x) for x in pages]
        else:
            rows = list(local.placed[1:3])
        here = local.placed.on(query, *rows)
        mine = self._wanted(wanted)
        found, route = None, self.plan.slice_route(len(query))
        if route is not None and not in_torch:
            found = local.plan.gradients_of_slices(here, mine, above, self.plan.slice_size)
            told = self.plan.group.agree({"note": found is not None})
            found = found if all(told) else None
        if found is not None and route is not None:
            return self._of_slices(found, wanted)
        found = local.plan.backward(here, mine, above, in_torch=in_torch)
        grads = return_rows(
            self.plan,
            [placed.key.shape, placed.value.shape],
            *(None if x is None else local.side.scattered(x) for x in (found.key, found.value)),
        )
        return found._replace(key=grads[0], value=grads[1], captures=self._captures(found, wanted))

    def _wanted(self, wanted: Wanted) -> Wanted:
        """Return what is wanted of the local call, whose mods also load positions."""
        assert self._local is not None
        given = self._local.given
        captures = tuple(
            wanted.captures[given[n]] if n in given else x
            for n, x in enumerate(self._local.captures)
        )
        learned = tuple(n for n in range(len(captures)) if given.get(n) in wanted.learned)
        return Wanted(wanted.query, wanted.key, wanted.value, captures, learned)

    def _captures(self, found: Gradients, wanted: Wanted) -> tuple[Tensor | None, ...]:
        """Return the gradients of the user's captures from those of the local call."""
        assert self._local is not None
        by_user: dict[int, Tensor] = {}
        for n, grad in enumerate(found.captures):
            if grad is not None:
                by_user[self._local.given[n]] = grad
        return tuple(by_user.get(n) for n in range(len(wanted.captures)))

    def _of_slices(self, found: Gradients, wanted: Wanted) -> Gradients:
        """Add up the sums of all slices of all ranks, in the order of one process."""
        assert self._local is not None
        plan, side = self.plan, self._local.side
        route = plan.slice_route(side.batch)
        assert route is not None
        key, value = (
            None if x is None else add_slices(plan, route, x, side.columns)
            for x in (found.key, found.value)
        )
        captures = [
            None if x is None else add_captured(plan, route, _of_each(x, len(route.slices)))
            for x in self._captures(found, wanted)
        ]
        delta, lse = found.delta, found.lse
        assert delta is not None and lse is not None
        if self.wanted.sink is not None and self.wanted.sink.requires_grad:
            delta, lse = (plan.gather(x, dim=2) for x in (delta, lse))
            if plan.rank:
                delta, lse = delta[:, :, :0], lse[:, :, :0]
        return Gradients(found.query, key, value, tuple(captures), delta=delta, lse=lse)

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
        raise _unknown("forward mode")

    def moved(self, call: Call, along: Tangents) -> Moved | None:
        """Raise: forward mode is not computed over ranks."""
        raise _unknown("forward mode")

    def changed(self, change: Change) -> RankPasses:
        """Raise: calls are not mapped over ranks."""
        raise _unknown("torch.vmap")


def _of_each(sums: Tensor, count: int) -> Tensor:
    """Return sums [slices, ...]; a tensor that no slice adds to has one for all, which is 0."""
    return sums if len(sums) == count else sums[:1].expand(count, *sums.shape[1:])


def _unknown(what: str) -> OptionError:
    return OptionError(
        f"attention over ranks must be differentiated by reverse mode, but is asked for {what}. "
        f"Call quire.attention in one process for it."
    )
