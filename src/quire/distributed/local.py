"""What one rank computes: its own queries over the keys that it has.

Without gradients it is one paged call. Blocks are pages, chunks of the rank are sequences with
their own q_start, and blocks that nobody sent are the page of zeros, which the mask hides.

If autograd records, blocks are gathered side by side, and mods find positions in two lookups. The
gradients of keys then take memory for the keys that the rank has, not for the whole sequence.
Pieces of keys (`codegen/phases/order.py`) hold the same keys in both cases, so results have the
bits of one process.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.codegen.convention import KEYS_OF_PIECE
from quire.distributed.context_plan import ContextPlan
from quire.distributed.reads import Numbers
from quire.ir.graph import inputs
from quire.ir.trace import Kind, Mod, Traced, mod_name, trace
from quire.memory import Dense, Paged, Placed, Queries
from quire.mods.compose import Mask, ScoreChange
from quire.mods.dropout import Dropout, keep_mask
from quire.plans import CallPlan, make
from quire.request import Call, Request, call_of, check
from quire.results import Gradients, Result, Wanted


def compute_in_pages(
    plan: ContextPlan, wanted: Request, query: Tensor, key: Tensor, value: Tensor
) -> Result:
    """Return the results of this rank's queries [B, Hq, tokens, D], without autograd.

    Keys and values are pages [pages, block, Hkv, D]; options and mods are those of `wanted`. It is
    one paged call with a sequence for each chunk of each batch entry.
    """
    batch, _, count, _ = query.shape
    route, num_chunks = plan.route(batch), len(plan.chunks)
    starts, stops = np.array(plan.chunks).reshape(num_chunks, 2).T
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
    rows = query.transpose(1, 2).flatten(0, 1)
    queries = Queries(starts.tolist() * batch, offsets)
    plan_of_rank, call = made(
        wanted._replace(query=rows, memory=memory, queries=queries), Lookups(entries=entries)
    )
    return Result(
        **{
            name: memory.as_given(rows, x).unflatten(0, (batch, count)).transpose(1, 2)
            for name, x in plan_of_rank.run(call).by_query.items()
        }
    )


class SideBySide(NamedTuple):
    """The blocks that queries of a rank read, in the order of positions, as dense keys and values.

    `pages` [B, blocks] is the page of each; its keys have the positions `positions`. Block n of the
    sequence is the block `columns[n]` here.
    """

    plan: ContextPlan
    pages: Tensor
    positions: Tensor
    columns: Numbers

    @staticmethod
    def of(plan: ContextPlan, batch: int) -> SideBySide:
        """Return the blocks for a batch of `batch` entries."""
        route = plan.route(batch)
        blocks = _whole_pieces(route.needed, plan)
        places = torch.arange(plan.block) + torch.from_numpy(blocks * plan.block).unsqueeze(1)
        positions = places.flatten()
        columns = np.zeros(plan.num_blocks, np.int64)
        columns[blocks] = np.arange(len(blocks))
        pages = torch.from_numpy(route.table[:, blocks])
        return SideBySide(plan, pages, positions[positions < plan.length], columns)

    @property
    def batch(self) -> int:
        """Return the number of batch entries."""
        return len(self.pages)

    def gathered(self, pages: Tensor) -> Tensor:
        """Return pages [pages, block, H, D] side by side: [B, H, keys, D]."""
        chosen = pages.index_select(0, self.pages.flatten())
        rows = chosen.view(*self.pages.shape, *pages.shape[1:]).flatten(1, 2).transpose(1, 2)
        return rows[:, :, : len(self.positions)]

    def scattered(self, rows: Tensor) -> Tensor:
        """Return rows [B, H, keys, D] as pages: what `gathered` is the transpose of."""
        route, block = self.plan.route(self.batch), self.plan.block
        missing = self.pages.shape[1] * block - rows.shape[2]
        whole = torch.nn.functional.pad(rows, (0, 0, 0, missing)).transpose(1, 2)
        parts = whole.unflatten(1, (self.pages.shape[1], block)).flatten(0, 1)
        pages: Tensor = parts.new_zeros((route.zeros + 1, *parts.shape[1:]))
        return pages.index_add(0, self.pages.flatten(), parts)

    def call(self, wanted: Request, query: Tensor, *pages: Tensor) -> tuple[CallPlan, Call]:
        """Return the plan and the call of this rank's queries over the blocks."""
        key, value = (self.gathered(x) for x in pages)
        lookups = Lookups(queries=self.plan.positions.int(), keys=self.positions.int())
        request = wanted._replace(query=query, memory=Dense(key, value), queries=Queries(start=0))
        return made(request, lookups)

    def with_positions(self, result: Result) -> Result:
        """Return results whose argmax is a position in the whole sequence."""
        if result.argmax is None or not len(self.positions):
            return result
        found = self.positions[result.argmax.clamp(min=0)]
        return result._replace(argmax=torch.where(result.argmax < 0, -1, found))


