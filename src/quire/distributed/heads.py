"""The method `heads`: every rank computes some heads over the whole sequence.

    tokens of rank r, all heads  ->  all tokens, heads of rank r  ->  tokens of rank r, all heads

Queries, keys and values are sent there, and results back. A rank computes an ordinary call, so the
mask decides nothing but the work, and all ranks have the same number of heads. Exchanging tokens
for heads is a permutation over ranks, and its transpose is the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.autograd import recorded
from quire.distributed.context_plan import ContextPlan
from quire.distributed.local import Lookups, made
from quire.distributed.passes import Telling
from quire.errors import ArgumentError
from quire.memory import Dense, Queries
from quire.request import Call, Request
from quire.results import Result


def obstacle(plan: ContextPlan, call: Call) -> str | None:
    """Return why heads cannot be given to ranks; None if they can."""
    heads, key_heads = call.placed.query.shape[1], call.placed.key.shape[1]
    if key_heads % plan.num_ranks:
        return f"{heads} heads and {key_heads} key heads for {plan.num_ranks} ranks"
    return None


def check_heads(plan: ContextPlan, call: Call) -> None:
    """Raise if heads cannot be given to ranks."""
    reason = obstacle(plan, call)
    if reason is not None:
        raise ArgumentError(
            f"key heads must be a multiple of the ranks for the method 'heads', but there are "
            f"{reason}. Make the plan with another method."
        )


def compute_by_heads(plan: ContextPlan, request: Request, call: Call) -> Result:
    """Return the results of this rank's queries. Autograd records what is sent, and the call."""
    if plan.num_ranks == 1:
        local, there = made(request, Lookups())
        return local.run(there)
    query, key, value = (_to_heads(plan, x) for x in call.placed[:3])
    count = query.shape[1]
    own = torch.arange(plan.rank * count, (plan.rank + 1) * count, dtype=torch.int32)
    sink = request.sink
    wanted = request._replace(
        query=query,
        memory=Dense(key, value),
        queries=Queries(start=0),
        sink=None if sink is None else sink[own.long()],
    )
    with plan.group.agreeing({}):
        local, there = made(wanted, Lookups(heads=own))
        learns = there.learns and local.backend != "inductor"  # PyTorch records its own operator
        result = recorded(Telling(plan.group, local), there) if learns else local.run(there)
        found = result._replace(out=result.out.to(query.dtype)).by_query
    return Result(**{name: _to_tokens(plan, x) for name, x in found.items()})


def _to_heads(plan: ContextPlan, rows: Tensor) -> Tensor:
    """Return all tokens of this rank's heads, from this rank's tokens of all heads."""
    whole: Tensor = _Exchanged.apply(plan, rows, True)  # type: ignore[no-untyped-call]
    return whole


def _to_tokens(plan: ContextPlan, rows: Tensor) -> Tensor:
    """Return this rank's tokens of all heads, from all tokens of this rank's heads."""
    own: Tensor = _Exchanged.apply(plan, rows, False)  # type: ignore[no-untyped-call]
    return own


class _Exchanged(torch.autograd.Function):
    """Exchanges tokens for heads, or heads for tokens."""

    @staticmethod
    def forward(ctx: Any, plan: ContextPlan, rows: Tensor, to_heads: bool) -> Tensor:
        ctx.plan, ctx.to_heads = plan, to_heads
        return _heads_of_tokens(plan, rows) if to_heads else _tokens_of_heads(plan, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        back = _to_tokens if ctx.to_heads else _to_heads
        ctx.plan.group.agree({"gradients": "of operands" if ctx.to_heads else "of results"})
        return None, back(ctx.plan, grad), None


def _heads_of_tokens(plan: ContextPlan, rows: Tensor) -> Tensor:
    """Send each rank its heads of the own tokens [B, H, tokens, ...]."""
    heads, own = rows.shape[1] // plan.num_ranks, rows.shape[2]
    counts = plan.num_tokens
    leaving = rows.movedim(0, 2).contiguous().flatten(0, 1)  # a row for each head and token
    arriving = leaving.new_empty((heads * plan.length, *leaving.shape[1:]))
    parts = arriving.split((heads * counts).tolist())
    plan.group.exchange((leaving.split([heads * own] * plan.num_ranks), parts)).wait()
    whole = rows.new_empty((len(rows), heads, plan.length, *rows.shape[3:]))
    for rank, part in enumerate(parts):
        of_rank = part.unflatten(0, (heads, int(counts[rank]))).movedim(2, 0)
        whole[:, :, plan.rows_of(rank)] = of_rank
    return whole


def _tokens_of_heads(plan: ContextPlan, rows: Tensor) -> Tensor:
    """Send each rank its tokens of the own heads [B, heads, length, ...]."""
    heads, own = rows.shape[1], len(plan.rows)
    leaving = [
        rows[:, :, plan.rows_of(rank)].movedim(0, 2).contiguous().flatten(0, 1)
        for rank in range(plan.num_ranks)
    ]
    arriving = rows.new_empty((heads * plan.num_ranks * own, *leaving[0].shape[1:]))
    plan.group.exchange((leaving, arriving.split([heads * own] * plan.num_ranks))).wait()
    by_head: Tensor = arriving.unflatten(0, (heads * plan.num_ranks, own))
    return by_head.movedim(2, 0)
