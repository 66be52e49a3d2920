"""The backward pass of a problem: shares of work, where each adds up, and how sums meet."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.block_mask import BlockRows
from quire.codegen.convention import (
    BLOCK_Q,
    CAPTURED,
    GRADIENTS,
    GRADIENTS_PART,
    gradient_columns,
)
from quire.codegen.llvm.target import Target
from quire.eager.backward import Above, Gradients, Wanted, folded
from quire.ir.graph import Node
from quire.problem import Problem
from quire.runtime.addressing import Addressing, Records, only_record, records
from quire.runtime.plan import Plan, Rows, address_of, make_plan
from quire.runtime.roots import mod_roots
from quire.runtime.tile_lists import NO_LISTS, TileLists, tile_lists

ENOUGH_SHARES = 8  # of one sequence; more would need more memory for their sums
QUERIES_OF_SHARE = 1024  # at least
LARGEST_SUMS = 2**27
"""How many bytes the sums for captured tensors have at once, if they can have less."""


def num_slices(q_len: int, heads: int, key_heads: int) -> int:
    """By how many the queries of a sequence are shared out, for each key head."""
    each = max(1, key_heads)  # also of no heads at all
    rows = q_len * (heads // each)
    return max(1, min(-(-ENOUGH_SHARES // each), rows // QUERIES_OF_SHARE))


class BackwardPlan(NamedTuple):
    """What a backward pass needs, apart from its tensors: made once, used many times."""

    plan: Plan
    lists: TileLists
    loads: tuple[Node, ...]  # that have a gradient
    learned: tuple[int, ...]  # the captured tensors whose gradients are wanted, by their place
    slices: tuple[int, ...]  # of each sequence
    scale: float
    first_b: int


def plan_backward(
    problem: Problem,
    memory: Addressing,
    blocks: BlockRows | None,
    learned: tuple[int, ...],
    results: Rows,
) -> tuple[BackwardPlan, tuple[Tensor, ...]]:
    """The plan for operands and results that are laid out like these, and what mods load from."""
    lists = NO_LISTS
    if blocks is not None:
        lists = tile_lists(blocks, BLOCK_Q, Target.host().block_kv)
    roots, captures = mod_roots(problem, results.lse.dtype, memory.longest, lists.mixed)
    roots = roots._replace(learned=learned)
    plan = make_plan("backward", memory, roots, captures, lists, BLOCK_Q, problem.scale, results)
    heads, key_heads = memory.query.shape[1], memory.key.shape[1]
    slices = tuple(num_slices(q_len, heads, key_heads) for q_len in memory.sequences.q_len.tolist())
    loads = tuple(roots.slopes.loads)
    scale, first_b = problem.scale, problem.b_start
    return BackwardPlan(plan, lists, loads, learned, slices, scale, first_b), captures


def backward(
    problem: Problem, memory: Addressing, blocks: BlockRows | None, wanted: Wanted, above: Above
) -> Gradients | None:
    """The gradients; None where something is not finite."""
    results = Rows(above.out, above.lse)
    plan, captures = plan_backward(problem, memory, blocks, wanted.learned, results)
    return Pass(plan, memory, captures, wanted, above).gradients()


def key_mass(problem: Problem, memory: Addressing, results: Rows) -> Tensor:
    """The probabilities, before dropout, summed over the queries of each head: [B, Hq, S].

    The tiles of the backward pass, up to their weights.
    """
    problem, mask = replace(problem, dropout=None), problem.block_mask
    blocks = None if mask is None else mask.rows(*memory.lengths)
    plan, captures = plan_backward(problem, memory, blocks, (), results)
    above = Above(results.out, results.lse, None, None)
    return Pass(plan, memory, captures, Wanted(False, False, False, ()), above).masses()


class Round(NamedTuple):
    """The shares of some sequences and key heads: [b, b_stop) and [h, h_stop)."""

    b: int
    b_stop: int
    h: int
    h_stop: int


class Pass:
    """One backward pass."""

    def __init__(
        self,
        plan: BackwardPlan,
        memory: Addressing,
        captures: tuple[Tensor, ...],
        wanted: Wanted,
        above: Above,
    ) -> None:
        self.plan, self.memory, self.captures = plan, memory, captures
        self.wanted, self.above = wanted, above
        out, lse, grad_out, grad_lse = above
        self.grad_out = out.new_zeros(()).expand(out.shape) if grad_out is None else grad_out
        self.grad_lse = None if grad_lse is None else torch.empty_like(lse).copy_(grad_lse)
        self.dtype, self.key_heads = lse.dtype, memory.key.shape[1]
        self.learned = {place: self._sums_of_capture(place) for place in plan.learned}

    def gradients(self) -> Gradients | None:
        """Launch, and add up."""
        memory, wanted = self.memory, self.wanted
        holes = memory.copies is None  # rows of no sequence, perhaps
        empty = torch.zeros_like if holes else torch.empty_like
        query = empty(memory.query) if wanted.query else None
        key = self._sums_of_rows(memory.key) if wanted.key else None
        value = self._sums_of_rows(memory.value) if wanted.value else None
        delta = torch.zeros_like(self.above.lse)
        odd = torch.zeros(1, dtype=torch.int64, device="cpu")
        table = ctypes.create_string_buffer(CAPTURED.size * len(self.plan.loads) + 1)
        fields = self._fields(query, key, value, delta)
        fields |= {"captured": ctypes.addressof(table), "odd": odd.data_ptr()}
        for part in self._rounds():
            sums = {place: each.begin(part) for place, each in self.learned.items()}
            records = [CAPTURED.pack_in_order(*sums[place]) for place in self._places]
            table.raw = b"".join((*records, b"\0"))
            self._launch(fields, part)
            for each in self.learned.values():
                each.end()
        if odd.item():
            return None
        captures = [
            self.learned[place].total if place in self.learned else None
            for place in range(len(wanted.captures))
        ]
        return Gradients(
            query,
            None if key is None else self._together(key, memory.key),
            None if value is None else self._together(value, memory.value),
            tuple(captures),
            delta,
        )

    def masses(self) -> Tensor:
        """The weights that each key has."""
        memory = self.memory
        sums = self._zeros(memory.query.shape[1], memory.key.shape[2])
        fields = dict.fromkeys(GRADIENTS, 0) | _strided("masses", sums, ("slice", "batch", "head"))
        for part in self._rounds():
            self._launch(fields, part)
        return self._folded(sums)

    def _fields(
        self, query: Tensor | None, key: Tensor | None, value: Tensor | None, delta: Tensor
    ) -> dict[str, int | float]:
        """The part of the kernel's record that is about gradients."""
        fields: dict[str, int | float] = dict.fromkeys(GRADIENTS, 0)
        fields |= _strided("grad_out", self.grad_out, ("batch", "head", "row", "column"))
        if self.grad_lse is not None:
            fields["grad_lse"] = self.grad_lse.data_ptr()
        if query is not None:
            fields |= _strided("grad_query", query, ("batch", "head", "row", "column"))
        for name, sums in (("grad_key", key), ("grad_value", value)):
            if sums is not None:
                fields |= _strided(name, sums, ("slice", "batch", "head", "row"))
        return fields | {
            "delta": delta.data_ptr(),
            "wants_slopes": int(self.wanted.scores),
            "slope_scale": self.plan.scale,
        }

    # --- shares

    @property
    def _places(self) -> list[int]:
        """From which captured tensor each load is."""
        return [load.payload for load in self.plan.loads if isinstance(load.payload, int)]

    @property
    def _batch(self) -> int:
        copies = self.memory.copies
        return self.memory.sequences.num if copies is None else copies

    def _rounds(self) -> Iterator[Round]:
        """All shares, in parts whose sums for captured tensors are not too large."""
        batch, heads = self._batch, self.key_heads

        def size(batch: int, heads: int) -> int:
            return sum(each.size(batch, heads) for each in self.learned.values())

        while batch > 1 and size(batch, heads) > LARGEST_SUMS:
            batch = -(-batch // 2)
        while batch == 1 and heads > 1 and size(batch, heads) > LARGEST_SUMS:
            heads = -(-heads // 2)
        for b in range(0, self._batch, max(1, batch)):
            for h in range(0, self.key_heads, max(1, heads)):
                yield Round(b, min(b + batch, self._batch), h, min(h + heads, self.key_heads))

    def _launch(self, fields: dict[str, int | float], part: Round) -> None:
        """The shares of a round. They are numbered by sequence, then by head, then by slice."""
        memory, above = self.memory, self.above
        slices, sequences = self.plan.slices, memory.sequences
        if memory.copies is not None:
            shares = self.key_heads * slices[0]
            first, stop = shares * part.b, shares * part.b_stop
            table = only_record(sequences, slices[0])
        else:
            counts = np.array(slices, np.int64)
            if part == Round(0, sequences.num, 0, self.key_heads):
                order = sequences.largest_first()
                counts, sequences = counts[order], sequences.where(order)
            ends = np.cumsum(self.key_heads * counts)
            table = records(sequences, ends - self.key_heads * counts, {"slices": counts})
            first, stop = ([0, *ends.tolist()][b] for b in (part.b, part.b_stop))
        if part.h_stop - part.h < self.key_heads:
            each = (stop - first) // self.key_heads
            first, stop = first + part.h * each, first + part.h_stop * each
        if first == stop or 0 in memory.query.shape[:3]:
            return
        self.plan.plan.terms.check_gradients(fields)
        pages = memory.page_table
        operands = (memory.query, memory.key, memory.value, above.out, above.lse)
        self.plan.plan.launch_at(
            (*(tensor.data_ptr() for tensor in operands), 0, 0, 0, 0),
            Records(table, stop),
            sequences.num,
            memory.work(memory.sequences),
            self.captures,
            self.plan.lists,
            0 if pages is None else pages.data_ptr(),
            (address_of(memory.key_scale), address_of(memory.value_scale)),
            gradients=GRADIENTS_PART.pack(fields),
            first=first,
        )

    # --- sums

    def _sums_of_rows(self, rows: Tensor) -> Tensor:
        """Room for the gradients of keys or values: [slices, B, H, rows, whole panels]."""
        tile = self.plan.plan.kernel.tile
        width = gradient_columns(tile, rows.shape[3])
        return self._zeros(rows.shape[1], rows.shape[2], width)

    def _zeros(self, heads: int, num_rows: int, *width: int) -> Tensor:
        """Sums for rows of keys: as they are packed, or by position for each batch of its own."""
        memory = self.memory
        batch = 1 if memory.copies is None else memory.copies
        if memory.page_table is not None:
            batch, num_rows = memory.sequences.num, memory.longest
        shape = (max(self.plan.slices, default=1), batch, heads, num_rows, *width)
        return torch.zeros(shape, dtype=self.dtype, device="cpu")

    def _together(self, sums: Tensor, like: Tensor) -> Tensor:
        """All that was summed for keys or values, as one gradient."""
        total = self._folded(sums)
        if self.memory.page_table is not None:
            total = self._to_pages(total, like)
        elif like.shape[0] != total.shape[0]:  # all batches share their keys
            total = folded(total).unsqueeze(0)
        return total[..., : like.shape[3]].contiguous()

    def _to_pages(self, total: Tensor, like: Tensor) -> Tensor:
        """Sums by position, added to the rows of pages. Sequences may share some."""
        table = self.memory.page_table
        assert table is not None, "there are pages"
        num_pages, heads, size, _ = like.shape
        rows = total.new_zeros(num_pages * size, heads, total.shape[-1])
        sequences = self.memory.sequences
        for b, (begin, end) in enumerate(zip(sequences.kv_begin, sequences.kv_end, strict=True)):
            places = torch.arange(int(begin), int(end))
            at = table[b, places // size].long() * size + places % size
            rows.index_add_(0, at, total[b, :, places].transpose(0, 1))
        return rows.view(num_pages, size, heads, -1).transpose(1, 2)

    def _folded(self, sums: Tensor) -> Tensor:
        """All slices as one: of each sequence as many as it has, so that others do not matter."""
        counts, sequences = np.array(self.plan.slices), self.memory.sequences
        if len(set(self.plan.slices)) <= 1:
            return folded(sums)
        if self.memory.page_table is not None:
            each = [folded(sums[:count, b].clone()) for b, count in enumerate(self.plan.slices)]
            return torch.stack(each)
        ends = np.cumsum(sequences.kv_len)
        first = sequences.kv_row + sequences.kv_begin - ends + sequences.kv_len
        rows = np.arange(ends[-1]) + np.repeat(first, sequences.kv_len)
        total = sums.new_zeros(sums.shape[1:])
        for count in set(self.plan.slices):
            chosen = np.repeat(counts == count, sequences.kv_len)
            at = torch.from_numpy(rows[chosen])
            total[:, :, at] = folded(sums[:count, :, :, at])
        return total

    def _sums_of_capture(self, place: int) -> SumsOfCapture:
        """What tells shares apart is an index of every load, or has sums of its own."""
        loads = [load for load in self.plan.loads if load.payload == place]
        shared = [
            all(name in _direct_inputs(load) for load in loads) for name in ("b", "h", "q_idx")
        ]
        slices = 1 if shared[2] else max(self.plan.slices, default=1)
        tensor = self.captures[place]
        return SumsOfCapture(tensor, self.dtype, shared[0], shared[1], slices, self.plan.first_b)


class SumsOfCapture:
    """The gradient of a captured tensor: sums [b, key head, slice, ...] of a round, and of all."""

    def __init__(
        self,
        tensor: Tensor,
        dtype: torch.dtype,
        shared_b: bool,
        shared_h: bool,
        slices: int,
        first_b: int,
    ) -> None:
        self._shape, self._dtype = tensor.shape, dtype
        self._shared = (shared_b, shared_h)
        self._slices, self._first_b = slices, first_b
        self._sums = self.total = torch.zeros(tensor.shape, dtype=dtype, device="cpu")

    def _counts(self, batch: int, heads: int) -> tuple[int, int, int]:
        b, h = self._shared
        return 1 if b else batch, 1 if h else heads, self._slices

    def size(self, batch: int, heads: int) -> int:
        """The bytes that a round needs."""
        return math.prod((*self._counts(batch, heads), *self._shape)) * self._dtype.itemsize

    def begin(self, part: Round) -> tuple[int, int, int, int]:
        """Where the sums of a round are: the address of the first, and from share to share."""
        counts = self._counts(part.b_stop - part.b, part.h_stop - part.h)
        if counts == (1, 1, 1):  # no two shares have a place in common, whatever the round
            self._sums = self.total.view(1, 1, 1, *self._shape)
        else:
            self._sums = torch.zeros((*counts, *self._shape), dtype=self._dtype, device="cpu")
        one = math.prod(self._shape)
        batch, head, slice = (
            0 if self._shared[0] else one * counts[1] * counts[2],
            0 if self._shared[1] else one * counts[2],
            0 if counts[2] == 1 else one,
        )
        before = (self._first_b + part.b) * batch + part.h * head
        address = self._sums.data_ptr() - before * self._dtype.itemsize
        return address, batch, head, slice

    def end(self) -> None:
        """Add the sums of a round to those of all."""
        if self._sums.data_ptr() != self.total.data_ptr():
            self.total += folded(self._sums.flatten(0, 2))


def _direct_inputs(load: Node) -> set[str]:
    """The inputs that are indices of a load themselves."""
    found = set()
    for index in load.args:
        while index.op == "cast":
            (index,) = index.args
        if index.op == "input":
            found.add(str(index.payload))
    return found


def _strided(name: str, tensor: Tensor, axes: tuple[str, ...]) -> dict[str, int | float]:
    """The address and the strides of a tensor; a batch of 1 is shared by all."""
    steps = tensor.stride()
    named = {
        f"{name}_{axis}": 0 if axis == "batch" and size == 1 else step
        for axis, size, step in zip(axes, tensor.shape, steps, strict=False)
    }
    return {name: tensor.data_ptr(), **named}
