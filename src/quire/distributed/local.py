"""What one rank computes: its own queries over the keys that it has.

A forward pass is a paged call. Blocks are pages, chunks of the rank are sequences with their own
q_start, and blocks that nobody sent are holes in the page table.

In a backward pass, blocks are gathered side by side, and mods find positions in two lookups. The
gradients of keys then take memory for the keys that the rank has, not for the whole sequence.
Pieces of keys (`codegen/phases/order.py`) hold the same keys in both cases, so results have the
bits of one process.

Where PyTorch computes, as on all devices but the CPU, blocks are gathered in the same way, and
autograd records the gathering and the sending.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.codegen.convention import KEYS_OF_PIECE
from quire.config import config
from quire.distributed.context_plan import ContextPlan
from quire.distributed.exchange import Sending, spread
from quire.distributed.reads import Numbers
from quire.ir.graph import inputs
from quire.ir.trace import Kind, Mod, Traced, mod_name, trace
from quire.memory import Dense, Paged, Placed, Queries, Ragged
from quire.memory.tables import packed, unpacked
from quire.mods.compose import Mask, ScoreChange
from quire.mods.dropout import Dropout, keep_mask
from quire.plans import CallPlan, candidates, make, operand_layout
from quire.request import Call, Request, call_of, check
from quire.results import Gradients, Result, Wanted

WORTH_A_CALL = 2**18
"""Bytes to receive: while they are on their way, queries that read own keys are computed."""

Chunks: TypeAlias = tuple[tuple[int, int], ...]


def compute_in_pages(plan: ContextPlan, wanted: Request, query: Tensor, sending: Sending) -> Result:
    """Return the results of this rank's queries [B, Hq, tokens, D], without autograd.

    If some queries read only own keys, they come first, while other keys are on their way. A row
    has the same bits in any call, so nothing is merged.
    """
    route, (home, away) = plan.route(len(query)), plan.chunks_at_home
    size = sum(x[0].nbytes for x in sending.pages if len(x)) * (route.num_pages - route.num_own)
    if away and (not home or size < WORTH_A_CALL):
        return _in_pages(plan, wanted, query, sending.wait(), chunks=plan.chunks)
    early = _in_pages(plan, wanted, query, sending.pages, chunks=home, at_home=True)
    if not away:
        sending.wait()
        return early
    found = _in_pages(plan, wanted, query, sending.wait(), chunks=away)
    into, given, chunks = found, early, home
    if sum(stop - start for start, stop in home) > len(plan.rows) // 2:
        into, given, chunks = early, found, away
    for start, stop in plan.places(chunks).tolist():
        for name, rows in into.by_query.items():
            rows[:, :, start:stop] = given.by_query[name][:, :, start:stop]
    return into


def computes_in_blocks(request: Request) -> bool:
    """Return whether PyTorch computes a request, from dense blocks: it has no pages of ours."""
    is_pytorch = candidates(request.backend).names == ("inductor",)
    return request.query.device.type != "cpu" or is_pytorch


def compute_in_blocks(plan: ContextPlan, wanted: Request, call: Call) -> Result:
    """Return the results of this rank's queries over dense blocks. Autograd records all of it."""
    query, key, value = call.placed[:3]
    side = SideBySide.of(plan, len(query))
    local, there = side.call(wanted, query, *spread(plan, key, value))
    return local.run(there)


def _in_pages(
    plan: ContextPlan,
    wanted: Request,
    query: Tensor,
    pages: tuple[Tensor, ...],
    *,
    chunks: Chunks,
    at_home: bool = False,
) -> Result:
    """Return results of which those of some chunks count, which may read only pages `at_home`.

    Keys and values are pages [pages, Hkv, block, D]; options and mods are those of `wanted`. A call
    like an earlier one is not planned again.
    """
    (key, value), (batch, _, count, _) = pages, query.shape
    rows = query.transpose(1, 2).flatten(0, 1)
    name, operands = (chunks, at_home, batch), (packed(rows), key, value)
    layout = _layout_of(plan, wanted, operands)
    known = None if layout is None else plan.calls.get((name, layout))
    if known is None:
        known = _paged_call(plan, wanted, rows, pages, *name)
        if layout is not None:
            plan.calls.keep((name, layout), (known[0], _without_operands(known[1])))
    plan_of_rank, call = known
    request = call.request._replace(sink=wanted.sink)
    call = call._replace(request=request, placed=call.placed.on(*operands))
    result = plan_of_rank.forward(call) if wanted.learns else plan_of_rank.run(call)
    return Result(
        **{
            name: unpacked(x).unflatten(0, (batch, count)).transpose(1, 2)
            for name, x in result.by_query.items()
        }
    )


