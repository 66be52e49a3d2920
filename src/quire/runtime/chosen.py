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
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
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
from quire.memory import Placed
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


def is_worth(problem: Problem, placed: Placed, blocks: BlockRows, *, learns: bool) -> bool:
    """Return whether copied queries take less time than tiles, by an estimate.

    `learns` says that gradients of captured tensors are wanted, which only tiles give.
    """
    if (
        not placed.is_dense
        or learns
        or problem.dropout is not None
        or placed.key.shape[0] != placed.query.shape[0]
        or 0 in (*placed.query.shape, *placed.key.shape, *placed.value.shape)
    ):
        return False
    (q_size, kv_size), runs, (q_len, kv_len) = blocks.block_size, blocks.runs, blocks.seq_lengths
    widths = runs.stops - runs.starts
    tall, wide = max(LANES, q_size), max(LANES, kv_size)  # panels skip the keys that none reads
    area = num_tiles(runs, blocks.block_size, tall, wide) * min(wide, kv_len) * min(tall, q_len)
    lists = runs.row_ids() // max(1, runs.shape[2])
    # Blocks of keys that few queries list leave lanes of panels empty.
    heads = runs.shape[0] * runs.shape[1]
    listing = np.bincount(
        lists.repeat(widths) * runs.shape[3]
        + runs.starts.repeat(widths)
        + np.arange(widths.sum())
        - (np.cumsum(widths) - widths).repeat(widths),
        minlength=heads * runs.shape[3],
    )
    rows = -(-listing * q_size // LANES) * LANES
    return int(rows.sum()) * (kv_size + COPY_COST) <= WORTH * area


class _Backward:
    """One backward pass: its tensors, and the sums of its gradients."""

    def __init__(
        self, problem: Problem, placed: Placed, blocks: BlockRows, wanted: Wanted, above: Above
    ) -> None:
        self.problem, self.placed, self.blocks, self.wanted = problem, placed, blocks, wanted
        self.above, self.dtype = above, above.lse.dtype
        query, key, value = placed.operands
        self.batch, self.heads, self.q_len, _ = query.shape
        self.key_heads, self.kv_len = key.shape[1:3]
        out, lse, grad_out, grad_lse = above[:4]
        self.grad_out = out.new_zeros(out.shape) if grad_out is None else grad_out.to(self.dtype)
        self.delta = (self.grad_out * out.to(self.dtype)).sum(-1)
        if grad_lse is not None:
            self.delta = self.delta - grad_lse
        self.query = query.to(self.dtype).reshape(-1, query.shape[3])
        self.grads = self.grad_out.reshape(-1, value.shape[3])
        self.numbers = [x.reshape(-1) for x in (lse, -self.delta)]
        self.key, self.value = (x.reshape(1, 1, -1, x.shape[3]) for x in (key, value))
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
        inside = (row * self.blocks.block_size[0] < self.q_len) & (
            column * self.blocks.block_size[1] < self.kv_len
        )
        per_key_head = max(1, own // self.key_heads)
        for kind in (PARTIAL, FULL):
            for turn in range(per_key_head):
                mine = inside & (kinds == kind) & (head % per_key_head == turn)
                if not mine.any():
                    continue
                found = Listed(b[mine], head[mine], column[mine], row[mine])
                yield kind, self._for_all(found, runs.shape[0] == 1, own == 1)

    def _for_all(self, listed: Listed, same_batches: bool, same_heads: bool) -> Listed:
        """Repeat lists that stand for all batch entries or heads, and sort them."""
        b, head, column, row = listed
        if same_heads and self.key_heads > 1:
            head = np.arange(self.key_heads).repeat(len(b))
            b, column, row = (np.tile(x, self.key_heads) for x in (b, column, row))
        if same_batches and self.batch > 1:
            count = len(head)
            b = np.arange(self.batch).repeat(count)
            head, column, row = (np.tile(x, self.batch) for x in (head, column, row))
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
        ends = listed.sequences()
        counts = np.minimum(q_size, self.q_len - listed.row * q_size)
        entry = np.arange(len(counts)).repeat(counts)
        rows = np.arange(len(entry)) - (np.cumsum(counts) - counts).repeat(counts)
        token = listed.row[entry] * q_size + rows
        before = np.concatenate([[0], np.cumsum(counts)])[ends]
        first, lengths = before[:-1], np.diff(before)
        b, head, column = (x[ends[:-1]] for x in listed[:3])
        origin, number = self.placed.one.kv_begin, np.arange(len(b))
        key_head = head * group * self.key_heads // self.heads
        begin = column * kv_size
        sequences = Sequences(
            b=number,
            q_len=lengths,
            q_start=first,  # so that q_idx is the number of a copied query
            kv_begin=begin + origin,
            kv_end=np.minimum(begin + kv_size, self.kv_len) + origin,
            q_row=first,
            kv_row=(b * self.key_heads + key_head) * self.kv_len - origin,
        )
        place = (listed.b[entry] * self.heads + listed.head[entry] * group) * self.q_len + token
        every = place + np.arange(group)[:, None] * self.q_len
        index = torch.from_numpy(every.ravel())
        tables = Tables(*(torch.from_numpy(x) for x in (b, head * group, token)))
        copied = self._launch(problem, sequences, index, tables, group)
        if total is not None:
            _add_rows(total, copied.view(len(index), -1), every.ravel())

    def _launch(
        self, problem: Problem, rows: Sequences, index: Tensor, tables: Tables, group: int
    ) -> Tensor:
        """Launch the kernel, and return the gradients of copied queries."""
        problem = tables.problem(problem, self.placed)
        shape = (1, group, len(index) // group)
        query = self.query.index_select(0, index).view(*shape, -1)
        grads = self.grads.index_select(0, index).view(*shape, -1)
        lse, grad_lse = (x.index_select(0, index).view(shape) for x in self.numbers)
        placed = Placed(query, self.key, self.value, rows)
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
        for side, width in zip(("key", "value"), launcher.terms.columns, strict=True):
            if getattr(self.wanted, side):
                sums = self._sums_of(f"grad_{side}", width)
                fields |= {f"grad_{side}": sums.data_ptr(), f"grad_{side}_row": width}
        launcher.terms.check_gradients(fields)
        order = rows.largest_first()
        one = {"slices": np.ones_like(order), "slice_blocks": np.full_like(order, ALL_BLOCKS)}
        table = table_of(rows.where(order), np.arange(rows.num), one)
        records = Records(table, rows.num, num_products(placed, rows), rows.num)
        launcher.launch(placed, records, results, loaded, more=GRADIENTS_PART.pack(fields))
        return grad_query

    def _sums_of(self, name: str, width: int) -> Tensor:
        """Return the sums of the gradients of all keys or values: [B * Hkv * S, width]."""
        if name not in self.sums:
            shape = (self.batch * self.key_heads * self.kv_len, width)
            self.sums[name] = torch.zeros(shape, dtype=self.dtype, device="cpu")
        return self.sums[name]

    def _without_blocks(self, kind: int) -> Problem:
        """Return the problem of the blocks of one kind."""
        problem = self.problem
        partial = problem.partial_mod if kind == PARTIAL else None
        return problem._replace(block_mask=None, partial_mod=partial)


class Tables(NamedTuple):
    """Where copied queries are from.

    b and head [sequences], the batch entry and first query head of each sequence; token [rows],
    the number of each query.
    """

    b: Tensor
    head: Tensor
    token: Tensor

    def problem(self, problem: Problem, placed: Placed) -> Problem:
        """Return a problem whose mods take copied queries."""
        score, masks = problem.score_mod, problem.masks(full=False)
        origin = placed.one

        def at(mod: Any, args: tuple[Any, ...]) -> Any:
            *others, sequence, h, q_idx, kv_idx = args
            where = self.b[sequence] + origin.b, self.head[sequence] + h
            return mod(*others, *where, self.token[q_idx] + origin.q_start, kv_idx)

        def masked(*args: Any) -> Any:
            return functools.reduce(operator.and_, [at(mod, args) for mod in masks])

        def scored(*args: Any) -> Any:
            return at(score, args)

        def traced(mod: Callable[..., Any], kind: Kind, name: str) -> Traced:
            found = trace(mod, kind, score_dtype=placed.dtype, device=placed.query.device)
            return Traced(found.output, found.captures, kind, name, found.lines)

        return problem._replace(
            partial_mod=None,
            score_mod=None if score is None else traced(scored, "score", mod_name(score)),
            mask_mod=traced(masked, "mask", "chosen") if masks else None,
        )


def _add_rows(total: Tensor, rows: Tensor, index: NDArray[np.int64]) -> None:
    """Add `rows` to those of `total` that `index` names, in their order."""
    order = np.argsort(index, kind="stable")
    found, first = np.unique(index[order], return_index=True)
    bags = torch.from_numpy(order), torch.from_numpy(first)
    sums = embedding_bag(bags[0], rows, bags[1], mode="sum")
    into = torch.from_numpy(found)
    total.index_copy_(0, into, total.index_select(0, into) + sums)