def _whole_pieces(blocks: Numbers, plan: ContextPlan) -> Numbers:
    """Return the blocks of all pieces of the kernel that hold one of these blocks.

    So pieces hold the same keys as in one process, which makes the same bits.
    """
    in_unit = math.lcm(plan.block, KEYS_OF_PIECE) // plan.block
    units = np.unique(blocks // in_unit)
    whole: Numbers = (units[:, None] * in_unit + np.arange(in_unit)).ravel()
    return whole[whole < plan.num_blocks]


# --- mods -----------------------------------------------------------------------------------------


class Lookups(NamedTuple):
    """What mods are told: the batch entry of `b`, the head of `h`, the positions of q_idx, kv_idx.

    None stands for the number itself.
    """

    entries: Tensor | None = None
    heads: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None

    def mapped(self, mod: Mod, kind: Kind) -> Mod:
        """Return a mod that looks up its indices, and calls `mod` with what it finds."""
        named = zip(("b", "h", "q_idx", "kv_idx"), self, strict=True)
        moved = {name for name, table in named if table is not None}
        if not moved or (isinstance(mod, Traced) and not moved & inputs(mod.output)):
            return mod
        of_kind = Mask if kind == "mask" else ScoreChange
        return of_kind(_looked_up, mod_name(mod), mod=mod, **self._asdict())


def _looked_up(
    *args: Tensor,
    mod: Mod,
    entries: Tensor | None,
    heads: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
) -> Tensor:
    *score, b, h, q_idx, kv_idx = args
    place = (_at(entries, b), _at(heads, h), _at(queries, q_idx), _at(keys, kv_idx))
    found: Tensor = mod(*score, *place)
    return found


def _at(table: Tensor | None, index: Tensor) -> Tensor:
    return index if table is None else table[index]


def made(request: Request, lookups: Lookups) -> tuple[CallPlan, Call]:
    """Return the plan and the call of a request whose mods look up their indices."""
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
    return make(call)


class LocalCall(NamedTuple):
    """A call that this rank computes for a user's call, without its operands.

    Its mods capture tables of positions beside what the user's mods capture: `given` has the number
    of the user's tensor for each that is one.
    """

    plan: CallPlan
    placed: Placed
    captures: tuple[Tensor, ...]
    given: dict[int, int]

    @staticmethod
    def of(plan: CallPlan, call: Call, user: Call) -> LocalCall:
        """Return the call, whose results belong to the call of a user."""
        numbers = {id(x): n for n, x in reversed([*enumerate(user.captures)])}
        given = {n: numbers[id(x)] for n, x in enumerate(call.captures) if id(x) in numbers}
        return LocalCall(plan, call.placed.on(_EMPTY, _EMPTY, _EMPTY), call.captures, given)

    def wanted(self, wanted: Wanted) -> Wanted:
        """Return which gradients of this call the user wants."""
        captures = tuple(
            wanted.captures[self.given[n]] if n in self.given else x
            for n, x in enumerate(self.captures)
        )
        learned = tuple(n for n in range(len(captures)) if self.given.get(n) in wanted.learned)
        return Wanted(wanted.query, wanted.key, wanted.value, captures, learned)

    def captured(self, found: Gradients, wanted: Wanted) -> list[Tensor | None]:
        """Return the gradients of the user's captures from those of this call."""
        grads: list[Tensor | None] = [None] * len(wanted.captures)
        for n, grad in enumerate(found.captures):
            if grad is not None:
                grads[self.given[n]] = grad
        return grads


_EMPTY = torch.empty(0, device="cpu")
