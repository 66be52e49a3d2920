"""The backward pass on compiled kernels.

Queries are cut into slices (`slices.py`). Each has its own sums of the gradients of keys, values
and captured tensors, which are added in a fixed order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask import BlockRows
from quire.codegen.convention import BLOCK_Q, CAPTURED_GRADIENT, GRADIENTS, GRADIENTS_PART
from quire.codegen.llvm.target import Target
from quire.ir.graph import Node
from quire.memory import One, Placed, longest
from quire.request import Problem
from quire.results import Above, Gradients, Result, Wanted, folded
from quire.runtime import chosen
from quire.runtime.blocks import NO_LISTS, TileLists, cut_tiles, tile_lists
from quire.runtime.capture_sums import SumsOfCapture, direct_inputs
from quire.runtime.launch import Launcher, Records, num_products, num_threads
from quire.runtime.mods import graphs_of
from quire.runtime.prepare import make_launcher
from quire.runtime.slices import (
    AtOnce,
    Round,
    Shares,
    Slices,
    SliceShares,
    SumsOfRows,
    Taking,
    Touched,
    in_pages,
)
from quire.support.bounded import BoundedDict
from quire.support.torch_private import has_memory

LARGEST_SUMS = 2**27
"""The most bytes for sums of captured tensors, if one share does not need more."""


class BackwardPlan(NamedTuple):
    """All that a backward pass needs, except its tensors."""

    launcher: Launcher
    lists: TileLists
    loads: tuple[Node, ...]  # loads of a mod that have a gradient
    learned: tuple[int, ...]  # indices of the captured tensors whose gradients are wanted
    slices: Slices  # of each sequence
    scale: float
    added_captures: tuple[Tensor, ...]  # tensors that mods load from, besides the user's captures

    @staticmethod
    def of(
        problem: Problem,
        placed: Placed,
        blocks: BlockRows | None,
        learned: tuple[int, ...],
        results: Result,
        slice_size: int | None = None,
    ) -> BackwardPlan:
        """Return the plan for operands and results with the layout of these.

        Slices have `slice_size` queries, if it is given.
        """
        lists = NO_LISTS
        if blocks is not None:
            lists = tile_lists(blocks, BLOCK_Q, Target.host().block_kv, placed.rows.kv_origin)
        graphs, loaded = graphs_of(problem, placed.dtype, placed.end, lists.mixed, placed.rows)
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
        rows = placed.rows
        lengths = [rows.q_len] if isinstance(rows, One) else rows.q_len.tolist()
        return BackwardPlan(
            launcher=launcher,
            lists=lists,
            loads=(*graphs.slopes.loads, *graphs.slopes_of_drop),
            learned=learned,
            slices=Slices.of(lengths, slice_size),
            scale=problem.scale,
            added_captures=loaded[len(problem.captures) :],
        )

    def run(
        self,
        placed: Placed,
        captures: tuple[Tensor, ...],
        wanted: Wanted,
        above: Above,
        taking: Taking | None = None,
    ) -> Gradients | None:
        """Return the gradients; None if a number is not finite, or lse too far from 0."""
        captures = (*captures, *self.added_captures)
        return Pass(self, placed, captures, wanted, above=above, taking=taking).gradients()


class BackwardPlans:
    """The backward plans of calls with the same key, by the strides of their tensors."""

    def __init__(self) -> None:
        self._known: BoundedDict[object, BackwardPlan] = BoundedDict(16)
        self._turns: dict[bool, NDArray[np.bool_]] = {}

    def run(
        self,
        problem: Problem,
        placed: Placed,
        blocks: BlockRows | None,
        wanted: Wanted,
        above: Above,
        taking: Taking | None = None,
    ) -> Gradients | None:
        """Return the gradients; None if the eager backend has to compute them.

        If sums are taken, there are none of keys and values here, and those of captured tensors
        have one entry for each slice.
        """
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
        turned = None
        if blocks is not None and (which := self._turned(problem, placed, blocks, wanted)).any():
            mine, blocks = blocks.only(which), blocks.only(~which)
            known = problem.with_captures(captures)
            turned = chosen.gradients(known, placed, mine, wanted, above)
            if turned is None or which.all():
                return turned
        # Hooks on saved tensors may return them with other strides than in the forward pass.
        saved = (query, key, value, out, lse, *captures)
        slice_size = None if taking is None else taking.size
        layout = (slice_size, wanted.learned, *(tensor.stride() for tensor in saved))
        plan = self._known.get(layout)
        if plan is None:
            problem = problem.with_captures(captures)
            results, learned = Result(out, lse), wanted.learned
            new = BackwardPlan.of(problem, placed, blocks, learned, results, slice_size=slice_size)
            plan = self._known.keep(layout, new)
        found = plan.run(placed, captures, wanted, above, taking)
        return found if found is None or turned is None else found.plus(turned)

    def _turned(
        self, problem: Problem, placed: Placed, blocks: BlockRows, wanted: Wanted
    ) -> NDArray[np.bool_]:
        """Return for which batch entries the lists of the block mask are turned around."""
        if not cut_tiles(blocks):
            return np.zeros(blocks.runs.shape[0], np.bool_)
        learns = bool(wanted.learned)
        if learns not in self._turns:
            self._turns[learns] = chosen.turned(problem, placed, blocks, learns=learns)
        return self._turns[learns]


def key_mass(problem: Problem, placed: Placed, results: Result) -> Tensor | None:
    """Return the probabilities before dropout, summed over the queries of each head: [B, Hq, S].

    The backward kernel computes them. Return None if an lse is too far from 0 to be precise.
    """
    problem, mask = problem._replace(dropout=None, prob_mod=None), problem.block_mask
    blocks = None if mask is None else mask.rows(*placed.lengths)
    assert results.lse is not None, "the key mass needs lse"
    plan = BackwardPlan.of(problem, placed, blocks, (), Result(results.out, results.lse))
    above = Above(results.out, results.lse, None, None).of_weights(problem.weighting)
    captures = (*problem.captures, *plan.added_captures)
    return Pass(plan, placed, captures, Wanted.of(False, False, False), above).masses()


class Pass:
    """One backward pass: its tensors, and the sums of its slices.

    With `taking`, the sums of slices are not added: those of keys and values are taken after each
    round, and gradients of captured tensors have one entry for each slice.
    """

    def __init__(
        self,
        plan: BackwardPlan,
        placed: Placed,
        captures: tuple[Tensor, ...],
        wanted: Wanted,
        above: Above,
        taking: Taking | None = None,
    ) -> None:
        self.plan, self.placed, self.captures = plan, placed, captures
        self.wanted, self.above, self.taking = wanted, above, taking
        out, lse, grad_out, grad_lse = above[:4]
        self.grad_out = out.new_zeros(()).expand(out.shape) if grad_out is None else grad_out
        self.grad_lse = None if grad_lse is None else torch.empty_like(lse).copy_(grad_lse)
        self.dtype, self.key_heads = lse.dtype, placed.key.shape[1]
        self._parts: dict[str, Tensor] = {}  # of threads; the kernel writes to them
        self.learned = {index: self._sums_of_capture(index) for index in plan.learned}
        self.division, self.part = self._divided()

    def gradients(self) -> Gradients | None:
        """Launch the kernel for all shares, and return the sums of their gradients."""
        placed, wanted = self.placed, self.wanted
        has_unowned_rows = not isinstance(placed.rows, One)  # perhaps; no share writes to them
        new = torch.zeros_like if has_unowned_rows else torch.empty_like
        query = new(placed.query) if wanted.query else None
        widths = self.plan.launcher.terms.columns
        sums = {
            name: self._sums_of_rows(self.key_heads, width)
            for name, width in zip(("key", "value"), widths, strict=True)
            if getattr(wanted, name)
        }
        delta = torch.zeros_like(self.above.lse)
        flags = torch.zeros(2, dtype=torch.int64, device="cpu")
        table = ctypes.create_string_buffer(CAPTURED_GRADIENT.size * len(self.plan.loads) + 1)
        fields = self._fields(query, delta) | self._fields_of_sums(sums)
        fields |= {"captured": ctypes.addressof(table), "odd": flags.data_ptr()}

        def begin(part: Round) -> None:
            places = {index: each.begin(part) for index, each in self.learned.items()}
            records = [
                CAPTURED_GRADIENT.pack_in_order(*places[index]) for index in self._loaded_captures
            ]
            table.raw = b"".join((*records, b"\0"))

        self._run(fields, sums, begin)
        not_finite, far = flags.tolist()
        if not_finite or (far and self.above.whole):
            return None
        learned = {index: each.total for index, each in self.learned.items()}
        totals = {}
        if self.taking is None:
            totals = {name: self._total(each, getattr(placed, name)) for name, each in sums.items()}
        return Gradients(
            query=query,
            key=totals.get("key"),
            value=totals.get("value"),
            captures=tuple(learned.get(index) for index in range(len(wanted.captures))),
            delta=delta,
            lse=self.above.lse,
        )

    def masses(self) -> Tensor | None:
        """Return the sum of weights of each key; None if an lse is too far from 0."""
        self.division = SliceShares(whole=False, together=self.plan.slices.most)
        sums = self._sums_of_rows(self.placed.query.shape[1])
        fields: dict[str, int | float] = dict.fromkeys(GRADIENTS, 0)
        fields |= _strided("masses", sums.sums, ("slice", "batch", "head"))
        flags = torch.zeros(2, dtype=torch.int64, device="cpu")
        fields["odd"] = flags.data_ptr()
        self._run(fields, {"masses": sums}, lambda _: None)
        return None if flags[1].item() else sums.total

    def _fields(self, query: Tensor | None, delta: Tensor) -> dict[str, int | float]:
        """Return the part of the kernel's record that is about gradients, but for sums."""
        wanted = self.wanted
        fields: dict[str, int | float] = dict.fromkeys(GRADIENTS, 0)
        fields |= _strided("grad_out", self.grad_out, ("batch", "head", "row", "column"))
        if self.grad_lse is not None:
            fields["grad_lse"] = self.grad_lse.data_ptr()
        if query is not None:
            fields |= _strided("grad_query", query, ("batch", "head", "row", "column"))
        return fields | {
            "delta": delta.data_ptr(),
            "wants_slopes": int(wanted.query or wanted.key or bool(wanted.learned)),
            "slope_scale": self.plan.scale,
        }

    def _fields_of_sums(self, sums: dict[str, SumsOfRows]) -> dict[str, int | float]:
        """Return the part of the record that is about the sums of keys and values."""
        fields: dict[str, int | float] = {"whole": int(self.division.whole)}
        for name, each in sums.items():
            fields |= _strided(f"grad_{name}", each.sums, ("slice", "batch", "head", "row"))
            if self.division.whole and self.plan.slices.most > 1:
                shape = (num_threads(), self._num_keys, each.sums.shape[-1])
                parts = torch.zeros(shape, dtype=self.dtype, device="cpu")
                fields |= _strided(f"part_{name}", parts, ("thread",))
                self._parts[name] = parts
        return fields

    # --- shares

    @property
    def _loaded_captures(self) -> list[int]:
        """Return the index of the captured tensor of each load."""
        return [load.payload for load in self.plan.loads if isinstance(load.payload, int)]

    @property
    def _batch(self) -> int:
        rows = self.placed.rows
        return self.placed.query.shape[0] if isinstance(rows, One) else rows.num

    def _divided(self) -> tuple[SliceShares, AtOnce]:
        """Return how slices become shares, and rounds whose captured sums are not too large."""
        rows, part = self.placed.rows, AtOnce(self._batch, self.key_heads)
        sequences = float(part.batch)
        if not isinstance(rows, One):
            work = rows.q_len * rows.kv_len
            sequences = work.sum() / max(1, work.max(initial=1))
        most = self.plan.slices.most
        division = SliceShares.of(most, sequences * part.heads, num_threads())
        apart = self.taking is not None
        if apart:
            division = SliceShares(whole=False, together=most)

        def size(part: AtOnce, slices: int) -> int:
            return sum(each.size(*part, slices) for each in self.learned.values())

        division, part = division.within(size, part, LARGEST_SUMS, apart=apart)
        if self.taking is not None and not self.learned:
            part = AtOnce(*map(min, part, self.taking.at_once))
        return division, part

    def _run(
        self,
        fields: dict[str, int | float],
        sums: dict[str, SumsOfRows],
        begin: Callable[[Round], None],
    ) -> None:
        """Launch the kernel for all rounds, and add up what slices leave."""
        batch, most = self._batch, self.plan.slices.most
        touched = Touched()
        for part in self.division.rounds(self.plan.slices, batch, self.key_heads, self.part):
            begin(part)
            taking = self.taking
            here = fields if taking is None else taking.fields(fields, sums, part)
            self._launch(here, part, touched)
            for each in self.learned.values():
                each.end(part)
            all_rows = (part.b_stop, part.h_stop) == (batch, self.key_heads)
            if taking is not None:
                taking.end(sums, part, touched, last=all_rows)
                touched = Touched()
            if all_rows:
                for captured in self.learned.values():
                    captured.add_slices()
                if self.taking is None and not self.division.whole:
                    for keys in sums.values():
                        keys.add_slices(touched, last=part.s_stop == most)
                    touched = Touched()

    def _launch(self, fields: dict[str, int | float], part: Round, touched: Touched) -> None:
        """Launch the shares of a round."""
        placed, above, rows = self.placed, self.above, self.placed.rows
        shares = Shares.of(rows, self.plan.slices, self.division, self.key_heads, part)
        if shares.first == shares.stop or 0 in placed.query.shape[:3]:
            return
        if not self.division.whole:
            ends = np.zeros((shares.stop, 2), np.int64)
            fields = fields | {"touched": ends.ctypes.data}
        launcher = self.plan.launcher
        launcher.terms.check_gradients(fields)
        count = 1 if isinstance(rows, One) else rows.num
        launcher.launch(
            placed,
            Records(shares.table, count, num_products(placed, rows), shares.stop),
            Result(above.out, above.lse),
            self.captures,
            lists=self.plan.lists,
            more=GRADIENTS_PART.pack(fields),
            first=shares.first,
        )
        if not self.division.whole:
            chosen = slice(shares.first, shares.stop)
            touched.note(shares.slices(self.key_heads)[chosen], ends[chosen])

    # --- sums

    @property
    def _num_keys(self) -> int:
        """Return the keys of the sequence that has most."""
        rows = self.placed.rows
        return rows.kv_end - rows.kv_begin if isinstance(rows, One) else longest(rows.kv_len)

    def _sums_of_rows(self, heads: int, *width: int) -> SumsOfRows:
        """Return zeros [slices, B, heads, rows, *width]; with pages, rows are positions."""
        placed = self.placed
        batch, num_rows = placed.query.shape[0], placed.key.shape[2]
        if placed.page_table is not None:
            batch, num_rows = placed.sequences.num, longest(placed.sequences.kv_end)
        elif not isinstance(placed.rows, One):
            batch = 1
        if self.taking is not None:
            batch, heads = min(batch, self.part.batch), self.part.heads
        num_slices = 1 if self.division.whole else self.division.together
        kept = None if self.taking is None else self.taking.kept
        return SumsOfRows((num_slices, batch, heads, num_rows, *width), self.dtype, kept)

    def _total(self, sums: SumsOfRows, like: Tensor) -> Tensor:
        """Return the gradient of keys or values, in the shape of `like`, from all sums."""
        total = sums.total
        if self.placed.page_table is not None:
            total = in_pages(total, self.placed, like)
        elif like.shape[0] != total.shape[0]:  # all batches share one batch of keys
            total = folded(total).unsqueeze(0)
        return total[..., : like.shape[3]].contiguous()

    def _sums_of_capture(self, index: int) -> SumsOfCapture:
        """Return the sums of one captured tensor.

        Sequences can share a sum if every load is indexed by b: then they add to different
        elements. The same is true of heads and h, and of slices and q_idx.
        """
        loads = [load for load in self.plan.loads if load.payload == index]
        b, h, q = (
            all(name in direct_inputs(load) for load in loads) for name in ("b", "h", "q_idx")
        )
        return SumsOfCapture(
            self.captures[index], self.dtype, (b, h, q), apart=self.taking is not None
        )


def _strided(name: str, tensor: Tensor, axes: tuple[str, ...]) -> dict[str, int | float]:
    """Return the address and strides of a tensor as fields; all share a batch of 1."""
    steps = tensor.stride()
    named = {
        f"{name}_{axis}": 0 if axis == "batch" and size == 1 else step
        for axis, size, step in zip(axes, tensor.shape, steps, strict=False)
    }
    return {name: tensor.data_ptr(), **named}
