"""Gradients for block masks that list few and scattered blocks: each block of keys is a sequence.

The tiles of the backward kernel are 128 x 128. If every token lists its own blocks of keys, a tile
computes what any of its queries has listed. So lists are turned around: for each block of keys, the
queries that list it are copied side by side, and become a sequence of their own.

    lists of a mask         row 0: 0      row 1: 0 4      row 2: 1 4
    block of keys 0         queries of rows 0, 1
    block of keys 1         queries of row 2
    block of keys 4         queries of rows 1, 2

The gradients of keys and values add up where these keys are. Those of copied queries are added up
for each query, in the order of its blocks. Mods get the batch entry, head and position of a query
through tables. Copies are made for some sequences at a time, so that they take little memory.
In ragged and paged memory the listed keys are copied, too, and their gradients are added where
these keys are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from quire.block_mask import BlockRows
from quire.block_mask.blocks import FULL, PARTIAL
from quire.codegen.convention import BLOCK_Q, GRADIENTS, GRADIENTS_PART
from quire.ir.trace import Kind, Traced, mod_name, trace
from quire.memory import One, Placed
from quire.memory.tables import Numbers, Sequences
from quire.request import Problem
from quire.results import Above, Gradients, Result, Wanted
from quire.runtime.blocks import num_tiles
from quire.runtime.launch import Records, num_products, table_of
from quire.runtime.mods import graphs_of
from quire.runtime.prepare import make_launcher, row_strides
from quire.runtime.slices import ALL_BLOCKS

LANES = 64
"""Queries of a panel, about, for an estimate of what copied queries cost."""

COPY_COST = 10
"""Copying a query and its gradients takes as long as so many of its scores, about."""

WORTH = 0.8
"""Copy queries if that takes at most this part of the time of the tiles."""

MOST_BYTES = 2**25
"""How much the copies of queries take at most, unless one block of keys needs more."""


class Listed(NamedTuple):
    """The blocks of a mask that one kind and one query head of each key head list: each column [n].

    They are sorted by batch entry, list, block of keys, then by row of blocks.
    """

    b: Numbers
    head: Numbers  # the number of the list
    column: Numbers
    row: Numbers

    def sequences(self) -> Numbers:
        """Return where each block of keys begins, and the end."""
        new = np.zeros(len(self.b), np.bool_)
        new[:1] = True
        for x in (self.b, self.head, self.column):
            new[1:] |= x[1:] != x[:-1]
        return np.append(np.flatnonzero(new), len(new))


def gradients(
    problem: Problem, placed: Placed, blocks: BlockRows, wanted: Wanted, above: Above
) -> Gradients | None:
    """Return the gradients of query, key and value; None if torch ops have to compute them."""
    return _Backward(problem, placed, blocks, wanted, above).gradients()


def turned(
    problem: Problem, placed: Placed, blocks: BlockRows, *, learns: bool
) -> NDArray[np.bool_]:
    """Return for each batch entry of the lists whether copied queries take less time than tiles.

    This is an estimate from the lists of the entry alone: its gradients have the same bits in every
    batch. `learns` says that gradients of captured tensors are wanted, which only tiles give.
    """
    runs = blocks.runs
    batches, heads, _, columns = runs.shape
    if (
        learns
        or placed.key_scale is not None
        or placed.value_scale is not None
        or (placed.is_dense and placed.key.shape[0] != placed.query.shape[0])
        or 0 in (*placed.query.shape, *placed.key.shape, *placed.value.shape)
    ):
        return np.zeros(batches, np.bool_)
    q_size, kv_size = blocks.block_size
    tall, wide = max(LANES, q_size), max(LANES, kv_size)  # panels skip the keys that none reads
    area = num_tiles(runs, blocks.block_size, tall, wide) * wide * tall
    lists = runs.row_ids() // max(1, runs.shape[2])
    # Blocks of keys that few queries list leave lanes of panels empty.
    begun, ended = (
        np.bincount(lists * (columns + 1) + x, minlength=batches * heads * (columns + 1))
        for x in (runs.starts, runs.stops)
    )
    rows = -(-np.cumsum(begun - ended) * q_size // LANES) * LANES
    copied = rows.reshape(batches, -1).sum(1) * (kv_size + COPY_COST)
    worth: NDArray[np.bool_] = copied <= WORTH * area
    return worth


class _Backward:
    """One backward pass: its tensors, and the sums of its gradients."""

    def __init__(
        self, problem: Problem, placed: Placed, blocks: BlockRows, wanted: Wanted, above: Above
    ) -> None:
        self.problem, self.placed, self.blocks, self.wanted = problem, placed, blocks, wanted
        self.above, self.dtype = above, above.lse.dtype
        query, key, value = placed.operands
        self.heads, self.key_heads = query.shape[1], key.shape[1]
        self.rows, self.origin = _entries(placed), placed.rows.kv_origin
        out, lse, grad_out, grad_lse = above[:4]
        self.grad_out = out.new_zeros(out.shape) if grad_out is None else grad_out.to(self.dtype)
        self.delta = (self.grad_out * out.to(self.dtype)).sum(-1)
        if grad_lse is not None:
            self.delta = self.delta - grad_lse
        self.query = query.to(self.dtype).reshape(-1, query.shape[3])
        self.grads = self.grad_out.reshape(-1, value.shape[3])
        self.numbers = [x.reshape(-1) for x in (lse, -self.delta)]
        self.flat = key, value
        if placed.is_dense:
            self.flat = key.reshape(1, 1, -1, key.shape[3]), value.reshape(1, 1, -1, value.shape[3])
        self.flags = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.sums: dict[str, Tensor] = {}

    def gradients(self) -> Gradients | None:
        """Compute all sequences, and return the sums of their gradients."""
        wanted, scale = self.wanted, self.problem.scale
        total = torch.zeros_like(self.query) if wanted.query else None
        for kind, listed in self._lists():
            problem = self._without_blocks(kind)
            for part in self._chunks(listed):
                self._add(problem, part, total)
        not_finite, far = self.flags.tolist()
        if not_finite or (far and self.above.whole):
            return None
        query, key, value = self.placed.operands
        return Gradients(
            query=None if total is None else (total * scale).to(query.dtype).view(query.shape),
            key=self._total("grad_key", key, scale) if wanted.key else None,
            value=self._total("grad_value", value, 1.0) if wanted.value else None,
            captures=(None,) * len(wanted.captures),
            delta=self.delta,
            lse=self.above.lse,
        )

    def _total(self, name: str, like: Tensor, scale: float) -> Tensor:
        """Return the gradient of keys or values from its sums."""
        sums = self.sums.get(name)
        if sums is None:  # nothing is listed
            return torch.zeros(like.shape, dtype=self.dtype, device="cpu")
        return (sums[..., : like.shape[3]] * scale).reshape(like.shape)

    # --- lists

    def _lists(self) -> Iterator[tuple[int, Listed]]:
        """Yield what is listed, so that no two lists of one kind have the same keys."""
        runs = self.blocks.runs.by_group(self.key_heads)
        widths = runs.stops - runs.starts
        lists, row = np.divmod(runs.row_ids().repeat(widths), runs.shape[2])
        b, head = np.divmod(lists, runs.shape[1])
        column = np.arange(len(row)) + (runs.starts - np.cumsum(widths) + widths).repeat(widths)
        kinds, own = runs.kinds.repeat(widths), runs.shape[1]
        per_key_head = max(1, own // self.key_heads)
        for kind in (PARTIAL, FULL):
            for turn in range(per_key_head):
                mine = (kinds == kind) & (head % per_key_head == turn)
                found = Listed(b[mine], head[mine], column[mine], row[mine])
                found = self._inside(self._for_all(found, runs.shape[0] == 1, own == 1))
                if len(found.b):
                    yield kind, found

    def _inside(self, listed: Listed) -> Listed:
        """Return the blocks that have queries and keys of their sequence."""
        rows, (q_size, kv_size) = self.rows, self.blocks.block_size
        begin = listed.column * kv_size + self.origin
        there = listed.row * q_size < rows.q_len[listed.b]
        there &= (begin < rows.kv_end[listed.b]) & (begin + kv_size > rows.kv_begin[listed.b])
        return Listed(*(x[there] for x in listed))

    def _for_all(self, listed: Listed, same_batches: bool, same_heads: bool) -> Listed:
        """Repeat lists that stand for all batch entries or heads, and sort them."""
        b, head, column, row = listed
        if same_heads and self.key_heads > 1:
            head = np.arange(self.key_heads).repeat(len(b))
            b, column, row = (np.tile(x, self.key_heads) for x in (b, column, row))
        if same_batches and self.rows.num > 1:
            b = np.arange(self.rows.num).repeat(len(head))
            head, column, row = (np.tile(x, self.rows.num) for x in (head, column, row))
        order = np.lexsort((row, column, head, b))
        return Listed(b[order], head[order], column[order], row[order])

    def _chunks(self, listed: Listed) -> Iterator[Listed]:
        """Yield whole sequences, as many as copies of their queries may take memory."""
        ends = listed.sequences()
        width = max(self.query.shape[1], self.grads.shape[1]) * self.query.element_size()
        most = max(1, MOST_BYTES // (width * self.blocks.block_size[0] * self._group(listed)))
        start = 0
        while start < len(ends) - 1:
            stop = max(start + 1, int(np.searchsorted(ends, ends[start] + most, "right")) - 1)
            yield Listed(*(x[ends[start] : ends[stop]] for x in listed))
            start = stop

    def _group(self, listed: Listed) -> int:
        """Return how many query heads share a list."""
        own = self.blocks.runs.by_group(self.key_heads).shape[1]
        return self.heads // max(own, self.key_heads)

    # --- one launch

    def _add(self, problem: Problem, listed: Listed, total: Tensor | None) -> None:
        """Compute some sequences, and add what they give to all gradients."""
        group, (q_size, kv_size) = self._group(listed), self.blocks.block_size
        ends, every_row = listed.sequences(), self.placed.query.shape[2]
        counts = np.minimum(q_size, self.rows.q_len[listed.b] - listed.row * q_size)
        entry = np.arange(len(counts)).repeat(counts)
        rows = np.arange(len(entry)) - (np.cumsum(counts) - counts).repeat(counts)
        token = listed.row[entry] * q_size + rows
        before = np.concatenate([[0], np.cumsum(counts)])[ends]
        first, lengths = before[:-1], np.diff(before)
        b, head, column = (x[ends[:-1]] for x in listed[:3])
        begin = column * kv_size + self.origin
        sequences = Sequences(
            b=np.arange(len(b)),
            q_len=lengths,
            q_start=first,  # so that q_idx is the number of a copied query
            kv_begin=np.maximum(begin, self.rows.kv_begin[b]),
            kv_end=np.minimum(begin + kv_size, self.rows.kv_end[b]),
            q_row=first,
            kv_row=np.zeros_like(b),
        )
        keys = self._keys(b, head * group * self.key_heads // self.heads, sequences)
        sequences = sequences._replace(kv_row=keys.kv_row)
        place = self.rows.q_row[listed.b[entry]] + listed.head[entry] * group * every_row + token
        every = place + np.arange(group)[:, None] * every_row
        index = torch.from_numpy(every.ravel())
        position = self.rows.q_start[listed.b[entry]] + token
        tables = Tables(*(torch.from_numpy(x) for x in (self.rows.b[b], head * group, position)))
        copied = self._launch(problem, sequences, index, tables, keys=keys, group=group)
        if total is not None:
            _add_rows(total, copied.view(len(index), -1), every.ravel())

    def _keys(self, b: Numbers, head: Numbers, rows: Sequences) -> ListedKeys:
        """Return where the keys of sequences are, which are blocks of keys of an entry and head."""
        key, table = self.placed.key, self.placed.page_table
        if self.placed.is_dense:
            key_rows = (b * self.key_heads + head) * key.shape[2] - self.origin
            return ListedKeys(*self.flat, kv_row=key_rows)
        counts = rows.kv_len
        first = np.cumsum(counts) - counts
        of = np.arange(len(counts)).repeat(counts)
        position = np.arange(len(of)) + (rows.kv_begin - first)[of]
        page, row = np.zeros_like(of), position + self.rows.kv_row[b[of]]
        if table is not None:
            page, row = np.divmod(position, key.shape[2])
            page = table.numpy()[b[of], page].astype(np.int64)
        index = (page * self.key_heads + head[of]) * key.shape[2] + row
        places = tuple(torch.from_numpy(x) for x in (page, head[of], row))
        key, value = (x[places].view(1, 1, len(of), -1) for x in self.placed.operands[1:])
        return ListedKeys(key, value, first - rows.kv_begin, torch.from_numpy(index))

    def _launch(
        self,
        problem: Problem,
        rows: Sequences,
        index: Tensor,
        tables: Tables,
        keys: ListedKeys,
        group: int,
    ) -> Tensor:
        """Launch the kernel, and return the gradients of copied queries."""
        problem = tables.problem(problem, self.placed)
        shape = (1, group, len(index) // group)
        query = self.query.index_select(0, index).view(*shape, -1)
        grads = self.grads.index_select(0, index).view(*shape, -1)
        lse, grad_lse = (x.index_select(0, index).view(shape) for x in self.numbers)
        placed = Placed(query, keys.key, keys.value, rows)
        graphs, loaded = graphs_of(problem, self.dtype, placed.end)
        results = Result(grads, lse)
        options: dict[str, Any] = {"scale": problem.scale, "block_q": BLOCK_Q}
        launcher = make_launcher("backward", placed, results, graphs, loaded, **options)
        grad_query = torch.empty_like(query)
        fields: dict[str, int | float] = dict.fromkeys(GRADIENTS, 0)
        fields |= row_strides("grad_out", grads) | {"grad_out": grads.data_ptr()}
        fields |= {"grad_lse": grad_lse.data_ptr(), "odd": self.flags.data_ptr()}
        fields |= {"wants_slopes": int(self.wanted.scores), "slope_scale": 1.0}
        if self.wanted.query:
            fields |= row_strides("grad_query", grad_query) | {"grad_query": grad_query.data_ptr()}
        copied: dict[str, Tensor] = {}
        for side, width in zip(("key", "value"), launcher.terms.columns, strict=True):
            if getattr(self.wanted, side):
                sums = self._sums_of(f"grad_{side}", width)
                if keys.places is not None:
                    sums = copied[f"grad_{side}"] = sums.new_zeros(len(keys.places), width)
                fields |= {f"grad_{side}": sums.data_ptr(), f"grad_{side}_row": width}
        launcher.terms.check_gradients(fields)
        order = rows.largest_first()
        one = {"slices": np.ones_like(order), "slice_blocks": np.full_like(order, ALL_BLOCKS)}
        table = table_of(rows.where(order), np.arange(rows.num), one)
        records = Records(table, rows.num, num_products(placed, rows), rows.num)
        launcher.launch(placed, records, results, loaded, more=GRADIENTS_PART.pack(fields))
        for name, sums in copied.items():
            assert keys.places is not None, "keys were copied"
            self.sums[name].index_add_(0, keys.places, sums)
        return grad_query

    def _sums_of(self, name: str, width: int) -> Tensor:
        """Return the sums of the gradients of all keys or values: [B * Hkv * S, width]."""
        if name not in self.sums:
            shape = (self.placed.key.shape[:3].numel(), width)
            self.sums[name] = torch.zeros(shape, dtype=self.dtype, device="cpu")
        return self.sums[name]

    def _without_blocks(self, kind: int) -> Problem:
        """Return the problem of the blocks of one kind."""
        problem = self.problem
        partial = problem.partial_mod if kind == PARTIAL else None
        return problem._replace(block_mask=None, partial_mod=partial)


def _entries(placed: Placed) -> Sequences:
    """Return the positions of each batch entry, and the row of its first query in head 0."""
    rows = placed.rows
    if not isinstance(rows, One):
        return rows
    batch, heads, q_len, _ = placed.query.shape
    b = np.arange(batch)
    q_start, kv_begin, kv_end = (np.full_like(b, x) for x in rows[1:4])
    return Sequences(
        b=b + rows.b,
        q_len=np.full_like(b, q_len),
        q_start=q_start,
        kv_begin=kv_begin,
        kv_end=kv_end,
        q_row=b * heads * q_len,
        kv_row=np.zeros_like(b),
    )


class ListedKeys(NamedTuple):
    """Keys and values [1, 1, rows, D], and the row of position 0 of each sequence among them.

    If they are copies, `places` has the place of each row in keys and values [P, Hkv, S].
    """

    key: Tensor
    value: Tensor
    kv_row: Numbers
    places: Tensor | None = None


class Tables(NamedTuple):
    """Where copied queries are from.

    b and head [sequences], the batch entry and first query head of each sequence; position [rows]
    of each query.
    """

    b: Tensor
    head: Tensor
    position: Tensor

    def problem(self, problem: Problem, placed: Placed) -> Problem:
        """Return a problem whose mods take copied queries."""
        masks, dropout = problem.masks(full=False), problem.dropout

        def at(mod: Any, args: tuple[Any, ...]) -> Any:
            *others, sequence, h, q_idx, kv_idx = args
            where = self.b[sequence], self.head[sequence] + h
            return mod(*others, *where, self.position[q_idx], kv_idx)

        def masked(*args: Any) -> Any:
            return functools.reduce(operator.and_, [at(mod, args) for mod in masks])

        def traced(mod: Callable[..., Any], kind: Kind, name: str) -> Traced:
            found = trace(mod, kind, score_dtype=placed.dtype, device=placed.query.device)
            return Traced(found.output, found.captures, kind, name, found.lines)

        def changed(mod: Any) -> Traced | None:
            if mod is None:
                return None
            return traced(lambda *args: at(mod, args), "score", mod_name(mod))

        if dropout is not None:
            keep = dropout.keep
            kept = traced(lambda *args: at(keep, args), "mask", keep.name)
            dropout = replace(dropout, mask=kept)
        return problem._replace(
            partial_mod=None,
            dropout=dropout,
            score_mod=changed(problem.score_mod),
            prob_mod=changed(problem.prob_mod),
            mask_mod=traced(masked, "mask", "chosen") if masks else None,
        )


def _add_rows(total: Tensor, rows: Tensor, index: NDArray[np.int64]) -> None:
    """Add `rows` to those of `total` that `index` names, one by one in their order.

    A sum begins with its row of `total`, so that it does not depend on how rows are cut into calls.
    """
    found = np.unique(index)
    into = torch.from_numpy(found)
    every = torch.cat([rows, total.index_select(0, into)])
    places = np.append(index, found)
    order = np.lexsort((np.append(np.arange(len(index)), np.full(len(found), -1)), places))
    starts = np.searchsorted(places[order], found)
    bags = torch.from_numpy(order), torch.from_numpy(starts)
    total.index_copy_(0, into, embedding_bag(bags[0], every, bags[1], mode="sum"))
