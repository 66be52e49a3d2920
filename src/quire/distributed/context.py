"""context_parallel(): code that calls attention in one process computes over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask.mask_mods import try_trace
from quire.distributed.attending import compute
from quire.distributed.context_plan import ContextPlan, digest_of
from quire.errors import ArgumentError
from quire.ir.trace import Mod, Traced, mod_name
from quire.memory import Queries
from quire.plans import over_ranks
from quire.request import Mask, Request
from quire.results import Result

_CPU = torch.device("cpu")


@contextmanager
def context_parallel(plan: ContextPlan, *, instead_of: Mask | None = None) -> Iterator[ContextPlan]:
    """Let `quire.attention` and `quire.flex_attention` compute over the ranks of a plan.

        x, labels = plan.shard(x, labels, dim=1)
        with quire.distributed.context_parallel(plan):
            out = model(x)

    Inside, every call gets the shards of this rank, and the mask of the plan applies. A call may
    have no mask, the mask that the plan was made of, or the mask `instead_of`: one that the model
    always applies and that the mask of the plan includes, such as `causal`. Another mask is an
    error. A backward pass may run outside of the block, unless it computes calls again, as
    `torch.utils.checkpoint` does: outside they would be those of one process.
    """

    def together(request: Request) -> Result:
        def asked() -> Request:
            for mask in request.masks:
                _check_mask(mask, plan, instead_of)
            _check_queries(request.queries, plan)
            return request._replace(masks=())

        return compute(asked, plan)[1]

    token = over_ranks.set(together)
    try:
        yield plan
    finally:
        over_ranks.reset(token)


def _check_mask(mask: Mask, plan: ContextPlan, instead_of: Mask | None) -> None:
    """Raise if a mask of a call is neither the plan's nor `instead_of`."""
    if mask is instead_of or mask is plan.given:
        return
    mine, known = _traced(mask), [_traced(each) for each in (plan.mask, instead_of)]
    if not isinstance(mine, Traced) or digest_of(mine) not in map(digest_of, filter(None, known)):
        raise ArgumentError(
            f"the mask of a call must be None or the mask of the plan, {mod_name(plan.mask)!r}, "
            f"but is {mod_name(_function(mask))!r}. Make the plan with it. If the mask of the plan "
            f"includes it, say so: context_parallel(plan, instead_of=mask)."
        )


def _check_queries(queries: Queries, plan: ContextPlan) -> None:
    """Raise if a call says where its queries are: the plan does."""
    for name, given in zip(("q_start", "q_offsets", "q_lengths"), queries, strict=True):
        known = (0, plan.offsets) if plan.is_ragged else (0,)
        value = given.tolist() if isinstance(given, Tensor) else given
        if value is not None and value not in known:
            raise ArgumentError(
                f"{name} must be None over ranks, since the plan has the positions of all tokens, "
                f"but is {value}. Leave it out."
            )


def _function(mask: Mask) -> Mod:
    mod: Mod = mask.mask_mod if isinstance(mask, torch_flex.BlockMask) else mask
    return mod


def _traced(mask: Mask | None) -> Traced | None:
    """Return the trace of a mask; None if there is none."""
    traced = None if mask is None else try_trace(_function(mask), "mask", _CPU)
    return traced if isinstance(traced, Traced) else None