def _layout_of(
    plan: ContextPlan, wanted: Request, operands: tuple[Tensor, Tensor, Tensor]
) -> object:
    """Return all that the plan of a call over pages depends on, except pages and chunks.

    Return None if it must be planned anew: it captures tensors that the plan does not have, or has
    rare options.
    """
    score_mod, sink = wanted.score_mod, wanted.sink
    if (
        wanted.mask_mod is not plan.mask
        or (score_mod is not None and (not isinstance(score_mod, Traced) or score_mod.captures))
        or wanted.dropout_p
        or wanted.backend != "auto"
        or config().backend != "auto"
    ):
        return None
    layout = operand_layout(*operands)
    if layout is None:
        return None
    score = None if score_mod is None else score_mod.output
    of_sink = None if sink is None else (sink.shape, sink.dtype)
    return (*layout, score, of_sink, wanted.scale, wanted.aux, wanted.weighting, wanted.learns)


def _without_operands(call: Call) -> Call:
    """Return a call that keeps no operand alive.

    Its tables do not change, so they count as known. Rows of no chunk are then left as they are:
    `compute_in_pages` takes them from another call.
    """
    request = call.request._replace(query=_EMPTY, memory=Dense(_EMPTY, _EMPTY), sink=None)
    placed = call.placed.on(_EMPTY, _EMPTY, _EMPTY)._replace(content=((), ()))
    return call._replace(request=request, placed=placed)


def _paged_call(
    plan: ContextPlan,
    wanted: Request,
    rows: Tensor,
    pages: tuple[Tensor, ...],
    chunks: Chunks,
    at_home: bool,
    batch: int,
) -> tuple[CallPlan, Call]:
    """Return a paged call with a sequence for each chunk of each batch entry, and its plan."""
    (key, value), route, count = pages, plan.route(batch), len(rows) // max(1, batch)
    numbers = route.table
    if at_home:
        numbers = np.where(numbers < route.num_own, numbers, -1)
    starts = np.array([start for start, _ in chunks], np.int64)
    first, stop = plan.places(chunks).T
    offsets = [*(np.arange(batch)[:, None] * count + first).ravel().tolist(), batch * count]
    entries, table = plan.sequences_of(starts, numbers)
    lengths = plan.blocks.lengths[entries if plan.is_ragged else np.zeros_like(entries)]
    begins = np.tile(starts, batch) - (plan.blocks.begins[entries] if plan.is_ragged else 0)
    pages_of_chunks = torch.from_numpy(table.astype(np.int32))
    memory = Paged(key, value, pages_of_chunks, lengths=lengths.tolist())
    queries = Queries(begins.tolist(), offsets, np.tile(stop - first, batch).tolist())
    request = wanted._replace(query=rows, memory=memory, queries=queries)
    return made(request, Lookups(entries=torch.from_numpy(entries)))


