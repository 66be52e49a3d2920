"""context_parallel(): code that calls attention in one process computes over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import BlockMask, check_fits
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL
from quire.block_mask.elements import by_block, created_cells, four_dimensional
from quire.block_mask.mask_mods import try_trace
from quire.distributed.attending import compute
from quire.distributed.context_plan import ContextPlan, digest_of
from quire.distributed.planning import everything
from quire.errors import ArgumentError
from quire.ir.trace import Mod, Traced, mod_name
from quire.memory import Queries
from quire.mods.compose import noop_mask, not_mask
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
                _check_mask(mask, plan, instead_of, _sizes(request, plan))
            _check_queries(request.queries, plan)
            return request._replace(masks=())

        return compute(asked, plan)[1]

    token = over_ranks.set(together)
    try:
        yield plan
    finally:
        over_ranks.reset(token)


def _sizes(request: Request, plan: ContextPlan) -> tuple[int, int]:
    """Return the batch entries, or the sequences, and the heads that a call has for its mask."""
    batch, heads = request.query.shape[:2]
    return len(plan.blocks.lengths) if plan.is_ragged else batch, heads


def _check_mask(
    mask: Mask, plan: ContextPlan, instead_of: Mask | None, sizes: tuple[int, int]
) -> None:
    """Raise if a mask of a call is neither the plan's nor `instead_of`."""
    if mask is instead_of or mask is plan.given:
        return
    mine, *known = (_traced(each, sizes) for each in (mask, plan.mask, instead_of))
    if not isinstance(mine, Traced) or digest_of(mine) not in map(digest_of, filter(None, known)):
        name = mod_name(_function(mask, sizes))
        raise ArgumentError(
            f"the mask of a call must be None or the mask of the plan, {mod_name(plan.mask)!r}, "
            f"but is {name!r}. Make the plan with it. If the mask of the plan includes it, say so: "
            f"context_parallel(plan, instead_of=mask)."
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


def _function(mask: Mask, sizes: tuple[int, int]) -> Mod:
    """Return a mask as a function: the mask_mod of a BlockMask alone if its blocks say the same."""
    if not isinstance(mask, torch_flex.BlockMask):
        return everything if mask is noop_mask else mask
    blocks = BlockMask.from_torch(mask)
    check_fits(blocks, *sizes, *blocks.seq_lengths, blocks.device)
    cells = four_dimensional(blocks)
    if _follows(cells, blocks, sizes):
        return blocks.mask_mod
    return by_block(blocks.mask_mod, cells, blocks.BLOCK_SIZE, only_in_partial=True)


def _follows(cells: Tensor, mask: BlockMask, sizes: tuple[int, int]) -> bool:
    """Return whether the mask_mod shows nothing in empty cells, and hides nothing in full ones."""
    if mask.is_endless:
        return bool((cells == PARTIAL).all())
    shown, hidden = (
        created_cells(mod, (*sizes, *mask.seq_lengths), mask.BLOCK_SIZE, mask.device)
        for mod in (mask.mask_mod, not_mask(mask.mask_mod))
    )
    if shown is None or hidden is None:
        return False
    wrong = (cells == EMPTY) & (shown != EMPTY) | (cells == FULL) & (hidden != EMPTY)
    return not wrong.any()


def _traced(mask: Mask | None, sizes: tuple[int, int]) -> Traced | None:
    """Return the trace of a mask; None if there is none."""
    traced = None if mask is None else try_trace(_function(mask, sizes), "mask", _CPU)
    return traced if isinstance(traced, Traced) else None
