"""The method `ring`: keys go round, and every rank computes on those that it holds.

    step 0    rank r computes on a third of its own keys, while it sends them to rank r + 1
    step n    rank r computes on a third of the keys of rank r - n, while it sends them on

When all ranks have read the first thirds, the second ones go round, then the last ones. So a rank
takes memory for the keys that it computes on, and for those that arrive: two thirds of a shard,
beside its own keys, however many ranks there are. Results over all thirds are merged.

In the backward pass keys go round again, and the sums of their gradients with them. These take two
shards: the result, and a third each for what the kernel returns, what leaves and what arrives. The
order of sums is the same in every run, but it is not that of one process, so results agree up to
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.api.merge import merge_attention
from quire.distributed.context_plan import ContextPlan
from quire.distributed.group import Passing
from quire.distributed.local import LocalCall, Lookups, made
from quire.distributed.passes import Reverse, unknown
from quire.distributed.reads import Numbers
from quire.errors import OptionError
from quire.memory import Dense, Placed, Queries
from quire.request import Call
from quire.results import Above, Gradients, Result, Wanted

PARTS = 3
"""A rank passes on such a part of its keys at a time."""


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


class Third(NamedTuple):
    """Keys that go round together: the blocks of a third of those of one rank."""

    rank: int
    number: int
    first: int  # of the keys of its rank
    length: int
    blocks: Numbers

    @staticmethod
    def of(plan: ContextPlan, rank: int, number: int) -> Third:
        """Return a third of the keys of a rank."""
        thirds = np.array_split(plan.blocks_of(rank), PARTS)
        sizes = [int(plan.blocks.tokens[blocks].sum()) for blocks in thirds]
        return Third(rank, number, sum(sizes[:number]), sizes[number], thirds[number])

    @property
    def place(self) -> slice:
        """Return where it is among the keys of its rank."""
        return slice(self.first, self.first + self.length)

    def within(self, memory: Tensor, like: Tensor) -> Tensor:
        """Return the first part of flat `memory` as [B, H, length, D], with B, H, D of `like`."""
        shape = (*like.shape[:2], self.length, like.shape[3])
        return memory[: math.prod(shape)].view(shape)

    def new(self, like: Tensor) -> Tensor:
        """Return new memory [B, H, length, D] for its sums, with B, H, D of `like`."""
        return like.new_empty((*like.shape[:2], self.length, like.shape[3]))


class RingPasses(Reverse):
    """The passes of one call on this rank; `_calls` has the call on each part of each rank."""

    _calls: dict[tuple[int, int], LocalCall | None]

    def forward(self, call: Call) -> Result:
        """Return out and lse of this rank's queries, and their largest scores if wanted."""
        query, key, value = call.placed[:3]
        self._calls = {}
        total, errors = None, Errors()
        with torch.no_grad(), errors.raised():
            for part, keys in self._round(key.detach(), value.detach()):
                with errors.kept():
                    found = self._on_part(part, call, query, keys)
                    total = found if total is None else _merged(total, found)
        assert total is not None, "there is a rank"
        return total

    def _on_part(
        self, part: Third, call: Call, query: Tensor, keys: tuple[Tensor, ...]
    ) -> Result | None:
        """Return the results over some keys of a rank; None if no query here reads one."""
        plan = self.plan
        is_first = part.rank == plan.rank and part.number == 0  # where the sink counts
        if not is_first and not plan.division.needs[plan.rank][:, part.blocks].any():
            self._calls[part[:2]] = None
            return None
        lookups = Lookups(queries=plan.rows.int(), keys=plan.blocks.rows(part.blocks).int())
        request = self.wanted._replace(
            query=query,
            memory=Dense(keys[0], keys[1]),
            queries=Queries(start=0),
            sink=call.request.sink if is_first else None,
            learns=True,
        )
        local, here = made(request, lookups)
        self._calls[part[:2]] = LocalCall.of(local, here, call.captures)
        return local.forward(here)

    def _gradients(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool
    ) -> Gradients:
        plan, total, errors = self.plan, _Sums(wanted), Errors()
        with plan.group.agreeing({"gradients": [wanted.key, wanted.value]}):
            if in_torch:
                raise unknown("a second derivative")
        dtype, after = above.lse.dtype, Passing()
        own = tuple(torch.empty_like(x, dtype=dtype) for x in placed[1:3])
        for part, keys in self._round(placed.key, placed.value):
            with errors.kept():
                self._add(total, part, placed.on(placed.query, *keys), wanted, above)
            sums = after.wait() if part.rank != plan.rank else ()
            sums = total.plus_keys(sums, keys, dtype)
            following = Third.of(plan, (part.rank - 1) % plan.num_ranks, part.number)
            after = plan.group.pass_on(sums, tuple(map(following.new, sums)))
            if following.rank == plan.rank:
                for rows, x in zip(own, after.wait(), strict=True):
                    rows[:, :, following.place] = x
                after = Passing()  # its memory is free
        with plan.group.agreeing({}), errors.raised():
            pass  # sums that an error left out would be wrong on other ranks
        return total.gradients(*own)

    def _add(
        self,
        total: _Sums,
        part: Third,
        placed: Placed,
        wanted: Wanted,
        above: Above,
    ) -> None:
        """Add the gradients over some keys, which are `placed` with all queries."""
        local = self._calls[part[:2]]
        if local is not None:
            here, above = local.placed.on(*placed[:3]), above._replace(whole=False)
            found = local.plan.backward(here, local.wanted(wanted), above)
            total.add(found, local.captured(found, wanted))

    def _round(self, *own: Tensor) -> Iterator[tuple[Third, tuple[Tensor, ...]]]:
        """Yield the keys and values of every rank, the own ones first, as they go round.

        Those that arrive take the place of those that were held before.
        """
        plan = self.plan
        ranks = [(plan.rank - step) % plan.num_ranks for step in range(plan.num_ranks)]
        parts = [[Third.of(plan, rank, number) for rank in ranks] for number in range(PARTS)]
        most = max(-(-len(plan.blocks_of(rank)) // PARTS) for rank in ranks) * plan.block
        places = [[_memory(x, most) for x in own] for _ in ranks[:2]]
        for going in parts:
            held = tuple(map(going[0].within, places[0], own))
            for rows, x in zip(held, own, strict=True):
                rows.copy_(x[:, :, going[0].place])
            for step, part in enumerate(going):
                following = Passing()
                if step + 1 < len(going):
                    into = map(going[step + 1].within, places[1 - step % 2], own)
                    following = plan.group.pass_on(held, tuple(into))
                yield part, held
                held = following.wait() or held


def _memory(keys: Tensor, count: int) -> Tensor:
    """Return memory for other keys or values, of `count` tokens."""
    return keys.new_empty(keys.shape[0] * keys.shape[1] * count * keys.shape[3])


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

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._query: Tensor | None = None
        self._captures: list[Tensor | None] = [None] * len(wanted.captures)
        self._keys: tuple[Tensor | None, Tensor | None] = (None, None)
        self._first: Gradients | None = None

    def add(self, found: Gradients, captured: list[Tensor | None]) -> None:
        """Add the gradients of one pass."""
        self._first = self._first or found._replace(query=None, key=None, value=None)
        if self._query is None or found.query is None:
            self._query = _plus(self._query, found.query)
        else:  # in place
            wide = torch.promote_types(found.query.dtype, torch.float32)
            self._query = self._query.to(wide).add_(found.query)
        self._captures = [_plus(x, y) for x, y in zip(self._captures, captured, strict=True)]
        self._keys = found.key, found.value

    def plus_keys(
        self, sums: tuple[Tensor, ...], keys: tuple[Tensor, ...], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return `sums` and the gradients of keys and values of the last pass, if there was one."""
        grads, self._keys = self._keys, (None, None)
        sums = sums or tuple(torch.zeros_like(x, dtype=dtype) for x in keys)
        for x, grad in zip(sums, grads, strict=True):
            if grad is not None:
                x += grad
        return sums

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