class SideBySide(NamedTuple):
    """The blocks that queries of a rank read, in their order, as dense or ragged keys and values.

    `pages` [B, blocks] is the page of each, or -1 if nobody sent it. Its keys are the rows `rows`
    of the whole, and begin at `columns[n] * block` here if it is block n of one sequence.
    """

    plan: ContextPlan
    blocks: Numbers
    pages: Tensor
    rows: Tensor
    columns: Numbers

    @staticmethod
    def of(plan: ContextPlan, batch: int) -> SideBySide:
        """Return the blocks for a batch of `batch` entries."""
        route = plan.route(batch)
        blocks = _whole_pieces(route.needed, plan)
        columns = np.zeros(plan.num_blocks, np.int64)
        columns[blocks] = np.arange(len(blocks))
        pages = torch.from_numpy(route.table[:, blocks])
        return SideBySide(plan, blocks, pages, plan.blocks.rows(blocks), columns)

    @property
    def batch(self) -> int:
        """Return the number of batch entries."""
        return len(self.pages)

    def gathered(self, pages: Tensor) -> Tensor:
        """Return pages [pages, H, block, D] side by side: [B, H, keys, D]."""
        numbers = self.pages.flatten()
        chosen = pages.index_select(0, numbers.clamp(min=0).to(pages.device))
        missing = numbers < 0
        if missing.any():
            chosen = chosen.masked_fill(missing.view(-1, 1, 1, 1).to(pages.device), 0)
        rows = chosen.view(*self.pages.shape, *pages.shape[1:]).transpose(1, 2).flatten(2, 3)
        if self.plan.is_ragged:
            return rows.index_select(2, self._lines(rows))
        return rows[:, :, : len(self.rows)]

    def scattered(self, rows: Tensor) -> Tensor:
        """Return rows [B, H, keys, D] as pages: what `gathered` is the transpose of."""
        route, block = self.plan.route(self.batch), self.plan.block
        places = self.pages.shape[1] * block
        if self.plan.is_ragged:
            empty = rows.new_zeros((*rows.shape[:2], places, rows.shape[3]))
            whole = empty.index_copy(2, self._lines(rows), rows)
        else:
            whole = torch.nn.functional.pad(rows, (0, 0, 0, places - rows.shape[2]))
        parts = whole.unflatten(2, (self.pages.shape[1], block)).transpose(1, 2).flatten(0, 1)
        pages: Tensor = parts.new_zeros((route.num_pages, *parts.shape[1:]))
        numbers = self.pages.flatten()
        there = (numbers >= 0).nonzero().flatten()
        at, of_parts = numbers[there].to(rows.device), there.to(rows.device)
        return pages.index_add(0, at, parts.index_select(0, of_parts))

    def _lines(self, rows: Tensor) -> Tensor:
        """Return where the keys of several sequences lie in their blocks."""
        return self.plan.blocks.lines(self.blocks).to(rows.device)

    def call(self, wanted: Request, query: Tensor, *pages: Tensor) -> tuple[CallPlan, Call]:
        """Return the plan and the call of this rank's queries over the blocks."""
        key, value = (self.gathered(x) for x in pages)
        if self.plan.is_ragged:
            return self._ragged_call(wanted, query, key, value)
        lookups = Lookups(queries=self.plan.rows.int(), keys=self.rows.int())
        request = wanted._replace(query=query, memory=Dense(key, value), queries=Queries(start=0))
        return made(request, lookups.to(query.device))

    def _ragged_call(
        self, wanted: Request, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[CallPlan, Call]:
        """Return the call of the sequences of which this rank has queries."""
        plan = self.plan
        counts = [np.diff(plan.offsets), plan.blocks.tokens_of(self.blocks)]
        there = np.flatnonzero(counts[0]) if len(plan.rows) else np.arange(1)
        firsts = [np.concatenate([[0], np.cumsum(x[there])]) for x in counts]
        of_query, of_keys = (torch.from_numpy(x[:-1].astype(np.int32)) for x in firsts)
        lookups = Lookups(
            entries=torch.from_numpy(there.astype(np.int32)),
            queries=plan.positions.int(),
            keys=plan.blocks.positions(self.rows).int(),
            first_query=of_query,
            first_key=of_keys,
        )
        memory = Ragged(unpacked(key), unpacked(value), firsts[1].tolist())
        queries = Queries([0] * len(there), firsts[0].tolist())
        request = wanted._replace(query=unpacked(query), memory=memory, queries=queries)
        return made(request, lookups.to(query.device))


def _whole_pieces(blocks: Numbers, plan: ContextPlan) -> Numbers:
    """Return the blocks of all pieces of the kernel that hold one of these blocks.

    So pieces hold the same keys as in one process, which makes the same bits.
    """
    piece = math.lcm(plan.block, KEYS_OF_PIECE)
    unit = plan.blocks.first // piece
    begins = np.diff(unit, prepend=-1) != 0
    begins |= np.diff(plan.blocks.sequence, prepend=-1) != 0
    unit = np.cumsum(begins) - 1
    whole: Numbers = np.flatnonzero(np.isin(unit, unit[blocks]))
    return whole


# --- mods -----------------------------------------------------------------------------------------


class Lookups(NamedTuple):
    """What mods are told: the batch entry of `b`, the head of `h`, the positions of q_idx, kv_idx.

    None stands for the number itself. If there are several sequences, the tables of positions
    begin for each at `first_query` and `first_key` [b].
    """

    entries: Tensor | None = None
    heads: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    first_query: Tensor | None = None
    first_key: Tensor | None = None

    def to(self, device: torch.device) -> Lookups:
        """Return the tables on a device."""
        return Lookups(*(None if x is None else x.to(device) for x in self))

    def mapped(self, mod: Mod, kind: Kind) -> Mod:
        """Return a mod that looks up its indices, and calls `mod` with what it finds."""
        named = zip(("b", "h", "q_idx", "kv_idx"), self, strict=False)
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
    first_query: Tensor | None,
    first_key: Tensor | None,
) -> Tensor:
    *score, b, h, q_idx, kv_idx = args
    if first_query is not None and first_key is not None:
        q_idx, kv_idx = q_idx + first_query[b], kv_idx + first_key[b]
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
    def of(plan: CallPlan, call: Call, captures: tuple[Tensor, ...]) -> LocalCall:
        """Return the call, whose results belong to a user's call with these captures."""
        numbers = {id(x): n for n, x in reversed([*enumerate(captures)])}
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
