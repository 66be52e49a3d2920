"""The backward pass on compiled kernels.

Work is divided into shares (see `codegen/convention.py`). Each share adds to its own sums of the
gradients of keys, values and captured tensors; at the end, all sums are added.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.block_mask import BlockRows
from quire.codegen.convention import BLOCK_Q, CAPTURED_GRADIENT, GRADIENTS, GRADIENTS_PART
from quire.codegen.llvm.target import Target
from quire.ir.graph import Node
from quire.memory import One, Placed, longest
from quire.request import Problem
from quire.results import Above, Gradients, Result, Wanted, folded
from quire.runtime import chosen
from quire.runtime.blocks import NO_LISTS, TileLists, tile_lists
from quire.runtime.capture_sums import Round, SumsOfCapture, direct_inputs
from quire.runtime.launch import Launcher, Records
from quire.runtime.mods import ORIGIN, graphs_of
from quire.runtime.prepare import make_launcher, num_products, record, table_of
from quire.support.bounded import BoundedDict
from quire.support.torch_private import has_memory

ENOUGH_SHARES = 8  # of one sequence; the sums of more shares would take more memory
QUERIES_OF_SHARE = 1024  # at least
LARGEST_SUMS = 2**27
"""The most bytes for sums of captured tensors, if one share does not need more."""


def num_slices(q_len: int, heads: int, key_heads: int) -> int:
    """Return the number of slices of a sequence's queries, for each key head."""
    count = max(1, key_heads)  # there may be no heads
    rows = q_len * (heads // count)
    return max(1, min(-(-ENOUGH_SHARES // count), rows // QUERIES_OF_SHARE))


class BackwardPlan(NamedTuple):
    """All that a backward pass needs, except its tensors."""

    launcher: Launcher
    lists: TileLists
    loads: tuple[Node, ...]  # loads of a mod that have a gradient
    learned: tuple[int, ...]  # indices of the captured tensors whose gradients are wanted
    slices: tuple[int, ...]  # the number of slices of each sequence
    scale: float
    added_captures: tuple[Tensor, ...]  # tensors that mods load from, besides the user's captures

    @staticmethod
    def of(
        problem: Problem,
        placed: Placed,
        blocks: BlockRows | None,
        learned: tuple[int, ...],
        results: Result,
    ) -> BackwardPlan:
        """Return the plan for operands and results with the layout of these."""
        lists = NO_LISTS
        origin = placed.rows if isinstance(placed.rows, One) else ORIGIN
        if blocks is not None:
            lists = tile_lists(blocks, BLOCK_Q, Target.host().block_kv, origin.kv_begin)
        graphs, loaded = graphs_of(problem, placed.dtype, placed.end, lists.mixed, origin)
        graphs = graphs._replace(learned=learned)
        launcher = make_launcher(
            "backward",
            placed,
            results,
            graphs,
            loaded,
            scale=problem.scale,
            block_q=BLOCK_Q,
            lists=lists,
        )
        heads, key_heads = placed.query.shape[1], placed.key.shape[1]
        rows = placed.rows
        lengths = [rows.q_len] if isinstance(rows, One) else rows.q_len.tolist()
        return BackwardPlan(
            launcher=launcher,
            lists=lists,
            loads=tuple(graphs.slopes.loads),
            learned=learned,
            slices=tuple(num_slices(q_len, heads, key_heads) for q_len in lengths),
            scale=problem.scale,
            added_captures=loaded[len(problem.captures) :],
        )

    def run(
        self, placed: Placed, captures: tuple[Tensor, ...], wanted: Wanted, above: Above
    ) -> Gradients | None:
        """Return the gradients; None if a number is not finite, or lse too far from 0."""
        return Pass(self, placed, (*captures, *self.added_captures), wanted, above).gradients()


class BackwardPlans:
    """The backward plans of calls with the same key, by the strides of their tensors."""

    def __init__(self) -> None:
        self._known: BoundedDict[object, BackwardPlan] = BoundedDict(16)
        self._turns: dict[bool, bool] = {}  # whether the lists of the block mask are turned around

    def run(
        self,
        problem: Problem,
        placed: Placed,
        blocks: BlockRows | None,
        wanted: Wanted,
        above: Above,
    ) -> Gradients | None:
        """Return the gradients; None if the eager backend has to compute them."""
        if problem.weighting != "softmax":
            above = above.of_weights(problem.weighting)
        out, lse, *given = above[:4]
        grads = [None if x is None else x.resolve_neg() for x in given]
        query, key, value = (x.resolve_neg() for x in placed[:3])
        captures = tuple(x.resolve_neg() for x in wanted.captures)
        tensors = (query, key, value, *captures, *(x for x in grads if x is not None))
        if torch.is_grad_enabled() or not all(map(has_memory, tensors)):
            return None
        placed = placed.on(query, key, value)
        above = above._replace(grad_out=grads[0], grad_lse=grads[1])
        if blocks is not None:
            learns = bool(wanted.learned)
            if learns not in self._turns:
                self._turns[learns] = chosen.is_worth(problem, placed, blocks, learns=learns)
            if self._turns[learns]:
                turned = problem.with_captures(captures)
                return chosen.gradients(turned, placed, blocks, wanted, above)
        # Hooks on saved tensors may return them with other strides than in the forward pass.
        saved = (query, key, value, out, lse, *captures)
        layout = (wanted.learned, *(tensor.stride() for tensor in saved))
        plan = self._known.get(layout)
        if plan is None:
            problem = problem.with_captures(captures)
            new = BackwardPlan.of(problem, placed, blocks, wanted.learned, Result(out, lse))
            plan = self._known.keep(layout, new)
        return plan.run(placed, captures, wanted, above)


def key_mass(problem: Problem, placed: Placed, results: Result) -> Tensor | None:
    """Return the probabilities before dropout, summed over the queries of each head: [B, Hq, S].

    The backward kernel computes them. Return None if an lse is too far from 0 to be precise.
    """
    problem, mask = problem._replace(dropout=None), problem.block_mask
    blocks = None if mask is None else mask.rows(*placed.lengths)
    assert results.lse is not None, "the key mass needs lse"
    plan = BackwardPlan.of(problem, placed, blocks, (), Result(results.out, results.lse))
    above = Above(results.out, results.lse, None, None).of_weights(problem.weighting)
    captures = (*problem.captures, *plan.added_captures)
    return Pass(plan, placed, captures, Wanted.of(False, False, False), above).masses()


class Pass:
    """One backward pass: its tensors, and the sums of its shares."""

    def __init__(
        self,
        plan: BackwardPlan,
        placed: Placed,
        captures: tuple[Tensor, ...],
        wanted: Wanted,
        above: Above,
    ) -> None:
        self.plan, self.placed, self.captures = plan, placed, captures
        self.wanted, self.above = wanted, above
        out, lse, grad_out, grad_lse = above[:4]
        self.grad_out = out.new_zeros(()).expand(out.shape) if grad_out is None else grad_out
        self.grad_lse = None if grad_lse is None else torch.empty_like(lse).copy_(grad_lse)
        self.dtype, self.key_heads = lse.dtype, placed.key.shape[1]
        self.learned = {index: self._sums_of_capture(index) for index in plan.learned}

    def gradients(self) -> Gradients | None:
        """Launch the kernel for all shares, and return the sums of their gradients."""
        placed, wanted = self.placed, self.wanted
        has_unowned_rows = not isinstance(placed.rows, One)  # perhaps; no share writes to them
        new = torch.zeros_like if has_unowned_rows else torch.empty_like
        query = new(placed.query) if wanted.query else None
        key = self._sums_of_rows(placed.key) if wanted.key else None
        value = self._sums_of_rows(placed.value) if wanted.value else None
        delta = torch.zeros_like(self.above.lse)
        flags = torch.zeros(2, dtype=torch.int64, device="cpu")
        table = ctypes.create_string_buffer(CAPTURED_GRADIENT.size * len(self.plan.loads) + 1)
        fields = self._fields(query, key, value, delta)
        fields |= {"captured": ctypes.addressof(table), "odd": flags.data_ptr()}
        for part in self._rounds():
            sums = {index: each.begin(part) for index, each in self.learned.items()}
            records = [
                CAPTURED_GRADIENT.pack_in_order(*sums[index]) for index in self._loaded_captures
            ]
            table.raw = b"".join((*records, b"\0"))
            self._launch(fields, part)
            for each in self.learned.values():
                each.end()
        not_finite, far = flags.tolist()
        if not_finite or (far and self.above.whole):
            return None
        captures = [
            self.learned[index].total if index in self.learned else None
            for index in range(len(wanted.captures))
        ]
        return Gradients(
            query=query,
            key=None if key is None else self._total(key, placed.key),
            value=None if value is None else self._total(value, placed.value),
            captures=tuple(captures),
            delta=delta,
            lse=self.above.lse,
        )

    def masses(self) -> Tensor | None:
        """Return the sum of weights of each key; None if an lse is too far from 0."""
        placed = self.placed
        sums = self._zeros(placed.query.shape[1], placed.key.shape[2])
        fields = dict.fromkeys(GRADIENTS, 0) | _strided("masses", sums, ("slice", "batch", "head"))
        flags = torch.zeros(2, dtype=torch.int64, device="cpu")
        fields["odd"] = flags.data_ptr()
        for part in self._rounds():
            self._launch(fields, part)
        return None if flags[1].item() else self._sum_of_slices(sums)

    def _fields(
        self, query: Tensor | None, key: Tensor | None, value: Tensor | None, delta: Tensor
    ) -> dict[str, int | float]:
        """Return the part of the kernel's record that is about gradients."""
        wanted = self.wanted
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
            "wants_slopes": int(wanted.query or wanted.key or bool(wanted.learned)),
            "slope_scale": self.plan.scale,
        }

    # --- shares

    @property
    def _loaded_captures(self) -> list[int]:
        """Return the index of the captured tensor of each load."""
        return [load.payload for load in self.plan.loads if isinstance(load.payload, int)]

    @property
    def _batch(self) -> int:
        rows = self.placed.rows
        return self.placed.query.shape[0] if isinstance(rows, One) else rows.num

    def _rounds(self) -> Iterator[Round]:
        """Yield all shares, in rounds whose sums of captured tensors are not too large."""
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
        """Launch the shares of a round."""
        placed, above = self.placed, self.above
        table, first, stop = self._shares(part)
        if first == stop or 0 in placed.query.shape[:3]:
            return
        launcher = self.plan.launcher
        launcher.terms.check_gradients(fields)
        rows = placed.rows
        count = 1 if isinstance(rows, One) else rows.num
        launcher.launch(
            placed,
            Records(table, count, num_products(placed, rows), stop),
            Result(above.out, above.lse),
            self.captures,
            lists=self.plan.lists,
            more=GRADIENTS_PART.pack(fields),
            first=first,
        )

    def _shares(self, part: Round) -> tuple[bytes, int, int]:
        """Return the table of sequences, and the first and the end of the shares of a round.

        Shares are numbered by sequence, then by head, then by slice.
        """
        rows, slices = self.placed.rows, self.plan.slices
        if isinstance(rows, One):
            shares = self.key_heads * slices[0]
            first, stop = shares * part.b, shares * part.b_stop
            table = record(rows, slices=slices[0])
        else:
            counts = np.array(slices, np.int64)
            if part == Round(0, rows.num, 0, self.key_heads):
                order = rows.largest_first()
                counts, rows = counts[order], rows.where(order)
            ends = np.cumsum(self.key_heads * counts)
            table = table_of(rows, ends - self.key_heads * counts, {"slices": counts})
            first, stop = ([0, *ends.tolist()][b] for b in (part.b, part.b_stop))
        if part.h_stop - part.h < self.key_heads:
            each = (stop - first) // self.key_heads
            first, stop = first + part.h * each, first + part.h_stop * each
        return table, first, stop

    # --- sums

    def _sums_of_rows(self, rows: Tensor) -> Tensor:
        """Return zeros for the gradients of keys or values: [slices, B, Hkv, S, D in panels]."""
        columns = self.plan.launcher.terms.columns
        width = columns[0 if rows is self.placed.key else 1]
        return self._zeros(rows.shape[1], rows.shape[2], width)

    def _zeros(self, heads: int, num_rows: int, *width: int) -> Tensor:
        """Return zeros [slices, B, heads, num_rows, *width]; with pages, num_rows is positions."""
        placed = self.placed
        batch = placed.query.shape[0] if isinstance(placed.rows, One) else 1
        if placed.page_table is not None:
            batch, num_rows = placed.sequences.num, longest(placed.sequences.kv_end)
        shape = (max(self.plan.slices, default=1), batch, heads, num_rows, *width)
        return torch.zeros(shape, dtype=self.dtype, device="cpu")

    def _total(self, sums: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of keys or values, in the shape of `like`, from all sums."""
        total = self._sum_of_slices(sums)
        if self.placed.page_table is not None:
            total = self._to_pages(total, like)
        elif like.shape[0] != total.shape[0]:  # all batches share one batch of keys
            total = folded(total).unsqueeze(0)
        return total[..., : like.shape[3]].contiguous()

    def _to_pages(self, total: Tensor, like: Tensor) -> Tensor:
        """Add sums by position [B, Hkv, positions, D] to the pages, which may be shared."""
        table = self.placed.page_table
        assert table is not None, "keys must be in pages"
        num_pages, heads, size, _ = like.shape
        rows = total.new_zeros(num_pages * size, heads, total.shape[-1])
        sequences = self.placed.sequences
        for b, (begin, end) in enumerate(zip(sequences.kv_begin, sequences.kv_end, strict=True)):
            positions = torch.arange(int(begin), int(end))
            at = table[b, positions // size].long() * size + positions % size
            rows.index_add_(0, at, total[b, :, positions].transpose(0, 1))
        return rows.view(num_pages, size, heads, -1).transpose(1, 2)

    def _sum_of_slices(self, sums: Tensor) -> Tensor:
        """Add the slices of each sequence. Their number, and so the bits, depend on it alone."""
        if sums.shape[0] == 1:
            return sums[0]
        if len(set(self.plan.slices)) <= 1:
            return folded(sums)
        counts, sequences = np.array(self.plan.slices), self.placed.sequences
        if self.placed.page_table is not None:
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

    def _sums_of_capture(self, index: int) -> SumsOfCapture:
        """Return the sums of one captured tensor.

        Sequences can share a sum if every load is indexed by b: then they add to different
        elements. The same is true of heads and h, and of slices and q_idx.
        """
        loads = [load for load in self.plan.loads if load.payload == index]
        shared = [
            all(name in direct_inputs(load) for load in loads) for name in ("b", "h", "q_idx")
        ]
        slices = 1 if shared[2] else max(self.plan.slices, default=1)
        return SumsOfCapture(self.captures[index], self.dtype, (shared[0], shared[1]), slices)


def _strided(name: str, tensor: Tensor, axes: tuple[str, ...]) -> dict[str, int | float]:
    """Return the address and strides of a tensor as fields; all share a batch of 1."""
    steps = tensor.stride()
    named = {
        f"{name}_{axis}": 0 if axis == "batch" and size == 1 else step
        for axis, size, step in zip(axes, tensor.shape, steps, strict=False)
    }
    return {name: tensor.data_ptr(), **named}
