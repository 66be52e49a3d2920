"""The method `ring`: keys go round, and every rank computes on those that it holds.

    step 0    rank r computes on its own keys, while it sends them to rank r + 1
    step n    rank r computes on the keys of rank r - n, while it sends them on

A rank holds its own keys and those of two others at most, however long the sequence is: those that
it computes on, and those that arrive. Results over the keys of each rank are merged. In the
backward pass keys go round again, and their gradients with them. The order of sums is the same in
every run, but it is not that of one process, so results agree up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.api.merge import merge_attention
from quire.distributed.group import Passing
from quire.distributed.local import LocalCall, Lookups, made
from quire.distributed.passes import Reverse, unknown
from quire.errors import OptionError
from quire.memory import Dense, Placed, Queries
from quire.request import Call
from quire.results import Above, Gradients, Result, Wanted


def check_merged(call: Call) -> None:
    """Raise if the results of a call cannot be merged."""
    aux, weighting = call.request.aux, call.request.weighting
    if aux.argmax or aux.entropy:
        raise OptionError(
            "argmax and entropy must not be asked for with the method 'ring', which merges "
            "results, but one is. Make the plan with another method."
        )
    if weighting != "softmax":
        raise OptionError(
            f"weights must be those of a softmax with the method 'ring', which merges results, but "
            f"weight= gives {weighting}. Make the plan with another method."
        )


class RingPasses(Reverse):
    """The passes of one call on this rank; `_calls` has the call on the keys of each rank."""

    _calls: dict[int, LocalCall | None]

    def forward(self, call: Call) -> Result:
        """Return out and lse of this rank's queries, and their largest scores if wanted."""
        query, key, value = call.placed[:3]
        self._calls = {}
        total, errors = None, Errors()
        with torch.no_grad(), errors.raised():
            for rank, keys in self._round(key.detach(), value.detach()):
                with errors.kept():
                    found = self._on_keys_of(rank, call, query, keys)
                    total = found if total is None else _merged(total, found)
        assert total is not None, "there is a rank"
        return total

    def _on_keys_of(
        self, rank: int, call: Call, query: Tensor, keys: tuple[Tensor, ...]
    ) -> Result | None:
        """Return the results over the keys of a rank; None if no query here reads one."""
        plan = self.plan
        own = rank == plan.rank  # the sink counts once
        if not own and not plan.division.needs[plan.rank][:, plan.division.owner == rank].any():
            self._calls[rank] = None
            return None
        lookups = Lookups(queries=plan.rows.int(), keys=plan.rows_of(rank).int())
        request = self.wanted._replace(
            query=query,
            memory=Dense(keys[0], keys[1]),
            queries=Queries(start=0),
            sink=call.request.sink if own else None,
            learns=True,
        )
        local, here = made(request, lookups)
        self._calls[rank] = LocalCall.of(local, here, call.captures)
        return local.forward(here)

    def _gradients(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool
    ) -> Gradients:
        plan, total, errors = self.plan, _Sums(self.plan.rank, wanted), Errors()
        with plan.group.agreeing({"gradients": [wanted.key, wanted.value]}):
            if in_torch:
                raise unknown("a second derivative")
        after = Passing()
        for rank, keys in self._round(placed.key, placed.value):
            local = self._calls[rank]
            if local is not None:
                with errors.kept():
                    here = local.placed.on(placed.query, *keys)
                    part = above._replace(whole=False)
                    found = local.plan.backward(here, local.wanted(wanted), part)
                    total.add(found, local.captured(found, wanted))
            sums = after.wait() if rank != plan.rank else ()
            dtype = above.lse.dtype
            mine = total.of_keys(keys, dtype)
            sums = tuple(x.add_(y) for x, y in zip(sums, mine, strict=True)) if sums else mine
            before = (rank - 1) % plan.num_ranks
            arriving = tuple(
                x.new_empty((*x.shape[:2], int(plan.num_tokens[before]), x.shape[3])) for x in sums
            )
            after = plan.group.pass_on(sums, arriving)
        key, value = after.wait()
        with plan.group.agreeing({}), errors.raised():
            pass  # sums that an error left out would be wrong on other ranks
        return total.gradients(key, value)

    def _round(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield the keys and values of every rank, the own ones first, as they go round.

        Those that arrive take the place of those that were held before.
        """
        plan = self.plan
        held: tuple[Tensor, ...] = (key.contiguous(), value.contiguous())
        places = [_memory(held, max(plan.num_tokens)) for _ in range(min(2, plan.num_ranks - 1))]
        for step in range(plan.num_ranks):
            rank = (plan.rank - step) % plan.num_ranks
            following = Passing()
            if step + 1 < plan.num_ranks:
                count = int(plan.num_tokens[(rank - 1) % plan.num_ranks])
                place = zip(places[step % 2], held, strict=True)
                into = tuple(_like(x, memory, count) for memory, x in place)
                following = plan.group.pass_on(held, into)
            yield rank, held
            held = following.wait() or held


def _memory(keys: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """Return memory for other keys and values, of `count` tokens."""
    return tuple(x.new_empty(x.shape[0] * x.shape[1] * count * x.shape[3]) for x in keys)


def _like(keys: Tensor, memory: Tensor, count: int) -> Tensor:
    """Return the begin of some memory as keys [B, H, count, D] like others."""
    shape = (*keys.shape[:2], count, keys.shape[3])
    return memory[: math.prod(shape)].view(shape)


class Errors:
    """Errors of a rank that goes on to pass keys, since the others wait for these."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error in the block."""
        try:
            yield
        except Exception as error:
            self._first = self._first or error

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the first error after the block."""
        yield
        if self._first is not None:
            raise self._first


class _Sums:
    """What the backward passes over the keys of all ranks add up to."""

    def __init__(self, rank: int, wanted: Wanted) -> None:
        self._wanted = wanted
        self._query: Tensor | None = None
        self._captures: list[Tensor | None] = [None] * len(wanted.captures)
        self._last: Gradients | None = None
        self._first: Gradients | None = None

    def add(self, found: Gradients, captured: list[Tensor | None]) -> None:
        """Add the gradients of one pass."""
        self._last = found
        self._first = self._first or found
        self._query = _plus(self._query, found.query)
        self._captures = [_plus(x, y) for x, y in zip(self._captures, captured, strict=True)]

    def of_keys(self, keys: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the gradients of keys and values of the last pass; zeros if there was none."""
        found = (None, None) if self._last is None else (self._last.key, self._last.value)
        self._last = None
        return tuple(
            x.new_zeros(x.shape, dtype=dtype) if grad is None else grad.to(dtype).contiguous()
            for x, grad in zip(keys, found, strict=True)
        )

    def gradients(self, key: Tensor, value: Tensor) -> Gradients:
        """Return the sums."""
        assert self._first is not None, "the own keys were computed"
        return self._first._replace(
            query=self._query,
            key=key if self._wanted.key else None,
            value=value if self._wanted.value else None,
            captures=tuple(self._captures),
        )


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    wide = torch.promote_types(total.dtype, torch.float32)
    return total.to(wide) + part


def _merged(total: Result, part: Result | None) -> Result:
    """Return the results over the keys of both."""
    if part is None:
        return total
    assert total.lse is not None and part.lse is not None, "autograd and merging need it"
    out, lse = merge_attention(total.out, total.lse, part.out, part.lse)
    largest = total.max_scores
    if largest is not None and part.max_scores is not None:
        largest = torch.maximum(largest, part.max_scores)
    return Result(out, lse, largest)
