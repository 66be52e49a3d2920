"""What one rank computes: its own queries over the keys that it has.

Without gradients it is one paged call. Blocks are pages, chunks of the rank are sequences with
their own q_start, and blocks that nobody sent are the page of zeros, which the mask hides.

If autograd records, blocks are gathered side by side, and mods find positions in two lookups. The
gradients of keys then take memory for the keys that the rank has, not for the whole sequence.
Tiles hold the same keys in both cases, so results have the bits of one process.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.codegen.llvm.target import Target
from quire.distributed.context_plan import ContextPlan
from quire.distributed.reads import Numbers
from quire.ir.graph import inputs
from quire.ir.trace import Kind, Mod, Traced, mod_name, trace
from quire.memory import Dense, Paged, Queries
from quire.mods.compose import Mask, ScoreChange
from quire.mods.dropout import Dropout, keep_mask
from quire.plans import make
from quire.request import Request, call_of, check
from quire.results import Result


class LocalShare(NamedTuple):
    """The query [B, Hq, tokens, D] of a rank; its pages [pages, block, Hkv, D] of keys, values."""

    query: Tensor
    key: Tensor
    value: Tensor


def compute_share(plan: ContextPlan, share: LocalShare, wanted: Request) -> Result:
    """Return the results of this rank's queries; options and mods are those of `wanted`."""
    if len(plan.positions) == 0:
        return _nothing(share, wanted)
    tensors = (*share, *_learned(wanted))
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _side_by_side(plan, share, wanted) if learns else _in_pages(plan, share, wanted)


def _in_pages(plan: ContextPlan, share: LocalShare, wanted: Request) -> Result:
    """Compute one paged call, a sequence for each chunk of each batch entry."""
    query, key, value = share
    batch, _, count, _ = query.shape
    route, num_chunks = plan.route(batch), len(plan.chunks)
    starts, stops = np.array(plan.chunks).T
    ends = np.cumsum(stops - starts)
    offsets = [0, *(np.arange(batch)[:, None] * count + ends).ravel().tolist()]
    table = torch.from_numpy(route.table.astype(np.int32))
    memory = Paged(
        key.transpose(1, 2),
        value.transpose(1, 2),
        table.repeat_interleave(num_chunks, 0),
        lengths=[plan.length] * (batch * num_chunks),
    )
    entries = torch.arange(batch).repeat_interleave(num_chunks)
    lookups = Lookups(entries=entries)
    rows = query.transpose(1, 2).flatten(0, 1)
    queries = Queries(starts.tolist() * batch, offsets)
    result = _computed(wanted._replace(query=rows, memory=memory, queries=queries), lookups)
    return Result(
        **{
            name: memory.as_given(rows, x).unflatten(0, (batch, count)).transpose(1, 2)
            for name, x in result.by_query.items()
        }
    )


def _side_by_side(plan: ContextPlan, share: LocalShare, wanted: Request) -> Result:
    """Compute one dense call over the blocks that this rank has, in the order of positions."""
    query, key, value = share
    route = plan.route(len(query))
    blocks = _whole_tiles(route.needed, plan)
    pages = torch.from_numpy(route.table[:, blocks])
    places = torch.arange(plan.block) + torch.from_numpy(blocks * plan.block).unsqueeze(1)
    positions = places.flatten()
    positions = positions[positions < plan.length]
    key, value = (_gathered(x, pages)[:, :, : len(positions)] for x in (key, value))
    lookups = Lookups(queries=plan.positions.int(), keys=positions.int())
    request = wanted._replace(query=query, memory=Dense(key, value), queries=Queries(start=0))
    result = _computed(request, lookups)
    if result.argmax is not None and len(positions):
        found = positions[result.argmax.clamp(min=0)]
        result = result._replace(argmax=torch.where(result.argmax < 0, -1, found))
    return result


def _gathered(rows: Tensor, pages: Tensor) -> Tensor:
    """Return the pages with the numbers `pages` [B, n] side by side: [B, H, n * block, D]."""
    chosen = rows.index_select(0, pages.flatten())
    return chosen.view(*pages.shape, *rows.shape[1:]).flatten(1, 2).transpose(1, 2)


def _whole_tiles(blocks: Numbers, plan: ContextPlan) -> Numbers:
    """Return the blocks of all tiles of the kernel that hold one of these blocks.

    So tiles hold the same keys as in one process, which makes the same bits.
    """
    in_unit = math.lcm(plan.block, Target.host().block_kv) // plan.block
    units = np.unique(blocks // in_unit)
    whole: Numbers = (units[:, None] * in_unit + np.arange(in_unit)).ravel()
    return whole[whole < plan.num_blocks]


def _nothing(share: LocalShare, wanted: Request) -> Result:
    """Return the results of no query."""
    key, value = (x[:1].transpose(1, 2)[:, :, :0] for x in share[1:])
    return _computed(wanted._replace(query=share.query, memory=Dense(key, value)), Lookups())


# --- mods -----------------------------------------------------------------------------------------


class Lookups(NamedTuple):
    """What mods are told: the batch entry of `b`, the positions of `q_idx` and `kv_idx`.

    None stands for the number itself.
    """

    entries: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None

    def mapped(self, mod: Mod, kind: Kind) -> Mod:
        """Return a mod that looks up its indices, and calls `mod` with what it finds."""
        named = zip(("b", "q_idx", "kv_idx"), self, strict=True)
        moved = {name for name, table in named if table is not None}
        if not moved or (isinstance(mod, Traced) and not moved & inputs(mod.output)):
            return mod
        of_kind = Mask if kind == "mask" else ScoreChange
        return of_kind(_looked_up, mod_name(mod), mod=mod, **self._asdict())


def _looked_up(
    *args: Tensor, mod: Mod, entries: Tensor | None, queries: Tensor | None, keys: Tensor | None
) -> Tensor:
    *score, b, h, q_idx, kv_idx = args
    place = (_at(entries, b), h, _at(queries, q_idx), _at(keys, kv_idx))
    found: Tensor = mod(*score, *place)
    return found


def _at(table: Tensor | None, index: Tensor) -> Tensor:
    return index if table is None else table[index]


def _computed(request: Request, lookups: Lookups) -> Result:
    """Compute a request whose mods look up their indices."""
    score_mod, mask = request.score_mod, request.mask_mod
    assert mask is not None, "a plan has a mask"
    request = request._replace(
        score_mod=None if score_mod is None else lookups.mapped(score_mod, "score"),
        masks=(lookups.mapped(mask, "mask"),),
    )
    check(request)
    call = call_of(request)
    dropout = call.problem.dropout
    if dropout is not None and request.seed is not None:
        keep = trace(lookups.mapped(keep_mask(dropout.p, *request.seed), "mask"), "mask")
        dropout = Dropout(dropout.p, request.seed, mask=keep)
        call = call._replace(problem=call.problem._replace(dropout=dropout))
    plan, call = make(call)
    return plan.run(call)


def _learned(wanted: Request) -> tuple[Tensor, ...]:
    """Return the sink and the tensors that the score_mod captured."""
    captures = wanted.score_mod.captures if isinstance(wanted.score_mod, Traced) else ()
    return captures if wanted.sink is None else (*captures, wanted.sink)
