"""Keys that are chosen at run time: the blocks that a mask lists become the pages of sequences.

A block mask may list other blocks of keys for every token and every head. A tile of a kernel would
read what any of its 64 or more queries has chosen. So each row of blocks becomes a sequence of its
own, in paged memory, and its pages are the blocks that it lists:

    blocks of keys          0   1   2   3   4   5   6   7
    lists of a mask         row 0: 0      row 1: 4 0      row 2: 6 1 4
    page table                  0             0 4             1 4 6

Nothing is copied: a block of dense memory is a page where it lies. Time and memory are those of the
blocks that are listed. Mods get positions, through a table that says which block a page is. If a
mask has lists for heads, a sequence has the heads of one list: a group that reads one key head, if
all of the group choose alike, or else one head.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask import BlockMask
from quire.codegen.convention import MOST_ROWS
from quire.ir.trace import Kind, Traced, mod_name, trace
from quire.memory import Placed
from quire.memory.tables import Numbers, Sequences
from quire.mods.compose import noop_mask
from quire.request import Call, Problem
from quire.results import Result

TILE = 128
"""Queries and keys of a tile, about, for an estimate of what tiles would cost."""

LANES = 16
"""Queries that a panel computes at once, about."""

WORTH = 0.75
"""Choose if the blocks that are listed take at most this part of the time of the tiles."""

ROW_COST = 2
"""How much longer a score takes in the kernel for few queries, about."""


class Lists(NamedTuple):
    """The blocks that each row reads, ascending: [B or 1, heads, rows, most] of int32.

    An entry is twice the number of a block, and one more if the mask_mod decides in it. Rows are
    filled up with `end`. `heads` is 1, the number of key heads, or that of query heads.
    """

    entries: NDArray[np.int32]
    end: int

    @staticmethod
    def of(mask: BlockMask, columns: int, key_heads: int) -> Lists:
        """Return the lists of a mask for `columns` blocks of keys."""
        lists = [(mask.kv_num_blocks, mask.kv_indices, 1)]
        if full := mask._full_lists():
            lists.append((*full, 0))
        parts = []
        for counts, indices, partial in lists:
            some = counts.numpy(force=True)
            most = int(some.max(initial=0))
            blocks = indices[..., :most].numpy(force=True)
            there = (np.arange(most) < some[..., None]) & (blocks >= 0) & (blocks < columns)
            parts.append(np.where(there, blocks * 2 + partial, 2 * columns).astype(np.int32))
        entries = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        batch, heads, rows, most = entries.shape
        if heads > 1:
            groups = entries.reshape(batch, key_heads, heads // key_heads, rows, most)
            if (groups == groups[:, :, :1]).all():
                entries = groups[:, :, 0]
        return Lists(_ascending(entries, 2 * columns), 2 * columns)

    @property
    def counts(self) -> Numbers:
        """Return how many blocks each row reads: [B or 1, heads, rows]."""
        counts: Numbers = self.there.sum(-1)
        return counts

    @property
    def there(self) -> NDArray[np.bool_]:
        """Return which entries are blocks."""
        there: NDArray[np.bool_] = self.entries != self.end
        return there


def _ascending(entries: NDArray[np.int32], end: int) -> NDArray[np.int32]:
    """Sort the entries of each row; a block that is listed twice counts once, and as full."""
    if entries.shape[-1] == 0:
        return np.full((*entries.shape[:-1], 1), end, np.int32)
    later, earlier = entries[..., 1:], entries[..., :-1]
    if not ((later > earlier) | (later == end)).all():
        entries = np.sort(entries, -1)
        later, earlier = entries[..., 1:], entries[..., :-1]
    again = (later >> 1 == earlier >> 1) & (later != end)
    if again.any():
        later[again] = end  # the first of them is the full one
        entries = np.sort(entries, -1)
    most = int((entries != end).sum(-1).max(initial=0))
    return entries[..., : max(1, most)]


class Chosen(NamedTuple):
    """A call in which every row of blocks is a sequence.

    table [sequences, most] has the pages, places [sequences, most] the blocks that these are, and
    full [sequences, most] whether the mask_mod decides nothing in them.
    """

    sequences: Sequences
    table: Tensor
    places: Tensor
    full: Tensor | None
    page: int
    rows: int  # of blocks, for each list
    lists: int  # for each batch entry
    heads: int  # of a sequence
    origin: int  # the position of the first key
    steps: tuple[int, int, int]  # how many pages one batch entry, key head and block are

    # --- operands and results

    def placed(self, placed: Placed) -> Placed:
        """Return the operands of the call with these sequences."""
        query, key, value = placed.operands
        if _page_steps(key, self.page, self.lists) != self.steps or self.steps != _page_steps(
            value, self.page, self.lists
        ):
            key, value = key.contiguous(), value.contiguous()
        return Placed(
            query=self._rows(query.contiguous()),
            key=self._pages(key),
            value=self._pages(value),
            rows=self.sequences,
            page_table=self.table,
        )

    def _pages(self, x: Tensor) -> Tensor:
        """Return keys or values as pages; the first of them stands for all."""
        _, head, row, column = x.stride()
        unit = math.gcd(*_offsets(x, self.page, self.lists))
        heads = x.shape[1] if self.lists == 1 else 1
        return x.as_strided((1, heads, self.page, x.shape[3]), (unit, head, row, column))

    def _rows(self, x: Tensor) -> Tensor:
        """Return [B, Hq, L, ...] as rows [1, heads, rows, ...], in which heads overlap."""
        batch, every, length, *width = x.shape
        shape = (1, self.heads, (batch * every - self.heads + 1) * length, *width)
        return x.as_strided(shape, (0, *x.stride()[1:]))

    def results(self, results: Result) -> Result:
        """Return where a kernel writes results: in these tensors, or in new ones."""
        parts = {name: self._rows(x.contiguous()) for name, x in results.by_query.items()}
        return Result(**parts)

    def finish(self, results: Result, written: Result) -> None:
        """Copy results that were written elsewhere."""
        for name, x in results.by_query.items():
            if not x.is_contiguous():
                x.copy_(written.by_query[name].as_strided(x.shape, x.contiguous().stride()))

    # --- mods

    def problem(self, problem: Problem, placed: Placed) -> Problem:
        """Return the problem of the call with these sequences."""
        score, mask, partial = problem.score_mod, problem.mask_mod, problem.partial_mod
        block_mask = problem.block_mask
        if block_mask is not None and block_mask.mask_mod is noop_mask:
            partial = None

        def masked(*args: Any) -> Any:
            shown = [self._at(mod, args) for mod in (mask, partial) if mod is not None]
            if partial is not None and self.full is not None:
                shown[-1] = self.full[args[0], args[3] // self.page] | shown[-1]
            return functools.reduce(operator.and_, shown)

        def scored(*args: Any) -> Any:
            return self._at(score, args)

        def traced(mod: Callable[..., Any], kind: Kind, name: str) -> Traced:
            found = trace(mod, kind, score_dtype=placed.dtype, device=placed.query.device)
            return Traced(found.output, found.captures, kind, name, found.lines)

        no_mask = mask is None and partial is None
        return problem._replace(
            block_mask=None,
            partial_mod=None,
            score_mod=None if score is None else traced(scored, "score", mod_name(score)),
            mask_mod=None if no_mask else traced(masked, "mask", "chosen"),
        )

    def _at(self, mod: Any, args: tuple[Any, ...]) -> Any:
        """Call a mod of the user's with the numbers of the batch entry, the head and the key."""
        *others, sequence, h, q_idx, kv_idx = args
        b = sequence // (self.lists * self.rows)
        if self.lists > 1:
            h = sequence // self.rows % self.lists * self.heads + h
        first = self.places[sequence, kv_idx // self.page].long() * self.page + self.origin
        return mod(*others, b, h, q_idx, first + kv_idx % self.page)


def _offsets(x: Tensor, page: int, lists: int) -> tuple[int, int, int]:
    """Return how many elements apart batch entries, key heads and blocks of keys are."""
    batch, head, row, _ = x.stride()
    return batch if x.shape[0] > 1 else 0, head if lists > 1 else 0, page * row


def _page_steps(x: Tensor, page: int, lists: int) -> tuple[int, int, int]:
    """Return the same in pages: any two may overlap."""
    batch, head, block = _offsets(x, page, lists)
    unit = math.gcd(batch, head, block)
    return (batch // unit, head // unit, block // unit) if unit else (0, 0, 0)


def choose(call: Call) -> Chosen | None:
    """Return the call in which rows of blocks are sequences; None if tiles are quicker."""
    request, placed, problem, *_ = call
    mask = problem.block_mask
    if mask is None or request.sink is not None or not _can_choose(mask, problem, placed):
        return None
    kv_len, size = placed.lengths[1], mask.BLOCK_SIZE
    columns = -(-kv_len // size[1])
    lists = Lists.of(mask, columns, placed.key.shape[1])
    if not _is_worth(lists, size, placed.lengths):
        return None
    return _chosen(lists, size, placed)


def _can_choose(mask: BlockMask, problem: Problem, placed: Placed) -> bool:
    return (
        placed.is_dense
        and mask.BLOCK_SIZE[0] < MOST_ROWS  # larger ones have the bits of a mask without blocks
        and mask._runs is None
        and mask.kv_indices.dim() == 4
        and not mask.is_endless
        and problem.dropout is None
        and 0 not in (*placed.query.shape, *placed.key.shape, *placed.value.shape)
        and not (placed.key.shape[0] == 1 < placed.batches)  # gathered for each batch entry
    )


def _is_worth(lists: Lists, size: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """Return whether the listed blocks take less time than tiles that hold them, by an estimate."""
    (q_size, kv_size), q_len = size, lengths[0]
    counts = lists.counts
    cost = int(counts.sum()) * q_size * kv_size * _score_cost(min(q_size, q_len), q_len)
    tall, wide = max(TILE, q_size), max(TILE, kv_size)
    row = np.arange(counts.shape[-1]) * q_size // tall
    tiles = np.zeros((*counts.shape[:2], row[-1] + 1, lists.end * kv_size // wide + 2), np.bool_)
    column = (lists.entries >> 1) * kv_size // wide
    b, h, at = np.ogrid[: counts.shape[0], : counts.shape[1], : counts.shape[2]]
    column = np.where(lists.there, column, -1)
    tiles[b[..., None], h[..., None], row[at][..., None], column] = True
    area = int(tiles[..., :-1].sum()) * wide * min(tall, q_len)
    return cost <= WORTH * area


def _score_cost(queries: int, q_len: int) -> float:
    """Return how long a score takes if a sequence has so many queries; in a tile it takes 1."""
    if queries <= MOST_ROWS:
        return ROW_COST if q_len > MOST_ROWS else 1
    return -(-queries // LANES) * LANES / queries


def _chosen(lists: Lists, size: tuple[int, int], placed: Placed) -> Chosen | None:
    """Return the sequences of all lists, by batch entry, by list, by row."""
    (q_size, kv_size), (q_len, kv_len) = size, placed.lengths
    batch, all_heads, *_ = placed.query.shape
    num_lists, rows, most = lists.entries.shape[1], -(-q_len // q_size), lists.entries.shape[3]
    shape = (batch, num_lists, rows, most)
    lists = lists._replace(entries=np.broadcast_to(lists.entries[:, :, :rows], shape))
    page = min(kv_size, kv_len)
    blocks = np.where(lists.there, lists.entries >> 1, 0)
    steps = _page_steps(placed.key, page, num_lists)
    if steps != _page_steps(placed.value, page, num_lists):
        steps = _page_steps(torch.empty(placed.key.shape, device="meta"), page, num_lists)
    key_head = np.arange(num_lists) * placed.key.shape[1] // num_lists
    first = np.arange(batch)[:, None] * steps[0] + key_head * steps[1]
    table = blocks.astype(np.int64) * steps[2] + first[..., None, None]
    if table.max(initial=0) >= 2**31:
        return None
    decided = lists.entries & 1 == 0
    every = torch.from_numpy(decided.reshape(-1, most))
    return Chosen(
        sequences=_sequences(lists, blocks, placed, q_size, page),
        table=torch.from_numpy(table.astype(np.int32).reshape(-1, most)),
        places=torch.from_numpy(blocks.astype(np.int32).reshape(-1, most)),
        full=every if decided[lists.there].any() else None,
        page=page,
        rows=rows,
        lists=num_lists,
        heads=all_heads // num_lists,
        origin=placed.one.kv_begin,
        steps=steps,
    )


def _sequences(
    lists: Lists, blocks: NDArray[np.int32], placed: Placed, q_size: int, page: int
) -> Sequences:
    """Return the rows of each sequence; those of its queries are counted through all heads."""
    q_len, kv_len = placed.lengths
    counts = lists.counts
    batch, num_lists, rows = counts.shape
    last = (blocks.max(-1) == -(-kv_len // page) - 1) & (counts > 0)  # it may be a shorter block
    first = np.arange(rows) * q_size
    head = np.arange(batch * num_lists) * (placed.query.shape[1] // num_lists)
    zeros = np.zeros(counts.size, np.int64)
    return Sequences(
        b=np.arange(counts.size),
        q_len=np.tile(np.minimum(q_size, q_len - first), batch * num_lists),
        q_start=np.tile(placed.one.q_start + first, batch * num_lists),
        kv_begin=zeros,
        kv_end=(counts * page - np.where(last, -kv_len % page, 0)).ravel(),
        q_row=(head[:, None] * q_len + first).ravel(),
        kv_row=zeros,
    )
