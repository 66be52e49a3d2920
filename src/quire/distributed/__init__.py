"""One sequence over many processes, on torch.distributed: context parallelism with any mask.

    plan = quire.distributed.plan(mask, length=n, mesh=mesh["cp"])
    x, labels = plan.shard(x, labels, dim=1)
    out = quire.distributed.attention(q, Dense(k, v), plan=plan, score_mod=bias)
    with quire.distributed.context_parallel(plan):
        model(x)

Reading order: reads (which blocks of keys each block of queries reads), token_blocks (where blocks
lie), layouts (blocks to ranks), routes (who sends which pages to whom), context_plan (all of it, as
a value), planning (`plan`), group (agreement and errors), exchange (pages there, gradients back),
local (what a rank computes), passes, heads and ring (the methods), attending (`attention`), context
(`context_parallel`) and merging (decoding).
"""

from quire.distributed.attending import attention
from quire.distributed.context import context_parallel
from quire.distributed.context_plan import ContextPlan
from quire.distributed.merging import attend_over_ranks, merge_over_ranks
from quire.distributed.planning import plan

__all__ = ["ContextPlan", "attend_over_ranks", "attention", "context_parallel"]
__all__ += ["merge_over_ranks", "plan"]
